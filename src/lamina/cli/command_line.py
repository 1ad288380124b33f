"""The command `lamina`: its subcommands, its exit codes and error messages, and the logging of other libraries."""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
import ssl
import sys
import traceback
import warnings
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast

import typer
from typer.core import TyperCommand, TyperGroup

from lamina.cli.shared_options import Stream
from lamina.errors import ConfigError, LaminaError, StoreError, memory_errors
from lamina.utils import check_versions

if TYPE_CHECKING:
    from typer._click import Command, Context, HelpFormatter

SECTIONS = {  # heading in the help of `lamina` -> its commands
    "Begin": ("demo", "inspect"),
    "Train and use readers or whole models": ("train", "evaluate", "predict", "monitor", "serve", "export"),
    "Change layers": ("edit",),
    "Study layers and report results": ("study", "bench", "report"),
    "Keep hidden states": ("extract", "cache"),
}
COMMANDS = tuple(name for names in SECTIONS.values() for name in names)
_HINTS = {  # error number of the system -> what to do
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "Free disk space"),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR),
        "Check the path and its rights",
    ),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "Raise the limit of open files (ulimit -n)"),
}
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
    """A logging handler that prints each record on `sys.stderr`, even if that was replaced since."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record, with its traceback if it has one. Warnings and errors begin with "warning: "."""
        text = record.getMessage() if record.exc_info is None else self.format(record)  # with the traceback
        print("warning: " * (record.levelno >= logging.WARNING) + text, file=sys.stderr)


class Group(TyperGroup):
    """The command `lamina`, which runs one of its subcommands."""

    def main(self, *args: Any, **options: Any) -> object:  # noqa: ANN401
        """Run the subcommand that the arguments name, and end the process; click passes `args` and `options`.

        An error is printed as one line on standard error. The exit code is then 2 for an error of Lamina or of the
        system, such as a full disk, and 1 for any other. Standard output and error are wrapped in `Stream`.
        """
        log = sys.stderr or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  sys.stderr is None if it is closed
        with redirect_stderr(cast("TextIO", Stream(log, needed=False))):
            try:
                check_versions()
                if sys.stdout is None:
                    problem = "standard output is closed; results are printed there"
                    raise ConfigError(f"output: {problem}. Use > FILE or > /dev/null.")
                with redirect_stdout(cast("TextIO", Stream(sys.stdout, needed=True))):
                    try:
                        return super().main(*args, **options)
                    finally:
                        sys.stdout.flush()
            except Exception as error:
                if os.environ.get(DEBUG):
                    traceback.print_exc()
                known = system_error(error) or error
                print(f"error: {sentence(known)}", file=sys.stderr)
                sys.exit(2 if isinstance(known, LaminaError) else 1)

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write the subcommands into the help under the headings of `SECTIONS`, each with the start of its own help."""
        for section, names in SECTIONS.items():
            with formatter.section(section):
                commands = ((name, self.get_command(ctx, name)) for name in names)
                helps = [(name, (command.help if command else None) or "") for name, command in commands]
                formatter.write_dl([(name, " ".join(text.partition("\n\n")[0].split())) for name, text in helps])

    def invoke(self, ctx: Context) -> object:
        """Run the subcommand, and return its result.

        After Ctrl-C, print "interrupted", with a hint if the command has --resume, and end the process with code 130.
        """
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            can_resume = any(option.name == "resume" for option in getattr(command, "params", ()))
            hint = "; run the command with --resume to continue from what was saved"
            print("interrupted" + hint * can_resume, file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None


class Subcommand(TyperCommand):
    """A command of `lamina`. It refuses empty options and, except for `train`, several processes."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Parse the arguments into `ctx`; raise ConfigError if an option's value is empty."""
        values, _, _ = self.make_parser(ctx).parse_args(list(args))
        for option in self.params:
            value = values.get(str(option.name))
            if option.param_type_name == "option" and "" in (value if isinstance(value, list) else [value]):
                raise ConfigError(f"{self.name}: {option.opts[0]} is empty. Give it a value, or leave it out.")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Context) -> object:
        """Run the command. Raise ConfigError if `torchrun` started it in several processes, except for `train`."""
        count = int(os.environ.get("WORLD_SIZE") or 1) if "LOCAL_RANK" in os.environ else 1
        if count > 1 and self.name != "train":
            problem = f"it was started in {count} processes, each of which would do the same work"
            hint = "Run it without torchrun, or unset LOCAL_RANK."
            raise ConfigError(f"{self.name}: {problem}; only `lamina train` divides it. {hint}")
        return super().invoke(ctx)


def system_error(error: BaseException) -> StoreError | None:
    """Return an error of the system (a full disk, a missing permission, too many open files) as a StoreError.

    Returns None if neither `error` nor one of its causes is of these kinds, or `error` is a `LaminaError`.
    """
    if isinstance(error, LaminaError):
        return None
    cause: BaseException | None = error
    while cause is not None:
        # as libraries written in Rust say it
        number = re.search(r"\bos error (\d+)\b|\bcode: (\d+), kind: ", str(cause))
        code = cause.errno if isinstance(cause, OSError) else number and int(number[1] or number[2])
        if (hint := _HINTS.get(code or 0)) and not isinstance(cause, ConnectionError | socket.gaierror | ssl.SSLError):
            path = getattr(cause, "filename", None) or "a file"
            known = StoreError(
                f"files: {path} cannot be read or written ({os.strerror(code or 0)}). {hint}, and run it again."
            )
            for note in getattr(error, "__notes__", ()):
                known.add_note(note)
            return known
        cause = cause.__cause__
    return None


def sentence(error: Exception) -> str:
    """Return an error's message on one line, with the error's notes in brackets.

    For an error that is not a `LaminaError`, the text says that the error is unexpected, which class it has, and how to
    see the traceback.
    """
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    unexpected = f"unexpected {type(error).__name__}: {error}; set {DEBUG}=1 to see the traceback."
    return " ".join(f"{error if isinstance(error, LaminaError) else unexpected}{notes}".split())


def build() -> Command:
    """Build and return the command `lamina`, whose subcommands raise OutOfMemoryError if memory runs out."""
    app = typer.Typer(cls=Group, rich_markup_mode=None, no_args_is_help=True)
    app.callback()(lamina)
    for name in COMMANDS:
        command = getattr(import_module(f"lamina.cli.{name}_command"), name)
        app.command(name, cls=Subcommand)(memory_errors(name)(command))
    return typer.main.get_command(app)


def quiet() -> None:
    """Silence progress bars and warnings of other libraries, and print Lamina's warnings and errors.

    Call this before the libraries are imported: it sets environment variables that are not set yet, which also turn
    off parallel tokenisation and let waiting OpenMP threads sleep. Lamina's messages go to standard error, unless its
    logger has a handler. Python's warnings are off too, unless its option -W is set.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logger = logging.getLogger("lamina")
    if not logger.handlers:
        logger.addHandler(Warnings(logging.INFO))


def _show_version(requested: bool) -> bool:
    """Print the version of Lamina and exit with code 0 if --version was given; otherwise return False."""
    if requested:
        print(f"lamina {version('lamina')}")
        raise typer.Exit
    return requested


def lamina(
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Use what is inside a pretrained transformer: read, edit and study its layers.

    A reader is a small trained module that solves one task from the hidden states of a model. A bank is a set of
    readers that share one model, and so one pass of it. Layer 0 is the embeddings, layer i is block i.
    """
    del show_version
