"""What a reader of a run has to know before he believes its numbers. It must not compute them."""

from collections.abc import Collection

from servekit.bench.result import Run

_CACHE_SHARE = 0.01
_FEW = 100


def remarks(run: Run, no_cache: bool, max_in_flight: int | None, left_out: Collection[str]) -> list[str]:
    """One sentence each: what biases the run, in which direction, and what to do about it."""
    found = [_cache(run, no_cache), _lengths(run, left_out), _loop(run), _failures(run), _steadiness(run)]
    if run.tokens.estimated:
        found.append(
            f"token counts are ESTIMATED from the text of {run.tokens.estimated} answers: they came without usage "
            "(--tokenizer counts with the model's own)"
        )
    if max_in_flight is not None and run.audit is not None and run.audit.late_sends:
        found.append(
            f"{run.audit.late_sends} of {run.requests.sent} requests were sent late, because {max_in_flight} were in "
            "flight; their latency counts from the schedule"
        )
    if 0 < run.requests.ok < _FEW:
        found.append(f"p99 of {run.requests.ok} answers is close to their maximum")
    return [remark for remark in found if remark]


def _cache(run: Run, no_cache: bool) -> str:
    cached, inputs = run.tokens.cached, run.tokens.input
    if not cached or not inputs or cached / inputs < _CACHE_SHARE:
        return ""
    said = f"{cached / inputs:.0%} of the prompt tokens came from a warm prefix cache (the server's cached_tokens)"
    if no_cache:
        return f"{said}, despite --no-cache: its salt does not reach the beginning of the prompt"
    return f"{said}: prompts that are new cost more; --no-cache measures those"


def _lengths(run: Run, left_out: Collection[str]) -> str:
    if not run.tokens.wrong_length:
        return ""
    why = ": the server does not know ignore_eos" if "ignore_eos" in left_out else ""
    return f"{run.tokens.wrong_length} of {run.requests.ok} answers are not as long as asked{why}"


def _loop(run: Run) -> str:
    if run.concurrency is None:
        return ""
    return "closed loop: a slow server slows its own load down, so its latencies are not those of an arrival rate"


def _failures(run: Run) -> str:
    if not run.requests.failed:
        return ""
    reason, times = next(iter(run.requests.errors.items()), ("no reason", 0))
    return f"{run.requests.failed} of {run.requests.sent} requests failed, {times} of them with: {reason}"


def _steadiness(run: Run) -> str:
    if run.window is None or run.window.steady:
        return ""
    return "requests pile up: the server does not keep up with this rate, and a longer run would show longer waits"
