"""The proof of a release: its manifest, its files, what they say of each other, and their source.

    report = verify([Path("manifest.json")])
    report.is_good

A manifest proves that its files are consistent and unchanged since it was written, not who wrote
it. The origin is proven by a hash from elsewhere (`expect_sha256`), by the legacy files (`sources`),
or by a published hash that a file meets.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sam3d_gguf.convert.binding import all_left_out
from sam3d_gguf.convert.contract import load_model_contract
from sam3d_gguf.convert.files import known_components
from sam3d_gguf.convert.manifest import MAX_BYTES, Manifest, ManifestFile, left_out_items
from sam3d_gguf.convert.metadata import CompanionDigests
from sam3d_gguf.convert.plan import stored_once
from sam3d_gguf.convert.products import products_from_source, specs
from sam3d_gguf.convert.verify_file import FileReport, error_problems, verify_file
from sam3d_gguf.convert.verify_manifest import (
    entry_problems,
    manifest_problems,
    release_problems,
    source_problems,
)
from sam3d_gguf.convert.verify_source import SourceProof, compare_with_source
from sam3d_gguf.extractors.extract import KINDS
from sam3d_gguf.extractors.extraction import TOOL, SourceIdentity, display_name
from sam3d_gguf.extractors.files import OpenedFile, open_source
from sam3d_gguf.extractors.hashing import hash_file
from sam3d_gguf.extractors.kinds import CHECKPOINTS, FileKind
from sam3d_gguf.extractors.models import MOGE, OBJECTS, Model
from sam3d_gguf.extractors.progress import QUIET, Progress
from sam3d_gguf.extractors.sandbox.job import SandboxChoice
from sam3d_gguf.extractors.scratch import temporary_folder
from sam3d_gguf.extractors.sniff import require_source, sniff
from sam3d_gguf.schemas.errors import InputError, Sam3dError
from sam3d_gguf.schemas.strict_json import JsonInput, loads


@dataclass(slots=True)
class Verification:
    """The outcome.

    Attributes:
        manifest: what the manifest says, if one was given and could be read.
        manifest_sha256: of its bytes.
        files: one report for each GGUF file.
        problems: what is wrong beyond the single files.
        origin: what proves where the release comes from; empty if nothing does.
        proven: the names of the files whose origin is proven.
    """

    manifest: Manifest | None = None
    manifest_sha256: str = ""
    files: list[FileReport] = field(default_factory=list[FileReport])
    problems: list[str] = field(default_factory=list[str])
    origin: list[str] = field(default_factory=list[str])
    proven: set[str] = field(default_factory=set[str])

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems and not any(file.problems for file in self.files)

    @property
    def verdict(self) -> str:
        """One line that says what was proven."""
        if not self.is_good:
            return "FAILED"
        label = ""
        if self.manifest is not None:
            label = f" ({self.manifest.status}, {self.manifest.origin})"
        unproven = [file.name for file in self.files if file.name not in self.proven]
        if not unproven:
            return f"verified{label}"
        of = "" if len(unproven) == len(self.files) else f" of {', '.join(unproven)}"
        return f"consistent{label}; origin{of} not proven: give --expect-sha256 or --source"

    def to_document(self) -> JsonInput:
        """The document that `--json` prints; `document_schemas/verification.schema.json`."""
        manifest: JsonInput = None
        if self.manifest is not None:
            manifest = {
                "sha256": self.manifest_sha256,
                "model": self.manifest.model,
                "layout": self.manifest.layout,
                "status": self.manifest.status,
                "origin": self.manifest.origin,
            }
        return {
            "schema_version": 1,
            "document": "verification",
            "tool": TOOL,
            "good": self.is_good,
            "verdict": self.verdict,
            "manifest": manifest,
            "files": [
                {
                    "name": file.name,
                    "role": "" if file.claims is None else file.claims.role,
                    "architecture": "" if file.claims is None else file.claims.architecture,
                    "bytes": file.bytes,
                    "sha256": file.sha256,
                    "content_sha256": file.content_sha256,
                    "semantics_sha256": file.semantics_sha256,
                    "tensors": len(file.tensor_sha256),
                    "problems": file.problems,
                }
                for file in self.files
            ],
            "problems": self.problems,
            "origin_proven_by": self.origin,
        }


def verify(
    paths: Sequence[Path],
    *,
    expect_sha256: Iterable[str] = (),
    sources: Sequence[Path] = (),
    sandbox: SandboxChoice | None = None,
    progress: Progress = QUIET,
) -> Verification:
    """Verify a release by its manifest, or GGUF files alone.

    Args:
        paths: one `manifest.json`, or GGUF files.
        expect_sha256: hashes (hex) that were obtained elsewhere; each must be that of a given path,
            and, unless a manifest is given, each path must have one.
        sources: legacy files; every tensor that comes from them is derived again and compared.
        sandbox: what reads them.

    Raises:
        InputError: a path can't be opened, a manifest is not the only one, a hash is none, or a
            source is no legacy file, or given twice.
        SandboxError: the sandbox is missing, or ended its reader.
        OutputError: there is no space for what the reader of a source reports.
    """
    result = Verification()
    expected = [_sha256(value) for value in expect_sha256]
    manifests = [path for path in paths if path.suffix == ".json"]
    if not paths or (manifests and len(paths) > 1):
        raise InputError(
            f"{len(paths)} paths are given, {len(manifests)} of them manifests",
            expected="one manifest, or one or more GGUF files",
        )
    names = [path.name for path in paths]
    for path in paths:
        if names.count(path.name) > 1:
            raise InputError(
                "two of the files have this name, by which the report calls them",
                where=str(path),
                expected="files of different names, or one of them alone",
            )
    _require_sources(sources)
    if manifests:
        _verify_manifest(manifests[0], result, progress)
    else:
        for path in paths:
            with open_source(path) as file:
                if sniff(file.source) is FileKind.JSON:
                    raise InputError(
                        f"is {FileKind.JSON.label}, but is not named as a manifest is",
                        where=str(path),
                        expected="a GGUF file, or a manifest whose name ends in .json",
                    )
                result.files.append(verify_file(file, progress))
        _check_companions(result)
    _check_expected(result, expected, paths)
    for path in sources:
        _verify_source(path, result, sandbox, progress)
    _known_origin(result)
    return result


def _require_sources(paths: Sequence[Path]) -> None:
    """Refuse what no tensor can be derived from, and what would be read twice, before all else."""
    seen: set[tuple[int, int]] = set()
    for path in paths:
        with open_source(path) as file:
            require_source(file.source, CHECKPOINTS)
            key = (file.identity.device, file.identity.inode)
        if key in seen:
            raise InputError(
                "this source is given twice", where=str(path), expected="each legacy file once"
            )
        seen.add(key)


def _sha256(text: str) -> str:
    if re.fullmatch("[0-9A-Fa-f]{64}", text) is None:
        raise InputError(
            f"{text[:80]!r} is no SHA-256",
            where="--expect-sha256",
            expected="64 hexadecimal digits",
        )
    return text.lower()


def _verify_manifest(path: Path, result: Verification, progress: Progress) -> None:
    with open_source(path) as file:
        if file.size > MAX_BYTES:
            raise InputError(f"a manifest of {file.size} bytes is too large", where=str(path))
        data = file.source.pread(0, file.size)
        result.manifest_sha256 = hash_file(file.source).sha256
    try:
        document = loads(data, where=str(path), schema="manifest", max_bytes=MAX_BYTES)
        manifest = result.manifest = Manifest.from_document(document)
    except Sam3dError as error:
        result.problems.append(str(error))
        return
    result.problems += manifest_problems(manifest)
    for entry in manifest.files:
        _verify_entry(path.parent / entry.name, entry, result, progress)
    claims = [report.claims for report in result.files if report.claims is not None]
    result.problems += release_problems(manifest, claims)
    _check_companions(result)


def _verify_entry(
    path: Path, entry: ManifestFile, result: Verification, progress: Progress
) -> None:
    try:
        with open_source(path) as file:
            if file.size != entry.bytes:
                problem = f"the file has {file.size} bytes; the manifest says {entry.bytes}"
                result.files.append(FileReport(entry.name, file.size, problems=[problem]))
                return
            report = verify_file(file, progress)
    except InputError as error:
        report = FileReport(entry.name, 0, problems=error_problems(error, str(path)))
    report.problems += entry_problems(report, entry)
    result.files.append(report)


def _check_companions(result: Verification) -> None:
    """Where files name each other, all that are given must be the ones named."""
    present: dict[str, list[FileReport]] = defaultdict(list)
    for file in result.files:
        if file.claims is not None:
            present[file.claims.role].append(file)
    for report in result.files:
        claims = report.claims
        for companion in () if claims is None else claims.companions:
            others = present[companion.role]
            if not others and result.manifest is not None:
                report.problems.append(f"its companion {companion.role} is not in the release")
            report.problems += _differences(companion, others)
        _check_component_companion(report, present["mhr.lod1"])
    for body in present["body"]:
        _check_complete(result, body)
    # The depth model is of no release: beside parts without a manifest it may name none.
    tied: list[Model] = [model for model in OBJECTS if model != MOGE or result.manifest is not None]
    _check_objects(present, tied)


def _check_objects(present: Mapping[str, Sequence[FileReport]], tied: Iterable[Model]) -> None:
    """Each of these parts of Objects names the others there that its contract says."""
    for report in (each for model in tied for each in present[model]):
        if report.claims is None:
            continue
        named = {companion.role for companion in report.claims.companions}
        for companion in report.claims.bound.contract.companions:
            if present[companion.role] and companion.role not in named:
                report.problems.append(f"it does not name its companion {companion.role}")


def _differences(companion: CompanionDigests, others: Iterable[FileReport]) -> Iterator[str]:
    named = (companion.architecture, companion.content_sha256, companion.semantics_sha256)
    for other in others:
        architecture = "" if other.claims is None else other.claims.architecture
        if (architecture, other.content_sha256, other.semantics_sha256) != named:
            yield (
                f"its companion {companion.role} is another one than {other.name}: its content "
                f"digest is {companion.content_sha256}, not {other.content_sha256}"
            )


def _check_component_companion(report: FileReport, components: Iterable[FileReport]) -> None:
    if report.claims is None or report.claims.role != "body.pose_branch":
        return
    needed = report.claims.values["mhr_asset_sha256"]
    for mhr in components:
        given = "" if mhr.claims is None else mhr.claims.values["asset_sha256"]
        if needed != given:
            report.problems.append(f"it needs the MHR asset {needed}, {mhr.name} is of {given}")


def _check_complete(result: Verification, body: FileReport) -> None:
    manifest = result.manifest
    if manifest is None or body.claims is None:
        return
    if bool(body.claims.companions) != (manifest.status == "complete"):
        body.problems.append(
            f"the release says {manifest.status}, but its companions say otherwise"
        )


def _check_expected(result: Verification, expected: list[str], paths: Sequence[Path]) -> None:
    found = (
        [result.manifest_sha256]
        if result.manifest_sha256
        else [report.sha256 for report in result.files]
    )
    for sha256 in expected:
        if sha256 not in found:
            result.problems.append(
                f"nothing has the expected SHA-256 {sha256[:64]}; found {', '.join(found)}"
            )
    if expected and set(found) <= set(expected):
        result.origin.append("the expected SHA-256 of " + ", ".join(map(display_name, paths)))
        result.proven.update(report.name for report in result.files)
    elif expected and not result.problems:
        result.problems.append("not every file has an expected SHA-256")


def _verify_source(
    path: Path, result: Verification, sandbox: SandboxChoice | None, progress: Progress
) -> None:
    with open_source(path) as file:
        model = _model_of(file, result)
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(temporary_folder())
        products = stack.enter_context(
            products_from_source(
                model, path, scratch, sandbox=sandbox, allow_unpinned=True, progress=progress
            )
        )
        proof = compare_with_source(model, products, result.files, progress)
        if result.manifest is not None and proof.files:
            contract = load_model_contract(model)
            shared = stored_once(contract, products.extraction)
            left_out = left_out_items(
                products.extraction, all_left_out(contract, specs(products), shared)
            )
            found = list(source_problems(result.manifest, products.extraction, left_out))
            result.problems += found
            proof.differs |= bool(found)
    _take_proof(path, proof, result)


def _model_of(file: OpenedFile, result: Verification) -> Model:
    """The model that a legacy file is of: by its kind, else by what the files say of their sources."""
    kind = require_source(file.source, CHECKPOINTS)
    models: list[Model] = [model for model, kinds in KINDS.items() if kind in kinds]
    said: dict[Model, SourceIdentity] = {
        model: report.claims.provenance.source
        for report in result.files
        if report.claims is not None and report.claims.provenance is not None
        for model in models
        if report.claims.role == model
    }
    if len(models) == 1 or not said.keys() - {"body"}:
        return models[0]
    sized: list[Model] = [model for model, source in said.items() if source.bytes == file.size]
    if len(sized) > 1:
        sha256 = hash_file(file.source).sha256
        sized = [model for model in sized if said[model].sha256 == sha256] or sized
    return sized[0] if sized else next(iter(said))


def _take_proof(path: Path, proof: SourceProof, result: Verification) -> None:
    if not proof.files:
        result.problems.append(f"no file here comes from {path}, whose SHA-256 is {proof.sha256}")
    elif not proof.differs:
        derived = f"every tensor derived again from {display_name(path)} ({proof.origin})"
        result.origin.append(f"{derived}: {', '.join(proof.files)}")
        result.proven.update(proof.files)


def _known_origin(result: Verification) -> None:
    """A published hash of a whole file proves its origin too."""
    for file in result.files:
        known = None if file.claims is None else known_components().get(file.claims.role)
        if known is not None and known.sha256 == file.sha256:
            result.origin.append(f"the published SHA-256 of {file.name}")
            result.proven.add(file.name)
