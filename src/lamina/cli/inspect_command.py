"""`lamina inspect`: show where each layer of a model is read and how large it is; draw inserted layers."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NotRequired, TypedDict

from typer import Option

from lamina.cli.shared_options import JsonOption, ModelArgument, print_json, print_table, text
from lamina.errors import ConfigError, error_context
from lamina.utils import JSON, pluralize

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lamina.editing.block_picture import StackPicture
    from lamina.layers import LayerStack
    from lamina.store.manifest import ReaderFacts

_WEIGHTS = "Also load the weights and show a fingerprint (hash) of them. Default: read the config only."
_PICTURE = "Draw the weights of an inserted layer before and after training to this .png, .svg or .html file."
_BESIDE = "With --inserted-weights: another model to draw below; may be repeated."
_LAYER = "With --inserted-weights: number of the block, from 1. Default: the first block with an inserted layer."
_PROJECTION = (
    'With --inserted-weights: projection that the inserted layer follows, such as "query". Default: the first.'
)
_STACK = "With --inserted-weights: stack of the layer. Default: the first stack with an inserted layer."


class Tap(TypedDict):
    """Where a layer is read.

    Attributes:
        layer: Number of the layer; 0: the embeddings.
        path: Path of a module, whose `side` ("input" or "output") is the state.
        block: The block's class; None for the embeddings.
        parameters: Number of parameters in the block, or for the embeddings outside all blocks; None: not known.
    """

    layer: int
    path: str
    side: str
    block: str | None
    parameters: int | None


class StackFacts(TypedDict):
    """A stack of blocks as `lamina inspect` describes it.

    Attributes:
        layers: Number of layers, with the embeddings; `depth` is the number without.
        width: Size of a state.
        block: Classes of the blocks; None: the blocks are not modules.
        embedding_parameters: Number of parameters outside the blocks; None: not known.
        taps: Where each layer is read.
        fingerprint: Hash of the stack's weights; only with --weights.
    """

    layers: int
    depth: int
    width: int
    block: str | None
    embedding_parameters: int | None
    taps: list[Tap]
    fingerprint: NotRequired[str]


class ModelFacts(TypedDict):
    """The JSON that `lamina inspect` prints with --json.

    Attributes:
        model: Its name; `model_type` and `architecture` are its config's type and its class.
        parameters: Number of parameters.
        stacks: Stack name -> the stack.
        edited: Blocks of each edited stack before and after the recorded edits; missing without edits.
    """

    model: str
    model_type: str
    architecture: str
    parameters: int
    stacks: dict[str, StackFacts]
    edited: NotRequired[dict[str, StackPicture]]


def inspect(  # noqa: PLR0913
    model: ModelArgument,
    weights: Annotated[bool, Option(help=_WEIGHTS)] = False,
    inserted_weights: Annotated[Path | None, Option(metavar="OUT.png", help=_PICTURE)] = None,
    beside: Annotated[list[str] | None, Option(metavar="MODEL", help=_BESIDE)] = None,
    layer: Annotated[int | None, Option(help=_LAYER)] = None,
    projection: Annotated[str | None, Option(help=_PROJECTION)] = None,
    head: Annotated[int, Option(help="With --inserted-weights: attention head to draw, from 0.")] = 0,
    stack: Annotated[str | None, Option(help=_STACK)] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the layers of a model and the module at which each one is read.

    For the folder of a bank, show its readers, and its monitors with their rates.

    With --inserted-weights, draw an inserted layer before and after training, and print the mean weights of all
    inserted layers, on the diagonal and off it. Wrong input ends with one sentence and exit code 2.
    """
    if inserted_weights is not None:
        names = [model, *(beside or [])]
        _draw_inserted(names, inserted_weights, head, layer=layer, projection=projection, stack=stack, as_json=as_json)
        return
    if beside or layer is not None or projection or head or stack:
        problem = "an option says what to draw, but there is no file to draw to"
        raise ConfigError(f"inspect: {problem}. Use --inserted-weights OUT.png.")
    from lamina.store.bank_folder import saved_readers

    if readers := saved_readers(model):
        if weights:
            raise ConfigError(f"inspect: {model} is a bank; --weights is for models. Name its base model.")
        _inspect_bank(model, readers, as_json=as_json)
        return
    facts = describe(model, weights=weights)
    if as_json:
        print_json(facts)
        return
    architecture = f"{facts['architecture']}, family {facts['model_type']}"
    print(f"{facts['model']}: {architecture}, {text(facts['parameters'])} parameters")
    for name, stack_facts in facts["stacks"].items():
        _show(name, stack_facts)
    from lamina.editing.block_picture import drawn

    for name, picture in facts.get("edited", {}).items():
        print(f"\n{name}, edited:")
        print("\n".join(f"  {line}" for line in drawn(picture)))


def _inspect_bank(folder: str, readers: Mapping[str, ReaderFacts], *, as_json: bool) -> None:
    """Print the readers and monitors of a saved bank.

    As JSON, only the monitors are printed, or only the readers if there are no monitors. `readers` is reader name ->
    the settings that were saved with it.
    """
    from lamina.bank.monitoring import stored_monitors

    monitors = list(stored_monitors(readers).values())
    if as_json and monitors:
        print_json([_without_sketch(monitor.to_dict()) for monitor in monitors])
    elif as_json:
        print_json({name: saved.model_dump() for name, saved in readers.items()})
    else:
        from lamina.store.hub import MONITOR_COLUMNS, monitor_cells

        rows = [_reader_cells(name, saved) for name, saved in readers.items()]
        print_table(f"Readers of {folder}", ("reader", "fusion", "layers", "learnt from", "parameters", "score"), rows)
        if monitors:
            rates = [monitor_cells(str(monitor.name), monitor) for monitor in monitors]
            print_table(f"Monitors of {folder}", MONITOR_COLUMNS, rates)


def _reader_cells(name: str, saved: ReaderFacts) -> list[object]:
    """Return a row of the table of readers: name, fusion, layers, columns that it learnt from, size and score.

    `saved` is what was saved with the reader. A cell is "" if nothing was recorded.
    """
    from lamina.layers.selectors import ranges

    columns, metric, scores = (saved.info.get(key) for key in ("columns", "metric", "scores"))
    learnt = ", ".join(f"{key}={column}" for key, column in columns.items()) if isinstance(columns, dict) else ""
    score = scores.get(str(metric)) if isinstance(scores, dict) else None
    scored = f"{metric} {score:.3f}" if isinstance(score, int | float) else ""
    return [name, saved.fusion["name"], ranges(saved.layers), learnt, saved.parameters, scored]


def _without_sketch(fields: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return a copy of the fields of a monitor or cascade without sketches, at any depth."""
    plain = {key: value for key, value in fields.items() if key not in ("sketch", "sketch_width")}
    return {key: _without_sketch(value) if isinstance(value, dict) else value for key, value in plain.items()}


def _show(name: str, facts: StackFacts) -> None:
    blocks = f"{facts['depth']} x {facts['block']}" if facts["block"] else pluralize(facts["depth"], "block")
    title = f"\n{name}: {pluralize(facts['layers'], 'layer')} of width {facts['width']}, {blocks}"
    rows = [
        (tap["layer"], tap["path"] or "(the model)", tap["side"], tap["block"] or "embeddings", tap["parameters"])
        for tap in facts["taps"]
    ]
    print_table(title, ("layer", "read at", "side", "made by", "parameters"), rows)
    if "fingerprint" in facts:
        print(f"fingerprint {facts['fingerprint']}")


def describe(name: str, *, weights: bool = False) -> ModelFacts:
    """Return the class, size and layers of the model with this folder or hub id.

    With `weights=True` the weights are loaded, and each stack gets a fingerprint (hash); otherwise only the config is
    read. Raises the errors of `load`, such as ModelNotFoundError, and UnsupportedModelError if no layers are found.
    """
    from lamina.editing.block_picture import stack_pictures
    from lamina.editing.record import edits
    from lamina.layers import stacks
    from lamina.store import fingerprint, load, outline

    model = load(name)[0] if weights else outline(name)
    with nullcontext() if weights else error_context("tried without weights; --weights tries again with them"):
        by_name = stacks(model)
    facts = {stack_name: _stack_facts(stack) for stack_name, stack in by_name.items()}
    for stack_name in facts if weights else ():
        facts[stack_name]["fingerprint"] = fingerprint(model, stack_name)
    described = ModelFacts(
        model=name,
        model_type=str(model.config.model_type),
        architecture=type(model).__name__,
        parameters=model.num_parameters(),
        stacks=facts,
    )
    pictures = stack_pictures(edits(model), {stack_name: stack.depth for stack_name, stack in by_name.items()})
    return {**described, "edited": pictures} if pictures else described


def _stack_facts(stack: LayerStack) -> StackFacts:
    outside = _parameters_outside_blocks(stack)
    blocks = [(type(block).__name__, sum(p.numel() for p in block.parameters())) for block in stack.blocks]
    sources: list[tuple[str | None, int | None]] = [(None, outside), *(blocks or [("?", None)] * stack.depth)]
    return StackFacts(
        layers=stack.layers,
        depth=stack.depth,
        width=stack.width,
        block=", ".join(dict.fromkeys(kind for kind, _ in blocks)) or None,
        embedding_parameters=outside,
        taps=[
            Tap(layer=layer, path=point.path, side=point.side, block=kind, parameters=size)
            for layer, (point, (kind, size)) in enumerate(zip(stack.points, sources, strict=True))
        ],
    )


def _parameters_outside_blocks(stack: LayerStack) -> int | None:
    """Return the number of a stack's parameters outside its blocks: embeddings, and norms around the blocks.

    None: unknown, because the blocks are not modules.
    """
    if not stack.blocks:
        return None
    inside = {id(parameter) for block in stack.blocks for parameter in block.parameters()}
    outside = {id(p): p for module in stack.run for p in module.parameters(recurse=False) if id(p) not in inside}
    return sum(parameter.numel() for parameter in outside.values())


_TITLE = "Mean inserted weights on the diagonal and off it; for the change, means of its absolute value"


def _draw_inserted(
    names: list[str],
    path: Path,
    head: int,
    *,
    layer: int | None,
    projection: str | None,
    stack: str | None,
    as_json: bool,
) -> None:
    """Draw one inserted layer of each model to the file `path`, and print the mean weights of all inserted layers.

    `head` is the attention head to draw, from 0. The first inserted layer that fits `layer`, `projection` and `stack`
    (None: any) is drawn. Raises UnknownNameError if no inserted layer fits them, ModelNotFoundError if a model cannot
    be found, and ConfigError if one has no inserted layers or no such head. Other errors are those of `weight_maps`,
    such as ConfigError for the suffix of `path`.
    """
    from lamina.report.inserted_weights import chosen_weight, diagonals, inserted_weights, weight_maps
    from lamina.store import load, saved_class

    by_name = {name: inserted_weights(load(name, saved_class(name))[0]) for name in dict.fromkeys(names)}
    short = [Path(name).name for name in by_name]
    labels = short if len(set(short)) == len(short) else list(by_name)
    by_label = dict(zip(labels, by_name.values(), strict=True))
    chosen = {label: chosen_weight(weights, layer, projection, stack) for label, weights in by_label.items()}
    weight_maps(chosen, path, head=head)
    rows = [{"model": label, **row} for label, weights in by_label.items() for row in diagonals(weights)]
    if as_json:
        print_json(rows)
        return
    print_table(_TITLE, [column.replace("_", " ") for column in rows[0]], [list(row.values()) for row in rows])
    print(f"drawn in {path}")
