"""MHR alone as a Python object.

with MhrModel.load("mhr.gguf") as model:
    mesh = model(identity, model_parameters)
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from sam3d_gguf.runtime.body.mhr import Mhr, MhrMesh, check_shapes
from sam3d_gguf.runtime.body.neural_mhr import GgmlMhrProducts
from sam3d_gguf.runtime.geometry.arrays import Float32
from sam3d_gguf.runtime.geometry.mhr_rig import MhrRig, load_rig
from sam3d_gguf.runtime.ggml.backend import Backend, BackendName, open_backend
from sam3d_gguf.runtime.ggml.errors import BackendError
from sam3d_gguf.runtime.ggml.host_memory import check_available
from sam3d_gguf.runtime.ggml.library import Precision, load_library
from sam3d_gguf.runtime.loading import load_weights
from sam3d_gguf.runtime.weights import Weights
from sam3d_gguf.schemas.closing import Closing
from sam3d_gguf.schemas.errors import InputError

CHUNK = 16
"""Bodies that are computed at once; more only take more memory."""

_BYTES_A_VERTEX = 5 * 3 * 4
"""Of a body's results: two meshes, both again while they are joined, and one as a file."""


class MhrModel(Closing):
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
        self._closed = False
        with ExitStack() as stack:
            if owns_backend:
                stack.enter_context(backend)
            products = stack.enter_context(GgmlMhrProducts(backend, weights))
            self.rig: MhrRig = load_rig(weights)
            self._products = products
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
        with load_weights(Path(path), "mhr", verify=verify) as weights:
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
        self, identity: ArrayLike, parameters: ArrayLike, expression: ArrayLike | None = None
    ) -> MhrMesh:
        """Pose B bodies; see `Mhr`.

        Raises:
            InputError: shapes that do not fit, numbers that are not finite, or a mesh that is not.
            BackendError: the results have no room in memory, or the model is closed.
            CancelledError: `cancel` was called.
        """
        shape = _numbers(identity, "identity")
        pose = _numbers(parameters, "parameters")
        face = None if expression is None else _numbers(expression, "expression")
        check_shapes(shape, pose, face)
        size = _BYTES_A_VERTEX * len(pose) * self.rig.skinning.count
        check_available(size, f"{len(pose)} meshes")
        with self._lock, np.errstate(all="ignore"):
            if self._closed:
                raise BackendError("the model is closed", action="Load it again.")
            parts = [self._part(shape, pose, face, start) for start in range(0, len(pose), CHUNK)]
        if len(parts) == 1:
            return parts[0]
        return MhrMesh(
            vertices=np.concatenate([part.vertices for part in parts]),
            states=np.concatenate([part.states for part in parts]),
            local=np.concatenate([part.local for part in parts]),
            rest=np.concatenate([part.rest for part in parts]),
        )

    def _part(
        self, identity: Float32, pose: Float32, expression: Float32 | None, start: int
    ) -> MhrMesh:
        rows = slice(start, start + CHUNK)
        part = self._mhr(
            identity if len(identity) == 1 else identity[rows],
            pose[rows],
            None if expression is None else expression[rows],
        )
        finite = np.isfinite(part.vertices).all(axis=(1, 2))
        if not finite.all():
            raise InputError(
                "the mesh is not finite",
                where=f"row {start + int(np.argmin(finite))}",
                expected="parameters of a body: angles in radians, scales as powers of 2",
            )
        return part

    def cancel(self) -> None:
        """Make the current or next call raise CancelledError; from any thread."""
        self._products.cancel()

    def close(self) -> None:
        """Free the model, and the backend if `load` opened it; safe to call twice."""
        with self._lock:
            self._closed = True
            self._closing.close()


def _numbers(values: ArrayLike, what: str) -> Float32:
    try:
        with np.errstate(over="ignore"):
            found = np.asarray(values, np.float32)
    except (TypeError, ValueError) as error:
        raise InputError(f"{what} are not numbers") from error
    if not np.isfinite(found).all():
        raise InputError(f"a number of {what} is not finite", expected="finite numbers")
    return found
