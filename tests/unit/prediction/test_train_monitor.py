"""A monitor from a file of replies: trained, chosen, calibrated with a guarantee, measured, saved; and bad files."""

from __future__ import annotations

import json
import math
import random
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.causal import causal_model, causal_tokenizer, starting_tokenizer
from tests.support.marking import MARKS, letters
from tests.support.stored import WORDS, tiny_model, tiny_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel
from typer import Exit

from lamina.bank import Reader, ReaderBank
from lamina.cli import monitor_command
from lamina.errors import ConfigError, DataError, StoreError, UnknownNameError
from lamina.fusion.ada_layers import AdaLayers
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.monitors import DriftSketch, LastScore, Monitor, ReplyFacts
from lamina.prediction import monitor, train_monitor
from lamina.prediction.reply_file import ReplyColumns, divide, read_labels, replies_of
from lamina.prediction.train_monitor import score_replies
from lamina.store.hub import model_card
from lamina.tasks.task import Task

GOOD = ("the", "a", "film", "is", "good", "very", "paris", "anna", "went", "to", "and", "fun")
TEMPLATE = "{% for message in messages %}{{ message.content }} . {% endfor %}"


def replies(count: int = 360) -> list[dict[str, Any]]:
    """Every fourth reply has two bad words, and its prompt is that of the next reply too."""
    rng, rows = random.Random(0), []
    for row in range(count):
        words = [rng.choice(GOOD) for _ in range(rng.randint(6, 9))]
        bad = row % 4 == 0
        if bad:
            at = rng.randrange(len(words) - 2)
            words[at : at + 2] = rng.sample(["not", "bad", "slow"], 2)
        rows.append(
            {"prompt": f"anna is {row - (row % 4 == 1)}", "reply": " ".join(words), "label": "bad" if bad else "ok"}
        )
    return rows


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "replies.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def writer(seed: int = 0) -> GPT2LMHeadModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        ids: dict[str, Any] = {"vocab_size": len(WORDS), "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(**ids, n_embd=32, n_layer=2, n_head=4, n_positions=64)).eval()


def trained(path: Path, **options: Any) -> Any:
    how: dict[str, Any] = {"positive": "bad", "rate": 0.05, "epochs": 6, "learning_rate": 2e-2, **options}
    return monitor(path, model=writer(), processor=tiny_tokenizer(), **how)


def test_a_file_of_replies_becomes_a_monitor_that_is_saved_with_its_rates(tmp_path: Path):
    found = trained(written(tmp_path, replies()), output=tmp_path / "bank")
    rates = found.calibration
    assert rates.recall > 0.8
    assert rates.guaranteed
    assert (rates.target, rates.negatives + rates.positives) == (0.05, found.rows["test"])
    assert re.match(
        r"flags \d+\.\d % \(.* to .*\) of good replies, catches .* of bad ones, on average after", found.sentences()
    )
    assert f"of the same kind and of at most {found.sketch.longest} tokens" in found.sentences()
    assert found.live
    bank = ReaderBank.from_pretrained(tmp_path / "bank", writer())
    stored = bank.monitors["monitor"]
    assert stored.to_dict() == found.to_dict()
    assert isinstance(found, Monitor)
    card = str(model_card(bank, "bank"))
    assert f"at most 0.05 with 95% confidence, {rates.date}, data {rates.data}" in card
    ids = tiny_tokenizer()("anna is 1", add_special_tokens=False, return_tensors="pt").input_ids
    steps = list(bank.stream(bank.model, ids, monitors=["monitor"], max_new_tokens=4))
    assert steps


def test_replies_that_are_trained_on_and_scored_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    rows = replies()
    for row in rows[1::4]:
        row["reply"] = "the  film is good"
    trained(written(tmp_path, rows), epochs=1, anyway=True, device=torch.device("cpu"))
    (said,) = [message for message in caplog.messages if "test replies" in message]
    counts = re.match(r"monitor: (\d+) of (\d+) test replies \(([\d.]+) %\) are in the train part too", said)
    assert counts
    assert 10 < int(counts[1]) < int(counts[2]) / 2
    assert float(counts[3]) == pytest.approx(100 * int(counts[1]) / int(counts[2]), abs=0.1)


def test_a_rate_per_thousand_tokens_is_promised_said_and_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    found = trained(written(tmp_path, replies()), rate=10, per="1000 tokens", output=tmp_path / "bank")
    rates = found.calibration
    assert (rates.per, rates.target, rates.guaranteed) == ("1000 tokens", 10, True)
    assert "raises at most 10 false alarms per thousand tokens of good replies of this kind;" in found.sentences()
    bank = ReaderBank.from_pretrained(tmp_path / "bank", writer())
    assert bank.monitors["monitor"].calibration == rates
    assert "at most 10 false alarms per thousand tokens with 95% confidence" in str(model_card(bank, "bank"))
    monkeypatch.setattr(ReaderBank, "seal_base", None)  # all weights are checked for thresholds only
    score_replies(bank, "monitor", [("a", "the film is good " * 9)])
    assert "for those, the rate of the calibration is not promised" in caplog.text  # alarms may come late in a text


def test_the_labels_that_count_as_good_are_listed_if_there_are_several(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    rows: list[dict[str, Any]] = [ROW | {"label": label} for label in ("ok", "bad", "bad ", "ok")]
    read_labels(written(tmp_path, rows), ReplyColumns(), "bad")
    assert not caplog.messages
    rows.append(rows[0] | {"label": 1})
    read_labels(written(tmp_path, rows), ReplyColumns(), "bad")
    assert caplog.messages == ["monitor: these labels count as good: 'ok' (2), '1' (1)."]
    caplog.clear()
    read_labels(written(tmp_path, rows + [rows[0] | {"label": grade} for grade in range(12)]), ReplyColumns(), "bad")
    assert re.search(r"'ok' \(2\), '1' \(2\), '0' \(1\), .*'8' \(1\) and others\.$", caplog.messages[0])


@pytest.mark.parametrize("as_json", [True, False])
def test_a_command_that_writes_nothing_where_it_should_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
):
    sketch = DriftSketch.of([ReplyFacts(score=0.25 * n, length=7) for n in range(9)])
    own = Monitor("monitor", "bad", LastScore(), threshold=1.0, sketch=sketch)
    facts: dict[str, Any] = {"candidates": {}, "rows": {}, "tfidf_recall": None, "live": True, "sketch": sketch}
    for stored, output, code in ((False, tmp_path / "bank", 1), (False, None, 0), (True, tmp_path / "bank", 0)):
        found = SimpleNamespace(
            **facts, stored=stored, is_useful=stored, to_dict=own.to_dict, sentences=lambda: "Said."
        )
        monkeypatch.setattr("lamina.prediction.monitor", lambda *_, found=found, **__: found)
        with pytest.raises(Exit) if code else nullcontext() as ended:
            monitor_command.monitor(tmp_path / "replies.jsonl", "none", output=output, as_json=as_json)
        assert getattr(getattr(ended, "value", None), "exit_code", 0) == code
        printed = capsys.readouterr().out
        if as_json:
            read = json.loads(printed)
            assert (read["longest"], read["useful"]) == (7, stored)
            assert "sketch" not in read["monitor"]
        else:
            assert "candidates" in printed


@pytest.mark.long
def test_a_monitor_whose_recall_cannot_be_told_from_its_rate_is_stored_only_anyway(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    rows = replies()
    random.Random(1).shuffle(labels := [row["label"] for row in rows])
    path = written(tmp_path, [row | {"label": label} for row, label in zip(rows, labels, strict=True)])
    found = trained(path, epochs=1, output=tmp_path / "bank")
    assert "useless" in found.sentences()
    assert not found.stored
    assert not (tmp_path / "bank").exists()
    assert "cannot be told" in caplog.text
    assert trained(path, epochs=1, output=tmp_path / "bank", anyway=True).stored
    assert (tmp_path / "bank").exists()


@pytest.mark.long
def test_a_model_that_reads_in_both_directions_judges_finished_replies_and_is_not_watched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = written(tmp_path, rows := replies())
    how: dict[str, Any] = {"positive": "bad", "rate": 0.05, "epochs": 1, "anyway": True}
    found = monitor(path, model=tiny_model(), processor=tiny_tokenizer(), **how)
    assert not found.live
    assert "once they are finished" in found.sentences()
    assert "after" not in found.sentences()
    found.bank.save_pretrained(tmp_path / "bank")
    bank = ReaderBank.from_pretrained(tmp_path / "bank", tiny_model())
    parts = divide(replies_of(read_labels(path, ReplyColumns(), "bad"), tiny_tokenizer())[0], 0)
    scores = score_replies(bank, "monitor", [(one.prompt, one.reply) for one in parts["test"]])
    assert scores == pytest.approx([score for score, _ in found.scores["test"]], abs=1e-4)
    assert [bad for _, bad in found.scores["test"]] == [one.positive for one in parts["test"]]
    batch = tiny_tokenizer()(rows[0]["prompt"], rows[0]["reply"], return_tensors="pt")
    with pytest.raises(ConfigError, match="reads the stack 'main', which does not read the generated text"):
        bank.monitor_scores(bank.monitors["monitor"], batch)
    with pytest.raises(UnknownNameError, match="score_replies: unknown monitor 'other'"):
        score_replies(bank, "other", [("a", "b")])
    assert "have more than" not in caplog.text
    score_replies(bank, "monitor", [("a", "good"), ("a", "the film is good " * 5)])
    assert "1 of 2 replies, such as number 1, have more than" in caplog.text
    with pytest.raises(ConfigError, match="score_replies: the monitor is a Monitor, and there are 0 replies"):
        score_replies(bank, "monitor", [])
    with pytest.raises(ConfigError, match=r"^score_replies: batch_size"):
        score_replies(bank, "monitor", [("a", "b")], batch_size=0)
    assert score_replies(bank, "monitor", np.array([["a", "good"]])) == score_replies(bank, "monitor", [("a", "good")])
    with pytest.raises(ConfigError, match=r"replies\[0\] is \{'prompt': 'a'"):
        score_replies(bank, "monitor", [{"prompt": "a", "reply": "b"}])
    bank.processor = None
    with pytest.raises(ConfigError, match=r"^score_replies: the bank has no processor"):
        score_replies(bank, "monitor", [("a", "b")])


def test_a_finished_reply_has_the_score_that_it_had_when_it_was_written(caplog: pytest.LogCaptureFixture):
    tokenizer = starting_tokenizer()
    bank = ReaderBank(causal_model(), tokenizer)
    bank.add("tags", Reader(AdaLayers(dim=8), TokenClassification(("O", "B-bad", "I-bad"), encoder_layers=0)))
    watched = Monitor("tags", ("B-bad", "I-bad"), LastScore())
    ids = [*tokenizer("the film").input_ids, *tokenizer("is not good", add_special_tokens=False).input_ids]
    batch = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    written = bank.eval().monitor_scores(watched, batch)[0, -3:]
    scores = score_replies(bank, watched, [("the film", "is not good"), ("the film", " \n"), ("the film", " is ")])
    assert scores[:2] == pytest.approx([float(written.max()), -math.inf], abs=1e-5)
    assert math.isfinite(scores[2])
    assert not caplog.messages  # such as that a span does not end with a word
    for wrong in ("ab", ("a",), ("a", None), 5):
        message = rf"replies\[1\] is {re.escape(repr(wrong))}; it must be a pair of texts, a prompt and a reply"
        with pytest.raises(ConfigError, match=message):
            score_replies(bank, watched, [("a", "b"), wrong])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("mark", MARKS)
def test_a_finished_reply_is_read_as_the_tokens_that_the_model_has_written(mark: str):
    tokenizer = letters(mark)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=64)).eval()
    bank = ReaderBank(model, tokenizer)
    bank.add("tags", Reader(AdaLayers(dim=8), TokenClassification(("O", "B-bad", "I-bad"), encoder_layers=0)))
    watched = Monitor("tags", ("B-bad", "I-bad"), LastScore())
    space = "Ġ" if mark == "ByteLevel" else "▁"
    for prompt, reply in (("The", " red"), ("So", ", or"), ("A", "nd")):
        prompted = tokenizer(prompt).input_ids
        ids = torch.tensor([[*prompted, *tokenizer.convert_tokens_to_ids(list(reply.replace(" ", space)))]])
        scores = bank.eval().monitor_scores(watched, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        expected = float(scores[0, len(prompted) :].max())
        assert score_replies(bank, watched, [(prompt, reply)]) == pytest.approx([expected], abs=1e-5)


def test_replies_that_lost_the_space_before_them_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    rows = [{"prompt": "The", "reply": "red car", "label": label} for label in ("ok", "ok", "bad")]
    rows[0]["reply"] = " blue car"
    path = written(tmp_path, rows)
    for tokenizer in (tiny_tokenizer(), causal_tokenizer()):  # the space makes no difference for their tokens
        replies_of(read_labels(path, ReplyColumns(), "bad"), tokenizer)
    assert not caplog.messages
    for tokenizer in map(letters, MARKS):
        replies_of(read_labels(path, ReplyColumns(), "bad"), tokenizer)
        (said,) = caplog.messages
        assert said.startswith("monitor: 2 of 3 replies follow their prompts without a space, as in 'Thered'. If the")
        caplog.clear()
    for prompt, reply in (("The", " red"), ("猫", "在"), ("[/INST]", "Red"), ("The", ", or"), ("A\n", "b")):
        path = written(tmp_path, [{"prompt": prompt, "reply": reply, "label": label} for label in ("ok", "bad")])
        replies_of(read_labels(path, ReplyColumns(), "bad"), letters("Prepend"))
    assert not caplog.messages


def test_the_space_that_a_chat_template_puts_before_a_reply_belongs_to_the_reply(tmp_path: Path):
    tokenizer = causal_tokenizer()
    turns = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": " is not bad "}]
    path = written(
        tmp_path, [{"messages": turns, "label": "bad", "where": [[8, 11]]}, {"messages": turns, "label": "ok"}]
    )
    start, reply, end = "{% for m in messages %}{% if m.role == 'user' %}", "{% else %}", "{% endif %}{% endfor %}"
    prompt = "{% if add_generation_prompt %}B\n{% endif %}"
    templates = {
        "Llama 2": ("[INST] {{ m.content.strip() }} [/INST]", " {{ m.content.strip() }} </s>", "", " is not bad "),
        "ChatML": ("A\n{{ m.content.strip() }}\n", "B\n{{ m.content.strip() }}\n", prompt, "is not bad "),
        "keeps white space": ("[{{ m.content }}]", "{{ m.content }}\n", "", " is not bad "),
        "writes a thought": ("[{{ m.content }}]", "<think>\n</think>{{ m.content }}\n", "", " is not bad "),
    }
    for asked, answered, begun, expected in templates.values():
        tokenizer.chat_template = start + asked + reply + answered + end + begun
        bad, good = replies_of(read_labels(path, ReplyColumns(spans="where"), "bad"), tokenizer)[0]
        assert (bad.reply, good.reply) == (expected, expected)
        assert [bad.reply[slice(*span)] for span in bad.spans] == ["bad"]


def test_a_wrong_output_is_refused_before_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(train_monitor, "fit", None)
    path = written(tmp_path, replies())
    (tmp_path / "other" / "readers" / "monitor").mkdir(parents=True)
    (tmp_path / "other" / "readers" / "monitor" / "reader.json").touch()
    for output in (path, tmp_path / "other"):
        with pytest.raises(StoreError, match=r"^save: "):
            trained(path, output=output)
    with pytest.raises(TypeError):  # the training begins
        trained(path, output=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_no_prompt_is_in_two_parts(tmp_path: Path):
    other = [row | {"prompt": f"{row['prompt'][:1]}\u200b{row['prompt'][1:]} ?".capitalize()} for row in replies()]
    rows = [other[at] if at % 2 else row for at, row in enumerate(replies())]
    read, _ = replies_of(read_labels(written(tmp_path, rows), ReplyColumns(), "bad"), tiny_tokenizer())
    parts = divide(read, 0)
    prompts = [
        {one.prompt.casefold().removesuffix(" ?").replace("\u200b", "") for one in part} for part in parts.values()
    ]
    assert sum(map(len, prompts)) == len(set.union(*prompts))
    shares = [sum(one.positive for one in part) / len(part) for part in parts.values()]
    assert all(abs(share - 0.25) < 0.05 for share in shares)


def test_a_prompt_has_one_good_and_one_bad_reply_to_calibrate_and_test(tmp_path: Path):
    """Replies to one prompt are alike, so that they are no independent draws, which bounds need."""
    rows = [{**row, "reply": f"{row['reply']}{' .' * copy}"} for row in replies() for copy in range(5)]
    read, _ = replies_of(read_labels(written(tmp_path, rows), ReplyColumns(), "bad"), tiny_tokenizer())
    parts = divide(read, 0)
    alone = divide(replies_of(read_labels(written(tmp_path, replies()), ReplyColumns(), "bad"), tiny_tokenizer())[0], 0)
    assert {part: len(own) for part, own in parts.items()} == {
        part: len(own) * (5 if part in ("train", "choosing") else 1) for part, own in alone.items()
    }
    for part in ("calibration", "test"):
        kept = [(one.prompt, one.positive) for one in parts[part]]
        assert len(set(kept)) == len(kept)
        assert len({one.reply.count(" .") for one in parts[part]}) > 1


def test_copies_of_replies_are_no_evidence(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    few = [row for row in replies()[:80] for _ in range(20)]
    with pytest.raises(
        ConfigError, match=r"there are \d\d good replies to different prompts to calibrate on; .* about 59"
    ):
        trained(written(tmp_path, few), rate=0.05)
    assert "of 1600 replies are left out of calibration and test" in caplog.text


def test_chats_are_read_by_the_chat_template_and_spans_by_their_words(tmp_path: Path):
    tokenizer = tiny_tokenizer()
    turns = [{"role": "user", "content": "anna went"}, {"role": "assistant", "content": "the film is not bad ."}]
    rows = [
        {"messages": turns, "verdict": "bad", "where": [[12, 18]]},  # of "not bad" the end is inside a word
        {"messages": turns, "verdict": "ok", "where": []},
        {"messages": turns, "verdict": "bad", "where": []},
    ]
    path = written(tmp_path, rows)
    with pytest.raises(ConfigError, match=r"monitor: .* has no chat template, .*'messages'.* --prompt and --reply"):
        replies_of(read_labels(path, ReplyColumns(spans="where"), "bad"), tokenizer)
    tokenizer.chat_template = TEMPLATE
    read, _ = replies_of(read_labels(path, ReplyColumns(spans="where"), "bad"), tokenizer)
    assert [(one.prompt, one.spans) for one in read] == [
        ("anna went . ", ((12, 19),)),
        ("anna went . ", ()),
        ("anna went . ", ((0, 21),)),
    ]


ROW = {"prompt": "anna", "reply": "the film", "label": "ok"}


@pytest.mark.parametrize(
    ("rows", "options", "error", "message"),
    [
        (
            [ROW, ROW | {"label": "bad"}],
            {"positive": None},
            ConfigError,
            "no positive label is named; .* has 'bad'",
        ),
        ([ROW, ROW | {"label": "bad"}], {"positive": "evil"}, UnknownNameError, "'evil'"),
        *(
            (
                [ROW, ROW | {"label": "bad"}, ROW | {"label": label}],
                {},
                DataError,
                f"row 3, column 'label': the label '{label.strip()}' would count as good, but looks like .* 'bad'",
            )
            for label in ("Bad ", "b\u200bad", "\uff42ad")  # a capital, a sign without width, a wide letter
        ),
        ([ROW | {"label": "bad"}] * 2, {}, ConfigError, "every reply has the label 'bad'"),
        *(
            ([ROW, ROW | {"label": tag}], {"positive": tag}, ConfigError, f"label '{tag}' is a tag of words; rename")
            for tag in ("O", "B-bad", "I-bad")
        ),
        ([ROW, ROW | {"reply": " ", "label": "bad"}], {}, DataError, "row 2, column 'reply': the reply is blank"),
        ([ROW, ROW | {"reply": 3, "label": "bad"}], {}, DataError, "the reply is int, no text"),
        (
            [ROW, ROW | {"label": None}, ROW | {"label": "bad"}],
            {},
            DataError,
            "row 2, column 'label': the label is",
        ),
        (
            [{"a": "x", "b": "y", "label": label} for label in ("bad", "ok")],
            {},
            DataError,
            "prompt; the columns are 'a', 'b'",
        ),
        (
            [ROW | {"answer": "x", "label": label} for label in ("bad", "ok")],
            {},
            DataError,
            "'reply', 'answer' may each be",
        ),
        ([{"x": 1} | ROW | {"label": label} for label in ("bad", "ok")], {"reply": "y"}, DataError, "y"),
        (
            [ROW, ROW | {"label": "bad", "at": [[3, 99]]}],
            {"spans": "at"},
            DataError,
            r"row 2, column 'at': the span \[3, 99\], which is not in its text of 8 characters; .*Correct the",
        ),
        *(
            ([ROW, ROW | {"label": "bad", "at": cell}], {"spans": "at"}, DataError, f"row 2, column 'at': {problem}")
            for cell, problem in (
                (
                    {"result": [], "was_cancelled": True},
                    r".*, which its annotator skipped or rejected\. Correct the row",
                ),
                (
                    [{"start": 0, "end": 2, "text": "xy"}],
                    r".*, whose text is not '\w+', the .* must agree\. Correct the row",
                ),
                ([[0, 1, {"name": "x"}]], r".*is an object with keys"),
            )
        ),
        *(
            ([{"messages": [], "label": label} for label in ("bad", "ok")], columns, DataError, "messages, label.*own")
            for columns in ({"spans": "messages"}, {"label": "messages"}, {"messages": "label"})
        ),
        (
            [ROW, ROW | {"label": "bad", "at": "the film"}],
            {"spans": "at"},
            DataError,
            "row 2, column 'at': 'the film'; spans are a list, which may be empty",
        ),
        *(
            (
                [ROW, ROW | {"label": "bad"}],
                {what: column},
                DataError,
                f"the columns of prompt, reply, label.* are .*'{column}'.*; each needs its own",
            )
            for what, column in (("reply", "label"), ("prompt", "reply"), ("spans", "reply"))
        ),
        (
            [{"messages": [{"role": "user", "content": "x"}], "label": label} for label in ("bad", "ok")],
            {},
            DataError,
            "row 1, .*does not end with a reply",
        ),
        (
            [{"messages": "[{'role'", "label": label} for label in ("bad", "ok")],
            {},
            DataError,
            "row 1, column 'messages': the cell is not JSON",
        ),
        (
            [{"messages": '[{"role": "user", "role": "assistant"}]', "label": label} for label in ("bad", "ok")],
            {},
            DataError,
            r"row 1, column 'messages': the cell is not JSON \(the key 'role' comes twice\)",
        ),
        (
            replies(100),
            {"rate": 0.01},
            ConfigError,
            "a rate of 0.01 per reply with 95 % confidence needs about 299, so the file about 1196 good replies",
        ),
        (replies(100), {"rate": 0}, ConfigError, "the rate is 0; it must be above 0 and below 1, such as 0.01"),
        (replies(100), {"rate": 1}, ConfigError, "the rate is 1"),
        (
            replies(100),
            {"confidence": 1},
            ConfigError,
            "^monitor: confidence is 1; it must be above 0 and below 1, such as 0.95",
        ),
        (replies(100), {"device": "warp"}, ConfigError, "^device: 'warp' cannot be used"),
        (
            replies(100),
            {"rate": 0.1, "per": "1000 tokens"},
            ConfigError,
            r"there are \d+ tokens of good .* 0.1 per 1000 tokens with .* needs about 30\d\d\d, so the file about 12",
        ),
        (replies(100), {"per": "token"}, UnknownNameError, "monitor: unknown unit 'token'; known: reply, 1000 tokens"),
        (
            [ROW | {"prompt": f"{n}"} for n in range(400)] + [ROW | {"label": "bad"}],
            {},
            ConfigError,
            "has no bad reply",
        ),
    ],
)
def test_bad_files_end_in_one_sentence(
    tmp_path: Path, rows: list[dict[str, Any]], options: dict[str, Any], error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        trained(written(tmp_path, rows), **options)


def test_a_reader_that_looks_ahead_is_refused_when_it_is_added_to_watch():
    rows = [{"text": "the film", "label": label} for label in ("bad", "ok")] * 4
    task = Task.from_dataset("sequence_classification", {"train": rows}, text="text")
    bank = ReaderBank(writer(), tiny_tokenizer())
    for reader in (
        Reader.default(task),
        Reader(Reader.default(task, watch=True).fusion, SequenceClassification(task.labels)),
    ):
        with pytest.raises(ConfigError, match=r"bank\.add: reader 'mood' has a (fusion|head) .* looks at other tokens"):
            bank.add("mood", reader, watch=True)
        assert "mood" not in bank
    reader = bank.add("mood", task, watch=True)
    assert reader.head.is_token_wise()
    assert reader.first_hash == reader.weights_hash() is not None
    with pytest.raises(ConfigError, match=r"bank\.add: reader 'mood' reads the stack"):
        ReaderBank(tiny_model(), tiny_tokenizer()).add("mood", task, watch=True)
