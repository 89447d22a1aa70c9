"""What the pages state as fact, held against the code, the contracts and converted files."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import typer
from doc_pages import (
    DOCS,
    PAGES,
    ROOT,
    anchors,
    code,
    code_words,
    fences,
    links,
    read,
    section,
    tables,
)
from facts import TINY
from tiny_release import Release, read_json
from typer.testing import CliRunner

from sam3d_gguf.cli import convert, extract, parity, verify
from sam3d_gguf.cli import inspect as inspect_command
from sam3d_gguf.cli import run as run_command
from sam3d_gguf.convert.binding import Precision
from sam3d_gguf.convert.contract import ContractName, load_contract
from sam3d_gguf.convert.contract_types import RuleSpec, Semantics, TensorEntry
from sam3d_gguf.convert.gguf_format import GgmlType, GgufTensorSpec, GgufValue, ValueType
from sam3d_gguf.convert.gguf_reader import GgufFile, read_gguf
from sam3d_gguf.convert.gguf_writer import GgufLayout
from sam3d_gguf.convert.metadata import (
    CompanionDigests,
    Provenance,
    semantics_metadata,
    single_metadata,
)
from sam3d_gguf.convert.mhr_names import MhrNames
from sam3d_gguf.convert.native import load_native_components
from sam3d_gguf.convert.stream import digest_placeholders
from sam3d_gguf.extractors.extraction import SourceIdentity
from sam3d_gguf.extractors.files import open_source
from sam3d_gguf.extractors.models import Model
from sam3d_gguf.extractors.products import product_files
from sam3d_gguf.extractors.sandbox.bubblewrap import WALLS
from sam3d_gguf.extractors.worker import largest_product
from sam3d_gguf.manifests.known_answers import load_known_answers
from sam3d_gguf.manifests.sources import PinnedFile, load_sources
from sam3d_gguf.runtime.tensor_files import TensorFile
from sam3d_gguf.runtime.vocabulary import Vocabulary, load_vocabulary
from sam3d_gguf.schemas.documents import schema, validate
from sam3d_gguf.schemas.strict_json import load_file, loads

FORMATS = read("formats.md")
OBJECTS_FORMATS = read("formats-objects.md")
CONTRACTS: Mapping[Model, ContractName] = {"body": "body", "mhr": "mhr.lod1"}
TITLES: Mapping[Model, str] = {"body": "Body", "mhr": "MHR"}
NO_HASH = "0" * 64


def header(path: Path) -> GgufFile:
    """The header of a GGUF file."""
    with open_source(path) as file:
        return read_gguf(file.source)


def type_name(value: GgufValue) -> str:
    """A value's type as the pages name it."""
    if value.item_type is not None:
        return f"{value.item_type.name.lower()}[]"
    return value.type.name.lower()


# Metadata keys


def provenance_keys(*, model: Model, pinned: bool, mhr: bool, numbered: bool) -> dict[str, str]:
    """The documented keys of a file that are not its model's own, with their types."""
    present = {
        "always": True,
        "pinned": pinned,
        TITLES[model]: True,
        f"pinned {TITLES[model]}": pinned,
        "Body with MHR": model == "body" and mhr,
        "MHR with numbered names": model == "mhr" and numbered,
    }
    (table,) = tables(section(FORMATS, "Metadata"))
    conditions = {row[2] for row in table}
    assert conditions <= present.keys() | {"Body", "MHR", "pinned Body", "pinned MHR"}
    return {code(key): kind for key, kind, when, _ in table if present.get(when)}


def model_keys(model: Model) -> dict[str, str]:
    """The documented keys that change results, with their types."""
    found = tables(section(FORMATS, f"{TITLES[model]} metadata"))
    return {code(row[0]): row[1] for table in found for row in table}


def documented_keys(
    *, model: Model, pinned: bool = False, mhr: bool = True, numbered: bool = True
) -> dict[str, str]:
    """All documented keys of a file, with their types."""
    keys = provenance_keys(model=model, pinned=pinned, mhr=mhr, numbered=numbered)
    assert not keys.keys() & model_keys(model).keys()
    return keys | model_keys(model)


@pytest.mark.parametrize("model", CONTRACTS)
def test_keys_of_converted_files(model: Model, single: Release) -> None:
    path = single.body if model == "body" else single.mhr
    found = {key: type_name(value) for key, value in header(path).metadata.items()}
    assert found == documented_keys(model=model)


def official_metadata(
    model: Model, precision: Precision = "source", *, mhr: bool = True
) -> dict[str, GgufValue]:
    """The metadata of a file made from official sources, with placeholders for unknown hashes."""
    bound = load_contract(CONTRACTS[model]).official()
    sources = load_sources()
    roles = {"body": "body.checkpoint", "mhr": "mhr.asset"}
    names = MhrNames(("a",), ("b",), (1,), ()) if model == "mhr" else None
    config = identity(sources.with_role("body.config")[0]) if model == "body" else None
    companion = CompanionDigests("mhr", "sam3d.mhr.lod1", NO_HASH, NO_HASH)
    provenance = Provenance(
        model=model,
        source=identity(sources.with_role(roles[model])[0]),
        safetensors=dict.fromkeys(product_files(model), NO_HASH),
        precision=precision,
        config=config,
        companions=(companion,) if model == "body" and mhr else (),
    )
    metadata = single_metadata(
        provenance, semantics_metadata(bound, names), bound.contract.architecture
    )
    return metadata | digest_placeholders(len(bound.tensors))


def identity(pin: PinnedFile) -> SourceIdentity:
    """A pinned source."""
    return SourceIdentity(Path(pin.path).name, pin.bytes, pin.sha256, "pinned")


@pytest.mark.parametrize("mhr", [True, False])
@pytest.mark.parametrize("model", CONTRACTS)
def test_keys_of_official_files(model: Model, mhr: bool) -> None:
    found = {key: type_name(v) for key, v in official_metadata(model, mhr=mhr).items()}
    assert found == documented_keys(model=model, pinned=True, mhr=mhr, numbered=False)


@pytest.mark.parametrize("model", CONTRACTS)
def test_the_digest_covers_the_keys_that_the_page_names(model: Model) -> None:
    prefixes = ("sam3d.body.", "sam3d.mhr.", "sam3d.objects.")
    everything = documented_keys(model=model)
    covered = {k for k in everything if k.startswith(prefixes) and k != "sam3d.mhr.numbered"}
    assert covered == model_keys(model).keys()


@pytest.mark.parametrize("model", CONTRACTS)
def test_values_of_keys_that_change_results(model: Model) -> None:
    contract = load_contract(CONTRACTS[model])
    dimensions, *_, constants = tables(section(FORMATS, f"{TITLES[model]} metadata"))
    assert dimensions == [
        [f"`{d.key}`", "uint32", f"`{d.official}`", d.description]
        for d in contract.dimensions
        if d.key is not None
    ]
    assert [row[:3] for row in constants] == [
        [f"`{item.key}`", item.value_type, constant(item)] for item in contract.semantics
    ]
    assert all(row[3] for row in constants)


def constant(item: Semantics) -> str:
    """A constant as the page writes it; long arrays are in the file."""
    if isinstance(item.value, tuple):
        if len(item.value) > 8:
            return f"{len(item.value)} numbers"
        return f"`{list(item.value)}`"
    return f"`{str(item.value).lower() if item.value_type == 'bool' else item.value}`"


def test_keys_of_components(components: Release) -> None:
    (_, keys) = tables(section(FORMATS, "Component GGUFs"))
    stated = [(code(component), code(key), code(value)) for key, component, value in keys]
    assert stated == [
        (component.component, key, str(value))
        for component in load_native_components().values()
        for key, value in component.metadata.items()
    ]
    for file in components.files().values():
        found = header(components.folder / file["name"]).metadata
        assert set(found) == {key for component, key, _ in stated if component == file["role"]}
        kinds = {key: value.type for key, value in found.items()}
        assert {key for key, kind in kinds.items() if kind is not ValueType.STRING} == {
            "general.alignment",
            "sam3d.schema_version",
        }


def test_files_of_components(components: Release) -> None:
    (files, _) = tables(section(FORMATS, "Component GGUFs"))
    stated = {(code(name), code(role), code(kind)) for name, role, kind, _ in files}
    found = components.files().values()
    assert stated == {(file["name"], file["role"], file["architecture"]) for file in found}


# Tensors


def test_body_tensors() -> None:
    contract = load_contract("body")
    _, stated = tables(section(FORMATS, "Body tensors"))
    kinds = {"BF16": "BF16", "F32": "F32", "I64": "I32"}
    assert stated == [
        [f"`{e.name}`", kinds[e.dtype], shape(e), ", ".join(e.parts), rules_and_note(e)]
        for e in contract.entries
    ]
    assert all(entry.name == entry.source for entry in contract.entries)


def test_mhr_tensors() -> None:
    _, stated = tables(section(FORMATS, "MHR tensors"))
    kinds = {"F32": "F32", "I32": "I32", "I64": "I32"}
    assert stated == [
        [f"`{e.name}`", f"`{e.source}`", e.dtype, kinds[e.dtype], shape(e), rules_and_note(e)]
        for e in load_contract("mhr.lod1").entries
    ]


@pytest.mark.parametrize("model", CONTRACTS)
def test_dimensions_in_shapes_are_explained(model: Model) -> None:
    contract = load_contract(CONTRACTS[model])
    text = section(FORMATS, f"{TITLES[model]} tensors")
    explained = {code(row[0]): row[1] for row in tables(text)[0]}
    for dimension in contract.dimensions:
        words = code_words(explained.get(dimension.name, ""))
        if words and dimension.key is not None:
            assert words == [dimension.key]
        elif words and dimension.source == "expression":
            assert words == [dimension.argument]
    used = {name for entry in contract.entries for name in names_in(entry)}
    used |= {n for w in explained.values() for n in re.findall(r"\b[A-Z][A-Z_]*\b", w)} & {
        dimension.name for dimension in contract.dimensions
    }
    assert explained.keys() == used


def names_in(entry: TensorEntry) -> Iterator[str]:
    """The dimensions that an entry names."""
    arguments = (str(value) for rule in entry.rules for value in rule.arguments.values())
    for text in (*entry.shape, *arguments):
        yield from re.findall(r"[A-Z][A-Z_]*", text)


def shape(entry: TensorEntry) -> str:
    """A shape as the page writes it."""
    return f"`[{', '.join(entry.shape)}]`"


def rules_and_note(entry: TensorEntry) -> str:
    """An entry's value rules and note as the page writes them."""
    note = [entry.note[0].lower() + entry.note[1:]] if entry.note else []
    return "; ".join([*map(rule, entry.rules), *note])


def rule(spec: RuleSpec) -> str:
    """A value rule as the page writes it."""
    forms = {
        "index_range": "{minimum} to {maximum}",
        "permutation": "permutation of {minimum} to {maximum}",
        "interval": "{low} to {high}",
        "sorted_unique_coo": "sorted unique COO of {rows} x {columns}",
        "positive": "positive",
        "qkv_bias_mask": "bias mask",
        "parents": "parents",
    }
    return forms[spec.kind].format(**spec.arguments)


def test_types_by_dtype() -> None:
    rows = tables(section(FORMATS, "Tensors"))[0]
    stated = {row[0]: (row[1], row[2]) for row in rows}
    for name in CONTRACTS.values():
        for tensor in load_contract(name).official().tensors.values():
            found = (tensor.gguf_type("source"), tensor.gguf_type("f32"))
            assert found == stated[tensor.source_dtype]
            assert 1 <= len(tensor.shape) <= 4
            assert min(tensor.shape) > 0


def numbered(sentence: str) -> dict[str, int]:
    """The numbers that the first sentence with these words gives to names."""
    (text,) = re.findall(rf"{sentence}([^.;]+)", FORMATS.replace("\n", " "))
    return {name.upper(): int(number) for name, number in re.findall(r"(\w+) ([0-9]+)", text)}


def test_numbers_of_types() -> None:
    tensor_types = numbered("The GGML numbers of these types are")
    assert tensor_types == {name: int(GgmlType[name]) for name in ("F32", "F16", "I32", "BF16")}
    value_types = numbered("The value types in use are")
    assert value_types == {name: int(ValueType[name]) for name in value_types}
    kinds = {kind for model in CONTRACTS for kind in documented_keys(model=model).values()}
    words = {word for kind in kinds for word in kind.replace("[]", " array").split()}
    assert {word.upper() for word in words} == value_types.keys()


@pytest.mark.parametrize("role", ["body", "mhr"])
def test_the_program_on_the_page_gives_the_digests(role: str, single: Release) -> None:
    (program,) = fences(section(FORMATS, "Digests"), "python")
    path = single.body if role == "body" else single.mhr
    done = subprocess.run(
        [sys.executable, "-I", "-c", program, str(path)], capture_output=True, check=True, text=True
    )
    *tensors, content, semantics = done.stdout.splitlines()
    metadata = header(path).metadata
    assert content == f"content {metadata['sam3d.content_sha256'].value}"
    assert semantics == f"semantics {metadata['sam3d.semantics_sha256'].value}"
    assert tuple(line.split()[0] for line in tensors) == metadata["sam3d.tensor_sha256"].value


# Documents


@pytest.mark.parametrize(
    ("title", "number", "name"),
    [
        ("`manifest.json`", 0, "manifest"),
        ("`extraction.json`", 0, "extraction"),
        ("Reports of the commands", 0, "verification"),
        ("Reports of the commands", 1, "inspection"),
        ("`--batch`", 0, "run-batch"),
        ("`--params`", 0, "mhr-parameters"),
        ("`--rules`", 0, "parity-rules"),
        ("`timings.json`", 0, "run-timings"),
        ("`--report`", 0, "parity-report"),
        ("What the commands print", 0, "run-files"),
        ("What the commands print", 1, "run-devices"),
        ("`--batch` of objects", 0, "objects-batch"),
        ("`pose.json`", 0, "objects-pose"),
        ("`report.json`", 0, "objects-report"),
    ],
)
def test_fields_of_documents(title: str, number: int, name: str) -> None:
    page = OBJECTS_FORMATS if name.startswith("objects-") else FORMATS
    table = tables(section(page, title))[number]
    stated = [field for row in table for field in code_words(row[0])]
    assert len(set(stated)) == len(stated)
    required = set(fields(schema(name), ""))
    assert required - set(stated) == set()
    assert set(stated) - required <= nullable(schema(name))


VOCABULARIES: tuple[tuple[str, Vocabulary], ...] = (
    ("`body-output`, version 1", "body-output-v1"),
    ("`body-features`, version 1", "body-features-v1"),
    ("`mhr-output`, version 1", "mhr-output-v1"),
    ("`objects-output`, version 1", "objects-output-v1"),
)


@pytest.mark.parametrize(("title", "name"), VOCABULARIES)
def test_fields_of_results(title: str, name: Vocabulary) -> None:
    page = OBJECTS_FORMATS if name == "objects-output-v1" else FORMATS
    *_, table = tables(section(page, title))
    keys = ("unit", "axes", "space", "description")
    assert table == [
        [
            f"`{field['name']}`",
            field["dtype"],
            f"`[{', '.join(map(str, field['shape']))}]`",
            *(field[key] for key in keys),
        ]
        for field in load_vocabulary(name)["fields"]
    ]
    (spaces, *_) = tables(
        section(page, title if page is OBJECTS_FORMATS else "`result.safetensors`")
    )
    assert {row[5] for row in table} - {""} <= {row[0] for row in spaces}


def test_vocabularies_of_points() -> None:
    (table,) = tables(section(FORMATS, "Joints and keypoints"))
    folder = ROOT / "schemas" / "vocabulary"
    stated = {Path(code(row[0])).name for row in table}
    files = {f"{name}.json" for _, name in VOCABULARIES}
    assert stated | files == {path.name for path in folder.iterdir() if path.suffix == ".json"}
    for row in table:
        words = code_words(row[1])
        document = read_json(folder / Path(code(row[0])).name)
        shared = {"schema_version", "name", "source", "unit", "axes", "space", "hierarchy"}
        listed = words[0].removesuffix("[]")
        assert (set(words) & document.keys() | {listed}) - shared == document.keys() - shared
        assert set(words) >= document[listed][0].keys()
        assert str(len(document[listed])) in row[1]


def test_passes_of_captures() -> None:
    (table,) = tables(section(FORMATS, "Captures"))
    for kind, name in (("body", "expected.safetensors"), ("full", "expected-full.safetensors")):
        with TensorFile(TINY / name) as file:
            found = {".".join(tensor.split(".")[:2]) for tensor in file.tensors}
        assert {code(row[0]) for row in table if code(row[2]) == kind} == found


def test_parts_and_provenance_of_runs(single: Release, tmp_path: Path) -> None:
    models = ["--mhr", str(single.mhr), "--threads", "1"]
    photo = ["--image", str(TINY / "input.png"), "--bbox", "52,8.5,141.25,139"]
    camera = ["--intrinsics", "231.5,226,97.25,78.5", "--out", str(tmp_path / "a")]
    body = ["body", "--model", str(single.body), *models, *photo, *camera]
    assert CliRunner().invoke(run_command.app, body).exit_code == 0
    np.savez(tmp_path / "p.npz", identity=np.zeros((1, 45)), model_parameters=np.zeros((1, 204)))
    mhr = ["mhr", *models, "--params", str(tmp_path / "p.npz"), "--out", str(tmp_path / "b")]
    done = CliRunner().invoke(run_command.app, [*mhr, "--json"])
    validate(loads(done.stdout_bytes, where="files"), "run-files", where="files")
    devices = CliRunner().invoke(run_command.app, ["--list-devices", "--json"])
    validate(loads(devices.stdout_bytes, where="devices"), "run-devices", where="devices")
    timings = [
        cast("dict[str, Any]", load_file(tmp_path / name / "timings.json", schema="run-timings"))
        for name in "ab"
    ]
    _, parts = tables(section(FORMATS, "`timings.json`"))
    stated = {word for row in parts for word in code_words(row[0])}
    assert stated == {part for each in timings for part in each["seconds"]}
    (table,) = tables(section(FORMATS, "Provenance"))
    assert {word for row in table for word in code_words(row[0])} == timings[0]["provenance"].keys()
    with TensorFile(tmp_path / "a" / "result.safetensors") as file:
        fields = {field["name"] for field in load_vocabulary("body-output-v1")["fields"]}
        known = {"schema", "inference_type", "intrinsics", *timings[0]["provenance"]}
        assert file.metadata.keys() == known | fields
        assert file.metadata["schema"] == "body-output 1"
        assert set(json.loads(file.metadata["bbox"])) == {"unit", "axes", "space", "description"}


def nullable(document: Mapping[str, Any]) -> set[str]:
    """The objects that may be null."""
    properties: Mapping[str, Any] = document["properties"]
    return {name for name, entry in properties.items() if "null" in entry.get("type", "")}


def fields(node: Any, path: str) -> Iterator[str]:
    """The paths of all values in a document of this schema."""
    if node.get("properties"):
        for name, child in node["properties"].items():
            yield from fields(resolved(child), f"{path}.{name}" if path else name)
        return
    items = resolved(node.get("items", {}))
    if "properties" in items:
        yield from fields(items, f"{path}[]")
        return
    yield path


def resolved(node: Any) -> Any:
    """A schema, or the one of this repository that it refers to."""
    reference = node.get("$ref", "")
    if reference.endswith("#/$defs/tool"):
        return {"properties": {"name": {}, "version": {}}}
    return {} if reference else node


# Options


def options(command: str) -> list[str]:
    """The options that a command's help lists."""
    name, *sub = command.split()
    apps = {
        "sam3d-convert": convert.app,
        "sam3d-extract": extract.app,
        "sam3d-verify": verify.app,
        "sam3d-inspect": inspect_command.app,
        "sam3d-run": run_command.app,
        "sam3d-parity": parity.app,
    }
    app: typer.Typer = apps[name]
    done = CliRunner().invoke(app, [*sub, "--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    return sorted(re.findall(r"(?<=\s)--?[a-z][a-z0-9-]*(?=\s{2})", done.stdout))


@pytest.mark.parametrize(
    ("page", "numbers", "command"),
    [
        ("convert.md", (0,), "sam3d-convert body"),
        ("convert.md", (1,), "sam3d-convert mhr"),
        ("convert.md", (2,), "sam3d-extract body"),
        ("convert.md", (2,), "sam3d-extract mhr"),
        ("verify.md", (0,), "sam3d-verify"),
        ("inspect.md", (0,), "sam3d-inspect"),
        ("converting-objects.md", (0,), "sam3d-convert objects"),
        ("converting-objects.md", (1,), "sam3d-extract objects"),
        ("running.md", (0, 2), "sam3d-run body"),
        ("running.md", (1, 2), "sam3d-run mhr"),
        ("running.md", (3,), "sam3d-run"),
        ("running.md", (4,), "sam3d-parity"),
        ("objects.md", (0,), "sam3d-run objects"),
    ],
)
def test_options(page: str, numbers: tuple[int, ...], command: str) -> None:
    found = tables(section(read(page), "Options"))
    rows = [row for number in numbers for row in found[number]]
    stated = [word.split()[0] for row in rows for word in code_words(row[0])]
    assert sorted(stated) == options(command)
    assert {"--help", "-h", "--json", "--debug"} <= set(stated)
    assert ("--sandbox" in stated) is (page not in ("running.md", "objects.md"))


# Numbers


def limit(text: str) -> int:
    """A number as security.md writes it."""
    units = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "bytes": 1, "s": 1, "": 1}
    units |= {"pixel": 1, "pixels": 1}
    number, _, unit = text.replace(",", "").partition(" ")
    return int(number) * units[unit]


def value_of(path: str) -> Any:
    """The value of a constant, or of a dataclass's default, below `sam3d_gguf`."""
    parts = path.split(".")
    value: Any = importlib.import_module("sam3d_gguf")
    for index, part in enumerate(parts):
        known = getattr(value, "__dataclass_fields__", {})
        if part in known:
            value = known[part].default
        elif inspect.ismodule(value) and not hasattr(value, part):
            value = importlib.import_module(".".join(("sam3d_gguf", *parts[: index + 1])))
        else:
            value = getattr(value, part)
    return value


def test_limits() -> None:
    rows = [row for table in tables(section(read("security.md"), "Limits")) for row in table]
    paths = [code(row[2]) for row in rows]
    assert len(set(paths)) == len(paths) > 30
    for _, text, path in rows:
        if code(path) == "extractors.worker.largest_product":
            assert text == "4 times the legacy file, and 64 MiB"
            assert [largest_product(n) - (64 << 20) for n in (0, 1, 9)] == [0, 4, 36]
        else:
            assert limit(text) == value_of(code(path)), path


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        ("extractors.limits", "Limits"),
        ("extractors.sandbox.job", "SandboxLimits"),
        ("convert.gguf_format", ""),
    ],
)
def test_every_limit_is_named(module: str, kind: str) -> None:
    prefix = f"{module}.{kind}." if kind else f"{module}."
    loaded = importlib.import_module(f"sam3d_gguf.{module}")
    names = (
        set(getattr(loaded, kind).__dataclass_fields__)
        if kind
        else {name for name in vars(loaded) if name.startswith("MAX_")}
    )
    rows = [row for table in tables(section(read("security.md"), "Limits")) for row in table]
    stated = {code(row[2]).removeprefix(prefix) for row in rows if prefix in row[2]}
    # The sum of all bytes is bounded by the file's own size, in a row of its own.
    assert stated == names - {"tensor_bytes", "file_bytes", "MAX_BYTES"}


def test_walls() -> None:
    (table,) = tables(section(read("security.md"), "The sandbox"))
    stated = {word for row in table for word in code_words(row[1])}
    assert stated == {option for option in WALLS if option.startswith("--")}


def test_official_files() -> None:
    (table,) = tables(section(read("convert.md"), "Input"))
    roles = ("body.checkpoint", "body.config", "mhr.asset")
    pins = [load_sources().with_role(role) for role in roles]
    assert [[code(row[0]), row[2], code(row[3])] for row in table] == [
        [pin.path, f"{pin.bytes:,}", pin.sha256] for pin, *_ in pins
    ]
    for row, same in zip(table, pins, strict=True):
        assert {pin.repository for pin in same} == set(code_words(row[1]))
    assert all(len({(pin.path, pin.sha256) for pin in same}) == 1 for same in pins)


def test_official_files_of_objects() -> None:
    (table,) = tables(section(read("converting-objects.md"), "Input"))
    pins = [f for f in load_sources().files if f.repository == "facebook/sam-3d-objects"]
    assert table == [[f"`{f.path}`", f"{f.bytes:,}", f"`{f.sha256}`"] for f in pins]
    assert {f.revision for f in pins} <= set(code_words(read("converting-objects.md")))


def test_published_safetensors() -> None:
    table = tables(section(FORMATS, "Canonical safetensors"))[1]
    answers = load_known_answers()
    known = {
        "backbone.safetensors": answers.body_backbone_safetensors,
        "other.safetensors": answers.body_other_safetensors,
    }
    assert table == [
        [f"`{name}`", str(file.tensors), f"{file.bytes:,}", f"`{file.sha256}`"]
        for name, file in known.items()
    ]


@pytest.mark.parametrize(("precision", "row"), [("source", 0), ("f32", 1)])
def test_sizes_of_the_official_body_file(precision: Precision, row: int) -> None:
    bound = load_contract("body").official()
    metadata = official_metadata("body", precision)
    specs = [
        GgufTensorSpec(t.name, t.shape, GgmlType[t.gguf_type(precision)])
        for t in bound.tensors.values()
    ]
    size = GgufLayout.plan(metadata, specs).size
    (table,) = tables(section(read("convert.md"), "Precisions"))
    assert table[row][0].startswith(f"`{precision}`")
    assert table[row][2] == f"{size:,} bytes"
    if precision == "source":
        pages = (read("convert.md"), read("verify.md"), (ROOT / "README.md").read_text())
        shown = {n for text in pages for n in re.findall(r"body\.gguf .*?│ ([0-9,]{9,})", text)}
        assert shown == {f"{size:,}"}


def test_numbers_in_words() -> None:
    answers = load_known_answers()
    assert f"all {answers.body_checkpoint.tensors:,}\ntensors of the Body checkpoint" in FORMATS
    assert f"{len(answers.mhr_tensors)} tensors of the MHR asset" in read("security.md")
    used = {e.source for e in load_contract("mhr.lod1").entries}
    assert used <= answers.mhr_tensors.keys()
    assert f"and {len(used)} of the MHR asset's" in FORMATS.replace("\n", " ")


# References


def targets() -> Iterator[tuple[Path, str]]:
    """Each link of a page to this repository."""
    for page in PAGES:
        for target in links(page.read_text()):
            if "://" not in target:
                yield page, target


@pytest.mark.parametrize(
    ("page", "target"), list(targets()), ids=lambda x: str(getattr(x, "name", x))
)
def test_links(page: Path, target: str) -> None:
    name, _, anchor = target.partition("#")
    path = page.parent / name if name else page
    assert path.is_file()
    if anchor:
        assert anchor in anchors(path.read_text())


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {target.partition("#")[0] for target in links((ROOT / "README.md").read_text())}
    assert {f"docs/{page.name}" for page in DOCS.glob("*.md")} <= linked


FOLDERS = (
    *("cli", "convert", "extractors", "manifests", "runtime", "schemas"),
    *("tests", "benchmarks", "docs"),
)
WRITTEN = {"benchmarks/results.json", "benchmarks/results-run.json"}
"""What only a command makes."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_and_names_exist(page: Path) -> None:
    for word in code_words(page.read_text()):
        if word.startswith(tuple(f"{folder}/" for folder in FOLDERS)) and " " not in word:
            path = word.rstrip("/")
            assert path in WRITTEN or list(ROOT.glob(path)), word
        if re.fullmatch(r"sam3d_gguf(\.\w+)+", word):
            assert value_of(word.removeprefix("sam3d_gguf.")) is not None


def test_folders() -> None:
    (table,) = tables(section(read("architecture.md"), "Folders"))
    stated = {code(row[0]).rstrip("/") for row in table}
    assert stated >= set(FOLDERS) | {"sam3d_gguf"}
    package = {path.name for path in (ROOT / "sam3d_gguf").iterdir() if path.is_symlink()}
    assert package <= stated


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_imports_in_programs(page: Path) -> None:
    for program in fences(page.read_text(), "python"):
        for node in ast.walk(ast.parse(program)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names)


def test_the_program_for_python_users_gives_parameters_that_exist() -> None:
    (program,) = fences(section(read("convert.md"), "From Python"), "python")
    calls = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Call)]
    (request,) = (c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "Request")
    parameters = inspect.signature(value_of("convert.request.Request")).parameters
    assert {keyword.arg for keyword in request.keywords} <= parameters.keys()


def test_memory_of_the_official_models() -> None:
    text = section(read("running.md"), "What it takes")
    wording: dict[Model, str] = {"body": "GiB for the official Body", "mhr": "GiB for MHR"}
    for model, words in wording.items():
        bound = load_contract(CONTRACTS[model]).official()
        size = 4 * sum(math.prod(tensor.shape) for tensor in bound.tensors.values()) / 2**30
        (stated,) = re.findall(rf"([0-9.]+) {words}", text)
        assert float(stated) == pytest.approx(size, rel=0.02)


@pytest.mark.parametrize(
    ("page", "title"),
    [
        ("convert.md", "Errors"),
        ("converting-objects.md", "Errors"),
        ("running.md", "Troubleshooting"),
    ],
)
def test_error_messages_exist(page: str, title: str) -> None:
    (table,) = tables(section(read(page), title))
    known = set(strings())
    for row in table:
        for message in code_words(row[0]):
            for piece in message.split("..."):
                assert says(known, piece.strip().removesuffix(":")), message


def says(known: set[str], words: str) -> bool:
    """Whether a string of the code has these words, or ends in some and another begins with the rest.

    The second case is a message into which a name or a kind of file is put.
    """
    if any(words in text for text in known):
        return True
    cuts = [match.end() for match in re.finditer(" ", words)]
    return any(
        any(text.endswith(words[:at]) for text in known)
        and any(text.startswith(words[at:]) for text in known)
        for at in cuts
    )


def strings() -> Iterator[str]:
    """Every string of the code, those that an f-string has between its values included."""
    for folder in ("cli", "convert", "extractors", "runtime", "schemas"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_recipes_exist(page: Path) -> None:
    recipes = re.findall(
        r"^([a-z][a-z-]*)\b[^:\n]*:(?!=)", (ROOT / "Justfile").read_text(), re.MULTILINE
    )
    for name in re.findall(r"(?:\bjust just |`just )([a-z][a-z-]*)", page.read_text()):
        assert name in recipes
