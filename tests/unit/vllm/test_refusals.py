"""Engines and banks that readers cannot run with, and what was not tried."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.portions import one_in
from tiny import FAMILIES

from lamina import (
    AdaLayers,
    ExtraLayers,
    PairedLayers,
    PooledLayers,
    Reader,
    ReaderBank,
    SequenceClassification,
    TokenClassification,
    save,
)
from lamina.errors import BaseMismatchError, ConfigError
from lamina.heads.masked_lm import MaskedLM
from lamina.vllm import pooling_models
from lamina.vllm.layout import Layout, check_engine, warn_untried
from lamina.vllm.worker import _check_readers, cache_group, load_bank

MODEL = SimpleNamespace(pooler_config=None, quantization=None, hf_config=SimpleNamespace())
STORED = SimpleNamespace(quantization_config={"quant_method": "fp8"})
CHUNKS = SimpleNamespace(enable_chunked_processing=True)
ONE_PROCESS: dict[str, Any] = {
    "pipeline_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "use_ubatching": False,
}


def parallel(**changes: Any) -> dict[str, SimpleNamespace]:
    return {"parallel_config": SimpleNamespace(**{**ONE_PROCESS, **changes})}


def engine_config(**changes: Any) -> SimpleNamespace:
    fields: dict[str, Any] = {
        "speculative_config": None,
        "lora_config": None,
        "kv_transfer_config": None,
        **parallel(),
        "model_config": MODEL,
    }
    return SimpleNamespace(**{**fields, **changes})


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("speculative decoding", {"speculative_config": object()}),
        ("LoRA", {"lora_config": object()}),
        ("a KV connector", {"kv_transfer_config": object()}),
        ("pipeline parallelism", parallel(pipeline_parallel_size=2)),
        ("context parallelism", parallel(prefill_context_parallel_size=2)),
        ("context parallelism", parallel(decode_context_parallel_size=2)),
        ("micro-batches", parallel(use_ubatching=True)),
        ("quantisation", {"model_config": SimpleNamespace(**{**vars(MODEL), "quantization": "fp8"})}),
        ("long texts in chunks", {"model_config": SimpleNamespace(**{**vars(MODEL), "pooler_config": CHUNKS})}),
    ],
)
def test_an_engine_that_readers_do_not_support_is_refused(name: str, changes: dict[str, Any]):
    check_engine(engine_config())
    quantised = {**vars(MODEL), "quantization": "fp8", "hf_config": STORED}  # a checkpoint of quantised weights
    check_engine(engine_config(model_config=SimpleNamespace(**quantised)))
    with pytest.raises(ConfigError, match=f"the engine uses {name}.*, with which readers do not run"):
        check_engine(engine_config(**changes))


def test_a_cache_that_forgets_tokens_is_refused():
    window = SimpleNamespace(kv_cache_spec=type("SlidingWindowSpec", (), {})())
    full = SimpleNamespace(kv_cache_spec=type("FullAttentionSpec", (), {})())
    assert cache_group(SimpleNamespace(kv_cache_groups=[window, full])) == 1
    with pytest.raises(ConfigError, match="no layer of the model keeps all tokens"):
        cache_group(SimpleNamespace(kv_cache_groups=[window]))


def saved(folder: Path, family: str, reader: Reader) -> tuple[Layout, SimpleNamespace]:
    """Save a model and a bank with one reader; return the bank's layout, and a runner whose engine serves the model."""
    model = FAMILIES[family].build()
    save(model, folder / "model")
    bank = ReaderBank(model)
    bank.add("it", reader)
    bank.save_pretrained(folder / "bank")
    layout = Layout.from_config({"lamina": {"bank": str(folder / "bank")}})
    assert layout is not None
    return layout, SimpleNamespace(model_config=SimpleNamespace(model=str(folder / "model"), revision=None))


MEAN = SequenceClassification(("a", "b"), pooling="mean")


@pytest.mark.parametrize(
    ("family", "reader", "message"),
    one_in(
        3,
        [
            (
                "llama",
                Reader(AdaLayers(dim=8), SequenceClassification(("a", "b"))),
                "'it' has a head .* looks at other",
            ),
            ("llama", Reader(AdaLayers(dim=8), TokenClassification(("O", "X"))), "'it' has a head .* looks at other"),
            ("llama", Reader(AdaLayers(dim=4, positions=True), MEAN), "'it' has a fusion .* looks at other"),
            ("llama", Reader(PairedLayers(dim=4), SequenceClassification(("a", "b"), pooling="first")), "'it'"),
            ("bert", Reader(AdaLayers(dim=4), MEAN), "the states of Bert.* depend on later tokens"),
        ],
    ),
)
def test_a_bank_that_needs_later_tokens_is_refused(tmp_path: Path, family: str, reader: Reader, message: str):
    layout, runner = saved(tmp_path, family, reader)
    with pytest.raises(ConfigError, match=message):
        load_bank(layout, runner, _check_readers)


@pytest.mark.parametrize(
    ("family", "reader", "message"),
    one_in(
        2,
        [
            (
                "bert",
                Reader(PairedLayers(dim=4), SequenceClassification(("a", "b"), pooling="first")),
                "'it' tells two",
            ),
            ("bert", Reader(AdaLayers(dim=4), MaskedLM()), "'it' has a head of the kind masked_lm for a vocabulary"),
            ("bert", Reader(AdaLayers(dim=4, positions=True), MEAN), None),
            ("bert", Reader(AdaLayers(dim=8), TokenClassification(("O", "X"), encoder_layers=1)), None),
        ],
    ),
)
def test_a_pooling_model_refuses_readers_that_need_more_than_one_text(
    tmp_path: Path, family: str, reader: Reader, message: str | None
):
    layout, runner = saved(tmp_path, family, reader)
    if message is None:
        load_bank(layout, runner, pooling_models._check_readers)
        return
    with pytest.raises(ConfigError, match=message):
        load_bank(layout, runner, pooling_models._check_readers)


def test_a_reader_of_the_second_text_is_refused(tmp_path: Path):
    head = SequenceClassification(("a", "b"), pooling="first")
    layout, runner = saved(tmp_path, "llama", Reader(PooledLayers(dim=8, heads=2, queries=1, over="second"), head))
    for check in (_check_readers, pooling_models._check_readers):
        with pytest.raises(ConfigError, match="reader 'it' tells two texts apart"):
            load_bank(layout, runner, check)


def test_a_reader_inside_the_blocks_is_refused(tmp_path: Path):
    layout, runner = saved(tmp_path, "llama", Reader(ExtraLayers(), MEAN))
    for check in (_check_readers, pooling_models._check_readers):
        with pytest.raises(ConfigError, match="reader 'it' reads inside blocks, where an engine does not"):
            load_bank(layout, runner, check)


def test_texts_of_like_length_are_read_together_and_a_long_one_apart(tmp_path: Path):
    _, runner = saved(tmp_path, "bert", Reader(AdaLayers(dim=4), MEAN))
    layout: Any = Layout.from_config({"lamina": {"bank": str(tmp_path / "bank")}}, pooling=True)
    vars(runner.model_config)["dtype"] = torch.float32
    device, model = torch.device("cpu"), FAMILIES["bert"].build()
    vars(runner).update(device=device, max_num_tokens=2048, get_model=lambda: model, _dummy_run=None)
    readers = pooling_models.TextReaders(layout, runner)
    width, depth = model.config.hidden_size, model.config.num_hidden_layers
    states = list(torch.randn(depth + 1, 506, width, generator=torch.Generator().manual_seed(0)))
    groups: list[list[str]] = []

    def read(**lengths: int) -> dict[str, bytes]:
        """Return the logits of texts that follow one another in a step, as bytes."""
        ends = np.array([0, *lengths.values()]).cumsum()
        vars(runner).update(
            query_start_loc=SimpleNamespace(np=ends),
            requests={name: SimpleNamespace(num_prompt_tokens=count) for name, count in lengths.items()},
            input_batch=SimpleNamespace(
                num_reqs=len(lengths),
                req_ids=list(lengths),
                num_computed_tokens_cpu=np.zeros(len(lengths)),
                token_ids_cpu=np.ones((len(lengths), 512), dtype=np.int64),
            ),
        )
        return {name: score.prompt for name, score in readers.read_step(states[-1], int(ends[-1])).items()}

    def answer(texts: Any, ids: Any) -> Any:
        groups.append(sorted(texts))
        return original(texts, ids)

    original, readers._answer = readers._answer, answer
    readers._taps = SimpleNamespace(states=lambda layers, tokens: [states[layer][:tokens] for layer in layers])
    together = read(a=3, long=500, b=3)
    assert sorted(groups) == [["a", "b"], ["long"]]
    alone = read(a=3)["a"]
    np.testing.assert_allclose(*(np.frombuffer(one, np.float32) for one in (together["a"], alone)), atol=1e-6)


def test_a_base_with_other_weights_is_refused(tmp_path: Path):
    layout, runner = saved(tmp_path, "llama", Reader(AdaLayers(dim=4), MEAN))
    load_bank(layout, runner, _check_readers)
    model = FAMILIES["llama"].build()
    with torch.no_grad():
        next(model.parameters())[3, 0] += 1
    save(model, tmp_path / "model")
    with pytest.raises(BaseMismatchError, match="fingerprint"):
        load_bank(layout, runner, _check_readers)


def test_what_was_not_tried_gives_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    layout, _ = saved(tmp_path, "llama", Reader(AdaLayers(dim=4), MEAN))
    caplog.clear()  # its reader was not trained
    with caplog.at_level(logging.WARNING, "vllm.lamina"):
        warn_untried(layout, "0.32.0", "float32")
        assert not caplog.messages
        warn_untried(layout, "0.99.1", "bfloat16")
    version, dtype = caplog.messages
    assert version == "lamina: vLLM 0.99.1 was not tried with readers; versions that were: 0.32.0."
    assert "computes in bfloat16 and the bank was trained on float32" in dtype


def test_a_bank_of_another_depth_or_width_is_refused(tmp_path: Path):
    layout, _ = saved(tmp_path, "llama", Reader(AdaLayers(dim=4), MEAN))
    stack = next(iter(layout.manifest.base.stacks.values()))
    layout.check_base(layers=stack.layers, width=stack.width)
    for facts, name in (((stack.layers + 1, stack.width), "layers"), ((stack.layers, 2 * stack.width), "width")):
        with pytest.raises(BaseMismatchError, match=name):
            layout.check_base(layers=facts[0], width=facts[1])
