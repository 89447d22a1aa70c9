"""What a conversion refuses, each time with everything that is wrong and with nothing left behind."""

from __future__ import annotations

import gzip
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_bytes import Entry, pickled, tensor, zip_archive
from pinned import pin
from tiny_release import (
    ASSET,
    CHECKPOINT,
    CONFIG,
    Array,
    Release,
    Source,
    asset_of,
    checkpoint_of,
    edited_extraction,
    from_extraction,
    names_in,
    read_json,
    request,
    sources_of,
)

import sam3d_gguf.extractors.extract as extract_module
from sam3d_gguf.convert.inspect import inspect
from sam3d_gguf.convert.problems import BindingError
from sam3d_gguf.convert.release import convert_body, convert_mhr, extract_to_folder
from sam3d_gguf.manifests.known_answers import load_known_answers
from sam3d_gguf.manifests.sources import load_sources
from sam3d_gguf.schemas.errors import ContractError, InputError, OutputError, Sam3dError

Sources = dict[str, Source]


@pytest.fixture(scope="session")
def body() -> Sources:
    """The tensors of the tiny checkpoint."""
    return sources_of(CHECKPOINT)


@pytest.fixture(scope="session")
def mhr() -> Sources:
    """The tensors of the tiny asset."""
    return sources_of(ASSET)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where results go; a refused conversion leaves nothing there."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder / "body.gguf"


def refused(out: Path, **changes: Any) -> Sam3dError:
    """The refusal of a conversion that leaves nothing behind."""
    with pytest.raises(Sam3dError) as caught:
        convert_body(request(out, **{"config": CONFIG, "mhr": None, **changes}))
    assert names_in(out.parent) == []
    return caught.value


def written(path: Path, data: bytes) -> Path:
    """The path of a file with that content."""
    path.write_bytes(data)
    return path


# Tensors


def test_a_checkpoint_that_is_written_again_converts(
    body: Sources, mhr: Sources, out: Path, tmp_path: Path
) -> None:
    checkpoint = written(tmp_path / "model.ckpt", checkpoint_of(body))
    asset = written(tmp_path / "mhr.pt", asset_of(mhr, {}))

    convert_body(request(out, checkpoint=checkpoint, config=CONFIG, mhr=asset))


def test_all_that_is_wrong_with_the_tensors_is_in_one_error(
    body: Sources, out: Path, tmp_path: Path
) -> None:
    changed = dict(body)
    del changed["init_pose.weight"]
    changed["head_extra.weight"] = Source("F32", (1, 2), bytes(8))
    changed["decoder.layers.0.ffn.layers.0.0.wait"] = changed.pop(
        "decoder.layers.0.ffn.layers.0.0.weight"
    )
    changed["init_camera.weight"] = Source("F32", (3, 1), body["init_camera.weight"].data)
    changed["head_pose.scale_mean"] = Source("F64", (68,), bytes(68 * 8))
    checkpoint = written(tmp_path / "model.ckpt", checkpoint_of(changed))

    error = refused(out, checkpoint=checkpoint)

    assert isinstance(error, BindingError)
    found = {(p.kind, p.name) for p in error.problems}
    assert found == {
        ("missing", "init_pose.weight"),
        ("extra", "head_extra.weight"),
        ("renamed", "decoder.layers.0.ffn.layers.0.0.wait"),
        ("reshaped", "init_camera.weight"),
        ("retyped", "head_pose.scale_mean"),
    }
    text = str(error)
    assert "missing (1):\n    init_pose.weight, expected F32 [1, 519]" in text
    assert "extra (1):\n    head_extra.weight is F32 [1, 2]" in text
    assert "expected decoder.layers.0.ffn.layers.0.0.weight" in text
    assert "init_camera.weight is F32 [3, 1], expected F32 [1, 3]" in text
    assert "head_pose.scale_mean is F64 [68], expected F32 [68]" in text


def test_what_is_wrong_with_mhr_is_in_one_error(mhr: Sources, out: Path, tmp_path: Path) -> None:
    changed = dict(mhr)
    del changed["character_torch.skeleton.joint_parents"]
    changed["character_torch.mesh.colors"] = Source("F32", (90, 3), bytes(1080))
    asset = written(tmp_path / "mhr.pt", asset_of(changed, {}))

    with pytest.raises(BindingError) as caught:
        convert_mhr(request(out, checkpoint=asset, mhr=None))

    found = {(p.kind, p.name) for p in caught.value.problems}
    assert found == {
        ("missing", "character_torch.skeleton.joint_parents"),
        ("extra", "character_torch.mesh.colors"),
    }


def test_a_body_and_an_mhr_of_other_sizes_do_not_go_together(
    mhr: Sources, out: Path, tmp_path: Path
) -> None:
    changed = dict(mhr)
    for name, axis in (
        ("character_torch.mesh.faces", 0),
        ("character_torch.mesh.texcoord_faces", 0),
    ):
        faces = mhr[name]
        assert faces.shape[axis] == 176
        changed[name] = Source("I32", (175, 3), faces.data[: 175 * 12])
    asset = written(tmp_path / "mhr.pt", asset_of(changed, {}))

    error = refused(out, mhr=asset)

    assert isinstance(error, ContractError)
    assert "F is 176 in Body and 175 in MHR" in str(error)


Change = Callable[[Array], None]


def put(index: Any, value: object) -> Change:
    """Set an element."""

    def change(values: Array) -> None:
        values[index] = value

    return change


def copy(target: Any, origin: Any) -> Change:
    """Set elements to others."""

    def change(values: Array) -> None:
        values[target] = values[origin]

    return change


def edited(source: Path, target: Path, name: str, change: Change) -> Path:
    """An extraction with one tensor changed; `name` is the end of its own."""

    def edit(tensors: dict[str, Array]) -> None:
        for key, values in tensors.items():
            if key.endswith(name):
                tensors[key] = values.copy()
                change(tensors[key])

    return edited_extraction(source, target, edit)


BODY_VALUES: list[tuple[str, Change, str]] = [
    ("init_pose.weight", put((0, 7), np.nan), r"nan at \[0, 7\]"),
    ("init_pose.weight", put((0, 7), np.inf), r"inf at \[0, 7\]"),
    ("head_pose.faces", put((2, 1), 90), r"90 at \[2, 1\] is out of range"),
    ("head_pose.faces", put((2, 1), -1), r"-1 at \[2, 1\] is out of range"),
    ("head_pose.faces", put((0, 0), 1 << 32), "does not fit into 32 bits"),
    ("head_pose.hand_joint_idxs_left", copy(0, 1), "no permutation"),
    ("blocks.0.attn.qkv.bias_mask", put(0, 0.5), "bias mask"),
    ("rope_embed.periods", put(0, 0), "not positive"),
]


@pytest.mark.parametrize(("name", "change", "words"), BODY_VALUES)
def test_a_value_that_breaks_a_rule_is_refused(
    single: Release, tmp_path: Path, out: Path, name: str, change: Change, words: str
) -> None:
    extraction = edited(single.extraction, tmp_path / "edited", name, change)

    with pytest.raises(ContractError, match=words) as caught:
        convert_body(from_extraction(extraction, out, mhr=None))

    assert caught.value.where.startswith("model.ckpt: ")
    assert caught.value.where.endswith(name)
    assert names_in(out.parent) == []


MHR_VALUES: list[tuple[str, Change, str]] = [
    ("skeleton.joint_parents", put(5, 5), "the parent of joint 5 is 5"),
    ("skeleton.joint_parents", put(0, 0), "the parent of joint 0 is 0"),
    ("skeleton.pmi", copy((1, 3), (0, 3)), "prefix schedule"),
    ("linear_blend_skinning.skin_weights_flattened", put(0, 1.5), r"1\.5"),
    (
        "pose_dirs_predictor.0.sparse_indices",
        copy((slice(None), 1), (slice(None), 0)),
        "does not come after",
    ),
]


@pytest.mark.parametrize(("name", "change", "words"), MHR_VALUES)
def test_a_value_of_mhr_that_breaks_a_rule_is_refused(
    single: Release, tmp_path: Path, out: Path, name: str, change: Change, words: str
) -> None:
    extraction = edited(single.mhr_extraction, tmp_path / "edited", name, change)

    with pytest.raises(ContractError, match=words) as caught:
        convert_mhr(from_extraction(extraction, out, mhr=None, config=None))

    assert caught.value.where.startswith("mhr_model.stub.pt: ")

    assert names_in(out.parent) == []


# Configuration


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("  ENABLE_HAND: true", "  ENABLE_HAND: true\n  ENABLE_TAIL: true", "ENABLE_TAIL"),
        ("FFN_TYPE: origin", "FFN_TYPE: swiglu", "FFN_TYPE"),
        ("DIM: 48", "DIM: 47", r"expected F32 \[47, 47\]"),
        ("    DIM: 48\n", "", "DIM"),
        ("DEPTH: 3", "DEPTH: 4", "decoder.layers.3"),
        ("HEADS: 4", "HEADS: 5", "decoder.layers.0"),
        ("- 128\n  - 128", "- 128\n  - 120", "IMAGE"),
        ("TRAIN:", "TRAIN: !!python/object:os.system {}\nOTHER:", "tags"),
        ("TRAIN:", "TRAIN: &a\nOTHER: *a\nX:", "anchors"),
    ],
)
def test_another_configuration_is_refused(
    single: Release, out: Path, tmp_path: Path, before: str, after: str, words: str
) -> None:
    text = CONFIG.read_text()
    assert before in text
    config = written(tmp_path / "model_config.yaml", text.replace(before, after, 1).encode())

    with pytest.raises(Sam3dError, match=words):
        convert_body(from_extraction(single.extraction, out, config=config, mhr=None))

    assert names_in(out.parent) == []


def test_a_configuration_is_looked_for_beside_and_one_level_up(
    single: Release, out: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "snapshot" / "inner"
    folder.mkdir(parents=True)
    checkpoint = written(folder / "model.ckpt", CHECKPOINT.read_bytes())
    missing = refused(out, checkpoint=checkpoint, config=None)
    assert "there is no model_config.yaml" in str(missing)
    assert "--config" in str(missing)

    written(folder.parent / "model_config.yaml", b"not a config")
    above = refused(out, checkpoint=checkpoint, config=None)
    assert str(folder.parent / "model_config.yaml") in str(above)

    written(folder / "model_config.yaml", b"\xff")
    beside = refused(out, checkpoint=checkpoint, config=None)
    assert str(folder / "model_config.yaml") in str(beside)


def test_a_configuration_that_is_no_file_is_refused(out: Path, tmp_path: Path) -> None:
    link = tmp_path / "model_config.yaml"
    link.symlink_to(CONFIG)
    assert "a symbolic link" in str(refused(out, config=link))
    assert "a folder" in str(refused(out, config=tmp_path))
    big = written(tmp_path / "big.yaml", b"a: 1\n" * 20_000)
    assert "100000 bytes" in str(refused(out, config=big))


def test_an_unpinned_configuration_needs_to_be_allowed(out: Path) -> None:
    error = refused(out, allow_unpinned=False)

    assert "not a pinned configuration" in str(error)
    assert "1012fc3f39cb5e90e3f8fbadf7bded31604bfafdce0321d17a7c1a2d3f08b88d" in str(error)


# Files of another kind


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"
Make = Callable[[Path], bytes]


def of(data: bytes) -> Make:
    """A file with that content."""
    return lambda _: data


def foreign_zip(folder: Path) -> bytes:
    path = folder / "foreign.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/readme.txt", "hello")
    return path.read_bytes()


KINDS: dict[str, tuple[Make, str]] = {
    "empty": (of(b""), "an empty file"),
    "html": (of(b"<!DOCTYPE html><html><body>Sign in"), "an HTML page"),
    "lfs": (of(LFS_POINTER), "a Git LFS pointer"),
    "safetensors": (of(struct.pack("<Q", 2) + b"{}" + bytes(600)), "a safetensors file"),
    "gguf": (of(b"GGUF" + bytes(600)), "a GGUF file"),
    "foreign zip": (foreign_zip, "a zip archive that torch did not write"),
    "zip cut short": (
        lambda folder: foreign_zip(folder)[:-9],
        "a zip archive that is damaged or cut short: does not end with a zip directory",
    ),
    "gzip": (of(gzip.compress(b"x")), "a gzip file"),
    "json": (of(b'{"error": "gated"}'), "a JSON document"),
    "zeros": (of(bytes(8192)), "starts with zeros only"),
    "text": (of(b"hello"), "of no kind that is known here"),
    "script": (of(ASSET.read_bytes()), "a TorchScript archive"),
}


def entries(*more: Entry) -> list[Entry]:
    """The members of a checkpoint, and more."""
    pickle = Entry(b"archive/data.pkl", pickled({"a": tensor()}))
    return [pickle, Entry(b"archive/data/0", bytes(24)), *more]


def overlapping() -> bytes:
    """The directory names one member's bytes again, under another name."""
    return zip_archive(entries(Entry(b"archive/again", b"", central={"at": 0})))


ARCHIVES: dict[str, tuple[bytes, str, str]] = {
    "cut short": (
        CHECKPOINT.read_bytes()[:-100],
        "does not end with a zip directory: it is cut short or has a tail",
        "Fetch the file again",
    ),
    "name that leaves": (
        zip_archive(entries(Entry(b"archive/../../x", b""))),
        "the member name 'archive/../../x' does not stay inside a folder",
        "No official file",
    ),
    "first name that leaves": (
        zip_archive([Entry(b"../x", b""), *entries()]),
        "the member name '../x' does not stay inside a folder",
        "No official file",
    ),
    "absolute name": (
        zip_archive([Entry(b"/etc/x", b""), *entries()]),
        "the member name '/etc/x' does not stay inside a folder",
        "No official file",
    ),
    "name twice": (
        zip_archive(entries(Entry(b"archive/data.pkl", pickled({})))),
        "holds 'archive/data.pkl' twice",
        "No official file",
    ),
    "overlap": (
        overlapping(),
        "'archive/data.pkl' overlaps the member after it",
        "No official file",
    ),
    "hidden bytes": (
        zip_archive([Entry(b"archive/data.pkl", pickled({}), gap=b"hidden")]),
        "6 bytes lie behind 'archive/data.pkl'",
        "No official file",
    ),
    "compressed": (
        zip_archive(entries(Entry(b"archive/data/1", bytes(90), method=8))),
        "'archive/data/1': is compressed, which torch does to code only",
        "No official file",
    ),
    "two roots": (
        zip_archive(entries(Entry(b"other/data.pkl", b""))),
        "'other/data.pkl' lies outside the root folder 'archive'",
        "Fetch the file again",
    ),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_is_refused_by_its_fault_and_member(
    out: Path, tmp_path: Path, name: str
) -> None:
    data, cause, action = ARCHIVES[name]
    path = written(tmp_path / "model.ckpt", data)
    said = [str(refused(out, checkpoint=path))]
    for task in (
        lambda: inspect(path),
        lambda: extract_to_folder("body", path, tmp_path / "x", allow_unpinned=True),
    ):
        with pytest.raises(InputError) as caught:
            task()
        said.append(str(caught.value))

    for text in said:
        assert cause in text
        assert action in text
        assert str(path) in text
        assert "damaged" not in text


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_another_kind_is_named(out: Path, tmp_path: Path, kind: str) -> None:
    make, words = KINDS[kind]
    path = written(tmp_path / "model.ckpt", make(tmp_path))

    error = refused(out, checkpoint=path)

    assert isinstance(error, InputError)
    assert words in str(error)
    assert "expected a torch.save checkpoint" in str(error)
    assert error.action


ASSET_KINDS: dict[str, tuple[Make, str]] = {
    "checkpoint": (of(CHECKPOINT.read_bytes()), "a torch.save checkpoint (zip form)"),
}


@pytest.mark.parametrize("kind", ["empty", "html", "safetensors", "checkpoint"])
def test_an_asset_of_another_kind_is_named(out: Path, tmp_path: Path, kind: str) -> None:
    make, words = (KINDS | ASSET_KINDS)[kind]
    path = written(tmp_path / "mhr_model.pt", make(tmp_path))

    error = refused(out, mhr=path)

    assert words in str(error)
    assert "expected a TorchScript archive" in str(error)
    assert "state_dict() with torch.save" not in error.action


@pytest.mark.parametrize("option", ["checkpoint", "mhr"])
def test_a_source_that_is_no_regular_file_is_named(out: Path, tmp_path: Path, option: str) -> None:
    pipe, link, dangling = (tmp_path / name for name in ("pipe", "link", "dangling"))
    os.mkfifo(pipe)
    link.symlink_to(CHECKPOINT)
    dangling.symlink_to(tmp_path / "nowhere")
    named = {
        pipe: "a named pipe",
        link: "a symbolic link",
        dangling: "a symbolic link",
        Path("/dev/zero"): "a character device",
        tmp_path / "absent": "No such file",
        Path("a\0b"): "not a path",
    }
    if option == "checkpoint":
        named[tmp_path] = "a folder"
    for path, words in named.items():
        assert words in str(refused(out, **{option: path})), path


def test_an_asset_folder_without_a_report_is_named(out: Path, tmp_path: Path) -> None:
    error = refused(out, mhr=tmp_path)

    assert "extraction.json" in str(error)


# Outputs


@pytest.mark.parametrize("taken", ["body.gguf", "mhr.gguf", "manifest.json"])
@pytest.mark.parametrize("kind", ["file", "folder", "link", "dangling link"])
def test_an_output_that_exists_is_refused_before_anything_is_read(
    tmp_path: Path, taken: str, kind: str
) -> None:
    path = tmp_path / taken
    match kind:
        case "file":
            path.write_bytes(b"precious")
        case "folder":
            path.mkdir()
        case _:
            path.symlink_to(CONFIG if kind == "link" else tmp_path / "nowhere")
    before = path.lstat()

    with pytest.raises(OutputError, match="exists already"):
        convert_body(request(tmp_path / "body.gguf", checkpoint=tmp_path / "not looked at"))

    assert names_in(tmp_path) == [taken]
    assert path.lstat() == before


def test_kept_safetensors_that_exist_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    (kept / "mhr").mkdir(parents=True)
    for path in (kept / "other.safetensors", kept / "mhr" / "extraction.json"):
        path.write_bytes(b"precious")
        with pytest.raises(OutputError, match="exists already"):
            convert_body(
                request(
                    tmp_path / "body.gguf",
                    checkpoint=tmp_path / "not looked at",
                    config=CONFIG,
                    keep_safetensors=kept,
                )
            )
        path.unlink()
    assert names_in(tmp_path) == ["kept"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"out": "mhr.gguf"}, "two outputs"),
        ({"out": "manifest.json", "mhr": None}, "two outputs"),
        ({"manifest": "body.gguf"}, "two outputs"),
        ({"manifest": "elsewhere/manifest.json"}, "another folder"),
        ({"out": "körper.gguf"}, "characters"),
        ({"out": "body\n.gguf"}, "characters"),
        ({"out": "body\udcff.gguf"}, "characters"),
        ({"manifest": "manifest[red].json"}, "characters"),
        ({"manifest": "manifest.txt"}, "would not take this for a manifest"),
        ({"manifest": "MANIFEST.JSON"}, "would not take this for a manifest"),
        ({"out": "native", "manifest": "native/m", "layout": "components"}, "would not take this"),
        ({"out": "body.json"}, "would take this for a manifest"),
        ({"out": "."}, "a folder that exists"),
        ({"out": ".."}, "a folder that exists"),
        ({"out": "elsewhere/..", "layout": "components"}, "a folder that exists"),
        ({"keep_safetensors": "body.gguf"}, "in the place of .*/body.gguf"),
        ({"keep_safetensors": "mhr.gguf"}, "in the place of .*/mhr.gguf"),
        ({"keep_safetensors": "manifest.json"}, "in the place of .*/manifest.json"),
        ({"keep_safetensors": "elsewhere/../body.gguf"}, "in the place of .*/body.gguf"),
        ({"keep_safetensors": "linked/body.gguf"}, "in the place of .*/body.gguf"),
        ({"keep_safetensors": "body.gguf/kept"}, "in the place of .*/body.gguf"),
        ({"out": "mhr", "keep_safetensors": ""}, "in the place of .*/mhr"),
        ({"out": "other.safetensors", "keep_safetensors": ""}, "in the place of .*/other.safe"),
        (
            {"out": "native", "layout": "components", "keep_safetensors": "native"},
            "in the place of .*/native",
        ),
        (
            {"out": "native", "layout": "components", "keep_safetensors": "native/kept"},
            "in the place of .*/native",
        ),
        (
            {"out": "mhr", "layout": "components", "keep_safetensors": ""},
            "in the place of .*/mhr",
        ),
        ({"keep_safetensors": "absent/kept"}, "doesn't exist"),
        ({"keep_safetensors": "a file"}, "exists already: it is a file"),
        ({"layout": "components", "precision": "source"}, "F32 only"),
        ({"out": "absent/body.gguf"}, "doesn't exist"),
        ({"out": "absent/native", "layout": "components"}, "doesn't exist"),
    ],
)
def test_outputs_that_cannot_be_are_refused_before_anything_is_read(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path)
    (tmp_path / "a file").touch()
    options: dict[str, Any] = {"out": "body.gguf", "checkpoint": "not looked at", **changes}
    for key in options.keys() & {"out", "manifest", "checkpoint", "keep_safetensors"}:
        options[key] = tmp_path / options[key] if options[key] != "." else Path()

    with pytest.raises(Sam3dError, match=words):
        convert_body(request(options.pop("out"), **options))

    assert names_in(tmp_path) == ["a file", "elsewhere", "linked"]


def test_safetensors_are_kept_in_any_folder_apart(out: Path) -> None:
    """Beside the outputs, above them, and in a folder that a link leads to."""
    out.with_name("link").symlink_to(out.parent)
    for kept in (out.parent, out.parent.parent, out.with_name("kept"), out.with_name("link") / "x"):
        request(out, keep_safetensors=kept).check("body")
        request(out.with_name("native"), layout="components", keep_safetensors=kept).check("body")


# Before anything is read


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a legacy file is read or hashed, in the sandbox or outside."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("it is read")

    for name in ("run_worker", "hash_file"):
        monkeypatch.setattr(extract_module, name, fail)


HTML = b"<!DOCTYPE html><html><body>Sign in"


@pytest.mark.usefixtures("unread")
def test_what_the_sources_are_is_looked_at_first(out: Path, tmp_path: Path) -> None:
    page = written(tmp_path / "page", HTML)
    absent = tmp_path / "absent.yaml"

    for changes in ({"checkpoint": page, "config": absent}, {"mhr": page, "config": absent}):
        assert "page: is an HTML page" in str(refused(out, **changes))
    assert "absent.yaml" in str(refused(out, config=absent, mhr=ASSET))
    with pytest.raises(InputError, match="is an HTML page"):
        convert_mhr(request(out, checkpoint=page, mhr=None))
    for allow in (True, False):
        with pytest.raises(InputError, match="is an HTML page"):
            extract_to_folder("body", page, tmp_path / "x", allow_unpinned=allow)


@pytest.mark.usefixtures("unread")
def test_a_size_that_is_not_pinned_is_refused_at_once(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        pin(monkeypatch, {"body.config": CONFIG, "body.checkpoint": CHECKPOINT})
        for changes in ({"mhr": ASSET}, {"checkpoint": CHECKPOINT, "mhr": ASSET}):
            said = str(refused(out, **changes, allow_unpinned=False))
            assert "this is not a pinned mhr.asset" in said
    finally:
        load_sources.cache_clear()
        load_known_answers.cache_clear()


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("extracted", [False, True])
def test_components_without_an_asset_are_refused_at_once(
    single: Release, out: Path, extracted: bool
) -> None:
    source = {"checkpoint": None, "extraction": single.extraction} if extracted else {}

    error = refused(out.with_name("native"), layout="components", **source)

    assert "name the MHR asset that they need" in str(error)


@pytest.mark.usefixtures("unread")
def test_an_extraction_that_is_none_is_refused_at_once(
    single: Release, out: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    named = {
        CONFIG: "this is no folder; expected a folder with extraction.json",
        tmp_path / "absent": "this is no folder",
        tmp_path / "empty": "the file cannot be opened: No such file",
        single.mhr_extraction: "this is an extraction of mhr",
    }
    for path, words in named.items():
        said = str(refused(out, checkpoint=None, extraction=path, mhr=ASSET))
        assert words in said
        assert "Errno" not in said
    assert "this is an extraction of body" in str(refused(out, mhr=single.extraction))


def test_names_of_sources_that_are_not_printable_are_recorded_so_that_they_can_be_read(
    out: Path, tmp_path: Path
) -> None:
    name = os.fsdecode(b"model\xff\n\x1b[2J.ckpt")
    checkpoint = written(tmp_path / name, CHECKPOINT.read_bytes())

    convert_body(request(out, checkpoint=checkpoint, config=CONFIG, mhr=None))

    (source, _) = read_json(out.parent / "manifest.json")["sources"]
    assert source["name"].isprintable()
    assert source["name"].startswith("model")


def test_neither_a_checkpoint_nor_an_extraction(out: Path) -> None:
    assert "--checkpoint PATH or --extraction DIR" in str(refused(out, checkpoint=None))
