"""`sam3d-inspect`: what a file holds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from sam3d_gguf.cli.entry import Command, printing
from sam3d_gguf.cli.terminal import (
    BaseOption,
    DebugOption,
    JsonOption,
    SandboxOption,
    VersionOption,
    cell,
    choose_sandbox,
    new_app,
    out,
    print_json,
    progress_bars,
    reporting,
)
from sam3d_gguf.convert.inspect import Inspection, inspect
from sam3d_gguf.extractors.torch_objects import has_meaning

app = new_app("Say what a legacy checkpoint, safetensors or GGUF file holds.")
_SHOWN = 12
_CHARACTERS = 100


@app.command(cls=Command)
def show(
    file: Annotated[
        Path, typer.Argument(readable=False, help="The file; a legacy one is read in the sandbox.")
    ],
    sandbox: SandboxOption = "bubblewrap",
    base: BaseOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
    version: VersionOption = False,
) -> None:
    """Say what a file holds: kind, tensors, metadata, and whatever else is in it."""
    with reporting(debug):
        with progress_bars() as progress:
            found = inspect(file, sandbox=choose_sandbox(sandbox, base), progress=progress)
        with printing():
            if json:
                print_json(found.to_document())
            else:
                _print(found)


def _print(found: Inspection) -> None:
    table = Table("tensor", "dtype", "shape", "bytes")
    for tensor in found.tensors:
        table.add_row(cell(tensor.name), tensor.dtype, str(list(tensor.shape)), f"{tensor.bytes:,}")
    out.print(table)
    size = sum(tensor.bytes for tensor in found.tensors)
    out.print(f"{cell(found.name)}: {cell(found.kind)}, {found.bytes:,} bytes, {found.origin}")
    out.print(f"SHA-256 {found.sha256}")
    out.print(f"{len(found.tensors)} tensors of {size:,} bytes together")
    if found.wrapper:
        out.print(f"wrapper: {cell(found.wrapper)}")
    _list("metadata", (f"{key} = {value}" for key, value in (found.metadata or {}).items()))
    _list("shared storage", (", ".join(names) for names in found.shared))
    _list("left out", (f"{what}: {reason}" for what, reason in found.left_out))
    _list("inert call", (f"{name} x{count} at {path}" for path, name, count in found.inert))
    # Names that mean nothing here have lines of their own, which no others can push out.
    _list("unknown global named", (name for name in found.globals if not has_meaning(name)))
    _list("global named", (name for name in found.globals if has_meaning(name)))
    _list("code, never run", (f"{name} {sha256}" for name, sha256 in (found.code or {}).items()))


def _list(title: str, lines: Iterable[str]) -> None:
    everything = list(lines)
    for line in everything[:_SHOWN]:
        short = line if len(line) <= _CHARACTERS else line[:_CHARACTERS] + "..."
        out.print(f"{title}: {cell(short)}")
    if len(everything) > _SHOWN:
        out.print(f"{title}: and {len(everything) - _SHOWN} more; --json lists all")


def main() -> None:
    """The entry point."""
    app()
