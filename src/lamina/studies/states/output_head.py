"""What a language model computes after its last block, final norm and output head, run on any layer's states."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn

from lamina.errors import ConfigError, UnsupportedModelError
from lamina.layers import default_stack
from lamina.layers.preserve import preserve_model
from lamina.layers.probe_input import probe_input
from lamina.layers.roles import family_of
from lamina.layers.stack import alike, swapped

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from lamina.studies.passes import Batch, LayerReader

_CLOSE = 1e-3  # relative to the largest logit; a norm that is left out or done twice is off by far more
_LOGITS = 2**23  # that are made at a time
_SAME = 1e-6  # the same for tokens that a later one cannot reach


@final
class OutputHead:
    """A model's own way from the output of its last block to logits.

    Nothing is known of norms and heads: one token runs through the model (or, where the model minds, as many as there
    are states), and what its last block gives is replaced by the states that are asked about. That this gives the
    model's own logits is tried once, on a small input.

    Attributes:
        causal: Whether a token's logits are the same whatever comes after it.
        classes: Size of the vocabulary.

    Raises:
        ConfigError: If the model has no output over a vocabulary.
        UnsupportedModelError: If it has two stacks, no module per block, or does more after its last block.
    """

    def __init__(self, model: PreTrainedModel, *, op: str) -> None:
        self.model, self._op = model, op
        self.stack = default_stack(model, op=op)
        if self.stack.name != "main" or not self.stack.blocks:
            raise self._unsupported("it is no single stack with a module per block")
        if model.get_output_embeddings() is None:
            what = f"{type(model).__name__} has no output over a vocabulary"
            raise ConfigError(f"{op}: {what}. Load it with that of a language model: head='causal_lm', or 'masked_lm'.")
        self._block, self._wide = self.stack.blocks[-1], False
        self._call = self.stack.blocks.count(self._block) - 1  # where blocks share weights, the last call is the last
        points = [point for point in self.stack.points[1:] if isinstance(point.module, type(self._block))]
        self._swap = points[-1].swap if points else None
        self._carrier = {name: value[:1] for name, value in probe_input(model, 1, seed=0).inputs.items()}
        inputs = probe_input(model, 8, seed=1).inputs
        with preserve_model(model), self.last_states() as last:
            own = self._run(inputs)
            again = self._try(last[0].flatten(0, 1)).view_as(own)
            if not alike(again, own, _CLOSE):
                raise self._unsupported("what it does after its last block is not done token by token")
            changed = inputs["input_ids"].clone()
            changed[0, -1] = changed[0, 0]
            other = self._run({**inputs, "input_ids": changed})
        self.classes = own.shape[-1]
        self.causal = alike(other[:1, :-1], own[:1, :-1], _SAME)

    def _unsupported(self, reason: str) -> UnsupportedModelError:
        hint = "Use a causal or a masked language model."
        return UnsupportedModelError(op=self._op, model_type=family_of(self.model), reason=reason, hint=hint)

    def _try(self, states: Tensor) -> Tensor:
        try:
            return self.logits(states)
        except RuntimeError:  # it brings what its last block gives to the shape of its input (GPT)
            self._wide = True
            return self.logits(states)

    def logits(self, states: Tensor) -> Tensor:
        """Logits `[rows, classes]` of states `[rows, width]` as the last block gives them; in eval mode only."""

        def replace(output: Any) -> Any:
            state = swapped(states.unsqueeze(1), self._swap)
            return state if isinstance(output, Tensor) else (state, *output[1:])

        with self._after_last_block(replace):
            rows = len(states) if self._wide else 1
            return self._run({name: value.expand(rows, -1) for name, value in self._carrier.items()}).flatten(0, 1)

    @contextmanager
    def last_states(self) -> Generator[list[Tensor]]:
        """What the last block gives in each pass, `[batch, tokens, width]`, before any final norm."""
        last: list[Tensor] = []

        def note(output: Any) -> None:
            last.append(swapped(output if isinstance(output, Tensor) else output[0], self._swap))

        with self._after_last_block(note):
            yield last

    def _run(self, inputs: dict[str, Tensor]) -> Tensor:
        out: Any = self.model(**inputs)
        logits = getattr(out, "logits", None)
        return out.prediction_logits if logits is None else logits

    @contextmanager
    def _after_last_block(self, act: Callable[[Any], Any]) -> Generator[None]:
        """Call back with what the last block gives in this thread; what is returned takes its place."""
        thread, calls = get_ident(), 0

        def hook(_module: nn.Module, _args: object, output: Any) -> Any:
            nonlocal calls
            if get_ident() != thread:
                return None
            calls += 1
            return act(output) if (calls - 1) % (self._call + 1) == self._call else None

        handle = self._block.register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()


def asked_states(reader: LayerReader, head: OutputHead, batch: Batch, places: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """Per layer the states `[asked, width]`, those of the highest as the last block gives them."""
    states: dict[int, Tensor] = {}
    with head.last_states() as last:
        reader.read(batch, lambda layer, state, _real: states.update({layer: state}))
    if reader.stack.depth in states:
        states[reader.stack.depth] = last[0]
    rows, positions = (place.to(reader.model.device) for place in places)
    return iter([state[rows, positions] for state in states.values()])


def in_parts(values: Tensor, head: OutputHead) -> Sequence[Tensor]:
    """Rows in parts for which all logits fit into memory at a time."""
    return values.split(max(1, _LOGITS // head.classes))


def logits_in_parts(head: OutputHead, states: Tensor) -> Iterator[Tensor]:
    """Logits of states, part by part, as `in_parts` divides them."""
    return (head.logits(part) for part in in_parts(states, head) if len(part))
