"""What a run of SAM 3D Objects is given: photos with masks, pointmaps and noise."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from sam3d_gguf.extractors.extraction import display_name
from sam3d_gguf.extractors.files import open_source
from sam3d_gguf.runtime.geometry.arrays import Float32, Uint8
from sam3d_gguf.runtime.ggml.host_memory import check_available
from sam3d_gguf.runtime.images import MAX_PIXELS
from sam3d_gguf.runtime.npy import HEAD, NpyHeader, npy_array, npy_header
from sam3d_gguf.runtime.objects.camera import camera_of
from sam3d_gguf.runtime.objects.noise import Noise, SeededNoise, StoredNoise
from sam3d_gguf.runtime.objects.pointmap import from_file
from sam3d_gguf.runtime.run.naming import refuse_same_names
from sam3d_gguf.schemas.errors import InputError
from sam3d_gguf.schemas.strict_json import as_array, as_object, load_file

DEFAULT_SEED = 42
"""The original's."""

_FAR_OFF = 0.02
"""Parts of the longer side, between which and its pixel a point is in doubt."""

_LOGGER = logging.getLogger("sam3d_gguf.objects")


@dataclass(frozen=True, slots=True)
class ObjectsJob:
    """One photo to run.

    Attributes:
        name: of its folder among the outputs; empty for the only photo of a run.
        masks: one an object.
        pointmap: .npy, or None to estimate it.
        noise: safetensors, or None to draw it from the seed.
    """

    name: str
    image: Path
    masks: tuple[Path, ...]
    pointmap: Path | None = None
    noise: Path | None = None
    seed: int = DEFAULT_SEED

    def sources(self) -> tuple[Path, ...]:
        """All files that the job reads."""
        optional = (self.pointmap, self.noise)
        return (self.image, *self.masks, *(path for path in optional if path is not None))

    def check(self) -> None:
        """Refuse what can't be run.

        Raises:
            InputError: stored noise for several objects, or a seed that is none.
        """
        if self.noise is not None and len(self.masks) > 1:
            raise InputError(
                f"stored noise and {len(self.masks)} masks",
                expected="one mask, since the noise is of one object's voxels",
            )
        if self.noise is None:
            SeededNoise(self.seed)

    def starts(self) -> tuple[list[Noise], str]:
        """Where each object's sampling starts, and that in words.

        Raises:
            InputError: the noise file can't be read.
        """
        if self.noise is None:
            return [SeededNoise(self.seed)] * len(self.masks), f"seed {self.seed}"
        return [StoredNoise.read(self.noise)], f"the file {display_name(self.noise)}"


def read_objects_batch(path: Path, seed: int) -> list[ObjectsJob]:
    """The photos of a document of the schema `objects-batch`.

    Args:
        seed: of photos that give none.

    Raises:
        InputError: not such a document, two photos of one name, or one with a seed and with noise.
    """
    document = as_object(load_file(path, schema="objects-batch"))
    entries = [as_object(entry) for entry in as_array(document["images"])]
    for index, entry in enumerate(entries):
        if "seed" in entry and "noise" in entry:
            raise InputError(
                "seed and noise", where=f"{path}#/images/{index}", expected="one of them"
            )
    jobs = [_job(entry, path.parent, seed) for entry in entries]
    refuse_same_names((job.name for job in jobs), path)
    return jobs


def _job(entry: dict[str, Any], folder: Path, seed: int) -> ObjectsJob:
    def optional(key: str) -> Path | None:
        return folder / str(entry[key]) if key in entry else None

    return ObjectsJob(
        name=str(entry["name"]),
        image=folder / str(entry["image"]),
        masks=tuple(folder / str(mask) for mask in cast("list[str]", entry["masks"])),
        pointmap=optional("pointmap"),
        noise=optional("noise"),
        seed=int(entry.get("seed", seed)),
    )


def read_pointmap(path: Path, photo: Uint8) -> Float32:
    """[3, H, W] float32 of an .npy file, for a photo [H, W, 3]; NaN where there is no point.

    The file holds [h, w, 3] floats: x left, y up, z forward, infinite where there is no point, of
    the photo's size or of its shape in another number of pixels.

    Raises:
        InputError: not such a file, another shape, NaN, or no point at all.
    """
    with open_source(path) as opened:
        head = opened.source.pread(0, min(opened.size, HEAD))
        header = npy_header(head, opened.size, str(path))
        _check_shape(header, photo, path)
        check_available(3 * opened.size, "the pointmap")
        points = npy_array(opened.source.pread(0, opened.size), str(path))
    missing = np.isnan(points).any(axis=2)
    if missing.any():
        row, column = (int(i[0]) for i in np.nonzero(missing))
        raise InputError(
            f"the pointmap holds NaN, first in row {row}, column {column}",
            where=str(path),
            expected="numbers, and infinity where there is no point",
        )
    with np.errstate(over="ignore"):
        found = from_file(np.ascontiguousarray(points, np.float32), photo.shape[:2])
    found = np.where(np.isfinite(found).all(axis=0), found, np.float32(np.nan))
    if np.isnan(found).all():
        raise InputError("the pointmap has no finite point", where=str(path))
    _check_camera(found, path)
    return found


def _check_shape(header: NpyHeader, photo: Uint8, path: Path) -> None:
    """Refuse what is no pointmap of the photo, before it is read."""
    height, width = photo.shape[:2]
    shape = header.shape
    if len(shape) != 3 or shape[2] != 3 or header.dtype.kind != "f" or not all(shape):
        raise InputError(
            f"the pointmap is {header.dtype} {list(shape)}",
            where=str(path),
            expected=f"floats [{height}, {width}, 3] for this photo, or fewer or more pixels of it",
        )
    rows, columns = shape[:2]
    # Sizes that come from scaling the photo are off by less than a pixel.
    if abs(rows * width - columns * height) >= max(width, height) or rows * columns > MAX_PIXELS:
        raise InputError(
            f"the pointmap is {columns}x{rows}, the photo {width}x{height}",
            where=str(path),
            expected="a pointmap of the whole photo",
        )


def _check_camera(points: Float32, path: Path) -> None:
    """Refuse points that no camera sees where they are, and tell of those that lie elsewhere.

    Raises:
        InputError: none is ahead, or their directions are those of other axes.
    """
    camera = camera_of(points)
    if camera is None:
        raise InputError(
            "no camera sees the pointmap's points where they are",
            where=str(path),
            expected="x left, y up, z forward",
            action="Turn x and y round if they are x right, y down.",
        )
    if camera.error > _FAR_OFF * max(camera.width, camera.height):
        _LOGGER.warning(
            "%r: points lie %.0f pixels (median) from where a camera would see them; they should be "
            "x left, y up, z forward, of the whole photo",
            str(path),
            camera.error,
        )
