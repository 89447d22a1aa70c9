"""A Docker daemon of the tests' own, with one image: this machine's Python and NumPy."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tarfile
import tempfile
from collections.abc import Generator
from pathlib import Path

import docker
import pytest

from sam3d_gguf.extractors.sandbox.interpreter import Interpreter, running_interpreter
from sam3d_gguf.extractors.sandbox.job import Package

IMAGE = "sandbox-base"
START_SECONDS = 120.0


@pytest.fixture(scope="session")
def docker_image() -> Generator[str]:
    """The name of an image; DOCKER_HOST leads to the daemon that has it."""
    if os.geteuid() != 0:
        pytest.skip("a Docker daemon needs root")
    if shutil.which("dockerd") is None:
        pytest.skip("dockerd is not installed: apt-get install docker.io")
    with (
        tempfile.TemporaryDirectory(prefix="docker-") as folder,
        daemon(Path(folder)) as host,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("DOCKER_HOST", host)
        import_python(IMAGE, running_interpreter().numpy)
        yield IMAGE


@pytest.fixture(scope="session")
def image_without_numpy(docker_image: str) -> str:
    """The name of an image that only has Python."""
    name = f"{docker_image}-bare"
    import_python(name, ())
    return name


@contextlib.contextmanager
def daemon(folder: Path) -> Generator[str]:
    """A daemon without networks that keeps all it has in `folder`; its address."""
    # Daemons wait with the signal that systemd asked for; it says when the socket answers.
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices,
        (folder / "log").open("wb") as log,
    ):
        notices.bind(str(folder / "notify"))
        notices.settimeout(START_SECONDS)
        host = f"unix://{folder}/docker.sock"
        options = [
            *("--iptables=false", "--ip6tables=false", "--bridge=none", f"--host={host}"),
            *(f"--data-root={folder}/data", f"--exec-root={folder}/exec"),
            f"--pidfile={folder}/pid",
        ]
        environment = os.environ | {"NOTIFY_SOCKET": str(folder / "notify")}
        process = subprocess.Popen(["dockerd", *options], env=environment, stdout=log, stderr=log)
        try:
            while b"READY=1" not in notices.recv(4096):
                pass
            (folder / "docker.sock").chmod(0o666)
            folder.chmod(0o755)
            yield host
        except TimeoutError:
            pytest.fail((folder / "log").read_text())
        finally:
            process.terminate()
            process.wait()


def import_python(name: str, packages: tuple[Package, ...]) -> None:
    """Make an image of the interpreter that runs the tests."""
    python = running_interpreter()
    with tempfile.NamedTemporaryFile(suffix=".tar") as file:
        with tarfile.open(fileobj=file, mode="w") as tar:
            tar.add(python.stdlib, str(python.stdlib), filter=without_extras)
            for path in (python.executable, *python.libraries):
                tar.add(path.resolve(), str(path))
            for package in packages:
                tar.add(
                    package.path,
                    f"{place_of_packages(python)}/{package.name}",
                    filter=without_extras,
                )
            link = tarfile.TarInfo("usr/bin/python3")
            link.type, link.linkname = tarfile.SYMTYPE, str(python.executable)
            tar.addfile(link)
            # Everybody may write to it: only a read-only root keeps the worker from doing so.
            folder = tarfile.TarInfo("writable")
            folder.type, folder.mode = tarfile.DIRTYPE, 0o777
            tar.addfile(folder)
        file.flush()
        docker.from_env().api.import_image_from_file(  # pyright: ignore[reportUnknownMemberType]
            file.name, repository=name, tag="latest"
        )


def place_of_packages(python: Interpreter) -> str:
    """Where the interpreter looks for packages; Debian's has names of its own."""
    code = "import site; print(site.getsitepackages()[0])"
    command = [str(python.executable), "-I", "-c", code]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


EXTRAS = {"__pycache__", "test", "tests", "idlelib", "lib2to3", "ensurepip"} | {
    "site-packages",
    "dist-packages",
}


def without_extras(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out what takes room and is not used: tests, byte code, static libraries."""
    path = Path(member.name)
    unused = path.name in EXTRAS or path.name.startswith("config-") or path.suffix == ".a"
    return None if unused else member
