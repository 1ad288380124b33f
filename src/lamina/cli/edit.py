"""`lamina edit`: change a model's layers, show what became of it, and save it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lamina.cli.options import JsonOption
from lamina.cli.output import print_json, print_table
from lamina.errors import ConfigError, StoreError, UnknownNameError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from lamina.editing.record import Edit

_TOKENS, _SEED = 9, 3  # of the batch on which outputs are compared
_LAYERS = 'as a layer selector ("all", "top:4", "2-6", or "1,3")'


def edit(  # noqa: PLR0913
    model: Annotated[str, typer.Argument(metavar="MODEL", help='Folder or hub id of a model, or "minilm".')],
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="OUT", help="Folder to save to.")] = None,
    truncate: Annotated[
        int | None, typer.Option("--truncate", metavar="N", help="Keep the bottom N blocks, drop the others.")
    ] = None,
    reinit: Annotated[
        str | None, typer.Option("--reinit", metavar="LAYERS", help=f"Re-initialise these blocks, {_LAYERS}.")
    ] = None,
    scope: Annotated[
        str, typer.Option("--scope", help='What --reinit sets: "linear" maps, or all of the "block".')
    ] = "linear",
    insert: Annotated[
        str | None,
        typer.Option("--insert", metavar="WHERE", help='Insert layers: "attention", "ffn", "both" or "convolution".'),
    ] = None,
    layers: Annotated[
        str, typer.Option("--layers", metavar="LAYERS", help=f"Blocks that --insert goes into, {_LAYERS}.")
    ] = "all",
    init: Annotated[
        str, typer.Option("--init", help="Start of inserted layers: identity, unit, xavier, he or zero.")
    ] = "identity",
    activation: Annotated[
        str, typer.Option("--activation", help="Activation of inserted layers: gelu, relu or none.")
    ] = "gelu",
    placement: Annotated[
        str, typer.Option("--placement", help='What the activation is applied to: "weight" or "output".')
    ] = "weight",
    kernel: Annotated[
        int, typer.Option("--kernel", metavar="N", help="Length of the kernel of layers after convolutions; odd.")
    ] = 3,
    freeze: Annotated[
        str | None, typer.Option("--freeze", metavar="LAYERS", help=f"Freeze these layers, {_LAYERS}; 0: embeddings.")
    ] = None,
    train_inserted: Annotated[
        bool, typer.Option("--train-inserted", help="Freeze all layers but the inserted ones.")
    ] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Fold the inserted layers into their neighbours.")] = False,
    stack: Annotated[
        str | None, typer.Option("--stack", help='"encoder" or "decoder"; by default the only one, or the encoder.')
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of random weights.")] = 0,
    head: Annotated[
        str | None, typer.Option("--head", help="Auto class of transformers; by default the head that was saved.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would become of it, from the config alone.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it is there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Change a model's layers and save the result.

    Edits are made in this order: truncate, reinit, insert, freeze, merge. Layer numbers are those at that moment.
    """
    import torch

    from lamina.editing.freeze import freeze_
    from lamina.editing.insert import INITS, PLACEMENTS, POSITIONS, insert_
    from lamina.editing.inserted import ACTIVATIONS
    from lamina.editing.merge import merge_
    from lamina.editing.reinit import SCOPES, reinit_
    from lamina.editing.truncate import truncate_

    rng = torch.Generator().manual_seed(seed)
    steps: list[Callable[[Any], Edit]] = []
    if truncate is not None:
        steps.append(lambda given: truncate_(given, truncate, stack))
    if reinit is not None:
        part: Any = _one_of("--scope", scope, SCOPES)
        steps.append(lambda given: reinit_(given, _selector(reinit), scope=part, stack=stack, generator=rng))
    if insert is not None:
        where: Any = _one_of("--insert", insert, POSITIONS)
        chosen = _one_of("--activation", activation, (*ACTIVATIONS, "none"))
        options: dict[str, Any] = {"init": _one_of("--init", init, INITS), "stack": stack, "generator": rng}
        options["activation"] = None if chosen == "none" else chosen
        options["placement"] = _one_of("--placement", placement, PLACEMENTS)
        options["kernel"] = kernel
        steps.append(lambda given: insert_(given, where, _selector(layers), **options))
    if freeze is not None:
        steps.append(lambda given: freeze_(given, _selector(freeze), stack))
    if train_inserted:
        steps.append(lambda given: freeze_(given, stack=stack, train="inserted"))
    if merge:
        steps.append(merge_)
    _check(steps, out, dry_run=dry_run, force=force)
    facts = _run(model, head, steps, None if dry_run else out)
    if as_json:
        print_json(facts)
    else:
        _show(facts)


def _one_of(option: str, got: str, known: Iterable[str]) -> str:
    if got not in (names := tuple(known)):
        raise UnknownNameError(op="edit", got=got, known=names, what=option)
    return got


def _selector(text: str) -> int | str | list[int]:
    """A layer selector, as an option gives it."""
    parts = [part.strip() for part in text.split(",")]
    if all(part.removeprefix("-").isdecimal() for part in parts):
        return [int(part) for part in parts]
    return text


def _check(steps: list[Any], out: Path | None, *, dry_run: bool, force: bool) -> None:
    if not steps:
        raise ConfigError(
            "edit: no edit is asked for; there must be one at least. "
            "Add --insert, --reinit, --truncate, --freeze, --train-inserted or --merge."
        )
    if dry_run:
        return
    if out is None:
        raise ConfigError("edit: there is no folder to save to. Add -o OUT, or --dry-run to see what would be done.")
    if out.is_dir() and any(out.iterdir()):
        if not force:
            raise ConfigError(f"edit: {out} is there already and not empty. Give another folder, or add --force.")
        if not (out / "config.json").is_file():
            raise ConfigError(f"edit: {out} holds no model; --force replaces models only. Give another folder.")
    elif out.exists() and not out.is_dir():
        raise ConfigError(f"edit: {out} is a file; a folder is needed. Give another path.")


def _run(name: str, head: str | None, steps: list[Callable[[Any], Edit]], out: Path | None) -> dict[str, Any]:
    from lamina.store import load, outline

    kind = head or _saved_head(name)
    model, processor = (outline(name, kind), None) if out is None else load(name, kind)
    before = _facts(model)
    outputs = {} if out is None else _outputs(model)
    made = [step(model) for step in steps]
    named = {each for one in made if one.kind != "freeze" for each in one.parameters}
    facts: dict[str, Any] = {
        "model": name,
        "architecture": type(model).__name__,
        "edits": [_said(one) for one in made],
        "before": before,
        "after": _facts(model),
        "unchanged_parameters": sum(p.numel() for key, p in model.named_parameters() if key not in named),
        "output_difference": None if out is None else _difference(outputs, _outputs(model)),
        "saved": None if out is None else str(out),
    }
    if out is not None:
        _save(model, processor, out)
    return facts


def _said(edit: Edit) -> dict[str, Any]:
    return {**edit.to_dict(), "parameters": len(edit.parameters)}


def _saved_head(name: str) -> str:
    """The auto class that loads what a config says was saved."""
    import transformers

    from lamina.store import load_config

    config = load_config(name)
    saved = next(iter(getattr(config, "architectures", None) or ()), None)
    if saved is None:
        return "AutoModel"
    for kind in sorted(each for each in dir(transformers) if each.startswith("AutoModel")):
        mapping: Any = getattr(getattr(transformers, kind), "_model_mapping", None)
        classes: Any = () if mapping is None else mapping.get(type(config), ())
        if saved in {each.__name__ for each in (classes if isinstance(classes, tuple | list) else (classes,))}:
            return kind
    raise ConfigError(
        f"edit: the config of {name} says it is a {saved}, which no auto class of transformers loads. "
        "Add --head with the auto class to use."
    )


def _facts(model: PreTrainedModel) -> dict[str, Any]:
    parameters = list(model.parameters())
    return {
        "layers": _layers(model),
        "parameters": sum(each.numel() for each in parameters),
        "trainable": sum(each.numel() for each in parameters if each.requires_grad),
    }


def _layers(model: PreTrainedModel) -> dict[str, int]:
    """How many layers each stack has; a convolutional network has those that its row of convolutions says."""
    from lamina.editing.convolutions import convolution_blocks
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
    """The tensors that a model returns on a small random batch; if its head refuses that, those of its backbone."""
    from lamina.layers.isolation import preserve_model
    from lamina.layers.probe_input import probe_input

    base: PreTrainedModel = getattr(model, "base_model", model)
    with preserve_model(model):
        try:
            output = model(**probe_input(model, _TOKENS, _SEED).inputs, return_dict=True)
        except (RuntimeError, ValueError, TypeError):
            output = base(**probe_input(base, _TOKENS, _SEED).inputs, return_dict=True)
    return {name: value for name, value in output.items() if hasattr(value, "is_floating_point")}


def _difference(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = [
        (before[name].double(), after[name].double())
        for name in before
        if name in after and before[name].shape == after[name].shape
    ]
    return max(float((one - other).abs().max()) for one, other in pairs)


def _save(model: PreTrainedModel, processor: Any, out: Path) -> None:
    from lamina.store.edited import RECORD, save

    if (out / RECORD).is_file() or not out.exists() or not any(out.iterdir()):
        save(model, out, processor)
        return
    try:  # a model that something else saved is replaced as a whole, once the new one is complete
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.resolve().parent) as beside:
            save(model, Path(beside) / "new", processor)
            out.replace(Path(beside) / "old")
            try:
                (Path(beside) / "new").replace(out)
            except OSError:
                (Path(beside) / "old").replace(out)
                raise
            shutil.rmtree(Path(beside) / "old", ignore_errors=True)
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"edit: {out} cannot be replaced ({error.strerror}). Give another folder.") from error


def _show(facts: dict[str, Any]) -> None:
    before, after = facts["before"], facts["after"]
    rows: list[tuple[object, ...]] = [
        (f"layers ({name})" if len(before["layers"]) > 1 else "layers", count, after["layers"][name])
        for name, count in before["layers"].items()
    ]
    rows += [(what, before[what], after[what]) for what in ("parameters", "trainable")]
    print(f"{facts['model']}: {facts['architecture']}")
    print_table("before and after", ("", "before", "after"), rows)
    for one in facts["edits"]:
        seed = "" if one["seed"] is None else f", seed {one['seed']}"
        layers = ", ".join(map(str, one["layers"])) or "no layers"
        print(f"{one['kind']}: {one['stack']} {layers}; {one['parameters']} tensors{seed}")
    print(f"in tensors that no edit changes: {facts['unchanged_parameters']:,} parameters")
    if facts["saved"] is None:
        print("dry run: nothing was saved")
        return
    print(f"largest difference of the outputs on a small batch: {facts['output_difference']:.3g}")
    print(f"saved in {facts['saved']}")
