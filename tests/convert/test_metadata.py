"""The metadata of single files of pinned sources, which no synthetic model can be."""

from __future__ import annotations

import dataclasses

import facts
import gguf
import pytest

from sam3d_gguf.convert.contract import load_contract
from sam3d_gguf.convert.gguf_format import GgufValue, ValueType
from sam3d_gguf.convert.metadata import (
    CompanionDigests,
    Provenance,
    semantics_metadata,
    single_metadata,
)
from sam3d_gguf.convert.mhr_names import MhrNames
from sam3d_gguf.extractors.extraction import SourceIdentity

NAMES = MhrNames(("root", "tip"), ("x",), (1,), ())


def official(path: str) -> SourceIdentity:
    """The official file of that path in the repository of the Body model."""
    (row,) = [r for r in facts.rows("pins.txt") if r[0].endswith("body-dinov3") and r[2] == path]
    return SourceIdentity("", int(row[3]), row[4], "pinned")


BODY = Provenance(
    model="body",
    source=official("model.ckpt"),
    safetensors={"backbone.safetensors": "1" * 64, "other.safetensors": "2" * 64},
    precision="source",
    config=official("model_config.yaml"),
    companions=(CompanionDigests("mhr", "sam3d.mhr.lod1", "3" * 64, "4" * 64),),
)
MHR = Provenance("mhr", official("assets/mhr_model.pt"), {"mhr.safetensors": "5" * 64}, "f32")


def metadata_of(provenance: Provenance) -> dict[str, GgufValue]:
    """The metadata at the official dimensions."""
    contract = load_contract("body" if provenance.model == "body" else "mhr.lod1")
    names = NAMES if provenance.model == "mhr" else None
    semantics = semantics_metadata(contract.official(), names)
    return single_metadata(provenance, semantics, contract.architecture)


def plain(values: dict[str, GgufValue]) -> dict[str, object]:
    """Keys and values without their types."""
    return {key: value.value for key, value in values.items()}


def test_a_pinned_body_names_its_release_and_licence() -> None:
    found = plain(metadata_of(BODY))

    assert (
        found
        | {
            "general.name": "SAM 3D Body DINOv3-H+",
            "general.organization": "Meta",
            "general.license": "other",
            "general.license.name": "sam-license",
            "general.source.repo_url": "https://github.com/facebookresearch/sam-3d-body",
            "general.file_type": gguf.LlamaFileType.MOSTLY_BF16.value,
            "sam3d.origin": "pinned",
            "sam3d.source.checkpoint.sha256": (
                "b5a2f9d305dd02626b967aa2e86021fba07065df66ce7a7e00ffb9664f150abf"
            ),
            "sam3d.source.checkpoint.bytes": 2_109_129_346,
            "sam3d.source.config.sha256": (
                "1012fc3f39cb5e90e3f8fbadf7bded31604bfafdce0321d17a7c1a2d3f08b88d"
            ),
            "sam3d.source.repository": "facebook/sam-3d-body-dinov3",
            "sam3d.source.code.sam_3d_body_revision": "b5c765a0d89d789985e186d396315e7590887b94",
            "sam3d.source.code.dinov3_revision": "6876159a11b4df116f30f667f8c9888617df0751",
            "sam3d.companion.mhr.content_sha256": "3" * 64,
        }
        == found
    )


def test_a_pinned_mhr_names_its_release_and_licence() -> None:
    found = plain(metadata_of(MHR))

    assert (
        found
        | {
            "general.name": "Momentum Human Rig (MHR) LOD1",
            "general.license": "apache-2.0",
            "general.source.repo_url": "https://github.com/facebookresearch/MHR",
            "general.file_type": gguf.LlamaFileType.ALL_F32.value,
            "sam3d.source.asset.sha256": (
                "352e271a6c42729c68554ceaea0c955e866970160c31e35506d782dc0f7377bc"
            ),
            "sam3d.source.code.mhr_revision": "e412e12c9d7287a598f00edf19242b476b440211",
            "sam3d.mhr.joint_names": ("root", "tip"),
        }
        == found
    )


@pytest.mark.parametrize("provenance", [BODY, MHR], ids=["body", "mhr"])
def test_nothing_of_that_is_said_of_an_unpinned_source(provenance: Provenance) -> None:
    source = dataclasses.replace(provenance.source, origin="unpinned")

    found = plain(metadata_of(dataclasses.replace(provenance, source=source)))

    assert found["sam3d.origin"] == "unpinned"
    assert str(found["general.name"]).endswith(" (unpinned source)")
    said = ("license", "organization", "repo_url", "revision", "source.repository")
    assert [key for key in found if any(word in key for word in said)] == []


def test_one_unpinned_source_makes_the_file_unpinned() -> None:
    assert BODY.config is not None
    config = dataclasses.replace(BODY.config, origin="unpinned")

    found = plain(metadata_of(dataclasses.replace(BODY, config=config)))

    assert found["sam3d.origin"] == "unpinned"
    assert "general.license" not in found


def test_value_types_are_those_that_viewers_expect() -> None:
    found = metadata_of(BODY)

    # By the GGUF specification.
    assert found["general.file_type"].type is ValueType.UINT32
    assert found["general.alignment"].type is ValueType.UINT32
    assert found["sam3d.source.checkpoint.bytes"].type is ValueType.UINT64
    strings = [key for key in found if key.startswith("general.") and key.endswith(("e", "n"))]
    assert {found[key].type for key in strings if key != "general.file_type"} == {ValueType.STRING}


def test_semantics_are_in_the_metadata_as_they_are() -> None:
    bound = load_contract("body").official()

    assert semantics_metadata(bound).items() <= metadata_of(BODY).items()
