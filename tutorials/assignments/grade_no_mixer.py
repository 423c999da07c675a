"""Grader of assignment 3: python -m pytest tutorials/assignments/grade_no_mixer.py"""

import no_mixer
import torch
from grading import check, graded, near, tiny_batch, tiny_config, tiny_model

import mhf

MODEL = {"CascadeDecoder": no_mixer.NoMixer}


def parts(H=3, B=7, D=8):
    """A decoder, states h (M, D), a table (H, B, D), targets (M, H); M = 10."""
    decoder, generator = no_mixer.NoMixer(tiny_config(H)), torch.Generator().manual_seed(0)
    h, table = (torch.randn(*s, generator=generator) for s in ((10, D), (H, B, D)))
    with torch.no_grad():
        for p in decoder.parameters():  # so that forgotten ones show
            p.normal_(generator=generator)
    targets = torch.randint(B, (10, H), generator=generator)
    return decoder, h.requires_grad_(), table.requires_grad_(), targets


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
def test_logits_and_losses():
    for H in (1, 2, 4):
        decoder, h, table, targets = parts(H)
        steps = list(decoder.steps(h, table, targets))
        check(len(steps) == H, f"steps yields {len(steps)} predictions with H = {H}")
        for j, (o, loss, _) in enumerate(steps):
            check(near(o, alone(h, table[j])), f"o_j of function {j} is not what h and E_j give")
            _, wanted, _ = mhf.predict(h, table[j], targets[..., j], True)
            check(
                loss is not None and near(loss, wanted),
                f"the loss of function {j} is not the cross-entropy at its own target",
            )
        losses = [loss for _, loss, _ in decoder.steps(h, table)]
        check(losses == [None] * H, "without targets every loss is None")
        shape = tuple(decoder(h.view(2, 5, 8), table).shape)
        check(shape == (2, 5, H, 7), f"forward of states (2, 5, 8) gives {shape}")


@graded
def test_functions_do_not_hear_of_each_other():
    decoder, h, table, _ = parts()
    before, changed = decoder(h, table), table.detach().clone()
    changed[0] = changed[0].flip(0) * 3
    after = decoder(h, changed)
    check(
        near(before[..., 1:, :], after[..., 1:, :]),
        "other rows of function 0 change what functions 1 and 2 predict",
    )
    forced = torch.stack([o for o, _, _ in decoder.steps(h, table, force={0: 2})], dim=-2)
    check(near(before, forced), "force={0: 2} changes what the functions predict")


@graded
def test_gradients():
    decoder, h, table, _ = parts()
    for j, (o, _, _) in enumerate(decoder.steps(h, table)):
        check(o.requires_grad, f"no gradient can flow through o_j of function {j}")
        how = {"retain_graph": True, "allow_unused": True}
        dh, dE = torch.autograd.grad(o.square().sum(), (h, table), **how)
        check(dh is not None and dh.any(), f"no gradient of function {j} reaches the state h")
        check(dE is not None, f"no gradient of function {j} reaches the table")
        touched = [i for i in range(3) if dE[i].abs().sum() > 0]
        check(touched == [j], f"o_j of function {j} has gradients for the rows of {touched}")


@graded
def test_steps_use_the_given_predict():
    decoder, h, table, targets = parts()
    calls = []

    def predict(c, E, target=None, last=False):
        calls.append((c, E, target))
        return mhf.predict(c, E, target, last)

    list(decoder.steps(h, table, targets, predict=predict))
    check(len(calls) == 3, f"of 3 functions {len(calls)} were predicted by the given `predict`")
    for j, (c, E, target) in enumerate(calls):
        check(
            near(c, h) and near(E, table[j]) and torch.equal(target, targets[..., j]),
            f"function {j}: `predict` was not given h, E_j and the function's target",
        )


@graded
def test_the_lean_head_agrees():
    model, (ids, targets) = tiny_model(MODEL), tiny_batch()
    for objective in mhf.OBJECTIVES:
        found = {}
        for head in mhf.HEADS:
            loss = model.loss(ids, targets, objective, head)
            weight = model.model.embed_tokens.weight
            found[head] = loss.detach(), torch.autograd.grad(loss, weight)[0]
        for what, a, b in zip(("loss", "gradient of the table"), found["plain"], found["lean"]):
            check(near(a, b), f"{objective} objective: the lean head has another {what}")


@graded
def test_in_the_model():
    for H in (1, 3):
        model, (ids, targets) = tiny_model(MODEL, H), tiny_batch()
        model.loss(ids, targets, "joint").backward()
        missing = [name for name, p in model.named_parameters() if p.grad is None]
        check(not missing, f"these parameters of the model get no gradient: {missing}")
        total = model.log_probs(ids).exp().sum(-1)
        check(near(total, torch.ones(2, 6)), "the probabilities of the tokens do not sum to 1")
        check(len(model.explain(ids[0])["functions"]) == H, "model.explain misses functions")
        check(len(list(model.generate(ids[0], 4, seed=0))) == 4, "model.generate stops early")
