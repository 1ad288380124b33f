"""The walls that conftest.py puts up stand."""

from __future__ import annotations

import os
import socket

import pytest


def test_no_test_reaches_another_machine():
    with socket.socket() as sock, pytest.raises(RuntimeError, match="is not this machine"):
        sock.connect(("192.0.2.1", 80))
    with socket.socket() as sock, pytest.raises(RuntimeError, match="is not this machine"):
        sock.connect_ex(("192.0.2.1", 80))


def test_this_machine_can_be_reached():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        client = socket.create_connection(address, timeout=5)
        with client:
            assert client.getpeername() == address


def test_torch_runs_on_one_thread_and_the_hub_is_offline():
    import torch
    from huggingface_hub import constants

    assert torch.get_num_threads() == 1
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert constants.HF_HUB_OFFLINE


def test_shapes_are_checked():
    """The fusion's own annotations refuse a tensor of the wrong rank, and one of the wrong size."""
    import torch
    from jaxtyping import TypeCheckError

    from lamina.fusion.mean import Mean

    fusion = Mean().build(layers=2, width=4)
    mask = torch.ones(3, 5, dtype=torch.bool)
    assert fusion(torch.zeros(2, 3, 5, 4), mask).shape == (3, 5, 4)
    with pytest.raises(TypeCheckError, match="states"):
        fusion(torch.zeros(3, 5, 4), mask)
