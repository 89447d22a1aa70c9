"""What a manifest says, held against this tool's pins, against itself, and against its files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from sam3d_gguf.convert.files import known_components
from sam3d_gguf.convert.manifest import (
    Layout,
    Manifest,
    ManifestFile,
    ManifestLeftOut,
    numbered_note,
)
from sam3d_gguf.convert.metadata import Provenance
from sam3d_gguf.convert.mhr_names import absent_lists, numbered_lists
from sam3d_gguf.convert.request import CONFIG_ROLE
from sam3d_gguf.convert.verify_file import Claims, FileReport
from sam3d_gguf.extractors.extraction import Extraction, SourceIdentity, known_products
from sam3d_gguf.extractors.models import CONFIG_ROLES, MOGE, OBJECTS, PIPELINE_ROLE, ROLES, Model
from sam3d_gguf.extractors.printable import printable
from sam3d_gguf.extractors.products import product_files
from sam3d_gguf.manifests.known_answers import load_known_answers
from sam3d_gguf.manifests.sources import load_sources

_FILES: Mapping[Layout, Mapping[Model, tuple[str, ...]]] = {
    "single": {"body": ("body",), "mhr": ("mhr",), **{model: (model,) for model in OBJECTS}},
    "components": {"body": ("body.dinov3_backbone", "body.pose_branch"), "mhr": ("mhr.lod1",)},
}
_CHECKPOINT, _ASSET = ROLES["body"], ROLES["mhr"]


def manifest_problems(manifest: Manifest) -> Iterator[str]:
    """What a manifest can't say, whatever its files are."""
    names = [file.name for file in manifest.files]
    if len(set(names)) != len(names):
        yield "the manifest names a file twice"
    models = _models(manifest)
    files = [role for model in models for role in _FILES[manifest.layout].get(model, ())]
    yield from _set_problems("files", (file.role for file in manifest.files), files)
    sources = [role for model in models for role in (ROLES[model], *_config_role(model))]
    if manifest.model == "objects":
        sources.append(PIPELINE_ROLE)
    yield from _set_problems("sources", (source.role for source in manifest.sources), sources)
    products = [name for model in models for name in product_files(model)]
    yield from _set_problems("safetensors", (p.file for p in manifest.safetensors), products)
    roles = {source.role for source in manifest.sources}
    for item in manifest.left_out:
        if item.role not in roles:
            yield f"the manifest leaves something out of {item.role}, which is no source of it"
        if not item.what.isprintable() or not item.reason.isprintable():
            yield f"what is left out has a name that is not printable: {printable(item.what)}"
    if manifest.model == "mhr" and manifest.status != "complete":
        yield "a release of MHR alone is complete"
    if manifest.model == "objects" and (manifest.status == "complete") != is_complete(models):
        yield f"the release says {manifest.status}, but its parts say otherwise"
    yield from _origin_problems(manifest)
    yield from _known_answer_problems(manifest)


def entry_problems(report: FileReport, entry: ManifestFile) -> Iterator[str]:
    """Where a file is not what the manifest says of it; tensors are named."""
    if report.sha256 and report.sha256 != entry.sha256:
        yield f"the file's SHA-256 is {report.sha256}; the manifest says {entry.sha256}"
    claims = report.claims
    if claims is None:
        return
    stated = {tensor.name: tensor for tensor in entry.tensors}
    if len(stated) != len(entry.tensors):
        yield "the manifest names a tensor twice"
    for name in sorted(stated.keys() ^ claims.gguf.tensors.keys()):
        where = "manifest" if name in stated else "file"
        yield f"the tensor {name} is in the {where} only"
    for name in sorted(stated.keys() & claims.gguf.tensors.keys()):
        tensor, found = stated[name], claims.gguf.tensors[name]
        if (tensor.type, tensor.shape) != (found.type.name, found.shape):
            yield (
                f"the tensor {name} is {found.type.name} {list(found.shape)}; "
                f"the manifest says {tensor.type} {list(tensor.shape)}"
            )
        elif tensor.sha256 != report.tensor_sha256[name]:
            yield (
                f"the tensor {name} has SHA-256 {report.tensor_sha256[name]}; "
                f"the manifest says {tensor.sha256}"
            )
    facts: list[tuple[str, object, object]] = [
        ("role", claims.role, entry.role),
        ("architecture", claims.architecture, entry.architecture),
        ("content digest", report.content_sha256, entry.content_sha256),
        ("semantics digest", report.semantics_sha256, entry.semantics_sha256),
    ]
    for what, own, said in facts:
        if own != said:
            yield f"the {what} is {own}; the manifest says {said}"
    if claims.companions != entry.companions:
        yield "its companions are not those that the manifest says"


def release_problems(manifest: Manifest, claims: Sequence[Claims]) -> Iterator[str]:
    """Where the files name other sources or another form than the manifest does."""
    sources = {source.role: source.identity for source in manifest.sources}
    products = {product.file: product.sha256 for product in manifest.safetensors}
    for own in claims:
        if own.provenance is not None:
            found = _single_facts(own.provenance, sources, products)
        else:
            found = _component_facts(own, sources, products)
        for what, own_value, said in found:
            if own_value != said:
                told = "names none" if said is None else f"says {said}"
                yield f"the {what} of {own.role} is {own_value}; the manifest {told}"
        precision = "f32" if own.provenance is None else own.provenance.precision
        if precision != manifest.precision:
            yield (
                f"the precision of {own.role} is {precision}; "
                f"the manifest says {manifest.precision}"
            )
        if (own.provenance is None) != (manifest.layout == "components"):
            yield f"the layout of {own.role} is not {manifest.layout}"
    conforms = "not applicable"
    if manifest.layout == "components":
        official = all(own.is_official for own in claims)
        conforms = "conforms" if official else "does not conform: other dimensions"
    yield from _note_problems(manifest, claims)
    if manifest.native_contract != conforms:
        yield (
            f"the manifest says of the native contract: {manifest.native_contract}; "
            f"the files' dimensions say: {conforms}"
        )


def _note_problems(manifest: Manifest, claims: Sequence[Claims]) -> Iterator[str]:
    """A manifest has a note on each list of names that is of mere numbers, and no others.

    Single files say which lists these are, and are held to it; of components the names tell.
    """
    possible: list[str] = []
    certain: list[str] = []
    for own in claims:
        if own.names is not None:
            possible += map(numbered_note, numbered_lists(own.names.joints, own.names.parameters))
        if own.provenance is not None:
            certain += map(numbered_note, own.provenance.numbered)
    if manifest.layout == "single":
        possible = certain
    if len(claims) < len(manifest.files):
        return  # a file that can't be read is the problem, not what it would have told
    for note in certain:
        if note not in manifest.notes:
            yield f"the manifest does not note: {note}"
    for note in _surplus(manifest.notes, possible):
        yield f"the manifest has a note that its files do not give: {printable(note)}"


def source_problems(
    manifest: Manifest, extraction: Extraction, left_out: Sequence[ManifestLeftOut]
) -> Iterator[str]:
    """Where a legacy file gives something else than the manifest says of it."""
    role = ROLES[extraction.model]
    for source in manifest.sources:
        size = extraction.source.bytes
        if source.role == role and source.identity.bytes != size:
            yield f"the {role} has {size} bytes; the manifest says {source.identity.bytes}"
    stated = {product.file: product for product in manifest.safetensors}
    for product in extraction.products:
        said = stated.get(product.file)
        for what in ("bytes", "tensors", "sha256"):
            found = getattr(product, what)
            if said is not None and getattr(said, what) != found:
                yield (
                    f"{product.file} has {found} ({what}) by the {role}; "
                    f"the manifest says {getattr(said, what)}"
                )
    if extraction.model == "mhr":
        notes = list(map(numbered_note, absent_lists(extraction.attributes)))
        for note in _surplus(notes, manifest.notes):
            yield f"the manifest does not note: {note}"
        for note in _surplus(manifest.notes, notes):
            yield f"the manifest has a note that the {role} does not give: {printable(note)}"
    items = [(item.what, item.reason) for item in manifest.left_out if item.role == role]
    given = [(item.what, item.reason) for item in left_out]
    for what, reason in _surplus(items, given):
        yield f"the {role} has nothing that is left out as {printable(what)}: {printable(reason)}"
    for what, reason in _surplus(given, items):
        yield f"the manifest does not say that {printable(what)} of the {role} is left out: {reason}"


_Item = TypeVar("_Item")


def _surplus(first: Sequence[_Item], second: Sequence[_Item]) -> list[_Item]:
    """The items of the first that the second lacks, or has less often."""
    return list((Counter(first) - Counter(second)).elements())


_Facts = Iterator[tuple[str, object, object]]
_Sources = Mapping[str, SourceIdentity]


def _single_facts(own: Provenance, sources: _Sources, products: Mapping[str, str]) -> _Facts:
    identities = {ROLES[own.model]: own.source}
    if own.config is not None:
        identities[CONFIG_ROLES[own.model]] = own.config
    if own.pipeline is not None:
        identities[PIPELINE_ROLE] = own.pipeline
    for role, identity in identities.items():
        said = sources.get(role)
        yield f"SHA-256 of the {role}", identity.sha256, said and said.sha256
        yield f"size of the {role}", identity.bytes, said and said.bytes
    for file, sha256 in own.safetensors.items():
        yield f"SHA-256 of {file}", sha256, products.get(file)


def _component_facts(own: Claims, sources: _Sources, products: Mapping[str, str]) -> _Facts:
    values = own.values
    if own.role == "mhr.lod1":
        asset, product = sources.get(_ASSET), products.get("mhr.safetensors")
        if asset is not None and asset.origin == "pinned":
            product = load_known_answers().mhr_reference_safetensors_sha256
        yield f"SHA-256 of the {_ASSET}", values["asset_sha256"], asset and asset.sha256
        yield "SHA-256 of mhr.safetensors", values["safetensors_sha256"], product
        return
    for role, key in ((_CHECKPOINT, "checkpoint_sha256"), (CONFIG_ROLE, "config_sha256")):
        said = sources.get(role)
        yield f"SHA-256 of the {role}", values[key], said and said.sha256
    file = f"{'backbone' if own.role == 'body.dinov3_backbone' else 'other'}.safetensors"
    yield f"SHA-256 of {file}", values["safetensors_sha256"], products.get(file)
    if "mhr_asset_sha256" in values and _ASSET in sources:
        yield f"SHA-256 of the {_ASSET}", values["mhr_asset_sha256"], sources[_ASSET].sha256


def _set_problems(what: str, found: Iterator[str], expected: list[str]) -> Iterator[str]:
    names = sorted(found)
    if names != sorted(expected):
        yield f"the manifest has {what} {', '.join(names)}; expected {', '.join(sorted(expected))}"


def is_complete(models: Iterable[Model]) -> bool:
    """Whether these are all the parts of Objects; the depth model belongs to none of its releases."""
    return set(models) >= set(OBJECTS) - {MOGE}


def _config_role(model: Model) -> tuple[str, ...]:
    return (CONFIG_ROLES[model],) if model in CONFIG_ROLES else ()


def _models(manifest: Manifest) -> list[Model]:
    """The models that a release must hold; of Objects, those that it names."""
    if manifest.model == "objects":
        roles = {file.role for file in manifest.files}
        return [model for model in OBJECTS if model in roles]
    models: list[Model] = ["body"] if manifest.model == "body" else ["mhr"]
    if manifest.model == "body" and manifest.status == "complete":
        models.append("mhr")
    return models


def _origin_problems(manifest: Manifest) -> Iterator[str]:
    pinned = load_sources()
    for source in manifest.sources:
        pin = pinned.find(sha256=source.identity.sha256, size=source.identity.bytes)
        known = pin is not None and pin.role == source.role
        if known != (source.identity.origin == "pinned"):
            yield f"the source {source.role} is {'' if known else 'not '}pinned by this tool"
    origins = {source.identity.origin for source in manifest.sources}
    if (origins == {"pinned"}) != (manifest.origin == "pinned"):
        yield f"the release says {manifest.origin}, its sources say {', '.join(sorted(origins))}"


def _known_answer_problems(manifest: Manifest) -> Iterator[str]:
    """Published hashes that a pinned release must meet, and that no other may claim."""
    pinned = {source.role: source.identity.origin == "pinned" for source in manifest.sources}
    products = known_products()
    for product in manifest.safetensors:
        known = products.get(product.file) if pinned.get(_CHECKPOINT) else None
        equal = known == (product.bytes, product.sha256)
        if (known is not None and not equal) or (product.known_answer == "equal") != equal:
            yield f"{product.file} does not have the published hash that the manifest claims"
    components = known_components()
    for file in manifest.files:
        answer = components.get(file.role) if manifest.origin == "pinned" else None
        equal = answer is not None and (answer.bytes, answer.sha256) == (file.bytes, file.sha256)
        if (answer is not None and not equal) or (file.known_answer == "equal") != equal:
            yield f"{file.name} does not have the published hash that the manifest claims"
