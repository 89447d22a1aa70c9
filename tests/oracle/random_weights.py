"""Random weights, fast and the same on every machine: a generator seeded by the tensor's name."""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch


def generator(name: str) -> np.random.Generator:
    """A generator of its own for each tensor name."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return np.random.Generator(np.random.SFC64(seed))


def weights(name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A BF16, F16 or F32 tensor of finite values between 2^-7 and 2^-3 in magnitude, of both signs.

    The bits are drawn directly: the sign, the mantissa and the two low bits of the exponent are
    random, the rest of the exponent is fixed.
    """
    count = math.prod(shape)
    if dtype is torch.bfloat16:
        bits = raw_bits(name, count, np.dtype("<u2"))
        bits &= 0x81FF
        bits |= 0x3C00
        values = torch.from_numpy(bits).view(torch.bfloat16)
    elif dtype is torch.float16:
        bits = raw_bits(name, count, np.dtype("<u2"))
        bits &= 0x8FFF
        bits |= 0x2000
        values = torch.from_numpy(bits).view(torch.float16)
    elif dtype is torch.float32:
        bits = raw_bits(name, count, np.dtype("<u4"))
        bits &= 0x81FFFFFF
        bits |= 0x3C000000
        values = torch.from_numpy(bits).view(torch.float32)
    else:
        raise ValueError(f"{name}: no random weights of {dtype}")
    return values.reshape(tuple(shape))


def raw_bits(name: str, count: int, dtype: np.dtype) -> np.ndarray:
    """`count` random unsigned integers."""
    words = generator(name).bit_generator.random_raw(-(-count * dtype.itemsize // 8))
    return words.view(dtype)[:count]
