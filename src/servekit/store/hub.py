"""Fetch a repository of the model hub: its safetensors, configuration and tokenizer, nothing that can carry code.

Progress bars are huggingface_hub's own. Weights in pickle form (`*.bin`, `*.pt`) and Python files are never asked for.
"""

from pathlib import Path
from typing import Any, Protocol

from servekit.errors import ModelError, NotFoundError, ServekitError
from servekit.store.checksum import sha256_of

ALLOWED = (
    "*.json",
    "*.safetensors",
    "*.jinja",
    "tokenizer.model",
    "spiece.model",
    "vocab.txt",
    "merges.txt",
)
# Second copies of the same weights in the layouts of other programs.
IGNORED = ("original/*", "onnx/*", "consolidated*.safetensors")


class HubClient(Protocol):
    """The part of huggingface_hub.HfApi that a pull needs."""

    def model_info(self, repo_id: str, *, files_metadata: bool) -> Any: ...

    def snapshot_download(
        self,
        repo_id: str,
        *,
        revision: str | None,
        local_dir: str | Path | None,
        allow_patterns: list[str] | str | None,
        ignore_patterns: list[str] | str | None,
    ) -> object: ...


def fetch_repository(name: str, folder: Path, client: HubClient | None = None) -> str | None:
    """Put the files of hub repository ORG/NAME into `folder` and return the licence it states.

    A folder left by an interrupted call is continued. Raises NotFoundError for a repository that does not exist (or is
    private), ModelError when it is gated, unreachable, incomplete or has no safetensors.
    """
    if client is None:
        from huggingface_hub import HfApi

        client = HfApi()
    try:
        info = client.model_info(name, files_metadata=True)
        client.snapshot_download(
            name,
            revision=info.sha,
            local_dir=folder,
            allow_patterns=list(ALLOWED),
            ignore_patterns=list(IGNORED),
        )
    except Exception as error:
        raise _translated(name, error) from error
    _check(name, folder, info)
    card = getattr(info, "card_data", None)
    licence = card.get("license") if card is not None else None
    return licence if isinstance(licence, str) else None


def _check(name: str, folder: Path, info: Any) -> None:
    for sibling in info.siblings or ():
        path = folder / sibling.rfilename
        promised = getattr(sibling, "lfs", None)
        if promised is None or not path.is_file():
            continue
        if sha256_of(path) != promised["sha256"]:
            path.unlink()
            raise ModelError(
                f"{sibling.rfilename} of {name} is not what the hub promised; the file was removed",
                hint="run the same command again",
            )
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{name} holds no safetensors",
            hint="only safetensors and GGUF weights are read; other kinds can carry code",
        )


def _translated(name: str, error: Exception) -> ServekitError:
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return ModelError(
            f"the hub gives {name} only to those who accepted its licence",
            hint="accept it on the model's page and set HF_TOKEN",
        )
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        return NotFoundError(
            f"the hub has no model {name}, or it is private",
            hint="check the spelling; for a private model set HF_TOKEN",
        )
    return ModelError(
        f"{name} cannot be fetched from the hub: {_first_line(error)}",
        hint="pull it on a machine with a connection, or give the path of a model folder",
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
