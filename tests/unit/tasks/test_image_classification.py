"""Images as pixels: found, brought to one size, augmented, scored and answered."""

# pyright: reportArgumentType=false

from __future__ import annotations

import os
import pickle
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from tests.support.image_rows import image_column, image_split, read_images
from tests.support.pictures import CLASSES, encoded, picture, picture_folder, picture_tar, put
from transformers import BitImageProcessor, CLIPProcessor, ConvNextImageProcessor, ViTImageProcessor

from lamina.errors import ConfigError, DataError
from lamina.tasks import kind_of
from lamina.tasks.base import EncodeOptions
from lamina.tasks.image_classification import SCALE, ImageInputs, LazyImage, Target, middle_box, random_box, target_of
from lamina.tasks.split import Split
from lamina.tasks.task import Task

IMAGE = "image_classification"
KIND = kind_of(IMAGE)
SIZES = ((40, 30), (24, 24), (30, 50))


# From files


def test_pictures_from_folders_and_tars(tmp_path: Path):
    folder = picture_folder(tmp_path / "pets", rows=10)
    task = Task.from_files(IMAGE, train=folder, test=picture_tar(tmp_path / "pets.tar", folder))
    assert (task.kind, task.problem_type, task.labels, task.name) == (IMAGE, "classification", CLASSES, "pets")
    assert (task.metric, task.metrics) == ("accuracy", ("accuracy", "f1"))
    assert Counter(task.split("train").labels) == {0: 9, 1: 9, 2: 9}
    assert Counter(task.split("validation").labels) == {0: 1, 1: 1, 2: 1}
    assert task.split("test").labels == (0,) * 10 + (1,) * 10 + (2,) * 10
    assert task.split("test").texts[0].open().size == (12, 10)
    drawn = task.subsample(per_class=2, stratified=True, seed=1)
    assert Counter(drawn.split("train").labels) == {0: 2, 1: 2, 2: 2}
    assert drawn == task.subsample(per_class=2, stratified=True, seed=1)


def test_the_classes_are_those_of_train(tmp_path: Path):
    train = picture_folder(tmp_path / "train", classes=("bird", "frog"))
    test = picture_folder(tmp_path / "test", classes=("bird", "cat"))
    with pytest.raises(DataError, match="row 3 has label 'cat'; the labels are: bird, frog"):
        Task.from_files(IMAGE, train=train, test=test)
    task = Task.from_files(IMAGE, train=train, test=test, labels=("frog", "cat", "bird"))
    assert set(task.split("test").labels) == {2, 1}
    with pytest.raises(DataError, match="neither a train split nor labels were given"):
        Task.from_files(IMAGE, test=test)


def test_class_ids_of_images_need_an_order(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    put(tmp_path, "a.csv", "image,label\na.png,frog\nb.png,bird\n")
    put(tmp_path, "b.csv", "image,label\na.png,0\nb.png,1\n")
    train, other = tmp_path / "a.csv", tmp_path / "b.csv"
    with pytest.raises(
        DataError, match=r"b\.csv row 2 has label '0'; the labels are: bird, frog\. If it is a class id"
    ):
        Task.from_files(IMAGE, train=train, test=other)
    assert tuple(Task.from_files(IMAGE, train=train, test=other, labels=("frog", "bird")).split("test").labels) == (
        0,
        1,
    )
    assert "class ids" not in caplog.text
    Task.from_files(IMAGE, test=other, labels=("bird", "frog"))
    assert "class ids in column 'label' are read as 0 = bird, 1 = frog." in caplog.text


def test_images_and_labels_are_two_columns(tmp_path: Path):
    put(tmp_path, "a.csv", "image,label\na.png,x\nb.png,y\n")
    with pytest.raises(ConfigError, match="task: text and label are both 'label'; a model would learn to copy"):
        Task.from_files(KIND, train=tmp_path / "a.csv", inputs="label")
    put(tmp_path, "b.csv", "path,label\na.png,x\nb.png,y\n")
    with pytest.raises(DataError, match=r"no column 'image'.*Name the column of the images with `inputs`"):
        Task.from_files(KIND, train=tmp_path / "b.csv")


def test_an_array_may_have_an_axis_for_its_one_channel():
    grey = np.arange(6, dtype=np.uint8).reshape(2, 3, 1)
    image = LazyImage.of("x", grey).open()
    assert (np.asarray(image) == grey).all()


def test_pictures_have_no_texts(tmp_path: Path):
    task = Task.from_files(IMAGE, train=picture_folder(tmp_path / "pets"))
    with pytest.raises(
        ConfigError, match="task pets: a task of kind image_classification has no texts; masked_lm needs some"
    ):
        task.masked_lm()


@pytest.mark.parametrize("column", [{}, {"text": "img"}])
def test_pictures_in_parquet(tmp_path: Path, column: dict[str, str]):
    cells = [{"bytes": encoded(picture(shade)), "path": None} for shade in (0, 250)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({column.get("text", "image"): cells, "label": ["dark", "light"]}), path)
    split = Task.from_files(IMAGE, train=path, test=path, **column).split("test")
    assert split.labels == (0, 1)
    assert split.texts[1].open().getpixel((0, 0))[0] > 200
    with pytest.raises(DataError, match="no column 'kind'"):
        Task.from_files(IMAGE, train=path, label="kind", **column)


# From images to pixels


def split_of(images: list[LazyImage], labels: list[int]) -> Split:
    return image_split(image_column(images), labels)


def vit(height: int = 16, width: int = 16, **options: Any):
    return ViTImageProcessor(size={"height": height, "width": width}, **options)


PROCESSORS = {
    "height and width": (lambda: vit(16, 20), Target(16, 20, fixed=True)),
    "edge, then crop": (
        lambda: BitImageProcessor(size={"shortest_edge": 20}, crop_size={"height": 16, "width": 12}),
        Target(16, 12, fixed=True),
    ),
    "edge with its own crop": (lambda: ConvNextImageProcessor(size={"shortest_edge": 16}), Target(16, 16, fixed=True)),
    "edge without crop": (
        lambda: BitImageProcessor(size={"shortest_edge": 16}, do_center_crop=False),
        Target(16, 16, fixed=False),
    ),
}


@pytest.fixture
def split(tmp_path: Path) -> Split:
    """Images of unequal shapes."""
    files = [put(tmp_path, f"{i}.png", encoded(picture(60 * i + 40, size=size))) for i, size in enumerate(SIZES)]
    return split_of([LazyImage(file.name, str(file)) for file in files], [0, 1, 2])


@pytest.mark.parametrize("name", PROCESSORS)
def test_target_is_what_the_processor_makes(name: str):
    make, target = PROCESSORS[name]
    assert target_of(make()) == target


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("augment", [False, True])
def test_batch_has_one_size(split: Split, name: str, augment: bool):
    make, target = PROCESSORS[name]
    found = ImageInputs(split, make(), augment=augment).batch([2, 0, 1])
    assert found["pixel_values"].shape == (3, 3, target.height, target.width)
    assert found["pixel_values"].dtype == torch.float32


def test_a_processor_that_fails_on_images(split: Split, monkeypatch: pytest.MonkeyPatch):
    images = ImageInputs(split, vit())

    def fails(*_: object, **__: object) -> None:
        raise ValueError("no room\nat all")

    monkeypatch.setattr(images, "_processor", fails)
    with pytest.raises(DataError, match=r"images: function fails on 2 images \(no room\); check its settings"):
        images.batch([0, 1])


@pytest.mark.parametrize("name", ["rows.CSV", "rows.Jsonl", "rows.PARQUET"])
def test_endings_of_tables_have_no_case(tmp_path: Path, name: str):
    picture(0).save(tmp_path / "0.png")
    table = pa.table({"image": [str(tmp_path / "0.png")] * 2, "label": ["a", "b"]})
    if name.endswith("CSV"):
        table.to_pandas().to_csv(tmp_path / name, index=False)
    elif name.endswith("Jsonl"):
        table.to_pandas().to_json(tmp_path / name, orient="records", lines=True)
    else:
        cells = [{"bytes": (tmp_path / "0.png").read_bytes(), "path": "0.png"}] * 2
        pq.write_table(pa.table({"image": cells, "label": ["a", "b"]}), tmp_path / name)
    task = Task.from_files("image_classification", train=tmp_path / name, validation=tmp_path / name)
    assert task.labels == ("a", "b")


def test_rows_are_all_of_one_length(split: Split):
    pictures = ImageInputs(split, vit())
    assert (pictures.lengths, KIND.truncated(pictures)) == ([1, 1, 1], 0)
    assert pictures.uncacheable == "the inputs are images; only texts are cached"
    assert pictures.digest == ImageInputs(split, vit()).digest != ImageInputs(split.select_rows([1, 0]), vit()).digest


@pytest.mark.parametrize("name", [name for name, (_, target) in PROCESSORS.items() if target.fixed])
def test_evaluation_is_the_processor_alone(split: Split, name: str):
    processor = PROCESSORS[name][0]()
    images = [image.open() for image in split.texts]
    expected = processor(images, return_tensors="pt")["pixel_values"]
    assert torch.equal(ImageInputs(split, processor).batch([0, 1, 2])["pixel_values"], expected)


def test_middle_is_taken_where_the_processor_keeps_the_aspect(split: Split):
    processor = PROCESSORS["edge without crop"][0]()
    middle = split.texts[0].open().crop((5, 0, 35, 30))
    expected = processor([middle], return_tensors="pt")["pixel_values"]
    assert torch.equal(ImageInputs(split, processor).batch([0])["pixel_values"], expected)


def test_rows_do_not_depend_on_their_batch(split: Split):
    pictures = ImageInputs(split, vit(), augment=True, seed=3)
    together = pictures.batch([0, 1, 2], epoch=4)["pixel_values"]
    alone = [pictures.batch([row], epoch=4)["pixel_values"] for row in (2, 1, 0)]
    assert torch.equal(together, torch.cat(alone[::-1]))


def test_augmentation_follows_seed_epoch_and_row_alone(split: Split):
    same = split.select_rows([0, 0])
    pictures = ImageInputs(same, vit(), augment=True, seed=3)
    first = pictures.batch([0], epoch=1)["pixel_values"]
    random.seed(99)
    torch.manual_seed(99)
    np.random.seed(99)
    again = pickle.loads(pickle.dumps(ImageInputs(same, vit(), augment=True, seed=3)))
    assert torch.equal(again.batch([0], epoch=1)["pixel_values"], first)
    others = [
        pictures.batch([1], epoch=1),
        pictures.batch([0], epoch=2),
        ImageInputs(same, vit(), augment=True, seed=4).batch([0], epoch=1),
    ]
    assert not any(torch.equal(other["pixel_values"], first) for other in others)


def test_half_of_the_images_are_mirrored():
    image = Image.new("RGB", (16, 16))
    image.paste((255, 255, 255), (8, 0, 16, 16))
    split = split_of([LazyImage("a.png", data=encoded(image))] * 200, [0] * 200)
    values = ImageInputs(split, vit(), augment=True, scale=(1.0, 1.0)).batch(range(200))["pixel_values"]
    left = values[..., :4].mean((1, 2, 3))
    right = values[..., -4:].mean((1, 2, 3))
    assert 70 < int((left > right).sum()) < 130
    assert ((left > 0.9) | (right > 0.9)).all()


def test_the_crop_is_resized_as_the_processor_does(split: Split):
    for resample in (Image.Resampling.NEAREST, Image.Resampling.BICUBIC):
        processor = vit(20, 20, resample=resample)
        values = ImageInputs(split, processor, augment=True, scale=(1.0, 1.0)).batch([1])["pixel_values"]
        image = split.texts[1].open()  # square: its largest crop of area 1 is the whole
        rows = [image, image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)]
        expected = processor(rows, return_tensors="pt")["pixel_values"]
        assert any(torch.equal(values[0], one) for one in expected)


def test_larger_smallest_share_leaves_more_of_the_image():
    ramp = np.repeat(np.linspace(0, 255, 64)[:, None], 64, axis=1).astype(np.uint8)
    split = split_of([LazyImage("a.png", data=encoded(Image.fromarray(ramp)))] * 50, [0] * 50)

    def spread(scale: tuple[float, float]) -> float:
        values = ImageInputs(split, vit(), augment=True, scale=scale).batch(range(50))["pixel_values"]
        return float((values.amax((1, 2, 3)) - values.amin((1, 2, 3))).mean())

    assert spread((0.8, 1.0)) > 1.4 * spread((0.08, 0.2))


@pytest.mark.parametrize("size", [(100, 80), (33, 31), (7, 5), (1, 1), (500, 20), (3, 200)])
def test_boxes_lie_in_the_image(size: tuple[int, int]):
    rng = random.Random(0)
    for _ in range(200):
        left, top, right, bottom = random_box(size, rng, scale=SCALE)
        assert 0 <= left < right <= size[0]
        assert 0 <= top < bottom <= size[1]


def test_boxes_have_the_areas_and_shapes_asked_for():
    rng = random.Random(0)
    boxes = [random_box((1000, 1000), rng, scale=(0.2, 0.5)) for _ in range(500)]
    areas = [(right - left) * (bottom - top) / 1e6 for left, top, right, bottom in boxes]
    shapes = [(right - left) / (bottom - top) for left, top, right, bottom in boxes]
    assert (min(areas), max(areas)) == pytest.approx((0.2, 0.5), abs=0.01)
    assert (min(shapes), max(shapes)) == pytest.approx((0.75, 1.333), abs=0.02)
    assert sum(shape > 1 for shape in shapes) == pytest.approx(250, abs=50)


def test_middle_box():
    assert middle_box((40, 30), (1.0, 1.0)) == (5, 0, 35, 30)
    assert middle_box((30, 40), (1.0, 1.0)) == (0, 5, 30, 35)
    assert middle_box((40, 30), (0.75, 4 / 3)) == (0, 0, 40, 30)
    assert middle_box((1, 900), (0.75, 4 / 3)) == (0, 449, 1, 450)


def test_processor_that_holds_an_image_processor(split: Split, minilm):
    holder = CLIPProcessor(image_processor=vit(), tokenizer=minilm)
    expected = ImageInputs(split, vit()).batch([0])["pixel_values"]
    assert torch.equal(ImageInputs(split, holder).batch([0])["pixel_values"], expected)


def test_processor_that_is_none(split: Split, minilm):
    with pytest.raises(
        ConfigError, match=r"images: the processor is a \w+; images need the model's image processor. Give the one that"
    ):
        ImageInputs(split, minilm)


def test_processor_that_does_not_resize(split: Split):
    with pytest.raises(ConfigError, match=r"makes pixel_values of shape \(1, 3, 64, 64\) of an image of 64 x 64, and"):
        ImageInputs(split, vit(do_resize=False))


def test_processor_that_fails(split: Split):
    with pytest.raises(
        ConfigError, match=r"ViTImageProcessor\w* fails on an RGB image of 64 x 64 \(.+\); check its settings"
    ):
        ImageInputs(split, vit(image_mean=[0.5], image_std=[0.5, 0.5]))


@pytest.mark.parametrize("scale", [(0.0, 1.0), (0.5, 0.2), (0.5, 1.5)])
def test_scale_that_cannot_be(split: Split, scale: tuple[float, float]):
    with pytest.raises(
        ConfigError, match=rf"images: scale is {scale[0]} to {scale[1]}; it must be two shares of the image"
    ):
        ImageInputs(split, vit(), scale=scale)


@pytest.mark.parametrize("augment", [False, True])
def test_unreadable_image_is_named(tmp_path: Path, augment: bool):
    folder = picture_folder(tmp_path / "folder")
    put(folder, "cat/0001.png", "no image")
    table = read_images(picture_tar(tmp_path / "a.tar", folder))
    pictures = ImageInputs(image_split(table.columns["image"], [0, 0, 1, 1, 2, 2]), vit(), augment=augment)
    with pytest.raises(DataError, match=r"a\.tar/cat/0001\.png cannot be decoded"):
        pictures.batch([0, 3])


def test_pixels_that_are_not_rescaled_are_floats_too(split: Split):
    values = ImageInputs(split, vit(do_rescale=False, do_normalize=False)).batch([0])["pixel_values"]
    assert values.dtype == torch.float32
    assert values.max() > 1


# From pixels to scores and answers


def test_images_are_scored_and_answered(split: Split):
    task = Task(kind_of(IMAGE), "classification", CLASSES, "accuracy", ("accuracy", "f1"), {"test": split}, "it")
    inputs = KIND.encode(split, vit(), EncodeOptions(part="test", max_length=0))
    targets = KIND.targets(task, split, inputs)
    assert targets is not None
    assert targets.tensor([2, 0]).tolist() == [2, 0]
    results = KIND.results(task, split, inputs)
    results.add([2, 0], torch.eye(3)[[2, 1]])
    results.add([1], torch.eye(3)[[1]])
    assert results.scores(("accuracy",)) == {"accuracy": pytest.approx(2 / 3)}
    assert [row["recall"] for row in results.per_class()[:3]] == [0.0, 1.0, 1.0]
    assert [answer["label"] for answer in results.predictions()] == ["cat", "cat", "frog"]
    shapes = [SimpleNamespace(logits=torch.zeros(shape)) for shape in ((2, 3), (2, 4), (2, 5, 3))]
    assert [KIND.output_problem(outputs, task) for outputs in shapes] == [
        None,
        "it gives logits of the shape [2, 4]",
        "it gives logits of the shape [2, 5, 3]",
    ]


def test_what_predict_takes(tmp_path: Path):
    file = put(tmp_path, "a.png", encoded(picture(200)))
    at_hand = [picture(200), np.asarray(picture(200)), Image.open(file), {"bytes": file.read_bytes(), "path": None}]
    split = KIND.examples([file, str(file), file.read_bytes(), *at_hand], None)
    assert len({image.open().tobytes() for image in split.texts}) == 1
    assert not split.labelled
    for entry in (3, np.zeros((4, 4)), np.zeros((2, 4, 5), np.uint8), np.zeros((0, 4), np.uint8)):
        with pytest.raises(
            ConfigError, match=r"predict: entry 1 is \w+; an image is a path, bytes, a Pillow image or a uint8"
        ):
            KIND.examples([file, entry], None)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "LA", "CMYK", "YCbCr", "HSV"])
def test_an_image_at_hand_is_that_of_its_file(mode: str):
    (image,) = KIND.examples([picture(90, mode=mode)], None).texts
    assert image.open().tobytes() == picture(90, mode=mode).convert("RGB").tobytes()


@pytest.mark.parametrize("mode", ["PA", "RGBa", "La"])
def test_transparency_of_an_image_at_hand_is_white(mode: str):
    image = Image.new("LA", (4, 4), (0, 0)).convert("RGBA").convert({"La": "LA"}.get(mode, "RGBA")).convert(mode)
    (read,) = KIND.examples([image], None).texts
    assert np.asarray(read.open()).min() == 255


def test_16_bits_keep_orientation_and_transparency(tmp_path: Path):
    values = np.full((4, 8), 255, dtype=np.uint16)
    values[0, 0] = 0
    image, exif = Image.fromarray(values), Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    image.save(tmp_path / "a.png", exif=exif, transparency=0)
    for read in KIND.examples([tmp_path / "a.png", Image.open(tmp_path / "a.png")], None).texts:
        pixels = np.asarray(read.open())
        assert (pixels.shape, pixels.max(), (pixels == 255).sum()) == ((8, 4, 3), 255, 3)


def test_16_bits_of_any_byte_order_are_scaled(tmp_path: Path):
    values = np.linspace(0, 65535, 16, dtype=np.uint16).reshape(4, 4)
    image = Image.frombytes("I;16B", (4, 4), values.astype(">u2").tobytes())
    image.save(tmp_path / "big.tiff")
    for read in KIND.examples([image, Image.fromarray(values), tmp_path / "big.tiff"], None).texts:
        assert (np.asarray(read.open())[..., 0] == values >> 8).all()


def test_images_at_hand_that_cannot_be_read(tmp_path: Path):
    wide = KIND.examples([picture(mode="F")], None).texts[0]
    with pytest.raises(DataError, match="entry 0 has pixels of 32 bits"):
        wide.open()
    cut = Image.open(put(tmp_path, "cut.png", encoded(picture(size=(64, 64)))[:200]))
    with pytest.raises(DataError, match=r"images: entry 0 cannot be decoded \("):
        KIND.examples([cut], None)


def test_a_column_of_paths(tmp_path: Path):
    put(tmp_path, "pets/a.png", encoded(picture(0)))
    put(tmp_path, "pets/b.png", encoded(picture(250)))
    table = put(tmp_path, "a.csv", "image,label\npets/a.png,dark\n" + str(tmp_path / "pets" / "b.png") + ",light\n")
    split = Task.from_files(IMAGE, train=table, test=table).split("test")
    assert split.labels == (0, 1)
    assert [image.open().getpixel((0, 0))[0] > 100 for image in split.texts] == [False, True]


def test_only_training_images_are_augmented(split: Split):
    def pixels(part: str, **options: Any) -> torch.Tensor:
        return KIND.encode(split, vit(), EncodeOptions(part=part, max_length=0, **options)).batch([0])["pixel_values"]

    assert torch.equal(pixels("validation", augment=True), pixels("train"))
    assert not torch.equal(pixels("train", augment=True), pixels("train"))
    assert not torch.equal(pixels("train", augment=True, seed=1), pixels("train", augment=True))


def test_an_image_is_read_as_patches():
    config = SimpleNamespace(image_size=224, patch_size=16)
    assert KIND.model_rows(10, 50.0, 0, config) == (10, 197)
    assert KIND.model_rows(10, 50.4, 0, SimpleNamespace()) == (10, 50)


def test_a_file_name_that_is_not_utf_8_is_named(tmp_path: Path):
    folder = picture_folder(tmp_path)
    first = next(path for path in folder.rglob("*.png"))
    first.rename(os.fsdecode(os.fsencode(first.parent) + b"/caf\xe9.png"))
    with pytest.raises(DataError, match="whose name is not UTF-8; rename it"):
        Task.from_files("image_classification", train=folder)
