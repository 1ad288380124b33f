"""What `make report` runs: recipes of studies, and of the model and readers that they look at, fit each other."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from lamina.demo.corpus import write
from lamina.recipes.estimate import estimate
from lamina.recipes.schema import load_recipe
from lamina.registry import STUDIES
from lamina.studies.run_study import load_study_recipe, load_tasks, load_texts

RECIPES = Path(__file__).parents[3] / "recipes"
FOLDER = RECIPES / "studies"
SCRIPT = (RECIPES / "report.sh").read_text(encoding="utf-8")
TASKS = ("sst2", "cola", "qnli", "conll2003")
EVERY = {"probe", "similarity", "drift", "importance", "removal", "advise"}
LONG = {"reinit", "insertion"}  # hours, so not on the page


@pytest.mark.parametrize("task", TASKS)
def test_a_task_has_every_study_and_what_they_look_at(task: str):
    recipe = load_study_recipe(FOLDER / f"{task}.yaml")
    assert set(recipe.studies) >= EVERY | ({"variability"} if task != "conll2003" else set())
    assert recipe.options("drift")["others"] == {"fine-tuned": f"out/studies/tuned/models/{task}"}
    assert recipe.options("importance")["banks"] == f"out/studies/{task}/readers"
    if "variability" in recipe.studies:
        assert recipe.options("variability")["probed"] == f"out/studies/{task}/probe"
    readers = load_recipe(FOLDER / "training" / f"{task}-readers.yaml")
    assert list(readers.tasks) == [task]
    (header, _, _) = (FOLDER / "training" / f"{task}-readers.yaml").read_text().partition("model:")
    assert f"--output out/studies/{task}/readers" in header
    assert task in load_recipe(FOLDER / "training" / "tuned.yaml").tasks


@pytest.mark.full
def test_the_demo_s_recipes_fit_the_demo_s_rows(tmp_path: Path):
    write(tmp_path, rows=480)
    recipe = load_study_recipe(FOLDER / "demo.yaml")
    tasks = load_tasks(recipe, tmp_path)
    assert len(load_texts(recipe, tasks, tmp_path)) > 30
    for name in ("demo-tuned", "demo-readers"):
        found = estimate(load_recipe(FOLDER / "training" / f"{name}.yaml"), data=tmp_path)
        assert {row["task"] for row in found.runs} >= {"sentiment"}
    assert recipe.options("drift")["others"] == {"fine-tuned": "out/report/tuned/models/sentiment"}
    assert recipe.options("importance")["banks"] == "out/report/demo/readers"


def test_the_script_runs_every_study_of_the_recipes():
    listed = [
        name for names in re.findall(r'^studies "[^"]*" ([a-z ]+)', SCRIPT, re.MULTILINE) for name in names.split()
    ]
    shown = re.search(r"for part in readers ([a-z ]+);", SCRIPT)
    tasks = re.search(r'tasks="([a-z0-9 ]+)"', SCRIPT)
    assert shown
    assert tasks
    assert set(tasks[1].split()) == {*TASKS, "stories260k"}
    named = {name for path in FOLDER.glob("*.yaml") for name in load_study_recipe(path).studies}
    assert set(listed) == set(shown[1].split()) == named - LONG <= set(STUDIES.names())
    assert listed.index("probe") < listed.index("variability")  # which reads it
    subprocess.run(["bash", "-n", RECIPES / "report.sh"], check=True)
