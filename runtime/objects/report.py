"""What a run's report.json says: how near its decisions were, and what its numbers rest on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sam3d_gguf.runtime.geometry.arrays import Bool
from sam3d_gguf.runtime.objects.camera import Camera
from sam3d_gguf.runtime.objects.pipeline import ObjectResult, SceneResult
from sam3d_gguf.runtime.objects.structure import OccupancySettings
from sam3d_gguf.schemas.documents import encode_document

NEAR_TIE = 1e-3
"""A voxel whose logit is this near the threshold may fall on its other side on another device."""

VERIFIED, STRUCTURAL = "numerically verified", "structural only"


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a run.

    Attributes:
        component: whose captures hold what the original computed.
        within: the stage that it is timed in.
    """

    component: str
    within: str


def _stage(name: str, component: str = "", within: str = "") -> tuple[str, Stage]:
    return name, Stage(component or name, within or name)


STAGES: Mapping[str, Stage] = dict(
    (
        _stage("depth"),
        _stage("preprocess"),
        _stage("embed-ss"),
        _stage("ss-flow", "ss-flow-sampler"),
        _stage("ss-decoder"),
        _stage("structure", "ss-decoder"),
        _stage("pose", "pose-decoder", "structure"),
        _stage("embed-slat"),
        _stage("slat-flow", "slat-flow-sampler"),
        _stage("gaussian-decoder-32"),
        _stage("gaussian-decoder-4"),
        _stage("mesh-decoder"),
        _stage("mesh-extract", within="mesh-decoder"),
    )
)
"""In their order."""


@dataclass(frozen=True, slots=True)
class Silhouette:
    """How an object's outline compares with its mask.

    Attributes:
        iou: intersection over union; None where it was not drawn.
        reason: why not.
    """

    iou: float | None
    width: int
    height: int
    reason: str = ""


def report(
    scene: SceneResult,
    names: Sequence[str],
    masks: Sequence[Bool],
    silhouettes: Sequence[Silhouette],
    camera: Camera | None,
    noise: str,
) -> bytes:
    """The document, of the schema `objects-report`.

    Args:
        names: of the objects.
        masks: [H, W] of the photo.
        camera: of the pointmap, if it has one.
        noise: what the sampling started from, in words.
    """
    points = scene.points.points
    _, height, width = points.shape
    document: dict[str, Any] = {
        "schema_version": 1,
        "pointmap": {
            "source": "estimated" if scene.points.estimated else "supplied",
            "width": width,
            "height": height,
            "valid_fraction": float(np.isfinite(points).all(axis=0).mean()),
            "camera": _camera(camera),
        },
        "sampling": {
            "noise": noise,
            "structure_steps": scene.structure_sampling.steps,
            "latent_steps": scene.latent_sampling.steps,
            "gaussians": scene.objects[0].gaussians.settings.count,
        },
        "objects": [
            _object(found, scene.occupancy, name, int(mask.sum()), outline)
            for found, name, mask, outline in zip(
                scene.objects, names, masks, silhouettes, strict=True
            )
        ],
        "stages": _stages(scene),
        "models_verified": scene.verified,
        "provenance": dict(scene.provenance),
    }
    return encode_document(document, "objects-report")


def _camera(camera: Camera | None) -> dict[str, Any] | None:
    if camera is None:
        return None
    return {
        "focal_pixels": camera.focal,
        "width": camera.width,
        "height": camera.height,
        "intrinsics": camera.intrinsics.tolist(),
        "median_error_pixels": camera.error if np.isfinite(camera.error) else None,
    }


def _object(
    found: ObjectResult,
    settings: OccupancySettings,
    name: str,
    pixels: int,
    outline: Silhouette,
) -> dict[str, Any]:
    away = np.abs(found.logits - np.float32(settings.threshold))
    mesh = found.mesh
    silhouette: dict[str, Any] = {
        "iou": outline.iou,
        "width": outline.width,
        "height": outline.height,
    }
    if outline.reason:
        silhouette["reason"] = outline.reason
    return {
        "name": name,
        "mask_pixels": pixels,
        "occupancy": {
            "threshold": settings.threshold,
            "occupied": len(found.structure.occupied),
            "surface": len(found.structure.surface),
            "voxels": len(found.structure.coords),
            "downsample_factor": found.structure.scale_factor,
            "near_tie_distance": NEAR_TIE,
            "near_ties": int((away < NEAR_TIE).sum()),
            "least_distance": float(away.min()),
        },
        "gaussians": len(found.gaussians.places),
        "mesh": {
            "vertices": 0 if mesh is None else len(mesh.vertices),
            "faces": 0 if mesh is None else len(mesh.faces),
        },
        "silhouette": silhouette,
    }


def _stages(scene: SceneResult) -> list[dict[str, Any]]:
    """Each stage of the run; verified where tests hold its arithmetic to the original's."""
    verified = scene.provenance["precision"] == "strict-f32"
    reason = "what the original computed is compared in strict-f32 precision alone"
    return [
        {
            "name": name,
            "status": VERIFIED if verified else STRUCTURAL,
            "component": stage.component,
            **({} if verified else {"reason": reason}),
        }
        for name, stage in STAGES.items()
        if stage.within in scene.seconds
    ]
