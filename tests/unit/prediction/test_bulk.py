"""From files of any size into others: every row once, whatever ends the run."""

from __future__ import annotations

import csv
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from pyarrow import parquet
from tests.support.deaths import forked
from tests.support.finetuned import bert, drawn, image_processor, shades, t5, t5_tokenizer, vit
from tests.support.portions import one_in
from tests.support.training import names, reader, smoothed, tiny_bank, tiny_model, tiny_tokenizer, yes_no
from transformers import GPT2Config, GPT2ForSequenceClassification

from lamina import ReaderBank, predict, predict_file
from lamina.data.read import read_chunks
from lamina.errors import BaseMismatchError, ConfigError, DataError, StoreError
from lamina.prediction import bulk, file_columns
from lamina.store import save_bank
from lamina.train.options import PassOptions

TEXTS = [f"anna was in paris {'and oslo ' * (row % 5)}" for row in range(23)]


def bank() -> ReaderBank:
    return tiny_bank({"mood": reader(yes_no()), "who": reader(names())})


def write(path: Path, texts: list[Any], column: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": row, column: text}) + "\n" for row, text in enumerate(texts)))
    return path


def run(target: Any, source: Path, output: Path, **options: Any) -> bulk.FileResult:
    return predict_file(target, source, output, **{"chunk_rows": 5, "progress": False, **options})


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_every_row_has_the_answers_of_predict(tmp_path: Path):
    made, source = bank(), write(tmp_path / "in.jsonl", TEXTS)
    result = run(made, source, tmp_path / "out.jsonl")
    assert (result.rows, result.skipped) == (23, 0)
    found = rows(tmp_path / "out.jsonl")
    assert [(row["row"], row["text"]) for row in found] == list(enumerate(TEXTS, start=1))
    for row, expected in zip(found, predict(made, TEXTS), strict=True):
        assert row["readers"]["mood"]["score"] == pytest.approx(expected["mood"]["score"], abs=1e-5)
        assert len(row["readers"]["who"]) == len(expected["who"])
    assert left(tmp_path) == {"in.jsonl", "out.jsonl"}


def test_a_file_is_read_by_the_column_that_the_readers_learnt_from(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    made, source = bank(), tmp_path / "in.csv"
    source.write_text("id,text,ticket,note\n1,a title,anna was in paris,a note\n")
    made["mood"].info["columns"] = {"text": "ticket", "label": "mood"}
    run(made, source, tmp_path / "a.jsonl")
    assert [row["text"] for row in rows(tmp_path / "a.jsonl")] == ["anna was in paris"]
    made["who"].info["columns"] = {"text": "note", "label": "who"}
    refused = (
        r"the readers learnt from different columns of in\.csv, 'mood' from ticket, 'who' from note; one call reads "
        r"one column\. Name it with text \(--text\), or predict with one reader after the other: readers=\['mood'\]"
    )
    with pytest.raises(ConfigError, match=refused):
        run(made, source, tmp_path / "b.jsonl")
    run(made, source, tmp_path / "b.jsonl", text="text")
    assert [row["text"] for row in rows(tmp_path / "b.jsonl")] == ["a title"]
    assert not caplog.messages
    run(made, source, tmp_path / "c.jsonl", readers=["who"])
    assert [row["text"] for row in rows(tmp_path / "c.jsonl")] == ["a note"]
    source = source.with_suffix(".jsonl")  # a first row without the column does not make another one the only one
    source.write_text('{"mood": "good"}\n{"mood": "bad", "ticket": "bad"}\n')
    with pytest.raises(DataError, match=r"row 1 has no value in column 'ticket' \(it has mood\)"):
        run(made, source, tmp_path / "d.jsonl", readers=["mood"])


def test_the_columns_of_a_file_are_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made, source, looked = bank(), write(tmp_path / "in.jsonl", TEXTS), list[Path]()
    made["who"].info |= {"pair": True, "columns": {"text": "id", "text_pair": "note"}}  # its labels are of one text

    def read(path: Path, **options: Any) -> Any:
        looked.append(path)
        return read_chunks(path, **options)

    monkeypatch.setattr(file_columns, "read_chunks", read)
    for more, count in (
        ({}, 1),
        ({"readers": "mood"}, 1),
        ({"text": "text"}, 1),
        ({"text": "text", "readers": "mood"}, 0),
    ):
        looked.clear()
        run(made, source, tmp_path / "out.jsonl", **more)
        assert looked == [source] * count


def test_readers_of_pairs_read_the_second_text_that_they_learnt_from(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    made, source, output = bank(), tmp_path / "in.csv", tmp_path / "out.jsonl"
    source.write_text("id,text,other\n1,anna was in paris,she was in oslo\n")
    made["mood"].info |= {"pair": True, "columns": {"text": "text", "text_pair": "other", "label": "mood"}}
    run(made, source, output, readers="mood")
    assert rows(output)[0]["text"] == ["anna was in paris", "she was in oslo"]
    run(made, source, output, readers="mood", text="text")
    assert rows(output)[0]["text"] == ["anna was in paris", "she was in oslo"]
    for text, cell in (("other", "she was in oslo"), ("id", "1")):  # not the first column of the pairs
        caplog.clear()
        run(made, source, output, readers="mood", text=text)
        assert rows(output)[0]["text"] == cell
        assert "'mood' was trained on pairs of texts and now reads single texts" in caplog.text
    half = tmp_path / "half.csv"
    half.write_text("other,sentence\nshe was in oslo,anna was in paris\n")  # it lacks the first column
    refused = r"'mood' was trained on pairs of texts, and half.csv has the columns other, sentence\. Name two with"
    with pytest.raises(ConfigError, match=refused):
        run(made, half, output, readers="mood")
    with pytest.raises(ConfigError, match=r"'mood' was trained on pairs.*leave 'mood' out with readers"):
        run(made, source, output)  # it is not known what 'who' learnt from
    made["who"].info["columns"] = {"text": "text", "label": "who"}
    refused = (
        r"different columns, 'mood' from text and other, 'who' from text\. .* one reader after the other: readers="
    )
    with pytest.raises(ConfigError, match=refused):
        run(made, source, output)
    run(made, source, output, text="text")
    assert rows(output)[0]["text"] == "anna was in paris"
    run(made, source, output, text_pair="other")
    assert rows(output)[0]["text"] == ["anna was in paris", "she was in oslo"]
    with pytest.raises(ConfigError, match="text and text_pair are both 'text'"):
        run(made, source, output, text_pair="text")
    made["who"].info |= {"pair": True, "columns": {"text": "id", "text_pair": "note"}}  # its labels are of one text
    run(made, source, output, readers="who")
    assert rows(output)[0]["text"] == "anna was in paris"


def test_formats(tmp_path: Path):
    made, texts = bank(), TEXTS[:7]
    write(tmp_path / "in.jsonl", texts)
    (tmp_path / "in.csv").write_text("id,sentence\n" + "".join(f"{row},{text}\n" for row, text in enumerate(texts)))
    (tmp_path / "in.tsv").write_text("text\n" + "".join(f"{text}\n" for text in texts))
    (tmp_path / "in.txt").write_text("".join(f"{text}\n" for text in texts))
    run(made, tmp_path / "in.jsonl", tmp_path / "a.jsonl")
    expected = [(row["text"], row["readers"]) for row in rows(tmp_path / "a.jsonl")]
    for name in ("in.csv", "in.tsv", "in.txt"):
        run(made, tmp_path / name, tmp_path / "b.jsonl")
        assert [(row["text"], row["readers"]) for row in rows(tmp_path / "b.jsonl")] == expected
    run(made, tmp_path / "in.jsonl", tmp_path / "c.csv")
    run(made, tmp_path / "in.jsonl", tmp_path / "d.parquet")
    with (tmp_path / "c.csv").open(newline="") as file:
        cells = list(csv.DictReader(file))
    table = parquet.read_table(tmp_path / "d.parquet").to_pylist()
    for given, cell, row in zip(rows(tmp_path / "a.jsonl"), cells, table, strict=True):
        mood = given["readers"]["mood"]
        assert row["text"] == cell["text"] == given["text"]
        assert row["mood.label"] == cell["mood.label"] == mood["label"]
        assert row["mood.probabilities.yes"] == float(cell["mood.probabilities.yes"]) == mood["probabilities"]["yes"]
        assert json.loads(row["who"]) == json.loads(cell["who"]) == given["readers"]["who"]


def test_blank_lines_of_plain_text_are_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "in.txt").write_text("anna\n\nben\n")
    run(bank(), tmp_path / "in.txt", tmp_path / "out.jsonl", chunk_rows=2)
    assert caplog.messages == ["predict: 1 text is blank; the answers to them mean nothing"]
    assert [(row["row"], row["text"]) for row in rows(tmp_path / "out.jsonl")] == [(1, "anna"), (2, ""), (3, "ben")]


def test_pairs_and_named_columns(tmp_path: Path):
    made = tiny_bank({"mood": reader(yes_no())})
    (tmp_path / "in.tsv").write_text("a\tb\nthe film\tis good\n")
    run(made, tmp_path / "in.tsv", tmp_path / "out.jsonl", text="a", text_pair="b")
    assert rows(tmp_path / "out.jsonl")[0]["text"] == ["the film", "is good"]
    run(made, tmp_path / "in.tsv", tmp_path / "out.csv", text="a", text_pair="b")
    assert (tmp_path / "out.csv").read_text().startswith("row,text,text_pair,mood.label,")


def test_whole_models(tmp_path: Path):
    source = write(tmp_path / "in.jsonl", TEXTS[:3])
    run(bert(), source, tmp_path / "out.jsonl", processor=tiny_tokenizer())
    assert "label" in rows(tmp_path / "out.jsonl")[0]["readers"]["sequence_classification"]
    run(t5(), source, tmp_path / "out.jsonl", processor=t5_tokenizer(), max_target_length=3, kind="translation")
    assert list(rows(tmp_path / "out.jsonl")[0]["readers"]["translation"]) == ["text"]


def pictures(folder: Path) -> list[str]:
    paths = [folder / f"{label}.png" for label in range(3)]
    for label, path in enumerate(paths):
        path.write_bytes(drawn(label, label).data or b"")
    return list(map(str, paths))


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.full), 2])
def test_images_by_their_paths(workers: int, tmp_path: Path):
    paths = pictures(tmp_path)
    (tmp_path / "1.png").write_bytes(b"no picture")
    source = write(tmp_path / "in.jsonl", paths, "image")
    model, given = vit(), {"processor": image_processor(), "num_workers": workers, "batch_size": 1}
    assert len(shades().labels) == 3
    with pytest.raises(DataError, match=r"predict: .*in.jsonl row 2: images: .*1.png cannot be decoded"):
        run(model, source, tmp_path / "out.jsonl", **given)
    result = run(model, source, tmp_path / "out.jsonl", skip_bad=True, **given)
    assert (result.rows, result.skipped) == (2, 1)
    assert [row["row"] for row in rows(tmp_path / "out.jsonl")] == [1, 3]


# Rows that cannot be read

BAD = [*TEXTS[:7], 3, *TEXTS[7:12], None, *TEXTS[12:]]


def test_the_first_row_that_cannot_be_read_ends_the_run(tmp_path: Path):
    source, output = write(tmp_path / "in.jsonl", BAD), tmp_path / "out.jsonl"
    with pytest.raises(DataError, match=r"in.jsonl row 8 has int in column 'text'; a text is needed") as told:
        run(bank(), source, output)
    assert (told.value.row, told.value.column) == (8, "text")
    assert not output.exists()
    assert len(rows(tmp_path / ".out.jsonl.partial")) == 7
    result = run(bank(), source, output, skip_bad=True)  # goes on behind what is there
    assert (result.rows, result.skipped) == (23, 2)
    assert [row["text"] for row in rows(output)] == TEXTS


def test_rows_that_cannot_be_read_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    source = write(tmp_path / "in.jsonl", BAD)
    with source.open("a") as file:
        file.write('{"text": \n')
    result = run(bank(), source, tmp_path / "out.jsonl", skip_bad=True)
    assert (result.rows, result.skipped) == (23, 3)
    assert [row["text"] for row in rows(tmp_path / "out.jsonl")] == TEXTS
    assert "row 8 has int in column 'text'" in caplog.text
    assert "row 14 has no value in column 'text'" in caplog.text
    assert "3 rows of" in caplog.text


def test_many_bad_rows_are_not_all_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    source = write(tmp_path / "in.jsonl", ["anna", *range(50)])
    assert run(bank(), source, tmp_path / "out.jsonl", skip_bad=True).skipped == 50
    assert caplog.text.count("a text is needed") == 20
    assert "further rows that cannot be read are only counted" in caplog.text


# Runs that end early


class KilledError(BaseException):
    pass


@pytest.mark.parametrize(
    ("place", "when", "ending"), one_in(4, itertools.product(["answers", "lines", "note"], [1, 3], ["jsonl", "csv"]), 3)
)
def test_a_run_that_was_ended_goes_on(
    place: str, when: int, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source, output, whole = write(tmp_path / "in.jsonl", BAD), tmp_path / f"out.{ending}", tmp_path / f"whole.{ending}"
    run(bank(), source, whole, skip_bad=True)
    calls: list[int] = []

    def dying(plain: Any) -> Any:
        def call(*args: Any, **given: Any) -> Any:
            calls.append(1)
            if len(calls) == when:
                if place == "lines":
                    args[0].lines.open("ab").write(b'{"row": 1, "te')
                raise KilledError
            return plain(*args, **given)

        return call

    target: Any = {"answers": bulk.Predictor, "lines": bulk.Partial, "note": bulk}[place]
    name = {"answers": "predict", "lines": "add", "note": "write_text"}[place]
    with monkeypatch.context() as patch:
        patch.setattr(target, name, dying(getattr(target, name)))
        with pytest.raises(KilledError):
            run(bank(), source, output, skip_bad=True)
    assert not output.exists()
    result = run(bank(), source, output, skip_bad=True)
    assert (result.rows, result.skipped) == (23, 2)
    assert output.read_text() == whole.read_text()
    assert left(tmp_path) == {"in.jsonl", output.name, whole.name}


def killed_at(chunk: int, source: Path, output: Path) -> None:
    """A run that kills its own process."""
    calls, plain = iter(range(10**6)), bulk.Partial.add

    def dying(self: bulk.Partial, *args: Any, **given: Any) -> None:
        if next(calls) == chunk:
            os.kill(os.getpid(), signal.SIGKILL)
        plain(self, *args, **given)

    bulk.Partial.add = dying
    run(bank(), source, output)


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL there")
def test_a_process_that_is_killed_goes_on(tmp_path: Path):
    source, output = write(tmp_path / "in.jsonl", TEXTS), tmp_path / "out.jsonl"
    ended = forked(lambda: killed_at(3, source, output))
    assert ended.code == -signal.SIGKILL, ended.err
    assert len(rows(tmp_path / ".out.jsonl.partial")) == 15
    assert run(bank(), source, output).rows == 23
    assert [row["text"] for row in rows(output)] == TEXTS


def test_what_another_run_left_is_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source, output = write(tmp_path / "in.jsonl", TEXTS), tmp_path / "out.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(bulk.Partial, "finish", None)
        with pytest.raises(TypeError):
            run(bank(), source, output)
    with pytest.raises(ConfigError, match=r"to an earlier run whose readers was \['mood', 'who'\], and now it is"):
        run(bank(), source, output, readers=["mood"])
    with pytest.raises(ConfigError, match="to an earlier run of a bank or model with other weights"):
        run(tiny_bank({"mood": reader(yes_no(), seed=3), "who": reader(names())}), source, output)
    calibrated = bank()
    calibrated["who"].info["temperature"] = 2.0
    for other in (calibrated, tiny_bank({"mood": reader(yes_no()), "who": reader(names())}, smoothed())):
        with pytest.raises(ConfigError, match="to an earlier run of a bank or model with other settings"):
            run(other, source, output)
    with monkeypatch.context() as patch:
        patch.setattr(bulk.Predictor, "choose_engine", lambda self: None)
        with pytest.raises(ConfigError, match=r"to an earlier run whose int8 was None, and now it is True"):
            run(bank(), source, output, backend="int8")
        note = tmp_path / ".out.jsonl.partial.json"
        plain = note.read_text(encoding="utf-8")
        state = json.loads(plain)
        note.write_text(json.dumps({**state, "same": {**state["same"], "int8": True}}), encoding="utf-8")
        with pytest.raises(ConfigError, match=r"to an earlier run whose int8 was True, and now it is None"):
            run(bank(), source, output)
        note.write_text(plain, encoding="utf-8")
    write(source, TEXTS[::-1])  # another file of as many bytes
    with pytest.raises(ConfigError, match="to an earlier run whose source has changed since"):
        run(bank(), source, output)
    assert run(bank(), source, output, readers=["mood"], resume=False).rows == 23
    assert list(rows(output)[0]["readers"]) == ["mood"]


def test_a_bank_that_was_loaded_goes_on_with_what_it_began_in_memory(tmp_path: Path):
    """The stack of a reader is None in memory and named in a file; padding and kept monitors change no answer."""
    made = bank()
    before = bulk.Predictor(made, PassOptions.checked("predict")).settings_digest()
    predict(made, ["anna", "the film is good"])
    save_bank(made, tmp_path / "bank")
    loaded = ReaderBank.from_pretrained(tmp_path / "bank", tiny_model())
    loaded["mood"].info["monitors"] = {"flag": {}}
    assert bulk.Predictor(loaded, PassOptions.checked("predict")).settings_digest() == before


def test_a_classifier_without_padding_is_the_same_after_a_pass(tmp_path: Path):
    config = GPT2Config(vocab_size=len(tiny_tokenizer()), n_embd=16, n_layer=2, n_head=2, num_labels=2)
    model = GPT2ForSequenceClassification(config).eval()
    options = {"processor": tiny_tokenizer(), "kind": "sequence_classification"}
    before = bulk.Predictor(model, PassOptions.checked("predict"), **options).settings_digest()
    predict(model, ["anna", "the film is good"], **options)
    assert model.config.pad_token_id is not None
    assert bulk.Predictor(model, PassOptions.checked("predict"), **options).settings_digest() == before


def test_a_run_that_ended_at_its_first_row_leaves_nothing(tmp_path: Path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"chat": {"text": "anna"}}\n')
    with pytest.raises(DataError, match="row 1 has dict in column 'chat'"):
        run(bank(), source, output, text="chat")
    assert left(tmp_path) == {"in.jsonl"}
    assert run(bank(), source, output, text="chat.text").rows == 1


def test_an_output_inside_a_file(tmp_path: Path):
    source = write(tmp_path / "in.jsonl", TEXTS)
    with pytest.raises(StoreError, match=r"in.jsonl cannot be written \(Not a directory\)\.$"):
        run(bank(), source, source / "out.jsonl")


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_disk_that_fills(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source, output = write(tmp_path / "in.jsonl", TEXTS), tmp_path / f"out.{ending}"
    plain, calls = bulk.write_text, []

    def full(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        plain(*args)

    with monkeypatch.context() as patch:
        patch.setattr(bulk, "write_text", full)
        with pytest.raises(StoreError, match=r"cannot be written .No space left on device.; 10 rows are kept there"):
            run(bank(), source, output)
    assert not output.exists()
    assert run(bank(), source, output).rows == 23


def test_a_disk_that_fills_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source, output = write(tmp_path / "in.jsonl", TEXTS), tmp_path / "out.csv"
    output.write_text("what was there before")

    def full(_rows: Any, path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(bulk, "_to_csv", full)
        with pytest.raises(StoreError, match="23 rows are kept there"):
            run(bank(), source, output)
    assert output.read_text() == "what was there before"
    assert left(tmp_path) == {"in.jsonl", "out.csv", ".out.csv.partial", ".out.csv.partial.json"}
    run(bank(), source, output)
    assert len(output.read_text().splitlines()) == 24


@pytest.mark.parametrize(
    ("source", "output", "options", "message"),
    [
        ("in.jsonl", "out.txt", {}, r"ends in '.txt'; it must be .jsonl, .csv, .parquet"),
        ("in.jsonl", "folder.csv", {}, "folder.csv is a folder, pipe or device; give a file"),
        ("in.jsonl", "pipe.jsonl", {}, "pipe.jsonl is a folder, pipe or device"),
        ("none.jsonl", "out.csv", {}, r"none.jsonl is not there"),
        ("folder.csv", "out.csv", {}, "folder.csv is a folder; a file is needed.$"),
        ("in.jsonl", "out.csv", {"text": "texts"}, "no column 'texts'|no value in column 'texts'"),
        ("other.csv", "out.csv", {}, "has no column 'sentence' or 'text' or 'image' or 'audio'; its columns are: a, b"),
        ("in.jsonl", "out.csv", {"chunk_rows": 0}, "chunk_rows is 0"),
        ("in.jsonl", "out.csv", {"ray": "nowhere"}, "ray is 'nowhere'; it must be 'local', 'auto' or an address"),
    ],
)
def test_what_cannot_be_read_or_written(source: str, output: str, options: Any, message: str, tmp_path: Path):
    write(tmp_path / "in.jsonl", TEXTS)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "folder.csv").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises((ConfigError, DataError), match=message):
        run(bank(), tmp_path / source, tmp_path / output, **options)
    assert left(tmp_path) == {"in.jsonl", "other.csv", "folder.csv", "pipe.jsonl"}


def test_a_missing_column_is_named_as_the_readers_learnt_it(tmp_path: Path):
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="has no column 'comment' or 'text' or 'sentence' or"):
        file_columns.usual_column(tmp_path / "other.csv", ["a", "b"], ["comment", "text"])


def test_the_source_is_not_written_over(tmp_path: Path):
    source = write(tmp_path / "in.jsonl", TEXTS)
    before, link = source.read_bytes(), tmp_path / "link.jsonl"
    link.symlink_to(source)
    for output in (source, link):
        with pytest.raises(ConfigError, match=r"is the file that is read; it would be lost. Name another"):
            run(bank(), source, output)
    assert (source.read_bytes(), left(tmp_path)) == (before, {"in.jsonl", "link.jsonl"})


def test_progress_is_on_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run(bank(), write(tmp_path / "in.jsonl", TEXTS), tmp_path / "out.jsonl", progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "row" in err


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(DataError, match=r"none\.jsonl is not there"):
        predict_file(bank(), tmp_path / "none.jsonl", tmp_path / "out.jsonl", text="text")


def test_rows_at_the_end_that_cannot_be_read_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source, output = write(tmp_path / "in.jsonl", TEXTS), tmp_path / "out.csv"
    with source.open("a") as file:
        file.write("{no json\n")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bulk, "_to_csv", full)
    for _ in range(2):
        with pytest.raises(StoreError, match="No space left"):
            run(bank(), source, output, skip_bad=True)
    monkeypatch.undo()
    assert run(bank(), source, output, skip_bad=True).skipped == 1


def test_a_run_goes_on_with_the_same_tokenizer_alone(tmp_path: Path):
    made, source = bank(), write(tmp_path / "in.jsonl", [*TEXTS[:7], 5])
    with pytest.raises(DataError):
        run(made, source, tmp_path / "out.jsonl")
    other = tiny_tokenizer()
    other.backend_tokenizer.normalizer = None  # as many ids, but another text
    with pytest.raises(BaseMismatchError, match="another tokenizer: normalizer was"):
        run(made, source, tmp_path / "out.jsonl", processor=other)
    made.processor = other
    with pytest.raises(ConfigError, match="to an earlier run whose processor was"):
        run(made, source, tmp_path / "out.jsonl")


def test_a_run_goes_on_with_the_same_way_to_read_words_alone(tmp_path: Path):
    made, source = bank(), write(tmp_path / "in.jsonl", [*TEXTS[:7], 5])
    with pytest.raises(DataError):
        run(made, source, tmp_path / "out.jsonl")
    with pytest.raises(ConfigError, match="to an earlier run whose add_prefix_space was False, and now it is True"):
        run(made, source, tmp_path / "out.jsonl", add_prefix_space=True)


@pytest.mark.parametrize("name", ["row", "text", "text_pair"])
def test_a_reader_that_is_called_as_a_column_is_refused(tmp_path: Path, name: str):
    made, source = tiny_bank({name: reader(names())}), write(tmp_path / "in.jsonl", TEXTS)
    with pytest.raises(ConfigError, match=f"a reader has the name '{name}' of a column"):
        run(made, source, tmp_path / "out.csv")
    assert run(made, source, tmp_path / "out.jsonl").rows == 23


def test_paths_of_images_start_at_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "there" / "p").mkdir(parents=True)
    (tmp_path / "there" / "p" / "0.png").write_bytes(drawn(1, 0).data or b"")
    source = write(tmp_path / "there" / "in.jsonl", ["p/0.png"], "image")
    monkeypatch.chdir(tmp_path)
    assert run(vit(), source, tmp_path / "out.jsonl", processor=image_processor()).rows == 1
    assert rows(tmp_path / "out.jsonl")[0]["text"] == "p/0.png"


def test_workers_without_ray_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"predict: workers is 2, but ray was not given"):
        predict_file(bank(), tmp_path / "a.txt", tmp_path / "b.jsonl", workers=2)


def cells_of(paths: list[Path]) -> dict[str, list[Any]]:
    whole = [path.read_bytes() for path in paths]
    return {
        "bytes": whole,
        "as datasets write them": [{"bytes": data, "path": None} for data in whole],
        "paths of datasets": [{"bytes": None, "path": str(path)} for path in paths],
        "relative paths": [path.name for path in paths],
        "relative paths of datasets": [{"bytes": None, "path": path.name} for path in paths],
    }


@pytest.mark.parametrize(
    "form", ["bytes", "as datasets write them", "paths of datasets", "relative paths", "relative paths of datasets"]
)
def test_images_in_parquet(form: str, tmp_path: Path):
    paths = [Path(path) for path in pictures(tmp_path)]
    cells, source = cells_of(paths)[form], tmp_path / "in.parquet"
    parquet.write_table(pyarrow.table({"image": cells}), source)
    model, given = vit(), {"processor": image_processor()}
    run(model, source, tmp_path / "out.jsonl", **given)
    found = rows(tmp_path / "out.jsonl")
    assert [row["readers"] for row in found] == predict(model, paths, **given)
    named = {"paths of datasets": str(paths[0]), "relative paths": "0.png", "relative paths of datasets": "0.png"}
    assert found[0]["text"] == named.get(form)


def test_an_object_without_a_file_is_a_bad_row(tmp_path: Path):
    cells = [{"path": path, "foo": None} for path in pictures(tmp_path)[:1]]
    lines = [{"image": cell} for cell in (*cells, {"foo": 1}, {})]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    parquet.write_table(pyarrow.table({"image": [{"foo": 1}]}), tmp_path / "in.parquet")
    how = {"processor": image_processor(), "skip_bad": True}
    found = [run(vit(), tmp_path / f"in.{ending}", tmp_path / "out.jsonl", **how) for ending in ("jsonl", "parquet")]
    assert [(result.rows, result.skipped) for result in found] == [(1, 2), (0, 1)]


def test_a_text_is_no_file(tmp_path: Path):
    parquet.write_table(pyarrow.table({"text": [b"a text"]}), tmp_path / "in.parquet")
    with pytest.raises(DataError, match=r"row 1 has bytes in column 'text'; a text is needed"):
        run(bank(), tmp_path / "in.parquet", tmp_path / "out.jsonl")


def test_weights_that_no_reader_reads_may_start_at_random(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source, output = write(tmp_path / "in.jsonl", TEXTS), tmp_path / "out.jsonl"

    class KilledError(Exception):
        pass

    def stop(*_: object) -> None:
        raise KilledError

    def with_head(seed: int, moved: bool = False) -> ReaderBank:
        model = bert()
        torch.manual_seed(seed)
        torch.nn.init.normal_(model.classifier.weight)
        if moved:
            model.bert.encoder.layer[0].output.dense.bias.data += 1
        return tiny_bank({"mood": reader(yes_no())}, model)

    with monkeypatch.context() as patch:
        patch.setattr(bulk.Partial, "finish", stop)
        with pytest.raises(KilledError):
            run(with_head(0), source, output)
    with pytest.raises(ConfigError, match="to an earlier run of a bank or model with other weights"):
        run(with_head(1, moved=True), source, output)
    assert run(with_head(1), source, output).rows == 23


@pytest.mark.parametrize("texts", [[None] * 1000 + ["a.png"], [None], []])
def test_files_without_a_path_may_come_first_in_parquet(texts: list[str | None], tmp_path: Path):
    partial = bulk.Partial(tmp_path / "lines", tmp_path / "note", {})
    partial.add([{"row": row, "text": text, "readers": {}} for row, text in enumerate(texts)], read=len(texts))
    partial.finish(tmp_path / "out.parquet")
    assert [row["text"] for row in parquet.read_table(tmp_path / "out.parquet").to_pylist()] == texts


def to_parquet(values: list[Any], folder: Path) -> pyarrow.Table:
    partial = bulk.Partial(folder / "lines", folder / "note", {})
    partial.add([{"row": 0, "text": "a", "readers": {"mood": value}} for value in values], read=len(values))
    partial.finish(folder / "out.parquet")
    return parquet.read_table(folder / "out.parquet")


@pytest.mark.parametrize("values", [[0.5], ["yes"], [True], [1, 0.5], []])
def test_a_column_of_parquet_has_the_type_of_all_rows(values: list[Any], tmp_path: Path):
    values = [None] * 1000 + values[:1] * 1000 + values[1:]
    assert to_parquet(values, tmp_path)["mood"].to_pylist() == values


def test_a_column_of_texts_and_numbers_is_not_written_to_parquet(tmp_path: Path):
    with pytest.raises(StoreError, match=r"was not written .*mood has .*types.*; 1001 rows are kept there"):
        to_parquet([0.5] * 1000 + ["yes"], tmp_path)
    assert left(tmp_path) == {"lines", "note"}


def test_a_folder_of_images_is_listed_by_their_ending(tmp_path: Path):
    with pytest.raises(DataError, match=r"For its images: predict\(bank, sorted\(Path\('.*'\).rglob\('\*.png'\)\)\)"):
        run(vit(), tmp_path, tmp_path / "out.jsonl", processor=image_processor())
