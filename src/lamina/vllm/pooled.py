"""Readers that pool a whole prompt (`PooledLayers`), computed from partial results beside the engine's cache.

The pooled vector of a layer is a softmax-weighted mean over the tokens. So the partial result of each cache block is a
maximum score, a sum of exponentials and a weighted sum over the tokens of the block. Together, the partial results of a
prompt's blocks give the exact result, whether the tokens were computed in one step, in pieces, or came from the prefix
cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast, final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lamina.bank.stack_pass import run_heads
from lamina.fusion.pooled_layers import PooledLayersFusion

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxtyping import Float, Int

    from lamina.bank import ReaderModule


class Segments(NamedTuple):
    """Tokens of a step in segments. Each segment has consecutive tokens that lie in one block of the engine's cache.

    Attributes:
        blocks: Number of the cache block of each segment, `[segments]`.
        opens: True at segments that begin at the first token of their block, `[segments]`.
        tokens: Indices of the segments' tokens, `[segments, longest]`, padded with any number.
        real: True at the entries of `tokens` that are tokens of the segment, False at padding, `[segments, longest]`.
    """

    blocks: Int[Tensor, " segments"]
    opens: Tensor
    tokens: Int[Tensor, "segments longest"]
    real: Tensor

    @classmethod
    def of_slots(cls, slots: np.ndarray, block_size: int) -> Segments:
        """Divide tokens into a segment per block of `block_size` slots.

        `slots` are the tokens' cache slots, at least one, grouped by block and ascending in each block.
        """
        blocks = slots // block_size
        starts = np.flatnonzero(np.diff(blocks, prepend=-1) != 0)
        lengths = np.diff(starts, append=len(slots))
        tokens = starts[:, None] + np.arange(lengths.max())
        real = np.arange(lengths.max()) < lengths[:, None]
        return cls(
            torch.from_numpy(blocks[starts]),
            torch.from_numpy(slots[starts] % block_size == 0),
            torch.from_numpy(np.minimum(tokens, len(slots) - 1)),
            torch.from_numpy(real),
        )

    def to(self, device: torch.device) -> Segments:
        """Return the segments with their tensors on a device."""
        return Segments(*(part.to(device) for part in self))


@final
class PendingTokens:
    """Tokens, as states of some layers, that wait for `PooledReaders`; adding many at once is faster.

    `layers` are the layers whose states are stored, and `block_size` is the number of tokens in a cache block.
    """

    def __init__(self, layers: Sequence[int], block_size: int) -> None:
        self._layers, self._block_size = layers, block_size
        self._parts: list[tuple[dict[int, Tensor], np.ndarray]] = []
        self._borrowed = False  # whether the last part lies in memory of the engine

    def push(self, states: Mapping[int, Tensor], slots: np.ndarray, rows: np.ndarray | None = None) -> None:
        """Add the tokens of a step; with `rows`, only the tokens with these indices.

        `states` is layer -> states `[tokens, width]`, and `slots` are the tokens' cache slots. The states may lie in
        memory that the engine uses again, so `take` or `keep` must follow before the next step.
        """
        if rows is None or len(rows) == len(slots):
            self._parts.append(({layer: states[layer] for layer in self._layers}, slots))
            self._borrowed = True
        elif len(rows):
            index = torch.from_numpy(rows).to(states[self._layers[0]].device)
            self._parts.append(({layer: states[layer][index] for layer in self._layers}, slots[rows]))

    def keep(self) -> None:
        """Copy the states of the last `push` out of the engine's memory, unless they were taken."""
        if self._borrowed:
            states, slots = self._parts[-1]
            self._parts[-1] = ({layer: state.clone() for layer, state in states.items()}, slots.copy())
            self._borrowed = False

    def __len__(self) -> int:
        """Return the number of waiting tokens."""
        return sum(len(slots) for _, slots in self._parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the states that wait."""
        return sum(state.nbytes for states, _ in self._parts for state in states.values())

    def take(self) -> tuple[dict[int, Tensor], Segments]:
        """Return layer -> states `[tokens, width]` of all waiting tokens, and their segments; forget these tokens.

        There must be at least one. Tokens of a block that a later request has begun again are left out.
        """
        parts, self._parts, self._borrowed = self._parts, [], False
        if len(parts) == 1:  # the tokens of each request, and so of each block, stand together in a step
            ((states, slots),) = parts
            return states, Segments.of_slots(slots, self._block_size)
        slots = np.concatenate([slots for _, slots in parts])
        blocks, place = np.unique(slots // self._block_size, return_inverse=True)
        # The first token of a block says that the block has a new owner: what waits for the old one is dropped.
        opened = np.full(len(blocks), -1)
        index = np.arange(len(slots))
        np.maximum.at(opened, place, np.where(slots % self._block_size == 0, index, -1))
        kept = index[index >= opened[place]]
        kept = kept[np.argsort(slots[kept], kind="stable")]
        order = torch.from_numpy(kept).to(parts[0][0][self._layers[0]].device)
        states = {layer: torch.cat([part[layer] for part, _ in parts])[order] for layer in self._layers}
        return states, Segments.of_slots(slots[kept], self._block_size)


@final
class PooledReaders:
    """Readers that pool whole prompts, with one partial result per cache block; the module's docstring says how.

    Args:
        readers: Reader name -> module; all read the same layers with `PooledLayers` and have an equal `Fusion.group`.
        blocks: Number of cache blocks.
        device: Device of the states.

    Attributes:
        layers: Indices of the layers that the readers read.
    """

    def __init__(self, readers: Mapping[str, ReaderModule], blocks: int, device: torch.device) -> None:
        self.readers = readers
        fusions = [cast("PooledLayersFusion", reader.fusion) for reader in readers.values()]
        self.layers = next(iter(readers.values())).layers
        heads = fusions[0].config.heads
        with torch.no_grad():
            # columns: reader, query and head of the query
            self._queries = torch.cat([fusion.queries for fusion in fusions], dim=1)  # [layers, columns, width]
            self._weights = torch.stack([fusion.scores.softmax(0) for fusion in fusions], dim=1)  # [layers, readers]
            parts = [fusion.projection.unflatten(2, (fusion.config.queries * heads, -1)) for fusion in fusions]
            self._projection = torch.cat(parts, dim=2).permute(0, 2, 3, 1).contiguous()  # [layers, columns, size, dim]
        columns, dim = self._queries.shape[1], self._projection.shape[-1]
        self._head_of_column = torch.arange(columns, device=device) % heads
        self._size = self._projection.shape[2]
        shape = (blocks, len(self.layers), columns)
        self._maxima = torch.full(shape, -torch.inf, device=device)
        self._sums = torch.zeros(shape, device=device)
        self._projected = torch.zeros(*shape, dim, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes that the partial results of all cache blocks take on the device."""
        return self._maxima.nbytes + self._sums.nbytes + self._projected.nbytes

    def add(self, states: Mapping[int, Tensor], segments: Segments) -> None:
        """Add tokens to the partial results of their blocks; a block's first token replaces its earlier result.

        Args:
            states: Layer -> its states `[tokens, width]`.
            segments: The tokens, divided by block.
        """
        padding = (~segments.real).unsqueeze(-1)
        equal = segments.tokens.numel() == len(states[self.layers[0]])  # no segment is padded
        for index, layer in enumerate(self.layers):
            queries = self._queries[index]
            normed = F.layer_norm(states[layer], states[layer].shape[-1:]).to(queries.dtype)
            scores = normed @ queries.T
            if equal:
                normed, scores = (part.view(*segments.tokens.shape, -1) for part in (normed, scores))
            else:
                normed, scores = normed[segments.tokens], scores[segments.tokens].masked_fill(padding, -torch.inf)
            maxima = scores.amax(1)  # [segments, columns]
            exponentials = (scores - maxima.unsqueeze(1)).exp()
            sums = exponentials.sum(1)
            weighted = torch.bmm(exponentials.mT, normed)  # [segments, columns, width]
            if self._size < weighted.shape[-1]:  # a head pools its own slice of the states
                slices = weighted.unflatten(-1, (-1, self._size))
                weighted = slices[:, torch.arange(slices.shape[1], device=slices.device), self._head_of_column]
            projected = torch.bmm(weighted.transpose(0, 1), self._projection[index]).transpose(0, 1)
            self._merge(index, segments, maxima, sums, projected)

    def _merge(self, index: int, segments: Segments, maxima: Tensor, sums: Tensor, projected: Tensor) -> None:
        """Merge the partial results of new tokens with those stored for their blocks.

        `index` is the layer's place in `layers`. `maxima` and `sums` are `[segments, columns]`, with a column for each
        reader, query and head; `projected` is `[segments, columns, dim]`. A segment that begins a block replaces what
        an earlier request left.
        """
        blocks = segments.blocks
        before = self._maxima[blocks, index].masked_fill(segments.opens.unsqueeze(-1), -torch.inf)
        highest = torch.maximum(before, maxima)
        old, new = (before - highest).exp(), (maxima - highest).exp()
        # a factor of 0 does not remove NaN, so the old values of opened blocks are masked
        old_sums = self._sums[blocks, index].masked_fill(segments.opens.unsqueeze(-1), 0)
        old_projected = self._projected[blocks, index].masked_fill(segments.opens[:, None, None], 0)
        self._maxima[blocks, index] = highest
        self._sums[blocks, index] = old_sums * old + sums * new
        self._projected[blocks, index] = old_projected * old.unsqueeze(-1) + projected * new.unsqueeze(-1)

    def logits(self, blocks: Int[Tensor, " blocks"]) -> dict[str, Float[Tensor, " classes"]]:
        """Return reader name -> its logits over the prompt in the cache blocks `blocks`, in float32 on the CPU."""
        maxima = self._maxima[blocks]
        factors = (maxima - maxima.amax(0)).exp()
        sums = (self._sums[blocks] * factors).sum(0)
        mean = (self._projected[blocks] * factors.unsqueeze(-1)).sum(0) / sums.unsqueeze(-1)  # [layers, columns, dim]
        features = mean.unflatten(1, (len(self.readers), -1)).sum(2)  # [layers, readers, dim]
        features = F.gelu(F.layer_norm(features, features.shape[-1:]))
        features = (features * self._weights.unsqueeze(-1)).sum(0)
        real = torch.ones(1, 1, dtype=torch.bool, device=features.device)
        by_stream = [(list(self.readers), features[:, None, None])]  # one text of one token
        logits = run_heads(self.readers, by_stream, real, {}, grad=False, together=True)
        return {name: part[0].float().cpu() for name, part in logits.items()}
