import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from servekit.errors import ModelError, NotFoundError, ServekitError
from servekit.store.hub import ALLOWED, fetch_repository


@dataclass
class FakeHub:
    """A hub with one repository, in place of huggingface_hub's client."""

    files: dict[str, bytes] = field(default_factory=lambda: {"config.json": b"{}", "model.safetensors": b"weights"})
    promised: dict[str, bytes] = field(default_factory=dict)
    error: Exception | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def model_info(self, repo_id: str, *, files_metadata: bool) -> Any:
        if self.error is not None:
            raise self.error
        assert files_metadata
        contents = self.files | self.promised
        siblings = [
            SimpleNamespace(
                rfilename=name,
                lfs={"sha256": hashlib.sha256(contents[name]).hexdigest()} if name.endswith("safetensors") else None,
            )
            for name in contents
        ]
        return SimpleNamespace(sha="abc123", siblings=siblings, card_data={"license": "apache-2.0"})

    def snapshot_download(self, repo_id: str, **options: Any) -> str:
        self.options = options
        folder = Path(options["local_dir"])
        folder.mkdir(parents=True)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        return str(folder)


def response(status: int) -> Any:
    return httpx.Response(status, request=httpx.Request("GET", "http://127.0.0.1/x"))


def test_files_and_licence_arrive_at_the_revision_that_was_described(tmp_path: Path) -> None:
    hub = FakeHub()
    assert fetch_repository("org/name", tmp_path / "m", hub) == "apache-2.0"
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == b"weights"
    assert hub.options["revision"] == "abc123"


def test_nothing_that_can_carry_code_is_asked_for() -> None:
    from fnmatch import fnmatch

    for name in ("pytorch_model.bin", "model.pt", "modeling_x.py", "training_args.bin", "model.pkl", "a/evil.py"):
        assert not any(fnmatch(name, pattern) for pattern in ALLOWED), name
    for name in ("config.json", "model-00001-of-00002.safetensors", "chat_template.jinja", "tokenizer.model"):
        assert any(fnmatch(name, pattern) for pattern in ALLOWED), name


def test_a_repository_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no safetensors"):
        fetch_repository("org/name", tmp_path / "m", FakeHub(files={"config.json": b"{}"}))


def test_a_file_that_is_not_what_was_promised_is_removed(tmp_path: Path) -> None:
    hub = FakeHub(promised={"model.safetensors": b"other weights"})
    with pytest.raises(ModelError, match=r"model\.safetensors of org/name is not what the hub promised"):
        fetch_repository("org/name", tmp_path / "m", hub)
    assert not (tmp_path / "m" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (RepositoryNotFoundError("404", response=response(404)), NotFoundError, "the hub has no model org/name"),
        (GatedRepoError("403", response=response(403)), ModelError, "accepted its licence"),
        (LocalEntryNotFoundError("no network"), ModelError, "cannot be fetched from the hub: no network"),
        (httpx.ConnectError("name not known"), ModelError, "cannot be fetched from the hub: name not known"),
    ],
)
def test_each_failure_is_one_clear_line(
    tmp_path: Path, error: Exception, kind: type[ServekitError], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        fetch_repository("org/name", tmp_path / "m", FakeHub(error=error))
    assert caught.value.hint is not None
    assert "\n" not in caught.value.message
