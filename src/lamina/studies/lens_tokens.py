"""The logit lens on one text: the likeliest tokens of each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from lamina.data.batches import tokenizer_of
from lamina.layers.preserve import evaluating
from lamina.studies.output_head import OutputHead, asked_states, logits_in_parts
from lamina.studies.passes import LayerReader, text_inputs
from lamina.studies.provenance import library_versions, model_facts
from lamina.studies.study import Figure, Study
from lamina.utils import check_range

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.layers.selectors import Selector


def lens_tokens(
    model: PreTrainedModel, text: str, *, processor: Any = None, layers: Selector = "all", top: int = 5
) -> Study:
    """List what each layer would say at each token of one text: its likeliest tokens, through the model's own head.

    A causal model says the next token. A masked one says the token itself, at the mask tokens in the text if there are
    any, else at all of its tokens.

    Args:
        model: A causal or masked language model with its head; it is left as it is.
        text: One text.
        processor: The tokenizer; None: the one that belongs to `model.name_or_path`.
        layers: Which layers.
        top: How many tokens, at least 1.

    Returns:
        A study whose table has "layer", "position" (in the model's input), "token" (the one there), "place" (1 is the
        likeliest), "predicted" and "score" (its probability).

    Raises:
        ConfigError: If the model has no language model head, or `top` is out of range.
        UnsupportedModelError: As `lens`.

    Source:
        As `lens`.
    """
    reader = LayerReader(model, layers, op="lens_tokens")
    head = OutputHead(reader.model, op="lens_tokens")
    inputs = text_inputs(reader.model, [text], processor, None, op="lens_tokens")
    check_range("lens_tokens", "top", top, 1, head.classes)
    batch, tokenizer = inputs.batch([0]), tokenizer_of(inputs.processor)
    ids = batch["input_ids"]
    shown = ids == tokenizer.mask_token_id if tokenizer.mask_token_id is not None else torch.zeros_like(ids).bool()
    if head.causal or not shown.any():
        shown = torch.ones_like(shown)
    places = shown.nonzero(as_tuple=True)
    rows: list[dict[str, Any]] = []
    with evaluating(reader.model), torch.no_grad():
        for layer, states in zip(reader.layers, asked_states(reader, head, batch, places), strict=True):
            likeliest = torch.cat([logits.float().softmax(-1).topk(top)[0] for logits in logits_in_parts(head, states)])
            names = torch.cat([logits.topk(top)[1] for logits in logits_in_parts(head, states)])
            for position, scores, predicted in zip(places[1].tolist(), likeliest.tolist(), names.tolist(), strict=True):
                token = tokenizer.convert_ids_to_tokens(int(ids[0, position]))
                for place, (score, number) in enumerate(zip(scores, predicted, strict=True), start=1):
                    guess = tokenizer.convert_ids_to_tokens(number)
                    said = {"place": place, "predicted": guess, "score": score}
                    rows.append({"layer": layer, "position": position, "token": token, **said})
    settings = {
        "models": {"model": model_facts(reader.model)},
        "layers": reader.layers,
        "text": text,
        "top": top,
        "causal": head.causal,
        "versions": library_versions(),
    }
    title = "The likeliest token of each layer"
    note = "Read up a column: from where a token stays the same, higher layers change nothing of the answer."
    figure = Figure(
        "heat",
        x="position",
        y="layer",
        label="predicted",
        x_label="token",
        where={"place": 1},
        title=title,
        x_title="token of the text",
        value_title="probability of the likeliest token",
        note=note,
    )
    return Study("lens_tokens", pd.DataFrame(rows), settings, {"likeliest": figure})
