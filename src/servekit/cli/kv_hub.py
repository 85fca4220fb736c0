"""Fetches the few small files of a hub repository that a plan needs: never a weight, never code."""

from pathlib import Path
from typing import Any, Protocol

from servekit.errors import ModelError, NotFoundError

_TIMEOUT_S = 10.0


class HubFiles(Protocol):
    """The part of huggingface_hub.HfApi that a plan needs."""

    def model_info(self, repo_id: str, *, timeout: float | None) -> Any: ...

    def hf_hub_download(self, repo_id: str, filename: str, *, revision: str | None) -> Any: ...


def fetch_files(name: str, wanted: tuple[str, ...], client: HubFiles | None = None) -> dict[str, Path]:
    """The wanted files of repository ORG/NAME that exist, by name, all of one revision.

    Raises NotFoundError for a repository that does not exist or is private, ModelError when the hub cannot be reached.
    """
    if client is None:
        from huggingface_hub import HfApi

        client = HfApi()
    try:
        info = client.model_info(name, timeout=_TIMEOUT_S)
        there = {sibling.rfilename for sibling in info.siblings or ()}
        return {file: Path(client.hf_hub_download(name, file, revision=info.sha)) for file in wanted if file in there}
    except Exception as error:
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        if isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError):
            raise NotFoundError(
                f"the hub has no model {name}, or it is private",
                hint="check the spelling; for a private one set HF_TOKEN",
            ) from error
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"{name} is no file here, and its config.json cannot be fetched from the hub: {lines[0][:200]}",
            hint="give the path of a config.json, or try again with a connection",
        ) from error
