"""The tokenizer of a saved bank: it comes back with the bank, and another one is refused with what differs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.portions import one_in
from tests.support.stored import WORDS, save_base, tiny_bank, tiny_model, tiny_tokenizer
from tokenizers import models, normalizers
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import ViTImageProcessor

from lamina import Task, evaluate, fit, predict
from lamina.bank import ReaderBank
from lamina.errors import BaseMismatchError, ConfigError, StoreError
from lamina.store import load, load_bank, save_bank
from lamina.store.processors import check_same_inputs, processor_facts

LONG = "anna " + "the film is very good and " * 8 + "bad"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_base(tmp_path / "base")


def bank_on(base: Path, change: Callable[[Any], object] = lambda _: None) -> ReaderBank:
    model, tokenizer = load(base)
    change(tokenizer)
    bank: Any = tiny_bank(model)  # pyright: ignore[reportArgumentType]
    bank.processor = tokenizer
    for name in bank:
        bank[name].info.pop("max_length", None)
    return bank.eval()


def left(tokenizer: Any) -> None:
    tokenizer.model_max_length, tokenizer.truncation_side = 8, "left"


def shorter(tokenizer: Any) -> None:
    tokenizer.model_max_length = 8


def special(tokenizer: Any) -> None:
    tokenizer.add_special_tokens({"additional_special_tokens": ["good"]})


def split(tokenizer: Any) -> None:
    tokenizer.split_special_tokens = True


def cased(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()


CHANGES = {
    "truncation_side": left,
    "model_max_length": shorter,
    "special tokens|added tokens": special,
    "normalizer": cased,
    "split_special_tokens": split,
}


@pytest.mark.parametrize("change", one_in(4, CHANGES.values()), ids=CHANGES)
def test_a_changed_tokenizer_comes_back_with_the_bank(change: Callable[[Any], object], base: Path, tmp_path: Path):
    bank = bank_on(base, change)
    expected = predict(bank, [LONG, "Anna is GOOD"])
    save_bank(bank, tmp_path / "bank")
    assert predict(load_bank(tmp_path / "bank"), [LONG, "Anna is GOOD"]) == expected
    assert predict(load_bank(tmp_path / "bank", load(base)[0]), [LONG, "Anna is GOOD"]) == expected


@pytest.mark.parametrize("what", one_in(2, CHANGES, 1))
def test_another_tokenizer_is_refused_with_what_differs(what: str, base: Path, tmp_path: Path):
    save_bank(bank_on(base), tmp_path / "bank")
    CHANGES[what](other := tiny_tokenizer())
    with pytest.raises(BaseMismatchError, match=f"another tokenizer: .*({what}) was"):
        load_bank(tmp_path / "bank", processor=other)
    load_bank(tmp_path / "bank", processor=tiny_tokenizer())


@pytest.mark.parametrize("what", one_in(4, CHANGES, 2))
def test_another_tokenizer_for_one_call_is_refused(what: str, base: Path):
    """It is compared whether the bank was loaded or made, at every call that can be passed one."""
    bank, other = bank_on(base), tiny_tokenizer()
    assert predict(bank, ["good"], processor=other) == predict(bank, ["good"])
    CHANGES[what](other := tiny_tokenizer())
    rows = [{"text": word, "label": word} for word in ("good", "bad") * 4]
    task = Task.from_dataset("sequence_classification", {"train": rows, "validation": rows}, text="text")
    bank.add("new", task)
    with pytest.raises(BaseMismatchError, match=f"^predict: .*another tokenizer: .*({what}) was"):
        predict(bank, ["good"], processor=other)
    with pytest.raises(BaseMismatchError, match=f"^evaluate: .*another tokenizer: .*({what}) was"):
        evaluate(bank, {"new": task}, processor=other)
    with pytest.raises(ConfigError, match=f"^fit: the bank's tokenizer, .* makes different inputs: .*({what}) is"):
        fit(bank, {"new": task}, processor=other, epochs=1, progress=False)


def test_a_tokenizer_that_changes_between_two_calls_is_refused(base: Path):
    bank, other = bank_on(base), tiny_tokenizer()
    predict(bank, ["good"], processor=other)
    other.add_tokens(["goodness"])
    with pytest.raises((BaseMismatchError, ConfigError), match=r"added tokens was|the tokenizer has ids up to"):
        predict(bank, ["good"], processor=other)


@pytest.mark.parametrize("what", one_in(3, CHANGES))
def test_a_tokenizer_that_was_changed_in_place_is_refused_until_the_bank_is_saved_with_it(
    what: str, base: Path, tmp_path: Path
):
    bank = bank_on(base)
    save_bank(bank, tmp_path / "bank")
    for known in (bank, load_bank(tmp_path / "bank")):
        known.processor.padding_side, known.processor.pad_token = "left", "[SEP]"  # padding is masked
        expected = predict(known, ["good"])
        CHANGES[what](known.processor)
        changed = rf"the tokenizer has changed since reader '\w+' was trained or loaded: .*({what}) is"
        with pytest.raises(ConfigError, match=f"^predict: {changed}"):
            predict(known, ["good"])
        with pytest.raises(ConfigError, match=f"^save: {changed}"):
            save_bank(known, tmp_path / "other")
        save_bank(known, tmp_path / "other", changed_base=True)
        assert [*predict(known, ["good"])[0]] == [*expected[0]]


def other_words(tokenizer: Any) -> None:
    words = {word: number for number, word in enumerate([*WORDS[:4], *reversed(WORDS[4:])])}
    tokenizer.backend_tokenizer.model = models.WordLevel(words, unk_token="[UNK]")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (other_words, "vocabulary"),
        (lambda tokenizer: setattr(tokenizer.backend_tokenizer.model, "unk_token", "bad"), "model"),
    ],
)
def test_a_vocabulary_of_the_same_size_is_noticed_in_place(
    change: Callable[[Any], object], what: str, base: Path, tmp_path: Path
):
    save_bank(bank := bank_on(base), tmp_path / "bank")
    predict(bank, ["good"])
    change(bank.processor)
    with pytest.raises(ConfigError, match=f"^predict: the tokenizer has changed since .*: {what} is"):
        predict(bank, ["good"])


def test_a_reader_belongs_to_the_tokenizer_with_which_it_was_trained(base: Path):
    bank, rows = bank_on(base), [{"text": word, "label": word} for word in ("good", "bad") * 4]
    task = Task.from_dataset("sequence_classification", {"train": rows, "validation": rows}, text="text")
    bank.add("new", task)
    predict(bank, ["good"])
    left(bank.processor)  # before any training
    fit(bank, {"new": task}, epochs=1, progress=False)
    predict(bank, ["good"])
    bank.processor.truncation_side = "right"
    with pytest.raises(ConfigError, match=r"^evaluate: .* reader 'new' .*: truncation_side is right, not left\."):
        evaluate(bank, {"new": task})


def test_another_vocabulary_is_refused(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_bank(bank_on(base), tmp_path / "bank")
    swapped = WORDS.copy()
    swapped[8], swapped[9] = swapped[9], swapped[8]
    monkeypatch.setattr("tests.support.stored.WORDS", swapped)
    with pytest.raises(BaseMismatchError, match="vocabulary was"):
        load_bank(tmp_path / "bank", processor=tiny_tokenizer())


def test_the_padding_side_does_not_count(base: Path, tmp_path: Path):
    bank = bank_on(base)
    save_bank(bank, tmp_path / "bank")
    other = tiny_tokenizer()
    other.padding_side = "left"
    assert predict(load_bank(tmp_path / "bank", processor=other), ["bad", LONG]) == predict(bank, ["bad", LONG])


def test_an_image_processor_counts_by_its_settings():
    assert processor_facts(ViTImageProcessor(size={"height": 8, "width": 8})) != processor_facts(ViTImageProcessor())
    assert processor_facts(ViTImageProcessor()) == processor_facts(ViTImageProcessor())


def test_files_of_a_tokenizer_are_replaced_with_the_bank(base: Path, tmp_path: Path):
    save_bank(bank_on(base), tmp_path / "bank")
    assert (tmp_path / "bank/processor/tokenizer.json").is_file()
    (tmp_path / "bank/notes.txt").write_text("mine")
    save_bank(ReaderBank(tiny_model()), tmp_path / "bank")  # without a tokenizer
    assert not (tmp_path / "bank/processor").exists()
    assert (tmp_path / "bank/notes.txt").read_text() == "mine"


@pytest.mark.parametrize("what", one_in(3, ["stacks", "fingerprint", "stack of a reader"]))
def test_a_manifest_without_fingerprints_is_damaged(what: str, base: Path, tmp_path: Path):
    save_bank(bank_on(base), tmp_path / "bank")
    path = tmp_path / "bank/lamina.json"
    fields = json.loads(path.read_text())
    if what == "stacks":
        fields["base"]["stacks"] = {}
    elif what == "fingerprint":
        del fields["base"]["stacks"]["main"]["fingerprint"]
    else:
        fields["base"]["stacks"] = {"encoder": fields["base"]["stacks"]["main"]}
    path.write_text(json.dumps(fields))
    with pytest.raises(StoreError, match="fingerprint"):
        load_bank(tmp_path / "bank")


def test_settings_of_the_base_are_compared(base: Path, tmp_path: Path):
    save_bank(bank_on(base), tmp_path / "bank")
    with pytest.raises(BaseMismatchError, match="hidden_act was gelu, here relu"):
        load_bank(tmp_path / "bank", tiny_model(hidden_act="relu"))  # pyright: ignore[reportArgumentType]
    model: Any = tiny_model()
    model.encoder.layer[0].output.LayerNorm.eps = 1.0
    with pytest.raises(BaseMismatchError, match=r"module 'encoder\.layer\.\*\.output\.LayerNorm' was"):
        load_bank(tmp_path / "bank", model)


def test_settings_that_changed_under_a_bank_are_found_when_saving(tmp_path: Path):
    model: Any = tiny_model()
    bank = tiny_bank(model)
    model.encoder.layer[0].output.LayerNorm.eps = 1.0
    with pytest.raises(ConfigError, match=r"eps of 'encoder\.layer\.0\.output\.LayerNorm' is 1\.0, not 1e-12"):
        save_bank(bank, tmp_path / "bank")
    save_bank(bank, tmp_path / "bank", changed_base=True)
    load_bank(tmp_path / "bank", model)


@pytest.mark.parametrize("grow", ["before the bank", "after the bank"])
def test_ids_beyond_the_embedding_table_are_an_error_with_numbers(grow: str):
    tokenizer, model = tiny_tokenizer(), tiny_model()
    if grow == "before the bank":
        tokenizer.add_tokens(["<deal>", "<nodeal>"])
        with pytest.raises(ConfigError, match=r"ids up to 21 \('<nodeal>'\); .* table has 20 rows, 0 to 19"):
            ReaderBank(model, processor=tokenizer)
        model.resize_token_embeddings(22)
        ReaderBank(model, processor=tokenizer)
    else:
        bank = tiny_bank(model)
        bank.processor = tokenizer
        predict(bank, ["bad"])
        tokenizer.add_tokens(["<deal>"])
        with pytest.raises(ConfigError, match="predict: the tokenizer has ids up to 20"):
            predict(bank, ["<deal>"])


class Ids:
    """The part of a tokenizer that says which ids it has."""

    def __init__(self, highest: int) -> None:
        self.highest = highest

    def __len__(self) -> int:
        return 1

    def get_vocab(self) -> dict[str, int]:
        return {"a": self.highest}


def test_a_tokenizer_is_checked_though_one_that_is_gone_had_its_place_in_memory():
    bank: Any = tiny_bank(tiny_model())
    bank.check_ids("work", Ids(19))
    with pytest.raises(ConfigError, match="work: the tokenizer has ids up to 20"):
        bank.check_ids("work", Ids(20))


class Joint:
    """A processor that joins a tokenizer and an image processor, as CLIP's does."""

    def __init__(self, tokenizer: Any, image_processor: Any) -> None:
        self.tokenizer, self.image_processor = tokenizer, image_processor


def test_the_parts_that_two_processors_both_have_are_compared():
    small: Any
    large: Any
    small, large = ViTImageProcessor(size={"height": 8, "width": 8}), ViTImageProcessor(size={"height": 9, "width": 9})
    joint: Any = Joint(tiny_tokenizer(), small)
    joint_large: Any = Joint(tiny_tokenizer(), large)
    for known, passed in ((small, large), (joint, large), (large, joint), (joint, joint_large)):
        with pytest.raises(BaseMismatchError, match="image processor"):
            check_same_inputs("predict", known, passed)
    for known, passed in ((joint, small), (joint, tiny_tokenizer()), (small, tiny_tokenizer())):
        check_same_inputs("predict", known, passed)
    joint.image_processor.size = large.size  # changed in place after it was compared
    with pytest.raises(BaseMismatchError, match="image processor"):
        check_same_inputs("predict", joint, ViTImageProcessor(size={"height": 8, "width": 8}))


def test_other_readers_and_a_new_training_go_on_after_a_change(base: Path):
    bank, rows = bank_on(base), [{"text": word, "label": word} for word in ("good", "bad") * 4]
    task = Task.from_dataset("sequence_classification", {"train": rows, "validation": rows}, text="text")
    bank.add("old", task)
    fit(bank, {"old": task}, epochs=1, progress=False)
    bank.processor.model_max_length = 10**6  # the reader has recorded its own
    predict(bank, ["good"], readers=["old"])
    left(bank.processor)
    bank.add("new", task)
    predict(bank, ["good"], readers=["new"])
    with pytest.raises(ConfigError, match=r"^predict: .* reader 'old' .*: truncation_side is left, not right"):
        predict(bank, ["good"], readers=["old"])
    fit(bank, {"old": task}, epochs=1, progress=False)
    predict(bank, ["good"], readers=["old"])


def test_a_tokenizer_with_a_step_in_python_is_trained_and_read_with(base: Path):
    class Step:
        def pre_tokenize(self, pretok: Any) -> None:
            pretok.split(lambda _, text: [text])

    bank, rows = bank_on(base), [{"text": word, "label": word} for word in ("good", "bad") * 4]
    task = Task.from_dataset("sequence_classification", {"train": rows, "validation": rows}, text="text")
    bank.add("new", task)
    bank.processor.backend_tokenizer.pre_tokenizer = PreTokenizer.custom(Step())
    fit(bank, {"new": task}, epochs=1, progress=False)
    assert predict(bank, ["good"], readers=["new"])[0]["new"]["label"] in ("good", "bad")
