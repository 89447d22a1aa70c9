"""What `inspect` says of each kind of file, against what torch reads and the facts."""

from __future__ import annotations

from pathlib import Path

import facts
import numpy as np
import pytest
from checkpoint_bytes import (
    Call,
    Global,
    legacy_checkpoint,
    module,
    script_archive,
    storage,
    tensor,
    zip_checkpoint,
)
from oracle_program import expected_tensors
from pinned import pin
from tiny_release import ASSET, CHECKPOINT, CONFIG, Release, canonical_safetensors, sha256

from sam3d_gguf.convert.inspect import Inspection, inspect
from sam3d_gguf.manifests.known_answers import load_known_answers
from sam3d_gguf.manifests.sources import load_sources
from sam3d_gguf.schemas.documents import validate
from sam3d_gguf.schemas.errors import InputError
from sam3d_gguf.schemas.strict_json import dumps, loads

ORACLE = expected_tensors((facts.TINY / "expected-tensors.json").read_text())
ITEMSIZE = {"BF16": 2, "F32": 4, "I32": 4, "I64": 8, "BOOL": 1}
LEGACY = facts.FIXTURES / "legacy"


def rows(found: Inspection) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """The tensors by name."""
    return {t.name: (t.dtype, t.shape, t.bytes) for t in found.tensors}


@pytest.mark.parametrize(
    ("path", "kind", "wrapper"),
    [
        (CHECKPOINT, "a torch.save checkpoint (zip form)", "flat"),
        (ASSET, "a TorchScript archive", "module"),
    ],
)
def test_a_legacy_file(path: Path, kind: str, wrapper: str) -> None:
    found = inspect(path)

    assert (found.kind, found.wrapper, found.origin) == (kind, wrapper, "unpinned")
    assert (found.bytes, found.sha256) == (path.stat().st_size, sha256(path))
    assert rows(found) == {
        name: (t.dtype, t.shape, int(np.prod(t.shape)) * ITEMSIZE[t.dtype])
        for name, t in ORACLE[path.name].items()
    }


def test_what_else_a_torchscript_archive_holds() -> None:
    found = inspect(ASSET)

    assert found.metadata is not None
    names = facts.mhr_skeleton()["names"]
    assert found.metadata["character_torch.skeleton.joint_names"] == names
    assert found.code
    assert all(name.startswith("code/") for name in found.code)


@pytest.mark.parametrize("wrapper", ["state_dict", "model", "flat"])
def test_the_wrapper_of_a_checkpoint(tmp_path: Path, wrapper: str) -> None:
    tree = {"weight": tensor(), "bias": tensor((3,), (1,), 3)}
    path = tmp_path / "model.ckpt"
    path.write_bytes(zip_checkpoint(tree if wrapper == "flat" else {wrapper: tree, "epoch": 3}))

    found = inspect(path)

    assert found.wrapper == wrapper
    assert rows(found) == {"weight": ("F32", (2, 3), 24), "bias": ("F32", (3,), 12)}
    assert found.shared == (("bias", "weight"),)
    assert found.left_out == (() if wrapper == "flat" else (("epoch", "not a tensor: int 3"),))


def test_calls_that_are_not_made_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    hook = Call(Global("os", "system"), ("true",))
    path.write_bytes(zip_checkpoint({"state_dict": {"a": tensor()}, "hooks": [hook, hook]}))

    found = inspect(path)

    assert [(name, count) for _, name, count in found.inert] == [("os.system", 2)]
    assert "os.system" in found.globals
    assert "torch._utils._rebuild_tensor_v2" in found.globals


def test_the_form_before_torch_1_6(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    path.write_bytes(
        legacy_checkpoint({"a": tensor((6,), (1,), 0, storage("0", 6, "FloatStorage", None))})
    )

    found = inspect(path)

    assert found.kind == "a torch.save checkpoint (form before torch 1.6)"
    assert rows(found) == {"a": ("F32", (6,), 24)}


def test_attributes_that_json_does_not_have(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(script_archive(module({"a": tensor(), "limit": float("inf"), "none": None})))

    found = inspect(path)

    assert found.metadata == {"limit": "inf", "none": None}


@pytest.mark.parametrize("file", ["zip-sparse.pt", "zip-dtypes.pt", "zip-views.pt", "script.pt"])
def test_what_torch_wrote(file: str) -> None:
    found = inspect(LEGACY / file)

    assert found.tensors
    validate(loads(dumps(found.to_document()), where="report"), "inspection", where="report")


def test_a_safetensors_file(single: Release) -> None:
    path = single.extraction / "other.safetensors"

    found = inspect(path)

    assert found.kind == "a safetensors file"
    assert (found.sha256, found.origin) == (sha256(path), "unpinned")
    assert rows(found) == {
        name: (t.dtype, t.shape, int(np.prod(t.shape)) * ITEMSIZE[t.dtype])
        for name, t in ORACLE[CHECKPOINT.name].items()
        if not name.startswith("backbone.encoder.")
    }


def test_the_metadata_of_a_safetensors_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header = b'{"__metadata__":{"format":"pt"}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header)

    found = inspect(path)

    assert found.metadata == {"format": "pt"}
    assert found.tensors == ()


def test_a_gguf_file(single: Release) -> None:
    found = inspect(single.mhr)

    assert found.kind == "a GGUF file"
    assert found.metadata is not None
    assert found.metadata["general.architecture"] == "sam3d.mhr.lod1"
    assert found.metadata["sam3d.mhr.prefix_sizes"] == [65, 56, 62, 83]
    sources = {name: source for name, _, _, source, _ in facts.rows("mhr-native.txt")}
    expected = {name: ORACLE[ASSET.name][source].shape for name, source in sources.items()}
    assert {t.name: t.shape for t in found.tensors} == expected


@pytest.mark.parametrize("data", [b"", b"<html>", b"GGUF", b"\x80\x02}."])
def test_another_file_is_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)

    with pytest.raises(InputError):
        inspect(path)


def test_links_and_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(CHECKPOINT)
    for path in (tmp_path, tmp_path / "link", Path("/dev/zero")):
        with pytest.raises(InputError):
            inspect(path)


def test_pinned_is_what_this_tool_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        pin(monkeypatch, {"body.checkpoint": CHECKPOINT})
        assert inspect(CHECKPOINT).origin == "pinned"
        assert inspect(ASSET).origin == "unpinned"
    finally:
        load_sources.cache_clear()
        load_known_answers.cache_clear()


def test_reports_meet_their_schema(single: Release, tmp_path: Path) -> None:
    odd = tmp_path / "odd\n\x1b.safetensors"
    odd.write_bytes(canonical_safetensors({"a": np.zeros(0, np.float32)}))
    for path in (CHECKPOINT, ASSET, single.body, single.extraction / "backbone.safetensors", odd):
        document = loads(dumps(inspect(path).to_document()), where="report")
        validate(document, "inspection", where="report")


def test_a_configuration_is_no_model() -> None:
    with pytest.raises(InputError, match="of no kind that is known here"):
        inspect(CONFIG)
