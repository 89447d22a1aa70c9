"""From the mesh decoder's features of cubes to a surface, with FlexiCubes (Shen et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sam3d_gguf.runtime.geometry.arrays import Bool, Float32, Int32
from sam3d_gguf.runtime.objects.activations import sigmoid
from sam3d_gguf.runtime.objects.cube_cases import EDGES, CubeCases, cube_cases
from sam3d_gguf.runtime.objects.mesh_cubes import (
    ATTRIBUTES,
    Int64,
    MeshSettings,
    SurfaceCubes,
    surface_cubes,
)

_BETA, _ALPHA, _GAMMA = slice(0, 12), slice(12, 20), 20
_WEIGHT_SCALE = 0.99
_ENDS = np.array(EDGES)
_CUBES_OF_AN_EDGE = 4
_AROUND_UPWARDS, _AROUND_DOWNWARDS = np.array([2, 3, 1, 0]), np.array([0, 1, 3, 2])
_SPLIT_02, _SPLIT_13 = np.array([0, 1, 2, 0, 2, 3]), np.array([0, 1, 3, 3, 1, 2])


@dataclass(frozen=True, slots=True, eq=False)
class Mesh:
    """A surface; nothing if there is none.

    Attributes:
        vertices: [V, 3] float32 in -0.5..0.5.
        faces: [F, 3] int32, counter-clockwise from outside.
        attributes: [V, 6] float32 in 0..1: red, green, blue, and a normal.
    """

    vertices: Float32
    faces: Int32
    attributes: Float32


@dataclass(frozen=True, slots=True, eq=False)
class _Crossings:
    """The E edges that the surface crosses.

    Attributes:
        ends: [E, 2] corner numbers.
        numbers: [S, 12] edge numbers by cube; -1 where the surface does not cross.
        inner: [S, 12] whether the surface crosses and four cubes share the edge.
    """

    ends: Int64
    numbers: Int64
    inner: Bool


@dataclass(frozen=True, slots=True, eq=False)
class _DualVertices:
    """One or more for each cube.

    Attributes:
        points: [V, 3].
        attributes: [V, 6].
        gammas: [V] of its cube.
        of_edges: [S, 12] by cube; whatever where the surface does not cross.
    """

    points: Float32
    attributes: Float32
    gammas: Float32
    of_edges: Int64


def extract_mesh(coords: Int32, features: Float32, settings: MeshSettings) -> Mesh:
    """The surface.

    Args:
        coords: [N, 4], no cube twice: batch 0, x, y, z below the grid's side.
        features: [N, 101], as decoded.
        settings: of the decoder.

    Raises:
        BackendError: this machine has too little memory.
    """
    cubes = surface_cubes(coords, features, settings)
    if len(cubes.places) == 0:
        nothing = np.empty((0, 3 + ATTRIBUTES), np.float32)
        return Mesh(nothing[:, :3], np.empty((0, 3), np.int32), nothing[:, 3:])
    tables = cube_cases()
    crossings = _crossings(cubes)
    dual = _dual_vertices(cubes, crossings, tables, _cases(cubes, tables, settings.grid))
    return Mesh(dual.points, _faces(cubes, crossings, dual), dual.attributes)


def _cases(cubes: SurfaceCubes, tables: CubeCases, grid: int) -> Int64:
    """[S]; two cubes that share a face which both leave open are both inverted."""
    inside = cubes.distances[cubes.corners] < 0
    cases: Int64 = (inside * 2 ** np.arange(8)).sum(axis=1)
    rows = np.flatnonzero(tables.ambiguous[cases])
    beside = cubes.places[rows] + tables.neighbour[cases[rows]]
    within = ((beside >= 0) & (beside < grid)).all(axis=1)
    rows, beside = rows[within], beside[within]
    codes = _code(cubes.places, grid)
    at = np.minimum(np.searchsorted(codes, _code(beside, grid)), len(codes) - 1)
    both = (codes[at] == _code(beside, grid)) & (tables.ambiguous[cases[at]] == 1)
    result = cases.copy()
    result[rows[both]] = tables.inverted[cases[rows[both]]]
    return result


def _crossings(cubes: SurfaceCubes) -> _Crossings:
    ends = cubes.corners[:, _ENDS].reshape(-1, 2)
    total = len(cubes.distances)
    codes, edges, counts = np.unique(
        ends[:, 0] * total + ends[:, 1], return_inverse=True, return_counts=True
    )
    each = np.stack([codes // total, codes % total], axis=-1)
    crossed = (cubes.distances[each] < 0).sum(axis=1) == 1
    numbers = np.where(crossed, np.cumsum(crossed) - 1, -1)[edges]
    inner = (numbers >= 0) & (counts[edges] == _CUBES_OF_AN_EDGE)
    return _Crossings(each[crossed], numbers.reshape(-1, 12), inner.reshape(-1, 12))


def _dual_vertices(
    cubes: SurfaceCubes, crossings: _Crossings, tables: CubeCases, cases: Int64
) -> _DualVertices:
    """First those of the cubes that have one, then of those that have two, and so on."""
    beta, alpha = _positive(cubes.weights[:, _BETA]), _positive(cubes.weights[:, _ALPHA])
    gamma = sigmoid(cubes.weights[:, _GAMMA]) * np.float32(_WEIGHT_SCALE)
    gamma += np.float32((1 - _WEIGHT_SCALE) / 2)
    owners, edges = _edge_groups(tables, cases)
    slots = edges >= 0
    first = np.cumsum(slots.sum(axis=1)) - slots.sum(axis=1)
    vertex = np.repeat(np.arange(len(owners)), slots.sum(axis=1))
    cube, edge = owners[vertex], edges[slots]
    ends = crossings.ends[crossings.numbers[cube, edge]]
    weights = cubes.distances[ends] * alpha[cube[:, None], _ENDS[edge]]
    share = beta[cube, edge][:, None]
    values: list[Float32] = []
    for field in (cubes.points, cubes.attributes):
        crossing = _zero_crossing(weights, field[ends])
        crossing *= share
        mean: Float32 = np.add.reduceat(crossing, first, axis=0)
        mean /= np.add.reduceat(share, first, axis=0)
        values.append(mean)
    of_edges = np.zeros((len(cases), 12), np.int64)
    of_edges[cube, edge] = vertex
    return _DualVertices(values[0], values[1], gamma[owners], of_edges)


def _edge_groups(tables: CubeCases, cases: Int64) -> tuple[Int64, Int32]:
    """The cube [V] and the edges [V, 7] of every dual vertex."""
    owners: list[Int64] = []
    edges: list[Int32] = []
    for count in range(1, tables.edges.shape[1] + 1):
        rows = np.flatnonzero(tables.counts[cases] == count)
        owners.append(np.repeat(rows, count))
        edges.append(tables.edges[cases[rows], :count].reshape(-1, tables.edges.shape[2]))
    return np.concatenate(owners), np.concatenate(edges)


def _positive(weights: Float32) -> Float32:
    """Decoded weights between 0.01 and 1.99."""
    result: Float32 = np.tanh(weights)
    result *= np.float32(_WEIGHT_SCALE)
    result += np.float32(1)
    return result


def _zero_crossing(weights: Float32, values: Float32) -> Float32:
    """[M, K] of [M, 2, K] where the line through the weights [M, 2] is 0."""
    near, far = weights[:, 1:], -weights[:, :1]
    crossing = values[:, 0] * near
    crossing += values[:, 1] * far
    crossing /= near + far
    return crossing


def _faces(cubes: SurfaceCubes, crossings: _Crossings, dual: _DualVertices) -> Int32:
    """A quad around every inner edge, cut along the diagonal with the larger gammas."""
    edges = crossings.numbers[crossings.inner]
    order = np.argsort(edges, kind="stable")
    around = dual.of_edges[crossings.inner][order].reshape(-1, _CUBES_OF_AN_EDGE)
    starts = crossings.ends[edges[order][::_CUBES_OF_AN_EDGE], 0]
    outwards = cubes.distances[starts] > 0
    quads = np.concatenate(
        [around[outwards][:, _AROUND_DOWNWARDS], around[~outwards][:, _AROUND_UPWARDS]]
    )
    gammas = dual.gammas[quads]
    first = gammas[:, 0] * gammas[:, 2] > gammas[:, 1] * gammas[:, 3]
    triangles = np.where(first[:, None], quads[:, _SPLIT_02], quads[:, _SPLIT_13])
    return triangles.reshape(-1, 3).astype(np.int32)


def _code(places: Int64, grid: int) -> Int64:
    code: Int64 = (places[:, 0] * grid + places[:, 1]) * grid + places[:, 2]
    return code
