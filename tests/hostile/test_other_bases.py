"""A base that computes something else than the one the readers were trained on: adapters, packed weights, copies."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.adapters import adapted, add_adapter, enable_adapters, set_adapter
from tests.support.portions import one_in
from tests.support.stored import TEXTS, logits, tiny_bank, tiny_model, tiny_tokenizer
from tests.support.training import reader, yes_no
from torch import nn

from lamina import ReaderBank, edits, fit, insert_, merge_, reinit_, save, tap, truncate_
from lamina.errors import BaseMismatchError, ConfigError, LaminaError, UnsupportedModelError
from lamina.layers import stacks
from lamina.layers.fingerprints import fingerprint
from lamina.layers.layer_guard import is_read_by_bank

pytestmark = pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")


def with_adapters(*names: str) -> Any:
    model = tiny_model()
    for seed, name in enumerate(names):
        add_adapter(model, name, seed)
    return model


def last_state(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**tiny_tokenizer()(TEXTS, return_tensors="pt", padding=True)).last_hidden_state


def disabled(model: Any) -> None:
    enable_adapters(model, False)


def other(model: Any) -> None:
    set_adapter(model, "b")


def both(model: Any) -> None:
    set_adapter(model, ["a", "b"])


def scaled(model: Any) -> None:
    for layer in adapted(model):
        layer.scaling["a"] = 3.0


CHANGES = [disabled, other, both, scaled]


@pytest.mark.parametrize("change", one_in(2, CHANGES))
def test_a_base_with_other_adapters_is_another_base(change: Callable[[Any], None], tmp_path: Path):
    model = with_adapters("b", "a")
    tiny_bank(model).save_pretrained(tmp_path)
    expected = logits(ReaderBank.from_pretrained(tmp_path, with_adapters("b", "a"), tiny_tokenizer()))
    assert all(torch.equal(value, expected[name]) for name, value in logits(tiny_bank(model)).items())
    before = last_state(model)
    change(model)
    assert not torch.equal(last_state(model), before)
    with pytest.raises(BaseMismatchError, match="fingerprint was"):
        ReaderBank.from_pretrained(tmp_path, model, tiny_tokenizer())
    with pytest.raises(BaseMismatchError, match="fingerprint was"):
        ReaderBank.from_pretrained(tmp_path, tiny_model(), tiny_tokenizer())


def test_a_saved_bank_names_the_adapters_of_its_base(tmp_path: Path):
    tiny_bank(with_adapters("b", "a")).save_pretrained(tmp_path / "adapted")
    tiny_bank(with_adapters("none")).save_pretrained(tmp_path / "none")
    tiny_bank().save_pretrained(tmp_path / "plain")
    for folder, model, said in [
        ("adapted", tiny_model(), r"adapters was a, here none; .* \(model=PeftModel.from_pretrained"),
        ("adapted", with_adapters("b"), "adapters was a, here b; "),
        ("none", tiny_model(), r"adapters was none, here none; .* \(model=PeftModel.from_pretrained"),
        ("plain", with_adapters("b"), r"adapters was none, here b; .* \(model=, or --model\)"),
    ]:
        with pytest.raises(BaseMismatchError, match=said):
            ReaderBank.from_pretrained(tmp_path / folder, model, tiny_tokenizer())
    manifest = tmp_path / "adapted" / "lamina.json"  # as an earlier version saved it
    facts = json.loads(manifest.read_text())
    del facts["base"]["adapters"]
    manifest.write_text(json.dumps(facts))
    assert ReaderBank.from_pretrained(tmp_path / "adapted", with_adapters("b", "a"), tiny_tokenizer()).readers
    with pytest.raises(BaseMismatchError, match="another base: fingerprint was"):
        ReaderBank.from_pretrained(tmp_path / "adapted", tiny_model(), tiny_tokenizer())


def test_what_computes_the_same_is_the_same_base():
    plain, idle, merged = tiny_model(), with_adapters("a"), with_adapters("a")
    alone, beside = with_adapters("a"), with_adapters("a", "b")
    enable_adapters(idle, False)
    set_adapter(beside, "a")
    for layer in adapted(merged):
        layer.merge()
    folded = tiny_model()
    for block, from_ in zip(folded.encoder.layer, merged.encoder.layer, strict=True):
        block.attention.self.query.weight.data = from_.attention.self.query.base_layer.weight.data
    for first, second in ((plain, idle), (alone, beside), (merged, folded)):
        assert torch.equal(last_state(first), last_state(second))
        assert fingerprint(first, "main") == fingerprint(second, "main")
    assert len({fingerprint(model, "main") for model in (plain, alone, merged)}) == 3


@pytest.mark.parametrize("change", [*CHANGES[:3], lambda model: add_adapter(model, "c", 5)])
def test_a_bank_notices_that_other_adapters_are_used(change: Callable[[Any], None]):
    model = with_adapters("b", "a")
    bank = tiny_bank(model)
    logits(bank)
    change(model)
    with pytest.raises(ConfigError, match="computed with the adapters a, and does with"):
        logits(bank)


def test_a_bank_notices_that_adapters_came_or_went():
    model = tiny_model()
    bank = tiny_bank(model)
    logits(bank)
    add_adapter(model)
    with pytest.raises(ConfigError, match="with the adapters none, and does with default now"):
        logits(bank)
    enable_adapters(model, False)
    logits(bank)
    enable_adapters(model, True)
    bank = tiny_bank(model)
    for block in model.encoder.layer:
        block.attention.self.query = block.attention.self.query.base_layer
    with pytest.raises(ConfigError, match="with the adapters default, and does with none now"):
        logits(bank)


def test_a_bank_says_that_its_adapters_were_merged():
    model = with_adapters("a")
    bank = tiny_bank(model)
    logits(bank)
    for layer in adapted(model):
        layer.merge()
    with pytest.raises(ConfigError, match="with the adapters a, which are merged into its weights now"):
        logits(bank)


def test_adapters_are_refused_before_frozen_weights():
    with pytest.raises(ConfigError, match="bank: train_base is set: the model carries adapters"):
        ReaderBank(with_adapters("a").requires_grad_(False), train_base=True)


def test_a_pass_that_would_change_weights_is_no_probe():
    model = with_adapters("a")
    for layer in adapted(model):
        layer.merge()
    enable_adapters(model, False)
    before = model.encoder.layer[0].attention.self.query.base_layer.weight.clone()
    with pytest.raises(
        UnsupportedModelError, match=r"stacks: this state of the model is .* merged and disabled\. Call unmerge"
    ):
        stacks(model)
    assert torch.equal(before, model.encoder.layer[0].attention.self.query.base_layer.weight)


def test_a_prompt_that_was_learned_is_refused():
    model = tiny_model()
    model.active_peft_config = type("PromptConfig", (), {"is_prompt_learning": True})()
    with pytest.raises(
        UnsupportedModelError, match=r"the model's adapter \(PEFT\) is not supported; it learns a prompt"
    ):
        stacks(model)


# Weights that are no parameters


class Packed(nn.Module):
    """A linear map of integers and scales, as GPTQ and AWQ keep it: in buffers."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", (linear.weight.detach() / scale).round().to(torch.int32))
        self.register_buffer("scales", scale)
        self.bias = linear.bias

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(states, self.qweight * self.scales, self.bias)


class Scaled(torch.Tensor):
    """A weight that is two tensors inside, as torchao's."""

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scale: torch.Tensor) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype)

    def __init__(self, numbers: torch.Tensor, scale: torch.Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].numbers, args[0].scale)
        plain = [arg.numbers * arg.scale if isinstance(arg, Scaled) else arg for arg in args]
        return func(*plain, **(kwargs or {}))


def dynamic(model: Any) -> Any:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def packed(model: Any) -> Any:
    for block in model.encoder.layer:
        block.attention.self.query = Packed(block.attention.self.query)
    return model


def subclassed(model: Any) -> Any:
    for block in model.encoder.layer:
        query = block.attention.self.query
        parts = Packed(query)
        query.weight = nn.Parameter(Scaled(parts.qweight, parts.scales), requires_grad=False)
    return model


@pytest.mark.parametrize("pack", one_in(3, [dynamic, packed, subclassed]))
def test_packed_weights_count(pack: Callable[[Any], Any], tmp_path: Path):
    changed = tiny_model()
    weight = changed.encoder.layer[1].attention.self.query.weight.data
    weight[0] += 0.01 * weight[0].abs().max() * torch.linspace(-1, 1, 32)
    first, again, third = pack(tiny_model()), pack(tiny_model()), pack(changed)
    assert fingerprint(first, "main") == fingerprint(again, "main")
    assert len({fingerprint(model, "main") for model in (first, third, tiny_model())}) == 3
    assert not torch.equal(last_state(first), last_state(third))
    tiny_bank(first).save_pretrained(tmp_path)
    assert len(ReaderBank.from_pretrained(tmp_path, again, tiny_tokenizer())) == 2
    with pytest.raises(BaseMismatchError, match="fingerprint was"):
        ReaderBank.from_pretrained(tmp_path, third, tiny_tokenizer())


def test_packed_weights_are_read_and_not_changed(tmp_path: Path):
    model = subclassed(tiny_model())
    for edit in (insert_, reinit_, lambda own, layers: truncate_(own, layers[0])):
        with pytest.raises(LaminaError, match="quantis"):
            edit(model, layers=[1])
    with pytest.raises(ConfigError, match=r"save: the model was quantised after it was loaded"):
        save(model, tmp_path / "model")
    bank = ReaderBank(model, tiny_tokenizer(), train_base=True)
    bank.add("mood", reader(yes_no()))
    with pytest.raises(ConfigError, match=r"fit: the model was quantised after it was loaded"):
        fit(bank, {"mood": yes_no()}, progress=False)
    quantised = tiny_model()
    quantised.encoder.layer[1].output.dense.weight_qtype = "qint8"  # as quanto marks it before its `freeze`
    with pytest.raises(ConfigError, match=r"save: the model was quantised after it was loaded"):
        save(quantised, tmp_path / "model")
    inserted = tiny_model()
    insert_(inserted, layers=[1])
    with pytest.raises(UnsupportedModelError, match=r"is a Linear whose weight is packed, not a plain linear map"):
        merge_(subclassed(inserted))


# Copies


def pickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


WAYS = [copy.copy, copy.deepcopy, pickled]


@pytest.mark.parametrize("way", one_in(3, WAYS))
def test_a_copy_of_a_bank_is_as_guarded(way: Callable[[Any], Any], tmp_path: Path):
    bank = tiny_bank()
    expected = logits(bank)
    way(bank).save_pretrained(tmp_path / "at once")  # before any pass
    copied = way(bank)
    assert [module.training for module in copied.model.modules()] == [
        module.training for module in bank.model.modules()
    ]
    assert not any(parameter.requires_grad for parameter in copied.model.parameters())
    assert is_read_by_bank(copied.model)
    assert all(torch.equal(value, expected[name]) for name, value in logits(copied).items())
    copied.save_pretrained(tmp_path)
    with pytest.raises(BaseMismatchError, match="fingerprint was"):
        ReaderBank.from_pretrained(tmp_path, tiny_model(1), tiny_tokenizer())
    truncate_(copied.model, 2)
    with pytest.raises(ConfigError, match=r"it was edited \(truncate\)"):
        logits(copied)
    if way is not copy.copy:  # which reads the same model
        assert all(torch.equal(value, expected[name]) for name, value in logits(bank).items())
    copied = way(bank)
    truncate_(bank.model, 2)
    with pytest.raises(ConfigError, match=r"it was edited \(truncate\)"):
        logits(bank)
    if way is not copy.copy:
        copied.model.encoder.layer[1] = nn.Identity()
        with pytest.raises(ConfigError, match=r"'encoder\.layer\.1' is another module"):
            logits(copied)


@pytest.mark.parametrize("way", WAYS[1:])
def test_a_copy_of_a_model_with_adapters_is_as_guarded(way: Callable[[Any], Any]):
    bank = tiny_bank(with_adapters("b", "a"))
    logits(bank)
    copied = way(bank)
    set_adapter(copied.model, "b")
    with pytest.raises(ConfigError, match="computed with the adapters a, and does with b"):
        logits(copied)
    logits(bank)


def one_scaled(model: Any) -> None:
    adapted(model)[-1].scaling = {"a": 3.0, "b": 2.0}


def one_disabled(model: Any) -> None:
    adapted(model)[1]._disable_adapters = True


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (scaled, r"scaling of the adapter 'a' of '\S+0\.\S+' is 3\.0, not 2\.0"),
        (one_scaled, r"scaling of the adapter 'a' of '\S+2\.\S+' is 3\.0, not 2\.0"),
        (one_disabled, r"active_adapters of '\S+1\.\S+' is None, not \('a',\)"),
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_a_bank_notices_other_settings_of_adapters(change: Any, said: str, way: Callable[[Any], Any]):
    bank = tiny_bank(with_adapters("b", "a"))
    before = logits(bank)
    bank = way(bank)
    adapted(bank.model)[0].scaling["b"] = 7.0  # not active
    assert all(torch.equal(value, before[name]) for name, value in logits(bank).items())
    change(bank.model)
    with pytest.raises(ConfigError, match=said):
        logits(bank)


@pytest.mark.parametrize("way", one_in(2, WAYS[1:]))
def test_a_copy_of_an_edited_model_is_edited(way: Callable[[Any], Any], tmp_path: Path):
    model = tiny_model()
    insert_(model, position="both", init="xavier")
    truncate_(model, 2)
    copied = way(model)
    assert edits(copied) == edits(model)
    assert torch.equal(last_state(copied), last_state(model))
    hooks = [len(module._forward_hooks) for module in model.modules()]
    assert [len(module._forward_hooks) for module in copied.modules()] == hooks
    tiny_bank_of_top = ReaderBank(copied, tiny_tokenizer())
    tiny_bank_of_top.save_pretrained(tmp_path)
    assert len(ReaderBank.from_pretrained(tmp_path, model, tiny_tokenizer())) == 0
    with pytest.raises(BaseMismatchError, match="layers was 3, here 4"):
        ReaderBank.from_pretrained(tmp_path, tiny_model(), tiny_tokenizer())
    merge_(copied)
    assert len(edits(model)) == 2


@pytest.mark.parametrize("way", WAYS[1:])
def test_a_copy_of_a_reader_is_that_reader(way: Callable[[Any], Any]):
    bank = tiny_bank()
    reader, copied = bank["mood"], way(bank["mood"])
    assert (copied.config, copied.layers, copied.training, copied.step) == (reader.config, reader.layers, False, 0)
    assert all(torch.equal(value, copied.state_dict()[name]) for name, value in reader.state_dict().items())
    assert not any(ours is theirs for ours, theirs in zip(reader.parameters(), copied.parameters(), strict=True))


def test_a_copy_that_is_made_while_a_bank_listens_is_not_heard():
    bank = tiny_bank()
    batch, expected = dict(tiny_tokenizer()(TEXTS, return_tensors="pt", padding=True)), logits(bank)
    with bank.listen() as heard, tap(bank.model) as states, torch.no_grad():
        copied = copy.deepcopy(bank.model)
        copied(**batch)
        assert (list(heard), list(states)) == ([], [])
        bank.model(**batch)
        copied(**batch)
    assert torch.equal(heard["mood"].logits, expected["mood"])
    assert len(states) == 4
