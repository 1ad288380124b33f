"""Conclusions of studies follow from their tables, and every figure has a note and a title for its values."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.stored import tiny_model, tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from lamina import Task
from lamina.studies import Study, drift, lens, similarity, variability
from lamina.studies.cutting import removal
from lamina.studies.probing import error_analysis
from lamina.studies.states import importance
from lamina.studies.states import similarity as similarities
from lamina.studies.states import variability as variabilities

TEXTS = ["the film is good", "anna was very slow", "ben and anna", "a bad film and a good film", "paris is slow"]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(hidden_size=16)


def explained(study: Study) -> bool:
    return all(figure.note and figure.value_title for figure in study.figures.values())


def test_drift_names_the_block_that_moved_most(model: Any):
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.encoder.layer[1].output.dense.weight.mul_(1.5)
    study = drift(model, {"same": copy.deepcopy(model), "run": other})
    assert study.conclusions[0] == "same: no weight that was compared changed."
    assert study.conclusions[1].startswith(
        "run: block 2 moved most (by 0.083 times the norm of the base's weights, mean over roles), "
        "blocks 1, 3 least (by 0 times"
    )
    twice = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twice.parameters():
            parameter.mul_(2)
    all_moved = "twice: all blocks that were compared moved by 1 times the norm of the base's weights, mean over roles."
    assert drift(model, {"twice": twice}).conclusions == (all_moved,)
    assert explained(study)


def test_similarity_names_the_block_that_moves_tokens_least(model: Any):
    study = similarity(model, TEXTS, processor=tiny_tokenizer())
    rows = study.table.query("measure == 'block_influence'")
    least = rows.loc[rows["score"].idxmin()]
    (said,) = study.conclusions
    assert said.startswith(f"Block {least['layer']} changes the states of tokens least (block influence")
    assert explained(study)
    assert similarity(model, TEXTS, processor=tiny_tokenizer(), measures=["cka"]).conclusions == ()


def test_variability_names_the_layer_of_the_lowest_nu(model: Any):
    rows = [{"sentence": text, "label": "good" if "good" in text else "bad"} for text in TEXTS]
    task = Task.from_dataset("sequence_classification", {"train": rows, "validation": rows})
    study = variability(model, {"mood": task}, processor=tiny_tokenizer())
    least = study.table.loc[study.table["score"].idxmin()]
    (said,) = study.conclusions
    assert said.startswith(f"mood: layer {least['layer']} has the lowest nu, {least['score']:.3g} over 5 rows")
    assert "no interval is claimed" in said
    assert explained(study)


def test_lens_names_the_first_layer_with_most_of_the_accuracy(words: Any):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=20, **sizes, max_position_embeddings=32)).eval()
    with torch.no_grad():
        for block in llama.model.layers[1:]:  # which leave every state nearly as it is
            block.self_attn.o_proj.weight.mul_(1e-4)
            block.mlp.down_proj.weight.mul_(1e-4)
    study = lens(llama, TEXTS * 4, processor=words)
    right = study.table.query("measure == 'accuracy'")["score"].tolist()
    assert right[1] == right[3]
    first = 0 if right[0] >= 0.9 * right[3] else 1
    assert [said[:8] for said in study.conclusions] == ([f"Layer {first} "] if right[3] else [])
    assert explained(study)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({0: 3, 1: 2, 2: 2}, "layers 1-2 answer fewest rows wrongly, 2 of 8 each."),
        ({0: 2, 1: 3, 2: 2}, "layers 0, 2 answer fewest rows wrongly, 2 of 8 each."),
        ({0: 2, 1: 1, 2: 2}, "layer 1 answers fewest rows wrongly, 1 of 8."),
    ],
)
def test_all_layers_with_the_fewest_errors_are_named(wrong: dict[int, int], sentence: str):
    rows = [{"sentence": "a", "label": label} for label in ("bad", "good") * 4]
    task = Task.from_dataset("sequence_classification", {"train": rows, "validation": rows})
    truths = list(task.split("validation").labels)
    predictions = {
        layer: [1 - truth if row < count else truth for row, truth in enumerate(truths)]
        for layer, count in wrong.items()
    }
    study: Any = SimpleNamespace(_task=task, _truths=truths, _predictions=predictions)
    assert error_analysis._ErrorAnalysis.conclusions(study)[0] == sentence


@pytest.mark.parametrize(
    ("nus", "words"),
    [
        ({0: 0.5, 1: 0.2, 2: 0.2001}, "layers 1-2 have the lowest nu, 0.2 over 9 rows; they are the first to try"),
        ({0: 0.2, 1: 0.5, 2: 0.2}, "layers 0, 2 have the lowest nu, 0.2 over 9 rows; they are the first to try"),
        ({0: 0.2, 1: 0.5, 2: 0.3}, "layer 0 has the lowest nu, 0.2 over 9 rows; it is the first to try"),
    ],
)
def test_all_layers_of_the_lowest_nu_are_named(nus: dict[int, float], words: str):
    (sentence,) = variabilities._conclusion("t", nus, 9)
    assert sentence.startswith(f"t: {words} a reader at.")


@pytest.mark.parametrize(
    ("influences", "words"),
    [
        (
            [0.1, 0.1, 0.3],
            "Blocks 1, 2 change the states of tokens least (block influence 0.1) and are the first candidates to "
            "remove; block 3 changes them most (0.3).",
        ),
        (
            [0.3, 0.1, 0.3],
            "Block 2 changes the states of tokens least (block influence 0.1) and is the first candidate to remove; "
            "blocks 1, 3 change them most (0.3).",
        ),
        ([0.1, 0.1], "All 2 blocks change the states of tokens alike (block influence 0.1)."),
    ],
)
def test_all_blocks_of_the_least_and_the_greatest_influence_are_named(influences: list[float], words: str):
    rows: Any = [
        {"measure": "block_influence", "model": "base", "other_layer": block, "layer": block + 1, "score": score}
        for block, score in enumerate(influences)
    ]
    (sentence,) = similarities._conclusions(rows)
    assert sentence == f"{words} What removing a block costs a task is not measured here."


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ([0.4, 0.4, 0.2], "layers 0-1 have the largest share, 0.400 each."),
        ([0.45, 0.1, 0.45], "layers 0, 2 have the largest share, 0.450 each."),
        ([0.2, 0.6, 0.2], "layer 1 has the largest share, 0.600 (one seed)."),
    ],
)
def test_all_layers_of_the_largest_share_are_named(shares: list[float], words: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importance, "_STANDS_OUT", 1.1)
    reader = importance._ReaderShares("run", "a", "a", "ScalarMix", 0, dict(enumerate(shares)))
    assert list(importance._conclusions([reader])) == [f"a: {words}"]


@pytest.mark.parametrize(
    ("drops", "words"),
    [
        ({(1, 1): 0.1, (2, 1): 0.1, (3, 1): 0.2}, "without block 1 or block 2, a drop of 0.100 each (2 values each)."),
        ({(1, 2): 0.0, (2, 2): 0.3, (3, 1): 0.0}, "without blocks 1 to 2 or block 3, a drop of 0.000 each (2 values"),
        ({(1, 1): 0.2, (2, 1): 0.1}, "without block 2, a drop of 0.100 (2 values; no interval)."),
    ],
)
def test_all_ranges_whose_removal_costs_least_are_named(drops: dict[tuple[int, int], float], words: str):
    rows = [removal._Drop(seed, place, value) for place, value in drops.items() for seed in (0, 1)]
    assert removal._least_loss("t", "accuracy", rows).startswith(f"t: least is lost {words}")
