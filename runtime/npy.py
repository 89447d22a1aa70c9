"""Arrays in NumPy's .npy format, without pickled objects."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
from numpy.lib.format import read_array_header_1_0, read_array_header_2_0, read_magic
from numpy.typing import NDArray

from sam3d_gguf.schemas.errors import InputError


def npy_array(data: bytes, where: str) -> NDArray[Any]:
    """An array of numbers, versions 1 and 2; its data must be as long as its header says.

    Args:
        data: the whole file.
        where: its name, for messages.

    Raises:
        InputError: not such an array.
    """
    stream = io.BytesIO(data)
    try:
        readers = {(1, 0): read_array_header_1_0, (2, 0): read_array_header_2_0}
        reader = readers.get(read_magic(stream))
        if reader is None:
            raise InputError("the array's format is unknown", where=where, expected=".npy 1 or 2")
        shape, by_columns, dtype = reader(stream)
        count = math.prod(shape)
    except (ValueError, SyntaxError, TypeError) as error:
        raise InputError(
            f"the array's header can't be read: {error}", where=where, expected=".npy"
        ) from error
    rest = len(data) - stream.tell()
    if dtype.kind not in "fiu" or min(shape, default=1) < 0 or count * dtype.itemsize != rest:
        raise InputError(
            f"{rest} bytes of data for the shape {list(shape)} and the type {dtype}",
            where=where,
            expected="numbers, as many as the shape has",
        )
    flat = np.frombuffer(data, dtype, offset=stream.tell())
    return flat.reshape(shape, order="F" if by_columns else "C")
