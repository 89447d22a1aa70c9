"""What of this machine a worker must see to run Python with NumPy: as few files as possible.

Nothing is taken by name. The dynamic loader itself says which shared libraries this interpreter
uses, and under which paths it found them; the same paths let it find them again in the sandbox.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sam3d_gguf.extractors.sandbox.job import Package

# Imported for the libraries that they load, which a worker needs too.
USERS_OF_LIBRARIES = (ctypes, hashlib, zlib, np)


@dataclass(frozen=True, slots=True)
class Interpreter:
    """The running interpreter, as a sandbox must show it.

    Args:
        executable: the binary itself, never a link or a virtual environment's shim.
        stdlib: its standard library.
        hidden: folders of other packages inside `stdlib`, to be covered.
        libraries: shared libraries, each at the path where the loader looks for it.
        numpy: NumPy, and the libraries that its wheel brings along.
    """

    executable: Path
    stdlib: Path
    hidden: tuple[Path, ...]
    libraries: tuple[Path, ...]
    numpy: tuple[Package, ...]


def running_interpreter() -> Interpreter:
    """Describe the interpreter that runs this code; every path is absolute and exists."""
    stdlib = Path(sysconfig.get_path("stdlib")).resolve()
    numpy = _numpy()
    covered = (stdlib, *(package.path for package in numpy))
    others = [Path(entry).resolve() for entry in sys.path if entry]
    packages = [path for path in others if path.name in ("site-packages", "dist-packages")]
    libraries = [
        path
        for path in loaded_libraries()
        if not any(path.resolve().is_relative_to(folder) for folder in (*covered, *packages))
    ]
    hidden = [stdlib / name for name in ("site-packages", "dist-packages")]
    return Interpreter(
        executable=Path(sys.executable).resolve(),
        stdlib=stdlib,
        hidden=tuple(path for path in hidden if path.is_dir()),
        libraries=tuple(libraries),
        numpy=numpy,
    )


def _numpy() -> tuple[Package, ...]:
    folder = Path(np.__path__[0])
    found = (folder, folder.with_name("numpy.libs"))
    return tuple(Package(path.name, path.resolve()) for path in found if path.is_dir())


class _LoadedObject(ctypes.Structure):
    """The head of `struct dl_phdr_info` (dl_iterate_phdr(3))."""

    _fields_ = (("address", ctypes.c_void_p), ("name", ctypes.c_char_p))


_Visitor = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(_LoadedObject), ctypes.c_size_t, ctypes.c_void_p
)


def loaded_libraries() -> list[Path]:
    """The shared libraries of this process, by the paths under which the loader found them."""
    names: list[bytes] = []

    def visit(loaded: ctypes._Pointer[_LoadedObject], size: int, data: int | None) -> int:  # pyright: ignore[reportPrivateUsage]
        names.append(loaded.contents.name or b"")
        return 0

    ctypes.CDLL(None).dl_iterate_phdr(_Visitor(visit), None)
    paths = [Path(os.path.normpath(os.fsdecode(name))) for name in names if name.startswith(b"/")]
    return [path for path in dict.fromkeys(paths) if path.is_file()]
