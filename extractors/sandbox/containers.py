"""Run a worker in a Docker container, for those who ask for it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import docker
import requests
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.models.containers import Container
from docker.types import LogConfig, Mount, Ulimit

from sam3d_gguf.extractors.sandbox import bootstrap
from sam3d_gguf.extractors.sandbox.capture import TAIL_BYTES, readable
from sam3d_gguf.extractors.sandbox.ending import NO_START, OTHER_SOURCE, ended_by
from sam3d_gguf.extractors.sandbox.handover import UNPRIVILEGED, handed_over
from sam3d_gguf.extractors.sandbox.job import EndedBy, SandboxLimits, WorkerJob, WorkerResult
from sam3d_gguf.schemas import strict_json
from sam3d_gguf.schemas.errors import SandboxError

DEADLINE_LABEL = "sam3d-gguf.deadline"
"""On a container: the second since 1970 after which no caller waits for it any more."""

_GRACE_SECONDS = 60
_CHECK_LIMITS = SandboxLimits(seconds=60.0)
_REMAPPED = ("name=rootless", "name=userns")
_NEEDS = "an image with Python 3.11 or newer and NumPy"
_USE_BUBBLEWRAP = "Use bubblewrap, which needs no daemon and no root either"


@dataclass(frozen=True, slots=True)
class _Ended:
    status: int
    stdout: str
    stderr: str
    ended_by: EndedBy | None


@dataclass(frozen=True, slots=True)
class Docker:
    """A daemon, and the image that workers run in."""

    client: docker.DockerClient
    image: str

    @property
    def name(self) -> str:
        """`docker` and the image's ID."""
        return f"docker {self.image}"

    def check(self) -> None:
        """Start Python with NumPy in a container.

        Raises:
            SandboxError: the daemon or the image does not let it.
        """
        with self._container(_CHECK_LIMITS, ["-c", "import numpy"], []) as container:
            ended = _run(container, _CHECK_LIMITS.seconds)
        if ended.status != 0 or ended.ended_by is not None:
            raise self._no_start(ended)

    def run(self, job: WorkerJob) -> WorkerResult:
        """Run one worker to its end.

        Raises:
            SandboxError: it could not start.
        """
        started = time.monotonic()
        command = ["-c", bootstrap.ENTRY, bootstrap.specify(job).encode()]
        with (
            handed_over(job.output),
            self._container(job.limits, command, _mounts(job)) as container,
        ):
            ended = _run(container, job.limits.seconds)
        if ended.status in (NO_START, OTHER_SOURCE):
            raise self._no_start(ended)
        return WorkerResult(
            exit_status=ended.status,
            stdout=ended.stdout,
            stderr=ended.stderr,
            ended_by=ended.ended_by,
            seconds=time.monotonic() - started,
            sandbox=self.name,
            limits=job.limits,
        )

    @contextlib.contextmanager
    def _container(
        self, limits: SandboxLimits, command: list[str], mounts: list[Mount]
    ) -> Generator[Container]:
        """A container behind all walls, not started yet; removed at the end, running or not."""
        user = os.geteuid() or UNPRIVILEGED
        group = os.getegid() if os.geteuid() else UNPRIVILEGED
        deadline = int(time.time() + limits.seconds) + _GRACE_SECONDS
        try:
            container = self.client.containers.create(
                self.image,
                entrypoint=["python3", "-I", "-B", "-X", "utf8"],
                command=command,
                user=f"{user}:{group}",
                network_mode="none",
                ipc_mode="none",
                read_only=True,
                cap_drop=["ALL"],
                security_opt=["no-new-privileges"],
                mem_limit=limits.memory_bytes,
                memswap_limit=limits.memory_bytes,
                pids_limit=limits.processes,
                tmpfs={"/tmp": "rw,nosuid,nodev,noexec,size=1m", "/dev/mqueue": "ro,size=4k"},
                ulimits=[Ulimit(name="core", soft=0, hard=0)],
                mounts=mounts,
                hostname="sandbox",
                working_dir="/",
                healthcheck={"test": ["NONE"]},
                log_config=LogConfig(type="json-file", config={"max-size": "1m", "max-file": "1"}),
                labels={DEADLINE_LABEL: str(deadline)},
                stdin_open=True,
            )
        except DockerException as error:
            raise _refused(error) from error
        try:
            yield container
        finally:
            with contextlib.suppress(NotFound):
                container.remove(force=True, v=True)

    def _no_start(self, ended: _Ended) -> SandboxError:
        if ended.status == OTHER_SOURCE:
            return SandboxError("the source was replaced while it was being opened")
        said = ended.stderr.strip().splitlines()[-1:] or [f"exit status {ended.status}"]
        return SandboxError(
            f"the worker could not start in its container: {said[0]}",
            where=self.image,
            expected=f"{_NEEDS}; source and package readable by the user that runs it",
        )


def _mounts(job: WorkerJob) -> list[Mount]:
    readable_by_worker = [(bootstrap.SOURCE, job.source_path)]
    for package in job.packages:
        readable_by_worker.append((f"{bootstrap.PACKAGES}/{package.name}", package.path))
    return [
        *(_mount(place, path, read_only=True) for place, path in readable_by_worker),
        _mount(bootstrap.OUTPUT, job.output, read_only=False),
    ]


def _mount(place: str, path: Path, *, read_only: bool) -> Mount:
    return Mount(place, str(path.resolve()), type="bind", read_only=read_only)


def _run(container: Container, seconds: float) -> _Ended:
    """Start a container and wait for its end, or kill it after `seconds`.

    The attached input is a lifeline: the daemon closes it when this process is gone, however that
    came about, and then the bootstrap ends the worker.
    """
    try:
        lifeline = container.attach_socket(  # pyright: ignore[reportUnknownMemberType]
            params={"stdin": 1, "stream": 1}
        )
        with contextlib.closing(lifeline):
            container.start()
            timed_out = not _wait(container, seconds)
            if timed_out:
                container.kill()
                container.wait(timeout=_GRACE_SECONDS)
        container.reload()
        state = container.attrs["State"]
        status = int(state["ExitCode"])
        return _Ended(
            status=status,
            stdout=readable(container.logs(stdout=True, stderr=False)[-TAIL_BYTES:]),
            stderr=readable(container.logs(stdout=False, stderr=True)[-TAIL_BYTES:]),
            ended_by=_ending(status, timed_out=timed_out, out_of_memory=bool(state["OOMKilled"])),
        )
    except (DockerException, requests.RequestException) as error:
        raise _refused(error) from error


def _wait(container: Container, seconds: float) -> bool:
    """Whether the container ended within `seconds`."""
    deadline = time.monotonic() + seconds
    try:
        container.wait(timeout=seconds)
    except requests.RequestException:
        # A read that times out has several names, and so has a daemon that goes away.
        if time.monotonic() < deadline:
            raise
        return False
    return True


def _ending(status: int, *, timed_out: bool, out_of_memory: bool) -> EndedBy | None:
    if timed_out:
        return "time"
    return "memory" if out_of_memory else ended_by(status)


def _refused(error: Exception) -> SandboxError:
    said = (error.explanation if isinstance(error, APIError) else None) or str(error)
    if "executable file not found" in said:
        return SandboxError("the image has no python3", expected=_NEEDS)
    if "bind source path does not exist" in said:
        return SandboxError(
            f"the Docker daemon does not see this machine's files: {said}",
            expected="a daemon on this machine",
            action=_USE_BUBBLEWRAP,
        )
    return SandboxError(f"Docker refuses: {said}", action=_USE_BUBBLEWRAP)


def find(base: str | None) -> Docker:
    """The Docker daemon of the environment, with the image `base` resolved to its ID.

    Containers that callers before were killed too early to remove are removed.

    Raises:
        SandboxError: no daemon, no such image here (none is ever pulled), or one that can't do.
    """
    base = base or _pinned_base()
    try:
        client = docker.from_env()
        info = client.info()
    except DockerException as error:
        raise SandboxError(
            f"no Docker daemon answers: {error}",
            expected="a running daemon that this user may use (DOCKER_HOST, group docker)",
            action=_USE_BUBBLEWRAP,
        ) from error
    if any(option.startswith(_REMAPPED) for option in info["SecurityOptions"]):
        raise SandboxError(
            "this Docker daemon maps user IDs, so that the output would belong to another user",
            action=_USE_BUBBLEWRAP,
        )
    _remove_litter(client)
    return Docker(client, _resolve(client, base))


def _pinned_base() -> str:
    document = strict_json.load_file(Path(__file__).with_name("image.json"))
    base = document["base"] if isinstance(document, dict) else None
    if not isinstance(base, str):
        raise SandboxError(
            "no base image is pinned yet", expected=f"--base IMAGE, {_NEEDS}; see docs/sandbox.md"
        )
    return base


def _resolve(client: docker.DockerClient, base: str) -> str:
    try:
        image = client.images.get(base)
    except ImageNotFound as error:
        raise SandboxError(
            "the Docker daemon has no such image",
            where=base,
            expected=_NEEDS,
            action=f"Images are not pulled by themselves: docker pull {base}",
        ) from error
    except DockerException as error:
        raise _refused(error) from error
    if image.id is None or image.attrs["Config"].get("Volumes"):
        raise SandboxError(
            "the image declares volumes, which its containers could write to", where=base
        )
    return image.id


def _remove_litter(client: docker.DockerClient) -> None:
    with contextlib.suppress(DockerException):
        for container in client.containers.list(all=True, filters={"label": DEADLINE_LABEL}):
            if int(container.labels[DEADLINE_LABEL]) < time.time():
                container.remove(force=True, v=True)
