"""What can be known of a conversion before anything large is read."""

from __future__ import annotations

from pathlib import Path

from sam3d_gguf.convert.files import require_asset
from sam3d_gguf.convert.products import read_report
from sam3d_gguf.convert.request import Request
from sam3d_gguf.extractors.extract import is_possible_pin, require_model, require_possible_pin
from sam3d_gguf.extractors.extraction import known_products
from sam3d_gguf.extractors.files import open_source
from sam3d_gguf.extractors.models import Model
from sam3d_gguf.extractors.sandbox.run import require_sandbox
from sam3d_gguf.schemas.errors import InputError


def require_kinds(model: Model, request: Request) -> None:
    """Refuse sources that are not what they must be, by their first bytes or their report.

    Raises:
        InputError: a source is missing, can't be opened, or is of another kind.
        SandboxError: legacy files are to be read, and there is no sandbox.
    """
    if request.checkpoint is None and request.extraction is None:
        raise InputError(
            "neither a legacy file nor an extraction is given",
            action="Give --checkpoint PATH or --extraction DIR",
        )
    legacy = _legacy_files(model, request)
    for wanted, path in legacy:
        with open_source(path) as source:
            require_model(wanted, source)
    for wanted, folder in _extractions(model, request):
        read_report(wanted, folder)
    if legacy:
        require_sandbox(request.sandbox)


def require_acceptable(model: Model, request: Request) -> None:
    """Refuse sources whose size alone says that they are not pinned, where they must be.

    Raises:
        InputError: such a source is not allowed, or components need an asset that is not given.
    """
    for wanted, path in _legacy_files(model, request):
        with open_source(path) as source:
            require_possible_pin(wanted, source, request.allow_unpinned)
    if model == "body" and request.layout == "components" and request.mhr is None:
        _require_pinned_body(request)


def _require_pinned_body(request: Request) -> None:
    if request.checkpoint is not None:
        with open_source(request.checkpoint) as source:
            possible, where = is_possible_pin("body", source), str(request.checkpoint)
    else:
        assert request.extraction is not None
        stated = read_report("body", request.extraction)
        sizes = {product.file: product.bytes for product in stated.products}
        possible = sizes == {name: size for name, (size, _) in known_products().items()}
        where = stated.source.name
    require_asset(given=False, pinned=possible, where=where)


def _legacy_files(model: Model, request: Request) -> list[tuple[Model, Path]]:
    files: list[tuple[Model, Path]] = []
    if request.checkpoint is not None:
        files.append((model, request.checkpoint))
    if request.mhr is not None and not request.mhr.is_dir():
        files.append(("mhr", request.mhr))
    return files


def _extractions(model: Model, request: Request) -> list[tuple[Model, Path]]:
    folders: list[tuple[Model, Path]] = []
    if request.extraction is not None:
        folders.append((model, request.extraction))
    if request.mhr is not None and request.mhr.is_dir():
        folders.append(("mhr", request.mhr))
    return folders
