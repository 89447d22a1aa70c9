"""Releases of SAM 3D Objects: every tensor as PyTorch reads it, and parts that belong together."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from objects_facts import PARTS, TINY, inventory
from oracle_program import Expected, expected_tensors
from tiny_objects import MOGE_CONFIG, Tensors, copy, files, moge, request, rewrite
from tiny_release import Source, all_text, load_file, names_in, read_json
from typer.testing import CliRunner

from sam3d_gguf.cli import extract as extract_command
from sam3d_gguf.convert.contract import load_model_contract
from sam3d_gguf.convert.gguf_format import GgmlType, GgufTensorSpec
from sam3d_gguf.convert.gguf_reader import read_gguf
from sam3d_gguf.convert.gguf_writer import GgufLayout
from sam3d_gguf.convert.inspect import inspect
from sam3d_gguf.convert.objects import convert_objects, extract_objects
from sam3d_gguf.convert.stream import channels_last
from sam3d_gguf.convert.verify import verify
from sam3d_gguf.extractors.files import open_source
from sam3d_gguf.extractors.models import MOGE, OBJECTS, part
from sam3d_gguf.extractors.sniff import sniff

EXPECTED = expected_tensors((TINY / "expected-tensors.json").read_text())
RENAMED = {
    "flow.": "_base_models.generator.reverse_fn.backbone.",
    "cond.": "_base_models.condition_embedder.",
}
KEYS = "sam3d.objects."


def source_name(name: str) -> str:
    """The checkpoint's name of a tensor, by the rules that the formats page states."""
    for short, long in RENAMED.items():
        if name.startswith(short):
            return long + name.removeprefix(short)
    return name


def as_in_the_source(
    name: str, values: np.ndarray[Any, Any], source: Expected
) -> np.ndarray[Any, Any]:
    """A GGUF tensor's values in the order of the checkpoint.

    Kernels of dense convolutions and one table of positions have their channels last in the GGUF.
    """
    if source.shape[2:] == (3, 3, 3) or name.endswith(".module_list.2.pos_embed"):
        first, channels, *inner = source.shape
        assert values.shape == (first, math.prod(inner), channels)
        return np.moveaxis(values, 2, 1).reshape(source.shape)
    return values.reshape(source.shape)


def read(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a GGUF file as its own library reads them, by their names in the checkpoint."""
    return {source_name(str(t.name)): t.data for t in gguf.GGUFReader(path).tensors}


def sha256(values: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def metadata(path: Path) -> dict[str, Any]:
    with open_source(path) as file:
        return {key: value.value for key, value in read_gguf(file.source).metadata.items()}


@pytest.mark.parametrize("name", PARTS)
def test_every_tensor_is_the_one_that_pytorch_reads(objects: Path, name: str) -> None:
    expected = EXPECTED[f"{name}.ckpt"]
    found = read(objects / f"{name}.gguf")
    left_out = {n for n in expected if n.startswith("_base_models.decoder.")}
    assert found.keys() == expected.keys() - left_out
    assert len(left_out) == (74 if name == "ss_generator" else 0)
    for tensor, values in found.items():
        source = expected[tensor]
        assert {"F32": "<f4", "F16": "<f2"}[source.dtype] == values.dtype.str, tensor
        assert sha256(as_in_the_source(tensor, values, source)) == source.sha256, tensor


def test_f16_widened(tmp_path: Path) -> None:
    out = tmp_path / "f32"
    convert_objects(request(out, parts=("ss_decoder",), precision="f32"))
    for tensor, values in read(out / "ss_decoder.gguf").items():
        source = EXPECTED["ss_decoder.ckpt"][tensor]
        found = sha256(as_in_the_source(tensor, values, source))
        assert found == (source.f32_sha256 or source.sha256), tensor
    done = verify([out / "manifest.json"], sources=[TINY / "ss_decoder.ckpt"])
    assert done.is_good
    assert metadata(out / "ss_decoder.gguf")["general.file_type"] == 0


def test_the_release_verifies_down_to_its_sources(objects: Path) -> None:
    done = verify([objects / "manifest.json"], sources=[TINY / f"{name}.ckpt" for name in PARTS])
    assert done.problems == [] and [f.problems for f in done.files] == [[]] * 6
    assert done.verdict == "verified (complete, unpinned)"


def test_the_manifest(objects: Path) -> None:
    document = read_json(objects / "manifest.json")
    assert document["release"] == {
        "model": "objects",
        "layout": "single",
        "precision": "source",
        "status": "complete",
        "origin": "unpinned",
        "native_contract": "not applicable",
    }
    assert names_in(objects) == sorted(["manifest.json", *(f"{name}.gguf" for name in PARTS)])
    roles = {source["role"] for source in document["sources"]}
    configs = {f"objects.{name}.config" for name in (*PARTS, "pipeline")}
    assert roles == configs | {f"objects.{name}.checkpoint" for name in PARTS}
    left_out = {item["what"]: item["reason"] for item in document["left_out"]}
    assert left_out.pop("__mixhavior__") == "not a tensor: dict of 0"
    assert len(left_out) == 74
    assert set(left_out.values()) == {"a copy of the occupancy decoder that no inference reads"}


def test_every_two_files_are_tied(objects: Path) -> None:
    found = files(objects)
    ties = {
        frozenset((role, companion["role"]))
        for role, file in found.items()
        for companion in file["companions"]
    }
    assert ties == {frozenset((a, b)) for a in found for b in found if a != b}
    for file in found.values():
        for companion in file["companions"]:
            other = found[companion["role"]]
            for key in ("content_sha256", "semantics_sha256", "architecture"):
                assert companion[key] == other[key]


def test_metadata_that_a_runtime_needs(objects: Path) -> None:
    ss = metadata(objects / "ss_generator.gguf")
    assert ss["general.architecture"] == "sam3d.objects.ss_generator"
    assert ss[f"{KEYS}ss_generator.flow.channels"] == 64
    assert ss[f"{KEYS}ss_generator.image_encoder.attention.head_count"] == 3
    assert ss[f"{KEYS}ss_generator.image_size"] == 56
    assert ss[f"{KEYS}ss_generator.sampler.steps"] == 25
    assert ss[f"{KEYS}ss_generator.image_encoder.shared"] is False
    mesh = metadata(objects / "slat_decoder_mesh.gguf")
    assert mesh[f"{KEYS}slat_decoder_mesh.feed_forward_channels"] == 32
    assert mesh[f"{KEYS}slat_decoder_mesh.resolution"] == 16
    assert metadata(objects / "slat_decoder_gs.gguf")["general.file_type"] == 1


def test_equal_bytes_again_and_for_each_part_alone(objects: Path, tmp_path: Path) -> None:
    convert_objects(request(tmp_path / "again"))
    for name in names_in(objects):
        assert (objects / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name
    alone = tmp_path / "alone"
    manifest = convert_objects(request(alone, parts=("slat_decoder_mesh",)))
    assert manifest.status == "incomplete"
    assert names_in(alone) == ["manifest.json", "slat_decoder_mesh.gguf"]
    # The file that names no other is the same in every release.
    name = "slat_decoder_mesh.gguf"
    assert (alone / name).read_bytes() == (objects / name).read_bytes()
    assert verify([alone / "manifest.json"]).is_good


def test_the_mesh_decoder_is_of_the_form_before_torch_1_6() -> None:
    with open_source(TINY / "slat_decoder_mesh.ckpt") as file:
        assert sniff(file.source).name == "TORCH_LEGACY"


# Equal encoders


def equal_encoders(tensors: Tensors) -> None:
    """Give the second image encoder the tensors of the first."""
    for name in tensors:
        if ".module_list.1.backbone." in name:
            tensors[name] = tensors[name.replace(".module_list.1.", ".module_list.0.")]


def test_equal_encoders_are_stored_once(tmp_path: Path) -> None:
    folder = copy(tmp_path / "in", "slat_generator")
    rewrite(folder, "slat_generator", equal_encoders)
    source = folder / "slat_generator.ckpt"
    out = tmp_path / "out"
    manifest = convert_objects(request(out, checkpoint_dir=folder, parts=("slat_generator",)))
    path = out / "slat_generator.gguf"
    assert metadata(path)[f"{KEYS}slat_generator.image_encoder.shared"] is True
    found = read(path)
    assert not any(".module_list.1.backbone." in name for name in found)
    first = [name for name in found if ".module_list.0.backbone." in name]
    assert len(first) == 36
    for name in first:
        assert sha256(found[name].reshape(-1)) == EXPECTED["slat_generator.ckpt"][name].sha256
    assert {item.what for item in manifest.left_out} == {
        name.replace(".module_list.0.", ".module_list.1.") for name in first
    }
    done = verify([out / "manifest.json"], sources=[source])
    assert done.verdict == "verified (incomplete, unpinned)"


def test_encoders_that_differ_in_one_bit_are_both_stored(tmp_path: Path) -> None:
    folder = copy(tmp_path / "in", "slat_generator")

    def nearly(tensors: Tensors) -> None:
        equal_encoders(tensors)
        name = "_base_models.condition_embedder.module_list.1.backbone.norm.bias"
        before = tensors[name]
        data = bytes([before.data[0] ^ 1]) + before.data[1:]
        tensors[name] = Source(before.dtype, before.shape, data)

    rewrite(folder, "slat_generator", nearly)
    out = tmp_path / "out"
    convert_objects(request(out, checkpoint_dir=folder, parts=("slat_generator",)))
    path = out / "slat_generator.gguf"
    assert metadata(path)[f"{KEYS}slat_generator.image_encoder.shared"] is False
    assert sum(".module_list.1.backbone." in name for name in read(path)) == 36


# The depth model


def test_the_depth_model_never_counts_as_pinned(objects: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    model = moge(tmp_path / "model.pt")
    manifest = convert_objects(request(out, moge=model))
    assert (manifest.status, manifest.origin) == ("complete", "unpinned")
    for name in PARTS:  # they don't depend on it
        assert (out / f"{name}.gguf").read_bytes() == (objects / f"{name}.gguf").read_bytes()
    assert len(files(out)[MOGE]["companions"]) == 6
    assert metadata(out / "moge.gguf")["sam3d.objects.moge.token_count_maximum"] == 2500
    done = verify([out / "manifest.json"], sources=[model])
    assert done.is_good and "moge.gguf" in done.proven


def test_an_older_form_of_the_depth_models_configuration(tmp_path: Path) -> None:
    """MoGe itself takes `trained_area_range` for numbers of patches of 14 x 14 pixels, and its
    first form had a choice of what is always so today: a mask, from a block of its own."""
    config = {k: v for k, v in MOGE_CONFIG.items() if k != "num_tokens_range"}
    config |= {"trained_area_range": [250000, 1000000], "output_mask": True, "split_head": True}
    model = moge(tmp_path / "model.pt", config)
    convert_objects(request(tmp_path / "out", parts=("moge",), moge=model))
    found = metadata(tmp_path / "out" / "moge.gguf")
    assert found["sam3d.objects.moge.token_count_minimum"] == 250000 // 196
    assert found["sam3d.objects.moge.token_count_maximum"] == 1000000 // 196


# Extraction


def test_extraction(tmp_path: Path) -> None:
    out = tmp_path / "out"
    parts = ("ss_decoder", "ss_generator", "slat_decoder_mesh")
    done = extract_objects(request(out, parts=parts))
    assert names_in(out) == sorted(parts)
    for name in parts:
        expected = EXPECTED[f"{name}.ckpt"]
        assert names_in(out / name) == ["extraction.json", f"{name}.safetensors"]
        tensors = load_file(out / name / f"{name}.safetensors")
        assert {n: sha256(v) for n, v in tensors.items()} == {
            n: t.f32_sha256 or t.sha256 for n, t in expected.items()
        }
    report = read_json(out / "ss_generator" / "extraction.json")
    assert report["archive"]["wrapper"] == "state_dict"
    assert {"what": "__mixhavior__", "reason": "not a tensor: dict of 0"} in report["left_out"]
    assert {row["class"] for row in report["tensors"]} == {"learned", "constant", "training"}
    assert len(done) == 3


def test_extraction_as_json(tmp_path: Path) -> None:
    options = ["--checkpoint-dir", str(TINY), "--out", str(tmp_path / "out"), "--allow-unpinned"]
    parts = ["--parts", "slat_decoder_gs,slat_decoder_gs_4", "--json"]
    done = CliRunner().invoke(extract_command.app, ["objects", *options, *parts])
    assert done.exit_code == 0
    reports = json.loads(done.stdout)
    assert [report["model"] for report in reports] == [
        "objects.slat_decoder_gs_4",
        "objects.slat_decoder_gs",
    ]
    assert names_in(tmp_path / "out") == ["slat_decoder_gs", "slat_decoder_gs_4"]


def test_inspection(objects: Path) -> None:
    found = inspect(TINY / "slat_decoder_mesh.ckpt")
    assert (found.wrapper, len(found.tensors)) == ("flat", 40)
    assert len(inspect(objects / "ss_decoder.gguf").tensors) == 74


# Layouts


@pytest.mark.parametrize("block", [1, 7, 12, 13, 24, 60, 100])
def test_channels_last_over_blocks_of_any_size(block: int) -> None:
    values = np.arange(60, dtype=np.float32).reshape(5, 3, 2, 2)
    flat = values.reshape(-1)
    blocks = (flat[at : at + block] for at in range(0, flat.size, block))
    found = np.concatenate(list(channels_last(blocks, values.shape)))
    assert np.array_equal(found.reshape(5, 4, 3), values.reshape(5, 3, 4).transpose(0, 2, 1))


@pytest.mark.parametrize("model", OBJECTS)
def test_official_sizes_fit_the_format(model: Any) -> None:
    """The header of a file of the official shape, whose data nobody makes here."""
    tensors = load_model_contract(model).official().tensors.values()
    specs = [GgufTensorSpec(t.name, t.stored_shape, GgmlType[t.gguf_dtype]) for t in tensors]
    layout = GgufLayout.plan({}, specs)
    sizes = {"F32": 4, "F16": 2}
    stored = {
        name: spec
        for name, spec in inventory()[part(model)].items()
        if not name.startswith("_base_models.decoder.")
    }
    payload = sum(sizes[dtype] * math.prod(shape) for dtype, shape in stored.values())
    assert payload < layout.size < payload + 400_000


# Parts that don't belong together


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A second release, one of whose parts has other weights."""
    folder = copy(tmp_path / "in")

    def change(tensors: Tensors) -> None:
        before = tensors["out_layer.bias"]
        tensors["out_layer.bias"] = Source(before.dtype, before.shape, bytes(len(before.data)))

    rewrite(folder, "slat_decoder_gs", change)
    convert_objects(request(tmp_path / "other", checkpoint_dir=folder))
    return tmp_path / "other"


def test_parts_of_two_releases_are_refused_by_name(
    objects: Path, other: Path, tmp_path: Path
) -> None:
    mixed = tmp_path / "mixed"
    shutil.copytree(objects, mixed)
    shutil.copy(other / "slat_decoder_gs.gguf", mixed)
    paths = [mixed / f"{name}.gguf" for name in PARTS]
    done = verify(paths)
    assert not done.is_good
    problems = {file.name: all_text(file.problems) for file in done.files}
    for name in ("ss_generator", "slat_generator", "ss_decoder"):
        assert "its companion objects.slat_decoder_gs is another one" in problems[f"{name}.gguf"]
    assert problems["slat_decoder_mesh.gguf"] == ""
    # A manifest that was made to fit does not help.
    document, second = read_json(mixed / "manifest.json"), files(other)
    entries = document["files"]
    place = next(i for i, file in enumerate(entries) if file["role"] == "objects.slat_decoder_gs")
    entries[place] = second["objects.slat_decoder_gs"]
    (mixed / "manifest.json").write_text(json.dumps(document))
    done = verify([mixed / "manifest.json"])
    assert "objects.slat_decoder_gs is another one" in all_text(
        problem for file in done.files for problem in file.problems
    )


def test_a_part_that_the_others_do_not_name_is_refused(objects: Path, tmp_path: Path) -> None:
    """Files of two conversions of the same checkpoints, the manifest made to fit."""
    alone = tmp_path / "alone"
    convert_objects(request(alone, parts=("ss_generator",)))
    both = tmp_path / "both"
    convert_objects(request(both, parts=("ss_generator", "ss_decoder")))
    shutil.copy(alone / "ss_generator.gguf", both)
    document = read_json(both / "manifest.json")
    document["files"] = [files(alone).get(file["role"], file) for file in document["files"]]
    (both / "manifest.json").write_text(json.dumps(document))
    done = verify([both / "manifest.json"])
    (report,) = (file for file in done.files if file.name == "ss_generator.gguf")
    unnamed = "it does not name its companion objects.ss_decoder"
    assert report.problems == [unnamed]
    pair = [both / "ss_decoder.gguf", both / "ss_generator.gguf"]
    assert [file.problems for file in verify(pair).files] == [[], [unnamed]]


def test_the_depth_model_may_come_alone(objects: Path, depth: Path) -> None:
    done = verify([objects / "ss_decoder.gguf", depth / "moge.gguf"])
    assert done.is_good


DELETED = object()


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("files", 5), DELETED, "the manifest has sources"),
        (("release", "status"), "incomplete", "the release says incomplete"),
        (("release", "model"), "body", "the manifest has files"),
        (("left_out", 0, "role"), "mhr.asset", "which is no source of it"),
        (("sources", 0), DELETED, "the manifest has sources"),
        (("sources", 0, "sha256"), "0" * 64, "SHA-256 of the objects.pipeline"),
        (("sources", 0, "origin"), "pinned", "is not pinned by this tool"),
    ],
)
def test_manifests_that_lie(
    objects: Path, tmp_path: Path, path: tuple[str | int, ...], value: object, problem: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(objects, folder)
    document = read_json(folder / "manifest.json")
    place: Any = document
    for step in path[:-1]:
        place = place[step]
    if value is DELETED:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    (folder / "manifest.json").write_text(json.dumps(document))
    assert problem in all_text(verify([folder / "manifest.json"]).problems)
