"""Answers to the tutorials' exercises. python tutorials/answers.py 07 runs those of tutorial 07."""

import math
import re
import sys
from collections import Counter

import course
import numpy as np
import torch
import torch.nn.functional as F

import mhf
import train

# 07 · A growing vocabulary


def answer_07_1():
    """What do a million new tokens cost the standard model of the pair, and the largest one?

    One row of D each: 64 million and 2,048 million parameters. The MultiHashFormer: none. It
    stores H ids for each token, in the published format 8 bytes each, and nothing learns there.
    """
    config = mhf.Config(vocab_size=1024, hidden_size=64, num_hidden_layers=2, model="standard")
    model = mhf.Transformer(config)
    before = model.num_parameters()["total"]
    model.expand([b"one", b"two", b"three"])
    a_token = (model.num_parameters()["total"] - before) // 3
    million = [10**6 * D for D in (a_token, mhf.PRESETS["3b"]["hidden_size"])]
    bytes_of_ids = 10**6 * 4 * torch.long.itemsize
    assert million == [64_000_000, 2_048_000_000] and bytes_of_ids == 32_000_000
    return million, bytes_of_ids


def answer_07_2():
    """What becomes of the mass of new tokens at τ = 1 and τ = 2?

    It is smaller at 1 and larger at 2. τ divides all differences of scores: the larger, the more
    even the distribution, and the new tokens are among the many with low scores.
    """
    model, tokenizer = course.shipped()
    text, V = "\n".join(course.django("ar")), len(tokenizer)
    bigger = course.extended(tokenizer, text, 512)
    model.expand([bigger.token_bytes(i) for i in range(V, len(bigger))])
    ids = torch.tensor(course.corpus().held_out[:512].astype(int)).view(2, 256)  # (N, T)
    scores = model.scores(ids)  # (N, T, V + 512)
    mass = [(scores / t).softmax(-1)[..., V:].sum(-1).mean().item() for t in (1, 1.24, 2)]
    assert mass[0] < mass[1] < mass[2]
    return mass


def answer_07_3():
    """The mass of new tokens after 20 and 100 steps, and without training?

    Without training less than a tenth: with tied weights and an adapter that starts as the identity
    the model expects the token just read to come again. What it leaves for others is shared
    evenly, a third of it for the new third of the vocabulary. After 20 and 100 steps the repeating
    is unlearned, and the newcomers have about their share, or more. The shipped model, after
    thousands of steps, gives them a fifth of it.
    """
    corpus = course.corpus("bpe:1024")
    old, text = corpus.tokenizer, "\n".join(course.django("ar") + course.django("hi"))
    grown = course.extended(old, text, 512)
    ids = torch.tensor(corpus.held_out[:1024].astype(int)).view(8, 128)  # (N, T)
    shape = dict(num_hidden_layers=2, hidden_size=64, intermediate_size=192, bottle_neck_dim=32)
    start = dict(adapter_init="identity", table_initializer_range=0.08, objective="exact")
    ends = dict(vocab_size=1024, max_position_embeddings=128, pad_token_id=old.eot)
    mass = {}
    for steps in (0, 20, 100):
        torch.manual_seed(0)
        model = train.build_model(mhf.Config(num_buckets=256, **shape, **start, **ends), old)
        for _ in course.fit(model, corpus.training, steps, learning_rate=4e-3):
            pass
        with torch.no_grad():
            model.expand([grown.token_bytes(i) for i in range(len(old), len(grown))])
            mass[steps] = model.log_probs(ids)[..., len(old) :].exp().sum(-1).mean().item()
            if not steps:  # how likely is the token just read to come again?
                log_p = model.log_probs(ids)  # (N, T, V + 512)
                again = log_p.gather(-1, ids.unsqueeze(-1)).exp().mean().item()
    assert again > 0.5 and abs(mass[0] / (1 - again) - 1 / 3) < 0.08
    assert mass[0] < 0.2 and all(0.2 < mass[steps] < 0.6 for steps in (20, 100))
    return mass, again


# 08 · Rare words


def answer_08_1():
    """How many pairs tell a correlation of 0.32 from 0, and from 0.22, with two standard errors?

    2 / √(n − 3) = 0.32 gives 43 pairs. The difference from 0.22 in another list has the error
    √2 / √(n − 3) = 0.05, so 803 pairs in each list: more than Shakespeare knew of either.
    """
    pairs = [math.ceil(3 + (2 / 0.32) ** 2), math.ceil(3 + 2 * (2 / 0.10) ** 2)]
    assert pairs == [43, 803]
    return pairs


def answer_08_2():
    """Does the share of plurals that are nearer go up if "the" stands before each word?

    By less than a point, at the penultimate layer: no change that counts. What "the" adds to all
    states alike, centring takes away again.
    """
    model, tokenizer = course.shipped()
    text = tokenizer.decode(course.corpus().training[:])
    counts = Counter(word.lower() for word in re.findall(r"[^\W\d_]+", text))
    known = {w for w, n in counts.items() if n >= 5 and len(tokenizer.encode(" " + w)) == 1}
    plurals = [(w, w + "s") for w in counts if {w, w + "s"} <= known and len(w) > 2]

    @torch.no_grad()
    def share(before):
        start = tokenizer.encode(before)
        states = []
        for words in zip(*plurals):
            ids = torch.tensor([[*start, *tokenizer.encode(" " + w)] for w in words])  # (W, T)
            states.append(model(ids, return_layers=True)[1][-2][:, -1])  # (W, D)
        mean = torch.cat(states).mean(0)  # (D,)
        one, many = (F.normalize(s - mean, dim=-1) for s in states)  # (W, D)
        cosine = one @ many.T  # (W, W)
        return (cosine.diag().unsqueeze(-1) > cosine).float().mean().item()

    shares = share(""), share(" the")
    assert shares[0] > 0.7 and abs(shares[1] - shares[0]) < 0.04
    return shares


def answer_08_3():
    """Do words that share a token look alike for that reason alone?

    Yes. In an untrained model words that share one of their two tokens have a cosine of about a
    half at the input, those that share none about 0: half of the mean vector is the same. So
    likeness of words of several tokens may be spelling, not meaning.
    """
    model, tokenizer = course.shipped()
    torch.manual_seed(0)
    untrained = mhf.MultiHashFormer(model.config, model.signatures).eval()
    text = tokenizer.decode(course.corpus().training[: 2**18])
    counts = Counter(word.lower() for word in re.findall(r"[^\W\d_]+", text))
    words = [w for w in counts if len(tokenizer.encode(" " + w)) == 2][:400]
    states = course.word_states(untrained, tokenizer, words)["input"]  # (W, D)
    unit = F.normalize(states - states.mean(0), dim=-1)  # (W, D)
    tokens = [set(tokenizer.encode(" " + w)) for w in words]
    cosine = unit @ unit.T  # (W, W)
    found = {True: [], False: []}
    for i in range(len(words)):
        for j in range(i):
            found[bool(tokens[i] & tokens[j])].append(cosine[i, j].item())
    sharing, other = np.mean(found[True]), np.mean(found[False])
    assert sharing > 0.3 and abs(other) < 0.05
    return float(sharing), float(other)


# 09 · Evaluation


def answer_09_1():
    """The standard error of the difference of 30 % and 32 % of 1000 questions; how many for two?

    √(0.3 · 0.7 / 1000 + 0.32 · 0.68 / 1000) is 0.0207: the difference of 0.02 is not even one
    standard error. Two of them need 4,276 questions. On the same questions the answers are not
    independent, and fewer will do.
    """
    variance = 0.3 * 0.7 + 0.32 * 0.68
    error, questions = math.sqrt(variance / 1000), math.ceil(variance * (2 / 0.02) ** 2)
    assert abs(error - 0.0207) < 1e-4 and questions == 4276
    return error, questions


@torch.no_grad()
def losses(model, ids, starts, T=256):
    """−log P of the T tokens behind each start (windows, T)."""
    rows = []
    for x, y in zip(*train.windows(ids, starts, T)):  # (T,), (T,)
        log_p = model.log_probs(x.unsqueeze(0))[0]  # (T, V)
        rows.append(-log_p.gather(-1, y.unsqueeze(-1))[:, 0])  # (T,)
    return torch.stack(rows).numpy()


def answer_09_2():
    """Measured on the second half of each window only: the loss, and a comparison?

    The first four tokens of a window cost half a nat more than the mean of all. But they are few,
    so that the loss of the second halves is hardly lower than that of whole windows: this model
    makes little of a long context. The comparison with the rounded model hardly changes. Say how
    it was measured, and do the same for both.
    """
    model, _ = course.shipped()
    ids, windows = course.corpus().held_out[:], np.arange(0, 160, 8) * 256
    start = losses(model, ids, np.arange(299) * 256, 4).mean()
    first = losses(model, ids, windows)  # (windows, T)
    for p in model.parameters():
        if p.dim() == 2:
            step = p.abs().amax(-1, keepdim=True) / 15
            p.copy_((p / step).round() * step)
    second, half = losses(model, ids, windows), first.shape[1] // 2
    whole, late = first.mean(), first[:, half:].mean()
    costs = (second - first).mean(), (second - first)[:, half:].mean()
    assert start > whole + 0.3 and abs(whole - late) < 0.1 and abs(costs[0] - costs[1]) < 0.03
    return float(start), float(whole), float(late), [float(c) for c in costs]


def answer_09_3():
    """Multiple choice with wrong lines from the same scene: how much accuracy is left?

    It falls, of 100 items by 8, which is not beyond its error, and stays well above the quarter
    that luck gives. So the gain does not only tell the scene by its
    people and things: lines of the same scene have these, too. A surer answer needs more items.
    """
    model, tokenizer = course.shipped()
    lines = tokenizer.decode(course.corpus().held_out[:]).split("\n")
    lines = [line.strip() for line in lines]
    spoken = [i for i, line in enumerate(lines) if len(line) > 15 and line[0] not in "*_#"]
    known, new_line = set(spoken), tokenizer.encode("  \n")

    @torch.no_grad()
    def log_p(context, line):
        ids, answer = [*context, *line], torch.tensor(line)
        states = model(torch.tensor([ids[:-1]]))[0, -len(line) :]  # (n, D)
        scores = model.token_scores(states) / model.config.calibration  # (n, V)
        return scores.log_softmax(-1).gather(-1, answer.unsqueeze(-1)).sum().item()

    def is_right(i, others):
        context = tokenizer.encode("  \n".join(lines[i - 3 : i]) + "  \n")
        choices = [tokenizer.encode(lines[j]) for j in (i, *others)]
        gains = [log_p(context, c) - log_p(new_line, c) for c in choices]
        return max(gains) == gains[0]

    rng, right = np.random.default_rng(0), {"elsewhere": [], "the same scene": []}
    places = [i for i in spoken if known.issuperset(range(i - 3, i))]
    for i in rng.choice(places, 100, replace=False):
        near = [j for j in spoken if 5 <= abs(j - i) <= 30]
        far = [j for j in spoken if abs(j - i) > 50]
        for name, others in (("elsewhere", far), ("the same scene", near)):
            right[name].append(is_right(i, rng.choice(others, 3, replace=False)))
    shares = {name: float(np.mean(r)) for name, r in right.items()}
    assert shares["elsewhere"] > 0.4 and 0.3 < shares["the same scene"] < 0.6
    return shares


def main(argv):
    """Run the answers whose number starts with the argument, or all."""
    prefix = "answer_" + (argv[0] if argv else "")
    for name, answer in list(globals().items()):
        if name.startswith(prefix) and callable(answer):
            print(f"{name}: {answer.__doc__.strip()}\n    -> {answer()}\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
