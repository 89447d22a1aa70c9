"""Verification of releases: what a manifest and its files say of each other, and their origin."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forged_gguf import Gguf, fit_manifest, forge
from tiny_release import (
    ASSET,
    CHECKPOINT,
    CONFIG,
    Json,
    Release,
    asset_of,
    flip,
    from_extraction,
    read_json,
    request,
    sha256,
    sources_of,
    write_json,
)

from sam3d_gguf.convert import products as products_module
from sam3d_gguf.convert import verify as verify_module
from sam3d_gguf.convert.gguf_format import string
from sam3d_gguf.convert.release import convert_body, convert_mhr
from sam3d_gguf.convert.verify import Verification, verify
from sam3d_gguf.extractors.byte_source import ByteSource
from sam3d_gguf.extractors.litter import scratch_folder
from sam3d_gguf.extractors.progress import Quiet
from sam3d_gguf.manifests.sources import load_sources
from sam3d_gguf.schemas.documents import validate
from sam3d_gguf.schemas.errors import InputError
from sam3d_gguf.schemas.strict_json import dumps, loads

COMPONENTS = ("body-dinov3-backbone.gguf", "body-pose-branch.gguf", "mhr-lod1.gguf")


def problems_in(result: Verification) -> list[str]:
    """All that is wrong, with the file's name before it."""
    found = [f"{file.name}: {line}" for file in result.files for line in file.problems]
    found += result.problems
    assert result.is_good == (not found)
    assert (result.verdict == "FAILED") == bool(found)
    return found


def problems_of(*paths: Path, **options: Any) -> list[str]:
    """All that verification finds."""
    return problems_in(verify(paths, **options))


@pytest.fixture
def copy(single: Release, tmp_path: Path) -> Release:
    """A copy of the release in layout single."""
    return single.copy(tmp_path)


@pytest.fixture
def native(components: Release, tmp_path: Path) -> Release:
    """A copy of the release in layout components."""
    return components.copy(tmp_path)


@pytest.fixture(scope="session")
def other_mhr(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MHR file of the same form and other names, from another asset."""
    folder = tmp_path_factory.mktemp("other")
    names = [f"other_{number}" for number in range(249)]
    asset = folder / "other.pt"
    place = "character_torch.parameter_transform.parameter_names"
    asset.write_bytes(asset_of(sources_of(ASSET), {place: names}))
    convert_mhr(request(folder / "mhr.gguf", checkpoint=asset, mhr=None))
    return folder / "mhr.gguf"


# Files and companions


def test_files_alone_and_together_are_good(single: Release) -> None:
    for paths in (
        [single.body],
        [single.mhr],
        [single.body, single.mhr],
        [single.mhr, single.body],
    ):
        result = verify(paths)
        assert problems_in(result) == []
        assert result.verdict.startswith("consistent; origin not proven")


def test_components_alone_and_together_are_good(components: Release) -> None:
    paths = [components.folder / name for name in COMPONENTS]
    assert problems_of(*paths) == []
    for path in paths:
        assert problems_of(path) == []


def test_a_missing_file_is_found(copy: Release) -> None:
    copy.mhr.unlink()

    found = problems_of(copy.manifest)
    assert any("mhr.gguf" in line and "No such file" in line for line in found)
    assert any("its companion mhr is not in the release" in line for line in found)


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "folder"])
def test_a_file_that_is_no_regular_file_is_found(copy: Release, tmp_path: Path, kind: str) -> None:
    copy.mhr.rename(tmp_path / "elsewhere")
    words = "a symbolic link"
    match kind:
        case "link":
            copy.mhr.symlink_to(tmp_path / "elsewhere")
        case "dangling link":
            copy.mhr.symlink_to(tmp_path / "nowhere")
        case "pipe":
            os.mkfifo(copy.mhr)
            words = "a named pipe"
        case _:
            copy.mhr.mkdir()
            words = "a folder"

    assert any(words in line for line in problems_of(copy.manifest))


def test_the_companion_of_another_release_is_found(copy: Release, other_mhr: Path) -> None:
    shutil.copy(other_mhr, copy.mhr)
    assert problems_of(copy.mhr) == []

    assert any(
        "its companion mhr is another one" in line for line in problems_of(copy.body, copy.mhr)
    )
    assert any("the manifest says" in line for line in problems_of(copy.manifest))
    fit_manifest(copy)
    found = problems_of(copy.manifest)
    assert any("its companion mhr is another one" in line for line in found)
    assert any("SHA-256 of the mhr.asset of mhr is" in line for line in found)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_each_file_of_a_companions_role_is_compared(
    single: Release, other_mhr: Path, tmp_path: Path, order: tuple[int, ...]
) -> None:
    other = Path(shutil.copy(other_mhr, tmp_path / "other.gguf"))
    paths = (single.body, single.mhr, other)

    (found,) = problems_of(*(paths[number] for number in order))

    assert "its companion mhr is another one than other.gguf" in found


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_each_mhr_component_is_compared(
    native: Release, tmp_path: Path, order: tuple[int, ...]
) -> None:
    other = Path(shutil.copy(native.folder / COMPONENTS[2], tmp_path / "other.gguf"))
    forge(
        other, lambda parts: parts.metadata.update({"sam3d.source.asset_sha256": string("0" * 64)})
    )
    paths = (native.folder / COMPONENTS[1], native.folder / COMPONENTS[2], other)

    found = problems_of(*(paths[number] for number in order))

    (line,) = (line for line in found if "it needs the MHR asset" in line)
    assert "other.gguf is of 000" in line


def test_a_companion_with_equal_tensors_and_other_names_is_found(
    copy: Release, other_mhr: Path
) -> None:
    parts, other = Gguf.read(copy.mhr), Gguf.read(other_mhr)
    assert parts.metadata["sam3d.content_sha256"] == other.metadata["sam3d.content_sha256"]
    shutil.copy(other_mhr, copy.mhr)

    assert any("another one" in line for line in problems_of(copy.body, copy.mhr))


def test_a_component_for_another_asset_is_found(native: Release) -> None:
    key = "sam3d.required_mhr_sha256"
    path = native.folder / COMPONENTS[1]
    forge(path, lambda parts: parts.metadata.update({key: string("0" * 64)}))
    fit_manifest(native)

    found = problems_of(native.manifest)
    assert any("it needs the MHR asset 000" in line for line in found)
    assert any(
        "it needs the MHR asset 000" in line
        for line in problems_of(path, native.folder / COMPONENTS[2])
    )


def test_an_incomplete_release_that_says_it_is_complete_is_found(
    single: Release, tmp_path: Path
) -> None:
    convert_body(from_extraction(single.extraction, tmp_path / "body.gguf", mhr=None))
    manifest = tmp_path / "manifest.json"
    document = read_json(manifest)
    assert document["release"]["status"] == "incomplete"
    document["release"]["status"] = "complete"
    write_json(manifest, document)

    found = problems_of(manifest)
    assert any("expected body, mhr" in line for line in found)
    assert any("its companions say otherwise" in line for line in found)


# The manifest

# Nothing but the manifest tells these; its own SHA-256 covers them.
FREE = {"/tool/version", "/sources/name"}
# Nothing in the files tells these, but the legacy files do.
FREE_OF_FILES = FREE | {
    "/safetensors/bytes",
    "/safetensors/tensors",
    "/left_out",
    "/left_out/role",
    "/left_out/what",
    "/left_out/reason",
}


Place = tuple[Any, Any, str]


def places_in(value: Any, path: str = "") -> Iterator[Place]:
    """Every place of a document: container, key, and its path without indices."""
    named: bool = isinstance(value, dict)
    keys: list[Any] = list(value) if named else list(range(len(value)))  # pyright: ignore[reportUnknownArgumentType]
    for key in keys:
        here = f"{path}/{key}" if named else path
        item: Any = value[key]
        if isinstance(item, dict | list):
            yield from places_in(item, here)
        yield value, key, here


PAIRS = (
    ("pinned", "unpinned"),
    ("complete", "incomplete"),
    ("equal", "none"),
    ("source", "f32"),
    ("single", "components"),
    ("body", "mhr"),
    ("conforms", "not applicable"),
    ("F32", "I32"),
)
TURNED: dict[str, str] = {
    **dict(PAIRS),
    **{second: first for first, second in PAIRS},
    "does not conform: other dimensions": "conforms",
    "BF16": "F32",
}


def other(value: Any) -> Any:
    """Another value that could stand in the same place."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str():
            return "0" * 64 if len(value) == 64 else TURNED.get(value, value + "x")
        case [*items]:
            return items[:-1] if items else ["x"]
        case _:
            return {}


def choose(places: list[Place]) -> list[Place]:
    """Some places of each path, all of them where there are few."""
    by_path: dict[str, list[Place]] = {}
    for place in places:
        by_path.setdefault(place[2], []).append(place)
    chooser = random.Random(1)
    return [p for found in by_path.values() for p in chooser.sample(found, min(len(found), 4))]


@pytest.mark.parametrize("with_sources", [False, True])
@pytest.mark.parametrize("layout", ["single", "components"])
def test_every_edit_of_the_manifest_is_found_but_of_what_nothing_tells(
    layout: str,
    with_sources: bool,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release: Release = request.getfixturevalue(layout)
    sources = [CHECKPOINT, ASSET] if with_sources else []
    document = release.document()
    unnoticed: set[str] = set()

    with contextlib.ExitStack() as stack:
        manifest = remembered(release, sources, monkeypatch, stack)
        assert problems_in(manifest(document)) == []
        places = list(places_in(document))
        if with_sources:
            # What is found without them is found with them.
            places = [place for place in places if place[2] in FREE_OF_FILES | {"/notes"}]
        for container, key, path in choose(places):
            before = container[key]
            container[key] = other(before)
            if not problems_in(manifest(document)):
                unnoticed.add(path)
            container[key] = before

    free = FREE if with_sources else FREE_OF_FILES
    if layout == "components":
        # They don't name the sizes of their sources, and an archive could have names like numbers.
        free = free if with_sources else free | {"/sources/bytes", "/notes"}
    assert unnoticed <= free, unnoticed - free


def remembered(
    release: Release,
    sources: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    stack: contextlib.ExitStack,
) -> Callable[[Json], Verification]:
    """Verify the release by other manifests, reading its files and sources only once."""
    products: dict[Path, Any] = {}

    def products_from_source(model: Any, path: Path, *_: Any, **options: Any) -> Any:
        if path not in products:
            scratch = stack.enter_context(scratch_folder(release.folder.parent))
            found = products_module.products_from_source(model, path, scratch, **options)
            products[path] = stack.enter_context(found)
        return contextlib.nullcontext(products[path])

    monkeypatch.setattr(verify_module, "products_from_source", products_from_source)
    reports = {file.name: file for file in verify([release.manifest], sources=sources).files}

    def verify_file(file: Any, _: object) -> Any:
        report = reports[file.path.name]
        return dataclasses.replace(report, problems=list(report.problems))

    def run(document: Json) -> Verification:
        path = release.folder / "edited.json"
        try:
            write_json(path, document)
            return verify([path], sources=sources)
        finally:
            path.unlink()

    monkeypatch.setattr(verify_module, "verify_file", verify_file)
    return run


@pytest.mark.parametrize(
    "text", ["\x1b[2J", "a\nerror: another line", "\u202e", "the archive has no joint_names", "x"]
)
def test_texts_that_no_conversion_writes_are_found(copy: Release, text: str) -> None:
    changes: list[Callable[[Json], object]] = [
        lambda d: d["notes"].append(text),
        lambda d: d["left_out"].append({"role": "body.checkpoint", "what": "a", "reason": text}),
        lambda d: d["left_out"].append({"role": "body.checkpoint", "what": text, "reason": "a"}),
    ]
    for change in changes if not text.isprintable() else changes[:1]:
        document = copy.document()
        change(document)
        write_json(copy.folder / "edited.json", document)
        found = problems_of(copy.folder / "edited.json")
        assert found
        assert all(line.isprintable() for line in found)


def test_a_note_is_needed_once(copy: Release) -> None:
    (note,) = copy.document()["notes"]
    for notes, words in (([], "does not note"), ([note, note], "its files do not give")):
        document = {**copy.document(), "notes": notes}
        write_json(copy.folder / "edited.json", document)
        (line,) = problems_of(copy.folder / "edited.json")
        assert words in line


# The words of problems


def test_problems_are_lines_in_terms_of_the_file(copy: Release) -> None:
    """No escaped line ends, no names of the legacy file's tensors, no file named twice."""

    def shorten(parts: Gguf) -> None:
        del parts.tensors["mesh.texcoord_faces"]

    def index(parts: Gguf) -> None:
        parts.values("mesh.texcoord_faces")[0, 0] = 10**6

    for change in (shorten, index):
        before = copy.mhr.read_bytes()
        forge(copy.mhr, change)
        fit_manifest(copy)
        found = problems_of(copy.manifest)
        copy.mhr.write_bytes(before)
        assert found
        for line in found:
            assert "\n" not in line
            assert str(copy.folder) not in line
            assert "character_torch" not in line
            assert "None" not in line


def test_entries_more_and_less_are_found(copy: Release) -> None:
    changes: dict[str, Callable[[Json], object]] = {
        "the manifest names a file twice": lambda d: d["files"].append(dict(d["files"][0])),
        "expected body, mhr": lambda d: d["files"].pop(),
        "expected body.checkpoint, body.config, mhr.asset": lambda d: d["sources"].pop(),
        "sources body.checkpoint, body.checkpoint": lambda d: d["sources"].append(
            dict(d["sources"][0])
        ),
        "safetensors": lambda d: d["safetensors"].pop(),
        "the manifest names a tensor twice": lambda d: d["files"][0]["tensors"].append(
            dict(d["files"][0]["tensors"][0])
        ),
        "in the manifest only": lambda d: d["files"][0]["tensors"].append(
            {**d["files"][0]["tensors"][0], "name": "more"}
        ),
        "in the file only": lambda d: d["files"][0]["tensors"].pop(),
        "companions are not": lambda d: d["files"][1]["companions"].clear(),
    }
    for words, change in changes.items():
        document = copy.document()
        change(document)
        write_json(copy.folder / "edited.json", document)
        assert any(words in line for line in problems_of(copy.folder / "edited.json")), words


@pytest.mark.parametrize(
    "name",
    [
        "../release/body.gguf",
        "./body.gguf",
        "/etc/passwd",
        "a/body.gguf",
        "..",
        ".",
        "",
        "body\0.gguf",
        "body.gguf\n",
        "bödy.gguf",
    ],
)
def test_names_that_lead_elsewhere_are_refused(copy: Release, name: str) -> None:
    document = copy.document()
    document["files"][1]["name"] = name
    write_json(copy.manifest, document)

    (found,) = problems_of(copy.manifest)
    assert "/files/1/name" in found


def test_a_manifest_that_is_none_is_a_problem(copy: Release) -> None:
    text = copy.manifest.read_text()
    for data, words in {
        "": "JSON",
        "[]": "manifest",
        text[:-10]: "JSON",
        text + "{}": "JSON",
        text.replace('"schema_version": 1', '"schema_version": 2'): "/schema_version",
        text.replace('"schema_version": 1', '"schema_version": NaN'): "NaN",
        text.replace('"notes"', '"signed": true, "notes"'): "signed",
        text.replace('"notes"', '"notes": [], "notes"'): "twice",
        "\ufeff" + text: "byte order mark",
        text.replace("body.gguf", "body\\ud800.gguf", 1): "surrogate",
    }.items():
        copy.manifest.write_text(data)
        result = verify([copy.manifest])
        assert not result.is_good
        assert result.manifest is None
        assert words in problems_in(result)[0], words


def test_a_manifest_that_cannot_be_opened_is_an_error(copy: Release, tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(copy.manifest)
    (tmp_path / "folder.json").mkdir()
    for name in ("link.json", "folder.json", "absent.json"):
        with pytest.raises(InputError):
            verify([tmp_path / name])


def test_a_manifest_that_is_too_large_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    with path.open("wb") as file:
        file.truncate((64 << 20) + 1)

    with pytest.raises(InputError, match="too large"):
        verify([path])


def test_paths_that_do_not_go_together_are_an_error(single: Release) -> None:
    with pytest.raises(InputError, match="0 paths"):
        verify([])
    with pytest.raises(InputError, match="1 of them manifests"):
        verify([single.manifest, single.body])


def test_a_proof_of_one_file_is_none_of_another_of_its_name(
    single: Release, other_mhr: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    namesake = Path(shutil.copy(other_mhr, tmp_path / "other" / single.mhr.name))

    for paths in ([single.mhr, namesake], [single.mhr, single.mhr]):
        with pytest.raises(InputError, match="two of the files have this name"):
            verify(paths, sources=[ASSET])
    renamed = namesake.rename(tmp_path / "2.gguf")
    result = verify([single.mhr, renamed], sources=[ASSET])
    assert result.proven == {"mhr.gguf"}
    assert "origin of 2.gguf not proven" in result.verdict


def test_pinned_is_not_taken_from_the_manifest(copy: Release) -> None:
    def change(document: Json) -> None:
        document["release"]["origin"] = "pinned"
        for source in document["sources"]:
            source["origin"] = "pinned"

    fit_manifest(copy, change)

    found = problems_of(copy.manifest)
    for role in ("body.checkpoint", "body.config", "mhr.asset"):
        assert f"the source {role} is not pinned by this tool" in found


def test_a_pinned_hash_for_another_role_does_not_count(copy: Release) -> None:
    config = load_sources().with_role("body.config")[0]

    def change(document: Json) -> None:
        source = document["sources"][0]
        source |= {"sha256": config.sha256, "bytes": config.bytes, "origin": "pinned"}

    fit_manifest(copy, change)

    found = problems_of(copy.manifest)
    assert "the source body.checkpoint is not pinned by this tool" in found


def test_a_tiny_release_cannot_claim_the_official_checkpoint(copy: Release) -> None:
    pin = load_sources().with_role("body.checkpoint")[0]

    def change(document: Json) -> None:
        source = document["sources"][0]
        source |= {"sha256": pin.sha256, "bytes": pin.bytes, "origin": "pinned"}

    fit_manifest(copy, change)

    found = problems_of(copy.manifest)
    assert any("backbone.safetensors does not have the published hash" in line for line in found)
    assert any("SHA-256 of the body.checkpoint of body is" in line for line in found)


# Origin


def test_the_expected_hash_of_the_manifest_proves_all(single: Release) -> None:
    result = verify([single.manifest], expect_sha256=[sha256(single.manifest).upper()])

    assert problems_in(result) == []
    assert result.verdict == "verified (complete, unpinned)"
    assert result.origin == ["the expected SHA-256 of manifest.json"]


def test_another_expected_hash_fails(single: Release) -> None:
    good = sha256(single.manifest)
    for expected in (["0" * 64], [good, "0" * 64], [sha256(single.body)]):
        found = problems_of(single.manifest, expect_sha256=expected)
        assert any("nothing has the expected SHA-256" in line for line in found)


@pytest.mark.parametrize("value", ["", "abc", "0" * 63, "0" * 65, "g" * 64, "0" * 64 + "\n"])
def test_an_expected_hash_that_is_none_is_an_error(single: Release, value: str) -> None:
    with pytest.raises(InputError, match="no SHA-256"):
        verify([single.manifest], expect_sha256=[value])


def test_each_file_needs_its_expected_hash(single: Release) -> None:
    body, mhr = sha256(single.body), sha256(single.mhr)

    both = verify([single.body, single.mhr], expect_sha256=[mhr, body])
    assert both.verdict == "verified"
    assert any(
        "not every file" in line
        for line in problems_of(single.body, single.mhr, expect_sha256=[body])
    )
    assert any(
        "nothing has" in line for line in problems_of(single.body, expect_sha256=[body, mhr])
    )


def test_a_good_hash_does_not_help_a_bad_release(copy: Release) -> None:
    flip(copy.mhr, copy.mhr.stat().st_size - 40)

    result = verify([copy.manifest], expect_sha256=[sha256(copy.manifest)])
    assert problems_in(result)


def test_the_sources_prove_every_tensor(single: Release) -> None:
    result = verify([single.manifest], sources=[CHECKPOINT, ASSET])

    assert problems_in(result) == []
    assert result.verdict == "verified (complete, unpinned)"
    assert result.origin == [
        "every tensor derived again from model.ckpt (unpinned): body.gguf",
        "every tensor derived again from mhr_model.stub.pt (unpinned): mhr.gguf",
    ]


def test_the_sources_prove_components(components: Release) -> None:
    result = verify([components.manifest], sources=[ASSET, CHECKPOINT])

    assert problems_in(result) == []
    assert result.verdict == "verified (complete, unpinned)"


def test_the_sources_prove_a_file_at_f32(single_f32: Release) -> None:
    assert verify([single_f32.body], sources=[CHECKPOINT]).verdict == "verified"


class Unread(Quiet):
    """Fails when work begins."""

    def stage(self, title: str, total_bytes: int) -> None:
        raise AssertionError(title)


def test_a_source_that_is_given_twice_is_refused_before_anything_is_read(
    single: Release, tmp_path: Path
) -> None:
    first = Path(shutil.copy(ASSET, tmp_path / "first.pt"))
    link = tmp_path / "link.pt"
    link.hardlink_to(first)

    for second in (first, link, tmp_path / ".." / tmp_path.name / "first.pt"):
        with pytest.raises(InputError, match="given twice") as caught:
            verify([single.manifest], sources=[first, CHECKPOINT, second], progress=Unread())
        assert caught.value.where == str(second)


def test_one_source_of_two_leaves_the_other_unproven(single: Release) -> None:
    result = verify([single.manifest], sources=[CHECKPOINT])

    assert problems_in(result) == []
    assert result.verdict == (
        "consistent (complete, unpinned); origin of mhr.gguf not proven: "
        "give --expect-sha256 or --source"
    )


def test_a_source_that_no_file_comes_from_fails(single: Release, tmp_path: Path) -> None:
    other_checkpoint = tmp_path / "other.ckpt"
    data = CHECKPOINT.read_bytes()
    root = read_json(single.extraction / "extraction.json")["archive"]["root"].encode()
    other_checkpoint.write_bytes(data.replace(root + b"/", root.upper() + b"/"))

    for paths, source in (
        ([single.manifest], other_checkpoint),
        ([single.mhr], CHECKPOINT),
        ([single.body], ASSET),
    ):
        found = problems_of(*paths, sources=[source])
        assert any(f"no file here comes from {source}" in line for line in found)


@pytest.mark.parametrize(
    ("path", "words"),
    [(CONFIG, "of no kind"), (Path("/dev/zero"), "character device"), (Path("absent"), "opened")],
)
def test_a_source_that_is_none_is_an_error(single: Release, path: Path, words: str) -> None:
    with pytest.raises(InputError, match=words):
        verify([single.manifest], sources=[path])


def test_changed_tensors_whose_hashes_all_fit_differ_from_the_source(copy: Release) -> None:
    def change(parts: Gguf) -> None:
        parts.values("init_pose.weight")[0, 3] += 0.5
        parts.values("backbone.encoder.norm.weight")[2] ^= 1

    forge(copy.body, change)
    fit_manifest(copy)
    assert problems_of(copy.manifest) == []

    found = problems_of(copy.manifest, sources=[CHECKPOINT])
    for name in ("init_pose.weight", "backbone.encoder.norm.weight"):
        assert any(f"the tensor {name} has SHA-256" in line for line in found)
    assert len(found) == 2


def test_changed_components_differ_from_the_source(native: Release) -> None:
    forge(native.folder / COMPONENTS[0], lambda parts: parts.values("cls_token").fill(1))
    forge(native.folder / COMPONENTS[2], lambda parts: parts.values("identity.base").fill(1))
    fit_manifest(native)
    assert problems_of(native.manifest) == []

    found = problems_of(native.manifest, sources=[CHECKPOINT, ASSET])
    for name in ("cls_token", "identity.base"):
        assert any(f"the tensor {name} has SHA-256" in line for line in found)


def test_changed_names_differ_from_the_source(copy: Release) -> None:
    def change(parts: Gguf) -> None:
        value = parts.metadata["sam3d.mhr.joint_names"]
        assert isinstance(value.value, tuple)
        parts.metadata["sam3d.mhr.joint_names"] = type(value)(
            value.type, value.value[::-1], value.item_type
        )

    forge(copy.mhr, change)
    assert problems_of(copy.mhr) == []

    (found,) = problems_of(copy.mhr, sources=[ASSET])
    assert "the names or prefix sizes are not those of the source" in found


# The report, and reading


@pytest.mark.parametrize("broken", [False, True])
def test_the_report_meets_its_schema(copy: Release, broken: bool) -> None:
    if broken:
        flip(copy.body, copy.body.stat().st_size - 1)
        copy.mhr.unlink()

    for paths in ([copy.manifest], [copy.body]):
        document = loads(dumps(verify(paths).to_document()), where="report")
        validate(document, "verification", where="report")


def test_every_byte_is_read_once_but_headers(
    single: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[tuple[str, int]] = []
    pread, pread_into = ByteSource.pread, ByteSource.pread_into

    def counting_pread(self: ByteSource, offset: int, size: int) -> bytes:
        reads.append((self.name, size))
        return pread(self, offset, size)

    def counting_pread_into(self: ByteSource, offset: int, target: Any) -> None:
        reads.append((self.name, len(target)))
        pread_into(self, offset, target)

    monkeypatch.setattr(ByteSource, "pread", counting_pread)
    monkeypatch.setattr(ByteSource, "pread_into", counting_pread_into)

    assert verify([single.manifest]).is_good

    for path in (single.body, single.mhr):
        total = sum(size for name, size in reads if name == str(path))
        size = path.stat().st_size
        # The header is read in chunks of 1 MiB at most, and the padding of up to 31 bytes.
        assert size <= total <= size + (1 << 20) + 32 * 500
