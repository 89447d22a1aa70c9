"""What can be wrong with a set of tensors, and the one error that lists all of it."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from sam3d_gguf.schemas.errors import ContractError
from sam3d_gguf.schemas.strict_json import shorten

Kind: TypeAlias = Literal[
    "dimension", "equation", "missing", "extra", "renamed", "reshaped", "retyped"
]
Signature: TypeAlias = tuple[str, tuple[int, ...]]
_SHOWN = 12
_COMPARISONS = 20_000
_SIMILAR = 0.6


@dataclass(frozen=True, slots=True)
class Problem:
    """One way in which tensors miss their contract.

    Attributes:
        kind: the group it is listed under.
        name: the tensor, dimension or equation.
        found: what is there; empty where nothing is.
        expected: what should be there; empty where nothing should.
    """

    kind: Kind
    name: str
    found: str = ""
    expected: str = ""

    def __str__(self) -> str:
        text = shorten(self.name)
        if self.found:
            text += f" is {shorten(self.found)}"
        if self.expected:
            text += f", expected {shorten(self.expected)}"
        return text


class BindingError(ContractError):
    """All problems of a set of tensors: `problems` is complete, the text shows some of each kind."""

    def __init__(self, problems: Sequence[Problem], *, contract: str, where: str) -> None:
        self.problems = tuple(problems)
        super().__init__(
            f"the tensors do not meet the contract {contract}\n{_listing(self.problems)}",
            where=where,
        )


@contextlib.contextmanager
def naming_file(name: str) -> Generator[None]:
    """What the block refuses names this file before the tensor.

    Raises:
        ContractError: from the block.
    """
    try:
        yield
    except ContractError as error:
        if error.where.startswith(name):
            raise
        where = f"{name}: {error.where}" if error.where else name
        raise ContractError(
            error.what, where=where, expected=error.expected, action=error.action
        ) from error


def pair_renamed(
    missing: Mapping[str, Signature], extra: Mapping[str, Signature]
) -> list[tuple[str, str]]:
    """Pairs missing tensors with extra ones of the same dtype and shape and a similar name.

    A name that only lost or gained a prefix is paired first; how many other names are compared is
    bounded, so that many strangers cost little time.

    Returns:
        (missing name, extra name), each name at most once.
    """
    pairs = _pair_prefixed(missing, extra)
    taken = {name for pair in pairs for name in pair}
    candidates: list[tuple[float, str, str]] = []
    comparisons = 0
    matcher = difflib.SequenceMatcher(autojunk=False)
    for found, kind in extra.items():
        matcher.set_seq2(shorten(found))
        for wanted, signature in missing.items():
            if {found, wanted} & taken or kind != signature:
                continue
            comparisons += 1
            if comparisons > _COMPARISONS:
                break
            matcher.set_seq1(wanted)
            if matcher.quick_ratio() >= _SIMILAR and (ratio := matcher.ratio()) >= _SIMILAR:
                candidates.append((ratio, wanted, found))
    for _, wanted, found in sorted(candidates, key=lambda c: (-c[0], c[1], c[2])):
        if not {wanted, found} & taken:
            taken |= {wanted, found}
            pairs.append((wanted, found))
    return pairs


def shape_text(dtype: str, shape: Sequence[int]) -> str:
    """Returns a dtype and shape for an error, such as `F32 [3, 4]`."""
    return f"{dtype} [{', '.join(map(str, shape))}]"


def _pair_prefixed(
    missing: Mapping[str, Signature], extra: Mapping[str, Signature]
) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    taken: set[str] = set()
    for found, signature in extra.items():
        parts = found.split(".")
        # A prefix of more than a few modules is no prefix that a training framework adds.
        for i in range(1, min(len(parts), 4)):
            wanted = ".".join(parts[i:])
            if missing.get(wanted) == signature and wanted not in taken:
                taken.add(wanted)
                pairs.append((wanted, found))
                break
    return pairs


def _listing(problems: Iterable[Problem]) -> str:
    groups: dict[str, list[Problem]] = {kind: [] for kind in get_args(Kind)}
    for problem in problems:
        groups[problem.kind].append(problem)
    lines: list[str] = []
    for kind, group in groups.items():
        if group:
            label = "probably renamed" if kind == "renamed" else kind
            lines.append(f"  {label} ({len(group)}):")
            lines += [f"    {problem}" for problem in group[:_SHOWN]]
        if len(group) > _SHOWN:
            lines.append(f"    and {len(group) - _SHOWN} more")
    return "\n".join(lines)
