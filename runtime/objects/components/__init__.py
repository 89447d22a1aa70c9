"""Run one component of SAM 3D Objects from given inputs, for diagnosis.

The tensors have the names of the original's captures: `NNN.stage`, where NNN counts them in the
order of their appearance. Of a network there are the output of every block, and the parts of one block.

>>> from pathlib import Path
>>> from sam3d_gguf.runtime.ggml.backend import open_backend
>>> from sam3d_gguf.runtime.ggml.library import load_library
>>> from sam3d_gguf.runtime.objects.release import ObjectsRelease
>>> with (  # doctest: +SKIP
...     ObjectsRelease.open(Path("objects"), models_of("ss-decoder")) as release,
...     open_backend(load_library(), "cpu") as backend,
... ):
...     inputs = read_inputs("ss-decoder", release, Path("inputs.safetensors"))
...     found = run_component("ss-decoder", release, backend, inputs)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from sam3d_gguf.extractors.models import ObjectsModel
from sam3d_gguf.runtime.ggml.backend import Backend
from sam3d_gguf.runtime.objects.components import decoders, images, latent, structure, whole
from sam3d_gguf.runtime.objects.components.captures import numbered
from sam3d_gguf.runtime.objects.components.component import Component
from sam3d_gguf.runtime.objects.components.inputs import (
    Array,
    Arrays,
    check_tensors,
    read_tensors,
)
from sam3d_gguf.runtime.objects.release import ObjectsRelease
from sam3d_gguf.schemas.errors import InputError

_COMPONENTS: Mapping[str, Component] = {
    "preprocess": images.PREPROCESS,
    "embed-ss": images.EMBED_STRUCTURE,
    "ss-flow-forward": structure.FORWARD,
    "ss-flow-sampler": structure.SAMPLER,
    "pose-decoder": structure.POSE_DECODER,
    "ss-decoder": structure.STRUCTURE_DECODER,
    "embed-slat": images.EMBED_LATENT,
    "slat-flow-forward": latent.FORWARD,
    "slat-flow-sampler": latent.SAMPLER,
    "gaussian-decoder-32": decoders.GAUSSIANS_32,
    "gaussian-decoder-4": decoders.GAUSSIANS_4,
    "mesh-decoder": decoders.MESH_DECODER,
    "mesh-extract": decoders.MESH_EXTRACT,
    "pipeline": whole.PIPELINE,
}
NAMES = tuple(_COMPONENTS)
"""The components in the order of the pipeline."""


def models_of(name: str) -> tuple[ObjectsModel, ...]:
    """The part files that a component needs.

    Raises:
        InputError: there is no component of that name.
    """
    return _component(name).models


def read_inputs(name: str, release: ObjectsRelease, path: Path) -> dict[str, Array]:
    """What a component takes, from a safetensors file that is read once its header is right.

    Raises:
        InputError: no such component, no such file, or other tensors than the component takes.
        ContractError: a part lacks a number.
    """
    return read_tensors(path, _component(name).wanted(release))


def run_component(
    name: str, release: ObjectsRelease, backend: Backend, inputs: Arrays
) -> dict[str, Array]:
    """A component's tensors, numbered in the order of their appearance.

    Args:
        name: one of `NAMES`.
        release: opened with at least the parts of `models_of(name)`.
        backend: where the networks run.
        inputs: by the names of the original's captures.

    Raises:
        InputError: no such component; an input is missing, unknown, of another shape or type, not
            finite, out of range, or nothing comes of it.
        ContractError: a part lacks a tensor or a number.
        BackendError: the device or this machine has too little memory.
    """
    component = _component(name)
    check_tensors(inputs, component.wanted(release))
    # Large inputs overflow to infinities, which the result shows.
    with np.errstate(all="ignore"):
        return numbered(component.run(release, backend, inputs))


def _component(name: str) -> Component:
    component = _COMPONENTS.get(name)
    if component is None:
        raise InputError(f"there is no component {name[:80]!r}", expected=", ".join(NAMES))
    return component
