"""A saved study loads as it was; folders without a study, or with a damaged one, are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from tests.support.tiny import model_of

from lamina.errors import ConfigError, StoreError, UnknownNameError
from lamina.studies.study import Figure, Pivot, Study, library_versions, model_facts


def study(name: str = "drift") -> Study:
    table = pd.DataFrame(
        {
            "run": ["a", "a", "b"],
            "layer": pd.array([1, 2, 1], dtype="Int64"),
            "other": pd.array([None, 1, None], dtype="Int64"),
            "score": [0.5, float("nan"), 2.0],
        }
    )
    figures = {
        "by run": Figure("line", x="layer", colour="run", where={"run": "a"}, title="Drift", note="Higher is further.")
    }
    settings = {"layers": (1, 2), "versions": library_versions()}
    return Study(name, table, settings, figures, ("Layer 2 moved most.", "Layer 1 did not move."))


def test_a_saved_study_loads_as_it_was(tmp_path: Path):
    saved = study()
    saved.save(tmp_path / "deep" / "drift")
    loaded = Study.load(tmp_path / "deep" / "drift")
    pd.testing.assert_frame_equal(loaded.table, saved.table)
    assert (loaded.name, loaded.settings, loaded.figures) == (saved.name, saved.settings, saved.figures)
    assert loaded.conclusions == saved.conclusions
    assert loaded.settings["layers"] == [1, 2]
    csv = pd.read_csv(tmp_path / "deep" / "drift" / "table.csv")
    assert csv["score"].tolist()[::2] == [0.5, 2.0]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"table": [{"score": 1.0}]}, "study: table is a list; it must be a DataFrame of pandas"),
        ({"table": {"score": [1.0]}}, "study: table is a dict; it must be a DataFrame of pandas"),
        ({"table": pd.Series([1.0])}, "study: table is a Series; it must be a DataFrame of pandas"),
        ({"table": None}, "study: table is None; it must be a DataFrame of pandas"),
        ({"name": 3}, "study: name is 3; it must be a text"),
        ({"settings": [1]}, "study: settings is a list; it must be a dict"),
        ({"figures": ["by run"]}, "study: figures is a list; it must be a dict"),
        ({"figures": {"by run": "line"}}, r"study: figures\['by run'\] is 'line'; it must be a Figure"),
        ({"conclusions": "Layer 2 moved."}, "study: conclusions is 'Layer 2 moved.'; it must be a list"),
        ({"pivot": "layer"}, "study: pivot is 'layer'; it must be a Pivot or None"),
    ],
)
def test_a_field_of_the_wrong_type_is_refused(fields: dict[str, object], told: str):
    with pytest.raises(ConfigError, match=told):
        Study(**{"name": "drift", "table": study().table, **fields})  # pyright: ignore[reportArgumentType]


def test_conclusions_may_be_a_list():
    assert Study("drift", study().table, conclusions=["Layer 2 moved."]).conclusions[0] == "Layer 2 moved."


def test_rows_returns_what_a_figure_shows():
    assert study().rows("by run")["layer"].tolist() == [1, 2]
    with pytest.raises(UnknownNameError, match="study drift: unknown figure 'by task'; known: by run"):
        study().rows("by task")


def test_a_summary_has_a_row_per_index_and_a_column_per_value_with_the_mean_over_seeds(tmp_path: Path):
    rows = [
        {"layer": layer, "seed": seed, "probe": probe, "measure": measure, "score": layer + seed + len(probe)}
        for layer in (0, 1)
        for seed in (0, 1)
        for probe in ("linear", "mlp")
        for measure in ("score", "control")
    ]
    rows.append({"probe": "tfidf", "measure": "score", "score": 9.0})  # a baseline has no layer
    pivot = Pivot(index=("layer",), columns=("probe",), where={"measure": "score"})
    Study("probe", pd.DataFrame(rows), pivot=pivot).save(tmp_path)
    loaded = Study.load(tmp_path)
    assert loaded.pivot == pivot
    expected = pd.DataFrame({"layer": [0, 1], "linear": [6.5, 7.5], "mlp": [3.5, 4.5]})
    pd.testing.assert_frame_equal(loaded.summary(), expected, check_dtype=False)
    assert study().summary().shape == study().table.shape


def test_the_columns_of_a_summary_can_come_from_two_columns():
    rows = [{"layer": 1, "site": site, "probe": "mlp", "score": 1.0} for site in ("output", "ffn")]
    found = Study("x", pd.DataFrame(rows), pivot=Pivot(("layer",), ("site", "probe"))).summary()
    assert list(found.columns) == ["layer", "output mlp", "ffn mlp"]


@pytest.mark.parametrize(
    "pivot", [Pivot(("deep",), ("site",)), Pivot(("layer",), ("deep",)), Pivot(("layer",), ("site",), {"deep": 1})]
)
def test_a_summary_of_columns_that_are_not_there(pivot: Pivot):
    table = pd.DataFrame([{"layer": 1, "site": "ffn", "score": 1.0}])
    with pytest.raises(UnknownNameError, match="study x: summary: unknown column 'deep'; known: layer, site, score"):
        Study("x", table, pivot=pivot).summary()


def test_settings_are_json():
    with pytest.raises(ConfigError, match=r"study x: .*not JSON serializable; settings hold text, numbers"):
        Study("x", pd.DataFrame(), {"layers": {1}})


def test_a_second_study_replaces_the_first_and_foreign_files_are_refused(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    study("drift").save(tmp_path)
    study("lens").save(tmp_path)
    assert Study.load(tmp_path).name == "lens"
    assert (tmp_path / "notes.txt").read_text() == "mine"
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "table.csv").write_text("a,b\n")
    with pytest.raises(StoreError, match=r"holds table\.csv but no lamina_study\.json; .* is not overwritten"):
        study().save(foreign)
    assert [path.name for path in foreign.iterdir()] == ["table.csv"]


def test_a_table_that_cannot_be_written_changes_nothing(tmp_path: Path):
    study().save(tmp_path)
    mixed = Study("mixed", pd.DataFrame({"score": [1, "two", {3: 4}]}))
    with pytest.raises(StoreError, match="nothing in it was changed"):
        mixed.save(tmp_path)
    assert Study.load(tmp_path).name == "drift"


def test_a_folder_without_a_study(tmp_path: Path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(StoreError, match=r"holds no study: there is no lamina_study\.json"):
            Study.load(folder)


def changed(folder: Path, **fields: object) -> None:
    facts = json.loads((folder / "lamina_study.json").read_text())
    (folder / "lamina_study.json").write_text(json.dumps(facts | fields))


def test_a_study_of_another_version(tmp_path: Path):
    study().save(tmp_path)
    changed(tmp_path, format=2)
    with pytest.raises(StoreError, match="has format 2; this version of lamina reads format 1"):
        Study.load(tmp_path)


def test_a_damaged_study_is_refused(tmp_path: Path):
    study().save(tmp_path)
    table = (tmp_path / "table.parquet").read_bytes()
    (tmp_path / "table.parquet").write_bytes(table[:-9])
    with pytest.raises(StoreError, match=r"is not the table that lamina_study\.json was saved with"):
        Study.load(tmp_path)
    (tmp_path / "table.parquet").unlink()
    with pytest.raises(StoreError, match=r"table\.parquet is not there; the folder is incomplete"):
        Study.load(tmp_path)
    (tmp_path / "table.parquet").write_bytes(table)
    changed(tmp_path, figures={"by run": {"shape": "round"}})
    with pytest.raises(StoreError, match="has a figure that cannot be understood"):
        Study.load(tmp_path)
    (tmp_path / "lamina_study.json").write_text('{"format": 1')
    with pytest.raises(StoreError, match="is not JSON"):
        Study.load(tmp_path)
    study().save(tmp_path)
    changed(tmp_path, mood="good")
    with pytest.raises(UnknownNameError, match="unknown key 'mood'"):
        Study.load(tmp_path)


def test_model_facts_differ_between_models():
    facts = model_facts(model_of("bert")), model_facts(model_of("roberta"))
    assert [fact["family"] for fact in facts] == ["bert", "roberta"]
    assert facts[0]["fingerprints"]["main"] != facts[1]["fingerprints"]["main"]
    assert len(facts[0]["fingerprints"]["main"]) == 64


def test_repr_lists_the_conclusions():
    study = Study("probe", pd.DataFrame({"score": [1.0] * 3}), conclusions=("Read at layer 3.",))
    assert repr(study) == "Study('probe', 3 rows, figures: none)\n- Read at layer 3."


def test_what_is_no_folder_is_named():
    with pytest.raises(ConfigError, match=r"^load: folder is 3; it must be a text or a path"):
        Study.load(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"^save: folder is empty; it must be a text or a path"):
        Study("probe", pd.DataFrame({"score": [1.0]})).save("")


@pytest.mark.parametrize("kind", ["float64", "Float64", "object", "Int64"])
@pytest.mark.parametrize(("scores", "count"), [([1, None, 3], 1), ([None, None, 3], 2), ([1, 2, 3], 0)])
def test_undefined_scores_of_any_type_of_column_are_counted(kind: str, scores: list[int | None], count: int):
    table = pd.DataFrame({"score": pd.Series(scores, dtype=kind), "measure": "nu"})
    said = Study("made up", table).conclusions
    start = f"{count} of 3 scores are not defined"
    assert [sentence[: len(start)] for sentence in said] == [start] * bool(count)


def test_scores_that_are_not_numbers_have_no_warning():
    assert Study("made up", pd.DataFrame({"score": ["high", None]})).conclusions == ()
    assert Study("made up", pd.DataFrame({"score": [[1], None]})).conclusions == ()
