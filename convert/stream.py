"""Moves tensors from safetensors into a GGUF file, block by block, checking values on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sam3d_gguf.convert.digests import content_sha256, semantics_sha256
from sam3d_gguf.convert.gguf_format import GgmlType, GgufTensor, GgufValue, ValueType, array, string
from sam3d_gguf.convert.gguf_writer import GgufLayout, GgufWriter
from sam3d_gguf.convert.plan import PlannedFile, PlannedTensor
from sam3d_gguf.convert.problems import naming_file
from sam3d_gguf.convert.products import BlockReader, Products
from sam3d_gguf.convert.rules import Checker, Zero, make_checkers
from sam3d_gguf.extractors.materialize import upcast
from sam3d_gguf.extractors.progress import Progress
from sam3d_gguf.extractors.publication import PublicationSet, SealedFile
from sam3d_gguf.schemas.errors import ContractError, InputError

CONTENT_KEY = "sam3d.content_sha256"
SEMANTICS_KEY = "sam3d.semantics_sha256"
TENSORS_KEY = "sam3d.tensor_sha256"
_NO_HASH = "0" * 64
_Block = NDArray[Any]


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A GGUF file that is complete, on disk and read back, but not linked into place yet."""

    planned: PlannedFile
    sealed: SealedFile
    tensors: Mapping[str, GgufTensor]
    sha256: Mapping[str, str]
    content_sha256: str
    semantics_sha256: str


def digest_placeholders(tensor_count: int) -> dict[str, GgufValue]:
    """Metadata of the encoded size that the digests will have."""
    return {
        CONTENT_KEY: string(_NO_HASH),
        SEMANTICS_KEY: string(_NO_HASH),
        TENSORS_KEY: array(ValueType.STRING, [_NO_HASH] * tensor_count),
    }


def write_gguf(
    planned: PlannedFile,
    products: Products,
    publications: PublicationSet,
    destination: Path,
    progress: Progress,
) -> WrittenFile:
    """Write a planned file into a publication set and verify it there.

    Raises:
        ContractError: a value breaks a rule of the contract.
        InputError: the safetensors don't hold what their report says.
        OutputError: the file can't be written, or reads back differently.
    """
    metadata = dict(planned.metadata)
    if planned.carries_digests:
        metadata |= digest_placeholders(len(planned.tensors))
    layout = GgufLayout.plan(metadata, (t.spec for t in planned.tensors.values()))
    publication = publications.create(destination, layout.size)
    rules = planned.contract.value_rules()
    progress.stage(f"Write {planned.name}", layout.size)
    reader = products.reader()
    with (
        naming_file(products.extraction.source.name),
        GgufWriter(publication, layout, progress.advance) as writer,
    ):
        for name in layout.tensors:
            tensor = planned.tensors[name]
            if tensor.bound is None:
                checkers = make_checkers([Zero()], tensor.spec.shape, tensor.target)
            else:
                checkers = rules.checkers(tensor.bound)
            writer.write(name, tensor_data(tensor, reader, checkers))
        rules.finish()
        reader.finish()
        sha256 = writer.sha256
        for name, tensor in planned.tensors.items():
            _require_same(tensor, sha256[name])
        content = content_sha256(layout.tensors, sha256)
        semantics = semantics_sha256(planned.semantics)
        changes: dict[str, GgufValue] = {}
        if planned.carries_digests:
            hashes = [sha256[name] for name in layout.tensors]
            changes = {
                CONTENT_KEY: string(content),
                SEMANTICS_KEY: string(semantics),
                TENSORS_KEY: array(ValueType.STRING, hashes),
            }
        progress.stage(f"Read {planned.name} back", layout.size)
        sealed = writer.seal(changes, progress.advance)
        return WrittenFile(planned, sealed, layout.tensors, sha256, content, semantics)


def tensor_data(
    tensor: PlannedTensor, reader: BlockReader, checkers: Sequence[Checker]
) -> Iterator[memoryview]:
    """Yields the bytes that a tensor has in its GGUF file, each block checked by all checkers.

    Raises:
        ContractError: a checker refuses a value, or it can't be converted without loss.
    """
    blocks = _converted(tensor, reader, checkers)
    if tensor.bound is not None and tensor.bound.layout == "channels_last":
        blocks = channels_last(blocks, tensor.bound.shape)
    for block in blocks:
        yield block.view(np.uint8).data


def _converted(
    tensor: PlannedTensor, reader: BlockReader, checkers: Sequence[Checker]
) -> Iterator[_Block]:
    convert = _CONVERSIONS[(reader.dtype(tensor.file, tensor.target), tensor.spec.type)]
    for read in reader.blocks(tensor.file, tensor.target):
        block = read if convert is None else convert(read, tensor.target)
        for checker in checkers:
            checker.feed(block)
        yield block
    for checker in checkers:
        checker.finish()


def keeps_bytes(tensor: PlannedTensor) -> bool:
    """Whether a tensor has the same bytes in the GGUF file as in the safetensors file."""
    moved = tensor.bound is not None and tensor.bound.layout == "channels_last"
    return not moved and _CONVERSIONS[(tensor.dtype, tensor.spec.type)] is None


def channels_last(blocks: Iterable[_Block], shape: tuple[int, ...]) -> Iterator[_Block]:
    """Yields the elements of a tensor [A, C, S...] in the order that [A, S..., C] has.

    At most a block and the elements of one A are held.
    """
    channels, inner = shape[1], math.prod(shape[2:])
    rest: list[_Block] = []
    for block in blocks:
        rest.append(block)
        if sum(part.size for part in rest) < channels * inner:
            rest[-1] = block.copy()
            continue
        joined = np.concatenate(rest)
        rows = joined.size // (channels * inner)
        whole, left = np.split(joined, [rows * channels * inner])
        yield whole.reshape(rows, channels, inner).transpose(0, 2, 1).ravel()
        rest = [left]


def _require_same(tensor: PlannedTensor, sha256: str) -> None:
    if tensor.sha256 is not None and keeps_bytes(tensor) and sha256 != tensor.sha256:
        raise InputError(
            f"the tensor {tensor.target!r} has SHA-256 {sha256}",
            where=tensor.file,
            expected=f"{tensor.sha256}, as the extraction report says",
            action="Extract again",
        )


def restore_bf16(block: _Block, name: str) -> _Block:
    """Returns the BF16 bits (uint16) of F32 values that were widened from BF16.

    Raises:
        ContractError: a value has more precision than BF16.
    """
    halves = block.view(np.uint16)
    if halves[0::2].any():
        raise ContractError(
            "the values are not widened BF16: their low halves are not all zero",
            where=name,
            expected="what the extraction report says",
        )
    return np.ascontiguousarray(halves[1::2])


def restore_f16(block: _Block, name: str) -> _Block:
    """Returns the F16 of F32 values that were widened from it.

    Raises:
        ContractError: a value has more precision than F16, or is none.
    """
    with np.errstate(over="ignore"):
        narrow = block.astype(np.float16)
    if not np.array_equal(narrow.astype(np.float32), block):
        raise ContractError(
            "the values are not widened F16", where=name, expected="what the extraction report says"
        )
    return narrow


def widen_f16(block: _Block, _name: str) -> _Block:
    """Returns the F32 values of F16 ones."""
    return upcast(block, "F16")


def widen_bf16(block: _Block, _name: str) -> _Block:
    """Returns the F32 values of BF16 bits (uint16)."""
    return upcast(block, "BF16")


def narrow_int64(block: _Block, name: str) -> _Block:
    """Returns I64 values as I32.

    Raises:
        ContractError: a value does not fit.
    """
    narrow = block.astype(np.int32)
    if not np.array_equal(narrow, block):
        raise ContractError("an index does not fit into 32 bits", where=name)
    return narrow


_CONVERSIONS: Mapping[tuple[str, GgmlType], Callable[[_Block, str], _Block] | None] = {
    ("F32", GgmlType.F32): None,
    ("I32", GgmlType.I32): None,
    ("F32", GgmlType.BF16): restore_bf16,
    ("BF16", GgmlType.BF16): None,
    ("BF16", GgmlType.F32): widen_bf16,
    ("F16", GgmlType.F16): None,
    ("F16", GgmlType.F32): widen_f16,
    ("F32", GgmlType.F16): restore_f16,
    ("I64", GgmlType.I32): narrow_int64,
}
