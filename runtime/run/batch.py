"""Many photos with one loaded model: the document that `--batch` reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from sam3d_gguf.runtime.geometry.arrays import Float64
from sam3d_gguf.runtime.run.naming import refuse_same_names
from sam3d_gguf.schemas.errors import InputError
from sam3d_gguf.schemas.strict_json import as_array, as_object, load_file


@dataclass(frozen=True, slots=True, eq=False)
class Photo:
    """One photo to run.

    Attributes:
        name: of its folder among the outputs; empty for the only photo of a run.
        boxes: [N, 4] pixels; intrinsics: [3, 3] or None; masks: N files, or none.
    """

    name: str
    image: Path
    boxes: Float64
    intrinsics: Float64 | None
    masks: tuple[Path, ...]


def intrinsics_matrix(fx: float, fy: float, cx: float, cy: float) -> Float64:
    """The [3, 3] camera matrix."""
    return np.array([[fx, 0, cx], [0, fy, cy], [0, 0, 1]])


def read_batch(path: Path) -> list[Photo]:
    """The photos of a document of the schema `run-batch`.

    Raises:
        InputError: not such a document, or two photos of one name.
    """
    document = as_object(load_file(path, schema="run-batch"))
    photos = [_photo(as_object(entry), path.parent) for entry in as_array(document["images"])]
    refuse_same_names((photo.name for photo in photos), path)
    return photos


def _photo(entry: dict[str, Any], folder: Path) -> Photo:
    numbers = cast("list[float] | None", entry.get("intrinsics"))
    masks = tuple(folder / str(mask) for mask in entry.get("masks", ()))
    boxes = np.array(entry["boxes"], np.float64)
    if masks and len(masks) != len(boxes):
        raise InputError(f"{len(masks)} masks for {len(boxes)} boxes", where=str(entry["name"]))
    return Photo(
        name=str(entry["name"]),
        image=folder / str(entry["image"]),
        boxes=boxes,
        intrinsics=None if numbers is None else intrinsics_matrix(*numbers),
        masks=masks,
    )
