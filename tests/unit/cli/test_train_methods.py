"""`lamina train` on a recipe that fine-tunes: from files to tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.finetuned import bert
from tests.support.training import tiny_tokenizer
from tests.unit.cli.conftest import Ran

Lamina = Callable[..., Ran]
ROWS = [f"the film is {('bad', 'good')[row % 2]} .\t{('no', 'yes')[row % 2]}\n" for row in range(16)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backbone that learns in a few steps."""
    folder = tmp_path_factory.mktemp("models") / "base"
    bert("AutoModel").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(base: Path, tmp_path: Path) -> Path:
    for part in ("train", "validation"):
        (tmp_path / f"{part}.tsv").write_text("sentence\tlabel\n" + "".join(ROWS))
    path = tmp_path / "films.yaml"
    path.write_text(f"""
model: {base}
seeds: [0, 1]
fit: {{epochs: 3, batch_size: 4, learning_rate: 0.003, precision: bfloat16}}
tasks:
  film: {{files: {{train: train.tsv, validation: validation.tsv}}}}
methods:
  no insertion: {{}}
  identity, gelu on the weight:
    edits: [{{insert: {{position: attention, init: identity, activation: gelu, placement: weight}}}}]
    grid: {{insert.layers: ["1-2"]}}
  frozen:
    edits:
      - insert: {{position: ffn, init: xavier, activation: relu, placement: output}}
      - freeze: {{train: inserted}}
""")
    return path


def run(lamina: Lamina, recipe: Path, *more: object) -> Ran:
    output = recipe.parent / "out"
    return lamina("train", recipe, "--data", recipe.parent, "--output", output, "--no-progress", *more)


@pytest.mark.long
def test_a_recipe_that_fine_tunes(lamina: Lamina, recipe: Path):
    ran = run(lamina, recipe, "--json")
    assert (ran.code, ran.err) == (0, "")
    found = json.loads(ran.out)
    assert found["steps"] == 3 * 2 * 3 * 4
    rows = {(row["method"], row["settings"].get("insert.layers")): row for row in found["table"]}
    assert list(rows) == sorted(rows, key=lambda key: -rows[key]["mean"])
    assert rows.keys() == {
        ("no insertion", None),
        ("identity, gelu on the weight", "1-2"),
        ("frozen", None),
    }
    assert rows["no insertion", None]["mean"] == 1.0
    output = recipe.parent / "out"
    assert {path.name for path in output.iterdir()} == {
        *("separate", "models", "report.json", "table.json", "table.md", "table.parquet", "importances.parquet")
    }
    again = run(lamina, recipe, "--resume")
    assert again.code == 0
    assert again.out.startswith("Best validation scores; ± is half a 95 % interval")
    assert "insert.layers" in again.out
    assert json.loads((output / "table.json").read_text()) == found["table"]


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ("insert: {position: ffn", "insrt: {position: ffn", "unknown edit 'insrt'"),
        ("insert.layers:", "insert.layer:", "line 11, methods.identity, gelu on the weight.grid: unknown key"),
        ('["1-2"]', '["1-9"]', "layer 9 does not exist"),
        ("epochs: 3", "epoch: 3", "unknown option 'epoch'"),
        ("no insertion: {}", "no insertion: {fit: {seed: 1}}", "methods take theirs from 'seeds'"),
    ],
)
def test_a_recipe_that_cannot_be(lamina: Lamina, recipe: Path, right: str, wrong: str, says: str):
    text = recipe.read_text()
    assert right in text
    recipe.write_text(text.replace(right, wrong))
    ran = run(lamina, recipe)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: ")
    assert says in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.long
def test_a_run_that_fails_is_told_and_the_command_ends_with_1(lamina: Lamina, recipe: Path):
    text = recipe.read_text().replace("no insertion: {}", "no insertion: {fit: {learning_rate: 1.0e+38}}")
    recipe.write_text(text.replace("seeds: [0, 1]", "seeds: [0]").replace("epochs: 3", "epochs: 1"))
    ran = run(lamina, recipe)
    assert ran.code == 1
    (line,) = [line for line in ran.err.splitlines() if line.startswith("failed: ")]
    assert "{'run': 'film-no-insertion-0'}: fit: the" in line
    assert ran.out.startswith("Best validation scores")
    again = run(lamina, recipe, "--resume", "--json")
    assert again.code == 1
    assert {row["method"] for row in json.loads(again.out)["table"]} == {"identity, gelu on the weight", "frozen"}
    (failure,) = json.loads(again.out)["failures"]
    assert failure["key"] == {"run": "film-no-insertion-0"}
