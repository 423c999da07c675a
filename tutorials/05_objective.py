# %% [markdown]
# # 05 · The objective
#
# **What should be trained: each id, or the token?**
#
# Afterwards you can
#
# * write down the three objectives (`independent`, `exact`, `joint`), check them by brute force,
#   and say what each pushes at the logits;
# * explain why a model trained id by id is far too sure of its tokens: about $p^H$ instead of
#   $p$;
# * read perplexity, τ and valid mass of a run, and choose an objective;
# * say what fills the memory in training, and compute the loss in chunks.
#
# Reading: 30 minutes. Run time: under a minute on 2 cores. Paper: the training objective, after
# [section 3.3](https://arxiv.org/abs/2606.28057). Code: `loss` and `loss_per_position` in
# `mhf.py`, `Run.backward` in `train.py`.
#
# On Colab: `!git clone REPOSITORY project`, `%cd project/tutorials`,
# `!pip install -r ../requirements.txt`

# %%
import json
import math
import sys

sys.path.append("tutorials")  # for a kernel that was started one folder above

import claims
import course
import numpy as np
import torch
import torch.nn.functional as F

import mhf
from support import data
from support.evaluate import fit_calibration

plt = course.pyplot()
OBJECTIVES = {"independent": course.BLUE, "exact": course.ORANGE, "joint": course.GREEN}

# %% [markdown]
# ## 1. Two vocabularies
#
# The model predicts $H$ ids, each among $B$ buckets. Their product is a distribution over $B^H$
# signatures, the *virtual vocabulary*. Only $V$ of them are tokens. How much room is that?

# %%
model, tokenizer = course.shipped()
H, B, V = model.config.num_hashes, model.config.num_buckets, model.config.vocab_size
print(f"B^H = {B**H:.2e} signatures, V = {V:,} tokens: a share of {V / B**H:.1e}")
x, y = data.batch(course.corpus().held_out, seed=0, step=0, rows=8, length=256)
with torch.no_grad():
    mass = model.valid_mass(x)  # (N, T) the probability on signatures of real tokens
print(f"valid mass of the trained model: mean {mass.mean():.3f}, median {mass.median():.1e}")
assert abs(mass.mean() - 0.051) < 0.004 and mass.median() < 1e-6

# %% [markdown]
# The *valid mass* is the probability of all real tokens together. The trained model has a mean of
# 0.051, far above the share that a uniform guess has, but most of its probability lies on
# signatures that no token has. Two questions follow. Should training care about this waste? And
# should it train probabilities that are never used?
#
# ## 2. Three objectives, by brute force
#
# A toy: $H = 2$, $B = 5$, six tokens and a pad. All 25 signatures can be written into a square.

# %%
words = [b"to", b" be", b" or", b" not", b",", b" that"]
signatures = mhf.SignatureTable(num_hashes=2, num_buckets=5)
signatures.extend([*words, b"<pad>"], pad_id=6)
shape = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=16)
table = dict(num_hashes=2, num_buckets=5, bottle_neck_dim=4, max_position_embeddings=8)
torch.manual_seed(5)
toy = mhf.MultiHashFormer(mhf.Config(**shape, **table, initializer_range=0.5), signatures)
inputs, target = torch.tensor([[0, 1, 4]]), 2  # "to be," and then " or"
logits = toy.hash_head(toy(inputs), toy.table)[0, -1].detach()  # (H, B) after the comma
p = logits.softmax(-1)  # (H, B)
virtual = torch.outer(p[0], p[1])  # (B, B) one number for each signature
assert abs(virtual.sum() - 1) < 1e-6  # a distribution over 25 signatures
ids = signatures.ids  # (V, H) of the real tokens
real = virtual[ids[:, 0], ids[:, 1]]  # (V,)
print(f"valid mass {real.sum():.2f}")

# %% [markdown]
# `independent` (the paper): $-\log$ of the signature's probability in the *virtual* vocabulary,
# $-\sum_j \log p_j[\mathrm{id}_j]$: each id for itself. `exact`: $-\log$ of the token's
# probability among the *real* ones,
# $P(w) = \prod_j p_j[\mathrm{id}_j(w)] / \sum_{w'} \prod_j p_j[\mathrm{id}_j(w')]$. `joint`:
# exact $+ \lambda \cdot$ independent $/ H$, with $\lambda = 0.25$. Each is one line of code.

# %%
independent = -math.log(virtual[ids[target, 0], ids[target, 1]])
exact = -math.log(real[target] / real.sum())
joint = exact + toy.config.joint_weight / 2 * independent
targets = torch.tensor([[-100, -100, target]])  # only the last position counts
for name, by_hand in (("independent", independent), ("exact", exact), ("joint", joint)):
    loss = toy.loss(inputs, targets, name).item()
    print(f"{name:11} by hand {by_hand:.4f}, model.loss {loss:.4f}")
    assert abs(by_hand - loss) < 1e-4
assert toy.config.joint_weight == 0.25

# %% [markdown]
# Left: where the model puts its probability; most of it is on signatures of no token. Right: the
# same numbers, renormalised over the real tokens. `independent` asks for the left one at " or",
# `exact` for the right one. (The pad has the signature 0 0; other tokens never use bucket 0.)

# %%
figure, axes = plt.subplots(1, 2, figsize=(8.5, 3.6))
only = torch.full((5, 5), torch.nan)
only[ids[:, 0], ids[:, 1]] = real / real.sum()
for ax, values, label in ((axes[0], virtual, "virtual"), (axes[1], only, "renormalised")):
    picture = ax.imshow(values, vmin=0, vmax=1 if values is only else None, origin="lower")
    figure.colorbar(picture, ax=ax, label=f"probability ({label})")
    for word, (a, b) in zip([*words, b"pad"], ids.tolist()):
        text = dict(ha="center", va="center", fontsize=8, fontweight="bold")
        ax.text(b, a, word.decode(), color="white", **text, bbox=dict(fc="black", alpha=0.5, lw=0))
    ax.set(xlabel="id 2", ylabel="id 1")
course.show(figure, "05-square")

# %% [markdown]
# ## 3. What each objective pushes
#
# Take the gradients at the logits $o_j$. For `independent` each function is a classifier of its
# own:
#
# $$\frac{\partial}{\partial o_j[b]} = p_j[b] - [b = \mathrm{id}_j].$$
#
# `exact` is one softmax over $V$ sums of logits. Its residual, $P(w) - [w = \text{target}]$,
# flows into the buckets that $w$ lies in:
#
# $$\frac{\partial}{\partial o_j[b]}
# = \sum_{w:\, \mathrm{id}_j(w) = b} \big(P(w) - [w = \text{target}]\big).$$
#
# **Before you run it:** what does `exact` do to a bucket in which no token lies?

# %%
leaf = logits.clone().requires_grad_()  # (H, B)
sums = leaf[0, ids[:, 0]] + leaf[1, ids[:, 1]]  # (V,) the log-sum-exps cancel
one = F.cross_entropy(leaf, ids[target], reduction="sum")
other = F.cross_entropy(sums, torch.tensor(target))
assert abs(one.item() - independent) < 1e-4 and abs(other.item() - exact) < 1e-4
gradients = [torch.autograd.grad(loss, leaf)[0] for loss in (one, other)]  # of (H, B)

onehot = F.one_hot(ids[target], 5)  # (H, B)
residual = sums.detach().softmax(-1) - F.one_hot(torch.tensor(target), len(ids))  # (V,)
in_buckets = torch.stack([torch.zeros(5).index_add(0, ids[:, j], residual) for j in (0, 1)])
torch.testing.assert_close(gradients[0], p - onehot)
torch.testing.assert_close(gradients[1], in_buckets)

# %% [markdown]
# Where the gradient is negative, gradient descent raises the logit. Look at the buckets without a
# token: `independent` lowers them, `exact` does not touch them.

# %%
figure, axes = plt.subplots(1, 2, figsize=(8.5, 3), sharey=True)
for j, ax in enumerate(axes):
    for n, (name, gradient) in enumerate(zip(OBJECTIVES, gradients)):
        ax.bar(
            np.arange(5) + 0.36 * n - 0.18, gradient[j], 0.34, label=name, color=OBJECTIVES[name]
        )
    inside = [sum(ids[:, j] == b).item() for b in range(5)]
    ax.set(xticks=range(5), xticklabels=[f"{b}\ntokens: {n}" for b, n in enumerate(inside)])
    ax.set_xlabel(f"bucket of function {j + 1}")
    ax.axhline(0, color=course.BLACK, linewidth=0.8)
axes[0].set_ylabel("gradient at the logit")
axes[0].legend(loc="lower left")
course.show(figure, "05-gradients")
empty = torch.stack([torch.bincount(ids[:, j], minlength=5) == 0 for j in (0, 1)])  # (H, B)
assert empty.any() and gradients[1][empty].abs().max() == 0 < gradients[0][empty].min()

# %% [markdown]
# An empty bucket has gradient 0 under `exact`: no token's probability depends on it. Besides, only
# the *sum* of the logits of a token is trained, so one function may be vague as long as another is
# not. Hence single functions cannot be read, and the valid mass stays tiny.
#
# ## 4. Why training id by id makes tokens too sure
#
# Suppose the next token has the true probabilities $p(w)$, and `independent` has learned
# perfectly. Then function $j$ knows the probability of a *bucket*: that of the token and of its
# bucket mates,
#
# $$p_j[\mathrm{id}_j(w)] = p(w) + \sum_{\text{mates } w'} p(w').$$
#
# The score is the sum of $H$ such logarithms. For a token that is likelier than its mates each is
# about $\log p(w)$:
#
# $$\mathrm{score}(w) \approx H \log p(w), \qquad P(w) \approx p(w)^H / Z.$$
#
# With $H = 4$, two tokens at 0.6 and 0.3 become about 0.94 and 0.06. Every function is right, but
# the four are not independent witnesses: they all report the same $h$, and the product counts that
# evidence four times.

# %%
sharp = torch.tensor([0.6, 0.3]) ** 4
print([f"{v:.2f}" for v in (sharp / sharp.sum()).tolist()])
assert abs(sharp[0] / sharp.sum() - 0.94) < 0.005 and abs(sharp[1] / sharp.sum() - 0.06) < 0.005

# %% [markdown]
# If so, dividing the scores by a temperature τ of about $H$ repairs it, except for the bucket
# mates, which blur the rare tokens.
#
# ## 5. Three small models
#
# Three models have the same start, batches and learning rate; only the objective differs. $V$ is
# 1,024, $B$ 512, two layers, D 64: some ten seconds each on one core.
#
# **Before you run it:** an untrained `independent` loss is about $H \ln B$, an `exact` one about
# $\ln V$. Which of the three will have the best top-1, which the best perplexity, and where will
# τ be?

# %%
corpus = course.corpus("bpe:1024")
STEPS, T = 120, 128
small = {name: course.small(corpus.tokenizer, objective=name) for name in OBJECTIVES}
assert small["exact"].config.num_buckets == 512 and small["exact"].config.vocab_size == 1024
checks = [data.batch(corpus.held_out, seed, step=0, rows=6, length=T) for seed in (1, 2)]


@torch.no_grad()
def scores_of(model, x):
    """Scores of all tokens at every position: ids (N, T) -> (M, V)."""
    return model.token_scores(model(x).flatten(0, 1))


def held_out_loss(model):
    """Of the renormalised token, in nats: at τ = 1, and at the τ fitted on other text."""
    (fit, fit_to), (x, y) = checks
    tau = fit_calibration(scores_of(model, fit), fit_to.flatten())
    scores = scores_of(model, x)  # (M, V)
    return [F.cross_entropy(scores / t, y.flatten()).item() for t in (1.0, tau)]


curves = {name: [] for name in small}
for name, model in small.items():
    for step, _ in course.fit(model, corpus.training, STEPS, learning_rate=3e-3):
        if step == 1 or step % 20 == 0:
            curves[name].append([step, *held_out_loss(model)])

# %% [markdown]
# Solid: held-out perplexity at the fitted τ; dotted: at τ = 1, the paper's rule. All three start
# too sharp, since sums of $H$ random logits differ widely. `exact` and `joint` unlearn that at
# once. `independent` never does: its loss does not contain the renormalised product.

# %%
figure, ax = plt.subplots(figsize=(6.5, 3.6))
for name, rows in curves.items():
    step, plain, fitted = np.array(rows).T
    how = dict(color=OBJECTIVES[name], linewidth=4 if name == "exact" else 1.5)  # joint covers it
    ax.plot(step, np.exp(fitted), label=f"{name}, τ fitted", **how)
    ax.plot(step, np.exp(plain), linestyle=":", label=f"{name}, τ = 1", **how)
ax.set(yscale="log", xlabel="step (1,024 tokens each)", ylabel="held-out perplexity")
ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
course.show(figure, "05-curves")

# %%
print("objective   perplexity: τ=1  fitted     τ  top-1  valid mass")
found = {}
for name, model in small.items():
    found[name] = course.quality(model, corpus, 16384)
    m, sharp = found[name], math.exp(curves[name][-1][1])
    print(f"{name:11} {sharp:15,.0f} {m['perplexity']:7.0f} {m['tau']:5.2f}", end="")
    print(f"  {m['top1']:.3f}  {m['valid_mass']:.0e}")
a, b, c = found.values()
assert 2.6 < a["tau"] < 3.4 and abs(b["tau"] - 1) < 0.1 and abs(c["tau"] - 1) < 0.1
assert a["perplexity"] > 1.15 * b["perplexity"] and a["perplexity"] > 1.15 * c["perplexity"]
assert math.exp(curves["independent"][-1][1]) > 3000 and abs(a["top1"] - b["top1"]) < 0.03
assert a["valid_mass"] > 1e-3 > 1e-5 > b["valid_mass"]

# %% [markdown]
# Trained for the same time, `independent` has about the same top-1 as the others (the *order* of
# the tokens is fine), a τ of about 3, and even with it a perplexity clearly above theirs: a
# single τ cannot undo what differs from token to token. At τ = 1 its perplexity is in the
# thousands. The valid mass shows the other side: only `independent` has learned to put probability
# on real signatures.
#
# ## 6. Is it really $p^H$?
#
# Now we test part 4. We take the renormalised probabilities of the `exact` model as the truth $p$
# (they are the best that we have), and compute the scores that a perfect `independent` model would
# give: the mass of each bucket, its logarithm, the sum. We compare them with the scores of our
# trained `independent` model, a different network that never saw these numbers.
#
# **Before you run it:** the slope of score against $\log p$ is 1 if a model is calibrated. What
# will it be for likely tokens, what for rare ones?

# %%
x, y = checks[1]
with torch.no_grad():
    P = small["exact"].log_probs(x).flatten(0, 1).exp()  # (M, V)
measured = scores_of(small["independent"], x)  # (M, V)
ids = small["exact"].model.hash_map  # (V, H)
perfect = torch.zeros_like(P)  # (M, V)
for j in range(4):
    buckets = torch.zeros(len(P), 512).index_add(1, ids[:, j], P)  # (M, B) mass of each bucket
    perfect += buckets[:, ids[:, j]].log()
log_p = P.log()
likely = P > 0.01
slopes = {}
for name, scores in (("perfect", perfect), ("trained", measured)):
    slopes[name] = np.polyfit(log_p[likely], scores[likely], 1)[0]
    tau = fit_calibration(scores, y.flatten())
    print(f"{name}: slope {slopes[name]:.2f} for tokens with p > 0.01, τ {tau:.2f}")
    assert abs(slopes[name] - 3.75) < 0.35 and abs(tau - 3) < 0.4

# %% [markdown]
# Each dot is a token at a position (a sample, likely ones more often); the black line is the
# mean. The dashed lines have slope 4 ($= H$) and slope 1. In both pictures likely tokens follow
# slope 4, and rare ones bend away from it: there the bucket mates weigh more than the token itself,
# and the score says little about the token.

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), sharex=True, sharey=True)
some = torch.rand(P.shape, generator=torch.Generator().manual_seed(0)) < P.sqrt()
bins = np.arange(-12, 0.1, 0.5)
for ax, (name, scores) in zip(axes, (("perfect", perfect), ("trained", measured))):
    ax.scatter(log_p[some], scores[some], s=2, alpha=0.2, color=course.SKY, linewidths=0)
    place = np.digitize(log_p.flatten(), bins)
    means = [scores.flatten()[place == b].mean() for b in range(1, len(bins))]
    ax.plot(bins[:-1] + 0.25, means, color=course.BLACK)
    for slope, colour in ((4, course.VERMILION), (1, course.PURPLE)):
        ax.plot([-12, 0], [-12 * slope, 0], "--", color=colour, label=f"slope {slope}")
    ax.set(xlabel=f"log p of the exact model (nats)\n{name} independent model", xlim=(-13, 0.3))
    ax.set_ylim(-45, 1)
axes[0].set_ylabel("score (nats)")
axes[0].legend(loc="upper left")
course.show(figure, "05-power")

# %% [markdown]
# With four functions the slope is about 3.75 for likely tokens, by theory and by measurement, and
# the τ that fits best on average is near 3: a compromise between the slope of the likely and that
# of the rare. (The `exact` model is not the truth, and the dots scatter; but theory and network
# agree.)
#
# ## 7. What is left of the single functions?
#
# If only the token is trained, what do the single functions still know? We measure how many bits
# the true ids cost, on average over the functions; a uniform guess costs $\log_2 B = 9$.

# %%
with torch.no_grad():
    for name, model in small.items():
        h = model(x).flatten(0, 1)  # (M, D)
        bits = model.loss_per_position(h, y.flatten(), "independent").mean() / 4 / math.log(2)
        found[name]["bits"] = bits.item()
        print(f"{name:11} {bits:.2f} bits for a true id")
known = {name: 9 - found[name]["bits"] for name in found}  # bits better than a uniform guess
assert known["exact"] < known["joint"] < known["independent"]
assert known["exact"] < 0.55 * known["independent"]

# %% [markdown]
# Under `exact` the functions know about half as much about their own ids. `joint` pulls them back
# gently. These models saw few steps. `python tutorials/experiments.py objective` trains larger
# ones, three seeds each, with $\lambda$ from 0 (`exact`) to ∞ (`independent`). That takes an hour,
# so we read its result.
#
# **Before you run it:** is there a $\lambda$ that makes functions surer and costs nothing?

# %%
path = course.ROOT / "tutorials" / "results" / "objective.json"
result = json.loads(path.read_text(encoding="utf-8"))
course.show(claims.EXPERIMENTS["objective"].draw(plt, result), "05-trade")
measures = ("perplexity", "entropy", "tau", "valid_mass")
rules = [label for label in claims.labels(result) if label.startswith("λ")]
trade = {k: [np.mean(claims.values(result, k, name)) for name in measures] for k in rules}
for label, (perplexity, entropy, tau, mass) in trade.items():
    print(f"{label:7} perplexity {perplexity:.0f}, entropy of a function {entropy:.1f} bits, "
          f"τ {tau:.2f}, valid mass {mass:.0e}")  # fmt: skip
cost = {k: trade[k][0] / trade["λ 0"][0] - 1 for k in rules}
assert 0 < cost["λ 0.1"] < 0.015 and 0.02 < cost["λ 0.25"] < 0.04 and cost["λ 1"] > 0.1
assert cost["λ 4"] > cost["λ ∞"] > 0.25  # a mixture can be worse than both
standard = np.mean(claims.values(result, "standard", "perplexity"))
assert trade["λ 0"][0] < standard < trade["λ 1"][0]
assert trade["λ 0"][2] < 1.1 and 1.5 < trade["λ 4"][2] < 2.5 and trade["λ ∞"][2] > 3
entropies = [trade[k][1] for k in rules]
assert entropies == sorted(entropies, reverse=True)  # the larger λ, the surer a function

# %% [markdown]
# The larger $\lambda$, the surer a function is by itself: its entropy falls. The valid mass rises,
# most of all from 0 to 0.1. On average that is never for nothing: $\lambda = 0.1$ costs about 1 %
# of perplexity, within the spread of the seeds, and the default of `joint`, 0.25, nearly 3 %; 1
# gives up what `exact` had gained over the standard model, and 4 is even worse than `independent`
# alone. Perhaps the two parts disagree: `exact` wants *sums* of logits that are right at τ = 1,
# `independent` *single* functions that are right, whose sums then need a τ above 3. (Nobody has
# tested that.) So `exact` is the choice for good tokens, and a small $\lambda$ for a cascade to
# look into, as in the trained model of part 1 (tutorial 04). These are small models after minutes
# of training; the paper trains large ones with `independent`.
#
# ## 8. The loss in chunks
#
# Each objective needs $H \cdot B$ logits at every position: 2,048 here, 65,536 in the paper's 100m
# model. Automatic differentiation keeps them and their softmaxes for the backward pass; in the
# models above this takes more memory than the whole backbone. But the decoder treats each position
# on its own. So `train.py` cuts the graph at $h$. A few positions at a time go through the loss,
# forward and straight back: they add their share to the gradients, and their logits are freed. The
# gradient that they leave at $h$ then goes through the backbone, once. Nothing is computed twice.
#
# **Before you run it:** are the gradients still those of the whole loss?

# %%
model, (x, y) = small["joint"].requires_grad_(True), checks[0]
whole = torch.autograd.grad(model.loss(x, y, "joint"), list(model.parameters()))

model.zero_grad()
h = model(x).flatten(0, 1)  # (M, D)
cut = h.detach().requires_grad_()  # the same numbers; the graph of the loss begins here
for states, targets in zip(cut.split(256), y.flatten().split(256)):
    loss = model.loss_per_position(states, targets, "joint").sum() / y.numel()
    loss.backward()  # adds to the gradients of the mixers, of the table and of cut
h.backward(cut.grad)  # adds to those of the blocks, of the gate and, once more, of the table
for p, expected in zip(model.parameters(), whole):
    torch.testing.assert_close(p.grad, expected, atol=1e-6, rtol=1e-4)

# %% [markdown]
# They are. The memory can be counted, too: PyTorch hands every tensor that it keeps for the
# backward pass to a hook. The picture shows that the memory of the loss grows with the positions
# of a chunk. So the chunk, not the batch, decides how much is needed: `train.py` takes 256
# positions on a CPU, whose caches are small, and thousands on a GPU, which needs much work at once.


# %%
def kept(function):
    """Megabytes that are kept for the backward pass of what a function computes."""
    sizes = {}  # of each piece of memory; several tensors may share one

    def note(tensor):
        memory = tensor.untyped_storage()
        sizes[memory.data_ptr()] = memory.nbytes() / 1e6
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        function()
    return sum(sizes.values())


def loss_of(positions):
    """The joint loss of the first positions."""
    return model.loss_per_position(cut[:positions], y.flatten()[:positions], "joint").sum()


positions, backbone = [32, 64, 128, 256, 512, 768], kept(lambda: model(x))
megabytes = [kept(lambda n=n: loss_of(n)) for n in positions]
print(f"backbone {backbone:.0f} MB, loss of all {len(cut)} positions {megabytes[-1]:.0f} MB,")
print(f"of a chunk of 256 {megabytes[3]:.0f} MB")
figure, ax = plt.subplots(figsize=(5.5, 3.2))
ax.plot(positions, megabytes, "o-", color=course.GREEN, label="loss of a chunk")
ax.axhline(backbone, color=course.BLACK, linestyle=":", label="backbone, all positions")
ax.set(xlabel="positions in a chunk", ylabel="kept for the backward pass (MB)", ylim=(0, None))
ax.legend()
course.show(figure, "05-memory")
assert megabytes[-1] > backbone and 0.3 < megabytes[3] / megabytes[-1] < 0.45  # 256 of 768
paper = mhf.Config.preset("100m")
assert (H * 512, paper.num_hashes * paper.num_buckets) == (2048, 65536)

# %% [markdown]
# ## What we saw
#
# The product of the $H$ distributions lives on $B^H$ signatures; text only needs it on $V$
# tokens. `independent` trains each id as a classifier of its own, so that the product counts the
# same evidence $H$ times: scores grow like $H \log p$, the renormalised probabilities are far too
# sharp, and a fitted τ near 3 repairs that only on average. `exact` trains the renormalised token
# itself: well calibrated at once, but the single functions become vague and the valid mass
# vanishes. `joint` is `exact` with a little of `independent`, for models that people want to look
# into. All three are sums over positions, so training computes them in chunks and needs little
# memory for the logits.
#
# ## Exercises
#
# 1. *Calculate.* What do the three objectives cost a model that knows nothing (all logits 0), for
#    $H = 4$, $B = 2048$, $V = 8192$? And what is its valid mass?
# 2. *Change.* Train `joint` with $\lambda = 4$ instead of 0.25. What becomes of perplexity, τ and
#    valid mass?
# 3. *Find out.* If τ comes from counting evidence $H$ times, $H = 2$ (with $B = 1024$, so that
#    the table has as many rows) should have a τ below 2. Does it?
#
# Answers: `answers.py`, `python tutorials/answers.py 05`. Next:
# [06 · Inference](06_inference.ipynb)
