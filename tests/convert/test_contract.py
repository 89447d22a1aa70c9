"""At the official dimensions the contracts equal every fact about the official files."""

from __future__ import annotations

import math
from collections import Counter

import facts
import pytest

from sam3d_gguf.convert.contract import ContractName, TensorSpec, load_contract
from sam3d_gguf.convert.expressions import evaluate, names
from sam3d_gguf.convert.rules import Finite, IndexRange, Parents, Permutation, SortedUniqueCoo
from sam3d_gguf.extractors.models import OBJECTS
from sam3d_gguf.manifests.known_answers import load_known_answers

_CONTRACTS: tuple[ContractName, ...] = ("body", "mhr.lod1", *OBJECTS)


def test_body_equals_the_inventory() -> None:
    bound = load_contract("body").official()
    assert {
        name: TensorSpec(t.source_dtype, t.shape) for name, t in bound.tensors.items()
    } == facts.body_inventory()
    assert bound.is_official


def test_mhr_equals_the_native_contract() -> None:
    bound = load_contract("mhr.lod1").official()
    found = [
        [t.name, t.gguf_dtype, "x".join(map(str, t.shape)), t.source_name, t.source_dtype]
        for t in bound.tensors.values()
    ]
    assert sorted(found) == sorted(facts.rows("mhr-native.txt"))
    known = load_known_answers().mhr_gguf
    assert (known.tensors, known.elements) == (
        len(found),
        sum(math.prod(t.shape) for t in bound.tensors.values()),
    )


def test_mhr_asset_tensors_are_wanted_or_left_out() -> None:
    bound = load_contract("mhr.lod1").bind(facts.mhr_asset(), official=True)
    assert bound.tensors.keys() | bound.left_out.keys() == facts.mhr_asset().keys()
    assert sorted(name.rpartition(".")[2] for name in bound.left_out) == [
        "pose_parameters",
        "rest_vertices",
        "rigid_parameters",
        "scaling_parameters",
    ]


def test_the_pose_part_is_the_native_pose_branch() -> None:
    pose = load_contract("body").official().part("pose")
    assert (len(pose), sum(math.prod(t.shape) for t in pose)) == (316, 57_832_436)


def test_every_part_mirrors_its_twin() -> None:
    """The hand branch has the shapes of the pose branch, tensor by tensor."""
    tensors = load_contract("body").official().tensors
    twins = {name: name.replace("_hand.", ".", 1) for name in tensors if "_hand." in name}
    assert len(twins) > 200
    for name, twin in twins.items():
        assert tensors[name].shape == tensors[twin].shape
        assert tensors[name].rules == tensors[twin].rules
        assert "hand" in tensors[name].parts


@pytest.mark.parametrize("name", _CONTRACTS)
def test_names_fit_gguf(name: ContractName) -> None:
    tensors = load_contract(name).official().tensors.values()
    assert len({t.name for t in tensors}) == len(tensors)
    for tensor in tensors:
        assert len(tensor.name.encode()) <= 63
        assert 1 <= len(tensor.stored_shape) <= 4
        assert all(0 < size < 1 << 31 for size in tensor.stored_shape)
        assert math.prod(tensor.stored_shape) == math.prod(tensor.shape)


@pytest.mark.parametrize("name", _CONTRACTS)
def test_every_float_is_finite_and_every_integer_bounded(name: ContractName) -> None:
    bounded = (IndexRange, Permutation, SortedUniqueCoo, Parents)
    for tensor in load_contract(name).official().tensors.values():
        if tensor.source_dtype in ("BF16", "F16", "F32"):
            assert Finite() in tensor.rules, tensor.name
        else:
            assert any(isinstance(rule, bounded) for rule in tensor.rules), tensor.name
            assert tensor.gguf_dtype == "I32"


@pytest.mark.parametrize("name", _CONTRACTS)
def test_dimensions_are_consistent(name: ContractName) -> None:
    contract = load_contract(name)
    official = {d.name: d.official for d in contract.dimensions}
    used: set[str] = set()
    for d in contract.dimensions:
        assert 1 <= d.official <= d.maximum
        if d.source == "constant":
            assert d.argument == d.official == d.maximum
        if d.source == "expression":
            # One that no shape uses still demands an exact division.
            assert evaluate(str(d.argument), official) == d.official
            used |= names(str(d.argument)) | {d.name}
    for equation in contract.equations:
        assert evaluate(equation.left, official) == evaluate(equation.right, official)
        used |= names(equation.left) | names(equation.right)
    for entry in contract.entries:
        assert set(entry.parts) <= contract.parts.keys()
        for text in (*entry.shape, *(v for r in entry.rules for v in r.arguments.values())):
            if isinstance(text, str):
                used |= names(text)
    used |= set(contract.indices.values())
    keys = [s.key for s in contract.official().semantics()]
    assert max(Counter(keys).values()) == 1
    with_key = {d.name for d in contract.dimensions if d.key is not None}
    assert used <= official.keys() <= used | with_key


def test_semantics_hold_the_constants_and_the_bound_dimensions() -> None:
    values = {s.key: s.value for s in load_contract("body").official().semantics()}
    assert values["sam3d.body.backbone.layer_norm_epsilon"] == 1e-5
    assert values["sam3d.body.decoder.layer_norm_epsilon"] == 1e-6
    assert values["sam3d.body.camera.layer_norm_epsilon"] == 1e-6
    assert values["sam3d.body.image.mean"] == (0.485, 0.456, 0.406)
    assert values["sam3d.body.image.std"] == (0.229, 0.224, 0.225)
    assert values["sam3d.body.crop.padding_body"] == 1.25
    assert values["sam3d.body.crop.padding_hand"] == 0.9
    assert values["sam3d.body.camera.scale_factor_hand"] == 10
    assert values["sam3d.body.merge.wrist_angle_threshold"] == 1.4
    assert values["sam3d.body.merge.keypoint_threshold"] == 0.5
    assert values["sam3d.body.merge.wrist_distance_threshold"] == 0.25
    assert values["sam3d.body.merge.box_size_threshold"] == 64
    assert values["sam3d.body.backbone.attention.head_count"] == 20
    assert values["sam3d.body.decoder.block_count"] == 6
    assert values["sam3d.body.image_width"] == 512
    mhr = {s.key: s.value for s in load_contract("mhr.lod1").official().semantics()}
    assert mhr["sam3d.mhr.kinematics"] == "local_F32;prefix_F64;global_F32;XYZ;XYZW;log2_scale"
    assert mhr["sam3d.mhr.vertex_count"] == 18439


@pytest.mark.parametrize("name", _CONTRACTS)
def test_semantics_values_have_their_types(name: ContractName) -> None:
    kinds: dict[str, tuple[type, ...]] = {
        "string": (str,),
        "bool": (bool,),
        "uint32": (int,),
        "float32": (int, float),
    }
    for s in load_contract(name).official().semantics():
        values = s.value if isinstance(s.value, tuple) else (s.value,)
        assert isinstance(s.value, tuple) == s.value_type.endswith("[]")
        for value in values:
            assert isinstance(value, kinds[s.value_type.removesuffix("[]")]), s.key
            assert not isinstance(value, bool) or s.value_type == "bool"
            if s.value_type.startswith("uint32"):
                assert isinstance(value, int) and 0 <= value < 1 << 32


def test_pose_index_tables_cover_the_body_pose() -> None:
    """Each of the 133 body pose values comes from exactly one table entry."""
    values = {s.key: s.value for s in load_contract("body").official().semantics()}
    tables = [
        values[f"sam3d.body.pose.body_{name}_indices"] for name in ("3dof", "1dof", "translation")
    ]
    flat = [i for table in tables if isinstance(table, tuple) for i in table]
    assert sorted(map(int, flat)) == list(range(133))
    lengths = [len(table) for table in tables if isinstance(table, tuple)]
    assert lengths == [69, 58, 6]
    assert 2 * 69 + 2 * 58 + 6 == values["sam3d.body.pose.body_length"] == 260
    dofs = values["sam3d.body.pose.hand_dof_per_joint"]
    assert isinstance(dofs, tuple) and sum(map(int, dofs)) == 27


def test_companions_share_dimensions_by_name() -> None:
    body, mhr = load_contract("body"), load_contract("mhr.lod1")
    (companion,) = body.companions
    assert companion.architecture == mhr.architecture
    left, right = body.official().dims, mhr.official().dims
    for name in companion.equal_dimensions:
        assert left[name] == right[name]
