"""The depth model: from a photo to a point for each of its pixels.

Source: microsoft/MoGe, version 1 (`MoGeModel.infer` with the arguments of
facebookresearch/sam-3d-objects: no field of view, no forced projection, the mask applied), and its
DINOv2 (ViT without registers), evaluation mode, in F32 where the original takes F16 on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sam3d_gguf.runtime.geometry.arrays import Float32, Uint8
from sam3d_gguf.runtime.ggml.backend import Backend
from sam3d_gguf.runtime.ggml.graph import FloatArray, InputArray
from sam3d_gguf.runtime.ggml.network import DeviceModel, Network, Parts, Taps
from sam3d_gguf.runtime.ggml.store import WeightStore
from sam3d_gguf.runtime.objects import neural_depth_head as head
from sam3d_gguf.runtime.objects.focal import recover, view_plane
from sam3d_gguf.runtime.objects.neural_layers import embed_patches, vit_block
from sam3d_gguf.runtime.objects.neural_settings import Settings
from sam3d_gguf.runtime.objects.resize import (
    Size,
    bicubic,
    bilinear,
    cubic_taps,
    linear_taps,
)
from sam3d_gguf.runtime.patches import patchify
from sam3d_gguf.runtime.weights import Weights
from sam3d_gguf.schemas.errors import ContractError, InputError

_HOST = ("image_mean", "image_std")
_UNREAD = "backbone.mask_token"
_LEVELS_OF_RESOLUTION = 9
_POSITION_OFFSET = 0.1
"""Is added to the side of the patch grid before the stored positions are scaled to it."""

_BAND = 1 << 22
"""Pixels of the photo that are worked on at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class DepthEstimate:
    """What the depth model says of a photo.

    Attributes:
        points: [H, W, 3] float32, x right, y down, z forward; infinite outside the mask.
        mask: [H, W] bool, where there is something at a finite distance.
        intrinsics: [3, 3] float32 of the camera, whose image plane is 1 wide and 1 high.
    """

    points: Float32
    mask: NDArray[np.bool_]
    intrinsics: Float32


class DepthModel(DeviceModel):
    """The depth model on one device. Not safe for concurrent calls, except `cancel`.

    with DepthModel(backend, weights) as model:
        estimate = model.estimate(photo)
    """

    def __init__(self, backend: Backend, weights: Weights) -> None:
        """Places the weights on the device.

        Args:
            weights: of `moge`.

        Raises:
            ContractError: a tensor or a key is missing, or the encoder has too few blocks.
            BackendError: the device has too little memory.
        """
        self._settings = settings = Settings(weights)
        level = settings.integer("resolution_level") / _LEVELS_OF_RESOLUTION
        least, most = (settings.integer(f"token_count_{end}") for end in ("minimum", "maximum"))
        self._tokens = int(least + level * (most - least))
        blocks, features = (
            settings.integer(key) for key in ("image_encoder.block_count", "head.feature_count")
        )
        if blocks < features:
            raise ContractError(
                f"the image encoder has {blocks} blocks",
                where=str(weights.path),
                expected=f"at least {features}, whose features are summed",
            )
        self._patch = settings.integer("image_encoder.patch_size")
        self._mean, self._deviation = (weights.array(name)[0] for name in _HOST)
        names = [name for name in weights.tensors if name not in (*_HOST, _UNREAD)]
        super().__init__(Parts(WeightStore(backend, weights, names), backend))

    def estimate(self, photo: Uint8, *, taps: Taps | None = None) -> DepthEstimate:
        """The points of a photo, at its size.

        Args:
            photo: [H, W, 3] RGB.

        Raises:
            InputError: the photo has another shape, is too narrow for the patches, or its points
                give no focal length.
            BackendError: the device has too little memory.
            CancelledError: `cancel` was called.
        """
        size = self._resized(photo)
        image = _scaled(photo, size)
        image = (image - self._mean) / self._deviation
        whole = (size[0] // self._patch * self._patch, size[1] // self._patch * self._patch)
        x, grid = self._encode(bilinear(image, whole)[None], taps)
        aspect = size[1] / size[0]
        for level in range(head.LEVELS):
            x, grid = self._double(level, x, grid, aspect, taps)
        values = self._output(x, grid, size, taps)
        return self._finish(values, (photo.shape[0], photo.shape[1]))

    def _resized(self, photo: Uint8) -> Size:
        """The size that has about as many patches as the model takes."""
        if photo.ndim != 3 or photo.shape[2] != 3 or photo.size == 0 or photo.dtype != np.uint8:
            raise InputError(
                f"the photo is {photo.dtype} {list(photo.shape)}",
                expected="uint8 [height, width, 3]",
            )
        height, width = photo.shape[:2]
        factor = (self._tokens * self._patch**2 / (height * width)) ** 0.5
        size = (int(height * factor), int(width * factor))
        if min(size) < self._patch:
            raise InputError(
                f"the photo of {width}x{height} is too narrow for the depth model",
                expected=f"a short side that is at least {self._patch} pixels when"
                f" the photo is scaled to {self._tokens * self._patch**2:,} pixels",
                action="Crop the photo, or give a pointmap.",
            )
        return size

    def _encode(self, image: FloatArray, taps: Taps | None) -> tuple[FloatArray, Size]:
        """[patches, C] the sum of the projected features, and their grid."""
        settings = self._settings
        channels = settings.integer("image_encoder.channels")
        heads = settings.integer("image_encoder.attention.head_count")
        epsilon = settings.real("image_encoder.layer_norm_epsilon")
        blocks = settings.integer("image_encoder.block_count")
        side = settings.integer("image_encoder.position_grid")
        features = settings.integer("head.feature_count")
        patches, grid = patchify(image, self._patch)
        count = patches.shape[1]
        inputs: dict[str, FloatArray] = {"patches": patches}
        weights = position_weights(side, grid)
        if weights is not None:
            inputs["positions"] = weights

        def build(network: Network) -> None:
            x = embed_patches(network, network.tensors["patches"], "backbone")
            network.tap("patch_embed", x)
            stored = network.weight("backbone.pos_embed")
            first = network.add(
                network.weight("backbone.cls_token"), network.narrow(stored, 1, 0, 1)
            )
            positions = network.narrow(stored, 1, 1, side * side)
            if "positions" in network.tensors:
                turned = network.permute(positions, (0, 2, 1))
                table = network.reshape(turned, (channels, side * side))
                scaled = network.matmul(network.tensors["positions"], table)
                positions = network.reshape(scaled, (1, count, channels))
            x = network.concat([first, network.add(x, positions)], axis=1)
            network.tap("tokens", x)
            total = None
            for index in range(blocks):
                module = f"backbone.blocks.{index}"
                with network.scope(module):
                    x = vit_block(network, x, module, heads, epsilon)
                network.tap(f"block{index}", x)
                feature = index - (blocks - features)
                if feature < 0:
                    continue
                normed = network.narrow(network.norm(x, "backbone.norm", epsilon), 1, 1, count)
                part = head.pointwise(network, normed, f"head.projects.{feature}")
                total = part if total is None else network.add(total, part)
            assert total is not None
            network.output("features", network.reshape(total, (count, total.shape[2])))

        results = self._parts.run("encoder", inputs, build, taps=taps)
        x = results.pop("features")
        if taps is not None:
            for name, array in results.items():
                taps(name, array)
            taps("projected", _channels_first(x, grid))
        return x, grid

    def _double(
        self, level: int, x: FloatArray, grid: Size, aspect: float, taps: Taps | None
    ) -> tuple[FloatArray, Size]:
        """[4 * pixels, C] at twice the resolution, and its grid."""
        epsilon = self._settings.real("head.group_norm_epsilon")
        doubled = (2 * grid[0], 2 * grid[1])
        module = f"head.upsample_blocks.{level}"
        count = doubled[0] * doubled[1]

        def build(network: Network) -> None:
            tensors = network.tensors
            h = network.concat([tensors["x"], tensors["uv"]], axis=1)
            h = head.upsample(network, h, tensors["doubled"], f"{module}.0")
            network.tap(f"upsample{level}.0", h)
            for block in (1, 2):
                h = head.residual(network, h, tensors["around"], f"{module}.{block}", epsilon)
                network.tap(f"upsample{level}.{block}", h)
            network.output("y", h)

        inputs: dict[str, InputArray] = {
            "x": x,
            "uv": _view_rows(grid, aspect),
            "doubled": head.neighbourhoods(head.doubled_numbers(grid)),
            "around": head.neighbourhoods(head.row_numbers(doubled)),
        }
        rows = {"doubled": count, "around": count}
        results = self._parts.run(f"upsample{level}", inputs, build, rows=rows, taps=taps)
        y = results.pop("y")
        if taps is not None:
            for name, array in results.items():
                taps(name, _channels_first(array, doubled))
        return y, doubled

    def _output(self, x: FloatArray, grid: Size, size: Size, taps: Taps | None) -> FloatArray:
        """[4, *size] the points before their remapping, and the mask."""
        count = size[0] * size[1]

        def build(network: Network) -> None:
            tensors = network.tensors
            between = (
                [tensors[f"{each}{n}"] for n in range(head.CORNERS)]
                for each in ("corner", "weight")
            )
            h = head.interpolate(network, tensors["x"], *between)
            h = network.concat([h, tensors["uv"]], axis=1)
            points, mask = head.outputs(network, h, tensors["around"])
            network.output("values", network.concat([points, mask], axis=1))

        inputs: dict[str, InputArray] = {
            "x": x,
            "uv": _view_rows(size, size[1] / size[0]),
            "around": head.neighbourhoods(head.row_numbers(size)),
        }
        rows = {"around": count}
        corners, weights = head.bilinear_corners(grid, size)
        for number in range(head.CORNERS):
            inputs |= {f"corner{number}": corners[number], f"weight{number}": weights[number]}
            rows[f"corner{number}"] = len(x)
        values = self._parts.run("output", inputs, build, rows=rows, taps=taps)["values"]
        planes: FloatArray = _channels_first(values, size)[0]
        if taps is not None:
            taps("output.points", planes[None, :3])
            taps("output.mask", planes[None, 3:])
        return planes

    def _finish(self, values: FloatArray, size: Size) -> DepthEstimate:
        """The points and mask at the photo's size, and the camera."""
        points, mask = np.empty((*size, 3), np.float32), np.empty(size, np.bool_)
        threshold = np.float32(self._settings.real("output.mask_threshold"))
        columns, rows = linear_taps(values.shape[2], size[1]), linear_taps(values.shape[1], size[0])
        # Of an image of many pixels only bands are there twice.
        wide = _blended(values, columns.sources, columns.weights)
        step = max(1, _BAND // size[1])
        for start in range(0, size[0], step):
            band = slice(start, min(start + step, size[0]))
            turned = _blended(
                wide.swapaxes(1, 2), rows.sources[:, band], rows.weights[:, band]
            ).swapaxes(1, 2)
            with np.errstate(over="ignore", invalid="ignore"):
                depth = np.exp(turned[2])
                points[band] = np.stack([turned[0] * depth, turned[1] * depth, depth], axis=-1)
            mask[band] = turned[3] > threshold
        recovered = recover(points, mask)
        points[..., 2] += recovered.shift
        points[~mask] = np.inf
        return DepthEstimate(points, mask, recovered.intrinsics(size))


def position_weights(side: int, grid: Size) -> FloatArray | None:
    """[patches, side * side] what each stored position counts for the positions of a grid.

    A bicubic interpolation whose scale is that of a grid 0.1 larger, which is DINOv2's. None for
    the grid of the stored positions, which it would change.
    """
    if grid == (side, side):
        return None
    rows, columns = (
        cubic_taps(side, target, (target + _POSITION_OFFSET) / side).matrix(side) for target in grid
    )
    weights: FloatArray = np.kron(rows, columns)
    return weights


def _scaled(photo: Uint8, size: Size) -> Float32:
    """[3, *size] of the photo over 255; its columns first, band by band."""
    height, width = photo.shape[:2]
    step = max(1, _BAND // width)
    bands: list[Float32] = []
    for start in range(0, height, step):
        band = np.moveaxis(photo[start : start + step], -1, 0).astype(np.float32) / np.float32(255)
        bands.append(bicubic(band, (band.shape[1], size[1])))
    return bicubic(np.concatenate(bands, axis=1), size)


def _blended(planes: Float32, sources: NDArray[np.intp], weights: Float32) -> Float32:
    result: Float32 = planes[..., sources[0]] * weights[0]
    result += planes[..., sources[1]] * weights[1]
    return result


def _view_rows(size: Size, aspect: float) -> FloatArray:
    return view_plane(size, aspect).reshape(-1, 2)


def _channels_first(rows: FloatArray, size: Size) -> FloatArray:
    return np.ascontiguousarray(rows.T).reshape(1, -1, *size)
