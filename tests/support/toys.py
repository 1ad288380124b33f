"""Small models that try to be read wrongly."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class Config(SimpleNamespace):
    def to_dict(self):
        return vars(self)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear(hidden).tanh()


class Toy(nn.Module):
    """Embeddings and two blocks; what differs is in `states`."""

    main_input_name = "input_ids"

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = Config(**{"model_type": "toy", "vocab_size": 50, **settings})
        self.embed = nn.Embedding(50, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.norm = nn.LayerNorm(8)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool = False,
        return_dict: bool = True,
    ) -> Any:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        states = self.states(self.embed(input_ids), mask.unsqueeze(-1), output_hidden_states)
        return SimpleNamespace(hidden_states=tuple(states) if output_hidden_states else None)

    def states(self, hidden: Tensor, mask: Tensor, shown: bool) -> list[Any]:
        states = [hidden]
        for block in self.blocks:
            hidden = block(hidden)
            states.append(hidden)
        return states


class ChangedInPlace(Toy):
    """Padding is zeroed in place after the block has returned: a hook on the block sees another value."""

    def states(self, hidden, mask, shown):
        states = [hidden]
        for block in self.blocks:
            hidden = block(hidden).mul_(mask)
            states.append(hidden)
        self.norm(hidden)
        return states


class ChangedInPlaceUnseen(ChangedInPlace):
    """The same, and nothing takes the last state in."""

    def states(self, hidden, mask, shown):
        states = super().states(hidden, mask, shown)
        return [*states[:2], states[2].mul_(mask)]

    def __init__(self, **settings):
        super().__init__(**settings)
        self.norm = _Ignore()


class _Ignore(nn.Module):
    def __call__(self, *_args):
        return None


class ChangedInPlaceByLength(Toy):
    """For texts of seven tokens the last block gives the last state; for others that is changed in place since."""

    def states(self, hidden, mask, shown):
        states = super().states(hidden, mask, shown)
        return states if hidden.shape[1] == 7 else [*states[:-1], states[-1].add_(1)]


class Copied(Toy):
    """States are copies: equal to what the blocks give, not the same tensors."""

    def states(self, hidden, mask, shown):
        return [state.clone() for state in super().states(hidden, mask, shown)]


class TokensFirst(Toy):
    """Works on `[tokens, batch, width]` and returns `[batch, tokens, width]`."""

    def states(self, hidden, mask, shown):
        states = super().states(hidden.transpose(0, 1).contiguous(), mask, shown)
        return [state.transpose(0, 1).contiguous() for state in states]


class Doubled(Toy):
    """Return a last state that appears nowhere in the model."""

    def states(self, hidden, mask, shown):
        states = super().states(hidden, mask, shown)
        return [*states[:-1], states[-1] * 2]


class ByLength(Toy):
    """For texts of seven tokens the last state is what the block gives; for others it is not."""

    def states(self, hidden, mask, shown):
        states = super().states(hidden, mask, shown)
        return states if hidden.shape[1] == 7 else [*states[:-1], states[-1] + 1]


class CountByLength(Toy):
    """Returns more states for longer texts."""

    def states(self, hidden, mask, shown):
        states = super().states(hidden, mask, shown)
        return states if hidden.shape[1] == 7 else [*states, states[-1]]


class OtherwisePlain(Toy):
    """Computes something else when nobody asks for the states."""

    def states(self, hidden, mask, shown):
        return super().states(hidden if shown else hidden + 1, mask, shown)


class ShorterPlain(Toy):
    """Leaves the last block out when nobody asks for the states."""

    def states(self, hidden, mask, shown):
        if not shown:
            return [self.blocks[0](hidden)]
        return super().states(hidden, mask, shown)


class OneState(Toy):
    def states(self, hidden, mask, shown):
        return super().states(hidden, mask, shown)[:1]


class Tuples(Toy):
    def states(self, hidden, mask, shown):
        return [(state, None) for state in super().states(hidden, mask, shown)]


class Silent(Toy):
    def forward(self, input_ids, attention_mask=None, output_hidden_states=False, return_dict=True):
        self.embed(input_ids)
        return SimpleNamespace(logits=None)


class Breaking(Toy):
    def states(self, hidden, mask, shown):
        raise ValueError("needs a bounding box\nand more")


class Catching(Toy):
    """A module's call fails inside and the model goes on."""

    def states(self, hidden, mask, shown):
        with contextlib.suppress(RuntimeError):
            self.norm(hidden[..., :3])
        return super().states(hidden, mask, shown)


class Restless(Toy):
    """Changes itself on every call: a buffer, an attribute, a submodule, a hook, a list."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.register_buffer("calls", torch.zeros(1))
        self.seen: list[int] = []
        self.last: Tensor | None = None

    def states(self, hidden, mask, shown):
        self.calls += 1
        self.seen.append(len(hidden))
        self.last = hidden
        self.blocks[1].extra = nn.Identity()
        self.blocks[0].register_forward_hook(lambda *_: None)
        torch.rand(1)
        return super().states(hidden, mask, shown)
