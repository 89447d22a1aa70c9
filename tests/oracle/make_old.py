"""Write checkpoints with an old PyTorch, and what they hold by its account.

    python tests/oracle/make_old.py tests/fixtures/legacy/old

For torch 1.4.0 and 1.7.1, the oldest that PyPI has wheels of for Python 3.8, which lack forms that
later versions write and write some that those no longer do. Runs in an environment of its own:
Python 3.8 with that torch and NumPy below 1.20. As with make_legacy.py, TorchScript archives name
their sources' files.
"""

import hashlib
import json
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any, Dict, List  # noqa: UP035  (TorchScript of that age)

import torch
from torch import nn

VERSION = torch.__version__.split("+")[0]
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


def values(*shape):
    return torch.arange(float(torch.Size(shape).numel())).reshape(*shape) - 3


def state_dict():
    base = values(4, 6)
    return OrderedDict(
        [
            ("base", base),
            ("same", base),
            ("transposed", base.t()),
            ("column", base[:, 2]),
            ("window", base[1:3, 2:5]),
            ("expanded", base[0].expand(3, 6)),
            ("parameter", nn.Parameter(values(2, 3))),
            ("parameter.frozen", nn.Parameter(values(3), requires_grad=False)),
            ("half", values(3).half()),
            ("bfloat16", values(3).bfloat16()),
            ("bool", values(5) > 0),
            ("uint8", torch.tensor([1, 2], dtype=torch.uint8)),
            ("int8", torch.tensor([-1], dtype=torch.int8)),
            ("int16", torch.tensor([-1], dtype=torch.int16)),
            ("int32", torch.tensor([[7]], dtype=torch.int32)),
            ("int64", torch.arange(3)),
            ("float64", values(2).double()),
            ("scalar", torch.tensor(2.5)),
            ("empty", torch.empty(0)),
            ("sparse", torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2))),
        ]
    )


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(values(3, 2))
        self.register_buffer("steps", torch.tensor([4]))
        self.sizes = torch.jit.Attribute([3, 1], List[int])  # noqa: UP006
        self.names = torch.jit.Attribute(["a", "b"], List[str])  # noqa: UP006

    def forward(self, x):
        return x @ self.weight + self.steps


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.register_buffer("view", values(4, 6)[1:3, ::2])
        self.register_buffer("flag", torch.tensor([True]))
        self.scale = 0.5
        self.title = "outer"
        self.table = torch.jit.Attribute({"b": 2}, Dict[str, int])  # noqa: UP006
        self.rates = torch.jit.Attribute([0.5], List[float])  # noqa: UP006

    def forward(self, x):
        return self.inner(x) * self.scale + torch.ones(2)


def sha256(tensor):
    dense = tensor.detach().contiguous()
    if dense.dtype is torch.bfloat16:
        data = (dense.float().numpy().view("<u4") >> 16).astype("<u2").tobytes()
    else:
        data = dense.numpy().tobytes()
    return hashlib.sha256(data).hexdigest()


def described(tensors):
    found: Dict[str, Any] = {}  # noqa: UP006
    for name, tensor in tensors.items():
        parts = {name: tensor}
        if tensor.layout is torch.sparse_coo:
            parts = {f"{name}.indices": tensor._indices(), f"{name}.values": tensor._values()}
        for part, dense in parts.items():
            found[part] = {
                "dtype": DTYPES[dense.dtype],
                "shape": list(dense.shape),
                "sha256": sha256(dense),
            }
    return found


class Writer:
    def __init__(self, folder):
        self.folder = folder
        self.files: Dict[str, Any] = {}  # noqa: UP006

    def path(self, form):
        return self.folder / f"torch-{VERSION}-{form}.pt"

    def note(self, form, kind, wrapper, tensors):
        found = {"kind": kind, "wrapper": wrapper, "tensors": described(tensors)}
        self.files[self.path(form).name] = found

    def save(self, form, zipped):
        tree = state_dict()
        checkpoint = {"state_dict": tree, "epoch": 1, "network": Inner()}
        torch.save(checkpoint, str(self.path(form)), _use_new_zipfile_serialization=zipped)
        self.note(form, "TORCH_ZIP" if zipped else "TORCH_LEGACY", "state_dict", tree)

    def save_module(self, form, module):
        module.save(str(self.path(form)))
        self.note(form, "TORCHSCRIPT", "module", dict(module.state_dict()))


def hide_paths():
    """Have the old form name a class's source file without its folder."""
    find = torch.serialization.get_source_lines_and_file

    def nameless(value):
        lines, number, file = find(value)
        return lines, number, Path(file).name

    torch.serialization.get_source_lines_and_file = nameless


def main():
    hide_paths()
    writer = Writer(Path(sys.argv[1]))
    writer.folder.mkdir(parents=True, exist_ok=True)
    writer.save("zip", zipped=True)
    writer.save("legacy", zipped=False)
    writer.save_module("script", torch.jit.script(Outer()))
    writer.save_module("trace", torch.jit.trace(nn.Linear(3, 2), values(1, 3)))
    path = writer.folder / "expected.json"
    known = json.loads(path.read_text())["files"] if path.exists() else {}
    document = {"files": {**known, **writer.files}}
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
