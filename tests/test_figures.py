"""Figures in README and docs: each stands beside the command that printed it, and what the command names is there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from lamina.cli.command_line import build

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FIGURE = re.compile(
    r"(?<![\w.])(?<![A-Za-z]-)\d*\.\d+(?![\w.]*\w)|^!\[", re.MULTILINE
)  # a number with decimals, or a picture
COMMAND = re.compile(r"\b(?:lamina|python|make) [a-z][^`\n]*")
NAMED = re.compile(r"\b(?:recipes|benchmarks)/[\w./-]+")


class Section(NamedTuple):
    """From one heading to the next: what is shown (text, tables, what a command printed), and what is to be typed."""

    heading: str
    shown: str
    typed: str


@cache
def sections(page: str) -> list[Section]:
    parts: list[tuple[str, list[str], list[str]]] = [("", [], [])]
    fence, before = None, ""  # of the block that is open, and of the one right above
    for line in page.splitlines():
        if line.lstrip().startswith("```"):
            opens = line.lstrip()[3:]
            if fence is None and opens == "text" and before.startswith("python"):
                opens = "printed"  # by the block above, which tests/end_to_end/test_docs.py holds against it
            fence, before = (opens, before) if fence is None else (None, fence)
            continue
        if fence is None and line.strip():
            before = ""
        if fence is None and line.startswith("#"):
            parts.append((line, [], []))
        elif fence in (None, "text"):
            parts[-1][1].append(re.sub(r"`[^`]*`|\]\([^)]*\)", "", line))  # without code and addresses
            parts[-1][2].extend(re.findall(r"`([^`]*)`", line))
        elif fence == "sh":
            parts[-1][2].append(line)
    return [Section(heading, "\n".join(shown), "\n".join(typed)) for heading, shown, typed in parts]


def without_command(page: str) -> list[str]:
    """Headings of the sections that show figures, and name no command that could have printed them."""
    return [part.heading for part in sections(page) if FIGURE.search(part.shown) and not COMMAND.search(part.typed)]


@cache
def known_words() -> dict[str, set[str]]:
    """Return the subcommands of each program."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return {"lamina": set(build().commands), "make": set(targets)}


def unknown_commands(page: str) -> list[str]:
    """Commands of a page whose subcommand, make target, recipe or benchmark is not there."""
    wrong = []
    for command in COMMAND.findall("\n".join(part.typed for part in sections(page))):
        program, word = command.split()[:2]
        files = [name.rstrip("/.") for name in NAMED.findall(command)]
        if word not in known_words().get(program, {word}) or not all((ROOT / name).exists() for name in files):
            wrong.append(command)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_figures_stand_beside_a_command_that_is_there(page: Path):
    text = page.read_text(encoding="utf-8")
    assert without_command(text) == []
    assert unknown_commands(text) == []


def test_verdicts_are_in_words_that_the_page_defines():
    page = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    words = re.findall(r"^- \*\*(.+?)\*\*: ", page, re.MULTILINE)
    verdicts = [line.split("|")[-2].strip() for line in page.splitlines() if re.match(r"\| (?!claim |-)", line)]
    assert len(words) == 5
    assert len(verdicts) > 20
    assert [verdict for verdict in verdicts if not any(word in verdict for word in words)] == []


def test_what_is_missing_is_found():
    bare = "# Scores\n\n| task | score |\n|---|---|\n| mood | .91 |\n"
    assert without_command(bare) == ["# Scores"]
    assert without_command(bare + "\nPrinted by `make demo`.\n") == []
    assert without_command("# Scores\n`make demo`\n## More\n![Curve](images/curve.png)\n") == ["## More"]
    printed = "# Scores\n```python\nprint(1.5)\n```\n\n```text\n1.5\n```\n"
    assert without_command(printed) == []
    assert (
        without_command(printed + "\n```text\n2.5\n```\n")
        == without_command("# Scores\n```text\n1.5\n```\n")
        == ["# Scores"]
    )
    typed = "`lamina train recipes/none.yaml`, `python benchmarks/none.py`, `lamina fly OUT`, `make tea`, `make demo`"
    assert unknown_commands(typed) == [part.strip("`") for part in typed.split(", ")[:4]]
