"""This tool's pins and known answers replaced by those of a test's own files."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tiny_release import Json, read_json, sha256

from sam3d_gguf.manifests import known_answers, sources

_MANIFESTS = Path(known_answers.__file__).parent


def pin(patch: pytest.MonkeyPatch, files: Mapping[str, Path], **answers: Any) -> None:
    """Make files the official ones.

    Args:
        patch: puts the real ones back.
        files: by role.
        answers: known answers of Body by key, such as `backbone_safetensors`, as a path (of a file
            that is right) or a document; `mhr_gguf` and `mhr_tensors` are MHR's.
    """
    _replace(patch, sources, sources.load_sources, "sources.json", _pinned(files))
    known = read_json(_MANIFESTS / "known_answers.json")
    known["mhr"]["gguf"] = _answer(answers.pop("mhr_gguf", None), known["mhr"]["gguf"])
    known["mhr"]["asset_tensors"] = answers.pop("mhr_tensors", [])
    for key in ("backbone_safetensors", "other_safetensors", "backbone_gguf", "pose_branch_gguf"):
        known["body"][key] = _answer(answers.pop(key, None), known["body"][key])
    assert not answers
    _replace(patch, known_answers, known_answers.load_known_answers, "known_answers.json", known)


def _pinned(files: Mapping[str, Path]) -> Json:
    document = read_json(_MANIFESTS / "sources.json")
    groups = [*document["model_repositories"]]
    entries = [entry for group in groups for entry in group["files"]]
    entries += [entry for release in document["releases"] for entry in release["members"]]
    for entry in entries:
        path = files.get(entry["role"])
        if path is not None:
            entry |= {"bytes": path.stat().st_size, "sha256": sha256(path)}
            entry.pop("git_blob_sha1", None)
    return document


def _answer(value: Path | Json | None, before: Json) -> Json:
    match value:
        case None:
            return before
        case Path():
            return {**before, "bytes": value.stat().st_size, "sha256": sha256(value)}
        case _:
            return {**before, **value}


def _replace(patch: pytest.MonkeyPatch, module: Any, load: Any, name: str, document: Json) -> None:
    original = module.package_document

    def package_document(package: str, *path: str, schema_name: str) -> Any:
        if path == (name,):
            return copy.deepcopy(document)
        return original(package, *path, schema_name=schema_name)

    patch.setattr(module, "package_document", package_document)
    load.cache_clear()
