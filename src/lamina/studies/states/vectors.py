"""One vector per text or token from each layer's states, in one pass of the model; which tokens count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np
import torch
from torch import Tensor

from lamina.data.batches import tokenizer_of
from lamina.utils import derive_seed

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

    from lamina.studies.passes import Group, LayerReader
    from lamina.studies.states.measures import LayerMeasure

MOST_TOKENS = 16  # of a text that become rows


@final
class RowVectors:
    """Reads groups of rows: a vector per row and layer, while the whole states are shown to measures.

    Where rows are tokens, at most 16 real ones of each text are drawn, by `seed` and the text's number alone.
    """

    def __init__(
        self, reader: LayerReader, measures: Sequence[LayerMeasure], *, per: Literal["text", "token"], seed: int
    ) -> None:
        self.reader, self.measures = reader, measures
        self._per, self._seed = per, seed
        self.tokens = 0  # that were real, where rows are tokens

    def read(self, group: Group) -> list[Tensor]:
        """Per layer the vectors `[rows, width]`: of texts in the order of their numbers, of tokens in any one order."""
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
                if self._per == "token" and not drawn:
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
    """The mean of the states of the tokens that count, at least one of each text, in float32."""
    weights = counted.float() / counted.sum(1, keepdim=True)
    return torch.bmm(weights.unsqueeze(1), state.float()).squeeze(1)


def draw_tokens(
    real: Bool[Tensor, "batch tokens"], numbers: Sequence[int], seed: int, most: int = MOST_TOKENS
) -> tuple[Tensor, Tensor]:
    """Row and position of at most `most` real tokens of each text, the same whatever else is in the batch."""
    rows: list[int] = []
    places: list[int] = []
    for row, (mask, number) in enumerate(zip(real.cpu(), numbers, strict=True)):
        tokens = mask.nonzero().flatten().numpy()
        drawn = np.random.default_rng(derive_seed(seed, number)).permutation(len(tokens))[:most]
        rows += [row] * len(drawn)
        places += tokens[drawn].tolist()
    return torch.tensor(rows, device=real.device), torch.tensor(places, device=real.device)


def own_tokens(ids: Tensor, processor: Any) -> Tensor:
    """True at tokens `[batch, tokens]` that are not special ones.

    A token that stands for an unknown word, or for a masked one, is one of the text.
    """
    tokenizer = tokenizer_of(processor)
    of_text = {tokenizer.unk_token_id, tokenizer.mask_token_id}
    special = [number for number in tokenizer.all_special_ids if number not in of_text]
    return ~torch.isin(ids, torch.tensor(special, dtype=torch.long))
