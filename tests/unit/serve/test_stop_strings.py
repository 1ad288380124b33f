from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.serve.generation.routes import StopStrings


@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_a_text_is_cut_before_a_stop_string_however_it_is_divided(parts: list[str], stops: list[str]):
    text, shown, stop_text = "".join(parts), "", StopStrings(stops)
    for part in parts:
        shown += stop_text.add(part)
        assert text.startswith(shown)
    assert stop_text.stopped is any(stop in text for stop in stops)
    shown += stop_text.rest()
    if stop_text.stopped:
        assert any(text.startswith(stop, len(shown)) for stop in stops)
    else:
        assert shown == text


@pytest.mark.parametrize(("stop", "shown"), [("bc", ["a", "", ""]), ("xy", ["a", "b", "c"])])
def test_text_that_may_begin_a_stop_string_is_held_back(stop: str, shown: list[str]):
    stop_text = StopStrings([stop])
    assert [stop_text.add(part) for part in "abc"] == shown
