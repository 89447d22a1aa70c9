"""Image to mesh at the full official shape on a GPU: Vulkan against the original in PyTorch CUDA.

    .venv/bin/python -m benchmarks.run_gpu --original SAM_3D_BODY --dinov3 DINOV3 --python PYTHON
        [--libraries DIR] [--cache DIR] [--rounds N] [--quick]

SAM_3D_BODY and DINOV3 are checkouts of the original's repositories, PYTHON an interpreter with a
CUDA build of PyTorch and what benchmarks/original.txt lists. The full-shape files with random
weights are made in the cache folder where they are missing, and all four programs load the same
ones: Vulkan in strict F32 and fast, PyTorch in F32 (TF32 off) and BF16. Each is measured warm, first
for the whole and then by stage, while the others wait: a GPU that changes between programs every
round slows all of them. Figures go to benchmarks/results-gpu.json.

A stage ends when its work on the device does. `crop` is the crop with its rays and condition;
`hands` are both passes of the hand decoder with their crops and backbones; `mhr` is from pose values
to keypoints, once after every decoder layer; `rest` is the whole without the stages.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.bench import ROOT, Command, inputs
from benchmarks.measure import machine
from benchmarks.run_body import Program, converted, difference

RESULTS = ROOT / "benchmarks" / "results-gpu.json"
TASKS = ("body", "full", "mhr")
STAGED = ("body", "full")
STAGES = ("crop", "backbone", "decoder", "mhr", "hands")
ROUNDS = 15
WARM_UP = 3
THREADS = 4
AGREEMENT = 1e-3
"""Largest difference of any field between the two in F32, relative to its largest magnitude."""

STRICT, FAST = "Vulkan, strict F32", "Vulkan, fast"
F32, BF16 = "PyTorch CUDA, F32", "PyTorch CUDA, BF16"
VULKAN = {STRICT: "strict-f32", FAST: "fast"}
CUDA = {F32: "f32", BF16: "bf16"}
PAIRS = {"strict_to_f32": (STRICT, F32), "fast_to_bf16": (FAST, BF16)}

Milliseconds = dict[str, float]


def gpu() -> dict[str, str]:
    """Name and driver of the first NVIDIA GPU."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    name, driver = answer.strip().split(", ")
    return {"name": name, "driver": driver}


def whole(programs: Sequence[Program], rounds: int, folder: Path) -> dict[str, Any]:
    """The tasks in each program: median, 95th percentile and least, milliseconds."""
    rows: dict[str, Any] = {}
    for task in TASKS:
        seconds: dict[str, list[float]] = {}
        for program in programs:
            for _ in range(WARM_UP):
                program.ask(task, folder / f"{program.name}.{task}.npz")
            seconds[program.name] = [program.ask(task)["seconds"] for _ in range(rounds)]
        rows[task] = {
            name: {
                "median": _milliseconds(statistics.median(found)),
                "p95": _milliseconds(sorted(found)[int(0.95 * (len(found) - 1))]),
                "least": _milliseconds(min(found)),
            }
            for name, found in seconds.items()
        }
    return rows


def by_stage(program: Program, task: str, rounds: int) -> Milliseconds:
    """Medians of the stages of one task, and of the rest."""
    found: dict[str, list[float]] = {name: [] for name in (*STAGES, "rest")}
    for _ in range(rounds):
        answer = program.ask(task, stages=True)
        stages: Mapping[str, float] = answer["stages"]
        for name in STAGES:
            found[name].append(stages.get(name, 0.0))
        found["rest"].append(answer["seconds"] - sum(stages.values()))
    return {name: _milliseconds(statistics.median(values)) for name, values in found.items()}


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def ratios(warm: dict[str, Any], stages: dict[str, dict[str, Milliseconds]]) -> dict[str, Any]:
    """Product to original, for the whole and by stage."""
    found: dict[str, Any] = {}
    for pair, (product, original) in PAIRS.items():
        rows = {
            task: round(warm[task][product]["median"] / warm[task][original]["median"], 2)
            for task in TASKS
        }
        for task, table in stages.items():
            for stage in STAGES:
                if table[original][stage]:
                    value = table[product][stage] / table[original][stage]
                    rows[f"{task}, {stage}"] = round(value, 2)
        found[pair] = rows
    return found


def measured(programs: dict[str, Program], rounds: int, folder: Path) -> dict[str, Any]:
    """All figures.

    Raises SystemExit if the two programs in F32 do not agree.
    """
    warm = whole(list(programs.values()), rounds, folder)
    differences = {
        f"{name} from {F32}": {
            task: difference(folder / f"{name}.{task}.npz", folder / f"{F32}.{task}.npz")
            for task in TASKS
        }
        for name in (STRICT, FAST, BF16)
    }
    if max(differences[f"{STRICT} from {F32}"].values()) > AGREEMENT:
        raise SystemExit(f"the results differ: {differences}")
    stages = {
        task: {name: by_stage(program, task, rounds) for name, program in programs.items()}
        for task in STAGED
    }
    return {
        "libraries": programs[STRICT].facts["libraries"],
        "pytorch": programs[F32].facts["pytorch"],
        "rounds": rounds,
        "warm_milliseconds": warm,
        "stage_milliseconds": stages,
        "product_to_original": ratios(warm, stages),
        "largest_relative_difference": differences,
    }


def main() -> None:
    """Run all, print, write the results."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--original", type=Path, required=True)
    parser.add_argument("--dinov3", type=Path, required=True)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "full-shape")
    parser.add_argument("--libraries", type=Path, help="another build of libggml")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="two rounds; nothing is written")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    files = inputs(options.cache, options.python).checkpoint.parent
    product: Command = [sys.executable, "-m", "benchmarks.product_body", *converted(files)]
    product += ["--backend", "vulkan"]
    original: Command = [options.python, "-m", "benchmarks.original_body"]
    original += [options.original.resolve(), options.dinov3.resolve(), files, "--device", "cuda"]
    commands: dict[str, Command] = {
        **{name: [*product, "--precision", value] for name, value in VULKAN.items()},
        **{name: [*original, "--precision", value] for name, value in CUDA.items()},
    }
    variables = {"OMP_NUM_THREADS": str(THREADS)}
    if options.libraries:
        variables["SAM3D_GGML_LIBRARY_DIR"] = str(options.libraries)
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        programs = {
            name: stack.enter_context(Program(name, command, variables))
            for name, command in commands.items()
        }
        results = measured(programs, 2 if options.quick else options.rounds, Path(folder))
    results = {"gpu": gpu(), "machine": machine(), **results}
    text = json.dumps(results, indent=1) + "\n"
    print(text)
    if not options.quick:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
