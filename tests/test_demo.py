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
import shutil
import types
import urllib.parse
import warnings
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from conftest import FIXTURES, close, one_sentence, random_checkpoint

import demo_app
import mhf
from demo_app import FRESH, Lab, Page, current, draw, open_prompt, show
from support import explain
from support.tokenizer import Tokenizer

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEXT = "".join(f"the {a} of {b}, or not to be {a}\n" for a in NUMBERS for b in NUMBERS)
CORPUS = TEXT + "漢字仮名交じり文の例 " * 40 + "éééé 🙂🙂 \u200b\u0301 \t\t " * 20
PROMPT = "the one of two, or not to be three"
WINDOW = 64
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
    return Tokenizer.train([CORPUS], 340)


def make(run, step="step-1", **fields):
    """A run folder whose last checkpoint is a `random_checkpoint`."""
    random_checkpoint(run / step, tokenizer(), max_position_embeddings=WINDOW, **fields)
    (run / "last").write_text(step + "\n", encoding="utf-8")
    return run


KINDS = {  # the first is the one that most tests use
    "mhf": {},
    "crowded": {"num_hashes": 2, "num_buckets": 32},
    "unused": {"unused": 5},
    "single": {"num_hashes": 1},
    "lsh": {"num_hashes": 2, "num_lsh": 2},
    "half-lsh": {"num_lsh": 1},
    "untokenized": {"tokenizer": False},
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


@pytest.fixture(scope="module", autouse=True)
def not_shipped():
    """The checkpoint beside the app is not there: its numbers are no test's business."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_app, "SHIPPED", Path("nowhere"))
        yield


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
        glyph = demo_app.glyph({"id": i, "text": names[i]})
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
    scores = model.token_scores(model(ids))[0, position]
    for j, function in enumerate(view["functions"]):
        members = (hash_map[:, j] == hash_map[token, j]) & scores.isfinite()
        best = sorted(members.nonzero()[:, 0].tolist(), key=lambda i: -scores[i])
        listed = [chip["id"] for chip in function["chips"]]
        assert sorted(scores[listed].tolist()) == sorted(scores[best[: len(listed)]].tolist())
        assert set(listed) <= set(best) and len(listed) == min(10, len(best))
        assert function["more"] == len(best) - len(listed)
        assert [c["id"] for c in function["chips"] if c["marked"]] in ([token], [])
    assert sum(many for _, many in view["shared"]) == int(scores.isfinite().sum()) - 1
    assert all(0 < n["shared"] <= H for n in view["neighbours"])


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
    most = max(
        lab.get("crowded").facts["rehashed"], key=lambda i: len(table.trace(table.tokens[i]))
    )
    session = demo_app.trace_again(lab, session, ids=[most], position=0)
    view = demo_app.view_signature(session["trace"], current(lab, session).facts)
    expected = table.trace(table.tokens[most])
    assert len(expected) > 2
    assert [(t["seed"], t["last"]) for t in view["tries"]] == [e[:2] for e in expected]
    for told, (*_, owner) in zip(view["tries"], expected, strict=True):
        assert told["glyph"] == (owner and demo_app.glyph({"id": owner, "text": names[owner]}))
    entries = Reader(drawn(lab, session)["signature"]).all("li")
    assert sum("taken by" in entry.text for entry in entries) == len(expected) - 1


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


@pytest.mark.parity
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


def cascade(lab, session):
    return demo_app.view_cascade(session["trace"], current(lab, session).facts)


@pytest.mark.parametrize("kind", HASHED)
@pytest.mark.parametrize("position", [0, 2, -1])
def test_cascade(lab, kind, position):
    """View 4: bars are the functions' softmax, best first, and with the others sum to 1; mass
    is that of log P at τ = 1 over hash_map; the entropy is that of the whole distribution."""
    session = opened(lab, position=position, kind=kind)
    model, ids = of_model(lab, session)
    view = cascade(lab, session)
    p = model.bucket_log_probs(model(ids))[0, position].exp()  # (H, B)
    paper = model.token_scores(model(ids))[0, position].softmax(-1)  # (V,)
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
    for position in (0, 2, -1):
        panels = cascade(lab, opened(lab, position=position, kind=kind))["panels"]
        for before, after in itertools.pairwise(panels):
            assert after["compatible"] <= before["compatible"]
            assert after["compatible_mass"] <= before["compatible_mass"]


def test_a_real_signature_leaves_one_token(lab):
    """With all ids of a token forced, that token alone is compatible after the last function."""
    session = opened(lab)
    model, _ = of_model(lab, session)
    forced = dict(enumerate(model.model.hash_map[tokenizer().encode(" two")[0]].tolist()))
    session = demo_app.trace_again(lab, session, force={str(j): b for j, b in forced.items()})
    assert cascade(lab, session)["panels"][-1]["compatible"] == 1


def test_cascade_targets_and_forces(lab):
    """The bar of the next token's bucket has the mark, that of a forced bucket is pressed."""
    bucket = opened(lab, position=1)["trace"]["functions"][0]["top"][2]["bucket"]
    session = opened(lab, position=1, force={"0": bucket})
    model, ids = of_model(lab, session)
    view, target = cascade(lab, session), model.model.hash_map[ids[0, 2]].tolist()
    assert sum(bar["forced"] for panel in view["panels"] for bar in panel["bars"]) == 1
    page = Reader(show("cascade", view))
    for j, panel in enumerate(view["panels"]):
        assert panel["target"] == target[j]
        for bar in panel["bars"]:
            assert bar["target"] == (bar["bucket"] == target[j])
            assert bar["forced"] == (j == 0 and bar["bucket"] == bucket)
            at = dict(data_function=str(j), data_bucket=str(bar["bucket"]))
            (button,) = page.all("button", **at)
            assert button.at["aria-pressed"] == str(bar["forced"]).lower()
            assert demo_app.percent(bar["prob"]) in button.text
    assert page.all("button", data_clear=None)
    assert not Reader(drawn(lab, opened(lab))["cascade"]).all("button", data_clear=None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", [1, -1])
def test_probability(lab, kind, position):
    """View 5: P is log_probs', paper that of τ = 1, joint exp of the scores, log p_j that of the
    functions; the next token is always among the rows, and marked."""
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
    scores = model.token_scores(model(ids))[0, position]
    log_p_j = model.bucket_log_probs(model(ids))[0, position]  # (H, B)
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
        assert f"{values['paper']:.4g}" in row.at["data-sum"].replace("−", "-")


@pytest.mark.parametrize("kind", HASHED)
def test_the_joint_mass_and_the_rest_are_everything(lab, kind):
    """The two parts of the bar are the model's valid mass and 1 less it: 100 % together, neither
    below 0, not even where the valid mass is 1 and rounding."""
    for position in (0, 2, 5):
        session = opened(lab, position=position, kind=kind)
        model, ids = of_model(lab, session)
        html = Reader(show("probability", demo_app.view_probability(session["trace"])))
        (bar,) = [e for e in html.all("div") if "mass" in e.at.get("class", "").split()]
        shares = widths(html.all("div", style=None))[:2]
        close(shares[0], 100 * model.valid_mass(ids)[0, position], atol=1e-3)
        close(sum(shares), 100.0, atol=1e-9)
        assert min(shares) >= 0 and not re.search(r"(^|\s)[-−]\d", bar.at["aria-label"])


SETTINGS = [(1.0, 0, 1.0), (0.3, 0, 1.0), (3.0, 5, 1.0), (1.0, 0, 0.5), (0.8, 40, 0.9), (0.0, 0, 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_is_the_librarys(lab, kind):
    """What the sliders show is mhf.sampling_probs of the model's log_probs, and sums to 1."""
    session = opened(lab, position=2, kind=kind)
    model, ids = of_model(lab, session)
    for temperature, top_k, top_p in SETTINGS:
        found = demo_app.sampling(session["trace"], temperature, top_k, top_p)
        expected = mhf.sampling_probs(
            model.log_probs(ids)[:, 2], temperature, top_k or None, top_p
        )[0]
        close([found.get(i, 0.0) for i in range(len(expected))], expected, atol=1e-6)
        assert sum(found.values()) == pytest.approx(1, abs=1e-6)
        if top_k or top_p < 1 or not temperature:  # else float32 leaves some of the last ones 0
            assert found.keys() == {*expected.nonzero()[:, 0].tolist()}


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


@pytest.mark.parametrize(
    "settings", [(math.nan, 0, 1.0), (1.0, 0, math.nan), (-1.0, 0, 1.0)], ids=str
)
def test_settings_outside_are_refused(lab, settings):
    """What no slider can say is refused as generate refuses it, and not shown as "nan %"."""
    with pytest.raises(ValueError) as error:
        demo_app.view_probability(opened(lab)["trace"], *settings)
    one_sentence(error)


def test_temperature_to_zero_is_the_argmax(lab):
    """At 0 and close to it, all of P is on the best token of log_probs."""
    session = opened(lab)
    model, ids = of_model(lab, session)
    best = model.log_probs(ids)[0, -1].argmax().item()
    for temperature in (0.0, 1e-7, 1e-3):
        found = demo_app.sampling(session["trace"], temperature, 0, 1.0)
        assert max(found, key=found.get) == best and found[best] > 0.999


def test_unused_ids_are_never_drawn(lab):
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
    best = log_p[-2].argsort(descending=True, stable=True)[:10]  # at the step before the last token
    assert [c["id"] for c in view["candidates"]] == best.tolist()
    close([c["p"] for c in view["candidates"]], log_p[-2, best].exp(), atol=1e-6)


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


@pytest.mark.parametrize("kind", ["mhf", "unused", "standard"])
def test_views_are_pure(lab, kind):
    """Views neither change session, trace and facts nor give other values the second time."""
    session = opened(lab, position=2, kind=kind)
    checkpoint = current(lab, session)
    before = copy.deepcopy((session, checkpoint.facts, checkpoint.names))
    first = [drawn(lab, session, *settings) for settings in SETTINGS[:2]]
    assert (session, checkpoint.facts, checkpoint.names) == before
    assert [drawn(lab, session, *settings) for settings in SETTINGS[:2]] == first


@pytest.mark.parametrize("kind", KINDS)
def test_views_are_well_formed(lab, kind):
    """Of every kind of model, at the end and inside of a text, each element is closed, no number is
    NaN, and only a view of what the model does not have says that it is absent."""
    for position in (0, 2, -1):
        session = opened(lab, position=position, kind=kind)
        for name, html in drawn(lab, session).items():
            read = Reader(html)
            assert read.text.strip() and not re.search(r"\b(nan|inf|Undefined)\b", read.text), name
            assert "None" not in [piece.strip() for piece in read.pieces], name
            absent = kind == "standard" and name in ("signature", "gate", "cascade", "vocabulary")
            assert ("class='notice'" in html) == absent, name


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


def test_glyph():
    """Blanks, controls, marks of direction and broken UTF-8 can be seen; text stays text."""
    text = lambda raw: raw.decode("utf-8", "backslashreplace")  # noqa: E731
    assert {raw: demo_app.glyph({"id": 7, "text": text(raw)}) for raw in GLYPHS} == GLYPHS


def test_glyph_without_text():
    """A token without known text is its number."""
    assert demo_app.glyph({"id": 7, "text": None}) == demo_app.glyph({"id": 7}) == "#7"


def test_a_long_glyph_is_cut():
    """A token of 1,000 characters shows its start and that there is more."""
    glyph = demo_app.glyph({"id": 7, "text": "a" * 1000})
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


def test_percent():
    """Two or three digits; what is more than 0 is never a plain 0."""
    assert {p: demo_app.percent(p) for p in PERCENTS} == PERCENTS


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


def test_chart_places_points():
    """The corners of the data are those of the box; what is between is in proportion to the
    logarithm; a larger y stands higher."""
    series = {"a": [(1, 10), (10, 1000), (100, 100_000)], "b": [(1, 1000), (100, 10)]}
    chart = demo_app.chart(series, "x", "y")
    (a, b), (up_a, up_b) = placed(chart, 0), placed(chart, 1)
    assert (a[0], a[2]) == (b[0], b[1]) and a[0] < a[1] < a[2] and up_a[0] > up_a[1] > up_a[2]
    assert up_b[1] == up_a[0]
    assert a[1] == pytest.approx((a[0] + a[2]) / 2) and up_a[1] == pytest.approx(
        (up_a[0] + up_a[2]) / 2
    )
    assert [line["name"] for line in chart["lines"]] == ["a", "b"]


def test_chart_ticks_stand_at_their_values():
    """A tick's place is that of the value it names."""
    chart = demo_app.chart({"a": [(1, 10), (1000, 10_000)]}, "x", "y")
    (xs,), (ys,) = placed(chart, 0), placed(chart, 1)
    x = {label: place for place, label in chart["x_ticks"]}
    y = {label: place for place, label in chart["y_ticks"]}
    assert x["1"] == pytest.approx(xs[0]) and x["1K"] == pytest.approx(xs[1])
    assert y["10"] == pytest.approx(ys[0]) and y["10K"] == pytest.approx(ys[1])


# ---------------------------------------------------------------------------------------------
# Facts of a whole vocabulary
# ---------------------------------------------------------------------------------------------


def pairs_by_hand(table):
    """The pairs of token ids that share H−1 ids or more."""
    ids = table.ids.tolist()
    real = [i for i, signature in enumerate(ids) if any(signature) or i == table.pad_id]
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


def test_tokens_that_were_hashed_again(lab):
    """They are those that a table of the same tokens has to hash again; without the tokens, and
    where tokens share signatures, none are told."""
    table = mhf.SignatureTable(2, 32)
    table.extend(tokenizer().hashed_bytes(), pad_id=tokenizer().eot)
    assert lab.get("crowded").facts["rehashed"] == table.rehashed != []
    assert [lab.get(kind).facts["rehashed"] for kind in ("single", "lsh")] == [[], []]
    nameless = mhf.SignatureTable.from_ids(table.ids, 32)
    assert demo_app.rehashed(nameless) == []


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


# ---------------------------------------------------------------------------------------------
# No random numbers, no constants posing as data
# ---------------------------------------------------------------------------------------------

SOURCE = Path(demo_app.__file__).read_text(encoding="utf-8")
INVENTED = re.compile(
    r"random|rand(n|int|perm)?|randn_like|rand_like|linspace|arange|normal_?|uniform_?|shuffle|"
    r"bernoulli|multinomial|manual_seed|default_rng|urandom|uuid\d|secrets|sample"
)


def test_nothing_is_invented():
    """No name in the app makes random or regular numbers."""
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
    assert len(views) == 7
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


def perturbed(trace, wanted, kind=(int, float), scale=1.7):
    """A copy of the trace in which the numbers of some families are others, each its own."""
    trace = copy.deepcopy(trace)
    for n, (family, node, key) in enumerate(leaves(trace)):
        if wanted(family) and isinstance(node[key], kind):
            value = node[key]
            factor = scale + 0.25 * math.sin(n)  # another for each, so that no ratio stays
            node[key] = value + 1 + n % 7 if isinstance(value, int) else value * factor
    return trace


def all_views(lab, session, trace):
    return drawn(lab, session | {"trace": trace}, 1.0, 0, 0.99)


NAMES = r".*(id|bucket|signature\[\]|\.function|\.position)$"
UNSEEN = (  # numbers that no view shows: others say the same
    r".*nearest\[\]\.(mass|num_tokens)|.*\.rank"
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
    another, but for what comes from the facts, the widest bar, and the bound of the check. What
    stays by chance does not stay twice."""
    session, stays = opened(lab, position=2), []
    before = pieces_with_numbers(all_views(lab, session, session["trace"])[view])
    for scale, other in ((1.7, 0.3), (2.6, 0.7)):
        chosen = lambda family: not re.fullmatch(NAMES, family)  # noqa: E731
        trace = perturbed(session["trace"], chosen, float, scale)
        trace |= {"valid_mass": other, "calibration": 10 * other}
        after = pieces_with_numbers(all_views(lab, session, trace)[view])
        places = enumerate(zip([*before[0], *before[1]], [*after[0], *after[1]], strict=True))
        stays.append({(i, old) for i, (old, new) in places if old == new and old is not None})
    of_facts = re.compile("expected by chance|of [0-9.]+ bits|top-p")  # no part of a trace
    stays = {text.strip() for _, text in stays[0] & stays[1] if not of_facts.search(text)}
    assert {text for text in stays if re.search("[1-9]", text)} <= {"100"}
    assert sum(text is not None for text in before[0]) >= 2


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
    return {
        "tokens": demo_app.view_tokens(session | {"notice": "a notice"}),
        "signature": demo_app.view_signature(crowded["trace"], lab.get("crowded").facts),
        "gate": demo_app.view_gate(trace),
        "cascade": cascade(lab, forced),
        "probability": demo_app.view_probability(trace),
        "generate": demo_app.view_generate(session, checkpoint.names),
        "vocabulary": demo_app.view_vocabulary(session, checkpoint),
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
    assert session["trace"]["tokens"][1]["text"] == f" {attack}"
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


# ---------------------------------------------------------------------------------------------
# Sessions
# ---------------------------------------------------------------------------------------------


def state_of(model):
    """All that a model holds, to be compared later."""
    tensors = {
        k: v.clone() for k, v in itertools.chain(model.named_buffers(), model.named_parameters())
    }
    table = model.signatures
    return tensors, list(table.tokens), table.ids.tolist(), dict(table.owner), repr(model.config)


def assert_same_state(before, after):
    assert before[1:] == after[1:] and before[0].keys() == after[0].keys()
    assert all(torch.equal(before[0][k], after[0][k]) for k in before[0])


@pytest.mark.parametrize("kind", KINDS)
def test_open_prompt(lab, kind):
    """A prompt's ids are the tokenizer's; its trace is explain's, at the last token, and the
    model's scores of all tokens, None for unused ids."""
    session = opened(lab, kind=kind)
    model, ids = of_model(lab, session)
    if kind != "untokenized":
        assert session["ids"] == tokenizer().encode(PROMPT)
    assert session["position"] == len(session["ids"]) - 1 and session["notice"] == ""
    expected = explain.explain(model, ids)
    if kind == "standard":
        for entry in expected["tokens"] + expected["top_tokens"]:
            entry["text"] = tokenizer().token_bytes(entry["id"]).decode("utf-8", "backslashreplace")
    scores = session["trace"].pop("scores")
    assert session["trace"] == expected
    unused = [340, 341, 342, 343, 344] if kind == "unused" else []
    assert [i for i, score in enumerate(scores) if score is None] == unused
    real = [i for i in range(len(scores)) if i not in unused]
    close([scores[i] for i in real], model.token_scores(model(ids))[0, -1, real])


def test_a_prompt_longer_than_the_context(lab):
    """Of too many tokens the newest are read, and the notice has both numbers."""
    text = TEXT[:2000]
    session, ids = opened(lab, text), tokenizer().encode(text)
    assert session["ids"] == ids[-WINDOW:] and session["prompt"] == text
    assert f"{len(ids):,}" in session["notice"] and str(WINDOW) in session["notice"]
    assert opened(lab, "the one")["notice"] == ""


@pytest.mark.parametrize("text", ["", "a" * 10_001, "🙂" * 10_001], ids=len)
def test_refused_prompts(lab, text):
    """No character, and more than 10,000 of them, are refused in one sentence."""
    with pytest.raises(ValueError) as error:
        opened(lab, text)
    one_sentence(error, *(["10,001", "10,000"] if text else []))


@pytest.mark.parametrize(
    "text",
    [
        " ",
        "\n",
        "\r\n\t",
        "a" * 10_000,
        "🙂" * 10_000,
        "\x00",
        "سلام",
        "\u202e\u200f",
        "\ufffd",
        "e\u0301" * 99,
    ],
    ids=lambda text: ascii(text[:8]),
)
def test_unusual_prompts(lab, text):
    """Blanks, 10,000 characters, right-to-left text, controls: all open, and all views are made."""
    assert drawn(lab, opened(lab, text))


@pytest.mark.parametrize("text", ["the \ud800 of", "\udfff"], ids=ascii)
def test_half_a_character(lab, text):
    """Half of a surrogate pair, which JSON can hold but UTF-8 cannot, is refused, or read as the
    replacement character: never an error of another kind."""
    try:
        drawn(lab, opened(lab, text))
    except ValueError as error:
        assert not isinstance(error, UnicodeError), "no sentence for a user"


@pytest.mark.parametrize("text", ["1 2", " 7 ", "339", "5\n6\t7"], ids=ascii)
def test_prompts_of_ids(lab, text):
    """Without a tokenizer a prompt is its ids."""
    assert opened(lab, text, kind="untokenized")["ids"] == [int(i) for i in text.split()]


@pytest.mark.parametrize(
    "text", ["the", "1,2", "1.5", "340", "-1", " ", "9" * 5000, "1 2 x", "1e2"], ids=lambda t: t[:9]
)
def test_refused_ids(lab, text):
    """What is no id of the vocabulary is refused in one sentence."""
    with pytest.raises(ValueError) as error:
        opened(lab, text, kind="untokenized")
    one_sentence(error)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("position", [-99, 99, 10**30])
def test_a_position_outside_is_the_last(lab, position):
    """open_prompt at a position that the text does not have takes the last one."""
    session = opened(lab, "the one of", position)
    assert session["position"] == 2


WORDS = "zebra\n漢字仮名\n🙂x\nnaïve"


def test_words(lab):
    """Each line is a token, with a space in front if asked for, behind those of the vocabulary."""
    session = demo_app.add_words(lab, opened(lab), WORDS)
    table = current(lab, session).model.signatures
    expected = [f" {word}" for word in WORDS.split("\n")]
    assert session["words"] == expected
    assert table.tokens[340:] == [w.encode() for w in expected]
    assert current(lab, session).names[340:] == expected
    session = demo_app.add_words(lab, session, " yak \r\n\n   \nyak", space=False)
    assert session["words"] == [*expected, " yak ", "yak"]


def test_words_in_a_prompt(lab):
    """Own words are read as their tokens, the longest first, wherever they stand."""
    session = demo_app.add_words(lab, opened(lab), "zeb\nzebra\nzebrawood", space=False)
    session = open_prompt(lab, session, "the zebrawood zebra's zeb of")
    encode = tokenizer().encode
    assert session["ids"] == [
        *encode("the "), 342, *encode(" "), 341, *encode("'s "), 340, *encode(" of")
    ]  # fmt: skip
    assert session["trace"]["tokens"][len(encode("the "))]["text"] == "zebrawood"


@pytest.mark.parametrize("word", ["a.c", "(", "[x", "\\d", "a|b", "^$", "*"])
def test_words_are_no_patterns(lab, word):
    """A word that looks like a regular expression stands for itself alone."""
    session = demo_app.add_words(lab, opened(lab), word)
    assert open_prompt(lab, session, f"the {word}")["ids"] == [*tokenizer().encode("the"), 340]
    assert 340 not in open_prompt(lab, session, "the abc 1 ab")["ids"]


BAD_WORDS = {
    "nothing": ("", []),
    "blank lines": ("\n  \n\t", []),
    "too many": ("\n".join(f"w{i}" for i in range(51)), [51, 50]),
    "too long": ("x" * 64, [65, 64]),
    "too long in bytes": ("🙂" * 16, [65, 64]),
    "a token": ("of", []),
    "a token of bytes": ("é", []),
    "end of text": ("<|endoftext|>", []),
    "twice": ("zebra\nyak\nzebra", []),
    "half a character": ("zebra\ud800", []),
    "a lone half": ("\udfff", []),
}


@pytest.mark.parametrize("name", BAD_WORDS)
def test_refused_words(lab, name):
    """What cannot be added is refused in a sentence without code in it, and nothing is added."""
    text, values = BAD_WORDS[name]
    session = opened(lab)
    before = copy.deepcopy(session)
    space = name not in ("end of text", "a token of bytes")
    with pytest.raises(ValueError) as error:
        demo_app.add_words(lab, session, text, space)
    one_sentence(error, *values)
    assert not isinstance(error.value, UnicodeError) and "b'" not in str(error.value)
    assert session == before and len(lab.get("mhf").names) == 340


def test_fifty_words_are_the_limit(lab):
    """50 words of 64 bytes can be added, one after the other too, and then no more."""
    session = demo_app.add_words(lab, opened(lab), "\n".join(f"{i:063}" for i in range(49)))
    session = demo_app.add_words(lab, session, "y" * 64, space=False)
    assert len(session["words"]) == 50 and drawn(lab, session)
    with pytest.raises(ValueError) as error:
        demo_app.add_words(lab, session, "one more")
    one_sentence(error, 50, 1)


@pytest.mark.parametrize("kind", ["untokenized", "standard"])
def test_words_need_signatures_and_a_tokenizer(lab, kind):
    """A standard model and one without our tokenizer take no words, and say so."""
    with pytest.raises(ValueError) as error:
        demo_app.add_words(lab, opened(lab, kind=kind), "zebra")
    one_sentence(error)


def test_words_of_one_are_not_those_of_another(lab):
    """Two sessions add different words at the same id; neither knows the other's, in whatever
    order they ask, and a third has none."""
    one = demo_app.add_words(lab, opened(lab), "zebra")
    two = demo_app.add_words(lab, opened(lab), "yak")
    for _ in range(3):
        for session, own, foreign in ((one, " zebra", " yak"), (two, " yak", " zebra")):
            told = open_prompt(lab, session, "the zebra yak")
            assert told["trace"]["vocab_size"] == 341
            assert own in [t["text"] for t in told["trace"]["tokens"]]
            views = "".join(drawn(lab, told | {"prompt": "", "ids": [340], "position": 0}).values())
            assert foreign.strip() not in views.replace(own.strip(), "")
        assert 340 not in opened(lab, "the zebra yak")["ids"]


def test_words_leave_the_shared_model_alone(lab):
    """The model that all share is bit for bit what it was; a user's model has its parameters,
    the very same ones, and signatures of its own."""
    shared = lab.get("mhf")
    before, names = state_of(shared.model), list(shared.names)
    session = written(lab, demo_app.add_words(lab, opened(lab), WORDS))[-1]
    own = current(lab, session)
    assert_same_state(before, state_of(shared.model))
    assert shared.names == names and len(shared.model.signatures) == 340
    assert own.model is not shared.model and own.model.signatures is not shared.model.signatures
    for (name, p), (_, q) in zip(
        own.model.named_parameters(), shared.model.named_parameters(), strict=True
    ):
        assert p is q, name
    assert own.model.model.hash_map[:340].equal(shared.model.model.hash_map)


def test_words_that_cannot_be_seen(lab):
    """A word without visible characters is shown by its escapes, wherever words are listed."""
    session = demo_app.add_words(lab, opened(lab), "\u200b\u202e", space=False)
    views = drawn(lab, session)
    assert "\\u200b\\u202e" in Reader(views["vocabulary"]).text
    assert "\\u200b\\u202e" in Reader(views["tokens"]).text
    assert not re.search("[\u200b\u202e]", views["vocabulary"] + views["tokens"])


def test_many_users_with_words(own_lab):
    """Of more users with words than are kept at a time, the first one's ids are still the same."""
    own_lab.personal = functools.lru_cache(maxsize=2)(own_lab._personal)
    sessions = [demo_app.add_words(own_lab, opened(own_lab), f"user{i}") for i in range(4)]
    for i, session in enumerate(sessions):
        again = open_prompt(own_lab, session, f"the user{i}")
        assert again["ids"][-1] == 340 and again["trace"]["tokens"][-1]["text"] == f" user{i}"


def test_a_new_prompt_keeps_words_and_drops_the_rest(lab):
    """What was forced and generated ends with the prompt; a user's words stay."""
    session = demo_app.add_words(lab, opened(lab), "zebra")
    session = written(lab, demo_app.trace_again(lab, session, force={"0": 3}))[-1]
    session = open_prompt(lab, session, "the zebra")
    assert session["words"] == [" zebra"] and session["ids"][-1] == 340
    assert (session["force"], session["start"], session["log_probs"]) == ({}, None, {})


# ---------------------------------------------------------------------------------------------
# Generation
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mhf", "unused", "single", "untokenized", "standard"])
@pytest.mark.parametrize("cuts", [(1.0, 0, 1.0), (0.7, 5, 0.9), (0.0, 0, 1.0)], ids=str)
def test_generated_tokens_are_the_librarys(lab, kind, cuts):
    """One session a token, each with one more; ids and log P are those of model.generate."""
    session = opened(lab, kind=kind)
    model, _ = of_model(lab, session)
    *steps, last = written(lab, session, 6, cuts, seed=3)
    temperature, top_k, top_p = cuts
    stop = () if kind == "untokenized" else [tokenizer().eot]
    expected = list(
        model.generate(
            session["ids"], 6, temperature, top_k or None, top_p, stop, 3, return_log_probs=True
        )
    )
    start = len(session["ids"])
    new, log_p = (list(part) for part in zip(*expected, strict=True))
    assert last["ids"] == session["ids"] + new and last["start"] == start
    assert [step["ids"] for step in steps] == [
        last["ids"][: start + n + 1] for n in range(len(new))
    ]
    assert all(step["trace"] is None for step in steps)
    assert list(last["log_probs"].values()) == log_p
    assert last["trace"]["position"] == len(last["ids"]) - 2
    assert last["trace"]["next"]["id"] == new[-1] and last["seed"] == 3
    close(last["trace"]["next"]["log_prob"], log_p[-1])


def test_seeds(lab):
    """The same seed gives the same text, another one another."""
    one, again, other = (written(lab, opened(lab, "the"), 20, seed=s)[-1]["ids"] for s in (1, 1, 2))
    assert one == again != other


def test_generation_ends_with_the_context(lab):
    """As many tokens come as the context has room for; of a full one the newest half is kept, as
    the library does, and the page says so."""
    ids = (tokenizer().encode(TEXT))[:WINDOW]
    session = demo_app.trace_again(lab, fresh(ids=ids[:-3]), position=-1)
    assert len(written(lab, session, 20, seed=5)[-1]["ids"]) <= WINDOW
    assert max(len(s["ids"]) for n in range(5) for s in written(lab, session, 20, seed=n)) == WINDOW
    last = written(lab, demo_app.trace_again(lab, fresh(ids=ids), position=-1), 3)[-1]
    half = ids[-(WINDOW // 2) :]
    assert last["ids"][: len(half)] == half and last["start"] == len(half) < len(last["ids"])
    assert "half" in last["notice"] and min(last["log_probs"]) == len(half)


def test_no_more_tokens_than_are_allowed(lab, monkeypatch):
    """Whatever the browser asks for, the server's limit holds."""
    monkeypatch.setattr(demo_app, "MAX_TOKENS", 4)
    assert len(written(lab, opened(lab, "the"), 10**9)) == 5


@pytest.mark.parametrize("seed", [-1, 2**63, 1e300])
def test_refused_seeds(lab, seed):
    """A seed that PyTorch cannot take is refused with its value's range."""
    with pytest.raises(ValueError) as error:
        written(lab, opened(lab), seed=seed)
    one_sentence(error, 0, 2**63 - 1)


@pytest.mark.parametrize(
    "cuts", [(-1, 0, 1), (math.nan, 0, 1), (1, -5, 1), (1, 0, 0), (1, 0, 2)], ids=str
)
def test_refused_settings(lab, cuts):
    """Settings outside their range are refused in one sentence, should they come by."""
    with pytest.raises(ValueError) as error:
        written(lab, opened(lab), cuts=cuts)
    one_sentence(error)


def test_generation_stops_at_the_end_of_text(lab, monkeypatch):
    """The tokenizer's end-of-text token ends the text; without a tokenizer nothing does."""
    asked = []

    def generate(self, *args, **named):
        asked.append(args[5])
        return iter([])

    monkeypatch.setattr(mhf.LanguageModel, "generate", generate)
    for kind in ("mhf", "untokenized"):
        written(lab, opened(lab, kind=kind))
    assert list(asked[0]) == [tokenizer().eot] and list(asked[1]) == []


def test_going_on(lab):
    """Generating again goes on behind what there is, and keeps the probabilities before it."""
    first = written(lab, opened(lab, "the"), 5)[-1]
    second = written(lab, first, 5, start=first["start"])[-1]
    model, ids = of_model(lab, second)
    assert second["ids"][: len(first["ids"])] == first["ids"] and second["start"] == first["start"]
    log_p = model.log_probs(ids)[0]
    assert list(second["log_probs"]) == list(range(first["start"], len(second["ids"])))
    for i, found in second["log_probs"].items():
        close(found, log_p[i - 1, ids[0, i]])


# ---------------------------------------------------------------------------------------------
# Links
# ---------------------------------------------------------------------------------------------


def followed(lab, link, start=None):
    """(session, values) of a link, as a browser that opens it gives it to the page."""
    query = urllib.parse.parse_qs(link.lstrip("?"))
    return demo_app.from_link(lab, start or fresh(), query)


def linked(lab):
    """Sessions in which every field is another than at the start."""
    base = opened(lab, position=2)
    words = demo_app.add_words(lab, base, WORDS + "\n a=b&c", space=False)
    yield "plain", opened(lab), (*CUTS, "signature")
    yield "position", opened(lab, position=0), (*CUTS, "gate")
    yield "sliders", base, (0.35, 40, 0.95, "probability")
    yield "greedy", base, (0.0, 1000, 0.01, "probability")
    yield "force", opened(lab, position=1, force={"0": 5, "1": 9}), (*CUTS, "cascade")
    yield "words", open_prompt(lab, words, "the naïve 🙂x"), (*CUTS, "vocabulary")
    yield "generated", written(lab, words, 9, seed=7)[-1], (0.7, 5, 0.9, "generate")
    yield (
        "looked at",
        demo_app.trace_again(lab, written(lab, base, 9, seed=7)[-1], position=3),
        (*CUTS, "gate"),
    )
    yield "other", opened(lab, kind="crowded") | {"default": "mhf"}, (*CUTS, "cascade")
    yield "ids", opened(lab, kind="untokenized") | {"default": "mhf"}, (*CUTS, "generate")
    yield (
        "standard",
        written(lab, opened(lab, kind="standard"))[-1] | {"default": "mhf"},
        (*CUTS, "probability"),
    )
    for text in (" ", "\n\n", *ATTACKS, "+%20&=?#", "سلام", "\x00"):
        yield text, opened(lab, text), (*CUTS, "signature")


def test_links_lead_back(lab):
    """Every field of a session survives its link: prompt, checkpoint, words, position, forced
    buckets, generated ids, their seed and probabilities, the sliders and the tab. The session
    that all users start from stays as it was."""
    start = fresh()
    for name, session, values in linked(lab):
        found, told = followed(lab, demo_app.permalink(session, *values), start)
        log_probs, expected = found.pop("log_probs"), session["log_probs"]
        assert told == list(values), name
        assert log_probs.keys() == expected.keys(), name
        close(list(log_probs.values()), list(expected.values()))
        seed = {"seed": session["seed"] if session["start"] is not None else 0, "notice": ""}
        session = {k: v for k, v in session.items() if k != "log_probs"} | seed
        assert found == session, name
    assert start == fresh() and FRESH["force"] == {} and FRESH["words"] == []


def test_a_link_says_only_what_is_not_as_at_the_start(lab):
    """A new session's link is its prompt and tab."""
    link = demo_app.permalink(opened(lab), *CUTS, "signature")
    assert urllib.parse.parse_qs(link[1:]).keys() == {"prompt", "tab"}


BAD_LINKS = {
    "temperature": ["nan", "-1", "3.01", "x", "9" * 5000],
    "top_k": ["-1", "1001", "2.5", "9" * 5000],
    "top_p": ["0", "1.01", "nan"],
    "position": ["-1", "99", "x", "9" * 5000],
    "checkpoint": ["nowhere", "../mhf", "9" * 5000],
    "tab": ["nowhere", "Gate"],
    "force": ["9:1", "-1:1", "0:999", "0:-1", "x", "0:1:2", f"0:{'9' * 5000}", "0:1.5"],
    "ids": ["1,2,340", "-1,2", "1,,2", ",".join("1" * (WINDOW + 1)), "9" * 30, "1.5"],
    "word": ["the", "x" * 65, "\n".join(f"w{i}" for i in range(51))],
    "prompt": ["a" * 10_001],
}
CASES = [(part, value) for part, values in BAD_LINKS.items() for value in values]


@pytest.mark.parametrize(("part", "value"), CASES, ids=lambda text: text[:12])
def test_bad_parts_of_a_link(lab, part, value):
    """A part that cannot be used is named in the notice and has its default; the others hold."""
    good = {"prompt": PROMPT, "temperature": "0.5", "top_k": "7", "position": "3", "tab": "gate"}
    link = urllib.parse.urlencode(good | {part: value})
    session, (temperature, top_k, top_p, tab) = followed(lab, link)
    assert part in session["notice"] and "\n" not in session["notice"]
    assert not {p for p in BAD_LINKS if p != part and p in session["notice"].split("could not")[0]}
    assert session["trace"] and drawn(lab, session, temperature, top_k, top_p, tab)
    if part not in ("prompt", "ids"):
        assert session["prompt"] == PROMPT and session["words"] == []
    if part != "position" and part != "prompt":
        assert session["position"] == 3
    assert (temperature, top_k, top_p) == (
        1.0 if part == "temperature" else 0.5,
        0 if part == "top_k" else 7,
        1.0,
    )
    assert tab == ("signature" if part == "tab" else "gate")
    assert (session["checkpoint"], session["force"], session["start"]) == ("mhf", {}, None)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        *itertools.product(["start"], ["0", "99", "x", "9" * 5000]),
        *itertools.product(["seed"], ["-1", str(2**63), "nan"]),
    ],
    ids=lambda text: text[:9],
)
def test_bad_parts_of_a_generated_text(lab, part, value):
    """With bad numbers beside them, the ids still open."""
    ids = tokenizer().encode("the one of two")
    link = {"ids": ",".join(map(str, ids)), "start": "1", "seed": "5", part: value}
    session, _ = followed(lab, urllib.parse.urlencode(link))
    assert session["ids"] == ids and session["trace"] and drawn(lab, session)
    assert part in session["notice"]


ODD_LINKS = (
    "",
    "__theme=dark",
    "prompt=",
    "prompt=%ff%fe",
    "prompt=%00",
    "prompt=%ed%a0%80",
    "prompt=a&prompt=b",
    "x=1&x=2",
    "=",
    "&&",
)


@pytest.mark.parametrize("link", ODD_LINKS)
def test_odd_links(lab, link):
    """Nothing, foreign parts and bytes that are no UTF-8 open a page, without a notice."""
    session, values = followed(lab, link)
    assert session["trace"] and session["notice"] == "" and values == [*CUTS, "signature"]
    assert drawn(lab, session)


# ---------------------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------------------


def test_checkpoints_of_the_output_folder(lab, runs):
    """The names are those of runs with a checkpoint, the newest first."""
    assert list(lab.paths()) == list(KINDS)
    (runs / "no checkpoint").mkdir()
    assert list(Lab(None, runs).paths()) == list(KINDS)


def test_a_new_run_appears(tmp_path):
    """A run that is saved while the page is open can be chosen."""
    lab = Lab(None, tmp_path)
    assert lab.paths() == {}
    make(tmp_path / "new")
    assert lab.get("new").facts["V"] == 340


def test_a_run_that_is_gone_does_no_harm(runs, tmp_path):
    """A run whose file "last" leads nowhere is no choice, and the others still are."""
    make(tmp_path / "good")
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "last").symlink_to("nowhere")
    assert Lab(None, tmp_path).get("good").facts["V"] == 340


def test_a_run_that_goes_on_is_read_again(tmp_path):
    """When a run saved another step, that one is opened."""
    lab = Lab(None, make(tmp_path / "run").parent)
    before = lab.get("run").model.model.embed_tokens.weight.clone()
    make(tmp_path / "run", "step-2", seed=1)
    assert not torch.equal(lab.get("run").model.model.embed_tokens.weight, before)
    assert lab.get("run") is lab.get("run")


def test_the_given_checkpoint_comes_first(runs, tmp_path):
    """--checkpoint is the default, a run as well as a folder, also if a run of the output folder
    has the same name."""
    given = make(tmp_path / "mhf", seed=5)
    lab = Lab(given, runs)
    name = next(iter(lab.paths()))
    expected = mhf.load(given).model.embed_tokens.weight
    assert torch.equal(lab.get(name).model.model.embed_tokens.weight, expected)
    assert next(iter(Lab(given / "step-1", runs).paths())) == "step-1"


def test_the_shipped_checkpoint_is_the_default(runs, tmp_path, monkeypatch):
    """Without --checkpoint the one beside the app opens, before all runs."""
    monkeypatch.setattr(demo_app, "SHIPPED", make(tmp_path / "beside", seed=9) / "step-1")
    lab = Lab(None, runs)
    assert list(lab.paths()) == ["shipped", *KINDS]
    expected = mhf.load(tmp_path / "beside").model.embed_tokens.weight
    assert torch.equal(lab.get("shipped").model.model.embed_tokens.weight, expected)
    assert next(iter(Lab(runs / "crowded", runs).paths())) == "crowded"


@pytest.mark.parametrize("name", ["nowhere", "", None, "../mhf", "mhf/step-1", "/etc/passwd"])
def test_only_checkpoints_of_the_list(lab, name):
    """No other name, and no path, opens anything."""
    with pytest.raises(ValueError) as error:
        lab.get(name)
    one_sentence(error, "mhf")


def test_damaged_checkpoints(runs, tmp_path):
    """A damaged run beside a good one is refused in one sentence; the page and its links go on."""
    for kind in ("mhf", "standard"):
        make(tmp_path / kind, **KINDS[kind])
    os.utime(tmp_path / "mhf" / "last", (2e9, 2e9))
    (tmp_path / "standard" / "step-1" / "model.safetensors").write_bytes(b"damaged")
    lab = Lab(None, tmp_path)
    assert Page(lab).default == "mhf"
    with pytest.raises(ValueError) as error:
        lab.get("standard")
    one_sentence(error)
    session, _ = followed(lab, "checkpoint=standard&prompt=the")
    assert session["checkpoint"] == "mhf" and "checkpoint" in session["notice"]


def test_nothing_to_show(tmp_path):
    """Without any checkpoint the page says what to do."""
    with pytest.raises(ValueError) as error:
        Page(Lab(None, tmp_path))
    one_sentence(error)
    assert "train.py" in str(error.value) and "--checkpoint" in str(error.value)


@pytest.mark.parity
def test_a_published_checkpoint(tmp_path):
    """A checkpoint as others publish it opens: prompts are ids, tokens their numbers."""
    lab = Lab(FIXTURES / "tiny_h4", tmp_path)
    page = Page(lab)
    session = page.begin
    assert session["ids"] and all(isinstance(i, int) for i in session["ids"])
    model, ids = of_model(lab, session)
    view = demo_app.view_probability(session["trace"])
    close([row["p"] for row in view["rows"]], model.log_probs(ids)[0, -1].exp().topk(10).values)
    views = {name: Reader(html) for name, html in drawn(lab, session).items()}
    assert f"#{session['ids'][0]}" in views["tokens"].text
    assert written(lab, session, 5)[-1]["trace"]["next"]


# ---------------------------------------------------------------------------------------------
# Models that a student changed
# ---------------------------------------------------------------------------------------------


class Mean(torch.nn.Module):
    """A gate without scores; what it gives beside the vector is chosen by `gate`."""

    def __init__(self, gate):
        super().__init__()
        self.gate = gate

    def forward(self, e):
        return e.mean(-2), self.gate(e)


def own_class(**members):
    """The model becomes one of a class in which the members are others."""

    def change(model):
        model.__class__ = type("Changed", (mhf.MultiHashFormer,), members)

    return change


def other_combiner(gate):
    def change(model):
        model.model.combiner = Mean(gate)

    return change


def other_head(model):
    """All functions are predicted at once from the state: there is no cascade."""
    model.hash_head = Parallel()


class Parallel(torch.nn.Module):
    def forward(self, h, table):
        return torch.einsum("...d,hbd->...hb", h, table)


def one_in_a_step(model):
    """The cascade's steps tell one thing less."""
    steps = model.hash_head.steps
    model.hash_head.steps = lambda *args, **how: (o for o, _ in steps(*args, **how))
    model.hash_head.forward = lambda h, table: torch.stack([o for o, _ in steps(h, table)], -2)


CHANGES = {  # name: (change, views that have to say that something is missing)
    "uniform gate": (
        other_combiner(lambda e: torch.full(e.shape[:-1], 1 / e.shape[-2])),
        (),
    ),
    "no gate": (other_combiner(lambda e: None), ("gate",)),
    "a gate for each dimension": (other_combiner(lambda e: e.softmax(-2)), ("gate",)),
    "one number for a gate": (other_combiner(lambda e: e.mean((-1, -2))), ("gate",)),
    "embed without return_gate": (
        own_class(
            embed=lambda self, ids: self.model.combiner(self.model.embed_tokens(self.rows[ids]))[0]
        ),
        ("gate",),
    ),
    "embed returns three": (
        own_class(
            embed=lambda self, ids, return_gate=False: (
                (*mhf.MultiHashFormer.embed(self, ids, True), None)
                if return_gate
                else mhf.MultiHashFormer.embed(self, ids)
            )
        ),
        ("gate",),
    ),
    "another head": (other_head, ("cascade",)),
    "one thing in a step": (one_in_a_step, ("gate", "cascade", "signature")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_opens(own_lab, name):
    """Views whose quantity is gone say so, next tokens are log_probs', and text is generated."""
    change, missing = CHANGES[name]
    checkpoint = own_lab.get("mhf")
    change(checkpoint.model)
    begin = opened(own_lab)
    views = drawn(own_lab, begin)
    functions = {
        "signature": lambda trace: demo_app.view_signature(trace, checkpoint.facts),
        "gate": demo_app.view_gate,
        "cascade": lambda trace: demo_app.view_cascade(trace, checkpoint.facts),
    }
    for view in missing:
        absent = functions[view](begin["trace"])["absent"]
        assert absent.split(" (")[0] in Reader(views[view]).text
    view = demo_app.view_probability(begin["trace"])
    model, ids = of_model(own_lab, begin)
    expected = model.log_probs(ids)[0, -1].exp().topk(10).values
    close([row["p"] for row in view["rows"][:10]], expected, atol=1e-6)
    session = written(own_lab, begin, 3)[-1]
    assert session["trace"]["next"] and drawn(own_lab, session)
    assert drawn(own_lab, demo_app.trace_again(own_lab, session, position=1))


def test_mistakes_are_no_changes(own_lab):
    """Of a changed model, too, ids and positions outside are refused in one sentence."""
    checkpoint = own_lab.get("untokenized")
    CHANGES["another head"][0](checkpoint.model)
    for text in ("340", "-1", "1 2 99999"):
        with pytest.raises(ValueError) as error:
            opened(own_lab, text, kind="untokenized")
        one_sentence(error)


# ---------------------------------------------------------------------------------------------
# The JSON endpoint's answer
# ---------------------------------------------------------------------------------------------

QUESTIONS = [
    {},
    {"position": 0},
    {"position": -3, "top_k": 3},
    {"position": 2.0, "top_k": 100},
    {"force": {"0": 5}},
    {"force": {"0": "5", "1": 9}, "position": 1},
    {"force": None},
    {"force": {}},
    {"checkpoint": "crowded"},
    {"checkpoint": "standard", "top_k": 2},
]


@pytest.mark.parametrize("question", QUESTIONS, ids=str)
def test_inspect_is_explain(lab, question):
    """The answer is explain's dict, and the ids; of the standard model with the texts."""
    told = demo_app.inspect_prompt(lab, PROMPT, **question)
    model, ids = lab.get(question.get("checkpoint") or "mhf").model, tokenizer().encode(PROMPT)
    force = {int(j): int(b) for j, b in (question.get("force") or {}).items()}
    position, top_k = int(question.get("position", -1)), question.get("top_k", 10)
    expected = explain.explain(model, ids, position, top_k, force)
    if question.get("checkpoint") == "standard":
        for entry in [*told["tokens"], *told["top_tokens"]]:
            raw = tokenizer().token_bytes(entry["id"])
            assert entry["text"] == raw.decode("utf-8", "backslashreplace")
            entry["text"] = None
    assert told == expected | {"ids": ids}


WRONG = {
    "no text": {"prompt": ""},
    "10,001 characters": {"prompt": "a" * 10_001},
    "more than the context": {"prompt": TEXT[:500]},
    "a number": {"prompt": 5},
    "None": {"prompt": None},
    "a list": {"prompt": ["the"]},
    "position beyond": {"position": 99},
    "position before": {"position": -99},
    "position as text": {"position": "1"},
    "position None": {"position": None},
    "position true": {"position": True},
    "position between": {"position": 1.5},
    "position nan": {"position": math.nan},
    "position infinite": {"position": math.inf},
    "position huge": {"position": 10**400},
    "position a list": {"position": [1]},
    "top_k 0": {"top_k": 0},
    "top_k -1": {"top_k": -1},
    "top_k 101": {"top_k": 101},
    "top_k as text": {"top_k": "5"},
    "top_k nan": {"top_k": math.nan},
    "top_k infinite": {"top_k": -math.inf},
    "top_k huge": {"top_k": 10**400},
    "top_k None": {"top_k": None},
    "force a list": {"force": [[0, 1]]},
    "force text": {"force": "0:1"},
    "force a number": {"force": 7},
    "force of no function": {"force": {"3": 1}},
    "force of function -1": {"force": {"-1": 1}},
    "force of no bucket": {"force": {"0": 64}},
    "force of bucket -1": {"force": {"0": -1}},
    "force between buckets": {"force": {"0": 1.5}},
    "force true": {"force": {"0": True}},
    "force nan": {"force": {"0": math.nan}},
    "force infinite": {"force": {"0": math.inf}},
    "force None": {"force": {"0": None}},
    "force of text": {"force": {"x": 1}},
    "force of a list": {"force": {"0": [1]}},
    "no checkpoint": {"checkpoint": "nowhere"},
    "a path": {"checkpoint": "/etc"},
    "a path up": {"checkpoint": "../mhf"},
    "checkpoint a number": {"checkpoint": 5},
    "checkpoint a list": {"checkpoint": ["mhf"]},
    "checkpoint a dict": {"checkpoint": {"mhf": 1}},
    "standard forced": {"checkpoint": "standard", "force": {"0": 1}},
    "text for ids": {"checkpoint": "untokenized"},
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_questions(lab, name):
    """Every wrong input is a ValueError whose text is one sentence of ours, no longer than 600
    characters: neither Python's own words nor all that was sent."""
    with pytest.raises(ValueError) as error:
        demo_app.inspect_prompt(lab, **({"prompt": "the one"} | WRONG[name]))
    one_sentence(error)
    assert type(error.value) is ValueError and len(str(error.value)) < 600
    foreign = ("NoneType", "cannot convert", "codec", "unhashable", "invalid literal", "Traceback")
    assert not [text for text in foreign if text in str(error.value)]


def test_long_wrong_questions_are_not_repeated(lab):
    """A megabyte of nonsense is not sent back."""
    for question in ({"force": "x" * 10**6}, {"checkpoint": "x" * 10**6}, {"prompt": [0] * 10**6}):
        with pytest.raises(ValueError) as error:
            demo_app.inspect_prompt(lab, **({"prompt": "the"} | question))
        assert len(str(error.value)) < 1000


# ---------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(lab):
    return Page(lab)


VIEWS = [*demo_app.TABS, "tokens", "link", "tour", "examples"]
CONTROLS = (
    *("prompt", "checkpoint", "look", "go", "stop", "words", "add", "forget"),
    *("tour-back", "tour-next", "views"),
)


def test_the_parts_of_the_page(page):
    """All views and controls are there, under their names, and each only once."""
    parts = page.demo.get_config_file()["components"]
    ids = [part["props"]["elem_id"] for part in parts if part["props"].get("elem_id")]
    assert {*VIEWS, *CONTROLS} <= set(ids) and len(ids) == len(set(ids))


def test_every_view_is_filled_at_the_start(page):
    """The page's HTML is drawn before anybody asks, the first example's tokens in it."""
    parts = page.demo.get_config_file()["components"]
    parts = [part["props"] for part in parts if part["type"] == "html"]
    filled = {part["elem_id"]: part["value"] for part in parts if part.get("elem_id")}
    assert all(Reader(filled[name]).text.strip() for name in VIEWS)
    for name, html in drawn(page.lab, page.begin).items():
        assert filled[name] == html


def test_no_template_of_gradio_reads_user_text(page):
    """gr.HTML evaluates its template after the values are in; all templates are constants that
    take the value as a whole, and scripts have no value in them."""
    parts = [p["props"] for p in page.demo.get_config_file()["components"] if p["type"] == "html"]
    assert {part.get("html_template") for part in parts} <= {"${value}"}
    scripts = {part.get("js_on_load") for part in parts}
    assert len(scripts) <= 4
    assert all("{{" not in (script or "") and "${" not in (script or "") for script in scripts)


def test_no_files_and_no_paths(page):
    """Nothing on the page takes a file, and checkpoints are chosen from a list alone."""
    parts = page.demo.get_config_file()["components"]
    assert not {"file", "uploadbutton", "fileexplorer", "image", "audio"} & {
        p["type"] for p in parts
    }
    for part in parts:
        if part["type"] == "dropdown":
            assert not part["props"].get("allow_custom_value")
            assert [name for name, _ in part["props"]["choices"]] == list(KINDS)


LIGHT = {"on_slide", "on_tab", "<lambda>"}


def name_of(function):
    """The name of an event's function, whatever wraps it."""
    function = inspect.unwrap(function)
    return getattr(function, "func", function).__name__


def events(page):
    """The events that run Python: those that only cancel or run in the browser have no function."""
    return [fn for fn in page.demo.fns.values() if fn.fn is not None and not fn.js]


def test_all_that_runs_a_model_waits_in_one_queue(page):
    """One at a time, in the queue "model"; what is answered at once is of a short list."""
    names = {name_of(fn.fn) for fn in events(page)}
    assert {"on_look", "on_generate", "on_branch", "on_add", "api_inspect"} <= names
    for fn in events(page):
        if name_of(fn.fn) not in LIGHT:
            assert (fn.concurrency_id, fn.concurrency_limit, fn.queue) == ("model", 1, True)


def test_one_endpoint_is_public(page):
    """/inspect, and nothing else."""
    public = [fn.api_name for fn in page.demo.fns.values() if fn.api_visibility == "public"]
    assert public == ["inspect"]
    assert page.demo.get_api_info()["named_endpoints"].keys() == {"/inspect"}


def asked(page, fn, session, **event):
    """What an event's function gives for the values that stand on the page."""
    event = types.SimpleNamespace(**{"index": 0, "function": 0, "bucket": 3, "id": 5} | event)
    request = types.SimpleNamespace(query_params="")
    values = [session if part is page.session else part.value for part in fn.inputs]
    first = list(inspect.signature(fn.fn).parameters.values())[:1]
    kinds = {demo_app.gr.EventData: event, demo_app.gr.Request: request}
    values = [kinds[p.annotation] for p in first if p.annotation in kinds] + values
    if inspect.isgeneratorfunction(fn.fn):
        return list(fn.fn(*values))
    return [fn.fn(*values)]


def test_every_event_fills_its_outputs(page):
    """Each function gives one value for each of its event's outputs, at every step."""
    for fn in events(page):
        if name_of(fn.fn) in ("api_inspect", "<lambda>"):
            continue
        session = page.begin
        if name_of(fn.fn) == "on_add":
            words = next(part for part in fn.inputs if part.elem_id == "words")
            words.value, before = "zebra", words.value
        for given in asked(page, fn, session):
            many = len(given) if isinstance(given, (list, tuple)) else 1
            assert many == len(fn.outputs), name_of(fn.fn)
        if name_of(fn.fn) == "on_add":
            words.value = before


def test_light_events_run_no_model(page, monkeypatch):
    """Sliders and tabs are answered from what is there: a model call would fail."""

    def refuse(*args, **named):
        raise AssertionError("a model was run")

    monkeypatch.setattr(mhf.Backbone, "forward", refuse)
    ran = set()
    for fn in events(page):
        if name_of(fn.fn) in LIGHT:
            assert asked(page, fn, page.begin)
            ran.add(name_of(fn.fn))
    assert ran >= {"on_slide", "on_tab"}
    with pytest.raises(AssertionError):
        page.on_look(page.begin, *CUTS, "signature", "the one")


SEEN = (*CUTS, "signature")


def test_picking_a_token(page):
    """A click moves all views to that token and lets go of forced buckets; one outside counts as
    the nearest."""
    session = opened(page.lab, force={"0": 3})
    for index, expected in ((2, 2), (0, 0), (10**9, 9), (-5, 0)):
        session, *_ = page.on_pick(types.SimpleNamespace(index=index), session, *SEEN)
        assert (session["position"], session["force"]) == (expected, {})


def test_forcing_a_bucket(page):
    """A click forces, a second one lets go; two functions can be forced; −1 lets go of all."""

    def click(session, j, bucket):
        event = types.SimpleNamespace(function=j, bucket=bucket)
        return page.on_force(event, session, *SEEN)[0]

    session = click(opened(page.lab), 0, 3)
    model, ids = of_model(page.lab, session)
    expected = explain.explain(model, ids, force={0: 3})
    assert {name: session["trace"][name] for name in expected} == expected
    both = click(session, 1, 9)
    assert both["force"] == {"0": 3, "1": 9} and click(both, 0, 4)["force"] == {"0": 4, "1": 9}
    assert click(both, 0, 3)["force"] == {"1": 9} and click(both, -1, 0)["force"] == {}
    for j, bucket in ((3, 0), (-2, 0), (0, 64), (0, -1), (10**30, 0)):
        with pytest.raises(ValueError) as error:
            click(both, j, bucket)
        one_sentence(error)


def test_another_candidate(page):
    """A candidate is put behind the chosen step, with its own probability, and the text goes on."""
    before = written(page.lab, opened(page.lab, "the one"), 6)[-1]
    before = demo_app.trace_again(page.lab, before, position=before["start"])
    candidate = before["trace"]["top_tokens"][3]["id"]
    event = types.SimpleNamespace(id=candidate)
    *_, (session, *_) = page.on_branch(event, before, *SEEN, 5, 0)
    at = before["position"] + 1
    assert session["ids"][:at] == before["ids"][:at] and session["ids"][at] == candidate
    assert session["start"] == before["start"]
    model, ids = of_model(page.lab, session)
    log_p = model.log_probs(ids)[0]
    assert list(session["log_probs"]) == list(range(session["start"], len(session["ids"])))
    for i, found in session["log_probs"].items():
        close(found, log_p[i - 1, ids[0, i]])


@pytest.mark.parametrize("candidate", [340, -1, 10**30])
def test_no_such_candidate(page, candidate):
    """A token that there is not is refused."""
    with pytest.raises(ValueError) as error:
        list(page.on_branch(types.SimpleNamespace(id=candidate), opened(page.lab), *SEEN, 5, 0))
    one_sentence(error, candidate)


def test_an_unlisted_candidate_has_its_probability(page):
    """A candidate beyond the listed ones has a probability, too: that of the model."""
    session = opened(page.lab, "the one")
    listed = {e["id"] for e in session["trace"]["top_tokens"]}
    candidate = next(i for i in range(300) if i not in listed)
    *_, (after, *_) = page.on_branch(types.SimpleNamespace(id=candidate), session, *SEEN, 2, 0)
    model, ids = of_model(page.lab, after)
    at = len(session["ids"])
    close(after["log_probs"][at], model.log_probs(ids)[0, at - 1, candidate])


def test_streaming_draws_one_view(page):
    """While text comes, only its own view is drawn; at the end all are."""
    *steps, last = page.on_generate(opened(page.lab, "the"), *SEEN, 4, 0)
    assert len(steps) == 4 and all(isinstance(html, str) for html in last[1:])
    at = 1 + demo_app.DRAWN.index("generate")
    for step in steps:
        assert [i for i, value in enumerate(step) if isinstance(value, str)] == [at]
    assert [len(Reader(step[at]).all("button", data_pick=None)) for step in steps] == [1, 2, 3, 4]


def test_stopping(page):
    """Stopped in the midst, the text so far is drawn in all views, at its last step."""
    stream = page.on_generate(opened(page.lab, "the"), *SEEN, 20, 0)
    session = [next(stream) for _ in range(3)][-1][0]
    stream.close()
    after, *views = page.drawn(session, SEEN)
    assert after["ids"] == session["ids"] and after["position"] == len(after["ids"]) - 2
    assert all(isinstance(html, str) for html in views) and not page.lab.lock.locked()
    untouched = opened(page.lab, position=1)
    assert page.drawn(untouched, SEEN)[0] == untouched


def test_another_checkpoint(page):
    """Choosing one reads the prompt with it and forgets words; where the prompt cannot be read,
    an example is."""
    session = demo_app.add_words(page.lab, opened(page.lab), "zebra")
    after, *_, prompt, _ = page.on_checkpoint(session, *SEEN, "crowded")
    assert (after["checkpoint"], after["words"], prompt) == ("crowded", [], PROMPT)
    after, *_, prompt, _ = page.on_checkpoint(session, *SEEN, "untokenized")
    assert after["ids"] == [int(i) for i in prompt.split()]
    back, *_, prompt, _ = page.on_checkpoint(after, *SEEN, "mhf")
    assert back["checkpoint"] == "mhf" and back["ids"] == tokenizer().encode(prompt)
    with pytest.raises(ValueError):
        page.on_checkpoint(session, *SEEN, "/etc")


@pytest.mark.parametrize("kind", ["mhf", "crowded", "untokenized"])
def test_examples(page, kind):
    """Every example opens, under the name that is shown; so does one outside."""
    session, found = opened(page.lab, kind=kind), demo_app.examples(page.lab.get(kind))
    buttons = Reader(page.examples_html(session)).all("button", data_example=None)
    assert [b.text.strip() for b in buttons] == [label for label, *_ in found]
    for index in [*range(len(found)), -1]:
        after, *_, prompt = page.on_example(types.SimpleNamespace(index=index), session, *SEEN)
        assert after["prompt"] == prompt == found[index % len(found)][1]


def test_examples_of_a_checkpoints_own_tokens(lab):
    """Of a close pair the example's text is its two tokens, which share all ids but one; of a
    token that was hashed again it is the token, the tries of which are more than one."""
    found = {label: text for label, text, _ in demo_app.examples(lab.get("crowded"))}
    pair, ids = tokenizer().encode(found["two alike"]), lab.get("crowded").model.signatures.ids
    assert len(pair) == 2 and int((ids[pair[0]] == ids[pair[1]]).sum()) >= ids.shape[1] - 1
    trace = opened(lab, found["hashed again"], kind="crowded")["trace"]
    assert len(trace["tokens"]) == 1 and len(trace["signature"]["tries"]) > 1
    assert "hashed again" not in {label for label, *_ in demo_app.examples(lab.get("mhf"))}


def test_the_tour(page):
    """From the first step to the last and back, each opens its tab, and no step leaves the tour."""
    session, step = page.begin, 0
    for by in [1] * 12 + [-1] * 12:
        session, *rest = page.on_tour(by, session, *SEEN, step)
        *_, prompt, step, tour, tab, tabs = rest
        assert 0 <= step < len(demo_app.TOUR) and demo_app.TOUR[step][0] in Reader(tour).text
        assert tab == demo_app.TOUR[step][1] in demo_app.TABS and prompt == session["prompt"]
    assert step == 0 and 8 <= len(demo_app.TOUR) <= 12


def test_loading_a_link(page):
    """A page opened by a link has the link's prompt, sliders and tab in the controls."""
    query = "prompt=the+one&temperature=0.5&top_k=7&tab=gate&checkpoint=crowded&position=0"
    request = types.SimpleNamespace(query_params=query)
    session, *rest = page.on_load(request, page.begin, *SEEN)
    prompt, choice, examples, *values, tabs, seed = rest[len(demo_app.DRAWN) :]
    assert prompt == "the one" and choice.value == "crowded" and tabs.selected == "gate"
    assert values == [0.5, 7, 1.0, "gate", 0.5, 7, 1.0]
    assert (session["checkpoint"], session["position"]) == ("crowded", 0)


@pytest.mark.parametrize(
    "query", ["&".join(f"x{i}=1" for i in range(500)), "prompt=" + "a" * 60_000]
)
def test_loading_a_huge_link(page, query):
    """A link of 500 parts or 60,000 characters opens the page all the same."""
    session, *_ = page.on_load(types.SimpleNamespace(query_params=query), page.begin, *SEEN)
    assert session["trace"]


def test_the_code_is_the_source():
    """Every piece of code that is shown stands in mhf.py, line by line; no name is missing."""
    source = Path(mhf.__file__).read_text(encoding="utf-8")
    lines = {line.strip() for line in source.splitlines()}
    for name in demo_app.CODE:
        shown = [
            line for line in demo_app.source(name).splitlines() if not line.startswith("# mhf.")
        ]
        assert len(shown) >= 3 and {line.strip() for line in shown} <= lines
        assert "not in this mhf.py" not in demo_app.source(name)


def test_code_that_a_student_renamed(monkeypatch):
    """A piece that is not there any more is named, and the rest is shown."""
    monkeypatch.delattr(mhf, "soft_embedding")
    text = demo_app.source("cascade")
    assert "soft_embedding" in text.splitlines()[0] and "CascadeDecoder" in text


def test_building_gives_no_warning(lab):
    """No deprecated or doubtful call of Gradio is made."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        Page(lab).demo.get_config_file()
    assert not [str(w.message) for w in given if not issubclass(w.category, ResourceWarning)]


# ---------------------------------------------------------------------------------------------
# Edges
# ---------------------------------------------------------------------------------------------


def test_certainty_is_100_percent(lab):
    """A token whose log P rounds to 0 is certain, not impossible."""
    trace = copy.deepcopy(opened(lab)["trace"])
    trace["top_tokens"][0] |= {"log_prob": 0.0, "log_prob_paper": 0.0}
    row = demo_app.view_probability(trace)["rows"][0]
    assert row["p"] == row["paper"] == 1.0 and demo_app.percent(row["p"]) == "100 %"


@pytest.mark.parametrize("kind", ["mhf", "single", "lsh"])
def test_the_arithmetic_is_right(lab, kind):
    """What the line says is what is shown: joint ÷ the sum is the paper's P, also where tokens
    share signatures and the sum is not the valid mass. Three digits are shown: 1 % is allowed."""
    for row in demo_app.view_probability(opened(lab, kind=kind)["trace"])["rows"]:
        said = row["sum"].replace("−", "-")
        joint, total, paper = map(
            float, re.search(r"joint (\S+);\s+÷ (\S+), .*→ (\S+) \(paper", said).groups()
        )
        close(joint / total, paper, atol=0, rtol=1e-2)


def test_what_nobody_foresaw_is_one_sentence(capsys):
    """Another error is told on the page without its text, and in full in the terminal."""

    def work():
        raise RuntimeError("secret")

    with pytest.raises(demo_app.gr.Error) as error:
        demo_app.refusing(work)()
    one_sentence(types.SimpleNamespace(value=error.value.message), "RuntimeError")
    assert "secret" not in error.value.message and "secret" in capsys.readouterr().err


def test_a_run_that_goes_on(runs, tmp_path):
    """--checkpoint names a run: its last checkpoint counts, also after the first one is gone."""
    run = tmp_path / "run"
    make(run)
    lab = Lab(run)
    first = lab.get("run")
    make(run, step="step-2", seed=3)
    shutil.rmtree(run / "step-1")
    second = lab.get("run")
    assert second is not first and lab.get("run") is second
