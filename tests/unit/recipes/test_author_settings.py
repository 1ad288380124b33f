"""Every option of a paper's recipe, beside a table of the authors' settings that was made by hand.

The tables come from the papers' text and from the authors' code. A key of a recipe is in one of three places: the
authors' settings, the departures (with the authors' value), or the keys about which paper and code are silent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support import shipped

FOLDER = Path(__file__).parents[3] / "recipes" / "papers"
Settings = dict[str, Any]

# AdaLayers: tables 7, 11 and 15 of the thesis, and the configs of its code
PLATEAU: Settings = {
    "optimizer": "adam",
    "learning_rate": 1e-4,
    "schedule": "plateau",
    "plateau_factor": 0.5,
    "min_learning_rate": 1e-6,
    "max_grad_norm": 0,
    "precision": "float16",
}
ALL_BUT_SCORES = ["*", "!*.scores"]
IMDB: Settings = PLATEAU | {
    "batch_size": 1200,
    "max_length": 512,
    "weight_decay": 1e-3,
    "weight_decay_on": ALL_BUT_SCORES,
    "plateau_patience": 5,
    "early_stopping_patience": 10,
    "epochs": 128,
}
COLA: Settings = PLATEAU | {
    "batch_size": 600,
    "weight_decay": 0,
    "plateau_patience": 25,
    "early_stopping_patience": 30,
    "epochs": 256,
}
CONLL: Settings = PLATEAU | {
    "batch_size": 356,
    "add_prefix_space": True,
    "weight_decay": 1e-3,
    "weight_decay_on": ALL_BUT_SCORES,
    "plateau_patience": 16,
    "early_stopping_patience": 40,
    "early_stopping_min_delta": 0.001,
    "epochs": 256,
}
# Insertion: table 7 of the paper, and its code
TEXTS: Settings = {
    "epochs": 15,
    "batch_size": 8,
    "optimizer": "adamw",
    "adam_epsilon": 1e-6,
    "weight_decay": 0.01,
    "weight_decay_on": "all",
    "schedule": "linear",
    "max_grad_norm": 1.0,
}
SEARCHED: Settings = TEXTS | {"warmup_steps": 50}
GENERATED: Settings = {
    "max_steps": 15000,
    "batch_size": 8,
    "gradient_accumulation_steps": 16,
    "optimizer": "adamw",
    "adam_epsilon": 1e-6,
    "weight_decay": 0.01,
    "weight_decay_on": "all",
    "max_length": 512,
    "max_target_length": 300,
}
IMAGES: Settings = {
    "batch_size": 32,
    "optimizer": "sgd",
    "momentum": 0.9,
    "weight_decay": 0,
    "schedule": "cosine",
    "max_grad_norm": 1.0,
    "augment": False,
}
# Partial re-initialisation: section 5 of the paper, and its code
REINIT: Settings = {"epochs": 3, "batch_size": 8, "learning_rate": 2e-5, "max_length": 128, "keep": "last"}
# DWAtt: table 4 and section 5 of the paper
NER: Settings = {
    "batch_size": 16,
    "add_prefix_space": True,
    "optimizer": "adamw",
    "learning_rate": 5e-5,
    "schedule": "linear",
}

AUTHORS: dict[str, Settings] = {
    "adalayers/imdb-roberta-large": IMDB,
    "adalayers/imdb-roberta-large-as-published": IMDB,
    "adalayers/imdb-bart": IMDB | {"batch_size": 588, "max_length": 1024},
    "adalayers/cola-roberta-large": COLA,
    "adalayers/cola-roberta-large-as-published": COLA,
    "adalayers/cola-single-layers-as-published": COLA | {"plateau_patience": 32, "early_stopping_patience": 64},
    "adalayers/cola-bart": COLA | {"batch_size": 900, "plateau_patience": 16, "early_stopping_patience": 32},
    "adalayers/conll-roberta-large": CONLL,
    "adalayers/conll-roberta-large-as-published": CONLL,
    "adalayers/conll-bart": CONLL,
    "insertion/table-1": TEXTS,
    "insertion/table-9": TEXTS | {"max_length": 512},
    **{f"insertion/{name}": SEARCHED for name in ("table-4", "table-5", "figure-3", "figure-4", "figure-6")},
    "insertion/figures-3-and-6-masked-lm": SEARCHED,
    "insertion/later-runs": TEXTS,
    "insertion/table-2-cnn-dailymail": GENERATED,
    "insertion/table-2-wmt16-en-ro": GENERATED,
    "insertion/table-3-cifar100": IMAGES | {"epochs": 30},
    **{f"partial-reinit/figure-1{letter}": REINIT for letter in "abcd"},
    "partial-reinit/finetuned-for-drift": REINIT,
    "partial-reinit/figure-2": REINIT | {"epochs": 40},
    **{f"dwatt/figure-{name}": NER for name in ("2", "3", "4", "5", "6-feature-extraction", "7-base", "7-large")},
    "dwatt/table-2": NER,
}

# Recipe -> key -> why it departs. A corrected recipe of the thesis decays matrices and counts every improvement.
CORRECTED = {
    "weight_decay_on": "the code decays everything but the scores; here matrices decay",
    "early_stopping_min_delta": "the code counts improvements from 0.001",
}
TWICE = {"batch_size": "16 or 8 in Table 7, 8 by default in the code; this recipe has 16"}
DEPARTURES: dict[str, dict[str, str]] = {
    **{f"adalayers/{task}-{model}": CORRECTED for task in ("imdb", "conll") for model in ("roberta-large", "bart")},
    **{
        f"insertion/{name}": TWICE
        for name in ("table-1", "table-4", "table-5", "table-9", "figure-3", "figure-4", "figure-6")
    },
    "insertion/figures-3-and-6-masked-lm": TWICE,
}
# Paper -> keys about which the text and the code say nothing
SILENT = {
    "adalayers": set[str](),
    "insertion": {"learning_rate", "schedule", "max_grad_norm", "num_beams", "warmup_steps"},
    "partial-reinit": {"optimizer", "weight_decay", "schedule", "max_grad_norm"},
    "dwatt": {"epochs"},  # the text gives several, one for each figure
}


@pytest.mark.parametrize("name", AUTHORS)
def test_every_option_is_the_authors_or_a_named_departure(name: str):
    found, authors = shipped.recipe(f"papers/{name}").fit, AUTHORS[name]
    departures = DEPARTURES.get(name, {}).keys() & {*found, *authors}
    for key in {*found, *authors}:
        given = list(value) if isinstance(value := found.get(key), tuple) else value
        if key in departures:
            assert given != authors.get(key), f"{key} is no departure any more"
        elif key in authors:
            assert given == authors[key], key
        else:
            assert key in SILENT[name.partition("/")[0]], f"{key} is in no table"


def test_every_recipe_of_a_paper_has_its_table():
    """Apart from methods of other papers on the same data, and pictures of weights."""
    others = {"adalayers/imdb-head2toe", "adalayers/imdb-routing", "insertion/figure-5", "insertion/table-3-imagenet"}
    others |= {"dwatt/figure-3-discussed-mixes", "dwatt/figure-6-finetuning", "dwatt/figures-8-and-9", "dwatt/table-3"}
    paths = {path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.glob("*/*.yaml")}
    assert paths - others == set(AUTHORS)


def test_the_published_configuration_keeps_the_faults_and_the_corrected_one_has_none():
    for task in ("imdb", "conll"):
        published = shipped.recipe(f"papers/adalayers/{task}-roberta-large-as-published")
        (body,) = published.tasks.values()
        assert body.readers["AdaLayers"].fusion["layers"] == "0-23"
        assert body.readers["single layer"].fusion["frozen"] is True
        assert "frozen" not in body.readers["single layer, trained"].fusion
        (corrected,) = shipped.recipe(f"papers/adalayers/{task}-roberta-large").tasks.values()
        assert corrected.readers["AdaLayers"].fusion["layers"] == "1-"
        assert "frozen" not in corrected.readers["single layer"].fusion
