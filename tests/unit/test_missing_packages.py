"""Optional packages that are not installed: each is named with its extra before work begins."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tests.support.finetuned import bert
from tests.support.training import tiny_tokenizer

import lamina
from lamina.cli import main
from lamina.demo.run import run_demo
from lamina.errors import ConfigError, MissingExtraError, require_packages
from lamina.monitors import Calibration
from lamina.recipes.estimate import estimate
from lamina.recipes.run_recipe import run_recipe
from lamina.recipes.schema import load_recipe
from lamina.utils import check_versions

LATER = "raise AssertionError('work had begun')"  # what must not run


def hidden(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Make modules look as if they were not installed."""
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)


def test_what_is_installed_passes_and_what_is_not_is_named_as_pip_knows_it(monkeypatch: pytest.MonkeyPatch):
    require_packages("work", "images", "PIL", "numpy")
    hidden(monkeypatch, "PIL", "sklearn")
    with pytest.raises(MissingExtraError, match=r"^work: needs the package 'pillow', .*'lamina\[images\]'$"):
        require_packages("work", "images", "numpy", "PIL")
    with pytest.raises(ImportError, match=r"'scikit-learn', .* Run: pip install 'lamina\[sklearn\]'$"):
        require_packages("work", "sklearn", "sklearn")


@pytest.mark.parametrize(
    ("module", "code", "extra"),
    [
        ("sklearn", "from lamina import LaminaClassifier", "sklearn"),
        ("sklearn", "import lamina; lamina.LaminaTagger", "sklearn"),
        ("scipy", "import lamina; lamina.studies.probe", "studies"),
        ("sklearn", "from lamina.studies import similarity", "studies"),
    ],
)
def test_a_room_without_its_packages(module: str, code: str, extra: str):
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules['{module}'] = None; {code}; {LATER}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(f"Run: pip install 'lamina[{extra}]'")


def test_the_command_line_names_the_extra_in_one_line(tmp_path):
    code = "import sys; sys.modules['scipy'] = None; from lamina.cli import main; main(['study', 'probe', 'r.yaml'])"
    (tmp_path / "r.yaml").write_text("model: minilm\nstudies: {probe: }\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        "error: studies: needs the package 'scipy', which is not installed. Run: pip install 'lamina[studies]'"
    ]


def tags() -> tuple[lamina.ReaderBank, dict[str, lamina.Task]]:
    rows = [{"text": ["it", "is", "good"], "tags": ["O", "O", "B-x"]}, {"text": ["it"], "tags": ["B-x"]}] * 8
    task = lamina.Task.from_dataset("token_classification", {"train": rows}, text="text", label="tags")
    bank = lamina.ReaderBank(bert("AutoModel"), processor=tiny_tokenizer())
    bank.add("tags", task)
    return bank, {"tags": task}


def test_a_metric_is_asked_for_before_training_and_scoring(monkeypatch: pytest.MonkeyPatch):
    bank, tasks = tags()
    hidden(monkeypatch, "seqeval")
    before = {name: value.clone() for name, value in bank.state_dict().items()}
    with pytest.raises(MissingExtraError, match=r"^fit: needs the package 'seqeval', .*'lamina\[metrics\]'$"):
        lamina.fit(bank, tasks, epochs=1, progress=False)
    assert all(value.equal(before[name]) for name, value in bank.state_dict().items())
    with pytest.raises(MissingExtraError, match=r"^evaluate: needs the package 'seqeval'"):
        lamina.evaluate(bank, tasks)


def test_classes_and_numbers_are_scored_without_optional_packages(monkeypatch: pytest.MonkeyPatch):
    hidden(monkeypatch, "torchmetrics", "seqeval", "sacrebleu", "snowballstemmer", "sklearn", "scipy")
    for labels in (["a", "b"], ["a", "b", "c"], [0.5, 1.5]):
        rows = [{"text": "it is good", "label": label} for label in labels * 8]
        task = lamina.Task.from_dataset("sequence_classification", {"train": rows, "test": rows}, text="text")
        bank = lamina.ReaderBank(bert("AutoModel"), processor=tiny_tokenizer())
        bank.add("it", task)
        lamina.fit(bank, {"it": task}, epochs=1, progress=False)
        assert set(lamina.evaluate(bank, {"it": task}, split="test")["it"]) == set(task.metrics)


def test_a_recipe_with_seeds_asks_for_the_package_of_its_intervals_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "rows.tsv").write_text("sentence\tlabel\n" + "it is good\tyes\nit is bad\tno\n" * 12)
    recipe = """
        model: minilm
        seeds: SEEDS
        tasks:
          mood:
            files: {train: rows.tsv}
            readers: {plain: {fusion: mean}}
    """
    paths = {}
    for seeds in ("[0]", "[0, 1]"):
        paths[seeds] = tmp_path / f"recipe{len(seeds)}.yaml"
        paths[seeds].write_text(textwrap.dedent(recipe.replace("SEEDS", seeds)))
    hidden(monkeypatch, "scipy")
    monkeypatch.setattr("lamina.recipes.run_recipe.train", Mock(side_effect=RuntimeError(LATER)))
    with pytest.raises(MissingExtraError, match=r"^recipe: needs the package 'scipy', .*'lamina\[metrics\]'$"):
        run_recipe(load_recipe(paths["[0, 1]"]), data=tmp_path)
    with pytest.raises(MissingExtraError, match=r"^recipe: needs the package 'scipy', .*'lamina\[metrics\]'$"):
        estimate(load_recipe(paths["[0, 1]"]), data=tmp_path)
    with pytest.raises(RuntimeError, match="work had begun"):
        run_recipe(load_recipe(paths["[0]"]), data=tmp_path)
    assert len(estimate(load_recipe(paths["[0]"]), data=tmp_path).runs) == 1


@pytest.mark.parametrize(
    ("shown", "error"),
    [
        ("table: {columns: {task: {mood: a, x: b}}}", RuntimeError),
        ("table: {columns: {task: {mood: both, x: both}}}", MissingExtraError),
        ("table: {columns: {task: {mood: x}}}", MissingExtraError),  # beside a task that is called so
        ("table: {columns: {task: {mood: both, x: both}}}\nonly: {task: mood}", RuntimeError),
        ("table: {columns: {task: {mood: both, x: both}}, rows: [model, method]}", MissingExtraError),
        ("figure: {x: {task: {mood: 8, x: 8.0}}}", MissingExtraError),
        ("figure: {x: {task: {mood: 8, x: 8}}, facet: {task: {mood: A, x: B}}}", RuntimeError),
        ("figure: {x: {task: {mood: 8, x: null}}}", RuntimeError),
        ("figure: {x: epoch, facet: {task: {mood: both, x: both}}}", MissingExtraError),
    ],
)
def test_a_recipe_whose_tasks_share_a_cell_or_point_asks_for_the_package_of_its_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str, error: type[Exception]
):
    (tmp_path / "rows.tsv").write_text("sentence\tlabel\n" + "it is good\tyes\nit is bad\tno\n" * 12)
    path = tmp_path / "recipe.yaml"
    hidden(monkeypatch, "scipy")
    monkeypatch.setattr("lamina.recipes.run_recipe.train", Mock(side_effect=RuntimeError(LATER)))
    for reader, expected in (("plain", error), ("other", RuntimeError)):  # two readers: a cell or curve for each
        mood, x = (
            f"{{files: {{train: rows.tsv}}, readers: {{{name}: {{fusion: mean}}}}}}" for name in ("plain", reader)
        )
        path.write_text(f"model: minilm\nseeds: [0]\ntasks:\n  mood: {mood}\n  x: {x}\n{shown}\n")
        with pytest.raises(expected):
            run_recipe(load_recipe(path), data=tmp_path)


@pytest.mark.parametrize("options", [{}, {"threshold": 0.5}, {"guarantee": True, "false_positive_rate": 0.9}])
def test_a_calibration_names_the_extra_of_its_intervals(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]):
    hidden(monkeypatch, "scipy")
    with pytest.raises(MissingExtraError, match=r"^calibrate: needs the package 'scipy', .*'lamina\[metrics\]'$"):
        Calibration.of([0.1] * 100 + [0.9], [False] * 100 + [True], **options)


def test_the_demo_names_its_own_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hidden(monkeypatch, "altair")
    with pytest.raises(MissingExtraError, match=r"^demo: needs the package 'altair', .*'lamina\[demo\]'$"):
        run_demo(tmp_path)


@pytest.mark.parametrize(
    ("package", "installed", "message"),
    [
        ("torch", "2.3.1+cpu", "torch has version 2.3.1+cpu; torch>=2.7 is needed. Run: pip install 'torch>=2.7'"),
        ("transformers", "4.57.0", "transformers has version 4.57.0; transformers<6,>=5.0 is needed."),
        ("safetensors", None, "safetensors is not installed; safetensors>=0.5 is needed."),
    ],
)
def test_a_package_that_is_too_old_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    package: str,
    installed: str | None,
    message: str,
):
    def version(name: str) -> str:
        if name != package:
            return metadata.version(name)
        if installed is None:
            raise metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr("lamina.utils.version", version)
    check_versions.cache_clear()
    monkeypatch.delitem(vars(lamina), "load", raising=False)  # kept by an earlier test's use of it
    with pytest.raises(ConfigError, match=f"^lamina: {re.escape(message)}"):
        lamina.load  # noqa: B018
    with pytest.raises(SystemExit, match="2"):
        main(["inspect", "minilm"])
    assert capsys.readouterr().err.startswith(f"error: lamina: {message}")


def test_an_older_python_is_named_before_anything_is_read():
    code = "import sys; sys.version_info = (3, 10, 4); sys.version = '3.10.4 (main)'; import lamina"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.rstrip().endswith("ImportError: lamina: this is Python 3.10.4; 3.11 or newer is needed.")
