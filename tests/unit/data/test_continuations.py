from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.support.causal import starting_tokenizer
from tests.support.marking import MARKS, letters
from tokenizers import PreTokenizedString, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lamina.data.continuations import reads_replies_apart
from lamina.data.encode import encode


def read_pair(tokenizer: PreTrainedTokenizerFast, first: str, second: str) -> tuple[str, str, list[str]]:
    """The tokens of a pair as text, those of the second text alone, and the characters that these stand for."""
    encoded = encode([(first, second)], tokenizer, max_length=64, windows=True)
    ids = encoded.batch([0], {})["input_ids"][0].tolist()
    (start, stop, _), *_ = encoded.token_ranges
    characters = [second[slice(*span)] for span in encoded.offsets[0][start:stop]]
    tokens = [token.replace("Ġ", "▁").replace("Ċ", "\n") for token in tokenizer.convert_ids_to_tokens(ids)]
    return "".join(tokens), "".join(tokens[start:stop]), characters


@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("mark", MARKS)
def test_a_reply_gets_no_mark_that_the_model_does_not_write(mark: str, starts: bool):
    tokenizer = letters(mark, starts=starts)
    before = tokenizer.backend_tokenizer.to_str()
    start = "<s>" * starts
    for second in (" red", ", or", "car", "\nA"):
        text = second.replace(" ", "▁")
        assert read_pair(tokenizer, "The", second) == (f"{start}▁The{text}", text, list(second))
    assert read_pair(tokenizer, "", "red")[:2] == (f"{start}▁red", "▁red")  # it begins the text, so it gets the mark
    assert tokenizer.backend_tokenizer.to_str() == before
    assert reads_replies_apart(tokenizer)


@pytest.mark.parametrize("mark", MARKS)
def test_the_tokens_of_a_reply_are_those_that_its_text_has_after_the_prompt(mark: str):
    tokenizer = letters(mark)
    for first, second in (("The", " red car"), ("So", ", or"), ("A\n", "B"), ("A ", "b"), ("a", "")):
        joined = tokenizer.convert_ids_to_tokens(tokenizer(first + second)["input_ids"])
        assert read_pair(tokenizer, first, second)[0] == "".join(joined).replace("Ġ", "▁").replace("Ċ", "\n")


def test_other_threads_can_use_the_tokenizer_meanwhile():
    tokenizer = letters("Prepend")
    pairs, expected = [("The", " red")] * 50, encode(["car"], tokenizer, max_length=64).token(0, 1)
    with ThreadPoolExecutor(2) as pool:
        reading = [pool.submit(encode, pairs, tokenizer, max_length=64, windows=True) for _ in range(30)]
        found = [encode(["car"], tokenizer, max_length=64).token(0, 1) for _ in range(300)]
        assert all(len(one.result()) == 50 for one in reading)
    assert set(found) == {expected}


def test_a_changed_tokenizer_is_read_as_it_is_now():
    tokenizer = letters("Metaspace")
    assert read_pair(tokenizer, "The", " red")[1] == "▁red"
    tokenizer.add_tokens(["red"])
    assert read_pair(tokenizer, "The", "red")[2] == ["red"]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([])
    assert read_pair(tokenizer, "The", "car")[0] == "<s>Thecar"


def test_a_step_that_is_written_in_python_adds_nothing():
    tokenizer = letters("Prepend")

    class Whole:
        def pre_tokenize(self, text: PreTokenizedString) -> None: ...

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Whole())
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(" ", "▁")
    assert read_pair(tokenizer, "The", " red")[0] == "<s>The▁red"


def test_texts_with_a_separator_between_them_keep_their_marks():
    tokenizer = letters("Metaspace")
    template = processors.TemplateProcessing("$A <s>", "$A ? $B <s>", special_tokens=[("<s>", 0), ("?", 6)])
    tokenizer.backend_tokenizer.post_processor = template
    assert read_pair(tokenizer, "The", "red")[:2] == ("▁The?▁red<s>", "▁red")
    assert not reads_replies_apart(tokenizer)


def test_a_reply_follows_its_prompt_without_another_start_token():
    tokenizer = starting_tokenizer()
    pairs = [("the film", "is good and slow"), ("", "is good")]
    encoded = encode(pairs, tokenizer, max_length=6, stride=1, windows=True)
    ids = encoded.batch(range(len(encoded)), {})["input_ids"]
    assert [tokenizer.decode(row[:5]) for row in ids[:3]] == [
        "<user> the film is good",
        "<user> the film good and",
        "<user> the film and slow",
    ]
    assert tokenizer.decode(ids[3][:3]) == "<user> is good"
    assert [tuple(run) for run in encoded.token_ranges] == [(3, 5, 0), (3, 5, 1), (3, 5, 2), (1, 3, 0)]
    assert [edge for edge in encoded.offsets[1] if edge != (0, 0)] == [(3, 7), (8, 11)]
