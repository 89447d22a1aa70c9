"""The strict component files of the native C++ runtime, contract version 1.

>>> component = load_native_components()["body.dinov3_backbone"]
>>> component.strip_prefix
'backbone.encoder.'

A component holds exactly its metadata keys and exactly the tensors of one part of a model, F32
except for integers, which are I32. A metadata string is a template: `{name}` is filled at
conversion, `{NAME}` with a bound dimension.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

from sam3d_gguf.convert.binding import BoundContract
from sam3d_gguf.convert.contract import ContractName, load_contract
from sam3d_gguf.convert.contract_types import TensorSpec
from sam3d_gguf.convert.problems import BindingError, Problem, shape_text
from sam3d_gguf.schemas.documents import package_document
from sam3d_gguf.schemas.errors import ContractError

_PLACEHOLDER = re.compile(r"\{([A-Za-z0-9_]+)\}")
_MAX_STRING_BYTES = 65536


@dataclass(frozen=True, slots=True)
class NativeTensor:
    """A tensor of a component.

    Attributes:
        name: in the component.
        source_name: in the source; None for one that the contract adds.
        gguf_type: F32 or I32.
        shape: PyTorch order.
    """

    name: str
    source_name: str | None
    gguf_type: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NativeComponent:
    """A component file: its metadata templates by key, and the part of the model it holds."""

    component: str
    contract: ContractName
    part: str
    strip_prefix: str
    metadata: Mapping[str, str | int]

    @property
    def placeholders(self) -> frozenset[str]:
        """The names that `render` needs."""
        templates = (t for t in self.metadata.values() if isinstance(t, str))
        return frozenset(name for t in templates for name in _PLACEHOLDER.findall(t))

    def render(self, values: Mapping[str, str | int]) -> dict[str, str | int]:
        """Returns the metadata, sorted by key; int values are UINT32, others STRING.

        Args:
            values: what each placeholder stands for.

        Raises:
            ContractError: a string is not 1 to 65536 bytes of printable ASCII.
            KeyError: a placeholder has no value.
        """
        result: dict[str, str | int] = {}
        for key, template in sorted(self.metadata.items()):
            if isinstance(template, int):
                result[key] = template
                continue
            text = _PLACEHOLDER.sub(lambda match: str(values[match[1]]), template)
            if not 0 < len(text) <= _MAX_STRING_BYTES or not (
                text.isascii() and text.isprintable()
            ):
                raise ContractError(
                    "the value is not one that a component may hold",
                    where=f"{self.component} {key}",
                    expected=f"1 to {_MAX_STRING_BYTES} printable ASCII characters",
                )
            result[key] = text
        return result

    def read(self, metadata: Mapping[str, object]) -> dict[str, str]:
        """Returns what the placeholders stand for in the metadata of a component.

        Raises:
            ContractError: a key is missing, unknown, or its value does not fit its template.
        """
        unknown = sorted(metadata.keys() ^ self.metadata.keys())
        if unknown:
            fault = "unknown" if unknown[0] in metadata else "missing"
            raise ContractError(f"the metadata key {unknown[0]!r} is {fault}", where=self.component)
        values: dict[str, str] = {}
        for key, template in self.metadata.items():
            found = _match(template, metadata[key])
            if found is None:
                raise ContractError(
                    f"the metadata value {str(metadata[key])[:80]!r} does not fit",
                    where=f"{self.component} {key}",
                    expected=str(template),
                )
            values |= found
        return values

    def dimensions(self, values: Mapping[str, str]) -> dict[str, int]:
        """Returns the dimensions among what `read` has returned."""
        return {name: int(value) for name, value in values.items() if name.isupper()}

    def tensors(self, bound: BoundContract) -> tuple[NativeTensor, ...]:
        """Returns the tensors of the component at bound dimensions, sorted by name."""
        found = [
            NativeTensor(self._name(t.name), t.source_name, t.gguf_type("f32"), t.shape)
            for t in bound.part(self.part)
        ]
        found += [
            NativeTensor(self._name(a.source_name), None, "F32", a.shape)
            for a in bound.added
            if a.part == self.part
        ]
        return tuple(sorted(found, key=lambda tensor: tensor.name))

    def bind(
        self,
        tensors: Mapping[str, TensorSpec],
        dims: Mapping[str, int],
        *,
        official: bool = False,
        where: str = "tensors",
    ) -> BoundContract:
        """Binds the contract to the tensors of a component file.

        Args:
            tensors: GGUF type and PyTorch shape of every tensor of the file.
            dims: the dimensions that its metadata states (see `dimensions`).
            official: the dimensions must be the official ones.
            where: what errors call the file.

        Raises:
            BindingError: one error with everything that is wrong.
        """
        contract = load_contract(self.contract)
        added = {self._name(a.source) for a in contract.added if a.part == self.part}
        named = {self.strip_prefix + n: s for n, s in tensors.items() if n not in added}
        bound = contract.bind_gguf(
            named,
            dims,
            precision="f32",
            parts=frozenset((self.part,)),
            official=official,
            where=where,
        )
        wanted = {t.name: t for t in self.tensors(bound) if t.name in added}
        problems: list[Problem] = []
        for name, tensor in wanted.items():
            expected, spec = shape_text(tensor.gguf_type, tensor.shape), tensors.get(name)
            if spec is None:
                problems.append(Problem("missing", name, "", expected))
            elif (spec.dtype, spec.shape) != (tensor.gguf_type, tensor.shape):
                found = shape_text(spec.dtype, spec.shape)
                problems.append(Problem("reshaped", name, found, expected))
        if problems:
            raise BindingError(problems, contract=self.component, where=where)
        return bound

    def _name(self, name: str) -> str:
        return name.removeprefix(self.strip_prefix)


@functools.cache
def load_native_components() -> Mapping[str, NativeComponent]:
    """Returns the components by name."""
    document = package_document(
        "sam3d_gguf.schemas", "contracts", "native-v1.json", schema_name="native-components"
    )
    components = (
        NativeComponent(
            c["component"],
            cast("ContractName", c["contract"]),
            c["part"],
            c["strip_prefix"],
            MappingProxyType({m["key"]: m["value"] for m in c["metadata"]}),
        )
        for c in document["components"]
    )
    return MappingProxyType({component.component: component for component in components})


def _match(template: str | int, value: object) -> dict[str, str] | None:
    if isinstance(template, int):
        return {} if type(value) is int and value == template else None
    if not isinstance(value, str):
        return None
    pieces = _PLACEHOLDER.split(template)
    names = pieces[1::2]
    patterns = ["([1-9][0-9]{0,9})" if name.isupper() else "(.+)" for name in names]
    regex = re.escape(pieces[0])
    for pattern, literal in zip(patterns, pieces[2::2], strict=True):
        regex += pattern + re.escape(literal)
    match = re.fullmatch(regex, value)
    return None if match is None else dict(zip(names, match.groups(), strict=True))
