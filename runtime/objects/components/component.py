"""What a component is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from sam3d_gguf.extractors.models import ObjectsModel
from sam3d_gguf.runtime.ggml.backend import Backend
from sam3d_gguf.runtime.objects.components.captures import Captured
from sam3d_gguf.runtime.objects.components.inputs import Arrays, Wanted
from sam3d_gguf.runtime.objects.release import ObjectsRelease

Inputs: TypeAlias = Callable[[ObjectsRelease], Mapping[str, Wanted]]
Run: TypeAlias = Callable[[ObjectsRelease, Backend, Arrays], Captured]


@dataclass(frozen=True, slots=True)
class Component:
    """A part of the pipeline that runs on its own.

    Attributes:
        models: the part files that it needs.
        wanted: what it takes, by name.
        run: from checked inputs to its tensors.
    """

    models: tuple[ObjectsModel, ...]
    wanted: Inputs
    run: Run
