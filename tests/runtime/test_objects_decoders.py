"""The decoders of SAM 3D Objects equal the original's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from objects_parity import Captured, inputs_of

from sam3d_gguf.runtime.ggml.backend import Backend, open_backend
from sam3d_gguf.runtime.ggml.library import load_library
from sam3d_gguf.runtime.loading import load_weights
from sam3d_gguf.runtime.objects import neural_sparse
from sam3d_gguf.runtime.objects.neural_ss_decoder import SparseStructureDecoder
from sam3d_gguf.schemas.errors import InputError


@pytest.fixture(name="backend")
def _backend() -> Iterator[Backend]:
    with open_backend(load_library(), "cpu", threads=2) as backend:
        yield backend


@pytest.fixture(name="structure")
def _structure(backend: Backend, objects: Path) -> Iterator[SparseStructureDecoder]:
    weights = load_weights(objects / "ss_decoder.gguf", "objects.ss_decoder")
    with SparseStructureDecoder(backend, weights) as decoder:
        yield decoder


def test_every_stage_of_the_structure_decoder(structure: SparseStructureDecoder) -> None:
    captured = Captured()
    logits = structure.logits(inputs_of("ss-decoder")["shape_latent"], taps=captured)
    found = captured.found
    for name in ("input_layer", "middle_block"):
        found[name] = found[name][:, ::4]
    for number in range(8):
        captured(f"block{number}_corner8", found[f"block{number}"][:, :, :8, :8, :8])
    assert found["logits"][0, 0].tobytes() == logits.tobytes()
    captured("logits_stride2", logits[None, None, ::2, ::2, ::2])
    occupied = np.argwhere(logits > 0).astype(np.int32)
    captured("coords_original", np.pad(occupied, ((0, 0), (1, 0))))
    left_out = "coords$|coords_pruned|downsample_factor|ball"
    assert captured.failures("ss-decoder", left_out=left_out) == []


def test_convolutions_in_pieces_equal_those_at_once(
    structure: SparseStructureDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    latent = inputs_of("ss-decoder")["shape_latent"]
    at_once = structure.logits(latent)
    monkeypatch.setattr(neural_sparse, "_GATHERED", 27 * 8 * 10_000)
    captured = Captured()  # another graph than the one that is kept
    in_pieces = structure.logits(latent, taps=captured)
    names = [node.name for graph in structure.graphs() for node in graph.nodes()]
    assert sum("get_rows" in name for name in names) > 2 * len(captured.found)
    np.testing.assert_allclose(in_pieces, at_once, rtol=1e-5, atol=1e-5)


def test_a_latent_of_another_grid_is_refused(structure: SparseStructureDecoder) -> None:
    with pytest.raises(InputError, match="the latent has the shape"):
        structure.logits(np.zeros((1, 512, 8), np.float32))
