"""The strongest proof of a GGUF file: every tensor of it derived again from the legacy file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sam3d_gguf.convert.contract_types import TensorSpec
from sam3d_gguf.convert.files import component_sources
from sam3d_gguf.convert.mhr_names import read_names
from sam3d_gguf.convert.native import load_native_components
from sam3d_gguf.convert.plan import PlannedTensor, plan_component, plan_single, stored_once
from sam3d_gguf.convert.products import BlockReader, Products, specs
from sam3d_gguf.convert.stream import keeps_bytes, tensor_data
from sam3d_gguf.convert.verify_file import Claims, FileReport
from sam3d_gguf.extractors.extraction import Origin
from sam3d_gguf.extractors.models import Model
from sam3d_gguf.extractors.progress import Progress
from sam3d_gguf.schemas.errors import Sam3dError


@dataclass(slots=True)
class SourceProof:
    """What a legacy file proves.

    Attributes:
        sha256, origin: of the legacy file.
        files: the names of the files that say they come from it.
        differs: whether any of them differs from what it gives.
    """

    sha256: str
    origin: Origin
    files: list[str]
    differs: bool


def compare_with_source(
    model: Model, products: Products, reports: Sequence[FileReport], progress: Progress
) -> SourceProof:
    """Compare every file that comes from a source with what the source gives.

    What differs is added to the problems of the file's report, by tensor.
    """
    source = products.extraction.source
    proof = SourceProof(source.sha256, source.origin, [], differs=False)
    for report in reports:
        claims = report.claims
        if claims is None or _claimed_source(claims, model) != source.sha256:
            continue
        proof.files.append(report.name)
        before = len(report.problems)
        progress.stage(f"Derive {report.name} again", report.bytes)
        try:
            _compare(claims, products, report, progress)
        except Sam3dError as error:
            report.problems.append(f"it can't be derived from its source: {error}")
        proof.differs |= len(report.problems) > before
    return proof


def _claimed_source(claims: Claims, model: Model) -> str:
    """The SHA-256 of the legacy file of a model that a file says it comes from."""
    if claims.provenance is not None:
        return claims.provenance.source.sha256 if claims.role == model else ""
    wanted, key = component_sources(claims.role)
    return claims.values[key] if wanted == model else ""


def _compare(claims: Claims, products: Products, report: FileReport, progress: Progress) -> None:
    extraction, bound = products.extraction, claims.bound
    if stored_once(bound.contract, extraction) != bound.shared:
        report.problems.append("the source's equal tensors are not those that are stored once")
        return
    stated = specs(products)
    for name, tensor in bound.tensors.items():
        spec = stated.get(name)
        if spec != TensorSpec(tensor.source_dtype, tensor.shape):
            report.problems.append(f"the source has no {tensor.source_dtype} tensor {name}")
            return
    planned: Mapping[str, PlannedTensor]
    if claims.provenance is not None:
        planned = plan_single(extraction, bound, claims.provenance.precision)
    else:
        planned = plan_component(extraction, bound, load_native_components()[claims.role])
    if claims.names is not None:
        names = read_names(products, bound)
        if (names.joints, names.parameters, names.prefix_sizes) != (
            claims.names.joints,
            claims.names.parameters,
            claims.names.prefix_sizes,
        ):
            report.problems.append("the names or prefix sizes are not those of the source")
        if claims.provenance is not None and claims.provenance.numbered != names.numbered:
            report.problems.append("the lists of mere numbers are not those that the source lacks")
    reader = products.reader()
    for name, plan in planned.items():
        sha256 = (keeps_bytes(plan) and plan.sha256) or _sha256(plan, reader)
        if sha256 != report.tensor_sha256[name]:
            found = report.tensor_sha256[name]
            report.problems.append(
                f"the tensor {name} has SHA-256 {found}; the source gives {sha256}"
            )
        progress.advance(claims.gguf.tensors[name].nbytes)
    reader.finish()


def _sha256(tensor: PlannedTensor, reader: BlockReader) -> str:
    digest = hashlib.sha256()
    for data in tensor_data(tensor, reader, ()):
        digest.update(data)
    return digest.hexdigest()
