"""Types that all packages of Lamina use: a model's inputs, and the processor that makes them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

from torch import Tensor

# What a model is called with: argument -> tensor `[batch, ...]`.
Batch: TypeAlias = Mapping[str, Tensor]


class Processor(Protocol):
    """Turns examples into a model's inputs: a tokenizer, image processor or feature extractor of transformers."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the inputs of a batch of examples, as a mapping of tensors or lists."""
        ...

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> Any:
        """Write the files that `AutoProcessor.from_pretrained` reads."""
        ...
