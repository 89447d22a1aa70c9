"""The pages of the documentation as data: commands with their output, tables, headings, links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")))

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_EXITS = re.compile(r"# exits ([0-9]+)")
_RULE = re.compile(r"^\|(?:-+\|)+$")
_HEADING = re.compile(r"^(#{1,6}) (.+)$")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Example:
    """A command that a page shows: its output, in which `...` stands for anything, and exit code."""

    command: str
    output: str
    exit_code: int


def read(name: str) -> str:
    """The text of a page in `docs/`."""
    return (DOCS / name).read_text()


def fences(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return [match[2] for match in _FENCE.finditer(text) if match[1] == language]


def without_fences(text: str) -> str:
    """A page's text but for its fenced blocks."""
    return _FENCE.sub("", text)


def examples(text: str) -> list[Example]:
    """The commands of a page's `console` blocks, in order."""
    found: list[Example] = []
    for block in fences(text, "console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            code = _EXITS.search(output)
            found.append(Example(command, _EXITS.sub("", output), int(code[1]) if code else 0))
    return found


def indented_code(text: str) -> Iterator[str]:
    """The lines of a page's indented code blocks."""
    for line in without_fences(text).splitlines():
        if line.startswith("    "):
            yield line.strip()


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a text: rows of cells, without the header."""
    found: list[list[list[str]]] = []
    inside = False
    for line in without_fences(text).splitlines():
        if _RULE.match(line):
            found.append([])
            inside = True
        elif inside and line.startswith("|"):
            found[-1].append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        else:
            inside = False
    return found


def section(text: str, title: str) -> str:
    """What stands under a heading, sections below it included."""
    lines = text.splitlines()
    level = 0
    taken: list[str] = []
    for line, is_heading in _with_headings(lines):
        match = _HEADING.match(line) if is_heading else None
        if match and level and len(match[1]) <= level:
            break
        if level:
            taken.append(line)
        elif match and match[2] == title:
            level = len(match[1])
    if not level:
        raise KeyError(title)
    return "\n".join(taken)


def anchors(text: str) -> set[str]:
    """The anchors that the page's headings give."""
    found: set[str] = set()
    for line, is_heading in _with_headings(text.splitlines()):
        match = _HEADING.match(line) if is_heading else None
        if match:
            words = re.sub(r"[^\w\- ]", "", match[2].lower())
            found.add(words.replace(" ", "-"))
    return found


def links(text: str) -> list[str]:
    """The targets of the page's links."""
    return _LINK.findall(without_fences(text))


def code_words(text: str) -> list[str]:
    """What stands between single backticks."""
    return re.findall(r"`([^`\n]+)`", without_fences(text))


def code(cell: str) -> str:
    """The only code in a cell."""
    (word,) = code_words(cell)
    return word


def _with_headings(lines: list[str]) -> Iterator[tuple[str, bool]]:
    """Each line, and whether it could be a heading: in a fenced block none is."""
    fenced = False
    for line in lines:
        if line.startswith("```"):
            fenced = not fenced
        yield line, not fenced and not line.startswith("```")
