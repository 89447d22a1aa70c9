"""One component of SAM 3D Objects, from a file of inputs to a file of its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sam3d_gguf.extractors.files import open_source
from sam3d_gguf.runtime.ggml.backend import BackendName, open_backend
from sam3d_gguf.runtime.ggml.library import Precision, load_library
from sam3d_gguf.runtime.objects.components import models_of, read_inputs, run_component
from sam3d_gguf.runtime.objects.release import ObjectsRelease
from sam3d_gguf.runtime.output import check_free
from sam3d_gguf.runtime.provenance import provenance_of
from sam3d_gguf.runtime.tensor_files import write_tensors
from sam3d_gguf.schemas.errors import InputError


@dataclass(frozen=True, slots=True)
class ComponentJob:
    """What to run, and where.

    Attributes:
        name: of the component.
        inputs: a safetensors file.
        taps: the new file.
        backend, device, threads, precision, expect_device: see `open_backend`.
    """

    name: str
    inputs: Path
    taps: Path
    backend: BackendName = "cpu"
    device: int = 0
    threads: int | None = None
    precision: Precision = "strict-f32"
    expect_device: str | None = None


def run_component_job(models: Path, job: ComponentJob, *, verify: bool = False) -> None:
    """Run a component and write its tensors, with what they were made with.

    Args:
        models: the folder of the parts.
        verify: also hash all of the parts' data first.

    Raises:
        InputError: no such component, or inputs that it cannot take.
        ContractError: a part is another model, incomplete, or of another release.
        BackendError: the device is not there, or has too little memory.
        OutputError: the file exists already, or cannot be written.
    """
    needed = models_of(job.name)
    check_free([job.taps])
    with open_source(job.inputs):
        pass
    with (
        ObjectsRelease.open(models, needed, verify=verify) as release,
        open_backend(
            load_library(),
            job.backend,
            device=job.device,
            threads=job.threads,
            precision=job.precision,
            expect_device=job.expect_device,
        ) as backend,
    ):
        inputs = read_inputs(job.name, release, job.inputs)
        try:
            found = run_component(job.name, release, backend, inputs)
        except InputError as error:
            if error.where:
                raise
            raise error.at(str(job.inputs)) from error
        provenance = provenance_of(backend, release.metadata)
    write_tensors(job.taps, found, provenance)
