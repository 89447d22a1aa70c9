"""Too little memory and too few threads are errors, where libggml would end the process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from facts import TINY

from sam3d_gguf.runtime.ggml import host_memory
from sam3d_gguf.runtime.ggml.errors import BackendError
from sam3d_gguf.runtime.ggml.host_memory import (
    available_memory,
    require_memory,
    require_threads,
)
from sam3d_gguf.runtime.ggml.library import BLAS_MODULE, load_library

# Each run in a fork that may allocate so many MiB more than what is loaded.
_RUNS = """
import json, os, resource, sys, tempfile
from pathlib import Path
from typer.testing import CliRunner
from sam3d_gguf.cli.run import app
from sam3d_gguf.runtime.ggml.library import load_library
CliRunner().invoke(app, ["body", "--threads", "x"])  # what is imported at the first use
extras, arguments = json.loads(sys.argv[1]), json.loads(sys.argv[2])
for extra in extras:
    with tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                os.dup2(err.fileno(), 2)
                size = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
                resource.setrlimit(resource.RLIMIT_AS, (size + (extra << 20),) * 2)
                app([*arguments, "--out", f"{sys.argv[3]}/{extra}"], prog_name="sam3d-run")
            except SystemExit as end:
                code = int(end.code or 0)
            finally:
                sys.stdout.flush()
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        err.seek(0)
        code = os.waitstatus_to_exitcode(status)
        print("#", json.dumps([code, err.read().decode(errors="replace")]))
"""


def run(
    extras: list[int], threads: int, models: tuple[Path, Path], out: Path
) -> list[tuple[int, str]]:
    arguments = ["body", "--model", str(models[0]), "--mhr", str(models[1])]
    arguments += ["--threads", str(threads), "--image", str(TINY / "input.png")]
    arguments += ["--bbox", "52,8.5,141.25,139"]
    done = subprocess.run(
        [sys.executable, "-c", _RUNS, json.dumps(extras), json.dumps(arguments), str(out)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    lines = [line[1:] for line in done.stdout.splitlines() if line.startswith("#")]
    return [(code, err) for code, err in map(json.loads, lines)]


def test_little_memory_ends_in_a_sentence(model_files: tuple[Path, Path], tmp_path: Path) -> None:
    # With OpenBLAS installed the limit is higher, by its buffers.
    found = run([*range(20, 160, 10), *range(160, 480, 40), 4000], 1, model_files, tmp_path)
    assert found[-1] == (0, "")
    refused = [err for code, err in found if code]
    assert len(refused) >= 6
    for err in refused:
        assert (err.count("\n"), "memory" in err) == (1, True), err
    if not (load_library().directory / BLAS_MODULE).exists():
        assert not any("BLAS" in err for err in refused)
    assert {code for code, _ in found} == {0, 2}
    assert len(list(tmp_path.iterdir())) == len(found) - len(refused)


def test_few_threads_end_in_a_sentence(model_files: tuple[Path, Path], tmp_path: Path) -> None:
    ((code, err),) = run([900], 512, model_files, tmp_path)
    assert code == 2, err
    assert "512 threads can't be started here" in err
    assert list(tmp_path.iterdir()) == []


def test_threads_and_memory_that_there_are() -> None:
    require_threads(3)
    require_memory(1 << 20, "a test")
    with pytest.raises(BackendError, match="no memory for a test, 1073741824 MiB"):
        require_memory(1 << 50, "a test")


@pytest.fixture(name="groups")
def _groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /sys/fs/cgroup, for a process whose control groups a test writes."""
    process = tmp_path / "self"
    process.mkdir()
    (process / "statm").write_text("1 1 1 1 1 1 1")
    monkeypatch.setattr(host_memory, "_CONTROL_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(host_memory, "_PROCESS", process)
    return tmp_path / "groups"


def version_2(folder: Path, limit: str, used: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(limit)
    (folder / "memory.current").write_text(used)
    (folder / "memory.stat").write_text("anon 7\nactive_file 20\ninactive_file 300\n")


def version_1(folder: Path, limit: int, used: int, around: int) -> None:
    """Files as Linux has them (Documentation/admin-guide/cgroup-v1/memory.rst)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(
        f"cache 1\nactive_file 1\ninactive_file 2\nhierarchical_memory_limit {around}\n"
        "total_cache 320\ntotal_active_file 20\ntotal_inactive_file 300\n"
    )


UNLIMITED_1 = 0x7FFF_FFFF_FFFF_F000


def test_control_groups_bound_the_memory(groups: Path) -> None:
    outer, inner = groups / "outer", groups / "outer/inner"
    (groups.parent / "self/cgroup").write_text("0::/outer/inner\n")
    unlimited = available_memory()
    version_2(outer, "9000000", "8000000")
    version_2(inner, "max", "8000000")
    assert unlimited > 1_000_320
    assert available_memory() == 1_000_320
    (inner / "memory.max").write_text("8000100")
    assert available_memory() == 420
    (inner / "memory.max").write_text("7000000")
    assert available_memory() == 0


@pytest.mark.parametrize(
    "line", ["9:memory:/outer/inner", "9:hugetlb,memory:/outer/inner", "9:memory:/"]
)
def test_control_groups_of_version_1_bound_the_memory(groups: Path, line: str) -> None:
    root = groups / "memory"
    inner, outer = root / "outer/inner", root / "outer"
    if line.endswith(":/"):  # in a namespace of its own
        inner, outer = root, groups.parent / "unseen"
    (groups.parent / "self/cgroup").write_text(
        f"12:cpu,cpuacct:/x\n{line}\n1:name=systemd:/y\n0::/\n"
    )
    version_1(outer, UNLIMITED_1, 8_000_000, UNLIMITED_1)
    version_1(inner, UNLIMITED_1, 8_000_000, UNLIMITED_1)
    assert available_memory() > 1_000_320
    version_1(inner, 9_000_000, 8_000_000, 9_000_000)
    assert available_memory() == 1_000_320
    version_1(inner, UNLIMITED_1, 8_000_000, 8_000_100)
    assert available_memory() == 420
    version_1(outer, 8_500_000, 8_499_700, 8_500_000)
    assert available_memory() == 420
    version_1(inner, 7_000_000, 8_000_000, 7_000_000)
    assert available_memory() == 0


def test_a_container_sees_its_own_group_at_the_root(groups: Path) -> None:
    (groups.parent / "self/cgroup").write_text("9:memory:/docker/0a1b\n")
    version_1(groups / "memory", 9_000_000, 8_000_000, 9_000_000)
    assert available_memory() == 1_000_320


def test_a_group_around_bounds_too_in_version_1(groups: Path) -> None:
    (groups.parent / "self/cgroup").write_text("9:memory:/outer/inner\n")
    version_1(groups / "memory/outer", 9_000_000, 8_999_900, 9_000_000)
    version_1(groups / "memory/outer/inner", UNLIMITED_1, 5_000_000, 9_000_000)
    assert available_memory() == 420
