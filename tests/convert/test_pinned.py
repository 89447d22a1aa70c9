"""Files that this tool has pins for: known answers must be met, and *pinned* is said of no other.

The pins are replaced by those of the synthetic files; the hashes come from `sha256sum`, and from
what PyTorch reads.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import facts
import liar
import pytest
from oracle_program import expected_tensors
from pinned import pin
from tiny_release import (
    ASSET,
    CHECKPOINT,
    CONFIG,
    Json,
    Release,
    from_extraction,
    names_in,
    read_json,
    request,
)

from sam3d_gguf.convert.files import known_answer
from sam3d_gguf.convert.release import convert_body, convert_mhr, extract_to_folder
from sam3d_gguf.extractors import extract as extract_module
from sam3d_gguf.extractors.publication import SealedFile
from sam3d_gguf.extractors.sandbox.job import SandboxChoice, WorkerJob, WorkerResult
from sam3d_gguf.manifests.known_answers import load_known_answers
from sam3d_gguf.manifests.sources import load_sources
from sam3d_gguf.schemas.errors import ContractError, InputError, Sam3dError

ORACLE = expected_tensors((facts.TINY / "expected-tensors.json").read_text())
MHR_TENSORS: list[Json] = [
    {"name": name, "dtype": t.dtype, "shape": list(t.shape), "sha256": t.sha256}
    for name, t in ORACLE[ASSET.name].items()
]
# As published.
MHR_GGUF = "d52ab772628fb6d851550381b428185a32da6398793f0ff70299bad1999ba8f8"
PINNED = {"body.checkpoint": CHECKPOINT, "body.config": CONFIG, "mhr.asset": ASSET}


@pytest.fixture(autouse=True)
def real_pins() -> Generator[None]:
    """The real pins are there again afterwards."""
    yield
    load_sources.cache_clear()
    load_known_answers.cache_clear()


def sha256sum(path: Path) -> str:
    """A hash that is none of this tool's making."""
    said = subprocess.run(["sha256sum", path], check=True, capture_output=True, text=True)
    return said.stdout.split()[0]


@pytest.fixture
def pins(single: Release, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pin the tiny files, with the right answers unless told otherwise."""
    answers = {
        "backbone_safetensors": single.extraction / "backbone.safetensors",
        "other_safetensors": single.extraction / "other.safetensors",
        "mhr_tensors": MHR_TENSORS,
    }

    def run(**wrong: Any) -> None:
        pin(monkeypatch, PINNED, **{**answers, **wrong})

    return run


def test_a_pinned_source_with_its_known_answers(pins: Any, single: Release, tmp_path: Path) -> None:
    pins()

    extraction = extract_to_folder("body", CHECKPOINT, tmp_path / "out")

    assert extraction.source.origin == "pinned"
    assert {p.known_answer for p in extraction.products} == {"equal"}
    report = read_json(tmp_path / "out" / "extraction.json")
    assert report["source"]["origin"] == "pinned"
    for name in ("backbone.safetensors", "other.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (single.extraction / name).read_bytes()


def test_a_pinned_asset_with_its_known_tensors(pins: Any, tmp_path: Path) -> None:
    pins()

    extraction = extract_to_folder("mhr", ASSET, tmp_path / "out")

    assert extraction.source.origin == "pinned"


@pytest.mark.parametrize("key", ["backbone_safetensors", "other_safetensors"])
@pytest.mark.parametrize("wrong", [{"sha256": "0" * 64}, {"bytes": 7}])
def test_a_missed_answer_leaves_nothing(pins: Any, tmp_path: Path, key: str, wrong: Json) -> None:
    pins(**{key: wrong if "bytes" in wrong else {**wrong, "bytes": 1}})

    with pytest.raises(Sam3dError, match="the file made from the pinned source") as caught:
        extract_to_folder("body", CHECKPOINT, tmp_path / "out")

    assert "published" in str(caught.value)
    assert key.replace("_", ".") in str(caught.value)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    "change", [{"sha256": "0" * 64}, {"dtype": "F64"}, {"shape": [1]}, {"name": "absent"}]
)
def test_a_missed_tensor_leaves_nothing(pins: Any, tmp_path: Path, change: Json) -> None:
    pins(mhr_tensors=[*MHR_TENSORS[:-1], {**MHR_TENSORS[-1], **change}])

    with pytest.raises(Sam3dError, match="is not the published one"):
        extract_to_folder("mhr", ASSET, tmp_path / "out")

    assert names_in(tmp_path) == []


def test_swapped_names_miss_the_answer(
    pins: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one lie of a worker that the bytes can't show."""
    pins()

    def worker(job: WorkerJob, _: SandboxChoice) -> WorkerResult:
        status = liar.tell("swapped both", job.source_fd, job.output, list(job.arguments))
        return WorkerResult(status, "", "", None, 0.0, "this process", job.limits)

    monkeypatch.setattr(extract_module, "run_worker", worker)

    with pytest.raises(Sam3dError, match="the file made from the pinned source"):
        extract_to_folder("body", CHECKPOINT, tmp_path / "out")

    assert names_in(tmp_path) == []


def test_a_pinned_size_with_another_hash_is_not_pinned(pins: Any, tmp_path: Path) -> None:
    pins()
    other = tmp_path / "model.ckpt"
    other.write_bytes(CHECKPOINT.read_bytes()[:-1] + b"\1")

    with pytest.raises(InputError):
        extract_to_folder("body", other, tmp_path / "out")
    (pinned,) = load_sources().with_role("body.checkpoint")
    assert pinned.bytes == other.stat().st_size


def test_a_pin_for_another_role_does_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pin(monkeypatch, {"mhr.asset": CHECKPOINT})

    with pytest.raises(InputError, match=r"not a pinned body\.checkpoint"):
        extract_to_folder("body", CHECKPOINT, tmp_path / "out")


def test_a_pinned_source_must_have_the_official_dimensions(pins: Any, tmp_path: Path) -> None:
    pins()

    with pytest.raises(ContractError, match="BF16 \\[1280"):
        convert_body(request(tmp_path / "body.gguf", mhr=None, allow_unpinned=False))

    assert names_in(tmp_path) == []


def test_an_extraction_with_its_pinned_source(pins: Any, single: Release, tmp_path: Path) -> None:
    """It gets as far as the official dimensions, which a tiny model does not have."""
    pins()
    again = functools.partial(
        from_extraction, single.mhr_extraction, tmp_path / "mhr.gguf", mhr=None, config=None
    )

    with pytest.raises(InputError, match="not published"):
        convert_mhr(again(allow_unpinned=False))
    with pytest.raises(ContractError, match="expected F32 \\[18439, 3\\]"):
        convert_mhr(again(allow_unpinned=False, checkpoint=ASSET))


@pytest.mark.parametrize(
    ("role", "size", "sha256", "answer"),
    [
        ("mhr.lod1", 693_111_264, MHR_GGUF, "equal"),
        ("mhr.lod1", 693_111_265, MHR_GGUF, None),
        ("mhr.lod1", 693_111_264, "0" * 64, None),
        ("body.dinov3_backbone", 693_111_264, MHR_GGUF, None),
        ("body", 693_111_264, MHR_GGUF, "none"),
    ],
)
def test_a_component_of_pinned_sources_is_the_published_one(
    role: str, size: int, sha256: str, answer: str | None
) -> None:
    written: Any = SimpleNamespace(
        planned=SimpleNamespace(role=role, name="file.gguf"),
        sealed=SealedFile(Path("file.gguf"), size, sha256),
    )

    assert known_answer(written, pinned=False) == "none"
    if answer is None:
        with pytest.raises(ContractError, match="the file made from the pinned source"):
            known_answer(written, pinned=True)
    else:
        assert known_answer(written, pinned=True) == answer
