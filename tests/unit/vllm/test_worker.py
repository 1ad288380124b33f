"""The scores of an engine's steps, with a stand-in for the runner that hands on the states of transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import FAMILIES

from lamina import AdaLayers, PooledLayers, Reader, ReaderBank, SequenceClassification, save
from lamina.vllm.layout import Layout
from lamina.vllm.worker import EngineReaders, StepScores

BLOCK, BLOCKS = 4, 12


class FullAttentionSpec:
    block_size = BLOCK


class Engine:
    """Steps of requests whose tokens, cache blocks and numbers of computed tokens the test chooses."""

    def __init__(self, folder: Path) -> None:
        model = FAMILIES["llama"].build()
        save(model, folder / "model")
        self.bank = ReaderBank(model)
        self.bank.add("query", Reader(AdaLayers(dim=4), SequenceClassification(("a", "b"), pooling="query")))
        self.bank.add(
            "whole", Reader(PooledLayers(dim=4, heads=2), SequenceClassification(("a", "b"), pooling="first"))
        )
        self.bank.eval().save_pretrained(folder / "bank")
        layout = Layout.from_config({"lamina": {"bank": str(folder / "bank")}})
        assert layout is not None
        config = SimpleNamespace(
            num_blocks=BLOCKS, kv_cache_groups=[SimpleNamespace(kv_cache_spec=FullAttentionSpec())]
        )
        self.runner: Any = SimpleNamespace(
            model_config=SimpleNamespace(model=str(folder / "model"), revision=None),
            device=torch.device("cpu"),
            get_model=lambda: SimpleNamespace(set_aux_hidden_state_layers=lambda layers: None),
            kv_cache_config=config,
            vllm_config=SimpleNamespace(additional_config={}, cache_config=SimpleNamespace(enable_prefix_caching=True)),
            requests={},
        )
        self.readers = EngineReaders(layout, self.runner)
        self._slots = torch.zeros(64, dtype=torch.int64)  # used again in each step, as by the engine

    def step(self, *parts: tuple[str, list[int], int, int, int, list[int]], new: tuple[str, ...] = ()) -> Any:
        """Compute a step; each part is (request, its ids, tokens of its prompt, first position, count, its blocks)."""
        states: list[tuple[torch.Tensor, ...]] = []
        slots: list[int] = []
        for request, ids, prompt, first, count, blocks in parts:
            self.runner.requests[request] = SimpleNamespace(num_prompt_tokens=prompt)
            with torch.no_grad():
                output = self.bank.model(torch.tensor([ids]), output_hidden_states=True)
            states.append(tuple(state[0, first : first + count] for state in output.hidden_states))
            slots += [blocks[place // BLOCK] * BLOCK + place % BLOCK for place in range(first, first + count)]
        self._slots[: len(slots)] = torch.tensor(slots)
        *inner, last = [torch.cat(layer) for layer in zip(*states, strict=True)]
        table = np.zeros((len(parts), BLOCKS), dtype=np.int32)
        for row, part in enumerate(parts):
            table[row, : len(part[5])] = part[5]
        blocks_of = SimpleNamespace(
            block_size=BLOCK, slot_mapping=SimpleNamespace(gpu=self._slots), block_table=SimpleNamespace(np=table)
        )
        self.runner.input_batch = SimpleNamespace(
            req_ids=[part[0] for part in parts],
            num_computed_tokens_cpu=np.array([part[3] for part in parts]),
            block_table=[blocks_of],
        )
        scheduled = SimpleNamespace(
            num_scheduled_tokens={part[0]: part[4] for part in parts},
            scheduled_new_reqs=[SimpleNamespace(req_id=request) for request in new],
        )
        layers = self.readers._layers
        self.runner.execute_model_state = SimpleNamespace(
            scheduler_output=scheduled, aux_hidden_states=[inner[layer] for layer in layers], hidden_states=last
        )
        return self.readers.read_step()

    def check(self, scores: StepScores, ids: list[int], first: int, last: int, prompt: int | None) -> None:
        """Compare scores with a plain pass: those of the tokens from `first` to `last - 1`, and of the whole prompt."""
        rows = torch.from_numpy(np.frombuffer(scores.tokens, dtype=np.float32).reshape(-1, 3).copy())
        assert (scores.first, len(rows)) == (first, last - first)
        for place in range(first, last):
            torch.testing.assert_close(rows[place - first, :2], self.answer("query", ids, place, place + 1))
        assert (scores.prompt is None) == (prompt is None)
        if prompt is not None and scores.prompt is not None:
            whole = torch.from_numpy(np.frombuffer(scores.prompt, dtype=np.float32).copy())
            torch.testing.assert_close(whole, self.answer("whole", ids, 0, prompt))

    def answer(self, name: str, ids: list[int], first: int, last: int) -> torch.Tensor:
        tokens = torch.tensor([ids])
        states = self.bank.record_states({"main": range(self.bank.stacks["main"].layers)}, {"input_ids": tokens})
        kept = {"main": {layer: state[:, first:last] for layer, state in states["main"].items()}}
        batch = {"input_ids": tokens[:, first:last], "attention_mask": torch.ones(1, last - first).long()}
        with torch.no_grad():
            return self.bank.read_states(kept, batch)[name].logits[0]


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


A, B = [5, 6, 7, 8, 9, 10, 11, 12, 13], [5, 6, 7, 8, 20, 21, 22]


def test_prompts_in_pieces_and_shared_blocks_have_the_scores_of_a_plain_pass(engine: Engine):
    step = engine.step(("a", A, 6, 0, 3, [3]), new=("a",))
    engine.check(step["a"], A, 0, 3, None)
    step = engine.step(("a", A, 6, 3, 3, [3, 1]))
    engine.check(step["a"], A, 3, 6, 6)
    step = engine.step(("a", A, 6, 6, 1, [3, 1]), ("b", B, 6, 4, 2, [3, 7]), new=("b",))  # b's first block is cached
    engine.check(step["a"], A, 6, 7, None)
    engine.check(step["b"], B, 0, 6, 6)


def test_a_request_that_was_preempted_is_computed_again(engine: Engine):
    engine.step(("a", A, 6, 0, 6, [3, 1]), ("b", B, 6, 0, 6, [5, 6]), new=("a", "b"))
    engine.step(("a", A, 6, 6, 1, [3, 1]), ("b", B, 6, 6, 1, [5, 6]))
    step = engine.step(("a", A, 6, 4, 4, [3, 6]))  # the block of b is a's now; a's own first block is still cached
    engine.check(step["a"], A, 4, 8, None)
    step = engine.step(("c", A, 8, 0, 8, [2, 1]), new=("c",))
    engine.check(step["c"], A, 0, 8, 8)


def test_an_output_is_part_of_a_later_prompt_that_finds_it_in_the_cache(engine: Engine):
    engine.step(("a", A, 6, 0, 6, [3, 1]), new=("a",))
    for place in (6, 7):
        engine.step(("a", A, 6, place, 1, [3, 1]))
    step = engine.step(("b", A, 9, 8, 1, [3, 1, 2]), new=("b",))
    engine.check(step["b"], A, 0, 9, 9)


def test_without_a_prefix_cache_only_prompts_are_pooled(engine: Engine):
    engine.runner.vllm_config.cache_config.enable_prefix_caching = False
    engine.step(("a", A, 6, 0, 3, [3]), new=("a",))
    step = engine.step(("a", A, 6, 3, 3, [3, 1]), ("b", B, 7, 0, 2, [5]), new=("b",))
    engine.check(step["a"], A, 3, 6, 6)
    buffers = engine.readers._buffers
    assert buffers is not None
    step = engine.step(("a", A, 6, 6, 1, [3, 1]), ("b", B, 7, 2, 5, [5, 7]))  # an output's token, and the prompt's rest
    engine.check(step["b"], B, 2, 7, 7)
    engine.step(("a", A, 6, 7, 1, [3, 1]), ("b", [*B, 23], 7, 7, 1, [5, 7]))
    assert not len(buffers.pending)
    step = engine.step(("b", B, 7, 0, 7, [1, 3]))  # preempted, and computed again in blocks that had an output
    engine.check(step["b"], B, 0, 7, None)
    step = engine.step(("c", A, 6, 0, 6, [7, 3]), new=("c",))
    engine.check(step["c"], A, 0, 6, 6)


def test_an_id_that_is_used_again_is_a_request_of_its_own(engine: Engine):
    engine.step(("a", A, 6, 0, 6, [3, 1]), new=("a",))
    del engine.runner.requests["a"]
    step = engine.step(("a", B, 6, 4, 2, [3, 7]), new=("a",))
    engine.check(step["a"], B, 0, 6, 6)


def test_requests_that_ended_are_forgotten(engine: Engine):
    engine.step(("a", A, 6, 0, 6, [3, 1]), ("b", B, 6, 0, 6, [5, 6]), new=("a", "b"))
    del engine.runner.requests["a"]
    engine.step(("b", B, 6, 6, 1, [5, 6]))
    assert set(engine.readers._sent) == {"b"}
    assert engine.readers._answered == {"b"}
