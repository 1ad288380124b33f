"""Hide tokens of a text, so that a model can be asked for them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lamina.data.batches import tokenizer_of
from lamina.data.windows import IGNORED
from lamina.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

SHARE = 0.15  # of the tokens that are no special ones
REPLACED, RANDOM = 0.8, 0.1  # of the chosen tokens: by the mask token, by any token; the rest stay as they are


def mask_token(processor: Any, op: str) -> str:
    """The text of the tokenizer's mask token.

    Raises:
        ConfigError: If it has none.
    """
    token = tokenizer_of(processor).mask_token
    if token is None:
        raise ConfigError(
            f"{op}: the tokenizer has no mask token; masked language modelling needs one. "
            "Use a model that was trained with it, such as BERT or RoBERTa."
        )
    return token


@dataclass(frozen=True)
class Masking:
    """How tokens are hidden: of each row 15 % of the tokens that are no special ones, and one at least, are chosen.

    Of these 80 % become the mask token, 10 % any token of the vocabulary, and 10 % stay. What is chosen depends on the
    row and the seed alone, never on the batch.

    Attributes:
        token: Id of the mask token.
        special: Ids that are never chosen.
        vocabulary: Count of tokens.

    Source:
        Devlin et al. 2019, arXiv:1810.04805, section 3.1 and appendix A.1.
    """

    token: int
    special: frozenset[int]
    vocabulary: int

    @classmethod
    def of(cls, processor: Any) -> Masking:
        """For a tokenizer, or a processor that holds one.

        Raises:
            ConfigError: If it has no mask token.
        """
        mask_token(processor, "masked_lm")
        tokenizer = tokenizer_of(processor)
        return cls(int(tokenizer.mask_token_id), frozenset(tokenizer.all_special_ids), len(tokenizer))

    def hide(self, ids: Sequence[int], seed: int) -> tuple[list[int], list[int]]:
        """One row with some tokens hidden.

        Args:
            ids: The row's tokens.
            seed: Which ones, and what takes their places.

        Returns:
            The row to read, and its labels: the chosen tokens as they were, and -100 everywhere else.
        """
        rng = random.Random(seed)
        ordinary = [at for at, one in enumerate(ids) if one not in self.special]
        count = max(1, round(SHARE * len(ordinary))) if ordinary else 0
        read, labels = list(ids), [IGNORED] * len(ids)
        for at in rng.sample(ordinary, count):
            labels[at] = read[at]
            draw = rng.random()
            if draw < REPLACED:
                read[at] = self.token
            elif draw < REPLACED + RANDOM:
                read[at] = rng.randrange(self.vocabulary)
        return read, labels
