"""A picture of a photo with its masks, beside what was made of it."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from sam3d_gguf.runtime.geometry.arrays import Bool, Uint8

_TINTS = ((255, 120, 40), (60, 160, 255), (110, 210, 90), (220, 90, 200))
_TINT = 0.45
_DIM = 0.35
_LINE = 255


def marked(photo: Uint8, masks: Sequence[Bool]) -> Uint8:
    """[H, W, 3]: the photo with each mask [H, W] in a colour, and a line around it."""
    image = photo.astype(np.float32)
    for number, mask in enumerate(masks):
        tint = np.array(_TINTS[number % len(_TINTS)], np.float32)
        image[mask] = image[mask] * (1 - _TINT) + tint * _TINT
        image[mask & ~_within(mask)] = _LINE
    return np.rint(image).astype(np.uint8)


def _within(mask: Bool) -> Bool:
    """What of a mask has nothing else beside, above or below it."""
    padded = np.pad(mask, 1)
    inner: Bool = padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    return inner


def dimmed(photo: Uint8) -> Uint8:
    """[H, W, 3]: the photo, darker and grey, for what is drawn over it."""
    grey = photo.mean(axis=2, keepdims=True, dtype=np.float32) * np.float32(_DIM)
    return np.repeat(np.rint(grey).astype(np.uint8), 3, axis=2)


def resized_photo(photo: Uint8, width: int, height: int) -> Uint8:
    """[height, width, 3] of a photo [H, W, 3]."""
    if photo.shape[:2] == (height, width):
        return photo
    return np.asarray(Image.fromarray(photo).resize((width, height), Image.Resampling.BOX))


def side_by_side(left: Uint8, right: Uint8) -> bytes:
    """A PNG of two pictures [H, W, 3] of one size."""
    stream = io.BytesIO()
    Image.fromarray(np.concatenate([left, right], axis=1)).save(stream, "PNG")
    return stream.getvalue()
