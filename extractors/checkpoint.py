"""A legacy checkpoint read without PyTorch, and without running anything that it holds.

>>> source = ByteSource(os.open("model.ckpt", os.O_RDONLY | os.O_NOFOLLOW))
>>> archive = read_archive(source)
>>> archive.tensors["backbone.encoder.cls_token"].shape
(1, 1, 1280)
"""

from __future__ import annotations

from collections.abc import Callable

from sam3d_gguf.extractors.archive import Archive
from sam3d_gguf.extractors.byte_source import ByteSource
from sam3d_gguf.extractors.kinds import CHECKPOINTS, FileKind
from sam3d_gguf.extractors.limits import Limits
from sam3d_gguf.extractors.sniff import require_source
from sam3d_gguf.extractors.torch_legacy import read_torch_legacy
from sam3d_gguf.extractors.torch_zip import read_torch_zip
from sam3d_gguf.extractors.zip_directory import check_crc

__all__ = ["Archive", "check_storages", "read_archive"]


def read_archive(source: ByteSource, limits: Limits | None = None) -> Archive:
    """Read a checkpoint of torch.save, in zip or legacy form, or a TorchScript archive.

    Pickles are read and checked (CRC-32 too), storages are only located: see `check_storages` and
    `materialize`.

    Raises:
        InputError: the file is of another kind, malformed, beyond a limit, or a tensor of its state
            dict can't be read.
    """
    limits = limits or Limits()
    kind = require_source(source, CHECKPOINTS, limits)
    if kind is FileKind.TORCH_LEGACY:
        return read_torch_legacy(source, limits)
    return read_torch_zip(source, kind, limits)


def check_storages(
    source: ByteSource, archive: Archive, on_bytes: Callable[[int], None] | None = None
) -> None:
    """Compare the CRC-32 of every storage that a tensor views; the legacy form has none.

    Args:
        source: the file that `archive` was read from.
        archive: what `read_archive` returned.
        on_bytes: called with the size of each storage once it is checked.

    Raises:
        InputError: a storage's bytes are damaged.
    """
    tensors = (*archive.tensors.values(), *archive.constants.values())
    for name in dict.fromkeys(tensor.storage.member for tensor in tensors):
        if name in archive.members:
            check_crc(source, archive.members[name])
            if on_bytes is not None:
                on_bytes(archive.members[name].size)
