from __future__ import annotations

from tests.support.stored import tiny_model
from tests.support.tiny import FAMILIES

import lamina
from lamina.editing.block_picture import drawn, stack_pictures


def test_the_blocks_before_and_after():
    model = FAMILIES["llama"].known()
    lamina.insert_(model, "ffn", layers=1)
    lamina.duplicate_(model, [1, 3])
    lamina.drop_(model, 3)
    lamina.reinit_(model, 3)
    (picture,) = stack_pictures(lamina.edits(model), {"main": 4}).values()
    assert drawn(picture) == [
        "before  [1][2][3]",
        "after   [1i][1=i][3r][3=]",
        "        = a copy that starts as an identity; i has inserted layers; r re-initialised; gone: 2",
    ]
    assert picture["after"][1] == {"block": 2, "was": 1, "copy": True, "identity": True, "edits": ["insert"]}


def test_merged_layers_and_stacks_without_edits():
    model = tiny_model()
    lamina.insert_(model, "ffn")
    lamina.merge_(model)
    lamina.truncate_(model, 2)
    assert drawn(stack_pictures(lamina.edits(model), {"main": 2})["main"])[1:] == ["after   [1][2]", "        gone: 3"]
    assert stack_pictures([], {"main": 3}) == {}
