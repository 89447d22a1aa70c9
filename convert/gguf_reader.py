"""A strict, bounded GGUF reader: it takes the one form that `gguf_format` describes, or refuses.

Of all that a file says, only its own size is believed. Numbers are checked against it, or against a
bound, before anything of that size is read or allocated. Tensor data is not read here; where each
tensor's bytes lie is returned, after the space between them was found to be zero.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from sam3d_gguf.convert.gguf_format import (
    ALIGNMENT_KEY,
    MAGIC,
    MAX_ARRAY_DEPTH,
    MAX_ARRAYS,
    MAX_BYTES,
    MAX_HEADER_BYTES,
    MAX_ITEMS,
    MAX_KEY_BYTES,
    MAX_METADATA,
    MAX_NAME_BYTES,
    MAX_RANK,
    MAX_STRING_BYTES,
    MAX_TENSORS,
    SCALAR_FORMATS,
    VERSION,
    GgmlType,
    GgufTensor,
    GgufValue,
    Scalar,
    ValueType,
    align,
    check_alignment,
    check_key,
    check_name,
    decode_text,
    tensor_bytes,
)
from sam3d_gguf.extractors.byte_source import ByteSource
from sam3d_gguf.schemas.errors import InputError

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A checked GGUF file. Metadata and tensors are in the file's order; tensors lie in that order.

    `data_offset` is where the data section starts, `size` where the file ends.
    """

    version: int
    metadata: Mapping[str, GgufValue]
    tensors: Mapping[str, GgufTensor]
    alignment: int
    data_offset: int
    size: int


def read_gguf(source: ByteSource) -> GgufFile:
    """Reads and checks everything of a GGUF file but its tensors' data.

    Raises:
        InputError: a rule of the format is broken, or a bound exceeded; the error names the rule
            and the key, tensor or byte.
    """
    return _Reader(source).read()


class _Cursor:
    """Reads the header in order, in chunks."""

    def __init__(self, source: ByteSource) -> None:
        self.position = 0
        self._source = source
        self._limit = min(source.size, MAX_HEADER_BYTES)
        self._chunk = b""
        self._chunk_start = 0

    def take(self, size: int, where: str) -> bytes:
        """Returns the next `size` bytes."""
        self.require(size, where)
        start = self.position - self._chunk_start
        if start + size > len(self._chunk):
            length = min(max(size, _CHUNK_BYTES), self._limit - self.position)
            self._chunk = self._source.pread(self.position, length)
            self._chunk_start = self.position
            start = 0
        self.position += size
        return self._chunk[start : start + size]

    def require(self, size: int, where: str) -> None:
        """Checks that `size` bytes more are there."""
        if size <= self._limit - self.position:
            return
        if self._limit < self._source.size:
            raise InputError(
                "the header goes on", where=where, expected=f"at most {MAX_HEADER_BYTES} bytes"
            )
        raise InputError(
            f"the file ends at byte {self._limit}, inside the header",
            where=where,
            expected=f"{size} bytes more at {self.position}",
            action="Fetch the file again and compare its size and SHA-256 with the source's",
        )

    def uint32(self, where: str) -> int:
        """Returns the next 32-bit number."""
        return int.from_bytes(self.take(4, where), "little")

    def uint64(self, where: str) -> int:
        """Returns the next 64-bit number."""
        return int.from_bytes(self.take(8, where), "little")

    def count(self, what: str, limit: int, where: str) -> int:
        """Returns the next 64-bit number, after checking it against a limit."""
        count = self.uint64(where)
        if count > limit:
            raise InputError(f"the {what} is {count}", where=where, expected=f"at most {limit}")
        return count

    def string(self, what: str, limit: int, where: str) -> bytes:
        """Returns the bytes of the next string."""
        return self.take(self.count(f"length of {what}", limit, where), where)


class _Reader:
    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._cursor = _Cursor(source)
        self._where = source.name
        self._items_left = MAX_ITEMS
        self._arrays_left = MAX_ARRAYS

    def read(self) -> GgufFile:
        tensor_count, metadata_count = self._read_start()
        metadata: dict[str, GgufValue] = {}
        for index in range(metadata_count):
            key, value = self._read_metadata(f"{self._where}: key/value {index}")
            if key in metadata:
                raise InputError(f"the key {key[:80]!r} occurs twice", where=self._where)
            metadata[key] = value
        alignment = check_alignment(metadata.get(ALIGNMENT_KEY), self._where)
        infos: dict[str, GgufTensor] = {}
        for index in range(tensor_count):
            tensor = self._read_info(f"{self._where}: tensor {index}")
            if tensor.name in infos:
                raise InputError(f"two tensors are named {tensor.name!r}", where=self._where)
            infos[tensor.name] = tensor
        return self._locate(metadata, infos, alignment)

    def _read_start(self) -> tuple[int, int]:
        magic = self._cursor.take(4, self._where)
        if magic != MAGIC:
            raise InputError(
                f"the file starts with {magic!r}", where=self._where, expected=f"{MAGIC!r}"
            )
        version = self._cursor.uint32(self._where)
        if version != VERSION:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            kind = " (big endian)" if swapped == VERSION else ""
            raise InputError(
                f"the GGUF version is {version}{kind}",
                where=self._where,
                expected=f"{VERSION}, little endian",
            )
        tensors = self._cursor.count("number of tensors", MAX_TENSORS, self._where)
        return tensors, self._cursor.count("number of key/values", MAX_METADATA, self._where)

    def _read_metadata(self, where: str) -> tuple[str, GgufValue]:
        key = decode_text(self._cursor.string("the key", MAX_KEY_BYTES, where), where)
        check_key(key, where)
        where = f"{self._where}: {key[:80]}"
        value_type = self._read_type(where)
        if value_type is ValueType.ARRAY:
            return key, self._read_array(where, depth=0)
        (value,) = self._read_items(value_type, 1, where)
        return key, GgufValue(value_type, value)

    def _read_type(self, where: str) -> ValueType:
        code = self._cursor.uint32(where)
        try:
            return ValueType(code)
        except ValueError as error:
            raise InputError(
                f"the value type {code} is unknown", where=where, expected="0 to 12"
            ) from error

    def _read_array(self, where: str, depth: int) -> GgufValue:
        if depth >= MAX_ARRAY_DEPTH:
            raise InputError(
                "arrays are nested too deeply",
                where=where,
                expected=f"at most {MAX_ARRAY_DEPTH} levels",
            )
        item_type = self._read_type(where)
        if item_type is ValueType.ARRAY:
            count = self._cursor.count("number of arrays in it", self._arrays_left, where)
            self._arrays_left -= count
            arrays = tuple(self._read_array(where, depth + 1) for _ in range(count))
            return GgufValue(ValueType.ARRAY, arrays, item_type)
        count = self._cursor.count("number of array items", self._items_left, where)
        self._items_left -= count
        return GgufValue(ValueType.ARRAY, self._read_items(item_type, count, where), item_type)

    def _read_items(self, item_type: ValueType, count: int, where: str) -> tuple[Scalar, ...]:
        if item_type is ValueType.STRING:
            self._cursor.require(8 * count, where)
            return tuple(
                decode_text(self._cursor.string("a string", MAX_STRING_BYTES, where), where)
                for _ in range(count)
            )
        code = SCALAR_FORMATS[item_type]
        data = self._cursor.take(count * struct.calcsize(code), where)
        if item_type is ValueType.BOOL and data.translate(None, b"\0\1"):
            raise InputError("a BOOL is neither 0 nor 1", where=where)
        return struct.unpack(f"<{count}{code}", data)

    def _read_info(self, where: str) -> GgufTensor:
        name = check_name(self._cursor.string("the name", MAX_NAME_BYTES, where), where)
        where = f"{self._where}: tensor {name!r}"
        rank = self._cursor.uint32(where)
        if not 1 <= rank <= MAX_RANK:
            raise InputError(
                f"the tensor has {rank} dimensions", where=where, expected=f"1 to {MAX_RANK}"
            )
        dims = struct.unpack(f"<{rank}Q", self._cursor.take(8 * rank, where))
        code = self._cursor.uint32(where)
        try:
            ggml_type = GgmlType(code)
        except ValueError as error:
            raise InputError(f"the tensor type {code} is unknown", where=where) from error
        shape = dims[::-1]
        nbytes = tensor_bytes(shape, ggml_type, where)
        return GgufTensor(name, shape, ggml_type, self._cursor.uint64(where), nbytes)

    def _locate(
        self, metadata: dict[str, GgufValue], infos: dict[str, GgufTensor], alignment: int
    ) -> GgufFile:
        """Checks offsets, padding and the file's end, and makes the offsets absolute."""
        end = self._cursor.position
        data_offset = position = align(end, alignment)
        gaps = [(end, data_offset)]
        tensors: dict[str, GgufTensor] = {}
        for info in infos.values():
            where = f"{self._where}: tensor {info.name!r}"
            if info.offset != position - data_offset:
                raise InputError(
                    f"the tensor's offset is {info.offset}",
                    where=where,
                    expected=f"{position - data_offset}, the next multiple of {alignment}",
                )
            end = position + info.nbytes
            tensors[info.name] = GgufTensor(info.name, info.shape, info.type, position, info.nbytes)
            position = align(end, alignment)
            if position > MAX_BYTES:
                raise InputError("the tensors together are too large", where=where)
            gaps.append((end, position))
        if position != self._source.size:
            raise InputError(
                f"the file has {self._source.size} bytes",
                where=self._where,
                expected=f"{position}, up to its last tensor's padding",
                action="Fetch the file again and compare its size and SHA-256 with the source's",
            )
        self._check_padding(gaps)
        return GgufFile(VERSION, metadata, tensors, alignment, data_offset, position)

    def _check_padding(self, gaps: list[tuple[int, int]]) -> None:
        for begin, end in gaps:
            if any(self._source.pread(begin, end - begin)):
                raise InputError(
                    f"the padding at byte {begin} isn't zero", where=self._where, expected="zeros"
                )
