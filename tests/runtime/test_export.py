"""Exported meshes are the predicted ones."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from facts import TINY
from glb_reader import Glb
from gltf_check import complaints, scene_of
from numpy.typing import NDArray
from PIL import Image

from sam3d_gguf.runtime.body import BodyModel, BodyResult
from sam3d_gguf.runtime.export.influences import influence_sets
from sam3d_gguf.runtime.export.overlay import overlay
from sam3d_gguf.runtime.export.surface import signed_volume, split_at_seams, vertex_normals
from sam3d_gguf.runtime.geometry.mhr_rig import group_influences
from sam3d_gguf.runtime.images import read_photo
from sam3d_gguf.runtime.run.files import body_files
from sam3d_gguf.runtime.tensor_files import TensorFile
from sam3d_gguf.runtime.vocabulary import load_vocabulary
from sam3d_gguf.schemas.errors import OutputError

BOXES = [[52.0, 8.5, 141.25, 139.0], [10.0, 5.0, 90.0, 140.0]]


@pytest.fixture(scope="module")
def result(model: BodyModel) -> BodyResult:
    return model(TINY / "input.png", BOXES)


@pytest.fixture(scope="module")
def files(result: BodyResult) -> dict[str, bytes]:
    return body_files(result, read_photo(TINY / "input.png"))


def test_the_skinned_glb_shows_the_predicted_vertices(
    files: dict[str, bytes], result: BodyResult
) -> None:
    glb = Glb(files["mesh.glb"])
    matrices = glb.node_matrices()
    split = split_at_seams(result.rig)
    for person in range(2):
        attributes = glb.json["meshes"][person]["primitives"][0]["attributes"]
        skin = glb.json["skins"][person]
        binds = glb.array(skin["inverseBindMatrices"]).reshape(-1, 4, 4).transpose(0, 2, 1)
        posed: NDArray[np.float64] = np.stack(matrices)[skin["joints"]]
        joints: NDArray[np.float64] = np.matmul(posed, binds, dtype=np.float64)
        points = glb.array(attributes["POSITION"])
        moved = np.zeros(points.shape)
        for number in range(sum(name.startswith("JOINTS_") for name in attributes)):
            weights = glb.array(attributes[f"WEIGHTS_{number}"])
            for slot, joint in enumerate(glb.array(attributes[f"JOINTS_{number}"]).T):
                placed = np.einsum("vij,vj->vi", joints[joint, :3, :3], points)
                moved += weights[:, slot, None] * (placed + joints[joint, :3, 3])
        seen = result["pred_vertices"][person] + result["pred_cam_t"][person]
        wanted = (seen * [1, -1, -1])[split.vertices]
        np.testing.assert_allclose(moved, wanted, atol=2e-4)


def test_the_glb_has_texture_coordinates_from_the_top_and_unit_normals(
    files: dict[str, bytes], result: BodyResult
) -> None:
    glb, rig = Glb(files["mesh.glb"]), result.rig
    primitive = glb.json["meshes"][0]["primitives"][0]
    corners = glb.array(primitive["indices"]).reshape(-1, 3)
    found = glb.array(primitive["attributes"]["TEXCOORD_0"])[corners]
    wanted = rig.texture_coordinates[rig.texture_faces] * [1, -1] + [0, 1]
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    positions = glb.array(primitive["attributes"]["POSITION"])[corners]
    np.testing.assert_allclose(positions, result.mesh.rest[0][rig.faces] * 0.01, rtol=1e-5)
    normals = glb.array(primitive["attributes"]["NORMAL"])
    np.testing.assert_allclose((normals * normals).sum(axis=1), 1, rtol=1e-5)


def test_the_validator_finds_nothing_but_texture_coordinates_without_a_texture(
    files: dict[str, bytes],
) -> None:
    unused = "This object may be unused."
    assert complaints(files["mesh.glb"]) == [
        f"info UNUSED_OBJECT /meshes/{person}/primitives/0/attributes/TEXCOORD_0: {unused}"
        for person in range(2)
    ]


def test_another_reader_finds_the_same_surface(files: dict[str, bytes], result: BodyResult) -> None:
    loaded = scene_of(files["mesh.glb"])
    split = split_at_seams(result.rig)
    assert [*loaded.geometry] == ["person_0", "person_1"]
    for person, mesh in enumerate(loaded.geometry.values()):
        np.testing.assert_array_equal(mesh.faces, split.faces)
        rest = result.mesh.rest[person][split.vertices] * np.float32(0.01)
        np.testing.assert_array_equal(mesh.vertices, rest)
        np.testing.assert_array_equal(mesh.bounds, [rest.min(axis=0), rest.max(axis=0)])
        assert mesh.volume * signed_volume(rest, split.faces) > 0


def test_the_glb_has_the_named_skeleton(files: dict[str, bytes], result: BodyResult) -> None:
    glb = Glb(files["mesh.glb"])
    names = [glb.json["nodes"][node]["name"] for node in glb.json["skins"][0]["joints"]]
    assert names == list(result.rig.joint_names)
    assert len(names) == 127


def test_the_obj_holds_the_same_vertices(files: dict[str, bytes], result: BodyResult) -> None:
    lines = files["mesh.obj"].decode().splitlines()
    vertices = np.array([line.split()[1:] for line in lines if line.startswith("v ")], float)
    seen = result["pred_vertices"] + result["pred_cam_t"][:, None]
    np.testing.assert_allclose(vertices, (seen * [1, -1, -1]).reshape(-1, 3), rtol=1e-5)
    corners = [line.split()[1:] for line in lines if line.startswith("f ")]
    count = result["pred_vertices"].shape[1]
    second = np.array([[int(c.split("/")[0]) for c in face] for face in corners])
    np.testing.assert_array_equal(second[: len(result.rig.faces)], result.rig.faces + 1)
    np.testing.assert_array_equal(second[len(result.rig.faces) :], result.rig.faces + 1 + count)


def test_the_overlay_is_the_photo_with_people_on_it(files: dict[str, bytes]) -> None:
    photo = read_photo(TINY / "input.png")
    drawn = np.asarray(Image.open(io.BytesIO(files["overlay.png"])))
    assert drawn.shape == photo.shape
    changed = (drawn != photo).any(axis=2).mean()
    assert 0.02 < changed < 0.98


def test_weights_add_up_and_keep_the_heaviest_first() -> None:
    skinning = group_influences(
        np.array([0, 0, 0, 0, 0, 1], np.int32),
        np.array([1, 2, 3, 4, 5, 6], np.int32),
        np.array([0.1, 0.3, 0.2, 0.25, 0.1, 0.5], np.float32),
        3,
    )
    sets = influence_sets(skinning)
    assert sets.joints.shape == (2, 3, 4)
    assert sets.joints[0, 0].tolist() == [2, 4, 3, 1]
    assert sets.joints[1, 0].tolist() == [5, 0, 0, 0]
    np.testing.assert_allclose(sets.weights.sum(axis=(0, 2)), 1, rtol=1e-6)
    assert sets.joints[:, 2].sum() == 0


def test_normals_of_a_triangle_and_of_nothing() -> None:
    vertices = np.array([[0, 0, 0], [1, 0, 0], [0, 0, 1], [5, 5, 5]], np.float32)
    normals = vertex_normals(vertices, np.array([[0, 1, 2]], np.int32))
    np.testing.assert_array_equal(normals, [[0, -1, 0]] * 3 + [[0, 0, 1]])


def test_a_box_has_its_volume_with_the_sign_of_its_winding() -> None:
    corners = np.array([[x, y, z] for x in (5, 7) for y in (0, 3) for z in (1, 2)], np.float32)
    quads = [[0, 1, 3, 2], [4, 6, 7, 5], [0, 4, 5, 1], [2, 3, 7, 6], [0, 2, 6, 4], [1, 5, 7, 3]]
    faces = np.array([t for a, b, c, d in quads for t in ((a, b, c), (a, c, d))], np.int32)
    assert signed_volume(corners, faces) == pytest.approx(6)
    assert signed_volume(corners, faces[:, ::-1]) == pytest.approx(-6)


def test_the_overlay_shows_the_near_side_however_the_mesh_winds() -> None:
    corners = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (4, 6)], np.float32)
    quads = [[0, 1, 3, 2], [4, 6, 7, 5], [0, 4, 5, 1], [2, 3, 7, 6], [0, 2, 6, 4], [1, 5, 7, 3]]
    faces = np.array([t for a, b, c, d in quads for t in ((a, b, c), (a, c, d))], np.int32)
    photo = np.zeros((100, 100, 3), np.uint8)
    camera = np.array([[100, 0, 50], [0, 100, 50], [0, 0, 1]], np.float32)
    far = np.full((1, 70, 2), 1e9, np.float32)
    first, second = (
        np.asarray(Image.open(io.BytesIO(overlay(photo, corners[None], wound, far, camera))))
        for wound in (faces, np.ascontiguousarray(faces[:, ::-1]))
    )
    np.testing.assert_array_equal(first, second)
    filled = np.argwhere(first.any(axis=2))
    assert filled.min(axis=0).tolist() == [25, 25]
    assert filled.max(axis=0).tolist() == [75, 75]


def test_schemas_name_every_joint_keypoint_and_field(result: BodyResult) -> None:
    joints = load_vocabulary("mhr-joints-v1")["joints"]
    assert [joint["name"] for joint in joints] != []
    assert [joint["parent"] for joint in joints] == result.rig.parents.tolist()
    assert len(load_vocabulary("keypoints-70-v1")["keypoints"]) == 70
    assert len(load_vocabulary("keypoints-308-v1")["keypoints"]) == 308
    fields = {field["name"] for field in load_vocabulary("body-output-v1")["fields"]}
    assert set(result.arrays) <= fields
    assert fields - set(result.arrays) == {"mask"}


def test_a_result_saves_the_same_files(
    files: dict[str, bytes], result: BodyResult, tmp_path: Path
) -> None:
    written = result.save(tmp_path / "new" / "folder", read_photo(TINY / "input.png"))
    assert {path.name: path.read_bytes() for path in written} == files
    alone = result.save(tmp_path / "alone")
    assert {path.name for path in alone} == files.keys() - {"overlay.png"}
    with pytest.raises(OutputError, match="exists"):
        result.save(tmp_path / "alone")
    with TensorFile(tmp_path / "alone" / "result.safetensors") as file:
        assert {"tool", "device", "libraries", "precision"} <= file.metadata.keys()
        assert file.metadata["intrinsics"] == "assumed"
        assert file.tensors.keys() == result.arrays.keys()
