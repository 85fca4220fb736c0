"""What `servekit serve` says about itself while it starts. All of it on stderr, but the ready URL, which is data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from servekit import __version__
from servekit.engine.load import LoadedEngine
from servekit.units import format_bytes

if TYPE_CHECKING:
    from servekit.engine.embedding_model import BuiltEmbedder
    from servekit.engine.load_embedding import LoadedEmbeddingEngine


def announce(loaded: LoadedEngine, warnings: list[str], url: str, seconds: float) -> None:
    """The resolved configuration with its numbers, and the URL on stdout for scripts."""
    console = Console(stderr=True, highlight=False)
    for warning in warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    _print(console, _rows(loaded), url, seconds)


def announce_embedding(loaded: LoadedEmbeddingEngine, url: str, seconds: float) -> None:
    """The same for a server that only embeds."""
    config = loaded.config
    how = f"; {config.threads} threads" if loaded.device.kind == "cpu" else ""
    rows = [
        ("servekit", __version__),
        ("model", _embedding_text(loaded.embedding)),
        ("device", f"{loaded.device.describe()}{how}"),
        ("dtype", loaded.reasons.get("dtype", f"{config.dtype}: asked for")),
        *([("pooling", loaded.reasons["pooling"])] if "pooling" in loaded.reasons else []),
        ("batching", f"up to {config.max_num_batched_tokens} tokens a step"),
    ]
    _print(Console(stderr=True, highlight=False), rows, url, seconds)


def _print(console: Console, rows: list[tuple[str, str]], url: str, seconds: float) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for label, text in rows:
        table.add_row(label, text)
    table.add_row("ready", f"{url}/v1 after {seconds:.1f} s; Ctrl-C stops it", style="green")
    console.print(table)
    print(url, flush=True)


def _embedding_text(built: BuiltEmbedder) -> str:
    embedder = built.embedder
    makes = "scores pairs" if embedder.is_scorer else f"vectors of {embedder.size}"
    return (
        f"{embedder.model_name}: {built.opened.spec.family}, {built.num_parameters / 1e6:,.1f} M parameters, "
        f"{format_bytes(built.weights_bytes)} of weights; {makes}, up to {embedder.max_tokens:,} tokens a text"
    )


def _rows(loaded: LoadedEngine) -> list[tuple[str, str]]:
    config, plan, reasons = loaded.config, loaded.plan, loaded.reasons
    how = f"{config.threads} threads, " if loaded.device.kind == "cpu" else ""
    return [
        ("servekit", __version__),
        (
            "model",
            f"{loaded.engine.model_name}: {loaded.family}, {loaded.num_parameters / 1e6:,.1f} M parameters, "
            f"{format_bytes(loaded.weights_bytes)} of weights",
        ),
        *([("embedding", _embedding_text(loaded.embedding))] if loaded.embedding is not None else []),
        (
            "device",
            f"{loaded.device.describe()}; {how}{loaded.kernels['running']} kernels, {config.attention} attention",
        ),
        ("weights", reasons["quantize"]),
        ("dtype", reasons.get("dtype", f"{config.dtype}: asked for")),
        (
            "KV cache",
            f"{format_bytes(plan.kv_bytes)} of {config.kv_dtype}: {plan.num_blocks:,} blocks of {plan.block_size} "
            f"tokens, {format_bytes(plan.bytes_per_token)} a token",
        ),
        (
            "fits",
            f"{plan.num_tokens:,} tokens, or {plan.max_seqs_at_context:,} sequences at the limit of "
            f"{plan.max_model_len:,} tokens",
        ),
        ("why", reasons.get("kv_memory", f"{format_bytes(plan.kv_bytes)}: asked for")),
        (
            "batching",
            f"{config.scheduling}, {config.parallel} slots, up to {config.max_num_batched_tokens} tokens a step, "
            f"prefix cache {'on' if config.prefix_cache else 'off'}",
        ),
    ]
