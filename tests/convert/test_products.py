"""Conversion from the folder of an earlier extraction: what its report says is held against it."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_release import (
    ASSET,
    CHECKPOINT,
    Array,
    Json,
    Release,
    canonical_safetensors,
    edited_extraction,
    flip,
    from_extraction,
    load_file,
    names_in,
    read_json,
    sha256,
    write_json,
)

from sam3d_gguf.convert.products import products_from_folder
from sam3d_gguf.convert.release import convert_body
from sam3d_gguf.extractors import extraction as extraction_module
from sam3d_gguf.extractors.litter import scratch_folder
from sam3d_gguf.schemas.errors import ContractError, InputError, Sam3dError


def nothing(_: Any) -> None:
    """No change."""


@pytest.fixture
def folder(single: Release, tmp_path: Path) -> Path:
    """A copy of Body's extraction."""
    shutil.copytree(single.extraction, tmp_path / "extraction")
    return tmp_path / "extraction"


def convert(folder: Path, extraction: Path, **changes: Any) -> None:
    """Convert it, without MHR unless said otherwise."""
    out = folder / "out"
    out.mkdir()
    try:
        convert_body(from_extraction(extraction, out / "body.gguf", **{"mhr": None, **changes}))
    except Sam3dError:
        assert names_in(out) == []
        raise


def edit_report(folder: Path, change: Callable[[Json], object]) -> None:
    """Change the report alone."""
    report = read_json(folder / "extraction.json")
    change(report)
    write_json(folder / "extraction.json", report)


def row(report: Json, name: str) -> Json:
    """The report's entry of a tensor."""
    (found,) = [entry for entry in report["tensors"] if entry["name"] == name]
    entry: Json = found
    return entry


def test_a_folder_that_was_only_moved_converts(folder: Path, tmp_path: Path) -> None:
    convert(tmp_path, folder)


def test_a_rewritten_folder_converts(single: Release, tmp_path: Path) -> None:
    edited = edited_extraction(single.extraction, tmp_path / "edited", nothing)

    convert(tmp_path, edited)


@pytest.mark.parametrize("file", ["backbone.safetensors", "other.safetensors"])
def test_a_changed_byte_is_found(folder: Path, tmp_path: Path, file: str) -> None:
    flip(folder / file, (folder / file).stat().st_size - 1)

    with pytest.raises(InputError, match=f"{file}: the file has .* and SHA-256"):
        convert(tmp_path, folder)


def test_a_changed_byte_is_found_by_its_tensor_too(single: Release, tmp_path: Path) -> None:
    def change(report: Json) -> None:
        row(report, "init_pose.weight")["sha256"] = "0" * 64

    edited = edited_extraction(single.extraction, tmp_path / "edited", nothing, change)

    with pytest.raises(InputError, match=r"the tensor 'init_pose\.weight' has SHA-256"):
        convert(tmp_path, edited)


REPORT_LIES: dict[str, tuple[Callable[[Json], object], str]] = {
    "file left out": (lambda r: r["products"].pop(), "the report is of the files"),
    "file twice": (
        lambda r: r["products"].__setitem__(1, dict(r["products"][0])),
        "the report is of the files",
    ),
    "file of another model": (
        lambda r: r["products"][1].update(file="mhr.safetensors"),
        "the report is of the files",
    ),
    "another model": (lambda r: r.update(model="mhr"), "this is an extraction of mhr"),
    "tensors miscounted": (lambda r: r["products"][0].update(tensors=7), "miscounts"),
    "tensor left out": (lambda r: r["tensors"].pop(), "different tensors"),
    "tensor twice": (lambda r: r["tensors"].append(dict(r["tensors"][0])), "different tensors"),
    "tensor renamed": (
        lambda r: row(r, "init_pose.weight").update(name="init_pose2.weight"),
        "different tensors",
    ),
    "tensor in another file": (
        lambda r: row(r, "init_pose.weight").update(file="backbone.safetensors"),
        "different tensors",
    ),
    "tensor reshaped": (
        lambda r: row(r, "init_pose.weight").update(shape=[519, 1]),
        "different tensors",
    ),
    "tensor retyped": (
        lambda r: row(r, "init_pose.weight").update(dtype="I32"),
        "different tensors",
    ),
    "added tensor left out": (lambda r: r["added"].clear(), "different tensors"),
    "size": (lambda r: r["products"][0].update(bytes=1), "the file has"),
    "hash": (lambda r: r["products"][0].update(sha256="0" * 64), "the file has"),
    "unknown field": (lambda r: r.update(trusted=True), "trusted"),
    "no tensors": (lambda r: r.pop("tensors"), "tensors"),
}


@pytest.mark.parametrize("lie", REPORT_LIES)
def test_a_report_that_does_not_fit_is_refused(folder: Path, tmp_path: Path, lie: str) -> None:
    change, words = REPORT_LIES[lie]
    edit_report(folder, change)

    with pytest.raises(InputError, match=words):
        convert(tmp_path, folder)


def test_a_file_in_another_form_is_refused(folder: Path, tmp_path: Path) -> None:
    path = folder / "other.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes((length + 8).to_bytes(8, "little") + data[8 : 8 + length] + b" " * 8)
    with path.open("ab") as file:
        file.write(data[8 + length :])
    edit_report(
        folder, lambda r: r["products"][1].update(bytes=path.stat().st_size, sha256=sha256(path))
    )

    with pytest.raises(InputError, match="canonical form"):
        convert(tmp_path, folder)


def test_a_linked_file_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "other.safetensors").rename(tmp_path / "elsewhere")
    (folder / "other.safetensors").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(InputError, match="a symbolic link"):
        convert(tmp_path, folder)


# BF16


def test_bf16_comes_back_only_where_the_low_halves_are_zero(
    single: Release, tmp_path: Path
) -> None:
    def change(tensors: dict[str, Array]) -> None:
        if "norm.weight" in tensors:
            values = tensors["norm.weight"].view(np.uint32).copy()
            values[5] |= 1
            tensors["norm.weight"] = values.view(np.float32)

    edited = edited_extraction(single.extraction, tmp_path / "edited", change)

    with pytest.raises(ContractError, match=r"norm\.weight: .*low halves") as caught:
        convert(tmp_path, edited)
    assert "report" in str(caught.value)


def test_a_report_that_hides_bf16_is_refused(folder: Path, tmp_path: Path) -> None:
    name = "backbone.encoder.norm.weight"
    edit_report(folder, lambda r: row(r, name).update(source_dtype="F32"))

    with pytest.raises(ContractError, match=r"retyped .*\n.*norm\.weight is F32"):
        convert(tmp_path, folder)


def test_a_report_that_invents_bf16_is_refused(folder: Path, tmp_path: Path) -> None:
    edit_report(folder, lambda r: row(r, "init_pose.weight").update(source_dtype="BF16"))

    with pytest.raises(ContractError, match=r"retyped .*\n.*init_pose\.weight is BF16"):
        convert(tmp_path, folder)


# Origin


def test_an_extraction_needs_to_be_allowed(folder: Path) -> None:
    with (
        pytest.raises(InputError, match="not published ones") as caught,
        products_from_folder("body", folder),
    ):
        pass

    assert "--allow-unpinned" in str(caught.value)


def test_what_a_report_says_of_its_origin_is_not_believed(folder: Path) -> None:
    def change(report: Json) -> None:
        report["source"]["origin"] = "pinned"
        for product in report["products"]:
            product["known_answer"] = "equal"

    edit_report(folder, change)

    with products_from_folder("body", folder, allow_unpinned=True) as products:
        assert products.extraction.source.origin == "unpinned"
        assert {p.known_answer for p in products.extraction.products} == {"none"}


@pytest.fixture
def published(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the fixture's safetensors were the published ones."""
    known = {
        path.name: (path.stat().st_size, sha256(path)) for path in folder.glob("*.safetensors")
    }
    monkeypatch.setattr(extraction_module, "known_products", lambda: known)


@pytest.mark.usefixtures("published")
def test_published_files_are_pinned_whatever_the_report_says(folder: Path) -> None:
    with products_from_folder("body", folder) as products:
        assert products.extraction.source.origin == "pinned"
        assert {p.known_answer for p in products.extraction.products} == {"equal"}
        # The published files come from the pinned checkpoint, so it is the source.
        assert products.extraction.source.bytes == 2_109_129_346


@pytest.mark.usefixtures("published")
def test_one_file_that_is_published_does_not_vouch_for_the_other(folder: Path) -> None:
    tensors = load_file(folder / "other.safetensors")
    tensors["init_pose.weight"] = tensors["init_pose.weight"] + np.float32(1)
    path = folder / "other.safetensors"
    path.write_bytes(canonical_safetensors(tensors))

    def change(report: Json) -> None:
        report["products"][1]["sha256"] = sha256(path)

    edit_report(folder, change)
    with pytest.raises(InputError, match="not published"), products_from_folder("body", folder):
        pass
    edit_report(folder, lambda report: report["products"].pop())
    with pytest.raises(InputError, match="is of the files"), products_from_folder("body", folder):
        pass


# Against its source


def test_the_source_of_another_extraction_is_refused(single: Release, tmp_path: Path) -> None:
    other = tmp_path / "other.ckpt"
    root = read_json(single.extraction / "extraction.json")["archive"]["root"].encode()
    other.write_bytes(CHECKPOINT.read_bytes().replace(root + b"/", root.upper() + b"/"))

    with pytest.raises(InputError, match="not the extraction's source"):
        convert(tmp_path, single.extraction, checkpoint=other)


def test_the_other_models_source_is_refused(single: Release, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a TorchScript archive"):
        convert(tmp_path, single.extraction, checkpoint=ASSET)


def test_tensors_that_the_source_does_not_hold_are_found(single: Release, tmp_path: Path) -> None:
    def change(tensors: dict[str, Array]) -> None:
        if "init_pose.weight" in tensors:
            tensors["init_pose.weight"] = tensors["init_pose.weight"] + np.float32(1)

    edited = edited_extraction(single.extraction, tmp_path / "edited", change)
    convert(tmp_path, edited)

    with pytest.raises(
        InputError, match=r"init_pose\.weight.* are not those that the source holds"
    ):
        convert(tmp_path / "edited", edited, checkpoint=CHECKPOINT)


def test_swapped_names_are_found_against_the_source(single: Release, tmp_path: Path) -> None:
    """All hashes fit, so only the source tells: both tensors have one shape."""
    first, second = (f"head_{part}.proj.layers.0.0.bias" for part in ("pose", "camera"))

    def change(tensors: dict[str, Array]) -> None:
        if first in tensors:
            tensors[first], tensors[second] = tensors[second], tensors[first]

    edited = edited_extraction(single.extraction, tmp_path / "edited", change)

    with pytest.raises(InputError, match="are not those that the source holds") as caught:
        convert(tmp_path, edited, checkpoint=CHECKPOINT)

    assert caught.value.what.startswith("the extraction's bytes of the tensor 'head_")
    assert caught.value.action.endswith("extract again")
    assert "reader" not in str(caught.value)


OTHER_REPORTS: dict[str, Callable[[Json], object]] = {
    "place": lambda r: row(r, "init_pose.weight").update(member="data/0"),
    "offset": lambda r: row(r, "init_pose.weight").update(offset=3),
    "class": lambda r: row(r, "init_pose.weight").update({"class": "constant"}),
    "attribute": lambda r: r["attributes"].update(joint_names=["root"]),
}


@pytest.mark.parametrize("change", OTHER_REPORTS.values(), ids=OTHER_REPORTS.keys())
def test_a_report_that_the_source_does_not_give_is_found(
    folder: Path, tmp_path: Path, change: Callable[[Json], object]
) -> None:
    edit_report(folder, change)

    with pytest.raises(InputError, match="another report"):
        convert(tmp_path, folder, checkpoint=CHECKPOINT)


def test_the_source_gives_what_the_report_left_out(single: Release, tmp_path: Path) -> None:
    shutil.copytree(single.mhr_extraction, tmp_path / "mhr")
    edit_report(tmp_path / "mhr", lambda r: r.update(left_out=[], inert=[]))

    with (
        scratch_folder(tmp_path) as scratch,
        products_from_folder(
            "mhr", tmp_path / "mhr", source=ASSET, scratch=scratch, allow_unpinned=True
        ) as products,
    ):
        stated = read_json(single.mhr_extraction / "extraction.json")["left_out"]
        found = [dataclasses.asdict(item) for item in products.extraction.left_out]
        assert found == stated
