"""What a conversion of the tiny model writes, against what torch reads from its legacy files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import facts
import gguf
import numpy as np
import pytest
from native_reader import read_native
from oracle_program import Expected, expected_tensors
from tiny_release import (
    ASSET,
    CHECKPOINT,
    CONFIG,
    Release,
    Source,
    asset_of,
    checkpoint_of,
    from_extraction,
    legacy_checkpoint_of,
    load_file,
    names_in,
    read_json,
    request,
    sha256,
    sources_of,
)

from sam3d_gguf.convert.release import convert_body, convert_mhr
from sam3d_gguf.convert.verify import verify
from sam3d_gguf.schemas.documents import validate

ORACLE = expected_tensors((facts.TINY / "expected-tensors.json").read_text())
BODY, MHR = ORACLE[CHECKPOINT.name], ORACLE[ASSET.name]
MHR_SOURCES = {name: source for name, _, _, source, _ in facts.rows("mhr-native.txt")}
SKELETON = facts.mhr_skeleton()
COMPONENTS = {
    "body.dinov3_backbone": "body-dinov3-backbone.gguf",
    "body.pose_branch": "body-pose-branch.gguf",
    "mhr.lod1": "mhr-lod1.gguf",
}


def digest(values: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def equals(found: Any, kind: str, torch: Expected, precision: str) -> bool:
    """Whether a tensor of a GGUF file is what torch reads, bit for bit."""
    if torch.dtype == "BF16":
        wanted = ("BF16", torch.sha256) if precision == "source" else ("F32", torch.f32_sha256)
        return (kind, digest(found)) == wanted
    if torch.dtype == "I64":
        return (kind, digest(found.astype(np.int64))) == ("I32", torch.sha256)
    return (kind, digest(found)) == (torch.dtype, torch.sha256)


def read_by_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and tensors of a file, by the `gguf` package."""
    reader: Any = gguf.GGUFReader(path)
    metadata = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def check_tensors(path: Path, expected: dict[str, Expected], precision: str) -> None:
    _, tensors = read_by_gguf(path)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        shape = tuple(int(size) for size in reversed(tensor.shape))
        assert shape == expected[name].shape, name
        assert equals(tensor.data, tensor.tensor_type.name, expected[name], precision), name


@pytest.mark.parametrize("precision", ["source", "f32"])
def test_the_gguf_package_reads_what_torch_reads(
    single: Release, single_f32: Release, precision: str
) -> None:
    release = single if precision == "source" else single_f32

    check_tensors(release.body, BODY, precision)
    mhr = {name: MHR[source] for name, source in MHR_SOURCES.items()}
    check_tensors(release.mhr, mhr, precision)


def test_the_components_hold_what_torch_reads(components: Release) -> None:
    prefix = "backbone.encoder."
    backbone = read_native(components.folder / COMPONENTS["body.dinov3_backbone"])
    expected = {n.removeprefix(prefix): t for n, t in BODY.items() if n.startswith(prefix)}
    assert backbone.tensors.keys() == expected.keys() | {"mask_token"}
    assert backbone.tensors["mask_token"].shape == (1, expected["cls_token"].shape[-1])
    assert not backbone.read("mask_token").any()
    for name, torch in expected.items():
        assert equals(backbone.read(name), backbone.tensors[name].dtype, torch, "f32"), name

    mhr = read_native(components.folder / COMPONENTS["mhr.lod1"])
    assert mhr.tensors.keys() == MHR_SOURCES.keys()
    for name, source in MHR_SOURCES.items():
        assert equals(mhr.read(name), mhr.tensors[name].dtype, MHR[source], "f32"), name

    pose = read_native(components.folder / COMPONENTS["body.pose_branch"])
    for name, tensor in pose.tensors.items():
        assert equals(pose.read(name), tensor.dtype, BODY[name], "f32"), name


def test_the_components_have_the_native_metadata_with_their_own_values(components: Release) -> None:
    checkpoint, config, asset = sha256(CHECKPOINT), sha256(CONFIG), sha256(ASSET)
    changed: dict[str, dict[str, str]] = {
        "body.dinov3_backbone": {
            "sam3d.source.checkpoint_sha256": checkpoint,
            "sam3d.source.config_sha256": config,
            "sam3d.source.safetensors_sha256": sha256(
                components.extraction / "backbone.safetensors"
            ),
            "sam3d.preprocessing": "body_rgb_crop_v1;128x128;ImageNet_mean_std",
        },
        "body.pose_branch": {
            "sam3d.source.checkpoint_sha256": checkpoint,
            "sam3d.source.config_sha256": config,
            "sam3d.source.safetensors_sha256": sha256(components.extraction / "other.safetensors"),
            "sam3d.decoder": "depth=3;dim=48;heads=4;head_dim=8;mlp=56;"
            "repeat_pe=1;twoway=0;norm_eps=1e-6",
            "sam3d.required_mhr_sha256": asset,
        },
        "mhr.lod1": {
            "sam3d.source.asset_sha256": asset,
            "sam3d.source.safetensors_sha256": sha256(
                components.mhr_extraction / "mhr.safetensors"
            ),
            "sam3d.joint_names": ",".join(SKELETON["names"]),
            "sam3d.parameter_names": ",".join(f"parameter_{i:03}" for i in range(249)),
        },
    }
    for name, metadata in facts.native_metadata().items():
        file = read_native(components.folder / COMPONENTS[name])

        assert file.metadata == metadata | changed[name], name


def test_the_manifest_of_components_says_that_they_do_not_conform(components: Release) -> None:
    release = components.document()["release"]

    assert release == {
        "model": "body",
        "layout": "components",
        "precision": "f32",
        "status": "complete",
        "origin": "unpinned",
        "native_contract": "does not conform: other dimensions",
    }


def test_the_single_body_file_describes_itself(single: Release) -> None:
    metadata, _ = read_by_gguf(single.body)

    assert metadata["general.architecture"] == "sam3d.body"
    assert metadata["general.file_type"] == gguf.LlamaFileType.MOSTLY_BF16
    assert metadata["sam3d.origin"] == "unpinned"
    assert "unpinned" in metadata["general.name"]
    assert "general.license" not in metadata
    assert metadata["sam3d.source.checkpoint.sha256"] == sha256(CHECKPOINT)
    assert metadata["sam3d.source.checkpoint.bytes"] == CHECKPOINT.stat().st_size
    assert metadata["sam3d.source.config.sha256"] == sha256(CONFIG)
    for product in ("backbone", "other"):
        stated = metadata[f"sam3d.source.safetensors.{product}_sha256"]
        assert stated == sha256(single.extraction / f"{product}.safetensors")
    # The tiny model's sizes, as its README lists them.
    assert metadata["sam3d.body.image_width"] == 128
    assert metadata["sam3d.body.backbone.embedding_length"] == 64
    assert metadata["sam3d.body.backbone.block_count"] == 3
    assert metadata["sam3d.body.backbone.attention.head_count"] == 4
    assert metadata["sam3d.body.backbone.feed_forward_length"] == 256
    assert metadata["sam3d.body.decoder.embedding_length"] == 48
    assert metadata["sam3d.body.vertex_count"] == 90
    assert metadata["sam3d.body.face_count"] == 176


def test_the_single_mhr_file_describes_itself(single: Release) -> None:
    metadata, _ = read_by_gguf(single.mhr)

    assert metadata["general.architecture"] == "sam3d.mhr.lod1"
    assert metadata["general.file_type"] == gguf.LlamaFileType.ALL_F32
    assert metadata["sam3d.source.asset.sha256"] == sha256(ASSET)
    assert metadata["sam3d.mhr.joint_names"] == SKELETON["names"]
    assert metadata["sam3d.mhr.prefix_sizes"] == SKELETON["prefix_sizes"]
    assert metadata["sam3d.mhr.parameter_names"][:2] == ["parameter_000", "parameter_001"]
    assert len(metadata["sam3d.mhr.parameter_names"]) == 249
    assert metadata["sam3d.mhr.numbered"] == ["parameter_names"]


def test_the_files_carry_the_hash_of_each_tensor(single: Release) -> None:
    for path in (single.body, single.mhr):
        metadata, tensors = read_by_gguf(path)
        own = [digest(tensors[name].data) for name in sorted(tensors)]

        assert metadata["sam3d.tensor_sha256"] == own


def test_the_body_file_names_its_companion_by_digests(single: Release) -> None:
    body, _ = read_by_gguf(single.body)
    mhr, _ = read_by_gguf(single.mhr)

    assert body["sam3d.companion.mhr.architecture"] == "sam3d.mhr.lod1"
    for digest_name in ("content_sha256", "semantics_sha256"):
        assert body[f"sam3d.companion.mhr.{digest_name}"] == mhr[f"sam3d.{digest_name}"]


def test_precision_changes_neither_semantics_nor_the_mhr_file(
    single: Release, single_f32: Release
) -> None:
    source, f32 = read_by_gguf(single.body)[0], read_by_gguf(single_f32.body)[0]

    assert source["sam3d.semantics_sha256"] == f32["sam3d.semantics_sha256"]
    assert source["sam3d.content_sha256"] != f32["sam3d.content_sha256"]
    assert f32["general.file_type"] == gguf.LlamaFileType.ALL_F32


@pytest.mark.parametrize("layout", ["single", "single_f32", "components"])
def test_the_manifest_describes_every_file_and_tensor(
    layout: str, request: pytest.FixtureRequest
) -> None:
    release: Release = request.getfixturevalue(layout)
    document = release.document()

    validate(document, "manifest", where="manifest")
    assert names_in(release.folder) == sorted(
        [*(file["name"] for file in document["files"]), "manifest.json"]
    )
    for file in document["files"]:
        path = release.folder / file["name"]
        assert (file["bytes"], file["sha256"]) == (path.stat().st_size, sha256(path))
        _, tensors = read_by_gguf(path)
        assert [t["name"] for t in file["tensors"]] == sorted(tensors)
        for entry in file["tensors"]:
            tensor = tensors[entry["name"]]
            assert entry["sha256"] == digest(tensor.data)
            assert entry["type"] == tensor.tensor_type.name
            assert entry["shape"] == [int(size) for size in reversed(tensor.shape)]
    assert {s["role"]: s["sha256"] for s in document["sources"]} == {
        "body.checkpoint": sha256(CHECKPOINT),
        "body.config": sha256(CONFIG),
        "mhr.asset": sha256(ASSET),
    }
    assert {s["file"]: s["sha256"] for s in document["safetensors"]} == {
        "backbone.safetensors": sha256(release.extraction / "backbone.safetensors"),
        "other.safetensors": sha256(release.extraction / "other.safetensors"),
        "mhr.safetensors": sha256(release.mhr_extraction / "mhr.safetensors"),
    }
    assert any("parameter_names" in note for note in document["notes"])


@pytest.mark.parametrize("layout", ["single", "single_f32", "components"])
def test_the_release_verifies(layout: str, request: pytest.FixtureRequest) -> None:
    release: Release = request.getfixturevalue(layout)

    result = verify([release.manifest])

    assert result.problems == []
    assert [file.problems for file in result.files] == [[] for _ in result.files]
    assert result.is_good
    assert "complete, unpinned" in result.verdict


def test_what_the_files_leave_out_is_recorded(single: Release) -> None:
    left_out = {item["what"]: item["reason"] for item in single.document()["left_out"]}
    unused = MHR.keys() - MHR_SOURCES.values()

    assert unused <= left_out.keys()
    assert all(left_out[name] for name in unused)


# The same bytes, however they are made


def same_files(release: Release, folder: Path) -> None:
    assert names_in(folder) == names_in(release.folder)
    for name in names_in(folder):
        assert (folder / name).read_bytes() == (release.folder / name).read_bytes(), name


def test_from_an_extraction_the_same_bytes_come(single: Release, tmp_path: Path) -> None:
    convert_body(from_extraction(single.extraction, tmp_path / "body.gguf"))

    same_files(single, tmp_path)


def test_from_an_extraction_checked_against_its_source_the_same_bytes_come(
    single: Release, tmp_path: Path
) -> None:
    again = from_extraction(
        single.extraction, tmp_path / "body.gguf", checkpoint=CHECKPOINT, mhr=ASSET
    )

    convert_body(again)

    same_files(single, tmp_path)


def test_components_from_legacy_files_are_the_same_bytes(
    components: Release, tmp_path: Path
) -> None:
    convert_body(request(tmp_path / "other name", layout="components"))

    same_files(components, tmp_path / "other name")


def test_mhr_alone_is_the_file_that_goes_with_a_body(single: Release, tmp_path: Path) -> None:
    convert_mhr(request(tmp_path / "mhr.gguf", checkpoint=ASSET, mhr=None))

    assert (tmp_path / "mhr.gguf").read_bytes() == single.mhr.read_bytes()
    result = verify([tmp_path / "manifest.json"])
    assert result.is_good
    assert "complete" in result.verdict


def test_a_body_alone_is_incomplete(single: Release, tmp_path: Path) -> None:
    convert_body(from_extraction(single.extraction, tmp_path / "body.gguf", mhr=None))

    result = verify([tmp_path / "manifest.json"])
    assert result.is_good
    assert "incomplete, unpinned" in result.verdict


# Other forms of the same checkpoint


def test_the_form_of_a_checkpoint_does_not_matter(single: Release, tmp_path: Path) -> None:
    tensors = sources_of(CHECKPOINT)
    forms = {
        "state_dict": checkpoint_of(tensors, {"epoch": 3}, wrapper="state_dict"),
        "model": checkpoint_of(tensors, {"optimizer": {"lr": 0.1}}, wrapper="model"),
        "legacy": legacy_checkpoint_of(tensors),
        "reversed": checkpoint_of(dict(reversed(tensors.items()))),
    }
    expected = single.files()["body"]["content_sha256"]

    for name, data in forms.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.ckpt").write_bytes(data)
        manifest = convert_body(
            request(folder / "body.gguf", checkpoint=folder / "model.ckpt", config=CONFIG, mhr=None)
        )
        assert manifest.files[0].content_sha256 == expected, name
        check_tensors(folder / "body.gguf", BODY, "source")


def test_shared_storages_are_written_twice_and_recorded(tmp_path: Path) -> None:
    """The official file has them: the hand's faces and keypoint mapping are the body's."""
    tensors = sources_of(CHECKPOINT)
    shared = {
        f"head_pose_hand.{name}": f"head_pose.{name}" for name in ("faces", "keypoint_mapping")
    }
    assert all(tensors[name].shape == tensors[other].shape for name, other in shared.items())
    kept = {name: source for name, source in tensors.items() if name not in shared}
    checkpoint, out = tmp_path / "model.ckpt", tmp_path / "out"
    checkpoint.write_bytes(checkpoint_of(kept, shared=shared))
    out.mkdir()

    convert_body(
        request(
            out / "body.gguf",
            checkpoint=checkpoint,
            config=CONFIG,
            mhr=None,
            keep_safetensors=out / "kept",
        )
    )

    expected = BODY | {name: BODY[other] for name, other in shared.items()}
    check_tensors(out / "body.gguf", expected, "source")
    safetensors = load_file(out / "kept" / "other.safetensors")
    for name, other in shared.items():
        assert digest(safetensors[name]) == BODY[other].sha256
    report = read_json(out / "kept" / "extraction.json")
    assert sorted(map(sorted, report["shared_storages"])) == [
        sorted(pair) for pair in sorted(shared.items())
    ]


def test_tensors_without_elements_and_of_one_are_left_out_of_mhr(tmp_path: Path) -> None:
    """The official asset has such limits, which inference does not use."""
    limits = {
        "character_torch.parameter_limits.empty": Source("F32", (0,), b""),
        "character_torch.parameter_limits.single": Source("F32", (1, 1), bytes(4)),
        "character_torch.parameter_limits.scalar": Source("I64", (), bytes(8)),
    }
    asset, out = tmp_path / "mhr_model.pt", tmp_path / "out"
    asset.write_bytes(asset_of(sources_of(ASSET) | limits, {}))
    out.mkdir()

    manifest = convert_mhr(
        request(out / "mhr.gguf", checkpoint=asset, mhr=None, keep_safetensors=out / "kept")
    )

    mhr = {name: MHR[source] for name, source in MHR_SOURCES.items()}
    check_tensors(out / "mhr.gguf", mhr, "source")
    assert limits.keys() <= {item.what for item in manifest.left_out}
    found = load_file(out / "kept" / "mhr.safetensors")
    assert {name: found[name].shape for name in limits} == {n: s.shape for n, s in limits.items()}
    assert verify([out / "manifest.json"]).is_good
