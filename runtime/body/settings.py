"""What the estimator takes from the model's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from sam3d_gguf.runtime.body.neural import Branch
from sam3d_gguf.runtime.geometry.arrays import Float32
from sam3d_gguf.runtime.weights import Weights
from sam3d_gguf.schemas.errors import ContractError

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
        decoder_heads: attention heads of the decoders.
    """

    crop_size: tuple[int, int]
    mean: Float32
    deviation: Float32
    own_center: bool
    hand_scale_factor: float
    backbone_depth: int
    decoder_depth: int
    decoder_heads: int

    @classmethod
    def of(cls, weights: Weights) -> Self:
        """The settings in an opened Body file.

        Raises:
            ContractError: one is missing or of the wrong kind.
        """
        size = (_number(weights, "image_width"), _number(weights, "image_height"))
        center = weights.metadata.get("sam3d.body.condition.center")
        return cls(
            crop_size=(int(size[0]), int(size[1])),
            mean=_triple(weights, "image.mean"),
            deviation=_triple(weights, "image.std"),
            own_center=center == "intrinsics",
            hand_scale_factor=_number(weights, "camera.scale_factor_hand"),
            backbone_depth=int(_number(weights, "backbone.block_count")),
            decoder_depth=int(_number(weights, "decoder.block_count")),
            decoder_heads=int(_number(weights, "decoder.attention.head_count")),
        )

    def scale_factor(self, branch: Branch) -> float:
        """The camera's scale factor of a branch."""
        return 1.0 if branch == "body" else self.hand_scale_factor


def _number(weights: Weights, key: str) -> float:
    value = weights.metadata.get(f"sam3d.body.{key}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _missing(weights, key, "a number")
    return float(value)


def _triple(weights: Weights, key: str) -> Float32:
    value = weights.metadata.get(f"sam3d.body.{key}")
    found = np.asarray(value if isinstance(value, list | tuple) else [], np.float32)
    if found.shape != (3,):
        raise _missing(weights, key, "three numbers")
    return found


def _missing(weights: Weights, key: str, expected: str) -> ContractError:
    return ContractError(
        f"the metadata key sam3d.body.{key} is missing or of another kind",
        where=str(weights.path),
        expected=expected,
        action="Convert the model again with this version.",
    )
