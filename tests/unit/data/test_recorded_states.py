"""States in files of several programs are read right, and files that are not as the manifest says are refused."""

from __future__ import annotations

import copy
import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file
from tests.support.recorded import manifest, packed, per_request

from lamina.data import recorded_states
from lamina.data.describe_states import describe_states
from lamina.data.recorded_states import RecordedStates, _numbers
from lamina.errors import ConfigError, DataError, StoreError, UnknownNameError

LAYERS, WIDTH = [1, 3], 8


def rows(*lengths: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(length, len(LAYERS), WIDTH, generator=rng).to(dtype) for length in lengths]


def check(folder: Path, expected: list[torch.Tensor]) -> None:
    recorded = RecordedStates.open(folder)
    assert recorded.lengths.tolist() == [len(row) for row in expected]
    order = [len(expected) - 1, *range(len(expected) - 1)]
    states = recorded.batch(order)["main"]
    assert list(states) == LAYERS
    for at, number in enumerate(order):
        for place, layer in enumerate(LAYERS):
            row = expected[number][:, place].float()
            assert torch.equal(states[layer][at, : len(row)], row)
            assert not states[layer][at, len(row) :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_files_of_vllm(tmp_path: Path, dtype: torch.dtype):
    """`extract_hidden_states` writes `hidden_states` [tokens, layers, width] per request: seen in its source."""
    states = rows(3, 1, 12, dtype=dtype)
    per_request(tmp_path / "a", states, LAYERS)
    check(tmp_path / "a", states)
    described = describe_states(tmp_path / "a", form="vllm", layers=LAYERS, depth=3, pairs=True, add_prefix_space=False)
    assert [array.file for array in described.arrays] == [f"hs_{number}.safetensors" for number in range(3)]
    assert (described.pairs, described.add_prefix_space) == (True, False)
    check(tmp_path / "a", states)


def test_tensors_of_vllm_lens(tmp_path: Path):
    """vllm-lens returns `residual_stream` [layers, positions, width], whose layer i is the output of block i."""
    states = rows(3, 5)
    for number, row in enumerate(states):
        save_file({"residual_stream": row.transpose(0, 1).contiguous()}, tmp_path / f"{number}.safetensors")
    described = describe_states(tmp_path, form="vllm-lens", layers=[0, 2], depth=3)
    assert described.layers == LAYERS
    check(tmp_path, states)


def test_cache_of_lmprobe(tmp_path: Path):
    """lmprobe keeps `layer_{i}` [1, tokens, width] and a mask, which may pad on the left: seen in its package."""
    states = rows(3, 5)
    for number, row in enumerate(states):
        padded = torch.cat([torch.full((2, *row.shape[1:]), 9.0), row])
        tensors = {f"layer_{layer - 1}": padded[None, :, at].contiguous() for at, layer in enumerate(LAYERS)}
        tensors["attention_mask"] = torch.tensor([[0, 0] + [1] * len(row)])
        save_file(tensors, tmp_path / f"{number}.safetensors")
    describe_states(tmp_path, form="lmprobe", layers=[0, 2], depth=3)
    check(tmp_path, states)


def test_pooled_cache_of_lmprobe(tmp_path: Path):
    states = rows(1, 1)
    for number, row in enumerate(states):
        name = "pooled_last_token_layer_"
        tensors = {f"{name}{layer - 1}": row[:, at].contiguous() for at, layer in enumerate(LAYERS)}
        save_file(tensors, tmp_path / f"{number}.safetensors")
    assert describe_states(tmp_path, form="lmprobe-last_token", layers=[0, 2], depth=3).pooling == "last"
    check(tmp_path, states)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"pooling": "median"}, UnknownNameError, "states: unknown pooling 'median'; known: first, last, mean"),
        ({"stack": 3}, ConfigError, "states: stack is 3; it must be"),
        ({"pairs": "some"}, ConfigError, "states: pairs is 'some'; it must be"),
        ({"model": 1.5}, ConfigError, "states: model is 1.5; it must be"),
        ({"files": [5]}, ConfigError, r"states: files\[0\] is 5; it must be a text"),
    ],
)
def test_options_of_a_description_that_do_not_exist(tmp_path: Path, options: Any, error: Any, match: str):
    np.save(tmp_path / "x.npy", torch.cat(rows(1, 1)).numpy())
    with pytest.raises(error, match=match):
        describe_states(tmp_path, axes=["rows", "layers", "width"], layers=LAYERS, depth=3, **options)


def test_endings_have_no_case(tmp_path: Path):
    states = rows(2, 2)
    tensors = {"states": torch.stack(states)}
    save_file(tensors, tmp_path / "0.SAFETENSORS")
    with (tmp_path / "MASK.NPY").open("wb") as file:
        np.save(file, np.ones((2, 2), bool))
    axes: Any = ["rows", "tokens", "layers", "width"]
    describe_states(tmp_path, axes=axes, tensor="states", mask="MASK.NPY", layers=LAYERS, depth=3)
    check(tmp_path, states)


@pytest.mark.parametrize("name", ["lost", "file"])
def test_a_folder_that_does_not_exist_is_named(name: str, tmp_path: Path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DataError, match=f"states: the folder .*{name} does not exist"):
        describe_states(tmp_path / name, form="vllm", layers=LAYERS, depth=3)


@pytest.mark.parametrize("axes", [["rows", "layers", "width"], ["layers", "rows", "width"]])
def test_pooled_arrays(tmp_path: Path, axes: Any):
    states = rows(1, 1, 1)
    array = torch.cat(states).numpy()
    np.save(tmp_path / "x.npy", array if axes[0] == "rows" else array.transpose(1, 0, 2))
    describe_states(tmp_path, axes=axes, layers=LAYERS, depth=3, pooling="mean")
    check(tmp_path, states)


def test_padded_arrays_of_one_layer_each(tmp_path: Path):
    states = rows(2, 4)
    for at, layer in enumerate(LAYERS):
        padded = np.full((2, 6, WIDTH), 9, np.float16)
        for number, row in enumerate(states):
            padded[number, : len(row)] = row[:, at].half()
        np.save(tmp_path / f"resid_L{layer}.npy", padded)
    np.save(tmp_path / "lengths.npy", np.array([2, 4]))
    arrays = [
        {"file": f"resid_L{layer}.npy", "axes": ["rows", "tokens", "width"], "shape": [2, 6, WIDTH], "rows": 2}
        | {"layers": [layer]}
        for layer in LAYERS
    ]
    manifest(tmp_path, states, LAYERS, arrays=arrays, lengths="lengths.npy")
    check(tmp_path, [row.half() for row in states])


def test_parquet(tmp_path: Path):
    states = rows(1, 1, 1)
    column = [row[0].tolist() for row in states]
    pq.write_table(pa.table({"states": column}), tmp_path / "x.parquet", row_group_size=2)
    described = describe_states(
        tmp_path, axes=["rows", "layers", "width"], tensor="states", layers=LAYERS, depth=3, pooling="first"
    )
    assert described.arrays[0].shape == [3, 2, WIDTH]
    check(tmp_path, states)


def test_a_parquet_row_of_another_length_is_named(tmp_path: Path):
    pq.write_table(pa.table({"s": [[1.0, 2.0], [1.0], [1.0, 2.0]]}), tmp_path / "x.parquet")
    array = {"file": "x.parquet", "tensor": "s", "axes": ["rows", "width"], "shape": [3, 2], "rows": 3}
    manifest(tmp_path, rows(1, 1, 1), [1], arrays=[array], width=2, pooling="mean")
    with pytest.raises(DataError, match=r"row 1 \(from 0\) has a list of 1 numbers, and the shape says 2"):
        RecordedStates.open(tmp_path)


def test_a_described_parquet_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pq.write_table(pa.table({"s": [[1.0, 2.0], [3.0, 4.0]]}), tmp_path / "x.parquet")
    array = {"file": "x.parquet", "tensor": "s", "axes": ["rows", "width"], "shape": [2, 2], "rows": 2}
    manifest(tmp_path, [torch.zeros(1, 1, 2)] * 2, [1], arrays=[array], pooling="mean")
    monkeypatch.setattr(recorded_states, "column_shape", None)
    assert RecordedStates.open(tmp_path).batch([1])["main"][1].tolist() == [[[3.0, 4.0]]]


def test_a_mask_in_a_parquet_column(tmp_path: Path):
    states = torch.randn(2, 3, WIDTH)
    mask = [[False, True, True], [True, False, False]]
    pq.write_table(pa.table({"s": states.tolist(), "mask": mask}), tmp_path / "x.parquet")
    axes = ["rows", "tokens", "width"]
    describe_states(tmp_path, axes=axes, tensor="s", mask="mask", layers=[1], depth=3)  # pyright: ignore
    recorded = RecordedStates.open(tmp_path)
    assert recorded.lengths.tolist() == [2, 1]
    assert torch.equal(recorded.batch([0])["main"][1][0], states[0, 1:])


def test_a_parquet_file_without_rows_is_named(tmp_path: Path):
    pq.write_table(pa.table({"s": pa.array([], pa.list_(pa.float32()))}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x.parquet has no rows"):
        describe_states(tmp_path, axes=["rows", "width"], tensor="s", layers=[1], depth=3, pooling="mean")


@pytest.mark.parametrize("shape", [(0, 2, WIDTH), (1, 0, WIDTH), (1, 2, 0)])
def test_an_empty_array_is_named(tmp_path: Path, shape: tuple[int, ...]):
    np.save(tmp_path / "x.npy", np.ones(shape, np.float32))
    with pytest.raises(DataError, match=rf"x.npy is empty: it has the shape {re.escape(str([*shape]))}\. Leave it out"):
        describe_states(tmp_path, axes=["rows", "tokens", "width"], layers=[1], depth=3)


def test_a_row_without_tokens_is_named(tmp_path: Path):
    np.save(tmp_path / "x.npy", np.ones((2, 0, WIDTH), np.float32))
    array = {"file": "x.npy", "axes": ["rows", "tokens", "width"], "shape": [2, 0, WIDTH], "rows": 2}
    manifest(tmp_path, rows(1, 1), [1], arrays=[array])
    with pytest.raises(DataError, match=r"x.npy has no token in row 0 \(from 0\); every row has at least 1"):
        RecordedStates.open(tmp_path)


def test_braces_in_the_name_of_a_tensor(tmp_path: Path):
    states = rows(2)
    save_file({"{model}": states[0]}, tmp_path / "0.safetensors")
    describe_states(tmp_path, axes=["tokens", "layers", "width"], tensor="{model}", layers=LAYERS, depth=3)
    check(tmp_path, states)


def test_a_refused_description_leaves_a_good_one(tmp_path: Path):
    folder = packed(tmp_path / "a", rows(2, 3), LAYERS)
    before = (folder / "states.json").read_text()
    axes: Any = ["tokens", "layers", "width"]
    with pytest.raises(StoreError, match="has a layer 3 of a model of depth 2"):
        describe_states(folder, axes=axes, layers=LAYERS, depth=2, rows=2, lengths="lengths.npy")
    np.save(folder / "lengths.npy", np.array([2, 9]))
    with pytest.raises(DataError, match="lengths of its rows say 11"):
        describe_states(folder, axes=axes, layers=LAYERS, depth=3, rows=2, lengths="lengths.npy")
    with pytest.raises(ConfigError, match="layers is empty"):
        describe_states(folder, axes=axes, layers=[], depth=3)
    with pytest.raises(ConfigError, match="depth is 0"):
        describe_states(folder, axes=axes, layers=LAYERS, depth=0, rows=2, lengths="lengths.npy")
    with pytest.raises(UnknownNameError, match="unknown axis 'foo'"):
        describe_states(folder, axes=["foo", "layers", "width"], layers=LAYERS, depth=3)  # pyright: ignore
    assert (folder / "states.json").read_text() == before


def test_files_that_the_call_names_are_no_states(tmp_path: Path):
    np.save(tmp_path / "x.npy", torch.cat(rows(2, 3)).numpy())
    np.save(tmp_path / "counts.npy", np.array([2, 3]))
    pq.write_table(pa.table({"label": ["a", "b"]}), tmp_path / "y.parquet")
    axes: Any = ["tokens", "layers", "width"]
    facts: Any = {"rows": 2, "lengths": "counts.npy", "table": "y.parquet"}
    described = describe_states(tmp_path, axes=axes, layers=LAYERS, depth=3, **facts)
    assert [array.file for array in described.arrays] == ["x.npy"]
    check(tmp_path, rows(2, 3))


def test_a_copy_reads_the_same(tmp_path: Path):
    recorded = RecordedStates.open(packed(tmp_path / "a", rows(2, 3), LAYERS))
    expected = recorded.batch([1])["main"][3]  # the file is mapped now
    for again in (copy.deepcopy(recorded), pickle.loads(pickle.dumps(recorded))):
        assert torch.equal(again.batch([1])["main"][3], expected)


def test_other_lengths_are_another_digest(tmp_path: Path):
    folder = packed(tmp_path / "a", rows(2, 3), LAYERS)
    before = RecordedStates.open(folder).digest
    assert RecordedStates.open(folder).digest == before
    np.save(folder / "lengths.npy", np.array([3, 2]))
    assert RecordedStates.open(folder).digest != before


def test_a_file_that_was_changed_after_it_was_opened_is_named(tmp_path: Path):
    folder = packed(tmp_path / "a", states := rows(2, 3), LAYERS)
    opened, mapped = RecordedStates.open(folder), RecordedStates.open(folder)
    mapped.batch([0])
    np.save(folder / "states.npy", torch.cat(states).double().numpy())  # each number has twice the bytes now
    for recorded in (opened, mapped):
        with pytest.raises(DataError, match=r"states\.npy was changed after the states were opened"):
            recorded.batch([0])
    check(folder, states)
    again = RecordedStates.open(folder)
    (folder / "states.npy").unlink()
    with pytest.raises(DataError, match=r"states\.npy was removed after the states were opened"):
        again.batch([0])


def test_arrays_may_hold_other_layers_in_other_orders(tmp_path: Path):
    """Rows 0 and 1 are in one array of both layers, row 2 in one of the other order, row 3 in an array per layer."""
    states = rows(2, 3, 2, 4)
    parts = {
        "a": (torch.cat(states[:2]), [1, 3], 2),
        "b": (states[2].flip(1), [3, 1], 1),
        "c": (states[3][:, 1:], [3], 1),
        "d": (states[3][:, :1], [1], 1),
    }
    arrays: list[dict[str, Any]] = []
    for name, (part, layers, count) in parts.items():
        np.save(tmp_path / f"{name}.npy", part.numpy())
        axes = {"axes": ["tokens", "layers", "width"], "shape": list(part.shape), "rows": count, "layers": layers}
        arrays.append({"file": f"{name}.npy", **axes})
    np.save(tmp_path / "lengths.npy", np.array([2, 3, 2, 4]))
    check(manifest(tmp_path, states, LAYERS, arrays=arrays, lengths="lengths.npy"), states)


def test_only_layers_and_rows_that_are_there_are_read(tmp_path: Path):
    per_request(tmp_path / "a", states := rows(3, 1), LAYERS)
    recorded = RecordedStates.open(tmp_path / "a")
    for layer in (2, 0, -1):
        with pytest.raises(UnknownNameError, match=f"unknown layer '{layer}'; known: 1, 3"):
            recorded.batch([0], layers=[1, layer])
    for row in (2, -1):
        with pytest.raises(ConfigError, match=f"has no row {row}; its rows are 0 to 1"):
            recorded.batch([0, row])
    twice = recorded.batch([1], layers=[3, 3])["main"]
    assert list(twice) == [3]
    assert torch.equal(twice[3][0], states[1][:, 1])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_no_number_is_named(tmp_path: Path, value: float):
    states = rows(2, 3, 2)
    states[1][2, 1, 4] = value
    recorded = RecordedStates.open(packed(tmp_path / "a", states, LAYERS))
    recorded.batch([0, 2])
    with pytest.raises(DataError, match=r"row 1 \(from 0\) has a state of layer 3 that is NaN or infinite"):
        recorded.batch([2, 1])
    recorded.batch([1], layers=[1])  # the layer that no reader needs is not read


def lie(folder: Path, **facts: Any) -> Path:
    content = json.loads((folder / "states.json").read_text(encoding="utf-8"))
    for key, value in facts.items():
        if key in ("shape", "axes"):
            content["arrays"][0][key] = value
        else:
            content[key] = value
    (folder / "states.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("facts", "error"),
    [
        ({"width": 9}, "with the width 8, but 'width' is 9"),
        ({"depth": 2}, "has a layer 3 of a model of depth 2"),
        ({"layers": [1, 2, 3]}, "with 2 layers in its shape for the layers"),
        ({"layers": [3, 1]}, "they must ascend"),
        ({"rows": 4}, "has arrays with 3 rows of layer 1, but 'rows' is 4"),
        ({"axes": ["tokens", "width"]}, "each axis has one name"),
        ({"pooling": "mean"}, "pooled states have no 'tokens'"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(tmp_path: Path, facts: dict[str, Any], error: str):
    with pytest.raises(StoreError, match=error):
        RecordedStates.open(lie(packed(tmp_path / "a", rows(2, 3, 2), LAYERS), **facts))


def test_a_manifest_that_lies_about_its_files_is_refused(tmp_path: Path):
    folder = packed(tmp_path / "a", rows(2, 3, 2), LAYERS)
    with pytest.raises(DataError, match=r"states.npy has the shape \[7, 2, 8\], and states.json says \[6, 2, 8\]"):
        RecordedStates.open(lie(folder, shape=[6, 2, 8]))
    lie(folder, shape=[7, 2, 8])
    np.save(folder / "lengths.npy", np.array([2, 3, 3]))
    with pytest.raises(DataError, match=r"states.npy has 7 tokens, and the lengths of its rows say 8"):
        RecordedStates.open(folder)
    np.save(folder / "lengths.npy", np.array([2, 5]))
    with pytest.raises(DataError, match="does not hold 3 lengths"):
        RecordedStates.open(folder)
    with pytest.raises(UnknownNameError, match="unknown key 'lenghts'"):
        RecordedStates.open(lie(folder, lenghts="x"))


@pytest.mark.parametrize(
    ("lengths", "mask", "row", "error"),
    [
        ([2, 3, 1], None, 1, r"b.npy has 2 tokens in row 1 \(from 0\), and the lengths of its rows say 3"),
        ([2, 0, -1], None, 1, r"lengths.npy gives row 1 \(from 0\) 0 tokens; every row has at least 1"),
        ([2, 2, 2], [[1, 1], [1, 0]], 2, r"b.npy has 1 token in row 2 \(from 0\), and the lengths of its rows say 2"),
        ([2, 2, 1], [[1, 0], [1, 1]], 1, r"b.npy has 1 token in row 1 \(from 0\), and the lengths of its rows say 2"),
        ([2, 1, 1], [[1, 0], [0, 0]], 2, r"the mask 'm.npy' of b.npy has no token in row 2 \(from 0\)"),
    ],
)
def test_the_first_row_with_a_wrong_length_is_named(
    tmp_path: Path, lengths: list[int], mask: Any, row: int, error: str
):
    """Row 0 is in another array than rows 1 and 2."""
    arrays: list[dict[str, Any]] = []
    for name, count in (("a", 1), ("b", 2)):
        np.save(tmp_path / f"{name}.npy", np.ones((count, 2, 2, WIDTH), np.float32))
        shape = {"axes": ["rows", "tokens", "layers", "width"], "shape": [count, 2, 2, WIDTH], "rows": count}
        arrays.append({"file": f"{name}.npy", **shape})
    if mask is not None:
        np.save(tmp_path / "m.npy", np.array(mask))
        arrays[1]["mask"] = "m.npy"
    np.save(tmp_path / "lengths.npy", np.array(lengths))
    manifest(tmp_path, rows(2, 2, 2), LAYERS, arrays=arrays, lengths="lengths.npy")
    with pytest.raises(DataError, match=error) as caught:
        RecordedStates.open(tmp_path)
    assert caught.value.row == row


def test_damaged_files_are_named(tmp_path: Path):
    folder = packed(tmp_path / "a", rows(2, 3), LAYERS)
    content = (folder / "states.npy").read_bytes()
    (folder / "states.npy").write_bytes(content[:-8])
    with pytest.raises(DataError, match=r"states.npy is not a .npy file .*cut off"):
        RecordedStates.open(folder)
    np.save(folder / "states.npy", np.array([{}, {}]), allow_pickle=True)
    with pytest.raises(DataError, match="it holds Python objects"):
        RecordedStates.open(folder)
    (folder / "states.npy").unlink()
    with pytest.raises(DataError, match=r"states.npy is not there; states.json names it\.$"):
        RecordedStates.open(folder)
    with pytest.raises(DataError, match=r"b.npy is not there\.$"):
        describe_states(tmp_path, files=["b.npy"], axes=["rows", "layers", "width"], layers=LAYERS, depth=3)
    with pytest.raises(StoreError, match=r"has no states.json"):
        RecordedStates.open(tmp_path)
    folder = per_request(tmp_path / "b", rows(2), LAYERS)
    (folder / "hs_0.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(DataError, match=r"hs_0.safetensors is not a safetensors file"):
        RecordedStates.open(folder)


def test_a_column_of_lists_of_another_length_names_the_row():
    path, three = Path("x.parquet"), pa.list_(pa.float32(), 3)
    with pytest.raises(DataError, match=r"row 10 \(from 0\) has a list of 3 numbers, and the shape says 4"):
        _numbers(path, pa.array([[1, 2, 3]] * 4, three), 10, [4])
    for kind in (three, pa.list_(pa.float32())):
        with pytest.raises(DataError, match=r"row 12 \(from 0\) has a list of no numbers"):
            _numbers(path, pa.array([[1, 2, 3], [1, 2, 3], None], kind), 10, [3])
        assert _numbers(path, pa.array([[1, 2, 3]], kind), 0, [3]).tolist() == [1, 2, 3]
