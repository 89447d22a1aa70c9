"""`sam3d-convert`: legacy checkpoints to verified GGUF files and their manifest."""

from __future__ import annotations

from collections.abc import Callable
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
from sam3d_gguf.convert.binding import Precision
from sam3d_gguf.convert.manifest import CALL_NOT_MADE, Layout, Manifest
from sam3d_gguf.convert.objects import ObjectsRequest, convert_objects
from sam3d_gguf.convert.release import convert_body, convert_mhr
from sam3d_gguf.convert.request import MANIFEST_NAME, Request
from sam3d_gguf.extractors.progress import Progress

app = new_app("Convert legacy checkpoints to GGUF files and their manifest.")


_SHOWN = 12

CheckpointOption = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint", readable=False, help="The legacy file (model.ckpt, mhr_model.pt)."
    ),
]
ExtractionOption = Annotated[
    Path | None,
    typer.Option(
        "--extraction",
        readable=False,
        help="A folder made by sam3d-extract; with --checkpoint, it is checked against that.",
    ),
]
PrecisionOption = Annotated[
    Precision | None,
    typer.Option("--precision", help="source keeps BF16 (default of single); f32 widens exactly."),
]
ManifestOption = Annotated[
    Path | None,
    typer.Option("--manifest", readable=False, help="The manifest; default: beside the output."),
]
KeepOption = Annotated[
    Path | None,
    typer.Option(
        "--keep-safetensors", readable=False, help="Keep the safetensors and their report here."
    ),
]


@app.callback()
def options(version: VersionOption = False) -> None:
    """Convert legacy checkpoints to GGUF files and their manifest."""


@app.command()
def body(
    out: Annotated[
        Path,
        typer.Option(
            "--out", readable=False, help="The GGUF file; with --layout components, a new folder."
        ),
    ],
    checkpoint: CheckpointOption = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            readable=False,
            help="model_config.yaml; default: beside the checkpoint or one level up.",
        ),
    ] = None,
    mhr: Annotated[
        Path | None,
        typer.Option(
            "--mhr",
            readable=False,
            help="mhr_model.pt (or its extraction): written as mhr.gguf beside.",
        ),
    ] = None,
    extraction: ExtractionOption = None,
    layout: Annotated[
        Layout, typer.Option("--layout", help="One file, or the native components.")
    ] = "single",
    precision: PrecisionOption = None,
    manifest: ManifestOption = None,
    keep_safetensors: KeepOption = None,
    allow_unpinned: UnpinnedOption = False,
    sandbox: SandboxOption = "bubblewrap",
    base: BaseOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Convert SAM 3D Body (model.ckpt), and MHR with it."""
    with reporting(debug):
        request = Request(
            out=out,
            checkpoint=checkpoint,
            extraction=extraction,
            config=config,
            mhr=mhr,
            layout=layout,
            precision=precision,
            manifest=manifest,
            keep_safetensors=keep_safetensors,
            allow_unpinned=allow_unpinned,
            sandbox=choose_sandbox(sandbox, base),
        )
        _convert(convert_body, request, json)


@app.command()
def mhr(
    out: Annotated[Path, typer.Option("--out", readable=False, help="The GGUF file.")],
    checkpoint: CheckpointOption = None,
    extraction: ExtractionOption = None,
    precision: PrecisionOption = None,
    manifest: ManifestOption = None,
    keep_safetensors: KeepOption = None,
    allow_unpinned: UnpinnedOption = False,
    sandbox: SandboxOption = "bubblewrap",
    base: BaseOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Convert MHR alone (mhr_model.pt)."""
    with reporting(debug):
        request = Request(
            out=out,
            checkpoint=checkpoint,
            extraction=extraction,
            precision=precision,
            manifest=manifest,
            keep_safetensors=keep_safetensors,
            allow_unpinned=allow_unpinned,
            sandbox=choose_sandbox(sandbox, base),
        )
        _convert(convert_mhr, request, json)


@app.command()
def objects(
    checkpoint_dir: CheckpointDirOption,
    out: Annotated[
        Path, typer.Option("--out", readable=False, help="A new folder for the GGUF files.")
    ],
    parts: PartsOption = None,
    moge: MogeOption = None,
    precision: Annotated[
        Precision, typer.Option("--precision", help="source keeps F16; f32 widens exactly.")
    ] = "source",
    allow_unpinned: UnpinnedOption = False,
    sandbox: SandboxOption = "bubblewrap",
    base: BaseOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Convert SAM 3D Objects: each part to a file of its own."""
    with reporting(debug):
        request = ObjectsRequest(
            checkpoint_dir=checkpoint_dir,
            out=out,
            parts=split_parts(parts),
            moge=moge,
            precision=precision,
            allow_unpinned=allow_unpinned,
            sandbox=choose_sandbox(sandbox, base),
        )
        with progress_bars() as progress:
            manifest = convert_objects(request, progress)
        _show(manifest, out / MANIFEST_NAME, json)


def _convert(
    convert: Callable[[Request, Progress], Manifest], request: Request, json: bool
) -> None:
    with progress_bars() as progress:
        manifest = convert(request, progress)
    _show(manifest, request.manifest_path, json)


def _show(manifest: Manifest, path: Path, json: bool) -> None:
    with printing(complete=True):
        if json:
            print_json(manifest.to_document())
        else:
            _print(manifest, path)


def _print(manifest: Manifest, path: Path) -> None:
    table = Table("file", "architecture", "tensors", "bytes", "published hash")
    for file in manifest.files:
        table.add_row(
            cell(file.name),
            cell(file.architecture),
            str(len(file.tensors)),
            f"{file.bytes:,}",
            file.known_answer,
        )
    out.print(table)
    print_hashes((file.sha256, file.name) for file in manifest.files)
    out.print(f"{manifest.status}, {manifest.origin}; precision {manifest.precision}")
    if manifest.layout == "components":
        out.print(f"native contract: {manifest.native_contract}")
    calls = [item for item in manifest.left_out if item.reason == CALL_NOT_MADE]
    for item in calls[:_SHOWN]:
        out.print(f"warning: {cell(item.role)}: {cell(item.what)}: {CALL_NOT_MADE}")
    if len(calls) > _SHOWN:
        out.print(f"warning: and {len(calls) - _SHOWN} more such calls; the manifest has them all")
    for note in manifest.notes:
        out.print(f"note: {cell(note)}")
    out.print(f"manifest: {cell(str(path))}")


def main() -> None:
    """The entry point."""
    app()
