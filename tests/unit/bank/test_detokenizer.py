from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.support.bytes_tokenizer import BYTES
from tests.support.stored import tiny_tokenizer

from lamina.bank.detokenizer import Detokenizer


def pieces_of(pieces: Detokenizer, ids: list[int]) -> list[str]:
    return [*(pieces.add(token) for token in ids), pieces.rest()]


@given(st.text("a \n\0\x7fß\u0301߿\u0800€\ufffd\U00010000🙂\U0010ffff", max_size=20))  # of one to four bytes
def test_pieces_of_whole_characters_join_to_the_text(text: str):
    pieces = Detokenizer(BYTES)
    told = pieces_of(pieces, BYTES(text)["input_ids"])
    assert "".join(told) == pieces.text == text


def test_a_character_of_several_tokens_comes_once_it_is_complete():
    ids = BYTES("a€b")["input_ids"]
    assert pieces_of(Detokenizer(BYTES), ids) == ["a", "", "", "€", "b", ""]
    assert pieces_of(Detokenizer(BYTES), ids[:3]) == ["a", "", "", "\ufffd"]


def test_the_first_word_after_a_prompt_keeps_its_space():
    tokenizer = tiny_tokenizer()
    prompt, text = (tokenizer(one, add_special_tokens=False)["input_ids"] for one in ("the film", "is good"))
    assert pieces_of(Detokenizer(tokenizer, prompt), text) == [" is", " good", ""]
    assert pieces_of(Detokenizer(tokenizer), text) == ["is", " good", ""]


def test_special_tokens_add_nothing_to_the_text():
    tokenizer = tiny_tokenizer()
    pieces = Detokenizer(tokenizer)
    end = tokenizer.sep_token_id
    film = tokenizer.convert_tokens_to_ids("film")
    assert (pieces.special_text(end), pieces.special_text(film)) == ("[SEP]", None)
    assert pieces_of(pieces, [film, end, film]) == ["film", "", " film", ""]
