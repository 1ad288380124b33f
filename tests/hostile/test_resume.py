"""A run goes on only from what is its own and whole: other readers, data, options and weights are refused by name."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.finetuned import bert, tensors, tune
from tests.support.portions import one_in
from tests.support.training import reader, same, smoothed, tiny_bank, tiny_model, tiny_tokenizer, train, weights, yes_no
from tokenizers.processors import BertProcessing

from lamina.bank import ReaderBank
from lamina.editing.freeze import freeze_
from lamina.editing.insert import insert_
from lamina.editing.reinit import reinit_
from lamina.errors import ConfigError, LaminaError, StoreError
from lamina.tasks.split import Split
from lamina.tasks.task import Task
from lamina.train.checkpoint import Checkpoints
from lamina.train.engine import Engine

BEGAN = (
    r"fit: the checkpoint in .*checkpoint-\d+ was made with {}; a run must resume with the same settings and data\. "
    "Use the same settings, "
)


def with_split(task: Task, part: str, **changes: Any) -> Task:
    """A task with other texts or labels in one part."""
    split = task.split(part)
    cells = {"texts": list(split.texts), "labels": list(split.labels), **changes}
    return replace(task, splits={**task.splits, part: Split.of(cells["texts"], cells["labels"])})


TASK = yes_no(train=12, validation=8)
LABELS = {part: list(TASK.split(part).labels) for part in ("train", "validation")}
TEXTS = list(TASK.split("validation").texts)


class Job:
    """A bank, its tasks, and the options of a run on them, to be changed one at a time."""

    def __init__(self) -> None:
        self.bank = tiny_bank({"one": reader(TASK), "two": reader(TASK, seed=1)})
        self.tasks, self.options = {"one": TASK, "two": TASK}, dict[str, Any](epochs=1)

    def replace_reader(self, name: str, **changes: Any) -> None:
        self.bank.remove(name)
        self.bank.add(name, changes.pop("reader", None) or reader(TASK, **changes))

    def run(self, output: Path, *, resume: bool = False) -> Any:
        return train(self.bank, self.tasks, output=output, resume=resume, **self.options)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ended")
    Job().run(folder)
    return folder


def turned(labels: list[int]) -> list[int]:
    return [1 - labels[0], *labels[1:]]


def named_otherwise(job: Job) -> None:
    other = replace(TASK, labels=("nay", "yea"), positive="yea")
    job.replace_reader("one", reader=reader(other))
    job.tasks["one"] = other


def other_tokens(job: Job) -> None:
    job.bank.processor.backend_tokenizer.post_processor = BertProcessing(("[SEP]", 3), ("[SEP]", 3))


def set_task(name: str, task: Task) -> Callable[[Job], None]:
    return lambda job: job.tasks.update({name: task})


CHANGES: dict[str, tuple[Callable[[Job], Any], str]] = {
    "fusion": (lambda job: job.replace_reader("two", seed=1, alpha=8.0), r"fusion\.alpha 4\.0 in 'two', here 8\.0"),
    "head": (lambda job: job.replace_reader("one", dropout=0.25), r".*dropout 0\.0 in 'one', here 0\.25"),
    "labels": (named_otherwise, r"head\.labels \['no', 'yes'\] in 'one', here \['nay', 'yea'\]"),
    "reader's seed": (lambda job: job.replace_reader("two", seed=2), r"seed 1 in 'two', here 2"),
    "fewer": (lambda job: job.tasks.pop("two"), r"trains \['one', 'two'\], here \['one'\]"),
    "base": (
        lambda job: setattr(job, "bank", tiny_bank({"one": reader(TASK), "two": reader(TASK, seed=1)}, tiny_model(1))),
        "other weights of the model",
    ),
    "settings of the base": (
        lambda job: setattr(job, "bank", tiny_bank({"one": reader(TASK), "two": reader(TASK, seed=1)}, smoothed())),
        "other settings of the model",
    ),
    "label": (
        set_task("two", with_split(TASK, "train", labels=turned(LABELS["train"]))),
        "other labels in the train part of 'two'",
    ),
    "validation label": (
        set_task("one", with_split(TASK, "validation", labels=turned(LABELS["validation"]))),
        "other labels in the validation part of 'one'",
    ),
    "validation text": (
        set_task("one", with_split(TASK, "validation", texts=[*TEXTS[1:], TEXTS[0]])),
        "other texts in the validation part of 'one'",
    ),
    "fewer rows": (
        set_task(
            "one", replace(TASK, splits={**TASK.splits, "validation": TASK.split("validation").select_rows(range(7))})
        ),
        "rows 8 in the validation part of 'one', here 7",
    ),
    "metric": (set_task("two", replace(TASK, metric="mcc")), "metric accuracy in 'two', here mcc"),
    "by row": (set_task("two", replace(TASK, by_row=True)), "by_row False in 'two', here True"),
    "labels of all tokens": (
        set_task("one", replace(TASK, label_all_tokens=True)),
        "label_all_tokens False in 'one', here True",
    ),
    "tokenizer": (other_tokens, "other tokens in the train part of 'one'"),
    "option": (lambda job: job.options.update(batch_size=8), "batch_size 4, here 8"),
    "seed": (lambda job: job.options.update(seed=1), "seed 0, here 1"),
    "epochs": (lambda job: job.options.update(epochs={"one": 1, "two": 3}), "epochs 1 in 'two', here 3"),
    "rate": (lambda job: job.options.update(learning_rate=0.02), r"learning_rate 0\.01 in 'one', here 0\.02"),
}


@pytest.mark.parametrize("change", one_in(2, CHANGES))
def test_a_run_of_another_kind_is_refused_by_what_differs(change: str, ended: Path, tmp_path: Path):
    """The run has ended, and is resumed with other settings."""
    job, (apply, sentence) = Job(), CHANGES[change]
    shutil.copytree(ended, tmp_path / "out")
    apply(job)
    before = weights(job.bank)
    with pytest.raises(ConfigError, match=BEGAN.format(sentence)):
        job.run(tmp_path / "out", resume=True)
    assert same(weights(job.bank), before)


def test_the_same_run_goes_on(ended: Path, tmp_path: Path):
    shutil.copytree(ended, tmp_path / "out")
    job = Job()
    job.options |= {"save_steps": 7, "eval_batch_size": 1}
    job.run(tmp_path / "out", resume=True)
    saved = ReaderBank.from_pretrained(ended, model=tiny_model())
    assert same(weights(job.bank), weights(saved))


# Whole models


def model_job(change: str = "") -> Any:
    model = bert()
    if change == "head":
        torch.nn.init.normal_(model.classifier.weight)
    elif change == "drawn":
        reinit_(model, [3])
    elif change == "base":
        torch.nn.init.normal_(model.bert.encoder.layer[0].output.dense.weight)
    elif change == "frozen head":
        torch.nn.init.normal_(model.classifier.weight)
        model.classifier.requires_grad_(False)
    elif change == "insert":
        insert_(model, "ffn")
    elif change == "freeze":
        freeze_(model, [1])
    return model


MODELS = [
    ("", "base", "other weights of the model"),
    ("frozen head", "frozen head", "other weights of the model"),
    ("", "insert", r"edits \[\], here \[\['insert', .*"),
    ("", "freeze", r"edits \[\], here \[\['freeze', .*"),
    ("drawn", "", r"edits \[\['reinit', .*, here \[\]"),
]


@pytest.mark.parametrize(("before", "now", "sentence"), one_in(2, MODELS))
def test_another_model_is_refused(before: str, now: str, sentence: str, tmp_path: Path):
    torch.manual_seed(1)
    tune(model_job(before), TASK, tmp_path)
    with pytest.raises(
        ConfigError, match=f"finetune: .* was made with {sentence}; a run must resume with the same settings and data"
    ):
        tune(model_job(now), TASK, tmp_path, resume=True)


@pytest.mark.parametrize("change", ["head", "drawn"])
def test_what_was_drawn_anew_comes_back_from_the_checkpoint(change: str, tmp_path: Path):
    """A head is new at random each time that a model is loaded."""
    first, again = model_job(change), model_job(change)
    assert not same(tensors(first), tensors(again))
    tune(first, TASK, tmp_path)
    tune(again, TASK, tmp_path, resume=True)
    assert same(tensors(first), tensors(again))


def test_a_base_that_is_trained_along_is_known(tmp_path: Path):
    def run(seed: int, **options: Any) -> None:
        bank = ReaderBank(tiny_model(seed), tiny_tokenizer(), train_base=True)
        bank.add("one", reader(TASK))
        train(bank, {"one": TASK}, output=tmp_path, **options)

    run(0)
    run(0, resume=True)
    with pytest.raises(ConfigError, match=BEGAN.format("other weights of the model")):
        run(1, resume=True)


# Damage


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a run: step 3, and step 6, which is newer."""
    folder = tmp_path_factory.mktemp("two")
    job = Job()
    job.options |= {"epochs": 2}
    job.run(folder)
    return folder


def harmed(path: Path, how: str) -> None:
    content = path.read_bytes()
    path.unlink()
    if how == "a folder":
        path.mkdir()
    elif how != "gone":
        path.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "text": b"[" * 100_000}[how])


def change_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


def resume_error(folder: Path) -> LaminaError:
    """What a run is told that resumes, before it looks whether it is the same run."""
    with pytest.raises(StoreError) as error:
        Checkpoints(folder / "checkpoints", "fit").begin(resume=True)
    return error.value


@pytest.mark.parametrize("how", ["gone", "empty", "cut", "text", "a folder"])
@pytest.mark.parametrize("file", ["tensors.safetensors", "progress.json"])
def test_damage_names_the_file_and_the_checkpoint_to_go_on_from(file: str, how: str, two: Path, tmp_path: Path):
    folder = tmp_path / "out"
    shutil.copytree(two, folder)
    newest = folder / "checkpoints" / "checkpoint-6"
    harmed(newest / file, how)
    error = resume_error(folder)
    assert str(error).startswith(f"fit: the checkpoint in {newest} cannot be used ({file} ")
    assert str(error).endswith(f"Remove {newest} to continue from checkpoint-3, which is intact.")


def test_a_run_goes_on_from_the_checkpoint_that_is_offered(two: Path, tmp_path: Path):
    shutil.copytree(two, folder := tmp_path / "out")
    harmed(folder / "checkpoints" / "checkpoint-6" / "tensors.safetensors", "cut")
    job = Job()
    job.options |= {"epochs": 2}
    with pytest.raises(StoreError, match=r"to continue from checkpoint-3, which is intact"):
        job.run(folder, resume=True)
    shutil.rmtree(folder / "checkpoints" / "checkpoint-6")
    job.run(folder, resume=True)
    assert same(weights(job.bank), weights(ReaderBank.from_pretrained(two, model=tiny_model())))


def test_where_none_is_whole_nothing_is_offered(two: Path, tmp_path: Path):
    shutil.copytree(two, tmp_path / "out")
    for path in (tmp_path / "out" / "checkpoints").rglob("*.safetensors"):
        harmed(path, "cut")
    error = resume_error(tmp_path / "out")
    assert "checkpoint-6 cannot be used (tensors.safetensors does not hold what was saved" in str(error)
    assert str(error).endswith("No other checkpoint is intact; train without resume.")


JSON: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a missing key": lambda fields: fields.pop("content"),
    "a missing key inside": lambda fields: fields["content"][1]["progress"].pop("position"),
    "a foreign key": lambda fields: fields["content"][1]["progress"].update(foreign=1),
    "a text for a number": lambda fields: fields["content"][1]["progress"].update(position=["a", "b", "c"]),
    "a huge number": lambda fields: fields["content"][1]["progress"].update(position=[10**30, 0, 10**30]),
    "a negative number": lambda fields: fields["content"][1]["progress"].update(position=[-1, -1, -1]),
    "NaN": lambda fields: fields["content"][1]["progress"]["learners"]["one"].update(top=float("nan")),
    "another run": lambda fields: fields["content"][0]["settings"][""].update(batch_size=8),
    "no list": lambda fields: fields.update(content=None),
    "no checksum": lambda fields: fields.update(checksum=None),
}


@pytest.mark.parametrize("change", JSON)
def test_changed_json_is_damage(change: str, two: Path, tmp_path: Path):
    shutil.copytree(two, tmp_path / "out")
    change_json(tmp_path / "out" / "checkpoints" / "checkpoint-6" / "progress.json", JSON[change])
    assert "(progress.json does not hold what was saved" in str(resume_error(tmp_path / "out"))


@pytest.mark.parametrize("version", [None, 1, 3, "2", [], "x" * 1000])
def test_another_format_is_refused(version: Any, two: Path, tmp_path: Path):
    shutil.copytree(two, tmp_path / "out")
    path = tmp_path / "out" / "checkpoints" / "checkpoint-6" / "progress.json"
    change_json(path, lambda fields: fields.update(format=version))
    with pytest.raises(StoreError, match=r"was written by another version of lamina, in format .*; this .* format 2\)"):
        Checkpoints(path.parents[1], "fit").begin(resume=True)


def is_same_json(one: bytes, other: bytes) -> bool:
    try:
        return json.loads(one) == json.loads(other)
    except ValueError:
        return False


@pytest.mark.parametrize("count", [100, pytest.param(5000, marks=pytest.mark.full)])
@pytest.mark.parametrize("file", ["tensors.safetensors", "progress.json"])
def test_every_flipped_bit_is_noticed(file: str, count: int, tmp_path: Path):
    tensors, rng = {"w": torch.randn(20), "kept": torch.ones(3, dtype=torch.bool)}, random.Random(0)
    progress = {"position": [1, 2, 30], "history": [{"reader": "one", "loss": 0.25}]}
    Checkpoints(tmp_path, "fit").save(30, tensors, progress)
    path = tmp_path / "checkpoint-30" / file
    whole = path.read_bytes()
    for _ in range(count):
        bit = rng.randrange(8 * len(whole))
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        if file == "progress.json" and is_same_json(whole, bytes(changed)):
            continue
        with pytest.raises(StoreError, match=rf"\({file} "):
            Checkpoints(tmp_path, "fit").begin(resume=True)


def without_one(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[next(name for name in tensors if name.startswith("two/now/"))]


def one_more(tensors: dict[str, torch.Tensor]) -> None:
    tensors["two/best/foreign"] = torch.zeros(2)


def of_another_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[name] = tensors[(name := next(name for name in tensors if name.startswith("two/best/")))].unsqueeze(0)


@pytest.mark.parametrize("change", [without_one, one_more, of_another_shape])
def test_tensors_of_another_version_are_refused(change: Callable[..., Any], two: Path, tmp_path: Path):
    """They are whole, and another code wrote them."""
    shutil.copytree(two, tmp_path / "out")
    newest = tmp_path / "out" / "checkpoints" / "checkpoint-6"
    run, state = json.loads((newest / "progress.json").read_text())["content"]
    tensors = load_file(newest / "tensors.safetensors")
    change(tensors)
    Checkpoints(newest.parent, "fit", run).save(6, tensors, state["progress"])
    job = Job()
    job.options |= {"epochs": 2}
    with pytest.raises(StoreError, match="resume: the checkpoint has other tensors than 'two'; another version of lam"):
        job.run(tmp_path / "out", resume=True)


def test_a_file_that_is_called_like_a_checkpoint_is_not_ours(tmp_path: Path):
    (tmp_path / "checkpoint-5").write_text("mine")
    with pytest.raises(StoreError, match=r"fit: .* holds checkpoint-5, which was made by something else"):
        Checkpoints(tmp_path, "fit").begin(resume=True)


def test_a_damaged_checkpoint_is_no_hindrance_to_a_new_run(two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(two, tmp_path / "out")
    harmed(tmp_path / "out" / "checkpoints" / "checkpoint-6" / "progress.json", "cut")
    real, steps = Engine.step, []
    monkeypatch.setattr(Engine, "step", lambda *args: steps.append(1) or real(*args))
    job = Job()
    job.run(tmp_path / "out")
    assert len(steps) == 3
