"""What all commands share: errors in words, exit codes, progress, text made safe for a terminal."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console, ConsoleOptions
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from sam3d_gguf import __version__
from sam3d_gguf.cli.entry import FAILED, Group, printing, silence
from sam3d_gguf.extractors.progress import QUIET
from sam3d_gguf.extractors.progress import Progress as Listener
from sam3d_gguf.extractors.sandbox.job import SandboxChoice, SandboxKind
from sam3d_gguf.schemas.errors import InputError, Sam3dError
from sam3d_gguf.schemas.strict_json import JsonInput, dumps

_AGAIN_SECONDS = 0.02
_WIDE = 4096


class _Console(Console):
    """Prints text as it is: what comes from input has no markup, emoji or links in it."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False, soft_wrap=True)

    @property
    def options(self) -> ConsoleOptions:
        """Where no terminal bounds a table, each of its rows is one line."""
        options = super().options
        return options if self.is_terminal else options.update(max_width=_WIDE)

    def on_broken_pipe(self) -> None:
        """Leaves it to `printing`: exit code 1 would be a finding."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


out = _Console()
err = _Console(stderr=True)


SandboxOption = Annotated[
    SandboxKind, typer.Option("--sandbox", help="What runs the reader of legacy files.")
]
BaseOption = Annotated[
    str | None,
    typer.Option("--base", help="For --sandbox docker: an image with Python 3.11+ and NumPy."),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output.")
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
UnpinnedOption = Annotated[
    bool,
    typer.Option("--allow-unpinned", help="Accept files that this tool has no pin for; recorded."),
]

CheckpointDirOption = Annotated[
    Path,
    typer.Option(
        "--checkpoint-dir",
        readable=False,
        help="The folder of SAM 3D Objects' checkpoints, their YAML files and pipeline.yaml.",
    ),
]
PartsOption = Annotated[
    str | None,
    typer.Option("--parts", help="Names of parts with commas between; default: all of them."),
]
MogeOption = Annotated[
    Path | None,
    typer.Option("--moge", readable=False, help="The depth model's model.pt, a part too."),
]


def split_parts(parts: str | None) -> tuple[str, ...] | None:
    """The names that `--parts` gives."""
    return None if parts is None else tuple(name.strip() for name in parts.split(","))


def new_app(text: str) -> typer.Typer:
    """A command without completion scripts and without tracebacks of its own."""
    return typer.Typer(
        cls=Group,
        help=text,
        add_completion=False,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def print_version(wanted: bool) -> None:
    """The callback of --version."""
    if wanted:
        with printing():
            out.print(f"sam3d-gguf {__version__}")
        raise typer.Exit


VersionOption = Annotated[
    bool,
    typer.Option("--version", callback=print_version, is_eager=True, help="Print the version."),
]


def choose_sandbox(kind: SandboxKind, base: str | None) -> SandboxChoice:
    """The sandbox that the options name.

    Raises:
        InputError: an image is given, but not Docker.
    """
    if base is not None and kind != "docker":
        raise InputError("--base goes with --sandbox docker", where="--base")
    return SandboxChoice(kind, base)


@contextlib.contextmanager
def reporting(debug: bool) -> Generator[None]:
    """Turn errors into a message on standard error and exit code 2; SIGTERM ends tidily too.

    So does SIGHUP, which a closed terminal sends, unless it is ignored as `nohup` has it.
    """
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in previous.items():
        if number == signal.SIGTERM or handler != signal.SIG_IGN:
            signal.signal(number, _interrupt)
    sys.unraisablehook = _repeat_interrupt
    try:
        yield
    except (Sam3dError, KeyboardInterrupt, OSError, MemoryError) as error:
        _fail(_words(error), debug)
    except (typer.Exit, SystemExit):
        raise
    except Exception as error:  # noqa: BLE001 - a fault of ours must not look like a traceback
        _fail(f"internal error: {type(error).__name__}: {error}. Run again with --debug", debug)
    finally:
        sys.unraisablehook = sys.__unraisablehook__
        for number, handler in previous.items():
            signal.signal(number, handler)


def _repeat_interrupt(lost: sys.UnraisableHookArgs) -> None:
    """An interrupt that fell into a finalizer, where no error can be raised, comes again."""
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    again = threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), signal.SIGINT))
    again.daemon = True
    again.start()


def _words(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; nothing unfinished was left behind"
    if isinstance(error, MemoryError):
        return "the memory does not suffice. Free memory, or raise the limits of this process"
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return _words(MemoryError())
    if isinstance(error, OSError) and error.strerror:
        named = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        return f"{named}{error.strerror}"
    return str(error)


def _interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _fail(message: str, debug: bool) -> NoReturn:
    try:
        if debug:
            err.print(printable(traceback.format_exc()))
        err.print(Text.assemble(("error:", "bold red"), " ", printable(message)))
    except OSError:
        silence(sys.stderr)
    raise typer.Exit(FAILED)


def printable(text: str) -> str:
    """Text from files with everything escaped that a terminal could take for a command."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def cell(text: str) -> str:
    """Text from files for one line of a table."""
    return printable(text).replace("\n", "\\n")


def print_hashes(files: Iterable[tuple[str, str]]) -> None:
    """Print SHA-256 (hex) and name of each file, as `sha256sum --check` takes them."""
    for sha256, name in files:
        if sha256:
            out.print(f"{sha256}  {cell(name)}")


def print_json(document: JsonInput) -> None:
    """Print one document on standard output; what is no Unicode in it is replaced."""
    sys.stdout.buffer.write(dumps(_as_unicode(document)))
    sys.stdout.buffer.flush()


def _as_unicode(value: JsonInput) -> JsonInput:
    match value:
        case str():
            return value.encode("utf-8", "replace").decode("utf-8")
        case Mapping():
            return {str(_as_unicode(key)): _as_unicode(item) for key, item in value.items()}
        case [*items]:
            return [_as_unicode(item) for item in items]
        case _:
            return value


class _Bars:
    """Shows each stage as a bar with its rate and the time left."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def stage(self, title: str, total_bytes: int) -> None:
        """See `extractors.progress.Progress`."""
        if self._task is not None:
            self._progress.update(self._task, total=self._completed(), completed=self._completed())
        self._task = self._progress.add_task(cell(title), total=total_bytes)

    def advance(self, count: int) -> None:
        """See `extractors.progress.Progress`."""
        if self._task is not None:
            self._progress.advance(self._task, count)

    def _completed(self) -> float:
        return self._progress.tasks[-1].total or 0.0


@contextlib.contextmanager
def progress_bars() -> Generator[Listener]:
    """Progress on standard error; none when that is not a terminal."""
    if not err.is_terminal:
        yield QUIET
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err) as progress:
        yield _Bars(progress)
