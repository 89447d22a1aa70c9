"""How a surface runs through a cube, for each way in which its corners can lie inside.

Corner i is at (i & 1, i >> 1 & 1, i >> 2 & 1); a case has bit i set where corner i is inside. Where
all four edges of a face are crossed, each of its inside corners is cut off on its own. The crossed
edges that belong together around the cube then make one dual vertex, as in Nielson's Dual Marching
Cubes (2004), whose tables FlexiCubes uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sam3d_gguf.runtime.geometry.arrays import Int32

CORNERS: tuple[tuple[int, int, int], ...] = tuple(
    (corner & 1, corner >> 1 & 1, corner >> 2 & 1) for corner in range(8)
)
"""Offsets of a cube's corners."""

EDGES: tuple[tuple[int, int], ...] = (
    *((0, 1), (1, 5), (4, 5), (0, 4)),
    *((2, 3), (3, 7), (6, 7), (2, 6)),
    *((2, 0), (3, 1), (7, 5), (6, 4)),
)
"""Corners of a cube's edges; parallel ones have the same direction."""

MOST_VERTICES, MOST_EDGES = 4, 7
"""Dual vertices of a case, edges of a dual vertex: at most."""

_Group = tuple[int, ...]
_CASES = 256


@dataclass(frozen=True, slots=True, eq=False)
class CubeCases:
    """Tables by case.

    Attributes:
        edges: [256, 4, 7] the edges of every dual vertex, then -1.
        counts: [256] dual vertices.
        ambiguous: [256] 1 where the neighbour behind the only ambiguous face decides, else 0.
        neighbour: [256, 3] where it is.
        inverted: [256] the case that replaces this one if the neighbour is ambiguous, too.
    """

    edges: Int32
    counts: Int32
    ambiguous: Int32
    neighbour: Int32
    inverted: Int32


def cube_cases() -> CubeCases:
    """The tables of FlexiCubes."""
    groups = [_ordered_groups(case) for case in range(_CASES)]
    edges = np.full((_CASES, MOST_VERTICES, MOST_EDGES), -1, np.int32)
    for case, found in enumerate(groups):
        for index, group in enumerate(found):
            edges[case, index, : len(group)] = group
    counts = np.array([len(found) for found in groups], np.int32)
    tables = CubeCases(
        edges,
        counts,
        *(np.zeros(shape, np.int32) for shape in (_CASES, (_CASES, 3), _CASES)),
    )
    for case in range(_CASES):
        faces = [face for face in _faces() if _is_ambiguous(case, face)]
        other = _CASES - 1 - case
        if len(faces) == 1 and counts[case] == 1 and counts[other] == 2:
            tables.ambiguous[case] = 1
            tables.neighbour[case] = _direction(faces[0])
            tables.inverted[case] = other
    return tables


def _ordered_groups(case: int) -> list[_Group]:
    """The groups by the lowest corner of their smaller side, inside or outside."""
    return sorted(_groups(case), key=lambda group: _smaller_side(case, group)[0])


def _groups(case: int) -> list[_Group]:
    """The crossed edges, connected where a line of the surface runs over a face."""
    group_of = {edge: {edge} for edge in range(len(EDGES)) if _crossed(case, edge)}
    for first, second in _lines(case):
        together = group_of[first] | group_of[second]
        for edge in together:
            group_of[edge] = together
    return [*{tuple(sorted(group)) for group in group_of.values()}]


def _lines(case: int) -> Iterator[tuple[int, int]]:
    for face in _faces():
        crossed = [e for e in range(len(EDGES)) if _crossed(case, e) and {*EDGES[e]} <= {*face}]
        if _is_ambiguous(case, face):
            for corner in face:
                if _inside(case, corner):
                    first, second = (edge for edge in crossed if corner in EDGES[edge])
                    yield first, second
        elif crossed:
            yield crossed[0], crossed[1]


def _faces() -> list[tuple[int, ...]]:
    """Corners of the faces, by axis and side, in ascending order."""
    return [
        tuple(corner for corner in range(8) if CORNERS[corner][axis] == side)
        for axis in range(3)
        for side in range(2)
    ]


def _direction(face: tuple[int, ...]) -> tuple[int, ...]:
    """Outwards."""
    sums = (sum(CORNERS[corner][axis] for corner in face) for axis in range(3))
    return tuple(total // 2 - 1 for total in sums)


def _is_ambiguous(case: int, face: tuple[int, ...]) -> bool:
    a, b, c, d = (_inside(case, corner) for corner in face)
    return a == d and b == c and a != b


def _smaller_side(case: int, group: _Group) -> list[int]:
    corners = {corner for edge in group for corner in EDGES[edge]}
    inside = sorted(corner for corner in corners if _inside(case, corner))
    outside = sorted(corners.difference(inside))
    return inside if len(inside) <= len(outside) else outside


def _crossed(case: int, edge: int) -> bool:
    first, second = EDGES[edge]
    return _inside(case, first) != _inside(case, second)


def _inside(case: int, corner: int) -> bool:
    return bool(case >> corner & 1)
