"""The contracts of SAM 3D Objects at the official sizes equal every fact about the official files."""

from __future__ import annotations

import hashlib
import json
import math
import struct

import pytest
from objects_facts import MOGE_OFFICIAL, PARTS, inventory, official_config

from sam3d_gguf.convert.binding import BoundContract
from sam3d_gguf.convert.config import Config, check_config, load_config
from sam3d_gguf.convert.contract import TensorSpec, load_model_contract
from sam3d_gguf.convert.problems import BindingError
from sam3d_gguf.extractors.models import CONFIG_ROLES, MOGE, OBJECTS, ObjectsModel, part
from sam3d_gguf.manifests.sources import load_sources
from sam3d_gguf.schemas.errors import ContractError

FLOW = "_base_models.generator.reverse_fn.backbone."
CONDITION = "_base_models.condition_embedder."


def official_tensors(model: ObjectsModel) -> dict[str, TensorSpec]:
    return {name: TensorSpec(*spec) for name, spec in inventory()[part(model)].items()}


def config_of(model: ObjectsModel) -> Config:
    """The official configuration with the pipeline's in it, as a conversion gives it."""
    pipeline = load_config(
        official_config("pipeline"), "objects-pipeline-config", where="pipeline.yaml"
    )
    if model == MOGE:
        own = check_config(MOGE_OFFICIAL, "objects-moge-config", where="model_config")
    else:
        schema = f"objects-{part(model).removesuffix('_4').replace('_', '-')}-config"
        own = load_config(official_config(part(model)), schema, where=part(model))
    return Config({**own.values, "pipeline": dict(pipeline.values)}, own.where)


def bound(model: ObjectsModel) -> BoundContract:
    """The contract bound to the official tensors and configuration."""
    contract = load_model_contract(model)
    return contract.bind(official_tensors(model), config_of(model), official=True)


@pytest.mark.parametrize("model", OBJECTS)
def test_equal_to_the_inventory(model: ObjectsModel) -> None:
    """Binding fails on any missing, extra, reshaped or retyped tensor."""
    found = bound(model)
    assert found.tensors.keys() | found.left_out.keys() == official_tensors(model).keys()
    assert not found.tensors.keys() & found.left_out.keys()
    assert found.is_official


@pytest.mark.parametrize("model", OBJECTS)
def test_every_dimension_is_found_without_being_told(model: ObjectsModel) -> None:
    contract = load_model_contract(model)
    assert contract.bind(official_tensors(model), config_of(model)).is_official


@pytest.mark.parametrize("model", OBJECTS)
def test_a_tensor_more_or_less_or_of_another_type_is_no_official_one(model: ObjectsModel) -> None:
    contract, tensors = load_model_contract(model), official_tensors(model)
    name = min(tensors)
    spec = tensors.pop(name)
    for changed in (
        tensors,
        {**tensors, name: spec, "extra": spec},
        {**tensors, name: TensorSpec("BF16", spec.shape)},
        {**tensors, name: TensorSpec(spec.dtype, (*spec.shape, 1))},
    ):
        with pytest.raises(BindingError):
            contract.bind(changed, config_of(model), official=True)


@pytest.mark.parametrize(
    ("name", "tensors", "elements", "halves"),
    [
        ("ss_generator", 1741, 1_672_313_398, 0),
        ("slat_generator", 1225, 1_226_486_664, 0),
        ("ss_decoder", 74, 73_671_201, 36),
        ("slat_decoder_gs", 101, 85_369_120, 96),
        ("slat_decoder_gs_4", 101, 85_067_588, 96),
        ("slat_decoder_mesh", 120, 90_926_693, 0),
        ("moge", 421, 314_174_026, 0),
    ],
)
def test_totals(name: str, tensors: int, elements: int, halves: int) -> None:
    specs = inventory()[name].values()
    assert len(specs) == tensors
    assert sum(math.prod(shape) for _, shape in specs) == elements
    assert sum(dtype == "F16" for dtype, _ in specs) == halves


@pytest.mark.parametrize("name", [*PARTS, "pipeline"])
def test_official_configurations_are_those_of_the_pins(name: str) -> None:
    (pin,) = load_sources().with_role(f"objects.{name}.config")
    data = official_config(name)
    assert (len(data), hashlib.sha256(data).hexdigest()) == (pin.bytes, pin.sha256)


def test_roles_are_those_of_the_pins() -> None:
    known = {file.role for file in load_sources().files}
    assert set(CONFIG_ROLES.values()) <= known
    assert MOGE not in CONFIG_ROLES


# Names


@pytest.mark.parametrize("model", OBJECTS)
def test_names_invert(model: ObjectsModel) -> None:
    """From a GGUF name alone the rules give the source name, and no two are alike."""
    tensors = bound(model).tensors
    assert len({t.name for t in tensors.values()}) == len(tensors)
    for source, tensor in tensors.items():
        name = tensor.name
        if name.startswith("flow."):
            name = FLOW + name.removeprefix("flow.")
        elif name.startswith("cond."):
            name = CONDITION + name.removeprefix("cond.")
        assert name == source
        assert len(tensor.name.encode()) <= 63


# Layouts, omitted and shared tensors


def test_kernels_and_position_tables_have_their_channels_last() -> None:
    stored = {
        f"{part(model)} {t.name}": (t.shape, t.stored_shape, t.layout)
        for model in OBJECTS
        for t in bound(model).tensors.values()
        if t.layout is not None or len(t.shape) > 4
    }
    assert stored["slat_generator flow.out_blocks.0.conv1.conv.weight"] == (
        (128, 3, 3, 3, 2048),
        (128, 27, 2048),
        "folded",
    )
    assert stored["slat_decoder_mesh upsample.1.skip_connection.conv.weight"] == (
        (96, 1, 1, 1, 192),
        (96, 1, 192),
        "folded",
    )
    assert stored["ss_decoder blocks.2.conv.weight"] == (
        (1024, 512, 3, 3, 3),
        (1024, 27, 512),
        "channels_last",
    )
    assert stored["ss_generator cond.module_list.2.pos_embed"] == (
        (1, 512, 32, 32),
        (1, 1024, 512),
        "channels_last",
    )
    assert {layout for _, _, layout in stored.values()} == {"folded", "channels_last"}
    # 8 in the flow, 6 in the mesh decoder; 20 in the occupancy decoder and 1 table.
    assert len(stored) == 8 + 6 + 20 + 1


def test_the_bundled_decoder_is_left_out() -> None:
    found = bound("objects.ss_generator")
    assert {name.startswith("_base_models.decoder.") for name in found.left_out} == {True}
    assert len(found.left_out) == 74
    assert not any(name.startswith("_base_models.decoder.") for name in found.tensors)


@pytest.mark.parametrize("model", ["objects.ss_generator", "objects.slat_generator"])
def test_equal_encoders_are_stored_once(model: ObjectsModel) -> None:
    key = f"sam3d.{model}.image_encoder.shared"
    before = bound(model)
    after = before.sharing(frozenset({key}))
    assert len(before.tensors) - len(after.tensors) == 344
    assert {s.key: s.value for s in before.semantics()}[key] is False
    assert {s.key: s.value for s in after.semantics()}[key] is True
    assert sum(".module_list.1." in name for name in after.left_out) == 344


# What changes results


def test_samplers_are_the_pipelines_and_not_those_of_the_generators() -> None:
    ss = {s.key: s.value for s in bound("objects.ss_generator").semantics()}
    slat = {s.key: s.value for s in bound("objects.slat_generator").semantics()}
    first, second = "sam3d.objects.ss_generator.sampler.", "sam3d.objects.slat_generator.sampler."
    numbers = ("steps", "rescale_t", "guidance_strength", "guidance_interval")
    assert [ss[first + n] for n in numbers] == [25, 3, 7, (0, 500)]
    assert [slat[second + n] for n in numbers] == [25, 1, 1, (0, 500)]


def test_means_and_deviations_are_those_of_the_pipeline() -> None:
    values = {s.key: s.value for s in bound("objects.slat_generator").semantics()}
    pipeline = config_of("objects.slat_generator").values["pipeline"]
    assert isinstance(pipeline, dict)
    for key in ("mean", "std"):
        stated = pipeline[f"slat_{key}"]
        assert isinstance(stated, list)
        assert list(values[f"sam3d.objects.slat_generator.latent.{key}"]) == stated  # type: ignore[arg-type]
    pose = {s.key: s.value for s in bound("objects.ss_generator").semantics()}
    mean = pose["sam3d.objects.ss_generator.pose.rotation_6d_mean"]
    assert isinstance(mean, tuple)
    assert struct.pack("<f", mean[5]) == struct.pack("<f", 0.5166093753457688)


NORMS: tuple[tuple[ObjectsModel, tuple[str, ...]], ...] = (
    ("objects.ss_generator", ("flow.norm1", "flow.norm3", "flow.output_norm")),
    (
        "objects.slat_generator",
        ("flow.norm1", "flow.norm3", "flow.output_norm", "flow.resnet_norm2"),
    ),
    ("objects.slat_decoder_gs", ("norm1", "norm2", "output_norm")),
    ("objects.slat_decoder_mesh", ("norm1", "norm2")),
)


@pytest.mark.parametrize(("model", "norms"), NORMS)
def test_norms_without_parameters_are_named(model: ObjectsModel, norms: tuple[str, ...]) -> None:
    values = {s.key: s.value for s in bound(model).semantics()}
    for norm in norms:
        key = f"sam3d.{model}.{norm}"
        assert values[key] == "layer_norm_without_affine"
        assert values[f"{key}_epsilon"] == (1e-5 if norm.endswith("output_norm") else 1e-6)


# Configurations


def test_sizes_that_must_agree_are_compared() -> None:
    config = config_of("objects.ss_generator")
    text = json.dumps(config.values).replace('"size": 518', '"size": 504', 1)
    with pytest.raises(ContractError, match=r"values that must be equal are not: .*504"):
        load_model_contract("objects.ss_generator").bind(
            official_tensors("objects.ss_generator"), Config(json.loads(text), "c")
        )


@pytest.mark.parametrize(
    ("schema", "name", "old", "new"),
    [
        ("ss-generator", "ss_generator", "generator.shortcut.model.ShortCut", "os.system"),
        ("ss-generator", "ss_generator", "strength: 2.0", "strength: 3.0"),
        ("ss-generator", "ss_generator", "remap_output: linear", "remap_output: exp"),
        ("ss-generator", "ss_generator", "      batch_mode: true\n", ""),
        ("slat-generator", "slat_generator", "patch_size: 2", "patch_size: 4"),
        ("slat-generator", "slat_generator", "prenorm_features: true", "prenorm_features: false"),
        ("slat-generator", "slat_generator", "sigma_min: 0.0", "sigma_min: 0.0\n      more: 1"),
        ("ss-decoder", "ss_decoder", "out_channels: 1", "out_channels: 2"),
        ("slat-decoder-gs", "slat_decoder_gs", "_rotation: 0.1", "_rotation: 0.2"),
        ("slat-decoder-gs", "slat_decoder_gs", "num_gaussians: 32", "num_gaussians: 16"),
        ("slat-decoder-mesh", "slat_decoder_mesh", "use_color: true", "use_color: false"),
        ("slat-decoder-mesh", "slat_decoder_mesh", "attn_mode: swin", "attn_mode: full"),
        ("pipeline", "pipeline", "slat_rescale_t: 1", "slat_rescale_t: 3"),
        ("pipeline", "pipeline", "- -0.85146744", "- 0.85146744"),
        ("pipeline", "pipeline", "downsample_ss_dist: 1", "ss_cfg_strength: 7"),
        ("pipeline", "pipeline", "box_size_factor: 1.2", "box_size_factor: 1.3"),
    ],
)
def test_values_that_the_contracts_do_not_describe(
    schema: str, name: str, old: str, new: str
) -> None:
    text = official_config(name).decode()
    assert old in text
    with pytest.raises(ContractError, match="the configuration is not one"):
        load_config(
            text.replace(old, new, 1).encode(), f"objects-{schema}-config", where=f"{name}.yaml"
        )
