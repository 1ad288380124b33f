"""The command line: parse, call, print. Nothing heavy loads before a command needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `lamina`; ends the process with 0, with 2 on input that cannot be used, or with 130 when interrupted.

    With 1 it ends where Lamina itself is at fault; LAMINA_DEBUG=1 shows the traceback of any error.
    """
    from lamina.cli.application import build, quiet

    quiet()
    build().main(args=arguments, prog_name="lamina")
