"""`explain` against brute force: all of its dict once more, with loops and Python's own floats."""

import json
import math

import pytest
import torch
from conftest import PAD, build, close, refused

from mhf import MultiHashFormer, SignatureTable
from support.explain import explain

IDS = [3, 9, 1, 12, 7]
TEXTS = {"tokens": IDS, "unused ids": [11, 4, 18, PAD, 19]}
MODELS = {
    "calibrated": dict(calibration=1.7, unassigned=(4, 19)),
    "crowded": dict(V=40, unassigned=(4, 19)),  # 11 and others were hashed again
    "single": dict(H=1, B=7),
    "lsh": dict(H=2, B=9, num_lsh=2),
    "half-lsh": dict(num_lsh=1),
    "peaked": {},  # its probabilities underflow in float32
}


@pytest.fixture
def mhf():
    return build(**MODELS["calibrated"])


def ranked(among, value):
    """The largest values first, of equals the lowest id: Python's sort is stable."""
    return sorted(among, key=lambda i: -value[i])


def brute(model, ids, position, top_k, force):
    """What `explain` is to say, but for what it adds to the tokens about the gate."""
    table, tau = model.signatures, model.config.calibration
    signatures = model.model.hash_map.tolist()
    steps = list(model.hash_head.steps(model(torch.tensor([ids]))[0, position], model.table, force))
    log_p = [o.double().log_softmax(-1).tolist() for o, _ in steps]
    known = [i for i, signature in enumerate(signatures) if i == PAD or any(signature)]
    score = [sum(p[b] for p, b in zip(log_p, signature)) for signature in signatures]
    paper, calibrated = (math.log(sum(math.exp(score[i] / t) for i in known)) for t in (1, tau))

    def mass(among):
        return sum(math.exp(score[i] - paper) for i in among)

    def entry(i, **more):
        text = table.tokens[i] and table.tokens[i].decode("utf-8", "backslashreplace")
        return {"id": i, "text": text, "signature": signatures[i]} | more

    def token(i):
        found = entry(i, log_p=[p[b] for p, b in zip(log_p, signatures[i])], joint_prob=0.0)
        if i not in known:
            return found | dict.fromkeys(("rank", "score", "log_prob_paper", "log_prob"))
        found |= {"joint_prob": math.exp(score[i]), "score": score[i]}
        found |= {"log_prob_paper": score[i] - paper, "log_prob": score[i] / tau - calibrated}
        return found | {"rank": 1 + sum(score[k] > score[i] for k in known)}

    def bucket(j, b, **more):
        inside = ranked([i for i in known if signatures[i][j] == b], score)
        found = {"bucket": b, "num_tokens": len(inside), "mass": mass(inside)} | more
        return found | {"tokens": [entry(i) for i in inside[:top_k]]}

    functions, compatible = [], known
    for j, (_, soft) in enumerate(steps):
        p, e = [math.exp(x) for x in log_p[j]], model.table[j].detach()  # (B,), (B, D)
        cosine = [] if soft is None else torch.cosine_similarity(e, soft, -1).tolist()
        top, near = ranked(range(len(p)), log_p[j])[:top_k], ranked(range(len(cosine)), cosine)[:3]
        compatible = [i for i in compatible if signatures[i][j] == force.get(j, top[0])]
        functions.append({
            "function": j,
            "top": [bucket(j, b, prob=p[b]) for b in top],
            "entropy_bits": -sum(x * y / math.log(2) for x, y in zip(p, log_p[j])),
            "soft_embedding_norm": None if soft is None else soft.norm().item(),
            "nearest": [bucket(j, b, cosine=cosine[b]) for b in near],
            "forced": force.get(j),
            "compatible": len(compatible),
            "compatible_mass": mass(compatible),
        })  # fmt: skip
    own, at = ids[position], position % len(ids)
    others, mean = [i for i in known if i != own], sum(map(any, signatures)) / (len(p) - 1)
    common = [sum(a == b for a, b in zip(s, signatures[own])) for s in signatures]
    alike = ranked([i for i in ranked(others, score) if common[i]], common)[:top_k]
    hashed = own in known and own != PAD and not table.shared
    tries = table.trace(table.tokens[own]) if hashed else []
    tries = [(seed, last, None if i is None else entry(i)) for seed, last, i in tries]
    return {
        "position": at,
        "vocab_size": len(signatures),
        "calibration": tau,
        "tokens": [entry(i) for i in ids],
        "top_tokens": [token(i) for i in ranked(known, score)[:top_k]],
        "next": token(ids[at + 1]) if at + 1 < len(ids) else None,
        "signature": {
            "id": own,
            "functions": [bucket(j, b, expected=mean) for j, b in enumerate(signatures[own])],
            "neighbours": [entry(i, shared=common[i]) for i in alike],
            "shared": [[common[i] for i in others].count(n) for n in range(len(log_p) + 1)],
            "tries": [dict(zip(("seed", "last", "owner"), t)) for t in tries] if hashed else None,
        },
        "functions": functions,
        "valid_mass": sum(map(math.exp, {tuple(signatures[i]): score[i] for i in known}.values())),
    }


@pytest.mark.parametrize("ids", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("kind", MODELS)
def test_equals_brute_force(kind, ids):
    """With short and long lists and forced buckets; float32 rounds scores of −100 to 1e-5."""
    model = build(**MODELS[kind])
    model.model.norm.weight.data *= 10 if kind == "peaked" else 1
    assert kind != "crowded" or 11 in model.signatures.rehashed
    for position, top_k, force in [(0, 1, {}), (1, 4, {}), (-1, 18, {0: 2}), (-2, 6, {0: 3, 1: 5})]:
        force = {j: bucket for j, bucket in force.items() if j < model.config.num_hashes}
        told = explain(model, ids, position, top_k, force)
        assert json.loads(json.dumps(told, allow_nan=False)) == told
        for token in told["tokens"]:  # see test_gate
            [token.pop(name) for name in ("gate", "gate_scores", "row_norms", "residual")]
        expected = json.dumps(brute(model, ids, position, top_k, force))
        close_to = lambda number: pytest.approx(float(number), rel=1e-4, abs=5e-5)  # noqa: E731
        assert told == json.loads(expected, parse_float=close_to)


def test_tries_are_unknown_where_ids_were_made_in_another_way(mhf):
    """Without the tokens, where they do not hash to the stored ids, and of the pad: None."""
    ids = mhf.signatures.ids
    ids[7, -1] = ids[7, -1] % 5 + 1
    for tokens in (None, mhf.signatures.tokens):
        table = SignatureTable.from_ids(ids, 6, PAD, tokens=tokens)
        assert explain(MultiHashFormer(mhf.config, table), [7])["signature"]["tries"] is None
    full = build(H=2, B=2, V=3, unassigned=(0,))
    assert explain(full, [PAD], top_k=3)["signature"]["tries"] is None


def test_transformer():
    """It has tokens, top tokens and the next one, with the model's own log probabilities."""
    model = build(standard=True, calibration=1.7)
    log_p, told = model.log_probs(torch.tensor([IDS]))[0, 2], explain(model, IDS, 2, top_k=20)
    assert [token["id"] for token in told["top_tokens"]] == ranked(range(20), log_p)
    assert json.loads(json.dumps(told, allow_nan=False)) == told and "functions" not in told
    for token in [*told["top_tokens"], told["next"]]:
        close(token["log_prob"], log_p[token["id"]])
        close(token["log_prob_paper"], (1.7 * log_p).log_softmax(0)[token["id"]])


def test_of_equal_buckets_the_lowest_comes_first(mhf):
    """Where all rows are equal, so are all buckets; a list, tensors and an array say the same."""
    mhf.model.embed_tokens.weight.data[:] = 0.1
    for function in explain(mhf, IDS)["functions"]:
        assert [top["bucket"] for top in function["top"]] == list(range(6))
        assert [n["bucket"] for n in function["nearest"]] == [0, 1, 2][: len(function["nearest"])]
    for ids in (torch.tensor(IDS), torch.tensor([IDS]), torch.tensor(IDS).numpy()):
        assert explain(mhf, ids) == explain(mhf, IDS)


WRONG = [
    ([5], dict(position=5)), ([-6, 5], dict(position=-6)), ([None], dict(position=None)),
    (["top_k", 0], dict(top_k=0)), (["top_k", 21, 20], dict(top_k=21)), ([1.5], dict(top_k=1.5)),
    ([3], dict(force={3: 1})), ([6], dict(force={0: 6})), ([-1], dict(force={-1: 1})),
    ([20, 19], dict(ids=[3, 20])), ([-1], dict(ids=[-1, 3])), ([0], dict(ids=[])),
    ([2], dict(ids=[[3, 1], [2, 5]])), (["force"], dict(force={0: 1}, standard=True)),
]  # fmt: skip


@pytest.mark.parametrize(("values", "arguments"), WRONG, ids=str)
def test_what_cannot_be_explained_is_refused(values, arguments):
    """A bad argument is a ValueError with the value."""
    given = {"ids": IDS} | arguments
    model = build(standard=given.pop("standard", False))
    refused(lambda: explain(model, **given), *values)


@pytest.mark.parity
def test_gate(mhf):
    """Weights and norms are the model's; scores give the weights; the check of x can fail."""
    x, gate = (y[0] for y in mhf.embed(torch.tensor([IDS]), return_gate=True))
    for t, told in enumerate(explain(mhf, IDS)["tokens"]):
        close(told["gate"], gate[t])
        close(torch.tensor(told["gate_scores"]).softmax(0), gate[t])
        close(told["row_norms"], mhf.table[range(3), told["signature"]].norm(dim=-1))
        assert 0 <= told["residual"] < 1e-5
    mhf.model.combiner.register_forward_hook(lambda module, inputs, y: (y[0] + 0.25, y[1]))
    close([told["residual"] for told in explain(mhf, IDS)["tokens"]], [0.25 * 16**0.5] * 5)


GATES = [
    (lambda e: torch.full(e.shape[:-1], 1 / 3), pytest.approx([1 / 3] * 3)),
    (lambda e: None, None),
    (lambda e: e, None),  # a weight for each dimension
    (lambda e: e.mean((-1, -2)), None),  # one number
]


@pytest.mark.parametrize(("gate", "shown"), GATES)
def test_a_changed_gate(mhf, gate, shown):
    """It is shown where it has a weight for each row; what it does not have is None."""
    mhf.model.combiner = torch.nn.Module()  # without scorer and adapter
    mhf.model.combiner.forward = lambda e: (e.mean(-2), gate(e))
    for told in explain(mhf, IDS)["tokens"]:
        assert told["gate"] == shown and len(told["row_norms"]) == 3
        assert told["gate_scores"] is None and told["residual"] is None
