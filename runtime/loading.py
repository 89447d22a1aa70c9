"""Open a GGUF for the runtime: read strictly, bind to its contract, map."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

from sam3d_gguf.convert.contract import ContractName, TensorSpec, load_contract
from sam3d_gguf.convert.gguf_format import GgufValue
from sam3d_gguf.convert.gguf_reader import GgufFile, read_gguf
from sam3d_gguf.extractors.files import open_source
from sam3d_gguf.runtime.weights import Weights, WeightTensor
from sam3d_gguf.schemas.errors import ContractError

ARCHITECTURE_KEY = "general.architecture"


def load_weights(path: Path, contract_name: ContractName) -> Weights:
    """The tensors and metadata of a model file, after every check.

    Args:
        path: a GGUF of layout `single`.
        contract_name: what the file must be.

    Raises:
        InputError: not a file that can be read, or not a GGUF of the accepted form.
        ContractError: another architecture, or tensors that do not meet the contract.
    """
    with open_source(path) as opened:
        file = read_gguf(opened.source)
        metadata = {key: _plain(value) for key, value in file.metadata.items()}
        _check(file, metadata, contract_name, path)
        data = mmap.mmap(opened.fd, 0, prot=mmap.PROT_READ)
        opened.assert_unchanged()
    tensors = {
        name: WeightTensor(name, tensor.shape, tensor.type.name, tensor.offset)
        for name, tensor in file.tensors.items()
    }
    return Weights(path, metadata, tensors, data)


def _check(
    file: GgufFile, metadata: dict[str, Any], contract_name: ContractName, path: Path
) -> None:
    contract = load_contract(contract_name)
    architecture = metadata.get(ARCHITECTURE_KEY)
    if architecture != contract.architecture:
        raise ContractError(
            f"the architecture is {architecture!r}",
            where=str(path),
            expected=contract.architecture,
            action="Give the file that was converted as this model.",
        )
    contract.bind_gguf(
        {name: TensorSpec(t.type.name, t.shape) for name, t in file.tensors.items()},
        contract.stated_dimensions(metadata),
        where=str(path),
    )


def _plain(value: GgufValue) -> Any:
    if isinstance(value.value, tuple):
        return [_plain(item) if isinstance(item, GgufValue) else item for item in value.value]
    return value.value
