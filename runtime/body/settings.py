"""What the estimator takes from the model's configuration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sam3d_gguf.runtime.body.neural import Branch
from sam3d_gguf.runtime.geometry.arrays import Float32

WRIST_ANGLE_LIMIT = 1.4
"""Largest turn, radians, between the body's and a hand's wrist for the hand to be accepted."""


@dataclass(frozen=True, slots=True, eq=False)
class BodySettings:
    """Fixed numbers of a model.

    Attributes:
        crop_size: width, height of the crop, pixels.
        mean, deviation: [3] RGB, of pixels in 0..1.
        own_center: condition and camera use the intrinsics' principal point.
        hand_scale_factor: factor of the hand camera's scale.
        backbone_depth, decoder_depth: layers, which number the captures.
    """

    crop_size: tuple[int, int]
    mean: Float32
    deviation: Float32
    own_center: bool
    hand_scale_factor: float
    backbone_depth: int
    decoder_depth: int

    def scale_factor(self, branch: Branch) -> float:
        """The camera's scale factor of a branch."""
        return 1.0 if branch == "body" else self.hand_scale_factor


IMAGENET_MEAN = np.array([0.485, 0.456, 0.406], np.float32)
IMAGENET_DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)
