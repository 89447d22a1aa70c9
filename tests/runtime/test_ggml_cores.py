"""The cores that a process may use, as the kernel's documentation says where they are listed."""

import os
from pathlib import Path

import pytest

from sam3d_gguf.runtime.ggml.backend import MAX_THREADS, open_backend
from sam3d_gguf.runtime.ggml.cores import usable_cores
from sam3d_gguf.runtime.ggml.library import load_library

# (package, core) of each hardware thread: two packages of two cores, the first with two threads each
MACHINE = [(0, 0), (0, 1), (0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.fixture
def cpus(tmp_path: Path) -> Path:
    for number, (package, core) in enumerate(MACHINE):
        topology = tmp_path / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{package}\n")
        (topology / "core_id").write_text(f"{core}\n")
    return tmp_path


def allow(monkeypatch: pytest.MonkeyPatch, usable: set[int]) -> None:
    """Let the process use these hardware threads."""

    def affinity(_process: int) -> set[int]:
        return usable

    monkeypatch.setattr(os, "sched_getaffinity", affinity)


@pytest.mark.parametrize(
    ("usable", "cores"), [({0}, 1), ({0, 1}, 2), ({0, 2}, 1), ({0, 4}, 2), (set(range(6)), 4)]
)
def test_hardware_threads_of_a_core_count_once(
    usable: set[int], cores: int, cpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(monkeypatch, usable)

    assert usable_cores(cpus) == cores


def test_all_count_where_the_kernel_does_not_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(monkeypatch, {3, 5, 7})

    assert usable_cores(tmp_path) == 3


def test_the_cpu_starts_one_thread_a_core() -> None:
    with open_backend(load_library(), "cpu") as backend:
        assert backend.threads == min(usable_cores(), MAX_THREADS)
