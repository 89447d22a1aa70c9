"""Limits that the calling shell has set, which the sandboxed reader can't raise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from facts import TINY


@pytest.mark.parametrize("limit", ["-t 600", "-v 1000000", "-n 48", "-f 100000", "-c 0"])
def test_the_lower_limit_counts(limit: str) -> None:
    command = Path(sys.executable).parent / "sam3d-inspect"
    ended = subprocess.run(
        ["bash", "-c", f'ulimit {limit}; "$0" "$1"', command, TINY / "model.ckpt"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "init_pose.weight" in ended.stdout
