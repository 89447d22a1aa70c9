"""The shipped pins equal the committed facts, and an open slot never counts as pinned."""

from __future__ import annotations

import copy
import hashlib
import importlib.resources
from pathlib import Path
from typing import Any

from sam3d_gguf.manifests.sources import load_sources, parse_sources
from sam3d_gguf.schemas.strict_json import loads

_FIXTURES = Path(__file__).parent.parent / "fixtures"


def _rows() -> list[list[str]]:
    return [line.split(" ") for line in (_FIXTURES / "facts/pins.txt").read_text().splitlines()]


def test_every_pinned_file_equals_the_facts() -> None:
    pinned = [
        [f.repository, f.revision, f.path, str(f.bytes), f.sha256, f.git_blob_sha1 or "-"]
        for f in load_sources().files
    ]
    assert pinned == [row for row in _rows() if "-" not in row[1:5]]


def test_open_slots_are_the_rows_without_identity() -> None:
    slots = [[s.repository, s.path] for s in load_sources().open_slots]
    assert slots == [[row[0], row[2]] for row in _rows() if "-" in row[1:5]]
    assert slots == [["Ruicheng/moge-vitl", "model.pt"]]


def test_find_needs_hash_and_size() -> None:
    sources = load_sources()
    config = sources.find(
        sha256="1012fc3f39cb5e90e3f8fbadf7bded31604bfafdce0321d17a7c1a2d3f08b88d", size=1488
    )
    assert config is not None and config.role == "body.config"
    assert sources.find(sha256=config.sha256, size=1489) is None
    assert sources.find(sha256="0" * 64, size=1488) is None
    asset = sources.find(
        sha256="352e271a6c42729c68554ceaea0c955e866970160c31e35506d782dc0f7377bc", size=696110248
    )
    assert asset is not None and asset.role == "mhr.asset"


def test_the_official_configuration_is_the_tiny_one_with_other_sizes() -> None:
    """Its bytes follow from the fixture, so both published identities can be recomputed here."""
    text = official_config()
    (config,) = load_sources().with_role("body.config")
    assert len(text) == config.bytes
    assert hashlib.sha256(text).hexdigest() == config.sha256
    blob = b"blob %d\0" % len(text) + text
    assert hashlib.sha1(blob, usedforsecurity=False).hexdigest() == config.git_blob_sha1


def official_config() -> bytes:
    text = (_FIXTURES / "tiny-body-a/model_config.yaml").read_bytes()
    for old, new in (
        (b"- 128\n", b"- 512\n"),
        (b"DIM: 48", b"DIM: 1024"),
        (b"DEPTH: 3", b"DEPTH: 6"),
        (b"HEADS: 4", b"HEADS: 8"),
        (b"MLP_DIM: 56", b"MLP_DIM: 1024"),
        (b"DIM_HEAD: 8", b"DIM_HEAD: 64"),
    ):
        assert old in text
        text = text.replace(old, new)
    return text


def _document() -> Any:
    data = importlib.resources.files("sam3d_gguf.manifests").joinpath("sources.json").read_bytes()
    return loads(data, where="sources.json", schema="sources")


def test_a_half_filled_slot_stays_open() -> None:
    full = {"revision": "1" * 40, "bytes": 7, "sha256": "2" * 64}
    for missing in full:
        document = copy.deepcopy(_document())
        entry = document["model_repositories"][2]
        for key, value in full.items():
            if key != missing:
                target = entry if key == "revision" else entry["files"][0]
                target[key] = value
        sources = parse_sources(document)
        assert len(sources.open_slots) == 1
        assert sources.find(sha256="2" * 64, size=7) is None
    document = copy.deepcopy(_document())
    document["model_repositories"][2]["revision"] = full["revision"]
    document["model_repositories"][2]["files"][0].update(bytes=7, sha256="2" * 64)
    found = parse_sources(document).find(sha256="2" * 64, size=7)
    assert found is not None and found.role == "moge.checkpoint"


def test_revisions_and_licenses() -> None:
    sources = load_sources()
    assert dict(sources.source_revisions) == {
        "facebookresearch/sam-3d-body": "b5c765a0d89d789985e186d396315e7590887b94",
        "facebookresearch/sam-3d-objects": "f91db411c50efee93d8db7aeb323885650f6f722",
        "facebookresearch/dinov3": "6876159a11b4df116f30f667f8c9888617df0751",
        "facebookresearch/MHR": "e412e12c9d7287a598f00edf19242b476b440211",
    }
    assert [(li.sha256[:8], len(li.files)) for li in sources.licenses] == [
        ("b3a5a0e2", 2),
        ("25d122eb", 1),
        ("cfc7749b", 1),
    ]
    (text,) = sources.with_role("license")
    assert text.sha256 == sources.licenses[2].sha256
    assert [r.name for r in sources.releases] == ["MHR v1.0.1"]
    assert sources.releases[0].archive.bytes == 198943157
