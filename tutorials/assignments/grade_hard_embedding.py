"""Grader of assignment 4: python -m pytest tutorials/assignments/grade_hard_embedding.py"""

import pytest
import torch
from grading import check, check_model, graded, near, random, tiny_batch, tiny_config, tiny_model
from hard_embedding import hard_embedding

import mhf

soft_embedding = mhf.soft_embedding


@pytest.fixture(autouse=True)
def hard(monkeypatch):
    monkeypatch.setattr(mhf, "soft_embedding", hard_embedding)


@graded
def test_it_is_the_row_of_the_arg_max():
    for shape in ((2, 5), (4,), ()):
        o, E = random(*shape, 7, seed=2), random(7, 8, seed=3)
        e = hard_embedding(o, E)
        check(e.shape == (*shape, 8), f"of o {(*shape, 7)} comes e {tuple(e.shape)}")
        distance = torch.cdist(e.reshape(-1, 8), E)  # (M, B)
        check(
            bool((distance.amin(-1) < 1e-4).all()),
            "e is no row of E but a mixture, as the soft embedding is",
        )
        best = o.gather(-1, distance.argmin(-1).view(shape).unsqueeze(-1))[..., 0]
        check(near(best, o.amax(-1)), "e is a row of E, but not of the most probable bucket")


@graded
def test_gradient_to_the_logits():
    o, E, g = random(2, 5, 7, seed=2), random(7, 8, seed=3).detach(), random(2, 5, 8, seed=4)
    e = hard_embedding(o, E)
    check(
        e.requires_grad,
        "no gradient flows through the hard choice to the logits: arg max has none of its own",
    )
    (found,) = torch.autograd.grad((e * g).sum(), o)
    (wanted,) = torch.autograd.grad((soft_embedding(o, E) * g).sum(), o)
    check(near(found, wanted), "the gradient that reaches o is not that of the softmax")


@graded
def test_gradient_to_the_table():
    o, E, g = random(4, 7, seed=2).detach(), random(7, 8, seed=3), random(4, 8, seed=4)
    e = hard_embedding(o, E)
    check(e.requires_grad, "no gradient reaches the table through e")
    (found,) = torch.autograd.grad((e * g).sum(), E)
    z = torch.nn.functional.one_hot(o.argmax(-1), 7).float()
    check(
        near(found, z.T @ g),
        "the gradient of E is wrong: as rows of zᵀ E only the chosen ones receive g",
    )


@graded
def test_training_and_inference_are_one_path():
    o, E = random(10, 7, seed=2), random(7, 8, seed=3)
    training = hard_embedding(o, E)
    with torch.no_grad():
        inference = hard_embedding(o, E)
    check(near(training, inference), "training and inference hand on different rows")


@graded
def test_later_functions_see_the_row_and_nothing_else():
    decoder, h, table = mhf.CascadeDecoder(tiny_config()), random(10, 8), random(3, 7, 8, seed=1)
    before = decoder(h, table)  # (M, H, B)
    choice = before[:, 0].argmax(-1)  # (M,)
    for bucket in choice.unique().tolist():
        forced = torch.stack([o for o, _ in decoder.steps(h, table, {0: bucket})], dim=-2)
        at = choice == bucket
        check(near(forced[at], before[at]), "force={0: its own choice} changes the prediction")
        check(not near(forced[~at], before[~at]), "force={0: another bucket} changes nothing")


@graded
def test_in_the_model():
    model, (ids, targets) = tiny_model({"soft_embedding": hard_embedding}), tiny_batch()
    check_model(model)
    h, targets = model(ids).flatten(0, 1), targets.flatten()
    inference = model.bucket_log_probs(h).gather(-1, model.model.hash_map[targets][..., None])
    check(
        near(-inference.sum((1, 2)), model.loss_per_position(h, targets, "independent")),
        "the model trains on other probabilities than it predicts with",
    )
