"""What a file holds, whichever of the known kinds it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sam3d_gguf.convert.gguf_format import GgufValue
from sam3d_gguf.convert.gguf_reader import read_gguf
from sam3d_gguf.extractors.extract import inspect_legacy
from sam3d_gguf.extractors.extraction import TOOL, Origin
from sam3d_gguf.extractors.files import OpenedFile, open_source
from sam3d_gguf.extractors.hashing import hash_file
from sam3d_gguf.extractors.kinds import CHECKPOINTS, FileKind
from sam3d_gguf.extractors.object_tree import Json
from sam3d_gguf.extractors.progress import QUIET, Progress
from sam3d_gguf.extractors.safetensors_format import read_header
from sam3d_gguf.extractors.sandbox.job import SandboxChoice
from sam3d_gguf.extractors.scratch import temporary_folder
from sam3d_gguf.extractors.sniff import require_source
from sam3d_gguf.manifests.sources import load_sources
from sam3d_gguf.schemas.strict_json import JsonInput

_READABLE = CHECKPOINTS | {FileKind.SAFETENSORS, FileKind.GGUF}


@dataclass(frozen=True, slots=True)
class InspectedTensor:
    """A tensor: its type in the file's own terms, PyTorch shape, and bytes (each element counted)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a file is and holds.

    Attributes:
        kind: in words.
        origin: "pinned" if this tool knows the file's hash.
        wrapper: where a legacy file's tensors hang; empty otherwise.
        metadata: a GGUF's or safetensors file's key/values, a TorchScript archive's attributes.
        shared: names of tensors that view one storage.
        left_out: non-tensor content and whatever else no conversion would take: (path, reason).
        inert: calls that a pickle asks for and that were never made: (path, global, count).
        globals: every global that a pickle names.
        code: SHA-256 of each code member.
    """

    name: str
    kind: str
    bytes: int
    sha256: str
    origin: Origin
    tensors: tuple[InspectedTensor, ...]
    wrapper: str = ""
    metadata: Mapping[str, Json] | None = None
    shared: tuple[tuple[str, ...], ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    inert: tuple[tuple[str, str, int], ...] = ()
    globals: tuple[str, ...] = ()
    code: Mapping[str, str] | None = None

    def to_document(self) -> JsonInput:
        """The document that `--json` prints; `document_schemas/inspection.schema.json`."""
        return {
            "schema_version": 1,
            "document": "inspection",
            "tool": TOOL,
            "name": self.name,
            "kind": self.kind,
            "bytes": self.bytes,
            "sha256": self.sha256,
            "origin": self.origin,
            "wrapper": self.wrapper,
            "tensors": [
                {"name": t.name, "dtype": t.dtype, "shape": t.shape, "bytes": t.bytes}
                for t in self.tensors
            ],
            "metadata": self.metadata or {},
            "shared_storages": self.shared,
            "left_out": [{"what": what, "reason": reason} for what, reason in self.left_out],
            "inert": [{"path": p, "global": g, "count": n} for p, g, n in self.inert],
            "globals": self.globals,
            "code": self.code or {},
        }


def inspect(
    path: Path, *, sandbox: SandboxChoice | None = None, progress: Progress = QUIET
) -> Inspection:
    """Say what a file holds; a legacy file is read in the sandbox.

    Raises:
        InputError: it is of no kind that can be read, or malformed.
        SandboxError: the sandbox is missing, or ended its reader.
        OutputError: there is no space for what the reader reports.
    """
    with open_source(path) as file:
        kind = require_source(file.source, _READABLE)
        if kind is FileKind.GGUF:
            return _gguf(file, progress)
        if kind is FileKind.SAFETENSORS:
            return _safetensors(file, progress)
    with temporary_folder() as folder:
        identity, report = inspect_legacy(path, folder, sandbox=sandbox, progress=progress)
    return Inspection(
        name=identity.name,
        kind=report.kind.label,
        bytes=identity.bytes,
        sha256=identity.sha256,
        origin=identity.origin,
        tensors=tuple(
            InspectedTensor(t.name, t.dtype, t.shape, t.nbytes) for t in report.tensors.values()
        ),
        wrapper=report.wrapper,
        metadata=report.attributes,
        shared=report.shared,
        left_out=tuple((item.what, item.reason) for item in report.left_out),
        inert=report.inert,
        globals=report.globals,
        code=report.code,
    )


def _gguf(file: OpenedFile, progress: Progress) -> Inspection:
    header = read_gguf(file.source)
    sha256, origin = _identify(file, progress)
    return Inspection(
        name=file.path.name,
        kind=FileKind.GGUF.label,
        bytes=file.size,
        sha256=sha256,
        origin=origin,
        tensors=tuple(
            InspectedTensor(t.name, t.type.name, t.shape, t.nbytes) for t in header.tensors.values()
        ),
        metadata={key: _json(value) for key, value in header.metadata.items()},
    )


def _safetensors(file: OpenedFile, progress: Progress) -> Inspection:
    header = read_header(file.source)
    sha256, origin = _identify(file, progress)
    return Inspection(
        name=file.path.name,
        kind=FileKind.SAFETENSORS.label,
        bytes=file.size,
        sha256=sha256,
        origin=origin,
        tensors=tuple(
            InspectedTensor(e.name, e.dtype, e.shape, e.nbytes) for e in header.entries.values()
        ),
        metadata=dict(header.metadata),
    )


def _identify(file: OpenedFile, progress: Progress) -> tuple[str, Origin]:
    progress.stage(f"Hash {file.path.name}", file.size)
    sha256 = hash_file(file.source, progress=progress.advance).sha256
    known = load_sources().find(sha256=sha256, size=file.size) is not None
    return sha256, "pinned" if known else "unpinned"


def _json(value: GgufValue) -> Json:
    if isinstance(value.value, tuple):
        return [
            _json(item) if isinstance(item, GgufValue) else _scalar(item) for item in value.value
        ]
    return _scalar(value.value)


def _scalar(value: object) -> Json:
    if isinstance(value, float) and value - value != 0.0:
        return str(value)  # JSON has no infinities and NaN
    return value if isinstance(value, bool | int | float | str) else str(value)
