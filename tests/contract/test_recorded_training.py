"""Readers trained on recorded states are those that the live model would have given."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.portions import set_apart
from tests.support.recorded import labelled, manifest, packed, per_request, states_of
from tests.support.training import (
    PEOPLE,
    largest_difference,
    tiny_bank,
    tiny_model,
    tiny_tokenizer,
    train,
    weights,
    yes_no,
)

from lamina.bank import Reader, ReaderBank
from lamina.data.recorded_states import RecordedStates
from lamina.errors import BaseMismatchError, ConfigError, DataError, UnknownNameError
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.concat import Concat
from lamina.fusion.extra_layers import ExtraLayers
from lamina.fusion.mean import Mean
from lamina.fusion.paired_layers import PairedLayers
from lamina.fusion.pooled_layers import PooledLayers
from lamina.fusion.scalar_mix import ScalarMix
from lamina.fusion.single_layer import SingleLayer
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.prediction import evaluate
from lamina.store import fingerprint
from lamina.tasks.task import Task

LAYERS = [1, 3]
WITHIN = 1e-5


def recorded(folder: Path, write: Callable[..., Path], live: Task, **facts: Any) -> tuple[Task, Path]:
    """A task of the states of a task's texts, in the form that `write` writes; and its train folder."""
    bank, parts = tiny_bank({}), {}
    for part, split in live.splits.items():
        rows = states_of(bank, list(split.texts), LAYERS)
        parts[part] = (write(folder / part, rows, LAYERS, **facts), labelled(split))
    return Task.from_states("sequence_classification", labels=live.labels, **parts), folder / "train"


@pytest.mark.parametrize("column", ["label", "sentence"])  # "sentence" names no text here
def test_a_positive_class_may_be_a_number_and_its_column_have_any_name(tmp_path: Path, column: str):
    folder = packed(tmp_path / "a", [torch.zeros(1, 2, 8)] * 4, LAYERS)
    labels = [{column: label} for label in (0, 1, 0, 1)]
    parts = {"train": (folder, labels), "validation": (folder, labels)}
    task = Task.from_states("sequence_classification", **parts, label=column, positive=1)
    assert task.positive == "1"


@pytest.mark.parametrize("write", set_apart([packed, per_request], per_request))
def test_a_reader_learns_from_recorded_states_what_it_learns_from_the_model(tmp_path: Path, write: Any):
    live = yes_no(train=20, validation=10)
    task, folder = recorded(tmp_path, write, live, fingerprint=fingerprint(tiny_model(), "main"))
    reader = Reader(SingleLayer(layer=3, dim=8), SequenceClassification(live.labels, attention_heads=2))
    with_model, without = tiny_bank({"x": reader}), ReaderBank.from_states(folder)
    without.add("x", reader)
    expected = train(with_model, {"x": live}, epochs=2)
    result = train(without, {"x": task}, epochs=2)
    assert largest_difference(learnt(with_model), learnt(without)) <= WITHIN
    assert result.best["x"]["accuracy"] == expected.best["x"]["accuracy"]

    without.save_pretrained(tmp_path / "bank")
    attached = ReaderBank.from_pretrained(tmp_path / "bank", tiny_model(), tiny_tokenizer())
    batch = dict(tiny_tokenizer()(["anna is good", "the film"], return_tensors="pt", padding=True))
    with torch.no_grad():
        torch.testing.assert_close(
            attached(**batch)["x"].logits, with_model.eval()(**batch)["x"].logits, atol=WITHIN, rtol=0
        )


def learnt(bank: ReaderBank) -> dict[str, torch.Tensor]:
    """The weights of a bank, without the keys' biases of the attention of heads.

    They add the same number to all scores of a softmax, so their gradient is zero. What they get is rounding, which the
    optimizer makes as large as any other step.
    """
    found = weights(bank)
    for name in [name for name in found if name.endswith("head.attention.bias")]:
        query, _, value = found.pop(name).chunk(3)
        found |= {f"{name} of queries": query, f"{name} of values": value}
    return found


def written(folder: Path, texts: list[str], labels: list[str]) -> Path:
    """The recorded states of texts, with their labels in the folder's own table."""
    facts = {"fingerprint": fingerprint(tiny_model(), "main"), "table": "rows.jsonl"}
    packed(folder, states_of(tiny_bank({}), texts, LAYERS), LAYERS, **facts)
    lines = [json.dumps({"label": label}) for label in labels]
    (folder / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def labelled_texts(count: int) -> tuple[list[str], list[str]]:
    split = yes_no(train=count, validation=1).split("train")
    return [str(text) for text in split.texts], [row["label"] for row in labelled(split)]


def texts_task(**parts: tuple[list[str], list[str]]) -> Task:
    rows = {
        part: [{"text": text, "label": label} for text, label in zip(*columns, strict=True)]
        for part, columns in parts.items()
    }
    return Task.from_dataset("sequence_classification", rows, text="text", label="label", labels=["no", "yes"])


@pytest.mark.parametrize("by_split", [False, True])
def test_states_given_to_fit_take_the_place_of_the_texts(
    tmp_path: Path, by_split: bool, capfd: pytest.CaptureFixture[str]
):
    columns = labelled_texts(20)
    parts = {"train": columns, "validation": labelled_texts(6)} if by_split else {"train": columns}
    live = texts_task(**parts)  # without a validation split, two rows are held out
    folders = {part: written(tmp_path / part, *cells) for part, cells in parts.items()}
    reader = Reader(SingleLayer(layer=3, dim=8), SequenceClassification(live.labels, attention_heads=2))
    with_model, without = tiny_bank({"x": reader}), ReaderBank.from_states(folders["train"])
    without.add("x", reader)
    expected = train(with_model, {"x": live})
    capfd.readouterr()
    result = train(without, {"x": live}, states={"x": folders} if by_split else folders["train"])
    assert not any(capfd.readouterr())  # no progress bar of another library
    assert largest_difference(learnt(with_model), learnt(without)) <= WITHIN
    assert result.best["x"]["accuracy"] == expected.best["x"]["accuracy"]


def test_states_that_do_not_fit_the_rows_of_fit_are_refused(tmp_path: Path):
    texts, labels = labelled_texts(8)
    folder = written(tmp_path / "states", texts, labels)
    held_out, two = texts_task(train=(texts, labels)), texts_task(train=(texts, labels), validation=(texts, labels))
    bank = ReaderBank.from_states(folder)
    bank.add("x", Reader(SingleLayer(layer=3, dim=8), SequenceClassification(held_out.labels, pooling="mean")))
    with pytest.raises(DataError, match=r"states of 'x': 'train' is from 7 rows, and .* the states of 8"):
        train(bank, {"x": texts_task(train=(texts[1:], labels[1:]))}, states=folder)
    with pytest.raises(DataError, match=r"has the label '(yes|no)', and the task another; they must be the same rows"):
        train(bank, {"x": texts_task(train=(texts[::-1], labels[1:] + labels[:1]))}, states=folder)
    for states in (folder, {"train": folder, "validation": folder / ".." / folder.name}):
        with pytest.raises(ConfigError, match="'validation' would get those of another split"):
            train(bank, {"x": two}, states=states)
    with pytest.raises(ConfigError, match="those of 'train' are missing"):
        train(bank, {"x": two}, states={"validation": folder})
    with pytest.raises(UnknownNameError, match="unknown split 'tests'; known: train, validation"):
        train(bank, {"x": two}, states={"tests": folder})
    with pytest.raises(ConfigError, match="does not classify whole texts, or has states already"):
        train(bank, {"x": Task.from_states("sequence_classification", train=folder)}, states=folder)
    with pytest.raises(BaseMismatchError, match="fingerprint was"):
        train(tiny_bank({"x": bank["x"].config}, model=tiny_model(seed=1)), {"x": held_out}, states=folder)
    states = np.load(folder / "states.npy")
    states[0, 1] = np.nan
    np.save(folder / "states.npy", states)
    with pytest.raises(DataError, match=r"row 0 \(from 0\) has a state of layer 3 that is NaN"):
        train(bank, {"x": held_out}, states=folder)


def test_the_length_and_the_texts_of_the_recording_hold(tmp_path: Path):
    texts, labels = labelled_texts(8)
    live, folder = texts_task(train=(texts, labels)), written(tmp_path / "states", texts, labels)
    bank = ReaderBank.from_states(folder)
    bank.add("x", Reader(SingleLayer(layer=3, dim=8), SequenceClassification(live.labels, pooling="mean")))

    def trained(*, space: bool = False, **facts: Any) -> tuple[Any, ...]:
        content = json.loads((folder / "states.json").read_text(encoding="utf-8"))
        (folder / "states.json").write_text(json.dumps({**content, **facts}), encoding="utf-8")
        train(bank, {"x": live}, states=folder, max_length=16, add_prefix_space=space)
        return tuple(bank["x"].info[fact] for fact in ("max_length", "pair", "add_prefix_space"))

    assert trained() == (16, False, False)  # another program recorded the states, and did not say how
    assert trained(space=True) == (16, False, True)
    assert trained(max_length=16, pairs=False) == (16, False, False)
    with pytest.raises(ConfigError, match=r"max_length is 16, and the states in .* were recorded with 32; they cannot"):
        trained(max_length=32)
    assert trained(max_length=16, add_prefix_space=True) == (16, False, True)
    with pytest.raises(ConfigError, match=r"add_prefix_space is True, and .* were recorded with False; they cannot"):
        trained(space=True, add_prefix_space=False)
    with pytest.raises(ConfigError, match=r"'train' has single texts, and .* the states of pairs\. Record the texts"):
        trained(max_length=16, pairs=True)
    train(bank, {"x": Task.from_states("sequence_classification", train=folder)}, states=None)
    assert bank["x"].info["pair"] is True


@pytest.mark.parametrize(("fact", "values"), [("max_length", (32, 4)), ("pairs", (True, False))])
def test_all_parts_were_read_in_one_way(tmp_path: Path, fact: str, values: tuple[Any, Any]):
    bank, texts = tiny_bank({}), ["anna is good", "we and ben", "the film"]
    labels = [{"label": label} for label in ("no", "yes", "no")]
    parts: dict[str, Any] = {}
    for part, value in zip(("train", "validation", "test"), (values[0], None, values[1]), strict=True):
        parts[part] = (packed(tmp_path / part, states_of(bank, texts, LAYERS), LAYERS, **{fact: value}), labels)
    told = f"{fact} is {values[0]} in the states of train, and {values[1]} in those of test; a reader reads all texts"
    with pytest.raises(ConfigError, match=f"^task: {told}"):
        Task.from_states("sequence_classification", **parts)
    assert [*Task.from_states("sequence_classification", **{**parts, "test": None}).splits] == ["train", "validation"]
    if fact == "max_length":
        live = texts_task(**dict.fromkeys(parts, (texts, [row["label"] for row in labels])))
        bank.add("x", Reader(SingleLayer(layer=3, dim=8), SequenceClassification(live.labels, pooling="mean")))
        with pytest.raises(ConfigError, match=f"^fit: states of 'x': {told}"):
            train(bank, {"x": live}, states={part: folder for part, (folder, _) in parts.items()})


def test_readers_of_one_task_open_its_states_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    texts, labels = labelled_texts(8)
    live, folder = texts_task(train=(texts, labels)), written(tmp_path / "states", texts, labels)
    bank, opened = ReaderBank.from_states(folder), list[Any]()
    open_states = RecordedStates.open
    monkeypatch.setattr(RecordedStates, "open", lambda path: opened.append(path) or open_states(path))
    for name in "ab":
        bank.add(name, Reader(SingleLayer(layer=3, dim=8), SequenceClassification(live.labels, pooling="mean")))
    train(bank, dict.fromkeys("ab", live), states=folder)
    assert opened == [folder]


FUSIONS: dict[str, Any] = {
    "AdaLayers": AdaLayers(dim=8, layers=LAYERS),
    "ScalarMix": ScalarMix(layers=LAYERS),
    "PooledLayers": PooledLayers(dim=8, heads=2, layers=LAYERS),
    "Concat": Concat(dim=8, layers=LAYERS),
}


@pytest.mark.parametrize("name", set_apart(FUSIONS, "ScalarMix", "Concat"))
def test_readers_of_several_layers_learn_the_same(tmp_path: Path, name: str):
    live = yes_no(train=12, validation=8)
    task, folder = recorded(tmp_path, packed, live)
    pooling: Any = "first" if name == "PooledLayers" else "mean"
    reader = Reader(FUSIONS[name], SequenceClassification(live.labels, pooling=pooling))
    with_model, without = tiny_bank({"x": reader}), ReaderBank.from_states(folder)
    without.add("x", reader)
    train(with_model, {"x": live})
    train(without, {"x": task})
    assert largest_difference(learnt(with_model), learnt(without)) <= WITHIN


def pooled_task(folder: Path, live: Task, pooling: str) -> tuple[Task, Path]:
    """A task of one state per row, with the lengths of the rows, which decide their order in training."""
    pools: Any = {"mean": lambda row: row.mean(0), "first": lambda row: row[0], "last": lambda row: row[-1]}
    parts = {}
    for part, split in live.splits.items():
        rows = states_of(tiny_bank({}), list(split.texts), LAYERS)
        (folder / part).mkdir(parents=True)
        np.save(folder / part / "lengths.npy", [len(row) for row in rows])
        array = torch.stack([pools[pooling](row) for row in rows]).numpy()
        np.save(folder / part / "x.npy", array)
        facts = {"file": "x.npy", "axes": ["rows", "layers", "width"], "shape": list(array.shape), "rows": len(rows)}
        manifest(folder / part, rows, LAYERS, arrays=[facts], pooling=pooling, lengths="lengths.npy")
        parts[part] = (folder / part, labelled(split))
    return Task.from_states("sequence_classification", labels=live.labels, **parts), folder / "train"


@pytest.mark.parametrize(
    ("pooling", "fusion"),
    [
        pytest.param("mean", ScalarMix(layers=LAYERS), marks=pytest.mark.full),
        ("first", SingleLayer(3, dim=8, dropout=0)),
        pytest.param("last", AdaLayers(dim=8, layers=LAYERS, dropout=0), marks=pytest.mark.full),
    ],
)
def test_pooled_states_train_readers_that_pool_in_the_same_way(tmp_path: Path, pooling: Any, fusion: Any):
    live = yes_no(train=12, validation=8)
    task, folder = pooled_task(tmp_path, live, pooling)
    reader = Reader(fusion, SequenceClassification(live.labels, pooling=pooling, dropout=0))
    with_model, without = tiny_bank({"x": reader}), ReaderBank.from_states(folder)
    without.add("x", reader)
    train(with_model, {"x": live})
    train(without, {"x": task})
    assert largest_difference(learnt(with_model), learnt(without)) <= WITHIN


class Inside(Mean):
    site = "ffn"


@pytest.mark.parametrize(
    ("pooling", "fusion", "head", "error"),
    [
        ("mean", SingleLayer(3, dim=8), "mean", "has a fusion that is not linear"),
        ("mean", ScalarMix(layers=LAYERS), "first", "pools in another way. Give its head pooling='mean'"),
        ("first", PooledLayers(dim=8, heads=2, layers=LAYERS), "first", "needs the states of all tokens"),
        (None, ScalarMix(), "mean", "reads layer 0, whose states were not recorded; there are .1, 3."),
        (None, ExtraLayers(1), "mean", "ExtraLayers reads inside the blocks of the model, and only states"),
        (None, Inside(LAYERS), "mean", "Inside reads inside the blocks of the model, and only states"),
        (None, PairedLayers(dim=8, heads=2, layers=LAYERS), "first", "needs the token ids, to tell two texts apart"),
    ],
)
def test_readers_that_states_cannot_train_are_refused(tmp_path: Path, pooling: Any, fusion: Any, head: Any, error: str):
    live = yes_no(train=4, validation=2)
    _, folder = pooled_task(tmp_path, live, pooling) if pooling else recorded(tmp_path, packed, live)
    with pytest.raises(ConfigError, match=error):
        ReaderBank.from_states(folder).add("x", Reader(fusion, SequenceClassification(live.labels, pooling=head)))


@pytest.mark.long
def test_tokens_are_labelled(tmp_path: Path):
    bank = tiny_bank({})
    texts = ["anna is good", "we and ben", "the film of oslo"]
    rows = states_of(bank, texts, LAYERS)
    tags = [{"label": [-100, *("B-PER" if word in PEOPLE else "O" for word in text.split()), -100]} for text in texts]
    folder = packed(tmp_path / "states", rows, LAYERS)
    source = (folder, tags)
    task = Task.from_states("token_classification", train=source, validation=source, labels=["O", "B-PER"])
    without = ReaderBank.from_states(folder)
    without.add("x", Reader(SingleLayer(3, dim=8), TokenClassification(("O", "B-PER"), encoder_layers=0)))
    result = train(without, {"x": task}, epochs=30)
    assert result.best["x"]["span_f1"] > 0
    assert evaluate(without, {"x": task})["x"]["span_f1"] == result.best["x"]["span_f1"]


def test_a_bank_attaches_to_its_model_and_to_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    live = yes_no(train=8, validation=4)
    task, folder = recorded(tmp_path, packed, live, fingerprint=fingerprint(tiny_model(), "main"))
    without = ReaderBank.from_states(folder)
    without.add("x", Reader(SingleLayer(3, dim=8), SequenceClassification(live.labels, pooling="mean")))
    train(without, {"x": task}, output=str(tmp_path / "bank"))
    again = ReaderBank.from_pretrained(tmp_path / "bank")
    assert evaluate(again, {"x": task}) == evaluate(without, {"x": task})
    with pytest.raises(ConfigError, match="it was made from recorded states and has no model"):
        again(**dict(tiny_tokenizer()(["anna"], return_tensors="pt")))
    with pytest.raises(BaseMismatchError, match="fingerprint was"):
        again.attach(tiny_model(seed=1))
    with pytest.raises(BaseMismatchError, match="fingerprint was"):
        ReaderBank.from_pretrained(tmp_path / "bank", tiny_model(seed=1))
    attached = again.attach(tiny_model(), tiny_tokenizer())
    assert not caplog.records
    attached.save_pretrained(tmp_path / "whole")
    whole = ReaderBank.from_pretrained(tmp_path / "whole", tiny_model(), tiny_tokenizer())
    assert evaluate(whole, {"x": live}) == evaluate(attached, {"x": live})
    with pytest.raises(ConfigError, match="it reads a BertModel already"):
        attached.attach(tiny_model())
    unknown = ReaderBank.from_states(packed(tmp_path / "unknown", states_of(tiny_bank({}), ["we"], LAYERS), LAYERS))
    unknown.attach(tiny_model(seed=1))
    assert "only its depth and width could be compared" in caplog.text
    deeper = packed(tmp_path / "deep", states_of(tiny_bank({}), ["we"], LAYERS), LAYERS, depth=4)
    with pytest.raises(BaseMismatchError, match="depth was 4, here 3"):
        ReaderBank.from_states(deeper).attach(tiny_model())


def test_a_table_of_other_rows_is_refused(tmp_path: Path):
    folder = packed(tmp_path / "a", states_of(tiny_bank({}), ["we", "anna is"], LAYERS), LAYERS)
    with pytest.raises(DataError, match=r"has 1 rows, and .* the states of 2"):
        Task.from_states("sequence_classification", train=(folder, [{"label": "a"}]))
    with pytest.raises(DataError, match="names no table with labels"):
        Task.from_states("sequence_classification", train=folder)
    with pytest.raises(ConfigError, match="a task of kind masked_lm needs the inputs of the model"):
        Task.from_states("masked_lm", train=folder)
