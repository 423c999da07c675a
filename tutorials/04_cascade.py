# %% [markdown]
# # 04 · The cascade
#
# **How are the H ids of the next token predicted one after the other, and what does one
# prediction tell the next?**
#
# Afterwards you can
#
# * compute the cascade of one position by hand, and see that its soft embedding is attention;
# * measure what the mixers pass on: switch them off, cut a wire, force a bucket;
# * say in which sense the ids are *not* predicted one after the other.
#
# Reading: 25 minutes. Run time: under half a minute on 2 cores. Paper:
# [section 3.3](https://arxiv.org/abs/2606.28057), the hash decoder. Code: `soft_embedding` and
# `CascadeDecoder` in `mhf.py`.
#
# On Colab: `!git clone REPOSITORY project`, `%cd project/tutorials`,
# `!pip install -r ../requirements.txt`

# %%
import copy
import math
import sys
from unittest import mock

sys.path.append("tutorials")  # for a kernel that was started one folder above

import course
import torch
import torch.nn.functional as F

import mhf
from support import data
from support.explain import explain

plt = course.pyplot()
torch.set_grad_enabled(False)
model, tokenizer = course.shipped()
H, B, D = model.config.num_hashes, model.config.num_buckets, model.config.hidden_size
print(f"H {H}, B {B:,}, D {D}, V {model.config.vocab_size:,}")

# %% [markdown]
# ## 1. One position by hand
#
# The backbone has read a text and ends in a state $h$ of width $D$. A standard model would
# multiply it with $V$ rows. Here the next token is a signature of $H$ ids, so there are $H$
# questions, each with $B$ answers. The rows of the embedding table $E_j$ ($B \times D$) that read
# the ids also predict them:
#
# $$c_1 = h, \qquad o_j = E_j c_j, \qquad e_j = \mathrm{softmax}(o_j)^\top E_j,$$
# $$c_{j+1} = c_j + W_{up}\,\mathrm{SiLU}(W_{dn}[c_j; e_j] + b_{dn}) + b_{up}.$$
#
# * $o_j$: one logit for each bucket, the inner product of $c_j$ with the row of that bucket.
# * $e_j$, the *soft embedding*: the mean of all rows, weighted by the prediction. It tells
#   function $j+1$ what function $j$ has predicted.
# * The *mixer*, a small network, one for each step, turns $c_j$ and $e_j$ into $c_{j+1}$.
#
# Functions count from 1 in the text and from 0 in the code.

# %%
prompt = tokenizer.encode("I pray")
h = model(torch.tensor([prompt]))[0, -1]  # (D,)
c, logits, soft = h, [], []
for j in range(H):
    E = model.table[j]  # (B, D)
    o = E @ c  # (B,)
    logits.append(o)
    if j < H - 1:  # the last function has no successor
        e = o.softmax(0) @ E  # (D,)
        W_dn, _, W_up = model.hash_head.cascade_mixer[j]
        c = c + W_up(F.silu(W_dn(torch.cat([c, e]))))  # (D,)
        soft.append(e)
by_hand = torch.stack(logits)  # (H, B)
torch.testing.assert_close(by_hand, model.hash_head(h, model.table), atol=1e-4, rtol=1e-4)

# %% [markdown]
# `explain` (in `support/explain.py`) shows what these numbers say. Each panel is one function
# and its likeliest buckets; each bar names the likeliest tokens of its bucket. One token, " you"
# (orange), appears in all four panels, each time in other company: only the four ids together
# name it.

# %%
seen = explain(model, prompt, top_k=5)
best = seen["top_tokens"][0]
figure, axes = plt.subplots(1, H, figsize=(11, 2.7))
for j, (ax, function) in enumerate(zip(axes, seen["functions"])):
    top = function["top"][::-1]
    hues = [course.ORANGE if b["bucket"] == best["signature"][j] else "#cccccc" for b in top]
    ax.barh(range(5), [b["prob"] for b in top], color=hues)
    for y, b in enumerate(top):
        ax.text(
            0.001, y, "  ".join(repr(t["text"]) for t in b["tokens"][:3]), va="center", fontsize=8
        )
    ax.set(yticks=range(5), yticklabels=[b["bucket"] for b in top], xlim=(0, 0.15))
    ax.set(xlabel=f"probability, function {j + 1}")
axes[0].set_ylabel("bucket")
course.show(figure, "04-buckets")
for entry in seen["top_tokens"][:3]:
    print(f"{entry['text']!r:8} score {entry['score']:.2f}  P {math.exp(entry['log_prob']):.3f}")
assert seen["top_tokens"][0]["text"] == " you"

# %% [markdown]
# No function is certain: its best bucket has a few per cent, and function 1 prefers buckets of
# other tokens. Yet " you" gets half of the renormalised probability, because it ranks high in all
# four functions. The score of a token is $\sum_j \log p_j[\mathrm{id}_j]$ (tutorial 05 asks what
# that means, 06 what to do with it).

# %%
log_p = by_hand.log_softmax(-1)  # (H, B)
signatures = model.model.hash_map  # (V, H)
scores = sum(log_p[j, signatures[:, j]] for j in range(H))  # (V,)
best = scores.argmax().item()
assert tokenizer.decode([best]) == " you"
assert abs(scores[best].item() - seen["top_tokens"][0]["score"]) < 1e-3

# %% [markdown]
# ## 2. The soft embedding is attention
#
# Why not pass on the row of the *best* bucket? Because choosing is not differentiable: no gradient
# says which bucket would have been better. A weighted mean is differentiable, and it is well known:
# $\mathrm{softmax}(E c)^\top E$ is attention of one query $c$ over $B$ keys that are also the
# values. The scale is 1, not $1/\sqrt{D}$, because $E c$ are already the logits.

# %%
query, rows = h.view(1, 1, D), model.table[0].view(1, B, D)
attended = F.scaled_dot_product_attention(query, rows, rows, scale=1.0)  # (1, 1, D)
torch.testing.assert_close(attended.flatten(), soft[0], atol=1e-5, rtol=1e-4)
usual = F.scaled_dot_product_attention(query, rows, rows)  # scale 1/√D: another mean
middle = model.table[0, 1:].mean(0)  # (D,) the mean of all rows but the pad's
for name, e in (("1", attended), ("1/√D", usual)):
    print(f"scale {name:4}: {(e.flatten() - middle).norm():.2f} away from the mean row")
assert (usual.flatten() - middle).norm() < 0.5 * (attended.flatten() - middle).norm()

# %% [markdown]
# So $e_j$ carries a *direction* (which rows) and a *certainty*: the less certain the prediction,
# the nearer $e_j$ is to the mean of all rows, which says nothing. With the usual scale it is nearer
# still. The picture shows 2,048 positions of the held-out text, on which the model never trained.
# Look how few of them are as far from the mean row as a single row is.

# %%
x, y = data.batch(course.corpus().held_out, seed=0, step=0, rows=8, length=256)
h, targets = model(x).flatten(0, 1), y.flatten()  # (M, D), (M,)
assert len(h) == 2048 and f"{len(h):,}" == "2,048"
ids = signatures[targets]  # (M, H) the true ids
log_p = model.bucket_log_probs(h)  # (M, H, B)
entropy = torch.special.entr(log_p.exp()).sum(-1) / math.log(2)  # (M, H) in bits
e = mhf.soft_embedding(h @ model.table[0].T, model.table[0])  # (M, D), e_1
away = (e - middle).norm(dim=-1)  # (M,) from the mean row
row_away = (model.table[0] - middle).norm(dim=-1).mean()

# %%
figure, ax = plt.subplots(figsize=(5.5, 3.4))
ax.scatter(entropy[:, 0], away, s=5, alpha=0.4, color=course.BLUE, linewidths=0)
ax.axhline(row_away, color=course.ORANGE)
ax.text(6, row_away + 0.03, "a single row (mean)", color=course.VERMILION)
ax.axvline(11, color=course.BLACK, linewidth=0.8, linestyle=":")
ax.text(10.9, 0.9, "uniform", rotation=90, ha="right", va="top", fontsize=8)
ax.set(xlabel="entropy of function 1's prediction (bits)", xlim=(0, 11.3), ylim=(0, 1.75))
ax.set_ylabel("distance of $e_1$ from the mean row")
course.show(figure, "04-soft-embedding")
print(f"mean distance {away.mean():.2f}; of a row: {row_away:.2f}")
print("mean entropy in bits, functions 1 to 4:", [round(v, 2) for v in entropy.mean(0).tolist()])
assert abs(away.mean() - 0.37) < 0.02 and abs(row_away - 0.93) < 0.02
assert course.pearson(entropy[:, 0], away) < -0.9

# %% [markdown]
# On average $e_1$ is 0.37 away from the mean row; a single row is 0.93 away. The uniform
# distribution over $B$ buckets has $\log_2 B = 11$ bits, and the functions have about 9: this small
# model spreads its probability widely, so its soft embeddings say little.
#
# ## 3. What do the mixers pass on?
#
# The entropies fall from function to function, from 9.18 to 8.91 bits. Now we switch all mixers
# off, so that $c_j = h$ for each function: the last linear layer of each mixer becomes 0, all other
# weights stay.
#
# **Before you run it:** what will functions 2 to 4 do?


# %%
def bits_of(log_p):
    """Mean −log2 p of the true ids, function by function: (M, H, B) -> (H,)."""
    return -log_p.gather(-1, ids.unsqueeze(-1))[..., 0].mean(0) / math.log(2)


without = copy.deepcopy(model.hash_head)
for mixer in without.cascade_mixer:
    mixer[2].weight.zero_()
    mixer[2].bias.zero_()
log_p_without = without(h, model.table).log_softmax(-1)  # (M, H, B)
entropy_without = torch.special.entr(log_p_without.exp()).sum(-1).mean(0) / math.log(2)  # (H,)
for j in range(H):
    print(f"function {j + 1}: entropy {entropy[:, j].mean():.2f} bits", end=", ")
    print(f"without mixers {entropy_without[j]:.2f}")
assert (entropy.mean(0) - torch.tensor([9.18, 9.02, 8.95, 8.91])).abs().max() < 0.03
assert (entropy_without[1:] - 9.95).abs().max() < 0.06

# %% [markdown]
# Without mixers the entropy of functions 2 to 4 rises by about a bit (9.95 instead of 8.95). So
# the mixers matter. But which of their two inputs: $c_j$, what is known already, or $e_j$, what
# function $j$ says? To tell them apart we cut only the second wire: each mixer gets the *mean* of
# the soft embedding over all positions, which says nothing about this position. Inside the block
# of `mock.patch.object` our function takes the place of `mhf.soft_embedding`.
#
# **Before you run it:** how near will the perplexity with $e_j$ cut be to that of the whole
# cascade, how near to that without mixers?


# %%
def cut(o, E):
    """A soft embedding that is the same at all positions: o (M, B), E (B, D) -> (M, D)."""
    return (o.softmax(-1) @ E).mean(0).expand(len(o), -1)


def perplexity(log_p):
    """Of the token: renormalised over the real ones, calibrated with the model's τ."""
    scores = model.sum_over_signatures(log_p.flatten(1).T.contiguous()).T  # (M, V)
    return F.cross_entropy(scores / model.config.calibration, targets).exp().item()


with mock.patch.object(mhf, "soft_embedding", cut):
    log_p_cut = model.bucket_log_probs(h)  # (M, H, B)
variants = {"cascade": log_p, "$e_j$ cut": log_p_cut, "mixers off": log_p_without}
bits = {name: bits_of(value) for name, value in variants.items()}  # each (H,)
ppl = {name: perplexity(value) for name, value in variants.items()}
for name in variants:
    print(f"{name:10} bits of the true ids {[round(b, 2) for b in bits[name].tolist()]}", end="")
    print(f", perplexity of the token {ppl[name]:.1f}")
expected = [86.9, 86.5, 104.4]
assert all(abs(a - b) < 1.5 for a, b in zip(ppl.values(), expected))

# %% [markdown]
# The perplexity of the token is 86.9 with the cascade, 104.4 without mixers, and 86.5 with $e_j$
# cut: as good as before. In *this* model the mixers help because they are one more non-linear
# layer for each function, with $h$ as input; the prediction of function $j$ is hardly needed. The
# single ids cost a little more without it (a tenth of a bit), the token does not.
#
# Now we give *wrong* information instead of none. `force` puts the row of one bucket in the place
# of a soft embedding, as if that bucket were certain. First for our one position.

# %%
wrong = signatures[tokenizer.encode(" king")[0], 0].item()  # the bucket of another token
forced = explain(model, prompt, top_k=5, force={0: wrong})
for name, result in (("as it is", seen), ("forced", forced)):
    best = ", ".join(f"{t['text']!r} {t['log_prob']:.2f}" for t in result["top_tokens"][:4])
    print(f"{name:9} {best}")
print("entropies:", [round(f["entropy_bits"], 2) for f in seen["functions"]], end=" ")
print("→", [round(f["entropy_bits"], 2) for f in forced["functions"]])
own = [[b["prob"] for b in r["functions"][0]["top"]] for r in (seen, forced)]
assert own[0] == own[1]  # function 1 itself stays as it was
assert forced["top_tokens"][0]["text"] == " you"

# %% [markdown]
# Function 2 was told that function 1 is certain of the bucket of " king", and " you" is still the
# best token. How far do the later functions move on average over all positions, if one function is
# forced to the bucket of a random other token? We measure $\mathrm{KL}(p \,\|\, p^{forced})$ in
# bits: 0 means that a distribution has not moved.


# %%
def moved(other):
    """Mean KL(p ‖ other) in bits, function by function: (H,)."""
    return (log_p.exp() * (log_p - other)).sum(-1).mean(0) / math.log(2)


def forced_to(j, buckets):
    """log p (M, H, B) if function j is told to be certain of these buckets (M,)."""
    steps = model.hash_head.steps(h, model.table, force={j: buckets})
    return torch.stack([o for o, _ in steps], 1).log_softmax(-1)


shuffled = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]  # (M, H)
shift = {f"wrong bucket for {j + 1}": moved(forced_to(j, shuffled[:, j])) for j in range(3)}
shift |= {"$e_j$ cut": moved(log_p_cut), "mixers off": moved(log_p_without)}
for name, values in shift.items():
    print(f"{name:18}", [round(v, 3) for v in values.tolist()])
assert abs(shift["wrong bucket for 1"][1] - 0.12) < 0.02
assert shift["wrong bucket for 2"][2] < 0.03 and shift["wrong bucket for 3"][3] < 0.02
assert abs(shift["mixers off"][1] - 0.57) < 0.05

# %% [markdown]
# Left: what the true ids cost. Right: how far the functions move, on a logarithmic scale. A wrong
# bucket moves the functions after it less than switching the mixers off does, and only that of
# function 1 moves them noticeably.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4))
for (name, values), colour in zip(bits.items(), [course.BLUE, course.ORANGE, course.BLACK]):
    left.plot(range(1, 5), values, marker="o", label=name, color=colour)
left.set(xticks=range(1, 5), xlabel="function", ylabel="bits of the true id", ylim=(7.5, 8.8))
left.legend(loc="center right", bbox_to_anchor=(1, 0.45))
colours = [course.VERMILION, course.PURPLE, course.SKY, course.ORANGE, course.BLACK]
for n, ((name, values), colour) in enumerate(zip(shift.items(), colours)):
    there = [j for j in range(H) if values[j] > 1e-6]
    at = [j + 1 + 0.15 * (n - 2) for j in there]
    right.bar(at, values[there], 0.14, label=name, color=colour)
right.set(xticks=range(2, 5), xlabel="function", ylabel="moved by (bits)", yscale="log")
right.legend(loc="upper left", bbox_to_anchor=(1, 1))
course.show(figure, "04-variants")

# %% [markdown]
# A wrong bucket for function 1 moves function 2 by 0.12 bits; switching the mixers off moves it
# by 0.57.
#
# ## 4. What the cascade is not
#
# "One after the other" sounds like a language model that reads its own last token. The cascade
# does not do that: every $c_j$ is computed from $h$, and nothing is drawn or chosen on the way. So
#
# $$p_2 = p(\mathrm{id}_2 \mid h), \qquad\text{not}\qquad p(\mathrm{id}_2 \mid \mathrm{id}_1, h).$$
#
# Compare it with a chain of conditional probabilities. Suppose function 2 is told the *true* id of
# function 1. Only the tokens in that bucket are left, about four of $V$.
#
# **Before you run it:** the true id 2 costs 7.72 bits. What would it cost a function that knows
# which tokens exist? And what does our cascade make of it, if we force the true bucket?

# %%
told = bits_of(forced_to(0, ids[:, 0]))  # (H,)
scores = model.token_scores(h)  # (M, V)
log_P = (scores / model.config.calibration).log_softmax(-1)  # (M, V) over the real tokens
left_over, chain, before = torch.ones_like(log_P, dtype=torch.bool), [], 0.0
for j in range(H):  # P(id_1) · P(id_2 | id_1) · …, from the renormalised probabilities
    left_over &= signatures[:, j] == ids[:, j : j + 1]  # (M, V)
    now = log_P.masked_fill(~left_over, -torch.inf).logsumexp(-1)  # (M,)
    chain.append((before - now).mean().item() / math.log(2))
    before = now
plain = bits["cascade"]
chain = torch.tensor(chain)  # (H,)
for name, values in (("cascade", plain), ("told id 1", told), ("real tokens", chain)):
    print(f"{name:12}", [round(v, 2) for v in values.tolist()], f"sum {sum(values):.2f} bits")
assert abs(plain[1] - 7.72) < 0.03 and abs(told[1] - 7.55) < 0.03
assert abs(chain[0] - 6.13) < 0.03 and abs(chain[1] - 0.31) < 0.02 and max(chain[2:]) < 0.001
assert abs(plain.sum() - 30.95) < 0.1 and abs(sum(chain) - 6.44) < 0.03

# %%
figure, ax = plt.subplots(figsize=(7, 3.2))
table = {"cascade": plain, "cascade, told the true id 1": told, "chain over the real tokens": chain}
for n, (name, values) in enumerate(table.items()):
    colour = [course.BLUE, course.SKY, course.ORANGE][n]
    ax.bar([j + 0.8 + 0.25 * n for j in range(1, 5)], values, 0.24, label=name, color=colour)
ax.set(xticks=[j + 1.05 for j in range(1, 5)], xticklabels=range(1, 5), xlabel="function")
ax.set(ylabel="bits of the true id", ylim=(0, 11))
ax.legend(loc="upper center", ncols=3, fontsize=8)
course.show(figure, "04-chain")

# %% [markdown]
# Told the truth about id 1, function 2 saves 0.17 bits (7.72 → 7.55). The chain over the real
# tokens needs 0.31 bits for id 2 and nothing for ids 3 and 4, since two ids nearly always name
# one token. Together the four ids of the cascade cost 30.95 bits, the token 6.44. The cascade does
# not know *which signatures exist*; this knowledge enters with the renormalisation over the $V$
# real tokens.

# %%
saved = (plain[1] - told[1]).item()
print(f"saved {saved:.2f} bits of {plain[1] - chain[1]:.2f}")
assert abs(saved - 0.17) < 0.02

# %% [markdown]
# ## 5. Do the four functions agree?
#
# Take the top bucket of each function. Do these four ids name a real token? By chance they would
# not: only $V$ of the $B^H$ signatures are taken. The picture shows how many real tokens are still
# compatible after ids 1 … j, for the functions' own top buckets and for the ids of the
# renormalised choice (the best *real* token).

# %%
greedy = log_p.argmax(-1)  # (M, H) each function for itself
choice = scores.argmax(-1)  # (M,) the best real token
owner = [model.signatures.owner.get(tuple(row)) for row in greedy.tolist()]
named = torch.tensor([token is not None for token in owner])  # (M,)
same = torch.tensor([token == best for token, best in zip(owner, choice.tolist())])
print(f"the top buckets name a real token at {named.float().mean():.3f} of the positions")
print(f"  it is the renormalised choice: {same[named].float().mean():.2f}")
print(f"  it is right: {(choice == targets)[named].float().mean():.2f}")
print(f"the renormalised choice is right at {(choice == targets).float().mean():.3f}")
assert same[named].all() and abs(named.float().mean() - 0.090) < 0.008
assert abs((choice == targets)[named].float().mean() - 0.93) < 0.03
assert abs((choice == targets).float().mean() - 0.254) < 0.01


# %%
def funnel(rows):
    """Mean number of real tokens that are compatible with ids 1 … j: H+1 numbers."""
    left, means = torch.ones(len(rows), len(signatures), dtype=torch.bool), [len(signatures)]
    for j in range(H):
        left &= signatures[:, j] == rows[:, j : j + 1]  # (M, V)
        means.append(left.sum(-1).float().mean().item())
    return means


figure, ax = plt.subplots(figsize=(6, 3.4))
luck = [len(signatures) / (B - 1) ** j for j in range(H + 1)]
for name, values, colour, marker in (
    ("renormalised choice", funnel(signatures[choice]), course.ORANGE, "s"),
    ("top bucket of each function", funnel(greedy), course.BLUE, "o"),
    ("random ids", luck, course.BLACK, "x"),
):
    ax.plot(range(H + 1), values, marker=marker, color=colour, label=name)
    print(f"{name:27}", [f"{v:.2g}" for v in values])
ax.set(yscale="log", xticks=range(H + 1), xlabel="ids known", ylim=(1e-3, 2e4))
ax.set_ylabel("real tokens left (mean)")
ax.legend()
course.show(figure, "04-funnel")

# %% [markdown]
# One id leaves about five tokens, two leave one: a signature is more than enough. The functions'
# own choices name a real token at 0.090 of the positions, and then it is always the renormalised
# choice (it must be: each term of its score is the largest there is). At these positions the model
# is certain: it is right at 0.93 of them, while the renormalised choice is right at 0.254 of all.
# Elsewhere the four functions vote for ids of *different* tokens, and the renormalised choice is
# the best compromise among the real ones.
#
# ## 6. What the mixers cost
#
# Each of the $H-1$ mixers has two linear layers, with $2D \cdot Z + Z$ and $Z \cdot D + D$
# parameters. Neither $B$ nor $V$ occurs: the output rows are those of the input table.

# %%
Z = model.config.bottle_neck_dim
mixers = (H - 1) * (2 * D * Z + Z + Z * D + D)
total = model.num_parameters()["total"]
print(f"{mixers:,} of {total:,} parameters: {mixers / total:.1%}")
assert mixers == sum(p.numel() for p in model.hash_head.parameters())
assert abs(mixers / total - 0.038) < 0.001

# %% [markdown]
# ## What we saw
#
# Each of the H ids is predicted by inner products with the rows of the table; between two ids the
# soft embedding (attention over the buckets) and a mixer change the query. Nothing is chosen on
# the way, so the cascade is one deeper function of $h$ and not a chain of conditional
# probabilities. In this small model, trained with the joint objective, the mixers help (perplexity
# 86.9 against 104.4 when they are switched off after training), but as layers: the model hardly
# uses the soft embedding, and a wrong bucket hardly disturbs it. Whether larger models use it more
# is open; the same cells measure it. The renormalisation over the real tokens, not the cascade,
# makes the ids fit together.
#
# ## Exercises
#
# 1. *Calculate.* How many parameters do the mixers of the paper's 1B model have (D 2048, Z 64,
#    H 4), and what share of all its parameters is that (`mhf.Config.preset("1b")` has its sizes)?
# 2. *Change.* Give the soft embedding the usual attention scale $1/\sqrt{D}$, in the trained
#    model (put a function in the place of `mhf.soft_embedding`, as in part 3). What happens to
#    the ids, and what to the token?
# 3. *Find out.* To switch a trained part off is unfair: without it the model could have learned
#    something else. Train two small models, one of them without mixers from the start. What is
#    the cascade worth then?
#
# Answers: `answers.py`, `python tutorials/answers.py 04`. Next:
# [05 · The objective](05_objective.ipynb)
