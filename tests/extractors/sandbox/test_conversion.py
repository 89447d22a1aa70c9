"""A whole conversion with the reader in Docker gives the same bytes as in bubblewrap."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_release import ASSET, CHECKPOINT, Release, names_in, request

from sam3d_gguf.convert.inspect import inspect
from sam3d_gguf.convert.release import convert_body
from sam3d_gguf.convert.verify import verify
from sam3d_gguf.extractors.sandbox.job import SandboxChoice
from sam3d_gguf.schemas.errors import InputError

pytestmark = pytest.mark.docker


def test_docker_gives_the_same_release(docker_image: str, single: Release, tmp_path: Path) -> None:
    convert_body(request(tmp_path / "body.gguf", sandbox=SandboxChoice("docker", docker_image)))

    assert names_in(tmp_path) == names_in(single.folder)
    for name in names_in(tmp_path):
        assert (tmp_path / name).read_bytes() == (single.folder / name).read_bytes(), name


def test_docker_reads_sources_for_verification(docker_image: str, single: Release) -> None:
    choice = SandboxChoice("docker", docker_image)

    result = verify([single.manifest], sources=[CHECKPOINT, ASSET], sandbox=choice)

    assert result.verdict == "verified (complete, unpinned)"


def test_docker_refuses_what_bubblewrap_refuses(docker_image: str, tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    path.write_bytes(CHECKPOINT.read_bytes().replace(b"BFloat16Storage", b"BFloat17Storage"))
    said: list[str] = []
    for choice in (SandboxChoice("docker", docker_image), SandboxChoice()):
        with pytest.raises(InputError) as caught:
            inspect(path, sandbox=choice)
        said.append(str(caught.value))

    assert said[0] == said[1]
