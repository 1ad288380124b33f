"""The weights of inserted layers before and after training: their means, and heat maps of the change."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from lamina.editing.editable import convolution_blocks
from lamina.editing.insert import inserted_at_start
from lamina.editing.inserted_layer import PREFIX, InsertedLayer
from lamina.editing.record import edits
from lamina.errors import ConfigError, UnknownNameError, UnsupportedModelError
from lamina.layers import stacks
from lamina.layers.stack import by_path
from lamina.report.chart_files import checked_path, save_chart
from lamina.report.charts import chart_package, in_order
from lamina.utils import check_range

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import ModuleType

    import altair as alt
    from jaxtyping import Float
    from torch import Tensor
    from transformers import PreTrainedModel

    from lamina.report.charts import Mark

STATES = ("start", "trained", "change")
_OP = "inserted weights"


@dataclass(frozen=True, eq=False)
class InsertedWeight:
    """The weights of an inserted layer before and after training, as float32 copies on the CPU.

    If the layer follows a convolution, they are the matrix in the middle of the kernel. Layers after feed-forward
    projections have one head.

    Attributes:
        stack: Name of the stack.
        layer: Number of the block that the layer is in, from 1.
        projection: The projection that the layer follows, as its path within the block: "attention.self.query".
        start: The weights before training; `trained` are those after it. `[heads, width, width]`.
    """

    stack: str
    layer: int
    projection: str
    start: Float[Tensor, "heads width width"]
    trained: Float[Tensor, "heads width width"]

    def states(self) -> dict[str, Float[Tensor, "heads width width"]]:
        """Return name -> weight: "start" (before training), "trained" (after it) and "change" (trained - start)."""
        return dict(zip(STATES, (self.start, self.trained, self.trained - self.start), strict=True))


def inserted_weights(model: PreTrainedModel, start: PreTrainedModel | None = None) -> list[InsertedWeight]:
    """Return the weights of a trained model's inserted layers before and after training, in the order of the model.

    `start` is the model before training; None: the initial weights are computed again, from the seeds in the model's
    record of edits. Raises ConfigError if the model has no inserted layers (a merge removes them), or `start` lacks
    one.
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
            raise ConfigError(f"{_OP}: there is no initial weight for '{name}'; the two models have different layers.")
        block = max((place for place in places if f"{path}.".startswith(f"{place}.")), key=len)
        stack, layer = places[block]
        module = cast("InsertedLayer", modules[f"{path}.{inserted}"])
        matrices = [_matrices(weight, module) for weight in (before[name], parameter)]
        projection = path.removeprefix(f"{block}.") + f" ({inserted})" * (inserted != f"{PREFIX}0")
        weights.append(InsertedWeight(stack, layer, projection, *matrices))
    if not weights:
        raise ConfigError(
            f"{_OP}: the model has no inserted layers. Use insert_, train the model, and do not merge it."
        )
    return weights


def _places(model: PreTrainedModel) -> dict[str, tuple[str, int]]:
    """Return path of a block -> (stack name, number of the block from 1). Convolutional blocks are included."""
    blocks: dict[torch.nn.Module, tuple[str, int]] = {}
    with suppress(UnsupportedModelError):
        for name, stack in stacks(model).items():
            for layer, block in enumerate(stack.blocks, 1):
                blocks.setdefault(block, (name, layer))
    with suppress(UnsupportedModelError):
        name, convolutional = convolution_blocks(model, _OP)
        blocks |= {block: (name, layer) for layer, block in enumerate(convolutional, 1)}
    return {path: blocks[module] for path, module in by_path(model).items() if module in blocks}


def _matrices(weight: Tensor, layer: InsertedLayer) -> Float[Tensor, "heads width width"]:
    """Return an inserted layer's weight as float32 matrices on the CPU: one per head, or a single one.

    If `weight` is a convolution's kernel, only the matrix in its middle is returned.
    """
    weight = weight.detach()
    if layer.axes:
        weight = weight[(..., *[length // 2 for length in weight.shape[2:]])]
    weight = weight.to("cpu", torch.float32, copy=True)  # training the model on must not change it
    return weight if weight.ndim == 3 else weight[None]


def diagonals(weights: Sequence[InsertedWeight]) -> list[dict[str, str | int | float]]:
    """Return the mean of inserted weights on the diagonal, and their mean off the diagonal, for each projection.

    Args:
        weights: The weights, from `inserted_weights`.

    Returns:
        Rows with "stack", "projection", "layers" (number of blocks that are averaged), and the means "start_diagonal",
        "start_rest", "trained_diagonal", "trained_rest", "change_diagonal" and "change_rest". "start" is before
        training, "trained" after it, and "change" the absolute value of the difference; "rest" are the entries off the
        diagonal.
    """
    groups: dict[tuple[str, str], list[InsertedWeight]] = {}
    for weight in weights:
        groups.setdefault((weight.stack, weight.projection), []).append(weight)
    return [
        {"stack": stack, "projection": projection, "layers": len(group), **_means(group)}
        for (stack, projection), group in groups.items()
    ]


def _means(group: Sequence[InsertedWeight]) -> dict[str, float]:
    """Return name -> mean, for the six means of `diagonals`.

    Each is over the entries of all weights in `group`, or 0 if there are none.
    """
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
    """Return the first inserted weight with the given stack, layer (from 1) and projection; None: any.

    The projection is its path within the block, or the end of that path, such as "query". Raises UnknownNameError if no
    weight fits.
    """
    for field, wanted in (("stack", stack), ("layer", layer), ("projection", projection)):
        fitting = [weight for weight in weights if wanted is None or _fits(getattr(weight, field), wanted)]
        if not fitting:
            known = dict.fromkeys(str(getattr(weight, field)) for weight in weights)
            raise UnknownNameError(op=_OP, got=str(wanted), known=known, what=f"{field} with inserted layers")
        weights = fitting
    return weights[0]


def _fits(value: object, wanted: object) -> bool:
    return value == wanted or str(value).endswith(f".{wanted}")


DIVERGING = ("#c05a1c", "#ffffff", "#0b4a8f")  # colours of the lowest value, of 0 and of the highest value
SHOWN = 7  # default number of rows and columns of a weight that are drawn


def weight_maps(
    weights: Mapping[str, InsertedWeight],
    path: Path | str,
    *,
    head: int = 0,
    most: int = SHOWN,
) -> Path:
    """Draw inserted weights as heat maps, and return the path of the file.

    The chart has one row of three heat maps per model: the weight before training, after training, and the change. The
    first two share a colour scale in each row; all changes share another. Raises ConfigError if the path has another
    suffix, a weight has no such head, or `most` is below 1; DataError if there are no weights; MissingExtraError if the
    packages of `lamina[report]` are not installed; StoreError if the file cannot be written.

    Args:
        weights: Name of the row -> the weight of one inserted layer, from `inserted_weights`.
        path: File to write; ends in `.png`, `.svg` or `.html`.
        head: Attention head to draw, from 0. Layers after a feed-forward projection have only head 0.
        most: Draw only the first `most` rows and columns of each weight.

    Source:
        "How to insert additional layers between the middle layers of the pre-trained model", Figure 5.
    """
    check_range("weight figure", "most", most, 1)
    entries = [entry for name, weight in weights.items() for entry in _entries(name, weight, head, most)]
    path = checked_path("weight figure", path, entries, ("model", "state", "row", "column", "weight"))
    altair = chart_package("weight figure")
    change = max(abs(entry["weight"]) for entry in entries if entry["state"] == "change")
    bands = []
    for name in in_order(entries, "model"):
        of_model = [entry for entry in entries if entry["model"] == name]
        size = max(abs(entry["weight"]) for entry in of_model if entry["state"] != "change")
        limits = {state: change if state == "change" else size for state in STATES}
        panels = [
            _panel(altair, [entry for entry in of_model if entry["state"] == state], limits[state]) for state in STATES
        ]
        heading = altair.TitleParams(name, anchor="start", fontSize=13)
        bands.append(altair.hconcat(*panels, spacing=26, title=heading).resolve_scale(color="independent"))
    chart = altair.vconcat(*bands, spacing=22).resolve_scale(color="independent")
    places = (f"{weight.projection} of {weight.stack} block {weight.layer}" for weight in weights.values())
    below = "; ".join(dict.fromkeys(places))
    heads = f", head {head}" if any(len(weight.trained) > 1 for weight in weights.values()) else ""
    remark = f"Inserted after {below}{heads}. The first {most} rows and columns of each matrix are drawn."
    return save_chart(chart.to_dict(), path, "Weights of an inserted layer", [remark])


def _entries(name: str, weight: InsertedWeight, head: int, most: int) -> list[Mark]:
    """Return the numbers to draw: the first `most` rows and columns of one head, for each of `InsertedWeight.states`.

    Each has the "model" (`name`), the "state", "row" and "column" (from 1) and "weight". Heads count from 0.
    Raises ConfigError if the weight has no such head.
    """
    if not 0 <= head < len(weight.trained):
        problem = f"head is {head}; the layer after {weight.projection} has {len(weight.trained)}"
        raise ConfigError(f"weight figure: {problem}. Use 0..{len(weight.trained) - 1}.")
    return [
        {"model": name, "state": state, "row": row, "column": column, "weight": value}
        for state, matrix in weight.states().items()
        for row, values in enumerate(matrix[head, :most, :most].tolist(), 1)
        for column, value in enumerate(values, 1)
    ]


def _panel(altair: ModuleType, cells: list[Mark], limit: float) -> alt.Chart | alt.LayerChart:
    """Return a heat map of the entries of one matrix; up to 7 x 7 entries, it shows the numbers too.

    The absolute value `limit` gets the darkest colour, and 0 is white.
    """
    side = 34 if len(cells) <= SHOWN**2 else max(4, 34 * SHOWN // max(cell["row"] for cell in cells))
    limit = limit or 1.0
    base = altair.Chart(altair.Data(values=cells)).encode(
        x=altair.X("column:O", axis=None), y=altair.Y("row:O", axis=None)
    )
    # Other interpolations than "rgb" give 0 a tint.
    scale = altair.Scale(domain=[-limit, 0, limit], range=list(DIVERGING), interpolate="rgb")
    legend = altair.Legend(title=None, tickCount=3, format=".2~g", gradientLength=120)
    tooltip = ["row:O", "column:O", altair.Tooltip("weight:Q", format=".4f")]
    drawn = base.mark_rect().encode(color=altair.Color("weight:Q", scale=scale, legend=legend), tooltip=tooltip)
    if len(cells) <= SHOWN**2:
        form = ".2f" if limit >= 0.1 else ".1e" if limit < 0.001 else ".3f"
        ink = altair.condition(f"abs(datum.weight) > {0.6 * limit}", altair.value("white"), altair.value("black"))
        drawn += base.mark_text(fontSize=9).encode(text=altair.Text("weight:Q", format=form), color=ink)
    heading = altair.TitleParams(cells[0]["state"], anchor="start", fontSize=12, fontWeight="normal")
    columns = max(cell["column"] for cell in cells)
    return drawn.properties(width=side * columns, height=side * max(cell["row"] for cell in cells), title=heading)
