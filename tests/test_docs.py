"""The documentation says what is there: every file has its line, every command and every shown output is real."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_SOURCE = _ROOT / "src" / "servekit"
_README = (_ROOT / "README.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", _README, re.DOTALL)


def _commands() -> list[str]:
    """Every command line of the README's shell blocks, continued lines and comments resolved."""
    joined = [re.sub(r"\s+#.*", "", block) for block in _blocks("sh")]
    return [block.strip() for block in joined]


def _run(command: str) -> subprocess.CompletedProcess[str]:
    words = shlex.split(command)
    assert words[0] == "servekit"
    return subprocess.run(
        [sys.executable, "-m", "servekit.cli.main", *words[1:]],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=_ROOT,
        encoding="utf-8",
    )


def test_every_source_file_has_its_line() -> None:
    text = (_ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    files = [path.relative_to(_SOURCE) for path in _SOURCE.rglob("*.py") if path.stat().st_size]
    missing = [str(file) for file in files if f"`{file}`" not in text]
    assert not missing


def test_no_line_stands_for_a_file_that_is_gone() -> None:
    text = (_ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `([\w/]+\.py)` \|", text, re.MULTILINE)
    assert named
    assert not [name for name in named if not (_SOURCE / name).is_file()]


def test_links_lead_somewhere() -> None:
    for file in (_ROOT / "README.md", *(_ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(((?!http|#)[^)#]+)", file.read_text(encoding="utf-8")):
            assert (file.parent / target).exists(), f"{file.name} links to {target}"


def test_make_targets_exist() -> None:
    targets = [line.split()[1] for block in _commands() for line in block.splitlines() if line.startswith("make ")]
    assert targets == ["serve", "test"]
    for target in targets:
        done = subprocess.run(["make", "-n", target], capture_output=True, text=True, cwd=_ROOT, timeout=60)
        assert done.returncode == 0, done.stderr


@pytest.mark.demo
def test_servekit_commands_run() -> None:
    lines = [line for block in _commands() for line in block.splitlines() if line.startswith("servekit ")]
    assert lines
    for line in lines:
        done = _run(line)
        assert done.returncode == 0, f"{line}: {done.stderr}"


def test_shown_output_is_real() -> None:
    shown = [block for block in _blocks("text") if not block.startswith("$ servekit serve")]
    assert shown
    for block in shown:
        first, *expected = block.strip().splitlines()
        assert first.startswith("$ ")
        done = _run(first.removeprefix("$ "))
        assert done.returncode == 0, done.stderr
        for line in expected:
            assert line.rstrip() in done.stdout, f"{first} does not print {line!r}"


def test_curl_bodies_are_json_that_the_server_takes() -> None:
    """They are sent to a real server in tests/blackbox/test_readme.py."""
    bodies = re.findall(r"-d '(.*?)'", _README, re.DOTALL)
    assert len(bodies) == 2
    assert [set(json.loads(body)) & {"messages", "prompt"} for body in bodies] == [{"messages"}, {"prompt"}]
