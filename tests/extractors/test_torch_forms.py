"""Every form of checkpoint that torch writes, against what torch itself reads from it.

The files and `expected.json` come from tests/oracle/make_legacy.py.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sam3d_gguf.extractors.archive import Archive
from sam3d_gguf.extractors.byte_source import ByteSource
from sam3d_gguf.extractors.checkpoint import check_storages, read_archive
from sam3d_gguf.extractors.materialize import iter_blocks
from sam3d_gguf.extractors.tensor_ref import TensorRef
from sam3d_gguf.schemas.errors import InputError

FOLDER = Path(__file__).parents[1] / "fixtures" / "legacy"
EXPECTED: Mapping[str, dict[str, Any]] = json.loads((FOLDER / "expected.json").read_text())["files"]
READ = [name for name, expected in EXPECTED.items() if "tensors" in expected]
REFUSED = [name for name, expected in EXPECTED.items() if "refused" in expected]


@contextmanager
def fixture(name: str) -> Generator[ByteSource]:
    fd = os.open(FOLDER / name, os.O_RDONLY)
    try:
        yield ByteSource(fd, name)
    finally:
        os.close(fd)


def sha256(source: ByteSource, tensor: TensorRef, max_bytes: int) -> str:
    digest = hashlib.sha256()
    for block in iter_blocks(source, tensor, max_bytes):
        digest.update(block.data)
    return digest.hexdigest()


def read(name: str) -> Archive:
    with fixture(name) as source:
        return read_archive(source)


@pytest.mark.parametrize("max_bytes", [1, 16, 1 << 20])
@pytest.mark.parametrize("name", READ)
def test_tensors_are_those_that_torch_loads(name: str, max_bytes: int) -> None:
    expected = EXPECTED[name]
    with fixture(name) as source:
        archive = read_archive(source)
        check_storages(source, archive)
        found = {
            tensor.name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "sha256": sha256(source, tensor, max_bytes),
            }
            for tensor in archive.tensors.values()
        }

    assert (archive.kind.name, archive.wrapper) == (expected["kind"], expected["wrapper"])
    assert found == expected["tensors"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(name: str) -> None:
    with fixture(name) as source, pytest.raises(InputError, match=EXPECTED[name]["refused"]):
        read_archive(source)


def test_torchscript_values_are_kept_by_path() -> None:
    archive = read("script.pt")

    expected: dict[str, Any] = EXPECTED["script.pt"]["attributes"]
    assert {path: archive.attributes[path] for path in expected} == expected
    assert archive.attributes["alias.sizes"] == expected["inner.sizes"]


def test_torchscript_code_is_hashed() -> None:
    archive = read("script.pt")

    assert "code/__torch__.py" in archive.code
    assert all(len(digest) == 64 for digest in archive.code.values())
    assert all(name.startswith("code/") for name in archive.code)


def test_torchscript_constants_are_apart() -> None:
    archive = read("trace.pt")

    assert all(name.startswith("CONSTANTS.c") for name in archive.constants)
    assert "traced_inputs.pkl" in archive.ignored


def test_shared_storages_are_reported() -> None:
    groups = read("zip-views.pt").shared

    assert len(groups) == 2
    assert {"base", "same", "transposed", "diagonal"} <= set(groups[0])
    assert groups[1] == ("overlapping", "permuted")


def test_sparse_tensors_are_two() -> None:
    archive = read("legacy-sparse.pt")

    assert [(one.name, one.shape) for one in archive.sparse] == [
        ("weight", (2, 3)),
        ("hybrid", (5, 2)),
    ]
    assert archive.tensors["weight.indices"].shape == (2, 3)


@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_what_training_left_is_reported(form: str) -> None:
    archive = read(f"{form}-state-dict.pt")

    content = {one.path: (one.kind, one.text) for one in archive.content}
    assert content["epoch"] == ("int", "3")
    assert content["pytorch-lightning_version"] == ("str", "'2.0'")
    assert content["point"] == ("object", "of __main__.Point")
    inert = {one.function: one.path for one in archive.inert}
    assert inert["__main__.Callback"] == "callbacks.checkpoint"
    assert "argparse.Namespace" in inert
    assert any(name.endswith(".scalar") for name in inert)
    excluded = [one.path for one in archive.excluded]
    assert "optimizer_states.0.state.(key)" not in excluded
    assert any(path.startswith("optimizer_states.0.state.0.exp_avg") for path in excluded)


def test_bare_storages_and_torch_values_are_content() -> None:
    archive = read("zip-storages.pt")

    assert {one.path: one.kind for one in archive.content} == {
        "typed": "storage",
        "device": "object",
        "size": "object",
        "dtype": "global",
        "layout": "object",
    }
    assert archive.inert == ()


def test_sources_of_pickled_modules_are_inert() -> None:
    archive = read("legacy-model.pt")

    assert "__main__.Traced" in archive.globals
    assert any(one.function.endswith("Traced") for one in archive.inert)
    assert any(one.path.startswith("network.") for one in archive.excluded)


TINY = FOLDER.parent / "tiny-body-a"


def test_the_mhr_archive_is_read_with_its_lists() -> None:
    archive = read(str(TINY / "mhr_model.stub.pt"))

    names = archive.attributes["character_torch.skeleton.joint_names"]
    sizes = archive.attributes["character_torch.skeleton._pmi_buffer_sizes"]
    assert isinstance(names, list) and names[:2] == ["body_world", "root"] and len(names) == 127
    assert sizes == [65, 56, 62, 83]
    assert archive.tensors["character_torch.skeleton.pmi"].shape == (2, 266)
    assert archive.root == "mhr_model"
    assert len(archive.code) == 11 and len(set(archive.code.values())) == 1
    assert not (archive.inert or archive.excluded)


def test_the_body_checkpoint_holds_tensors_alone() -> None:
    archive = read(str(TINY / "model.ckpt"))

    assert len(archive.tensors) == 442
    assert not (archive.inert or archive.excluded or archive.content or archive.ignored)
