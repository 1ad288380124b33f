"""What `fit` does with its tasks, options and folder."""

from __future__ import annotations

import copy
import gc
import json
import random
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from tests.support.finetuned import bert, pairs
from tests.support.masked import masked_bank, running
from tests.support.portions import one_in
from tests.support.training import (
    LENGTH,
    largest_difference,
    length_of_text,
    names,
    reader,
    same,
    several,
    tiny_bank,
    tiny_model,
    tiny_tokenizer,
    train,
    weights,
    yes_no,
)

from lamina import fit, save
from lamina.bank import Reader, ReaderBank
from lamina.errors import ConfigError, StoreError, UnknownNameError
from lamina.fusion.mean import Mean
from lamina.heads.sequence_classification import SequenceClassification
from lamina.prediction import evaluate, predict
from lamina.tasks.task import Task
from lamina.train import training_run
from lamina.train.checkpoint import Checkpoints
from lamina.train.engine import Engine
from lamina.train.learner import Learner

TASK = yes_no(train=12, validation=8)


def bank_for(**tasks: Task) -> ReaderBank:
    return tiny_bank({name: reader(task, seed=at) for at, (name, task) in enumerate(tasks.items())})


@pytest.mark.parametrize(
    ("rows", "options", "told"),
    [
        (6, {}, True),
        (6, {"keep": "last"}, False),
        (6, {"epochs": 1}, False),
        (6, {"epochs": {"a": 1}}, False),
        (6, {"epochs": 1, "max_steps": 9}, True),
        (8, {}, False),
    ],
)
def test_few_validation_rows_are_told_of(
    rows: int, options: dict[str, Any], told: bool, caplog: pytest.LogCaptureFixture
):
    task = yes_no(train=12, validation=rows)
    train(bank_for(a=task), {"a": task}, **{"epochs": 2, **options})
    wanted = "fit: 'a' has 6 validation rows, which can hardly tell which epoch is best. Use more, or keep=\"last\"."
    messages = [record.getMessage() for record in caplog.records]
    assert [message for message in messages if "not better on validation" not in message] == [wanted] * told


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("cache", [pytest.param("off", marks=pytest.mark.full), "on"])
def test_a_bank_and_its_model_are_freed_once_nobody_asks_for_them(tmp_path: Path, cache: str):
    """At once, and not when Python next looks for circles: what a run holds is as large as the model."""
    bank = bank_for(a=TASK)
    result = train(bank, {"a": TASK}, output=tmp_path / "out", cache=cache, cache_dir=tmp_path / "cache")
    held = [weakref.ref(bank), weakref.ref(bank.model), weakref.ref(bank["a"])]
    del bank, result
    assert [ref() for ref in held] == [None] * 3


class Passes:
    """How many rows each forward of the model had, while training and while scoring."""

    def __init__(self, bank: ReaderBank) -> None:
        self.training: list[int] = []
        self.scoring: list[int] = []
        bank.model.register_forward_pre_hook(
            lambda _m, _a, kwargs: (self.training if bank.training else self.scoring).append(len(kwargs["input_ids"])),
            with_kwargs=True,
        )


# Passes


def test_tasks_over_the_same_texts_share_every_pass():
    tasks = {"a": TASK, "b": length_of_text(train=12, validation=8), "c": several(train=12, validation=8)}
    bank = bank_for(**tasks)
    bank(input_ids=torch.tensor([[2, 3]]))  # finds the layers
    passes = Passes(bank)
    assert train(bank, tasks, epochs=2, cache="off").steps == 6
    assert passes.training == [4] * 6
    assert passes.scoring == [8] * 2


def test_by_default_the_model_reads_each_row_once():
    tasks = {"a": TASK, "b": length_of_text(train=12, validation=8)}
    bank = bank_for(**tasks)
    bank(input_ids=torch.tensor([[2, 3]]))  # finds the layers
    passes = Passes(bank)
    train(bank, tasks, epochs=5)
    assert sum(passes.training) + sum(passes.scoring) == 12 + 8


def test_tasks_over_other_texts_take_turns():
    tasks = {"a": TASK, "b": yes_no(train=8, validation=8, seed=3)}
    bank = bank_for(**tasks)
    passes = Passes(bank)
    seen = []
    step = Engine.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", lambda self, s, names, p: seen.append(list(names)) or step(self, s, names, p))
        assert train(bank, tasks).steps == 5
    assert seen == [["a"], ["b"], ["a"], ["b"], ["a"]]
    assert passes.training[-5:] == [4] * 5


def test_each_reader_learns_at_its_own_rate_for_its_own_epochs():
    bank = bank_for(a=TASK, b=TASK)
    steps: dict[str, list[float]] = {"a": [], "b": []}
    step = Learner.step

    def spy(self: Learner, scaler: Any = None) -> None:
        step(self, scaler)
        steps[self.name].append(self.optimizer.param_groups[0]["lr"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "step", spy)
        options = {"epochs": {"a": 1, "b": 2}, "learning_rate": {"a": 0.3, "b": 0.06}}
        result = train(bank, {"a": TASK, "b": TASK}, **options)
    assert steps["a"] == pytest.approx([0.3, 0.2, 0.1])
    assert steps["b"] == pytest.approx([0.06, 0.05, 0.04, 0.03, 0.02, 0.01])
    assert [(row["reader"], row["epoch"]) for row in result.history] == [("a", 1), ("b", 1), ("b", 2)]


def test_the_rate_that_is_set_is_the_step_that_is_taken():
    """With Adam, the first step moves every weight whose gradient is not tiny by the learning rate."""
    task = yes_no(train=4, validation=4)
    bank = bank_for(a=task)
    before = weights(bank, "a")
    train(bank, {"a": task}, learning_rate=0.004, schedule="constant", max_grad_norm=0.0)
    moved = (weights(bank, "a")["head.output.bias"] - before["head.output.bias"]).abs()
    assert moved.tolist() == pytest.approx([0.004, 0.004], rel=1e-3)


def test_the_gradient_of_each_reader_is_clipped_to_the_norm_asked_for():
    bank = bank_for(a=TASK, b=TASK)
    norms: list[float] = []
    step = Learner.step

    def spy(self: Learner, scaler: Any = None) -> None:
        norms.append(torch.cat([p.grad.flatten() for p in self.parameters if p.grad is not None]).norm().item())
        step(self, scaler)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "step", spy)
        train(bank, {"a": TASK, "b": TASK}, max_grad_norm=0.01)
        assert norms[:2] == pytest.approx([0.01, 0.01], rel=1e-3)
        del norms[:]
        train(bank, {"a": TASK, "b": TASK}, max_grad_norm=0.0)
        assert min(norms) > 0.011


@pytest.mark.parametrize("kind", one_in(3, ["text", "tokens", "number", "labels", "hidden"]))
def test_two_batches_a_step_are_one_of_twice_the_size(kind: str):
    tasks = {
        "text": yes_no(train=37),
        "tokens": names(train=37),
        "number": length_of_text(train=37),
        "labels": several(train=37),
        "hidden": running(),
    }
    found = []
    for size, batches in ((16, 1), (8, 2)):
        bank = masked_bank("r") if kind == "hidden" else tiny_bank({"r": reader(tasks[kind], entropy=0.1)})
        options = {"batch_size": size, "gradient_accumulation_steps": batches, "adam_epsilon": 1e-4}
        result = train(bank, {"r": tasks[kind]}, learning_rate=3e-4, epochs=2, **options)
        found.append((weights(bank, "r"), result.steps))
    assert found[0][1] == found[1][1]
    assert largest_difference(found[0][0], found[1][0]) <= 1e-5


def test_a_limit_of_steps():
    bank = bank_for(a=TASK)
    result = train(bank, {"a": TASK}, max_steps=4, epochs=1)
    assert result.steps == 4
    assert [row["epoch"] for row in result.history] == [1, 2]


def test_the_last_weights_can_be_kept():
    bank = bank_for(a=TASK)
    final: list[dict[str, torch.Tensor]] = []
    score = Engine.score

    def spy(self: Engine, *args: Any) -> None:
        score(self, *args)
        final.append(weights(bank, "a"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "score", spy)
        result = train(bank, {"a": TASK}, epochs=4, keep="last")
    assert result.best["a"]["epoch"] == 4
    assert same(weights(bank, "a"), final[-1])


def test_a_task_without_a_validation_part_learns_to_the_end_without_a_score(tmp_path: Path):
    task = TASK
    alone = replace(task, splits={"train": task.split("train")})
    bank, scored = tiny_bank({"a": reader(task)}), tiny_bank({"a": reader(task)})
    both = tiny_bank({"a": reader(task), "b": reader(task)})
    result = train(bank, {"a": alone}, keep="last", epochs=2, output=tmp_path)
    assert (result.table[0]["score"], result.best["a"], result.steps) == (None, {"epoch": 2}, 6)
    assert "accuracy" not in (tmp_path / "README.md").read_text()
    beside = train(both, {"a": alone, "b": task}, keep="last", epochs=2)
    assert [row["reader"] for row in beside.table if row["score"] is None] == ["a"]
    train(scored, {"a": task}, keep="last", epochs=2)
    assert same(weights(bank, "a"), weights(scored, "a"))


@pytest.mark.parametrize(
    "options", [{}, {"keep": "last", "early_stopping_patience": 1}, {"keep": "last", "schedule": "plateau"}]
)
def test_where_a_score_decides_something_there_must_be_one(options: dict[str, Any]):
    task = yes_no()
    with pytest.raises(UnknownNameError, match="unknown split 'validation'"):
        train(tiny_bank({"a": reader(task)}), {"a": replace(task, splits={"train": task.split("train")})}, **options)


def test_options_that_have_no_use_are_refused():
    bank = bank_for(a=TASK)
    with pytest.raises(ConfigError, match=r"fit: layer_decay is 0.5; a bank whose base is frozen has no use for it"):
        train(bank, {"a": TASK}, layer_decay=0.5)
    with pytest.raises(ConfigError, match=r"fit: layer_rates is .*; a bank whose base is frozen has no use for it"):
        train(bank, {"a": TASK}, layer_rates={1: 0.1})
    with pytest.raises(ConfigError, match="fit: prefix is 'say' for a task of kind sequence_classification"):
        train(bank, {"a": TASK}, prefix="say")
    with pytest.raises(ConfigError, match="fit: tensorboard is set but no output folder"):
        train(bank, {"a": TASK}, tensorboard=True)


def test_readers_can_be_scored_on_the_test_part():
    task = replace(TASK, splits={**TASK.splits, "test": TASK.splits["train"]})
    bank = bank_for(a=task)
    result = train(bank, {"a": task}, test=True)
    assert result.test == evaluate(bank, {"a": task}, split="test")


@pytest.mark.long
def test_workers_make_the_same_batches():
    found = []
    for workers in (0, 2):
        bank = bank_for(a=TASK)
        train(bank, {"a": TASK}, epochs=2, num_workers=workers)
        found.append(weights(bank))
    assert same(*found)


def test_every_metric_is_in_the_table(tmp_path: Path):
    bank = bank_for(a=TASK)
    (row,) = train(bank, {"a": TASK}, output=tmp_path).table
    assert {"task", "reader", "metric", "score", "f1", "mcc", "best_epoch", "epochs_run", "stopped"} <= row.keys()
    assert (row["metric"], row["trained"], row["parameters"]) == ("accuracy", bank["a"].size(), bank["a"].size())
    assert bank["a"].info["scores"] == {"accuracy": row["score"], "f1": row["f1"], "mcc": row["mcc"]}


# Every kind of task


@pytest.mark.parametrize(
    ("task", "metric", "least"),
    one_in(
        4,
        [
            (yes_no(train=80), "accuracy", 0.7),
            (length_of_text(train=80), "pearson", 0.5),
            (several(train=80), "f1", 0.6),
            (names(train=80), "span_f1", 0.6),
        ],
    ),
    ids=["classification", "regression", "multi_label", "tokens"],
)
def test_every_kind_of_task_is_learned(task: Task, metric: str, least: float):
    bank = tiny_bank({"r": reader(task, layers="all", dim=16)})
    before = evaluate(bank, {"r": task})["r"][metric]
    result = train(bank, {"r": task}, epochs=12, batch_size=8, learning_rate=0.03)
    assert result.best["r"][metric] >= max(least, before + 0.1)
    assert evaluate(bank, {"r": task})["r"] == pytest.approx(
        {key: value for key, value in result.best["r"].items() if key != "epoch"}, abs=1e-5
    )


def test_a_new_reader_of_numbers_starts_at_their_mean_and_a_trained_one_goes_on():
    task, other = (length_of_text(scale=scale) for scale in (100.0, 1.0))
    labels = np.asarray(task.split("train").labels)
    bank = tiny_bank({"r": reader(task, layers="all", dim=16)})
    output: Any = bank["r"].head.output
    before = output.weight.detach().clone()
    train(bank, {"r": task}, epochs=1, learning_rate=1e-9)
    assert output.bias.item() == pytest.approx(labels.mean(), rel=1e-4)
    assert torch.allclose(output.weight, before * labels.std(), rtol=1e-4)
    train(bank, {"r": other}, epochs=1, learning_rate=1e-9)
    assert output.bias.item() == pytest.approx(labels.mean(), rel=1e-4)


@pytest.mark.parametrize("scale", [0.01, 1000.0])
def test_numbers_of_any_scale_are_learned(scale: float):
    task = length_of_text(train=80, scale=scale)
    bank = tiny_bank({"r": reader(task, layers="all", dim=16)})
    result = train(bank, {"r": task}, epochs=12, batch_size=8, learning_rate=0.03, keep="last")
    labels = np.asarray(task.split("validation").labels)
    values = [row["r"]["value"] for row in predict(bank, [str(text) for text in task.split("validation").texts])]
    assert np.abs(values - labels).mean() < 0.8 * np.abs(labels - labels.mean()).mean()
    assert result.best["r"]["pearson"] > 0.5


@pytest.mark.long
def test_words_of_texts_longer_than_the_model_are_all_scored_and_learned():
    task = names(train=12, validation=6, low=50, high=70)
    bank = tiny_bank({"r": reader(task, layers="all", dim=16)})
    result = train(bank, {"r": task}, epochs=10, batch_size=8, learning_rate=0.03, max_length=20)
    assert result.truncated == {"r": 0}
    assert result.steps > 10 * 2  # more windows than texts
    assert result.best["r"]["span_f1"] > 0.3
    assert bank["r"].info["max_length"] == 20
    found = evaluate(bank, {"r": task})["r"]
    assert found == pytest.approx({key: result.best["r"][key] for key in found}, abs=1e-6)


def test_texts_that_lose_their_end_are_counted():
    task = yes_no(train=12, validation=8)
    result = train(bank_for(r=task), {"r": task}, max_length=6)
    assert result.truncated == {"r": sum(len(text.split()) > 4 for text in task.split("train").texts)}
    assert 0 < result.truncated["r"] < 12


@pytest.mark.parametrize("task", [yes_no(train=16), names(train=16)], ids=["text", "tokens"])
def test_bfloat16(task: Task):
    bank = bank_for(r=task)
    seen: set[tuple[bool, bool]] = set()
    bank.model.register_forward_pre_hook(lambda *_: seen.add((bank.training, torch.is_autocast_enabled("cpu"))))
    train(bank, {"r": task}, precision="bfloat16", epochs=2, cache="off")
    assert {(True, True), (False, True)} <= seen  # it learns and is scored so
    assert (True, False) not in seen
    assert all(value.dtype == torch.float32 and bool(value.isfinite().all()) for value in weights(bank).values())
    seen.clear()
    evaluate(bank, {"r": task})
    assert seen == {(False, False)}  # it was the run's, and is not the bank's


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_float16(monkeypatch: pytest.MonkeyPatch):
    """Gradients are scaled while they are computed, and back before they are clipped."""
    with pytest.raises(ConfigError, match="precision is 'float16' and there is no GPU"):
        train(bank_for(a=TASK), {"a": TASK}, precision="float16")
    monkeypatch.setattr("lamina.train.engine.start_accelerator", lambda options, output: Accelerator(cpu=True))
    found = []
    for precision in ("float32", "float16"):
        bank = bank_for(a=TASK)
        train(bank, {"a": TASK}, precision=precision, epochs=2, max_grad_norm=0.1)
        found.append(weights(bank))
    assert 0 < largest_difference(*found) < 0.1


def test_a_regulariser_with_a_cutoff_keeps_numbers():
    """Layers that the cutoff removes have no logarithm."""
    bank = tiny_bank({"r": reader(TASK, alpha=64.0, cutoff=0.3, entropy=1.0)})
    train(bank, {"r": TASK}, epochs=3, learning_rate=0.02)
    shares = bank["r"].importance()
    assert 0 in shares.values()
    assert sum(shares.values()) == pytest.approx(1)
    assert all(bool(value.isfinite().all()) for value in weights(bank).values())


# State after a run


def test_the_bank_ends_at_each_readers_best_epoch():
    bank = bank_for(a=TASK, b=TASK)
    after: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
    record = Learner.record
    chosen = {"a": [0.5, 0.9, 0.1], "b": [0.7, 0.1, 0.7]}

    def spy(self: Learner, epoch: int, scores: dict[str, float]) -> bool:
        after[self.name, epoch + 1] = weights(bank, self.name)
        return record(self, epoch, {**scores, "accuracy": chosen[self.name][epoch]})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "record", spy)
        result = train(bank, {"a": TASK, "b": TASK}, epochs=3)
    assert {name: best["epoch"] for name, best in result.best.items()} == {"a": 2, "b": 1}
    assert result.best["a"]["accuracy"] == 0.9
    assert same(weights(bank, "a"), after["a", 2])
    assert same(weights(bank, "b"), after["b", 1])
    assert not same(after["a", 2], after["a", 3])


@pytest.mark.long
def test_intervals_are_those_of_evaluate(tmp_path: Path):
    """Also when the run was resumed after its last epoch, so that no epoch is scored in the second process."""
    options: dict[str, Any] = {"epochs": 2, "learning_rate": 0.05, "output": tmp_path / "out"}
    bank = bank_for(a=TASK)
    result = train(bank, {"a": TASK}, **options)
    wanted = evaluate(bank, {"a": TASK}, compare=True)["a"]["interval"]
    assert result.intervals == {"a": wanted}
    assert copy.deepcopy(result).intervals == result.intervals
    assert not copy.deepcopy(result).results
    bank = bank_for(a=TASK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_run, "_record_training", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(bank, {"a": TASK}, **{**options, "output": tmp_path / "cut"})
    again = train(bank_for(a=TASK), {"a": TASK}, **{**options, "output": tmp_path / "cut"}, resume=True)
    assert again.intervals == {"a": wanted}


def test_scores_are_those_of_evaluate():
    tasks = {"a": TASK, "b": names(train=12, validation=8), "c": several(train=12, validation=8, seed=4)}
    bank = bank_for(**tasks)
    result = train(bank, tasks, epochs=3)
    for name, scores in evaluate(bank, tasks).items():
        assert {**scores, "epoch": result.best[name]["epoch"]} == result.best[name]


def test_what_is_reported():
    bank = bank_for(a=TASK)
    result = train(bank, {"a": TASK}, epochs=2)
    assert [set(row) for row in result.history] == [{"reader", "epoch", "accuracy", "f1", "mcc"}] * 2
    assert [(row["epoch"], row["layer"]) for row in result.importances] == [(e, x) for e in (1, 2) for x in (1, 2, 3)]
    assert sum(row["importance"] for row in result.importances) == pytest.approx(2)
    assert (result.steps, result.folder) == (6, None)
    assert result.seconds > 0
    info = bank["a"].info
    assert (info["task"], info["metric"], info["rows"], info["max_length"]) == (TASK.name, "accuracy", 12, LENGTH)
    assert info["epoch"] == result.best["a"]["epoch"]
    assert info["scores"]["accuracy"] == result.best["a"]["accuracy"]
    assert info["pair"] is False


def test_readers_without_a_task_are_left_alone():
    bank = bank_for(a=TASK, b=TASK)
    before = weights(bank, "b")
    result = train(bank, {"a": TASK}, weight_decay=0.5)
    assert same(weights(bank, "b"), before)
    assert set(result.best) == {"a"}
    assert bank["b"].info == {}


def test_a_reader_of_pairs_says_so():
    task = pairs(train=4, validation=2)
    bank = bank_for(a=task)
    train(bank, {"a": task})
    assert bank["a"].info["pair"] is True


def test_random_numbers_of_the_caller_are_left_alone():
    before = torch.get_rng_state(), np.random.get_state()[1].tobytes()  # pyright: ignore
    train(bank_for(a=TASK), {"a": TASK})
    after = torch.get_rng_state(), np.random.get_state()[1].tobytes()  # pyright: ignore
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]


def test_the_same_seed_gives_the_same_weights_and_another_gives_others():
    def run(**options: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(random.randrange(10**6))
        bank = tiny_bank({"r": reader(TASK, dropout=0.3)})
        train(bank, {"r": TASK}, **options)
        return weights(bank)

    assert same(run(), run())
    assert not same(run(), run(seed=1))


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_bank_is_given_back(training: bool):
    bank = bank_for(a=TASK).train(training)
    train(bank, {"a": TASK})
    assert bank.training is training


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    train(bank_for(a=TASK), {"a": TASK}, save_steps=1)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_gets_the_bank_its_history_and_checkpoints(tmp_path: Path):
    bank = bank_for(a=TASK)
    result = train(bank, {"a": TASK}, output=tmp_path / "out", epochs=3)
    assert result.folder == tmp_path / "out"
    facts = json.loads((tmp_path / "out" / "history.json").read_text())
    assert facts == {"best": result.best, "test": {}, "history": result.history, "importances": result.importances}
    back = ReaderBank.from_pretrained(tmp_path / "out", tiny_model(), bank.processor)
    assert same(weights(back), weights(bank))
    newest = Checkpoints(tmp_path / "out" / "checkpoints", "fit").newest()
    assert newest is not None
    assert newest.name == "checkpoint-9"
    assert len(list(newest.parent.iterdir())) == 2


@pytest.mark.parametrize("what", ["foreign", "file", "link", "below a file"])
@pytest.mark.parametrize("whole_model", [False, True])
def test_a_folder_that_cannot_be_saved_to_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, whole_model: bool
):
    """With the error that saving gives, and before a grid's readers are in the bank."""
    target: Any = bert() if whole_model else bank_for(a=TASK)
    task, output = TASK if whole_model else {"a": TASK}, tmp_path / "out"
    if what == "foreign":
        output.mkdir()
        (output / ("config.json" if whole_model else "README.md")).write_text("mine")
    elif what == "link":
        output.symlink_to(tmp_path / "nowhere")
    else:
        output.write_text("mine")
    output = output / "below" if what == "below a file" else output
    with pytest.raises(StoreError) as saving:
        save(target, output) if whole_model else target.save_pretrained(output)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(training_run, "_specs", None)  # what comes next
    with pytest.raises(StoreError, match="save: ") as training:
        fit(target, task, output=output, processor=tiny_tokenizer(), progress=False)
    assert (type(training.value), str(training.value)) == (type(saving.value), str(saving.value))
    assert sorted(tmp_path.rglob("*")) == before


def test_progress_is_shown(capsys: pytest.CaptureFixture[str]):
    train(bank_for(a=TASK), {"a": TASK}, progress=True)
    shown = "".join(capsys.readouterr())
    assert "epoch 1: a 0." in shown
    train(bank_for(a=TASK), {"a": TASK})
    assert "".join(capsys.readouterr()) == ""


# Errors


def test_options_and_readers_there_are_not():
    bank = bank_for(mood=TASK)
    with pytest.raises(UnknownNameError, match=r"fit: unknown option 'epoch'; .*Did you mean 'epochs'"):
        train(bank, {"mood": TASK}, epoch=3)
    with pytest.raises(UnknownNameError, match=r"fit: unknown reader 'mod'; known: mood\. Did you mean 'mood'"):
        train(bank, {"mod": TASK})
    with pytest.raises(UnknownNameError, match="fit: epochs: unknown reader 'mod'"):
        train(bank, {"mood": TASK}, epochs={"mood": 1, "mod": 1})
    with pytest.raises(ConfigError, match="fit: learning_rate has no value for reader 'mood'"):
        train(bank, {"mood": TASK}, learning_rate={})
    with pytest.raises(ConfigError, match="fit: no task was given"):
        train(bank, {})


def test_options_that_cannot_be():
    bank = bank_for(mood=TASK)
    with pytest.raises(ConfigError, match="fit: resume is set but no output folder; checkpoints are saved in one"):
        train(bank, {"mood": TASK}, resume=True)
    with pytest.raises(ConfigError, match="fit: batch_size is 0; it must be at least 1"):
        train(bank, {"mood": TASK}, batch_size=0)
    with pytest.raises(ConfigError, match="max_length is 33; model and tokenizer take 1 to 32"):
        train(bank, {"mood": TASK}, max_length=33)
    with pytest.raises(ConfigError, match="they must agree"):
        train(bank, {"mood": names()})


def test_a_reader_that_has_nothing_to_learn_but_its_head():
    head = SequenceClassification(TASK.labels, pooling="mean")
    bank = tiny_bank({"r": Reader(Mean(), head)})
    result = train(bank, {"r": TASK})
    assert {row["importance"] for row in result.importances} == {0.25}


def test_a_base_in_half_precision_is_not_trained_along():
    model = tiny_model().half()
    bank = ReaderBank(model, tiny_tokenizer(), train_base=True)
    bank.add("mood", reader(yes_no()))
    with pytest.raises(ConfigError, match=r"fit: '.*' is in float16, in which small steps are lost"):
        fit(bank, {"mood": yes_no()}, epochs=1, progress=False)


def test_a_grid_that_cannot_begin_leaves_the_bank_as_it_was():
    bank = tiny_bank({"mood": reader(yes_no())})
    with pytest.raises(ConfigError, match="max_length"):
        fit(bank, {"mood": yes_no()}, grid={"mood": {"alpha": [1.0, 2.0]}}, max_length=99999, progress=False)
    assert list(bank) == ["mood"]
