"""Every number of `explain` against the library's own tensors, or by hand."""

import json
import math

import pytest
import torch
from conftest import Plain, build, close, one_sentence

IDS = [3, 9, 1, 12, 7]


@pytest.fixture
def mhf():
    """A calibrated model, two of whose ids have no token."""
    return build(calibration=1.7, unassigned=(4, 19))


def log_buckets(model, position=-1):
    """log p_j (H, B) at one position."""
    return model.head_logits(torch.tensor([IDS]))[0, position].log_softmax(-1)


@pytest.mark.parametrize("force", [None, {0: 2}, {1: 5, 2: 1}], ids=str)
@pytest.mark.parametrize("top_k", [1, 5, 20])
def test_is_json(mhf, force, top_k):
    """The dict is JSON without NaN or infinities, also where it lists more than real tokens."""
    told = mhf.explain(IDS, top_k=top_k, force=force)
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_standard_model_is_json():
    """The baseline's dict is JSON, too: input and top tokens, no functions."""
    told = build(standard=True).explain(IDS)
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert "functions" not in told and len(told["top_tokens"]) == 10


@pytest.mark.parametrize("ids", [IDS, torch.tensor(IDS), torch.tensor([IDS])], ids=type)
def test_takes_one_sequence(mhf, ids):
    """A list, a tensor (T,) and a tensor (1, T) say the same."""
    assert mhf.explain(ids) == mhf.explain(IDS)


def test_input_tokens(mhf):
    """Each input token has its id, bytes, text, signature and gate."""
    _, gate = mhf.embed(torch.tensor([IDS]), return_gate=True)
    for i, told in enumerate(mhf.explain(IDS)["tokens"]):
        raw = mhf.signatures.tokens[IDS[i]]
        assert (told["id"], bytes(told["bytes"])) == (IDS[i], raw)
        assert told["text"] == raw.decode("utf-8", "backslashreplace")
        assert told["signature"] == mhf.signatures.ids[IDS[i]].tolist()
        close(told["gate"], gate[0, i])


@pytest.mark.parity
def test_gate_scores(mhf):
    """The gate is the softmax of the told scores."""
    for told in mhf.explain(IDS)["tokens"]:
        close(torch.tensor(told["gate_scores"]).softmax(0), told["gate"])


@pytest.mark.parametrize("position", [0, 2, -1, -5])
def test_top_buckets(mhf, position):
    """Of each function, the best buckets of head_logits at that position, best first."""
    told = mhf.explain(IDS, position, top_k=4)
    values, buckets = log_buckets(mhf, position).topk(4)
    assert told["position"] == position % 5
    for j, function in enumerate(told["functions"]):
        assert function["function"] == j
        assert [top["bucket"] for top in function["top"]] == buckets[j].tolist()
        close([top["log_prob"] for top in function["top"]], values[j])
        close([top["prob"] for top in function["top"]], values[j].exp())


def test_tokens_of_a_bucket(mhf):
    """A bucket lists its real tokens, most probable first, and says how many it has."""
    scores = mhf.scores(torch.tensor([IDS]))[0, -1]
    for j, function in enumerate(mhf.explain(IDS, top_k=6)["functions"]):
        for top in function["top"]:
            members = (mhf.signatures.ids[:, j] == top["bucket"]) & scores.isfinite()
            best = sorted(members.nonzero().flatten().tolist(), key=lambda i: -scores[i])
            assert [token["id"] for token in top["tokens"]] == best[:6]
            assert top["num_tokens"] == len(best)
            close(top["mass"], scores.softmax(-1)[members].sum())


def test_entropy(mhf):
    """entropy_bits is −Σ p log2 p over the buckets of each function."""
    p = log_buckets(mhf).exp().tolist()
    by_hand = [-sum(x * math.log2(x) for x in row) for row in p]
    close([function["entropy_bits"] for function in mhf.explain(IDS)["functions"]], by_hand)


def test_top_tokens(mhf):
    """The best tokens of top_tokens, with P as the paper has it and calibrated, and joint P."""
    ids = torch.tensor([IDS])
    told = mhf.explain(IDS, top_k=5)
    values, best = (x[0, -1] for x in mhf.top_tokens(ids, 5))
    scores = mhf.scores(ids)[0, -1]  # (V,)
    tokens = {name: [token[name] for token in told["top_tokens"]] for name in told["top_tokens"][0]}
    assert tokens["id"] == best.tolist() and told["calibration"] == 1.7
    close(tokens["log_prob"], values)
    close(tokens["score"], scores[best])
    close(tokens["log_prob_paper"], scores.log_softmax(0)[best])
    close(tokens["joint_prob"], scores[best].exp())
    of_function = log_buckets(mhf).gather(1, mhf.signatures.ids[best].T).T  # (5, H)
    close(tokens["log_p"], of_function)


def test_top_tokens_of_the_standard_model():
    """The baseline's are those of its top_tokens."""
    model = build(standard=True, calibration=1.7)
    values, best = (x[0, -1] for x in model.top_tokens(torch.tensor([IDS]), 5))
    told = model.explain(IDS, top_k=5)["top_tokens"]
    assert [token["id"] for token in told] == best.tolist()
    close([token["log_prob"] for token in told], values)


def test_valid_mass(mhf):
    """valid_mass is the model's own at that position."""
    close(mhf.explain(IDS, 2)["valid_mass"], mhf.valid_mass(torch.tensor([IDS]))[0, 2])


def compatible_by_hand(model, told):
    """How many tokens, and what mass, match the chosen bucket of every function so far."""
    chosen, found = [], []
    probs = {t["id"]: math.exp(t["log_prob_paper"]) for t in told["top_tokens"]}
    for function in told["functions"]:
        forced = function["forced"]
        chosen.append(function["top"][0]["bucket"] if forced is None else forced)
        matching = [i for i in probs if model.signatures.ids[i, : len(chosen)].tolist() == chosen]
        found.append((len(matching), sum(probs[i] for i in matching)))
    return found


@pytest.mark.parametrize("force", [None, {0: 2}, {0: 3, 1: 5}, {2: 1}, {0: 0, 1: 0, 2: 0}], ids=str)
def test_compatible_tokens(force):
    """Brute force counts as many real tokens, and as much of their mass, after each function."""
    model = build(V=60, B=8, unassigned=(4, 19))
    told = model.explain(IDS, top_k=58, force=force)
    counts, masses = zip(*compatible_by_hand(model, told), strict=True)
    assert [function["compatible"] for function in told["functions"]] == list(counts)
    close([function["compatible_mass"] for function in told["functions"]], masses)
    assert list(counts) == sorted(counts, reverse=True) and counts[0] > 0


@pytest.mark.parity
@pytest.mark.parametrize("force", [{}, {0: 2}, {1: 4}, {0: 0, 1: 1, 2: 5}], ids=str)
def test_force_replaces_the_soft_embedding(mhf, force):
    """Later functions follow the forced bucket's row, as section 4 recomputed by hand has it."""
    state = mhf(torch.tensor([IDS]))[0, -1].detach().double()
    log_p = Plain(mhf).cascade(state, force).log_softmax(-1)  # (H, B)
    told = mhf.explain(IDS, top_k=6, force=force)
    for j, function in enumerate(told["functions"]):
        buckets = [top["bucket"] for top in function["top"]]
        close([top["log_prob"] for top in function["top"]], log_p[j, buckets])
        assert function["forced"] == force.get(j)
    assert told["forced"] == {str(j): bucket for j, bucket in force.items()}


@pytest.mark.parity
def test_soft_embedding_norms(mhf):
    """The norm of softmax(o_j)ᵀ E_j, or of the forced row; the last function has none."""
    table, p = Plain(mhf).E, log_buckets(mhf).exp().double()
    first, second, last = mhf.explain(IDS)["functions"]
    close(first["soft_embedding_norm"], (p[0] @ table[0]).norm())
    close(second["soft_embedding_norm"], (p[1] @ table[1]).norm())
    assert last["soft_embedding_norm"] is None
    forced = mhf.explain(IDS, force={0: 2})["functions"][0]
    close(forced["soft_embedding_norm"], table[0, 2].norm())


def test_forced_scores_follow_the_forced_buckets(mhf):
    """With a force, a token's score is still the sum of its functions' log probabilities."""
    for token in mhf.explain(IDS, force={0: 2})["top_tokens"]:
        close(sum(token["log_p"]), token["score"])


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ({"position": 5}, [5]),
        ({"position": -6}, [-6, 5]),
        ({"top_k": 0}, ["top_k", 0]),
        ({"top_k": 21}, ["top_k", 21, 20]),
        ({"force": {3: 1}}, [3]),
        ({"force": {0: 6}}, [6]),
        ({"force": {-1: 1}}, [-1]),
        ({"ids": [3, 20]}, [20]),
        ({"ids": []}, []),
        ({"ids": [[3, 1], [2, 5]]}, [2]),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(mhf, arguments, values):
    """What cannot be explained is a ValueError with the value."""
    with pytest.raises(ValueError) as error:
        mhf.explain(**({"ids": IDS} | arguments))
    one_sentence(error, *values)


def test_standard_model_has_nothing_to_force():
    """A force on the baseline, which has no functions, is a ValueError."""
    with pytest.raises(ValueError) as error:
        build(standard=True).explain(IDS, force={0: 1})
    one_sentence(error, "force")
