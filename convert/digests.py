"""The two digests that a GGUF file carries of itself, defined byte for byte.

Both are the SHA-256, in lower-case hexadecimal, of

    a line that names the digest and its version, ending in a newline
    the number of records, 64 bits
    the records, in the order of their names or keys (compared as bytes)

with all numbers little endian and all strings and types encoded as in the file itself.

*Content* (line `sam3d.content.v1`): one record for every tensor, which is its tensor info as it
stands in the file (name, number of dimensions, dimensions, type) with the 64-bit offset replaced by
the 32 bytes of the SHA-256 of the tensor's data, padding excluded. It is the same however metadata,
order and alignment change.

*Semantics* (line `sam3d.semantics.v1`): one record for every key/value that changes results, exactly
as it stands in the file (key, type, value).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping

from sam3d_gguf.convert.gguf_format import (
    GgufTensor,
    GgufValue,
    encode_metadata,
    encode_tensor_info,
)

CONTENT_LINE = b"sam3d.content.v1\n"
SEMANTICS_LINE = b"sam3d.semantics.v1\n"


def content_sha256(tensors: Mapping[str, GgufTensor], sha256: Mapping[str, str]) -> str:
    """Returns the content digest.

    Args:
        tensors: every tensor of the file; offsets don't matter.
        sha256: the SHA-256 (hex) of each tensor's data, by name.

    Raises:
        InputError: a name or shape that the format doesn't take.
    """
    return _digest(
        CONTENT_LINE,
        (
            encode_tensor_info(name, tensors[name].shape, tensors[name].type)
            + bytes.fromhex(sha256[name])
            for name in _sorted(tensors)
        ),
    )


def semantics_sha256(metadata: Mapping[str, GgufValue]) -> str:
    """Returns the semantics digest of exactly the key/values given.

    Raises:
        InputError: a key or value that the format doesn't take.
    """
    return _digest(
        SEMANTICS_LINE, (encode_metadata(key, metadata[key]) for key in _sorted(metadata))
    )


def _sorted(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: name.encode("utf-8", "surrogatepass"))


def _digest(line: bytes, records: Iterable[bytes]) -> str:
    encoded = list(records)
    digest = hashlib.sha256(line + struct.pack("<Q", len(encoded)))
    for record in encoded:
        digest.update(record)
    return digest.hexdigest()
