"""The application: its commands, how their errors end, and what other libraries may say meanwhile."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from lamina.errors import LaminaError

COMMANDS = ("inspect", "train", "evaluate", "predict", "edit", "cache", "demo")
INTERRUPTED = 130  # what a shell gives a command that was ended from the keyboard

_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "DATASETS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads sleep; spinning ones stall each other where cores are shared
}


class Group(TyperGroup):
    """Ends with one sentence and an exit code where the input cannot be used."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except LaminaError as error:
            print(f"error: {sentence(error)}", file=sys.stderr)
            raise typer.Exit(2) from error
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None


def sentence(error: LaminaError) -> str:
    """An error's message on one line, with the notes that were added on its way."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return " ".join(f"{error}{notes}".split())


def build() -> Any:
    """Make the command `lamina` with all its commands."""
    app = typer.Typer(cls=Group, rich_markup_mode=None, add_completion=False, no_args_is_help=True)
    app.callback()(lamina)
    for name in COMMANDS:
        app.command(name)(getattr(import_module(f"lamina.cli.{name}"), name))
    return typer.main.get_command(app)


def quiet() -> None:
    """Keep other libraries' progress and advice off the terminal; Lamina's own warnings stay, a line each.

    What the environment sets already is left as it is.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logger = logging.getLogger("lamina")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("warning: %(message)s"))
        handler.setLevel(logging.WARNING)
        logger.addHandler(handler)


def _show_version(wanted: bool) -> bool:
    if wanted:
        print(f"lamina {version('lamina')}")
        raise typer.Exit
    return wanted


def lamina(
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and end.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Use what is inside a pretrained transformer: read, edit and study its layers."""
    del show_version
