"""Fixtures of pages in a real browser; `address` serves the fixture `bank` of the module that asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.browser import chromium
from tests.support.serving import served

from lamina.bank import ReaderBank


@pytest.fixture(scope="module")
def address(bank: ReaderBank) -> Iterator[str]:
    with served(bank) as address:
        yield address


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("chromium") / "profile") as driver:
        yield driver
