"""Which lengths and KV dtypes the table of `servekit kv --table` has, and what fits in each."""

from servekit.kvcalc.plan import Plan, requests_at

_LENGTHS = (512, 2048, 8192, 32768, 131072, 524288)
_USUAL_DTYPES = ("fp8", "q4_0")


def capacity_table(plan: Plan, kv_dtypes: list[str]) -> tuple[list[str], list[tuple[int, list[int | None]]]]:
    """The KV dtypes, and for each length the requests that fit in each of them; None where that cannot be said.

    Lengths are the usual ones up to the model's context, the context itself, and the one asked for.
    """
    context = plan.model.shape.max_model_len or _LENGTHS[-1]
    lengths = sorted({length for length in _LENGTHS if length <= context} | {context, plan.num_tokens})
    names = kv_dtypes or list(dict.fromkeys([plan.kv_dtype.name, *_USUAL_DTYPES]))
    return names, [(length, [requests_at(plan, length, name).requests for name in names]) for length in lengths]
