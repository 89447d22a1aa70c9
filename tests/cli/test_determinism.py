"""The same bytes, wherever, whenever and with however many processors they are made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_release import ASSET, CHECKPOINT, CONFIG, Release, names_in

CONVERT = Path(sys.executable).parent / "sam3d-convert"


def convert(
    out: Path, *before: str, cwd: Path, environment: dict[str, str], sources: tuple[str, str, str]
) -> None:
    """Convert the tiny model by the installed command."""
    checkpoint, config, asset = sources
    subprocess.run(
        [
            *(*before, str(CONVERT), "body", "--checkpoint", checkpoint, "--config", config),
            *("--mhr", asset, "--allow-unpinned", "--out", str(out)),
        ],
        check=True,
        capture_output=True,
        cwd=cwd,
        env=environment,
    )


def same(single: Release, folder: Path) -> None:
    """Both folders hold the same."""
    assert names_in(folder) == names_in(single.folder)
    for name in names_in(folder):
        assert (folder / name).read_bytes() == (single.folder / name).read_bytes(), name


@pytest.mark.skipif(shutil.which("taskset") is None, reason="there is no taskset")
def test_one_processor_or_more(single: Release, tmp_path: Path) -> None:
    sources = (str(CHECKPOINT), str(CONFIG), str(ASSET))
    processor = str(min(os.sched_getaffinity(0)))

    convert(
        tmp_path / "body.gguf",
        *("taskset", "-c", processor),
        cwd=tmp_path,
        environment=dict(os.environ),
        sources=sources,
    )

    same(single, tmp_path)


def test_another_folder_locale_time_zone_and_hash_seed(single: Release, tmp_path: Path) -> None:
    inputs, out = tmp_path / "in puts", tmp_path / "out"
    inputs.mkdir()
    out.mkdir()
    for path in (CHECKPOINT, CONFIG, ASSET):
        shutil.copy(path, inputs / path.name)
        os.utime(inputs / path.name, (1, 1))
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "7",
        "TZ": "Asia/Kathmandu",
        "LC_ALL": "C",
        "SOURCE_DATE_EPOCH": "0",
    }

    convert(
        Path("../out/body.gguf"),
        cwd=inputs,
        environment=environment,
        sources=(CHECKPOINT.name, f"./{CONFIG.name}", ASSET.name),
    )

    same(single, out)
