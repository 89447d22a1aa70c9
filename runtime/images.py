"""Read a photo or a mask the way OpenCV's `imread` does, which the original uses.

EXIF orientation is applied, alpha is dropped, 16-bit samples keep their high byte, grey becomes
RGB.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from sam3d_gguf.extractors.files import open_source
from sam3d_gguf.runtime.geometry.arrays import Uint8
from sam3d_gguf.runtime.geometry.crop import MAX_SIDE
from sam3d_gguf.schemas.errors import InputError

FORMATS = ("JPEG", "PNG", "WEBP")
MASK_FORMATS = ("PNG",)
MAX_PIXELS = 100_000_000
MASK_THRESHOLD = 127


def read_photo(path: Path, *, opaque: bool = False) -> Uint8:
    """The [H, W, 3] uint8 RGB of a JPEG, PNG or WebP file; of an animation, its first frame.

    Args:
        opaque: refuse an image with transparent pixels, whose hidden colours would be used.

    Raises:
        InputError: not such a file, not a regular one, damaged, or larger than 100 million pixels.
    """
    with _opened(path, FORMATS) as image:
        if opaque and _alpha(image) is not None:
            raise InputError(
                "the photo has transparent pixels",
                where=str(path),
                expected="an image without transparency",
                action="Give the photo as it was taken, and the mask as a file of its own.",
            )
        return _as_rgb(image)


def read_object_mask(path: Path) -> Uint8:
    """The [H, W] uint8 mask of a PNG file: 255 on the object, else 0.

    The object is where the image is not transparent, or, of an image without transparency, where
    it is not black, however dark; Pillow reads the high byte alone of 16-bit RGB and RGBA, so that
    there less than 256 is black. The original reads the last channel alone: of RGB, blue.

    Raises:
        InputError: as `read_photo`, or no PNG file, since lossy formats blur the edge.
    """
    with _opened(path, MASK_FORMATS) as image:
        alpha = _alpha(image)
        marked: NDArray[np.bool_]
        if alpha is not None:
            marked = alpha > 0
        elif image.mode.startswith("I"):
            marked = np.asarray(ImageOps.exif_transpose(image)).astype(np.bool_)
        else:
            marked = np.asarray(_as_rgb(image).any(axis=2))
        return np.where(marked, np.uint8(255), np.uint8(0))


def read_mask(path: Path, photo: Uint8) -> Uint8:
    """The [H, W] uint8 mask of an image file: 1 where it is brighter than 127, else 0.

    Raises:
        InputError: as `read_photo`, or a size that is not the photo's.
    """
    mask: Uint8 = read_photo(path).max(axis=2)
    if mask.shape != photo.shape[:2]:
        raise InputError(
            f"the mask is {mask.shape[1]}x{mask.shape[0]}",
            where=str(path),
            expected=f"the photo's {photo.shape[1]}x{photo.shape[0]}",
        )
    return (mask > MASK_THRESHOLD).astype(np.uint8)


@contextlib.contextmanager
def _opened(path: Path, formats: tuple[str, ...]) -> Generator[Image.Image]:
    """An image whose pixels the block reads."""
    with open_source(path) as opened, os.fdopen(os.dup(opened.fd), "rb") as stream:
        with _refusing(path, "the file can't be read as an image", formats):
            image = Image.open(stream, formats=formats)
        _check_size(image, path)
        with _refusing(path, "the image is damaged", formats):
            yield image


@contextlib.contextmanager
def _refusing(path: Path, what: str, formats: tuple[str, ...]) -> Generator[None]:
    try:
        yield
    except (MemoryError, InputError):
        raise
    except Exception as error:  # Pillow raises errors of many kinds on damaged files
        known = isinstance(error, UnidentifiedImageError)
        reason = "" if known else f": {str(error).rstrip('.')}"
        raise InputError(
            f"{what}{reason}",
            where=str(path),
            expected=f"a whole file of {', '.join(formats)}, up to {MAX_PIXELS:,} pixels",
        ) from error


def _check_size(image: Image.Image, path: Path) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise InputError(
            f"the image is {width}x{height}",
            where=str(path),
            expected=f"at most {MAX_PIXELS:,} pixels and sides up to {MAX_SIDE}",
        )


def _as_rgb(image: Image.Image) -> Uint8:
    turned = ImageOps.exif_transpose(image)
    if turned.mode.startswith("I"):
        grey = (np.asarray(turned).astype(np.uint32) >> 8).astype(np.uint8)
        return np.ascontiguousarray(np.repeat(grey[..., None], 3, axis=2))
    if turned.mode in ("RGBA", "LA", "PA"):
        turned = _without_alpha(turned)
    return np.array(turned.convert("RGB"))


def _alpha(image: Image.Image) -> Uint8 | None:
    """[H, W] alpha, if the image has one that is not opaque everywhere."""
    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return None
    alpha = np.asarray(ImageOps.exif_transpose(image).convert("RGBA"))[..., 3]
    return None if alpha.min() == 255 else alpha


def _without_alpha(image: Image.Image) -> Image.Image:
    if image.mode == "PA":
        image = image.convert("RGBA")
    bands = image.split()[:-1]
    return Image.merge("RGB", bands) if len(bands) == 3 else bands[0]
