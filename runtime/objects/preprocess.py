"""From a photo, its mask and its points to the images that the encoders take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from sam3d_gguf.runtime.geometry.arrays import Bool, Float32, Uint8
from sam3d_gguf.runtime.ggml.host_memory import check_available
from sam3d_gguf.runtime.objects.metadata import integer, number
from sam3d_gguf.runtime.objects.pointmap import normalized
from sam3d_gguf.runtime.objects.resize import bilinear, nearest
from sam3d_gguf.runtime.weights import Weights
from sam3d_gguf.schemas.errors import InputError

Box = tuple[int, int, int, int]
"""x1, y1, x2, y2 in pixels; may reach beyond the photo."""

_MINIMUM_SIDE = 2
_PIXEL_BYTES, _SQUARE_BYTES = 160, 40
"""Memory that preprocessing takes for a pixel of the photo, and of the square around it."""
_MARK = "Give a mask that marks the object."
_Margins = tuple[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class PreprocessSettings:
    """Numbers of a generator's preprocessing.

    Attributes:
        image_size: side of the encoders' square images.
        box_size_factor: side of the crop over the longer side of the mask's box.
        padding_factor: border of the crop over its side.
    """

    image_size: int
    box_size_factor: float
    padding_factor: float

    @classmethod
    def of(cls, weights: Weights) -> Self:
        """The settings in an opened `ss_generator` or `slat_generator`.

        Raises:
            ContractError: one is missing or of the wrong kind.
        """
        return cls(
            image_size=integer(weights, "image_size"),
            box_size_factor=number(weights, "preprocess.box_size_factor"),
            padding_factor=number(weights, "preprocess.padding_factor"),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Crop:
    """The square around the mask.

    Attributes:
        image: [3, S, S] float32, 0 beyond the photo.
        mask: [1, S, S] float32, 0 beyond it.
        points: [3, S, S] float32, if there are any: 0 beyond the photo, NaN where the square was
            made larger than the box.
    """

    image: Float32
    mask: Float32
    points: Float32 | None


def structure_inputs(
    rgba: Uint8, points: Float32, settings: PreprocessSettings
) -> Mapping[str, Float32]:
    """What the encoders of the sparse structure take, and the scene's scale and shift.

    Args:
        rgba: [H, W, 4], the photo with its mask as alpha.
        points: [3, H, W] with x left, y up, z forward, NaN where invalid.
        settings: those of the `ss_generator`.

    Returns:
        `image`, `rgb_image`, `pointmap`, `rgb_pointmap` [1, 3, S, S], `mask`, `rgb_image_mask`
        [1, 1, S, S], cropped and, with `rgb_`, of the whole photo; `pointmap_scale`,
        `pointmap_shift` and the same with `rgb_` [1, 3].

    Raises:
        InputError: the mask is too small to crop around, or has no finite point.
    """
    image, mask = split(rgba)
    scene = normalized(points, mask)
    crop = crop_around_mask(image, mask, scene.points, settings)
    assert crop.points is not None
    inputs = _image_inputs(image, mask, crop, settings.image_size)
    inputs["pointmap"] = _nearest_square(crop.points, settings.image_size)[None]
    inputs["rgb_pointmap"] = _nearest_square(scene.points, settings.image_size)[None]
    for whole in ("", "rgb_"):
        inputs[f"{whole}pointmap_scale"] = scene.scale[None]
        inputs[f"{whole}pointmap_shift"] = scene.shift[None]
    return inputs


def latent_inputs(rgba: Uint8, settings: PreprocessSettings) -> Mapping[str, Float32]:
    """What the encoders of the structured latent take: the images and masks of
    `structure_inputs`.

    Raises:
        InputError: the mask is too small to crop around.
    """
    image, mask = split(rgba)
    crop = crop_around_mask(image, mask, None, settings)
    return _image_inputs(image, mask, crop, settings.image_size)


def with_mask(photo: Uint8, mask: Uint8 | Bool) -> Uint8:
    """[H, W, 4]: the photo with its mask as alpha, 255 on the object and else 0.

    Args:
        photo: [H, W, 3].
        mask: [H, W] uint8 or bool, not 0 on the object.

    Raises:
        InputError: as `check_mask`.
    """
    check_mask(photo, mask)
    alpha = np.where(mask != 0, np.uint8(255), np.uint8(0))
    return np.concatenate([photo, alpha[..., None]], axis=2)


def check_mask(photo: Uint8, mask: Uint8 | Bool, where: str = "") -> None:
    """Refuse a mask that can't be a photo's object.

    Args:
        where: the mask's file, for messages.

    Raises:
        InputError: another shape or type, or a mask that marks nothing, everything or less than 3x3
            pixels.
    """
    if mask.ndim != 2 or mask.dtype.name not in ("uint8", "bool"):
        raise InputError(
            f"the mask is {mask.dtype} {list(mask.shape)}",
            where=where,
            expected="uint8 or bool [height, width]",
        )
    if mask.shape != photo.shape[:2]:
        raise InputError(
            f"the mask is {mask.shape[1]}x{mask.shape[0]}",
            where=where,
            expected=f"the photo's {photo.shape[1]}x{photo.shape[0]}",
        )
    if mask.all():
        raise InputError("the mask marks everything", where=where, action=_MARK)
    mask_box(mask, 1.0, where)


def split(rgba: Uint8) -> tuple[Float32, Float32]:
    """[H, W, 4] to the image [3, H, W] and the mask [1, H, W] in 0..1.

    Raises:
        BackendError: this machine has too little memory for what is made of them.
    """
    height, width = rgba.shape[:2]
    needed = _PIXEL_BYTES * height * width + _SQUARE_BYTES * max(height, width) ** 2
    check_available(needed, f"the images of a photo of {width}x{height}")
    planes = np.moveaxis((rgba / 255).astype(np.float32), -1, 0)
    return np.ascontiguousarray(planes[:3]), np.ascontiguousarray(planes[3:])


def mask_box(mask: Float32 | Uint8 | Bool, factor: float, where: str = "") -> Box:
    """The square around what is not 0 in [H, W], its side times `factor`, in whole pixels.

    Args:
        where: the mask's file, for messages.

    Raises:
        InputError: the mask is empty, or less than 3 pixels wide or high.
    """
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    if rows.size == 0:
        raise InputError("the mask marks nothing", where=where, action=_MARK)
    x1, x2, y1, y2 = (int(i) for i in (columns[0], columns[-1], rows[0], rows[-1]))
    if min(x2 - x1, y2 - y1) < _MINIMUM_SIDE:
        raise InputError(
            f"the mask marks {x2 - x1 + 1}x{y2 - y1 + 1} pixels",
            where=where,
            expected=f"at least {_MINIMUM_SIDE + 1}x{_MINIMUM_SIDE + 1}",
            action=_MARK,
        )
    half = int(max(x2 - x1, y2 - y1) * factor) // 2
    center_x, center_y = (x1 + x2) / 2, (y1 + y2) / 2
    corners = (center_x - half, center_y - half, center_x + half, center_y + half)
    return int(corners[0]), int(corners[1]), int(corners[2]), int(corners[3])


def crop_around_mask(
    image: Float32, mask: Float32, points: Float32 | None, settings: PreprocessSettings
) -> Crop:
    """Cut the square around the mask out of all three.

    Raises:
        InputError: the mask is too small.
    """
    box = mask_box(mask[0], settings.box_size_factor)
    side = max(box[2] - box[0], box[3] - box[1])
    border = int(side * settings.padding_factor)

    def squared(planes: Float32, outside: float) -> Float32:
        cut = _padded(_cut(planes, box), _to_square(box), outside)
        return _padded(cut, ((border, border), (border, border)), outside)

    return Crop(
        squared(image, 0),
        squared(mask, 0),
        None if points is None else squared(points, float("nan")),
    )


def pad_to_square(planes: Float32) -> Float32:
    """[..., H, W] with zeros on both sides of the shorter axis; an odd one more at the end."""
    height, width = planes.shape[-2:]
    rows, columns = max(width - height, 0), max(height - width, 0)
    return _padded(planes, (_halves(rows), _halves(columns)), 0)


def _image_inputs(image: Float32, mask: Float32, crop: Crop, size: int) -> dict[str, Float32]:
    return {
        "mask": _nearest_square(crop.mask, size)[None],
        "image": bilinear(pad_to_square(crop.image), (size, size))[None],
        "rgb_image": bilinear(pad_to_square(image), (size, size))[None],
        "rgb_image_mask": _nearest_square(mask, size)[None],
    }


def _nearest_square(planes: Float32, size: int) -> Float32:
    return np.ascontiguousarray(nearest(pad_to_square(planes), (size, size)))


def _cut(planes: Float32, box: Box) -> Float32:
    """The box out of [C, H, W], with zeros beyond it."""
    x1, y1, x2, y2 = box
    height, width = planes.shape[1:]
    inside = planes[:, max(y1, 0) : max(y2, 0), max(x1, 0) : max(x2, 0)]
    margins = ((max(-y1, 0), max(y2 - height, 0)), (max(-x1, 0), max(x2 - width, 0)))
    return _padded(inside, margins, 0)


def _to_square(box: Box) -> _Margins:
    """What makes a box square that the rounding of its corners has made one pixel longer."""
    width, height = box[2] - box[0], box[3] - box[1]
    side = max(width, height)
    return _halves(side - height), _halves(side - width)


def _halves(total: int) -> tuple[int, int]:
    return total // 2, total - total // 2


def _padded(planes: Float32, margins: _Margins, value: float) -> Float32:
    return np.pad(planes, ((0, 0), *margins), constant_values=value)
