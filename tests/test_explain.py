"""`explain` against brute force: all of its dict once more, with loops and Python's own floats."""

import copy
import json
from collections import Counter
from math import exp, log

import pytest
import torch
from conftest import PAD, build, close, refused

from mhf import MultiHashFormer, SignatureTable
from support.explain import explain, explain_word

IDS = [3, 9, 1, 12, 7]
TEXTS = {"tokens": IDS, "unused ids": [11, 4, 18, PAD, 19]}
MODELS = {
    "calibrated": dict(calibration=1.7, unassigned=(4, 19)), "single": dict(H=1, B=7),
    "crowded": dict(V=40, unassigned=(4, 19)),  # 11 and others are hashed again
    "lsh": dict(H=2, B=9, num_lsh=2), "half-lsh": dict(num_lsh=1), "peaked": {},  # it underflows
}  # fmt: skip
NAMES = ("rank", "score", "log_prob_paper", "log_prob", "log_prob_before")


def ranked(among, value):  # of equals the lowest id comes first: Python's sort is stable
    return sorted(among, key=lambda i: -value[i])


def brute(model, ids, position, top_k, force, only):
    """What `explain` is to say, but for what it adds about the gate."""
    table, tau = model.signatures, model.config.calibration
    signatures, J = model.model.hash_map.tolist(), range(model.config.num_hashes)
    known = [i for i, signature in enumerate(signatures) if i == PAD or any(signature)]
    fit = [i for i in known if all(signatures[i][j] == b for j, b in only.items())]
    h, own, at = model(torch.tensor([ids]))[0, position], ids[position], position % len(ids)
    prefixes = Counter(tuple(signatures[i][: j + 1]) for i in known for j in J)

    def scored(forced):
        steps = model.hash_head.steps(h, model.table, forced)
        log_p = [o.double().log_softmax(-1).tolist() for o, _ in steps]
        return log_p, [sum(p[b] for p, b in zip(log_p, s)) for s in signatures]

    def log_shares(score, among):  # without and with calibration
        for t in (1, tau):
            yield {i: score[i] / t - log(sum(exp(score[k] / t) for k in among)) for i in among}

    (_, plain), (log_p, score) = scored({}), scored(force)
    (paper, after), (mass, before) = log_shares(score, fit), log_shares(plain, known)

    def token(i):
        left = [prefixes[tuple(signatures[i][: j + 1])] for j in J]
        found = named(table, i) | {"left": left, "joint_prob": exp(score[i]) * (i in fit)}
        found |= {"log_p": [p[b] for p, b in zip(log_p, signatures[i])]} | dict.fromkeys(NAMES)
        told = [1 + sum(score[k] > score[i] for k in fit), score[i]]
        told += [x.get(i) for x in (paper, after, before)]
        return found | dict(zip(NAMES, told * (i in fit)))

    def bucket(j, b, **more):
        inside = ranked([i for i in known if signatures[i][j] == b], plain)
        more |= {"bucket": b, "num_tokens": len(inside), "mass": sum(exp(mass[i]) for i in inside)}
        return more | {"tokens": [named(table, i) for i in inside[:top_k]]}

    def function(j):
        p, best = [exp(x) for x in log_p[j]], dict.fromkeys(signatures[i][j] for i in top)
        listed = {"top": ranked(range(len(p)), log_p[j])[:top_k], "paths": best}
        found = {k: [bucket(j, b, prob=p[b]) for b in bs] for k, bs in listed.items()}
        entropy = -sum(x * y / log(2) for x, y in zip(p, log_p[j]))
        return found | dict(function=j, entropy_bits=entropy, forced=force.get(j, only.get(j)))

    top, shown = ranked(fit, score)[:top_k], own in known and own != PAD and not table.shared
    tries = table.trace(table.tokens[own]) if shown else ()
    tries = [dict(seed=s, last=x, owner=i if i is None else named(table, i)) for s, x, i in tries]
    found = {"position": at, "vocab_size": len(signatures), "calibration": tau}
    found |= {"tokens": [named(table, i) for i in ids], "top_tokens": [token(i) for i in top]}
    found["next"] = token(ids[at + 1]) if at + 1 < len(ids) else None
    found["scores"] = [s if i in fit else None for i, s in enumerate(score)]
    found["total_variation"] = sum(abs(exp(before[i]) - exp(after.get(i, -999))) for i in known) / 2
    found["signature"] = {"functions": [*map(bucket, J, signatures[own])], "tries": tries or None}
    found["valid_mass"] = sum(map(exp, {(*signatures[i],): plain[i] for i in known}.values()))
    return found | {"functions": [function(j) for j in J]}


def named(table, i):
    text = table.tokens[i] and table.tokens[i].decode("utf-8", "backslashreplace")
    return {"id": i, "text": text, "signature": list(table.signatures[i])}


QUESTIONS = [(0, 1, {}, 9), (1, 4, {}, 9), (-1, 18, {0: 2}, 9), (-2, 6, {0: 3, 1: 5}, 9)]
QUESTIONS += [(2, 9, {0: 4}, 1), (-2, 18, {}, 0)]  # position, top_k, force, function of "only"


@pytest.mark.parametrize("ids", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("kind", MODELS)
def test_equals_brute_force(kind, ids):
    """With short and long lists, forced buckets and a condition on the bucket of token 7."""
    model, H = build(**MODELS[kind]), MODELS[kind].get("H", 3)
    model.model.norm.weight.data *= 10 if kind == "peaked" else 1
    for position, top_k, force, only in QUESTIONS:
        force = {j: bucket for j, bucket in force.items() if j < H}
        only = {only: model.signatures.signatures[7][only]} if only in range(H) else {}
        told = explain(model, ids, position, top_k, force, only)
        assert json.loads(json.dumps(told, allow_nan=False)) == told
        told.pop("input")  # see test_gate
        [token.pop("gate") for token in told["tokens"]]
        expected = json.dumps(brute(model, ids, position, top_k, force, only))
        close_to = lambda number: pytest.approx(float(number), rel=1e-4, abs=5e-5)  # noqa: E731
        assert told == json.loads(expected, parse_float=close_to)


def test_tries_are_unknown_where_ids_were_made_in_another_way():
    """Without the tokens, and where they do not hash to the stored ids: None."""
    mhf, ids = build(), build().signatures.ids
    ids[7, -1] = ids[7, -1] % 5 + 1
    for tokens in (None, mhf.signatures.tokens):
        table = SignatureTable.from_ids(ids, 6, PAD, tokens=tokens)
        assert explain(MultiHashFormer(mhf.config, table), [7])["signature"]["tries"] is None


@pytest.mark.parametrize("kind", ["crowded", "lsh", "single"])
def test_a_word_is_what_a_table_would_make_of_it(kind):
    """Known or new: its signature in a table with it, the tokens beside it, the tries."""
    model = build(**MODELS[kind])
    table = model.signatures
    for word in (b"zebra", b"", b"4", table.tokens[0], table.tokens[11]):
        found, more, known = explain_word(model, word), copy.deepcopy(table), word in table.tokens
        more.extend([] if known else [word])
        i = more.tokens.index(word)
        assert (found["id"], found["signature"]) == (i if known else None, [*more.signatures[i]])
        for j, f in enumerate(found["functions"]):
            beside = [k for k, s in enumerate(table.signatures) if s[j] == more.signatures[i][j]]
            assert (f["num_tokens"], [t["id"] for t in f["tokens"]]) == (len(beside), beside[:10])
        told = [(t["seed"], t["last"], (t["owner"] or {}).get("id")) for t in found["tries"] or ()]
        assert told == ([] if known and table.shared else table.trace(word))


def test_transformer():
    """It has tokens, top tokens and the next one, with the model's own log probabilities."""
    model = build(standard=True, calibration=1.7)
    log_p, told = model.log_probs(torch.tensor([IDS]))[0, 2], explain(model, IDS, 2, top_k=20)
    assert [token["id"] for token in told["top_tokens"]] == ranked(range(20), log_p)
    assert json.loads(json.dumps(told, allow_nan=False)) == told and "functions" not in told
    close(told["input"]["x"], model.embed(torch.tensor([IDS]))[0, 2])
    refused(lambda: explain(model, IDS, force={0: 1}), "force")
    for token in [*told["top_tokens"], told["next"]]:
        close([token["log_prob"], token["log_prob_before"]], log_p[token["id"]].expand(2))
        close(token["log_prob_paper"], (1.7 * log_p).log_softmax(0)[token["id"]])


def test_of_equal_buckets_the_lowest_comes_first():
    """Where all rows are equal, so are all buckets; a list, tensors and an array say the same."""
    (mhf := build()).model.embed_tokens.weight.data[:] = 0.1
    for ids in (IDS, torch.tensor(IDS), torch.tensor([IDS]), torch.tensor(IDS).numpy()):
        functions = explain(mhf, ids)["functions"]
        assert [[b["bucket"] for b in f["top"]] for f in functions] == [[*range(6)]] * 3


WRONG = [
    ([5], dict(position=5)), ([-6, 5], dict(position=-6)), ([None], dict(position=None)),
    (["top_k", 0], dict(top_k=0)), ([21, 20], dict(top_k=21)), ([1.5], dict(top_k=1.5)),
    ([3], dict(force={3: 1})), ([6], dict(force={0: 6})), ([-1], dict(force={-1: 1})),
    ([20, 19], dict(ids=[3, 20])), ([-1], dict(ids=[-1, 3])), ([0], dict(ids=[])),
    ([2], dict(ids=[[3, 1], [2, 5]])), ([6], dict(only={0: 6})), (["no"], dict(only={0: 0, 1: 5})),
]  # fmt: skip


@pytest.mark.parametrize(("values", "arguments"), WRONG, ids=str)
def test_what_cannot_be_explained_is_refused(values, arguments):
    """A bad argument is a ValueError with the value."""
    refused(lambda: explain(build(), **{"ids": IDS} | arguments), *values)


@pytest.mark.parity
def test_gate():
    """Weights, rows, their sum and x are the model's, and the sum leads to x."""
    mhf = build()
    x, gate = (y[0] for y in mhf.embed(torch.tensor([IDS]), return_gate=True))
    for t, i in enumerate(IDS):
        told = explain(mhf, IDS, t)
        close(told["tokens"][t]["gate"], gate[t])
        close(told["input"]["rows"], mhf.table[range(3), mhf.model.hash_map[i]])
        close(told["input"]["x"], x[t])
        close(told["input"]["h"], mhf(torch.tensor([IDS]))[0, t])
        close(mhf.model.combiner.output_proj(torch.tensor(told["input"]["mixed"])), x[t])


def test_a_changed_gate():
    """It is shown where it has a weight for each row; what it does not have is None."""
    (mhf := build()).model.combiner = torch.nn.Module()  # without scorer and adapter
    rows, third = lambda e: torch.full(e.shape[:-1], 1 / 3), pytest.approx([1 / 3] * 3)
    for gate, shown in [(rows, third), (lambda e: None, None), (lambda e: e, None)]:
        mhf.model.combiner.forward = lambda e, gate=gate: (e.mean(-2), gate(e))
        told = explain(mhf, IDS)
        assert [token["gate"] for token in told["tokens"]] == [shown] * 5
        assert (told["input"]["mixed"] is None) == (shown is None)
        close(told["input"]["x"], torch.tensor(told["input"]["rows"]).mean(0))
