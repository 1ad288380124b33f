"""What heads share: label names, class weights, and the mean over labels that are present."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import unwrap
from typing import Any, ClassVar

import pytest
import torch
from torch.nn import functional as F

from lamina.errors import ConfigError
from lamina.fusion.base import SIZE
from lamina.heads.base import (
    IGNORE,
    Head,
    HeadConfig,
    LabelHead,
    check_attention_heads,
    check_class_weights,
    check_head_settings,
    cross_entropy,
    label_names,
    linear,
)


class Own(HeadConfig):
    """A head that another package adds."""

    kind: ClassVar[str] = "own"

    def build(self, dim: int) -> Head:
        return OwnHead(self, dim)


class OwnHead(LabelHead):
    def forward_many(self, heads: Sequence[Any], features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return linear([head.output for head in heads], features)


@dataclass(frozen=True)
class Unchecked(Own):
    labels: Any
    steps: Any = ()
    label_smoothing: float = 0.0
    class_weights: None = None


@dataclass(frozen=True)
class Fixed(Own):
    size: int = 1

    @property
    def labels(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ("no", "yes")


@dataclass(frozen=True)
class Unlabelled(Own):
    size: int = 1


@dataclass(frozen=True)
class Checked(Own):
    labels: Sequence[str] | int  # pyright: ignore[reportIncompatibleVariableOverride]
    size: int = 1

    def __post_init__(self) -> None:
        check_head_settings(self, {"size": SIZE})


def test_heads_of_other_packages_check_what_they_like():
    assert Fixed(0).labels == ("no", "yes")
    assert Unlabelled(0).size == 0
    assert [Unchecked(labels).labels for labels in ((), [1, 2])] == [(), [1, 2]]


def test_a_setting_that_cannot_be_hashed_leaves_a_head_alone():
    first, second = (Unchecked(labels, (1,)).build(4).group() for labels in ("ab", "cd"))
    assert first == second is not None
    assert first != Unchecked("ab", (2,)).build(4).group()
    for steps in ([1], {"a": 1}, ([],)):
        assert Unchecked("ab", steps).build(4).group() is None


def test_a_head_names_the_settings_that_must_be_equal(monkeypatch: pytest.MonkeyPatch):
    configs = [Unchecked("ab", [1]), Unchecked("ab", [2], 0.5)]
    monkeypatch.setattr(OwnHead, "settings", ())
    assert len({config.build(4).group() for config in configs} - {None}) == 1
    monkeypatch.setattr(OwnHead, "settings", ("label_smoothing",))
    assert len({config.build(4).group() for config in configs} - {None}) == 2


def test_settings_of_a_head_are_checked_in_one_call():
    assert Checked(2).labels == ("0", "1")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"labels": ("a", "a")}, "own: labels are .*each only once"),
        ({"labels": 2, "size": 0}, "own: size is 0; it must be at least 1"),
        ({"labels": 2, "size": "x"}, "own: size is 'x'; it must be a whole number"),
    ]
    for settings, message in wrong:
        with pytest.raises(ConfigError, match=message):
            Checked(**settings)


def test_labels_from_names_or_their_number():
    assert label_names("here", ["x", "y"]) == ("x", "y")
    assert label_names("here", 3) == ("0", "1", "2")
    assert unwrap(label_names)("here", torch.tensor(2)) == ("0", "1")


@pytest.mark.parametrize("labels", [(), ("a", "a"), 0])
def test_labels_that_are_none_or_twice_are_refused(labels: object):
    with pytest.raises(ConfigError, match=r"here: labels are \(.*\); at least one is needed and each only once"):
        label_names("here", labels)  # pyright: ignore


@pytest.mark.parametrize("labels", ["ab", {"a": 0}, {"a", "b"}, [0, 1], (None, "a")])
def test_labels_that_are_no_list_of_names_are_refused(labels: object):
    with pytest.raises(ConfigError, match=r"here: labels are .*; a list of names is needed"):
        unwrap(label_names)("here", labels)  # without the checks of types that tests add


def test_attention_heads_that_divide_pass():
    check_attention_heads("here", 12, 4)


@pytest.mark.parametrize("heads", [0, -2, 5, 24])
def test_attention_heads_that_do_not_divide_are_refused(heads: int):
    with pytest.raises(
        ConfigError, match=f"here: attention_heads is {heads} for features of size 12.* 1, 2, 3, 4, 6, 12"
    ):
        check_attention_heads("here", 12, heads)


def test_weights_become_a_tuple_of_floats():
    assert check_class_weights("here", [1, 2], 2) == (1.0, 2.0)
    assert check_class_weights("here", None, 2) is None


@pytest.mark.parametrize(
    "weights", [(1.0,), (1.0, 0.0), (1.0, -1.0), (1.0, 1.0, 1.0), (1.0, "a"), {1: 0.5, 2: 3.0}, {1.0, 2.0}, "ab"]
)
def test_weights_that_do_not_fit_are_refused(weights: object):
    with pytest.raises(ConfigError, match=r"here: class_weights are .* for 2 labels; a list with one positive weight"):
        unwrap(check_class_weights)("here", weights, 2)


@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 5.0, 0.5])])
def test_cross_entropy_equals_torchs_for_labels_that_are_present(weight: torch.Tensor | None):
    logits, labels = torch.randn(4, 5, 3), torch.randint(0, 3, (4, 5))
    labels[0, 2:] = IGNORE
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=weight, ignore_index=IGNORE)
    torch.testing.assert_close(cross_entropy(logits, labels, weight), expected)
    last = F.cross_entropy(logits[1], labels[1], weight=weight)
    torch.testing.assert_close(cross_entropy(logits[1], labels[1].to(torch.uint8), weight), last)


def test_cross_entropy_of_half_precision_is_worked_out_in_full():
    logits = torch.randn(6, 3).bfloat16()
    labels = torch.randint(0, 3, (6,))
    got = cross_entropy(logits, labels, None)
    assert got.dtype == torch.float32
    assert torch.equal(got, cross_entropy(logits.float(), labels, None))
