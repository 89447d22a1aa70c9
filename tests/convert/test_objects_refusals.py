"""What a conversion of SAM 3D Objects refuses: by a sentence, and with nothing left behind."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forged_gguf import Gguf
from objects_facts import PARTS, TINY
from pinned import pin
from tiny_objects import MOGE_CONFIG, Tensors, copy, edit, moge, request, rewrite
from tiny_release import Source, all_text, names_in
from typer.testing import CliRunner

from sam3d_gguf.cli import convert as convert_command
from sam3d_gguf.convert.gguf_format import boolean, float32, uint32
from sam3d_gguf.convert.objects import convert_objects, extract_objects
from sam3d_gguf.convert.verify import verify
from sam3d_gguf.manifests.known_answers import load_known_answers
from sam3d_gguf.manifests.sources import load_sources
from sam3d_gguf.schemas.errors import ContractError, InputError, OutputError, Sam3dError

PREFIX = "_base_models.generator.reverse_fn.backbone."


def refused(folder: Path, *parts: str, **changes: Any) -> str:
    """Why a conversion of parts of a folder is refused; it leaves nothing behind."""
    out = folder.parent / "out"
    before = names_in(folder.parent)
    with pytest.raises(Sam3dError) as caught:
        convert_objects(request(out, checkpoint_dir=folder, parts=parts or None, **changes))
    assert names_in(folder.parent) == before
    return str(caught.value)


# Tensors


def renamed(tensors: Tensors) -> None:
    tensors["input_layer.kernel"] = tensors.pop("input_layer.weight")


def missing(tensors: Tensors) -> None:
    del tensors["blocks.6.norm2.bias"]


def extra(tensors: Tensors) -> None:
    tensors["blocks.8.norm1.weight"] = tensors["blocks.7.norm1.weight"]


def retyped(tensors: Tensors) -> None:
    size = tensors["blocks.0.conv1.bias"].shape[0]
    tensors["blocks.0.conv1.bias"] = Source("F32", (size,), bytes(4 * size))


def reshaped(tensors: Tensors) -> None:
    before = tensors["blocks.0.norm1.weight"]
    tensors["blocks.0.norm1.weight"] = Source("F32", (1, *before.shape), before.data)


def infinite(tensors: Tensors) -> None:
    before = tensors["out_layer.0.weight"]
    data = struct.pack("<f", float("inf")) + before.data[4:]
    tensors["out_layer.0.weight"] = Source("F32", before.shape, data)


def not_a_number(tensors: Tensors) -> None:
    before = tensors["blocks.0.conv1.weight"]
    data = before.data[:4] + struct.pack("<H", 0x7E00) + before.data[6:]
    tensors["blocks.0.conv1.weight"] = Source("F16", before.shape, data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (renamed, "input_layer.kernel"),
        (missing, "blocks.6.norm2.bias"),
        (extra, "blocks.8.norm1.weight"),
        (retyped, "blocks.0.conv1.bias"),
        (reshaped, "blocks.0.norm1.weight"),
        (infinite, "out_layer.0.weight: the value inf at [0] is not finite"),
        (not_a_number, "blocks.0.conv1.weight: the value nan at [0, 0, 0, 0, 2] is not finite"),
    ],
)
def test_tensors(tmp_path: Path, change: Callable[[Tensors], None], words: str) -> None:
    folder = copy(tmp_path / "in", "ss_decoder")
    rewrite(folder, "ss_decoder", change)
    assert words in refused(folder, "ss_decoder")


def test_the_bundled_decoder_is_checked_though_it_is_left_out(tmp_path: Path) -> None:
    folder = copy(tmp_path / "in", "ss_generator")

    def change(tensors: Tensors) -> None:
        before = tensors["_base_models.decoder.blocks.0.conv1.weight"]
        reshaped = Source("F32", (*before.shape[:2], 27), before.data)
        tensors["_base_models.decoder.blocks.0.conv1.weight"] = reshaped
        del tensors["_base_models.decoder.blocks.1.norm1.bias"]
        tensors["_base_models.decoder.more"] = before

    rewrite(folder, "ss_generator", change)
    message = refused(folder, "ss_generator")
    for name in ("blocks.0.conv1.weight", "blocks.1.norm1.bias", "more"):
        assert f"_base_models.decoder.{name}" in message


def test_a_gaussian_decoder_in_the_place_of_the_other(tmp_path: Path) -> None:
    folder = copy(tmp_path / "in", "slat_decoder_gs", "slat_decoder_gs_4")
    for suffix in ("ckpt", "yaml"):
        shutil.copy(folder / f"slat_decoder_gs_4.{suffix}", folder / f"slat_decoder_gs.{suffix}")
    assert "GAUSSIANS = 32" in refused(folder, "slat_decoder_gs")


# Configurations


@pytest.mark.parametrize(
    ("part", "old", "new", "words"),
    [
        ("ss_generator", "num_blocks: 2", "num_blocks: 3", f"{PREFIX}blocks.2."),
        ("ss_generator", "num_blocks: 2", "num_blocks: 1", f"{PREFIX}blocks.1."),
        ("ss_generator", "num_heads: 4", "num_heads: 8", "_rms_norm."),
        ("ss_generator", "num_heads: 4", "num_heads: 5", "HEAD = C/H"),
        ("ss_generator", "mlp_ratio: 4\n          model", "mlp_ratio: 2\n          model", ".mlp.0.weight"),
        ("ss_generator", "cond_channels: 48", "cond_channels: 50", "COND = E"),
        ("ss_generator", "embed_dim: 48", "embed_dim: 49", "ENCODER_HEAD = E/ENCODER_HEADS"),
        ("ss_generator", "model_channels: 64", "model_channels: 0", "refused"),
        ("ss_generator", "cfg_modalities:\n      - shape", "cfg_modalities: &a\n      - shape",
         "anchors and aliases"),
        ("ss_generator", "freeze: true", "freeze: !!python/name:os.system", "tags are not"),
        ("ss_generator", "_target_: sam3d_objects.config.utils.make_dict", "_target_: os.system",
         "make_dict"),
        ("slat_generator", "input_size: 56", "input_size: 42", "values that must be equal"),
        ("slat_generator", "use_pos_embedding: learned", "use_pos_embedding: random", "learned"),
        ("slat_generator", "use_fp16: false", "use_fp16: false\n          use_fp16: true", "twice"),
        ("ss_decoder", "- 12", "- 13", "reshaped"),
        ("ss_decoder", "num_res_blocks: 2", "num_res_blocks: 3", "num_res_blocks"),
        ("slat_decoder_gs", "num_heads: 4", "num_heads: 4\nqk_rms_norm: true", "qk_rms_norm"),
        ("slat_decoder_mesh", "mlp_ratio: 0.125", "mlp_ratio: 4", "mlp.mlp.0.weight"),
        ("slat_decoder_mesh", "mlp_ratio: 0.125", "mlp_ratio: .nan", "NaN is not supported"),
        ("slat_decoder_mesh", "device: cpu", "device: /dev/null", "device"),
    ],
)  # fmt: skip
def test_configurations(tmp_path: Path, part: str, old: str, new: str, words: str) -> None:
    folder = copy(tmp_path / "in", part)
    edit(folder / f"{part}.yaml", old, new)
    assert words in refused(folder, part)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("slat_rescale_t: 1", "slat_rescale_t: 3", "slat_rescale_t"),
        ("slat_cfg_strength: 1", "slat_cfg_strength: 5", "slat_cfg_strength"),
        ("- 2.37326008", "- 2.37326009", "slat_std"),
        ("pad_size: 1.0", "pad_size: 1.0\nss_inference_steps: 50", "ss_inference_steps"),
        ("pose_decoder_name: ScaleShiftInvariant", "pose_decoder_name: Identity", "ScaleShift"),
        ("_target_: moge.model.v1.MoGeModel.from_pretrained", "_target_: os.system", "moge.model"),
        ("ss_decoder_ckpt_path: ss_decoder.ckpt", "ss_decoder_ckpt_path: other.ckpt", "ss_decoder"),
    ],
)
def test_pipelines(tmp_path: Path, old: str, new: str, words: str) -> None:
    folder = copy(tmp_path / "in", "ss_decoder")
    edit(folder / "pipeline.yaml", old, new)
    assert words in refused(folder, "ss_decoder")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"encoder": "dinov2_vitb14"}, "encoder"),
        ({"remap_output": "linear"}, "remap_output"),
        ({"dim_upsample": [32, 32, 48]}, "head.upsample_blocks.2"),
        ({"more": 1}, "more"),
        ({"intermediate_layers": [1, 2, 3, 4]}, "intermediate_layers"),
        ({"trained_area_range": ["a", 2]}, "num_tokens_range"),
        ({"split_head": False}, "split_head"),
        ({"dim_upsample": [32, 24, 32]}, "2*U1/32"),
    ],
)
def test_configurations_of_the_depth_model(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    folder = copy(tmp_path / "in", "ss_decoder")
    model = moge(folder / "model.pt", {**MOGE_CONFIG, **change})
    assert words in refused(folder, "moge", moge=model)


def test_a_depth_model_without_configuration(tmp_path: Path) -> None:
    folder = copy(tmp_path / "in", "ss_decoder")
    shutil.copy(folder / "ss_decoder.ckpt", folder / "model.pt")
    message = refused(folder, "moge", moge=folder / "model.pt")
    assert "model_config: there is none beside the tensors" in message


# Files and parts


@pytest.mark.parametrize("name", ["ss_decoder.ckpt", "ss_decoder.yaml", "pipeline.yaml"])
def test_a_file_is_missing(tmp_path: Path, name: str) -> None:
    folder = copy(tmp_path / "in")
    (folder / name).unlink()
    assert name in refused(folder)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    folder = copy(tmp_path / "in", "ss_decoder")
    (folder / "ss_decoder.ckpt").write_bytes(b"GGUF" + bytes(64))
    assert "is a GGUF file" in refused(folder, "ss_decoder")


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (("ss_encoder",), "'ss_encoder' is unknown"),
        (("ss_decoder", "ss_decoder"), "is named twice"),
        ((), "no part is named"),
        (("",), "'' is unknown"),
        (("moge",), "needs its file"),
        (("objects.ss_decoder",), "is unknown"),
    ],
)
def test_parts(tmp_path: Path, parts: tuple[str, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        convert_objects(request(tmp_path / "out", parts=parts))


def test_a_depth_model_that_is_not_asked_for(tmp_path: Path) -> None:
    model = moge(tmp_path / "model.pt")
    with pytest.raises(InputError, match="its file needs the part"):
        convert_objects(request(tmp_path / "out", parts=("ss_decoder",), moge=model))


def test_an_extraction_of_which_a_part_fails(tmp_path: Path) -> None:
    folder = copy(tmp_path / "in", "ss_decoder", "slat_decoder_gs")
    (folder / "slat_decoder_gs.ckpt").write_bytes(
        (folder / "slat_decoder_gs.ckpt").read_bytes().replace(b"FloatStorage", b"CloatStorage")
    )
    parts = ("slat_decoder_gs", "ss_decoder")
    with pytest.raises(InputError):
        extract_objects(request(tmp_path / "out", checkpoint_dir=folder, parts=parts))
    assert names_in(tmp_path) == ["in"]


def test_a_folder_that_exists(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputError):
        convert_objects(request(tmp_path / "out", parts=("ss_decoder",)))
    assert names_in(tmp_path / "out") == []


def test_unpinned_files(tmp_path: Path) -> None:
    folder = copy(tmp_path / "in", "ss_decoder")
    message = refused(folder, "ss_decoder", allow_unpinned=False)
    assert "this is not a pinned objects.ss_decoder.checkpoint" in message
    model = moge(folder / "model.pt")
    message = refused(folder, "moge", moge=model, allow_unpinned=False)
    assert "this is not a pinned moge.checkpoint" in message
    assert "it knows none" in message


def test_the_command_exits_with_2(tmp_path: Path) -> None:
    options = ["--checkpoint-dir", str(TINY), "--out", str(tmp_path / "out"), "--parts", "a,b"]
    done = CliRunner().invoke(convert_command.app, ["objects", *options])
    assert done.exit_code == 2
    assert "the part 'a' is unknown" in done.stderr


def test_parts_of_other_sizes_do_not_belong_together(tmp_path: Path) -> None:
    """The second decoder is of another grid than the first: one pipeline can't run both."""
    folder = copy(tmp_path / "in", "slat_decoder_gs", "slat_decoder_gs_4")
    edit(folder / "slat_decoder_gs_4.yaml", "resolution: 64", "resolution: 32")
    message = refused(folder, "slat_decoder_gs", "slat_decoder_gs_4")
    assert "the parts don't belong together: RESOLUTION is 64" in message


# Pins


def test_a_pinned_source_must_have_the_official_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins = {"objects.pipeline.config": TINY / "pipeline.yaml"}
    for name in PARTS:
        pins[f"objects.{name}.checkpoint"] = TINY / f"{name}.ckpt"
        pins[f"objects.{name}.config"] = TINY / f"{name}.yaml"
    pin(monkeypatch, pins)
    try:
        with pytest.raises(ContractError, match="reshaped"):
            convert_objects(request(tmp_path / "out", parts=("ss_decoder",), allow_unpinned=False))
    finally:
        load_sources.cache_clear()
        load_known_answers.cache_clear()


# Files that lie about themselves


@pytest.mark.parametrize(
    ("part", "key", "value", "words"),
    [
        ("ss_generator", "sampler.steps", uint32(50), "is not what the contract"),
        ("ss_generator", "sampler.rescale_t", float32(1), "is not what the contract"),
        ("ss_generator", "flow.norm1_epsilon", float32(1e-5), "is not what the contract"),
        ("ss_generator", "flow.attention.head_count", uint32(8), "reshaped"),
        ("ss_generator", "image_encoder.attention.head_count", uint32(5), "ENCODER_HEAD"),
        ("ss_generator", "image_encoder.shared", boolean(True), "extra"),
        ("ss_decoder", "more", uint32(1), "is unknown"),
        ("ss_decoder", "latent_channels", None, "latent_channels"),
        ("slat_decoder_mesh", "attention.head_count", None, "unknown"),
        ("slat_decoder_mesh", "attention.window_size", uint32(4), "WINDOW"),
    ],
)
def test_gguf_files_that_lie(
    objects: Path, tmp_path: Path, part: str, key: str, value: Any, words: str
) -> None:
    path = tmp_path / f"{part}.gguf"
    forged = Gguf.read(objects / path.name)
    name = f"sam3d.objects.{part}.{key}"
    if value is None:
        del forged.metadata[name]
    else:
        forged.metadata[name] = value
    forged.fit_digests()
    forged.write(path)
    (report,) = verify([path]).files
    assert words in all_text(report.problems)


def test_a_gguf_file_with_a_kernel_in_the_sources_order(objects: Path, tmp_path: Path) -> None:
    """Only the source can tell: the shape and the digests are right."""
    path = tmp_path / "release" / "ss_decoder.gguf"
    shutil.copytree(objects, path.parent)
    forged = Gguf.read(path)
    name = "blocks.0.conv1.weight"
    values = forged.values(name)
    forged.replace(name, values.transpose(0, 2, 1).reshape(values.shape).copy())
    forged.fit_digests()
    forged.write(path)
    done = verify([path], sources=[TINY / "ss_decoder.ckpt"])
    (report,) = done.files
    assert f"the tensor {name} has SHA-256" in all_text(report.problems)


def test_encoders_that_are_said_to_be_equal_and_are_not(objects: Path, tmp_path: Path) -> None:
    path = tmp_path / "slat_generator.gguf"
    forged = Gguf.read(objects / path.name)
    for name in list(forged.tensors):
        if ".module_list.1.backbone." in name:
            del forged.tensors[name]
    forged.metadata["sam3d.objects.slat_generator.image_encoder.shared"] = boolean(True)
    forged.fit_digests()
    forged.write(path)
    assert verify([path]).is_good  # nothing but the source can tell
    done = verify([path], sources=[TINY / "slat_generator.ckpt"])
    (report,) = done.files
    assert "equal tensors are not those that are stored once" in all_text(report.problems)


def test_a_source_of_no_file_here(objects: Path) -> None:
    done = verify([objects / "ss_decoder.gguf"], sources=[TINY / "slat_decoder_gs.ckpt"])
    assert "no file here comes from" in all_text(done.problems)


def test_a_part_is_missing_from_the_release(objects: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(objects, folder)
    (folder / "slat_decoder_gs.gguf").unlink()
    done = verify([folder / "manifest.json"])
    assert not done.is_good
    document = json.loads((folder / "manifest.json").read_text())
    document["files"] = [f for f in document["files"] if f["role"] != "objects.slat_decoder_gs"]
    (folder / "manifest.json").write_text(json.dumps(document))
    done = verify([folder / "manifest.json"])
    problems = all_text(problem for file in done.files for problem in file.problems)
    assert "its companion objects.slat_decoder_gs is not in the release" in problems


def test_what_is_no_folder_of_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for folder in (tmp_path / "none", tmp_path / "file"):
        assert "this is no folder; expected the folder of the checkpoints" in refused(folder)
