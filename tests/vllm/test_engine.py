"""Readers inside the real engine of vLLM: answers equal those of the bank, whatever the engine does with a request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="`make test-vllm` runs these tests in an environment of their own")

import torch
from engines import END, as_inputs, engine, largest_difference, make_bank, make_model, prompts_of, watchdog

from lamina import load, save, truncate_
from lamina.errors import BaseMismatchError, StoreError
from vllm import SamplingParams

CLOSE = 1e-4
SETTINGS = {
    # 24 requests of up to 190 tokens do not fit into 20 blocks of 32, so requests are preempted and computed again
    "compiled, in pieces, small cache": {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 20},
    "eager": {"enforce_eager": True},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("engine")
    make_model(folder / "model")
    make_bank(folder / "model", folder / "bank")
    return folder / "model", folder / "bank"


@pytest.fixture(scope="module", params=list(SETTINGS))
def llm(folders: tuple[Path, Path], request: pytest.FixtureRequest) -> Iterator[Any]:
    with engine(*folders, **SETTINGS[request.param]) as started:
        yield started


def greedy(count: int) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=1 + 7 * number % 40, temperature=0.0) for number in range(count)]


def test_answers_are_those_of_the_bank(folders: tuple[Path, Path], llm: Any):
    prompts = prompts_of(24)
    texts: list[list[list[int]]] = []
    for cache in ("cold", "warm"):
        outputs = llm.generate(as_inputs(prompts), greedy(24), use_tqdm=False)
        assert largest_difference(*folders, prompts, [output.outputs[0] for output in outputs]) < CLOSE
        cached = sum(output.num_cached_tokens for output in outputs)
        assert cached > (500 if cache == "warm" else 0)
        assert all(output.lamina is output.outputs[0].lamina for output in outputs)
        texts.append([list(output.outputs[0].token_ids) for output in outputs])
    assert texts[0] == texts[1]


def test_sequences_of_one_prompt_have_answers_of_their_own(folders: tuple[Path, Path], llm: Any):
    prompt = prompts_of(2)[0]
    sampling = SamplingParams(n=3, max_tokens=12, temperature=2.0)  # a seed ends the engine for CPUs
    (output,) = llm.generate(as_inputs([prompt]), sampling, use_tqdm=False)
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    assert largest_difference(*folders, [prompt] * 3, output.outputs) < CLOSE


def test_a_stop_string_and_an_end_token_end_the_scores(folders: tuple[Path, Path], llm: Any):
    prompt = prompts_of(2)[0]
    (plain,) = llm.generate(as_inputs([prompt]), SamplingParams(max_tokens=10, temperature=0.0), use_tqdm=False)
    third = plain.outputs[0].token_ids[3]
    for stop in ({"stop": [f"w{third}"]}, {"stop_token_ids": [third]}):
        sampling = SamplingParams(max_tokens=10, temperature=0.0, **stop)
        (output,) = llm.generate(as_inputs([prompt]), sampling, use_tqdm=False)
        assert output.outputs[0].finish_reason == "stop"
        assert largest_difference(*folders, [prompt], output.outputs) < CLOSE


def test_a_request_asks_for_readers_by_name(llm: Any):
    ask = {"extra_args": {"lamina": ["mean", "whole"]}}
    (output,) = llm.generate(as_inputs([[3, 4, 5]]), SamplingParams(max_tokens=2, **ask), use_tqdm=False)
    assert list(output.lamina) == ["mean", "whole"]
    wrong = SamplingParams(max_tokens=2, extra_args={"lamina": ["men"]})
    with pytest.raises(ValueError, match="unknown reader 'men'; known: query, mean, last, tags, whole, cut"):
        llm.generate(as_inputs([[3, 4, 5]]), wrong, use_tqdm=False)
    (after,) = llm.generate(as_inputs([[3, 4, 5]]), SamplingParams(max_tokens=2), use_tqdm=False)
    assert len(after.lamina) == 6


def test_a_monitor_ends_one_request_and_leaves_the_others(folders: tuple[Path, Path], tmp_path: Path):
    model, bank = folders
    prompts = prompts_of(12)
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    with engine(model, bank, enforce_eager=True) as llm:
        plain = llm.generate(as_inputs(prompts), sampling, use_tqdm=False)
    scores = [[row[1] for row in output.lamina["query"]["tokens"][len(prompt) :]]
              for prompt, output in zip(prompts, plain, strict=True)]  # fmt: skip
    highest = sorted(max(row) for row in scores)
    threshold = (highest[5] + highest[6]) / 2  # about half of the requests are flagged
    make_bank(model, tmp_path / "bank", watchdog(threshold))
    with engine(model, tmp_path / "bank", enforce_eager=True) as llm:
        watched = llm.generate(as_inputs(prompts), sampling, use_tqdm=False)
    for before, after, row in zip(plain, watched, scores, strict=True):
        ids, completion = list(before.outputs[0].token_ids), after.outputs[0]
        place = next((index for index, score in enumerate(row) if score >= threshold), None)
        verdict = completion.lamina.monitors["watchdog"]
        assert verdict.flagged_at == place
        if place is None:
            assert list(completion.token_ids) == ids
            assert completion.finish_reason == "length"
        else:  # the token after the one that was flagged was chosen in the same step
            assert list(completion.token_ids) == ids[: place + 2]
            assert completion.text == before.outputs[0].text[: len(completion.text)]
            assert (completion.finish_reason, completion.stop_reason) == ("content_filter", "watchdog")
    assert 3 <= sum(output.outputs[0].finish_reason == "content_filter" for output in watched) <= 9


def test_an_engine_without_a_bank_is_left_as_it_is(folders: tuple[Path, Path]):
    with engine(folders[0], None, enforce_eager=True) as llm:
        (output,) = llm.generate(as_inputs([[3, 4, END - 1]]), SamplingParams(max_tokens=2), use_tqdm=False)
    assert not hasattr(output, "lamina")
    assert "process_outputs" not in vars(llm.llm_engine.output_processor)


def test_what_cannot_work_is_refused_before_the_engine_starts(folders: tuple[Path, Path], tmp_path: Path):
    model, processor = load(folders[0])
    truncate_(model, 3)
    save(model, tmp_path / "other", processor)
    with pytest.raises(BaseMismatchError, match="layers"), engine(tmp_path / "other", folders[1]):
        pass
    with pytest.raises(StoreError, match="no bank"), engine(folders[0], tmp_path / "nowhere"):
        pass


def test_a_base_with_other_weights_is_refused_by_the_worker(
    folders: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    model, processor = load(folders[0], head="causal_lm")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    save(model, tmp_path / "other", processor)
    with pytest.raises(RuntimeError), engine(tmp_path / "other", folders[1], enforce_eager=True):
        pass
    assert "fingerprint" in capfd.readouterr().out + capfd.readouterr().err
