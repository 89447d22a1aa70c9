"""A small reader of binary glTF."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

_TYPES = {5126: "<f4", 5121: "u1", 5123: "<u2", 5125: "<u4"}
_WIDTHS = {"SCALAR": 1, "VEC2": 2, "VEC3": 3, "VEC4": 4, "MAT4": 16}


class Glb:
    """A .glb file, read as the specification says."""

    def __init__(self, data: bytes) -> None:
        magic, version, length = struct.unpack_from("<4sII", data)
        assert (magic, version, length) == (b"glTF", 2, len(data))
        size, kind = struct.unpack_from("<I4s", data, 12)
        assert kind == b"JSON"
        assert size % 4 == 0
        self.json: dict[str, Any] = json.loads(data[20 : 20 + size])
        _, kind = struct.unpack_from("<I4s", data, 20 + size)
        assert kind == b"BIN\0"
        self.data = data[28 + size :]

    def array(self, index: int) -> NDArray[Any]:
        accessor = self.json["accessors"][index]
        view = self.json["bufferViews"][accessor["bufferView"]]
        width = _WIDTHS[accessor["type"]]
        flat = np.frombuffer(
            self.data,
            _TYPES[accessor["componentType"]],
            accessor["count"] * width,
            view["byteOffset"],
        )
        return flat.reshape(-1, width)

    def node_matrices(self) -> list[NDArray[np.float64]]:
        nodes = self.json["nodes"]
        found: list[NDArray[np.float64]] = [np.eye(4) for _ in nodes]

        def visit(index: int, parent: NDArray[np.float64]) -> None:
            found[index] = parent @ local_matrix(nodes[index])
            for child in nodes[index].get("children", []):
                visit(child, found[index])

        for root in self.json["scenes"][0]["nodes"]:
            visit(root, np.eye(4))
        return found


def local_matrix(node: dict[str, Any]) -> NDArray[np.float64]:
    x, y, z, w = node.get("rotation", [0, 0, 0, 1])
    turn = np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )
    matrix = np.eye(4)
    matrix[:3, :3] = turn * np.array(node.get("scale", [1, 1, 1]))
    matrix[:3, 3] = node.get("translation", [0, 0, 0])
    return matrix
