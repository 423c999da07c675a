"""Generation against recomputation without a cache, and sampling against exact distributions."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import PAD, build, close, refused

from mhf import KVCache, sampling_probs

PROMPTS = [[3, 9, 1], [5], [12, 0, 7, 7, 18, 2, 11]]
BATCH = [[3, 9, 1], [4, 4, 17], [12, 0, 7]]


def next_probs(model, prompt):
    """P of the next token (V,), calibrated."""
    with torch.no_grad():
        return model.log_probs(torch.tensor([prompt]))[0, -1].exp()


def read(model, prompt, new):
    """P before each of `new` (None: the best one), without a cache: a full context is halved."""
    window, context = model.config.max_position_embeddings, list(prompt)
    for token in new:
        context = context[-max(1, window // 2) :] if len(context) > window else context
        probs = next_probs(model, context)
        yield probs
        context.append(probs.argmax().item() if token is None else token)


def greedy(model, prompt, steps):
    return [probs.argmax().item() for probs in read(model, prompt, [None] * steps)]


def columns(steps):
    """The ids of each row, from the (N,) tensors of all steps."""
    return torch.stack(list(steps), dim=-1).tolist()


def assert_drawn_from(model, prompt, probs, **sampling):
    """10,000 draws of 20 tokens miss `probs` by about 0.03 in sum: 0.07 is allowed, 0 is exact."""
    ids = torch.tensor([prompt]).expand(10000, -1)
    (new,) = model.generate(ids, 1, seed=0, **sampling)
    shares = torch.bincount(new, minlength=len(probs)) / 10000
    assert not shares[probs == 0].any()
    assert (shares - probs).abs().sum() < 0.07


@pytest.mark.parametrize("window", [1, 2, 7, 8, 32])
@pytest.mark.parametrize("standard", [False, True], ids=["mhf", "standard"])
def test_greedy_equals_recomputation(window, standard):
    """The argmax over the growing context, or its newest half; a batch's rows are rows alone."""
    model = build(standard=standard, max_position_embeddings=window)
    for prompt in PROMPTS:
        assert list(model.generate(prompt, 20, temperature=0)) == greedy(model, prompt, 20)
    expected = [greedy(model, row, 20) for row in BATCH]
    assert columns(model.generate(BATCH, 20, temperature=0)) == expected


def test_only_new_tokens_are_encoded():
    """One position a step, the newest half when the context is full; with the uncached states."""
    model, states = build(max_position_embeddings=6), []
    model.model.norm.register_forward_hook(lambda *args: states.append(args[-1][0]))
    new = list(model.generate([3, 9, 1, 4], 8, temperature=0))
    assert [len(state) for state in states] == [4, 1, 1, 3, 1, 1, 1, 3]
    with torch.no_grad():
        whole = model(torch.tensor([[3, 9, 1, 4, *new[:2]]]))[0]  # (6, D)
    close(torch.cat(states[:3]), whole)


@pytest.mark.parametrize("cuts", [(3,), (1, 2, 5), (6,)], ids=str)
def test_several_tokens_behind_a_filled_cache(model, ids, cuts):
    """Pieces, read one after the other, have the states of the whole; too many are refused."""
    cache = KVCache()
    pieces = [model(piece, cache) for piece in torch.tensor_split(ids, cuts, dim=1)]
    close(torch.cat(pieces, dim=1), model(ids))
    refused(lambda: model(ids.repeat(1, 4), cache), 35, 32)


def test_of_equal_tokens_the_lowest_id_is_first():
    """Tokens that share a bucket have the same probability: greedy and cuts take the lowest."""
    model = build(H=1, B=4, V=40, pad_id=None)  # 40 tokens in three buckets
    for prompt in PROMPTS:
        probs = next_probs(model, prompt)
        best = (probs == probs.max()).nonzero()[:, 0].tolist()
        assert len(best) > 2
        assert next(model.generate(prompt, 1, temperature=0)) == best[0]
        assert_drawn_from(model, prompt, F.one_hot(torch.tensor(best[:2]), 40).sum(0) / 2, top_k=2)
    for cut, count in (("top_k", 3), 3), (("top_p", 0.0025), 3), (("temperature", 0), 1):
        kept = sampling_probs(torch.zeros(2, 1000), **dict([cut])) > 0
        assert kept.nonzero()[:, 1].tolist() == 2 * list(range(count))


SAMPLINGS = [
    {}, {"temperature": 0.3}, {"temperature": 5.0}, {"top_k": 1}, {"top_k": 4}, {"top_k": 99},
    {"top_p": 1e-6}, {"top_p": 0.7}, {"top_p": 1.0}, {"top_k": 3, "top_p": 0.9},
    {"temperature": 2.0, "top_k": 7, "top_p": 0.8}, {"temperature": 0.0, "top_k": 3, "top_p": 0.5},
]  # fmt: skip


def probs_by_hand(logits, temperature=1.0, top_k=None, top_p=None):
    """P of every token (V,), with a loop for each cut, in float64."""
    logits = logits.double()
    if temperature == 0:
        return F.one_hot(logits.argmax(), len(logits)).double()
    p = (logits / temperature).softmax(0)
    best = p.argsort(descending=True, stable=True).tolist()[:top_k]
    mass, kept = 0.0, torch.zeros_like(p)
    for i in best:
        if top_p is None or mass < top_p * p[best].sum():
            kept[i] = p[i]
            mass += p[i]
    return kept / kept.sum()


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_sampling_probs(sampling):
    """Rows are those of the loop; unused ids have none; extreme temperatures give no NaN."""
    logits = 3 * torch.randn(5, 30, generator=torch.Generator().manual_seed(2))
    logits[:, [4, 11]] = -torch.inf
    expected = [probs_by_hand(row, **sampling) for row in logits]
    close(sampling_probs(logits.clone(), **sampling), torch.stack(expected), atol=1e-6)
    logits, best = torch.tensor([[30.0, -30.0, 20.0, -torch.inf]]), [[1.0, 0.0, 0.0, 0.0]]
    assert all(sampling_probs(logits, t).tolist() == best for t in (1e-3, 1e-38, 1e-45))
    assert sampling_probs(logits, 1e30)[0, -1] == 0.0


@pytest.mark.parametrize("sampling", SAMPLINGS[1::3], ids=str)
def test_generate_draws_by_sampling_probs(model, sampling):
    """The shares of 10,000 draws are those of the calibrated log P."""
    model.config.calibration = 1.7
    expected = probs_by_hand(next_probs(model, PROMPTS[2]).log(), **sampling).float()
    assert_drawn_from(model, PROMPTS[2], expected, **sampling)


def test_a_seed_repeats_the_text(model):
    """Same seed, same ids; neither a seed nor greedy touches PyTorch's own state, sampling does."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    texts = [list(model.generate([3], 20, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    list(model.generate([3], 5, temperature=0))
    assert torch.equal(torch.get_rng_state(), before)
    text = list(model.generate([3], 20))
    torch.manual_seed(5)
    assert text == list(model.generate([3], 20)) != list(model.generate([3], 20))


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, np.array])
def test_what_is_yielded(model, kind):
    """One prompt of any kind yields ints, to a stop id; a batch a LongTensor (N,) a step."""
    new = list(model.generate(kind([3, 9, 1]), np.int64(6), temperature=0))
    assert new == greedy(model, [3, 9, 1], 6) and {type(i) for i in new} == {int}
    steps = list(model.generate(kind([[3, 9, 1]]), 6, temperature=0))
    assert all(step.dtype == torch.long and step.shape == (1,) for step in steps)
    assert columns(steps) == [new]
    end = new.index(new[3])
    assert list(model.generate([3, 9, 1], 6, temperature=0, stop={new[3]})) == new[: end + 1]


def test_finished_rows_yield_the_pad(model):
    """A row that met a stop id goes on with the pad, with log P 0; the last to end ends all."""
    rows = columns(model.generate(BATCH, 12, temperature=3.0, seed=0))

    def ends_of(stop):
        return [min((row.index(i) for i in stop if i in row), default=11) for row in rows]

    stop = max(  # all rows end early, each at another step, if there are such ids
        itertools.combinations(range(20), 3),
        key=lambda stop: (max(ends_of(stop)) < 11, len(set(ends_of(stop)))),
    )
    ends = ends_of(stop)
    assert len(set(ends)) > 1
    new, log_p = (columns(part) for part in zip(*model.generate(
        BATCH, 12, temperature=3.0, seed=0, stop=stop, return_log_probs=True)))  # fmt: skip
    for row, end, ids, found in zip(rows, ends, new, log_p):
        rest = max(ends) - end
        assert ids == row[: end + 1] + [PAD] * rest
        assert found[end + 1 :] == [0] * rest and max(found[: end + 1]) < 0


@pytest.mark.parametrize("sampling", SAMPLINGS[2::3], ids=str)
def test_log_probs_are_the_models(sampling):
    """Pairs (token, log P): calibrated, whatever temperature and cuts did, past the limit, too."""
    model, how = build(calibration=1.7, max_position_embeddings=8), dict(seed=3, **sampling)
    new, log_p = zip(*model.generate(PROMPTS[0], 12, return_log_probs=True, **how))
    assert {type(x) for x in (*new, *log_p)} == {int, float}
    assert list(new) == list(model.generate(PROMPTS[0], 12, **how))
    close(log_p, [p[i].log() for p, i in zip(read(model, PROMPTS[0], new), new)])
    new, log_p = (columns(x) for x in zip(*model.generate(BATCH, 12, return_log_probs=True, **how)))
    for prompt, tokens, found in zip(BATCH, new, log_p):
        close(found, [p[i].log() for p, i in zip(read(model, prompt, tokens), tokens)])


def test_generation_leaves_gradients_on(model):
    """Between two ids the caller's gradient mode is its own; the ids can be trained on."""
    steps = []
    for new, log_p in model.generate([[3, 9], [1, 4]], 5, temperature=0, return_log_probs=True):
        assert torch.is_grad_enabled() and not (log_p.is_inference() or log_p.requires_grad)
        steps.append(new)
    assert all(p.grad is None for p in model.parameters())
    ids = torch.stack(steps, dim=1)  # (2, 5)
    model.loss(ids, ids).backward()
    assert model.model.embed_tokens.weight.grad.abs().sum() > 0


REFUSED = {
    "ids": [[], [[], []], torch.zeros(0, 3).long(), [[3], [3, 4]], [3, 20], [[-1]], [-100]],
    "temperature": [None, -1, math.nan, math.inf],
    "top_k": [0],
    "top_p": [0, 2, math.nan],
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("name", "value"), [(k, v) for k, vs in REFUSED.items() for v in vs])
def test_bad_arguments_are_refused(model, name, value, temperature):
    """ValueError in one sentence with the value, before the first token."""
    arguments = {"ids": [3], "temperature": temperature} | {name: value}
    parts = [] if name == "ids" else [name, value]
    refused(lambda: next(model.generate(**arguments)), *parts)
