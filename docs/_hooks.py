"""What the docs take from the code when they are built: the page of commands is what `--help` prints."""

from __future__ import annotations

from typing import Any

from mkdocs.structure.files import File, Files

INTRO = """# Commands

What `lamina COMMAND --help` prints. A command prints a table on a terminal and JSON with `--json`, shows progress on
long work, and ends with 0, or with 2 and one sentence where its input cannot be used; see [Errors](errors/index.md).
`lamina --install-completion` lets your shell complete commands and options.
"""


def on_files(files: Files, config: Any) -> Files:
    """Add the page of commands."""
    files.append(File.generated(config, "commands.md", content=commands()))
    return files


def commands() -> str:
    """A section per command, with its help."""
    from lamina.cli.app import COMMANDS, build

    named = build().commands
    return "\n".join([INTRO, *(f"## {name}\n\n```text\n{_help(name, named[name])}\n```\n" for name in COMMANDS)])


def _help(name: str, command: Any) -> str:
    context = command.make_context(f"lamina {name}", [], resilient_parsing=True, terminal_width=100)
    return command.get_help(context).strip()
