"""Every value rule: what it accepts, what it refuses, in blocks of any size."""

from __future__ import annotations

import hashlib
from typing import Any

import facts
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sam3d_gguf.convert.config import load_config
from sam3d_gguf.convert.contract import TensorSpec, load_contract
from sam3d_gguf.convert.rules import (
    Finite,
    IndexRange,
    Interval,
    Parents,
    Permutation,
    Positive,
    QkvBiasMask,
    Rule,
    SortedUniqueCoo,
    ValueRules,
    all_finite,
    check_prefix_schedule,
    make_checkers,
    prefix_schedule,
)
from sam3d_gguf.extractors.byte_source import ByteSource
from sam3d_gguf.extractors.checkpoint import read_archive
from sam3d_gguf.extractors.materialize import iter_blocks
from sam3d_gguf.schemas.errors import ContractError

Array = npt.NDArray[Any]
_SKELETON = facts.mhr_skeleton()


def _check(rule: Rule, values: Array, block: int = 3) -> None:
    (checker,) = make_checkers([rule], values.shape, "t")
    flat = values.reshape(-1)
    for i in range(0, flat.size, block):
        checker.feed(flat[i : i + block])
    checker.finish()


def _bf16(values: Array) -> Array:
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _f32(values: Array) -> Array:
    return np.asarray(values, np.float32)


def _refused(rule: Rule, values: Array, message: str) -> None:
    for block in (1, 3, 1 << 20):
        with pytest.raises(ContractError, match=message):
            _check(rule, values, block)


@given(st.lists(st.integers(0, (1 << 16) - 1), min_size=1, max_size=40))
def test_finite_16_bit_patterns(bits: list[int]) -> None:
    half = np.array(bits, np.uint16)
    assert all_finite(half) == bool(np.isfinite((half.astype(np.uint32) << 16).view("f4")).all())
    assert all_finite(half.view(np.float16)) == bool(np.isfinite(half.view(np.float16)).all())


def test_finite_every_16_bit_pattern() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    finite = np.isfinite((bits.astype(np.uint32) << 16).view(np.float32))
    for pattern, expected in zip(bits, finite, strict=True):
        assert all_finite(np.array([pattern], np.uint16)) == expected


@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_finite_32_and_64_bits(values: list[float]) -> None:
    single, double = np.array(values, np.float32), np.array(values, np.float64)
    assert all_finite(single) == bool(np.isfinite(single).all())
    assert all_finite(double) == bool(np.isfinite(double).all())


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, -np.nan])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.uint16])
def test_finite_names_the_element(bad: float, dtype: type[np.generic]) -> None:
    values = np.ones((500, 700), np.float32)
    values[311, 13] = bad
    typed = _bf16(values) if dtype == np.uint16 else values.astype(dtype)
    with pytest.raises(ContractError, match=r"t: the value -?(inf|nan) at \[311, 13\] is not fin"):
        _check(Finite(), typed, 4096)
    values[311, 13] = -1
    _check(Finite(), _bf16(values) if dtype == np.uint16 else values.astype(dtype), 4096)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_index_range(dtype: type[np.signedinteger[Any]]) -> None:
    _check(IndexRange(0, 9), np.array([[0, 9], [5, 3]], dtype))
    _refused(IndexRange(0, 9), np.array([[0, 9], [10, 3]], dtype), r"value 10 at \[1, 0\]")
    _refused(IndexRange(0, 9), np.array([[0, -1], [1, 3]], dtype), r"value -1 at \[0, 1\]")
    _refused(IndexRange(0, 9), np.array([np.iinfo(dtype).min]), "expected 0 to 9")


def test_interval() -> None:
    for make in (_f32, _bf16):
        _check(Interval(0, 1), make(np.array([0.0, 1.0, 0.5, -0.0])))
        _refused(Interval(0, 1), make(np.array([0.0, 1.0078125])), "value 1.0078125 at")
        _refused(Interval(0, 1), make(np.array([0.0, -1e-8])), "expected 0 to 1")
        _refused(Interval(0, 1), make(np.array([0.5, np.nan])), r"value nan at \[1\]")


def test_positive() -> None:
    for make in (_f32, _bf16):
        _check(Positive(), make(np.array([1e-30, 1.0])))
        for bad in (0.0, -0.0, -1.0, np.nan):
            _refused(Positive(), make(np.array([1.0, bad])), "is not positive")


def test_permutation() -> None:
    _check(Permutation(68, 71), np.array([70, 68, 71, 69]))
    for bad in ([70, 68, 71, 70], [70, 68, 72, 69], [67, 68, 71, 69]):
        _refused(Permutation(68, 71), np.array(bad), "each of 68 to 71 once")
    _refused(Permutation(68, 71), np.array([70, 68, 71]), "permutation")


def test_qkv_bias_mask() -> None:
    for make in (_f32, _bf16):
        _check(QkvBiasMask(), make(np.zeros(12)))
        masked = np.repeat([1.0, 0.0, 1.0], 4)
        _check(QkvBiasMask(), make(masked))
        for at, bad in ((0, 0.0), (5, 1.0), (11, 0.5)):
            wrong = masked.copy()
            wrong[at] = bad
            _refused(QkvBiasMask(), make(wrong), "bias mask")
        _refused(QkvBiasMask(), make(np.ones(12)), "bias mask")
        _refused(QkvBiasMask(), make(np.eye(1, 12)[0]), "bias mask")


def test_sorted_unique_coo() -> None:
    rule = SortedUniqueCoo(3, 4)
    _check(rule, np.array([[0, 0, 1, 2], [0, 3, 0, 3]]))
    _refused(rule, np.array([[0, 0, 1, 2], [0, 0, 0, 3]]), "entry 1 does not come after")
    _refused(rule, np.array([[0, 0, 1, 1], [0, 3, 2, 1]]), "entry 3 does not come after")
    _refused(rule, np.array([[1, 0], [0, 3]]), "entry 1 does not come after")
    _refused(rule, np.array([[0, 3], [0, 3]]), r"t\[0\]: the value 3 at \[1\]")
    _refused(rule, np.array([[0, 1], [0, 4]]), r"t\[1\]: the value 4 at \[1\]")
    _refused(rule, np.array([[-1, 1], [0, 3]]), r"t\[0\]: the value -1")


def test_parents() -> None:
    _check(Parents(), np.array([-1, 0, 0, 2], np.int32))
    for bad, joint in (([0, 0], 0), ([-2, 0], 0), ([-1, 1], 1), ([-1, 0, 3], 2), ([-1, -1], 1)):
        _refused(Parents(), np.array(bad, np.int32), f"parent of joint {joint} is")


def test_a_checker_wants_every_element() -> None:
    for rule in (Finite(), IndexRange(0, 9), Permutation(0, 3)):
        (checker,) = make_checkers([rule], (4,), "t")
        checker.feed(np.zeros(3, np.float32 if rule == Finite() else np.int32))
        with pytest.raises(ContractError, match="3 elements were checked; expected 4"):
            checker.finish()


def test_zero_size_tensors_have_nothing_to_check() -> None:
    (checker,) = make_checkers([Finite()], (0, 3), "t")
    checker.feed(np.zeros(0, np.float32))
    checker.finish()


def test_the_prefix_schedule_of_the_official_hierarchy_has_its_published_hash() -> None:
    parents = np.array(_SKELETON["parents"], "<i4")
    assert hashlib.sha256(parents.tobytes()).hexdigest() == _SKELETON["parents_sha256"]
    prefix, sizes = prefix_schedule(parents)
    assert prefix.shape == (2, 266)
    assert hashlib.sha256(prefix.astype("<i8").tobytes()).hexdigest() == _SKELETON["pmi_sha256"]
    assert list(sizes) == _SKELETON["prefix_sizes"] == [65, 56, 62, 83]
    _check(Parents(), parents)
    assert check_prefix_schedule(parents, prefix.astype(np.int32), name="t") == sizes


@st.composite
def _hierarchies(draw: st.DrawFn) -> Array:
    count = draw(st.integers(1, 40))
    return np.array([-1, *(draw(st.integers(0, i - 1)) for i in range(1, count))], np.int32)


@given(_hierarchies())
def test_the_prefix_schedule_composes_every_joint_with_its_ancestors(parents: Array) -> None:
    """Run on strings, whose product is concatenation, it yields every chain from the root."""
    prefix, sizes = prefix_schedule(parents)
    state = [[joint] for joint in range(parents.size)]
    start = 0
    for size in sizes:
        before = [list(chain) for chain in state]
        for joint, ancestor in prefix[:, start : start + size].T.tolist():
            state[joint] = before[ancestor] + before[joint]
        start += size
    for joint, chain in enumerate(state):
        expected = [joint]
        while parents[expected[0]] >= 0:
            expected.insert(0, int(parents[expected[0]]))
        assert chain == expected


def test_a_wrong_prefix_schedule_is_refused() -> None:
    parents = np.array(_SKELETON["parents"], np.int32)
    prefix, _ = prefix_schedule(parents)
    swapped = prefix[:, [1, 0, *range(2, 266)]]
    for wrong in (swapped, prefix[:, :-1], prefix[::-1], np.stack([prefix[0], 0 * prefix[1]])):
        with pytest.raises(ContractError, match="groups of 65,56,62,83"):
            check_prefix_schedule(parents, wrong, name="t")


def _feed(rules: ValueRules, tensor: Any, values: Array) -> None:
    for checker in rules.checkers(tensor):
        checker.feed(values.reshape(-1)[:200])
        checker.feed(values.reshape(-1)[200:])
        checker.finish()


def test_relations_between_tensors() -> None:
    bound = load_contract("mhr.lod1").official()
    parents = bound.tensors["character_torch.skeleton.joint_parents"]
    prefix = bound.tensors["character_torch.skeleton.pmi"]
    hierarchy = np.array(_SKELETON["parents"], np.int32)
    schedule, _ = prefix_schedule(hierarchy)
    rules = bound.value_rules()
    _feed(rules, prefix, schedule)
    with pytest.raises(ContractError, match="joint_parents: the tensor was not checked"):
        rules.finish()
    _feed(rules, parents, hierarchy)
    rules.finish()
    assert rules.prefix_sizes == {prefix.source_name: (65, 56, 62, 83)}
    other = hierarchy.copy()
    other[5] = 0
    rules = bound.value_rules()
    _feed(rules, prefix, schedule)
    _feed(rules, parents, other)
    with pytest.raises(ContractError, match="pmi: the prefix schedule"):
        rules.finish()


def test_official_rules_by_tensor() -> None:
    body, mhr = load_contract("body").official(), load_contract("mhr.lod1").official()
    expected: list[tuple[Any, str, Rule]] = [
        (body, "head_pose.faces", IndexRange(0, 18438)),
        (body, "head_pose.hand_joint_idxs_left", Permutation(95, 121)),
        (body, "head_pose_hand.hand_joint_idxs_right", Permutation(68, 94)),
        (body, "head_pose_hand.nonhand_param_idxs", IndexRange(0, 203)),
        (body, "backbone.encoder.blocks.31.attn.qkv.bias_mask", QkvBiasMask()),
        (body, "backbone.encoder.rope_embed.periods", Positive()),
        (mhr, "character_torch.mesh.faces", IndexRange(0, 18438)),
        (mhr, "character_torch.mesh.texcoord_faces", IndexRange(0, 19454)),
        (mhr, "character_torch.skeleton.pmi", IndexRange(0, 126)),
        (mhr, "character_torch.skeleton.joint_parents", Parents()),
        (
            mhr,
            "pose_correctives_model.pose_dirs_predictor.0.sparse_indices",
            SortedUniqueCoo(3000, 750),
        ),
    ]
    skin = "character_torch.linear_blend_skinning."
    expected += [
        (mhr, f"{skin}skin_indices_flattened", IndexRange(0, 126)),
        (mhr, f"{skin}vert_indices_flattened", IndexRange(0, 18438)),
        (mhr, f"{skin}skin_weights_flattened", Interval(0, 1)),
    ]
    for bound, name, rule in expected:
        assert rule in bound.tensors[name].rules


@pytest.mark.parametrize("file", ["model.ckpt", "mhr_model.stub.pt"])
def test_the_tiny_files_keep_every_rule(file: str) -> None:
    config = load_config((facts.TINY / "model_config.yaml").read_bytes(), "body-config", where="c")
    with (facts.TINY / file).open("rb") as stream:
        source = ByteSource(stream.fileno())
        archive = read_archive(source)
        specs = {n: TensorSpec(t.dtype, t.shape) for n, t in archive.tensors.items()}
        contract = load_contract("body" if file == "model.ckpt" else "mhr.lod1")
        bound = contract.bind(specs, config if file == "model.ckpt" else None)
        rules = bound.value_rules()
        for name, tensor in bound.tensors.items():
            checkers = rules.checkers(tensor)
            for block in iter_blocks(source, archive.tensors[name], max_bytes=1000):
                for checker in checkers:
                    checker.feed(block.reshape(-1))
            for checker in checkers:
                checker.finish()
        rules.finish()
