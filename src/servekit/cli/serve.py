"""`servekit serve`: load a model and answer the OpenAI-compatible API."""

from pathlib import Path
from typing import Annotated, Any

import typer

_ENGINE = "Engine"
_SERVER = "Server"


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A folder with config.json and safetensors, a .gguf file, a pulled name, or a hub id. "
            "Without it: demo (SmolLM2-135M-Instruct, pulled when missing). An embedding model is served as one.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. [127.0.0.1]", rich_help_panel=_SERVER)] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one. [8080]", rich_help_panel=_SERVER)] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The id clients use. [the model's name]", rich_help_panel=_SERVER)
    ] = None,
    grace: Annotated[
        float | None,
        typer.Option(help="Seconds that running answers get after Ctrl-C or SIGTERM. [5]", rich_help_panel=_SERVER),
    ] = None,
    max_body: Annotated[
        str | None, typer.Option(help="Largest request body. [8MiB]", metavar="SIZE", rich_help_panel=_SERVER)
    ] = None,
    sse_ping_interval: Annotated[
        float | None,
        typer.Option(help="Seconds of silence before a stream gets a comment line. [15]", rich_help_panel=_SERVER),
    ] = None,
    read_timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds in which a request's headers, and then its body, must come. [30]", rich_help_panel=_SERVER
        ),
    ] = None,
    write_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds after which a client that does not read is cut off. [30]", rich_help_panel=_SERVER),
    ] = None,
    request_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds from a request's arrival to its last token. [no limit]", rich_help_panel=_SERVER),
    ] = None,
    unknown_params: Annotated[
        str | None,
        typer.Option(
            help="Fields that nobody knows: refuse them, or warn in a header. [warn]",
            metavar="[refuse|warn]",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Key (or several, by commas) that every request must carry. Others see flags: prefer "
            "SERVEKIT_API_KEY or --api-key-file.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    api_key_file: Annotated[
        str | None, typer.Option(help="File with one API key a line.", rich_help_panel=_SERVER)
    ] = None,
    allow_unauthenticated: Annotated[
        bool | None,
        typer.Option(
            "--allow-unauthenticated",
            help="Allow a --host that other machines can reach, without an API key.",
            show_default=False,
            rich_help_panel=_SERVER,
        ),
    ] = None,
    allowed_host: Annotated[
        str | None,
        typer.Option(help="More names (by commas) by which clients reach this server.", rich_help_panel=_SERVER),
    ] = None,
    cors_origin: Annotated[
        str | None,
        typer.Option(help="Origins (by commas) whose web pages may use this server. [none]", rich_help_panel=_SERVER),
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error. [info]", rich_help_panel=_SERVER)
    ] = None,
    log_format: Annotated[
        str | None, typer.Option(help="text or json, one line a record. [text]", rich_help_panel=_SERVER)
    ] = None,
    log_prompts: Annotated[
        bool | None,
        typer.Option(
            "--log-prompts",
            help="Put every request's body into its line of the log. Without it no prompt is ever logged.",
            show_default=False,
            rich_help_panel=_SERVER,
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with any of these options, by name.", rich_help_panel=_SERVER)
    ] = None,
    parallel: Annotated[
        int | None, typer.Option(help="Slots: sequences that run at once. [16]", rich_help_panel=_ENGINE)
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Context limit in tokens. [the model's]", rich_help_panel=_ENGINE)
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for the KV cache. [what the slots can use, at most a share of free memory]",
            metavar="SIZE",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    memory_utilization: Annotated[
        float | None,
        typer.Option(
            help="Share of the memory that is free beside weights and a full step, for the KV cache. "
            "[0.9 on a GPU, 0.25 on a CPU]",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    enforce_eager: Annotated[
        bool | None,
        typer.Option(
            "--enforce-eager",
            help="On a GPU, launch every step piece by piece instead of capturing graphs.",
            show_default=False,
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    graph_warmup: Annotated[
        bool | None,
        typer.Option(
            "--graph-warmup",
            help="On a GPU, capture the graphs of all decoding steps before the server is ready.",
            show_default=False,
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            help="Keys and values: auto, float32, bfloat16, or q8_0 (eight bits; CPU kernels). [auto]",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Compute dtype: auto (measured), float32 or bfloat16. [auto]", rich_help_panel=_ENGINE),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            help="Weights: auto (as the file's own bits and their rounding allow), none, int8, int4 (CPU kernels) or "
            "fp8 (GPU). [auto]",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(help="Token budget of a step; longer prompts come in chunks. [256]", rich_help_panel=_ENGINE),
    ] = None,
    scheduling: Annotated[
        str | None,
        typer.Option(help="continuous, dynamic or static batching. [continuous]", rich_help_panel=_ENGINE),
    ] = None,
    static_wait: Annotated[
        float | None,
        typer.Option(help="Seconds that static batching waits for a full batch. [0.5]", rich_help_panel=_ENGINE),
    ] = None,
    prefix_cache: Annotated[
        bool | None,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            help="Reuse the KV of shared prompt beginnings. [on]",
            show_default=False,
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens in a KV block. [the attention backend's]", rich_help_panel=_ENGINE)
    ] = None,
    queue_limit: Annotated[
        int | None,
        typer.Option(help="Waiting requests before new ones get 429. [512]", rich_help_panel=_ENGINE),
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda. [auto]", rich_help_panel=_ENGINE)] = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads that compute. [physical cores]", rich_help_panel=_ENGINE)
    ] = None,
    embedding_model: Annotated[
        str | None,
        typer.Option(
            help="A model beside MODEL that embeds or scores text: a folder, a name (demo-embedding), or a hub id.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    matryoshka: Annotated[
        bool | None,
        typer.Option(
            "--matryoshka",
            help="The embedding model was trained so that its vectors may be cut to any size.",
            show_default=False,
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(
            help="auto, native (the CPU kernels), flash, varlen, triton, sdpa or reference. [auto]",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
) -> None:
    """Load a model and answer the OpenAI-compatible API on 127.0.0.1.

    Every option can also be set as SERVEKIT_NAME in the environment or in the --config file.
    """
    given = {name: value for name, value in locals().items() if name != "config" and value is not None}
    run(given, config)


def run(flags: dict[str, Any], config: Path | None) -> None:
    """Resolve the configuration, refuse what cannot work, then serve until a signal."""
    import os
    import sys
    import time

    from servekit.cli.log import setup_logging
    from servekit.cli.progress import transfer_progress
    from servekit.config import resolve_config

    began = time.monotonic()
    engine_config, serve_config = resolve_config(flags, os.environ, config)
    setup_logging(serve_config.log_level, serve_config.log_format)

    from servekit.server.security import security_of, warning_of
    from servekit.server.socket import bind, url_of

    with bind(serve_config.host, serve_config.port) as sock:
        security = security_of(serve_config, sock.getsockname()[1])
        if warning := warning_of(serve_config, security):
            print(f"warning: {warning}", file=sys.stderr)
        from servekit.store.resolve import ensure_model

        with transfer_progress() as progress:
            files = ensure_model(engine_config.model, progress)
            named = engine_config.embedding_model
            embedding_files = None if named is None else ensure_model(named, progress)
        print(f"loading {files.name}; {url_of(sock)} answers 503 until it is ready", file=sys.stderr)

        # oneDNN keeps a kernel of half a megabyte for every number of rows that it has seen, up to 1,024 of them, and
        # making one again takes a millisecond. It reads this when torch is imported.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
        # Torch is imported here: everything above answers a mistake within a fraction of a second.
        from servekit.cli.serve_models import serve_models

        serve_models(sock, files, embedding_files, engine_config, serve_config, security, began)
