"""The host's own check of the worker's products: every byte, against the source's raw storage bytes.

No pickle is read here. The source's bytes are taken from where the (checked) report says that a
tensor lies, widened as declared, and must equal the safetensors file's bytes at that tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sam3d_gguf.extractors.byte_source import ByteSource
from sam3d_gguf.extractors.direct_io import DiskSource
from sam3d_gguf.extractors.hashing import (
    BLOCK_BYTES,
    ParallelHasher,
    Progress,
    Region,
    hash_file,
)
from sam3d_gguf.extractors.materialize import iter_blocks, upcast
from sam3d_gguf.extractors.products import Product, ProductTensor
from sam3d_gguf.extractors.safetensors_format import SafetensorsSpec, canonical_header
from sam3d_gguf.extractors.tensor_ref import ITEMSIZE, TensorRef
from sam3d_gguf.schemas.errors import InputError

_Bytes = NDArray[np.uint8]
_HASHED_AT_ONCE = 4

Maker = Literal["reader", "extraction"]
_WHOSE: Mapping[Maker, tuple[str, str]] = {
    "reader": ("the reader's ", ""),
    "extraction": (
        "the extraction's ",
        "The extraction was changed after it was made: extract again",
    ),
}
"""Whose files differ from the source, and what to do then."""


@dataclass(frozen=True, slots=True)
class ProductDigests:
    """SHA-256 (hex) of a product file, and of its tensors by their names in it.

    A tensor that is widened for a file that nobody writes has none: no file could be compared.
    """

    sha256: str
    bytes: int
    tensors: Mapping[str, str]


def recheck(
    source: ByteSource,
    refs: Mapping[str, TensorRef],
    product: Product,
    file: ByteSource,
    progress: Progress | None = None,
    *,
    maker: Maker = "reader",
) -> ProductDigests:
    """Compare a product file with the source that it was made from.

    Args:
        source: the legacy file.
        refs: where each of its tensors lies, by source name.
        product: what the file must hold.
        file: the product file; each byte of it is read once.
        maker: what gave it, for errors: the sandboxed reader now, or an earlier extraction.

    Raises:
        InputError: the header is not the canonical one, the size differs, or a tensor's bytes do.
    """
    whose, action = _WHOSE[maker]
    specs = [SafetensorsSpec(t.name, t.dtype, t.shape) for t in product.tensors]
    header, entries = canonical_header(specs)
    size = len(header) + (entries[-1].end if entries else 0)
    if file.size != size or file.pread(0, len(header)) != header:
        raise InputError(
            f"{whose}file has another header or size than its tensors give",
            where=product.file,
            action=action,
        )
    regions = [Region(len(header) + entry.begin, entry.nbytes) for entry in entries]
    ring = BlockRing(1)
    streams = [_Stream(product_blocks(source, refs, t, ring)) for t in product.tensors]

    def compare(index: int, block: memoryview) -> None:
        if not streams[index].equals(np.frombuffer(block, np.uint8)):
            raise InputError(
                f"{whose}bytes of the tensor {product.tensors[index].name!r} are not those "
                "that the source holds",
                where=product.file,
                action=action,
            )

    with DiskSource(file.fd, file.name) as read:
        digests = hash_file(read, regions, on_region=compare, progress=progress)
    names = (tensor.name for tensor in product.tensors)
    return ProductDigests(digests.sha256, size, dict(zip(names, digests.regions, strict=True)))


def digest_product(
    source: ByteSource,
    refs: Mapping[str, TensorRef],
    product: Product,
    progress: Progress | None = None,
) -> ProductDigests:
    """Hash a product file that nobody writes, from the source's raw storage bytes.

    Args:
        source: the legacy file.
        refs: where each of its tensors lies, by source name.
        product: what the file would hold.
    """
    specs = [SafetensorsSpec(t.name, t.dtype, t.shape) for t in product.tensors]
    header, entries = canonical_header(specs)
    whole = hashlib.sha256(header)
    digests = {t.name: hashlib.sha256() for t in product.tensors if _keeps_bytes(t, refs)}
    # One more block than the hasher holds: the next is made before it waits for the oldest.
    ring = BlockRing(_HASHED_AT_ONCE + 1)
    with ParallelHasher(2, depth=_HASHED_AT_ONCE) as hasher:
        for tensor in product.tensors:
            digest = digests.get(tensor.name)
            for block in product_blocks(source, refs, tensor, ring):
                hasher.advance()
                hasher.update(0, whole, block.data)
                if digest is not None:
                    hasher.update(1, digest, block.data)
                if progress is not None:
                    progress(block.nbytes)
        hasher.wait()
    size = len(header) + (entries[-1].end if entries else 0)
    tensors = {name: digest.hexdigest() for name, digest in digests.items()}
    return ProductDigests(whole.hexdigest(), size, tensors)


class BlockRing:
    """Memory for blocks of `BLOCK_BYTES`, each used again after all the others."""

    def __init__(self, slots: int) -> None:
        self._slots = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(slots)]
        self.scratch = [memoryview(bytearray(BLOCK_BYTES))]

    def upcoming(self) -> list[memoryview]:
        """The slots in the order of their use."""
        return self._slots

    def take(self) -> memoryview:
        """The next slot, which is used now."""
        self._slots = [*self._slots[1:], self._slots[0]]
        return self._slots[-1]


def source_blocks(
    source: ByteSource, ref: TensorRef, ring: BlockRing, max_bytes: int = BLOCK_BYTES
) -> Iterator[NDArray[Any]]:
    """Yield a tensor's elements as `iter_blocks` does, each block in the ring's next slot."""
    for block in iter_blocks(source, ref, max_bytes, ring.upcoming()):
        ring.take()
        yield block


def product_blocks(
    source: ByteSource, refs: Mapping[str, TensorRef], tensor: ProductTensor, ring: BlockRing
) -> Iterator[_Bytes]:
    """Yield the bytes that a tensor has in its product file, from the source's."""
    if tensor.source is None:
        yield np.zeros(tensor.elements * ITEMSIZE[tensor.dtype], np.uint8)
        return
    ref = refs[tensor.source.name]
    if tensor.dtype == ref.dtype:
        yield from (block.view(np.uint8) for block in source_blocks(source, ref, ring))
        return
    size = BLOCK_BYTES * ref.itemsize // ITEMSIZE[tensor.dtype]
    for block in iter_blocks(source, ref, size, ring.scratch):
        wide = np.frombuffer(ring.take(), np.float32)
        yield upcast(block, ref.dtype, wide).view(np.uint8)


def _keeps_bytes(tensor: ProductTensor, refs: Mapping[str, TensorRef]) -> bool:
    return tensor.source is None or tensor.dtype == refs[tensor.source.name].dtype


class _Stream:
    """The bytes that a tensor must have, handed out in the pieces that the comparison asks for."""

    def __init__(self, blocks: Iterator[_Bytes]) -> None:
        self._blocks = blocks
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


def _same(left: _Bytes, right: _Bytes) -> bool:
    # Eight bytes at a time: the comparison's result is then an eighth as large.
    whole = left.size & ~7
    return np.array_equal(
        left[:whole].view(np.uint64), right[:whole].view(np.uint64)
    ) and np.array_equal(left[whole:], right[whole:])
