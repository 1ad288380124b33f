"""The recipes of the insertion paper: what they start from, read, train and keep; on the real architectures."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support import shipped
from tests.support.portions import one_in, set_apart

from lamina.layers.discovery import same_stacks
from lamina.recipes.edits import apply_edits, config_of
from lamina.recipes.expand import expand_recipe
from lamina.recipes.model_size import Sizes
from lamina.train.options import FitOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.recipes.estimate import Estimate
    from lamina.recipes.schema import Recipe
    from lamina.train.grid import RunSpec

FOLDER = Path(__file__).parents[3] / "recipes/papers/insertion"
DEBERTA, VIT = "microsoft/deberta-v3-large", "google/vit-base-patch16-224-in21k"
DEBERTA_RECIPES = ("table-1", "table-4", "table-5", "figure-3", "figure-4", "figure-6")
SELDOM = [name for name in DEBERTA_RECIPES if name != "table-4"]  # whose dry runs need -m full
VIT_RECIPES = ("table-3-cifar100", "table-3-imagenet")
POSITIONS = ("attention", "ffn", "both")


def recipe(name: str) -> Recipe:
    return shipped.recipe(f"papers/insertion/{name}")


@cache
def specs(name: str) -> dict[str, RunSpec]:
    return expand_recipe(recipe(name), {})


def tried(name: str) -> Estimate:
    return shipped.tried(f"papers/insertion/{name}")


def header(name: str) -> str:
    lines = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    return " ".join(line.removeprefix("# ") for line in lines if line.startswith("#"))


def built(name: str, task: str) -> PreTrainedModel:
    """The recipe's model on the meta device, with the task's head; its stacks are found once per architecture."""
    outline = recipe(name).tasks[task].outline()
    sizes = Sizes(config_of(recipe(name).architecture or {}))
    model = sizes.model(outline.kind.auto_class, outline.labels).model
    own = copy.deepcopy(model)
    same_stacks(model, own)
    return own


def trained(model: PreTrainedModel) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def edited(name: str, task: str, method: str, **settings: Any) -> PreTrainedModel:
    """The model that a run starts to train: the first of a method and these settings of its grid."""
    wanted = {key.replace("_", ".", 1): value for key, value in settings.items()}
    spec = next(
        spec
        for spec in specs(name).values()
        if (spec.task, spec.settings["method"]) == (task, method) and wanted.items() <= spec.settings.items()
    )
    model = built(name, task)
    apply_edits(model, spec.edits, seed=0, where="here")
    return model


# What they start from and read


@pytest.mark.long
@pytest.mark.parametrize("name", set_apart(DEBERTA_RECIPES, *SELDOM))
def test_texts_start_from_the_pretrained_deberta(name: str):
    found = recipe(name)
    assert (found.model, found.revision) == (DEBERTA, None)
    config = config_of(found.architecture or {})
    assert (config.share_att_key, config.position_buckets, config.num_hidden_layers) == (True, 256, 24)
    assert {row["tokens"] for row in tried(name).tasks} <= {12, 13, 28, 37, 50, 53, 70}  # whole texts of up to 512
    assert "max_length" not in found.fit


@pytest.mark.long
@pytest.mark.parametrize("name", set_apart(VIT_RECIPES, "table-3-imagenet"))
def test_images_start_from_imagenet_21k_and_have_384_pixels(name: str):
    found = recipe(name)
    assert found.model == VIT  # which has no classifier, and positions of 224 pixels
    assert config_of(found.architecture or {}).image_size == 224
    (task,) = found.tasks.values()
    assert task.image_size == 384
    assert task.outline().image_size == 384
    assert [row["tokens"] for row in tried(name).tasks] == [(384 // 16) ** 2 + 1]
    assert {FitOptions.of(spec.options).augment for spec in specs(name).values()} == {False}


def test_parameters_of_the_vit_are_table_8_s_but_for_the_positions():
    """The paper counts 577 positions; interpolation keeps those of 224 pixels, 196 and that of the class token."""
    printed, kept = 86_167_396, (224 // 16) ** 2 + 1
    model = edited("table-3-cifar100", "cifar100", "no insertion")
    assert model.vit.embeddings.position_embeddings.shape == (1, kept, 768)
    assert model.num_parameters() == printed - (577 - kept) * 768
    assert "(86,167,396 with 577 positions and 100 classes)" in header("table-3-cifar100")


GLUE = {"cola": (8551, 1043), "sst2": (67349, 872), "mrpc": (3668, 408), "stsb": (5749, 1500), "qnli": (104743, 5463),
        "rte": (2490, 277), "wnli": (635, 71)}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", set_apart(DEBERTA_RECIPES, *SELDOM))
def test_glue_is_learnt_whole_and_scored_on_its_validation_part(name: str):
    assert recipe(name).evaluate is None
    for task in tried(name).tasks:
        assert (task["rows"], task["validation"]) == GLUE[task["task"]]


def test_table_1_has_all_of_glue():
    assert list(recipe("table-1").tasks) == list(GLUE)


@pytest.mark.long
def test_image_sets_are_split_as_their_headers_say():
    (cifar,), (imagenet,) = tried("table-3-cifar100").tasks, tried("table-3-imagenet").tasks
    assert (cifar["rows"], cifar["validation"]) == (45_000, 5_000)
    assert (recipe("table-3-cifar100").evaluate, recipe("table-3-imagenet").evaluate) == ("test", None)
    assert (imagenet["rows"], imagenet["validation"]) == (1_281_167, 50_000)


@pytest.mark.parametrize("name", [*DEBERTA_RECIPES, *VIT_RECIPES])
def test_the_best_epoch_is_kept(name: str):
    assert {FitOptions.of(spec.options).keep for spec in specs(name).values()} == {"best"}
    tasks = recipe(name).tasks.values()
    assert {task.metric for task in tasks} == {None}  # by the paper's own metric, as the presets have it
    assert {FitOptions.of(spec.options).early_stopping_patience for spec in specs(name).values()} == {None}


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("table-1", 1064),  # 7 tasks, 4 rates, 2 warm-ups: once without, and 3 methods x 3 positions x 2 depths
        ("table-2-cnn-dailymail", 42),
        ("table-2-wmt16-en-ro", 42),
        ("table-3-cifar100", 14),
        ("table-3-imagenet", 14),
        ("table-4", 48),
        ("table-5", 80),
        ("figure-3", 52),
        ("figure-4", 104),
        ("figure-6", 52),
        ("figure-5", 2),
        ("table-9", 1488),  # 6 tasks, 4 rates, 2 warm-ups: once without, and 3 methods x 5 positions x 2 depths
        ("figures-3-and-6-masked-lm", 104),
        ("later-runs", 36),
    ],
)
def test_how_many_models_are_trained(name: str, runs: int):
    assert len(specs(name)) == runs
    assert len({(spec.task, str(spec.settings)) for spec in specs(name).values()}) == runs


# Which parameters are trained

MORE_FROZEN = [("both", "1-24"), *((part, layers) for part in ("attention", "ffn") for layers in ("1-20", "1-24"))]


@pytest.mark.long
@pytest.mark.parametrize(
    ("position", "layers"),
    [
        ("both", "1-20"),
        *(pytest.param(*case, marks=pytest.mark.long) for case in MORE_FROZEN),
    ],
)
def test_the_frozen_variant_trains_the_inserted_layers_and_the_classifier(position: str, layers: str):
    depth = int(layers.partition("-")[2])
    model = edited("table-1", "rte", "frozen", insert_position=position, insert_layers=layers)
    places = {
        "attention": [f"attention.self.{part}_proj" for part in ("query", "key", "value")],
        "ffn": ["output.dense"],
    }
    roles = places.get(position, [*places["attention"], *places["ffn"]])
    inserted = {f"deberta.encoder.layer.{block}.{role}.inserted_0.weight" for block in range(depth) for role in roles}
    assert trained(model) == {*inserted, "classifier.weight", "classifier.bias"}
    assert not model.pooler.dense.weight.requires_grad


ATTENTION, FFN = 4_718_592, 25_165_824  # Table 8, of all 24 blocks
CLASSIFIER = {"stsb": 1024 + 1}  # else of two classes


@pytest.mark.long
@pytest.mark.parametrize("position", one_in(3, POSITIONS))
def test_a_frozen_row_of_table_1_trains_what_is_inserted_and_the_classifier(position: str):
    model = edited("table-1", "stsb", "frozen", insert_position=position, insert_layers="1-20")
    inserted = {"attention": ATTENTION, "ffn": FFN, "both": ATTENTION + FFN}[position] * 20 // 24
    assert model.num_parameters(only_trainable=True) == inserted + CLASSIFIER["stsb"]


@pytest.mark.long
@pytest.mark.parametrize("task", ["cola", "sst2", "mrpc", "stsb", "qnli", "rte", "wnli"])
def test_trained_counts_of_the_frozen_rows_of_table_1(task: str):
    """What a dry run prints for every position and depth."""
    rows = [row for row in tried("table-1").runs if (row["task"], row["method"]) == (task, "frozen")]
    found = {(row["settings"]["insert.position"], row["settings"]["insert.layers"]): row["trained"] for row in rows}
    whole = {"attention": ATTENTION, "ffn": FFN, "both": ATTENTION + FFN}
    head = CLASSIFIER.get(task, 2 * 1024 + 2)
    assert found == {
        (position, f"1-{depth}"): whole[position] * depth // 24 + head for position in POSITIONS for depth in (20, 24)
    }


@pytest.mark.long
def test_a_frozen_t5_trains_its_inserted_layers_and_its_classification_head():
    sizes = Sizes(config_of(recipe("table-9").architecture or {}))
    size = sizes.model("AutoModelForSequenceClassification", ("no", "yes"))
    freeze = ("freeze", {"train": ["inserted", "classification_head"]})
    inserted = {"init": "xavier", "activation": "relu", "placement": "output", "stack": "all"}
    head = 768 * 768 + 768 + 2 * 768 + 2  # both of its maps have "classifi" in their name
    whole = {"attention": 5_308_416, "ffn": 14_155_776, "both": 19_464_192}
    for position, depth in (("attention", 12), ("ffn", 10), ("both", 12)):
        insert = ("insert", {"position": position, "layers": f"1-{depth}", **inserted})
        found = size.edited((insert, freeze), where="here")
        assert found.added == whole[position] * depth // 12
        assert size.parameters + found.added - found.frozen == found.added + head
    model = copy.deepcopy(size.model)
    same_stacks(size.model, model)
    apply_edits(model, [("insert", {"position": "ffn", "layers": "1", **inserted}), freeze], seed=0, where="here")
    heads = {name for name, _ in model.named_parameters() if name.startswith("classification_head.")}
    added = {f"transformer.{stack}.block.0.layer.{at}.DenseReluDense.wo.inserted_0.weight"
             for stack, at in (("encoder", 1), ("decoder", 2))}  # fmt: skip
    assert trained(model) == heads | added


@pytest.mark.parametrize("method", ["no insertion", "without the method", "proposed"])
def test_all_else_trains_everything(method: str):
    model = edited("table-1", "cola", method)
    assert trained(model) == {name for name, _ in model.named_parameters()}
    image = edited("table-3-imagenet", "imagenet", method)
    assert trained(image) == {name for name, _ in image.named_parameters()}


@pytest.mark.parametrize("position", POSITIONS)
def test_images_have_layers_in_all_twelve_blocks(position: str):
    model = edited("table-3-cifar100", "cifar100", "proposed", insert_position=position)
    added = {name for name in trained(model) if "inserted" in name}
    assert len(added) == 12 * {"attention": 3, "ffn": 1, "both": 4}[position]
    sizes = sum(parameter.numel() for name, parameter in model.named_parameters() if name in added)
    assert sizes == {"attention": 1_769_472, "ffn": 7_077_888, "both": 8_847_360}[position]


# What they say of themselves


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("table-1", ("75.87", "12.89", "14.23", "75.85", "74.28")),
        ("table-3-cifar100", ("92.81", "61.55", "82.18", "54.69", "92.62", "92.54", "92.77")),
        ("table-3-imagenet", ("83.99", "66.85", "81.01", "53.72", "84.28", "84.09", "84.22")),
        ("table-4", ("91.67", "73.33", "72.06", "65.24", "75.85")),
        ("table-5", ("72.55", "12.71", "91.67", "85.85", "75.85")),
        ("figure-3", ("90.93", "70.10")),
        ("figure-4", ("90.93", "75.87", "70.10", "91.67", "75.85")),
        ("figure-6", ("75.87",)),
    ],
)
def test_headers_give_the_paper_s_numbers(name: str, numbers: tuple[str, ...]):
    assert [number for number in numbers if number not in header(name)] == []


@pytest.mark.parametrize("name", [*DEBERTA_RECIPES, *VIT_RECIPES, "figure-5"])
def test_headers_name_the_departures_from_the_authors_code(name: str):
    told = header(name)
    if any("xavier" in str(body.edits) for body in recipe(name).methods.values()):
        assert "Xavier is normal, as the text says; in the" in told
        assert "it is uniform, of the same deviation" in told
    if recipe(name).fit["batch_size"] == 16:
        assert "8 by default in the authors' code" in told
