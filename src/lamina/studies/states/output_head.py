"""Apply a language model's final norm and output head to the states of any layer."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, TypeAlias, cast, final

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

    from lamina.layers.types import Batch
    from lamina.studies.passes import LayerReader

# What a block returns: its state, or a tuple that begins with its state.
BlockOutput: TypeAlias = Tensor | tuple[Tensor, ...]

_CLOSE = 1e-3  # relative to the largest logit; a norm that is left out or applied twice is off by far more
_LOGITS = 2**23  # number of logits that are computed at a time
_SAME = 1e-6  # the tolerance for tokens that a later token cannot influence


@final
class OutputHead:
    """Computes logits from the states of any layer, as the model does from the output of its last block.

    The model runs on one placeholder token. A hook replaces the output of its last block by the states, to which the
    model then applies its own final norm and head. (A few models must run on as many tokens as there are states.)
    Creating an instance checks on a small input that this reproduces the model's own logits. The model must be in eval
    mode when logits are computed.

    Args:
        model: A causal or masked language model.
        op: Name of the study, for error messages.

    Attributes:
        causal: Whether the logits of a token do not depend on the tokens after it.
        classes: Size of the vocabulary.

    Raises:
        ConfigError: If the model has no output over a vocabulary.
        UnsupportedModelError: If the model has two stacks, has no module per block, or mixes tokens after its last
            block.
    """

    def __init__(self, model: PreTrainedModel, *, op: str) -> None:
        self.model, self._op = model, op
        self.stack = default_stack(model, op=op)
        if self.stack.name != "main" or not self.stack.blocks:
            raise self._unsupported("it is no single stack with a module per block")
        if self.stack.is_converted:
            raise self._unsupported("its blocks pass on states in another form than [batch, tokens, width]")
        if model.get_output_embeddings() is None:
            problem = f"{type(model).__name__} has no output over a vocabulary"
            hint = "Load it with a language modelling head: head='causal_lm' or 'masked_lm'."
            raise ConfigError(f"{op}: {problem}. {hint}")
        self._block, self._wide = self.stack.blocks[-1], False
        # where blocks share weights, the same module is called several times in a pass; the last call is the last block
        self._call = self.stack.blocks.count(self._block) - 1
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
        """Return the UnsupportedModelError for a model whose output head cannot be applied to other states."""
        hint = "Use a causal or a masked language model."
        return UnsupportedModelError(op=self._op, model_type=family_of(self.model), reason=reason, hint=hint)

    def _try(self, states: Tensor) -> Tensor:
        """Compute the logits of states with one placeholder token. If that fails, use as many tokens as states.

        The result is remembered. GPT reshapes the output of its last block to the shape of its input, which raises
        RuntimeError with one token.
        """
        try:
            return self.logits(states)
        except RuntimeError:
            self._wide = True
            return self.logits(states)

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits `[rows, classes]` of `states` `[rows, width]` put in place of the last block's output."""

        def replace(output: BlockOutput) -> BlockOutput:
            state = swapped(states.unsqueeze(1), self._swap)
            return state if isinstance(output, Tensor) else (state, *output[1:])

        with self._after_last_block(replace):
            rows = len(states) if self._wide else 1
            return self._run({name: value.expand(rows, -1) for name, value in self._carrier.items()}).flatten(0, 1)

    @contextmanager
    def last_states(self) -> Generator[list[Tensor]]:
        """Record the output of the last block, before a final norm, in this thread's passes inside the `with` block.

        Yields:
            A list; each pass appends the state `[batch, tokens, width]` to it.
        """
        last: list[Tensor] = []

        def record(output: BlockOutput) -> None:
            last.append(swapped(output if isinstance(output, Tensor) else output[0], self._swap))

        with self._after_last_block(record):
            yield last

    def _run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Run the model, and return its logits `[batch, tokens, classes]`."""
        out = self.model(**inputs)  # pyright: ignore[reportCallIssue]
        logits = getattr(out, "logits", None)
        return out.prediction_logits if logits is None else logits

    @contextmanager
    def _after_last_block(self, act: Callable[[BlockOutput], BlockOutput | None]) -> Generator[None]:
        """Call `act` with the output of the last block, in forward passes of this thread inside the `with` block.

        If `act` returns something, it replaces the output.
        """
        thread, calls = get_ident(), 0

        def hook(_module: nn.Module, _args: object, output: object) -> BlockOutput | None:
            nonlocal calls
            if get_ident() != thread:
                return None
            calls += 1
            is_last = (calls - 1) % (self._call + 1) == self._call
            return act(cast("BlockOutput", output)) if is_last else None

        handle = self._block.register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()


def states_at(reader: LayerReader, head: OutputHead, batch: Batch, places: tuple[Tensor, Tensor]) -> Iterator[Tensor]:
    """Run a model on one batch; yield each layer's states at some tokens, for `OutputHead.logits`.

    Args:
        reader: Reads the layers' states.
        head: Output head of the same model.
        batch: Keyword arguments of the model.
        places: Row numbers and positions of the tokens, as two index tensors.

    Returns:
        For each layer of the reader, ascending, the states `[tokens, width]`. For the model's highest layer they are
        the output of the last block, before the final norm; the model's own `hidden_states` may include that norm.
    """
    states: dict[int, Tensor] = {}
    with head.last_states() as last:
        reader.read(batch, lambda layer, state, _real: states.update({layer: state}))
    if reader.stack.depth in states:
        states[reader.stack.depth] = last[0]
    rows, positions = (place.to(reader.model.device) for place in places)
    return iter([state[rows, positions] for state in states.values()])


def in_parts(values: Tensor, head: OutputHead) -> Sequence[Tensor]:
    """Split a tensor along its first axis into parts so small that their logits fit into memory."""
    return values.split(max(1, _LOGITS // head.classes))


def logits_in_parts(head: OutputHead, states: Tensor) -> Iterator[Tensor]:
    """Yield the logits `[rows, classes]` of states `[rows, width]`, for a few rows at a time."""
    return (head.logits(part) for part in in_parts(states, head) if len(part))
