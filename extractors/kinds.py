"""The kinds of file that people hand to a converter, each with its words and its way out."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

from sam3d_gguf.schemas.errors import InputError

_EXPORT = "Save the model's state_dict() with torch.save and give that file"
_FETCH = "Fetch the file again and compare its size and SHA-256 with the source's"
_SCRIPT = "Give the exported TorchScript archive, not a checkpoint"
_UNPACK = "Unpack it and give the checkpoint that it holds"


class FileKind(Enum):
    """What a file is, judged by its first bytes and, for a zip archive, its directory.

    Attributes:
        label: how messages and reports call it.
        action: what to do when it was given as a checkpoint, but can't be one.
    """

    TORCH_ZIP = ("a torch.save checkpoint (zip form)", _SCRIPT)
    TORCHSCRIPT = ("a TorchScript archive", "Give the training checkpoint, not the exported model")
    TORCH_LEGACY = ("a torch.save checkpoint (form before torch 1.6)", _SCRIPT)
    TORCH_TAR = (
        "a torch.save checkpoint (tar form of the first torch versions)",
        "Load it with a PyTorch that still can, and save its state_dict() with torch.save",
    )
    TORCHSCRIPT_OLD = (
        "a TorchScript archive (form before torch 1.4)",
        "Load it with PyTorch and save it again with torch.jit.save",
    )
    TORCH_ZIP_BROKEN = ("a torch zip archive that is damaged or cut short", _FETCH)
    TORCH_PACKAGE = ("a torch.package archive", _EXPORT)
    SAFETENSORS = ("a safetensors file", "Give the legacy checkpoint that it was made from")
    GGUF = ("a GGUF file", "It is converted already: give the legacy checkpoint to convert again")
    GGML_OLD = ("a GGML file from before GGUF", "Give the legacy checkpoint that it was made from")
    HTML = (
        "an HTML page",
        "The download answered with a page, often a login or an error: sign in, then fetch again",
    )
    JSON = (
        "a JSON document",
        "A manifest is for sam3d-verify; a download may have answered with an error: read it",
    )
    LFS_POINTER = ("a Git LFS pointer, not the file it points to", "Run git lfs pull")
    NPZ = ("a NumPy .npz archive", _EXPORT)
    NPY = ("a NumPy .npy array", _EXPORT)
    KERAS = ("a Keras .keras archive", _EXPORT)
    OFFICE = ("an Office document", _EXPORT)
    ZIP_OTHER = ("a zip archive that torch did not write", _UNPACK)
    ZIP_BROKEN = ("a zip archive that is damaged or cut short", _FETCH)
    PICKLE = ("a pickle that torch.save did not write", _EXPORT)
    HDF5 = ("an HDF5 file", _EXPORT)
    ONNX = ("an ONNX model", "Give the PyTorch checkpoint that it was exported from")
    TAR = ("a tar archive", _UNPACK)
    GZIP = ("a gzip file", _UNPACK)
    BZIP2 = ("a bzip2 file", _UNPACK)
    XZ = ("an xz file", _UNPACK)
    ZSTD = ("a Zstandard file", _UNPACK)
    SEVEN_ZIP = ("a 7-Zip archive", _UNPACK)
    RAR = ("a RAR archive", _UNPACK)
    EMPTY = ("an empty file", _FETCH)
    ZEROS = ("a file that starts with zeros only, often an unfinished download", _FETCH)
    UNKNOWN = ("of no kind that is known here", _FETCH)

    def __init__(self, label: str, action: str) -> None:
        self.label = label
        self.action = action


CHECKPOINTS = frozenset({FileKind.TORCH_ZIP, FileKind.TORCHSCRIPT, FileKind.TORCH_LEGACY})


def require_kind(
    kind: FileKind, accepted: Collection[FileKind], where: str, cause: str = ""
) -> None:
    """Refuse a file that is not of an accepted kind, by the name of what it is, and a cause if known.

    Raises:
        InputError: `kind` is not in `accepted`.
    """
    if kind not in accepted:
        labels = sorted(other.label for other in accepted)
        what = f"is {kind.label}: {cause}" if cause else f"is {kind.label}"
        raise InputError(what, where=where, expected=" or ".join(labels), action=kind.action)
