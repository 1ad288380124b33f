"""Nothing that comes with a model is run, and nothing that its files name is fetched to be run."""

from __future__ import annotations

import importlib.util
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.integrations.hub_kernels as hub_kernels
import transformers.modeling_utils as modeling
from tests.support.stored import save_base, tiny_model

import lamina
from lamina.errors import LaminaError, StoreError, UnsupportedModelError
from lamina.store import empty_model, load_config, outline

CODE = "from pathlib import Path\nPath(__file__).with_name('RAN').touch()\n"


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model beside files of Python; whatever would fetch code notes that it was asked."""
    folder = save_base(tmp_path / "base")
    for name in ("evil.py", "custom_generate/generate.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(CODE)

    def fetch(*_: Any, **__: Any) -> None:
        (tmp_path / "FETCHED").touch()

    monkeypatch.setattr(hub_kernels, "load_and_register_attn_kernel", fetch)
    monkeypatch.setattr(modeling, "lazy_import_flash_attention", fetch)
    return folder


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **fields}))


def nothing_ran(folder: Path) -> bool:
    return not list(folder.rglob("RAN")) and not (folder.parent / "FETCHED").exists()


def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the package were installed."""
    find, here = importlib.util.find_spec, importlib.util.find_spec("json")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: here if name == "kernels" else find(name, *rest)
    )


ASKED: dict[str, dict[str, Any]] = {
    "a repository": {"attn_implementation": "evil/attention"},
    "one of a version": {"attn_implementation": "kernels-community/flash-attn2@v1:forward"},
    "the attribute": {"_attn_implementation": "kernels-community/flash-attn2"},
    "the attribute inside": {"_attn_implementation_internal": "paged|evil/attention"},
    "by part": {"attn_implementation": {"": "evil/attention"}},
    "experts": {"experts_implementation": "evil/experts"},
}


@pytest.mark.parametrize("asked", ASKED)
def test_a_repository_of_kernels_is_refused(asked: str, base: Path):
    change(base / "config.json", **ASKED[asked])
    opens: list[Callable[[], Any]] = [
        lambda: lamina.load(base),
        lambda: lamina.load(base, head="BertForMaskedLM"),
        lambda: outline(base),
        lambda: empty_model(load_config(base)),
    ]
    if asked == "the attribute inside":  # transformers itself does not read this
        opens = []
        assert lamina.load(base)[0].config._attn_implementation == "sdpa"
    for call in opens:
        with pytest.raises(
            UnsupportedModelError, match=r"asks for \w+_implementation '.*/.*', which transformers fetches"
        ):
            call()
    assert nothing_ran(base)


def test_one_of_a_part_is_refused(tmp_path: Path):
    text, vision = ({"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2} for _ in range(2))
    change(tmp_path / "config.json", model_type="clip", text_config=text, vision_config=vision)
    change(tmp_path / "config.json", attn_implementation={"text_config": "evil/attention"})
    with pytest.raises(UnsupportedModelError, match="asks for attn_implementation 'evil/attention'"):
        load_config(tmp_path)


@pytest.mark.parametrize("way", ["flash_attention_2", "flash_attention_3", "sonicmoe"])
def test_what_would_come_from_the_hub_where_kernels_is_installed(way: str, base: Path, monkeypatch: pytest.MonkeyPatch):
    what = "experts_implementation" if way == "sonicmoe" else "attn_implementation"
    change(base / "config.json", **{what: way})
    with_kernels(monkeypatch)
    with pytest.raises(UnsupportedModelError, match=f"asks for {what} '{way}', which transformers fetches"):
        lamina.load(base)
    assert nothing_ran(base)


@pytest.mark.parametrize("way", ["eager", "sdpa"])
def test_what_torch_has_is_used(way: str, base: Path, monkeypatch: pytest.MonkeyPatch):
    change(base / "config.json", attn_implementation=way)
    with_kernels(monkeypatch)
    assert lamina.load(base)[0].config._attn_implementation == way
    assert nothing_ran(base)


CLASSES = {
    "AutoConfig": "evil.Config",
    "AutoModel": "evil.Model",
    "AutoTokenizer": ["evil.A", "evil.B"],
    "AutoProcessor": "evil.P",
}
FOREIGN: dict[str, dict[str, dict[str, Any]]] = {
    "classes": {"config.json": {"auto_map": CLASSES, "trust_remote_code": True}},
    "classes elsewhere": {"config.json": {"auto_map": {name: f"evil/repo--{name}" for name in CLASSES}}},
    "an unknown family": {"config.json": {"auto_map": CLASSES, "model_type": "evil", "trust_remote_code": True}},
    "a tokenizer": {"tokenizer_config.json": {"auto_map": CLASSES, "tokenizer_class": "Evil"}},
    "a processor": {"processor_config.json": {"auto_map": CLASSES, "processor_class": "Evil"}},
    "generation": {"generation_config.json": {"custom_generate": "evil/repo", "trust_remote_code": True}},
    "kernels": {"config.json": {"use_kernels": True, "kernel_config": {"RMSNorm": "evil/repo:Norm"}}},
    "a quantisation": {"config.json": {"quantization_config": {"quant_method": "evil", "modules": ["evil"]}}},
    "a package": {"config.json": {"quantization_config": {"quant_method": "gptq", "bits": 4}}},
}  # fmt: skip


@pytest.mark.parametrize("case", FOREIGN)
def test_code_beside_a_model_is_not_run(case: str, base: Path):
    for file, fields in FOREIGN[case].items():
        change(base / file, **fields)
    refused = None
    try:
        model, _ = lamina.load(base)
        assert type(model).__module__.startswith("transformers.models.bert")
    except LaminaError as error:
        refused = error
    assert (refused is not None) is (case in ("an unknown family", "a package"))
    assert nothing_ran(base)


class Evil:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return (Path.touch, (self.place / "RAN",))


@pytest.mark.parametrize("dump", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))])
def test_pickled_code_among_weights_is_not_run(dump: Callable[[Any, Path], Any], base: Path):
    (base / "model.safetensors").unlink()
    dump({**tiny_model().state_dict(), "evil": Evil(base)}, base / "pytorch_model.bin")
    with pytest.raises(
        StoreError, match=r"the weights of .* cannot be read; they are damaged, or hold more than tensors"
    ):
        lamina.load(base)
    assert nothing_ran(base)
