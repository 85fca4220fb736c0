"""The demo model's greedy answers equal transformers', token for token, in float32."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmarks.peers import transformers_model

from servekit.config import EngineConfig
from servekit.engine.core.request import Request, SamplingParams
from servekit.engine.load import LoadedEngine, OpenModel, load_engine, open_model
from servekit.engine.models.gguf import GgufSource
from servekit.store.resolve import find_model
from tests.engine.native.kernels import needs_kernels

pytestmark = pytest.mark.demo

NUM_TOKENS = 64
EOS = 2
QUESTIONS = [
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a limerick about a cat who codes.",
    "List three uses of a paper clip.",
    "Translate 'good morning' into Spanish, German and Italian.",
    "What comes next: 2, 4, 8, 16?",
    "বাংলাদেশের রাজধানী কী?",
    "আমাকে একটি ছোট কবিতা লিখে দাও।",
    "তুমি কেমন আছো? বাংলায় উত্তর দাও।",
    "দুই আর তিন যোগ করলে কত হয়?",
    "def fibonacci(n):\n    '''Return the n-th Fibonacci number.'''",
    "Fix this: for (int i = 0; i <= len; i++) { sum += a[i]; }",
    "SELECT name, COUNT(*) FROM users GROUP BY name; -- explain",
    "Write a regular expression that matches an IPv4 address.",
    "What does 😀 mean? And 👨‍👩‍👧? And 🇧🇩?",
    "Reply only with emoji: happy, sad, angry 😡🎉✨",
    "日本の首都はどこですか?",
    "¿Qué significa «être» en español? — é, ñ, ü",
    "x = 3.14159\t# tabs\tand  double  spaces\n\n\nnewlines",
    "Tell me about the year 1984 in 100 words.",
]


@pytest.fixture(scope="module")
def model() -> OpenModel:
    return open_model(find_model("demo"))


@pytest.fixture(scope="module")
def loaded(model: OpenModel) -> LoadedEngine:
    return load_engine(model, EngineConfig(dtype="float32", device="cpu", threads=1, max_model_len=512, parallel=8))


@pytest.fixture(scope="module")
def oracle(model: OpenModel) -> Any:
    return transformers_model(model)


def _greedy(oracle: Any, prompt: tuple[int, ...]) -> list[int]:
    """transformers' own greedy loop, up to and without the end-of-text token."""
    with torch.inference_mode():
        ids: list[int] = oracle.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=EOS,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
    return ids[:-1] if ids[-1] == EOS else ids


def _is_greedy(oracle: Any, prompt: tuple[int, ...], answer: list[int]) -> bool:
    """Whether each token is the most likely one after those before it, and the end was due: by induction, the same
    answer as the greedy loop's, for one forward pass instead of one a token."""
    with torch.inference_mode():
        best: list[int] = oracle(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 :].argmax(-1).tolist()
    return best[: len(answer)] == answer and (len(answer) == NUM_TOKENS or best[-1] == EOS)


async def _answers(loaded: LoadedEngine, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """The engine's token ids, all prompts at once."""
    engine = loaded.engine
    engine.start()

    async def answer(index: int) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
        generation = engine.generate(Request(str(index), prompts[index], params, time.monotonic()))
        return [token_id async for chunk in generation for token_id in chunk.token_ids]

    try:
        return await asyncio.gather(*map(answer, range(len(prompts))))
    finally:
        await engine.close()


def test_greedy_equals_transformers_on_twenty_prompts(loaded: LoadedEngine, oracle: Any) -> None:
    tokenizer = loaded.engine.tokenizer
    prompts = [tuple(tokenizer.encode_chat([{"role": "user", "content": question}])) for question in QUESTIONS]
    answers = asyncio.run(_answers(loaded, prompts))
    assert all(map(len, answers))
    wrong = [q for q, p, a in zip(QUESTIONS, prompts, answers, strict=True) if not _is_greedy(oracle, p, a)]
    assert not wrong
    for index in (6, 10, 15):  # Bangla, code, emoji through the loop itself
        assert answers[index] == _greedy(oracle, prompts[index])


@needs_kernels
def test_the_kernels_choose_the_same_tokens_nearly_always(model: OpenModel, oracle: Any) -> None:
    """By default the model is served in its own four bits; only inputs of products and the KV cache are rounded."""
    config = EngineConfig(device="cpu", threads=2, max_model_len=512, parallel=8)
    loaded = load_engine(replace(model, source=_reopened(model)), config)
    assert (loaded.config.quantize, loaded.config.attention) == ("int4", "native")
    tokenizer = loaded.engine.tokenizer
    prompts = [tuple(tokenizer.encode_chat([{"role": "user", "content": question}])) for question in QUESTIONS]
    answers = asyncio.run(_answers(loaded, prompts))
    same, total = 0, 0
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            best = oracle(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
        same += sum(a == b for a, b in zip(best, answer, strict=True))
        total += len(answer)
    assert total > 600
    assert same / total > 0.95


def test_the_pool_is_what_the_plan_promised(loaded: LoadedEngine) -> None:
    # 30 layers, keys and values, 3 heads of 64 in float32: 46,080 bytes a token.
    assert loaded.plan.bytes_per_token == 30 * 2 * 3 * 64 * 4 == 46_080
    assert loaded.kv_bytes == loaded.plan.kv_bytes == loaded.plan.num_blocks * 16 * 46_080
    assert loaded.plan.num_tokens == 8 * 512


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_the_plan_holds_for_every_kv_dtype(model: OpenModel, kv_dtype: Any) -> None:
    config = EngineConfig(dtype="bfloat16", kv_dtype=kv_dtype, kv_memory=10_000_000, threads=1, max_model_len=256)
    loaded = load_engine(replace(model, source=_reopened(model)), config)
    assert loaded.kv_bytes == loaded.plan.kv_bytes <= 10_000_000
    assert loaded.plan.block_bytes == 16 * {"float32": 46_080, "bfloat16": 23_040}[kv_dtype]


def _reopened(model: OpenModel) -> GgufSource:
    assert model.files.weights is not None
    return GgufSource(model.files.weights)
