"""`lamina edit`: change a model's layers, show the effect, and save the model."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

from typer import Option

from lamina.cli.output import print_json, print_table
from lamina.cli.shared_options import JsonOption, ModelArgument
from lamina.errors import ConfigError, UnknownNameError, UnsupportedModelError
from lamina.utils import is_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor
    from transformers import PreTrainedModel

    from lamina.editing.record import Edit
    from lamina.utils import JSON

_TOKENS, _SEED = 9, 3  # length and seed of the batch on which outputs are compared
_LAYERS = 'such as "all", "top:4", "2-6" or "1,3"'
_INSERT = 'Insert layers: "attention", "ffn", "both" or "convolution".'
_INIT = "Initial weights of inserted layers: identity, unit, xavier, he or zero."
_PLACEMENT = "What the activation of an inserted layer is applied to: its weight, or its output."
_FREEZE = f"Freeze these layers, {_LAYERS}; 0: the embeddings."
_TRAIN_INSERTED = "Freeze everything but the inserted layers, poolers and heads."
_TRAIN = 'Freeze everything but these parts of the model, such as "inserted,classifier" or "layer.*.output".'
_STACK = 'Stack of blocks to change: "encoder" or "decoder". Default: the only one, or the encoder.'
_HEAD = 'Head of the model: a kind of task, such as "masked_lm", or a class of transformers. Default: the saved one.'
_NEW_WEIGHTS = "Initialise weights that the saved files lack at random, for example those of a new --head."


class Counts(TypedDict):
    """The size of a model: layers per stack, parameters, and trainable parameters."""

    layers: dict[str, int]
    parameters: int
    trainable: int


class EditFacts(TypedDict):
    """The JSON that `lamina edit` prints with --json.

    `output_difference` is the largest absolute difference between the model's outputs before and after the edits, on a
    small batch; `saved` is the output folder. In a dry run both are None.
    """

    model: str
    architecture: str
    edits: list[dict[str, JSON]]  # as `Edit.to_dict` returns them, with the number of parameters in place of the names
    before: Counts
    after: Counts
    unchanged_parameters: int
    output_difference: float | None
    saved: str | None


def edit(  # noqa: PLR0913
    model: ModelArgument,
    out: Annotated[Path | None, Option("-o", "--out", metavar="OUT", help="Folder to save to.")] = None,
    truncate: Annotated[int | None, Option(metavar="N", help="Keep the bottom N blocks and drop the others.")] = None,
    reinit: Annotated[
        str | None, Option(metavar="LAYERS", help=f"Give these blocks new random weights, {_LAYERS}.")
    ] = None,
    scope: Annotated[
        str, Option(help='Which weights --reinit replaces: "linear" (linear maps) or "block" (all).')
    ] = "linear",
    insert: Annotated[str | None, Option(metavar="WHERE", help=_INSERT)] = None,
    layers: Annotated[str, Option(metavar="LAYERS", help=f"Blocks to --insert into, {_LAYERS}.")] = "all",
    init: Annotated[str, Option(help=_INIT)] = "identity",
    activation: Annotated[str, Option(help="Activation of inserted layers: gelu, relu or none.")] = "gelu",
    placement: Annotated[str, Option(help=_PLACEMENT)] = "weight",
    kernel: Annotated[
        int, Option(metavar="N", help="Kernel size of layers that are inserted after convolutions; odd.")
    ] = 3,
    freeze: Annotated[str | None, Option(metavar="LAYERS", help=_FREEZE)] = None,
    train_inserted: Annotated[bool, Option("--train-inserted", help=_TRAIN_INSERTED)] = False,
    train: Annotated[str | None, Option(metavar="PARTS", help=_TRAIN)] = None,
    merge: Annotated[
        bool, Option("--merge", help="Multiply inserted layers into the layers they follow, and remove them.")
    ] = False,
    stack: Annotated[str | None, Option(help=_STACK)] = None,
    seed: Annotated[int, Option(help="Seed of random weights.", min=0, max=(1 << 63) - 1)] = 0,
    head: Annotated[str | None, Option(help=_HEAD)] = None,
    new_weights: Annotated[bool, Option("--new-weights", help=_NEW_WEIGHTS)] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Show the effect without loading weights or saving.")] = False,
    force: Annotated[bool, Option("--force", help="Replace the model in OUT, if there is one.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Change a model's layers and save the result.

    Edits are applied in this order: truncate, reinit, insert, freeze, merge. Each edit counts the layers that are there
    when it is applied. Plain transformers loads the result; inserted layers need Lamina unless they are merged.
    """
    import torch

    from lamina.editing.insert import INITS, PLACEMENTS, POSITIONS
    from lamina.editing.inserted_layer import ACTIVATIONS
    from lamina.editing.reinit import SCOPES
    from lamina.recipes.edits import EDITS

    for option, name, known in (
        ("--scope", scope, SCOPES),
        ("--insert", insert, (None, *POSITIONS)),
        ("--init", init, INITS),
        ("--activation", activation, (*ACTIVATIONS, "none")),
        ("--placement", placement, PLACEMENTS),
    ):
        if name not in known:
            raise UnknownNameError(op="edit", got=str(name), known=filter(None, known), what=option)
    insertion = {"--layers": layers != "all", "--init": init != "identity", "--activation": activation != "gelu"}
    insertion |= {"--placement": placement != "weight", "--kernel": kernel != 3}
    _check_used("--insert", insertion, requested=insert is not None)
    _check_used("--reinit", {"--scope": scope != "linear"}, requested=reinit is not None)
    has_stack = truncate is not None or train_inserted or any(edit is not None for edit in (reinit, insert, freeze))
    names = "one of --truncate, --reinit, --insert, --freeze and --train-inserted"
    _check_used(names, {"--stack": stack is not None}, requested=has_stack)
    random = {"stack": stack, "generator": torch.Generator().manual_seed(seed)}
    new_layers = {"init": init, "placement": placement, "kernel": kernel, **random}
    new_layers["activation"] = None if activation == "none" else activation
    requested: list[tuple[bool, str, dict[str, object]]] = [
        (truncate is not None, "truncate", {"keep": truncate, "stack": stack}),
        (reinit is not None, "reinit", {"layers": _selector(reinit), "scope": scope, **random}),
        (insert is not None, "insert", {"position": insert, "layers": _selector(layers), **new_layers}),
        (freeze is not None, "freeze", {"layers": _selector(freeze), "stack": stack}),
        (train_inserted, "freeze", {"train": "inserted", "stack": stack}),
        (train is not None, "freeze", {"train": [part.strip() for part in (train or "").split(",")]}),
        (merge, "merge", {}),
    ]
    changes = [partial(EDITS[name], **arguments) for is_requested, name, arguments in requested if is_requested]
    if not changes:
        raise ConfigError(
            "edit: no edit is asked for. Use --insert, --reinit, --truncate, --freeze, --train or --merge."
        )
    with nullcontext() if dry_run else _claimed(out, force=force):
        facts = _run(model, head, changes, None if dry_run else out, new_weights=new_weights)
    print_json(facts) if as_json else _show(facts)


def _check_used(edit: str, changed: Mapping[str, bool], *, requested: bool) -> None:
    """Raise ConfigError if an option was set that belongs to an edit which was not requested.

    `edit` is the option that requests the edit, such as "--insert"; `changed` is option -> whether it was set.
    """
    if not requested and any(changed.values()):
        option = next(name for name, is_changed in changed.items() if is_changed)
        raise ConfigError(f"edit: {option} was given without {edit}, which it belongs to.")


def _selector(text: str | None) -> int | str | list[int]:
    """Return the layer selector for an option's text: [1, 3] for "1,3"; other texts unchanged."""
    parts = [part.strip() for part in (text or "").split(",")]
    return [int(part) for part in parts] if all(part.removeprefix("-").isdecimal() for part in parts) else text or ""


@contextmanager
def _claimed(out: Path | None, *, force: bool) -> Iterator[None]:
    """Lock the folder to save to inside the `with` block; with `force`, a model in it may be replaced.

    Raises:
        ConfigError: If `out` is None, a file, or a folder that is not empty (with `force`: that has other files than a
            model).
    """
    from lamina.store.files import LOCK, WORK, claimed, read_json

    if out is None:
        raise ConfigError("edit: there is no folder to save to. Use -o OUT, or --dry-run to see what would be done.")
    if is_file(out):
        raise ConfigError(f"edit: {out} is a file, not a folder.")
    with claimed(out):
        if any(path.name not in (LOCK, WORK) for path in out.iterdir()):
            if not force:
                hint = "Give another folder, or --force to replace the model in it."
                raise ConfigError(f"edit: {out} is not empty. {hint}")
            if not (out / "config.json").is_file() or "model_type" not in read_json(out / "config.json"):
                raise ConfigError(f"edit: {out} holds no model; --force replaces models only.")
        yield


def _run(
    name: str, head: str | None, changes: list[partial[Edit]], out: Path | None, *, new_weights: bool
) -> EditFacts:
    """Load a model (folder or hub id), apply the edits, save the result to `out`, and return what changed.

    `head` is the kind of task, or the class of transformers, for the model's head (None: the saved class). Without
    `out`, the edits are tried on a model without weights. With `new_weights`, weights that the files lack start at
    random.
    """
    from lamina.store import load, outline, save, saved_class

    head = head or saved_class(name)
    model, processor = (outline(name, head), None) if out is None else load(name, head, new_weights=new_weights)
    before = _counts(model)
    outputs = {} if out is None else _outputs(model)
    edits = [change(model) for change in changes]
    changed = {key for edit in edits if edit.kind != "freeze" for key in edit.parameters}
    facts = EditFacts(
        model=name,
        architecture=type(model).__name__,
        edits=[{**edit.to_dict(), "parameters": len(edit.parameters)} for edit in edits],
        before=before,
        after=_counts(model),
        unchanged_parameters=sum(p.numel() for key, p in model.named_parameters() if key not in changed),
        output_difference=None if out is None else _difference(outputs, _outputs(model)),
        saved=None if out is None else str(out),
    )
    if out is not None:
        save(model, out, processor, force=True)
    return facts


def _counts(model: PreTrainedModel) -> Counts:
    """Return how many layers, parameters and trainable parameters a model has."""
    trainable = model.num_parameters(only_trainable=True)
    return Counts(layers=_layers(model), parameters=model.num_parameters(), trainable=trainable)


def _layers(model: PreTrainedModel) -> dict[str, int]:
    """Return stack -> number of layers, embeddings included; a convolutional network has a single stack.

    Raises:
        UnsupportedModelError: If the layers of the model cannot be found.
    """
    from lamina.editing.editable import convolution_blocks
    from lamina.layers import stacks
    from lamina.layers.roles import CONVOLUTIONS, family_of

    try:
        return {name: stack.layers for name, stack in stacks(model).items()}
    except UnsupportedModelError:
        if family_of(model) not in CONVOLUTIONS:
            raise
        name, blocks = convolution_blocks(model, "edit")
        return {name: len(blocks) + 1}


def _outputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return name -> tensor of a model's outputs on a small random batch, computed in eval mode.

    If the head cannot run on this batch, the outputs are those of the model without its head.
    """
    from lamina.layers.preserve import preserve_model
    from lamina.layers.probe_input import probe_input

    base: PreTrainedModel = getattr(model, "base_model", model)
    with preserve_model(model):
        try:
            output = model(**probe_input(model, _TOKENS, _SEED).inputs, return_dict=True)
        except (RuntimeError, ValueError, TypeError):
            output = base(**probe_input(base, _TOKENS, _SEED).inputs, return_dict=True)
    return {name: value for name, value in output.items() if hasattr(value, "is_floating_point")}


def _difference(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    """Return the largest absolute difference between tensors that have the same name and shape in both mappings."""
    same = [name for name in before if name in after and before[name].shape == after[name].shape]
    return max(float((before[name].double() - after[name].double()).abs().max()) for name in same)


def _show(facts: EditFacts) -> None:
    """Print the model's size before and after, one line per edit, and where the model was saved."""
    before, after = facts["before"], facts["after"]
    rows: list[tuple[object, ...]] = [
        (f"layers ({name})" if len(before["layers"]) > 1 else "layers", count, after["layers"][name])
        for name, count in before["layers"].items()
    ]
    rows += [(name, before[name], after[name]) for name in ("parameters", "trainable")]
    print(f"{facts['model']}: {facts['architecture']}")
    print_table("before and after", ("", "before", "after"), rows)
    for change in facts["edits"]:
        seed = "" if change["seed"] is None else f", seed {change['seed']}"
        numbers = change["layers"]
        layers = ", ".join(map(str, numbers if isinstance(numbers, list) else ())) or "no layers"
        print(f"{change['kind']}: {change['stack']} {layers}; {change['parameters']} tensors{seed}")
    print(f"parameters in tensors that no edit changed: {facts['unchanged_parameters']:,}")
    if facts["saved"] is None:
        print("dry run: nothing was saved")
        return
    print(f"largest difference of the outputs on a small batch: {facts['output_difference']:.3g}")
    print(f"saved in {facts['saved']}")
