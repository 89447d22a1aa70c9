"""Private folders for what the sandboxed reader writes, and their faults in words.

Errors name the folder that the user knows, never the hidden one in it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator, Iterable
from pathlib import Path

from sam3d_gguf.extractors.files import OpenedFile
from sam3d_gguf.extractors.kinds import FileKind
from sam3d_gguf.extractors.litter import scratch_folder
from sam3d_gguf.extractors.models import ROLES
from sam3d_gguf.extractors.products import (
    SourceTensor,
    plan_products,
    product_files,
)
from sam3d_gguf.extractors.safetensors_format import SafetensorsSpec, canonical_header
from sam3d_gguf.extractors.target_folder import output_error
from sam3d_gguf.extractors.worker_report import MAX_BYTES, REPORT, WorkerReport, decode
from sam3d_gguf.schemas.errors import InputError, OutputError
from sam3d_gguf.schemas.strict_json import load_file

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_BLOCK = 512  # of st_blocks


@contextlib.contextmanager
def scratch_in(place: Path) -> Generator[Path]:
    """A private folder in a place; gone at the end of the `with` block.

    Raises:
        OutputError: it can't be made there.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(scratch_folder(place))
        except OSError as error:
            raise output_error(error, place) from error
        yield folder


@contextlib.contextmanager
def temporary_folder() -> Generator[Path]:
    """A private folder where temporary files go, which `TMPDIR` says.

    Raises:
        OutputError: there is no such place, or nothing can be made there.
    """
    try:
        place = Path(tempfile.gettempdir())
    except OSError as error:
        raise OutputError(
            "no folder for temporary files can be written to",
            expected="space in TMPDIR, /tmp or /var/tmp",
            action="Free space there, or set TMPDIR to a folder that has some",
        ) from error
    with scratch_in(place) as folder:
        yield folder


def make_outputs(folder: Path, names: Iterable[str]) -> None:
    """Make the empty files that a sandboxed reader may write.

    Raises:
        OutputError: they can't be made.
    """
    for name in names:
        try:
            os.close(os.open(folder / name, _CREATE, 0o600))
        except OSError as error:
            raise output_error(error, folder.parent) from error


def full_disk(folder: Path, source: OpenedFile, kind: FileKind) -> OutputError:
    """The error of a reader that found no space for its files, with what they need as far as known."""
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    missing = _needed(folder, source, kind)
    if missing is None:
        expected = f"room for the reader's report, at most {MAX_BYTES} bytes"
    else:
        expected = f"{missing} bytes more"
    return OutputError(
        f"the disk is full: it has {free} bytes left for what the reader of "
        f"{source.path.name} writes",
        where=str(folder.parent),
        expected=expected,
        action="Free space there, or choose another folder",
    )


def _needed(folder: Path, source: OpenedFile, kind: FileKind) -> int | None:
    """Bytes that the products lack, by the report that was written before; None without one."""
    try:
        document = load_file(folder / REPORT, schema="worker", max_bytes=MAX_BYTES)
        report = decode(document, source.source, kind)
        (model,) = (m for m in ROLES if (folder / product_files(m)[0]).exists())
        sizes = _product_sizes(model, report)
    except (InputError, ValueError):
        return None
    return sum(sizes.values()) - sum(_occupied(folder / name) for name in sizes)


def _product_sizes(model: str, report: WorkerReport) -> dict[str, int]:
    tensors = [SourceTensor(t.name, t.dtype, t.shape) for t in report.tensors.values()]
    sizes: dict[str, int] = {}
    for product in plan_products(model, tensors):
        specs = [SafetensorsSpec(t.name, t.dtype, t.shape) for t in product.tensors]
        header, entries = canonical_header(specs)
        sizes[product.file] = len(header) + entries[-1].end if entries else len(header)
    return sizes


def _occupied(path: Path) -> int:
    return path.lstat().st_blocks * _BLOCK
