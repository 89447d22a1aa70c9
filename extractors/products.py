"""Which safetensors files a model's archive becomes, and what each of them holds.

The files are the published ones: Body is split into the DINOv3 backbone, whose names lose their
prefix, and all the rest; MHR is one file, and so is each part of Objects. Floating-point tensors narrower than F32 are widened
exactly; everything else keeps its type. The sandboxed worker writes by this plan and the host
checks by it, each from its own view of the source.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from sam3d_gguf.extractors.models import OBJECTS, part
from sam3d_gguf.schemas.errors import InputError

WIDENED = {"BF16": "F32", "F16": "F32"}


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor of the archive: its name there, its type (safetensors names) and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProductTensor:
    """A tensor of a product file; `source` is None where the tensor is added as zeros."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: SourceTensor | None
    reason: str = ""

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a 0-d tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Product:
    """A safetensors file and its tensors, sorted by name."""

    file: str
    tensors: tuple[ProductTensor, ...]


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    prefix: str
    added: Callable[[Mapping[str, SourceTensor]], Iterable[ProductTensor]]


def plan_products(model: str, tensors: Iterable[SourceTensor]) -> tuple[Product, ...]:
    """Assign every tensor of the archive to a product file.

    Args:
        model: "body", "mhr" or a part of Objects.
        tensors: the archive's tensors, in any order, with unique names.

    Raises:
        InputError: two tensors would get the same name in one file.
    """
    pending = {tensor.name: tensor for tensor in tensors}
    products: list[Product] = []
    for file in _FILES[model]:
        taken = {n: t for n, t in pending.items() if n.startswith(file.prefix)}
        pending = {n: t for n, t in pending.items() if n not in taken}
        planned = [_product_tensor(file, tensor) for tensor in taken.values()]
        named = {tensor.name for tensor in planned}
        planned += [tensor for tensor in file.added(taken) if tensor.name not in named]
        planned.sort(key=lambda tensor: tensor.name)
        products.append(Product(file.name, tuple(planned)))
    return tuple(products)


def product_files(model: str) -> tuple[str, ...]:
    """The names of the product files of a model."""
    return tuple(file.name for file in _FILES[model])


def _product_tensor(file: _File, tensor: SourceTensor) -> ProductTensor:
    name = tensor.name.removeprefix(file.prefix)
    if not name:
        raise InputError("a tensor's name is only the prefix of its file", where=tensor.name)
    return ProductTensor(name, WIDENED.get(tensor.dtype, tensor.dtype), tensor.shape, tensor)


def _nothing(_tensors: Mapping[str, SourceTensor]) -> Iterable[ProductTensor]:
    return ()


def _mask_token(tensors: Mapping[str, SourceTensor]) -> Iterable[ProductTensor]:
    """The published backbone file holds this tensor, the checkpoint doesn't."""
    cls_token = tensors.get("backbone.encoder.cls_token")
    if cls_token is None or not cls_token.shape:
        return ()
    reason = (
        "absent from the checkpoint; the original model initialises it to zeros and multiplies it "
        "by 0 at inference"
    )
    return (ProductTensor("mask_token", "F32", (1, cls_token.shape[-1]), None, reason),)


_FILES: dict[str, tuple[_File, ...]] = {
    "body": (
        _File("backbone.safetensors", "backbone.encoder.", _mask_token),
        _File("other.safetensors", "", _nothing),
    ),
    "mhr": (_File("mhr.safetensors", "", _nothing),),
    **{model: (_File(f"{part(model)}.safetensors", "", _nothing),) for model in OBJECTS},
}
