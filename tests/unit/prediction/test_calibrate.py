"""A monitor from spans to a stop: trained, calibrated, saved, streamed; and what cannot be calibrated."""

from __future__ import annotations

import copy
import math
import random
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tests.support.bad_spans import FLAGS, NEUTRAL, SPANS, fitted, spans, spans_task, whole_task
from tests.support.portions import one_in
from tests.support.stored import WORDS, tiny_tokenizer
from tests.support.tiny import FAMILIES
from transformers import LlamaConfig, LlamaForCausalLM

from lamina.bank import Reader, ReaderBank
from lamina.errors import ConfigError, NotFiniteError, UnknownNameError
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.mean import Mean
from lamina.fusion.single_layer import SingleLayer
from lamina.heads.token_classification import TokenClassification
from lamina.monitors import EMA, Cascade, LastScore, MeanScore, Monitor
from lamina.prediction import calibrate
from lamina.prediction.choose_cascade import choose_cascade
from lamina.prediction.train_monitor import score_replies
from lamina.tasks.task import Task
from lamina.train import fit


def plain_highest(bank: ReaderBank, monitor: Monitor, text: str) -> float:
    batch = tiny_tokenizer()(text, return_tensors="pt")
    mask = ~torch.isin(batch["input_ids"], torch.tensor(tiny_tokenizer().all_special_ids))
    scores = bank.monitor_scores(monitor, {"input_ids": batch["input_ids"]}, mask)
    return float(scores[mask].max())


@pytest.mark.parametrize("monitor", one_in(2, [SPANS, Monitor("whole", "bad", MeanScore(), scale="log_odds")]))
def test_the_rates_are_those_of_the_texts_one_by_one(monitor: Monitor):
    bank = fitted()
    found = calibrate(bank, monitor, whole_task(), positive="bad", false_positive_rate=0.05, store=False)
    facts, threshold = found.calibration, found.threshold
    assert facts is not None
    assert threshold is not None
    split = whole_task().split("validation")
    bad = whole_task().labels.index("bad")
    flags = [
        (label == bad, plain_highest(bank, monitor, text) >= threshold)
        for text, label in zip(split.texts, split.labels, strict=True)
    ]
    false = sum(flag for is_bad, flag in flags if not is_bad)
    true = sum(flag for is_bad, flag in flags if is_bad)
    assert (facts.negatives, facts.positives) == (60, 60)
    assert (facts.false_positive_rate, facts.recall) == (false / 60, true / 60)
    assert 2 <= false <= 3  # texts that begin alike may have the same highest score
    assert facts.false_positive_interval[0] < 0.05 < facts.false_positive_interval[1]
    assert (facts.task, facts.split, facts.target, facts.asked) == ("whole", "validation", 0.05, None)
    assert replace(found, threshold=None, calibration=None, sketch=None) == monitor
    assert bank.monitors == {}
    measured = calibrate(bank, monitor, whole_task(), positive="bad", split="train", threshold=threshold, store=False)
    assert measured.calibration is not None
    assert (measured.threshold, measured.calibration.target) == (threshold, None)
    assert measured.calibration.negatives + measured.calibration.positives == 60


def test_a_warning_names_the_train_split_and_an_untrained_reader(caplog: pytest.LogCaptureFixture):
    bank = fitted()
    calibrate(bank, SPANS, spans_task(), store=False, threshold=0.5)
    assert "train" not in caplog.text
    calibrate(bank, SPANS, spans_task(), store=False, threshold=0.5, split="train")
    assert "the texts are those of the train split" in caplog.text
    bank = ReaderBank(copy.deepcopy(bank.model), processor=tiny_tokenizer())
    bank.add("new", Reader(Mean(), TokenClassification(spans_task().labels, encoder_layers=0)))
    calibrate(bank, replace(SPANS, reader="new"), spans_task(), store=False, threshold=0.5)
    assert "calibrate: reader 'new' was not trained" in caplog.text


def test_a_text_with_a_tagged_word_is_positive():
    by_span = calibrate(fitted(), SPANS, spans_task(), false_positive_rate=0.05, store=False)
    by_text = calibrate(fitted(), SPANS, whole_task(), positive="bad", false_positive_rate=0.05, store=False)
    assert by_span.threshold == pytest.approx(by_text.threshold, abs=1e-6)
    assert by_span.calibration is not None
    assert by_span.calibration.recall > 0.9


def test_a_text_that_is_read_in_windows_has_the_highest_score_of_all(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fitted()["spans"], "info", {**fitted()["spans"].info, "max_length": 12, "stride": 0})
    texts = [[*words, *NEUTRAL, *NEUTRAL] for words in (["bad", "slow"], ["the", "a"])]
    rows = [{"words": words, "tags": ["B-bad" if word == "bad" else "O" for word in words]} for words in texts]
    task = Task.from_dataset("token_classification", {"train": rows, "validation": rows}, text="words", label="tags")
    threshold = plain_highest(fitted(), SPANS, "bad slow the a film") - 1e-3
    found = calibrate(fitted(), SPANS, task, positive="B-bad", threshold=threshold, store=False).calibration
    assert found is not None
    assert (found.recall, found.false_positive_rate) == (1.0, 0.0)


def test_special_tokens_are_not_scored_and_unknown_words_are():
    """The words of no vocabulary are a part of the text; the marks around it are not."""
    bank = fitted()
    rows = [{"words": ["zzz"] * (3 + row), "tags": ["O", "B-bad", "O"] + ["O"] * row} for row in range(2)]
    rows += [{"words": ["zzz", "film"], "tags": ["O", "O"]}] * 2
    parts = {"train": rows, "validation": rows}
    task = Task.from_dataset("token_classification", parts, text="words", label="tags", labels=spans_task().labels)
    found = calibrate(bank, Monitor("spans", FLAGS, LastScore()), task, false_positive_rate=0.5, store=False)

    def highest(text: str) -> float:  # between the two marks
        ids = tiny_tokenizer()(text, return_tensors="pt")["input_ids"]
        return float(bank.monitor_scores(Monitor("spans", FLAGS, LastScore()), {"input_ids": ids})[0, 1:-1].max())

    assert tiny_tokenizer()("zzz film")["input_ids"] == [2, 1, 6, 3]
    low, high = highest("zzz film"), min(highest("zzz zzz zzz"), highest("zzz zzz zzz zzz"))
    assert low < high
    assert found.threshold == pytest.approx((low + high) / 2, abs=1e-6)


def test_a_cascade_says_how_often_its_second_reader_ran():
    bank = fitted()
    first = calibrate(bank, Monitor("cheap", FLAGS, LastScore()), spans_task(), false_positive_rate=0.5, store=False)
    assert isinstance(first, Monitor)
    both = calibrate(bank, Cascade(first, SPANS), spans_task(), false_positive_rate=0.05, store=False)
    assert both.calibration is not None
    assert both.threshold == both.calibration.threshold
    assert 0 < (both.calibration.asked or 0) < 0.5
    assert both.calibration.recall > 0.8


def test_from_spans_to_a_stop(tmp_path: Path):
    """Train on spans, calibrate, save, load, stream: what is written is flagged and stopped by the saved threshold."""
    bank = fitted()
    calibrate(bank, replace(SPANS, name="bad words"), spans_task(), false_positive_rate=0.02)
    bank.save_pretrained(tmp_path)
    loaded = ReaderBank.from_pretrained(tmp_path, bank.model, tiny_tokenizer())
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "## Monitors" in card
    assert "\n| bad words | spans | B-bad, I-bad | 0." in card
    assert "60 texts) |" in card
    bank.drop_monitor("bad words")
    assert "Monitors" not in str(bank.generate_model_card())
    saved = loaded.monitors["bad words"]
    assert saved.calibration is not None
    assert saved.threshold == saved.calibration.threshold
    prompt = {"input_ids": torch.tensor([[2, 4]] * 4), "attention_mask": torch.ones(4, 2, dtype=torch.long)}
    bias = {(WORDS.index(word),): 3.0 for word in ("not", "slow")}
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": True, "sequence_bias": bias, "eos_token_id": 3}
    torch.manual_seed(1)
    plain = bank.model.generate(**prompt, **options)
    torch.manual_seed(1)
    steps = list(loaded.stream(loaded.model, prompt, stop=True, **options))
    written = torch.stack([step.tokens for step in steps], dim=1)
    final = steps[-1].flagged["bad words"]
    assert bool(final.any())
    for row in range(4):
        own = [step.index for step in steps if step.real[row]]
        assert torch.equal(written[row, own], plain[row, 2:][own])
        if len(own) == 1:  # nothing was read of it
            continue
        text = plain[row : row + 1, : len(own) + 1]
        before = loaded.monitor_scores(saved, {"input_ids": text}, torch.arange(text.shape[1])[None] >= 2)
        got = torch.stack([step.scores["bad words"][row] for step in steps[: len(own) - 1]])
        torch.testing.assert_close(got, before[0, 2:], rtol=0, atol=1e-5)
        assert bool(final[row]) is bool((got >= saved.threshold).any())


def test_training_a_reader_anew_takes_its_monitors_away():
    bank = fitted()
    config = bank["cheap"].config
    bank.add("again", config)
    calibrate(bank, Monitor("again", FLAGS), spans_task(), false_positive_rate=0.5)
    assert set(bank.monitors) == {"again"}
    fit(bank, {"again": spans_task()}, epochs=1, progress=False)
    assert bank.monitors == {}
    bank.remove("again")


@pytest.mark.parametrize(
    ("monitor", "given", "error", "told"),
    [
        (SPANS, {}, ConfigError, "there are 60 negatives for a false_positive_rate of 0.005; at least 200 are needed"),
        (SPANS, {"positive": "worse"}, UnknownNameError, "calibrate: unknown label 'worse'; known: B-bad, I-bad, O"),
        (SPANS, {"positive": ["B-bad", "O"]}, ConfigError, "no row is negative"),
        (SPANS, {"threshold": 0.5}, ConfigError, "false_positive_rate is set, but has no effect on a fixed threshold"),
        (SPANS, {"split": "test"}, UnknownNameError, "task spans: unknown split 'test'; known: train, validation"),
        (Monitor("none", FLAGS), {}, UnknownNameError, "calibrate: unknown reader 'none'; known: spans, cheap, whole"),
        (Monitor("spans", "bad"), {"positive": FLAGS}, UnknownNameError, "monitor 'spans': unknown label 'bad'"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(monitor: Monitor, given: Any, error: type[Exception], told: str):
    with pytest.raises(error, match=told):
        calibrate(fitted(), monitor, spans_task(), **{"false_positive_rate": 0.005, **given})


def test_a_decoder_beside_an_encoder_is_refused_before_the_texts_are_encoded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ReaderBank, "seal_base", None)
    for module in ("calibrate", "choose_cascade", "train_monitor"):
        monkeypatch.setattr(import_module(f"lamina.prediction.{module}"), "scoring_groups", None)
    bank = ReaderBank(FAMILIES["bart-Seq2SeqLM"].known(), tiny_tokenizer())
    bank.add("r", Reader(Mean(), TokenClassification(spans_task().labels, encoder_layers=0), "decoder"))
    with pytest.raises(ConfigError, match="calibrate: reader 'r' reads the decoder, and only the encoder"):
        calibrate(bank, Monitor("r", FLAGS, EMA()), spans_task())
    bank.add("s", Reader(Mean(), TokenClassification(("O", "B-bad", "I-bad"), encoder_layers=0), "decoder"))
    with pytest.raises(ConfigError, match="score_replies: reader 's' reads the decoder, and only the encoder"):
        score_replies(bank, Monitor("s", ("B-bad", "I-bad")), [("the film", "is good")])
    bank.add("e", Reader(SingleLayer(layer=0), TokenClassification(spans_task().labels, encoder_layers=0), "encoder"))
    with pytest.raises(ConfigError, match="choose_cascade: reader 'r' reads the decoder, and only the encoder"):
        choose_cascade(bank, Monitor("e", FLAGS), Monitor("r", FLAGS), spans_task(), recall=0.5)


def test_a_score_that_is_no_number_is_named():
    bank = fitted()
    bank.add("broken", bank["cheap"].config)
    with torch.no_grad():
        bank["broken"].head.output.bias.fill_(math.nan)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(
        NotFiniteError, match=r"calibrate: monitor 'broken' gives NaN for row .* of the validation part"
    ):
        calibrate(bank, Monitor("broken", FLAGS), spans_task(), false_positive_rate=0.05)
    both = Cascade(Monitor("broken", FLAGS, threshold=0.1), Monitor("cheap", FLAGS), name="both")
    with pytest.raises(NotFiniteError, match=r"calibrate: monitor 'both' gives NaN for row .* of the validation part"):
        calibrate(bank, both, spans_task(), false_positive_rate=0.05)
    bank.remove("broken")


def spanned(lost: int = 0, prompt: str | None = None) -> Task:
    """The same with spans as texts, of which every `lost` positive row's is not in it; perhaps after a prompt."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for seed, part in enumerate(("train", "validation")):
        rows = [(row["words"], [word for word in row["words"] if word not in NEUTRAL]) for row in spans(120, seed)]
        away = [bool(lost) and number % (2 * lost) == 1 for number in range(len(rows))]
        parts[part] = [
            {"prompt": prompt, "text": " ".join(words), "spans": ["not there"] if gone else found}
            for (words, found), gone in zip(rows, away, strict=True)
        ]
    columns = {"text": "text"} if prompt is None else {"text": "prompt", "text_pair": "text"}
    how: dict[str, Any] = {"label": "spans", "labels": spans_task().labels, "missing_labels": "ignore", **columns}
    return Task.from_dataset("token_classification", parts, **how)


def test_rows_without_labels_are_neither_positive_nor_negative():
    whole, some = (calibrate(fitted(), SPANS, spanned(lost), false_positive_rate=0.05, store=False) for lost in (0, 2))
    assert whole.calibration is not None
    assert some.calibration is not None
    assert (whole.calibration.negatives, whole.calibration.positives) == (60, 60)
    assert (some.calibration.negatives, some.calibration.positives) == (60, 30)
    assert some.threshold == whole.threshold


def test_of_pairs_the_text_that_is_tagged_counts_alone():
    for prompt in ("the film", "not bad"):
        found = calibrate(fitted(), SPANS, spanned(prompt=prompt), false_positive_rate=0.05, store=False).calibration
        assert found is not None
        assert found.recall > 0.9


def test_training_either_reader_of_a_cascade_removes_it():
    bank, task = copy.deepcopy(fitted()), whole_task()
    bank.keep_monitor(Cascade(Monitor("whole", "bad", threshold=0.4), SPANS, name="both"))
    bank.keep_monitor(Monitor("spans", "B-bad", name="other"))
    damaged = {"odd": 3, "first": {"first": "whole"}}  # what cannot be read stays, and hides nothing
    bank["spans"].info["monitors"].update(damaged)
    fit(bank, {"whole": task}, max_steps=1, progress=False)
    assert bank["spans"].monitors.keys() == {"other", *damaged}


@pytest.mark.parametrize(
    "options", [{}, {"per": "1000 tokens", "false_positive_rate": 8}, {"guarantee": True, "false_positive_rate": 0.12}]
)
def test_equal_highest_scores_that_use_up_less_than_half_of_the_rate_are_named(
    options: Any, caplog: pytest.LogCaptureFixture
):
    """Most of 99 negatives are the same text; one is higher, and the rate of 5 % allows 4 of them to be flagged."""
    bank = fitted()
    monitor = Monitor("whole", "bad", MeanScore())
    texts = sorted(
        ("not fun and slow paris", "the film is good", "a film is good"), key=lambda t: -plain_highest(bank, monitor, t)
    )
    rows = [(texts[0], "fine"), *[(texts[1], "fine")] * 90, *[(texts[2], "fine")] * 8, *[("not bad slow", "bad")] * 30]
    parts = {"validation": [{"text": text, "label": label} for text, label in rows]}
    task = Task.from_dataset("sequence_classification", parts, text="text", label="label", labels=("bad", "fine"))
    found = calibrate(bank, monitor, task, store=False, **{"false_positive_rate": 0.05, **options}).calibration
    assert found is not None
    assert found.false_positive_rate == 1 / 99
    assert ("the 99 negative texts have only 3 different contents or prompts" in caplog.text) is (
        "guarantee" in options
    )
    told = [record.getMessage() for record in caplog.records if "same highest score" in record.getMessage()]
    assert "flags 1 of 99 negative texts, and the rate allows at least 3. 90 texts" in told[0]
    calibrate(bank, monitor, task, store=False, false_positive_rate=0.011)
    calibrate(bank, monitor, task, store=False, threshold=found.threshold)
    assert len(told) == len([record for record in caplog.records if "same highest score" in record.getMessage()])


def test_a_guarantee_on_replies_to_one_prompt_is_warned_of(caplog: pytest.LogCaptureFixture):
    options: dict[str, Any] = {"false_positive_rate": 0.2, "store": False}
    calibrate(fitted(), SPANS, spans_task(), **options, guarantee=True)
    calibrate(fitted(), SPANS, spanned(prompt="the film"), **options)
    assert "independent" not in caplog.text
    calibrate(fitted(), SPANS, spanned(prompt="the film"), **options, guarantee=True)
    assert re.search(r"calibrate: the \d+ negative texts have only 1 different first texts; .* Keep one", caplog.text)


def written_by(attention: str, dtype: torch.dtype) -> ReaderBank:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    config = LlamaConfig(vocab_size=len(WORDS), initializer_range=0.2, attn_implementation=attention, **sizes)
    bank = ReaderBank(LlamaForCausalLM(config).eval().to(dtype), tiny_tokenizer())
    head = TokenClassification(("ok", "bad"), encoder_layers=0)
    bank.add("all", Reader(AdaLayers(dim=8), head, seed=3))
    return bank.eval()


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_the_rate_holds_under_another_attention_kernel_in_bfloat16(precision: Literal["bfloat16", "float32"]):
    """Texts share prefixes, and so highest scores; `calibrate` runs the float32 model in bfloat16 too."""
    rng = random.Random(2)
    words = [word for word in WORDS if word.isalpha()]
    prefixes = [" ".join(rng.choices(words, k=20)) for _ in range(6)]
    texts = [f"{rng.choice(prefixes)} {' '.join(rng.choices(words, k=rng.randint(1, 6)))}" for _ in range(100)]
    rows = [{"text": text, "label": "ok"} for text in texts]
    rows += [{"text": " ".join(rng.choices(words, k=12)), "label": "bad"} for _ in range(40)]
    parts = {"validation": rows}
    task = Task.from_dataset("sequence_classification", parts, text="text", label="label", labels=("ok", "bad"))
    monitor, options = Monitor("all", "bad", LastScore()), {"store": False, "precision": "bfloat16"}
    banks = [written_by(attention, getattr(torch, precision)) for attention in ("sdpa", "eager")]
    for rate in (0.05, 0.2):  # the most frequent prefix has 19 texts
        found = calibrate(banks[0], monitor, task, positive="bad", false_positive_rate=rate, **options)
        again = calibrate(banks[1], monitor, task, positive="bad", threshold=found.threshold, batch_size=8, **options)
        rates = [one.calibration.false_positive_rate for one in (found, again) if one.calibration is not None]
        assert rates == [0.0 if rate == 0.05 else 0.19] * 2
