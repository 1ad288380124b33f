"""Reduce hidden states to one vector per text or per token, and find out which tokens are special."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, final

import numpy as np
import torch
from torch import Tensor

from lamina.data.batches import tokenizer_of
from lamina.utils import derive_seed

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

    from lamina.layers.types import Processor
    from lamina.studies.passes import Group, LayerReader
    from lamina.studies.states.measures import LayerMeasure

MOST_TOKENS = 16  # tokens of one text that become rows, at most


@final
class RowVectors:
    """Runs a model over batches, and returns one vector per row and layer. Measures receive all states during the run.

    Args:
        reader: Reads the layers' states.
        measures: Measures that receive every state.
        per: What a row is. "text": a text, as the mean over its tokens without padding. "token": one of at most 16
            tokens of each text, drawn at random.
        seed: Seed of the draw; together with a text's number it decides which tokens are drawn.

    Attributes:
        tokens: With `per="token"`, the number of tokens that were read so far, without padding.
    """

    def __init__(
        self, reader: LayerReader, measures: Sequence[LayerMeasure], *, per: Literal["text", "token"], seed: int
    ) -> None:
        self.reader, self.measures = reader, measures
        self._per, self._seed = per, seed
        self.tokens = 0

    def read(self, group: Group) -> list[Tensor]:
        """Run the model over a group's batches, and return the vectors `[rows, width]` of its rows, layer by layer.

        With `per="text"`, row i is the group's text with the i-th lowest number. The order of tokens is arbitrary, but
        the same for all layers.
        """
        parts: list[list[Tensor]] = [[] for _ in self.reader.layers]
        order: list[int] = []
        for numbers, batch in group:
            drawn: list[tuple[Tensor, Tensor]] = []

            def on_state(
                layer: int,
                state: Tensor,
                real: Tensor,
                numbers: list[int] = numbers,
                drawn: list[tuple[Tensor, Tensor]] = drawn,
            ) -> None:
                index = self.reader.layers.index(layer)
                for measure in self.measures:
                    measure.on_state(index, state, real)
                if self._per == "token" and not drawn:  # once per batch, so that all layers have the same tokens
                    drawn.append(draw_tokens(real, numbers, self._seed))
                    self.tokens += int(real.sum())
                parts[index].append(state[drawn[0]].float() if drawn else mean_state(state, real))

            self.reader.read(batch, on_state)
            order += numbers
        sort = torch.tensor(np.argsort(order)) if self._per == "text" else slice(None)
        return [torch.cat(vectors)[sort] for vectors in parts]


def mean_state(
    state: Float[Tensor, "batch tokens width"], counted: Bool[Tensor, "batch tokens"]
) -> Float[Tensor, "batch width"]:
    """Return each text's mean state, over the tokens where `counted` is True, in float32; NaN without such a token."""
    weights = counted.float() / counted.sum(1, keepdim=True)
    return torch.bmm(weights.unsqueeze(1), state.float()).squeeze(1)


def draw_tokens(real: Bool[Tensor, "batch tokens"], numbers: Sequence[int], seed: int) -> tuple[Tensor, Tensor]:
    """Draw at most `MOST_TOKENS` tokens of each text; return (rows, positions), two index tensors `[drawn]`.

    `real` is True at tokens that are not padding. The draw depends on the seed and a text's number (in `numbers`)
    alone, not on the other texts of the batch.
    """
    rows: list[int] = []
    positions: list[int] = []
    for row, (mask, number) in enumerate(zip(real.cpu(), numbers, strict=True)):
        tokens = mask.nonzero().flatten().numpy()
        drawn = np.random.default_rng(derive_seed(seed, number)).permutation(len(tokens))[:MOST_TOKENS]
        rows += [row] * len(drawn)
        positions += tokens[drawn].tolist()
    return torch.tensor(rows, device=real.device), torch.tensor(positions, device=real.device)


def is_text_token(ids: Tensor, processor: Processor) -> Tensor:
    """Return a mask in the shape of the token `ids`, False at special tokens such as padding, and else True.

    The tokens for an unknown and for a masked word do not count as special here.
    """
    tokenizer = tokenizer_of(processor)
    in_text = {tokenizer.unk_token_id, tokenizer.mask_token_id}
    special = [number for number in tokenizer.all_special_ids if number not in in_text]
    return ~torch.isin(ids, torch.tensor(special, dtype=torch.long))
