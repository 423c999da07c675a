"""How good is a model? Perplexity, bits per byte, accuracy, and the calibrating temperature."""

import math

import numpy as np
import torch
import torch.nn.functional as F

from support.data import windows
from support.runs import MEASURES


def fit_calibration(scores, targets):
    """The temperature with which softmax(scores / temperature) fits the targets best. The mean
    loss is convex in beta = 1 / temperature: Newton's method, in bounded steps, finds the best."""
    scores = (scores - scores.amax(-1, keepdim=True)).clamp(min=-1e4)  # -inf would give nan below
    target_scores = scores.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    beta = 1.0
    for _ in range(30):
        p = (beta * scores).softmax(-1)
        mean = (p * scores).sum(-1)
        slope = (mean - target_scores).mean().item()
        curvature = ((p * scores.square()).sum(-1) - mean.square()).mean().item()
        step = slope / max(curvature, 1e-12)
        beta = min(max(beta - step, beta / 2, 1e-3), beta * 2, 1e3)
        if abs(step) < 1e-5 * beta:
            break
    return 1 / beta


def share_right(scores, targets):
    """1 where the target scores highest, else 0; k tokens that share the highest score get 1/k."""
    best = scores == scores.amax(-1, keepdim=True)
    return best.gather(-1, targets.unsqueeze(-1)).squeeze(-1) / best.sum(-1)


def token_sizes(tokenizer, vocab_size=0):
    """The number of bytes that every token adds to a text (V,); 0 for ids beyond the tokenizer."""
    sizes = [len(tokenizer.token_bytes(i) or b"") for i in range(len(tokenizer))]
    return torch.tensor(sizes + [0] * (vocab_size - len(sizes)))


@torch.no_grad()
def evaluate(model, ids, token_sizes, autocast, max_tokens=None, tau=None):
    """Measure a model on windows that are spread evenly over held-out ids. Every other window fits
    the calibration, unless tau is given; the rest is measured. Standard: valid_mass is nan."""
    config, T = model.config, model.config.max_position_embeddings
    count = max(2, min(max_tokens or len(ids), len(ids) - 1) // T)
    starts = np.linspace(0, len(ids) - 1 - T, count).astype(int)

    def read(i):  # states (T, D), scores (T, V) and targets (T,) of a window
        x, y = (part.to(model.device) for part in windows(ids, starts[i : i + 1], T))
        h = model(x)[0]
        return h, model.token_scores(h), y[0]

    distinct = list(model.signatures.owner.values()) if config.model == "mhf" else []
    sums = torch.zeros(5, dtype=torch.float64)
    with autocast():
        if tau is None:
            room = max(1, 2**25 // (config.vocab_size * T))  # windows whose scores fit in memory
            chosen = range(0, count, 2)[:: math.ceil(count / 2 / room)]
            scores, targets = zip(*(read(i)[1:] for i in chosen))
            tau = fit_calibration(torch.cat(scores), torch.cat(targets))
        for i in range(1, count, 2):
            h, scores, targets = read(i)
            objective = model.loss_per_position(h, targets).sum()
            nll = F.cross_entropy(scores / tau, targets, reduction="sum")
            right = share_right(scores, targets).sum()
            mass = scores[:, distinct].exp().sum() if distinct else math.nan
            sums += torch.tensor([objective, nll, right, mass, token_sizes[targets.cpu()].sum()])
    objective, nll, top1, mass, size = (sums / len(range(1, count, 2)) / T).tolist()
    found = objective, math.exp(min(nll, 700)), tau, top1, mass, nll / math.log(2) / size
    return dict(zip(MEASURES, found))


def summary(found):
    """What evaluate found, in words; valid mass where it means something."""
    mass = f", valid mass {found['valid_mass']:.2g}" if found["valid_mass"] > 1e-4 else ""
    return (f"perplexity {found['perplexity']:.1f} (calibration {found['tau']:.2f}), top-1 "
            f"{found['top1']:.3f}, {found['bits_per_byte']:.3f} bits per byte{mass}")  # fmt: skip
