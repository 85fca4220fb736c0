"""Model folders from somebody else: nothing in them is run, and a bad template costs one answer."""

import json
import pickle
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.blackbox.bodies import chat, completion
from tests.blackbox.server import CHAT, COMPLETIONS, START_DEADLINE_S, command, environment, running_server
from tests.blackbox.tiny import TinyChat, make_with_tools

FLAGS = ("--dtype", "float32", "--kv-memory", "2MiB")
MAX_GROWTH = 200 * 2**20
"""Bytes."""

WALK = (
    "{% for c in ''.__class__.__mro__[1].__subclasses__() %}{% if c.__name__ == '_wrap_close' %}"
    "{{ c.__init__.__globals__['system']('touch MARKER') }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(WALK, id="code"),
        pytest.param("{% for i in range(10**9) %}x{% endfor %}", id="loop"),
        pytest.param("{{ 'a' * 10**9 }}", id="size"),
    ],
)
def test_a_hostile_template_is_contained(tmp_path: Path, template: str) -> None:
    marker = tmp_path / "marker"
    # Only the first turn of a conversation sets it off, so that the server itself can be asked how it is.
    hostile = template.replace("MARKER", str(marker))
    guarded = "{% if messages[0].content == 'go' %}" + hostile + "{% endif %}{{ messages[0].content }}"
    model = make_with_tools(tmp_path / "model", guarded, [])
    with running_server(model.directory, *FLAGS) as server:
        server.check_serving()
        before = psutil.Process(server.process.pid).memory_info().rss
        for stream in (False, True):
            refused = server.post(CHAT, chat({"role": "user", "content": "go"}, max_tokens=2, stream=stream))
            assert refused.status_code == 400, refused.text
            assert refused.json()["error"]["param"].startswith("messages")
        assert psutil.Process(server.process.pid).memory_info().rss - before < MAX_GROWTH
        assert not marker.exists()
        assert server.post(COMPLETIONS, completion(max_tokens=2)).status_code == 200
        server.check_serving()


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (self._marker,)  # type: ignore[return-value]  # a path stands for its own text here


def test_nothing_in_a_folder_is_run(chatty: TinyChat, tmp_path: Path) -> None:
    folder, marker = tmp_path / "model", tmp_path / "marker"
    shutil.copytree(chatty.directory, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["auto_map"] = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "evil.py").write_text(f"from pathlib import Path\nPath({str(marker)!r}).touch()\n", encoding="utf-8")
    (folder / "training_args.bin").write_bytes(pickle.dumps(Payload(marker)))
    with running_server(folder, *FLAGS) as server:
        server.check_serving()
    assert not marker.exists()

    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(marker)))
    ended = subprocess.run(
        command(folder, *FLAGS), capture_output=True, text=True, timeout=START_DEADLINE_S, env=environment()
    )
    assert (ended.returncode != 0, ended.stdout) == (True, "")
    assert "safetensors" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not marker.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert marker.exists(), "the payload must be one"
