"""States of models that have no interface for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lamina.errors import ConfigError
from lamina.vllm.taps import Taps, tap

SIZES: dict[str, Any] = {"depth": 3, "tokens": 8, "width": 4, "dtype": torch.float32}


class Block(nn.Module):
    """A block as vLLM has them: its state is the sum of what it gets."""

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
        residual = hidden_states if residual is None else hidden_states + residual
        return positions.unsqueeze(1) * residual.cos(), residual


class Decoder(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.layers = nn.ModuleList(blocks)

    def forward(self, ids: Tensor) -> Tensor:
        states, residual = self.table(ids), None
        for block in self.layers:
            states, residual = block(torch.arange(len(ids)), states, residual=residual)
        return states + residual


@pytest.mark.parametrize("compiled", [False, True])
@torch.no_grad()
def test_the_inputs_of_the_blocks_are_kept_also_in_compiled_code(compiled: bool):
    model = Decoder(Block(), Block(), Block())
    plain = model(torch.tensor([1, 2, 3, 4]))
    taps = Taps(model, **SIZES)
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    for ids in ([1, 2, 3, 4], [5, 6]):
        states, residual, expected = model.table(torch.tensor(ids)), None, list[Tensor]()
        for _ in range(3):
            expected.append(states if residual is None else states + residual)
            states, residual = Block()(torch.arange(len(ids)), states, residual)
        output = run(torch.tensor(ids))
        for state, want in zip(taps.states((0, 1, 2), len(ids)), expected, strict=True):
            assert torch.equal(state, want)
        if len(ids) == 4:
            assert torch.equal(output, plain)
    assert isinstance(model.layers[0], Block)
    assert not model.state_dict().keys() - {"table.weight"}


@torch.no_grad()
def test_a_pass_that_the_taps_did_not_see_is_an_error():
    model = Decoder(Block(), Block(), Block())
    runner = SimpleNamespace(
        get_model=lambda: model,
        _dummy_run=lambda skip=False: None if skip else model(torch.tensor([1, 2])),
        max_num_tokens=8,
        model_config=SimpleNamespace(dtype=torch.float32),
        device=torch.device("cpu"),
    )
    taps = tap(runner, SimpleNamespace(depth=3, width=4))
    runner._dummy_run()
    with pytest.raises(RuntimeError, match="the readers got no states from a pass of the model"):
        runner._dummy_run(skip=True)
    model(torch.tensor([1]))
    taps.states([0], 1)
    with pytest.raises(RuntimeError, match="the readers got no states"):
        taps.states([0], 1)


class Other(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_model_without_known_blocks_is_refused():
    with pytest.raises(ConfigError, match="the model class Decoder has 0 lists of 3 equal modules; one is needed"):
        Taps(Decoder(Block(), Block()), **SIZES)
    with pytest.raises(ConfigError, match="blocks of the class Other take no argument hidden_states"):
        Taps(Decoder(Other(), Other(), Other()), **SIZES)
