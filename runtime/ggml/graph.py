"""Compute graphs: built once per shape, every operation named, run many times."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sam3d_gguf.runtime.ggml.backend import Backend
from sam3d_gguf.runtime.ggml.errors import BackendError
from sam3d_gguf.runtime.ggml.functions import MAX_DIMS, TensorStruct
from sam3d_gguf.runtime.ggml.library import Kernels
from sam3d_gguf.runtime.ggml.store import GGML_TYPES, Tensor, new_context, new_tensor

FloatArray = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.int32]
InputArray = FloatArray | IndexArray

MAX_TENSORS = 4096
_F32_BYTES = 4
_PRECISION_F32 = 10
_SCORES = 1 << 25
"""Of attention by products at a time: 128 MiB, which every Vulkan device takes as one tensor."""

_ALIGNMENT = 256
"""Bytes: Vulkan never asks more of where a part of a tensor begins."""
GATHER_STEP = _ALIGNMENT // 4
"""A part of an index input that is gathered by begins at a multiple of so many."""

_KEYS = 1280
"""Of attention by the kernel at a time; their scores stay in a core's cache."""

_CONVOLVED = 1024
"""Outputs of a convolution that a thread computes at a time."""

_GROUP = 384
"""Values of each that it multiplies at once, if a single tap has not more."""

_GELU_SCALE = 2 * math.sqrt(2 / math.pi)
_GELU_CUBE = 0.044715


@dataclass(frozen=True, slots=True)
class Node:
    """One operation of a graph, for reports and tests.

    Attributes:
        buffer: name of the backend buffer that holds the result, such as `CPU` or `Vulkan0`.
        backend: name of what computes it: the device's, or `BLAS`.
    """

    name: str
    operation: str
    buffer: str
    backend: str


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive operations of a graph that one backend computes."""

    backend: int
    graph: int


class Arena:
    """The one compute buffer that all graphs of a model share, as large as the largest needs."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._allocators: list[int] = [self._new_allocator()]
        self._placed: set[Graph] = set()

    @property
    def size(self) -> int:
        """Bytes of the compute buffer now; it never shrinks."""
        return sum(map(self._size_of, self._allocators))

    def place(self, graph: Graph) -> None:
        """Gives the graph's tensors their places in the buffer, which they keep until it grows.

        Raises:
            BackendError: the device has too little memory.
        """
        if graph in self._placed:
            return
        library = self.backend.library
        graph.forget_places()
        needed = self._measure(graph)
        missing = needed - self._size_of(self._allocators[-1])
        # A buffer above the device's limit is several, each of which may grow alone.
        if missing > 0 or self._size_of(self._allocators[-1]) > self.backend.max_buffer_size:
            self._placed.clear()
        if missing > 0:
            self._grow(graph.name, needed, missing)
        allocator = self._allocators[-1]
        # Explicitly, because alloc_graph alone keeps the places of another graph of this size.
        if not library.call("ggml_gallocr_reserve", allocator, graph.address) or not (
            library.call("ggml_gallocr_alloc_graph", allocator, graph.address)
        ):
            raise BackendError(
                f"no memory for the {needed} bytes of intermediates of {graph.name}",
                where=self.backend.device.name,
                action="Free memory, or choose another device.",
            )
        self._placed.add(graph)
        graph.note_buffers()

    def _grow(self, name: str, needed: int, missing: int) -> None:
        purpose = f"the intermediates of {name}"
        if self.backend.device.backend != "vulkan":
            self.backend.check_memory(missing, purpose)
            return
        # The smaller buffer stays until the end: Mesa's llvmpipe (seen with 22.3) goes on using
        # the bindings of a buffer that was freed between two dispatches.
        self.backend.check_memory(needed, purpose)
        if self._size_of(self._allocators[-1]):
            self._allocators.append(self._new_allocator())

    def _measure(self, graph: Graph) -> int:
        """Bytes that the graph needs, measured apart: measuring spoils an allocator."""
        library = self.backend.library
        allocator = self._new_allocator()
        needed = ctypes.c_size_t(0)
        library.call(
            "ggml_gallocr_reserve_n_size",
            allocator,
            graph.address,
            None,
            None,
            ctypes.byref(needed),
        )
        library.call("ggml_gallocr_free", allocator)
        return needed.value

    def _new_allocator(self) -> int:
        return self.backend.library.pointer("ggml_gallocr_new", self.backend.buffer_type)

    def _size_of(self, allocator: int) -> int:
        return int(self.backend.library.call("ggml_gallocr_get_buffer_size", allocator, 0))

    def close(self) -> None:
        """Frees the buffer."""
        for allocator in self._allocators:
            self.backend.library.call("ggml_gallocr_free", allocator)
        self._allocators.clear()
        self._placed.clear()


class Graph:
    """A built graph. `run` may be called any number of times, by one thread at a time."""

    def __init__(
        self,
        name: str,
        arena: Arena,
        context: int,
        address: int,
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
        rows: Mapping[str, int],
    ) -> None:
        self.name = name
        self.address = address
        self._arena = arena
        self._contexts = [context]
        self._segments = [Segment(arena.backend.address, address)]
        self._buffer_names: dict[int, str] = {}
        self._inputs = inputs
        self._outputs = outputs
        self._rows = rows

    def run(self, inputs: Mapping[str, InputArray]) -> dict[str, FloatArray]:
        """Computes every output from float32 and index inputs of the declared shapes.

        Raises:
            BackendError: an input is missing, unknown or of another shape, an index is out of
                range, memory is too small, or the device failed.
        """
        self._check(inputs)
        self._arena.backend.check_host()
        self._arena.place(self)
        library = self._arena.backend.library
        keep: list[npt.NDArray[Any]] = []
        for name, tensor in self._inputs.items():
            kind: type[np.generic] = np.int32 if name in self._rows else np.float32
            array: npt.NDArray[Any] = np.ascontiguousarray(inputs[name], kind)
            keep.append(array)
            if struct_of(tensor).buffer:
                library.call(
                    "ggml_backend_tensor_set",
                    tensor.address,
                    int(array.ctypes.data),
                    0,
                    array.nbytes,
                )
        for segment in self._segments:
            status = library.call("ggml_backend_graph_compute", segment.backend, segment.graph)
            if status != 0:
                raise BackendError(
                    f"the device ended {self.name} with status {status}",
                    where=self._arena.backend.device.name,
                )
        return {name: self._read(tensor) for name, tensor in self._outputs.items()}

    def accelerate(self) -> None:
        """Hands the products that the backend's accelerator takes to it."""
        backend = self._arena.backend
        library, accelerator = backend.library, backend.accelerator
        if accelerator is None:
            return
        runs: list[tuple[int, list[int]]] = []
        for node in self._addresses():
            taken = library.text("ggml_op_desc", node) == "MUL_MAT" and library.call(
                "ggml_backend_dev_supports_op", accelerator.device, node
            )
            address = accelerator.address if taken else backend.address
            if not runs or runs[-1][0] != address:
                runs.append((address, []))
            runs[-1][1].append(node)
        overheads = [library.call("ggml_graph_overhead_custom", len(run), False) for _, run in runs]
        context = new_context(backend, 0, sum(overheads))
        self._contexts.append(context)
        segments: list[Segment] = []
        for address, run in runs:
            graph = library.pointer("ggml_new_graph_custom", context, len(run), False)
            for node in run:
                library.call("ggml_graph_add_node", graph, node)
            segments.append(Segment(address, graph))
        self._segments = segments

    def nodes(self) -> tuple[Node, ...]:
        """Every operation in execution order, after the graph ran."""
        backend = self._arena.backend
        found: list[Node] = []
        for segment in self._segments:
            accelerator = backend.accelerator
            if accelerator is not None and segment.backend == accelerator.address:
                name = accelerator.name
            else:
                name = backend.device.name
            found += [self._node(address, name) for address in self._addresses(segment.graph)]
        return tuple(found)

    def _node(self, address: int, backend: str) -> Node:
        library = self._arena.backend.library
        return Node(
            bytes(TensorStruct.from_address(address).name).decode(),
            library.text("ggml_op_desc", address),
            self._buffer_names.get(address, ""),
            backend,
        )

    def _addresses(self, graph: int | None = None) -> list[int]:
        library = self._arena.backend.library
        address = graph or self.address
        count = library.call("ggml_graph_n_nodes", address)
        return [library.pointer("ggml_graph_node", address, index) for index in range(count)]

    def note_buffers(self) -> None:
        """Keeps the buffers' names for `nodes`: a buffer is freed when a larger graph needs more."""
        if self._buffer_names:
            return
        library = self._arena.backend.library
        for address in self._addresses():
            buffer = TensorStruct.from_address(address).buffer
            if buffer:
                name = library.text("ggml_backend_buffer_name", buffer)
                self._buffer_names[address] = name

    def forget_places(self) -> None:
        """Makes the graph's own tensors unplaced again, so that an arena can place them."""
        library = self._arena.backend.library
        address = library.call("ggml_get_first_tensor", self._contexts[0])
        while address:
            struct = TensorStruct.from_address(address)
            struct.data = None
            struct.buffer = None
            struct.extra = None
            address = library.call("ggml_get_next_tensor", self._contexts[0], address)

    def _check(self, inputs: Mapping[str, InputArray]) -> None:
        if inputs.keys() != self._inputs.keys():
            raise BackendError(
                f"inputs are {sorted(inputs)}", where=self.name, expected=str(sorted(self._inputs))
            )
        for name, tensor in self._inputs.items():
            if inputs[name].shape != tensor.shape:
                raise BackendError(
                    f"the input {name} has the shape {inputs[name].shape}",
                    where=self.name,
                    expected=str(tensor.shape),
                )
        for name, rows in self._rows.items():
            indices = inputs[name]
            if indices.dtype != np.int32 or indices.min() < 0 or indices.max() >= rows:
                raise BackendError(
                    f"the input {name} holds {indices.min()}..{indices.max()} ({indices.dtype})",
                    where=self.name,
                    expected=f"int32 of 0..{rows - 1}",
                )

    def _read(self, tensor: Tensor) -> FloatArray:
        array = np.empty(tensor.shape, np.float32)
        self._arena.backend.library.call(
            "ggml_backend_tensor_get", tensor.address, int(array.ctypes.data), 0, array.nbytes
        )
        return array

    def close(self) -> None:
        """Frees the graph."""
        for context in self._contexts:
            self._arena.backend.library.call("ggml_free", context)
        self._contexts.clear()


def struct_of(tensor: Tensor) -> TensorStruct:
    """The live struct of a tensor."""
    return TensorStruct.from_address(tensor.address)


class GraphBuilder:
    """Builds one graph. Every method adds a node and returns its tensor.

    Axes and shapes are in PyTorch order; tensors have at most four dimensions.
    """

    def __init__(
        self, arena: Arena, name: str, *, tapped: bool = False, capacity: int = MAX_TENSORS
    ) -> None:
        """Starts a graph.

        Args:
            capacity: tensors that it may have.
            tapped: whether `tap` makes outputs; a graph without taps reuses more memory.
        """
        self._arena = arena
        self._backend = arena.backend
        self._library = arena.backend.library
        self._name = name
        self._tapped = tapped
        self._capacity = capacity
        self._scope = ""
        self._count = 0
        overhead = int(self._library.call("ggml_graph_overhead_custom", capacity, False))
        self._context = new_context(self._backend, capacity, overhead)
        self._inputs: dict[str, Tensor] = {}
        self._outputs: dict[str, Tensor] = {}
        self._rows: dict[str, int] = {}
        self._limits: dict[int, int] = {}

    @contextmanager
    def scope(self, name: str) -> Generator[None, None, None]:
        """Prefixes the names of the operations that are added inside."""
        before = self._scope
        self._scope = f"{before}{name}."
        yield
        self._scope = before

    # leaves and results

    def input(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A float32 input of the graph."""
        return self._leaf(name, shape, "F32")

    def index_input(self, name: str, count: int, rows: int) -> Tensor:
        """An int32 input of that many row numbers, each below `rows`; for `gather`."""
        tensor = self._leaf(name, (count,), "I32")
        self._rows[name] = self._limits[tensor.address] = rows
        return tensor

    def _leaf(self, name: str, shape: tuple[int, ...], type_: str) -> Tensor:
        if not all(size > 0 for size in shape):
            raise BackendError(
                f"the input {name} of shape {list(shape)} is empty", where=self._name
            )
        self._reserve()
        tensor = new_tensor(self._backend, self._context, type_, shape)
        self._library.call("ggml_set_name", tensor.address, name.encode())
        self._library.call("ggml_set_input", tensor.address)
        self._inputs[name] = tensor
        return tensor

    def output(self, name: str, tensor: Tensor) -> None:
        """Makes a tensor a result under a name."""
        tensor = self._packed(tensor)
        self._outputs[name] = tensor
        self._library.call("ggml_set_output", tensor.address)
        source = struct_of(tensor).view_src
        while source:
            self._library.call("ggml_set_output", source)
            source = TensorStruct.from_address(source).view_src

    def tap(self, name: str, tensor: Tensor) -> Tensor:
        """Names a stage, and makes it a result if the graph is tapped."""
        self._library.call("ggml_set_name", tensor.address, name.encode())
        if self._tapped:
            self.output(name, tensor)
        return tensor

    def build(self) -> Graph:
        """Ends the graph.

        Raises:
            BackendError: the device does not support an operation.
        """
        address = self._library.pointer(
            "ggml_new_graph_custom", self._context, self._capacity, False
        )
        for tensor in self._outputs.values():
            self._library.call("ggml_build_forward_expand", address, tensor.address)
        arguments = (self._context, address, self._inputs, self._outputs, self._rows)
        graph = Graph(self._name, self._arena, *arguments)
        for index in range(self._library.call("ggml_graph_n_nodes", address)):
            node = self._library.pointer("ggml_graph_node", address, index)
            device = self._backend.device
            if not self._library.call("ggml_backend_dev_supports_op", device.address, node):
                operation = self._library.text("ggml_op_desc", node)
                name = bytes(TensorStruct.from_address(node).name).decode()
                graph.close()
                raise BackendError(
                    f"the device does not support the operation {operation} of {name}",
                    where=f"{device.name} ({device.description})",
                    action="Choose another device, or --backend cpu.",
                )
        graph.accelerate()
        return graph

    # operations

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b; b is repeated to the shape of a."""
        self._require(_repeats(b.shape, a.shape), "add", a, b)
        return self._node("add", a.shape, a.address, b.address)

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """a * b element by element; b is repeated to the shape of a."""
        self._require(_repeats(b.shape, a.shape), "multiply", a, b)
        return self._node("mul", a.shape, a.address, b.address)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """x * factor."""
        return self._node("scale", x.shape, x.address, factor)

    def matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        """x @ weight.T over the last axis of both; leading axes of x may repeat weight's."""
        fits = x.shape[-1] == weight.shape[-1] and _repeats(weight.shape[:-2], x.shape[:-2])
        self._require(fits, "matmul", x, weight)
        shape = (*x.shape[:-1], weight.shape[-2])
        # The Vulkan backend rounds a strided operand to F16, the CPU's fast product skips it.
        weight, x = self._packed(weight), self._packed(x)
        return self._node("mul_mat", shape, weight.address, x.address)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias."""
        product = self.matmul(x, weight)
        return product if bias is None else self.add(product, bias)

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, *, joined: bool = True
    ) -> Tensor:
        """Layer norm over the last axis.

        Args:
            joined: False keeps to libggml's operations, which sum up in F64 on the CPU.
        """
        kernels = self._kernels() if joined else None
        if kernels is not None:
            self._require(weight.shape == bias.shape == x.shape[-1:], "layer_norm", x, weight, bias)
            bits = int(np.float32(epsilon).view(np.uint32))
            return self._custom(kernels.norm, x.shape, self._packed(x), weight, bias, setting=bits)
        normed = self._node("norm", x.shape, x.address, epsilon)
        return self.add(self.multiply(normed, weight), bias)

    def normalize(self, x: Tensor, epsilon: float) -> Tensor:
        """Layer norm over the last axis without weight and bias."""
        return self._node("norm", x.shape, self._packed(x).address, epsilon)

    def l2_normalize(self, x: Tensor, epsilon: float) -> Tensor:
        """x / max(|x|, epsilon) over the last axis."""
        return self._node("l2_norm", x.shape, self._packed(x).address, epsilon)

    def softmax(self, x: Tensor, scale: float) -> Tensor:
        """softmax(x * scale) over the last axis."""
        return self._node("soft_max_ext", x.shape, x.address, None, scale, 0.0)

    def relu(self, x: Tensor) -> Tensor:
        """max(x, 0)."""
        return self._node("relu", x.shape, x.address)

    def gelu(self, x: Tensor) -> Tensor:
        """GELU with the error function."""
        return self._node("gelu_erf", x.shape, x.address)

    def gelu_tanh(self, x: Tensor, bias: Tensor) -> Tensor:
        """GELU with the hyperbolic tangent of x + bias; x must be a product that nothing else reads.

        Libggml's own reads it from a table in F16.
        """
        self._require(bias.shape == x.shape[-1:], "gelu_tanh", x, bias)
        kernels = self._kernels()
        if kernels is not None:
            return self._custom_inplace(kernels.gelu, x, bias)
        x = self.add(x, bias)
        square = self.multiply(x, x)
        factors = (_GELU_SCALE * _GELU_CUBE, _GELU_SCALE)
        inner = self.multiply(x, self._node("scale_bias", x.shape, square.address, *factors))
        return self.multiply(x, self._node("sigmoid", x.shape, inner.address))

    def silu(self, x: Tensor) -> Tensor:
        """x * sigmoid(x)."""
        return self._node("silu", x.shape, x.address)

    def increment(self, x: Tensor) -> Tensor:
        """x + 1."""
        return self._node("scale_bias", x.shape, x.address, 1.0, 1.0)

    def swiglu(self, gate: Tensor, x: Tensor, gate_bias: Tensor, bias: Tensor) -> Tensor:
        """silu(gate + gate_bias) * (x + bias); both must be products that nothing else reads."""
        fits = gate.shape == x.shape and gate_bias.shape == bias.shape == x.shape[-1:]
        self._require(fits, "swiglu", gate, x, gate_bias, bias)
        kernels = self._kernels()
        if kernels is not None:
            return self._custom_inplace(kernels.gate, gate, x, gate_bias, bias)
        gate, x = self.add(gate, gate_bias), self.add(x, bias)
        return self._node("swiglu_split", x.shape, gate.address, x.address)

    def rotate(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """x * cosine + (x with the halves of its last axis swapped) * sine, a rotary embedding.

        x is [B, N, heads, width], cosine and sine are [N, 1, width].
        """
        half = x.shape[3] // 2
        fits = cosine.shape == sine.shape == (x.shape[1], 1, x.shape[3]) and x.shape[3] == 2 * half
        self._require(fits, "rotate", x, cosine, sine)
        kernels = self._kernels()
        if kernels is not None:
            return self._custom(kernels.rotate, x.shape, self._with_packed_rows(x), cosine, sine)
        swapped = self.concat([self.narrow(x, 3, half, half), self.narrow(x, 3, 0, half)], axis=3)
        return self.add(self.multiply(x, cosine), self.multiply(swapped, sine))

    def concat(self, tensors: Sequence[Tensor], axis: int) -> Tensor:
        """Joins tensors along an axis, in pairs, so that many are not copied too often."""
        if len(tensors) == 1:
            return tensors[0]
        middle = (len(tensors) + 1) // 2
        left, right = self.concat(tensors[:middle], axis), self.concat(tensors[middle:], axis)
        others = [*right.shape[:axis], left.shape[axis], *right.shape[axis + 1 :]]
        self._require(others == list(left.shape), f"concat along axis {axis}", left, right)
        shape = list(left.shape)
        shape[axis] += right.shape[axis]
        dimension = len(shape) - 1 - axis
        return self._node("concat", tuple(shape), left.address, right.address, dimension)

    def gather(self, x: Tensor, indices: Tensor) -> Tensor:
        """Rows of [rows, C] by an index input, or by a part of one, that promises as many rows.

        A part must begin at a multiple of `GATHER_STEP` indices: elsewhere Vulkan ends the process.
        """
        limit = self._limits.get(indices.address, math.inf)
        self._require(len(x.shape) == 2 and limit <= x.shape[0], "gather", x, indices)
        offset = struct_of(indices).view_offs
        self._require(offset % _ALIGNMENT == 0, f"gather from byte {offset}", x, indices)
        x = self._with_packed_rows(x)
        if struct_of(x).view_offs % _ALIGNMENT:
            x = self.contiguous(x)
        shape = (indices.shape[0], x.shape[1])
        return self._node("get_rows", shape, x.address, indices.address)

    def convolve(self, x: Tensor, numbers: Tensor, weight: Tensor, bias: Tensor) -> Tensor | None:
        """A convolution of the rows of [rows, C] by one operation; None where products do it.

        Args:
            numbers: an index input of [outputs * taps] rows; the number `rows` is a row of zeros.
            weight: [out, taps * C].
            bias: [out].

        Returns:
            [outputs, out].
        """
        kernels = self._kernels()
        if kernels is None or struct_of(weight).type != GGML_TYPES["F32"]:
            return None
        (rows, channels), (out, columns) = x.shape, weight.shape
        taps = columns // channels
        fits = columns == taps * channels and bias.shape == (out,) and numbers.shape[0] % taps == 0
        fits &= self._limits.get(numbers.address, math.inf) <= rows + 1
        self._require(fits, "convolve", x, numbers, weight, bias)
        group = max(
            n for n in range(1, taps + 1) if taps % n == 0 and (n == 1 or n * channels <= _GROUP)
        )
        self._reserve()
        size = _CONVOLVED * (group * channels + out + 1)
        scratch = new_tensor(self._backend, self._context, "F32", (self._backend.threads, size))
        sources = (self._packed(x), numbers, weight, bias, scratch)
        shape = (numbers.shape[0] // taps, out)
        return self._custom(kernels.convolve, shape, *sources, setting=group)

    def pad_planes(self, x: Tensor) -> Tensor:
        """[C, X, Y, Z] to [C, X + 2, Y, Z], with planes of zeros before and after."""
        shape = (x.shape[0], x.shape[1] + 2, *x.shape[2:])
        return self._node("pad_ext", shape, x.address, 0, 0, 0, 0, 1, 1, 0, 0)

    def neighbourhoods(self, x: Tensor) -> Tensor:
        """[C, X + 2, Y, Z] to [X * Y * Z, C * 27]: the 3x3x3 values around each place but those of
        the first and the last plane; zeros beside the others' borders."""
        channels, planes, rows, columns = x.shape
        self._require(planes > 2, "neighbourhoods", x)
        self._reserve()
        kernel = new_tensor(self._backend, self._context, "F32", (channels, 3, 3, 3))
        shape = (planes - 2, rows, columns, channels * 27)
        settings = (channels, 1, 1, 1, 1, 1, 0, 1, 1, 1, GGML_TYPES["F32"])
        around = self._node("im2col_3d", shape, kernel.address, x.address, *settings)
        return self.reshape(around, (math.prod(shape[:3]), shape[3]))

    def contiguous(self, x: Tensor) -> Tensor:
        """A row-major copy."""
        return self._node("cont", x.shape, x.address)

    def repeat(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """x repeated to a shape."""
        self._require(_repeats(x.shape, shape), f"repeat to {shape}", x)
        return self._node("repeat_4d", shape, x.address, *_sizes(shape))

    def reshape(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A contiguous tensor under another shape."""
        self._require(math.prod(x.shape) == math.prod(shape), f"reshape to {shape}", x)
        x = self._packed(x)
        return self._node("reshape_4d", shape, x.address, *_sizes(shape))

    def permute(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        """A view whose axis i is axis order[i] of x."""
        rank = len(x.shape)
        self._require(sorted(order) == list(range(rank)), f"permute to {order}", x)
        places = list(range(MAX_DIMS))
        for target, source in enumerate(order):
            places[rank - 1 - source] = rank - 1 - target
        shape = tuple(x.shape[source] for source in order)
        return self._node("permute", shape, x.address, *places)

    def narrow(self, x: Tensor, axis: int, start: int, length: int) -> Tensor:
        """A view of `length` entries from `start` along an axis."""
        inside = 0 <= start <= start + length <= x.shape[axis]
        self._require(inside, f"narrow axis {axis} to {start}+{length}", x)
        strides = list(struct_of(x).nb)
        shape = list(x.shape)
        shape[axis] = length
        offset = start * strides[len(shape) - 1 - axis]
        view = self._node(
            "view_4d", tuple(shape), x.address, *_sizes(tuple(shape)), *strides[1:], offset
        )
        if x.address in self._limits:
            self._limits[view.address] = self._limits[x.address]
        return view

    def split_heads(self, x: Tensor, start: int, width: int, heads: int) -> Tensor:
        """Columns start..start+width of a contiguous [B, N, C], as a [B, N, heads, .] view."""
        batch, tokens, columns = x.shape
        inside = 0 <= start <= start + width <= columns and width % heads == 0
        self._require(inside, f"split columns {start}+{width} into {heads} heads", x)
        shape = (batch, tokens, heads, width // heads)
        row = columns * _F32_BYTES
        strides = (shape[-1] * _F32_BYTES, row, row * tokens)
        return self._node("view_4d", shape, x.address, *_sizes(shape), *strides, start * _F32_BYTES)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, joined: bool = True) -> Tensor:
        """softmax(q k' / sqrt(width)) v; q, k, v are [B, heads, N, width], the result [B, N, C].

        Args:
            joined: False sums up many keys more exactly; for few queries.
        """
        batch, heads, tokens, width = q.shape
        fits = k.shape == v.shape and k.shape[:2] == (batch, heads) and k.shape[3] == width
        self._require(fits, "attention", q, k, v)
        attended = self._joined_attention(q, k, v) if joined else self._exact_attention(q, k, v)
        if attended is None:
            k, v = self._packed(k), self._packed(self.permute(v, (0, 1, 3, 2)))
            size = max(1, _SCORES // (batch * heads * k.shape[2]))
            pieces: list[Tensor] = []
            for start in range(0, tokens, size):
                part = self.narrow(q, 2, start, min(size, tokens - start)) if size < tokens else q
                weights = self.softmax(self.matmul(part, k), width**-0.5)
                pieces.append(self.permute(self.matmul(weights, v), (0, 2, 1, 3)))
            attended = self.concat(pieces, axis=1)
        return self.reshape(attended, (batch, tokens, heads * width))

    def _joined_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """[B, N, heads, width] by one operation, which takes views; None where products do it.

        On the CPU it computes in F32, in two thirds of the products' time or less. On a GPU with
        `fast` it rounds its operands, whose products are then summed in F32; with strict F32 it
        rounds nothing, and takes what has so many scores that they would not fit at once.
        """
        device, accelerator = self._backend.device, self._backend.accelerator
        if accelerator is not None:
            kernels = accelerator.kernels
            return None if kernels is None else self._blocked_attention(kernels, q, k, v)
        batch, heads, tokens, width = q.shape
        large = batch * heads * tokens * k.shape[2] > _SCORES
        if device.backend != "cpu" and self._backend.precision != "fast" and not large:
            return None
        joined = self._node(
            "flash_attn_ext",
            (batch, tokens, heads, width),
            *(q.address, k.address, v.address, None),
            *(width**-0.5, 0.0, 0.0),
        )
        self._library.call("ggml_flash_attn_ext_set_prec", joined.address, _PRECISION_F32)
        taken = self._library.call("ggml_backend_dev_supports_op", device.address, joined.address)
        return joined if taken else None

    def _blocked_attention(self, kernels: Kernels, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, tokens, width = q.shape
        self._reserve()
        rows = (self._backend.threads, kernels.block, min(k.shape[2], _KEYS))
        scores = new_tensor(self._backend, self._context, "F32", rows)
        operands = [self._with_packed_rows(each) for each in (q, k, v)]
        return self._custom(kernels.attention, (batch, tokens, heads, width), *operands, scores)

    def _exact_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """[B, N, heads, width] by one operation that sums up in F64; None where products do it."""
        kernels = self._kernels()
        if kernels is None:
            return None
        batch, heads, tokens, width = q.shape
        self._reserve()
        rows = (self._backend.threads, 2 * (k.shape[2] + width))
        scratch = new_tensor(self._backend, self._context, "F32", rows)
        operands = [self._with_packed_rows(each) for each in (q, k, v)]
        shape = (batch, tokens, heads, width)
        return self._custom(kernels.exact_attention, shape, *operands, scratch)

    def _kernels(self) -> Kernels | None:
        accelerator = self._backend.accelerator
        return None if accelerator is None else accelerator.kernels

    def _custom(
        self, function: int, shape: tuple[int, ...], *sources: Tensor, setting: int | None = None
    ) -> Tensor:
        """A new tensor that a function of the kernels computes from float32 and index sources."""
        known = (GGML_TYPES["F32"], GGML_TYPES["I32"])
        self._require(all(struct_of(each).type in known for each in sources), "a kernel", *sources)
        addresses = (ctypes.c_void_p * len(sources))(*(each.address for each in sources))
        described = (GGML_TYPES["F32"], *_sizes(shape), addresses, len(sources))
        return self._node("custom_4d", shape, *described, function, self._backend.threads, setting)

    def _custom_inplace(self, function: int, x: Tensor, *sources: Tensor) -> Tensor:
        """x, which a function of the kernels changes."""
        addresses = (ctypes.c_void_p * len(sources))(*(each.address for each in sources))
        arguments = (addresses, len(sources), function, self._backend.threads, None)
        return self._node("custom_inplace", x.shape, x.address, *arguments)

    def _with_packed_rows(self, x: Tensor) -> Tensor:
        return x if struct_of(x).nb[0] == _F32_BYTES else self.contiguous(x)

    def _require(self, fits: bool, operation: str, *operands: Tensor) -> None:
        """Refuses shapes that libggml would end the process for."""
        if not fits:
            shapes = ", ".join(str(each.shape) for each in operands)
            raise BackendError(f"{operation} does not take {shapes}", where=self._name)

    def _packed(self, x: Tensor) -> Tensor:
        """x, or its copy in row-major order; with one column also a transposed one is contiguous."""
        strides = struct_of(x).nb
        contiguous = self._library.call("ggml_is_contiguous", x.address)
        return x if contiguous and strides[0] <= strides[1] else self.contiguous(x)

    def _node(self, operation: str, shape: tuple[int, ...], *arguments: object) -> Tensor:
        self._reserve()
        address = self._library.pointer(f"ggml_{operation}", self._context, *arguments)
        name = f"{self._scope}{operation}.{self._count}"
        self._library.call("ggml_set_name", address, name.encode())
        return Tensor(address, shape)

    def _reserve(self) -> None:
        self._count += 1
        if self._count > self._capacity:
            raise BackendError(
                "the graph has too many operations", where=self._name, expected=str(self._capacity)
            )


def _repeats(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether a tensor repeats to the target as libggml's element-wise operations do it."""
    padded = (*([1] * (len(target) - len(shape))), *shape)
    return len(padded) == len(target) and all(
        size > 0 and whole % size == 0 for size, whole in zip(padded, target, strict=True)
    )


def _sizes(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*reversed(shape), *([1] * (MAX_DIMS - len(shape))))


class Graphs:
    """The graphs of a model, each built at its first use and kept."""

    def __init__(self, backend: Backend) -> None:
        self.arena = Arena(backend)
        self._graphs: dict[Hashable, Graph] = {}

    def get(self, key: Hashable, build: Callable[[Arena], Graph]) -> Graph:
        """The graph of that key."""
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = build(self.arena)
        return graph

    def all(self) -> tuple[Graph, ...]:
        """Every graph that was built."""
        return tuple(self._graphs.values())

    def close(self) -> None:
        """Frees all graphs and the compute buffer."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self.arena.close()
