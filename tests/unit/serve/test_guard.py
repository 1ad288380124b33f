from __future__ import annotations

import json

import pytest

from lamina.serve.guard import depth_of


@pytest.mark.parametrize(
    ("body", "depth"),
    [
        (b"", 0),
        (b'"[[["', 0),
        (b'{"a": [1, [2]], "b": []}', 3),
        (rb'{"a": "\"[[[[\\"}', 1),
        (b'["', 1),
        (b"]]]]", 0),
        (json.dumps({"inputs": [["[" * 9]]}).encode(), 3),
        (b'"' + b"\\" * 100_001, 0),
        (b"[" * 1000, 1000),
    ],
)
def test_depth(body: bytes, depth: int):
    assert depth_of(body) == depth
