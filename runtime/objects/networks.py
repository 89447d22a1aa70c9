"""Networks on the device while a stage needs them, or for as long as the model is open."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from sam3d_gguf.extractors.models import ObjectsModel
from sam3d_gguf.runtime.ggml.backend import Backend
from sam3d_gguf.runtime.ggml.network import DeviceModel
from sam3d_gguf.runtime.objects.release import ObjectsRelease
from sam3d_gguf.runtime.weights import Weights
from sam3d_gguf.schemas.closing import Closing

_Model = TypeVar("_Model", bound=DeviceModel)
_KEEPS = "llvmpipe"
"""Mesa's rasteriser ends the process where a network computes after another's buffers were freed."""

_Key = tuple[type[DeviceModel], ObjectsModel]


class Networks(Closing):
    """Opens networks of a release.

    Args:
        resident: keep each on the device until `close`; so does Mesa's llvmpipe whatever is asked.
    """

    def __init__(self, backend: Backend, release: ObjectsRelease, *, resident: bool) -> None:
        self._backend = backend
        self._release = release
        self._resident = resident or backend.device.description.startswith(_KEEPS)
        self._kept: dict[_Key, DeviceModel] = {}

    @contextlib.contextmanager
    def opened(
        self, kind: Callable[[Backend, Weights], _Model], model: ObjectsModel
    ) -> Generator[_Model]:
        """A network with the weights of a part; freed at the end unless it stays resident.

        Raises:
            BackendError: the device has too little memory.
            ContractError: the part is incomplete.
        """
        key: Any = (kind, model)
        if key in self._kept:
            kept: Any = self._kept[key]
            yield kept
            return
        network = kind(self._backend, self._release[model])
        if self._resident:
            self._kept[key] = network
            yield network
            return
        with network:
            yield network

    def close(self) -> None:
        """Free what is resident."""
        for network in self._kept.values():
            network.close()
        self._kept.clear()
