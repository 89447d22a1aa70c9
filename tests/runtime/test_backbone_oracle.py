"""The backbone at the official width agrees with an implementation that is not the original's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from oracle_program import run_oracle
from safetensors.numpy import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from tiny_weights import weights_of

from sam3d_gguf.runtime.body.neural import FloatArray
from sam3d_gguf.runtime.body.neural_backbone import backbone_features
from sam3d_gguf.runtime.body.neural_parts import ENCODER, BodyDimensions
from sam3d_gguf.runtime.ggml.backend import open_backend
from sam3d_gguf.runtime.ggml.library import load_library
from sam3d_gguf.runtime.ggml.network import Parts
from sam3d_gguf.runtime.ggml.store import WeightStore

CHANNELS, HIDDEN, BLOCKS, PERIODS = 1280, 5120, 2, 16
RELATIVE_L2 = 5e-6


def random_encoder() -> dict[str, FloatArray]:
    """Weights under the original's names, of a size at which every stage matters."""
    generator = np.random.default_rng(0)

    def normal(*shape: int, scale: float = 0.02, mean: float = 0.0) -> FloatArray:
        return (mean + scale * generator.standard_normal(shape, np.float32)).astype(np.float32)

    weights = {
        "cls_token": normal(1, 1, CHANNELS),
        "storage_tokens": normal(1, 4, CHANNELS),
        "patch_embed.proj.weight": normal(CHANNELS, 3, 16, 16),
        "patch_embed.proj.bias": normal(CHANNELS),
        "rope_embed.periods": (100.0 ** (np.arange(PERIODS) / PERIODS)).astype(np.float32),
        "norm.weight": normal(CHANNELS, scale=0.1, mean=1),
        "norm.bias": normal(CHANNELS),
    }
    linear = {
        "attn.qkv": (3 * CHANNELS, CHANNELS),
        "attn.proj": (CHANNELS, CHANNELS),
        "mlp.w1": (HIDDEN, CHANNELS),
        "mlp.w2": (HIDDEN, CHANNELS),
        "mlp.w3": (CHANNELS, HIDDEN),
    }
    for block in (f"blocks.{index}" for index in range(BLOCKS)):
        for name, shape in linear.items():
            weights[f"{block}.{name}.weight"] = normal(*shape)
            weights[f"{block}.{name}.bias"] = normal(shape[0])
        weights[f"{block}.attn.qkv.bias"][CHANNELS : 2 * CHANNELS] = 0
        for name in ("norm1", "norm2"):
            weights[f"{block}.{name}.weight"] = normal(CHANNELS, scale=0.1, mean=1)
            weights[f"{block}.{name}.bias"] = normal(CHANNELS)
        for name in ("ls1", "ls2"):
            weights[f"{block}.{name}.gamma"] = normal(CHANNELS, scale=0.2, mean=0.5)
    return weights


def features_on_ggml(encoder: dict[str, FloatArray], image: FloatArray) -> FloatArray:
    weights = weights_of({f"{ENCODER}.{key}": ("F32", value) for key, value in encoder.items()}, {})
    dimensions = BodyDimensions(
        channels=CHANNELS,
        depth=BLOCKS,
        heads=CHANNELS // (4 * PERIODS),
        patch=16,
        storage_tokens=4,
        decoder_dim=0,
        decoder_depth=0,
        decoder_heads=0,
    )
    with open_backend(load_library(), "cpu", threads=2) as backend:
        parts = Parts(WeightStore(backend, weights, weights.tensors), backend)
        periods: FloatArray = encoder["rope_embed.periods"]
        features = backbone_features(parts, dimensions, periods, image, None)
        parts.close()
    return features


@pytest.mark.oracle
def test_two_blocks_agree_with_transformers(tmp_path: Path) -> None:
    encoder = random_encoder()
    image = np.random.default_rng(1).standard_normal((1, 3, 512, 512), np.float32)
    save_file({**encoder, "image": image}, tmp_path / "weights.safetensors")
    run_oracle(
        "dinov3_features.py", tmp_path / "weights.safetensors", tmp_path / "features.safetensors"
    )
    expected = load_file(tmp_path / "features.safetensors")["features"].astype(np.float64)
    found = features_on_ggml(encoder, image).reshape(1, 1024, CHANNELS).astype(np.float64)
    assert np.linalg.norm(found - expected) <= RELATIVE_L2 * np.linalg.norm(expected)
