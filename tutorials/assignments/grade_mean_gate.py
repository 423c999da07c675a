"""Grader of assignment 1: python -m pytest tutorials/assignments/grade_mean_gate.py"""

import mean_gate
import torch
from grading import check, check_model, graded, near, random, tiny_batch, tiny_config, tiny_model

import mhf
from support.explain import explain


def simple_gate(H=3, D=8):
    """A MeanGate whose adapter gives back what it gets."""
    gate = mean_gate.MeanGate(tiny_config(H, D=D))
    check(hasattr(gate, "output_proj"), "the adapter output_proj is gone; it is to stay")
    with torch.no_grad():
        gate.output_proj[0].weight.copy_(torch.eye(D))
        gate.output_proj[0].bias.zero_()
    return gate


ROWS = torch.tensor([1.0, 2.0, 6.0]).view(3, 1).expand(1, 2, 3, 8)  # of equal numbers each


@graded
def test_only_the_adapter_has_parameters():
    gate = mean_gate.MeanGate(tiny_config())
    check(isinstance(gate, mhf.GatedEmbedding), "MeanGate does not derive from mhf.GatedEmbedding")
    names = sorted(name for name, _ in gate.named_parameters())
    extra = [name for name in names if not name.startswith("output_proj.")]
    check(not extra, f"a mean has nothing to learn, but these parameters are there: {extra}")
    adapter = ["output_proj.0.bias", "output_proj.0.weight"]
    check(names == adapter, f"the adapter's parameters are {adapter}, not {names}")


@graded
def test_shapes():
    for H, shape in ((3, (2, 5)), (4, (7,)), (2, ())):
        x, weights = simple_gate(H)(random(*shape, H, 8))
        check(
            (x.shape, weights.shape) == ((*shape, 8), (*shape, H)),
            f"of e {(*shape, H, 8)} come x {(*shape, 8)} and gate {(*shape, H)}, "
            f"not {tuple(x.shape)} and {tuple(weights.shape)}",
        )


@graded
def test_every_row_has_the_same_weight():
    for H in (1, 2, 3, 4):
        _, weights = simple_gate(H)(random(2, 5, H, 8))
        sums = weights.sum(-1)
        check(near(sums, torch.ones_like(sums)), f"with H = {H} the gate's weights do not sum to 1")
        check(near(weights, weights.mean(-1, keepdim=True).expand_as(weights)), "weights differ")


@graded
def test_the_value():
    gate = simple_gate()
    x, _ = gate(ROWS)
    shown = x.flatten()[0].item()
    check(near(x, torch.full((1, 2, 8), 3.0)), f"rows of 1, 2, 6 give x = {shown:.4g}, not 3")
    with torch.no_grad():
        gate.output_proj[0].weight.mul_(2.0)
        gate.output_proj[0].bias.fill_(1.0)
    x, _ = gate(ROWS)
    shown = x.flatten()[0].item()
    check(
        near(x, torch.full((1, 2, 8), 7.0)),
        f"rows of 1, 2, 6 under W_s = 2 I, b_s = 1 give x = {shown:.4g}, not 7: is the adapter "
        "applied, once, to the mean?",
    )


@graded
def test_only_the_order_of_the_functions_is_forgotten():
    gate, e = simple_gate(), random(2, 5, 3, 8)
    x, _ = gate(e)
    check(near(x, gate(e.flip(-2))[0]), "x changes when the H rows of a token change places")
    check(not near(x, gate(e.flip(-1))[0]), "x is the same when the D numbers of e are reversed")
    check(not near(x, gate(e.flip(-3))[0]), "x is the same when the tokens are reversed")


@graded
def test_every_row_gets_the_same_gradient():
    gate, e = simple_gate(), random(2, 5, 3, 8)
    x, _ = gate(e)
    check(x.requires_grad, "no gradient can flow through x; is there a detach, or .data?")
    x.square().sum().backward()
    check(e.grad is not None and e.grad.abs().sum() > 0, "no gradient reaches the rows")
    check(near(e.grad, e.grad[..., :1, :].expand_as(e)), "the H rows get different gradients")
    for name, p in gate.named_parameters():
        check(p.grad is not None and p.grad.abs().sum() > 0, f"no gradient reaches {name}")


@graded
def test_in_the_model():
    model, (ids, _) = tiny_model({"GatedEmbedding": mean_gate.MeanGate}), tiny_batch()
    rows = model.model.embed_tokens(model.rows[ids])  # (N, T, H, D)
    x, weights = model.embed(ids, return_gate=True)
    check(
        torch.equal(x, model.model.combiner(rows)[0]) and weights.shape == (2, 6, 3),
        "model.embed does not give what MeanGate gives",
    )
    check_model(model)
    shown = explain(model, ids[0].tolist())["tokens"][0]["gate"]
    check(near(torch.tensor(shown), weights[0, 0]), "support.explain shows another gate")
