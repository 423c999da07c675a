# %% [markdown]
# # 09 · Evaluation
#
# **How good is a language model?**
#
# Afterwards you can
# * choose a measure that survives a change of the tokenizer;
# * put an error bar on a perplexity, an accuracy and a difference, and know when it lies;
# * read what an evaluation harness does with a model.
#
# Reading: 30 minutes. Run time: about 40 seconds on 2 cores. Paper: its experiments, with the tasks
# of lm-evaluation-harness ([arXiv](https://arxiv.org/abs/2606.28057)). Code: `support/evaluate.py`.
#
# On Colab: `!git clone REPOSITORY project`, `%cd project/tutorials`,
# `!pip install -r ../requirements.txt`

# %%
import copy
import json
import math
import sys
from collections import Counter

sys.path.append("tutorials")  # for a kernel that was started one folder above

import claims
import course
import numpy as np
import torch
import torch.nn.functional as F

from support.data import windows
from support.evaluate import fit_calibration

plt = course.pyplot()
model, tokenizer = course.shipped()
shakespeare = course.corpus()
held_out = shakespeare.held_out  # never trained on
T = model.config.max_position_embeddings

# %% [markdown]
# ## 1. Perplexity, and what it counts
#
# The loss of a text is the mean of $-\log P(\text{token})$ over its tokens. *Perplexity* is $e$ to
# the power of the loss: so to speak, the number of equally likely tokens between which the model
# hesitates. It is a number *per token*: cut the text into other tokens, and it changes. **Bits per
# byte** spreads the whole loss $L$ over the bytes, which stay the same:
#
# $$\text{perplexity} = e^{L/n_\text{tokens}}, \qquad
#   \text{bits per byte} = \frac{L}{\ln 2 \cdot n_\text{bytes}}.$$
#
# We train the same small model for a moment with two tokenizers, of 512 and of 2048 tokens.
#
# **Before you run it:** which will have the lower perplexity? Which will need fewer bits per byte?

# %%
results = {}
for size in (512, 2048):
    cut = course.corpus(f"bpe:{size}")
    small = course.small(cut.tokenizer, num_buckets=size // 4)
    list(course.fit(small, cut.training, 60, learning_rate=4e-3))
    results[size] = found = course.quality(small, cut, 16384)
    length = course.token_sizes(cut.tokenizer)[cut.held_out.astype(int)].float().mean()
    print(f"V = {size}: {length:.2f} bytes a token, perplexity {found['perplexity']:.0f}, "
          f"{found['bits_per_byte']:.2f} bits per byte")  # fmt: skip

# %% [markdown]
# The two measures disagree on which model is better. See it in the picture: left perplexity, right
# bits per byte; lower is better in both.

# %%
figure, axes = plt.subplots(1, 2, figsize=(7, 3))
for axis, key in zip(axes, ("perplexity", "bits_per_byte")):
    values = [found[key] for found in results.values()]
    bars = axis.bar([f"V {size}" for size in results], values, 0.5, color=course.COLOURS[:2])
    axis.bar_label(bars, fmt="%.3g", padding=2)
    axis.margins(y=0.15)
    axis.set(ylabel=key.replace("_", " "), xlabel="tokenizer")
course.show(figure, "09-tokenizers")
few, many = results[512], results[2048]
assert many["perplexity"] > 1.5 * few["perplexity"]
assert many["bits_per_byte"] < few["bits_per_byte"] - 0.1

# %% [markdown]
# A perplexity means something only together with its tokenizer. Bits per byte compare across
# tokenizers. (Both models took 60 steps of equally many tokens, so the one with longer tokens has
# read more *text*. Fair in steps is not fair in bytes: always say which.)
#
# ## 2. One pass over the held-out text
#
# The next sections use one array: the loss of each token of the first half of the held-out text
# under the shipped model, in windows of its context. The scores are divided by the model's τ before
# the softmax.


# %%
@torch.no_grad()
def losses(model, numbers):
    """−log P of the windows' tokens (windows, T); each window is a context of its own."""
    rows, tau = [], model.config.calibration
    for x, y in zip(*windows(held_out, numbers * T, T)):  # (T,), (T,)
        scores = model.token_scores(model(x.unsqueeze(0))[0])  # (T, V)
        rows.append(F.cross_entropy(scores / tau, y, reduction="none"))  # (T,)
    return torch.stack(rows).numpy()


some = np.arange(160)
loss = losses(model, some)  # (windows, T)
targets = held_out[1 : loss.size + 1].astype(int)
bits = loss.sum() / math.log(2) / course.token_sizes(tokenizer)[targets].sum().item()
print(f"{loss.size:,} tokens: perplexity {np.exp(loss.mean()):.1f}, {bits:.3f} bits per byte")
assert abs(np.exp(loss.mean()) - 87.3) < 1 and abs(bits - 1.86) < 0.04

# %% [markdown]
# τ itself was fitted to held-out text. Measured on the text that τ was fitted to, the loss comes
# out too low. How much? We fit τ on a few windows, and measure on these and on others.

# %%
x, y = windows(held_out, np.arange(0, 160, 8) * T, T)  # 20 windows, spread
with torch.no_grad():
    scores = torch.cat([model.token_scores(model(row.unsqueeze(0))[0]) for row in x])  # (M, V)
y, other = y.flatten(), slice(10 * T, None)  # the second ten are for measuring


def loss_at(tau, part):
    return F.cross_entropy(scores[part] / tau, y[part]).item()


for count in (1, 3, 10):
    fitted = slice(0, count * T)
    tau = fit_calibration(scores[fitted], y[fitted])
    gain, change = (loss_at(1.24, part) - loss_at(tau, part) for part in (fitted, other))
    print(f"τ {tau:.3f} from {count:2} windows: {gain:+.4f} better there, {change:+.4f} elsewhere")
    assert gain > -1e-4 and (count == 1 or abs(change) < 0.03)
print(f"that is, than with the shipped τ; at τ = 1 the loss is {loss_at(1, other):.3f}, "
      f"at 1.24 {loss_at(1.24, other):.3f}")  # fmt: skip
assert loss_at(1, other) > loss_at(1.24, other) + 0.03

# %% [markdown]
# Fitted on one window, τ suits that window and no other. Fitted on ten, it gains there about what
# it gains elsewhere, because one number cannot memorise much. Splitting is still right: `train.py`
# fits τ on every other window and measures on the rest, and nobody has to argue how much is much.
#
# ## 3. How sure is a perplexity?
#
# The standard error of a mean is $s/\sqrt{n}$, *if the $n$ values are independent*. Tokens are not:
# a hard speech is hard for many tokens. So we first take means over blocks of text, and then look
# at the spread of these means.
#
# **Before you run it:** what will longer blocks do to the error?

# %%
flat, errors = loss.flatten(), {}
for block in (1, 16, 64, 256, 1024, 2048):
    count = len(flat) // block
    means = flat[: count * block].reshape(count, block).mean(1)  # (blocks,)
    errors[block] = means.std(ddof=1) / math.sqrt(count)
    print(f"{count:5} blocks of {block:4} tokens: loss {flat.mean():.3f} ± {errors[block]:.3f}")
assert errors[2048] > 1.3 * errors[256] and errors[256] > 1.5 * errors[1]

# %% [markdown]
# The naive error (blocks of one token) is far too small. And the error does not stop growing: the
# held-out text is a few plays, and plays differ. The question "how good on *this* text?" needs no
# error bar at all. For the question "how good on *other* plays?" the text is a sample of a few
# plays, and even the last error is too small.
#
# Left in the picture: that error. Right: the mean settles as more windows are drawn at random. The
# band is ± two standard errors of windows, and the dotted lines stand at ± 1 % of the loss.

# %%
means = np.random.default_rng(0).permutation(loss.mean(1))  # (windows,)
number = np.arange(1, len(means) + 1)
running = means.cumsum() / number
half = 2 * means.std(ddof=1) / np.sqrt(number)
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
left.plot(errors.keys(), errors.values(), "o-", color=course.BLUE)
left.set(xscale="log", xlabel="tokens of a block", ylabel="standard error of the loss", ylim=0)
right.plot(number * T, running, color=course.BLUE)
right.fill_between(number * T, running - half, running + half, color=course.SKY, alpha=0.4)
for side in (0.99, 1.01):
    right.axhline(side * loss.mean(), color=course.BLACK, linewidth=0.8, linestyle=":")
right.set(xscale="log", xlabel="tokens measured", ylabel="mean loss", ylim=(4.1, 4.9))
course.show(figure, "09-error")

# %% [markdown]
# How many tokens does it take to see a difference of 1 %? If two models are measured on *different*
# texts, their variances add. On the *same* text the hard windows are hard for both, and only the
# differences count. We compare the shipped model with a copy whose weights are rounded to a few
# steps per row.
#
# **Before you run it:** how much does the pairing save?

# %%
rounded = copy.deepcopy(model)
for p in rounded.parameters():
    if p.dim() == 2:
        step = p.abs().amax(-1, keepdim=True) / 15  # about five bits a weight
        p.copy_((p / step).round() * step)
few = some[::5]
first, second = loss[few].mean(1), losses(rounded, few).mean(1)  # (windows,)
difference = (second - first).mean()
wanted = 0.01 * first.mean() / 2  # 1 % of the loss shall be two standard errors
apart = math.sqrt(first.var(ddof=1) + second.var(ddof=1))
paired = (second - first).std(ddof=1)
need = {"other texts": (apart / wanted) ** 2 * T, "the same text": (paired / wanted) ** 2 * T}
print(f"rounding costs {difference:.3f} ± {paired / len(few) ** 0.5:.3f} in loss")
print("tokens to show 1 %:", ", ".join(f"on {k} {n:,.0f}" for k, n in need.items()))
assert need["other texts"] > 5 * need["the same text"]

# %% [markdown]
# Measure two models on the same windows, and report the error of the *difference*. (The seed of
# training is one more source of spread. No held-out text shows it, only more runs do. The
# [results](results/README.md) give ranges over three seeds: a few percent of perplexity.)
#
# ## 4. The last word
#
# LAMBADA asks for the last word of a passage, chosen so that people need the whole passage to guess
# it. We ask the same of Shakespeare: the last word of a sentence, by greedy choice. An accuracy $p$
# from $n$ questions has the standard error $\sqrt{p(1-p)/n}$. The first thing to know is what a
# stupid answer gets: always the most frequent last word of the training text.

# %%
passages = course.last_words(held_out, tokenizer, 64, 400)
ends = Counter(m[1] for m in course.LAST_WORD.finditer(tokenizer.decode(shakespeare.training[:])))
frequent = ends.most_common(1)[0][0]
stupid = np.mean([tokenizer.decode(word) == " " + frequent for _, word in passages])
right = {}
for window in (16, 64, 256):
    asked = course.last_words(held_out, tokenizer, window, 400)
    right[window] = p = course.last_word_accuracy(model, asked)
    print(f"{window:3} tokens of text: {p:.3f} ± {math.sqrt(p * (1 - p) / len(asked)):.3f}")
print(f"always {frequent!r}: {stupid:.3f}")
assert all(abs(p - 0.085) < 0.035 for p in right.values()) and stupid < 0.04

# %% [markdown]
# The model is far better than the stupid answer. But longer texts do not help: the three accuracies
# agree within their errors. This model answers from the last few words. The question was made to
# test understanding of a passage, and here it tests something else. Always ask what a task measures
# *in this model*.
#
# Words of more tokens are harder for two reasons: they are rarer, and every token must be right.

# %%
groups = {"1": (1,), "2": (2,), "3 and more": range(3, 99)}
parts = [[p for p in passages if len(p[1]) in lengths] for lengths in groups.values()]
count = np.array([len(part) for part in parts])
share = np.array([course.last_word_accuracy(model, part) for part in parts])
assert abs((share * count).sum() / count.sum() - right[64]) < 0.01
for name, p, n in zip(groups, share, count):
    print(f"words of {name} tokens: {p:.3f} of {n}")
assert share[0] > share[1:].max()

# %% [markdown]
# The picture shows the accuracy by the length of the text, left, and by the tokens of the word,
# right. Vertical lines: two standard errors, or up to $3/n$ where none is right (with a true rate
# of $3/n$, none of $n$ is right with a chance of 5 %). Dotted: the stupid answer.

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 3), sharey=True)
for axis, p, n in ((axes[0], np.array([*right.values()]), 400), (axes[1], share, count)):
    error = 2 * np.sqrt(p * (1 - p) / n)
    above = np.where(p > 0, error, 3 / n)  # none of n right: up to 3 / n would still fit
    axis.errorbar(range(3), p, (error, above), fmt="o", color=course.BLUE)
    axis.axhline(stupid, color=course.BLACK, linewidth=0.8, linestyle=":")
    axis.set_xlim(-0.5, 2.5)
axes[0].set_xticks(range(3), right)
axes[0].set(xlabel="tokens of text, with the word", ylabel="last word right", ylim=-0.005)
axes[1].set_xticks(range(3), [f"{k}\n{n} words" for k, n in zip(groups, count)])
axes[1].set_xlabel("tokens of the word")
course.show(figure, "09-last-words")

# %% [markdown]
# ## 5. Multiple choice
#
# Most benchmarks give a context and a few continuations, and the model chooses the one with the
# highest score. We build items from held-out text: after three lines of a play, which line comes
# next? The other three choices are lines from elsewhere in the held-out text, drawn at random. By
# luck one in four is right. But what is a good score for lines of different lengths?
#
# * the *sum* of the log probabilities of a line's tokens;
# * their mean *per token*, or *per byte*;
# * the *gain*: the sum after the context, minus the sum after nothing but a new line. It asks how
#   much likelier the context has made the line.
#
# **Before you run it:** which is best, and which prefers short lines?

# %%
lines = [line.strip() for line in tokenizer.decode(held_out).split("\n")]
spoken = [i for i, line in enumerate(lines) if len(line) > 15 and line[0] not in "*_#"]
places = [i for i in spoken if all(j in spoken for j in (i - 1, i - 2, i - 3))]
rng, items = np.random.default_rng(0), []
for i in rng.choice(places, 120, replace=False):
    wrong = rng.choice([j for j in spoken if abs(j - i) > 50], 3, replace=False)
    context = "  \n".join(lines[i - 3 : i]) + "  \n"  # two spaces end a line of verse
    items.append((context, [lines[i], *(lines[j] for j in wrong)]))  # the first is right
print(items[0][0] + "".join(f"\n  {'abcd'[k]}) {c}" for k, c in enumerate(items[0][1])))


# %% [markdown]
# The score of a continuation is all that is asked of the model. `loglikelihood` below computes it,
# and the harness of section 6 asks for exactly this.


# %%
@torch.no_grad()
def loglikelihood(context, continuation):
    """Σ log P of the continuation's tokens after the context, and whether greedy writes them."""
    ids = tokenizer.encode(context), tokenizer.encode(continuation)
    rows = torch.tensor([*ids[0], *ids[1]])[-T - 1 :]
    targets = rows[-len(ids[1]) :]  # (n,)
    states = model(rows[:-1].unsqueeze(0))[0, -len(targets) :]  # (n, D)
    log_p = (model.token_scores(states) / model.config.calibration).log_softmax(-1)  # (n, V)
    picked = log_p.gather(-1, targets.unsqueeze(-1))  # (n, 1)
    return picked.sum().item(), bool((log_p.argmax(-1) == targets).all())


total = np.array([[loglikelihood(c, x)[0] for x in choices] for c, choices in items])  # (items, 4)
tokens = np.array([[len(tokenizer.encode(x)) for x in choices] for _, choices in items])
size = np.array([[len(x.encode()) for x in choices] for _, choices in items])
alone = np.array([[loglikelihood("  \n", x)[0] for x in choices] for _, choices in items])
ways = {"sum": total, "per token": total / tokens, "per byte": total / size, "gain": total - alone}
won = {name: values.argmax(1) == 0 for name, values in ways.items()}
for name, hit in won.items():
    p, longest = hit.mean(), (ways[name].argmax(1) == size.argmax(1)).mean()
    error = math.sqrt(p * (1 - p) / len(hit))
    print(f"{name:9} right {p:.2f} ± {error:.2f}; chose the longest {longest:.2f}, "
          f"the shortest {(ways[name].argmax(1) == size.argmin(1)).mean():.2f}")  # fmt: skip

# %% [markdown]
# The picture shows the four rules: how often the choice is right, and how often it is simply the
# shortest or the longest line. A rule without a taste for length would choose both at one in four.

# %%
figure, axis = plt.subplots(figsize=(7, 3.2))
kinds = {"right": won, "the shortest": {}, "the longest": {}}
for name, values in ways.items():
    kinds["the shortest"][name] = values.argmax(1) == size.argmin(1)
    kinds["the longest"][name] = values.argmax(1) == size.argmax(1)
for k, (kind, chosen) in enumerate(kinds.items()):
    p = np.array([chosen[name].mean() for name in ways])
    error = 2 * np.sqrt(p * (1 - p) / len(items))
    axis.bar(np.arange(4) + 0.27 * (k - 1), p, 0.25, yerr=error, label=f"choice is {kind}")
axis.axhline(0.25, color=course.BLACK, linewidth=0.8, linestyle=":")
axis.set_xticks(range(4), ways)
axis.set(ylabel="share of the items", ylim=(0, 0.95))
axis.legend(ncols=3, fontsize=9)
course.show(figure, "09-choice")
shortest, longest = (kinds[k]["sum"].mean() for k in ("the shortest", "the longest"))
assert shortest > 0.4 and longest < 0.15
assert all(0.14 < won[name].mean() < 0.45 for name in ("sum", "per token", "per byte"))
assert won["gain"].mean() > 0.43

# %% [markdown]
# One model, the same items, and every result from luck to about half right! The sum takes the
# shortest line most of the time. The means do so less, and yet they are hardly above chance: it
# counts more whether a line is made of common words than whether it fits. The gain removes what the
# line is worth by itself, and shows that the model did use the context. So a benchmark is a set of
# items *and a rule*, and two numbers can be compared only if both agree. An error bar of the sample
# says nothing about that. All rules answered the same items, so we can count the items on which
# they disagree:

# %%
for one, two in (("sum", "per token"), ("per token", "per byte"), ("per byte", "gain")):
    only = (won[one] & ~won[two]).sum(), (~won[one] & won[two]).sum()
    print(f"right by {one} alone {only[0]}, by {two} alone {only[1]}")
assert only[1] > 2 * only[0]  # per byte and gain: more than a matter of luck

# %% [markdown]
# ## 6. What a harness asks
#
# [lm-evaluation-harness](https://github.com/EleutherAI/lm-evaluation-harness) holds the questions
# of many benchmarks. It asks three things of a model, and a small adapter answers.
#
# * **loglikelihood**(context, continuation): what our function above gives. Multiple choice asks
#   for it once per choice; LAMBADA asks whether greedy decoding writes the last word.
# * **loglikelihood_rolling**(text): $\log P$ of a whole text, for perplexities of documents. A text
#   longer than the context is cut into windows, so that each token is predicted once.
# * **generate_until**(context, stops): what the model writes until one of the stop strings comes.
#   Tasks of arithmetic and code ask for it.
#
# Here is one loglikelihood by hand, from the definitions alone: the cascade gives the logits of
# each function, these give $\log p_j$ of each bucket, and their sum over the signature of each
# token is divided by τ and renormalised.

# %%
context, continuation = "To be, or not", " to be"
ids, answer = tokenizer.encode(context), tokenizer.encode(continuation)
log_p, greedy = 0.0, True
for token in answer:
    states = model(torch.tensor([ids]))[0, -1]  # (D,)
    log_buckets = model.hash_head(states, model.table).log_softmax(-1)  # (H, B)
    signatures = model.model.hash_map  # (V, H)
    score = sum(log_buckets[j, signatures[:, j]] for j in range(4))  # (V,)
    log_probs = (score / model.config.calibration).log_softmax(-1)  # (V,)
    log_p += log_probs[token].item()
    greedy &= int(log_probs.argmax()) == token
    ids.append(token)
print(f"log P({continuation!r} | {context!r}) = {log_p:.3f}, greedy: {greedy}")
assert abs(log_p - loglikelihood(context, continuation)[0]) < 1e-3
assert greedy == loglikelihood(context, continuation)[1]

# %% [markdown]
# With the optional package (`pip install lm_eval`) the project's adapter runs any of its tasks on
# any checkpoint. The package downloads the questions, so we do not run it here:
#
# ```bash
# python tutorials/harness.py --checkpoint tutorials/checkpoint --tasks lambada_openai --limit 100
# ```
#
# Do not expect much of the shipped model: it has read nothing but plays. On today's English its
# answers are close to chance. *That* is worth knowing about a benchmark before it compares two
# models: if both are at chance, the better one cannot win.
#
# ## 7. Equal what?
#
# "Better" also needs to say what both models were given. `python tutorials/experiments.py
# objective equal_time` trains them for as many *steps*, and for as much *time*: whoever takes
# longer for a step makes fewer. That takes hours, so we read the results, of three seeds each.
#
# **Before you run it:** a step of `H4 exact` costs more than twice a standard model's. It is ahead
# after as many steps. Is it ahead after the same time?

# %%
folder, found = course.ROOT / "tutorials" / "results", {}
for name in ("objective", "equal_time"):
    found[name] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
for label, at_equal_steps in {"standard": "standard", "H4 exact": "λ 0", "H4": "λ ∞"}.items():
    steps, time = (
        claims.values(found[name], which, "perplexity")
        for name, which in (("objective", at_equal_steps), ("equal_time", label))
    )
    print(f"{label:9} perplexity at equal steps {np.mean(steps):.0f}, at equal time "
          f"{np.mean(time):.0f}, seeds {min(time):.0f} to {max(time):.0f}")  # fmt: skip
    if label == "standard":
        rival = steps, time
    if label == "H4 exact":
        assert max(steps) < min(rival[0]) and min(time) > max(rival[1])
course.show(claims.EXPERIMENTS["equal_time"].draw(plt, found["equal_time"]), "09-time")

# %% [markdown]
# Left: perplexity by time, on a sample of the text; right: the time of a step, against that of the
# standard model. The answer is no: equal steps and equal time give opposite orders, and both are
# true. The wider the model, the less the steps differ, since the work of the blocks grows with
# $D^2$ and that of the cascade with $D$. A comparison at one size decides nothing about another.
#
# ## What we saw
#
# A language model is as good as its loss on text it has not seen, in bits per byte, because
# perplexities change with the tokenizer. The error of a loss comes from passages and plays, not
# from tokens, and a comparison on the same text is far sharper than one on different texts. An
# accuracy needs the stupid answer beside it, and a look at what the task asks of *this* model: here
# it guesses the last word from the last few words. In multiple choice the rule that makes scores
# comparable can decide between chance and skill. And two models are compared at equal steps, time,
# text or parameters: the order may depend on which.
#
# ## Exercises
#
# 1. *Calculate.* Two models answer the same `1000` questions with four choices; one has 30 % right,
#    the other 32 %. How large is the standard error of the difference if their answers are
#    independent? How many questions make the difference two standard errors?
# 2. *Change.* The first tokens of a window have little context. Measure only the second half of
#    each window. What becomes of the loss, and what of the comparison of two models?
# 3. *Find out.* A harder multiple choice: take the wrong lines from the same scene, 5 to 30 lines
#    away. How much of the gain's accuracy is left, and what did the easy version measure?
#
# Answers: `python tutorials/answers.py 09`. This is the last tutorial. From here:
# change `mhf.py`, train, and compare the two runs with `python train.py --compare`
# ([README](../README.md)).
