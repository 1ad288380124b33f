"""Check that a reader can be trained on recorded states, and that the states come from a bank's model."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lamina.errors import BaseMismatchError, ConfigError
from lamina.fusion.concat import ConcatFusion
from lamina.fusion.elementwise import ElementwiseFusion
from lamina.fusion.last_layer import LastLayerFusion
from lamina.fusion.mean import MeanFusion
from lamina.fusion.scalar_mix import ScalarMixFusion
from lamina.heads.base import HeadConfig
from lamina.layers.fingerprints import fingerprint_of
from lamina.layers.recorded import RecordedModel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

    from lamina.bank.reader import Reader, ReaderModule
    from lamina.layers import LayerStack
    from lamina.layers.recorded import RecordedFacts

logger = logging.getLogger(__name__)

# Fusions that are linear, so that the mean over tokens may be taken before them.
LINEAR = (ConcatFusion, ElementwiseFusion, LastLayerFusion, MeanFusion, ScalarMixFusion)


def check_needs_states(op: str, reader: Reader) -> None:
    """Raise ConfigError if a reader needs more from the model than the states of its layers.

    It is refused if it reads inside the blocks, needs the token ids to tell two texts apart, or uses the model's
    vocabulary. `op` is the operation for the message.
    """
    fusion, head = reader.fusion, reader.head
    what = None
    if fusion.reads_inside:
        what = f"{type(fusion).__name__} reads inside the blocks of the model"
    elif fusion.reads_pairs:
        what = f"{type(fusion).__name__} needs the token ids, to tell two texts apart"
    elif type(head).build_on is not HeadConfig.build_on:
        what = f"{type(head).__name__} uses the model's vocabulary"
    if what:
        raise ConfigError(f"{op}: {what}, and only states were recorded. Train this reader on the model itself.")


def check_reads_recorded(op: str, name: str, reader: ReaderModule, facts: RecordedFacts) -> None:
    """Raise ConfigError, about `op`, unless a reader needs only the recorded states, and gives the model's answers.

    `name` is the reader's name, and `facts` says which states were recorded.
    """
    check_needs_states(op, reader.config)
    what = f"reader '{name}' reads"
    if reader.stack != facts.stack:
        raise ConfigError(f"{op}: {what} the stack '{reader.stack}'; states of '{facts.stack}' are here.")
    needed = [reader.layers[index] for index in reader.fusion.active_layers()]
    if missing := sorted({*needed} - {*facts.layers}):
        got = f"{what} layer {missing[0]}, whose states were not recorded; there are {list(facts.layers)}"
        raise ConfigError(f"{op}: {got}. Name the layers of its fusion: layers={list(facts.layers)}.")
    if facts.pooling is not None and (problem := _pooled_problem(reader, facts.pooling)):
        raise ConfigError(f"{op}: the states are pooled ({facts.pooling}), and reader '{name}' {problem}.")


def _pooled_problem(reader: ReaderModule, pooling: str) -> str | None:
    """Return why a reader cannot read pooled states, and what to use instead, as a phrase; None if it can.

    It can if its answers are equal on the model and on the states. `pooling` is the way in which the tokens' states of
    a text were pooled, such as "mean".
    """
    head = reader.config.head
    if not getattr(reader.head, "pools", False):
        return "labels each token. Record the states of all tokens"
    if getattr(head, "pooling", None) != pooling or getattr(head, "encoder_layers", 0):
        return f"pools in another way. Give its head pooling='{pooling}' and no encoder layers, or record all tokens"
    if pooling == "mean" and not isinstance(reader.fusion, LINEAR):
        linear = "Mean, ScalarMix, Elementwise, Concat or LastLayer"
        return f"has a fusion that is not linear, which would come before the mean. Use {linear}, or record all tokens"
    if not reader.fusion.is_token_wise():
        return "needs the states of all tokens. Use a token-wise fusion such as SingleLayer or AdaLayers"
    return None


def check_recorded_base(
    op: str, by_name: Mapping[str, LayerStack], model: PreTrainedModel, facts: RecordedFacts
) -> None:
    """Check that the states that `facts` describes were recorded from `model`, whose stacks are `by_name`.

    The model may be a `RecordedModel`. If that or `facts` has no fingerprint, only stack, depth and width are compared.
    If `facts` has none and the model is a real one, a warning that begins with `op` is logged.

    Raises:
        BaseMismatchError: If the stack, its depth, its width or its fingerprint differs.
    """
    if facts.stack not in by_name:
        raise BaseMismatchError(op=op, differs={"stack": (facts.stack, "/".join(by_name))})
    stack = by_name[facts.stack]
    own = {"depth": stack.depth, "width": stack.width}
    differs: dict[str, tuple[object, object]] = {
        name: (getattr(facts, name), here) for name, here in own.items() if getattr(facts, name) != here
    }
    if not differs and facts.fingerprint is not None:
        known = model.facts.fingerprint if isinstance(model, RecordedModel) else fingerprint_of(stack)
        if known is not None and known != facts.fingerprint:
            differs["fingerprint"] = (facts.fingerprint, known)
    if differs:
        raise BaseMismatchError(op=op, differs=differs)
    if facts.fingerprint is None and not isinstance(model, RecordedModel):
        what = "the states have no fingerprint of their model, so only its depth and width could be compared"
        logger.warning("%s: %s", op, what)
