"""What the runs of all models have in common: where and how they compute, what they print."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from numpy.typing import NDArray

from sam3d_gguf.cli.entry import printing
from sam3d_gguf.cli.terminal import cell, print_json, reporting
from sam3d_gguf.cli.terminal import out as terminal
from sam3d_gguf.runtime.ggml.backend import BackendName
from sam3d_gguf.runtime.ggml.library import Precision
from sam3d_gguf.runtime.tensor_files import TensorFile


class BackendChoice(StrEnum):
    """Where to compute."""

    cpu = "cpu"
    vulkan = "vulkan"


class PrecisionChoice(StrEnum):
    """How to compute."""

    strict_f32 = "strict-f32"
    fast = "fast"


BackendOption = Annotated[BackendChoice, typer.Option(help="Where to compute.")]
DeviceOption = Annotated[int, typer.Option(help="Index among the backend's devices.")]
ThreadsOption = Annotated[
    int | None, typer.Option(help="Threads of the CPU backend; one for each core if not given.")
]
ExpectOption = Annotated[
    str | None, typer.Option(help="Refuse to run unless the device has this name.")
]
PrecisionOption = Annotated[
    PrecisionChoice, typer.Option(help="'fast' lets the device use narrower arithmetic.")
]
VerifyOption = Annotated[
    bool, typer.Option("--verify", help="Hash all of the models' data before the run.")
]
OutOption = Annotated[
    Path | None, typer.Option(readable=False, help="Folder for the files; made if missing.")
]


@contextlib.contextmanager
def run_reporting(debug: bool) -> Generator[None]:
    """`reporting`, without what Pillow warns of on the way: it is refused or does not matter."""
    with reporting(debug), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")
        yield


def read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    with TensorFile(path) as file:
        return {name: file.read(name) for name in file.tensors}


def backend_name(choice: BackendChoice) -> BackendName:
    return "cpu" if choice is BackendChoice.cpu else "vulkan"


def precision_name(choice: PrecisionChoice) -> Precision:
    return "fast" if choice is PrecisionChoice.fast else "strict-f32"


def print_written(paths: list[Path], *, as_json: bool) -> None:
    with printing(complete=True):
        if as_json:
            print_json({"schema_version": 1, "files": [str(path) for path in paths]})
            return
        for path in paths:
            terminal.print(cell(str(path)))
