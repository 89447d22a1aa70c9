"""libggml is found, checked, and called by the types that its own bindings declare."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sam3d_gguf.runtime.ggml.errors import BackendError
from sam3d_gguf.runtime.ggml.functions import FUNCTIONS, DeviceProperties, InitParams, TensorStruct
from sam3d_gguf.runtime.ggml.library import (
    BLAS_MODULE,
    CORE_LIBRARIES,
    DIRECTORY_VARIABLE,
    GGML_VERSION,
    KERNELS_MODULE,
    VULKAN_MODULE,
    Library,
    load_library,
)

# In a process of its own: importing ggml-python loads its libraries.
_DECLARED = """
import ctypes, json, sys
import ggml

def kind(declared):
    if declared is None or not issubclass(declared, ctypes._SimpleCData):
        if declared is not None and issubclass(declared, ctypes.Structure):
            return f"struct {ctypes.sizeof(declared)}"
        return "None" if declared is None else "pointer"
    return "pointer" if declared is ctypes.c_void_p else declared.__name__

print(json.dumps({name: [kind(f.restype), *map(kind, f.argtypes)]
    for name in json.load(sys.stdin) for f in [getattr(ggml, name)]}))
"""


def kind(declared: Any) -> str:
    if declared is None:
        return "None"
    if issubclass(declared, ctypes.Structure):
        return f"struct {ctypes.sizeof(declared)}"
    if declared is ctypes.c_void_p or hasattr(declared, "contents"):
        return "pointer"
    return str(declared.__name__)


def run_python(code: str, text: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
        timeout=120,
    )


def test_the_functions_are_declared_as_in_ggml_python() -> None:
    names = json.dumps(list(FUNCTIONS))
    declared: dict[str, list[str]] = json.loads(run_python(_DECLARED, names).stdout)
    ours = {
        name: [kind(result), *map(kind, arguments)]
        for name, (result, arguments) in FUNCTIONS.items()
    }
    assert ours == declared


def test_the_structures_are_as_large_as_in_ggml_python() -> None:
    code = """
import ctypes, ggml
for name in ("ggml_tensor", "ggml_init_params", "ggml_backend_dev_props"):
    print(ctypes.sizeof(getattr(ggml, name)))
"""
    sizes = [int(line) for line in run_python(code).stdout.split()]
    structures = (TensorStruct, InitParams, DeviceProperties)
    assert [ctypes.sizeof(each) for each in structures] == sizes


def test_the_packaged_library_is_known_by_version_and_hash() -> None:
    library = load_library()
    assert library.version == GGML_VERSION
    assert [file.path.name for file in library.files] == list(CORE_LIBRARIES)
    assert all(len(file.sha256) == 64 for file in library.files)
    assert load_library() is library


def copy_of(library: Library, folder: Path) -> Path:
    for name in CORE_LIBRARIES:
        shutil.copy(library.directory / name, folder / name)
    folder.chmod(0o755)
    return folder


LOAD = """
from sam3d_gguf.runtime.ggml.library import load_library
print(load_library().directory)
"""


def test_a_slow_build_says_so(tmp_path: Path) -> None:
    folder = copy_of(load_library(), tmp_path)
    code = """
import ctypes
real = ctypes.CDLL.__getattr__
def getattr_(self, name):
    return (lambda: 0) if name == "ggml_cpu_has_llamafile" else real(self, name)
ctypes.CDLL.__getattr__ = getattr_
from sam3d_gguf.runtime.ggml.library import load_library
print(load_library().llamafile)
"""
    run = run_python(code, **{DIRECTORY_VARIABLE: str(folder)})
    assert run.stdout.strip() == "False"
    assert "built without GGML_LLAMAFILE" in run.stderr
    assert "GGML_LLAMAFILE" not in run_python(LOAD, **{DIRECTORY_VARIABLE: str(folder)}).stderr


def test_the_environment_can_name_another_folder(tmp_path: Path) -> None:
    folder = copy_of(load_library(), tmp_path)
    run = run_python(LOAD, **{DIRECTORY_VARIABLE: str(folder)})
    assert run.stdout.strip() == str(folder), run.stderr


@pytest.mark.parametrize("target", ["folder", "file"])
def test_a_library_that_others_can_write_is_refused(tmp_path: Path, target: str) -> None:
    folder = copy_of(load_library(), tmp_path)
    (folder if target == "folder" else folder / CORE_LIBRARIES[1]).chmod(0o777)
    with pytest.raises(BackendError, match="others can write here"):
        load_library(folder)


def test_a_library_in_a_folder_that_others_can_replace_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open" / "lib"
    folder.mkdir(parents=True)
    copy_of(load_library(), folder)
    folder.parent.chmod(0o777)
    with pytest.raises(BackendError, match="open: others can write here"):
        load_library(folder)
    run = run_python(LOAD, **{DIRECTORY_VARIABLE: str(folder)})
    folder.parent.chmod(0o1777)
    sticky = run_python(LOAD, **{DIRECTORY_VARIABLE: str(folder)})
    assert (run.returncode, sticky.returncode) == (1, 0), sticky.stderr


def test_a_link_to_a_library_that_others_can_write_is_refused(tmp_path: Path) -> None:
    real, folder = tmp_path / "real", tmp_path / "lib"
    for each in (real, folder):
        each.mkdir()
        copy_of(load_library(), each)
    base = folder / CORE_LIBRARIES[0]
    base.unlink()
    base.symlink_to(real / CORE_LIBRARIES[0])
    real.chmod(0o777)
    with pytest.raises(BackendError, match="real: others can write here"):
        load_library(folder)


def test_a_library_of_something_else_is_refused(tmp_path: Path) -> None:
    folder = copy_of(load_library(), tmp_path)
    other = subprocess.run(
        [sys.executable, "-c", "import _ctypes; print(_ctypes.__file__)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    shutil.copy(other, folder / CORE_LIBRARIES[0])
    run = run_python(LOAD, **{DIRECTORY_VARIABLE: str(folder)})
    assert "libggml is version unknown" in run.stderr


def test_a_path_that_is_none_is_refused() -> None:
    with pytest.raises(BackendError, match="the folder can't be used: File name too long"):
        load_library(Path("a" * 5000))


def test_a_folder_without_libraries_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(BackendError, match=r"libggml-base\.so is missing"):
        load_library(tmp_path)


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    folder = copy_of(load_library(), tmp_path)
    (folder / CORE_LIBRARIES[0]).write_bytes(b"not a library")
    run = run_python(LOAD, **{DIRECTORY_VARIABLE: str(folder)})
    assert "the library does not load" in run.stderr


def test_another_version_is_refused(tmp_path: Path) -> None:
    folder = copy_of(load_library(), tmp_path)
    base = folder / CORE_LIBRARIES[0]
    data = base.read_bytes()
    version = GGML_VERSION.encode() + b"\0"
    assert data.count(version) == 1
    base.write_bytes(data.replace(version, b"0.15.9\0"))
    run = run_python(LOAD, **{DIRECTORY_VARIABLE: str(folder)})
    assert "libggml is version 0.15.9" in run.stderr
    assert f"expected version {GGML_VERSION}" in run.stderr


def test_a_second_libggml_in_one_process_is_refused(tmp_path: Path) -> None:
    load_library()
    with pytest.raises(BackendError, match="another libggml is loaded"):
        load_library(copy_of(load_library(), tmp_path))


BLAS = """
import numpy as np
from sam3d_gguf.runtime.ggml.backend import open_backend
from sam3d_gguf.runtime.ggml.graph import Arena, GraphBuilder
from sam3d_gguf.runtime.ggml.library import load_library
with open_backend(load_library(), "cpu", threads=2) as backend:
    arena = Arena(backend)
    builder = GraphBuilder(arena, "products")
    x, w = builder.input("x", (40, 64)), builder.input("w", (48, 64))
    builder.output("y", builder.relu(builder.matmul(builder.scale(x, 2), w)))
    graph = builder.build()
    a = np.random.default_rng(0).standard_normal((40, 64)).astype(np.float32)
    b = np.random.default_rng(1).standard_normal((48, 64)).astype(np.float32)
    for _ in range(2):
        y = graph.run({"x": a, "w": b})["y"]
        np.testing.assert_allclose(y, np.maximum(2 * a @ b.T, 0), rtol=1e-5, atol=1e-5)
    print(*(node.backend for node in graph.nodes()), *(f.path.name for f in backend.files[3:]))
    graph.close()
    builder = GraphBuilder(arena, "attention")
    tokens = builder.input("tokens", (2, 300, 4, 32))
    heads = builder.permute(tokens, (0, 2, 1, 3))
    builder.output("y", builder.attention(heads, heads, heads))
    graph = builder.build()
    a = np.random.default_rng(2).standard_normal((2, 300, 4, 32)).astype(np.float32)
    h = a.astype(np.float64).swapaxes(1, 2)
    weights = np.exp(h @ h.swapaxes(2, 3) / 32 ** 0.5)
    expected = (weights / weights.sum(3, keepdims=True) @ h).swapaxes(1, 2).reshape(2, 300, 128)
    np.testing.assert_allclose(graph.run({"tokens": a})["y"], expected, rtol=1e-5, atol=1e-5)
    print(*(node.operation for node in graph.nodes() if node.operation == "CUSTOM"))
    graph.close()
    arena.close()
"""


DEVICES = "from sam3d_gguf.cli.run import app; app(['--list-devices', '--json'])"


def test_devices_are_listed_without_a_vulkan_module_that_does_not_load(tmp_path: Path) -> None:
    folder = copy_of(load_library(), tmp_path)
    (folder / VULKAN_MODULE).write_bytes(b"not a library")
    run = run_python(DEVICES, **{DIRECTORY_VARIABLE: str(folder)})
    assert run.returncode == 0, run.stderr
    assert [device["name"] for device in json.loads(run.stdout)["devices"]] == ["CPU"]
    assert "warning: " in run.stderr
    assert "the Vulkan backend does not load; expected a Vulkan loader" in run.stderr
    assert "mesa-vulkan-drivers" in run.stderr


@pytest.mark.skipif(
    not (load_library().directory / KERNELS_MODULE).exists(), reason="just setup-blas did not run"
)
def test_blas_takes_the_large_products_and_kernels_the_rest() -> None:
    run = run_python(BLAS)
    modules = [BLAS_MODULE, KERNELS_MODULE]
    assert run.stdout.split() == ["CPU", "BLAS", "CPU", *modules, "CUSTOM"], run.stderr


@pytest.mark.skipif(
    not (load_library().directory / BLAS_MODULE).exists(), reason="just setup-blas did not run"
)
def test_blas_without_the_kernels(tmp_path: Path) -> None:
    folder = copy_of(load_library(), tmp_path)
    shutil.copy(load_library().directory / BLAS_MODULE, folder)
    run = run_python(BLAS, **{DIRECTORY_VARIABLE: str(folder)})
    assert run.stdout.split() == ["CPU", "BLAS", "CPU", BLAS_MODULE], run.stderr


def test_without_the_module_the_cpu_does_it_all(tmp_path: Path) -> None:
    folder = copy_of(load_library(), tmp_path)
    run = run_python(BLAS, **{DIRECTORY_VARIABLE: str(folder)})
    assert run.stdout.split() == ["CPU", "CPU", "CPU"], run.stderr


def test_a_blas_module_that_does_not_load_is_refused(tmp_path: Path) -> None:
    folder = copy_of(load_library(), tmp_path)
    (folder / BLAS_MODULE).write_bytes(b"not a library")
    run = run_python(BLAS, **{DIRECTORY_VARIABLE: str(folder)})
    assert "the BLAS backend does not load" in run.stderr
    assert "just setup-blas" in run.stderr
