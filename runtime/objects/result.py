"""The files of a scene: Gaussians, meshes, poses, arrays, a picture and the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sam3d_gguf.runtime.export.colored_mesh import ColoredMesh, colored_glb, y_up
from sam3d_gguf.runtime.export.ply import encode_ply
from sam3d_gguf.runtime.export.preview import dimmed, marked, resized_photo, side_by_side
from sam3d_gguf.runtime.geometry.arrays import Float64, Uint8
from sam3d_gguf.runtime.geometry.rotations import matrix_from_quaternion
from sam3d_gguf.runtime.objects.camera import Camera, camera_of
from sam3d_gguf.runtime.objects.pipeline import ObjectResult, SceneResult
from sam3d_gguf.runtime.objects.placement import PosedCloud, placed, scene
from sam3d_gguf.runtime.objects.pose import Pose
from sam3d_gguf.runtime.objects.report import Silhouette, report
from sam3d_gguf.runtime.objects.stages import ScenePoints
from sam3d_gguf.runtime.objects.view import (
    Surface,
    drawn_size,
    overlap,
    rendered,
    resized_mask,
    silhouette,
)
from sam3d_gguf.runtime.tensor_files import encode_tensors
from sam3d_gguf.runtime.vocabulary import field_metadata
from sam3d_gguf.schemas.documents import encode_document
from sam3d_gguf.schemas.errors import InputError

Files = dict[str, list[bytes]]
_TO_GLTF_CAMERA = np.array([-1, 1, -1], np.float32)
"""From x left, y up, z forward to glTF's camera: x right, y up, z backward."""


def object_files(found: ObjectResult, provenance: Mapping[str, str]) -> Files:
    """The files of one object, in its own space; without mesh.glb where it has no surface."""
    files: Files = {"gaussians.ply": encode_ply(found.gaussians.cloud().columns())}
    if found.mesh is not None and len(found.mesh.faces):
        vertices = y_up(found.mesh.vertices)
        mesh = ColoredMesh("object", vertices, found.mesh.faces, found.mesh.attributes[:, :3])
        files["mesh.glb"] = [colored_glb([mesh])]
    metadata = {**field_metadata("objects-output-v1"), **provenance}
    files["pose.json"] = pose_file(found, provenance)
    files["result.safetensors"] = encode_tensors(result_arrays(found), metadata)
    return files


def result_arrays(found: ObjectResult) -> dict[str, NDArray[Any]]:
    """The fields of the schema `objects-output-v1` by name."""
    cloud = found.gaussians
    arrays: dict[str, NDArray[Any]] = {
        "coords": found.structure.coords,
        "occupied": found.structure.occupied,
        "slat": found.latent,
        "gaussian_positions": cloud.positions,
        "gaussian_features": cloud.features[:, 0],
        "gaussian_scales": cloud.scales,
        "gaussian_rotations": cloud.rotations,
        "gaussian_opacities": cloud.opacities,
        "translation": found.pose.translation,
        "rotation": found.pose.rotation,
        "scale": found.pose.scale,
    }
    if found.mesh is not None:
        arrays |= {
            "mesh_vertices": found.mesh.vertices,
            "mesh_faces": found.mesh.faces,
            "mesh_attributes": found.mesh.attributes,
        }
    return arrays


def pose_file(found: ObjectResult, provenance: Mapping[str, str]) -> list[bytes]:
    """pose.json, of the schema `objects-pose`."""
    pose = found.pose
    document: dict[str, Any] = {
        "schema_version": 1,
        "translation": pose.translation[0].tolist(),
        "rotation": pose.rotation[0].tolist(),
        "scale": pose.scale[0].tolist(),
        "matrix": pose_matrix(pose).tolist(),
        "scene": {"scale": found.scene_scale.tolist(), "shift": found.scene_shift.tolist()},
        "provenance": dict(provenance),
    }
    return [encode_document(document, "objects-pose")]


def pose_matrix(pose: Pose) -> Float64:
    """[4, 4] that takes a column vector (x, y, z, 1) of the object to the camera's space."""
    turn = matrix_from_quaternion(pose.rotation[:, [1, 2, 3, 0]])[0]
    matrix = np.eye(4)
    matrix[:3, :3] = (pose.scale[0][:, None] * turn).T
    matrix[:3, 3] = pose.translation[0]
    return matrix


def scene_files(found: SceneResult) -> Files:
    """All objects of a photo together: Gaussians as the original's `make_scene` puts them, and
    their meshes in the axes of glTF's camera."""
    clouds = [
        PosedCloud(each.gaussians.cloud(), each.gaussians.settings.minimum_size, each.pose)
        for each in found.objects
    ]
    meshes = [
        ColoredMesh(
            f"object-{number}",
            placed(each.mesh.vertices, each.pose) * _TO_GLTF_CAMERA,
            each.mesh.faces,
            each.mesh.attributes[:, :3],
        )
        for number, each in enumerate(found.objects, 1)
        if each.mesh is not None and len(each.mesh.faces)
    ]
    columns = scene(clouds).columns()
    if not all(np.isfinite(values).all() for values in columns.values()):
        raise InputError(
            "Gaussians of the scene are not finite",
            action="Give a pointmap in another unit.",
        )
    files: Files = {"gaussians.ply": encode_ply(columns)}
    if meshes:
        files["mesh.glb"] = [colored_glb(meshes)]
    return files


def seen_files(
    found: SceneResult, photo: Uint8, masks: Sequence[Uint8], names: Sequence[str], noise: str
) -> Files:
    """preview.png and report.json: the scene as the photo's camera sees it.

    Args:
        photo: [H, W, 3]; masks: [H, W], not 0 on the object; names: of the objects.
        noise: what the sampling started from, in words.
    """
    camera = scene_camera(found.points)
    height, width = photo.shape[:2]
    columns, rows = drawn_size(width, height)
    small = [resized_mask(mask, columns, rows) for mask in masks]
    surfaces = [
        None if each.mesh is None or not len(each.mesh.faces) else Surface.of(each.mesh, each.pose)
        for each in found.objects
    ]
    drawn = resized_photo(photo, columns, rows)
    right, outlines = (
        dimmed(drawn),
        [Silhouette(None, columns, rows, "there is no surface")] * len(masks),
    )
    if camera is None:
        outlines = [Silhouette(None, columns, rows, "the pointmap is of no camera")] * len(masks)
    else:
        view = camera.scaled(columns, rows)
        right = rendered([each for each in surfaces if each is not None], view, right)
        for index, surface in enumerate(surfaces):
            if surface is not None:
                iou = overlap(silhouette(surface, view), small[index])
                outlines[index] = Silhouette(iou, columns, rows)
    whole = [mask > 0 for mask in masks]
    return {
        "preview.png": [side_by_side(marked(drawn, small), right)],
        "report.json": [report(found, names, whole, outlines, camera, noise)],
    }


def scene_camera(points: ScenePoints) -> Camera | None:
    """The camera that the depth model told, or the one that the pointmap was seen by.

    None where neither is one: its focal length is not a number above 0.
    """
    _, height, width = points.points.shape
    if points.intrinsics is None:
        return camera_of(points.points)
    focal = float(points.intrinsics[0, 0]) * width
    if not (focal > 0 and np.isfinite(focal)):
        return None
    return Camera(focal, width, height, float("nan"))
