"""demo_app.py without a browser: its views against the library, its sessions, its page.

Views are compared with the library's own tensors, never with a second implementation; what a user
types is followed through all that is shown.
"""

import ast
import copy
import functools
import inspect
import itertools
import json
import math
import os
import re
import types
import urllib.parse
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from conftest import close

import demo_app
import mhf
from demo_app import FRESH, Lab, Page, current, draw, open_prompt, show

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEXT = "".join(f"the {a} of {b}, or not to be {a}\n" for a in NUMBERS for b in NUMBERS)
CORPUS = TEXT + "漢字仮名交じり文の例 " * 40 + "éééé 🙂🙂 \u200b\u0301 \t\t " * 20
PROMPT = "the one of two, or not to be three"
WINDOW = 32
ATTACKS = (
    "<img src=x onerror=alert(1)>",
    '"><script>alert(1)</script>',
    "'><svg/onload=alert(1)>",
    "${7*7}",
    "{{7*7}}{% if 1 %}",
    "\\u003cb\\u003e \\x3cb\\x3e \\",
    "`${alert(1)}`",
    "&lt;b&gt; &#60;b>",
    "</bdi></button></pre><b>",
)
CUTS = (1.0, 0, 1.0)  # temperature, top_k, top_p at the start


@functools.cache
def tokenizer():
    return mhf.Tokenizer.train(CORPUS, 340)


def make(run, step="step-1", words=True, standard=False, unused=0, seed=0, **fields):
    """A run folder with a tiny checkpoint of random weights, large enough for no flat softmax."""
    fields = dict(num_hashes=3, num_buckets=64, calibration=1.25) | fields
    config = mhf.Config(
        vocab_size=len(tokenizer()) + unused,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        bottle_neck_dim=4,
        max_position_embeddings=WINDOW,
        initializer_range=0.3,
        pad_token_id=tokenizer().eot,
        **fields,
    )
    torch.manual_seed(seed)
    if standard:
        model = mhf.Transformer(config)
    else:
        shape = config.num_hashes, config.num_buckets, config.num_lsh
        table = mhf.SignatureTable(*shape, allow_collisions=config.shares_signatures)
        table.extend(tokenizer().all_bytes() + [None] * unused, pad_id=tokenizer().eot)
        model = mhf.MultiHashFormer(config, table)
    model.save_pretrained(run / step)
    if words:
        tokenizer().save(run / step)
    (run / "last").write_text(step + "\n", encoding="utf-8")
    return run


KINDS = {  # the first is the one that most tests use
    "mhf": {},
    "other": {"seed": 1, "calibration": 0.8},
    "crowded": {"num_hashes": 2, "num_buckets": 32},
    "unused": {"unused": 5},
    "single": {"num_hashes": 1},
    "lsh": {"num_hashes": 2, "num_lsh": 2},
    "half-lsh": {"num_lsh": 1},
    "untokenized": {"words": False},
    "standard": {"standard": True},
}
HASHED = [kind for kind in KINDS if kind != "standard"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """An output folder with a run of every kind; the newest is "mhf"."""
    out = tmp_path_factory.mktemp("runs")
    for age, (kind, fields) in enumerate(KINDS.items()):
        make(out / kind, **fields)
        os.utime(out / kind / "last", (1e9 - age, 1e9 - age))
    return out


@pytest.fixture(autouse=True)
def not_shipped(monkeypatch):
    """The checkpoint beside the app is not there: its numbers are no test's business."""
    monkeypatch.setattr(demo_app, "SHIPPED", Path("nowhere"))


@pytest.fixture(scope="module")
def lab(runs):
    """Checkpoints of every kind, shared: whoever changes a model takes `own_lab`."""
    return Lab(None, runs)


@pytest.fixture
def own_lab(runs):
    return Lab(None, runs)


def fresh(kind="mhf", **changes):
    return FRESH | {"checkpoint": kind, "default": kind} | changes


def opened(lab, prompt=PROMPT, position=-1, kind="mhf", **changes):
    """A session at a prompt; without a tokenizer the prompt is three ids."""
    if kind == "untokenized" and prompt == PROMPT:
        prompt = "5 70 300 12 12 8 9"
    return open_prompt(lab, fresh(kind), prompt, position, **changes)


def of_model(lab, session):
    """The session's model and ids (1, T)."""
    return current(lab, session).model, torch.tensor([session["ids"]])


# ---------------------------------------------------------------------------------------------
# Reading HTML
# ---------------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """The elements of a text of HTML, in order: tag, attributes, all the text inside."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.open, self.text, self.pieces = [], [], "", []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_startendtag(self, tag, attributes):
        self.elements.append(types.SimpleNamespace(tag=tag, at=dict(attributes), text=""))

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag != "br":
            self.open.append(self.elements[-1])

    def handle_endtag(self, tag):
        assert self.open.pop().tag == tag

    def handle_data(self, text):
        self.text += text
        self.pieces.append(text)
        for element in self.open:
            element.text += text

    def all(self, tag=None, **attributes):
        """Elements by tag and attributes; data_pick=None asks for any value of data-pick."""
        names = {name.replace("_", "-"): value for name, value in attributes.items()}
        return [
            e
            for e in self.elements
            if tag in (None, e.tag)
            and all(k in e.at and v in (None, e.at[k]) for k, v in names.items())
        ]

    def shape(self):
        """The tags and names of attributes that occur."""
        return {(e.tag, *e.at) for e in self.elements}


def drawn(lab, session, *cuts):
    """{view: HTML} of a session."""
    views = draw(lab, session, *(cuts or CUTS))[1:]
    return dict(zip(demo_app.DRAWN, views, strict=True))


def widths(elements):
    """The widths in per cent that style attributes give."""
    found = [re.search(r"width:\s*([-\d.e]+)%", e.at.get("style") or "") for e in elements]
    return [float(match[1]) for match in found if match]


# ---------------------------------------------------------------------------------------------
# Views against the library's tensors
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_tokens(lab, kind):
    """View 1 has every token's id and glyph, and the position; its HTML a button for each."""
    session = opened(lab, position=2, kind=kind)
    view, names = demo_app.view_tokens(session), current(lab, session).names
    assert [t["id"] for t in view["tokens"]] == session["ids"] and view["position"] == 2
    buttons = Reader(show("tokens", view)).all("button", data_pick=None)
    assert [int(b.at["data-pick"]) for b in buttons] == list(range(len(session["ids"])))
    assert [b.at["aria-pressed"] for b in buttons].index("true") == 2
    for i, button in zip(session["ids"], buttons, strict=True):
        glyph = demo_app.glyph({"id": i, "bytes": names[i] and list(names[i])})
        assert glyph in button.text and str(i) in button.text


@pytest.mark.parametrize("kind", HASHED)
@pytest.mark.parametrize("position", [0, 3, -1])
def test_signature(lab, kind, position):
    """View 2 lists hash_map's ids, and in each bucket the tokens that hash_map puts there."""
    session = opened(lab, position=position, kind=kind)
    model, ids = of_model(lab, session)
    view = demo_app.view_signature(session["trace"], current(lab, session).facts)
    hash_map, token = model.model.hash_map, ids[0, position].item()
    assert view["token"]["signature"] == hash_map[token].tolist()
    B, H = model.config.num_buckets, model.config.num_hashes
    assert (view["H"], view["B"], view["V"]) == (H, B, len(hash_map))
    assert view["signatures"] == B**H
    scores = model.scores(ids)[0, position]
    for j, function in enumerate(view["functions"]):
        members = (hash_map[:, j] == hash_map[token, j]) & scores.isfinite()
        best = sorted(members.nonzero()[:, 0].tolist(), key=lambda i: -scores[i])
        listed = [chip["id"] for chip in function["chips"]]
        assert sorted(scores[listed].tolist()) == sorted(scores[best[: len(listed)]].tolist())
        assert set(listed) <= set(best) and len(listed) == min(10, len(best))
        assert function["more"] == len(best) - len(listed)
        assert [c["id"] for c in function["chips"] if c["marked"]] in ([token], [])
    assert sum(many for _, many in view["shared"]) == int(scores.isfinite().sum()) - 1
    assert all(n["shared"] < H for n in view["neighbours"])


@pytest.mark.parametrize("kind", ["mhf", "crowded", "half-lsh"])
def test_signature_follows_the_next_token(lab, kind):
    """The other signature shown is that of the token that comes next, at the end of the best."""
    for position in (1, -1):
        session = opened(lab, position=position, kind=kind)
        model, ids = of_model(lab, session)
        view = demo_app.view_signature(session["trace"], current(lab, session).facts)
        follows = ids[0, 2] if position == 1 else model.log_probs(ids)[0, -1].argmax()
        assert view["next"]["signature"] == model.model.hash_map[follows].tolist()


def test_signature_tries(lab):
    """The tries are SignatureTable.trace's, with the glyph of each owner."""
    session = opened(lab, kind="crowded")
    table, names = current(lab, session).model.signatures, current(lab, session).names
    most = max(table.rehashed, key=lambda i: len(table.trace(table.tokens[i])))
    session = demo_app.trace_again(lab, session, ids=[most], position=0)
    view = demo_app.view_signature(session["trace"], current(lab, session).facts)
    expected = table.trace(table.tokens[most])
    assert len(expected) > 2
    assert [(t["seed"], t["last"]) for t in view["tries"]] == [e[:2] for e in expected]
    for told, (*_, owner) in zip(view["tries"], expected, strict=True):
        raw = None if owner is None else list(names[owner])
        assert told["glyph"] == (raw and demo_app.glyph({"id": owner, "bytes": raw}))
    entries = Reader(drawn(lab, session)["signature"]).all("li")
    assert sum("taken by" in entry.text for entry in entries) >= len(expected) - 1


@pytest.mark.parametrize("kind", HASHED)
def test_gate(lab, kind):
    """View 3: the weights are those of model.embed(return_gate=True) and sum to 1 for each token;
    the norms are those of the rows of the table; the check is below 1e-5."""
    session = opened(lab, position=2, kind=kind)
    model, ids = of_model(lab, session)
    view = demo_app.view_gate(session["trace"])
    _, gate = model.embed(ids, return_gate=True)
    shares = [[s["share"] for s in row["segments"]] for row in view["rows"]]
    close(shares, gate[0], atol=1e-6)
    close([sum(row) for row in shares], [1.0] * len(shares), atol=1e-6)
    rows = model.table[range(model.config.num_hashes), model.model.hash_map[ids[0, 2]]]
    close([d["norm"] for d in view["detail"]], rows.norm(dim=-1))
    close([d["alpha"] for d in view["detail"]], gate[0, 2])
    assert 0 <= view["residual"] <= view["worst"] < 1e-5


def test_gate_scores_give_the_weights(lab):
    """The weights are the softmax of the scores beside them."""
    for row in demo_app.view_gate(opened(lab)["trace"])["rows"]:
        scores = torch.tensor([s["score"] for s in row["segments"]])
        close(scores.softmax(0), [s["share"] for s in row["segments"]])


def test_gate_of_a_long_text_shows_the_tokens_around(lab):
    """Of a text with more tokens than fit, those around the position are shown, it among them."""
    ids = (tokenizer().encode(TEXT) * 2)[:WINDOW]
    for position in (0, 13, 20, WINDOW - 1):
        session = demo_app.trace_again(lab, fresh(ids=ids), position=position)
        view = demo_app.view_gate(session["trace"])
        shown = [row["at"] for row in view["rows"]]
        assert position in shown and shown == list(range(shown[0], shown[-1] + 1))
        assert len(shown) + view["hidden"] == WINDOW


@pytest.mark.parametrize("kind", HASHED)
@pytest.mark.parametrize("position", [0, 2, -1])
def test_cascade(lab, kind, position):
    """View 4: bars are the softmax of head_logits, best first, and with the others sum to 1; mass
    is that of log P at τ = 1 over hash_map; the entropy is that of the whole distribution."""
    session = opened(lab, position=position, kind=kind)
    model, ids = of_model(lab, session)
    view = demo_app.view_cascade(session["trace"])
    p = model.head_logits(ids)[0, position].softmax(-1)  # (H, B)
    paper = model.scores(ids)[0, position].softmax(-1)  # (V,)
    close(p.sum(-1), [1.0] * len(p), atol=1e-6)
    for j, panel in enumerate(view["panels"]):
        bars = panel["bars"]
        close([bar["prob"] for bar in bars], p[j].topk(len(bars)).values, atol=1e-6)
        close([bar["prob"] for bar in bars], p[j, [bar["bucket"] for bar in bars]], atol=1e-6)
        close(panel["entropy_bits"], -(p[j] * p[j].log2()).nansum())
        for bar in bars:
            close(bar["mass"], paper[model.model.hash_map[:, j] == bar["bucket"]].sum())
            assert bar["more"] + len(bar["chips"]) == bar["num_tokens"]
        close([bar["wide"] for bar in bars], 100 * p[j, [b["bucket"] for b in bars]] / p[j].max())
    close(view["valid_mass"], model.valid_mass(ids)[0, position])
    assert view["most_bits"] == math.log2(model.config.num_buckets)


@pytest.mark.parametrize("kind", HASHED)
def test_compatible_tokens_become_fewer(lab, kind):
    """From function to function fewer real tokens match all chosen buckets, and less mass."""
    for position in range(5):
        panels = demo_app.view_cascade(opened(lab, position=position, kind=kind)["trace"])["panels"]
        for before, after in itertools.pairwise(panels):
            assert after["compatible"] <= before["compatible"]
            assert after["compatible_mass"] <= before["compatible_mass"]


def test_a_real_signature_leaves_one_token(lab):
    """With all ids of a token forced, that token alone is compatible after the last function."""
    session = opened(lab)
    model, _ = of_model(lab, session)
    forced = dict(enumerate(model.model.hash_map[tokenizer().encode(" two")[0]].tolist()))
    session = demo_app.trace_again(lab, session, force={str(j): b for j, b in forced.items()})
    assert demo_app.view_cascade(session["trace"])["panels"][-1]["compatible"] == 1


def test_cascade_targets_and_forces(lab):
    """The bar of the next token's bucket has the mark, that of a forced bucket is pressed."""
    session = opened(lab, position=1, force={"0": 5})
    model, ids = of_model(lab, session)
    view, target = demo_app.view_cascade(session["trace"]), model.model.hash_map[ids[0, 2]].tolist()
    page = Reader(show("cascade", view))
    for j, panel in enumerate(view["panels"]):
        assert panel["target"] == target[j]
        for bar in panel["bars"]:
            assert bar["target"] == (bar["bucket"] == target[j])
            assert bar["forced"] == (j == 0 and bar["bucket"] == 5)
            at = dict(data_function=str(j), data_bucket=str(bar["bucket"]))
            (button,) = page.all("button", **at)
            assert button.at["aria-pressed"] == str(bar["forced"]).lower()
            assert demo_app.percent(bar["prob"]) in button.text
    assert page.all("button", data_clear=None)
    assert not Reader(drawn(lab, opened(lab))["cascade"]).all("button", data_clear=None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", [1, -1])
def test_probability(lab, kind, position):
    """View 5: P is log_probs', paper that of τ = 1, joint exp of the scores, log p_j head_logits';
    the next token is always among the rows, and marked."""
    session = opened(lab, position=position, kind=kind)
    model, ids = of_model(lab, session)
    view = demo_app.view_probability(session["trace"])
    listed = [row["id"] for row in view["rows"]]
    log_p = model.log_probs(ids)[0, position]
    close([row["p"] for row in view["rows"]], log_p[listed].exp(), atol=1e-6)
    assert log_p[listed[:10]].tolist() == sorted(log_p.topk(10).values.tolist(), reverse=True)
    follows = ids[0, 2].item() if position == 1 else None
    assert [row["id"] for row in view["rows"] if row["next"]] == [follows] * (position == 1)
    if kind == "standard":
        assert view["H"] == 0 and view["valid_mass"] is None
        return
    scores = model.scores(ids)[0, position]
    log_p_j = model.head_logits(ids)[0, position].log_softmax(-1)  # (H, B)
    close([row["paper"] for row in view["rows"]], scores.softmax(-1)[listed], atol=1e-6)
    close([row["joint_prob"] for row in view["rows"]], scores[listed].exp(), atol=1e-6)
    for row in view["rows"]:
        close(row["log_p"], log_p_j.gather(1, model.model.hash_map[row["id"]].unsqueeze(1))[:, 0])
        close(sum(row["log_p"]), row["score"])
    close(view["valid_mass"], model.valid_mass(ids)[0, position], atol=1e-6)


def test_probability_is_what_the_table_shows(lab):
    """Each row of the HTML has its P, paper, joint and drawn probability, and the arithmetic."""
    view = demo_app.view_probability(opened(lab, position=1)["trace"], 0.7, 4, 0.9)
    rows = Reader(show("probability", view)).all("tr", data_sum=None)
    assert len(rows) == len(view["rows"])
    for row, values in zip(rows, view["rows"], strict=True):
        for p in (values["p"], values["paper"]):
            assert demo_app.percent(p) in row.text
        assert f"{values['joint_prob']:.2g}" in row.text
        assert f"{values['score']:.2f}" in row.text
        assert all(f"{x:.2f}" in row.text for x in values["log_p"])
        assert f"{values['paper']:.4f}" in row.at["data-sum"]


@pytest.mark.parametrize("kind", HASHED)
def test_the_joint_mass_and_the_rest_are_everything(lab, kind):
    """The two parts of the bar are the model's valid mass and 1 less it: 100 % together, neither
    below 0, not even where the valid mass is 1 and rounding."""
    for position in range(7):
        session = opened(lab, position=position, kind=kind)
        model, ids = of_model(lab, session)
        html = drawn(lab, session)["probability"]
        (bar,) = [e for e in Reader(html).all("div") if "mass" in e.at.get("class", "").split()]
        parts = [e for e in Reader(html).all("div", style=None) if widths([e])][:2]
        shares = widths(parts)
        close(shares[0], 100 * model.valid_mass(ids)[0, position], atol=1e-3)
        close(sum(shares), 100.0, atol=1e-9)
        assert min(shares) >= 0 and not re.search(r"[-−]\d", bar.at["aria-label"])


SETTINGS = [(1.0, 0, 1.0), (0.3, 0, 1.0), (3.0, 5, 1.0), (1.0, 0, 0.5), (0.8, 40, 0.9), (0.0, 0, 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_sampling_is_the_librarys(lab, kind, settings):
    """What the sliders show is mhf.sampling_weights of the model's log_probs, and sums to 1."""
    session = opened(lab, position=2, kind=kind)
    model, ids = of_model(lab, session)
    temperature, top_k, top_p = settings
    found = demo_app.sampling(session["trace"], *settings)
    log_p = model.log_probs(ids)[:, 2]
    weights, order = mhf.sampling_weights(log_p, temperature, top_k or None, top_p)
    weights = weights[0] / weights.sum()
    order = range(len(weights)) if order is None else order[0].tolist()
    expected = dict(zip(order, weights.tolist(), strict=True))
    close([found.get(i, 0.0) for i in expected], list(expected.values()), atol=1e-6)
    assert found.keys() <= expected.keys() and sum(found.values()) == pytest.approx(1, abs=1e-6)
    if top_k or top_p < 1 or not temperature:  # else float32 leaves some of the last ones 0
        assert found.keys() == {i for i, weight in expected.items() if weight}


@pytest.mark.parametrize("kind", ["mhf", "standard", "untokenized"])
def test_what_is_drawn(lab, kind):
    """kept and rest of view 5 count all tokens; each row has its own share, 0 if it was cut."""
    trace = opened(lab, kind=kind)["trace"]
    for settings in SETTINGS:
        found = demo_app.sampling(trace, *settings)
        view = demo_app.view_probability(trace, *settings)
        assert [row["drawn"] for row in view["rows"]] == [
            found.get(row["id"], 0.0) for row in view["rows"]
        ]
        assert view["kept"] == len(found)
        close(view["rest"] + sum(row["drawn"] for row in view["rows"]), 1.0, atol=1e-6)


def test_temperature_to_zero_is_the_argmax(lab):
    """At 0 and close to it, all of P is on the best token of log_probs."""
    session = opened(lab)
    model, ids = of_model(lab, session)
    best = model.log_probs(ids)[0, -1].argmax().item()
    for temperature in (0.0, 1e-7, 1e-3):
        found = demo_app.sampling(session["trace"], temperature, 0, 1.0)
        assert max(found, key=found.get) == best and found[best] > 0.999


def test_shared_scores_are_no_probability_of_unused_ids(lab):
    """Ids without a token are never among what can be drawn."""
    session = opened(lab, kind="unused")
    found = demo_app.sampling(session["trace"], 3.0, 0, 1.0)
    assert set(range(340)) == found.keys()


def written(lab, session, count=8, cuts=CUTS, seed=0, **how):
    """The sessions that generate gives, one for each token, and the last one with its trace."""
    return list(demo_app.generate(lab, session, count, *cuts, seed, **how))


@pytest.mark.parametrize("kind", KINDS)
def test_generated_tokens(lab, kind):
    """View 6: every generated token has its P, exp of log_probs after its context, and leads to
    the step before it; given tokens have none; candidates are the best of log_probs."""
    session = written(lab, opened(lab, "5 70" if kind == "untokenized" else "the one", kind=kind))
    session, start = session[-1], session[-1]["start"]
    model, ids = of_model(lab, session)
    view = demo_app.view_generate(session, current(lab, session).names)
    log_p = model.log_probs(ids)[0]
    for row in view["rows"]:
        assert row["generated"] == (row["at"] >= start)
        expected = log_p[row["at"] - 1, ids[0, row["at"]]].exp() if row["generated"] else None
        assert row["p"] == (expected and pytest.approx(expected.item(), rel=1e-4, abs=1e-6))
    buttons = Reader(show("generate", view)).all("button", data_pick=None)
    assert [int(b.at["data-pick"]) + 1 for b in buttons] == list(range(start, ids.shape[1]))
    assert demo_app.percent(view["rows"][-1]["p"]) in buttons[-1].text
    best = log_p[-2].topk(10)  # the last token is chosen, at the step before it
    candidates = view["candidates"]
    assert {c["id"] for c in candidates} == set(best.indices.tolist())
    close([c["p"] for c in candidates], best.values.exp(), atol=1e-6)


def test_vocabulary(lab):
    """View 7: the words' signatures and tries are the model's, parameters added are 0, and the
    table's size is num_parameters'."""
    session = demo_app.add_words(lab, opened(lab), "zebra\n漢字仮名\n🙂x")
    checkpoint = current(lab, session)
    table = checkpoint.model.signatures
    view = demo_app.view_vocabulary(session, checkpoint)
    for i, word in enumerate(view["words"], 340):
        assert word["id"] == i and word["signature"] == table.ids[i].tolist()
        assert word["tries"] == len(table.trace(table.tokens[i])) == word["taken"] + 1
    size = checkpoint.model.num_parameters()
    assert (view["added"], view["table_size"], view["V"]) == (0, size["table"], 343)
    assert view["standard"] == size["standard_table"] == 343 * 16
    rows = Reader(show("vocabulary", view)).all("tr")
    assert sum("zebra" in row.text and "0" in row.text for row in rows) == 1


def test_vocabulary_growth(lab):
    """The lines of the chart are V·D, and H·B·D of this and of the paper's tables, at its D."""
    session = opened(lab)
    view = demo_app.view_vocabulary(session, current(lab, session))
    growing, *flat = view["series"].values()
    assert growing == [(v, 16 * v) for v, _ in growing] and growing[-1][0] == 1_000_000
    assert [{n for _, n in line} for line in flat] == [
        {3 * 10_624 * 16},
        {4 * 16_384 * 16},
        {3 * 64 * 16},
    ]


def test_many_re_hashes_of_own_words(lab):
    """In a crowded table the words are re-hashed, and the view counts how often."""
    session = demo_app.add_words(
        lab, opened(lab, kind="crowded"), "\n".join(f"zq{i}" for i in range(20))
    )
    view = demo_app.view_vocabulary(session, current(lab, session))
    assert max(word["taken"] for word in view["words"]) > 0


PAIRS = [("mhf", "mhf"), ("mhf", "other"), ("mhf", "standard"), ("unused", "crowded")]


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_compare(lab, pair):
    """View 9: both columns are the models' own log_probs, matched by the tokens' bytes, with their
    difference and the ranks."""
    sessions = [opened(lab, p, kind=kind) for p, kind in zip((PROMPT, "not to be"), pair)]
    (one, x), (two, y) = (of_model(lab, session) for session in sessions)
    names = [current(lab, session).names for session in sessions]
    view = demo_app.view_compare(*(s["trace"] for s in sessions), *names, "A", "B")
    p_a, p_b = (m.log_probs(ids)[0, -1].exp() for m, ids in ((one, x), (two, y)))
    by_glyph = {}
    for i, raw in enumerate(names[0][:340]):
        by_glyph.setdefault(demo_app.glyph({"id": i, "bytes": list(raw)}), []).append(i)
    shown = set()
    for row in view["rows"]:
        found = [
            i
            for i in by_glyph[row["glyph"]]
            if math.isclose(p_a[i], row["p_a"], rel_tol=1e-3, abs_tol=1e-9)
        ]
        (i,) = found
        shown.add(i)
        close(row["p_b"], p_b[i], atol=1e-6)
        close(row["difference"], p_b[i] - p_a[i], atol=1e-6)
        assert row["rank_a"] == 1 + int((p_a > p_a[i]).sum())
        assert row["rank_b"] == 1 + int((p_b > p_b[i]).sum())
        assert row["up"] == row["rank_a"] - row["rank_b"]
    assert shown == {*p_a.topk(10).indices.tolist(), *p_b.topk(10).indices.tolist()}


def test_compare_with_tokens_that_only_one_has(lab):
    """A token that the other vocabulary lacks has no number there, and no difference."""
    a = opened(lab)
    b = demo_app.add_words(lab, a, "zebra")
    best = b["trace"]["top_tokens"][0]
    best |= {"id": 340, "bytes": list(b" zebra")}  # as if the new word were the most probable
    names = [current(lab, s).names for s in (a, b)]
    view = demo_app.view_compare(a["trace"], b["trace"], *names, "A", "B")
    (row,) = [row for row in view["rows"] if "zebra" in row["glyph"]]
    assert row["p_a"] is None and row["rank_a"] is None and "difference" not in row
    close(row["p_b"], math.exp(b["trace"]["scores"][340] / 1.25) / sum_of_exp(b["trace"]))
    assert show("compare", view)


def sum_of_exp(trace):
    return sum(math.exp(s / trace["calibration"]) for s in trace["scores"])


def test_compare_quantities(lab):
    """Valid mass, τ and entropies of both are the models', with their differences."""
    sessions = [opened(lab, kind=kind) for kind in ("mhf", "other")]
    names = [current(lab, s).names for s in sessions]
    view = demo_app.view_compare(*(s["trace"] for s in sessions), *names, "A", "B")
    for side, session in zip("ab", sessions, strict=True):
        model, ids = of_model(lab, session)
        log_p = model.log_probs(ids)[0, -1]
        p = model.head_logits(ids)[0, -1].softmax(-1)
        expected = [model.valid_mass(ids)[0, -1].item(), model.config.calibration]
        expected += [-(log_p.exp() * log_p).sum().item() / math.log(2)]
        expected += (-(p * p.log2()).sum(-1)).tolist()
        close([q[side] for q in view["quantities"]], expected)
    for q in view["quantities"]:
        close(q["difference"], q["b"] - q["a"])


@pytest.mark.parametrize("kind", KINDS)
def test_views_are_pure(lab, kind):
    """Views neither change session, trace and facts nor give other values the second time."""
    session = opened(lab, position=2, kind=kind)
    checkpoint = current(lab, session)
    before = copy.deepcopy((session, checkpoint.facts, checkpoint.names))
    first = [drawn(lab, session, *settings) for settings in SETTINGS]
    names = checkpoint.names
    demo_app.view_compare(session["trace"], session["trace"], names, list(names), "", "")
    assert (session, checkpoint.facts, checkpoint.names) == before
    assert [drawn(lab, session, *settings) for settings in SETTINGS] == first


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_is_json(lab, kind):
    """What views read is plain JSON, and reads back as the same views."""
    session = opened(lab, position=1, kind=kind)
    again = json.loads(json.dumps(session, allow_nan=False))
    assert drawn(lab, again) == drawn(lab, session)


# ---------------------------------------------------------------------------------------------
# Numbers, glyphs, charts
# ---------------------------------------------------------------------------------------------

GLYPHS = {
    b" the": "␣the",
    b"\n": "↵",
    b"\t": "␉",
    b"\r\n": "␍↵",
    b"   ": "␣␣␣",
    b"\x00": "␀",
    b"\x7f": "\\u007f",
    b"\xff\xfe": "\\xff\\xfe",
    b"\xe6\xbc": "\\xe6\\xbc",
    "漢字".encode(): "漢字",
    "🙂".encode(): "🙂",
    "\u200f".encode(): "\\u200f",  # right-to-left mark
    "\u202e".encode(): "\\u202e",  # right-to-left override
    "\u200b".encode(): "\\u200b",  # zero-width space
    "\u2028".encode(): "\\u2028",  # line separator
    "\xa0".encode(): "\\u00a0",  # no-break space
    "\ufeff".encode(): "\\ufeff",
    b"": "∅",
}


@pytest.mark.parametrize("raw", GLYPHS, ids=repr)
def test_glyph(raw):
    """Blanks, controls, marks of direction and broken UTF-8 can be seen; text stays text."""
    assert demo_app.glyph({"id": 7, "bytes": list(raw)}) == GLYPHS[raw]


def test_glyph_without_bytes():
    """A token without known bytes is its number."""
    assert demo_app.glyph({"id": 7, "bytes": None}) == demo_app.glyph({"id": 7}) == "#7"


def test_a_long_glyph_is_cut():
    """A token of 1,000 characters shows its start and that there is more."""
    glyph = demo_app.glyph({"id": 7, "bytes": [97] * 1000})
    assert len(glyph) < 40 and glyph.startswith("aaaa") and glyph.endswith("…")


PERCENTS = {
    None: "–",
    0.0: "0 %",
    1.0: "100 %",
    0.5: "50 %",
    0.12345: "12.3 %",
    0.034567: "3.5 %",
    0.00012345: "0.012 %",
    0.1: "10 %",
    1e-5: "0.001 %",
    1e-7: "1e-5 %",
    3e-12: "3e-10 %",
}


@pytest.mark.parametrize("p", PERCENTS, ids=str)
def test_percent(p):
    """Two or three digits; what is more than 0 is never a plain 0."""
    assert demo_app.percent(p) == PERCENTS[p]


def test_percent_is_never_empty():
    """No probability above 0 is shown as 0, none below 1/2 as more than it."""
    for exponent in range(1, 45):
        text = demo_app.percent(3 * 10.0**-exponent)
        assert float(text.split()[0]) == pytest.approx(300 * 10.0**-exponent, rel=0.05)


def test_count():
    """Whole numbers have separators, large ones their power of ten."""
    assert [demo_app.count(n) for n in (0, 999, 8192, 10**14)] == [
        "0",
        "999",
        "8,192",
        "100,000,000,000,000",
    ]
    assert demo_app.count(17_592_186_044_416 * 100).replace(" ", "") == "1.8·10^15"


def placed(chart, axis):
    """The coordinates of each line's points."""
    lines = [line["points"].split() for line in chart["lines"]]
    return [[float(point.split(",")[axis]) for point in line] for line in lines]


@pytest.mark.parametrize("log", [False, True])
def test_chart_places_points(log):
    """The corners of the data are those of the box; what is between is in proportion, on a
    logarithmic scale in that of the logarithms; a larger y stands higher."""
    series = {"a": [(1, 10), (10, 1000), (100, 100_000)], "b": [(1, 1000), (100, 10)]}
    chart = demo_app.chart(series, "x", "y", log)
    (a, b), (up_a, up_b) = placed(chart, 0), placed(chart, 1)
    assert (a[0], a[2]) == (b[0], b[1]) and a[0] < a[1] < a[2] and up_a[0] > up_a[1] > up_a[2]
    assert up_b[1] == up_a[0]
    middle = lambda low, at, high: (at - low) / (high - low)  # noqa: E731
    assert middle(*a) == pytest.approx(0.5 if log else 9 / 99, abs=1e-3)
    assert middle(*up_a) == pytest.approx(0.5 if log else 990 / 99_990, abs=1e-3)
    assert [line["name"] for line in chart["lines"]] == ["a", "b"]


def test_chart_ticks_stand_at_their_values():
    """A tick's place is that of the value it names."""
    chart = demo_app.chart({"a": [(1, 10), (1000, 10_000)]}, "x", "y", log=True)
    (xs,), (ys,) = placed(chart, 0), placed(chart, 1)
    x = {label: place for place, label in chart["x_ticks"]}
    y = {label: place for place, label in chart["y_ticks"]}
    assert x["1"] == pytest.approx(xs[0]) and x["1K"] == pytest.approx(xs[1])
    assert y["10"] == pytest.approx(ys[0]) and y["10K"] == pytest.approx(ys[1])


@pytest.mark.parametrize("line", [[(1, 5.0)], [(1, 5.0), (2, 5.0)], [(3, 1.0), (3, 2.0)]], ids=str)
def test_chart_of_one_value(line):
    """A single point, or points of one x or y, have a place, too."""
    chart = demo_app.chart({"a": line, "empty": []}, "x", "y")
    assert all(math.isfinite(z) for axis in (0, 1) for row in placed(chart, axis) for z in row)
    assert len(chart["lines"]) == 1


def test_chart_of_nothing():
    """Without points there is no chart."""
    assert demo_app.chart({"a": []}, "x", "y") is None and demo_app.chart({}, "x", "y") is None


# ---------------------------------------------------------------------------------------------
# Facts of a whole vocabulary
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", HASHED)
def test_loads(lab, kind):
    """Over all loads there are B−1 buckets, observed and, within 1 %, expected; the tokens in them
    are those of the table but for the pad; expected is the binomial distribution."""
    checkpoint = lab.get(kind)
    table, rows = checkpoint.model.signatures, checkpoint.facts["loads"]
    B, n = table.num_buckets, int(table.assigned.sum()) - 1
    close(sum(row["observed"] for row in rows), B - 1)
    close(sum(row["tokens"] * row["observed"] for row in rows), n)
    assert sum(row["expected"] for row in rows) == pytest.approx(B - 1, rel=0.01)
    p = 1 / (B - 1)
    for row in rows:
        k = row["tokens"]
        binomial = math.comb(n, k) * p**k * (1 - p) ** (n - k) * (B - 1)
        assert row["expected"] == pytest.approx(binomial, rel=1e-6)


def test_observed_loads(lab):
    """Observed is the mean over the functions of how many buckets hold so many tokens."""
    table = lab.get("mhf").model.signatures
    held = [torch.bincount(column, minlength=64)[1:].tolist() for column in table.ids.T]
    for row in lab.get("mhf").facts["loads"]:
        assert row["observed"] == sum(load.count(row["tokens"]) for load in held) / 3


def pairs_by_hand(table):
    """The pairs of token ids that share H−1 ids or more."""
    real = table.assigned.nonzero()[:, 0].tolist()
    ids = table.ids.tolist()
    least = table.num_hashes - 1
    return [
        (a, b)
        for a, b in itertools.combinations(real, 2)
        if sum(x == y for x, y in zip(ids[a], ids[b], strict=True)) >= least
    ]


@pytest.mark.parametrize("kind", ["mhf", "crowded", "unused", "half-lsh", "lsh"])
def test_close_pairs(lab, kind):
    """The pairs that share H−1 ids or more are as many as brute force finds, and the example, in
    token ids, is one of them."""
    checkpoint = lab.get(kind)
    expected = pairs_by_hand(checkpoint.model.signatures)
    assert checkpoint.facts["close_pairs"] == len(expected) > 0
    assert tuple(sorted(checkpoint.facts["close_pair"])) in expected


def test_the_close_pair_counts_unused_ids():
    """With unused ids before them, the pair's ids are still those of the tokens."""
    table = mhf.SignatureTable(3, 8)
    table.extend([None, None, *(b"%d" % i for i in range(60))], pad_id=2)
    config = mhf.Config(num_hashes=3, num_buckets=8, hidden_size=4, bottle_neck_dim=2)
    found = demo_app.facts(mhf.MultiHashFormer(config, table))
    assert tuple(sorted(found["close_pair"])) in pairs_by_hand(table)


def test_no_close_pairs():
    """Where no two tokens share so many ids, there are 0, and no example."""
    table = mhf.SignatureTable(4, 5000)
    table.extend([b"%d" % i for i in range(20)], pad_id=0)
    config = mhf.Config(num_hashes=4, num_buckets=5000, hidden_size=4, bottle_neck_dim=2)
    found = demo_app.facts(mhf.MultiHashFormer(config, table))
    assert found["close_pairs"] == 0 and found["close_pair"] is None


@pytest.mark.parametrize("kind", HASHED)
def test_sizes(lab, kind):
    """V, D, H, B, the window and the parameters are the model's."""
    checkpoint = lab.get(kind)
    found, config = checkpoint.facts, checkpoint.model.config
    assert (found["V"], found["D"], found["window"]) == (config.vocab_size, 16, WINDOW)
    assert (found["H"], found["B"]) == (config.num_hashes, config.num_buckets)
    assert found["parameters"] == checkpoint.model.num_parameters()
    assert found["rehashed"] == len(checkpoint.model.signatures.rehashed)


def assert_re_hashed(found, table):
    """The example is the trace of the table's token with most tries, whose signature was taken."""
    token = bytes(found["token"]["bytes"])
    tries = table.trace(token)
    told = [(t["seed"], t["last"], t["owner"] and t["owner"]["id"]) for t in found["tries"]]
    assert told == tries and len(tries) > 1 and tries[0][2] is not None
    assert len(tries) == max(len(table.trace(table.tokens[i])) for i in table.rehashed)
    assert found["token"]["signature"] == table.ids[table.tokens.index(token)].tolist()
    for t in found["tries"][:-1]:  # the owner has the signature that was tried
        owner = table.ids[table.tokens.index(bytes(t["owner"]["bytes"]))].tolist()
        assert owner == [*found["token"]["signature"][:-1], t["last"]]
    assert (found["rehashed"], found["num_buckets"]) == (len(table.rehashed), table.num_buckets)


def test_an_own_re_hash(lab):
    """A crowded model shows a token of its own that was re-hashed."""
    found = lab.get("crowded").facts["rehash"]
    assert found["own"]
    assert_re_hashed(found, lab.get("crowded").model.signatures)


@pytest.mark.parametrize("kind", ["mhf", "unused", "half-lsh"])
def test_a_re_hash_in_a_smaller_table(lab, kind):
    """Where nothing was re-hashed, the same tokens are, in a table with fewer buckets."""
    found, tokens = lab.get(kind).facts["rehash"], tokenizer().all_bytes()
    assert not lab.get(kind).model.signatures.rehashed and not found["own"]
    table = mhf.SignatureTable(3, found["num_buckets"])
    table.extend(tokens)
    assert found["num_buckets"] < 64 and found["tokens"] == len(tokens)
    assert_re_hashed(found, table)


@pytest.mark.parametrize("kind", ["single", "lsh"])
def test_no_re_hash_where_signatures_are_shared(lab, kind):
    """Where tokens share signatures, nothing is re-hashed, and nothing is invented."""
    assert lab.get(kind).facts["rehash"] is None


def test_no_re_hash_without_the_tokens():
    """Stored ids without their tokens give no example."""
    table = mhf.SignatureTable.from_ids(torch.tensor([[0, 0], [1, 2], [2, 1]]), 0, 8)
    config = mhf.Config(num_hashes=2, num_buckets=8, hidden_size=4, bottle_neck_dim=2)
    assert demo_app.facts(mhf.MultiHashFormer(config, table))["rehash"] is None


# ---------------------------------------------------------------------------------------------
# No random numbers, no constants posing as data
# ---------------------------------------------------------------------------------------------

SOURCE = Path(demo_app.__file__).read_text(encoding="utf-8")
INVENTED = re.compile(
    r"random|rand(n|int|perm)?|randn_like|rand_like|linspace|arange|normal_?|uniform_?|shuffle|"
    r"bernoulli|multinomial|manual_seed|default_rng|urandom|uuid\d|secrets|sample"
)


def test_nothing_is_invented():
    """No name in the app makes random or regular numbers; `visible` is all it takes of sample."""
    tree = ast.parse(SOURCE)
    called = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(tree)
        if isinstance(node, (ast.Attribute, ast.Name))
    }
    imported = {
        name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    }
    assert not {name for name in called | imported if INVENTED.fullmatch(name)}
    assert not imported & {"random", "secrets", "uuid"}


def literals(function):
    """Numbers that a function has in a list or tuple, or as the argument of a format."""
    tree = ast.parse(inspect.getsource(inspect.unwrap(function)))
    lists = [node for node in ast.walk(tree) if isinstance(node, (ast.List, ast.Tuple))]
    return [
        numbers
        for node in lists
        if len(numbers := [e.value for e in node.elts if is_number(e)]) >= 2
    ]


def is_number(node):
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def test_views_hold_no_data():
    """No view has a list of numbers, but for the sizes of a vocabulary that view 7 computes at."""
    views = [f for name, f in vars(demo_app).items() if name.startswith("view_")]
    assert len(views) == 9
    found = {f.__name__: literals(f) for f in views if literals(f)}
    assert found.keys() <= {"view_vocabulary"}


def test_templates_hold_no_data():
    """No template has a width or a decimal number of its own but for the bound of the check."""
    text = SOURCE[SOURCE.index("MACROS = ") : SOURCE.index("def show(")]
    assert not re.search(r"(width|--p):\s*\d", text)
    assert set(re.findall(r"\d+\.\d+|\d+e-\d+|\d+ ?%(?!})", text)) <= {"1e-5"}


def leaves(node, path=""):
    """(family, container, key) of every number: a family is a path without its indices."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        family = f"{path}.{key}" if isinstance(node, dict) else f"{path}[]"
        if isinstance(value, (dict, list)):
            yield from leaves(value, family)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield family, node, key


LOADS = ("observed", "expected")


def perturbed(trace, wanted, kind=(int, float)):
    """A copy of the trace in which the numbers of some families are others, each its own."""
    trace = copy.deepcopy(trace)
    for n, (family, node, key) in enumerate(leaves(trace)):
        if wanted(family) and isinstance(node[key], kind):
            value = node[key]
            factor = 1.5 + 0.25 * math.sin(n)  # another for each, so that no ratio stays
            node[key] = value + 1 + n % 7 if isinstance(value, int) else value * factor
    return trace


def all_views(lab, session, trace):
    return drawn(lab, session | {"trace": trace}, 1.0, 0, 0.99)


NAMES = r".*(id|bytes\[\]|bucket|signature\[\]|\.function|\.schema|\.position|num_hashes)$"
UNSEEN = (  # numbers that no view shows: others say the same
    r"\.functions\[\]\.top\[\]\.log_prob|.*nearest\[\]\.(mass|num_tokens)|.*\.rank"
    r"|\.signature\.functions\[\]\.mass|\.next\..*|\.functions\[\]\.forced"
)


def test_every_number_of_the_trace_is_shown(lab):
    """Whatever number of the trace changes, some view changes: none shows another instead."""
    session = opened(lab, position=2)
    before = all_views(lab, session, session["trace"])
    families = {family for family, *_ in leaves(session["trace"])}
    families = {f for f in families if not re.fullmatch(f"{NAMES}|{UNSEEN}", f)}
    assert len(families) >= 25
    for family in sorted(families):
        after = all_views(lab, session, perturbed(session["trace"], family.__eq__))
        assert after != before, f"{family} changes nothing"


def pieces_with_numbers(html):
    """The pieces of text and of what is said beside that have a decimal number or a percentage,
    None for the others, and all widths."""
    read = Reader(html)
    said = [v for e in read.elements for k, v in e.at.items() if k in ("aria-label", "data-sum")]
    decimal = re.compile(r"\d\.\d|\de-\d|\d %")
    texts = [text if decimal.search(text) else None for text in read.pieces + said]
    return texts, [f"{width:.6g}" for width in widths(read.elements)]


@pytest.mark.parametrize("view", ["signature", "gate", "cascade", "probability", "generate"])
def test_no_number_stays_when_the_trace_changes(lab, view):
    """With every number of the trace another, every decimal number and every width in a view is
    another, but for what comes from the facts, the widest bar, and the bound of the check."""
    session = opened(lab, position=2)
    before = pieces_with_numbers(all_views(lab, session, session["trace"])[view])
    trace = perturbed(session["trace"], lambda family: not re.fullmatch(NAMES, family), float)
    trace["signature"]["num_buckets"] = 100  # of which the largest entropy is the logarithm
    trace["valid_mass"] = 0.3
    after = pieces_with_numbers(all_views(lab, session, trace)[view])
    for old, new in zip(before, after, strict=True):
        pairs = [(a, b) for a, b in zip(old, new, strict=True) if None not in (a, b)]
        stays = {a.strip() for a, b in pairs if a == b}
        if view == "signature":  # how the loads of all tokens are spread is no part of a trace
            facts = show("signature", demo_app.view_signature(trace, lab.get("mhf").facts))
            of_facts = [f"{row[k]:.1f}" for row in lab.get("mhf").facts["loads"] for k in LOADS]
            stays -= {*of_facts, *[f"{w:.6g}" for w in widths(Reader(facts).elements)]}
            stays = {text for text in stays if "expected by chance" not in text}
        stays = {text for text in stays if "top-p" not in text and re.search("[1-9]", text)}
        assert stays <= {"100"}, stays
    assert sum(text is not None for text in before[0]) >= 3


# ---------------------------------------------------------------------------------------------
# Text of users is text
# ---------------------------------------------------------------------------------------------


def replaced(values, attack, skip=("url",)):
    """The values with every text in them replaced, and how many were."""
    if isinstance(values, dict):
        return {k: v if k in skip else replaced(v, attack) for k, v in values.items()}
    if isinstance(values, (list, tuple)):
        return [replaced(v, attack) for v in values]
    return attack if isinstance(values, str) else values


@pytest.fixture(scope="module")
def view_values(lab):
    """Of every template, values that fill all of it."""
    session = demo_app.add_words(lab, opened(lab, "the one", position=0), "zebra\nyak")
    session = written(lab, session | {"notice": "a notice"})[-1]
    forced = demo_app.trace_again(lab, opened(lab, position=1), force={"0": 3})
    trace, checkpoint = forced["trace"], current(lab, session)
    crowded = opened(lab, position=1, kind="crowded")
    names = [current(lab, s).names for s in (forced, session)]
    run = dict(name="mhf", state="training", parameters="1 (2)", step="50", loss="1.5")
    run |= dict(tokens_per_second="1", perplexity="2", top1="3", valid_mass="0.5")
    run |= dict(sample="text", sample_step="50", curve=[(1, 2.0), (50, 1.5)])
    return {
        "tokens": demo_app.view_tokens(session | {"notice": "a notice"}),
        "signature": demo_app.view_signature(crowded["trace"], lab.get("crowded").facts),
        "gate": demo_app.view_gate(trace),
        "cascade": demo_app.view_cascade(trace),
        "probability": demo_app.view_probability(trace),
        "generate": demo_app.view_generate(session, checkpoint.names),
        "vocabulary": demo_app.view_vocabulary(session, checkpoint),
        "compare": demo_app.view_compare(trace, session["trace"], *names, "label A", "label B"),
        "train": demo_app.view_train([run, run | {"name": "standard"}]),
        "tour": {"number": 1, "total": 9, "title": "title", "text": "text"},
        "examples": {"examples": [("label", "reason"), ("label", "reason")]},
        "code": {"text": "some code"},
        "link": {"url": "?prompt=x"},
    }


@pytest.mark.parametrize("name", demo_app.TEMPLATES)
@pytest.mark.parametrize("attack", ATTACKS)
def test_text_is_escaped_wherever_it_stands(view_values, name, attack):
    """Whatever text stands where a view has text, it comes out as that text: there is no element
    and no attribute that harmless words do not make, and no text that is lost."""
    values = view_values[name]
    said = lambda text: (text or "").replace("␣", " ")  # noqa: E731
    word = "harmless words"
    harmless, read = (Reader(show(name, replaced(values, text, ()))) for text in (word, attack))
    said_beside = [v for e in harmless.elements for v in e.at.values() if v]
    assert word in said(harmless.text) or any(word in value for value in said_beside)
    for a, b in zip(harmless.elements, read.elements, strict=True):
        assert a.tag == b.tag and a.at.keys() == b.at.keys()
        for key, value in a.at.items():
            assert said(value).replace(word, attack) == said(b.at[key])
        assert said(a.text).replace(word, attack) == said(b.text)


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_as_prompt_and_word(lab, attack):
    """Typed as a prompt and added as a token, an attack makes no element or attribute in any view;
    the token's text can be read."""
    benign = {}
    for name, html in drawn(lab, demo_app.add_words(lab, opened(lab), "zebra")).items():
        benign[name] = Reader(html).shape()
    session = demo_app.add_words(lab, opened(lab, f"the {attack} of", -2), attack)
    glyph = demo_app.glyph(session["trace"]["tokens"][session["position"]])
    assert session["trace"]["tokens"][1]["bytes"] == list(f" {attack}".encode())
    views = drawn(lab, session | {"notice": attack})
    for name, html in views.items():
        tags = {tag for tag, *_ in Reader(html).shape()}
        known = {tag for tag, *_ in benign[name]} | {"p", "small", "br"}
        assert tags <= known and not tags & {"img", "script", "svg/onload"}
        names = {k for e in Reader(html).elements for k in e.at}
        assert not {k for k in names if k.startswith("on") or k == "src"}
    assert glyph in Reader(views["tokens"]).text and attack in Reader(views["tokens"]).text
    (link,) = Reader(views["link"]).all("a", href=None)
    assert urllib.parse.parse_qs(link.at["href"][1:])["prompt"] == [f"the {attack} of"]


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_error_with_a_users_text_has_no_elements(attack):
    """A refusal that repeats what was typed repeats it as text."""

    def work():
        raise ValueError(f"not {attack}")

    with pytest.raises(demo_app.gr.Error) as error:
        demo_app.refusing(work)()
    assert not Reader(error.value.message).elements
    assert Reader(error.value.message).text == f"not {attack}"


def test_an_export_cannot_leave_its_place(lab):
    """The exported JSON has no '<' that could end a script, and reads back as it was."""
    session = opened(lab, "</script><b>")
    text = Page.on_export(None, session)
    assert "<" not in text
    told = json.loads(text)
    assert told["prompt"] == "</script><b>" and told["trace"] == session["trace"]
    assert told["ids"] == session["ids"] and isinstance(told["schema"], int)
