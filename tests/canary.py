"""Reads hostile files in a process that notices whatever is not reading.

    python tests/canary.py read     reads each file of the corpus with the readers
    python tests/canary.py load     loads each control of the corpus with `pickle.loads`

Prints one JSON object: what became of each file, the audit events that it raised, and the modules
that were imported. An event is stopped before anything happens. Reading may raise none but that of
`id`; loading is stopped only where it would run code.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hostile_corpus
from checkpoint_bytes import legacy_checkpoint, module, script_archive, tensor, zip_checkpoint
from memory_source import memory_source

from sam3d_gguf.extractors.byte_source import ByteSource
from sam3d_gguf.extractors.checkpoint import check_storages, read_archive
from sam3d_gguf.extractors.materialize import iter_blocks
from sam3d_gguf.extractors.pickle_machine import read_pickle
from sam3d_gguf.extractors.sniff import sniff
from sam3d_gguf.schemas.errors import Sam3dError

HARMLESS = {"builtins.id"}
RUNS = {"os.system", "exec", "compile", "subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec"}
MEMORY = 3 << 30


class Stopped(BaseException):
    """Stops an event, past any handler of ordinary exceptions."""


class Canary:
    """Records and stops the audit events that are forbidden while it is armed."""

    def __init__(self, forbidden: Callable[[str], bool]) -> None:
        self.forbidden = forbidden
        self.events: list[str] | None = None
        sys.addaudithook(self.hear)

    def hear(self, event: str, _arguments: tuple[Any, ...]) -> None:
        if self.events is None or not self.forbidden(event):
            return
        self.events.append(event)
        raise Stopped(event)

    def watch(self, action: Callable[..., object], argument: object) -> dict[str, object]:
        self.events = []
        outcome = "read"
        try:
            action(argument)
        except Sam3dError as error:
            outcome = f"refused: {error.what}"
        except BaseException as error:  # noqa: BLE001
            outcome = f"escaped: {type(error).__name__}"
        events, self.events = self.events, None
        return {"outcome": outcome, "events": events}


def read(source: ByteSource) -> None:
    """Do all that the readers do with a file."""
    sniff(source)
    archive = read_archive(source)
    check_storages(source, archive)
    for ref in archive.tensors.values():
        for _ in iter_blocks(source, ref):
            pass


def read_all(canary: Canary) -> Iterator[tuple[str, dict[str, object]]]:
    for name, data in hostile_corpus.files():
        with memory_source(data) as source:
            yield name, canary.watch(read, source)
    for name, data in hostile_corpus.pickles():
        yield f"{name}, alone", canary.watch(read_pickle, data)


def load_all(canary: Canary) -> Iterator[tuple[str, dict[str, object]]]:
    for name, data in hostile_corpus.controls():
        yield name, canary.watch(pickle.loads, data)


def warm() -> None:
    """Read good files once, so that codecs and the like are there."""
    tree = {"weight": tensor()}
    for data in (zip_checkpoint(tree), legacy_checkpoint(tree), script_archive(module(tree))):
        with memory_source(data) as source:
            read(source)
    read_pickle(b"(V\\u0061\nS'a\\x41'\nF1.5\nI7\nt.")


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    warm()
    reading = sys.argv[1] == "read"
    canary = Canary(lambda event: event not in HARMLESS if reading else event in RUNS)
    modules = set(sys.modules)
    results = dict(read_all(canary) if reading else load_all(canary))
    # Not ru_maxrss, which a process takes over from the one that started it.
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) << 10
    report = {"files": results, "imported": sorted(set(sys.modules) - modules), "peak": peak}
    json.dump(report, sys.stdout)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
