"""What a GGUF file claims of itself, read from its metadata so that it can be held against it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from sam3d_gguf.convert.binding import BoundContract, Precision
from sam3d_gguf.convert.contract_types import ContractData
from sam3d_gguf.convert.gguf_format import GgufValue
from sam3d_gguf.convert.metadata import (
    COMPANION_PREFIX,
    CONFIG_KEY,
    NUMBERED_KEY,
    PIPELINE_KEY,
    CompanionDigests,
    Provenance,
    safetensors_key,
    source_key,
)
from sam3d_gguf.convert.mhr_names import MhrNames, numbered_lists
from sam3d_gguf.extractors.extraction import SourceIdentity
from sam3d_gguf.extractors.models import CONFIG_ROLES, OBJECTS, PIPELINE_ROLE, ROLES, Model
from sam3d_gguf.extractors.products import product_files
from sam3d_gguf.manifests.sources import load_sources
from sam3d_gguf.schemas.errors import ContractError

Metadata = Mapping[str, GgufValue]
_SHA256 = re.compile("[0-9a-f]{64}")
PRECISIONS: Mapping[str, Precision] = {"source": "source", "f32": "f32"}


def text(metadata: Metadata, key: str) -> str:
    """A string; empty where the key is missing or of another type."""
    value = metadata.get(key)
    return value.value if value is not None and isinstance(value.value, str) else ""


def read_precision(metadata: Metadata, where: str) -> Precision:
    """The precision that the file was converted at.

    Raises:
        ContractError: it states none that there is.
    """
    stated = text(metadata, "sam3d.precision")
    if stated not in PRECISIONS:
        raise ContractError(
            f"sam3d.precision is {stated[:40]!r}", where=where, expected=" or ".join(PRECISIONS)
        )
    return PRECISIONS[stated]


def read_provenance(
    metadata: Metadata, model: Model, contract: ContractData, where: str
) -> Provenance:
    """Where a single file says that it comes from; pinned is only what this tool has a pin for.

    Raises:
        ContractError: it says so in a form that no conversion writes.
    """
    config = pipeline = None
    if model in CONFIG_ROLES:
        config = _identity(metadata, CONFIG_KEY, CONFIG_ROLES[model], where)
    if model in OBJECTS:
        pipeline = _identity(metadata, PIPELINE_KEY, PIPELINE_ROLE, where)
    numbered = metadata.get(NUMBERED_KEY)
    files = product_files(model)
    return Provenance(
        model=model,
        source=_identity(metadata, source_key(model), ROLES[model], where),
        safetensors={name: _sha256(metadata, safetensors_key(name), where) for name in files},
        precision=read_precision(metadata, where),
        config=config,
        pipeline=pipeline,
        companions=tuple(_companions(metadata, contract, where)),
        numbered=() if numbered is None else _strings(numbered),
    )


def read_mhr_names(metadata: Metadata) -> MhrNames:
    """The names and prefix sizes that a single MHR file holds; empty where it does not."""
    sizes = metadata.get("sam3d.mhr.prefix_sizes")
    items = sizes.value if sizes is not None and isinstance(sizes.value, tuple) else ()
    return MhrNames(
        _strings(metadata.get("sam3d.mhr.joint_names")),
        _strings(metadata.get("sam3d.mhr.parameter_names")),
        tuple(item for item in items if isinstance(item, int)),
        (),
    )


def native_mhr_names(values: Mapping[str, str]) -> MhrNames:
    """The same from the templates of the native MHR component."""
    sizes = values["prefix_sizes"].split(",")
    return MhrNames(
        tuple(values["joint_names"].split(",")),
        tuple(values["parameter_names"].split(",")),
        tuple(int(size) for size in sizes if size.isascii() and size.isdecimal()),
        (),
    )


def require_name_counts(names: MhrNames, bound: BoundContract, where: str) -> None:
    """Raises ContractError unless every joint and every parameter has a name of its own."""
    for what, found, dimension in (
        ("joint", names.joints, "J"),
        ("parameter", names.parameters, "PARAMETERS"),
    ):
        count = bound.dims[dimension]
        if len(found) != count or len(set(found)) != count:
            raise ContractError(
                f"there are {len(found)} {what} names, {len(set(found))} of them different",
                where=where,
                expected=str(count),
            )


def require_numbers(names: MhrNames, numbered: Iterable[str], where: str) -> None:
    """Raises ContractError unless the lists that are said to be mere numbers are."""
    said, are = tuple(numbered), numbered_lists(names.joints, names.parameters)
    if said != tuple(what for what in are if what in said):
        raise ContractError(
            f"it says of {', '.join(said)[:80] or 'nothing'} that these are mere numbers",
            where=where,
            expected=f"that of {', '.join(are) or 'none of its lists'}",
        )


def require_sha256(value: str, what: str, where: str) -> str:
    """Returns the value; raises ContractError unless it is 64 lower-case hexadecimal digits."""
    if _SHA256.fullmatch(value) is None:
        raise ContractError(
            f"{what} is {value[:80]!r}", where=where, expected="64 hexadecimal digits"
        )
    return value


def _sha256(metadata: Metadata, key: str, where: str) -> str:
    return require_sha256(text(metadata, key), key, where)


def _identity(metadata: Metadata, key: str, role: str, where: str) -> SourceIdentity:
    size = metadata.get(f"{key}.bytes")
    count = size.value if size is not None and isinstance(size.value, int) else 0
    sha256 = _sha256(metadata, f"{key}.sha256", where)
    pin = load_sources().find(sha256=sha256, size=count)
    known = pin is not None and pin.role == role
    origin: Literal["pinned", "unpinned"] = "pinned" if known else "unpinned"
    return SourceIdentity("", count, sha256, origin)


def _companions(
    metadata: Metadata, contract: ContractData, where: str
) -> Iterator[CompanionDigests]:
    for companion in contract.companions:
        prefix = f"{COMPANION_PREFIX}{companion.role}"
        if any(key.startswith(f"{prefix}.") for key in metadata):
            yield CompanionDigests(
                companion.role,
                companion.architecture,
                _sha256(metadata, f"{prefix}.content_sha256", where),
                _sha256(metadata, f"{prefix}.semantics_sha256", where),
            )


def _strings(value: GgufValue | None) -> tuple[str, ...]:
    if value is None or not isinstance(value.value, tuple):
        return ()
    return tuple(item for item in value.value if isinstance(item, str))
