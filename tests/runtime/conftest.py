"""The tiny models as files, and their fixtures' tensors, once for all runtime tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from facts import TINY
from numpy.typing import NDArray
from tiny_release import Release

from sam3d_gguf.runtime.body import BodyModel
from sam3d_gguf.runtime.ggml.backend import Backend, open_backend
from sam3d_gguf.runtime.ggml.library import load_library
from sam3d_gguf.runtime.parity import Rules, load_rules
from sam3d_gguf.runtime.tensor_files import TensorFile

Tensors = dict[str, NDArray[Any]]


def read(name: str) -> Tensors:
    """All tensors of a fixture file."""
    with TensorFile(TINY / name) as file:
        return {tensor: file.read(tensor) for tensor in file.tensors}


@pytest.fixture(scope="session")
def model_files(single: Release) -> tuple[Path, Path]:
    """The tiny Body and MHR as GGUF."""
    return single.body, single.mhr


@pytest.fixture(scope="session")
def model(model_files: tuple[Path, Path]) -> Iterator[BodyModel]:
    """The tiny Body on one CPU thread."""
    with BodyModel.load(model_files[0], mhr=model_files[1], threads=1) as loaded:
        yield loaded


@pytest.fixture
def backend() -> Iterator[Backend]:
    """Two CPU threads."""
    with open_backend(load_library(), "cpu", threads=2) as opened:
        yield opened


@pytest.fixture(scope="session")
def rules() -> Rules:
    """The fixtures' declared limits."""
    return load_rules(TINY / "rules.json")


@pytest.fixture(scope="session")
def expected() -> Tensors:
    """The captures of the `body` run."""
    return read("expected.safetensors")


@pytest.fixture(scope="session")
def expected_full() -> Tensors:
    """The captures of the `full` run."""
    return read("expected-full.safetensors")


@pytest.fixture(scope="session")
def intrinsics(expected: Tensors) -> NDArray[np.float32]:
    """The fixtures' camera."""
    return expected["00.input.002.cam_int"]
