"""The proof of one GGUF file: format, contract, values and digests, from one reading."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sam3d_gguf.convert.binding import BoundContract, BoundTensor
from sam3d_gguf.convert.claims import (
    native_mhr_names,
    read_mhr_names,
    read_precision,
    read_provenance,
    require_name_counts,
    require_numbers,
    require_sha256,
    text,
)
from sam3d_gguf.convert.contract import load_model_contract
from sam3d_gguf.convert.contract_types import TensorSpec
from sam3d_gguf.convert.cross_read import cross_read
from sam3d_gguf.convert.digests import content_sha256, semantics_sha256
from sam3d_gguf.convert.files import known_values
from sam3d_gguf.convert.gguf_format import GgmlType, GgufValue, ValueType
from sam3d_gguf.convert.gguf_reader import GgufFile, read_gguf
from sam3d_gguf.convert.metadata import (
    SCHEMA_VERSION,
    CompanionDigests,
    Provenance,
    semantics_metadata,
    single_metadata,
)
from sam3d_gguf.convert.mhr_names import MhrNames
from sam3d_gguf.convert.native import load_native_components
from sam3d_gguf.convert.problems import BindingError, naming_file
from sam3d_gguf.convert.rules import Checker, ValueRules, Zero, make_checkers
from sam3d_gguf.convert.stream import CONTENT_KEY, SEMANTICS_KEY, TENSORS_KEY
from sam3d_gguf.extractors.extraction import display_name, known_products
from sam3d_gguf.extractors.files import OpenedFile
from sam3d_gguf.extractors.hashing import Region, hash_file
from sam3d_gguf.extractors.models import OBJECTS, Model
from sam3d_gguf.extractors.progress import QUIET, Progress
from sam3d_gguf.schemas.errors import ContractError, Sam3dError

MODELS: Mapping[str, Model] = {
    "sam3d.body": "body",
    "sam3d.mhr.lod1": "mhr",
    **{f"sam3d.{model}": model for model in OBJECTS},
}
_PREFIX = "character_torch.skeleton.pmi"
_DIGEST_KEYS = frozenset({CONTENT_KEY, SEMANTICS_KEY, TENSORS_KEY})
_BLOCK_TYPES: Mapping[GgmlType, np.dtype[Any]] = {
    GgmlType.F32: np.dtype("<f4"),
    GgmlType.F16: np.dtype("<f2"),
    GgmlType.BF16: np.dtype("<u2"),
    GgmlType.I32: np.dtype("<i4"),
}


_INDEX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Claims:
    """What a file says that it is, held to its contract.

    Attributes:
        role: a model, or a component's name.
        architecture: the value of `general.architecture`.
        gguf: the file's header.
        bound: its contract with all numbers.
        tensors: the contract of each tensor that has one, by name in the file.
        semantics: all metadata that changes results, as the contract gives it.
        names: MHR's names.
        provenance: where a single file says that it comes from.
        values: what fills the templates of a component.
    """

    role: str
    architecture: str
    gguf: GgufFile
    bound: BoundContract
    tensors: Mapping[str, BoundTensor]
    semantics: Mapping[str, GgufValue]
    names: MhrNames | None
    provenance: Provenance | None
    values: Mapping[str, str]

    @property
    def is_official(self) -> bool:
        """Whether every dimension that the file has is the official one."""
        dims = self.bound.dims
        dimensions = self.bound.contract.dimensions
        return all(dims.get(d.name, d.official) == d.official for d in dimensions)

    @property
    def companions(self) -> tuple[CompanionDigests, ...]:
        """The files that a single file names as its companions."""
        return () if self.provenance is None else self.provenance.companions


@dataclass(slots=True)
class FileReport:
    """What a GGUF file is, and all that is wrong with it.

    Attributes:
        name: its base name.
        bytes: its size.
        claims: what it says of itself; None where that is not even consistent.
        sha256, content_sha256, semantics_sha256: recomputed; empty where it did not come so far.
        tensor_sha256: of each tensor's bytes, recomputed.
        problems: what is wrong; the file is good if there is nothing.
    """

    name: str
    bytes: int
    claims: Claims | None = None
    sha256: str = ""
    content_sha256: str = ""
    semantics_sha256: str = ""
    tensor_sha256: dict[str, str] = field(default_factory=dict[str, str])
    problems: list[str] = field(default_factory=list[str])


def verify_file(file: OpenedFile, progress: Progress = QUIET) -> FileReport:
    """Check a GGUF file against everything that it says of itself, and its contract.

    Each byte of the tensors is read once. Nothing is raised for a bad file: see `problems`.
    """
    report = FileReport(display_name(file.path), file.size)
    progress.stage(f"Verify {file.path.name}", file.size)
    try:
        header = read_gguf(file.source)
        cross_read(file, header)
        claims = read_claims(header, str(file.path))
        rules = claims.bound.value_rules()
        _read(file, report, claims, rules, progress)
        report.claims = claims
        _check_digests(report, claims)
        if not report.problems:
            _finish(claims, rules, report.name)
        file.assert_untouched()
    except Sam3dError as error:
        report.problems += error_problems(error, str(file.path))
    return report


def check_indices(file: OpenedFile, claims: Claims) -> None:
    """Check the data of the integer tensors of a single file, which are used to look up others.

    They are small, so that this takes no time beside reading the whole file.

    Raises:
        ContractError: their bytes are not those of `sam3d.tensor_sha256`, or miss the value rules.
    """
    report = FileReport(display_name(file.path), file.size)
    rules = claims.bound.value_rules()
    checks = _Checks(report, claims, rules)
    stated = claims.gguf.metadata[TENSORS_KEY].value
    hashes = dict(
        zip(sorted(claims.gguf.tensors), stated if isinstance(stated, tuple) else (), strict=False)
    )
    for tensor in claims.gguf.tensors.values():
        if tensor.type is not GgmlType.I32:
            continue
        digest = hashlib.sha256()
        for start in range(0, tensor.nbytes, _INDEX_BYTES):
            size = min(_INDEX_BYTES, tensor.nbytes - start)
            block = file.source.pread(tensor.offset + start, size)
            digest.update(block)
            checks.feed(tensor.name, tensor.type, memoryview(block))
        if digest.hexdigest() != hashes.get(tensor.name):
            report.problems.append(f"the tensor {tensor.name} is not the one of {TENSORS_KEY}")
    checks.finish()
    if report.problems:
        raise ContractError(
            "; ".join(report.problems[:8]),
            where=str(file.path),
            action="The file was changed after it was written; convert or fetch it again.",
        )
    with naming_file(str(file.path)):
        _finish(claims, rules, report.name)


def error_problems(error: Sam3dError, path: str) -> list[str]:
    """What is wrong with a file, each on a line of its own that does not name the file again."""
    if isinstance(error, BindingError):
        return [f"{problem.kind}: {problem}" for problem in error.problems]
    return [str(error).removeprefix(f"{path}: ")]


def read_claims(header: GgufFile, where: str) -> Claims:
    """Find the contract that a file says it meets, and hold its header and metadata to it.

    Raises:
        ContractError: it is no file of this project, or does not meet the contract.
    """
    component = text(header.metadata, "sam3d.component")
    if component in load_native_components():
        return _component_claims(header, component, where)
    architecture = text(header.metadata, "general.architecture")
    if architecture not in MODELS:
        raise ContractError(
            f"the architecture is {architecture[:80]!r}", where=where, expected=" or ".join(MODELS)
        )
    return _single_claims(header, MODELS[architecture], where)


def _single_claims(header: GgufFile, model: Model, where: str) -> Claims:
    metadata = header.metadata
    version = metadata.get("sam3d.schema_version")
    if version is None or version.value != SCHEMA_VERSION:
        raise ContractError(
            "the schema version is not one that this tool knows",
            where=where,
            expected=f"sam3d.schema_version {SCHEMA_VERSION}",
        )
    contract = load_model_contract(model)
    provenance = read_provenance(metadata, model, contract, where)
    stated = {key: value.value for key, value in metadata.items()}
    bound = contract.bind_gguf(
        _specs(header),
        contract.stated_dimensions(stated),
        precision=read_precision(metadata, where),
        shared=contract.stated_shared(stated),
        official=provenance.is_pinned,
        where=where,
    )
    _require_published(provenance, where)
    names = read_mhr_names(metadata) if model == "mhr" else None
    if names is not None:
        require_name_counts(names, bound, where)
        require_numbers(names, provenance.numbered, where)
    semantics = semantics_metadata(bound, names)
    expected = single_metadata(provenance, semantics, contract.architecture)
    _require_equal(metadata, expected, where)
    return Claims(
        role=model,
        architecture=contract.architecture,
        gguf=header,
        bound=bound,
        tensors=bound.by_name,
        semantics=semantics,
        names=names,
        provenance=provenance,
        values={},
    )


def _require_published(provenance: Provenance, where: str) -> None:
    """The safetensors of a pinned source can only be the published ones, where there are any."""
    known = known_products() if provenance.source.origin == "pinned" else {}
    for file, sha256 in provenance.safetensors.items():
        if file in known and sha256 != known[file][1]:
            raise ContractError(
                f"the file says that {file} of the pinned source has SHA-256 {sha256}",
                where=where,
                expected=f"the published {known[file][1]}",
            )


def _component_claims(header: GgufFile, component: str, where: str) -> Claims:
    _require_sorted(header, where)
    native = load_native_components()[component]
    values = native.read({key: value.value for key, value in header.metadata.items()})
    _require_native_values(header, values, where)
    bound = native.bind(_specs(header), native.dimensions(values), where=where)
    names = native_mhr_names(values) if "joint_names" in values else None
    if names is not None:
        require_name_counts(names, bound, where)
    tensors = {
        tensor.name: bound.tensors[tensor.source_name]
        for tensor in native.tensors(bound)
        if tensor.source_name is not None
    }
    return Claims(
        role=component,
        architecture=text(header.metadata, "general.architecture"),
        gguf=header,
        bound=bound,
        tensors=tensors,
        semantics=semantics_metadata(bound, names),
        names=names,
        provenance=None,
        values=values,
    )


def _require_native_values(header: GgufFile, values: Mapping[str, str], where: str) -> None:
    """Holds a component's value types, and what stands for sources in it, to what there can be."""
    for key, entry in header.metadata.items():
        if entry.type not in (ValueType.UINT32, ValueType.STRING):
            raise ContractError(f"{key} is of type {entry.type.name}", where=where)
    known = known_values()
    for name, value in values.items():
        if value != known.get(name, value):
            raise ContractError(f"the {name} is {value[:80]!r}", where=where, expected=known[name])
        if name.endswith("_sha256"):
            require_sha256(value, name, where)


def _require_sorted(header: GgufFile, where: str) -> None:
    """The native runtime takes key/values and tensors in the order of their names only."""
    for what, names in (("key/values", header.metadata), ("tensors", header.tensors)):
        if list(names) != sorted(names, key=str.encode):
            raise ContractError(f"the {what} of a component are not sorted", where=where)


def _require_equal(
    metadata: Mapping[str, GgufValue], expected: Mapping[str, GgufValue], where: str
) -> None:
    """Hold all metadata but the digests to what the claims and the contract give."""
    problems: list[str] = []
    for key in sorted(metadata.keys() | expected.keys() | _DIGEST_KEYS):
        if key not in metadata:
            problems.append(f"{key} is missing")
        elif key not in _DIGEST_KEYS and key not in expected:
            problems.append(f"{key} is unknown")
        elif key not in _DIGEST_KEYS and metadata[key] != expected[key]:
            problems.append(f"{key} is not what the contract and the pinned sources give")
    if problems:
        raise ContractError("; ".join(problems[:12]), where=where)


def _read(
    file: OpenedFile,
    report: FileReport,
    claims: Claims,
    rules: ValueRules,
    progress: Progress,
) -> None:
    """Hash the file and its tensors, and check values, in one pass."""
    tensors = sorted(claims.gguf.tensors.values(), key=lambda tensor: tensor.offset)
    checks = _Checks(report, claims, rules)
    digests = hash_file(
        file.source,
        [Region(tensor.offset, tensor.nbytes) for tensor in tensors],
        on_region=lambda index, block: checks.feed(tensors[index].name, tensors[index].type, block),
        progress=progress.advance,
    )
    checks.finish()
    names = (tensor.name for tensor in tensors)
    report.sha256 = digests.sha256
    report.tensor_sha256 = dict(zip(names, digests.regions, strict=True))


class _Checks:
    """The value rules of the tensor that is being read; the first problem of each is kept."""

    def __init__(self, report: FileReport, claims: Claims, rules: ValueRules) -> None:
        self._report = report
        self._claims = claims
        self._rules = rules
        self._name = ""
        self._checkers: list[Checker] = []

    def feed(self, name: str, kind: GgmlType, block: memoryview) -> None:
        """Check the next bytes of a tensor."""
        if name != self._name:
            self.finish()
            self._name = name
            self._checkers = self._rules_of(name)
        values = np.frombuffer(block, _BLOCK_TYPES[kind])
        self._each(lambda checker: checker.feed(values))

    def _rules_of(self, name: str) -> list[Checker]:
        bound = self._claims.tensors.get(name)
        if bound is not None:
            return self._rules.checkers(bound, name)
        # A tensor without a contract is one that the source lacks and the contract adds.
        return make_checkers([Zero()], self._claims.gguf.tensors[name].shape, name)

    def finish(self) -> None:
        """The tensor before has ended."""
        self._each(lambda checker: checker.finish())
        self._checkers = []

    def _each(self, call: Callable[[Checker], None]) -> None:
        try:
            for checker in self._checkers:
                call(checker)
        except ContractError as error:
            self._report.problems.append(str(error))
            self._checkers = []


def _check_digests(report: FileReport, claims: Claims) -> None:
    report.content_sha256 = content_sha256(claims.gguf.tensors, report.tensor_sha256)
    report.semantics_sha256 = semantics_sha256(claims.semantics)
    if claims.provenance is not None:
        report.problems += _digest_problems(report, claims)


def _digest_problems(report: FileReport, claims: Claims) -> Iterator[str]:
    metadata = claims.gguf.metadata
    stated = metadata[TENSORS_KEY].value
    hashes = stated if isinstance(stated, tuple) else ()
    if len(hashes) != len(claims.gguf.tensors):
        yield f"{TENSORS_KEY} has {len(hashes)} entries for {len(claims.gguf.tensors)} tensors"
    for name, sha256 in zip(sorted(claims.gguf.tensors), hashes, strict=False):
        if report.tensor_sha256[name] != sha256:
            yield (
                f"the tensor {name} has SHA-256 {report.tensor_sha256[name]}; "
                f"{TENSORS_KEY} says {str(sha256)[:64]}"
            )
    for key, found in (
        (CONTENT_KEY, report.content_sha256),
        (SEMANTICS_KEY, report.semantics_sha256),
    ):
        if text(metadata, key) != found:
            yield f"{key} is {text(metadata, key)[:64]}, but the file gives {found}"


def _finish(claims: Claims, rules: ValueRules, where: str) -> None:
    rules.finish()
    names = claims.names
    if names is not None and rules.prefix_sizes.get(_PREFIX) != names.prefix_sizes:
        raise ContractError("the prefix sizes are not those of the joint parents", where=where)


def _specs(header: GgufFile) -> dict[str, TensorSpec]:
    return {name: TensorSpec(t.type.name, t.shape) for name, t in header.tensors.items()}
