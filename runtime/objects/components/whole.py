"""The whole pipeline, from the depth model's points and given noise."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from sam3d_gguf.runtime.ggml.backend import Backend
from sam3d_gguf.runtime.objects import pointmap
from sam3d_gguf.runtime.objects.components.captures import Captured
from sam3d_gguf.runtime.objects.components.component import Component
from sam3d_gguf.runtime.objects.components.images import PHOTO
from sam3d_gguf.runtime.objects.components.inputs import Arrays, Wanted
from sam3d_gguf.runtime.objects.components.structure import latents_wanted
from sam3d_gguf.runtime.objects.metadata import integer
from sam3d_gguf.runtime.objects.noise import LATENT as LATENT_NOISE
from sam3d_gguf.runtime.objects.noise import STRUCTURE as STRUCTURE_NOISE
from sam3d_gguf.runtime.objects.noise import StoredNoise
from sam3d_gguf.runtime.objects.pipeline import ObjectsOptions, ObjectsPipeline, needed
from sam3d_gguf.runtime.objects.preprocess import check_mask
from sam3d_gguf.runtime.objects.release import ObjectsRelease
from sam3d_gguf.runtime.objects.stages import GAUSSIANS, LATENT, ScenePoints, Stages, no_taps
from sam3d_gguf.runtime.objects.watch import Watch

_OPTIONS = ObjectsOptions(gaussians=4, mesh=False)
_MANY = 32
"""Gaussians of a voxel by the other decoder."""


def _wanted(release: ObjectsRelease) -> Mapping[str, Wanted]:
    noise = latents_wanted(release, STRUCTURE_NOISE)
    channels = integer(release[LATENT], "flow.latent_channels")
    return {**PHOTO} | noise | {LATENT_NOISE: Wanted((1, "N", channels))}


def _run(release: ObjectsRelease, backend: Backend, inputs: Arrays) -> Captured:
    """What the pipeline hands from one network to the next, and the Gaussians of both decoders."""
    rgba = inputs["rgba"]
    check_mask(rgba[..., :3], rgba[..., 3])
    points = pointmap.from_depth_model(inputs["moge_points_hwc"])
    scene = ScenePoints(points, intrinsics=None, estimated=True)
    noise = StoredNoise(inputs, "the inputs")
    with ObjectsPipeline(release, backend, _OPTIONS) as pipeline:
        (found,) = pipeline.of_images([rgba], [noise], scene).objects
        coords, few = found.structure.coords, found.gaussians
        stages = Stages(release, pipeline.networks, Watch(threading.Event()), [no_taps])
        (many,) = stages.decode_gaussians([found.latent], [coords], _MANY)
    return {
        "shape_latent": found.shape,
        "coords": coords,
        "translation": found.pose.translation,
        "rotation": found.pose.rotation,
        "scale": found.pose.scale,
        "slat.feats": found.latent,
        "gaussian_4.get_xyz": few.positions,
        "gaussian_4._features_dc": few.features,
        "gaussian_4.get_scaling": few.scales,
        "gaussian_4.get_rotation": few.rotations,
        "gaussian_4.get_opacity": few.opacities,
        "gaussian_32.get_xyz_stride8": many.positions[::8],
    }


PIPELINE = Component((*needed(_OPTIONS, depth=False), GAUSSIANS[_MANY]), _wanted, _run)
