"""Finding, checking and loading libggml."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
import re
import stat
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sam3d_gguf.runtime.ggml.errors import BackendError
from sam3d_gguf.runtime.ggml.functions import FUNCTIONS, LOG_CALLBACK, TensorStruct
from sam3d_gguf.runtime.ggml.host_memory import BLAS_LIBRARY, HEADROOM, require_memory
from sam3d_gguf.schemas.strict_json import shorten

GGML_VERSION = "0.15.3"
MAX_BLOCK = 4096
DIRECTORY_VARIABLE = "SAM3D_GGML_LIBRARY_DIR"
CORE_LIBRARIES = ("libggml-base.so", "libggml-cpu.so", "libggml.so")
VULKAN_MODULE = "libggml-vulkan.so"
BLAS_MODULE = "libggml-blas.so"
KERNELS_MODULE = "libsam3d-kernels.so"
KERNELS = ("attention", "exact_attention", "convolve", "norm", "gate", "gelu", "rotate")

Precision = Literal["strict-f32", "fast"]

# Measured: relative error 3e-7 with these, 3e-4 without.
STRICT_VULKAN_ENVIRONMENT = {
    "GGML_VK_DISABLE_F16": "1",
    "GGML_VK_DISABLE_COOPMAT": "1",
    "GGML_VK_DISABLE_COOPMAT2": "1",
}

# OpenBLAS makes the buffers of all its threads as it is loaded; their number is set afterwards.
BLAS_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}

_LOGGER = logging.getLogger("sam3d_gguf.ggml")
# What libggml calls an error ends in one of ours, which is enough for a user.
_LOG_LEVELS = {2: logging.DEBUG, 3: logging.INFO, 4: logging.INFO}


@dataclass(frozen=True, slots=True)
class LibraryFile:
    """One loaded shared library, for reports."""

    path: Path
    sha256: str


@dataclass(frozen=True, slots=True)
class Kernels:
    """Functions that the CPU backend calls as custom operations; addresses but for the last two.

    Attributes:
        block: queries whose scores each thread of `attention` keeps.
        file: the library that they are in.
    """

    attention: int
    exact_attention: int
    convolve: int
    norm: int
    gate: int
    gelu: int
    rotate: int
    block: int
    file: LibraryFile


@dataclass(frozen=True, slots=True)
class Library:
    """libggml, loaded and checked.

    Attributes:
        version: what `ggml_version()` says.
        files: the core libraries with their hashes.
        llamafile: whether the CPU backend has the fast F32 matrix product; without it strict-F32
            runs take two to three times as long.
    """

    handle: ctypes.CDLL
    directory: Path
    version: str
    files: tuple[LibraryFile, ...]
    llamafile: bool
    log_callback: Any

    def call(self, function: str, *arguments: object) -> Any:
        """Calls a function of `FUNCTIONS`; pointers are int, None for NULL."""
        return getattr(self.handle, function)(*arguments)

    def pointer(self, function: str, *arguments: object) -> int:
        """Calls a function that returns a pointer.

        Raises:
            BackendError: it returned NULL.
        """
        result = self.call(function, *arguments)
        if not result:
            raise BackendError(f"{function} failed", where=str(self.directory))
        return int(result)

    def text(self, function: str, *arguments: object) -> str:
        """Calls a function that returns a string."""
        result: bytes | None = self.call(function, *arguments)
        return (result or b"").decode("utf-8", "replace")


def load_library(directory: Path | None = None) -> Library:
    """Loads libggml once per process.

    Args:
        directory: a folder with another build of the same version; None takes the folder that
            the environment variable `SAM3D_GGML_LIBRARY_DIR` names, or ggml-python's own.

    Raises:
        BackendError: the folder or a library is missing, others can write to it, the version
            differs, or another libggml is loaded already.
    """
    if directory is None:
        named = os.environ.get(DIRECTORY_VARIABLE)
        directory = Path(named) if named else _package_directory()
    try:
        return _load(directory.resolve())
    except (OSError, ValueError) as error:
        raise BackendError(
            f"the folder can't be used: {getattr(error, 'strerror', error)}",
            where=shorten(str(directory)),
        ) from error


def load_vulkan_module(library: Library, precision: Precision) -> LibraryFile:
    """Registers the Vulkan backend, once per process and with one precision.

    Raises:
        BackendError: the module is missing, others can write to it, it does not load, or it was
            loaded with the other precision.
    """
    path = library.directory / VULKAN_MODULE
    strict = precision == "strict-f32"
    if library.call("ggml_backend_reg_by_name", b"Vulkan"):
        if strict != _strict_environment():
            raise BackendError(
                "the Vulkan backend was loaded with the other precision",
                where=str(path),
                action="Run each precision in a process of its own.",
            )
        return LibraryFile(path, _sha256(path))
    if not path.exists():
        raise BackendError(
            "the Vulkan backend is not installed",
            where=str(path),
            action="Build it with `just setup-vulkan`, or name the folder that holds it in "
            f"{DIRECTORY_VARIABLE}.",
        )
    _check_trusted(path)
    file = LibraryFile(path, _sha256(path))
    for name, value in STRICT_VULKAN_ENVIRONMENT.items():
        if strict:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)
    if not library.call("ggml_backend_load", os.fsencode(path)):
        raise BackendError(
            "the Vulkan backend does not load",
            where=str(path),
            expected="a Vulkan loader (libvulkan.so.1), a driver, and a module built for this libggml",
            action="Install the GPU's driver, or Mesa's (on Debian mesa-vulkan-drivers); "
            "else run `just setup-vulkan` again.",
        )
    return file


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Generator[None]:
    """Sets variables for what is loaded in the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def load_blas_module(library: Library) -> LibraryFile | None:
    """Registers the BLAS backend, which `just setup-blas` builds; None where it did not run.

    Raises:
        BackendError: others can write to the module, it does not load, or has no memory.
    """
    path = library.directory / BLAS_MODULE
    if not path.exists():
        return None
    _check_trusted(path)
    file = LibraryFile(path, _sha256(path))
    loaded = library.call("ggml_backend_reg_by_name", b"BLAS")
    if not loaded:
        require_memory(HEADROOM + BLAS_LIBRARY, "BLAS")
        with _environment(BLAS_ENVIRONMENT):
            loaded = library.call("ggml_backend_load", os.fsencode(path))
    if not loaded:
        raise BackendError(
            "the BLAS backend does not load",
            where=str(path),
            expected="OpenBLAS, and a module built for this libggml",
            action="Run `just setup-blas` again, or remove the file.",
        )
    return file


def load_kernels(directory: Path) -> Kernels | None:
    """Operations on BLAS, which `just setup-blas` builds too; None where the file is missing.

    To be called after `load_blas_module`, which loads OpenBLAS.

    Raises:
        BackendError: others can write to the file, it does not load, or is for another libggml.
    """
    path = directory / KERNELS_MODULE
    if not path.exists():
        return None
    _check_trusted(path)
    file = LibraryFile(path, _sha256(path))
    handle = _open(path)
    try:
        sources, data, block = (ctypes.c_int64 * 3).in_dll(handle, "sam3d_kernels_layout")
        functions = {
            name: ctypes.cast(getattr(handle, f"sam3d_{name}"), ctypes.c_void_p).value or 0
            for name in KERNELS
        }
        expected = (TensorStruct.src.offset, TensorStruct.data.offset)
        if (sources, data) != expected or not 1 <= block <= MAX_BLOCK:
            raise ValueError("another layout")
    except (AttributeError, ValueError) as error:
        raise BackendError(
            "the module is not this version's",
            where=str(path),
            action="Run `just setup-blas` again, or remove the file.",
        ) from error
    return Kernels(**functions, block=block, file=file)


def _strict_environment() -> bool:
    return all(name in os.environ for name in STRICT_VULKAN_ENVIRONMENT)


def _package_directory() -> Path:
    spec = importlib.util.find_spec("ggml")
    if spec is None or spec.origin is None:
        raise BackendError(
            "libggml is not installed", action="Install the package ggml-python 0.0.45."
        )
    return Path(spec.origin).parent / "lib"


@functools.cache
def _load(directory: Path) -> Library:
    paths = [directory / name for name in CORE_LIBRARIES]
    for path in paths:
        if not path.exists():
            raise BackendError(
                f"{path.name} is missing",
                where=str(directory),
                expected="a build of GGML as shared libraries",
                action="Install ggml-python from its source distribution.",
            )
        _check_trusted(path)
    _check_none_loaded_elsewhere(directory)
    files = tuple(LibraryFile(path, _sha256(path)) for path in paths)
    _check_version(_open(paths[0]), directory)
    handle = _open(paths[-1])
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(handle, name, None)
        if function is None:
            raise BackendError(f"libggml has no function {name}", where=str(directory))
        function.restype = result
        function.argtypes = arguments
    callback = LOG_CALLBACK(_log)
    handle.ggml_log_set(callback, None)
    llamafile = bool(handle.ggml_cpu_has_llamafile())
    _say_if_slow(llamafile, directory)
    return Library(handle, directory, GGML_VERSION, files, llamafile, callback)


def _say_if_slow(llamafile: bool, directory: Path) -> None:
    if not llamafile:
        _LOGGER.warning(
            "%s was built without GGML_LLAMAFILE: F32 products on the CPU take two to three times "
            "as long; install ggml-python with CMAKE_ARGS='-DGGML_LLAMAFILE=ON -DGGML_NATIVE=ON'",
            directory,
        )


def _check_version(base: ctypes.CDLL, directory: Path) -> None:
    function = getattr(base, "ggml_version", None)
    version = b"unknown"
    if function is not None:
        function.restype = ctypes.c_char_p
        version = bytes(function())
    if version.decode("ascii", "replace") != GGML_VERSION:
        raise BackendError(
            f"libggml is version {version.decode('ascii', 'replace')}",
            where=str(directory),
            expected=f"version {GGML_VERSION}",
            action="Build it from ggml-python 0.0.45.",
        )


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendError(f"the library does not load: {error}", where=str(path)) from error


def _check_trusted(path: Path) -> None:
    """Refuses a library that another user could have replaced.

    Not for the package's own folder, whose Python code runs in this process anyway.
    """
    spec = importlib.util.find_spec("ggml")
    if spec and spec.origin and path.parent == (Path(spec.origin).parent / "lib").resolve():
        return
    for each in (path, path.resolve()):
        _check_kept(each.stat(), each, groups=True)
        _check_kept(each.parent.stat(), each.parent, groups=True)
        for folder in each.parent.parents:
            status = folder.stat()
            if not status.st_mode & stat.S_ISVTX:  # in such a folder nobody replaces our files
                _check_kept(status, folder, groups=False)


def _check_kept(status: os.stat_result, path: Path, *, groups: bool) -> None:
    foreign = groups and status.st_gid != os.getegid()
    others = stat.S_IWOTH | (stat.S_IWGRP if foreign else 0)
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & others:
        raise BackendError(
            "others can write here, so a library in it is not loaded",
            where=str(path),
            expected="an owner of root or yourself and no write permission for others",
            action=f"Run chmod o-w,g-w {path}, or use another folder.",
        )


def _check_none_loaded_elsewhere(directory: Path) -> None:
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    for path in re.findall(r"(/\S.*/libggml-base\.so)\s*$", maps, re.MULTILINE):
        if Path(path).parent.resolve() != directory:
            raise BackendError(
                "another libggml is loaded in this process",
                where=path,
                expected=str(directory),
                action="Use one libggml per process.",
            )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _log(level: int, text: bytes | None, _data: int | None) -> None:
    message = (text or b"").decode("utf-8", "replace").rstrip()
    if message:
        _LOGGER.log(_LOG_LEVELS.get(level, logging.DEBUG), "%s", message)
