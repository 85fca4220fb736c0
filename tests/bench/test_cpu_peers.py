"""The benchmark against CPU peers: its rates, its tables, and which systems it names as missing."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
from benchmarks.cpu_peers.prepare import group_size, with_former_rope_names
from benchmarks.cpu_peers.server_table import ServerOutcome, add, render_servers
from benchmarks.cpu_peers.servers import load_options
from benchmarks.cpu_peers.steps import Line, Point, decode_point, prefill_point, random_prompts
from benchmarks.cpu_peers.systems import LLAMA_FORMATS, PeersFolder, System, all_systems, select
from benchmarks.cpu_peers.table import Outcome, Spread, ratios, render, to_json
from benchmarks.cpu_peers.worker import Run
from benchmarks.cpu_vs_peers import competing
from gguf.constants import LlamaFileType

from servekit.bench import result
from tests.store.gguf_files import write_gguf

POINTS = ("prefill 512", "decode 1", "decode 16")


def outcomes() -> list[Outcome]:
    """Two of ours, two peers and a reference that is faster than all; one peer was not measured everywhere."""
    return [
        Outcome("servekit int8", "ours", peak_bytes=300 * 2**20, rates={"prefill 512": [900, 1000, 1300]}),
        Outcome("servekit int4", "ours", rates={"prefill 512": [800.0], "decode 1": [90.0, 110.0], "decode 16": [640]}),
        Outcome("llama.cpp Q8_0", "peer", rates={"prefill 512": [400.0], "decode 1": [80.0], "decode 16": [200.0]}),
        Outcome("onnxruntime int4", "peer", status="ended", rates={"prefill 512": [500.0], "decode 1": [50.0]}),
        Outcome("transformers fp32", "reference", rates={"prefill 512": [9000.0]}),
        Outcome("openvino int8", "peer", status="not installed: no /x/python"),
    ]


def test_rates_count_what_they_say() -> None:
    run = Run(first_s=2.0, last_s=6.0, tokens=[])

    assert prefill_point(512).rate(run) == 256.0
    # 15 tokens after the first, of four sequences, in four seconds.
    assert decode_point(4, 128, 16).rate(run) == 15.0
    assert [prefill_point(512).name, decode_point(4, 128, 16).name] == ["prefill 512", "decode 4"]


def test_prompts_depend_on_the_shape_alone() -> None:
    point = decode_point(3, 20, 16)
    prompts = random_prompts(point, 1000)

    assert prompts == random_prompts(decode_point(3, 20, 64), 1000)
    assert [len(prompt) for prompt in prompts] == [20, 20, 20]
    assert len({tuple(prompt) for prompt in prompts}) == 3
    assert all(256 <= token < 1000 for prompt in prompts for token in prompt)


def test_a_spread_tells_how_far_its_ends_are() -> None:
    spread = Spread.of([110.0, 90.0, 100.0, 140.0, 95.0])

    assert (spread.median, spread.low, spread.high) == (100.0, 90.0, 140.0)
    assert spread.sides == "-10+40%"


def test_the_ratio_is_of_the_best_of_ours_to_the_best_peer() -> None:
    found = {ratio.point: ratio for ratio in ratios(outcomes(), POINTS)}

    assert (found["prefill 512"].ours, found["prefill 512"].peer) == ("servekit int8", "onnxruntime int4")
    assert found["prefill 512"].value == 2.0
    assert (found["decode 1"].ours, found["decode 1"].peer) == ("servekit int4", "llama.cpp Q8_0")
    assert found["decode 1"].value == 1.25
    assert found["decode 16"].value == 3.2


def test_no_ratio_without_a_peer() -> None:
    assert ratios(outcomes()[:2], POINTS) == []


def test_the_table_fits_a_terminal_and_drops_nobody() -> None:
    points = ["prefill 512", *(f"decode {batch}" for batch in (1, 2, 4, 8, 16, 32))]
    full = Outcome(
        "onnxruntime int4", "peer", peak_bytes=9999 * 2**20, rates={point: [100.0, 9999.0] for point in points}
    )
    text = render([full, *outcomes()[1:]], points)

    assert max(map(len, text.splitlines())) <= 80
    assert "openvino int8: not installed: no /x/python" in text
    assert "onnxruntime int4: ended" in text
    assert all(outcome.name in text for outcome in outcomes()[1:])


def test_the_table_has_medians_and_ratios() -> None:
    lines = {line[:18].strip(): line[18:].split() for line in render(outcomes(), POINTS).splitlines()}

    assert lines["servekit int8"] == ["1000", "300"]
    assert lines["servekit int4"] == ["800", "100", "640"]
    assert lines["best peer"] == ["500", "80.0", "200"]
    assert lines["best servekit"] == ["1000", "100", "640"]
    assert lines["ratio"] == ["2.00", "1.25", "3.20"]


def test_a_long_name_pushes_no_number_out_of_its_column() -> None:
    names = ("servekit int4", "llama.cpp Q4_0-pure", "servekit int4:Q4_0-pure")
    text = render([Outcome(name, "ours", rates={"prefill 512": [1234.0]}) for name in names], ["prefill 512"])
    lines = text.splitlines()

    assert [len(line) for line in lines if line.endswith("1234")] == [26, 26, 26]


def test_json_keeps_the_values_behind_a_median() -> None:
    found = to_json(outcomes()[0], POINTS)

    assert found["tokens_per_s"] == {
        "prefill 512": {"median": 1000, "low": 900, "high": 1300, "values": [900, 1000, 1300]}
    }
    assert (found["name"], found["status"], found["peak_bytes"]) == ("servekit int8", None, 300 * 2**20)


class FakeLine:
    """A Line whose systems halve their rate when the values are marked; one of them failed before."""

    def __init__(self) -> None:
        self.outcomes = [Outcome("servekit int4", "ours"), Outcome("llama.cpp F16", "peer", status="ended")]

    def warm_up(self, points: Sequence[Point]) -> None:
        """Nothing to warm."""

    def measure(self, points: Sequence[Point], round_: int, suffix: str = "") -> None:
        """100, 101, ... tokens/s, or half of that."""
        for point in points:
            rate = (100.0 + round_) / (2 if suffix else 1)
            self.outcomes[0].rates.setdefault(point.name + suffix, []).append(rate)


def test_beside_a_busy_process_the_share_of_the_undisturbed_rate_counts() -> None:
    found, text = competing(cast(Line, FakeLine()), argparse.Namespace(rounds=3, quick=True))

    assert found["shares"] == {"servekit int4": 0.5}
    assert found["systems"][0]["tokens_per_s"]["decode 16"]["values"] == [100.0, 101.0, 102.0]
    assert "llama.cpp F16           ended" in text
    assert max(map(len, text.splitlines())) <= 80


def summary(value: float) -> result.Summary:
    """A distribution whose p50 is `value` and whose p95 is twice that."""
    return result.Summary(count=9, mean=0, p50=value, p90=0, p95=2 * value, p99=0, max=0)


def closed(requests_per_s: float) -> result.Run:
    """A closed loop that was slower while it filled and drained."""
    inner = result.Throughput(requests_per_s=requests_per_s, output_tokens_per_s=80 * requests_per_s)
    window = result.Window(start_s=1, end_s=9, throughput=inner, mean_in_flight=4, steady=True)
    return result.Run(concurrency=4, duration_s=10, throughput=result.Throughput(requests_per_s=0.1), window=window)


def opened(seconds: float) -> result.Run:
    """An open loop."""
    latency = result.Latency(ttft_s=summary(seconds), tpot_s=summary(seconds / 10), e2e_s=summary(seconds * 4))
    return result.Run(rate=1.0, duration_s=10, latency=latency)


def test_loads_give_capacity_and_latency() -> None:
    values = add(add({}, "closed", closed(2.0)), "open", opened(0.5))

    assert values == {
        "requests_per_s": [2.0],
        "tokens_per_s": [160.0],
        "ttft_p95_s": [1.0],
        "tpot_p50_s": [0.05],
        "e2e_p95_s": [4.0],
    }


def test_the_servers_table_says_how_many_times_better() -> None:
    ours = ServerOutcome("servekit", "servekit int4", trial=5.0, chosen=True, invalid=1)
    rival = ServerOutcome("llama-server", "llama-server Q4_0-pure", trial=2.0, chosen=True, peak_bytes=200 * 2**20)
    slow = ServerOutcome("llama-server", "llama-server F16", status="did not start")
    for outcome, rate, seconds in ((ours, 5.0, 0.25), (rival, 2.0, 0.5)):
        add(add(outcome.values, "closed", closed(rate)), "open", opened(seconds))
    text = render_servers([ours, rival, slow], 4)
    lines = {line[:22].strip(): line[22:].split() for line in text.splitlines()}

    assert lines["capacity, requests/s"] == ["5", "-0+0%", "2", "-0+0%", "2.50"]
    assert lines["TTFT p95, ms"] == ["500", "-0+0%", "1000", "-0+0%", "2.00"]
    assert lines["TPOT p50, ms"] == ["25", "-0+0%", "50", "-0+0%", "2.00"]
    assert lines["E2E p95, ms"] == ["2000", "-0+0%", "4000", "-0+0%", "2.00"]
    assert lines["runs to distrust"] == ["1", "0"]
    assert lines["llama-server F16"] == ["did", "not", "start"]
    assert "2.00 requests/s in one closed loop, peak 200 MiB" in text
    assert max(map(len, text.splitlines())) <= 80


def peers_folder(root: Path, *options: str) -> PeersFolder:
    """The peers in `root`, as the command line says it."""
    parser = argparse.ArgumentParser()
    PeersFolder.add_arguments(parser)
    return PeersFolder.from_arguments(parser.parse_args(["--peers-dir", str(root), *options]))


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A GGUF file that calls its own format Q8_0."""
    monkeypatch.setenv("SERVEKIT_HOME", str(tmp_path / "home"))
    own = {"general.file_type": int(LlamaFileType.MOSTLY_Q8_0)}
    return str(write_gguf(tmp_path / "own.gguf", extra=own))


def test_peers_that_are_not_there_are_named(tmp_path: Path, gguf: str) -> None:
    systems = all_systems(peers_folder(tmp_path), gguf, ["none", "int3"], 2)
    missing = {system.name: system.missing for system in systems}

    assert missing["servekit none"] is None
    assert missing["servekit int3"] is not None
    assert "this version offers --quantize" in missing["servekit int3"]
    assert missing["llama.cpp Q8_0"] == f"not installed: no {tmp_path}/llama/bin/python"
    assert missing["openvino int4"] == f"not installed: no {tmp_path}/openvino/bin/python"
    assert missing["transformers fp32"] is None


def test_a_peer_without_its_model_is_not_prepared(tmp_path: Path, gguf: str) -> None:
    folder = peers_folder(tmp_path, "--models-dir", str(tmp_path / "tiny"))
    python = folder.python("llama")
    python.parent.mkdir(parents=True)
    python.touch()
    missing = {system.name: system.missing for system in all_systems(folder, gguf, [], 2)}

    assert missing["llama.cpp F16"] == f"not prepared: no {tmp_path}/tiny/llama-F16.gguf"
    assert missing["llama.cpp Q8_0"] is None, "the model's own file"
    assert {f"llama.cpp {name}" for name in LLAMA_FORMATS} <= set(missing)


def test_a_file_of_another_format_is_measured_beside_those_that_are_made(tmp_path: Path, gguf: str) -> None:
    own = write_gguf(tmp_path / "mixed.gguf", extra={"general.file_type": int(LlamaFileType.MOSTLY_Q4_K_M)})
    files = peers_folder(tmp_path).llama_models(str(own))

    assert list(files) == ["Q4_K_M", *LLAMA_FORMATS]
    assert files["Q4_K_M"] == own
    assert files["Q8_0"] == tmp_path / "models" / "llama-Q8_0.gguf"


def test_ours_can_be_measured_with_the_file_of_a_peer(tmp_path: Path, gguf: str) -> None:
    folder = peers_folder(tmp_path)
    made = folder.models / "llama-Q4_0.gguf"

    def ours() -> System:
        return all_systems(folder, gguf, ["int4:Q4_0"], 2)[0]

    assert (ours().name, ours().missing) == ("servekit int4:Q4_0", f"not prepared: no {made}")
    made.parent.mkdir()
    made.touch()
    assert ours().missing is None
    assert ours().command[-4:] == (str(made), "2", "int4", "auto")


def test_ours_can_be_measured_with_keys_and_values_of_another_dtype(tmp_path: Path, gguf: str) -> None:
    eight, unknown = all_systems(peers_folder(tmp_path), gguf, ["int8+q8_0", "int8+q3"], 2)[:2]

    assert (eight.name, eight.missing, eight.command[-2:]) == ("servekit int8+q8_0", None, ("int8", "q8_0"))
    assert unknown.missing is not None
    assert "--kv-dtype" in unknown.missing


def test_safetensors_are_for_everyone_but_llama(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "model.safetensors").touch()
    missing = {system.name: system.missing for system in all_systems(peers_folder(tmp_path), str(tmp_path), [], 2)}

    assert missing["llama.cpp"] == "it reads GGUF files only"
    assert "openvino int8" in missing


def test_a_model_without_a_template_is_loaded_with_completions(tmp_path: Path, gguf: str) -> None:
    chatty = write_gguf(tmp_path / "chatty.gguf", chat_template="{{ messages[0].content }}")

    assert load_options(gguf)[-2:] == ("--endpoint", "completions")
    assert load_options(str(chatty))[-2:] == ("--endpoint", "chat")


def test_groups_divide_the_rows_of_every_matrix(tmp_path: Path) -> None:
    def size(**sizes: int) -> int:
        (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 4, **sizes}), encoding="utf-8")
        return group_size(tmp_path)

    assert size(hidden_size=576, intermediate_size=1536) == 64
    assert size(hidden_size=640, intermediate_size=2048) == 128
    assert size(hidden_size=640, intermediate_size=2048, head_dim=24) == 32


def test_rope_settings_get_the_names_that_every_version_reads() -> None:
    one = with_former_rope_names(
        {"head_dim": 16, "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}}
    )
    two = with_former_rope_names(
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        }
    )

    assert one == {"head_dim": 16, "rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert two == {"rope_theta": 1e6, "rope_scaling": None, "rope_local_base_freq": 1e4}


def test_systems_are_chosen_by_how_their_names_start() -> None:
    systems = [System(name, (), None) for name in ("servekit int4", "llama.cpp Q4_0", "llama.cpp F16")]

    assert [system.name for system in select(systems, "servekit, llama.cpp Q")] == ["servekit int4", "llama.cpp Q4_0"]
    assert select(systems, "") == systems
