"""The names of MHR's joints and parameters: from the archive, or numbers that say so."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

import facts
import pytest
from tiny_release import Release

from sam3d_gguf.convert.contract import load_contract
from sam3d_gguf.convert.mhr_names import MhrNames, read_names
from sam3d_gguf.convert.products import Products, products_from_folder
from sam3d_gguf.schemas.errors import ContractError

JOINTS = "character_torch.skeleton.joint_names"
PARAMETERS = "character_torch.parameter_transform.parameter_names"
SIZES = "character_torch.skeleton._pmi_buffer_sizes"
SKELETON = facts.mhr_skeleton()
GOOD = [f"p{number}" for number in range(249)]


@pytest.fixture(scope="module")
def mhr(single: Release) -> Generator[Products]:
    """The tiny asset's extraction."""
    folder = single.mhr_extraction
    with products_from_folder("mhr", folder, allow_unpinned=True) as products:
        yield products


def names_of(products: Products, attributes: dict[str, Any], *, pinned: bool = False) -> MhrNames:
    """The names, if the archive has these attributes instead."""
    extraction = products.extraction
    source = dataclasses.replace(
        extraction.source, origin="pinned" if pinned else extraction.source.origin
    )
    other = dataclasses.replace(
        products, extraction=dataclasses.replace(extraction, attributes=attributes, source=source)
    )
    return read_names(other, load_contract("mhr.lod1").bind(products.specs))


def test_the_archives_own_names(mhr: Products) -> None:
    names = names_of(mhr, {JOINTS: SKELETON["names"], PARAMETERS: GOOD, SIZES: [65, 56, 62, 83]})

    assert list(names.joints) == SKELETON["names"]
    assert list(names.parameters) == GOOD
    assert list(names.prefix_sizes) == SKELETON["prefix_sizes"]
    assert names.numbered == ()


def test_numbers_where_an_unpinned_archive_has_no_names(mhr: Products) -> None:
    names = names_of(mhr, {})

    assert names.joints[:2] == ("joint_000", "joint_001")
    assert len(names.joints) == 127
    assert names.parameters[-1] == "parameter_248"
    assert names.numbered == ("joint_names", "parameter_names")
    assert list(names.prefix_sizes) == SKELETON["prefix_sizes"]


@pytest.mark.parametrize("missing", [JOINTS, PARAMETERS])
def test_a_pinned_archive_must_have_them(mhr: Products, missing: str) -> None:
    attributes = {JOINTS: SKELETON["names"], PARAMETERS: GOOD}
    del attributes[missing]

    with pytest.raises(ContractError, match=f"has no {missing.split('.')[-1]}"):
        names_of(mhr, attributes, pinned=True)


@pytest.mark.parametrize(
    "names",
    [
        GOOD[:-1],
        [*GOOD, "one_more"],
        [*GOOD[:-1], GOOD[0]],
        [*GOOD[:-1], "with,comma"],
        [*GOOD[:-1], "with space"],
        [*GOOD[:-1], "with\nnewline"],
        [*GOOD[:-1], "with\x1b[31mcolour"],
        [*GOOD[:-1], "größe"],
        [*GOOD[:-1], "x" * 129],
        [*GOOD[:-1], ""],
        [*GOOD[:-1], 248],
        [*GOOD[:-1], None],
        [*GOOD[:-1], ["p248"]],
        [],
        "p" * 249,
        249,
        {name: 0 for name in GOOD},
    ],
    ids=lambda names: str(names)[-24:],
)
def test_names_that_are_none_are_refused(mhr: Products, names: Any) -> None:
    with pytest.raises(ContractError, match="does not name 249 things"):
        names_of(mhr, {PARAMETERS: names})


def test_the_names_of_the_class_that_keeps_them_win(mhr: Products) -> None:
    names = names_of(mhr, {"other.parameter_names": GOOD[::-1], PARAMETERS: GOOD})

    assert list(names.parameters) == GOOD


def test_names_are_found_elsewhere_if_they_agree(mhr: Products) -> None:
    names = names_of(mhr, {"a.parameter_names": GOOD, "b.c.parameter_names": list(GOOD)})

    assert list(names.parameters) == GOOD


def test_names_elsewhere_that_differ_are_refused(mhr: Products) -> None:
    with pytest.raises(ContractError, match="different attributes parameter_names"):
        names_of(mhr, {"a.parameter_names": GOOD, "b.parameter_names": GOOD[::-1]})


@pytest.mark.parametrize("sizes", [[65, 56, 62, 82], [65, 56, 62], [], "65,56,62,83", 266])
def test_sizes_that_the_hierarchy_does_not_give_are_refused(mhr: Products, sizes: Any) -> None:
    with pytest.raises(ContractError, match="_pmi_buffer_sizes") as caught:
        names_of(mhr, {SIZES: sizes})

    assert caught.value.expected == "65,56,62,83"
