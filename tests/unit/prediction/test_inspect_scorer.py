from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.causal import TEMPLATE, VOCABULARY, causal_model, causal_tokenizer
from tests.support.training import LENGTH, tiny_model, tiny_tokenizer
from tests.support.writing import READERS, writing_bank
from transformers import RobertaConfig, RobertaModel

from lamina.bank import ReaderBank
from lamina.bank.monitoring import scores_of_monitors
from lamina.errors import ConfigError, MissingExtraError, NotFiniteError
from lamina.layers import LayerStack
from lamina.monitors import LastScore, Monitor, inspect_scorer
from lamina.prediction.inspect_scorer import _scores

ODD = Monitor("odd", "odd", LastScore(), threshold=0.01)
SAID = [("user", "the film is good"), ("assistant", "it is bad"), ("user", "the film"), ("assistant", "is slow")]


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_each_reply_has_the_score_of_a_plain_pass_over_the_conversation(template: str | None):
    bank = writing_bank(template, ["odd"], [ODD])
    rows = _scores(bank, bank.monitors, SAID)
    assert [(row["message"], row["monitor"], row["flagged_at"]) for row in rows] == [(1, "odd", 0), (3, "odd", 0)]
    if template is None:
        text, words = "the film is good it is bad the film is slow", (slice(4, 7), slice(9, 11))
    else:
        text = "<user> the film is good <reply> it is bad <end> <user> the film <reply> is slow <end>"
        words = (slice(6, 9), slice(14, 16))
    batch = bank.processor(text, return_tensors="pt", add_special_tokens=False)
    scores = bank.monitor_scores(bank.monitors["odd"], batch)[0]
    for row, at in zip(rows, words, strict=True):
        stop = at.stop + (template is not None)  # the end token is a part of the reply
        assert row["score"] == pytest.approx(float(scores[at.start : stop].max()), abs=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "roberta"])
def test_the_beginning_of_a_reply_that_is_too_long_is_counted(name: str):
    if name == "gpt2":
        model, read = causal_model(), LENGTH
    else:  # the first two of its positions are those of padding
        sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = RobertaConfig(vocab_size=len(VOCABULARY), max_position_embeddings=18, **sizes)
        model, read = RobertaModel(config).eval(), 16
    bank = ReaderBank(model, causal_tokenizer(TEMPLATE))
    bank.add("odd", READERS["odd"])
    bank.keep_monitor(replace(ODD, threshold=1e-6))
    words = ["film"] * (read + 3)
    (row,) = _scores(bank.eval(), bank.monitors, [("user", "the film is good"), ("assistant", " ".join(words))])
    assert (row["unread"], row["flagged_at"]) == (3, 3)  # the end token is not scored
    (row,) = _scores(bank, bank.monitors, [("user", "the film is good"), ("assistant", "film is")])
    assert (row["unread"], row["flagged_at"]) == (0, 0)


def test_without_a_chat_template_a_reply_is_read_as_a_pair_and_a_long_one_in_windows():
    bank = ReaderBank(tiny_model(), tiny_tokenizer())
    bank.add("odd", READERS["odd"])
    (row,) = _scores(bank.eval(), {"odd": ODD}, [("user", "the film"), ("assistant", "is good")])
    batch = tiny_tokenizer()("the film", "is good", return_tensors="pt")
    scores = scores_of_monitors(bank, [ODD], batch, None, finished=True)["odd"][0, 4:6]
    assert row["score"] == pytest.approx(float(scores.max()), abs=1e-5)
    (row,) = _scores(bank, {"odd": ODD}, [("user", "the film"), ("assistant", "good " * 2 * LENGTH)])
    assert (row["unread"], row["flagged_at"]) == (0, 0)


def test_a_reply_without_a_chat_template_is_cut_as_in_training(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(_scores.__globals__, "is_causal", lambda *_: False)  # which runs the model to find out
    bank = ReaderBank(tiny_model(), tiny_tokenizer())
    bank.add("odd", READERS["odd"])
    bank["odd"].info["max_length"] = 8
    lengths: list[int] = []
    _ = bank.eval().stacks  # the layers are found by passes of their own
    hook = bank.model.register_forward_pre_hook(
        lambda _, __, inputs: lengths.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    _scores(bank, {"odd": ODD}, [("user", "the film"), ("assistant", "is good " * 6)])
    hook.remove()
    assert len(lengths) > 1
    assert max(lengths) == 8


def test_a_score_that_is_no_number_is_an_error():
    bank = writing_bank(TEMPLATE, ["odd"], [ODD])
    with torch.no_grad():
        for parameter in bank["odd"].head.parameters():
            parameter.fill_(math.nan)
    with pytest.raises(NotFiniteError, match="score of message 1 by 'odd' is not a number"):
        _scores(bank, bank.monitors, SAID[:2])


def test_causality_is_that_of_the_stack_of_the_monitors(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def is_causal(_model: object, stack: LayerStack) -> bool:
        asked.append(stack.name)
        return False

    monkeypatch.setitem(_scores.__globals__, "is_causal", is_causal)
    bank = writing_bank(TEMPLATE, ["odd"], [ODD])
    other = replace(bank.stacks["main"], name="other")
    monkeypatch.setattr(type(bank), "stacks", {"other": other, **bank.stacks})
    _scores(bank, bank.monitors, SAID[:2])
    assert asked == ["main"]


class Words:
    """Counts words in place of tiktoken's tokens, whose vocabularies Inspect AI would download."""

    def encode(self, text: str, **_: object) -> list[str]:
        return text.split()


def test_inspect_stores_a_score_for_each_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    inspect_ai = pytest.importorskip("inspect_ai", reason="needs inspect-ai (pip install lamina[inspect])")
    monkeypatch.setattr("tiktoken.get_encoding", lambda _name: Words())
    monkeypatch.setattr("tiktoken.encoding_for_model", lambda _name: Words())
    from inspect_ai.dataset import Sample  # pyright: ignore[reportMissingImports]
    from inspect_ai.model import ModelOutput, get_model  # pyright: ignore[reportMissingImports]

    bank = writing_bank(TEMPLATE, ["odd"], [ODD])
    model: Any = get_model("mockllm/model", custom_outputs=[ModelOutput.from_content("mockllm/model", "it is bad")])
    task = inspect_ai.Task(dataset=[Sample(input="the film is good")], scorer=inspect_scorer(bank))
    (log,) = inspect_ai.eval(task, model=model, log_dir=str(tmp_path), display="none")
    assert log.status == "success"
    (sample,) = log.samples
    (score,) = sample.scores.values()
    (row,) = score.metadata["messages"]
    assert row["message"] == 1
    assert score.value == {"odd": row["score"]}
    assert score.explanation == f"Message 1: odd {row['score']:.3g}, flagged after 1 token."
    assert row["score"] == pytest.approx(_scores(bank, bank.monitors, SAID[:2])[0]["score"], abs=1e-6)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lamina.errors.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"lamina\[inspect\]"):
        inspect_scorer(writing_bank(TEMPLATE, ["odd"], [ODD]))
    monkeypatch.undo()
    pytest.importorskip("inspect_ai", reason="needs inspect-ai (pip install lamina[inspect])")
    bank = writing_bank(TEMPLATE, ["odd"], [ODD])
    bank.drop_monitor("odd")
    with pytest.raises(ConfigError, match=r"inspect_scorer: there is no monitor"):
        inspect_scorer(bank)
