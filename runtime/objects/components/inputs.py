"""What a component takes, and the refusal of anything else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sam3d_gguf.runtime.geometry.arrays import Int32
from sam3d_gguf.runtime.tensor_files import TensorFile
from sam3d_gguf.schemas.errors import InputError

Array = NDArray[Any]
Arrays = Mapping[str, Array]
Shape = tuple[int, ...]

LIMITS: Mapping[str, int] = {"H": 1 << 14, "W": 1 << 14, "L": 1 << 16, "N": 1 << 16, "M": 1 << 22}
"""The largest sizes that are left open: of a photo, condition tokens, voxels, and the mesh's cubes."""

_FILE_TYPES = {"F32": "float32", "I32": "int32", "U8": "uint8"}
_NAMED = 3
"""Names in a message; a file can hold any number of them."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a tensor must be.

    Attributes:
        shape: sizes; a key of `LIMITS` is any size from 1 up, the same in all tensors.
        dtype: NumPy's name.
        finite: whether every number must be.
    """

    shape: tuple[int | str, ...]
    dtype: str = "float32"
    finite: bool = True

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class _Found:
    dtype: str
    shape: Shape

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def read_tensors(path: Path, wanted: Mapping[str, Wanted]) -> dict[str, Array]:
    """The tensors of a safetensors file, which are read once their names and shapes are right.

    Raises:
        InputError: no such file, or other tensors than wanted.
    """
    with TensorFile(path) as file:
        found = {
            name: _Found(_FILE_TYPES.get(entry.dtype, entry.dtype), entry.shape)
            for name, entry in file.tensors.items()
        }
        _check_forms(found, wanted, str(path))
        return {name: file.read(name) for name in wanted}


def check_tensors(inputs: Arrays, wanted: Mapping[str, Wanted]) -> None:
    """Refuse other tensors than wanted, and numbers that are not finite.

    Raises:
        InputError: a tensor is missing, unknown, of another shape or type, or not finite.
    """
    found = {name: _Found(array.dtype.name, array.shape) for name, array in inputs.items()}
    _check_forms(found, wanted, "")
    for name, form in wanted.items():
        if form.finite and not np.isfinite(inputs[name]).all():
            raise InputError(f"the input {name} holds numbers that are not finite")


def _check_forms(found: Mapping[str, _Found], wanted: Mapping[str, Wanted], where: str) -> None:
    missing = [name for name in wanted if name not in found]
    unknown = [name for name in found if name not in wanted]
    if missing or unknown:
        what = "missing" if missing else "unknown"
        names = ", ".join(f"{name[:80]!r}" for name in (missing or unknown)[:_NAMED])
        raise InputError(
            f"these inputs are {what}: {names}", where=where, expected=", ".join(wanted)
        )
    sizes: dict[str, int] = {}
    for name, form in wanted.items():
        each = found[name]
        if each.dtype != form.dtype or not _fits(each.shape, form.shape, sizes):
            raise InputError(
                f"the input {name} is {each}",
                where=where,
                expected=", ".join([str(form), *_told(form, sizes)]),
            )


def _told(form: Wanted, sizes: Mapping[str, int]) -> Iterator[str]:
    """What is known of the sizes that are left open."""
    for symbol in form.shape:
        if isinstance(symbol, str):
            known = f"= {sizes[symbol]}" if symbol in sizes else f"up to {LIMITS[symbol]}"
            yield f"{symbol} {known}"


def _fits(shape: Shape, wanted: tuple[int | str, ...], sizes: dict[str, int]) -> bool:
    if len(shape) != len(wanted):
        return False
    for size, form in zip(shape, wanted, strict=True):
        if isinstance(form, int):
            if size != form:
                return False
        elif not 1 <= size <= LIMITS[form] or sizes.setdefault(form, size) != size:
            return False
    return True


def check_voxels(name: str, coords: Int32, side: int, *, ordered: bool = True) -> None:
    """Refuse [N, 4] coordinates that are no voxels of one grid: batch 0, x, y, z.

    Args:
        side: of the grid.
        ordered: whether they must be sorted.

    Raises:
        InputError: a place outside of the grid, twice, or out of order.
    """
    limits = np.array([1, side, side, side])
    outside = np.flatnonzero(((coords < 0) | (coords >= limits)).any(axis=1))
    if len(outside):
        raise InputError(
            f"row {outside[0]} of {name} is {coords[outside[0]].tolist()}",
            expected=f"0 and a place in 0 to {side - 1}",
        )
    x, y, z = coords[:, 1:].astype(np.int64).T
    codes = (x * side + y) * side + z
    order = np.arange(len(codes)) if ordered else np.argsort(codes, kind="stable")
    wrong = np.flatnonzero(np.diff(codes[order]) <= 0)
    if len(wrong):
        row = int(order[wrong[0] + 1])
        raise InputError(
            f"row {row} of {name} is {coords[row].tolist()}, which is there before"
            if not ordered or codes[row] in codes[:row]
            else f"row {row} of {name} is {coords[row].tolist()}, which belongs further up",
            expected="no voxel twice" + (", sorted by x, y, z" if ordered else ""),
        )


def check_range(name: str, value: float, most: float) -> None:
    """Refuse a number that is not from 0 to `most`.

    Raises:
        InputError: it is not.
    """
    if not 0 <= value <= most:
        raise InputError(f"the input {name} is {value:g}", expected=f"0 to {most:g}")
