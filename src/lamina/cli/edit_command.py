"""`lamina edit`: change a model's layers, show the effect, and save the model."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeAlias, TypedDict

from typer import Option

from lamina.cli import shared_options as options
from lamina.cli.shared_options import check_used, print_json, print_table, selector_of
from lamina.errors import ConfigError, UnsupportedModelError, check_known, first_line
from lamina.utils import JSON, is_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor
    from transformers import PreTrainedModel

    from lamina.editing.block_picture import StackPicture
    from lamina.editing.record import Edit
    from lamina.layers.types import Processor
    from lamina.studies.cutting.least_blocks import EditPlan, LeastBlocks

    # changes a model, in place, and returns what measured cuts cost
    Apply: TypeAlias = Callable[[PreTrainedModel, Processor | None], list[LeastBlocks]]

_TOKENS, _SEED = 9, 3  # length and seed of the batch on which outputs are compared
_LAYERS = 'such as "all", "top:4", "2-6" or "1,3"'
_KEEP = f"Keep these blocks and drop the others, {_LAYERS}; a list also gives their order."
_DROP = f"Drop these blocks, {_LAYERS}; auto:N: the N blocks that matter least to --task."
_DUPLICATE = f"Repeat these blocks, {_LAYERS}. The copies change nothing until they are trained."
_REPEAT = "Let each copy of --duplicate compute what its block computes. Default: a copy begins as the identity."
_PLAN = "YAML file of edits in any order, in place of the options that name edits."
_TASK = "Task to measure --drop auto:N on: the name of a preset, or a YAML file with the keys of a task in a recipe."
_BY = "How auto:N chooses blocks: influence (cosine of input and output), loss (of the model's head) or readers."
_HEAL = "Epochs of fine-tuning on --task after --drop auto:N. 0: none."
_REINIT = f"Give these blocks new random weights, {_LAYERS}."
_SCOPE = 'Which weights --reinit replaces: "linear" (linear maps) or "block" (all).'
_INSERT = 'Insert layers: "attention", "ffn", "both", "ffn_input", "both_input" or "convolution".'
_INIT = "Initial weights of inserted layers: identity, unit, xavier, he or zero."
_PLACEMENT = "What the activation of an inserted layer is applied to: its weight, or its output."
_KERNEL = "Kernel size of layers that are inserted after convolutions; odd."
_FREEZE = f"Freeze these layers, {_LAYERS}; 0: the embeddings."
_TRAIN_INSERTED = "Freeze everything but the inserted layers, poolers and heads."
_TRAIN = 'Freeze everything but these parts of the model, such as "inserted,classifier" or "layer.*.output".'
_MERGE = "Multiply inserted layers into the layers they follow, and remove them."
_OVERWRITE = "Replace the model in OUT, if there is one."
_SEEDED = "Seed of random weights, and of healing. Default: 0, or that of --plan."
_PROGRESS = "Show progress bars while --drop auto:N, or drop_least of a plan, chooses and measures blocks."
_STACK = 'Stack of blocks to change: "encoder", "decoder" or a tower ("vision"). Default: the only one, or the encoder.'
_HEAD = 'Head of the model: a kind of task, such as "masked_lm", or a class of transformers. Default: the saved one.'
_NEW_WEIGHTS = "Initialise weights that the saved files lack at random, for example those of a new --head."


class Counts(TypedDict):
    """The size of a model: layers per stack with the embeddings, parameters, and trainable parameters."""

    layers: dict[str, int]
    parameters: int
    trainable: int


class EditFacts(TypedDict):
    """The JSON that `lamina edit` prints with --json.

    Attributes:
        model: Name of the model.
        architecture: Name of its class.
        edits: As `Edit.to_dict` returns them, with the number of tensors in place of their names.
        before: Its size before the edits; `after` is the size after them.
        unchanged_parameters: Number of parameters in tensors that no edit changed; 0 after healing.
        output_difference: Largest absolute difference between the model's outputs before and after, on a small batch.
            None in a dry run, or if the model cannot run on the batch, or no output has the same name and shape.
        saved: The output folder; None in a dry run.
        blocks: The blocks of each edited stack before and after.
        lost: What each --drop auto:N, or `drop_least` of a plan, cost, as `LeastBlocks.to_dict` returns it.
    """

    model: str
    architecture: str
    edits: list[dict[str, JSON]]
    before: Counts
    after: Counts
    unchanged_parameters: int
    output_difference: float | None
    saved: str | None
    blocks: dict[str, StackPicture]
    lost: list[dict[str, JSON]]


def edit(  # noqa: PLR0913
    model: options.ModelArgument,
    out: Annotated[Path | None, Option("-o", "--output", "--out", metavar="OUT", help="Folder to save to.")] = None,
    truncate: Annotated[int | None, Option(metavar="N", help="Keep the bottom N blocks and drop the others.")] = None,
    keep: Annotated[str | None, Option(metavar="LAYERS", help=_KEEP)] = None,
    drop: Annotated[str | None, Option(metavar="LAYERS|auto:N", help=_DROP)] = None,
    duplicate: Annotated[str | None, Option(metavar="LAYERS", help=_DUPLICATE)] = None,
    repeat: Annotated[bool, Option("--repeat", help=_REPEAT)] = False,
    plan: Annotated[Path | None, Option(metavar="PLAN.yaml", help=_PLAN)] = None,
    task: Annotated[str | None, Option(metavar="TASK", help=_TASK)] = None,
    data: options.DataOption = None,
    by: Annotated[str, Option(help=_BY)] = "influence",
    heal: Annotated[int, Option(metavar="EPOCHS", min=0, help=_HEAL)] = 0,
    reinit: Annotated[str | None, Option(metavar="LAYERS", help=_REINIT)] = None,
    scope: Annotated[str, Option(help=_SCOPE)] = "linear",
    insert: Annotated[str | None, Option(metavar="WHERE", help=_INSERT)] = None,
    layers: Annotated[str, Option(metavar="LAYERS", help=f"Blocks to --insert into, {_LAYERS}.")] = "all",
    init: Annotated[str, Option(help=_INIT)] = "identity",
    activation: Annotated[str, Option(help="Activation of inserted layers: gelu, relu or none.")] = "gelu",
    placement: Annotated[str, Option(help=_PLACEMENT)] = "weight",
    kernel: Annotated[int, Option(metavar="N", help=_KERNEL)] = 3,
    freeze: Annotated[str | None, Option(metavar="LAYERS", help=_FREEZE)] = None,
    train_inserted: Annotated[bool, Option("--train-inserted", help=_TRAIN_INSERTED)] = False,
    train: Annotated[list[str] | None, Option(metavar="PART,...", help=_TRAIN)] = None,
    merge: Annotated[bool, Option("--merge", help=_MERGE)] = False,
    stack: Annotated[str | None, Option(help=_STACK)] = None,
    seed: Annotated[int | None, Option(help=_SEEDED, min=0, max=(1 << 63) - 1)] = None,
    head: Annotated[str | None, Option(help=_HEAD)] = None,
    new_weights: Annotated[bool, Option("--new-weights", help=_NEW_WEIGHTS)] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Show the effect without loading weights or saving.")] = False,
    overwrite: Annotated[bool, Option("--overwrite", "--force", help=_OVERWRITE)] = False,
    progress: Annotated[bool, Option(help=_PROGRESS)] = True,
    as_json: options.JsonOption = False,
) -> None:
    """Change a model's layers and save the result.

    Edits are applied in this order: truncate, keep, drop, duplicate, reinit, insert, freeze, merge; --plan applies any
    edits in any order. Each edit counts the layers that are there when it is applied. Plain transformers loads the
    result; inserted layers need Lamina unless they are merged. Wrong input ends with one sentence and exit code 2.
    """
    import torch

    from lamina.editing.insert import INITS, PLACEMENTS, POSITIONS
    from lamina.editing.inserted_layer import ACTIVATIONS
    from lamina.editing.reinit import SCOPES

    check_known("edit", [scope], SCOPES, "--scope")
    check_known("edit", [] if insert is None else [insert], POSITIONS, "--insert")
    check_known("edit", [init], INITS, "--init")
    check_known("edit", [activation], (*ACTIVATIONS, "none"), "--activation")
    check_known("edit", [placement], PLACEMENTS, "--placement")
    insertion = {"--layers": layers != "all", "--init": init != "identity", "--activation": activation != "gelu"}
    insertion |= {"--placement": placement != "weight", "--kernel": kernel != 3}
    check_used("edit", "--insert", insertion, requested=insert is not None)
    if activation == "none" and placement != "weight":
        problem = f"--placement is {placement} and --activation is none"
        raise ConfigError(f"edit: {problem}; a placement needs an activation. Leave one out.")
    check_used("edit", "--reinit", {"--scope": scope != "linear"}, requested=reinit is not None)
    check_used("edit", "--duplicate", {"--repeat": repeat}, requested=duplicate is not None)
    at = {"stack": stack}
    random = {**at, "generator": torch.Generator().manual_seed(seed or 0)}
    new_layers = {"init": init, "placement": placement, "kernel": kernel, **random}
    new_layers["activation"] = None if activation == "none" else activation
    requested: list[tuple[str, bool, str, dict[str, object]]] = [
        ("--truncate", truncate is not None, "truncate", {"keep": truncate, **at}),
        ("--keep", keep is not None, "keep", {"layers": selector_of(keep), **at}),
        ("--drop", drop is not None, "drop", {"layers": selector_of(drop), **at}),
        (
            "--duplicate",
            duplicate is not None,
            "duplicate",
            {"layers": selector_of(duplicate), "identity": not repeat, **at},
        ),
        ("--reinit", reinit is not None, "reinit", {"layers": selector_of(reinit), "scope": scope, **random}),
        ("--insert", insert is not None, "insert", {"position": insert, "layers": selector_of(layers), **new_layers}),
        ("--freeze", freeze is not None, "freeze", {"layers": selector_of(freeze), **at}),
        ("--train-inserted", train_inserted, "freeze", {"train": "inserted", **at}),
        ("--train", train is not None, "freeze", {"train": options.names_of("--train", train)}),
        ("--merge", merge, "merge", {}),
    ]
    named = [option for option, is_requested, *_ in requested if is_requested]
    names = "one of --truncate, --reinit, --insert, --keep, --drop, --duplicate, --freeze and --train-inserted"
    check_used("edit", names, {"--stack": stack is not None}, requested=bool({*named} - {"--train", "--merge"}))
    changes = [(name, arguments) for _, is_requested, name, arguments in requested if is_requested]
    least = LeastOptions(task=task, data=data, by=by, heal=heal, seed=seed, progress=progress)
    steps = _changes(changes, least) if plan is None else [_planned(plan, named, least)]
    with nullcontext() if dry_run else _claimed(out, overwrite=overwrite):
        facts = _run(model, head, steps, None if dry_run else out, new_weights=new_weights)
    print_json(facts) if as_json else _show(facts)


class LeastOptions(NamedTuple):
    """The options of `--drop auto:N`: `task`, `data`, `by`, `heal`, `seed` and `progress`. None: not set.

    A --plan with the edit `drop_least` uses them too, except --by and --heal.
    """

    task: str | None
    data: Path | None
    by: str
    heal: int
    seed: int | None
    progress: bool

    def given(self, *options: str) -> dict[str, bool]:
        """Return each of these options with whether it was set, or has another value than its default."""
        known = {
            "--task": self.task is not None,
            "--data": self.data is not None,
            "--by": self.by != "influence",
            "--heal": self.heal > 0,
            "--seed": self.seed is not None,
        }
        return {option: known[option] for option in options}


def _changes(changes: list[tuple[str, dict[str, object]]], least: LeastOptions) -> list[Apply]:
    """Return functions that apply the requested edits to a model; `changes` has the name and arguments of each.

    `least` are the options of `--drop auto:N`. Raises ConfigError if there is no edit, `--drop auto:N` lacks a task or
    a number, or an option of `least` is set that no edit uses. Raises DataError, ConfigError or UnknownNameError if the
    task of `--drop auto:N` cannot be read or is not valid.
    """
    from lamina.recipes.edits import EDITS, is_random
    from lamina.studies.cutting.least_blocks import DROP_LEAST, parse_plan, task_fields

    if not changes:
        edits = "--keep, --drop, --duplicate, --insert, --reinit, --truncate, --freeze, --train, --merge or --plan"
        raise ConfigError(f"edit: no edit is asked for. Use {edits}.")
    steps: list[Apply] = [partial(_by_function, EDITS[name], arguments) for name, arguments in changes]
    drops = {number: str(arguments["layers"]) for number, (name, arguments) in enumerate(changes) if name == "drop"}
    automatic = {number: blocks for number, blocks in drops.items() if blocks.startswith("auto:")}
    check_used("edit", "--drop auto:N", least.given("--task", "--data", "--by", "--heal"), requested=bool(automatic))
    is_seeded = bool(automatic) or any(is_random(name, arguments) for name, arguments in changes)
    owner = "random weights (--reinit, --init) or --drop auto:N"
    check_used("edit", owner, least.given("--seed"), requested=is_seeded)
    for number, blocks in automatic.items():
        count = blocks.removeprefix("auto:")
        if not count.isdecimal() or least.task is None:
            problem = "has no --task to measure on" if count.isdecimal() else "names no number of blocks"
            raise ConfigError(f"edit: --drop {blocks} {problem}. Use --drop auto:2 --task TASK.")
        choice = {"count": int(count), "by": least.by, "heal_epochs": least.heal, "stack": changes[number][1]["stack"]}
        fields = {"edits": [{DROP_LEAST: choice}], "seed": least.seed or 0, "task": task_fields(least.task)}
        steps[number] = partial(_by_plan, parse_plan(fields, op="edit"), least)
    return steps


def _planned(plan: Path, named: list[str], least: LeastOptions) -> Apply:
    """Return a function that applies the plan in a file to a model.

    `named` are the edit options that were set on the command line; with a plan there must be none. `least` are the
    options of `--drop auto:N`; a task or seed in it replaces the plan's.

    Raises:
        ConfigError: If `named` is not empty; if `least` has a task, data folder or seed for which the plan has no use;
            or if --by or --heal is set.
        LaminaError: If the plan, or the file of a task, cannot be read or is not valid.
    """
    from lamina.studies.cutting.least_blocks import parse_plan, read_plan, task_fields

    if named:
        raise ConfigError(f"edit: {named[0]} was given with --plan; the plan holds all edits. Put it into the plan.")
    check_used("edit", "--drop auto:N", least.given("--by", "--heal"), requested=False)
    edit_plan = read_plan(plan)
    measured, seeded = edit_plan.needs_weights(), edit_plan.uses_seed()
    check_used("edit", "drop_least in the plan", least.given("--task", "--data"), requested=measured)
    check_used("edit", "an edit in the plan that uses it", least.given("--seed"), requested=seeded)
    if least.task is not None:
        fields = {**edit_plan.model_dump(exclude_unset=True, exclude={"task"}), "task": task_fields(least.task)}
        edit_plan = parse_plan(fields, op=f"plan {plan}")
    if least.seed is not None:
        edit_plan = edit_plan.model_copy(update={"seed": least.seed})
    return partial(_by_plan, edit_plan, least)


def _by_function(
    edit: Callable[..., Edit], arguments: Mapping[str, object], model: PreTrainedModel, _processor: Processor | None
) -> list[LeastBlocks]:
    edit(model, **arguments)
    return []


def _by_plan(
    plan: EditPlan, least: LeastOptions, model: PreTrainedModel, processor: Processor | None
) -> list[LeastBlocks]:
    """Apply a plan to a model, in place; return a report per edit `drop_least`: what the model lost by it.

    `least` says where the data of the plan's task lie, and whether to show progress. Raises ConfigError if the plan
    measures the model, but the model has no weights (a dry run); LaminaError if an edit does not fit the model. Earlier
    edits then stay applied.
    """
    if plan.needs_weights() and model.device.type == "meta":
        raise ConfigError("edit: the least important blocks are found by running the model. Leave --dry-run out.")
    return plan(model, processor, least.data, progress=least.progress)


@contextmanager
def _claimed(out: Path | None, *, overwrite: bool) -> Iterator[None]:
    """Hold the lock of the folder `out` inside the `with` block; with `overwrite`, a model in it may be replaced.

    The folder is created if it does not exist, and removed again if it stays empty.

    Raises ConfigError if `out` is None, a file, or a folder that is not empty (with `overwrite`: one that holds files,
    but no model); StoreError if another process holds the lock, or the folder cannot be written.
    """
    from lamina.store.files import LOCK, WORK, claimed, read_json

    if out is None:
        raise ConfigError("edit: there is no folder to save to. Use -o OUT, or --dry-run to see what would be done.")
    if is_file(out):
        raise ConfigError(f"edit: {out} is a file, not a folder.")
    with claimed(out):
        options.check_output("edit", out, overwrite=overwrite)
        if any(path.name not in (LOCK, WORK) for path in out.iterdir()) and not (
            (out / "config.json").is_file() and "model_type" in read_json(out / "config.json", last_wins=True)
        ):
            hint = "--overwrite replaces models only" if overwrite else "give another folder"
            raise ConfigError(f"edit: {out} holds no model; {hint}.")
        yield


def _run(name: str, head: str | None, steps: list[Apply], out: Path | None, *, new_weights: bool) -> EditFacts:
    """Load a model (folder or hub id), apply the steps in order, save the result to `out`, and return what changed.

    `head` is the kind of task, or the class of transformers, of the model's head (None: the saved class). A model in
    `out` is replaced; if `out` is None, nothing is saved, and the edits are tried on a model without weights. With
    `new_weights`, weights that the files lack start at random. Raises LaminaError if the model cannot be loaded or
    saved, an edit does not fit it, or it ran before the edits and fails after them.
    """
    from lamina.editing.block_picture import stack_pictures
    from lamina.editing.record import edits, names_now
    from lamina.store import load, outline, save, saved_class

    head = head or saved_class(name)
    model, processor = (outline(name, head), None) if out is None else load(name, head, new_weights=new_weights)
    before, known = _counts(model), len(edits(model))
    outputs = None if out is None else _outputs(model)
    lost = [report for step in steps for report in step(model, processor)]
    record = edits(model)
    made = record[known:]
    weighed = [number for number in range(known, len(record)) if record[number].kind not in _WEIGHTLESS]
    changed = {now for number in weighed for names in names_now(record, number).values() for now in names}
    after = _counts(model)
    healed = any(report.healed is not None for report in lost)
    unchanged = [p.numel() for key, p in model.named_parameters() if key not in changed]
    difference = None if outputs is None else _difference(outputs, _outputs(model))
    facts = EditFacts(
        model=name,
        architecture=type(model).__name__,
        edits=[{**edit.to_dict(), "parameters": len(edit.parameters)} for edit in made],
        before=before,
        after=after,
        unchanged_parameters=0 if healed else sum(unchanged),
        output_difference=difference,
        saved=None if out is None else str(out),
        blocks=stack_pictures(made, {stack: layers - 1 for stack, layers in after["layers"].items()}),
        lost=[report.to_dict() for report in lost],
    )
    if out is not None:
        save(model, out, processor, force=True)
    return facts


_WEIGHTLESS = ("truncate", "keep", "drop", "freeze")  # edits that change no weight, and add none


def _counts(model: PreTrainedModel) -> Counts:
    """Return how many layers per stack, parameters and trainable parameters a model has.

    Layers include the embeddings. A convolutional network has a single stack. Raises UnsupportedModelError if the
    layers of the model cannot be found.
    """
    from lamina.editing.editable import convolution_blocks
    from lamina.layers import stacks
    from lamina.layers.roles import CONVOLUTIONS, family_of

    try:
        layers = {name: stack.layers for name, stack in stacks(model).items()}
    except UnsupportedModelError:
        if family_of(model) not in CONVOLUTIONS:
            raise
        name, blocks = convolution_blocks(model, "edit")
        layers = {name: len(blocks) + 1}
    trainable = model.num_parameters(only_trainable=True)
    return Counts(layers=layers, parameters=model.num_parameters(), trainable=trainable)


class Outputs(NamedTuple):
    """Outputs of a model on a small random batch, from `_outputs`.

    Attributes:
        tensors: Name -> tensor. {} if neither the model nor its backbone can run.
        with_head: Whether the model itself ran, not only its backbone.
        problem: How the model's first run failed; "" if it did not.
    """

    tensors: dict[str, Tensor]
    with_head: bool
    problem: str


def _outputs(model: PreTrainedModel) -> Outputs:
    """Return a model's outputs on a small random batch, computed in eval mode.

    If the head cannot run on this batch, the model runs without it.
    """
    from lamina.layers.preserve import preserve_model
    from lamina.layers.probe_input import probe_input

    base: PreTrainedModel = getattr(model, "base_model", model)
    problem = ""
    with preserve_model(model):
        for part, full in product(dict.fromkeys((model, base)), (None, True)):  # a model with towers needs a full input
            try:
                output = part(**probe_input(part, _TOKENS, _SEED, full=full).inputs, return_dict=True)
            except Exception as error:  # models raise many types of errors
                problem = problem or f"{type(error).__name__}: {first_line(error)}"
                continue
            tensors = {name: value for name, value in output.items() if hasattr(value, "is_floating_point")}
            return Outputs(tensors, part is model, problem)
    return Outputs({}, with_head=False, problem=problem)


def _difference(before: Outputs, after: Outputs) -> float | None:
    """Return the largest absolute difference of outputs of one name and shape; None if there are none.

    Raises ConfigError if the model ran before the edits, and it, or its backbone, fails after them.
    """
    if (before.with_head and not after.with_head) or (before.tensors and not after.tensors):
        problem = f"the model ran before the edits and fails after them ({after.problem})"
        raise ConfigError(f"edit: {problem}. Nothing was saved. Choose other layers to edit.")
    names = [name for name, tensor in before.tensors.items() if name in after.tensors]
    pairs = [(before.tensors[name], after.tensors[name]) for name in names]
    differences = (float((was.double() - now.double()).abs().max()) for was, now in pairs if was.shape == now.shape)
    return max(differences, default=None)


def _show(facts: EditFacts) -> None:
    """Print what edits did to a model, and where it was saved."""
    from lamina.editing.block_picture import drawn

    before, after = facts["before"], facts["after"]
    rows: list[tuple[object, ...]] = [
        (f"blocks ({name})" if len(before["layers"]) > 1 else "blocks", count - 1, after["layers"][name] - 1)
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
    for name, picture in facts["blocks"].items():
        print(f"{name}:")
        print("\n".join(f"  {line}" for line in drawn(picture)))
    for report in facts["lost"]:
        print(report["sentence"])
    print(f"parameters in tensors that no edit changed: {facts['unchanged_parameters']:,}")
    if facts["saved"] is None:
        print("dry run: nothing was saved")
        return
    if facts["output_difference"] is not None:
        print(f"largest difference of the outputs on a small batch: {facts['output_difference']:.3g}")
    print(f"saved in {facts['saved']}")
