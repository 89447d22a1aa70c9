"""A worker that has been taken over: it reads the file as the real one does, then lies about it.

The last argument names the lie. In the sandbox, files are removed and links, pipes and folders made at
import, before the system call filter stands, which a real worker could no longer do.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sam3d_gguf.extractors import worker

BACKBONE = "backbone.safetensors"
OTHER = "other.safetensors"
REPORT = "report.json"
ERROR = "error.json"
Report = dict[str, Any]
Lie = Callable[[Path], None]


def tensor(report: Report, name: str) -> dict[str, Any]:
    """The report's entry of a tensor."""
    (entry,) = [entry for entry in report["tensors"] if entry["name"] == name]
    found: dict[str, Any] = entry
    return found


def swap_places(report: Report) -> None:
    """Say that the bytes of two tensors of one shape are each other's."""
    first = tensor(report, "head_pose.proj.layers.0.0.bias")
    second = tensor(report, "head_camera.proj.layers.0.0.bias")
    for key in ("storage", "storage_offset"):
        first[key], second[key] = second[key], first[key]


def swap_bytes(data: bytes) -> bytes:
    """Swap the same two tensors in the product file."""
    changed = bytearray(data)
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    (a, b), (c, d) = (
        [start + end for end in header[f"{head}.proj.layers.0.0.bias"]["data_offsets"]]
        for head in ("head_pose", "head_camera")
    )
    changed[a:b], changed[c:d] = data[c:d], data[a:b]
    return bytes(changed)


def change_report(change: Callable[[Report], object]) -> Lie:
    """A lie that is a change of the report."""

    def lie(folder: Path) -> None:
        report = json.loads((folder / REPORT).read_bytes())
        change(report)
        worker.overwrite(folder / REPORT, json.dumps(report).encode())

    return lie


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Lie:
    """A lie that is a change of a file."""

    def lie(folder: Path) -> None:
        path = folder / name
        worker.overwrite(path, change(path.read_bytes()))

    return lie


def patch(name: str, at: int) -> Lie:
    """A lie that flips a bit of a product."""

    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[at] ^= 1
        return bytes(changed)

    return rewrite(name, change)


def spaced(data: bytes) -> bytes:
    """The same tensors behind a header with eight spaces more."""
    length = int.from_bytes(data[:8], "little")
    return (length + 8).to_bytes(8, "little") + data[8:].replace(b"},", b"}," + b" " * 8, 1)


def both(*lies: Lie) -> Lie:
    """Several lies at once."""

    def lie(folder: Path) -> None:
        for one in lies:
            one(folder)

    return lie


def add_file(name: str, data: bytes = b"{}") -> Lie:
    """Leave a file that nobody asked for, where nothing keeps the worker from making it."""

    def lie(folder: Path) -> None:
        (folder / name).write_bytes(data)

    return lie


def nothing(_: Path) -> None:
    """No lie, or one that was told before."""


def fail(_: Path) -> None:
    """End without an answer."""
    sys.exit("\x1b[31mthe reader\x1b[0m gave up")


def add_tensor(report: Report, **changes: Any) -> None:
    report["tensors"].append({**report["tensors"][0], "name": "added", **changes})


def empty_storage(report: Report, **changes: Any) -> None:
    """Point a tensor without elements into a storage of the report's own."""
    report["storages"].append({**report["storages"][0], **changes})
    last = len(report["storages"]) - 1
    add_tensor(report, shape=[0], strides=[1], storage=last, storage_offset=0)


def claim_legacy(report: Report) -> None:
    """Say that the file has no directory to hold storages against, and put one anywhere."""
    report["kind"] = "TORCH_LEGACY"
    for storage in report["storages"]:
        storage["member"] = ""


FORGED = json.dumps(
    {
        "what": "\x1b[2J[red]is fine[/]\nerror: another line",
        "where": "/etc/passwd",
        "expected": "",
        "action": "Run \x1b]52;c;Y3VybA==\x07 as root",
    }
).encode()
LIES: dict[str, Lie] = {
    "honest": nothing,
    "swapped places": change_report(swap_places),
    "swapped bytes": rewrite(OTHER, swap_bytes),
    "swapped both": both(change_report(swap_places), rewrite(OTHER, swap_bytes)),
    "flipped bit in the data": patch(OTHER, -1),
    "flipped bit in the first file": patch(BACKBONE, -1),
    "flipped bit in the header": patch(OTHER, 20),
    "longer file": rewrite(OTHER, lambda data: data + b"\0"),
    "shorter file": rewrite(OTHER, lambda data: data[:-1]),
    "empty file": rewrite(OTHER, lambda _: b""),
    "much longer file": rewrite(OTHER, lambda data: data + bytes(40 << 20)),
    "spaces in the header": rewrite(OTHER, spaced),
    "tensor left out": change_report(lambda report: report["tensors"].pop()),
    "tensor twice": change_report(
        lambda report: report["tensors"].append(dict(report["tensors"][0]))
    ),
    "tensor renamed": change_report(
        lambda report: tensor(report, "init_pose.weight").update(name="init_pose.weight2")
    ),
    "tensor reshaped": change_report(
        lambda report: tensor(report, "init_pose.weight").update(shape=[519, 1], strides=[1, 1])
    ),
    "tensor retyped": change_report(
        lambda report: tensor(report, "init_pose.weight").update(dtype="I32")
    ),
    "offset outside": change_report(
        lambda report: tensor(report, "init_pose.weight").update(storage_offset=1 << 39)
    ),
    "offset by one": change_report(
        lambda report: tensor(report, "init_pose.weight").update(storage_offset=1)
    ),
    "strides outside": change_report(
        lambda report: tensor(report, "init_pose.weight").update(strides=[1, 1 << 39])
    ),
    "strides too few": change_report(
        lambda report: tensor(report, "init_pose.weight").update(strides=[1])
    ),
    "storage unknown": change_report(
        lambda report: tensor(report, "init_pose.weight").update(storage=1 << 39)
    ),
    "storage elsewhere": change_report(lambda report: report["storages"][0].update(file_offset=64)),
    "storage longer": change_report(
        lambda report: report["storages"][0].update(bytes=report["storages"][0]["bytes"] + 1)
    ),
    "storage without member": change_report(lambda report: report["storages"][0].update(member="")),
    "storage in a pickle": change_report(
        lambda report: report["storages"][0].update(member="data.pkl")
    ),
    "another kind": change_report(claim_legacy),
    "an archive of scripts": change_report(lambda report: report.update(kind="TORCHSCRIPT")),
    "huge empty tensor": change_report(
        lambda report: add_tensor(report, shape=[1 << 40] * 8, strides=[0] * 8, storage_offset=0)
    ),
    "empty tensor in a storage beyond the file": change_report(
        lambda report: empty_storage(report, member="", file_offset=1 << 40)
    ),
    "negative offset": change_report(
        lambda report: tensor(report, "init_pose.weight").update(storage_offset=-1)
    ),
    "unknown field": change_report(lambda report: report.update(trusted=True)),
    "field missing": change_report(lambda report: report.pop("code")),
    "number as text": change_report(
        lambda report: tensor(report, "init_pose.weight").update(storage="1")
    ),
    "unknown dtype": change_report(
        lambda report: tensor(report, "init_pose.weight").update(dtype="F8_E4M3")
    ),
    "report of 65 MiB": rewrite(REPORT, lambda data: data + b" " * (65 << 20)),
    "report with a key twice": rewrite(
        REPORT, lambda data: data.replace(b'"wrapper"', b'"kind": "TORCH_ZIP", "wrapper"', 1)
    ),
    "report with NaN": rewrite(
        REPORT, lambda data: data.replace(b'"schema_version": 1', b'"schema_version": NaN', 1)
    ),
    "report cut short": rewrite(REPORT, lambda data: data[:1000]),
    "report that is no UTF-8": rewrite(REPORT, lambda data: b"\xff" + data),
    "deep report": rewrite(REPORT, lambda _: b"[" * 100_000),
    "report is a link": nothing,
    "product is a link": nothing,
    "product is a pipe": nothing,
    "product is a folder": nothing,
    "no product": nothing,
    "more files": both(add_file("extraction.json"), add_file("manifest.json"), add_file("\n")),
    "refusal without a reason": nothing,
    "refusal with a forged reason": rewrite(ERROR, lambda _: FORGED),
    "refusal with a huge reason": rewrite(
        ERROR, lambda _: json.dumps({"what": "x" * (20 << 20)}).encode()
    ),
    "refusal that is no document": rewrite(ERROR, lambda _: b"[]"),
    "failure": fail,
}


PREPARED = {"no product", "product is a link", "product is a pipe", "product is a folder"}


def prepare(lie: str, folder: Path) -> None:
    """Put something else in the place of a file of the worker's."""
    if lie in PREPARED:
        (folder / OTHER).unlink()
    match lie:
        case "report is a link":
            (folder / REPORT).rename(folder / "elsewhere.json")
            (folder / REPORT).symlink_to("elsewhere.json")
        case "product is a link":
            (folder / OTHER).symlink_to(BACKBONE)
        case "product is a pipe":
            os.mkfifo(folder / OTHER)
        case "product is a folder":
            (folder / OTHER / "deep" / "deeper").mkdir(parents=True)
            (folder / OTHER / "deep").chmod(0)
        case _:
            pass


def tell(lie: str, source_fd: int, folder: Path, task: list[str]) -> int:
    """Do the task, then lie about it."""
    status = worker.main(source_fd, str(folder), ["inspect"] if lie in PREPARED else task)
    LIES[lie](folder)
    return worker.REFUSED if lie.startswith("refusal") else status


def main(source_fd: int, output: str, arguments: list[str]) -> int:
    """The worker's entry point, see `extractors.sandbox`."""
    *task, lie = arguments
    return tell(lie, source_fd, Path(output), task)


if __name__ == "liar" and Path("/out").is_dir():
    prepare(json.loads(sys.argv[1])["arguments"][-1], Path("/out"))
