"""Writes the first inputs of a checkpoint target, with tests/ in PYTHONPATH:

    python tests/fuzz/checkpoint_seeds.py TARGET FOLDER

The files that torch wrote (tests/fixtures/legacy), whole and as their pickles, and the hostile
corpus.
"""

from __future__ import annotations

import hashlib
import io
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import hostile_corpus

_HERE = Path(__file__).parent
_FIXTURES = _HERE.parent / "fixtures" / "legacy"
_MAX_BYTES = 4_096


def seeds(target: str) -> Iterator[bytes]:
    """The inputs in the form that the target takes them in."""
    whole = [path.read_bytes() for path in sorted(_FIXTURES.glob("*.pt"))]
    archives = [data for data in whole if data.startswith(b"PK")]
    old = [data for data in whole if not data.startswith(b"PK")]
    pickles = [data for _, data in hostile_corpus.pickles()]
    pickles += [content for data in archives for content in members(data, ".pkl")]
    files = [data for _, data in hostile_corpus.files()]
    match target:
        case "pickle":
            yield from pickles
        case "torch_zip":
            yield from (b"\0" + data for data in (*archives, *files) if data.startswith(b"PK"))
            yield from (bytes([wrapper]) + data for data in pickles for wrapper in (1, 2, 3))
        case _:
            yield from (b"\0" + data for data in (*old, *files) if not data.startswith(b"PK"))
            yield from (bytes([wrapper]) + data for data in pickles for wrapper in (2, 3))


def members(data: bytes, suffix: str) -> Iterator[bytes]:
    """The members of an archive with a suffix."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        yield from (archive.read(name) for name in archive.namelist() if name.endswith(suffix))


def main() -> None:
    """Writes each seed under the name of its digest."""
    target, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for seed in seeds(target):
        if len(seed) <= _MAX_BYTES:
            (folder / hashlib.sha1(seed).hexdigest()).write_bytes(seed)


if __name__ == "__main__":
    main()
