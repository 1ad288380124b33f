"""What every room may use."""

from __future__ import annotations

import torch

from lamina.utils import counted, seed_torch


def test_seeding_gives_the_numbers_of_torch():
    torch.manual_seed(2**62 + 7)
    expected = torch.rand(5), torch.randint(1 << 40, (5,)), torch.nn.functional.dropout(torch.ones(50))
    seed_torch(2**62 + 7)
    drawn = torch.rand(5), torch.randint(1 << 40, (5,)), torch.nn.functional.dropout(torch.ones(50))
    assert all(torch.equal(a, b) for a, b in zip(drawn, expected, strict=True))


def test_one_is_no_plural():
    assert [counted(count, "run") for count in (0, 1, 2, 1200)] == ["0 runs", "1 run", "2 runs", "1,200 runs"]
