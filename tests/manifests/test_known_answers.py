"""The published sizes follow from the inventory and the formats; the hashes are transcriptions."""

from __future__ import annotations

import json
import math
from pathlib import Path

from sam3d_gguf.manifests.known_answers import KnownFile, load_known_answers

_FACTS = Path(__file__).parent.parent / "fixtures/facts"
_SIZES = {"BF16": 2, "F32": 4, "I64": 8}


def _inventory() -> dict[str, tuple[str, tuple[int, ...]]]:
    rows = (line.split(" ") for line in (_FACTS / "body-inventory.txt").read_text().splitlines())
    return {name: (dtype, tuple(map(int, shape.split("x")))) for name, dtype, shape in rows}


def _safetensors_size(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> int:
    """Size of the canonical form: compact JSON header, names sorted, padded to a multiple of 8."""
    header: dict[str, object] = {}
    offset = 0
    for name in sorted(tensors):
        dtype, shape = tensors[name]
        end = offset + _SIZES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    return 8 + (len(json.dumps(header, separators=(",", ":"))) + 7) // 8 * 8 + offset


def test_checkpoint_totals_are_those_of_the_inventory() -> None:
    known, inventory = load_known_answers().body_checkpoint, _inventory()
    elements = dict.fromkeys(known.elements, 0)
    for dtype, shape in inventory.values():
        elements[dtype] += math.prod(shape)
    assert known.tensors == len(inventory) == 1127
    assert dict(known.elements) == elements
    assert known.bytes == 2109129346


def test_safetensors_sizes_follow_from_the_inventory() -> None:
    known, inventory, prefix = load_known_answers(), _inventory(), "backbone.encoder."
    backbone = {
        name.removeprefix(prefix): ("F32", shape)
        for name, (_, shape) in inventory.items()
        if name.startswith(prefix)
    }
    backbone["mask_token"] = ("F32", (1, 1280))
    other = {name: t for name, t in inventory.items() if not name.startswith(prefix)}
    for file, tensors in (
        (known.body_backbone_safetensors, backbone),
        (known.body_other_safetensors, other),
    ):
        assert file.tensors == len(tensors)
        assert file.bytes == _safetensors_size(tensors)


def test_mhr_tensors_equal_the_facts() -> None:
    rows = [line.split(" ") for line in (_FACTS / "mhr-asset.txt").read_text().splitlines()]
    known = load_known_answers().mhr_tensors
    assert len(rows) == 22
    assert [
        [t.name, t.dtype, "x".join(map(str, t.shape)), t.sha256] for t in known.values()
    ] == rows


def test_hashes() -> None:
    known = load_known_answers()
    assert known.body_backbone_safetensors.sha256.startswith("98afde8ac5c13c68")
    assert known.body_other_safetensors.sha256.startswith("4c6b3f63ce8a050f")
    assert known.body_backbone_gguf == KnownFile(
        3363058592, "9228c12b5b34cdb3627fce731a3e3d5890c54dc78ca7eb357d66056893f5bf1f"
    )
    assert known.body_pose_branch_gguf == KnownFile(
        231353792, "eebd51ac66bab764b52c7c51a47671bfa6152980a5bc7da6ea7fe20f6ae61431"
    )
    assert known.mhr_gguf == KnownFile(
        693111264,
        "d52ab772628fb6d851550381b428185a32da6398793f0ff70299bad1999ba8f8",
        tensors=18,
        elements=173275904,
    )
    assert known.mhr_reference_safetensors_sha256 == (
        "61b99bf082917648313c6712a8d5bb4b27941588bc8b177425d1393adeec851c"
    )
