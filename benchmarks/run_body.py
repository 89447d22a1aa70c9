"""Image to mesh at the full official shape on CPU, against the original in PyTorch.

    .venv/bin/python -m benchmarks.run_body --original SAM_3D_BODY --dinov3 DINOV3 --python PYTHON
        [--libraries DIR] [--quick]

SAM_3D_BODY and DINOV3 are checkouts of the original's repositories, PYTHON an interpreter that has
what the original needs (benchmarks/original.txt). The full-shape files with random weights are
those of `just bench`; both sides load the same ones. The variants of the original are run first,
each held against the product's result; the fastest that agrees then takes turns with the product.
The figures go to benchmarks/results-run.json.

A round counts only if other processes took less than `QUIET_CORES` of the machine meanwhile; it is
repeated otherwise, and the run fails if the machine does not become quiet.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from benchmarks.bench import COMMANDS, ROOT, Command, inputs
from benchmarks.measure import machine

RESULTS = ROOT / "benchmarks" / "results-run.json"

# The workload and the bands; fixed before anything was tuned.
THREADS = 2
ROUNDS = {"body": 7, "full": 3, "mhr": 25, "product": 25}
VARIANT_ROUNDS = 2
QUIET_CORES = 0.15
ATTEMPTS = 3
NOISE_BAND = 0.05
"""A ratio of medians is told apart from 1 only outside of 1 -+ this."""
MAX_RATIO = 1.0
MAX_DECODE_RATIO = 1.3
MEMORY_ABOVE_WEIGHTS = 3 << 29
AGREEMENT = 1e-3
"""Largest difference of any field, relative to the field's largest magnitude."""

VARIANTS: dict[str, tuple[str, ...]] = {
    "eager": ("--attention", "eager"),
    "SDPA": (),
    "SDPA-compiled": ("--compile",),
}


@dataclass(slots=True)
class Series:
    """The counted rounds of one task in one program."""

    seconds: list[float] = field(default_factory=list[float])
    cpu_seconds: list[float] = field(default_factory=list[float])
    file_seconds: list[float] = field(default_factory=list[float])
    other_cores: list[float] = field(default_factory=list[float])

    def summary(self) -> dict[str, float]:
        """Median and 95th percentile of the seconds, and the rest's medians."""
        return {
            "rounds": len(self.seconds),
            "median_seconds": round(statistics.median(self.seconds), 4),
            "p95_seconds": round(float(np.percentile(self.seconds, 95)), 4),
            "least_seconds": round(min(self.seconds), 4),
            "request_to_file_median_seconds": round(statistics.median(self.file_seconds), 4),
            "cpu_median_seconds": round(statistics.median(self.cpu_seconds), 4),
            "other_cores_most": round(max(self.other_cores), 3),
        }


class Program:
    """One running program of the benchmark."""

    def __init__(self, name: str, command: Sequence[str | Path], variables: dict[str, str]) -> None:
        self.name = name
        started = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(THREADS), **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.facts: dict[str, Any] = self._answer()
        self.start_seconds = time.perf_counter() - started

    def ask(self, task: str, out: Path | None = None, *, stages: bool = False) -> dict[str, Any]:
        """One request and its answer, with the cores that other processes took meanwhile."""
        if self._process.stdin is None:
            raise RuntimeError(f"{self.name} takes no requests")
        began, busy, own = time.perf_counter(), _busy_seconds(), self._own_seconds()
        document = {"task": task, "out": None if out is None else str(out), "stages": stages}
        print(json.dumps(document), file=self._process.stdin, flush=True)
        answer = self._answer()
        elapsed = time.perf_counter() - began
        others = _busy_seconds() - busy - (self._own_seconds() - own)
        return {**answer, "other_cores": max(others, 0.0) / elapsed}

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RuntimeError(f"{self.name} ended with code {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def _own_seconds(self) -> float:
        """Processor seconds of the program so far."""
        text = Path(f"/proc/{self._process.pid}/stat").read_text()
        user, system = text.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def _busy_seconds() -> float:
    """Processor seconds that all processes, and other guests of the host, took since the boot."""
    user, nice, system, _, _, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def take(series: Series, program: Program, task: str, out: Path | None) -> None:
    """Add one quiet round.

    Raises SystemExit if other processes keep the machine busy.
    """
    for _ in range(ATTEMPTS):
        answer = program.ask(task, out)
        busy = answer["other_cores"]
        print(f"  {program.name}, {task}: {answer['seconds']:.3f} s", file=sys.stderr, flush=True)
        if busy < QUIET_CORES or answer["seconds"] < 1:
            for name in ("seconds", "cpu_seconds", "file_seconds", "other_cores"):
                getattr(series, name).append(answer[name])
            return
        print(f"    not counted: other processes took {busy:.2f} cores", file=sys.stderr)
        time.sleep(5)
    raise SystemExit("the machine is too busy to measure on")


def in_turns(
    programs: Sequence[Program], task: str, rounds: int, folder: Path
) -> dict[str, Series]:
    """The task in all programs in turns, the order reversed every other round."""
    taken = {program.name: Series() for program in programs}
    for number in range(rounds):
        for program in programs if number % 2 == 0 else reversed(programs):
            take(taken[program.name], program, task, folder / f"{task}.npz")
    return taken


def difference(one: Path, other: Path) -> float:
    """The largest difference of any array, relative to the largest magnitude of that array."""
    with np.load(one) as left, np.load(other) as right:
        if set(left.files) != set(right.files):
            raise SystemExit(f"{one} and {other} hold other fields")
        found = [
            float(np.abs(left[name].reshape(right[name].shape) - right[name]).max())
            / max(float(np.abs(right[name]).max()), 1e-6)
            for name in left.files
        ]
    return float("inf") if not np.isfinite(found).all() else max(found)


def converted(files: Path) -> tuple[Path, Path]:
    """The GGUF files of the full-shape model, converted once."""
    folder = files.parent / "full-shape-gguf"
    body, mhr = folder / "body.gguf", folder / "mhr.gguf"
    if not (body.exists() and mhr.exists()):
        folder.mkdir(parents=True, exist_ok=True)
        command: Command = [COMMANDS / "sam3d-convert", "body", "--allow-unpinned", "--out", body]
        command += ["--checkpoint", files / "model.ckpt", "--mhr", files / "mhr_model.pt"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return body, mhr


@dataclass(frozen=True, slots=True)
class Sides:
    """How the programs are started."""

    product: Sequence[str | Path]
    original: Sequence[str | Path]
    libraries: Path | None

    def start_product(self) -> Program:
        """The product."""
        named = {"SAM3D_GGML_LIBRARY_DIR": str(self.libraries)} if self.libraries else {}
        return Program("product", self.product, named)

    def start_original(self, variant: str) -> Program:
        """The original in one of its variants."""
        return Program(variant, [*self.original, *VARIANTS[variant]], {})


def cold(program: Program, folder: Path) -> dict[str, float]:
    """From the start of the process to the first result in a file; files in the page cache."""
    answer = program.ask("body", folder / f"{program.name}.npz")
    return {
        "load_seconds": round(program.facts["load_seconds"], 3),
        "first_body_seconds": round(answer["seconds"], 3),
        "start_to_file_seconds": round(program.start_seconds + answer["file_seconds"], 3),
        "other_cores": round(answer["other_cores"], 3),
    }


def variants(sides: Sides, folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Each variant of the original alone: cold, warm, and how far it is from the product."""
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        with sides.start_original(name) as program:
            first = cold(program, folder)
            series = Series()
            for _ in range(VARIANT_ROUNDS):
                take(series, program, "body", None)
            away = difference(folder / f"{name}.npz", folder / "product.npz")
        rows[name] = {
            "cold": first,
            "warm_seconds": round(min(series.seconds), 3),
            "difference_from_product": away,
            "agrees": away <= AGREEMENT,
        }
    return rows


def measured(sides: Sides, folder: Path, rounds: dict[str, int], names: Sequence[str]) -> Any:
    """All figures."""
    with ExitStack() as stack:
        product = stack.enter_context(sides.start_product())
        first = cold(product, folder)
        compared = variants(sides, folder, names)
        valid = {name: row["warm_seconds"] for name, row in compared.items() if row["agrees"]}
        if not valid:
            raise SystemExit(f"no variant of the original agrees with the product: {compared}")
        fastest = min(valid, key=lambda name: valid[name])
        original = stack.enter_context(sides.start_original(fastest))
        original.ask("body")
        tasks: dict[str, dict[str, Series]] = {}
        differences: dict[str, float] = {}
        peaks: dict[str, float] = {}
        for task, count in rounds.items():
            for program in (product, original):
                program.ask(task, folder / f"{program.name}.npz")
            if task != "product":
                away = difference(folder / f"{fastest}.npz", folder / "product.npz")
                differences[task] = away
                if away > AGREEMENT:
                    raise SystemExit(f"{task}: the results differ by {away}")
            tasks[task] = in_turns((product, original), task, count, folder)
            if task == "full":  # "product" maps the MHR file once more
                peaks = {each.name: each.ask("memory")["peak"] for each in (product, original)}
        weights = product.facts["float32_weight_bytes"]
    median = {
        task: {name: statistics.median(series.seconds) for name, series in rows.items()}
        for task, rows in tasks.items()
    }
    own = {task: row["product"] for task, row in median.items()}
    return {
        "accelerator": product.facts["accelerator"],
        "pytorch": original.facts["pytorch"],
        "original_variants": compared,
        "fastest_original": fastest,
        "differences": differences,
        "ratios": {
            **{
                f"{task}_product_to_original": round(row["product"] / row[fastest], 3)
                for task, row in median.items()
            },
            "mhr_decode_to_corrective_product": round(own["mhr"] / own["product"], 3),
            "noise_band": NOISE_BAND,
        },
        "limits": {
            "body_product_to_original": MAX_RATIO,
            "full_product_to_original": MAX_RATIO,
            "mhr_decode_to_corrective_product": MAX_DECODE_RATIO,
            "product_peak_resident_bytes": weights + MEMORY_ABOVE_WEIGHTS,
        },
        "memory": {
            "float32_weight_bytes": weights,
            "product_peak_resident_bytes": int(peaks["product"]),
            "original_peak_resident_bytes": int(peaks[fastest]),
        },
        "product_cold": first,
        "warm": {
            task: {
                "product" if name == "product" else "original": series.summary()
                for name, series in rows.items()
            }
            for task, rows in tasks.items()
        },
    }


def main() -> None:
    """Run all, print, write the results."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--original", type=Path, required=True)
    parser.add_argument("--dinov3", type=Path, required=True)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "full-shape")
    parser.add_argument("--libraries", type=Path, help="another build of libggml")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--quick", action="store_true", help="one round each; nothing is written")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    files = inputs(options.cache).checkpoint.parent
    body, mhr = converted(files)
    threads = ["--threads", str(THREADS)]
    product: Command = [sys.executable, "-m", "benchmarks.product_body", body, mhr, *threads]
    original: Command = [options.python, "-m", "benchmarks.original_body"]
    original += [options.original.resolve(), options.dinov3.resolve(), files, *threads]
    rounds = dict.fromkeys(ROUNDS, 1) if options.quick else ROUNDS
    sides = Sides(product, original, options.libraries)
    with tempfile.TemporaryDirectory() as folder:
        results = measured(sides, Path(folder), rounds, options.variants)
    results = {"machine": machine(), "threads": THREADS, **results}
    text = json.dumps(results, indent=1) + "\n"
    print(text)
    if not options.quick:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
