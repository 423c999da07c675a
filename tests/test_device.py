"""A CUDA or MPS device against the CPU."""

import copy

import pytest
import torch
from conftest import build, close

from mhf import HEADS, OBJECTIVES

DEVICES = [
    pytest.param(
        name, marks=pytest.mark.skipif(not there, reason=f"this machine has no {name} device")
    )
    for name, there in (
        ("cuda", torch.cuda.is_available()),
        ("mps", torch.backends.mps.is_available()),
    )
]

pytestmark = [pytest.mark.device, pytest.mark.parametrize("device", DEVICES)]
TOLERANCE = 1e-4  # float32 on both sides; a device sums in another order, over two layers


def test_log_probs_equal_the_cpus(model, ids, device):
    """log_probs on the device are those on the CPU within 1e-4."""
    expected = model.log_probs(ids)
    actual = copy.deepcopy(model).to(device).log_probs(ids.to(device))
    assert actual.device.type == device
    close(actual.cpu(), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_gradients_equal_the_cpus(model, ids, objective, head, device):
    """The gradients of each objective on the device are the plain ones of the CPU within 1e-4."""
    there = copy.deepcopy(model).to(device)
    model.loss(ids[:, :-1], ids[:, 1:], objective).backward()
    there.loss(ids[:, :-1].to(device), ids[:, 1:].to(device), objective, head).backward()
    for p, q in zip(model.parameters(), there.parameters(), strict=True):
        close(q.grad.cpu(), p.grad, atol=TOLERANCE, rtol=TOLERANCE)


def test_greedy_text_equals_the_cpus(model, device):
    """Greedy generation on the device, past the context limit, gives the CPU's ids."""
    expected = list(model.generate([3, 9, 1], 40, temperature=0))
    assert list(model.to(device).generate([3, 9, 1], 40, temperature=0)) == expected


def test_expansion_stays_on_the_device(ids, device):
    """A model that was moved, then expanded, computes what the same model on the CPU computes."""
    model = build()
    there = copy.deepcopy(model).to(device)
    for m in (model, there):
        m.expand([b"new", b"newer"])
    actual = there.log_probs(ids.to(device))
    close(actual.cpu(), model.log_probs(ids), atol=TOLERANCE, rtol=TOLERANCE)
