"""The condition tokens: image encoders, point embedder and the fuser that joins them.

Source: facebookresearch/sam-3d-objects (`EmbedderFuser`, `Dino`, `PointPatchEmbed`) and
facebookresearch/dinov2 (ViT with registers), evaluation mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from sam3d_gguf.runtime.ggml.backend import Backend
from sam3d_gguf.runtime.ggml.graph import FloatArray
from sam3d_gguf.runtime.ggml.network import DeviceModel, Network, Parts, Taps
from sam3d_gguf.runtime.ggml.store import Tensor, WeightStore
from sam3d_gguf.runtime.objects.neural_layers import embed_patches, vit_block
from sam3d_gguf.runtime.objects.neural_settings import Settings
from sam3d_gguf.runtime.patches import patchify
from sam3d_gguf.runtime.weights import Weights
from sam3d_gguf.schemas.errors import InputError

_UNREAD = ".mask_token"
_POINTS = 2
"""The number of the point embedder among the embedders."""


class ConditionEmbedder(DeviceModel):
    """The condition embedder of `ss_generator` or `slat_generator` on one device.

        with ConditionEmbedder(backend, weights) as embedder:
            tokens = embedder.tokens({"image": image, ...})

    Attributes:
        inputs: the names that `tokens` takes, in the order of their tokens.
    """

    def __init__(self, backend: Backend, weights: Weights) -> None:
        """Places the weights on the device.

        Args:
            weights: of the generator; only those of its condition embedder are loaded.

        Raises:
            ContractError: a tensor or a key is missing.
            BackendError: the device has too little memory.
        """
        self._settings = settings = Settings(weights)
        self.inputs = tuple(settings.texts("condition.token_order"))
        names = [name for name in weights.tensors if name.startswith("cond.")]
        store = WeightStore(backend, weights, [n for n in names if not n.endswith(_UNREAD)])
        super().__init__(Parts(store, backend))

    def tokens(self, inputs: Mapping[str, FloatArray], *, taps: Taps | None = None) -> FloatArray:
        """[1, tokens, condition channels].

        Args:
            inputs: `image` and `rgb_image` [1, 3, S, S], `mask` and `rgb_image_mask`
                [1, 1, S, S], and for `ss_generator` `pointmap` and `rgb_pointmap` [1, 3, S', S'],
                not finite where there is no point.

        Raises:
            InputError: an input is missing, unknown or has another shape.
            CancelledError: `cancel` was called.
        """
        if set(inputs) != set(self.inputs):
            raise InputError(f"the inputs are {sorted(inputs)}", expected=str(list(self.inputs)))
        parts: list[FloatArray] = []
        for number, name in enumerate(self.inputs):
            embedder, position = divmod(number, 2)
            suffix = ".call1" if position else ""
            if embedder == _POINTS:
                embedded = self._points(name, inputs[name], suffix, taps)
            else:
                embedded = self._image(embedder, name, inputs[name], suffix, taps)
            parts.append(self._project(embedder, position, embedded, suffix, taps))
        return np.concatenate(parts, axis=1)

    def _image(
        self, number: int, name: str, image: FloatArray, suffix: str, taps: Taps | None
    ) -> FloatArray:
        settings = self._settings
        size = settings.integer("image_size")
        wanted = (1, settings.integer("image_channels") if number == 0 else 1, size, size)
        if image.shape != wanted:
            raise InputError(f"{name} has the shape {image.shape}", expected=str(wanted))
        mean = _channels(settings.reals("image_encoder.mean", 3))
        deviation = _channels(settings.reals("image_encoder.std", 3))
        patches, _ = patchify(
            (image - mean) / deviation, settings.integer("image_encoder.patch_size")
        )
        stored = 0 if settings.flag("image_encoder.shared") else number
        module = f"cond.module_list.{stored}.backbone"
        heads = settings.integer("image_encoder.attention.head_count")
        registers = settings.integer("image_encoder.register_token_count")
        epsilon = settings.real("image_encoder.layer_norm_epsilon")

        def build(network: Network) -> None:
            x = embed_patches(network, network.tensors["patches"], module)
            network.tap("patch_embed", x)
            positions = network.weight(f"{module}.pos_embed")
            first = network.add(
                network.weight(f"{module}.cls_token"), network.narrow(positions, 1, 0, 1)
            )
            x = network.add(x, network.narrow(positions, 1, 1, x.shape[1]))
            x = network.concat([first, network.weight(f"{module}.register_tokens"), x], axis=1)
            for index in range(settings.integer("image_encoder.block_count")):
                with network.scope(f"block{index}"):
                    x = vit_block(network, x, f"{module}.blocks.{index}", heads, epsilon)
                network.tap(f"block{index}", x)
            if "image_encoder.output_norm_epsilon" in settings:
                x = network.normalize(x, settings.real("image_encoder.output_norm_epsilon"))
            else:
                x = network.norm(x, f"{module}.norm", epsilon)
                patch_tokens = network.narrow(x, 1, 1 + registers, x.shape[1] - 1 - registers)
                x = network.concat([network.narrow(x, 1, 0, 1), patch_tokens], axis=1)
            network.output("tokens", network.tap("", x))

        return self._run(f"module_list.{number}", {"patches": patches}, build, suffix, taps)

    def _points(
        self, name: str, pointmap: FloatArray, suffix: str, taps: Taps | None
    ) -> FloatArray:
        settings = self._settings
        if pointmap.ndim != 4 or pointmap.shape[:2] != (1, 3) or 0 in pointmap.shape:
            raise InputError(f"{name} has the shape {pointmap.shape}", expected="[1, 3, H, W]")
        patch, size = settings.integer("points.patch_size"), settings.integer("points.image_size")
        windows = _windows(_nearest(pointmap[0], size), patch)
        finite = np.isfinite(windows)
        valid = finite[:, :, :1] & finite[:, :, 1:2] & finite[:, :, 2:]
        points: FloatArray = np.where(valid, windows, np.float32(0))
        channels, count = settings.integer("points.channels"), len(windows)
        epsilon = settings.real("points.layer_norm_epsilon")
        heads = settings.integer("points.attention.head_count")
        module = f"cond.module_list.{_POINTS}"

        def build(network: Network) -> None:
            valid, invalid = network.tensors["valid"], network.tensors["invalid"]
            x = network.multiply(
                network.dense(network.tensors["points"], f"{module}.point_proj"), valid
            )
            token = network.reshape(network.weight(f"{module}.invalid_xyz_token"), (channels, 1))
            x = network.add(x, network.matmul(invalid, token))
            leading = network.repeat(network.weight(f"{module}.cls_token"), (count, 1, channels))
            x = network.concat([leading, x], axis=1)
            x = network.add(x, network.weight(f"{module}.pos_embed_window"))
            with network.scope("block0"):
                x = vit_block(network, x, f"{module}.blocks.0", heads, epsilon)
            network.tap("block0", x)
            x = network.reshape(network.narrow(x, 1, 0, 1), (1, count, channels))
            x = network.add(x, network.weight(f"{module}.pos_embed"))
            network.output("tokens", network.tap("", x))

        inputs: dict[str, FloatArray] = {
            "points": points,
            "valid": valid.astype(np.float32),
            "invalid": (~valid).astype(np.float32),
        }
        return self._run(f"module_list.{_POINTS}", inputs, build, suffix, taps)

    def _project(
        self, number: int, position: int, tokens: FloatArray, suffix: str, taps: Taps | None
    ) -> FloatArray:
        module = f"cond.projection_nets.{number}"
        epsilon = self._settings.real("projection.layer_norm_epsilon")

        def build(network: Network) -> None:
            def product(x: Tensor, name: str) -> Tensor:
                return network.matmul(x, network.weight(f"{module}.1.{name}.weight"))

            normed = network.norm(network.tensors["tokens"], f"{module}.0", epsilon)
            gate = network.silu(product(normed, "w1"))
            x = product(network.multiply(gate, product(normed, "w3")), "w2")
            network.tap("", x)
            row = network.narrow(network.weight("cond.idx_emb"), 0, position, 1)
            network.output("tokens", network.add(x, row))

        name = f"projection_nets.{number}"
        return self._run(name, {"tokens": tokens}, build, suffix, taps, position)

    def _run(
        self,
        name: str,
        inputs: dict[str, FloatArray],
        build: Callable[[Network], None],
        suffix: str,
        taps: Taps | None,
        variant: int = 0,
    ) -> FloatArray:
        results = self._parts.run(name, inputs, build, taps=taps, variant=variant)
        tokens = results.pop("tokens")
        if taps is not None:
            for stage, array in results.items():
                taps(f"{name}.{stage}".removesuffix(".") + suffix, array)
        return tokens


def _channels(values: tuple[float, ...]) -> FloatArray:
    return np.array(values, np.float32).reshape(1, -1, 1, 1)


def _nearest(image: FloatArray, size: int) -> FloatArray:
    """[C, H, W] to [size, size, C], each pixel the one at or before its place."""
    rows, columns = (_sources(length, size) for length in image.shape[1:])
    return np.ascontiguousarray(image[:, rows[:, None], columns[None]].transpose(1, 2, 0))


def _sources(length: int, size: int) -> npt.NDArray[np.intp]:
    places = np.arange(size, dtype=np.float32) * (np.float32(length) / np.float32(size))
    return np.minimum(places.astype(np.intp), length - 1)


def _windows(image: FloatArray, patch: int) -> FloatArray:
    """[S, S, C] to [windows, patch * patch, C], both row-major."""
    grid, channels = image.shape[0] // patch, image.shape[2]
    split = image.reshape(grid, patch, grid, patch, channels).transpose(0, 2, 1, 3, 4)
    return np.ascontiguousarray(split.reshape(grid * grid, patch * patch, channels))
