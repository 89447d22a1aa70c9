"""An interrupt while a command is still being imported shows no traceback; other errors do."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(("error", "shown"), [("KeyboardInterrupt", False), ("ValueError", True)])
def test_tracebacks_before_a_command_begins(error: str, shown: bool) -> None:
    code = f"import sam3d_gguf.cli\nraise {error}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode != 0
    assert ("Traceback" in done.stderr) is shown
