"""The component files: their metadata at the official values is that of the facts."""

from __future__ import annotations

import dataclasses

import facts
import pytest

from sam3d_gguf.convert.config import load_config
from sam3d_gguf.convert.contract import TensorSpec, load_contract
from sam3d_gguf.convert.native import NativeComponent, load_native_components
from sam3d_gguf.convert.problems import BindingError
from sam3d_gguf.manifests.sources import load_sources
from sam3d_gguf.schemas.errors import ContractError


def _official_values(component: NativeComponent) -> dict[str, str | int]:
    sources = load_sources()
    revisions, files = sources.source_revisions, {f.role: f.sha256 for f in sources.files}
    own_hash = facts.native_metadata()[component.component]["sam3d.source.safetensors_sha256"]
    return {
        **load_contract(component.contract).official().dims,
        "body_revision": revisions["facebookresearch/sam-3d-body"],
        "dinov3_revision": revisions["facebookresearch/dinov3"],
        "checkpoint_sha256": files["body.checkpoint"],
        "config_sha256": files["body.config"],
        "mhr_asset_sha256": files["mhr.asset"],
        "asset_sha256": files["mhr.asset"],
        "release_sha256": files["mhr.archive"],
        "safetensors_sha256": own_hash,
        "prefix_sizes": "65,56,62,83",
        "joint_names": "<127 names joined by commas>",
        "parameter_names": "<249 names joined by commas>",
    }


@pytest.mark.parametrize("name", ["body.dinov3_backbone", "body.pose_branch", "mhr.lod1"])
def test_metadata_at_the_official_values(name: str) -> None:
    component = load_native_components()[name]
    values = _official_values(component)
    rendered = component.render(values)
    assert rendered == facts.native_metadata()[name]
    assert list(rendered) == sorted(rendered)
    assert component.read(rendered) == {n: str(values[n]) for n in component.placeholders}


def test_components_are_those_of_the_facts() -> None:
    assert load_native_components().keys() == facts.native_metadata().keys()


def test_tensors_at_the_official_dimensions() -> None:
    body, mhr = load_contract("body").official(), load_contract("mhr.lod1").official()
    components = load_native_components()
    backbone = components["body.dinov3_backbone"].tensors(body)
    prefix = "backbone.encoder."
    assert {t.name: t.shape for t in backbone} == {
        name.removeprefix(prefix): spec.shape
        for name, spec in facts.body_inventory().items()
        if name.startswith(prefix)
    } | {"mask_token": (1, 1280)}
    assert len(backbone) == 552 and {t.gguf_type for t in backbone} == {"F32"}
    assert [t.name for t in backbone if t.source_name is None] == ["mask_token"]
    pose = components["body.pose_branch"].tensors(body)
    assert len(pose) == 316
    assert sorted(t.name for t in pose if t.gguf_type == "I32") == [
        "head_pose.faces",
        "head_pose.hand_joint_idxs_left",
        "head_pose.hand_joint_idxs_right",
    ]
    assert [t.name for t in pose] == sorted(t.name for t in pose)
    assert sorted(
        [t.name, t.gguf_type, "x".join(map(str, t.shape)), str(t.source_name)]
        for t in components["mhr.lod1"].tensors(mhr)
    ) == sorted(row[:4] for row in facts.rows("mhr-native.txt"))


def _tiny_backbone() -> tuple[NativeComponent, dict[str, TensorSpec], dict[str, int]]:
    config = load_config((facts.TINY / "model_config.yaml").read_bytes(), "body-config", where="c")
    bound = load_contract("body").bind(facts.tiny("model.ckpt"), config)
    component = load_native_components()["body.dinov3_backbone"]
    values = {**_official_values(component), **bound.dims}
    dims = component.dimensions(component.read(component.render(values)))
    tensors = {t.name: TensorSpec(t.gguf_type, t.shape) for t in component.tensors(bound)}
    return component, tensors, dims


def test_every_component_of_a_tiny_model_binds() -> None:
    config = load_config((facts.TINY / "model_config.yaml").read_bytes(), "body-config", where="c")
    bounds = {
        "body": load_contract("body").bind(facts.tiny("model.ckpt"), config),
        "mhr.lod1": load_contract("mhr.lod1").bind(facts.tiny("mhr_model.stub.pt")),
    }
    for component in load_native_components().values():
        bound = bounds[component.contract]
        values = {**_official_values(component), **bound.dims}
        dims = component.dimensions(component.read(component.render(values)))
        tensors = {t.name: TensorSpec(t.gguf_type, t.shape) for t in component.tensors(bound)}
        again = component.bind(tensors, dims)
        assert list(again.tensors.values()) == list(bound.part(component.part))
        assert component.tensors(again) == component.tensors(bound)
        with pytest.raises(BindingError):
            component.bind(tensors, dims, official=True)


def test_a_component_without_its_added_tensor_or_with_another_shape_is_refused() -> None:
    component, tensors, dims = _tiny_backbone()
    component.bind(tensors, dims)
    for spec in (TensorSpec("F32", (1, 65)), TensorSpec("BF16", (1, 64)), None):
        changed = {n: s for n, s in tensors.items() if n != "mask_token"}
        if spec is not None:
            changed["mask_token"] = spec
        with pytest.raises(BindingError, match="mask_token"):
            component.bind(changed, dims)
    name = "blocks.0.norm1.weight"
    wrong = dataclasses.replace(tensors[name], dtype="BF16")
    with pytest.raises(BindingError, match=r"retyped \(1\)"):
        component.bind({**tensors, name: wrong}, dims)
    with pytest.raises(BindingError, match=r"extra \(1\)"):
        component.bind({**tensors, "prompt_to_token.bias": TensorSpec("F32", (48,))}, dims)


def test_metadata_that_does_not_fit_is_refused() -> None:
    component = load_native_components()["body.pose_branch"]
    good = component.render(_official_values(component))
    for key, value, message in (
        ("sam3d.extra", "x", "'sam3d.extra' is unknown"),
        ("general.alignment", 64, "does not fit"),
        ("sam3d.schema_version", True, "does not fit"),
        ("general.alignment", "32", "does not fit"),
        ("sam3d.component", "body.other", "does not fit"),
        ("sam3d.decoder", "depth=x;dim=1024;heads=8;head_dim=64;mlp=1024", "does not fit"),
        ("sam3d.decoder", 3, "does not fit"),
    ):
        with pytest.raises(ContractError, match=message):
            component.read({**good, key: value})
    with pytest.raises(ContractError, match=r"'sam3d\.output' is missing"):
        component.read({k: v for k, v in good.items() if k != "sam3d.output"})


@pytest.mark.parametrize("text", ["", "a\nb", "é", "x" * 65537])
def test_strings_are_printable_ascii(text: str) -> None:
    component = load_native_components()["mhr.lod1"]
    values = {**_official_values(component), "joint_names": text}
    with pytest.raises(ContractError, match="joint_names"):
        component.render(values)
