"""The benchmark on public probing sets: its data, its rival methods, its cells, and the comparison over sets."""

from __future__ import annotations

import time
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from tests.support.probing_sets import probing_sets, rows, write
from tests.support.stored import tiny_model, tiny_tokenizer
from threadpoolctl import threadpool_info, threadpool_limits

from lamina.errors import CacheError, ConfigError, DataError, UnknownNameError
from lamina.report.study_section import drawing_of
from lamina.studies import Study, benchmark
from lamina.studies.benchmarking import benchmark as benchmarks
from lamina.studies.benchmarking import benchmark_cell, regressions
from lamina.studies.benchmarking.benchmark import (
    benchmark_study,
    compare_methods,
    critical_difference,
    markdown_summary,
    mean_ranks,
    over_sets,
)
from lamina.studies.benchmarking.benchmark_cell import CellSettings, cell_portion
from lamina.studies.benchmarking.probing_sets import ProbingSet, find_data, portion, read_set, set_names

FAST = {"methods": ("majority", "embedding", "default"), "seeds": (0, 1), "scored": 40, "progress": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return probing_sets(tmp_path_factory.mktemp("sets"))


@pytest.fixture(scope="module")
def model():
    return tiny_model(hidden_size=16, num_hidden_layers=2)


@pytest.fixture(autouse=True)
def _few_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark_cell, "usual_epochs", lambda *_: 1)


def run(model, folder: Path, **options) -> Study:
    return benchmark(model, data=folder, **{"processor": tiny_tokenizer(), **FAST, **options})


def test_data_is_found_below_a_folder_or_named_as_missing(folder: Path, tmp_path: Path):
    assert find_data(folder.parent.parent) == find_data(folder.parent) == find_data(folder) == folder
    with pytest.raises(DataError, match="pip install --no-deps sae-probes"):
        find_data(tmp_path)
    with pytest.raises(DataError, match=r"not installed.*--data"):
        find_data(None)
    assert set_names(folder) == ("1_mood", "2_again", "4_lost")
    assert set_names(folder, "shift") == ("1_mood",)


def test_repeated_texts_count_once(tmp_path: Path):
    write(tmp_path / "cleaned_data/1_x.csv.zst", "prompt,target\na,0\na,0\nb,1\nc,0\nc,1\nd,0\n")
    data = read_set(tmp_path, "1_x")
    assert (len(data.texts), data.labels.tolist()) == (6, [0, 0, 1, 0, 1, 0])
    once = data.without_repeats()
    assert (list(once.texts), once.labels.tolist()) == (["a", "b", "d"], [0, 1, 0])


def test_a_portion_is_that_of_the_package_and_small_ones_are_part_of_it(folder: Path):
    data = read_set(folder, "1_mood")
    whole = portion(data, scored=None)
    # what `get_train_test_indices` of sae-probes 0.4.2 draws for 80 training and 99 test rows
    rng = np.random.RandomState(42)
    ones, zeros = np.flatnonzero(data.labels == 1), np.flatnonzero(data.labels == 0)
    train = np.concatenate([rng.choice(ones, 40, replace=False), rng.choice(zeros, 40, replace=False)])
    assert set(whole.train.texts) == {data.texts[row] for row in train}
    assert len(whole.test.texts) == 100
    assert not set(whole.train.texts) & set(whole.test.texts)
    small = portion(data, rows=16, scored=None)
    assert set(small.train.texts) < set(whole.train.texts)
    assert (small.train.labels.sum(), list(small.test.texts)) == (8, list(whole.test.texts))
    many = ProbingSet("5_many", list(map(str, range(400))), np.arange(400) % 2)
    rare = portion(many, share=0.1)
    assert rare.train.labels.mean() == pytest.approx(0.1, abs=0.05)
    with pytest.raises(DataError, match="set 1_mood has 180 rows"):
        portion(data, rows=100)


def test_a_shifted_set_has_the_classes_of_its_twin(folder: Path):
    drawn = cell_portion(folder, "1_mood", None, CellSettings("shift", (), ()))
    assert drawn.test.labels.tolist() == [0, 1] * 10  # "not" stands for "bad"
    few = cell_portion(folder, "1_mood", None, CellSettings("shift", (), (), scored=8))
    assert (len(few.test.texts), set(few.test.labels.tolist())) == (8, {0, 1})


@pytest.mark.parametrize(
    ("names", "positive"), [(("not", "good"), "good"), (("awful", "bad"), "awful"), (("good", "bad"), "good")]
)
def test_a_class_that_a_shifted_set_spells_differently_keeps_its_side(
    names: tuple[str, str], positive: str, tmp_path: Path
):
    place = probing_sets(tmp_path)
    write(place / "OOD data/1_mood_OOD.csv.zst", rows(4, 2, names))
    assert read_set(place, "1_mood", shifted=True).labels.tolist() == [int(name == positive) for name in names * 2]


def test_a_shifted_set_that_shares_no_class_name_is_refused(tmp_path: Path):
    place = probing_sets(tmp_path)
    write(place / "OOD data/1_mood_OOD.csv.zst", rows(4, 2, ("no", "yes")))
    with pytest.raises(DataError, match="set 1_mood has the classes no, yes in its shifted file and bad, good in its"):
        read_set(place, "1_mood", shifted=True)


def test_repeated_texts_of_a_shifted_set_count_once(folder: Path, tmp_path: Path):
    copytree(folder, tmp_path, dirs_exist_ok=True)
    write(tmp_path / "OOD data/1_mood_OOD.csv.zst", "prompt,target\na,bad\na,bad\nb,good\n")
    scored = [
        list(cell_portion(tmp_path, "1_mood", None, CellSettings("shift", (), (), unique=unique)).test.texts)
        for unique in (True, False)
    ]
    assert scored == [["a", "b"], ["a", "a", "b"]]


@pytest.mark.parametrize(("place", "count"), [(0, 1), (3, 2)])
def test_shifted_texts_that_may_be_trained_on_are_not_scored(folder: Path, tmp_path: Path, place: int, count: int):
    copytree(folder, tmp_path, dirs_exist_ok=True)
    known = read_set(folder, "1_mood").texts[place : place + count]
    texts = [*known, "new bad", "new good"]
    lines = ["prompt,target", *(f"{text},{'good' if text == 'new good' else 'bad'}" for text in texts)]
    write(tmp_path / "OOD data/1_mood_OOD.csv.zst", "\n".join(lines) + "\n")
    scored = [
        list(cell_portion(tmp_path, "1_mood", None, CellSettings("shift", (), (), unique=unique)).test.texts)
        for unique in (True, False)
    ]
    assert scored == [["new bad", "new good"], texts]


@pytest.mark.parametrize(("more", "classes"), [("", "0 of 2 classes"), ("new,good\n", "1 of 2 classes")])
def test_a_shifted_set_of_known_texts_is_refused(folder: Path, tmp_path: Path, more: str, classes: str):
    copytree(folder, tmp_path, dirs_exist_ok=True)
    write(tmp_path / "OOD data/1_mood_OOD.csv.zst", rows(20) + more)
    with pytest.raises(DataError, match=f"texts of 1_mood that may be scored are of {classes}; both are needed"):
        cell_portion(tmp_path, "1_mood", None, CellSettings("shift", (), ()))


def test_regression_follows_the_grid_and_the_folds_of_the_package():
    rng = np.random.default_rng(0)
    labels = np.arange(900) % 2
    features = rng.normal(size=(900, 400)) + labels[:, None] * 0.08
    train, test, classes = features[:300], features[300:], labels[:300]
    ours = regressions.logistic(train, classes, test, seed=1)
    held = 60
    by_strength = [
        roc_auc_score(
            classes[-held:],
            LogisticRegression(C=c, max_iter=1000)
            .fit(train[:-held], classes[:-held])
            .predict_proba(train[-held:])[:, 1],
        )
        for c in np.logspace(5, -5, 10)
    ]
    strength = np.logspace(5, -5, 10)[int(np.argmax(by_strength))]
    theirs = LogisticRegression(C=strength, max_iter=1000).fit(train, classes).predict_proba(test)[:, 1]
    assert roc_auc_score(labels[300:], ours.scores) == pytest.approx(roc_auc_score(labels[300:], theirs), abs=0.005)
    assert ours.size == 401
    assert ours.held_out == pytest.approx(max(by_strength), abs=0.005)
    assert [len(regressions.folds_of(np.arange(count) % 2, 1)) for count in (12, 64, 128)] == [36, 6, 1]
    assert regressions.folds_of(np.zeros(20, int), 1) == []


def test_regressions_use_one_thread_of_linear_algebra_and_give_the_others_back(monkeypatch: pytest.MonkeyPatch):
    """Threads of linear algebra beside those of torch wait for each other: a fit took five times as long."""
    seen: list[set[int]] = []

    def threads() -> set[int]:
        return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}

    fit = LogisticRegression.fit
    spy = lambda *args, **options: seen.append(threads()) or fit(*args, **options)  # noqa: E731
    monkeypatch.setattr(LogisticRegression, "fit", spy)
    features, classes = np.random.RandomState(0).randn(40, 4), np.arange(40) % 2
    with threadpool_limits(2, "blas"):
        if threads() != {2}:
            pytest.skip("the library of linear algebra has no setting for its threads")
        regressions.logistic(features, classes, features, seed=0)
        regressions.principal_components(features, classes, features, seed=0)
        assert threads() == {2}
    assert len(seen) > 2
    assert all(count == {1} for count in seen)


@pytest.mark.parametrize(
    "method", [regressions.principal_components, regressions.neighbours, regressions.boosted_trees]
)
def test_other_methods_find_a_clear_difference(method):
    if method is regressions.boosted_trees:
        pytest.importorskip("xgboost")
    rng = np.random.default_rng(0)
    labels = np.arange(80) % 2
    features = rng.normal(size=(80, 8)) + 3 * labels[:, None]
    fitted = method(features[:60], labels[:60], features[60:], seed=1)
    assert regressions.auc(labels[60:], fitted.scores) > 0.95


def test_the_study_has_every_method_of_every_set_and_names_a_lost_set(
    model, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(regressions, "STRENGTHS", regressions.STRENGTHS[4:6])  # ten fits for each fold take seconds
    study = run(
        model,
        folder,
        output=tmp_path,
        methods=("majority", "tfidf", "best_layer", "attention_probe", "default"),
        seeds=[0],
    )
    (failure,) = study.settings["failures"]
    assert failure["key"] == {"set": "4_lost", "point": None}
    assert "4_lost.csv.zst does not exist" in failure["error"]
    scores = study.table[study.table["measure"] == "score"]
    assert scores.groupby("set").size().to_dict() == {"1_mood": 5, "2_again": 5}
    assert set(scores.loc[scores["method"] == "majority", "score"]) == {0.5}
    assert scores.loc[scores["method"] == "tfidf", "score"].min() > 0.9  # one word tells
    chosen = scores.loc[scores["method"] == "best_layer", "chosen"]
    assert set(chosen) <= {0, 1, 2}
    ahead = study.table[study.table["measure"] == "ahead"]
    assert list(ahead["against"]) == ["majority", "tfidf", "best_layer", "attention_probe"]
    assert ahead[["wins", "level", "losses"]].sum(axis=1).tolist() == [2, 2, 2, 2]
    assert any("default is" in sentence and "2 sets" in sentence for sentence in study.conclusions)
    assert set(study.figures) == {"score", "rank", "time", "size"}
    assert all(len(study.rows(name)) for name in study.figures)
    assert Study.load(tmp_path).table.equals(study.table)
    page = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert "| method | mean AUC |" in page
    assert "1 cell failed" in page
    assert page.count("| 1_mood |") == 1
    # two sets decide nothing
    assert not ahead[["low", "high", "p"]].notna().any(axis=None)
    assert not any(word in page for word in ("interval", "Holm", "Nemenyi"))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:200]), "is damaged"),
        (lambda path: path.write_bytes(b"prompt,target\na,0\nb,1\n"), "is damaged"),  # not compressed
        (lambda path: write(path, "prompt\na\n"), "is damaged"),
        (lambda path: write(path, "prompt,target\na,0\nb,0\n"), "has 1 classes; 2 are needed"),
        (lambda path: write(path, ""), "is damaged"),
    ],
    ids=["cut off", "not compressed", "no classes", "one class", "empty"],
)
def test_a_damaged_set_is_named_and_the_others_run(model, damage, said: str, tmp_path: Path):
    damage(probing_sets(tmp_path) / "cleaned_data/1_mood.csv.zst")
    study = run(model, tmp_path, sets=["1", "2"], methods=("majority",))
    (failure,) = study.settings["failures"]
    assert failure["key"]["set"] == "1_mood"
    assert said in failure["error"]
    assert set(study.table.loc[study.table["measure"] == "score", "set"]) == {"2_again"}


class OnGpu(torch.Tensor):
    """A tensor that, like one on a GPU, must be copied to the CPU before numpy can read it."""

    def cpu(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def numpy(self) -> None:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


def test_states_on_a_gpu_are_averaged():
    states = torch.tensor([[[1.0], [3.0]], [[2.0], [0.0]]]).as_subclass(OnGpu)  # the second row has one token
    cached = SimpleNamespace(batch=lambda rows: {"encoder": {0: states[rows], 1: 2 * states[rows]}})
    group = SimpleNamespace(inputs=SimpleNamespace(lengths=[2, 1]), states=cached)
    assert benchmark_cell.mean_states(group).tolist() == [[[2.0], [4.0]], [[2.0], [4.0]]]


def test_the_first_method_of_pooled_states_does_not_pay_for_the_pooling(model, folder: Path, monkeypatch):
    real, pooled = benchmark_cell.mean_states, []

    def slow(group):
        pooled.append(100.0)
        return real(group)

    monkeypatch.setattr(benchmark_cell, "mean_states", slow)
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + sum(pooled))  # pooling takes 100 s
    monkeypatch.setattr(benchmark_cell, "time", clock)
    study = run(model, folder, sets=["1"], methods=["knn"])
    assert len(pooled) == 2
    assert study.table.loc[study.table["measure"] == "score", "seconds"].item() < 100


@pytest.mark.parametrize("method", ["knn", "tfidf"])
def test_the_first_method_does_not_pay_for_imports(method: str, model, folder: Path, monkeypatch):
    imported = []
    monkeypatch.setattr(regressions, "STRENGTHS", regressions.STRENGTHS[4:6])
    monkeypatch.setattr(regressions, "import_module", lambda name: imported.append(100.0))  # each takes 100 s
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + sum(imported))
    monkeypatch.setattr(benchmark_cell, "time", clock)
    study = run(model, folder, sets=["1"], methods=[method])
    assert imported
    assert study.table.loc[study.table["measure"] == "score", "seconds"].item() < 100


@pytest.mark.parametrize(("leader", "rival", "seeds"), [(1, 5, "5 seeds"), (5, 1, "5 seeds"), (1, 1, "1 seed")])
def test_the_sentence_counts_the_seeds_of_the_method_with_more(leader: int, rival: int, seeds: str):
    table = [
        (f"{n}_set", None, method, seed if count > 1 else None, score)
        for n in range(8)
        for method, count, score in (("a", leader, 0.8 + n / 100), ("b", rival, 0.7))
        for seed in range(count)
    ]
    frame = pd.DataFrame(table, columns=["set", "point", "method", "seed", "score"]).assign(seconds=1.0, bytes=4)
    assert f"; {seeds}), ahead on 8" in benchmark_study(frame, {}).conclusions[0]


def test_the_page_names_the_leader_and_the_point_of_a_failed_cell(model, folder: Path, tmp_path: Path):
    run(model, folder, methods=["majority", "knn"], setting="scarce", points=[16], sets=["1", "4"], output=tmp_path)
    page = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert "| knn is ahead by |" in page
    assert "- 4_lost, 16: " in page


def test_the_model_reads_each_text_once(model, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(regressions, "STRENGTHS", regressions.STRENGTHS[4:6])
    read: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, __, inputs: read.append(len(inputs["input_ids"])), with_kwargs=True
    )
    run(model, folder, sets=["1"], methods=("embedding", "all_layers"), seeds=[0])
    hook.remove()
    assert 0 <= sum(read) - 80 - 40 < 10  # the few others find out where the layers are


@pytest.mark.parametrize("setting", [{}, {"setting": "scarce", "points": [16]}])
def test_states_beyond_float16_are_kept_as_float32(folder: Path, setting: dict[str, object]):
    large = tiny_model(hidden_size=16, num_hidden_layers=2)
    with torch.no_grad():
        large.encoder.layer[-1].output.LayerNorm.weight.mul_(1e6)
    study = run(large, folder, sets=["1"], **setting)
    assert set(study.table["method"]) == {*FAST["methods"]}
    assert study.table["score"].notna().all()


def test_points_of_a_set_share_its_states_and_change_no_score(model, folder: Path, monkeypatch):
    how = {"setting": "scarce", "sets": ["1"], "methods": ("knn", "default"), "seeds": [0]}
    read: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, __, inputs: read.append(len(inputs["input_ids"])), with_kwargs=True
    )
    both = run(model, folder, points=[16, 32], **how)
    shared, read[:] = sum(read), []
    alone = [run(model, folder, points=[point], **how) for point in (16, 32)]
    hook.remove()
    keys = ["point", "method"]
    tables = [study.table[study.table["measure"] == "score"] for study in (both, *alone)]
    scores, expected = (t.set_index(keys)["score"].sort_index() for t in (tables[0], pd.concat(tables[1:])))
    pd.testing.assert_series_equal(scores, expected)
    assert shared < 0.65 * sum(read)  # the scored texts are the same, and the 16 rows are among the 32


def test_a_killed_run_goes_on_without_a_cell_twice(model, folder: Path, tmp_path: Path, monkeypatch):
    ran: list[str] = []
    real, quick = benchmarks.cell_rows, {"sets": ["1", "2"], "methods": ("majority", "default"), "seeds": [0]}

    def counted(*arguments):
        ran.append(arguments[3])
        if len(ran) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(benchmarks, "cell_rows", counted)
    with pytest.raises(KeyboardInterrupt):
        run(model, folder, output=tmp_path, **quick)
    study = run(model, folder, output=tmp_path, **quick, resume=True)
    assert ran == ["1_mood", "2_again", "2_again"]
    assert set(study.summary()["set"]) == {"1_mood", "2_again"}
    with pytest.raises(ConfigError, match="scored"):
        run(model, folder, output=tmp_path, **quick, resume=True, scored=30)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["blockbuster"])
    with pytest.raises(ConfigError, match=r"belongs to a study with tokenizer \w+, here \w+"):
        run(model, folder, output=tmp_path, **quick, resume=True, processor=tokenizer)


@pytest.mark.parametrize("changed", ["cleaned_data/1_mood", "OOD data/1_mood_OOD"])
def test_cells_of_other_data_are_not_gone_on_with(model, changed: str, tmp_path: Path):
    place = probing_sets(tmp_path / "data")
    quick = {"output": tmp_path / "out", "methods": ["majority"], "setting": "shift"}
    run(model, place, **quick)
    run(model, copytree(place, tmp_path / "moved"), resume=True, **quick)
    write(place / f"{changed}.csv.zst", rows(180, 5))
    with pytest.raises(ConfigError, match=r"belongs to a study with data \w+, here \w+; resuming needs the same"):
        run(model, place, resume=True, **quick)


def test_few_rows_make_a_point_each(model, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lamina.studies.benchmarking.probing_sets.sha256", None)  # nothing kept, nothing compared
    methods = ("majority", "knn")
    study = run(model, folder, setting="scarce", points=[16, 32], sets=["1_mood"], seeds=[0], methods=methods)
    assert study.table.loc[study.table["measure"] == "score", "trained"].unique().tolist() == [16, 32]
    assert study.conclusions[0].startswith("16: knn is")
    assert list(over_sets(study)["point"].unique()) == [16, 32]


def test_rare_classes_and_shifted_texts_run(model, folder: Path, tmp_path: Path):
    place = probing_sets(tmp_path)
    write(place / "cleaned_data/2_again.csv.zst", rows(300, 1))
    how = {"methods": ("majority", "default"), "seeds": [0]}
    rare = run(model, place, setting="imbalance", points=[0.1, 0.5], sets=["2"], **how)
    scores = rare.table[rare.table["measure"] == "score"]
    assert scores["trained"].nunique() == 1  # the same size for all shares
    assert (scores.groupby("method").size() == 2).all()
    assert rare.conclusions[0].startswith("0.1: default is")
    with pytest.raises(ConfigError, match=r"points is 0\.01"):
        run(model, place, setting="imbalance", points=[0.01])
    shifted = run(model, folder, setting="shift", **how)
    assert shifted.table.loc[
        shifted.table["measure"] == "score", ["set", "rows"]
    ].drop_duplicates().to_numpy().tolist() == [["1_mood", 20]]


def test_bad_input_is_said_before_anything_runs(model, folder: Path, monkeypatch, tmp_path: Path):
    write(tmp_path / "probing_datasets_MASTER.csv.zst", "Data type,Dataset save name\nMulticlass,1_a\n")
    with pytest.raises(DataError, match="has no binary set for the setting 'normal'"):
        run(model, tmp_path)
    with pytest.raises(UnknownNameError, match="bench: unknown set '9_none'"):
        run(model, folder, sets=["9_none"])
    with pytest.raises(UnknownNameError, match=r"unknown method 'defualt'.*Did you mean .default."):
        run(model, folder, methods=["defualt"])
    with pytest.raises(ConfigError, match="none twice"):
        run(model, folder, seeds=[1, 1])
    with pytest.raises(ConfigError, match="points are given for the setting 'normal'"):
        run(model, folder, points=[16])
    for points, message in (([], "at least one"), ([16, 16], "none twice"), ([16.5], r"16\.5.*whole numbers of rows")):
        with pytest.raises(ConfigError, match=message):
            run(model, folder, setting="scarce", points=points)
    with pytest.raises(ConfigError, match="tokenizer"):
        benchmark(model, data=folder, **FAST)
    with monkeypatch.context() as patch:
        patch.setattr(benchmarks.psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000))
        with pytest.raises(ConfigError, match=r"means of one set's states may take .* Leave out the methods"):
            run(model, folder)
        run(model, folder, methods=["majority"], sets=["1"])
        patch.setattr(benchmarks.os, "cpu_count", lambda: 3)
        patch.setattr(benchmarks.torch.cuda, "device_count", lambda: 0)
        with pytest.raises(
            ConfigError, match=r"means of the states of 3 cells at once may take .* Run without Ray, or leave"
        ):
            run(model, folder, ray="local")
        with pytest.raises(ConfigError, match=r"means of one set's states may take"):
            run(model, folder, ray="local", sets=["1"])
    monkeypatch.setattr("lamina.data.disk_cache.shutil.disk_usage", lambda _: type("U", (), {"total": 1, "free": 0}))
    with pytest.raises(CacheError, match="one set's states may take"):
        run(model, folder)


def test_methods_are_compared_over_sets():
    scores = {"a": np.array([[0.9, 0.8, 0.7], [0.9, 0.8, 0.7]]), "b": np.array([[0.8, 0.8, 0.71]])}
    (row,) = compare_methods(scores, "a")
    assert (row["wins"], row["level"], row["losses"]) == (1, 1, 1)
    assert row["score"] == pytest.approx(0.03)
    assert (row["low"], row["high"], row["p"]) == (None, None, None)
    (many,) = compare_methods({name: np.tile(matrix, 3) for name, matrix in scores.items()}, "a")
    assert many["low"] < many["score"] < many["high"]
    assert many["p"] <= 1
    assert mean_ranks(scores) == {"a": 1.5, "b": 1.5}
    assert critical_difference(4, 30) == pytest.approx(2.569 * np.sqrt(20 / 180), abs=1e-3)  # Demšar 2006, table 5


def curves(scores: dict[float, dict[str, float]]) -> Study:
    """Return the study of two methods; `scores` is point -> set -> score of method a, and method b is 0.05 below."""
    table = [
        (name, point, method, None, score - 0.05 * (method == "b"))
        for point, sets in scores.items()
        for name, score in sets.items()
        for method in "ab"
    ]
    frame = pd.DataFrame(table, columns=["set", "point", "method", "seed", "score"])
    return benchmark_study(frame.assign(seconds=1.0, bytes=4), {})


def test_a_method_without_scores_at_a_point_leaves_no_set_for_curves():
    table = [("easy", 16, "a", 0.9), ("easy", 16, "b", 0.8), ("easy", 64, "a", 0.95)]
    frame = pd.DataFrame(table, columns=["set", "point", "method", "score"]).assign(seed=None, seconds=1.0, bytes=4)
    study = benchmark_study(frame, {})
    assert not study.figures
    assert not study.table["measure"].str.startswith("shared").any()


@pytest.mark.parametrize(
    ("few", "many", "curve", "left_out"),
    [
        ({"easy": 0.95, "hard": 0.6}, {"hard": 0.65}, [0.6, 0.65], " 1 other set lacks a score at some point and is"),
        (
            {"hard": 0.7},
            {"easy": 0.9, "hard": 0.6, "fair": 0.8},
            [0.7, 0.6],
            " 2 other sets lack a score at some point and are",
        ),
        ({"hard": 0.6}, {"hard": 0.65}, [0.6, 0.65], ""),
    ],
)
def test_curves_over_points_are_of_the_sets_that_every_point_has(
    few: dict[str, float], many: dict[str, float], curve: list[float], left_out: str
):
    study = curves({64.0: few, 1024.0: many})
    shown = study.rows("score")
    assert shown.loc[shown["method"] == "a", "score"].tolist() == pytest.approx(curve)
    assert study.rows("rank")["score"].tolist() == [1, 2, 1, 2]
    note = f"The points have the same 1 set.{left_out and f'{left_out} left out.'}"
    assert study.figures["score"].note == study.figures["rank"].note == note
    means = over_sets(study)
    whole = [np.mean(list(sets.values())) for sets in (few, many)]
    assert means.loc[means["method"] == "a", "score"].tolist() == pytest.approx(whole)


def test_points_without_a_common_set_have_no_curves():
    assert curves({64.0: {"easy": 0.9}, 1024.0: {"hard": 0.6}}).figures == {}


@pytest.mark.parametrize(("first", "second"), [(0.855, 0.85), (0.85, 0.855), (0.605, 0.6), (0.1, 0.105)])
def test_scores_that_are_exactly_0005_apart_are_level(first: float, second: float):
    (row,) = compare_methods({"a": np.full((1, 8), first), "b": np.full((1, 8), second)}, "a")
    assert (row["wins"], row["level"], row["losses"]) == (0, 8, 0)
    sign = 1 if first > second else -1
    (row,) = compare_methods({"a": np.full((1, 8), first + sign * 1e-4), "b": np.full((1, 8), second)}, "a")
    assert row["level"] == 0


@pytest.mark.parametrize(("differing", "clause"), [(1, "only 1 set differs"), (5, "only 5 sets differ")])
def test_a_lead_on_a_handful_of_many_sets_has_no_interval(differing: int, clause: str):
    keys = ("set", "point", "method", "seed", "score")
    table = [
        (f"{n}_set", None, way, None, 0.8 - 0.1 * (way == "b" and n < differing)) for n in range(8) for way in "ab"
    ]
    study = benchmark_study(pd.DataFrame(table, columns=list(keys)).assign(seconds=1.5, bytes=4000), {})
    ahead = study.table[study.table["measure"] == "ahead"]
    assert not ahead[["low", "high", "p"]].notna().any(axis=None)
    assert (
        f" above b on average ({clause}, which decides nothing; 1 seed), ahead on {differing}, " in study.conclusions[0]
    )


def test_a_full_benchmark_has_every_column_on_its_page():
    keys = ("set", "point", "method", "seed", "score")
    table = [
        (f"{n}_set", 16, way, seed, 0.8 - 0.1 * (way == "b") - 0.01 * seed)
        for n in range(8)
        for way in "ab"
        for seed in (0, 1)
    ]
    page = markdown_summary(
        benchmark_study(pd.DataFrame(table, columns=list(keys)).assign(seconds=1.5, bytes=4000), {})
    )
    header, _, first, second = page.splitlines()[2:6]
    assert header == (
        "| point | method | mean AUC | spread over seeds | mean rank | a is ahead by | 95 % interval | Holm p "
        "| wins / level / losses | s to train | bytes |"
    )
    assert first == "| 16 | a | 0.795 | 0.007 | 1.000 |  |  |  |  | 1.5 | 4,000 |"
    assert second.startswith("| 16 | b | 0.695 | 0.007 | 2.000 | 0.100 | 0.100 to 0.100 | ")
    assert second.endswith(" | 8 / 0 / 0 | 1.5 | 4,000 |")


def test_the_chart_of_ranks_says_from_which_distance_on_methods_differ():
    names, keys = [f"{number}_set" for number in range(8)], ("set", "point", "method", "seed", "score")
    table = [(name, None, method, None, 0.8 - 0.1 * at) for name in names for at, method in enumerate("abc")]
    frame = pd.DataFrame(table, columns=list(keys)).assign(seconds=1.0, bytes=4)
    distance = critical_difference(3, 8)
    study = benchmark_study(frame, {})
    assert f"(less than {distance:.2f} apart)" in study.figures["rank"].note
    drawing = drawing_of(study, "rank")
    ends = {mark["x"]: (mark["low"], mark["value"], mark["high"]) for mark in drawing.rows}
    half = distance / 2
    assert ends["a"] == pytest.approx((1 - half, 1, 1 + half), abs=1e-5)
    assert ends["c"] == pytest.approx((3 - half, 3, 3 + half), abs=1e-5)
    assert drawing.remark == f"Each interval is ± {half:.2f}"
    few = benchmark_study(frame[frame["set"].isin(names[:5])], {})
    assert few.figures["rank"].note == ""
    assert not any("low" in mark for mark in drawing_of(few, "rank").rows)
