"""Images of another size than the model is built for: in training, scoring, predicting, and after a reload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.support.finetuned import image_processor, vit
from tests.support.pictures import CLASSES, picture_folder

from lamina.bank import Reader, ReaderBank
from lamina.errors import ConfigError
from lamina.fusion import FUSIONS
from lamina.heads import HEADS
from lamina.prediction import evaluate, predict, predict_file
from lamina.recipes.estimate import estimate
from lamina.recipes.run_recipe import run_recipe
from lamina.recipes.schema import parse_recipe
from lamina.store import load, save
from lamina.tasks.image_classification import target_of
from lamina.tasks.task import Task
from lamina.train import finetune
from lamina.train.checkpoint import data_digests

SIZE, BUILT_FOR = 16, 8


class Fixed(transformers.ViTForImageClassification):
    """A model that takes images of its own size only."""

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return super().forward(pixel_values=pixel_values, labels=labels)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return picture_folder(tmp_path / "pets", rows=4)


@pytest.fixture
def task(folder: Path) -> Task:
    return Task.from_files("image_classification", train=folder, validation=folder, image_size=SIZE)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], bool | None]]:
    """Height and width of the images of every call of a model, and whether it interpolates."""
    calls: list[tuple[tuple[int, ...], bool | None]] = []
    forward = transformers.ViTModel.forward

    def watched(self: Any, pixel_values: torch.Tensor, **options: Any) -> Any:
        calls.append((tuple(pixel_values.shape[-2:]), options.get("interpolate_pos_encoding")))
        return forward(self, pixel_values, **options)

    monkeypatch.setattr(transformers.ViTModel, "forward", watched)
    return calls


def test_training_and_scoring_use_the_task_s_size(task: Task, seen: list[Any]):
    model, processor = vit(BUILT_FOR), image_processor(BUILT_FOR)
    scores = evaluate(model, task, processor=processor)
    assert set(seen) == {((SIZE, SIZE), True)}
    assert target_of(processor)[:2] == (BUILT_FOR, BUILT_FOR)  # scoring leaves it as it is
    seen.clear()
    result = finetune(model, task, processor=processor, epochs=2, learning_rate=1e-2, batch_size=4, progress=False)
    assert set(seen) == {((SIZE, SIZE), True)}
    assert result.best["pets"]["accuracy"] > scores["pets"]["accuracy"]
    assert model.config.image_size == BUILT_FOR  # its position embeddings have not changed


def test_training_learns_through_interpolated_positions(task: Task):
    model, processor = vit(BUILT_FOR), image_processor(BUILT_FOR)
    before = model.vit.embeddings.position_embeddings.detach().clone()
    finetune(model, task, processor=processor, epochs=1, learning_rate=1e-2, batch_size=4, progress=False)
    after = model.vit.embeddings.position_embeddings
    assert after.shape == before.shape == (1, 5, 16)
    assert (after != before).any(-1).all()


@pytest.mark.parametrize("given", [True, False])
def test_predicting_after_training_uses_the_size_it_was_trained_with(
    task: Task, folder: Path, tmp_path: Path, seen: list[Any], given: bool
):
    model, processor = vit(BUILT_FOR), image_processor(BUILT_FOR)
    save(model, tmp_path / "start", processor)
    model, processor = load(tmp_path / "start", "image_classification")
    finetune(model, task, processor=processor if given else None, epochs=1, batch_size=4, progress=False)
    seen.clear()
    predict(model, sorted(folder.rglob("*.png")), processor=processor if given else None)
    assert set(seen) == {((SIZE, SIZE), True)}


def test_a_saved_model_predicts_at_the_size_it_was_trained_with(
    task: Task, folder: Path, tmp_path: Path, seen: list[Any]
):
    model, processor = vit(BUILT_FOR), image_processor(BUILT_FOR)
    options: dict[str, Any] = {"processor": processor, "epochs": 2, "learning_rate": 1e-2, "batch_size": 4}
    finetune(model, task, output=tmp_path / "tuned", progress=False, **options)
    images = sorted(folder.rglob("*.png"))
    expected = predict(model, images, processor=processor)
    seen.clear()
    again, own = load(tmp_path / "tuned", "image_classification")
    assert target_of(own) == (SIZE, SIZE, True)
    assert predict(again, images) == expected
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"image": str(path)}) + "\n" for path in images))
    result = predict_file(again, rows, tmp_path / "answers.jsonl", progress=False)
    lines = [json.loads(line) for line in result.output.read_text().splitlines()]
    assert [line["readers"] for line in lines] == expected
    assert set(seen) == {((SIZE, SIZE), True)}


def test_a_run_goes_on_at_its_own_size_only(task: Task, folder: Path, tmp_path: Path):
    options: dict[str, Any] = {"epochs": 2, "batch_size": 4, "progress": False, "save_steps": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lamina.train.checkpoint.Checkpoints.clear", lambda _: None)
        finetune(vit(BUILT_FOR), task, processor=image_processor(8), output=tmp_path / "out", **options)
    other = Task.from_files("image_classification", train=folder, validation=folder, image_size=12)
    with pytest.raises(ConfigError, match=r"image_size 16.*, here 12"):
        finetune(vit(BUILT_FOR), other, processor=image_processor(8), output=tmp_path / "out", resume=True, **options)


def test_a_model_that_cannot_interpolate_is_refused_with_both_sizes(task: Task, folder: Path):
    model, processor = Fixed(vit(BUILT_FOR).config).eval(), image_processor(BUILT_FOR)
    reason = r"Fixed is built for images of 8 x 8, got 16 x 16, and takes no interpolate_pos_encoding \(.+\)\. Leave"
    with pytest.raises(ConfigError, match=f"finetune: {reason}"):
        finetune(model, task, processor=processor, progress=False)
    assert target_of(processor)[:2] == (BUILT_FOR, BUILT_FOR)
    with pytest.raises(ConfigError, match=f"evaluate: {reason}"):
        evaluate(model, task, processor=processor)
    larger = image_processor(SIZE)
    with pytest.raises(ConfigError, match=f"predict: {reason}"):
        predict(model, sorted(folder.rglob("*.png")), kind="image_classification", processor=larger)
    assert len(predict(model, sorted(folder.rglob("*.png")), kind="image_classification", processor=processor)) == 12


def test_other_failures_of_a_model_are_not_taken_for_its_size(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of something")

    model = vit(BUILT_FOR)
    monkeypatch.setattr(type(model.vit), "forward", fails)
    with pytest.raises(RuntimeError, match="out of something"):
        predict(model, sorted(folder.rglob("*.png")), processor=image_processor(BUILT_FOR))


def test_readers_of_a_bank_read_interpolated_layers():
    model = vit(BUILT_FOR).vit
    bank = ReaderBank(model)
    head = HEADS.from_dict({"name": "sequence_classification", "labels": CLASSES})
    bank.add("pets", Reader(FUSIONS.from_dict({"name": "mean"}), head))
    values = torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    out = bank.eval()(pixel_values=values, interpolate_pos_encoding=True, main=True)
    assert out.main.last_hidden_state.shape == (2, 17, 16)
    assert out["pets"].logits.shape == (2, 3)


# Recipes


def recipe(**task: Any) -> dict[str, Any]:
    files = {"train": "pets", "validation": "pets"}
    return {
        "model": "start",
        "tasks": {"pets": {"kind": "image_classification", "files": files, **task}},
        "methods": {"plain": {}},
        "fit": {"epochs": 1, "batch_size": 4, "augment": False},
    }


def test_a_recipe_s_models_are_kept_with_their_size(folder: Path, tmp_path: Path, seen: list[Any]):
    save(vit(BUILT_FOR), tmp_path / "start", image_processor(BUILT_FOR))
    given = recipe(image_size=SIZE) | {"model": str(tmp_path / "start")}
    found = estimate(parse_recipe(given), data=folder.parent)
    assert found.tasks[0]["tokens"] == (SIZE // 4) ** 2 + 1
    run_recipe(parse_recipe(given), data=folder.parent, output=tmp_path / "out", progress=False)
    assert {call for call in seen if call[0] == (SIZE, SIZE)} == {((SIZE, SIZE), True)}  # others look for layers
    assert target_of(load(tmp_path / "out/models/pets", "image_classification")[1]) == (SIZE, SIZE, True)
    del given["tasks"]["pets"]["image_size"]
    assert estimate(parse_recipe(given), data=folder.parent).tasks[0]["tokens"] == (BUILT_FOR // 4) ** 2 + 1


def test_a_recipe_with_a_size_for_texts_is_refused():
    given = recipe() | {"tasks": {"cola": {"preset": "cola", "image_size": 8}}}
    with pytest.raises(ConfigError, match="image_size is 8 for a task of kind sequence_classification, which has no"):
        parse_recipe(given)
    with pytest.raises(ConfigError, match="image_size is 0; it must be at least 1"):
        parse_recipe(recipe(image_size=0))


def test_a_run_that_goes_on_tells_images_that_were_replaced_from_copies(task: Task, folder: Path):
    before, (path, *_) = data_digests(task.split("train")), sorted(folder.rglob("*.png"))
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    assert data_digests(task.split("train")) == before
    path.write_bytes(content + b"0")
    assert {name for name, mark in data_digests(task.split("train")).items() if mark != before[name]} == {"files"}
    path.unlink()
    assert data_digests(task.split("train"))["texts"] == before["texts"]
