"""`sam3d-parity`: judge a capture against reference captures under declared rules."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sam3d_gguf.cli.failure import refusals
from sam3d_gguf.runtime.output import publish
from sam3d_gguf.runtime.parity import Limits, ParityReport, TensorVerdict, compare, load_rules

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class LimitsChoice(StrEnum):
    """Which limits of the rules apply."""

    plain = "plain"
    free_running = "free-running"


@app.command()
def parity(
    reference: Annotated[list[Path], typer.Option(help="Reference safetensors; repeatable.")],
    candidate: Annotated[Path, typer.Option(help="The safetensors under test.")],
    rules: Annotated[Path, typer.Option(help="The declared limits, rules.json.")],
    limits: Annotated[
        LimitsChoice,
        typer.Option(help="'free-running' for a run that used its own hand boxes."),
    ] = LimitsChoice.plain,
    report: Annotated[Path | None, typer.Option(help="Write the JSON report here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    debug: Annotated[bool, typer.Option(help="Show a traceback on errors.")] = False,
) -> None:
    """Compare a capture with reference captures: exit 0 if every tensor passes, 1 if not."""
    chosen: Limits = "plain" if limits is LimitsChoice.plain else "free-running"
    with refusals(debug=debug):
        found = compare(reference, candidate, load_rules(rules), limits=chosen, rules_path=rules)
        if report is not None:
            publish({report: [found.dumps()]})
    if as_json:
        sys.stdout.write(found.dumps().decode())
    else:
        _print(found)
    raise typer.Exit(0 if found.passed else 1)


def _print(report: ParityReport) -> None:
    console = Console()
    table = Table(title=f"Parity, {report.limits} limits")
    for name, justify in (("tensor", "left"), ("max abs", "right"), ("limit", "right")):
        table.add_column(name, justify="right" if justify == "right" else "left")
    table.add_column("relative L2", justify="right")
    table.add_column("limit", justify="right")
    table.add_column("verdict")
    for verdict in report.tensors:
        table.add_row(*_row(verdict))
    console.print(table)
    failed = report.failed
    console.print(f"{len(report.tensors) - len(failed)} passed, {len(failed)} failed")
    if failed:
        console.print(f"first failing stage: {escape(failed[0].name)}", style="red")


def _row(verdict: TensorVerdict) -> tuple[str, ...]:
    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.3g}"

    text = "pass" if verdict.passed else f"[red]{escape(verdict.reason)}{_worst(verdict)}[/red]"
    return (
        escape(verdict.name),
        number(verdict.max_abs),
        number(verdict.max_abs_limit),
        number(verdict.relative_l2),
        number(verdict.relative_l2_limit),
        text,
    )


def _worst(verdict: TensorVerdict) -> str:
    if verdict.worst is None:
        return ""
    index, reference, candidate = verdict.worst
    return escape(f" at {list(index)}: {candidate:.8g} instead of {reference:.8g}")


def main() -> None:
    """Entry point of the console script."""
    app()
