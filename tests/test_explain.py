"""Every number of `explain` against the library's own tensors, or by hand."""

import json
import math

import pytest
import torch
from conftest import PAD, Plain, build, close, one_sentence

from mhf import MultiHashFormer, SignatureTable

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


# ---------------------------------------------------------------------------------------------
# The signature of the token at the position
# ---------------------------------------------------------------------------------------------


def crowded(**fields):
    """A table so full that tokens were re-hashed, one of them off the signature of token 0."""
    return build(V=40, unassigned=(4, 19), **fields)


def shared_by_hand(model, token_id):
    """{id: ids in common} of all real tokens but the token itself."""
    ids, real = model.signatures.ids.tolist(), model.signatures.assigned.tolist()
    return {
        i: sum(a == b for a, b in zip(ids[i], ids[token_id], strict=True))
        for i in range(len(ids))
        if real[i] and i != token_id
    }


@pytest.mark.parametrize("token_id", [0, PAD, 4, 7, 39])
def test_signature_functions(token_id):
    """Of every id: its bucket, the real tokens in it, most probable first, their mass, the mean."""
    model = crowded()
    scores = model.scores(torch.tensor([[3, token_id]]))[0, -1]
    told = model.explain([3, token_id], top_k=4)["signature"]
    assert (told["id"], told["num_hashes"], told["num_buckets"]) == (token_id, 3, 6)
    for j, (function, bucket) in enumerate(
        zip(told["functions"], model.signatures.ids[token_id].tolist(), strict=True)
    ):
        members = [
            i
            for i in range(40)
            if model.signatures.assigned[i] and model.signatures.ids[i, j] == bucket
        ]
        assert (function["bucket"], function["num_tokens"]) == (bucket, len(members))
        best = sorted(members, key=lambda i: -scores[i])[:4]
        assert [token["id"] for token in function["tokens"]] == best
        assert function["expected"] == 37 / 5  # tokens per bucket, without the pad
        close(function["mass"], scores.softmax(-1)[members].sum())


@pytest.mark.parametrize("token_id", [0, PAD, 4, 7, 39])
def test_shared_ids(token_id):
    """How many real tokens have 0, …, H ids in common with the token, itself left out."""
    model = crowded()
    common = list(shared_by_hand(model, token_id).values())
    told = model.explain([3, token_id])["signature"]["shared"]
    assert told == [common.count(n) for n in range(4)]


@pytest.mark.parametrize("token_id", [0, PAD, 4, 7, 39])
@pytest.mark.parametrize("scale", [1, 30], ids=["flat", "peaked"])
def test_neighbours(token_id, scale):
    """The tokens with most ids in common, of as many the most probable first, also where
    probabilities are too small to be told apart beside a whole number in float32."""
    model = crowded()
    with torch.no_grad():
        model.model.norm.weight *= scale
    scores = model.scores(torch.tensor([[3, token_id]]))[0, -1]
    common = shared_by_hand(model, token_id)
    best = sorted((i for i in common if common[i]), key=lambda i: (-common[i], -scores[i]))
    told = model.explain([3, token_id], top_k=40)["signature"]["neighbours"]
    assert [(token["id"], token["shared"]) for token in told] == [(i, common[i]) for i in best]
    assert all(token["signature"] == model.signatures.ids[token["id"]].tolist() for token in told)


def test_tries():
    """The tries are those of SignatureTable.trace, whose owners may be token 0; the pad has []."""
    model, owners, longest = crowded(), set(), 0
    for token_id in range(40):
        told = model.explain([token_id])["signature"]["tries"]
        if model.signatures.tokens[token_id] is None:
            assert told is None
            continue
        expected = model.signatures.trace(model.signatures.tokens[token_id])
        told = [(t["seed"], t["last"], t["owner"] and t["owner"]["id"]) for t in told]
        assert told == expected
        owners |= {owner for _, _, owner in expected}
        longest = max(longest, len(expected))
    assert 0 in owners and longest > 2 and model.explain([PAD])["signature"]["tries"] == []


def test_an_owner_is_told_like_any_token():
    """The owner of a taken signature has its bytes, text and signature."""
    model = crowded()
    for token_id in model.signatures.rehashed:
        for told in model.explain([token_id])["signature"]["tries"][:-1]:
            owner = told["owner"]
            assert bytes(owner["bytes"]) == model.signatures.tokens[owner["id"]]
            assert owner["signature"] == model.signatures.ids[owner["id"]].tolist()
            assert owner["signature"][-1] == told["last"]


def test_tries_are_unknown_without_the_tokens():
    """A table of stored ids, and one whose tokens do not make them, have None for the tries."""
    model = crowded()
    stored = SignatureTable.from_ids(model.signatures.ids, PAD, 6)
    assert MultiHashFormer(model.config, stored).explain([3])["signature"]["tries"] is None
    model.signatures.locked = "another hash made these ids"
    assert model.explain([3])["signature"]["tries"] is None


@pytest.mark.parametrize("shape", [dict(H=1, B=7), dict(H=2, B=9, num_lsh=2), dict(num_lsh=1)])
def test_tables_that_share_signatures(shape):
    """Single-ID and locality-sensitive models are explained, too; nothing is hashed again there."""
    model = build(**shape)
    told = model.explain(IDS)
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    common = list(shared_by_hand(model, IDS[-1]).values())
    assert (
        told["signature"]["shared"]
        == [common.count(n) for n in range(len(common))][: model.config.num_hashes + 1]
    )
    if model.config.shares_signatures:
        assert told["signature"]["tries"] is None
    else:
        assert told["signature"]["tries"][-1]["owner"] is None


# ---------------------------------------------------------------------------------------------
# Rows, residual, what is handed on, and the token that follows
# ---------------------------------------------------------------------------------------------


def test_row_norms(mhf):
    """The norm of each row of a token's signature, by hand in float64."""
    table = Plain(mhf).E  # (H, B, D)
    for told in mhf.explain(IDS)["tokens"]:
        by_hand = [table[j, bucket].norm() for j, bucket in enumerate(told["signature"])]
        close(torch.stack(by_hand), told["row_norms"])


@pytest.mark.parity
def test_residual(mhf):
    """‖W_s Σ α_j e_j + b_s − x‖ by hand in float64: the two agree, and are below 1e-5."""
    plain = Plain(mhf)
    x, gate = (y[0].detach().double() for y in mhf.embed(torch.tensor([IDS]), return_gate=True))
    for t, told in enumerate(mhf.explain(IDS)["tokens"]):
        rows = [plain.E[j, bucket] for j, bucket in enumerate(told["signature"])]
        mixed = sum(a * e for a, e in zip(gate[t], rows, strict=True))  # (D,)
        by_hand = (plain.linear("model.combiner.output_proj.0", mixed) - x[t]).norm()
        close(told["residual"], by_hand, atol=1e-9, rtol=1e-3)
        assert 0 <= told["residual"] < 1e-5


@pytest.mark.parity
def test_a_wrong_input_vector_shows_in_the_residual(mhf):
    """The check can fail: by the norm of what is added to the vectors behind its back."""
    mhf.model.combiner.register_forward_hook(lambda module, inputs, y: (y[0] + 0.25, y[1]))
    told = [token["residual"] for token in mhf.explain(IDS)["tokens"]]
    close(told, [0.25 * 16**0.5] * len(IDS))


@pytest.mark.parity
@pytest.mark.parametrize("force", [{}, {0: 2}], ids=str)
def test_nearest_buckets(mhf, force):
    """The three rows with the largest cosine to the soft embedding, or to the forced row."""
    table, p = Plain(mhf).E, log_buckets(mhf).exp().double()
    scores = mhf.scores(torch.tensor([IDS]))[0, -1]
    *functions, last = mhf.explain(IDS, top_k=4, force=force)["functions"]
    assert last["nearest"] == []
    for j, function in enumerate(functions[:1] if force else functions):
        soft = table[j, force[j]] if j in force else p[j] @ table[j]  # (D,)
        cosine = torch.stack([row @ soft / row.norm() / soft.norm() for row in table[j]])  # (B,)
        values, buckets = cosine.topk(3)
        assert [n["bucket"] for n in function["nearest"]] == buckets.tolist()
        close([n["cosine"] for n in function["nearest"]], values)
        for n in function["nearest"]:
            members = (mhf.signatures.ids[:, j] == n["bucket"]) & mhf.signatures.assigned
            assert n["num_tokens"] == int(members.sum())
            if not force:
                best = sorted(members.nonzero()[:, 0].tolist(), key=lambda i: -scores[i])
                assert [token["id"] for token in n["tokens"]] == best[:4]


def test_two_buckets_have_two_nearest():
    """With fewer than three buckets all are listed."""
    model = build(H=3, B=2, V=3, unassigned=(0,))
    assert [len(f["nearest"]) for f in model.explain([1, 2], top_k=1)["functions"]] == [2, 2, 0]


@pytest.mark.parametrize("position", range(5))
@pytest.mark.parametrize("standard", [False, True], ids=["mhf", "standard"])
def test_next_is_the_token_that_follows(standard, position):
    """next has the numbers that top_tokens would have for it; at the end there is none."""
    told = build(standard=standard, calibration=1.7).explain(IDS, position, top_k=20)
    if position == 4:
        assert told["next"] is None
    else:
        (expected,) = (t for t in told["top_tokens"] if t["id"] == IDS[position + 1])
        assert told["next"] == expected


def test_an_unused_id_that_follows_has_no_probability(mhf):
    """next of an id without a token: no score, rank and log probability; joint probability 0."""
    told = mhf.explain([3, 4], position=0)["next"]
    assert told["id"] == 4 and told["bytes"] is None and told["joint_prob"] == 0
    assert {told[k] for k in ("score", "rank", "log_prob", "log_prob_paper")} == {None}


@pytest.mark.parametrize("standard", [False, True], ids=["mhf", "standard"])
def test_ranks(standard):
    """The rank of a token is 1 + the number of tokens with a larger score; equal ones share it."""
    model = build(H=1, B=4, standard=standard)  # of one function: tokens of a bucket are equal
    scores = model.token_scores(model(torch.tensor([IDS]))[:, -1])[0].tolist()
    for told in model.explain(IDS, top_k=20)["top_tokens"]:
        assert told["rank"] == 1 + sum(score > scores[told["id"]] for score in scores)


def test_all_scores(mhf):
    """Of all tokens if asked for: those of model.scores, None for the ids without a token."""
    assert "scores" not in mhf.explain(IDS)
    told = mhf.explain(IDS, 2, all_scores=True)["scores"]
    expected = mhf.scores(torch.tensor([IDS]))[0, 2]
    assert [i for i, score in enumerate(told) if score is None] == [4, 19]
    real = mhf.signatures.assigned
    close([score for score in told if score is not None], expected[real])


@pytest.mark.parametrize("force", [None, {0: 2}], ids=str)
def test_all_scores_are_json(mhf, force):
    """With all scores and unused ids in the text, too, the dict is JSON without NaN."""
    told = mhf.explain([3, 4, 19, PAD], 1, top_k=18, force=force, all_scores=True)
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_all_scores_of_the_standard_model():
    """The baseline's are its logits."""
    model = build(standard=True)
    told = model.explain(IDS, 2, all_scores=True)
    close(told["scores"], model.token_scores(model(torch.tensor([IDS]))[0, 2:3])[0])
    assert told["signature" if "signature" in told else "next"] is not None


@pytest.mark.parametrize("standard", [False, True], ids=["mhf", "standard"])
def test_schema_and_size(standard):
    """The dict says its version, 2, and the size of the vocabulary, which expand raises."""
    model = build(standard=standard)
    assert model.explain(IDS)["schema"] == 2 and model.explain(IDS)["vocab_size"] == 20
    model.expand([b"a new token"])
    assert model.explain([20])["vocab_size"] == 21


def test_a_force_acts_on_scores_and_next_alike(mhf):
    """With a force, scores, top_tokens and next are those of one and the same cascade."""
    told = mhf.explain(IDS, 1, top_k=18, force={0: 2, 1: 3}, all_scores=True)
    for entry in [*told["top_tokens"], told["next"]]:
        close(told["scores"][entry["id"]], entry["score"])
    plain = mhf.explain(IDS, 1, all_scores=True)["scores"]
    assert max(abs(a - b) for a, b in zip(told["scores"], plain, strict=True) if a) > 0.1


# ---------------------------------------------------------------------------------------------
# What a student may have changed
# ---------------------------------------------------------------------------------------------


class Mean(torch.nn.Module):
    """Another gate: the mean of the rows, with or without an adapter."""

    def __init__(self, adapter=None):
        super().__init__()
        if adapter is not None:
            self.output_proj = adapter

    def forward(self, e):
        gate = torch.full(e.shape[:-1], 1 / e.shape[-2])  # (..., H)
        x = e.mean(-2)  # (..., D)
        return (self.output_proj(x) if hasattr(self, "output_proj") else x), gate


def test_a_gate_without_scores_and_adapter(mhf):
    """A combiner that has neither scorer nor adapter has no scores and no residual, but a gate."""
    mhf.model.combiner = Mean()
    for told in mhf.explain(IDS)["tokens"]:
        assert told["gate_scores"] is None and told["residual"] is None
        close(told["gate"], [1 / 3] * 3)
        assert len(told["row_norms"]) == 3


ADAPTERS = {
    "sequential": lambda: torch.nn.Sequential(torch.nn.Linear(16, 16)),
    "linear": lambda: torch.nn.Linear(16, 16),
    "no bias": lambda: torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False)),
    "two layers": lambda: torch.nn.Sequential(
        torch.nn.Linear(16, 8), torch.nn.SiLU(), torch.nn.Linear(8, 16)
    ),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_gate_with_another_adapter(mhf, name):
    """A changed adapter is no reason to fail: its residual is small, or not told."""
    torch.manual_seed(0)
    mhf.model.combiner = Mean(ADAPTERS[name]())
    residuals = [token["residual"] for token in mhf.explain(IDS)["tokens"]]
    assert residuals == [None] * len(IDS) or max(residuals) < 1e-5


def test_numbers_fit_in_64_bits():
    """However many signatures there are, the dict holds no integer that other readers of JSON
    refuse."""

    def whole(x):
        parts = x.values() if isinstance(x, dict) else x if isinstance(x, list) else ()
        return [x] * isinstance(x, int) + [i for part in parts for i in whole(part)]

    assert 256**8 == 2**64
    assert max(whole(build(H=8, B=256).explain(IDS, all_scores=True))) < 2**63
