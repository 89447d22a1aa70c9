"""What the static readers find equals what PyTorch loads, bit for bit."""

import hashlib
import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from oracle_program import (
    ROOT,
    Expected,
    expected_tensors,
    full_shape_body,
    full_shape_mhr,
    run_oracle,
)

from sam3d_gguf.extractors.archive import Archive
from sam3d_gguf.extractors.byte_source import ByteSource
from sam3d_gguf.extractors.checkpoint import read_archive
from sam3d_gguf.extractors.materialize import iter_blocks, upcast
from sam3d_gguf.extractors.tensor_ref import TensorRef

TINY = ROOT / "tests" / "fixtures" / "tiny-body-a"
FACTS = ROOT / "tests" / "fixtures" / "facts"
COMMITTED = expected_tensors((TINY / "expected-tensors.json").read_text())


@contextmanager
def opened(path: Path) -> Generator[ByteSource]:
    """The file as a source."""
    fd = os.open(path, os.O_RDONLY)
    try:
        yield ByteSource(fd, path.name)
    finally:
        os.close(fd)


def describe(source: ByteSource, tensor: TensorRef) -> Expected:
    """The same facts of a tensor as the oracle's program prints."""
    raw, widened = hashlib.sha256(), hashlib.sha256()
    widens = tensor.dtype in ("BF16", "F16")
    for block in iter_blocks(source, tensor):
        raw.update(block.tobytes())
        if widens:
            widened.update(upcast(block, tensor.dtype).tobytes())
    return Expected(
        tensor.dtype,
        tensor.shape,
        raw.hexdigest(),
        widened.hexdigest() if widens else None,
    )


def extracted(path: Path) -> Mapping[str, Expected]:
    """All tensors of a file, by the static readers."""
    with opened(path) as source:
        archive = read_archive(source)
        return {name: describe(source, tensor) for name, tensor in archive.tensors.items()}


def read(path: Path) -> Archive:
    """The archive without its elements."""
    with opened(path) as source:
        return read_archive(source)


@pytest.mark.parametrize("file", sorted(COMMITTED))
def test_fixture_equals_what_pytorch_loaded(file: str) -> None:
    assert extracted(TINY / file) == COMMITTED[file]


@pytest.mark.oracle
def test_committed_answers_are_pytorchs() -> None:
    printed = run_oracle("load_checkpoint.py", TINY / "model.ckpt")
    assert expected_tensors(printed)["model.ckpt"] == COMMITTED["model.ckpt"]


@pytest.mark.oracle
def test_scripted_archive_equals_what_pytorch_loads(tmp_path: Path) -> None:
    run_oracle("make_full_mhr.py", "--out", tmp_path, "--vertices", "90", "--faces", "176")
    path = tmp_path / "mhr_model.pt"
    printed = run_oracle("load_checkpoint.py", path)
    assert extracted(path) == expected_tensors(printed)[path.name]
    joints = json.loads((FACTS / "mhr-skeleton.json").read_text())
    attributes = read(path).attributes
    assert attributes["character_torch.skeleton.joint_names"] == joints["names"]
    assert attributes["character_torch.skeleton._pmi_buffer_sizes"] == joints["prefix_sizes"]


@pytest.mark.oracle
@pytest.mark.slow
def test_full_shape_checkpoint_equals_what_pytorch_loads() -> None:
    path = full_shape_body()
    printed = run_oracle("load_checkpoint.py", path)
    assert extracted(path) == expected_tensors(printed)[path.name]
    heads = [
        f"head_pose{hand}.{name}"
        for name in ("faces", "keypoint_mapping")
        for hand in ("", "_hand")
    ]
    assert sorted(sorted(group) for group in read(path).shared) == [heads[:2], heads[2:]]


@pytest.mark.oracle
@pytest.mark.slow
def test_full_shape_archive_equals_what_pytorch_loads() -> None:
    path = full_shape_mhr()
    printed = run_oracle("load_checkpoint.py", path)
    assert extracted(path) == expected_tensors(printed)[path.name]
