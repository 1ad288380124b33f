"""The command line: parse, call, print. Nothing heavy loads before a command needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command `lamina` and end the process.

    The exit code is 0 on success, 2 for bad input, 130 after Ctrl-C, and 1 for an error in Lamina itself.
    LAMINA_DEBUG=1 shows the traceback of any error.

    Args:
        arguments: The command line without the program's name; None: that of the process.
    """
    from lamina.cli.application import build, quiet

    quiet()
    build().main(args=arguments, prog_name="lamina")
