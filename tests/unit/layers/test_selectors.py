import numpy as np
import pytest
import torch

from lamina.errors import ConfigError, LayerIndexError
from lamina.layers import select
from lamina.layers.selectors import ranges


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        (0, [0]),
        (6, [6]),
        (-1, [6]),
        (-7, [0]),
        ([3, 1], [1, 3]),
        ((-1, 0), [0, 6]),
        (range(2, 4), [2, 3]),
        ("all", [0, 1, 2, 3, 4, 5, 6]),
        ("bottom:4", [0, 1, 2, 3]),
        ("top:2", [5, 6]),
        ("bottom:7", [0, 1, 2, 3, 4, 5, 6]),
        ("2-4", [2, 3, 4]),
        ("2-2", [2]),
        ("5-", [5, 6]),
        ("1-", [1, 2, 3, 4, 5, 6]),
        (" 3 ", [3]),
        (np.array([3, 1]), [1, 3]),
        (np.int64(2), [2]),
        ([np.int64(2), torch.tensor(1)], [1, 2]),
        (torch.tensor(2), [2]),
    ],
)
def test_each_form(selector, expected):
    assert select(selector, 7, op="test") == expected


@pytest.mark.parametrize("selector", [7, -8, [0, 7], "7", "2-7", "8-", "bottom:8", "top:8"])
def test_a_layer_that_is_not_there(selector):
    with pytest.raises(LayerIndexError, match=r"tap: layer -?\d+ does not exist; the model has 7 layers"):
        select(selector, 7, op="tap")


@pytest.mark.parametrize(("selector", "most"), [("top:9", "top:7"), ("bottom:8", "bottom:7"), (" top:100 ", "top:7")])
def test_more_layers_than_there_are(selector: str, most: str):
    """The message repeats the number that was asked for, not only the layer behind it."""
    with pytest.raises(LayerIndexError, match=rf"the model has 7 layers.*'{selector.strip()}'\. Use '{most}' or fewer"):
        select(selector, 7, op="tap")


@pytest.mark.parametrize(
    "selector", ["", "top", "top:", "bottom:-1", "-1", "1,2", "every", "1.5", [0, "1"], [np.True_]]
)
def test_no_selector(selector):
    with pytest.raises(ConfigError, match=r"tap: layers is .*, which is not a layer selector. Use an int .*'bottom:4'"):
        select(selector, 7, op="tap")


@pytest.mark.parametrize("selector", [[], ()])
def test_no_layer(selector):
    with pytest.raises(ConfigError, match="which names no layer; at least one is needed"):
        select(selector, 7, op="tap")


@pytest.mark.parametrize("end", ["bottom", "top"])
def test_none_from_an_end(end):
    with pytest.raises(ConfigError, match=f"'{end}:0' names no layer.*Use '{end}:1' or more"):
        select(f"{end}:0", 7, op="tap")


def test_backwards():
    with pytest.raises(ConfigError, match=r"'4-2' is descending.*Use '2-4'"):
        select("4-2", 7, op="tap")


@pytest.mark.parametrize("selector", [[1, 1], [-1, 6], (0, 3, 0)])
def test_twice(selector):
    with pytest.raises(ConfigError, match=r"names layer \d twice"):
        select(selector, 7, op="tap")


@pytest.mark.parametrize(
    ("layers", "text"), [((1, 2, 3), "1-3"), ((0, 3, 4, 5, 7), "0, 3-5, 7"), ((4,), "4"), ((4, 5), "4-5"), ((), "")]
)
def test_runs_of_layers_are_joined(layers: tuple[int, ...], text: str):
    assert ranges(layers) == text
