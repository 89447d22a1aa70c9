"""`sam3d-parity`: judge a capture against reference captures under declared rules."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from sam3d_gguf.cli.terminal import (
    DebugOption,
    JsonOption,
    VersionOption,
    cell,
    new_app,
    out,
    print_json,
    reporting,
)
from sam3d_gguf.runtime.output import publish
from sam3d_gguf.runtime.parity import Limits, ParityReport, TensorVerdict, compare, load_rules
from sam3d_gguf.runtime.parity.html import render

app = new_app("Judge a capture against reference captures under declared rules.")


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
    html: Annotated[
        Path | None, typer.Option(help="Write a page with the error of every stage here.")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
    _version: VersionOption = False,
) -> None:
    """Compare a capture with reference captures: exit 0 if every tensor passes, 1 if not."""
    chosen: Limits = "plain" if limits is LimitsChoice.plain else "free-running"
    with reporting(debug):
        found = compare(reference, candidate, load_rules(rules), limits=chosen, rules_path=rules)
        files: dict[Path, list[bytes]] = {}
        if report is not None:
            files[report] = [found.dumps()]
        if html is not None:
            files[html] = [render(found)]
        publish(files)
    if as_json:
        print_json(found.as_json())
    else:
        _print(found)
    raise typer.Exit(0 if found.passed else 1)


def _print(report: ParityReport) -> None:
    table = Table(title=f"Parity, {report.limits} limits")
    for name, justify in (("tensor", "left"), ("max abs", "right"), ("limit", "right")):
        table.add_column(name, justify="right" if justify == "right" else "left")
    table.add_column("relative L2", justify="right")
    table.add_column("limit", justify="right")
    table.add_column("verdict")
    for verdict in report.tensors:
        table.add_row(*_row(verdict))
    out.print(table)
    failed = report.failed
    out.print(f"{len(report.tensors) - len(failed)} passed, {len(failed)} failed")
    if failed:
        out.print(f"first failing stage: {cell(failed[0].name)}", style="red")


def _row(verdict: TensorVerdict) -> tuple[str, ...]:
    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.3g}"

    text = "pass" if verdict.passed else f"[red]{cell(verdict.reason)}{_worst(verdict)}[/red]"
    return (
        cell(verdict.name),
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
    return cell(f" at {list(index)}: {candidate:.8g} instead of {reference:.8g}")


def main() -> None:
    """Entry point of the console script."""
    app()
