"""Inserted weights: how they start, what training makes of them, and heat maps of the change."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lamina.editing.editable import convolution_blocks
from lamina.editing.insert import inserted_at_start
from lamina.editing.inserted_layer import PREFIX
from lamina.editing.record import edits
from lamina.errors import ConfigError, UnknownNameError, UnsupportedModelError
from lamina.layers import stacks
from lamina.layers.stack import by_path
from lamina.report.chart_files import INK, chart_package, checked_path, in_order, save_chart, styled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from jaxtyping import Float
    from torch import Tensor
    from transformers import PreTrainedModel

STATES = ("start", "trained", "change")
_OP = "inserted weights"


@dataclass(frozen=True, eq=False)
class InsertedWeight:
    """The weight of an inserted layer before and after training, on the CPU; of a convolution its middle."""

    stack: str
    layer: int  # the block, from 1
    projection: str  # which it follows: its path within the block, such as "attention.self.query"
    start: Float[Tensor, "heads width width"]
    trained: Float[Tensor, "heads width width"]

    def states(self) -> dict[str, Float[Tensor, "heads width width"]]:
        """Return the weights by name: "start", "trained" and their difference "change"."""
        return dict(zip(STATES, (self.start, self.trained, self.trained - self.start), strict=True))


def inserted_weights(model: PreTrainedModel, start: PreTrainedModel | None = None) -> list[InsertedWeight]:
    """Return the weights of a model's inserted layers before and after training, in the order of the model.

    Args:
        model: A model with inserted layers, trained since.
        start: The model as it was; None makes the weights again from the record of the edits, with its seeds.

    Raises:
        ConfigError: If a model has no inserted layers, or not those of the other.
    """
    before = {} if start is None else {name: parameter.detach() for name, parameter in start.named_parameters()}
    for edit in (edit for edit in edits(model) if edit.kind == "insert" and start is None):
        before |= inserted_at_start(model, edit)
    modules, places = by_path(model), _places(model)
    weights: list[InsertedWeight] = []
    for name, parameter in model.named_parameters():
        path, _, inserted = name.removesuffix(".weight").rpartition(".")
        if not inserted.startswith(PREFIX):
            continue
        if name not in before:
            raise ConfigError(f"{_OP}: '{name}' has no weight to start from; the two models have other layers.")
        block = max((place for place in places if f"{path}.".startswith(f"{place}.")), key=len)
        stack, layer = places[block]
        matrices = [_matrices(weight, modules[f"{path}.{inserted}"]) for weight in (before[name], parameter)]
        projection = path.removeprefix(f"{block}.") + f" ({inserted})" * (inserted != f"{PREFIX}0")
        weights.append(InsertedWeight(stack, layer, projection, *matrices))
    if not weights:
        raise ConfigError(f"{_OP}: the model has no inserted layers. Use insert_, train it, and do not merge it.")
    return weights


def _places(model: PreTrainedModel) -> dict[str, tuple[str, int]]:
    """Return the stack and the number (from 1) of each block or convolution, by the path of its module."""
    blocks: dict[torch.nn.Module, tuple[str, int]] = {}
    with suppress(UnsupportedModelError):
        for name, stack in stacks(model).items():
            for layer, block in enumerate(stack.blocks, 1):
                blocks.setdefault(block, (name, layer))
    with suppress(UnsupportedModelError):
        name, convolutional = convolution_blocks(model, _OP)
        blocks |= {block: (name, layer) for layer, block in enumerate(convolutional, 1)}
    return {path: blocks[module] for path, module in by_path(model).items() if module in blocks}


def _matrices(weight: Tensor, layer: Any) -> Float[Tensor, "heads width width"]:
    weight = weight.detach().float().cpu()
    if layer.axes:
        weight = weight[(..., *[length // 2 for length in weight.shape[2:]])]
    return weight if weight.ndim == 3 else weight[None]


def diagonals(weights: Sequence[InsertedWeight], *, by_layer: bool = False) -> list[dict[str, Any]]:
    """Return the mean weight on and off the diagonal, over the layers after each projection or layer by layer.

    Rows have "stack", "layer" (with `by_layer`), "projection", "layers" (how many), "start_diagonal", "start_rest",
    "trained_diagonal" and "trained_rest"; and, of the absolute change, "change_diagonal" and "change_rest".
    """
    groups: dict[tuple[Any, ...], list[InsertedWeight]] = {}
    for weight in weights:
        groups.setdefault((weight.stack, weight.layer if by_layer else None, weight.projection), []).append(weight)
    rows = []
    for (stack, layer, projection), group in groups.items():
        row = {"stack": stack, **({"layer": layer} if by_layer else {}), "projection": projection}
        rows.append({**row, "layers": len(group), **_means(group)})
    return rows


def _means(group: Sequence[InsertedWeight]) -> dict[str, float]:
    means: dict[str, float] = {}
    for state in STATES:
        values = [weight.states()[state] for weight in group]
        values = [value.abs() for value in values] if state == "change" else values
        for place, is_diagonal in (("diagonal", True), ("rest", False)):
            chosen = [value[:, torch.eye(value.shape[-1], dtype=torch.bool) == is_diagonal] for value in values]
            entries = torch.cat([value.flatten() for value in chosen])
            means[f"{state}_{place}"] = float(entries.mean()) if len(entries) else 0.0
    return means


def chosen_weight(
    weights: Sequence[InsertedWeight], layer: int | None = None, projection: str | None = None, stack: str | None = None
) -> InsertedWeight:
    """Return the first inserted weight of a stack, layer and projection; None stands for any.

    Raises:
        UnknownNameError: If there is none; it names those that there are.
    """
    for what, wanted in (("stack", stack), ("layer", layer), ("projection", projection)):
        fitting = [weight for weight in weights if wanted is None or _is_called(getattr(weight, what), wanted)]
        if not fitting:
            known = dict.fromkeys(str(getattr(weight, what)) for weight in weights)
            raise UnknownNameError(op=_OP, got=str(wanted), known=known, what=f"{what} with inserted layers")
        weights = fitting
    return weights[0]


def _is_called(name: object, wanted: object) -> bool:
    return name == wanted or str(name).endswith(f".{wanted}")


DIVERGING = ("#c05a1c", "#ffffff", "#0b4a8f")  # below 0, 0, above
SHOWN = 7  # rows and columns of a weight


def weight_maps(
    weights: Mapping[str, InsertedWeight],
    path: Path | str,
    *,
    head: int = 0,
    most: int = SHOWN,
    title: str = "Weights of an inserted layer",
) -> Path:
    """Draw inserted weights as heat maps and return the path: a row per model with start, trained and change.

    Start and trained share a scale in each row; the changes of all rows share one, to be compared.

    Args:
        weights: What the row is called -> the weight of one inserted layer; see `inserted_weights`.
        path: Where to; `.png`, `.svg` or `.html`.
        head: Which head of a layer in attention, from 0.
        most: Rows and columns that are drawn, from the first.
        title: Written above.

    Returns:
        `path`.

    Raises:
        ConfigError: If the suffix is none of the three, or a weight has no such head.
        DataError: If there are no weights.
        MissingExtraError: If the packages of `lamina[report]` are not installed.

    Source:
        "How to insert additional layers between the middle layers of the pre-trained model", Figure 5, which shows
        7 x 7 weights of layers that start by Xavier and as the unit matrix.
    """
    rows = [cell for name, weight in weights.items() for cell in _cells(name, weight, head, most)]
    path = checked_path("weight figure", path, rows, ("model", "state", "row", "column", "weight"))
    altair = chart_package("weight figure")
    change = max(abs(row["weight"]) for row in rows if row["state"] == "change")
    bands = []
    for name in in_order(rows, "model"):
        own = [row for row in rows if row["model"] == name]
        size = max(abs(row["weight"]) for row in own if row["state"] != "change")
        limits = {state: change if state == "change" else size for state in STATES}
        panels = [_panel(altair, [row for row in own if row["state"] == state], limits[state]) for state in STATES]
        heading = altair.TitleParams(name, anchor="start", fontSize=13)
        bands.append(altair.hconcat(*panels, spacing=26, title=heading).resolve_scale(color="independent"))
    chart = altair.vconcat(*bands, spacing=22).resolve_scale(color="independent")
    places = (f"{weight.projection} of {weight.stack} block {weight.layer}" for weight in weights.values())
    below = "; ".join(dict.fromkeys(places))
    heads = f", head {head}" if any(len(weight.trained) > 1 for weight in weights.values()) else ""
    return save_chart(styled(chart, title, [f"after {below}{heads}; the first {most} rows and columns"]), path)


def _cells(name: str, weight: InsertedWeight, head: int, most: int) -> list[dict[str, Any]]:
    """Return the entries of a weight that are drawn, a row each."""
    if not 0 <= head < len(weight.trained):
        came = f"head is {head}; the layer after {weight.projection} has {len(weight.trained)}"
        raise ConfigError(f"weight figure: {came}. Use 0..{len(weight.trained) - 1}.")
    return [
        {"model": name, "state": state, "row": row, "column": column, "weight": entry}
        for state, matrix in weight.states().items()
        for row, entries in enumerate(matrix[head, :most, :most].tolist(), 1)
        for column, entry in enumerate(entries, 1)
    ]


def _panel(altair: Any, cells: list[dict[str, Any]], limit: float) -> Any:
    """Return one heat map with colours from -limit to limit, and its numbers if there are few."""
    side = 34 if len(cells) <= SHOWN**2 else max(4, 34 * SHOWN // max(cell["row"] for cell in cells))
    limit = limit or 1.0
    base = altair.Chart(altair.Data(values=cells)).encode(
        x=altair.X("column:O", axis=None), y=altair.Y("row:O", axis=None)
    )
    scale = altair.Scale(domain=[-limit, 0, limit], range=list(DIVERGING), interpolate="rgb")  # else 0 is tinted
    legend = altair.Legend(title=None, tickCount=3, format=".2~g", gradientLength=120)
    tooltip = ["row:O", "column:O", altair.Tooltip("weight:Q", format=".4f")]
    drawn = base.mark_rect().encode(color=altair.Color("weight:Q", scale=scale, legend=legend), tooltip=tooltip)
    if len(cells) <= SHOWN**2:
        form = ".2f" if limit >= 0.1 else ".1e" if limit < 0.001 else ".3f"
        ink = altair.condition(f"abs(datum.weight) > {0.6 * limit}", altair.value("white"), altair.value(INK))
        drawn += base.mark_text(fontSize=9).encode(text=altair.Text("weight:Q", format=form), color=ink)
    heading = altair.TitleParams(cells[0]["state"], anchor="start", fontSize=12, fontWeight="normal")
    columns = max(cell["column"] for cell in cells)
    return drawn.properties(width=side * columns, height=side * max(cell["row"] for cell in cells), title=heading)
