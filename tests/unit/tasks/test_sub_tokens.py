# pyright: reportAttributeAccessIssue=false

"""Which sub-tokens of a word are learnt from, the space before a first word, and pairs joined into one text."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import f1_score
from tests.support.encoded import features
from tests.support.training import length_of_text, names, tiny_bank, yes_no
from transformers import RobertaConfig, RobertaForTokenClassification, RobertaModel

from lamina import Reader, ReaderBank, TokenClassification, evaluate, finetune, fit, predict, predict_file
from lamina.data.encode import blocks, encode
from lamina.data.windows import IGNORED
from lamina.errors import ConfigError
from lamina.fusion.ada_layers import AdaLayers
from lamina.tasks import kind_of
from lamina.tasks.base import EncodeOptions
from lamina.tasks.split import Split
from lamina.tasks.tag_schemes import continued
from lamina.tasks.task import Task
from lamina.train.groups import group_tasks

TOKEN = "token_classification"
ROWS = [
    {"tokens": ["EU", "rejects", "Johannesburg", "lamb", "."], "tags": ["B-ORG", "O", "B-LOC", "I-LOC", "O"]},
    {"tokens": ["Johannesburg"], "tags": ["B-LOC"]},
]


def entities(**options: Any) -> Task:
    return Task.from_dataset(
        TOKEN, {"train": ROWS, "validation": ROWS}, text="tokens", label="tags", name="entities", **options
    )


@pytest.fixture(scope="module")
def byte_pairs() -> Any:
    """Like RoBERTa: byte pairs with a space inside the token, and tokens around a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator(["the EU rejects the EU lamb of the EU and rejects the lamb"] * 9, trainer)
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    named = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token", "mask_token"), special, strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, cls_token="<s>", sep_token="</s>", model_max_length=40, **named
    )


def roberta(build: Any = RobertaModel, **more: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
        config = RobertaConfig(
            vocab_size=330, max_position_embeddings=48, pad_token_id=1, initializer_range=0.3, **sizes, **more
        )
        return build(config).eval()


# Sub-tokens


def labelled(task: Task, tokenizer: Any, max_length: int = 40) -> list[tuple[str, str]]:
    """Every token that has a label, and that label, window by window."""
    split, kind = task.split("train"), kind_of(TOKEN)
    options = EncodeOptions(part="train", max_length=max_length)
    inputs = kind.encode(split, tokenizer, options)
    targets: Any = kind.targets(task, split, inputs)
    labels = targets.tensor(range(len(inputs.lengths)))
    ids = [row["input_ids"] for row in features(inputs.encoded)]
    return [
        (tokenizer.convert_ids_to_tokens(token).removeprefix("Ġ").removeprefix("##"), task.labels[label])
        for row, tokens in enumerate(ids)
        for token, label in zip(tokens, labels[row].tolist(), strict=False)
        if label != IGNORED
    ]


def test_the_first_sub_token_or_all_of_them_are_learnt_from(minilm: Any):
    pieces = minilm.tokenize("Johannesburg")
    assert len(pieces) == 1
    long = [{"tokens": ["EU", "Johannesburgers", "lamb"], "tags": ["B-ORG", "B-LOC", "I-LOC"]}]
    given: dict[str, Any] = {"text": "tokens", "label": "tags"}
    for every in (False, True):
        task = Task.from_dataset(TOKEN, {"train": long, "validation": long}, label_all_tokens=every, **given)
        assert task.label_all_tokens is every
        found = labelled(task, minilm)
        inner = [piece.removeprefix("##") for piece in minilm.tokenize("Johannesburgers")[1:]]
        assert len(inner) >= 1
        rest = [(piece, "I-LOC") for piece in inner] if every else []
        assert found == [("eu", "B-ORG"), ("johannesburg", "B-LOC"), *rest, ("lamb", "I-LOC")]


@pytest.mark.parametrize("max_length", [6, 9, 40])
def test_every_sub_token_has_one_label_in_whatever_windows(byte_pairs: Any, max_length: int):
    whole = labelled(entities(label_all_tokens=True), byte_pairs)
    assert "".join(token for token, _ in whole) == "".join(word for row in ROWS for word in row["tokens"])
    assert Counter(labelled(entities(label_all_tokens=True), byte_pairs, max_length)) == Counter(whole)
    firsts = labelled(entities(), byte_pairs, max_length)
    assert Counter(label for _, label in firsts) == Counter(tag for row in ROWS for tag in row["tags"])
    assert not Counter(firsts) - Counter(whole)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (("O", "B-X", "I-X", "B-Y", "I-Y"), [0, 2, 2, 4, 4]),
        (("DT", "NN"), [0, 1]),
        (("B-X", "O"), [0, 1]),  # no I-X to continue with
        (("O", "B-X", "I-X", "E-X", "S-X"), [0, 2, 2, 3, 4]),
    ],
)
def test_what_a_tag_is_continued_as(labels: tuple[str, ...], expected: list[int]):
    assert continued(labels) == expected


def test_words_are_scored_by_their_first_sub_token_either_way(byte_pairs: Any):
    kind = kind_of(TOKEN)
    scores = []
    for every in (False, True):
        task = entities(label_all_tokens=every)
        split = task.split("validation")
        inputs = kind.encode(split, byte_pairs, EncodeOptions(part="validation", max_length=12))
        results = kind.results(task, split, inputs)
        for row, length in enumerate(inputs.lengths):
            logits = torch.randn(1, int(length), len(task.labels), generator=torch.Generator().manual_seed(row))
            results.add([row], logits)
        scores.append(results.scores(task.metrics))
        assert sum(row["count"] for row in results.per_class()[:-3]) == 3  # spans, not sub-tokens
    assert scores[0] == scores[1]


@pytest.mark.parametrize("max_length", [6, 40])
def test_a_metric_that_a_user_names_counts_sub_tokens(byte_pairs: Any, max_length: int):
    kind, task = kind_of(TOKEN), entities(metric="subtoken_f1", label_all_tokens=True)
    assert (task.metrics[0], "subtoken_f1" in entities().metrics) == ("subtoken_f1", False)
    split = task.split("validation")
    inputs = kind.encode(split, byte_pairs, EncodeOptions(part="validation", max_length=max_length))
    results: Any = kind.results(task, split, inputs)
    rows = range(len(inputs.lengths))
    logits = torch.randn(
        len(rows), int(max(inputs.lengths)), len(task.labels), generator=torch.Generator().manual_seed(0)
    )
    results.add([*rows], logits)
    targets: Any = kind.targets(task, split, inputs)
    true = targets.tensor([*rows])
    known = true != IGNORED
    guesses = logits[:, : true.shape[1]].argmax(-1)[known]
    found = results.scores(task.metrics)
    assert found["subtoken_f1"] == pytest.approx(f1_score(true[known], guesses, average="macro"))
    always, constant = results.baseline(task.metrics)
    expected = f1_score(true[known], torch.full_like(guesses, task.labels.index(always)), average="macro")
    assert constant["subtoken_f1"] == pytest.approx(expected)
    first = kind.results(entities(), split, inputs)
    first.add([*rows], logits)
    assert found.items() > first.scores(entities().metrics).items()


def test_a_loss_is_over_all_sub_tokens(byte_pairs: Any):
    bank = ReaderBank(roberta(), byte_pairs)
    bank.add("who", Reader(AdaLayers(dim=8), TokenClassification(entities().labels, encoder_layers=0, dropout=0.0)))
    how = EncodeOptions(part="train", max_length=40)
    losses = []
    for every in (False, True):
        (group,) = group_tasks({"who": entities(label_all_tokens=every)}, how, byte_pairs)
        labels = group.labels([0, 1], None, ["who"])
        out = bank(**group.inputs.batch([0, 1]), labels=labels)
        given = labels["who"] != IGNORED
        letters = [row["input_ids"] for row in features(group.inputs.encoded)]
        bare = byte_pairs.convert_tokens_to_ids("Ġ")  # a space alone belongs to no word
        own = sum(token > 4 and token != bare for row in letters for token in row)
        assert int(given.sum()) == (own if every else 6)
        log = out["who"].logits.detach()[given].log_softmax(-1)
        expected = -log[torch.arange(len(log)), labels["who"][given]].mean()
        assert float(out["who"].loss.detach()) == pytest.approx(float(expected), abs=1e-6)
        losses.append(float(expected))
    assert losses[0] != losses[1]


def test_tasks_that_differ_in_it_share_a_pass_and_keep_their_labels(byte_pairs: Any):
    how = EncodeOptions(part="train", max_length=40)
    first, every = entities(), entities(label_all_tokens=True)
    every = Task(**{**vars(every), "splits": first.splits})
    (group,) = group_tasks({"first": first, "all": every}, how, byte_pairs)
    labels = group.labels([0, 1], None, ["first", "all"])
    assert int((labels["first"] != IGNORED).sum()) == 6
    assert int((labels["all"] != IGNORED).sum()) > 6


def test_it_is_read_from_files_and_presets(tmp_path: Path):
    path = tmp_path / "eng.train"
    path.write_text("EU NNP I-NP B-ORG\nrejects VBZ I-VP O\n\nlamb NN I-NP O\n" * 5, encoding="utf-8")
    for every in (False, True):
        assert Task.from_files(TOKEN, train=path, label_all_tokens=every).label_all_tokens is every
        assert Task.preset("conll2003", files={"train": path}, label_all_tokens=every).label_all_tokens is every
    task = Task.preset("conll2003", files={"train": path}, label_all_tokens=True)
    assert task.subsample(rows=2).label_all_tokens
    assert task.held_out().label_all_tokens


def test_tasks_without_tags_have_no_sub_tokens_to_label():
    rows = {"train": [{"sentence": "a", "label": "yes"}, {"sentence": "b", "label": "no"}]}
    with pytest.raises(ConfigError, match="label_all_tokens is set for a task of kind sequence_classification; it is"):
        Task.from_dataset("sequence_classification", rows, label_all_tokens=True)


def test_a_run_over_first_sub_tokens_does_not_go_on_over_all(byte_pairs: Any, tmp_path: Path):
    model, options = roberta(RobertaForTokenClassification, num_labels=5), {"epochs": 1, "progress": False}
    finetune(model, entities(), processor=byte_pairs, output=tmp_path, **options)
    model = roberta(RobertaForTokenClassification, num_labels=5)
    with pytest.raises(ConfigError, match="label_all_tokens False in 'entities', here True"):
        finetune(model, entities(label_all_tokens=True), processor=byte_pairs, output=tmp_path, resume=True, **options)


# The space before a first word


def test_a_first_word_is_read_as_any_other(byte_pairs: Any):
    text = "EU rejects EU"
    plain, spaced = (encode([text], byte_pairs, max_length=40, add_prefix_space=space) for space in (False, True))
    before, after = (features(encoded)[0]["input_ids"][1:-1] for encoded in (plain, spaced))
    assert before[0] != before[-1]
    assert after[0] == after[-1] == before[-1]
    assert after[1:] == before[1 - len(after) :]
    assert [text[start:end] for start, end in spaced.offsets[0][1:-1]] == ["EU", " rejects", " EU"] or [
        text[start:end].strip() for start, end in spaced.offsets[0][1:-1]
    ] == ["EU", "rejects", "EU"]
    words = [byte_pairs.convert_tokens_to_ids(f"Ġ{word}") for word in text.split()]
    assert after == words  # what words that are given one by one become


def test_texts_with_a_space_and_empty_ones_stay(byte_pairs: Any):
    texts = [" EU", "", "EU", "\tEU"]
    encoded = encode(texts, byte_pairs, max_length=40, add_prefix_space=True)
    ids = [row["input_ids"] for row in features(encoded)]
    assert ids[0] == ids[2]
    assert ids[1] == [0, 2]
    assert ids[3] == byte_pairs("\tEU")["input_ids"]
    assert encoded.offsets[2][1] == (0, 2)


def test_both_texts_of_a_pair_begin_with_one(byte_pairs: Any):
    encoded = encode([("EU", "lamb")], byte_pairs, max_length=40, add_prefix_space=True)
    assert features(encoded)[0]["input_ids"] == byte_pairs(" EU", " lamb")["input_ids"]


@pytest.mark.parametrize("max_length", [6, 40])
def test_labels_and_windows_are_where_they_were(byte_pairs: Any, max_length: int):
    task, kind = entities(), kind_of(TOKEN)
    split = task.split("train")
    for space in (False, True):
        options = EncodeOptions(part="train", max_length=max_length, add_prefix_space=space)
        inputs = kind.encode(split, byte_pairs, options)
        results, targets = kind.results(task, split, inputs), kind.targets(task, split, inputs)
        for row in range(len(inputs.lengths)):
            labels: Any = targets and targets.tensor([row])
            results.add([row], torch.nn.functional.one_hot(labels.clamp(min=0), len(task.labels)) * 3.0)
        assert results.scores(("span_f1",)) == {"span_f1": 1.0}
        assert [span["text"] for span in results.predictions()[0]] == ["EU", "Johannesburg lamb"]


@pytest.mark.parametrize("name", ["minilm", "metaspace"])
def test_tokenizers_that_need_none_read_what_they_read(name: str, request: pytest.FixtureRequest):
    tokenizer, texts = request.getfixturevalue(name), ["the cat sat", "moon"]
    plain, spaced = (encode(texts, tokenizer, max_length=40, add_prefix_space=space) for space in (False, True))
    assert features(plain) == features(spaced)
    assert plain.offsets == spaced.offsets


def test_running_text_may_begin_with_one_too(byte_pairs: Any):
    joined = blocks(["EU", "lamb"], byte_pairs, max_length=40, add_prefix_space=True)
    assert features(joined)[0]["input_ids"] == byte_pairs(" EU")["input_ids"] + byte_pairs(" lamb")["input_ids"]


def test_readers_answer_as_they_were_trained(byte_pairs: Any, tmp_path: Path):
    """With the space or without it, each in a pass of its own, alone or beside the other."""
    bank, task = ReaderBank(roberta(), byte_pairs), entities()
    for name in ("plain", "spaced"):
        bank.add(name, Reader(AdaLayers(dim=8), TokenClassification(task.labels, encoder_layers=0)))
        fit(bank, {name: task}, epochs=1, add_prefix_space=name == "spaced", progress=False)
    assert (bank["plain"].info["add_prefix_space"], bank["spaced"].info["add_prefix_space"]) == (False, True)
    read: list[list[int]] = []
    bank.model.register_forward_pre_hook(
        lambda _, args, batch: read.append(batch["input_ids"][0].tolist()), with_kwargs=True
    )
    both = predict(bank, ["EU rejects"])[0]
    unspaced, spaced = byte_pairs("EU rejects")["input_ids"], byte_pairs(" EU rejects")["input_ids"]
    assert read == [unspaced, spaced]
    for name, ids in (("plain", unspaced), ("spaced", spaced)):
        read.clear()
        assert predict(bank, ["EU rejects"], readers=[name])[0][name] == both[name]
        assert read == [ids]
    together = evaluate(bank, {"plain": task, "spaced": task})
    assert together == {name: evaluate(bank, {name: task})[name] for name in ("plain", "spaced")}
    source = tmp_path / "texts.txt"
    source.write_text("EU rejects\n", encoding="utf-8")
    read.clear()
    predict_file(bank, source, tmp_path / "out.jsonl", progress=False)
    assert read == [unspaced, spaced]


def test_a_whole_model_is_told(byte_pairs: Any, tmp_path: Path):
    model, task = roberta(RobertaForTokenClassification, num_labels=5), entities()
    read: list[list[int]] = []
    model.register_forward_pre_hook(
        lambda _, args, batch: read.append(batch["input_ids"][-1].tolist()), with_kwargs=True
    )
    source = tmp_path / "texts.txt"
    source.write_text("lamb\n", encoding="utf-8")
    options: dict[str, Any] = {"processor": byte_pairs, "add_prefix_space": True}
    finetune(model, task, epochs=1, progress=False, **options)
    predict(model, ["lamb"], **options)
    evaluate(model, task, **options)
    predict_file(model, source, tmp_path / "out.jsonl", progress=False, **options)
    start = byte_pairs(" Johannesburg")["input_ids"][1]
    lamb = byte_pairs(" lamb")["input_ids"]
    assert lamb in read
    assert {ids[1] for ids in read} <= {start, byte_pairs(" EU")["input_ids"][1], lamb[1]}


# Pairs as one text


def test_pairs_are_joined_into_one_text():
    pairs = Split.of([("one", "two"), ("three\n", "four")], [0, 1])
    task = Task(**{**vars(yes_no(train=4)), "splits": {"train": pairs, "validation": pairs}})
    joined = task.join_pairs("\n")
    assert joined.split("train").texts == ("one\ntwo", "three\n\nfour")
    assert joined.split("validation").labels == (0, 1)
    assert not joined.split("train").pairs
    assert (joined.kind, joined.metric, joined.name) == (task.kind, task.metric, task.name)
    assert joined.masked_lm(rows=True).split("train").texts == ("one\ntwo", "three\n\nfour")


def test_joined_pairs_know_their_rows_and_all_label_columns_of_the_source():
    rows = [{"one": f"w{n}", "two": "and", "label": n % 2, "tone": "up" if n % 9 else "down"} for n in range(40)]
    task = Task.from_dataset("sequence_classification", {"train": rows}, text="one", text_pair="two")
    for name, joined in task.join_pairs(" ").splits.items():
        count, rows = joined.origin
        assert count == 40
        assert [f"w{row} and" for row in rows] == list(joined.texts)
        assert list(joined.strata or ()) == list(task.split(name).strata or ()) != []


@pytest.mark.parametrize("task", [yes_no(train=4), names(train=4), length_of_text(train=4)], ids=lambda task: task.kind)
def test_single_texts_have_nothing_to_join(task: Task):
    with pytest.raises(ConfigError, match="its rows are not pairs of texts; there is nothing to join"):
        task.join_pairs(" ")


def test_a_bank_reads_joined_pairs_as_texts():
    pairs = Split.of([("the film", "is good"), ("a film", "is bad")] * 4, [0, 1] * 4)
    task = Task(**{**vars(yes_no(train=4)), "splits": {"train": pairs, "validation": pairs}}).join_pairs("\n")
    from tests.support.training import reader

    bank = tiny_bank({"mood": reader(task)})
    fit(bank, {"mood": task}, epochs=1, progress=False)
    assert bank["mood"].info["pair"] is False
