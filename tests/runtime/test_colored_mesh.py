"""Coloured meshes as glTF: what goes in is what the specification reads out."""

from __future__ import annotations

import numpy as np
import pytest
from glb_reader import Glb
from gltf_check import complaints, scene_of
from numpy.typing import NDArray
from objects_components import Component

from sam3d_gguf.runtime.export.colored_mesh import ColoredMesh, colored_glb, y_up
from sam3d_gguf.runtime.export.surface import signed_volume

Float32 = NDArray[np.float32]


def tetrahedron(name: str, size: float) -> ColoredMesh:
    vertices = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]], np.float32)
    faces = np.array([[0, 2, 1], [0, 1, 3], [0, 3, 2], [1, 2, 3]], np.int32)
    colors = np.array([[0, 0.5, 1], [1, 0, 0], [0, 1, 0], [0, 0, 0.2]], np.float32)
    return ColoredMesh(name, vertices * np.float32(size), faces, colors)


def test_every_mesh_is_a_node_with_its_vertices_triangles_and_colours() -> None:
    meshes = [tetrahedron("one", 1), tetrahedron("two", 0.25)]
    glb = Glb(colored_glb(meshes))
    names = [glb.json["nodes"][node]["name"] for node in glb.json["scenes"][0]["nodes"]]
    assert names == ["one", "two"]
    for node, mesh in zip(glb.json["nodes"], meshes, strict=True):
        (primitive,) = glb.json["meshes"][node["mesh"]]["primitives"]
        attributes = primitive["attributes"]
        np.testing.assert_array_equal(glb.array(attributes["POSITION"]), mesh.vertices)
        indices = glb.array(primitive["indices"]).reshape(-1, 3)
        np.testing.assert_array_equal(indices, mesh.faces)
        bounds = glb.json["accessors"][attributes["POSITION"]]
        assert bounds["min"] == [0, 0, 0]
        assert bounds["max"] == mesh.vertices.max(axis=0).tolist()
        colors = glb.array(attributes["COLOR_0"])
        expected = [[0, 128, 255], [255, 0, 0], [0, 255, 0], [0, 0, 51]]
        assert colors.tolist() == [[*color, 255] for color in expected]
        assert glb.json["accessors"][attributes["COLOR_0"]]["normalized"] is True
        normals = glb.array(attributes["NORMAL"])
        np.testing.assert_allclose(np.linalg.norm(normals, axis=1), 1, rtol=1e-6)
        assert (normals[0] < 0).all()


def test_colours_out_of_range_are_bounded() -> None:
    mesh = tetrahedron("one", 1)
    wide = ColoredMesh(mesh.name, mesh.vertices, mesh.faces, mesh.colors * np.float32(3) - 1)
    glb = Glb(colored_glb([wide]))
    attributes = glb.json["meshes"][0]["primitives"][0]["attributes"]
    assert glb.array(attributes["COLOR_0"])[:2].tolist() == [[0, 128, 255, 255], [255, 0, 0, 255]]


def test_what_is_up_in_the_object_is_up_in_the_file() -> None:
    points: Float32 = np.eye(3, dtype=np.float32)
    assert y_up(points).tolist() == [[1, 0, 0], [0, 0, -1], [0, 1, 0]]


def extracted(case: str) -> ColoredMesh:
    """A mesh that the original extracted, as the product writes it."""
    expected = {name[4:]: array for name, array in Component.load("mesh-extract").expected.items()}
    vertices, faces, attributes = (
        expected[f"{case}.{part}"] for part in ("vertices", "faces", "vertex_attrs")
    )
    return ColoredMesh(case, y_up(vertices), faces, attributes[:, :3])


@pytest.fixture(scope="module", name="meshes")
def _meshes() -> list[ColoredMesh]:
    return [extracted("decoder_features"), extracted("smooth")]


def test_the_validator_finds_nothing(meshes: list[ColoredMesh]) -> None:
    assert complaints(colored_glb(meshes)) == []
    assert complaints(colored_glb(meshes[:1])) == []


def test_the_validator_finds_what_is_wrong() -> None:
    data = colored_glb([tetrahedron("one", 1)])
    (cut,) = complaints(data[:-4])
    assert cut.startswith("error GLB_")
    last_index = (7).to_bytes(4, "little")
    assert "ACCESSOR_INDEX_OOB" in " ".join(complaints(data[:-4] + last_index))


def test_another_reader_finds_the_same_surfaces(meshes: list[ColoredMesh]) -> None:
    loaded = scene_of(colored_glb(meshes))
    assert [*loaded.geometry] == [mesh.name for mesh in meshes]
    for mesh, found in zip(meshes, loaded.geometry.values(), strict=True):
        np.testing.assert_array_equal(found.vertices, mesh.vertices)
        np.testing.assert_array_equal(found.faces, mesh.faces)
        bounds = [mesh.vertices.min(axis=0), mesh.vertices.max(axis=0)]
        np.testing.assert_array_equal(found.bounds, bounds)
        assert np.isfinite(found.vertices).all()
        assert np.isfinite(found.vertex_normals).all()
        # Where this reader keeps them beside a material.
        colors = found.visual.vertex_attributes["color"]
        assert (colors[:, 3] == 255).all()
        np.testing.assert_allclose(colors[:, :3] / 255, mesh.colors, atol=0.5001 / 255)
    smooth = loaded.geometry["smooth"]
    assert smooth.is_watertight
    assert smooth.is_winding_consistent
    volume = signed_volume(meshes[1].vertices, meshes[1].faces)
    np.testing.assert_allclose(smooth.volume, volume, rtol=1e-6)
    assert volume > 0
