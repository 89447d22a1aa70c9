"""Writes GGUF files: the layout is known before the first byte, tensors follow in blocks.

Metadata is sorted by key and tensors by name, so that equal content gives an equal file. The header
is written last, since it may hold a digest of the tensors.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sam3d_gguf.convert.gguf_format import (
    ALIGNMENT_KEY,
    MAGIC,
    MAX_BYTES,
    MAX_HEADER_BYTES,
    MAX_METADATA,
    MAX_TENSORS,
    VERSION,
    GgufTensor,
    GgufTensorSpec,
    GgufValue,
    align,
    check_alignment,
    encode_metadata,
    encode_tensor_info,
    tensor_bytes,
)
from sam3d_gguf.extractors.hashing import Digest, ParallelHasher, Progress, Readable
from sam3d_gguf.extractors.publication import ExpectedRegion, Publication, SealedFile
from sam3d_gguf.schemas.closing import Closing
from sam3d_gguf.schemas.errors import InputError


@dataclass(frozen=True, slots=True)
class GgufLayout:
    """Where everything of a file lies, and the bytes before its data.

    `header` includes the padding before the data section; `tensors` have absolute offsets, in the
    order of their names; `size` is the whole file's.
    """

    metadata: Mapping[str, GgufValue]
    tensors: Mapping[str, GgufTensor]
    alignment: int
    header: bytes
    size: int

    @classmethod
    def plan(cls, metadata: Mapping[str, GgufValue], specs: Iterable[GgufTensorSpec]) -> GgufLayout:
        """Lays out a file.

        Args:
            metadata: exactly what the file will say, `general.alignment` included where wanted.
            specs: the tensors, in any order.

        Raises:
            InputError: a key, value, name or shape that the format doesn't take, a name that
                occurs twice, or too much of anything.
        """
        alignment = check_alignment(metadata.get(ALIGNMENT_KEY), "metadata")
        ordered = _by_name(specs)
        parts = [encode_metadata(key, metadata[key]) for key in sorted(metadata)]
        offsets: dict[str, int] = {}
        position = 0
        for spec in ordered.values():
            offsets[spec.name] = position
            info = encode_tensor_info(spec.name, spec.shape, spec.type)
            parts.append(info + struct.pack("<Q", position))
            position = align(position + _nbytes(spec), alignment)
            if position > MAX_BYTES:
                raise InputError("the tensors together are too large for a GGUF file")
        start = MAGIC + struct.pack("<IQQ", VERSION, len(ordered), len(metadata))
        header = b"".join((start, *parts))
        if max(len(ordered) - MAX_TENSORS, len(metadata) - MAX_METADATA) > 0:
            raise InputError("too many tensors or key/values for a GGUF file")
        if len(header) > MAX_HEADER_BYTES:
            raise InputError(
                f"the GGUF header would have {len(header)} bytes",
                expected=f"at most {MAX_HEADER_BYTES}",
            )
        header = header.ljust(align(len(header), alignment), b"\0")
        tensors = {
            name: GgufTensor(
                name, spec.shape, spec.type, len(header) + offsets[name], _nbytes(spec)
            )
            for name, spec in ordered.items()
        }
        ordered_metadata = {key: metadata[key] for key in sorted(metadata)}
        return cls(ordered_metadata, tensors, alignment, header, len(header) + position)

    def with_metadata(self, changes: Mapping[str, GgufValue]) -> GgufLayout:
        """Returns the layout with some values replaced, such as placeholders by digests.

        Raises:
            InputError: a value doesn't fit its type.
            ValueError: a key is new, or something would move.
        """
        if not changes.keys() <= self.metadata.keys():
            raise ValueError("only values of existing keys can be replaced")
        specs = (GgufTensorSpec(t.name, t.shape, t.type) for t in self.tensors.values())
        layout = GgufLayout.plan({**self.metadata, **changes}, specs)
        if layout.tensors != self.tensors:
            raise ValueError("the tensors would move")
        return layout

    def regions(self, sha256: Mapping[str, str]) -> list[ExpectedRegion]:
        """Returns what a whole file of this layout must be, given its tensors' SHA-256 (hex)."""
        data_offset = len(self.header)
        regions = [ExpectedRegion(0, data_offset, hashlib.sha256(self.header).hexdigest())]
        for tensor in self.tensors.values():
            end = tensor.offset + tensor.nbytes
            padding = bytes(align(end, self.alignment) - end)
            regions.append(ExpectedRegion(tensor.offset, tensor.nbytes, sha256[tensor.name]))
            if padding:
                digest = hashlib.sha256(padding).hexdigest()
                regions.append(ExpectedRegion(end, len(padding), digest))
        return regions


def _by_name(specs: Iterable[GgufTensorSpec]) -> dict[str, GgufTensorSpec]:
    ordered: dict[str, GgufTensorSpec] = {}
    for spec in sorted(specs, key=lambda spec: spec.name):
        if spec.name in ordered:
            raise InputError("two tensors have this name", where=f"tensor {spec.name[:80]!r}")
        ordered[spec.name] = spec
    return ordered


def _nbytes(spec: GgufTensorSpec) -> int:
    return tensor_bytes(spec.shape, spec.type, f"tensor {spec.name[:80]!r}")


class GgufWriter(Closing):
    """Fills a publication with a GGUF file.

        with GgufWriter(publication, layout) as writer:
            for name in layout.tensors:
                writer.write(name, blocks_of(name))
            digest = content_sha256(layout.tensors, writer.sha256)
            writer.seal({"sam3d.content_sha256": string(digest)})

    Args:
        publication: new, and created with the layout's size.
        layout: what the file will be.
        progress: called with the number of bytes done since the last call.

    Raises:
        OutputError: the file system doesn't take the size.
    """

    def __init__(
        self, publication: Publication, layout: GgufLayout, progress: Progress | None = None
    ) -> None:
        self._digests: dict[str, Digest] = {}
        self._publication = publication
        self._layout = layout
        self._progress = progress
        self._hasher = ParallelHasher(1)
        publication.resize(layout.size)

    @property
    def sha256(self) -> Mapping[str, str]:
        """The SHA-256 (hex) of each tensor written so far."""
        self._hasher.wait()
        return {name: digest.hexdigest() for name, digest in self._digests.items()}

    def write(self, name: str, blocks: Iterable[Readable]) -> None:
        """Writes a tensor, in any order among the tensors.

        Args:
            name: a tensor of the layout, not written yet.
            blocks: its bytes, in order; a block must not be changed after it was handed over, and
                four of them are held at any time.

        Raises:
            OutputError: the disk is full, or any other reason why it can't be written.
            ValueError: the blocks don't have the tensor's size, or it was written before.
        """
        tensor = self._layout.tensors[name]
        if name in self._digests:
            raise ValueError(f"{name} was written before")
        digest = self._digests[name] = hashlib.sha256()
        position, end = tensor.offset, tensor.offset + tensor.nbytes
        for block in blocks:
            view = memoryview(block).cast("B")
            if len(view) > end - position:
                raise ValueError(f"the blocks of {name} are more than {tensor.nbytes} bytes")
            self._hasher.update(0, digest, view)
            self._publication.write_at(position, view)
            self._hasher.advance()
            position += len(view)
            if self._progress is not None:
                self._progress(len(view))
        if position != end:
            raise ValueError(f"the blocks of {name} are fewer than {tensor.nbytes} bytes")
        # Written, not left as a hole, so that the next tensor follows without a gap.
        self._publication.write_at(end, bytes(align(end, self._layout.alignment) - end))

    def seal(
        self,
        metadata: Mapping[str, GgufValue] | None = None,
        progress: Progress | None = None,
    ) -> SealedFile:
        """Writes the header, with some values replaced, then seals and verifies the file.

        Args:
            metadata: values that were placeholders in the layout, of the same encoded size.
            progress: called with the number of bytes read back since the last call.

        Raises:
            OutputError: it can't be written, or reads back differently.
            ValueError: a tensor wasn't written, or the metadata would move something.
        """
        missing = self._layout.tensors.keys() - self._digests.keys()
        if missing:
            raise ValueError(f"not written: {', '.join(sorted(missing)[:8])}")
        layout = self._layout.with_metadata(metadata or {})
        self._publication.write_at(0, layout.header)
        return self._publication.seal(layout.regions(self.sha256), progress)

    def close(self) -> None:
        """Ends the hashing; the publication stays open."""
        self._hasher.close()
