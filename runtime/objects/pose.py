"""From the sampled pose tokens to the object's pose in the space of the pointmap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from sam3d_gguf.runtime.geometry.arrays import Float32
from sam3d_gguf.runtime.geometry.rotations import matrix_from_6d, quaternion_from_matrix
from sam3d_gguf.runtime.objects.metadata import numbers
from sam3d_gguf.runtime.weights import Weights

ROTATION, TRANSLATION, SCALE = "6drotation_normalized", "translation", "scale"


@dataclass(frozen=True, slots=True, eq=False)
class Pose:
    """Where an object is: its point p, a row vector, is at (p * scale) @ R + translation, with R
    the matrix of the quaternion; x left, y up, z forward.

    Attributes:
        translation: [1, 3] float32.
        rotation: [1, 4] float32, unit quaternion w, x, y, z with w not negative.
        scale: [1, 3] float32, three equal numbers.
    """

    translation: Float32
    rotation: Float32
    scale: Float32


@dataclass(frozen=True, slots=True, eq=False)
class PoseDecoder:
    """The original's `ScaleShiftInvariant`: poses are sampled in the normalised scene.

    Attributes:
        mean, deviation: [6] float32, of the sampled 6D rotation.
    """

    mean: Float32
    deviation: Float32

    @classmethod
    def of(cls, weights: Weights) -> Self:
        """The decoder with the numbers in an opened `ss_generator`.

        Raises:
            ContractError: one is missing or of the wrong kind.
        """
        mean = numbers(weights, "pose.rotation_6d_mean", 6)
        deviation = numbers(weights, "pose.rotation_6d_std", 6)
        return cls(np.array(mean, np.float32), np.array(deviation, np.float32))

    def decode(
        self, tokens: Mapping[str, Float32], scene_scale: Float32, scene_shift: Float32
    ) -> Pose:
        """The pose in the scene of the pointmap.

        Args:
            tokens: `6drotation_normalized` [1, 1, 6], `translation` and `scale` [1, 1, 3].
            scene_scale, scene_shift: [1, 3], of the normalised pointmap.
        """
        turn = matrix_from_6d(tokens[ROTATION][0] * self.deviation + self.mean)
        sizes = np.exp(tokens[SCALE][0])
        linear = sizes[..., None] * turn * scene_scale[:, None, :]
        scale = np.sqrt((linear * linear).sum(axis=-1))
        quaternion = quaternion_from_matrix(linear / scale[..., None])[..., [3, 0, 1, 2]]
        return Pose(
            translation=tokens[TRANSLATION][0] * scene_scale + scene_shift,
            rotation=np.where(quaternion[..., :1] < 0, -quaternion, quaternion),
            scale=np.repeat(scale.mean(axis=-1, keepdims=True), 3, axis=-1),
        )
