"""Make pages when the docs are built: the page of commands from what `--help` prints, and notebooks from pages."""

from __future__ import annotations

import re
from typing import Any

import jupytext
from mkdocs.structure.files import File, Files

INTRO = """# Commands

What `lamina COMMAND --help` prints. A command prints a table on a terminal and JSON with `--json`, shows progress on
long work, and ends with 0, or with 2 and one sentence where its input cannot be used; see [Errors](errors/index.md).
`lamina --install-completion` lets your shell complete commands and options.
"""
NOTEBOOKS = (  # pages that are a program from beginning to end
    "all.md",
    "extending.md",
    "files.md",
    "studies.md",
    "guides/a-million-texts.md",
    "guides/cutting.md",
    "guides/inserting.md",
    "guides/layers.md",
    "guides/live-monitor.md",
    "guides/one-pass.md",
    "guides/probe-my-csv.md",
    "guides/sweeps.md",
    "guides/three-columns.md",
    "guides/which-reader.md",
)
_PRINTED = re.compile(r"(?<=^```\n)\n```text\n.*?^```\n", re.DOTALL | re.MULTILINE)
_SHELL = re.compile(r"^```(sh|bash)\n", re.MULTILINE)
_FILE = re.compile(r'^```python title="(.*?)"\n', re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the page of commands, and the notebooks."""
    files.append(File.generated(config, "commands.md", content=commands()))
    for page in NOTEBOOKS:
        source = files.get_file_from_path(page)
        assert source is not None, f"there is no page {page}"  # noqa: S101
        files.append(File.generated(config, notebook_name(page), content=notebook(source.content_string)))
    return files


def on_page_markdown(markdown: str, page: Any, **_more: Any) -> str:
    """Link a page's notebook below its title."""
    if page.file.src_uri not in NOTEBOOKS:
        return markdown
    name = notebook_name(page.file.src_uri).rpartition("/")[2]
    title, rest = markdown.split("\n", 1)
    return f"{title}\n\n[As a notebook]({name})\n{rest}"


def commands() -> str:
    """A section per command, with its help."""
    from lamina.cli.command_line import COMMANDS, build

    named = build().commands  # pyright: ignore[reportAttributeAccessIssue]
    return "\n".join([INTRO, *(f"## {name}\n\n```text\n{_help(name, named[name])}\n```\n" for name in COMMANDS)])


def _help(name: str, command: Any) -> str:
    context = command.make_context(f"lamina {name}", [], resilient_parsing=True, terminal_width=100)
    return command.get_help(context).strip()


def notebook_name(page: str) -> str:
    """Where a page's notebook is."""
    return page.removesuffix(".md") + ".ipynb"


def notebook(markdown: str) -> str:
    """A page as a notebook: its Python as cells, without what they print."""
    saved = _FILE.sub(r"```python\n%%writefile \1\n", _PRINTED.sub("", markdown))
    saved = _SHELL.sub("```text\n", saved)  # to be read: they would be cells that run
    made = jupytext.reads(saved, fmt="md")
    made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return jupytext.writes(made, fmt="ipynb")
