"""Law 5, results do not depend on batching: every fusion under every head and pooling, padded on either side."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from typing import Any

import pytest
import torch
from tests.support.formulas import stir_
from tests.support.read_cases import FUSED, HEAD_SETTINGS, HEADED, built
from tests.support.stored import tiny_tokenizer
from tests.support.tiny import FAMILIES, model_of

from lamina.bank import BankOutput, Reader, ReaderBank
from lamina.errors import ConfigError
from lamina.heads import HEADS

PER_TOKEN = ("causal_lm", "masked_lm", "token_classification")  # the kinds whose logits are one row per token
VOCABULARY = ("causal_lm", "masked_lm")  # the kinds whose logits are over the base's vocabulary
LENGTHS = (3, 9, 1, 6)
FAMILIES_READ = ("bert", "gpt2", "t5")
EVERY = 12  # one in so many heads of each fusion is tried on each family, all of them with `-m full`
LEFT_OUT = pytest.param("gpt2", False, marks=pytest.mark.full)  # padded on the left, it is harder
PORTIONS = pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.full)], ids=["some", "all"])


@functools.cache
def pairs() -> dict[str, list[str]]:
    """The heads that each fusion takes; not all take all of them."""
    modules = {fusion: config.build(4, 32) for fusion, config in FUSED.items()}
    heads: dict[tuple[str, int], Any] = {}

    def fits(fusion: str, head: str) -> bool:
        key = head, modules[fusion].dim
        try:
            modules[fusion].check_head(heads.get(key) or heads.setdefault(key, built(*key)))
        except ConfigError:
            return False
        return True

    return {fusion: [head for head in HEADED if fits(fusion, head)] for fusion in FUSED}


@functools.cache
def read_by(family: str, whole: bool) -> list[tuple[str, str]]:
    """The pairs that are tried on this family: all that can read it, or a few heads of each fusion.

    The families differ in the heads that they leave out.
    """
    chosen = []
    for number, (fusion, heads) in enumerate(pairs().items()):
        token_wise = FUSED[fusion].build(4, 32).is_token_wise()
        heads = [h for h in heads if HEADED[h].kind != "causal_lm" or (family == "gpt2" and token_wise)]
        first = (number + 2 * FAMILIES_READ.index(family)) % min(EVERY, len(heads))
        chosen += [(fusion, head) for head in (heads if whole else heads[first::EVERY])]
    return chosen


@functools.cache
def all_readers(family: str, whole: bool) -> ReaderBank:
    """One reader for every pair; a single pass then serves every test."""
    return stirred(model_of(family), read_by(family, whole))


def stirred(model: Any, chosen: list[tuple[str, str]]) -> ReaderBank:
    bank = ReaderBank(model, tiny_tokenizer())
    for number, (fusion, head) in enumerate(chosen):
        stir_(bank.add(f"{fusion}_{head}", Reader(FUSED[fusion], HEADED[head], seed=number)), number, size=0.1)
    return bank.eval()


def rows() -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    return [torch.randint(5, 99, (length,), generator=rng) for length in LENGTHS]


def padded(texts: list[torch.Tensor], *, left: bool, fill: int = 0) -> dict[str, torch.Tensor]:
    longest = max(map(len, texts))
    ids, mask = torch.full((len(texts), longest), fill), torch.zeros(len(texts), longest, dtype=torch.long)
    for row, text in enumerate(texts):
        at = slice(longest - len(text), longest) if left else slice(0, len(text))
        ids[row, at], mask[row, at] = text, 1
    return {"input_ids": ids, "attention_mask": mask}


def batch_of(family: str, texts: list[torch.Tensor], *, left: bool) -> dict[str, torch.Tensor]:
    batch = padded(texts, left=left)
    if left:  # as generate does it
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return batch


@functools.cache
def results(family: str, left: bool, whole: bool) -> tuple[BankOutput, list[BankOutput], torch.Tensor]:
    bank = all_readers(family, whole)
    batch = batch_of(family, rows(), left=left)
    with torch.no_grad():
        return bank(**batch), [bank(**batch_of(family, [row], left=left)) for row in rows()], batch["attention_mask"]


def test_every_fusion_and_every_head_is_paired():
    """Only a fusion that says why it refuses a head is left out with it."""
    assert all(pairs().values())
    assert {head for heads in pairs().values() for head in heads} == set(HEADED)
    refused = {fusion.rpartition("-")[0] for fusion, heads in pairs().items() if set(heads) < set(HEADED)}
    assert refused == {"head2toe", "pooled_layers", "paired_layers"}


def test_every_run_tries_every_fusion_and_every_head():
    for family in FAMILIES_READ:
        tried = read_by(family, whole=False)
        assert {fusion for fusion, _ in tried} == set(FUSED)
        assert {head for _, head in tried} == {head for _, head in read_by(family, whole=True)}


def test_every_registered_head_has_cases():
    assert set(HEADS.names()) == set(HEAD_SETTINGS)


@pytest.mark.parametrize("name", HEADS.names())
def test_the_cases_use_every_option(name: str):
    unit_tested = {"dropout", "attention_dropout", "labels", "linear"}  # a head without a linear map is its pooling
    options = {field.name for field in dataclasses.fields(HEADS.get(name))} - unit_tested
    assert options == {key for settings in HEAD_SETTINGS[name] for key in settings} - {"labels"}


@PORTIONS
@pytest.mark.parametrize(("family", "left"), [("bert", False), LEFT_OUT, ("gpt2", True), ("t5", False)])
@pytest.mark.parametrize("head", HEADED)
def test_a_text_alone_is_that_text_in_a_batch(head: str, family: str, left: bool, whole: bool):
    together, alone, mask = results(family, left, whole)
    for name in (f"{fusion}_{head}" for fusion, other in read_by(family, whole) if other == head):
        for row, single in enumerate(alone):
            logits = together[name].logits[row]
            if HEADED[head].kind in PER_TOKEN:
                logits = logits[mask[row].bool()]
            assert bool(logits.isfinite().all()), name
            size = max(1.0, logits.abs().max().item()) if HEADED[head].kind in VOCABULARY else 1.0  # T5's are large
            torch.testing.assert_close(single[name].logits[0], logits, rtol=0, atol=1e-5 * size, msg=name)


@PORTIONS
@pytest.mark.parametrize(
    "way",
    [pytest.param(copy.deepcopy, marks=pytest.mark.full), lambda bank: pickle.loads(pickle.dumps(bank))],
    ids=["copy", "pickle"],
)
@torch.no_grad()
def test_a_copied_bank_gives_the_same_logits(way: Any, whole: bool):
    # A model of its own: once asked for hidden states, transformers' models carry hooks that cannot be pickled.
    bank, batch = stirred(FAMILIES["bert"].build(), read_by("bert", whole)), batch_of("bert", rows(), left=False)
    copied = way(bank)
    before, after = bank.state_dict(), copied.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
    expected, got = bank(**batch), copied(**batch)
    for name in bank:  # products of matrices depend on where in memory the weights lie, in the last bit
        torch.testing.assert_close(got[name].logits, expected[name].logits, rtol=1e-5, atol=1e-6)


def in_turn() -> list[Any]:
    """Each fusion under one head, and each head under some; every pair is in the batches above."""
    marks = {True: [], False: [pytest.mark.full]}
    return [
        pytest.param(fusion, head, marks=marks[number % len(HEADED) == other])
        for number, fusion in enumerate(FUSED)
        for other, head in enumerate(HEADED)
    ]


@pytest.mark.parametrize(("fusion", "head"), in_turn())
def test_what_stands_in_the_padding_changes_nothing(fusion: str, head: str):
    """The states of padding are no zeros; anything that forgot the mask reads them."""
    torch.manual_seed(0)
    module = FUSED[fusion].build(4, 32).eval()
    top = built(head, module.dim).eval()
    stir_(module, 1)
    stir_(top, 2)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]], dtype=torch.bool)
    states = torch.randn(4, 2, 5, 32)
    other = torch.where(mask[None, :, :, None], states, 50 * torch.randn(4, 2, 5, 32))
    with torch.no_grad():
        one, two = top(module(states, mask), mask), top(module(other, mask), mask)
    if HEADED[head].kind in PER_TOKEN:
        one, two = one[mask], two[mask]
    torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


@PORTIONS
@pytest.mark.parametrize("family", FAMILIES_READ)
@torch.no_grad()
def test_a_row_without_a_token_gives_numbers_and_leaves_the_others_alone(family: str, whole: bool):
    bank = all_readers(family, whole)
    batch = padded(rows(), left=False)
    batch["attention_mask"][1] = 0
    out, without = bank(**batch), bank(**{key: value[[0, 2, 3]] for key, value in batch.items()})
    for name in bank:
        assert bool(out[name].logits.isfinite().all()), name
        real = without[name].mask
        kept, expected = out[name].logits[[0, 2, 3]], without[name].logits
        if kept.ndim == 3:
            kept, expected = kept[real], expected[real]
        torch.testing.assert_close(kept, expected, rtol=0, atol=1e-5)


@PORTIONS
def test_training_and_inference_compute_the_same(whole: bool):
    """Without dropout, the way through gradients gives what the way without gives."""
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # blocks that a fusion adds follow these
    family = dataclasses.replace(FAMILIES["bert"], settings={**FAMILIES["bert"].settings, **none})
    bank = ReaderBank(family.build(), tiny_tokenizer())
    for number, (fusion, head) in enumerate(read_by("bert", whole)):
        config = FUSED[fusion]
        for key in ("dropout", "layer_dropout"):
            if hasattr(config, key):
                config = dataclasses.replace(config, **{key: 0.0})
        top = HEADED[head]
        if hasattr(top, "dropout"):
            top = dataclasses.replace(top, dropout=0.0)
        stir_(bank.add(f"{fusion}_{head}", Reader(config, top)), number, size=0.1)
    batch = padded(rows(), left=False)
    trained, asked = bank.train()(**batch), bank.eval()(**batch)
    for name in bank:
        one, other = trained[name].logits, asked[name].logits
        assert one.requires_grad
        assert not other.requires_grad
        if other.ndim == 3:
            one, other = one[asked[name].mask], other[asked[name].mask]
        torch.testing.assert_close(one.detach(), other, rtol=0, atol=5e-6, msg=name)


@pytest.mark.parametrize("head", HEADED)
def test_configs_survive_the_registry(head: str):
    config = HEADED[head]
    assert HEADS.from_dict(HEADS.to_dict(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.labels = ("x",)


@pytest.mark.parametrize("head", HEADED)
def test_every_parameter_of_a_head_learns(head: str):
    module = built(head)
    stir_(module)
    mask = torch.ones(2, 4, dtype=torch.bool)
    logits = module(torch.randn(2, 4, 32), mask)
    module.loss(logits, labels_for(HEADED[head], logits)).backward()
    still = [key for key, value in module.named_parameters() if value.grad is None]
    assert still == []


@pytest.mark.parametrize("head", HEADED)
def test_no_label_is_no_loss_and_no_gradient(head: str):
    """A batch may hold no label at all for a reader; NaN there would end its training."""
    module = built(head)
    logits = module(torch.randn(2, 4, 32), torch.ones(2, 4, dtype=torch.bool))
    loss = module.loss(logits, none_for(HEADED[head], logits))
    assert loss.item() == 0
    loss.backward()
    grads = [value.grad for value in module.parameters() if value.grad is not None]
    assert grads
    assert all(bool((grad == 0).all()) for grad in grads)


@pytest.mark.parametrize("head", HEADED)
def test_a_label_that_is_missing_counts_for_nothing(head: str):
    config = HEADED[head]
    module = built(head).eval()
    logits = module(torch.randn(3, 4, 32), torch.ones(3, 4, dtype=torch.bool))
    labels = labels_for(config, logits)
    gone = none_for(config, logits)
    expected, some = module.loss(logits[:2], labels[:2]), torch.cat([labels[:2], gone[2:]])
    torch.testing.assert_close(module.loss(logits, some), expected)
    torch.testing.assert_close(module.count(some), module.count(labels[:2]))  # what parts of a step are weighed by


def labels_for(config: Any, logits: torch.Tensor) -> torch.Tensor:
    rng = torch.Generator().manual_seed(7)
    problem = config.problem_type
    if problem == "regression":
        return torch.randn(len(logits), generator=rng)
    if problem == "multi_label":
        return torch.randint(0, 2, logits.shape, generator=rng)
    return torch.randint(0, logits.shape[-1], logits.shape[:-1], generator=rng)


def none_for(config: Any, logits: torch.Tensor) -> torch.Tensor:
    like = labels_for(config, logits)
    values = {"regression": float("nan"), "multi_label": -1, "classification": -100}
    return torch.full_like(like, values[config.problem_type])
