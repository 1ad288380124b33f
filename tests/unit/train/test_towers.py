"""Readers of texts and of images on one model with two towers, and of images on models of many families."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.support.pictures import CLASSES, encoded, picture, picture_folder, put
from tests.support.portions import one_in
from tests.support.tiny import _VISION
from tests.support.towers import joint_processor, texts_and_images, two_towers
from tests.support.training import PLAIN
from transformers import AutoConfig, AutoModel, ViTImageProcessor

import lamina
from lamina import AdaLayers, ImageClassification, Mean, Reader, ReaderBank, SequenceClassification, Task
from lamina.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

IMAGE, TEXT = "image_classification", "sequence_classification"
SEES = (
    "vit",
    "deit",
    "beit",
    "dinov2",
    "dinov2_with_registers",
    "dinov3_vit",
    "siglip_vision_model",
    "clip_vision_model",
)
TOKENS = {"deit": 18, "dinov2_with_registers": 21, "siglip_vision_model": 16}  # else 16 patches and a class token


@pytest.fixture(scope="module")
def shades(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return Task.from_files(IMAGE, train=picture_folder(tmp_path_factory.mktemp("shades"), rows=8))


@pytest.fixture(scope="module")
def words() -> Task:
    rows = [{"text": f"{PLAIN[row % 2]} {PLAIN[2 + row % 5]}", "label": "ab"[row % 2]} for row in range(24)]
    return Task.from_dataset(TEXT, {"train": rows, "validation": rows}, text="text")


def towers_bank(words: Task, shades: Task) -> ReaderBank:
    bank = ReaderBank(two_towers(), joint_processor())
    bank.add("words", words)
    bank.add("shade", shades)
    bank.add("ada", Reader(AdaLayers(dim=16), ImageClassification(shades.labels, attention_heads=4), stack="vision"))
    return bank


def test_readers_of_both_towers_learn_and_come_back(words: Task, shades: Task, tmp_path: Path):
    bank = towers_bank(words, shades)
    assert [bank[name].stack for name in bank] == ["text", "vision", "vision"]
    tasks = {"words": words, "shade": shades, "ada": shades}
    result = lamina.fit(
        bank, tasks, epochs=6, batch_size=8, learning_rate=1e-2, output=tmp_path / "bank", progress=False
    )
    assert result.best["words"]["accuracy"] == 1
    assert max(result.best[name]["accuracy"] for name in ("shade", "ada")) > 0.6
    again = ReaderBank.from_pretrained(tmp_path / "bank", model=bank.model, processor=bank.processor)
    text, image = [f"{PLAIN[0]} {PLAIN[1]}"], [picture(200), np.asarray(picture(20)), encoded(picture(100))]
    for given, readers in ((text, ["words"]), (image, ["shade", "ada"])):
        assert lamina.predict(again, given, readers=readers) == lamina.predict(bank, given, readers=readers)
    assert lamina.evaluate(again, tasks, progress=False) == lamina.evaluate(bank, tasks, progress=False)


def test_a_tower_runs_by_itself_or_in_the_whole_model():
    """A reader says the same off its tower, off the whole model, and while it listens; the main job is untouched."""
    bank, batch = ReaderBank(two_towers()), texts_and_images()
    bank.add("text", Reader(Mean(), SequenceClassification(3, pooling="mean")))
    bank.add("image", Reader(Mean(), ImageClassification(2, pooling="mean")))
    bank.eval()
    plain = bank.model(**batch).logits_per_image
    both, whole = bank(**batch), bank(**batch, main=True)
    with bank.listen() as heard:
        beside = bank.model(**batch).logits_per_image
    assert torch.equal(beside, plain)
    assert torch.equal(whole.main.logits_per_image, plain)
    alone = {
        "text": bank(**{name: batch[name] for name in ("input_ids", "attention_mask")}, readers=["text"]),
        "image": bank(pixel_values=batch["pixel_values"], readers=["image"]),
    }
    for name, own in alone.items():
        for other in (both, whole, heard):
            assert torch.equal(own[name].logits, other[name].logits)
    assert both["text"].mask.sum(1).tolist() == [7, 5, 5]
    assert both["image"].mask.tolist() == [[True] * 5] * 2
    with pytest.raises(
        ConfigError, match=r"bank: the batch has no 'pixel_values', only input_ids; the stack 'vision' reads"
    ):
        bank(input_ids=batch["input_ids"])


def test_saved_towers_are_loaded_with_their_processor(words: Task, shades: Task, tmp_path: Path):
    lamina.save(two_towers(), tmp_path / "model", joint_processor())
    bank = ReaderBank(*lamina.load(tmp_path / "model"))
    bank.add("shade", shades)
    bank.save_pretrained(tmp_path / "bank")
    again = ReaderBank.from_pretrained(tmp_path / "bank")
    assert lamina.predict(again, [picture(90)]) == lamina.predict(bank, [picture(90)])


def vision(name: str) -> Any:
    torch.manual_seed(0)
    return AutoModel.from_config(AutoConfig.for_model(name, **_VISION)).eval()


@pytest.mark.parametrize("name", one_in(5, SEES))
def test_images_are_read_on_many_models(name: str, shades: Task, tmp_path: Path):
    """Every position is read: patches, class tokens, registers. An image is independent of its batch (law 5)."""
    bank = ReaderBank(vision(name), ViTImageProcessor(size={"height": 16, "width": 16}))
    bank.add("default", shades)
    bank.add("ada", Reader(AdaLayers(dim=16), ImageClassification(shades.labels, attention_heads=4)))
    lamina.fit(bank, dict.fromkeys(bank, shades), epochs=1, batch_size=8, progress=False, output=tmp_path)
    heard = bank(pixel_values=torch.zeros(2, 3, 16, 16))
    assert heard["ada"].mask.shape == (2, TOKENS.get(name, 17))
    assert bool(heard["ada"].mask.all())
    images = [picture(shade) for shade in (20, 90, 200)]
    together, alone = lamina.predict(bank, images), [lamina.predict(bank, [image])[0] for image in images]
    for one, other in zip(together, alone, strict=True):
        for reader in bank:
            expected = pytest.approx(other[reader]["probabilities"], abs=1e-5)
            assert one[reader]["probabilities"] == expected
    again = ReaderBank.from_pretrained(tmp_path, model=bank.model, processor=bank.processor)
    assert lamina.predict(again, images) == together


def test_an_image_that_does_not_decode_is_named_and_others_go_on(shades: Task, tmp_path: Path):
    bank = ReaderBank(vision("vit"), ViTImageProcessor(size={"height": 16, "width": 16}))
    bank.add("shade", shades)
    files = [put(tmp_path, f"{row}.png", encoded(picture(90)) if row != 1 else b"no image") for row in range(3)]
    put(tmp_path, "in.csv", "image\n" + "\n".join(map(str, files)) + "\n")
    result = lamina.predict_file(bank, tmp_path / "in.csv", tmp_path / "out.jsonl", skip_bad=True, progress=False)
    assert (result.rows, result.skipped) == (2, 1)


def test_memory_is_measured_in_the_tokens_of_the_model(shades: Task, monkeypatch: pytest.MonkeyPatch):
    """An image has 17 tokens, not one."""
    from lamina.train import bank_runner as readers

    bank = ReaderBank(vision("vit"), ViTImageProcessor(size={"height": 16, "width": 16}))
    bank.add("shade", shades)
    monkeypatch.setattr(readers, "free_bytes", lambda _: 1)
    with pytest.raises(ConfigError, match=r"rows of 17 tokens; 0\.0 GiB are free"):
        lamina.fit(bank, {"shade": shades}, epochs=1, progress=False)


def test_the_classes_are_those_of_the_folders(shades: Task):
    assert shades.labels == CLASSES
