"""Write the checkpoints of tests/fixtures/legacy with PyTorch, and what they hold by its account.

Runs in the oracle environment: `python tests/oracle/make_legacy.py tests/fixtures/legacy`.
Each file is as small as its form allows. `expected.json` gives for each file either its tensors
(shape, dtype, SHA-256 of the contiguous little-endian bytes) or a pattern of the refusal.
"""

import argparse
import collections
import datetime
import hashlib
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

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
Tree = dict[str, Any]


class Tagged(torch.Tensor):
    """A subclass whose tensors are rebuilt by `_rebuild_from_type_v2`."""


class Rebuilt:
    """Pickles as a call of `function`, which gives a tensor when it is loaded."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


class Callback:
    """Stands for what training frameworks leave in checkpoints."""

    def __init__(self) -> None:
        self.best = 0.25
        self.history = [np.float64(0.5), datetime.timedelta(seconds=3)]


Point = collections.namedtuple("Point", "x y")


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    integers = torch.randint(-100, 100, shape, generator=generator)
    if dtype is torch.bool:
        return integers > 0
    return (integers.abs() if dtype is torch.uint8 else integers).to(dtype)


def dtypes() -> Tree:
    tensors = {str(dtype)[6:]: values(2, 3, dtype=dtype) for dtype in DTYPES}
    special = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45, 65504.0, 2.0**-24])
    return tensors | {
        "scalar": torch.tensor(7.5),
        "empty": torch.empty(0),
        "empty.matrix": torch.empty(3, 0, 2, dtype=torch.int64),
        "one": torch.ones(1, 1, dtype=torch.bfloat16),
        "special": special,
        "special.half": special.half(),
        "special.bfloat16": special.bfloat16(),
    }


def views() -> Tree:
    base = values(6, 8)
    half = values(40, dtype=torch.bfloat16)
    return {
        "base": base,
        "same": base,
        "transposed": base.t(),
        "row": base[3],
        "column": base[:, 5],
        "window": base[1:4, 2:7],
        "every.other": base[::2, ::3],
        "expanded": base[0].expand(4, 8),
        "expanded.inner": base[:, :1].expand(6, 3),
        "overlapping": half.unfold(0, 8, 3),
        "permuted": half[:24].reshape(2, 3, 4).permute(2, 0, 1),
        "diagonal": base.diagonal(),
        "scalar.view": base[2, 3],
        "empty.view": base[6:],
        "as.strided": torch.as_strided(base, (2, 2, 2), (7, 0, 3), 4),
    }


def parameters() -> Tree:
    with_state = nn.Parameter(values(2, 2))
    with_state.tag = "kept by _rebuild_parameter_with_state"
    tagged = values(3, 2).as_subclass(Tagged)
    tagged.note = {"why": "state of a subclass"}
    storage = values(4)._typed_storage()
    return {
        "parameter": nn.Parameter(values(2, 3)),
        "parameter.frozen": nn.Parameter(values(3), requires_grad=False),
        "parameter.state": with_state,
        "buffer": nn.Buffer(values(4)),
        "subclass": tagged,
        "subclass.parameter": nn.Parameter(values(2).as_subclass(Tagged)),
        "rebuilt.v1": Rebuilt(torch._utils._rebuild_tensor, storage, 1, (3,), (1,)),
    }


def untyped() -> Tree:
    storage = values(8, dtype=torch.uint8).untyped_storage()
    return {
        "rebuilt.v3": Rebuilt(
            torch._utils._rebuild_tensor_v3,
            storage,
            1,
            torch.Size([3]),
            (1,),
            False,
            collections.OrderedDict(),
            torch.int16,
        ),
    }


def sparse() -> Tree:
    matrix = torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], [3.0, 4.0, 5.0], (2, 3))
    hybrid = torch.sparse_coo_tensor([[1, 3]], [[1.0, 2.0], [3.0, 4.0]], (5, 2)).coalesce()
    return {"weight": matrix, "hybrid": hybrid, "dense": values(2)}


def storages() -> Tree:
    return {
        "weight": values(3),
        "typed": values(3)._typed_storage(),
        "device": torch.device("cpu"),
        "size": torch.Size([1, 2]),
        "dtype": torch.float16,
        "layout": torch.strided,
    }


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(values(3, 4))
        self.register_buffer("steps", torch.tensor(5))
        self.sizes: list[int] = [3, 1, 2]
        self.rates: list[float] = [0.5, float("inf")]
        self.flags: list[bool] = [True, False]
        self.pair: tuple[int, str] = (7, "seven")

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.steps + self.sizes[0] + self.pair[0] + self.rates[0]


class Outer(nn.Module):
    missing: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.alias = self.inner
        self.names: list[str] = ["body_world", "root"]
        self.table: dict[str, int] = {"b": 2, "a": 1}
        self.tensors: list[Tensor] = [values(2), values(2, 2)]
        self.named: dict[str, Tensor] = {"left": values(1), "right": values(2)}
        self.register_buffer("flag", torch.tensor([True, False]))
        self.register_buffer("view", values(4, 6)[1:3, ::2])
        self.register_buffer("narrow", values(5, dtype=torch.bfloat16))
        self.register_buffer("empty", torch.empty(0))
        self.missing = None
        self.scale = 0.125
        self.title = "outer"
        self.layers = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.ReLU()])

    def forward(self, x: Tensor) -> Tensor:
        offset = torch.tensor([1.5, 2.5, 3.5, 4.5])
        first = self.inner(x) + offset if len(self.names) > self.table["a"] else self.alias(x)
        return first * self.scale + self.tensors[0].sum() + self.named["left"]


class Traced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("shift", values(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.shift + torch.arange(2)


def lightning(state: Tree) -> Tree:
    network = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(network.parameters())
    network(values(1, 2)).sum().backward()
    optimizer.step()
    return {
        "state_dict": collections.OrderedDict(state),
        "epoch": 3,
        "global_step": np.int64(12),
        "pytorch-lightning_version": "2.0",
        "optimizer_states": [optimizer.state_dict()],
        "callbacks": {"checkpoint": Callback()},
        "hyper_parameters": argparse.Namespace(rate=1e-3, path=pathlib.PurePosixPath("a/b")),
        "point": Point(1, 2),
        "loops": {3: {"done": True}, (1, 2): None},
        "array": np.arange(3),
        "set": {"a"},
        "bytes": b"\x00\xff",
    }


def refused() -> dict[str, tuple[Tree | nn.Module | Tensor | list[Tensor], str]]:
    conjugated = torch.tensor([1 + 2j]).conj()
    return {
        "complex": ({"good": values(1), "bad": torch.tensor([1j])}, "'bad' .*Complex"),
        "quantized": (
            {"bad": torch.quantize_per_tensor(values(2), 0.1, 0, torch.qint8)},
            "'bad' is quantized",
        ),
        "meta": ({"bad": torch.empty(3, device="meta")}, "'bad' is a meta tensor"),
        "uint16": ({"bad": torch.tensor([1], dtype=torch.uint16)}, "'bad' .*uint16"),
        "float8": ({"bad": values(2).to(torch.float8_e4m3fn)}, "'bad' .*float8_e4m3fn"),
        "csr": ({"bad": torch.eye(2).to_sparse_csr()}, "'bad' .*sparse_csr"),
        "negated": ({"bad": conjugated.imag}, "'bad' is stored conjugated or negated"),
        "nested": (
            {"bad": torch.nested.nested_tensor([values(1), values(2)])},
            "'bad' is a nested tensor",
        ),
        "module": (Traced(), "not a state dict"),
        "tensor": (values(2), "holds tensor, not a state dict"),
        "list": ([values(2)], "holds list of 1, not a state dict"),
        "keys": ({3: values(2)}, "key 3, which is not text"),
        "ambiguous": (
            {"model": {"a": values(1)}, "state_dict": {"a": values(1)}},
            "several state dicts: model, state_dict",
        ),
        "nothing": ({"epoch": 3}, "holds no tensors"),
        "deep": ({"encoder": {"weight": values(2)}}, "holds no tensors .*'encoder'"),
    }


def sha256(tensor: Tensor) -> str:
    flat = tensor.detach().as_subclass(Tensor).contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def described(tensors: dict[str, Tensor]) -> dict[str, Tree]:
    found: dict[str, Tree] = {}
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


def loaded_tensors(path: pathlib.Path, wrapper: str) -> dict[str, Tensor]:
    tree = torch.load(path, weights_only=False)
    tree = tree if wrapper == "flat" else tree[wrapper]
    return {name: value for name, value in tree.items() if isinstance(value, Tensor)}


class Writer:
    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.expected: dict[str, Tree] = {}

    def save(self, name: str, tree: Any, wrapper: str = "flat", **options: Any) -> None:
        path = self.folder / name
        torch.save(tree, path, **options)
        self.expected[name] = {
            "kind": "TORCH_ZIP"
            if options.get("_use_new_zipfile_serialization", True)
            else "TORCH_LEGACY",
            "wrapper": wrapper,
            "tensors": described(loaded_tensors(path, wrapper)),
        }

    def save_refused(self, name: str, tree: Any, pattern: str, **options: Any) -> None:
        torch.save(tree, self.folder / name, **options)
        self.expected[name] = {"refused": pattern}

    def save_module(self, name: str, module: torch.jit.ScriptModule, extra: Tree) -> None:
        path = self.folder / name
        torch.jit.save(module, path)
        tensors = dict(torch.jit.load(path).state_dict()) | extra.pop("tensors", {})
        self.expected[name] = {
            "kind": "TORCHSCRIPT",
            "wrapper": "module",
            "tensors": described(tensors),
            **extra,
        }


def write_all(folder: pathlib.Path) -> dict[str, Tree]:
    torch.manual_seed(0)
    writer = Writer(folder)
    legacy = {"_use_new_zipfile_serialization": False}
    for protocol in range(1, 6):
        writer.save(f"zip-protocol{protocol}.pt", parameters(), pickle_protocol=protocol)
        writer.save(
            f"legacy-protocol{protocol}.pt", parameters(), pickle_protocol=protocol, **legacy
        )
    for name, make in (
        ("dtypes", dtypes),
        ("views", views),
        ("sparse", sparse),
        ("storages", storages),
    ):
        writer.save(f"zip-{name}.pt", make())
        writer.save(f"legacy-{name}.pt", make(), **legacy)
    model = collections.OrderedDict(Traced().state_dict())
    writer.save("zip-untyped.pt", untyped() | {"storage": values(3).untyped_storage()})
    writer.save("zip-state-dict.pt", lightning(views()), "state_dict")
    writer.save("legacy-state-dict.pt", lightning(views()), "state_dict", **legacy)
    writer.save("zip-model.pt", {"model": model, "iteration": torch.tensor(4)}, "model")
    writer.save("legacy-model.pt", {"model": model, "network": Traced()}, "model", **legacy)
    for name, (tree, pattern) in refused().items():
        writer.save_refused(f"refused-{name}.pt", tree, pattern)
    for name in ("complex", "quantized", "module"):
        tree, pattern = refused()[name]
        writer.save_refused(f"refused-legacy-{name}.pt", tree, pattern, **legacy)
    write_torchscript(writer)
    return writer.expected


def write_torchscript(writer: Writer) -> None:
    outer = Outer()
    attributes = {
        "names": outer.names,
        "table": outer.table,
        "title": outer.title,
        "scale": outer.scale,
        "missing": None,
        "inner.sizes": outer.inner.sizes,
        "inner.rates": [0.5, "inf"],
        "inner.flags": outer.inner.flags,
        "inner.pair": list(outer.inner.pair),
    }
    tensors = {f"tensors.{index}": tensor for index, tensor in enumerate(outer.tensors)}
    tensors |= {f"named.{key}": tensor for key, tensor in outer.named.items()}
    writer.save_module(
        "script.pt", torch.jit.script(outer), {"attributes": attributes, "tensors": tensors}
    )
    writer.save_module("trace.pt", torch.jit.trace(Traced(), values(1, 3)), {})


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    expected = write_all(folder)
    document = {"torch": torch.__version__, "files": expected}
    (folder / "expected.json").write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
