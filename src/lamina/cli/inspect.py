"""`lamina inspect`: the layers of a model, and where each of them is read."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from lamina.cli.options import JsonOption, ModelArgument
from lamina.cli.output import print_json, print_table, text
from lamina.errors import noted

if TYPE_CHECKING:
    from lamina.layers import LayerStack


def inspect(
    model: ModelArgument,
    weights: Annotated[bool, Option(help="Load the weights too, and show their fingerprints.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show a model's layers and where each is read.

    Its config alone is enough, unless --weights asks for more.
    """
    facts = describe(model, weights=weights)
    if as_json:
        print_json(facts)
        return
    kind = f"{facts['architecture']}, family {facts['model_type']}"
    print(f"{facts['model']}: {kind}, {text(facts['parameters'])} parameters")
    for name, stack in facts["stacks"].items():
        blocks = f"{stack['depth']} x {stack['block']}" if stack["block"] else f"{stack['depth']} blocks"
        title = f"\n{name}: {stack['layers']} layers of width {stack['width']}, {blocks}"
        print_table(title, ("layer", "read at", "side", "made by", "parameters"), [_row(tap) for tap in stack["taps"]])
        if "fingerprint" in stack:
            print(f"fingerprint {stack['fingerprint']}")


def _row(tap: dict[str, Any]) -> tuple[object, ...]:
    path, block = tap["path"] or "(the model)", tap["block"] or "embeddings"
    return (tap["layer"], path, tap["side"], block, tap["parameters"])


def describe(name: str, *, weights: bool = False) -> dict[str, Any]:
    """Facts about a model's layers, JSON-ready; with the weights, also the fingerprint of each stack."""
    from lamina.layers import stacks
    from lamina.store import empty_model, fingerprint, load, load_config

    model = load(name)[0] if weights else empty_model(load_config(name))
    with nullcontext() if weights else noted("tried without weights; --weights looks closer"):
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
