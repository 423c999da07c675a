# %% [markdown]
# # 01 · Signatures
#
# **Does every token get a signature of its own, and what does that cost?**
#
# Afterwards you can
# * hash a token by hand and say how many tokens will share one, two or all of its ids;
# * choose H and B for a vocabulary, and say when a table becomes crowded;
# * tell what similar strings gain and lose under locality-sensitive hashing.
#
# Reading: 25 minutes. Run time: under half a minute on 2 cores. Paper:
# [section 3.1](https://arxiv.org/abs/2606.28057). Code: `SignatureTable` in `mhf.py`.
#
# On Colab: `!git clone REPOSITORY project`, `%cd project/tutorials`,
# `!pip install -r ../requirements.txt`
#
# A standard model has one row of numbers for each of its $V$ tokens. Here there are $H$ hash
# functions with $B$ buckets each, and one row for each bucket. A token is the list of the $H$
# buckets that it falls into: its *signature*. So the number of rows, $H \cdot B$, does not depend
# on $V$. But the model could never tell two tokens with the same signature apart. This tutorial
# counts how often that would happen, and shows what is done about it.

# %%
import math
import sys

sys.path.append("tutorials")  # for a kernel that was started one folder above

import course
import mmh3
import numpy as np
import torch

import mhf

plt = course.pyplot()
model, tokenizer = course.shipped()
table = model.signatures  # of the trained small model
V, H, B = len(tokenizer), table.num_hashes, table.num_buckets
tokens = tokenizer.hashed_bytes()[:-1]  # the bytes of every token but the last, the pad
print(f"V = {V:,} tokens, H = {H} functions, B = {B:,} buckets each")

# %% [markdown]
# ## 1. One token by hand
#
# The hash function is MurmurHash3, started with the seeds $0, 1, \ldots, H-1$. It turns the bytes
# of a token $w$ into an integer of 128 bits, which looks random and is always the same:
#
# $$\mathrm{id}_j(w) = \mathrm{murmurhash3}(w, \text{seed} = j) \bmod (B-1) + 1$$
#
# Bucket 0 of every function is kept for the pad (here the end-of-text token), whose signature is
# $(0, \ldots, 0)$. So $B-1$ buckets are left for tokens.


# %%
def by_hand(token, functions=H, buckets=B):
    return [mmh3.hash128(token, seed) % (buckets - 1) + 1 for seed in range(functions)]


for word in " king", " kings", " love", " loves":
    (token_id,) = tokenizer.encode(word)
    assert by_hand(word.encode()) == table.ids[token_id].tolist()
    print(f"{word!r:9} {by_hand(word.encode())}")

assert table.ids[tokenizer.eot].tolist() == [0, 0, 0, 0]  # the pad
assert torch.tensor([by_hand(t) for t in tokens]).equal(table.ids[:-1])  # all others

# %% [markdown]
# `SignatureTable` holds what we computed by hand, for all tokens. The words " king" and " kings"
# have nothing in common: a small change of the bytes changes all ids.
#
# ## 2. One function alone: a crowd in every bucket
#
# *Before you run it:* about 4 tokens come to each bucket, for $V / (B-1) \approx 4$. Will most
# buckets have exactly 4? How many buckets stay empty? And how many tokens have a bucket for
# themselves?
#
# If hashing throws tokens at buckets blindly, the number of tokens in a bucket follows a
# Poisson distribution with mean $\lambda = V/(B-1)$:
# $\Pr(n) = e^{-\lambda} \lambda^n / n!$. The picture shows the buckets of the four functions
# (bars) and this expectation (points).

# %%
loads = torch.stack([column.bincount(minlength=B)[1:] for column in table.ids[:-1].T])
counts = torch.stack([load.bincount(minlength=16) for load in loads])  # (H, loads 0 … 15)
mean = (V - 1) / (B - 1)
n = torch.arange(16.0)
poisson = (B - 1) * torch.exp(n * np.log(mean) - mean - torch.lgamma(n + 1))

figure, axes = plt.subplots(figsize=(7, 3.2))
for j, row in enumerate(counts.tolist()):
    axes.bar(n + 0.2 * (j - 1.5), row, 0.2, color=course.COLOURS[j], label=f"function {j + 1}")
axes.plot(n, poisson, "o", color=course.BLACK, label="Poisson")
axes.set(xlabel="tokens in the bucket", ylabel="buckets", xticks=range(16))
axes.legend()
course.show(figure, "01-bucket-loads")

empty = (loads == 0).float().mean().item()
alone = (loads == 1).sum().item() / (H * (V - 1))  # the mean of the four functions
print(f"tokens in a bucket: mean {mean:.2f}, variance {loads.double().var():.2f}")
print(f"largest: {loads.max()}; empty: {empty:.1%}; tokens alone in their bucket: {alone:.1%}")
assert abs(mean - 4.00) < 0.01 and abs(loads.double().var() - 3.94) < 0.01
assert loads.max() == 15 and abs(100 * empty - 1.9) < 0.1 and abs(100 * alone - 1.8) < 0.1

# %% [markdown]
# The bars follow the points. Mean and variance are nearly equal, 4.00 and 3.94, as Poisson says.
# The fullest bucket has 15 tokens, 1.9% of the buckets have none, and only 1.8% of the tokens have
# a bucket of one function for themselves.
#
# **What goes wrong with a single function** ($H = 1$, the *single-ID* baseline): the model sees a
# bucket, not a token. Nearly every token is one of a crowd that it cannot tell apart, neither when
# it reads nor when it writes.
#
# ## 3. Several functions: the birthday problem
#
# Two tokens have one id in common with probability $1/(B-1)$. If the functions are independent,
# they agree in all $H$ with probability $(B-1)^{-H}$. There are about $V^2/2$ pairs of tokens, so
#
# $$\text{expected pairs with the same signature} \approx \frac{V^2}{2\,(B-1)^H}.$$
#
# This is the birthday problem: what counts is not the number of tokens but the number of *pairs*,
# which grows with the square. Each further function divides it by $B-1$. We count the pairs of the
# shipped tokens that agree in the first 1, 2, 3, 4 functions.


# %%
def equal_pairs(ids):
    """How many pairs of rows of ids (V, H) are equal."""
    _, size = ids.unique(dim=0, return_counts=True)
    return int((size * (size - 1) // 2).sum())


def expected_pairs(size, functions, buckets):
    return size**2 / (2 * (buckets - 1) ** functions)


for functions in range(1, H + 1):
    found = equal_pairs(table.ids[:-1, :functions])
    print(f"{functions} ids agree: {found:6,} pairs; {expected_pairs(V - 1, functions, B):.2g}")
assert [equal_pairs(table.ids[:, :k]) for k in (1, 2, 3, 4)] == [16368, 5, 0, 0]
assert table.rehashed == []  # so no token of this table ever needed a second try

# %% [markdown]
# 16,368 pairs share the first id, 5 pairs the first two, none three. With four functions the
# formula expects two millionths of a pair. To see the law, and not only zeros, we take few buckets
# ($B = 128$) and up to 100,000 made-up words. The lines are the formula, the points are counted.
# The axes are logarithmic: the slope is 2 (pairs!), the gap between lines is $B - 1$. Where few
# pairs are expected, the count scatters about the line.

# %%
words = [f"word{i}".encode() for i in range(100_000)]
ids = torch.tensor([by_hand(word, 4, 128) for word in words])  # (100,000, 4)
sizes = 1_000, 3_000, 10_000, 30_000, 100_000
found = {k: [equal_pairs(ids[:size, :k]) for size in sizes] for k in (1, 2, 3, 4)}

figure, axes = plt.subplots(figsize=(7, 3.6))
for k, colour in zip(found, course.COLOURS):
    axes.plot(sizes, [expected_pairs(size, k, 128) for size in sizes], color=colour)
    seen = [(size, pairs) for size, pairs in zip(sizes, found[k]) if pairs]  # 0 has no logarithm
    axes.plot(*zip(*seen), "o", color=colour, label=f"H = {k}")
axes.set(xscale="log", yscale="log", xlabel="tokens V", ylabel="pairs with the same signature")
axes.legend(ncols=2)
course.show(figure, "01-birthday")
for k, pairs in found.items():
    print(f"H = {k}: {pairs[-1]:10,} pairs, {expected_pairs(1e5, k, 128):12,.1f} expected")
assert all(0.9 < found[k][-1] / expected_pairs(1e5, k, 128) < 1.1 for k in (1, 2, 3))

# %% [markdown]
# How many tokens fit before the first pair is to be expected? The formula gives 1 at
# $V = \sqrt{2}\,(B-1)^{H/2}$.

# %%
for functions, buckets in (2, 2048), (3, 2048), (4, 2048), (4, 16384):
    first = 2**0.5 * (buckets - 1) ** (functions / 2)
    print(f"H = {functions}, B = {buckets:6,}: about {first:13,.0f} tokens")

# %% [markdown]
# With $H = 4$ and $B = 2{,}048$ it takes millions of tokens until two of them meet.
#
# ## 4. Are the functions independent? Measure it
#
# The formula assumed it, but nothing guarantees that four seeds of one hash function are four
# independent functions. So we count, for several $B$, the pairs that agree in the first two ids,
# and divide by the formula. *Before you run it:* what do you expect? The bars should all be near 1.

# %%
buckets = 256, 512, 1000, 1024, 1025, 2048
ratios = []
for size in buckets:
    two = torch.tensor([by_hand(word, 2, size) for word in words])  # (100,000, 2)
    ratios.append(equal_pairs(two) / expected_pairs(len(words), 2, size))

figure, axes = plt.subplots(figsize=(7, 2.8))
bars = axes.bar([f"{size:,}" for size in buckets], ratios, color=course.SKY)
axes.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios])
axes.axhline(1, color=course.BLACK, linewidth=1)
axes.set(xlabel="buckets B", ylabel="counted / formula", ylim=(0, 3.8))
course.show(figure, "01-independence")
assert abs(ratios[3] - 3.27) < 0.1 and all(0.9 < r < 1.1 for r in ratios[:3] + ratios[4:])

# %% [markdown]
# One bar stands out: with $B = 1{,}024$ there are 3.27 times as many pairs as there should be. The
# reason is arithmetic. MurmurHash3 ends by adding its two 64-bit halves $f_1, f_2$ to each other,
# twice; as one number of 128 bits (carries left out) that is
#
# $$(f_1 + f_2) + 2^{64} (f_1 + 2 f_2) = (2^{64} + 1)\, f_1 + (2^{65} + 1)\, f_2.$$
#
# $2^{65} + 1$ is a multiple of 33, and so is $B - 1 = 1{,}023$: modulo 33, $f_2$ drops out. And for
# half of the tokens $f_1$ is the same for seed 0 and seed 1. So the two ids tend to agree modulo
# 33, and when the first ids of two tokens are equal, the second ones are more easily equal, too.

# %%
low = 2**64 - 1


def first_half(token, seed):
    """f1: the digest's halves are f1 + f2 and f1 + 2 f2."""
    one, two = mmh3.hash128(token, seed) & low, mmh3.hash128(token, seed) >> 64
    return (2 * one - two) & low


same = np.mean([first_half(t, 0) == first_half(t, 1) for t in tokens])
modulo = np.mean([np.subtract(*by_hand(t, 2, 1024)) % 33 == 0 for t in tokens])
print(f"f1 is the same for seeds 0 and 1: {same:.1%} of the tokens")
print(f"ids that agree modulo 33: {modulo:.1%}, of independent functions {1 / 33:.1%}")
print("gcd of 2^65 + 1 and B - 1:", {b: math.gcd(2**65 + 1, b - 1) for b in (1024, 2048, 16384)})
assert abs(100 * same - 50.4) < 0.1 and abs(100 * modulo - 22.1) < 0.1 and round(100 / 33, 1) == 3.0
assert [math.gcd(2**65 + 1, b - 1) for b in (1024, 2048, 16384)] == [33, 1, 3]

# %% [markdown]
# Modulo 33 the ids agree for 22.1% of the tokens, where chance gives 3.0%. With $B = 2{,}048$ the
# two numbers have no common factor, and the formula holds; the paper's $B = 16{,}384$ has the
# factor 3, which hardly matters (exercise 3 measures it). The lesson is a general one: the
# independence of hash functions is an assumption, and cheap to test.

# %% [markdown]
# ## 5. A taken signature: re-hash
#
# When an earlier token has the signature already, only the *last* id changes: its seed becomes
# $H, H+1, \ldots$ until the signature is free. To see this we need a crowded table: two functions
# and 104 buckets, $103^2$ signatures for our tokens, of which 77% will be in use.

# %%
crowded = mhf.SignatureTable(2, 104)
crowded.extend(tokens)
tries = np.array([len(crowded.trace(token)) for token in tokens])  # (V - 1,)
busiest = tokens[tries.argmax()]
for seed, last, owner in crowded.trace(tokens[np.flatnonzero(tries == 5)[0]]):
    print(f"seed {seed}: last id {last:3}", "free" if owner is None else f"has {tokens[owner]}")
print(f"tokens re-hashed: {len(crowded.rehashed):,}; most tries: {tries.max()} for {busiest}")
assert len(crowded.rehashed) == 3204 and tries.max() == 42

# %% [markdown]
# 3,204 tokens had to be hashed again; one of them took 42 tries. If a share $q$ of the signatures
# is in use, a try fails with probability about $q$, so that $1/(1-q)$ tries are needed. The picture
# compares this line with the mean tries of 500 tokens at a time, in the order they were added.

# %%
groups = np.array_split(tries, len(tries) // 500)
middle = np.cumsum([len(g) for g in groups]) - len(groups[0]) / 2
used = middle / 103**2
figure, axes = plt.subplots(figsize=(7, 3))
axes.plot(used, 1 / (1 - used), color=course.BLACK, label="$1/(1-q)$")
axes.plot(used, [g.mean() for g in groups], "o", color=course.BLUE, label="counted")
axes.set(xlabel="share q of the signatures in use", ylabel="tries for a token", ylim=(0, None))
axes.legend()
course.show(figure, "01-tries")
last, expected = groups[-1].mean(), 1 / (1 - used[-1])
print(f"the last {len(groups[-1])} tokens: {last:.2f} tries, {expected:.2f} expected")
assert abs(last - 4.5) < 0.1 and abs(expected - 4.0) < 0.1

# %% [markdown]
# The last tokens need 4.5 tries where the line says 4.0: the free signatures are spread unevenly
# over the first ids, and a token may only change its last one.
#
# ## 6. Full
#
# There are $(B-1)^H$ signatures. But a token keeps its first $H-1$ ids, and a *class*, all tokens
# with the same first $H-1$ ids, has only $B-1$ last ids. So a table can be full for one token while
# others would still fit. Both cases are errors with a sentence, never an endless search.

# %%
for buckets in 91, 102:
    print(f"B = {buckets}: {(buckets - 1) ** 2:,} signatures for {len(tokens):,} tokens")
    try:
        mhf.SignatureTable(2, buckets).extend(tokens)
        raise AssertionError("that should not fit")
    except ValueError as error:
        print("   ", error)

# %% [markdown]
# With $B = 102$ a fifth of the signatures would have stayed free, and yet one class was full. With
# $H = 4$ and $B = 2{,}048$ neither is a danger: no two tokens have the same first three ids.
#
# ## 7. Remember what you gave away
#
# The guarantee needs a memory: a signature is taken if *any* earlier token has it, by its first
# hash or by a re-hash. This loop remembers each token's first hash and forgets where it went after
# a re-hash. (We wrote it to show the mistake. The authors' published code forgets in another way;
# see `SignatureTable` in `mhf.py`.)


# %%
def forgetful(tokens, functions, buckets):
    hashed, given = set(), []
    for token in tokens:
        first = signature = tuple(by_hand(token, functions, buckets))
        for seed in range(functions, 10_000):
            if signature not in hashed:
                break
            signature = *first[:-1], mmh3.hash128(token, seed) % (buckets - 1) + 1
        hashed.add(first)  # the mistake: it should be `signature`
        given.append(signature)
    return torch.tensor(given)


# %%
for functions, buckets in (2, 2048), (2, 512), (2, 128), (3, 32):
    lost = len(tokens) - len(forgetful(tokens, functions, buckets).unique(dim=0))
    ours = mhf.SignatureTable(functions, buckets)
    ours.extend(tokens)
    assert len(ours.ids.unique(dim=0)) == len(tokens)  # brute force: no row is there twice
    assert all(ours.owner[row] == i for i, row in enumerate(ours.signatures))  # and back
    print(f"H = {functions}, B = {buckets:5,}: {lost:3} tokens with another's signature; ours: 0")
assert len(tokens) - len(forgetful(tokens, 2, 128).unique(dim=0)) == 398

# %% [markdown]
# In a roomy table the mistake does not show; in a crowded one it gives 398 tokens the signature of
# another. Nothing crashes: the model just never learns to tell them apart.
#
# ## 8. A new token costs nothing
#
# *Before you run it:* the model gets two new words. Which of its 1,935,809 parameters change?

# %%
total, old_ids = model.num_parameters()["total"], table.ids.clone()
weights = {name: p.clone() for name, p in model.named_parameters()}
prompt = torch.tensor([tokenizer.encode("O Romeo, Romeo! wherefore art thou")])
old_scores = model.token_scores(model(prompt))  # (1, T, V)
model.expand([b" telephone", b" selfie"])
print(table.ids[-2:].tolist(), "are the signatures of the two new tokens")
assert total == model.num_parameters()["total"] == 1935809
assert all(p.equal(weights[name]) for name, p in model.named_parameters())
assert table.ids[:-2].equal(old_ids)
assert torch.allclose(model.token_scores(model(prompt))[..., :-2], old_scores, atol=1e-4)

# %% [markdown]
# None: the rows of the new words are there already, as rows of other tokens. The old tokens keep
# their signatures and scores. What the model *knows* of the new ones is another question
# (tutorial 07).
#
# And what has the trained model made of signatures? There are $2{,}047^4$ of them, and only 8,191
# belong to tokens. Nothing tells the four predicted distributions which combinations exist.

# %%
model, tokenizer = course.shipped()  # without the new tokens
held_out = torch.tensor(course.corpus().held_out[:256].tolist())  # (T,)
mass = model.valid_mass(held_out[None]).mean().item()
share = 8191 / 2047**4
print(f"tokens have {share:.1e} of the signatures and {mass:.2f} of the probability")
assert 1e-10 < share < 1e-9 and 0.02 < mass < 0.1

# %% [markdown]
# It has learnt a good part of it: a few hundredths of its probability, the *valid mass*, fall on
# real signatures, which are less than a billionth of all. The rest is taken away by renormalising
# (tutorial 05).
#
# ## 9. Should similar strings share buckets?
#
# MurmurHash3 treats " love" and " loves" as strangers. *Locality-sensitive* functions do not: they
# count a token's character trigrams and hash so that tokens with similar counts more often fall
# into the same bucket. `num_lsh=2` makes the first two functions locality-sensitive and leaves the
# other two as they are. We give our tokens such signatures ($B = 512$) and ask: given how similar
# two strings are (the cosine of their trigram counts), how often do they share an id?

# %%
mixed = mhf.SignatureTable(4, 512, num_lsh=2)
mixed.extend(tokens)
texts = [t.decode("utf-8", errors="backslashreplace") for t in tokens]
grams = [[t[i : i + 3] for i in range(len(t) - 2)] or [t] for t in texts]
column = {gram: i for i, gram in enumerate(sorted({g for row in grams for g in row}))}
counted = torch.zeros(len(tokens), len(column))  # (V - 1, trigrams)
for row, found in zip(counted, grams):
    for gram in found:
        row[column[gram]] += 1
counted = torch.nn.functional.normalize(counted, dim=-1)
one, two = 2 * torch.triu_indices(len(tokens) // 2, len(tokens) // 2, 1)  # of every other token
cosine = (counted[::2] @ counted[::2].T)[one // 2, two // 2]  # (pairs,)

# %%
edges = [-0.1, 0.01, 0.2, 0.4, 0.6, 0.8, 0.9, 1.01]
names = ["none"] + [f"{a}-{b}" for a, b in zip(edges[1:], edges[2:-1])] + ["0.9-1"]
bins = [(cosine >= low) & (cosine < high) for low, high in zip(edges, edges[1:])]
ids = mixed.ids
overlap = torch.stack([(ids[one[b]] == ids[two[b]]).double().mean(0) for b in bins])  # (bins, H)

figure, axes = plt.subplots(figsize=(7, 3.2))
axes.plot(names, overlap[:, :2].mean(1), "o-", color=course.VERMILION, label="locality-sensitive")
axes.plot(names, overlap[:, 2:].mean(1), "s-", color=course.BLUE, label="MurmurHash3")
axes.set(xlabel="cosine of the trigram counts", ylabel="pairs with the same id (share)")
axes.legend()
course.show(figure, "01-similar-strings")

near, far = overlap[5, :2].mean().item(), overlap[0, :2].mean().item()
print(f"cosine 0.8 to 0.9: {near:.3f}; nothing in common: {far:.4f} (1 / (B - 1) = {1 / 511:.4f})")
family = [" love", " loves", " loved", " lover"]
for word in family:
    print(f"{word!r:9}", mixed.ids[tokenizer.encode(word)[0]].tolist())
love, loves = (counted[tokenizer.encode(word)[0]] for word in family[:2])
print(f"cosine of {family[0]!r} and {family[1]!r}: {love @ loves:.2f}")
assert 0.08 < near < 0.16 and 0.0015 < far < 0.003 and abs(love @ loves - 0.87) < 0.01
assert (overlap[:, 2:] < 0.01).all()

# %% [markdown]
# The more alike two strings are, the more often a locality-sensitive function puts them together:
# for cosines of 0.8 to 0.9 in roughly one case of nine, against one in 511 for strangers.
# MurmurHash3 does not care. So even very similar tokens *mostly* have different ids; " love" and
# " loves", with a cosine of 0.87, may or may not share one. (The random directions come from
# `torch.randn`, so single ids may differ on your machine.)
#
# There is a price. Similar strings come in crowds (" the", " there", " these"), and so the buckets
# fill unevenly. In the picture, blind hashing follows Poisson; locality-sensitive hashing has more
# nearly empty buckets and more overfull ones.

# %%
loads = torch.stack([column.bincount(minlength=512)[1:] for column in mixed.ids.T]).double()
figure, axes = plt.subplots(figsize=(7, 3))
for row, name in (2, "MurmurHash3"), (0, "locality-sensitive"):
    axes.hist(loads[row], range(0, 55, 2), histtype="step", lw=2, label=name)
axes.set(xlabel="tokens in the bucket", ylabel="buckets (of 511)")
axes.legend()
course.show(figure, "01-uneven")

uneven = (loads.var(1) / loads.mean(1)).tolist()  # 1 for Poisson
both = [equal_pairs(mixed.ids[:, part]) for part in (slice(0, 2), slice(2, 4))]
print(f"variance / mean of the loads: {', '.join(f'{u:.2f}' for u in uneven)}")
print(f"fullest bucket: {loads.max(1).values.int().tolist()}")
print(f"pairs that agree in both functions: {both[0]} locality-sensitive, {both[1]} MurmurHash3")
assert all(1.7 < u < 3.0 for u in uneven[:2]) and all(0.8 < u < 1.2 for u in uneven[2:])
assert both[0] > 1.3 * both[1]

# %% [markdown]
# The variance of the loads is about twice the mean, and more pairs agree in both
# functions. If *all* functions were locality-sensitive, nothing could be re-hashed, and such pairs
# would stay. Whether sharing rows between similar strings helps a model more than the crowding
# hurts it is a question for training runs: `python train.py --num_lsh 2`.
#
# ## What we saw
#
# * With one function nearly all tokens share a bucket; with $H$ functions the number of pairs with
#   the same signature falls as $V^2 / (2 (B-1)^H)$, and with $H = 4$, $B = 2{,}048$ no token of
#   ours meets another.
# * That formula assumes independent functions. It held, except for one number of buckets.
# * Where two tokens meet, the last id is hashed again, and the answer to our question is yes: each
#   token has a signature of its own, checked by brute force; the cost is a lookup at registration,
#   a few tries in a crowded table, and an error when a class is full.
# * New tokens add no parameter and change no old signature.
# * Locality-sensitive functions let similar strings share ids now and then, and pay with uneven
#   buckets.
#
# ## Exercises
#
# 1. *Calculate.* A vocabulary of a million tokens, $H = 3$. From which $B$ on does the formula
#    expect less than one pair with the same signature? How many rows has the table then?
# 2. *Change.* Take `SignatureTable(2, 104)` and register the tokens in the opposite order. Which
#    numbers change: the re-hashed tokens, the signatures, the guarantee?
# 3. *Find out.* For which powers of two $B$ from $2^8$ to $2^{16}$ has $B - 1$ a common factor with
#    $2^{65} + 1$? Does the factor 3 of the paper's $B = 2^{14}$ make more pairs share two ids than
#    the formula says?
#
# Answers: `python tutorials/answers.py 01`. Next:
# [02 · The gated embedding](02_gated_embedding.ipynb), how the rows of a signature become a vector.
