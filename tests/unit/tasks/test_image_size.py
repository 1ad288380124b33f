"""A size for images: processors set to it, and models that are built for another."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tests.support.finetuned import image_processor, vit
from tests.support.pictures import picture_folder

from lamina.errors import ConfigError
from lamina.tasks import kind_of
from lamina.tasks.base import EncodeOptions
from lamina.tasks.image_classification import set_image_size, target_of
from lamina.tasks.position_interpolation import size_arguments, size_problem
from lamina.tasks.task import Task

KIND = kind_of("image_classification")
PROCESSORS = {
    "height and width": lambda: transformers.ViTImageProcessorPil(size={"height": 16, "width": 20}),
    "edge, then crop": lambda: transformers.BitImageProcessorPil(
        size={"shortest_edge": 20}, crop_size={"height": 16, "width": 16}
    ),
    "larger, then crop": transformers.DeiTImageProcessorPil,
    "edge with its own crop": lambda: transformers.ConvNextImageProcessorPil(size={"shortest_edge": 16}),
    "edge without crop": lambda: transformers.BitImageProcessorPil(size={"shortest_edge": 16}, do_center_crop=False),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_is_set_to_a_size_and_saved_with_it(name: str, tmp_path: Path):
    processor = PROCESSORS[name]()
    fixed = target_of(processor).fixed
    copy = deepcopy(processor)
    set_image_size(copy, 40)
    assert target_of(copy) == (40, 40, fixed)
    assert target_of(processor)[:2] != (40, 40)
    copy.save_pretrained(tmp_path)
    assert target_of(type(copy).from_pretrained(tmp_path)) == (40, 40, fixed)


def test_the_share_that_is_cut_off_stays():
    processor = PROCESSORS["larger, then crop"]()  # it resizes to 256 and keeps 224
    set_image_size(processor, 384)
    assert (processor.size["height"], processor.crop_size["height"]) == (439, 384)


def test_a_processor_inside_another_is_set():
    holder: Any = SimpleNamespace(image_processor=image_processor(8))
    set_image_size(holder, 12)
    assert target_of(holder.image_processor) == (12, 12, True)


def test_a_processor_that_cannot_be_set_stays_as_it_is():
    processor = transformers.PerceiverImageProcessorPil()  # keeps a share of the size that it is given
    with pytest.raises(ConfigError, match=r"PerceiverImageProcessor\w* makes images of 336 x 336 when asked for 384 x"):
        set_image_size(processor, 384)
    assert target_of(processor) == (224, 224, True)


def test_images_of_a_task_have_its_size(tmp_path: Path):
    task = Task.from_files("image_classification", train=picture_folder(tmp_path, rows=3), image_size=12)
    assert (task.image_size, task.subsample(rows=3).image_size, task.held_out().image_size) == (12, 12, 12)
    options = EncodeOptions(part="train", max_length=0, image_size=12)
    processor = image_processor(8)
    for augment in (False, True):
        given = EncodeOptions(**{**vars(options), "augment": augment})
        inputs = KIND.encode(task.split("train"), processor, given)
        assert inputs.batch([0, 1])["pixel_values"].shape == (2, 3, 12, 12)
    assert target_of(processor) == (8, 8, True)


def test_every_way_to_make_a_task_takes_a_size(tmp_path: Path):
    folder = picture_folder(tmp_path / "train", classes=("airplane", "dog"), rows=3)
    rows = [{"image": str(path), "label": path.parent.name} for path in sorted(folder.rglob("*.png"))]
    made = (
        Task.from_files("image_classification", train=folder, image_size=10),
        Task.from_dataset("image_classification", {"train": rows}, text="image", image_size=10),
        Task.preset("cifar10", files={"train": folder, "test": folder}, image_size=10),
    )
    assert {task.image_size for task in made} == {10}


def test_sizes_that_cannot_be(tmp_path: Path):
    folder = picture_folder(tmp_path / "pets")
    with pytest.raises(ConfigError, match="task pets: image_size is 0; it must be at least 1"):
        Task.from_files("image_classification", train=folder, image_size=0)
    rows = [{"sentence": "a", "label": 0}, {"sentence": "b", "label": 1}]
    with pytest.raises(ConfigError, match="image_size is 8 for a task of kind sequence_classification, which has no"):
        Task.from_dataset("sequence_classification", {"train": rows, "validation": rows}, image_size=8)


# Models


def batch(size: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))}


def test_positions_are_interpolated_for_another_size_only():
    model = vit(8)
    assert size_arguments(model, batch(8)) == {}
    assert size_arguments(model, batch(16)) == {"interpolate_pos_encoding": True}
    assert size_arguments(model, {"input_ids": torch.ones(1, 2)}) == {}
    expected = model(**batch(16), interpolate_pos_encoding=True).logits
    assert torch.equal(model(**batch(16), **size_arguments(model, batch(16))).logits, expected)


def test_a_head_that_hands_the_option_on_gets_it():
    config = transformers.CLIPConfig(
        text_config={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
        vision_config={
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 16,
            "image_size": 8,
            "patch_size": 4,
        },
    )
    model = transformers.CLIPForImageClassification(config).eval()
    assert size_arguments(model, batch(8)) == {}
    assert model(**batch(12), **size_arguments(model, batch(12))).logits.shape == (1, 2)


def test_a_model_without_the_option_is_called_without_it():
    config = transformers.Dinov2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, mlp_ratio=1, image_size=8, patch_size=4
    )
    model = transformers.Dinov2ForImageClassification(config).eval()  # interpolates of itself
    assert size_arguments(model, batch(16)) == {}
    assert torch.isfinite(model(**batch(16)).logits).all()
    assert "is built for images of 8 x 8, got 16 x 16, and takes no" in str(size_problem(model, batch(16)))
    assert size_problem(vit(8), batch(16)) is None
