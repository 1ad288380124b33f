from __future__ import annotations

import copy
import logging
import os
import pickle
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image
from tests.support.image_rows import dataset_images, image_split, read_images
from tests.support.pictures import encoded, picture, picture_folder, picture_tar, put

from lamina.errors import DataError
from lamina.tasks.image_classification import LazyImage


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image)


def opened(path: Path) -> Image.Image:
    return LazyImage(str(path), str(path)).open()


# ---- finding


def test_folder_gives_images_and_the_names_of_their_folders(tmp_path: Path):
    table = read_images(picture_folder(tmp_path))
    assert [Path(one.path or "").relative_to(tmp_path).as_posix() for one in table.column("image")] == [
        f"{label}/000{row}.png" for label in ("bird", "cat", "frog") for row in (0, 1)
    ]
    assert table.column("label") == ["bird", "bird", "cat", "cat", "frog", "frog"]
    assert (list(table.rows), table.path) == ([1, 2, 3, 4, 5, 6], str(tmp_path))


@pytest.mark.parametrize("under", ["", "train", "a/b"])
@pytest.mark.parametrize("backwards", [False, True])
def test_tar_gives_what_the_folder_gives(tmp_path: Path, under: str, backwards: bool):
    folder = picture_folder(tmp_path / "folder", under=under)
    tar = picture_tar(tmp_path / "images.tar", folder, backwards=backwards)
    expected, table = read_images(folder), read_images(str(tar))
    assert table.column("label") == expected.column("label")
    for one, other in zip(table.column("image"), expected.column("image"), strict=True):
        assert one.path == str(tar)
        assert (pixels(one.open()) == pixels(other.open())).all()


def test_order_does_not_depend_on_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    expected = [list(column) for column in read_images(picture_folder(tmp_path)).columns.values()]
    walk = os.walk

    def backwards(root: Path, **options: Any):
        return [(here, folders, files[::-1]) for here, folders, files in walk(root, **options)][::-1]

    monkeypatch.setattr(os, "walk", backwards)
    assert [list(column) for column in read_images(tmp_path).columns.values()] == expected


def test_images_are_told_by_their_endings_in_any_case(tmp_path: Path):
    for number, ending in enumerate(("jpg", "JPEG", "Png", "webp", "gif", "bmp", "tiff", "ppm")):
        put(tmp_path, f"cat/{number}.{ending}", b"")
    assert len(read_images(tmp_path)) == 8


def test_other_files_and_links_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    outside = picture_folder(tmp_path / "outside", classes=("dog",))
    folder = picture_folder(tmp_path / "folder")
    put(folder, "readme.txt", "x")
    put(folder, "cat/._0000.png", "x")
    put(folder, ".checkpoints/0000.png", "x")
    (folder / "cat/link.png").symlink_to(outside / "dog/0000.png")
    (folder / "dog").symlink_to(outside / "dog")
    with caplog.at_level(logging.INFO, logger="lamina"):
        table = read_images(folder)
    assert set(table.column("label")) == {"bird", "cat", "frog"}
    assert caplog.messages == [
        f"images: {folder} has 6 images of 3 classes; "
        "ignored: 2 links and special files, which are not followed, 3 other files"
    ]


def test_tar_leaves_out_links_and_paths_that_lead_out(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    data = encoded(picture())
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("/cat/0.png", "./cat/1.png", "../cat/2.png", "cat/../../3.png"):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, BytesIO(data))
        for name, kind in (("cat/4.png", tarfile.SYMTYPE), ("cat/5.png", tarfile.LNKTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
    with caplog.at_level(logging.INFO, logger="lamina"):
        table = read_images(tmp_path / "a.tar")
    assert [one.name for one in table.column("image")] == [f"{tmp_path}/a.tar/cat/{number}.png" for number in (0, 1)]
    assert "ignored: 2 links and special files, which are not followed, 2 other files" in caplog.text


def test_of_two_members_of_one_name_the_last_counts(tmp_path: Path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for shade in (0, 200):
            data = encoded(picture(shade))
            member = tarfile.TarInfo("cat/0.png")
            member.size = len(data)
            archive.addfile(member, BytesIO(data))
    (one,) = read_images(tmp_path / "a.tar").column("image")
    assert (pixels(one.open()) == pixels(picture(200))).all()


def test_nothing_there(tmp_path: Path):
    with pytest.raises(DataError, match=r"images: .*none is not there; images are read from a folder or a tar"):
        read_images(tmp_path / "none")


def test_no_images(tmp_path: Path):
    put(tmp_path, "cat/0.txt", "x")
    with pytest.raises(DataError, match=r"has no images \(ignored: 1 other files\); they end in \.bmp, .* Put the"):
        read_images(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty has no images \(ignored: nothing\)"):
        read_images(tmp_path / "empty")


def test_no_class_folders(tmp_path: Path):
    picture_folder(tmp_path)
    put(tmp_path, "0000.png", "x")
    with pytest.raises(
        DataError, match=r"images: .* has 0000\.png outside all class folders; the class .* Put each class"
    ):
        read_images(tmp_path)


def test_one_class_in_two_folders(tmp_path: Path):
    picture_folder(tmp_path, under="train")
    picture_folder(tmp_path, under="test")
    with pytest.raises(DataError, match=r"has the class folder 'bird' twice, as test/bird and train/bird; a class has"):
        read_images(tmp_path)


def test_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    picture_folder(tmp_path)
    scan = os.scandir

    def refuse(path: str):
        if Path(path).name == "cat":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"images: .*cat cannot be listed \(Permission denied\); all class folders"):
        read_images(tmp_path)


@pytest.mark.parametrize(("mode", "packed"), [("w:gz", "gzip"), ("w:bz2", "bzip2"), ("w:xz", "xz")])
def test_compressed_tar(tmp_path: Path, mode: str, packed: str):
    tar = picture_tar(tmp_path / "a.tar", picture_folder(tmp_path / "folder"), mode=mode)
    with pytest.raises(DataError, match=rf"a\.tar is compressed with {packed}; images are read in place.* Unpack it"):
        read_images(tar)


def test_tar_of_a_long_name_that_is_cut_off(tmp_path: Path):
    folder = picture_folder(tmp_path / "folder", classes=("c" * 120,), rows=1)
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        archive.add(folder / ("c" * 120), arcname="c" * 120)
    found = read_images(tmp_path / "a.tar").column("image")[0]
    with pytest.raises(DataError, match=r"b\.tar is not a whole tar file \(.*header\)"):
        read_images(put(tmp_path, "b.tar", (tmp_path / "a.tar").read_bytes()[: found.offset - 100]))


def test_file_that_is_no_tar(tmp_path: Path):
    with pytest.raises(DataError, match=r"cat\.csv is not a whole tar file \(.*\); images are read from a folder or"):
        read_images(put(tmp_path, "cat.csv", "image,label\n" * 100))


def test_tar_that_is_cut_off(tmp_path: Path):
    tar = picture_tar(tmp_path / "a.tar", picture_folder(tmp_path / "folder"))
    data, last = tar.read_bytes(), read_images(tar).column("image")[-1]
    with pytest.raises(DataError, match=r"b\.tar is not a whole tar file \(unexpected end of data\)"):
        read_images(put(tmp_path, "b.tar", data[: last.offset + 10]))
    for name, end in (("c.tar", last.offset - 512), ("d.tar", last.offset - 100)):  # before and in the last header
        with pytest.raises(DataError, match=rf"{name} is cut off or damaged after {last.offset - 512} bytes; a tar"):
            read_images(put(tmp_path, name, data[:end]))


def test_tar_with_a_damaged_header_in_the_middle(tmp_path: Path):
    tar = picture_tar(tmp_path / "a.tar", picture_folder(tmp_path / "folder"))
    third = read_images(tar).column("image")[2]
    data = bytearray(tar.read_bytes())
    data[third.offset - 512 : third.offset] = b"x" * 512
    with pytest.raises(DataError, match=rf"b\.tar is cut off or damaged after {third.offset - 512} bytes"):
        read_images(put(tmp_path, "b.tar", bytes(data)))


# ---- opening


def test_picture_compares_and_pickles(tmp_path: Path):
    folder = picture_folder(tmp_path)
    (one, *_), (two, other, *_) = (read_images(folder).column("image") for _ in range(2))
    assert pickle.loads(pickle.dumps(one)) == one == two != other
    assert len({one, two, other}) == 2


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "LA"])
def test_image_of_any_mode_becomes_rgb(tmp_path: Path, mode: str):
    image = picture(mode=mode)
    found = opened(put(tmp_path, "a.png", encoded(image)))
    assert found.mode == "RGB"
    assert (pixels(found) == pixels(image.convert("RGB"))).all()


def test_cmyk_becomes_rgb(tmp_path: Path):
    found = opened(put(tmp_path, "a.jpg", encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG")))
    assert found.mode == "RGB"
    assert found.getpixel((3, 3)) == pytest.approx((255, 0, 0), abs=3)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L"])
def test_transparent_pixels_become_white_whatever_colour_they_hide(tmp_path: Path, mode: str):
    levels: dict[str, Any] = {"RGBA": (10, 20, 30, 0), "LA": (10, 0), "L": 7}
    image = picture(mode="P", size=(4, 4)) if mode == "P" else Image.new(mode, (4, 4), levels[mode])
    file = BytesIO()
    image.save(file, "PNG", **{"P": {"transparency": bytes(256)}, "L": {"transparency": 7}}.get(mode, {}))
    assert pixels(opened(put(tmp_path, "a.png", file.getvalue()))).tolist() == [[[255] * 3] * 4] * 4
    half = put(tmp_path, "half.png", encoded(Image.new("RGBA", (1, 1), (0, 100, 200, 128))))
    assert pixels(opened(half))[0, 0].tolist() == pytest.approx([127, 177, 227], abs=1)


def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path):
    values = np.array([[0, 256, 32768, 65535]], dtype=np.uint16)
    found = opened(put(tmp_path, "a.png", encoded(Image.fromarray(values))))
    assert pixels(found)[0].tolist() == [[0] * 3, [1] * 3, [128] * 3, [255] * 3]


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_of_32_bits_are_refused(tmp_path: Path, mode: str):
    with pytest.raises(DataError, match=rf"a\.tiff has pixels of 32 bits \(mode {mode}\); .* Save it with 8 or 16"):
        opened(put(tmp_path, "a.tiff", encoded(picture(mode="L").convert(mode), "TIFF")))


def test_photo_is_turned_upright(tmp_path: Path):
    image = picture(size=(12, 6))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it a quarter to the right
    file = BytesIO()
    image.save(file, "PNG", exif=exif)
    found = opened(put(tmp_path, "a.png", file.getvalue()))
    assert (pixels(found) == np.rot90(pixels(image), -1)).all()


def test_damaged_image_is_named(tmp_path: Path):
    data = encoded(picture(size=(64, 64)), "JPEG")
    with pytest.raises(
        DataError, match=r"cut\.jpg cannot be decoded \(image file is truncated.*\); every row .* remove its row"
    ):
        opened(put(tmp_path, "cut.jpg", data[: len(data) // 2]))
    with pytest.raises(
        DataError, match=r"text\.jpg cannot be decoded \(no image format known: JPEG, PNG, .*\)"
    ) as info:
        opened(put(tmp_path, "text.jpg", "no image"))
    assert info.value.path == str(tmp_path / "text.jpg")


def test_damaged_member_of_a_tar_is_named(tmp_path: Path):
    folder = picture_folder(tmp_path / "folder", under="train")
    put(folder, "train/cat/0001.png", "no image")
    found = read_images(picture_tar(tmp_path / "a.tar", folder)).column("image")
    with pytest.raises(DataError, match=r"images: .*a\.tar/train/cat/0001\.png cannot be decoded"):
        found[3].open()


def test_image_that_is_gone(tmp_path: Path):
    found = read_images(picture_folder(tmp_path)).column("image")[0]
    Path(found.path or "").unlink()
    with pytest.raises(
        DataError, match=r"0000\.png cannot be read \(No such file or directory\); images are read again at each use"
    ):
        found.open()


def test_tar_that_became_shorter(tmp_path: Path):
    tar = picture_tar(tmp_path / "a.tar", picture_folder(tmp_path / "folder"))
    found = read_images(tar).column("image")[0]
    os.truncate(tar, found.offset + 10)
    with pytest.raises(DataError, match=rf"bird/0000\.png is cut off after 10 of {found.size} bytes; the tar file"):
        found.open()


# ---- columns of data sets


def rows_of(cells: list[object]) -> datasets.Dataset:
    features = datasets.Features({"img": datasets.Image(), "label": datasets.Value("string")})
    return datasets.Dataset.from_dict({"img": cells, "label": ["x"] * len(cells)}, features=features)


def images_of(rows: datasets.Dataset) -> list[LazyImage]:
    return list(dataset_images(rows, "img"))


def test_column_of_images(tmp_path: Path):
    file = put(tmp_path, "a.png", encoded(picture(20, mode="L")))
    first = {"bytes": encoded(picture(200)), "path": None}
    found = images_of(rows_of([first, str(file)]))
    assert [one.name for one in found] == ["row 1 of column 'img'", f"row 2 of column 'img' ({file})"]
    assert (pixels(found[0].open()) == pixels(picture(200))).all()
    assert (pixels(found[1].open()) == pixels(picture(20, mode="L").convert("RGB"))).all()
    assert (pixels(pickle.loads(pickle.dumps(found[0])).open()) == pixels(picture(200))).all()


def test_column_is_not_decoded_before_it_is_opened(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object):
        raise AssertionError("decoded")

    rows = rows_of([{"bytes": b"no image", "path": None}, {"bytes": encoded(picture()), "path": None}])
    monkeypatch.setattr(datasets.Image, "decode_example", refuse)
    found = images_of(rows.with_format("numpy"))
    assert found[1].open().mode == "RGB"
    with pytest.raises(DataError, match=r"row 1 of column 'img' cannot be decoded"):
        found[0].open()


def test_row_without_an_image():
    with pytest.raises(DataError, match=r"row 1 of column 'img' is empty; every row") as info:
        images_of(rows_of([None]))[0].open()
    assert info.value.path == "row 1 of column 'img'"


@pytest.mark.parametrize(
    ("column", "came"), [("image", "has no column 'image'"), ("label", "has no images in column 'label'")]
)
def test_column_that_holds_no_images(column: str, came: str):
    with pytest.raises(DataError, match=rf"images: the data set {came}; its columns of images are: img\."):
        dataset_images(rows_of([None]), column)


def test_a_column_may_have_any_name():
    rows = rows_of([{"bytes": encoded(picture(200)), "path": None}]).rename_column("img", "text")
    assert [image.name for image in dataset_images(rows, "text")] == ["row 1 of column 'text'"]


def test_columns_survive_pickling(tmp_path: Path):
    """Loader workers are handed them."""
    hub = dataset_images(rows_of([{"bytes": encoded(picture()), "path": None}]), "img")
    folder: Any = read_images(picture_folder(tmp_path)).columns["image"]
    for column in (hub, folder):
        split = image_split(column, [0] * len(column))
        assert pickle.loads(pickle.dumps(split)) == split == copy.deepcopy(split)
        assert list(split.texts) == list(column)
