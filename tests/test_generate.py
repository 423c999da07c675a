"""Generation against recomputation without a cache, and sampling against exact distributions."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import PAD, build, close, one_sentence

from mhf import sampling_weights

PROMPTS = [[3, 9, 1], [5], [12, 0, 7, 7, 18, 2, 11]]


def greedy(model, prompt, steps):
    """The rule without a cache: encode the context at each step; when it is full, its half."""
    window, context, new = model.config.max_position_embeddings, list(prompt), []
    with torch.no_grad():
        for _ in range(steps):
            if len(context) > window:
                context = context[-max(1, window // 2) :]
            new.append(model.log_probs(torch.tensor([context]))[0, -1].argmax().item())
            context.append(new[-1])
    return new


def columns(steps):
    """The ids of each row, from the (N,) tensors of all steps."""
    return torch.stack(list(steps), dim=-1).tolist()


def next_probs(model, prompt):
    """P of the next token (V,), calibrated."""
    with torch.no_grad():
        return model.log_probs(torch.tensor([prompt]))[0, -1].exp()


def drawn(model, prompt, draws=10000, **sampling):
    """How often each token came (V,), a share of `draws` samples of the next token."""
    ids = torch.tensor([prompt]).expand(draws, -1)
    (new,) = model.generate(ids, 1, seed=0, **sampling)
    return torch.bincount(new, minlength=model.config.vocab_size) / draws


def assert_drawn_from(shares, probs):
    """10,000 draws of 20 tokens miss their probabilities by about 0.03 in sum; 0.07 is allowed.

    No token with probability 0 comes at all.
    """
    assert not shares[probs == 0].any()
    assert (shares - probs).abs().sum() < 0.07


# ---------------------------------------------------------------------------------------------
# Greedy
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_greedy_equals_recomputation(model, prompt):
    """One prompt continues with the argmax of log_probs over the growing context."""
    assert list(model.generate(prompt, 12, temperature=0)) == greedy(model, prompt, 12)


def test_greedy_batch_equals_recomputation(model):
    """So does every row of an (N, T) batch."""
    ids = torch.tensor([[3, 9, 1], [4, 4, 17]])
    expected = [greedy(model, row, 12) for row in ids.tolist()]
    assert columns(model.generate(ids, 12, temperature=0)) == expected


def test_greedy_rows_of_unequal_length_equal_recomputation(model):
    """So does every row of a list of prompts, whatever the lengths of the others."""
    expected = [greedy(model, row, 12) for row in PROMPTS]
    assert columns(model.generate(PROMPTS, 12, temperature=0)) == expected


@pytest.mark.parametrize("window", [1, 2, 7, 8])
@pytest.mark.parametrize("standard", [False, True], ids=["mhf", "standard"])
def test_a_full_context_goes_on_with_its_newest_half(standard, window):
    """A row longer than the limit is cut to its newest window // 2 ids; so is a long prompt."""
    model = build(standard=standard, max_position_embeddings=window)
    expected = [greedy(model, row, 30) for row in PROMPTS]
    assert columns(model.generate(PROMPTS, 30, temperature=0)) == expected


def test_a_row_does_not_depend_on_the_batch():
    """A row generated with others is the row generated alone, past the context limit, too."""
    model = build(max_position_embeddings=8)
    alone = [list(model.generate(row, 25, temperature=0)) for row in PROMPTS]
    assert columns(model.generate(PROMPTS, 25, temperature=0)) == alone


def encoded(model, prompt, steps):
    """The final-norm states that generation computes, one tensor for each step."""
    states = []
    hook = model.model.norm.register_forward_hook(lambda *args: states.append(args[-1]))
    new = list(model.generate(prompt, steps, temperature=0))
    hook.remove()
    return states, new


def test_cached_states_equal_uncached(model):
    """With a cache the states behind each id are those of the whole context, within 1e-5."""
    prompt = PROMPTS[0]
    states, new = encoded(model, prompt, 12)
    whole = model(torch.tensor([prompt + new[:-1]]))[0]  # (14, D)
    for i, state in enumerate(states):
        close(state[0, -1], whole[len(prompt) - 1 + i])


def test_only_new_tokens_are_encoded():
    """After the prompt one position a step, and the newest half when the context is full."""
    states, _ = encoded(build(max_position_embeddings=6), [3, 9, 1, 4], 8)
    assert [len(state[0]) for state in states] == [4, 1, 1, 3, 1, 1, 1, 3]


# ---------------------------------------------------------------------------------------------
# Sampling
# ---------------------------------------------------------------------------------------------


def test_samples_follow_log_probs(model):
    """At temperature 1 the shares of 10,000 draws are exp(log_probs)."""
    assert_drawn_from(drawn(model, PROMPTS[0]), next_probs(model, PROMPTS[0]))


def test_temperature_and_calibration_divide_the_scores():
    """With τ = 2 and temperature 0.4 the draws follow softmax(score / 0.8)."""
    with torch.no_grad():
        scores = build().scores(torch.tensor([PROMPTS[0]]))[0, -1]
    shares = drawn(build(calibration=2.0), PROMPTS[0], temperature=0.4)
    assert_drawn_from(shares, (scores / 0.8).softmax(-1))


@pytest.mark.parametrize("k", [1, 3, 20, 99])
def test_top_k_samples_the_k_best(model, k):
    """The k best tokens share all draws, in proportion; a k beyond the vocabulary keeps all."""
    probs = next_probs(model, PROMPTS[0])
    best = probs.topk(min(k, 20)).indices
    kept = torch.zeros(20).index_copy(0, best, probs[best])
    assert_drawn_from(drawn(model, PROMPTS[0], top_k=k), kept / kept.sum())


def test_ties_do_not_enlarge_top_k():
    """Where more than k tokens share the best bucket, still exactly k of them are drawn."""
    model = build(H=1, B=3)  # 20 tokens in three buckets
    probs = next_probs(model, PROMPTS[0])
    assert (probs == probs.max()).sum() > 2
    assert (drawn(model, PROMPTS[0], top_k=2) > 0).sum() == 2


def smallest_set(probs, p):
    """Probabilities of the fewest most probable tokens whose mass reaches p, renormalised (V,)."""
    kept, mass = torch.zeros_like(probs), 0.0
    for i in probs.argsort(descending=True).tolist():
        if mass < p:
            kept[i] = probs[i]
            mass += probs[i].item()
    return kept / kept.sum()


@pytest.mark.parametrize("p", [1e-6, 0.5, 0.8, 0.95, 1.0])
def test_top_p_samples_the_smallest_set(model, p):
    """The fewest tokens with mass p share all draws; a tiny p leaves the best one."""
    expected = smallest_set(next_probs(model, PROMPTS[2]), p)
    assert_drawn_from(drawn(model, PROMPTS[2], top_p=p), expected)


def test_top_p_acts_within_top_k(model):
    """With both, top_p counts mass among the k best, renormalised."""
    probs = next_probs(model, PROMPTS[2])
    best = probs.topk(4).indices
    kept = torch.zeros(20).index_copy(0, best, probs[best])
    expected = smallest_set(kept / kept.sum(), 0.9)
    assert_drawn_from(drawn(model, PROMPTS[2], top_k=4, top_p=0.9), expected)


def test_unassigned_ids_are_never_drawn():
    """Ids that no token uses do not come, however flat the distribution."""
    model = build(unassigned=(4, 7, 19))
    shares = drawn(model, PROMPTS[1], temperature=1e6)
    assert not shares[[4, 7, 19]].any() and (shares > 0).sum() == 17


def test_a_seed_repeats_the_text(model):
    """The same seed gives the same ids, another seed others."""
    first, again, other = (list(model.generate([3], 20, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_a_seed_leaves_the_global_generator_alone(model):
    """With a seed, PyTorch's own random state is not used; without one, it is."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    list(model.generate([3], 5, seed=1))
    assert torch.equal(torch.get_rng_state(), before)
    first = list(model.generate([3], 20))
    torch.manual_seed(5)
    assert list(model.generate([3], 20)) == first


# ---------------------------------------------------------------------------------------------
# What comes in and what goes out
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [[3, 9, 1], (3, 9, 1), torch.tensor([3, 9, 1]), np.array([3, 9, 1]), list(np.array([3, 9, 1]))],
    ids=["list", "tuple", "tensor", "array", "list of numpy ints"],
)
def test_one_prompt_yields_ints(model, prompt):
    """A 1-D prompt of any kind yields Python ints."""
    new = list(model.generate(prompt, 6, temperature=0))
    assert new == greedy(model, [3, 9, 1], 6) and {type(i) for i in new} == {int}


@pytest.mark.parametrize(
    "prompts",
    [[[3, 9, 1]], torch.tensor([[3, 9, 1]]), [torch.tensor([3, 9, 1])], np.array([[3, 9, 1]])],
    ids=["list", "tensor", "list of tensors", "array"],
)
def test_a_batch_yields_tensors(model, prompts):
    """A batch, of one row too, yields a LongTensor (N,) a step."""
    steps = list(model.generate(prompts, 6, temperature=0))
    assert all(new.dtype == torch.long and new.shape == (1,) for new in steps)
    assert columns(steps) == [greedy(model, [3, 9, 1], 6)]


def test_a_stop_id_is_yielded_and_ends_the_text(model):
    """Generation ends right behind the first stop id."""
    new = greedy(model, [3, 9, 1], 12)
    end = new.index(new[5])
    assert list(model.generate([3, 9, 1], 12, temperature=0, stop=[new[5]])) == new[: end + 1]


def test_finished_rows_yield_the_pad(model):
    """A row that met a stop id goes on with the pad id; the last row to end ends generation."""
    rows = [greedy(model, row, 12) for row in PROMPTS]

    def ends_of(stop):
        return [min((row.index(i) for i in stop if i in row), default=11) for row in rows]

    stop = max(  # all rows end early, each at another step, if there are such ids
        itertools.combinations(range(20), 3),
        key=lambda stop: (max(ends_of(stop)) < 11, len(set(ends_of(stop)))),
    )
    ends = ends_of(stop)
    expected = [
        [new if i <= end else PAD for i, new in enumerate(row[: max(ends) + 1])]
        for row, end in zip(rows, ends, strict=True)
    ]
    assert columns(model.generate(PROMPTS, 12, temperature=0, stop=stop)) == expected


def test_generation_leaves_gradients_on(model):
    """Between two ids the caller's gradient mode is its own; no parameter receives a gradient."""
    for _ in model.generate([3], 2):
        assert torch.is_grad_enabled()
    assert all(p.grad is None for p in model.parameters())


def test_generation_sees_an_expansion():
    """New tokens can stand in a prompt and be drawn."""
    model = build()
    model.expand([b"token 20", b"token 21"])
    ids = torch.tensor([[20, 21]]).expand(500, -1)
    (new,) = model.generate(ids, 1, temperature=1e6, seed=0)
    assert set(new.tolist()) == set(range(22))


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ({"ids": []}, []),
        ({"ids": [[3], []]}, []),
        ({"ids": torch.zeros(0, 3, dtype=torch.long)}, []),
        ({"ids": [3, 20]}, [20]),
        ({"ids": [[3], [-1]]}, [-1]),
        ({"temperature": -0.5}, ["temperature", -0.5]),
        ({"temperature": float("nan")}, ["temperature", "nan"]),
        ({"temperature": float("inf")}, ["temperature", "inf"]),
        ({"top_k": 0}, ["top_k", 0]),
        ({"top_p": 0.0}, ["top_p", 0.0]),
        ({"top_p": 1.5}, ["top_p", 1.5]),
    ],
)
def test_bad_arguments_are_refused_at_the_call(model, arguments, values):
    """ValueError in one sentence with the value, before anything is asked of the iterator."""
    with pytest.raises(ValueError) as error:
        model.generate(**({"ids": [3]} | arguments))
    one_sentence(error, *values)


def test_generated_ids_can_be_trained_on(model):
    """The ids that a batch yields are ordinary tensors: a loss of them has gradients."""
    ids = torch.stack(list(model.generate([[3, 9], [1, 4]], 5, temperature=0)), dim=1)  # (2, 5)
    model.loss(ids, ids).backward()
    assert model.model.embed_tokens.weight.grad.abs().sum() > 0


# ---------------------------------------------------------------------------------------------
# What a token is drawn by: sampling_weights
# ---------------------------------------------------------------------------------------------

SAMPLINGS = [
    {},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"top_k": 1},
    {"top_k": 4},
    {"top_k": 99},
    {"top_p": 1e-6},
    {"top_p": 0.7},
    {"top_p": 1.0},
    {"temperature": 2.0, "top_k": 7, "top_p": 0.8},
    {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.5},
]


def weights_by_hand(logits, temperature=1.0, top_k=None, top_p=None):
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


def spread(logits, **sampling):
    """sampling_weights as probabilities of all V tokens (N, V)."""
    weights, ids = sampling_weights(logits, **sampling)
    weights = weights / weights.sum(-1, keepdim=True)
    return weights if ids is None else torch.zeros_like(logits).scatter(-1, ids, weights)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_sampling_weights(sampling):
    """Every row's weights are those of the loop; unused ids, of −∞, have none."""
    logits = 3 * torch.randn(5, 30, generator=torch.Generator().manual_seed(2))
    logits[:, [4, 11]] = -torch.inf
    expected = [weights_by_hand(row, **sampling) for row in logits]
    close(spread(logits, **sampling), torch.stack(expected), atol=1e-6)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_sampling_weights_are_best_first(sampling):
    """Where they belong to some tokens only, the weights decrease and there are top_k of them."""
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(2))
    weights, ids = sampling_weights(logits, **sampling)
    if ids is None:
        assert weights.shape == (3, 30) and not sampling.keys() & {"top_k", "top_p"}
    else:
        size = 1 if sampling.get("temperature") == 0 else min(30, sampling.get("top_k", 30))
        assert weights.shape == ids.shape == (3, size)
        assert (weights.diff() <= 0).all() and (logits.gather(-1, ids).diff() <= 0).all()


def test_weights_do_not_overflow():
    """A temperature that leaves float32 no room gives the best token, not NaN."""
    logits = torch.tensor([[3e33, -3e33, 2e33, -torch.inf]])
    assert spread(logits, temperature=1e-6).tolist() == [[1.0, 0.0, 0.0, 0.0]]
    assert spread(logits, temperature=1e30)[0, -1] == 0.0


@pytest.mark.parametrize("sampling", [SAMPLINGS[i] for i in (1, 7, 9, 10)], ids=str)
def test_generate_draws_by_sampling_weights(model, sampling):
    """The shares of 10,000 draws are the weights of the model's log_probs."""
    with torch.no_grad():
        log_p = model.log_probs(torch.tensor([PROMPTS[2]]))[:, -1]
    assert_drawn_from(drawn(model, PROMPTS[2], **sampling), spread(log_p, **sampling)[0])


# ---------------------------------------------------------------------------------------------
# log P of what was drawn
# ---------------------------------------------------------------------------------------------


def log_probs_by_hand(model, prompt, new):
    """log P of each new token after its context, without a cache; a full context is halved."""
    window, context, found = model.config.max_position_embeddings, list(prompt), []
    for token in new:
        if len(context) > window:
            context = context[-max(1, window // 2) :]
        found.append(next_probs(model, context).log()[token].item())
        context.append(token)
    return found


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_log_probs_of_one_prompt(sampling):
    """One prompt yields (token, log P) as int and float: the calibrated log P of the model,
    whatever temperature and cuts did to the drawing."""
    model = build(calibration=1.7)
    pairs = list(model.generate(PROMPTS[0], 12, seed=0, return_log_probs=True, **sampling))
    assert {(type(token), type(log_p)) for token, log_p in pairs} == {(int, float)}
    new, log_p = zip(*pairs, strict=True)
    close(log_p, log_probs_by_hand(model, PROMPTS[0], new))


@pytest.mark.parametrize("prompts", [PROMPTS, [[3, 9, 1], [4, 4, 17]]], ids=["unequal", "equal"])
def test_log_probs_of_a_batch(model, prompts):
    """A batch yields (N,) tokens and (N,) log P, each row's as if it were alone."""
    steps = list(model.generate(prompts, 12, seed=0, top_k=5, return_log_probs=True))
    assert all(log_p.shape == (len(prompts),) for _, log_p in steps)
    new, log_p = (columns(part) for part in zip(*steps, strict=True))
    for prompt, tokens, found in zip(prompts, new, log_p, strict=True):
        close(found, log_probs_by_hand(model, prompt, tokens))


@pytest.mark.parametrize("window", [1, 7, 8])
def test_log_probs_when_the_context_is_full(window):
    """Behind a context that was halved, log P is that of the half."""
    model = build(max_position_embeddings=window)
    steps = list(model.generate(PROMPTS, 20, seed=0, return_log_probs=True))
    new, log_p = (columns(part) for part in zip(*steps, strict=True))
    for prompt, tokens, found in zip(PROMPTS, new, log_p, strict=True):
        close(found, log_probs_by_hand(model, prompt, tokens))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_log_probs_do_not_change_the_tokens(model, sampling):
    """With them and without, the same seed gives the same tokens, which stop at the same id."""
    how = dict(seed=3, stop=[7], **sampling)
    pairs = list(model.generate(PROMPTS, 15, return_log_probs=True, **how))
    assert columns(new for new, _ in pairs) == columns(model.generate(PROMPTS, 15, **how))
    pairs = list(model.generate(PROMPTS[0], 15, return_log_probs=True, **how))
    assert [new for new, _ in pairs] == list(model.generate(PROMPTS[0], 15, **how))


def test_log_probs_are_ordinary_tensors(model):
    """A batch's log P need no gradient, but may be used where gradients are."""
    (_, log_p), *_ = model.generate([[3, 9], [1, 4]], 2, seed=0, return_log_probs=True)
    assert not log_p.is_inference() and not log_p.requires_grad


def test_a_finished_row_has_log_p_0():
    """After its stop a row yields the pad, and 0: nothing is drawn for it any more."""
    model, prompts = build(), [[3, 9], [7, 1]]
    ends = [next(model.generate(prompt, 1, temperature=0)) for prompt in prompts]
    assert ends[0] != ends[1]
    (_, first), (pads, second) = model.generate(
        prompts, 2, temperature=0, stop=ends[0], return_log_probs=True
    )
    assert pads[0] == PAD and second[0] == 0 and second[1] < 0 and max(first) < 0


def test_greedy_draws_nothing(model):
    """Temperature 0 leaves PyTorch's own generator as it was."""
    before = torch.get_rng_state()
    list(model.generate([3, 9, 1], 4, temperature=0))
    assert torch.equal(torch.get_rng_state(), before)
