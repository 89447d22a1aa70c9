"""From a Gaussian decoder's output to Gaussians: their fields, what they mean, and PLY columns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from sam3d_gguf.runtime.geometry.arrays import Float32, Int32
from sam3d_gguf.runtime.geometry.rotations import normalized
from sam3d_gguf.runtime.objects.activations import sigmoid, softplus
from sam3d_gguf.runtime.objects.metadata import integer, number, numbers
from sam3d_gguf.runtime.weights import Weights

FIELDS: Mapping[str, int] = {
    "xyz": 3,
    "features_dc": 3,
    "scaling": 3,
    "rotation": 4,
    "opacity": 1,
}
"""Values of a Gaussian in the order of a decoder's output: each for all Gaussians of a voxel."""

COLUMNS = (
    *("x", "y", "z", "nx", "ny", "nz"),
    *("f_dc_0", "f_dc_1", "f_dc_2", "opacity"),
    *("scale_0", "scale_1", "scale_2", "rot_0", "rot_1", "rot_2", "rot_3"),
)
"""The properties of a vertex that viewers of Gaussians read."""

_NO_TURN = (1.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class GaussianSettings:
    """Numbers of a Gaussian decoder.

    Attributes:
        count: Gaussians of a voxel.
        resolution: side of the voxel grid.
        rates: factors of the output's fields.
        voxel_size: how far a Gaussian may lie from its voxel's centre, twice, in voxels.
        bounds: lower corner and extent of the grid in the object's space.
        minimum_size: least scale.
        scaling_bias, opacity_bias: scale and opacity where the output is 0.
    """

    count: int
    resolution: int
    rates: Mapping[str, float]
    voxel_size: float
    bounds: tuple[float, ...]
    minimum_size: float
    scaling_bias: float
    opacity_bias: float

    @classmethod
    def of(cls, weights: Weights) -> Self:
        """The settings in an opened `slat_decoder_gs` or `slat_decoder_gs_4`.

        Raises:
            ContractError: one is missing or of the wrong kind.
        """
        return cls(
            count=integer(weights, "gaussian_count"),
            resolution=integer(weights, "resolution"),
            rates={name: number(weights, f"gaussian.{name}_rate") for name in FIELDS},
            voxel_size=number(weights, "gaussian.voxel_size"),
            bounds=numbers(weights, "gaussian.bounds", 6),
            minimum_size=number(weights, "gaussian.minimum_kernel_size"),
            scaling_bias=number(weights, "gaussian.scaling_bias"),
            opacity_bias=number(weights, "gaussian.opacity_bias"),
        )


@dataclass(frozen=True, slots=True, eq=False)
class GaussianCloud:
    """M Gaussians for viewers.

    Attributes:
        positions: [M, 3].
        features: [M, 3] spherical harmonics of degree 0: colour = 0.5 + 0.2820948 * feature.
        logits: [M, 1] of which the opacities are the sigmoid.
        scales: [M, 3] standard deviations along the axes.
        turns: [M, 4] quaternions w, x, y, z of any length.
    """

    positions: Float32
    features: Float32
    logits: Float32
    scales: Float32
    turns: Float32

    def columns(self) -> Mapping[str, Float32]:
        """[M] values of every PLY property, in the order of `COLUMNS`.

        The opacity is its logit, as decoded: the original's detour over the opacity is infinite
        where that is 1.
        """
        nothing = np.zeros_like(self.positions)
        logarithms = np.log(self.scales)
        parts = [self.positions, nothing, self.features, self.logits, logarithms, self.turns]
        table = np.concatenate(parts, axis=1)
        return {name: table[:, index] for index, name in enumerate(COLUMNS)}


@dataclass(frozen=True, slots=True, eq=False)
class Gaussians:
    """M Gaussians: the fields that the original stores, all float32, and what they mean.

    Attributes:
        places: [M, 3] in 0..1 of the grid.
        features: [M, 1, 3] spherical harmonics of degree 0.
        raw_scales: [M, 3].
        raw_rotations: [M, 4].
        raw_opacities: [M, 1].
        settings: of the decoder.
    """

    places: Float32
    features: Float32
    raw_scales: Float32
    raw_rotations: Float32
    raw_opacities: Float32
    settings: GaussianSettings

    @property
    def positions(self) -> Float32:
        """[M, 3] in the object's space, -0.5..0.5."""
        bounds = np.array(self.settings.bounds, np.float32)
        scaled: Float32 = self.places * bounds[3:]
        scaled += bounds[:3]
        return scaled

    @property
    def scales(self) -> Float32:
        """[M, 3] standard deviations along the axes."""
        bias = self.settings.scaling_bias
        sizes = softplus(self.raw_scales + np.float32(bias + math.log(-math.expm1(-bias))))
        sizes *= sizes
        sizes += np.float32(self.settings.minimum_size**2)
        return np.sqrt(sizes)

    @property
    def turns(self) -> Float32:
        """[M, 4] quaternions w, x, y, z of any length."""
        return self.raw_rotations + np.array(_NO_TURN, np.float32)

    @property
    def rotations(self) -> Float32:
        """[M, 4] unit quaternions w, x, y, z."""
        return normalized(self.turns)

    @property
    def logits(self) -> Float32:
        """[M, 1] of which the opacities are the sigmoid."""
        bias = self.settings.opacity_bias
        return self.raw_opacities + np.float32(math.log(bias / (1 - bias)))

    @property
    def opacities(self) -> Float32:
        """[M, 1] in 0..1."""
        return sigmoid(self.logits)

    def cloud(self) -> GaussianCloud:
        """What a viewer needs."""
        return GaussianCloud(
            positions=self.positions,
            features=self.features[:, 0],
            logits=self.logits,
            scales=self.scales,
            turns=self.turns,
        )


def gaussians(
    coords: Int32, raw: Float32, perturbation: Float32, settings: GaussianSettings
) -> Gaussians:
    """The Gaussians of every voxel, voxel after voxel.

    Args:
        coords: [N, 4] batch 0, x, y, z.
        raw: [N, 14 * count] the decoder's output.
        perturbation: [count, 3] the tensor `offset_perturbation`.
        settings: of the decoder.
    """
    fields: dict[str, Float32] = {}
    start = 0
    for name, size in FIELDS.items():
        end = start + size * settings.count
        part = raw[:, start:end].reshape(len(raw), settings.count, size)
        fields[name] = part * np.float32(settings.rates[name])
        start = end
    reach = np.float32(0.5 * settings.voxel_size / settings.resolution)
    offsets: Float32 = np.tanh(fields["xyz"] + perturbation)
    offsets *= reach
    centers = (coords[:, 1:].astype(np.float32) + np.float32(0.5)) / np.float32(settings.resolution)
    offsets += centers[:, None]
    return Gaussians(
        places=offsets.reshape(-1, 3),
        features=fields["features_dc"].reshape(-1, 1, 3),
        raw_scales=fields["scaling"].reshape(-1, 3),
        raw_rotations=fields["rotation"].reshape(-1, 4),
        raw_opacities=fields["opacity"].reshape(-1, 1),
        settings=settings,
    )
