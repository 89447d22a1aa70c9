"""The decoders of SAM 3D Objects equal the original's."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from objects_capture import mesh_tables
from objects_components import Component
from objects_parity import Captured, inputs_of

from sam3d_gguf.runtime.ggml.backend import Backend, open_backend
from sam3d_gguf.runtime.ggml.library import load_library
from sam3d_gguf.runtime.loading import load_weights
from sam3d_gguf.runtime.objects import neural_sparse
from sam3d_gguf.runtime.objects.neural_slat_decoders import (
    MeshDecoder,
)
from sam3d_gguf.runtime.objects.neural_ss_decoder import SparseStructureDecoder
from sam3d_gguf.schemas.errors import InputError


@pytest.fixture(name="backend")
def _backend() -> Iterator[Backend]:
    with open_backend(load_library(), "cpu", threads=2) as backend:
        yield backend


@pytest.fixture(name="plain")
def _plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """The CPU without BLAS and the kernels beside it."""

    def nothing(_: Backend) -> None:
        return None

    monkeypatch.setattr(Backend, "accelerate", nothing)
    with open_backend(load_library(), "cpu", threads=2) as backend:
        yield backend


@contextmanager
def structure_on(backend: Backend, objects: Path) -> Generator[SparseStructureDecoder, None, None]:
    with (
        load_weights(objects / "ss_decoder.gguf", "objects.ss_decoder") as weights,
        SparseStructureDecoder(backend, weights) as decoder,
    ):
        yield decoder


@pytest.fixture(name="structure")
def _structure(backend: Backend, objects: Path) -> Iterator[SparseStructureDecoder]:
    with structure_on(backend, objects) as decoder:
        yield decoder


def test_a_grid_in_pieces_equals_the_original(
    plain: Backend, objects: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    component = Component.load("ss-decoder")
    monkeypatch.setattr(neural_sparse, "_GATHERED", 27 * 8 * 10_000)
    captured = Captured()
    with structure_on(plain, objects) as decoder:
        logits = decoder.logits(inputs_of("ss-decoder")["shape_latent"], taps=captured)
        names = [node.name for graph in decoder.graphs() for node in graph.nodes()]
    assert sum("im2col" in name for name in names) > 2 * len(captured.found)
    name = next(name for name in component.expected if name.endswith(".logits_stride2"))
    assert component.failures_of({name: logits[None, None, ::2, ::2, ::2]}) == []


def test_rows_in_pieces_equal_the_original(
    plain: Backend, objects: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs_of("mesh-decoder")
    monkeypatch.setattr(neural_sparse, "_GATHERED", 27 * 32 * 500)
    with mesh_on(plain, objects) as decoder:
        tables = mesh_tables(given["coords"])
        features = decoder.features(given["slat_feats"], given["coords"], tables)
    expected = inputs_of("mesh-extract")["decoder_features.feats"]
    np.testing.assert_allclose(features, expected, rtol=1e-4, atol=1e-4)


def test_a_latent_of_another_grid_is_refused(structure: SparseStructureDecoder) -> None:
    with pytest.raises(InputError, match="the latent has the shape"):
        structure.logits(np.zeros((1, 512, 8), np.float32))


@contextmanager
def mesh_on(backend: Backend, objects: Path) -> Generator[MeshDecoder, None, None]:
    with (
        load_weights(objects / "slat_decoder_mesh.gguf", "objects.slat_decoder_mesh") as weights,
        MeshDecoder(backend, weights) as decoder,
    ):
        yield decoder


@pytest.fixture(name="mesh")
def _mesh(backend: Backend, objects: Path) -> Iterator[MeshDecoder]:
    with mesh_on(backend, objects) as decoder:
        yield decoder


def test_latents_of_other_voxels_are_refused(mesh: MeshDecoder) -> None:
    given = inputs_of("mesh-decoder")
    coords, feats = given["coords"], given["slat_feats"]
    tables = mesh_tables(coords)
    with pytest.raises(InputError, match="the latents have the shape"):
        mesh.features(feats[:, :4], coords, tables)
    with pytest.raises(InputError, match="the tables have the shapes"):
        mesh.features(feats[1:], coords[1:], tables)


def test_the_mesh_features_are_those_that_the_extraction_is_given(mesh: MeshDecoder) -> None:
    given = inputs_of("mesh-decoder")
    features = mesh.features(given["slat_feats"], given["coords"], mesh_tables(given["coords"]))
    expected = inputs_of("mesh-extract")["decoder_features.feats"]
    np.testing.assert_allclose(features, expected, rtol=1e-4, atol=1e-4)
