"""`sam3d-extract`: legacy checkpoints to verified safetensors and a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from sam3d_gguf.cli.entry import printing
from sam3d_gguf.cli.terminal import (
    BaseOption,
    CheckpointDirOption,
    DebugOption,
    JsonOption,
    MogeOption,
    PartsOption,
    SandboxOption,
    UnpinnedOption,
    VersionOption,
    cell,
    choose_sandbox,
    new_app,
    out,
    print_hashes,
    print_json,
    progress_bars,
    reporting,
    split_parts,
)
from sam3d_gguf.convert.objects import ObjectsRequest, extract_objects
from sam3d_gguf.convert.release import extract_to_folder
from sam3d_gguf.extractors.extraction import REPORT, Extraction
from sam3d_gguf.extractors.models import Model, part
from sam3d_gguf.extractors.sandbox.job import SandboxKind

app = new_app("Extract legacy checkpoints to safetensors, in a sandbox and without running them.")

CheckpointArgument = Annotated[
    Path,
    typer.Option(
        "--checkpoint", readable=False, help="The legacy file (model.ckpt, mhr_model.pt)."
    ),
]
OutOption = Annotated[
    Path, typer.Option("--out", readable=False, help="A new folder for the safetensors.")
]


@app.callback()
def options(version: VersionOption = False) -> None:
    """Extract legacy checkpoints to safetensors, in a sandbox and without running them."""


@app.command()
def body(
    checkpoint: CheckpointArgument,
    out: OutOption,
    allow_unpinned: UnpinnedOption = False,
    sandbox: SandboxOption = "bubblewrap",
    base: BaseOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Extract SAM 3D Body (model.ckpt)."""
    _extract("body", checkpoint, out, allow_unpinned, sandbox, base, json, debug)


@app.command()
def mhr(
    checkpoint: CheckpointArgument,
    out: OutOption,
    allow_unpinned: UnpinnedOption = False,
    sandbox: SandboxOption = "bubblewrap",
    base: BaseOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Extract MHR (mhr_model.pt)."""
    _extract("mhr", checkpoint, out, allow_unpinned, sandbox, base, json, debug)


@app.command()
def objects(
    checkpoint_dir: CheckpointDirOption,
    out: OutOption,
    parts: PartsOption = None,
    moge: MogeOption = None,
    allow_unpinned: UnpinnedOption = False,
    sandbox: SandboxOption = "bubblewrap",
    base: BaseOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Extract SAM 3D Objects: each part to a folder of its own."""
    with reporting(debug):
        request = ObjectsRequest(
            checkpoint_dir=checkpoint_dir,
            out=out,
            parts=split_parts(parts),
            moge=moge,
            allow_unpinned=allow_unpinned,
            sandbox=choose_sandbox(sandbox, base),
        )
        with progress_bars() as progress:
            done = extract_objects(request, progress)
        with printing(complete=True):
            if json:
                print_json([extraction.to_document() for extraction in done.values()])
                return
            for model, extraction in done.items():
                _print(extraction, out / part(model))


def _extract(
    model: Model,
    checkpoint: Path,
    folder: Path,
    allow_unpinned: bool,
    sandbox: SandboxKind,
    base: str | None,
    json: bool,
    debug: bool,
) -> None:
    with reporting(debug):
        choice = choose_sandbox(sandbox, base)
        with progress_bars() as progress:
            extraction = extract_to_folder(
                model,
                checkpoint,
                folder,
                sandbox=choice,
                allow_unpinned=allow_unpinned,
                progress=progress,
            )
        with printing(complete=True):
            if json:
                print_json(extraction.to_document())
            else:
                _print(extraction, folder)


def _print(extraction: Extraction, folder: Path) -> None:
    table = Table("file", "tensors", "bytes", "published hash")
    for product in extraction.products:
        table.add_row(
            product.file,
            str(product.tensors),
            f"{product.bytes:,}",
            product.known_answer,
        )
    out.print(table)
    print_hashes((product.sha256, product.file) for product in extraction.products)
    source = extraction.source
    out.print(f"source: {cell(source.name)}, SHA-256 {source.sha256}, {source.origin}")
    if extraction.inert:
        count = sum(number for _, _, number in extraction.inert)
        out.print(f"{count} calls in the pickle were recorded and not made; see the report")
    out.print(f"report: {cell(str(folder / REPORT))}")


def main() -> None:
    """The entry point."""
    app()
