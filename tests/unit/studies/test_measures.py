"""Debiased CKA: its values for known data, and equality with the published estimator."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lamina.errors import ConfigError
from lamina.studies.states.measures import BlockDistance, Curvature, Entropy, LayerMeasure, MinibatchCKA


def hsic_1(x: torch.Tensor, y: torch.Tensor) -> float:
    """The unbiased estimator as Song et al. 2012 print it."""
    n, (k, el) = len(x), (x @ x.T, y @ y.T)
    k, el = k - torch.diag(k.diagonal()), el - torch.diag(el.diagonal())
    ones = torch.ones(n, dtype=k.dtype)
    middle = (ones @ k @ ones) * (ones @ el @ ones) / ((n - 1) * (n - 2))
    return float(torch.trace(k @ el) + middle - 2 / (n - 2) * (ones @ k @ el @ ones)) / (n * (n - 3))


def direct(x: torch.Tensor, y: torch.Tensor, parts: int = 1) -> float:
    pairs = [(a.double(), b.double()) for a, b in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True)]
    cross, left, right = (sum(hsic_1(p[i], p[j]) for p in pairs) for i, j in ((0, 1), (0, 0), (1, 1)))
    return float(cross / np.sqrt(left * right))


def estimate(*layers: torch.Tensor, parts: int = 1) -> torch.Tensor:
    cka = MinibatchCKA()
    for minibatch in zip(*(layer.tensor_split(parts) for layer in layers), strict=True):
        cka.add(minibatch)
    return cka.cka()


@pytest.fixture
def x():
    return torch.randn(200, 24) * torch.linspace(0.1, 3, 24) + 5


def test_rotation_scale_and_shift_change_nothing(x: torch.Tensor):
    rotation = torch.linalg.qr(torch.randn(24, 24, dtype=torch.float64)).Q.float()
    rescaled = estimate(x, x @ rotation, -7.5 * x, x + 100)
    assert (rescaled - 1).abs().max() < 1e-6
    assert (estimate(x, x @ rotation, -7.5 * x, x + 100, parts=5) - 1).abs().max() < 1e-6


def test_cka_equals_the_published_estimator(x: torch.Tensor):
    y = x[:, -9:] @ torch.randn(9, 40) + torch.randn(200, 40)
    for parts in (1, 3, 8):
        found = estimate(x, y, parts=parts)
        assert found[0, 1] == pytest.approx(direct(x, y, parts), abs=1e-9)
        assert found[1, 0] == found[0, 1]
        assert found.diagonal().tolist() == pytest.approx([1, 1], abs=1e-12)
    assert 0.2 < found[0, 1] < 0.95


def test_independent_data_are_near_0_where_the_biased_number_is_not():
    x, y = torch.randn(2, 256, 300)
    centred = [z - z.mean(0) for z in (x, y)]
    biased = torch.linalg.norm(centred[0].T @ centred[1]) ** 2
    biased /= torch.linalg.norm(centred[0].T @ centred[0]) * torch.linalg.norm(centred[1].T @ centred[1])
    assert biased > 0.4
    assert abs(float(estimate(x, y, parts=4)[0, 1])) < 0.02


def test_the_size_of_minibatches_does_not_shift_it(x: torch.Tensor):
    """Biased estimates grow as minibatches shrink; this one only scatters."""
    x = torch.randn(3000, 12)
    y = x + 2 * torch.randn(3000, 12)
    whole = float(estimate(x, y)[0, 1])
    for parts in (6, 30, 150):
        assert float(estimate(x, y, parts=parts)[0, 1]) == pytest.approx(whole, abs=0.02)


def test_a_layer_that_does_not_vary_has_no_cka(x: torch.Tensor):
    found = estimate(x, torch.ones(200, 3))
    assert found.isnan().tolist() == [[False, True], [True, True]]


def test_too_few_rows_are_refused():
    with pytest.raises(ConfigError, match="a minibatch has 3 rows; the unbiased estimate needs at least 4"):
        MinibatchCKA().add([torch.randn(3, 2)])
    with pytest.raises(ConfigError, match="no minibatch was added"):
        MinibatchCKA().cka()


@pytest.mark.parametrize("noise", [0.0, 1e-8])
def test_cka_of_equal_rows_is_refused_and_a_layer_of_equal_rows_has_none(noise: float):
    equal = 5.0 + noise * torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cka = MinibatchCKA()
    cka.add([equal, equal.flip(1)])
    with pytest.raises(ConfigError, match="all rows have the same states in every layer"):
        cka.cka()
    cka = MinibatchCKA()
    cka.add([equal, 5.0 + 1e-3 * torch.randn(8, 3)])
    assert cka.cka().isnan().tolist() == [[True, True], [True, False]]


@pytest.mark.parametrize(
    ("measure", "expected"), [(Entropy, {"entropy": np.log(4)}), (Curvature, {"curvature": np.pi / 2})]
)
def test_states_without_a_direction_do_not_count(measure: type[LayerMeasure], expected: dict[str, float]):
    corners = torch.eye(4)
    path = torch.tensor(
        [[0.0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]
    )  # a right angle, then it stands still
    state = torch.stack([corners if measure is Entropy else path, torch.zeros(4, 4)])
    measured = measure(1)
    measured.on_state(0, state, torch.ones(2, 4, dtype=torch.bool))
    assert {name: value for name, (value,) in measured.scores().items()} == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("measure", [Entropy, Curvature])
def test_a_text_whose_states_are_nan_is_not_left_out(measure: type[LayerMeasure]):
    state = torch.stack([torch.eye(4), torch.full((4, 4), torch.nan)])
    measured = measure(1)
    measured.on_state(0, state, torch.ones(2, 4, dtype=torch.bool))
    assert np.isnan(measured.scores()[measure.names[0]]).all()


def test_a_token_of_zeros_has_no_distance():
    measured, real = BlockDistance(2), torch.ones(1, 2, dtype=torch.bool)
    measured.on_state(0, torch.tensor([[[1.0, 0], [0, 0]]]), real)
    measured.on_state(1, torch.tensor([[[0.0, 1], [0, 1]]]), real)
    assert {name: value[1] for name, value in measured.scores().items()} == pytest.approx(
        {"angular_distance": 0.5, "block_influence": 1.0}
    )
