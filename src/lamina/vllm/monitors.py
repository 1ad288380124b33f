"""Monitors in an engine: the running score of each request's output, and the end of a request that is flagged."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np
import torch

from lamina.layers.types import special_ids
from lamina.monitors.cascade import start_monitors
from lamina.vllm.layout import logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from lamina.vllm.engine_types import ModelConfig
    from lamina.vllm.layout import Layout


def engine_special_ids(config: ModelConfig) -> Tensor:
    """Return the ids `[ids]` of the special tokens of an engine's tokenizer.

    If there is no tokenizer that transformers reads, no id is returned and a warning is logged: monitors then score
    special tokens too.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            config.tokenizer, revision=config.tokenizer_revision, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:  # the tokenizers library raises plain Exception
        rule = "monitors score special tokens too, which their calibration left out. Start the engine with --tokenizer"
        logger.warning("lamina: the tokenizer %s cannot be read (%s); %s.", config.tokenizer, error, rule)
        return special_ids(None)
    return special_ids(tokenizer)


class Verdict(NamedTuple):
    """A monitor's result for a request's output so far.

    Attributes:
        score: Score of the output up to the last token that the engine has read; inf or -inf where a cascade's first
            monitor decides. Special tokens are not scored: NaN if all tokens so far are special (for a cascade, -inf).
        flagged_at: Index, from 0 at the first output token, of the token at which the score first reached the
            threshold. None: it has not, or the monitor has no threshold.
    """

    score: float
    flagged_at: int | None


@final
class RequestMonitors:
    """The monitors of a bank, applied to the output of one request step by step.

    Attributes:
        verdicts: Monitor name -> its verdict on the output so far; empty before the first token.

    Args:
        layout: The engine's readers and monitors.
        prompt: Number of tokens of the prompt, which monitors do not score.
        special: Ids of the special tokens, which monitors do not score either; see `engine_special_ids`.
    """

    def __init__(self, layout: Layout, prompt: int, special: Tensor) -> None:
        self._layout, self._prompt, self._special = layout, prompt, special
        self._scored = prompt  # position of the next token to score
        self._running = start_monitors(layout.monitors, {name: r.head for name, r in layout.readers.items()})
        self._failed: set[str] = set()  # monitors whose score is NaN
        self.verdicts: dict[str, Verdict] = {}

    def add(self, first: int, tokens: bytes, output: Sequence[int]) -> list[str]:
        """Score the new tokens of the output; return the names of the monitors that flag it for the first time.

        Args:
            first: Position of the first token in `tokens`; the prompt begins at 0. Tokens of the prompt, and those that
                were scored before, are skipped.
            tokens: The readers' scores of the tokens, as in `StepScores`.
            output: Ids of all tokens of the output so far.
        """
        rows = np.frombuffer(tokens, dtype=np.float32).reshape(-1, self._layout.token_columns)
        new = torch.from_numpy(rows[max(0, self._scored - first) :].copy())  # torch needs a writable array
        if not len(new):
            return []
        index, self._scored = self._scored - self._prompt, self._scored + len(new)
        ids = [*output[index : index + len(new)]]
        ids += [-1] * (len(new) - len(ids))  # a token whose id is not known counts
        counts = ~torch.isin(torch.tensor(ids), self._special).unsqueeze(0)

        def get_logits(name: str, wanted: Tensor) -> Tensor:
            reader = self._layout.readers[name]
            return new[None, :, reader.first : reader.last][wanted]

        flagged: list[str] = []
        for names, running in self._running:
            scores = running.add(get_logits, counts)
            self._report_nan(names, (scores.isnan() & counts).any(-1)[:, 0].tolist())
            for name, values in zip(names, scores[:, 0].tolist(), strict=True):
                before = self.verdicts[name].flagged_at if name in self.verdicts else None
                threshold = self._layout.monitors[name].threshold
                over = [n for n, value in enumerate(values) if threshold is not None and value >= threshold]
                place = before if before is not None or not over else index + over[0]
                self.verdicts[name] = Verdict(values[-1], place)
                if before is None and place is not None:
                    flagged.append(name)
        return flagged

    def _report_nan(self, names: Sequence[str], is_nan: Sequence[bool]) -> None:
        """Log an error, once per request, for each monitor in `names` that `is_nan` is True for.

        An exception would end the engine, with the requests of others.
        """
        failed = {name for name, bad in zip(names, is_nan, strict=True) if bad} - self._failed
        self._failed |= failed
        for name in sorted(failed):
            logger.error("lamina: monitor '%s' gives NaN for a request, which it can no longer flag.", name)
