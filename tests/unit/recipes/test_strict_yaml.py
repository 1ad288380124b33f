"""The YAML of recipes: plain words and numbers are those of the core schema of YAML 1.2."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from lamina.errors import DataError
from lamina.recipes.strict_yaml import parse_yaml, to_lamina_error
from lamina.studies.run_study import TextsRecipe


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[
            (text, text)
            for text in ("on", "Off", "yes", "NO", "y", "1:30", "1:30.5", "1_000", "0b11", "2024-01-01", "1e")
        ],
        *[("016", 16), ("08", 8), ("0o17", 15), ("0x1F", 31), ("+12", 12), ("-3", -3), ("'016'", "016")],
        *[("1e-3", 0.001), ("1.", 1.0), (".5", 0.5), ("-1.5E+3", -1500.0), ("1e5", 1e5), ("-.inf", -math.inf)],
        *[("true", True), ("FALSE", False), ("null", None), ("~", None), ("", None)],
    ],
)
def test_plain_words_and_numbers_are_those_of_yaml_1_2(text: str, value: object):
    _, fields = parse_yaml(f"key: {text}", "a.yaml")
    assert fields == {"key": value}
    assert type(fields["key"]) is type(value)


def test_a_merge_and_a_key_that_is_a_number_are_read():
    assert parse_yaml("a: &a {x: 1}\nb: {<<: *a, 3: 2}", "a.yaml")[1]["b"] == {"x": 1, 3: 2}
    with pytest.raises(DataError, match="1:30 is not a number"):
        parse_yaml("key: !!int 1:30", "a.yaml")


@pytest.mark.parametrize("text", ["01: a\n1: b", "0x1: a\n1: b", "-0: a\n0: b", "1: a\n'1': b"])
def test_one_number_written_in_two_ways_is_one_key(text: str):
    with pytest.raises(DataError, match=r"line 2: the key '[01]' is also in line 1"):
        parse_yaml(text, "a.yaml")


def test_an_error_about_a_whole_mapping_does_not_quote_it():
    with pytest.raises(ValidationError) as info:
        TextsRecipe.model_validate({"file": "a.txt", "task": "b"})
    assert str(to_lamina_error(info.value.errors()[0])) == "texts are a list, or have one of 'file' and 'task'"
