"""What a chart draws of a study's rows: means over seeds, their intervals, and what is said of them."""

from __future__ import annotations

import json
import math
from typing import Any

import pandas as pd
import pytest
from scipy import stats
from tests.support.studied import probe

from lamina.errors import ConfigError, DataError, UnknownNameError
from lamina.report.study_section import drawing_of, plain, study_section, tables_of, with_interval
from lamina.studies.study import Figure, Study


def of(figure: Figure, **columns: list) -> Study:
    return Study("made up", pd.DataFrame(columns), figures={"it": figure})


def test_means_over_seeds_have_the_t_interval():
    drawing = drawing_of(probe(), "by layer")
    row = next(row for row in drawing.rows if (row["facet"], row["colour"], row["x"]) == ("film", "linear", 2))
    half = stats.t.ppf(0.975, 2) * 0.01 / 3**0.5
    assert (row["value"], row["low"], row["high"], row["seeds"]) == pytest.approx((0.51, 0.51 - half, 0.51 + half, 3))
    assert len(drawing.rows) == 2 * 2 * 4
    assert drawing.remark == "Mean of 3 seeds, with its 95 % confidence interval; n = 872 rows"
    assert drawing.titles == {
        "x": "layer (0 = embeddings)",
        "colour": "probe",
        "facet": "task",
        "value": "accuracy",
    }


def test_one_seed_has_no_interval_and_says_so():
    drawing = drawing_of(probe(seeds=1), "by layer")
    assert not any("low" in row for row in drawing.rows)
    assert drawing.remark.startswith("One seed per point, so there is no interval")


def test_what_is_averaged_over_beside_seeds_is_named():
    drawing = drawing_of(probe(), "map")
    assert "averaged" not in drawing.remark
    assert "averaged over task" in drawing_of(probe(), "layers").remark
    row = next(row for row in drawing_of(probe(), "layers").rows if row["x"] == 3)
    assert row["value"] == pytest.approx(0.66)
    assert row["seeds"] == 3


def test_rows_of_one_seed_count_once():
    frame = pd.DataFrame({"x": [1] * 4, "seed": [0, 0, 0, 1], "score": [1.0, 1.0, 1.0, 3.0]})
    (row,) = with_interval(frame, ["x"], "score")[1].to_dict("records")
    assert (row["value"], row["seeds"]) == (2.0, 2)


def test_a_seed_without_a_score_is_not_counted():
    frame = pd.DataFrame({"x": [1] * 3 + [2] * 3, "seed": [0, 1, 2] * 2, "score": [1.0, 3.0] + [float("nan")] * 4})
    means, _ = tables_of(frame, "Made up", {"x"})
    first, second = (dict(zip(means.columns, row, strict=True)) for row in means.rows)
    assert (first["mean"], first["seeds"]) == (2.0, 2)
    assert first == dict(zip(means.columns, tables_of(frame[:2], "Made up", {"x"})[0].rows[0], strict=True))
    assert second == {"x": 2, "mean": None, "low": None, "high": None, "seeds": 0}


@pytest.mark.parametrize("name", ["value", "low", "high", "seeds", "spread"])
def test_an_axis_may_have_the_name_of_a_number_that_the_chart_computes(name: str):
    columns = {name: [1, 1, 1, 2, 2, 2], "seed": [0, 1, 2] * 2, "score": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]}
    study = of(Figure("line", x=name), **columns)
    rows = drawing_of(study, "it").rows
    assert [(row["x"], row["value"], row["seeds"]) for row in rows] == [(1, 1.0, 3), (2, 4.0, 3)]
    means, _ = tables_of(study.table, "Made up")
    assert [row[:2] for row in means.rows] == [[1, 1.0], [2, 4.0]]
    assert len(set(means.columns)) == 5


def test_what_has_no_layer_is_a_line_across():
    layers, scores = [1.0, 2.0, 1.0, 2.0, None], [0.5, 0.6, 0.7, 0.8, 0.4]
    study = of(Figure("line", x="layer", colour="probe"), layer=layers, probe=[*["linear"] * 4, "tfidf"], score=scores)
    drawing = drawing_of(study, "it")
    across = [row for row in drawing.rows if row.get("across")]
    assert [(row["x"], row["value"], row["colour"]) for row in across] == [(1, 0.4, "tfidf"), (2, 0.4, "tfidf")]
    assert [row["x"] for row in drawing.rows if not row.get("across")] == [1, 2]
    assert "a dashed line has no layer" in drawing.remark
    alone = drawing_of(of(Figure("line", x="layer"), layer=[None], score=[0.4]), "it")
    assert [(row["x"], row["value"]) for row in alone.rows] == [(0, 0.4)]


def test_layers_run_upwards_and_names_stay_in_their_order():
    drawing = drawing_of(of(Figure("line", x="layer"), layer=[10, 9, 1], score=[1.0, 2.0, 3.0]), "it")
    assert [row["x"] for row in drawing.rows] == [1, 9, 10]
    drawing = drawing_of(of(Figure("bar", x="who"), who=["b", "a"], score=[1.0, 2.0]), "it")
    assert [row["x"] for row in drawing.rows] == ["b", "a"]


def test_values_that_are_not_finite_are_left_out_and_counted():
    drawing = drawing_of(of(Figure("line", x="layer"), layer=[0, 1, 2], score=[float("inf"), None, 1.0]), "it")
    assert [row["x"] for row in drawing.rows] == [2]
    assert "2 non-finite values are left out" in drawing.remark
    drawing = drawing_of(of(Figure("line", x="layer"), layer=[0, 1], score=[float("inf"), 1.0], rows=[1, 1]), "it")
    assert "1 non-finite value is left out" in drawing.remark
    assert "n = 1 row;" in drawing.remark


@pytest.mark.parametrize(
    ("kind", "part"), [("line", "colour"), ("line", "facet"), ("heat", "y"), ("bar", "x"), ("scatter", "x")]
)
def test_rows_without_a_place_are_left_out_and_counted(kind, part: str):
    parts: dict[str, Any] = {"x": "layer", **({"y": "layer"} if kind == "heat" else {}), part: "task"}
    columns = {"layer": [0, 1, 2], "task": [1.0, None, 2.0], "score": [0.1, 0.2, 0.3], "rows": [None] * 3}
    drawing = drawing_of(of(Figure(kind, **parts), **columns), "it")
    assert [row[part] for row in drawing.rows] == [1.0, 2.0]
    assert f"1 row without a {'finite ' * (part == 'x')}task is left out" in drawing.remark
    assert "n =" not in drawing.remark


def test_a_point_that_is_infinitely_far_along_is_left_out():
    drawing = drawing_of(of(Figure("scatter", x="nu"), nu=[1.0, float("inf")], score=[0.1, 0.2]), "it")
    assert [row["x"] for row in drawing.rows] == [1.0]
    assert "1 row without a finite nu is left out" in drawing.remark


def test_values_that_are_no_numbers_are_refused():
    with pytest.raises(
        DataError, match="column 'score' of figure 'it' holds values that are not numbers; a figure draws numbers"
    ):
        drawing_of(of(Figure("line", x="layer"), layer=[1], score=["a"]), "it")


def test_a_large_scatter_shows_a_sample_and_says_so():
    many = list(range(9000))
    drawing = drawing_of(of(Figure("scatter", x="a", value="b"), a=many, b=many, c=many), "it")
    assert len(drawing.rows) == 4000
    assert "9,000 in all" in drawing.remark
    assert "4,000 drawn at random are shown" in drawing.remark
    assert drawing.rows[0]["label"] == f"c {drawing.rows[0]['x']}"


def test_the_measure_names_the_value():
    study = of(Figure("line", x="layer"), layer=[1], measure=["block_influence"], score=[0.1])
    assert drawing_of(study, "it").titles["value"] == "block influence"


def test_a_column_that_is_not_there():
    with pytest.raises(UnknownNameError, match="study made up: figure 'it': unknown column 'depth'; known: layer"):
        drawing_of(of(Figure("line", x="depth"), layer=[1], score=[1.0]), "it")


@pytest.mark.parametrize(
    ("figure", "error", "match"),
    [
        (Figure("pie", x="layer"), UnknownNameError, ": unknown kind 'pie'; known: line, heat"),  # pyright: ignore
        (Figure("heat", x="layer"), ConfigError, " is a heat map without y"),
    ],
)
def test_a_figure_that_cannot_be_drawn(figure: Figure, error: type[Exception], match: str):
    with pytest.raises(error, match=f"report: figure 'it'{match}"):
        drawing_of(of(figure, layer=[1], score=[1.0]), "it")


def test_cells_are_plain():
    assert plain(pd.Series([0.1234567891])[0]) == 0.123457
    assert plain(pd.Series([7])[0]) == 7
    assert plain(pd.Series([22_713_216.0])[0]) == 22_713_216  # a count beside cells without one
    assert plain([1, "a"]) == "[1, 'a']"
    assert plain(None) is None


def test_no_band_goes_where_a_score_cannot_be_and_the_table_keeps_its_number():
    seeds = {"layer": [1] * 3, "seed": [0, 1, 2], "score": [0.2, 0.5, 0.95]}
    for more in ({"measure": ["accuracy"] * 3}, {"measure": ["score"] * 3, "metric": ["f1"] * 3}):
        study = of(Figure("line", x="layer"), **seeds, **more)
        (row,) = drawing_of(study, "it").rows
        assert (row["low"], row["high"]) == (0.0, 1.0)
        assert with_interval(study.table, ["layer"], "score")[1]["high"].tolist()[0] > 1.4
    study = of(Figure("line", x="layer"), **seeds, measure=["ahead"] * 3, metric=["accuracy"] * 3)
    assert drawing_of(study, "it").rows[0]["high"] > 1.4


def test_two_seeds_are_two_dots_and_have_no_interval():
    study = of(
        Figure("line", x="layer", colour="probe"),
        layer=[1, 1, 2],
        seed=[0, 1, 0],
        probe=["a"] * 3,
        score=[0.5, 0.9, 0.4],
    )
    drawing = drawing_of(study, "it")
    assert not any("low" in row for row in drawing.rows)
    assert [(row["x"], row["value"]) for row in drawing.rows if row.get("mark") == "dot"] == [(1, 0.5), (1, 0.9)]
    assert [(row["x"], row["value"]) for row in drawing.rows if "mark" not in row] == [(1, 0.7), (2, 0.4)]
    assert drawing.remark == "Mean of 1 to 2 seeds; each dot is a seed, and fewer than 3 give no interval"


@pytest.mark.parametrize(
    ("kind", "layers", "remark"),
    [
        (
            "line",
            [1, 2, 2, 2],
            "Mean of 1 to 3 seeds, with its 95 % confidence interval; fewer than 3 give no interval",
        ),
        ("heat", [1, 1, 2, 2], "Mean of 2 seeds; fewer than 3 give no interval"),
        ("line", [], ""),
    ],
)
def test_a_remark_promises_an_interval_only_where_there_is_one(kind: str, layers: list[int], remark: str):
    columns = {"layer": layers, "seed": range(len(layers)), "probe": ["a"] * len(layers), "score": [0.5] * len(layers)}
    drawing = drawing_of(of(Figure(kind, x="layer", y="probe"), **columns), "it")
    assert drawing.remark == remark.format(", with its 95 % confidence interval")


@pytest.mark.parametrize(
    ("seeds", "remark"),
    [
        ([0, 1, 2, None], "Mean of 3 seeds, with its 95 % confidence interval; a dashed line has no layer"),
        ([0, None], "One seed per point, so there is no interval; a dashed line has no layer"),
        ([None] * 2, "One measurement per point, so there is no interval; a dashed line has no layer"),
    ],
)
def test_a_baseline_without_seeds_does_not_count_as_a_seed(seeds: list[int | None], remark: str):
    probes = len(seeds) - 1
    columns = {"layer": [1] * probes + [None], "probe": ["a"] * probes + ["majority"], "score": [0.5] * len(seeds)}
    study = of(Figure("line", x="layer", colour="probe"), seed=seeds, **columns)
    assert drawing_of(study, "it").remark.startswith(remark)


def probed(low: float, seeds: int = 3) -> Study:
    probes = [{"measure": "score", "layer": 4, "probe": "mlp", "seed": seed, "score": 0.7} for seed in range(seeds)]
    text = {"measure": "score", "probe": "tfidf", "score": 0.48}
    ahead = {"measure": "ahead", "layer": 4, "probe": "mlp", "score": 0.22, "low": low, "p": 0.01}
    table = pd.DataFrame([*probes, text, ahead]).assign(task="film", metric="accuracy")
    return Study("probe", table, {}, conclusions=("film: more.",))


@pytest.mark.parametrize(
    ("study", "verdict"),
    [
        (probed(0.1), "layer 4 is better than TF-IDF + logistic regression: accuracy 0.700 (mlp probe of layer 4)"),
        (probed(-0.1), "no better than TF-IDF + logistic regression, as far as this study can tell: accuracy 0.700"),
        (probed(0.1, 1), "one seed cannot show whether a layer is better than TF-IDF + logistic regression"),
        (probed(0.1, 2), "2 seeds cannot show whether a layer is better than TF-IDF + logistic regression"),
    ],
)
def test_a_probing_study_has_one_verdict_per_task(study: Study, verdict: str):
    section = study_section(study, "run")
    ((task, sentence),) = section.verdicts
    assert task == "film"
    assert sentence.startswith(verdict)
    assert section.details == ["film: more."]


@pytest.mark.parametrize(
    ("baseline", "metric", "name"),
    [
        ("bag_of_words", "pearson", "bag of words + ridge regression"),
        ("length", "mae", "ridge regression on text length"),
        ("majority", "spearman", "the mean of the training labels"),
        ("majority", "mcc", "the most frequent class"),
    ],
)
def test_a_verdict_names_the_baseline_that_fits_the_labels(baseline: str, metric: str, name: str):
    table = probed(0.1).table.replace("tfidf", baseline).assign(metric=metric)
    (sentence, *_) = study_section(Study("probe", table), "run").conclusions
    assert sentence.startswith(f"film: layer 4 is better than {name}: {metric} 0.700")


@pytest.mark.parametrize(
    ("probe", "words"),
    [("mlp", "(mlp probes of layers 2, 4)"), ("linear", "(mlp probe of layer 4 and linear probe of layer 2)")],
)
def test_a_verdict_names_all_probes_with_the_best_score(probe: str, words: str):
    table = probed(0.1).table
    other = table[table["seed"].notna()].assign(layer=2, probe=probe)
    (sentence, *_) = study_section(Study("probe", pd.concat([table, other])), "run").conclusions
    assert sentence.endswith(f"logistic regression: accuracy 0.700 {words} against 0.480.")


def test_a_verdict_tells_the_sites_of_a_layer_apart():
    study = probed(0.1)
    inside = study.table[study.table["seed"].notna()].assign(site="ffn", score=0.9)
    table = pd.concat([study.table.assign(site="output"), inside])
    (sentence, *_) = study_section(Study("probe", table), "run").conclusions
    assert sentence.endswith("accuracy 0.900 (mlp probe of the ffn of layer 4) against 0.480.")
    ahead = study.table.tail(1)
    inside = [ahead.assign(site="ffn", layer=layer) for layer in (3, 4)]
    for better, words in (
        ([ahead.assign(site="output"), inside[1]], "layer 4 and the ffn of layer 4 are"),
        ([inside[1]], "the ffn of layer 4 is"),
        (inside, "the ffn of layers 3, 4 are"),
    ):
        table = pd.concat([study.table.head(-1).assign(site="output"), *better])
        (sentence, *_) = study_section(Study("probe", table), "run").conclusions
        assert sentence.startswith(f"film: {words} better than TF-IDF")


@pytest.mark.parametrize("site", [None, math.nan])
def test_a_verdict_reads_an_empty_site_as_the_output(site: float | None):
    table = probed(0.1).table.assign(site=site)
    (sentence, *_) = study_section(Study("probe", table), "run").conclusions
    assert sentence.endswith(
        "layer 4 is better than TF-IDF + logistic regression: accuracy 0.700 (mlp probe of layer 4) against 0.480."
    )


@pytest.mark.parametrize("missing", ["mlp", "tfidf"])
def test_a_task_whose_scores_are_all_nan_has_no_verdict(missing: str):
    table = probed(0.1).table
    table.loc[(table["probe"] == missing) & (table["measure"] == "score"), "score"] = math.nan
    study = Study("probe", pd.concat([table, probed(0.1).table.assign(task="book")]))
    assert [sentence[:17] for sentence in study_section(study, "run").conclusions[:1]] == ["book: layer 4 is "]


def test_scores_are_titled_by_their_metric():
    columns = {"layer": [1], "measure": ["score"], "metric": ["span_f1"], "score": [0.1]}
    assert drawing_of(of(Figure("line", x="layer"), **columns), "it").titles["value"] == "span f1"
    columns["measure"] = ["selectivity"]
    assert drawing_of(of(Figure("line", x="layer"), **columns), "it").titles["value"] == "selectivity (span f1)"


@pytest.mark.parametrize("text", [["ask", "Anna lives"], json.dumps(["ask", "Anna lives"])])
def test_the_spans_of_a_pair_are_marked_in_its_second_text(text: str | list[str]):
    missed, extra = (
        json.dumps([{"start": start, "end": end, "label": "PER", "error": error}])
        for start, end, error in ((0, 4, "missed"), (5, 10, "extra"))
    )
    place = {"task": "t", "layer": 1, "row": 0, "metric": "confidence", "score": 0.5}
    table = pd.DataFrame([{**place, "text": text, "true": missed, "predicted": extra}])
    (example,) = study_section(Study("errors", table), "errors").examples
    assert example.true == [("ask | ", "", ""), ("Anna", "PER", "missed"), (" lives", "", "")]
    assert example.predicted == [("ask | ", "", ""), ("Anna ", "", ""), ("lives", "PER", "extra")]


@pytest.mark.parametrize(
    ("text", "shown"), [(["a", "b"], "a | b"), ("plain", "plain"), ("[]", "[]"), ("[CLS]", "[CLS]")]
)
def test_texts_and_pairs_with_one_label_are_shown_whole(text: str | list[str], shown: str):
    place = {"task": "t", "layer": 1, "row": 0, "metric": "confidence", "score": 0.5}
    table = pd.DataFrame([{**place, "text": text, "true": "yes", "predicted": "no"}])
    (example,) = study_section(Study("errors", table), "errors").examples
    assert "".join(part for part, _, _ in example.text) == shown
