"""A plan as JSON: stable keys, versioned, described in docs/kv.md."""

from fractions import Fraction
from typing import Any, Final

from servekit.kvcalc.memory import PoolPlan
from servekit.kvcalc.plan import Plan

VERSION: Final = 1


def report(plans: list[Plan]) -> dict[str, Any]:
    """The report for one model: the first plan, with the other KV dtypes under `other_kv_dtypes`."""
    plan = plans[0]
    shape, weights = plan.model.shape, plan.model.weights
    return {
        "version": VERSION,
        "model": plan.model.name,
        "model_type": shape.model_type,
        "num_layers": len(shape.layers),
        "context": shape.max_model_len,
        "kv": _kv(plan),
        "other_kv_dtypes": [_kv(other) | {"capacity": _capacity(other)} for other in plans[1:]],
        "weights": {
            "bytes": weights.num_bytes,
            "parameters": weights.num_parameters,
            "active_parameters": weights.active_parameters,
            "dtype": weights.dtype,
            "source": weights.source,
        },
        "capacity": _capacity(plan),
        "engine": _engine(plan.pool),
        "tensor_parallel": _tensor_parallel(plan),
        "draft": None
        if plan.draft is None
        else {"model": plan.draft.name, "weights_bytes": plan.draft.weights.num_bytes},
        "little": None
        if plan.needed is None
        else {
            "seconds_per_request": plan.needed.seconds,
            "concurrency": plan.needed.concurrency,
            "fits": plan.needed.fits,
        },
        "roofline": [
            {
                "batch": bound.batch,
                "weight_bytes_per_step": bound.weight_bytes,
                "kv_bytes_per_step": bound.kv_bytes,
                "seconds_per_step": bound.seconds,
                "tokens_per_second": bound.tokens_per_second,
            }
            for bound in plan.bounds
        ],
        "assumed": list(shape.assumed),
        "notes": [*shape.notes, *plan.warnings],
    }


def _kv(plan: Plan) -> dict[str, Any]:
    terms = plan.terms
    return {
        "dtype": plan.kv_dtype.name,
        "bytes_per_token": number(terms.bytes_per_token),
        "indexer_bytes_per_token": number(terms.indexer_bytes_per_token),
        "window_bytes_per_request": terms.window_bytes,
        "state_bytes_per_request": terms.state_bytes,
        "cross_bytes_per_source_token": terms.cross_bytes_per_source_token,
        "mtp_bytes_per_token": number(plan.mtp_bytes_per_token),
        "tokens": plan.num_tokens,
        "source_tokens": plan.source_tokens,
        "block_size": plan.load.block_size,
        "bytes_per_request": plan.request_bytes,
        "bytes_for_requests": None if plan.load.num_requests is None else plan.request_bytes * plan.load.num_requests,
        "steps": [
            {
                "term": step.growth.value,
                "layers": step.num_layers,
                "name": step.name,
                "formula": step.formula,
                "bytes": number(step.num_bytes),
            }
            for step in plan.steps
        ],
    }


def _capacity(plan: Plan) -> dict[str, Any]:
    budget = plan.budget
    only_kv = plan.load.kv_memory is not None
    return {
        "requests": plan.capacity.requests,
        "limit": plan.capacity.limit.value,
        "fits": plan.fits,
        "memory_bytes": budget.memory,
        "memory_name": "given for keys and values" if only_kv else plan.load.memory.name,
        "reserve_bytes": budget.reserve,
        "weights_bytes": budget.weights,
        "kv_bytes": budget.kv,
    }


def _engine(pool: PoolPlan | None) -> dict[str, int] | None:
    if pool is None:
        return None
    return {name: getattr(pool, name) for name in PoolPlan.__slots__}


def _tensor_parallel(plan: Plan) -> dict[str, Any] | None:
    devices = plan.load.num_devices
    if devices == 1:
        return None
    whole, one = plan.terms.bytes_per_token, plan.device_terms.bytes_per_token
    return {
        "devices": devices,
        "kv_bytes_per_token_per_device": number(one),
        "kv_bytes_per_request_per_device": plan.device_request_bytes,
        "kv_replication": float(one * devices / whole) if whole else 1.0,
    }


def number(value: Fraction) -> int | float:
    """An exact integer where it is one, else a float."""
    return value.numerator if value.denominator == 1 else float(value)
