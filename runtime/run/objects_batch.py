"""What a run of SAM 3D Objects is given: photos with masks, pointmaps and noise."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from sam3d_gguf.extractors.files import open_source
from sam3d_gguf.runtime.geometry.arrays import Float32, Uint8
from sam3d_gguf.runtime.ggml.host_memory import check_available
from sam3d_gguf.runtime.images import MAX_PIXELS
from sam3d_gguf.runtime.npy import npy_array
from sam3d_gguf.runtime.objects.noise import Noise, SeededNoise, StoredNoise
from sam3d_gguf.runtime.objects.pointmap import from_file
from sam3d_gguf.runtime.run.naming import refuse_same_names
from sam3d_gguf.schemas.errors import InputError
from sam3d_gguf.schemas.strict_json import as_array, as_object, load_file

DEFAULT_SEED = 42
"""The original's."""

_MAX_BYTES = 3 * 8 * MAX_PIXELS + (1 << 16)


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
        return [StoredNoise.read(self.noise)], f"the file {self.noise.name}"


def read_objects_batch(path: Path, seed: int) -> list[ObjectsJob]:
    """The photos of a document of the schema `objects-batch`.

    Args:
        seed: of photos that give none.

    Raises:
        InputError: not such a document, or two photos of one name.
    """
    document = as_object(load_file(path, schema="objects-batch"))
    jobs = [_job(as_object(entry), path.parent, seed) for entry in as_array(document["images"])]
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
        if opened.size > _MAX_BYTES:
            raise InputError(
                f"the file has {opened.size} bytes", where=str(path), expected="a pointmap"
            )
        check_available(3 * opened.size, "the pointmap")
        points = npy_array(opened.source.pread(0, opened.size), str(path))
    height, width = photo.shape[:2]
    expected = f"float32 [{height}, {width}, 3] for this photo"
    if points.ndim != 3 or points.shape[2] != 3 or points.dtype.kind != "f" or not points.size:
        raise InputError(
            f"the pointmap is {points.dtype} {list(points.shape)}",
            where=str(path),
            expected=expected,
        )
    rows, columns = points.shape[:2]
    # Sizes that come from scaling the photo are off by less than a pixel.
    if abs(rows * width - columns * height) >= max(width, height):
        raise InputError(
            f"the pointmap is {columns}x{rows}, the photo {width}x{height}",
            where=str(path),
            expected="a pointmap of the whole photo",
        )
    missing = np.isnan(points).any(axis=2)
    if missing.any():
        row, column = (int(i[0]) for i in np.nonzero(missing))
        raise InputError(
            f"the pointmap holds NaN, first in row {row}, column {column}",
            where=str(path),
            expected="numbers, and infinity where there is no point",
        )
    with np.errstate(over="ignore"):
        found = from_file(np.ascontiguousarray(points, np.float32), (height, width))
    found = np.where(np.isfinite(found).all(axis=0), found, np.float32(np.nan))
    if np.isnan(found).all():
        raise InputError("the pointmap has no finite point", where=str(path))
    return found
