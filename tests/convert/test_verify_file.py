"""Verification of GGUF files: every single corruption is found, and the tensor named."""

from __future__ import annotations

import math
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forged_gguf import Gguf, fit_manifest, forge
from tiny_release import Release, flip

from sam3d_gguf.convert.gguf_format import (
    GgufValue,
    ValueType,
    encode_metadata,
    string,
    uint32,
    uint64,
)
from sam3d_gguf.convert.gguf_reader import GgufFile, read_gguf
from sam3d_gguf.convert.verify import verify
from sam3d_gguf.convert.verify_file import read_claims
from sam3d_gguf.extractors.files import open_source
from sam3d_gguf.manifests.sources import load_sources
from sam3d_gguf.schemas.errors import ContractError, Sam3dError

ROLES = ("body", "mhr")
COMPONENTS = {
    "body.dinov3_backbone": "body-dinov3-backbone.gguf",
    "body.pose_branch": "body-pose-branch.gguf",
    "mhr.lod1": "mhr-lod1.gguf",
}


def problems_of(*paths: Path) -> list[str]:
    """All that verification finds."""
    result = verify(paths)
    found = [problem for file in result.files for problem in file.problems] + result.problems
    assert result.is_good == (not found)
    return found


def header_of(path: Path) -> GgufFile:
    """Where everything lies."""
    with open_source(path) as file:
        return read_gguf(file.source)


@pytest.fixture
def copy(single: Release, tmp_path: Path) -> Release:
    """A copy of the release in layout single."""
    return single.copy(tmp_path)


@pytest.fixture
def native(components: Release, tmp_path: Path) -> Release:
    """A copy of the release in layout components."""
    return components.copy(tmp_path)


# Bytes


@pytest.mark.parametrize("role", ROLES)
def test_a_flipped_byte_in_a_tensor_names_the_tensor(copy: Release, role: str) -> None:
    path = copy.folder / f"{role}.gguf"
    chosen = random.Random(role).sample(sorted(header_of(path).tensors.values(), key=str), 3)

    for tensor in chosen:
        for offset in (tensor.offset, tensor.offset + tensor.nbytes - 1):
            flip(path, offset)
            alone, release = problems_of(path), problems_of(copy.manifest)
            assert any(f"the tensor {tensor.name} has SHA-256" in line for line in alone)
            assert any(
                f"the tensor {tensor.name} has SHA-256" in line and "the manifest says" in line
                for line in release
            )
            flip(path, offset)


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_flipped_byte_in_a_component_names_the_tensor(native: Release, component: str) -> None:
    path = native.folder / COMPONENTS[component]
    chosen = random.Random(component).sample(sorted(header_of(path).tensors.values(), key=str), 3)

    for tensor in chosen:
        flip(path, tensor.offset)
        found = problems_of(native.manifest)
        assert any(f"the tensor {tensor.name} has SHA-256" in line for line in found)
        flip(path, tensor.offset)


@pytest.mark.parametrize("role", ROLES)
def test_a_flipped_byte_anywhere_in_the_header_is_found(copy: Release, role: str) -> None:
    path = copy.folder / f"{role}.gguf"
    end = header_of(path).data_offset

    for offset in range(24):
        flip(path, offset)
        assert problems_of(path), offset
        flip(path, offset)
    # What a file says of its source can be another hash: then it is not the manifest's file.
    for offset in random.Random(role).sample(range(24, end), 8):
        flip(path, offset)
        assert problems_of(copy.manifest), offset
        flip(path, offset)
    assert problems_of(copy.manifest) == []


@pytest.mark.parametrize("role", ROLES)
def test_a_flipped_byte_in_the_padding_is_found(copy: Release, role: str) -> None:
    path = copy.folder / f"{role}.gguf"
    header = header_of(path)
    ends = [tensor.offset + tensor.nbytes for tensor in header.tensors.values()]
    padded = [end for end in ends if end % header.alignment]
    assert padded

    for offset in (padded[0], padded[-1]):
        flip(path, offset)
        assert any("padding" in line for line in problems_of(path))
        flip(path, offset)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("change", [-1, -32, 1, 32, 1 << 20])
def test_another_length_is_found(copy: Release, role: str, change: int) -> None:
    path = copy.folder / f"{role}.gguf"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + change)

    (alone,) = problems_of(path)
    assert "bytes" in alone
    assert any("bytes; the manifest says" in line for line in problems_of(copy.manifest))


def test_an_empty_file_is_found(copy: Release) -> None:
    copy.mhr.write_bytes(b"")

    assert problems_of(copy.mhr)
    assert problems_of(copy.manifest)


def swap(parts: Gguf, first: str, second: str) -> None:
    a, b = parts.values(first), parts.values(second)
    parts.replace(first, b)
    parts.replace(second, a)


def test_swapped_tensors_are_found_and_named(copy: Release) -> None:
    names = ("decoder.layers.0.ln1.weight", "decoder.layers.1.ln1.weight")
    forge(copy.body, lambda parts: swap(parts, *names), digests=False)

    for path in (copy.body, copy.manifest):
        found = problems_of(path)
        for name in names:
            assert any(f"the tensor {name} has SHA-256" in line for line in found)


def test_swapped_tensors_of_a_component_are_found_and_named(native: Release) -> None:
    names = ("blocks.0.norm1.weight", "blocks.1.norm1.weight")
    path = native.folder / COMPONENTS["body.dinov3_backbone"]
    forge(path, lambda parts: swap(parts, *names))

    found = problems_of(native.manifest)
    for name in names:
        assert any(f"the tensor {name} has SHA-256" in line for line in found)


# Values, with digests and manifest made to fit


def put(name: str, index: Any, value: object) -> Callable[[Gguf], None]:
    """A change of one element."""

    def change(parts: Gguf) -> None:
        parts.values(name)[index] = value

    return change


NAN = 0x7FC0
BODY_VALUES: list[tuple[Callable[[Gguf], None], str]] = [
    (put("backbone.encoder.norm.weight", 3, NAN), r"norm\.weight: the value nan at \[3\]"),
    (put("backbone.encoder.norm.weight", 3, NAN | 0x8000), r"norm\.weight: the value nan"),
    (put("backbone.encoder.norm.weight", 3, 0x7F80), r"norm\.weight: the value inf"),
    (put("backbone.encoder.rope_embed.periods", 0, 0x8000), "not positive"),
    (put("backbone.encoder.blocks.1.attn.qkv.bias_mask", 0, 0x3F00), "bias mask"),
    (put("init_pose.weight", (0, 9), math.nan), r"init_pose\.weight: the value nan at \[0, 9\]"),
    (put("head_pose.faces", (0, 0), 90), r"head_pose\.faces: the value 90"),
    (put("head_pose.faces", (175, 2), -1), r"head_pose\.faces: the value -1"),
    (put("head_pose_hand.nonhand_param_idxs", 0, 204), "the value 204"),
    (put("head_pose.hand_joint_idxs_left", 0, 94), "no permutation"),
]
MHR_VALUES: list[tuple[Callable[[Gguf], None], str]] = [
    (put("identity.base", (0, 0), math.inf), "the value inf"),
    (put("skin.weights", 0, 1.0000001), "the value 1.00000"),
    (put("skin.weights", 0, -0.001), "out of range"),
    (put("skin.joints", 0, 127), "the value 127"),
    (put("skin.vertices", 0, 90), "the value 90"),
    (put("mesh.texcoord_faces", (0, 0), 97), "the value 97"),
    (put("skeleton.parents", 9, 9), "the parent of joint 9 is 9"),
    (put("skeleton.parents", 126, 0), "prefix schedule"),
    (put("skeleton.prefix", (1, 0), 1), "prefix schedule"),
    (put("pose.sparse.indices", (1, 0), 749), "does not come after"),
    (put("pose.sparse.indices", (0, 0), 3000), "the value 3000"),
]


@pytest.mark.parametrize(("change", "words"), BODY_VALUES)
def test_a_value_that_breaks_a_rule_is_found(
    copy: Release, change: Callable[[Gguf], None], words: str
) -> None:
    forge(copy.body, change)
    fit_manifest(copy)

    (found,) = problems_of(copy.manifest)
    assert re.search(words, found)
    assert problems_of(copy.body) == [found]


@pytest.mark.parametrize(("change", "words"), MHR_VALUES)
def test_a_value_of_mhr_that_breaks_a_rule_is_found(
    copy: Release, change: Callable[[Gguf], None], words: str
) -> None:
    forge(copy.mhr, change)

    (found,) = problems_of(copy.mhr)
    assert re.search(words, found)


@pytest.mark.parametrize(
    ("component", "name", "index", "value", "words"),
    [
        ("body.dinov3_backbone", "mask_token", (0, 5), 1.0, r"mask_token: the value 1\.0"),
        ("body.dinov3_backbone", "mask_token", (0, 5), -0.0, "mask_token: .* is not zero"),
        ("body.dinov3_backbone", "mask_token", (0, 5), math.nan, "mask_token: .* is not zero"),
        ("body.dinov3_backbone", "norm.weight", 0, math.nan, "is not finite"),
        ("body.pose_branch", "head_pose.faces", (0, 0), 90, "is out of range"),
        ("mhr.lod1", "skin.weights", 0, 2.0, "is out of range"),
        ("mhr.lod1", "skeleton.prefix", (0, 0), 2, "prefix schedule"),
    ],
)
def test_a_value_of_a_component_that_breaks_a_rule_is_found(
    native: Release, component: str, name: str, index: Any, value: float, words: str
) -> None:
    path = native.folder / COMPONENTS[component]
    forge(path, put(name, index, value))
    fit_manifest(native)

    (found,) = problems_of(native.manifest)
    assert re.search(words, found)


def test_prefix_sizes_that_the_hierarchy_does_not_give_are_found(copy: Release) -> None:
    def change(parts: Gguf) -> None:
        sizes = GgufValue(ValueType.ARRAY, (56, 65, 62, 83), ValueType.UINT32)
        parts.metadata[PREFIX_SIZES] = sizes

    forge(copy.mhr, change)

    (found,) = problems_of(copy.mhr)
    assert "prefix sizes" in found


# Tensors


def test_a_tensor_left_out_added_renamed_reshaped_or_retyped_is_found(copy: Release) -> None:
    original = copy.mhr.read_bytes()

    def drop(parts: Gguf) -> None:
        del parts.tensors["skin.weights"]

    def add(parts: Gguf) -> None:
        parts.tensors["skin.extra"] = parts.tensors["skin.weights"]

    def rename(parts: Gguf) -> None:
        parts.tensors["skin.weight"] = parts.tensors.pop("skin.weights")

    def reshape(parts: Gguf) -> None:
        parts.replace("skin.weights", parts.values("skin.weights").reshape(2, -1))

    def retype(parts: Gguf) -> None:
        kind = parts.tensors["skin.joints"][0]
        parts.tensors["skin.weights"] = (kind, parts.values("skin.weights"))

    expected = {
        drop: "missing: skin.weights, expected F32",
        add: "extra: skin.extra is F32",
        rename: "renamed: skin.weight, expected skin.weights",
        reshape: "reshaped: skin.weights is F32",
        retype: "retyped: skin.weights is I32",
    }
    for change, words in expected.items():
        copy.mhr.write_bytes(original)
        forge(copy.mhr, change)
        (found,) = problems_of(copy.mhr)
        assert found.startswith(words)


# Metadata

PREFIX_SIZES = "sam3d.mhr.prefix_sizes"  # checked with the values, which give them


def other_values(key: str, value: GgufValue) -> Iterator[GgufValue]:
    """Other values of the same type that such a key could have."""
    match value.value:
        case _ if key == "general.alignment":
            yield uint32(64)
        case str(text) if len(text) == 64 and key.endswith("sha256"):
            yield string("0" * 64)
        case str(text):
            yield string(text + "x")
        case bool(flag):
            yield GgufValue(ValueType.BOOL, not flag)
        case int(number):
            yield GgufValue(value.type, number + 1)
        case float(number):
            up = np.nextafter(np.float32(number), np.float32(np.inf))
            yield GgufValue(ValueType.FLOAT32, float(up))
        case tuple(items) if len(items) > 1:
            yield GgufValue(ValueType.ARRAY, items[::-1], value.item_type)
        case tuple():
            yield GgufValue(ValueType.ARRAY, ("joint_names",), ValueType.STRING)


def impossible_values(key: str, value: GgufValue) -> Iterator[GgufValue | None]:
    """Values that no conversion writes, and None for no value."""
    if key != "sam3d.mhr.numbered":
        yield None
    match value.value:
        case _ if key == "general.alignment":
            return
        case str(text) if len(text) == 64 and key.endswith("sha256"):
            yield from (string("z" * 64), string(text[:-1]), string(text + "0"), string("A" * 64))
        case bool():
            yield uint32(1)
        case int(number):
            yield uint64(number) if value.type is ValueType.UINT32 else uint32(number)
        case float(number):
            yield GgufValue(ValueType.FLOAT64, number)
        case tuple(items) if key != PREFIX_SIZES:
            yield GgufValue(ValueType.ARRAY, items[:-1], value.item_type)
            twice: Any = items + items
            yield GgufValue(ValueType.ARRAY, twice, value.item_type)
        case _:
            pass
    yield string("")


# What a file says of its own origin can't be told from the file alone.
CLAIMED = {
    "body": {
        "sam3d.source.checkpoint.sha256",
        "sam3d.source.checkpoint.bytes",
        "sam3d.source.config.sha256",
        "sam3d.source.config.bytes",
        "sam3d.source.safetensors.backbone_sha256",
        "sam3d.source.safetensors.other_sha256",
        "sam3d.companion.mhr.content_sha256",
        "sam3d.companion.mhr.semantics_sha256",
    },
    "mhr": {
        "sam3d.source.asset.sha256",
        "sam3d.source.asset.bytes",
        "sam3d.source.safetensors.mhr_sha256",
        "sam3d.mhr.joint_names",
        PREFIX_SIZES,
    },
}
COMPONENT_CLAIMED = {
    "body.dinov3_backbone": {
        "sam3d.source.checkpoint_sha256",
        "sam3d.source.config_sha256",
        "sam3d.source.safetensors_sha256",
    },
    "body.pose_branch": {
        "sam3d.source.checkpoint_sha256",
        "sam3d.source.config_sha256",
        "sam3d.source.safetensors_sha256",
        "sam3d.required_mhr_sha256",
    },
    "mhr.lod1": {
        "sam3d.source.asset_sha256",
        "sam3d.source.safetensors_sha256",
        "sam3d.joint_names",
        "sam3d.parameter_names",
        "sam3d.prefix_sizes",
    },
}
DIGESTS = {"sam3d.content_sha256", "sam3d.semantics_sha256", "sam3d.tensor_sha256"}


def written_claims_are_good(parts: Gguf, path: Path) -> bool:
    """Whether the header and metadata of a file are in order, whatever its tensors hold."""
    parts.write(path, data=False)
    with open_source(path) as file:
        try:
            read_claims(read_gguf(file.source), str(path))
        except ContractError:
            return False
    return True


def believed_keys(path: Path, folder: Path) -> set[str]:
    """The keys of a file that can have another value without a fault in the metadata."""
    parts = Gguf.read(path)
    forged = folder / "forged.gguf"
    assert written_claims_are_good(parts, forged)
    believed: set[str] = set()
    for key, value in list(parts.metadata.items()):
        if key in DIGESTS:
            continue
        for other in other_values(key, value):
            parts.metadata[key] = other
            believed |= {key} if written_claims_are_good(parts, forged) else set()
        for impossible in impossible_values(key, value):
            del parts.metadata[key]
            if impossible is not None:
                parts.metadata[key] = impossible
            assert not written_claims_are_good(parts, forged), (key, impossible)
            parts.metadata[key] = value
    return believed


@pytest.mark.parametrize("role", ROLES)
def test_every_changed_key_is_found_but_what_a_file_claims(
    single: Release, tmp_path: Path, role: str
) -> None:
    assert believed_keys(single.folder / f"{role}.gguf", tmp_path) == CLAIMED[role]


@pytest.mark.parametrize("role", ROLES)
def test_every_changed_digest_is_found(copy: Release, role: str) -> None:
    path = copy.folder / f"{role}.gguf"
    for key in DIGESTS:
        original = path.read_bytes()

        def change(parts: Gguf, key: str = key) -> None:
            parts.metadata[key] = next(other_values(key, parts.metadata[key]))

        forge(path, change, digests=False)
        assert any(key in line for line in problems_of(path)), key
        path.write_bytes(original)


@pytest.mark.parametrize("role", ROLES)
def test_changed_semantics_without_their_digest_are_found(copy: Release, role: str) -> None:
    """A dimension that no tensor has, so that only the contract's constants could tell."""
    path = copy.folder / f"{role}.gguf"
    key = {"body": "sam3d.body.image_width", "mhr": "sam3d.mhr.joint_names"}[role]

    def change(parts: Gguf) -> None:
        parts.metadata[key] = list(other_values(key, parts.metadata[key]))[-1]

    forge(path, change, digests=False)

    assert problems_of(path)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "key", ["general.author", "sam3d.body.extra", "sam3d.mhr.extra", "tokenizer.ggml.model"]
)
def test_an_unknown_key_is_found(single: Release, tmp_path: Path, role: str, key: str) -> None:
    parts = Gguf.read(single.folder / f"{role}.gguf")
    parts.metadata[key] = string("x")

    assert not written_claims_are_good(parts, tmp_path / "forged.gguf")


@pytest.mark.parametrize("role", ROLES)
def test_pinned_is_not_taken_from_the_file(copy: Release, role: str) -> None:
    path = copy.folder / f"{role}.gguf"
    forge(path, lambda parts: parts.metadata.update({"sam3d.origin": string("pinned")}))

    assert any("sam3d.origin is not what" in line for line in problems_of(path))


@pytest.mark.parametrize("role", ROLES)
def test_a_pin_of_another_file_does_not_count(single: Release, tmp_path: Path, role: str) -> None:
    parts = Gguf.read(single.folder / f"{role}.gguf")
    prefix = {"body": "sam3d.source.checkpoint", "mhr": "sam3d.source.asset"}[role]
    (other, *_) = load_sources().with_role({"body": "mhr.asset", "mhr": "body.checkpoint"}[role])
    parts.metadata[f"{prefix}.sha256"] = string(other.sha256)
    parts.metadata[f"{prefix}.bytes"] = uint64(other.bytes)

    # It is unpinned still, so what it says besides stays right.
    assert written_claims_are_good(parts, tmp_path / "forged.gguf")
    parts.metadata["sam3d.origin"] = string("pinned")
    assert not written_claims_are_good(parts, tmp_path / "forged.gguf")


def test_a_tiny_model_cannot_claim_a_pinned_source(single: Release, tmp_path: Path) -> None:
    parts = Gguf.read(single.mhr)
    (pin, *_) = load_sources().with_role("mhr.asset")
    parts.metadata["sam3d.source.asset.sha256"] = string(pin.sha256)
    parts.metadata["sam3d.source.asset.bytes"] = uint64(pin.bytes)
    parts.write(tmp_path / "forged.gguf", data=False)

    with open_source(tmp_path / "forged.gguf") as file, pytest.raises(Sam3dError) as caught:
        read_claims(read_gguf(file.source), "forged")
    assert "expected F32 [45, 18439, 3]" in str(caught.value)


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_changed_key_of_a_component_is_found_but_what_it_claims(
    components: Release, tmp_path: Path, component: str
) -> None:
    believed = believed_keys(components.folder / COMPONENTS[component], tmp_path)

    assert believed == COMPONENT_CLAIMED[component]


def test_a_component_that_is_not_sorted_is_found(components: Release, tmp_path: Path) -> None:
    path = tmp_path / "unsorted.gguf"
    shutil.copy(components.folder / COMPONENTS["mhr.lod1"], path)
    header = header_of(path)
    first, second = list(header.metadata)[:2]
    a, b = (encode_metadata(key, header.metadata[key]) for key in (first, second))
    path.write_bytes(path.read_bytes().replace(a + b, b + a, 1))

    (found,) = problems_of(path)
    assert "not sorted" in found


# Other files


@pytest.mark.parametrize(
    ("architecture", "words"),
    [("llama", "the architecture is 'llama'"), ("", "architecture"), ("sam3d.objects.x", "sam3d")],
)
def test_a_gguf_file_of_another_model_is_named(
    copy: Release, architecture: str, words: str
) -> None:
    forge(
        copy.mhr,
        lambda parts: parts.metadata.update({"general.architecture": string(architecture)}),
    )

    (found,) = problems_of(copy.mhr)
    assert words in found


def test_another_schema_version_is_named(copy: Release) -> None:
    forge(copy.mhr, lambda parts: parts.metadata.update({"sam3d.schema_version": uint32(2)}))

    (found,) = problems_of(copy.mhr)
    assert "schema version" in found
