"""Law 1, the main job is untouched: what a bank reads, it does not change."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tests.support.formulas import stir_
from tests.support.portions import one_in
from tests.support.tiny import FAMILIES, HEADED, model_of
from torch import Tensor

from lamina.bank import Reader, ReaderBank
from lamina.errors import ConfigError
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.last_layer import LastLayer
from lamina.fusion.mean import Mean
from lamina.fusion.scalar_mix import ScalarMix
from lamina.fusion.single_layer import SingleLayer
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification

TALKING = ["bert-SequenceClassification", "gpt2-CausalLM", "llama-CausalLM", "bart-Seq2SeqLM", "t5-Seq2SeqLM"]
GENERATING = [name for name in TALKING if "bert" not in name]
VARIED = [
    "bert",
    "albert",
    "xlm",
    "fnet",
    "xlnet",
    "deberta-v2",
    "modernbert",
    "gpt2",
    "llama",
    "bloom",
    "bart",
    "t5",
    "vit",
    "wav2vec2",
    "whisper",
]
WAYS: list[dict[str, Any]] = [
    {"do_sample": False, "num_beams": 3},
    {"do_sample": False},
    {"do_sample": True, "num_return_sequences": 2},
    {"do_sample": True},
]
DECODER_ONLY = ["gpt2-CausalLM", "llama-CausalLM"]


def bank_of(model: Any, stack: str | None = None) -> ReaderBank:
    bank = ReaderBank(model)
    words = TokenClassification(("a", "b"), feedforward=16)
    for number, (fusion, head) in enumerate(
        [
            (AdaLayers(dim=16, alpha=2.0), SequenceClassification(("a", "b", "c"))),
            (AdaLayers(dim=16, alpha=2.0), words),
            (SingleLayer(layer=1, dim=8), SequenceClassification(("a", "b"))),
            (LastLayer(), SequenceClassification(("a", "b"), pooling="first")),
            (Mean(), words),
            (ScalarMix(), SequenceClassification(("a", "b"), pooling="mean")),
        ]
    ):
        stir_(bank.add(f"r{number}", Reader(fusion, head, stack, seed=number)), number, size=0.1)
    return bank.eval()


def stacks_of(name: str) -> tuple[str | None, ...]:
    return FAMILIES[name].stacks


def tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    return [tensor for part in output for tensor in tensors(part)] if isinstance(output, (list, tuple)) else []


def assert_same(one: Any, other: Any) -> None:
    first, second = tensors(one), tensors(other)
    assert len(first) == len(second) > 0
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def photograph(model: Any) -> list[Any]:
    leaves = [*model.named_parameters(), *model.named_buffers()]
    modules = [(name, module.training, id(module)) for name, module in model.named_modules()]
    return [[(name, id(leaf), leaf.clone(), leaf.requires_grad) for name, leaf in leaves], modules]


def assert_untouched(model: Any, before: list[Any]) -> None:
    leaves, modules = photograph(model)
    assert modules == before[1]
    assert not any(training for _, training, _ in modules)
    assert [(name, at) for name, at, _, _ in leaves] == [(name, at) for name, at, _, _ in before[0]]
    for (name, _, now, _), (_, _, then, _) in zip(leaves, before[0], strict=True):
        assert torch.equal(now, then), name
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in model.parameters())


def generating(name: str) -> tuple[Any, dict[str, Tensor]]:
    """A model and a prompt; the texts of decoders are padded on the left, as they must be."""
    family, model = FAMILIES[name], model_of(name)
    inputs = family.inputs(model, batch=3, tokens=8, seed=4)
    inputs.pop("decoder_input_ids", None)
    if name in DECODER_ONLY:
        inputs = {key: value.flip(1) for key, value in inputs.items()}
    return model, inputs


@pytest.mark.parametrize("name", one_in(4, HEADED))
@torch.no_grad()
def test_a_call_of_the_model_is_untouched(name: str):
    family, model = FAMILIES[name], model_of(name).eval()  # XLM's activation is a module that all XLMs share
    inputs = family.inputs(model, batch=3, tokens=9, seed=1)
    plain = model(**inputs)
    before = photograph(model)
    for stack in stacks_of(name):
        bank = bank_of(model, stack)
        assert_same(model(**inputs), plain)
        with bank.listen() as outputs:
            assert_same(model(**inputs), plain)
        assert set(outputs) == set(bank)
        assert_same(bank(**inputs, main=True).main, plain)
        assert bank(**inputs).main is None
        assert_same(model(**inputs), plain)
    assert_untouched(model, before)


@torch.no_grad()
def test_states_fewer_than_the_mask_says_are_refused():
    """SEW's encoder joins frames, and the model's own mask is of those before."""
    bank = ReaderBank(model_of("sew"))
    bank.add("r", Reader(AdaLayers(dim=8), SequenceClassification(("a", "b"))))
    with pytest.raises(ConfigError, match="Give a mask"):
        bank.eval()(**FAMILIES["sew"].inputs(model_of("sew"), batch=2, tokens=9, seed=1))


@pytest.mark.parametrize("name", one_in(4, VARIED, 1))
@torch.no_grad()
def test_listening_gives_the_outputs_of_the_bank(name: str):
    """Wherever the mask comes from, for each of a model's stacks."""
    family, model = FAMILIES[name], model_of(name)
    inputs = family.inputs(model, batch=2, tokens=9, seed=1)
    for stack in stacks_of(name):
        bank = ReaderBank(model)
        bank.add("r", Reader(AdaLayers(dim=8, alpha=2.0), SequenceClassification(("a", "b")), stack))
        bank.eval()
        with bank.listen() as outputs:
            plain = model(**inputs)
        out = bank(**inputs, main=True)
        assert_same(out.main, plain)
        assert torch.equal(outputs["r"].mask, out["r"].mask)
        assert torch.equal(outputs["r"].logits, out["r"].logits)
        assert torch.equal(bank(**inputs)["r"].logits, out["r"].logits)


@pytest.mark.parametrize(("name", "options"), one_in(3, itertools.product(GENERATING, WAYS)))
@torch.no_grad()
def test_generation_is_untouched_and_its_text_is_read(name: str, options: dict[str, Any]):
    model, inputs = generating(name)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, **options}

    def generate() -> Tensor:
        torch.manual_seed(3)
        return model.generate(**inputs, **options)

    plain, before = generate(), photograph(model)
    bank = bank_of(model)
    assert torch.equal(generate(), plain)
    with bank.listen() as outputs:
        assert torch.equal(generate(), plain)
    assert torch.equal(generate(), plain)
    assert_untouched(model, before)
    direct = dict(inputs)
    if name in DECODER_ONLY:
        direct["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    out = bank(**direct)
    assert set(outputs) == set(out)
    for reader in out:
        copies = len(outputs[reader].logits) // len(out[reader].logits)  # decoders read one row per beam or sample
        real = out[reader].mask.repeat_interleave(copies, 0)
        expected = out[reader].logits.repeat_interleave(copies, 0)
        assert torch.equal(outputs[reader].mask, real)
        got = outputs[reader].logits
        if got.ndim == 3:
            got, expected = got[real], expected[real]
        if copies == 1 and name not in DECODER_ONLY:
            assert torch.equal(got, expected)
        else:  # a batch of another size, or another way to the same mask, may sum in another order
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_encoder_is_read_once_per_text_while_beams_run():
    model, inputs = generating("bart-Seq2SeqLM")
    bank = bank_of(model, "encoder")
    with bank.listen() as outputs:
        model.generate(**inputs, max_new_tokens=4, num_beams=4)
    assert all(len(output.logits) == len(inputs["input_ids"]) for output in outputs.readers.values())
    out = bank(**inputs)
    assert all(torch.equal(outputs[name].logits, out[name].logits) for name in bank)


@torch.no_grad()
def test_readers_on_both_stacks_listen_and_record_together():
    family, model = FAMILIES["bart-Seq2SeqLM"], model_of("bart-Seq2SeqLM")
    inputs = family.inputs(model, batch=2, tokens=9, seed=1)
    bank = ReaderBank(model)
    for stack in ("encoder", "decoder"):
        bank.add(stack, Reader(AdaLayers(dim=8), SequenceClassification(("a", "b")), stack))
    bank.eval()
    alone = {}
    for stack in ("encoder", "decoder"):
        alone[stack] = bank(**inputs, readers=[stack])[stack].logits
    out = bank(**inputs)
    with bank.listen() as outputs:
        model(**inputs)
    for stack in ("encoder", "decoder"):
        assert torch.equal(out[stack].logits, alone[stack])
        assert torch.equal(outputs[stack].logits, alone[stack])
    states = bank.record_states({stack: bank[stack].layers for stack in bank}, inputs)
    read = bank.read_states(states, inputs)
    assert all(torch.equal(read[stack].logits, alone[stack]) for stack in bank)


@torch.no_grad()
def test_the_next_text_is_read_after_a_clear():
    family, model = FAMILIES["bert"], model_of("bert")
    bank = bank_of(model)
    first, second = (family.inputs(model, seed=seed) for seed in (1, 2))
    with bank.listen() as outputs:
        model(**first)
        model(**second)
        assert torch.equal(outputs["r0"].logits, bank(**first)["r0"].logits)
        outputs.clear()
        model(**second)
        assert torch.equal(outputs["r0"].logits, bank(**second)["r0"].logits)


@torch.no_grad()
def test_listening_uses_the_readers_at_the_time_of_the_call():
    family, model = FAMILIES["bert"], model_of("bert")
    bank = bank_of(model)
    inputs = family.inputs(model)
    with bank.listen() as outputs:
        stir_(bank, 5)
        model(**inputs)
    assert torch.equal(outputs["r0"].logits, bank(**inputs)["r0"].logits)


@pytest.mark.parametrize("name", one_in(2, TALKING))
def test_training_mode_concerns_the_readers_only(name: str):
    family, model = FAMILIES[name], FAMILIES[name].known()
    inputs = family.inputs(model)
    bank = bank_of(model)
    before = photograph(model)
    plain = model(**inputs)
    bank.train()
    assert all(reader.training for reader in bank.readers.children())
    assert_untouched(model, before)
    assert_same(bank(**inputs, main=True).main, plain)
    with bank.listen() as outputs:
        assert_same(model(**inputs), plain)
        assert not bank.training
    assert bank.training
    assert_untouched(model, before)
    expected = bank.eval()(**inputs)
    assert torch.equal(outputs["r0"].logits, expected["r0"].logits)


@pytest.mark.parametrize("name", one_in(2, TALKING))
def test_a_step_of_training_by_hand_reaches_the_readers_only(name: str):
    family, model = FAMILIES[name], FAMILIES[name].known()
    bank = bank_of(model)
    before = photograph(model)
    bank.train()
    optimizer = torch.optim.SGD([*bank.parameters(), *model.parameters()], lr=0.1, weight_decay=0.1)
    labels = {"r0": torch.tensor([0, 2]), "r3": torch.tensor([1, 0])}
    was = {key: value.clone() for key, value in bank.state_dict().items()}
    bank(**family.inputs(model), labels=labels, readers=list(labels)).loss.backward()
    optimizer.step()
    assert_untouched(model, before)
    moved = {key.split(".")[1] for key, value in bank.state_dict().items() if not torch.equal(value, was[key])}
    assert moved == {"r0", "r3"}


def test_a_bank_freezes_a_model_that_was_training():
    model = FAMILIES["bert-SequenceClassification"].known().train()
    ReaderBank(model)
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_nothing_stays_behind_after_an_error():
    family, model = FAMILIES["bert"], FAMILIES["bert"].known()
    bank = bank_of(model)
    bank(**family.inputs(model))

    def hooks() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    count = hooks()
    bank.train()
    with pytest.raises(ZeroDivisionError), bank.listen():
        raise ZeroDivisionError
    assert bank.training
    assert hooks() == count
    with pytest.raises(IndexError):
        bank(input_ids=torch.tensor([[10**6]]))
    assert hooks() == count
