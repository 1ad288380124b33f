"""The Python of the docs runs as it stands, and prints what the pages say."""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fastapi.testclient import TestClient
from tests.support.causal import TEMPLATE, causal_model, causal_tokenizer
from tests.support.documented import ROOT, blocks, pages
from tests.support.files import jsonl, put
from tests.support.finetuned import bert, image_processor, t5, t5_tokenizer, vit
from tests.support.pictures import encoded, picture
from tests.support.sounds import sound_bytes, sound_folder, tone, whisper, whisper_features
from tests.support.stored import tiny_tokenizer

import lamina
from lamina import errors
from lamina.cli import command_line as app
from lamina.cli import main
from lamina.errors import LaminaError
from lamina.fusion import FUSIONS
from lamina.heads import HEADS
from lamina.layers import roles
from lamina.recipes.estimate import estimate
from lamina.recipes.schema import load_recipe
from lamina.registry import STUDIES
from lamina.serve import create_app
from lamina.studies import Study
from lamina.tasks import KINDS, kind_of

Names = dict[str, Any]
FILMS = [{"text": f"the film is {word}", "label": word} for word in ("good", "bad")] * 8
FILM_PARTS = {"train": FILMS, "validation": FILMS}


def writes_on(model: Any) -> Any:
    model.generation_config.suppress_tokens = [0, 3]  # padding and the end, which are all that it would write
    return model


HERE = {  # in place of models of the hub
    "openai/whisper-small": lambda: (whisper(), whisper_features()),
    "gpt2": lambda: (causal_model(), causal_tokenizer(TEMPLATE)),
    "Qwen/Qwen3-0.6B": lambda: (causal_model(), causal_tokenizer(TEMPLATE)),
    "facebook/bart-large-cnn": lambda: (writes_on(t5()), t5_tokenizer()),
    "facebook/dinov2-small": lambda: (vit(), image_processor()),
}


def load_here(load: Callable[..., Any], name: str, head: str | None = None, **more: Any) -> Any:
    """In place of `lamina.load`: a model of the hub is a tiny one, and without its head if the page asks for none."""
    if name not in HERE:
        return load(name, head, **more)
    model, processor = HERE[name]()
    return (model if head else model.base_model), processor


def films() -> lamina.Task:
    return lamina.Task.from_dataset("sequence_classification", FILM_PARTS, text="text", name="mrpc")


def with_bank() -> Names:
    """For a page that goes on from a model, a bank and a task."""
    task, model = films(), bert("AutoModel")
    bank = lamina.ReaderBank(model, tiny_tokenizer())
    bank.add("cola", lamina.Reader(lamina.AdaLayers(dim=8), lamina.SequenceClassification(task.labels)))
    return {"lamina": lamina, "model": model, "tokenizer": tiny_tokenizer(), "bank": bank, "task": task}


def training() -> Names:
    sound_folder(Path("clips"), rows=6)
    put(Path("a.wav"), "").write_bytes(sound_bytes(tone()))
    put(Path("b.flac"), "").write_bytes(sound_bytes(tone("high"), kind="FLAC"))
    jsonl(Path("texts.jsonl"), FILMS)
    spans = [["it"], [], ["absent"], ["good"]]
    said = [{"query": "is it ?", "reply": "it is good", "is_wrong": n % 2} for n in range(8)]
    jsonl(Path("chats.jsonl"), [{**row, "wrong_spans": spans[n % 4]} for n, row in enumerate(said)])
    jsonl(Path("pairs.jsonl"), [{"prompt": "is it ?", "response": " it is ."}] * 4)
    put(Path("stories.txt"), "the film is good .\nthe film is bad .\n" * 8)
    return {**with_bank(), "datasets": datasets, "samples": tone(rate=44100)}


def concepts() -> Names:
    names = with_bank()
    head = lamina.SequenceClassification(("no", "yes"), pooling="first", linear=False)
    names["bank"].add("mood", lamina.Reader(lamina.fusion.Routing(dim=2), head))
    return {**names, "torch": torch, "batch": tiny_tokenizer()(["the film"], return_tensors="pt")}


def sweep() -> Names:
    Path("out/cola-sweep").mkdir(parents=True)
    pq.write_table(pa.table({"fusion.dim": [16, 16, 64], "score": [0.1, 0.3, 0.5]}), "out/cola-sweep/table.parquet")
    return {}


def files() -> Names:
    Path("photo.png").write_bytes(encoded(picture()))
    Path("clip.wav").write_bytes(sound_bytes(tone()))
    return {}


def printed_alone(_names: Names, printed: str) -> None:
    assert printed


def of_editing(names: Names, _printed: str) -> None:
    assert names["result"].best["films"]["epoch"] in (1, 2, 3)


def of_concepts(names: Names, _printed: str) -> None:
    assert names["credit"].sum(1).shape == (1, names["batch"]["input_ids"].shape[1], 2)


def of_generation(_names: Names, printed: str) -> None:
    assert "torch.Size([1, 3])\n" in printed
    assert "'flag': Monitor(reader='flag', flag=('odd',), aggregate=RollingMax(window=4), threshold=0." in printed
    assert printed.endswith("torch.Size([1, 3, 32]) torch.Size([1, 3, 32])\n")


def of_the_sweep(_names: Names, printed: str) -> None:
    assert "[[0.2,0.5]]" in "".join(printed.split())


def of_the_csv(names: Names, printed: str) -> None:
    layers, baselines = names["layers"], names["baselines"]
    assert max(layers[0], baselines.max()) < 0.6
    assert layers[6] > 0.9
    assert "beat" in printed
    assert Path("page.html").is_file()


def of_the_monitor(names: Names, printed: str) -> None:
    """The monitor is told from chance; then the commands of the page, on the files that its Python wrote."""
    rates = names["trained"].calibration
    assert rates.is_useful
    assert "catches" in printed
    text = (ROOT / "docs" / "guides" / "live-monitor.md").read_text(encoding="utf-8")
    (commands,) = re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)
    for line in commands.splitlines():
        with redirect_stdout(io.StringIO()) as out, pytest.MonkeyPatch.context() as patch:
            patch.setattr(app, "quiet", lambda: None)  # its changes would outlast the test
            with pytest.raises(SystemExit) as ended:
                main([*shlex.split(line)[1:], "--json"])
        assert ended.value.code in (0, None)
    (monitor,) = json.loads(out.getvalue())
    assert (monitor["calibration"]["data"], monitor["calibration"]["target"]) == (rates.data, 0.05)


def of_three_columns(names: Names, _printed: str) -> None:
    """The scores say something; then the commands of the page, on the files that its Python wrote."""
    assert all(score["accuracy"] > 0.85 for score in names["scores"].values())
    text = (ROOT / "docs" / "guides" / "three-columns.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    put(Path("messages.yaml"), recipe)
    (commands,) = re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)
    lines = [shlex.split(line, comments=True)[1:] for line in commands.splitlines()]
    assert [line[0] for line in lines] == ["train", "evaluate", "predict", "predict", "serve"]
    printed: list[str] = []
    for line in lines[:4]:
        with redirect_stdout(io.StringIO()) as out, pytest.MonkeyPatch.context() as patch:
            patch.setattr(app, "quiet", lambda: None)  # its changes would outlast the test
            with pytest.raises(SystemExit) as ended:
                main(line)
        assert ended.value.code in (0, None)
        printed.append(out.getvalue())
    assert "42 steps" in printed[0]
    assert "always one answer" in printed[1]
    assert "delivery" in printed[2]
    assert printed[3] == "48 rows in answers.csv, 0 skipped\n"
    with TestClient(create_app(lamina.ReaderBank.from_pretrained("out/bank"))) as client:
        answer = client.post("/predict", json={"inputs": "My parcel is awful. I need it today."})
    assert (answer.status_code, "delivery" in answer.text) == (200, True)


def of_studies(names: Names, _printed: str) -> None:
    assert names["cka"].shape == (7, 7)
    assert set(names["study"].table["layer"]) == {0, 1, 2}
    assert set(names["words"].table["place"]) == {1, 2, 3}
    assert set(names["tokens"].table["reader"]) == {"mood"}
    assert set(names["probed"].table["layer"].dropna()) == {0, 3, 6}
    assert set(names["worst"]["layer"]) <= {0, 6}
    assert set(names["drops"]["task"]) == {"mood", "language model"}
    assert set(names["curve"].table["reinitialised"]) == set(names["inserted"].table["inserted"]) == {0, 2}
    assert names["advice"].settings["proposals"]["mood"]["keep"] >= 1
    assert names["table"]["score"].tolist() == [1, 4, 9]
    assert Study.load(Path("out/similarity")).name == "similarity"


def of_training(_names: Names, _printed: str) -> None:
    assert pq.read_table("answers.parquet").num_rows == len(FILMS)
    assert Path("importance.png").is_file()
    assert Path("my-gpt2/config.json").is_file()


PAGES: dict[str, tuple[Callable[[], Names], Callable[[Names, str], None]]] = {
    "README.md": (dict, printed_alone),
    "docs/all.md": (dict, printed_alone),
    "docs/concepts.md": (concepts, of_concepts),
    "docs/editing.md": (dict, of_editing),
    "docs/extending.md": (dict, printed_alone),
    "docs/files.md": (dict, printed_alone),
    "docs/guides/a-million-texts.md": (dict, printed_alone),
    "docs/guides/cutting.md": (dict, printed_alone),
    "docs/guides/inserting.md": (dict, printed_alone),
    "docs/guides/layers.md": (dict, printed_alone),
    "docs/guides/live-monitor.md": (dict, of_the_monitor),
    "docs/guides/one-pass.md": (dict, printed_alone),
    "docs/guides/probe-my-csv.md": (dict, of_the_csv),
    "docs/guides/recorded-states.md": (dict, printed_alone),
    "docs/guides/sweeps.md": (dict, printed_alone),
    "docs/guides/three-columns.md": (dict, of_three_columns),
    "docs/guides/vllm.md": (dict, printed_alone),
    "docs/guides/which-reader.md": (dict, printed_alone),
    "docs/generation.md": (dict, of_generation),
    "docs/index.md": (files, printed_alone),
    "docs/results/cola-sweep.md": (sweep, of_the_sweep),
    "docs/studies.md": (dict, of_studies),
    "docs/training.md": (training, of_training),
}
ERRORS = sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs" / "errors").glob("*-error.md"))
PAGES |= {
    page: (dict, printed_alone) for page in ERRORS if page in {one.relative_to(ROOT).as_posix() for one in pages()}
}
FRESH = ("docs/training.md",)  # pages whose blocks begin anew
LESS_WORK: dict[str, dict[str, str]] = {  # changed in these pages, which only `-m full` runs as they stand
    "README.md": {"epochs=30": "epochs=15"},
}


ELSEWHERE = {  # pages whose lines another test runs
    "docs/export.md": "tests/unit/store/test_onnx.py",
    "docs/few-shot.md": "tests/end_to_end/test_few_shot_page.py",
}


def test_every_page_with_code_is_run():
    assert {page.relative_to(ROOT).as_posix() for page in pages()} == {*PAGES, *ELSEWHERE}
    for page, test in ELSEWHERE.items():
        assert f'"{Path(page).name}"' in (ROOT / test).read_text(encoding="utf-8")


def test_every_error_has_a_page_in_the_list_of_errors():
    names = [name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, LaminaError)]
    kebab = {re.sub("(?<=.)(?=[A-Z])", "-", name).lower(): name for name in names if name != "LaminaError"}
    assert {page.removeprefix("docs/errors/").removesuffix(".md") for page in ERRORS} == set(kebab)
    listed = (ROOT / "docs" / "errors" / "index.md").read_text(encoding="utf-8")
    for page, name in kebab.items():
        assert f"| [{name}]({page}.md) |" in listed
        assert (ROOT / "docs" / "errors" / f"{page}.md").read_text(encoding="utf-8").startswith(f"# {name}\n")


LONG = {  # pages that take seconds each: `make test-long` runs them, as .ci/run does
    "docs/all.md",
    "docs/editing.md",
    "docs/extending.md",
    "docs/guides/a-million-texts.md",
    "docs/guides/cutting.md",
    "docs/guides/inserting.md",
    "docs/guides/layers.md",
    "docs/guides/live-monitor.md",
    "docs/guides/one-pass.md",
    "docs/guides/probe-my-csv.md",
    "docs/guides/recorded-states.md",
    "docs/guides/sweeps.md",
    "docs/guides/three-columns.md",
    "docs/guides/which-reader.md",
    "docs/index.md",
    "docs/studies.md",
    "docs/training.md",
    *(page for page in PAGES if page.startswith("docs/errors/") and page != "docs/errors/unknown-name-error.md"),
}
CASES = [(page, page not in LESS_WORK) for page in PAGES if page not in LONG]
CASES += [pytest.param(page, True, marks=pytest.mark.long) for page in sorted(LONG)]
CASES += [pytest.param(page, True, marks=pytest.mark.full) for page in LESS_WORK]


@pytest.mark.parametrize(("page", "as_it_stands"), CASES)
def test_a_page_runs_and_prints_what_it_says(
    page: str, as_it_stands: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    changes = {} if as_it_stands else LESS_WORK[page]
    assert all(old in (ROOT / page).read_text(encoding="utf-8") for old in changes)
    monkeypatch.setattr(lamina, "load", partial(load_here, lamina.load))
    monkeypatch.setattr(datasets, "load_dataset", lambda _name: FILM_PARTS)
    monkeypatch.syspath_prepend(str(tmp_path / "flag"))  # where the page on generation exports a reader to
    monkeypatch.syspath_prepend(str(tmp_path))
    for registry in (FUSIONS, HEADS, KINDS, STUDIES):
        monkeypatch.setattr(registry, "_rows", dict(zip(registry.names(), registry._rows.values(), strict=True)))
    monkeypatch.setattr(roles, "ROLES", {**roles.ROLES})
    monkeypatch.setenv("LAMINA_CACHE", str(tmp_path / "states"))
    monkeypatch.chdir(tmp_path)
    kind_of.cache_clear()
    start, check = PAGES[page]
    names, printed = {}, ""
    for number, block in enumerate(blocks(ROOT / page)):
        if number == 0 or page in FRESH:
            names |= start()
        for old, new in changes.items():
            block = replace(block, code=block.code.replace(old, new))
        out = block.run(names)
        assert block.difference(out) == ""
        printed += out
    check(names, printed)


def test_the_recipe_of_the_page_on_papers_can_be_run(tmp_path: Path):
    text = (ROOT / "docs" / "guides" / "from-a-paper.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    for part in ("train", "dev"):
        put(tmp_path / f"{part}.csv", "review,stars\ngood,1\nbad,2\nfine,1\nill,2\n")
    found = estimate(load_recipe(put(tmp_path / "mine.yaml", recipe)), data=tmp_path)
    assert sum(run["count"] for run in found.runs) == 24


def test_the_recipe_of_the_page_on_sweeps_can_be_run(tmp_path: Path):
    text = (ROOT / "docs" / "guides" / "sweeps.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    found = estimate(load_recipe(put(tmp_path / "sweep.yaml", recipe)))
    assert sum(run["count"] for run in found.runs) == 27


def test_what_a_page_says_wrongly_is_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n\n    ```python\n    x = 1\n    ```\n")
    wrong, right = blocks(page)
    monkey = wrong.difference("2\n")
    assert "page.md:2" in monkey
    assert "Expected:" in monkey
    assert (right.line, right.code, right.printed, right.difference("anything")) == (10, "x = 1\n", None, "")
