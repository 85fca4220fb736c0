"""Simulated runs as run files, so that whatever reads a measured run reads a simulated one. It must not simulate."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from servekit.bench.fit import FittedFile, ServerLimits
from servekit.bench.limit import KV_BLOCKS, NONE, SLOTS, TOKEN_BUDGET
from servekit.bench.measure import measure
from servekit.bench.result import Limit, Record, Run, RunFile, Target
from servekit.bench.sim import SimRun

SIMULATOR: Final = "simulator"
BATCH: Final = "batch (policy)"
_OFTEN: Final = 0.25


def run_of(simulated: SimRun, policy: str, *, rate: float | None, slo: Mapping[str, float] | None = None) -> Run:
    """One simulated run with the metrics of a measured one, its limit, and the counters a server would show."""
    run = measure(
        without_chunks(simulated.records), rate=rate, arrival="recorded" if rate is None else "poisson", slo=slo
    )
    run.limit = name_limit(simulated)
    run.server = {
        "steps": float(len(simulated.steps)),
        "batched_tokens": float(sum(step.num_decoding + step.num_prefill_tokens for step in simulated.steps)),
        "preemptions": float(simulated.num_preemptions),
        "model_seconds": simulated.busy_s,
        "step_seconds": simulated.busy_s,
    }
    run.notes = [f"policy {policy}"]
    return run


def without_chunks(records: Sequence[Record]) -> list[Record]:
    """Records without the time of every token: it is that of a step, and of no use outside the simulation."""
    for record in records:
        record.chunks = []
    return list(records)


def name_limit(simulated: SimRun) -> Limit:
    """What the requests waited for, by the share of the busy time."""
    shares = {
        KV_BLOCKS: (simulated.waiting_for_blocks, "somebody waited with a slot free and too few KV blocks"),
        SLOTS: (simulated.waiting_for_slots, "somebody waited while all slots were taken"),
        BATCH: (simulated.waiting_for_batch, "somebody waited for a batch to end"),
        TOKEN_BUDGET: (simulated.budget_full, "the steps took all the tokens they may"),
    }
    found = [name for name, (share, _) in shares.items() if share >= _OFTEN]
    evidence = [f"in {share:.0%} of the busy time {what}" for share, what in shares.values() if share >= 0.005]
    if simulated.num_preemptions:
        evidence.insert(0, f"{simulated.num_preemptions} preemptions")
        found = [KV_BLOCKS, *(name for name in found if name != KV_BLOCKS)]
    return Limit(name=found[0] if found else NONE, evidence=evidence or ["nobody waited"], also=found[1:])


def run_file(
    runs: Sequence[Run], limits: ServerLimits, *, load: dict[str, Any], seed: int, fitted: FittedFile | None = None
) -> RunFile:
    """The file of several simulated runs, with the limits where a servekit server shows them."""
    if fitted is not None:
        load = {**load, "fit": fit_fields(fitted)}
    return RunFile(
        command="bench sim",
        target=Target(url=SIMULATOR, model="step times", kind=SIMULATOR, props=_props(limits)),
        seed=seed,
        load=load,
        runs=list(runs),
    )


def fit_fields(fitted: FittedFile) -> dict[str, Any]:
    """The fit and its checks as JSON."""
    return {
        "step_times": asdict(fitted.fit.times),
        "phases": fitted.fit.num_phases,
        "relative_error": fitted.fit.relative_error,
        "left_out": list(fitted.fit.left_out),
        "checks": [
            {
                "rate": check.rate,
                "repeat": check.repeat,
                "held_out": check.held_out,
                "predictions": [{**asdict(found), "error": found.error} for found in check.predictions],
            }
            for check in fitted.checks
        ],
    }


def _props(limits: ServerLimits) -> dict[str, Any]:
    config = {
        "parallel": limits.slots,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "scheduling": limits.policy,
        "static_wait": limits.static_wait,
    }
    kv: dict[str, Any] = {"block_size": limits.block_size}
    if limits.num_blocks is not None:
        kv |= {"num_blocks": limits.num_blocks + 1, "num_tokens": limits.num_blocks * limits.block_size}
    return {"config": config, "kv": kv}
