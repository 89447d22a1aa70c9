"""`sam3d-verify`: the proof of a release."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from sam3d_gguf.cli.entry import FOUND_WRONG, Command, printing
from sam3d_gguf.cli.terminal import (
    BaseOption,
    DebugOption,
    JsonOption,
    SandboxOption,
    VersionOption,
    cell,
    choose_sandbox,
    new_app,
    out,
    print_hashes,
    print_json,
    progress_bars,
    reporting,
)
from sam3d_gguf.convert.verify import Verification, verify

app = new_app("Verify a release by its manifest.json, or GGUF files alone.")
_SHOWN = 20


@app.command(cls=Command)
def check(
    paths: Annotated[
        list[Path], typer.Argument(readable=False, help="A manifest.json, or GGUF files.")
    ],
    expect_sha256: Annotated[
        list[str] | None,
        typer.Option(
            "--expect-sha256",
            help="The SHA-256 of the manifest (or of each file), obtained elsewhere. Repeatable.",
        ),
    ] = None,
    source: Annotated[
        list[Path] | None,
        typer.Option(
            "--source",
            readable=False,
            help="A legacy file: every tensor is derived from it again. Repeatable.",
        ),
    ] = None,
    sandbox: SandboxOption = "bubblewrap",
    base: BaseOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
    version: VersionOption = False,
) -> None:
    """Verify a release: exit code 0 if it holds, 1 if anything is wrong, 2 if that can't be said."""
    with reporting(debug):
        with progress_bars() as progress:
            result = verify(
                paths,
                expect_sha256=expect_sha256 or (),
                sources=source or (),
                sandbox=choose_sandbox(sandbox, base),
                progress=progress,
            )
        with printing():
            if json:
                print_json(result.to_document())
            else:
                _print(result)
        if not result.is_good:
            raise typer.Exit(FOUND_WRONG)


def _print(result: Verification) -> None:
    table = Table("file", "role", "tensors", "bytes", "result")
    for file in result.files:
        table.add_row(
            cell(file.name),
            "" if file.claims is None else cell(file.claims.role),
            str(len(file.tensor_sha256)),
            f"{file.bytes:,}",
            Text("WRONG", "red") if file.problems else Text("good", "green"),
        )
    out.print(table)
    print_hashes((file.sha256, file.name) for file in result.files)
    problems = [(file.name, problem) for file in result.files for problem in file.problems]
    problems += [("release", problem) for problem in result.problems]
    for name, problem in problems[:_SHOWN]:
        out.print(Text.assemble((cell(name), "red"), ": ", cell(problem)))
    if len(problems) > _SHOWN:
        out.print(f"and {len(problems) - _SHOWN} more; --json lists all")
    for proof in result.origin:
        out.print(f"origin proven by {cell(proof)}")
    out.print(cell(result.verdict), style="bold green" if result.is_good else "bold red")


def main() -> None:
    """The entry point."""
    app()
