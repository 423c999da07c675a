"""See the way of one token through the model, on one screen: `python demo_app.py`.

What the page shows is what support.explain says of one position (a trace), drawn by the templates
in support/page. Models are shared and never changed; what a user adds is in the user's session.
"""

import argparse
import atexit
import codecs
import contextlib
import copy
import inspect
import math
import operator
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import urllib.parse
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

# Before gradio is imported: it sends nothing, and its files are not in another user's /tmp/gradio.
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
if "GRADIO_TEMP_DIR" not in os.environ:
    os.environ["GRADIO_TEMP_DIR"] = tempfile.mkdtemp(prefix="mhf-demo-")
    atexit.register(shutil.rmtree, os.environ["GRADIO_TEMP_DIR"], ignore_errors=True)

import gradio as gr
import jinja2
import torch
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse

import mhf
from support import explain
from support import tokenizer as tokenizers

HERE = Path(__file__).resolve().parent
PAGE = HERE / "support" / "page"
SHIPPED = {"paper's objective": "checkpoint-paper", "joint objective": "checkpoint"}
PAPER, JOINT = SHIPPED
LISTED = 10  # tokens and buckets that a trace lists
MAX_CHARACTERS, MAX_TOKENS, MAX_WORDS, MAX_BYTES = 10_000, 200, 50, 64
LOOPBACK = ("127.0.0.1", "localhost", "::1")
SLIDERS = dict(temperature=(1.0, 0, 3, 0.01), top_k=(0, 0, 1000, 1), top_p=(1.0, 0.01, 1, 0.01))
DEFAULTS = {name: value or None for name, (value, _, _, _) in SLIDERS.items()}
SIGNS = {i: 0x2400 + i for i in range(32)} | {32: "␣", 10: "↵", 127: "␡"}
CODE = {  # a tab, and the parts of mhf.py that compute what it shows
    "signature": ("SignatureTable.candidates", "SignatureTable.extend"),
    "gate": ("GatedEmbedding",),
    "cascade": ("soft_embedding", "CascadeDecoder"),
    "probability": ("MultiHashFormer.token_scores", "sampling_probs"),
    "generate": ("LanguageModel.generate",),
    "vocabulary": ("MultiHashFormer.expand", "SignatureTable.extend"),
}
TABS = tuple(CODE)
DOLLARS = [{"left": "$", "right": "$", "display": False}]
DRAWN = ("head", "way", *TABS, "link")  # what an event draws; HEADS draw the first, too
HEADS = ("load", "example", "checkpoint", "tour", "use")
START = "My lord, I do beseech your"
ROMEO = "**JULIET**  \nO Romeo, Romeo! wherefore art"
EXAMPLES = {"a plea": START, "Romeo": ROMEO, "a death": "To be, or not", "bytes": "O 😀 سلام"}
TOUR = [  # tab, checkpoint or None, prompt or None, text
    ("signature", PAPER, START, "① A token is a few ids: its bytes, hashed with different seeds."),
    ("signature", None, None, "① Tokens share buckets; all ids together are one token's."),
    ("gate", None, None, "③ A gate weighs the rows: their sum is all that the model sees."),
    ("cascade", None, None, "⑤ Function after function predicts an id: a token is a path."),
    ("cascade", JOINT, None, "⑤ Trained jointly, one says little: only together they are right."),
    ("probability", None, None, "⑥ Surprises add up; renormalised and calibrated: a probability."),
    ("generate", PAPER, ROMEO, "Generate, then choose a token there: the picture goes to it."),
    ("vocabulary", None, None, "A new word costs no parameter. Add one, use it in the prompt."),
]  # fmt: skip


# ---- Checkpoints and traces: all that touches a model -------------------------------------------
@dataclass(eq=False)
class Checkpoint:
    """A model, its tokenizer (None: prompts are token ids) and the bytes of every token id."""

    model: object
    tokenizer: object
    raw: list  # None where unknown
    parameters: int  # before a user adds words

    def name(self, token_id, longest=24):
        """A token as text in which blanks and single bytes can be seen; its number without text."""
        if (raw := self.raw[token_id]) is None:
            return f"#{token_id}"
        text = raw.decode("utf-8", "backslashreplace")
        text = re.sub(r"\\x([0-9a-f]{2})", lambda byte: f"⟨{byte[1].upper()}⟩", text)
        unseen = {ord(c): f"\\u{ord(c):04x}" for c in text if not c.isprintable()}
        shown = text.translate(unseen | SIGNS)
        return (shown if len(shown) <= longest else shown[: longest - 1] + "…") or "∅"


class Lab:
    """The checkpoints that may be chosen, by name, and the one lock for all that computes."""

    def __init__(self, first=None, out="runs", device="auto"):
        self.out, self.lock, self.first = Path(out), threading.Lock(), {}
        if first:  # a run goes on; a download is looked for once
            found = mhf.find_checkpoint(first)
            here = Path(first).exists()
            self.first = {Path(first).resolve().name if here else first: first if here else found}
        self.device = mhf.choose_device(device)
        self.open = lru_cache(maxsize=3)(self._open)
        self.personal = lru_cache(maxsize=16)(self._personal)

    def paths(self):
        """{name: folder}: the checkpoint given, the shipped ones, those of the output folder."""
        home = HERE / "tutorials"
        shipped = {name: home / f for name, f in SHIPPED.items() if (home / f).is_dir()}
        runs = sorted(self.out.glob("*/last"), key=os.path.getmtime, reverse=True)[:50]
        return self.first | shipped | {run.parent.name: run.parent for run in runs}

    def of(self, session):
        """The session's checkpoint, with its user's own words."""
        name, paths = session["checkpoint"], self.paths()
        if name not in paths:
            raise ValueError(f"no checkpoint {name!r:.50} is here; there are {', '.join(paths)}")
        shared = self.open(mhf.find_checkpoint(paths[name]))
        return self.personal(shared, tuple(session["words"])) if session["words"] else shared

    def _open(self, folder):
        tokenizer = None
        try:
            model = mhf.load(folder).to(self.device).requires_grad_(False)
            if any(folder.glob("tokenizer.*")):
                tokenizer = tokenizers.load(folder)
                tokenizers.check(model, tokenizer)
        except (ValueError, OSError) as error:  # a student's mhf.py may read its own alone
            about = " ".join(str(error).split())
            raise ValueError(f"{about}; name one of this mhf.py with --checkpoint") from None
        raw = [tokenizer and tokenizer.token_bytes(i) for i in range(model.config.vocab_size)]
        if model.config.model == "mhf":
            raw = [text or token for text, token in zip(raw, model.signatures.tokens)]
        return Checkpoint(model, tokenizer, raw, model.num_parameters()["total"])

    def _personal(self, shared, words):
        """A checkpoint with a user's own words: other signatures, the same parameters."""
        words = [word.encode() for word in words]
        model = copy.deepcopy(shared.model, {id(p): p for p in shared.model.parameters()})
        model.expand(words)
        return replace(shared, model=model, raw=shared.raw + words)

    def encode(self, session, text):
        """Token ids of a text: a user's own words where they stand, else the tokenizer's."""
        if not 0 < len(text) <= MAX_CHARACTERS:
            raise ValueError(f"a text has 1 to {MAX_CHARACTERS:,} characters, not {len(text):,}")
        checkpoint, words, ids = self.of(session), session["words"], []
        V = len(checkpoint.raw)
        if checkpoint.tokenizer is None:
            ids = [int(word) if word.isdecimal() else V for word in text.split()] or [V]
            if max(ids) < V:
                return ids
            raise ValueError(f"there is no tokenizer: type token ids from 0 to {V - 1}")
        longest = sorted(words, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, longest))})", text) if words else [text]
        encode = checkpoint.tokenizer.encode
        for i, part in enumerate(parts):  # the words stand at odd places
            ids += [V - len(words) + words.index(part)] if i % 2 else encode(part)
        return ids

    def trace(self, session, top_k=LISTED, force=None, only=None):
        """explain's dict. Of a model that a student changed at least the next tokens."""
        model, place = self.of(session).model, (session["ids"], session["position"])
        top_k = min(top_k, model.config.vocab_size)
        with self.lock, torch.no_grad():
            row, at, *what = explain.check(model, *place, top_k, force, only)
            changed = () if any(what) else (AttributeError, RuntimeError, TypeError, ValueError)
            try:
                return explain.explain(model, row, at, top_k, *what)
            except changed as error:
                scores = model.token_scores(model(row))[0, at]  # (V,)
                trace = explain.explain_next(model, row, at, top_k, scores, scores)
                return trace | {"changed": f"{type(error).__name__}: {error}"}

    def log_probs(self, session, start):
        """{place: (log P of the token there, {id: log P} of the likeliest)} from `start` on."""
        model, ids, found = self.of(session).model, session["ids"], {}
        with self.lock, torch.no_grad():
            log_p = model.log_probs(torch.tensor([ids], device=model.device))[0].cpu()  # (T, V)
        best = log_p.topk(min(5, log_p.shape[-1]))
        for i in range(max(1, start), len(ids)):
            likely = zip(best.indices[i - 1].tolist(), best.values[i - 1].tolist())
            found[i] = log_p[i - 1, ids[i]].item(), dict(likely)
        return found


# ---- A user's session: a dict; every event takes one and returns a new one ----------------------
# chosen: the token whose path the tabs show, None: the best; what: (function, bucket) of a what-if,
# which `after` answers; start: where generated tokens start in ids; step: of the tour; written:
# {place of a generated token: (log P, {id: log P} of the likeliest)}.
PLAIN = dict(chosen=None, what=None, after=None)
FRESH = PLAIN | dict(checkpoint=None, words=[], prompt="", ids=[], position=0, trace=None)
FRESH |= dict(start=None, written={}, notice="", tab="", step=0, kind="only")


def trace_again(lab, session, **changes):
    """The session with a new trace, and without a what-if."""
    session = session | PLAIN | changes
    trace = lab.trace(session)
    return session | {"trace": trace, "position": trace["position"]}


def open_prompt(lab, session, prompt):
    """The session at a new prompt. Of one longer than the context the newest part is read."""
    ids, notice = lab.encode(session, prompt), ""
    window = lab.of(session).model.config.max_position_embeddings
    if len(ids) > window:
        notice = f"The prompt has {len(ids):,} tokens; the model reads the newest {window}."
        ids = ids[-window:]
    fresh = dict(prompt=prompt, ids=ids, notice=notice, start=None, written={})
    return trace_again(lab, session | fresh, position=-1)


def open_checkpoint(lab, session, name, prompt):
    """The session at a checkpoint and a prompt, or at one that it can read."""
    if name != session["checkpoint"]:
        session = session | {"checkpoint": name, "words": []}
    try:
        return open_prompt(lab, session, prompt)
    except ValueError:  # a checkpoint that takes token ids, or back from one
        return open_prompt(lab, session, START if lab.of(session).tokenizer else "1 2 3")


def add_words(lab, session, text, space=True):
    """The session with new tokens, one for each line of the text."""
    words = [line.rstrip("\r") for line in text.split("\n") if line.strip()]
    words = [" " + word.strip() if space else word for word in words]
    total, checkpoint = len(session["words"]) + len(words), lab.of(session)
    if not words or total > MAX_WORDS or checkpoint.tokenizer is None:
        raise ValueError(f"1 to {MAX_WORDS} words can be added, with a tokenizer; not {total}")
    for i, word in enumerate(words):
        if (size := len(word.encode())) > MAX_BYTES:
            raise ValueError(f"{word[:20]!r}… has {size} bytes; a word may have {MAX_BYTES}")
        if word in words[:i] or word.encode() in checkpoint.raw:
            raise ValueError(f"{word!r} is a token already; a new one must differ")
    return open_prompt(lab, session | {"words": session["words"] + words}, session["prompt"])


def generate(lab, session, sampling, data):
    """Yields the session after every new token: from the end on, or from the chosen step on with
    another candidate. The last one has its trace."""
    checkpoint, ids, at = lab.of(session), session["ids"], session["position"] + 1
    window, start = checkpoint.model.config.max_position_embeddings, len(ids)
    if data.do == "branch":
        if not 0 <= int(data.token) < len(checkpoint.raw):
            raise ValueError(f"there is no token {data.token:.20}")
        start = at if session["start"] is None else min(session["start"], at)
        ids = [*ids[:at], int(data.token)]
    session = session | PLAIN | dict(ids=ids, start=start, trace=None, notice="")
    if len(ids) >= window:  # as mhf.generate does
        session |= dict(ids=ids[-(window // 2) :], start=window // 2)
        session["notice"] = "The context was full: its newest half is kept."
    session["written"] = lab.log_probs(session, session["start"]) if data.do == "branch" else {}
    if not 0 <= int(data.seed) < 2**63:
        raise ValueError(f"seed must be from 0 to {2**63 - 1}, not {data.seed:.20}")
    most = min(int(data.many), MAX_TOKENS, window - len(session["ids"]))
    stop = checkpoint.tokenizer.ends if checkpoint.tokenizer else ()
    settings = sampling | dict(stop=stop, seed=int(data.seed), return_log_probs=True)
    stream = checkpoint.model.generate(session["ids"], most, **settings)
    while True:
        with lab.lock:
            found = next(stream, None)
        if found is None:
            return (yield finish(lab, session))
        written = session["written"] | {len(session["ids"]): (found[1], {})}
        session = session | {"ids": [*session["ids"], found[0]], "written": written}
        yield session


def finish(lab, session):
    """The session after generating, at its last token, with the candidates of every one."""
    written = lab.log_probs(session, session["start"])
    return trace_again(lab, session, written=written, position=max(0, len(session["ids"]) - 2))


# ---- Views: what the templates of support/page draw from ----------------------------------------
def percent(p):
    """Two or three digits; never a plain 0 for what is more than 0."""
    if not p:
        return "–" if p is None else "0 %"
    digits = 3 if p >= 0.1 else 2
    return f"{100 * p:.{digits}g} %" if p >= 1e-5 else f"{100 * p:.0e} %".replace("e-0", "e-")


def count(n):
    """A number with separators, or as a power of ten where that says more."""
    return f"{n:,}".removesuffix(".0") if n < 1e9 else f"{n:.1e}".replace("e+", " · 10^")


JINJA = jinja2.Environment(loader=jinja2.FileSystemLoader(PAGE), autoescape=True)
JINJA.trim_blocks = JINJA.lstrip_blocks = True
JINJA.filters |= dict(percent=percent, count=count, tuple=tuple)
JINJA.filters |= dict(exp=math.exp, log2=math.log2, log10=math.log10)
JINJA.globals |= dict(tour=TOUR, examples=EXAMPLES, sliders=SLIDERS, most=MAX_TOKENS)
JINJA.filters["peak"] = lambda numbers: max(map(abs, numbers)) or 1.0
JINJA.filters["name"] = lambda token_id, name: name(token_id)
SCRIPT, CSS = ((PAGE / name).read_text("utf-8") for name in ("page.js", "style.css"))
NEEDS = dict(signature="signature", gate="signature", cascade="functions", vocabulary="signature")


def show(template, /, **values):
    """The HTML of a template, in which everything is escaped."""
    return f'<div class="mhf">{JINJA.get_template(f"{template}.html").render(values)}</div>'


def draw(lab, session, sampling, names=DRAWN):
    """The HTML of what an event may change, in the order of names."""
    checkpoint, trace, drawn = lab.of(session), session["trace"], []
    known = [*trace["top_tokens"], *filter(None, [trace["next"]])]
    chosen = next((e for e in known if e["id"] == session["chosen"]), known[0])
    token = trace["tokens"][session["position"]]
    given = dict(trace=trace, session=session, checkpoint=checkpoint, chosen=chosen, token=token)
    given |= dict(name=checkpoint.name, config=checkpoint.model.config, V=len(checkpoint.raw))
    given |= dict(H=len(token["signature"] or [0]), choices=lab.paths(), link=permalink(session))
    for name in names:
        if (need := NEEDS.get(name, "scores")) not in trace:
            drawn.append(show("absent", need=need, why=trace.get("changed")))
            continue
        view = globals().get(f"view_{name}", lambda *_: {})
        drawn.append(show(name, **given, **view(session, checkpoint, sampling)))
    return drawn


def view_way(session, checkpoint, _):
    """The votes on the best tokens, and the sentence that does the arithmetic."""
    trace, votes, sentence = session["trace"], [], ""
    for e in trace["top_tokens"][:8]:
        bits = [-x / math.log(2) for x in e.get("log_p") or [e["log_prob_paper"]]]
        votes.append(e | {"bits": bits, "sum": sum(bits)})
    if len(votes) > 1:
        less, tau = votes[1]["sum"] - votes[0]["sum"], trace["calibration"]
        first, second = (checkpoint.name(v["id"]) for v in votes[:2])
        sentence = f"{first} needs {less:.1f} bits less than {second}: 2^{less:.1f} ≈ "
        sentence += f"{count(round(2**less, 0 if less > 4 else 1))} times as probable"
        if tau != 1:
            after = f"2^({less:.1f} / {tau:.2f}) ≈ {2 ** (less / tau):.1f} times after it"
            sentence += f" before calibration, {after}"
    rest = max(0.0, 1 - sum(math.exp(v["log_prob"]) for v in votes))
    longest = max(v["sum"] for v in votes)
    return dict(votes=votes, longest=longest, sentence=sentence, others=rest)


def view_cascade(session, checkpoint, _):
    """Columns of buckets, with their places, and the best tokens as paths through them."""
    before, after = session["trace"], session["after"] or session["trace"]
    columns, places, paths = [], {}, []
    for j, (f, old) in enumerate(zip(after["functions"], before["functions"])):
        was = {b["bucket"]: b["prob"] for b in old["top"] + old["paths"]}
        forced = [b for b in f["top"] if b["bucket"] == f["forced"]]
        listed = {b["bucket"]: b for b in [*f["paths"][:6], *forced, *f["top"]]}
        bars = [b | {"was": was.get(b["bucket"])} for b in [*listed.values()][:9]]
        places |= {(j, b["bucket"]): 57 + 40 * k for k, b in enumerate(bars)}
        rest = max(0.0, 1 - sum(b["prob"] for b in bars))
        columns.append(f | {"x": 196 * j, "bars": bars, "rest": rest})
    right = 196 * len(columns) + 10
    for k, e in enumerate(after["top_tokens"][:6]):
        path, stops = "", [places.get((j, b), 408) for j, b in enumerate(e["signature"])]
        for j, (y0, y1) in enumerate(zip(stops, [*stops[1:], 60 + 62 * k])):
            x0, x1 = 196 * j + 150, min(196 * (j + 1), right)
            path += f"M{x0} {y0} C{(x0 + x1) / 2} {y0},{(x0 + x1) / 2} {y1},{x1} {y1} "
        paths.append(e | {"path": path, "y": 60 + 62 * k})
    tokens = sum(score is not None for score in before["scores"])
    return dict(columns=columns, paths=paths, right=right, after=after, tokens=tokens)


def view_probability(session, checkpoint, sampling):
    """What the sliders make of the calibrated distribution."""
    trace = session["trace"]
    scores = [-math.inf if s is None else s for s in trace["scores"]]
    logits = torch.tensor([scores]) / trace["calibration"]  # (1, V)
    drawn = mhf.sampling_probs(logits, **sampling)[0]  # (V,)
    shares = {e["id"]: drawn[e["id"]].item() for e in trace["top_tokens"]}
    rest, kept = max(0.0, 1 - sum(shares.values())), int((drawn > 0).sum())
    return dict(drawn=shares, rest=rest, kept=kept, settings=sampling)


def view_generate(session, checkpoint, _=None):
    """The text, token by token; the bytes of a character come with its last token."""
    decoder, text = codecs.getincrementaldecoder("utf-8")("replace"), []
    for i, token_id in enumerate(session["ids"]):
        raw, (log_p, likely) = checkpoint.raw[token_id], session["written"].get(i, (None, {}))
        shown = f" {token_id}" if raw is None else decoder.decode(raw)
        text.append({"at": i, "id": token_id, "text": shown, "log_p": log_p, "likely": likely})
    return {"text": text}


def view_vocabulary(session, checkpoint, _):
    """How many tries the user's own tokens took, and what they cost."""
    model, sizes = checkpoint.model, checkpoint.model.num_parameters()
    tries = {word: len(model.signatures.trace(word.encode())) for word in session["words"]}
    return {"tries": tries, "sizes": sizes, "added": sizes["total"] - checkpoint.parameters}


def source(name):
    """The source of the parts of mhf.py behind a tab, as it stands in the file."""
    parts = []
    for path in CODE[name]:
        try:
            found = inspect.getsource(operator.attrgetter(path)(mhf))
        except (AttributeError, OSError, TypeError):  # a student's has other parts
            found = "not in this mhf.py"
        parts.append(f"# mhf.{path}\n" + inspect.cleandoc("\n" + found))
    return "\n\n".join(parts)


# ---- The page -----------------------------------------------------------------------------------
def permalink(session):
    """The query string of prompt, position and a new tab; without a prompt that is too long."""
    parts = {name: session[name] for name in ("prompt", "position", "tab") if session[name] != ""}
    link = "?" + urllib.parse.urlencode(parts)
    return link if len(link) <= 2000 else "?"


def from_link(lab, session, query):
    """The session of a query string's {name: [values]}; what is wrong is left out, and said."""
    given, wrong = {name: values[0] for name, values in query.items()}, []
    try:
        session = open_prompt(lab, session, given.get("prompt", session["prompt"]))
    except ValueError:
        wrong.append("prompt")
    at = given.get("position", str(session["position"]))
    if re.fullmatch("[0-9]{1,6}", at) and int(at) < len(session["ids"]):
        session = trace_again(lab, session, position=int(at))
    else:
        wrong.append("position")
    if (tab := given.get("tab", TABS[0])) not in TABS:
        wrong, tab = [*wrong, "tab"], TABS[0]
    if wrong:
        session = session | {"notice": f"The link's {', '.join(wrong)} was left out: not usable."}
    return session | {"tab": tab}


@contextlib.contextmanager
def told(plain=False):
    """An error becomes a message. It may hold a user's text, and the page takes HTML for one."""
    try:
        yield
    except Exception as error:
        text, bug = str(error), not isinstance(error, ValueError)
        if not isinstance(error, ValueError | AttributeError | TypeError):  # not a bad argument
            text = f"{type(error).__name__}: this went wrong; the server's terminal says more"
        text = text if plain else str(jinja2.filters.escape(text))
        raise gr.Error(text, title="Not done", print_exception=bug) from error


def act(lab, session, data):
    """The session after what was clicked or typed; data.do says what it is."""
    token = int(data._data.get("token", -1))  # -1: none
    match data.do:
        case "load":
            return from_link(lab, session, urllib.parse.parse_qs(data.query))
        case "type":
            try:
                return open_prompt(lab, session, data.prompt.encode("utf-8", "replace").decode())
            except ValueError as error:  # while it is typed
                return session | {"notice": f"Not read: {error}."}
        case "example":
            return open_checkpoint(lab, session, session["checkpoint"], EXAMPLES[data.value])
        case "checkpoint":
            return open_checkpoint(lab, session, data.value, session["prompt"])
        case "tour":
            step = max(0, min(len(TOUR) - 1, session["step"] + int(data.by)))
            tab, name, prompt, _ = TOUR[step]
            name = name if name in lab.paths() else session["checkpoint"]
            if prompt or name != session["checkpoint"]:
                session = open_checkpoint(lab, session, name, prompt or session["prompt"])
            return session | {"step": step, "tab": tab}
        case "pick":
            at = max(0, min(len(session["ids"]) - 1, int(data.index)))
            return trace_again(lab, session, position=at, chosen=token if token >= 0 else None)
        case "go":
            tab = data.tab if data.tab in TABS else TABS[0]
            return session | {"tab": tab, "chosen": session["chosen"] if token < 0 else token}
        case "kind":
            kind = "force" if data.value == "force" else "only"
            return session | {"kind": kind, "what": None, "after": None}
        case "what":
            what = int(data.function), int(data.bucket)
            if what[0] < 0 or session["what"] == what:  # asked for twice it ends, too
                return session | {"what": None, "after": None}
            after = lab.trace(session, **{session["kind"]: dict([what])})
            return session | {"what": what, "after": after}
        case "add":
            return add_words(lab, session, data.words, data.space)
        case "forget":
            return open_prompt(lab, session | {"words": []}, session["prompt"])
        case "use":
            word = session["words"][int(data.index) % len(session["words"])]
            return open_prompt(lab, session, session["prompt"] + word)
    raise ValueError(f"there is nothing like {data.do!r:.50} to do")


class Page:
    """The page: HTML from templates, and what each event does to the session."""

    def __init__(self, lab):
        if not lab.paths():
            raise ValueError("no checkpoint is here: run `python train.py`, or give --checkpoint")
        self.lab, self.views, self.default = lab, {}, next(iter(lab.paths()))
        self.begin = open_checkpoint(lab, FRESH, self.default, START)
        first = dict(zip(DRAWN, draw(lab, self.begin, DEFAULTS)))
        sliders = show("sliders", values=DEFAULTS)
        above = {"signature": show("typed"), "probability": sliders, "generate": sliders}
        below = {"signature": ("word", ""), "generate": ("writer", show("writer"))}
        with gr.Blocks(title="MultiHashFormer", analytics_enabled=False) as self.demo:
            self.session, self.sampling = gr.State(self.begin), gr.State(DEFAULTS)
            self.html("head", first["head"])
            self.html("way", first["way"])
            with gr.Tabs(selected=TABS[0], elem_id="views") as self.tabs:
                for name in TABS:
                    with gr.Tab(name.capitalize(), id=name, render_children=True):
                        if name in above:
                            self.html(f"{name}-above", above[name])
                        self.html(name, first[name])
                        if name in below:
                            self.html(*below[name])
                        with gr.Accordion("The maths and the code", open=False):
                            text = JINJA.get_template("maths.html").render(tab=name)
                            gr.Markdown(text, latex_delimiters=DOLLARS)
                            gr.HTML(show("code", text=source(name)))
            self.html("link", first["link"])
            self.wire()

    def html(self, name, value):
        self.views[name] = gr.HTML(value, elem_id=name, js_on_load=SCRIPT)

    def wire(self):
        """Every event. Generating has a queue of its own, so that it holds up nobody's clicks."""
        lab, views, given = self.lab, self.views, [self.session, self.sampling]
        drawn = [self.session, self.tabs, *(views[name] for name in DRAWN)]
        hidden = dict(api_visibility="private", show_progress="hidden")
        clicks = hidden | dict(concurrency_id="acts", concurrency_limit=1, trigger_mode="multiple")
        last, light = (clicks | dict(trigger_mode="always_last", queue=q) for q in (True, False))
        whole = lambda s: s if s["trace"] else finish(lab, s)  # noqa: E731

        def on_act(data: gr.EventData, session, sampling):
            with told():
                return self.drawn(act(lab, whole(session), data), sampling, data.do)

        def on_write(data: gr.EventData, session, sampling):
            with told():
                for found in generate(lab, session, sampling, data):
                    yield self.drawn(found, sampling)

        def on_slide(data: gr.EventData, session):
            bounds = {name: (low, high) for name, (_, low, high, _) in SLIDERS.items()}
            values = {n: min(max(float(getattr(data, n)), a), b) for n, (a, b) in bounds.items()}
            values["top_k"] = int(values["top_k"]) or None
            text = show("sliders", values=values)
            return values, *draw(lab, whole(session), values, ["probability"]), text, text

        def on_peek(data: gr.EventData, session):
            checkpoint, word = lab.of(session), data.word.encode("utf-8", "replace")
            if not word or checkpoint.model.config.model != "mhf":
                return ""
            with lab.lock:
                found = explain.explain_word(checkpoint.model, word[:MAX_BYTES])
            more = dict(name=checkpoint.name, config=checkpoint.model.config)
            return show("word", found=found, word=word.decode(), H=len(found["signature"]), **more)

        how = hidden | dict(concurrency_id="generate", concurrency_limit=2)
        runs = [views[n].write(on_write, given, drawn, **how) for n in ("writer", "generate")]
        stopped = views["writer"].stop(None, cancels=runs, **light)
        stopped.then(lambda s, sampling: self.drawn(whole(s), sampling), given, drawn, **clicks)
        for n in DRAWN:  # whatever else is done ends the writing
            views[n].act(None, cancels=runs, **light)
            views[n].act(on_act, given, drawn, **clicks)
        sliders = [views[f"{name}-above"] for name in ("probability", "generate")]
        slid, told_by = [self.sampling, views["probability"], *sliders], self.session
        for own in sliders:
            own.slide(on_slide, told_by, slid, **light)
        views["signature-above"].peek(told()(on_peek), told_by, views["word"], **last)
        for name in TABS:
            views[name].parent.select(None, js=f"() => window.visit?.('{name}')")
        gr.api(self.inspect, api_name="inspect", concurrency_id="acts")

    def drawn(self, session, sampling, do=""):
        """What an event draws anew: while text is written that alone."""
        if session["trace"] is None:
            view = dict(session=session, name=self.lab.of(session).name)
            text = show("generate", **view, **view_generate(session, self.lab.of(session)))
            return [session, gr.skip()] + [text if n == "generate" else gr.skip() for n in DRAWN]
        head = [] if do in HEADS else [gr.skip()]  # a user may be typing there
        views = head + draw(self.lab, session, sampling, DRAWN[len(head) :])
        tabs = gr.Tabs(selected=session["tab"]) if session["tab"] else gr.skip()
        return [session | {"tab": ""}, tabs, *views]

    def inspect(
        self, prompt: str, position: int = -1, top_k: int = LISTED, force: dict = None,
        checkpoint: str = "", only: dict = None,
    ) -> dict:  # fmt: skip
        """All that happens at one position of a prompt, as support.explain tells it, and `ids`.

        force, only: {function, counted from 0: bucket}; checkpoint: one of the page's, or "".
        """
        with told(plain=True):
            session = FRESH | {"checkpoint": checkpoint or self.default, "position": position}
            session["ids"] = ids = self.lab.encode(session, prompt)
            window = self.lab.of(session).model.config.max_position_embeddings
            if len(ids) > window or not 1 <= top_k <= 100:
                limits = f"up to {window} tokens and a top_k from 1 to 100"
                raise ValueError(f"{limits}, not {len(ids)} tokens and top_k {top_k!r:.20}")
            what = [{int(j): int(b) for j, b in (pairs or {}).items()} for pairs in (force, only)]
            return self.lab.trace(session, top_k, *what) | {"ids": ids}


# ---- The server ---------------------------------------------------------------------------------
# The page posts to these alone. A body is small, since the page takes no files.
POSTS = re.compile(r"/gradio_api/(queue/join|run/predict|call/inspect|run/inspect|cancel|reset)/?")


class Guard:
    """Refuses what our page never asks for: other routes, large bodies, other names of the host."""

    def __init__(self, app, hosts):
        self.app, self.hosts = app, hosts

    async def __call__(self, scope, receive, send):
        headers = {k: v.decode("latin-1") for k, v in scope.get("headers", ())}
        host = re.sub(r":[0-9]+$", "", headers.get(b"host", "")).strip("[]")
        length, status = headers.get(b"content-length", ""), 0
        if scope["type"] == "http" and scope["method"] not in ("GET", "HEAD"):
            if not POSTS.fullmatch(scope["path"]):
                status = 403
            elif not length.isdecimal() or int(length) > 65536:
                status = 413
        if scope["type"] == "http" and self.hosts and host not in self.hosts:
            status = 421
        app = PlainTextResponse("not here\n", status) if status else self.app
        await app(scope, receive, send)


def serve(args):
    """The running page: (Page, address). Nothing is sent off this machine but by --share."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy") and not args.share]:
        del os.environ[name]  # Gradio calls itself at its start: no proxy may come between
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(LOOPBACK)
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    socket.create_server((args.host, args.port or 0), family=family).close()  # or it says why not
    page = Page(Lab(args.checkpoint, args.out, args.device))  # which may be fetched
    host = f"[{args.host}]" if ":" in args.host else args.host
    hosts = LOOPBACK if args.host in LOOPBACK and not args.share else ()
    page.demo.queue(max_size=128).launch(
        server_name=host, server_port=args.port or None, share=args.share, css=CSS,
        theme=gr.themes.Default(primary_hue="blue"), run_history=False, enable_monitoring=False,
        footer_links=["api", "settings"], max_file_size="1mb", ssr_mode=False, pwa=False,
        show_error=False, quiet=True, prevent_thread_lock=True, state_session_capacity=256,
        app_kwargs={"middleware": [Middleware(Guard, hosts=hosts)]},
    )  # fmt: skip
    if args.host in ("0.0.0.0", "::"):  # every address of this machine; none to open
        host = socket.gethostname()
    return page, page.demo.share_url or f"http://{host}:{page.demo.server_port}"


def main(argv=None):
    """The exit status: 0, or 2 for a mistake in the call."""
    for stream in (sys.stdout, sys.stderr):  # whatever the terminal says
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    parser = argparse.ArgumentParser("demo_app.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--checkpoint", help="folder, run or hub name (default: the shipped ones)")
    add("--out", default="runs", help="runs that may be chosen (default runs)")
    add("--host", default="127.0.0.1", help="address (default 127.0.0.1: this machine)")
    add("--port", type=int, help="port (default: the next free one from 7860 on)")
    add("--share", action="store_true", help="a public link, by Gradio's servers")
    add("--device", default="auto", help="auto (default), cpu, cuda, cuda:N or mps")
    add("--selftest", action="store_true", help="answer one request, then end")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # what atexit registered is done, too
    try:
        page, address = serve(args)
    except (ValueError, OSError, OverflowError) as error:
        place = f"--host {args.host} --port {args.port or 'any'}: " * isinstance(error, OSError)
        print("demo_app.py: error:", place + " ".join(str(error).split()), file=sys.stderr)
        return 2
    print(f"{page.default} on {page.lab.device}, at {address}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        if args.selftest:  # one request, as a notebook makes it
            from gradio_client import Client

            trace = Client(address, verbose=False).predict(START, api_name="/inspect")
            print("selftest:", page.lab.of(page.begin).name(trace["top_tokens"][0]["id"]))
        else:
            page.demo.block_thread()
    page.demo.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
