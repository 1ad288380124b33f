"""From a recipe to every single run: each task, reader or method, setting, seed and repeat once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tests.support.training import names, yes_no

from lamina.errors import ConfigError, UnknownNameError
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.mean import Mean
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.recipes.expand import expand_recipe, read_sweeps, with_sweep
from lamina.recipes.schema import Recipe, load_recipe, parse_recipe
from lamina.train.grid import RunSpec

ROOT = Path(__file__).parents[3]
ADA = {"fusion": {"name": "ada_layers", "dim": 8}}
INSERT = {"insert": {"position": "attention", "init": "xavier"}}


def recipe(readers: dict[str, Any], *, preset: str = "cola", seeds: tuple[int, ...] = (0,), **task: Any) -> Recipe:
    return parse_recipe(
        {"model": "m", "seeds": list(seeds), "tasks": {"a": {"preset": preset, "readers": readers, **task}}}
    )


def read(made: Recipe, options: dict[str, Any] | None = None, task: Any = None) -> dict[str, RunSpec]:
    return expand_recipe(made, options or {}, {"a": task or yes_no()})


def tuning(methods: dict[str, Any], *, task: dict[str, Any] | None = None, **fields: Any) -> Recipe:
    return parse_recipe(
        {"model": "m", "tasks": {"cola": {"preset": "cola", **(task or {})}}, "methods": methods, **fields}
    )


def test_options_are_those_of_a_fit_of_one_number():
    with pytest.raises(ConfigError, match=r"epochs is .*; give one number here"):
        read(recipe({"Ada": ADA}), {"epochs": {"a": 1}})
    with pytest.raises(ConfigError, match="recipe: seed is 5; methods take theirs from the recipe's 'seeds'"):
        tuned({"plain": {}}, {"seed": 5})
    (spec,) = tuned({"plain": {"fit": {"epochs": 7}}}, {"epochs": 1})
    assert spec.options["epochs"] == 7


def tuned(methods: dict[str, Any], options: dict[str, Any] | None = None, **fields: Any) -> list[RunSpec]:
    return list(expand_recipe(tuning(methods, **fields), options or {}).values())


# Readers


def test_a_run_for_every_reader_and_seed():
    found = read(recipe({"Ada": ADA, "the mean": {"fusion": "mean"}}, seeds=(0, 3)))
    assert list(found) == [spec.name for spec in found.values()]
    assert list(found) == ["a-Ada-0", "a-Ada-3", "a-the-mean-0", "a-the-mean-3"]
    spec = found["a-Ada-3"]
    assert (spec.task, spec.repeat, spec.edits) == ("a", 0, ())
    assert spec.settings == {"method": "Ada", "seed": 3}
    assert spec.reader is not None
    assert (spec.reader.fusion, spec.reader.seed) == (AdaLayers(dim=8), 3)
    assert spec.reader.head == SequenceClassification(("no", "yes"))
    mean = found["a-the-mean-0"].reader
    assert mean is not None
    assert mean.fusion == Mean()


def test_the_head_has_the_task_s_labels():
    made = recipe({"Ada": {**ADA, "head": {"feedforward": 12}}}, preset="conll2003")
    spec = read(made, task=names())["a-Ada-0"]
    assert spec.reader is not None
    assert spec.reader.head == TokenClassification(names().labels, feedforward=12)


def test_without_data_the_head_has_the_preset_s_labels():
    (spec,) = expand_recipe(recipe({"Ada": ADA}), {}).values()
    assert spec.reader is not None
    assert spec.reader.head == SequenceClassification(("unacceptable", "acceptable"))


def test_a_run_for_every_setting():
    grid = {"alpha": [1, 8], "epochs": [5, 6]}
    found = read(recipe({"Ada": {**ADA, "grid": grid}}, seeds=(0, 1)), {"epochs": 9})
    assert list(found) == [f"a-Ada_000{number}-{seed}" for number in (1, 2, 3, 4) for seed in (0, 1)]
    spec = found["a-Ada_0003-1"]
    assert spec.settings == {"method": "Ada", "fusion.alpha": 8, "epochs": 5, "seed": 1}
    assert spec.reader is not None
    assert (spec.reader.fusion.alpha, spec.options["epochs"], spec.reader.seed) == (8, 5, 1)  # pyright: ignore


def test_a_grid_over_seeds_takes_the_place_of_the_recipe_s():
    readers = read(recipe({"Ada": {**ADA, "grid": {"seed": [7, 8]}}}, seeds=(0, 1))).values()
    assert [spec.settings["seed"] for spec in readers] == [7, 8]
    assert [spec.reader.seed for spec in readers if spec.reader] == [7, 8]
    assert [spec.options["seed"] for spec in tuned({"m": {"grid": {"seed": [7, 8]}}}, seeds=[0, 1])] == [7, 8]


def test_every_repeat_has_readers_that_start_differently():
    found = read(recipe({"Ada": ADA}, seeds=(0, 1), subsample={"rows": 3, "repeats": 3}))
    assert [(name, spec.repeat, spec.settings["repeat"]) for name, spec in found.items()] == [
        (f"a-Ada-{seed}-{repeat}", repeat, repeat) for seed in (0, 1) for repeat in (0, 1, 2)
    ]
    seeds = [spec.reader.seed for spec in found.values() if spec.reader]
    assert len(set(seeds)) == 6
    assert seeds == [spec.settings["seed"] for spec in found.values()]


@pytest.mark.parametrize(
    ("reader", "task", "options", "epochs", "rate"),
    [
        ({}, {}, {}, None, None),
        ({}, {}, {"epochs": 9, "learning_rate": 0.9}, 9, 0.9),
        ({}, {"epochs": 8, "learning_rate": 0.8}, {"epochs": 9, "learning_rate": 0.9}, 8, 0.8),
        ({"learning_rate": 0.7}, {"epochs": 8, "learning_rate": 0.8}, {"epochs": 9}, 8, 0.7),
        ({"learning_rate": 0.7, "grid": {"epochs": [6], "learning_rate": [0.6]}}, {"epochs": 8}, {}, 6, 0.6),
    ],
)
def test_epochs_and_rate_of_the_closest_place(
    reader: dict[str, Any], task: dict[str, Any], options: dict[str, Any], epochs: int | None, rate: float | None
):
    (spec,) = read(recipe({"Ada": {**ADA, **reader}}, **task), options).values()
    assert (spec.options.get("epochs"), spec.options.get("learning_rate")) == (epochs, rate)


def test_two_runs_of_one_name():
    with pytest.raises(ConfigError, match=r"(?s)'a-Ada-0' is the name of another run too") as raised:
        read(recipe({"Ada": ADA, "Ada!": {"fusion": "mean"}}))
    assert raised.value.__notes__ == ["recipe, tasks.a.readers.Ada!"]
    with pytest.raises(ConfigError, match="'cola-a-b-0' is the name of another run too") as raised:
        tuned({"a-b": {}, "a b": {}})
    assert raised.value.__notes__ == ["recipe, methods.a b"]


@pytest.mark.parametrize(
    ("methods", "options", "message"),
    [
        ({"m": {}}, {"cache": "on"}, "cache is 'on'; a whole model has no use for it"),
        ({"m": {"fit": {"base_learning_rate": 0.1}}}, {}, "base_learning_rate is 0.1; a whole model has no use"),
        ({"m": {}}, {"prefix": "say: "}, "prefix is 'say: ' for a task of kind sequence_classification"),
        ({}, {"layer_decay": 0.5}, "layer_decay is 0.5; a bank whose base is frozen has no use for it"),
    ],
)
def test_options_that_training_would_refuse(methods: dict[str, Any], options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        tuned(methods, options) if methods else read(recipe({"Ada": ADA}), options)


def test_a_grid_may_switch_off_what_another_option_needs():
    grid = {"grid": {"weight_decay": [0.0, 0.01]}}
    specs = tuned({"m": grid}, {"weight_decay_on": "all"})
    assert [spec.options.get("weight_decay_on") for spec in specs] == [None, "all"] * (len(specs) // 2)
    steps = tuned({"m": {"grid": {"schedule": ["linear", "plateau"]}}}, {"plateau_factor": 0.1})
    assert [spec.options.get("plateau_factor") for spec in steps] == [None, 0.1] * (len(steps) // 2)
    with pytest.raises(ConfigError, match="fit: weight_decay_on is set and has no effect without weight_decay"):
        tuned({"m": {}}, {"weight_decay_on": "all"})


def test_readers_that_share_a_trained_base_end_together():
    readers = {"Ada": {**ADA, "grid": {"epochs": [1, 2]}}}
    fields = {"model": "m", "train_base": True, "tasks": {"a": {"preset": "cola", "readers": readers}}}
    with pytest.raises(ConfigError, match=r"the readers have \['1', '2'\] epochs; with train_base they share"):
        expand_recipe(parse_recipe(fields), {})
    assert len(expand_recipe(parse_recipe({**fields, "separately": True}), {})) == 2


def test_a_head_that_does_not_fit_the_data_is_told_with_its_reader():
    weights = {"files": {"train": "a.tsv"}, "readers": {"Ada": {**ADA, "head": {"class_weights": [1, 2, 3]}}}}
    made = parse_recipe({"model": "m", "tasks": {"a": weights}})
    with pytest.raises(ConfigError, match=r"class_weights are .* for 2 labels") as raised:
        read(made)
    assert raised.value.__notes__ == ["recipe, tasks.a.readers.Ada"]


# Methods


def test_a_run_per_task_method_setting_and_seed():
    methods = {
        "plain": {},
        "some edits": {"edits": [INSERT], "grid": {"insert.layers": [1, "1-2"], "save_steps": [1, 2]}},
    }
    found = expand_recipe(tuning(methods, seeds=[3, 5]), {})
    assert [name for name in found if "plain" in name] == ["cola-plain-3", "cola-plain-5"]
    edited = [found[f"cola-some-edits_{number:04}-3"] for number in (1, 2, 3, 4)]
    assert len(found) == 2 + 8
    settings = [(spec.settings["insert.layers"], spec.settings["save_steps"]) for spec in edited]
    assert settings == [(1, 1), (1, 2), ("1-2", 1), ("1-2", 2)]
    assert edited[3].settings == {"method": "some edits", "insert.layers": "1-2", "save_steps": 2, "seed": 3}
    assert edited[3].edits == (("insert", {**INSERT["insert"], "layers": "1-2"}),)
    assert (edited[3].options, edited[3].reader) == ({"save_steps": 2, "seed": 3}, None)


def test_repeats_have_rows_and_seeds_of_their_own():
    found = tuned({"plain": {}}, task={"subsample": {"rows": 8, "repeats": 2}}, seeds=[0, 1])
    assert [spec.name for spec in found] == ["cola-plain-0-0", "cola-plain-0-1", "cola-plain-1-0", "cola-plain-1-1"]
    assert [spec.repeat for spec in found] == [spec.settings["repeat"] for spec in found] == [0, 1, 0, 1]
    assert len({spec.options["seed"] for spec in found}) == 4


def test_the_narrower_place_holds():
    def epochs(method: dict[str, Any], task: dict[str, Any]) -> Any:
        (spec,) = tuned({"a": method}, {"epochs": 1, "batch_size": 7}, task=task)
        assert spec.options["batch_size"] == 7
        return spec.options["epochs"]

    assert epochs({}, {}) == 1
    assert epochs({}, {"epochs": 2}) == 2
    assert epochs({"fit": {"epochs": 3}}, {"epochs": 2}) == 3
    assert epochs({"fit": {"epochs": 3}, "grid": {"epochs": [4]}}, {"epochs": 2}) == 4


def test_no_layers_leave_an_edit_out():
    methods = {
        "a": {"edits": [INSERT, {"merge": {}}], "grid": {"insert.layers": [None, 1]}},
        "b": {"edits": [{"truncate": {}}, {"reinit": {"layers": 1}}], "grid": {"truncate.keep": [None, 2]}},
    }
    assert [[name for name, _ in spec.edits] for spec in tuned(methods)] == [
        ["merge"],
        ["insert", "merge"],
        ["reinit"],
        ["truncate", "reinit"],
    ]


def test_an_argument_that_an_edit_needs():
    with pytest.raises(ConfigError, match="truncate lacks 'keep'; it is required") as raised:
        tuned({"a": {"edits": [{"truncate": {}}]}})
    assert raised.value.__notes__ == ["recipe, methods.a"]


def test_the_shipped_recipe_is_understood():
    made = load_recipe(ROOT / "recipes" / "small" / "insertion.yaml")
    found = expand_recipe(made, made.fit)
    settings = sum(math.prod(map(len, method.grid.values())) for method in made.methods.values())
    assert len(found) == len(made.tasks) * len(made.seeds) * settings
    frozen = [spec for spec in found.values() if spec.settings["method"].startswith("frozen")]
    assert [name for name, _ in frozen[0].edits] == ["insert", "freeze"]


# Sweeps


def test_sweeps_are_read_as_numbers_words_and_lists():
    given = ["fusion.alpha=1,8,64", "fusion.entropy=0,1e-3", "layers=[1, 2],1-", "fusion=mean,ada_layers"]
    assert read_sweeps(given) == {
        "fusion.alpha": [1, 8, 64],
        "fusion.entropy": [0, 0.001],
        "layers": [[1, 2], "1-"],
        "fusion": ["mean", "ada_layers"],
    }


@pytest.mark.parametrize("given", ["alpha", "alpha=", "=1,2", "alpha=[1", ""])
def test_a_sweep_without_a_key_or_values(given: str):
    with pytest.raises(ConfigError, match="names no values; the form is key=value,value"):
        read_sweeps([given])


def test_a_sweep_that_comes_twice():
    with pytest.raises(ConfigError, match="sweep: 'alpha' occurs twice"):
        read_sweeps(["alpha=1", "alpha=2"])


def test_a_sweep_goes_to_every_reader_that_has_its_key():
    readers = {"Ada": {**ADA, "grid": {"fusion.dim": [4], "seed": [1, 2]}}, "one": {"fusion": "single_layer"}}
    swept = with_sweep(recipe({**readers, "mean": {"fusion": "mean"}}), {"dim": [8, 16], "fusion.alpha": [1.0]})
    grids = {method: reader.grid for method, reader in swept.tasks["a"].readers.items()}
    assert grids == {
        "Ada": {"seed": [1, 2], "fusion.dim": [8, 16], "fusion.alpha": [1.0]},
        "one": {"fusion.dim": [8, 16]},
        "mean": {},
    }


def test_a_sweep_takes_the_place_of_a_short_key_too():
    swept = with_sweep(recipe({"Ada": {**ADA, "grid": {"dim": [4], "alpha": [1]}}}), {"fusion.dim": [8]})
    assert swept.tasks["a"].readers["Ada"].grid == {"alpha": [1], "fusion.dim": [8]}


def test_two_sweeps_of_one_key_are_refused():
    with pytest.raises(ConfigError, match=r"sweep: dim, fusion\.dim set fusion\.dim more than once"):
        with_sweep(recipe({"Ada": ADA}), {"dim": [4], "fusion.dim": [8]})


def test_a_sweep_over_training_goes_to_every_reader():
    swept = with_sweep(recipe({"Ada": ADA, "mean": {"fusion": "mean"}}), {"epochs": [1, 2]})
    assert [reader.grid for reader in swept.tasks["a"].readers.values()] == [{"epochs": [1, 2]}] * 2


def test_a_sweep_goes_to_every_method_that_has_its_keys():
    made = tuning({"plain": {}, "edited": {"edits": [INSERT], "grid": {"insert.layers": [1], "num_beams": [2]}}})
    swept = with_sweep(made, {"insert.layers": ["1-2", 2], "learning_rate": [1e-3]})
    assert swept.methods["plain"].grid == {"learning_rate": [1e-3]}
    assert swept.methods["edited"].grid == {"num_beams": [2], "insert.layers": ["1-2", 2], "learning_rate": [1e-3]}
    assert with_sweep(made, {"init": ["he"]}).methods["edited"].grid["insert.init"] == ["he"]


def test_a_sweep_reads_values_as_a_recipe_file_does():
    given = ["a=1_000", "b='5',nan,inf,.inf"]
    assert read_sweeps(given) == {"a": ["1_000"], "b": ["5", "nan", "inf", math.inf]}


@pytest.mark.parametrize(
    ("sweeps", "message"),
    [
        ({"alpha": [1]}, r"sweep: unknown key 'alpha'; known: fusion, fusion\.layers"),
        ({"fusion": ["maen"]}, "sweep, tasks.a.readers.mean.grid.fusion: unknown name 'maen'.*Did you mean 'mean'"),
    ],
)
def test_a_sweep_over_a_name_that_does_not_exist(sweeps: dict[str, list[Any]], message: str):
    with pytest.raises(UnknownNameError, match=message):
        with_sweep(recipe({"mean": {"fusion": "mean"}}), sweeps)


@pytest.mark.parametrize(
    ("sweeps", "message"),
    [
        ({"dropout": [0.1]}, r"'dropout' may mean fusion\.dropout or head\.dropout"),
        ({"alpha": [-1]}, r"sweep, tasks\.a\.readers\.Ada\.grid\.fusion\.alpha: .*alpha is -1; it must be positive"),
    ],
)
def test_a_sweep_over_what_does_not_fit(sweeps: dict[str, list[Any]], message: str):
    with pytest.raises(ConfigError, match=message):
        with_sweep(recipe({"Ada": ADA}), sweeps)
