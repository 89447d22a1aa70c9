"""Array types that the geometry shares."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int32 = NDArray[np.int32]
Uint8 = NDArray[np.uint8]
Bool = NDArray[np.bool_]
_Float = TypeVar("_Float", bound=np.floating[Any])


def cross(a: NDArray[_Float], b: NDArray[_Float]) -> NDArray[_Float]:
    """`np.cross` of [..., 3], bit for bit, without what its general case costs."""
    product = np.empty(np.broadcast_shapes(a.shape, b.shape), a.dtype)
    for axis, (left, right) in enumerate(((1, 2), (2, 0), (0, 1))):
        product[..., axis] = a[..., left] * b[..., right] - a[..., right] * b[..., left]
    return product
