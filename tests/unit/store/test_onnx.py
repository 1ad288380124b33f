"""A bank as one ONNX graph: onnxruntime gives the outputs of PyTorch, or nothing is written."""

from __future__ import annotations

import json
import re
import sys
from ast import literal_eval
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx as onnx_file
import onnxruntime
import pytest
import torch
from tests.support.formulas import stir_
from tests.support.stored import TEXTS, tiny_bank, tiny_config, tiny_model, tiny_tokenizer
from tests.support.tiny import FAMILIES, model_of
from transformers import BertModel, GPT2LMHeadModel

import lamina
from lamina import Reader, ReaderBank
from lamina.errors import ConfigError, MissingExtraError, StoreError, UnknownNameError, UnsupportedModelError
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.mean import Mean
from lamina.fusion.pooled_layers import PooledLayers
from lamina.fusion.scalar_mix import ScalarMix
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.store import onnx
from lamina.store.onnx import export_onnx


def asked(folder: Path, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    given = {name: np.asarray(value) for name, value in batch.items()}
    return dict(zip(names, map(torch.from_numpy, session.run(None, given)), strict=True))


def small_bank() -> ReaderBank:
    """Return a bank with few operations, since tracing each one takes a part of a second."""
    bank = ReaderBank(tiny_model(num_hidden_layers=1), tiny_tokenizer())
    bank.add("mood", Reader(AdaLayers(dim=8, layers="all"), SequenceClassification(("bad", "good"))))
    bank.add("who", Reader(Mean(), TokenClassification(("O", "B-PER", "B-LOC"), encoder_layers=0)))
    stir_(bank)
    bank["mood"].info = {"max_length": 32}
    return bank.eval()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[ReaderBank, Path]:
    bank = small_bank()
    folder = tmp_path_factory.mktemp("onnx") / "bank-onnx"
    export_onnx(bank, folder)
    return bank, folder


def test_the_lines_of_the_docs_give_the_labels_of_predict(
    exported: tuple[ReaderBank, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    bank, folder = exported
    page = (Path(__file__).parents[3] / "docs" / "export.md").read_text(encoding="utf-8")
    block = next(part for part in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "onnxruntime" in part)
    assert "lamina" not in block
    monkeypatch.chdir(folder.parent)
    exec(compile(block, "export.md", "exec"), {})
    printed = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    texts = ["A good film.", "Anna went to Paris."]
    assert all(text in block for text in texts)
    labels = [answer["mood"]["label"] for answer in lamina.predict(bank, texts, readers=["mood"])]
    assert literal_eval(printed["mood"]) == labels
    assert [len(row) for row in literal_eval(printed["who"])] == [7, 7]


def test_the_graph_gives_the_logits_of_the_bank(exported: tuple[ReaderBank, Path]):
    bank, folder = exported
    batch = dict(tiny_tokenizer()(TEXTS, return_tensors="pt", padding=True))
    facts = json.loads((folder / "onnx.json").read_text(encoding="utf-8"))
    assert facts["inputs"] == list(batch)
    said = asked(folder, batch)
    assert list(said) == list(facts["outputs"]) == ["mood", "who"]
    with torch.no_grad():
        out = bank(**batch)
    torch.testing.assert_close(said["mood"], out["mood"].logits, rtol=0, atol=1e-4)
    real = out["who"].mask
    torch.testing.assert_close(said["who"][real], out["who"].logits[real], rtol=0, atol=1e-4)
    assert [own["axes"] for own in facts["outputs"].values()] == [["batch", "classes"], ["batch", "tokens", "classes"]]
    assert facts["outputs"]["mood"]["max_length"] == 32
    assert 0 < facts["max_difference"] < 1e-4


def test_attention_and_gelu_are_one_operation_each(exported: tuple[ReaderBank, Path]):
    """Only the newer opset has them; an export that falls back to the older one is right, and slower."""
    graph = onnx_file.load(str(exported[1] / "model.onnx"), load_external_data=False)
    assert graph.opset_import[0].version == onnx.OPSETS[0]
    assert {"Attention", "Gelu"} <= {node.op_type for node in graph.graph.node}


def test_the_bank_that_was_exported_is_as_before(exported: tuple[ReaderBank, Path]):
    bank, _ = exported
    batch = dict(tiny_tokenizer()(TEXTS, return_tensors="pt", padding=True))
    with torch.no_grad():
        assert torch.equal(bank(**batch)["mood"].logits, small_bank()(**batch)["mood"].logits)
    assert "active_layers" not in vars(bank["mood"].fusion)


@pytest.mark.long
def test_an_edited_model_and_a_reader_in_one_graph(tmp_path: Path):
    """With inserted layers, merged ones and fewer blocks; the model's own output beside the reader's."""
    model = GPT2LMHeadModel(FAMILIES["gpt2-CausalLM"].config()).eval()
    stir_(model, 1, 0.05)
    lamina.insert_(model, "attention", layers=[1])
    lamina.merge_(model)
    lamina.insert_(model, "ffn", layers=[1, 2])
    lamina.truncate_(model, 1)
    bank = ReaderBank(model)
    stir_(bank.add("r", Reader(ScalarMix(), SequenceClassification(("a", "b"), pooling="mean"))))
    bank.eval()
    facts = export_onnx(bank, tmp_path, main=True)
    assert list(facts.outputs) == ["r", "logits"]
    batch = FAMILIES["gpt2"].inputs(model, batch=4, tokens=6, seed=8)
    said = asked(tmp_path, batch)
    with torch.no_grad():
        out, real = bank(**batch, main=True), batch["attention_mask"].bool()
    torch.testing.assert_close(said["r"], out["r"].logits, rtol=0, atol=1e-4)
    torch.testing.assert_close(said["logits"][real], out.main.logits[real], rtol=0, atol=1e-4)


# Refused exports


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that stands for any, and says what PyTorch says: tracing takes seconds."""
    monkeypatch.setattr(onnx, "_write", lambda plan, path, opset: path.write_bytes(b"graph"))
    monkeypatch.setattr(onnx, "_run", said_by_torch)


def said_by_torch(plan: Any, path: Path, batch: Any) -> dict[str, Any]:
    return {name: value.numpy() for name, (value, _) in plan.expected(batch).items()}


@pytest.mark.usefixtures("untraced")
def test_a_base_that_was_changed_under_the_bank(tmp_path: Path):
    bank = small_bank()
    assert list(bank.stacks) == ["main"]  # from now on its weights are watched
    with torch.no_grad():
        bank.model.get_parameter("encoder.layer.0.output.dense.weight").add_(0.3)
    with pytest.raises(ConfigError, match="export: the model has changed since the bank was made"):
        export_onnx(bank, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda said: said + 2e-3, r"'mood' differs by 2\.0e-03 between onnxruntime and PyTorch, on 2 x 14 tokens"),
        (lambda said: said * np.nan, "'mood' differs by nan"),
        (lambda said: said[:1], r"'mood' has the shape \[1, 2\] in onnxruntime, \[2, 2\] in PyTorch"),
    ],
)
def test_a_graph_with_other_outputs_is_not_written(
    wrong: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    bank = tiny_bank()
    export_onnx(bank, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    bank["mood"].head.output.bias.data += 1
    monkeypatch.setattr(onnx, "_write", lambda plan, path, opset: path.write_bytes(b"another"))

    def run(plan: Any, path: Path, batch: Any) -> dict[str, Any]:
        said = said_by_torch(plan, path, batch)
        return said | {"mood": wrong(said["mood"])}

    monkeypatch.setattr(onnx, "_run", run)
    with pytest.raises(StoreError, match=message):
        export_onnx(bank, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert before["model.onnx"] == b"graph"


@pytest.mark.usefixtures("untraced")
def test_an_older_opset_is_used_where_the_newest_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tried = list[int]()

    def write(plan: Any, path: Path, opset: int) -> None:
        tried.append(opset)
        if opset == onnx.OPSETS[0]:
            raise UnsupportedModelError(op="export", model_type="bert", reason="it is odd", hint="Use another.")
        path.write_bytes(b"older graph")

    monkeypatch.setattr(onnx, "_write", write)
    export_onnx(tiny_bank(), tmp_path)
    assert (tried, (tmp_path / "model.onnx").read_bytes()) == (list(onnx.OPSETS), b"older graph")


def test_a_full_disk_is_not_called_an_unsupported_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the export failed") from OSError(28, "No space left on device")

    monkeypatch.setattr(torch.export, "export", fail)
    with pytest.raises(
        StoreError, match=r"out cannot be written \(No space left on device\); nothing in it was changed"
    ):
        export_onnx(tiny_bank(), tmp_path / "out")


@pytest.mark.usefixtures("untraced")
def test_an_export_takes_the_place_of_the_one_before(tmp_path: Path):
    export_onnx(tiny_bank(), tmp_path)
    facts = export_onnx(tiny_model(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "onnx.json"]
    assert list(facts.outputs) == ["last_hidden_state"]
    (tmp_path / "onnx.json").unlink()
    with pytest.raises(StoreError, match="was made by something else"):
        export_onnx(tiny_model(), tmp_path)


@pytest.mark.usefixtures("untraced")
def test_half_precision_is_compared_in_single(tmp_path: Path):
    model = tiny_model().bfloat16()
    assert export_onnx(model, tmp_path).max_difference == 0
    assert next(model.parameters()).dtype == torch.bfloat16


def test_inputs_are_what_the_tokenizer_gives_and_pairs_are_pairs():
    tokenizer = tiny_tokenizer()
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    bank = ReaderBank(tiny_model(), tokenizer)
    bank.add("r", Reader(PooledLayers(dim=8, over="second"), SequenceClassification(("a", "b"), pooling="first")))
    batch = onnx.ExportPlan(bank.eval(), None, main=False).inputs(3, 11)
    assert list(batch) == ["input_ids", "attention_mask", "token_type_ids"]
    assert batch["token_type_ids"][0].tolist() == [0] * 6 + [1] * 5
    assert batch["attention_mask"].sum(1).tolist() == [11, 8, 11]
    assert (batch["input_ids"][:, 5] == tokenizer.sep_token_id).all()


@pytest.mark.parametrize("names", [["mood", "mood"], iter(["mood"])])
def test_a_reader_named_twice_is_written_once(tmp_path: Path, names: Any, monkeypatch: pytest.MonkeyPatch):
    write = Mock(side_effect=RuntimeError("enough"))
    monkeypatch.setattr(onnx, "_checked_graph", write)
    with pytest.raises(StoreError, match="enough"):
        export_onnx(tiny_bank(), tmp_path, readers=names)
    assert write.call_args.args[0].names == ["mood"]


def test_what_cannot_be_exported_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(UnknownNameError, match=r"unknown reader 'nope'; known: none"):
        export_onnx(tiny_model(), tmp_path / "out", readers=["nope"])
    with pytest.raises(UnknownNameError, match=r"unknown reader 'mod'.*Did you mean 'mood'"):
        export_onnx(tiny_bank(), tmp_path / "out", readers=["mod"])
    with pytest.raises(ConfigError, match="there is no reader to write"):
        export_onnx(ReaderBank(tiny_model()), tmp_path / "out")
    with pytest.raises(UnsupportedModelError, match="'vit' is not supported; it reads pixel_values"):
        export_onnx(model_of("vit"), tmp_path / "out")
    with pytest.raises(UnsupportedModelError, match="'big_bird' is not supported; it computes attention differently"):
        export_onnx(model_of("big_bird"), tmp_path / "out")
    bank = tiny_bank()
    bank.rename("mood", "last_hidden_state")
    with pytest.raises(ConfigError, match="a reader is called 'last_hidden_state'"):
        export_onnx(bank, tmp_path / "out", main=True)

    def refuse(*_: Any, **__: Any) -> None:
        sys.stderr.write("hundreds of lines of a traced program\n")
        raise RuntimeError("not translated") from NotImplementedError("no counterpart of aten.odd\nin ONNX")

    monkeypatch.setattr(torch.export, "export", refuse)
    with pytest.raises(UnsupportedModelError, match=r"cannot be written as ONNX \(no counterpart of aten\.odd\)"):
        export_onnx(tiny_bank(), tmp_path / "out")
    assert "traced program" not in capsys.readouterr().err
    lost = ModuleNotFoundError("No module named 'onnx_ir'", name="onnx_ir")
    monkeypatch.setattr(onnx, "import_module", Mock(side_effect=lost))  # onnxscript is there, what it needs is not
    with pytest.raises(MissingExtraError, match=r"export: needs the package 'onnx_ir'.*'lamina\[onnx\]'"):
        export_onnx(tiny_bank(), tmp_path / "out")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingExtraError, match=r"export: .*pip install 'lamina\[onnx\]'"):
        export_onnx(tiny_bank(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("untraced")
def test_a_graph_that_onnxruntime_refuses_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    monkeypatch.setattr(onnx, "_write", lambda plan, path, opset: path.write_bytes(b"no graph"))
    with pytest.raises(UnsupportedModelError, match="onnxruntime does not run the graph"):
        export_onnx(BertModel(tiny_config(num_hidden_layers=1)), tmp_path)


def test_tokens_of_an_encoder_alone_need_no_decoder():
    bank = ReaderBank(model_of("t5"))
    bank.add("r", Reader(ScalarMix(), TokenClassification(("a", "b"), encoder_layers=0), "encoder"))
    assert list(onnx.ExportPlan(bank.eval(), None, main=False).inputs(2, 7)) == ["input_ids", "attention_mask"]
    bank.add("s", Reader(ScalarMix(), TokenClassification(("a", "b"), encoder_layers=0), "decoder"))
    assert list(onnx.ExportPlan(bank.eval(), None, main=False).inputs(2, 7))[2:] == [
        "decoder_input_ids",
        "decoder_attention_mask",
    ]


def test_an_unknown_key_is_named_with_those_of_its_own_place(tmp_path: Path):
    output = {"kind": None, "problem_type": None, "labels": [], "axes": [], "max_length": None}
    score = {"metric": "f1", "float32": 0.5, "int8": 0.5}
    facts: dict[str, Any] = {"format": 1, "base": None, "model_type": "bert", "inputs": [], "files": []}
    for extra, known in (
        ({"outputs": {"mood": {**output, "axis": 1}}}, "'outputs.mood.axis'; known: outputs.mood.kind, "),
        ({"outputs": {}, "int8": {"mood": {**score, "int9": 1}}}, "'int8.mood.int9'; known: int8.mood.metric, "),
        ({"outputs": {}, "file": []}, "'file'; known: format, base"),
    ):
        (tmp_path / "onnx.json").write_text(json.dumps(facts | {"max_difference": 0.0} | extra))
        with pytest.raises(UnknownNameError, match=f"unknown key {known}"):
            onnx.OnnxFacts.read(tmp_path / "onnx.json")


def test_a_missing_or_wrong_field_is_named_before_an_unknown_key_which_is_named_as_it_is(tmp_path: Path):
    path = tmp_path / "onnx.json"
    for score, message in (({"int9": 1}, "has no 'metric'"), ({"metric": 3, "int9": 1}, "has '3' as 'metric'")):
        path.write_text(json.dumps(score))
        with pytest.raises(StoreError, match=message):
            onnx.Int8Score.read(path)
    path.write_text(json.dumps({"metric": "f1", "float32": 0.5, "int8": 0.5, ".int8": 0.5}))
    with pytest.raises(UnknownNameError, match=r"unknown key '\.int8'; known: metric, float32"):
        onnx.Int8Score.read(path)
