"""Build every model type of transformers with a small config, read it, and compare with its own hidden states.

    python tests/families.py                            all model types that have no result yet
    python tests/families.py --part 1/4                 the first quarter of them
    python tests/families.py --only gemma               those whose name contains "gemma"
    python tests/families.py --exactly bert,sam         these (--verbose: where they fail)
    python tests/families.py --again refused,not_built  also those with this result
    python tests/families.py --table                    write docs/results/families.md

Each model type runs in a process of its own with a limit on time and memory, so a crash counts as "not built". Results
are kept in out/families, a file for each model type, and the table is made from them. A model type without a result
keeps its row of the page, if that is about the same version of transformers.

A model type is *right* if every state that `lamina.tap` gives is the model's own hidden state, bit for bit; *wrong* if
one is not, or if reading it ends in an error that is not Lamina's; *refused* if Lamina says that it cannot read the
model; *not built* if no small config of it makes a model. The command ends with status 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
import transformers  # noqa: E402
from tests.support.small_configs import VARIANTS, small_config  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_MAPPING, MODEL_MAPPING_NAMES  # noqa: E402

import lamina  # noqa: E402
from lamina.errors import LaminaError  # noqa: E402
from lamina.layers.probe_input import probe_input  # noqa: E402
from lamina.utils import write_text  # noqa: E402

RESULTS, PAGE = ROOT / "out" / "families", ROOT / "docs" / "results" / "families.md"
LIMIT_S, LIMIT_GB = 40, 8  # seconds of the processor, and address space
STATES = {"main": "hidden_states", "encoder": "encoder_hidden_states", "decoder": "decoder_hidden_states"}
STATUSES = {"right": "right", "wrong": "wrong", "refused": "refused", "not_built": "not built"}
Result = dict[str, Any]


def main() -> int:
    """Run the command; return its exit status."""
    args = _arguments()
    RESULTS.mkdir(parents=True, exist_ok=True)
    if not args.table:
        _sweep(args)
    results = _results()
    print(", ".join(f"{count} {status}" for status, count in Counter(r["status"] for r in results).items()))
    if args.table:
        rows = {**_present_rows(), **{str(result["type"]): _row(result) for result in results}}
        if missing := sorted({*MODEL_MAPPING_NAMES} - {*rows}):
            print(f"{len(missing)} model types have no result, such as {missing[0]}; run the command without --table")
            return 2
        write_text(PAGE, _page(rows))
    return int(any(result["status"] == "wrong" for result in results))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="1/1", help="1/4: the first of four parts")
    parser.add_argument("--only", default="", help="names, or parts of names, divided by commas")
    parser.add_argument("--exactly", default="", help="names, divided by commas")
    parser.add_argument("--again", default="", help="results to make again, divided by commas")
    parser.add_argument("--verbose", action="store_true", help="print where a model fails")
    parser.add_argument("--table", action="store_true", help="write the page from the results, and run nothing")
    return parser.parse_args()


def _sweep(args: argparse.Namespace) -> None:
    """Try the chosen model types, one after the other."""
    number, of = map(int, args.part.split("/"))
    names = sorted(MODEL_MAPPING_NAMES)
    if args.exactly:
        names = args.exactly.split(",")
    elif args.only:
        names = [name for name in names if any(part in name for part in args.only.split(","))]
    else:
        known = {result["type"]: result["status"] for result in _results()}
        again = args.again.split(",")
        names = [name for name in names if name not in known or known[name] in again]
        names.sort(key=lambda name: name in known)  # the new ones first
    for name in ("bert", "llama", "vit", "whisper", "qwen2_vl"):  # what most modules of models import is loaded once
        MODEL_MAPPING[CONFIG_MAPPING[name]]
    for name in names[number - 1 :: of]:
        started = time.monotonic()
        result = _in_child(name, args.verbose) | {"seconds": round(time.monotonic() - started, 1)}
        write_text(RESULTS / f"{name}.json", json.dumps(result, indent=1) + "\n")
        print(f"{result['status']:9} {name}: {result.get('reason', '')}"[:400], flush=True)


def _results() -> list[Result]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]


def _in_child(name: str, verbose: bool) -> Result:
    """Return the result of one model type, which a child process makes."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with os.fdopen(writing, "w", encoding="utf-8") as pipe:
            signal.alarm(8 * LIMIT_S)  # ends the process, as the limit on its time does
            resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
            resource.setrlimit(resource.RLIMIT_AS, (LIMIT_GB * 2**30,) * 2)
            if not verbose:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            json.dump(_try(name, verbose), pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if text:
        return json.loads(text)
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    too_long = ended_by in (signal.SIGALRM, signal.SIGXCPU, signal.SIGKILL)
    reason = (
        f"it takes more than {LIMIT_S} s"
        if too_long
        else f"its process ended with status {os.waitstatus_to_exitcode(status)}"
    )
    return {"type": name, "status": "not_built", "reason": reason}


def _try(name: str, verbose: bool) -> Result:
    """Build a model type, read it and compare; the best result of all variants of its config."""
    results: list[Result] = []
    for variant in VARIANTS:
        if results and time.process_time() > LIMIT_S / 4:  # the larger ones would not end
            break
        result = {"type": name, "variant": variant} | _try_variant(name, variant, verbose)
        if result["status"] in ("right", "wrong"):
            return result
        results.append(result)
        if "does not run on a small input" not in result["reason"] and result["status"] == "refused":
            return result
    return min(results, key=lambda result: list(STATUSES).index(result["status"]))


def _try_variant(name: str, variant: str, verbose: bool) -> Result:
    torch.manual_seed(0)
    try:
        config = small_config(CONFIG_MAPPING[name], variant)
        cls = MODEL_MAPPING[type(config)]
        cls = cls[0] if isinstance(cls, tuple) else cls
        model = cls(config).eval()
    except Exception as error:
        if verbose:
            traceback.print_exc()
        return {"status": "not_built", "reason": _said(error)}
    try:
        return {"class": cls.__name__} | _compare(model)
    except LaminaError as error:
        if verbose:
            traceback.print_exc()
        return {"class": cls.__name__, "status": "refused", "reason": _said(error)}
    except Exception as error:  # the model was built, so this is a fault
        if verbose:
            traceback.print_exc()
        return {"class": cls.__name__, "status": "wrong", "reason": _said(error)}


def _said(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"[:300]


@torch.no_grad()
def _compare(model: Any) -> Result:
    """Return whether all tapped states of a model are its own hidden states, on an input that Lamina has not seen."""
    by_name = lamina.stacks(model)
    wrong, unlike = list[str](), set[str]()
    for name, stack in by_name.items():
        target = stack.tower or model
        inputs = probe_input(target, 9, seed=3).inputs
        torch.manual_seed(0)
        expected = getattr(target(**inputs, output_hidden_states=True, return_dict=True), _attribute(name, stack))
        with lamina.tap(model, stack=name) as states:
            torch.manual_seed(0)
            target(**inputs)
        if list(states) != list(range(len(expected))):
            wrong.append(f"{name}: layers {list(states)} of {len(expected)}")
        shared = {layer: state for layer, state in states.items() if layer < len(expected)}
        forms = {layer: _equal_form(state, expected[layer]) for layer, state in shared.items()}
        wrong += [f"{name}: layer {layer}" for layer, form in forms.items() if form is None]
        unlike |= {form for form in forms.values() if form}
    layers = {name: stack.layers for name, stack in by_name.items()}
    if wrong:
        return {"status": "wrong", "reason": "; ".join(wrong), "stacks": layers}
    return {"status": "right", "stacks": layers} | ({"forms": sorted(unlike)} if unlike else {})


def _equal_form(state: Any, expected: Any) -> str | None:
    """Return how the model's own hidden state has to be read to be the tapped state bit for bit; "" if it is that.

    None if they differ.
    """
    expected = expected[0] if isinstance(expected, tuple) else expected
    views = {"": expected}
    if expected.ndim == 4:
        views |= {"mean of streams": expected.mean(0), "mean of the streams": expected.mean(2)}
        views |= {"patches": expected.flatten(1, 2), "patches, width first": expected.flatten(2).transpose(1, 2)}
    if expected.ndim == 2:
        views |= {"packed": expected[None]}
    if expected.ndim == 3:
        views |= {"without padding": expected[:, : state.shape[1]]}
        if _is_repeated(state, expected):
            return "repeated"
    return next((form for form, view in views.items() if torch.equal(view, state)), None)


def _is_repeated(state: Any, expected: Any) -> bool:
    """Return whether a state has each of the model's own states for several positions in a row.

    In CANINE, one state for the whole text comes before these.
    """
    length, count = state.shape[1], expected.shape[1]
    if count >= length:
        return False
    number = torch.arange(length)
    rates = [each for each in range(2, length + 1) if length // each == count]
    chosen = [number * count // length, *((1 + number // each).clamp(max=count - 1) for each in rates)]
    return any(torch.equal(state, expected[:, positions]) for positions in chosen)


def _attribute(name: str, stack: Any) -> str:
    return "hidden_states" if stack.tower is not None else STATES[name]


def _present_rows() -> dict[str, str]:
    """Return model type -> its row of the page; {} if the page is about another version of transformers."""
    lines = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    if not any(f"transformers {transformers.__version__} " in line for line in lines):
        return {}
    return {line.split("`")[1]: line for line in lines if line.startswith("| `")}


def _row(result: Result) -> str:
    """Return the row of a model type."""
    return f"| `{result['type']}` | {STATUSES[result['status']]} | {_detail(result)} |"


def _page(rows: dict[str, str]) -> str:
    """Return the page of the table; `rows` are the rows by model type."""
    counts = Counter(row.split(" | ")[1] for row in rows.values())
    parts = [f"{counts[status]} are {status}" for status in STATUSES.values()]
    said = f"There are {len(rows)} model types: {', '.join(parts[:-1])} and {parts[-1]}."
    intro = INTRO.format(version=transformers.__version__, counts=said)
    table = ["| model type | result | stacks or reason |", "|---|---|---|", *(rows[name] for name in sorted(rows))]
    return "\n".join([intro, *table]) + "\n"


INTRO = """# Every model family

```sh
python tests/families.py          # all model types; takes about an hour
python tests/families.py --table  # writes this page; model types that were not run again keep their rows
```

For each model type that has an `AutoModel` in transformers {version}, the script makes a small model with random
weights from the type's own config class. It reads the model with `lamina.tap`, and compares every state with the
model's own `hidden_states`, bit for bit. {counts}

- **right**: every state is the model's own. The stacks and their numbers of layers follow. Some models keep their
  states in another form; the table then says how they are read. They are read as the mean of several residual streams,
  as a sequence of the patches of an image, without the padding that the model adds inside, or repeated for the
  positions that share one.
- **refused**: Lamina says that it cannot read the model, and why.
- **not built**: no small config of the model type makes a model here, because a package is missing or because the
  script finds no settings that fit.

This page is written by the script; do not edit it.
"""


def _detail(result: Result) -> str:
    """Return the last cell of a row: the layers of the stacks, or the reason."""
    if "stacks" in result and "reason" not in result:
        stacks = ", ".join(f"{name} {layers}" for name, layers in result["stacks"].items())
        return "; ".join((stacks, *result.get("forms", ())))
    reason = re.sub(r"^UnsupportedModelError: .*? is not supported; ", "", result["reason"])
    reason = re.sub(r"(?<=[.)]) (Use|Give|Check|Load) .*", "", reason)
    reason = re.sub(r" You can install it with pip.*", "", reason)
    reason = re.sub(r"'/[^']*'?", "its folder", reason)  # where packages are installed here
    return re.sub(r"\s+", " ", reason).replace("|", "\\|")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    sys.exit(main())
