"""A bank, a reader, a path or anything else in place of a model is refused by one clear sentence."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.training import reader, tiny_bank, tiny_model, tiny_tokenizer, yes_no

import lamina
from lamina.errors import ConfigError

pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="studies need scikit-learn")

TASK = yes_no(train=12, validation=8)
TEXTS = ["the film is good ."] * 5
MODEL_ONLY: dict[str, Callable[[Any], object]] = {
    "ReaderBank": lambda wrong: lamina.ReaderBank(wrong, tiny_tokenizer()),
    "stacks": lamina.stacks,
    "tap": lambda wrong: lamina.tap(wrong).__enter__(),
    "insert_": lambda wrong: lamina.insert_(wrong, position="ffn"),
    "freeze_": lamina.freeze_,
    "merge_": lamina.merge_,
    "edits": lamina.edits,
    "finetune": lambda wrong: lamina.finetune(wrong, TASK),
    "similarity": lambda wrong: lamina.studies.similarity(wrong, TEXTS, processor=tiny_tokenizer()),
}
BOTH: dict[str, Callable[[Any], object]] = {
    "fit": lambda wrong: lamina.fit(wrong, {"a": TASK}),
    "evaluate": lambda wrong: lamina.evaluate(wrong, {"a": TASK}),
}
NO_PATH: dict[str, Callable[[Any], object]] = {  # where a path or a hub id is loaded
    "drift": lambda wrong: lamina.studies.drift(wrong, tiny_model()),
}
WRONG: dict[str, Callable[[], object]] = {
    "bank": lambda: tiny_bank({"a": reader(TASK)}),
    "reader": lambda: tiny_bank({"a": reader(TASK)})["a"],
    "settings": lambda: reader(TASK),
    "path": lambda: Path("out/bank"),
    "name": lambda: "bert-base-uncased",
    "None": lambda: None,
    "script": lambda: torch.jit.script(torch.nn.Linear(2, 2)),
}
SAID = {
    "bank": "got a ReaderBank, which is not a model; .* It is a bank: give its model, bank.model",
    "reader": "got a ReaderModule, which is not a model; .* It is a reader: give the model of its bank, bank.model",
    "settings": "got a Reader, which is not a model; .* Give the first value that lamina.load returns",
    "path": "got 'out/bank', which is not a model; .* Load it first, by lamina.load, or a bank by ReaderBank.from_pre",
    "name": "got 'bert-base-uncased', which is not a model; .* Load it first, by lamina.load",
    "script": r"got a \w+, which is not a model; .* It was compiled by torch\.jit: give the model that was traced",
    "None": "got a NoneType, which is not a model; .* Give the first value that lamina.load returns",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_model_is_named(wrong: str, tmp_path: Path):
    got = WRONG[wrong]()
    calls = MODEL_ONLY | ({} if wrong == "bank" else BOTH) | ({} if wrong in ("path", "name") else NO_PATH)
    for call in calls.values():
        with pytest.raises(ConfigError, match=SAID[wrong]):
            call(got)
    for op in ("tap", "freeze_", "similarity"):
        with pytest.raises(ConfigError, match=f"^{op}: got "):
            MODEL_ONLY[op](got)
    bank = tiny_bank({"a": reader(TASK)})
    bank.save_pretrained(tmp_path)
    if wrong != "None":  # then the bank loads its base
        said = SAID[wrong].replace(", or a bank by ReaderBank.from_pre", r"\.$")  # a bank would be wrong here
        with pytest.raises(ConfigError, match=said):
            lamina.ReaderBank.from_pretrained(tmp_path, model=got)  # pyright: ignore[reportArgumentType]


def test_a_model_in_place_of_a_bank_or_a_name_is_named():
    with pytest.raises(ConfigError, match="importance: banks is a BertModel; it must be a ReaderBank or a dict"):
        lamina.studies.importance(tiny_model())
    with pytest.raises(ConfigError, match="load: got a BertModel; a folder, a hub id or 'minilm' is needed"):
        lamina.load(tiny_model())


def test_a_length_that_does_not_fit_is_told_by_the_function_that_was_called():
    with pytest.raises(ConfigError, match=r"^fit: max_length is 99; model and tokenizer take 1 to 32"):
        lamina.fit(tiny_bank({"a": reader(TASK)}), {"a": TASK}, max_length=99, progress=False)


@pytest.mark.parametrize("name", ["errors", "variability", "probe", "removal", "reinit", "insertion", "advise"])
def test_what_is_no_task_is_named(name: str):
    for wrong in ("a", [TASK], {"a": 3}):
        with pytest.raises(ConfigError, match=f"^{name}: tasks (is|are) "):
            getattr(lamina.studies, name)(tiny_model(), wrong)
    with pytest.raises(ConfigError, match=f"^{name}: got a int, which is not a model"):
        getattr(lamina.studies, name)(3, TASK)


@pytest.mark.parametrize("wrong", ["name", "path", "list", "class", "model"])
def test_what_is_no_processor_is_named(wrong: str, tmp_path: Path):
    model, name = tiny_model(), "minilm"
    got: Any = {"name": name, "path": Path(name), "list": [name], "class": type(tiny_tokenizer()), "model": model}[
        wrong
    ]
    bank = tiny_bank({"a": reader(TASK)})
    bank.save_pretrained(tmp_path)
    calls: list[Callable[[], object]] = [
        lambda: lamina.ReaderBank(model, processor=got),
        lambda: lamina.fit(bank, {"a": TASK}, processor=got),
        lambda: lamina.finetune(model, TASK, processor=got),
        lambda: lamina.predict(bank, TEXTS, processor=got),
        lambda: lamina.evaluate(bank, {"a": TASK}, processor=got),
        lambda: lamina.save(model, tmp_path / "model", got),
        lambda: lamina.ReaderBank.from_pretrained(tmp_path, model, processor=got),
        lambda: lamina.studies.similarity(model, TEXTS, processor=got),
    ]
    for call in calls:
        with pytest.raises(
            ConfigError, match=r"processor is ('minilm'|a \w+); it must be a loaded tokenizer or proces"
        ):
            call()
