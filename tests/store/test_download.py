import hashlib
from pathlib import Path

import pytest

from servekit.errors import ModelError
from servekit.store.download import download
from tests.store.web import Resource, serve

CONTENT = bytes(range(256)) * 4096
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def fetch(url: str, target: Path) -> list[tuple[int, int | None]]:
    reports: list[tuple[int, int | None]] = []
    download(url, target, sha256=SHA256, what="thing", progress=lambda what, done, total: reports.append((done, total)))
    return reports


def test_a_file_arrives_whole_and_leaves_no_partial(tmp_path: Path) -> None:
    with serve(Resource(CONTENT)) as url:
        reports = fetch(url, tmp_path / "deep" / "thing")
    assert (tmp_path / "deep" / "thing").read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["thing"]
    assert reports[0] == (0, len(CONTENT))
    assert reports[-1] == (len(CONTENT), len(CONTENT))


def test_an_interrupted_transfer_is_continued_by_range(tmp_path: Path) -> None:
    target = tmp_path / "thing"
    resource = Resource(CONTENT, cut=300_000)
    with serve(resource) as url:
        with pytest.raises(ModelError, match="stopped") as caught:
            fetch(url, target)
        assert caught.value.hint is not None
        assert not target.exists()
        assert (tmp_path / "thing.partial").stat().st_size == 300_000
        resource.cut = None
        reports = fetch(url, target)
    assert resource.asked == [None, "bytes=300000-"]
    assert reports[0] == (300_000, len(CONTENT))
    assert target.read_bytes() == CONTENT


def test_a_server_without_ranges_starts_over(tmp_path: Path) -> None:
    (tmp_path / "thing.partial").write_bytes(b"old bytes")
    with serve(Resource(CONTENT, ranges=False)) as url:
        fetch(url, tmp_path / "thing")
    assert (tmp_path / "thing").read_bytes() == CONTENT


def test_a_partial_file_that_is_complete_is_only_checked(tmp_path: Path) -> None:
    (tmp_path / "thing.partial").write_bytes(CONTENT)
    with serve(Resource(CONTENT)) as url:
        fetch(url, tmp_path / "thing")
    assert (tmp_path / "thing").read_bytes() == CONTENT


def test_a_partial_file_longer_than_the_resource_starts_over(tmp_path: Path) -> None:
    (tmp_path / "thing.partial").write_bytes(CONTENT + b"more")
    with serve(Resource(CONTENT)) as url:
        fetch(url, tmp_path / "thing")
    assert (tmp_path / "thing").read_bytes() == CONTENT


def test_wrong_content_is_removed(tmp_path: Path) -> None:
    with serve(Resource(b"something else")) as url, pytest.raises(ModelError, match="SHA-256") as caught:
        fetch(url, tmp_path / "thing")
    assert SHA256 in caught.value.message
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_what_can_be_continued(tmp_path: Path) -> None:
    def interrupt(what: str, done: int, total: int | None) -> None:
        if done:
            raise KeyboardInterrupt

    with serve(Resource(CONTENT)) as url:
        with pytest.raises(KeyboardInterrupt):
            download(url, tmp_path / "thing", sha256=SHA256, what="thing", progress=interrupt)
        assert [path.name for path in tmp_path.iterdir()] == ["thing.partial"]
        fetch(url, tmp_path / "thing")
    assert (tmp_path / "thing").read_bytes() == CONTENT


def test_a_local_file_address_works(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(CONTENT)
    fetch((tmp_path / "source").as_uri(), tmp_path / "thing")
    assert (tmp_path / "thing").read_bytes() == CONTENT


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/x", "data:text/plain,x"])
def test_other_addresses_are_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(ModelError, match="not a kind of address"):
        fetch(url, tmp_path / "thing")


def test_a_server_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    with serve(Resource(b"")) as url:
        pass
    with pytest.raises(ModelError, match="the download of thing stopped"):
        fetch(url, tmp_path / "thing")
