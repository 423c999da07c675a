# %% [markdown]
# # 06 · Inference
#
# **How do H·B log probabilities become one token, and a text?**
#
# Afterwards you can
#
# * renormalise by hand, and score a million tokens without a large tensor;
# * calibrate a model, read a reliability diagram, and say what calibration cannot change;
# * choose temperature, top-k and top-p knowing what each does to the distribution and to the
#   text.
#
# Reading: 25 minutes. Run time: half a minute on 2 cores. Paper: renormalised inference, after
# [section 3.3](https://arxiv.org/abs/2606.28057); the calibration is this project's. Code:
# `token_scores`, `log_probs`, `sampling_probs` and `generate` in `mhf.py`.
#
# On Colab: `!git clone REPOSITORY project`, `%cd project/tutorials`,
# `!pip install -r ../requirements.txt`

# %%
import math
import sys
import time

sys.path.append("tutorials")  # for a kernel that was started one folder above

import course
import numpy as np
import torch
import torch.nn.functional as F

import mhf
from support import data
from support.evaluate import fit_calibration

plt = course.pyplot()
model, tokenizer = course.shipped()
text = course.corpus()
TAU = model.config.calibration
print(f"calibration τ of the trained model: {TAU:.2f}")

# %% [markdown]
# ## 1. Renormalise
#
# The cascade gives $H$ distributions over $B$ buckets. A token's score is the sum of the log
# probabilities of its ids. The scores of the $V$ tokens are no distribution: most of the
# probability lies on signatures of no token (tutorial 05). So divide by the sum over the tokens
# that exist:
#
# $$\log P(w) = \frac{\mathrm{score}(w)}{\tau} - \log \sum_{w'} e^{\mathrm{score}(w') / \tau}.$$
#
# Without this step we would have to draw signatures and hope: tutorial 04 shows how seldom the
# functions' own choices name a token. Here it is by brute force, in plain Python, for a vocabulary
# of six words:

# %%
words = [b"to", b" be", b" or", b" not", b",", b" that"]
signatures = mhf.SignatureTable(num_hashes=3, num_buckets=5)
signatures.extend(words)
shape = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=16)
table = dict(num_hashes=3, num_buckets=5, bottle_neck_dim=4, max_position_embeddings=8)
torch.manual_seed(0)
config = mhf.Config(**shape, **table, initializer_range=0.5, calibration=2.0)
toy = mhf.MultiHashFormer(config, signatures)
inputs = torch.tensor([[0, 1, 4]])  # "to be,"
log_p = toy.bucket_log_probs(toy(inputs))[0, -1].tolist()  # H lists of B
scores = [sum(log_p[j][i] for j, i in enumerate(ids)) for ids in signatures.ids.tolist()]
weights = [math.exp(score / config.calibration) for score in scores]
for word, weight, log_P in zip(words, weights, toy.log_probs(inputs)[0, -1].tolist()):
    print(f"{word.decode():6} by hand {weight / sum(weights):.4f}, model {math.exp(log_P):.4f}")
    assert abs(weight / sum(weights) - math.exp(log_P)) < 1e-5

# %% [markdown]
# ## 2. Score without a large tensor
#
# The plain way gathers $H$ numbers for every token at every position: a tensor $(M, V, H)$, or $H$
# tensors $(M, V)$. But an *embedding bag* sums $H$ rows of a table by index, and here the table has
# $H \cdot B$ rows and one column for each position. To score the vocabulary is to embed it,
# transposed.

# %%
x, y = data.batch(text.held_out, seed=0, step=0, rows=1, length=256)
with torch.no_grad():
    h = model(x)[0]  # (M, D)
    log_p = model.bucket_log_probs(h)  # (M, H, B)
    ids, H = model.model.hash_map, model.config.num_hashes  # (V, H)
    begin = time.perf_counter()
    gathered = sum(log_p[:, j][:, ids[:, j]] for j in range(H))  # (M, V)
    between = time.perf_counter()
    columns = log_p.flatten(1).T.contiguous()  # (H·B, M)
    bag = F.embedding_bag(model.rows, columns, mode="sum").T  # (M, V)
    end = time.perf_counter()
torch.testing.assert_close(bag, gathered, atol=1e-4, rtol=1e-5)
torch.testing.assert_close(bag, model.token_scores(h), atol=1e-4, rtol=1e-5)
print(f"gathers {between - begin:.3f} s, embedding bag {end - between:.3f} s, the same scores")

# %% [markdown]
# ## 3. Calibrate
#
# If a model gives something a probability of 70%, it should happen in 7 of 10 cases. The paper's
# rule is $\tau = 1$. Whether that is good depends on the objective. We look at two models: the
# trained one (`joint`), and a small one that we train now for some seconds with `independent`, the
# paper's objective.

# %%
corpus = course.corpus("bpe:1024")
independent = course.small(corpus.tokenizer, objective="independent")
for step, loss in course.fit(independent, corpus.training, 100, learning_rate=3e-3):
    if step in (1, 50, 100):
        print(f"step {step:3}: loss {loss:.2f}")


@torch.no_grad()
def held_out(model, ids, seed, count):
    """Scores (M, V) and targets (M,) of held-out windows."""
    T = model.config.max_position_embeddings
    x, y = data.batch(ids, seed, 0, count // T, T)
    return torch.cat([model.token_scores(model(row[None])[0]) for row in x]), y.flatten()


pairs = {
    "joint, trained": (model, text.held_out),
    "independent, small": (independent, corpus.held_out),
}
fitting = {name: held_out(m, ids, 1, 1024) for name, (m, ids) in pairs.items()}  # τ is fitted here
measuring = {name: held_out(m, ids, 2, 4096) for name, (m, ids) in pairs.items()}  # and used here

# %% [markdown]
# The loss as a function of $\beta = 1/\tau$ is
# $\;-\beta \cdot \mathrm{score}(\text{target}) + \log \sum_w e^{\beta\, \mathrm{score}(w)}$, a
# line plus a log-sum-exp: it is convex and has one minimum. `fit_calibration` (in
# `support/evaluate.py`) finds it by Newton's method.
#
# **Before you run it:** where will the minimum of each model be? (Tutorial 05: scores grow like
# $H \log p$, $H = 4$.)

# %%
betas = np.linspace(0.1, 1.5, 29)
figure, ax = plt.subplots(figsize=(6.5, 3.6))
taus = {}
for (name, (scores, targets)), colour in zip(fitting.items(), (course.GREEN, course.BLUE)):
    losses = [F.cross_entropy(b * scores, targets).item() for b in betas.tolist()]
    tau = taus[name] = fit_calibration(scores, targets)
    best = F.cross_entropy(scores / tau, targets).item()
    ax.plot(betas, losses, color=colour, label=f"{name}: best τ {tau:.2f}")
    ax.plot([1 / tau], [best], "o", color=colour)
    print(f"{name}: loss {losses[18]:.2f} at τ = 1, {best:.2f} at τ = {tau:.2f}")
    assert np.diff(losses, 2).min() > -1e-3 and best <= min(losses) + 1e-4  # convex; the minimum
ax.axvline(1, color=course.BLACK, linewidth=0.8, linestyle=":")
ax.set(xlabel="β = 1/τ (dotted: τ = 1)", ylabel="held-out loss (nats a token)", ylim=(4, 10))
ax.legend()
course.show(figure, "06-calibration")
assert abs(betas[18] - 1) < 1e-9 and 2.5 < taus["independent, small"] < 3.5
assert abs(taus["joint, trained"] - TAU) < 0.12 and round(TAU, 2) == 1.24

# %% [markdown]
# Training has nearly calibrated the `joint` model: its best τ is close to 1. (The τ stored in its
# `config.json`, 1.24, was fitted on far more text.) The `independent` model needs a τ near 3.
#
# What does that mean for a reader of probabilities? Sort all positions by the probability of their
# top token, the *confidence*. How often is this token right? A calibrated model lies on the
# diagonal; a model below it is too confident. The lower panels count the positions in each bin.


# %%
def confidence(scores, targets, tau):
    """Top-1 probability and whether it is right, of every position: two arrays (M,)."""
    p, top = (scores / tau).softmax(-1).max(-1)  # (M,), (M,)
    return p.numpy(), (top == targets).numpy()


def reliability(p, right, bins=10):
    """Bins' mean confidence, share of right ones and counts; and the expected calibration error."""
    which = np.minimum((p * bins).astype(int), bins - 1)
    counts = np.bincount(which, minlength=bins)
    mean, share = (np.bincount(which, v, bins) / np.maximum(counts, 1) for v in (p, right))
    return mean, share, counts, (counts * abs(mean - share)).sum() / len(p)


# %%
figure, axes = plt.subplots(2, 2, figsize=(8.5, 5), sharex=True, height_ratios=(3, 1))
error = {}
for column, (name, (scores, targets)) in zip(axes.T, measuring.items()):
    for tau, colour in ((1.0, course.VERMILION), (taus[name], course.BLUE)):
        mean, share, counts, ece = reliability(*confidence(scores, targets, tau))
        error[name, tau] = ece
        there = counts >= 10  # fewer say nothing
        label = f"τ = {tau:.2f}, error {ece:.3f}"
        column[0].plot(mean[there], share[there], "o-", color=colour, label=label)
        column[1].step(np.arange(11) / 10, [*counts, counts[-1]], where="post", color=colour)
        print(f"{name}, τ {tau:.2f}: calibration error {ece:.3f}, counts {counts.tolist()}")
    column[0].plot([0, 1], [0, 1], ":", color=course.BLACK)
    column[0].set(ylabel="share right", title=name)
    column[0].legend(loc="upper left", fontsize=8)
    column[1].set(xlabel="confidence of the top token", ylabel="positions", yscale="log")
course.show(figure, "06-reliability")

# %%
before, after = (error["independent, small", t] for t in (1.0, taus["independent, small"]))
print(f"independent: {before:.2f} → {after:.2f}")
assert abs(before - 0.70) < 0.08 and after < 0.06
first, then = (error["joint, trained", t] for t in (1.0, taus["joint, trained"]))
print(f"joint: {first:.3f} → {then:.3f}")
assert abs(first - 0.072) < 0.015 and abs(then - 0.036) < 0.015

# %% [markdown]
# The *expected calibration error* is the mean distance from the diagonal, weighted by the counts.
# The small `independent` model is confident at τ = 1, and wrong: an error of 0.70. With its fitted
# τ the confidence is right on average (its curve is far from straight, though: one number cannot
# bend it). The `joint` model needs little: 0.072 becomes 0.036.
#
# What does τ **not** change? Division by a positive number keeps the order: top-1, every rank and
# greedy text are the same for all τ. A model that prefers wrong tokens gets no better.

# %%
scores, targets = measuring["independent, small"]
at_1, at_tau = (confidence(scores, targets, t) for t in (1.0, taus["independent, small"]))
rank = (scores > scores.gather(1, targets[:, None])).sum(-1)  # (M,) of the true token, from 0
P = (scores / taus["independent, small"]).softmax(-1)
assert (at_1[1] == at_tau[1]).all() and at_1[0].mean() > 2 * at_tau[0].mean()
assert ((P.gather(1, targets[:, None]) < P).sum(-1) - rank).abs().max() <= 1  # but for rounding
print(
    f"top-1 {at_1[1].mean():.3f} at both; confidence {at_1[0].mean():.2f} → {at_tau[0].mean():.2f}"
)

# %% [markdown]
# ## 4. Shape the distribution
#
# A text can be safe or varied. Three settings shape the distribution before a token is drawn, in
# this order:
#
# * *temperature* $T$ divides the logits as τ does, so only the product $\tau \cdot T$ counts. τ is
#   there to tell the truth, $T$ to depart from it. $T = 0$ is greedy.
# * *top-k* keeps the $k$ likeliest tokens. It cuts the long tail, but $k$ is the same where one
#   token is possible and where a hundred are.
# * *top-p* keeps the fewest tokens that together have the probability $p$. Their number follows the
#   model's certainty.
#
# `generate` draws from `mhf.sampling_probs`. See one next token under six settings; the bars are
# the same twelve tokens in each panel.

# %%
prompt = tokenizer.encode("Good morrow, my good")
with torch.no_grad():
    scores = model.token_scores(model(torch.tensor([prompt]))[:, -1])  # (1, V)
logits = scores / TAU
twice = mhf.sampling_probs(logits, temperature=2.0)
torch.testing.assert_close(twice, (scores / (TAU * 2.0)).softmax(-1))  # the product counts

settings = [dict(temperature=1.0), dict(temperature=0.5), dict(temperature=1.5)]
settings += [dict(top_k=4), dict(top_p=0.6), dict(temperature=0.0)]
best = logits[0].topk(12).indices  # the bars
names = [repr(tokenizer.decode([i]))[1:-1] for i in best.tolist()]
figure, axes = plt.subplots(2, 3, figsize=(10, 5), sharex=True, sharey=True)
for ax, how in zip(axes.flat, settings):
    p = mhf.sampling_probs(logits, **how)[0]  # (V,)
    bits = torch.special.entr(p).sum().item() / math.log(2)
    ax.bar(range(12), p[best], color=course.BLUE)
    label = ", ".join(f"{name} {value}" for name, value in how.items())
    note = f"{label}\nentropy {bits:.2f} bits\n{int((p > 0).sum()):,} tokens possible"
    ax.text(0.97, 0.95, note, transform=ax.transAxes, ha="right", va="top", fontsize=9)
    ax.set(ylim=(0, 1.05), xticks=range(12))
    ax.set_xticklabels(names, rotation=90)
    print(f"{label:16} entropy {bits:.2f} bits")
for ax in axes[:, 0]:
    ax.set_ylabel("probability")
course.show(figure, "06-sampling")

# %% [markdown]
# ## 5. What becomes of the text
#
# **Before you run it:** at which temperature will the model's text be as varied as Shakespeare's?
#
# We measure variety by the share of different bigrams among all bigrams of a text (*distinct-2*).
# A loop of the same words has few. The model continues sixteen held-out beginnings for 64 tokens
# each, at five temperatures; the plays' own continuations are the line to compare with. The second
# picture shows what each text costs: the mean $-\log_2 P$ of its tokens at temperature 1.

# %%
N, LENGTH = 16, 64
starts, _ = data.batch(text.held_out, seed=3, step=0, rows=N, length=16 + LENGTH)
originals = starts[:, 16:]  # (N, 64) how the plays go on


def distinct(rows, n=2):
    """Different n-grams / all n-grams, within each row, all rows together."""
    grams = [tuple(row[i : i + n]) for row in rows.tolist() for i in range(len(row) - n + 1)]
    return len(set(grams)) / len(grams)


def cost(rows):
    """Mean −log2 P of the continuations, at temperature 1: bits a token."""
    with torch.no_grad():
        log_P = model.log_probs(torch.cat([starts[:, :16], rows], 1)[:, :-1])[:, 15:]
    return -log_P.gather(-1, rows.unsqueeze(-1)).mean().item() / math.log(2)


temperatures, texts = [0.0, 0.5, 0.8, 1.0, 1.2], {}
for T in temperatures:
    steps = model.generate(starts[:, :16], LENGTH, temperature=T, seed=0)
    texts[T] = torch.stack(list(steps), 1)  # (N, 64)
    print(f"T {T}: distinct-2 {distinct(texts[T]):.2f}, {cost(texts[T]):.2f} bits a token")
print(f"plays: distinct-2 {distinct(originals):.2f}, {cost(originals):.2f} bits a token")

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.3))
for ax, measure, label in (
    (axes[0], distinct, "distinct-2 (different / all bigrams)"),
    (axes[1], cost, "bits a token at temperature 1"),
):
    ax.plot(temperatures, [measure(texts[T]) for T in temperatures], "o-", color=course.BLUE)
    ax.axhline(measure(originals), color=course.ORANGE, linestyle="--")
    ax.text(0, measure(originals), "the plays themselves", color=course.VERMILION, va="bottom")
    ax.set(xlabel="temperature", ylabel=label)
course.show(figure, "06-variety")
for T in (0.0, 0.8, 1.2):
    print(f"— temperature {T}:", tokenizer.decode(texts[T][0].tolist()), sep="\n", end="\n\n")

# %%
variety = [distinct(texts[T]) for T in temperatures]
assert variety[0] < variety[1] < distinct(originals) < min(variety[2:])
assert abs(cost(texts[1.0]) - cost(originals)) < 0.7
assert cost(texts[0.0]) < cost(texts[0.5]) < cost(texts[1.0]) < cost(texts[1.2])

# %% [markdown]
# Greedy text runs in circles: the likeliest next token, again and again, is not the likeliest
# text, let alone a typical one. With rising temperature the variety grows, and so does the cost.
# At temperature 1 the text costs about what the plays cost: that is what calibrated means, the
# model is as surprised by its own text as by the real one. But its bigrams are then more varied
# than those of the plays, because its mistakes are spread widely. It is as varied as the plays
# between 0.5 and 0.8. These numbers come from one draw of a small model; try other seeds before you
# believe a difference between neighbouring temperatures.
#
# ## 6. Ties: what one id cannot tell
#
# All this needs a signature of its own for each token. With $H = 1$ tokens share a bucket for good:
# their scores are equal whatever is trained, and sampling cannot tell them apart. Take $V = 1024$
# tokens and $B = 256$.

# %%
single = course.small(corpus.tokenizer, num_hashes=1, num_buckets=256)
with torch.no_grad():
    inputs = torch.tensor([[1, 2, 3]])
    scores = single.token_scores(single(inputs)[0, -1])  # (V,) of an untrained model
    four = independent.token_scores(independent(inputs)[0, -1])  # (V,) H = 4
ids = single.model.hash_map[:, 0]  # (V,)
print(f"different scores: H = 1: {len(scores.unique()):,}, H = 4: {len(four.unique()):,} of 1,024")
assert len(scores.unique()) == len(ids.unique()) < 256 and len(four.unique()) > 1000
seen = np.bincount(corpus.held_out[:100_000], minlength=1024)  # how often each token occurs
commonest = np.zeros(256)
np.maximum.at(commonest, ids.numpy(), seen)  # of each bucket
best = commonest.sum() / seen.sum()
print(f"tokens of a bucket: {len(ids) / len(ids.unique()):.1f} on average")
print(f"a model that knows every next bucket and takes its commonest token is right at {best:.2f}")
assert abs(best - 0.66) < 0.01

# %% [markdown]
# Even a perfect single-ID model, one that knows the bucket of every next token and takes the
# commonest token in it, would be right at no more than 0.66 of the positions. With four ids no two
# tokens have the same signature. That is what signatures are for.
#
# ## What we saw
#
# Scores are renormalised over the tokens that exist; one embedding bag scores them all. Whether
# the probabilities can be believed depends on the objective: a model trained id by id is confident
# and wrong (calibration error 0.70 here) until a temperature τ, fitted by minimising a convex loss,
# corrects it; a `joint` model needs little. τ changes the confidence, never the order. Temperature,
# top-k and top-p then depart from the calibrated distribution on purpose: a lower temperature for a
# safe text, a higher one for a varied text.
#
# ## Exercises
#
# 1. *Calculate.* Three tokens have the true probabilities 1/2, 1/4, 1/4, and an `independent`
#    model with $H = 4$ has learned them perfectly, without bucket mates. What are its
#    renormalised probabilities at τ = 1? Which τ restores the true ones?
# 2. *Change.* How many tokens does top-p 0.9 leave at the held-out positions, on average and at
#    most, at temperature 1 and at 1.2? What does top-k 40 do there?
# 3. *Find out.* One τ for all positions is a compromise. Fit one for the half of the positions
#    where the small `independent` model is more confident, and one for the other half. Which is
#    larger, and does tutorial 05 say why?
#
# Answers: `answers.py`, `python tutorials/answers.py 06`. Next:
# [07 · A growing vocabulary](07_growing_vocabulary.ipynb)
