"""The proof of a release: its manifest, its files, what they say of each other, and their source.

    report = verify([Path("manifest.json")])
    report.is_good

A manifest proves that its files are consistent and unchanged since it was written, not who wrote
it. The origin is proven by a hash from elsewhere (`expect_sha256`), by the legacy files (`sources`),
or by a published hash that a file meets.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sam3d_gguf.convert.files import known_components
from sam3d_gguf.convert.manifest import MAX_BYTES, Manifest, ManifestFile
from sam3d_gguf.convert.products import products_from_source
from sam3d_gguf.convert.verify_file import FileReport, verify_file
from sam3d_gguf.convert.verify_source import SourceProof, compare_with_source
from sam3d_gguf.extractors.extraction import ROLES, TOOL, Model, known_products
from sam3d_gguf.extractors.files import open_source
from sam3d_gguf.extractors.hashing import hash_file
from sam3d_gguf.extractors.kinds import FileKind, require_kind
from sam3d_gguf.extractors.litter import scratch_folder
from sam3d_gguf.extractors.progress import QUIET, Progress
from sam3d_gguf.extractors.sandbox.job import SandboxChoice
from sam3d_gguf.extractors.sniff import sniff
from sam3d_gguf.manifests.sources import load_sources
from sam3d_gguf.schemas.errors import InputError, Sam3dError
from sam3d_gguf.schemas.strict_json import JsonInput, loads

_MODELS: Mapping[FileKind, Model] = {
    FileKind.TORCH_ZIP: "body",
    FileKind.TORCH_LEGACY: "body",
    FileKind.TORCHSCRIPT: "mhr",
}


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
        InputError: a path can't be opened, or a source is no legacy file.
        SandboxError: the sandbox is missing, or ended its reader.
    """
    result = Verification()
    if len(paths) == 1 and paths[0].suffix == ".json":
        _verify_manifest(paths[0], result, progress)
    else:
        for path in paths:
            with open_source(path) as file:
                result.files.append(verify_file(file, progress))
        _check_companions(result)
    _check_expected(result, [value.lower() for value in expect_sha256], paths)
    for path in sources:
        _verify_source(path, result, sandbox, progress)
    _known_origin(result)
    return result


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
    result.problems += _manifest_problems(manifest)
    for entry in manifest.files:
        _verify_entry(path.parent / entry.name, entry, result, progress)
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
        report = FileReport(entry.name, 0, problems=[str(error)])
    report.problems += _entry_problems(report, entry)
    result.files.append(report)


def _entry_problems(report: FileReport, entry: ManifestFile) -> Iterator[str]:
    """Where a file is not what the manifest says of it; tensors are named."""
    if report.sha256 and report.sha256 != entry.sha256:
        yield f"the file's SHA-256 is {report.sha256}; the manifest says {entry.sha256}"
    claims = report.claims
    if claims is None:
        return
    stated = {tensor.name: tensor for tensor in entry.tensors}
    for name in sorted(stated.keys() ^ claims.gguf.tensors.keys()):
        yield f"the tensor {name} is in " + (
            "the manifest only" if name in stated else "the file only"
        )
    for name in sorted(stated.keys() & claims.gguf.tensors.keys()):
        tensor, found = stated[name], claims.gguf.tensors[name]
        if (tensor.type, tensor.shape) != (found.type.name, found.shape):
            yield f"the tensor {name} is {found.type.name} {list(found.shape)}; the manifest says {tensor.type} {list(tensor.shape)}"
        elif tensor.sha256 != report.tensor_sha256[name]:
            yield f"the tensor {name} has SHA-256 {report.tensor_sha256[name]}; the manifest says {tensor.sha256}"
    facts: list[tuple[str, object, object]] = [
        ("role", claims.role, entry.role),
        ("architecture", claims.architecture, entry.architecture),
        ("content digest", report.content_sha256, entry.content_sha256),
        ("semantics digest", report.semantics_sha256, entry.semantics_sha256),
        ("companions", claims.companions, entry.companions),
    ]
    for what, own, said in facts:
        if own != said:
            yield f"the {what} is {own}; the manifest says {said}"


def _manifest_problems(manifest: Manifest) -> Iterator[str]:
    """What a manifest can't say, whatever its files are."""
    names = [file.name for file in manifest.files]
    roles = [file.role for file in manifest.files]
    if len(set(names)) != len(names):
        yield "the manifest names a file twice"
    expected = set(_expected_roles(manifest))
    if set(roles) != expected or len(roles) != len(expected):
        yield f"the manifest has files for {', '.join(roles)}; expected {', '.join(sorted(expected))}"
    pinned = load_sources()
    for source in manifest.sources:
        pin = pinned.find(sha256=source.identity.sha256, size=source.identity.bytes)
        known = pin is not None and pin.role == source.role
        if known != (source.identity.origin == "pinned"):
            yield f"the source {source.role} is {'' if known else 'not '}pinned by this tool"
    origins = {source.identity.origin for source in manifest.sources}
    if (origins == {"pinned"}) != (manifest.origin == "pinned"):
        yield f"the release says {manifest.origin}, its sources say {', '.join(sorted(origins))}"
    yield from _known_answer_problems(manifest)


def _expected_roles(manifest: Manifest) -> Iterator[str]:
    with_mhr = manifest.model == "mhr" or manifest.status == "complete"
    if manifest.layout == "components":
        if manifest.model == "body":
            yield from ("body.dinov3_backbone", "body.pose_branch")
        if with_mhr:
            yield "mhr.lod1"
        return
    if manifest.model == "body":
        yield "body"
    if with_mhr:
        yield "mhr"


def _known_answer_problems(manifest: Manifest) -> Iterator[str]:
    """Published hashes that a pinned release must meet, and that no other may claim."""
    pinned = {source.role: source.identity.origin == "pinned" for source in manifest.sources}
    products = known_products()
    for product in manifest.safetensors:
        known = products.get(product.file) if pinned.get(ROLES["body"]) else None
        equal = known == (product.bytes, product.sha256)
        if (known is not None and not equal) or (product.known_answer == "equal") != equal:
            yield f"{product.file} does not have the published hash that the manifest claims"
    components = known_components()
    for file in manifest.files:
        answer = components.get(file.role) if manifest.origin == "pinned" else None
        equal = answer is not None and (answer.bytes, answer.sha256) == (file.bytes, file.sha256)
        if (answer is not None and not equal) or (file.known_answer == "equal") != equal:
            yield f"{file.name} does not have the published hash that the manifest claims"


def _check_companions(result: Verification) -> None:
    """Where files name each other, they must be the ones named."""
    present = {f.claims.role: f for f in result.files if f.claims is not None}
    for report in result.files:
        claims = report.claims
        for companion in () if claims is None else claims.companions:
            other = present.get(companion.role)
            if other is None or other.claims is None:
                if result.manifest is not None:
                    report.problems.append(f"its companion {companion.role} is not in the release")
                continue
            found = (other.claims.architecture, other.content_sha256, other.semantics_sha256)
            named = (companion.architecture, companion.content_sha256, companion.semantics_sha256)
            if found != named:
                report.problems.append(
                    f"its companion {companion.role} is another one than {other.name}: its content "
                    f"digest is {companion.content_sha256}, not {other.content_sha256}"
                )
        _check_component_companion(report, present)
    _check_complete(result, present)


def _check_component_companion(report: FileReport, present: Mapping[str, FileReport]) -> None:
    mhr = present.get("mhr.lod1")
    if report.claims is None or report.claims.role != "body.pose_branch" or mhr is None:
        return
    if mhr.claims is not None:
        needed = report.claims.values["mhr_asset_sha256"]
        given = mhr.claims.values["asset_sha256"]
        if needed != given:
            report.problems.append(f"it needs the MHR asset {needed}, {mhr.name} is of {given}")


def _check_complete(result: Verification, present: Mapping[str, FileReport]) -> None:
    manifest, body = result.manifest, present.get("body")
    if manifest is None or body is None or body.claims is None:
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
        result.origin.append("the expected SHA-256 of " + ", ".join(path.name for path in paths))
        result.proven.update(report.name for report in result.files)
    elif expected and not result.problems:
        result.problems.append("not every file has an expected SHA-256")


def _verify_source(
    path: Path, result: Verification, sandbox: SandboxChoice | None, progress: Progress
) -> None:
    with open_source(path) as file:
        kind = sniff(file.source)
        require_kind(kind, _MODELS, str(path))
    model = _MODELS[kind]
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(scratch_folder(tempfile.gettempdir()))
        products = stack.enter_context(
            products_from_source(
                model, path, scratch, sandbox=sandbox, allow_unpinned=True, progress=progress
            )
        )
        proof = compare_with_source(model, products, result.files, progress)
    _take_proof(path, proof, result)


def _take_proof(path: Path, proof: SourceProof, result: Verification) -> None:
    if not proof.files:
        result.problems.append(f"no file here comes from {path}, whose SHA-256 is {proof.sha256}")
    elif not proof.differs:
        derived = f"every tensor derived again from {path.name} ({proof.origin})"
        result.origin.append(f"{derived}: {', '.join(proof.files)}")
        result.proven.update(proof.files)


def _known_origin(result: Verification) -> None:
    """A published hash of a whole file proves its origin too."""
    for file in result.files:
        known = None if file.claims is None else known_components().get(file.claims.role)
        if known is not None and known.sha256 == file.sha256:
            result.origin.append(f"the published SHA-256 of {file.name}")
            result.proven.add(file.name)
