"""Array types that the geometry shares."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int32 = NDArray[np.int32]
Uint8 = NDArray[np.uint8]
Bool = NDArray[np.bool_]
