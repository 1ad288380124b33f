"""The files of hidden states: what is packed comes back, padded, in any order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lamina.data.state_cache import CachedStates, Layout
from lamina.errors import CacheError

LENGTHS = (3, 1, 5, 2, 4)


def layout(dtype: str = "float16") -> Layout:
    return Layout(LENGTHS, {"main": (1, 3), "encoder": (0,)}, {"main": 4, "encoder": 6}, dtype)


def states(rows: list[int], *, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> dict[str, dict[int, Any]]:
    """What a model gave for these rows; the same numbers for a row whatever the batch, and junk as padding."""
    longest = max(LENGTHS[row] for row in rows)
    found: dict[str, dict[int, Any]] = {}
    for stack, layers, width in (("main", (1, 3), 4), ("encoder", (0,), 6)):
        found[stack] = {}
        for layer in layers:
            state = torch.full((len(rows), longest, width), 77.0)
            for at, row in enumerate(rows):
                generator = torch.Generator().manual_seed(100 * row + layer)
                state[at, : LENGTHS[row]] = scale * torch.randn(LENGTHS[row], width, generator=generator)
            found[stack][layer] = state.to(dtype)
    return found


def write(folder: Path, kind: str = "float32", **options: Any) -> CachedStates:
    plan = layout(kind)
    for stack, layers in plan.layers.items():
        packed = []
        for rows in (plan.order[:2], plan.order[2:]):
            given = states(rows, **options)[stack]
            packed.append(plan.pack(rows, [given[layer] for layer in layers], stack))
        np.concatenate(packed).tofile(folder / f"{stack}.bin")
    return CachedStates.open(folder, plan, options.get("dtype", torch.float32))


def check(reader: CachedStates, *, within: float = 0.0) -> None:
    for rows in ([0, 1, 2, 3, 4], [3, 0], [1]):
        for stack, layers in reader.batch(rows).items():
            for layer, state in layers.items():
                expected = states(rows)[stack][layer]
                for at, row in enumerate(rows):
                    expected[at, LENGTHS[row] :] = 0
                assert state.shape == expected.shape
                assert state.is_contiguous()
                assert (state - expected).abs().max() <= within * expected.abs().max()


def test_rows_come_back_in_any_order_padded_with_zeros(tmp_path: Path):
    check(write(tmp_path))


def test_half_precision_rounds_and_takes_half_the_room(tmp_path: Path):
    check(write(tmp_path, "float16"), within=2**-11)
    assert 2 * layout().size == layout("float32").size


def test_padding_is_not_stored(tmp_path: Path):
    write(tmp_path, "float16")
    sizes = {"main": sum(LENGTHS) * 2 * 4 * 2, "encoder": sum(LENGTHS) * 6 * 2}
    assert layout().size == sum(sizes.values())
    assert {stack: (tmp_path / f"{stack}.bin").stat().st_size for stack in sizes} == sizes


def test_files_hold_plain_numbers_longest_row_first(tmp_path: Path):
    write(tmp_path)
    assert layout().order == [2, 4, 0, 3, 1]
    raw = np.fromfile(tmp_path / "main.bin", "<f4").reshape(sum(LENGTHS), 2, 4)
    assert np.array_equal(raw[:5, 1], states([2])["main"][3][0].numpy())


def test_states_come_back_in_the_dtype_they_had(tmp_path: Path):
    reader = write(tmp_path, "float16", dtype=torch.bfloat16)
    state, expected = reader.batch([2])["main"][3], states([2], dtype=torch.bfloat16)["main"][3]
    assert state.dtype == torch.bfloat16
    assert torch.equal(state, expected)  # half precision has more digits than bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_batch_does_not_change_when_the_next_is_read(tmp_path: Path, dtype: torch.dtype):
    reader = write(tmp_path, dtype=dtype)
    first = reader.batch([0, 3])["main"][1]
    before = first.clone()
    reader.batch([4, 2])
    assert torch.equal(first, before)


def test_states_beyond_half_precision(tmp_path: Path):
    write(tmp_path, "float16", scale=1e4)
    with pytest.raises(CacheError, match=r"beyond the range of float16.*cache_dtype='float32'"):
        write(tmp_path, "float16", scale=1e6)
    write(tmp_path, "float32", scale=1e6)


def test_padding_beyond_the_range_does_no_harm():
    given = states([0, 1])["main"]
    given[1][1, 1:] = float("nan")
    assert layout().pack([0, 1], [given[1], given[3]], "main").shape == (4, 2, 4)


def test_states_with_other_tokens_than_the_rows():
    given = [state[:, :2] for state in states([0, 1])["main"].values()]
    with pytest.raises(CacheError, match=r"states are \(2, 2, 4\) for rows of \(2, 3, 4\)"):
        layout().pack([0, 1], given, "main")
