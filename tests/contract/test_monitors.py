"""Law 13 for monitors: a token's score does not depend on later tokens, and equals that of a plain pass."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import pytest
import torch
import transformers
from tests.support.formulas import stir_
from tests.support.portions import one_in
from tests.support.read_cases import FUSED, HEADED, built
from tests.support.tiny import FAMILIES, WRITERS, model_of
from torch import Tensor

from lamina.bank import Reader, ReaderBank
from lamina.bank.monitoring import read_tokens
from lamina.bank.stack_pass import StackPass
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.gated import Gated
from lamina.fusion.mean import Mean
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.layers import stacks
from lamina.layers.causality import is_causal
from lamina.monitors import EMA, AttentionMean, MeanScore, Monitor, MultiMax, RollingMax

LAYERS, WIDTH, TOKENS, KEPT = 4, 32, 9, 5


def changed_later(states: Tensor) -> Tensor:
    changed = states.clone()
    changed[..., KEPT:, :] += torch.randn(changed[..., KEPT:, :].shape, generator=torch.Generator().manual_seed(5))
    return changed


@pytest.mark.parametrize("name", FUSED)
@torch.no_grad()
def test_a_fusion_is_token_wise_if_and_only_if_it_says_so(name: str):
    """By really changing later tokens; what does not say so is refused, so it must have a reason."""
    fusion = FUSED[name].build(LAYERS, WIDTH).eval()
    stir_(fusion, 0)
    states = torch.randn(LAYERS, 2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    same = torch.allclose(fusion(changed_later(states))[:, :KEPT], fusion(states)[:, :KEPT], rtol=0, atol=1e-6)
    alone = torch.stack([fusion(states[:, :, at : at + 1])[:, 0] for at in range(TOKENS)], dim=1)
    each = alone.shape == fusion(states).shape and torch.allclose(alone, fusion(states), rtol=0, atol=1e-5)
    assert fusion.is_token_wise() is (same and each)


@pytest.mark.parametrize("name", HEADED)
@torch.no_grad()
def test_a_head_is_token_wise_if_and_only_if_it_says_so(name: str):
    head = built(name).eval()
    stir_(head, 0)
    features = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, TOKENS, dtype=torch.bool)
    alone = torch.stack([head(features[:, at : at + 1], mask[:, :1]).view(2, -1) for at in range(TOKENS)], dim=1)
    whole = head(features, mask)
    weights = features.new_zeros(2, TOKENS)
    if (token_map := head.token_map()) is not None:
        mapped = torch.nn.functional.linear(features, token_map.weight, token_map.bias)
        torch.testing.assert_close(mapped[..., : alone.shape[-1]], alone, rtol=0, atol=1e-5)
        if head.config.weighs_tokens:
            weights = mapped[..., -1]
    if head.pools:
        alone = (weights.softmax(1).unsqueeze(-1) * alone).sum(1)
    assert head.is_token_wise() is torch.allclose(alone, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "stack", "expected"),
    [
        *[(name, "main", True) for name in ("gpt2", "llama", "gemma3_text", "qwen2", "mixtral", "mamba", "bloom")],
        *[(name, "decoder", True) for name in ("bart", "t5", "whisper")],
        *[(name, "main", False) for name in ("bert", "xlnet", "vit", "wav2vec2")],
        *[(name, "encoder", False) for name in ("bart", "t5", "whisper")],
    ],
)
def test_whether_a_stack_is_causal_is_found_by_changing_later_tokens(name: str, stack: str, expected: bool):
    model = model_of(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert is_causal(model, stacks(model)[stack]) is expected
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


READERS = {
    "ada": Reader(AdaLayers(dim=8), TokenClassification(("a", "b"), encoder_layers=0)),
    "text": Reader(Mean(), SequenceClassification(("a", "b", "c"), pooling="mean"), seed=1),
    "asks": Reader(AdaLayers(dim=8), SequenceClassification(("a", "b"), pooling="query"), seed=2),
    "many": Reader(Gated(hidden=4), SequenceClassification(("a", "b"), pooling="mean", problem_type="multi_label")),
}
MONITORS = [
    Monitor("ada", "b", MeanScore(), name="mean"),
    Monitor("ada", "b", EMA(2.0), scale="log_odds", name="ema"),
    Monitor("text", ("a", "c"), RollingMax(2), name="rolling"),
    Monitor("text", ("a", "c"), MultiMax(), name="multi"),
    Monitor("many", ("a", "b"), name="several"),
    Monitor("asks", "b", AttentionMean(), scale="log_odds", name="attention"),
    Monitor("asks", "b", EMA(2.0), name="plain"),
]


@functools.cache
def bank_of(name: str) -> ReaderBank:
    """A generating model whose weights are as large as trained ones, so that the tokens before a token count."""
    family = FAMILIES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(name.encode()))
        model = getattr(transformers, WRITERS[name]).from_config(family.config()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1)
    bank = ReaderBank(model)
    for key, reader in READERS.items():
        bank.add(key, Reader(reader.fusion, reader.head, family.stacks[-1], seed=reader.seed))
    return bank.eval()


def prompt_of(name: str) -> dict[str, Tensor]:
    """Unequal prompts; those of decoders are padded on the left."""
    inputs = FAMILIES[name].inputs(bank_of(name).model, batch=3, tokens=8, seed=4)
    inputs.pop("decoder_input_ids", None)
    return {key: value.flip(1) for key, value in inputs.items()} if "main" in bank_of(name).stacks else inputs


def plain_scores(name: str, batch: dict[str, Tensor], ids: Tensor, begin: int) -> dict[str, Tensor]:
    """Every monitor's score after each token from `begin` on, of one text in one plain pass."""
    bank = bank_of(name)
    stack = bank.stacks[FAMILIES[name].stacks[-1]]
    key = "decoder_input_ids" if stack.name == "decoder" else "input_ids"
    states = bank.record_states({stack.name: range(stack.layers)}, {**batch, key: ids[None]})[stack.name]
    template = StackPass(bank.model, stack, {reader: bank[reader] for reader in READERS}, grad=False)
    logits = read_tokens(template, list(READERS), {layer: state[:, begin:] for layer, state in states.items()})
    mask = torch.ones(1, len(ids) - begin, dtype=torch.bool)
    scores = {}
    for monitor in MONITORS:
        own = monitor.token_scores(logits[monitor.reader], bank[monitor.reader].config.head)
        scores[str(monitor.name)] = monitor.aggregate.running(own, mask)[0]
    return scores


def end_of(name: str, inputs: dict[str, Tensor], options: dict[str, Any]) -> int:
    """A token that ends some texts early, the others not or elsewhere, by what a run writes that knows no end."""
    torch.manual_seed(3)
    free = bank_of(name).model.generate(**inputs, **options, eos_token_id=98)[:, -7:]
    tokens = [token for token in free.unique().tolist() if token not in (0, 98)]
    places = {token: [[*row[:6].tolist(), token].index(token) for row in free] for token in tokens}
    return max(places, key=lambda token: (len({*places[token]}) > 1, min(places[token])))


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "num_return_sequences": 2},
    "no cache": {"use_cache": False},
    "three at a time": {},
}


CASES = [
    (name, mode, over)
    for name in WRITERS
    for mode in [*MODES][: 4 if name in ("gpt2", "bart") else 2]
    for over in ("output", "both")
]


@pytest.mark.parametrize(("name", "mode", "over"), one_in(14, CASES))
@torch.no_grad()
def test_scores_while_it_writes_are_those_of_one_plain_pass(name: str, mode: str, over: Any):
    bank, inputs, options = bank_of(name), prompt_of(name), {"max_new_tokens": 7, "pad_token_id": 0, **MODES[mode]}
    options = {"do_sample": False, "repetition_penalty": 3.0, **options}
    options["eos_token_id"] = end_of(name, inputs, options)
    torch.manual_seed(3)
    expected = bank.model.generate(**inputs, **options)
    torch.manual_seed(3)
    every = 3 if mode == "three at a time" else 1
    steps = list(bank.stream(bank.model, inputs, monitors=MONITORS, over=over, every=every, **options))
    written = torch.stack([step.tokens for step in steps], dim=1)
    if name == "whisper":  # whose `generate` takes the start and end tokens away
        written = written.where(written != options["eos_token_id"], 0)
        expected = torch.cat([torch.full_like(expected[:, :1], 3), expected], dim=1)
    width = expected.shape[1] - len(steps)
    assert torch.equal(written, expected[:, width:])
    copies, lengths = len(expected) // 3, []
    for row, ids in enumerate(expected):
        own = [step.index for step in steps if step.real[row]]
        assert own == list(range(len(own)))
        lengths.append(len(own))
        batch = {} if "main" in bank.stacks else {key: value[row // copies][None] for key, value in inputs.items()}
        pad = int((~inputs["attention_mask"][row // copies].bool()).sum()) if "main" in bank.stacks else 0
        text = ids[pad : width + len(own) - 1]  # the last token is read by no step
        if len(text) == (0 if over == "both" else width - pad):
            assert all(steps[0].scores[key][row].isnan() for key in steps[0].scores)
            continue
        scores = plain_scores(name, batch, text, 0 if over == "both" else width - pad)
        for key, score in scores.items():
            got = torch.stack([step.scores[key][row] for step in steps[: len(own)]])
            want = score[width - pad - 1 :][1:] if over == "both" else score
            torch.testing.assert_close(got[: len(want)], want, rtol=0, atol=1e-5)
            assert torch.equal(got[-1:], got[-2:-1] if len(want) else got[-1:])
    assert len(set(lengths)) > 1
