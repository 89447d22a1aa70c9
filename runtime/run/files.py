"""The files of a result, as bytes by name."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sam3d_gguf.runtime.body.mhr import MhrMesh
from sam3d_gguf.runtime.body.result import BodyResult, gltf_people
from sam3d_gguf.runtime.export.gltf import glb
from sam3d_gguf.runtime.export.obj import obj
from sam3d_gguf.runtime.geometry.arrays import Uint8
from sam3d_gguf.runtime.geometry.mhr_rig import MhrRig
from sam3d_gguf.runtime.tensor_files import encode_tensors
from sam3d_gguf.runtime.vocabulary import field_metadata
from sam3d_gguf.schemas.documents import encode_document

Files = dict[str, bytes]
FEATURE_FILES = ("result.safetensors", "timings.json")
MHR_FILES = ("result.safetensors", "mesh.glb", "mesh.obj", "timings.json")
BODY_FILES = ("result.safetensors", "overlay.png", "mesh.glb", "mesh.obj", "timings.json")

_METRE = np.float32(0.01)


@dataclass(slots=True)
class Timings:
    """Wall seconds of the parts of a run, in the order in which they began."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, name: str, seconds: float) -> None:
        """Add to a part."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def body_files(result: BodyResult, photo: Uint8) -> Files:
    """result.safetensors, mesh.glb, mesh.obj and overlay.png of a body result."""
    return {
        "result.safetensors": result.safetensors(),
        "overlay.png": result.overlay(photo),
        "mesh.glb": result.glb(),
        "mesh.obj": result.obj(),
    }


def mhr_files(rig: MhrRig, mesh: MhrMesh, provenance: Mapping[str, str], *, meshes: bool) -> Files:
    """result.safetensors (vertices and joint states, cm) and, if asked for, the meshes."""
    metadata = {**field_metadata("mhr-output-v1"), **provenance}
    arrays = {"vertices": mesh.vertices, "skel_state": mesh.states}
    found = {"result.safetensors": b"".join(encode_tensors(arrays, metadata))}
    if meshes:
        origin = np.zeros((len(mesh.vertices), 3), np.float32)
        found["mesh.glb"] = glb(rig, gltf_people(mesh, origin))
        found["mesh.obj"] = obj(rig, list(mesh.vertices * _METRE))
    return found


def timings_file(
    timings: Timings,
    provenance: Mapping[str, str],
    device_memory: Mapping[str, Mapping[str, int]] | None = None,
) -> Files:
    """timings.json: seconds by part, and the peak memory of the process in bytes.

    Args:
        device_memory: bytes that networks held on the device, by stage and kind.
    """
    document: dict[str, Any] = {
        "schema_version": 1,
        "seconds": timings.seconds,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "provenance": dict(provenance),
    }
    if device_memory is not None:
        document["device_memory_bytes"] = {
            stage: dict(kinds) for stage, kinds in device_memory.items()
        }
    return {"timings.json": encode_document(document, "run-timings")}
