"""Stops a run whose numbers are no longer finite, without a wait for the device at every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lamina.errors import NotFiniteError
from lamina.layers.nan_checks import first_non_finite

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from lamina.train.learner import Learner
    from lamina.train.subjects import Subject

_NEVER = 2**62
_EVERY = 100  # steps between looks at what a GPU has noted; on a CPU, which makes nobody wait, every step is looked at
_HINT = "The learning rate may be too high, or an input or a label is not finite"


class DivergenceGuard:
    """Notes on the device at which step the loss or gradient of a learner was first NaN or infinite, counted from 1."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._first: dict[tuple[str, ...], Tensor] = {}  # learners of a step -> the first bad one of each

    def note(self, step: int, names: Sequence[str], losses: Sequence[Tensor], norms: Sequence[Tensor]) -> None:
        """Take note of a step: its losses `[readers]`, part by part, and perhaps the norm of each learner's gradients.

        Raises:
            NotFiniteError: If one is not finite; for a GPU perhaps up to 99 steps later, with the step that it was.
        """
        values = torch.stack(list(losses)).sum(0) if len(losses) > 1 else losses[0]
        if len(values) < len(names):  # a base has no loss of its own
            values = torch.cat([values, values.new_zeros(1)])
        if norms:
            values = values + torch.stack([norm.to(values.device) for norm in norms])
        on_cpu, key = values.device.type == "cpu", tuple(names)
        if on_cpu and bool(values.isfinite().all()):
            return
        if key not in self._first:
            self._first[key] = torch.full(values.shape, _NEVER, device=values.device)
        self._first[key] = torch.where(values.isfinite(), self._first[key], self._first[key].clamp(max=step))
        if on_cpu or step % _EVERY == 0:
            self.check()

    def check(self) -> None:
        """Raise NotFiniteError for the first number that was noted."""
        noted = [
            (at, name) for names, first in self._first.items() for name, at in zip(names, first.tolist(), strict=True)
        ]
        step, name = min(noted, default=(_NEVER, ""))
        if step < _NEVER:
            what = f"the loss or the gradient of {self._subject.title(name)} is NaN or infinite at step {step}"
            raise self._error(what, name, step)

    def check_weights(self, learners: Iterable[Learner], step: int) -> None:
        """The same for the weights that are trained, before they are kept; here a step means: there or before."""
        self.check()
        for learner in learners:
            if weight := first_non_finite((str(number), own) for number, own in enumerate(learner.parameters)):
                names = {id(own): key for key, own in learner.module.named_parameters()}
                weight = names[id(learner.parameters[int(weight)])]
                what = f"the weight '{weight}' of {self._subject.title(learner.name)} is NaN or infinite"
                raise self._error(f"{what} at or before step {step}", learner.name, step)

    def _error(self, what: str, name: str, step: int) -> NotFiniteError:
        return NotFiniteError(f"{self._subject.op}: {what}; training stops. {_HINT}.", name=name, step=step)
