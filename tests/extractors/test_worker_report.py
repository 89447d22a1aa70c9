"""What a worker that has been taken over can make the host believe: only what the file holds too."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import liar
import pytest
from tiny_release import CHECKPOINT, load_file, names_in

from sam3d_gguf.extractors import extract as extract_module
from sam3d_gguf.extractors.extract import extract
from sam3d_gguf.extractors.litter import scratch_folder
from sam3d_gguf.extractors.sandbox.job import (
    Package,
    SandboxChoice,
    WorkerJob,
    WorkerResult,
    own_packages,
)
from sam3d_gguf.schemas.errors import Sam3dError

LIAR = Package("liar.py", Path(liar.__file__))
Hashes = dict[str, str]
Run = Callable[[str], Hashes]


def extracted(tmp_path: Path) -> Hashes:
    """The hashes of what an extraction gives; nothing of it stays."""
    with (
        scratch_folder(tmp_path) as folder,
        extract("body", CHECKPOINT, folder, allow_unpinned=True) as result,
    ):
        tensors = load_file(result.files["other.safetensors"].path)
        return {name: hashlib.sha256(t.tobytes()).hexdigest() for name, t in tensors.items()}


@pytest.fixture
def sandboxed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Extract with a worker in the sandbox that tells a lie."""

    def job(lie: str, arguments: tuple[str, ...], **fields: Any) -> WorkerJob:
        packages = (*own_packages(), LIAR)
        return WorkerJob(**fields, module="liar", arguments=(*arguments, lie), packages=packages)

    def run(lie: str) -> Hashes:
        monkeypatch.setattr(extract_module, "WorkerJob", functools.partial(job, lie))
        return extracted(tmp_path)

    return run


@pytest.fixture
def lie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Extract with the same worker in this process: the host takes its answer in the same way."""

    def worker(lie: str, job: WorkerJob, _: SandboxChoice) -> WorkerResult:
        status, said = 0, ""
        try:
            liar.prepare(lie, job.output)
            status = liar.tell(lie, job.source_fd, job.output, list(job.arguments))
        except SystemExit as end:
            status, said = 1, str(end)
        return WorkerResult(status, "", said, None, 0.0, "this process", job.limits)

    def run(lie: str) -> Hashes:
        monkeypatch.setattr(extract_module, "run_worker", functools.partial(worker, lie))
        return extracted(tmp_path)

    return run


CAUGHT = {
    "swapped places": "bytes of the tensor 'head_camera.proj.layers.0.0.bias'",
    "swapped bytes": "bytes of the tensor 'head_camera.proj.layers.0.0.bias'",
    "flipped bit in the data": "are not those that the source holds",
    "flipped bit in the first file": "backbone.safetensors: the reader's bytes of the tensor",
    "flipped bit in the header": "another header or size",
    "longer file": "another header or size",
    "shorter file": "another header or size",
    "empty file": "another header or size",
    "much longer file": "another header or size",
    "spaces in the header": "another header or size",
    "tensor left out": "another header or size",
    "tensor twice": "twice",
    "tensor renamed": "another header or size",
    "tensor reshaped": "another header or size",
    "tensor retyped": "another header or size",
    "offset outside": "outside of its storage",
    "offset by one": "outside of its storage",
    "strides outside": "outside of its storage",
    "strides too few": "which the file does not hold",
    "storage unknown": "which the file does not hold",
    "storage elsewhere": "which the file does not hold",
    "storage longer": "which the file does not hold",
    "storage without member": "which the file does not hold",
    "storage in a pickle": "which the file does not hold",
    "another kind": "TORCH_LEGACY",
    "an archive of scripts": "TORCHSCRIPT",
    "huge empty tensor": "",
    "empty tensor in a storage beyond the file": "which the file does not hold",
    "negative offset": "/storage_offset",
    "unknown field": "trusted",
    "field missing": "code",
    "number as text": "/storage",
    "unknown dtype": "/dtype",
    "report of 65 MiB": "",
    "report with a key twice": "twice",
    "report with NaN": "NaN",
    "report cut short": "report.json",
    "report that is no UTF-8": "report.json",
    "deep report": "deep",
    "report is a link": "a symbolic link",
    "product is a link": "a symbolic link",
    "product is a pipe": "a named pipe",
    "product is a folder": "a folder",
    "no product": "can't be opened",
    "refusal without a reason": "error.json",
    "refusal with a forged reason": "is fine",
    "refusal with a huge reason": "error.json",
    "refusal that is no document": "error.json",
    "failure": "gave up",
}


@pytest.mark.parametrize("name", CAUGHT)
def test_a_lie_is_caught(name: str, lie: Run, tmp_path: Path) -> None:
    with pytest.raises(Sam3dError) as caught:
        lie(name)

    assert CAUGHT[name] in str(caught.value)
    assert len(str(caught.value)) < 8192
    assert names_in(tmp_path) == []


IN_THE_SANDBOX = (
    "swapped bytes",
    "another kind",
    "report of 65 MiB",
    "product is a link",
    "product is a folder",
    "refusal with a forged reason",
    "failure",
)


@pytest.mark.parametrize("name", IN_THE_SANDBOX)
def test_a_lie_from_the_sandbox_is_caught(name: str, sandboxed: Run, tmp_path: Path) -> None:
    with pytest.raises(Sam3dError) as caught:
        sandboxed(name)

    assert CAUGHT[name] in str(caught.value)
    assert names_in(tmp_path) == []


def test_the_lies_are_the_only_reason(lie: Run) -> None:
    assert lie("honest")


def test_files_that_nobody_asked_for_are_left_behind(lie: Run, tmp_path: Path) -> None:
    assert lie("more files") == lie("honest")
    assert names_in(tmp_path) == []


def test_which_name_belongs_to_which_bytes_stays_a_claim(lie: Run) -> None:
    honest, swapped = lie("honest"), lie("swapped both")
    first, second = (f"head_{part}.proj.layers.0.0.bias" for part in ("pose", "camera"))

    assert (swapped[first], swapped[second]) == (honest[second], honest[first])
