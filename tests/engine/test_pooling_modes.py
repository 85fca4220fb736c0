"""Every way of pooling gives what sentence-transformers' definition gives, in one ragged batch."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from servekit.engine.batch import Batch
from servekit.engine.core.embed_queue import EmbedInput
from servekit.engine.device.cpu import CpuDevice
from servekit.engine.embed_runner import ModelEmbedRunner
from servekit.engine.layers.pooling import pool
from servekit.engine.spec.pooling import Pooling
from servekit.engine.text.input_encoder import InputEncoder


@pytest.mark.parametrize("pooling", ["cls", "mean", "last", "max", "weighted_mean", "mean_sqrt_len"])
def test_each_text_is_pooled_as_if_alone(pooling: Pooling) -> None:
    hidden = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    texts = [hidden[:1], hidden[1:6], hidden[6:]]
    weights = [torch.arange(1.0, len(text) + 1).unsqueeze(1) for text in texts]
    expected = {
        "cls": [text[0] for text in texts],
        "mean": [text.mean(0) for text in texts],
        "last": [text[-1] for text in texts],
        "max": [text.amax(0) for text in texts],
        "weighted_mean": [(text * w).sum(0) / w.sum() for text, w in zip(texts, weights, strict=True)],
        "mean_sqrt_len": [text.sum(0) / len(text) ** 0.5 for text in texts],
    }[pooling]
    found = pool(hidden, torch.tensor([0, 1, 6, 9]), pooling)
    torch.testing.assert_close(found, torch.stack(expected))


def test_a_prompt_that_is_not_pooled_is_read_all_the_same() -> None:
    seen: list[int] = []

    def hidden_states(batch: Batch) -> torch.Tensor:
        seen.append(batch.num_tokens)
        return batch.input_ids.float().unsqueeze(1)

    def head(hidden: torch.Tensor, seq_starts: torch.Tensor) -> torch.Tensor:
        return pool(hidden, seq_starts, "mean")

    runner = ModelEmbedRunner(hidden_states, head, CpuDevice())
    inputs = [EmbedInput((9, 8, 1, 3), num_unpooled=2), EmbedInput((5, 7))]
    assert runner.embed(inputs).get().tolist() == [[2.0], [6.0]]
    assert seen == [6]


def test_the_encoder_marks_the_prompt_and_what_stands_before_it() -> None:
    backend = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(["[CLS]", "[SEP]", "q:", "a", "b"])}, unk_token="a")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    encoder = InputEncoder(backend)
    (text,) = encoder.encode(["a b"], "q: ", pool_prompt=False)
    assert text == EmbedInput((0, 2, 3, 4, 1), num_unpooled=2)
    assert encoder.encode(["a b"], "q: ")[0].num_unpooled == 0
    assert encoder.truncate(text, 4, "right") == EmbedInput((0, 2, 3, 1), num_unpooled=2)
    assert encoder.truncate(text, 4, "left") == EmbedInput((0, 3, 4, 1), num_unpooled=1)
