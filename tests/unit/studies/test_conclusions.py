"""Conclusions of studies follow from their tables, and every figure has a note and a title for its values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.support.stored import tiny_model, tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from lamina import Task
from lamina.studies import Study, drift, lens, similarity, variability

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
