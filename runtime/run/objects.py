"""Photos and masks to files with an opened pipeline of SAM 3D Objects."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sam3d_gguf.extractors.files import open_source
from sam3d_gguf.runtime.geometry.arrays import Uint8
from sam3d_gguf.runtime.ggml.network import Taps
from sam3d_gguf.runtime.images import read_object_mask, read_photo
from sam3d_gguf.runtime.objects.pipeline import ObjectsPipeline, SceneResult
from sam3d_gguf.runtime.objects.preprocess import check_mask
from sam3d_gguf.runtime.objects.result import Files, object_files, scene_files, seen_files
from sam3d_gguf.runtime.objects.stages import ScenePoints
from sam3d_gguf.runtime.objects.watch import Progress
from sam3d_gguf.runtime.output import NewFile, check_free, check_taps_free, publish_into
from sam3d_gguf.runtime.run.files import Timings, timings_file
from sam3d_gguf.runtime.run.naming import naming
from sam3d_gguf.runtime.run.objects_batch import ObjectsJob, read_pointmap
from sam3d_gguf.runtime.tensor_files import encode_tensors

OBJECT_FILES = ("gaussians.ply", "mesh.glb", "pose.json", "result.safetensors")
SCENE_FILES = ("gaussians.ply", "mesh.glb")
PHOTO_FILES = ("preview.png", "report.json", "timings.json")


@dataclass(frozen=True, slots=True)
class ObjectsOutput:
    """Where to write.

    Attributes:
        folder: of all photos.
        taps: a file for the intermediates of the only photo, or None.
    """

    folder: Path
    taps: Path | None = None


def object_names(job: ObjectsJob) -> list[str]:
    """The folders of a photo's objects: none for the only one."""
    count = len(job.masks)
    return [""] if count == 1 else [f"object-{number}" for number in range(1, count + 1)]


def check_jobs(jobs: Sequence[ObjectsJob], output: ObjectsOutput) -> None:
    """Refuse inputs that are not there, and outputs that are, before a model is loaded.

    Raises:
        InputError: a file that can't be opened, or a job that can't be run.
        OutputError: a file exists already, or a folder cannot be written.
    """
    places = [place for job in jobs for place in _places(job, output.folder)]
    check_free(places, makes_folders=True)
    if output.taps is not None:
        check_taps_free(output.taps, places)
    for job in jobs:
        with naming(job.name):
            job.check()
            for path in job.sources():
                with open_source(path):
                    pass


def run_job(
    pipeline: ObjectsPipeline,
    job: ObjectsJob,
    output: ObjectsOutput,
    load_seconds: float,
    progress: Progress,
) -> list[Path]:
    """Run one photo and write all of its files at once.

    Args:
        load_seconds: what opening the models took, for timings.json.

    Returns:
        The files written; without mesh.glb where an object has no surface.

    Raises:
        InputError: an input that cannot be used.
        OutputError: a file exists already, or the folder cannot be written.
    """
    timings = Timings({"load": load_seconds})
    with naming(job.name):
        started = time.perf_counter()
        photo = read_photo(job.image, opaque=True)
        masks = [_mask(path, photo) for path in job.masks]
        points = None
        if job.pointmap is not None:
            points = ScenePoints(read_pointmap(job.pointmap, photo), None, estimated=False)
        starts, noise = job.starts()
        timings.add("read", time.perf_counter() - started)
        captured = [_Captured() for _ in masks]
        keep = captured if output.taps is not None else None
        scene = pipeline(photo, masks, starts, points, progress=progress, taps=keep)
        for stage, seconds in scene.seconds.items():
            timings.add(stage, seconds)
        started = time.perf_counter()
        files = _files(job, scene, photo, masks, noise)
        timings.add("export", time.perf_counter() - started)
    last = timings_file(timings, scene.provenance, scene.memory)
    files |= {name: [data] for name, data in last.items()}
    folder = output.folder / job.name
    places: list[NewFile] = [(folder / name, parts) for name, parts in files.items()]
    if output.taps is not None:
        places.append((output.taps, _taps(job, captured, scene)))
    publish_into(folder, places)
    return [path for path, _ in places]


def _mask(path: Path, photo: Uint8) -> Uint8:
    mask = read_object_mask(path)
    check_mask(photo, mask, str(path))
    return mask


class _Captured(Taps):
    """Keeps an object's intermediates."""

    def __init__(self) -> None:
        self.found: dict[str, NDArray[Any]] = {}

    def __call__(self, name: str, array: NDArray[Any], /) -> None:
        self.found[name] = np.ascontiguousarray(array)


def _places(job: ObjectsJob, folder: Path) -> list[Path]:
    own = [Path(name) / file for name in object_names(job) for file in OBJECT_FILES]
    shared = [Path(name) for name in (*SCENE_FILES, *PHOTO_FILES)]
    return [folder / job.name / name for name in dict.fromkeys([*own, *shared])]


def _files(
    job: ObjectsJob, scene: SceneResult, photo: Uint8, masks: Sequence[Uint8], noise: str
) -> Files:
    names = object_names(job)
    files: Files = scene_files(scene) if len(names) > 1 else {}
    for name, found in zip(names, scene.objects, strict=True):
        for file, parts in object_files(found, scene.provenance).items():
            files[str(Path(name) / file)] = parts
    labels = [name or "object" for name in names]
    return files | seen_files(scene, photo, masks, labels, noise)


def _taps(job: ObjectsJob, captured: Sequence[_Captured], scene: SceneResult) -> list[bytes]:
    names = object_names(job)
    tensors = {
        f"{name}.{key}" if name else key: array
        for name, each in zip(names, captured, strict=True)
        for key, array in each.found.items()
    }
    return encode_tensors(tensors, scene.provenance)
