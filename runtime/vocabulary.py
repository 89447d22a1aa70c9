"""The versioned schemas of joints, keypoints and outputs: names, parents, units, axes, spaces."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any, Literal

Vocabulary = Literal[
    "mhr-joints-v1",
    "keypoints-70-v1",
    "keypoints-308-v1",
    "body-output-v1",
    "body-features-v1",
    "mhr-output-v1",
    "objects-output-v1",
]


@functools.cache
def load_vocabulary(name: Vocabulary) -> dict[str, Any]:
    """The schema of that name, as parsed JSON; do not change it."""
    folder = resources.files("sam3d_gguf.schemas") / "vocabulary"
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text("utf-8"))
    return found


def keypoint_links() -> tuple[tuple[int, int], ...]:
    """Pairs of keypoints, of the first 70, that a drawing joins."""
    links: list[list[int]] = load_vocabulary("keypoints-70-v1")["links"]
    return tuple((first, second) for first, second in links)


def field_metadata(
    name: Literal["body-output-v1", "body-features-v1", "mhr-output-v1", "objects-output-v1"],
) -> dict[str, str]:
    """Metadata of a result file: one JSON object per field with its unit, axes and space."""
    schema = load_vocabulary(name)
    fields: list[dict[str, Any]] = schema["fields"]
    described = {
        str(field["name"]): json.dumps(
            {key: field[key] for key in ("unit", "axes", "space", "description")}
        )
        for field in fields
    }
    return {"schema": f"{schema['name']} {schema['schema_version']}", **described}
