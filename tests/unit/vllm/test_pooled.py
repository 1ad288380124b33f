"""Readers of whole prompts, computed from parts per cache block."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import FAMILIES

from lamina import PooledLayers, Reader, ReaderBank, SequenceClassification
from lamina.vllm.pooled import PendingTokens, PooledReaders, Segments

BLOCK = 4


@pytest.fixture(scope="module")
def bank() -> ReaderBank:
    bank = ReaderBank(FAMILIES["llama"].build())
    head = SequenceClassification(("no", "yes"), pooling="first")
    fusion = PooledLayers(dim=8, heads=2, queries=3, layers="0-2")
    for number, name in enumerate(("first", "second")):
        bank.add(name, Reader(fusion, head, seed=number))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in bank.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    return bank.eval()


def states_of(bank: ReaderBank, count: int, seed: int) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    width = bank.stacks["main"].width
    return {layer: 3 * torch.randn(count, width, generator=generator) for layer in range(3)}


def expected(bank: ReaderBank, states: dict[int, torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = torch.ones(1, len(states[0]), dtype=torch.long)
    recorded = {"main": {layer: state.unsqueeze(0) for layer, state in states.items()}}
    with torch.no_grad():
        output = bank.read_states(recorded, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    return {name: output[name].logits[0] for name in bank}


def slots_of(blocks: list[int], count: int) -> np.ndarray:
    return np.array([blocks[position // BLOCK] * BLOCK + position % BLOCK for position in range(count)])


@pytest.mark.parametrize("pieces", [(11,), (4, 7), (1, 1, 9), (6, 5), (3, 2, 6)])
def test_a_prompt_in_pieces_gives_what_the_bank_gives(bank: ReaderBank, pieces: tuple[int, ...]):
    readers = PooledReaders({name: bank[name] for name in bank}, blocks=8, device=torch.device("cpu"))
    states, slots, blocks = states_of(bank, 11, seed=1), slots_of([5, 2, 7], 11), [5, 2, 7]
    readers.add(states_of(bank, 12, seed=9), Segments.of_slots(slots_of(blocks, 12), BLOCK))  # an older request
    begin = 0
    for piece in pieces:
        rows = slice(begin, begin := begin + piece)
        part = {layer: state[rows] for layer, state in states.items()}
        readers.add(part, Segments.of_slots(slots[rows], BLOCK))
    logits = readers.logits(torch.tensor(blocks))
    for name, want in expected(bank, states).items():
        torch.testing.assert_close(logits[name], want, atol=1e-5, rtol=0)


def test_requests_of_one_step_and_a_shared_prefix_do_not_mix(bank: ReaderBank):
    readers = PooledReaders({name: bank[name] for name in bank}, blocks=8, device=torch.device("cpu"))
    one, other, tail = (states_of(bank, count, seed) for count, seed in ((6, 1), (3, 2), (5, 3)))
    step = {layer: torch.cat([one[layer], other[layer]]) for layer in one}
    slots = np.concatenate([slots_of([0, 1], 6), slots_of([2], 3)])
    readers.add(step, Segments.of_slots(slots, BLOCK))
    # the second request of a prompt that shares the first block computes the rest alone, in a block of its own
    readers.add(tail, Segments.of_slots(slots_of([4, 5], 5), BLOCK))
    shared = {layer: torch.cat([one[layer][:BLOCK], tail[layer]]) for layer in one}
    for blocks, states in (([0, 1], one), ([2], other), ([0, 4, 5], shared)):
        logits = readers.logits(torch.tensor(blocks))
        for name, want in expected(bank, states).items():
            torch.testing.assert_close(logits[name], want, atol=1e-5, rtol=0)


def test_tokens_that_wait_are_read_with_their_blocks(bank: ReaderBank):
    readers = PooledReaders({name: bank[name] for name in bank}, blocks=8, device=torch.device("cpu"))
    pending = PendingTokens(readers.layers, BLOCK)
    one, other, old = (states_of(bank, count, seed) for count, seed in ((10, 1), (6, 2), (3, 3)))
    pending.push(old, slots_of([5], 3))
    pending.keep()  # ends, and its block goes to the first of the two other requests
    for step in range(10):  # one token of each request at a time
        parts = [(one, [2, 5, 1])] + ([(other, [3, 0])] if step < 6 else [])
        states = {layer: torch.cat([part[layer][step : step + 1] for part, _ in parts]) for layer in one}
        slots = np.array([slots_of([*blocks, 7], 10)[step] for _, blocks in parts])
        pending.push(states, slots)
        pending.keep()
        states[0].fill_(9)  # the engine uses its memory again
        slots.fill(0)
        if step == 2:
            readers.add(*pending.take())
            assert not len(pending)
    readers.add(*pending.take())
    for blocks, states in (([2, 5, 1], one), ([3, 0], other)):
        logits = readers.logits(torch.tensor(blocks))
        for name, want in expected(bank, states).items():
            torch.testing.assert_close(logits[name], want, atol=1e-5, rtol=0)
