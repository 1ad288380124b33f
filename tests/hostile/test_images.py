"""Images that lie about what they are, are too large, or are no images, and tar files made to do harm."""

from __future__ import annotations

import os
import struct
import tarfile
import zlib
from io import BytesIO
from typing import TYPE_CHECKING

import pytest
from PIL import EpsImagePlugin, Image
from tests.support.image_rows import read_images
from tests.support.pictures import encoded, picture, picture_folder, picture_tar, put

from lamina.errors import DataError
from lamina.tasks.image_classification import LazyImage

if TYPE_CHECKING:
    from pathlib import Path

EPS = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 10 10
%%EndComments
0 setgray 0 0 10 10 rectfill
showpage
%%EOF
"""
TAKEN = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
OTHERS = ("EPS", "ICO", "PCX", "TGA", "DDS", "IM", "SGI", "SPIDER", "ICNS", "JPEG2000", "AVIF", "DIB", "QOI")


def png(width: int, height: int, data: bytes = b"") -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    packed = chunk(b"IDAT", zlib.compress(data))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + packed + chunk(b"IEND", b"")


def bmp(width: int, height: int) -> bytes:
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + header


def gif(width: int, height: int) -> bytes:
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x44\x01\x00"
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6) + frame + b"\x3b"


def test_postscript_is_not_run(monkeypatch: pytest.MonkeyPatch):
    ran: list[object] = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *args, **_: ran.append(args) or Image.new("RGB", (1, 1)))
    with pytest.raises(DataError, match=r"a\.png cannot be decoded \(no image format known: .*JPEG.*\)"):
        LazyImage("a.png", data=EPS).open()
    assert ran == []


@pytest.mark.parametrize("kind", OTHERS)
def test_formats_that_are_not_taken(kind: str):
    mode = "F" if kind == "SPIDER" else "RGB"
    try:
        data = encoded(picture(mode=mode, size=(16, 16)), kind)
    except (OSError, KeyError):
        pytest.skip(f"Pillow writes no {kind} here")
    with pytest.raises(DataError, match=r"a\.png cannot be decoded \(no image format known"):
        LazyImage("a.png", data=data).open()


@pytest.mark.parametrize("kind", TAKEN)
def test_formats_that_are_taken_may_have_any_name(kind: str):
    assert LazyImage("a.txt", data=encoded(picture(), kind)).open().size == (12, 10)


@pytest.mark.parametrize("size", [(8193, 8192), (10_000, 10_000), (60_000, 60_000), (2**31 - 1, 2**31 - 1)])
@pytest.mark.parametrize("make", [png, bmp, gif])
def test_too_many_pixels(make, size: tuple[int, int], recwarn: pytest.WarningsRecorder):
    width, height = size
    if make is gif and width > 65_535:
        return
    with pytest.raises(DataError, match=r"a has (\d+ x \d+ pixels|too many pixels); at most 67,108,864 are read"):
        LazyImage("a", data=make(width, height)).open()


def test_as_many_pixels_as_are_allowed_are_read():
    assert LazyImage("a", data=encoded(Image.new("1", (8192, 8192)))).open().size == (8192, 8192)


@pytest.mark.parametrize("size", [(0, 0), (0, 5), (5, 0)])
@pytest.mark.parametrize("make", [png, bmp, gif])
def test_no_pixels(make, size: tuple[int, int]):
    with pytest.raises(DataError, match=r"a (cannot be decoded|has 0 x|has 5 x 0)"):
        LazyImage("a", data=make(*size)).open()


@pytest.mark.parametrize("kind", TAKEN)
def test_cut_off_anywhere(kind: str):
    """It is a sentence, or an image whose end is not needed (a GIF's closing byte)."""
    data = encoded(picture(size=(40, 40)), kind)
    refused = 0
    for end in range(0, len(data), max(1, len(data) // 40)):
        try:
            LazyImage("a", data=data[:end]).open()
        except DataError as error:
            refused += str(error).startswith("images: a cannot be decoded") or "is empty" in str(error)
    assert refused >= 35


def test_what_is_no_file(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.png")
    for path in (tmp_path / "pipe.png", tmp_path, "/dev/zero"):
        with pytest.raises(DataError, match=r"cannot be read \(it is not a file\)"):
            LazyImage(str(path), str(path)).open()


def test_a_file_of_more_bytes_than_any_image_has(tmp_path: Path):
    path = put(tmp_path, "a.png", png(4, 4))
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # without a block on disk
    with pytest.raises(DataError, match=r"a\.png has more than 1,073,741,824 bytes"):
        LazyImage(str(path), str(path)).open()
    with pytest.raises(DataError, match=r"a\.png has more than 1,073,741,824 bytes"):
        LazyImage(str(path), str(path), size=1 << 39).open()


# Tar files


def header(name: bytes, size: int, kind: bytes) -> bytes:
    field = b"%011o\0" % size if size < 8**11 else b"\x80" + size.to_bytes(11, "big")
    block = bytearray(name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + field + b"00000000000\0")
    block += b"        " + kind + bytes(355)
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K", b"S", b"0"])
@pytest.mark.parametrize("size", [8**11 - 1, 10**15, 2**62, 2**63, 2**80])
def test_a_tar_whose_member_says_it_is_huge(tmp_path: Path, kind: bytes, size: int):
    path = put(tmp_path, "a.tar", header(b"train/cat/a.png", size, kind) + bytes(10_240))
    with pytest.raises(DataError, match=r"a\.tar is (not a whole tar file|cut off or damaged)"):
        read_images(path)


@pytest.mark.parametrize("kind", [b"x", b"L"])
def test_a_tar_of_headers_of_headers(tmp_path: Path, kind: bytes):
    """Each is read by a call within that for the one before."""
    content = b"20 comment=0123456\n\n".ljust(512, b"\0")
    path = put(tmp_path, "a.tar", (header(b"a", 19, kind) + content) * 5_000 + bytes(10_240))
    with pytest.raises(DataError, match=r"a\.tar "):
        read_images(path)


def test_members_that_are_left_out_are_counted_in_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = picture_folder(tmp_path / "p", rows=1)
    (folder / "cat" / "again.png").symlink_to(folder / "cat" / "0000.png")
    put(folder, "cat/notes.txt", "none")
    path = picture_tar(tmp_path / "a.tar", folder)
    with tarfile.open(path, "a") as archive:
        member = archive.getmember("cat/0000.png")
        archive.addfile(member, BytesIO(bytes(member.size)))
    for source, more in ((folder, ""), (path, "1 files that come again later, ")):
        caplog.clear()
        assert len(read_images(source)) == 3
        (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        left = f"{more}1 links and special files, which are not followed, 1 other files"
        assert said == f"images: {source} has 3 images of 3 classes; ignored: {left}"
    caplog.clear()
    read_images(picture_folder(tmp_path / "whole", rows=1))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
