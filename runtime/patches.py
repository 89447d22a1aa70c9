"""Images as rows of patches, for the image encoders."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sam3d_gguf.schemas.errors import InputError


def patchify(
    image: npt.NDArray[np.float32], patch: int
) -> tuple[npt.NDArray[np.float32], tuple[int, int]]:
    """[B, 3, H, W] to ([B, patches, 3 * patch * patch], (grid height, grid width)).

    Raises:
        InputError: the image is not of whole patches.
    """
    batch, channels, height, width = image.shape
    if channels != 3 or not height or not width or height % patch or width % patch:
        raise InputError(
            f"the crop has the shape {image.shape}",
            expected=f"[B, 3, H, W] with H and W multiples of {patch}",
        )
    grid = (height // patch, width // patch)
    split = image.reshape(batch, channels, grid[0], patch, grid[1], patch)
    return split.transpose(0, 2, 4, 1, 3, 5).reshape(batch, grid[0] * grid[1], -1), grid
