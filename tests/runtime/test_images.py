"""Photos are read as OpenCV's imread would, and hostile files are refused."""

from __future__ import annotations

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from sam3d_gguf.runtime.images import read_mask, read_photo
from sam3d_gguf.schemas.errors import InputError

COLORS = np.array(
    [[[255, 0, 0], [0, 255, 0], [0, 0, 255]], [[9, 8, 7], [1, 2, 3], [4, 5, 6]]], "u1"
)


def save(path: Path, array: NDArray[np.generic], format_: str = "PNG", **options: object) -> Path:
    Image.fromarray(array).save(path, format_, **options)
    return path


@pytest.mark.parametrize("format_", ["PNG", "WEBP"])
def test_lossless_rgb(tmp_path: Path, format_: str) -> None:
    options = {"lossless": True} if format_ == "WEBP" else {}
    found = read_photo(save(tmp_path / "photo", COLORS, format_, **options))
    np.testing.assert_array_equal(found, COLORS)


def test_jpeg_with_orientation(tmp_path: Path) -> None:
    block = np.kron(COLORS[:1, :2], np.ones((16, 16, 1), "u1"))
    exif = Image.Exif()
    exif[0x0112] = 6
    found = read_photo(save(tmp_path / "p.jpg", block, "JPEG", exif=exif, quality=95))
    assert found.shape == (32, 16, 3)
    assert found[4, 8, 0] > 200
    assert found[28, 8, 1] > 200


def test_alpha_is_dropped_not_blended(tmp_path: Path) -> None:
    alpha = np.concatenate([COLORS, np.zeros((2, 3, 1), "u1")], axis=2)
    np.testing.assert_array_equal(read_photo(save(tmp_path / "a.png", alpha)), COLORS)


def png_16_bit(channels: int, samples: NDArray[np.uint16]) -> bytes:
    """A 16-bit PNG made by hand, since Pillow cannot write RGB ones."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)

    height, width = samples.shape[:2]
    color = {1: 0, 3: 2, 4: 6}[channels]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in samples)
    header = struct.pack(">IIBBBBB", width, height, 16, color, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_16_bit_samples_keep_their_high_byte(tmp_path: Path, channels: int) -> None:
    steps = np.arange(0, 65536, 65536 // (4 * channels), dtype=np.uint16)
    samples = steps[: 4 * channels].reshape(2, 2, channels)
    (tmp_path / "deep.png").write_bytes(png_16_bit(channels, samples))
    high = (samples >> 8).astype(np.uint8)
    wanted = np.repeat(high, 3, axis=2) if channels == 1 else high[..., :3]
    np.testing.assert_array_equal(read_photo(tmp_path / "deep.png"), wanted)


def test_grey_and_palette_become_rgb(tmp_path: Path) -> None:
    grey = np.array([[10, 200]], "u1")
    np.testing.assert_array_equal(read_photo(save(tmp_path / "g.png", grey))[0, 1], [200] * 3)
    Image.fromarray(COLORS).quantize(8).save(tmp_path / "p.png")
    np.testing.assert_array_equal(read_photo(tmp_path / "p.png")[0, 0], COLORS[0, 0])


def test_huge_images_are_refused_before_they_are_decoded(tmp_path: Path) -> None:
    stream = io.BytesIO(png_16_bit(3, np.zeros((1, 1, 3), np.uint16)))
    data = bytearray(stream.getvalue())
    data[16:24] = struct.pack(">II", 30000, 30000)
    data[29:33] = struct.pack(">I", zlib.crc32(bytes(data[12:29])))
    (tmp_path / "bomb.png").write_bytes(bytes(data))
    with pytest.raises(InputError, match=r"30000|bomb"):
        read_photo(tmp_path / "bomb.png")


@pytest.mark.parametrize("content", [b"", b"GIF89a", b"<html>", b"\x89PNG\r\n\x1a\n"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(InputError):
        read_photo(tmp_path / "x")
    with pytest.raises(InputError):
        read_photo(tmp_path / "absent")


def test_damaged_images_are_refused(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for format_ in ("PNG", "JPEG", "WEBP"):
        path = save(tmp_path / f"cut.{format_}", noise, format_)
        path.write_bytes(path.read_bytes()[:-600])
        with pytest.raises(InputError):
            read_photo(path)


def test_masks_become_zero_and_one_and_must_fit(tmp_path: Path) -> None:
    path = save(tmp_path / "m.png", np.array([[0, 127, 128], [255, 1, 200]], "u1"))
    np.testing.assert_array_equal(read_mask(path, COLORS), [[0, 0, 1], [1, 0, 1]])
    with pytest.raises(InputError, match="3x2"):
        read_mask(path, COLORS[:1])


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    save(tmp_path / "photo.png", COLORS)
    (tmp_path / "link.png").symlink_to(tmp_path / "photo.png")
    for name in ("pipe.png", "link.png", "."):
        with pytest.raises(InputError, match="expected a regular file"):
            read_photo(tmp_path / name)


@pytest.mark.parametrize("error", [struct.error, zlib.error, IndexError, TypeError, SyntaxError])
def test_whatever_pillow_raises_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    path = save(tmp_path / "photo.png", COLORS)

    def fail(*_: object, **__: object) -> None:
        raise error("odd")

    monkeypatch.setattr(Image.Image, "convert", fail)
    with pytest.raises(InputError, match="the image is damaged: odd"):
        read_photo(path)


def test_the_first_frame_of_an_animation(tmp_path: Path) -> None:
    first, second = Image.fromarray(COLORS), Image.fromarray(COLORS[::-1].copy())
    first.save(tmp_path / "a.webp", save_all=True, append_images=[second], lossless=True)
    np.testing.assert_array_equal(read_photo(tmp_path / "a.webp"), COLORS)


def test_cmyk_becomes_rgb(tmp_path: Path) -> None:
    block = np.kron(np.array([[[200, 30, 40]]], "u1"), np.ones((16, 16, 1), "u1"))
    Image.fromarray(block).convert("CMYK").save(tmp_path / "c.jpg", quality=95)
    np.testing.assert_allclose(read_photo(tmp_path / "c.jpg")[8, 8], [200, 30, 40], atol=6)
