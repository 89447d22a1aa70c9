"""What a result was made with, as every report says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sam3d_gguf import __version__
from sam3d_gguf.runtime.ggml.backend import Backend


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
