"""An extraction of the tiny model in the sandbox, against what torch reads from the same files."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from facts import TINY
from oracle_program import Expected, expected_tensors
from tiny_release import (
    ASSET,
    CHECKPOINT,
    Release,
    canonical_safetensors,
    load_file,
    names_in,
    read_json,
    sha256,
)

from sam3d_gguf.convert.release import extract_to_folder
from sam3d_gguf.schemas.documents import validate
from sam3d_gguf.schemas.errors import InputError, OutputError

ORACLE = expected_tensors((TINY / "expected-tensors.json").read_text())
FILES = {
    "backbone.safetensors": CHECKPOINT,
    "other.safetensors": CHECKPOINT,
    "mhr/mhr.safetensors": ASSET,
}


def expected_in(file: str) -> dict[str, Expected]:
    """What torch reads of the tensors that a product file must hold, by their names there."""
    prefix = "backbone.encoder."
    tensors = ORACLE[FILES[file].name]
    if file == "mhr/mhr.safetensors":
        return tensors
    backbone = file == "backbone.safetensors"
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix) is backbone
    }


@pytest.mark.parametrize("file", FILES)
def test_the_safetensors_library_reads_what_torch_reads(single: Release, file: str) -> None:
    found = load_file(single.extraction / file)
    expected = expected_in(file)

    if file == "backbone.safetensors":
        mask_token = found.pop("mask_token")
        width = expected["cls_token"].shape[-1]
        assert mask_token.dtype == np.float32
        assert mask_token.shape == (1, width)
        assert not mask_token.any()
    assert found.keys() == expected.keys()
    for name, values in found.items():
        torch = expected[name]
        assert values.shape == torch.shape, name
        digest = hashlib.sha256(values.tobytes()).hexdigest()
        assert digest == (torch.f32_sha256 or torch.sha256), name


@pytest.mark.parametrize("file", FILES)
def test_the_file_is_the_canonical_form_byte_for_byte(single: Release, file: str) -> None:
    path = single.extraction / file

    assert path.read_bytes() == canonical_safetensors(load_file(path))


def test_the_folder_holds_the_files_and_their_report(single: Release) -> None:
    body = ["backbone.safetensors", "extraction.json", "mhr", "other.safetensors"]

    assert names_in(single.extraction) == body
    assert names_in(single.mhr_extraction) == ["extraction.json", "mhr.safetensors"]


@pytest.mark.parametrize(("folder", "source"), [("", CHECKPOINT), ("mhr", ASSET)])
def test_the_report_describes_source_and_products(
    single: Release, folder: str, source: Path
) -> None:
    report = read_json(single.extraction / folder / "extraction.json")

    validate(report, "extraction", where="report")
    assert report["source"] == {
        "name": source.name,
        "bytes": source.stat().st_size,
        "sha256": sha256(source),
        "sha256_after": sha256(source),
        "origin": "unpinned",
    }
    products = {p["file"]: p for p in report["products"]}
    for name, product in products.items():
        path = single.extraction / folder / name
        assert (product["bytes"], product["sha256"]) == (path.stat().st_size, sha256(path))
        assert (product["tensors"], product["known_answer"]) == (len(load_file(path)), "none")
    assert {t["name"] for t in report["tensors"]} == ORACLE[source.name].keys()
    for tensor in report["tensors"]:
        torch = ORACLE[source.name][tensor["name"]]
        assert (tensor["source_dtype"], tuple(tensor["shape"])) == (torch.dtype, torch.shape)
        assert tensor["sha256"] == (torch.f32_sha256 or torch.sha256)


@pytest.mark.parametrize(("folder", "source"), [("", CHECKPOINT), ("mhr", ASSET)])
def test_the_report_says_where_each_tensor_lies(single: Release, folder: str, source: Path) -> None:
    report = read_json(single.extraction / folder / "extraction.json")
    itemsize = {"BF16": 2, "F32": 4, "I32": 4, "I64": 8, "BOOL": 1}

    with zipfile.ZipFile(source) as archive:
        for tensor in report["tensors"]:
            storage = archive.read(f"{report['archive']['root']}/{tensor['member']}")
            size = itemsize[tensor["source_dtype"]]
            raw = np.lib.stride_tricks.as_strided(
                np.frombuffer(storage, f"V{size}")[tensor["offset"] :],
                tensor["shape"],
                [stride * size for stride in tensor["strides"]],
            )
            digest = hashlib.sha256(raw.tobytes()).hexdigest()
            assert digest == ORACLE[source.name][tensor["name"]].sha256, tensor["name"]


def test_the_report_names_what_was_added_and_why(single: Release) -> None:
    (added,) = read_json(single.extraction / "extraction.json")["added"]

    assert (added["file"], added["target"], added["dtype"]) == (
        "backbone.safetensors",
        "mask_token",
        "F32",
    )
    assert added["value"] == 0
    assert "initialises it to zeros" in added["reason"]


def test_every_tensor_has_a_class_of_its_contract(single: Release) -> None:
    body = read_json(single.extraction / "extraction.json")["tensors"]
    mhr = read_json(single.mhr_extraction / "extraction.json")["tensors"]
    classes = {t["name"]: t["class"] for t in body + mhr}

    assert "unknown" not in classes.values()
    assert classes["backbone.encoder.cls_token"] == "learned"
    assert classes["backbone.encoder.rope_embed.periods"] == "constant"
    assert classes["backbone.encoder.blocks.1.attn.qkv.bias_mask"] == "constant"
    assert classes["head_pose.faces"] == "index"
    assert classes["character_torch.blend_shape.base_shape"] == "geometry"
    assert classes["character_torch.parameter_limits.minmax_min"] == "training"


def test_code_is_hashed_and_plain_lists_are_kept(single: Release) -> None:
    report = read_json(single.mhr_extraction / "extraction.json")
    with zipfile.ZipFile(ASSET) as archive:
        root = archive.namelist()[0].split("/")[0]
        code = {
            name.removeprefix(f"{root}/"): hashlib.sha256(archive.read(name)).hexdigest()
            for name in archive.namelist()
            if "/code/" in name
        }

    assert report["archive"]["root"] == root
    assert report["archive"]["code"] == code
    assert len(report["attributes"]["character_torch.skeleton.joint_names"]) == 127
    assert report["attributes"]["character_torch.skeleton._pmi_buffer_sizes"] == [65, 56, 62, 83]


def test_a_second_extraction_gives_the_same_bytes(single: Release, tmp_path: Path) -> None:
    folder = tmp_path / "again"

    extract_to_folder("body", CHECKPOINT, folder, allow_unpinned=True)

    for name in names_in(folder):
        assert (folder / name).read_bytes() == (single.extraction / name).read_bytes(), name


def test_the_folder_must_not_exist(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="exists already"):
        extract_to_folder("body", CHECKPOINT, tmp_path, allow_unpinned=True)

    assert names_in(tmp_path) == []


def test_what_is_not_pinned_needs_to_be_allowed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"not a pinned body\.checkpoint") as caught:
        extract_to_folder("body", CHECKPOINT, tmp_path / "out")

    assert "--allow-unpinned" in str(caught.value)
    assert "2109129346 bytes" in str(caught.value)
    assert names_in(tmp_path) == []


def test_the_host_never_imports_a_reader_of_pickles() -> None:
    program = (
        "import sys, sam3d_gguf.cli.convert, sam3d_gguf.cli.verify, sam3d_gguf.cli.inspect;"
        "print(sorted(m for m in sys.modules if m in ('torch', 'pickle', 'cloudpickle')))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)

    assert "torch" not in json.loads(said.stdout.decode().replace("'", '"'))
