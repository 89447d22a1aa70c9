"""What a conversion is asked for, and where its inputs and outputs lie."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from sam3d_gguf.convert.binding import Precision
from sam3d_gguf.convert.config import MAX_BYTES, Config, load_config
from sam3d_gguf.convert.manifest import Layout
from sam3d_gguf.extractors.extraction import REPORT, SourceIdentity, display_name
from sam3d_gguf.extractors.files import open_source
from sam3d_gguf.extractors.hashing import hash_file
from sam3d_gguf.extractors.models import CONFIG_ROLES, Model
from sam3d_gguf.extractors.products import product_files
from sam3d_gguf.extractors.sandbox.job import SandboxChoice
from sam3d_gguf.manifests.sources import load_sources
from sam3d_gguf.schemas.errors import InputError

CONFIG_ROLE = CONFIG_ROLES["body"]
CONFIG_NAME = "model_config.yaml"
MANIFEST_NAME = "manifest.json"
MHR_NAME = "mhr.gguf"
KEPT_MHR = "mhr"
_MANIFEST_SUFFIX = ".json"
_NAME = re.compile(r"[A-Za-z0-9_. +-]{1,255}")


@dataclass(frozen=True, slots=True)
class Request:
    """What to convert, to what.

    Attributes:
        out: the GGUF file to write; with layout "components" a folder that doesn't exist yet.
        checkpoint: the legacy file.
        extraction: a folder that `sam3d-extract` made; with a checkpoint too, it is checked
            against that.
        config: `model_config.yaml`; else it is looked for beside the checkpoint (or in the
            extraction's folder) and one level up. Body only.
        mhr: the MHR asset, or the folder of its extraction, that belongs with a Body model.
        layout: "single" or "components".
        precision: "source" or "f32"; None is the layout's own.
        manifest: where the manifest goes; None is beside the output.
        keep_safetensors: a folder for the safetensors and their reports; may not exist yet.
        allow_unpinned: accept sources that this tool has no pin for.
        sandbox: what reads legacy files.
    """

    out: Path
    checkpoint: Path | None = None
    extraction: Path | None = None
    config: Path | None = None
    mhr: Path | None = None
    layout: Layout = "single"
    precision: Precision | None = None
    manifest: Path | None = None
    keep_safetensors: Path | None = None
    allow_unpinned: bool = False
    sandbox: SandboxChoice = field(default_factory=SandboxChoice)

    @property
    def folder(self) -> Path:
        """Where the GGUF files go."""
        return self.out if self.layout == "components" else self.out.parent

    @property
    def manifest_path(self) -> Path:
        """Where the manifest goes."""
        return self.manifest or self.folder / MANIFEST_NAME

    def effective_precision(self) -> Precision:
        """The precision asked for, or the layout's own.

        Raises:
            InputError: components at source precision, which the native contract doesn't have.
        """
        if self.layout == "single":
            return self.precision or "source"
        if self.precision == "source":
            raise InputError(
                "the layout components holds F32 only",
                action="Leave --precision out, or choose --layout single",
            )
        return "f32"

    def outputs(self) -> tuple[Path, ...]:
        """The manifest, and the files of layout "single"."""
        if self.layout == "components":
            return (self.manifest_path,)
        mhr = () if self.mhr is None else (self.folder / MHR_NAME,)
        return (self.manifest_path, self.out, *mhr)

    def kept_files(self, model: Model) -> tuple[Path, ...]:
        """The safetensors and reports that will lie in folders which exist already.

        Args:
            model: what is converted.
        """
        return tuple(path for path in self._kept(model) if path.parent.is_dir())

    def _kept(self, model: Model) -> list[Path]:
        files: list[Path] = []
        if self.keep_safetensors is not None and self.extraction is None:
            files += (self.keep_safetensors / n for n in (*product_files(model), REPORT))
        if self.keep_safetensors is not None and self.mhr is not None and not self.mhr.is_dir():
            kept = self.keep_safetensors / KEPT_MHR
            files += (kept / n for n in (*product_files("mhr"), REPORT))
        return files

    def check(self, model: Model) -> None:
        """Refuses what could not be converted, or not be verified afterwards.

        Args:
            model: what is converted.

        Raises:
            InputError: components at source precision; a manifest elsewhere than the files that it
                names, or that `sam3d-verify` would not take for one; an output's name that a
                manifest doesn't take, that another one has, or that lies in another one's place.
        """
        self.effective_precision()
        if self.manifest is not None and self.manifest.parent.resolve() != self.folder.resolve():
            raise InputError(
                "a manifest names files beside it, and would lie in another folder",
                where=str(self.manifest),
                expected=f"a path in {self.folder}",
            )
        for path in (self.out, *self.outputs()):
            if path.name in ("", ".."):
                raise InputError(
                    "this is a folder that exists", where=str(path), expected="a new path"
                )
        for path in self.outputs():
            if _NAME.fullmatch(path.name) is None:
                raise InputError(
                    "the name has characters that not every system takes",
                    where=str(path),
                    expected="letters, digits, spaces and _ . + -",
                )
        self._require_apart(model)
        if self.manifest_path.suffix != _MANIFEST_SUFFIX:
            raise InputError(
                "sam3d-verify would not take this for a manifest",
                where=str(self.manifest_path),
                expected=f"a name that ends in {_MANIFEST_SUFFIX}",
            )
        if self.layout == "single" and self.out.suffix == _MANIFEST_SUFFIX:
            raise InputError(
                "sam3d-verify would take this for a manifest",
                where=str(self.out),
                expected=f"a name that does not end in {_MANIFEST_SUFFIX}",
            )

    def _require_apart(self, model: Model) -> None:
        """Every output has a path of its own, and none lies below a file or in the new folder."""
        files = [_place(path) for path in self.outputs()]
        for place in files:
            if files.count(place) > 1:
                raise InputError("two outputs have this path", where=str(place))
        if self.layout == "components":
            # A folder that appears with its own files, and no others.
            files = [_place(self.out)]
        for path in self._kept(model):
            place = _place(path)
            for file in files:
                if place == file or file in place.parents:
                    raise InputError(
                        f"the safetensors would lie in the place of {file}",
                        where=f"--keep-safetensors {self.keep_safetensors}",
                        expected="another folder",
                    )
                if place in file.parents:
                    raise InputError(
                        f"{file} would lie below the file {place.name}",
                        where=f"--keep-safetensors {self.keep_safetensors}",
                        expected="another folder",
                    )


def _place(path: Path) -> Path:
    """A path without links and dots in its folders, so that equal places are equal."""
    return path.parent.resolve() / path.name


def read_config(request: Request) -> tuple[Config, SourceIdentity]:
    """Find, hash and check Body's configuration; see `open_config` for the errors."""
    path = request.config or _find_config(request)
    return open_config(path, CONFIG_ROLE, "body-config", allow_unpinned=request.allow_unpinned)


def open_config(
    path: Path, role: str, schema: str, *, allow_unpinned: bool
) -> tuple[Config, SourceIdentity]:
    """Hash and check a configuration.

    Args:
        path: the file.
        role: what it is called in the pins.
        schema: the name of its document schema.
        allow_unpinned: accept one that this tool has no pin for.

    Raises:
        InputError: there is none, or it isn't pinned and that isn't allowed.
        ContractError: it has keys or values that aren't supported.
    """
    with open_source(path) as file:
        if file.size > MAX_BYTES:
            raise InputError(
                f"the configuration has {file.size} bytes",
                where=str(path),
                expected=f"at most {MAX_BYTES}",
            )
        data = file.source.pread(0, file.size)
        sha256 = hash_file(file.source).sha256
    pin = load_sources().find(sha256=sha256, size=len(data))
    pinned = pin is not None and pin.role == role
    if not pinned and not allow_unpinned:
        known = load_sources().with_role(role)
        raise InputError(
            f"this is not a pinned configuration: its SHA-256 is {sha256}",
            where=str(path),
            expected=" or ".join(pin.sha256 for pin in known),
            action="Fetch the official file again, or accept this one with --allow-unpinned",
        )
    identity = SourceIdentity(
        display_name(path), len(data), sha256, "pinned" if pinned else "unpinned"
    )
    return load_config(data, schema, where=str(path)), identity


def _find_config(request: Request) -> Path:
    given = request.checkpoint or request.extraction
    if given is None:
        raise ValueError("neither a legacy file nor an extraction is given")
    beside = given if given == request.extraction else given.parent
    candidates = [folder / CONFIG_NAME for folder in (beside, beside.absolute().parent)]
    for path in candidates:
        if path.exists() or path.is_symlink():
            return path
    raise InputError(
        f"there is no {CONFIG_NAME}",
        where=str(beside),
        expected="it there or one level up",
        action="Give its path with --config",
    )
