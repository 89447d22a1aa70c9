"""MHR alone as a Python object.

with MhrModel.load("mhr.gguf") as model:
    mesh = model(identity, model_parameters)
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from sam3d_gguf.runtime.body.mhr import Mhr, MhrMesh
from sam3d_gguf.runtime.body.neural_mhr import GgmlMhrProducts
from sam3d_gguf.runtime.geometry.arrays import Float32
from sam3d_gguf.runtime.geometry.mhr_rig import MhrRig, load_rig
from sam3d_gguf.runtime.ggml.backend import Backend, BackendName, open_backend
from sam3d_gguf.runtime.ggml.library import Precision, load_library
from sam3d_gguf.runtime.loading import load_weights
from sam3d_gguf.runtime.weights import Weights
from sam3d_gguf.schemas.errors import InputError

CHUNK = 16
"""Bodies that are computed at once; more only take more memory."""


class MhrModel:
    """A loaded MHR. Calls from several threads run one after another; close it with `with`."""

    def __init__(self, weights: Weights, backend: Backend, *, owns_backend: bool = False) -> None:
        """Place a checked MHR file on a device.

        Raises:
            ContractError: the file is incomplete.
            BackendError: the device has too little memory.
        """
        self.backend = backend
        self.metadata: dict[str, Any] = dict(weights.metadata)
        self._lock = threading.Lock()
        with ExitStack() as stack:
            if owns_backend:
                stack.enter_context(backend)
            products = stack.enter_context(GgmlMhrProducts(backend, weights))
            self.rig: MhrRig = load_rig(weights)
            self._mhr = Mhr(products, self.rig)
            self._closing = stack.pop_all()

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        *,
        backend: BackendName = "cpu",
        device: int = 0,
        threads: int | None = None,
        precision: Precision = "strict-f32",
        expect_device: str | None = None,
        verify: bool = False,
    ) -> Self:
        """Open an MHR GGUF, check it, and place it on a device; see `BodyModel.load`."""
        weights = load_weights(Path(path), "mhr", verify=verify)
        opened = open_backend(
            load_library(),
            backend,
            device=device,
            threads=threads,
            precision=precision,
            expect_device=expect_device,
        )
        return cls(weights, opened, owns_backend=True)

    def __call__(
        self, identity: Float32, parameters: Float32, expression: Float32 | None = None
    ) -> MhrMesh:
        """Pose B bodies; see `Mhr`.

        Raises:
            InputError: shapes that do not fit, or numbers that are not finite.
        """
        given = [identity, parameters, *([] if expression is None else [expression])]
        if not all(np.isfinite(array).all() for array in given):
            raise InputError("an MHR input is not finite", expected="finite numbers")
        with self._lock:
            parts = [
                self._mhr(
                    identity if len(identity) == 1 else identity[start : start + CHUNK],
                    parameters[start : start + CHUNK],
                    None if expression is None else expression[start : start + CHUNK],
                )
                for start in range(0, max(1, len(parameters)), CHUNK)
            ]
        return MhrMesh(
            vertices=np.concatenate([part.vertices for part in parts]),
            states=np.concatenate([part.states for part in parts]),
            local=np.concatenate([part.local for part in parts]),
            rest=np.concatenate([part.rest for part in parts]),
        )

    def close(self) -> None:
        """Free the model, and the backend if `load` opened it; safe to call twice."""
        with self._lock:
            self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
