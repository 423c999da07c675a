"""Grader of assignment 3: python -m pytest tutorials/assignments/grade_no_mixer.py"""

import no_mixer
import torch
from grading import check, check_model, graded, near, random, tiny_batch, tiny_config, tiny_model

import mhf
from support.explain import explain


def parts(H=3):
    """A decoder, states h (M, D) and a table (H, B, D); M = 10, B = 7, D = 8."""
    decoder = no_mixer.NoMixer(tiny_config(H))
    with torch.no_grad():
        for p in decoder.parameters():  # so that forgotten ones show
            p.copy_(random(*p.shape, seed=2))
    return decoder, random(10, 8), random(H, 7, 8, seed=1)


def alone(h, E):
    """What a cascade of one function, which has no mixer, makes of h: (M, B)."""
    return mhf.CascadeDecoder(tiny_config(1))(h, E.unsqueeze(0))[..., 0, :]


@graded
def test_there_are_no_parameters():
    decoder = no_mixer.NoMixer(tiny_config())
    check(isinstance(decoder, mhf.CascadeDecoder), "NoMixer does not derive from CascadeDecoder")
    names = [name for name, _ in decoder.named_parameters()]
    check(not names, f"without mixers there is nothing to learn, but these are there: {names}")


@graded
def test_logits():
    for H in (1, 2, 4):
        decoder, h, table = parts(H)
        steps = list(decoder.steps(h, table))
        check(len(steps) == H, f"steps yields {len(steps)} predictions with H = {H}")
        for j, (o, _) in enumerate(steps):
            check(near(o, alone(h, table[j])), f"o_j of function {j} is not what h and E_j give")
        shape = tuple(decoder(h.view(2, 5, 8), table).shape)
        check(shape == (2, 5, H, 7), f"forward of states (2, 5, 8) gives {shape}")


@graded
def test_functions_do_not_hear_of_each_other():
    decoder, h, table = parts()
    before, changed = decoder(h, table), table.detach().clone()
    changed[0] = changed[0].flip(0) * 3
    after = decoder(h, changed)
    check(
        near(before[..., 1:, :], after[..., 1:, :]),
        "other rows of function 0 change what functions 1 and 2 predict",
    )
    forced = torch.stack([o for o, _ in decoder.steps(h, table, {0: 2})], dim=-2)
    check(near(before, forced), "force={0: 2} changes what the functions predict")


@graded
def test_gradients():
    decoder, h, table = parts()
    for j, (o, _) in enumerate(decoder.steps(h, table)):
        check(o.requires_grad, f"no gradient can flow through o_j of function {j}")
        how = {"retain_graph": True, "allow_unused": True}
        dh, dE = torch.autograd.grad(o.square().sum(), (h, table), **how)
        check(dh is not None and dh.any(), f"no gradient of function {j} reaches the state h")
        check(dE is not None, f"no gradient of function {j} reaches the table")
        touched = [i for i in range(3) if dE[i].abs().sum() > 0]
        check(touched == [j], f"o_j of function {j} has gradients for the rows of {touched}")


@graded
def test_in_the_model():
    for H in (1, 3):
        model, (ids, _) = tiny_model({"CascadeDecoder": no_mixer.NoMixer}, H), tiny_batch()
        check_model(model)
        functions = explain(model, ids[0].tolist())["functions"]
        check(len(functions) == H, "support.explain misses functions")
        check(len(list(model.generate(ids[0], 4, seed=0))) == 4, "model.generate stops early")
