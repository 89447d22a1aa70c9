"""`sam3d-run objects`: photos and masks to Gaussians and meshes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from sam3d_gguf.cli.entry import say
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
    run_reporting,
)
from sam3d_gguf.cli.terminal import DebugOption, JsonOption, cell, err
from sam3d_gguf.runtime.objects.components import NAMES
from sam3d_gguf.runtime.objects.pipeline import ObjectsOptions, ObjectsPipeline
from sam3d_gguf.runtime.objects.sampler import MAX_STEPS
from sam3d_gguf.runtime.objects.watch import Progress
from sam3d_gguf.runtime.run.objects import ObjectsOutput, check_jobs, run_job
from sam3d_gguf.runtime.run.objects_batch import DEFAULT_SEED, ObjectsJob, read_objects_batch
from sam3d_gguf.runtime.run.objects_component import ComponentJob, run_component_job
from sam3d_gguf.schemas.errors import InputError

_SPEED_SECONDS = 3600
"""Steps of a flow can take minutes each."""


class GaussiansChoice(StrEnum):
    """How many Gaussians a voxel has."""

    many = "32"
    few = "4"


def objects(
    models: Annotated[Path, typer.Option(readable=False, help="The folder of the parts' GGUFs.")],
    image: Annotated[Path | None, typer.Option(readable=False, help="JPEG, PNG or WebP.")] = None,
    mask: Annotated[
        list[Path] | None,
        typer.Option(readable=False, help="PNG that marks the object; repeatable, one an object."),
    ] = None,
    pointmap: Annotated[
        Path | None,
        typer.Option(
            readable=False, help=".npy with a point for each pixel; else it is estimated."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help=f"Of the noise; {DEFAULT_SEED} if not given.")
    ] = None,
    noise: Annotated[
        Path | None, typer.Option(readable=False, help="Stored noise, safetensors.")
    ] = None,
    steps_ss: Annotated[
        int | None, typer.Option(help=f"Steps of the structure's flow, 1 to {MAX_STEPS}.")
    ] = None,
    steps_slat: Annotated[
        int | None, typer.Option(help=f"Steps of the latent's flow, 1 to {MAX_STEPS}.")
    ] = None,
    gaussians: Annotated[
        GaussiansChoice | None, typer.Option(help="Gaussians of a voxel; 32 if not given.")
    ] = None,
    batch: Annotated[
        Path | None, typer.Option(readable=False, help="JSON list of photos to run.")
    ] = None,
    component: Annotated[
        str | None, typer.Option(help=f"Run one alone: {', '.join(NAMES)}.")
    ] = None,
    inputs: Annotated[
        Path | None, typer.Option(readable=False, help="What the component takes, safetensors.")
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
    """Reconstruct the objects that masks mark in photos: Gaussians, meshes, poses."""
    with run_reporting(debug):
        if component is not None or inputs is not None:
            others = (
                image,
                mask,
                pointmap,
                seed,
                noise,
                steps_ss,
                steps_slat,
                gaussians,
                batch,
                out,
            )
            if any(each is not None and each != [] for each in others):
                raise InputError(
                    "--component stands alone", expected="--inputs, --taps and no photo or --out"
                )
            if component is None or inputs is None or taps is None:
                raise InputError(
                    "a component needs its name and two files",
                    expected="--component NAME --inputs FILE --taps FILE",
                )
            alone = ComponentJob(
                component,
                inputs,
                taps,
                backend_name(backend),
                device,
                threads,
                precision_name(precision),
                expect_device,
            )
            run_component_job(models, alone, verify=verify)
            print_written([taps], as_json=as_json)
            return
        if batch is not None and any((image, mask, pointmap, noise, taps)):
            raise InputError("--batch stands alone", expected="no --image, --mask, ... beside it")
        if batch is None and (image is None or not mask):
            raise InputError("nothing to run", expected="--image with --mask, or --batch")
        if out is None:
            raise InputError("no folder for the files", expected="--out DIR")
        if noise is not None and seed is not None:
            raise InputError("--seed and --noise", expected="one of them")
        chosen = DEFAULT_SEED if seed is None else seed
        if batch is not None:
            jobs = read_objects_batch(batch, chosen)
        else:
            assert image is not None
            jobs = [ObjectsJob("", image, tuple(mask or ()), pointmap, noise, chosen)]
        output = ObjectsOutput(out, taps)
        check_jobs(jobs, output)
        options = ObjectsOptions(
            steps_ss, steps_slat, 4 if gaussians is GaussiansChoice.few else 32
        )
        started = time.perf_counter()
        pipeline = ObjectsPipeline.load(
            models,
            options,
            depth=any(job.pointmap is None for job in jobs),
            backend=backend_name(backend),
            device=device,
            threads=threads,
            precision=precision_name(precision),
            expect_device=expect_device,
            verify=verify,
            resident=len(jobs) > 1,
        )
        load_seconds = time.perf_counter() - started
        written: list[Path] = []
        with pipeline:
            try:
                for job in jobs:
                    with stage_progress(job.name) as progress:
                        written += run_job(pipeline, job, output, load_seconds, progress)
            except BaseException:
                # The error that ended it is what counts, whether or not this can be written.
                with contextlib.suppress(typer.Exit):
                    print_written(written, as_json=as_json and bool(written))
                raise
        print_written(written, as_json=as_json)


class _Lines:
    """Says each stage in a line, for who reads a log."""

    def __init__(self, photo: str) -> None:
        self._before = f"{cell(photo)}: " if photo else ""

    def stage(self, name: str, steps: int) -> None:
        """See `runtime.objects.watch.Progress`."""
        say(f"{self._before}{name}, {steps} {'step' if steps == 1 else 'steps'}")

    def step(self) -> None:
        """See `runtime.objects.watch.Progress`."""


class _StageBars:
    """Shows each stage as a bar with its steps and the time left."""

    def __init__(self, bars: Bars, photo: str) -> None:
        self._bars = bars
        self._before = f"{cell(photo)}: " if photo else ""
        self._task = bars.add_task(f"{self._before}preparing", total=None)

    def stage(self, name: str, steps: int) -> None:
        """See `runtime.objects.watch.Progress`."""
        self._bars.remove_task(self._task)
        self._task = self._bars.add_task(f"{self._before}{name}", total=steps)

    def step(self) -> None:
        """See `runtime.objects.watch.Progress`."""
        self._bars.advance(self._task)


@contextlib.contextmanager
def stage_progress(photo: str) -> Generator[Progress]:
    """Progress of a photo on standard error: a bar, or lines where that is no terminal."""
    if not err.is_terminal:
        yield _Lines(photo)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=err, speed_estimate_period=_SPEED_SECONDS) as bars:
        yield _StageBars(bars, photo)
