"""Fuzz target: the safetensors reader takes a file exactly, or refuses it as a user's error.

What it takes the safetensors library must take, and see the same tensors in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import safetensors
from memory_source import memory_source

from sam3d_gguf.extractors.safetensors_format import SafetensorsSpec, canonical_header, read_header
from sam3d_gguf.schemas.errors import Sam3dError

# The library has this function without types.
_Deserialize = Callable[[bytes], list[tuple[str, dict[str, Any]]]]
_deserialize = cast("_Deserialize", vars(safetensors)["deserialize"])


def one_input(data: bytes) -> None:
    """Reads data as a safetensors file; raises anything but a refusal only where it is wrong."""
    with memory_source(data) as source:
        try:
            file = read_header(source)
        except Sam3dError:
            return
    found = {
        e.name: (e.dtype, e.shape, data[file.data_start + e.begin : file.data_start + e.end])
        for e in file.entries.values()
    }
    theirs = {
        name: (tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"]))
        for name, tensor in _deserialize(data)
    }
    assert found == theirs
    specs = [SafetensorsSpec(e.name, e.dtype, e.shape) for e in file.entries.values()]
    header, entries = canonical_header(specs)
    body = b"".join(found[entry.name][2] for entry in entries)
    assert file.is_canonical is (data == header + body)
