"""The page on the files of SAM 3D Objects, held against the contracts and against converted files."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import code, code_words, fences, read, section, tables
from objects_facts import PARTS
from tiny_objects import moge, request

from sam3d_gguf.convert.contract import Contract, load_model_contract
from sam3d_gguf.convert.contract_types import Semantics, TensorEntry
from sam3d_gguf.convert.gguf_format import GgmlType, GgufTensorSpec, GgufValue
from sam3d_gguf.convert.gguf_reader import read_gguf
from sam3d_gguf.convert.gguf_writer import GgufLayout
from sam3d_gguf.convert.metadata import (
    CompanionDigests,
    Provenance,
    semantics_metadata,
    single_metadata,
)
from sam3d_gguf.convert.objects import convert_objects
from sam3d_gguf.convert.stream import digest_placeholders
from sam3d_gguf.extractors.extraction import SourceIdentity
from sam3d_gguf.extractors.files import open_source
from sam3d_gguf.extractors.models import (
    CONFIG_ROLES,
    MOGE,
    OBJECTS,
    PIPELINE_ROLE,
    ROLES,
    ObjectsModel,
    part,
)
from sam3d_gguf.extractors.products import product_files
from sam3d_gguf.manifests.sources import load_sources
from sam3d_gguf.runtime.objects.components import NAMES
from sam3d_gguf.runtime.objects.report import STAGES

PAGE = read("formats-objects.md")


def header(path: Path) -> dict[str, GgufValue]:
    with open_source(path) as file:
        return dict(read_gguf(file.source).metadata)


def type_name(value: GgufValue) -> str:
    if value.item_type is not None:
        return f"{value.item_type.name.lower()}[]"
    return value.type.name.lower()


def documented(model: str, *, pinned: bool, companions: list[str]) -> dict[str, str]:
    """The keys of a part's file and their types, as the page has them."""
    (table,) = tables(section(PAGE, "Metadata"))
    present = {"always", *(["not `moge`"] if part(model) != "moge" else [])}
    present |= {"pinned"} if pinned else set()
    assert {row[2] for row in table} <= {"always", "not `moge`", "pinned", "companions"}
    found: dict[str, str] = {}
    for key, kind, when, _ in table:
        name = code(key).replace("PART", part(model))
        if when == "companions":
            found |= {name.replace("ROLE", role): kind for role in companions}
        elif when in present:
            found[name] = kind
    keys, _ = tables(section(PAGE, f"`{part(model)}`"))
    return found | {f"sam3d.{model}.{code(row[0])}": row[1] for row in keys}


@pytest.mark.parametrize("name", PARTS)
def test_keys_of_converted_files(objects: Path, name: str) -> None:
    model = f"objects.{name}"
    found = header(objects / f"{name}.gguf")
    companions = [
        key.removeprefix("sam3d.companion.").removesuffix(".architecture")
        for key in found
        if key.startswith("sam3d.companion.") and key.endswith(".architecture")
    ]
    assert {key: type_name(value) for key, value in found.items()} == documented(
        model, pinned=False, companions=companions
    )


def test_keys_of_the_depth_model(tmp_path: Path) -> None:
    model = moge(tmp_path / "model.pt")
    convert_objects(request(tmp_path / "out", parts=("moge",), moge=model))
    found = header(tmp_path / "out" / "moge.gguf")
    assert {key: type_name(value) for key, value in found.items()} == documented(
        "objects.moge", pinned=False, companions=[]
    )


def official(model: ObjectsModel) -> dict[str, GgufValue]:
    """The metadata of a file made from official sources, but for its digests."""
    contract = load_model_contract(model)

    def pinned(role: str) -> SourceIdentity:
        (pin,) = load_sources().with_role(role)
        return SourceIdentity("a", pin.bytes, pin.sha256, "pinned")

    provenance = Provenance(
        model=model,
        source=pinned(ROLES[model]),
        safetensors=dict.fromkeys(product_files(model), "0" * 64),
        precision="source",
        config=pinned(CONFIG_ROLES[model]),
        pipeline=pinned(PIPELINE_ROLE),
        companions=tuple(
            CompanionDigests(c.role, c.architecture, "0" * 64, "0" * 64)
            for c in contract.companions
        ),
    )
    return single_metadata(
        provenance, semantics_metadata(contract.official()), contract.architecture
    )


@pytest.mark.parametrize("model", [model for model in OBJECTS if model != MOGE])
def test_keys_of_official_files(model: ObjectsModel) -> None:
    roles = [c.role for c in load_model_contract(model).companions]
    stated = documented(model, pinned=True, companions=roles)
    digests = {f"sam3d.{name}_sha256" for name in ("content", "semantics", "tensor")}
    assert official(model).keys() == stated.keys() - digests


def test_sizes_of_official_files() -> None:
    """Those that don't depend on whether image encoders are equal."""
    shown = re.findall(
        r"(\w+)\.gguf +│ [\w.]+ +│ ([0-9]+) +│ ([0-9,]+)", read("converting-objects.md")
    )
    assert len(shown) == 4
    for name, count, size in shown:
        model: ObjectsModel = next(m for m in OBJECTS if part(m) == name)
        tensors = load_model_contract(model).official().tensors.values()
        specs = [GgufTensorSpec(t.name, t.stored_shape, GgmlType[t.gguf_dtype]) for t in tensors]
        metadata = official(model) | digest_placeholders(len(specs))
        assert (int(count), size) == (len(specs), f"{GgufLayout.plan(metadata, specs).size:,}")


def constant(item: Semantics) -> str:
    if isinstance(item.value, tuple):
        return f"`{list(item.value)}`"
    return f"`{str(item.value).lower() if item.value_type == 'bool' else item.value}`"


@pytest.mark.parametrize("model", OBJECTS)
def test_values_of_keys(model: str) -> None:
    contract = contract_of(model)
    table, _ = tables(section(PAGE, f"`{part(model)}`"))
    prefix = f"sam3d.{model}."
    expected = [
        [f"`{d.key.removeprefix(prefix)}`", "uint32", f"`{d.official}`", d.description]
        for d in contract.dimensions
        if d.key is not None
    ]
    expected += [
        [
            f"`{s.key.removeprefix(prefix)}`",
            "bool",
            "",
            "Whether the image encoders are equal and stored once",
        ]
        for s in contract.shared
    ]
    expected += [
        [f"`{s.key.removeprefix(prefix)}`", s.value_type, constant(s), ""]
        for s in contract.semantics
    ]
    assert table == expected


def contract_of(model: str) -> Contract:
    return load_model_contract(next(m for m in OBJECTS if m == model))


def shape(entry: TensorEntry) -> str:
    axes = (
        axis.replace("(", "").replace(")", "") if "*" in axis else axis.strip("()")
        for axis in entry.stored_shape
    )
    return f"`[{', '.join(axes)}]`"


@pytest.mark.parametrize("model", OBJECTS)
def test_tensors(model: str) -> None:
    contract = contract_of(model)
    text = section(PAGE, f"`{part(model)}`")
    _, table = tables(text)
    omitted = tuple(entry.prefix for entry in contract.omitted)
    entries = [e for e in contract.entries if not (omitted and e.source.startswith(omitted))]
    assert table == [
        [
            f"`{e.name}`",
            e.dtype,
            shape(e),
            "; ".join(
                words
                for words in (
                    (e.layout or "").replace("_", " "),
                    e.note[:1].lower() + e.note[1:],
                )
                if words
            ),
        ]
        for e in entries
    ]
    (sizes,) = re.findall(r"^Sizes: (.*)\.$", text, re.MULTILINE)
    explained = {
        name: value for name, value in re.findall(r"([A-Z][A-Z0-9_]*) is `([^`]*)`", sizes)
    }
    used = {n for e in entries for n in re.findall(r"[A-Z][A-Z0-9_]*", " ".join(e.stored_shape))}
    assert used <= explained.keys()
    dimensions = {d.name: d for d in contract.dimensions}
    for name, value in explained.items():
        key = dimensions[name].key
        stated = str(dimensions[name].argument) if key is None else key
        assert stated.removeprefix(f"sam3d.{model}.") == value


def test_names_and_layouts_are_those_of_the_contracts() -> None:
    (names,) = tables(section(PAGE, "Names"))
    for model in OBJECTS:
        stated = [
            (code(row[0]), code(row[1])) for row in names if part(model) in code_words(row[2])
        ]
        assert stated == [(rule.prefix, rule.name) for rule in contract_of(model).renames]
    (layouts,) = tables(section(PAGE, "Layouts"))
    used = {e.layout for model in OBJECTS for e in contract_of(model).entries} - {None}
    assert {row[0].replace(" ", "_") for row in layouts} == used


def test_the_order_of_companions() -> None:
    text = section(PAGE, "Companions").split("\n\n")[1]
    order = code_words(text)
    for place, name in enumerate(order):
        contract = contract_of(f"objects.{name}")
        assert [c.role for c in contract.companions] == [f"objects.{n}" for n in order[:place]]


@pytest.mark.parametrize("name", ["ss_decoder", "ss_generator"])
def test_the_program_of_the_formats_page_gives_the_digests(objects: Path, name: str) -> None:
    (program,) = fences(section(read("formats.md"), "Digests"), "python")
    path = objects / f"{name}.gguf"
    done = subprocess.run(
        [sys.executable, "-I", "-c", program, str(path)], capture_output=True, check=True, text=True
    )
    *_, content, semantics = done.stdout.splitlines()
    metadata = header(path)
    assert content == f"content {metadata['sam3d.content_sha256'].value}"
    assert semantics == f"semantics {metadata['sam3d.semantics_sha256'].value}"


def test_stages() -> None:
    (table,) = tables(section(PAGE, "Stages"))
    assert [code(row[0]) for row in table] == list(STAGES)
    for row, (name, stage) in zip(table, STAGES.items(), strict=True):
        assert row[2] == ("its own" if name == "depth" else f"`{stage.component}`")
        assert row[3] == ("yes" if stage.within == name else f"in `{stage.within}`")
    assert {stage.component for stage in STAGES.values()} - {"depth"} <= set(NAMES)
