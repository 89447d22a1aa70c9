"""One visit of every object of a pickle, for the report of what it asks for beside its tensors."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

from sam3d_gguf.extractors.describe import function_name, label
from sam3d_gguf.extractors.limits import Limits
from sam3d_gguf.extractors.pickle_machine import Dict, Object, Persistent, Pickle, Set, Value
from sam3d_gguf.extractors.printable import printable
from sam3d_gguf.extractors.torch_objects import is_known, is_module, is_tensor
from sam3d_gguf.schemas.errors import InputError

_DEPTH = 4_096
_DROPPED = "(dropped)"
_NAMES = 16  # of a path in a report; the ones above are left out


@dataclass(frozen=True, slots=True)
class Inert:
    """Calls that were recorded and never made: of which global, where the first hangs, how many."""

    path: str
    function: str
    count: int


@dataclass(frozen=True, slots=True)
class Excluded:
    """A tensor that is left out, where it hangs, and why."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Level:
    """An object that is being visited: its name below the one above, what is left of its parts."""

    name: str
    parts: Iterator[tuple[str, Value]]
    in_tensor: bool


class Survey:
    """Visits every object of the pickles once, whatever cycles or shared parts they have.

    A call is reported because the pickle asks for it: also where its result is then dropped, so
    that nothing holds it in the end.

    Args:
        pickles: each with the first part of its paths or "".
        wanted: the `id` of each tensor call that has a name already.
        limits: bounds on what is reported.
        where: what to call the file in errors.

    Attributes:
        inert: calls without a meaning here, by global.
        excluded: tensors that are not wanted.

    Raises:
        InputError: there is more to report than the limits allow, or it nests too deeply.
    """

    def __init__(
        self, pickles: Mapping[str, Pickle], wanted: Container[int], *, limits: Limits, where: str
    ) -> None:
        self.inert: dict[str, Inert] = {}
        self.excluded: list[Excluded] = []
        self._wanted = wanted
        self._limits = limits
        self._where = where
        self._levels = [_Level("", _roots(pickles), False)]
        self._visit_all()

    def _visit_all(self) -> None:
        seen: set[int] = set()
        while self._levels:
            name, value = next(self._levels[-1].parts, ("", None))
            if value is None:
                self._levels.pop()
            elif id(value) not in seen and _has_parts(value):
                seen.add(id(value))
                self._visit(name, value)

    def _visit(self, name: str, value: Value) -> None:
        in_tensor = self._levels[-1].in_tensor
        if is_tensor(value):
            if id(value) not in self._wanted and not in_tensor:
                self._exclude(name)
            in_tensor = True
        elif isinstance(value, Object) and not is_known(value) and not is_module(value):
            self._add_inert(function_name(value), name)
        if len(self._levels) > _DEPTH:
            raise InputError("nests its objects too deeply", where=self._where)
        parts = ((key, part) for key, part in _parts(value) if part is not None)
        self._levels.append(_Level(name, parts, in_tensor))

    def _exclude(self, name: str) -> None:
        if len(self.excluded) == self._limits.tensors:
            raise self._too_many(f"{self._limits.tensors} tensors outside its state dict")
        self.excluded.append(Excluded(self._path(name), "lies outside the state dict"))

    def _add_inert(self, function: str, name: str) -> None:
        known = self.inert.get(function)
        if known is None and len(self.inert) == self._limits.entries:
            raise self._too_many(f"{self._limits.entries} different globals that it calls")
        self.inert[function] = (
            Inert(known.path, function, known.count + 1)
            if known
            else Inert(self._path(name), function, 1)
        )

    def _too_many(self, what: str) -> InputError:
        return InputError(f"has more than {what}", where=self._where)

    def _path(self, name: str) -> str:
        names = [level.name for level in self._levels[-_NAMES:] if level.name]
        hidden = ["..."] if len(self._levels) > _NAMES + 2 else []
        return ".".join((*hidden, *names, name))


def _roots(pickles: Mapping[str, Pickle]) -> Iterator[tuple[str, Value]]:
    """The values, then the calls: the last ones first, since they may hold those before."""
    yield from ((name, p.value) for name, p in pickles.items() if p.value is not None)
    for pickle in pickles.values():
        yield from ((_DROPPED, call) for call in reversed(pickle.calls))


def _has_parts(value: Value) -> bool:
    return isinstance(value, list | tuple | Dict | Set | Object | Persistent)


def _parts(value: Value) -> Iterator[tuple[str, Value]]:
    match value:
        case Dict(pairs=pairs):
            yield from _entries(pairs)
        case Set(items=items) | list(items) | tuple(items):
            yield from ((str(index), item) for index, item in enumerate(items))
        case Persistent(id=key):
            yield "(id)", key
        case Object():
            yield "(function)", value.function
            yield from ((f"({index})", item) for index, item in enumerate(value.arguments))
            yield from (("(state)", state) for state in value.states)
            yield from ((str(index), item) for index, item in enumerate(value.items))
            yield from _entries(value.pairs)
        case _:
            return


def _entries(pairs: list[tuple[Value, Value]]) -> Iterator[tuple[str, Value]]:
    for key, value in pairs:
        yield "(key)", key
        yield printable(key) if isinstance(key, str) else label(key), value
