"""demo-embedding (all-MiniLM-L6-v2): its vectors are sentence-transformers', alone and in ragged batches.

The oracle is what sentence-transformers does with this model: transformers' hidden states, mean, unit length.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from servekit.config import EngineConfig
from servekit.engine.core.embed_queue import EmbedInput
from servekit.engine.device.cpu import CpuDevice
from servekit.engine.embedding_model import BuiltEmbedder, build_embedder
from servekit.engine.open_embedder import open_embedder
from servekit.engine.text.input_encoder import InputEncoder
from servekit.store.resolve import LocalModel, find_model

pytestmark = pytest.mark.demo

_SENTENCES = (
    "the river runs past seven old houses while a cat sleeps quickly on warm stones and nobody reads 42 letters;",
    "বাংলা ভাষায় নদী আর বৃষ্টি নিয়ে অনেক গান আছে Über die Brücke fährt ein Zug нач́ало история",
    "日本語の文字と本 مرحبا بالعالم café naïve 😀 e=mc² foo_bar(baz) https://example.org/a?b=c",
)
_WORDS = [word for sentence in _SENTENCES for word in sentence.split()]


def _texts() -> list[str]:
    """200 texts of 1 to 180 words in many scripts, cut where the model stops reading."""
    rng = np.random.default_rng(7)
    return [" ".join(rng.choice(_WORDS, int(rng.integers(1, 180)))) for _ in range(200)]


@pytest.fixture(scope="module")
def files() -> LocalModel:
    return find_model("demo-embedding")


@pytest.fixture(scope="module")
def oracle(files: LocalModel) -> Any:
    return transformers.AutoModel.from_pretrained(files.directory, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def encoder(files: LocalModel) -> InputEncoder:
    return InputEncoder.from_directory(files.directory)


@pytest.fixture(scope="module")
def built(files: LocalModel) -> BuiltEmbedder:
    return build_embedder(open_embedder(files), EngineConfig(dtype="float32", threads=1), CpuDevice(), None)


def _ours(built: BuiltEmbedder, inputs: Sequence[EmbedInput], a_batch: int) -> torch.Tensor:
    runner = built.embedder.runner
    batches = [inputs[i : i + a_batch] for i in range(0, len(inputs), a_batch)]
    return torch.from_numpy(np.concatenate([runner.embed(batch).get() for batch in batches]))


@torch.inference_mode()
def _theirs(oracle: Any, inputs: Sequence[EmbedInput]) -> torch.Tensor:
    pooled = [oracle(torch.tensor([text.token_ids])).last_hidden_state[0].mean(0) for text in inputs]
    return torch.nn.functional.normalize(torch.stack(pooled), dim=-1)


def test_200_texts_alone_and_in_ragged_batches(built: BuiltEmbedder, oracle: Any, encoder: InputEncoder) -> None:
    limit = built.embedder.max_tokens
    assert limit == 256
    inputs = [encoder.truncate(text, limit, "right") for text in encoder.encode(_texts())]
    lengths = [len(text.token_ids) for text in inputs]
    assert min(lengths) < 10
    assert max(lengths) == limit
    expected = _theirs(oracle, inputs)
    for a_batch in (1, 16):
        cosines = (_ours(built, inputs, a_batch) * expected).sum(dim=1)
        assert float(cosines.min()) >= 0.9999


def test_token_ids_are_those_of_transformers(files: LocalModel, encoder: InputEncoder) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(files.directory)
    texts = _texts()[:50]
    expected = [tokenizer(text, truncation=True, max_length=256)["input_ids"] for text in texts]
    ours = [encoder.truncate(text, 256, "right").token_ids for text in encoder.encode(texts)]
    assert ours == [tuple(ids) for ids in expected]


_PAIRS = [
    ("A man is playing a guitar.", "Someone plays a musical instrument."),
    ("A man is playing a guitar.", "A man is playing the guitar on stage."),
    ("A man is playing a guitar.", "The stock market fell sharply today."),
    ("How do I reset my password?", "I forgot my login and need a new password."),
    ("How do I reset my password?", "Where can I buy fresh bread?"),
    ("The train to Dhaka leaves at nine.", "At nine o'clock the Dhaka train departs."),
    ("The train to Dhaka leaves at nine.", "Trains are often painted green."),
    ("Rivers flood in the rainy season.", "During the monsoon, water rises over the banks."),
    ("Rivers flood in the rainy season.", "She repaired the old radio."),
    ("আমি প্রতিদিন সকালে চা খাই।", "প্রতিদিন সকালে আমি চা পান করি।"),
    ("আমি প্রতিদিন সকালে চা খাই।", "কাল ঢাকায় অনেক বৃষ্টি হয়েছে।"),
    ("নদীর ধারে ছেলেরা খেলছে।", "ছেলেরা নদীর পাড়ে খেলা করছে।"),
    ("নদীর ধারে ছেলেরা খেলছে।", "বইটি টেবিলের উপর আছে।"),
    ("The boys play by the river.", "নদীর ধারে ছেলেরা খেলছে।"),
]


def test_pairs_of_sentences_rank_as_with_the_oracle(built: BuiltEmbedder, oracle: Any, encoder: InputEncoder) -> None:
    inputs = encoder.encode([text for pair in _PAIRS for text in pair])
    ours, theirs = _ours(built, inputs, len(inputs)), _theirs(oracle, inputs)
    similarities = [(vectors[::2] * vectors[1::2]).sum(dim=1) for vectors in (ours, theirs)]
    assert similarities[0].argsort().tolist() == similarities[1].argsort().tolist()
    # A paraphrase is closer than a sentence about something else.
    assert similarities[0][0] > similarities[0][2]
    assert similarities[0][9] > similarities[0][10]
