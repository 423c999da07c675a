"""Answers to the exercises: computed, checked, and said in words.

python tutorials/answers.py           all of them
python tutorials/answers.py 04        those of tutorial 04
"""

import sys

import course  # isort: skip
import contextlib
import math

import torch
import torch.nn.functional as F
from torch import nn

import mhf
import train

# 04 · The cascade


def answer_04_1():
    """How many parameters have the mixers of the paper's 1B model, and which share is it?

    Each of the H−1 mixers has 2D·Z + Z + Z·D + D, together 1.19 million: 0.1% of 1.15 billion.
    The mixers grow with D, the blocks with D²: the larger the model, the less the cascade weighs.
    """
    config = mhf.Config.preset("1b")
    H, D, Z = config.num_hashes, config.hidden_size, config.bottle_neck_dim
    with torch.device("meta"):  # shapes without memory
        mixers = mhf.CascadeDecoder(config)
        blocks = mhf.Backbone(config, H * config.num_buckets)
    count = (H - 1) * (2 * D * Z + Z + Z * D + D)
    assert count == sum(p.numel() for p in mixers.parameters())
    share = count / (count + sum(p.numel() for p in blocks.parameters()))  # without the gate
    assert 0.0010 < share < 0.0011
    return {"parameters": count, "share": share}


@torch.no_grad()
def answer_04_2():
    """Give the soft embedding the scale 1/√D, in the trained model: what happens?

    Each function tells less, and the ids after the first cost up to an eighth of a bit more. The
    token does not suffer: its perplexity even falls a little. What the soft embedding says is not
    what the token's probability rests on.
    """
    model, _ = course.shipped()
    x, y = train.batch(course.corpus().held_out, seed=0, step=0, rows=8, length=256)
    h, targets = model(x).flatten(0, 1), y.flatten()  # (M, D), (M,)
    ids = model.model.hash_map[targets]  # (M, H)

    def usual(c, E, target=None, last=False):
        o, loss, e = mhf.predict(c, E, target, last)
        return o, loss, None if last else (o / c.shape[-1] ** 0.5).softmax(-1) @ E

    found = {}
    for name, predict in (("scale 1", mhf.predict), ("scale 1/√D", usual)):
        steps = list(model.hash_head.steps(h, model.table, ids, predict=predict))
        bits = [loss.mean().item() / math.log(2) for _, loss, _ in steps]
        columns = torch.stack([o for o, _, _ in steps], 1).log_softmax(-1).flatten(1).T
        scores = model.sum_over_signatures(columns.contiguous())  # (M, V)
        perplexity = F.cross_entropy(scores / model.config.calibration, targets).exp().item()
        found[name] = {"bits of the ids": bits, "perplexity of the token": perplexity}
    one, other = found.values()
    more = [b - a for a, b in zip(one["bits of the ids"], other["bits of the ids"])]
    assert more[0] == 0 and 0.1 < more[1] < 0.15 and all(m > 0 for m in more[1:])
    assert -4 < other["perplexity of the token"] - one["perplexity of the token"] < 0
    return found


def answer_04_3():
    """Train a small model without mixers from the start: what is the cascade worth?

    After 60 steps nothing: both have a perplexity of about 300, the one without is a little ahead.
    Early in training every function learns from h directly. Whether the mixers pay later takes
    longer runs, with several seeds, to say.
    """

    class Nothing(nn.Module):
        def forward(self, both):  # (..., 2D) -> (..., D)
            return torch.zeros_like(both[..., : both.shape[-1] // 2])

    corpus, found = course.corpus("bpe:1024"), {}
    for name in ("with mixers", "without"):
        model = course.small(corpus.tokenizer)
        if name == "without":
            model.hash_head.cascade_mixer = nn.ModuleList(Nothing() for _ in range(3))
        list(course.fit(model, corpus.training, 60, learning_rate=3e-3, objective="joint"))
        sizes = torch.ones(len(corpus.tokenizer))
        measured = train.evaluate(model, corpus.held_out, sizes, contextlib.nullcontext, 8192)
        found[name] = measured["perplexity"]
    assert abs(math.log(found["with mixers"] / found["without"])) < 0.1
    return found


# 05 · The objective


@torch.no_grad()
def answer_05_1():
    """What do the objectives cost a model that knows nothing (H 4, B 2048, V 8192)?

    independent: H ln B = 30.5 nats; exact: ln V = 9.01; joint: 9.01 + 0.25 · 30.5 / 4 = 10.92. The
    valid mass is V / B^H = 4.7e-10, since each signature has the same probability.
    """
    model, _ = course.shipped()
    H, B, V = model.config.num_hashes, model.config.num_buckets, model.config.vocab_size
    model.model.embed_tokens.weight.zero_()  # all logits are 0
    ids = torch.tensor([[1, 2, 3]])
    found = {name: model.loss(ids, ids, name).item() for name in mhf.OBJECTIVES}
    assert abs(found["independent"] - H * math.log(B)) < 1e-3
    assert abs(found["exact"] - math.log(V)) < 1e-3
    assert abs(found["joint"] - 10.92) < 0.01
    found["valid mass"] = model.valid_mass(ids).mean().item()
    assert abs(found["valid mass"] * B**H / V - 1) < 1e-3
    return found


def answer_05_2():
    """Train `joint` with λ = 4 instead of 0.25: what becomes of perplexity, τ and valid mass?

    It moves towards `independent`: after 60 steps the valid mass is several times larger, τ 1.4,
    and the perplexity worse. λ is a price: what the single functions gain, the token pays.
    """
    corpus, found = course.corpus("bpe:1024"), {}
    for weight in (0.25, 4.0):
        model = course.small(corpus.tokenizer, objective="joint", joint_weight=weight)
        list(course.fit(model, corpus.training, 60, learning_rate=3e-3))
        sizes = torch.ones(len(corpus.tokenizer))
        measured = train.evaluate(model, corpus.held_out, sizes, contextlib.nullcontext, 8192)
        found[weight] = {name: measured[name] for name in ("perplexity", "tau", "valid_mass")}
    small, large = found.values()
    assert large["valid_mass"] > 3 * small["valid_mass"] and large["tau"] > small["tau"]
    assert large["perplexity"] > small["perplexity"]
    return found


def answer_05_3():
    """Has H = 2 with B = 1024, trained with `independent`, a τ below 2?

    Yes: about 1.7 after 80 steps, against 3 for H = 4. Two functions count the evidence twice; and
    here, too, the bucket mates keep it below H.
    """
    corpus = course.corpus("bpe:1024")
    model = course.small(corpus.tokenizer, num_hashes=2, num_buckets=1024)
    list(course.fit(model, corpus.training, 80, learning_rate=3e-3, objective="independent"))
    sizes = torch.ones(len(corpus.tokenizer))
    measured = train.evaluate(model, corpus.held_out, sizes, contextlib.nullcontext, 8192)
    assert 1.4 < measured["tau"] < 2
    return {"tau": measured["tau"], "perplexity": measured["perplexity"]}


# 06 · Inference


def answer_06_1():
    """True probabilities 1/2, 1/4, 1/4; H = 4, learned perfectly, no bucket mates: at τ = 1?

    The scores are 4 log p, so P is p⁴ renormalised: 16/18, 1/18, 1/18, that is 0.889, 0.056, 0.056.
    τ = H = 4 makes them true again.
    """
    scores = 4 * torch.tensor([0.5, 0.25, 0.25]).log()  # (V,)
    sharp = scores.softmax(0)
    torch.testing.assert_close(sharp, torch.tensor([16, 1, 1]) / 18)
    torch.testing.assert_close((scores / 4).softmax(0), torch.tensor([0.5, 0.25, 0.25]))
    return sharp.tolist()


@torch.no_grad()
def answer_06_2():
    """How many tokens does top-p 0.9 leave, at temperature 1 and 1.2? And top-k 40?

    At temperature 1 about 760 on average and 3,100 at most, but a single one at 8% of the
    positions; at 1.2 twice as many, because temperature comes first and fattens the tail. Top-k 40
    leaves 40 always: far fewer where the model is unsure, 39 too many where it is sure.
    """
    model, _ = course.shipped()
    x, _ = train.batch(course.corpus().held_out, seed=0, step=0, rows=4, length=256)
    logits = model.log_probs(x).flatten(0, 1)  # (M, V)
    found = {}
    for temperature in (1.0, 1.2):
        weights, _ = mhf.sampling_weights(logits, temperature, top_p=0.9)
        kept = (weights > 0).sum(-1)  # (M,)
        found[temperature] = {"mean": kept.float().mean().item(), "most": kept.max().item()}
        found[temperature]["one token"] = (kept == 1).float().mean().item()
    assert abs(found[1.0]["mean"] - 760) < 40 and abs(found[1.0]["one token"] - 0.08) < 0.01
    assert 1.8 < found[1.2]["mean"] / found[1.0]["mean"] < 2.3
    return found


@torch.no_grad()
def answer_06_3():
    """One τ for the surer half of the positions, one for the other: which is larger, and why?

    The surer half wants the larger τ. There the true token is likely, it outweighs its bucket
    mates, and its score grows like H log p (slope 4 in tutorial 05). Where all tokens are unlikely,
    mates weigh more, the slope is smaller, and so is the sharpening that τ repairs.
    """
    corpus = course.corpus("bpe:1024")
    model = course.small(corpus.tokenizer, objective="independent")
    with torch.enable_grad():
        list(course.fit(model, corpus.training, 100, learning_rate=3e-3))
    x, y = train.batch(corpus.held_out, 1, 0, 64, 128)
    scores, targets = model.scores(x).flatten(0, 1), y.flatten()  # (M, V), (M,)
    tau = train.fit_calibration(scores, targets)
    confidence = (scores / tau).softmax(-1).amax(-1)  # (M,)
    sure = confidence > confidence.median()
    found = {"all": tau}
    for name, half in (("surer half", sure), ("other half", ~sure)):
        found[name] = train.fit_calibration(scores[half], targets[half])
    assert found["surer half"] > found["all"] > found["other half"]
    return found


# ---------------------------------------------------------------------------------------------


def main():
    start = "answer_" + "".join(sys.argv[1:2])
    for name, answer in list(globals().items()):
        if name.startswith("answer_") and name.startswith(start):
            print(f"{name}: {answer.__doc__.rstrip()}\n    = {answer()}\n")


if __name__ == "__main__":
    main()
