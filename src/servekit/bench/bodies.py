"""Request bodies for each endpoint that can be measured. It must not know when they are sent."""

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

ENDPOINTS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
    "rerank": "/v1/rerank",
}
GENERATING = ("chat", "completions")
RERANK_DOCUMENTS = 4

# Fields beyond the common core of the API; a server that refuses one of them is asked without it.
OPTIONAL_FIELDS = ("ignore_eos", "stream_options", "cache_salt", "cache_prompt")


@dataclass(slots=True)
class BodyMaker:
    """Writes the bodies of one run. Answers are streamed, greedy, and of the asked length where the server allows it.

    `is_salted` puts something unique before each prompt, so that no prefix cache can know it, and asks servers that
    have a field for it as well. `extra` fields are sent as they are and win. `left_out` grows with what is refused.
    """

    endpoint: str
    model: str
    kind: str = "unknown"
    temperature: float = 0.0
    is_salted: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)

    @property
    def path(self) -> str:
        """Where the bodies are sent."""
        return ENDPOINTS[self.endpoint]

    @property
    def generates(self) -> bool:
        """Whether answers are made of tokens."""
        return self.endpoint in GENERATING

    def make(self, prompts: Iterator[str], output_tokens: int) -> bytes:
        """The body for the next prompt, and for reranking the next few as its documents."""
        prompt = next(prompts)
        salt = secrets.token_hex(8) if self.is_salted else ""
        if salt:
            prompt = f"[{salt}] {prompt}"
        body: dict[str, Any] = {"model": self.model}
        if self.endpoint == "embeddings":
            body["input"] = prompt
        elif self.endpoint == "rerank":
            body |= {"query": prompt, "documents": [next(prompts) for _ in range(RERANK_DOCUMENTS)]}
        else:
            body |= {"messages": [{"role": "user", "content": prompt}]} if self.endpoint == "chat" else {}
            body |= {"prompt": prompt} if self.endpoint == "completions" else {}
            body |= self._generation_fields(output_tokens, salt)
        body = {name: value for name, value in body.items() if name not in self.left_out}
        return msgspec.json.encode({**body, **self.extra})

    def _generation_fields(self, output_tokens: int, salt: str) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "max_tokens": output_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        if salt and self.kind in ("servekit", "vllm"):
            fields["cache_salt"] = salt
        if salt and self.kind == "llama.cpp":
            fields["cache_prompt"] = False
        return fields
