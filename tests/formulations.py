"""What tests/benchmark.py runs: formulations of one loss, training steps, and FLOPs by formula.

    published  logits of all H functions stacked, a float32 copy, cross-entropy of each, all at once
    plain      mhf's head="plain"
    lean       mhf's head="lean"

bf16 is autocast over float32 parameters, as in train.py; for `published`, whose authors train so,
it is a model whose parameters are bfloat16.
"""

import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from measure import KINDS

import mhf
import train


def flops_per_token(model, length, causal=True):
    """FLOPs of a training step for each token, by formula, without recomputation.

    6 for each entry of a matrix that multiplies the token (2 forward, 4 backward): all of the
    blocks; standard: D·V; MHF: the gate's scorer for each of H rows, the adapter, D·B for the
    logits of every function and D·B for the soft embedding of all but the last, the mixers.
    Looking rows up counts nothing. Attention: 12·T·A·C a layer, half of that if causal.
    """
    c = model.config
    D, H, B, Z = c.hidden_size, c.num_hashes, c.num_buckets, c.bottle_neck_dim
    entries = sum(p.numel() for p in model.model.layers.parameters() if p.dim() == 2)
    if c.model == "standard":
        entries += D * c.vocab_size
    else:
        entries += H * (D * Z + Z) + D * D  # gate, adapter
        entries += (2 * H - 1) * D * B + (H - 1) * 3 * D * Z  # decoder
    attention = 12 * length * c.num_attention_heads * c.head_dim * c.num_hidden_layers
    return 6 * entries + attention / (2 if causal else 1)


def published(model, h, targets, objective="independent"):
    """The published formulation: states (M, D), targets (M,) -> Σ_j −log p_j, summed over M."""
    logits = model.hash_head(h, model.table).float()  # (M, H, B)
    ids = model.model.hash_map[targets]  # (M, H)
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum")


def plain(model, h, targets, objective):
    return model.nll(h, targets, objective).sum()


def lean(model, h, targets, objective):
    return mhf.lean_loss(model, h, targets, objective, torch.ones_like(targets, dtype=torch.bool))


FORMS = {"standard": plain, "published": published, "plain": plain, "lean": lean}


def autocast(device, precision):
    return torch.autocast(device.type, KINDS[precision], precision != "fp32")


def build(config, device):
    """A model with random weights, whose tokens are the numbers from 0."""
    torch.manual_seed(0)
    if config.model == "standard":
        with device:
            return mhf.Transformer(config)
    shape = config.num_hashes, config.num_buckets
    table = mhf.SignatureTable(*shape, allow_collisions=config.shares_signatures)
    table.extend([b"%d" % i for i in range(config.vocab_size)], pad_id=0)
    with device:
        return mhf.MultiHashFormer(config, table)


def drop_gradients(model):
    """Free all gradients; returns their bytes."""
    size = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    model.zero_grad(set_to_none=True)
    return size


def head_job(model, form, objective, positions, precision="fp32"):
    """Forward and backward of the loss of random states (positions, D)."""
    pure, device = (form, precision) == ("published", "bf16"), model.model.cos.device
    model = copy.deepcopy(model).bfloat16() if pure else model
    h = torch.randn(positions, model.config.hidden_size, device=device)
    h = (h.bfloat16() if pure else h).requires_grad_()
    targets = torch.randint(1, model.config.vocab_size, (positions,), device=device)

    def job():
        with autocast(device, "fp32" if pure else precision):
            total = FORMS[form](model, h, targets, objective)
        total.backward()
        h.grad = None
        return drop_gradients(model)

    return job


def head_config(D, B, **fields):
    return mhf.Config(
        hidden_size=D, num_buckets=B, num_hidden_layers=1, intermediate_size=8, **fields
    )


class Trainee:
    """A model with train.py's optimizer, whose moments are in place."""

    def __init__(self, model):
        self.model, self.settings = model, train.Settings()
        self.device = model.model.cos.device
        self.optimizer = train.make_optimizer(model, self.settings, self.device)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        self.optimizer.step()
        drop_gradients(model)
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-4

    def loss(self, form):
        """loss(ids, targets, objective), as train.accumulate wants it."""
        if form == "published":
            model = self.model
            return lambda x, y, _: published(model, model(x).flatten(0, 1), y.flatten()) / y.numel()
        return partial(self.model.loss, head="lean" if form == "lean" else "plain")

    def micro_batch(self, form, x, tokens=None):
        """Sequences at a time: all for published, else train.py's default or `tokens`."""
        N, T = x.shape
        about = SimpleNamespace(
            config=replace(self.model.config, max_position_embeddings=T), device=self.device
        )
        few = max(1, tokens // T) if tokens else train.Run.default_micro_batch(about)
        return N if form == "published" else min(N, few)

    def job(self, loss, objective, x, y, micro, precision):
        """One optimizer step as train.py makes it, `micro` sequences at a time."""
        model, optimizer = self.model, self.optimizer
        scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        cast = partial(autocast, self.device, precision)

        def job():
            train.accumulate(loss, x, y, objective, micro, cast, scaler)
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), self.settings.grad_clip)
            scaler.step(optimizer)
            scaler.update()
            return drop_gradients(model)

        return job
