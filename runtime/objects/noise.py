"""The noise that sampling starts from: the same numbers from a seed on every machine, or a file's.

Normal numbers come from the Philox4x64-10 generator (Salmon et al., 2011), whose output NumPy
keeps, by the Box-Muller transform. Its logarithm, sine and cosine are sums here, of operations that
IEEE 754 rounds correctly; those of a mathematical library differ in their last bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from sam3d_gguf.runtime.geometry.arrays import Float32, Float64
from sam3d_gguf.runtime.tensor_files import TensorFile
from sam3d_gguf.schemas.errors import InputError

MAX_SEED = 2**64 - 1
STRUCTURE, LATENT = "ss_noise", "slat_noise"
"""Names in a noise file: `ss_noise.` and a token's name, `slat_noise`."""

_STREAMS = {STRUCTURE: 0, LATENT: 1}
_Uint64 = NDArray[np.uint64]
_BITS = 53
_MAX_SIZE = 1 << 26
_LOG_2 = 0.6931471805599453
_LOG_TERMS = 12
_CIRCLE_TERMS = 9


class Noise(Protocol):
    """Where noise comes from."""

    def structure(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Float32]:
        """Noise for every token of the sparse structure, by name."""
        ...

    def latent(self, shape: tuple[int, ...]) -> Float32:
        """Noise for the structured latent."""
        ...


class SeededNoise:
    """Noise from a seed.

    Of each pair of 64-bit outputs, the upper 53 bits a and b make two numbers: with
    r = sqrt(-2 ln((a + 1) / 2^53)) and the angle pi/2 (b / 2^51) - pi/4 they are r times its
    cosine and its sine, rounded to float32. The generator's key is (seed, 0) for the structure,
    (seed, 1) for the latent, its counter starts at 1; a tensor of odd size leaves one number out.

    Args:
        seed: 0 to 2^64 - 1.

    Raises:
        InputError: another seed.
    """

    __slots__ = ("_seed",)

    def __init__(self, seed: int) -> None:
        if type(seed) is not int or not 0 <= seed <= MAX_SEED:
            raise InputError(f"the seed is {seed!r}", expected=f"an int, 0 to {MAX_SEED}")
        self._seed = seed

    def structure(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Float32]:
        """Noise for every token, drawn in the order of the sorted names."""
        generator = self._generator(STRUCTURE)
        return {name: _normals(generator, shapes[name]) for name in sorted(shapes)}

    def latent(self, shape: tuple[int, ...]) -> Float32:
        """Noise for the latent; fewer voxels get the first of the same numbers."""
        return _normals(self._generator(LATENT), shape)

    def _generator(self, stage: str) -> np.random.Philox:
        return np.random.Philox(key=np.array([self._seed, _STREAMS[stage]], np.uint64))


class StoredNoise:
    """Noise that was stored, such as the original's.

    Args:
        tensors: float32, `ss_noise.` and a token's name, `slat_noise`.
        where: the file, for messages.
    """

    __slots__ = ("_tensors", "_where")

    @classmethod
    def read(cls, path: Path) -> Self:
        """The noise in a safetensors file, whatever else it holds.

        Raises:
            InputError: not such a file.
        """
        with TensorFile(path) as file:
            entries = [
                entry
                for name, entry in file.tensors.items()
                if name == LATENT or name.startswith(f"{STRUCTURE}.")
            ]
            for entry in entries:
                if entry.size > _MAX_SIZE:
                    raise InputError(
                        f"{entry.name} has {entry.size} numbers",
                        where=str(path),
                        expected=f"at most {_MAX_SIZE}",
                    )
            found = cls({entry.name: file.read(entry.name) for entry in entries}, str(path))
        # What sampling needs late is asked for at once.
        latent = found._tensors.get(LATENT)
        found._stored(LATENT, () if latent is None else latent.shape)
        return found

    def __init__(self, tensors: Mapping[str, NDArray[Any]], where: str) -> None:
        self._tensors = tensors
        self._where = where

    def structure(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Float32]:
        """The stored noise of every token.

        Raises:
            InputError: one is missing, of another shape or type, or not finite.
        """
        return {name: self._stored(f"{STRUCTURE}.{name}", shapes[name]) for name in sorted(shapes)}

    def latent(self, shape: tuple[int, ...]) -> Float32:
        """The stored noise of the latent.

        Raises:
            InputError: it is missing, of another shape or type, or not finite.
        """
        return self._stored(LATENT, shape)

    def _stored(self, name: str, shape: tuple[int, ...]) -> Float32:
        found = self._tensors.get(name)
        if found is None:
            raise InputError(f"the tensor {name} is missing", where=self._where)
        if found.dtype != np.float32 or found.shape != shape:
            raise InputError(
                f"{name} is {found.dtype} {list(found.shape)}",
                where=self._where,
                expected=f"float32 {list(shape)}",
            )
        if not np.isfinite(found).all():
            raise InputError(f"{name} holds numbers that are not finite", where=self._where)
        return found


def _normals(generator: np.random.Philox, shape: tuple[int, ...]) -> Float32:
    count = math.prod(shape)
    pairs = _random_bits(generator, 2 * ((count + 1) // 2)).reshape(-1, 2)
    radius = np.sqrt(-2.0 * _log((pairs[:, 0] + np.uint64(1)).astype(np.float64) * 2.0**-_BITS))
    numbers = np.stack(_cosine_and_sine(pairs[:, 1]), axis=-1) * radius[:, None]
    return numbers.reshape(-1)[:count].reshape(shape).astype(np.float32)


def _random_bits(generator: np.random.Philox, count: int) -> _Uint64:
    """The upper 53 bits of the next outputs."""
    raw: _Uint64 = np.asarray(generator.random_raw(count), np.uint64)
    return raw >> np.uint64(64 - _BITS)


def _log(values: Float64) -> Float64:
    """The logarithm of numbers in 0..1, to about 1e-16: 2 atanh((m - 1) / (m + 1)) + e ln 2."""
    mantissa, exponent = np.frexp(values)
    low = mantissa < math.sqrt(0.5)
    mantissa = np.where(low, 2 * mantissa, mantissa)
    ratio = (mantissa - 1) / (mantissa + 1)
    series = _polynomial(ratio * ratio, (1 / (2 * k + 1) for k in range(_LOG_TERMS)))
    whole = exponent.astype(np.float64) - low
    result: Float64 = 2 * ratio * series + whole * _LOG_2
    return result


def _cosine_and_sine(bits: _Uint64) -> tuple[Float64, Float64]:
    """Of pi/2 (bits / 2^51) - pi/4: whole quarter turns, and a series for the rest."""
    quarter = bits >> np.uint64(_BITS - 2)
    rest = bits & np.uint64(2 ** (_BITS - 2) - 1)
    angle = (rest.astype(np.float64) * 2.0 ** (2 - _BITS) - 0.5) * (math.pi / 2)
    square = angle * angle
    signs = [(-1) ** k for k in range(_CIRCLE_TERMS)]
    cosine = _polynomial(square, (s / math.factorial(2 * k) for k, s in enumerate(signs)))
    sine = angle * _polynomial(square, (s / math.factorial(2 * k + 1) for k, s in enumerate(signs)))
    odd, half = quarter % np.uint64(2) == 1, quarter >= np.uint64(2)
    turned = np.where(odd, -sine, cosine), np.where(odd, cosine, sine)
    return np.where(half, -turned[0], turned[0]), np.where(half, -turned[1], turned[1])


def _polynomial(x: Float64, coefficients: Iterable[float]) -> Float64:
    """c0 + x (c1 + x (c2 + ...))."""
    result = np.zeros_like(x)
    for coefficient in reversed(tuple(coefficients)):
        result = result * x + coefficient
    return result
