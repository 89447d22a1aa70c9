"""What makes scales, opacities and colours of decoded numbers."""

from __future__ import annotations

import numpy as np

from sam3d_gguf.runtime.geometry.arrays import Float32

_LINEAR_ABOVE = 20


def sigmoid(values: Float32) -> Float32:
    """1 / (1 + exp(-x)) in float32; far below 0 it is 0."""
    with np.errstate(over="ignore"):
        return np.reciprocal(np.float32(1) + np.exp(-values))


def softplus(values: Float32) -> Float32:
    """log(1 + exp(x)) in float32; above 20 it is x, as in PyTorch."""
    linear = values > np.float32(_LINEAR_ABOVE)
    return np.where(linear, values, np.log1p(np.exp(np.minimum(values, np.float32(_LINEAR_ABOVE)))))
