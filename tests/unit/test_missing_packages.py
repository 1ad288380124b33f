"""Optional packages that are not installed: each is named with its extra before work begins."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.support.finetuned import bert
from tests.support.training import tiny_tokenizer

import lamina
from lamina.errors import MissingExtraError, require_packages

LATER = "raise AssertionError('work had begun')"  # what must not run


def hidden(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Make modules look as if they were not installed."""
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)


def test_what_is_installed_passes_and_what_is_not_is_named_as_pip_knows_it(monkeypatch: pytest.MonkeyPatch):
    require_packages("work", "images", "PIL", "numpy")
    hidden(monkeypatch, "PIL", "sklearn")
    with pytest.raises(MissingExtraError, match=r"^work: needs the package 'pillow', .*'lamina\[images\]'$"):
        require_packages("work", "images", "numpy", "PIL")
    with pytest.raises(ImportError, match=r"'scikit-learn', .* Run: pip install 'lamina\[sklearn\]'$"):
        require_packages("work", "sklearn", "sklearn")


@pytest.mark.parametrize(
    ("module", "code", "extra"),
    [
        ("sklearn", "from lamina import LaminaClassifier", "sklearn"),
        ("sklearn", "import lamina; lamina.LaminaTagger", "sklearn"),
        ("scipy", "import lamina; lamina.studies.probe", "studies"),
        ("sklearn", "from lamina.studies import similarity", "studies"),
    ],
)
def test_a_room_without_its_packages(module: str, code: str, extra: str):
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules['{module}'] = None; {code}; {LATER}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(f"Run: pip install 'lamina[{extra}]'")


def test_the_command_line_names_the_extra_in_one_line(tmp_path):
    code = "import sys; sys.modules['scipy'] = None; from lamina.cli import main; main(['study', 'probe', 'r.yaml'])"
    (tmp_path / "r.yaml").write_text("model: minilm\nstudies: {probe: }\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        "error: studies: needs the package 'scipy', which is not installed. Run: pip install 'lamina[studies]'"
    ]


def tags() -> tuple[lamina.ReaderBank, dict[str, lamina.Task]]:
    rows = [{"text": ["it", "is", "good"], "tags": ["O", "O", "B-x"]}, {"text": ["it"], "tags": ["B-x"]}] * 8
    task = lamina.Task.from_dataset("token_classification", {"train": rows}, text="text", label="tags")
    bank = lamina.ReaderBank(bert("AutoModel"), processor=tiny_tokenizer())
    bank.add("tags", task)
    return bank, {"tags": task}


def test_a_metric_is_asked_for_before_training_and_scoring(monkeypatch: pytest.MonkeyPatch):
    bank, tasks = tags()
    hidden(monkeypatch, "seqeval")
    before = {name: value.clone() for name, value in bank.state_dict().items()}
    with pytest.raises(MissingExtraError, match=r"^fit: needs the package 'seqeval', .*'lamina\[metrics\]'$"):
        lamina.fit(bank, tasks, epochs=1, progress=False)
    assert all(value.equal(before[name]) for name, value in bank.state_dict().items())
    with pytest.raises(MissingExtraError, match=r"^evaluate: needs the package 'seqeval'"):
        lamina.evaluate(bank, tasks)


def test_classes_and_numbers_are_scored_without_optional_packages(monkeypatch: pytest.MonkeyPatch):
    hidden(monkeypatch, "torchmetrics", "seqeval", "sacrebleu", "snowballstemmer", "sklearn", "scipy")
    for labels in (["a", "b"], ["a", "b", "c"], [0.5, 1.5]):
        rows = [{"text": "it is good", "label": label} for label in labels * 8]
        task = lamina.Task.from_dataset("sequence_classification", {"train": rows, "test": rows}, text="text")
        bank = lamina.ReaderBank(bert("AutoModel"), processor=tiny_tokenizer())
        bank.add("it", task)
        lamina.fit(bank, {"it": task}, epochs=1, progress=False)
        assert set(lamina.evaluate(bank, {"it": task}, split="test")["it"]) == set(task.metrics)
