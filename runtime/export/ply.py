"""Points with properties as binary PLY (Greg Turk's format of 1994), such as Gaussians."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sam3d_gguf.runtime.geometry.arrays import Float32


def encode_ply(columns: Mapping[str, Float32]) -> list[bytes]:
    """The parts of a little-endian file of one element, `vertex`.

    Args:
        columns: [M] values of every property, in the file's order.
    """
    count = len(next(iter(columns.values())))
    lines = [
        "ply",
        "format binary_little_endian 1.0",
        f"element vertex {count}",
        *(f"property float {name}" for name in columns),
        "end_header",
    ]
    table = np.empty((count, len(columns)), "<f4")
    for index, values in enumerate(columns.values()):
        table[:, index] = values
    return ["".join(f"{line}\n" for line in lines).encode("ascii"), table.tobytes()]
