"""Exported readers: their module gives the logits of the bank, by itself and inside vLLM and SGLang."""

from __future__ import annotations

import fnmatch
import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.portions import one_in
from tests.support.tiny import FAMILIES
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import lamina
from lamina import Reader, ReaderBank
from lamina.errors import ConfigError, StoreError, UnknownNameError
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.concat import Concat
from lamina.fusion.dwatt import DWAtt
from lamina.fusion.elementwise import Elementwise
from lamina.fusion.gated import Gated
from lamina.fusion.last_layer import LastLayer
from lamina.fusion.mean import Mean
from lamina.fusion.pooled_layers import PooledLayers
from lamina.fusion.routing import Routing
from lamina.fusion.scalar_mix import ScalarMix
from lamina.fusion.single_layer import SingleLayer
from lamina.heads.masked_lm import MaskedLM
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.store import plain_reader
from lamina.store.export import export_reader
from lamina.store.plain_reader import Answer, PlainReader

TWO = ("a", "b")
TAGS = TokenClassification(TWO, encoder_layers=0)
MEAN = SequenceClassification(TWO, pooling="mean")
TOKENS: dict[str, tuple[Any, Any]] = {
    "last": (LastLayer(), TAGS),
    "mean": (Mean(layers=(0, 2)), MEAN),
    "mix": (ScalarMix(), TAGS),
    "elementwise": (Elementwise(layers="top:2"), MEAN),
    "ada": (AdaLayers(dim=8, alpha=1.0), TAGS),
    "cut": (AdaLayers(dim=8, alpha=8.0, cutoff=0.2, layers="all", output_activation=False), MEAN),
    "single": (SingleLayer(2, dim=8), TAGS),
    "concat": (Concat(dim=8), TAGS),
    "concat and bias": (Concat(dim=2, bias=True), SequenceClassification(TWO, pooling="mean", linear=False)),
}
TEXTS: dict[str, tuple[Any, Any]] = {
    "attention": (AdaLayers(dim=16, alpha=1.0), SequenceClassification(TWO, attention_heads=4)),
    "first": (ScalarMix(), SequenceClassification(TWO, pooling="first")),
    "query": (AdaLayers(dim=4), SequenceClassification(TWO, pooling="query")),
    "pooled": (PooledLayers(dim=8, heads=4), SequenceClassification(("x", "y", "z"), pooling="first")),
    "pooled, attention": (PooledLayers(dim=8), SequenceClassification(TWO)),
    "pooled, queries": (PooledLayers(dim=8, heads=2, queries=3), SequenceClassification(TWO, pooling="first")),
    "encoder": (Concat(dim=8, layers="all"), TokenClassification(TWO, feedforward=16, attention_heads=2)),
    "encoders": (Mean(), TokenClassification(TWO, encoder_layers=2, feedforward=16, attention_heads=4)),
    "number": (Mean(), SequenceClassification(("score",), problem_type="regression", attention_heads=4)),
}


def names_of(readers: dict[str, tuple[Any, Any]]) -> dict[str, str]:
    return {key: "".join(letter for letter in key if letter.isalnum()) for key in readers}


NAMES = names_of(TOKENS | TEXTS)


def bank_on(model: Any, readers: dict[str, tuple[Any, Any]], stack: str | None = None) -> ReaderBank:
    """Readers whose parameters were moved away from their start."""
    bank = ReaderBank(model)
    for seed, (key, parts) in enumerate(readers.items()):
        bank.add(names_of(readers)[key], Reader(*parts, stack, seed=seed))
    with torch.no_grad():
        for number, parameter in enumerate(bank.parameters()):
            parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    return bank.eval()


def states_of(model: Any, inputs: dict[str, Tensor], rows: list[int], stack: str | None = None) -> dict[int, Tensor]:
    """The states of some texts, one after the other, without padding, as a server has them."""
    with lamina.tap(model, stack=stack) as states, torch.no_grad():
        model(**inputs)
    mask = inputs["decoder_attention_mask" if stack == "decoder" else "attention_mask"].bool()
    return {layer: torch.cat([state[row][mask[row]] for row in rows]) for layer, state in states.items()}


@pytest.mark.parametrize("key", one_in(3, [*TOKENS, *TEXTS]))
@torch.no_grad()
def test_the_exported_module_gives_the_logits_of_the_bank(key: str, tmp_path: Path):
    family, name = FAMILIES["bert"], NAMES[key]
    model = family.known()
    inputs = family.inputs(model, batch=3)
    bank = bank_on(model, TOKENS | TEXTS)
    export_reader(bank, name, tmp_path)
    reader, expected = PlainReader.load(tmp_path), bank(**inputs, readers=[name])[name].logits
    states = states_of(model, inputs, [0, 1, 2])
    assert sorted(reader.layers) == [bank[name].layers[index] for index in bank[name].fusion.active_layers()]
    assert key != "cut" or len(reader.layers) < len(bank[name].layers)
    lengths = inputs["attention_mask"].sum(1).tolist()
    if expected.ndim == 3:
        expected = expected[inputs["attention_mask"].bool()]
    own = {layer: states[layer] for layer in reader.layers}
    torch.testing.assert_close(reader(own, lengths), expected, rtol=0, atol=1e-5)
    first = {layer: state[: lengths[0]] for layer, state in own.items()}
    count = lengths[0] if bank[name].config.head.kind == "token_classification" else 1
    torch.testing.assert_close(reader(first), expected[:count], rtol=0, atol=1e-5)
    assert reader.per_token == (key in TOKENS)
    assert reader.labels == list(bank[name].config.head.labels)
    if key in TOKENS:
        parts = reader.tokens(own).split(lengths)
        said = torch.cat(parts) if count > 1 else torch.stack([part.mean(0) for part in parts])
        torch.testing.assert_close(said, expected, rtol=0, atol=1e-5)
    else:
        with pytest.raises(ValueError, match="this reader reads whole texts"):
            reader.tokens(own)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_is_read_as_the_bank_does(dtype: torch.dtype, tmp_path: Path):
    family = FAMILIES["bert"]
    model = family.build().to(dtype)
    inputs = family.inputs(model, batch=1)
    bank = bank_on(model, {"ada": TOKENS["ada"], "pooled": TEXTS["pooled"]})
    for name in bank:
        export_reader(bank, name, tmp_path / name)
        said = PlainReader.load(tmp_path / name)(states_of(model, inputs, [0]))
        expected = bank(**inputs)[name].logits[0]
        torch.testing.assert_close(said.squeeze(0), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@torch.no_grad()
def test_readers_of_either_stack(stack: str, tmp_path: Path):
    family = FAMILIES["bart"]
    model = family.known()
    inputs = family.inputs(model, batch=1)
    inputs["decoder_attention_mask"] = torch.ones_like(inputs["decoder_input_ids"])
    bank = bank_on(model, {"ada": TOKENS["ada"]}, stack)
    export_reader(bank, "ada", tmp_path)
    said = PlainReader.load(tmp_path)(states_of(model, inputs, [0], stack))
    torch.testing.assert_close(said, bank(**inputs)["ada"].logits[0], rtol=0, atol=1e-5)


def test_a_saved_bank_is_not_written_into(tmp_path: Path):
    bank = bank_on(FAMILIES["bert"].known(), {"ada": TOKENS["ada"]})
    bank.save_pretrained(tmp_path)
    before = (tmp_path / "readers" / "ada" / "reader.json").read_bytes()
    with pytest.raises(StoreError, match=r"holds reader\.json, .*made by something else"):
        export_reader(bank, "ada", tmp_path / "readers" / "ada")
    assert (tmp_path / "readers" / "ada" / "reader.json").read_bytes() == before


@pytest.mark.long
def test_it_needs_torch_and_safetensors_alone(tmp_path: Path):
    bank = bank_on(FAMILIES["bert"].known(), {"ada": TOKENS["ada"]})
    export_reader(bank, "ada", tmp_path / "ada")
    assert sorted(path.name for path in (tmp_path / "ada").iterdir()) == [
        "lamina_reader.py",
        "model.safetensors",
        "reader.json",
    ]
    script = """
import sys, torch
for name in ("lamina", "transformers", "accelerate", "jaxtyping"):
    sys.modules[name] = None
from lamina_reader import PlainReader
reader = PlainReader.load(sys.argv[1])
print(tuple(reader({layer: torch.zeros(5, 32) for layer in reader.layers}).shape))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "ada")], cwd=tmp_path / "ada", capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == ("(5, 2)\n", 0), done.stderr


# Refused exports


class MeanOfFeedForward(Mean):
    site = "ffn"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((Gated(hidden=4), TAGS), "reader 'r' has the fusion Gated, which is not exported. Use a sum of layers"),
        ((DWAtt(), TAGS), "has the fusion DWAtt"),
        ((MeanOfFeedForward(), MEAN), "reader 'r' reads inside the blocks, and an exported reader gets only"),
        ((Routing(dim=2, size=8, vectors=4), MEAN), "has the fusion Routing"),
        ((AdaLayers(dim=8, positions=True), MEAN), r"has the fusion AdaLayers\(positions=True\)"),
        ((Mean(), MaskedLM()), "reader 'r' has a head for masked_lm; those that label texts or tokens are exported"),
    ],
)
def test_other_readers_are_refused(parts: tuple[Any, Any], message: str, tmp_path: Path):
    bank = bank_on(FAMILIES["roberta-MaskedLM"].known(), {"r": parts})
    with pytest.raises(ConfigError, match=f"export_reader: .*{message}"):
        export_reader(bank, "r", tmp_path / "out")
    with pytest.raises(UnknownNameError, match="unknown reader 's'"):
        export_reader(bank, "s", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_replaced_if_it_is_a_reader(tmp_path: Path):
    bank = bank_on(FAMILIES["bert"].known(), {"mean": TOKENS["mean"], "ada": TOKENS["ada"]})
    (tmp_path / "notes.txt").write_text("mine")
    for name in ("mean", "ada"):
        export_reader(bank, name, tmp_path)
        assert json.loads((tmp_path / "reader.json").read_text())["name"] == name
    assert (tmp_path / "notes.txt").read_text() == "mine"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").write_text("of something else")
    with pytest.raises(StoreError, match=r"holds model\.safetensors but no lamina_reader\.py"):
        export_reader(bank, "ada", tmp_path / "other")


def test_states_that_do_not_fit_are_refused(tmp_path: Path):
    bank = bank_on(FAMILIES["bert"].known(), {"ada": TOKENS["ada"]})
    export_reader(bank, "ada", tmp_path)
    reader = PlainReader.load(tmp_path)
    states = {layer: torch.zeros(5, 32) for layer in (1, 3)}
    with pytest.raises(ValueError, match=r"no states of layer 2; this reader needs the layers \[1, 2, 3\]"):
        reader(states)
    states[2] = torch.zeros(5, 32)
    for lengths in ([3, 3], [5, 0]):
        with pytest.raises(ValueError, match="the states have 5 tokens; lengths are"):
            reader(states, lengths)
    with pytest.raises(ValueError, match=r"reader\.json has format 2; this file reads 1"):
        PlainReader({**reader.settings, "format": 2}, {})


# Servers: stand-ins of the shapes that vLLM and SGLang document


class Norm(nn.Module):
    """As the servers' RMSNorm: with a residual it adds first, in place, and returns both."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, states: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            return F.rms_norm(states, states.shape[-1:], self.weight, self.eps)
        residual.add_(states)
        states.copy_(F.rms_norm(residual, states.shape[-1:], self.weight, self.eps))
        return states, residual


class Block(nn.Module):
    """A block of a server: `[tokens, width]` of all requests, and the residual stream kept apart."""

    def __init__(self, block: Any, batch: Any) -> None:
        super().__init__()
        self.attention, self.mlp, self.batch = block.self_attn, block.mlp, batch
        self.input_layernorm, self.post_attention_layernorm = (
            Norm(block.input_layernorm),
            Norm(block.post_attention_layernorm),
        )

    def forward(self, positions: Tensor, states: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        residual = rest[-1]
        if residual is None:
            residual, states = states, self.input_layernorm(states)
        else:
            states, residual = self.input_layernorm(states, residual)
        states = self._attend(states, positions)
        states, residual = self.post_attention_layernorm(states, residual)
        return self.mlp(states), residual

    def _attend(self, states: Tensor, positions: Tensor) -> Tensor:
        outputs = []
        for part, place in zip(states.split(self.batch.lengths), positions.split(self.batch.lengths), strict=True):
            turns = self.batch.rotary(part[None], place[None])
            mask = torch.ones(1, 1, len(part), len(part), dtype=torch.bool).tril()
            outputs.append(self.attention(part[None], position_embeddings=turns, attention_mask=mask)[0][0])
        return torch.cat(outputs)


class Served(nn.Module):
    """A Llama as a server runs it; `extra` is what its blocks are given besides (SGLang: the forward batch)."""

    def __init__(self, model: Any, *extra: Any) -> None:
        super().__init__()
        inside, self.lengths, self.extra = model.model, list[int](), extra
        self.rotary = inside.rotary_emb.forward
        self.model = nn.Module()
        self.model.embed_tokens = inside.embed_tokens
        outer = self

        class Batch:
            rotary = staticmethod(inside.rotary_emb.forward)

            @property
            def lengths(self) -> list[int]:
                return outer.lengths

        self.model.layers = nn.ModuleList(Block(block, Batch()) for block in inside.layers)
        self.model.norm = Norm(inside.norm)

    def forward(self, texts: list[Tensor]) -> Tensor:
        self.lengths[:] = map(len, texts)
        positions = torch.cat([torch.arange(len(text)) for text in texts])
        states, residual = self.model.embed_tokens(torch.cat(texts)), None
        for block in self.model.layers:
            states, residual = block(positions, states, *self.extra, residual)
        return self.model.norm(states, residual)[0]


def llama() -> Any:
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, attn_implementation="sdpa", **sizes)).eval()


def texts_of(*lengths: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randint(5, 90, (length,), generator=rng) for length in lengths]


SERVED = {
    "ada": TOKENS["ada"],
    "embeddings": (Mean(layers="all"), TAGS),
    "last": TOKENS["last"],
    "low": (AdaLayers(dim=8, layers=(1, 2)), MEAN),
}


def assert_answers(answers: list[Answer], bank: ReaderBank, name: str, texts: list[Tensor]) -> None:
    expected = [bank(input_ids=text[None], readers=[name])[name].logits[0] for text in texts]
    (answer,) = answers
    said: Any = answer.logits.split([len(text) for text in texts])
    if name == "low":
        said = [part.mean(0) for part in said]
    for part, own in zip(said, expected, strict=True):
        torch.testing.assert_close(part, own, rtol=0, atol=1e-5)
    if name == "last":
        assert answer.positions is None  # the norm is given none
        assert answer.requests is None
    else:
        assert answer.positions is not None
        assert answer.requests == [*"xxxxyzzzzzz"]
        assert answer.positions.tolist() == [place for text in texts for place in range(len(text))]


@pytest.fixture(autouse=True)
def _nothing_attached():
    plain_reader._listeners.clear()


def register_forward_hooks(model: nn.Module, specs: list[dict[str, Any]]) -> None:
    """What SGLang does with `--forward-hooks`, by its documentation."""
    for spec in specs:
        module, _, factory = spec["hook_factory"].partition(":")
        hook = getattr(importlib.import_module(module), factory)(spec.get("config") or {})
        for name, part in dict(model.named_modules()).items():
            if any(fnmatch.fnmatch(name, pattern) for pattern in spec["target_modules"]):
                if spec.get("hook_type", "forward") == "forward_pre":
                    part.register_forward_pre_hook(hook)
                else:
                    part.register_forward_hook(hook)


@pytest.mark.parametrize("sink", [None, "sinks:take"])
@torch.no_grad()
def test_a_reader_takes_part_in_the_passes_of_sglang(sink: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = llama()
    bank, texts = bank_on(model, SERVED), texts_of(4, 1, 6)
    batch = SimpleNamespace(rids=["x", "y", "z"], extend_seq_lens_cpu=[4, 1, 6])
    served = Served(model, batch)
    expected = served(texts)
    for name in bank:
        export_reader(bank, name, tmp_path / name)
    monkeypatch.syspath_prepend(str(tmp_path / "ada"))
    collector = "class Heard(list):\n    __call__ = list.append\n\ntake = HEARD = Heard()\n"  # falsy at first
    (tmp_path / "ada" / "sinks.py").write_text(collector)
    module = importlib.import_module("lamina_reader")
    try:
        for name in bank:
            specs = json.loads(json.dumps(module.forward_hooks(tmp_path / name, sink)))
            register_forward_hooks(served, specs)
        assert torch.equal(served(texts), expected)
        heard = importlib.import_module("sinks").HEARD
        for number, name in enumerate(["low", "ada", "embeddings", "last"]):  # in the order of their last layers
            listener = module._listeners[str(tmp_path / name)]
            answers = list(listener.answers) if sink is None else heard[number : number + 1]
            assert_answers([Answer(*answer) for answer in answers], bank, name, texts)
    finally:
        for name in ("lamina_reader", "sinks"):
            sys.modules.pop(name, None)


@torch.no_grad()
def test_hooks_that_would_give_wrong_states_are_refused(tmp_path: Path):
    model = llama()
    bank = bank_on(model, {**SERVED, "pooled": TEXTS["pooled"]})
    for name in bank:
        export_reader(bank, name, tmp_path / name)
    served = Served(model)
    with pytest.raises(ValueError, match="this reader reads whole texts"):
        plain_reader.hook_factory({"folder": str(tmp_path / "pooled"), "layer": 0})
    late = plain_reader.hook_factory({"folder": str(tmp_path / "embeddings"), "layer": 0})
    served.model.layers[0].register_forward_hook(late)  # of an SGLang that has no hook_type
    with pytest.raises(ValueError, match="layer 0 is the input of a block, which has changed by its end"):
        served(texts_of(3))
    other = plain_reader.hook_factory({"folder": str(tmp_path / "low"), "layer": 1})
    with pytest.raises(ValueError, match="states have width 16; the reader needs 32"):
        other(nn.Identity(), (), torch.zeros(3, 16))


@torch.no_grad()
def test_a_pass_of_sglang_that_was_not_heard_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bank = bank_on(llama(), {"low": SERVED["low"]})
    export_reader(bank, "low", tmp_path / "low")
    lower, upper = (plain_reader.hook_factory({"folder": str(tmp_path / "low"), "layer": layer}) for layer in (1, 2))
    states, decoding = torch.zeros(2, 32), SimpleNamespace(rids=["x", "y"], extend_seq_lens_cpu=None)
    positions = torch.tensor([4, 7])
    for _ in range(2):
        lower(nn.Identity(), (positions, states, decoding), states)
        upper(nn.Identity(), (), states)
        positions += 1  # a buffer that the server uses again
    answers = plain_reader._listeners[str(tmp_path / "low")].answers
    assert [answer.requests for answer in answers] == [["x", "y"]] * 2
    assert [answer.positions.tolist() for answer in answers if answer.positions is not None] == [[4, 7], [5, 8]]
    with pytest.raises(RuntimeError, match="layer 2 was read, but not every layer below"):
        upper(nn.Identity(), (), states)
    lower(nn.Identity(), (), states)
    with pytest.warns(UserWarning, match="a pass ended after layer 1; the reader also needs layer 2"):
        lower(nn.Identity(), (), states)  # the pass before was aborted, and this one is read
    upper(nn.Identity(), (), states)
    assert len(answers) == 3
    lower(nn.Identity(), (), states)
    with pytest.warns(UserWarning, match="a pass ended after layer 1"):
        lower(nn.Identity(), (), states)
    with pytest.raises(RuntimeError, match="a pass ended after layer 1; the reader also needs layer 2"):
        lower(nn.Identity(), (), states)
    lower(nn.Identity(), (SimpleNamespace(rids=["x"], extend_seq_lens_cpu=[5]),), states)
    with pytest.raises(ValueError, match="the requests of the pass have 5 tokens; the states have 2"):
        upper(nn.Identity(), (), states)
    for name in ("is_available", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    with pytest.raises(RuntimeError, match="captured or compiled code calls no hooks"):
        lower(nn.Identity(), (), states)


@torch.no_grad()
def test_states_that_vllm_has_written_are_read(tmp_path: Path):
    """`extract_hidden_states`: `[tokens, layers, width]` of one request; its id i is our layer i, below the last."""
    model, text = llama(), texts_of(7)[0]
    bank = bank_on(model, {"pooled": (PooledLayers(dim=8, layers=(0, 1, 2)), TEXTS["pooled"][1])})
    export_reader(bank, "pooled", tmp_path)
    with lamina.tap(model, [0, 1, 2]) as states:
        model(text[None])
    hidden, ids = torch.stack([states[layer][0] for layer in (0, 1, 2)], dim=1), [0, 1, 2]
    reader = PlainReader.load(tmp_path)
    said = reader({layer: hidden[:, number] for number, layer in enumerate(ids)})
    torch.testing.assert_close(said, bank(input_ids=text[None])["pooled"].logits, rtol=0, atol=1e-5)
    shutil.rmtree(tmp_path)
