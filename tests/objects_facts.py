"""The committed facts about the official files of SAM 3D Objects; programs of the oracle import it too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

MOGE_OFFICIAL: dict[str, Any] = {
    "encoder": "dinov2_vitl14",
    "remap_output": "exp",
    "intermediate_layers": 4,
    "dim_upsample": [256, 128, 64],
    "dim_times_res_block_hidden": 2,
    "num_res_blocks": 2,
    "num_tokens_range": [1200, 2500],
    "last_conv_channels": 32,
    "last_conv_size": 1,
}
"""The model section of MoGe's own configs/train/v1.json."""

FIXTURES = Path(__file__).parent / "fixtures"
TINY = FIXTURES / "tiny-objects-a"
TINY_MOGE = FIXTURES / "tiny-moge"
PARTS = (
    "ss_generator",
    "slat_generator",
    "ss_decoder",
    "slat_decoder_gs",
    "slat_decoder_gs_4",
    "slat_decoder_mesh",
)
"""Those with a checkpoint in the official repository: all but `moge`."""
Shape = tuple[int, ...]

_RANGE = re.compile(r"\{([0-9]+)-([0-9]+)\}")
_KWARGS = re.compile(r"^ *backbone_kwargs:\n(?: +\w+: [0-9]+\n){5}", re.MULTILINE)
_OFFICIAL: dict[str, tuple[tuple[str, str], ...]] = {
    "pipeline": (
        ("dtype: float32", "dtype: float16"),
        ("compile_model: false", "compile_model: true"),
        ("size: 56", "size: 518"),
    ),
    "ss_generator": (
        ("input_size: 56", "input_size: 518"),
        ("input_size: 32", "input_size: 256"),
        ("embed_dim: 32", "embed_dim: 512"),
        ("cond_channels: 48", "cond_channels: 1024"),
        ("model_channels: 64", "model_channels: 1024"),
        ("num_blocks: 2", "num_blocks: 24"),
        ("num_heads: 4", "num_heads: 16"),
    ),
    "slat_generator": (
        ("input_size: 56", "input_size: 518"),
        ("cond_channels: 48", "cond_channels: 1024"),
        ("- 12\n", "- 128\n"),
        ("model_channels: 40", "model_channels: 1024"),
        ("num_blocks: 2", "num_blocks: 24"),
        ("num_heads: 4", "num_heads: 16"),
        ("use_fp16: false", "use_fp16: true"),
    ),
    "ss_decoder": (("- 12\n- 8\n- 8\n", "- 512\n- 128\n- 32\n"),),
    "slat_decoder_mesh": (
        ("resolution: 16", "resolution: 64"),
        ("model_channels: 256", "model_channels: 768"),
        ("num_blocks: 2", "num_blocks: 12"),
        ("num_heads: 4", "num_heads: 12"),
        ("mlp_ratio: 0.125", "mlp_ratio: 4"),
        ("use_fp16: false", "use_fp16: true"),
        ("device: cpu\n", ""),
    ),
    **dict.fromkeys(
        ("slat_decoder_gs", "slat_decoder_gs_4"),
        (
            ("model_channels: 64", "model_channels: 768"),
            ("num_blocks: 2", "num_blocks: 12"),
            ("num_heads: 4", "num_heads: 12"),
            ("use_fp16: false", "use_fp16: true"),
        ),
    ),
}


def inventory() -> dict[str, dict[str, tuple[str, Shape]]]:
    """dtype and shape of every tensor of the official files, by part and name."""
    found: dict[str, dict[str, tuple[str, Shape]]] = {}
    for line in (FIXTURES / "facts" / "objects-inventory.txt").read_text().splitlines():
        part, pattern, dtype, sizes = line.split(" ")
        shape = tuple(int(size) for size in sizes.split("x"))
        match = _RANGE.search(pattern)
        numbers = range(int(match[1]), int(match[2]) + 1) if match else [0]
        for number in numbers:
            name = _RANGE.sub(str(number), pattern)
            found.setdefault(part, {})[name] = (dtype, shape)
    return found


def official_config(name: str) -> bytes:
    """The official YAML file, which is the tiny model's with other sizes."""
    text = _KWARGS.sub("", (TINY / f"{name}.yaml").read_text())
    for old, new in _OFFICIAL[name]:
        if old not in text:
            raise ValueError(f"{name}.yaml: no {old!r}")
        text = text.replace(old, new)
    return text.encode()
