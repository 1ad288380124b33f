"""Files of settings, YAML and JSON, that are too deep or too large, grow when they are read, or hold no setting."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from lamina.errors import ConfigError, DataError, LaminaError, StoreError
from lamina.recipes.expand import expand_recipe, read_sweeps
from lamina.recipes.schema import load_recipe
from lamina.store.files import read_json
from lamina.utils import parse_json

if TYPE_CHECKING:
    from pathlib import Path

GOOD = """model: minilm
fit: {epochs: 1}
tasks:
  mood:
    files: {train: a.tsv}
    readers:
      last: {fusion: {name: mean}}
"""
LAUGHS = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
MERGES = "".join(f"m{n}: &m{n} {{k{n}: 1, <<: [{', '.join([f'*m{n - 1}'] * 9)}]}}\n" for n in range(1, 12))
BROKEN = {
    "aliases in aliases": ("a0: &a0 [x]\n" + LAUGHS, r"line \d+: with its aliases it has more than 100,000 values"),
    "merges of merges": ("m0: &m0 {k0: 1}\n" + MERGES, r"line \d+: with its aliases it has more than 100,000 values"),
    "an alias of itself": ("a: &a [*a]\n", "line 1: an alias refers to a value that contains it"),
    "a merge of itself": ("a: &a {<<: *a}\n", "line 1: an alias refers to a value that contains it"),
    "deep lists": ("a: " + "[" * 100_000, "line 1: it is nested more than 50 levels deep"),
    "deep mappings": ("a: " + "{b: " * 100_000, "line 1: it is nested more than 50 levels deep"),
    "deep blocks": ("\n".join(" " * n + "a:" for n in range(200)), r"line \d+: it is nested more than 50 levels deep"),
    "deep dashes": ("a:\n " + "- " * 5000 + "x", "line 2: it is nested more than 50 levels deep"),
    "digits": (f"model: {'9' * 5000}\n", "line 1: 99999999999999999999 is not a number"),
    "no digits": ("model: !!int 0b_\n", "line 1: 0b_ is not a number"),
    "no octal": ("model: 0o_\nfit: 0_\n", "model"),
    "a tag of Python": (
        "model: !!python/object/apply:os.system ['true']\n",
        "line 1: the tag !!python/.* is not known",
    ),
    "a tag of Python's names": ("model: !!python/name:os.system\n", "line 1: the tag !!python/name:os.system"),
    "a tag of its own": ("model: !mine x\n", "line 1: the tag !mine is not known"),
    "bytes": ("model: !!binary x\n", "line 1: the tag !!binary is not known"),
    "a set": ("model: !!set {a, b}\n", "line 1: the tag !!set is not known"),
    "pairs": ("model: !!omap [a: b]\n", "line 1: the tag !!omap is not known"),
    "a tag for a number that is none": ("model: !!int abc\n", "line 1: abc is not a number"),
    "a tag for an empty number": ("model: !!float ''\n", "line 1:  is not a number"),
    "a tag for a date": ("model: !!timestamp x\n", "line 1: the tag !!timestamp is not known"),
    "a key twice": (GOOD + "model: x\n", "line 8: the key 'model' is also in line 1"),
    "a key twice, in a flow": (GOOD.replace("{name: mean}", "{name: mean, name: x}"), "line 7: the key 'name' is also"),
    "a key twice, quoted": (GOOD + "'model': x\n", "line 8: the key 'model' is also in line 1"),
    "a key twice, in a merge": (GOOD + "<<: {a: 1}\n<<: {b: 1}\n", "line 9: the key '<<' is also in line 8"),
    "a key that is null": ("null: x\n", "line 1: the key 'null' is not a name"),
    "a key that is true": ("true: x\n", "line 1: the key 'true' is not a name"),
    "a key that YAML 1.1 reads as true": ("on: x\n", "line 1: unknown key 'on'"),
    "a key that is a float": ("1.5: x\n", "line 1: the key '1.5' is not a name"),
    "a key that is a list": ("? [a]\n: x\n", "line 1: the key .* is not a name"),
    "a key that is a number": ("1: x\n", "line 1: unknown key '1'"),
    "a task that is a number": (GOOD.replace("mood:", "7:"), "line 4, tasks.7: input should be a valid string"),
    "zero bytes": (GOOD + "\0", "is not YAML; unacceptable character"),
    "two documents": (GOOD + "---\n" + GOOD, "is not YAML; expected a single document"),
    "a text": ("just a text", "holds no keys"),
    "nothing": ("", "holds no keys"),
}


def write(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


@pytest.mark.parametrize("what", BROKEN)
def test_a_recipe_is_refused_at_once(tmp_path: Path, what: str):
    text, message = BROKEN[what]
    start = time.monotonic()
    with pytest.raises(LaminaError, match=message):
        load_recipe(write(tmp_path / "recipe.yaml", text))
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("data", [GOOD.encode("utf-16"), b"model: \xff", b"model: \xed\xa0\x80", b"\xef\xbb\xbf\xff"])
def test_a_recipe_that_is_no_text(tmp_path: Path, data: bytes):
    with pytest.raises(DataError, match="is not YAML"):
        load_recipe(write(tmp_path / "recipe.yaml", data))


def test_a_recipe_with_a_byte_order_mark(tmp_path: Path):
    assert load_recipe(write(tmp_path / "recipe.yaml", "\ufeff" + GOOD)).model == "minilm"


def test_a_recipe_without_end(tmp_path: Path):
    with pytest.raises(DataError, match=r"is not YAML; it has more than 1,048,576 bytes"):
        load_recipe(write(tmp_path / "recipe.yaml", "#" * (1 << 21)))
    for path in (tmp_path, tmp_path / "none.yaml"):
        with pytest.raises(DataError, match="cannot be read"):
            load_recipe(path)
    if os.path.exists("/dev/zero"):  # noqa: PTH110
        with pytest.raises(DataError, match="not a regular file"):
            load_recipe("/dev/zero")


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan", "1e400", "1.0e+400", "9" * 400, "2024-01-01", "true"])
@pytest.mark.parametrize("place", ["fit", "task", "reader"])
def test_a_learning_rate_that_is_none(tmp_path: Path, value: str, place: str):
    line = f"learning_rate: {value}"
    text = {
        "fit": GOOD.replace("epochs: 1", f"epochs: 1, {line}"),
        "task": GOOD.replace("    readers:", f"    {line}\n    readers:"),
        "reader": GOOD.replace("fusion:", f"{line}, fusion:"),
    }[place]
    path = write(tmp_path / "recipe.yaml", text)
    with pytest.raises(ConfigError, match=r"recipe\.yaml, line \d+, .*learning_rate"):
        load_recipe(path)


@pytest.mark.parametrize("value", ["-1", "9" * 30, "9" * 400, "1.5", "2024-01-01", "true", "x"])
@pytest.mark.parametrize("place", ["seeds", "fit"])
def test_a_seed_that_is_none(tmp_path: Path, value: str, place: str):
    text = f"seeds: [{value}]\n{GOOD}" if place == "seeds" else GOOD.replace("epochs: 1", f"epochs: 1, seed: {value}")
    with pytest.raises(ConfigError, match=r"recipe\.yaml, line \d, .*seed"):
        load_recipe(write(tmp_path / "recipe.yaml", text))


def test_more_runs_than_anyone_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    grid = "{fusion: {name: ada_layers}, grid: {" + ", ".join(
        f"{key}: [{', '.join(map(str, range(1, 100)))}]" for key in ("fusion.dim", "fusion.alpha", "epochs")
    )
    recipe = write(tmp_path / "recipe.yaml", GOOD.replace("{fusion: {name: mean}}", grid + "}}"))
    with pytest.raises(ConfigError, match=r"970,299 settings; .* at most 100,000"):
        load_recipe(recipe)
    repeats = GOOD.replace("    readers:", "    subsample: {rows: 1, repeats: 1000000000}\n    readers:")
    with pytest.raises(ConfigError, match=r"line 6, .*repeats"):
        load_recipe(write(tmp_path / "recipe.yaml", repeats))
    seeds = f"seeds: {list(range(400))}\n" + GOOD.replace(
        "    readers:", "    subsample: {rows: 1, repeats: 999}\n    readers:"
    )
    monkeypatch.setattr("lamina.recipes.expand.MOST_RUNS", 1000)
    with pytest.raises(ConfigError, match="more than 1,000 runs"):
        expand_recipe(load_recipe(write(tmp_path / "recipe.yaml", seeds)), {})


@pytest.mark.parametrize("values", ["[" * 5000, "!!python/name:os.system", "9" * 5000, "*a", "2024-13-45", "&a [*a]"])
def test_a_sweep_that_cannot_be_read(values: str):
    if values == "2024-13-45":
        assert read_sweeps([f"fusion.dim={values}"]) == {"fusion.dim": [values]}
        return
    with pytest.raises(ConfigError, match="names no values"):
        read_sweeps([f"fusion.dim={values}"])


# JSON

DEEP = ["[" * 100_000, "[" * 500 + "]" * 500, '{"a":' * 100_000, '{"a":' * 500 + "1" + "}" * 500]


@pytest.mark.parametrize(
    "text",
    [*DEEP, "9" * 5000, "[", '"\\ud800', "{'a': 1}", "[1,]", "nul", "\ufeff{}", "1 2"],
    ids=lambda text: f"{text[:9]!a}-{len(text)}",
)
def test_json_that_cannot_be_read(tmp_path: Path, text: str):
    with pytest.raises(ValueError, match=r"deep|digits|line 1 column"):
        parse_json(text)
    with pytest.raises(StoreError, match=r"some\.json is not JSON"):
        read_json(write(tmp_path / "some.json", text))


def test_json_that_can_be_read(tmp_path: Path):
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    for value in (deep, [[]] * 1000, {"a": [{}] * 1000}, "[" * 1000, 10**400):
        assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize("data", [b"\xff", b'{"a": "\xed\xa0\x80"}', b"{} \0", b"[]", b"3", b""])
def test_a_file_that_holds_no_object(tmp_path: Path, data: bytes):
    with pytest.raises(StoreError, match=r"some\.json (is not JSON|holds no JSON object)"):
        read_json(write(tmp_path / "some.json", data))


def test_a_file_without_end(tmp_path: Path):
    path = write(tmp_path / "some.json", b"{}")
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # without a block on disk
    with pytest.raises(StoreError, match=r"some\.json cannot be read \(it has more than 67,108,864 bytes\)"):
        read_json(path)
