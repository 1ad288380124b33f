"""ONNX Runtime in place of PyTorch: the same answers, from an export that fits the bank, or PyTorch and a reason."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.formulas import stir_
from tests.support.portions import one_in
from tests.support.stored import TEXTS, save_base, tiny_tokenizer

import lamina
from lamina import Reader, ReaderBank
from lamina.errors import ConfigError, MissingExtraError, StoreError, UnknownNameError, UnsupportedModelError
from lamina.fusion.gated import Gated
from lamina.fusion.mean import Mean
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.prediction import backends
from lamina.prediction.predict import Predictor
from lamina.store import load, save_bank
from lamina.store.onnx_engine import OnnxEngine
from lamina.train.options import PassOptions


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a bank that "onnx" has exported: tracing takes seconds, so it is done once."""
    folder = tmp_path_factory.mktemp("backends")
    bank = ReaderBank(load(save_base(folder / "base"))[0], tiny_tokenizer())
    bank.add("mood", Reader(Gated(layers=[0, 1]), SequenceClassification(("bad", "good"), pooling="mean")))
    bank.add("who", Reader(Mean(layers=[1]), TokenClassification(("O", "B-PER", "B-LOC"), encoder_layers=0)))
    stir_(bank)
    save_bank(bank.eval(), folder / "bank")
    lamina.predict(loaded(folder), TEXTS[:1], backend="onnx")
    return folder


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    """A copy of the folder that a test may spoil."""
    shutil.copytree(exported / "bank", tmp_path / "bank")
    shutil.copytree(exported / "base", tmp_path / "base")
    return tmp_path


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders into which a bank would be exported; nothing is."""
    asked: list[Path] = []

    def refuse(_bank: object, to: str | Path) -> None:
        asked.append(Path(to))
        raise UnsupportedModelError(op="export", model_type="bert", reason="'mood' is odd", hint="Serve it.")

    monkeypatch.setattr(backends, "export_onnx", refuse)
    return asked


def loaded(folder: Path) -> ReaderBank:
    return ReaderBank.from_pretrained(folder / "bank", load(folder / "base")[0], tiny_tokenizer())


def engine_in(bank: ReaderBank) -> OnnxEngine | None:
    return backends._engines.get(bank, {}).get("onnx")


def close(left: Any, right: Any) -> bool:
    """Tell whether two answers are equal, numbers within 1e-4."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(close(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(close, left, right))
    return left == pytest.approx(right, abs=1e-4) if isinstance(left, float) else left == right


def test_answers_are_pytorchs_and_the_export_stays_beside_the_bank(folder: Path, untraced: list[Path]):
    bank = loaded(folder)
    expected = lamina.predict(bank, TEXTS, backend="torch")
    assert engine_in(bank) is None
    for backend in ("auto", "onnx"):
        assert close(lamina.predict(bank, TEXTS, backend=backend), expected)
    assert engine_in(bank) is not None
    assert close(lamina.predict(bank, TEXTS, readers=["who"]), [{"who": row["who"]} for row in expected])
    assert untraced == []
    facts = json.loads((folder / "bank" / "onnx" / "onnx.json").read_text(encoding="utf-8"))
    assert all(len(output["digest"]) == 64 for output in facts["outputs"].values())


def test_a_file_is_answered_by_the_engine(folder: Path, untraced: list[Path], monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    plain = OnnxEngine.run

    def run(self: OnnxEngine, bank: ReaderBank, batch: Any, names: Any) -> Any:
        asked.append(len(batch["input_ids"]))
        return plain(self, bank, batch, names)

    monkeypatch.setattr(OnnxEngine, "run", run)
    (folder / "in.txt").write_text("\n".join(TEXTS * 3), encoding="utf-8")
    lamina.predict_file(loaded(folder), folder / "in.txt", folder / "out.jsonl", progress=False)
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    expected = lamina.predict(loaded(folder), TEXTS * 3, backend="torch")
    assert sum(asked) == len(rows) == 9
    assert close([row["readers"] for row in rows], expected)


def test_auto_without_an_export_is_pytorch(folder: Path, untraced: list[Path]):
    shutil.rmtree(folder / "bank" / "onnx")
    bank = loaded(folder)
    assert backends.engine_of(bank, "auto") is None
    assert untraced == []
    with pytest.raises(UnsupportedModelError, match="'mood' is odd"):
        lamina.predict(bank, TEXTS, backend="onnx")


def test_auto_writes_no_export_for_a_reader_that_came_later(exported: Path, untraced: list[Path]):
    bank = loaded(exported)
    lamina.predict(bank, TEXTS[:1], backend="onnx")
    bank.folder = None
    bank.add("late", Reader(Mean(layers=[1]), SequenceClassification(("no", "yes"), pooling="mean")))
    bank.eval()
    assert close(lamina.predict(bank, TEXTS), lamina.predict(bank, TEXTS, backend="torch"))
    assert untraced == []


@pytest.mark.parametrize("harm", one_in(2, ["cut", "bit", "other reader", "no facts"]))
def test_a_damaged_or_foreign_export_is_not_used(harm: str, folder: Path, untraced: list[Path], caplog: Any):
    graph, facts = folder / "bank" / "onnx" / "model.onnx", folder / "bank" / "onnx" / "onnx.json"
    content = bytearray(graph.read_bytes())
    bank = loaded(folder)
    if harm == "cut":
        graph.write_bytes(content[: len(content) // 2])
    elif harm == "bit":
        content[len(content) // 2] ^= 1
        graph.write_bytes(content)
    elif harm == "other reader":
        with torch.no_grad():
            bank["mood"].head.get_parameter("output.bias")[0] += 1
    else:
        facts.write_text("{}", encoding="utf-8")
    expected = lamina.predict(bank, TEXTS, backend="torch")
    with caplog.at_level(logging.WARNING):
        assert lamina.predict(bank, TEXTS) == expected
        assert lamina.predict(bank, TEXTS) == expected
    assert caplog.text.count("PyTorch answers, since ONNX Runtime cannot") == 1
    with pytest.raises(UnsupportedModelError):  # "onnx" exports again
        lamina.predict(bank, TEXTS, backend="onnx")
    assert len(untraced) == 1


def test_a_quantised_graph_in_the_folder_of_the_exact_one_is_not_used(folder: Path, untraced: list[Path]):
    path = folder / "bank" / "onnx" / "onnx.json"
    scores = {"mood": {"metric": "accuracy", "float32": 1.0, "int8": 1.0}}
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), "int8": scores}), encoding="utf-8")
    bank = loaded(folder)
    assert lamina.predict(bank, TEXTS) == lamina.predict(bank, TEXTS, backend="torch")
    assert engine_in(bank) is None
    with pytest.raises(UnsupportedModelError):  # "onnx" exports again
        lamina.predict(bank, TEXTS, backend="onnx")
    assert len(untraced) == 1


def test_an_exact_graph_in_the_folder_of_the_quantised_one_is_refused(folder: Path):
    shutil.copytree(folder / "bank" / "onnx", folder / "bank" / "onnx-int8")
    with pytest.raises(StoreError, match="onnx-int8 is in float32; one quantised is needed"):
        lamina.predict(loaded(folder), TEXTS, backend="int8")


def test_a_graph_that_answers_otherwise_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch):
    plain = OnnxEngine._run

    def run(*given: Any) -> dict[str, Any]:
        return {name: value + value.dtype.type(1e-3) for name, value in plain(*given).items()}

    monkeypatch.setattr(OnnxEngine, "_run", run)
    with pytest.raises(StoreError, match=r"'mood' differs by .*e-0[34] between onnxruntime and PyTorch"):
        OnnxEngine.open(loaded(folder), folder / "bank" / "onnx")


@pytest.mark.parametrize("way", one_in(3, ["in place", "optimizer", "loaded"]))
def test_a_reader_that_was_trained_since_is_not_answered_by_the_old_graph(way: str, folder: Path, untraced: list[Path]):
    bank = loaded(folder)
    lamina.predict(bank, TEXTS[:1])
    bias = bank["mood"].head.get_parameter("output.bias")
    if way == "in place":
        with torch.no_grad():
            bias[0] += 1
    elif way == "optimizer":
        bias.grad = torch.tensor([1.0, -1.0])
        torch.optim.AdamW([bias], lr=0.5, fused=True).step()
    else:
        bank["mood"].load_state_dict({name: value + 1 for name, value in bank["mood"].state_dict().items()})
    assert lamina.predict(bank, TEXTS) == lamina.predict(bank, TEXTS, backend="torch")
    assert close(lamina.predict(bank, TEXTS, readers=["who"]), lamina.predict(loaded(folder), TEXTS, readers=["who"]))


def test_a_step_is_noticed_after_another_reader_has_answered(folder: Path, untraced: list[Path]):
    bank = loaded(folder)
    lamina.predict(bank, TEXTS[:1])
    bias = bank["mood"].head.get_parameter("output.bias")
    bias.grad = torch.tensor([1.0, -1.0])
    torch.optim.AdamW([bias], lr=0.5, fused=True).step()
    lamina.predict(bank, TEXTS, readers=["who"])
    expected = lamina.predict(bank, TEXTS, readers=["mood"], backend="torch")
    assert lamina.predict(bank, TEXTS, readers=["mood"]) == expected


def test_a_base_that_was_changed_is_an_error_as_in_pytorch(folder: Path):
    bank = loaded(folder)
    lamina.predict(bank, TEXTS[:1])
    with torch.no_grad():
        bank.model.get_parameter("encoder.layer.0.output.dense.weight").add_(0.3)
    for backend in ("auto", "torch"):
        with pytest.raises(ConfigError, match="the model has changed"):
            lamina.predict(bank, TEXTS, backend=backend)


def test_what_cannot_be_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch):
    bank = loaded(folder)
    with pytest.raises(UnknownNameError, match=r"unknown backend 'onx'.*Did you mean 'onnx'"):
        lamina.predict(bank, TEXTS, backend="onx")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"no int8 export in its folder\. .*lamina export BANK --int8"):
        lamina.predict(bank, TEXTS, backend="int8")
    with pytest.raises(ConfigError, match="precision bfloat16"):
        lamina.evaluate(bank, {}, backend="onnx", precision="bfloat16")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'lamina\[onnx\]'"):
        lamina.predict(bank, TEXTS, backend="onnx")


def test_inputs_that_the_graph_does_not_take(folder: Path):
    bank = loaded(folder)
    predictor = Predictor(bank, PassOptions(batch_size=4), backend="onnx")
    predictor.choose_engine()
    batch = {"input_ids": torch.tensor([[2, 4, 3]])}
    with pytest.raises(ConfigError, match="the inputs are input_ids; the graph takes attention_mask, input_ids"):
        predictor.engine.run(bank, batch, ["mood"])  # pyright: ignore[reportOptionalMemberAccess]
    auto = backends.engine_of(bank, "auto")
    assert auto is not None
    assert auto.run(bank, batch, ["mood"]) is None
