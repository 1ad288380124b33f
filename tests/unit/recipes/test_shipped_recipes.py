"""The recipes that come along: each loads, dry-runs with no network, and has the sizes that its paper prints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support import shipped
from tests.support.portions import set_apart

if TYPE_CHECKING:
    from lamina.recipes.estimate import Estimate
    from lamina.recipes.schema import Recipe

ROOT = Path(__file__).parents[3]
FILES = [
    path.relative_to(ROOT / "recipes")
    for path in (ROOT / "recipes").rglob("*.yaml")
    if path.parent.name != "studies"  # those of `lamina study` are another kind
    and path.name != "halueval.yaml"  # whose rows are files; see test_halueval_recipe.py
    and not path.name.startswith("demo-")  # whose rows the demo makes; see tests/unit/studies/test_report_recipes.py
]
PATHS = sorted(path.as_posix() for path in FILES)
ALWAYS = {  # one of each kind; the dry runs of some take seconds
    "papers/adalayers/conll-bart.yaml",
    "papers/dwatt/table-2.yaml",
    "papers/partial-reinit/figure-1a.yaml",
    "small/few-shot-conll.yaml",
    "small/cola-sweep.yaml",
}
ADA, DWATT, INSERTION, REINIT = "papers/adalayers", "papers/dwatt", "papers/insertion", "papers/partial-reinit"
THESIS = tuple(f"{task}-{model}" for task in ("imdb", "cola", "conll") for model in ("roberta-large", "bart"))
LINEAR = 1024 * 9 + 9  # the head of every reader of CoNLL-2003 in the second paper


def sometimes(paths: list[str]) -> list[Any]:
    """Return the recipes as parameters: some for every run, one in four of the others for `make test-long`."""
    marks = {path: pytest.mark.full if number % 4 else pytest.mark.long for number, path in enumerate(paths)}
    return [pytest.param(path, marks=() if path in ALWAYS else mark) for path, mark in marks.items()]


def recipe(path: str) -> Recipe:
    return shipped.recipe(path.removesuffix(".yaml"))


def tried(path: str) -> Estimate:
    return shipped.tried(path.removesuffix(".yaml"))


def sizes(path: str) -> dict[str, int]:
    return {row["method"]: row["parameters"] for row in tried(path).runs}


def test_the_tables_and_figures_that_there_are():
    models = ("roberta-large", "bart")
    thesis = {f"{ADA}/{task}-{model}.yaml" for task in ("imdb", "cola", "conll") for model in models}
    figures = ("figure-2", "figure-3", "figure-4", "figure-5", "figure-6-feature-extraction", "figure-6-finetuning")
    more = ("figure-7-base", "figure-7-large", "figures-8-and-9", "table-2", "table-3")
    inserted = ("table-1", "table-2-cnn-dailymail", "table-2-wmt16-en-ro", "table-3-cifar100", "table-3-imagenet")
    inserted += ("table-4", "table-5", "table-9", "figure-3", "figure-4", "figure-6", "figures-3-and-6-masked-lm")
    reinit = ("figure-1a", "figure-1b", "figure-1c", "figure-1d", "figure-2")
    small = {f"small/{name}.yaml" for name in ("three-tasks", "few-shot-conll", "cola-sweep", "insertion")}
    tuned = {f"{INSERTION}/{name}.yaml" for name in inserted} | {f"{REINIT}/{name}.yaml" for name in reinit}
    assert thesis | {f"{DWATT}/{name}.yaml" for name in (*figures, *more)} | tuned | small <= set(PATHS)


@pytest.mark.parametrize("path", sometimes(PATHS))
def test_a_recipe_is_estimated_without_network(path: str):
    found = tried(path)
    assert found.flops["total"] == found.flops["base"] + found.flops["runs"]
    assert (found.flops["base"] > 0) != bool(recipe(path).methods)
    assert min(row["steps"] for row in (*found.tasks, *found.runs)) > 0
    assert min(row["flops"] for row in found.runs) > 0
    assert {row["task"] for row in found.runs} == {row["task"] for row in found.tasks} == set(recipe(path).tasks)


@pytest.mark.parametrize("path", PATHS)
def test_a_recipe_begins_with_its_command(path: str):
    lines = (ROOT / "recipes" / path).read_text(encoding="utf-8").splitlines()
    header = [line for line in lines if line.startswith("#")]
    assert lines[: len(header)] == header
    assert sum(f"lamina train recipes/{path} " in line for line in header) == 1


@pytest.mark.parametrize("path", sometimes([path for path in PATHS if path.startswith("papers/")]))
def test_a_paper_s_recipe_carries_its_architecture(path: str):
    assert tried(path).model["config"] == "that of the recipe, since the hub cannot be reached"


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        pytest.param("imdb-roberta-large", 355_359_744, marks=pytest.mark.long),
        ("conll-bart", 406_290_432),
    ],
)
def test_the_bases_are_the_published_ones(name: str, parameters: int):
    assert tried(f"{ADA}/{name}.yaml").model["parameters"] == parameters


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        pytest.param("imdb-roberta-large", 1_589_658, marks=pytest.mark.long),
        pytest.param("imdb-bart", 868_751, marks=pytest.mark.long),
        pytest.param("cola-roberta-large", 1_589_658, marks=pytest.mark.long),
        pytest.param("cola-bart", 868_751, marks=pytest.mark.long),
        pytest.param("conll-roberta-large", 3_739_937, marks=pytest.mark.long),
        ("conll-bart", 2_298_134),
    ],
)
def test_parameters_of_the_thesis(name: str, parameters: int):
    assert sizes(f"{ADA}/{name}.yaml")["AdaLayers"] == parameters


@pytest.mark.parametrize("name", set_apart(THESIS, *(name for name in THESIS if name != "conll-bart")))
def test_every_layer_of_the_base_is_a_baseline(name: str):
    layers = [row["settings"]["fusion.layer"] for row in tried(f"{ADA}/{name}.yaml").runs if row["settings"]]
    assert layers == list(range(13 if name.endswith("bart") else 25))


@pytest.mark.parametrize(("method", "parameters"), [("Base", 0), ("RoBERTa+2", 25_192_448), ("Average", 0),
                                                    ("Concat", 25_165_824), ("DWAtt", 26_326_528)])  # fmt: skip
def test_parameters_of_table_2(method: str, parameters: int):
    assert sizes(f"{DWATT}/table-2.yaml")[method] == parameters + LINEAR


@pytest.mark.long
def test_the_few_shot_runs_are_those_of_figure_3():
    found = tried(f"{DWATT}/figure-3.yaml")
    assert [row["rows"] for row in found.tasks] == [32, 64, 128, 256, 512]
    assert {row["repeats"] for row in found.tasks} == {5}
    shown = {(row["method"], row["epochs"], row["count"]) for row in found.runs}
    assert shown == {(m, e, 5) for m in ("RoBERTa+2", "Concat", "DWAtt") for e in (25, 50, 75, 100)}


@pytest.mark.long
def test_the_few_shot_runs_of_figure_5_have_fewer_rows():
    assert [row["rows"] for row in tried(f"{DWATT}/figure-5.yaml").tasks] == [24, 48, 96, 192, 384]


@pytest.mark.long
def test_masked_language_modelling_is_tested_on_the_test_part():
    found = recipe(f"{DWATT}/table-3.yaml")
    assert (found.evaluate, found.fit["batch_size"]) == ("test", 8)
    assert {row["kind"] for row in tried(f"{DWATT}/table-3.yaml").tasks} == {"masked_lm"}


def test_the_small_twins():
    few, sweep = tried("small/few-shot-conll.yaml"), tried("small/cola-sweep.yaml")
    assert [row["rows"] for row in few.tasks] == [32, 128, 512]
    assert {(row["method"], row["count"]) for row in few.runs} == {
        (method, 5) for method in ("last layer", "Base+1", "Concat", "DWAtt", "AdaLayers")
    }
    assert len(sweep.runs) == 27
    assert sweep.runs[0]["settings"].keys() == {"fusion.alpha", "fusion.entropy", "fusion.dim"}


# Recipes that fine-tune the model: inserted layers

TABLE_9_DEPTHS, TABLE_9_RUNS = ("table-9", 12, 10), ("table-9", 6, 248)
CURVES = ("figure-3", "figure-6", "figures-3-and-6-masked-lm")
DEBERTA, T5 = 435_063_810, 223_495_682  # table 8, with two classes
ADDED = {"deberta": (4_718_592, 25_165_824), "t5": (5_308_416, 14_155_776), "vit": (1_769_472, 7_077_888)}


def methods(path: str, task: str) -> dict[tuple[str, str | None, str | None], tuple[int, int, int]]:
    """Method, position and layers to parameters before the edits, those that they add, and those that are trained."""
    rows = [row for row in tried(path).runs if row["task"] == task]
    keys = [
        (row["method"], row["settings"].get("insert.position"), row["settings"].get("insert.layers")) for row in rows
    ]
    sizes = [(row["parameters"] - row["added"], row["added"], row["trained"]) for row in rows]
    found = dict(zip(keys, sizes, strict=True))
    assert set(found.items()) == set(zip(keys, sizes, strict=True))  # the other settings change no size
    return found


@pytest.mark.parametrize(
    ("name", "task", "base", "added", "layers"),
    [
        pytest.param("table-1", "cola", DEBERTA, ADDED["deberta"], "1-24", marks=pytest.mark.long),
        pytest.param("table-9", "cola", T5, ADDED["t5"], "1-12", marks=pytest.mark.long),
        pytest.param("table-2-wmt16-en-ro", "wmt16_en_ro", 222_903_552, ADDED["t5"], "1-12", marks=pytest.mark.long),
        pytest.param(  # printed: 577 positions, not 197
            "table-3-cifar100", "cifar100", 86_167_396 - 380 * 768, ADDED["vit"], None, marks=pytest.mark.long
        ),
    ],
)
def test_parameters_of_table_8(name: str, task: str, base: int, added: tuple[int, int], layers: str | None):
    found = methods(f"{INSERTION}/{name}.yaml", task)
    assert found["no insertion", None, None] == (base, 0, base)
    attention, ffn = added
    for method in ("without the method", "proposed"):
        for position, more in (("attention", attention), ("ffn", ffn), ("both", attention + ffn)):
            assert found[method, position, layers] == (base, more, base + more)


@pytest.mark.long
@pytest.mark.parametrize(("name", "depth", "part"), set_apart([("table-1", 24, 20), TABLE_9_DEPTHS], TABLE_9_DEPTHS))
def test_fewer_blocks_have_fewer_inserted_layers(name: str, depth: int, part: int):
    found = methods(f"{INSERTION}/{name}.yaml", "mrpc")
    for position in ("attention", "ffn", "both"):
        whole, some = (found["proposed", position, f"1-{top}"][1] for top in (depth, part))
        assert some * depth == whole * part


@pytest.mark.parametrize(
    ("name", "places", "classifier"),
    [
        pytest.param("table-1", 6, 2 * 1024 + 2, marks=pytest.mark.long),  # its pooler stays frozen
        pytest.param("table-9", 10, 768 * 768 + 768 + 2 * 768 + 2, marks=pytest.mark.long),
    ],
)
def test_the_frozen_variant_trains_what_is_inserted_and_the_classifier(name: str, places: int, classifier: int):
    found = methods(f"{INSERTION}/{name}.yaml", "rte")
    frozen = {key: value for key, value in found.items() if key[0] == "frozen"}
    assert len(frozen) == places
    assert all(trained == added + classifier for _, added, trained in frozen.values())


@pytest.mark.long
def test_regression_has_one_class_less():
    assert methods(f"{INSERTION}/table-1.yaml", "stsb")["no insertion", None, None][0] == DEBERTA - 1025


@pytest.mark.long
@pytest.mark.parametrize(("name", "tasks", "runs"), set_apart([("table-1", 7, 152), TABLE_9_RUNS], TABLE_9_RUNS))
def test_the_searched_settings_of_table_7(name: str, tasks: int, runs: int):
    found = tried(f"{INSERTION}/{name}.yaml")
    assert [row["runs"] for row in found.tasks] == [runs] * tasks
    rates = {row["settings"]["learning_rate"] for row in found.runs}
    assert (rates, {row["epochs"] for row in found.runs}) == ({1.5e-5, 3e-5, 5e-5, 1e-4}, {15})
    assert {row["settings"]["warmup_steps"] for row in found.runs} == {50, 500}


@pytest.mark.long
def test_texts_are_written_for_15_thousand_steps():
    found = tried(f"{INSERTION}/table-2-cnn-dailymail.yaml")
    assert {row["steps"] for row in found.runs} == {15_000}
    assert (found.tasks[0]["tokens"], found.tasks[0]["target"]) == (512, 300)
    assert found.tasks[0]["steps_per_epoch"] == 2244


@pytest.mark.long
def test_images_have_384_pixels():
    assert tried(f"{INSERTION}/table-3-imagenet.yaml").tasks[0]["tokens"] == (384 // 16) ** 2 + 1


@pytest.mark.long
@pytest.mark.parametrize("name", set_apart(CURVES, *CURVES[:2]))
def test_curves_over_the_bottom_and_the_top_blocks(name: str):
    path = f"{INSERTION}/{name}.yaml"
    found = methods(path, next(iter(recipe(path).tasks)))
    block = 3 * 16 * 64 * 64
    added = {key: value[1] // block for key, value in found.items()}
    assert added.pop(("no insertion", None, None)) == 0
    points = {("bottom k", None, f"1-{k}"): k for k in range(4, 25, 4)}
    assert added == points | {("top k", None, f"{25 - k}-24"): k for k in range(4, 25, 4)}


@pytest.mark.long
def test_hidden_tokens_are_predicted_by_accuracy():
    path = f"{INSERTION}/figures-3-and-6-masked-lm.yaml"
    rows = [(row["kind"], row["rows"], row["tokens"]) for row in tried(path).tasks]
    assert rows == [("masked_lm", 3668, 53), ("masked_lm", 8551, 12)]  # rows, not blocks
    assert {task.metric for task in recipe(path).tasks.values()} == {"accuracy"}


# Partial re-initialisation and probing


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("figure-1a", [67349, 6735, 673]),
        pytest.param("figure-1b", [104743, 10474, 1047], marks=pytest.mark.long),
        pytest.param("figure-1c", [673, 628], marks=pytest.mark.long),
        pytest.param("figure-1d", [8551, 855, 86], marks=pytest.mark.long),
    ],
)
def test_from_no_block_to_all_of_them_starts_anew(name: str, rows: list[int]):
    path = f"{REINIT}/{name}.yaml"
    found = tried(path)
    assert [row["rows"] for row in found.tasks] == rows
    assert {(row["parameters"], row["added"], row["trained"]) for row in found.runs} == {(109_483_778, 0, 109_483_778)}
    first = [row["settings"]["reinit.layers"] for row in found.runs if row["task"] == found.tasks[0]["task"]]
    assert first == [None, "12", *(f"{low}-12" for low in range(11, 0, -1))]
    (method,) = recipe(path).methods.values()
    assert method.edits == [{"reinit": {"scope": "linear", "std": 0.02, "bound": 2, "norms": "reset"}}]
    assert (recipe(path).fit["learning_rate"], recipe(path).fit["epochs"]) == (2e-5, 3)


@pytest.mark.long
def test_probes_train_the_classifier_alone():
    found = tried(f"{REINIT}/figure-2.yaml")
    classifier, block = 2 * 768 + 2, 7_087_872  # the pooler stays frozen
    assert {row["trained"] for row in found.runs} == {classifier}
    for row in found.runs:
        assert row["parameters"] == 109_483_778 - (12 - row["settings"]["truncate.keep"]) * block
