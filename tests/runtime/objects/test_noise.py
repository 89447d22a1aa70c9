"""Noise: the same bytes from a seed, as specified, and stored noise as it is."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from objects_facts import TINY
from safetensors.numpy import load_file  # pyright: ignore[reportUnknownVariableType]

from sam3d_gguf.runtime.objects.noise import SeededNoise, StoredNoise
from sam3d_gguf.schemas.errors import InputError

SHAPES = {"translation": (1, 1, 3), "6drotation_normalized": (1, 1, 6), "shape": (1, 4096, 8)}


def test_numpy_s_generator_is_the_published_one() -> None:
    """The known answer of Philox4x64-10 for counter and key 0, of Random123."""
    generator = np.random.Philox(counter=2**256 - 1, key=0)
    assert [int(number) for number in np.asarray(generator.random_raw(4))] == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]


def test_numbers_follow_the_specification() -> None:
    raw = np.asarray(np.random.Philox(key=np.array([5, 1], np.uint64)).random_raw(2000))
    expected: list[float] = []
    for first, second in raw.reshape(-1, 2).tolist():
        radius = math.sqrt(-2 * math.log(((first >> 11) + 1) / 2**53))
        angle = math.pi / 2 * ((second >> 11) / 2**51) - math.pi / 4
        expected += [radius * math.cos(angle), radius * math.sin(angle)]
    found = SeededNoise(5).latent((1, 250, 8))
    np.testing.assert_allclose(found.reshape(-1), expected, rtol=1e-7, atol=1e-12)


def test_a_seed_gives_these_bytes() -> None:
    noise = SeededNoise(42)
    structure, latent = noise.structure(SHAPES), noise.latent((1, 20_000, 8))
    assert list(structure) == sorted(SHAPES)
    digest = hashlib.sha256(b"".join(array.astype("<f4").tobytes() for array in structure.values()))
    assert digest.hexdigest() == "f874537f6caf80e31a83692083fd232b97881721f5d735c5876652cdf4dcca60"
    assert (
        hashlib.sha256(latent.astype("<f4").tobytes()).hexdigest()
        == "de643f7f6ffe3931306f4fe65053d6004b852571aae07c6e5ad177337da167c1"
    )


def test_tensors_come_from_one_stream_in_the_order_of_their_names() -> None:
    noise = SeededNoise(2**64 - 1)
    both = noise.structure({"b": (3,), "a": (3,)})
    one = noise.structure({"a": (4, 2)})["a"].reshape(-1)
    np.testing.assert_array_equal(both["a"], one[:3])
    np.testing.assert_array_equal(both["b"], one[4:7])
    np.testing.assert_array_equal(noise.latent((1, 2, 8))[0], noise.latent((1, 5, 8))[0, :2])
    assert not np.array_equal(noise.latent((3,)), both["a"])
    assert not np.array_equal(SeededNoise(0).latent((3,)), noise.latent((3,)))


def test_numbers_are_normal() -> None:
    numbers = SeededNoise(1).latent((1_000_000,)).astype(np.float64)
    moments = [float((numbers**power).mean()) for power in (1, 2, 3, 4)]
    np.testing.assert_allclose(moments, [0, 1, 0, 3], atol=0.04)
    assert abs(float((numbers[::2] * numbers[1::2]).mean())) < 0.005
    assert np.isfinite(numbers).all()


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(InputError, match="the seed"):
        SeededNoise(seed)


def test_stored_noise_is_given_back() -> None:
    token, latent = np.ones((1, 1, 3), np.float32), np.zeros((1, 5, 8), np.float32)
    noise = StoredNoise({"ss_noise.scale": token, "slat_noise": latent}, "noise.safetensors")
    assert noise.structure({"scale": (1, 1, 3)})["scale"] is token
    assert noise.latent((1, 5, 8)) is latent


def test_the_original_s_noise_is_read_from_a_file() -> None:
    noise = StoredNoise.read(TINY / "inputs-pipeline.safetensors")
    original = load_file(TINY / "inputs-pipeline.safetensors")
    shapes = {"scale": (1, 1, 3), "shape": (1, 4096, 8)}
    for name, array in noise.structure(shapes).items():
        np.testing.assert_array_equal(array, original[f"ss_noise.{name}"])
    np.testing.assert_array_equal(noise.latent((1, 324, 8)), original["slat_noise"])


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (None, "slat_noise is missing"),
        (np.zeros((1, 4, 8), np.float32), r"float32 \[1, 4, 8\]; expected float32 \[1, 5, 8\]"),
        (np.zeros((1, 5, 8), np.float64), "slat_noise is float64"),
        (np.full((1, 5, 8), np.nan, np.float32), "not finite"),
    ],
)
def test_stored_noise_that_does_not_fit_is_refused(
    array: np.ndarray[tuple[int, ...], np.dtype[np.floating]] | None, message: str
) -> None:
    tensors = {} if array is None else {"slat_noise": array}
    with pytest.raises(InputError, match=message):
        StoredNoise(tensors, "noise.safetensors").latent((1, 5, 8))
