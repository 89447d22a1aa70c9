"""The decoders of SAM 3D Objects equal the original's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from objects_components import Component

from sam3d_gguf.runtime.ggml.backend import Backend
from sam3d_gguf.runtime.loading import load_weights
from sam3d_gguf.runtime.objects import neural_sparse
from sam3d_gguf.runtime.objects.components.captures import Recorder
from sam3d_gguf.runtime.objects.latent_tables import mesh_tables
from sam3d_gguf.runtime.objects.neural_slat_decoders import MeshDecoder
from sam3d_gguf.runtime.objects.neural_ss_decoder import SparseStructureDecoder
from sam3d_gguf.schemas.errors import InputError


@pytest.fixture(name="structure")
def _structure(backend: Backend, objects: Path) -> Iterator[SparseStructureDecoder]:
    with (
        load_weights(objects / "ss_decoder.gguf", "objects.ss_decoder") as weights,
        SparseStructureDecoder(backend, weights) as decoder,
    ):
        yield decoder


def test_convolutions_in_pieces_equal_those_at_once(
    structure: SparseStructureDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    latent = Component.load("ss-decoder").inputs["shape_latent"]
    at_once = structure.logits(latent)
    monkeypatch.setattr(neural_sparse, "_GATHERED", 27 * 8 * 10_000)
    captured = Recorder()  # another graph than the one that is kept
    in_pieces = structure.logits(latent, taps=captured)
    names = [node.name for graph in structure.graphs() for node in graph.nodes()]
    assert sum("get_rows" in name for name in names) > 2 * len(captured.found)
    np.testing.assert_allclose(in_pieces, at_once, rtol=1e-5, atol=1e-5)


def test_a_latent_of_another_grid_is_refused(structure: SparseStructureDecoder) -> None:
    with pytest.raises(InputError, match="the latent has the shape"):
        structure.logits(np.zeros((1, 512, 8), np.float32))


@pytest.fixture(name="mesh")
def _mesh(backend: Backend, objects: Path) -> Iterator[MeshDecoder]:
    with (
        load_weights(objects / "slat_decoder_mesh.gguf", "objects.slat_decoder_mesh") as weights,
        MeshDecoder(backend, weights) as decoder,
    ):
        yield decoder


def test_latents_of_other_voxels_are_refused(mesh: MeshDecoder) -> None:
    given = Component.load("mesh-decoder").inputs
    coords, feats = given["coords"], given["slat_feats"]
    tables = mesh_tables(coords, mesh.window_size)
    with pytest.raises(InputError, match="the latents have the shape"):
        mesh.features(feats[:, :4], coords, tables)
    with pytest.raises(InputError, match="the tables have the shapes"):
        mesh.features(feats[1:], coords[1:], tables)


def test_the_mesh_features_are_those_that_the_extraction_is_given(mesh: MeshDecoder) -> None:
    given = Component.load("mesh-decoder").inputs
    features = mesh.features(
        given["slat_feats"], given["coords"], mesh_tables(given["coords"], mesh.window_size)
    )
    expected = Component.load("mesh-extract").inputs["decoder_features.feats"]
    np.testing.assert_allclose(features, expected, rtol=1e-4, atol=1e-4)
