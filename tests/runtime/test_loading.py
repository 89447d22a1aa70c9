"""A model file is refused before anything is allocated, by the name of what is wrong."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from facts import TINY
from tiny_release import Release

from sam3d_gguf.convert.contract import ContractName, load_contract
from sam3d_gguf.convert.gguf_reader import read_gguf
from sam3d_gguf.convert.verify_file import check_indices, read_claims
from sam3d_gguf.extractors.files import open_source
from sam3d_gguf.extractors.models import Model
from sam3d_gguf.runtime.body import BodyModel
from sam3d_gguf.runtime.ggml.backend import open_backend
from sam3d_gguf.runtime.ggml.library import load_library
from sam3d_gguf.runtime.loading import check_companion, load_weights
from sam3d_gguf.runtime.weights import Weights
from sam3d_gguf.schemas.errors import ContractError, InputError

PHOTO = TINY / "input.png"


def changed(path: Path, folder: Path, old: bytes, new: bytes) -> Path:
    data = path.read_bytes()
    assert data.count(old) == 1
    target = folder / path.name
    target.write_bytes(data.replace(old, new))
    return target


def digest(weights: Weights, key: str) -> bytes:
    return str(weights.metadata[key]).encode()


@pytest.mark.parametrize("key", ["sam3d.content_sha256", "sam3d.semantics_sha256"])
def test_a_wrong_digest_is_refused(single: Release, tmp_path: Path, key: str) -> None:
    with load_weights(single.body, "body") as weights:
        found = digest(weights, key)
    other = b"0" * 64
    path = changed(single.body, tmp_path, found, other)
    with pytest.raises(ContractError, match=key):
        load_weights(path, "body")


def test_changed_semantics_are_refused(single: Release, tmp_path: Path) -> None:
    path = changed(single.body, tmp_path, b"sqrt(width^2+height^2)", b"sqrt(width^2-height^2)")
    with pytest.raises(ContractError, match="default_focal_length"):
        load_weights(path, "body")


def test_changed_data_are_refused_when_verified(single: Release, tmp_path: Path) -> None:
    data = bytearray(single.mhr.read_bytes())
    with load_weights(single.mhr, "mhr", verify=True) as weights:
        data[weights.tensor("identity.base").offset] ^= 1
    path = tmp_path / "mhr.gguf"
    path.write_bytes(data)
    load_weights(path, "mhr").close()
    with pytest.raises(ContractError, match=r"identity\.base"):
        load_weights(path, "mhr", verify=True)


RUN: tuple[Model, ...] = ("body", "mhr")
"""The models that can be run."""


def indices(role: Model) -> list[str]:
    """The integer tensors of a model."""
    name: ContractName = "body" if role == "body" else "mhr.lod1"
    return [e.name for e in load_contract(name).entries if e.dtype in ("I32", "I64")]


@pytest.mark.parametrize("value", [-5, 2**31 - 1])
@pytest.mark.parametrize(("role", "name"), [(role, name) for role in RUN for name in indices(role)])
def test_changed_indices_are_always_refused(
    single: Release, tmp_path: Path, role: Model, name: str, value: int
) -> None:
    """Also where the hashes were made to fit: nothing may be looked up outside of a tensor."""
    source = single.body if role == "body" else single.mhr
    with load_weights(source, role) as weights:
        tensor, place = weights.tensor(name), sorted(weights.tensors).index(name)
    data = bytearray(source.read_bytes())
    start, end = tensor.offset, tensor.offset + 4 * tensor.elements
    data[start : start + 4] = value.to_bytes(4, "little", signed=True)
    path = tmp_path / "changed.gguf"
    path.write_bytes(data)
    with pytest.raises(ContractError, match=f"{re.escape(name)} is not the one of"):
        load_weights(path, role)
    after = hashlib.sha256(data[start:end]).hexdigest()
    with open_source(path) as opened:
        claims = read_claims(read_gguf(opened.source), str(path))
        key = "sam3d.tensor_sha256"
        stated = claims.gguf.metadata[key]
        assert isinstance(stated.value, tuple)
        hashes = (*stated.value[:place], after, *stated.value[place + 1 :])
        forged = dataclasses.replace(stated, value=hashes)
        header = dataclasses.replace(claims.gguf, metadata={**claims.gguf.metadata, key: forged})
        with pytest.raises(ContractError) as caught:
            check_indices(opened, dataclasses.replace(claims, gguf=header))
    assert "is not the one of" not in str(caught.value)


@pytest.mark.parametrize("key", ["sam3d.content_sha256", "sam3d.semantics_sha256"])
def test_another_companion_is_refused(single: Release, key: str) -> None:
    with load_weights(single.body, "body") as body, load_weights(single.mhr, "mhr") as mhr:
        check_companion(body, mhr)
        other = dataclasses.replace(mhr, metadata={**mhr.metadata, key: "0" * 64})
        with pytest.raises(ContractError, match="companion"):
            check_companion(body, other)


def test_components_are_no_single_file(components: Release) -> None:
    path = components.folder / "mhr.lod1.gguf"
    files = [path] if path.exists() else sorted(components.folder.glob("*.gguf"))
    with pytest.raises(ContractError, match="layout single"):
        load_weights(files[0], "mhr")


def test_a_widened_model_runs_too(single_f32: Release, single: Release) -> None:
    box = [[52.0, 8.5, 141.25, 139.0]]
    results: list[bytes] = []
    for release in (single, single_f32):
        with BodyModel.load(release.body, mhr=release.mhr, threads=1) as model:
            results.append(model(TINY / "input.png", box)["pred_vertices"].tobytes())
    assert results[0] == results[1]


def test_links_and_missing_files_are_refused(single: Release, tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(single.body)
    for path in (link, tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(InputError):
            load_weights(path, "body")


# In a process of its own, which a mapped page beyond the file's end would end.
_CUT = """
import os, sys
from sam3d_gguf.runtime.body import BodyModel
body, mhr, photo = sys.argv[1:]
box = [[52, 8.5, 141.25, 139]]
with BodyModel.load(body, mhr=mhr, threads=2, precision="PRECISION") as model:
    before = model(photo, box)["pred_vertices"].tobytes()
    with open(body, "r+b") as file:
        file.write(bytes(os.stat(body).st_size))
    os.truncate(mhr, 0)
    print(model(photo, box)["pred_vertices"].tobytes() == before)
"""


@pytest.mark.parametrize("precision", ["strict-f32", "fast"])
def test_a_loaded_model_needs_its_files_no_more(
    single: Release, tmp_path: Path, precision: str
) -> None:
    copy = single.copy(tmp_path)
    ended = subprocess.run(
        [sys.executable, "-c", _CUT.replace("PRECISION", precision), copy.body, copy.mhr, PHOTO],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr


@pytest.mark.parametrize("role", RUN)
def test_a_file_that_is_cut_short_while_it_is_loaded_is_refused(
    single: Release, tmp_path: Path, role: Model
) -> None:
    copy = single.copy(tmp_path)
    path = copy.body if role == "body" else copy.mhr
    with (
        load_weights(copy.body, "body") as body,
        load_weights(copy.mhr, "mhr") as mhr,
        open_backend(load_library(), "cpu", threads=2) as backend,
    ):
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(InputError, match="nobody changes while it is read") as caught:
            BodyModel(body, mhr, backend)
    assert caught.value.where == str(path)
