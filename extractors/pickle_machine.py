"""A pickle's opcodes read as data: nothing is imported, looked up or called.

A global is a pair of names, and a call is a record of what would have been called with what. The
machine gives no record a meaning; `torch_objects` knows the few that matter. Dictionaries and sets
are lists of their entries, so that no value of the file is ever hashed or compared.

>>> read_pickle(b"cos\\nsystem\\n(S'id'\\ntR.").value
Object(function=Global(module='os', name='system'), arguments=('id',))

Opcodes are named as in Python's `pickletools`, protocols 0 to 5. Out-of-band buffers and the
extension registry, whose values are not in the file, are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from struct import Struct
from typing import NoReturn, TypeAlias, Union

from sam3d_gguf.extractors.limits import Limits
from sam3d_gguf.schemas.errors import InputError

Value: TypeAlias = Union[
    bool,
    int,
    float,
    str,
    bytes,
    "tuple[Value, ...]",
    "list[Value]",
    "Dict",
    "Set",
    "Global",
    "Persistent",
    "Object",
    None,
]


@dataclass(frozen=True, slots=True)
class Global:
    """The name of a class or function; never resolved."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Dict:
    """A dictionary as its (key, value) pairs in file order; keys may repeat or be unhashable."""

    pairs: list[tuple[Value, Value]] = field(default_factory=list[tuple[Value, Value]])


@dataclass(slots=True, eq=False)
class Set:
    """A set or frozenset as its items in file order."""

    items: list[Value] = field(default_factory=list[Value])


@dataclass(slots=True, eq=False)
class Persistent:
    """An object kept outside of the pickle, known here by its persistent id only."""

    id: Value


@dataclass(slots=True, eq=False)
class Object:
    """A call that the pickle asks for, and what it would then do to the result; never carried out.

    Attributes:
        function: what would be called, usually a `Global`.
        arguments: its positional arguments, then its keyword arguments as a `Dict` if there are.
        states: what BUILD would set, in order.
        items: what APPEND(S) and ADDITEMS would add.
        pairs: what SETITEM(S) would set.
    """

    function: Value
    arguments: tuple[Value, ...]
    states: list[Value] = field(default_factory=list["Value"], repr=False)
    items: list[Value] = field(default_factory=list["Value"], repr=False)
    pairs: list[tuple[Value, Value]] = field(
        default_factory=list[tuple["Value", "Value"]], repr=False
    )


@dataclass(frozen=True, slots=True)
class Pickle:
    """A pickle that was read.

    Attributes:
        value: its value.
        end: the offset just past its STOP.
        globals: every global that it names, each once, in order of first use.
        persistent: every object that it refers to by a persistent id, in order.
        calls: every call that it asks for, in order, those that its value does not hold included.
    """

    value: Value
    end: int
    globals: tuple[Global, ...]
    persistent: tuple[Persistent, ...]
    calls: tuple[Object, ...]


class Op(IntEnum):
    """The opcodes of protocols 0 to 5."""

    MARK = ord("(")
    STOP = ord(".")
    POP = ord("0")
    POP_MARK = ord("1")
    DUP = ord("2")
    FLOAT = ord("F")
    INT = ord("I")
    BININT = ord("J")
    BININT1 = ord("K")
    LONG = ord("L")
    BININT2 = ord("M")
    NONE = ord("N")
    PERSID = ord("P")
    BINPERSID = ord("Q")
    REDUCE = ord("R")
    STRING = ord("S")
    BINSTRING = ord("T")
    SHORT_BINSTRING = ord("U")
    UNICODE = ord("V")
    BINUNICODE = ord("X")
    APPEND = ord("a")
    BUILD = ord("b")
    GLOBAL = ord("c")
    DICT = ord("d")
    EMPTY_DICT = ord("}")
    APPENDS = ord("e")
    GET = ord("g")
    BINGET = ord("h")
    INST = ord("i")
    LONG_BINGET = ord("j")
    LIST = ord("l")
    EMPTY_LIST = ord("]")
    OBJ = ord("o")
    PUT = ord("p")
    BINPUT = ord("q")
    LONG_BINPUT = ord("r")
    SETITEM = ord("s")
    TUPLE = ord("t")
    EMPTY_TUPLE = ord(")")
    SETITEMS = ord("u")
    BINFLOAT = ord("G")
    PROTO = 0x80
    NEWOBJ = 0x81
    EXT1 = 0x82
    EXT2 = 0x83
    EXT4 = 0x84
    TUPLE1 = 0x85
    TUPLE2 = 0x86
    TUPLE3 = 0x87
    NEWTRUE = 0x88
    NEWFALSE = 0x89
    LONG1 = 0x8A
    LONG4 = 0x8B
    BINBYTES = ord("B")
    SHORT_BINBYTES = ord("C")
    SHORT_BINUNICODE = 0x8C
    BINUNICODE8 = 0x8D
    BINBYTES8 = 0x8E
    EMPTY_SET = 0x8F
    ADDITEMS = 0x90
    FROZENSET = 0x91
    NEWOBJ_EX = 0x92
    STACK_GLOBAL = 0x93
    MEMOIZE = 0x94
    FRAME = 0x95
    BYTEARRAY8 = 0x96
    NEXT_BUFFER = 0x97
    READONLY_BUFFER = 0x98


def read_pickle(
    data: bytes, position: int = 0, *, limits: Limits | None = None, where: str = "pickle"
) -> Pickle:
    """Read the pickle that starts at `position` of `data`, carrying nothing out.

    Args:
        data: the bytes that hold the pickle; what follows its STOP is left alone.
        position: the offset of its first opcode.
        limits: bounds on its size and on what it builds.
        where: what to call it in errors.

    Raises:
        InputError: it is malformed, cut short or beyond a limit.
    """
    return _Machine(data, position, limits or Limits(), where).run()


class _Malformed(Exception):
    """What is wrong with the opcode at hand."""


class _Machine:
    __slots__ = (
        "calls",
        "data",
        "frame_end",
        "globals",
        "limits",
        "marks",
        "memo",
        "persistent",
        "position",
        "stack",
        "start",
        "where",
    )

    def __init__(self, data: bytes, position: int, limits: Limits, where: str) -> None:
        self.data = data
        self.position = self.start = self.frame_end = position
        self.limits = limits
        self.where = where
        self.stack: list[Value] = []
        self.marks: list[int] = []
        self.memo: dict[int, Value] = {}
        self.globals: dict[Global, None] = {}
        self.persistent: list[Persistent] = []
        self.calls: list[Object] = []

    def run(self) -> Pickle:
        at = self.position
        try:
            for _ in range(self.limits.opcodes):
                at = self.position
                code = self.take(1)[0]
                if code == Op.STOP:
                    return self.finish()
                handler = _HANDLERS[code]
                if handler is None:
                    raise _Malformed(f"0x{code:02x} is no opcode that a checkpoint may hold")
                handler(self)
                if at < self.frame_end < self.position:
                    raise _Malformed("an opcode crosses the end of its frame")
                if len(self.stack) > self.limits.stack:
                    raise _Malformed(f"puts more than {self.limits.stack} values on the stack")
            raise _Malformed(f"has more than {self.limits.opcodes} opcodes")
        except _Malformed as error:
            self.refuse(at, error)

    def refuse(self, at: int, error: _Malformed) -> NoReturn:
        raise InputError(
            f"malformed pickle at byte {at}: {error}",
            where=self.where,
            expected="a pickle as torch.save or torch.jit.save writes it",
        ) from None

    def finish(self) -> Pickle:
        value = self.pop()
        if self.stack or self.marks:
            raise _Malformed("STOP leaves values on the stack")
        return Pickle(
            value,
            self.position,
            tuple(self.globals),
            tuple(self.persistent),
            tuple(self.calls),
        )

    # The bytes

    def take(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self.data):
            raise _Malformed("the pickle is cut short")
        if end - self.start > self.limits.pickle_bytes:
            raise _Malformed(f"has more than {self.limits.pickle_bytes} bytes")
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def number(self, layout: Struct) -> int:
        value: int = layout.unpack(self.take(layout.size))[0]
        return value

    def counted(self, layout: Struct, limit: int) -> bytes:
        size = self.number(layout)
        if not 0 <= size <= limit:
            raise _Malformed(f"a value of {size} bytes, where at most {limit} are accepted")
        return self.take(size)

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.position, self.position + self.limits.text_bytes)
        if end < 0:
            cut = len(self.data) - self.position < self.limits.text_bytes
            raise _Malformed("the pickle is cut short" if cut else "a line without end")
        return self.take(end + 1 - self.position)[:-1]

    # The stack

    def push(self, value: Value) -> None:
        self.stack.append(value)

    def pop(self) -> Value:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise _Malformed("takes more values than the stack holds")
        return self.stack.pop()

    def top(self) -> Value:
        value = self.pop()
        self.stack.append(value)
        return value

    def pop_to_mark(self) -> list[Value]:
        if not self.marks:
            raise _Malformed("takes the values since a mark, but there is none")
        mark = self.marks.pop()
        values = self.stack[mark:]
        del self.stack[mark:]
        return values

    def pop_arguments(self) -> tuple[Value, ...]:
        arguments = self.pop()
        if not isinstance(arguments, tuple):
            raise _Malformed("calls with arguments that are not a tuple")
        return arguments

    def put(self, index: int) -> None:
        if not 0 <= index < self.limits.memo:
            raise _Malformed(f"memo index {index} is beyond {self.limits.memo}")
        self.memo[index] = self.top()

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise _Malformed(f"memo has no entry {index}")
        self.push(self.memo[index])

    def push_global(self, module: Value, name: Value) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise _Malformed("names a global by something that is not text")
        found = Global(module, name)
        self.globals[found] = None
        if len(self.globals) > self.limits.globals:
            raise _Malformed(f"names more than {self.limits.globals} globals")
        self.push(found)

    def push_persistent(self, key: Value) -> None:
        found = Persistent(key)
        self.persistent.append(found)
        self.push(found)

    def push_call(self, function: Value, arguments: tuple[Value, ...]) -> None:
        found = Object(function, arguments)
        if len(self.calls) == self.limits.calls:
            raise _Malformed(f"asks for more than {self.limits.calls} calls")
        self.calls.append(found)
        self.push(found)

    # Opcodes without an argument

    def mark(self) -> None:
        self.marks.append(len(self.stack))

    def drop(self) -> None:
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.pop()

    def pop_mark(self) -> None:
        self.pop_to_mark()

    def dup(self) -> None:
        self.push(self.top())

    def empty_list(self) -> None:
        self.push([])

    def empty_dict(self) -> None:
        self.push(Dict())

    def empty_set(self) -> None:
        self.push(Set())

    def make_list(self) -> None:
        self.push(self.pop_to_mark())

    def make_tuple(self) -> None:
        self.push(tuple(self.pop_to_mark()))

    def make_dict(self) -> None:
        self.push(Dict(_pairs(self.pop_to_mark())))

    def make_frozenset(self) -> None:
        self.push(Set(self.pop_to_mark()))

    def append(self) -> None:
        self.extend([self.pop()])

    def appends(self) -> None:
        self.extend(self.pop_to_mark())

    def extend(self, values: list[Value]) -> None:
        match self.top():
            case list() as target:
                target.extend(values)
            case Object() as target:
                target.items.extend(values)
            case _:
                raise _Malformed("appends to something that is not a list")

    def add_items(self) -> None:
        values = self.pop_to_mark()
        match self.top():
            case Set() | Object() as target:
                target.items.extend(values)
            case _:
                raise _Malformed("adds to something that is not a set")

    def set_item(self) -> None:
        value = self.pop()
        self.update([(self.pop(), value)])

    def set_items(self) -> None:
        self.update(_pairs(self.pop_to_mark()))

    def update(self, pairs: list[tuple[Value, Value]]) -> None:
        match self.top():
            case Dict() | Object() as target:
                target.pairs.extend(pairs)
            case _:
                raise _Malformed("sets entries of something that is not a dictionary")

    def reduce(self) -> None:
        arguments = self.pop_arguments()
        self.push_call(self.pop(), arguments)

    def newobj_ex(self) -> None:
        keywords = self.pop()
        arguments = self.pop_arguments()
        self.push_call(self.pop(), (*arguments, keywords))

    def obj(self) -> None:
        values = self.pop_to_mark()
        if not values:
            raise _Malformed("makes an object without a class")
        self.push_call(values[0], tuple(values[1:]))

    def build(self) -> None:
        state = self.pop()
        target = self.top()
        if not isinstance(target, Object):
            raise _Malformed("sets the state of something that is not an object")
        target.states.append(state)

    def binpersid(self) -> None:
        self.push_persistent(self.pop())

    def stack_global(self) -> None:
        name = self.pop()
        self.push_global(self.pop(), name)

    def memoize(self) -> None:
        self.put(len(self.memo))

    # Opcodes with an argument

    def global_(self) -> None:
        module = _utf8(self.line())
        self.push_global(module, _utf8(self.line()))

    def inst(self) -> None:
        self.global_()
        function = self.pop()
        self.push_call(function, tuple(self.pop_to_mark()))

    def persid(self) -> None:
        self.push_persistent(_utf8(self.line()))

    def proto(self) -> None:
        version = self.take(1)[0]
        if version > 5:
            raise _Malformed(f"protocol {version} is newer than 5")

    def frame(self) -> None:
        if self.position < self.frame_end:
            raise _Malformed("a frame begins inside another")
        size = self.number(_U64)
        if size > len(self.data) - self.position:
            raise _Malformed("a frame reaches past the end")
        self.frame_end = self.position + size


_Handler: TypeAlias = Callable[[_Machine], None]
_U8, _U16, _U32, _U64 = Struct("<B"), Struct("<H"), Struct("<I"), Struct("<Q")
_I32, _F64 = Struct("<i"), Struct(">d")


def _pairs(values: list[Value]) -> list[tuple[Value, Value]]:
    if len(values) % 2:
        raise _Malformed("a key without a value")
    return list(zip(values[::2], values[1::2], strict=True))


def _utf8(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise _Malformed("text that is not UTF-8") from None


def _python2_string(data: bytes) -> str | bytes:
    """Text if it can be, as torch reads the strings that Python 2 wrote."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data


def _signed(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|.?)", re.DOTALL)
_ESCAPED = {b"\\": b"\\", b"'": b"'", b'"': b'"', b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def _unescape(match: re.Match[bytes]) -> bytes:
    escape: bytes = match[1]
    if len(escape) == 3:
        return bytes.fromhex(escape[1:].decode("ascii"))
    if escape not in _ESCAPED:
        raise _Malformed("a string with an unknown escape")
    return _ESCAPED[escape]


def _quoted(line: bytes, _limits: Limits) -> Value:
    if len(line) < 2 or line[:1] not in (b"'", b'"') or line[-1:] != line[:1]:
        raise _Malformed("a string without its quotes")
    return _python2_string(_ESCAPE.sub(_unescape, line[1:-1]))


def _raw_unicode(line: bytes, _limits: Limits) -> Value:
    try:
        text = line.decode("raw-unicode-escape")
        text.encode("utf-8")
    except UnicodeError:
        raise _Malformed("text that is not Unicode") from None
    return text


_DECIMAL_INTEGER = re.compile(rb"-?[0-9]+")
_DECIMAL_FLOAT = re.compile(rb"[-+]?([0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?|inf|nan)")
_CHARACTERS_PER_BYTE = 3
_FLOAT_CHARACTERS = 400


def _decimal(line: bytes, limits: Limits) -> int:
    if not _DECIMAL_INTEGER.fullmatch(line):
        raise _Malformed("a decimal integer that is none")
    short = len(line) <= limits.integer_bytes * _CHARACTERS_PER_BYTE
    value = int(line) if short else None
    if value is None or value.bit_length() >= limits.integer_bytes * 8:
        raise _Malformed(f"an integer of more than {limits.integer_bytes} bytes")
    return value


def _int_or_bool(line: bytes, limits: Limits) -> Value:
    return line == b"01" if line in (b"00", b"01") else _decimal(line, limits)


def _long(line: bytes, limits: Limits) -> Value:
    return _decimal(line.removesuffix(b"L"), limits)


def _float(line: bytes, _limits: Limits) -> Value:
    if len(line) > _FLOAT_CHARACTERS or not _DECIMAL_FLOAT.fullmatch(line):
        raise _Malformed("a decimal number that is none")
    return float(line)


def _literal(value: Value) -> _Handler:
    return lambda machine: machine.push(value)


def _packed(layout: Struct) -> _Handler:
    return lambda machine: machine.push(machine.number(layout))


def _text(layout: Struct, decode: Callable[[bytes], Value]) -> _Handler:
    return lambda machine: machine.push(decode(machine.counted(layout, machine.limits.text_bytes)))


def _blob(layout: Struct) -> _Handler:
    return lambda machine: machine.push(machine.counted(layout, machine.limits.pickle_bytes))


def _integer(layout: Struct) -> _Handler:
    return lambda machine: machine.push(
        _signed(machine.counted(layout, machine.limits.integer_bytes))
    )


def _line(parse: Callable[[bytes, Limits], Value]) -> _Handler:
    return lambda machine: machine.push(parse(machine.line(), machine.limits))


def _tuple_of(size: int) -> _Handler:
    def make(machine: _Machine) -> None:
        values = [machine.pop() for _ in range(size)]
        machine.push(tuple(reversed(values)))

    return make


def _put(layout: Struct) -> _Handler:
    return lambda machine: machine.put(machine.number(layout))


def _get(layout: Struct) -> _Handler:
    return lambda machine: machine.get(machine.number(layout))


def _refused(reason: str) -> _Handler:
    def refuse(_machine: _Machine) -> None:
        raise _Malformed(reason)

    return refuse


_EXTENSION = _refused("names a global by a number of the copyreg extension registry")
_OUT_OF_BAND = _refused("takes an out-of-band buffer, which no file holds")


def _by_opcode(handlers: Iterable[tuple[Op, _Handler]]) -> tuple[_Handler | None, ...]:
    table: list[_Handler | None] = [None] * 256
    for opcode, handler in handlers:
        table[opcode] = handler
    return tuple(table)


_HANDLERS = _by_opcode(
    (
        (Op.NONE, _literal(None)),
        (Op.NEWTRUE, _literal(True)),
        (Op.NEWFALSE, _literal(False)),
        (Op.EMPTY_TUPLE, _literal(())),
        (Op.BININT, _packed(_I32)),
        (Op.BININT1, _packed(_U8)),
        (Op.BININT2, _packed(_U16)),
        (Op.BINFLOAT, _packed(_F64)),
        (Op.LONG1, _integer(_U8)),
        (Op.LONG4, _integer(_I32)),
        (Op.SHORT_BINSTRING, _text(_U8, _python2_string)),
        (Op.BINSTRING, _text(_I32, _python2_string)),
        (Op.SHORT_BINUNICODE, _text(_U8, _utf8)),
        (Op.BINUNICODE, _text(_U32, _utf8)),
        (Op.BINUNICODE8, _text(_U64, _utf8)),
        (Op.SHORT_BINBYTES, _blob(_U8)),
        (Op.BINBYTES, _blob(_U32)),
        (Op.BINBYTES8, _blob(_U64)),
        (Op.BYTEARRAY8, _blob(_U64)),
        (Op.INT, _line(_int_or_bool)),
        (Op.LONG, _line(_long)),
        (Op.FLOAT, _line(_float)),
        (Op.STRING, _line(_quoted)),
        (Op.UNICODE, _line(_raw_unicode)),
        (Op.PUT, lambda machine: machine.put(_decimal(machine.line(), machine.limits))),
        (Op.BINPUT, _put(_U8)),
        (Op.LONG_BINPUT, _put(_U32)),
        (Op.MEMOIZE, _Machine.memoize),
        (Op.GET, lambda machine: machine.get(_decimal(machine.line(), machine.limits))),
        (Op.BINGET, _get(_U8)),
        (Op.LONG_BINGET, _get(_U32)),
        (Op.MARK, _Machine.mark),
        (Op.POP, _Machine.drop),
        (Op.POP_MARK, _Machine.pop_mark),
        (Op.DUP, _Machine.dup),
        (Op.EMPTY_LIST, _Machine.empty_list),
        (Op.LIST, _Machine.make_list),
        (Op.APPEND, _Machine.append),
        (Op.APPENDS, _Machine.appends),
        (Op.EMPTY_DICT, _Machine.empty_dict),
        (Op.DICT, _Machine.make_dict),
        (Op.SETITEM, _Machine.set_item),
        (Op.SETITEMS, _Machine.set_items),
        (Op.EMPTY_SET, _Machine.empty_set),
        (Op.FROZENSET, _Machine.make_frozenset),
        (Op.ADDITEMS, _Machine.add_items),
        (Op.TUPLE, _Machine.make_tuple),
        (Op.TUPLE1, _tuple_of(1)),
        (Op.TUPLE2, _tuple_of(2)),
        (Op.TUPLE3, _tuple_of(3)),
        (Op.GLOBAL, _Machine.global_),
        (Op.STACK_GLOBAL, _Machine.stack_global),
        (Op.REDUCE, _Machine.reduce),
        (Op.NEWOBJ, _Machine.reduce),
        (Op.NEWOBJ_EX, _Machine.newobj_ex),
        (Op.INST, _Machine.inst),
        (Op.OBJ, _Machine.obj),
        (Op.BUILD, _Machine.build),
        (Op.PERSID, _Machine.persid),
        (Op.BINPERSID, _Machine.binpersid),
        (Op.PROTO, _Machine.proto),
        (Op.FRAME, _Machine.frame),
        (Op.EXT1, _EXTENSION),
        (Op.EXT2, _EXTENSION),
        (Op.EXT4, _EXTENSION),
        (Op.NEXT_BUFFER, _OUT_OF_BAND),
        (Op.READONLY_BUFFER, _OUT_OF_BAND),
    )
)
