"""Answers of a request, from the scores of its tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import FAMILIES
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from lamina import AdaLayers, Monitor, PooledLayers, Reader, ReaderBank, SequenceClassification, TokenClassification
from lamina.errors import ConfigError, LaminaError, UnknownNameError
from lamina.layers.types import special_ids
from lamina.monitors import RollingMax
from lamina.vllm.answers import Answers
from lamina.vllm.layout import Layout
from lamina.vllm.monitors import RequestMonitors, engine_special_ids
from lamina.vllm.worker import StepScores


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    bank = ReaderBank(FAMILIES["llama"].build())
    bank.add("mean", Reader(AdaLayers(dim=4), SequenceClassification(("no", "yes"), pooling="mean")))
    bank.add("query", Reader(AdaLayers(dim=4), SequenceClassification(("a", "b"), pooling="query")))
    bank.add("tags", Reader(AdaLayers(dim=4), TokenClassification(("O", "X"), encoder_layers=0)))
    bank.add("whole", Reader(PooledLayers(dim=4), SequenceClassification(("bad", "ok"), pooling="first")))
    bank.keep_monitor(Monitor("mean", flag="yes", aggregate=RollingMax(1), threshold=0.9, name="watchdog"))
    folder = tmp_path_factory.mktemp("bank")
    bank.save_pretrained(folder)
    return folder


def layout_of(folder: Path, **settings: object) -> Layout:
    layout = Layout.from_config({"lamina": {"bank": str(folder), **settings}})
    assert layout is not None
    return layout


def scores(first: int, rows: list[list[float]], prompt: list[float] | None = None) -> StepScores:
    whole = None if prompt is None else np.array(prompt, dtype=np.float32).tobytes()
    return StepScores(first, np.array(rows, dtype=np.float32).tobytes(), whole)


# columns: mean (2), query (2 and the log weight), tags (2)
ROWS = [[0.0, 2.0, 1.0, 0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 3.0, 5.0, 1.0, 0.0], [4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]


def test_an_engine_without_the_key_has_no_readers():
    assert Layout.from_config(None) is None
    assert Layout.from_config({"other": 1}) is None


def test_answers_over_prompt_output_and_both(folder: Path):
    answers = Answers(layout_of(folder), ["mean", "query", "tags", "whole"], prompt=2)
    answers.add(scores(0, ROWS[:2], prompt=[1.0, 0.0]))
    assert answers["mean"]["output"] is None
    answers.add(scores(2, ROWS[2:]))
    table = torch.tensor(ROWS)
    for part, rows in (("prompt", table[:2]), ("output", table[2:]), ("both", table)):
        mean = rows[:, :2].mean(0).softmax(0)
        weights = rows[:, 4].softmax(0)
        query = (rows[:, 2:4] * weights.unsqueeze(1)).sum(0).softmax(0)
        got = answers["mean"][part]["probabilities"], answers["query"][part]["probabilities"]
        assert got[0] == pytest.approx({"no": float(mean[0]), "yes": float(mean[1])})
        assert got[1] == pytest.approx({"a": float(query[0]), "b": float(query[1])})
    assert answers["mean"]["output"]["label"] == "no"
    assert set(answers["tags"]) == {"tokens"}
    torch.testing.assert_close(torch.tensor(answers["tags"]["tokens"]), table[:, 5:].softmax(-1))
    assert answers["whole"]["prompt"]["label"] == "bad"
    assert set(answers["whole"]) == {"prompt"}


def test_parts_of_a_stream_are_those_of_the_whole(folder: Path):
    answers = Answers(layout_of(folder), ["mean", "tags", "whole"], prompt=2)
    answers.add(scores(0, ROWS[:2], prompt=[1.0, 0.0]))
    parts = [answers.part_to_dict(0, answers.before(1))]
    answers.add(scores(2, ROWS[2:]))
    parts.append(answers.to_dict(first=2))
    for name in ("mean", "tags"):
        assert parts[0][name]["tokens"] + parts[1][name]["tokens"] == answers[name]["tokens"]
        assert list(parts[0][name]) == ["tokens"]
        assert {**parts[1][name], "tokens": None} == {**answers[name], "tokens": None}
    assert parts[0]["whole"] == parts[1]["whole"] == answers["whole"]
    assert list(answers.part_to_dict(2, 3)) == ["mean", "tags"]


def test_tokens_that_are_computed_again_replace_their_scores(folder: Path):
    answers = Answers(layout_of(folder), ["mean"], prompt=3)
    answers.add(scores(0, ROWS))
    answers.add(scores(1, [ROWS[2], ROWS[1]]))
    expected = torch.tensor([ROWS[0], ROWS[2], ROWS[1]])[:, :2].softmax(-1)
    torch.testing.assert_close(torch.tensor(answers["mean"]["tokens"]), expected)


def test_a_request_gets_the_readers_that_it_asks_for(folder: Path):
    layout = layout_of(folder)
    assert layout.asked(None) == layout.asked({}) == list(layout.readers)
    assert layout.asked({"lamina": ["tags"]}) == ["tags"]
    assert list(Answers(layout, ["tags"], prompt=1)) == ["tags"]
    with pytest.raises(KeyError):
        Answers(layout, ["tags"], prompt=1)["mean"]
    with pytest.raises(UnknownNameError, match="unknown reader 'tag'; known: mean, query, tags, whole"):
        layout.asked({"lamina": ["tag"]})
    assert layout.asked({"lamina": ["tags", "mean", "tags"]}) == ["tags", "mean"]
    assert layout.asked({"lamina": []}) == []
    for wrong in ("tags", {"tags": 1}, [1], 3):
        with pytest.raises(ConfigError, match=r"'lamina' of the request is .* must be a list of readers' names"):
            layout.asked({"lamina": wrong})
    wrong_arguments: Any = "tags"  # over HTTP, as "vllm_xargs"
    with pytest.raises(ConfigError, match="the arguments are 'tags'; they must be like"):
        layout.asked(wrong_arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (3, "it must be a mapping"),
        ({}, "names no bank"),
        ({"bank": "FOLDER", "reader": ["mean"]}, "unknown setting 'reader'"),
        ({"bank": "FOLDER", "readers": ["men"]}, "unknown reader 'men'"),
        ({"bank": "FOLDER", "readers": "mean"}, "is 'mean'; it must be a list of readers' names"),
        ({"bank": "FOLDER", "readers": []}, "there is no reader to run"),
        ({"bank": "FOLDER", "on_flag": "stop"}, "unknown on_flag 'stop'"),
        ({"bank": "FOLDER", "readers": ["tags", "whole"]}, None),
        ({"bank": "/no/such/folder"}, "no bank '/no/such/folder'"),
    ],
)
def test_settings_of_an_engine_are_checked(folder: Path, settings: object, message: str | None):
    if isinstance(settings, dict) and settings.get("bank") == "FOLDER":
        settings = {**settings, "bank": str(folder)}
    if message is None:
        assert Layout.from_config({"lamina": settings}) is not None
        return
    with pytest.raises(LaminaError, match=message):
        Layout.from_config({"lamina": settings})


def test_a_monitor_flags_the_output_once_and_says_where(folder: Path):
    layout = layout_of(folder)
    monitors, output = RequestMonitors(layout, prompt=2, special=special_ids(None)), [5, 6, 7]
    high, low = [0.0, 9.0, *[0.0] * 5], [9.0, 0.0, *[0.0] * 5]
    assert monitors.add(0, scores(0, [high, high]).tokens, []) == []  # the prompt is not scored
    assert monitors.verdicts == {}
    assert monitors.add(2, scores(2, [low]).tokens, output) == []
    # two of these tokens came before
    assert monitors.add(1, scores(1, [high, low, high]).tokens, output) == ["watchdog"]
    assert monitors.verdicts["watchdog"].flagged_at == 1
    assert monitors.add(4, scores(4, [high]).tokens, output[:2]) == []
    assert monitors.verdicts["watchdog"].flagged_at == 1


def test_a_special_token_of_the_output_is_not_scored(folder: Path):
    monitors, output = RequestMonitors(layout_of(folder), prompt=2, special=torch.tensor([3, 9])), [9, 5, 3, 6, 6]
    high, low = [0.0, 9.0, *[0.0] * 5], [9.0, 0.0, *[0.0] * 5]
    assert monitors.add(0, scores(0, [high, high, high]).tokens, output[:2]) == []
    assert math.isnan(monitors.verdicts["watchdog"].score)
    assert monitors.add(3, scores(3, [low, high]).tokens, output[:4]) == []
    assert monitors.verdicts["watchdog"].score < 0.1
    assert monitors.add(5, scores(5, [high]).tokens, output) == ["watchdog"]
    assert monitors.verdicts["watchdog"].flagged_at == 3


def test_a_score_that_is_no_number_is_logged_once(folder: Path, caplog: pytest.LogCaptureFixture):
    monitors, bad = RequestMonitors(layout_of(folder), prompt=1, special=torch.tensor([9])), [math.nan] * 7
    assert monitors.add(1, scores(1, [bad]).tokens, [9]) == []
    assert caplog.messages == []  # a special token
    for at in (2, 3):
        assert monitors.add(at, scores(at, [bad]).tokens, [9, 5, 5]) == []
    assert caplog.messages == ["lamina: monitor 'watchdog' gives NaN for a request, which it can no longer flag."]
    assert math.isnan(monitors.verdicts["watchdog"].score)


def test_special_ids_are_those_of_the_tokenizer_of_the_engines_model(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    facts = {"tokenizer": str(tmp_path), "tokenizer_revision": None, "trust_remote_code": False}
    config: Any = SimpleNamespace(model="weights-alone", revision=None, **facts)
    assert engine_special_ids(config).tolist() == []
    assert "cannot be read" in caplog.text
    assert "monitors score special tokens too" in caplog.text
    words = Tokenizer(WordLevel({"<s>": 0, "<unk>": 1, "good": 2, "</s>": 3}, unk_token="<unk>"))
    signs = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **signs).save_pretrained(tmp_path)
    assert engine_special_ids(config).tolist() == [0, 3]


@pytest.mark.parametrize(("score", "shown"), [(float("inf"), None), (float("-inf"), None), (0.25, 0.25)])
def test_the_score_of_a_cascade_that_its_first_monitor_decides_is_null_in_json(
    folder: Path, score: float, shown: float | None
):
    answers = Answers(layout_of(folder), ["mean"], prompt=2)
    answers.on_message({"scores": [], "monitors": {"both": (score, 0)}})
    assert answers.monitors["both"].score == score
    for fields in (answers.to_dict(), answers.part_to_dict(0, 0)):
        assert json.loads(json.dumps(fields, allow_nan=False))["monitors"] == {
            "both": {"score": shown, "flagged_at": 0}
        }
