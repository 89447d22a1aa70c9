"""New files that appear whole, verified and together, or not at all.

    with PublicationSet() as publications:
        model = publications.create(Path("body.gguf"), size=len(data))
        model.write(data)
        model.seal()
        manifest = publications.create(Path("manifest.json"))
        manifest.write(describe(model.sealed))
        manifest.seal()
        publications.commit()

A file is written in its target folder, without a name where the file system can do that (O_TMPFILE)
and under an unfinished name where it can't; `seal` forces it to the disk, reads it back from there
(see `direct_io`) and compares; `commit` links the files into place in the order they were created,
which fails where a name is taken and never replaces anything. Leaving the `with` block without `commit` leaves nothing. What a killed run left
is removed by the next run in that folder (see `litter`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sam3d_gguf.extractors.direct_io import DiskSource, StreamWriter, forget, reopen_direct
from sam3d_gguf.extractors.files import OpenedFile
from sam3d_gguf.extractors.hashing import Progress, Readable, Region, hash_file
from sam3d_gguf.extractors.litter import (
    Journal,
    JournalEntry,
    create_locked,
    current_umask,
    sweep,
)
from sam3d_gguf.extractors.target_folder import TargetFolder, output_error
from sam3d_gguf.schemas.closing import Closing
from sam3d_gguf.schemas.errors import InputError, OutputError


@dataclass(frozen=True, slots=True)
class SealedFile:
    """A file that is complete, on disk and read back: where it will appear, bytes, SHA-256 (hex)."""

    path: Path
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ExpectedRegion:
    """What must be read back from [offset, offset + size): the SHA-256 (hex) of what was written."""

    offset: int
    size: int
    sha256: str


def settle(fd: int) -> None:
    """Forces a file to the disk and asks the kernel to forget it, so that a reading checks the disk.

    Raises:
        OSError: the file could not be written out.
    """
    os.fsync(fd)
    forget(fd)


class Publication:
    """One file of a `PublicationSet`: written, sealed, and waiting for the set's commit."""

    def __init__(
        self,
        folder: TargetFolder,
        destination: Path,
        size: int | None,
        fd: int,
        unfinished: str | None,
    ) -> None:
        self.destination = destination
        self.size = size
        self.fd = fd
        self._folder = folder
        self._unfinished = unfinished
        self._digest = hashlib.sha256()
        self._appended = 0
        self._stream: StreamWriter | None = None
        self._sealed: SealedFile | None = None

    @property
    def folder(self) -> TargetFolder:
        """The folder where the file will appear."""
        return self._folder

    @property
    def sealed(self) -> SealedFile:
        """What `seal` returned.

        Raises:
            ValueError: the file isn't sealed.
        """
        if self._sealed is None:
            raise ValueError(f"{self.destination} is not sealed")
        return self._sealed

    @property
    def is_sealed(self) -> bool:
        """Whether `seal` has succeeded."""
        return self._sealed is not None

    @property
    def missing_bytes(self) -> int:
        """Bytes of the announced size that have no disk blocks yet."""
        return max(0, (self.size or 0) - os.fstat(self.fd).st_blocks * 512)

    def write(self, data: Readable) -> None:
        """Appends data.

        Raises:
            OutputError: the disk is full, or any other reason why it can't be written.
        """
        view = memoryview(data).cast("B")
        self._digest.update(view)
        with self._failing("writing"):
            while view:
                count = os.pwrite(self.fd, view, self._appended)
                self._appended += count
                view = view[count:]

    def write_at(self, offset: int, data: Readable) -> None:
        """Writes data at an offset, by the time of `seal`, which is given the regions to expect.

        Raises:
            OutputError: the disk is full, or any other reason why it can't be written.
        """
        if self._stream is None:
            self._stream = StreamWriter(self.fd, reopen_direct(self.fd, os.O_WRONLY))
        with self._failing("writing"):
            self._stream.write_at(offset, memoryview(data).cast("B"))

    def resize(self, size: int) -> None:
        """Sets the file's size; bytes not written yet read as zeros.

        Raises:
            OutputError: the file system doesn't take the size.
        """
        with self._failing("writing"):
            os.ftruncate(self.fd, size)

    def seal(
        self, regions: Sequence[ExpectedRegion] | None = None, progress: Progress | None = None
    ) -> SealedFile:
        """Forces the file to the disk, reads it back and compares it with what was written.

        Args:
            regions: what the whole file must be, in order and without gaps; not needed where all
                was written by `write`.
            progress: called with the number of bytes read back since the last call.

        Raises:
            OutputError: it can't be forced to the disk, has another size, or differs.
            ValueError: the regions don't cover the file.
        """
        if regions is None:
            regions = [ExpectedRegion(0, self._appended, self._digest.hexdigest())]
        size = _covered(regions)
        self._expect(self.size if self.size is not None else size, size)
        with self._failing("writing"):
            if self._stream is not None:
                self._stream.flush()
            settle(self.fd)
        self._expect(os.fstat(self.fd).st_size, size)
        try:
            spans = [Region(region.offset, region.size) for region in regions]
            with DiskSource(self.fd, str(self.destination)) as source:
                digests = hash_file(source, spans, progress=progress)
        except InputError as error:
            raise OutputError(
                f"the file can't be read back: {error.what}", where=str(self.destination)
            ) from error
        for region, found in zip(regions, digests.regions, strict=True):
            if found != region.sha256:
                raise OutputError(
                    f"{region.size} bytes at {region.offset} read back differently",
                    where=str(self.destination),
                    action="Check the disk and the memory of this machine",
                )
        self._sealed = SealedFile(self.destination, size, digests.sha256)
        return self._sealed

    def take_over(self, sha256: str) -> SealedFile:
        """Seals a file that was already read back; see `PublicationSet.adopt`."""
        self._sealed = SealedFile(self.destination, os.fstat(self.fd).st_size, sha256)
        return self._sealed

    def link(self) -> None:
        """Makes the file appear.

        Raises:
            OutputError: something else has the name, or it can't be linked.
        """
        # The magic link names the inode behind the descriptor, whatever became of other names.
        with self._failing("linking"):
            os.link(
                f"/proc/self/fd/{self.fd}",
                self.destination.name,
                dst_dir_fd=self._folder.fd,
                follow_symlinks=True,
            )

    def unlink(self) -> None:
        """Makes the file disappear again, if it is there and no other has taken its name."""
        with contextlib.suppress(OSError):
            name = self.destination.name
            found = os.stat(name, dir_fd=self._folder.fd, follow_symlinks=False)
            if os.path.samestat(found, os.fstat(self.fd)):
                os.unlink(name, dir_fd=self._folder.fd)

    def close(self) -> None:
        """Removes the unfinished name and closes the file; unless linked, it is gone."""
        if self._stream is not None:
            self._stream.close()
        if self._unfinished is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._unfinished, dir_fd=self._folder.fd)
        os.close(self.fd)

    def _expect(self, size: int, found: int) -> None:
        if size != found:
            raise OutputError(
                f"the file has {found} bytes", where=str(self.destination), expected=f"{size}"
            )

    @contextlib.contextmanager
    def _failing(self, doing: str) -> Generator[None]:
        try:
            yield
        except OSError as error:
            detail = ""
            if doing == "writing" and self.size is not None:
                detail = f" ({self.missing_bytes} of {self.size} bytes are still missing)"
            raise output_error(error, self.destination, detail) from error


def _covered(regions: Sequence[ExpectedRegion]) -> int:
    position = 0
    for region in regions:
        if region.offset != position:
            raise ValueError(f"the regions leave out or repeat byte {position}")
        position += region.size
    return position


class PublicationSet(Closing):
    """Files that appear together, in the order in which they were created."""

    def __init__(self) -> None:
        self._folders: list[TargetFolder] = []
        self._publications: list[Publication] = []

    def create(self, destination: Path, size: int | None = None) -> Publication:
        """Starts a file, after removing what killed runs left in its folder.

        Args:
            destination: where it will appear; its folder must exist, itself must not.
            size: bytes that it will have, if known: the space is checked, and `seal` holds it to it.

        Raises:
            OutputError: the destination exists or is taken by this set, the folder is missing or
                can't be written to, or the space doesn't suffice.
        """
        folder = self._reserve(destination)
        if size is not None:
            announced = [
                p.missing_bytes for p in self._publications if p.folder.device == folder.device
            ]
            folder.check_space(destination, size + sum(announced))
        fd, name = folder.create(destination)
        publication = Publication(folder, destination, size, fd, name)
        self._publications.append(publication)
        return publication

    def require_absent(self, destination: Path) -> None:
        """Checks, before work begins, that a file could appear there.

        Raises:
            OutputError: as for `create`.
        """
        self._reserve(destination)

    def adopt(self, file: OpenedFile, destination: Path, sha256: str) -> Publication:
        """Adds a complete file, made in a scratch folder on the destination's file system.

        The caller has called `settle` on its descriptor, and then read it through it, with this
        SHA-256 as the result. Its owner and mode become those of a file made here.

        Raises:
            OutputError: as for `create`; or it lies on another file system.
            InputError: the file was changed since it was opened.
        """
        folder = self._reserve(destination)
        if file.identity.device != folder.device:
            raise OutputError(
                "the file was made on another file system", where=str(destination), expected="one"
            )
        file.assert_unchanged()
        fd = os.dup(file.fd)
        publication = Publication(folder, destination, file.size, fd, None)
        self._publications.append(publication)
        try:
            os.fchown(fd, os.geteuid(), os.getegid())
            os.fchmod(fd, 0o666 & ~current_umask())
            os.fsync(fd)
            file.renew()
        except OSError as error:
            raise output_error(error, destination) from error
        publication.take_over(sha256)
        return publication

    def commit(self) -> tuple[SealedFile, ...]:
        """Makes every file appear: all of them, or none.

        Raises:
            OutputError: a name was taken meanwhile, or the folder can't be written; nothing is left.
            ValueError: a file is not sealed.
        """
        sealed = tuple(publication.sealed for publication in self._publications)
        journals = _Journals()
        try:
            if len(sealed) > 1:
                journals.write(self._publications)
            for publication in self._publications:
                publication.link()
            self._sync_folders()
            journals.remove_primary()
        except BaseException as error:
            for publication in self._publications:
                publication.unlink()
            with contextlib.suppress(OSError):
                journals.remove_primary()
            if isinstance(error, OSError):
                raise output_error(error, self._publications[-1].destination) from error
            raise
        finally:
            journals.close()
        self._sync_folders()
        return sealed

    def _reserve(self, destination: Path) -> TargetFolder:
        if destination.name in ("", ".."):
            raise OutputError("this is not a file's path", where=str(destination))
        folder = self._open_folder(destination.parent)
        folder.check_absent(destination)
        for other in self._publications:
            if (other.folder.key, other.destination.name) == (folder.key, destination.name):
                raise OutputError("two outputs have the same path", where=str(destination))
        return folder

    def _open_folder(self, path: Path) -> TargetFolder:
        folder = TargetFolder(path)
        for known in self._folders:
            if known.key == folder.key:
                folder.close()
                return known
        self._folders.append(folder)
        sweep(folder.fd)
        return folder

    def _sync_folders(self) -> None:
        for folder in self._folders:
            try:
                os.fsync(folder.fd)
            except OSError as error:
                raise output_error(error, folder.path) from error

    def close(self) -> None:
        """Ends it: what is not committed is gone."""
        for publication in self._publications:
            publication.close()
        for folder in self._folders:
            folder.close()


class _Journals:
    """The journals of one commit: the last file's folder has the primary one."""

    def __init__(self) -> None:
        self._open: list[tuple[TargetFolder, int, str]] = []

    def write(self, publications: Sequence[Publication]) -> None:
        """Puts a journal on disk in every folder, before any file appears."""
        folders = {p.folder.key: p.folder for p in reversed(publications)}
        main, *others = folders.values()
        name = publications[-1].destination.name
        for folder in (main, *others):
            self._open.append((folder, *create_locked(folder.fd, name, "journal")))
        primary = str(main.path / self._open[0][2])
        for folder, fd, _ in self._open:
            files = tuple(
                JournalEntry.of(p.destination.name, p.fd)
                for p in publications
                if p.folder is folder
            )
            if folder is main:
                journal = Journal(files, folders=tuple(str(other.path) for other in others))
            else:
                journal = Journal(files, primary=primary)
            with os.fdopen(fd, "wb", closefd=False) as file:
                file.write(journal.to_json())
            os.fsync(fd)
            os.fsync(folder.fd)

    def remove_primary(self) -> None:
        """Removes the journal that decides; does nothing where it is gone."""
        if self._open:
            folder, _, name = self._open[0]
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder.fd)

    def close(self) -> None:
        """Removes the other journals and ends the locks."""
        for folder, fd, name in self._open:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder.fd)
            os.close(fd)
