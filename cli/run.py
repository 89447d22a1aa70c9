"""`sam3d-run`: photos to bodies and objects, MHR parameters to meshes."""

from __future__ import annotations

import contextlib
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import track
from rich.table import Table

from sam3d_gguf.cli.entry import printing, say
from sam3d_gguf.cli.run_objects import objects
from sam3d_gguf.cli.run_options import (
    BackendChoice,
    BackendOption,
    DeviceOption,
    ExpectOption,
    OutOption,
    PrecisionChoice,
    PrecisionOption,
    ThreadsOption,
    VerifyOption,
    backend_name,
    precision_name,
    print_written,
    read_tensors,
    run_reporting,
)
from sam3d_gguf.cli.terminal import (
    DebugOption,
    JsonOption,
    VersionOption,
    cell,
    err,
    new_app,
    print_json,
    reporting,
)
from sam3d_gguf.cli.terminal import (
    out as terminal,
)
from sam3d_gguf.runtime.body import BodyModel, MhrModel
from sam3d_gguf.runtime.body.cases import run_cases
from sam3d_gguf.runtime.body.estimator import InferenceType
from sam3d_gguf.runtime.ggml.backend import Device, list_devices
from sam3d_gguf.runtime.ggml.errors import BackendError
from sam3d_gguf.runtime.ggml.library import (
    VULKAN_MODULE,
    load_library,
    load_vulkan_module,
)
from sam3d_gguf.runtime.output import check_free, publish_into
from sam3d_gguf.runtime.provenance import provenance_of
from sam3d_gguf.runtime.run.batch import Photo, intrinsics_matrix, read_batch
from sam3d_gguf.runtime.run.body import BodyOptions, check_photos, run_photo
from sam3d_gguf.runtime.run.files import (
    FEATURE_FILES,
    MHR_FILES,
    Timings,
    mhr_files,
    timings_file,
)
from sam3d_gguf.runtime.run.mhr import MAX_MESHES, read_parameters
from sam3d_gguf.runtime.tensor_files import write_tensors
from sam3d_gguf.schemas.errors import InputError

app = new_app("Run SAM 3D Body, MHR and SAM 3D Objects on GGML.")
app.command()(objects)


class InferenceChoice(StrEnum):
    """What to estimate."""

    full = "full"
    body = "body"
    hand = "hand"


MhrOption = Annotated[Path, typer.Option(readable=False, help="The MHR GGUF.")]


@app.callback(invoke_without_command=True)
def devices(
    context: typer.Context,
    list_them: Annotated[
        bool, typer.Option("--list-devices", help="List the devices and their memory.")
    ] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
    _version: VersionOption = False,
) -> None:
    """Run SAM 3D Body, MHR and SAM 3D Objects on GGML."""
    if list_them:
        with reporting(debug):
            library = load_library()
            if (library.directory / VULKAN_MODULE).exists():
                try:
                    load_vulkan_module(library, "strict-f32")
                except BackendError as error:
                    # What computes without it can be listed all the same.
                    say(f"warning: {cell(str(error))}")
            with printing():
                _print_devices(list_devices(library), as_json=as_json)
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        with printing():
            typer.echo(context.get_help())
        raise typer.Exit(2)


@app.command()
def body(
    model: Annotated[Path, typer.Option(readable=False, help="The Body GGUF.")],
    mhr: MhrOption,
    image: Annotated[Path | None, typer.Option(readable=False, help="JPEG, PNG or WebP.")] = None,
    bbox: Annotated[
        list[str] | None, typer.Option(help="x0,y0,x1,y1 in pixels; repeatable, one a person.")
    ] = None,
    intrinsics: Annotated[
        str | None, typer.Option(help="fx,fy,cx,cy in pixels; a default is assumed without it.")
    ] = None,
    mask: Annotated[
        list[Path] | None,
        typer.Option(readable=False, help="Silhouette image; repeatable, one a box."),
    ] = None,
    inference_type: Annotated[
        InferenceChoice, typer.Option(help="full refines hands; hand sees right hands alone.")
    ] = InferenceChoice.full,
    features_only: Annotated[
        bool, typer.Option("--features-only", help="Pose token and pred_cam_t alone.")
    ] = False,
    batch: Annotated[
        Path | None, typer.Option(readable=False, help="JSON list of photos to run.")
    ] = None,
    cases: Annotated[
        Path | None,
        typer.Option(readable=False, help="Compute single components from these recorded inputs."),
    ] = None,
    taps: Annotated[
        Path | None, typer.Option(readable=False, help="Write all intermediates here.")
    ] = None,
    out: OutOption = None,
    backend: BackendOption = BackendChoice.cpu,
    device: DeviceOption = 0,
    threads: ThreadsOption = None,
    expect_device: ExpectOption = None,
    precision: PrecisionOption = PrecisionChoice.strict_f32,
    verify: VerifyOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Estimate the people in photos: meshes, keypoints, poses."""
    with run_reporting(debug):
        _check_options(cases, image, bbox, intrinsics, mask, batch, taps, out)
        if taps is not None and (features_only or inference_type is InferenceChoice.hand):
            raise InputError("--taps is for the body and full estimators", where="--taps")
        photos = [] if cases else _photos(image, bbox, intrinsics, mask, batch)
        options = BodyOptions(
            _inference(inference_type), features_only, out or Path(), None if cases else taps
        )
        check_photos(photos, options)
        if cases is not None and taps is not None:
            check_free([taps])
        inputs = read_tensors(cases) if cases else {}
        started = time.perf_counter()
        opened = BodyModel.load(
            model,
            mhr=mhr,
            backend=backend_name(backend),
            device=device,
            threads=threads,
            precision=precision_name(precision),
            expect_device=expect_device,
            verify=verify,
        )
        load_seconds = time.perf_counter() - started
        with opened:
            if cases is not None and taps is not None:
                found = run_cases(inputs, opened.estimator.passes)
                write_tensors(taps, found, opened.provenance)
                print_written([taps], as_json=as_json)
                return
            written: list[Path] = []
            try:
                for photo in _progress(photos):
                    written += run_photo(opened, photo, options, load_seconds)
            except BaseException:
                # The error that ended it is what counts, whether or not this can be written.
                with contextlib.suppress(typer.Exit):
                    print_written(written, as_json=as_json and bool(written))
                raise
        print_written(written, as_json=as_json)


@app.command()
def mhr(
    mhr: MhrOption,
    params: Annotated[
        Path, typer.Option(readable=False, help="Parameters, .json or .npz; rows are bodies.")
    ],
    out: Annotated[
        Path, typer.Option(readable=False, help="Folder for the files; made if missing.")
    ],
    backend: BackendOption = BackendChoice.cpu,
    device: DeviceOption = 0,
    threads: ThreadsOption = None,
    expect_device: ExpectOption = None,
    precision: PrecisionOption = PrecisionChoice.strict_f32,
    verify: VerifyOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Pose MHR bodies: result.safetensors, and meshes for up to 64 rows."""
    with reporting(debug):
        parameters = read_parameters(params)
        few = len(parameters.model_parameters) <= MAX_MESHES
        names = MHR_FILES if few else FEATURE_FILES
        check_free((out / name for name in names), makes_folders=True)
        timings = Timings()
        started = time.perf_counter()
        opened = MhrModel.load(
            mhr,
            backend=backend_name(backend),
            device=device,
            threads=threads,
            precision=precision_name(precision),
            expect_device=expect_device,
            verify=verify,
        )
        timings.add("load", time.perf_counter() - started)
        with opened:
            started = time.perf_counter()
            mesh = opened(parameters.identity, parameters.model_parameters, parameters.expression)
            timings.add("mhr", time.perf_counter() - started)
            provenance = provenance_of(opened.backend, {"mhr": opened.metadata})
            started = time.perf_counter()
            files = mhr_files(opened.rig, mesh, provenance, meshes=few)
            timings.add("export", time.perf_counter() - started)
        files |= timings_file(timings, provenance)
        publish_into(out, [(out / name, [data]) for name, data in files.items()])
        print_written([out / name for name in files], as_json=as_json)


def _photos(
    image: Path | None,
    boxes: list[str] | None,
    intrinsics: str | None,
    masks: list[Path] | None,
    batch: Path | None,
) -> list[Photo]:
    if batch is not None:
        return read_batch(batch)
    assert image is not None
    assert boxes is not None
    if masks and len(masks) != len(boxes):
        raise InputError(f"{len(masks)} masks for {len(boxes)} boxes", expected="one a box")
    matrix = None if intrinsics is None else intrinsics_matrix(*_four(intrinsics, "--intrinsics"))
    rows = np.array([_four(box, "--bbox") for box in boxes])
    return [Photo("", image, rows, matrix, tuple(masks or ()))]


def _four(text: str, option: str) -> tuple[float, float, float, float]:
    try:
        a, b, c, d = (float(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(f"{text!r}", where=option, expected="four numbers and commas") from error
    return a, b, c, d


def _check_options(
    cases: Path | None,
    image: Path | None,
    boxes: list[str] | None,
    intrinsics: str | None,
    masks: list[Path] | None,
    batch: Path | None,
    taps: Path | None,
    out: Path | None,
) -> None:
    """Refuse options that do not go together, so that none is ignored."""
    one = (image, boxes, intrinsics, masks)
    if batch is not None and any(one):
        raise InputError("--batch stands alone", expected="no --image, --bbox, ... beside it")
    if cases is not None and (any(one) or batch is not None or out is not None):
        raise InputError("--cases stands alone", expected="--taps and no photo or --out beside it")
    if cases is not None and taps is None:
        raise InputError("--cases needs a file for the outputs", expected="--taps FILE")
    if cases is None and batch is None and (image is None or not boxes):
        raise InputError("nothing to run", expected="--image with --bbox, --batch, or --cases")
    if cases is None and out is None:
        raise InputError("no folder for the files", expected="--out DIR")
    if taps is not None and batch is not None:
        raise InputError("--taps is for one photo", where="--taps")


def _progress(photos: list[Photo]) -> Any:
    if len(photos) < 2 or not err.is_terminal:
        return photos
    return track(photos, "photos", console=err)


def _inference(choice: InferenceChoice) -> InferenceType:
    names: dict[InferenceChoice, InferenceType] = {
        InferenceChoice.full: "full",
        InferenceChoice.body: "body",
        InferenceChoice.hand: "hand",
    }
    return names[choice]


def _print_devices(found: tuple[Device, ...], *, as_json: bool) -> None:
    if as_json:
        entries: list[Any] = [
            {
                "backend": device.backend,
                "index": device.index,
                "name": device.name,
                "description": device.description,
                "type": device.type,
                "memory_free_bytes": device.memory_free,
                "memory_total_bytes": device.memory_total,
            }
            for device in found
        ]
        print_json({"schema_version": 1, "devices": entries})
        return
    table = Table("backend", "device", "name", "description", "free", "total")
    for device in found:
        table.add_row(
            device.backend,
            str(device.index),
            cell(device.name),
            cell(device.description),
            f"{device.memory_free / 2**30:.1f} GiB",
            f"{device.memory_total / 2**30:.1f} GiB",
        )
    terminal.print(table)


def main() -> None:
    """Entry point of the console script."""
    app()
