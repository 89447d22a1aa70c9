"""Docker refuses in words that help, and leaves no containers."""

from __future__ import annotations

import io
import os
import tarfile
import time
from pathlib import Path

import docker
import pytest

from sam3d_gguf.extractors.sandbox.containers import DEADLINE_LABEL
from sam3d_gguf.extractors.sandbox.job import (
    Package,
    SandboxChoice,
    SandboxLimits,
    WorkerJob,
    own_packages,
)
from sam3d_gguf.extractors.sandbox.run import check_sandbox, run_worker
from sam3d_gguf.schemas.errors import SandboxError

PROBE = Package("probe.py", Path(__file__).with_name("probe.py"))


@pytest.fixture
def client(docker_image: str) -> docker.DockerClient:
    """The tests' daemon."""
    assert docker_image
    return docker.from_env()


def import_image(client: docker.DockerClient, name: str, changes: list[str]) -> None:
    """An image with one empty file."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("empty"))
    client.api.import_image_from_data(  # pyright: ignore[reportUnknownMemberType]
        archive.getvalue(), repository=name, tag="latest", changes=changes
    )


def make_job(folder: Path, *arguments: str, limits: SandboxLimits | None = None) -> WorkerJob:
    source = folder / "source"
    source.write_bytes(b"source")
    output = folder / "output"
    output.mkdir()
    return WorkerJob(
        source_fd=os.open(source, os.O_RDONLY),
        source_path=source,
        output=output,
        module="probe",
        arguments=arguments,
        limits=limits or SandboxLimits(),
        packages=(*own_packages(), PROBE),
    )


def test_no_daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(SandboxError, match="no Docker daemon answers"):
        check_sandbox(SandboxChoice("docker", "image"))


def test_no_image_is_pinned_yet() -> None:
    with pytest.raises(SandboxError, match="no base image is pinned yet; expected --base IMAGE"):
        check_sandbox(SandboxChoice("docker"))


@pytest.mark.docker
def test_no_such_image(client: docker.DockerClient) -> None:
    with pytest.raises(SandboxError, match=r"no such image.*docker pull nowhere"):
        check_sandbox(SandboxChoice("docker", "nowhere"))


@pytest.mark.docker
def test_an_image_without_python(client: docker.DockerClient) -> None:
    import_image(client, "empty", [])
    before = client.containers.list(all=True)
    with pytest.raises(SandboxError, match="the image has no python3"):
        check_sandbox(SandboxChoice("docker", "empty"))
    assert client.containers.list(all=True) == before


@pytest.mark.docker
def test_an_image_without_numpy(client: docker.DockerClient, image_without_numpy: str) -> None:
    with pytest.raises(SandboxError, match="No module named 'numpy'"):
        check_sandbox(SandboxChoice("docker", image_without_numpy))


@pytest.mark.docker
def test_an_image_with_a_writable_volume(client: docker.DockerClient) -> None:
    import_image(client, "volume", ["VOLUME /data"])
    with pytest.raises(SandboxError, match="the image declares volumes"):
        check_sandbox(SandboxChoice("docker", "volume"))


@pytest.mark.docker
def test_the_image_is_named_by_its_id(client: docker.DockerClient, docker_image: str) -> None:
    image = client.images.get(docker_image)
    assert check_sandbox(SandboxChoice("docker", docker_image)) == f"docker {image.id}"


@pytest.mark.docker
def test_the_source_is_the_file_that_was_opened(docker_image: str, tmp_path: Path) -> None:
    job = make_job(tmp_path, "return", "0")
    job.source_path.unlink()
    job.source_path.write_bytes(b"another")
    with pytest.raises(SandboxError, match="the source was replaced"):
        run_worker(job, SandboxChoice("docker", docker_image))


@pytest.mark.docker
def test_a_source_that_the_worker_may_not_read(docker_image: str, tmp_path: Path) -> None:
    job = make_job(tmp_path, "return", "0")
    job.source_path.chmod(0)
    with pytest.raises(SandboxError, match=r"Permission denied: '/in/source'.*readable by"):
        run_worker(job, SandboxChoice("docker", docker_image))


@pytest.mark.docker
def test_memory_is_limited_over_all_processes(docker_image: str, tmp_path: Path) -> None:
    limits = SandboxLimits(memory_bytes=512 << 20, seconds=60.0)
    job = make_job(tmp_path, "hoard", str(limits.memory_bytes * 3 // 5), limits=limits)
    result = run_worker(job, SandboxChoice("docker", docker_image))
    assert result.ended_by == "memory"


@pytest.mark.docker
def test_litter_of_killed_callers_is_removed(
    client: docker.DockerClient, docker_image: str
) -> None:
    now = int(time.time())
    old, young = (
        client.containers.create(docker_image, "python3", labels={DEADLINE_LABEL: str(deadline)})
        for deadline in (now - 10, now + 1000)
    )
    check_sandbox(SandboxChoice("docker", docker_image))
    left = client.containers.list(all=True)
    assert old not in left
    assert young in left
