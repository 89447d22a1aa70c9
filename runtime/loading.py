"""Open a GGUF for the runtime: read strictly, hold to its contract and digests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sam3d_gguf.convert.digests import content_sha256, semantics_sha256
from sam3d_gguf.convert.gguf_format import GgufValue
from sam3d_gguf.convert.gguf_reader import read_gguf
from sam3d_gguf.convert.stream import CONTENT_KEY, SEMANTICS_KEY, TENSORS_KEY
from sam3d_gguf.convert.verify_file import Claims, check_indices, read_claims, verify_file
from sam3d_gguf.extractors.files import open_source
from sam3d_gguf.extractors.models import Model
from sam3d_gguf.runtime.weights import Weights, WeightTensor
from sam3d_gguf.schemas.errors import ContractError


def load_weights(path: Path, model: Model, *, verify: bool = False) -> Weights:
    """The tensors and metadata of a model file, after every check of its header and indices.

    The file stays open until they are closed.

    Args:
        path: a GGUF of layout `single`.
        model: what the file must be.
        verify: also read and check all tensors' data, which takes as long as reading the file.

    Raises:
        InputError: not a file that can be read, or not a GGUF of the accepted form.
        ContractError: another model, or one that does not meet its contract or its digests.
    """
    opened = open_source(path)
    try:
        header = read_gguf(opened.source)
        claims = read_claims(header, str(path))
        metadata = {key: _plain(value) for key, value in header.metadata.items()}
        _check(claims, metadata, model, path)
        check_indices(opened, claims)
        if verify:
            problems = verify_file(opened).problems
            if problems:
                raise ContractError("; ".join(problems[:8]), where=str(path))
        opened.assert_unchanged()
    except BaseException:
        opened.close()
        raise
    tensors = {
        name: WeightTensor(name, tensor.shape, tensor.type.name, tensor.offset)
        for name, tensor in header.tensors.items()
    }
    return Weights(metadata, tensors, opened)


def check_companion(body: Weights, mhr: Weights) -> None:
    """Refuse an MHR that is not the one that a Body file names.

    Raises:
        ContractError: the digests or dimensions differ.
    """
    for key in (CONTENT_KEY, SEMANTICS_KEY):
        named = body.metadata.get(key.replace("sam3d.", "sam3d.companion.mhr.", 1))
        if named is not None and named != mhr.metadata.get(key):
            raise ContractError(
                f"{key} is {mhr.metadata.get(key)}",
                where=str(mhr.path),
                expected=f"{named}, of the companion that {body.path} names",
                action="Give the MHR file of the same release.",
            )
    mapped = body.tensor("head_pose.keypoint_mapping").shape[1]
    vertices, joints = mhr.tensor("identity.base").shape[0], mhr.tensor("skeleton.parents").shape[0]
    faces = body.tensor("head_pose.faces").shape[0], mhr.tensor("mesh.faces").shape[0]
    if mapped != vertices + joints or faces[0] != faces[1]:
        raise ContractError(
            f"this MHR has {vertices} vertices, {joints} joints and {faces[1]} triangles",
            where=str(mhr.path),
            expected=f"{mapped} vertices and joints, {faces[0]} triangles, as {body.path} maps",
        )


def _check(claims: Claims, metadata: dict[str, Any], model: Model, path: Path) -> None:
    if claims.role != model or claims.provenance is None:
        raise ContractError(
            f"the file is {claims.role}",
            where=str(path),
            expected=f"{model}, layout single",
            action="Give the file that was converted as this model.",
        )
    stated: list[Any] = list(metadata[TENSORS_KEY])
    names = sorted(claims.gguf.tensors)
    if len(stated) != len(names):
        raise ContractError(f"{TENSORS_KEY} does not list {len(names)} tensors", where=str(path))
    hashes = {name: str(sha256) for name, sha256 in zip(names, stated, strict=True)}
    try:
        content = content_sha256(claims.gguf.tensors, hashes)
    except ValueError as error:
        raise ContractError(f"{TENSORS_KEY} holds no SHA-256", where=str(path)) from error
    for key, found in (
        (CONTENT_KEY, content),
        (SEMANTICS_KEY, semantics_sha256(claims.semantics)),
    ):
        if metadata.get(key) != found:
            raise ContractError(
                f"{key} is {str(metadata.get(key))[:64]}",
                where=str(path),
                expected=found,
                action="The file was changed after it was written; convert or fetch it again.",
            )


def _plain(value: GgufValue) -> Any:
    if isinstance(value.value, tuple):
        return [_plain(item) if isinstance(item, GgufValue) else item for item in value.value]
    return value.value
