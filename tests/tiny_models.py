"""The tiny synthetic Body and MHR of the fixtures as GGUF files, for tests of the runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sam3d_gguf.convert.binding import BoundContract
from sam3d_gguf.convert.config import load_body_config
from sam3d_gguf.convert.contract import ContractName, TensorSpec, load_contract
from sam3d_gguf.convert.gguf_format import (
    GgmlType,
    GgufTensorSpec,
    GgufValue,
    ValueType,
    array,
    boolean,
    float32,
    string,
    uint32,
)
from sam3d_gguf.convert.gguf_writer import GgufLayout, GgufWriter
from sam3d_gguf.extractors.archive import Archive
from sam3d_gguf.extractors.byte_source import ByteSource
from sam3d_gguf.extractors.checkpoint import read_archive
from sam3d_gguf.extractors.files import open_source
from sam3d_gguf.extractors.materialize import iter_blocks
from sam3d_gguf.extractors.publication import PublicationSet

TINY = Path(__file__).parent / "fixtures" / "tiny-body-a"
_NARROWED: dict[str, np.dtype[Any]] = {"I64": np.dtype(np.int32), "BOOL": np.dtype(np.int8)}
_SKELETON = "character_torch.skeleton"


def write_tiny_body(path: Path) -> None:
    """Write the tiny Body checkpoint as a GGUF of layout `single`."""
    config_path = TINY / "model_config.yaml"
    config = load_body_config(config_path.read_bytes(), where=str(config_path))
    with open_source(TINY / "model.ckpt") as opened:
        archive = read_archive(opened.source)
        bound = load_contract("body").bind(_specs(archive), config)
        _write(path, "body", bound, archive, opened.source, {})


def write_tiny_mhr(path: Path) -> None:
    """Write the tiny MHR as a GGUF of layout `single`."""
    with open_source(TINY / "mhr_model.stub.pt") as opened:
        archive = read_archive(opened.source)
        bound = load_contract("mhr.lod1").bind(_specs(archive))
        names: Any = archive.attributes[f"{_SKELETON}.joint_names"]
        sizes: Any = archive.attributes[f"{_SKELETON}._pmi_buffer_sizes"]
        extra = {
            "sam3d.joint_names": array(ValueType.STRING, names),
            "sam3d.prefix_sizes": array(ValueType.UINT32, sizes),
        }
        _write(path, "mhr.lod1", bound, archive, opened.source, extra)


def _specs(archive: Archive) -> dict[str, TensorSpec]:
    return {name: TensorSpec(ref.dtype, ref.shape) for name, ref in archive.tensors.items()}


def _write(
    path: Path,
    name: ContractName,
    bound: BoundContract,
    archive: Archive,
    source: ByteSource,
    extra: dict[str, GgufValue],
) -> None:
    metadata = {
        "general.architecture": string(load_contract(name).architecture),
        **{entry.key: _value(entry.value_type, entry.value) for entry in bound.semantics()},
        **extra,
    }
    specs = [
        GgufTensorSpec(tensor.name, tensor.shape or (1,), GgmlType[tensor.gguf_dtype])
        for tensor in bound.tensors.values()
    ]
    layout = GgufLayout.plan(metadata, specs)
    with PublicationSet() as publications:
        publication = publications.create(path, layout.size)
        with GgufWriter(publication, layout) as writer:
            for tensor in bound.tensors.values():
                ref = archive.tensors[tensor.source_name]
                blocks = iter_blocks(source, ref)
                writer.write(tensor.name, [_narrowed(block, ref.dtype) for block in blocks])
            writer.seal()
        publications.commit()


def _narrowed(block: NDArray[Any], dtype: str) -> bytes:
    kind = _NARROWED.get(dtype)
    return (block if kind is None else block.astype(kind)).tobytes()


def _value(kind: str, value: Any) -> GgufValue:
    scalars: dict[str, Callable[[Any], GgufValue]] = {
        "uint32": uint32,
        "float32": float32,
        "bool": boolean,
        "string": string,
    }
    if kind in scalars:
        return scalars[kind](value)
    item = {"uint32[]": ValueType.UINT32, "float32[]": ValueType.FLOAT32}[kind]
    return array(item, value)
