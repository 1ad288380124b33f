"""The study `removal`: passes without some blocks, what is lost, and what proxies predict."""

from __future__ import annotations

import copy
import inspect
import math
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tests.support.masked import masked_model, masking_tokenizer
from tests.support.portions import one_in
from tests.support.stored import save_base, tiny_model, tiny_tokenizer
from tests.support.tiny import READABLE, model_of
from transformers import BertForMaskedLM, FNetConfig, FNetModel

from lamina import Task, tap, truncate_
from lamina.errors import ConfigError, UnsupportedModelError
from lamina.layers import stacks
from lamina.studies import removal
from lamina.studies.cutting.removal import skipping, with_predictions
from lamina.studies.states import lens as lens_module
from lamina.studies.states.lens import lens

ROWS = [
    {"sentence": f"the {noun} is {word}", "label": int(word in ("good", "fun"))}
    for noun in ("film", "paris", "anna", "zebra")
    for word in ("good", "bad", "fun", "slow")
]
TEXTS = [row["sentence"] for row in ROWS]


def task() -> Task:
    return Task.from_dataset("sequence_classification", {"train": ROWS, "validation": ROWS})


@pytest.mark.parametrize("name", one_in(20, [name for name, family in READABLE.items() if family.blocks], 3))
@torch.no_grad()
def test_a_block_that_is_left_out_returns_its_input(name: str):
    family, model = READABLE[name], model_of(name)
    inputs = family.inputs(model)
    for stack_name in family.stacks:
        stack = stacks(model)[stack_name]
        with tap(model, "all", stack=stack_name) as before:
            whole = model(**inputs)
        first = list(before.values())
        try:
            with skipping(model, stack, [1], op="removal"), tap(model, "all", stack=stack_name) as states:
                model(**inputs)
        except UnsupportedModelError as error:
            assert name in ("swin", "swinv2", "donut-swin", "maskformer-swin", "pvt_v2", "hiera"), error  # noqa: PT017
            continue
        assert torch.equal(states[1], states[0]) or torch.allclose(states[1], first[0], atol=1e-5)
        if stack.depth > 1:
            assert not torch.equal(states[2], first[2])
        again = model(**inputs)
        assert torch.equal(again[0], whole[0])


@torch.no_grad()
def test_without_the_top_block_a_model_is_the_truncated_one():
    model = tiny_model(3, BertForMaskedLM)
    cut = copy.deepcopy(model)
    truncate_(cut, 2)
    batch = tiny_tokenizer()(TEXTS, return_tensors="pt", padding=True)
    with skipping(model, stacks(model)["main"], [3], op="removal"):
        torch.testing.assert_close(model(**batch).logits, cut(**batch).logits, rtol=0, atol=0)


def test_drops_of_the_task_and_of_perplexity_stand_beside_predictions():
    model, tokenizer = masked_model(), masking_tokenizer()
    before = copy.deepcopy(model.state_dict())
    study = removal(model, {"mood": task()}, TEXTS, processor=tokenizer, runs=[1, 2], seeds=[0, 1], epochs=2)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    table = study.table
    scores = table[table["measure"] == "accuracy"]
    assert scores.groupby("seed").size().tolist() == [6, 6]  # whole, 3 single blocks, 2 runs of 2
    drops = table[table["measure"] == "drop"]
    assert set(drops["proxy"]) == {"block_influence", "cka_distance", "nu"}
    one = scores[(scores["seed"] == 1) & (scores["layer"] == 2) & (scores["blocks"] == 2)]["score"].iloc[0]
    whole = scores[(scores["seed"] == 1) & (scores["blocks"] == 0)]["score"].iloc[0]
    mood = drops[(drops["task"] == "mood") & (drops["proxy"] == "nu")]
    drop = mood[(mood["seed"] == 1) & (mood["layer"] == 2) & (mood["blocks"] == 2)]["score"].iloc[0]
    assert drop == pytest.approx(whole - one)

    cut = copy.deepcopy(model)
    truncate_(cut, 2)
    loss = lens(cut, TEXTS, processor=tokenizer, layers=[2]).table.set_index("measure").loc["loss", "score"]
    spoken = table[(table["task"] == "language model") & (table["measure"] == "perplexity")]
    assert spoken[spoken["layer"] == 3]["score"].iloc[0] == pytest.approx(math.exp(loss), rel=1e-5)
    assert len(table[table["measure"] == "rank_correlation"]) == 3 + 2  # nu is of classes alone
    assert any(sentence.startswith("mood: least is lost without block") for sentence in study.conclusions)
    assert len(study.rows("predicted and measured")) == 2 * 5 * 3 + 5 * 2


PAIRS = [(f"the {row['sentence'].split()[1]}", "is good") for row in ROWS]


@pytest.mark.parametrize(
    ("texts", "others"),
    [
        (TEXTS, [f"{text} fun" for text in TEXTS]),
        (TEXTS, TEXTS[::-1]),  # masks are drawn in the order of the texts
        (PAIRS, [f"{text} {pair}" for text, pair in PAIRS]),
        (PAIRS, [(f"{text} is", "good") for text, _ in PAIRS]),
    ],
    ids=["words", "order", "no pairs", "other parts"],
)
def test_cells_of_other_texts_do_not_resume(tmp_path, texts, others):
    options = {"processor": masking_tokenizer(), "runs": [1], "output": tmp_path}
    first = removal(masked_model(), texts=texts, **options)
    same = (list(text) if isinstance(text, tuple) else np.str_(text) for text in texts)
    again = removal(masked_model(), texts=same, resume=True, **options)
    pd.testing.assert_frame_equal(again.table, first.table)
    with pytest.raises(ConfigError, match="belongs to a study with other texts; resuming needs the same settings"):
        removal(masked_model(), texts=others, resume=True, **options)


def test_cells_of_another_head_do_not_resume_where_they_use_it(tmp_path):
    """Drops of a task are those of readers, which do not use the model's own head; perplexity uses it."""
    model, other = masked_model(), masked_model()
    with torch.no_grad():
        other.cls.predictions.transform.dense.weight.mul_(-1)
    options = {"processor": masking_tokenizer(), "runs": [1], "seeds": [0], "epochs": 1}
    removal(model, {"mood": task()}, output=tmp_path / "tasks", **options)
    removal(other, {"mood": task()}, output=tmp_path / "tasks", resume=True, **options)
    removal(model, texts=TEXTS, output=tmp_path / "texts", **options)
    removal(copy.deepcopy(model), texts=TEXTS, output=tmp_path / "texts", resume=True, **options)
    with pytest.raises(ConfigError, match="belongs to a study with other weights outside the layers"):
        removal(other, texts=TEXTS, output=tmp_path / "texts", resume=True, **options)


@pytest.mark.parametrize("on", ["tasks", "texts"])
def test_cells_of_a_model_with_another_setting_do_not_resume(tmp_path, on):
    other = masked_model()
    for layer in other.bert.encoder.layer:
        layer.output.LayerNorm.eps = 0.5
    read = {"tasks": {"mood": task()}} if on == "tasks" else {"texts": TEXTS}
    options = {"processor": masking_tokenizer(), "runs": [1], "seeds": [0], "epochs": 1, "output": tmp_path, **read}
    removal(masked_model(), **options)
    removal(masked_model(), resume=True, **options)
    with pytest.raises(ConfigError, match="belongs to a study with models"):
        removal(other, resume=True, **options)


@pytest.mark.long
def test_gaps_in_several_label_columns_are_masked():
    rows = [{**row, "other": None if number == 1 else row["label"]} for number, row in enumerate(ROWS)]
    splits = {"train": rows, "validation": [row for row in rows if row["other"] is not None]}
    tasks = {name: Task.from_dataset("sequence_classification", splits, label=name) for name in ("label", "other")}
    how = {"processor": tiny_tokenizer(), "runs": [1], "seeds": [0], "epochs": 1}
    study = removal(tiny_model(3), tasks, **how)
    assert study.settings["failures"] == []
    assert set(study.table["task"]) == {"label", "other"}
    with pytest.raises(ConfigError, match=r"all .* cells failed.*have no label"):  # alone, as in `fit`
        removal(tiny_model(3), tasks["other"], **how)


def fnet() -> Any:
    """A model without a mask, whose states depend on padding."""
    shape = {"vocab_size": len(tiny_tokenizer()), "hidden_size": 16, "intermediate_size": 16}
    torch.manual_seed(0)
    return FNetModel(FNetConfig(**shape, num_hidden_layers=3, max_position_embeddings=32, pad_token_id=0)).eval()


@pytest.mark.parametrize("make", [partial(tiny_model, 3), fnet], ids=["bert", "fnet"])
def test_block_influence_is_that_of_the_states_around_the_run(make):
    model, tokenizer = make(), tiny_tokenizer()
    reads = inspect.signature(model.forward).parameters
    rows = [{**row, "sentence": f"{row['sentence']}{' and fun' * (at % 3)}"} for at, row in enumerate(ROWS)]
    mood = Task.from_dataset("sequence_classification", {"train": rows, "validation": rows})
    study = removal(model, {"mood": mood}, processor=tokenizer, runs=[2], seeds=[0], epochs=1)
    rows = study.table.query("proxy == 'block_influence' and measure == 'drop'")
    cosines = []
    with torch.no_grad():
        for text in mood.split("train").texts:
            batch = {name: value for name, value in tokenizer(text, return_tensors="pt").items() if name in reads}
            states = model(**batch, output_hidden_states=True).hidden_states
            cosines.append(torch.cat([torch.cosine_similarity(states[i], states[i + 2], dim=-1) for i in (0, 1)]))
    np.testing.assert_allclose(
        rows.sort_values("layer")["predicted"].astype(float), 1 - torch.cat(cosines, dim=1).mean(1).numpy(), atol=2e-7
    )  # float32 near 1


def test_cells_of_a_model_by_name_resume(tmp_path):
    save_base(tmp_path / "base")
    options = {"runs": [1], "seeds": [0], "epochs": 1, "output": str(tmp_path / "out")}
    first = removal(str(tmp_path / "base"), {"mood": task()}, **options)
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "cells").iterdir()}
    again = removal(str(tmp_path / "base"), {"mood": task()}, resume=True, **options)
    pd.testing.assert_frame_equal(again.table, first.table)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "cells").iterdir()} == stamps
    other = Task.from_dataset("sequence_classification", {"train": ROWS[::-1], "validation": ROWS})
    with pytest.raises(ConfigError, match="belongs to a study with tasks"):
        removal(str(tmp_path / "base"), {"mood": other}, resume=True, **options)
    with pytest.raises(ConfigError, match=r"belongs to a study with tasks.*positive.*here"):
        removal(str(tmp_path / "base"), {"mood": replace(task(), positive=task().labels[0])}, resume=True, **options)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["blockbuster"])
    with pytest.raises(ConfigError, match=r"belongs to a study with processor \w+, here \w+"):
        removal(str(tmp_path / "base"), {"mood": task()}, processor=tokenizer, resume=True, **options)


@pytest.mark.long
def test_a_model_without_an_output_head_has_no_perplexity():
    study = removal(tiny_model(3), {"mood": task()}, TEXTS, processor=tiny_tokenizer(), seeds=[0], epochs=1)
    assert set(study.table["task"]) == {"mood"}


def test_a_length_that_is_named_twice_counts_once():
    study = removal(tiny_model(3), task(), processor=tiny_tokenizer(), runs=[2, 2], seeds=[0, 0], epochs=1)
    assert study.table.query("measure == 'accuracy'")["layer"].tolist() == [0, 1, 2]
    assert study.settings["runs"] == [2]


def test_nothing_to_measure_is_refused():
    model, tokenizer = tiny_model(3), tiny_tokenizer()
    with pytest.raises(ConfigError, match="removal: there is no task and no text"):
        removal(model, processor=tokenizer)
    with pytest.raises(ConfigError, match="removal: runs is 3; it must be at least 1 and at most 2"):
        removal(model, {"mood": task()}, processor=tokenizer, runs=[3])
    for option in ("max_length", "batch_size", "epochs"):
        with pytest.raises(ConfigError, match=rf"^removal: {option} is 0; it must be at least 1"):
            removal(model, {"mood": task()}, processor=tokenizer, **{option: 0})
    with pytest.raises(ConfigError, match=r"^removal: max_length is 0; it must be at least 1"):
        removal(model, texts=["good"], processor=tokenizer, max_length=0, epochs=0)  # no reader is trained
    with pytest.raises(ConfigError, match="removal: runs is empty"):
        removal(model, {"mood": task()}, processor=tokenizer, runs=())
    with pytest.raises(ConfigError, match="removal: seeds is empty"):
        removal(model, {"mood": task()}, processor=tokenizer, seeds=())


@pytest.mark.long
def test_a_cell_that_fails_is_in_the_settings_and_all_of_them_an_error(monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise ConfigError("no rows")

    model, tokenizer = tiny_model(3), tiny_tokenizer()
    one = Task.from_dataset("sequence_classification", {"train": ROWS, "validation": [ROWS[0]]})
    study = removal(model, {"mood": one}, processor=tokenizer, seeds=[0], epochs=1)
    (failure,) = study.settings["failures"]  # CKA needs four rows
    assert failure["key"] == {"task": "mood", "seed": None}
    assert "rows" in failure["error"]
    assert set(study.table["measure"]) == {"accuracy"}
    monkeypatch.setattr(sys.modules["lamina.studies.cutting.removal"], "fit", fails)
    with pytest.raises(ConfigError, match=r"removal: all 2 cells failed; the first, .*: no rows$"):
        removal(model, {"mood": one}, processor=tokenizer, seeds=[0], epochs=1)


def test_a_perplexity_of_nan_is_a_failed_cell_and_no_conclusion(monkeypatch: pytest.MonkeyPatch):
    calls = iter(range(9))

    def one_of_nan(*arguments: object, **options: object) -> object:
        study = lens(*arguments, **options)  # pyright: ignore
        table = study.table.assign(score=math.nan) if next(calls) == 1 else study.table  # without the first block
        return replace(study, table=table)

    monkeypatch.setattr(lens_module, "lens", one_of_nan)
    model, tokenizer = masked_model(), masking_tokenizer()
    study = removal(model, {"mood": task()}, TEXTS, processor=tokenizer, seeds=[0], epochs=1, new_tokens=0)
    (failure,) = study.settings["failures"]
    assert failure["key"] == {"task": "language model", "seed": None}
    assert "the loss at layer 3 is NaN, so there is no perplexity" in failure["error"]
    assert set(study.table["task"]) == {"mood"}
    assert "nan" not in " ".join(study.conclusions)


def test_a_proxy_without_spread_is_not_said_to_predict_anything():
    rows = [{"task": "a", "seed": 0, "layer": 0, "blocks": 0, "measure": "accuracy", "score": 0.9}]
    for layer in (1, 2, 3, 4, 5):
        place = {"task": "a", "seed": 0, "layer": layer, "blocks": 1}
        rows.append({**place, "measure": "accuracy", "score": 0.9 - layer / 10})
        rows.append({**place, "seed": None, "measure": "cka_distance", "score": float(layer)})
        rows.append({**place, "seed": None, "measure": "block_influence", "score": 1.0})
    table, conclusions = with_predictions(pd.DataFrame(rows))
    found = table[table["measure"] == "rank_correlation"].set_index("proxy")["score"]
    assert found["cka_distance"] == pytest.approx(1)
    assert math.isnan(found["block_influence"])
    assert "a: cka distance predicts the measured drop (rank correlation 1.00" in " ".join(conclusions)
    assert "a: whether block influence predicts the measured drop cannot be said (n = 5" in " ".join(conclusions)
    assert "least is lost without block 1, a drop of 0.100 (one value; no interval)" in conclusions[0]


@pytest.mark.parametrize(
    ("scores", "end"),
    [
        ((0.8, 0.79), "block 1, a drop of 0.105 (2 values; no interval)."),
        (
            (0.8, 0.79, 0.81),
            "block 1, a drop of 0.100 (95 % ± 0.025, n = 3 seeds; chosen by this score from 2 runs of blocks).",
        ),
        (
            (0.99, 1.0, 0.98),
            "block 1, a rise of 0.090 (95 % ± 0.025, n = 3 seeds; chosen by this score from 2 runs of blocks).",
        ),
        (
            (0.93, 0.9, 0.91),
            "block 1; the score cannot be told apart from the whole model's: a rise of 0.013 (95 % ± 0.038, ",
        ),
    ],
)
def test_a_drop_whose_interval_holds_0_is_not_a_fact(scores: tuple[float, ...], end: str):
    rows = [
        {"task": "a", "seed": seed, "layer": layer, "blocks": min(layer, 1), "measure": "accuracy", "score": score}
        for seed, least in enumerate(scores)
        for layer, score in enumerate((0.9, least, 0.1))
    ]
    assert f"a: least is lost without {end}" in with_predictions(pd.DataFrame(rows))[1][0]


def test_longer_runs_that_cost_more_are_no_prediction():
    """Within each length the order is the opposite of the predicted one."""
    rows = [{"task": "a", "seed": 0, "layer": 0, "blocks": 0, "measure": "accuracy", "score": 0.9}]
    for length in (1, 2, 3):
        for first in range(1, 8 - length):
            place = {"task": "a", "layer": first, "blocks": length}
            rows.append({**place, "seed": 0, "measure": "accuracy", "score": 0.9 - length / 5 - first / 100})
            rows.append({**place, "seed": None, "measure": "block_influence", "score": length - first / 100})
    table, conclusions = with_predictions(pd.DataFrame(rows))
    found = table[table["measure"] == "rank_correlation"].iloc[0]
    assert (found["score"], found["n"]) == (pytest.approx(-1), 15)
    assert "a: block influence contradicts the measured drop (rank correlation -1.00, p = 9.6e-07, n = 15" in (
        " ".join(conclusions)
    )


def test_a_mae_of_0_has_a_logarithm():
    scores = {(0, 0): 0.0, (1, 1): 0.0, (2, 1): 1.0}
    facts = {"task": "a", "seed": 0, "measure": "mae"}
    rows = [{**facts, "layer": first, "blocks": n, "score": score} for (first, n), score in scores.items()]
    rows += [{**facts, "measure": "nu", "layer": layer, "blocks": 1, "score": 0.0} for layer in (1, 2)]
    table, conclusions = with_predictions(pd.DataFrame(rows))
    assert conclusions[0].startswith("a: least is lost without block 1, a rise of log mae of 0.000 ")
    drops = table[table["measure"] == "drop"]["score"].tolist()
    assert drops == pytest.approx([0, 12 * math.log(10)])  # a mae below 1e-12 counts as 1e-12


@pytest.mark.parametrize("measure", ["perplexity", "mae"])
def test_where_lower_is_better_the_drop_is_the_rise_of_the_logarithm(measure: str):
    scores = {(0, 0): 2.0, (1, 1): 3.0, (2, 1): 8.0}
    facts = {"task": "a", "seed": 0}
    rows = [
        {**facts, "layer": layer, "blocks": blocks, "measure": measure, "score": score}
        for (layer, blocks), score in scores.items()
    ]
    rows += [{**facts, "layer": layer, "blocks": 1, "measure": "nu", "score": 0.0} for layer in (1, 2)]
    table, conclusions = with_predictions(pd.DataFrame(rows))
    assert table[table["measure"] == "drop"]["score"].tolist() == pytest.approx([math.log(1.5), math.log(4)])
    assert f"without block 1, a rise of log {measure} of 0.405" in conclusions[0]
