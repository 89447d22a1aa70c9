"""The tiny SAM 3D Objects: its files, changed forms of them made without torch, and its releases."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_bytes import Tree
from objects_facts import MOGE_OFFICIAL, PARTS, TINY
from tiny_release import Json, Source, checkpoint_of, legacy_checkpoint_of, read_json, sources_of

from sam3d_gguf.convert.contract import load_model_contract
from sam3d_gguf.convert.objects import ObjectsRequest
from sam3d_gguf.extractors.models import MOGE

Tensors = dict[str, Source]
_WRAPPED = ("ss_generator", "slat_generator")
MOGE_CONFIG: dict[str, Tree] = {
    **MOGE_OFFICIAL,
    "dim_proj": 24,
    "dim_upsample": [32, 32, 32],
    "last_conv_channels": 8,
}


def request(out: Path, **changes: Any) -> ObjectsRequest:
    """The conversion of the tiny model."""
    arguments: dict[str, Any] = {"checkpoint_dir": TINY, "out": out, "allow_unpinned": True}
    return ObjectsRequest(**arguments | changes)


def copy(folder: Path, *parts: str) -> Path:
    """A copy of the tiny model's files, or of those of some parts, to be changed."""
    folder.mkdir()
    for part in parts or PARTS:
        shutil.copy(TINY / f"{part}.ckpt", folder)
        shutil.copy(TINY / f"{part}.yaml", folder)
    shutil.copy(TINY / "pipeline.yaml", folder)
    return folder


def runnable(folder: Path) -> Path:
    """A copy of the tiny model's files whose mesh decoder takes the voxels that the others make.

    In the original's fixtures its grid is smaller than theirs, so that they have no mesh.
    """
    copy(folder)
    edit(folder / "slat_decoder_mesh.yaml", "resolution: 16", "resolution: 64")
    return folder


def rewrite(folder: Path, part: str, change: Callable[[Tensors], None]) -> None:
    """Change the tensors of a part's checkpoint."""
    path = folder / f"{part}.ckpt"
    tensors = sources_of(path)
    change(tensors)
    if part == "slat_decoder_mesh":
        path.write_bytes(legacy_checkpoint_of(tensors))
    else:
        wrapper = "state_dict" if part in _WRAPPED else ""
        path.write_bytes(checkpoint_of(tensors, wrapper=wrapper))


def edit(path: Path, old: str, new: str) -> None:
    """Replace a text that a file has."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def values(array: np.ndarray[Any, Any]) -> Source:
    """F32 values as a tensor of a legacy file."""
    return Source("F32", array.shape, array.astype("<f4").tobytes())


def moge(path: Path, config: Mapping[str, Tree] | None = None) -> Path:
    """A depth model in miniature with random weights: the contract's tensors at 16 channels."""
    contract = load_model_contract(MOGE)
    small = {"E": 16, "ENCODER_BLOCKS": 2, "PROJECTION": 24, "LAST": 8}
    small |= dict.fromkeys(("U0", "U1", "U2"), 32)
    dimensions = tuple(
        dataclasses.replace(d, official=small.get(d.name, d.official)) for d in contract.dimensions
    )
    tiny = dataclasses.replace(contract, dimensions=dimensions).official()
    random = np.random.default_rng(0)
    tensors = {
        name: values(random.uniform(0.1, 1, math.prod(t.shape)).reshape(t.shape))
        for name, t in tiny.tensors.items()
    }
    beside: dict[str, Tree] = {"model_config": dict(MOGE_CONFIG if config is None else config)}
    path.write_bytes(checkpoint_of(tensors, beside, wrapper="model"))
    return path


def files(folder: Path) -> dict[str, Json]:
    """The files of a release's manifest, by role."""
    return {file["role"]: file for file in read_json(folder / "manifest.json")["files"]}
