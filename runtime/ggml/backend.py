"""Devices and the backend that a model runs on."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from typing import Literal, get_args

from sam3d_gguf.runtime.ggml.cores import usable_cores
from sam3d_gguf.runtime.ggml.errors import BackendError
from sam3d_gguf.runtime.ggml.functions import SET_THREADS, DeviceProperties
from sam3d_gguf.runtime.ggml.host_memory import (
    BLAS_THREAD,
    HEADROOM,
    available_memory,
    require_memory,
    require_threads,
)
from sam3d_gguf.runtime.ggml.library import (
    VULKAN_MODULE,
    Kernels,
    Library,
    LibraryFile,
    Precision,
    load_blas_module,
    load_kernels,
    load_vulkan_module,
)
from sam3d_gguf.schemas.closing import Closing

BackendName = Literal["cpu", "vulkan"]
DeviceType = Literal["cpu", "gpu", "integrated gpu", "accelerator", "meta"]

MAX_THREADS = 512

_NO_DEVICE = (
    "Install the GPU's Vulkan driver; or, for small models on Mesa's llvmpipe, which GGML leaves out "
    "unless it is asked for, set GGML_VK_VISIBLE_DEVICES=0 in the environment"
)
_DEVICE_TYPES: tuple[DeviceType, ...] = ("cpu", "gpu", "integrated gpu", "accelerator", "meta")
_REGISTRY_NAMES: dict[str, BackendName] = {"CPU": "cpu", "Vulkan": "vulkan"}


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a backend.

    Attributes:
        index: among the devices of its backend, as `--device` takes it.
        memory_free: bytes; of the CPU the available memory of the machine.
        memory_total: bytes.
    """

    backend: BackendName
    index: int
    name: str
    description: str
    type: DeviceType
    memory_free: int
    memory_total: int
    address: int


def list_devices(library: Library) -> tuple[Device, ...]:
    """The devices of every registered backend, in GGML's order."""
    devices: list[Device] = []
    for position in range(library.call("ggml_backend_dev_count")):
        address = library.pointer("ggml_backend_dev_get", position)
        registry = library.pointer("ggml_backend_dev_backend_reg", address)
        backend = _REGISTRY_NAMES.get(library.text("ggml_backend_reg_name", registry))
        if backend is not None:
            index = sum(device.backend == backend for device in devices)
            devices.append(_describe(library, address, backend, index))
    return tuple(devices)


def _describe(library: Library, address: int, backend: BackendName, index: int) -> Device:
    properties = DeviceProperties()
    library.call("ggml_backend_dev_get_props", address, ctypes.byref(properties))
    free = int(properties.memory_free)
    if backend == "cpu":
        free = min(free, available_memory())
    return Device(
        backend=backend,
        index=index,
        name=bytes(properties.name or b"").decode("utf-8", "replace"),
        description=bytes(properties.description or b"").decode("utf-8", "replace"),
        type=_DEVICE_TYPES[int(properties.type)],
        memory_free=free,
        memory_total=int(properties.memory_total),
        address=address,
    )


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A backend that computes large products on the CPU's memory in the CPU backend's place.

    Attributes:
        kernels: operations of the CPU backend made for use with it, where they were built.
    """

    name: str
    device: int
    address: int
    kernels: Kernels | None


class Backend(Closing):
    """One device, ready to compute. Not safe for concurrent use; close it with `with`.

    Attributes:
        files: every library that takes part, with its hash.
        accelerator: BLAS for the CPU backend's large products, where it is installed.
    """

    def __init__(
        self, library: Library, device: Device, precision: Precision, module: LibraryFile | None
    ) -> None:
        self.library = library
        self.device = device
        self.precision: Precision = precision
        self.files = (*library.files, module) if module else library.files
        self.accelerator: Accelerator | None = None
        self._threads = 1
        self._checked = threading.local()
        require_memory(HEADROOM, "the backend")
        self.address = library.pointer("ggml_backend_dev_init", device.address, None)
        self.buffer_type = library.pointer("ggml_backend_dev_buffer_type", device.address)
        self.max_buffer_size = int(library.call("ggml_backend_buft_get_max_size", self.buffer_type))

    @property
    def has_kernels(self) -> bool:
        """Whether the CPU's operations beside BLAS are there."""
        return self.accelerator is not None and self.accelerator.kernels is not None

    @property
    def threads(self) -> int:
        """Threads that compute; 1 on a GPU, where the caller's waits."""
        return self._threads

    def set_threads(self, threads: int) -> None:
        """Sets the number of threads of the CPU backend.

        Raises:
            BackendError: the number is out of range, or the device is not the CPU.
        """
        if type(threads) is not int or not 1 <= threads <= MAX_THREADS:
            raise BackendError(
                f"{threads} threads were asked for", expected=f"a number of 1..{MAX_THREADS}"
            )
        self._set_threads(self.device.address, self.address, threads)
        self._threads = threads
        self._checked = threading.local()
        if self.accelerator is not None:
            self._set_threads(self.accelerator.device, self.accelerator.address, threads)

    def _set_threads(self, device: int, address: int, threads: int) -> None:
        registry = self.library.pointer("ggml_backend_dev_backend_reg", device)
        function = self.library.call(
            "ggml_backend_reg_get_proc_address", registry, b"ggml_backend_set_n_threads"
        )
        if not function:
            raise BackendError(f"{self.device.name} has no number of threads to set")
        SET_THREADS(function)(address, threads)

    def accelerate(self) -> None:
        """Lets BLAS compute the large products, where `just setup-blas` installed it.

        Raises:
            BackendError: the module is there and does not load.
        """
        module = load_blas_module(self.library)
        if module is None or self.accelerator is not None:
            return
        registry = self.library.pointer("ggml_backend_reg_by_name", b"BLAS")
        device = self.library.pointer("ggml_backend_reg_dev_get", registry, 0)
        address = self.library.pointer("ggml_backend_dev_init", device, None)
        kernels = load_kernels(self.library.directory)
        self.accelerator = Accelerator("BLAS", device, address, kernels)
        self.files = (*self.files, module, *([kernels.file] if kernels else []))

    def free_memory(self) -> int:
        """Bytes that are free on the device now."""
        device = self.device
        return _describe(self.library, device.address, device.backend, device.index).memory_free

    def check_memory(self, size: int, purpose: str) -> None:
        """Refuses an allocation that the device cannot hold.

        Raises:
            BackendError: fewer bytes are free.
        """
        free = self.free_memory()
        if size > free:
            raise BackendError(
                f"{purpose} need {size / 2**20:.0f} MiB and {free / 2**20:.0f} MiB are free",
                where=f"{self.device.name} ({self.device.description})",
                action="Free memory, or choose another device.",
            )

    def check_host(self) -> None:
        """Refuses to build or compute a graph where libggml would end the process.

        Raises:
            BackendError: this machine has no memory or threads for it.
        """
        require_memory(HEADROOM, "the next step")
        # OpenMP keeps the threads that it has started for a thread.
        if not getattr(self._checked, "threads", False):
            require_threads(self._threads - 1)
            self._checked.threads = True
        if self.accelerator is not None:
            require_memory(HEADROOM + BLAS_THREAD * self._threads, "the next step")

    def close(self) -> None:
        """Frees the backend; its weights and graphs must be closed before."""
        if self.accelerator is not None:
            self.library.call("ggml_backend_free", self.accelerator.address)
            self.accelerator = None
        if self.address:
            self.library.call("ggml_backend_free", self.address)
            self.address = 0


def open_backend(
    library: Library,
    backend: BackendName = "cpu",
    *,
    device: int = 0,
    threads: int | None = None,
    precision: Precision = "strict-f32",
    expect_device: str | None = None,
) -> Backend:
    """Opens the chosen device; never another one in its place.

    Args:
        device: index among the backend's devices.
        threads: of the CPU backend; None is one for each core that this process may use.
        precision: `strict-f32` computes every product in F32; `fast` lets the device use the
            weights' own type and narrower arithmetic.
        expect_device: the name or description that the device must have.

    Raises:
        BackendError: the backend, the device or the number of threads is not there, or the device
            is another one than expected.
    """
    if backend not in _REGISTRY_NAMES.values() or precision not in get_args(Precision):
        raise BackendError(
            f"backend {backend!r} and precision {precision!r}",
            expected=f"one of {', '.join(_REGISTRY_NAMES.values())}, and of "
            + ", ".join(get_args(Precision)),
        )
    module = load_vulkan_module(library, precision) if backend == "vulkan" else None
    candidates = [each for each in list_devices(library) if each.backend == backend]
    if type(device) is not int or not 0 <= device < len(candidates):
        known = ", ".join(f"{each.index}: {each.description}" for each in candidates) or "none"
        raise BackendError(
            f"the {backend} backend has no device {device}",
            expected=f"one of its {len(candidates)} devices ({known})",
            where=VULKAN_MODULE if backend == "vulkan" else "",
            action="" if candidates else _NO_DEVICE,
        )
    chosen = candidates[device]
    if expect_device is not None and expect_device not in (chosen.name, chosen.description):
        raise BackendError(
            f"device {device} is {chosen.name} ({chosen.description})", expected=expect_device
        )
    opened = Backend(library, chosen, precision, module)
    try:
        if backend == "cpu":
            opened.accelerate()
            cores = min(usable_cores(), MAX_THREADS)
            opened.set_threads(cores if threads is None else threads)
    except BackendError:
        opened.close()
        raise
    return opened
