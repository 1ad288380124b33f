"""One step of `generate`: the new token of each sequence, with the monitors' scores and flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from lamina.errors import ConfigError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor


@final
@dataclass(frozen=True)
class Step:
    """One new token of each sequence, with the monitors' scores of the text up to it. All tensors are on the CPU.

    If the call generates a single sequence, `text`, `token_id`, `score` and `flags` give its values as plain Python
    values. If there are several, `step.sequence(1).text` is the text of the second one. The model never reads the last
    token of a sequence, so the last step repeats the scores of the step before. So does a special token of the bank's
    tokenizer, which is not scored.

    Attributes:
        index: Number of the new token, from 0.
        tokens: Ids of the new tokens, `[sequences]`; the padding id in a sequence that has ended.
        real: False for a sequence that had ended before this token.
        scores: Monitor name -> scores `[sequences]` in float64; NaN before the model has read the first token that is
            scored. For a cascade, inf or -inf where its first monitor decides, and -inf at a special token.
        flagged: Monitor name -> True if the monitor has flagged the sequence at this token or before.
        texts: For each sequence, the text that the token adds; these pieces add up to the whole text. "" for a special
            token, and while a character needs further tokens. None if the bank has no tokenizer, or if neither
            `on_token` nor `bank.stream` is used.
    """

    index: int
    tokens: Int[Tensor, " sequences"]
    real: Bool[Tensor, " sequences"]
    scores: Mapping[str, Float[Tensor, " sequences"]]
    flagged: Mapping[str, Bool[Tensor, " sequences"]]
    texts: tuple[str, ...] | None = None

    def sequence(self, number: int) -> Step:
        """Return the same step with only the sequence `number`, from 0; ConfigError if there is no such sequence."""
        count = len(self.tokens)
        if not 0 <= number < count:
            raise ConfigError(f"step.sequence: {number} does not exist; the step has {count} sequences, from 0.")
        at = slice(number, number + 1)
        return Step(
            self.index,
            self.tokens[at],
            self.real[at],
            {name: values[at] for name, values in self.scores.items()},
            {name: values[at] for name, values in self.flagged.items()},
            None if self.texts is None else self.texts[at],
        )

    @property
    def text(self) -> str:
        """Text that the token adds, if the call generates a single sequence.

        Raises ConfigError if there are several sequences (use `texts`), or if the tokens were not decoded: see `texts`.
        """
        self._check_single("text")
        if self.texts is None:
            problem = "the tokens were not decoded; that needs a bank with a tokenizer, and bank.stream or on_token"
            raise ConfigError(f"step.text: {problem}. Use ReaderBank(model, processor=tokenizer).")
        return self.texts[0]

    @property
    def token_id(self) -> int:
        """Id of the token; raises ConfigError if the call generates several sequences."""
        self._check_single("token_id")
        return int(self.tokens[0])

    @property
    def score(self) -> dict[str, float]:
        """Monitor name -> score as a float; raises ConfigError if the call generates several sequences."""
        self._check_single("score")
        return {name: float(values[0]) for name, values in self.scores.items()}

    @property
    def flags(self) -> list[str]:
        """Names of the monitors that have flagged the text so far; ConfigError if there are several sequences."""
        self._check_single("flags")
        return [name for name, values in self.flagged.items() if bool(values[0])]

    def _check_single(self, name: str) -> None:
        if (count := len(self.tokens)) != 1:
            raise ConfigError(f"step.{name}: the step has {count} sequences. Use step.sequence(0).{name}.")
