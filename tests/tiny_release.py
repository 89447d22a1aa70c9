"""The tiny model: its files, its releases, and changed forms of them made without torch."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from checkpoint_bytes import (
    Tree,
    legacy_checkpoint,
    module,
    script_archive,
    storage,
    tensor,
    zip_checkpoint,
)
from facts import TINY

from sam3d_gguf.convert.request import Request
from sam3d_gguf.extractors.checkpoint import read_archive
from sam3d_gguf.extractors.files import open_source
from sam3d_gguf.extractors.materialize import iter_blocks

CHECKPOINT = TINY / "model.ckpt"
CONFIG = TINY / "model_config.yaml"
ASSET = TINY / "mhr_model.stub.pt"
Json = dict[str, Any]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Release:
    """A release of the tiny model in a folder, and the safetensors that it was made from."""

    folder: Path
    extraction: Path

    @property
    def manifest(self) -> Path:
        """The release's manifest."""
        return self.folder / "manifest.json"

    @property
    def body(self) -> Path:
        """The Body file of the single layout."""
        return self.folder / "body.gguf"

    @property
    def mhr(self) -> Path:
        """The MHR file of the single layout."""
        return self.folder / "mhr.gguf"

    @property
    def mhr_extraction(self) -> Path:
        """The folder of MHR's safetensors."""
        return self.extraction / "mhr"

    def copy(self, folder: Path) -> Release:
        """The same files in a folder of a test's own."""
        shutil.copytree(self.folder, folder / "release")
        return Release(folder / "release", self.extraction)

    def document(self) -> Json:
        """The manifest, parsed."""
        return read_json(self.manifest)

    def files(self) -> dict[str, Json]:
        """The manifest's files by role."""
        return {file["role"]: file for file in self.document()["files"]}


def request(out: Path, **changes: Any) -> Request:
    """The conversion of the tiny model from its legacy files."""
    arguments: dict[str, Any] = {
        "out": out,
        "checkpoint": CHECKPOINT,
        "mhr": ASSET,
        "allow_unpinned": True,
        **changes,
    }
    return Request(**arguments)


def from_extraction(extraction: Path, out: Path, **changes: Any) -> Request:
    """The same conversion from what an earlier one extracted, which needs no sandbox."""
    arguments: dict[str, Any] = {
        "checkpoint": None,
        "extraction": extraction,
        "config": CONFIG,
        "mhr": extraction / "mhr",
        **changes,
    }
    return request(out, **arguments)


def read_json(path: Path) -> Json:
    """A JSON document as plain Python values."""
    document: Json = json.loads(path.read_text())
    return document


def write_json(path: Path, document: Json) -> None:
    """Write a document as somebody would who edits one."""
    path.write_text(json.dumps(document, indent=1))


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def names_in(folder: Path) -> list[str]:
    """All that a folder holds, unfinished files included."""
    return sorted(path.name for path in folder.iterdir())


def load_file(path: Path) -> dict[str, Array]:
    """The tensors of a safetensors file, as its own library reads them."""
    loaded: dict[str, Array] = safetensors.numpy.load_file(path)  # pyright: ignore[reportUnknownMemberType]
    return loaded


def edited_extraction(
    source: Path,
    target: Path,
    change: Callable[[dict[str, Array]], None],
    report: Callable[[Json], None] = lambda _: None,
) -> Path:
    """A copy of an extraction with other tensors and a report that fits them.

    Args:
        source: the extraction.
        target: the folder to make.
        change: changes the tensors of all its files, by their names there.
        report: changes the report afterwards.
    """
    target.mkdir()
    document = read_json(source / "extraction.json")
    for product in document["products"]:
        tensors = load_file(source / product["file"])
        before = set(tensors)
        change(tensors)
        path = target / product["file"]
        path.write_bytes(canonical_safetensors(tensors))
        product |= {
            "bytes": path.stat().st_size,
            "sha256": sha256(path),
            "tensors": len(tensors),
        }
        _fit_report(document, product["file"], tensors, before)
    report(document)
    write_json(target / "extraction.json", document)
    return target


def _fit_report(document: Json, file: str, tensors: Mapping[str, Array], before: set[str]) -> None:
    rows = [row for row in document["tensors"] if row["file"] == file and row["target"] in tensors]
    others = [row for row in document["tensors"] if row["file"] != file]
    prefix = "backbone.encoder." if file == "backbone.safetensors" else ""
    for name in sorted(tensors.keys() - before):
        rows.append({**rows[0], "name": prefix + name, "target": name, "source_dtype": None})
    document["tensors"] = others + rows
    for row in rows + document["added"]:
        values = tensors.get(row["target"])
        if values is None or row["file"] != file:
            continue
        dtype = _DTYPES[values.dtype.str]
        row |= {
            "dtype": dtype,
            "shape": list(values.shape),
            "sha256": hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest(),
        }
        if "source_dtype" in row and not (row["source_dtype"] == "BF16" and dtype == "F32"):
            row["source_dtype"] = dtype


_DTYPES = {
    "<f2": "F16",
    "<f4": "F32",
    "<f8": "F64",
    "<i4": "I32",
    "<i8": "I64",
    "|b1": "BOOL",
    "|u1": "U8",
}


def canonical_safetensors(tensors: Mapping[str, Array]) -> bytes:
    """The published form, written down once more: sorted by name, compact JSON, padded to 8."""
    entries: dict[str, Json] = {}
    data = b""
    for name in sorted(tensors):
        values = np.array(tensors[name], order="C")
        end = len(data) + values.nbytes
        entries[name] = {
            "dtype": _DTYPES[values.dtype.str],
            "shape": list(values.shape),
            "data_offsets": [len(data), end],
        }
        data += values.tobytes()
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data


# Legacy files


@dataclass(frozen=True)
class Source:
    """A tensor of a legacy file to be written: dtype by its safetensors name, shape, raw bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


_STORAGES = {
    "BF16": "BFloat16Storage",
    "F16": "HalfStorage",
    "F32": "FloatStorage",
    "F64": "DoubleStorage",
    "I32": "IntStorage",
    "I64": "LongStorage",
    "BOOL": "BoolStorage",
}


def sources_of(path: Path) -> dict[str, Source]:
    """The tensors of a legacy file, to be changed and written again."""
    with open_source(path) as file:
        archive = read_archive(file.source)
        return {
            name: Source(
                ref.dtype, ref.shape, b"".join(b.tobytes() for b in iter_blocks(file.source, ref))
            )
            for name, ref in archive.tensors.items()
        }


def checkpoint_of(
    tensors: Mapping[str, Source],
    beside: Mapping[str, Tree] | None = None,
    *,
    wrapper: str = "",
    shared: Mapping[str, str] | None = None,
) -> bytes:
    """A zip checkpoint.

    Args:
        tensors: its state dict.
        beside: other entries of the outermost dictionary.
        wrapper: the entry that holds the state dict, if it is not the outermost dictionary itself.
        shared: tensors that view the storage of another, by name.
    """
    state, storages = _written(tensors)
    for name, other in (shared or {}).items():
        state[name] = state[other]
    root: dict[str, Tree] = {wrapper: state} if wrapper else state
    return zip_checkpoint({**root, **(beside or {})}, storages)


def legacy_checkpoint_of(tensors: Mapping[str, Source]) -> bytes:
    """A checkpoint with a flat state dict in the form before torch 1.6."""
    # There a storage may be a view of another, or None.
    state, storages = _written(tensors, None)
    counts = {str(n): math.prod(source.shape) for n, source in enumerate(tensors.values())}
    return legacy_checkpoint(state, storages, counts=counts)


def asset_of(tensors: Mapping[str, Source], attributes: Mapping[str, Tree]) -> bytes:
    """A TorchScript archive of modules, with plain attributes by dotted path."""
    state, storages = _written(tensors)
    root: dict[str, Any] = {}
    for name, value in {**state, **attributes}.items():
        *parents, last = name.split(".")
        place = root
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return script_archive(_modules(root), storages)


def _modules(attributes: Mapping[str, Any]) -> Tree:
    return module(
        {k: _modules(v) if isinstance(v, dict) else v for k, v in attributes.items()}  # pyright: ignore[reportUnknownArgumentType]
    )


def _written(
    tensors: Mapping[str, Source], *rest: Tree
) -> tuple[dict[str, Tree], dict[str, bytes]]:
    state: dict[str, Tree] = {}
    storages: dict[str, bytes] = {}
    for number, (name, source) in enumerate(tensors.items()):
        strides = tuple(math.prod(source.shape[axis + 1 :]) for axis in range(len(source.shape)))
        storages[str(number)] = source.data
        lies = storage(str(number), math.prod(source.shape), _STORAGES[source.dtype], *rest)
        state[name] = tensor(source.shape, strides, 0, lies)
    return state, storages


def flip(path: Path, offset: int) -> None:
    """Change one byte of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def all_text(lines: Iterable[str]) -> str:
    """Lines as one text, to look for words in."""
    return "\n".join(lines)
