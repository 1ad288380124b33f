"""ExtraLayers: blocks of the base's architecture, called as the base calls its own; the base stays unchanged."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.formulas import view_of
from tests.support.portions import one_in
from tests.support.tiny import FAMILIES
from torch import Tensor, nn
from transformers import AutoModel, BertModel, DynamicCache, RobertaConfig
from transformers.models.bert.modeling_bert import BertLayer

from lamina.bank import Reader, ReaderBank
from lamina.errors import ConfigError
from lamina.fusion.extra_layers import ExtraLayers, _Call, _calls
from lamina.heads.token_classification import TokenClassification
from lamina.layers import stacks
from lamina.store.models import empty_model

HEAD = TokenClassification(("a", "b", "c"), encoder_layers=0, dropout=0.0)
VARIED = [
    ("bert", None),
    ("roberta-MaskedLM", None),
    ("albert", None),
    ("deberta-v2", None),
    ("modernbert", None),
    ("xlnet", None),
    ("openai-gpt", None),
    ("gpt2-CausalLM", None),
    ("llama", None),
    ("qwen2", None),
    ("gemma3_text", None),
    ("bart", "encoder"),
    ("bart", "decoder"),
    ("t5", "encoder"),
    ("t5", "decoder"),
    ("vit", None),
    ("wav2vec2", None),
]


@functools.cache
def model_of(name: str) -> Any:
    return FAMILIES[name].known()


def fresh(name: str) -> Any:
    return FAMILIES[name].known().requires_grad_(False)


def bank_of(model: Any, n: int = 1, stack: str | None = None, seed: int = 0) -> ReaderBank:
    bank = ReaderBank(model)
    bank.add("r", Reader(ExtraLayers(n), HEAD, stack, seed=seed))
    return bank.eval()


def stack_of(model: Any, name: str | None) -> Any:
    return stacks(model)[name or "main"]


# The blocks that are made without a model


def plain_block(block: Any, state: Tensor, mask: Tensor, heads: int) -> Tensor:
    """BERT's post-norm block for one text, after the paper: Vaswani et al. 2017, with gelu."""

    def linear(layer: Any, x: Tensor) -> Tensor:
        return x @ layer.weight.T + layer.bias

    def norm(layer: Any, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + layer.eps).sqrt() * layer.weight + layer.bias

    own, size = block.attention.self, state.shape[-1] // heads
    query, key, value = (linear(part, state) for part in (own.query, own.key, own.value))
    mixed = torch.zeros_like(state)
    for head in range(heads):
        at = slice(head * size, (head + 1) * size)
        for token in range(len(state)):
            score = torch.stack([query[token, at] @ key[other, at] / math.sqrt(size) for other in range(len(state))])
            weight = torch.where(mask, score.exp(), 0.0)
            mixed[token, at] = (weight / weight.sum()) @ value[:, at]
    state = norm(block.attention.output.LayerNorm, linear(block.attention.output.dense, mixed) + state)
    inner = linear(block.intermediate.dense, state)
    inner = 0.5 * inner * (1 + torch.erf(inner / math.sqrt(2)))
    return norm(block.output.LayerNorm, linear(block.output.dense, inner) + state)


@torch.no_grad()
def test_plain_blocks_are_berts():
    fusion: Any = ExtraLayers(n=2).build(3, 128).eval()
    for parameter in fusion.parameters():
        parameter += 0.1 * torch.randn(parameter.shape)
    states = torch.randn(3, 2, 5, 128)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 0]], dtype=torch.bool)
    got = fusion(states, mask)
    for row in range(2):
        expected = states[-1, row]
        for block in fusion.blocks:
            expected = plain_block(block, expected, mask[row], heads=2)
        torch.testing.assert_close(got[row, mask[row]], expected[mask[row]], rtol=1e-4, atol=1e-4)


def test_only_the_last_state_is_read():
    assert ExtraLayers().selector() == -1
    assert ExtraLayers().build(3, 12).active_layers() == (2,)


@pytest.mark.parametrize(("width", "heads"), [(12, 1), (64, 1), (100, 1), (200, 2), (384, 6), (1024, 16)])
def test_plain_blocks_have_heads_of_64_where_that_fits(width: int, heads: int):
    with torch.device("meta"):
        block: Any = ExtraLayers().build(1, width).blocks[0]
    assert block.attention.self.num_attention_heads == heads


def test_plain_blocks_start_as_berts_do():
    block: Any = ExtraLayers().build(1, 256).blocks[0]
    assert float(block.intermediate.dense.weight.detach().std()) == pytest.approx(0.02, rel=0.02)
    assert not bool(block.intermediate.dense.bias.any())
    assert bool((block.output.LayerNorm.weight == 1).all())


def test_a_text_without_tokens_gives_numbers():
    fusion = ExtraLayers().build(1, 64).eval()
    mask = torch.tensor([[True, True], [False, False]])
    assert bool(fusion(torch.randn(1, 2, 2, 64), mask).isfinite().all())


def test_the_size_is_the_papers():
    """Base+2 on RoBERTa-large, without a model and on one: 25,192,448 parameters."""
    config = RobertaConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, vocab_size=50
    )
    model = empty_model(config)
    with torch.device("meta"):
        plain = ExtraLayers(n=2).build(1, 1024)
    own = ExtraLayers(n=2).build_on(model, stacks(model)["main"], 1)
    for fusion in (plain, own):
        assert sum(parameter.numel() for parameter in fusion.parameters()) == 25_192_448
    assert all(parameter.is_meta and parameter.requires_grad for parameter in own.parameters())
    assert type(own.blocks[0]) is type(model.encoder.layer[-1])


def test_plain_blocks_follow_nothing():
    fusion, found = ExtraLayers().build(1, 32).eval(), stacks(model_of("bert"))["main"]
    with fusion.block_inputs(found):
        assert not found.blocks[-1]._forward_pre_hooks
        fusion(torch.randn(1, 2, 3, 32))


# Blocks of the base's own kind


@pytest.mark.parametrize(("name", "stack"), one_in(4, VARIED))
@torch.no_grad()
def test_a_new_block_with_the_last_ones_weights_gives_what_the_last_one_gave(name: str, stack: str | None):
    """Fed the state below, on texts of other lengths than the model was tried on; whatever the last block takes."""
    family, model = FAMILIES[name], model_of(name)
    found = stack_of(model, stack)
    fusion = ExtraLayers().build_on(model, found, 1).eval()
    last = found.blocks[-1]
    fusion.blocks[0].load_state_dict(last.state_dict())
    gave: list[Tensor] = []
    handle = last.register_forward_hook(lambda _m, _a, out: gave.append(out if isinstance(out, Tensor) else out[0]))
    batch = family.inputs(model, batch=3, tokens=12, seed=5)
    with fusion.block_inputs(found):
        out = model(**batch, output_hidden_states=True)
        handle.remove()
        below = out["hidden_states" if stack is None else f"{stack}_hidden_states"][-2]
        got = fusion(below.unsqueeze(0))
    expected = gave[-1].transpose(0, 1) if name == "xlnet" else gave[-1]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


@torch.no_grad()
def test_extra_layers_are_the_layers_of_a_deeper_model():
    model = fresh("bert")
    config = FAMILIES["bert"].config()
    config.num_hidden_layers = 5
    deep = BertModel(config).eval()
    deep.load_state_dict(model.state_dict(), strict=False)
    bank = bank_of(model, n=2)
    for extra, block in zip(bank["r"].fusion.blocks, deep.encoder.layer[3:], strict=True):
        extra.load_state_dict(block.state_dict())
    batch = FAMILIES["bert"].inputs(model, batch=3, tokens=9, seed=1)
    expected = bank["r"].head(deep(**batch).last_hidden_state, batch["attention_mask"].bool())
    torch.testing.assert_close(bank(**batch)["r"].logits, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "stack"), [case for case in VARIED if FAMILIES[case[0]].modality == "text" and case[1] != "decoder"]
)
@torch.no_grad()
def test_padding_changes_nothing(name: str, stack: str | None):
    model = model_of(name)
    bank = bank_of(model, n=2, stack=stack)
    batch = FAMILIES[name].inputs(model, batch=2, tokens=9, seed=3)
    whole, real = bank(**batch)["r"].logits, int(batch["attention_mask"][1].sum())
    assert real < 9
    alone = {key: value[1:] if key.startswith("decoder") else value[1:, :real] for key, value in batch.items()}
    torch.testing.assert_close(bank(**alone)["r"].logits[0], whole[1, :real], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "stack"), one_in(4, VARIED))
def test_new_blocks_are_initialised_and_learn(name: str, stack: str | None):
    family, model = FAMILIES[name], fresh(name)
    with torch.no_grad():
        for parameter in model.parameters():  # nothing is left at a value that it could start from
            parameter += 0.3 + 0.1 * torch.rand(parameter.shape)
    bank = bank_of(model, n=2, stack=stack)
    last = dict(stack_of(model, stack).blocks[-1].named_parameters())
    first, second = (dict(block.named_parameters()) for block in bank["r"].fusion.blocks)
    assert list(first) == list(last)
    for key, value in first.items():
        assert value.requires_grad, key
        assert not bool((value == last[key]).any()), key
        assert not bool((second[key] == last[key]).any()), key
        assert value.ndim == 1 or name == "xlnet" or not torch.equal(value, second[key]), key
        if "norm" in key.lower() and key.endswith("weight"):
            assert bool(((value == 1) | (value == 0)).all()), key  # Gemma counts its scales from 1
        if value.ndim == 1 and key.endswith("bias"):
            assert not bool(value.any()), key
    bank.train()(**family.inputs(model, seed=3))["r"].logits.square().sum().backward()
    assert all(bool(value.grad.isfinite().all()) for value in first.values() if value.grad is not None)
    without = [key for key, value in first.items() if value.grad is None]
    assert without == (["rel_attn.r_s_bias", "rel_attn.seg_embed"] if name == "xlnet" else [])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_new_blocks_start_with_the_spread_of_the_model():
    config = FAMILIES["bert"].config()
    config.initializer_range = 0.5
    model = AutoModel.from_config(config).eval().requires_grad_(False)
    block: Any = bank_of(model)["r"].fusion.blocks[0]
    assert float(block.intermediate.dense.weight.detach().std()) == pytest.approx(0.5, rel=0.1)
    assert not bool(block.intermediate.dense.bias.any())


def test_the_model_around_the_block_says_how_it_starts_and_else_torch_does():
    model = fresh("bert-SequenceClassification")
    model.bert._init_weights = lambda module: [nn.init.constant_(each, 7) for each in module.parameters(recurse=False)]
    assert all(bool((each == 7).all()) for each in bank_of(model)["r"].fusion.parameters())
    model.bert._init_weights = lambda module: None
    block: Any = bank_of(model)["r"].fusion.blocks[0]
    assert bool((block.output.LayerNorm.weight == 1).all())
    assert float(block.output.dense.weight.detach().abs().max()) == pytest.approx(1 / math.sqrt(64), rel=0.05)


def test_blocks_of_a_loaded_model_are_initialised_too(tmp_path: Path):
    """transformers marks what it has loaded, and its initialisers leave that alone."""
    model_of("bert").save_pretrained(tmp_path)
    model = BertModel.from_pretrained(tmp_path).eval().requires_grad_(False)
    last = model.encoder.layer[-1]
    for value in (last, *last.modules(), *last.parameters()):
        value._is_hf_initialized = True  # as deep inside `from_pretrained`
    block: Any = bank_of(model)["r"].fusion.blocks[0]
    assert not bool((block.output.dense.weight == last.output.dense.weight).any())


def test_the_seed_decides_how_blocks_start():
    one, same, other = (bank_of(model_of("bert"), seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not torch.equal(
        one["readers.r.fusion.blocks.0.output.dense.weight"], other["readers.r.fusion.blocks.0.output.dense.weight"]
    )


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
@torch.no_grad()
def test_a_base_in_half_precision_gets_blocks_in_single_precision(name: str):
    stack = "encoder" if name == "t5" else None
    half = copy.deepcopy(fresh(name)).bfloat16()
    bank, twin = bank_of(half, stack=stack), bank_of(copy.deepcopy(half).float(), stack=stack)
    assert {parameter.dtype for parameter in bank["r"].parameters()} == {torch.float32}
    batch = FAMILIES[name].inputs(half, seed=3)
    got = bank(**batch)["r"].logits
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, twin(**batch)["r"].logits, rtol=0, atol=0.1)


# The base's own pass


@pytest.mark.parametrize("name", ["gpt2-CausalLM", "llama-CausalLM", "bart-Seq2SeqLM", "t5-Seq2SeqLM"])
@torch.no_grad()
def test_generation_is_read_and_unchanged(name: str):
    family, model = FAMILIES[name], model_of(name)
    batch = {key: value for key, value in family.inputs(model, seed=4).items() if not key.startswith("decoder")}
    batch = {key: value.flip(1) for key, value in batch.items()}
    options = {"max_new_tokens": 4, "do_sample": False}
    plain = model.generate(**batch, **options)
    encoder_decoder = len(family.stacks) == 2
    for stack in family.stacks if encoder_decoder else (None,):
        bank = bank_of(model, n=2, stack=stack)
        with bank.listen() as heard:
            assert torch.equal(model.generate(**batch, **options), plain)
        if stack != "decoder":
            own = {"decoder_input_ids": torch.zeros(2, 1, dtype=torch.long)} if encoder_decoder else {}
            got, alone = heard["r"].logits[0], bank(**batch, **own)["r"].logits[0]  # of a text without padding
            torch.testing.assert_close(got, alone, rtol=0, atol=1e-6)
        assert bool(heard["r"].logits.isfinite().all())


@torch.no_grad()
def test_states_that_the_model_collects_are_its_own():
    """transformers collects states by hooks that stay on its modules: copies of them would add the new blocks'."""
    model, batch = fresh("llama"), FAMILIES["llama"].inputs(model_of("llama"), seed=1)
    plain = model(**batch, output_hidden_states=True, output_attentions=True)
    bank = bank_of(model, n=2)
    with bank.listen() as heard:
        out = model(**batch, output_hidden_states=True, output_attentions=True)
    assert "r" in heard
    assert len(out.hidden_states) == len(plain.hidden_states)
    assert len(out.attentions) == len(plain.attentions)
    assert torch.equal(out.hidden_states[-1], plain.hidden_states[-1])


@torch.no_grad()
def test_a_hook_of_the_base_is_not_copied():
    model = fresh("bert")
    heavy = nn.Module()
    calls: list[int] = []

    def hook(*_: Any, held: nn.Module = heavy) -> None:
        calls.append(1)

    model.encoder.layer[-1].output.register_forward_hook(functools.partial(hook, held=heavy))
    bank = bank_of(model)
    calls.clear()
    bank(**FAMILIES["bert"].inputs(model))
    assert len(calls) == 1
    assert all(not part._forward_hooks for part in bank["r"].fusion.modules())


@torch.no_grad()
def test_the_model_is_left_as_it_was():
    model = fresh("bert")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    attributes = [
        {key: value for key, value in vars(module).items() if "hooks" not in key} for module in model.modules()
    ]
    bank = bank_of(model, n=2)
    bank(**FAMILIES["bert"].inputs(model))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    for module, old in zip(model.modules(), attributes, strict=True):
        assert {key: value for key, value in vars(module).items() if "hooks" not in key} == old
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


@torch.no_grad()
def test_a_pass_is_forgotten_at_its_end_even_when_it_fails():
    model = fresh("bert")
    bank, found = bank_of(model), stacks(model)["main"]
    bank(**FAMILIES["bert"].inputs(model))
    fusion = bank["r"].fusion
    assert fusion not in _calls.get()
    following = bank["r"].fusion.block_inputs(found)
    following.__enter__()
    model(**FAMILIES["bert"].inputs(model))
    assert fusion in _calls.get()
    assert following.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None) is not True
    assert fusion not in _calls.get()
    assert not found.blocks[-1]._forward_pre_hooks


def test_a_call_is_recorded_without_its_caches():
    class Block(nn.Module):
        def forward(self, hidden: Tensor, *others: Any, **more: Any) -> tuple[Tensor, object]:
            return hidden + 1, (others, more)

    block, cache, state, mask = Block(), DynamicCache(), torch.randn(1, 2, 3), torch.ones(1, 2)
    for args, kwargs in (((state, cache), {"mask": mask}), ((), {"mask": mask, "past": cache, "hidden": state})):
        call = _Call.record(block, args, {**kwargs, "use_cache": True}, 0)
        assert call.arguments[call.place] is state
        seen: list[Any] = []
        handle = block.register_forward_hook(lambda _m, _a, out, seen=seen: seen.append(out[1]))
        assert torch.equal(call.run(block, 2 * state, None), 2 * state + 1)
        handle.remove()
        others, more = seen[0]
        assert others == ((None,) if args else ())
        assert more == {"mask": mask, "use_cache": False} | ({} if args else {"past": None})


@torch.no_grad()
def test_a_bank_runs_while_it_listens_to_the_model():
    model, batch = model_of("bert"), FAMILIES["bert"].inputs(model_of("bert"), seed=2)
    bank = bank_of(model)
    alone = bank(**batch)["r"].logits
    with bank.listen() as heard:
        assert torch.equal(bank(**batch)["r"].logits, alone)
        model(**batch)
        assert torch.equal(bank(**batch)["r"].logits, alone)
        assert torch.equal(heard["r"].logits, alone)


@torch.no_grad()
def test_what_is_saved_comes_back(tmp_path: Path):
    model, batch = model_of("deberta-v2"), FAMILIES["deberta-v2"].inputs(model_of("deberta-v2"), seed=2)
    bank = bank_of(model, n=2, seed=3)
    with torch.no_grad():
        for parameter in bank.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    bank.save_pretrained(tmp_path)
    again = ReaderBank.from_pretrained(tmp_path, model)
    assert torch.equal(again(**batch)["r"].logits, bank(**batch)["r"].logits)


# Random numbers


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_dropout_is_the_readers_own_and_on_while_training_only(name: str):
    model, batch = model_of(name), FAMILIES[name].inputs(model_of(name), seed=2)
    bank = bank_of(model, n=2)
    whole = bank(**batch)["r"].logits

    def trained(global_seed: int, step: int) -> Tensor:
        torch.manual_seed(global_seed)
        bank["r"].step = step
        return bank.train()(**batch)["r"].logits

    before = trained(1, 0)
    assert torch.equal(trained(2, 0), before)
    assert not torch.equal(trained(1, 1), before)
    assert not torch.equal(before, whole)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    bank(**batch)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(bank.eval()(**batch)["r"].logits, whole)


def test_in_eval_mode_no_random_number_is_drawn():
    fusion = ExtraLayers().build(1, 64).eval()
    fusion.generator = torch.Generator().manual_seed(0)
    before = fusion.generator.get_state()
    fusion(torch.randn(1, 2, 8, 64))
    assert torch.equal(fusion.generator.get_state(), before)


def test_each_extra_layer_has_its_own_dropout():
    fusion: Any = ExtraLayers(n=2).build(1, 64).train()
    fusion.blocks[1].load_state_dict(fusion.blocks[0].state_dict())
    gone: list[Tensor] = []
    for block in fusion.blocks:
        block.output.dropout.register_forward_hook(lambda _m, _a, out: gone.append(out == 0))
    fusion.generator = torch.Generator().manual_seed(0)
    fusion(torch.randn(1, 2, 8, 64))
    assert not torch.equal(gone[0], gone[1])


def test_without_a_generator_dropout_follows_torchs():
    fusion, states = ExtraLayers().build(1, 64).train(), torch.randn(1, 2, 8, 64)
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(fusion(states))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_a_base_that_recomputes_its_activations_is_copied_without_that():
    model = fresh("bert")
    model.encoder.layer[-1].gradient_checkpointing = True  # as `gradient_checkpointing_enable` does
    fusion = bank_of(model)["r"].fusion
    assert not any(getattr(part, "gradient_checkpointing", False) for part in fusion.modules())


# What cannot be


def test_values_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match=r"extra_layers: n is 0; it must be"):
        ExtraLayers(n=0)


def test_states_without_their_pass_are_refused():
    fusion = bank_of(model_of("bert"))["r"].fusion
    with pytest.raises(ConfigError, match=r"extra_layers: the states are not from a pass of the model;.*block_inputs"):
        fusion(torch.randn(1, 2, 3, 32))


@torch.no_grad()
def test_a_pass_that_continues_from_a_cache_is_refused():
    model = model_of("llama")
    bank, cache = bank_of(model), DynamicCache()
    ids = torch.randint(5, 99, (1, 6))
    with bank.listen() as heard:
        model(input_ids=ids[:, :4], past_key_values=cache, use_cache=True)
        torch.testing.assert_close(heard["r"].logits, bank(input_ids=ids[:, :4])["r"].logits)
        heard.clear()
        with pytest.raises(ConfigError, match="extra_layers: the pass continues from a cache of 4 tokens;"):
            model(input_ids=ids[:, 4:], past_key_values=cache, use_cache=True)


def test_a_stream_that_was_fed_nothing_says_so():
    fusion = ExtraLayers().build(1, 12)
    stream = fusion.stream([fusion])
    with pytest.raises(ConfigError, match="fusion: no state was fed"):
        stream.finish(torch.ones(1, 1, dtype=torch.bool))
    stream.step(0, view_of(torch.randn(1, 2, 12)))
    stream.finish(torch.ones(1, 2, dtype=torch.bool))
    with pytest.raises(ConfigError, match="no state was fed"):
        stream.finish(torch.ones(1, 2, dtype=torch.bool))


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("xlm", r"no blocks like those of 'xlm' can be made; it has no module per block\. Use another fusion"),
        ("big_bird", r"a copy of its last block does not run \(ValueError: .*block size"),
    ],
)
def test_families_whose_blocks_cannot_be_had_are_refused(name: str, match: str):
    """BigBird changes its blocks when a text is short, so no copy fits every text."""
    bank = ReaderBank(model_of(name))
    with pytest.raises(ConfigError, match=match):
        bank.add("r", Reader(ExtraLayers(), HEAD))
    assert len(bank) == 0


class Refusing(nn.Module):
    def forward(self, *_: Any, **__: Any) -> Any:
        raise ValueError("this reads something else")


@torch.no_grad()
def test_a_head_that_refuses_a_tiny_input_is_left_out():
    model = fresh("bert-SequenceClassification")
    model.classifier = Refusing()
    bank = bank_of(model)
    assert bool(bank(**FAMILIES["bert"].inputs(model))["r"].logits.isfinite().all())


@pytest.mark.parametrize("name", ["bert", "bert-SequenceClassification"])
def test_a_model_that_does_not_run_is_refused(name: str):
    model = fresh(name)
    found = stacks(model)["main"]
    model.base_model.embeddings = Refusing()
    with pytest.raises(ConfigError, match=r"does not run \(ValueError: this reads something else\)"):
        ExtraLayers().build_on(model, found, 1)


class Changing(BertLayer):
    """A block that gives something else each time, as one that keeps what it saw."""

    seen = 0

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        type(self).seen += 1e-2 * hasattr(self, "copied")
        return super().forward(*args, **kwargs) + self.seen

    def __deepcopy__(self, memo: Any) -> Any:
        twin = type(self)(FAMILIES["bert"].config())
        twin.load_state_dict(self.state_dict())
        twin.copied = True
        return twin


class Scaled(BertLayer):
    """A block with a vector that no initialiser knows."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.strength = nn.Parameter(torch.ones(32))


class Uncopied(BertLayer):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot pickle '_thread.lock' object")


@pytest.mark.parametrize(
    ("block", "match"),
    [
        (Changing, r"can be made; a copy of its last block gives another result\. Use another fusion"),
        (Scaled, r"nothing says how 'strength' of its blocks is initialised\. Use another fusion"),
        (Uncopied, r"does not run \(TypeError: cannot pickle '_thread\.lock' object\)"),
    ],
)
def test_a_block_that_cannot_be_copied_is_refused(block: Any, match: str):
    model = fresh("bert")
    model.encoder.layer[-1] = block(model.config).eval().requires_grad_(False)
    found = stacks(model)["main"]
    assert found.blocks[-1] is model.encoder.layer[-1]
    with pytest.raises(ConfigError, match=match):
        ExtraLayers().build_on(model, found, 1)


def test_a_block_that_does_not_take_the_state_below_is_refused():
    model = fresh("bert")
    found = stacks(model)["main"]
    upside_down = dataclasses.replace(found, blocks=found.blocks[::-1])
    with pytest.raises(ConfigError, match="can be made; its last block does not get the state of the layer below"):
        ExtraLayers().build_on(model, upside_down, 1)
