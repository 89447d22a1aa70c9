"""Arrays in NumPy's .npy format, without pickled objects."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.format import read_array_header_1_0, read_array_header_2_0, read_magic
from numpy.typing import NDArray

from sam3d_gguf.schemas.errors import InputError
from sam3d_gguf.schemas.strict_json import shorten

HEAD = 1 << 16
"""Bytes that hold every header that is accepted."""

_MAX_DIMENSIONS = 8
_MAX_SIZE = 1 << 40


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """What an array's header says, which its file is as long as.

    Attributes:
        by_columns: the first index changes fastest.
        start: bytes before the data.
    """

    shape: tuple[int, ...]
    by_columns: bool
    dtype: np.dtype[Any]
    start: int


def npy_header(head: bytes, size: int, where: str) -> NpyHeader:
    """The header of an array of numbers, versions 1 and 2.

    Args:
        head: the file's first bytes, `HEAD` of them or all.
        size: of the file.
        where: its name, for messages.

    Raises:
        InputError: no such header, or the file is not as long as it says.
    """
    stream = io.BytesIO(head)
    try:
        readers = {(1, 0): read_array_header_1_0, (2, 0): read_array_header_2_0}
        reader = readers.get(read_magic(stream))
        if reader is None:
            raise InputError("the array's format is unknown", where=where, expected=".npy 1 or 2")
        shape, by_columns, dtype = reader(stream)
    # The parser has no memory for what is nested too deep.
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise InputError(
            "the array's header can't be read",
            where=where,
            expected="what numpy.save writes, without objects",
        ) from error
    rest = size - stream.tell()
    sizes = len(shape) <= _MAX_DIMENSIONS and all(
        type(length) is int and 0 <= length < _MAX_SIZE for length in shape
    )
    if not sizes or dtype.kind not in "fiu" or math.prod(shape) * dtype.itemsize != rest:
        raise InputError(
            f"{rest} bytes of data for the shape {shorten(str(list(shape)))} and the type "
            f"{shorten(str(dtype))}",
            where=where,
            expected="numbers, as many as the shape has",
        )
    return NpyHeader(shape, bool(by_columns), dtype, stream.tell())


def npy_array(data: bytes, where: str) -> NDArray[Any]:
    """An array of numbers; its data must be as long as its header says.

    Args:
        data: the whole file.
        where: its name, for messages.

    Raises:
        InputError: not such an array.
    """
    header = npy_header(data[:HEAD], len(data), where)
    flat = np.frombuffer(data, header.dtype, offset=header.start)
    return flat.reshape(header.shape, order="F" if header.by_columns else "C")
