"""The binary container of glTF 2.0, and the arrays in it."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Json = dict[str, Any]

ARRAY_BUFFER, ELEMENT_BUFFER = 34962, 34963
_COMPONENTS = {"float32": 5126, "uint8": 5121, "uint16": 5123, "uint32": 5125}
_TYPES = {1: "SCALAR", 2: "VEC2", 3: "VEC3", 4: "VEC4", 16: "MAT4"}


@dataclass(slots=True)
class GltfBuilder:
    """Collects buffer views and accessors."""

    data: bytearray = field(default_factory=bytearray)
    views: list[Json] = field(default_factory=list[Json])
    accessors: list[Json] = field(default_factory=list[Json])

    def add(
        self,
        array: Array,
        *,
        target: int | None = None,
        bounds: bool = False,
        fractions: bool = False,
    ) -> int:
        """Append [N] or [N, components] and return its accessor's index.

        Args:
            target: what a viewer does with it.
            bounds: whether to state the least and largest values.
            fractions: integers that mean parts of their type's largest.
        """
        self.data += b"\0" * (-len(self.data) % 4)
        view: Json = {"buffer": 0, "byteOffset": len(self.data), "byteLength": array.nbytes}
        if target is not None:
            view["target"] = target
        self.data += np.ascontiguousarray(array).tobytes()
        accessor: Json = {
            "bufferView": len(self.views),
            "componentType": _COMPONENTS[array.dtype.name],
            "count": len(array),
            "type": _TYPES[array.shape[1] if array.ndim == 2 else 1],
        }
        if fractions:
            accessor["normalized"] = True
        if bounds:
            accessor["min"] = array.min(axis=0).tolist()
            accessor["max"] = array.max(axis=0).tolist()
        self.views.append(view)
        self.accessors.append(accessor)
        return len(self.accessors) - 1


def container(document: Json, builder: GltfBuilder) -> bytes:
    """The bytes of a .glb file: a document, and the builder's arrays that it names."""
    document |= {
        "accessors": builder.accessors,
        "bufferViews": builder.views,
        "buffers": [{"byteLength": len(builder.data)}],
    }
    data = bytes(builder.data)
    text = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-len(text) % 4)
    data += b"\0" * (-len(data) % 4)
    length = 12 + 8 + len(text) + 8 + len(data)
    return b"".join(
        [
            struct.pack("<4sII", b"glTF", 2, length),
            struct.pack("<I4s", len(text), b"JSON"),
            text,
            struct.pack("<I4s", len(data), b"BIN\0"),
            data,
        ]
    )
