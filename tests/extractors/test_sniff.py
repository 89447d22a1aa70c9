"""A file is named for what it is, whatever its name says, and the way out is told."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from checkpoint_bytes import Entry, legacy_checkpoint, module, script_archive, tensor, zip_archive
from checkpoint_bytes import zip_checkpoint as zip_form
from memory_source import memory_source

from sam3d_gguf.extractors.byte_source import ByteSource
from sam3d_gguf.extractors.checkpoint import read_archive
from sam3d_gguf.extractors.kinds import CHECKPOINTS, FileKind, require_kind
from sam3d_gguf.extractors.sniff import sniff
from sam3d_gguf.schemas.errors import InputError

TREE = {"weight": tensor()}
FIXTURES = Path(__file__).parents[1] / "fixtures" / "legacy"


def zipped(*names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as writer:
        for name in names:
            writer.writestr(name, b"content")
    return file.getvalue()


def tarred(*names: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as writer:
        for name in names:
            writer.addfile(tarfile.TarInfo(name), io.BytesIO())
    return file.getvalue()


def npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(3))
    return file.getvalue()


def npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, a=np.arange(3))
    return file.getvalue()


def safetensors() -> bytes:
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    return struct.pack("<Q", len(header)) + header + b"\0"


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1\n"
CASES: dict[str, tuple[bytes, FileKind]] = {
    "torch.save": (zip_form(TREE), FileKind.TORCH_ZIP),
    "any root folder": (zip_form(TREE, root="tmp6gmwgx4w"), FileKind.TORCH_ZIP),
    "torch.jit.save": (script_archive(module(TREE)), FileKind.TORCHSCRIPT),
    "torch.save, old": (legacy_checkpoint(TREE), FileKind.TORCH_LEGACY),
    "torch.save, protocol 0": (pickle.dumps(0x1950A86A20F9469CFC6C, 0), FileKind.TORCH_LEGACY),
    "torch.save, protocol 1": (pickle.dumps(0x1950A86A20F9469CFC6C, 1), FileKind.TORCH_LEGACY),
    "torch.save, protocol 4": (pickle.dumps(0x1950A86A20F9469CFC6C, 4), FileKind.TORCH_LEGACY),
    "torch.save, tar": (tarred("sys_info", "pickle", "tensors", "storages"), FileKind.TORCH_TAR),
    "old TorchScript": (zipped("m/version", "m/model.json"), FileKind.TORCHSCRIPT_OLD),
    "torch.package": (zipped("m/.data/version", "m/.data/extern_modules"), FileKind.TORCH_PACKAGE),
    "cut short": (zip_form(TREE)[:-9], FileKind.TORCH_ZIP_BROKEN),
    "cut in the first member": (zip_form(TREE)[:60], FileKind.TORCH_ZIP_BROKEN),
    "with a tail": (zip_form(TREE) + b"\n", FileKind.TORCH_ZIP_BROKEN),
    "hidden member": (
        zip_archive([Entry(b"a/data.pkl", b"N.", gap=b"hidden"), Entry(b"a/version", b"3")]),
        FileKind.TORCH_ZIP_BROKEN,
    ),
    "safetensors": (safetensors(), FileKind.SAFETENSORS),
    "GGUF": (b"GGUF\3\0\0\0" + bytes(16), FileKind.GGUF),
    "GGUF, big-endian": (b"GGUF\0\0\0\3" + bytes(16), FileKind.GGUF),
    "GGML": (b"tjgg\3\0\0\0", FileKind.GGML_OLD),
    "HTML": (b"<!DOCTYPE html>\n<html>", FileKind.HTML),
    "HTML in capitals behind blanks": (b"\r\n  <HTML><HEAD>", FileKind.HTML),
    "HTML with a byte order mark": (b"\xef\xbb\xbf<!doctype HTML>", FileKind.HTML),
    "XML error": (b'<?xml version="1.0"?><Error>', FileKind.HTML),
    "JSON error": (b'{"error": "Access to model is restricted"}', FileKind.JSON),
    "Git LFS pointer": (LFS, FileKind.LFS_POINTER),
    "npy": (npy(), FileKind.NPY),
    "npz": (npz(), FileKind.NPZ),
    "docx": (zipped("[Content_Types].xml", "word/document.xml"), FileKind.OFFICE),
    "keras": (zipped("metadata.json", "config.json", "model.weights.h5"), FileKind.KERAS),
    "folder of pictures": (zipped("pictures/1.png", "pictures/2.png"), FileKind.ZIP_OTHER),
    "zip of a checkpoint": (zipped("model.ckpt"), FileKind.ZIP_OTHER),
    "empty zip": (zipped(), FileKind.ZIP_OTHER),
    "zip cut short": (zipped("pictures/1.png")[:-9], FileKind.ZIP_BROKEN),
    "gzip": (gzip.compress(b"weights"), FileKind.GZIP),
    "bzip2": (bz2.compress(b"weights"), FileKind.BZIP2),
    "xz": (lzma.compress(b"weights"), FileKind.XZ),
    "zstd": (b"\x28\xb5\x2f\xfd\x24\0\1\0\0", FileKind.ZSTD),
    "7z": (b"7z\xbc\xaf\x27\x1c\0\4", FileKind.SEVEN_ZIP),
    "rar": (b"Rar!\x1a\7\1\0", FileKind.RAR),
    "tar": (tarred("model.ckpt"), FileKind.TAR),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(8), FileKind.HDF5),
    "ONNX": (b"\x08\x08\x12\x07pytorch\x1a\x052.1.0", FileKind.ONNX),
    "pickle": (pickle.dumps({"weight": [1.0]}), FileKind.PICKLE),
    "pickle, protocol 0": (pickle.dumps({"weight": [1.0]}, 0), FileKind.PICKLE),
    "pickle, protocol 1": (pickle.dumps({"weight": [1.0]}, 1), FileKind.PICKLE),
    "pickle of a call": (b"cos\nsystem\n(S'id'\ntR.", FileKind.PICKLE),
    "empty": (b"", FileKind.EMPTY),
    "zeros": (bytes(9_000), FileKind.ZEROS),
    "one zero": (b"\0", FileKind.ZEROS),
    "noise": (bytes(range(200, 256)), FileKind.UNKNOWN),
    "text": (b"weights go here\n", FileKind.UNKNOWN),
    "picture": (b"\x89PNG\r\n\x1a\n", FileKind.UNKNOWN),
    "start of a zip": (b"PK\3\4", FileKind.ZIP_BROKEN),
}


@pytest.mark.parametrize(("data", "kind"), CASES.values(), ids=CASES.keys())
def test_each_kind_is_told(data: bytes, kind: FileKind) -> None:
    with memory_source(data) as source:
        assert sniff(source) is kind


@pytest.mark.parametrize("name", json.loads((FIXTURES / "expected.json").read_text())["files"])
def test_what_torch_wrote_is_a_checkpoint(name: str) -> None:
    with memory_source((FIXTURES / name).read_bytes()) as source:
        assert sniff(source) in CHECKPOINTS


NOT_READ = {name: data for name, (data, kind) in CASES.items() if kind not in CHECKPOINTS}


@pytest.mark.parametrize("data", NOT_READ.values(), ids=NOT_READ.keys())
def test_other_kinds_are_refused_by_name(data: bytes) -> None:
    with memory_source(data, "model.ckpt") as source:
        kind = sniff(source)
        with pytest.raises(InputError) as refusal:
            read_archive(source)

    assert refusal.value.where.startswith("model.ckpt")
    assert refusal.value.action
    if kind is not FileKind.TORCH_ZIP_BROKEN:
        assert kind.label in refusal.value.what


def test_a_pointer_is_refused_with_the_command_that_fetches_it() -> None:
    with memory_source(LFS) as source, pytest.raises(InputError, match="git lfs pull"):
        read_archive(source)


def test_a_damaged_archive_is_refused_for_its_damage() -> None:
    with memory_source(zip_form(TREE)[:-9]) as source, pytest.raises(InputError, match="cut short"):
        read_archive(source)


def test_every_kind_has_words_and_a_way_out() -> None:
    labels = [kind.label for kind in FileKind]

    assert len(set(labels)) == len(labels)
    assert all(kind.action[0].isupper() and not kind.action.endswith(".") for kind in FileKind)


def test_a_refusal_lists_what_is_accepted() -> None:
    require_kind(FileKind.GGUF, {FileKind.GGUF}, "a.gguf")
    with pytest.raises(InputError, match=r"a\.gguf: is an HTML page; expected a GGUF file"):
        require_kind(FileKind.HTML, {FileKind.GGUF}, "a.gguf")


def test_a_folder_or_pipe_is_no_source(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    reader, writer = os.pipe()
    try:
        with pytest.raises(InputError, match="model: is a directory"):
            ByteSource(folder, "model")
        with pytest.raises(InputError, match="regular file"):
            ByteSource(reader)
    finally:
        for fd in (folder, reader, writer):
            os.close(fd)
