"""`sam3d-parity`: judge a capture against reference captures under declared rules."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sam3d_gguf.cli.entry import FOUND_WRONG, Command, printing
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
from sam3d_gguf.runtime.output import NewFile, check_free, publish
from sam3d_gguf.runtime.parity import Limits, ParityReport, TensorVerdict, compare, load_rules
from sam3d_gguf.runtime.parity.html import error_ratio, render

app = new_app("Judge a capture against reference captures under declared rules.")


class LimitsChoice(StrEnum):
    """Which limits of the rules apply."""

    plain = "plain"
    free_running = "free-running"


@app.command(cls=Command)
def parity(
    reference: Annotated[
        list[Path], typer.Option(readable=False, help="Reference safetensors; repeatable.")
    ],
    candidate: Annotated[Path, typer.Option(readable=False, help="The safetensors under test.")],
    rules: Annotated[Path, typer.Option(readable=False, help="The declared limits, rules.json.")],
    limits: Annotated[
        LimitsChoice,
        typer.Option(help="'free-running' for a run that used its own hand boxes."),
    ] = LimitsChoice.plain,
    report: Annotated[
        Path | None, typer.Option(readable=False, help="Write the JSON report here.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(readable=False, help="Write a page with the error of every stage here."),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
    _version: VersionOption = False,
) -> None:
    """Compare a capture with reference captures: exit 0 if every tensor passes, 1 if not."""
    chosen: Limits = "plain" if limits is LimitsChoice.plain else "free-running"
    with reporting(debug):
        places = [path for path in (report, html) if path is not None]
        check_free(places)
        found = compare(reference, candidate, load_rules(rules), limits=chosen, rules_path=rules)
        files: list[NewFile] = []
        if report is not None:
            files.append((report, [found.dumps()]))
        if html is not None:
            files.append((html, [render(found)]))
        publish(files)
        with printing(complete=bool(files)):
            if as_json:
                print_json(found.as_json())
            else:
                _print(found)
    raise typer.Exit(0 if found.passed else FOUND_WRONG)


def _print(report: ParityReport) -> None:
    """Every pass in one line, then every tensor that failed."""
    table = Table(title=f"Parity, {report.limits} limits")
    for name in ("pass or case", "tensors", "failed", "worst error / limit", "there"):
        table.add_column(name, overflow="fold", justify="left" if name[0] in "pt" else "right")
    groups: dict[str, list[TensorVerdict]] = {}
    for verdict in report.tensors:
        groups.setdefault(".".join(verdict.name.split(".")[:2]), []).append(verdict)
    for name, verdicts in groups.items():
        table.add_row(cell(name), *_summary(verdicts))
    out.print(table)
    failed = report.failed
    for verdict in failed:
        out.print(cell(f"{verdict.name}: {verdict.reason}{_worst(verdict)}"), style="red")
    out.print(f"{len(report.tensors) - len(failed)} passed, {len(failed)} failed")
    if failed:
        out.print(cell(f"first failing stage: {failed[0].name}"), style="red")


def _summary(verdicts: list[TensorVerdict]) -> tuple[RenderableType, ...]:
    count = sum(not verdict.passed for verdict in verdicts)
    failed = Text(str(count), "red" if count else "")
    ratios = [(error_ratio(verdict), verdict.name) for verdict in verdicts]
    measured = [(ratio, name) for ratio, name in ratios if ratio is not None]
    if not measured:
        return str(len(verdicts)), failed, "", ""
    ratio, name = max(measured)
    return str(len(verdicts)), failed, f"{ratio:.2g}", cell(name) if ratio > 0 else ""


def _worst(verdict: TensorVerdict) -> str:
    if verdict.worst is None:
        return ""
    index, reference, candidate = verdict.worst
    return f" at {list(index)}: {candidate:.8g} instead of {reference:.8g}"


def main() -> None:
    """Entry point of the console script."""
    app()
