"""What each tensor of a source is for, as its contract says: one word for the reports."""

from __future__ import annotations

import functools
import re
from typing import Any

from sam3d_gguf.extractors.models import contract_name
from sam3d_gguf.schemas.documents import package_document

UNKNOWN = "unknown"


def classify(model: str, name: str) -> str:
    """The class of a source tensor: learned, constant, geometry, index, training or unknown."""
    for pattern, word in _classes(model):
        if pattern.fullmatch(name):
            return word
    return UNKNOWN


@functools.cache
def _classes(model: str) -> tuple[tuple[re.Pattern[str], str], ...]:
    document: Any = package_document(
        "sam3d_gguf.schemas", "contracts", f"{contract_name(model)}.json", schema_name="contract"
    )
    entries = (*document["tensors"], *document["left_out"], *document["added"])
    return tuple((_pattern(entry["source"]), entry["class"]) for entry in entries)


def _pattern(source: str) -> re.Pattern[str]:
    # {i} stands for an index, * for one segment of a name.
    escaped = re.escape(source).replace(r"\*", r"[^.]+")
    return re.compile(re.sub(r"\\\{[a-z]\\\}", r"[0-9]+", escaped))
