from __future__ import annotations

import json
from pathlib import Path

from lamina.data.recorded_states import RecordedStates


def test_states_of_a_file_are_written(lamina, base: Path, tmp_path: Path):
    (tmp_path / "rows.tsv").write_text("sentence\tlabel\nanna is good\tyes\nthe film\tno\n", encoding="utf-8")
    to = tmp_path / "states"
    ran = lamina("extract", base, tmp_path / "rows.tsv", "-o", to, "--layers", "1,3", "--dtype", "float32", "--json")
    assert ran.code == 0, ran.err
    facts = json.loads(ran.out)
    assert (facts["rows"], facts["layers"], facts["files"], facts["table"]) == (2, [1, 3], 1, "rows.jsonl")
    assert RecordedStates.open(to).lengths.tolist() == [5, 4]
    pooled = lamina("extract", base, tmp_path / "rows.tsv", "-o", tmp_path / "pooled", "--pooling", "last")
    assert (pooled.code, pooled.out) == (0, f"{tmp_path / 'pooled'}: 2 rows, layers 0, 1, 2, 3, float16, 1 file\n")
    for wrong, said in (("--layers", "layer 9 does not exist"), ("--stack", "unknown stack '9'")):
        refused = lamina("extract", base, tmp_path / "rows.tsv", "-o", tmp_path / "other", wrong, "9")
        assert refused.code == 2
        assert said in refused.err
