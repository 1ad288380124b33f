"""Deliberate faults, and the tests that must notice each of them.

`python tests/breaks.py` copies the tree to a temporary folder, puts one fault at a time into the copy, runs the tests
named beside it there, and says whether they fail. Tests that hang are ended, and do not count as a failure. The working
tree is never changed. The command ends with status 1 if a fault is not caught or no longer applies.

    python tests/breaks.py --list             print the names
    python tests/breaks.py --only editing     run those whose name contains "editing"
    python tests/breaks.py --sound            first run the named tests without any fault; they must pass

A fault is found by its text, which must occur once in `src/lamina`, so that files can be renamed; `@a`, `@b` ... in the
text stand for any name. When the code around it changes, change the text here too, so that the fault stays the same
fault.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "src/lamina"
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "out", "node_modules", "*.egg-info")
TIMEOUT_S = 600
STACKS_AFTER_S = 540  # a test that takes as long has its stacks printed, so that a hang says where it is
FAILED = 1  # pytest's exit status when it ran the tests and some failed


class StaleBreakError(Exception):
    """The fault cannot be put in any more: its text or one of its tests is not there, or its text occurs twice."""


@dataclass(frozen=True)
class Break:
    """One fault: `old` is replaced by `new`, and then at least one of `tests` must fail."""

    name: str  # "<room>: <what is wrong>"
    old: str
    new: str
    tests: tuple[str, ...]  # paths below tests/, each with "::name" where a single test is enough


def _break(name: str, old: str, new: str, *tests: str) -> Break:
    return Break(name, old, new, tests)


BREAKS = (
    # layers
    _break(
        "layers: a negative layer is counted from the bottom",
        "return layer % layers",
        "return abs(layer)",
        "unit/layers/test_selectors.py",
    ),
    _break(
        "layers: a range of layers ends one too early",
        "return list(range(first, last + 1))",
        "return list(range(first, last))",
        "unit/layers/test_selectors.py",
    ),
    _break(
        "layers: the fingerprint leaves out half of each weight",
        "            digest.update(content)\n    return digest.hexdigest()",
        "            digest.update(content[: len(content) // 2])\n    return digest.hexdigest()",
        "unit/layers/test_fingerprints.py",
    ),
    _break(
        "layers: hooks of one context also act in others",
        "if hooks in _open.get() and not hooks.closed:",
        "if not hooks.closed:",
        "unit/layers/test_hooks.py",
        "hostile/test_threads.py",
    ),
    # fusion
    _break(
        "fusion: ScalarMix does not normalise its weights",
        "WeightedSum(self.scale * scores.softmax(0))",
        "WeightedSum(self.scale * scores.exp())",
        "unit/fusion/test_scalar_mix.py",
    ),
    _break(
        "fusion: AdaLayers ignores alpha",
        "(scores * _column([member.config.alpha for member in members], scores)).softmax(-1)",
        "scores.softmax(-1)",
        "unit/fusion/test_ada_layers.py",
    ),
    _break(
        "fusion: pooling gives weight to padding",
        "scores.masked_fill(self.excluded, torch.finfo(scores.dtype).min).softmax(-1)",
        "scores.softmax(-1)",
        "unit/fusion/test_pooled_layers.py",
    ),
    _break(
        "fusion: DWAtt's softmax runs over the tokens",
        "F.linear(query, self.keys(self.places)).softmax(-1)",
        "F.linear(query, self.keys(self.places)).softmax(1)",
        "unit/fusion/test_dwatt.py",
    ),
    _break(
        "fusion: dropout does not rescale what it keeps",
        "return @a * keep.mul_(_LEVELS / (_LEVELS - level))",
        "return @a * keep",
        "unit/fusion/test_dropout.py",
    ),
    # heads
    _break(
        "heads: attention looks at padding",
        "attn_mask=None if is_full(mask) else key_mask",
        "attn_mask=None",
        "unit/heads/test_attention.py",
    ),
    _break(
        "heads: pooling by a query looks at padding",
        "torch.stack(scores).masked_fill(~mask, -torch.inf).softmax(-1)",
        "torch.stack(scores).softmax(-1)",
        "contract/test_heads.py",
    ),
    _break(
        "heads: the loss is averaged over tokens without a label too",
        "return total / @a(targets, weight).clamp(min=torch.finfo(flat.dtype).tiny)",
        "return total / len(targets)",
        "unit/heads/test_base.py",
        "unit/heads/test_token_classification.py",
    ),
    _break(
        "heads: a missing label of a multi-label row counts as a no",
        'return ~labels.isnan() if self.config.problem_type == "regression" else labels >= 0',
        'return ~labels.isnan() if self.config.problem_type == "regression" else labels == labels',
        "unit/heads/test_sequence_classification.py",
    ),
    # monitors
    _break(
        "monitors: a score equal to the threshold is not flagged in a calibration",
        "score >= threshold for score in negatives",
        "score > threshold for score in negatives",
        "unit/monitors/test_calibration.py",
    ),
    _break(
        "monitors: the half life of EMA is halved",
        "2 ** (-1 / self.half_life)",
        "2 ** (-2 / self.half_life)",
        "unit/monitors/test_aggregations.py",
    ),
    _break(
        "monitors: padding changes the running score",
        "bool(real.all())",
        "True",
        "unit/monitors/test_aggregations.py",
    ),
    _break(
        "monitors: as many false positives more as one",
        "math.floor(negatives * false_positive_rate + 1e-9)",
        "math.floor(negatives * false_positive_rate + 1e-9) + 1",
        "unit/monitors/test_calibration.py",
    ),
    # bank
    _break(
        "bank: the base is not frozen",
        "model = model.eval() if train_base else model.eval().requires_grad_(False)",
        "model = model.eval()",
        "contract/test_bank.py",
    ),
    _break(
        "bank: a separator before the first text begins the second",
        "(is_between & (text.cumsum(1) > 0)).cumsum(1) > 0",
        "is_between.cumsum(1) > 0",
        "unit/bank/test_segments.py",
    ),
    _break(
        "bank: a watched text does not include its end token",
        "ends.cumsum(1) - ends.long() > 0",
        "ends.cumsum(1) > 0",
        "contract/test_monitors.py",
    ),
    _break(
        "bank: a score equal to the threshold is not flagged while a text is written",
        "values >= self._thresholds.unsqueeze(-1)",
        "values > self._thresholds.unsqueeze(-1)",
        "unit/bank/test_watching.py",
    ),
    _break(
        "bank: the main output is asked for, and the pass stops early",
        "None if main else stop",
        "stop",
        "unit/bank/test_bank.py",
    ),
    # editing
    _break(
        "editing: the block below the named one is re-initialised",
        "edited.blocks[layer - 1].modules()",
        "edited.blocks[layer - 2].modules()",
        "unit/editing/test_reinit.py",
    ),
    _break(
        "editing: the bound of re-initialised weights is not in units of std",
        "a=-bound * std, b=bound * std",
        "a=-bound, b=bound",
        "unit/editing/test_reinit.py",
    ),
    _break(
        "editing: an inserted layer is folded in transposed",
        "return (matrix @ columns.double()).to(columns.dtype)",
        "return (matrix.T @ columns.double()).to(columns.dtype)",
        "unit/editing/test_merge.py",
    ),
    _break(
        "editing: a truncated config keeps the kinds of the wrong blocks",
        "setattr(part, name, [entries[layer - 1] for layer in order])",
        "setattr(part, name, [entries[-layer] for layer in order])",
        "unit/editing/test_keep.py",
    ),
    # store
    _break(
        "store: the fingerprint of the base is not compared",
        "(mark := fingerprint_of(stack)) != expected.fingerprint",
        "(mark := fingerprint_of(stack)) == ''",
        "unit/store/test_bank_folder.py",
    ),
    _break(
        "store: a manifest of another format is read",
        'fields.get("format") != FORMAT',
        'fields.get("format") is None',
        "unit/store/test_bank_folder.py",
        "unit/store/test_files.py",
    ),
    _break(
        "store: old files are moved before the plan that would undo it",
        "write_text(folder / WORK / PLAN, json.dumps([old, new]))\n"
        '            _move(old, folder, folder / WORK / "old")\n',
        '_move(old, folder, folder / WORK / "old")\n'
        "            write_text(folder / WORK / PLAN, json.dumps([old, new]))\n",
        "hostile/test_kills.py",
    ),
    _break(
        "store: files of others are overwritten",
        "if @a and names[0] not in @a and not force:",
        "if not names:",
        "unit/store/test_files.py",
    ),
    # data
    _break(
        "data: a token is read in the window where it stands nearest the edge",
        "min(left, right) > best[key][0]",
        "min(left, right) < best[key][0]",
        "unit/data/test_windows.py",
    ),
    _break(
        "data: the order of batches does not depend on the seed",
        "rng = None if seed is None else random.Random(seed)",
        "rng = None if seed is None else random.Random(0)",
        "unit/data/test_batches.py",
    ),
    _break(
        "data: a byte order mark becomes part of the first column's name",
        'line = line.removeprefix("\\ufeff")',
        "line = str(line)",
        "unit/data/test_read.py",
    ),
    _break(
        "data: checksums of cached states are not compared",
        "_crc32(path / name) != crc",
        "_crc32(path / name) < 0",
        "unit/data/test_disk_cache.py",
        "hostile/test_damaged_cache.py",
    ),
    # tasks
    _break(
        "tasks: a later epoch with an equal score counts as better",
        "return new < old - by if metric in LOWER else new > old + by",
        "return new < old - by if metric in LOWER else new >= old + by",
        "unit/tasks/test_metrics.py",
        "unit/train/test_learner.py",
    ),
    _break(
        "tasks: recall at a rate allows one false positive more",
        "math.floor(len(negatives) * rate + 1e-9)",
        "math.floor(len(negatives) * rate + 1)",
        "unit/tasks/test_ranking.py",
    ),
    _break(
        "tasks: the word behind a span is tagged too",
        "words[last][0] < end:",
        "words[last][0] <= end + 1:",
        "unit/tasks/test_spans.py",
        "unit/tasks/test_span_forms.py",
    ),
    _break(
        "tasks: rows without labels are scored",
        "for pair in zip(*rows, strict=True) if pair[1] != IGNORED]",
        "for pair in zip(*rows, strict=True)]",
        "unit/tasks/test_masked_rows.py",
        "unit/tasks/test_replies.py",
        "unit/tasks/test_spans.py",
    ),
    _break(
        "tasks: subsampling does not use its seed",
        "    rng = random.Random(seed)\n    if not stratified:",
        "    rng = random.Random(0)\n    if not stratified:",
        "unit/tasks/test_sampling.py",
    ),
    # train
    _break(
        "train: early stopping waits one epoch too long",
        "progress.stalled >= options.early_stopping_patience",
        "progress.stalled > options.early_stopping_patience",
        "unit/train/test_learner.py",
    ),
    _break(
        "train: the linear schedule does not reach zero after a warmup",
        "max(0.0, (total - done) / max(1, total - rise))",
        "max(0.0, (total - done) / max(1, total))",
        "unit/train/test_learner.py",
    ),
    _break(
        "train: gradients are not clipped",
        "if limit := self.options.max_grad_norm:",
        "if limit := 0.0:",
        "contract/test_training.py",
    ),
    _break(
        "train: the last weights are kept instead of the best",
        'self.best = self.tensors() if self._options.keep == "best" else {}',
        "self.best = {}",
        "unit/train/test_learner.py",
        "unit/train/test_fit.py",
    ),
    _break(
        "train: the base's frozen parameters stay as training left them",
        "            parameter.requires_grad_(flag)\n            parameter.grad = None",
        "            parameter.grad = None",
        "unit/train/test_base.py",
        "unit/train/test_finetune.py",
        "contract/test_training.py",
    ),
    _break(
        "train: the checksum of a checkpoint is not compared",
        'checksum != state["tensors"]',
        'not state["tensors"]',
        "hostile/test_resume.py",
    ),
    _break(
        "train: a run goes on from a checkpoint of other settings",
        "difference(run, self.run)",
        "None",
        "hostile/test_resume.py",
    ),
    _break(
        "train: a grid pairs its values instead of crossing them",
        "itertools.product(*axes.values())",
        "zip(*axes.values(), strict=False)",
        "unit/train/test_grid.py",
    ),
    _break(
        "train: a reader trains one epoch too many",
        "if epoch < self.epochs[name] and",
        "if epoch <= self.epochs[name] and",
        "unit/train/test_plan.py",
    ),
    # predict, evaluate, bulk, calibrate
    _break(
        "predict: evaluate scores the validation split whatever split is asked for",
        "for group in scoring_groups(@a, @b, split, options)",
        'for group in scoring_groups(@a, @b, "validation", options)',
        "unit/cli/test_evaluate_command.py",
        "contract/test_training.py",
    ),
    _break(
        "predict: a resumed bulk run reads skipped rows again",
        "self.read + read, self.skipped",
        "self.read + len(rows), self.skipped",
        "unit/prediction/test_bulk.py",
    ),
    _break(
        "predict: a bulk run goes on whatever model wrote its first rows",
        'if (before := state["same"].get(name)) != now:',
        'if (before := state["same"].get(name)) is None:',
        "unit/prediction/test_bulk.py",
    ),
    _break(
        "predict: special tokens count in a calibration",
        'mask &= ~torch.isin(batch["input_ids"], special)',
        "mask &= mask",
        "unit/prediction/test_calibrate.py",
    ),
    # cells
    _break(
        "cells: every cell has the same random numbers",
        "seed_torch(derive_seed(cell.file))",
        "seed_torch(0)",
        "unit/studies/test_runner.py",
    ),
    _break(
        "cells: a cell that is done is run again",
        "for number, cell in enumerate(listed) if number not in outcomes}",
        "for number, cell in enumerate(listed)}",
        "unit/studies/test_runner.py",
    ),
    _break(
        "cells: a cell of other settings is taken as done",
        "difference(before, json.loads(json.dumps(self._run(cell), default=str)))",
        "None",
        "unit/studies/test_runner.py",
        "unit/recipes/test_separate_runs.py",
    ),
    # recipes
    _break(
        "recipes: repeats of a subsample share their seed",
        "seed * count + repeat",
        "seed",
        "unit/recipes/test_expand.py",
    ),
    _break(
        "recipes: a table of the test split shows validation scores",
        'key = "score" if part == "validation" else "test"',
        'key = "score"',
        "unit/recipes/test_pivot.py",
    ),
    _break(
        "recipes: an estimate counts gradients of a frozen base",
        'TRAINING if part == "train" and first.recipe.train_base else FORWARD',
        'TRAINING if part == "train" else FORWARD',
        "unit/recipes/test_estimate.py",
    ),
    # studies
    _break(
        "studies: Holm's correction becomes Bonferroni's",
        "(len(values) - rank) * values[number]",
        "len(values) * values[number]",
        "unit/studies/test_statistics.py",
    ),
    _break(
        "studies: one seed is enough for a conclusion",
        "return self.seeds > 1 and self.low * self.high > 0",
        "return self.low * self.high > 0",
        "unit/studies/test_statistics.py",
        "unit/studies/test_conclusions.py",
    ),
    _break(
        "studies: CKA's kernel is centred with the biased estimate",
        "kernel.sum(1) / (rows - 2)",
        "kernel.sum(1) / rows",
        "unit/studies/test_measures.py",
    ),
    _break(
        "studies: the lens scores the token that the model has just read",
        "ids[rows, positions + 1]",
        "ids[rows, positions]",
        "unit/studies/test_lens.py",
    ),
    # report
    _break(
        "report: a table can close the script that holds the page's data",
        'text.replace("<", "\\\\u003c")',
        "text",
        "unit/report/test_html_page.py",
    ),
    _break(
        "report: the diagonal and the rest of an inserted weight are swapped",
        "torch.eye(value.shape[-1], dtype=torch.bool) == is_diagonal",
        "torch.eye(value.shape[-1], dtype=torch.bool) != is_diagonal",
        "unit/report/test_inserted_weights.py",
    ),
    _break(
        "report: a method without an x value is drawn at one point",
        "[min(numbers), max(numbers)] if numbers",
        "[min(numbers)] if numbers",
        "unit/report/test_curves.py",
    ),
    # estimators
    _break(
        "estimators: the decision function has the wrong sign",
        "logits[:, 1] - logits[:, 0] if",
        "logits[:, 0] - logits[:, 1] if",
        "unit/estimators/test_classifier.py",
    ),
    _break(
        "estimators: targets of a regression are not scaled",
        "((numbers - mean) / scale).tolist()",
        "(numbers - mean).tolist()",
        "unit/estimators/test_regressor.py",
        "unit/estimators/test_target_values.py",
    ),
    _break(
        "estimators: a classifier accepts a single class",
        "if len(classes) < 2:",
        "if len(classes) < 1:",
        "unit/estimators/test_target_values.py",
        "unit/estimators/test_classifier.py",
    ),
    # serve
    _break(
        "serve: any key is accepted",
        'if hmac.compare_digest(sent, key.encode()) and scheme.lower() == b"bearer":',
        'if scheme.lower() == b"bearer":',
        "unit/serve/test_middleware.py",
    ),
    _break(
        "serve: a body of any size is read",
        "if size > self._settings.payload_limit:",
        "if size < 0:",
        "unit/serve/test_application.py",
    ),
    _break(
        "serve: readers are loaded from outside the folder that is allowed",
        "not place.is_relative_to(root) or",
        "",
        "unit/serve/test_reload.py",
    ),
    _break(
        "serve: one request too many may wait",
        "if self.unanswered >= limit:",
        "if self.unanswered > limit:",
        "unit/serve/test_scheduler.py",
    ),
    # cli
    _break(
        "cli: bad input ends with the status of a fault of ours",
        "sys.exit(2 if isinstance(known, LaminaError) else 1)",
        "sys.exit(1)",
        "unit/cli/test_command_line.py",
    ),
    _break(
        "cli: NaN is printed into JSON",
        'inf_nan_mode="null"',
        'inf_nan_mode="constants"',
        "unit/cli/test_output.py",
    ),
    _break(
        "cli: texts are dropped in silence when a file is given too",
        "if texts and file is not None:",
        "if texts and file == texts:",
        "unit/cli/test_predict_command.py",
    ),
    # demo
    _break(
        "demo: names of the test split stand in the training split",
        "excluded=held_out_names()",
        "excluded=frozenset()",
        "unit/demo/test_corpus.py",
    ),
    _break(
        "demo: rows of validation and test are counted once",
        "rows - 2 * held_out",
        "rows - held_out",
        "unit/demo/test_corpus.py",
    ),
    _break(
        "demo: a doubled comparative uses the wrong word",
        'Token("more"), *tokens[i:]',
        'Token("most"), *tokens[i:]',
        "unit/demo/test_corpus.py",
    ),
    # registry, utils, errors
    _break(
        "utils: two threads write one temporary file",
        "{os.getpid()}{get_ident()}",
        "{os.getpid()}",
        "unit/test_utils.py",
    ),
    _break(
        "utils: the open end of a range is accepted",
        "low <= value < high if open_high else low <= value <= high",
        "low <= value <= high",
        "unit/fusion/test_ada_layers.py",
    ),
    _break(
        "utils: torch is seeded with half of the seed",
        "torch.default_generator.manual_seed(seed)",
        "torch.default_generator.manual_seed(seed >> 1)",
        "unit/test_utils.py",
    ),
    _break(
        "errors: an error loses its fields when it is pickled",
        '{**self.__dict__, "args": self.args}',
        '{"args": self.args}',
        "unit/test_errors.py",
    ),
    _break(
        "registry: a name that is taken is replaced",
        "if name in self._rows:\n            raise ConfigError",
        "if not name:\n            raise ConfigError",
        "unit/test_registry.py",
    ),
)


def pattern_of(text: str) -> re.Pattern[str]:
    """Return a pattern of `text`, in which `@` and a letter stand for one name, the same wherever they recur."""
    parts, seen = re.split(r"@([a-z])\b", text), set[str]()
    for at, part in enumerate(parts):
        if at % 2 == 0:
            parts[at] = re.escape(part)
        else:
            parts[at] = f"(?P={part})" if part in seen else rf"(?P<{part}>\b[A-Za-z_]\w*)"
            seen.add(part)
    return re.compile("".join(parts))


def place_of(fault: Break, tree: Path) -> tuple[Path, re.Match[str]]:
    """Return the one source file of `tree` that has the text of `fault`, and where the text stands in the file.

    Raises:
        StaleBreakError: If no file has the text, or it occurs more than once.
    """
    pattern = pattern_of(fault.old)
    sources = {path: path.read_text(encoding="utf-8") for path in (tree / PACKAGE).rglob("*.py")}
    places = [(path, match) for path, text in sources.items() for match in pattern.finditer(text)]
    if len(places) != 1:
        many = f"occurs {len(places)} times" if places else "occurs nowhere"
        raise StaleBreakError(f"its text {many} in {PACKAGE}: {fault.old!r}")
    return places[0]


def tests_of(fault: Break, tree: Path) -> list[str]:
    """Return what pytest is given for `fault`, as paths below `tree`; a test file that was moved is found by its name.

    Raises:
        StaleBreakError: If a test file is neither at its path nor the only one of its name elsewhere.
    """
    named: list[str] = []
    for test in fault.tests:
        path, mark, case = test.partition("::")
        places = [tree / "tests" / path]
        if not places[0].is_file():
            places = list((tree / "tests").rglob(Path(path).name))
        if len(places) != 1:
            raise StaleBreakError(f"its test tests/{path} is gone, and {len(places)} others have that name")
        named.append(f"{places[0].relative_to(tree)}{mark}{case}")
    return named


def run_tests(tests: list[str], tree: Path) -> tuple[int | None, str]:
    """Run `tests` in `tree`, against the package of `tree`, up to the first failure.

    The tests read no terminal and write to a file: a process that they leave behind could hold a pipe open for ever.
    After TIMEOUT_S the tests end, with every process that they started.

    Args:
        tests: Paths below `tree`, as pytest takes them.
        tree: Copy of the project.

    Returns:
        pytest's exit status, None if the tests did not end in time; and what was printed.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree / "src"),
        "PYTHONDONTWRITEBYTECODE": "",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    options = ("-q", "-x", "-p", "no:cacheprovider", "-o", f"faulthandler_timeout={STACKS_AFTER_S}")
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return status, output.read()


def try_break(fault: Break, tree: Path) -> str:
    """Put `fault` into `tree`, run its tests, take it out again; return "" if it was caught, else what went wrong.

    Only a test that fails counts: tests that hang do not tell a developer what is wrong.
    """
    (path, match), tests = place_of(fault, tree), tests_of(fault, tree)
    text = match.string
    new = re.sub(r"@([a-z])\b", lambda mark: match[mark[1]], fault.new)
    path.write_text(text[: match.start()] + new + text[match.end() :], encoding="utf-8")
    try:
        status, printed = run_tests(tests, tree)
    finally:
        path.write_text(text, encoding="utf-8")
    if status == FAILED:
        return ""
    if status is None:
        return f"its tests hang: no end within {TIMEOUT_S} s: {printed[-2000:]}"
    return "its tests pass" if status == 0 else f"its tests did not run: {printed[-500:]}"


def failing_without(faults: list[Break], tree: Path) -> list[str]:
    """Return the named tests that fail in `tree` as it is: what they catch says nothing."""
    files = dict.fromkeys(test for fault in faults for test in tests_of(fault, tree))
    return [test for test in files if run_tests([test], tree)[0] != 0]


def parsed() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="NAME", help="run the faults whose name contains this")
    parser.add_argument("--list", action="store_true", help="print the names and their tests, and run nothing")
    parser.add_argument("--sound", action="store_true", help="first run the named tests without a fault")
    return parser.parse_args()


def main() -> int:
    """Try the faults that were asked for, print a line for each, and return the exit status."""
    options = parsed()
    faults = [fault for fault in BREAKS if options.only in fault.name]
    if options.list or not faults:
        print("\n".join(f"{fault.name}  [{', '.join(fault.tests)}]" for fault in faults) or "no fault has this name")
        return int(not faults)
    missed = 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the tests that run end too
    with tempfile.TemporaryDirectory(prefix="lamina-breaks-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
        if options.sound and (failing := failing_without(faults, tree)):
            print(f"these tests fail without any fault: {', '.join(failing)}")
            return 1
        for fault in faults:
            start = time.monotonic()
            try:
                problem = try_break(fault, tree)
            except StaleBreakError as error:
                problem = f"no longer applies; {error}"
            missed += bool(problem)
            said = f"NOT CAUGHT ({problem})" if problem else "caught"
            print(f"{said:<10} {fault.name}  {time.monotonic() - start:.0f} s", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} faults caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
