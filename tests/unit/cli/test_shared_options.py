"""What all commands do alike: lists of names, and output folders that have something in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lamina.cli.shared_options import check_output, names_of, numbers_of
from lamina.errors import ConfigError, StoreError
from lamina.recipes.report_file import STUDY

Lamina = Callable[..., Any]


@pytest.mark.parametrize("values", [["a,b"], ["a", "b"], ["a, b", "a"], [" a ,,b"]])
def test_a_list_may_be_written_both_ways(values: list[str]):
    assert names_of("--readers", values) == ["a", "b"]


def test_a_list_without_names_is_not_all_of_them(lamina: Lamina):
    for option in ("--sets", "--methods", "--seeds", "--points"):
        ran = lamina("bench", "probes", option, " ,")
        assert (ran.code, f"{option} is ' ,', which names nothing" in ran.err) == (2, True)


def test_a_list_of_numbers():
    assert (numbers_of("--seeds", None, int), numbers_of("--seeds", ["0,1", "4,01"], int)) == (None, [0, 1, 4])
    with pytest.raises(ConfigError, match=r"--seeds: got 0,one; it must be whole numbers, such as 0,1\."):
        numbers_of("--seeds", ["0,one"], int)


def test_readers_are_named_alike_in_predict_and_export(lamina: Lamina, bank_folder: Path):
    def columns(*options: str) -> str:
        return lamina("predict", bank_folder, "the film", "--json", *options).out

    both = columns("--readers", "who,mood")
    assert both == columns("--reader", "who", "--reader", "mood") != columns("--reader", "mood")


def test_what_an_earlier_run_wrote_is_replaced_only_if_asked(tmp_path: Path):
    check_output("train", tmp_path / "new", overwrite=False)
    check_output("train", tmp_path, overwrite=False)  # empty
    (tmp_path / "probe").mkdir()
    (tmp_path / "probe" / STUDY).touch()
    check_output("train", tmp_path, overwrite=False)  # studies of the same recipe
    (tmp_path / "table.json").touch()
    with pytest.raises(ConfigError, match=r"is not empty\. Give another folder, or --overwrite to replace what is in"):
        check_output("train", tmp_path, overwrite=False)
    with pytest.raises(ConfigError, match=r"folder, --resume to continue the run in it, or --overwrite"):
        check_output("train", tmp_path, overwrite=False, resume=False)
    with pytest.raises(ConfigError, match=r"--overwrite and --resume were both given"):
        check_output("train", tmp_path, overwrite=True, resume=True)
    check_output("demo", tmp_path, overwrite=False, replaced=("table.json",))
    check_output("train", tmp_path, overwrite=False, resume=True)
    check_output("train", tmp_path, overwrite=True)
    with pytest.raises(StoreError, match=r"monitor: .*table\.json is a file, not a folder"):
        check_output("monitor", tmp_path / "table.json", overwrite=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "RECIPE"),
        ("study", "probe", "RECIPE"),
        ("bench", "probes"),
        ("monitor", "replies.jsonl", "--model", "none"),
        ("demo",),
        ("export", "none"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_every_command_with_an_output_folder_refuses_one_in_use(lamina: Lamina, tmp_path: Path, arguments: Any):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    recipe = tmp_path / "r.yaml"
    readers = "readers: {a: {fusion: mean}}" if arguments[0] == "train" else "metric: accuracy"
    recipe.write_text(f"model: none\ntasks: {{film: {{files: {{train: a.csv}}, {readers}}}}}\n")
    ran = lamina(*(recipe if each == "RECIPE" else each for each in arguments), "-o", tmp_path / "out")
    assert (ran.code, ran.out) == (2, "")
    assert f"error: {arguments[0]}: {tmp_path / 'out'} is not empty. Give another folder, " in ran.err
