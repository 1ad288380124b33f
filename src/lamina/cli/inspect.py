"""`lamina inspect`: the layers of a model, what it costs to read them, and inserted layers drawn."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from lamina.cli.output import print_json, print_table, text
from lamina.cli.shared_options import JsonOption, ModelArgument
from lamina.errors import ConfigError, error_context
from lamina.utils import pluralize

if TYPE_CHECKING:
    from lamina.layers import LayerStack

_PICTURE = "Draw the weights of an inserted layer before and after training to this .png, .svg or .html file."
_BESIDE = "With --inserted-weights: another model to draw below; may be repeated."
_LAYER = "With --inserted-weights: number of the block, from 1. Default: the first block with an inserted layer."
_PROJECTION = 'With --inserted-weights: projection before the layer, such as "query". Default: the first.'
_STACK = "With --inserted-weights: stack of the layer. Default: the first stack with an inserted layer."


def inspect(  # noqa: PLR0913
    model: ModelArgument,
    weights: Annotated[
        bool, Option(help="Also load the weights and show their fingerprints. Default: read the config only.")
    ] = False,
    inserted_weights: Annotated[Path | None, Option(metavar="OUT.png", help=_PICTURE)] = None,
    beside: Annotated[list[str] | None, Option(metavar="MODEL", help=_BESIDE)] = None,
    layer: Annotated[int | None, Option(help=_LAYER)] = None,
    projection: Annotated[str | None, Option(help=_PROJECTION)] = None,
    head: Annotated[int, Option(help="With --inserted-weights: attention head to draw, from 0.")] = 0,
    stack: Annotated[str | None, Option(help=_STACK)] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the layers of a model and the module at which each one is read.

    With --inserted-weights, draw an inserted layer before and after training, and print the mean weights of all
    inserted layers, on the diagonal and off it.
    """
    if inserted_weights is not None:
        chosen = {"layer": layer, "projection": projection, "stack": stack}
        draw_inserted([model, *(beside or [])], inserted_weights, head, chosen, as_json=as_json)
        return
    if beside or layer is not None or projection or head or stack:
        raise ConfigError("inspect: what to draw was named, and no picture. Use --inserted-weights OUT.png.")
    facts = describe(model, weights=weights)
    if as_json:
        print_json(facts)
        return
    kind = f"{facts['architecture']}, family {facts['model_type']}"
    print(f"{facts['model']}: {kind}, {text(facts['parameters'])} parameters")
    for name, own in facts["stacks"].items():
        blocks = f"{own['depth']} x {own['block']}" if own["block"] else pluralize(own["depth"], "block")
        title = f"\n{name}: {pluralize(own['layers'], 'layer')} of width {own['width']}, {blocks}"
        print_table(title, ("layer", "read at", "side", "made by", "parameters"), [_row(tap) for tap in own["taps"]])
        if "fingerprint" in own:
            print(f"fingerprint {own['fingerprint']}")


def _row(tap: dict[str, Any]) -> tuple[object, ...]:
    path, block = tap["path"] or "(the model)", tap["block"] or "embeddings"
    return (tap["layer"], path, tap["side"], block, tap["parameters"])


def describe(name: str, *, weights: bool = False) -> dict[str, Any]:
    """Return facts about a model's layers as JSON; with `weights` also the fingerprint of each stack."""
    from lamina.layers import stacks
    from lamina.store import fingerprint, load, outline

    model = load(name)[0] if weights else outline(name)
    with nullcontext() if weights else error_context("tried without weights; --weights looks closer"):
        by_name = stacks(model)
    facts = {stack_name: _stack(stack) for stack_name, stack in by_name.items()}
    for stack_name in facts if weights else ():
        facts[stack_name]["fingerprint"] = fingerprint(model, stack_name)
    return {
        "model": name,
        "model_type": str(model.config.model_type),
        "architecture": type(model).__name__,
        "parameters": model.num_parameters(),
        "stacks": facts,
    }


def _stack(stack: LayerStack) -> dict[str, Any]:
    outside = _outside(stack)
    blocks = [(type(block).__name__, sum(p.numel() for p in block.parameters())) for block in stack.blocks]
    makers = [(None, outside), *(blocks or [("?", None)] * stack.depth)]
    return {
        "layers": stack.layers,
        "depth": stack.depth,
        "width": stack.width,
        "block": ", ".join(dict.fromkeys(kind for kind, _ in blocks)) or None,
        "embedding_parameters": outside,
        "taps": [
            {"layer": layer, "path": point.path, "side": point.side, "block": kind, "parameters": size}
            for layer, (point, (kind, size)) in enumerate(zip(stack.points, makers, strict=True))
        ],
    }


def _outside(stack: LayerStack) -> int | None:
    """Parameters of the stack outside its blocks: the embeddings, and norms around the blocks."""
    if not stack.blocks:
        return None
    inside = {id(parameter) for block in stack.blocks for parameter in block.parameters()}
    own = {id(p): p.numel() for module in stack.run for p in module.parameters(recurse=False) if id(p) not in inside}
    return sum(own.values())


_TITLE = "Means of the inserted weights, on the diagonal and off it; of the change those of its absolute value"


def draw_inserted(names: list[str], path: Path, head: int, chosen: dict[str, Any], *, as_json: bool) -> None:
    """Draw one inserted layer of each model, and print the mean weights of all their inserted layers.

    Args:
        names: Folders or hub ids of the models.
        path: File to draw to.
        head: Attention head to draw, from 0.
        chosen: "layer", "projection" and "stack" of the layer to draw; see `chosen_weight`.
        as_json: Print JSON instead of a table.
    """
    from lamina.report.inserted_weights import chosen_weight, diagonals, inserted_weights, weight_maps
    from lamina.store import load, saved_class

    found = {name: inserted_weights(load(name, saved_class(name))[0]) for name in dict.fromkeys(names)}
    labels = [Path(name).name for name in found]
    shown = dict(zip(found if len(set(labels)) < len(labels) else labels, found.values(), strict=True))
    weight_maps({label: chosen_weight(weights, **chosen) for label, weights in shown.items()}, path, head=head)
    rows = [{"model": label, **row} for label, weights in shown.items() for row in diagonals(weights)]
    if as_json:
        print_json(rows)
        return
    print_table(_TITLE, [column.replace("_", " ") for column in rows[0]], [list(row.values()) for row in rows])
    print(f"drawn in {path}")
