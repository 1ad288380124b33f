"""Recipes of studies: options are the parameters of each study, and mistakes are named with their line."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.stored import save_base

from lamina.errors import ConfigError, DataError, LaminaError, StoreError, UnknownNameError
from lamina.registry import STUDIES
from lamina.studies import Study
from lamina.studies.run_study import load_study_recipe, options_of, run_study

TASK = "tasks:\n  film: {files: {train: film.tsv, validation: film.tsv}, kind: sequence_classification}\n"
HEAD = f"model: base\n{TASK}texts: {{task: film}}\n"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    save_base(folder / "base")
    rows = ["the film is bad .\tbad", "the film is good .\tgood", "paris is slow\tbad", "anna is fun\tgood"] * 2
    (folder / "film.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    return folder


def load(folder: Path, text: str):
    (folder / "r.yaml").write_text(text)
    return load_study_recipe(folder / "r.yaml")


@pytest.mark.parametrize("name", STUDIES.names())
def test_every_study_has_options_that_a_recipe_can_give(name):
    fields = options_of(name).model_fields
    assert not {"model", "tasks", "texts", "processor", "output", "resume", "ray", "progress"} & set(fields)


@pytest.mark.parametrize(
    ("text", "kind", "told"),
    [
        ("model: base\nstudies:\n  lens: {maskshare: 1}", UnknownNameError, "line 3.*'maskshare'.*mean 'mask_share'"),
        ("model: base\nstudies:\n  lense: {}", UnknownNameError, "line 3.*unknown study 'lense'.*mean 'lens'"),
        ("model: base\nmodell: base", UnknownNameError, "line 2.*'modell'.*mean 'model'"),
        ("model: base\nstudies: {lens: {seed: many}}", ConfigError, "line 2, studies.lens.seed: .*integer"),
        ("model: base\nstudies: {lens: {layers: most}}", ConfigError, "line 2, studies.lens.layers: .*'most'"),
        ("model: base\nstudies: {similarity: {per: word}}", UnknownNameError, "line 2.*'word'; known: text, token"),
        ("texts: [a]", ConfigError, "model: field required"),
        ("model: base\ntexts: {limit: 3}", ConfigError, "line 2, texts.*one of 'file' and 'task'"),
        (f"model: base\n{TASK}texts: {{task: films}}", UnknownNameError, "line 4.*'films'; known: film"),
        (f"model: base\n{TASK[:-2]}, epochs: 3}}", ConfigError, "line 3.*'epochs' is for lamina train"),
        ("model: base\ntasks: {a: {preset: colla}}", UnknownNameError, "line 2.*'colla'.*mean 'cola'"),
        ("", DataError, "holds no keys"),
    ],
)
def test_mistakes_are_named_with_their_line(tmp_path, text, kind, told):
    with pytest.raises(kind, match=told):
        load(tmp_path, text)


def test_a_study_gets_the_model_tasks_texts_and_options_of_its_recipe(data, tmp_path):
    recipe = load(data, f"{HEAD}studies:\n  similarity: {{layers: '1-', minibatch: 4, measures: [cka]}}\n")
    study = run_study("similarity", recipe, data=data, output=tmp_path, progress=False)
    assert set(study.table["layer"]) == {1, 2, 3}
    assert study.settings["rows"] == 8
    assert study.settings["recipe"]["studies"]["similarity"]["minibatch"] == 4
    assert Study.load(tmp_path).settings == study.settings


def test_a_study_that_the_recipe_does_not_name_runs_with_its_defaults(data):
    study = run_study("variability", load(data, HEAD), data=data, progress=False)
    assert study.table["task"].unique().tolist() == ["film"]
    assert len(study.table) == 4


@pytest.mark.long
def test_models_of_options_are_loaded_where_the_study_wants_them(data):
    recipe = load(
        data,
        f"{HEAD}studies:\n  drift: {{others: {{same: base, twice: [base, base]}}}}\n  similarity: {{other: base}}\n",
    )
    table = run_study("drift", recipe, data=data).table
    assert (table["score"] == 0).all()
    assert table[["run", "seed"]].drop_duplicates().to_numpy().tolist() == [["same", 0], ["twice", 0], ["twice", 1]]
    assert "other" in run_study("similarity", recipe, data=data, progress=False).settings["models"]


def test_texts_come_from_a_list_or_a_file(data):
    (data / "lines.txt").write_text("the film\nis good\nparis is slow\nanna is fun\nbad\n")
    for texts, rows in (
        ("[a film, paris, is good, the]", 4),
        ("{file: lines.txt, limit: 4}", 4),
        ("{file: lines.txt}", 5),
    ):
        recipe = load(data, f"model: base\ntexts: {texts}\nstudies: {{similarity: {{minibatch: 4}}}}\n")
        assert run_study("similarity", recipe, data=data, progress=False).settings["rows"] == rows


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("variability", "model: base", "study variability: the recipe has no 'tasks'; it is required"),
        ("drift", "model: base", "study drift: the recipe has no 'others' under studies.drift"),
        ("lens", "model: base", "study lens: the recipe has no 'texts'"),
        ("nothing", "model: base", "unknown name 'nothing'; known: .*similarity"),
    ],
)
def test_missing_inputs_of_a_study_are_named(tmp_path, name, text, told):
    with pytest.raises(LaminaError, match=told):
        run_study(name, load(tmp_path, text))


@pytest.mark.parametrize("option", [{"resume": True}, {"ray": "local"}])
def test_a_study_of_one_pass_has_no_cells_to_resume_or_spread(data, option):
    with pytest.raises(ConfigError, match=r"study variability: \w+ is given, but the study is one pass"):
        run_study("variability", load(data, HEAD), data=data, **option)


def test_a_folder_that_cannot_be_written_is_refused_before_the_study_runs(data, tmp_path, monkeypatch):
    (tmp_path / "table.csv").write_text("mine")
    monkeypatch.setattr("lamina.studies.run_study._inputs", lambda *_: pytest.fail("it ran"))
    with pytest.raises(StoreError, match=r"holds table.csv but no lamina_study.json"):
        run_study("variability", load(data, HEAD), data=data, output=tmp_path)
    assert (tmp_path / "table.csv").read_text() == "mine"
