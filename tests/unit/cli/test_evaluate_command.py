from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.file_banks import seeing
from tests.support.pictures import picture_folder
from tests.support.portions import one_in

from lamina.bank import Reader, ReaderBank
from lamina.cli.evaluate_command import _show, marked, print_errors, shortened
from lamina.fusion.mean import Mean
from lamina.heads.sequence_classification import SequenceClassification
from lamina.prediction import evaluate
from lamina.store import load, load_bank, save_bank
from lamina.tasks.task import Task

MOODS = "text\tmood\nthe film is good .\tgood\nbad\tbad\nnot good\tbad\nvery good\tgood\n"
WORDS = "anna B-PER\nwent O\nto O\nparis B-LOC\n\nthe O\nfilm O\n"


@pytest.fixture
def moods(tmp_path: Path) -> Path:
    (tmp_path / "moods.tsv").write_text(MOODS)
    return tmp_path / "moods.tsv"


@pytest.fixture
def words(tmp_path: Path) -> Path:
    (tmp_path / "words.conll").write_text(WORDS)
    return tmp_path / "words.conll"


def compared(target: Any, tasks: dict[str, Task], **options: Any) -> Any:
    """The scores of a target on the split "test" beside those of a constant answer, as JSON holds them."""
    return json.loads(json.dumps(evaluate(target, tasks, split="test", compare=True, **options)))


def test_files_are_scored_with_the_labels_of_the_reader(lamina, bank_folder: Path, moods: Path):
    ran = lamina("evaluate", bank_folder, "--task", f"mood={moods}", "--text", "text", "--label", "mood", "--json")
    assert (ran.code, ran.err) == (0, "")
    task = Task.from_files("sequence_classification", test=moods, text="text", label="mood", labels=("bad", "good"))
    assert json.loads(ran.out) == compared(load_bank(bank_folder), {"mood": task})
    assert {"rows", "always", "baseline", "interval", "verdict"} <= set(json.loads(ran.out)["mood"])


@pytest.mark.parametrize(
    "learnt", [{"text": "review", "text_pair": "reply", "label": "mood"}, {"text": "no", "label": "no"}]
)
def test_a_task_has_the_columns_that_its_reader_learnt_from(
    lamina, bank_folder: Path, tmp_path: Path, learnt: dict[str, str]
):
    """They are those of FILE; where the file lacks them, "sentence" and "label" are read as ever."""
    bank = load_bank(bank_folder)
    bank.remove("who")
    bank["mood"].info["columns"] = learnt
    save_bank(bank, tmp_path / "bank")
    text, pair, label = ("review", "reply", "mood") if "text_pair" in learnt else ("sentence", None, "label")
    rows = ["sentence\tlabel\treview\treply\tmood", "good\tbad\tnot good\tthe film\tbad", "bad\tgood\tgood\tbad\t"]
    (tmp_path / "x.tsv").write_text("\n".join([*rows, "the film\tbad\tbad\tnot\tgood"]))
    ran = lamina("evaluate", tmp_path / "bank", "--task", f"mood={tmp_path / 'x.tsv'}", "--errors", 9, "--json")
    assert ran.code == 0, ran.err
    task = Task.from_files(
        "sequence_classification",
        test=tmp_path / "x.tsv",
        text=text,
        text_pair=pair,
        label=label,
        labels=("bad", "good"),
        missing_labels="mask",
    )
    assert json.loads(ran.out) == compared(load_bank(tmp_path / "bank"), {"mood": task}, errors=9)


def test_a_folder_of_images_is_scored(lamina, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whether it is the file of all readers or the task of one; a preset's name stays that of the preset."""
    monkeypatch.setattr("lamina.cli.shared_options.open_on", lambda *_, **__: seeing())
    folder = picture_folder(tmp_path / "pets", rows=1)
    alone = json.loads(lamina("evaluate", "bank", folder, "--label", "label", "--json").out)
    named = json.loads(lamina("evaluate", "bank", "--task", f"animal={folder}", "--label", "label", "--json").out)
    assert named["animal"] == alone["animal"]
    monkeypatch.chdir(tmp_path)
    picture_folder(tmp_path / "cola", rows=1)
    refused = lamina("evaluate", "bank", "--task", "animal=cola", "--label", "label")
    assert "--label was given, but no task is an existing file: cola; only files have columns" in refused.err


def test_words_are_scored_by_spans(lamina, bank_folder: Path, words: Path):
    scores = json.loads(lamina("evaluate", bank_folder, "--task", f"who={words}", "--json").out)
    assert "span_f1" in scores["who"]
    assert lamina("evaluate", bank_folder, "--task", f"who={words}", "--text", "0", "--label", "-1").code == 0


def test_a_file_is_scored_whole(lamina, bank_folder: Path, words: Path):
    rows = json.loads(lamina("evaluate", bank_folder, "--task", f"who={words}", "--per-class", "--json").out)
    assert sum(row["count"] for row in rows["who"]["per_class"] if row["label"] in ("PER", "B-PER")) == 1


@pytest.mark.parametrize("column", one_in(2, ["text", "sentence"]))
def test_the_text_is_found_as_by_predict(lamina, bank_folder: Path, tmp_path: Path, column: str):
    """In "sentence", else in "text"; beside "sentence" a column "text" is another."""
    more = {"text": "bad"} if column == "sentence" else {}
    rows = [{column: "the film is good .", "label": "good", **more}, {column: "not", "label": "bad", **more}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen = [
        json.loads(line)["text"]
        for line in lamina("predict", bank_folder, "--file", tmp_path / "x.jsonl", "--json").out.splitlines()
    ]
    assert seen == ["the film is good .", "not"]
    asked = ("evaluate", bank_folder, "--task", f"mood={tmp_path / 'x.jsonl'}", "--errors", 2, "--json")
    ran = lamina(*asked)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == lamina(*asked, "--text", column).out
    wrong = json.loads(ran.out)["mood"]["errors"]
    assert wrong
    assert {row["text"] for row in wrong} <= set(seen)


@pytest.mark.long
def test_a_preset_from_local_files(lamina, base: Path, tmp_path: Path):
    bank = ReaderBank(load(base)[0])
    bank.add("ok", Reader(Mean(), SequenceClassification(("unacceptable", "acceptable"))))
    save_bank(bank, tmp_path / "bank")
    (tmp_path / "data" / "cola").mkdir(parents=True)
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / "data" / "cola" / name).write_text("s\t1\t\tthe film is good .\ns\t0\t*\tgood the is\n")
    for preset in ("cola", "glue/cola"):
        ran = lamina("evaluate", tmp_path / "bank", "--task", f"ok={preset}", "--data", tmp_path / "data", "--json")
        beside = ["rows", "always", "baseline", "interval", "verdict"]
        assert list(json.loads(ran.out)["ok"]) == ["mcc", "accuracy", "macro_f1", *beside]


def test_the_tables(lamina, bank_folder: Path, moods: Path, words: Path):
    ran = lamina("evaluate", bank_folder, "--task", f"mood={moods}", "--text", "text", "--label", "mood", "--per-class")
    assert ran.code == 0
    assert "accuracy" in ran.out
    assert "moods" in ran.out
    assert "precision" in ran.out
    assert "precision" not in lamina("evaluate", bank_folder, "--task", f"who={words}").out


@pytest.mark.long
def test_wrong_answers_are_shown(lamina, bank_folder: Path, moods: Path, words: Path):
    columns, task = ("--text", "text", "--label", "mood"), f"mood={moods}"
    rows = json.loads(lamina("evaluate", bank_folder, "--task", task, *columns, "--errors", 9, "--json").out)
    ran = lamina("evaluate", bank_folder, "--task", task, *columns, "--errors", 9)
    assert (ran.code, ran.err) == (0, "")
    assert "mood: errors, most confident first" in ran.out
    assert rows["mood"]["errors"]
    for row in rows["mood"]["errors"]:
        assert {row["text"], row["true"], row["predicted"]} <= {part.strip() for part in ran.out.split("│")}
        assert f"{row['confidence']:.4f}" in ran.out
    ran = lamina("evaluate", bank_folder, "--task", f"who={words}", "--errors", 3)
    rows = json.loads(lamina("evaluate", bank_folder, "--task", f"who={words}", "--errors", 3, "--json").out)
    spans = [span for row in rows["who"]["errors"] for span in (*row["true"], *row["predicted"])]
    assert spans
    assert all(f"[{span['text']}|{span['label']} {span['error']}]" in ran.out for span in spans)
    refused = lamina("evaluate", bank_folder, "--task", task, "--errors", -1)
    assert refused.code == 2


def test_spans_are_marked_in_their_text():
    spans = [
        {"start": 0, "end": 4, "label": "PER", "error": "missed"},
        {"start": 14, "end": 19, "label": "LOC", "error": "wrong"},
    ]
    shown = marked("anna is now in paris .", spans)  # pyright: ignore[reportArgumentType]
    assert shown.plain == "[anna|PER missed] is now in[ pari|LOC wrong]s ."
    assert [shown.plain[span.start : span.end] for span in shown.spans] == ["[anna|PER missed]", "[ pari|LOC wrong]"]
    assert len({span.style for span in shown.spans}) == 2
    long = " ".join(["film"] * 200)
    shown = marked(f"{long} anna {long}", [{"start": 1000, "end": 1004, "label": "PER", "error": "extra"}])
    assert "film [anna|PER extra] film" in shown.plain
    assert shown.plain.count("[...]") == 2
    assert len(shown.plain) < 400
    assert shortened("a b c", 9) == "a b c"
    assert shortened(" " * 8 + "ab" * 4, 8) == " [...] abab"  # a half may have spaces only
    assert shortened("ab" * 4 + " " * 8, 8) == "abab [...] "
    assert marked("as it is", []).plain == "as it is"


def test_what_is_printed_of_wrong_answers(capsys: pytest.CaptureFixture[str]):
    print_errors("mood", [])
    assert capsys.readouterr().out == "\nmood: every prediction is right\n"
    print_errors("near", [{"row": 1234, "text": ["a  b", "c"], "true": 1.0, "predicted": 3.5, "error": 2.5}])
    out = capsys.readouterr().out
    assert all(part in out for part in ("near: largest errors", " 1234 ", " a b ", " c ", "1.0000", "3.5000", "2.5000"))
    print_errors("many", [{"row": 0, "text": "[b]", "true": ["x", "y"], "predicted": [], "confidence": 0.5}])
    out = capsys.readouterr().out
    assert all(part in out for part in (" [b] ", " x, y ", " - ", "0.5000"))


def test_numbers_have_no_table_per_class(capsys: pytest.CaptureFixture[str]):
    _show({"near": {"pearson": 0.5, "per_class": []}}, {"near": SimpleNamespace(name="stsb")})  # pyright: ignore
    out = capsys.readouterr().out
    assert "near: numbers and running text have no classes" in out
    assert "precision" not in out


@pytest.mark.long
def test_a_whole_model_is_scored_on_files_with_its_own_labels(lamina, model_folder: Path, moods: Path):
    columns = ("--text", "text", "--label", "mood")
    ran = lamina("evaluate", model_folder, "--task", f"films={moods}", *columns, "--json")
    assert (ran.code, ran.err) == (0, "")
    model, _ = load(model_folder, "sequence_classification")
    task = Task.from_files("sequence_classification", test=moods, text="text", label="mood", labels=("bad", "good"))
    assert json.loads(ran.out) == compared(model, {"films": task})
    assert "precision" in lamina("evaluate", model_folder, "--task", f"films={moods}", *columns, "--per-class").out


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (["who=sst2", "mood", "=cola"], "--task is 'mood'; give READER=TASK, such as ner=conll2003, once for each"),
        (["=cola"], "--task is '=cola'; give READER=TASK"),
        (["who=sst2", "mood=cola", "mood=sst2"], "--task names 'mood' twice; give READER=TASK"),
        (["mod=cola"], "unknown reader 'mod'; known: mood, who. Did you mean 'mood'?"),
        (["mood=colla"], "unknown file or preset 'colla'; known: cola, sst2"),
        (["mood=none.tsv"], "unknown file or preset 'none.tsv'"),
        (["mood=sst2", "--text=a"], "--text was given, but no task is an existing file: sst2; only files have columns"),
        (
            ["mood=sst2", "who=none.tsv", "--label=a"],
            "--label was given, but no task is an existing file: sst2, none",
        ),
    ],
)
def test_input_that_cannot_be_used(lamina, bank_folder: Path, tasks: list[str], message: str):
    ran = lamina("evaluate", bank_folder, *(task if task.startswith("--") else f"--task={task}" for task in tasks))
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: ")
    assert message in ran.err
    assert ran.err.count("\n") == 1


def test_a_folder_with_a_preset_s_name_is_the_preset(lamina, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wikiann" / "english").mkdir(parents=True)
    ran = lamina("evaluate", "bank", "--task", "who=wikiann/english")
    said = "names the language 'english'; a language is a short code, as in wikiann/de.\n"
    assert (ran.code, ran.out, ran.err) == (2, "", f"error: task: 'wikiann/english' {said}")


def test_a_label_of_a_reader_that_is_not_scored_is_an_error(lamina, bank_folder: Path, moods: Path):
    ran = lamina("evaluate", bank_folder, "--task", f"mood={moods}", "--label", "who=mood")
    assert (ran.code, ran.out, ran.err) == (2, "", "error: evaluate: unknown reader 'who'; known: mood.\n")


@pytest.mark.parametrize("option", ["--data", "--split"])
def test_options_of_presets_are_refused_for_files(lamina, bank_folder: Path, words: Path, option: str):
    ran = lamina("evaluate", bank_folder, "--task", f"who={words}", option, "test")
    assert (ran.code, ran.out) == (2, "")
    assert (
        ran.err
        == f"error: evaluate: {option} was given, but no task is a preset: {words}; all rows of a file are scored.\n"
    )


def test_a_missing_column_is_named(lamina, bank_folder: Path, moods: Path):
    ran = lamina("evaluate", bank_folder, "--task", f"mood={moods}", "--text", "text")
    assert (ran.code, ran.out) == (2, "")
    assert "no column 'label'; its columns are: text, mood" in ran.err


@pytest.mark.parametrize("name", ["²", "--5"])
def test_a_column_whose_name_is_nearly_a_number(lamina, bank_folder: Path, moods: Path, name: str):
    ran = lamina("evaluate", bank_folder, "--task", f"mood={moods}", f"--text={name}", "--label", "mood")
    assert (ran.code, ran.out) == (2, "")
    assert f"no column '{name}'; its columns are: text, mood" in ran.err


def test_a_label_that_the_reader_does_not_have_is_named(lamina, bank_folder: Path, moods: Path):
    moods.write_text(MOODS.replace("very good\tgood", "very good\tgreat"))
    ran = lamina("evaluate", bank_folder, "--task", f"mood={moods}", "--text", "text", "--label", "mood")
    assert ran.code == 2
    assert "great" in ran.err
    assert "row 5" in ran.err


def test_every_reader_is_scored_on_one_file(lamina, bank_folder: Path, tmp_path: Path):
    bank = load_bank(bank_folder)
    for name, columns in {"mood": {"text": "text", "label": "mood"}, "who": {"text": "words", "label": "tags"}}.items():
        bank[name].info["columns"] = columns
    for name in [name for name in bank if name not in ("mood", "who")]:
        bank.remove(name)
    save_bank(bank, tmp_path / "bank")
    rows = [
        {"text": text, "mood": mood, "words": ["anna", "is"], "tags": ["B-PER", "O"]}
        for text, mood in (("the film is good .", "good"), ("bad", "bad"), ("not good", None), ("very good", "good"))
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ran = lamina("evaluate", tmp_path / "bank", path, "--json")
    assert ran.code == 0
    scores = json.loads(ran.out)
    assert {name: score["rows"] for name, score in scores.items()} == {"mood": 3, "who": 4}
    assert scores["mood"]["always"] == "good"
    table = lamina("evaluate", tmp_path / "bank", path, "--positive", "mood=bad").out
    assert "95 % interval" in table
    assert "0.67 (good)" in table
    renamed = tmp_path / "renamed.jsonl"
    renamed.write_text(path.read_text().replace('"mood"', '"feeling"'))
    named = lamina("evaluate", tmp_path / "bank", renamed, "--label", "mood=feeling", "--json")
    assert json.loads(named.out) == scores
    for arguments, told in (
        ((renamed,), "has no column 'mood'; its columns are: text, feeling, words, tags. Name the columns of reader"),
        ((path, "--label", "moods=mood"), "unknown reader 'moods'"),
        ((path, "--label", "mood=mood", "--label", "tags"), "--label is 'tags'; give one value for all readers, or"),
        ((), "give either FILE, which every reader is scored on, or --task"),
        ((path, "--task", f"mood={path}"), "give either FILE"),
        ((path, "--split", "test"), "--split was given, but no task is a preset"),
    ):
        refused = lamina("evaluate", tmp_path / "bank", *arguments)
        assert (refused.code, told in refused.err.replace("\n", " ")) == (2, True), refused.err


@pytest.mark.long
def test_a_bank_is_scored_through_a_backend(lamina, bank_folder: Path, moods: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def scored(_bank: object, _tasks: object, *, backend: str, **_options: object) -> dict[str, dict[str, float]]:
        asked.append(backend)
        return {"mood": {"accuracy": 1.0}}

    monkeypatch.setattr("lamina.prediction.evaluate", scored)
    task = ("--task", f"mood={moods}", "--text", "text", "--label", "mood", "--json")
    for more in ((), ("--backend", "onnx")):
        assert lamina("evaluate", bank_folder, *task, *more).code == 0
    assert asked == ["torch", "onnx"]
    monkeypatch.undo()
    refused = lamina("evaluate", bank_folder, *task, "--backend", "int8")
    assert refused.code == 2
    assert "the bank has no int8 export in its folder" in refused.err
