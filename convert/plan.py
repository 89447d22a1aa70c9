"""What a GGUF file will hold, and where each tensor of it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sam3d_gguf.convert.binding import BoundContract, BoundTensor, Precision
from sam3d_gguf.convert.contract_types import ContractData
from sam3d_gguf.convert.gguf_format import GgmlType, GgufTensorSpec, GgufValue
from sam3d_gguf.convert.native import NativeComponent
from sam3d_gguf.extractors.extraction import ExtractedTensor, Extraction


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of a GGUF file.

    Attributes:
        spec: its name, type and shape there.
        bound: its contract; None for one that the source lacks and the contract adds.
        file, target: the safetensors file and its name there.
        dtype: as that file stores it.
        sha256: of its bytes there; None if it is widened for it, and the file isn't written.
    """

    spec: GgufTensorSpec
    bound: BoundTensor | None
    file: str
    target: str
    dtype: str
    sha256: str | None


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A GGUF file.

    Attributes:
        role: what it is in its release: a model, or a component's name.
        name: its base name.
        contract: with all its numbers.
        metadata: complete but for the digests.
        semantics: the part of the metadata that changes results; not all of it need be in the file.
        tensors: by name.
        carries_digests: whether the metadata gets the digests and the tensors' hashes.
    """

    role: str
    name: str
    contract: BoundContract
    metadata: Mapping[str, GgufValue]
    semantics: Mapping[str, GgufValue]
    tensors: Mapping[str, PlannedTensor]
    carries_digests: bool

    @property
    def architecture(self) -> str:
        """The value of `general.architecture`."""
        return str(self.metadata["general.architecture"].value)


def plan_single(
    extraction: Extraction, bound: BoundContract, precision: Precision
) -> dict[str, PlannedTensor]:
    """The tensors of a single-file GGUF, by their names there."""
    sources = extraction.by_name
    planned: dict[str, PlannedTensor] = {}
    for tensor in bound.tensors.values():
        source = sources[tensor.source_name]
        kind = GgmlType[tensor.gguf_type(precision)]
        spec = GgufTensorSpec(tensor.name, tensor.stored_shape, kind)
        planned[tensor.name] = PlannedTensor(
            spec, tensor, source.file, source.target, source.dtype, source.sha256
        )
    return planned


def stored_once(contract: ContractData, extraction: Extraction) -> frozenset[str]:
    """The keys of the contract's shared tensors that are equal, byte for byte, in a source."""
    tensors = extraction.by_name
    keys: set[str] = set()
    for entry in contract.shared:
        copies = [t for name, t in tensors.items() if name.startswith(entry.prefix)]
        originals = [tensors.get(entry.of + t.name.removeprefix(entry.prefix)) for t in copies]
        if copies and all(map(_equal, copies, originals)):
            keys.add(entry.key)
    return frozenset(keys)


def _equal(first: ExtractedTensor, second: ExtractedTensor | None) -> bool:
    if second is None or first.sha256 is None:
        return False
    mine = (first.source_dtype, first.shape, first.sha256)
    return mine == (second.source_dtype, second.shape, second.sha256)


def plan_component(
    extraction: Extraction, bound: BoundContract, component: NativeComponent
) -> dict[str, PlannedTensor]:
    """The tensors of a native component, by their names there."""
    sources = extraction.by_name
    added = {tensor.target: tensor for tensor in extraction.added}
    planned: dict[str, PlannedTensor] = {}
    for tensor in component.tensors(bound):
        spec = GgufTensorSpec(tensor.name, tensor.shape, GgmlType[tensor.gguf_type])
        if tensor.source_name is None:
            extra = added[tensor.name]
            planned[tensor.name] = PlannedTensor(
                spec, None, extra.file, extra.target, extra.dtype, extra.sha256
            )
            continue
        source = sources[tensor.source_name]
        planned[tensor.name] = PlannedTensor(
            spec,
            bound.tensors[tensor.source_name],
            source.file,
            source.target,
            source.dtype,
            source.sha256,
        )
    return planned
