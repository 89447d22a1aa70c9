"""Each wall, attacked from inside: in bubblewrap and in Docker, for root and for an ordinary user.

`probe.py` is the attacker. Its early findings are what bubblewrap or Docker alone let it do, its
late ones what the system call filter leaves.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import multiprocessing
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

import sam3d_gguf
from sam3d_gguf.extractors.sandbox.job import (
    Package,
    SandboxChoice,
    SandboxKind,
    SandboxLimits,
    WorkerJob,
    WorkerResult,
    own_packages,
)
from sam3d_gguf.extractors.sandbox.run import run_worker
from sam3d_gguf.schemas.errors import SandboxError

LIMITS = SandboxLimits(memory_bytes=512 << 20, file_bytes=8 << 20, seconds=60.0, processes=16)
OUTPUTS = {"made", "text", "much"}
ORDINARY_USER = 12345
NOBODY = 65534
PAGE = 4096


@dataclass(frozen=True, slots=True)
class Stand:
    """Where attacks run, and as whom: `user` None is whoever runs the tests."""

    choice: SandboxChoice
    user: int | None
    folder: Path

    @property
    def source(self) -> Path:
        return self.folder / "source"

    @property
    def output(self) -> Path:
        return self.folder / "output"

    def run(self, *arguments: str, limits: SandboxLimits = LIMITS) -> WorkerResult:
        """Run an attack in this process."""
        fd = os.open(self.source, os.O_RDONLY | os.O_CLOEXEC)
        try:
            job = WorkerJob(
                source_fd=fd,
                source_path=self.source,
                output=self.output,
                module="probe",
                arguments=arguments,
                limits=limits,
                packages=(*own_packages(), Package("probe.py", self.folder / "probe.py")),
            )
            return run_worker(job, self.choice)
        finally:
            os.close(fd)

    def attack(self, *arguments: str, limits: SandboxLimits = LIMITS) -> WorkerResult:
        """Run an attack as the stand's user."""
        if self.user is None:
            return self.run(*arguments, limits=limits)
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = self.begin(*arguments, limits=limits, sender=sender)
        sender.close()
        with receiver:
            result = receiver.recv()
        process.join()
        if isinstance(result, Exception):
            raise result
        assert isinstance(result, WorkerResult)
        return result

    def begin(
        self,
        *arguments: str,
        limits: SandboxLimits = LIMITS,
        sender: Connection[Any, Any] | None = None,
    ) -> BaseProcess:
        """Start an attack in a process of the stand's user, which sends the result."""

        def body() -> None:
            result: WorkerResult | Exception
            try:
                become(self.user)
                result = self.run(*arguments, limits=limits)
            except KeyboardInterrupt:
                return
            except Exception as error:  # noqa: BLE001 - the parent raises it
                result = error
            if sender is not None:
                sender.send(result)

        process = multiprocessing.get_context("fork").Process(target=body)
        process.start()
        return process


def become(user: int | None) -> None:
    """Turn this process into one of an ordinary user who can read Python and this checkout."""
    if user is None:
        return
    open_to_all()
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def open_to_all() -> None:
    """Let everybody reach Python and this checkout, in a mount namespace of this process alone."""
    assert ctypes.CDLL(None).unshare(0x20000) == 0  # CLONE_NEWNS
    mount("--make-rprivate", "/")
    needed = {Path(sys.prefix), Path(sys.base_prefix), Path(sam3d_gguf.__path__[0]).parent}
    closed = {folder: closed_parent(folder) for folder in sorted(needed) if closed_parent(folder)}
    mount("-t", "tmpfs", "tmpfs", "/mnt")
    stages = {folder: Path(f"/mnt/{number}") for number, folder in enumerate(closed)}
    for folder, stage in stages.items():
        stage.mkdir()
        mount("--bind", str(folder), str(stage))
    for parent in set(closed.values()):
        mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(parent))
    for folder, stage in stages.items():
        folder.mkdir(parents=True, exist_ok=True)
        mount("--bind", str(stage), str(folder))


def closed_parent(folder: Path) -> Path | None:
    """The outermost folder above that only its owner may enter."""
    parents = reversed(folder.parents)
    return next((path for path in parents if not path.stat().st_mode & stat.S_IXOTH), None)


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(("bubblewrap", None), id="bubblewrap"),
        pytest.param(("bubblewrap", ORDINARY_USER), id="bubblewrap-user"),
        pytest.param(("docker", None), id="docker", marks=pytest.mark.docker),
        pytest.param(("docker", ORDINARY_USER), id="docker-user", marks=pytest.mark.docker),
    ],
)
def place(request: pytest.FixtureRequest) -> tuple[SandboxChoice, int | None]:
    """A sandbox, and the user who runs it."""
    kind, user = request.param
    if user is not None and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    base = request.getfixturevalue("docker_image") if kind == "docker" else None
    return SandboxChoice(kind, base), user


@contextmanager
def stand_at(place: tuple[SandboxChoice, int | None]) -> Generator[Stand]:
    choice, user = place
    # Its mode, 0700, keeps everybody else out, and the user that root's worker runs as.
    with tempfile.TemporaryDirectory() as name:
        stand = Stand(choice, user, Path(name))
        stand.source.write_bytes(bytes(range(256)) * (PAGE // 256))
        probe = stand.folder / "probe.py"
        shutil.copy(Path(__file__).with_name("probe.py"), probe)
        # Everybody may write to it: only the walls keep the worker from doing so.
        probe.chmod(0o666)
        stand.output.mkdir()
        for made in OUTPUTS:
            (stand.output / made).touch(0o600)
        if user is not None:
            for path in (stand.folder, stand.source, stand.output, *stand.output.iterdir()):
                os.chown(path, user, user)
        yield stand


@pytest.fixture
def stand(place: tuple[SandboxChoice, int | None]) -> Generator[Stand]:
    """A place with a source, and a folder with empty files for the output."""
    with stand_at(place) as stand:
        yield stand


@pytest.fixture
def bubblewrap() -> Generator[Stand]:
    """The one place for attacks that meet the same wall everywhere."""
    with stand_at((SandboxChoice(), None)) as stand:
        yield stand


@dataclass(frozen=True, slots=True)
class Findings:
    """What one probe of all the walls reports, and what the host saw of it."""

    kind: SandboxKind
    user: int | None
    early: dict[str, Any]
    late: dict[str, Any]
    paths: list[str]
    connections: int
    source: bytes
    output: dict[str, os.stat_result]


@contextmanager
def shared_memory() -> Generator[int]:
    """The key of a System V shared memory segment that everybody may use (shmget(2))."""
    libc = ctypes.CDLL(None)
    key = os.getpid()
    segment = libc.shmget(key, PAGE, 0o1000 | 0o2000 | 0o666)
    assert segment != -1
    try:
        yield key
    finally:
        libc.shmctl(segment, 0, None)


@pytest.fixture(scope="session")
def findings(place: tuple[SandboxChoice, int | None]) -> Generator[Findings]:
    """Probe the walls of a place once."""
    token = f"token-{os.getpid()}"
    waiting = [sys.executable, "-I", "-c", "import sys; sys.stdin.read()", f"{token}-bystander"]
    with (
        stand_at(place) as stand,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as abstract,
        shared_memory() as key,
        subprocess.Popen(waiting, stdin=subprocess.PIPE) as bystander,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SECRET", token)
        abstract.bind(f"\0{token}")
        abstract.listen()
        secret = stand.folder / "secret"
        secret.write_text(token)
        paths = [
            *(str(secret), str(stand.source), __file__, pytest.__file__),
            *("/etc/passwd", "/etc/shadow", "/usr/bin/env", "/bin/sh", "/sys/kernel"),
        ]
        port = str(tcp.getsockname()[1])
        result = stand.attack("walls", port, str(key), token, *paths)
        assert (result.exit_status, result.ended_by) == (0, None), result.stderr
        bystander.communicate()
        found = json.loads(result.stdout)
        yield Findings(
            kind=stand.choice.kind,
            user=stand.user,
            early=found["early"],
            late=found["late"],
            paths=paths,
            connections=len(select.select([tcp, abstract], [], [], 0)[0]),
            source=stand.source.read_bytes(),
            output={path.name: path.lstat() for path in stand.output.iterdir()},
        )


def test_it_reaches_no_network(findings: Findings) -> None:
    assert findings.early["loopback"] != "done"
    assert findings.early["abstract socket"] != "done"
    assert findings.connections == 0
    assert findings.early["interfaces"] == ["lo"]
    assert findings.early["host name"] == "sandbox"


def test_it_sees_no_other_files(findings: Findings) -> None:
    seen = {path for path, outcome in findings.early["paths"].items() if outcome == "done"}
    assert set(findings.early["paths"]) == set(findings.paths)
    if findings.kind == "docker":
        assert seen <= {"/sys/kernel"}
    else:
        assert seen == set()
        python = Path(sys.executable).resolve().parts[1]
        assert set(findings.early["root"]) <= {python, "usr", "lib", "lib64", "packages", "out"}


def test_it_sees_no_other_processes(findings: Findings) -> None:
    assert findings.early["token seen"] is False
    assert findings.early["shared memory"] == "ENOENT"


def test_it_writes_only_to_its_output(findings: Findings) -> None:
    assert findings.early["created in"] == (["/tmp"] if findings.kind == "docker" else [])
    assert findings.early["writable files"] == []


def test_it_has_an_unprivileged_user(findings: Findings) -> None:
    root = findings.user is None and os.geteuid() == 0
    user = NOBODY if findings.kind == "bubblewrap" or root else findings.user or os.geteuid()
    assert set(findings.early["user"]) == {user}
    assert set(findings.early["groups"]) <= {user}
    assert findings.early["set user"] in ("EPERM", "EINVAL")


def test_it_has_no_privileges_and_gets_none(findings: Findings) -> None:
    assert findings.early["no new privileges"] == 1
    assert findings.early["capabilities"] == [0] * 6
    assert findings.early["bounding set"] == []
    assert findings.early["mount"] == "EPERM"
    assert findings.early["user namespace"] in ("EPERM", "ENOSPC")


def test_it_inherits_nothing(findings: Findings) -> None:
    assert "SECRET" not in findings.early["environment"]
    assert findings.late["environment"] == {}
    assert findings.late["descriptors"] == sorted([0, 1, 2, findings.late["source"]])


def test_it_is_limited(findings: Findings) -> None:
    assert findings.early["limits"] == {
        "AS": [LIMITS.memory_bytes] * 2,
        "FSIZE": [LIMITS.file_bytes] * 2,
        "CORE": [0, 0],
        "NOFILE": [64, 64],
        "CPU": [60, 65],
    }


def test_it_can_not_change_the_source(findings: Findings) -> None:
    assert findings.late["write to the source"] == "EBADF"
    assert findings.late["truncate the source"] == "EINVAL"
    assert findings.late["refused"]["mode of the source"] == "EPERM"
    assert findings.source == bytes(range(256)) * (PAGE // 256)


def test_the_filter_refuses_what_no_reader_needs(findings: Findings) -> None:
    assert set(findings.late["refused"].values()) == {"EPERM"}, findings.late["refused"]


def test_the_filter_lets_a_reader_work(findings: Findings) -> None:
    assert set(findings.late["allowed"].values()) == {"done"}, findings.late["allowed"]


def test_its_output_belongs_to_the_caller(findings: Findings) -> None:
    owner = os.geteuid() if findings.user is None else findings.user
    assert set(findings.output) == OUTPUTS
    for state in findings.output.values():
        assert stat.S_ISREG(state.st_mode)
        assert state.st_mode & (stat.S_ISUID | stat.S_ISGID) == 0
        assert (state.st_uid, state.st_gid) == (owner, owner)


@pytest.mark.parametrize("attack", ["exec", "fork in a thread"])
def test_the_filter_ends_an_attack(stand: Stand, attack: str) -> None:
    result = stand.attack(attack)
    assert (result.ended_by, result.exit_status) == ("forbidden system call", 128 + signal.SIGSYS)
    with pytest.raises(SandboxError, match="system call that no reader needs"):
        result.raise_for_end()


OTHER_ATTACKS = (
    *("fork", "socket", "socket pair", "ptrace", "read a process"),
    *("unshare", "join a namespace", "mount", "change root"),
)


@pytest.mark.parametrize("attack", OTHER_ATTACKS)
def test_the_filter_ends_every_attack(bubblewrap: Stand, attack: str) -> None:
    assert bubblewrap.attack(attack).ended_by == "forbidden system call"


def test_a_fork_bomb_is_contained(stand: Stand) -> None:
    result = stand.attack("multiply")
    children, stopped_by = json.loads(result.stdout)["early"]
    assert stopped_by == "EAGAIN"
    assert 0 < children < LIMITS.processes


def test_memory_is_limited(stand: Stand) -> None:
    result = stand.attack("allocate", str(LIMITS.memory_bytes))
    assert result.ended_by == "memory"
    assert "Traceback" not in result.stderr
    with pytest.raises(SandboxError, match="more than 536870912 bytes of memory"):
        result.raise_for_end(where="model.ckpt")


@pytest.mark.parametrize("attack", ["allocate an array", "map shared memory"])
def test_all_memory_is_limited(bubblewrap: Stand, attack: str) -> None:
    result = bubblewrap.attack(attack, str(LIMITS.memory_bytes))
    assert result.ended_by == "memory"


def test_memory_within_the_limit_is_there(stand: Stand) -> None:
    assert stand.attack("allocate", str(LIMITS.memory_bytes // 4)).exit_status == 0


@pytest.mark.parametrize("attack", ["write much", "grow a file"])
def test_the_size_of_a_file_is_limited(stand: Stand, attack: str) -> None:
    result = stand.attack(attack, str(LIMITS.file_bytes + (1 << 20)))
    assert result.ended_by == "file size"
    assert (stand.output / "much").stat().st_size <= LIMITS.file_bytes


def test_a_file_within_the_limit_is_written(stand: Stand) -> None:
    result = stand.attack("write much", str(LIMITS.file_bytes))
    assert (result.exit_status, result.ended_by) == (0, None)
    assert (stand.output / "much").stat().st_size == LIMITS.file_bytes


@contextmanager
def endless_source(stand: Stand) -> Generator[tuple[int, int]]:
    """Replace the source by a pipe; its writing end shows whether anybody still reads."""
    stand.source.unlink()
    os.mkfifo(stand.source)
    stand.source.chmod(0o644)
    if stand.user is not None:
        os.chown(stand.source, stand.user, stand.user)
    reader = os.open(stand.source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    writer = os.open(stand.source, os.O_WRONLY | os.O_CLOEXEC)
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PAGE)
    try:
        yield reader, writer
    finally:
        os.close(writer)


def all_readers_gone(writer: int, milliseconds: int) -> bool:
    poll = select.poll()
    poll.register(writer, 0)
    return bool(poll.poll(milliseconds))


def test_a_worker_that_hides_is_found(bubblewrap: Stand) -> None:
    with endless_source(bubblewrap) as (reader, writer):
        result = bubblewrap.attack("wait in silence", limits=replace(LIMITS, seconds=2.0))
        os.close(reader)
        assert result.ended_by == "time"
        assert all_readers_gone(writer, 0)


@pytest.mark.parametrize("attack", ["spin", "leave child"])
def test_time_is_limited_and_nothing_outlives_it(stand: Stand, attack: str) -> None:
    with endless_source(stand) as (reader, writer):
        result = stand.attack(attack, limits=replace(LIMITS, seconds=2.0))
        os.close(reader)
        assert result.ended_by == "time"
        assert result.seconds >= 2.0
        assert all_readers_gone(writer, 0)
    with pytest.raises(SandboxError, match="longer than 2 seconds"):
        result.raise_for_end()


def test_it_ends_with_its_caller(stand: Stand) -> None:
    with endless_source(stand) as (reader, writer):
        caller = begin_to_drain(stand, reader, writer)
        caller.kill()
        caller.join()
        assert all_readers_gone(writer, 60_000)


def test_it_ends_when_its_caller_is_interrupted(stand: Stand) -> None:
    with endless_source(stand) as (reader, writer):
        caller = begin_to_drain(stand, reader, writer)
        assert caller.pid is not None
        os.kill(caller.pid, signal.SIGINT)
        caller.join()
        assert all_readers_gone(writer, 0)


def begin_to_drain(stand: Stand, reader: int, writer: int) -> BaseProcess:
    """Start a caller whose worker waits for more of its endless source."""
    os.write(writer, bytes(PAGE))
    caller = stand.begin("drain")
    # The pipe is full until the worker, locked down, reads the first page.
    _, writable, _ = select.select([caller.sentinel], [writer], [])
    assert writable, "the caller ended before its worker read"
    select.select([caller.sentinel], [writer], [])
    assert caller.is_alive()
    os.close(reader)
    assert not all_readers_gone(writer, 0)
    return caller


def test_a_chatty_worker_is_heard_to_the_end_but_not_kept(stand: Stand) -> None:
    result = stand.attack("talk", "20000")
    assert result.exit_status == 0
    undecodable = "\ufffd" if stand.choice.kind == "docker" else "\\xff"
    assert result.stdout.endswith(f"19999\n{undecodable}\x1b[31mend")
    assert len(result.stdout) <= (64 << 10) + len(undecodable)


@pytest.mark.parametrize("status", [0, 7])
def test_its_status_is_reported(stand: Stand, status: int) -> None:
    result = stand.attack("return", str(status))
    assert (result.exit_status, result.ended_by, result.stderr) == (status, None, "")
    assert result.sandbox.startswith(stand.choice.kind)
    result.raise_for_end()


def test_an_unexpected_failure_shows_its_traceback(stand: Stand) -> None:
    result = stand.attack("fail")
    assert (result.exit_status, result.ended_by) == (1, None)
    assert "ZeroDivisionError" in result.stderr


def test_a_worker_that_does_not_import_is_no_result(stand: Stand) -> None:
    with pytest.raises(SandboxError, match="No module named 'no_such_module'"):
        stand.attack("fail to import")


WITHOUT_MOUNT = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", "--")
CHECK = """
from sam3d_gguf.extractors.sandbox.job import SandboxChoice
from sam3d_gguf.extractors.sandbox.run import check_sandbox
print(check_sandbox(SandboxChoice()))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up root's rights")
def test_root_that_may_not_mount_has_a_sandbox(tmp_path: Path) -> None:
    # So is root in a container that may make user namespaces.
    said = tmp_path / "said"

    def body() -> None:
        open_to_all()
        with said.open("w") as file:
            command = [*WITHOUT_MOUNT, sys.executable, "-c", CHECK]
            subprocess.run(command, stdout=file, stderr=file, check=False)

    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    process.join()
    assert said.read_text().startswith("bubblewrap ")


def test_the_source_must_be_read_only(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.touch()
    with source.open("r+b") as file, pytest.raises(SandboxError, match="for reading only"):
        run_worker(WorkerJob(file.fileno(), source, tmp_path), SandboxChoice())
