"""The parts of the running interpreter that a sandbox shows."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from sam3d_gguf.extractors.sandbox.interpreter import running_interpreter


def mapped_libraries() -> set[Path]:
    """Shared objects in this process, as the kernel lists them (proc_pid_maps(5))."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if line.count("/") > 1}
    return {path.resolve() for path in paths if ".so" in path.name and path.is_file()}


def test_every_library_in_use_is_shown_once() -> None:
    python = running_interpreter()
    folders = (python.stdlib, *(package.path for package in python.numpy))
    elsewhere = {
        path
        for path in mapped_libraries()
        if not any(path.is_relative_to(folder) for folder in folders)
        and "site-packages" not in path.parts
        and "dist-packages" not in path.parts
    }
    assert {path.resolve() for path in python.libraries} == elsewhere
    assert len(set(python.libraries)) == len(python.libraries)


def test_the_interpreter_is_the_binary_itself() -> None:
    python = running_interpreter()
    assert python.executable.read_bytes()[:4] == b"\x7fELF"
    assert (python.stdlib / "os.py").is_file()
    assert python.executable.samefile(sys.executable)


def test_other_packages_are_covered() -> None:
    python = running_interpreter()
    inside = {path for path in python.stdlib.glob("*-packages") if path.is_dir()}
    assert set(python.hidden) == inside


def test_numpy_comes_with_its_libraries() -> None:
    python = running_interpreter()
    assert np.__file__ is not None
    assert python.numpy[0].name == "numpy"
    assert python.numpy[0].path == Path(np.__file__).resolve().parent
    beside = python.numpy[0].path.with_name("numpy.libs")
    assert [package.path for package in python.numpy[1:]] == ([beside] if beside.exists() else [])
