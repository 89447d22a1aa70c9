"""Preprocessing and the condition tokens."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sam3d_gguf.extractors.models import ObjectsModel
from sam3d_gguf.runtime.ggml.backend import Backend
from sam3d_gguf.runtime.objects import pointmap
from sam3d_gguf.runtime.objects.components.captures import Captured, Recorder, decimal
from sam3d_gguf.runtime.objects.components.component import Component
from sam3d_gguf.runtime.objects.components.inputs import Arrays, Wanted
from sam3d_gguf.runtime.objects.metadata import integer
from sam3d_gguf.runtime.objects.neural_embed import ConditionEmbedder
from sam3d_gguf.runtime.objects.preprocess import (
    PreprocessSettings,
    crop_around_mask,
    latent_inputs,
    mask_box,
    pad_to_square,
    split,
    structure_inputs,
)
from sam3d_gguf.runtime.objects.release import ObjectsRelease
from sam3d_gguf.runtime.objects.stages import LATENT, STRUCTURE

PHOTO: Mapping[str, Wanted] = {
    "rgba": Wanted(("H", "W", 4), "uint8"),
    "moge_points_hwc": Wanted(("H", "W", 3), finite=False),
}
"""A photo with its mask as alpha, and the depth model's points."""

_FIRST_WINDOWS = 8


def _preprocess(release: ObjectsRelease, backend: Backend, inputs: Arrays) -> Captured:
    """Every step, and what the encoders take."""
    del backend
    settings = PreprocessSettings.of(release[STRUCTURE])
    rgba = inputs["rgba"]
    image, mask = split(rgba)
    points = pointmap.from_depth_model(inputs["moge_points_hwc"])
    factor = settings.box_size_factor
    box = mask_box(mask[0], factor)
    crop = crop_around_mask(image, mask, points, settings)
    assert crop.points is not None
    half = np.ascontiguousarray(points[:, ::2, ::2])
    scene = pointmap.normalized(points, mask)
    found: Captured = {
        "compute_pointmap.pointmap": points,
        f"compute_mask_bbox.box_{decimal(factor)}": np.array(box, np.int32),
        "crop_around_mask_with_padding.image": crop.image,
        "crop_around_mask_with_padding.mask": crop.mask,
        "crop_around_mask_with_padding.pointmap": crop.points,
        "pad_to_square_centered.image": pad_to_square(image),
        "resize_all_to_same_size.half_pointmap": pointmap.resized(half, points.shape[1:]),
        "ObjectCentricSSI.pointmap": scene.points,
        "ObjectCentricSSI.scale": scene.scale,
        "ObjectCentricSSI.shift": scene.shift,
    }
    structure = structure_inputs(rgba, points, settings)
    latent = latent_inputs(rgba, PreprocessSettings.of(release[LATENT]))
    found |= {f"ss.{name}": array for name, array in structure.items()}
    return found | {f"slat.{name}": array for name, array in latent.items()}


def _embedder(model: ObjectsModel) -> Component:
    """The condition tokens of a generator."""

    def wanted(release: ObjectsRelease) -> Mapping[str, Wanted]:
        size = integer(release[model], "image_size")
        image, mask = Wanted((1, 3, size, size)), Wanted((1, 1, size, size))
        found = {"image": image, "mask": mask, "rgb_image": image, "rgb_image_mask": mask}
        if model == STRUCTURE:
            for whole in ("", "rgb_"):
                points = Wanted((1, 3, size, size), finite=False)
                found[f"{whole}pointmap"] = points
                found[f"{whole}pointmap_scale"] = found[f"{whole}pointmap_shift"] = Wanted((1, 3))
        return found

    def run(release: ObjectsRelease, backend: Backend, inputs: Arrays) -> Captured:
        recorder = Recorder()
        with ConditionEmbedder(backend, release[model]) as embedder:
            given = {name: inputs[name] for name in embedder.inputs}
            tokens = embedder.tokens(given, taps=recorder)
        found: Captured = {}
        for name, array in recorder.found.items():
            if name.startswith("module_list.2.block0"):
                call = name.removeprefix("module_list.2.block0")
                found[f"module_list.2.block0_first8windows{call}"] = array[:_FIRST_WINDOWS]
            elif not name.startswith("module_list.1.block"):
                found[name] = array
        return found | {"tokens": tokens}

    return Component((model,), wanted, run)


PREPROCESS = Component((STRUCTURE, LATENT), lambda _: PHOTO, _preprocess)
EMBED_STRUCTURE = _embedder(STRUCTURE)
EMBED_LATENT = _embedder(LATENT)
