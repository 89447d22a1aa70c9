"""Resampling and Fourier features around the graphs: nothing here is learned.

Source: torch.nn.functional.interpolate(antialias=True), grid_sample(align_corners=False) and the
original's `camera_embed.py`.
"""

from __future__ import annotations

import numpy as np

from sam3d_gguf.runtime.body.neural import FloatArray

BANDS = 16
MAX_FREQUENCY = 32.0


def antialiased_weights(size: int, factor: int) -> FloatArray:
    """[size / factor, size]: the triangle filter that shrinks an axis by a whole factor."""
    centres = (np.arange(size // factor, dtype=np.float32) + np.float32(0.5)) * np.float32(factor)
    support = np.float32(factor)
    positions = np.arange(size, dtype=np.float32)[None, :] + np.float32(0.5) - centres[:, None]
    weights: FloatArray = np.maximum(np.float32(1) - np.abs(positions / support), np.float32(0))
    weights /= weights.sum(axis=1, keepdims=True)
    return weights


def downsample_rays(rays: FloatArray, patch: int) -> FloatArray:
    """[B, 2, H, W] to one ray per patch with z = 1: [B, patches, 3]."""
    rows = antialiased_weights(rays.shape[2], patch)
    columns = antialiased_weights(rays.shape[3], patch)
    # Not optimize=True: that is NumPy's BLAS, whose threads then compete with libggml's.
    small = np.einsum("bchw,gw->bchg", rays, columns)
    small = np.einsum("bchg,fh->bfgc", small, rows)
    flat = small.reshape(len(rays), -1, 2)
    return np.concatenate([flat, np.ones_like(flat[..., :1])], axis=2).astype(np.float32)


def fourier_features(positions: FloatArray) -> FloatArray:
    """[B, N, 3] to [B, N, 99]: xyz | sin(pi f x) of 3 x 16 frequencies | cos."""
    bands = np.linspace(1.0, MAX_FREQUENCY, BANDS, dtype=np.float32)
    scaled = (positions[..., None] * bands).reshape(*positions.shape[:2], -1)
    angles = np.float32(np.pi) * scaled
    return np.concatenate([positions, np.sin(angles), np.cos(angles)], axis=2)


def bilinear_sample(features: FloatArray, points: FloatArray) -> FloatArray:
    """Samples with zeros outside.

    Args:
        features: [B, h, w, C].
        points: [B, N, 2], x and y in -1..1 from edge to edge.

    Returns:
        [B, N, C].
    """
    _, height, width, _ = features.shape
    one, half = np.float32(1), np.float32(0.5)
    x = ((points[..., 0] + one) * np.float32(width) - one) * half
    y = ((points[..., 1] + one) * np.float32(height) - one) * half
    left, top = np.floor(x), np.floor(y)
    sampled = np.zeros((*points.shape[:2], features.shape[3]), np.float32)
    batch = np.arange(len(features))[:, None]
    for row, row_weight in ((top, top + one - y), (top + one, y - top)):
        for column, column_weight in ((left, left + one - x), (left + one, x - left)):
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            weight = np.where(inside, column_weight * row_weight, np.float32(0))
            taken = features[
                batch,
                np.where(inside, row, 0).astype(np.intp),
                np.where(inside, column, 0).astype(np.intp),
            ]
            sampled += taken * weight[..., None]
    return sampled


def sine_cosine(products: FloatArray) -> FloatArray:
    """[..., n] to [..., 2 n]: sin | cos of 2 pi times the products."""
    angles = np.float32(2 * np.pi) * products
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
