"""The page at `/`: a single file. It sends requests to its own server, by the same paths as other clients."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import PurePath
from typing import TYPE_CHECKING

from fastapi.responses import HTMLResponse

from lamina.layers.types import tokenizer_of
from lamina.serve.uploads import TEXT, medium_of
from lamina.tasks import kind_of
from lamina.tasks.masked_lm import MaskedLMKind

if TYPE_CHECKING:
    from fastapi import FastAPI

    from lamina.bank import ReaderBank
    from lamina.bank.reader import ReaderModule
    from lamina.serve.settings import Example

_POLICY = (
    "default-src 'none'",
    "connect-src 'self'",
    "img-src data: blob:",
    "media-src blob:",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
)
_TEXTS: tuple[Example, ...] = (
    "The pasta was not bad at all, but the waiter forgot us twice.",
    "Maria Lopez flew from Lisbon to Berlin on Monday.",
    "Turn the key twice before you open the door.",
)
_PAIRS: tuple[Example, ...] = (
    ("A man is playing a guitar.", "Somebody makes music."),
    ("The train left at noon.", "The train did not leave."),
    ("How do I renew my passport?", "Where can a passport be renewed?"),
)
_GAP = "Maria flew to {mask} on Monday."


def add_page(app: FastAPI) -> None:
    """Add the route `/`, a page for trying the readers. It needs no key, since it holds no data of the bank."""

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        html, policy = page_of()
        return HTMLResponse(html, headers={"Content-Security-Policy": policy})


@cache
def page_of() -> tuple[str, str]:
    """Return the page's HTML with styles and scripts inside, and the security policy that allows only these."""
    # The report's styles come first: both pages look alike, and this page's own rules override them.
    static, report = files("lamina.serve") / "static", files("lamina.report") / "templates"
    css = "".join((folder / "page.css").read_text(encoding="utf-8") for folder in (report, static))
    early, writer, page = (
        path.read_text(encoding="utf-8") for path in (report / "theme.js", static / "write.js", static / "page.js")
    )
    js = writer + page
    html = (static / "page.html").read_text(encoding="utf-8")
    for name, text in {"version": version("lamina"), "css": css, "early": early, "js": js}.items():
        html = html.replace(f"{{{{{name}}}}}", text)
    return html, "; ".join([*_POLICY, f"style-src {_hash(css)}", f"script-src {_hash(early)} {_hash(js)}"])


def _hash(text: str) -> str:
    """Return the SHA-256 of a style or script in the form that a Content-Security-Policy uses to allow it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def default_title(bank: ReaderBank, name: str) -> str:
    """Return the page's title for a bank: `name`, and the last part of its model's name (or else the model's type)."""
    model = PurePath(bank.model.name_or_path or "").name or bank.model.config.model_type
    return f"{name} on {model}"


def learnt_pairs(reader: ReaderModule) -> bool | None:
    """Return whether a reader was trained on pairs, or compares two texts anyway; None if this was not recorded."""
    if reader.config.fusion.reads_pairs:  # the fusion compares two texts, and can do nothing else
        return True
    pair = reader.info.get("pair")
    return None if pair is None else bool(pair)


def default_examples(bank: ReaderBank) -> tuple[Example, ...]:
    """Return three examples for the page that fit the bank's tasks; () if no task reads text.

    All examples are pairs if all tasks were trained on pairs; the last one is a pair if only some tasks were. If a task
    fills in mask tokens, one example has the tokenizer's mask token.
    """
    readers = [bank[task] for task in bank if medium_of(bank, task) == TEXT]
    if not readers:
        return ()
    with_pairs = [reader for reader in readers if learnt_pairs(reader)]
    if len(with_pairs) == len(readers):
        return _PAIRS
    first, second, third = _TEXTS
    if with_pairs:
        third = _PAIRS[0]
    mask = tokenizer_of(bank.processor).mask_token
    if mask is not None and any(isinstance(kind_of(reader.config.head.kind), MaskedLMKind) for reader in readers):
        second = _GAP.format(mask=mask)
    return first, second, third
