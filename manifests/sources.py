"""The pinned upstream identities: what counts as official is said here and nowhere else.

>>> sources = load_sources()
>>> sources.with_role("body.checkpoint")[0].bytes
2109129346
>>> sources.find(sha256="0" * 64, size=1) is None
True
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sam3d_gguf.schemas.documents import package_document


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """One published file whose whole identity is known.

    Attributes:
        repository: OWNER/NAME of the model repository, or of the repository of the release.
        revision: commit of the repository, or tag of the release.
        path: path in the repository or release archive.
        bytes: size of the file.
        sha256: of the file, lower-case hexadecimal.
        git_blob_sha1: identifier of the file as a Git blob, where the repository holds it as one.
        role: what it is to the tools, such as `body.checkpoint`, `mhr.asset` or `license`.
    """

    repository: str
    revision: str
    path: str
    bytes: int
    sha256: str
    git_blob_sha1: str | None
    role: str


@dataclass(frozen=True, slots=True)
class OpenSlot:
    """A file that is named upstream but whose identity nobody has filled in: never pinned."""

    repository: str
    path: str
    role: str


@dataclass(frozen=True, slots=True)
class License:
    """A licence text by hash, with the files that hold it as (repository, path)."""

    name: str
    sha256: str
    files: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Repository:
    """A model repository; `revision` is None while it is an open slot."""

    name: str
    revision: str | None
    gated: bool
    files: tuple[PinnedFile, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """A release archive, of which only `members` are wanted."""

    name: str
    url: str
    archive: PinnedFile
    members: tuple[PinnedFile, ...]


@dataclass(frozen=True, slots=True)
class Sources:
    """Everything in `sources.json`.

    Attributes:
        source_revisions: commit of each source code repository, by OWNER/NAME.
        licenses: the licence texts.
        repositories: the model repositories.
        releases: the release archives.
        files: every pinned file, repositories before releases.
        open_slots: the files that are not pinned yet.
    """

    source_revisions: Mapping[str, str]
    licenses: tuple[License, ...]
    repositories: tuple[Repository, ...]
    releases: tuple[Release, ...]
    files: tuple[PinnedFile, ...]
    open_slots: tuple[OpenSlot, ...]

    def find(self, *, sha256: str, size: int) -> PinnedFile | None:
        """Returns the pinned file with that hash and size, the first of equals, or None."""
        matches = (f for f in self.files if f.sha256 == sha256 and f.bytes == size)
        return next(matches, None)

    def with_role(self, role: str) -> tuple[PinnedFile, ...]:
        """Returns the pinned files with that role."""
        return tuple(f for f in self.files if f.role == role)


@functools.cache
def load_sources() -> Sources:
    """Returns the pinned sources that ship with this package."""
    document = package_document("sam3d_gguf.manifests", "sources.json", schema_name="sources")
    return parse_sources(document)


def parse_sources(document: Any) -> Sources:
    """Returns the typed form of a document that meets the `sources` schema."""
    repositories = tuple(_repository(entry) for entry in document["model_repositories"])
    releases = tuple(_release(entry) for entry in document["releases"])
    files = [f for repository in repositories for f in repository.files]
    files += [f for release in releases for f in (release.archive, *release.members)]
    return Sources(
        source_revisions=MappingProxyType(
            {entry["repository"]: entry["revision"] for entry in document["source_revisions"]}
        ),
        licenses=tuple(_license(entry) for entry in document["licenses"]),
        repositories=repositories,
        releases=releases,
        files=tuple(files),
        open_slots=tuple(
            OpenSlot(entry["repository"], slot["path"], slot["role"])
            for entry in document["model_repositories"]
            for slot in entry["files"]
            if _pinned(slot, entry["repository"], entry["revision"]) is None
        ),
    )


def _license(entry: Any) -> License:
    files = tuple((file["repository"], file["path"]) for file in entry["files"])
    return License(entry["name"], entry["sha256"], files)


def _repository(entry: Any) -> Repository:
    name, revision = entry["repository"], entry["revision"]
    files = (_pinned(file, name, revision) for file in entry["files"])
    return Repository(name, revision, entry["gated"], tuple(f for f in files if f is not None))


def _release(entry: Any) -> Release:
    repository, tag = entry["repository"], entry["tag"]
    return Release(
        entry["name"],
        entry["url"],
        _complete(entry["archive"], repository, tag),
        tuple(_complete(member, repository, tag) for member in entry["members"]),
    )


def _pinned(file: Any, repository: str, revision: str | None) -> PinnedFile | None:
    """Returns the file as pinned only when nothing of its identity is missing."""
    if revision is None or file["bytes"] is None or file["sha256"] is None:
        return None
    return _complete(file, repository, revision)


def _complete(file: Any, repository: str, revision: str) -> PinnedFile:
    return PinnedFile(
        repository,
        revision,
        file["path"],
        file["bytes"],
        file["sha256"],
        file.get("git_blob_sha1"),
        file["role"],
    )
