"""Read and apply a plan of edits: a YAML file for `lamina edit --plan` with the edits of a model, in order."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, ValidationError, model_validator

from lamina.errors import ConfigError, UnknownNameError
from lamina.recipes.edits import EDITS, apply_edits, check_edit
from lamina.recipes.load_tasks import NOT_DATA, load_task
from lamina.recipes.schema import TaskRecipe
from lamina.recipes.strict_yaml import Fields, Strict, checked, error_at, raise_first, read_yaml
from lamina.studies.cutting.least_blocks import LeastBlocks, drop_least_
from lamina.train.options import Seed
from lamina.utils import derive_seed, is_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.layers.types import Processor
    from lamina.tasks.task import Task

DROP_LEAST = "drop_least"  # an entry of a plan only: it needs a task


class DropLeast(Strict):
    """Arguments of the edit `drop_least`. It drops the blocks that matter least to the plan's task."""

    count: PositiveInt
    by: Literal["influence", "loss", "readers"] = "influence"
    heal_epochs: NonNegativeInt = 0
    stack: str | None = None


def _check(edit: Fields) -> None:
    """Raise ConfigError or ValidationError unless `edit` has one known name and arguments that it allows."""
    if len(edit) != 1:
        raise ConfigError("each edit is one name with its arguments; the next starts with '-'")
    for name, arguments in edit.items():
        with error_at(name):
            if name == DROP_LEAST:
                DropLeast.model_validate(arguments, strict=True)
            elif name in EDITS:
                check_edit(name, arguments or {})
            else:
                raise UnknownNameError(op="plan", got=str(name), known=[*EDITS, DROP_LEAST], what="edit")


_NAMED = BeforeValidator(lambda value: {"preset": value} if isinstance(value, str) else value)


class PlanTask(TaskRecipe):
    """The task that a plan measures on. Keys that only matter in a training recipe are not allowed."""

    @model_validator(mode="after")
    def _only_data(self) -> PlanTask:
        """Check that the task has no key that would have no effect, such as "readers" and "subsample"."""
        if names := sorted(self.model_fields_set & NOT_DATA):
            with error_at(names[0]):
                raise ConfigError(f"'{names[0]}' is for lamina train, and has no effect on a plan. Leave it out")
        return self


class EditPlan(Strict):
    """A plan: a list of edits in order, and the task for the edit `drop_least`."""

    edits: list[Annotated[Fields, checked(_check)]] = Field(min_length=1)
    seed: Seed = 0  # of random weights, and of healing
    task: Annotated[PlanTask | None, _NAMED] = None  # the name of a preset, or the keys of a task in a recipe

    @model_validator(mode="after")
    def _uses_task(self) -> EditPlan:
        """Check that the plan has an edit that uses its task, if it names a task."""
        if self.task is not None and not self.needs_weights():
            with error_at("task"):
                raise ConfigError(
                    f"no edit measures on a task; only {DROP_LEAST} does. Add it to the edits, or remove the task"
                )
        return self

    def __call__(
        self,
        model: PreTrainedModel,
        processor: Processor | None,
        data: Path | None = None,
        *,
        progress: bool = False,
    ) -> list[LeastBlocks]:
        """Apply the edits to a model, in place; return a report of what the model lost for each `drop_least`.

        Args:
            model: The model.
            processor: Its processor, for `drop_least`.
            data: Folder of the task's data.
            progress: Whether to show progress bars while blocks are chosen and measured.

        Raises:
            LaminaError: If an edit cannot be applied. Earlier edits stay applied.
        """
        task: Task | None = None
        reports: list[LeastBlocks] = []
        for number, edit in enumerate(self.edits):
            ((name, arguments),) = edit.items()
            seed = derive_seed(self.seed, "plan", number)
            if name != DROP_LEAST:
                apply_edits(model, [(name, arguments or {})], seed=seed, where=f"plan, edit {number + 1}")
                continue
            if self.task is None:
                raise ConfigError(f"plan: {DROP_LEAST} has no task to measure on. Give the plan a 'task', or --task.")
            task = task or load_task(self.task.preset or "task", self.task, data)
            chosen: dict[str, Any] = DropLeast.model_validate(arguments).model_dump()
            how: dict[str, Any] = {"processor": processor, "seed": self.seed, "progress": progress}
            reports.append(drop_least_(model, task, chosen.pop("count"), **how, **chosen))
        return reports

    def needs_weights(self) -> bool:
        """Whether the model must have its weights, because the plan measures it."""
        return any(DROP_LEAST in edit for edit in self.edits)


def read_plan(path: Path) -> EditPlan:
    """Read the plan in a YAML file.

    Raises:
        DataError: If the file cannot be read or is not valid YAML.
        ConfigError: If a value is not allowed; the message names the line and the key.
        UnknownNameError: If a key or name does not exist; the message names the line and the key.
    """
    file = read_yaml(path)
    return parse_plan(file.fields, op=f"plan {path}", file=file)


def parse_plan(fields: Fields, *, op: str = "plan", file: Any = None) -> EditPlan:  # noqa: ANN401 a `YamlFile`
    """Return a plan from its fields.

    `op` is the operation, for messages. If there is a `file`, messages name its line.
    """
    try:
        return EditPlan.model_validate(fields)
    except ValidationError as error:
        raise_first(error, op=op, file=file)


def task_fields(name: str) -> str | Fields:
    """Return the fields of the task given by --task: the name of a preset, or a YAML file with the keys of a task."""
    return read_yaml(Path(name)).fields if is_file(name) else name
