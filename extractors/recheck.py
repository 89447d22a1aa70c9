"""The host's own check of the worker's products: every byte, against the source's raw storage bytes.

No pickle is read here. The source's bytes are taken from where the (checked) report says that a
tensor lies, widened as declared, and must equal the safetensors file's bytes at that tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sam3d_gguf.extractors.byte_source import ByteSource
from sam3d_gguf.extractors.hashing import BLOCK_BYTES, Progress, Region, hash_file
from sam3d_gguf.extractors.materialize import iter_blocks, upcast
from sam3d_gguf.extractors.products import Product, ProductTensor
from sam3d_gguf.extractors.safetensors_format import SafetensorsSpec, canonical_header
from sam3d_gguf.extractors.tensor_ref import ITEMSIZE, TensorRef
from sam3d_gguf.schemas.errors import InputError

_Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ProductDigests:
    """SHA-256 (hex) of a product file, and of each of its tensors by their names in it."""

    sha256: str
    bytes: int
    tensors: Mapping[str, str]


def recheck(
    source: ByteSource,
    refs: Mapping[str, TensorRef],
    product: Product,
    file: ByteSource,
    progress: Progress | None = None,
) -> ProductDigests:
    """Compare a product file with the source that it was made from.

    Args:
        source: the legacy file.
        refs: where each of its tensors lies, by source name.
        product: what the file must hold.
        file: the product file; each byte of it is read once.

    Raises:
        InputError: the header is not the canonical one, the size differs, or a tensor's bytes do.
    """
    specs = [SafetensorsSpec(t.name, t.dtype, t.shape) for t in product.tensors]
    header, entries = canonical_header(specs)
    size = len(header) + (entries[-1].end if entries else 0)
    if file.size != size or file.pread(0, len(header)) != header:
        raise InputError(
            "the reader's file has another header or size than its tensors give", where=product.file
        )
    regions = [Region(len(header) + entry.begin, entry.nbytes) for entry in entries]
    buffers = _Buffers()
    streams = [_Stream(source, refs, tensor, buffers) for tensor in product.tensors]

    def compare(index: int, block: memoryview) -> None:
        if not streams[index].equals(np.frombuffer(block, np.uint8)):
            raise InputError(
                f"the reader's bytes of the tensor {product.tensors[index].name!r} are not those "
                "that the source holds",
                where=product.file,
            )

    digests = hash_file(file, regions, on_region=compare, progress=progress)
    names = (tensor.name for tensor in product.tensors)
    return ProductDigests(digests.sha256, size, dict(zip(names, digests.regions, strict=True)))


class _Buffers:
    """Memory that all streams share, since one is read after the other."""

    def __init__(self) -> None:
        self.read = [memoryview(bytearray(BLOCK_BYTES))]
        self.wide = np.empty(BLOCK_BYTES // 4, np.float32)


class _Stream:
    """The bytes that a tensor must have, handed out in the pieces that the comparison asks for."""

    def __init__(
        self,
        source: ByteSource,
        refs: Mapping[str, TensorRef],
        tensor: ProductTensor,
        buffers: _Buffers,
    ) -> None:
        self._source = source
        self._tensor = tensor
        self._ref = None if tensor.source is None else refs[tensor.source.name]
        self._buffers = buffers
        self._blocks = self._expected()
        self._rest: _Bytes = np.empty(0, np.uint8)

    def equals(self, block: _Bytes) -> bool:
        """Whether the next bytes are these."""
        done = 0
        while done < block.size:
            if not self._rest.size:
                self._rest = next(self._blocks)
            count = min(self._rest.size, block.size - done)
            if not _same(self._rest[:count], block[done : done + count]):
                return False
            self._rest = self._rest[count:]
            done += count
        return True

    def _expected(self) -> Iterator[_Bytes]:
        if self._ref is None:
            yield np.zeros(self._tensor.elements * ITEMSIZE[self._tensor.dtype], np.uint8)
            return
        narrow = self._tensor.dtype != self._ref.dtype
        size = BLOCK_BYTES * self._ref.itemsize // ITEMSIZE[self._tensor.dtype]
        block: NDArray[Any]
        for block in iter_blocks(self._source, self._ref, size, self._buffers.read):
            if narrow:
                block = upcast(block, self._ref.dtype, self._buffers.wide)
            yield block.view(np.uint8)


def _same(left: _Bytes, right: _Bytes) -> bool:
    # Eight bytes at a time: the comparison's result is then an eighth as large.
    whole = left.size & ~7
    return np.array_equal(
        left[:whole].view(np.uint64), right[:whole].view(np.uint64)
    ) and np.array_equal(left[whole:], right[whole:])
