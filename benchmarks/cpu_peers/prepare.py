"""Write the peers' models, all from the weights of one GGUF model: about two minutes.

    python -m benchmarks.cpu_peers.prepare --peers-dir DIR [--model demo]

Into DIR/models: the dequantised weights as a Hugging Face folder, GGUF files for llama.cpp, and what OpenVINO's and
onnxruntime's exporters make of the folder. What is there already stays; a peer that is not installed is named.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cpu_peers.systems import LLAMA_FORMATS, WEIGHT_FORMATS, PeersFolder
from servekit.store.resolve import find_model

_ROOT = Path(__file__).parents[2]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_GROUP = 64  # OpenVINO's default of 128 divides no matrix whose rows have 576 columns


def main() -> None:
    """Write what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-dir", type=Path, required=True)
    parser.add_argument("--model", default="demo")
    arguments = parser.parse_args()
    folder = PeersFolder(arguments.peers_dir.absolute())
    folder.models.mkdir(parents=True, exist_ok=True)
    checkpoint = folder.models / "hf"
    if not checkpoint.exists():
        write_checkpoint(arguments.model, checkpoint)
    for name in LLAMA_FORMATS:
        _write_llama(folder, arguments.model, name)
    for name in WEIGHT_FORMATS:
        _write_openvino(folder, checkpoint, name)
        _write_onnxruntime(folder, checkpoint, name)


def write_checkpoint(model: str, target: Path) -> None:
    """The float32 weights of a GGUF model with config and tokenizer, as transformers' own folder."""
    import transformers

    from benchmarks.peers import transformers_llama
    from servekit.engine.load import open_model

    files = find_model(model)
    opened = open_model(files)
    llama = transformers_llama(opened)
    # Greedy exports refuse sampling advice, and the peers need the end token only to be told to ignore it.
    ends = {name: opened.config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    llama.generation_config = transformers.GenerationConfig(**ends)  # type: ignore[no-untyped-call]
    partial = target.with_suffix(".partial")
    llama.save_pretrained(partial)
    for name in _TOKENIZER_FILES:
        if (files.directory / name).exists():
            shutil.copy(files.directory / name, partial)
    partial.rename(target)


def _write_llama(folder: PeersFolder, model: str, name: str) -> None:
    source, target = find_model(model).weights, folder.llama_model(name, model)
    assert source is not None, "only GGUF models are wrapped"
    command = [str(folder.python("llama")), "-m", "benchmarks.cpu_peers.llama_formats"]
    command += [str(source), str(target.with_suffix(".partial")), *name.split("-")]
    _make(target, command, folder.llama_environment())


def _write_openvino(folder: PeersFolder, checkpoint: Path, name: str) -> None:
    target = folder.models / f"openvino-{name}"
    command = [str(folder.python("openvino")), "-m", "optimum.commands.optimum_cli", "export", "openvino"]
    command += ["--model", str(checkpoint), "--task", "text-generation-with-past", "--weight-format", name]
    command += ["--group-size", str(_GROUP)] if name == "int4" else []
    _make(target, [*command, str(target.with_suffix(".partial"))])


def _write_onnxruntime(folder: PeersFolder, checkpoint: Path, name: str) -> None:
    target = folder.models / f"onnxruntime-{name}"
    command = [str(folder.python("onnxruntime")), "-m", "onnxruntime_genai.models.builder", "--input", str(checkpoint)]
    command += ["--output", str(target.with_suffix(".partial")), "--precision", name, "--execution_provider", "cpu"]
    # Without it the head computes logits for every token of a prompt.
    _make(target, [*command, "--extra_options", "prune_lm_head=true"])


def _make(target: Path, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
    """Run a command that writes `target` with the suffix .partial, unless the target is there. A failure ends all."""
    if target.exists():
        return
    if not Path(command[0]).exists():
        print(f"{target.name}: not installed: no {command[0]}", file=sys.stderr)
        return
    print(f"writing {target}", file=sys.stderr)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})}
    log = target.with_suffix(".log")
    with log.open("wb") as output:
        done = subprocess.run(command, cwd=_ROOT, env=environment, stdout=output, stderr=output, check=False)
    if done.returncode:
        raise SystemExit(f"{target.name} failed; see {log}")
    target.with_suffix(".partial").rename(target)


if __name__ == "__main__":
    main()
