"""Tables of sparse voxels, one voxel after the other, for the tests of the networks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from sam3d_gguf.runtime.ggml.graph import FloatArray, IndexArray
from sam3d_gguf.runtime.objects.neural_slat_flow import FlowTables

Voxel = tuple[int, ...]


@dataclass(frozen=True)
class Cubes:
    """Voxels taken together."""

    coords: IndexArray
    parents: IndexArray
    children: IndexArray
    weights: FloatArray


@dataclass(frozen=True)
class Grouped:
    """Voxels that attend to each other."""

    order: IndexArray
    lengths: IndexArray


def voxels_of(coords: IndexArray) -> list[Voxel]:
    return [tuple(int(c) for c in row) for row in coords]


def neighbours(coords: IndexArray) -> IndexArray:
    """[N, 27] rows of the neighbourhoods, x slowest; N where there is no voxel."""
    rows = {voxel: row for row, voxel in enumerate(voxels_of(coords))}
    offsets = list(product((-1, 0, 1), repeat=3))
    table = [
        [rows.get((b, x + dx, y + dy, z + dz), len(rows)) for dx, dy, dz in offsets]
        for b, x, y, z in voxels_of(coords)
    ]
    return np.array(table, np.int32)


def cubes(coords: IndexArray) -> Cubes:
    """Cubes of side 2 in the order of batch, x, y, z; sums times 1 / (count + 1)."""
    above = [(b, x // 2, y // 2, z // 2) for b, x, y, z in voxels_of(coords)]
    sorted_cubes = sorted(set(above))
    parents = [sorted_cubes.index(cube) for cube in above]
    children = [[row for row, p in enumerate(parents) if p == c] for c in range(len(sorted_cubes))]
    padded = [rows + [len(above)] * (8 - len(rows)) for rows in children]
    return Cubes(
        np.array(sorted_cubes, np.int32),
        np.array(parents, np.int32),
        np.array(padded, np.int32),
        np.array([1 / (len(rows) + 1) for rows in children], np.float32),
    )


def flow_tables(coords: IndexArray) -> FlowTables:
    """What the flow of structured latents needs of its voxels."""
    found = cubes(coords)
    return FlowTables(neighbours(coords), found, neighbours(found.coords))


def windows(coords: IndexArray, size: int, shift: int) -> Grouped:
    """Windows of side `size` of the coordinates plus `shift`."""
    members: dict[Voxel, list[int]] = {}
    for row, (b, *place) in enumerate(voxels_of(coords)):
        key = (b, *((c + shift) // size for c in place))
        members.setdefault(key, []).append(row)
    groups = [members[key] for key in sorted(members)]
    order = [row for group in groups for row in group]
    return Grouped(np.array(order, np.int32), np.array([len(g) for g in groups], np.int32))


def subdivided(coords: IndexArray) -> IndexArray:
    """[8 N, 4] the parts of every voxel, x slowest."""
    parts = [
        (b, 2 * x + dx, 2 * y + dy, 2 * z + dz)
        for b, x, y, z in voxels_of(coords)
        for dx, dy, dz in product((0, 1), repeat=3)
    ]
    return np.array(parts, np.int32)
