"""Conversion of a full-shape Body checkpoint against the plain way in PyTorch, and verification.

    just bench [--rounds N] [--cache DIR]

makes the full-shape files in the cache folder if they are not there, runs the product, `plain.py`,
and `cp` with `sha256sum` in turns, then `sha256sum` against `sam3d-verify`. The plain way goes
through safetensors files; the product is run without them, as it is by default, and in one job also
so that it keeps them. Medians and ratios go to standard output and to benchmarks/results.json.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from benchmarks.measure import Measurement, machine, run

ROOT = Path(__file__).parents[1]
COMMANDS = Path(sys.executable).parent
ORACLE = ROOT / ".oracle" / "bin" / "python"
RESULTS = ROOT / "benchmarks" / "results.json"
SPACE = 24 << 30

Command = list[str | Path]


@dataclass(frozen=True, slots=True)
class Inputs:
    """The generated official-shape files."""

    checkpoint: Path
    mhr: Path


def inputs(cache: Path, python: Path = ORACLE) -> Inputs:
    """Generate the files once, with the PyTorch of an interpreter."""
    made = Inputs(cache / "model.ckpt", cache / "mhr_model.pt")
    for path, script in ((made.checkpoint, "make_full_body.py"), (made.mhr, "make_full_mhr.py")):
        if not path.exists():
            subprocess.run(
                [python, ROOT / "tests" / "oracle" / script, "--out", path.parent], check=True
            )
    return made


@dataclass(frozen=True, slots=True)
class Job:
    """A conversion to measure."""

    layout: str
    mhr: bool

    @property
    def name(self) -> str:
        """For tables and results."""
        return f"{self.layout}_body_and_mhr" if self.mhr else f"{self.layout}_body"


KEPT = Job("single", True)
JOBS = (Job("single", False), KEPT, Job("components", True))


def product(source: Inputs, out: Path, job: Job) -> Command:
    """The product's conversion."""
    target = out / "body.gguf" if job.layout == "single" else out / "components"
    command: Command = [COMMANDS / "sam3d-convert", "body", "--checkpoint", source.checkpoint]
    if job.mhr:
        command += ["--mhr", source.mhr]
    return [*command, "--layout", job.layout, "--out", target, "--allow-unpinned"]


def keeping(source: Inputs, out: Path, job: Job) -> Command:
    """The same, with safetensors as a second result."""
    return [*product(source, out, job), "--keep-safetensors", out / "safetensors"]


def plain(source: Inputs, out: Path, job: Job) -> Command:
    """The plain way."""
    script = ROOT / "benchmarks" / "plain.py"
    mhr: Command = ["--mhr", source.mhr] if job.mhr else []
    return [ORACLE, script, source.checkpoint, out / "plain", "--layout", job.layout, *mhr]


def shell(text: str, *arguments: Path) -> Command:
    """A shell command over paths, `$1` and so on."""
    return ["sh", "-euc", text, "sh", *arguments]


def timed(work: Path, command: Callable[[Path], Command]) -> Measurement:
    """Run the command on a fresh folder, which is removed afterwards."""
    out = work / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    try:
        return run(command(out))
    finally:
        shutil.rmtree(out)


def median(rows: Sequence[Measurement]) -> Measurement:
    """Field by field."""
    values = {
        field.name: statistics.median(getattr(row, field.name) for row in rows)
        for field in fields(Measurement)
    }
    return Measurement(
        round(values["wall_seconds"], 3),
        int(values["peak_anonymous_bytes"]),
        int(values["peak_resident_bytes"]),
    )


def in_turns(
    rounds: int, work: Path, commands: dict[str, Callable[[Path], Command]]
) -> dict[str, Measurement]:
    """Run the commands in turns, the order reversed every other round; medians by name."""
    taken: dict[str, list[Measurement]] = {name: [] for name in commands}
    for number in range(rounds):
        order = list(commands) if number % 2 == 0 else list(reversed(commands))
        for name in order:
            taken[name].append(timed(work, commands[name]))
            row = taken[name][-1]
            print(f"  {name}: {row.wall_seconds:.2f} s", file=sys.stderr, flush=True)
    return {name: median(rows) for name, rows in taken.items()}


def conversion(source: Inputs, work: Path, job: Job, rounds: int) -> dict[str, Measurement]:
    """Product, product with safetensors, plain way, and copying and hashing the sources."""
    print(f"conversion, {job.name}", file=sys.stderr)
    copy = 'out=$1; shift; cp "$@" "$out"; sync "$out"/*; sha256sum "$out"/*'
    sources = (source.checkpoint, source.mhr) if job.mhr else (source.checkpoint,)
    ways: dict[str, Callable[[Path], Command]] = {
        "product": lambda out: product(source, out, job),
        "plain": lambda out: plain(source, out, job),
        "cp_and_sha256sum": lambda out: shell(copy, out, *sources),
    }
    if job == KEPT:
        ways["keeping_safetensors"] = lambda out: keeping(source, out, job)
    return in_turns(rounds, work, ways)


def verification(source: Inputs, work: Path, rounds: int) -> dict[str, Measurement]:
    """`sam3d-verify` and `sha256sum` of one complete release."""
    print("verification", file=sys.stderr)
    release = work / "release"
    shutil.rmtree(release, ignore_errors=True)
    release.mkdir(parents=True)
    try:
        run(product(source, release, Job("single", True)))
        files = sorted(release.glob("*.gguf"))
        hashing = shell('sha256sum "$@"', *files)
        return in_turns(
            rounds,
            work,
            {
                "verify": lambda _: [COMMANDS / "sam3d-verify", release / "manifest.json"],
                "sha256sum": lambda _: hashing,
            },
        )
    finally:
        shutil.rmtree(release)


def report(name: str, rows: dict[str, Measurement]) -> None:
    """Print one table."""
    print(f"\n{name}")
    print(f"  {'':20}{'wall s':>9}{'anonymous':>12}{'resident':>12}")
    for label, row in rows.items():
        print(
            f"  {label:20}{row.wall_seconds:9.2f}"
            f"{row.peak_anonymous_bytes / 2**20:8.0f} MiB{row.peak_resident_bytes / 2**20:8.0f} MiB"
        )


def measured(rows: dict[str, Measurement]) -> dict[str, dict[str, float]]:
    """As JSON."""
    return {name: asdict(row) for name, row in rows.items()}


def main() -> None:
    """Run all, print, write the results."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "full-shape")
    options = parser.parse_args()
    cache: Path = options.cache
    cache.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(cache).free < SPACE:
        raise SystemExit(f"{cache}: {SPACE >> 30} GiB of free space are needed")
    source = inputs(cache)
    checks: dict[str, float] = {}
    tables: dict[str, dict[str, dict[str, float]]] = {}
    for job in JOBS:
        rows = conversion(source, cache, job, options.rounds)
        report(f"conversion, {job.name}", rows)
        wall = {name: row.wall_seconds for name, row in rows.items()}
        for way in sorted(wall.keys() & {"product", "keeping_safetensors"}):
            checks[f"{job.name}_{way}_times_faster_than_plain"] = round(
                wall["plain"] / wall[way], 2
            )
        checks[f"{job.name}_time_of_cp_and_sha256sum"] = round(
            wall["product"] / wall["cp_and_sha256sum"], 2
        )
        tables[f"conversion_{job.name}"] = measured(rows)
    rows = verification(source, cache, options.rounds)
    report("verification of body.gguf and mhr.gguf", rows)
    checks["verify_time_of_sha256sum"] = round(
        rows["verify"].wall_seconds / rows["sha256sum"].wall_seconds, 2
    )
    tables["verification"] = measured(rows)
    print()
    for name, value in checks.items():
        print(f"  {name.replace('_', ' ')}: {value}")
    results = {
        "machine": machine(),
        "rounds": options.rounds,
        "checkpoint_bytes": source.checkpoint.stat().st_size,
        "ratios": checks,
        "medians": tables,
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
