"""MHR parameters to meshes."""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sam3d_gguf.extractors.files import open_source
from sam3d_gguf.runtime.body.mhr import EXPRESSION, IDENTITY, PARAMETERS
from sam3d_gguf.runtime.geometry.arrays import Float32
from sam3d_gguf.runtime.npy import npy_array
from sam3d_gguf.schemas.errors import InputError
from sam3d_gguf.schemas.strict_json import as_object, load_file

MAX_ROWS = 100_000
MAX_MESHES = 64
"""Rows up to which mesh.glb and mesh.obj are written."""

_MAX_BYTES = 1 << 28
_WIDTHS = {"identity": IDENTITY, "model_parameters": PARAMETERS, "expression": EXPRESSION}


@dataclass(frozen=True, slots=True, eq=False)
class MhrParameters:
    """B bodies: identity [B or 1, 45], model parameters [B, 204], expression [B, 72] or None."""

    identity: Float32
    model_parameters: Float32
    expression: Float32 | None


def read_parameters(path: Path) -> MhrParameters:
    """Parameters from JSON of the schema `mhr-parameters`, or from .npz arrays of those names.

    Raises:
        InputError: not such a file, or shapes that do not fit.
    """
    found = _read_npz(path) if path.suffix == ".npz" else _read_json(path)
    for name in found.keys() & _WIDTHS.keys():
        if found[name].size == 0:
            raise InputError(f"{name} has no rows", where=str(path), expected="at least one")
    unknown = sorted(set(found) - set(_WIDTHS))
    missing = sorted({"identity", "model_parameters"} - set(found))
    if unknown or missing:
        raise InputError(
            f"arrays {', '.join(sorted(found)) or 'none'}",
            where=str(path),
            expected="identity, model_parameters and perhaps expression",
        )
    arrays = {name: _checked(name, array, path) for name, array in found.items()}
    return MhrParameters(arrays["identity"], arrays["model_parameters"], arrays.get("expression"))


def _read_json(path: Path) -> dict[str, NDArray[Any]]:
    document = as_object(load_file(path, schema="mhr-parameters", max_bytes=256 << 20))
    return {
        name: np.array(rows, np.float64)
        for name, rows in document.items()
        if name != "schema_version"
    }


def _read_npz(path: Path) -> dict[str, NDArray[Any]]:
    with open_source(path) as opened, os.fdopen(os.dup(opened.fd), "rb") as stream:
        try:
            with zipfile.ZipFile(stream) as archive:
                return _read_members(archive, path)
        except (MemoryError, InputError):
            raise
        except Exception as error:  # zipfile raises errors of many kinds on damaged files
            raise InputError(
                f"the file can't be read as .npz: {error}",
                where=str(path),
                expected="what numpy.savez writes",
            ) from error


def _read_members(archive: zipfile.ZipFile, path: Path) -> dict[str, NDArray[Any]]:
    members = archive.infolist()
    size = sum(member.file_size for member in members)
    if size > _MAX_BYTES:
        raise InputError(
            f"the arrays take {size} bytes", where=str(path), expected=f"at most {_MAX_BYTES}"
        )
    names = [member.filename.removesuffix(".npy") for member in members]
    if len(set(names)) != len(names):
        raise InputError("two arrays have one name", where=str(path))
    return {
        name: npy_array(archive.read(member), f"{path}, {member.filename}")
        for name, member in zip(names, members, strict=True)
    }


def _checked(name: str, array: NDArray[Any], path: Path) -> Float32:
    shaped = array.ndim == 2 and array.shape[1] == _WIDTHS[name] and len(array) <= MAX_ROWS
    if not shaped or array.dtype.kind not in "fiu":
        raise InputError(
            f"{name} has the shape {list(array.shape)} and the type {array.dtype}",
            where=str(path),
            expected=f"numbers [rows, {_WIDTHS[name]}]",
        )
    with np.errstate(over="ignore"):
        narrow = np.ascontiguousarray(array, np.float32)
    finite = np.isfinite(narrow).all(axis=1)
    if not finite.all():
        raise InputError(
            f"a number of {name} is not finite as float32",
            where=f"{path}, row {int(np.argmin(finite))}",
            expected="finite numbers",
        )
    return narrow
