"""The command line: each command parses its arguments, calls the API and prints. torch loads only when needed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command `lamina` and end the process.

    The exit code is 0 on success, 2 for bad input, 130 after Ctrl-C, 141 if the output is a pipe that was closed, and 1
    for a bug in Lamina, a failed cell of a run or a useless monitor. With LAMINA_DEBUG=1 in the environment, the
    traceback of an error is printed too.

    Args:
        arguments: Words of the command line, without the program's name. None: the arguments of this process.
    """
    try:
        from lamina.cli.command_line import build, quiet

        quiet()
        build().main(args=arguments, prog_name="lamina")
    except KeyboardInterrupt:
        sys.exit(130)
