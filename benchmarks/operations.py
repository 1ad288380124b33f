"""Operations that a pass starts, alone and with readers: on a GPU, starting them is the cost of a small batch.

    python benchmarks/operations.py [--json]

No time is measured, so the machine does not matter. The columns are the operations of the model alone, and those that
readers add: on a CPU, and on a GPU, for which layers are computed together in larger batches too. No GPU is needed: the
CPU starts what a GPU would start. Views, which start nothing, are not counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from common import bank_of, base, report, tokens
from torch.utils._python_dispatch import TorchDispatchMode

import lamina
from lamina.bank import stack_pass
from lamina.fusion import ada_layers, pooled_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PASSES = (("minilm", 1, 8), ("minilm", 16, 64), ("roberta-large", 4, 128))  # model, batch, tokens
FUSIONS = ("pooled_layers", "ada_layers", "paired_layers")
STARTS_NOTHING = {"_unsafe_view", "alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split"}
STARTS_NOTHING |= {"squeeze", "t", "transpose", "unbind", "unsqueeze", "view"}


class Operations(TorchDispatchMode):
    """Counts the operations that torch starts."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        self.count += func._schema.name.split("::")[1] not in STARTS_NOTHING
        return func(*args, **kwargs or {})


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Have the readers start the operations that they would start on a GPU, inside the `with` block."""
    with (
        patch.object(ada_layers, "is_on_gpu", lambda _: True),
        patch.object(pooled_layers, "is_on_gpu", lambda _: True),
        patch.object(stack_pass, "_is_batched", lambda *_, **__: True),
    ):
        yield


def counted(run: Callable[[], object]) -> int:
    """Return the number of operations that a call of `run` starts."""
    with Operations() as operations:
        run()
    return operations.count


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, batch, length in PASSES:
        model = base(name)
        for fusion in FUSIONS if name == "minilm" else FUSIONS[:2]:
            inputs, processor = tokens(model, batch, length), None
            if fusion == "paired_layers":
                processor = lamina.load(name)[1]
                inputs["input_ids"][:, [length // 2, -1]] = processor.sep_token_id
            for readers in (1, 8):
                bank = bank_of(model, readers, fusion, processor)
                with torch.inference_mode():
                    bank(**inputs, main=True)  # what is computed once for a bank is not counted
                    alone = counted(partial(model, **inputs))
                    on_cpu = counted(partial(bank, **inputs, main=True))
                    with pretended_gpu():
                        on_gpu = counted(partial(bank, **inputs, main=True))
                rows.append(
                    {
                        "base": name,
                        "batch": f"{batch}x{length}",
                        "fusion": fusion,
                        "readers": readers,
                        "alone": alone,
                        "more on a CPU": on_cpu - alone,
                        "more on a GPU": on_gpu - alone,
                    }
                )
    report(rows, as_json=asked.json)


if __name__ == "__main__":
    main()
