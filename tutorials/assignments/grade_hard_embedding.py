"""Grader of assignment 4: python -m pytest tutorials/assignments/grade_hard_embedding.py"""

import hard_embedding
import torch
from grading import check, graded, near, tiny_batch, tiny_config, tiny_model

import mhf

MODEL = {"CascadeDecoder": hard_embedding.HardCascade}


def draw(*shape, seed=0, scale=1.0):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return values.requires_grad_()


def cascade(H=3):
    """A decoder with large mixers, states h (M, D), a table (H, B, D), targets (M, H); M = 10."""
    decoder, generator = hard_embedding.HardCascade(tiny_config(H)), torch.Generator()
    with torch.no_grad():
        for p in decoder.parameters():
            p.normal_(generator=generator.manual_seed(p.numel()))
    targets = torch.randint(7, (10, H), generator=generator.manual_seed(5))
    return decoder, draw(10, 8), draw(H, 7, 8, seed=1), targets


def logits(steps):
    return torch.stack([o for o, _, _ in steps], dim=-2)  # (M, H, B)


@graded
def test_logits_and_loss_are_unchanged():
    c, E, target = draw(10, 8), draw(7, 8, seed=1), torch.arange(10) % 7
    for given in (target, None):
        for last in (False, True):
            o, loss, e = hard_embedding.hard_predict(c, E, given, last)
            wanted_o, wanted_loss, _ = mhf.predict(c, E, given, last)
            check(near(o, wanted_o), "o is not E c")
            check((loss is None) == (given is None), "the loss is None exactly without a target")
            check(given is None or near(loss, wanted_loss), "the loss is not −log p[target]")
            check((e is None) == last, "e is None exactly at the last function")


@graded
def test_the_embedding_is_the_row_of_the_arg_max():
    for shape in ((2, 5), (4,)):
        c, E = draw(*shape, 8, seed=2), draw(7, 8, seed=3, scale=0.5)
        o, _, e = hard_embedding.hard_predict(c, E)
        check(e.shape == c.shape, f"e has the shape {tuple(e.shape)}, not {tuple(c.shape)}")
        distance = torch.cdist(e.reshape(-1, 8), E)  # (M, B)
        check(
            bool((distance.amin(-1) < 1e-4).all()),
            "e is no row of E but a mixture, as the soft embedding is",
        )
        chosen = distance.argmin(-1).view(shape)
        best = o.gather(-1, chosen.unsqueeze(-1))[..., 0]
        check(near(best, o.amax(-1)), "e is a row of E, but not of the most probable bucket")


@graded
def test_gradient_to_the_state():
    c, E, g = draw(2, 5, 8, seed=2), draw(7, 8, seed=3, scale=0.5), draw(2, 5, 8, seed=4).detach()
    _, _, e = hard_embedding.hard_predict(c, E.detach())
    check(
        e.requires_grad,
        "no gradient flows through the hard choice to the logits: arg max has none of its own",
    )
    (found,) = torch.autograd.grad((e * g).sum(), c)
    (soft,) = torch.autograd.grad((mhf.predict(c, E.detach())[2] * g).sum(), c)
    check(near(found, soft), "the gradient that reaches c through e is not that of the softmax")


@graded
def test_gradient_to_the_table():
    c, E, g = draw(4, 8, seed=2), draw(7, 8, seed=3, scale=0.5), draw(4, 8, seed=4).detach()
    o, _, e = hard_embedding.hard_predict(c, E)
    check(e.requires_grad, "no gradient reaches the table through e")
    (found,) = torch.autograd.grad((e * g).sum(), E)
    soft_o, _, soft_e = mhf.predict(c, E)
    (as_soft,) = torch.autograd.grad((soft_e * g).sum(), E)
    p, z = soft_o.softmax(-1), torch.nn.functional.one_hot(o.argmax(-1), 7).float()
    check(
        near(found, as_soft + (z - p).T @ g),
        "the gradient of E through e is wrong: as rows of zᵀ E only the chosen ones receive g, and "
        "as weights of o they receive what the soft embedding gives",
    )


@graded
def test_later_functions_see_the_row_and_nothing_else():
    decoder, h, table, targets = cascade()
    for given, mode in ((None, "at inference"), (targets, "in training")):
        before = logits(decoder.steps(h, table, given))
        moved = table.detach().clone()
        unused = [b for b in range(7) if b not in before[..., 0, :].argmax(-1)]
        check(bool(unused), "no bucket of function 0 is left unused")
        moved[0, unused] = moved[0, unused] * 0.9  # a smaller row does not become the largest
        after = logits(decoder.steps(h, moved, given))
        same = before[..., 0, :].argmax(-1) == after[..., 0, :].argmax(-1)  # (M,)
        check(
            near(before[same][:, 1:], after[same][:, 1:]),
            f"{mode}: rows that were not chosen by function 0 change what function 1 predicts",
        )
    check(near(decoder(h, table), before), "forward does not use the hard embedding")


@graded
def test_training_and_inference_are_one_path():
    decoder, h, table, targets = cascade()
    with_targets = logits(decoder.train().steps(h, table, targets))
    others = logits(decoder.train().steps(h, table, (targets + 3) % 7))
    check(near(with_targets, others), "the logits depend on the target: this is teacher forcing")
    without = logits(decoder.eval().steps(h, table))
    check(near(with_targets, without), "training and inference give different logits")


@graded
def test_force_still_works():
    decoder, h, table, _ = cascade()
    before = logits(decoder.steps(h, table))
    choice = before[..., 0, :].argmax(-1)  # (M,)
    for bucket in choice.unique().tolist():
        forced = logits(decoder.steps(h, table, force={0: bucket}))
        at = choice == bucket
        check(near(forced[at], before[at]), "force={0: its own choice} changes the prediction")
        check(not near(forced[~at], before[~at]), "force={0: another bucket} changes nothing")


@graded
def test_in_the_model():
    model, (ids, targets) = tiny_model(MODEL), tiny_batch()
    for objective in mhf.OBJECTIVES:
        model.zero_grad()
        model.loss(ids, targets, objective).backward()
        idle = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
        check(not idle, f"{objective} objective: no gradient reaches {idle}")
    total = model.log_probs(ids).exp().sum(-1)
    check(near(total, torch.ones(2, 6)), "the probabilities of the tokens do not sum to 1")
    h = model(ids).flatten(0, 1)
    inference = model.log_buckets(h).gather(-1, model.model.hash_map[targets.flatten()][..., None])
    check(
        near(-inference.sum((1, 2)), model.nll(h, targets.flatten(), "independent")),
        "the model trains on other probabilities than it predicts with",
    )
