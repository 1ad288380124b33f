"""What the papers' tasks learn from: rows or blocks of hidden tokens, first or all sub-tokens, pairs, languages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support import shipped
from tests.support.portions import set_apart

from lamina.errors import LaminaError
from lamina.recipes.estimate import Estimate, estimate
from lamina.recipes.expand import expand_recipe, with_sweep
from lamina.recipes.load_tasks import load_task, load_tasks
from lamina.recipes.schema import Recipe, parse_recipe

PAPERS = Path(__file__).parents[3] / "recipes" / "papers"
BERT = {
    "model_type": "bert",
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}


def recipe(path: str) -> Recipe:
    return shipped.recipe(f"papers/{path}")


def tried(path: str) -> Estimate:
    return shipped.tried(f"papers/{path}")


def tuned(tasks: dict[str, Any], **fields: Any) -> Recipe:
    given = {"model": "nobody/none", "architecture": BERT, "tasks": tasks, "methods": {"plain": {}}, **fields}
    return parse_recipe(given)


# Masked language modelling


@pytest.mark.long
def test_hidden_tokens_of_figures_3_and_6_are_of_rows():
    path = "insertion/figures-3-and-6-masked-lm"
    tasks = recipe(path).tasks.values()
    assert [(task.masked_lm and task.masked_lm.rows, task.metric) for task in tasks] == [(True, "accuracy")] * 2
    found = [(row["kind"], row["rows"], row["validation"], row["tokens"]) for row in tried(path).tasks]
    assert found == [("masked_lm", 3668, 408, 53), ("masked_lm", 8551, 1043, 12)]  # a pair of MRPC is one row


@pytest.mark.parametrize(
    ("given", "rows", "tokens"),
    [(True, 3038, 64), ({}, 3038, 64), ({"rows": False}, 3038, 64), ({"rows": True}, 3668, 53)],
)
def test_rows_or_blocks(given: Any, rows: int, tokens: int):
    found = tuned({"mrpc": {"preset": "mrpc", "masked_lm": given}})
    (row,) = estimate(found).tasks
    assert (row["kind"], row["rows"], row["tokens"]) == ("masked_lm", rows, tokens)
    again = with_sweep(found, {"learning_rate": [1e-4, 1e-5]})
    assert again.tasks["mrpc"].masked_lm == found.tasks["mrpc"].masked_lm


def test_without_hidden_tokens_a_task_is_what_it_is():
    for given in ({}, {"masked_lm": False}):
        found = tuned({"mrpc": {"preset": "mrpc", **given}})
        assert found.tasks["mrpc"].masked_lm is None
        assert estimate(found).tasks[0]["kind"] == "sequence_classification"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "masked_lm: masked_lm must be true, false or {rows: true}, not 3"),
        ({"row": True}, "unknown key 'row'; known: rows. Did you mean 'rows'"),
        ({"rows": "yes"}, "tasks.mrpc.masked_lm.rows: input should be a valid boolean"),
    ],
)
def test_what_masked_lm_may_be(given: Any, message: str):
    with pytest.raises(LaminaError, match=message):
        tuned({"mrpc": {"preset": "mrpc", "masked_lm": given}})


def test_rows_are_loaded_as_rows(tmp_path: Path):
    path = tmp_path / "pairs.tsv"
    path.write_text("a\tb\tlabel\none\ttwo\t0\nthree\tfour\t1\n", encoding="utf-8")
    files = {"train": path.name, "validation": path.name}
    body = {"files": files, "text": "a", "text_pair": "b", "masked_lm": {"rows": True}}
    task = load_task("pairs", tuned({"pairs": body}).tasks["pairs"], tmp_path)
    assert (task.kind, task.by_row) == ("masked_lm", True)
    assert task.split("train").texts == (("one", "two"), ("three", "four"))
    measured = estimate(tuned({"pairs": body}), data=tmp_path).tasks[0]
    assert (measured["rows"], measured["tokens"]) == (2, 5)  # two words, a third more of tokens, two special ones


# Sub-tokens, the space before a first word, and pairs

CONLL = {"files": {"train": "eng.train"}, "kind": "token_classification"}


def readers(**fields: Any) -> Recipe:
    body = {"readers": {"last": {"fusion": "last_layer", "head": {"encoder_layers": 0}}}, **fields}
    return parse_recipe({"model": "nobody/none", "architecture": BERT, "tasks": {"conll": body}})


@pytest.mark.parametrize("model", ["roberta-large", "bart"])
def test_the_thesis_learns_from_all_sub_tokens(model: str):
    found = recipe(f"adalayers/conll-{model}")
    assert found.tasks["conll2003"].label_all_tokens
    assert found.fit["add_prefix_space"] is True


DWATT = sorted(path.stem for path in (PAPERS / "dwatt").glob("*.yaml") if path.stem != "published")
RARE = ("figure-5", "figure-6-finetuning", "figure-7-base", "figures-8-and-9")  # their dry runs take seconds


@pytest.mark.long
@pytest.mark.parametrize("path", set_apart(DWATT, *RARE))
def test_dwatt_learns_from_first_sub_tokens(path: str):
    found = recipe(f"dwatt/{path}")
    assert not any(task.label_all_tokens for task in found.tasks.values())
    kinds = {row["kind"] for row in tried(f"dwatt/{path}").tasks}
    header = (PAPERS / "dwatt" / f"{path}.yaml").read_text(encoding="utf-8").partition("\nmodel:")[0]
    assert ("first sub-token" in " ".join(header.split("\n# "))) == (kinds == {"token_classification"})


def test_all_sub_tokens_are_of_tasks_with_tags(tmp_path: Path):
    (tmp_path / "eng.train").write_text("EU NNP I-NP B-ORG\n\nlamb NN I-NP O\n" * 5, encoding="utf-8")
    body = readers(**CONLL, label_all_tokens=True).tasks["conll"]
    assert load_task("conll", body, tmp_path).label_all_tokens
    preset = readers(preset="conll2003", label_all_tokens=True).tasks["conll"]
    (tmp_path / "conll2003").mkdir()
    (tmp_path / "eng.train").rename(tmp_path / "conll2003" / "eng.train")
    assert load_task("conll", preset, tmp_path).label_all_tokens
    with pytest.raises(LaminaError, match="label_all_tokens is set for a task of kind sequence_classification"):
        tuned({"mrpc": {"preset": "mrpc", "label_all_tokens": True}})


@pytest.mark.long
@pytest.mark.parametrize("name", ["cnn-dailymail", "wmt16-en-ro"])
def test_t5_writes_without_a_prefix_and_up_to_300_tokens(name: str):
    fit = recipe(f"insertion/table-2-{name}").fit
    assert (fit.get("prefix", ""), fit["max_target_length"]) == ("", 300)
    assert tried(f"insertion/table-2-{name}").tasks[0]["target"] == 300


def test_t5_reads_pairs_with_a_line_break_between():
    tasks = recipe("insertion/table-9").tasks
    joined = {name for name, task in tasks.items() if task.pair_separator == "\n"}
    assert joined == {"mrpc", "stsb", "qnli", "rte"}
    assert {task.pair_separator for name, task in tasks.items() if name not in joined} == {None}


def test_pairs_are_joined_as_the_recipe_says(tmp_path: Path):
    (tmp_path / "pairs.tsv").write_text("a\tb\tlabel\none\ttwo\t0\nthree\tfour\t1\n", encoding="utf-8")
    files = {"train": "pairs.tsv", "validation": "pairs.tsv"}
    body = {"files": files, "text": "a", "text_pair": "b", "pair_separator": " | "}
    task = load_task("pairs", tuned({"pairs": body}).tasks["pairs"], tmp_path)
    assert task.split("train").texts == ("one | two", "three | four")
    hidden = tuned({"pairs": {**body, "masked_lm": True}}).tasks["pairs"]
    assert load_task("pairs", hidden, tmp_path).split("train").texts == ("one | two", "three | four")


def test_joined_pairs_are_estimated_as_one_row():
    whole = {"preset": "mrpc", "masked_lm": True}
    apart, joined = (estimate(tuned({"m": {**whole, **more}})).tasks[0] for more in ({}, {"pair_separator": "\n"}))
    assert apart["rows"] == joined["rows"]  # blocks of as many tokens
    assert estimate(tuned({"m": {"preset": "mrpc", "pair_separator": "\n"}})).tasks[0]["rows"] == 3668


def test_single_texts_are_not_joined():
    with pytest.raises(
        LaminaError, match=r"tasks\.cola: 'pair_separator' is for pairs of texts; this task has one text"
    ):
        tuned({"cola": {"preset": "cola", "pair_separator": "\n"}})


# Memory that training keeps


def test_a_dry_run_says_what_the_gradients_keep():
    """Every state that AdaLayers reads, and what else the readers of IMDB keep, at 1,200 rows of 512 tokens."""
    found = tried("adalayers/imdb-roberta-large")
    states = 24 * 1024 * 4 * 1200 * 512
    assert found.kept_rows == 1200
    assert found.kept_bytes > states > 60e9


def test_the_batch_and_the_length_of_rows_decide_it():
    def kept(**fit: Any) -> tuple[int, int]:
        body = {"preset": "cola", "readers": {"ada": {"fusion": {"name": "ada_layers", "dim": 8}}}}
        given = {"model": "nobody/none", "architecture": BERT, "tasks": {"cola": body}, "fit": fit}
        found = estimate(parse_recipe(given))
        return found.kept_bytes, found.kept_rows

    small, large, long = kept(batch_size=10), kept(batch_size=1000), kept(batch_size=10, max_length=48)
    assert (small[1], large[1], long[1]) == (10, 1000, 10)
    assert 90 < large[0] / small[0] <= 100
    assert long[0] > 3.5 * small[0]  # four times the usual 12 tokens
    assert kept(batch_size=100_000)[1] == 8551  # there are no more rows


def test_readers_of_one_run_add_up_and_those_trained_alone_do_not():
    ada = {"fusion": {"name": "ada_layers", "dim": 8}}
    two = {"a": ada, "b": {**ada, "fusion": {"name": "ada_layers", "dim": 16}}}
    given = {"model": "nobody/none", "architecture": BERT, "tasks": {"cola": {"preset": "cola", "readers": two}}}
    together, apart = (estimate(parse_recipe({**given, "separately": alone})).kept_bytes for alone in (False, True))
    assert together > 1.2 * apart


def test_whole_models_are_not_counted():
    found = estimate(tuned({"cola": {"preset": "cola"}}))
    assert (found.kept_bytes, found.kept_rows) == (0, 0)


# Languages

WIKIANN = {"en": 20000, "de": 20000, "fi": 20000, "tr": 20000, "af": 5000, "sw": 1000, "te": 1000, "am": 100, "ps": 100,
           "ug": 100}  # training rows, as published  # fmt: skip


def test_languages_fit_the_tiers_of_table_1():
    tasks = recipe("dwatt/figures-8-and-9").tasks
    tiers: dict[str, list[int]] = {}
    for name, task in tasks.items():
        tier, language = name.split("-")
        assert task.preset == f"wikiann/{language}"
        tiers.setdefault(tier, []).append(WIKIANN[language])
    assert {tier: len(rows) for tier, rows in tiers.items()} == {"english": 1, "high": 3, "mid": 3, "low": 3}
    assert set(tiers["high"]) == {20000}
    assert all(1000 <= rows <= 5000 for rows in tiers["mid"])
    assert set(tiers["low"]) == {100}


@pytest.mark.long
def test_five_trials_have_other_rows_where_there_are_more_than_100_and_else_other_seeds():
    found = recipe("dwatt/figures-8-and-9")
    rows = {row["task"]: row for row in tried("dwatt/figures-8-and-9").tasks}
    specs = expand_recipe(found, {})
    for name, task in found.tasks.items():
        own = [spec for spec in specs.values() if spec.task == name and spec.settings["method"] == "DWAtt"]
        assert len({spec.settings["seed"] for spec in own}) == len(own) == 5
        assert [rows[name]["rows"], rows[name]["repeats"]] == [100, 1 if name.startswith("low") else 5]
        assert len({spec.repeat for spec in own}) == rows[name]["repeats"]
        assert (task.subsample is None) == name.startswith("low")
        assert {spec.reader and spec.reader.seed for spec in own} == {0, 1, 2, 3, 4}
    counts = {(row["task"], row["method"]): row["count"] for row in tried("dwatt/figures-8-and-9").runs}
    assert set(counts.values()) == {5}  # one row of the table each, of five runs


def test_repeats_that_draw_every_row_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "t.tsv").write_text("sentence\tlabel\n" + "good\t1\nbad\t0\n" * 5, encoding="utf-8")
    files = {"train": "t.tsv", "validation": "t.tsv"}
    for count, warned in ((10, True), (9, False)):
        caplog.clear()
        body = {"files": files, "subsample": {"rows": count, "repeats": 3}}
        tasks = load_tasks(tuned({"few": body}), tmp_path)["few"]
        assert [len(task.split("train")) for task in tasks] == [count] * 3
        message = "task few: all 10 rows are drawn, so its 3 repeats have the same rows and differ only in their seeds"
        assert (message in caplog.text) is warned
