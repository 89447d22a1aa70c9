"""Kinematics and skinning against independent computations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sam3d_gguf.runtime.body.neural_mhr import GgmlMhrProducts
from sam3d_gguf.runtime.geometry.arrays import cross
from sam3d_gguf.runtime.geometry.mhr_rig import (
    MhrRig,
    global_states,
    group_influences,
    load_rig,
    local_states,
    pose_features,
    skin_matrices,
)
from sam3d_gguf.runtime.ggml.backend import open_backend
from sam3d_gguf.runtime.ggml.library import load_library
from sam3d_gguf.runtime.loading import load_weights


@pytest.fixture(scope="module")
def rig(model_files: tuple[Path, Path]) -> MhrRig:
    with load_weights(model_files[1], "mhr") as weights:
        return load_rig(weights)


def as_matrix(state: NDArray[np.float64]) -> NDArray[np.float64]:
    """The 4x4 matrix of a skeleton state."""
    x, y, z, w = state[3:7] / np.linalg.norm(state[3:7])
    turn = np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )
    matrix = np.eye(4)
    matrix[:3, :3], matrix[:3, 3] = turn * state[7], state[:3]
    return matrix


def joint_parameters(seed: int) -> NDArray[np.float32]:
    generator = np.random.default_rng(seed)
    values = generator.normal(0, 0.5, (2, 127, 7))
    values[..., 6] *= 0.2
    return values.reshape(2, -1).astype(np.float32)


def test_prefix_scan_equals_a_walk_from_the_root(rig: MhrRig) -> None:
    local = local_states(rig, joint_parameters(1))
    states = global_states(rig, local)
    for person in range(2):
        walked: list[NDArray[np.float64]] = []
        parents: list[int] = rig.parents.tolist()
        for joint, parent in enumerate(parents):
            own = as_matrix(local[person, joint].astype(np.float64))
            walked.append(own if parent < 0 else np.matmul(walked[parent], own))
        found = [as_matrix(state) for state in states[person].astype(np.float64)]
        np.testing.assert_allclose(found, walked, rtol=2e-5, atol=2e-3)


@pytest.mark.parametrize("expressive", [False, True])
def test_skinning_equals_the_weighted_sum_of_matrices(
    rig: MhrRig, model_files: tuple[Path, Path], expressive: bool
) -> None:
    states = global_states(rig, local_states(rig, joint_parameters(2)))
    generator = np.random.default_rng(3)
    identity, expression, features = (
        generator.normal(size=(2, size)).astype(np.float32) for size in (45, 72, 750)
    )
    with (
        open_backend(load_library(), "cpu", threads=1) as backend,
        GgmlMhrProducts(backend, load_weights(model_files[1], "mhr")) as products,
    ):
        mesh = products.mesh(
            identity,
            expression if expressive else None,
            features if expressive else None,
            skin_matrices(rig.inverse_bind, states),
        )
    rest = mesh.rest
    bind = [as_matrix(state) for state in rig.inverse_bind.astype(np.float64)]
    wanted = np.zeros(rest.shape)
    owner = np.repeat(
        rig.skinning.vertices, np.diff([*rig.skinning.starts, len(rig.skinning.joints)])
    )
    for person in range(2):
        joints: list[int] = rig.skinning.joints.tolist()
        for vertex, joint, weight in zip(owner, joints, rig.skinning.weights, strict=True):
            pose = as_matrix(states[person, joint].astype(np.float64))
            matrix: NDArray[np.float64] = np.matmul(pose, bind[joint])
            point: NDArray[np.float64] = matrix @ np.array([*rest[person, vertex], 1])
            wanted[person, vertex] += weight * point[:3]
    np.testing.assert_allclose(mesh.posed, wanted, rtol=1e-4, atol=5e-3)


def test_influences_may_come_unsorted_and_vertices_may_have_none() -> None:
    skinning = group_influences(
        np.array([2, 0, 2], np.int32),
        np.array([5, 6, 7], np.int32),
        np.array([0.25, 1, 0.75], np.float32),
        4,
    )
    assert skinning.vertices.tolist() == [0, 2]
    assert skinning.starts.tolist() == [0, 1]
    assert skinning.joints.tolist() == [6, 5, 7]


def test_rest_pose_has_no_pose_features() -> None:
    features = pose_features(np.zeros((1, 889), np.float32))
    np.testing.assert_array_equal(features, np.zeros((1, 750)))


@pytest.mark.parametrize("type_", [np.float32, np.float64])
def test_cross_products_are_those_of_numpy_bit_for_bit(type_: type[np.floating[Any]]) -> None:
    rng = np.random.default_rng(5)
    one, other = rng.normal(size=(5, 127, 3)).astype(type_), rng.normal(size=(127, 3)).astype(type_)
    found = cross(one, other)
    assert found.dtype == type_
    assert found.tobytes() == np.cross(one, other).tobytes()
