"""Every study on every family whose layers can be read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support.portions import one_in
from tests.support.tiny import READABLE, Family, model_of
from transformers.models.auto import modeling_auto

from lamina.layers import stacks
from lamina.studies import drift, similarity
from lamina.studies.states.lens import OutputHead


@pytest.mark.parametrize("name", one_in(24, READABLE, 0, ["sew"]))
def test_similarity(name: str):
    family, model = READABLE[name], model_of(name)
    batches = [family.inputs(model, batch=4, seed=seed) for seed in (0, 1)]
    if name == "sew":  # its states are fewer than the frames that a mask of samples tells of
        batches = [{key: value for key, value in batch.items() if key != "attention_mask"} for batch in batches]
    for stack in family.stacks:
        study = similarity(model, batches=batches, stack=stack)
        layers = stacks(model)[stack].layers
        cka = study.table[study.table["measure"] == "cka"]
        assert len(cka) == layers**2
        assert study.settings["rows"] == 8
        own = cka[cka["layer"] == cka["other_layer"]]["score"].to_numpy(float)
        assert torch.allclose(torch.tensor(own), torch.ones(layers, dtype=torch.float64))
        assert set(study.table[study.table["measure"] == "entropy"]["layer"]) == set(range(layers))


@pytest.mark.parametrize("name", one_in(24, [name for name, family in READABLE.items() if family.blocks], 1))
def test_drift(name: str):
    family, model = READABLE[name], model_of(name)
    for stack in family.stacks:
        table = drift(model, family.known(), stack=stack).table
        assert set(table["layer"]) == set(range(1, stacks(model)[stack].layers))
        assert (table["score"] == 0).all()


def language_models() -> list[Family]:
    """Every family with the head of a causal or a masked language model, where transformers has one."""
    mapped = {
        True: ("AutoModelForCausalLM", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        False: ("AutoModelForMaskedLM", modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    }
    bare = [family for family in READABLE.values() if family.auto == "AutoModel" and family.blocks]
    texts = [family for family in bare if family.modality == "text" and len(family.stacks) == 1]
    return [replace(f, auto=mapped[f.causal][0]) for f in texts if f.model_type in mapped[f.causal][1]]


@pytest.mark.parametrize("family", one_in(24, language_models(), 2), ids=lambda family: family.name)
@torch.no_grad()
def test_lens(family: Family):
    model = family.build()
    head = OutputHead(model, op="lens")
    assert head.causal == family.causal
    inputs = family.inputs(model, batch=2, tokens=6, seed=3)
    with head.last_states() as last:
        own = model(**inputs)
    own = getattr(own, "logits", None) if hasattr(own, "logits") else own.prediction_logits
    assert torch.allclose(head.logits(last[0].flatten(0, 1)), own.flatten(0, 1), atol=1e-4)
