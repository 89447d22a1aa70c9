"""No code of a hostile file runs, nothing is imported, and nothing but a refusal comes out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
MEMORY = 1 << 30


def canary(mode: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS.parent)))}
    ended = subprocess.run(
        [sys.executable, TESTS / "canary.py", mode],
        check=True,
        stdout=subprocess.PIPE,
        env=environment,
        timeout=300,
    )
    report: dict[str, Any] = json.loads(ended.stdout)
    return report


@pytest.fixture(scope="module")
def reading() -> dict[str, Any]:
    return canary("read")


def test_every_control_would_run_if_it_were_loaded() -> None:
    files = canary("load")["files"]

    assert len(files) > 40
    assert [name for name, result in files.items() if not result["events"]] == []


def test_nothing_runs(reading: dict[str, Any]) -> None:
    files = reading["files"]

    assert len(files) > 2_000
    assert {name: result["events"] for name, result in files.items() if result["events"]} == {}


def test_nothing_is_imported(reading: dict[str, Any]) -> None:
    assert reading["imported"] == []


def test_every_file_is_read_or_refused(reading: dict[str, Any]) -> None:
    outcomes = {name: str(result["outcome"]) for name, result in reading["files"].items()}

    assert [name for name, outcome in outcomes.items() if outcome.startswith("escaped")] == []


def test_memory_stays_far_below_the_sandbox(reading: dict[str, Any]) -> None:
    assert reading["peak"] < MEMORY


REFUSED = ("flag 0x", "another ", "data.pkl ", "hidden", "pickle ", "script before", "member named")


def test_every_trick_with_the_archive_is_refused(reading: dict[str, Any]) -> None:
    outcomes = {
        name: str(result["outcome"])
        for name, result in reading["files"].items()
        if name.startswith(REFUSED)
    }

    assert len(outcomes) > 30
    assert [name for name, outcome in outcomes.items() if not outcome.startswith("refused")] == []


def test_every_gadget_is_read_inertly(reading: dict[str, Any]) -> None:
    outcomes = {
        result["outcome"]
        for name, result in reading["files"].items()
        if name.startswith("gadget") and name.endswith("in zip form")
    }

    assert outcomes == {"read"}
