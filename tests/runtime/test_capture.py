"""Capture names are those of the fixtures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sam3d_gguf.runtime.body.capture import Capture, stages

Tensors = dict[str, NDArray[Any]]
BODY = ("00.input", "01.body", "08.alternative", "09.out")
FULL = (
    *("11.boxes", "12.lhand", "13.rhand", "14.criteria", "15.prompt", "16.merge"),
    *("17.locals", "19.fullout"),
)


def names(sections: tuple[str, ...]) -> set[str]:
    return {
        f"{section}.{number:03d}.{stage}"
        for section in sections
        for number, stage in enumerate(stages(section, 3, 3))
    }


def test_stages_are_those_of_the_fixtures(expected: Tensors, expected_full: Tensors) -> None:
    assert names(BODY) == set(expected)
    assert names(FULL) == set(expected_full)


def test_depth_moves_the_numbers() -> None:
    deep = stages("01.body", 32, 6)
    assert deep.count("backbone.block31.out") == 1
    assert deep[-1] == "hand.cls_logits"
    assert len(deep) == 115 + 29 + 3 * 22


def test_stages_that_a_pass_does_not_capture_are_dropped() -> None:
    capture = Capture(3, 3)
    capture.section("12.lhand")("image.normalized", np.zeros(1, np.float32))
    assert capture.tensors == {}


def test_repeated_stages_are_numbered_in_turn_and_not_exceeded() -> None:
    capture = Capture(3, 3)
    take = capture.section("14.criteria")
    for value in range(4):
        take("prompt.keypoint_crop", np.full(1, value, np.float32))
    assert capture.tensors["14.criteria.006.prompt.keypoint_crop"] == 3
    with pytest.raises(ValueError, match="more often"):
        take("prompt.keypoint_crop", np.zeros(1, np.float32))


def test_arrays_are_copied_and_plain() -> None:
    capture = Capture(3, 3)
    take = capture.section("17.locals")
    flags, distance = np.array([True]), np.array([0.5])
    take("hand_valid_mask", flags)
    take("left_kps_dist", distance)
    flags[0] = False
    kept = capture.tensors["17.locals.006.hand_valid_mask"]
    assert kept.dtype == np.uint8
    assert kept.tolist() == [1]
    assert capture.tensors["17.locals.003.left_kps_dist"].dtype == np.float32
