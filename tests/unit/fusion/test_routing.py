"""Routing against its definition with all votes in memory, and padding."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.training import tiny_bank, tiny_tokenizer, train, yes_no
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lamina import evaluate
from lamina.bank import Reader
from lamina.errors import ConfigError
from lamina.fusion.routing import Route, Routing
from lamina.heads.sequence_classification import SequenceClassification
from lamina.store import load_bank, save_bank


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def normalised(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def routed(stage: Any, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """One text, one stage, input by input and output by output: inputs `[inputs, size]` -> `[outputs, size]`.

    And what each input was worth to each output `[inputs, outputs]`, in the last round.
    """
    count, outputs = len(inputs), stage.vote_bias.shape[0]
    at = [min(i, stage.activation.shape[0] - 1) for i in range(count)]
    scaled = inputs / math.sqrt(count)
    active = torch.stack(
        [sigmoid(scaled[i] @ stage.activation[at[i]] + stage.activation_bias[at[i]]) for i in range(count)]
    )
    vote = lambda i, j: (scaled[i] * stage.vote_scale[j]) @ stage.vote_map + stage.vote_bias[j]  # noqa: E731
    votes = torch.stack([torch.stack([vote(i, j) for j in range(outputs)]) for i in range(count)])
    if isinstance(stage.worth, torch.nn.Linear):
        both = inputs @ stage.worth.weight.T + stage.worth.bias
        use, ignore = both[:, :outputs], both[:, outputs:]
    else:
        use, ignore = stage.worth[0], stage.worth[1]
    share = torch.full((count, outputs), 1 / outputs)
    result = worth = torch.zeros(())
    for iteration in range(stage.iterations):
        if iteration:
            known = result if result.shape[-1] == 1 else normalised(result)
            guess = torch.stack(
                [known[j] @ stage.guess_map * stage.guess_scale[j] + stage.guess_bias[j] for j in range(outputs)]
            )
            match = torch.stack(
                [inputs[i] @ guess.T * stage.match_scale[at[i]] + stage.match_bias[at[i]] for i in range(count)]
            )
            score = torch.log(sigmoid(match))
            share = score.exp() / score.exp().sum(1, keepdim=True)
        worth = use * active[:, None] * share - ignore * active[:, None] * (1 - share)
        result = (worth[..., None] * votes).sum(0)
    return (result if result.shape[-1] == 1 else normalised(result)), worth


def reference(fusion: Any, states: Tensor, mask: Tensor) -> Tensor:
    """The features, text by text (or token by token), padding cut off before anything is computed."""
    return with_credit(fusion, states, mask)[0]


def with_credit(fusion: Any, states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The features, and the credit `[batch, layers, tokens, dim]`: a sum over all ways through the stages."""
    layers, batch, tokens, _ = states.shape
    features, credit = torch.zeros(batch, tokens, fusion.dim), torch.zeros(batch, layers, tokens, fusion.dim)
    inputs = normalised(states) * fusion.scale[:, None, None] + fusion.shift[:, None, None]
    for row in range(batch):
        real = [t for t in range(tokens) if mask[row, t]]
        for group in [[t] for t in real] if fusion.config.per_token else [real]:
            out = inputs[:, row, group].flatten(0, 1)
            ways = torch.eye(len(out))
            for stage in fusion.stages:
                out, worth = routed(stage, out)
                ways = torch.stack([sum(way[i] * worth[i] for i in range(len(worth))) for way in ways])
            features[row, group if fusion.config.per_token else slice(None)] = out.squeeze(-1)
            credit[row][:, group] = ways.view(layers, len(group), fusion.dim)
    return features, credit


def stirred(module: torch.nn.Module, seed: int = 1) -> torch.nn.Module:
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=rng)
    return module


def states_and_mask() -> tuple[Tensor, Tensor]:
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[1, 4:], mask[2, :3] = False, False
    return torch.randn(4, 3, 6, 12, generator=torch.Generator().manual_seed(2)), mask


CASES = [
    {"dim": 5, "vectors": 3},
    {"dim": 2, "vectors": 4, "size": 7},
    {"dim": 3, "vectors": 3, "size": 6, "iterations": 3},
    {"dim": 5, "vectors": 3, "size": 6, "per_token": True},
]


@pytest.mark.parametrize("settings", CASES)
@torch.no_grad()
def test_it_is_its_definition_with_every_vote(settings: dict[str, Any]):
    fusion: Any = stirred(Routing(**settings).build(4, 12))
    states, mask = states_and_mask()
    got, expected = fusion(states, mask), reference(fusion, states, mask)
    assert got.shape == (3, 6, settings["dim"])
    torch.testing.assert_close(got[mask], expected[mask], rtol=1e-5, atol=1e-5)
    assert expected[mask].std(0).min() > 1e-3  # texts differ: the comparison says something


@pytest.mark.parametrize("settings", CASES)
@torch.no_grad()
def test_credit_is_the_product_of_the_stages_worths(settings: dict[str, Any]):
    fusion: Any = stirred(Routing(**settings).build(4, 12))
    states, mask = states_and_mask()
    got, expected = fusion.credit(states, mask), with_credit(fusion, states, mask)[1]
    assert got.shape == (3, 4, 6, settings["dim"])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    assert bool((got < 0).any())
    assert bool((got > 0).any())
    assert float(got.movedim(2, 1)[~mask].abs().sum()) == 0
    assert torch.equal(got, fusion.credit(states, mask.float()))
    assert torch.equal(fusion.credit(states), fusion.credit(states, torch.ones_like(mask)))


@torch.no_grad()
def test_credit_sums_to_what_the_stages_say_of_all_inputs_together():
    """An output's credit of all inputs: the column sums of the first stage, sent on through the other two."""
    fusion: Any = stirred(Routing(dim=3, vectors=4).build(4, 12))
    states, mask = states_and_mask()
    vectors = (normalised(states) * fusion.scale[:, None, None] + fusion.shift[:, None, None]).permute(1, 2, 0, 3)
    vectors, real, worths = vectors.flatten(1, 2), mask.repeat_interleave(4, dim=1), []
    for stage in fusion.stages:
        vectors, worth = stage.route(vectors, real)
        worths.append(worth)
        real = None
    assert worths[0].shape == (3, 24, 4)
    total = worths[0].sum(1, keepdim=True) @ worths[1] @ worths[2]
    torch.testing.assert_close(fusion.credit(states, mask).sum((1, 2)), total.squeeze(1), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_importance_is_each_layer_s_part_of_the_credit():
    """All texts (or tokens) count alike, however much credit each of them has."""
    states, mask = states_and_mask()
    for per_token in (False, True):
        fusion: Any = stirred(Routing(dim=3, vectors=4, per_token=per_token).build(4, 12)).eval()
        torch.testing.assert_close(fusion.importance(), torch.full((4,), 0.25))
        fusion(states, mask)
        size = fusion.credit(states, mask).abs().sum(-1)  # [batch, layers, tokens]
        texts = [size[row][:, mask[row]] for row in range(3)]
        parts = [part for text in texts for part in text.unbind(1)] if per_token else [text.sum(1) for text in texts]
        expected = torch.stack([part / part.sum() for part in parts]).mean(0)
        torch.testing.assert_close(fusion.importance(), expected)
        assert float(expected.max() - expected.min()) > 0.01


def test_credit_and_importance_leave_the_gradients_alone():
    states, mask = states_and_mask()
    fusion: Any = stirred(Routing(dim=3, vectors=4).build(4, 12))
    assert not fusion.credit(states.requires_grad_(), mask).requires_grad
    fusion(states, mask).sum().backward()
    assert not fusion.importance().requires_grad
    assert "amounts" not in fusion.state_dict()


# Classes without a head


def headless(labels: int = 3) -> Reader:
    names = tuple(f"class {number}" for number in range(labels))
    return Reader(Routing(dim=labels, vectors=4), SequenceClassification(names, pooling="first", linear=False))


def test_the_outputs_are_the_logits():
    """The author's code ends in a capsule of size 1 per class: no head, no parameter and no dropout after it."""
    bank = tiny_bank({"it": headless()})
    batch = tiny_tokenizer()(["anna was in rome", "good"], padding=True, return_tensors="pt")
    fusion: Any = bank["it"].fusion
    assert list(bank["it"].head.parameters()) == []
    assert bank["it"].size() == sum(parameter.numel() for parameter in fusion.parameters())
    states = torch.stack(list(bank.record_states({"main": range(4)}, batch)["main"].values()))
    for training in (False, True):
        bank.train(training)
        assert torch.equal(bank(**batch)["it"].logits, fusion(states, batch["attention_mask"].bool())[:, 0])
    assert fusion.credit(states, batch["attention_mask"]).shape == (2, 4, 6, 3)


@pytest.mark.long
def test_a_reader_without_a_head_learns_and_comes_back(tmp_path: Path):
    task = yes_no()
    config = Reader(Routing(dim=2, vectors=4), SequenceClassification(task.labels, pooling="first", linear=False))
    bank = tiny_bank({"one": config})
    before = evaluate(bank, {"one": task}, split="train")["one"]["accuracy"]
    result = train(bank, {"one": task}, epochs=12, learning_rate=1e-2, keep="last")
    assert evaluate(bank, {"one": task}, split="train")["one"]["accuracy"] > max(0.85, before + 0.1)
    assert len(result.importances) == 12 * 4
    save_bank(bank, tmp_path / "bank")
    again = load_bank(tmp_path / "bank", bank.model, tiny_tokenizer())
    assert (again["one"].config.fusion, again["one"].config.head) == (config.fusion, config.head)
    batch = tiny_tokenizer()(["anna was in rome", "good"], padding=True, return_tensors="pt")
    bank.eval()
    assert torch.equal(again(**batch)["one"].logits, bank(**batch)["one"].logits)


@torch.no_grad()
def test_the_number_of_iterations_matters():
    two, three = (Routing(dim=3, vectors=3, size=6, iterations=n).build(4, 12) for n in (2, 3))
    three.load_state_dict(two.state_dict())
    states, mask = states_and_mask()
    assert not torch.allclose(two(states, mask), three(states, mask), atol=1e-3)


@torch.no_grad()
def test_padding_is_no_input_whatever_it_holds():
    fusion = stirred(Routing(dim=4, vectors=3).build(4, 12))
    states, mask = states_and_mask()
    whole = fusion(states, mask)
    other = states.clone()
    other[:, ~mask] = 50 * torch.randn(other[:, ~mask].shape)
    torch.testing.assert_close(fusion(other, mask), whole, rtol=0, atol=1e-5)
    for row in range(3):
        alone = fusion(states[:, row : row + 1, mask[row]], mask[row : row + 1, mask[row]])
        torch.testing.assert_close(alone[0, 0], whole[row, 0], rtol=0, atol=1e-5)
    assert not torch.allclose(fusion(states, torch.ones_like(mask))[1], whole[1], atol=1e-2)


@pytest.mark.parametrize("per_token", [False, True])
def test_a_text_without_tokens_gives_numbers_and_gradients(per_token: bool):
    fusion = Routing(dim=4, vectors=3, per_token=per_token).build(4, 12)
    states, mask = states_and_mask()
    mask[1] = False
    states.requires_grad_(True)
    features = fusion(states, mask)
    assert bool(features.isfinite().all())
    features.square().sum().backward()
    for name, value in [*fusion.named_parameters(), ("states", states)]:
        assert value.grad is not None, name
        assert bool(value.grad.isfinite().all()), name
        assert float(value.grad.abs().sum()) > 0, name
    assert states.grad is not None
    assert per_token or float(states.grad[:, 1].abs().sum()) == 0


@torch.no_grad()
def test_tokens_are_routed_by_themselves_only_where_asked():
    states, mask = states_and_mask()
    changed = states.clone()
    changed[:, 0, 0] = torch.randn(4, 12)
    alone, text = (Routing(dim=4, vectors=3, per_token=each).build(4, 12) for each in (True, False))
    torch.testing.assert_close(alone(changed, mask)[0, 1:], alone(states, mask)[0, 1:])
    assert not torch.allclose(alone(changed, mask)[0, 0], alone(states, mask)[0, 0], atol=1e-3)
    assert not torch.allclose(text(changed, mask)[0, 1], text(states, mask)[0, 1], atol=1e-3)


def test_features_of_a_text_take_the_memory_of_one_token():
    states, mask = states_and_mask()
    features = Routing(dim=4, vectors=3).build(4, 12)(states, mask)
    assert features.stride()[1] == 0


def test_votes_are_never_held():
    """No tensor is larger than the inputs, though the votes would be 8 times as large."""

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for value in result if isinstance(result, (tuple, list)) else [result]:
                self.size = max(self.size, value.numel() if isinstance(value, Tensor) else 0)
            return result

    fusion = Routing(dim=4, vectors=8, size=16).build(5, 16)
    with Largest() as seen:
        fusion(torch.randn(5, 2, 10, 16)).sum().backward()
    assert seen.size == 5 * 2 * 10 * 16


@torch.no_grad()
def test_equal_votes_are_divided_by_the_root_of_their_number():
    """With activation 1/2 and nothing ignored, n equal inputs give sqrt(n) times what one gives."""
    stage: Any = Route(None, 2, 3, 1, iterations=2)
    for name in ("activation", "vote_bias", "match_scale"):
        getattr(stage, name).zero_()
    stage.worth.weight.zero_()
    stage.worth.bias.copy_(torch.tensor([1.0, 1.0, 0.0, 0.0]))
    one = torch.randn(1, 1, 3)
    torch.testing.assert_close(stage(one.expand(1, 9, 3)), 3 * stage(one))


def test_half_precision_states_are_read_in_the_parameters_own():
    states, mask = states_and_mask()
    fusion, half = Routing(dim=4, vectors=3).build(4, 12), states.bfloat16()
    assert torch.equal(fusion(half, mask), fusion(half.float(), mask))


def test_parameters_start_with_the_spread_of_the_published_code():
    stage = Route(50, 60, 70, 80, iterations=2)
    spreads = {
        "activation": 2 / math.sqrt(70),
        "vote_scale": 1,
        "vote_map": 2 / math.sqrt(70),
        "guess_map": 1 / math.sqrt(80),
        "guess_scale": 1,
        "match_scale": 1 / math.sqrt(70),
        "worth": 1,
    }
    for name, value in stage.named_parameters():
        assert float(value.detach().std()) == pytest.approx(spreads.get(name, 0), rel=0.1), name


def test_sizes():
    """The published layout at RoBERTa-large: 25 layers of 1024, 64 vectors."""
    fusion = Routing().build(25, 1024)
    near = 2 * 25 * 1024
    first = 1024 + 1 + 64 * 1024 + 1024**2 + 64 * 1024 + 1024**2 + 2 * 64 * 1024 + 2 * 64 + 2 * 64 * 1024 + 2 * 64
    second = 64 * 1024 + 64 + 64 * 1024 + 1024**2 + 64 * 1024 + 1024**2 + 2 * 64 * 1024 + 2 * 64 * 64 + 2 * 64 * 64
    third = 64 * 1024 + 64 + 64 * 1024 + 1024 + 64 + 1024 + 2 * 64 * 1024 + 2 * 64 * 64 + 2 * 64 * 64
    assert sum(parameter.numel() for parameter in fusion.parameters()) == near + first + second + third


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"dim": 1}, r"routing: dim is 1; it must be"),
        ({"vectors": 1}, r"routing: vectors is 1; it must be"),
        ({"iterations": 1}, r"routing: iterations is 1; it must be"),
        ({"size": 1}, r"routing: size is 1; it must be"),
    ],
)
def test_values_that_cannot_be_are_refused(settings: dict[str, Any], match: str):
    with pytest.raises(ConfigError, match=match):
        Routing(**settings)


@torch.no_grad()
def test_tokens_that_are_routed_by_themselves_are_routed_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch):
    fusion = Routing(dim=4, vectors=3, size=5, per_token=True).build(2, 6).eval()
    states, mask = torch.randn(2, 3, 7, 6), torch.ones(3, 7, dtype=torch.bool)
    mask[1, 4:] = False
    features, credit = fusion(states, mask), fusion.credit(states, mask)
    most: list[int] = []
    staged = fusion._run_stages
    monkeypatch.setattr("lamina.fusion.routing._TOKENS", 4)
    monkeypatch.setattr(fusion, "_run_stages", lambda part, real: most.append(len(part)) or staged(part, real))
    torch.testing.assert_close(fusion(states, mask), features)
    torch.testing.assert_close(fusion.credit(states, mask), credit)
    assert max(most) == 4
    assert sum(most) == 2 * 21
