from __future__ import annotations

import errno
import io
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from lamina.cli import command_line as app
from lamina.cli import main
from lamina.errors import ConfigError, LaminaError


def test_without_arguments_it_says_how(lamina):
    ran = lamina()
    assert ran.code == 2
    assert "Usage: lamina" in ran.out + ran.err


def test_the_package_runs_as_the_command():
    ran = subprocess.run([sys.executable, "-m", "lamina", "inspec"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "No such command 'inspec'. Did you mean 'inspect'?" in ran.stderr


def test_help_names_every_command(lamina):
    ran = lamina("--help")
    assert ran.code == 0
    assert all(f"\n  {name} " in ran.out for name in app.COMMANDS)


def test_help_says_in_whole_sentences_what_commands_do(lamina):
    told = " ".join(lamina("--help").out.split())
    assert "..." not in told.partition("Begin:")[2]
    assert (
        "Train the readers of a recipe, all in one pass of the model, or fine-tune the model once per method." in told
    )


def test_a_shell_completes_commands_and_options():
    """The program ends after each answer, so that one process that catches this asks twice."""
    code = """
import os, sys
from lamina.cli import main
sys.argv[0], os.environ["_LAMINA_COMPLETE"] = "lamina", "complete_bash"
for typed in ("lamina pre", "lamina predict --sk"):
    os.environ.update(COMP_WORDS=typed, COMP_CWORD=str(len(typed.split()) - 1))
    try:
        main()
    except SystemExit:
        print("|")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    commands, options, _ = ran.stdout.split("|")
    assert "predict" in commands.split()
    assert "--skip-bad" in options.split()


def test_version(lamina):
    from importlib.metadata import version

    assert lamina("--version").out == f"lamina {version('lamina')}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspec",), "No such command 'inspec'. Did you mean 'inspect'?"),
        (("inspect",), "Missing argument 'MODEL'"),
        (("inspect", "x", "--jso"), "No such option: --jso"),
        (("predict", "x", "--batch-size", "0"), "Invalid value for '--batch-size'"),
        (("demo", "--seed", str(1 << 63)), "Invalid value for '--seed'"),
        (("evaluate", "x"), "give either FILE, which every reader is scored on, or --task READER=TASK"),
    ],
)
def test_usage_errors_end_with_2(lamina, arguments: tuple[str, ...], message: str):
    ran = lamina(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("predict", "x", "--text", ""), "--text"),
        (("bench", "probes", "--sets", "87", "--sets="), "--sets"),
        (("demo", "-o", ""), "--output"),
    ],
)
def test_an_empty_option_is_no_default(lamina, arguments: tuple[str, ...], option: str):
    ran = lamina(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == f"error: {arguments[0]}: {option} is empty. Give it a value, or leave it out.\n"
    assert lamina("predict", "", "", "--text", "a").err.startswith("error: predict: --text was given without --file")


def test_torchrun_is_for_training(lamina, monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    ran = lamina("inspect", "x")
    assert (ran.code, ran.out) == (2, "")
    assert (
        "inspect: it was started in 2 processes, each of which would do the same work; only `lamina train`" in ran.err
    )
    ran = lamina("train", "x.yaml")
    assert ("x.yaml" in ran.err, "processes" in ran.err) == (True, False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "load: no model 'x'" in lamina("inspect", "x").err


def ends(lamina, monkeypatch: pytest.MonkeyPatch, error: BaseException):
    def fail(*_args: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr("lamina.cli.inspect_command.describe", fail)
    return lamina("inspect", "x")


def test_an_error_of_the_input_is_one_line_and_ends_with_2(lamina, monkeypatch: pytest.MonkeyPatch):
    error = ConfigError("op: a\nb; c. Do d.")
    error.add_note("in x.json")
    ran = ends(lamina, monkeypatch, error)
    assert (ran.code, ran.out, ran.err) == (2, "", "error: op: a b; c. Do d. (in x.json)\n")


def test_an_interruption_ends_with_130(lamina, monkeypatch: pytest.MonkeyPatch):
    ran = ends(lamina, monkeypatch, KeyboardInterrupt())
    assert (ran.code, ran.out, ran.err) == (130, "", "interrupted\n")


def test_an_interruption_before_a_command_runs_ends_with_130(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app, "build", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 130


def test_what_can_go_on_after_an_interruption_says_how(lamina, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def stop(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lamina.recipes.schema.load_recipe", stop)
    ran = lamina("train", str(tmp_path / "r.yaml"))
    assert (ran.code, ran.err) == (130, "interrupted; run the command with --resume to continue from what was saved\n")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "full", "out/x"), "out/x cannot be read or written (No space left on device). Free"),
        (OSError(errno.EDQUOT, "full"), "a file cannot be read or written (Disk quota exceeded). Free disk space, and"),
        (PermissionError(errno.EACCES, "no", "x"), "x cannot be read or written (Permission denied). Check the path"),
        (OSError(errno.ENAMETOOLONG, "no", "x"), "x cannot be read or written (File name too long). Check the path"),
        (Exception('error: IoError(Os { code: 28, kind: StorageFull, message: "full" })'), "No space left on device"),
        (RuntimeError("No space left on device (os error 28)"), "No space left on device"),
    ],
)
def test_what_the_system_refuses_is_one_line_and_ends_with_2(
    error: Exception, says: str, lamina, monkeypatch: pytest.MonkeyPatch
):
    ran = ends(lamina, monkeypatch, error)
    assert (ran.code, ran.err.count("\n"), ran.out) == (2, 1, "")
    assert says in ran.err


def test_an_unexpected_error_is_one_line_and_ends_with_1(lamina, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LAMINA_DEBUG", raising=False)
    ran = ends(lamina, monkeypatch, ZeroDivisionError("by zero"))
    says = "error: unexpected ZeroDivisionError: by zero; set LAMINA_DEBUG=1 to see the traceback.\n"
    assert (ran.code, ran.out, ran.err) == (1, "", says)


def test_a_lack_of_memory_is_one_line_that_says_what_to_do_and_ends_with_2(lamina, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(RuntimeError) as real:
        torch.empty(1 << 50)
    ran = ends(lamina, monkeypatch, real.value)
    says = "error: inspect: 4194304.0 GiB more memory could not be allocated. Use a smaller batch_size,"
    assert (ran.code, ran.out, ran.err) == (2, "", f"{says} eval_batch_size or max_length.\n")


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), ConfigError("op: a.")])
def test_a_traceback_is_there_for_the_asking(lamina, monkeypatch: pytest.MonkeyPatch, error: Exception):
    monkeypatch.setenv("LAMINA_DEBUG", "1")
    ran = ends(lamina, monkeypatch, error)
    assert "Traceback" in ran.err
    assert ran.err.splitlines()[-1].startswith("error: ")


def test_sentence_of_a_plain_error():
    assert app.sentence(LaminaError("x: y; z.  Do it.")) == "x: y; z. Do it."


def test_quiet_leaves_what_was_set_and_shows_own_warnings_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name in app._QUIET:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "info")
    logger = logging.getLogger("lamina")
    monkeypatch.setattr(logger, "handlers", [])
    with warnings.catch_warnings():
        app.quiet()
        app.quiet()
        logger.getChild("store").warning("take care")
    assert capsys.readouterr().err == "warning: take care\n"
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "info"
    assert os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "1"
    for name in app._QUIET:
        monkeypatch.setenv(name, os.environ[name])  # so that what was set here is undone


def test_help_loads_no_torch():
    code = (
        "import sys; from lamina.cli import main\n"
        "try: main(['--help'])\n"
        "finally: print({'torch', 'transformers', 'datasets'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.endswith("set()\n")


def test_warnings_go_where_standard_error_goes_now(monkeypatch: pytest.MonkeyPatch):
    """A program may take it elsewhere, as notebooks and tests do, and close what it was."""
    logger = logging.getLogger("lamina")
    monkeypatch.setattr(logger, "handlers", [])
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    app.quiet()
    logger.warning("%d rows", 3)
    monkeypatch.setattr(sys, "stderr", second)
    first_said = first.getvalue()
    first.close()
    app.quiet()
    logger.warning("again")
    assert (first_said, second.getvalue()) == ("warning: 3 rows\n", "warning: again\n")
