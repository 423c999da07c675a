"""The lean head computes what the plain head does: every loss, every gradient, in less memory."""

import subprocess
import sys

import pytest
import torch
from conftest import build

from mhf import HEADS, OBJECTIVES


def batch(V, T=200):
    """Ids from 9 and targets (4, T), some not counted: one chunk of 512 positions and a part."""
    g = torch.Generator().manual_seed(8)
    ids, targets = (torch.randint(9, V, (4, T), generator=g) for _ in range(2))
    targets[0, :5] = targets[2, -3:] = -100
    return ids, targets


def gradients(model, ids, targets, objective, head, scale=3.0):
    """The loss, and the gradient of `scale` times it for every parameter by name."""
    model.zero_grad()
    loss = model.loss(ids, targets, objective, head)
    (scale * loss).backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def difference(model, V, objective):
    """Lean against plain: the loss's relative difference, and the largest one of a gradient.

    Gradients are compared by norm; below 1e-3 of the largest, that of the gate's last bias for
    example, which is 0 in exact arithmetic, against that bound.
    """
    ids, targets = batch(V)
    (plain, one), (lean, two) = (gradients(model, ids, targets, objective, h) for h in HEADS)
    floor = 1e-3 * max(g.norm() for g in one.values())
    worst = max(((one[k] - two[k]).norm() / one[k].norm().clamp(min=floor)).item() for k in one)
    return ((plain - lean).abs() / plain).item(), worst


def larger(seed=4, **fields):
    """A model with large parameters, so that every term of a gradient counts."""
    sizes = {"H": 4, "B": 64, "V": 200, "hidden_size": 32, "max_position_embeddings": 256}
    model = build(**sizes | fields)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn(p.shape, generator=g)
    return model


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("fields", [{}, {"unassigned": (7, 8)}, {"H": 2}, {"H": 1}], ids=str)
def test_lean_equals_plain(objective, fields):
    """In float32 loss and gradients agree to rounding: sums of 800 positions in another order."""
    loss, gradient = difference(larger(**fields), 200, objective)
    assert loss < 1e-6 and gradient < 2e-5


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_lean_rounds_no_more_than_plain(objective, kind):
    """Under autocast both round, at other places: lean is as near to float32 as plain, or half
    as far again; and so is every gradient, also in float16, whose range is narrow."""
    model, (ids, targets) = larger(), batch(200)
    with torch.no_grad():
        for p in model.parameters():
            p /= 2
    loss, exact = gradients(model, ids, targets, objective, "plain")
    with torch.autocast("cpu", kind):
        (one, plain), (two, lean) = (gradients(model, ids, targets, objective, h) for h in HEADS)
    assert (two - loss).abs() < 1.5 * (one - loss).abs() + 1e-3 * loss
    floor = 1e-3 * max(g.norm() for g in exact.values())
    for k, g in exact.items():
        assert (lean[k] - g).norm() < 1.5 * (plain[k] - g).norm() + floor, k


def test_lean_runs_in_pure_bfloat16():
    """A model whose parameters are bfloat16 themselves trains, too."""
    model, (ids, targets) = larger().bfloat16(), batch(200)
    loss, found = gradients(model, ids, targets, "joint", "lean")
    assert loss.isfinite() and all(g.dtype == torch.bfloat16 for g in found.values())


def test_lean_loss_needs_no_gradient(ids):
    """Without gradients, as in an evaluation, lean is the same number."""
    model = build()
    with torch.no_grad():
        plain, lean = (model.loss(ids, ids, "exact", head) for head in HEADS)
    assert torch.equal(plain, lean)


def test_standard_model_has_one_head(ids):
    """The standard model's loss is the same whichever head is named."""
    model = build(standard=True)
    assert torch.equal(*(model.loss(ids, ids, "exact", head) for head in HEADS))


def test_unknown_head_is_refused(ids):
    """A head that does not exist is a ValueError that names it."""
    with pytest.raises(ValueError, match="'fat'"):
        build().loss(ids, ids, "exact", "fat")


def test_lean_sees_a_changed_cascade(ids):
    """Wiring and mixers are the model's own in both heads: a changed cascade keeps them equal."""
    model = larger()
    model.hash_head.cascade_mixer[1] = torch.nn.Linear(64, 32)
    assert difference(model, 200, "joint")[1] < 1e-5


def test_gradients_are_used_once():
    """A second backward pass through the same loss is an error, not twice-scaled gradients."""
    model, (ids, targets) = larger(), batch(200)
    loss = model.loss(ids, targets, "independent", "lean")
    loss.backward(retain_graph=True, gradient=torch.tensor(2.0))
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


PEAK = """
import sys, torch, mhf, train
table = mhf.SignatureTable(4, 4096)
table.extend([b"%d" % i for i in range(4096)])
config = mhf.Config(num_buckets=4096, hidden_size=32, num_hidden_layers=1, intermediate_size=32)
model = mhf.MultiHashFormer(config, table)
ids = torch.randint(1, 4096, (8, 256))
cpu = torch.device("cpu")
before = train.peak_memory(cpu)
model.loss(ids, ids, sys.argv[1], sys.argv[2]).backward()
print(round(2**20 * (train.peak_memory(cpu) - before)))  # KiB
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_lean_needs_less_memory(objective):
    """2,048 positions of 4 × 4,096 logits are 128 MiB; lean grows by less than half of plain."""
    plain, lean = (
        int(subprocess.check_output([sys.executable, "-c", PEAK, objective, head]))
        for head in HEADS
    )
    assert plain > 128 * 2**10 and lean < plain / 2
