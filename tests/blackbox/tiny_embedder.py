"""Tiny random encoders with a real tokenizer, written as a user would have them on disk, and their oracle."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from tests.engine.encoder_families import make_encoder

PAD, CLS, SEP, UNK = "[PAD]", "[CLS]", "[SEP]", "[UNK]"
LIMIT = 64
SIZE = 64

_TRAINING = [
    "the cat sat on the mat and the other cats sat there while it rained",
    "one two three four five six seven eight nine ten words",
    "এক দুই তিন আমি বাংলায় গান গাই নদী",
]


@dataclass(frozen=True)
class TinyEmbedder:
    """A model folder, its tokenizer, and the transformers model that wrote it."""

    directory: Path
    tokenizer: Tokenizer
    oracle: Any

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, special tokens included."""
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def vectors(self, texts: Sequence[str], pooling: str = "mean") -> torch.Tensor:
        """What sentence-transformers would give, one text at a time: [n, 64], of unit length."""
        return torch.nn.functional.normalize(torch.stack([self._pooled(self.ids(t), pooling) for t in texts]), dim=-1)

    @torch.inference_mode()
    def scores(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """What a cross-encoder gives for each pair."""
        scores = []
        for first, second in pairs:
            encoding = self.tokenizer.encode(first, second)
            logits = self.oracle(torch.tensor([encoding.ids]), token_type_ids=torch.tensor([encoding.type_ids])).logits
            scores.append(float(torch.sigmoid(logits)[0, 0]))
        return scores

    @torch.inference_mode()
    def _pooled(self, ids: list[int], pooling: str) -> torch.Tensor:
        hidden: torch.Tensor = self.oracle(torch.tensor([ids])).last_hidden_state[0]
        return {"mean": hidden.mean(0), "cls": hidden[0], "lasttoken": hidden[-1]}[pooling]


def make_embedder(
    directory: Path,
    *,
    pooling: str = "mean",
    normalise: bool = True,
    head: str = "AutoModel",
    settings: Mapping[str, Any] | None = None,
    **config: Any,
) -> TinyEmbedder:
    """Write a BERT that embeds (or with `head` one that scores). `settings` is sentence-transformers' own config."""
    tokenizer = _train()
    directory.mkdir(parents=True, exist_ok=True)
    size = tokenizer.get_vocab_size()
    tiny = make_encoder("bert", directory, head=head, vocab_size=size, max_position_embeddings=128, **config)
    tokenizer.enable_truncation(16)  # published files do so, and it must not cut what a client sends
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _write(directory / "tokenizer_config.json", {"cls_token": CLS, "sep_token": SEP, "pad_token": PAD})
    if head == "AutoModel":
        parts = ["Transformer", "Pooling", *(["Normalize"] if normalise else [])]
        _write(
            directory / "modules.json",
            [
                {"idx": i, "name": str(i), "path": f"{i}_{part}" if i else "", "type": f"sentence_transformers.{part}"}
                for i, part in enumerate(parts)
            ],
        )
        (directory / "1_Pooling").mkdir(exist_ok=True)
        _write(directory / "1_Pooling" / "config.json", {"word_embedding_dimension": 64, "pooling_mode": pooling})
        _write(directory / "sentence_bert_config.json", {"max_seq_length": LIMIT, "do_lower_case": False})
        _write(directory / "config_sentence_transformers.json", dict(settings or {}))
    return TinyEmbedder(directory, tokenizer, tiny.oracle)


def _train() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNK))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = [AddedToken(text, special=True) for text in (PAD, UNK, CLS, SEP)]
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(_TRAINING, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}",
        pair=f"{CLS} $A {SEP} $B:1 {SEP}:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (CLS, SEP)],
    )
    return tokenizer


def _write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content), encoding="utf-8")
