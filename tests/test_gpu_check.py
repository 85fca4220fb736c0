"""The check script for a GPU runs to its end without one: every line of it but the kernels."""

import json
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[1]


def test_the_dry_run_ends_well_and_says_that_it_was_one(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, str(_ROOT / "scripts" / "gpu_check.py"), "--dry", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["dry"] is True
    checks = {row["check"]: row for row in report["rows"]}
    for name in ("depth 1 = depth 0", "graphs = eager across bucket edges", "attention sdpa = reference"):
        assert checks[name]["ok"] is True
    for name in ("tiny decode B=4", "tiny prefill 16", "tiny embed 8 x 24", "attention sdpa chunk", "copy", "matmul"):
        assert checks[name]["ok"] is None
    assert "0 failed" in done.stdout


def test_without_time_nothing_passes(tmp_path: Path) -> None:
    command = [sys.executable, str(_ROOT / "scripts" / "gpu_check.py"), "--dry", "--seconds", "-1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 1
    assert "not run: the time is up" in done.stdout
