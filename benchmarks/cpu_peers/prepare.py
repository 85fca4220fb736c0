"""Write the peers' models, all from the weights of one model: about two minutes.

    python -m benchmarks.cpu_peers.prepare --peers-dir DIR [--model demo] [--models-dir DIR/models]

The dequantised weights as a Hugging Face folder, GGUF files for llama.cpp, and what OpenVINO's and onnxruntime's
exporters make of the folder. What is there already stays; a peer that is not installed or that fails is named.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cpu_peers.systems import WEIGHT_FORMATS, PeersFolder
from servekit.engine.spec.json_files import read_json
from servekit.store.resolve import find_model

_ROOT = Path(__file__).parents[2]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_LARGEST_GROUP = 128  # OpenVINO's default


def main() -> None:
    """Write what is missing. Ends with 1 when a peer refused its model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    PeersFolder.add_arguments(parser)
    arguments = parser.parse_args()
    folder = PeersFolder.from_arguments(arguments)
    folder.models.mkdir(parents=True, exist_ok=True)
    checkpoint = folder.models / "hf"
    if not checkpoint.exists():
        write_checkpoint(arguments.model, checkpoint)
    weights = find_model(arguments.model).weights
    done = [
        _write_llama(folder, weights, name, target)
        for name, target in folder.llama_models(arguments.model).items()
        if weights is not None
    ]
    for name in WEIGHT_FORMATS:
        done += [_write_openvino(folder, checkpoint, name), _write_onnxruntime(folder, checkpoint, name)]
    sys.exit(not all(done))


def write_checkpoint(model: str, target: Path) -> None:
    """The float32 weights of a model with config and tokenizer, as transformers' own folder."""
    import transformers

    from benchmarks.peers import transformers_model
    from servekit.engine.load import open_model

    files = find_model(model)
    opened = open_model(files)
    peer = transformers_model(opened)
    # Greedy exports refuse sampling advice, and the peers need the end token only to be told to ignore it.
    ends = {name: opened.config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    peer.generation_config = transformers.GenerationConfig(**ends)  # type: ignore[no-untyped-call]
    partial = target.with_suffix(".partial")
    peer.save_pretrained(partial)
    config = read_json(partial / "config.json")
    (partial / "config.json").write_text(json.dumps(with_former_rope_names(config), indent=2), encoding="utf-8")
    for name in _TOKENIZER_FILES:
        if (files.directory / name).exists():
            shutil.copy(files.directory / name, partial)
    partial.rename(target)


def with_former_rope_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with its rope settings as transformers 4 spelled them: every version reads those."""
    found = dict(config)
    by_kind = found.pop("rope_parameters")
    whole = by_kind.get("full_attention", by_kind)
    scaling = {name: value for name, value in whole.items() if name != "rope_theta"}
    found["rope_theta"] = whole["rope_theta"]
    found["rope_scaling"] = None if whole["rope_type"] == "default" else scaling
    if "sliding_attention" in by_kind:
        found["rope_local_base_freq"] = by_kind["sliding_attention"]["rope_theta"]
    return found


def group_size(checkpoint: Path) -> int:
    """The largest power of two up to OpenVINO's default that divides the rows of every matrix in a folder."""
    config = read_json(checkpoint / "config.json")
    heads = config["num_attention_heads"]
    attention = heads * (config.get("head_dim") or config["hidden_size"] // heads)
    return math.gcd(config["hidden_size"], config["intermediate_size"], attention, _LARGEST_GROUP)


def _write_llama(folder: PeersFolder, weights: Path, name: str, target: Path) -> bool:
    command = [str(folder.python("llama")), "-m", "benchmarks.cpu_peers.llama_formats"]
    command += [str(weights), str(target.with_suffix(".partial")), *name.split("-")]
    return _make(target, command, folder.llama_environment())


def _write_openvino(folder: PeersFolder, checkpoint: Path, name: str) -> bool:
    target = folder.models / f"openvino-{name}"
    command = [str(folder.python("openvino")), "-m", "optimum.commands.optimum_cli", "export", "openvino"]
    command += ["--model", str(checkpoint), "--task", "text-generation-with-past", "--weight-format", name]
    command += ["--group-size", str(group_size(checkpoint))] if name == "int4" else []
    return _make(target, [*command, str(target.with_suffix(".partial"))])


def _write_onnxruntime(folder: PeersFolder, checkpoint: Path, name: str) -> bool:
    target = folder.models / f"onnxruntime-{name}"
    command = [str(folder.python("onnxruntime")), "-m", "benchmarks.cpu_peers.onnxruntime_builder"]
    command += ["--input", str(checkpoint), "--output", str(target.with_suffix(".partial")), "--precision", name]
    command += ["--execution_provider", "cpu"]
    # Without it the head computes logits for every token of a prompt.
    return _make(target, [*command, "--extra_options", "prune_lm_head=true"])


def _make(target: Path, command: Sequence[str], environment: dict[str, str] | None = None) -> bool:
    """Run a command that writes `target` with the suffix .partial, unless the target is there or the peer is not.

    False when it failed, which is said.
    """
    if target.exists():
        return True
    if not Path(command[0]).exists():
        print(f"{target.name}: not installed: no {command[0]}", file=sys.stderr)
        return True
    print(f"writing {target}", file=sys.stderr)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})}
    log = target.with_suffix(".log")
    with log.open("wb") as output:
        done = subprocess.run(command, cwd=_ROOT, env=environment, stdout=output, stderr=output, check=False)
    if done.returncode or not target.with_suffix(".partial").exists():
        print(f"{target.name} failed; see {log}", file=sys.stderr)
        return False
    target.with_suffix(".partial").rename(target)
    return True


if __name__ == "__main__":
    main()
