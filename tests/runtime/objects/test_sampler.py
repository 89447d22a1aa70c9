"""Sampling equals the original's, with a velocity that is simple enough to write down."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from sam3d_gguf.runtime.loading import load_weights
from sam3d_gguf.runtime.objects.sampler import Latent, SamplerSettings, sample
from sam3d_gguf.schemas.errors import InputError

Array = NDArray[np.float32]
STRUCTURE = SamplerSettings(25, 3.0, 1000.0, 7.0, (0.0, 500.0))
LATENT = SamplerSettings(25, 1.0, 1000.0, 1.0, (0.0, 500.0))
NOISE: Latent = {
    "a": np.array([0.1], np.float32),
    "b": np.array([0.5, -1.25, 2.0], np.float32),
}


class Drift:
    """A velocity that depends on all that it is told; counts its calls."""

    def __init__(self) -> None:
        self.calls = {True: 0, False: 0}

    def __call__(
        self, latent: Latent, time: float, step: float, *, conditional: bool
    ) -> Mapping[str, Array]:
        self.calls[conditional] += 1
        pull = (0.3 if conditional else 0) + time * 0.001 - step * 0.002
        return {
            name: (array * np.float32(-0.75) + np.float32(pull)).astype(np.float32)
            for name, array in latent.items()
        }


def test_settings_are_read_from_the_converted_files(objects: Path) -> None:
    with load_weights(objects / "ss_generator.gguf", "objects.ss_generator") as weights:
        assert SamplerSettings.of(weights) == STRUCTURE
    with load_weights(objects / "slat_generator.gguf", "objects.slat_generator") as weights:
        assert SamplerSettings.of(weights) == LATENT


def test_guidance_ends_where_the_original_s_does() -> None:
    drift = Drift()
    states = list(sample(drift, NOISE, STRUCTURE))
    assert drift.calls == {True: 25, False: 19}
    for index, a, b in [
        (17, 1.1058861017227173, [1.3877512216567993, 0.15459153056144714, 2.4447453022003174]),
        (18, 1.2115058898925781, [1.4823834896087646, 0.2972939610481262, 2.4981746673583984]),
        (19, 1.2059972286224365, [1.465108871459961, 0.3314952850341797, 2.4367778301239014]),
        (24, 1.2618669271469116, [1.4476542472839355, 0.6348344087600708, 2.1443569660186768]),
    ]:
        np.testing.assert_allclose(states[index]["a"], [a], rtol=2e-6)
        np.testing.assert_allclose(states[index]["b"], b, rtol=2e-6)
        assert states[index]["a"].dtype == np.float32


def test_a_distilled_model_is_told_the_step_and_not_guided() -> None:
    drift = Drift()
    states = list(sample(drift, NOISE, STRUCTURE.with_steps(4).as_distilled()))
    assert drift.calls == {True: 4, False: 0}
    np.testing.assert_allclose(states[0]["a"], [0.07250000536441803], rtol=2e-6)
    np.testing.assert_allclose(states[3]["a"], [0.18286988139152527], rtol=2e-6)
    last = [0.34962281584739685, -0.3799212574958801, 0.9749463200569153]
    np.testing.assert_allclose(states[3]["b"], last, rtol=2e-6)


@pytest.mark.parametrize(
    ("steps", "guided", "last"),
    [
        (25, 13, [0.9231774806976318, 0.10597161948680878, 1.6236392259597778]),
        (8, 5, [0.9256196618080139, 0.1294195055961609, 1.6080766916275024]),
    ],
)
def test_even_times_include_the_end_of_the_interval(
    steps: int, guided: int, last: list[float]
) -> None:
    drift = Drift()
    *_, state = sample(drift, {"b": NOISE["b"]}, LATENT.with_steps(steps))
    assert drift.calls == {True: steps, False: guided}
    np.testing.assert_allclose(state["b"], last, rtol=2e-6)


def test_who_stops_asking_stops_the_sampling() -> None:
    drift = Drift()
    assert len(list(islice(sample(drift, NOISE, LATENT), 2))) == 2
    assert drift.calls == {True: 2, False: 2}


@pytest.mark.parametrize("steps", [0, -1, 1001])
def test_a_senseless_number_of_steps_is_refused(steps: int) -> None:
    with pytest.raises(InputError, match="1 to 1000"):
        LATENT.with_steps(steps)
