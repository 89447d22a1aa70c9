"""What a run's report.json says: how near its decisions were, and what its numbers rest on."""

from __future__ import annotations

from collections.abc import Sequence
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
_COMPONENTS = (
    ("depth", None),
    ("preprocess", "preprocess"),
    ("embed-ss", "embed-ss"),
    ("ss-flow", "ss-flow-sampler"),
    ("ss-decoder", "ss-decoder"),
    ("structure", "ss-decoder"),
    ("pose", "pose-decoder"),
    ("embed-slat", "embed-slat"),
    ("slat-flow", "slat-flow-sampler"),
    ("gaussian-decoder-32", "gaussian-decoder-32"),
    ("gaussian-decoder-4", "gaussian-decoder-4"),
    ("mesh-decoder", "mesh-decoder"),
    ("mesh-extract", "mesh-extract"),
)
"""The stages in their order, and the component whose fixture holds what the original computed."""


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
    """Each stage of the run; verified where tests hold its arithmetic to the original's.

    The pose is decoded, and the mesh extracted, within the stages before them.
    """
    within = {"pose": "structure", "mesh-extract": "mesh-decoder"}
    strict = scene.provenance["precision"] == "strict-f32"
    found: list[dict[str, Any]] = []
    for name, component in _COMPONENTS:
        if within.get(name, name) not in scene.seconds:
            continue
        verified = strict and component is not None
        entry: dict[str, Any] = {
            "name": name,
            "status": VERIFIED if verified else STRUCTURAL,
            "component": component,
        }
        if not verified:
            entry["reason"] = (
                "the official file was never seen; its layout is that of the model's source"
                if component is None
                else "what the original computed is compared in strict-f32 precision alone"
            )
        found.append(entry)
    return found
