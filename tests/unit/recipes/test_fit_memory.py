"""Batches that fit a memory: a step keeps its rows, and a recipe that fits nowhere is refused. And hours of GPUs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from lamina import utils
from lamina.errors import ConfigError, StoreError
from lamina.recipes import estimate as fit_memory
from lamina.recipes.estimate import BATCHES, GIB, estimate, fitted_batches, save_batches
from lamina.recipes.expand import expand_recipe, with_part
from lamina.recipes.preflight import load_outlines
from lamina.recipes.schema import load_recipe, parse_recipe

PAPERS = Path(__file__).parents[3] / "recipes" / "papers"
REINIT = with_part(load_recipe(PAPERS / "partial-reinit" / "figure-1a.yaml"), {"task": ["sst2"]}, 1)
READERS = parse_recipe(
    {
        "model": "minilm",
        "fit": {"batch_size": 64, "max_length": 128},
        "tasks": {"cola": {"preset": "cola", "readers": {"a": {"fusion": "ada_layers"}, "b": {"fusion": "mean"}}}},
    }
)


@pytest.mark.long
def test_a_batch_that_does_not_fit_is_split_and_its_step_keeps_the_rows():
    (plenty,) = estimate(REINIT, memory_bytes=80 * GIB).batches
    assert plenty["asked"] == plenty["fitted"] == (8, 1)
    (little,) = estimate(REINIT, memory_bytes=9 * GIB // 4).batches
    rows, steps = little["fitted"]
    assert rows * steps == 8
    assert steps > 1
    assert little["weight_bytes"] + (rows + 1) * little["row_bytes"] < 9 * GIB // 4
    assert little["tokens"] == 128
    assert 100 < little["row_bytes"] / 2**20 < 120  # BERT-base, in float32: about 109 MiB for 128 tokens


def test_a_recipe_that_fits_no_memory_says_what_it_needs():
    with pytest.raises(ConfigError, match=r"^fit-memory: task sst2, top blocks anew: .*128 tokens.*No batch fits"):
        estimate(REINIT, memory_bytes=GIB)


@pytest.mark.parametrize(
    ("gpus", "processes", "expected"), [(True, 1, 80), (True, 4, 60), (False, 1, 100), (False, 4, 15)]
)
def test_free_memory_is_that_of_the_gpu_or_a_part_of_the_ram_and_the_least_of_all_processes(
    monkeypatch: pytest.MonkeyPatch, gpus: bool, processes: int, expected: int
):
    """With stand-ins: a GPU with 80 bytes, or 100 bytes of RAM for 4 processes; another process has 20 or 10 less."""
    log: list[str] = []

    def least(free: int, device: SimpleNamespace) -> int:
        log.append(f"least on {device.type}")
        return free - (20 if gpus else 10) * (processes > 1)

    stand_in = SimpleNamespace(
        device=lambda kind: SimpleNamespace(type=kind),
        cuda=SimpleNamespace(is_available=lambda: gpus),
    )
    monkeypatch.setattr(fit_memory, "torch", stand_in)
    monkeypatch.setattr(fit_memory, "free_bytes", lambda device: {"cuda": 80, "cpu": 100}[device.type])
    monkeypatch.setattr(fit_memory, "join_processes", lambda: log.append("joined"))
    monkeypatch.setattr(fit_memory, "least_of_all", least)
    monkeypatch.setattr(utils, "world_size", lambda: processes)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # a single process may have one that another run left over
    assert fit_memory.free_memory() == expected
    assert log == ["joined", f"least on {'cuda' if gpus else 'cpu'}"]


@pytest.mark.long
def test_long_rows_of_a_grid_get_smaller_batches_than_short_ones():
    fields = {"model": "minilm", "fit": {"batch_size": 64}, "tasks": {"cola": {"preset": "cola"}}}
    fields["methods"] = {"plain": {"grid": {"max_length": [32, 512]}}}
    short, long = estimate(parse_recipe(fields), memory_bytes=GIB).batches
    assert (short["tokens"], long["tokens"]) == (32, 512)
    assert short["fitted"][0] > long["fitted"][0]


def test_a_bank_holds_the_readers_of_all_tasks():
    tasks = {name: {"preset": name, "readers": {"a": {"fusion": "ada_layers"}}} for name in ("cola", "sst2")}
    fields = {"model": "minilm", "fit": {"max_length": 32}, "tasks": tasks}
    both = estimate(parse_recipe(fields), memory_bytes=64 * GIB)
    assert [batch["weight_bytes"] for batch in both.batches] == [both.memory_bytes] * 2


def test_a_trained_base_needs_memory_for_the_size_of_the_images():
    vit = {"model_type": "vit", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    fields = {"model": "nobody/no-such-model", "architecture": {**vit, "image_size": 32, "patch_size": 8}}

    def row_bytes(*, train_base: bool, **options: int) -> int:
        tasks = {"a": {"preset": "cifar10", "readers": {"last": {"fusion": "last_layer"}}, **options}}
        recipe = parse_recipe({**fields, "train_base": train_base, "tasks": tasks})
        return estimate(recipe, memory_bytes=64 * GIB).batches[0]["row_bytes"]

    small, large = (
        row_bytes(train_base=True, **size) - row_bytes(train_base=False, **size) for size in ({}, {"image_size": 64})
    )
    assert large > 65 / 17 * small  # each has its patches and a class token, and attention grows with their square


def test_runs_get_the_batches():
    outlines, _ = load_outlines(READERS, None)
    specs = expand_recipe(READERS, {}, outlines)
    first, second = fitted_batches(READERS, specs, outlines, GIB // 4).values()
    assert first == second
    rows, steps = first
    assert rows * steps == 64
    assert steps > 1
    assert fitted_batches(READERS, specs, outlines, 64 * GIB)["cola-a-0"] == (64, 1)


def test_a_resumed_run_keeps_its_batches_whatever_memory_is_free_now(tmp_path: Path):
    outlines, _ = load_outlines(READERS, None)
    specs = expand_recipe(READERS, {"resume": True}, outlines)
    batches = fitted_batches(READERS, specs, outlines, GIB // 4, tmp_path)
    save_batches(tmp_path, batches, resume=True)
    assert fitted_batches(READERS, specs, outlines, 64 * GIB, tmp_path) == batches
    anew = expand_recipe(READERS, {}, outlines)
    assert fitted_batches(READERS, anew, outlines, 64 * GIB, tmp_path) != batches
    (tmp_path / BATCHES).write_text('{"cola-a-0": [0, 1]}')
    with pytest.raises(StoreError, match=r"does not hold batches"):
        fitted_batches(READERS, specs, outlines, GIB, tmp_path)


def test_parts_add_up_and_cost_hours_of_named_cards():
    cost = estimate(READERS)
    assert sum(part["flops"] for part in cost.parts) == cost.flops["total"]
    assert [part["method"] for part in cost.parts] == [None, "a", "b"]
    hours = cost.parts[0]["hours"]
    assert set(hours) == {"A100", "H100"}
    assert hours["A100"] == pytest.approx(cost.parts[0]["flops"] / 19.5e12 / 0.4 / 3600)  # float32
    half = estimate(READERS, precision="bfloat16").parts[0]["hours"]
    assert half["A100"] == pytest.approx(hours["A100"] * 19.5 / 312)
