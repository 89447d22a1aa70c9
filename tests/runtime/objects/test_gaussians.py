"""Gaussians are the original's, and their PLY file says the same to another reader."""

from __future__ import annotations

import importlib
import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from objects_components import Component

from sam3d_gguf.extractors.models import Model
from sam3d_gguf.runtime.export.ply import encode_ply
from sam3d_gguf.runtime.loading import load_weights
from sam3d_gguf.runtime.objects.gaussians import (
    COLUMNS,
    Gaussians,
    GaussianSettings,
    gaussians,
)

PARTS: dict[int, tuple[Model, str]] = {
    32: ("objects.slat_decoder_gs", "slat_decoder_gs.gguf"),
    4: ("objects.slat_decoder_gs_4", "slat_decoder_gs_4.gguf"),
}


def decoded(objects: Path, count: int, component: Component) -> Gaussians:
    """The Gaussians of a fixture's output layer."""
    model, name = PARTS[count]
    with load_weights(objects / name, model) as weights:
        settings = GaussianSettings.of(weights)
        perturbation = weights.array("offset_perturbation")
    raw = component.expected["004.out_layer_raw"]
    return gaussians(component.inputs["coords"], raw, perturbation, settings)


def test_another_reader_finds_the_same_in_the_file(objects: Path) -> None:
    found = decoded(objects, 4, Component.load("gaussian-decoder-4"))
    columns = found.cloud().columns()
    plyfile: Any = importlib.import_module("plyfile")  # has no types
    document = plyfile.PlyData.read(io.BytesIO(b"".join(encode_ply(columns))))
    (element,) = document.elements
    assert (element.name, len(element), document.byte_order) == ("vertex", 760, "<")
    assert tuple(prop.name for prop in element.properties) == COLUMNS
    for name, values in columns.items():
        np.testing.assert_array_equal(element[name], values)
        assert np.isfinite(element[name]).all()


def test_a_file_is_what_the_format_says() -> None:
    columns = {"x": np.array([1, 2], np.float32), "opacity": np.array([-3, 0.5], np.float32)}
    header = (
        b"ply\nformat binary_little_endian 1.0\nelement vertex 2\n"
        b"property float x\nproperty float opacity\nend_header\n"
    )
    assert b"".join(encode_ply(columns)) == header + struct.pack("<4f", 1, -3, 2, 0.5)


def test_what_is_opaque_or_large_stays_finite(objects: Path) -> None:
    component = Component.load("gaussian-decoder-4")
    raw: NDArray[np.float32] = np.full_like(component.expected["004.out_layer_raw"], 60)
    component.expected["004.out_layer_raw"] = raw
    found = decoded(objects, 4, component)
    assert found.opacities.max() == 1
    np.testing.assert_allclose(found.scales, 60 + np.log(np.expm1(0.004)), rtol=1e-6)
    assert all(np.isfinite(values).all() for values in found.cloud().columns().values())
