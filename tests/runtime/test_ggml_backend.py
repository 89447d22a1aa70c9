"""Devices are listed and chosen explicitly, and no wrong choice reaches libggml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sam3d_gguf.runtime.ggml import backend as backend_module
from sam3d_gguf.runtime.ggml.backend import Backend, Device, list_devices, open_backend
from sam3d_gguf.runtime.ggml.errors import BackendError
from sam3d_gguf.runtime.ggml.graph import Arena, GraphBuilder
from sam3d_gguf.runtime.ggml.library import VULKAN_MODULE, load_library


def test_the_cpu_is_listed_with_its_memory() -> None:
    cpu = list_devices(load_library())[0]
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii").split()
    total = int(meminfo[meminfo.index("MemTotal:") + 1]) * 1024
    assert (cpu.backend, cpu.index, cpu.name, cpu.type) == ("cpu", 0, "CPU", "cpu")
    assert cpu.memory_total == pytest.approx(total, rel=0.01)
    assert 0 < cpu.memory_free < cpu.memory_total


@pytest.mark.parametrize("device", [-1, 1, 1 << 40])
def test_a_device_that_does_not_exist_is_refused(device: int) -> None:
    with pytest.raises(BackendError, match=f"the cpu backend has no device {device}"):
        open_backend(load_library(), "cpu", device=device)


@pytest.mark.parametrize("threads", [-1, 0, 513])
def test_a_wrong_number_of_threads_is_refused(threads: int) -> None:
    with pytest.raises(BackendError, match="threads were asked for"):
        open_backend(load_library(), "cpu", threads=threads)


def test_the_device_can_be_expected_by_name_or_description() -> None:
    library = load_library()
    cpu = list_devices(library)[0]
    for expected in (cpu.name, cpu.description):
        open_backend(library, "cpu", expect_device=expected).close()
    with pytest.raises(BackendError, match="expected H200"):
        open_backend(library, "cpu", expect_device="H200")


def test_a_missing_vulkan_backend_is_refused_with_its_recipe(tmp_path: Path) -> None:
    code = f"""
import pathlib, shutil
from sam3d_gguf.runtime.ggml.backend import open_backend
from sam3d_gguf.runtime.ggml.library import CORE_LIBRARIES, _package_directory, load_library
folder = pathlib.Path({str(tmp_path)!r})
folder.chmod(0o755)
for name in CORE_LIBRARIES:
    shutil.copy(_package_directory() / name, folder / name)
open_backend(load_library(folder), "vulkan")
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert VULKAN_MODULE in run.stderr
    assert "just setup-vulkan" in run.stderr
    assert run.returncode == 1


def test_no_vulkan_device_is_refused_with_what_shows_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> list[Device]:
        return []

    monkeypatch.setattr(backend_module, "load_vulkan_module", none)
    monkeypatch.setattr(backend_module, "list_devices", none)
    with pytest.raises(BackendError, match="GGML_VK_VISIBLE_DEVICES=0"):
        open_backend(load_library(), "vulkan")


class Full(Backend):
    """A device whose memory is full."""

    def free_memory(self) -> int:
        return 1000


def test_too_little_memory_is_refused_before_allocating() -> None:
    library = load_library()
    backend = Full(library, list_devices(library)[0], "strict-f32", None)
    builder = GraphBuilder(Arena(backend), "large")
    x = builder.input("x", (64, 64))
    builder.output("y", builder.relu(x))
    graph = builder.build()
    with pytest.raises(BackendError, match="intermediates of large need 0 MiB and 0 MiB are free"):
        graph.run({"x": np.zeros((64, 64), np.float32)})
    backend.close()
