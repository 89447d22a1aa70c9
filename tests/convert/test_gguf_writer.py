"""The GGUF writer: read back by the strict reader, and by the gguf package."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import gguf_bytes as raw
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_source import memory_source

from sam3d_gguf.convert.digests import content_sha256, semantics_sha256
from sam3d_gguf.convert.gguf_format import (
    BLOCKS,
    MAX_STRING_BYTES,
    GgmlType,
    GgufTensorSpec,
    GgufValue,
    ValueType,
    array,
    boolean,
    float32,
    string,
    uint32,
    uint64,
)
from sam3d_gguf.convert.gguf_reader import GgufFile, read_gguf
from sam3d_gguf.convert.gguf_writer import GgufLayout, GgufWriter
from sam3d_gguf.extractors.byte_source import ByteSource
from sam3d_gguf.extractors.hashing import ParallelHasher
from sam3d_gguf.extractors.publication import PublicationSet, SealedFile
from sam3d_gguf.schemas.errors import InputError

NOT_THE_PACKAGES = (GgmlType.Q2_0, GgmlType.Q8_1)
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


def file_bytes(layout: GgufLayout) -> bytes:
    """A file of the layout whose tensors are filled with 1, 2, 3 and so on."""
    data = bytearray(layout.header.ljust(layout.size, b"\0"))
    for number, tensor in enumerate(layout.tensors.values(), 1):
        data[tensor.offset : tensor.offset + tensor.nbytes] = bytes([number]) * tensor.nbytes
    return bytes(data)


def parse(data: bytes) -> GgufFile:
    with memory_source(data) as source:
        return read_gguf(source)


@given(raw.metadata | raw.metadata_with_nested_arrays, raw.specs)
def test_the_strict_reader_reads_back_what_was_laid_out(
    metadata: dict[str, GgufValue], specs: list[GgufTensorSpec]
) -> None:
    layout = GgufLayout.plan(metadata, specs)

    file = parse(file_bytes(layout))

    assert file.metadata == metadata
    assert file.tensors == layout.tensors
    assert {(t.name, t.shape, t.type) for t in file.tensors.values()} == {
        (spec.name, tuple(spec.shape), spec.type) for spec in specs
    }
    assert list(file.metadata) == sorted(metadata)
    assert list(file.tensors) == sorted(file.tensors)
    assert (file.data_offset, file.size) == (len(layout.header), layout.size)


@given(raw.metadata, raw.specs)
def test_the_gguf_package_reads_the_same(
    metadata: dict[str, GgufValue], specs: list[GgufTensorSpec]
) -> None:
    specs = [spec for spec in specs if spec.type not in NOT_THE_PACKAGES]
    layout = GgufLayout.plan(metadata, specs)
    fd = os.memfd_create("test")
    with os.fdopen(fd, "wb", buffering=0) as file:
        file.write(file_bytes(layout))
        reader = gguf.GGUFReader(f"/proc/self/fd/{fd}")
        fields = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {
            tensor.name: (
                tensor.tensor_type.value,
                tuple(reversed(tensor.shape.tolist())),
                tensor.data_offset,
                tensor.n_bytes,
                tensor.data.tobytes(),
            )
            for tensor in reader.tensors
        }

    assert {key: fields[key] for key in metadata} == {
        key: list(value.value) if isinstance(value.value, tuple) else value.value
        for key, value in metadata.items()
    }
    assert tensors == {
        t.name: (t.type.value, tuple(t.shape), t.offset, t.nbytes, bytes([number]) * t.nbytes)
        for number, t in enumerate(layout.tensors.values(), 1)
    }


def test_the_strict_reader_takes_what_the_gguf_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "sam3d.body")
    writer.add_uint32("sam3d.schema_version", 1)
    writer.add_array("sam3d.names", ["a", "b"])
    writer.add_float32("sam3d.epsilon", 1e-5)
    writer.add_tensor("w", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("b", np.arange(5, dtype=np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    data = path.read_bytes()
    file = parse(data)

    assert file.metadata == {
        "general.architecture": string("sam3d.body"),
        "sam3d.schema_version": uint32(1),
        "sam3d.names": array(ValueType.STRING, ["a", "b"]),
        "sam3d.epsilon": float32(1e-5),
    }
    weight = file.tensors["w"]
    assert (weight.shape, weight.type) == ((2, 3), GgmlType.F32)
    assert data[weight.offset :][: weight.nbytes] == np.arange(6, dtype="<f4").tobytes()


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    theirs = {kind.name: (kind.value, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    ours = {kind.name: (kind.value, *size) for kind, size in BLOCKS.items()}

    # The package still has Q8_1's two scales as F32; GGML stores them as F16.
    theirs["Q8_1"] = (9, 32, 2 * 2 + 32)
    # Newer than the package: a scale (F16) and 64 weights of 2 bits.
    theirs["Q2_0"] = (42, 64, 2 + 64 * 2 // 8)
    assert ours == theirs


@given(raw.metadata, raw.specs, st.data())
def test_a_changed_byte_is_refused_or_changes_what_is_read(
    metadata: dict[str, GgufValue], specs: list[GgufTensorSpec], draw: st.DataObject
) -> None:
    layout = GgufLayout.plan(metadata, specs)
    data = bytearray(file_bytes(layout))
    covered = {b for t in layout.tensors.values() for b in range(t.offset, t.offset + t.nbytes)}
    places = [place for place in range(len(data)) if place not in covered]
    place = draw.draw(st.sampled_from(places))
    data[place] ^= draw.draw(st.integers(1, 255))

    try:
        file = parse(bytes(data))
    except InputError:
        return

    # repr, because -0.0 == 0.0.
    assert repr((file.metadata, file.tensors)) != repr((layout.metadata, layout.tensors))


@given(raw.metadata, raw.specs, st.data())
def test_a_file_cut_anywhere_is_refused(
    metadata: dict[str, GgufValue], specs: list[GgufTensorSpec], draw: st.DataObject
) -> None:
    data = file_bytes(GgufLayout.plan(metadata, specs))

    with pytest.raises(InputError):
        parse(data[: draw.draw(st.integers(0, len(data) - 1))])


SPEC = GgufTensorSpec("a", (2,), GgmlType.F32)


@pytest.mark.parametrize(
    ("metadata", "specs", "rule"),
    [
        ({"A": uint32(1)}, [], "isn't a valid one"),
        ({"a" * 65536: uint32(1)}, [], "the key has 65536 bytes"),
        ({"a": uint32(1 << 32)}, [], "value 4294967296 is out of range; expected UINT32"),
        ({"a": uint32(-1)}, [], "out of range"),
        ({"a": uint64(1 << 64)}, [], "out of range"),
        ({"a": GgufValue(ValueType.UINT32, True)}, [], "a value is bool; expected UINT32"),
        ({"a": GgufValue(ValueType.UINT32, 1.0)}, [], "a value is float"),
        ({"a": GgufValue(ValueType.FLOAT32, 1)}, [], "a value is int; expected FLOAT32"),
        ({"a": GgufValue(ValueType.FLOAT32, 1e300)}, [], "out of range; expected FLOAT32"),
        ({"a": GgufValue(ValueType.BOOL, 1)}, [], "a value is int; expected BOOL"),
        ({"a": GgufValue(ValueType.STRING, 1)}, [], "a value is int; expected STRING"),
        ({"a": GgufValue(ValueType.UINT8, (1,))}, [], "a value is tuple; expected UINT8"),
        ({"a": string("\ud800")}, [], "lone surrogate"),
        ({"a": string("a" * (MAX_STRING_BYTES + 1))}, [], "string has 16777217 bytes"),
        ({"a": GgufValue(ValueType.ARRAY, (1,))}, [], "no item type"),
        ({"a": GgufValue(ValueType.ARRAY, 1, ValueType.UINT8)}, [], "no item type or no items"),
        ({"a": array(ValueType.UINT8, [256])}, [], "out of range"),
        ({"a": array(ValueType.ARRAY, [1])}, [], "a value is int; expected ARRAY"),
        (
            {"a": GgufValue(ValueType.ARRAY, (uint32(1),), ValueType.ARRAY)},
            [],
            "items aren't of its item type",
        ),
        ({"general.alignment": uint32(12)}, [], "general.alignment is 12"),
        ({"general.alignment": uint64(32)}, [], "is of type UINT64"),
        ({}, [SPEC, SPEC], "two tensors have this name"),
        ({}, [GgufTensorSpec("", (2,), GgmlType.F32)], "name has 0 bytes"),
        ({}, [GgufTensorSpec("é" * 32, (2,), GgmlType.F32)], "name has 64 bytes"),
        ({}, [GgufTensorSpec("\ud800", (2,), GgmlType.F32)], "isn't UTF-8"),
        ({}, [GgufTensorSpec("a", (), GgmlType.F32)], "has 0 dimensions"),
        ({}, [GgufTensorSpec("a", (1,) * 5, GgmlType.F32)], "has 5 dimensions"),
        ({}, [GgufTensorSpec("a", (0, 1), GgmlType.F32)], "dimension of 0"),
        ({}, [GgufTensorSpec("a", (1, -1), GgmlType.F32)], "dimension of -1"),
        ({}, [GgufTensorSpec("a", (1 << 62,), GgmlType.F32)], "too many elements"),
        ({}, [GgufTensorSpec("a", (33,), GgmlType.Q8_0)], "whole blocks of Q8_0"),
        (
            {},
            [GgufTensorSpec(name, (1 << 61,), GgmlType.I8) for name in "abcd"],
            "together are too large",
        ),
    ],
)
def test_what_the_format_does_not_take_is_refused(
    metadata: dict[str, GgufValue], specs: list[GgufTensorSpec], rule: str
) -> None:
    with pytest.raises(InputError, match=rule):
        GgufLayout.plan(metadata, specs)


def test_arrays_nested_too_deeply_are_refused() -> None:
    value = array(ValueType.UINT8, [1])
    for _ in range(4):
        value = GgufValue(ValueType.ARRAY, (value,), ValueType.ARRAY)

    with pytest.raises(InputError, match="nested too deeply"):
        GgufLayout.plan({"a": value}, [])


def test_the_alignment_asked_for_is_used() -> None:
    specs = [SPEC, GgufTensorSpec("b", (1,), GgmlType.I8)]
    layout = GgufLayout.plan({"general.alignment": uint32(128)}, specs)

    first, second = layout.tensors.values()
    assert (first.offset % 128, second.offset - first.offset, layout.size % 128) == (0, 128, 0)


def test_float32_holds_what_the_file_holds() -> None:
    assert float32(1e-5).value == float(np.float32(1e-5)) != 1e-5
    assert array(ValueType.FLOAT32, [1e-5]).value == (float(np.float32(1e-5)),)


# Writing to a publication.

SPECS = [
    GgufTensorSpec("norm.weight", (3,), GgmlType.F32),
    GgufTensorSpec("faces", (2, 3), GgmlType.I32),
    GgufTensorSpec("flag", (1,), GgmlType.I8),
]
DATA = {
    "norm.weight": np.array([1, 2, 3], "<f4").tobytes(),
    "faces": np.arange(6, dtype="<i4").tobytes(),
    "flag": b"\1",
}
METADATA = {"general.alignment": uint32(32), "sam3d.content_sha256": string("0" * 64)}


def write(path: Path, order: list[str], cut: int) -> tuple[SealedFile, str]:
    layout = GgufLayout.plan(METADATA, SPECS)
    with PublicationSet() as publications:
        publication = publications.create(path, layout.size)
        with GgufWriter(publication, layout) as writer:
            for name in order:
                writer.write(name, (DATA[name][:cut], memoryview(DATA[name])[cut:]))
            digest = content_sha256(layout.tensors, writer.sha256)
            sealed = writer.seal({"sam3d.content_sha256": string(digest)})
        publications.commit()
    return sealed, digest


@pytest.mark.parametrize("order", [sorted(DATA), sorted(DATA, reverse=True)])
def test_blocks_become_a_file_that_carries_its_content_digest(
    tmp_path: Path, order: list[str]
) -> None:
    path = tmp_path / "model.gguf"
    sealed, digest = write(path, order, cut=1)

    data = path.read_bytes()
    file = parse(data)
    assert sealed == SealedFile(path, len(data), hashlib.sha256(data).hexdigest())
    assert file.metadata["sam3d.content_sha256"] == string(digest)
    for name, tensor in file.tensors.items():
        assert data[tensor.offset : tensor.offset + tensor.nbytes] == DATA[name]


def test_equal_content_gives_an_equal_file(tmp_path: Path) -> None:
    first, _ = write(tmp_path / "first.gguf", sorted(DATA), cut=1)
    second, _ = write(tmp_path / "second.gguf", sorted(DATA, reverse=True), cut=0)

    assert first.sha256 == second.sha256


def numpy_blocks(values: Any) -> list[memoryview]:
    return [memoryview(values)]


def test_arrays_of_any_type_and_shape_are_blocks(tmp_path: Path) -> None:
    values = np.arange(6, dtype="<i4").reshape(2, 3)
    layout = GgufLayout.plan({}, [GgufTensorSpec("a", (2, 3), GgmlType.I32)])
    done: list[int] = []
    with PublicationSet() as publications:
        publication = publications.create(tmp_path / "a.gguf", layout.size)
        with GgufWriter(publication, layout, progress=done.append) as writer:
            writer.write("a", numpy_blocks(values))
            assert writer.sha256 == {"a": hashlib.sha256(values.tobytes()).hexdigest()}
            writer.seal(progress=done.append)
        publications.commit()

    assert (tmp_path / "a.gguf").read_bytes()[len(layout.header) :][:24] == values.tobytes()
    assert sum(done) == 24 + layout.size


def test_every_block_makes_the_writer_wait_for_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = ParallelHasher.advance
    taken: list[int] = []

    def blocks() -> Iterator[bytes]:
        for number in range(8):
            taken.append(number)
            yield bytes(1)

    def checked(self: ParallelHasher) -> None:
        # The hasher waits here for the block whose place the next one takes; see test_hashing.
        advanced.append(len(taken))
        advance(self)

    advanced: list[int] = []
    monkeypatch.setattr(ParallelHasher, "advance", checked)
    layout = GgufLayout.plan({}, [GgufTensorSpec("a", (8,), GgmlType.I8)])
    with PublicationSet() as publications:
        publication = publications.create(tmp_path / "a.gguf", layout.size)
        with GgufWriter(publication, layout) as writer:
            writer.write("a", blocks())

    assert advanced == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("blocks", "problem"),
    [
        ([b"12345678", b"9"], "more than 8 bytes"),
        ([b"123456789"], "more than 8 bytes"),
        ([b"1234567"], "fewer than 8 bytes"),
        ([], "fewer than 8 bytes"),
    ],
)
def test_blocks_of_another_size_than_the_tensor_are_refused(
    tmp_path: Path, blocks: list[bytes], problem: str
) -> None:
    layout = GgufLayout.plan({}, [SPEC])
    with PublicationSet() as publications:
        publication = publications.create(tmp_path / "a.gguf", layout.size)
        with GgufWriter(publication, layout) as writer, pytest.raises(ValueError, match=problem):
            writer.write("a", blocks)


def test_every_tensor_is_written_once(tmp_path: Path) -> None:
    layout = GgufLayout.plan({"a": uint32(1)}, [SPEC, GgufTensorSpec("b", (1,), GgmlType.I8)])
    with PublicationSet() as publications:
        publication = publications.create(tmp_path / "a.gguf", layout.size)
        with GgufWriter(publication, layout) as writer:
            writer.write("a", [bytes(8)])
            with pytest.raises(ValueError, match="a was written before"):
                writer.write("a", [bytes(8)])
            with pytest.raises(ValueError, match="not written: b"):
                writer.seal()


def test_only_values_of_the_same_size_can_be_replaced() -> None:
    layout = GgufLayout.plan({"a": string("x")}, [SPEC])

    assert layout.with_metadata({"a": string("y")}).metadata["a"] == string("y")
    with pytest.raises(ValueError, match="existing keys"):
        layout.with_metadata({"b": string("y")})
    with pytest.raises(ValueError, match="would move"):
        layout.with_metadata({"a": string("y" * 100)})


# Digests, computed here once more from their definition.


def test_the_content_digest_is_what_its_definition_says() -> None:
    layout = GgufLayout.plan(METADATA, SPECS)
    sha256 = {name: hashlib.sha256(data).hexdigest() for name, data in DATA.items()}

    expected = hashlib.sha256(
        b"sam3d.content.v1\n"
        + struct.pack("<Q", 3)
        + raw.info("faces", (3, 2), 26)[:-8]
        + hashlib.sha256(DATA["faces"]).digest()
        + raw.info("flag", (1,), 24)[:-8]
        + hashlib.sha256(DATA["flag"]).digest()
        + raw.info("norm.weight", (3,), 0)[:-8]
        + hashlib.sha256(DATA["norm.weight"]).digest()
    )
    assert content_sha256(layout.tensors, sha256) == expected.hexdigest()
    shuffled = dict(reversed(list(layout.tensors.items())))
    assert content_sha256(shuffled, sha256) == expected.hexdigest()


def test_the_content_digest_does_not_depend_on_metadata_or_alignment() -> None:
    sha256 = dict.fromkeys(DATA, EMPTY_SHA256)
    narrow = GgufLayout.plan({"a": uint32(1)}, SPECS)
    wide = GgufLayout.plan({"general.alignment": uint32(64)}, SPECS)

    assert content_sha256(narrow.tensors, sha256) == content_sha256(wide.tensors, sha256)


@pytest.mark.parametrize(
    "other",
    [
        GgufTensorSpec("b", (2, 3), GgmlType.F32),
        GgufTensorSpec("a", (3, 2), GgmlType.F32),
        GgufTensorSpec("a", (6,), GgmlType.F32),
        GgufTensorSpec("a", (2, 3), GgmlType.I32),
    ],
)
def test_the_content_digest_depends_on_name_shape_and_type(other: GgufTensorSpec) -> None:
    spec = GgufTensorSpec("a", (2, 3), GgmlType.F32)
    digests = {
        content_sha256(GgufLayout.plan({}, [s]).tensors, {s.name: EMPTY_SHA256})
        for s in (spec, other)
    }

    assert len(digests) == 2


def test_the_semantics_digest_is_what_its_definition_says() -> None:
    expected = hashlib.sha256(
        b"sam3d.semantics.v1\n"
        + struct.pack("<Q", 2)
        + raw.key_value("sam3d.epsilon", 6, struct.pack("<f", 1e-5))
        + raw.key_value("sam3d.flag", 7, b"\1")
    )
    metadata = {"sam3d.flag": boolean(True), "sam3d.epsilon": float32(1e-5)}
    assert semantics_sha256(metadata) == expected.hexdigest()


def test_reading_takes_no_more_than_the_header(tmp_path: Path) -> None:
    layout = GgufLayout.plan({}, [GgufTensorSpec("a", (1 << 30,), GgmlType.F32)])
    path = tmp_path / "sparse.gguf"
    with path.open("wb") as file:
        file.write(layout.header)
        file.truncate(layout.size)
        reads: list[int] = []

        class Counting(ByteSource):
            def pread(self, offset: int, size: int) -> bytes:
                reads.append(size)
                return super().pread(offset, size)

        fd = os.open(path, os.O_RDONLY)
        read_gguf(Counting(fd))
        os.close(fd)

    assert sum(reads) <= (1 << 20) + 32
