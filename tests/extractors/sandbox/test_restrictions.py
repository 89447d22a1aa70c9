"""A sandbox that can't be had says which setting is in the way, and the cure."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from sam3d_gguf.extractors.sandbox.job import SandboxChoice
from sam3d_gguf.extractors.sandbox.restrictions import explain
from sam3d_gguf.extractors.sandbox.run import check_sandbox
from sam3d_gguf.schemas.errors import SandboxError

# What bubblewrap 0.8 to 0.11 say where the kernel refuses a namespace.
REFUSALS = (
    "bwrap: No permissions to create new namespace, likely because the kernel does not allow it",
    "bwrap: Creating new namespace failed: Operation not permitted",
    "bwrap: setting up uid map: Permission denied",
    "bwrap: loopback: Failed RTM_NEWADDR: Operation not permitted",
)


def write(root: Path, name: str, value: str = "") -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(value)


@pytest.mark.parametrize("said", REFUSALS)
@pytest.mark.parametrize(
    ("setting", "value", "cure"),
    [
        ("proc/sys/kernel/unprivileged_userns_clone", "0\n", "sysctl kernel.unprivileged"),
        ("proc/sys/user/max_user_namespaces", "0\n", "sysctl user.max_user_namespaces"),
        ("proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1\n", "AppArmor profile"),
    ],
)
def test_a_setting_is_named_with_its_cure(
    tmp_path: Path, said: str, setting: str, value: str, cure: str
) -> None:
    write(tmp_path, setting, value)
    error = explain(said, tmp_path)
    assert error.where == f"/{setting}"
    assert cure in error.action
    assert "docs/sandbox.md" in error.action
    assert said in error.what


def test_settings_that_allow_are_not_blamed(tmp_path: Path) -> None:
    write(tmp_path, "proc/sys/kernel/unprivileged_userns_clone", "1\n")
    write(tmp_path, "proc/sys/user/max_user_namespaces", "95000\n")
    write(tmp_path, "proc/sys/kernel/apparmor_restrict_unprivileged_userns", "0\n")
    assert explain(REFUSALS[1], tmp_path).where == ""


def test_a_container_is_recognized(tmp_path: Path) -> None:
    write(tmp_path, ".dockerenv")
    assert "--security-opt seccomp=unconfined" in explain(REFUSALS[1], tmp_path).action


def test_an_old_bubblewrap(tmp_path: Path) -> None:
    error = explain("bwrap: Unknown option --disable-userns", tmp_path)
    assert "too old" in error.what
    assert "0.8.0" in error.expected


def test_files_that_the_unprivileged_user_can_not_read(tmp_path: Path) -> None:
    error = explain("bwrap: execvp /opt/python/bin/python3: Permission denied", tmp_path)
    assert "chmod -R a+rX" in error.action


def test_anything_else_is_passed_on(tmp_path: Path) -> None:
    assert "bwrap: odd" in explain("first line\nbwrap: odd\n", tmp_path).what
    assert "no message" in explain("", tmp_path).what


def test_no_bubblewrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"not installed.*apt-get install bubblewrap"):
        check_sandbox(SandboxChoice())


# The limit of a user namespace binds those below it, so this machine's own stays as it is.
REFUSING_BWRAP = """#!/bin/sh
exec unshare --user --map-current-user --keep-caps sh -c '
    echo 0 > /proc/sys/user/max_user_namespaces
    exec setpriv --ambient-caps=-all --inh-caps=-all bwrap "$@"' sh "$@"
"""


def test_a_real_refusal_is_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not in /tmp, which root's launcher covers.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        write(folder, "bwrap", REFUSING_BWRAP)
        (folder / "bwrap").chmod(0o755)
        monkeypatch.setenv("PATH", name, prepend=":")
        with pytest.raises(SandboxError, match=r"make.* namespaces.*bwrap: ") as caught:
            check_sandbox(SandboxChoice())
    assert "docs/sandbox.md" in caught.value.action
