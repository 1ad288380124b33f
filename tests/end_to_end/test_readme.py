"""The README: its example on a model that Lamina did not load, and its commands. test_docs.py runs it as it stands."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from tests.support.documented import ROOT, blocks
from transformers import AutoModel, AutoTokenizer

from lamina.store.models import source_of


@pytest.mark.full
def test_its_example_takes_a_model_that_lamina_did_not_load():
    (block,) = blocks(ROOT / "README.md")
    load = 'lamina.load("minilm")'
    assert load in block.code
    code = block.code.replace(load, "(AutoModel.from_pretrained(minilm), AutoTokenizer.from_pretrained(minilm))")
    names = {"AutoModel": AutoModel, "AutoTokenizer": AutoTokenizer, "minilm": source_of("minilm", None)}
    assert not block.difference(replace(block, code=code).run(names))


def test_commands_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    wanted = set(re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert wanted == {"demo", "test"}
    assert all(f"\n{target}:" in makefile for target in wanted)
