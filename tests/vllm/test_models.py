"""Other models than Llama in the real engine, and engines that share one model in two processes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="`make test-vllm` runs these tests in an environment of their own")

from benchmarks.vllm_engines import CLOSE, as_inputs, engine
from engines import largest_difference, make_bank, make_model, prompts_of

from lamina import AdaLayers, Reader, ReaderBank, SequenceClassification, load
from vllm import SamplingParams

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


# Gemma 3 has no interface for its states, and blocks with and without a sliding window
@pytest.mark.parametrize(
    ("family", "eager"),
    [
        ("gemma3", True),  # compiling takes a minute; test_engine.py has a compiled engine
        pytest.param("qwen3", False, marks=pytest.mark.full),
        pytest.param("gemma3", False, marks=pytest.mark.full),
    ],
)
def test_answers_are_those_of_the_bank(tmp_path: Path, family: str, eager: bool):
    make_model(tmp_path / "model", family)
    make_bank(tmp_path / "model", tmp_path / "bank")
    prompts = prompts_of(10)
    settings = {"enforce_eager": eager, "max_num_batched_tokens": 64, "in_process": True}
    with engine(tmp_path / "model", tmp_path / "bank", **settings) as llm:
        for _ in range(2):  # a cold and a warm prefix cache
            outputs = llm.generate(as_inputs(prompts), GREEDY, use_tqdm=False)
            completions = [output.outputs[0] for output in outputs]
            assert largest_difference(tmp_path / "model", tmp_path / "bank", prompts, completions) < CLOSE
    assert sum(output.num_cached_tokens for output in outputs) > 100


def test_a_bank_that_reads_other_layers_gets_code_of_its_own(tmp_path: Path):
    make_model(tmp_path / "model")
    text = prompts_of(2)[0]
    for layers in ((1, 2), (0, 3)):  # vLLM stores the compiled code of the first engine
        bank = ReaderBank(*load(tmp_path / "model"))
        head = SequenceClassification(("a", "b"), pooling="mean")
        bank.add("it", Reader(AdaLayers(dim=256, layers=layers), head))
        shutil.rmtree(tmp_path / "bank", ignore_errors=True)
        bank.eval().save_pretrained(tmp_path / "bank")
        with engine(tmp_path / "model", tmp_path / "bank", in_process=True) as llm:
            (output,) = llm.generate(as_inputs([text]), GREEDY, use_tqdm=False)
        ids = torch.tensor([text])
        with torch.no_grad():
            want = bank(input_ids=ids)["it"].logits[0].softmax(-1).tolist()
        got = list(output.lamina["it"]["prompt"]["probabilities"].values())
        assert got == pytest.approx(want, abs=CLOSE)


def test_two_workers_that_share_the_weights_give_the_same_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the two workers would need a NUMA node each
    make_model(tmp_path / "model")
    make_bank(tmp_path / "model", tmp_path / "bank")
    prompts = prompts_of(6)
    settings = {"tensor_parallel_size": 2, "enforce_eager": True, "distributed_executor_backend": "mp"}
    with engine(tmp_path / "model", tmp_path / "bank", **settings) as llm:
        outputs = llm.generate(as_inputs(prompts), GREEDY, use_tqdm=False)
    completions = [output.outputs[0] for output in outputs]
    assert largest_difference(tmp_path / "model", tmp_path / "bank", prompts, completions) < CLOSE
