# %% [markdown]
# # 08 · Rare words
#
# **Does the model know which words are alike?**
#
# Afterwards you can
# * compare what a model thinks of words with what people think of them, layer by layer, and say how
#   sure you are;
# * see and repair the trap in cosines of states (anisotropy);
# * tell "the answer is no" from "this model cannot answer".
#
# Reading: 25 minutes. Run time: about 15 seconds on 2 cores. Paper: its part on rare words and
# Card-`660` ([arXiv](https://arxiv.org/abs/2606.28057)).
#
# On Colab: `!git clone REPOSITORY project`, `%cd project/tutorials`,
# `!pip install -r ../requirements.txt`

# %%
import sys
import tempfile
from pathlib import Path

sys.path.append("tutorials")  # for a kernel that was started one folder above

import course
import numpy as np
import torch

import mhf

plt = course.pyplot()
model, tokenizer = course.shipped()
torch.manual_seed(0)  # the same signatures, random weights: what no training gives
untrained = mhf.MultiHashFormer(model.config, model.signatures).eval().requires_grad_(False)
counts = course.word_counts(course.corpus())  # of the training text
print(f"{sum(counts.values()):,} words, {len(counts):,} different ones")


# %% [markdown]
# ## 1. A signature knows nothing
#
# A signature is made of a token's bytes, but a good hash function destroys all likeness: change one
# letter, and every id changes.
#
# **Before you run it:** `night` and `nights` have five letters in common. How many of their $H = 4$
# ids do they share?


# %%
def signature(word):
    (token,) = tokenizer.encode(" " + word)
    return model.model.hash_map[token]  # (H,)


def is_one_token(word):
    return len(tokenizer.encode(" " + word)) == 1


for word in ("night", "nights", "day", "days"):
    print(f"{word:7} {signature(word).tolist()}")
known = [w for w, n in counts.items() if n >= 5 and is_one_token(w)]
plurals = [(w, w + "s") for w in known if w + "s" in set(known) and len(w) > 2]
shared = sum(int((signature(a) == signature(b)).sum()) for a, b in plurals)
chance = len(plurals) * 4 / (model.config.num_buckets - 1)
print(f"{len(plurals)} pairs (word, word + s) share {shared} ids; by chance {chance:.1f}")
assert len(plurals) > 250 and shared <= 4
assert [tokenizer.decode([i]) for i in tokenizer.encode(" lovell")] == [" love", "ll"]

# %% [markdown]
# So likeness can only come from training: two words that stand in similar places get similar
# gradients. (Locality-sensitive functions, `--num_lsh`, would be another way. The paper tries
# both.) Words of several tokens are different. `lovell` is `love` and `ll`, and words that share a
# *token* share what the model knows of it. We keep the two kinds apart.
#
# ## 2. Neighbours
#
# `course.word_states` reads each word alone and gives the mean over its tokens at three places: the
# input vector, the output of the last block but one (*penultimate*), and the last states. First a
# look: which words' states point the same way? We take the commonest words, subtract the mean of
# all states (section 4 says why) and compute cosines.

# %%
common = [word for word, _ in counts.most_common(2500) if is_one_token(word)]
states = course.word_states(model, tokenizer, common)
no_training = course.word_states(untrained, tokenizer, common)


def neighbours(states, word, count=5):
    unit = torch.nn.functional.normalize(states - states.mean(0), dim=-1)  # (W, D)
    order = (unit @ unit[common.index(word)]).argsort(descending=True)
    return [common[i] for i in order[1 : count + 1].tolist()]


for word in ("king", "father", "night", "come", "good"):
    print(f"{word:7} trained:   {', '.join(neighbours(states['penultimate'], word))}")
    print(f"{'':7} untrained: {', '.join(neighbours(no_training['penultimate'], word))}")
assert {"mother", "brother", "sister"} & set(neighbours(states["penultimate"], "father"))

# %% [markdown]
# That looks like knowledge. But we chose the words, and a look is no measurement. Here is one that
# needs nobody's judgement: among all plurals, how often is a word nearer to its own plural than to
# another's? A model without knowledge is right half of the time.


# %%
LAYERS = ("input", "penultimate", "last")


def own_is_nearer(model):
    """{layer: (pairs,)}: the share of other plurals that are farther from a word than its own."""
    one, many = (course.word_states(model, tokenizer, words) for words in zip(*plurals))
    unit, found = torch.nn.functional.normalize, {}
    for layer in LAYERS:
        mean = torch.cat((one[layer], many[layer])).mean(0)  # (D,)
        cosine = unit(one[layer] - mean, dim=-1) @ unit(many[layer] - mean, dim=-1).T
        wins = cosine.diag().unsqueeze(-1) > cosine  # (pairs, pairs)
        found[layer] = wins.float().mean(-1).numpy()
    return found


nearer, by_chance = own_is_nearer(model), own_is_nearer(untrained)
for layer in LAYERS:
    rate, error = nearer[layer].mean(), nearer[layer].std() / len(plurals) ** 0.5
    print(f"{layer:12} {rate:.2f} ± {error:.2f}, untrained {by_chance[layer].mean():.2f}")
    assert rate > 0.7 and error < 0.02 and abs(by_chance[layer].mean() - 0.5) < 0.06

# %% [markdown]
# This is clear, and far beyond the standard error. Training alone, on five million characters, has
# put words and their plurals near each other, though their signatures have nothing in common.
#
# ## 3. What people say
#
# For WordSim-`353` people said how *related* two words are (tiger and cat, but also tiger and
# jungle). For SimLex-`999` they said how *similar* (tiger and cat, but not tiger and jungle;
# opposites count as not similar). The measure is the rank correlation (Spearman) between the
# people's scores and the model's cosines. A model cannot know what it has not read, so we count how
# often the rarer word of each pair stands in the training text.


# %%
SETS = {
    "WordSim-353": course.similarities("wordsim353"),
    "SimLex-999": course.similarities("simlex999"),
}


def rarer(pair):
    return min(counts[pair[0]], counts[pair[1]])


for name, pairs in SETS.items():
    there = [sum(rarer(p) >= n for p in pairs) for n in (1, 5, 20, 50)]
    print(f"{name}: {len(pairs)} pairs, read at least 1, 5, 20, 50 times: {there}")
unread = dict.fromkeys(w for a, b, _ in SETS["WordSim-353"] for w in (a, b) if not counts[w])
print("never read, for example:", ", ".join([*unread][:9]))

# %% [markdown]
# Shakespeare had no telephone. More than half of the first list is gone before we begin. And each
# threshold gives another sample. No threshold is the right one, so we must not try all of them and
# report the best.
#
# **Before you run it:** how wide will a 95 % interval be with about a hundred pairs?


# %%
def cosines(states, index, pairs):
    unit = torch.nn.functional.normalize(states, dim=-1)
    return np.array([float(unit[index[a]] @ unit[index[b]]) for a, b, _ in pairs])


def look_up(model, pairs):
    """{layer: states of all words of the pairs (W, D)} and the place of each word."""
    words = sorted({w for a, b, _ in pairs for w in (a, b)})
    return course.word_states(model, tokenizer, words), {w: i for i, w in enumerate(words)}


table, looked_up = {}, {name: look_up(model, pairs) for name, pairs in SETS.items()}
for name, pairs in SETS.items():
    for n in (1, 5, 20):
        chosen = [p for p in pairs if rarer(p) >= n]
        score = [s for *_, s in chosen]
        for layer in LAYERS:
            x = cosines(looked_up[name][0][layer], looked_up[name][1], chosen)
            low, high = course.interval(course.spearman, x, score)
            r = course.spearman(x, score), course.pearson(x, score)
            table[name, n, layer] = r[0], low, high, len(chosen)
            print(f"{name:11} n ≥ {n:2} ({len(chosen):3} pairs) {layer:11} Spearman {r[0]:5.2f} "
                  f"[{low:5.2f}, {high:5.2f}], Pearson {r[1]:5.2f}")  # fmt: skip

# %% [markdown]
# The picture shows each pair of WordSim-`353` whose words were read five times or more: the cosine
# of the penultimate states against the people's score. Look for a slope, then for how much of the
# cloud it explains. Triangles are pairs with a word of several tokens. They lie farther left, which
# has to do with the tokenizer, not with meaning.

# %%
pairs = [p for p in SETS["WordSim-353"] if rarer(p) >= 5]
places, index = looked_up["WordSim-353"]
x = cosines(places["penultimate"], index, pairs)
score = np.array([s for *_, s in pairs])
single = np.array([is_one_token(a) and is_one_token(b) for a, b, _ in pairs])
figure, axis = plt.subplots(figsize=(6, 4))
axis.plot(x[single], score[single], "o", label="two single tokens")
axis.plot(x[~single], score[~single], "^", label="a word of several tokens")
for i in (x.argmin(), x.argmax(), score.argmin(), score.argmax()):
    name, side = "–".join(pairs[i][:2]), "right" if x[i] > 0.6 else "left"
    axis.annotate(name, (x[i], score[i]), (0, 6), textcoords="offset points", ha=side, fontsize=8)
axis.set(xlabel="cosine of the penultimate states", ylabel="people's score (0 to 10)")
axis.set_ylim(0, 11.5)
axis.legend(loc="upper left", ncols=2, fontsize=9)
course.show(figure, "08-scatter")

# %%
for label, kind in (("two single tokens", single), ("a word of several tokens", ~single)):
    low, high = course.interval(course.spearman, x[kind], score[kind])
    r = course.spearman(x[kind], score[kind])
    print(f"{label}: {kind.sum()} pairs, Spearman {r:.2f} [{low:.2f}, {high:.2f}]")
assert x[single].mean() > x[~single].mean() + 0.1

# %% [markdown]
# Now all lists, layers and thresholds. Each dot is a correlation with its 95 % interval, from a
# thousand resamples of the pairs (the bootstrap). An interval that holds 0 says: with so few pairs,
# no relation would look the same. The dotted line is the correlation that the paper reports, for a
# far larger model, on rarer words.

# %%
PAPER = 0.32  # Spearman at the penultimate layer, Card-660: the paper's figure, not measured here
figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
for axis, name in zip(axes, SETS):
    for k, layer in enumerate(LAYERS):
        r, low, high, size = np.array([table[name, n, layer] for n in (1, 5, 20)]).T
        at = np.arange(3) + 0.2 * (k - 1)
        axis.errorbar(at, r, (r - low, high - r), fmt="o", color=course.COLOURS[k], label=layer)
    axis.set_xticks(range(3), [f"≥ {n}\n{int(s)} pairs" for n, s in zip((1, 5, 20), size)])
    axis.set_xlabel(f"{name}: times the rarer word was read")
    axis.axhline(0, color=course.BLACK, linewidth=0.8)
    axis.axhline(PAPER, color=course.BLACK, linewidth=0.8, linestyle=":")
axes[0].set(ylabel="Spearman correlation", ylim=(-0.3, 0.6))
axes[1].legend(loc="lower right", ncols=3, fontsize=9)
course.show(figure, "08-correlations")

# %% [markdown]
# The paper finds a Spearman correlation of `0.32` on Card-`660` at the penultimate layer, higher
# than the standard model's. Can a model of this size test that? Let code decide. To claim a
# relation we want intervals without 0 at *every* threshold. To rank the layers, the interval of the
# difference between two layers must not hold 0 either; for it we draw the same pairs for both.


# %%
def verdict(holds_zero):
    return "not testable at this size" if holds_zero else "testable"


for name in SETS:
    rows = [row for (of, *_), row in table.items() if of == name]
    holds_zero = sum(low <= 0 <= high for _, low, high, _ in rows)
    print(f"{name}: {holds_zero} of {len(rows)} intervals hold 0: {verdict(holds_zero)}")
    excluded = sum(high < PAPER for _, _, high, _ in rows)
    print(f"  {excluded} of {len(rows)} lie wholly below {PAPER}")
    assert holds_zero and (name == "WordSim-353" or holds_zero == excluded == len(rows))
other = cosines(places["input"], index, pairs)
draws = np.random.default_rng(0).integers(0, len(score), (1000, len(score)))
gains = [course.spearman(x[i], score[i]) - course.spearman(other[i], score[i]) for i in draws]
low, high = np.percentile(gains, [2.5, 97.5])
print(f"penultimate − input, n ≥ 5: [{low:.2f}, {high:.2f}]: {verdict(low <= 0 <= high)}")
assert low <= 0 <= high

# %% [markdown]
# What may we say? On relatedness there is a hint of a relation: with words read five times or more,
# the intervals lie just above 0. With all words, or with fewer pairs, some hold it. On similarity
# we see nothing at any threshold, and here the pairs are enough to exclude a correlation like the
# paper's. That fits the neighbours above: the model knows which words stand in similar places, and
# opposites do. `day` is the nearest to `night`, and SimLex counts opposites as not similar. On the
# order of the layers we may say nothing.
#
# ## 4. A trap: all states point the same way
#
# Take pairs of words at random. One expects a mean cosine near 0, because $D = 128$ dimensions
# have a lot of room.
#
# **Before you run it:** what is it at the penultimate layer?


# %%
def mean_cosine(states):
    unit = torch.nn.functional.normalize(states, dim=-1)  # (W, D)
    W = len(unit)
    return ((unit.sum(0) ** 2).sum() - W).item() / (W * W - W)  # all pairs but (w, w)


def without_first(states):
    """Centred, and without the direction in which they differ most (first principal component)."""
    centred = states - states.mean(0)
    _, S, directions = torch.linalg.svd(centred, full_matrices=False)  # (D, D)
    first = directions[:1]  # (1, D)
    return centred - centred @ first.T @ first, (S[0] ** 2 / (S**2).sum()).item()


raw, share = {}, {}
for layer in LAYERS:
    s = states[layer]
    raw[layer], share[layer] = mean_cosine(s), without_first(s)[1]
    print(f"{layer:12} mean cosine {raw[layer]:.2f}; centred {mean_cosine(s - s.mean(0)):.3f}; "
          f"the first component holds {share[layer]:.0%} of what is left")  # fmt: skip
    assert abs(mean_cosine(s - s.mean(0))) < 0.02

# %% [markdown]
# The states lie in a narrow cone (they are *anisotropic*): they share one large vector, which says
# "here stands a word, alone" and not which word. It raises all cosines, so a cosine of a half means
# nothing by itself. Left in the picture: cosines of random words at the penultimate layer, as they
# are and centred. Right: does it matter for the correlation with people? See how little the dots
# move, compared with their intervals, when the mean or the first component is removed.

# %%
i, j = np.random.default_rng(0).integers(0, len(common), (2, 4000))
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
centred = states["penultimate"] - states["penultimate"].mean(0)
for label, s in (("as they are", states["penultimate"]), ("centred", centred)):
    unit = torch.nn.functional.normalize(s, dim=-1)
    left.hist((unit[i] * unit[j]).sum(-1)[i != j], 50, alpha=0.7, label=label)
left.set(xlabel="cosine of two random words", ylabel="pairs", ylim=(0, 270))
left.legend(fontsize=9, ncols=2)
for k, layer in enumerate(LAYERS):
    s = places[layer]
    ways = s, s - s.mean(0), without_first(s)[0]
    x = [cosines(way, index, pairs) for way in ways]
    r = np.array([course.spearman(v, score) for v in x])
    ends = np.array([course.interval(course.spearman, v, score) for v in x])  # (3, 2)
    at = np.arange(3) + 0.2 * (k - 1)
    right.errorbar(at, r, (r - ends[:, 0], ends[:, 1] - r), fmt="o", label=layer)
    assert abs(r - r[0]).max() < 0.1
right.axhline(0, color=course.BLACK, linewidth=0.8)
right.set_xticks(range(3), ("as they are", "centred", "− first component"))
right.set(ylabel="Spearman, WordSim, ≥ 5", ylim=(-0.15, 0.55))
right.legend(ncols=3, fontsize=9, loc="upper center")
course.show(figure, "08-anisotropy")
assert raw["penultimate"] > 0.35 and raw["penultimate"] > 4 * raw["input"]

# %% [markdown]
# ## 5. Seldom read, little known?
#
# The question of the paper: how good is the model on *rare* words? The plural pairs are many enough
# to sort them by how often the rarer of the two was read. Vertical lines: two standard errors.
#
# **Before you run it:** which bin comes nearest to one half?

# %%
seen = np.array([min(counts[a], counts[b]) for a, b in plurals])
bins = {"5–29": (5, 30), "30–99": (30, 100), "100 and more": (100, 10**9)}
members = [(seen >= low) & (seen < high) for low, high in bins.values()]
figure, axis = plt.subplots(figsize=(6, 3.4))
for k, layer in enumerate(LAYERS):
    parts = [nearer[layer][m] for m in members]
    mean = np.array([p.mean() for p in parts])
    error = np.array([p.std() / len(p) ** 0.5 for p in parts])
    axis.errorbar(np.arange(3) + 0.15 * (k - 1), mean, 2 * error, fmt="o", label=layer)
    print(f"{layer:12}", ", ".join(f"{m:.2f} ± {e:.2f}" for m, e in zip(mean, error)))
axis.axhline(0.5, color=course.BLACK, linewidth=0.8, linestyle=":")
axis.set_xticks(range(3), [f"{n}\n{m.sum()} pairs" for n, m in zip(bins, members)])
axis.set(xlabel="times the rarer word was read", ylabel="own plural is nearer", ylim=(0.4, 1.05))
axis.legend(loc="upper left", ncols=3, fontsize=9)
course.show(figure, "08-frequency")
rare, frequent = (nearer["penultimate"][m] for m in (members[0], members[-1]))
assert frequent.mean() > rare.mean() + 0.05

# %% [markdown]
# ## 6. Your own list
#
# Card-`660`, the list of the paper, holds rare words, names and terms of today: `660` pairs in
# lines `word TAB word TAB score`. It is not part of this project. `course.similarities(path)` reads
# any file of this form, so with a model that has read today's English you can repeat the paper's
# measurement. Here are all steps with a small file of words that Shakespeare knew. We made up the
# scores, so they mean nothing.

# %%
LIST = """# three lines are an example, not a measurement
father\tmother\t3.0
king\tduke\t2.5
sword\tnight\t0.5
"""
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "card-660.tsv"
    path.write_text(LIST, encoding="utf-8")
    ours = course.similarities(path)
found, places = look_up(model, ours)
for (a, b, s), cosine in zip(ours, cosines(found["penultimate"], places, ours)):
    times = rarer((a, b, s))
    print(f"{a} – {b}: our score {s}, cosine {cosine:.2f}, rarer word read {times} times")
assert ours == course.read_similarities(LIST) and len(ours) == 3

# %% [markdown]
# ## What we saw
#
# Signatures of similar strings have nothing in common, so all likeness comes from training. There
# is some: a word's own plural is nearer than other plurals in about four of five comparisons
# (without training in half of them), and in more of them for words that were read often. The
# correlation with people's judgement is weakly positive for relatedness and not to be seen for
# similarity, and the intervals are wide. The paper's claims on rare words and layers are not
# testable at this size. Cosines of states need care: those of random words have a mean of nearly a
# half.
#
# ## Exercises
#
# 1. *Calculate.* The standard error of a correlation near 0 is about $1/\sqrt{n-3}$. How many pairs
#    do you need to tell `0.32` from 0 with two standard errors? And from `0.22`, with another list?
# 2. *Change.* Give the words a context: put ` the` before each word (and take the states of the
#    word's tokens only). Does the share of plurals that are nearer go up?
# 3. *Find out.* Do words that share a token, as `lovell` and `love` do, look alike for that reason
#    alone? In the untrained model, compare the cosines of pairs of multi-token words that share a
#    token with those of pairs that share none.
#
# Answers: `python tutorials/answers.py 08`. Next:
# [09 · Evaluation](09_evaluation.ipynb): how good is a language model?
