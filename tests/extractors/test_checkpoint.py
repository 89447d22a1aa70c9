"""What a checkpoint may say about its tensors, and what of it is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
from checkpoint_bytes import (
    Call,
    Entry,
    Global,
    Pairs,
    Persistent,
    Raw,
    Tree,
    assemble,
    legacy_checkpoint,
    module,
    pickled,
    script_archive,
    storage,
    tensor,
    zip_archive,
    zip_checkpoint,
)
from memory_source import memory_source

from sam3d_gguf.extractors.archive import Archive
from sam3d_gguf.extractors.checkpoint import check_storages, read_archive
from sam3d_gguf.extractors.kinds import FileKind
from sam3d_gguf.extractors.limits import Limits
from sam3d_gguf.extractors.materialize import iter_blocks
from sam3d_gguf.extractors.torch_legacy import read_torch_legacy
from sam3d_gguf.extractors.torch_zip import read_torch_zip
from sam3d_gguf.schemas.errors import InputError

UTILS = "torch._utils"


def read(data: bytes, limits: Limits | None = None) -> Archive:
    with memory_source(data, "model.ckpt") as source:
        return read_archive(source, limits)


def refused(data: bytes, reason: str, limits: Limits | None = None) -> None:
    with pytest.raises(InputError, match=reason):
        read(data, limits)


def elements(data: bytes, name: str) -> list[float]:
    with memory_source(data) as source:
        ref = read_archive(source).tensors[name]
        return [value for block in iter_blocks(source, ref) for value in block.tolist()]


def odict(*pairs: tuple[Tree, Tree], state: Tree = None) -> Raw:
    made = assemble(Call(Global("collections", "OrderedDict")))
    entries = b"".join(assemble(key) + assemble(value) for key, value in pairs)
    built = b"" if state is None else assemble(state) + b"b"
    return Raw(made + b"(" + entries + b"u" + built)


def rebuild(name: str, *arguments: Any, module: str = UTILS) -> Call:
    return Call(Global(module, name), arguments)


# Wrappers and names


def test_the_root_is_the_state_dict_unless_it_wraps_one() -> None:
    inner = {"weight": tensor()}

    assert read(zip_checkpoint(inner)).wrapper == "flat"
    for wrapper in ("state_dict", "model"):
        archive = read(zip_checkpoint({"epoch": 3, wrapper: inner}))
        assert (archive.wrapper, list(archive.tensors)) == (wrapper, ["weight"])


def test_a_wrapper_without_tensors_is_none() -> None:
    archive = read(zip_checkpoint({"model": {"depth": 3}, "state_dict": {"weight": tensor()}}))

    assert archive.wrapper == "state_dict"
    assert [(one.path, one.kind, one.text) for one in archive.content] == [
        ("model", "dict", "of 1")
    ]


def test_tensors_beside_the_wrapper_are_excluded() -> None:
    archive = read(zip_checkpoint({"model": {"weight": tensor()}, "step": tensor()}))

    assert list(archive.tensors) == ["weight"]
    assert [one.path for one in archive.excluded] == ["step"]
    assert [(one.path, one.kind) for one in archive.content] == [("step", "tensor")]


@pytest.mark.parametrize(
    "tree",
    [
        odict(("weight", tensor()), state={"_metadata": odict()}),
        Call(Global("collections", "OrderedDict"), ([["weight", tensor()]],)),
        Call(Global("collections", "OrderedDict"), ([("weight", tensor())],)),
    ],
)
def test_every_form_of_ordered_dict_is_a_state_dict(tree: Tree) -> None:
    assert list(read(zip_checkpoint(tree)).tensors) == ["weight"]


def test_names_written_by_python_2_are_text() -> None:
    tree = Raw(b"}(U\6weight" + assemble(tensor()) + b"u")

    assert list(read(zip_checkpoint(tree)).tensors) == ["weight"]


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        ({"model": {"a": tensor()}, "state_dict": {"a": tensor()}}, "several state dicts"),
        ([tensor()], "holds list of 1, not a state dict"),
        (tensor(), "holds tensor, not a state dict"),
        (
            Call(Global("my.code", "Model"), (), {"weight": tensor()}),
            "holds object of my.code.Model",
        ),
        (
            Call(Global("collections", "OrderedDict"), ([["a"]],)),
            "holds object of collections.OrderedDict",
        ),
        (
            Call(Global("collections", "OrderedDict"), (7,)),
            "holds object of collections.OrderedDict",
        ),
        ({}, "holds no tensors at its top.*keys: none"),
        ({"encoder": {"weight": tensor()}}, "holds no tensors at its top.*keys: 'encoder'"),
        ({3: tensor()}, "key 3, which is not text"),
        ({b"\xff": tensor()}, r"key b'\\xff', which is not text"),
        (Pairs([(("a",), tensor())]), "key tuple of 1, which is not text"),
        (Pairs([("a", tensor()), ("a", tensor())]), "key 'a' twice"),
        (Pairs([("a", tensor()), ("a", 1)]), "key 'a' twice"),
        ({"": tensor()}, "tensor name '', which is not printable"),
        ({"a\n": tensor()}, r"tensor name 'a\\n', which is not printable"),
        ({"\x1b[2J": tensor()}, r"tensor name '\\x1b\[2J', which is not printable"),
        ({"a" * 1_025: tensor()}, r"tensor name 'a{80}'\.\.\., which is not printable"),
    ],
)
def test_what_names_no_tensors_is_refused(tree: Tree, reason: str) -> None:
    refused(zip_checkpoint(tree), reason)


# Tensors


FROM_TYPE: tuple[Any, ...] = (
    tensor().function,
    Global("my.code", "Tagged"),
    tensor().arguments,
    {},
)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (tensor(shape=(2, 3), strides=(3, 1), offset=1), "views 28 bytes of a storage of 24"),
        (tensor(shape=(7,), strides=(1,)), "views 28 bytes of a storage of 24"),
        (tensor(shape=(1,), strides=(1,), offset=6), "views 28 bytes of a storage of 24"),
        (tensor(shape=(2,), strides=(2**62,)), "views .* of a storage of 24"),
        (tensor(shape=(2**62, 2**62), strides=(2**62, 2**62)), "views .* of a storage of 24"),
        (tensor(shape=(2,), strides=(-1,), offset=1), "stride that is negative"),
        (tensor(shape=(-1,), strides=(1,)), "size that is negative"),
        (tensor(offset=-1), "offset that is negative"),
        (tensor(offset=2**63), "offset that is negative, too large"),
        (tensor(shape=(2**64,), strides=(0,)), "size that is negative, too large"),
        (tensor(shape=(2.0,), strides=(1,)), "size that is negative, too large or no integer"),
        (tensor(shape=(True,), strides=(1,)), "size that is negative, too large or no integer"),
        (tensor(shape=("2",), strides=(1,)), "size that is negative, too large or no integer"),
        (tensor(shape=2, strides=(1,)), "a size that is not at most 32 integers"),
        (tensor(shape=(1,) * 33, strides=(1,) * 33), "a size that is not at most 32 integers"),
        (tensor(shape=(2, 3), strides=(1,)), "another number of strides"),
        (tensor(storage=None), "views something that is not a storage"),
        (tensor(storage=Persistent("0")), "views something that is not a storage"),
        (tensor(storage=Persistent(("module", "0"))), "views something that is not a storage"),
        (tensor(storage=storage(kind="ComplexFloatStorage")), "torch.ComplexFloatStorage"),
        (tensor(storage=storage(kind="QInt8Storage")), "torch.QInt8Storage"),
        (tensor(storage=storage(kind="SomeStorage")), "torch.SomeStorage"),
        (
            tensor(storage=Persistent(("storage", Global("os", "FloatStorage"), "0", "cpu", 6))),
            "os.FloatStorage",
        ),
        (tensor(storage=storage(elements=-6)), "storage size that is negative"),
        (tensor(storage=storage(elements=7)), "a storage of 28 bytes, but 'data/0' has 24"),
        (tensor(storage=storage(elements=2**61)), "a storage of .* bytes, but 'data/0' has 24"),
        (tensor(storage=storage("1")), "'data/1', which the archive lacks"),
        (tensor(storage=storage("../data/0")), "'data/../data/0', which the archive lacks"),
        (tensor(storage=storage("0", 6, "FloatStorage", ("v", 0, 6))), "views a part of its storage"),
        (tensor(storage=storage("0", 6, "FloatStorage", 7)), "in an unknown way"),
        (Call(tensor().function, tensor().arguments, {"a": 1}), "is changed after"),
        (Raw(assemble(tensor()) + b"K\1a"), "is changed after"),
        (Raw(assemble(tensor()) + b"K\1K\2s"), "is changed after"),
        (Call(tensor().function, tensor().arguments[:5]), "another number of arguments"),
        (Call(tensor().function, (*tensor().arguments, {"neg": True})), "conjugated or negated"),
        (Call(tensor().function, (*tensor().arguments, {"conj": True})), "conjugated or negated"),
        (Call(tensor().function, (*tensor().arguments, 1)), "conjugated or negated"),
        (rebuild("_rebuild_tensor", storage()), "another number of arguments"),
        (rebuild("_rebuild_tensor_v3", *tensor().arguments), "another number of arguments"),
        (rebuild("_rebuild_tensor_v3", *tensor().arguments, Global("torch", "complex64")), "complex64"),
        (rebuild("_rebuild_tensor_v3", *tensor().arguments, 6), "dtype of no name"),
        (rebuild("_rebuild_parameter", 7, True, {}), "wraps something that is not a tensor"),
        (rebuild("_rebuild_parameter", tensor()), "another number of arguments"),
        (rebuild("_rebuild_qtensor"), "is quantized"),
        (rebuild("_rebuild_meta_tensor_no_storage"), "is a meta tensor"),
        (rebuild("_rebuild_nested_tensor"), "is a nested tensor"),
        (
            rebuild("_rebuild_from_type_v2", Global("os", "system"), Global("m", "T"), (), {}, module="torch._tensor"),
            "wraps something that is not a tensor",
        ),
        (rebuild("_rebuild_from_type_v2", 1, 2, 3, 4, module="torch._tensor"), "unknown way"),
        (rebuild("_rebuild_sparse_tensor", 1, 2), "sparse in an unknown way"),
    ],
)  # fmt: skip
def test_tensors_that_cannot_be_read_are_refused_by_name(bad: Tree, reason: str) -> None:
    refused(
        zip_checkpoint({"good": tensor(), "bad": bad}), f"model.ckpt: the tensor 'bad' .*{reason}"
    )


@pytest.mark.parametrize(
    "good",
    [
        tensor((5, 0), (10, 1), 9),
        tensor([2], [3]),
        tensor(Call(Global("torch", "Size"), ((2, 3),))),
        Call(tensor().function, (*tensor().arguments, None)),
        Call(tensor().function, (*tensor().arguments, {})),
        Call(tensor().function, (*tensor().arguments, {"conj": False, "neg": False})),
        rebuild("_rebuild_parameter_with_state", tensor(), True, {}, {"tag": 1}),
        rebuild("_rebuild_from_type", *FROM_TYPE, module="torch.tensor"),
        rebuild("_rebuild_from_type", *FROM_TYPE, module="torch._tensor"),
    ],
)
def test_unusual_forms_are_read(good: Tree) -> None:
    assert list(read(zip_checkpoint({"a": good})).tensors) == ["a"]


def test_wrapping_has_an_end() -> None:
    wrapped: Call = tensor()
    for _ in range(3):
        wrapped = rebuild("_rebuild_parameter", wrapped, True, {})
    assert list(read(zip_checkpoint({"a": wrapped})).tensors) == ["a"]

    for _ in range(5):
        wrapped = rebuild("_rebuild_parameter", wrapped, True, {})
    refused(zip_checkpoint({"a": wrapped}), "'a' is wrapped too often")


def layout(name: str) -> Call:
    return Call(Global("torch.serialization", "_get_layout"), (name,))


COO = layout("torch.sparse_coo")
INDICES = tensor((2, 3), (3, 1), storage=storage("i", 6, "LongStorage"))
VALUES = tensor((3,), (1,))


def sparse(*data: Tree, kind: Tree = COO) -> bytes:
    tree = {"w": rebuild("_rebuild_sparse_tensor", kind, data)}
    return zip_checkpoint(tree, {"0": bytes(24), "i": bytes(48)})


@pytest.mark.parametrize("rest", [(), (True,)])
def test_sparse_tensors_become_two(rest: tuple[bool, ...]) -> None:
    archive = read(sparse(INDICES, VALUES, (4, 5), *rest))

    assert {name: ref.shape for name, ref in archive.tensors.items()} == {
        "w.indices": (2, 3),
        "w.values": (3,),
    }
    assert [(one.name, one.shape) for one in archive.sparse] == [("w", (4, 5))]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (sparse(INDICES, VALUES, (4, 5), kind=layout("torch.sparse_csr")), "torch.sparse_csr"),
        (sparse(INDICES, VALUES, (4, 5), kind=Call(Global("os", "system"), ("id",))), "layout id"),
        (
            sparse(
                INDICES, VALUES, (4, 5), kind=Call(Global("os", "system"), ("torch.sparse_coo",))
            ),
            "layout torch.sparse_coo",
        ),
        (sparse(INDICES, VALUES), "unknown way"),
        (sparse(tensor(), VALUES, (4, 5)), "indices that are not a matrix"),
        (
            sparse(tensor((3,), (1,), 0, storage("i", 6, "LongStorage")), VALUES, (4, 5)),
            "indices that are not a matrix",
        ),
        (
            sparse(
                INDICES, rebuild("_rebuild_sparse_tensor", COO, (INDICES, VALUES, (4, 5))), (4, 5)
            ),
            "unknown way",
        ),
        (
            sparse(
                rebuild("_rebuild_sparse_tensor", COO, (INDICES, VALUES, (4, 5))), VALUES, (4, 5)
            ),
            "unknown way",
        ),
        (sparse(VALUES, VALUES, (4, 5)), "indices that are not a matrix"),
        (sparse(INDICES, tensor((2,), (1,)), (4, 5)), "disagree"),
        (sparse(INDICES, VALUES, (4,)), "disagree"),
        (sparse(INDICES, VALUES, (4, 5, 6)), "disagree"),
        (sparse(INDICES, tensor((), ()), (4, 5)), "not a matrix"),
        (sparse(7, VALUES, (4, 5)), "wraps something"),
    ],
)
def test_malformed_sparse_tensors_are_refused(data: bytes, reason: str) -> None:
    refused(data, f"'w' .*{reason}")


def test_parts_of_a_sparse_tensor_share_no_name_with_another() -> None:
    parts = rebuild("_rebuild_sparse_tensor", COO, (INDICES, VALUES, (4, 5)))
    tree = {"w.indices": tensor(), "w": parts}

    refused(zip_checkpoint(tree, {"0": bytes(24), "i": bytes(48)}), "tensor 'w.indices' twice")


def test_an_untyped_storage_has_bytes() -> None:
    untyped = Persistent(("storage", Global("torch.storage", "UntypedStorage"), "0", "cpu", 24))
    rest: tuple[Any, ...] = (False, {}, Global("torch", "int16"))

    archive = read(
        zip_checkpoint({"a": rebuild("_rebuild_tensor_v3", untyped, 2, (10,), (1,), *rest)})
    )
    assert archive.tensors["a"].dtype == "I16"
    refused(
        zip_checkpoint({"a": rebuild("_rebuild_tensor_v3", untyped, 3, (10,), (1,), *rest)}),
        "views 26 bytes of a storage of 24",
    )


def test_a_repeated_view_counts_in_full() -> None:
    tree = {"a": tensor((2**36,), (0,))}

    refused(zip_checkpoint({"a": tensor((2**40,), (0,))}), "tensors of more than")
    assert read(zip_checkpoint(tree), Limits(tensor_bytes=2**38)).tensors["a"].nbytes == 2**38
    refused(zip_checkpoint(tree), "tensors of more than 100 bytes", Limits(tensor_bytes=100))


# Objects that have no meaning


def test_inert_objects_are_reported_with_their_place() -> None:
    callback = Call(
        Global("my.code", "Callback"), (), {"hook": Call(Global("os", "system"), ("id",))}
    )
    tree = {"state_dict": {"a": tensor()}, "callbacks": [callback, callback]}

    archive = read(zip_checkpoint(tree))

    assert {(one.function, one.path, one.count) for one in archive.inert} == {
        ("my.code.Callback", "callbacks.0", 2),
        ("os.system", "callbacks.0.(state).hook", 2),
    }
    assert {"my.code.Callback", "os.system"} <= set(archive.globals)


def test_tensors_below_inert_objects_are_excluded() -> None:
    network = Call(Global("my.code", "Network"), (tensor(),), {"weight": tensor()})

    archive = read(zip_checkpoint({"a": tensor(), "network": network}))

    assert list(archive.tensors) == ["a"]
    assert [one.path for one in archive.excluded] == ["network.(0)", "network.(state).weight"]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (b"cbuiltins\ngetattr\n)R", "a computed function"),
        (b"Px\n", "a computed function"),
        (b"U\1x", "a computed function"),
        (b"ca\x1b[2J\n'\n", r"a\x1b[2J.'"),
        (b"c" + b"m" * 500 + b"\nn\n", "m" * 80 + "..."),
    ],
)
def test_what_is_called_is_said_in_printable_words(function: bytes, said: str) -> None:
    archive = read(zip_checkpoint({"a": tensor(), "b": Raw(function + b")R")}))

    assert archive.inert[0].function == said


def test_inert_arguments_of_tensors_are_reported() -> None:
    hooks = Call(Global("os", "system"), ("id",))
    arguments = (*tensor().arguments[:5], hooks)

    archive = read(zip_checkpoint({"a": Call(tensor().function, arguments)}))

    assert list(archive.tensors) == ["a"]
    assert [(one.function, one.path) for one in archive.inert] == [("os.system", "a.(5)")]


CALL = assemble(Call(Global("os", "system"), ("id",)))
DROPS = {
    "POP": CALL + b"0",
    "POP_MARK": b"(" + CALL + b"1",
    "POP_MARK with others": b"(K\1" + CALL + b"K\x021",
    "POP of what holds it": b"]" + CALL + b"a0",
    "POP of a call with it": b"cm\nf\n" + CALL + b"\x85R0",
    "POP of an object with it as state": b"cm\nC\n)R" + CALL + b"b0",
    "a memo entry that another replaces": CALL + b"q\7" + b"0Nq\x070",
    "OBJ": b"(cos\nsystem\nX\2\0\0\0ido0",
    "INST": b"(X\2\0\0\0idios\nsystem\n0",
    "NEWOBJ": b"cos\nsystem\nX\2\0\0\0id\x85\x810",
    "NEWOBJ_EX": b"cos\nsystem\nX\2\0\0\0id\x85}\x920",
    "a persistent id": CALL + b"Q0",
}


@pytest.mark.parametrize("drop", DROPS.values(), ids=DROPS.keys())
def test_calls_whose_result_is_dropped_are_reported(drop: bytes) -> None:
    tree = Raw(drop + assemble({"a": tensor()}))
    other = Raw(drop + assemble({"protocol_version": 1001, "little_endian": True}))
    files = {
        "zip": zip_checkpoint(tree),
        "inside a tensor": zip_checkpoint({"a": Raw(drop + assemble(tensor()))}),
        "script": script_archive(Raw(drop + assemble(module({"a": tensor()})))),
        "constants": script_archive(module({"a": tensor()}), constants=Raw(drop + b"N")),
        "legacy": legacy_checkpoint(tree),
        "legacy version": legacy_checkpoint({"a": tensor()}, version=Raw(drop + assemble(1001))),
        "legacy system": legacy_checkpoint({"a": tensor()}, system=other),
        "legacy keys": legacy_checkpoint({"a": tensor()}, keys=Raw(drop + assemble(["0"]))),
    }
    for name, data in files.items():
        archive = read(data)
        assert {i.function: i.count for i in archive.inert if i.function[0] == "o"} == {
            "os.system": 1
        }, name
        assert all(i.path.startswith("(dropped)") for i in archive.inert), name
        assert "os.system" in archive.globals, name
        assert list(archive.tensors) == ["a"], name
        assert archive.excluded == (), name


def test_a_call_counts_as_often_as_it_is_made() -> None:
    tree = {"a": tensor(), "kept": Raw(CALL + b"0" + CALL + b"0" + CALL + b"q\x050h\5")}

    (inert,) = read(zip_checkpoint(tree)).inert

    assert (inert.function, inert.path, inert.count) == ("os.system", "kept", 3)


def test_a_tensor_that_is_dropped_is_excluded_once() -> None:
    parameter = rebuild("_rebuild_parameter", tensor(), False, Raw(b"N"))
    tree = Raw(assemble(parameter) + b"0" + assemble({"a": tensor()}))

    archive = read(zip_checkpoint(tree))

    assert [one.path for one in archive.excluded] == ["(dropped)"]


def test_a_cycle_in_a_checkpoint_is_survived() -> None:
    tree = Raw(b"}q\0(X\1\0\0\0a" + assemble(tensor()) + b"X\4\0\0\0selfh\0u")

    archive = read(zip_checkpoint(tree))

    assert [(one.path, one.kind) for one in archive.content] == [("self", "dict")]


def laughs() -> Raw:
    """A list of ten lists of ten lists, and so on, 60 levels deep, each list shared."""
    levels = b"](" + b"K\1" * 10 + b"eq\0"
    for level in range(60):
        levels += b"0](" + (b"h" + bytes([level])) * 10 + b"eq" + bytes([level + 1])
    return Raw(levels)


def test_shared_objects_are_visited_once() -> None:
    archive = read(zip_checkpoint({"a": tensor(), "laughs": laughs()}))

    assert [(one.path, one.text) for one in archive.content] == [("laughs", "of 10")]


def test_a_chain_of_objects_has_an_end() -> None:
    tree = {"a": tensor(), "chain": Raw(b")" + b"\x85" * 5_000)}

    refused(zip_checkpoint(tree), "nests its objects too deeply")


# TorchScript


def test_attribute_paths_are_names() -> None:
    leaf = module({"weight": tensor(), "training": False, "names": ["a", "b"]}, "Leaf")
    tree = module({"block": module({"0": leaf}, "Block"), "pair": (1, None), "rate": float("nan")})

    archive = read(script_archive(tree))

    assert archive.wrapper == "module"
    assert list(archive.tensors) == ["block.0.weight"]
    assert archive.attributes == {
        "block.0.training": False,
        "block.0.names": ["a", "b"],
        "pair": [1, None],
        "rate": "nan",
    }


def tagged(name: str, *arguments: Tree) -> Call:
    return Call(Global("torch.jit._pickle", name), arguments)


def test_torchscript_lists_and_tags_are_their_values() -> None:
    tree = module(
        {
            "sizes": tagged("build_intlist", [1, 2]),
            "rates": tagged("build_doublelist", [0.5]),
            "flags": tagged("build_boollist", [True]),
            "names": tagged("restore_type_tag", ["a"], "List[str]"),
            "nested": tagged("restore_type_tag", {"a": tagged("build_intlist", [3])}, "Dict"),
            "tensors": tagged("build_tensorlist", [tensor(), tensor()]),
            "table": tagged("restore_type_tag", {"left": tensor()}, "Dict[str, Tensor]"),
            "one": tagged("restore_type_tag", tensor(), "Tensor"),
        }
    )

    archive = read(script_archive(tree))

    assert archive.attributes == {
        "sizes": [1, 2],
        "rates": [0.5],
        "flags": [True],
        "names": ["a"],
        "nested": {"a": [3]},
    }
    assert list(archive.tensors) == ["tensors.0", "tensors.1", "table.left", "one"]
    assert archive.inert == ()


def test_states_that_are_no_attributes_have_a_path() -> None:
    tree = module({"packed": module((tensor(), 7), "Packed"), "empty": module({})})

    archive = read(script_archive(tree))

    assert list(archive.tensors) == ["packed.state.0"]
    assert archive.attributes == {"packed.state.1": 7}


def test_what_is_not_plain_is_content() -> None:
    tree = module(
        {
            "device": Call(Global("torch", "device"), ("cpu",)),
            "large": 2**63,
            "bytes": b"ab",
            "keys": {1: 2},
        }
    )

    archive = read(script_archive(tree))

    assert archive.attributes == {"keys.1": 2}
    assert {one.path: one.kind for one in archive.content} == {
        "device": "object",
        "large": "int",
        "bytes": "bytes",
    }


def test_two_paths_of_one_spelling_are_refused() -> None:
    refused(script_archive(module({"a.b": 1, "a": module({"b": 2})})), "attribute 'a.b' twice")
    tree = module({"a.b": tensor(), "a": module({"b": tensor()})})
    refused(script_archive(tree), "tensor 'a.b' twice")


def test_constants_are_apart_and_none_is_required() -> None:
    odd = tensor(storage=storage("1", 3, "ComplexFloatStorage"))
    coo = rebuild("_rebuild_sparse_tensor", COO, (INDICES, VALUES, (4, 5)))
    archive = read(
        script_archive(
            module({"weight": tensor()}),
            constants=(tensor(storage=storage("c")), odd, "text", coo),
            members={"constants/c": bytes(24), "constants/1": bytes(24)},
        )
    )

    assert list(archive.tensors) == ["weight"]
    assert archive.constants["CONSTANTS.c0"].storage.member == "constants/c"
    assert [(one.path, one.reason) for one in archive.excluded] == [
        ("CONSTANTS.c1", "lies in a torch.ComplexFloatStorage, whose dtype is not supported"),
        ("CONSTANTS.c3", "is sparse"),
    ]
    assert [one.path for one in archive.content] == ["CONSTANTS.c2"]
    assert archive.ignored == ("constants/1",)


def test_constants_have_a_limit() -> None:
    data = script_archive(
        module({"a": 1}),
        constants=(tensor(), tensor(storage=storage("x"))),
        members={"constants/0": bytes(24)},
    )

    assert len(read(data).constants) == 1
    refused(data, "more than 1 tensors among its constants", Limits(tensors=1))


def test_storages_of_older_archives_lie_in_tensors() -> None:
    data = script_archive(module({"a": tensor()}), {}, members={"tensors/0": bytes(24)})

    assert read(data).tensors["a"].storage.member == "tensors/0"


def test_code_is_hashed_deflated_or_not() -> None:
    code = b"class Module:\n" * 50
    entries = [
        Entry(b"a/data.pkl", pickled(module({"a": 1}))),
        Entry(b"a/constants.pkl", pickled(())),
        Entry(b"a/code/__torch__.py", code, method=8),
        Entry(b"a/code/__torch__.py.debug_pkl", code),
        Entry(b"a/extra/info.json", b"{}"),
    ]

    archive = read(zip_archive(entries))

    digest = hashlib.sha256(code).hexdigest()
    assert archive.code == {
        "code/__torch__.py": digest,
        "code/__torch__.py.debug_pkl": digest,
    }
    assert archive.ignored == ("extra/info.json",)
    refused(zip_archive(entries), "1400 bytes of code", Limits(inflated_bytes=1_399))


def test_only_code_may_be_compressed() -> None:
    data = Entry(b"a/data.pkl", pickled({"a": tensor()}))
    packed = Entry(b"a/data/0", bytes(24), method=8)
    code = Entry(b"a/code/a.py", b"code " * 20, method=8)

    refused(zip_archive([data, packed]), "'a/data/0': is compressed")
    refused(
        zip_archive([data, Entry(b"a/data/0", bytes(24)), code]), "'a/code/a.py': is compressed"
    )


@pytest.mark.parametrize("tree", [{"a": tensor()}, tensor(), [1], None])
def test_a_torchscript_archive_holds_a_module(tree: Tree) -> None:
    refused(script_archive(tree), "not a TorchScript module")


def test_a_cycle_of_modules_is_reported() -> None:
    made = assemble(Call(Global("__torch__", "Module")))
    tree = Raw(made + b"q\0}(X\4\0\0\0selfh\0X\1\0\0\0a" + assemble(tensor()) + b"ub")

    archive = read(script_archive(tree))

    assert list(archive.tensors) == ["a"]
    assert [(one.path, one.kind) for one in archive.content] == [("self", "cycle")]


def test_a_list_that_holds_itself_is_reported() -> None:
    archive = read(script_archive(module({"a": tensor(), "list": Raw(b"]q\0h\0a")})))

    assert [(one.path, one.kind) for one in archive.content] == [("list.0", "cycle")]


def test_a_shared_module_has_both_names() -> None:
    leaf = assemble(module({"weight": tensor()}, "Leaf"))
    tree = module({"first": Raw(leaf + b"q\x07"), "second": Raw(b"h\x07")})

    archive = read(script_archive(tree))

    assert list(archive.tensors) == ["first.weight", "second.weight"]
    assert archive.shared == (("first.weight", "second.weight"),)


def deep(value: Tree, levels: int) -> Tree:
    for _ in range(levels):
        value = module({"m": value})
    return value


def doubling() -> Raw:
    """A module of two references to a module, and so on: 2**40 paths to one tensor."""
    levels = assemble(module({"w": tensor()})) + b"q\0"
    for level in range(40):
        again = b"h" + bytes([level])
        attributes = b"}(X\1\0\0\0a" + again + b"X\1\0\0\0b" + again + b"ub"
        levels += b"0c__torch__\nM\n)R" + attributes + b"q" + bytes([level + 1])
    return Raw(levels)


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        (doubling(), "has more than 32768 tensors"),
        (module({"laughs": laughs()}), "paths to its objects"),
        (deep({"w": tensor()}, 60), "nests its objects too deeply"),
        (module({"a" * 600: module({"b" * 600: 1})}), "nests its objects too deeply"),
    ],
)
def test_trees_that_explode_are_refused(tree: Tree, reason: str) -> None:
    data = script_archive(tree)

    refused(data, reason, Limits(nesting=50))


# Containers


def test_the_byte_order_is_little() -> None:
    tree = {"a": tensor()}

    for order in (b"little", b""):
        assert read(zip_checkpoint(tree, members={"byteorder": order})).tensors
    refused(zip_checkpoint(tree, members={"byteorder": b"big"}), "'big' byte order")
    refused(zip_checkpoint(tree, members={"byteorder": b"middle"}), "'middle' byte order")
    refused(zip_checkpoint(tree, members={"byteorder": b"\xff"}), "/byteorder': is not ASCII")
    refused(zip_checkpoint(tree, members={"byteorder": bytes(65)}), "/byteorder': has 65 bytes")


def test_members_without_meaning_are_reported() -> None:
    members = {"data/9": bytes(3), "notes.txt": b"hello", ".data/serialization_id": b"1"}

    archive = read(zip_checkpoint({"a": tensor()}, members=members))

    assert archive.ignored == ("data/9", "notes.txt")
    assert (archive.root, archive.version) == ("archive", "3")


@pytest.mark.parametrize("descriptor", ["", "<4sIII", "<4sIQQ"])
def test_elements_are_found_in_the_file(descriptor: str) -> None:
    values = b"".join(index.to_bytes(8, "little") for index in range(6))
    tree = {"a": tensor((2, 2), (1, 2), 1, storage("0", 6, "LongStorage"))}

    assert elements(zip_checkpoint(tree, {"0": values}, descriptor=descriptor), "a") == [1, 3, 2, 4]
    assert elements(legacy_checkpoint(tree, {"0": values}, itemsize=8), "a") == [1, 3, 2, 4]


def test_damaged_pickles_and_storages_are_found() -> None:
    data = zip_checkpoint({"a": tensor()}, {"0": b"storage-of-24-bytes....."})
    damaged = data.replace(b"storage-of-24", b"storage-of-25")

    refused(data.replace(b"FloatStorage", b"FloetStorage"), "CRC-32")
    with memory_source(damaged) as source:
        archive = read_archive(source)
        with pytest.raises(InputError, match="'archive/data/0': its bytes have the CRC-32"):
            check_storages(source, archive)


def test_each_storage_is_checked_once() -> None:
    checked: list[int] = []
    tree = {"a": tensor(), "b": tensor(), "c": tensor(storage=storage("1"))}
    with memory_source(zip_checkpoint(tree, {"0": bytes(24), "1": bytes(24)})) as source:
        check_storages(source, read_archive(source), checked.append)

    assert checked == [24, 24]


def test_a_member_that_went_missing_is_told() -> None:
    with (
        memory_source(zip_checkpoint({"a": tensor()})) as source,
        pytest.raises(InputError, match="has no member 'constants"),
    ):
        read_torch_zip(source, FileKind.TORCHSCRIPT, Limits())


def test_bytes_behind_the_pickle_are_refused() -> None:
    refused(zip_checkpoint(pickled({"a": tensor()}) + b"cos\nsystem\n."), "12 bytes lie behind")


def test_a_pickle_beyond_the_limit_is_not_read() -> None:
    data = zip_checkpoint({"a": tensor(), "text": "x" * 900})

    refused(
        data, "'archive/data.pkl': has .* bytes; expected at most 500", Limits(pickle_bytes=500)
    )


@pytest.mark.parametrize(
    ("limits", "tree"),
    [
        (Limits(tensors=1), {"a": tensor(), "b": tensor()}),
        (Limits(tensors=1), {"model": {"a": tensor()}, "b": tensor(), "c": tensor()}),
        (Limits(entries=1), {"a": tensor(), "b": 1, "c": 2}),
        (Limits(entries=1), {"a": tensor(), "b": [Call(Global("m", "A")), Call(Global("m", "B"))]}),
        (Limits(dimensions=1), {"a": tensor()}),
        (Limits(name_characters=9), {"a" * 10: tensor()}),
        (Limits(opcodes=30), {"a": tensor()}),
    ],
)
def test_each_limit_of_a_checkpoint_holds(limits: Limits, tree: Tree) -> None:
    read(zip_checkpoint(tree))
    with pytest.raises(InputError):
        read(zip_checkpoint(tree), limits)


def test_a_call_made_often_counts_once_towards_its_limit() -> None:
    tree = {"a": tensor(), "b": [Call(Global("m", "A")), Call(Global("m", "A"))]}

    assert read(zip_checkpoint(tree), Limits(entries=1)).inert[0].count == 2


@pytest.mark.parametrize(
    ("limits", "tree"),
    [
        (Limits(entries=1), {"a": 1, "b": 2}),
        (Limits(steps=20), {"a": list(range(30))}),
        (Limits(nesting=2), {"a": module({"b": module({"c": module({"d": 1})})})}),
    ],
)
def test_each_limit_of_a_module_holds(limits: Limits, tree: Tree) -> None:
    read(script_archive(module(tree)))
    with pytest.raises(InputError):
        read(script_archive(module(tree)), limits)


# The form before torch 1.6


SYSTEM: dict[str, Tree] = {"protocol_version": 1001, "little_endian": True}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda: legacy_checkpoint({"a": tensor()}, version=1002), "protocol version"),
        (lambda: legacy_checkpoint({"a": tensor()}, system={"little_endian": False}), "'big'"),
        (lambda: legacy_checkpoint({"a": tensor()}, system={}), "does not say its byte order"),
        (lambda: legacy_checkpoint({"a": tensor()}, system=[1]), "does not say its byte order"),
        (lambda: legacy_checkpoint({"a": tensor()}, keys=("0",)), "no list of storage keys"),
        (lambda: legacy_checkpoint({"a": tensor()}, keys=["0", "0"]), "'0', which no tensor names"),
        (lambda: legacy_checkpoint({"a": tensor()}, keys=[["0"]]), "storage list of 1, which"),
        (lambda: legacy_checkpoint({"a": tensor()}, keys=["1"]), "'1', which no tensor names"),
        (lambda: legacy_checkpoint({"a": tensor()}, keys=[0]), "storage 0, which no tensor names"),
        (lambda: legacy_checkpoint({"a": tensor()}, {}, keys=[]), "'a' lies in a storage that the"),
        (lambda: legacy_checkpoint({"a": tensor()}, {"0": bytes(20)}), "'a' .* but it has 20"),
        (lambda: legacy_checkpoint({"a": tensor()}, counts={"0": 7}), "cut short inside"),
        (lambda: legacy_checkpoint({"a": tensor()}, counts={"0": 2**62}), "cut short inside"),
        (lambda: legacy_checkpoint({"a": tensor()}, counts={"0": -1}), "negative size"),
        (lambda: legacy_checkpoint({"a": tensor()}, counts={"0": 5}), "4 bytes behind"),
        (lambda: legacy_checkpoint({"a": tensor()}, tail=b"\0"), "1 bytes behind"),
        (lambda: legacy_checkpoint({"a": tensor()})[:-1], "cut short inside the storage '0'"),
        (lambda: legacy_checkpoint({"a": tensor()})[:-25], "cut short before the storage '0'"),
        (lambda: legacy_checkpoint({"a": tensor()})[:-60], "cut short"),
        (lambda: legacy_checkpoint({"a": tensor(storage=storage(kind="XStorage"))}), "torch.XStorage"),
        (
            lambda: legacy_checkpoint(
                {"a": tensor(), "b": tensor(storage=storage(elements=3, kind="LongStorage"))}
            ),
            "two element sizes",
        ),
    ],
)  # fmt: skip
def test_malformed_legacy_files_are_refused(change: Callable[[], bytes], reason: str) -> None:
    refused(change(), reason)


def test_another_magic_number_is_refused() -> None:
    data = legacy_checkpoint({"a": tensor()}, magic=pickled(0x1950A86A20F9469CFC6D))

    with (
        memory_source(data) as source,
        pytest.raises(InputError, match="does not start with torch's magic number"),
    ):
        read_torch_legacy(source, Limits())


def test_an_old_view_is_a_part_of_its_storage() -> None:
    whole = b"".join(index.to_bytes(4, "little") for index in range(6))

    def part(*window: Tree) -> Call:
        return tensor((2,), (1,), 0, storage("0", 6, "IntStorage", window))

    data = legacy_checkpoint({"a": part("view", 3, 2)}, {"0": whole})

    assert elements(data, "a") == [3, 4]
    refused(
        legacy_checkpoint({"a": part("view", 3, 1)}, {"0": whole}),
        "views 8 bytes of a storage of 4",
    )
    refused(legacy_checkpoint({"a": part("view", 3, 4)}, {"0": whole}), "reaches outside")
    refused(legacy_checkpoint({"a": part("view", -1, 4)}, {"0": whole}), "negative")
    refused(legacy_checkpoint({"a": part("view", 3)}, {"0": whole}), "in an unknown way")


def test_sources_of_classes_are_inert() -> None:
    source = Persistent(
        ("module", Global("my.code", "Net"), "net.py", "import os; os.system('id')")
    )
    data = legacy_checkpoint({"a": tensor(), "net": Call(source, (), {"w": tensor()})})

    archive = read(data)

    assert list(archive.tensors) == ["a"]
    assert [(one.function, one.path) for one in archive.inert] == [("my.code.Net", "net")]
    assert archive.members == {}


def test_calls_among_the_facts_about_the_machine_are_reported() -> None:
    facts = {"little_endian": True, "type_sizes": Call(Global("os", "system"), ("id",))}

    archive = read(legacy_checkpoint({"a": tensor()}, system=facts))

    assert [(one.function, one.path) for one in archive.inert] == [
        ("os.system", "(system).type_sizes")
    ]


def test_storages_without_a_tensor_are_reported() -> None:
    spare = storage("spare", 2, "ComplexFloatStorage")
    data = legacy_checkpoint(
        {"a": tensor(), "b": spare}, {"0": bytes(24), "spare": bytes(16)}, counts={"spare": 2}
    )

    archive = read(data)

    assert archive.ignored == ("spare",)
    assert archive.version == "1001"
