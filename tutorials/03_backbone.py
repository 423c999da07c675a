# %% [markdown]
# # 03 · The backbone
#
# **What is inside a Qwen3 block, what is each part for, and what do the trained blocks do?**
#
# Afterwards you can
# * compute a block by hand, step by step, and name the reason for each step;
# * read attention maps, and read off a prediction after every layer;
# * say where the parameters and the arithmetic of the model are.
#
# Reading: 30 minutes. Run time: under half a minute on 2 cores. Paper:
# [sections 3 and 4](https://arxiv.org/abs/2606.28057), which use the Qwen3 decoder unchanged as the
# backbone. Code: `Attention`, `FeedForward`, `Block`, `Backbone` in `mhf.py`.
#
# On Colab: `!git clone REPOSITORY project`, `%cd project/tutorials`,
# `!pip install -r ../requirements.txt`
#
# The blocks know nothing of hashing. They take input vectors (tutorial 02) and hand a state at each
# position to the cascade (tutorial 04). In between there is one *residual stream*: a vector of
# width $D$ for each position, to which every part of every block adds something.

# %%
import sys

sys.path.append("tutorials")  # for a kernel that was started one folder above

import course
import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import mhf
from support.data import windows

plt = course.pyplot()
model, tokenizer = course.shipped()
backbone, config = model.model, model.config
D, A, K, C = 128, 2, 1, 64  # width, attention heads, key/value heads, width of a head

held_out, T = course.corpus().held_out, config.max_position_embeddings
ids = torch.tensor(held_out[:T].tolist())  # (T,)
states, outputs = model(ids[None], return_layers=True)  # (1, T, D), 4 × (1, T, D)
x = model.embed(ids[None])[0]  # (T, D)
assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (A, K, C)
assert len(backbone.layers) == 4 and x.shape == (T, D)

# %% [markdown]
# ## 1. Norm
#
# $\mathrm{RMSNorm}(x) = g \cdot x / \sqrt{\mathrm{mean}(x^2) + \epsilon}$ gives a vector a fixed
# size and lets a learned $g$ scale each of its numbers. The picture shows why it is needed: every
# block adds to the stream, so the stream gets longer. Without a norm in front, the second block
# would see inputs of quite another size than the first.


# %%
def rms(x, weight):
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()


block = backbone.layers[1]
assert torch.allclose(rms(x, block.input_layernorm.weight), block.input_layernorm(x), atol=1e-5)

stream = [x, *(output[0] for output in outputs)]  # 5 × (T, D): before and after each block
figure, axes = plt.subplots(figsize=(6, 2.8))
axes.boxplot([s.norm(dim=-1).tolist() for s in stream], showfliers=False)
axes.set_xticks(range(1, 6), ["input", *(f"block {i}" for i in range(1, 5))])
axes.set(ylabel="length of the stream", ylim=(0, None))
course.show(figure, "03-stream")
lengths = [s.norm(dim=-1).mean().item() for s in stream]
print("mean length:", [round(length, 1) for length in lengths])
assert abs(lengths[0] - 0.6) < 0.1 and abs(lengths[1] - 11.7) < 0.3 and abs(lengths[4] - 27) < 1

# %% [markdown]
# The first block turns vectors of length 0.6 into ones of length 11.7: beside what it adds, the
# input itself is tiny. Section 5 shows what that means.
#
# ## 2. Queries, keys, values, and positions
#
# In a block each position makes, out of its normed vector, $A$ *queries* (what am I looking for?)
# and $K$ *keys* (what do I have?) and *values* (what do I give?). With $K < A$ several query heads
# share a key head (*grouped-query attention*): there is less to keep when text is generated. Qwen3
# norms each query and key by itself, so that a score is never large only because a vector is long.


# %%
def queries_and_keys(x, block):
    z, attention = rms(x, block.input_layernorm.weight), block.self_attn
    q = (z @ attention.q_proj.weight.T).view(-1, A, C)  # (T, A, C)
    k = (z @ attention.k_proj.weight.T).view(-1, K, C)  # (T, K, C)
    v = (z @ attention.v_proj.weight.T).view(-1, K, C)  # (T, K, C)
    return rms(q, attention.q_norm.weight), rms(k, attention.k_norm.weight), v


q, k, v = queries_and_keys(stream[1], block)
print("shapes:", tuple(q.shape), tuple(k.shape), tuple(v.shape))

# %% [markdown]
# A dot product of query and key says nothing about *where* they stand. **RoPE** puts that in: it
# takes the $C$ numbers as $C/2$ points of a plane (number $i$ and number $i + C/2$ are a pair) and
# turns pair $i$ at position $m$ by the angle $m\,\theta^{-2i/C}$, with $\theta = 10^6$: the first
# pairs fast, the last hardly at all. Turning by $m$ and by $n$ leaves a dot product that depends on
# $m - n$ only. By hand a pair is a complex number, and turning is a multiplication:

# %%
speed = 1e6 ** -(torch.arange(0, C, 2) / C)  # (C/2,) radians for each position


def turn(x, positions):
    pair = torch.complex(*x.chunk(2, dim=-1))  # (T, heads, C/2)
    angle = positions[:, None, None] * speed  # (T, 1, C/2)
    pair = pair * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((pair.real, pair.imag), dim=-1)  # (T, heads, C)


here = torch.arange(T)
angle = torch.outer(here, speed).repeat(1, 2)  # (T, C)
library = mhf.rotate(q.transpose(0, 1), angle.cos(), angle.sin()).transpose(0, 1)  # (T, A, C)
assert torch.allclose(turn(q, here), library, atol=1e-4)

# %% [markdown]
# Now the claim: shift query and key together, and the dot product stays. The picture shows both.
# Left: three pairs at positions 0 to 9 (darker is later). Right: the dot product of two equal
# vectors (all ones) as their distance grows, with the positions counted from 0 and from 100.

# %%
one, far = torch.ones(1, 1, C), torch.arange(100)
products = []
for first in 0, 100:  # the query's position; the keys follow it
    query = turn(one, torch.tensor([first]))  # (1, 1, C)
    products.append((query * turn(one.expand(100, 1, C), first + far)).sum(-1))  # (100, 1)
assert torch.allclose(*products, atol=1e-3)  # the relative position is all that counts

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), width_ratios=(1, 1.6))
for pair, size, colour in zip((0, 4, 12), (1.0, 0.7, 0.4), course.COLOURS):
    angle, shade = torch.arange(10) * speed[pair], torch.linspace(0.2, 1, 10)
    left.scatter(size * angle.cos(), size * angle.sin(), alpha=shade, color=colour)
    left.text(1.3, 1.1 - size, f"pair {pair + 1}", color=colour)
left.set(aspect="equal", xlim=(-1.2, 2.4), ylim=(-1.2, 1.2), xlabel="number i", ylabel="i + C/2")
right.plot(far, products[0], label="from position 0")
right.plot(far, products[1], "--", label="from position 100")
right.set(xlabel="distance (positions)", ylabel="dot product", ylim=(0, None))
right.legend()
course.show(figure, "03-rope")

turning = int((speed * (T - 1) > 1).sum())
print(f"{turning} of {C // 2} pairs turn by more than one radian within the {T} positions")
assert turning == 13

# %% [markdown]
# Only 13 of the 32 pairs turn noticeably in a window of this size; the other numbers of a head
# carry content at any distance. (The $\theta$ of the paper is meant for longer contexts.)
#
# ## 3. Attention, feed-forward, and the whole block
#
# Position $t$ weighs all positions $s \le t$ by a softmax of their scores and takes the weighted
# sum of their values; later ones are masked, because they are what is to be predicted:
#
# $$a_{ts} = \mathrm{softmax}_{s \le t}\left(\frac{q_t \cdot k_s}{\sqrt{C}}\right),
# \qquad y_t = \sum_{s \le t} a_{ts}\, v_s$$
#
# Then each position, for itself, goes through the feed-forward layer, SwiGLU:
# $W_{\text{down}} (\mathrm{SiLU}(W_{\text{gate}}\, z) \odot W_{\text{up}}\, z)$.
# Both results are *added* to the stream (the residual connection).


# %%
def attention_weights(q, k):
    k = k.repeat_interleave(A // K, dim=1)  # (T, A, C): each key head serves A / K query heads
    at = here[: len(q)]
    scores = torch.einsum("tac,sac->ats", turn(q, at), turn(k, at)) / C**0.5  # (A, T, T)
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)  # (T, T)
    return scores.masked_fill(later, -torch.inf).softmax(-1)  # (A, T, T)


def block_by_hand(x, block):
    q, k, v = queries_and_keys(x, block)
    v = v.repeat_interleave(A // K, dim=1)  # (T, A, C)
    y = torch.einsum("ats,sac->tac", attention_weights(q, k), v)  # (T, A, C)
    x = x + y.flatten(1) @ block.self_attn.o_proj.weight.T  # (T, D)
    z, mlp = rms(x, block.post_attention_layernorm.weight), block.mlp
    wide = F.silu(z @ mlp.gate_proj.weight.T) * (z @ mlp.up_proj.weight.T)  # (T, 384)
    return x + wide @ mlp.down_proj.weight.T  # (T, D)


for i, layer in enumerate(backbone.layers):
    mine = block_by_hand(stream[i], layer)
    print(f"block {i + 1}: largest difference {(mine - stream[i + 1]).abs().max():.1e}")
    assert torch.allclose(mine, stream[i + 1], rtol=1e-5, atol=1e-4)
assert torch.allclose(rms(stream[4], backbone.norm.weight), states[0], atol=1e-4)

# %% [markdown]
# That is all of the backbone: four blocks and a final norm, in some twenty lines.
#
# ## 4. What the trained heads look at
#
# *Before you run it:* a line of Romeo and Juliet, which the model was not trained on. Which earlier
# tokens will " night" look at, the second time? Each picture is a head; a row is a position that
# looks, a column a token that is looked at.

# %%
line = "Good night, good night! as sweet repose and rest"
assert line in tokenizer.decode(held_out[:])
words = tokenizer.encode(line)
inside = [model.embed(torch.tensor([words]))[0]]
inside += [y[0] for y in model(torch.tensor([words]), return_layers=True)[1]]  # 5 × (T, D)
names = [tokenizer.decode([w]) for w in words]

figure, axes = plt.subplots(2, 4, figsize=(11, 6), sharex=True, sharey=True)
for i, layer in enumerate(backbone.layers):
    maps = attention_weights(*queries_and_keys(inside[i], layer)[:2])  # (A, T, T)
    for head in range(A):
        picture = axes[head, i].imshow(maps[head], vmin=0, vmax=1)
        axes[head, i].set_title(f"block {i + 1}, head {head + 1}", fontsize=10)
for panel in axes[1]:
    panel.set_xticks(range(len(names)), names, rotation=90)
for panel in axes[:, 0]:
    panel.set_yticks(range(len(names)), names)
figure.colorbar(picture, ax=axes, label="attention weight", shrink=0.6)
course.show(figure, "03-attention")

# %% [markdown]
# One line is an anecdote. So we average over the later half of a long window: how much weight goes
# to the position itself, to the one before, to the first one, and what is the mean distance?

# %%
later, found = slice(T // 2, T), []
for i, layer in enumerate(backbone.layers):
    for head, a in enumerate(attention_weights(*queries_and_keys(stream[i], layer)[:2])):  # (T, T)
        itself, before = a.diagonal()[later].mean().item(), a.diagonal(-1)[T // 2 :].mean().item()
        first = a[later, 0].mean().item()
        far = (a * (here[:, None] - here)).sum(-1)[later].mean().item()
        found.append((before, far, first))
        told = f"itself {itself:.2f}, before {before:.2f}, first {first:.3f}, distance {far:3.0f}"
        print(f"block {i + 1}, head {head + 1}: {told}")
assert all(far > 70 and before < 0.03 for before, far, _ in found[:2])  # block 1
assert abs(found[3][0] - 0.39) < 0.02 and abs(found[7][0] - 0.38) < 0.02  # blocks 2, 4, head 2
assert all(first < 0.02 for _, _, first in found)

# %% [markdown]
# Block 1 hardly chooses at all: it spreads its weight over the whole context. Later blocks look
# at the near past, and head 2 of blocks 2 and 4 mostly at the token before (0.39 and 0.38). What
# looked like a rule in the picture, head 2 of block 3 and the first token, is none: in a long text
# that token gets next to nothing.
#
# ## 5. What is lost without a part
#
# *Before you run it:* we take parts out of the trained model, one at a time, and measure on
# held-out text. Which will hurt most: an attention, a feed-forward layer, RoPE, the query's norm?

# %%
sample = list(zip(*windows(held_out, np.linspace(0, len(held_out) - 1 - T, 16).astype(int), T)))


def held_out_loss():
    """Mean −log P of the next token, in nats, over 16 windows."""
    rows = [model.log_probs(x[None])[0].gather(1, y[:, None]) for x, y in sample]
    return -torch.cat(rows).mean().item()


def without(parts, does):
    """The loss when the parts' forward is `does`."""
    for part in parts:
        part.forward = does
    loss = held_out_loss()
    for part in parts:
        del part.forward  # the class's own again
    return loss


complete, loss = held_out_loss(), {}
for i, layer in enumerate(backbone.layers, 1):
    loss[f"attention {i}"] = without([layer.self_attn], lambda x, *_: torch.zeros_like(x))
    loss[f"feed-forward {i}"] = without([layer.mlp], torch.zeros_like)
loss["norm of queries"] = without([b.self_attn.q_norm for b in backbone.layers], lambda x: x)
loss["norm of keys"] = without([b.self_attn.k_norm for b in backbone.layers], lambda x: x)
rotate, mhf.rotate = mhf.rotate, lambda x, cos, sin: x
loss["RoPE"] = held_out_loss()
mhf.rotate = rotate
extra = {name: value - complete for name, value in loss.items()}

figure, axes = plt.subplots(figsize=(7, 3.6))
bars = axes.barh(list(extra), [*extra.values()], color=course.SKY)
axes.bar_label(bars, [f"{e:.2f}" for e in extra.values()], padding=3)
axes.set(xlabel="loss without the part, minus loss with it (nats a token)", xlim=(-0.5, 4))
axes.invert_yaxis()
course.show(figure, "03-without")
print(f"complete: {complete:.2f} nats")
assert abs(extra["attention 1"]) < 0.03 and 3 < extra["feed-forward 1"] < 4.2
assert 1 < extra["RoPE"] < 1.8
assert all(0.1 < e < 0.6 for name, e in extra.items() if name[-1] in "234")
assert extra["norm of queries"] < 0.1 and extra["norm of keys"] < 0.5

# %% [markdown]
# The extremes are both in block 1. Its attention could go: the loss does not rise. Its feed-forward
# layer turns an input vector, a mixture of four shared rows, into something that the other blocks
# can work with; without it the model is lost. All parts of blocks 2 to 4 count, each a few tenths.
# Without RoPE the model does not know the order of the words, and loses more than a nat. The
# norms of queries and keys matter less once the model is trained. (All this says what *this* model
# relies on. One that was trained without a part would make up for some of it.)
#
# ## 6. Reading a prediction off early
#
# Final norm and cascade turn *any* vector of the stream into a prediction, also one after block 2
# (the *logit lens*). Nobody trained them for that; it works as far as all blocks write in the same
# language. The picture shows, after each block, the likeliest next token and, as colour, the log
# probability of the true one.


# %%
def lens(stream):
    """Vectors (T, D) -> log P of every token (T, V), calibrated."""
    return (model.token_scores(backbone.norm(stream)) / config.calibration).log_softmax(-1)


rows = [lens(s)[:-1] for s in inside]  # 5 × (T - 1, V)
true = torch.stack([row[range(len(row)), words[1:]] for row in rows])  # (5, T - 1)
figure, axes = plt.subplots(figsize=(11, 3.4))
picture = axes.imshow(true, aspect="auto", vmin=-10, vmax=0)
for i, row in enumerate(rows):
    for t, best in enumerate(row.argmax(-1).tolist()):
        text, dark = tokenizer.decode([best]).replace("\n", "↵"), true[i, t] < -4
        axes.text(t, i, text, ha="center", va="center", color="white" if dark else "black")
axes.set_xticks(range(len(names) - 1), [f"{a}\n→{b}" for a, b in zip(names, names[1:])], fontsize=9)
stages = ["input", "block 1", "block 2", "block 3", "block 4"]
axes.set_yticks(range(5), stages)
axes.set_xlabel("token read → true next token")
figure.colorbar(picture, label="log P of the true token")
course.show(figure, "03-lens")

# %% [markdown]
# Again over 16 windows: the loss when the prediction is read after each block, and how often the
# likeliest "next" token is the one that was just read.


# %%
def read_off(ids, targets):
    """Loss, and share of positions whose likeliest token is the one just read: (5, 2)."""
    found = []
    for vectors in model.embed(ids[None]), *model(ids[None], return_layers=True)[1]:
        log_p = lens(vectors[0])  # (T, V)
        echo = (log_p.argmax(-1) == ids).float().mean()
        found.append((-log_p.gather(1, targets[:, None]).mean().item(), echo.item()))
    return found


early = np.mean([read_off(*window) for window in sample], axis=0)  # (5, 2)
for stage, (nats, echo) in zip(stages, early):
    print(f"after {stage}: {nats:5.2f} nats; {echo:.2f} of the likeliest are the token just read")
assert abs(early[0, 0] - 20) < 1.5 and early[0, 1] > 0.97 and early[1:, 1].max() < 0.02
assert (early[:-1, 0] > early[1:, 0] + 0.2).all() and abs(early[4, 0] - complete) < 1e-3
assert abs(early[1, 0] - 6.2) < 0.2

# %% [markdown]
# At the input, the lens nearly always names the token that was just read: the table is tied, so an
# input vector is most like its own rows. The first block, the one that made the stream twenty times
# longer, ends that at once and gives a first guess of 6.2 nats. Each further block makes the
# prediction better.
#
# ## 7. Nothing looks ahead, and nothing is computed twice
#
# Two consequences of the mask. First, changing a token changes no state before it. Second, when
# text is generated, keys and values of earlier positions stay what they are: they are kept in the
# *KV cache*, and each step runs only the new token through the blocks.

# %%
changed = ids.clone()
changed[100] = (changed[100] + 1) % 8192
difference = (model(changed[None]) - states)[0].abs().amax(-1)  # (T,)
before, after = difference[:100].max().item(), difference[100:].max().item()
print(f"largest change before position 100: {before:.1e}, from there on: {after:.1f}")
assert before < 1e-4 and difference[100] > 0.1

# %%
prompt = ids[:30].tolist()
cached = list(model.generate(prompt, 40, temperature=0))
plain = list(prompt)
for _ in range(40):  # read the whole context again for each token
    plain.append(int(model.token_scores(model(torch.tensor([plain]))[:, -1]).argmax()))
assert plain[30:] == cached
cache = mhf.KVCache()
model(ids[None], cache)
kept = sum(k.numel() + v.numel() for k, v in cache.pairs.values()) // T
print(f"kept for each position: {kept} numbers; with K = A heads it would be {kept * A // K}")
print(tokenizer.decode(cached))
assert kept == 2 * 4 * K * C == 512

# %% [markdown]
# With and without the cache the same 40 tokens come out. It keeps 512 numbers for each position
# (keys and values, four blocks, one head of 64); grouped queries have halved that.
#
# ## 8. Where are parameters and arithmetic?
#
# *Before you run it:* blocks, embedding, cascade: which part has most of the parameters? And which
# does most of the multiplications when one token is predicted?
#
# A matrix of $p$ numbers costs $2p$ operations for each position. Attention adds $4 A C$ for each
# position that is looked at, on average $T/2$ of them. The cascade uses each function's table for
# the logits ($E_j c$) and, except for the last function, again for the soft embedding.

# %%
H, B = config.num_hashes, config.num_buckets
parts = {"blocks": backbone.layers, "cascade": model.hash_head, "table": backbone.embed_tokens}
parts["embedding"] = backbone.combiner
size = {name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()}
matrices = {n: sum(p.numel() for p in m.parameters() if p.dim() == 2) for n, m in parts.items()}
attention = 4 * 4 * A * C * T // 2  # of four blocks
work = {
    "blocks": 2 * matrices["blocks"] + attention,
    "cascade": 2 * matrices["cascade"] + 2 * H * B * D + 2 * (H - 1) * B * D,
    "embedding": 2 * (H * (64 * D + 64) + D * D),  # the scorer looks at H rows
}
share = {name: part / sum(work.values()) for name, part in work.items()}
for name, part in work.items():
    print(f"{name}: {part:,} operations a token, {share[name]:.0%}")
print("parameters:", {name: f"{part:,}" for name, part in size.items()})

with FlopCounterMode(display=False) as counter:
    model.token_scores(model(ids[None]))
counts = {str(name): n for name, n in counter.get_flop_counts()["Global"].items()}
products = (counts["aten.mm"] + counts["aten.addmm"]) / T  # matrix products, without attention
assert products == sum(work.values()) - attention  # PyTorch counts as we do
assert abs(share["cascade"] - 0.66) < 0.01 and abs(size["table"] / sum(size.values()) - 0.54) < 0.01

# %%
colours = dict(zip(parts, course.COLOURS[1:]))
figure, axes = plt.subplots(figsize=(8, 2.2))
for row, amounts in enumerate((size, work)):
    edge = 0.0
    for name, amount in amounts.items():
        wide = amount / sum(amounts.values())
        axes.barh(row, wide, left=edge, color=colours[name], label=(name, None)[row])
        text = f"{wide:.0%}" if wide > 0.03 else ""
        axes.text(edge + wide / 2, row, text, ha="center", va="center")
        edge += wide
axes.set(xlabel="share", xlim=(0, 1), yticks=(0, 1), yticklabels=("parameters", "operations"))
figure.legend(loc="outside upper center", ncols=4)
course.show(figure, "03-shares")

# %% [markdown]
# The table has 0.54 of the parameters. But the cascade, which has hardly any of its own, does 0.66
# of the arithmetic: it goes through the table nearly twice for each token. The blocks do a third.
# In a large model this turns round: blocks grow with $D^2$ and with depth, the cascade with $D$
# (exercise 1).
#
# ## What we saw
#
# * A block is norm, attention, norm, feed-forward, with everything added to one stream; twenty
#   lines by hand agree with the library.
# * RoPE makes attention depend on relative position; without it the model loses more than a nat.
# * In this small model the first block does not choose what to look at: its feed-forward layer
#   translates the mixed rows. The later ones look at the near past and improve the prediction step
#   by step, as the logit lens shows.
# * Nothing looks ahead, so keys and values can be kept.
# * The cascade, not the blocks, does most of the arithmetic here.
#
# ## Exercises
#
# 1. *Calculate.* The same shares of arithmetic for the preset `1b` (20 blocks, $D = 2{,}048$,
#    $B = 16{,}384$, at $T = 2{,}048$). Which part dominates?
# 2. *Change.* Turn all positions further by the same amount: let a text of 100 tokens begin at
#    position 100 (with a `cache` of `length` 100 that holds nothing). What happens to the states?
# 3. *Find out.* Does the model use what lies far back? Mask everything more than $n$ positions ago
#    and measure the loss for $n = 1, 4, 16, 64$.
#
# Answers: `python tutorials/answers.py 03`. Next: [04 · The cascade](04_cascade.ipynb), how a state
# becomes a prediction of $H$ ids.
