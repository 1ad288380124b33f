"""Several processes fine-tune as one does, with the same rows in every step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]


KINDS = ("tags", "summaries", "accumulated", "frozen")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Number of processes -> what they wrote."""
    made = {}
    for processes in (1, 2):
        made[processes] = tmp_path_factory.mktemp("runs")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [sys.executable, *(launcher if processes > 1 else []), "-m", "tests.support.tune_in_processes"]
        done = subprocess.run(
            [*command, str(made[processes]), *KINDS],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_tune_as_one_does(runs: dict[int, Path], kind: str):
    one, two = (runs[processes] / kind for processes in (1, 2))
    ours, theirs = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    assert ours.keys() == theirs.keys()
    wrong = {key: found for key, each in ours.items() if (found := float((each - theirs[key]).abs().max())) > 1e-5}
    assert not wrong
    histories = [json.loads((folder / "run" / "history.json").read_text())["history"] for folder in (one, two)]
    assert [[row["epoch"] for row in history] for history in histories] == [[1, 2], [1, 2]]
    assert (two / "run" / "tokenizer.json").is_file()
