"""The networks of SAM 3D Objects at the full official shape on CPU, against the original in PyTorch.

    just bench-objects SAM_3D_OBJECTS [--components NAME ...] [--quick]

SAM_3D_OBJECTS is a checkout of the original's repository. The full-shape checkpoints with random weights
are made once, and converted once; both sides load the same weights and take the same inputs
(`objects_inputs`). Component by component the two programs take turns, both warm, after each result of
the original was held against the product's: one velocity of either flow, and each decoder to what it is
for (logits, Gaussians, a mesh). Figures go to benchmarks/results-objects.json; those of components that
are not named stay as they are.

A round counts only if other processes leave the machine alone, as in `run_body`.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.bench import COMMANDS, ORACLE, ROOT, Command
from benchmarks.measure import machine
from benchmarks.objects_inputs import COMPONENTS, voxels
from benchmarks.run_body import AGREEMENT, THREADS, Program, difference, in_turns

RESULTS = ROOT / "benchmarks" / "results-objects.json"
ROUNDS = {
    "ss_flow": 3,
    "slat_flow": 3,
    "ss_decoder": 7,
    "gaussian_32": 3,
    "gaussian_4": 3,
    "mesh": 3,
}
MAX_RATIO = 1.0
SPACE = 26 << 30


def generated(cache: Path) -> tuple[Path, Path]:
    """The checkpoints, and their GGUF files."""
    files, converted = cache / "objects", cache / "objects-gguf"
    if not (files / "slat_decoder_mesh.ckpt").exists():
        cache.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(cache).free < SPACE:
            raise SystemExit(f"{cache} needs {SPACE >> 30} GiB")
        program = ROOT / "tests" / "oracle" / "make_full_objects.py"
        subprocess.run([ORACLE, program, "--out", files], check=True)
    if not converted.exists():
        command: Command = [COMMANDS / "sam3d-convert", "objects", "--allow-unpinned"]
        command += ["--checkpoint-dir", files, "--out", converted]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return files, converted


def measured(component: str, product: Command, original: Command, rounds: int) -> dict[str, Any]:
    """The figures of one component."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Program("product", [*product, component, "--threads", str(THREADS)], {}) as ours,
        Program("original", [*original, component, "--threads", str(THREADS)], {}) as theirs,
    ):
        paths = {program.name: Path(folder) / f"{program.name}.npz" for program in (ours, theirs)}
        for program in (ours, theirs):
            program.ask(component, paths[program.name])
        away = difference(paths["original"], paths["product"])
        if away > AGREEMENT:
            raise SystemExit(f"{component}: the results differ by {away}")
        series = in_turns((ours, theirs), component, rounds, Path(folder))
        medians = {name: statistics.median(each.seconds) for name, each in series.items()}
        return {
            "ratio": round(medians["product"] / medians["original"], 3),
            "difference": away,
            **{name: each.summary() for name, each in series.items()},
            "peak_resident_bytes": {
                program.name: int(program.ask("memory")["peak"]) for program in (ours, theirs)
            },
            "accelerator": ours.facts["accelerator"],
            "pytorch": theirs.facts["pytorch"],
        }


def main() -> None:
    """Run all, print, write the results."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--original", type=Path, required=True)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "full-shape")
    parser.add_argument("--components", nargs="+", choices=COMPONENTS, default=list(COMPONENTS))
    parser.add_argument("--quick", action="store_true", help="one round each; nothing is written")
    options = parser.parse_args()
    files, converted = generated(options.cache)
    product: Command = [sys.executable, "-m", "benchmarks.product_objects", converted]
    original: Command = [options.python, "-m", "benchmarks.original_objects"]
    original += [options.original.resolve(), files]
    known: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results: dict[str, Any] = {
        "machine": machine(),
        "threads": THREADS,
        "limit": MAX_RATIO,
        "voxels": len(voxels()),
        "components": known.get("components", {}),
    }
    for component in options.components:
        rounds = 1 if options.quick else ROUNDS[component]
        found = measured(component, product, original, rounds)
        print(f"{component}: {json.dumps(found, indent=1)}", flush=True)
        results["components"][component] = found
        if not options.quick:
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
