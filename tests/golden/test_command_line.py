"""The commands of `lamina`, their arguments and options: what scripts rely on.

To accept a change, run this file: `python -m tests.golden.test_command_line`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lamina.cli import command_line as app

GOLDEN = Path(__file__).with_name("command_line.json")


def commands() -> dict[str, dict[str, list[str]]]:
    """Command -> "arguments" and "options", those that must be given with a "!" behind."""
    return {name: {kind: _params(command, kind) for kind in ("arguments", "options")} for name, command in _all()}


def _all() -> list[tuple[str, Any]]:
    root = app.build()
    return [("lamina", root), *root.commands.items()]


def _params(command: Any, kind: str) -> list[str]:
    found = [param for param in command.params if (param.param_type_name == "argument") == (kind == "arguments")]
    return [" ".join([*param.opts, *param.secondary_opts]) + "!" * param.required for param in found]


def test_commands_and_options():
    assert commands() == json.loads(GOLDEN.read_text(encoding="utf-8"))


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(commands(), indent=2) + "\n", encoding="utf-8")
