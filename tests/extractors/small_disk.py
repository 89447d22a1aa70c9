"""Runs one scenario on a small file system; started by test_publication in a mount namespace.

Usage: small_disk.py announced|fills|full-at-commit|read-only nameless|named
Prints {"error": the refusal, "left": names in the folder afterwards} as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from sam3d_gguf.extractors import target_folder
from sam3d_gguf.extractors.publication import PublicationSet
from sam3d_gguf.schemas.errors import OutputError

DISK_BYTES = 2 << 20
MODEL_BYTES = 1 << 20


def mount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return


def publish(folder: Path, scenario: str) -> None:
    with PublicationSet() as publications:
        if scenario == "announced":
            publications.create(folder / "body.gguf", 2 * DISK_BYTES)
        model = publications.create(folder / "body.gguf", MODEL_BYTES)
        if scenario == "fills":
            fill(folder)
        model.write(bytes(MODEL_BYTES))
        model.seal()
        publications.create(folder / "manifest.json").seal()
        fill(folder)
        publications.commit()


def main() -> None:
    """Runs the scenario that the arguments name."""
    scenario, way = sys.argv[1:]
    if way == "named":
        target_folder.open_nameless = lambda folder_fd: None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mount(folder, f"size={DISK_BYTES}")
        if scenario == "read-only":
            mount(folder, "remount,ro")
        error = ""
        try:
            publish(folder, scenario)
        except OutputError as refusal:
            error = str(refusal)
        left = sorted(path.name for path in folder.iterdir())
        subprocess.run(["umount", name], check=True)
    print(json.dumps({"error": error, "left": left}))


if __name__ == "__main__":
    main()
