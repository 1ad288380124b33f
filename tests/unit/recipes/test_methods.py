"""From a recipe's methods to runs: edits, options, names and seeds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.finetuned import bert, tensors
from tests.support.training import same, tiny_tokenizer

import lamina
from lamina.errors import ConfigError, LaminaError, LayerIndexError, UnknownNameError
from lamina.recipes.methods import EDITS, Variant, apply_edits, load_for, plan_methods, sweep_methods
from lamina.recipes.schema import Recipe, load_recipe

ROOT = Path(__file__).parents[3]
INSERT = {"insert": {"position": "attention", "init": "xavier"}}


def recipe(methods: dict[str, Any], *, task: dict[str, Any] | None = None, **fields: Any) -> Recipe:
    tasks = {"cola": {"preset": "cola", **(task or {})}}
    return Recipe.model_validate({"model": "minilm", "tasks": tasks, "methods": methods, **fields})


def planned(methods: dict[str, Any], **fields: Any) -> list[Variant]:
    options = fields.pop("options", {})
    return list(plan_methods(recipe(methods, **fields), options).values())


def test_a_run_per_task_method_setting_and_seed():
    methods = {"plain": {}, "some edits": {"edits": [INSERT], "grid": {"insert.layers": [1, "1-2"], "beams": [1, 2]}}}
    found = plan_methods(recipe(methods, seeds=[3, 5]), {})
    assert list(found) == [variant.name for variant in found.values()]
    assert [name for name in found if "plain" in name] == ["cola-plain-3", "cola-plain-5"]
    edited = [found[f"cola-some-edits-{number:04}-3"] for number in range(4)]
    assert len(found) == 2 + 8
    settings = [(one.settings["insert.layers"], one.settings["beams"]) for one in edited]
    assert settings == [(1, 1), (1, 2), ("1-2", 1), ("1-2", 2)]
    assert edited[3].settings == {"method": "some edits", "insert.layers": "1-2", "beams": 2, "seed": 3}
    assert edited[3].edits == (("insert", {**INSERT["insert"], "layers": "1-2"}),)
    assert (edited[3].options["beams"], edited[3].seed, edited[3].options["seed"]) == (2, 3, 3)


def test_draws_have_rows_and_seeds_of_their_own():
    found = planned({"plain": {}}, task={"draw": {"rows": 8, "trials": 2}}, seeds=[0, 1])
    assert [one.name for one in found] == ["cola-plain-0-0", "cola-plain-0-1", "cola-plain-1-0", "cola-plain-1-1"]
    assert [one.trial for one in found] == [0, 1, 0, 1]
    assert len({one.seed for one in found}) == 4
    assert [one.settings["draw"] for one in found] == [0, 1, 0, 1]


def test_the_narrower_place_holds():
    def epochs(method: dict[str, Any], task: dict[str, Any]) -> Any:
        (one,) = planned({"a": method}, task=task, options={"epochs": 1, "batch_size": 7})
        assert one.options["batch_size"] == 7
        return one.options["epochs"]

    assert epochs({}, {}) == 1
    assert epochs({}, {"epochs": 2}) == 2
    assert epochs({"fit": {"epochs": 3}}, {"epochs": 2}) == 3
    assert epochs({"fit": {"epochs": 3}, "grid": {"epochs": [4]}}, {"epochs": 2}) == 4


def test_no_layers_leave_an_edit_out():
    methods = {
        "a": {"edits": [INSERT, {"merge": {}}], "grid": {"insert.layers": [None, 1]}},
        "b": {"edits": [{"truncate": {}}, {"reinit": {"layers": 1}}], "grid": {"truncate.keep": [None, 2]}},
    }
    assert [[name for name, _ in one.edits] for one in planned(methods)] == [
        ["merge"],
        ["insert", "merge"],
        ["reinit"],
        ["truncate", "reinit"],
    ]


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"edits": [{"insrt": {}}]}, r"recipe, methods\.a: unknown edit 'insrt'; known: insert, .*mean 'insert'"),
        ({"edits": [{"insert": {"layer": 1}}]}, r"methods\.a, insert: unknown argument 'layer'; .*mean 'layers'"),
        ({"edits": [{"insert": {"generator": 1}}]}, r"methods\.a, insert: unknown argument 'generator'"),
        ({"edits": [{"insert": {"model": 1}}]}, r"methods\.a, insert: unknown argument 'model'"),
        ({"grid": {"insert.layers": [1]}}, r"methods\.a\.grid: unknown key 'insert.layers'; known: .*epochs"),
        ({"edits": [INSERT], "grid": {"insert.layer": [1]}}, r"unknown argument 'layer'; .*Did you mean 'layers'"),
        ({"edits": [INSERT], "grid": {"layers": [1]}}, r"unknown key 'layers'; known: insert\.position, .*epochs"),
        ({"grid": {"epoch": [1]}}, r"methods\.a\.grid: unknown key 'epoch'; .*Did you mean 'epochs'"),
        ({"fit": {"epoch": 1}}, r"finetune: unknown option 'epoch'; .*Did you mean 'epochs'"),
    ],
)
def test_a_name_there_is_not(method: dict[str, Any], message: str):
    with pytest.raises(UnknownNameError, match=message):
        planned({"a": method})


def test_an_option_that_cannot_be_is_told_with_its_method():
    with pytest.raises(ConfigError, match=r"(?s)finetune: epochs is 0; it must be at least 1"):
        planned({"a": {"fit": {"epochs": 0}}})
    with pytest.raises(ConfigError) as caught:
        planned({"a": {"grid": {"learning_rate": ["1e-3"]}}})
    assert caught.value.__notes__ == ["recipe, methods.a"]


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"methods": {"a": {"fit": {"seed": 1}}}}, r"methods\.a\.fit"),
        ({"methods": {"a": {"grid": {"seed": [1, 2]}}}}, r"methods\.a\.grid"),
        ({"methods": {"a": {}}, "options": {"seed": 1}}, "fit"),
    ],
)
def test_seeds_have_one_place(fields: dict[str, Any], place: str):
    with pytest.raises(ConfigError, match=rf"recipe, {place}: seed is .*; the seeds of methods are the recipe's own"):
        planned(**fields)


def test_two_runs_of_one_name():
    with pytest.raises(ConfigError, match=r"methods\.a b: 'cola-a-b-0' is the name of another run too"):
        planned({"a-b": {}, "a b": {}})


def test_the_shipped_recipe_is_understood():
    made = load_recipe(ROOT / "recipes" / "small" / "insertion.yaml")
    found = plan_methods(made, made.fit)
    settings = sum(math.prod(map(len, method.grid.values())) for method in made.methods.values())
    assert len(found) == len(made.tasks) * len(made.seeds) * settings
    frozen = [one for one in found.values() if one.settings["method"].startswith("frozen")]
    assert [name for name, _ in frozen[0].edits] == ["insert", "freeze"]


# Edits


def variant(*edits: tuple[str, dict[str, Any]], seed: int = 0) -> Variant:
    return Variant("cola-a-0", "cola", 0, {"method": "a", "seed": seed}, edits, {})


def test_edits_are_made_in_their_order():
    model = bert()
    apply_edits(model, variant(("truncate", {"keep": 2}), ("insert", {"position": "ffn"}), ("freeze", {"layers": 1})))
    assert [one.kind for one in lamina.edits(model)] == ["truncate", "insert", "freeze"]
    assert model.config.num_hidden_layers == 2


def test_random_numbers_of_edits_are_those_of_the_seed():
    def edited(seed: int) -> dict[str, torch.Tensor]:
        model = bert()
        apply_edits(model, variant(("insert", {"init": "xavier"}), ("reinit", {"layers": 3}), seed=seed))
        return tensors(model)

    torch.manual_seed(0)
    state, first = torch.get_rng_state(), edited(0)
    torch.manual_seed(1)
    assert same(first, edited(0))
    assert not same(first, edited(1))
    torch.manual_seed(0)
    edited(0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (("freeze", {"train": "inserted"}), "freeze_: train is 'inserted', and the model has no inserted layers"),
        (("insert", {"layers": 9}), "insert_: layer 9 does not exist"),
        (("insert", {"layers": {"a": 1}}), "."),
        (("insert", {"position": 3}), "."),
        (("truncate", {"keep": "top"}), "."),
        (("truncate", {}), "recipe, methods.a, truncate: .*missing .*'keep'.*; correct|Correct the value there"),
        (("reinit", {"layers": 1, "std": "wide"}), "."),
    ],
)
def test_an_edit_that_does_not_fit(edit: tuple[str, dict[str, Any]], message: str):
    with pytest.raises(LaminaError, match=message) as caught:
        apply_edits(bert(), variant(edit))
    assert "recipe, methods.a" in "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


def test_an_edit_that_names_a_missing_layer_says_where():
    with pytest.raises(LayerIndexError) as caught:
        apply_edits(bert(), variant(("insert", {"layers": 9})))
    assert caught.value.__notes__ == ["recipe, methods.a, insert"]


def test_every_edit_of_lamina_can_be_asked_for():
    assert {f"{name}_" for name in EDITS} == {name for name in lamina.__all__ if name.endswith("_") and name[0] != "_"}


# Models


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "base"
    bert("AutoModel").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_a_model_is_loaded_with_the_head_and_the_edits(base: Path):
    made = recipe({"a": {}}).model_copy(update={"model": str(base)})
    one = variant(("insert", {"position": "ffn", "init": "xavier"}))
    torch.manual_seed(0)
    state = torch.get_rng_state()
    model: Any
    other: Any
    model, processor = load_for(made, one, kind="token_classification", labels=("a", "b", "c"))
    assert torch.equal(torch.get_rng_state(), state)
    assert type(model).__name__ == "BertForTokenClassification"
    assert model.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert [edit.kind for edit in lamina.edits(model)] == ["insert"]
    assert len(processor) == len(tiny_tokenizer())
    torch.manual_seed(1)
    again, _ = load_for(made, one, kind="token_classification", labels=("a", "b", "c"))
    other, _ = load_for(made, variant(seed=1), kind="token_classification", labels=("a", "b", "c"))
    assert same(tensors(model), tensors(again))
    assert not torch.equal(model.classifier.weight, other.classifier.weight)
    assert torch.equal(model.bert.embeddings.word_embeddings.weight, other.bert.embeddings.word_embeddings.weight)


def test_a_head_that_writes_gets_no_classes(base: Path):
    made = recipe({"a": {}}).model_copy(update={"model": str(base)})
    model, _ = load_for(made, variant(), kind="masked_lm", labels=("token",))
    assert type(model).__name__ == "BertForMaskedLM"
    assert model.config.num_labels == 2


def test_an_edited_model_is_loaded_with_its_edits(base: Path, tmp_path: Path):
    model = lamina.load(base)[0]
    lamina.insert_(model, "ffn", layers=1, init="xavier")
    lamina.save(model, tmp_path, tiny_tokenizer())
    made = recipe({"a": {}}).model_copy(update={"model": str(tmp_path)})
    found: Any
    found, processor = load_for(made, variant(), kind="sequence_classification", labels=["x", "y", "z"])
    mine, theirs = tensors(model), tensors(found.bert)
    assert all(torch.equal(theirs[key], value) for key, value in mine.items() if "inserted" in key)
    assert any("inserted" in key for key in mine)
    assert found.config.id2label == {0: "x", 1: "y", 2: "z"}
    assert processor is not None


def test_a_sweep_is_a_grid_of_every_method_that_has_its_keys():
    made = recipe({"plain": {}, "edited": {"edits": [INSERT], "grid": {"insert.layers": [1], "beams": [2]}}})
    swept = sweep_methods(made, {"insert.layers": ["1-2", 2], "learning_rate": [1e-3]})
    assert swept.methods["plain"].grid == {"learning_rate": [1e-3]}
    assert swept.methods["edited"].grid == {"beams": [2], "insert.layers": ["1-2", 2], "learning_rate": [1e-3]}
    assert sweep_methods(made, {"init": ["he"]}).methods["edited"].grid["insert.init"] == ["he"]
    with pytest.raises(UnknownNameError, match=r"sweep: unknown key 'insert\.layer'; .* Did you mean 'insert\.layers'"):
        sweep_methods(made, {"insert.layer": [1]})
    with pytest.raises(UnknownNameError, match=r"methods\.a: unknown edit 'inset'"):
        sweep_methods(recipe({"a": {"edits": [{"inset": {}}]}}), {"epochs": [1]})
