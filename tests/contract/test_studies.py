"""Every study on every family whose layers can be read."""

from __future__ import annotations

import pytest
import torch
from tests.support.tiny import READABLE, model_of

from lamina.layers import stacks
from lamina.studies import drift, similarity


@pytest.mark.parametrize("name", READABLE)
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


@pytest.mark.parametrize("name", [name for name, family in READABLE.items() if family.blocks])
def test_drift(name: str):
    family, model = READABLE[name], model_of(name)
    for stack in family.stacks:
        table = drift(model, family.build(), stack=stack).table
        assert set(table["layer"]) == set(range(1, stacks(model)[stack].layers))
        assert (table["score"] == 0).all()
