"""The kernels of the CPU backend, on a naive BLAS so that they need no OpenBLAS, against NumPy."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from sam3d_gguf.runtime.ggml.errors import BackendError
from sam3d_gguf.runtime.ggml.functions import MAX_DIMS, TensorStruct
from sam3d_gguf.runtime.ggml.library import KERNELS_MODULE, load_kernels, load_library

Array = npt.NDArray[np.float32]

SOURCE = Path(__file__).parents[2] / "runtime/ggml/modules/kernels.cpp"
NAIVE_BLAS = """
enum { CblasRowMajor, CblasNoTrans, CblasTrans };
static inline void cblas_sgemm(int, int, int b_order, int m, int n, int k, float alpha,
                               const float * a, int lda, const float * b, int ldb, float beta,
                               float * c, int ldc) {
    for (int i = 0; i < m; i++) {
        for (int j = 0; j < n; j++) {
            double sum = 0;
            for (int l = 0; l < k; l++) {
                sum += (double)a[i * lda + l] * b[b_order == CblasTrans ? j * ldb + l : l * ldb + j];
            }
            c[i * ldc + j] = alpha * (float)sum + (beta == 0 ? 0 : beta * c[i * ldc + j]);
        }
    }
}
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "cblas.h").write_text(NAIVE_BLAS)
    path = folder / KERNELS_MODULE
    options = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-shared", "-fPIC"]
    subprocess.run(["c++", *options, f"-I{folder}", SOURCE, "-o", path], check=True)
    return path


def tensor(array: Array, sources: list[TensorStruct] | None = None) -> TensorStruct:
    struct = TensorStruct(data=array.ctypes.data)
    struct.ne = (ctypes.c_int64 * MAX_DIMS)(*reversed(array.shape))
    struct.nb = (ctypes.c_size_t * MAX_DIMS)(*reversed(array.strides))
    for index, source in enumerate(sources or []):
        struct.src[index] = ctypes.addressof(source)
    return struct


def call(
    module: Path,
    name: str,
    result: Array,
    sources: list[Array],
    threads: int,
    parameter: int | None = None,
) -> None:
    """Calls a function as each thread of GGML does, one after the other."""
    function = getattr(ctypes.CDLL(str(module)), f"sam3d_{name}")
    function.argtypes = [ctypes.POINTER(TensorStruct), ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    structs = [tensor(padded(each)) for each in sources]
    for thread in reversed(range(threads)):
        function(ctypes.byref(tensor(padded(result), structs)), thread, threads, parameter)


def padded(array: Array) -> Array:
    return (
        array.reshape(*([1] * (MAX_DIMS - array.ndim)), *array.shape) if array.ndim < 4 else array
    )


def attend(
    module: Path, q: Array, k: Array, v: Array, threads: int = 1, keys: int | None = None
) -> Array:
    block = (ctypes.c_int64 * 3).in_dll(ctypes.CDLL(str(module)), "sam3d_kernels_layout")[2]
    scratch = np.full((threads, block, keys or k.shape[2]), np.nan, np.float32)
    batch, heads, tokens, width = q.shape
    result = np.full((batch, tokens, heads, width), np.nan, np.float32)
    call(module, "attention", result, [q, k, v, scratch], threads)
    return result


def expected(q: Array, k: Array, v: Array) -> npt.NDArray[np.float64]:
    q64, k64, v64 = (each.astype(np.float64) for each in (q, k, v))
    scores = q64 @ k64.swapaxes(2, 3) / np.sqrt(q.shape[3])
    weights = np.exp(scores - scores.max(axis=3, keepdims=True))
    weights /= weights.sum(axis=3, keepdims=True)
    joined: npt.NDArray[np.float64] = (weights @ v64).swapaxes(1, 2)
    return joined


def operands(shape: tuple[int, int, int, int], keys: int, scale: float = 1) -> list[Array]:
    rng = np.random.default_rng(sum(shape) + keys)
    batch, heads, tokens, width = shape
    lengths = (tokens, keys, keys)
    made = [rng.standard_normal((batch, heads, n, width), dtype=np.float32) for n in lengths]
    made[0] *= np.float32(scale)
    return made


@pytest.mark.parametrize("threads", [1, 2, 3, 64])
@pytest.mark.parametrize(
    ("shape", "keys"),
    [
        ((1, 1, 1, 1), 1),
        ((2, 3, 5, 8), 7),
        ((1, 2, 191, 16), 15),
        ((1, 2, 193, 16), 17),
        ((2, 1, 400, 4), 33),
        ((1, 3, 12, 64), 1029),
    ],
)
def test_it_agrees_with_numpy_whatever_the_threads(
    module: Path, shape: tuple[int, int, int, int], keys: int, threads: int
) -> None:
    q, k, v = operands(shape, keys)
    found = attend(module, q, k, v, threads)
    np.testing.assert_allclose(found, expected(q, k, v), rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(found, attend(module, q, k, v))


@pytest.mark.parametrize("keys", [1, 7, 16, 40, 41])
@pytest.mark.parametrize("scale", [1, 30, 1e30])
def test_keys_in_parts(module: Path, keys: int, scale: float) -> None:
    q, k, v = operands((2, 3, 9, 8), 41, scale)
    found = attend(module, q, k, v, 2, keys)
    np.testing.assert_allclose(found, expected(q, k, v), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("place", [0, 11, 40])
def test_a_value_that_is_not_a_number_in_any_part_stays_one(module: Path, place: int) -> None:
    q, k, v = operands((1, 1, 4, 8), 41)
    k[0, 0, place, 2] = np.nan
    assert np.isnan(attend(module, q, k, v, 1, 10)).all()


def test_views_are_taken_as_they_are(module: Path) -> None:
    rng = np.random.default_rng(3)
    joined = rng.standard_normal((2, 20, 3, 4, 8), dtype=np.float32)
    q, k, v = (joined[:, :, index].swapaxes(1, 2) for index in range(3))
    np.testing.assert_allclose(attend(module, q, k, v), expected(q, k, v), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("scale", [1e-6, 30, 1e4, 1e30])
def test_small_and_large_scores(module: Path, scale: float) -> None:
    q, k, v = operands((1, 2, 9, 8), 50, scale)
    np.testing.assert_allclose(attend(module, q, k, v), expected(q, k, v), rtol=1e-4, atol=1e-4)


def test_weights_are_exponentials_to_the_last_bits(module: Path) -> None:
    """One key of score 0 and one of score -x, so that the result tells e^-x."""
    x = np.linspace(0, 87, 4001, dtype=np.float32)
    k = np.array([[0], [-1]], np.float32).reshape(1, 1, 2, 1)
    v = np.array([[0], [1]], np.float32).reshape(1, 1, 2, 1)
    found = attend(module, x.reshape(1, 1, -1, 1), k, v).reshape(-1).astype(np.float64)
    power = np.exp(-x.astype(np.float64))
    np.testing.assert_allclose(found, power / (1 + power), rtol=4e-7)


@pytest.mark.parametrize("place", [0, 3, 20, 40])
def test_a_value_that_is_not_a_number_stays_one(module: Path, place: int) -> None:
    q, k, v = operands((1, 1, 4, 8), 41)
    k[0, 0, place, 2] = np.nan
    assert np.isnan(attend(module, q, k, v)).all()


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("threads", [1, 3, 64])
@pytest.mark.parametrize("shape", [(1, 1, 5, 1), (2, 3, 5, 33), (1, 1, 7, 1280)])
@pytest.mark.parametrize("offset", [0, 1000])
def test_layer_norm(module: Path, shape: tuple[int, ...], threads: int, offset: int) -> None:
    x = normal(*shape) + np.float32(offset)
    weight, bias = normal(shape[-1], seed=1), normal(shape[-1], seed=2)
    epsilon = np.float32(1e-5)
    result = np.full_like(x, np.nan)
    call(module, "norm", result, [x, weight, bias], threads, int(epsilon.view(np.uint32)))
    x64 = x.astype(np.float64)
    centred = x64 - x64.mean(axis=-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(result, centred / deviation * weight + bias, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("threads", [1, 2, 64])
@pytest.mark.parametrize("group", [1, 3, 27])
@pytest.mark.parametrize(("rows", "outputs"), [(1, 1), (50, 50), (7, 90)])
@pytest.mark.parametrize("share", [0, 0.4, 1])
def test_convolve(
    module: Path, rows: int, outputs: int, share: float, group: int, threads: int
) -> None:
    rng = np.random.default_rng(rows + group)
    channels, out, taps = 5, 6, 27
    x, weight, bias = normal(rows, channels), normal(out, taps * channels, seed=1), normal(out)
    table = rng.integers(0, rows, (outputs, taps), np.int32)
    table[rng.random(table.shape) >= share] = rows
    scratch = np.full((threads, 20 * (group * channels + out + 1) + 3), np.nan, np.float32)
    result = np.full((outputs, out), np.nan, np.float32)
    sources = [x, table.view(np.float32), weight, bias, scratch]
    call(module, "convolve", result, sources, threads, group)
    gathered = np.concatenate([x, np.zeros((1, channels), np.float32)]).astype(np.float64)[table]
    expected = gathered.reshape(outputs, -1) @ weight.T + bias
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 3, 64])
@pytest.mark.parametrize("width", [1, 7, 8, 29])
def test_gate(module: Path, width: int, threads: int) -> None:
    gate, x = normal(2, 3, width) * np.float32(5), normal(2, 3, width, seed=1)
    biases = [normal(width, seed=2), normal(width, seed=3)]
    gate64, x64 = gate.astype(np.float64) + biases[0], x.astype(np.float64) + biases[1]
    call(module, "gate", gate, [gate, x, *biases], threads)
    expected = gate64 / (1 + np.exp(-gate64)) * x64
    np.testing.assert_allclose(gate, expected, rtol=2e-6, atol=1e-6)


def test_gate_of_extreme_values(module: Path) -> None:
    gate = np.array([-3e38, -1e4, -90, -1e-30, 0, 1e-30, 90, 1e4, 3e38, np.nan], np.float32)
    expected = np.where(gate < -80, 0, np.where(np.abs(gate) < 1, gate / 2, gate))
    zeros = np.zeros_like(gate)
    call(module, "gate", gate, [gate, np.ones_like(gate), zeros, zeros], 1)
    np.testing.assert_allclose(gate, expected, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("threads", [1, 3, 64])
@pytest.mark.parametrize("width", [1, 7, 8, 29])
def test_gelu(module: Path, width: int, threads: int) -> None:
    x, bias = normal(2, 3, width) * np.float32(3), normal(width, seed=1)
    x64 = x.astype(np.float64) + bias
    call(module, "gelu", x, [x, bias], threads)
    inner = np.sqrt(2 / np.pi) * (x64 + 0.044715 * x64**3)
    np.testing.assert_allclose(x, x64 / 2 * (1 + np.tanh(inner)), rtol=3e-6, atol=1e-6)


def test_gelu_of_extreme_values(module: Path) -> None:
    x = np.array([-3e38, -1e20, -50, -0.0, 0, 50, 1e20, 3e38, np.nan], np.float32)
    expected = np.where(x < 0, 0, x)
    call(module, "gelu", x, [x, np.zeros_like(x)], 1)
    np.testing.assert_allclose(x, expected, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("threads", [1, 3, 64])
@pytest.mark.parametrize(("shape", "keys"), [((1, 1, 1, 1), 1), ((2, 3, 5, 7), 9)])
def test_exact_attention(
    module: Path, shape: tuple[int, int, int, int], keys: int, threads: int
) -> None:
    q, k, v = operands(shape, keys)
    scratch = np.full((threads, 2 * (keys + shape[3])), np.nan, np.float32)
    result = np.full((shape[0], shape[2], shape[1], shape[3]), np.nan, np.float32)
    call(module, "exact_attention", result, [q, k, v, scratch], threads)
    np.testing.assert_allclose(result, expected(q, k, v), rtol=2e-7, atol=1e-30)


@pytest.mark.parametrize("threads", [1, 3, 64])
@pytest.mark.parametrize("width", [2, 6, 64])
def test_rotate(module: Path, width: int, threads: int) -> None:
    whole = normal(2, 5, 7, width + 3)
    x = whole[..., :width]
    cosine, sine = normal(5, 1, width, seed=1), normal(5, 1, width, seed=2)
    result = np.full(x.shape, np.nan, np.float32)
    call(module, "rotate", result, [x, cosine, sine], threads)
    expected = x.astype(np.float64) * cosine + np.roll(x, width // 2, axis=3) * sine.astype(float)
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("content", ["not a library", "another library"])
def test_another_file_under_its_name_is_refused(tmp_path: Path, content: str) -> None:
    other = load_library().directory / "libggml-base.so"
    data = other.read_bytes() if content == "another library" else content.encode()
    (tmp_path / KERNELS_MODULE).write_bytes(data)
    with pytest.raises(BackendError, match=r"does not load|not this version's"):
        load_kernels(tmp_path)


def test_the_module_is_loaded_and_hashed(module: Path, tmp_path: Path) -> None:
    assert load_kernels(tmp_path) is None
    found = load_kernels(module.parent)
    assert found is not None
    assert found.file.sha256 == hashlib.sha256(module.read_bytes()).hexdigest()
