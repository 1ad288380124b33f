"""The files of a saved bank, their keys and their tensors: what banks saved by other versions look like.

To accept a change, run this file: `python -m tests.golden.test_saved_bank`. If banks saved before can then no longer
be read, the format number in lamina/store/manifest.py goes up.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tests.support.stored import tiny_model

from lamina.bank import Reader, ReaderBank
from lamina.fusion import FUSIONS
from lamina.heads import HEADS
from lamina.store import save_bank

GOLDEN = Path(__file__).with_name("saved_bank.json")
NEEDED = {"single_layer": {"layer": 1}}  # settings that have no default


def one_of_each() -> ReaderBank:
    """A reader per fusion and a reader per head that can read an encoder, each with its default settings."""
    bank = ReaderBank(tiny_model())
    plain = HEADS.from_dict({"name": "sequence_classification", "labels": ("a", "b"), "pooling": "mean"})
    for name in FUSIONS.names():
        bank.add(f"fusion-{name}", Reader(FUSIONS.from_dict({"name": name, **NEEDED.get(name, {})}), plain))
    for name in HEADS.names():
        if name == "causal_lm":
            continue
        labels = {} if name == "masked_lm" else {"labels": ("a", "b")}
        head = HEADS.from_dict({"name": name, **labels})
        bank.add(f"head-{name}", Reader(FUSIONS.from_dict({"name": "mean"}), head))
    return bank


def described(folder: Path) -> dict[str, Any]:
    """File -> the keys of a JSON file, or name -> shape in a file of tensors."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): _content(path) for path in files}


def _content(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return {name: list(tensor.shape) for name, tensor in sorted(load_file(path).items())}
    return _keys(json.loads(path.read_text(encoding="utf-8"))) if path.suffix == ".json" else None


def _keys(value: Any) -> Any:
    return {key: _keys(item) for key, item in value.items()} if isinstance(value, dict) else type(value).__name__


def saved(folder: Path) -> dict[str, Any]:
    save_bank(one_of_each(), folder)
    return described(folder)


def test_files_keys_and_tensors(tmp_path: Path):
    assert saved(tmp_path / "bank") == json.loads(GOLDEN.read_text(encoding="utf-8"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        GOLDEN.write_text(json.dumps(saved(Path(place) / "bank"), indent=1) + "\n", encoding="utf-8")
