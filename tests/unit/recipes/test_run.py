"""Running recipes on a tiny base: what is trained, what is written, and what the tables say."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet
from tests.support.files import jsonl
from tests.support.film_recipes import ADA, FILES, LAST, METHODS, methods, recipe
from tests.support.portions import one_in
from tests.support.stored import save_base
from transformers import AutoTokenizer

from lamina.errors import ConfigError, StoreError
from lamina.prediction import evaluate
from lamina.recipes import run_recipe as runner
from lamina.recipes.estimate import estimate
from lamina.recipes.expand import expand_recipe
from lamina.recipes.load_tasks import load_task
from lamina.recipes.paper_tables import markdown, plus_minus, summaries
from lamina.recipes.run_recipe import RecipeResult, run_recipe
from lamina.recipes.schema import parse_recipe
from lamina.store import load, load_bank
from lamina.tasks import kind_of
from lamina.tasks.task import Task
from lamina.train.grid import RunSpec
from lamina.train.learner import Learner
from lamina.train.results import summarise


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, and a task: is the film good? A quarter of the test part is mislabelled."""
    folder = tmp_path_factory.mktemp("runner")
    save_base(folder / "base")
    for part, count in (("train", 24), ("validation", 8), ("test", 8)):
        wrong = [part == "test" and row % 4 == 0 for row in range(count)]
        rows = [
            f"the film is {'very ' * (row % 3)}{('bad', 'good')[row % 2]} .\t{('no', 'yes')[row % 2 ^ wrong[row]]}\n"
            for row in range(count)
        ]
        (folder / f"{part}.tsv").write_text("sentence\tlabel\n" + "".join(rows))
    return folder


@pytest.fixture(scope="module")
def swept(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RecipeResult, Path]:
    """Two settings of one reader and one reader without, two seeds each, scored on the test part too."""
    output = tmp_path_factory.mktemp("out")
    readers = {"Ada": {**ADA, "grid": {"alpha": [1, 8]}}, "last": LAST}
    made = recipe(folder, readers, seeds=[0, 1], evaluate="test")
    return run_recipe(made, data=folder, output=output), output


def test_every_reader_is_in_the_bank_and_in_the_rows(swept: tuple[RecipeResult, Path]):
    run, _ = swept
    names = {f"film-Ada_000{number}-{seed}" for number in (1, 2) for seed in (0, 1)} | {"film-last-0", "film-last-1"}
    assert run.bank is not None
    assert set(run.bank) == names == {row["reader"] for row in run.rows}
    assert {row["task"] for row in run.rows} == {"film"}
    assert run.steps == 6
    assert all(row.keys() >= {"accuracy", "f1", "mcc"} - {row["metric"]} for row in run.rows)


def test_a_test_part_that_is_not_scored_is_named(folder: Path, caplog: pytest.LogCaptureFixture):
    run_recipe(recipe(folder, {"last": LAST}), data=folder)
    (said,) = [text for text in caplog.messages if "test part" in text]
    assert said == "recipe: the test part of 'film' was not scored. Set evaluate: test, or use lamina evaluate."
    caplog.clear()
    run_recipe(recipe(folder, {"last": LAST}, evaluate="test"), data=folder)
    assert not any("test part" in text for text in caplog.messages)


def test_the_table_sums_the_readers_up(swept: tuple[RecipeResult, Path]):
    run, _ = swept
    assert [(row["method"], row["settings"]) for row in sorted(run.table, key=lambda row: str(row["settings"]))] == [
        ("Ada", {"fusion.alpha": 1}),
        ("Ada", {"fusion.alpha": 8}),
        ("last", {}),
    ]
    for row in run.table:
        mine = {one["reader"]: one for one in run.rows if one["reader"] in [each["reader"] for each in row["runs"]]}
        assert len(mine) == 2
        expected = summarise([one["score"] for one in mine.values()])
        assert (row["mean"], row["spread"], row["interval"]) == (expected.mean, expected.spread, expected.interval)
        tests = summarise([one["test"] for one in mine.values()])
        assert row["test"] == {"mean": tests.mean, "spread": tests.spread, "interval": tests.interval}
        others = summarise([one["mcc"] for one in mine.values()])
        assert row["scores"]["mcc"] == {"mean": others.mean, "spread": others.spread, "interval": others.interval}
        assert row["test_scores"]["mcc"]["mean"] == summarise([one["test_mcc"] for one in mine.values()]).mean
        assert [one["seed"] for one in row["runs"]] == [0, 1]
        assert row["best_epoch"] == sum(one["best_epoch"] for one in mine.values()) / 2
        assert {one["parameters"] for one in mine.values()} == {row["parameters"]}


def test_a_sweep_s_table_is_sorted(swept: tuple[RecipeResult, Path]):
    means = [row["mean"] for row in swept[0].table]
    assert means == sorted(means, reverse=True)


def test_the_test_part_is_scored_with_the_best_weights(swept: tuple[RecipeResult, Path], folder: Path):
    run, _ = swept
    task = load_task("film", recipe(folder, {"last": LAST}).tasks["film"], folder)
    assert run.bank is not None
    for row in run.rows:
        scores = evaluate(run.bank, {row["reader"]: task}, split="test")
        expected = scores[row["reader"]]
        others = {name: row[f"test_{name}"] for name in ("f1", "mcc", "macro_f1")}
        assert {"accuracy": row["test"], **others} == expected
    assert any(row["test"] != row["score"] for row in run.rows)


def test_what_is_written(swept: tuple[RecipeResult, Path]):
    run, output = swept
    assert json.loads((output / "table.json").read_text()) == json.loads(json.dumps(run.table))
    assert (output / "table.md").read_text() == markdown(run.table)
    rows = parquet.read_table(output / "table.parquet").to_pylist()
    assert [row["reader"] for row in rows] == [row["reader"] for row in run.rows]
    assert {row["fusion.alpha"] for row in rows} == {1, 8, None}
    assert rows[0].keys() >= {"method", "seed", "score", "test", "parameters", "stopped", "importances.1"}
    history = parquet.read_table(output / "importances.parquet").to_pylist()
    assert history == run.importances
    assert {(row["epoch"], row["layer"]) for row in history} == {(e, layer) for e in (1, 2) for layer in (1, 2, 3)}
    loaded = load_bank(output)
    assert run.bank is not None
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in run.bank.state_dict().items())


def test_an_empty_f1_is_explained():
    def row(task: str, **scores: float) -> Any:
        means = {name: {"mean": score, "spread": 0.0, "interval": None} for name, score in scores.items()}
        shared = {"method": "a", "settings": {}, "metric": "accuracy", "parameters": 1, "runs": [{}], "best_epoch": 1}
        return {"task": task, **shared, "mean": 0.5, "spread": 0.0, "interval": None, "scores": means}

    mood, topic, amount = row("mood", mcc=0.5), row("topic", f1=0.5, mcc=0.5), row("amount", pearson=0.5)
    assert markdown([mood, topic, amount]).splitlines()[-2:] == [
        "",
        "f1 is empty for mood: F1 is about one of two classes, and none is named. Set `positive` in the task, or "
        "read macro_f1.",
    ]
    for table in ([mood], [topic, amount]):
        assert "F1 is about" not in markdown(table)


def test_the_markdown_table(swept: tuple[RecipeResult, Path]):
    lines = markdown(swept[0].table).splitlines()
    scores = "metric | mean | spread | f1 | mcc | macro_f1 | test | test f1 | test mcc | test macro_f1"
    assert lines[0] == f"| task | reader | fusion.alpha | {scores} | runs | parameters |"
    assert lines[1] == "|" + "---|" * 15
    assert len(lines) == 5
    last = next(line for line in lines if "last" in line).split(" | ")
    assert (last[1], last[2], last[3], last[-2], last[-1]) == ("last", "", "accuracy", "2", "66 |")
    assert " ± " in last[4]


def test_repeats_have_rows_and_readers_of_their_own(folder: Path):
    sample = {"rows": 6, "repeats": 3}
    run = run_recipe(recipe(folder, {"last": LAST}, task={"subsample": sample}), data=folder)
    assert [(one["repeat"], one["seed"]) for one in run.table[0]["runs"]] == [(0, 0), (1, 1), (2, 2)]
    assert run.steps == 3 * 2 * 1
    assert run.bank is not None
    assert {run.bank[name].info["rows"] for name in run.bank} == {6}
    weights = [run.bank[name].state_dict()["head.output.weight"] for name in run.bank]
    assert not torch.equal(weights[0], weights[1])
    assert run.table[0]["interval"] is not None


def test_a_recipe_without_a_grid_keeps_its_order(folder: Path):
    run = run_recipe(recipe(folder, {"b": {**LAST, "learning_rate": 1e-9}, "a": LAST}, task={"epochs": 6}), data=folder)
    assert [row["method"] for row in run.table] == ["b", "a"]
    assert run.table[0]["mean"] < run.table[1]["mean"]
    assert [row["interval"] for row in run.table] == [None, None]


# Separate runs


@pytest.mark.long
@pytest.mark.parametrize("train_base", [pytest.param(False, marks=pytest.mark.full), True])
def test_separate_readers_start_from_the_same_base(folder: Path, train_base: bool, monkeypatch: pytest.MonkeyPatch):
    real, trained = runner.train, []
    monkeypatch.setattr(runner, "train", lambda bank, *a, **k: trained.append(bank.train_base) or real(bank, *a, **k))
    readers = {"one": LAST, "two": LAST, "three": {**ADA, "grid": {"epochs": [1, 2]}}}
    run = run_recipe(recipe(folder, readers, train_base=train_base, separately=True), data=folder)
    assert run.bank is None
    assert trained == [train_base] * 4
    found = {row["method"]: row for row in run.table if row["method"] != "three"}
    assert found["one"]["mean"] == found["two"]["mean"]
    assert [row["score"] for row in run.rows][:2] == [found["one"]["mean"]] * 2
    assert run.steps == 3 * (2 + 2 + 1 + 2)
    assert {row["reader"] for row in run.importances} == {"film-three_0001-0", "film-three_0002-0"}


@pytest.mark.long
def test_separate_readers_give_what_they_give_together(folder: Path):
    readers = {"Ada": ADA, "last": LAST}
    together, apart = (run_recipe(recipe(folder, readers, separately=way), data=folder) for way in (False, True))
    for one, other in zip(together.rows, apart.rows, strict=True):
        assert one["reader"] == other["reader"]
        assert one["score"] == pytest.approx(other["score"])
        assert one["importances"] == pytest.approx(other["importances"], abs=1e-5)


def test_separate_readers_go_on_where_a_run_ended(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = recipe(folder, {"Ada": ADA, "last": LAST}, separately=True)
    whole = run_recipe(made, data=folder)
    real, calls = runner.train, []

    def fails_second(bank: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(list(bank))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(bank, *args, **kwargs)

    monkeypatch.setattr(runner, "train", fails_second)
    with pytest.raises(KeyboardInterrupt):
        run_recipe(made, data=folder, output=tmp_path)
    assert not (tmp_path / "table.json").exists()
    resumed = run_recipe(made, data=folder, output=tmp_path, resume=True)
    assert calls == [["film-Ada-0"], ["film-last-0"], ["film-last-0"]]
    assert resumed.table == whole.table
    assert resumed.rows == whole.rows
    assert resumed.importances == whole.importances
    assert resumed.steps == whole.steps
    assert (tmp_path / "table.json").is_file()


@pytest.mark.long
def test_separate_readers_without_resume_start_afresh(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = recipe(folder, {"last": LAST}, separately=True)
    run_recipe(made, data=folder, output=tmp_path)
    calls = []
    real = runner.train
    monkeypatch.setattr(runner, "train", lambda bank, *a, **k: calls.append(list(bank)) or real(bank, *a, **k))
    run_recipe(made, data=folder, output=tmp_path)
    assert calls == [["film-last-0"]]


def test_separate_readers_of_another_run_are_refused(folder: Path, tmp_path: Path):
    made = recipe(folder, {"last": LAST}, separately=True)
    run_recipe(made, data=folder, output=tmp_path)
    with pytest.raises(ConfigError, match=r"film-last-0\.json belongs to a run with batch_size 8, here 4"):
        run_recipe(made, data=folder, output=tmp_path, resume=True, batch_size=4)


CHANGES: dict[str, tuple[Any, str]] = {
    "label": (lambda place: flip_label(place / "test.tsv"), "other labels in the test part of 'film'"),
    "text": (
        lambda place: replace_text(place / "train.tsv", "film", "plot"),
        "other texts in the train part of 'film'",
    ),
    "base": (lambda place: save_base(place / "base", seed=7), "other weights of the model"),
    "settings": (lambda place: set_in_config(place / "base", layer_norm_eps=0.5), "other settings of the model"),
    "tokenizer": (lambda place: add_word(place / "base"), "other tokenizer or processor"),
}


def set_in_config(base: Path, **settings: Any) -> None:
    config = json.loads((base / "config.json").read_text())
    assert not settings.items() <= config.items()
    (base / "config.json").write_text(json.dumps(config | settings))


def add_word(base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["blockbuster"])
    tokenizer.save_pretrained(base)


def replace_text(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new, 1))


def flip_label(path: Path) -> None:
    *others, last = path.read_text().splitlines()
    text, label = last.split("\t")
    path.write_text("\n".join([*others, f"{text}\t{'yes' if label == 'no' else 'no'}"]) + "\n")


@pytest.mark.parametrize("kind", one_in(3, ["readers", "methods"]))
@pytest.mark.parametrize("change", CHANGES)
def test_runs_that_ended_on_other_data_or_weights_are_refused(change: str, kind: str, folder: Path, tmp_path: Path):
    shutil.copytree(folder, place := tmp_path / "place")
    made = methods(place, {"plain": {}}) if kind == "methods" else recipe(place, {"last": LAST}, separately=True)
    run_recipe(made, data=place, output=tmp_path / "out", epochs=1)
    run_recipe(made, data=place, output=tmp_path / "out", epochs=1, resume=True)
    CHANGES[change][0](place)
    with pytest.raises(
        ConfigError,
        match=rf"recipe: .*-0\.json belongs to a run with {CHANGES[change][1]}; resuming needs the same settings",
    ):
        run_recipe(made, data=place, output=tmp_path / "out", epochs=1, resume=True)


@pytest.mark.parametrize(
    ("content", "what"),
    one_in(
        4,
        [
            ("", "is not JSON: "),
            ("[]", "is damaged or was written by another version of lamina"),
            ('{"run": {}, "rows": []}', "is damaged or was written by another version of lamina, in format None; "),
            (None, "does not hold what was saved: its checksum differs"),
        ],
    ),
)
def test_a_damaged_note_of_a_run_that_ended_is_refused(content: str | None, what: str, folder: Path, tmp_path: Path):
    made = recipe(folder, {"last": LAST}, separately=True)
    run_recipe(made, data=folder, output=tmp_path, epochs=1)
    note = tmp_path / "separate" / "film-last-0.json"
    note.write_text(note.read_text().replace('"score": ', '"score": 1') if content is None else content)
    with pytest.raises(StoreError, match=rf"recipe: .*film-last-0\.json cannot be used \(film-last-0\.json {what}"):
        run_recipe(made, data=folder, output=tmp_path, epochs=1, resume=True)


# Methods


@pytest.fixture(scope="module")
def tuned(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RecipeResult, Path]:
    output = tmp_path_factory.mktemp("tuned")
    return run_recipe(methods(folder, seeds=[0, 1], evaluate="test"), data=folder, output=output), output


def test_every_method_is_a_run_of_its_own(tuned: tuple[RecipeResult, Path]):
    run, output = tuned
    names = [f"film-{one}-{seed}" for one in ("plain", "more_0001", "more_0002") for seed in (0, 1)]
    assert [row["reader"] for row in run.rows] == names
    assert [row["epochs_run"] for row in run.rows] == [2, 2, 1, 1, 1, 1]
    assert run.steps == sum(3 * row["epochs_run"] for row in run.rows)
    assert run.bank is None
    assert {path.stem for path in (output / "separate").iterdir()} == set(names)
    plain, same, inserted = (run.rows[number]["parameters"] for number in (0, 2, 4))
    assert plain == same == inserted - 2 * 32 * 32
    assert all(0 <= row["test"] <= 1 for row in run.rows)


def test_the_table_of_methods(tuned: tuple[RecipeResult, Path]):
    run, output = tuned
    assert {(row["method"], row["settings"].get("insert.layers", "-")) for row in run.table} == {
        ("plain", "-"),
        ("more", None),
        ("more", "1-2"),
    }
    assert all(len(row["runs"]) == 2 and row["task"] == "film" for row in run.table)
    assert json.loads((output / "table.json").read_text()) == run.table
    written = parquet.read_table(output / "table.parquet").to_pylist()
    assert [row["score"] for row in written] == [row["score"] for row in run.rows]
    assert (
        (output / "table.md").read_text().startswith("| task | method | insert.layers | metric | mean | spread | f1 |")
    )


def test_the_best_model_of_a_task_is_kept(tuned: tuple[RecipeResult, Path], folder: Path):
    run, output = tuned
    assert [path.name for path in (output / "models").iterdir()] == ["film"]
    best = max(run.rows, key=lambda row: row["score"])  # the first of equals
    model, processor = load(output / "models" / "film", "sequence_classification")
    assert sum(one.numel() for one in model.parameters()) == best["parameters"]
    files: dict[str, Any] = {part: folder / name for part, name in FILES.items()}
    task = Task.from_files("sequence_classification", **files, metric="accuracy")
    found = evaluate(model, {"film": task}, processor=processor)
    assert found["film"]["accuracy"] == best["score"]


def test_every_task_has_a_best_model(folder: Path, tmp_path: Path):
    tasks = {name: {"files": FILES, "metric": "accuracy"} for name in ("film", "again")}  # which score the same
    run = run_recipe(methods(folder, {"plain": {}}, tasks=tasks), data=folder, output=tmp_path)
    assert run.rows[0]["score"] == run.rows[1]["score"]
    assert {path.name for path in (tmp_path / "models").iterdir()} == {"film", "again"}


@pytest.mark.long
def test_all_models_are_kept_or_none(folder: Path, tmp_path: Path):
    given = {"plain": {"fit": {"epochs": 1}}, "cut": {"edits": [{"truncate": {"keep": 1}}], "fit": {"epochs": 1}}}
    run_recipe(methods(folder, given, keep="all"), data=folder, output=tmp_path / "all")
    assert {path.name for path in (tmp_path / "all" / "models").iterdir()} == {"film-plain-0", "film-cut-0"}
    assert load(tmp_path / "all" / "models" / "film-cut-0")[0].config.num_hidden_layers == 1
    run_recipe(methods(folder, given, keep="none"), data=folder, output=tmp_path / "none")
    assert not (tmp_path / "none" / "models").exists()


def test_methods_are_scored_on_the_test_part_with_their_best_weights(folder: Path, monkeypatch: pytest.MonkeyPatch):
    kept: dict[str, Any] = {}
    real = runner.train

    def keeping(model: Any, tasks: Any, *args: Any, **options: Any) -> Any:
        kept.update(model=model, tasks=tasks, processor=options["processor"])
        return real(model, tasks, *args, **options)

    monkeypatch.setattr(runner, "train", keeping)
    run = run_recipe(methods(folder, {"plain": {}}, evaluate="test"), data=folder)
    found = evaluate(kept["model"], kept["tasks"], split="test", processor=kept["processor"])
    assert run.rows[0]["test"] == found["film-plain-0"]["accuracy"] <= 0.75  # a quarter of the test part is mislabelled


@pytest.mark.long
def test_heads_and_inserted_layers_start_from_the_seed_of_their_run(folder: Path, monkeypatch: pytest.MonkeyPatch):
    starts: list[dict[str, torch.Tensor]] = []
    real = runner.train

    def keeping(model: Any, *args: Any, **options: Any) -> Any:
        drawn = {name: value.clone() for name, value in model.state_dict().items() if name.endswith("weight")}
        starts.append({name: value for name, value in drawn.items() if "classifier" in name or "inserted" in name})
        return real(model, *args, **options)

    monkeypatch.setattr(runner, "train", keeping)
    given = {"more": {"edits": METHODS["more"]["edits"], "fit": {"max_steps": 1}}}
    for seeds in ([0, 1], [0]):
        run_recipe(methods(folder, given, seeds=seeds), data=folder)
    first, other, again = starts
    assert len(first) > 1
    assert not any(torch.equal(value, other[name]) for name, value in first.items())
    assert all(torch.equal(value, again[name]) for name, value in first.items())


def test_methods_go_on_where_a_run_ended(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = methods(folder)
    whole = run_recipe(made, data=folder)
    real, calls = runner.train, []

    def fails_second(model: Any, *args: Any, **options: Any) -> Any:
        calls.append(model)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(model, *args, **options)

    monkeypatch.setattr(runner, "train", fails_second)
    with pytest.raises(KeyboardInterrupt):
        run_recipe(made, data=folder, output=tmp_path)
    assert not (tmp_path / "table.json").exists()
    resumed = run_recipe(made, data=folder, output=tmp_path, resume=True)
    assert len(calls) == 2 + 2
    assert len({id(model) for model in calls}) == 4
    assert (resumed.table, resumed.rows, resumed.steps) == (whole.table, whole.rows, whole.steps)


@pytest.mark.long
def test_methods_of_another_run_are_refused(folder: Path, tmp_path: Path):
    run_recipe(methods(folder, {"plain": {}}), data=folder, output=tmp_path)
    with pytest.raises(ConfigError, match=r"film-plain-0\.json belongs to a run with batch_size 8, here 4"):
        run_recipe(methods(folder, {"plain": {}}), data=folder, output=tmp_path, resume=True, batch_size=4)
    other = methods(folder, {"plain": {"edits": [{"freeze": {"layers": 1}}]}})
    with pytest.raises(ConfigError, match=r"film-plain-0\.json belongs to a run with edits \[\], here \[\['freeze'"):
        run_recipe(other, data=folder, output=tmp_path, resume=True)


@pytest.mark.long
def test_a_run_that_learnt_from_other_tokens_of_words_is_refused(folder: Path, tmp_path: Path):
    rows = [{"words": ["the", "film", word], "tags": ["O", "O", "B-x"]} for word in ("good", "bad") * 4]
    files = {part: str(jsonl(tmp_path / f"{part}.jsonl", rows)) for part in ("train", "validation")}
    task = {"files": files, "kind": "token_classification", "text": "words", "label": "tags"}
    first, other = (
        methods(folder, {"plain": {}}, tasks={"tags": {**task, "label_all_tokens": every}}) for every in (False, True)
    )
    run_recipe(first, data=tmp_path, output=tmp_path / "out", epochs=1)
    with pytest.raises(ConfigError, match=r"belongs to a run with label_all_tokens False, here True"):
        run_recipe(other, data=tmp_path, output=tmp_path / "out", epochs=1, resume=True)


def test_a_run_that_scored_another_positive_class_is_refused(folder: Path, tmp_path: Path):
    task = {"files": FILES, "metric": "accuracy"}
    first, other = (
        methods(folder, {"plain": {}}, tasks={"film": {**task, "positive": label}}) for label in ("yes", "no")
    )
    run_recipe(first, data=folder, output=tmp_path, epochs=1)
    with pytest.raises(ConfigError, match=r"belongs to a run with positive yes, here no"):
        run_recipe(other, data=folder, output=tmp_path, epochs=1, resume=True)


def test_a_freeze_that_depends_on_an_edit_that_is_left_out(folder: Path, tmp_path: Path):
    edits = [{"insert": {"init": "xavier"}}, {"freeze": {"train": "inserted"}}]
    made = methods(folder, {"frozen": {"edits": edits, "grid": {"insert.layers": [None]}}})
    with pytest.raises(ConfigError, match="freeze_: train is 'inserted', and the model has no inserted layers"):
        run_recipe(made, data=folder, output=tmp_path)


# A kill in the middle of a run


def killed_at(monkeypatch: pytest.MonkeyPatch, step: int) -> list[int]:
    """Have training end at a step; the list counts all steps that are taken."""
    real, steps = Learner.step, []

    def counting(self: Learner, *args: Any) -> None:
        steps.append(len(steps) + 1)
        if len(steps) == step:
            raise KeyboardInterrupt
        real(self, *args)

    monkeypatch.setattr(Learner, "step", counting)
    return steps


@pytest.mark.parametrize("kind", ["methods", pytest.param("separately", marks=pytest.mark.full)])
def test_a_run_that_is_killed_in_an_epoch_goes_on_where_it_was(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
):
    fit = {"epochs": 2, "batch_size": 4, "learning_rate": 0.01, "progress": False, "save_steps": 1}
    if kind == "methods":
        made = methods(folder, {"plain": {}, "again": {}}, fit=fit)
    else:
        made = recipe(folder, {"Ada": ADA, "last": LAST}, separately=True, fit=fit)
    whole = run_recipe(made, data=folder)
    steps = killed_at(monkeypatch, 12 + 4)  # 24 rows are 6 steps an epoch: in the second run's first epoch
    with pytest.raises(KeyboardInterrupt):
        run_recipe(made, data=folder, output=tmp_path)
    assert [path.suffix for path in sorted((tmp_path / "separate").iterdir())] in (
        [".json", ".checkpoints"],
        [".checkpoints", ".json"],
    )
    resumed = run_recipe(made, data=folder, output=tmp_path, resume=True)
    assert len(steps) == 24 + 1  # the step that failed is the only one that is taken twice
    assert (resumed.rows, resumed.table) == (whole.rows, whole.table)
    assert all(path.suffix == ".json" for path in (tmp_path / "separate").iterdir())


def test_long_epochs_have_checkpoints_though_a_recipe_does_not_ask(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runner, "SAVE_STEPS", 2)
    killed_at(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        run_recipe(methods(folder, {"plain": {}}), data=folder, output=tmp_path)
    (left,) = (tmp_path / "separate" / "film-plain-0.checkpoints").iterdir()
    assert left.name == "checkpoint-2"


def test_each_task_is_encoded_once(folder: Path, monkeypatch: pytest.MonkeyPatch):
    kind, parts = type(kind_of("sequence_classification")), []
    real = kind.encode

    def counting(self: Any, split: Any, processor: Any, options: Any) -> Any:
        parts.append(options.part)
        return real(self, split, processor, options)

    monkeypatch.setattr(kind, "encode", counting)
    run_recipe(methods(folder, {"plain": {}, "again": {}}), data=folder)
    assert sorted(parts) == ["train", "validation"]


# Bad input


def test_a_test_part_that_is_not_there(folder: Path, tmp_path: Path):
    files = {part: FILES[part] for part in ("train", "validation")}
    with pytest.raises(ConfigError, match="evaluate is test, but task 'film' has only train, validation"):
        run_recipe(recipe(folder, {"last": LAST}, task={"files": files}, evaluate="test"), data=folder, output=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_cutoff_that_would_remove_every_layer_ends_the_run_before_it_trains(folder: Path, tmp_path: Path):
    bad = {**ADA, "grid": {"cutoff": [0.0, 0.5]}}
    with pytest.raises(ConfigError, match=r"(?s)would remove every layer.*reader film-Ada_0002-0"):
        run_recipe(recipe(folder, {"Ada": bad}), data=folder, output=tmp_path)
    assert list(tmp_path.iterdir()) == []


# Tables by themselves


def planned(readers: dict[str, Any]) -> dict[str, RunSpec]:
    return expand_recipe(parse_recipe({"model": "m", "tasks": {"a": {"preset": "cola", "readers": readers}}}), {})


def rows_of(specs: dict[str, RunSpec], metric: str, scores: list[float]) -> list[dict[str, Any]]:
    shared = {"task": "a", "metric": metric, "best_epoch": 1, "parameters": 7}
    return [
        {"reader": name, **spec.settings, **shared, "score": score}
        for (name, spec), score in zip(specs.items(), scores, strict=True)
    ]


@pytest.mark.parametrize(("metric", "order"), [("mcc", [0.9, 0.7, 0.5]), ("perplexity", [0.5, 0.7, 0.9])])
def test_settings_are_sorted_by_what_is_better(metric: str, order: list[float]):
    plans = planned({"Ada": {**ADA, "grid": {"alpha": [1, 2, 3]}}})
    table = summaries(rows_of(plans, metric, [0.5, 0.9, 0.7]), plans, {"a": [metric]})
    assert [row["mean"] for row in table] == order


def test_a_grid_over_seeds_is_one_setting():
    plans = planned({"Ada": {**ADA, "grid": {"seed": [4, 5, 6]}}})
    (row,) = summaries(rows_of(plans, "mcc", [0.1, 0.2, 0.3]), plans, {"a": ["mcc"]})
    assert (row["settings"], row["mean"], len(row["runs"])) == ({}, pytest.approx(0.2), 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_runs_without_a_finite_score_are_named(bad: float):
    plans = planned({"Ada": {**ADA, "grid": {"seed": [4, 5, 6]}}})
    with pytest.raises(ConfigError, match="2 of 3 values are not finite") as caught:
        summaries(rows_of(plans, "mcc", [0.1, bad, bad]), plans, {"a": ["mcc"]})
    assert caught.value.__notes__ == [f"score of {', '.join(list(plans)[1:])}"]


def test_plus_minus():
    assert plus_minus({"mean": 0.5, "interval": None}) == "0.500"
    assert plus_minus({"mean": 0.5, "interval": 0.01234}) == "0.500 ± 0.012"


@pytest.mark.parametrize("function", [run_recipe, estimate])
def test_a_path_in_place_of_a_recipe_is_refused(function: Callable[[Any], object]):
    with pytest.raises(ConfigError, match=r"recipe is 'film\.yaml'; it must be a recipe from load_recipe"):
        function("film.yaml")
