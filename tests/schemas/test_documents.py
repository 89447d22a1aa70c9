"""Every document schema keeps this project's conventions, and faults are named by pointer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from sam3d_gguf.schemas.documents import schema, schema_names, validate
from sam3d_gguf.schemas.errors import InputError
from sam3d_gguf.schemas.strict_json import JsonValue, loads


def _nodes(node: JsonValue, path: str) -> Iterator[tuple[str, dict[str, JsonValue]]]:
    if isinstance(node, dict):
        yield path, node
        for key, child in node.items():
            yield from _nodes(child, f"{path}/{key}")
    elif isinstance(node, list):
        for i, child in enumerate(node):
            yield from _nodes(child, f"{path}/{i}")


def _bounded(pattern: JsonValue) -> bool:
    """Says whether a pattern alone bounds the length: it repeats nothing without a limit."""
    return isinstance(pattern, str) and not re.search(r"[*+]|,\}", pattern)


@pytest.mark.parametrize("name", schema_names())
def test_schema_is_valid_closed_and_bounded(name: str) -> None:
    document = schema(name)
    Draft202012Validator.check_schema(document)
    assert document["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert document["$id"] == f"urn:sam3d-gguf:schema:{name}"
    for path, node in _nodes(document, ""):
        kind = node.get("type")
        kinds = kind if isinstance(kind, list) else [kind]
        if "object" in kinds:
            closed = node.get("additionalProperties") is False
            assert closed or "maxProperties" in node, path
        if "array" in kinds:
            assert "maxItems" in node and ("items" in node or "prefixItems" in node), path
        if "string" in kinds:
            bounded = {"maxLength", "enum", "const"} & node.keys() or _bounded(node.get("pattern"))
            assert bounded, path
        if "integer" in kinds or "number" in kinds:
            assert {"minimum", "maximum"} <= node.keys() or "enum" in node or "const" in node, path
        pattern = node.get("pattern")
        if isinstance(pattern, str):
            assert pattern.startswith("^") and pattern.endswith("$"), path
            re.compile(pattern)


@pytest.mark.parametrize("name", schema_names())
def test_references_resolve(name: str) -> None:
    names = set(schema_names())
    for path, node in _nodes(schema(name), ""):
        reference = node.get("$ref")
        if isinstance(reference, str):
            urn, _, fragment = reference.partition("#")
            target: Any = schema(urn.removeprefix("urn:sam3d-gguf:schema:") if urn else name)
            assert urn == "" or urn.rpartition(":")[2] in names, path
            for part in fragment.split("/")[1:]:
                target = target[part]


_GOOD = (
    b'{"schema_version": 1, "source_revisions": [{"repository": "a/b", "revision": "%s"}],'
    b' "licenses": [{"name": "L", "sha256": "%s", "files": [{"repository": "a/b", "path": "L"}]}],'
    b' "model_repositories": [{"repository": "a/b", "revision": null, "gated": true, "files":'
    b' [{"role": "r", "path": "d/m.pt", "bytes": null, "sha256": null}]}],'
    b' "releases": []}'
) % (b"0" * 40, b"0" * 64)


def test_a_good_document_passes_through_loads() -> None:
    good = _GOOD.replace(b'"releases": []', b'"releases": [%s]' % _RELEASE)
    assert loads(good, where="s", schema="sources") == loads(good, where="s")


_RELEASE = (
    b'{"name": "R", "repository": "a/b", "tag": "v1", "url": "https://e.org/a.zip",'
    b' "archive": {"role": "r", "path": "a.zip", "bytes": 1, "sha256": "%s"},'
    b' "members": [{"role": "r", "path": "m", "bytes": 1, "sha256": "%s"}]}'
) % (b"0" * 64, b"0" * 64)


@pytest.mark.parametrize(
    ("old", "new", "where", "what"),
    [
        (b'"schema_version": 1', b'"schema_version": 2', "s#/schema_version", "const 1"),
        (b'"schema_version": 1', b'"schema_version": 1.0', "s#/schema_version", "type integer"),
        (b'"schema_version": 1', b'"schema_version": true', "s#/schema_version", "refused"),
        (b'"schema_version": 1', b'"schema_version": 1, "x/y": 0', "s#/x~1y", "unknown"),
        (b'"gated": true', b'"gated": 1', "s#/model_repositories/0/gated", "boolean"),
        (b'"gated": true', b'"gated": true, "z": 0', "s#/model_repositories/0/z", "unknown"),
        (b'"gated": true, ', b"", "s#/model_repositories/0/gated", "is missing"),
        (b"0" * 64, b"0" * 63 + b"G", "s#/licenses/0/sha256", "pattern"),
        (b"0" * 64, b"0" * 64 + b"\\n", "s#/licenses/0/sha256", "refused"),
        (b'"path": "L"', b'"path": "L\\n"', "s#/licenses/0/files/0/path", "Segments of plain"),
        (b'"d/m.pt"', b'"../m.pt"', "s#/model_repositories/0/files/0/path", "Segments of plain"),
        (b'"d/m.pt"', b'"d/.."', "s#/model_repositories/0/files/0/path", "Segments of plain"),
        (b'"d/m.pt"', b'"/etc"', "s#/model_repositories/0/files/0/path", "Segments of plain"),
        (b'"d/m.pt"', b'"d//m"', "s#/model_repositories/0/files/0/path", "Segments of plain"),
        (b'"bytes": null', b'"bytes": -1', "s#/model_repositories/0/files/0/bytes", "minimum"),
    ],
)
def test_faults_are_named_by_pointer(old: bytes, new: bytes, where: str, what: str) -> None:
    data = _GOOD.replace(b'"releases": []', b'"releases": [%s]' % _RELEASE)
    assert old in data
    with pytest.raises(InputError, match=what) as caught:
        loads(data.replace(old, new, 1), where="s", schema="sources")
    assert caught.value.where == where


def test_a_huge_value_is_cut_in_the_message() -> None:
    value: JsonValue = {"schema_version": "x" * 1_000_000}
    with pytest.raises(InputError) as caught:
        validate(value, "sources", where="s")
    assert len(str(caught.value)) < 500
