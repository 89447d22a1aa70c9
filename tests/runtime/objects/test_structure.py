"""The voxels of an object are the original's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from objects_components import Component

from sam3d_gguf.runtime.loading import load_weights
from sam3d_gguf.runtime.objects.structure import (
    OccupancySettings,
    occupied,
    shrunk,
    structure,
)
from sam3d_gguf.schemas.errors import InputError

OFFICIAL = OccupancySettings(0.0, 1, 42_000, 2)


@pytest.fixture(scope="module")
def component() -> Component:
    return Component.load("ss-decoder")


def test_occupied_voxels_are_those_above_0_in_the_original_s_order(component: Component) -> None:
    original = component.expected["011.coords_original"]
    even = original[(original[:, 1:] % 2 == 0).all(axis=1)]
    even[:, 1:] //= 2
    np.testing.assert_array_equal(occupied(component.expected["010.logits_stride2"], 0), even)


def test_a_flat_structure_is_shrunk_in_its_plane_and_moved_as_in_the_original() -> None:
    plane = np.array([[0, 5, y, z] for y in range(4) for z in range(4)], np.int32)
    coords, factor = shrunk(plane, 10, 2)
    assert factor == 2
    assert coords.tolist() == [[0, 4, y, z] for y in (1, 2) for z in (1, 2)]


def test_all_that_is_full_is_shrunk_below_the_official_maximum() -> None:
    full = structure(np.ones((1, 1, 64, 64, 64), np.float32), OccupancySettings(0, 0, 42_000, 2))
    assert len(full.occupied) == len(full.surface) == 64**3
    assert 30_000 < len(full.coords) <= 42_000
    assert full.scale_factor == 2


def test_an_empty_structure_is_refused() -> None:
    with pytest.raises(InputError, match="no voxel is occupied"):
        structure(np.zeros((1, 1, 4, 4, 4), np.float32), OFFICIAL)


def test_settings_are_read_from_the_converted_file(objects: Path) -> None:
    with load_weights(objects / "ss_decoder.gguf", "objects.ss_decoder") as weights:
        assert OccupancySettings.of(weights) == OFFICIAL
