"""Several processes, one run: each takes its share of every batch, and the gradients are added up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from lamina.utils import rank, world_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

    from lamina.heads.base import Head


def own_part(batch: dict[str, Any], heads: Mapping[str, Head]) -> dict[str, Any]:
    """This process's rows of a batch, padded as the whole was, and what share of each reader's labels they hold.

    Args:
        batch: What the bank is called with, of all processes together: tensors `[batch, ...]`, "labels" and "readers".
        heads: Reader name -> head.

    Returns:
        The same with fewer rows, and "shares": reader name -> share, so that the processes' losses add up to that of
        the whole batch. A process for which no row is left gets the first, with a share of 0.
    """
    number, size = rank(), world_size()
    labels: dict[str, Tensor] = batch["labels"]
    if size == 1:
        return {**batch, "shares": dict.fromkeys(labels, 1.0)}
    count = len(next(value for value in batch.values() if isinstance(value, Tensor)))
    rows = list(range(number, count, size))
    own = {name: value[rows or [0]] for name, value in labels.items()}
    shares = {
        name: float(heads[name].count(own[name]) / heads[name].count(labels[name]).clamp(min=1e-30)) if rows else 0.0
        for name in labels
    }
    inputs: dict[str, Any] = {key: value[rows or [0]] for key, value in batch.items() if isinstance(value, Tensor)}
    if "states" in batch:
        inputs["states"] = {
            stack: {layer: state[rows or [0]] for layer, state in layers.items()}
            for stack, layers in batch["states"].items()
        }
    return {**batch, **inputs, "labels": own, "shares": shares}


def add_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum the gradients of all processes, in place; all of them must have the same ones."""
    if world_size() == 1:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(flat)
    for gradient, total in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))
