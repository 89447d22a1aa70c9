"""GGUF files and releases as somebody would make them who wants a change to be believed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tiny_release import Array, Json, Release, read_json, sha256, write_json

from sam3d_gguf.convert.digests import content_sha256, semantics_sha256
from sam3d_gguf.convert.gguf_format import (
    GgmlType,
    GgufTensor,
    GgufTensorSpec,
    GgufValue,
    ValueType,
    array,
    string,
)
from sam3d_gguf.convert.gguf_reader import read_gguf
from sam3d_gguf.convert.gguf_writer import GgufLayout
from sam3d_gguf.extractors.files import open_source

_NUMPY = {GgmlType.F32: "<f4", GgmlType.F16: "<f2", GgmlType.BF16: "<u2", GgmlType.I32: "<i4"}


@dataclass
class Gguf:
    """A GGUF file in parts that can be changed, and written again.

    Attributes:
        metadata: its key/values.
        tensors: name to type and values (BF16 as uint16).
    """

    metadata: dict[str, GgufValue]
    tensors: dict[str, tuple[GgmlType, Array]] = field(
        default_factory=dict[str, tuple[GgmlType, Array]]
    )

    @classmethod
    def read(cls, path: Path) -> Gguf:
        """The parts of a file."""
        with open_source(path) as file:
            header = read_gguf(file.source)
            parts = cls(dict(header.metadata))
            for name, tensor in header.tensors.items():
                data = file.source.pread(tensor.offset, tensor.nbytes)
                values = np.frombuffer(data, _NUMPY[tensor.type]).reshape(tensor.shape)
                parts.tensors[name] = (tensor.type, values.copy())
        return parts

    def values(self, name: str) -> Array:
        """The values of a tensor, to be changed in place."""
        return self.tensors[name][1]

    def replace(self, name: str, values: Array) -> None:
        """Give a tensor other values of the same type."""
        self.tensors[name] = (self.tensors[name][0], values)

    def fit_digests(self) -> None:
        """Make the file's digests those of what it holds now."""
        hashes = {n: hashlib.sha256(v.tobytes()).hexdigest() for n, (_, v) in self.tensors.items()}
        infos = {n: GgufTensor(n, v.shape, t, 0, v.nbytes) for n, (t, v) in self.tensors.items()}
        semantics = {
            key: value
            for key, value in self.metadata.items()
            if key.startswith(("sam3d.body.", "sam3d.mhr.", "sam3d.objects."))
            and key != "sam3d.mhr.numbered"
        }
        self.metadata["sam3d.tensor_sha256"] = array(
            ValueType.STRING, [hashes[name] for name in sorted(hashes)]
        )
        self.metadata["sam3d.content_sha256"] = string(content_sha256(infos, hashes))
        self.metadata["sam3d.semantics_sha256"] = string(semantics_sha256(semantics))

    def layout(self) -> GgufLayout:
        """Where everything would lie in a file."""
        return GgufLayout.plan(
            self.metadata, (GgufTensorSpec(n, v.shape, t) for n, (t, v) in self.tensors.items())
        )

    def write(self, path: Path, *, data: bool = True) -> None:
        """Replace a file; without `data` the tensors are a hole in it."""
        layout = self.layout()
        with path.open("wb") as file:
            file.write(layout.header)
            for name, tensor in layout.tensors.items() if data else ():
                file.seek(tensor.offset)
                file.write(self.values(name).tobytes())
            os.truncate(file.fileno(), layout.size) if data else file.truncate(layout.size)


def forge(path: Path, change: Callable[[Gguf], object], *, digests: bool = True) -> None:
    """Change a file, and its digests with it."""
    parts = Gguf.read(path)
    change(parts)
    if digests and "sam3d.tensor_sha256" in parts.metadata:
        parts.fit_digests()
    parts.write(path)


def fit_manifest(release: Release, change: Callable[[Json], object] = lambda _: None) -> None:
    """Make the manifest fit the files again, then change it."""
    document = read_json(release.manifest)
    for entry in document["files"]:
        path = release.folder / entry["name"]
        parts = Gguf.read(path)
        entry |= {"bytes": path.stat().st_size, "sha256": sha256(path)}
        entry["tensors"] = _entries(parts.tensors)
        for name in ("content_sha256", "semantics_sha256"):
            if f"sam3d.{name}" in parts.metadata:
                entry[name] = parts.metadata[f"sam3d.{name}"].value
        if "sam3d.content_sha256" not in parts.metadata:
            infos = {
                n: GgufTensor(n, v.shape, t, 0, v.nbytes) for n, (t, v) in parts.tensors.items()
            }
            hashes = {t["name"]: t["sha256"] for t in entry["tensors"]}
            entry["content_sha256"] = content_sha256(infos, hashes)
        for companion in entry["companions"]:
            for name in ("content_sha256", "semantics_sha256"):
                key = f"sam3d.companion.{companion['role']}.{name}"
                companion[name] = parts.metadata[key].value
    change(document)
    write_json(release.manifest, document)


def _entries(tensors: Mapping[str, tuple[GgmlType, Array]]) -> list[Json]:
    return [
        {
            "name": name,
            "type": tensors[name][0].name,
            "shape": list(tensors[name][1].shape),
            "sha256": hashlib.sha256(tensors[name][1].tobytes()).hexdigest(),
        }
        for name in sorted(tensors)
    ]
