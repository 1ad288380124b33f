"""Similarity of layers: the numbers are those of the model's own states, whatever the batches."""

from __future__ import annotations

import copy
import math
from itertools import chain

import numpy as np
import pandas as pd
import pytest
import torch
from tests.support.stored import tiny_model, tiny_tokenizer
from tests.support.tiny import FAMILIES, model_of

from lamina.errors import ConfigError, LayerIndexError, UnknownNameError, UnsupportedModelError
from lamina.studies import Study, similarity
from lamina.studies.passes import LayerReader, batch_groups, row_groups
from lamina.studies.states.measures import Curvature, MinibatchCKA, two_nn

WORDS = ["the", "a", "film", "is", "good", "bad", "very", "not", "paris", "anna", "went", "to", "and", "slow"]
TEXTS = [
    " ".join(WORDS[i] for i in np.random.default_rng(seed).integers(0, len(WORDS), 3 + seed % 9)) for seed in range(41)
]


@pytest.fixture(scope="module")
def model():
    return tiny_model(hidden_size=16)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@torch.no_grad()
def states_of(model, tokenizer, text) -> torch.Tensor:
    out = model(**tokenizer(text, return_tensors="pt"), output_hidden_states=True)
    return torch.stack(out.hidden_states)[:, 0].double()  # [layers, tokens, width]


def scores(study: Study, measure: str, **where: object) -> list[float]:
    table = study.table[study.table["measure"] == measure]
    for column, value in where.items():
        table = table[table[column] == value]
    return table["score"].tolist()


def matrix(study: Study, model: str = "model", other: str = "model") -> np.ndarray:
    table = study.table.query("measure == 'cka' and model == @model and other_model == @other")
    return table.pivot_table(index="layer", columns="other_layer", values="score", dropna=False).to_numpy()


def test_cka_compares_the_mean_states_of_texts(model, tokenizer):
    means = torch.stack([states_of(model, tokenizer, text).mean(1) for text in TEXTS], dim=1)
    whole = MinibatchCKA()
    whole.add(list(means))
    study = similarity(model, TEXTS, processor=tokenizer, batch_size=7)
    np.testing.assert_allclose(matrix(study), whole.cka().numpy(), atol=1e-5)
    assert study.settings["rows"] == 41
    assert study.settings["minibatches"] == 1


def test_batch_size_and_padding_change_nothing(model, tokenizer):
    studies = [similarity(model, TEXTS, processor=tokenizer, batch_size=size, minibatch=10) for size in (1, 5, 64)]
    assert studies[0].settings["minibatches"] == 4
    for study in studies[1:]:
        pd.testing.assert_frame_equal(study.table, studies[0].table, atol=1e-4, rtol=1e-4)


def test_the_other_measures_equal_their_formulas(model, tokenizer):
    study = similarity(model, TEXTS, processor=tokenizer, batch_size=8)
    influence, angular, entropy, curvature = [], [], [], []
    for text in TEXTS:
        states = states_of(model, tokenizer, text)
        cosine = torch.cosine_similarity(states[1:], states[:-1], dim=-1)
        influence.append(1 - cosine)
        angular.append(torch.arccos(cosine) / math.pi)
        spectra = torch.stack([torch.linalg.eigvalsh(layer @ layer.T) for layer in states])
        entropy.append(-(spectra / spectra.sum(1, keepdim=True)).square().sum(1).log())
        steps = states.diff(dim=1)
        bends = torch.arccos(torch.cosine_similarity(steps[:, 1:], steps[:, :-1], dim=-1))
        curvature.append(bends.mean(1))
    np.testing.assert_allclose(scores(study, "block_influence"), torch.cat(influence, 1).mean(1), atol=1e-5)
    np.testing.assert_allclose(scores(study, "angular_distance"), torch.cat(angular, 1).mean(1), atol=1e-5)
    np.testing.assert_allclose(scores(study, "entropy"), torch.stack(entropy).mean(0), atol=1e-4)
    np.testing.assert_allclose(scores(study, "curvature"), torch.stack(curvature).mean(0), atol=1e-4)
    blocks = study.table[study.table["measure"] == "block_influence"]
    assert blocks[["other_layer", "layer"]].to_numpy().tolist() == [[0, 1], [1, 2], [2, 3]]


def test_steps_from_padding_are_no_part_of_a_path():
    state, real = torch.randn(1, 6, 4), torch.tensor([[False, True, True, True, True, False]])
    padded, alone = Curvature(1), Curvature(1)
    padded.on_state(0, state, real)
    alone.on_state(0, state[:, 1:5], real[:, 1:5])
    assert padded.scores()["curvature"] == pytest.approx(alone.scores()["curvature"])


def test_minibatches_are_random_rows_of_a_batch(model, tokenizer):
    batch = dict(tokenizer(sorted(TEXTS), return_tensors="pt", padding=True))
    one, again, other = (
        matrix(similarity(model, batches=[batch], minibatch=10, seed=seed, measures=["cka"])) for seed in (0, 0, 1)
    )
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


def test_layers_have_the_models_own_numbers(model, tokenizer):
    whole = similarity(model, TEXTS, processor=tokenizer)
    some = similarity(model, TEXTS, processor=tokenizer, layers=[1, -1])
    assert some.settings["layers"] == {"model": [1, 3]}
    np.testing.assert_allclose(matrix(some), matrix(whole)[np.ix_([1, 3], [1, 3])], atol=1e-9)
    assert scores(some, "entropy", layer=3) == pytest.approx(scores(whole, "entropy", layer=3))
    blocks = some.table[some.table["measure"] == "angular_distance"]
    assert blocks[["other_layer", "layer"]].to_numpy().tolist() == [[1, 3]]


def test_two_checkpoints(model, tokenizer):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.encoder.layer[1].parameters():
            parameter.normal_(std=0.5)
    study = similarity(model, TEXTS, processor=tokenizer, other=other)
    across = matrix(study, "model", "other")
    np.testing.assert_allclose(across[:2, :2], matrix(study)[:2, :2], atol=1e-6)
    assert across[2, 2] < 0.9
    np.testing.assert_allclose(matrix(study, "other", "model"), across.T)
    assert set(study.figures) >= {"cka model model", "cka model other", "cka other other", "entropy"}
    facts = study.settings["models"]
    assert facts["model"]["fingerprints"] != facts["other"]["fingerprints"]


def test_another_model_with_a_tokenizer_of_its_own(model, tokenizer, words):
    other = tiny_model(1, hidden_size=24, num_hidden_layers=2)
    study = similarity(model, TEXTS, processor=tokenizer, other=other, other_processor=words, measures={"cka"})
    assert matrix(study, "model", "other").shape == (4, 3)


def test_a_twin_is_the_same_per_token(model, tokenizer):
    study = similarity(model, TEXTS, processor=tokenizer, other=copy.deepcopy(model), per="token", minibatch=40)
    np.testing.assert_allclose(matrix(study, "model", "other"), matrix(study), atol=1e-9)
    small = similarity(model, TEXTS, processor=tokenizer, per="token", minibatch=40, batch_size=3)
    np.testing.assert_allclose(matrix(small), matrix(study), atol=1e-4)
    lengths = [min(16, len(ids)) for ids in tokenizer(TEXTS)["input_ids"]]
    assert study.settings["rows"] == sum(lengths)


def test_intrinsic_dimension():
    generator = torch.Generator().manual_seed(0)
    for dimension in (2, 5):
        flat = torch.rand(1500, dimension, generator=generator) @ torch.randn(dimension, 30, generator=generator)
        assert two_nn(flat) == pytest.approx(dimension, rel=0.12)
    assert two_nn(torch.cat([flat, flat])) == pytest.approx(two_nn(flat))
    assert math.isnan(two_nn(torch.ones(9, 4)))


def test_the_model_is_not_changed(model, tokenizer):
    trained = copy.deepcopy(model).train()
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in trained.modules()]
    trained.encoder.layer[0].eval()
    similarity(trained, TEXTS, processor=tokenizer)
    assert trained.training
    assert not trained.encoder.layer[0].training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in trained.parameters())
    assert hooks == [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in trained.modules()]


def test_invalid_options_are_refused(model, tokenizer):
    def call(**options):
        return similarity(model, **({"texts": TEXTS, "processor": tokenizer} | options))

    with pytest.raises(ConfigError, match="texts and batches are not given; exactly one must be"):
        call(texts=None)
    with pytest.raises(ConfigError, match="texts and batches are both given"):
        similarity(model, TEXTS, batches=[])
    with pytest.raises(ConfigError, match="texts and batches are both given"):
        call(batches=[{}])
    with pytest.raises(ConfigError, match="similarity: texts is 'the film'; it must be a list or a set or None"):
        call(texts="the film")
    with pytest.raises(ConfigError, match="there is no text; at least one is needed"):
        call(texts=[])
    with pytest.raises(ConfigError, match=r"texts\[1\] is \('a', 'b'\); each entry must be a text, or each a pair of"):
        call(texts=["the film", ("a", "b")])
    with pytest.raises(ConfigError, match=r"texts\[0\] is \('a',\); each entry must be a text, or each a pair"):
        call(texts=[("a",)])
    with pytest.raises(ConfigError, match="a minibatch has 3 rows"):
        call(texts=TEXTS[:3])
    with pytest.raises(ConfigError, match="minibatch is 3; it must be at least 4"):
        call(minibatch=3)
    with pytest.raises(ConfigError, match="similarity: seed is -1; it must be at least 0"):
        call(seed=-1)
    with pytest.raises(ConfigError, match="similarity: measures is 3; it must be a name or a list"):
        call(measures=3)
    with pytest.raises(ConfigError, match="no processor was given"):
        call(processor=None)
    with pytest.raises(ConfigError, match="it reads texts for another model, a row per text"):
        call(other_processor=tokenizer)
    with pytest.raises(UnknownNameError, match=r"unknown measure 'ckas'; .* Did you mean 'cka'"):
        call(measures=["ckas"])
    with pytest.raises(UnknownNameError, match="unknown measure 'ckas'"):
        call(measures="ckas")
    with pytest.raises(ConfigError, match="similarity: measures is empty"):
        call(measures=[])
    with pytest.raises(UnknownNameError, match="unknown kind of row 'tokens'"):
        call(per="tokens")
    with pytest.raises(LayerIndexError, match="similarity: layer 9 does not exist"):
        call(layers=9)
    with pytest.raises(ConfigError, match="there is no batch; at least one is needed"):
        call(texts=None, batches=[])


def test_a_pass_that_skips_a_layer_is_refused():
    model = model_of("bart")
    inputs = FAMILIES["bart"].inputs(model, batch=4) | {"encoder_outputs": (torch.zeros(4, 9, 32),)}
    with pytest.raises(UnsupportedModelError, match=r"a pass computed the layers \[\] of its stack 'encoder'"):
        LayerReader(model, op="similarity").read(inputs, lambda *_: None)


def test_models_with_different_tokens_cannot_be_compared_per_token():
    batch = FAMILIES["vit"].inputs(model_of("vit"), batch=8)
    other = FAMILIES["deit"].build()
    with pytest.raises(ConfigError, match="different numbers of tokens for the same rows; use per='text'"):
        similarity(model_of("vit"), batches=[batch], other=other, per="token", minibatch=4)


def test_a_token_that_the_other_model_has_no_row_for_is_named(model, tokenizer):
    texts = ["the film is good ."] * 4
    with pytest.raises(ConfigError, match=r"similarity: the tokenizer gives ids up to .* token table has 8 rows"):
        similarity(model, texts, processor=tokenizer, other=tiny_model(vocab_size=8))


def test_rows_in_groups():
    groups = row_groups(23, 5, seed=1)
    assert sorted(chain.from_iterable(groups)) == list(range(23))
    assert [len(group) for group in groups] == [6, 6, 6, 5]
    assert groups != row_groups(23, 5, seed=2)
    assert row_groups(3, 5, seed=0)[0] != []


@pytest.mark.parametrize(
    ("sizes", "grouped"),
    [
        ([3, 3], [6]),
        ([5, 5, 5], [5, 5, 5]),
        ([3, 3, 3, 3, 1], [6, 7]),
        ([2], [2]),
        ([9, 1], [10]),
        ([3, 3, 5, 2], [6, 7]),
    ],
)
def test_batches_in_groups(sizes: list[int], grouped: list[int]):
    batches = [{"x": torch.zeros(size)} for size in sizes]
    groups = [[number for numbers, _ in group for number in numbers] for group in batch_groups(batches, 5)]
    assert [len(group) for group in groups] == grouped
    assert list(chain.from_iterable(groups)) == list(range(sum(sizes)))


def test_a_layer_of_zeros_is_named_and_no_conclusion_is_drawn_from_it(tokenizer):
    dead = tiny_model(hidden_size=16)
    with torch.no_grad():
        for parameter in dead.encoder.layer[2].output.LayerNorm.parameters():
            parameter.zero_()
    study = similarity(dead, TEXTS, measures=["block_influence"], processor=tokenizer)
    assert math.isnan(scores(study, "block_influence")[-1])
    first, last = study.conclusions
    assert "nan" not in first
    assert last.startswith("1 of 3 scores are not defined (NaN or infinite): 1 of block_influence.")
