"""A frozen model under a bank: eval mode in every pass, and weights that may not change."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.portions import one_in
from tests.support.stored import TEXTS, tiny_bank, tiny_model, tiny_tokenizer
from tests.support.tiny import FAMILIES
from torch import nn
from transformers.models.bert.modeling_bert import BertOutput

import lamina
from lamina.bank import ReaderBank
from lamina.errors import ConfigError, StoreError
from lamina.layers import default_stack
from lamina.layers.fingerprints import fingerprint
from lamina.layers.layer_guard import WeightGuard
from lamina.prediction.calibrate import calibrate

MATCH = "the model has changed"


@pytest.fixture
def bank() -> ReaderBank:
    return tiny_bank(tiny_model()).eval()


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    return dict(tiny_tokenizer()(TEXTS, return_tensors="pt", padding=True))


def modes(bank: ReaderBank) -> set[bool]:
    return {module.training for module in bank.model.modules()}


def first(bank: ReaderBank) -> str:
    return next(iter(bank))


# Modes


@pytest.mark.parametrize("part", ["", "encoder.layer.1.output.dropout"])
def test_a_model_in_training_mode_is_read_in_eval_mode(part: str, bank: ReaderBank, batch: dict[str, torch.Tensor]):
    expected = bank(**batch)[first(bank)].logits
    states = bank.record_states({"main": [3]}, batch)["main"][3]
    bank.model.get_submodule(part).train()
    before = [module.training for module in bank.model.modules()]
    assert torch.equal(bank(**batch)[first(bank)].logits, expected)
    assert torch.equal(bank.record_states({"main": [3]}, batch)["main"][3], states)
    with bank.listen() as heard:
        bank.model(**batch)
    assert torch.equal(heard[first(bank)].logits, expected)
    assert [module.training for module in bank.model.modules()] == before


def test_the_mode_comes_back_after_an_error(bank: ReaderBank):
    bank.model.train()
    with pytest.raises(IndexError), bank.listen():
        bank.model(input_ids=torch.tensor([[999]]))
    assert modes(bank) == {True}


def test_a_switch_while_the_bank_listens_is_undone_for_the_pass(bank: ReaderBank, batch: dict[str, torch.Tensor]):
    expected = bank(**batch)[first(bank)].logits
    with bank.listen() as heard:
        bank.model.train()
        bank.model(**batch)
    assert torch.equal(heard[first(bank)].logits, expected)
    assert modes(bank) == {True}


def test_a_model_that_the_caller_trains_keeps_its_mode_and_is_not_read(
    bank: ReaderBank, batch: dict[str, torch.Tensor]
):
    seen: list[bool] = []
    bank.model.train().requires_grad_(True)
    bank.model.encoder.register_forward_hook(lambda module, *_: seen.append(module.training))
    with bank.listen() as heard:
        bank.model(**batch)
    assert seen == [True]
    with pytest.raises(ConfigError, match="the model is being trained"):
        heard[first(bank)]


def test_a_model_that_is_trained_along_keeps_its_mode(batch: dict[str, torch.Tensor]):
    bank = ReaderBank(tiny_model(), train_base=True)
    bank.update(other := tiny_bank(bank.model))
    seen: list[bool] = []
    bank.train().model.encoder.register_forward_pre_hook(lambda module, *_: seen.append(module.training))
    bank(**batch)
    other.eval()(**batch)
    assert seen == [True, False]


# Weights


def weight(bank: ReaderBank) -> nn.Parameter:
    return bank.model.get_parameter("encoder.layer.1.output.dense.weight")


def set_parameter(bank: ReaderBank) -> None:
    bank.model.encoder.layer[1].output.dense.weight = nn.Parameter(weight(bank) * 2)


def set_module(bank: ReaderBank) -> None:
    bank.model.encoder.layer[1].output.dense = nn.Linear(48, 32)


def set_data(bank: ReaderBank) -> None:
    weight(bank).data = weight(bank).data * 2


def load(bank: ReaderBank, *, assign: bool = False) -> None:
    bank.model.load_state_dict({name: value * 2 for name, value in bank.model.state_dict().items()}, assign=assign)


def step(bank: ReaderBank, *, fused: bool) -> None:
    optimizer = torch.optim.AdamW(bank.model.requires_grad_(True).parameters(), lr=0.1, fused=fused)
    with torch.enable_grad():
        weight(bank).sum().backward()
    optimizer.step()


def part(bank: ReaderBank, name: str = "") -> Any:
    return bank.model.get_submodule("encoder.layer.1" + (name and f".{name}"))


class Halved(BertOutput):
    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states, input_tensor) / 2


CHANGES: dict[str, Callable[[ReaderBank], object]] = {
    "in place": lambda bank: weight(bank).mul_(2),
    "one number": lambda bank: weight(bank)[0, 0].fill_(9),
    "parameter": set_parameter,
    "module": set_module,
    "data": set_data,
    "load_state_dict": load,
    "load_state_dict assign": lambda bank: load(bank, assign=True),
    "optimizer": lambda bank: step(bank, fused=False),
    "fused optimizer": lambda bank: step(bank, fused=True),  # torch does not count these changes
    "half": lambda bank: bank.model.half(),
    # nothing in torch counts these
    "through data": lambda bank: weight(bank).data.mul_(2),
    "through NumPy": lambda bank: weight(bank).detach().numpy().__imul__(2),
    "forward": lambda bank: setattr(part(bank), "forward", lambda states, *_args, **_options: states),
    "forward of another block": lambda bank: setattr(part(bank), "forward", bank.model.encoder.layer[0].forward),
    "activation": lambda bank: setattr(part(bank, "intermediate"), "intermediate_act_fn", nn.ReLU()),
    "class": lambda bank: setattr(part(bank, "output"), "__class__", Halved),
    "number that was None": lambda bank: setattr(bank.model.embeddings.word_embeddings, "max_norm", 0.1),
    "method": lambda bank: setattr(part(bank), "feed_forward_chunk", lambda states: states),
    "number": lambda bank: setattr(part(bank, "attention.self"), "scaling", 1.0),
    "number gone": lambda bank: delattr(part(bank, "attention.self"), "num_attention_heads"),
    "buffer": lambda bank: bank.model.embeddings.token_type_ids.add_(1),
    "config": lambda bank: setattr(bank.model.config, "is_decoder", True),
}


@pytest.mark.parametrize("change", one_in(4, CHANGES.values()), ids=CHANGES)
def test_a_change_is_noticed_by_every_pass_and_by_saving(
    change: Callable[[ReaderBank], object], bank: ReaderBank, batch: dict[str, torch.Tensor], tmp_path: Path
):
    bank(**batch)
    with torch.no_grad():
        change(bank)
    states = {"main": dict.fromkeys(range(4), torch.zeros(3, 7, 32))}
    for use in (bank, copy.deepcopy(bank)):
        with pytest.raises(ConfigError, match=MATCH):
            use(**batch)
    with pytest.raises(ConfigError, match=MATCH):
        bank.record_states({"main": [1]}, batch)
    with pytest.raises(ConfigError, match=MATCH):
        bank.read_states(states, batch)
    with pytest.raises(ConfigError, match=MATCH), bank.listen():
        pass
    with pytest.raises(ConfigError, match="save with changed_base=True"):
        bank.save_pretrained(tmp_path / "bank")
    assert not (tmp_path / "bank").exists()


def test_a_class_whose_forward_was_replaced_is_noticed(
    bank: ReaderBank, batch: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
):
    expected = bank(**batch)[first(bank)].logits
    with monkeypatch.context() as patch:
        patch.setattr(type(part(bank, "output")), "forward", lambda _self, states, _before: states[..., :32])
        with pytest.raises(ConfigError, match=r"BertOutput\.forward was replaced"):
            bank(**batch)
    assert torch.equal(bank(**batch)[first(bank)].logits, expected)  # it is back


@pytest.mark.parametrize("use", ["evaluate", "calibrate", "predict_file", "save"])
def test_one_number_that_was_written_without_a_trace_is_found_by_longer_work(
    use: str, bank: ReaderBank, tmp_path: Path
):
    if use == "calibrate":
        pytest.importorskip("scipy")
    name, rows = first(bank), [{"sentence": text, "label": "good"} for text in TEXTS]
    task = lamina.Task.from_dataset(
        "sequence_classification", {"validation": rows}, labels=bank[name].config.head.labels
    )
    (tmp_path / "texts.txt").write_text("bad\n")
    actions: dict[str, Callable[[], object]] = {
        "evaluate": lambda: lamina.evaluate(bank, {name: task}),
        "calibrate": lambda: calibrate(bank, lamina.Monitor(name, "bad"), task, threshold=0.5),
        "predict_file": lambda: lamina.predict_file(bank, tmp_path / "texts.txt", tmp_path / "out.jsonl"),
        "save": lambda: bank.save_pretrained(tmp_path / "bank"),
    }
    lamina.evaluate(bank, {name: task})
    weight(bank).data[0, 0] += 1
    with pytest.raises(ConfigError, match=r"ha(ve|s) other values"):
        actions[use]()


def test_what_changes_no_answer_is_no_change(bank: ReaderBank, batch: dict[str, torch.Tensor]):
    expected = bank(**batch)[first(bank)].logits
    bank.model.note, part(bank).note = [1], object()
    bank.model.config.note_of_mine = None
    bank.model.config.output_attentions = False
    bank.model.embeddings.position_ids = bank.model.embeddings.position_ids.clone()
    part(bank, "output.dropout").p = 0.5
    part(bank).forward = part(bank).forward
    assert torch.equal(bank(**batch)[first(bank)].logits, expected)


def test_settings_of_generation_and_notes_in_the_config_are_no_change(bank: ReaderBank, batch: dict[str, torch.Tensor]):
    expected = bank(**batch)[first(bank)].logits
    changes = {"decoder_start_token_id": 3, "forced_decoder_ids": None, "suppress_tokens": [], "my_run": "3"}
    for name, value in changes.items():
        setattr(bank.model.config, name, value)
    assert torch.equal(bank(**batch)[first(bank)].logits, expected)
    bank.model.config.hidden_act = "relu"
    with pytest.raises(ConfigError, match="hidden_act of its config is 'relu'"):
        bank(**batch)


def test_a_copy_is_checked_as_the_original(bank: ReaderBank):
    twin = copy.deepcopy(bank)
    twin.seal_base("fit")  # before any pass
    twin.seal_base("fit")
    twin.model.encoder.layer[0].output.dense.weight.data[0, 0] += 1
    with pytest.raises(ConfigError, match="have other values"):
        twin.seal_base("fit")
    bank.seal_base("fit")


def test_a_stack_that_lost_a_block_can_be_accepted():
    model: Any = FAMILIES["bert"].known()
    guard = WeightGuard(model, default_stack(model), {module: path for path, module in model.named_modules()})
    del model.encoder.layer[2]
    guard.follow(model)
    assert str(guard.change()).startswith("there is no 'encoder.layer.2.")
    guard.accept(model, "mark")
    assert guard.change() is None
    model.encoder.layer[0].output.dense.bias.data = torch.ones_like(model.encoder.layer[0].output.dense.bias)
    assert guard.change() == "'encoder.layer.0.output.dense.bias' has other values"


def test_weights_that_were_moved_do_not_stay_in_memory(bank: ReaderBank):
    weight = weakref.ref(bank.model.encoder.layer[0].output.dense.weight.untyped_storage())
    bank.model.double()  # new memory for the same parameters, as on another device
    gc.collect()
    assert weight() is None


def test_a_bank_that_takes_over_the_readers_goes_on(bank: ReaderBank, batch: dict[str, torch.Tensor], tmp_path: Path):
    with torch.no_grad():
        weight(bank).mul_(2)
    other = ReaderBank(bank.model).eval()
    other.update(bank)
    expected = other(**batch)[first(bank)].logits
    bank.save_pretrained(tmp_path, changed_base=True)  # told so, it seals the new weights and goes on too
    assert torch.equal(bank(**batch)[first(bank)].logits, expected)
    ReaderBank.from_pretrained(tmp_path, bank.model)


def test_a_failed_save_does_not_take_over_a_changed_base(
    bank: ReaderBank, batch: dict[str, torch.Tensor], tmp_path: Path
):
    with torch.no_grad():
        weight(bank).mul_(2)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="not a folder"):
        bank.save_pretrained(tmp_path / "file", changed_base=True)
    with pytest.raises(ConfigError, match=MATCH):
        bank(**batch)


def test_what_an_optimizer_leaves_alone_is_no_change(bank: ReaderBank, batch: dict[str, torch.Tensor]):
    optimizer = torch.optim.AdamW([*bank.model.parameters(), head := nn.Parameter(torch.zeros(2))], fused=True)
    head.sum().backward()
    optimizer.step()  # the frozen weights have no gradient
    bank.model.pooler.dense.weight.data.add_(1)  # no layer depends on the pooler
    bank(**batch)


def test_weights_that_came_back_are_the_same_if_their_fingerprint_is_known(
    bank: ReaderBank, batch: dict[str, torch.Tensor], tmp_path: Path
):
    expected = bank(**batch)[first(bank)].logits
    bank.save_pretrained(tmp_path)
    with torch.no_grad():
        weight(bank).mul_(2)
        with pytest.raises(ConfigError, match=MATCH):
            bank(**batch)
        weight(bank).mul_(0.5)
    assert torch.equal(bank(**batch)[first(bank)].logits, expected)


def test_a_change_that_leaves_no_trace_is_found_when_saving(bank: ReaderBank, tmp_path: Path):
    bank.save_pretrained(tmp_path)
    before = fingerprint(bank.model, "main")
    weight(bank).detach().numpy()[0, 0] *= 2
    with pytest.raises(ConfigError, match="the weights of the stack 'main' have other values"):
        bank.save_pretrained(tmp_path)
    assert before in (tmp_path / "lamina.json").read_text()


def test_a_change_while_the_bank_listens_leaves_the_main_job_alone(bank: ReaderBank, batch: dict[str, torch.Tensor]):
    with bank.listen() as heard:
        with torch.no_grad():
            weight(bank).mul_(2)
        states = bank.model(**batch).last_hidden_state
    assert torch.equal(states, bank.model(**batch).last_hidden_state)
    with pytest.raises(ConfigError, match=MATCH):
        heard[first(bank)]


def test_attention_that_a_model_replaces_for_short_texts_is_no_change():
    """BigBird reads short texts with full attention, and puts another module in its place for good."""
    model = FAMILIES["big_bird"].build()
    model.set_attention_type("block_sparse")
    bank = tiny_bank(model).eval()
    ids = torch.arange(9).unsqueeze(0) + 5
    first_pass = bank(input_ids=ids)[first(bank)].logits
    assert torch.equal(bank(input_ids=ids)[first(bank)].logits, first_pass)
    assert torch.equal(copy.deepcopy(bank)(input_ids=ids)[first(bank)].logits, first_pass)
    model.encoder.layer[0].attention.output.dense = nn.Identity()
    with pytest.raises(ConfigError, match=MATCH):
        bank(input_ids=ids)
