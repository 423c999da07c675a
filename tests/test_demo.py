"""demo_app.py without a browser and a server: what it draws is the library's, what a user does.

Numbers are read out of the HTML and compared with the model's own tensors. What the page's script
sends is sent by `do`.
"""

import copy
import functools
import itertools
import json
import math
import re
import types
import urllib.parse
from html.parser import HTMLParser

import pytest
import torch
from conftest import FIXTURES, close, random_checkpoint, refused

import demo_app
import mhf
from demo_app import DEFAULTS, FRESH, Lab, Page, act, draw, open_prompt, percent, trace_again
from support.explain import best_first, explain
from support.tokenizer import Tokenizer

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEXT = "".join(f"the {a} of {b}, or not to be {a}\n" for a in NUMBERS for b in NUMBERS)
CORPUS = TEXT + "漢字仮名交じり文の例 " * 40 + "éééé 🙂🙂 \u200b\u0301 \t\t " * 20
PROMPT = "the one of two, or not to be three"
WINDOW = 64
KINDS = {  # and "tiny_h4", published by the authors, without a tokenizer
    "mhf": {}, "crowded": dict(num_hashes=2, num_buckets=32), "unused": dict(unused=5),
    "single": dict(num_hashes=1), "eight": dict(num_hashes=8, num_buckets=256),
    "lsh": dict(num_hashes=2, num_lsh=2), "untokenized": dict(tokenizer=False, unused=2),
    "standard": dict(standard=True),
}  # fmt: skip
ALL = [*KINDS, "tiny_h4"]
HASHED = [kind for kind in ALL if kind != "standard"]


@functools.cache
def tokenizer():
    return Tokenizer.train([CORPUS], 340)


def make(run, step="step-1", **fields):
    """A run folder whose last checkpoint is a `random_checkpoint`."""
    fields = dict(max_position_embeddings=WINDOW) | fields
    random_checkpoint(run / step, tokenizer(), **fields)
    (run / "last").write_text(step + "\n", encoding="utf-8")
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """An output folder with a run of every kind."""
    out = tmp_path_factory.mktemp("runs")
    for kind, fields in KINDS.items():
        make(out / kind, **fields)
    return out


@pytest.fixture(scope="module")
def lab(runs):
    """Checkpoints of every kind and the shipped ones: whoever changes a model makes its own."""
    lab = Lab(FIXTURES / "tiny_h4", runs)
    lab.open = functools.cache(lab._open)
    return lab


@functools.cache
def opened(lab, prompt=PROMPT, kind="mhf", position=-1):
    """A session at a prompt; without a tokenizer the prompt is some ids."""
    if prompt == PROMPT and kind in ("untokenized", "tiny_h4"):
        prompt = "5 70 3 12 12 8 9"
    session = open_prompt(lab, FRESH | {"checkpoint": kind}, prompt)
    return session if position == -1 else trace_again(lab, session, position=position)


def event(what, **data):
    """What the script sends: every value is a text, but for a checkbox."""
    values = {name: v if isinstance(v, bool) else str(v) for name, v in data.items()}
    return demo_app.gr.EventData(None, {"do": what} | values)


def do(lab, session, what, **data):
    return act(lab, session, event(what, **data))


def written(lab, session, what="generate", many=8, seed=0, sampling=DEFAULTS, **data):
    """The sessions that generate gives, one for each token, and the last one with its trace."""
    data = event(what, many=many, seed=seed, **data)
    return list(demo_app.generate(lab, session, sampling, data))


def of_model(lab, session):
    """The session's model and ids (1, T)."""
    return lab.of(session).model, torch.tensor([session["ids"]])


def library(lab, session):
    """At the session's position: log P of all tokens (V,), and their scores (V,)."""
    (model, ids), at = of_model(lab, session), session["position"]
    return model.log_probs(ids)[0, at], model.token_scores(model(ids))[0, at]


def inside(lab, kind):
    """The session, model and ids (1, T) at the token in the midst of a prompt."""
    session = opened(lab, kind=kind, position=2)
    return session, *of_model(lab, session)


def signatures_of(model):
    """Those of all tokens that are used, in order (V, H)."""
    return [model.signatures.signatures[i] for i in range(len(model.rows)) if i not in model.unused]


class Reader(HTMLParser):
    """The elements of a text of HTML, in order: tag, attributes, all the text inside."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_startendtag(self, tag, attributes):
        self.elements.append(types.SimpleNamespace(tag=tag, at=dict(attributes), text=""))

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag not in ("br", "input"):
            self.open.append(self.elements[-1])

    def handle_endtag(self, tag):
        assert self.open.pop().tag == tag

    def handle_data(self, text):
        self.text += text
        for element in self.open:
            element.text += text

    def all(self, tag=None, **attributes):
        """Elements by tag and attributes; data_p=None asks for any value of data-p."""
        names = {name.rstrip("_").replace("_", "-"): v for name, v in attributes.items()}
        fits = lambda e: all(k in e.at and v in (None, e.at[k]) for k, v in names.items())  # noqa: E731
        return [e for e in self.elements if tag in (None, e.tag) and fits(e)]

    def values(self, name):
        """The numbers of one attribute."""
        return [float(e.at[name]) for e in self.elements if name in e.at]


def view(lab, session, name, **sampling):
    return Reader(*draw(lab, session, DEFAULTS | sampling, [name]))


def views(lab, session):
    return dict(zip(demo_app.DRAWN, map(Reader, draw(lab, session, DEFAULTS)), strict=True))


@pytest.mark.parametrize("kind", ALL)
def test_the_trace_is_explains(lab, kind):
    """What all is drawn from is explain's dict of this position, and plain JSON."""
    for position in (2, -1):
        session = opened(lab, kind=kind, position=position)
        assert json.loads(json.dumps(session["trace"], allow_nan=False)) == session["trace"]
        assert session["trace"] == explain(*of_model(lab, session), position)


def votes_of(way):
    """[(the element of a vote, its bars, that of its probability)]"""
    starts = [i for i, e in enumerate(way.elements) if "data-sum" in e.at]
    for i, end in zip(starts, [*starts[1:], None]):
        part = way.elements[i:end]
        (p,) = (e for e in part if "data-p" in e.at)
        yield way.elements[i], [e for e in part if "data-bits" in e.at], p


@pytest.mark.parametrize("kind", ALL)
def test_the_votes(lab, kind):
    """The best 8 tokens: the bits of each function, which sum to the score, and P, to scale."""
    session, model, ids = inside(lab, kind)
    (log_p, scores), way = library(lab, session), view(lab, session, "way")
    best, most = best_first(log_p, 8).tolist(), max(way.values("data-sum"))
    for i, (vote, bars, p) in zip(best, votes_of(way), strict=True):
        log_ps, total = scores.log_softmax(0)[i : i + 1], float(vote.at["data-sum"])
        if kind != "standard":
            all_p = model.bucket_log_probs(model(ids))[0, 2]  # (H, B)
            log_ps = all_p.gather(1, model.model.hash_map[i].unsqueeze(1))[:, 0]
            close(-math.log(2) * total, scores[i])
        bits = [float(bar.at["data-bits"]) for bar in bars]
        close(bits, -log_ps / math.log(2))
        close(float(p.at["data-p"]), log_p[i].exp(), atol=1e-6)
        assert total == pytest.approx(sum(bits), abs=1e-6)
        wide, ends = [350 * b / most for b in bits], itertools.accumulate(bits[:-1], initial=0)
        close([float(e.at["width"]) for e in bars], [max(0.5, w) for w in wide], atol=0.006)
        close([float(e.at["x"]) for e in bars], [122 + 350 * b / most for b in ends], atol=0.006)
        close(float(p.at["width"]), 62 * float(p.at["data-p"]), atol=0.06)
        told = [lab.of(session).name(i, 12), f"{total:.1f}", percent(float(p.at["data-p"]))]
        assert all(text in vote.text for text in told)
    rest = float(re.search(r"all others([\d.e-]+) %", way.text.replace("\n", ""))[1])
    close(rest / 100, max(0, 1 - log_p[best].exp().double().sum()), rtol=0.06)


def colours(reader):
    """What strips of colour say: sign and strength of each number, relative to its row's peak."""
    cells = [e.at for e in reader.elements if e.at.get("class") in ("hot", "cold")]
    return [(-1) ** (at["class"] == "cold") * float(at["fill-opacity"]) for at in cells]


@pytest.mark.parametrize("kind", ALL)
def test_rows_vectors_and_state_are_the_models(lab, kind):
    """Strips of colour are the rows of the table, their sum, x = model.embed and the state."""
    session, model, ids = inside(lab, kind)
    x, h, i = model.embed(ids)[0, 2], model(ids)[0, 2], ids[0, 2]
    rows, scaled = x.unsqueeze(0), lambda *many: torch.cat([v / v.abs().max() for v in many])
    if kind != "standard":
        rows = model.table[range(model.config.num_hashes), model.model.hash_map[i]]  # (H, D)
        mixed = model.embed(ids, return_gate=True)[1][0, 2] @ rows
        close(colours(view(lab, session, "gate")), scaled(*rows, mixed, x), atol=0.0051)
    shown = scaled(*(v[:64] for v in (*rows, x, h)))
    close(colours(view(lab, session, "way")), shown, atol=0.0051)


@pytest.mark.parametrize("kind", HASHED)
def test_signature(lab, kind):
    """Each function's bucket is hash_map's, marked at its place; tokens beside it are counted."""
    session, model, ids = inside(lab, kind)
    drawn, signature = view(lab, session, "signature"), model.model.hash_map[ids[0, 2]].tolist()
    assert drawn.values("data-bucket") == signature
    marks = [float(e.at["x"]) for e in drawn.all("rect", width="4")]
    close(marks, [min(600 * b / model.config.num_buckets, 596) for b in signature])
    for j, address in enumerate(drawn.all("div", data_bucket=None)):
        others = sum(s[j] == signature[j] for s in signatures_of(model)) - 1
        more = re.search(r"and ([\d,]+) more", address.text)
        assert (int(more[1]) if more else 0) == max(0, others - 6)
        assert ("no other token" in address.text) == (others == 0)


@pytest.mark.parametrize("kind", HASHED)
def test_gate(lab, kind):
    """The weights are those of model.embed and sum to 1, at the position and of all tokens."""
    session, model, ids = inside(lab, kind)
    gate, drawn = model.embed(ids, return_gate=True)[1][0], view(lab, session, "gate")
    alphas = drawn.values("data-alpha")
    close(alphas, gate[2], atol=1e-6)
    assert sum(alphas) == pytest.approx(1, abs=1e-6)
    close([float(cell.text) for cell in drawn.all("td")], gate.flatten(), atol=0.51e-4)
    assert [b.text for b in drawn.all("b", data_alpha=None)] == [f"× {a:.4f}" for a in alphas]
    ribbons = view(lab, session, "way").all("path", class_="ribbon")
    close([float(e.at["stroke-width"]) / 48 for e in ribbons], gate[2], atol=1e-6)
    points = [float(x) for x in re.findall(r"([+-][\d.]+) points", drawn.text)]
    close(points, [100 * (a - 1 / len(alphas)) for a in alphas], atol=0.051)


@pytest.mark.parametrize("kind", HASHED)
def test_cascade(lab, kind):
    """Buckets with the functions' probabilities, the rest in one number; tokens as paths with P."""
    session, model, ids = inside(lab, kind)
    log_p, _ = library(lab, session)
    p = model.bucket_log_probs(model(ids)[0, 2]).exp()  # (H, B)
    drawn, places, shown = view(lab, session, "cascade"), {}, [[] for _ in p]
    for e in drawn.all("g", data_bucket=None):
        j, b = int(e.at["data-function"]), int(e.at["data-bucket"])
        box, bar = drawn.elements[drawn.elements.index(e) + 1 :][:2]
        close(float(e.at["data-prob"]), p[j, b], atol=1e-6)
        close(float(bar.at["width"]), max(1, 150 * p[j, b]), atol=1e-3)
        assert percent(float(e.at["data-prob"])) in e.text and str(b) in e.text
        places[j, b] = float(box.at["y"]) + 17
        shown[j].append(b)
    others = [e.text for e in drawn.all("text") if " others: " in e.text]
    doubts = re.findall(r"([\d.]+) of [\d.]+ bits of doubt", drawn.text)
    for j, (buckets, rest) in enumerate(zip(shown, others, strict=True)):
        many, rest = rest.replace(",", "").removesuffix(" %").split(" others: ")
        assert p[j].argmax().item() in buckets and len({*buckets}) + int(many) == len(p[j])
        close(float(rest), max(0, 100 - 100 * p[j, buckets].double().sum()), atol=1e-4, rtol=0.06)
        close(float(doubts[j]), -(p[j] * p[j].log2()).nansum(), atol=0.051)
    best = best_first(log_p, 6).tolist()
    close(drawn.values("data-p"), log_p[best].exp(), atol=1e-6)
    paths = [e.at["d"] for e in drawn.all("path", d=None) if "way-of" in e.at["class"]]
    for i, path in zip(best, paths, strict=True):
        steps = enumerate(model.model.hash_map[i].tolist())
        stops = [float(y) for y in re.findall(r"M\S+ (\S+) C", path)]
        assert stops == [places.get(step, 408) for step in steps]


@pytest.mark.parametrize("kind", ALL)
def test_probability(lab, kind):
    """Joint, renormalised and calibrated probability of the chosen token, and all in the table."""
    session = opened(lab, kind=kind, position=2)
    log_p, scores = library(lab, session)
    hashed, best = kind != "standard", best_first(log_p, 10).tolist()
    found = torch.stack([scores, scores.log_softmax(0), log_p]).double()
    for i in (best[0], best[3]):
        drawn = view(lab, do(lab, session, "go", tab="probability", token=i), "probability")
        close(drawn.values("data-step"), found[not hashed :, i].exp(), atol=1e-6)
        for step in drawn.all("b", data_step=None):
            assert step.text == percent(float(step.at["data-step"]))
    cells = [e.text for e in drawn.all("td")]
    wide = len(cells) // 10
    for i in best:
        own, cells = cells[:wide], cells[wide:]
        printed = [float(text.removesuffix(" %")) / 100 for text in own[-2:]]
        close(printed, found[1:, i].exp(), atol=1e-9, rtol=0.06)
        if hashed:
            close(sum(map(float, own[1:-4])), float(own[-4]), atol=0.005)
            close(float(own[-4]), scores[i], atol=6e-4)
            close(float(own[-3]), scores[i].exp(), rtol=0.006)


SETTINGS = [(1.0, None, 1.0), (0.3, None, 1.0), (3.0, 5, 1.0), (1.0, None, 0.5), (0.8, 40, 0.9)]
SETTINGS += [(0.0, None, 1.0), (0.01, 1, 0.01)]


@pytest.mark.parametrize("kind", ALL)
def test_what_is_drawn_from(lab, kind):
    """The sliders' distribution is mhf.sampling_probs of the model's log_probs, all counted."""
    session = opened(lab, kind=kind, position=2)
    log_p, _ = library(lab, session)
    for cuts in (dict(zip(DEFAULTS, values)) for values in SETTINGS):
        drawn = view(lab, session, "probability", **cuts)
        expected = mhf.sampling_probs(log_p.unsqueeze(0), **cuts)[0]
        close(drawn.values("data-drawn"), expected[best_first(log_p, 10)], atol=1e-6)
        kept = int(re.search(r"one of ([\d,]+) token", drawn.text)[1].replace(",", ""))
        assert kept == (expected > 0).sum() or not cuts["top_k"] and cuts["top_p"] == 1


@pytest.mark.parametrize("kind", ["mhf", "crowded", "eight", "unused", "single", "lsh"])
def test_the_funnel_ends_at_one(lab, kind):
    """Each path ends at one token, or at those that share all ids; counts are brute force's."""
    session, model, _ = inside(lab, kind)
    known, found = signatures_of(model), lab.trace(session, top_k=len(model.rows))["top_tokens"]
    shared = "may share all" in view(lab, session, "signature").text
    assert len(found) == len(known) and (len({*known}) == len(known) or kind in ("single", "lsh"))
    assert shared == (known.count(model.signatures.signatures[session["ids"][2]]) > 1)
    for e in found:
        ids = tuple(e["signature"])
        left = [sum(s[: j + 1] == ids[: j + 1] for s in known) for j in range(len(ids))]
        assert e["left"] == left and left[-1] == known.count(ids)
    for e in found[:3]:
        drawn = view(lab, do(lab, session, "go", tab="cascade", token=e["id"]), "cascade")
        assert drawn.values("data-left") == e["left"]


def asked(lab, session, kind, function, bucket):
    return do(lab, do(lab, session, "kind", value=kind), "what", function=function, bucket=bucket)


@pytest.mark.parametrize("kind", HASHED)
@pytest.mark.parametrize("how", ["only", "force"])
def test_what_if(lab, kind, how):
    """only: P under the condition; force: the library's steps; how far the distributions differ."""
    session, model, ids = inside(lab, kind)
    log_p, _ = library(lab, session)
    p, hash_map = log_p.double().exp(), model.model.hash_map
    for function in {0, model.config.num_hashes - 1}:
        bucket = hash_map[p.argsort(descending=True)[4], function].item()
        fits = (hash_map[:, function] == bucket) | (how == "force")
        expected = torch.where(fits, p, 0) / p[fits].sum()
        if how == "force":
            forced = model.hash_head.steps(model(ids)[0, 2], model.table, {function: bucket})
            steps = [o.double().log_softmax(-1)[hash_map[:, j]] for j, (o, _) in enumerate(forced)]
            scores = sum(steps).index_fill(0, model.unused, -torch.inf)
            expected = (scores / model.config.calibration).softmax(0)
        drawn = view(lab, asked(lab, session, how, function, bucket), "cascade")
        tokens = [int(e.at["data-token"]) for e in drawn.all("g", data_p=None)]
        assert fits[tokens].all() and tokens
        close(drawn.values("data-p"), expected[tokens], atol=1e-6)
        close(drawn.values("data-p"), expected.topk(len(tokens)).values, atol=1e-6)
        close(drawn.values("data-tv"), [(expected - p).abs().sum() / 2], atol=1e-6)


ENDS = {
    "what": dict(function=0), "-1": dict(function=-1, bucket=0), "kind": dict(value="only"),
    "pick": dict(index=9), "type": dict(prompt=PROMPT),
}  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
def test_a_what_if_ends(lab, end):
    """Asked a second time, by the button, with another kind, token or prompt: all is as before."""
    session = opened(lab)
    bucket = session["trace"]["functions"][0]["top"][1]["bucket"]
    what = asked(lab, session, "only", 0, bucket)
    (chosen,) = view(lab, what, "cascade").all("g", data_function="0", data_bucket=str(bucket))
    assert chosen.at["aria-pressed"] == "true" and what["trace"] == session["trace"]
    after = do(lab, what, "what" if end == "-1" else end, **dict(bucket=bucket) | ENDS[end])
    assert after == session and not view(lab, after, "cascade").values("data-tv")


def test_what_ifs_that_cannot_be(lab):
    """A bucket that is not there, or that has no token, is refused in a sentence."""
    for function, bucket in ((3, 0), (0, 64), (0, -1), (10**30, 0)):
        refused(lambda what=(function, bucket): asked(lab, opened(lab), "only", *what), bucket)
    eight = opened(lab, kind="eight")
    empty = min({*range(256)} - {s[0] for s in signatures_of(lab.of(eight).model)})
    refused(lambda: asked(lab, eight, "only", 0, empty), "no token", empty)


@pytest.mark.parametrize("kind", ["mhf", "unused", "single", "untokenized", "standard"])
@pytest.mark.parametrize("cuts", SETTINGS[::4], ids=str)
def test_generated_tokens_are_the_librarys(lab, kind, cuts):
    """One session a token, each with one more; the text is that of model.generate for the seed."""
    session, settings = opened(lab, kind=kind), dict(zip(DEFAULTS, cuts))
    *steps, last = written(lab, session, many=6, seed=3, sampling=settings)
    stop = () if kind == "untokenized" else tokenizer().ends
    model, start = lab.of(session).model, len(session["ids"])
    new = [*model.generate(session["ids"], 6, stop=stop, seed=3, **settings)]
    assert last["ids"] == session["ids"] + new and last["start"] == start
    assert [s["ids"] for s in steps] == [last["ids"][: start + n + 1] for n in range(len(new))]
    assert last["trace"]["next"]["id"] == new[-1] and last["position"] == start + len(new) - 2


@pytest.mark.parametrize("kind", ["mhf", "unused", "untokenized", "standard"])
def test_candidates(lab, kind):
    """A written token tells its P and the likeliest ones', as log_probs has them, and its step."""
    session = written(lab, opened(lab, "5 70" if kind == "untokenized" else "the", kind))[-1]
    (model, ids), name = of_model(lab, session), lab.of(session).name
    log_p, places = model.log_probs(ids)[0], range(session["start"], ids.shape[1])
    spans = view(lab, session, "generate").all("span", data_do="pick")
    assert [int(e.at["data-index"]) + 1 for e in spans] == [*session["written"]] == [*places]
    for e, (i, (found, likely)) in zip(spans, session["written"].items()):
        close(found, log_p[i - 1, ids[0, i]])
        close([*likely.values()], log_p[i - 1].topk(5).values)
        close(log_p[i - 1, [*likely]], log_p[i - 1].topk(5).values)
        for k, p in (likely | {ids[0, i].item(): found}).items():
            assert name(k) in e.at["data-tip"] and percent(math.exp(p)) in e.at["data-tip"]
    picked = do(lab, session, "pick", index=places[0] - 1, token=session["ids"][places[0]])
    assert picked["trace"]["next"]["id"] == picked["chosen"] == session["ids"][places[0]]


def test_another_candidate(lab):
    """A candidate is put behind the chosen step, and the text goes on from there."""
    first = written(lab, opened(lab, "the one"), many=6)[-1]
    before = do(lab, first, "pick", index=first["start"] + 1)
    token, kept = before["trace"]["top_tokens"][3]["id"], first["ids"][: first["start"] + 2]
    last = written(lab, before, "branch", token=token, many=4, seed=1)[-1]
    how = dict(stop=tokenizer().ends, seed=1)
    assert last["ids"] == [*kept, token, *lab.of(first).model.generate([*kept, token], 4, **how)]
    assert [*last["written"]] == list(range(first["start"], len(last["ids"])))


def test_a_full_context_is_halved_and_it_is_said(lab):
    """As the library does; a candidate behind the last place of a full one is no exception."""
    ids = tokenizer().encode(TEXT)[:WINDOW]
    full = trace_again(lab, opened(lab), ids=ids, position=-1)
    for how in ({}, dict(what="branch", token=7)):
        session = written(lab, full, many=3, **how)[-1]
        assert session["start"] == WINDOW // 2 < len(session["ids"]) <= WINDOW
        assert session["ids"][:31] in (ids[32:63], ids[33:])
        assert "half" in view(lab, session, "way").text
    long = open_prompt(lab, opened(lab), TEXT[:999])
    assert len(long["ids"]) == WINDOW and f"newest {WINDOW}" in view(lab, long, "way").text


def test_wrong_wishes(lab, monkeypatch):
    """A seed or a token that cannot be is refused; of more tokens than allowed the most come."""
    session = opened(lab)
    for wrong in (dict(seed=-1), dict(seed=2**63), dict(what="branch", token=340)):
        refused(lambda wrong=wrong: written(lab, session, **wrong), [*wrong.values()][-1])
    refused(lambda: written(lab, session, seed="x", many=""))
    monkeypatch.setattr(demo_app, "MAX_TOKENS", 4)
    for many, expected in ((10**9, 4), (0, 0), (-3, 0)):
        assert len(written(lab, session, many=many)) == expected + 1


WORDS = "zebra\n漢字仮名x\n🙂x\nnaïve"


def added(lab, session, words, space=True):
    return do(lab, session, "add", words=words, space=space)


@pytest.mark.parametrize("kind", ["mhf", "crowded", "unused", "single"])
def test_words_are_a_table_extended_by_hand(lab, kind):
    """Each line is a token with the table's ids and no parameter; the shared model stays."""
    session = opened(lab, kind=kind)
    shared, config = lab.of(session), lab.of(session).model.config
    table = mhf.SignatureTable(config.num_hashes, config.num_buckets)
    table.extend(shared.model.signatures.tokens, shared.model.signatures.pad_id)
    table.extend([f" {word}".encode() for word in WORDS.split("\n")])
    session = added(lab, session, WORDS)
    own, drawn = lab.of(session), view(lab, session, "vocabulary")
    assert own.model.signatures.signatures == table.signatures
    assert own.model.model.hash_map.tolist() == [list(s) for s in table.signatures]
    assert all(p is q for p, q in zip(own.model.parameters(), shared.model.parameters()))
    assert len(shared.raw) == len(shared.model.signatures) == len(shared.model.model.hash_map)
    for i, entry in enumerate(drawn.all("span", class_="added"), len(shared.raw)):
        ids, many = " ".join(map(str, table.signatures[i])), len(table.trace(table.tokens[i]))
        assert own.name(i) in entry.text and f"\n{ids} " in entry.text
        assert (f"after {many} tries" in entry.text) == (many > 1)
    assert "Parameters added: 0." in drawn.text and f"add {4 * 16}." in drawn.text


def test_words_in_a_prompt(lab):
    """Own words are read as their tokens, the longest first, wherever they stand."""
    session = added(lab, opened(lab), "zeb\nzebra\na.c\n^(", space=False)
    session = do(lab, session, "type", prompt="the zebra's zeb of a.c abc ^(")
    of = tokenizer().encode
    expected = [of("the "), [341], of("'s "), [340], of(" of "), [342], of(" abc "), [343]]
    assert session["ids"] == [*itertools.chain(*expected)]
    used = do(lab, session, "use", index=1)
    assert used["prompt"] == session["prompt"] + "zebra" and used["ids"] == [*session["ids"], 341]
    assert do(lab, used, "forget")["ids"] == of(used["prompt"])


BAD_WORDS = {
    "": [], "\n  \n\t": [], "\n".join(map(str, range(51))): [51, 50], "x" * 64: [65, 64],
    "🙂" * 16: [65, 64], "of": [], "zebra\nyak\nzebra": [], "zebra\ud800": [],
}  # fmt: skip


@pytest.mark.parametrize("text", BAD_WORDS, ids=ascii)
def test_refused_words(lab, text):
    """What cannot be added is refused in a sentence, and nothing is; so without a tokenizer."""
    refused(lambda: added(lab, opened(lab), text), *BAD_WORDS[text])
    full = added(lab, opened(lab), "\n".join(f"{i:063}" for i in range(50)))
    refused(lambda: added(lab, full, "more"), 51)
    refused(lambda: added(lab, opened(lab, kind="untokenized"), "zebra"), "tokenizer")
    assert opened(lab)["words"] == [] and len(lab.of(opened(lab)).raw) == 340


def test_sessions_do_not_see_each_others_words(lab):
    """Two users' words have the same id, and neither sees the other's; a third has none."""
    users = {word: added(lab, opened(lab), word) for word in ("zebra", "yak", "okapi")}
    for word, session in [*users.items()] * 2:
        told = do(lab, session, "type", prompt="the zebra yak okapi")
        texts, page = [t["text"] for t in told["trace"]["tokens"]], view(lab, told, "vocabulary")
        assert told["trace"]["vocab_size"] == 341 and told["ids"].count(340) == 1
        assert [w for w in users if f" {w}" in texts] == [word]
        assert [w for w in users if w in page.text] == [word]
    assert 340 not in opened(lab, "the zebra yak")["ids"]


@pytest.fixture(scope="module")
def peek(lab):
    """What the page does with a typed word: (event, session) -> HTML."""
    return next(f.fn for f in Page(lab).demo.fns.values() if "on_peek" in str(f.fn))


@pytest.mark.parametrize("kind", ["mhf", "crowded", "single"])
def test_a_typed_word(lab, peek, kind):
    """Known or new, it has the ids that the table has or would give it; nothing is added."""
    session = opened(lab, kind=kind)
    table = lab.of(session).model.signatures
    for word in (" zebra", " of", "q" * 200):
        raw, more = word.encode()[:64], copy.deepcopy(table)
        more.extend([] if raw in table.tokens else [raw])
        drawn = Reader(peek(event("peek", word=word), session))
        assert drawn.values("data-bucket") == [*more.signatures[i := more.tokens.index(raw)]]
        assert (f"is token {i}:" if i < 340 else "is no token") in drawn.text
    assert len(table) == 340 and peek(event("peek", word=""), session) == ""
    assert peek(event("peek", word="the"), opened(lab, kind="standard")) == ""


@pytest.mark.parametrize("prompt", [PROMPT, " ", "\n\n", "+%20&=?#", "سلام", "\x00", "<b>&lt;"])
def test_a_link_leads_back(lab, prompt):
    """Prompt, position and tab are those of the session that the link was made of."""
    for position, tab in ((0, "gate"), (-1, "signature")):
        session = do(lab, opened(lab, prompt, position=position), "go", tab=tab)
        (link,) = view(lab, session, "link").all("a", href=None)
        assert link.at["href"] == link.at["data-link"] == demo_app.permalink(session)
        assert do(lab, opened(lab, "of"), "load", query=link.at["href"][1:]) == session
    long = opened(lab, "a" * 10_000)  # no address
    assert demo_app.permalink(long) == "?" and "without the" in view(lab, long, "link").text


WRONG = {"position": ["-1", "99", "x", "9" * 5000, "1.5"], "tab": ["nowhere", "Gate"]}
WRONG |= {"prompt": ["a" * 10_001, "a" * 60_000]}


@pytest.mark.parametrize(("part", "value"), [(k, v) for k in WRONG for v in WRONG[k]], ids=len)
def test_wrong_parts_of_a_link(lab, part, value):
    """What cannot be used is named in a sentence and left out; the rest is used."""
    good = {"prompt": PROMPT, "position": "3", "tab": "gate"}
    query = urllib.parse.urlencode(good | {part: value})
    session = do(lab, opened(lab), "load", query=query)
    assert session["prompt"] == PROMPT and len(session["notice"]) < 100
    assert session["tab"] == ("signature" if part == "tab" else "gate")
    assert session["position"] == (len(session["ids"]) - 1 if part == "position" else 3)
    assert f"link's {part} was left out" in view(lab, session, "way").text


def test_odd_links(lab):
    """Nothing, foreign parts and bytes that are no UTF-8 open the page, without a notice."""
    for odd in ("", "x=1&x=2", "&&", "=", "prompt=", "prompt=%ff%fe", "prompt=%ed%a0%80"):
        assert do(lab, opened(lab), "load", query=odd)["notice"] == ""


@pytest.mark.parametrize("kind", ALL)
def test_every_view_is_drawn_or_says_why_not(lab, kind):
    """Whole elements and real numbers, of unused ids, too; a standard model lacks what it lacks."""
    prompt = "2 341 340" if kind == "untokenized" else PROMPT
    for position in (0, 1, -1):
        for name, drawn in views(lab, opened(lab, prompt, kind, position)).items():
            assert not re.search(r"\b(nan|inf|None|Undefined)\b", drawn.text) and drawn.text.strip()
            absent = kind == "standard" and name in demo_app.NEEDS
            assert ("This model has no" in drawn.text) == absent, name


def test_single_bytes_can_be_seen(lab):
    """A character of several tokens is shown by its bytes in the picture, and whole in the text."""
    drawn = views(lab, opened(lab, "the ڄ ሴ"))
    assert all(f"⟨{byte:02X}⟩" in drawn["way"].text for byte in "ሴ".encode())
    assert "".join(e.text for e in drawn["generate"].all("span")) == "the ڄ ሴ"


GLYPHS = {
    b" the": "␣the", b"\n": "↵", b"\x00": "␀", b"\xff\xfe": "⟨FF⟩⟨FE⟩", "漢🙂".encode(): "漢🙂",
    "\u202e".encode(): "\\u202e", b"": "∅", b"a" * 99: "a" * 23 + "…", None: "#0",
}  # fmt: skip
PERCENTS = {None: "–", 0.0: "0 %", 1.0: "100 %", 0.12345: "12.3 %", 3e-12: "3e-10 %"}


def test_how_tokens_and_numbers_are_written():
    """Blanks, controls and broken UTF-8 can be seen; what is more than 0 is never a plain 0."""
    told = {raw: demo_app.Checkpoint(None, None, [raw], 0).name(0) for raw in GLYPHS}
    assert told == GLYPHS and {p: percent(p) for p in PERCENTS} == PERCENTS


def part(forward):
    """A part of a model that a student wrote."""
    module = torch.nn.Module()
    module.forward = forward
    return module


def gate(of):
    return lambda model: setattr(model.model, "combiner", part(lambda e: (e.mean(-2), of(e))))


def no_cascade(model):
    model.hash_head = part(lambda h, table: torch.einsum("...d,hbd->...hb", h, table))


CHANGES = [  # and the views that have to say that something is missing
    (gate(lambda e: e[..., 0] * 0 + 1 / 3), []), (gate(lambda e: None), ["gate"]),
    (gate(lambda e: e), ["gate"]), (no_cascade, [*demo_app.NEEDS]),
    (lambda m: setattr(m.hash_head.cascade_mixer, "1", m.hash_head.cascade_mixer[0]), []),
]  # fmt: skip


@pytest.mark.parametrize(("change", "missing"), CHANGES)
def test_a_changed_model(runs, change, missing):
    """Views whose quantity is gone say so, the others and generated text are the model's."""
    lab = Lab(None, runs)
    change(lab.of(FRESH | {"checkpoint": "mhf"}).model)
    session = opened(lab)
    drawn, (log_p, _) = views(lab, session), library(lab, session)
    said = [n for n, v in drawn.items() if re.search("has no .* to show|does not give", v.text)]
    assert said == missing
    close([float(p.at["data-p"]) for *_, p in votes_of(drawn["way"])], log_p.exp().topk(8).values)
    after = written(lab, session, many=3)[-1]
    assert after["trace"]["next"] and views(lab, after)
    assert ("AttributeError" in drawn["cascade"].text) == (change is no_cascade)


HOSTILE = [
    "<img src=x onerror=alert(1)>", '"><script>alert(1)</script>', "'><svg/onload=alert(1)>", " ",
    "${7*7}{{7*7}}{% if 1 %}", "</bdi></button></textarea></pre><b>", "&lt;b&gt; &#60;b>", "\n",
    "\x00\x1b", "\u202eabc\u200f", "سلام עולם", "\ud83d half", "\udfff", "\u2028\u200b", "{0} \\",
]  # fmt: skip


@functools.cache
def everywhere(lab, peek, text):
    """All views with the text as prompt, word, typed word, generated upon and notice."""
    sent = text.encode("utf-8", "replace").decode()
    word = sent.replace("\n", "").strip() + "y"
    session = do(lab, added(lab, opened(lab), word), "type", prompt=f"the {text} {word}")
    session = written(lab, session, many=2)[-1] | {"notice": sent}
    best = session["trace"]["functions"][0]["top"][0]["bucket"]
    html = draw(lab, asked(lab, session, "only", 0, best), DEFAULTS)
    html.append(peek(event("peek", word=text), session))
    assert "".join(html).encode("utf-8")  # can be sent
    elements = [e for reader in map(Reader, html) for e in reader.elements]
    return session, {(e.tag, name) for e in elements for name in ["", *e.at]}


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_hostile_text_is_text(lab, peek, text):
    """It makes no element or attribute of its own, and the prompt comes back as it was."""
    (_, harmless), (session, made) = (everywhere(lab, peek, x) for x in ("harmless words", text))
    assert {tag for tag, _ in made - harmless} <= {"ol", "li", "small"}  # tries, "and 7 more"
    (area,) = view(lab, session, "head").all("textarea", name="prompt")
    assert area.text == session["prompt"]
    query = urllib.parse.urlencode({"tab": text}, errors="replace")
    assert "was left out" in view(lab, do(lab, opened(lab), "load", query=query), "way").text


def test_text_that_is_not_read(lab):
    """What has no or too many characters is said while it is typed, and the picture stays."""
    for text in ("", "a" * 10_001, " " * 10_001):
        after = do(lab, opened(lab), "type", prompt=text)
        assert after == opened(lab) | {"notice": after["notice"]}
        assert "10,000" in view(lab, after, "way").text
    assert views(lab, do(lab, opened(lab), "type", prompt="\n" * 10_000))


def test_errors_are_one_escaped_sentence():
    """A mistake is told as text; what nobody foresaw by its kind, and in the terminal in full."""
    for error, told in ((ValueError("<b> not"), "<b> not"), (OSError("secret"), "OSError")):
        with pytest.raises(demo_app.gr.Error) as found, demo_app.told():
            raise error
        read = Reader(found.value.message)
        assert told in read.text and not read.elements and "secret" not in read.text
        assert found.value.print_exception == isinstance(error, OSError)


@pytest.fixture(params=["shipped", "mhf", "untokenized"])
def any_lab(request, lab, runs, tmp_path, monkeypatch):
    """One with the shipped checkpoints; or with no more than a user's own one."""
    if request.param == "shipped":
        return lab
    monkeypatch.setattr(demo_app, "SHIPPED", {})
    return Lab(runs / request.param, tmp_path)


def test_the_tour(any_lab):
    """Every step opens its tab, its checkpoint and prompt where they are; nothing leads out."""
    session, last = Page(any_lab).begin, len(demo_app.TOUR) - 1
    for n in [*range(last + 1), last, last - 1]:
        session = do(any_lab, session, "tour", by=n - session["step"])
        tab, name, prompt, text = demo_app.TOUR[n]
        assert session["tab"] == tab and text in view(any_lab, session, "head").text
        if len(any_lab.paths()) > 1:
            assert name in (None, session["checkpoint"]) and prompt in (None, session["prompt"])
    assert do(any_lab, session, "tour", by=-99)["step"] == 0


def test_examples(any_lab):
    """Each one is read, and its text is in the prompt; without a tokenizer ids take its place."""
    begin = Page(any_lab).begin
    for name in [*any_lab.paths()][:3]:
        session = do(any_lab, begin, "checkpoint", value=name)
        for label, text in demo_app.EXAMPLES.items():
            after = do(any_lab, session, "example", value=label)
            own = any_lab.of(after).tokenizer
            assert after["prompt"] == (text if own else "1 2 3") and after["checkpoint"] == name
            chosen = view(any_lab, after, "head").all("option", selected=None)
            assert name in [e.text for e in chosen]


def test_checkpoints_are_of_the_list(lab):
    """Another one reads the prompt, without the words; one that is not in the list is refused."""
    session = added(lab, opened(lab), "zebra")
    after = do(lab, session, "checkpoint", value="crowded")
    assert (after["checkpoint"], after["words"], after["prompt"]) == ("crowded", [], PROMPT)
    for name in ("nowhere", "", "../mhf", "mhf/step-1", "/etc/passwd"):
        refused(lambda name=name: do(lab, session, "checkpoint", value=name), "mhf")
