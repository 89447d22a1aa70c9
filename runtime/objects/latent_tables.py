"""The tables that the networks of the structured latent take, from its voxels."""

from __future__ import annotations

from sam3d_gguf.runtime.geometry.arrays import Int32
from sam3d_gguf.runtime.objects.neural_slat_decoders import MeshTables
from sam3d_gguf.runtime.objects.neural_slat_flow import FlowTables
from sam3d_gguf.runtime.objects.voxels import (
    Windows,
    downsampling,
    neighbours,
    subdivided,
    windows,
)


def flow_tables(coords: Int32) -> FlowTables:
    """What the flow takes of [N, 4] voxels: batch, x, y, z."""
    cubes = downsampling(coords)
    return FlowTables(neighbours(coords), cubes, neighbours(cubes.coords))


def decoder_windows(coords: Int32, size: int) -> tuple[Windows, Windows]:
    """The windows of a decoder's even and odd blocks, of side `size`."""
    return windows(coords, size, 0), windows(coords, size, size // 2)


def mesh_tables(coords: Int32, size: int) -> MeshTables:
    """What the mesh decoder takes of [N, 4] voxels, with windows of side `size`."""
    once = subdivided(coords)
    return MeshTables(
        decoder_windows(coords, size), (neighbours(once), neighbours(subdivided(once)))
    )


def mesh_coords(coords: Int32) -> Int32:
    """[64 N, 4] the cubes that the mesh decoder's rows are of."""
    return subdivided(subdivided(coords))
