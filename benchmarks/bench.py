"""Conversion of a full-shape Body checkpoint against the plain way in PyTorch, and verification.

    just bench [--rounds N] [--layout single components] [--cache DIR]

makes the full-shape files in the cache folder if they are not there, runs the product and
`plain.py` in turns, then `cp` with `sha256sum`, and `sha256sum` against `sam3d-verify`. Medians and
ratios go to standard output and to benchmarks/results.json.
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


def inputs(cache: Path) -> Inputs:
    """Generate the files once."""
    made = Inputs(cache / "model.ckpt", cache / "mhr_model.pt")
    for path, script in ((made.checkpoint, "make_full_body.py"), (made.mhr, "make_full_mhr.py")):
        if not path.exists():
            subprocess.run(
                [ORACLE, ROOT / "tests" / "oracle" / script, "--out", path.parent], check=True
            )
    return made


def product(source: Inputs, out: Path, layout: str, mhr: bool = False) -> Command:
    """The product's conversion; its safetensors are kept, as the plain way keeps its own."""
    target = out / "body.gguf" if layout == "single" else out / "components"
    command: Command = [COMMANDS / "sam3d-convert", "body", "--checkpoint", source.checkpoint]
    if mhr:
        command += ["--mhr", source.mhr]
    return [
        *command,
        "--layout",
        layout,
        "--out",
        target,
        "--keep-safetensors",
        out / "safetensors",
        "--allow-unpinned",
    ]


def plain(source: Inputs, out: Path, layout: str) -> Command:
    """The plain way."""
    script = ROOT / "benchmarks" / "plain.py"
    return [ORACLE, script, source.checkpoint, out / "plain", "--layout", layout]


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


def conversion(source: Inputs, work: Path, layout: str, rounds: int) -> dict[str, Measurement]:
    """Product, plain way, and copying and hashing the source."""
    print(f"conversion, layout {layout}", file=sys.stderr)
    copy = 'cp "$1" "$2" && sync "$2" && sha256sum "$2"'
    return in_turns(
        rounds,
        work,
        {
            "product": lambda out: product(source, out, layout),
            "plain": lambda out: plain(source, out, layout),
            "cp_and_sha256sum": lambda out: shell(copy, source.checkpoint, out / "copy"),
        },
    )


def verification(source: Inputs, work: Path, rounds: int) -> dict[str, Measurement]:
    """`sam3d-verify` and `sha256sum` of one complete release."""
    print("verification", file=sys.stderr)
    release = work / "release"
    shutil.rmtree(release, ignore_errors=True)
    release.mkdir(parents=True)
    try:
        run(product(source, release, "single", mhr=True))
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
    print(f"  {'':18}{'wall s':>9}{'anonymous':>12}{'resident':>12}")
    for label, row in rows.items():
        print(
            f"  {label:18}{row.wall_seconds:9.2f}"
            f"{row.peak_anonymous_bytes / 2**20:8.0f} MiB{row.peak_resident_bytes / 2**20:8.0f} MiB"
        )


def measured(rows: dict[str, Measurement]) -> dict[str, dict[str, float]]:
    """As JSON."""
    return {name: asdict(row) for name, row in rows.items()}


def main() -> None:
    """Run all, print, write the results."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layout", nargs="+", default=["single", "components"])
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "full-shape")
    options = parser.parse_args()
    cache: Path = options.cache
    cache.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(cache).free < SPACE:
        raise SystemExit(f"{cache}: {SPACE >> 30} GiB of free space are needed")
    source = inputs(cache)
    checks: dict[str, float] = {}
    tables: dict[str, dict[str, dict[str, float]]] = {}
    for layout in options.layout:
        rows = conversion(source, cache, layout, options.rounds)
        report(f"conversion, layout {layout}", rows)
        wall = {name: row.wall_seconds for name, row in rows.items()}
        checks[f"{layout}_times_faster_than_plain"] = round(wall["plain"] / wall["product"], 2)
        checks[f"{layout}_time_of_cp_and_sha256sum"] = round(
            wall["product"] / wall["cp_and_sha256sum"], 2
        )
        tables[f"conversion_{layout}"] = measured(rows)
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
