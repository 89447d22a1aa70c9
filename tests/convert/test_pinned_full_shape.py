"""The path of official files: the synthetic files of the official shape, pinned as if they were.

The known answers come from `sha256sum` over what an unpinned conversion wrote (whose content is
compared with PyTorch in `test_full_shape`), and for MHR from what PyTorch reads.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import facts
import pytest
from oracle_program import (
    FULL_SHAPE,
    expected_tensors,
    full_shape_body,
    full_shape_mhr,
    run_oracle,
)
from pinned import pin
from tiny_release import Json, names_in, read_json

from benchmarks.measure import run as measured
from sam3d_gguf.convert.release import convert_body
from sam3d_gguf.convert.request import Request
from sam3d_gguf.convert.verify import verify
from sam3d_gguf.manifests.known_answers import load_known_answers
from sam3d_gguf.manifests.sources import load_sources
from sam3d_gguf.schemas.errors import Sam3dError

pytestmark = [pytest.mark.slow, pytest.mark.oracle]

BIN = Path(sys.executable).parent
GIBIBYTE = 1 << 30


@dataclass(frozen=True)
class Unpinned:
    """What an unpinned conversion to components wrote, and the memory that it took."""

    release: Path
    safetensors: Path
    peak: int


@pytest.fixture(scope="module")
def unpinned() -> Generator[Unpinned]:
    """Components and kept safetensors, removed afterwards."""
    body, mhr = full_shape_body(), full_shape_mhr()
    with tempfile.TemporaryDirectory(dir=FULL_SHAPE) as folder:
        out = Path(folder)
        took = measured(
            [
                *(BIN / "sam3d-convert", "body", "--checkpoint", body, "--mhr", mhr),
                *("--layout", "components", "--out", out / "release", "--allow-unpinned"),
                *("--keep-safetensors", out / "safetensors"),
            ]
        )
        yield Unpinned(out / "release", out / "safetensors", took.peak_anonymous_bytes)


def sha256sum(path: Path) -> str:
    """A hash that is none of this tool's making."""
    said = subprocess.run(["sha256sum", path], check=True, capture_output=True, text=True)
    return said.stdout.split()[0]


def answer(path: Path) -> Json:
    """The published size and hash, if this file were the published one."""
    return {"bytes": path.stat().st_size, "sha256": sha256sum(path)}


@pytest.fixture(scope="module")
def answers(unpinned: Unpinned) -> Json:
    """What the conversion of the pinned files must give."""
    expected = expected_tensors(run_oracle("load_checkpoint.py", full_shape_mhr()))
    known = {row[0] for row in facts.rows("mhr-asset.txt")}
    release, safetensors = unpinned.release, unpinned.safetensors
    return {
        "backbone_safetensors": answer(safetensors / "backbone.safetensors"),
        "other_safetensors": answer(safetensors / "other.safetensors"),
        "backbone_gguf": answer(release / "body-dinov3-backbone.gguf"),
        "pose_branch_gguf": answer(release / "body-pose-branch.gguf"),
        "mhr_gguf": pinned_mhr(release / "mhr-lod1.gguf", safetensors / "mhr" / "mhr.safetensors"),
        "mhr_tensors": [
            {"name": name, "dtype": t.dtype, "shape": list(t.shape), "sha256": t.sha256}
            for name, t in expected["mhr_model.pt"].items()
            if name in known
        ],
    }


def pinned_mhr(component: Path, safetensors: Path) -> Json:
    """The component differs in one hash: the published one names the reference extraction."""
    data = component.read_bytes()
    own = sha256sum(safetensors).encode()
    assert data.count(own) == 1
    reference = load_known_answers().mhr_reference_safetensors_sha256
    data = data.replace(own, reference.encode())
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@pytest.fixture
def pins(answers: Json, monkeypatch: pytest.MonkeyPatch) -> Generator[Any]:
    """Pin the files, with the right answers unless told otherwise."""
    body = full_shape_body()
    files = {
        "body.checkpoint": body,
        "body.config": body.parent / "model_config.yaml",
        "mhr.asset": full_shape_mhr(),
    }

    def run(**wrong: Any) -> None:
        pin(monkeypatch, files, **{**answers, **wrong})

    yield run
    load_sources.cache_clear()
    load_known_answers.cache_clear()


@pytest.fixture
def folder() -> Generator[Path]:
    """A folder on the disk of the large files."""
    with tempfile.TemporaryDirectory(dir=FULL_SHAPE) as name:
        yield Path(name)


def test_memory_stays_below_a_gibibyte(unpinned: Unpinned) -> None:
    assert unpinned.peak < GIBIBYTE


def test_verification_stays_below_a_gibibyte(unpinned: Unpinned) -> None:
    took = measured([BIN / "sam3d-verify", unpinned.release / "manifest.json"])

    assert took.peak_anonymous_bytes < GIBIBYTE


def test_an_unpinned_release_of_the_official_shape_conforms(unpinned: Unpinned) -> None:
    release = read_json(unpinned.release / "manifest.json")["release"]

    assert (release["origin"], release["native_contract"]) == ("unpinned", "conforms")


def test_pinned_components_meet_every_answer(pins: Any, folder: Path) -> None:
    pins()

    manifest = convert_body(
        Request(
            out=folder / "native",
            checkpoint=full_shape_body(),
            mhr=full_shape_mhr(),
            layout="components",
        )
    )

    assert (manifest.origin, manifest.status) == ("pinned", "complete")
    assert {file.known_answer for file in manifest.files} == {"equal"}
    answers = {product.file: product.known_answer for product in manifest.safetensors}
    assert answers == {
        "backbone.safetensors": "equal",
        "other.safetensors": "equal",
        "mhr.safetensors": "none",
    }
    result = verify([folder / "native" / "manifest.json"])
    assert result.is_good
    assert result.verdict == "verified (complete, pinned)"


def test_pinned_single_files(pins: Any, unpinned: Unpinned, folder: Path) -> None:
    pins()

    manifest = convert_body(
        Request(
            out=folder / "body.gguf",
            extraction=unpinned.safetensors,
            config=full_shape_body().parent / "model_config.yaml",
            mhr=full_shape_mhr(),
        )
    )

    assert manifest.origin == "pinned"
    result = verify([folder / "manifest.json"])
    assert result.is_good
    assert result.verdict.startswith("consistent (complete, pinned); origin not proven")
    said = subprocess.run(
        [BIN / "sam3d-inspect", "--json", folder / "body.gguf"], check=True, capture_output=True
    )
    metadata = json.loads(said.stdout)["metadata"]
    assert (metadata["sam3d.origin"], metadata["general.license"]) == ("pinned", "other")


@pytest.mark.parametrize("key", ["backbone_gguf", "pose_branch_gguf"])
def test_a_component_that_misses_its_answer_leaves_nothing(
    pins: Any, unpinned: Unpinned, folder: Path, key: str
) -> None:
    pins(**{key: {"sha256": "0" * 64}})

    with pytest.raises(Sam3dError, match="the file made from the pinned source"):
        convert_body(
            Request(
                out=folder / "native",
                extraction=unpinned.safetensors,
                config=full_shape_body().parent / "model_config.yaml",
                layout="components",
            )
        )

    assert names_in(folder) == []


def test_mhr_that_misses_its_answer_leaves_nothing(pins: Any, answers: Json, folder: Path) -> None:
    wrong = {**answers["mhr_tensors"][0], "sha256": "0" * 64}
    pins(mhr_tensors=[wrong, *answers["mhr_tensors"][1:]])

    with pytest.raises(Sam3dError, match="is not the published one"):
        convert_body(
            Request(out=folder / "body.gguf", checkpoint=full_shape_body(), mhr=full_shape_mhr())
        )

    assert names_in(folder) == []
