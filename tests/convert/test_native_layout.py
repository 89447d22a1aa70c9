"""Component files: the published sizes at the official dimensions, and the native contract's form."""

from __future__ import annotations

from pathlib import Path

import facts
import pytest
from gguf_bytes import Parts, info, key_value, text
from native_reader import NotNativeError, read_native

from sam3d_gguf.convert.config import load_config
from sam3d_gguf.convert.contract import load_contract
from sam3d_gguf.convert.gguf_format import GgmlType, GgufTensorSpec, string, uint32
from sam3d_gguf.convert.gguf_writer import GgufLayout
from sam3d_gguf.convert.native import NativeTensor, load_native_components
from sam3d_gguf.extractors.safetensors_format import SafetensorsSpec, canonical_header

FILLED_AT_CONVERSION = {
    "<sha256 of the backbone safetensors>": "0" * 64,
    "<sha256 of the MHR safetensors>": "0" * 64,
    "<127 names joined by commas>": ",".join(facts.mhr_skeleton()["names"]),
    # The 249 names are not known here, but the published size leaves only 32 lengths for them.
    "<249 names joined by commas>": "x" * 3625,
}


def layout_of(name: str, tensors: tuple[NativeTensor, ...]) -> GgufLayout:
    metadata = {
        key: uint32(value)
        if isinstance(value, int)
        else string(FILLED_AT_CONVERSION.get(value, value))
        for key, value in facts.native_metadata()[name].items()
    }
    specs = [GgufTensorSpec(t.name, t.shape, GgmlType[t.gguf_type]) for t in tensors]
    return GgufLayout.plan(metadata, specs)


@pytest.mark.parametrize(
    ("name", "size", "count"),
    [
        ("body.dinov3_backbone", 3_363_058_592, 552),
        ("body.pose_branch", 231_353_792, 316),
        ("mhr.lod1", 693_111_264, 18),
    ],
)
def test_a_component_has_the_published_size(name: str, size: int, count: int) -> None:
    component = load_native_components()[name]
    tensors = component.tensors(load_contract(component.contract).official())

    layout = layout_of(name, tensors)

    assert (layout.size, len(layout.tensors)) == (size, count)


@pytest.mark.parametrize(("length", "fits"), [(3624, False), (3625, True), (3656, True)])
def test_the_published_size_of_mhr_bounds_its_parameter_names(
    length: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    component = load_native_components()["mhr.lod1"]
    monkeypatch.setitem(FILLED_AT_CONVERSION, "<249 names joined by commas>", "x" * length)

    layout = layout_of("mhr.lod1", component.tensors(load_contract("mhr.lod1").official()))

    assert (layout.size == 693_111_264) is fits


def body_safetensors(backbone: bool) -> list[SafetensorsSpec]:
    prefix = "backbone.encoder."
    specs = [
        SafetensorsSpec(name.removeprefix(prefix), "I64" if t.dtype == "I64" else "F32", t.shape)
        for name, t in facts.body_inventory().items()
        if name.startswith(prefix) is backbone
    ]
    added = [SafetensorsSpec("mask_token", "F32", (1, 1280))]
    return specs + added if backbone else specs


@pytest.mark.parametrize(
    ("backbone", "count", "size"), [(True, 552, 3_363_078_840), (False, 576, 451_167_984)]
)
def test_the_canonical_safetensors_have_the_published_sizes(
    backbone: bool, count: int, size: int
) -> None:
    header, entries = canonical_header(body_safetensors(backbone))

    assert (len(entries), len(header) + entries[-1].end) == (count, size)


@pytest.mark.parametrize("name", ["body.dinov3_backbone", "body.pose_branch", "mhr.lod1"])
def test_a_component_of_the_tiny_model_has_the_native_form(tmp_path: Path, name: str) -> None:
    component = load_native_components()[name]
    if component.contract == "body":
        config = load_config(
            (facts.TINY / "model_config.yaml").read_bytes(), "body-config", where="c"
        )
        bound = load_contract("body").bind(facts.tiny("model.ckpt"), config)
    else:
        bound = load_contract("mhr.lod1").bind(facts.tiny("mhr_model.stub.pt"))
    tensors = component.tensors(bound)
    layout = layout_of(name, tensors)
    path = tmp_path / "component.gguf"
    path.write_bytes(layout.header.ljust(layout.size, b"\0"))

    file = read_native(path)

    assert file.metadata.keys() == facts.native_metadata()[name].keys()
    assert {n: (t.dtype, t.shape) for n, t in file.tensors.items()} == {
        t.name: (t.gguf_type, t.shape) for t in tensors
    }
    assert {n: (t.begin, t.end) for n, t in file.tensors.items()} == {
        n: (t.offset, t.offset + t.nbytes) for n, t in layout.tensors.items()
    }


# The test reader itself must be able to refuse.

ALIGNED = key_value("general.alignment", 4, (32).to_bytes(4, "little"))
ONE = [info("a", (2,), 0)]
BAD = [
    (Parts([], ONE, bytes(32)), "alignment"),
    (Parts([key_value("general.alignment", 4, b"\x40\0\0\0")], ONE, bytes(32)), "alignment"),
    (Parts([ALIGNED], ONE, bytes(32), version=2), "version"),
    (Parts([ALIGNED], ONE, bytes(32), magic=b"GGML"), "magic"),
    (Parts([ALIGNED, key_value("a", 8, text("x"))], ONE, bytes(32)), "out of order"),
    (Parts([ALIGNED, ALIGNED], ONE, bytes(32)), "out of order"),
    (Parts([ALIGNED, key_value("h", 5, bytes(4))], ONE, bytes(32)), "type 5 of h"),
    (Parts([ALIGNED, key_value("h", 8, text(""))], ONE, bytes(32)), "length of h"),
    (Parts([ALIGNED, key_value("h", 8, text("a\n"))], ONE, bytes(32)), "characters of h"),
    (Parts([ALIGNED], [info("a" * 64, (2,), 0)], bytes(32)), "name"),
    (Parts([ALIGNED], [info("b"), info("a", offset=32)], bytes(64)), "name b'a'"),
    (Parts([ALIGNED], [info("a", (1,) * 5)], bytes(32)), "rank"),
    (Parts([ALIGNED], [info("a", (0,))], bytes(32)), "dimensions"),
    (Parts([ALIGNED], [info("a", (2,), 30)], bytes(32)), "type 30 of b'a'"),
    (Parts([ALIGNED], [info("a", offset=32)], bytes(64)), "offset of a"),
    (Parts([ALIGNED], ONE, bytes(4)), "end of a"),
    (Parts([ALIGNED], ONE, bytes(31)), "padding"),
    (Parts([ALIGNED], ONE, bytes(31) + b"\1"), "padding"),
    (Parts([ALIGNED], ONE, bytes(33)), "bytes after"),
    (Parts([ALIGNED], ONE, b"\0\0\x80\x7f" + bytes(28)), "values of a"),
    (Parts([ALIGNED], ONE, b"", tensor_count=9), "truncated"),
]


@pytest.mark.parametrize(("parts", "fault"), BAD, ids=[fault for _, fault in BAD])
def test_the_native_reader_refuses_another_form(tmp_path: Path, parts: Parts, fault: str) -> None:
    path = tmp_path / "component.gguf"
    path.write_bytes(parts.build())

    with pytest.raises(NotNativeError, match=fault):
        read_native(path)


def test_the_native_reader_returns_values_in_pytorch_shape(tmp_path: Path) -> None:
    path = tmp_path / "component.gguf"
    data = bytes(range(24)) + bytes(8)
    path.write_bytes(Parts([ALIGNED], [info("a", (3, 2), 26)], data).build())

    values = read_native(path).read("a")

    assert (values.shape, values.dtype.name, values.tobytes()) == ((2, 3), "int32", data[:24])
