"""Models whose blocks were dropped, moved and repeated load in the engine, which writes the same greedy tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="`make test-vllm` runs these tests in an environment of their own")

from benchmarks.vllm_engines import as_inputs, engine, save_tokenizer
from engines import VOCABULARY, greedy_texts, make_model, prompts_of

import lamina
from vllm import SamplingParams

NEW = 12


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.full), "gemma3"])
def test_an_edited_model_writes_the_same_tokens(tmp_path: Path, family: str):
    make_model(tmp_path / "whole", family)
    model, _ = lamina.load(tmp_path / "whole", "causal_lm")
    lamina.drop_(model, 2)
    lamina.duplicate_(model, "2-3", identity=False)  # with other windows in other places
    lamina.duplicate_(model, 1)
    lamina.save(model, tmp_path / "edited")
    save_tokenizer(tmp_path / "edited", VOCABULARY)
    prompts = prompts_of(6)
    expected = greedy_texts(tmp_path / "edited", prompts, NEW)
    with engine(tmp_path / "edited", None, enforce_eager=True, in_process=True) as llm:
        outputs = llm.generate(
            as_inputs(prompts), SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True), use_tqdm=False
        )
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
