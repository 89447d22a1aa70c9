"""Numbers of a part's metadata, and what is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sam3d_gguf.runtime.loading import load_weights
from sam3d_gguf.runtime.objects.metadata import integer, number, numbers
from sam3d_gguf.runtime.weights import Weights
from sam3d_gguf.schemas.errors import ContractError


@pytest.fixture(scope="module")
def weights(objects: Path) -> Iterator[Weights]:
    with load_weights(objects / "slat_generator.gguf", "objects.slat_generator") as opened:
        yield opened


def test_a_float32_is_the_decimal_that_was_meant(weights: Weights) -> None:
    assert number(weights, "preprocess.box_size_factor") == 1.2
    assert number(weights, "sampler.steps") == 25
    assert integer(weights, "sampler.steps") == 25
    assert numbers(weights, "image_encoder.mean", 3) == (0.485, 0.456, 0.406)


REFUSED: list[tuple[Callable[[Weights], object], str]] = [
    (lambda w: number(w, "sampler.method"), "sampler.method .*; expected a number"),
    (lambda w: number(w, "image_encoder.shared"), "shared .*; expected a number"),
    (lambda w: number(w, "no.such"), r"slat_generator\.no\.such .*; expected a number"),
    (lambda w: integer(w, "sampler.rescale_t"), "rescale_t .*; expected an integer"),
    (lambda w: numbers(w, "sampler.guidance_interval", 3), "expected 3 numbers"),
    (lambda w: numbers(w, "condition.token_order", 4), "token_order .*; expected a number"),
]


@pytest.mark.parametrize(("read", "expected"), REFUSED)
def test_what_is_none_is_refused_by_its_key(
    weights: Weights, read: Callable[[Weights], object], expected: str
) -> None:
    with pytest.raises(ContractError, match=expected):
        read(weights)
