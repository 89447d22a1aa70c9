"""What a component is given is checked: refused in a sentence, or computed, whatever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from objects_components import Component, Tensors, fixture

from sam3d_gguf.extractors.models import MOGE, OBJECTS
from sam3d_gguf.runtime.ggml import host_memory
from sam3d_gguf.runtime.ggml.backend import Backend, open_backend
from sam3d_gguf.runtime.ggml.errors import BackendError
from sam3d_gguf.runtime.ggml.library import load_library
from sam3d_gguf.runtime.objects.components import NAMES, models_of, read_inputs, run_component
from sam3d_gguf.runtime.objects.components.captures import decimal, numbered
from sam3d_gguf.runtime.objects.components.inputs import LIMITS, Wanted, check_tensors
from sam3d_gguf.runtime.objects.release import ObjectsRelease
from sam3d_gguf.runtime.tensor_files import write_tensors
from sam3d_gguf.schemas.errors import InputError

QUICK = (
    *("preprocess", "embed-slat", "pose-decoder", "slat-flow-forward", "gaussian-decoder-4"),
    *("mesh-decoder", "mesh-extract"),
)
"""Components that take a fraction of a second."""
INPUTS: Mapping[str, Tensors] = {name: Component.load(name).inputs for name in NAMES}
Array = NDArray[Any]


@pytest.fixture(scope="module")
def release(objects: Path) -> Iterator[ObjectsRelease]:
    with ObjectsRelease.open(objects, [model for model in OBJECTS if model != MOGE]) as opened:
        yield opened


@pytest.fixture(scope="module", name="backend")
def _backend() -> Iterator[Backend]:
    with open_backend(load_library(), "cpu", threads=2) as opened:
        yield opened


def refused(name: str, release: ObjectsRelease, inputs: Tensors, message: str) -> None:
    """The refusal comes before a network is opened, so no backend is needed."""
    nowhere: Any = None
    with pytest.raises(InputError, match=message):
        run_component(name, release, nowhere, inputs)


def other(coords: Array, row: int, place: list[int]) -> Array:
    changed = coords.copy()
    changed[row] = place
    return changed


CHANGES: list[tuple[str, str, Callable[[Array], Any], str]] = [
    ("embed-ss", "image", lambda x: x[:, :, 1:], r"float32 \[1, 3, 55, 56\]; .* \[1, 3, 56, 56\]"),
    ("embed-ss", "mask", lambda x: x * np.nan, "mask holds numbers that are not finite"),
    ("ss-flow-forward", "t", lambda x: x * 3, "input t is 1312.5; expected 0 to 1000"),
    ("ss-flow-forward", "d", lambda x: x - 1, "input d is -1; expected 0 to 1000"),
    ("ss-flow-forward", "latents.shape", lambda x: x[:, :1], r"latents\.shape is .*1, 4096, 8"),
    ("ss-flow-sampler", "cond_tokens", lambda x: x[:, :0], r"expected float32 \[1, L, 48\]"),
    ("pose-decoder", "scene_scale", lambda x: x.astype(np.float64), "scene_scale is float64"),
    ("ss-decoder", "ball", lambda x: x[::-1], "row 1 of ball .* belongs further up"),
    ("ss-decoder", "ball", lambda x: x[[0, *range(len(x))]], "row 1 of ball .* is there before"),
    ("ss-decoder", "ball", lambda x: x.astype(np.int64), r"ball is int64"),
    ("ss-decoder", "shape_latent", lambda x: x / 0, "shape_latent holds numbers that are not"),
    ("slat-flow-forward", "t", lambda _: np.array(np.float32("nan")), "t holds numbers"),
    ("slat-flow-forward", "coords", lambda x: x[1:], "input x is .*, N = 189"),
    ("slat-flow-forward", "coords", lambda x: other(x, 3, [0, 1, 2, 64]), "row 3 .* 0 to 63"),
    ("slat-flow-forward", "coords", lambda x: other(x, 3, [1, 1, 2, 3]), r"\[1, 1, 2, 3\]"),
    ("slat-flow-sampler", "slat_std", lambda x: x * 2, "expected the model's"),
    ("slat-flow-sampler", "coords", lambda x: other(x, 9, [0, 1, -1, 3]), r"row 9 .*\[0, 1, -1"),
    ("gaussian-decoder-32", "slat_feats", lambda x: x[None], r"expected float32 \[N, 8\], N = 190"),
    ("mesh-decoder", "coords", lambda x: other(x, 0, [0, 16, 0, 0]), "place in 0 to 15"),
    ("mesh-extract", "smooth.coords", lambda x: other(x, 5, x[1].tolist()), "row 5 .* before"),
    ("pipeline", "rgba", lambda x: x[:, 1:], r"moge_points_hwc is .* H = 56, W = 71"),
    ("pipeline", "rgba", lambda x: x * np.uint8(0), "marks nothing"),
    ("pipeline", "moge_points_hwc", lambda x: x * np.inf, "no finite point"),
    ("preprocess", "rgba", lambda x: x.astype(np.float32), "rgba is float32"),
]


@pytest.mark.parametrize(("name", "tensor", "change", "message"), CHANGES)
def test_a_changed_input_is_refused(
    release: ObjectsRelease,
    backend: Backend,
    name: str,
    tensor: str,
    change: Callable[[Array], Any],
    message: str,
) -> None:
    with np.errstate(all="ignore"):
        inputs = INPUTS[name] | {tensor: np.asarray(change(INPUTS[name][tensor]))}
    if name == "pipeline":
        with pytest.raises(InputError, match=message):
            run_component(name, release, backend, inputs)
    else:
        refused(name, release, inputs, message)


@pytest.mark.parametrize("name", NAMES)
def test_missing_and_unknown_inputs_are_refused(release: ObjectsRelease, name: str) -> None:
    first, *others = INPUTS[name]
    rest = {each: INPUTS[name][each] for each in others}
    refused(name, release, rest, f"these inputs are missing: '{first}'; expected")
    more = INPUTS[name] | {f"x\n{number}" * 99: np.zeros(1) for number in range(9)}
    refused(name, release, more, r"these inputs are unknown: 'x\\n0x\\n0.{,500}; expected")


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_read_as_it_is(release: ObjectsRelease, name: str) -> None:
    found = read_inputs(name, release, fixture(f"inputs-{name}.safetensors"))
    assert found.keys() == INPUTS[name].keys()
    assert all((found[each].tobytes() == INPUTS[name][each].tobytes()) for each in found)


def test_a_file_is_not_read_unless_its_header_is_right(
    release: ObjectsRelease, tmp_path: Path
) -> None:
    path = tmp_path / "inputs.safetensors"
    write_tensors(path, INPUTS["pose-decoder"] | {"scene_scale": np.zeros((1, 3))})
    with pytest.raises(InputError, match=r"inputs.*: the input scene_scale is F64 \[1, 3\]; exp"):
        read_inputs("pose-decoder", release, path)
    with pytest.raises(InputError, match="these inputs are missing"):
        read_inputs("mesh-extract", release, path)


def test_sizes_that_are_open_have_an_end() -> None:
    most = LIMITS["N"]
    wanted = {"coords": Wanted(("N", 4), "int32")}
    check_tensors({"coords": np.zeros((most, 4), np.int32)}, wanted)
    with pytest.raises(InputError, match=rf"\[{most + 1}, 4\]; expected int32 \[N, 4\], N up to"):
        check_tensors({"coords": np.zeros((most + 1, 4), np.int32)}, wanted)


def test_no_other_component_is_run(release: ObjectsRelease) -> None:
    refused("slat-decoder", release, {}, "no component 'slat-decoder'; expected preprocess, embed")
    with pytest.raises(InputError, match="no component 'all'"):
        models_of("all")


@pytest.mark.parametrize("name", NAMES)
def test_only_the_parts_that_a_component_names_are_needed(name: str) -> None:
    assert set(models_of(name)) < set(OBJECTS)
    assert len(set(models_of(name))) == len(models_of(name))


def test_large_numbers_come_out_as_they_do(release: ObjectsRelease, backend: Backend) -> None:
    inputs = INPUTS["pose-decoder"] | {"case2.scale": np.full((1, 1, 3), 1e5, np.float32)}
    found = run_component("pose-decoder", release, backend, inputs)
    assert list(found)[-2:] == [
        "006.case2.scale.nonfinite_mask",
        "007.case2.scale.nonfinite_to_0",
    ]
    assert found["006.case2.scale.nonfinite_mask"].tolist() == [[1, 1, 1]]
    assert found["007.case2.scale.nonfinite_to_0"].tolist() == [[0, 0, 0]]


def test_names_count_the_tensors_and_split_what_is_not_finite() -> None:
    holes = np.array([1, np.nan, -np.inf], np.float32)
    found = numbered({"a": np.arange(3), "b.call1": holes, "c": np.ones(2, np.float32)})
    assert list(found) == [
        "000.a",
        "001.b.call1.nonfinite_mask",
        "002.b.call1.nonfinite_to_0",
        "003.c",
    ]
    assert found["001.b.call1.nonfinite_mask"].tolist() == [0, 1, 1]
    assert found["001.b.call1.nonfinite_mask"].dtype == np.uint8
    assert found["002.b.call1.nonfinite_to_0"].tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("value", "text"), [(437.5, "437p5"), (500, "500"), (1.2, "1p2"), (0, "0"), (1e-6, "0p000001")]
)
def test_a_number_in_a_name(value: float, text: str) -> None:
    assert decimal(value) == text


def changed(array: Array, data: st.DataObject) -> Array:
    """An array with some other values, and perhaps another shape or type."""
    draw = data.draw
    result = array.copy()
    flat = result.reshape(-1)
    for _ in range(draw(st.integers(0, 3))):
        first, count = draw(st.integers(0, flat.size - 1)), draw(st.sampled_from([1, 7, flat.size]))
        if array.dtype == np.float32:
            value: Any = draw(st.floats(width=32) | st.sampled_from([1e38, -1e38, 0.0]))
        else:
            info = np.iinfo(array.dtype)
            small = st.integers(max(int(info.min), -2), 66)
            value = draw(small | st.sampled_from([int(info.min), int(info.max)]))
        flat[first : first + count] = value
    match draw(st.sampled_from(["keep"] * 6 + ["rows", "axis", "flat", "type", "order", "twice"])):
        case "rows":
            result = result[: draw(st.integers(0, 3))] if result.ndim else result
        case "axis":
            result = result[None]
        case "flat":
            result = result.reshape(-1)
        case "type":
            with np.errstate(all="ignore"):
                result = result.astype(draw(st.sampled_from(["f8", "f2", "i8", "u1", "?", "c8"])))
        case "order":
            result = result[::-1] if result.ndim else result
        case "twice":
            result = np.concatenate([result, result]) if result.ndim else result
        case _:
            pass
    return result


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", QUICK)
@settings(max_examples=25, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(data=st.data())
def test_whatever_is_given_is_refused_in_a_sentence_or_computed(
    release: ObjectsRelease, backend: Backend, name: str, data: st.DataObject
) -> None:
    inputs = dict(INPUTS[name])
    for tensor in data.draw(st.lists(st.sampled_from(sorted(inputs)), max_size=2, unique=True)):
        inputs[tensor] = changed(inputs[tensor], data)
    try:
        found = run_component(name, release, backend, inputs)
    except (InputError, BackendError) as error:
        assert 0 < len(str(error)) < 1200
        assert "\n" not in str(error)
    else:
        assert all(np.isfinite(array).all() for array in found.values())
        assert [int(each[:3]) for each in found] == list(range(len(found)))


def memory_of(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(host_memory, "available_memory", lambda: size)


def test_what_memory_does_not_hold_is_refused(
    release: ObjectsRelease, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = INPUTS["preprocess"]["moge_points_hwc"]
    wide = {"rgba": np.ones((3, 4000, 4), np.uint8), "moge_points_hwc": points[:3, :1]}
    wide["moge_points_hwc"] = np.repeat(wide["moge_points_hwc"], 4000, axis=1)
    memory_of(monkeypatch, 600 << 20)
    with pytest.raises(BackendError, match=r"a photo of 4000x3 need 612 MiB and 600 MiB are free"):
        run_component("preprocess", release, backend, wide)
    memory_of(monkeypatch, 1 << 20)
    for name, message in (
        ("mesh-decoder", "the features of the mesh's cubes need 2 MiB"),
        ("mesh-extract", "the mesh's cubes need 1 MiB"),
    ):
        with pytest.raises(BackendError, match=message):
            run_component(name, release, backend, INPUTS[name])
    memory_of(monkeypatch, 2 << 20)
    with pytest.raises(BackendError, match="the cubes of the mesh's surface need"):
        run_component("mesh-extract", release, backend, INPUTS["mesh-extract"])
