# %% [markdown]
# # 02 · The gated embedding
#
# **How do the rows of a signature become one input vector, why is there a gate, and what did it
# learn?**
#
# Afterwards you can
# * compute an input vector by hand, and say what two tokens with a common id have in common;
# * say which of its rows a token listens to, and how the gate can know;
# * judge by an experiment how much of the model hangs on the gate.
#
# Reading: 25 minutes. Run time: about half a minute on 2 cores. Paper:
# [section 3.2](https://arxiv.org/abs/2606.28057). Code: `GatedEmbedding` in `mhf.py`.
#
# On Colab: `!git clone REPOSITORY project`, `%cd project/tutorials`,
# `!pip install -r ../requirements.txt`
#
# Tutorial 01 gave every token a signature, $H$ bucket ids. Each bucket has a row in the table $E$.
# With $V = 8{,}192$ tokens and $B = 2{,}048$ buckets a row belongs to four tokens on average. So
# none of a token's rows is its own; only their combination is.

# %%
import sys

sys.path.append("tutorials")  # for a kernel that was started one folder above

import course
import numpy as np
import torch
import torch.nn.functional as F

from support.data import windows

plt = course.pyplot()
model, tokenizer = course.shipped()
corpus = course.corpus()
V, H, B, D = 8192, 4, 2048, 128
signatures = model.model.hash_map  # (V, H)
table, combiner = model.table, model.model.combiner  # (H, B, D), the GatedEmbedding
assert signatures.shape == (V, H) and table.shape == (H, B, D)

# %% [markdown]
# ## 1. Four rows, and who else has them
#
# How often each token occurs in the training text will matter throughout. Here are the four rows of
# " night" and the tokens it shares them with, the most frequent first.

# %%
seen = torch.from_numpy(np.bincount(corpus.training, minlength=V))  # (V,)
(night,) = tokenizer.encode(" night")
for j, bucket in enumerate(signatures[night].tolist()):
    others = (signatures[:, j] == bucket).nonzero()[:, 0]
    others = others[seen[others].argsort(descending=True)]
    told = ", ".join(f"{tokenizer.decode([i])!r} {seen[i]:,}" for i in others.tolist())
    print(f"row {bucket:4} of function {j + 1}: {told}")

# %% [markdown]
# Each row is *ambiguous*: it gets gradients whenever any of its tokens occurs, so it mixes what
# they all need. A row whose other tokens are frequent is mostly theirs.
#
# ## 2. From rows to a vector, by hand
#
# For the $H$ rows $e_1, \ldots, e_H$ of a token:
#
# $$s_j = w_2 \cdot \mathrm{SiLU}(W_1 e_j + b_1) + b_2, \qquad
# \alpha = \mathrm{softmax}(s_1, \ldots, s_H), \qquad
# x = W_s \sum_j \alpha_j e_j + b_s$$
#
# The *scorer* ($W_1$ is $Z \times D$, $Z = 64$) gives each row a number, the softmax over the $H$
# rows makes weights of them: this is the *gate* $\alpha$. The *adapter* $W_s$ is a $D \times D$
# matrix. The same scorer looks at every row, one at a time: it knows neither the token, nor the
# function, nor the other rows.


# %%
def by_hand(token_ids):
    e = torch.stack([table[j, signatures[token_ids, j]] for j in range(H)], dim=1)  # (M, H, D)
    W1, b1 = combiner.scorer[0].weight, combiner.scorer[0].bias  # (Z, D), (Z,)
    w2, b2 = combiner.scorer[2].weight, combiner.scorer[2].bias  # (1, Z), (1,)
    s = F.silu(e @ W1.T + b1) @ w2.T + b2  # (M, H, 1)
    gate = s.exp() / s.exp().sum(1, keepdim=True)  # (M, H, 1)
    Ws, bs = combiner.output_proj[0].weight, combiner.output_proj[0].bias  # (D, D), (D,)
    return (gate * e).sum(1) @ Ws.T + bs, gate[..., 0]  # (M, D), (M, H)


everything = torch.arange(V)
x, gate = (y[0] for y in model.embed(everything[None], return_gate=True))  # (V, D), (V, H)
own_x, own_gate = by_hand(everything)
assert torch.allclose(x, own_x, atol=1e-5) and torch.allclose(gate, own_gate, atol=1e-5)
print("gate of ' night':", [round(g, 2) for g in gate[night].tolist()])

# %% [markdown]
# ## 3. A common id is a common part
#
# *Before you run it:* two tokens share one of their four rows. How large is the cosine of their
# input vectors? And if they share two? The picture shows the cosines of pairs that share none,
# one and two ids.

# %%
shared = sum((column[:, None] == column[None]).to(torch.uint8) for column in signatures.T)  # (V, V)
upper = torch.ones(V, V, dtype=torch.bool).triu(1)  # each pair once
direction = F.normalize(x, dim=-1)
cosines = direction @ direction.T  # (V, V)
by_shared = [cosines[upper & (shared == k)] for k in range(3)]

figure, axes = plt.subplots(figsize=(7, 3))
for k, values in enumerate(by_shared):
    name = f"{k} shared: {len(values):,} pairs"
    axes.hist(values, torch.linspace(-0.5, 1, 31), density=True, histtype="step", lw=2, label=name)
axes.set(xlabel="cosine of the input vectors of two tokens", ylabel="density of the pairs")
axes.legend()
course.show(figure, "02-shared-ids")

means = [values.mean().item() for values in by_shared]
print("mean cosine with 0, 1, 2 shared ids:", [round(m, 2) for m in means])
assert abs(means[0] - 0.04) < 0.01 and abs(means[1] - 0.25) < 0.01
assert abs(means[2] - 0.49) < 0.01 and int(shared[upper].max()) == 2

# %% [markdown]
# 0.04, 0.25, 0.49: one shared row of four is worth about a quarter of a cosine. If rows are
# unrelated and weighted alike, that is geometry, not learning: the sums have one of four parts in
# common. A table of random rows shows it, too, and training has not undone it.

# %%
torch.manual_seed(0)
random_table = torch.randn(H, B, D)  # rows that nobody trained, and the plain mean of each token's
mean_rows = torch.stack([random_table[j, signatures[:, j]] for j in range(H)], 1).mean(1)  # (V, D)
direction = F.normalize(mean_rows, dim=-1)
cosines = direction @ direction.T
untrained = [cosines[upper & (shared == k)].mean().item() for k in range(3)]
print("untrained:", [round(m, 2) for m in untrained])
assert all(abs(m - k / 4) < 0.02 for k, m in enumerate(untrained))

# %% [markdown]
# **So why a gate?** The plain mean gives every row the same weight: the one that is nearly private
# and the one that belongs to a frequent stranger. A gate can turn up the first and turn down the
# second.
#
# ## 4. What the gate learnt
#
# *Before you run it:* " scruple" occurs 20 times in the training text. For each of its rows we list
# how often the *other* tokens of its bucket occur. Which row will the gate prefer?

# %%
busy = torch.stack([torch.zeros(B).index_add(0, c, seen.float()) for c in signatures.T])  # (H, B)
others = torch.stack([busy[j, c] for j, c in enumerate(signatures.T)], 1) - seen[:, None]  # (V, H)
for word in " scruple", " bachel", " garment", " king", " the":
    (i,) = tokenizer.encode(word)
    weights = [f"{g:.2f} ({n:6,.0f})" for g, n in zip(gate[i].tolist(), others[i].tolist())]
    print(f"{word!r:10} {seen[i]:6,} times; gate (others): {'  '.join(weights)}")

# %% [markdown]
# A pattern: the less others use a row, the more weight it gets. Does it hold in general? For each
# token we sort its four rows by how often their other tokens occur. Left: the gate weights of the
# rows in this order, over all tokens (box: the middle half; whiskers: 5% to 95%). Right: how large
# the largest weight of a token is. The grey line is the plain mean.

# %%
order = others[:-1].argsort(1)  # (V - 1, H), the rarest others first; without the pad
by_rank = gate[:-1].gather(1, order)  # (V - 1, H)
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
left.boxplot(by_rank.T.tolist(), whis=(5, 95), showfliers=False, medianprops={"color": course.BLUE})
left.axhline(0.25, color="0.6", linewidth=1)
left.set(xlabel="rank of the row (1: rarest others)", ylabel="gate weight")
groups = (0, 5), (5, 30), (30, 300), (300, 10**9)
strongest = [gate[(seen >= a) & (seen < b)].max(1).values.mean().item() for a, b in groups]
right.plot(["< 5", "5-29", "30-299", "≥ 300"], strongest, "o-")
right.axhline(0.25, color="0.6", linewidth=1)
right.set(xlabel="times in the training text", ylabel="largest weight, mean", ylim=(0.2, 0.4))
course.show(figure, "02-gate")

inside = others.log1p() - others.log1p().mean(1, keepdim=True)  # compared within each token
weight = gate.log() - gate.log().mean(1, keepdim=True)
rho = course.spearman(inside[:-1].flatten().numpy(), weight[:-1].flatten().numpy())
first = (gate[:-1].argmax(1) == others[:-1].argmin(1)).float().mean().item()
entropy = (torch.special.entr(gate).sum(1) / np.log(4)).mean().item()
print(f"rank correlation of the gate with others' frequency: {rho:.2f}")
print(f"the rarest others get the largest weight: {first:.2f} of the tokens (chance: 0.25)")
print(f"entropy of the gate: {entropy:.3f} of that of the plain mean")
print("largest weight by frequency:", [round(g, 2) for g in strongest])
assert abs(rho + 0.84) < 0.02 and abs(first - 0.72) < 0.02 and abs(entropy - 0.983) < 0.003
assert abs(strongest[0] - 0.37) < 0.01 and abs(strongest[3] - 0.28) < 0.01

# %% [markdown]
# It does: within a token, the rank correlation of the gate's weight with how often others use the
# row is −0.84, and for 0.72 of the tokens the row whose other tokens are rarest has the largest
# weight. But look at the size, too. The gate stays close to the mean: its entropy is 0.983 of the
# largest possible. It chooses more for rare tokens (largest weight 0.37 on average) than for
# frequent ones (0.28), which own their rows anyway.
#
# ## 5. How can it know?
#
# The scorer sees a single row and no frequency. So the row itself must show how busy it is. The
# picture plots each row of the table: how often its tokens occur, and what the scorer says of it;
# the colour is the row's length $\lVert e \rVert$.

# %%
used = torch.stack([c.bincount(minlength=B) > 0 for c in signatures.T])  # (H, B) has tokens
used[:, 0] = False  # the pad's rows
score, length = combiner.scorer(table)[..., 0][used], table.norm(dim=-1)[used]  # (rows,)
traffic = busy[used]
figure, axes = plt.subplots(figsize=(7, 3.4))
dots = axes.scatter(traffic + 1, score, s=4, c=length.clamp(max=2), rasterized=True)
figure.colorbar(dots, label="length of the row (2: or more)")
axes.set(xscale="log", xlabel="occurrences of all tokens of the row, + 1", ylabel="score s")
course.show(figure, "02-rows")

follows = [course.spearman(quantity.numpy(), traffic.numpy()) for quantity in (score, length)]
quiet = ~used
quiet[:, 0] = False  # rows that no token has
text = torch.tensor(corpus.held_out[:256].tolist())[None]  # (1, T)
logits = model.hash_head(model(text), table)[0].mean(0)  # (H, B), the mean over positions
print(f"rank correlation with traffic: score {follows[0]:.2f}, length {follows[1]:.2f}")
print(f"mean length: {length.mean():.2f}; without tokens {table.norm(dim=-1)[quiet].mean():.2f}")
print(f"mean logit: {logits[used].mean():.1f}; without tokens {logits[quiet].mean():.1f}")
assert abs(follows[0] + 0.89) < 0.02 and abs(follows[1] + 0.86) < 0.02
assert abs(table.norm(dim=-1)[quiet].mean() - 4.4) < 0.1 and abs(length.mean() - 1.04) < 0.05
assert logits[quiet].mean() < logits[used].mean() - 5

# %% [markdown]
# Nearly a line: score and traffic have a rank correlation of −0.89, length and traffic −0.86. Why
# are quiet rows longer? The table is tied: its rows are also the *output* weights of their buckets.
# A bucket that is hardly ever the right one is pushed down at every position, and gets a long row
# that points away from the states. The rows that no token has, which no input ever reads, show it
# best: a mean length of 4.4 where the others have 1.04, and by far the lowest logits. So the gate
# reads a sign that the other end of the model made. (Does it read the length or the direction?
# Exercise 3.)
#
# ## 6. Does the model need its gate?
#
# *Before you run it:* we replace the gate of the trained model by (a) the plain mean, (b) only the
# best row, (c) the reversed gate, softmax of $-s$, and measure on held-out text. How much worse
# will each be?

# %%
scorer, adapter = combiner.scorer, combiner.output_proj
gates = {
    "gate": lambda e: scorer(e).softmax(-2),
    "mean": lambda e: torch.full_like(e[..., :1], 1 / H),
    "best row only": lambda e: F.one_hot(scorer(e)[..., 0].argmax(-1), H)[..., None].to(e.dtype),
    "reversed": lambda e: (-scorer(e)).softmax(-2),
}


def held_out_loss(choose, inputs, targets):
    """−log P of the next token (windows, T) when choose(e) makes the weights (..., H, 1)."""
    combiner.forward = lambda e: (adapter((choose(e) * e).sum(-2)), None)
    log_p = [model.log_probs(x[None])[0].gather(1, y[:, None]) for x, y in zip(inputs, targets)]
    del combiner.forward  # the class's own again
    return -torch.stack(log_p)[..., 0]


T = model.config.max_position_embeddings
starts = np.linspace(0, len(corpus.held_out) - 1 - T, 96).astype(int)
inputs, targets = windows(corpus.held_out, starts, T)  # (96, T)
few = inputs[::4], targets[::4]  # 24 windows
perplexity = {n: held_out_loss(choose, *few).mean().exp().item() for n, choose in gates.items()}
figure, axes = plt.subplots(figsize=(7, 2.6))
bars = axes.barh(list(perplexity), [*perplexity.values()], color=course.SKY)
axes.bar_label(bars, [f"{p:.0f}" for p in perplexity.values()], padding=3)
axes.set(xlabel="perplexity on held-out text", xlim=(0, 550))
axes.invert_yaxis()
course.show(figure, "02-without-the-gate")

ratio = {name: p / perplexity["gate"] for name, p in perplexity.items()}
print({name: round(r, 3) for name, r in ratio.items()})
assert 1.0 < ratio["mean"] < 1.03 and 1.04 < ratio["reversed"] < 1.15 and ratio["best row only"] > 4

# %% [markdown]
# The plain answer: *hardly*. With the mean, perplexity rises by about one percent. The reversed
# gate costs several percent; one row alone ruins the model, because it cannot tell the tokens of a
# bucket apart. Where would a gate matter? At rare tokens, if the idea is right. We compare gate and
# mean by how often the token being read occurs in the training text.

# %%
with_gate, with_mean = (held_out_loss(gates[n], inputs, targets) for n in ("gate", "mean"))
worse = with_mean - with_gate  # (96, T)
for low, high in (0, 30), (30, 300), (300, 3000), (3000, 10**9):
    chosen = worse[(seen[inputs] >= low) & (seen[inputs] < high)]
    error = chosen.std() / len(chosen) ** 0.5
    amount = f"{chosen.mean():+.4f} ± {error:.4f} nats, {len(chosen):6,} positions"
    print(f"{low:5,} times or more, below {high:13,}: {amount}")
rare, frequent = worse[seen[inputs] < 30].mean(), worse[seen[inputs] >= 3000].mean()
assert 0.04 < rare < 0.12 and abs(frequent) < 0.01

# %% [markdown]
# So it is: after a rare token the mean costs most, some hundredths of a nat; after frequent ones
# nothing that we could measure. Rare tokens are few in running text, and the total hardly moves.
#
# Two things this experiment does *not* say. A model *trained* with the mean could adapt to it; that
# needs training runs ([assignment 1](assignments/README.md)). And with fewer buckets each row would
# have more owners, and more would depend on the gate.
#
# ## 7. The adapter
#
# $W_s$ started as the identity matrix (`adapter_init`: a deviation from the paper). Where did it
# go?

# %%
Ws, identity = adapter[0].weight, torch.eye(D)
distance = ((Ws - identity).norm() / identity.norm()).item()
sizes = torch.linalg.svdvals(Ws)
print(f"distance from the identity, relative to its length: {distance:.2f}")
print(f"singular values from {sizes.max():.2f} to {sizes.min():.2f}, median {sizes.median():.2f}")
assert abs(distance - 0.39) < 0.01
assert abs(sizes.max() - 1.77) < 0.02 and abs(sizes.min() - 0.28) < 0.02

adapter = torch.nn.Identity()
times = held_out_loss(gates["gate"], *few).mean().exp().item() / perplexity["gate"]
print(f"perplexity without the adapter: {times:.1f} times as high")
assert 1.7 < times < 2.4

# %% [markdown]
# It moved by 0.39 of the identity's own length, stretching some directions by 1.77 and shrinking
# others to 0.28. Taking it out doubles the perplexity. A likely reason: the table serves two ends;
# its rows must be good *inputs* and good *output weights*. The adapter lets the input side turn and
# scale what the output side wants to keep.
#
# ## 8. What it costs
#
# The gate is small, and nothing in it grows with $V$.

# %%
parts = {"table": model.model.embed_tokens, "scorer": scorer, "adapter": combiner.output_proj}
count = {name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()}
print({name: f"{size:,}" for name, size in count.items()}, f"a V × D table: {V * D:,}")
assert count == {"table": H * B * D, "scorer": 64 * D + 64 + 64 + 1, "adapter": D * D + D}
assert count["scorer"] + count["adapter"] == 24833 and V * D == H * B * D == 1048576

ours, sizes = sum(count.values()), np.array([1e3, 8192, 3.3e4, 1.3e5, 1e6])
figure, axes = plt.subplots(figsize=(7, 3))
axes.plot(sizes, sizes * D, "o-", color=course.ORANGE, label="V × D table")
label = "H × B × D table, scorer, adapter"
axes.plot(sizes, [ours] * len(sizes), "s-", color=course.BLUE, label=label)
axes.set(xscale="log", yscale="log", xlabel="tokens V", ylabel=f"parameters (D = {D})")
axes.legend()
course.show(figure, "02-parameters")

# %% [markdown]
# At $V = 8{,}192$ there is nothing to gain: the standard table has as many parameters, 1,048,576,
# and scorer and adapter add 24,833. The picture shows why one would do it: the standard table grows
# with $V$, this one does not. What fewer rows cost in quality, `experiments.py one_id` measures.
#
# ## What we saw
#
# * An input vector is a weighted mean of $H$ shared rows, turned by the adapter. A shared id is a
#   shared part: about a quarter of a cosine for one of four rows.
# * The gate learnt what it was meant for: to listen to rows that few others use. It can, because
#   tied training leaves quiet rows longer.
# * In this small, roomy model little depends on it: one percent of perplexity, all of it at rare
#   tokens. The adapter matters much more.
# * None of these parts grows with the vocabulary.
#
# ## Exercises
#
# 1. *Calculate.* For $D = 768$, $H = 4$, $B = 16{,}384$, $Z = 64$: how many parameters have table,
#    scorer and adapter together, and from which $V$ on is a $V \times D$ table larger?
# 2. *Change.* Sharpen or soften the trained gate: softmax of $k \cdot s$ with $k = 0.5, 1, 2, 4$.
#    Is the trained $k = 1$ the best on held-out text?
# 3. *Find out.* Does the scorer read a row's length or its direction? Give all rows the same length
#    and see how well its score still follows the traffic.
#
# Answers: `python tutorials/answers.py 02`. Next: [03 · The backbone](03_backbone.ipynb), what
# happens to the input vectors.
