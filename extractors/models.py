"""The models that can be extracted and converted: Body, MHR, and each part of Objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

ObjectsModel: TypeAlias = Literal[
    "objects.ss_generator",
    "objects.slat_generator",
    "objects.ss_decoder",
    "objects.slat_decoder_gs",
    "objects.slat_decoder_gs_4",
    "objects.slat_decoder_mesh",
    "objects.moge",
]
Model: TypeAlias = Literal["body", "mhr"] | ObjectsModel
OBJECTS: tuple[ObjectsModel, ...] = get_args(ObjectsModel)
MOGE: ObjectsModel = "objects.moge"

ROLES: Mapping[Model, str] = {
    "body": "body.checkpoint",
    "mhr": "mhr.asset",
    **{model: f"{model}.checkpoint" for model in OBJECTS},
    MOGE: "moge.checkpoint",
}
"""What a model's legacy file is called in `manifests/sources.json`."""


CONFIG_ROLES: Mapping[Model, str] = {
    "body": "body.config",
    **{model: f"{model}.config" for model in OBJECTS if model != MOGE},
}
"""What a model's configuration is called there; MoGe's lies in its legacy file."""
PIPELINE_ROLE = "objects.pipeline.config"
"""What the configuration is called that all parts of Objects share."""


def contract_name(model: str) -> str:
    """The contract in `schemas/contracts/` that describes a model."""
    return "mhr.lod1" if model == "mhr" else model


def part(model: str) -> str:
    """The name of a part of Objects without what they all begin with."""
    return model.removeprefix("objects.")
