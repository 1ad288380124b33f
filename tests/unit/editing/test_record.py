"""The record of edits; what each edit records is tested with that edit."""

from __future__ import annotations

import torch
from tests.support.tiny import FAMILIES

from lamina.editing.insert import insert_
from lamina.editing.record import Edit, edits


def test_its_print_counts_the_parameters():
    edit = Edit("truncate", "main", (5, 6), ("a.weight", "b.weight"), {"keep": 4})
    assert repr(edit) == "Edit('truncate', stack='main', layers=[5, 6], 2 parameters, settings={'keep': 4}, seed=None)"


def test_inserted_layers_of_wrapped_models_are_found():
    model = FAMILIES["bert"].known()
    edit = insert_(model, "attention")
    assert edits(torch.nn.DataParallel(model)) == edits(torch.compile(model)) == [edit]
    model.encoder.layer[0] = torch.compile(model.encoder.layer[0])
    assert edits(model) == [edit]
