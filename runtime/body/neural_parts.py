"""What the graphs of the neural parts of Body have in common: dimensions, weights, the FFN."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sam3d_gguf.runtime.ggml.backend import Backend
from sam3d_gguf.runtime.ggml.network import Network
from sam3d_gguf.runtime.ggml.store import Tensor, WeightStore
from sam3d_gguf.runtime.weights import Weights

ENCODER = "backbone.encoder"

_NOT_IN_GRAPHS = re.compile(
    r"\.(qkv\.bias|bias_mask|periods|positional_encoding_gaussian_matrix|mask_token"
    r"|joint_rotation|(scale|hand_pose)_comps|(right_wrist|root)_coords|local_to_world_wrist)$"
)


@dataclass(frozen=True, slots=True)
class BodyDimensions:
    """The sizes of one SAM 3D Body, read from the shapes of its tensors.

    Attributes:
        channels: C, of the backbone.
        heads: of the backbone's attention.
        decoder_dim: DIM.
        decoder_heads: of the decoder's attention; no shape tells it.
    """

    channels: int
    depth: int
    heads: int
    patch: int
    storage_tokens: int
    decoder_dim: int
    decoder_depth: int
    decoder_heads: int

    @classmethod
    def of(cls, weights: Weights, decoder_heads: int) -> BodyDimensions:
        """Reads the sizes from checked weights."""
        channels = weights.tensor(f"{ENCODER}.cls_token").shape[-1]
        periods = weights.tensor(f"{ENCODER}.rope_embed.periods").shape[0]
        return cls(
            channels=channels,
            depth=_layers(weights, rf"{ENCODER}\.blocks"),
            heads=channels // (4 * periods),
            patch=weights.tensor(f"{ENCODER}.patch_embed.proj.weight").shape[-1],
            storage_tokens=weights.tensor(f"{ENCODER}.storage_tokens").shape[1],
            decoder_dim=weights.tensor("decoder.norm_final.weight").shape[0],
            decoder_depth=_layers(weights, r"decoder\.layers"),
            decoder_heads=decoder_heads,
        )


def _layers(weights: Weights, prefix: str) -> int:
    pattern = re.compile(rf"{prefix}\.(\d+)\.")
    found = [int(match[1]) for name in weights.tensors if (match := pattern.match(name))]
    return max(found, default=-1) + 1


def body_store(backend: Backend, weights: Weights) -> WeightStore:
    """Loads the tensors of the Body's graphs, and those that they need in another form."""
    names = [
        name
        for name, tensor in weights.tensors.items()
        if tensor.type in ("F32", "F16", "BF16") and not _NOT_IN_GRAPHS.search(name)
    ]
    derived: dict[str, npt.NDArray[np.float32]] = {}
    for name in weights.tensors:
        if name.endswith(".qkv.bias"):
            derived[name] = weights.array(name) * weights.array(f"{name}_mask")
        elif name.endswith(("gaussian_matrix", "scale_comps", "hand_pose_comps")):
            derived[name] = np.ascontiguousarray(weights.array(name).T)
    return WeightStore(backend, weights, names, derived)


def ffn(network: Network, x: Tensor, module: str) -> Tensor:
    """The original's FFN of two layers with a ReLU between, without identity."""
    hidden = network.relu(network.dense(x, f"{module}.layers.0.0"))
    return network.dense(hidden, f"{module}.layers.1")
