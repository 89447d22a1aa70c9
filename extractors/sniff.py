"""What a file is, from a few bounded reads; nothing of its content is interpreted."""

from __future__ import annotations

import re
from collections.abc import Collection
from struct import Struct

from sam3d_gguf.extractors.byte_source import ByteSource
from sam3d_gguf.extractors.kinds import FileKind, require_kind
from sam3d_gguf.extractors.limits import Limits
from sam3d_gguf.extractors.zip_directory import (
    AmbiguousArchive,
    ZipArchive,
    read_zip_directory,
)
from sam3d_gguf.schemas.errors import InputError

_HEAD_BYTES = 4_096
_Signatures = tuple[tuple[re.Pattern[bytes], FileKind], ...]


def _signatures(*pairs: tuple[bytes, FileKind]) -> _Signatures:
    return tuple((re.compile(pattern, re.DOTALL), kind) for pattern, kind in pairs)


# By the first bytes; the first that matches wins. TORCH_LEGACY is torch's magic number
# 0x1950a86a20f9469cfc6c as pickle protocols 2 to 5 and 0 or 1 write it.
_BY_HEAD = _signatures(
    (
        rb"(\x80.)?(\x95.{8})?\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\.",
        FileKind.TORCH_LEGACY,
    ),
    (rb"L119547037146038801333356L\n\.", FileKind.TORCH_LEGACY),
    (rb"version https://git-lfs\.github\.com/spec/", FileKind.LFS_POINTER),
    (rb"GGUF|FUGG", FileKind.GGUF),
    (rb"lmgg|tjgg|fmgg|algg|ggml|ggjt|ggmf|ggla", FileKind.GGML_OLD),
    (rb".{3}[\0-\x06]\0{4}\{", FileKind.SAFETENSORS),
    (rb"\x93NUMPY", FileKind.NPY),
    (rb"\x89HDF\r\n\x1a\n", FileKind.HDF5),
    (rb"\x1f\x8b", FileKind.GZIP),
    (rb"BZh[1-9]", FileKind.BZIP2),
    (rb"\xfd7zXZ\0", FileKind.XZ),
    (rb"\x28\xb5\x2f\xfd", FileKind.ZSTD),
    (rb"7z\xbc\xaf\x27\x1c", FileKind.SEVEN_ZIP),
    (rb"Rar!\x1a\x07", FileKind.RAR),
    (rb"(?=.{257}ustar)(\./)?(sys_info|pickle|storages|tensors)\0", FileKind.TORCH_TAR),
    (rb".{257}ustar", FileKind.TAR),
    (rb"\x08[\x01-\x1f]\x12[\x01-\x40][A-Za-z]", FileKind.ONNX),
    (rb"(\xef\xbb\xbf)?\s*<(?i:!doctype html|html|head|body|\?xml|!--)", FileKind.HTML),
    (rb"\s*[\[{]\s*[\"\]}\[{]", FileKind.JSON),
    (rb"\x80[\x02-\x05]|\([dl][pq]|[\]}]q|c[\w.]+\n[\w.]+\n", FileKind.PICKLE),
    (rb"\0+\Z", FileKind.ZEROS),
)

# By the name of a zip archive's first member, when it isn't one that torch writes.
_BY_FIRST_MEMBER = _signatures(
    (rb"[^/]+\.npy\Z", FileKind.NPZ),
    (rb"\[Content_Types\]\.xml|mimetype|_rels/|docProps/|word/", FileKind.OFFICE),
    (rb"metadata\.json|config\.json|model\.weights\.h5", FileKind.KERAS),
)
_TORCH_MEMBER = re.compile(
    rb"[^/]+/(data\.pkl|constants\.pkl|version|byteorder|model\.json|attributes\.pkl"
    rb"|(data|constants|tensors|code|extra|\.data)/.+|\.(format_version|storage_alignment)"
    rb"|traced_inputs(\.pkl|/.+))",
    re.DOTALL,
)
_ZIPS = frozenset({FileKind.TORCH_ZIP_BROKEN, FileKind.ZIP_BROKEN, FileKind.ZIP_OTHER})
_LOCAL_NAME = Struct("<26xHH")
_END = Struct("<20xH")


def sniff(source: ByteSource, limits: Limits | None = None) -> FileKind:
    """Say what a file is.

    Reads its first 4 KiB and, if it is a zip archive, its directory. A kind is a first judgement:
    the reader of that kind still checks everything.

    Raises:
        InputError: the file could not be read.
    """
    if source.size == 0:
        return FileKind.EMPTY
    head = source.pread(0, min(source.size, _HEAD_BYTES))
    if head.startswith((b"PK\3\4", b"PK\5\6")):
        return _zip_kind(source, head, limits or Limits())
    return _first(_BY_HEAD, head, FileKind.UNKNOWN)


def require_source(
    source: ByteSource, accepted: Collection[FileKind], limits: Limits | None = None
) -> FileKind:
    """Say what a file is, and refuse it unless its kind is accepted.

    Raises:
        InputError: it is of another kind, or a zip archive that can't be read: says what of it.
    """
    kind = sniff(source, limits)
    cause = ""
    if kind in _ZIPS and kind not in accepted:
        try:
            read_zip_directory(source, limits)
        except InputError as error:
            if isinstance(error, AmbiguousArchive) or kind is FileKind.TORCH_ZIP_BROKEN:
                raise
            cause = error.what
    require_kind(kind, accepted, source.name, cause)
    return kind


def _first(signatures: _Signatures, data: bytes, otherwise: FileKind) -> FileKind:
    return next((kind for pattern, kind in signatures if pattern.match(data)), otherwise)


def _zip_kind(source: ByteSource, head: bytes, limits: Limits) -> FileKind:
    try:
        archive = read_zip_directory(source, limits)
    except InputError:
        return _refused_zip_kind(source, head)
    return _torch_kind(archive)


def _torch_kind(archive: ZipArchive) -> FileKind:
    members = archive.members
    if "model.json" in members:
        return FileKind.TORCHSCRIPT_OLD
    if ".data/extern_modules" in members:
        return FileKind.TORCH_PACKAGE
    if "data.pkl" not in members:
        return FileKind.ZIP_OTHER
    return FileKind.TORCHSCRIPT if "constants.pkl" in members else FileKind.TORCH_ZIP


def _refused_zip_kind(source: ByteSource, head: bytes) -> FileKind:
    name = b""
    if len(head) >= 30:
        name_size, _ = _LOCAL_NAME.unpack_from(head)
        name = head[30 : 30 + name_size]
    if _TORCH_MEMBER.fullmatch(name):
        return FileKind.TORCH_ZIP_BROKEN
    return _first(
        _BY_FIRST_MEMBER, name, FileKind.ZIP_OTHER if _has_end(source) else FileKind.ZIP_BROKEN
    )


def _has_end(source: ByteSource) -> bool:
    """Whether the file ends with a zip directory's end record and the comment that it promises."""
    size = min(source.size, _HEAD_BYTES)
    tail = source.pread(source.size - size, size)
    at = tail.rfind(b"PK\5\6")
    if at < 0 or at + _END.size > size:
        return False
    comment: int = _END.unpack_from(tail, at)[0]
    return at + _END.size + comment == size
