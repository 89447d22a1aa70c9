"""The second opinion of the `gguf` package: any difference to our own reader is a problem."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from tiny_release import Release

from sam3d_gguf.convert.cross_read import cross_read
from sam3d_gguf.convert.gguf_reader import read_gguf
from sam3d_gguf.convert.verify import verify
from sam3d_gguf.extractors.files import open_source
from sam3d_gguf.schemas.errors import InputError


def read_again(path: Path) -> None:
    """Our reading, then theirs."""
    with open_source(path) as file:
        cross_read(file, read_gguf(file.source))


@pytest.mark.parametrize("layout", ["single", "components"])
def test_both_read_the_same(layout: str, request: pytest.FixtureRequest) -> None:
    release: Release = request.getfixturevalue(layout)

    for path in release.folder.glob("*.gguf"):
        read_again(path)


def drop_key(reader: Any) -> None:
    del reader.fields["general.name"]


def drop_tensor(reader: Any) -> None:
    reader.tensors.pop()


def rename_tensor(reader: Any) -> None:
    reader.tensors[0] = reader.tensors[0]._replace(name="other")


def move_tensor(reader: Any) -> None:
    tensor = reader.tensors[3]
    reader.tensors[3] = tensor._replace(data_offset=tensor.data_offset + 32)


def grow_tensor(reader: Any) -> None:
    reader.tensors[3] = reader.tensors[3]._replace(n_bytes=reader.tensors[3].n_bytes + 1)


def retype_tensor(reader: Any) -> None:
    reader.tensors[3] = reader.tensors[3]._replace(tensor_type=gguf.GGMLQuantizationType.F16)


def reshape_tensor(reader: Any) -> None:
    tensor = next(t for t in reader.tensors if len(set(t.shape.tolist())) > 1)
    at = reader.tensors.index(tensor)
    reader.tensors[at] = tensor._replace(shape=tensor.shape[::-1])


def exchange_keys(reader: Any) -> None:
    fields = reader.fields
    fields["general.name"], fields["general.type"] = fields["general.type"], fields["general.name"]


def retype_key(reader: Any) -> None:
    reader.fields["sam3d.schema_version"].types[0] = gguf.GGUFValueType.INT32


def shorten_array(reader: Any) -> None:
    reader.fields["sam3d.tensor_sha256"].data.pop()


def fail(_: Any) -> None:
    raise ValueError("\x1b[31mno\x1b[0m" * 1000)


DIFFERENCES: dict[str, tuple[Callable[[Any], None], str]] = {
    "a key less": (drop_key, r"reads general\.name differently"),
    "a tensor less": (drop_tensor, "differently"),
    "another name": (rename_tensor, "differently"),
    "another place": (move_tensor, "differently"),
    "another size": (grow_tensor, "differently"),
    "another type": (retype_tensor, "differently"),
    "another shape": (reshape_tensor, "differently"),
    "another value": (exchange_keys, r"reads general\.(name|type) differently"),
    "another type of value": (retype_key, r"reads sam3d\.schema_version differently"),
    "a shorter array": (shorten_array, r"reads sam3d\.tensor_sha256 differently"),
    "an exception": (fail, "can't read the file: ValueError"),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_difference_is_a_problem(
    single: Release, monkeypatch: pytest.MonkeyPatch, difference: str
) -> None:
    change, words = DIFFERENCES[difference]
    original: Any = gguf.GGUFReader

    def different(path: str) -> Any:
        reader = original(path)
        change(reader)
        return reader

    monkeypatch.setattr(gguf, "GGUFReader", different)

    with pytest.raises(InputError, match=words) as caught:
        read_again(single.mhr)
    assert len(str(caught.value)) < 1000
    (report,) = verify([single.mhr]).files
    assert report.problems == [str(caught.value).removeprefix(f"{single.mhr}: ")]


def test_the_file_that_was_opened_is_the_one_that_is_read(single: Release, tmp_path: Path) -> None:
    path = tmp_path / "mhr.gguf"
    shutil.copy(single.mhr, path)
    with open_source(path) as file:
        header = read_gguf(file.source)
        path.unlink()
        path.write_bytes(b"another file")
        cross_read(file, header)
