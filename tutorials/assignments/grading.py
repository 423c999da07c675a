"""What the four graders share: tiny models, and failures of one sentence."""

import functools
from unittest import mock

import experiment  # noqa: F401  (finds mhf.py)
import pytest
import torch

import mhf

TOKENS = [b"<pad>", *(b"token %d" % i for i in range(1, 30))]


def check(right, message):
    """Fail with the message, and without a traceback, unless `right`."""
    if not right:
        pytest.fail(message, pytrace=False)


def graded(test):
    """Where the student has written nothing yet, the test fails with just these words."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        try:
            return test(*args, **kwargs)
        except NotImplementedError as error:
            unwritten = str(error)
            if not unwritten.startswith("not written yet"):
                raise
        check(False, unwritten)

    return run


def near(a, b):
    """Equal shapes and values, within what float32 loses on these sizes."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def random(*shape, seed=0, scale=1.0):
    """Standard normal numbers times scale, always the same, that require gradients."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return values.requires_grad_()


def tiny_config(H=3, B=7, D=8):
    return mhf.Config(
        hidden_size=D,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_hashes=H,
        num_buckets=B,
        bottle_neck_dim=4,
        max_position_embeddings=16,
        initializer_range=0.3,  # large: no softmax is flat
    )


def tiny_model(changes, H=3):
    """A random MultiHashFormer of 30 tokens in which `changes` replace parts of mhf."""
    torch.manual_seed(0)
    config = tiny_config(H)
    with mock.patch.multiple(mhf, **changes):
        table = mhf.SignatureTable(H, config.num_buckets)
        table.extend(TOKENS, pad_id=0)
        return mhf.MultiHashFormer(config, table)


def tiny_batch():
    """Inputs and targets (2, 6), ids of the 30 tokens."""
    ids = torch.randint(30, (2, 7), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def check_model(model):
    """Every parameter gets a gradient, and the probabilities of all tokens sum to 1."""
    ids, targets = tiny_batch()
    for objective in "independent", "exact", "joint":
        model.zero_grad()
        model.loss(ids, targets, objective).backward()
        idle = [name for name, p in model.named_parameters() if p.grad is None]
        check(not idle, f"{objective} objective: no gradient reaches {idle}")
    total = model.log_probs(ids).exp().sum(-1)
    check(near(total, torch.ones(2, 6)), "the probabilities of the tokens do not sum to 1")
