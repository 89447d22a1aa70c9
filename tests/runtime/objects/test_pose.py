"""Poses are the original's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sam3d_gguf.runtime.loading import load_weights
from sam3d_gguf.runtime.objects.pose import PoseDecoder


@pytest.fixture(scope="module")
def decoder(objects: Path) -> PoseDecoder:
    with load_weights(objects / "ss_generator.gguf", "objects.ss_generator") as weights:
        return PoseDecoder.of(weights)


def test_a_half_turn_is_a_unit_quaternion_with_no_negative_real_part(decoder: PoseDecoder) -> None:
    wanted = np.array([-1, 0, 0, 0, -1, 0], np.float32)
    tokens = {
        "6drotation_normalized": ((wanted - decoder.mean) / decoder.deviation)[None, None],
        "translation": np.zeros((1, 1, 3), np.float32),
        "scale": np.log(np.array([[[1, 2, 6]]], np.float32)),
    }
    scene = np.full((1, 3), 2, np.float32)
    pose = decoder.decode(tokens, scene, np.array([[1, 2, 3]], np.float32))
    np.testing.assert_allclose(np.abs(pose.rotation), [[0, 0, 0, 1]], atol=1e-6)
    assert pose.rotation[0, 0] >= 0
    np.testing.assert_allclose(pose.scale, [[6, 6, 6]], rtol=1e-6)
    assert pose.translation.tolist() == [[1, 2, 3]]
