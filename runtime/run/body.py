"""Photos to files with a loaded Body model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sam3d_gguf.extractors.files import open_source
from sam3d_gguf.runtime.body.estimator import InferenceType
from sam3d_gguf.runtime.body.model import BodyModel
from sam3d_gguf.runtime.geometry.arrays import Uint8
from sam3d_gguf.runtime.ggml.host_memory import check_available
from sam3d_gguf.runtime.images import read_mask, read_photo
from sam3d_gguf.runtime.output import NewFile, check_free, check_taps_free, publish_into
from sam3d_gguf.runtime.run.batch import Photo
from sam3d_gguf.runtime.run.files import (
    BODY_FILES,
    FEATURE_FILES,
    Files,
    Timings,
    body_files,
    timings_file,
)
from sam3d_gguf.runtime.run.naming import naming
from sam3d_gguf.runtime.tensor_files import encode_tensors


@dataclass(frozen=True, slots=True)
class BodyOptions:
    """What to compute and where to write.

    Attributes:
        features_only: pose tokens alone; `inference_type` then has no meaning.
        taps: a file for the intermediates, or None.
    """

    inference_type: InferenceType
    features_only: bool
    out: Path
    taps: Path | None = None


def check_photos(photos: Sequence[Photo], options: BodyOptions) -> None:
    """Refuse photos that are not there, and outputs that are, before the model is loaded.

    Raises:
        InputError: a photo or mask that cannot be opened.
        OutputError: a file exists already, or a folder cannot be written.
    """
    names = FEATURE_FILES if options.features_only else BODY_FILES
    places = [options.out / photo.name / name for photo in photos for name in names]
    check_free(places, makes_folders=True)
    if options.taps is not None:
        check_taps_free(options.taps, places)
    for photo in photos:
        for path in (photo.image, *photo.masks):
            with naming(photo.name), open_source(path):
                pass


def run_photo(
    model: BodyModel,
    photo: Photo,
    options: BodyOptions,
    load_seconds: float,
) -> list[Path]:
    """Run one photo and write all of its files at once.

    Args:
        load_seconds: what loading the model took, for timings.json.

    Returns:
        The files written.

    Raises:
        InputError: an input that cannot be used.
        OutputError: a file exists already, or the folder cannot be written.
    """
    timings = Timings({"load": load_seconds})
    with naming(photo.name):
        started = time.perf_counter()
        pixels = read_photo(photo.image)
        masks = _masks(photo, pixels)
        timings.add("read", time.perf_counter() - started)
        files, captured = _compute(model, photo, pixels, masks, options, timings)
    files |= timings_file(timings, model.provenance)
    folder = options.out / photo.name
    places: list[NewFile] = [(folder / name, [data]) for name, data in files.items()]
    if options.taps is not None:
        places.append((options.taps, captured))
    publish_into(folder, places)
    return [path for path, _ in places]


def _compute(
    model: BodyModel,
    photo: Photo,
    pixels: Uint8,
    masks: Uint8 | None,
    options: BodyOptions,
    timings: Timings,
) -> tuple[Files, list[bytes]]:
    if options.features_only:
        tokens = model.features(pixels, photo.boxes, photo.intrinsics, masks=masks)
        _take_stages(timings, model)
        return {"result.safetensors": tokens.safetensors()}, []
    capture = model.new_capture() if options.taps is not None else None
    result = model(
        pixels,
        photo.boxes,
        photo.intrinsics,
        options.inference_type,
        masks=masks,
        capture=capture,
    )
    _take_stages(timings, model)
    started = time.perf_counter()
    files = body_files(result, pixels)
    timings.add("export", time.perf_counter() - started)
    return files, [] if capture is None else encode_tensors(capture.tensors, model.provenance)


def _take_stages(timings: Timings, model: BodyModel) -> None:
    for name, seconds in model.stage_seconds.items():
        timings.add(name, seconds)


def _masks(photo: Photo, pixels: Uint8) -> Uint8 | None:
    if not photo.masks:
        return None
    # Each alone, all of them stacked, and in the result.
    size = (2 * len(photo.masks) + 1) * pixels.shape[0] * pixels.shape[1]
    check_available(size, f"{len(photo.masks)} masks")
    return np.stack([read_mask(path, pixels) for path in photo.masks])
