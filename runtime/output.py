"""Put finished files in their places: whole and together or not at all, never over others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from sam3d_gguf.extractors.publication import PublicationSet


def publish(files: Mapping[Path, Iterable[bytes]]) -> None:
    """Write new files, each given as its parts, and make them appear together.

    Raises:
        OutputError: one exists, or a folder is missing or cannot be written.
    """
    with PublicationSet() as publications:
        for path, parts in files.items():
            publication = publications.create(path)
            for part in parts:
                publication.write(part)
            publication.seal()
        publications.commit()
