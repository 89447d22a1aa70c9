"""Binding finds the dimensions of a source, and one error lists everything that is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import facts
import pytest

from sam3d_gguf.convert.config import load_config
from sam3d_gguf.convert.contract import TensorSpec, load_contract
from sam3d_gguf.convert.problems import BindingError, Problem, Signature, pair_renamed

_CONFIG = load_config(
    (facts.TINY / "model_config.yaml").read_bytes(), "body-config", where="config"
)
_BODY = load_contract("body")
_MHR = load_contract("mhr.lod1")
Tensors = dict[str, TensorSpec]


def _problems(tensors: Tensors, *, official: bool = False) -> dict[str, list[Problem]]:
    with pytest.raises(BindingError) as caught:
        _BODY.bind(tensors, _CONFIG if not official else None, official=official, where="m.ckpt")
    assert str(caught.value).startswith("m.ckpt: the tensors do not meet the contract body")
    groups: dict[str, list[Problem]] = {}
    for problem in caught.value.problems:
        groups.setdefault(problem.kind, []).append(problem)
    return groups


def test_tiny_body_binds() -> None:
    """The numbers are those of the fixture's own description."""
    bound = _BODY.bind(facts.tiny("model.ckpt"), _CONFIG)
    expected = {
        "C": 64, "BLOCKS": 3, "BACKBONE_HEADS": 4, "BACKBONE_HEAD": 16, "HIDDEN": 256,
        "PATCH": 16, "STORAGE": 4, "IMAGE_W": 128, "IMAGE_H": 128, "GRID_W": 8, "DIM": 48,
        "DEPTH": 3, "HEADS": 4, "DIM_HEAD": 8, "MLP_DIM": 56, "V": 90, "F": 176, "J": 127,
        "POSE": 519, "KEYPOINTS": 70, "KEYPOINTS_ALL": 308,
    }  # fmt: skip
    assert {name: bound.dims[name] for name in expected} == expected
    assert len(bound.tensors) == 442
    assert not bound.left_out
    assert not bound.is_official
    for name, spec in facts.tiny("model.ckpt").items():
        assert bound.tensors[name].shape == spec.shape


def test_tiny_mhr_binds() -> None:
    tensors = facts.tiny("mhr_model.stub.pt")
    bound = _MHR.bind(tensors)
    expected = {"V": 90, "F": 176, "TEXCOORDS": 97, "SKIN": 236, "SPARSE": 22464, "HIDDEN": 3000}
    assert {name: bound.dims[name] for name in expected} == expected
    assert len(bound.tensors) == 18
    assert len(bound.left_out) == 15
    assert bound.left_out.keys() | bound.tensors.keys() == tensors.keys()


def test_added_tensors() -> None:
    (token,) = _BODY.bind(facts.tiny("model.ckpt"), _CONFIG).added
    assert (token.source_name, token.shape, token.value) == (
        "backbone.encoder.mask_token",
        (1, 64),
        0,
    )


def test_official_inventory_binds_from_its_tensors() -> None:
    text = (facts.TINY / "model_config.yaml").read_bytes()
    for old, new in ((b"- 128", b"- 512"), (b"DIM: 48", b"DIM: 1024"), (b"DEPTH: 3", b"DEPTH: 6"),
                     (b"HEADS: 4", b"HEADS: 8"), (b"DIM: 56", b"DIM: 1024"),
                     (b"DIM_HEAD: 8", b"DIM_HEAD: 64")):  # fmt: skip
        text = text.replace(old, new)
    config = load_config(text, "body-config", where="config")
    bound = _BODY.bind(facts.body_inventory(), config)
    assert bound.is_official
    assert bound.dims == _BODY.official().dims
    assert _BODY.bind(facts.body_inventory(), config, official=True).is_official


def test_a_pinned_source_must_have_the_official_dimensions() -> None:
    problems = _problems(facts.tiny("model.ckpt"), official=True)
    assert len(problems["missing"]) == 1127 - 442
    with pytest.raises(BindingError) as caught:
        _BODY.bind(facts.body_inventory(), _CONFIG, official=True)
    assert {p.name.partition(" ")[0] for p in caught.value.problems} == {
        "IMAGE_W", "IMAGE_H", "DIM", "DEPTH", "HEADS", "DIM_HEAD", "MLP_DIM",
    }  # fmt: skip


def test_without_a_configuration_the_unknown_dimensions_are_named() -> None:
    with pytest.raises(BindingError) as caught:
        _BODY.bind(facts.tiny("model.ckpt"))
    assert "decoder.layers.{l}.ln1.weight" in {p.name for p in caught.value.problems}


def _change(name: str, spec: TensorSpec | None) -> Tensors:
    tensors = dict(facts.tiny("model.ckpt"))
    if spec is None:
        del tensors[name]
    else:
        tensors[name] = spec
    return tensors


def test_missing() -> None:
    name = "decoder.layers.1.self_attn.q_proj.weight"
    assert _problems(_change(name, None)) == {
        "missing": [Problem("missing", name, "", "F32 [32, 48]")]
    }


def test_extra() -> None:
    tensors = _change("optimizer.state", TensorSpec("F32", (1, 2)))
    assert _problems(tensors) == {"extra": [Problem("extra", "optimizer.state", "F32 [1, 2]")]}


@pytest.mark.parametrize(
    "name",
    [
        "backbone.encoder.cls_token",
        "backbone.encoder.blocks.2.mlp.w1.bias",
        "head_pose.faces",
        "prompt_encoder.mask_downscaling.12.weight",
        "ray_cond_emb.conv.weight",
        "init_to_token_mhr.weight",
    ],
)
def test_reshaped_names_the_culprit_alone(name: str) -> None:
    """One misshapen tensor never makes the others look wrong, whatever dimensions it has."""
    spec = facts.tiny("model.ckpt")[name]
    wrong = dataclasses.replace(spec, shape=(*spec.shape[:-1], spec.shape[-1] + 1))
    problems = _problems(_change(name, wrong))
    assert problems.keys() == {"reshaped"}
    (problem,) = problems["reshaped"]
    assert problem.name == name
    assert problem.expected == f"{spec.dtype} [{', '.join(map(str, spec.shape))}]"


def test_two_copies_that_disagree_are_one_problem() -> None:
    tensors = _change("head_pose.keypoint_mapping", TensorSpec("F32", (308, 218)))
    ((problem,),) = _problems(tensors).values()
    assert problem.kind == "reshaped" and problem.name.endswith(".keypoint_mapping")


def test_rope_periods_must_divide_the_width() -> None:
    tensors = _change("backbone.encoder.rope_embed.periods", TensorSpec("BF16", (5,)))
    assert [p.name for p in _problems(tensors)["equation"]] == ["BACKBONE_HEADS = C/(4*PERIODS)"]


def test_another_rank_is_a_reshape() -> None:
    name = "decoder.norm_final.weight"
    assert _problems(_change(name, TensorSpec("F32", (48, 1))))["reshaped"] == [
        Problem("reshaped", name, "F32 [48, 1]", "F32 [48]")
    ]


def test_retyped() -> None:
    name = "backbone.encoder.norm.weight"
    assert _problems(_change(name, TensorSpec("F32", (64,)))) == {
        "retyped": [Problem("retyped", name, "F32 [64]", "BF16 [64]")]
    }


def test_renamed() -> None:
    tensors = dict(facts.tiny("model.ckpt"))
    name = "decoder.layers.0.cross_attn.k_proj.weight"
    tensors["decoder.layers.0.cross_attn.key_proj.weight"] = tensors.pop(name)
    assert _problems(tensors) == {
        "renamed": [Problem("renamed", "decoder.layers.0.cross_attn.key_proj.weight", "", name)]
    }


def test_renamed_by_a_common_prefix() -> None:
    tensors = {f"module.{name}": spec for name, spec in facts.body_inventory().items()}
    with pytest.raises(BindingError) as caught:
        _BODY.bind(tensors, official=True)
    assert len(caught.value.problems) == 1127
    for problem in caught.value.problems:
        assert problem.kind == "renamed" and problem.name == f"module.{problem.expected}"


def test_many_problems_are_all_kept_but_not_all_shown() -> None:
    rest = {n: s for n, s in facts.tiny("model.ckpt").items() if "decoder.layers" not in n}
    tensors = rest | {f"junk.{i}": TensorSpec("U8", (i,)) for i in range(500)}
    with pytest.raises(BindingError) as caught:
        _BODY.bind(tensors, _CONFIG)
    kinds = [p.kind for p in caught.value.problems]
    assert (kinds.count("missing"), kinds.count("extra")) == (442 - len(rest), 500)
    text = str(caught.value)
    assert len(text.splitlines()) < 40
    assert "extra (500):" in text and "and 488 more" in text


def test_a_missing_block_is_a_missing_block() -> None:
    tensors = {n: s for n, s in facts.tiny("model.ckpt").items() if ".blocks.1." not in n}
    problems = _problems(tensors)
    assert problems.keys() == {"missing"}
    assert all(".blocks.1." in p.name for p in problems["missing"])


def test_a_stray_tensor_of_another_block_is_extra() -> None:
    tensors = _change("backbone.encoder.blocks.99999.norm1.weight", TensorSpec("BF16", (64,)))
    assert _problems(tensors).keys() == {"extra"}


def test_too_many_blocks_are_refused_before_they_are_expanded() -> None:
    tensors = dict(facts.tiny("model.ckpt"))
    for name in [n for n in tensors if ".blocks.2." in n]:
        tensors[name.replace(".blocks.2.", ".blocks.999999.")] = tensors[name]
    problems = _problems(tensors)
    assert problems.keys() == {"dimension"}
    assert [p.found for p in problems["dimension"]] == ["1000000"]


@pytest.mark.parametrize("size", [0, 1 << 40])
def test_dimensions_are_bounded(size: int) -> None:
    tensors = {
        n: dataclasses.replace(s, shape=(size, 3)) if n.endswith(".faces") else s
        for n, s in facts.tiny("model.ckpt").items()
    }
    problems = _problems(tensors)
    assert [(p.name, p.found) for p in problems["dimension"]] == [
        ("F (Triangles of the mesh)", str(size))
    ]


@pytest.mark.parametrize(
    ("old", "new", "equation"),
    [
        (b"- 128\n  - 128", b"- 128\n  - 144", "IMAGE_W = IMAGE_H"),
        (b"- 128\n  - 128", b"- 120\n  - 120", "GRID_W = IMAGE_W/PATCH"),
    ],
)
def test_equations_over_the_configuration(old: bytes, new: bytes, equation: str) -> None:
    text = (facts.TINY / "model_config.yaml").read_bytes()
    assert old in text
    config = load_config(text.replace(old, new), "body-config", where="config")
    with pytest.raises(BindingError) as caught:
        _BODY.bind(facts.tiny("model.ckpt"), config)
    assert any(p.kind == "equation" and p.name.startswith(equation) for p in caught.value.problems)


def test_the_configuration_must_agree_with_the_tensors() -> None:
    text = (facts.TINY / "model_config.yaml").read_bytes().replace(b"HEADS: 4", b"HEADS: 5")
    with pytest.raises(BindingError) as caught:
        _BODY.bind(facts.tiny("model.ckpt"), load_config(text, "body-config", where="config"))
    reshaped = {p.name for p in caught.value.problems}
    assert "decoder.layers.0.self_attn.q_proj.weight" in reshaped


def test_the_feed_forward_width_of_the_backbone() -> None:
    tensors = {
        n: dataclasses.replace(s, shape=tuple(248 if d == 256 else d for d in s.shape))
        if ".mlp.w" in n
        else s
        for n, s in facts.tiny("model.ckpt").items()
    }
    assert [p.name.partition(" (")[0] for p in _problems(tensors)["equation"]] == ["HIDDEN = 4*C"]


def _mhr(change: Callable[[Tensors], object]) -> list[Problem]:
    tensors = dict(facts.tiny("mhr_model.stub.pt"))
    change(tensors)
    with pytest.raises(BindingError) as caught:
        _MHR.bind(tensors)
    return list(caught.value.problems)


def _put(name: str, tensors: Tensors) -> None:
    tensors[name] = TensorSpec("F32", (1,))


def test_mhr_left_out_tensors_may_be_absent_or_odd_but_not_unknown() -> None:
    limits = "character_torch.parameter_limits."
    tensors = dict(facts.tiny("mhr_model.stub.pt"))
    tensors[f"{limits}ellipsoid_weight"] = TensorSpec("F32", (0,))
    tensors[f"{limits}linear_joint"] = TensorSpec("I32", (1, 1))
    del tensors["character_torch.mesh.rest_vertices"]
    bound = _MHR.bind(tensors)
    assert f"{limits}ellipsoid_weight" in bound.left_out
    assert "character_torch.mesh.rest_vertices" not in bound.left_out
    for name in (f"{limits}a.b", "character_torch.parameter_limitsX", f"{limits}"):
        problems = _mhr(partial(_put, name))
        assert [(p.kind, p.name) for p in problems] == [("extra", name)]


def test_mhr_left_out_tensors_are_still_checked() -> None:
    name = "character_torch.parameter_transform.pose_parameters"
    assert _mhr(lambda t: t.update({name: TensorSpec("BOOL", (248,))})) == [
        Problem("reshaped", name, "BOOL [248]", "BOOL [249]")
    ]
    assert _mhr(lambda t: t.update({name: TensorSpec("U8", (249,))})) == [
        Problem("retyped", name, "U8 [249]", "BOOL")
    ]


def test_mhr_equations() -> None:
    def widen(tensors: Tensors) -> None:
        tensors["pose_correctives_model.pose_dirs_predictor.2.weight"] = TensorSpec(
            "F32", (270, 3001)
        )

    assert [p.name for p in _mhr(widen)] == [
        "HIDDEN = 24*(J-2) (the first corrective layer has 24 units per joint)"
    ]


def test_a_gguf_binds_by_its_names_types_and_stated_dimensions() -> None:
    for contract, file, config in (
        (_BODY, "model.ckpt", _CONFIG),
        (_MHR, "mhr_model.stub.pt", None),
    ):
        bound = contract.bind(facts.tiny(file), config)
        metadata = {s.key: s.value for s in bound.semantics()}
        stated = contract.stated_dimensions(metadata)
        source = {t.name: TensorSpec(t.gguf_dtype, t.shape) for t in bound.tensors.values()}
        again = contract.bind_gguf(source, stated)
        assert again.dims == bound.dims
        assert again.tensors == bound.tensors
        wide = {t.name: TensorSpec(t.gguf_type("f32"), t.shape) for t in bound.tensors.values()}
        assert contract.bind_gguf(wide, stated, precision="f32").tensors == bound.tensors
        assert {s.dtype for s in wide.values()} == {"F32", "I32"}


def test_a_gguf_of_another_precision_is_retyped() -> None:
    bound = _BODY.bind(facts.tiny("model.ckpt"), _CONFIG)
    stated = _BODY.stated_dimensions({s.key: s.value for s in bound.semantics()})
    wide = {t.name: TensorSpec(t.gguf_type("f32"), t.shape) for t in bound.tensors.values()}
    with pytest.raises(BindingError) as caught:
        _BODY.bind_gguf(wide, stated)
    assert {p.kind for p in caught.value.problems} == {"retyped"}


def test_a_gguf_must_agree_with_its_own_metadata() -> None:
    bound = _MHR.bind(facts.tiny("mhr_model.stub.pt"))
    stated = _MHR.stated_dimensions({s.key: s.value for s in bound.semantics()})
    tensors = {t.name: TensorSpec(t.gguf_dtype, t.shape) for t in bound.tensors.values()}
    with pytest.raises(BindingError) as caught:
        _MHR.bind_gguf(tensors, {**stated, "V": 91})
    assert list(caught.value.problems) == [Problem("dimension", "V (Vertices)", "91", "90")]


def test_stated_dimensions_takes_integers_only() -> None:
    metadata = {"sam3d.mhr.vertex_count": "90", "sam3d.mhr.face_count": True, "other": 3}
    assert _MHR.stated_dimensions(metadata) == {}
    assert _MHR.stated_dimensions({"sam3d.mhr.vertex_count": 90}) == {"V": 90}


def test_pairing_needs_equal_dtype_and_shape_and_uses_each_name_once() -> None:
    a: Signature = ("F32", (2,))
    b: Signature = ("F32", (3,))
    assert pair_renamed({"x.weight": a}, {"x.weights": b}) == []
    assert pair_renamed({"x.weight": a}, {"quite.different": a}) == []
    assert pair_renamed({"x.weight": a, "y.weight": a}, {"x.weigh": a}) == [("x.weight", "x.weigh")]
    assert pair_renamed({"a.b": a}, {"model.module.a.b": a, "model.a.b": a}) == [
        ("a.b", "model.module.a.b")
    ]
    many = {f"long.prefix.{i}": a for i in range(5000)}
    assert len(pair_renamed({f"short.{i}": a for i in range(5000)}, many)) <= 5000
