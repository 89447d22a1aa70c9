"""What holds for every file that the checkpoint readers accept."""

from __future__ import annotations

from sam3d_gguf.extractors.archive import Archive
from sam3d_gguf.extractors.byte_source import ByteSource
from sam3d_gguf.extractors.checkpoint import check_storages, read_archive
from sam3d_gguf.extractors.limits import Limits
from sam3d_gguf.extractors.materialize import iter_blocks
from sam3d_gguf.schemas.errors import InputError, Sam3dError

LIMITS = Limits(
    inflated_bytes=1 << 20,
    pickle_bytes=1 << 20,
    opcodes=20_000,
    stack=20_000,
    memo=20_000,
    steps=20_000,
    tensor_bytes=1 << 16,
)


def read_checked(source: ByteSource) -> Archive | None:
    """Read a file with all that the readers do; None if it is refused."""
    try:
        archive = read_archive(source, LIMITS)
    except InputError as refusal:
        assert refusal.what.isprintable() and len(str(refusal)) < 2_000
        return None
    check_references(source, archive)
    check_reports(archive)
    try:
        check_storages(source, archive)
        for tensor in archive.tensors.values():
            blocks = [block.size for block in iter_blocks(source, tensor, 512)]
            assert sum(blocks) == tensor.elements
    except Sam3dError:
        return archive
    return archive


def check_references(source: ByteSource, archive: Archive) -> None:
    """Every tensor lies in its storage, every storage in the file."""
    total = 0
    for name, tensor in archive.tensors.items():
        storage = tensor.storage
        assert name == tensor.name and name.isprintable()
        assert 0 <= storage.file_offset <= storage.file_offset + storage.nbytes <= source.size
        assert all(step >= 0 for step in (*tensor.shape, *tensor.strides, tensor.storage_offset))
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.strides, strict=True))
        end = (tensor.storage_offset + last + 1) * tensor.itemsize
        assert tensor.elements == 0 or end <= storage.nbytes
        total += tensor.nbytes
    assert total <= LIMITS.tensor_bytes


def check_reports(archive: Archive) -> None:
    """What is reported is printable and bounded."""
    texts = [text for one in archive.content for text in (one.path, one.kind, one.text)]
    texts += [text for one in archive.inert for text in (one.path, one.function)]
    texts += [text for one in archive.excluded for text in (one.path, one.reason)]
    assert all(text.isprintable() and len(text) < 2_000 for text in texts)
