"""The application: its commands, exit codes and error messages, and the logging of other libraries."""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from lamina.cli.output import Stream
from lamina.errors import ConfigError, LaminaError, memory_errors

SECTIONS = {
    "Begin": ("demo", "inspect"),
    "Train and use readers or whole models": ("train", "evaluate", "predict", "serve", "export"),
    "Change layers": ("edit",),
    "Study layers, and report": ("study", "report"),
    "Keep house": ("cache",),
}
COMMANDS = tuple(name for names in SECTIONS.values() for name in names)
DEBUG = "LAMINA_DEBUG"  # environment variable; any value shows tracebacks
INTERRUPTED = 130  # exit code of a command that was interrupted with Ctrl-C

_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "DATASETS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads sleep; threads that spin would slow each other down on shared cores
}


class Warnings(logging.Handler):
    """A logging handler that prints each record to the current standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record on a line; warnings and errors begin with "warning: "."""
        text = record.getMessage() if record.exc_info is None else self.format(record)  # with the traceback
        print("warning: " * (record.levelno >= logging.WARNING) + text, file=sys.stderr)


class Group(TyperGroup):
    """The group of all commands. An error ends it with one sentence and exit code 2 (bad input) or 1 (a bug)."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command in the arguments and end the process."""
        log = sys.stderr or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  sys.stderr is None if it is closed
        with redirect_stderr(cast("Any", Stream(log, needed=False))):
            try:
                if sys.stdout is None:
                    raise ConfigError("output: standard output is closed; answers go there. Use > FILE or > /dev/null.")
                with redirect_stdout(cast("Any", Stream(sys.stdout, needed=True))):
                    try:
                        return super().main(*args, **options)
                    finally:
                        sys.stdout.flush()
            except Exception as error:
                if os.environ.get(DEBUG):
                    traceback.print_exc()
                print(f"error: {sentence(error)}", file=sys.stderr)
                sys.exit(2 if isinstance(error, LaminaError) else 1)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands by purpose, each with the first paragraph of its help."""
        for section, names in SECTIONS.items():
            with formatter.section(section):
                helps = [(name, cast("Any", self.get_command(ctx, name)).help) for name in names]
                formatter.write_dl([(name, " ".join(text.partition("\n\n")[0].split())) for name, text in helps])

    def invoke(self, ctx: Any) -> Any:
        """Run the command; Ctrl-C ends it with exit code 130 and says whether --resume can continue it."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            goes_on = any(option.name == "resume" for option in getattr(command, "params", ()))
            print("interrupted" + "; with --resume it goes on from what was saved" * goes_on, file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None


def sentence(error: Exception) -> str:
    """Return an error as one line with its notes; an error that Lamina did not expect is called unforeseen."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    unforeseen = f"unforeseen {type(error).__name__}: {error}; {DEBUG}=1 shows where it came from."
    return " ".join(f"{error if isinstance(error, LaminaError) else unforeseen}{notes}".split())


def build() -> Any:
    """Build and return the command `lamina` with all its subcommands."""
    app = typer.Typer(cls=Group, rich_markup_mode=None, no_args_is_help=True)
    app.callback()(lamina)
    for name in COMMANDS:
        command = getattr(import_module(f"lamina.cli.{name}"), name)
        app.command(name)(memory_errors(name)(command))
    return typer.main.get_command(app)


def quiet() -> None:
    """Silence the progress bars and warnings of other libraries; print each warning of Lamina on a line.

    Environment variables that are already set are not changed.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logger = logging.getLogger("lamina")
    if not logger.handlers:
        logger.addHandler(Warnings(logging.INFO))


def _show_version(wanted: bool) -> bool:
    """Print the version and exit if --version was given; otherwise return False."""
    if wanted:
        print(f"lamina {version('lamina')}")
        raise typer.Exit
    return wanted


def lamina(
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Use what is inside a pretrained transformer: read, edit and study its layers."""
    del show_version
