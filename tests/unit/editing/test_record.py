"""The record of edits; what each edit records is tested with that edit."""

from __future__ import annotations

from lamina.editing.record import Edit


def test_its_print_counts_the_parameters():
    edit = Edit("truncate", "main", (5, 6), ("a.weight", "b.weight"), {"keep": 4})
    assert repr(edit) == "Edit('truncate', stack='main', layers=[5, 6], 2 parameters, settings={'keep': 4}, seed=None)"
