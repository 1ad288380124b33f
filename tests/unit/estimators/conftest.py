"""A model on disk, texts and labels."""

from __future__ import annotations

import pytest
from tests.support.training import tiny_model, tiny_tokenizer

GOOD = ["the film is good", "a good fun film", "it was very good", "we was fun and good"]
BAD = ["the film is bad", "a slow bad film", "it was very bad", "we was slow and bad"]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("base")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def texts() -> list[str]:
    return [text for both in zip(GOOD, BAD, strict=True) for text in both]


@pytest.fixture
def mood() -> list[str]:
    return ["good", "bad"] * 4
