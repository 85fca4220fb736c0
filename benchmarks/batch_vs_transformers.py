"""servekit's engine against transformers.generate: 16 greedy requests of 64 tokens, same weights, dtype and threads.

    python -m benchmarks.batch_vs_transformers [--dtype float32|bfloat16] [--rounds 5] [--json]

servekit gets the 16 as separate requests through Engine.generate; transformers gets them as one left-padded batch. The
two take turns, so that a busy moment of the machine strikes both; medians are compared. Also printed: what share of a
decode step is spent outside torch's kernels (from torch's profiler), and outside the model runner altogether.
"""

import argparse
import asyncio
import json
import platform
import statistics
import sys
import time
from typing import Any, Literal

import torch
import transformers

from benchmarks.peers import transformers_model
from servekit.config import EngineConfig
from servekit.engine.core.request import Request, SamplingParams
from servekit.engine.engine import Engine
from servekit.engine.load import load_engine, open_model
from servekit.store.resolve import find_model

NUM_REQUESTS = 16
NUM_TOKENS = 64
TOPICS = ["rivers", "the moon", "bread", "a lighthouse", "chess", "rain", "old maps", "bees"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = asyncio.run(measure(arguments.dtype, arguments.rounds))
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:32} {value:.3g}" if isinstance(value, float) else f"{name:32} {value}")


async def measure(dtype: Literal["float32", "bfloat16"], rounds: int) -> dict[str, Any]:
    """Medians in tokens/s, their ratio, and where servekit's step goes."""
    config = EngineConfig(
        dtype=dtype,
        device="cpu",
        parallel=NUM_REQUESTS,
        max_model_len=1024,
        prefix_cache=False,
        max_num_batched_tokens=2048,
    )
    loaded = load_engine(open_model(find_model("demo")), config)
    peer = transformers_model(open_model(find_model("demo")), getattr(torch, dtype))
    engine = loaded.engine
    engine.start()
    # Two lengths a topic: ragged, as real requests are.
    questions = [
        f"Tell me about {topic}{' in detail, with an example' * (i % 2)}." for i, topic in enumerate(TOPICS * 2)
    ]
    prompts = [await engine.encode_chat([{"role": "user", "content": question}]) for question in questions]

    ours: list[float] = []
    theirs: list[float] = []
    for round_ in range(rounds + 1):
        first, second = await _timed_ours(engine, prompts, round_), _timed_theirs(peer, prompts)
        if round_:  # the first warms both
            ours.append(first)
            theirs.append(second)
        print(f"round {round_}: servekit {first:.1f}, transformers {second:.1f} tokens/s", file=sys.stderr)
    before = engine.stats()
    outside = await _share_outside_kernels(engine, prompts)
    after = engine.stats()
    await engine.close()
    steps_s, model_s = after.step_seconds - before.step_seconds, after.model_seconds - before.model_seconds
    return {
        "machine": f"{platform.processor() or platform.machine()}, {loaded.config.threads} threads",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "dtype": dtype,
        "servekit_tokens_per_s": statistics.median(ours),
        "servekit_spread": f"{min(ours):.1f} to {max(ours):.1f}",
        "transformers_tokens_per_s": statistics.median(theirs),
        "transformers_spread": f"{min(theirs):.1f} to {max(theirs):.1f}",
        "ratio": statistics.median(ours) / statistics.median(theirs),
        "outside_kernels_share": outside,
        "outside_runner_share": (steps_s - model_s) / steps_s,
    }


async def _timed_ours(engine: Engine, prompts: list[tuple[int, ...]], round_: int) -> float:
    began = time.perf_counter()
    await asyncio.gather(*(_answer(engine, f"{round_}-{i}", prompt) for i, prompt in enumerate(prompts)))
    return len(prompts) * NUM_TOKENS / (time.perf_counter() - began)


async def _answer(engine: Engine, request_id: str, prompt: tuple[int, ...]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    async for _ in engine.generate(Request(request_id, prompt, params, time.monotonic())):
        pass


@torch.inference_mode()
def _timed_theirs(peer: Any, prompts: list[tuple[int, ...]]) -> float:
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    began = time.perf_counter()
    peer.generate(
        ids, attention_mask=mask, do_sample=False, min_new_tokens=NUM_TOKENS, max_new_tokens=NUM_TOKENS, pad_token_id=0
    )
    return len(prompts) * NUM_TOKENS / (time.perf_counter() - began)


async def _share_outside_kernels(engine: Engine, prompts: list[tuple[int, ...]]) -> float:
    """1 - time inside torch operators / time of all steps, both under the profiler (which itself adds to the former
    less than to the latter, so the share is an upper bound)."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    before = engine.stats().step_seconds
    with torch.profiler.profile(activities=activities, experimental_config=config) as profile:
        await _timed_ours(engine, prompts, -1)
    in_steps = engine.stats().step_seconds - before
    inside = sum(event.self_cpu_time_total for event in profile.key_averages()) / 1e6
    return float(1 - inside / in_steps)


if __name__ == "__main__":
    main()
