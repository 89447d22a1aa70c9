"""Which networks stay on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from objects_components import Component

from sam3d_gguf.runtime.ggml.backend import Backend, open_backend
from sam3d_gguf.runtime.ggml.graph import Graphs
from sam3d_gguf.runtime.ggml.library import load_library
from sam3d_gguf.runtime.ggml.store import WeightStore
from sam3d_gguf.runtime.objects.components import models_of, run_component, whole
from sam3d_gguf.runtime.objects.networks import Networks
from sam3d_gguf.runtime.objects.neural_ss_decoder import SparseStructureDecoder
from sam3d_gguf.runtime.objects.noise import SeededNoise
from sam3d_gguf.runtime.objects.pipeline import ObjectsOptions
from sam3d_gguf.runtime.objects.release import ObjectsRelease
from sam3d_gguf.runtime.objects.stages import OCCUPANCY


@pytest.fixture(name="backend")
def _backend() -> Iterator[Backend]:
    with open_backend(load_library(), "cpu", threads=1) as backend:
        yield backend


def same_twice(backend: Backend, objects: Path, *, resident: bool) -> bool:
    """Whether a network that is asked for again is the one that was there."""
    with (
        ObjectsRelease.open(objects, [OCCUPANCY]) as release,
        Networks(backend, release, resident=resident) as networks,
    ):
        with networks.opened(SparseStructureDecoder, OCCUPANCY) as first:
            assert first.memory()["weights"] > 0
        with networks.opened(SparseStructureDecoder, OCCUPANCY) as second:
            return first is second


def test_networks_are_freed_unless_they_are_resident(backend: Backend, objects: Path) -> None:
    assert not same_twice(backend, objects, resident=False)
    assert same_twice(backend, objects, resident=True)


def test_networks_stay_on_llvmpipe(backend: Backend, objects: Path) -> None:
    """It ends the process where a network computes after another one's buffers were freed."""
    backend.device = dataclasses.replace(backend.device, description="llvmpipe (LLVM 15.0.6)")
    assert same_twice(backend, objects, resident=False)


def test_nothing_computes_after_something_was_freed_there(
    backend: Backend, objects: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    run, close = Graphs.get, WeightStore.close

    def note_run(self: Graphs, *arguments: Any) -> Any:
        events.append("run")
        return run(self, *arguments)

    def note_close(self: WeightStore) -> None:
        events.append("free")
        close(self)

    def seeded(*_: object) -> SeededNoise:
        return SeededNoise(0)

    monkeypatch.setattr(Graphs, "get", note_run)
    monkeypatch.setattr(WeightStore, "close", note_close)
    few = ObjectsOptions(structure_steps=1, latent_steps=1, gaussians=4, mesh=False)
    monkeypatch.setattr(whole, "_OPTIONS", few)
    monkeypatch.setattr(whole, "StoredNoise", seeded)
    backend.device = dataclasses.replace(backend.device, description="llvmpipe (LLVM 15.0.6)")
    with ObjectsRelease.open(objects, models_of("pipeline")) as release:
        run_component("pipeline", release, backend, Component.load("pipeline").inputs)
    assert events.count("free") == 7
    assert "run" not in events[events.index("free") :]
