# %% [markdown]
# # 07 · A growing vocabulary
#
# **Can a model learn a new script without a new parameter?**
#
# Afterwards you can
# * say what a sentence costs under a tokenizer that was not made for it;
# * add tokens to a trained model, and prove what stays the same and what does not;
# * measure what continued training gains and forgets, against a standard model.
#
# Reading: 30 minutes. Run time: about 40 seconds on 2 cores. Paper: its part on expanding the
# vocabulary to more languages ([arXiv](https://arxiv.org/abs/2606.28057)). Code: `expand` in
# `mhf.py`.
#
# On Colab: `!git clone REPOSITORY project`, `%cd project/tutorials`,
# `!pip install -r ../requirements.txt`

# %%
import copy
import json
import math
import sys

sys.path.append("tutorials")  # for a kernel that was started one folder above

import claims
import course
import numpy as np
import torch

plt = course.pyplot()
model, tokenizer = course.shipped()
shakespeare = course.corpus()
english = tokenizer.decode(shakespeare.held_out[:6000])
V = len(tokenizer)

# %% [markdown]
# ## 1. Three scripts the model has never seen
#
# The texts are the sentences of a web framework's pages, translated by people. The last tenth of
# each language is held out **before** anything is learned from the rest, the tokenizer included.
# The sentences are short and few, so our conclusions must be modest.

# %%
LANGUAGES = {"ar": "Arabic", "zh_Hans": "Chinese", "hi": "Hindi"}
training, held_out = {}, {}
for code, name in LANGUAGES.items():
    sentences = course.django(code)
    cut = len(sentences) * 9 // 10
    training[name] = "\n".join(sentences[:cut])
    held_out[name] = "\n".join(sentences[cut:])
    print(f"{name:8} {len(sentences)} sentences, for example: {sentences[20]}")
new_text = "\n".join(training.values()) + "\n"
new_held_out = "\n".join(held_out.values()) + "\n"
print(f"to learn from {len(new_text):,} characters, held out {len(new_held_out):,}")

# %% [markdown]
# A byte-level tokenizer can write any text: it cuts what it has no token for into bytes. Here is
# one sentence. Each piece between bars is a token; a token that is only part of a character is
# shown by its bytes.


# %%
def pieces(tokenizer, text):
    tokens = [tokenizer.token_bytes(i) for i in tokenizer.encode(text)]
    shown = [t.decode("utf-8", errors="backslashreplace").replace("\n", "⏎") for t in tokens]
    return "|".join(shown)


sentence = "字段 不能为空"  # "field", "must not be empty"
bigger = course.extended(tokenizer, new_text, 512)
print("before:", pieces(tokenizer, sentence))
print("after: ", pieces(bigger, sentence))
assert len(tokenizer.encode(sentence)) > 2 * len(bigger.encode(sentence))

# %% [markdown]
# `course.extended` finds more tokens by a byte-pair encoding of the new text. It appends them to
# the old ones, which keep their ids and their order of merges. No new token is ASCII, so English
# must be cut exactly as before. We check that first.
#
# **Before you run it:** how many tokens does a *character* of each language cost under the old
# tokenizer? (In UTF-8, an Arabic letter has 2 bytes, a Chinese or Hindi one has 3.)

# %%
sizes = (0, 256, 512, 1024)
tokenizers = [course.extended(tokenizer, new_text, n) if n else tokenizer for n in sizes]
texts = {"English": english, **held_out}
cost = np.array([[len(t.encode(x)) / len(x) for x in texts.values()] for t in tokenizers])
for n, row in zip(sizes, cost):  # (languages,)
    print(f"{n:5} more tokens:", ", ".join(f"{k} {c:.2f}" for k, c in zip(texts, row)))
assert all(t.encode(english) == tokenizer.encode(english) for t in tokenizers)
assert all(t.decode(t.encode(new_held_out)) == new_held_out for t in tokenizers)
assert (cost[0, 1:] > 4 * cost[0, 0]).all()  # each new script costs over four times English

# %% [markdown]
# The picture shows tokens per character. See how the first bar of each new script towers over
# English, and where more tokens stop helping. The tokenizer never saw the held-out text of the
# three languages.

# %%
figure, axis = plt.subplots(figsize=(7, 3.4))
shades = (course.BLACK, course.BLUE, course.SKY, course.ORANGE)
for k, (n, row) in enumerate(zip(sizes, cost)):
    label = f"{n:,} more tokens" if n else "old tokenizer"
    axis.bar(np.arange(4) + 0.2 * (k - 1.5), row, 0.18, color=shades[k], label=label)
axis.set_xticks(range(4), texts)
axis.set(ylabel="tokens per character", ylim=(0, 2.5))
axis.legend(loc="upper left", ncols=2, fontsize=9)
course.show(figure, "07-cost")

# %% [markdown]
# Why does it matter? A context of $T$ positions holds less text, each character takes several steps
# to generate, and the model must learn to spell before it can learn what words mean. A larger
# vocabulary repairs that. But in a standard model each new token costs a row of $D$ numbers. With a
# million tokens and a $D$ of a few thousand, the table alone is larger than many models.

# %% [markdown]
# ## 2. Expanding: what stays the same
#
# `model.expand` gives each new token a signature: $H$ ids, hashed from its bytes. The rows of these
# ids exist already. So we expect that not one number of the model changes.

# %%
ids = torch.tensor(shakespeare.held_out[:1024].astype(int)).view(4, 256)  # (N, T)
before = {
    "tensors": {k: v.clone() for k, v in model.named_parameters()},
    "signatures": model.signatures.ids,  # (V, H)
    "scores": model.token_scores(model(ids)),  # (N, T, V)
    "log_probs": model.log_probs(ids),  # (N, T, V)
}
new_tokens = [bigger.token_bytes(i) for i in range(V, len(bigger))]
assert len(new_tokens) == 512 and not any(token.isascii() for token in new_tokens)
model.expand(new_tokens)
scores, log_probs = model.token_scores(model(ids)), model.log_probs(ids)  # (N, T, V + 512)
assert all(torch.equal(v, before["tensors"][k]) for k, v in model.named_parameters())
assert torch.equal(model.signatures.ids[:V], before["signatures"])
assert torch.equal(scores[..., :V], before["scores"])  # bit for bit
print(f"{len(new_tokens)} more tokens, {model.num_parameters()['total']:,} parameters as before")

# %% [markdown]
# The parameters, the old signatures and the old tokens' scores are equal bit for bit. The
# probabilities are not: they are renormalised over all real tokens, and now there are more of them.
# Let $Z_t$ be the sum of $e^{s/\tau}$ over the scores $s$ of all tokens at position $t$. Then
#
# $$\log P_\text{new}(w) - \log P_\text{old}(w) = \log Z_t^\text{old} - \log Z_t^\text{new}
#   = \log(1 - M_t),$$
#
# where $M_t$ is the mass that the new tokens take there. The right side does not depend on $w$: all
# old tokens lose the same factor, and no two of them change places.

# %%
shift = log_probs[..., :V] - before["log_probs"]  # (N, T, V)
mass = log_probs[..., V:].exp().sum(-1)  # (N, T)
print(f"spread of the shift over tokens, at most {shift.std(-1).max():.0e}")
assert (shift - torch.log1p(-mass).unsqueeze(-1)).abs().max() < 1e-4
print(f"new tokens take {mass.mean():.4f} of the mass, at most {mass.max():.4f}")
assert abs(mass.mean() - 0.0124) < 0.001 and mass.max() < 0.1
price = -torch.log2(1 - mass).mean()
print(f"which costs an old token {price:.3f} bits")
assert price < 0.03

# %% [markdown]
# So English is hurt, but little. Where does the mass go? A new token was never trained, but its
# rows were: other tokens lie in the same buckets. The score of a new token is the sum of what these
# tokens have taught each function. Here is the most probable new token anywhere in the text, and
# for each function the most probable old token of the same bucket. None of the four needs to be
# probable by itself: a bucket counts for all its tokens, and the four buckets meet by chance.

# %%
n, t = divmod(int(log_probs[..., V:].amax(-1).argmax()), ids.shape[1])
best = V + int(log_probs[n, t, V:].argmax())
context = tokenizer.decode(ids[n, max(0, t - 12) : t + 1]).replace("\n", "⏎")
print(f"after {context!r}: {bigger.decode([best])!r} has P = {log_probs[n, t, best].exp():.3f}")
for j, bucket in enumerate(model.signatures.ids[best].tolist()):
    mates = (model.signatures.ids[:V, j] == bucket).nonzero()[:, 0]
    mate = int(mates[scores[n, t, mates].argmax()])
    p = log_probs[n, t, mate].exp()
    print(f"  function {j + 1}, bucket {bucket}: {tokenizer.decode([mate])!r} with P = {p:.1e}")

# %% [markdown]
# Does the mass grow with the number of new tokens? And do untrained tokens get their share, as if
# they were drawn at random from the vocabulary?
#
# **Before you run it:** guess the mass of `2048` new tokens beside `8192` old ones.

# %%
counts, taken = (256, 512, 1024, 2048), []
largest = course.extended(tokenizer, new_text, counts[-1])  # the smaller ones are its beginning
for n in counts:
    larger, _ = course.shipped()
    larger.expand([largest.token_bytes(V + i) for i in range(n)])
    taken.append(larger.log_probs(ids)[..., V:].exp().sum(-1).mean().item())
    print(f"{n:5} new tokens: {n / (V + n):.3f} of the vocabulary, {taken[-1]:.3f} of the mass")
assert all(0.1 < m / (n / (V + n)) < 0.35 for m, n in zip(taken, counts))

# %% [markdown]
# Left: each dot is a position. Where the model hesitates between many tokens (large entropy), the
# new ones take more; where it is sure, they take nothing. Right: the mean mass against the number
# of new tokens. The dashed line is their share of the vocabulary. They stay well below it: training
# has made the signatures of real tokens stand out from others.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
entropy = torch.special.entr(before["log_probs"].exp()).sum(-1) / math.log(2)  # (N, T)
left.plot(entropy.flatten(), mass.flatten(), ".", color=course.BLUE, markersize=3)
left.set(xlabel="entropy before, bits", ylabel="mass of 512 new tokens")
assert course.spearman(entropy.flatten(), mass.flatten()) > 0.8
right.plot(counts, taken, "o-", color=course.BLUE, label="measured")
share = [n / (V + n) for n in counts]
right.plot(counts, share, "--", color=course.BLACK, label="share of the vocabulary")
right.set(xlabel="new tokens", ylabel="mean mass", ylim=0, xticks=counts)
right.legend()
course.show(figure, "07-mass")

# %% [markdown]
# ## 3. A pair to compare
#
# A standard model grows by rows, which usually start as the mean of the old ones. To compare we
# need a trained standard model, so here is a small pair: `bpe:1024`, 2 layers, $D = 64$, tables of
# equally many rows, 120 steps each on Shakespeare. That is little training, and the results hold
# for models of this kind.

# %%
small = course.corpus("bpe:1024")
old = small.tokenizer
grown = course.extended(old, new_text, 512)
KINDS, pair = {"mhf": "MultiHashFormer", "standard": "standard"}, {}
for kind in KINDS:
    pair[kind] = course.small(old, model=kind, num_buckets=256)
    losses = [x for _, x in course.fit(pair[kind], small.training, 120, learning_rate=4e-3)]
    print(f"{KINDS[kind]}: loss from {losses[0]:.2f} to {np.mean(losses[-10:]):.2f}")


# %% [markdown]
# The tokenizers differ, so the measure must not depend on them: **bits per byte** of the same text.
# A model that knows nothing needs 8.


# %%
some_english = english[:6000]


def measure(model, tokenizer):
    return [course.bits_per_byte(model, tokenizer, text) for text in (new_held_out, some_english)]


# %% [markdown]
# Now we expand both, and measure before and right after.
#
# **Before you run it:** which model's English is hurt more by tokens it has never seen?

# %%
stages = {kind: {"before": measure(pair[kind], old)} for kind in KINDS}  # [new, English]
expanded, added, taken = copy.deepcopy(pair), {}, {}
probe = torch.tensor(old.encode(some_english)[:1024]).view(8, 128)  # (N, T)
for kind, grows in expanded.items():
    size = grows.num_parameters()["total"]
    grows.expand([grown.token_bytes(i) for i in range(len(old), len(grown))])
    added[kind] = grows.num_parameters()["total"] - size
    stages[kind]["expanded"] = measure(grows, grown)
    taken[kind] = grows.log_probs(probe)[..., len(old) :].exp().sum(-1).mean().item()
    print(f"{KINDS[kind]}: {added[kind]:,} parameters added; new tokens take {taken[kind]:.2f}")
    for stage, (new, eng) in stages[kind].items():
        print(f"  {stage:8} new scripts {new:5.2f}, English {eng:.2f} bits per byte")
assert added == {"mhf": 0, "standard": 512 * 64}
assert 0.25 < taken["mhf"] < 0.55 and 0.04 < taken["standard"] < 0.2  # a third of the vocabulary

# %% [markdown]
# Three things to notice.
#
# * Before, the new scripts cost *more* than 8 bits per byte. Both models are sure that such bytes
#   do not come, because they never came in training.
# * Right after, with no training at all, they cost less. A new token stands for several bytes, and
#   the model has not yet learned that it never comes.
# * The MultiHashFormer's English pays for it. In this pair the new tokens take about their share of
#   the vocabulary; in the longer trained model above they took far less. The mean row of the
#   standard model is a quieter start.

# %%
for kind in KINDS:
    assert stages[kind]["before"][0] > 10 and 5 < stages[kind]["expanded"][0] < 7.5
hurt = {kind: stages[kind]["expanded"][1] - stages[kind]["before"][1] for kind in KINDS}
print({KINDS[kind]: f"English + {x:.2f} bits per byte" for kind, x in hurt.items()})
assert 0.15 < hurt["mhf"] < 0.5 and 0 < hurt["standard"] < 0.12

# %% [markdown]
# ## 4. Continued training
#
# 60 steps on three mixtures:
#
# * **replay**: the new text and as much Shakespeare;
# * **new only**: the new text alone;
# * **bytes**: like replay, but with the old tokenizer and no expansion. It asks whether new tokens
#   are worth it at all.

# %%
new_ids = np.array(grown.encode(new_text))
byte_ids = np.array(old.encode(new_text))
mixtures = {
    "replay": np.concatenate((new_ids, small.training[: len(new_ids)])),
    "new only": new_ids,
    "bytes": np.concatenate((byte_ids, small.training[: len(byte_ids)])),
}
curves = {}
for kind in KINDS:
    for name, mixture in mixtures.items():
        start, reads = (pair, old) if name == "bytes" else (expanded, grown)
        learner = copy.deepcopy(start[kind])
        curves[kind, name] = [measure(learner, reads)]
        for step, _ in course.fit(learner, mixture, 60, seed=1, learning_rate=4e-3):
            if step in (20, 40, 60):
                curves[kind, name].append(measure(learner, reads))
        stages[kind][name] = curves[kind, name][-1]

# %%
print(f"{'bits per byte, held out':24} {'MultiHashFormer':>20} {'standard':>20}")
print(f"{'':24}" + f" {'new':>11} {'English':>8}" * 2)
for stage in stages["mhf"]:
    row = (f" {new:11.2f} {eng:8.2f}" for new, eng in (stages[k][stage] for k in KINDS))
    print(f"{stage:24}" + "".join(row))
print(f"{'parameters added':24} {added['mhf']:20,} {added['standard']:20,}")

# %% [markdown]
# The picture shows three stages of both models, the new scripts left, English right; lower is
# better. See what the training repairs, and which model is ahead.

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
shown = ("before", "expanded", "replay")
for side, axis in enumerate(axes):
    for k, (kind, name) in enumerate(KINDS.items()):
        heights = [stages[kind][stage][side] for stage in shown]
        at = np.arange(3) + 0.38 * (k - 0.5)
        bars = axis.bar(at, heights, 0.36, color=course.COLOURS[k], label=name)
        axis.bar_label(bars, fmt="%.1f", padding=1, fontsize=9)
    axis.axhline(8, color=course.BLACK, linewidth=0.8, linestyle=":")
    axis.set_xticks(range(3), ("before", "expanded", "trained on,\nwith replay"))
    axis.set_xlabel(("new scripts", "English")[side])
axes[0].set(ylabel="bits per byte, held out", ylim=(0, 17))
axes[1].text(2.5, 8.1, "knows nothing", ha="right", va="bottom", fontsize=9)
axes[1].legend(loc="upper left")
course.show(figure, "07-stages")

# %% [markdown]
# Which is better at this size? The standard model, on both texts. Part of the gap was there before:
# the standard model had learned more English in the same steps. And its new tokens have a row each,
# while in the MultiHashFormer a new token shares every row with old ones, which pull at it. What
# speaks for the MultiHashFormer is the last line of the table, and that counts only with a large
# vocabulary.

# %%
gap = [stages["mhf"]["replay"][side] - stages["standard"]["replay"][side] for side in (0, 1)]
print(f"behind the standard model: {gap[0]:.2f} on new scripts, {gap[1]:.2f} on English")
assert 0.1 < gap[0] < 0.9 and 0.05 < gap[1] < 0.5
for kind in KINDS:  # was it worth it? more than the same steps without new tokens, for both
    gain = stages[kind]["bytes"][0] - stages[kind]["replay"][0]
    print(f"{KINDS[kind]}: new tokens gain {gain:.2f} bits per byte over bytes")
    assert gain > 0.15

# %% [markdown]
# ## 5. Forgetting
#
# The picture follows both texts over the steps. Solid: new text only; dashed: with replay.
#
# **Before you run it:** after training on the new text alone, is English where it was?

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharex=True)
for side, axis in enumerate(axes):
    for k, kind in enumerate(KINDS):
        for name, style in (("new only", "-"), ("replay", "--")):
            values = [point[side] for point in curves[kind, name]]
            label = f"{KINDS[kind]}, {name}"
            axis.plot((0, 20, 40, 60), values, style, color=course.COLOURS[k], label=label)
    axis.set(xlabel="steps of continued training", xticks=(0, 20, 40, 60))
    axis.set_ylabel(("new scripts", "English")[side] + ", bits per byte")
axes[0].legend(fontsize=9)
course.show(figure, "07-forgetting")

# %%
for kind in KINDS:
    before_, replay, alone = (stages[kind][x][1] for x in ("before", "replay", "new only"))
    print(f"{KINDS[kind]}: English {before_:.2f}; replay {replay:.2f}, new only {alone:.2f}")
    assert alone > before_ + 1 and replay < before_ + 0.4  # forgotten, and kept
    price = stages[kind]["replay"][0] - stages[kind]["new only"][0]
    print(f"  on the new scripts replay costs {price:.2f} bits per byte")
    assert -0.2 < price < 0.8

# %% [markdown]
# Without replay both models forget English within twenty steps. With replay they almost keep it.
# Replay may cost something on the new text, since half of what is read is English; but a text this
# small, read alone, is soon read too often. That no parameter was added does not protect the old
# tokens: their rows and the blocks go on learning.
#
# ## 6. More tokens from the start
#
# So far the vocabulary grew after training. What if there are more tokens from the start?
# `python tutorials/experiments.py vocabulary` trains both models with five tokenizers, three seeds
# each, on as much text. That takes hours, so we read its result. The standard model's table has a
# row for each token. A MultiHashFormer keeps one table, here of 4,096 or 8,192 rows, and is trained
# with the paper's objective or with `exact`.
#
# **Before you run it:** up to which vocabulary is a MultiHashFormer ahead?

# %%
path = course.ROOT / "tutorials" / "results" / "vocabulary.json"
result = json.loads(path.read_text(encoding="utf-8"))
course.show(claims.EXPERIMENTS["vocabulary"].draw(plt, result), "07-vocabulary")
bits, table = (
    claims.EXPERIMENTS["vocabulary"].lines(result, name) for name in ("bits_per_byte", "table")
)
large, small = "8,192 rows, exact", "4,096 rows, exact"
assert [table[k][32768][0] // 128 for k in (large, small)] == [8192, 4096]
behind = {V: np.mean(y) / np.mean(bits["standard"][V]) - 1 for V, y in bits[large].items()}
print(f"{large}, bits a byte:", ", ".join(f"{x:+.1%} at {V:,}" for V, x in behind.items()))
for line, costs in result["costs"].items():
    most = costs["1000000"]
    print(f"{line:29} a million tokens: {most['step']:5.1f} s a step, {most['memory']:6,.0f} MB, "
          f"{most['parameters'] / 1e6:5.1f} million parameters")  # fmt: skip
assert all((x < 0) == (V <= 8192) for V, x in behind.items()) and 0.02 < behind[32768] < 0.04
level = [np.mean(bits[k][V]) / np.mean(bits["standard"][V]) - 1
         for k, V in ((small, 4096), (large, 8192))]  # fmt: skip
assert max(map(abs, level)) < 0.01 and behind[4096] < -0.02
paper = bits["8,192 rows, paper's objective"]
assert min(np.mean(y) - np.mean(bits["standard"][V]) for V, y in paper.items()) > 0

# %% [markdown]
# With `exact` it is ahead while its table has twice as many rows as there are tokens, and about
# level at as many. Beyond that the standard model, which gets a row for every new token, is ahead:
# of the larger table at 32,768 tokens by 2 %, with two and a half times the parameters. With the
# paper's objective it is behind everywhere at this size. Left: points at the same height are
# equally good, whatever their size. Middle: the same by vocabulary; a band holds three seeds.
# Right: a step with the paper's objective costs the same whatever $V$; with `exact` it grows with
# $V$, as the standard model's does, because every token's score is computed.
#
# ## What we saw
#
# A MultiHashFormer can take in a new script without a new parameter. Nothing old changes except one
# factor per position: the mass that the new tokens take. A well trained model gives untrained
# tokens far less than their share, a barely trained one about their share. The shorter sequences
# pay at once, and more after some training. In our small pair the standard model, which grows by a
# row for each token, stays ahead of the MultiHashFormer on both texts. Replay keeps the old
# language; without it both models lose it.
#
# ## Exercises
#
# 1. *Calculate.* How many parameters do a million new tokens cost the standard model of the pair,
#    and a standard model as wide as the paper's largest ($D$ `2048`)? What do they cost the
#    MultiHashFormer, and what does it store instead?
# 2. *Change.* Divide the scores of the expanded shipped model by 1 and by 2 instead of its own τ.
#    What becomes of the mass of the new tokens, and why?
# 3. *Find out.* "A barely trained model gives new tokens about their share." Train the small
#    MultiHashFormer for 20 and for `100` steps, expand it each time and measure the mass. What does
#    a model that was never trained give them?
#
# Answers: `python tutorials/answers.py 07`. Next:
# [08 · Rare words](08_rare_words.ipynb): does the model know which words are alike?
