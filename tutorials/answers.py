"""Answers to the exercises: computed, checked, and said in words.

python tutorials/answers.py           all of them
python tutorials/answers.py 04        those of tutorial 04
"""

import math
import sys
from types import SimpleNamespace
from unittest import mock

import course
import mmh3
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import mhf
from support.data import batch, windows
from support.evaluate import fit_calibration

# 01 · Signatures


def answer_01_1():
    """A million tokens, H = 3: from which B on is less than one equal pair expected?

    V² / (2 (B−1)³) < 1 needs B − 1 > (V² / 2)^(1/3), so B = 7,939. The table has 3 · 7,939 = 23,817
    rows for a million tokens: one row for 42 of them, in each function one for 126.
    """
    V = 1_000_000
    B = math.floor((V**2 / 2) ** (1 / 3)) + 2
    assert V**2 / (2 * (B - 1) ** 3) < 1 <= V**2 / (2 * (B - 2) ** 3)
    assert (B, 3 * B) == (7939, 23817)
    return B, 3 * B


def answer_01_2():
    """SignatureTable(2, 104), the tokens in the opposite order: what changes?

    Of two tokens the first keeps its hash and the second is re-hashed. So other tokens are
    re-hashed, and 63% of all signatures differ. The number of re-hashed tokens is nearly the same
    (3,204 and 3,208), and the guarantee holds: it does not depend on the order.
    """
    _, tokenizer = course.shipped()
    tokens = [t for t in tokenizer.hashed_bytes() if t != b"<|endoftext|>"]
    one, two = mhf.SignatureTable(2, 104), mhf.SignatureTable(2, 104)
    one.extend(tokens)
    two.extend(tokens[::-1])
    different = (one.ids != two.ids.flip(0)).any(-1).float().mean().item()
    for table in one, two:
        assert len(table.ids.unique(dim=0)) == len(tokens)
    assert (len(one.rehashed), len(two.rehashed)) == (3204, 3208) and abs(different - 0.63) < 0.01
    return len(one.rehashed), len(two.rehashed), different


def answer_01_3():
    """For which B = 2^8 … 2^16 has B − 1 a factor in common with 2^65 + 1, and does 3 matter?

    For the even powers: 33 at 2^10, 3 at the others; the odd powers have none. With a million words
    and the paper's B = 2^14 as many pairs share two ids as the formula says, within the scatter of
    2% or 3%: the factor 3 hardly matters, the factor 33 does.
    """
    factors = {2**n: math.gcd(2**65 + 1, 2**n - 1) for n in range(8, 17)}
    assert [B for B, factor in factors.items() if factor > 1] == [4**n for n in (4, 5, 6, 7, 8)]
    assert factors[1024] == 33
    V, B = 1_000_000, 2**14
    words = [f"word{i}".encode() for i in range(V)]
    one, two = (np.array([mmh3.hash128(w, s) % (B - 1) for w in words]) for s in (0, 1))
    _, size = np.unique(one * B + two, return_counts=True)
    ratio = float((size * (size - 1) // 2).sum() / (V**2 / (2 * (B - 1) ** 2)))
    assert abs(ratio - 1.01) < 0.01
    return factors, ratio


# 02 · The gated embedding


def answer_02_1():
    """D 768, H 4, B 16,384, Z 64: parameters of table, scorer, adapter; the V of a larger V × D?

    50,331,648 + 49,281 + 590,592 = 50,971,521. A V × D table is larger from V = 66,370 on.
    """
    D, H, B, Z = 768, 4, 16384, 64
    parts = H * B * D, Z * D + Z + Z + 1, D * D + D
    V = sum(parts) // D + 1
    gate = mhf.GatedEmbedding(mhf.Config.preset("100m"))
    assert sum(p.numel() for p in gate.parameters()) == parts[1] + parts[2]
    assert parts == (50331648, 49281, 590592) and (sum(parts), V) == (50971521, 66370)
    return parts, V


def answer_02_2():
    """The gate with softmax of k · s, k = 0.5, 1, 2, 4: is the trained k = 1 the best?

    Of these four it is, but 0.5 is hardly worse: the loss is flat towards the mean and steep
    towards a hard choice. A gate that leaves out rows loses what distinguishes the tokens of a
    bucket.
    """
    model, _ = course.shipped()
    held_out, combiner = course.corpus().held_out, model.model.combiner
    texts = windows(held_out, np.linspace(0, len(held_out) - 257, 24).astype(int), 256)
    found = {}
    for k in 0.5, 1, 2, 4:
        last = combiner.scorer[2]
        with mock.patch.object(last, "weight", torch.nn.Parameter(k * last.weight)):
            rows = [model.log_probs(x[None])[0].gather(1, y[:, None]) for x, y in zip(*texts)]
        found[k] = -torch.cat(rows).mean().item()
    assert found[0.5] < found[2] < found[4] and found[1] < found[2]
    return found


def answer_02_3():
    """Does the scorer read a row's length or its direction?

    The direction more than the length. With all rows of the same length the score follows the
    traffic nearly as well (rank correlation −0.83 instead of −0.89). If each row's direction gets
    another row's length, it follows the traffic of the direction (−0.74) more than that of the
    length (−0.31).
    """
    model, _ = course.shipped()
    seen = np.bincount(np.asarray(course.corpus().training[:]), minlength=8192)
    seen, ids = torch.from_numpy(seen).float(), model.model.hash_map
    busy = torch.stack([torch.zeros(2048).index_add(0, column, seen) for column in ids.T])  # (H, B)
    used = torch.stack([column.bincount(minlength=2048) > 0 for column in ids.T])
    used[:, 0] = False
    rows, traffic = model.table[used], busy[used].numpy()  # (rows, D)
    length, scorer = rows.norm(dim=-1, keepdim=True), model.model.combiner.scorer
    torch.manual_seed(0)
    other = torch.randperm(len(rows))
    exchanged, found = scorer(rows / length * length[other])[:, 0].numpy(), {}
    found["as it is"] = course.spearman(scorer(rows)[:, 0].numpy(), traffic)
    found["same length"] = course.spearman(scorer(rows / length)[:, 0].numpy(), traffic)
    found["exchanged, the direction's"] = course.spearman(exchanged, traffic)
    found["exchanged, the length's"] = course.spearman(exchanged, traffic[other.numpy()])
    for name, value in zip(found, (-0.89, -0.83, -0.74, -0.31)):
        assert abs(found[name] - value) < 0.03
    return found


# 03 · The backbone


def answer_03_1():
    """The shares of arithmetic of embedding, blocks, cascade for the preset 1b at T = 2,048.

    The blocks do 82%, the cascade 18%: the blocks grow with D² and with their number.
    """
    c, T = mhf.Config.preset("1b"), 2048
    D, H, B, Z, A, C = c.hidden_size, c.num_hashes, c.num_buckets, c.bottle_neck_dim, 16, 128
    with torch.device("meta"):
        block = mhf.Block(c)
    matrices = sum(p.numel() for p in block.parameters() if p.dim() == 2)
    blocks = c.num_hidden_layers * (2 * matrices + 4 * A * C * T // 2)
    cascade = 2 * (2 * H - 1) * B * D + 2 * (H - 1) * 3 * D * Z
    embedding = 2 * (H * (Z * D + Z) + D * D)
    total = embedding + blocks + cascade
    shares = {"embedding": embedding / total, "blocks": blocks / total, "cascade": cascade / total}
    assert abs(shares["blocks"] - 0.82) < 0.01 and abs(shares["cascade"] - 0.18) < 0.01
    return shares


def answer_03_2():
    """A text of 100 tokens that begins at position 100: what happens to the states?

    Nothing beyond rounding: attention sees differences of positions only.
    """
    model, _ = course.shipped()
    ids = torch.from_numpy(np.asarray(course.corpus().held_out[:100]).astype(np.int64))[None]
    # A cache that says 100 tokens were read, and hands none of them to attention.
    cache = SimpleNamespace(length=100, update=lambda layer, k, v: (k, v))
    difference = (model(ids, cache) - model(ids)).abs().max().item()
    assert difference < 1e-3
    return difference


def answer_03_3():
    """Does the model use what lies far back? The loss when each block sees n positions back.

    Hardly anything beyond 64 positions. If each block sees n earlier positions, the loss is 5.12
    nats for n = 1, 4.62 for 16, and for 64 only some thousandths more than the 4.58 of the whole
    window. (Through four blocks, information can come from 4n positions back. And a model that was
    trained with such a mask would do better.)
    """
    model, _ = course.shipped()
    held_out, attend = course.corpus().held_out, F.scaled_dot_product_attention
    texts = windows(held_out, np.linspace(0, len(held_out) - 257, 16).astype(int), 256)
    back, found = torch.arange(256)[:, None] - torch.arange(256), {}  # (T, T)
    for n in 1, 4, 16, 64, 255:

        def near(q, k, v, *_, mask=(back >= 0) & (back <= n), **__):
            return attend(q, k, v, attn_mask=mask, enable_gqa=True)

        with mock.patch.object(F, "scaled_dot_product_attention", near):
            rows = [model.log_probs(x[None])[0].gather(1, y[:, None]) for x, y in zip(*texts)]
        found[n] = -torch.cat(rows).mean().item()
    for n, value in (1, 5.12), (16, 4.62), (255, 4.58):
        assert abs(found[n] - value) < 0.02
    assert 0 < found[64] - found[255] < 0.02
    return found


# 04 · The cascade


def answer_04_1():
    """How many parameters do the mixers of the paper's 1B model have, and what share is that?

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
    x, y = batch(course.corpus().held_out, seed=0, step=0, rows=8, length=256)
    h, targets = model(x).flatten(0, 1), y.flatten()  # (M, D), (M,)
    ids = model.model.hash_map[targets]  # (M, H)

    as_it_is = mhf.soft_embedding

    def scaled(o, E):
        return as_it_is(o / E.shape[-1] ** 0.5, E)

    found = {}
    for name, soft_embedding in (("scale 1", as_it_is), ("scale 1/√D", scaled)):
        with mock.patch.object(mhf, "soft_embedding", soft_embedding):
            log_p, scores = model.bucket_log_probs(h), model.token_scores(h)  # (M, H, B), (M, V)
        bits = -log_p.gather(-1, ids.unsqueeze(-1)).mean((0, 2)) / math.log(2)  # (H,)
        perplexity = F.cross_entropy(scores / model.config.calibration, targets).exp().item()
        found[name] = {"bits of the ids": bits.tolist(), "perplexity of the token": perplexity}
    one, other = found.values()
    more = [b - a for a, b in zip(one["bits of the ids"], other["bits of the ids"])]
    assert more[0] == 0 and 0.1 < more[1] < 0.15 and all(m > 0 for m in more[1:])
    assert -4 < other["perplexity of the token"] - one["perplexity of the token"] < 0
    return found


def answer_04_3():
    """Train a small model without mixers from the start: what is the cascade worth?

    After 60 steps nothing: both have a perplexity of about 300, and the one without is a little
    ahead. Early in training every function learns from h directly. Only longer runs, with several
    seeds, can say whether the mixers pay later.
    """

    class Nothing(nn.Module):
        def forward(self, both):  # (..., 2D) -> (..., D)
            return torch.zeros_like(both[..., : both.shape[-1] // 2])

    corpus, found = course.corpus("bpe:1024"), {}
    for name in ("with mixers", "without"):
        model = course.small(corpus.tokenizer, objective="joint")
        if name == "without":
            model.hash_head.cascade_mixer = nn.ModuleList(Nothing() for _ in range(3))
        list(course.fit(model, corpus.training, 60, learning_rate=3e-3))
        found[name] = course.quality(model, corpus)["perplexity"]
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
        measured = course.quality(model, corpus)
        found[weight] = {name: measured[name] for name in ("perplexity", "tau", "valid_mass")}
    small, large = found.values()
    assert large["valid_mass"] > 3 * small["valid_mass"] and large["tau"] > small["tau"]
    assert large["perplexity"] > small["perplexity"]
    return found


def answer_05_3():
    """Does H = 2 with B = 1024, trained with `independent`, have a τ below 2?

    Yes: about 1.7 after 80 steps, against 3 for H = 4. Two functions count the evidence twice, and
    here, too, bucket mates keep τ below H.
    """
    corpus = course.corpus("bpe:1024")
    shape = dict(num_hashes=2, num_buckets=1024)
    model = course.small(corpus.tokenizer, objective="independent", **shape)
    list(course.fit(model, corpus.training, 80, learning_rate=3e-3))
    measured = course.quality(model, corpus)
    assert 1.4 < measured["tau"] < 2
    return {"tau": measured["tau"], "perplexity": measured["perplexity"]}


# 06 · Inference


def answer_06_1():
    """True probabilities 1/2, 1/4, 1/4; H = 4, learned perfectly, no bucket mates: at τ = 1?

    The scores are 4 log p, so P is p⁴ renormalised: 16/18, 1/18, 1/18, that is 0.889, 0.056, 0.056.
    τ = H = 4 restores the true ones.
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
    always leaves 40: far fewer than top-p where the model is unsure, 39 too many where it is sure.
    """
    model, _ = course.shipped()
    x, _ = batch(course.corpus().held_out, seed=0, step=0, rows=4, length=256)
    logits = model.log_probs(x).flatten(0, 1)  # (M, V)
    found = {}
    for temperature in (1.0, 1.2):
        kept = (mhf.sampling_probs(logits, temperature, top_p=0.9) > 0).sum(-1)  # (M,)
        found[temperature] = {"mean": kept.float().mean().item(), "most": kept.max().item()}
        found[temperature]["one token"] = (kept == 1).float().mean().item()
    assert abs(found[1.0]["mean"] - 760) < 40 and abs(found[1.0]["one token"] - 0.08) < 0.01
    assert 1.8 < found[1.2]["mean"] / found[1.0]["mean"] < 2.3
    return found


@torch.no_grad()
def answer_06_3():
    """One τ for the more confident half of the positions, one for the other: which is larger?

    The more confident half needs the larger τ. There the true token is likely, it outweighs its
    bucket mates, and its score grows like H log p (slope 4 in tutorial 05). Where all tokens are
    unlikely, mates weigh more, the slope is smaller, and so is the sharpening that τ repairs.
    """
    corpus = course.corpus("bpe:1024")
    model = course.small(corpus.tokenizer, objective="independent")
    with torch.enable_grad():
        list(course.fit(model, corpus.training, 100, learning_rate=3e-3))
    x, y = batch(corpus.held_out, 1, 0, 64, 128)
    scores, targets = model.token_scores(model(x)).flatten(0, 1), y.flatten()  # (M, V), (M,)
    tau = fit_calibration(scores, targets)
    confidence = (scores / tau).softmax(-1).amax(-1)  # (M,)
    sure = confidence > confidence.median()
    found = {"all": tau}
    for name, half in (("confident half", sure), ("other half", ~sure)):
        found[name] = fit_calibration(scores[half], targets[half])
    assert found["confident half"] > found["all"] > found["other half"]
    return found


# 07 · A growing vocabulary


def answer_07_1():
    """What do a million new tokens cost the standard model of the pair, and the largest one?

    One row of D each: 64 million and 2,048 million parameters. They cost the MultiHashFormer none.
    It stores H ids for each token, in the published format 8 bytes each, which are not trained.
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

    It is smaller at 1 and larger at 2. τ divides all differences of scores: the larger τ is, the
    more even is the distribution, and the new tokens are among the many with low scores.
    """
    model, tokenizer = course.shipped()
    text, V = "\n".join(course.django("ar")), len(tokenizer)
    bigger = course.extended(tokenizer, text, 512)
    model.expand([bigger.token_bytes(i) for i in range(V, len(bigger))])
    ids = torch.tensor(course.corpus().held_out[:512].astype(int)).view(2, 256)  # (N, T)
    scores = model.token_scores(model(ids))  # (N, T, V + 512)
    mass = [(scores / t).softmax(-1)[..., V:].sum(-1).mean().item() for t in (1, 1.24, 2)]
    assert mass[0] < mass[1] < mass[2]
    return mass


def answer_07_3():
    """The mass of new tokens after 20 and 100 steps, and without training?

    Without training far less than their share: with tied weights and an adapter that starts as the
    identity, the model expects the token just read to come again. It spreads the rest evenly, a
    third of it over the new third of the vocabulary. After 20 and 100 steps it has unlearned the
    repeating, and the new tokens have about their share, or more. The shipped model, after
    thousands of steps, gives them a fifth of it.
    """
    corpus = course.corpus("bpe:1024")
    old, text = corpus.tokenizer, "\n".join(course.django("ar") + course.django("hi"))
    grown = course.extended(old, text, 512)
    ids = torch.tensor(corpus.held_out[:1024].astype(int)).view(8, 128)  # (N, T)
    mass = {}
    for steps in (0, 20, 100):
        model = course.small(old, num_buckets=256)
        if steps:
            list(course.fit(model, corpus.training, steps, learning_rate=4e-3))
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

    By less than a point, at the penultimate layer: no change that counts. "The" adds the same to
    all states, and centring removes it.
    """
    (model, tokenizer), counts = course.shipped(), course.word_counts(course.corpus())
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
    half at the input, those that share none about 0: half of the mean vector is the same. So the
    likeness of words of several tokens may come from their spelling, not their meaning.
    """
    model, tokenizer = course.shipped()
    torch.manual_seed(0)
    untrained = mhf.MultiHashFormer(model.config, model.signatures).eval()
    counts = course.word_counts(course.corpus())
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
    for x, y in zip(*windows(ids, starts, T)):  # (T,), (T,)
        log_p = model.log_probs(x.unsqueeze(0))[0]  # (T, V)
        rows.append(-log_p.gather(-1, y.unsqueeze(-1))[:, 0])  # (T,)
    return torch.stack(rows).numpy()


def answer_09_2():
    """Measured on the second half of each window only: the loss, and a comparison?

    The first four tokens of a window cost half a nat more than the mean of all. But they are few,
    so the loss of the second halves is hardly lower than that of whole windows: this model makes
    little of a long context. The comparison with the rounded model hardly changes. Say how you
    measured, and measure both models in the same way.
    """
    model, _ = course.shipped()
    ids, starts = course.corpus().held_out, np.arange(0, 160, 8) * 256
    start = losses(model, ids, np.arange(299) * 256, 4).mean()
    first = losses(model, ids, starts)  # (windows, T)
    for p in model.parameters():
        if p.dim() == 2:
            step = p.abs().amax(-1, keepdim=True) / 15
            p.copy_((p / step).round() * step)
    second, half = losses(model, ids, starts), first.shape[1] // 2
    whole, late = first.mean(), first[:, half:].mean()
    costs = (second - first).mean(), (second - first)[:, half:].mean()
    assert start > whole + 0.3 and abs(whole - late) < 0.1 and abs(costs[0] - costs[1]) < 0.03
    return float(start), float(whole), float(late), [float(c) for c in costs]


def answer_09_3():
    """Multiple choice with wrong lines from the same scene: how much accuracy is left?

    It falls by 8 of 100 items, which is within the error, and stays well above the quarter that
    luck gives. So the gain does not only recognise the scene by its people and things: lines of the
    same scene have these, too. A surer answer needs more items.
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


# ---------------------------------------------------------------------------------------------


def main():
    start = "answer_" + "".join(sys.argv[1:2])
    for name, answer in list(globals().items()):
        if name.startswith("answer_") and name.startswith(start):
            print(f"{name}: {answer.__doc__.rstrip()}\n    = {answer()}\n")


if __name__ == "__main__":
    main()
