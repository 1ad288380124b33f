"""Requests that Schemathesis makes up from the server's own OpenAPI: none ends in a fault of the server or a hang."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
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
from tests.support.file_banks import PNG, WAV, hearing, in_base64, seeing
from tests.support.stored import tiny_bank

from lamina.serve import Settings, create_app

BANKS = {"image": (seeing, PNG), "audio": (hearing, WAV)}
KEY = {"authorization": "Bearer sesame"}
SECONDS = 20  # that one answer may take
CHECKS = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture  # each test has its own: when one ends, Schemathesis shuts the application down
def api(tmp_path: Path) -> Iterator[Any]:
    tiny_bank().save_pretrained(tmp_path / "bank")
    settings = Settings.of(admin_key="sesame")
    app = create_app(tiny_bank(), settings, source=str(tmp_path / "bank"), readers_root=tmp_path)
    yield schemathesis.openapi.from_asgi("/openapi.json", app)
    app.state.scheduler.close()


@pytest.fixture(params=["image", pytest.param("audio", marks=pytest.mark.full)])
def files_api(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A server of a bank that reads files; what its files are called in a request, and one of them."""
    build, file = BANKS[request.param]
    app = create_app(build())
    yield schemathesis.openapi.from_asgi("/openapi.json", app), request.param, file
    app.state.scheduler.close()


def with_files(case: Any, what: str, file: bytes) -> Any:
    """Requests for answers ask about a file of the bank's kind: whole as a rule, or cut, or with bytes changed."""
    drawn = random.Random(repr(case.body))
    if isinstance(case.body, dict) and "inputs" in case.body:
        at = drawn.randrange(len(file))
        changed = file[:at] + drawn.randbytes(4) + file[at + 4 :]
        sent = {what: in_base64(drawn.choice((file, file, file, file[:at], changed)))}
        case.body = {"inputs": drawn.choice((sent, [sent], [sent] * 2, []))}
    return case


def with_names(case: Any) -> Any:
    """Half of the requests that fit their description name a reader that is there."""
    if len(repr(case.body)) % 2:
        case.path_parameters = {key: {"version": "1"}.get(key, "mood") for key in case.path_parameters or {}}
        if isinstance(case.body, dict) and "tasks" in case.body:
            case.body["tasks"] = ["mood"]
    return case


def fuzz(
    api: Any, examples: int, change: Callable[[Any], Any] = with_names, *, only: str | None = None, every: int = 1
) -> Counter[tuple[str, int]]:
    """Ask one path in `every`, or `only` one, with requests that fit its description and others; count the answers."""
    seen: Counter[tuple[str, int]] = Counter()

    def ask(case: Any) -> None:
        start = time.perf_counter()
        seen[case.operation.path, case.call_and_validate(headers=KEY, checks=CHECKS).status_code] += 1
        assert time.perf_counter() - start < SECONDS

    once = settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for operation in [found.ok() for found in api.get_all_operations()][::every]:
        if only is not None and operation.path != only:
            continue
        fits = operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE).map(change)
        once(given(fits)(ask))()
        with suppress(Unsatisfiable):  # a path without parameters has no request that does not fit
            once(given(operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE))(ask))()
    return seen


@pytest.mark.long
def test_a_few_requests_of_each_path(api: Any):
    seen = fuzz(api, 3, every=6)
    assert min(sum(seen[at] for at in seen if at[1] == status) for status in (200, 422)) > 1, seen
    assert sum(seen.values()) > 10


@pytest.mark.long
def test_a_few_requests_with_files(files_api: Any):
    api, what, file = files_api
    seen = fuzz(api, 20, partial(with_files, what=what, file=file), only="/predict")
    assert min(seen["/predict", status] for status in (200, 422)) > 1, seen


@pytest.mark.full
def test_two_thousand_requests_with_files(files_api: Any):
    api, what, file = files_api
    assert sum(fuzz(api, 160, partial(with_files, what=what, file=file)).values()) >= 2_000


@pytest.mark.full
def test_ten_thousand_requests(api: Any):
    assert sum(fuzz(api, 800).values()) >= 10_000
