"""Flow sampling: times, guidance and Euler steps from noise to data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, Self

import numpy as np

from sam3d_gguf.runtime.geometry.arrays import Float32, Float64
from sam3d_gguf.runtime.objects.metadata import integer, number, numbers
from sam3d_gguf.runtime.weights import Weights
from sam3d_gguf.schemas.errors import InputError

Latent = Mapping[str, Float32]
"""Arrays by name: the tokens of a sparse structure, or one array of voxels."""

MAX_STEPS = 1000


class Velocity(Protocol):
    """The flow network."""

    def __call__(
        self, latent: Latent, time: float, step: float, /, *, conditional: bool
    ) -> Mapping[str, Float32]:
        """The velocity of every array of a latent.

        Args:
            latent: where the sampling is.
            time, step: t and d of the network, already times `time_scale`.
            conditional: else the condition's tokens are times 0.
        """
        ...


@dataclass(frozen=True, slots=True)
class SamplerSettings:
    """Numbers of a sampling.

    Attributes:
        steps: Euler steps.
        rescale_t: the times are t / (1 + (rescale_t - 1) (1 - t)) of even ones.
        time_scale: factor of the times and steps that the network takes.
        strength: of the guidance, 0 for none.
        interval: scaled times, both included, outside of which there is no guidance.
        distilled: the network is told the size of a step, which is 1 / steps.
    """

    steps: int
    rescale_t: float
    time_scale: float
    strength: float
    interval: tuple[float, float]
    distilled: bool = False

    @classmethod
    def of(cls, weights: Weights) -> Self:
        """The settings in an opened `ss_generator` or `slat_generator`.

        Raises:
            ContractError: one is missing or of the wrong kind.
        """
        low, high = numbers(weights, "sampler.guidance_interval", 2)
        return cls(
            steps=integer(weights, "sampler.steps"),
            rescale_t=number(weights, "sampler.rescale_t"),
            time_scale=number(weights, "flow.time.scale"),
            strength=number(weights, "sampler.guidance_strength"),
            interval=(low, high),
        )

    def with_steps(self, steps: int) -> Self:
        """The same with another number of steps.

        Raises:
            InputError: no whole number, less than one, or more than 1000.
        """
        if type(steps) is not int or not 1 <= steps <= MAX_STEPS:
            raise InputError(
                f"the number of steps is {steps!r}", expected=f"an int, 1 to {MAX_STEPS}"
            )
        return dataclasses.replace(self, steps=steps)

    def as_distilled(self) -> Self:
        """The sampling of a distilled model: steps of a size it is told, and no guidance."""
        return dataclasses.replace(self, strength=0.0, distilled=True)

    def times(self) -> Float64:
        """[steps + 1] from 0 to 1."""
        even = np.linspace(0, 1, self.steps + 1)
        return even / (1 + (self.rescale_t - 1) * (1 - even))

    @property
    def step_size(self) -> float:
        """What the network is told of a step's size, before it is scaled."""
        return 1 / self.steps if self.distilled else 0.0

    def guides(self, scaled_time: float) -> bool:
        """Whether there is guidance at a scaled time."""
        return self.strength > 0 and self.interval[0] <= scaled_time <= self.interval[1]


def sample(velocity: Velocity, noise: Latent, settings: SamplerSettings) -> Iterator[Latent]:
    """Yield the latent after each Euler step; the last one is the result.

    Nothing is computed ahead, so who stops asking stops the sampling.
    """
    latent, times = noise, settings.times()
    step = float(np.float32(settings.step_size * settings.time_scale))
    for start, end in pairwise(times.tolist()):
        scaled = float(np.float32(start * settings.time_scale))
        moving = guided(velocity, latent, scaled, step, settings)
        latent = {n: _blend(1, array, end - start, moving[n]) for n, array in latent.items()}
        yield latent


def guided(
    velocity: Velocity, latent: Latent, time: float, step: float, settings: SamplerSettings
) -> Mapping[str, Float32]:
    """The velocity at a scaled time, with guidance where there is any."""
    conditional = velocity(latent, time, step, conditional=True)
    if not settings.guides(time):
        return conditional
    unconditional = velocity(latent, time, step, conditional=False)
    return guidance(conditional, unconditional, settings.strength)


def guidance(conditional: Latent, unconditional: Latent, strength: float) -> Mapping[str, Float32]:
    """(1 + strength) times the conditional velocity less strength times the unconditional one."""
    return {
        name: _blend(1 + strength, array, -strength, unconditional[name])
        for name, array in conditional.items()
    }


def _blend(a: float, first: Float32, b: float, second: Float32) -> Float32:
    """a * first + b * second, in float32."""
    result: Float32 = first * np.float32(a)
    result += second * np.float32(b)
    return result
