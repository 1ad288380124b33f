"""Requests that Schemathesis makes up from the server's own OpenAPI: none ends in a fault of the server or a hang."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.support.stored import tiny_bank

from lamina.serve import Settings, create_app

KEY = {"authorization": "Bearer sesame"}
SECONDS = 20  # that one answer may take
CHECKS = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("fuzzed")
    tiny_bank().save_pretrained(folder / "bank")
    app = create_app(tiny_bank(), Settings.of(admin_key="sesame"), source=str(folder / "bank"), readers_root=folder)
    yield schemathesis.openapi.from_asgi("/openapi.json", app)
    app.state.engine.close()


def with_names(case: Any) -> Any:
    """Half of the requests that fit their description name a reader that is there."""
    if len(repr(case.body)) % 2:
        case.path_parameters = {key: {"version": "1"}.get(key, "mood") for key in case.path_parameters or {}}
        if isinstance(case.body, dict) and "tasks" in case.body:
            case.body["tasks"] = ["mood"]
    return case


def fuzz(api: Any, examples: int) -> dict[int, int]:
    """Ask each path, with requests that fit its description and with some that do not; status -> how often it came."""
    seen: Counter[int] = Counter()

    def ask(case: Any) -> None:
        start = time.perf_counter()
        seen[case.call_and_validate(headers=KEY, checks=CHECKS).status_code] += 1
        assert time.perf_counter() - start < SECONDS

    once = settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for operation in (found.ok() for found in api.get_all_operations()):
        fits = operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE).map(with_names)
        once(given(fits)(ask))()
        with suppress(Unsatisfiable):  # a path without parameters has no request that does not fit
            once(given(operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE))(ask))()
    return dict(seen)


def test_a_few_requests_of_each_path(api: Any):
    seen = fuzz(api, 10)
    assert min(seen[200], seen[422]) > 30, seen
    assert sum(seen.values()) > 150


@pytest.mark.full
def test_ten_thousand_requests(api: Any):
    assert sum(fuzz(api, 800).values()) >= 10_000
