"""Compiled models, models inside wrappers, and models with adapters: used rightly or refused in one sentence."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from tests.support.adapters import add_adapter, enable_adapters
from tests.support.finetuned import bert, tune
from tests.support.finetuned import tiny_tokenizer as words
from tests.support.portions import one_in
from tests.support.stored import TEXTS, logits, tiny_bank, tiny_model, tiny_tokenizer
from tests.support.training import yes_no
from torch import nn

import lamina
from lamina import ReaderBank
from lamina.errors import ConfigError
from lamina.layers import stacks
from lamina.layers.preserve import uncompiled


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def compiled_in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def compiled_blocks(model: Any) -> Any:
    for block in model.base_model.encoder.layer:
        block.compile(backend="eager")
    return model


def wrapped_blocks(model: Any) -> Any:
    blocks = model.base_model.encoder.layer
    for number, block in enumerate(blocks):
        blocks[number] = torch.compile(block, backend="eager")
    return model


def prepared(model: Any) -> Any:
    return Accelerator(cpu=True, mixed_precision="no").prepare(model)


FEW = [(compiled, False), (nn.DataParallel, False)]
ALL = [
    (wrap, used)
    for wrap in (*dict(FEW), compiled_blocks, prepared, compiled_in_place, wrapped_blocks)
    for used in (False, True)
]
MARKS = {FEW[0]: [pytest.mark.long], FEW[1]: []}
WRAPPERS = [pytest.param(*case, marks=MARKS.get(case, [pytest.mark.full])) for case in ALL]


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def batch() -> dict[str, torch.Tensor]:
    return dict(tiny_tokenizer()(TEXTS, return_tensors="pt", padding=True))


@pytest.mark.parametrize(("wrap", "used_before"), WRAPPERS)
@torch.no_grad()
def test_a_bank_reads_the_model_inside(wrap: Callable[[Any], Any], used_before: bool):
    expected, plain = logits(tiny_bank()), tiny_model()(**batch(), output_hidden_states=True).hidden_states
    model = wrap(tiny_model())
    if used_before:
        assert torch.equal(model(**batch()).last_hidden_state, plain[-1])
    bank = tiny_bank(model)
    assert {name: stack.depth for name, stack in stacks(model).items()} == {"main": 3}
    assert all(torch.equal(value, expected[name]) for name, value in logits(bank).items())
    with lamina.tap(model) as states:
        assert torch.equal(model(**batch()).last_hidden_state, plain[-1])
    assert [torch.equal(states[layer], state) for layer, state in enumerate(plain)] == [True] * 4
    with bank.listen() as heard:
        assert torch.equal(model(**batch()).last_hidden_state, plain[-1])
    assert all(torch.equal(heard[name].logits, value) for name, value in expected.items())
    assert torch.equal(model(**batch()).last_hidden_state, plain[-1])


@pytest.mark.long
@torch.no_grad()
def test_a_model_that_is_compiled_after_the_bank_was_made():
    model = tiny_model()
    bank, plain = tiny_bank(model), model(**batch()).last_hidden_state
    expected, fast = logits(bank), compiled(model)
    assert torch.equal(fast(**batch()).last_hidden_state, plain)
    with bank.listen() as heard, lamina.tap(model) as states:
        fast(**batch())
    assert torch.equal(heard["mood"].logits, expected["mood"])
    assert torch.equal(states[3], plain)
    model.compile(backend="eager")
    assert torch.equal(logits(bank)["mood"], expected["mood"])


def test_models_are_compiled_again_afterwards():
    runs: list[int] = []

    def counted(graph: Any, _inputs: Any) -> Any:
        runs.append(1)
        return graph.forward

    fast = torch.compile(nn.Linear(2, 2), backend=counted)
    first, second = uncompiled(), uncompiled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    fast(torch.ones(1, 2))
    assert runs == []
    second.__exit__(None, None, None)
    fast(torch.ones(1, 2))
    assert runs == [1]


@pytest.mark.parametrize("wrap", [compiled, nn.DataParallel, compiled_in_place])
def test_saved_is_the_model_inside(wrap: Callable[[Any], Any], tmp_path: Path):
    lamina.save(wrap(tiny_model()), tmp_path)
    assert json.loads((tmp_path / "lamina_edits.json").read_text())["architecture"] == "BertModel"
    loaded, _ = lamina.load(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(**batch()).last_hidden_state, tiny_model()(**batch()).last_hidden_state)


EDITS: dict[str, Callable[[Any], Any]] = {
    "insert_": lambda model: lamina.insert_(model, position="ffn"),
    "reinit_": lambda model: lamina.reinit_(model, [1]),
    "truncate_": lambda model: lamina.truncate_(model, 2),
    "freeze_": lambda model: lamina.freeze_(model, [1]),
    "merge_": lamina.merge_,
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("wrap", one_in(4, [compiled, compiled_in_place, wrapped_blocks, nn.DataParallel]))
def test_edits_of_them_are_refused_at_once(edit: str, wrap: Callable[[Any], Any]):
    model = wrap(tiny_model())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=f"{edit}: (the model is compiled, and would|got a DataParallel; edit the)"):
        EDITS[edit](model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("wrap", [pytest.param(compiled, marks=pytest.mark.full), nn.DataParallel])
def test_training_and_predicting_use_the_model_inside(wrap: Callable[[Any], Any], tmp_path: Path):
    task = yes_no(train=8, validation=4)
    tune(bert(), task, tmp_path / "plain")
    wrapped = wrap(bert())
    tune(wrapped, task, tmp_path / "wrapped")
    plain, _ = lamina.load(tmp_path / "plain", head="sequence_classification")
    loaded, tokenizer = lamina.load(tmp_path / "wrapped", head="sequence_classification")
    for name, value in plain.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name])
    assert lamina.predict(wrapped, TEXTS, processor=tokenizer) == lamina.predict(loaded, TEXTS, processor=tokenizer)
    both = [lamina.evaluate(model, {"it": task}, processor=tokenizer) for model in (wrapped, plain)]
    assert both[0] == both[1]


# Adapters: what would be saved could not be loaded


@pytest.mark.parametrize("on", [True, False])
def test_a_base_with_adapters_is_not_trained_along(on: bool):
    model: Any = tiny_model()
    add_adapter(model)
    enable_adapters(model, on)
    with pytest.raises(ConfigError, match=r"bank: train_base is set: the model carries adapters .*merge_and_unload"):
        ReaderBank(model, train_base=True)
    assert len(tiny_bank(model)) == 2


def test_a_base_that_got_adapters_is_refused_before_training(tmp_path: Path):
    bank = ReaderBank(bert(), words(), train_base=True)
    add_adapter(bank.model)
    task = yes_no(train=8, validation=4)
    bank.add("mood", lamina.Reader(lamina.fusion.Mean(), lamina.SequenceClassification(task.labels)))
    with pytest.raises(ConfigError, match="save: the model carries adapters"):
        lamina.fit(bank, {"mood": task}, epochs=1, output=tmp_path / "out", progress=False)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="save: the model carries adapters"):
        bank.save_pretrained(tmp_path / "out")
    assert list(tmp_path.glob("out/*")) == []


def test_models_with_adapters_are_not_saved(tmp_path: Path):
    model = bert()
    add_adapter(model)
    before = copy.deepcopy(model.state_dict())
    for save in (
        lambda: lamina.save(model, tmp_path / "out"),
        lambda: tune(model, yes_no(train=8, validation=4), tmp_path / "out"),
    ):
        with pytest.raises(ConfigError, match="save: the model carries adapters"):
            save()
    assert list(tmp_path.iterdir()) == []
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("edit", EDITS)
def test_models_with_adapters_are_not_edited(edit: str):
    model: Any = tiny_model()
    add_adapter(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=f"{edit}: the model carries adapters .*merge_and_unload"):
        EDITS[edit](model)
    assert lamina.edits(model) == []
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
