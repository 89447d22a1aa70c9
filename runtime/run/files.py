"""The files of a result, as bytes by name."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sam3d_gguf import __version__
from sam3d_gguf.runtime.body.mhr import MhrMesh
from sam3d_gguf.runtime.body.result import BodyResult, FeatureResult
from sam3d_gguf.runtime.export.gltf import GltfPerson, glb
from sam3d_gguf.runtime.export.obj import obj
from sam3d_gguf.runtime.export.overlay import overlay
from sam3d_gguf.runtime.geometry.arrays import Float32, Uint8
from sam3d_gguf.runtime.geometry.mhr_rig import MhrRig
from sam3d_gguf.runtime.ggml.backend import Backend
from sam3d_gguf.runtime.tensor_files import encode_tensors
from sam3d_gguf.runtime.vocabulary import field_metadata
from sam3d_gguf.schemas.documents import encode_document

Files = dict[str, bytes]
FEATURE_FILES = ("result.safetensors", "timings.json")
MHR_FILES = ("result.safetensors", "mesh.glb", "mesh.obj", "timings.json")
BODY_FILES = ("result.safetensors", "overlay.png", "mesh.glb", "mesh.obj", "timings.json")

_METRE = np.float32(0.01)
_FLIP = np.array([1, -1, -1], np.float32)


@dataclass(slots=True)
class Timings:
    """Wall seconds of the parts of a run, in the order in which they began."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, name: str, seconds: float) -> None:
        """Add to a part."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def body_files(result: BodyResult, photo: Uint8, provenance: Mapping[str, str]) -> Files:
    """result.safetensors, mesh.glb, mesh.obj and overlay.png of a body result."""
    metadata = {
        **field_metadata("body-output-v1"),
        **provenance,
        "inference_type": result.inference_type,
        "intrinsics": "assumed" if result.assumed_intrinsics else "given",
    }
    translation = result["pred_cam_t"]
    seen: Float32 = result["pred_vertices"] + translation[:, None]
    picture = overlay(photo, seen, result.rig.faces, result["pred_keypoints_2d"], result["cam_int"])
    return {
        "result.safetensors": b"".join(encode_tensors(result.arrays, metadata)),
        "overlay.png": picture,
        **_meshes(result.rig, result.mesh, translation, list(seen * _FLIP)),
    }


def feature_files(result: FeatureResult, provenance: Mapping[str, str]) -> Files:
    """result.safetensors of a features-only result."""
    metadata = {
        **field_metadata("body-features-v1"),
        **provenance,
        "intrinsics": "assumed" if result.assumed_intrinsics else "given",
    }
    return {"result.safetensors": b"".join(encode_tensors(result.arrays, metadata))}


def mhr_files(rig: MhrRig, mesh: MhrMesh, provenance: Mapping[str, str], *, meshes: bool) -> Files:
    """result.safetensors (vertices and joint states, cm) and, if asked for, the meshes."""
    metadata = {**field_metadata("mhr-output-v1"), **provenance}
    arrays = {"vertices": mesh.vertices, "skel_state": mesh.states}
    found = {"result.safetensors": b"".join(encode_tensors(arrays, metadata))}
    if meshes:
        origin = np.zeros((len(mesh.vertices), 3), np.float32)
        found |= _meshes(rig, mesh, origin, list(mesh.vertices * _METRE))
    return found


def timings_file(timings: Timings, provenance: Mapping[str, str]) -> Files:
    """timings.json: seconds by part, and the peak memory of the process in bytes."""
    document: dict[str, Any] = {
        "schema_version": 1,
        "seconds": timings.seconds,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "provenance": dict(provenance),
    }
    return {"timings.json": encode_document(document, "run-timings")}


def provenance_of(backend: Backend, models: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """What a result was made with: this tool, the models' digests, the device and libraries.

    Args:
        models: metadata of the model files, by role.
    """
    device = backend.device
    found = {
        "tool": f"sam3d-gguf {__version__}",
        "device": f"{device.backend} {device.index}: {device.description}",
        "precision": backend.precision,
        "libraries": ", ".join(f"{file.path.name} {file.sha256}" for file in backend.files),
    }
    for role, metadata in models.items():
        for key in ("sam3d.content_sha256", "sam3d.semantics_sha256"):
            if key in metadata:
                found[f"{role}.{key.removeprefix('sam3d.')}"] = str(metadata[key])
    return found


def _meshes(rig: MhrRig, mesh: MhrMesh, translation: Float32, placed: list[Float32]) -> Files:
    people = [
        GltfPerson(rest, local, place)
        for rest, local, place in zip(mesh.rest, mesh.local, translation, strict=True)
    ]
    return {"mesh.glb": glb(rig, people), "mesh.obj": obj(rig, placed)}
