"""Releases of the tiny model that many tests start from; a test changes only copies of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_objects
from hypothesis import HealthCheck, settings
from objects_facts import TINY_MOGE
from tiny_release import Release, from_extraction, request

from sam3d_gguf.convert.objects import convert_objects
from sam3d_gguf.convert.release import convert_body

# A busy machine is no failure.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """Layout single at source precision, from the legacy files through the sandbox."""
    folder = tmp_path_factory.mktemp("single")
    kept = tmp_path_factory.mktemp("kept") / "safetensors"
    convert_body(request(folder / "body.gguf", keep_safetensors=kept))
    return Release(folder, kept)


@pytest.fixture(scope="session")
def single_f32(single: Release, tmp_path_factory: pytest.TempPathFactory) -> Release:
    """Layout single at F32."""
    folder = tmp_path_factory.mktemp("f32")
    convert_body(from_extraction(single.extraction, folder / "body.gguf", precision="f32"))
    return Release(folder, single.extraction)


@pytest.fixture(scope="session")
def components(single: Release, tmp_path_factory: pytest.TempPathFactory) -> Release:
    """Layout components."""
    folder = tmp_path_factory.mktemp("components") / "native"
    convert_body(from_extraction(single.extraction, folder, layout="components"))
    return Release(folder, single.extraction)


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release of the tiny SAM 3D Objects, from the legacy files through the sandbox."""
    folder = tmp_path_factory.mktemp("objects") / "release"
    convert_objects(tiny_objects.request(folder))
    return folder


@pytest.fixture(scope="session")
def depth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release of the tiny depth model alone."""
    folder = tmp_path_factory.mktemp("depth") / "release"
    model = TINY_MOGE / "model.pt"
    convert_objects(tiny_objects.request(folder, parts=("moge",), moge=model))
    return folder


@pytest.fixture(scope="session")
def runnable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release of the tiny SAM 3D Objects that runs from a photo to a mesh, with its depth model."""
    folder = tmp_path_factory.mktemp("runnable")
    checkpoints = tiny_objects.runnable(folder / "checkpoints")
    convert_objects(
        tiny_objects.request(
            folder / "release", checkpoint_dir=checkpoints, moge=TINY_MOGE / "model.pt"
        )
    )
    return folder / "release"
