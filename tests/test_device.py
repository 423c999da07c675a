"""The choice of device and precision, and a CUDA or MPS device against the CPU."""

import copy

import pytest
import torch
from conftest import close, refused

import mhf

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
THERE = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}


@pytest.mark.device
@pytest.mark.parametrize("device", THERE)
def test_results_equal_the_cpus(model, ids, device):
    """log P, gradients, greedy text past the limit, of an expanded model; 1e-4 for float32 sums."""
    if not THERE[device]:
        pytest.skip(f"this machine has no {device} device")
    there = copy.deepcopy(model).to(device)
    for m, x in ((model, ids), (there, ids.to(device))):
        m.expand([b"new", b"newer"])
        sum(m.loss(x, x, objective) for objective in mhf.OBJECTIVES).backward()
    close(there.log_probs(x).cpu(), model.log_probs(ids), atol=1e-4, rtol=1e-4)
    for p, q in zip(model.parameters(), there.parameters()):
        close(q.grad.cpu(), p.grad, atol=1e-4, rtol=1e-4)
    close(*(list(m.generate([3, 9, 1], 40, temperature=0)) for m in (model, there)), atol=0)


@pytest.mark.parametrize(("kind", "hardware", "precision"), [
    ("cuda", (8, 0), "bf16"), ("cuda", (7, 5), "fp16"), ("mps", {}, "fp32"),
    ("cpu", {"avx512_bf16": True}, "bf16"), ("cpu", {"avx2": True}, "fp32"),
])  # fmt: skip
def test_precision_follows_the_hardware(monkeypatch, kind, hardware, precision):
    """As asked; auto: bf16 where the chip has it, else fp16 on CUDA, else fp32. autocast obeys."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: hardware)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: hardware)
    assert mhf.choose_precision("auto", torch.device(kind)) == precision
    assert mhf.choose_precision("fp16", torch.device(kind)) == "fp16"
    with mhf.autocast(torch.device("cpu"), precision):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == TYPES[precision]


@pytest.mark.parametrize("name", ["cuda:77", "gpu", "mps:9"])
def test_missing_device_is_refused(name):
    """A device that this machine does not have is a ValueError that names it."""
    refused(lambda: mhf.choose_device(name), name)
