"""The tiny models' weights as a converted file would hold them, without a file."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sam3d_gguf.convert.contract import load_contract
from sam3d_gguf.extractors.byte_source import ByteSource
from sam3d_gguf.extractors.checkpoint import read_archive
from sam3d_gguf.extractors.files import OpenedFile
from sam3d_gguf.extractors.materialize import iter_blocks
from sam3d_gguf.runtime.weights import Weights, WeightTensor

TINY = Path(__file__).parent / "fixtures" / "tiny-body-a"
DECODER_HEADS = 4
_TYPES = {"I64": "I32", "BOOL": "I8"}


class _Memory(OpenedFile):
    """A file without a name, which nobody needs to close."""

    __slots__ = ("__weakref__",)


def _read(path: Path) -> dict[str, tuple[str, NDArray[Any]]]:
    with path.open("rb") as file:
        source = ByteSource(file.fileno(), str(path))
        found: dict[str, tuple[str, NDArray[Any]]] = {}
        for name, tensor in read_archive(source).tensors.items():
            blocks = [block.copy() for block in iter_blocks(source, tensor)]
            if blocks:
                flat = np.concatenate(blocks)
                found[name] = tensor.dtype, flat.reshape(tensor.shape or (1,))
    return found


def weights_of(
    arrays: Mapping[str, tuple[str, NDArray[Any]]], metadata: Mapping[str, Any]
) -> Weights:
    """Lays arrays out in memory, aligned as in a GGUF."""
    tensors: dict[str, WeightTensor] = {}
    parts: list[bytes] = []
    position = 0
    for name, (dtype, array) in sorted(arrays.items()):
        if dtype == "I64":
            array = array.astype(np.int32)
        tensors[name] = WeightTensor(name, array.shape, _TYPES.get(dtype, dtype), position)
        data = array.tobytes()
        parts.append(data.ljust(-(-len(data) // 32) * 32, b"\0"))
        position += len(parts[-1])
    fd = os.memfd_create("tiny")
    with os.fdopen(fd, "wb", closefd=False) as file:
        file.writelines(parts)
    opened = _Memory(Path("tiny"), fd)
    weakref.finalize(opened, os.close, fd)
    return Weights(metadata, tensors, opened)


@functools.cache
def tiny_body() -> Weights:
    """The Body model, tensors under the checkpoint's names."""
    return weights_of(_read(TINY / "model.ckpt"), {})


@functools.cache
def tiny_mhr() -> Weights:
    """MHR, tensors under the names of its contract."""
    read = _read(TINY / "mhr_model.stub.pt")
    names = {entry.source: entry.name for entry in load_contract("mhr.lod1").entries}
    renamed = {names[name]: value for name, value in read.items() if name in names}
    return weights_of(renamed, {})
