"""What PyTorch itself reads from a checkpoint or a TorchScript archive, as JSON.

    .oracle/bin/python tests/oracle/load_checkpoint.py model.ckpt mhr_model.pt >expected.json

For each file, each tensor's dtype (safetensors' name), shape, SHA-256 of its contiguous
little-endian bytes and, for BF16 and F16, SHA-256 after the exact conversion to F32.
A TorchScript archive is loaded with `torch.jit.load`, which compiles its code: give it only files
that are trusted. Anything else is loaded with `torch.load(weights_only=True)`.
"""

import hashlib
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch

DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """The state dict of a TorchScript archive, or the (possibly wrapped) one of a checkpoint."""
    if is_torchscript(path):
        return dict(torch.jit.load(path, map_location="cpu").state_dict())
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    for wrapper in ("state_dict", "model"):
        if isinstance(loaded.get(wrapper), dict):
            loaded = loaded[wrapper]
            break
    return {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}


def is_torchscript(path: Path) -> bool:
    """Whether the file is a zip with a `constants.pkl`, which only TorchScript archives have."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def sha256(tensor: torch.Tensor) -> str:
    """SHA-256 of the tensor's elements in C order."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(raw.data).hexdigest()


def describe(tensor: torch.Tensor) -> dict[str, Any]:
    """The dtype, shape and digests of one tensor."""
    row: dict[str, Any] = {
        "dtype": DTYPES[tensor.dtype],
        "shape": list(tensor.shape),
        "sha256": sha256(tensor),
    }
    if tensor.dtype in (torch.bfloat16, torch.float16):
        row["f32_sha256"] = sha256(tensor.float())
    return row


def rows(found: dict[str, dict[str, Any]]) -> str:
    """JSON with one tensor a line."""
    files = [
        json.dumps(file)
        + ": {\n"
        + ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in tensors.items())
        + "\n }"
        for file, tensors in found.items()
    ]
    return "{\n " + ",\n ".join(files) + "\n}"


def main(paths: list[str]) -> None:
    """Print one JSON object: file name, tensor name, description."""
    found = {
        Path(path).name: {
            name: describe(tensor) for name, tensor in sorted(tensors_of(Path(path)).items())
        }
        for path in paths
    }
    print(rows(found))


if __name__ == "__main__":
    main(sys.argv[1:])
