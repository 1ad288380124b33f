"""The page at `/`: one file that asks this server, and nothing else, as any other client does."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from typing import TYPE_CHECKING

from fastapi.responses import HTMLResponse

if TYPE_CHECKING:
    from fastapi import FastAPI

_ELSE = (
    "default-src 'none'",
    "connect-src 'self'",
    "img-src data: blob:",
    "media-src blob:",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
)


def add_page(app: FastAPI) -> None:
    """Add it to an application. It holds nothing of the bank, so it needs no key; what it asks does."""

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        html, policy = page_of()
        return HTMLResponse(html, headers={"Content-Security-Policy": policy})


@cache
def page_of() -> tuple[str, str]:
    """The page with its styles and scripts in it, and the policy under which only these run."""
    own, report = files("lamina.serve") / "static", files("lamina.report") / "templates"  # which it looks like
    css = "".join((folder / "page.css").read_text(encoding="utf-8") for folder in (report, own))
    early, js = (path.read_text(encoding="utf-8") for path in (report / "theme.js", own / "page.js"))
    html = (own / "page.html").read_text(encoding="utf-8")
    for name, text in {"version": version("lamina"), "css": css, "early": early, "js": js}.items():
        html = html.replace(f"{{{{{name}}}}}", text)
    return html, "; ".join([*_ELSE, f"style-src {_hash(css)}", f"script-src {_hash(early)} {_hash(js)}"])


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
