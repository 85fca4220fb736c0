"""Fitted step times: they are found again in runs that were made with known ones, and the error is told honestly."""

from itertools import islice
from pathlib import Path
from random import Random

import pytest

from servekit.bench.arrivals import arrival_times
from servekit.bench.fit import ServerLimits, cross_validate, fit_run_file, fit_step_times, limits_from
from servekit.bench.measure import measure
from servekit.bench.result import Run, RunFile, Target, encode_run_file
from servekit.bench.sim import SimRequest, StepTimes, scheduler_config, simulate
from servekit.bench.workload import output_lengths
from servekit.cli.main import run
from servekit.errors import InputError
from tests.bench.records import refused

TRUE = StepTimes(base=0.012, per_sequence=0.003, per_prefill_token=0.0008)
PROPS = {
    "config": {"parallel": 4, "max_num_batched_tokens": 256, "scheduling": "continuous", "static_wait": 0.5},
    "kv": {"block_size": 16, "num_blocks": 201},
}


def simulated(rate: float, *, slots: int = 4, chunks: bool = True, timings: bool = True, late: float = 0.0) -> Run:
    """A run of a server whose steps take TRUE, as clients see it: everything arrives `late`."""
    rng = Random(5)
    times, lengths = arrival_times("poisson", rate, seed=2), output_lengths([16, 32, 64], 2)
    requests = [SimRequest(at, rng.choice([40, 110, 300]), next(lengths)) for at in islice(times, 60)]
    records = simulate(requests, scheduler_config(requests, slots=slots), TRUE).records
    for record in records:
        assert record.first_token_s is not None
        assert record.end_s is not None
        record.first_token_s += late
        record.end_s += late
        record.chunks = [(at + late, tokens) for at, tokens in record.chunks] if chunks else []
        record.timings = record.timings if timings else None
    return measure(records, rate=rate)


@pytest.mark.parametrize("chunks", [True, False])
@pytest.mark.parametrize("timings", [True, False])
def test_known_step_times_are_found_again(chunks: bool, timings: bool) -> None:
    runs = [simulated(rate, chunks=chunks, timings=timings) for rate in (0.5, 1.0, 2.0)]

    found = fit_step_times(runs, ServerLimits(4))

    assert found.times.base == pytest.approx(TRUE.base, rel=0.05)
    assert found.times.per_sequence == pytest.approx(TRUE.per_sequence, rel=0.1)
    assert found.times.per_prefill_token == pytest.approx(TRUE.per_prefill_token, rel=0.05)
    assert found.relative_error < 0.03
    assert found.left_out == ()


def test_runs_that_were_kept_out_are_predicted() -> None:
    checks = cross_validate([simulated(rate, late=0.002) for rate in (0.5, 1.0, 2.0)], ServerLimits(4))

    assert [check.rate for check in checks] == [0.5, 1.0, 2.0]
    for check in checks:
        assert check.held_out
        assert {found.metric for found in check.predictions} >= {"ttft_p95_s", "e2e_p95_s", "output_tokens_per_s"}
        assert all(abs(found.error) < 0.1 for found in check.predictions), check


def test_a_single_run_predicts_itself_and_says_so() -> None:
    (check,) = cross_validate([simulated(1.0)], ServerLimits(4))

    assert not check.held_out


def test_what_a_run_cannot_show_is_left_out() -> None:
    """With answers only and always one at a time, the sequence cannot be told from the step."""
    requests = [SimRequest(float(3 * index), 1, 20) for index in range(12)]
    records = simulate(requests, scheduler_config(requests, slots=1), TRUE).records
    for record in records:
        record.input_tokens = 0

    found = fit_step_times([measure(records)], ServerLimits(1))

    assert set(found.left_out) == {"per_sequence", "per_prefill_token"}
    assert found.times.base == pytest.approx(TRUE.base + TRUE.per_sequence)


def test_too_few_phases_are_refused() -> None:
    one = simulated(1.0)
    one.records = one.records[:2]

    with pytest.raises(InputError, match="too few"):
        fit_step_times([one], ServerLimits(4))


def test_failed_requests_are_no_basis() -> None:
    run_of_failures = Run(duration_s=1.0, records=[refused(index) for index in range(20)])

    with pytest.raises(InputError, match="too few"):
        fit_step_times([run_of_failures], ServerLimits(4))


def test_limits_come_from_the_server_s_properties() -> None:
    found = limits_from(Target(url="u", kind="servekit", props=PROPS), slots=9)

    assert found == ServerLimits(slots=4, max_num_batched_tokens=256, block_size=16, num_blocks=200)
    assert limits_from(Target(url="u"), slots=9) == ServerLimits(slots=9)
    with pytest.raises(InputError) as caught:
        limits_from(Target(url="u"))
    assert caught.value.param == "slots"


def test_invalid_runs_are_no_basis() -> None:
    good, bad = simulated(1.0), simulated(2.0)
    bad.valid = False
    target = Target(url="u", kind="servekit", props=PROPS)

    fitted = fit_run_file(RunFile(target=target, runs=[good, bad]))

    assert [one.rate for one in fitted.runs] == [1.0]
    with pytest.raises(InputError, match="no valid run"):
        fit_run_file(RunFile(target=target, runs=[bad]))


def test_the_command_fits_predicts_and_asks_what_if(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    runs = [simulated(rate) for rate in (1.0, 2.0)]
    file.write_bytes(encode_run_file(RunFile(target=Target(url="u", kind="servekit", props=PROPS), runs=runs)))

    assert run(["bench", "sim", "--fit", str(file), "--slots", "8"]) == 0

    shown = capsys.readouterr().out
    assert "predicted from the other runs" in shown
    assert "Simulated: 8 slots" in shown
    assert shown.count("continuous") == 2
