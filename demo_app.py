"""See a token become a signature, and a signature become a token: `python demo_app.py`.

A trace is what support.explain says of one position, and the scores of all tokens. Every view is a
function of the trace (and of what holds for a checkpoint's whole vocabulary) that returns plain
values; a template shows them. No view runs the model; sliders only read the trace. What a user
adds is in the user's own session; models are shared and never changed.
"""

import argparse
import atexit
import contextlib
import copy
import errno
import functools
import inspect
import math
import os
import re
import reprlib
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
import urllib.parse
from dataclasses import dataclass, replace
from pathlib import Path

# Before gradio is imported: it sends nothing, and its files are not in another user's /tmp/gradio.
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
if "GRADIO_TEMP_DIR" not in os.environ:
    os.environ["GRADIO_TEMP_DIR"] = tempfile.mkdtemp(prefix="mhf-demo-")
    atexit.register(shutil.rmtree, os.environ["GRADIO_TEMP_DIR"], ignore_errors=True)

import gradio as gr
import jinja2
import numpy as np
import torch
from starlette.responses import Response
from starlette.routing import Route

import mhf
from support import explain
from support import tokenizer as tokenizers

SHIPPED = Path(__file__).resolve().parent / "tutorials" / "checkpoint"
TOP = 10  # buckets and tokens that a view lists
MAX_CHARACTERS, MAX_TOKENS, MAX_WORDS, MAX_BYTES = 10_000, 200, 50, 64
LOOPBACK = ("127.0.0.1", "localhost", "::1")
SLIDERS = {"temperature": (1.0, 0.0, 3.0), "top_k": (0, 0, 1000), "top_p": (1.0, 0.01, 1.0)}
SIGNS = {i: 0x2400 + i for i in range(32)} | {ord(" "): "␣", ord("\n"): "↵"}
brief = reprlib.repr  # of any value, short enough for a message


# ---------------------------------------------------------------------------------------------
# Checkpoints and traces: all that touches a model
# ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Checkpoint:
    """A model, its tokenizer (None: prompts are token ids) and what holds for all its tokens."""

    name: str
    model: object
    tokenizer: object
    names: list  # text of every token id, None where unknown
    facts: dict

    def ids(self, ids):
        return torch.tensor([ids], device=self.model.device)  # (1, T)


class Lab:
    """The checkpoints that may be chosen, by name, and the one lock for all that computes."""

    def __init__(self, first=None, out="runs", device="auto"):
        self.out, self.lock, self.first = Path(out), threading.Lock(), None
        if first:  # a run goes on, a download is looked for once
            here = Path(first).exists()
            found = mhf.find_checkpoint(first)
            name = Path(first).resolve().name if here else str(first)
            self.first = {name: Path(first) if here else found}
        self.device = mhf.choose_device(device)
        self.open = functools.lru_cache(maxsize=3)(self._open)
        self.personal = functools.lru_cache(maxsize=16)(self._personal)

    def paths(self):
        """{name: folder}: the checkpoint given, the shipped one, those of the output folder."""
        found = dict(self.first or {})
        if (SHIPPED / "config.json").is_file():
            found.setdefault("shipped", SHIPPED)
        for run in sorted(self.out.glob("*/last"), key=os.path.getmtime, reverse=True)[:50]:
            found.setdefault(run.parent.name, run.parent)
        return found

    def get(self, name):
        if name not in (paths := self.paths()):
            raise ValueError(
                f"there is no checkpoint {brief(name)} here; there are {', '.join(paths)}"
            )
        return self.open(name, mhf.find_checkpoint(paths[name]))

    def _open(self, name, folder):
        tokenizer = None
        try:
            model = mhf.load(folder).to(self.device).requires_grad_(False)
            if (folder / "tokenizer.tiktoken").is_file():
                tokenizer = tokenizers.load(folder)
                tokenizers.check(model, tokenizer)
        except (ValueError, OSError) as error:  # a student's mhf.py may read its own alone
            about = " ".join(str(error).split())
            raise ValueError(f"{about}; name one of this mhf.py with --checkpoint") from None
        raw = [None] * model.config.vocab_size
        if model.config.model == "mhf":
            raw = model.signatures.tokens
        elif tokenizer:
            raw = map(tokenizer.token_bytes, range(len(raw)))
        names = [None if t is None else t.decode("utf-8", "backslashreplace") for t in raw]
        return Checkpoint(name, model, tokenizer, names, facts(model))

    def _personal(self, shared, words):
        """A checkpoint with a user's own words: other signatures, the same parameters."""
        if not words:
            return shared
        memo = {id(p): p for p in shared.model.parameters()}
        model = copy.deepcopy(shared.model, memo)
        model.expand([word.encode() for word in words])
        return replace(shared, model=model, names=[*shared.names, *words])

    def encode(self, checkpoint, words, text):
        """Token ids of a text: a user's own words where they stand, else the tokenizer's."""
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"the text has {len(text):,} characters; {MAX_CHARACTERS:,} are read")
        if not text:
            raise ValueError("the prompt is empty; type at least one character")
        check_text(text)
        if checkpoint.tokenizer is None:
            return read_ids(text, len(checkpoint.names))
        start, ids = len(checkpoint.names) - len(words), []
        longest = sorted(words, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, longest))})", text) if words else [text]
        for i, part in enumerate(parts):
            own = i % 2
            ids += [start + words.index(part)] if own else checkpoint.tokenizer.encode(part)
        return ids

    def trace(self, checkpoint, ids, position=-1, force=None, top_k=TOP):
        """explain's dict and all scores. Of a model that a student changed at least next tokens."""
        model, top_k = checkpoint.model, min(top_k, len(checkpoint.names))
        with self.lock:
            row, at, force = explain.check(model, ids, position, top_k, force)  # (1, T)
            try:
                trace = explain.explain(model, row, at, top_k, force)
                scores = explain.predict(model, row, at, force)[-1]  # (V,)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a student changed
                scores = model.token_scores(model(row))[0, at]  # (V,)
                trace = explain.explain_next(model, row, at, top_k, scores)
                trace["changed"] = f"{type(error).__name__}: {error}"
        for entry in [*trace["tokens"], *trace["top_tokens"], *filter(None, [trace["next"]])]:
            entry["text"] = checkpoint.names[entry["id"]]  # the standard model knows none
        scores = [score if score > -math.inf else None for score in scores.tolist()]
        return trace | {"scores": scores}

    def log_probs(self, checkpoint, ids, start):
        """{place: log P} of the tokens from `start` on, as the model gives them."""
        with self.lock:
            log_p = checkpoint.model.log_probs(checkpoint.ids(ids))[0]  # (T, V)
        found = {i: log_p[i - 1, ids[i]].item() for i in range(start, len(ids))}
        return {i: p if p > -math.inf else None for i, p in found.items()}  # None: an unused id


def read_ids(text, size):
    """The token ids that a text holds, which is how a model without a tokenizer is asked."""
    try:
        ids = [int(word) for word in text.split()]
    except ValueError:
        ids = []
    if not ids or not all(0 <= i < size for i in ids):
        raise ValueError(
            f"this checkpoint has no tokenizer of this project: type token ids from 0 to "
            f"{size - 1}, separated by spaces, not {text[:40]!r}"
        )
    return ids


def facts(model):
    """What holds for the whole vocabulary: sizes, tokens that were hashed again, close pairs."""
    config = model.config
    found = {"parameters": model.num_parameters(), "model": config.model}
    found |= {"V": config.vocab_size, "D": config.hidden_size}
    found |= {"window": config.max_position_embeddings}
    if config.model != "mhf":
        return found
    H, B, hashed = config.num_hashes, config.num_buckets, model.model.hash_map.any(-1).cpu()  # (V,)
    real = model.signatures.ids[hashed].numpy()  # (tokens, H): neither the pad nor unused ids
    n, few = len(real), H > 1 and len(real) <= 100_000  # else it takes seconds
    found |= {"H": H, "B": B, "rehashed": rehashed(model.signatures)}
    found["close_pairs"], rows = close_pairs(real) if few else (None, None)
    found["close_pair"] = rows and hashed.nonzero()[rows, 0].tolist()
    found["close_pairs_expected"] = n * (n - 1) / 2 * H * (B - 1) ** (1 - H)
    return found


def rehashed(table):
    """The ids of tokens whose first signature was taken, so far as the tokens are known."""
    found = []
    for i, (token, signature) in enumerate(zip(table.tokens, table.signatures)):
        if token is not None and any(signature) and not table.shared:
            first = next(table.candidates(token, signature[: table.num_lsh]))
            found += [i] if first[:-1] == signature[:-1] and first != signature else []
    return found


def close_pairs(ids):
    """How many pairs of tokens share H − 1 ids or more, and one such pair, if there is any."""
    alike, example = [], None
    for left_out in (*range(ids.shape[1]), []):
        rest = np.ascontiguousarray(np.delete(ids, left_out, 1))
        _, group, sizes = np.unique(rest, axis=0, return_inverse=True, return_counts=True)
        alike.append(int((sizes * (sizes - 1) // 2).sum()))
        if example is None and sizes.max() > 1:
            example = np.flatnonzero(group.ravel() == sizes.argmax())[:2].tolist()
    *alike, same = alike  # those with all ids in common were counted H times
    return sum(alike) - (len(alike) - 1) * same, example


# ---------------------------------------------------------------------------------------------
# A user's session: a dict; every event takes one and returns a new one
# ---------------------------------------------------------------------------------------------


def check_text(text):
    """ValueError if a text holds half a character, which no UTF-8 can say."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {error.start + 1} of the text is only half a character; type it again"
        ) from None


FRESH = {
    "checkpoint": None,
    "words": [],
    "prompt": "",
    "ids": [],
    "position": 0,
    "force": {},  # function -> bucket, both as JSON has them
    "trace": None,
    "start": None,  # where generated tokens start in ids
    "log_probs": {},  # of generated tokens, by their place in ids
    "seed": 0,
    "notice": "",
    "default": None,  # the checkpoint at the start
}


def current(lab, session):
    """The session's checkpoint, with its user's own words."""
    return lab.personal(lab.get(session["checkpoint"]), tuple(session["words"]))


def trace_again(lab, session, **changes):
    """The session with a new trace."""
    session = session | changes
    checkpoint = current(lab, session)
    force = {int(j): bucket for j, bucket in session["force"].items()}
    trace = lab.trace(checkpoint, session["ids"], session["position"], force)
    return session | {"trace": trace, "position": trace["position"]}


def open_prompt(lab, session, prompt, position=-1, **changes):
    """The session at a new prompt. Of one longer than the context the newest part is read."""
    session = session | changes
    checkpoint = current(lab, session)
    ids = lab.encode(checkpoint, session["words"], prompt)
    notice, window = "", checkpoint.facts["window"]
    if len(ids) > window:
        notice = f"The prompt has {len(ids):,} tokens; the model reads the newest {window}."
        ids = ids[-window:]
    fresh = {"prompt": prompt, "ids": ids, "notice": notice, "start": None, "log_probs": {}}
    position = position if -len(ids) <= position < len(ids) else -1
    return trace_again(lab, session | {"force": {}} | fresh | changes, position=position)


def add_words(lab, session, text, space=True):
    """The session with new tokens, one for each line of the text."""
    check_text(text)
    words = [line.rstrip("\r") for line in text.split("\n") if line.strip()]
    words = [" " + word.strip() if space else word for word in words]
    if not words:
        raise ValueError("type at least one word to add")
    if len(session["words"]) + len(words) > MAX_WORDS:
        have = len(session["words"])
        raise ValueError(
            f"{have} + {len(words)} words are too many; up to {MAX_WORDS} can be added"
        )
    for i, word in enumerate(words):
        if (size := len(word.encode())) > MAX_BYTES:
            raise ValueError(f"{word[:20]!r}… has {size} bytes; a word may have {MAX_BYTES}")
        if word in words[:i]:
            raise ValueError(f"{word!r} is there twice; add it once")
    checkpoint = current(lab, session)
    if checkpoint.tokenizer is None or checkpoint.facts["model"] != "mhf":
        raise ValueError("words can be added to a MultiHashFormer with a tokenizer of this project")
    for word in words:
        if word.encode() in checkpoint.model.signatures.tokens:
            raise ValueError(f"{word!r} is a token already; a new one must differ")
    return open_prompt(lab, session | {"words": session["words"] + words}, session["prompt"])


def generate(lab, session, count, temperature, top_k, top_p, seed, ids=None, start=None):
    """Yields the session after every new token; the last one has its trace."""
    checkpoint, ids = current(lab, session), list(ids or session["ids"])
    start = len(ids) if start is None else start
    window, notice = checkpoint.facts["window"], ""
    if len(ids) >= window:  # as mhf.generate does
        ids, notice = ids[-(window // 2) :], "The context was full: its newest half is kept."
        start = len(ids)
    stop = checkpoint.tokenizer.ends if checkpoint.tokenizer else ()
    count, seed = min(int(count), MAX_TOKENS, window - len(ids)), int(seed)
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be from 0 to {2**63 - 1}, not {seed}")
    stream = checkpoint.model.generate(
        ids, count, temperature, int(top_k) or None, top_p, stop, seed, return_log_probs=True
    )
    log_probs = {i: p for i, p in session["log_probs"].items() if start <= i < len(ids)}
    session = session | {"start": start, "seed": seed, "force": {}, "ids": ids, "notice": notice}
    session |= {"log_probs": log_probs, "trace": None}  # comes at the end
    while True:
        with lab.lock:
            found = next(stream, None)
        if found is None:
            break
        ids, log_probs = [*ids, found[0]], log_probs | {len(ids): found[1]}
        session = session | {"ids": ids, "log_probs": log_probs}
        yield session
    yield trace_again(lab, session, position=max(0, len(ids) - 2))


# ---------------------------------------------------------------------------------------------
# Views: each a pure function of the trace that returns what its template shows
# ---------------------------------------------------------------------------------------------


def glyph(entry):
    """A token as text in which blanks can be seen; its number where it has no text."""
    if (text := entry.get("text")) is None:
        return f"#{entry['id']}"
    unseen = {ord(c): f"\\u{ord(c):04x}" for c in text if not c.isprintable()}
    shown = text.translate(unseen | SIGNS)
    return (shown if len(shown) <= 24 else shown[:23] + "…") or "∅"


def percent(p):
    """Two or three digits; never a plain 0 for what is more than 0."""
    if not p:
        return "–" if p is None else "0 %"
    digits = 3 if p >= 0.1 else 2
    return f"{100 * p:.{digits}g} %" if p >= 1e-5 else f"{100 * p:.0e} %".replace("e-0", "e-")


def count(n):
    """A whole number with separators, or as a power of ten where that says more."""
    return f"{n:,}" if n < 1e15 else f"{n:.1e}".replace("e+", " · 10^")


def needs(*keys):
    """A view whose quantity the model does not have says so, instead of failing."""

    def decorate(view):
        @functools.wraps(view)
        def guarded(trace, *args):
            for key in keys:
                if trace.get(key) is None:
                    why = f" ({trace['changed']})" if "changed" in trace else ""
                    return {"absent": f"This model has no {key} to show{why}."}
            return view(trace, *args)

        return guarded

    return decorate


def _chips(entries, mark=()):
    return [{"glyph": glyph(e), "id": e["id"], "marked": e["id"] in mark} for e in entries]


def view_tokens(session):
    """View 1: the tokens, one of which is the position of all other views."""
    trace = session["trace"]
    tokens = [{"glyph": glyph(t), "id": t["id"]} for t in trace["tokens"]]
    return {
        "tokens": tokens,
        "position": trace["position"],
        "vocab_size": trace["vocab_size"],
        "notice": session["notice"],
        "words": [glyph({"text": word}) for word in session["words"]],
    }


@needs("signature")
def view_signature(trace, facts):
    """View 2: the ids of the token, who shares them, and how a taken signature is re-hashed."""
    own, follows = trace["signature"], trace["next"] or trace["top_tokens"][0]
    token = trace["tokens"][trace["position"]]
    H = len(own["functions"])
    return {
        "token": {"glyph": glyph(token), "id": token["id"], "signature": token["signature"]},
        "next": {"glyph": glyph(follows), "signature": follows["signature"]},
        "next_is": "comes next" if trace["next"] else "is most probable next",
        "functions": [
            f
            | {
                "chips": _chips(f["tokens"], {own["id"]}),
                "more": f["num_tokens"] - len(f["tokens"]),
            }
            for f in own["functions"]
        ],
        "neighbours": [n | {"glyph": glyph(n)} for n in own["neighbours"]],
        "shared": list(enumerate(own["shared"])),
        "H": H,
        "B": facts["B"],
        "signatures": facts["B"] ** H,
        "V": trace["vocab_size"],
        "tries": _tries(own["tries"]),
        "facts": facts,
    }


def _tries(tries):
    return tries and [t | {"glyph": t["owner"] and glyph(t["owner"])} for t in tries]


@needs("signature")
def view_gate(trace):
    """View 3: how much each of a token's rows counts, and that they sum to its input vector."""
    position, tokens = trace["position"], trace["tokens"]
    if tokens[position].get("gate") is None:
        return {"absent": "This model has no gate to show."}
    first = max(0, min(position - 12, len(tokens) - 24))
    rows = [
        {
            "glyph": glyph(t),
            "at": i,
            "segments": [
                {"j": j, "share": a, "score": t["gate_scores"] and t["gate_scores"][j]}
                for j, a in enumerate(t["gate"])
            ],
            "residual": t["residual"],
        }
        for i, t in enumerate(tokens[first : first + 24], first)
    ]
    token, residuals = tokens[position], [t["residual"] for t in tokens]
    scores = token["gate_scores"] or [None] * len(token["gate"])
    parts = zip(token["signature"], token["row_norms"], scores, token["gate"], strict=True)
    return {
        "rows": rows,
        "position": position,
        "glyph": glyph(token),
        "detail": [
            dict(zip(("id", "norm", "score", "alpha"), part, strict=True)) for part in parts
        ],
        "names": [f"α{j + 1}" for j in range(len(token["gate"]))],
        "residual": token["residual"],
        "worst": None if None in residuals else max(residuals),
        "hidden": len(tokens) - len(rows),
    }


@needs("functions")
def view_cascade(trace, facts):
    """View 4: function by function, the buckets it may be and what is handed on."""
    follows, panels = trace["next"], []
    for f in trace["functions"]:
        largest = max(top["prob"] for top in f["top"])
        most = max(max(top["mass"] for top in f["top"]), 1e-30)
        target = follows and follows["signature"][f["function"]]
        bars = [
            top
            | {
                "wide": 100 * top["prob"] / largest,
                "mass_wide": 100 * top["mass"] / most,
                "chips": _chips(top["tokens"][:3], {follows["id"]} if follows else ()),
                "more": top["num_tokens"] - len(top["tokens"][:3]),
                "target": top["bucket"] == target,
                "forced": top["bucket"] == f["forced"],
            }
            for top in f["top"]
        ]
        nearest = [n | {"chips": _chips(n["tokens"][:2])} for n in f["nearest"]]
        panels.append(f | {"bars": bars, "nearest": nearest, "target": target})
    return {
        "panels": panels,
        "most_bits": math.log2(facts["B"]),
        "forced": forced(trace),
        "next": follows and glyph(follows),
        "best": glyph(trace["top_tokens"][0]),
        "best_p": math.exp(trace["top_tokens"][0]["log_prob"]),
        "valid_mass": trace["valid_mass"],
        "before": glyph(trace["tokens"][trace["position"]]),
    }


def forced(trace):
    """{function: bucket} of a what-if."""
    functions = trace.get("functions", ())
    return {f["function"]: f["forced"] for f in functions if f["forced"] is not None}


def sampling(trace, temperature, top_k, top_p):
    """{token id: probability} of what `generate` would draw from, by mhf's own function."""
    scores = torch.tensor([[-math.inf if s is None else s for s in trace["scores"]]])  # (1, V)
    logits, top_k = scores / trace["calibration"], int(top_k) or None
    probs = mhf.sampling_probs(logits, temperature, top_k, top_p)[0]  # (V,)
    kept = probs.nonzero()[:, 0]
    return dict(zip(kept.tolist(), probs[kept].tolist(), strict=True))


def view_probability(trace, temperature=1.0, top_k=0, top_p=1.0):
    """View 5: from the H log probabilities of a signature to the probability of its token."""
    drawn = sampling(trace, temperature, top_k, top_p)
    rows, follows = [], trace["next"]
    entries = list(trace["top_tokens"])
    if follows and follows["id"] not in [e["id"] for e in entries]:
        entries.append(follows)
    for e in entries:
        logs = e["log_prob"], e["log_prob_paper"]
        p, paper = (None if log_p is None else math.exp(log_p) for log_p in logs)
        rows.append(
            e
            | {"glyph": glyph(e), "p": p, "paper": paper, "drawn": drawn.get(e["id"], 0.0)}
            | {"next": bool(follows) and e["id"] == follows["id"], "sum": _arithmetic(trace, e)}
        )
    shown = sum(row["drawn"] for row in rows)
    return {
        "rows": rows,
        "H": (H := len(entries[0].get("log_p", ()))),
        "heads": _heads(H, trace["calibration"]),
        "valid_mass": (valid := trace.get("valid_mass")),
        "unassigned": None if valid is None else max(0.0, 1 - valid),
        "calibration": trace["calibration"],
        "kept": len(drawn),
        "rest": max(0.0, 1 - shown),
        "settings": (temperature, int(top_k), top_p),
        "forced": forced(trace),
    }


def _heads(H, calibration):
    if not H:  # the standard model
        return ["token", "calibrated", "drawn with the sliders"]
    logs = [f"log p{j + 1}" for j in range(H)]
    both = ["renormalised (paper, τ = 1)", f"calibrated (τ = {calibration:.3g})"]
    return ["token", "signature", *logs, "sum", "joint", *both, "drawn with the sliders"]


def _arithmetic(trace, entry):
    """How a token's numbers come from each other, in one line."""
    if "log_p" not in entry or entry["score"] is None:
        return ""
    terms = " ".join(f"{x:+.3f}" for x in entry["log_p"])
    p, paper = math.exp(entry["log_prob"]), math.exp(entry["log_prob_paper"])
    total = math.exp(entry["score"] - entry["log_prob_paper"])  # valid mass, if none is shared
    return (
        f"log p1 … log p{len(entry['log_p'])}:  {terms} = {entry['score']:.3f};   exp → joint "
        f"{entry['joint_prob']:.3g};   ÷ {total:.3g}, that of all tokens together, "
        f"→ {paper:.4g} (paper, τ = 1);   softmax of the sums / τ {trace['calibration']:.3g} → "
        f"{p:.4g} (calibrated)"
    ).replace("-", "−")


def view_generate(session, names):
    """View 6: the text so far, generated tokens with their probabilities, and other candidates."""
    trace, start, chosen = session["trace"], session["start"], session["position"] + 1
    rows = []
    for i, token_id in enumerate(session["ids"]):
        entry = {"id": token_id, "text": names[token_id]}
        log_p = session["log_probs"].get(i)
        rows.append(
            {
                "at": i,
                "glyph": glyph(entry),
                "p": None if log_p is None else math.exp(log_p),
                "generated": start is not None and i >= start,
                "chosen": i == chosen,
            }
        )
    candidates = [
        {"glyph": glyph(e), "id": e["id"], "p": math.exp(e["log_prob"])}
        for e in (trace or {}).get("top_tokens", [])
    ]
    return {
        "rows": rows[max(0, (start or len(rows)) - 40) :],
        "started": start is not None,
        "candidates": candidates,
        "after": glyph(trace["tokens"][trace["position"]]) if trace else "",
        "seed": session["seed"],
    }


CHART_V = [1_000, 3_000, 8_192, 32_768, 65_536, 131_072, 262_144, 524_288, 1_000_000]


def view_vocabulary(session, checkpoint):
    """View 7: the user's own tokens, their tries, and what a table costs as V grows."""
    facts, signatures = checkpoint.facts, getattr(checkpoint.model, "signatures", None)
    if signatures is None:
        return {
            "absent": "This model has a row for every token: a new one adds a row, no signature."
        }
    D, V = facts["D"], len(checkpoint.names)
    words = []
    for i, word in enumerate(session["words"], V - len(session["words"])):
        tries = len(signatures.trace(word.encode()))
        words.append(
            {"glyph": glyph({"text": word}), "id": i, "tries": tries, "taken": tries - 1}
            | {"signature": list(signatures.signatures[i])}
        )
    added = checkpoint.model.num_parameters()["total"] - facts["parameters"]["total"]
    lines = {
        "standard, V × D": lambda V: V * D,
        "H3 B10K (10,624)": lambda V: 3 * 10_624 * D,
        "H4 B16K (16,384)": lambda V: 4 * 16_384 * D,
        "this model": lambda V: facts["parameters"]["table"],
    }
    series = {name: [(v, line(v)) for v in CHART_V] for name, line in lines.items()}
    return {
        "words": words,
        "added": added,
        "table_size": facts["parameters"]["table"],
        "standard": checkpoint.model.num_parameters()["standard_table"],
        "V": V,
        "ids_bytes": 8 * facts["H"],
        "chart": chart(series, "tokens in the vocabulary V", "parameters of the table"),
        "series": series,
        "columns": [1_000, 32_768, 131_072, 1_000_000],
    }


def chart(series, x_label, y_label):
    """{name: [(x, y), …]} -> lines and ticks, both axes logarithmic, in a box of 600 × 260."""
    points = [(math.log10(x), math.log10(y)) for line in series.values() for x, y in line]
    xs, ys = zip(*points, strict=True)
    (x0, x1), (y0, y1) = (min(xs), max(xs)), (min(ys), max(ys))
    place_x = lambda x: 60 + 530 * (math.log10(x) - x0) / (x1 - x0)  # noqa: E731
    place_y = lambda y: 230 - 215 * (math.log10(y) - y0) / (y1 - y0)  # noqa: E731
    ticks = lambda low, high: [10**k for k in range(math.ceil(low), math.floor(high) + 1)]  # noqa: E731
    return {
        "lines": [
            {"name": name, "style": k}
            | {"points": " ".join(f"{place_x(x):.1f},{place_y(y):.1f}" for x, y in line)}
            for k, (name, line) in enumerate(series.items())
        ],
        "x_ticks": [(place_x(x), _short(x)) for x in ticks(x0, x1)],
        "y_ticks": [(place_y(y), _short(y)) for y in ticks(y0, y1)],
        "x_label": x_label,
        "y_label": y_label,
        "told": "; ".join(
            f"{name}: {_short(line[-1][1])} at {_short(line[-1][0])}"
            for name, line in series.items()
        ),
    }


def _short(x):
    for unit, sign in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if abs(x) >= unit:
            return f"{x / unit:.3g}{sign}"
    return f"{x:.3g}"


# ---------------------------------------------------------------------------------------------
# Templates: Jinja escapes everything, and their result is inserted as it is
# ---------------------------------------------------------------------------------------------

JINJA = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
JINJA.filters |= {"percent": percent, "count": count}
MACROS = """
{% macro table(label, heads) %}
<div class="scroll" tabindex="0" role="region" aria-label="{{ label }}"><table>
<thead><tr>{% for head in heads %}<th scope="col">{{ head }}</th>{% endfor %}</tr></thead>
<tbody>{{ caller() }}</tbody></table></div>
{% endmacro %}
{% macro cell(j, id) %}<span class="cell f{{ j % 8 }}"><i>{{ j + 1 }}</i>{{ id }}</span>
{%- endmacro %}
{% macro cells(signature) %}
<span class="cells">{% for id in signature or () %}{{ cell(loop.index0, id) }}{% endfor %}</span>
{%- endmacro %}
{% macro chip(glyph, marked=False, note="") %}
<span class="chip{{ ' marked' if marked }}"><bdi>{{ glyph }}</bdi>
{%- if note %} <small>{{ note }}</small>{% endif %}</span>
{%- endmacro %}
{% macro chips(entries, more=0) %}
{% for c in entries %}{{ chip(c.glyph, c.marked) }} {% endfor %}
{% if more > 0 %}<small>and {{ more|count }} more</small>{% endif %}
{% endmacro %}
{% macro bar(kind, share) %}<span class="bar {{ kind }}" style="width:{{ share }}%"></span>
{%- endmacro %}
{% macro s(n) %}{{ "s" if n != 1 }}{% endmacro %}
{% macro lines(c) %}
<svg viewBox="0 0 600 275" role="img"
 aria-label="{{ c.y_label }} against {{ c.x_label }}. {{ c.told }}">
{% for x, text in c.x_ticks %}<line x1="{{ x }}" x2="{{ x }}" y1="15" y2="230" class="grid"/>
<text x="{{ x }}" y="245" text-anchor="middle">{{ text }}</text>{% endfor %}
{% for y, text in c.y_ticks %}<line x1="60" x2="590" y1="{{ y }}" y2="{{ y }}" class="grid"/>
<text x="55" y="{{ y + 4 }}" text-anchor="end">{{ text }}</text>{% endfor %}
{% for l in c.lines %}<polyline points="{{ l.points }}" class="line s{{ l.style }}"/>
{% endfor %}<text x="325" y="271" text-anchor="middle">{{ c.x_label }}</text></svg>
<p class="legend">{{ c.y_label }}: {% for l in c.lines %}<span>
<svg viewBox="0 0 30 8" aria-hidden="true"><polyline points="0,4 30,4"
 class="line s{{ l.style }}"/></svg> {{ l.name }}</span> {% endfor %}</p>
{% endmacro %}
{% macro tries_list(tries, H) %}<ol class="tries">
{% for t in tries %}<li>seed {{ t.seed }}{{ " (the last function's own)" if t.seed == H - 1 }}:
last id <b>{{ t.last }}</b>,
{% if t.owner %}taken by {{ chip(t.glyph) }}: hash again{% else %}free{% endif %}</li>
{% endfor %}</ol>
{% endmacro %}
"""
TEMPLATES = {
    "tokens": """
{% if notice %}<p class="notice" role="status">{{ notice }}</p>{% endif %}
<div class="tokens" role="group" aria-label="Tokens: choose the position that all views show">
{% for t in tokens %}<button type="button" data-pick="{{ loop.index0 }}"
 aria-pressed="{{ (loop.index0 == position)|lower }}"><bdi>{{ t.glyph }}</bdi>
<small>{{ t.id }}</small></button>
{% endfor %}</div>
<p class="hint">{{ tokens|length }} token{{ s(tokens|length) }} of {{ vocab_size|count }}. Choose
one: all views then show what the model makes of it and what it expects after it.
{% if words %}Your own tokens: {% for w in words %}{{ chip(w) }} {% endfor %}
{% endif %}</p>
""",
    "signature": """
<h3>The token {{ chip(token.glyph, True) }} is the signature {{ cells(token.signature) }}</h3>
<p>{{ H }} hash functions, {{ B|count }} buckets each: {{ signatures|count }} signatures
(B<sup>H</sup>) for {{ V|count }} tokens{% if signatures > V %}, one in
{{ (signatures // V)|count }} is used{% else %}, which must share them{% endif %}. The token that
{{ next_is }}, {{ chip(next.glyph) }}, is {{ cells(next.signature) }}</p>
{% call table("Who shares the buckets", ["function, id", "tokens in the bucket",
  "who is in it: most probable next tokens first"]) %}
{% for f in functions %}<tr><th scope="row">{{ cell(loop.index0, f.bucket) }}</th>
<td>{{ f.num_tokens }} <small>(mean {{ "%.1f"|format(f.expected) }})</small></td>
<td>{{ chips(f.chips, f.more) }}</td></tr>{% endfor %}
{% endcall %}
<p>Ids in common with this token: {% for n, many in shared %}<span class="fact"><b>{{ n }}</b> of
{{ H }}: {{ many|count }} token{{ s(many) }}</span> {% endfor %}</p>
{% if neighbours %}<p>Closest:
{% for n in neighbours %}{{ chip(n.glyph, note=n.shared ~ " of " ~ H) }} {% endfor %}</p>{% endif %}
<h3>How it got its last id</h3>
{% if tries is none %}<p>Not known: this is the pad, whose ids are all 0, or an id without a token;
the checkpoint has no tokens, or its ids were not made of them by this mhf.py; or tokens share
signatures here and are never hashed again.</p>
{% else %}{{ tries_list(tries, H) }}{% endif %}
<p>Of all tokens, {{ facts.rehashed|length|count }} had to be hashed again.
{% if H > 1 %}Pairs of tokens that share at least {{ H - 1 }} of {{ H }} ids:
{{ "not counted" if facts.close_pairs is none else facts.close_pairs|count }};
{{ "%.2g"|format(facts.close_pairs_expected) }} are to be expected by chance.{% endif %}</p>
""",
    "gate": """
<h3>How {{ chip(glyph, True) }} becomes one vector</h3>
{% call table("Rows of this token", ["function, id", "norm of its row ‖e‖", "bottleneck score s",
  "weight α = softmax(s)"]) %}
{% for d in detail %}<tr><th scope="row">{{ cell(loop.index0, d.id) }}</th>
<td>{{ "%.4f"|format(d.norm) }}</td>
<td>{{ "–" if d.score is none else "%.4f"|format(d.score) }}</td>
<td>{{ "%.4f"|format(d.alpha) }}</td></tr>{% endfor %}
{% endcall %}
<p class="check">{% if residual is none %}This gate has no adapter to check against.{% else %}
Check: ‖W<sub>s</sub> Σ α<sub>j</sub> e<sub>j</sub> + b<sub>s</sub> − x‖ =
<b>{{ "%.1e"|format(residual) }}</b> {{ "✓" if residual < 1e-5 else "✗ not" }} below 1e-5; the
largest of all tokens here is {{ "%.1e"|format(worst) }}.{% endif %}</p>
<h3>Every token</h3>
{% call table("Gate weights of the tokens", ["token", "weights"] + names) %}
{% for r in rows %}<tr{% if r.at == position %} class="chosen"{% endif %}>
<th scope="row">{{ chip(r.glyph, r.at == position) }}</th>
<td class="wide"><div class="stack" role="img"
 aria-label="{% for x in r.segments %}function {{ x.j + 1 }}: {{ x.share|percent }} {% endfor %}">
{% for x in r.segments %}<div class="f{{ x.j % 8 }}" style="width:{{ 100 * x.share }}%"></div>
{% endfor %}</div></td>
{% for x in r.segments %}<td>{{ "%.3f"|format(x.share) }}{% if x.score is not none %}<br>
<small>{{ "%.2f"|format(x.score) }}</small>{% endif %}</td>{% endfor %}</tr>{% endfor %}
{% endcall %}
<p class="hint">Bars in the order of the functions; small numbers are the scores.{% if hidden %}
{{ hidden }} more tokens are not shown; choose another to see those around it.{% endif %}</p>
""",
    "cascade": """
<h3>What comes after {{ chip(before, True) }}? {{ panels|length }} ids, one after the other</h3>
{% if forced %}<p class="notice whatif" role="status"><b>What if</b> {% for j, bucket in
  forced.items() %}function {{ j|int + 1 }} were bucket {{ bucket }}{{ ", and " if not loop.last }}
{%- endfor %}: later functions and the result follow that row, not the model's own mixture
(nothing follows the last function; forcing it only narrows what is compatible).
<button type="button" data-clear="1">Back to the model's own</button></p>{% endif %}
<p>The most probable next token is {{ chip(best) }} ({{ best_p|percent }}).{% if next %} In the
text comes {{ chip(next) }}; its buckets have a ◆.{% endif %} Choose a bucket to force it.</p>
<p class="legend"><span><span class="key solid"></span> p<sub>j</sub>, the function's own
probability</span> <span><span class="key hatched"></span> share of the renormalised probability
that the bucket's tokens hold</span></p>
<div class="panels">
{% for p in panels %}{% set j = loop.index0 %}
<section class="panel" aria-label="Function {{ j + 1 }}">
<h4><span class="f{{ j % 8 }} key"></span> Function {{ j + 1 }}</h4>
<p>entropy <b>{{ "%.2f"|format(p.entropy_bits) }}</b> of {{ "%.2f"|format(most_bits) }} bits</p>
<div role="group" aria-label="Buckets of function {{ j + 1 }}">
{% for b in p.bars %}<button type="button" class="bucket{{ ' forced' if b.forced }}"
 data-function="{{ j }}" data-bucket="{{ b.bucket }}" aria-pressed="{{ b.forced|lower }}">
<span class="top"><b>{{ b.bucket }}{{ " ◆" if b.target }}</b> <span>{{ b.prob|percent }}</span>
<small>{{ b.mass|percent }}</small></span>
{{ bar("f%d"|format(j % 8), b.wide) }}{{ bar("hatched", b.mass_wide) }}
<span class="members">{{ chips(b.chips, b.more) }}
{% if not b.num_tokens %}<small>no token</small>{% endif %}</span></button>
{% endfor %}</div>
<p>{% if p.forced is not none %}forced: <b>{{ p.forced }}</b>. {% endif %}Still compatible:
<b>{{ p.compatible|count }}</b> token{{ s(p.compatible) }}, which hold
{{ p.compatible_mass|percent }}.</p>
{% if p.soft_embedding_norm is none %}<p>The last function hands nothing on.</p>{% else %}
<p>Hands on a vector of norm <b>{{ "%.3f"|format(p.soft_embedding_norm) }}</b>, the
{{ "mixture of its rows" if p.forced is none else "forced row" }}. Nearest rows (cosine):</p>
<ul>{% for n in p.nearest %}<li>{{ n.bucket }} ({{ "%.2f"|format(n.cosine) }})
{{ chips(n.chips) }}</li>{% endfor %}</ul>{% endif %}</section>
{% endfor %}</div>
""",
    "probability": """
{% if forced %}<p class="notice whatif">What if: these numbers follow the forced buckets.</p>
{% endif %}{% if valid_mass is not none %}<h3>Where the joint probability lies</h3>
<div class="stack mass" role="img" aria-label="on signatures of real tokens
 {{ valid_mass|percent }}, on unassigned signatures {{ unassigned|percent }}">
<div class="f0" style="width:{{ 100 * valid_mass }}%"></div>
<div class="unassigned" style="width:{{ 100 * unassigned }}%"></div></div>
<p class="legend"><span><span class="key f0"></span> signatures of real tokens (valid mass):
<b>{{ valid_mass|percent }}</b></span> <span><span class="key unassigned"></span> signatures that
no token has: <b>{{ unassigned|percent }}</b></span></p>{% endif %}
<h3>The same tokens in every column</h3>
{% call table("Probabilities of the next token", heads) %}
{% for r in rows %}<tr data-sum="{{ r.sum }}"><th scope="row"><button type="button"
 class="chip{{ ' marked' if r.next }}"><bdi>{{ r.glyph }}</bdi>{{ " ◆" if r.next }}</button></th>
{% if H %}<td>{{ cells(r.signature) }}</td>
{% for x in r.log_p %}<td>{{ "%.2f"|format(x) }}</td>{% endfor %}
<td>{{ "–" if r.score is none else "%.2f"|format(r.score) }}</td>
<td>{{ "%.2g"|format(r.joint_prob) }}</td><td>{{ r.paper|percent }}</td>{% endif %}
<td>{{ r.p|percent }}</td>
<td class="wide">{{ bar("f1", 100 * r.drawn) }}{{ r.drawn|percent if r.drawn else "cut off" }}</td>
</tr>{% endfor %}
{% endcall %}
<p class="arithmetic" aria-live="polite">{{ rows[0].sum }}</p>
<p>With temperature {{ "%g"|format(settings[0]) }}, top-k {{ settings[1] or "off" }}, top-p
{{ "%g"|format(settings[2]) }}:
<b>{{ kept|count }}</b> token{{ s(kept) }} can be drawn; those not in the table have
{{ rest|percent }} together.
{% if rows|selectattr("next")|list %}◆ is the token that comes next in the text.{% endif %}</p>
""",
    "generate": """
<div class="tokens written" role="group"
 aria-label="The text; choose a generated token to see how it came about">
{% for r in rows %}{% if r.generated %}<button type="button" data-pick="{{ r.at - 1 }}"
 class="generated" aria-pressed="{{ r.chosen|lower }}"
 style="--p:{{ (100 * (r.p or 0))|round(1) }}%"><bdi>{{ r.glyph }}</bdi>
<small>{{ r.p|percent }}</small></button>{% else %}
<span class="given"><bdi>{{ r.glyph }}</bdi></span>{% endif %}
{% endfor %}</div>
{% if started %}<p class="hint">Seed {{ seed }}. The stronger its colour and the larger its number,
the surer the model was (calibrated, before temperature and cuts).</p>{% endif %}
{% if candidates %}<p>After {{ chip(after) }}, go on from here with another candidate:</p>
<div class="tokens" role="group" aria-label="Candidates to go on with">
{% for c in candidates %}<button type="button" data-candidate="{{ c.id }}"><bdi>{{ c.glyph }}</bdi>
<small>{{ c.p|percent }}</small></button>
{% endfor %}</div>{% endif %}
""",
    "vocabulary": """
<h3>Your own tokens</h3>
{% if words %}{% call table("Your own tokens", ["token", "id", "signature", "tries",
  "parameters added"]) %}
{% for w in words %}<tr><th scope="row">{{ chip(w.glyph, True) }}</th><td>{{ w.id }}</td>
<td>{{ cells(w.signature) }}</td><td>{{ w.tries }}{{ " (" ~ w.taken ~ " taken)" if w.taken }}</td>
<td>{{ added }}</td></tr>{% endfor %}
{% endcall %}
<p>The model has never read them: each is a new mixture of rows that other tokens taught. A
checkpoint stores {{ ids_bytes }} bytes for the ids of each. Now use one in the prompt.</p>
{% else %}<p>None yet. They will be yours alone: nobody else who uses this page sees them.</p>
{% endif %}<h3>What a table costs</h3>
{{ lines(chart) }}
{% call table("Parameters of the table", ["table"] + columns|map("count")|list) %}
{% for name, line in series.items() %}<tr><th scope="row">{{ name }}</th>{% for v in columns %}
<td>{{ (line|selectattr(0, "equalto", v)|first)[1]|count }}</td>{% endfor %}</tr>{% endfor %}
{% endcall %}
<p>Now: V = {{ V|count }}; this model's table has {{ table_size|count }} parameters, a V × D one
would have {{ standard|count }}. All at this model's width.</p>
""",
    "tour": """
<p class="step">Step {{ number }} of {{ total }}: <b>{{ title }}</b></p><p>{{ text }}</p>""",
    "examples": """
<ul class="examples">{% for label, reason in examples %}<li><button type="button" class="chip"
 data-example="{{ loop.index0 }}">{{ label }}</button> {{ reason }}</li>
{% endfor %}</ul>""",
    "code": """<pre tabindex="0" class="code">{{ text }}</pre>""",
    "link": """<a href="{{ url }}">Link to what you see</a>""",
}
ABSENT = "{% if absent %}<p class='notice' role='status'>{{ absent }}</p>{% else %}"
TEMPLATES = {
    name: JINJA.from_string(f'{MACROS}<div class="mhf">{ABSENT}{text}{{% endif %}}</div>')
    for name, text in TEMPLATES.items()
}


def show(name, values):
    """The HTML of a view."""
    return TEMPLATES[name].render(values).strip()


CSS = """
.gradio-container, .mhf { --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #b58900;
  --c5: #56b4e9; --c6: #7f7f1f; --c7: #882255; --text: var(--body-text-color);
  --edge: 1px solid var(--border-color-primary); --soft: var(--background-fill-secondary);
  --plain: var(--background-fill-primary);
  --hatch: repeating-linear-gradient(45deg, var(--text) 0 1px, transparent 1px 5px); }
.gradio-container { max-width: 1400px !important; }
.maths { padding-bottom: 6px !important; }
.mhf { font-size: 1rem; color: var(--text); }
.mhf h3 { margin: 1rem 0 .3rem; font-size: 1.15rem; }
.mhf h4 { margin: .2rem 0; font-size: 1.05rem; }
.mhf p { margin: .4rem 0; }
.mhf ul, .mhf ol { margin: .2rem 0 .2rem 1.3rem; }
.mhf small { font-size: .85em; color: var(--text); }
.mhf .hint { font-size: .9rem; }
.mhf .notice { border-left: 4px solid var(--c1); padding: .4rem .8rem; background: var(--soft); }
.mhf table { border: 0 !important; border-collapse: collapse; font-size: .95rem;
  font-variant-numeric: tabular-nums; margin: .3rem 0; }
.mhf tr, .mhf thead, .mhf tbody { border: 0 !important; }
.mhf th, .mhf td { text-align: left; padding: .2rem .6rem; border: 0; border-bottom: var(--edge);
  white-space: nowrap; vertical-align: middle; color: var(--text); font-weight: normal; }
.mhf thead th { font-weight: 600; white-space: normal; vertical-align: bottom; }
.mhf td.wide { min-width: 11rem; }
.mhf tr:hover, .mhf tr.chosen { background: var(--soft); }
.mhf .scroll { overflow-x: auto; max-width: 100%; }
.mhf .chip { display: inline-block; font-family: var(--font-mono); border: var(--edge);
  border-radius: 4px; padding: 0 .35em; margin: 1px; overflow-wrap: anywhere;
  background: var(--plain); color: var(--text); }
.mhf td .chip, .mhf th .chip { white-space: nowrap; overflow-wrap: normal; }
.mhf .chip.marked { border: 2px solid var(--text); font-weight: 600; }
.mhf .cell { display: inline-block; font-family: var(--font-mono); border-left: .5em solid var(--c);
  padding: 0 .4em; margin: 1px 2px; border-radius: 3px; background: var(--soft); }
.mhf .cell i { font-style: normal; font-size: .7em; vertical-align: super; margin-right: .3em; }
.mhf .cells, .mhf .fact { white-space: nowrap; margin-right: 1em; }
.mhf .f0 { --c: var(--c0); } .mhf .f1 { --c: var(--c1); } .mhf .f2 { --c: var(--c2); }
.mhf .f3 { --c: var(--c3); } .mhf .f4 { --c: var(--c4); } .mhf .f5 { --c: var(--c5); }
.mhf .f6 { --c: var(--c6); } .mhf .f7 { --c: var(--c7); }
.mhf .key { display: inline-block; width: .9em; height: .9em; border-radius: 2px;
  background: var(--c, var(--text)); }
.mhf .bar { display: block; height: .55em; min-width: 1px; margin: 1px 0; border-radius: 2px;
  background: var(--c); }
.mhf .stack { display: flex; height: 1.2em; border-radius: 3px; overflow: hidden; gap: 1px; }
.mhf .stack div { background: var(--c); height: 100%; }
.mhf .stack.mass { height: 1.6em; max-width: 50rem; border: var(--edge); }
.mhf .hatched, .mhf div.unassigned, .mhf .unassigned { background: var(--hatch); }
.mhf .legend span { margin-right: .7em; }
.mhf .legend .key { margin-right: .3em; }
.mhf .tokens { display: flex; flex-wrap: wrap; gap: 4px; max-height: 16rem; overflow-y: auto;
  padding: 3px; }
.mhf .tokens button, .mhf .given { display: inline-flex; flex-direction: column; cursor: pointer;
  align-items: center; font-family: var(--font-mono); max-width: 100%; border: var(--edge);
  border-radius: 5px; padding: .15rem .45rem; min-height: 2.2rem; min-width: 1.6rem;
  background: var(--plain); color: var(--text); overflow-wrap: anywhere; }
.mhf .given { cursor: default; border-style: dotted; justify-content: center; }
.mhf button:hover { background: var(--soft); }
.mhf button[aria-pressed="true"] { outline: 3px solid var(--c0); outline-offset: -1px;
  font-weight: 700; }
.mhf button:focus-visible, .mhf [tabindex]:focus-visible { outline: 3px solid var(--c1); }
.mhf .tokens .generated { --tint: color-mix(in srgb, var(--c5) 60%, var(--plain));
  background: color-mix(in srgb, var(--tint) var(--p), var(--plain));
  border-bottom: .35rem solid color-mix(in srgb, var(--c0) var(--p), var(--border-color-primary)); }
.mhf .panels { display: grid; gap: .8rem;
  grid-template-columns: repeat(auto-fit, minmax(min(15rem, 100%), 1fr)); }
.mhf .panel { border: var(--edge); border-radius: 6px; padding: .5rem .7rem; min-width: 0; }
.mhf .bucket { display: block; width: 100%; text-align: left; border: 1px solid transparent;
  border-radius: 5px; padding: .2rem .3rem; cursor: pointer; color: var(--text);
  background: var(--plain); }
.mhf .bucket .top { display: grid; grid-template-columns: 1fr auto 4.5em; gap: .5em;
  font-variant-numeric: tabular-nums; }
.mhf .bucket .members { font-size: .9em; font-weight: normal; }
.mhf .bucket.forced, .mhf .whatif button { border: 2px solid var(--c1); }
.mhf .whatif button { border-radius: 5px; padding: 0 .5em; background: var(--plain);
  color: var(--text); cursor: pointer; }
.mhf .arithmetic { font-family: var(--font-mono); font-size: .9rem; min-height: 3.2em;
  padding: .4rem .6rem; background: var(--soft); white-space: pre-wrap; }
.mhf svg { max-width: 46rem; width: 100%; display: block; }
.mhf .legend svg { width: 30px; height: 8px; display: inline; }
.mhf svg text { fill: var(--text); font-size: 11px; }
.mhf .grid { stroke: var(--border-color-primary); stroke-width: .5; }
.mhf .line { fill: none; stroke-width: 2.5; stroke: var(--c0); }
.mhf .s1 { stroke: var(--c1); stroke-dasharray: 8 4; }
.mhf .s2 { stroke: var(--c2); stroke-dasharray: 2 3; }
.mhf .s3 { stroke: var(--c3); stroke-dasharray: 10 3 2 3; }
.mhf pre { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 24rem; overflow-y: auto;
  padding: .5rem; background: var(--soft); color: var(--text); }
.mhf pre.code { font-size: .85rem; white-space: pre; overflow-x: auto; }
@media (max-width: 600px) { .mhf svg[role=img] text { font-size: 19px; } }
@media (prefers-reduced-motion: reduce) {
  *, *::before, *::after { animation: none !important; transition: none !important; } }
"""

# One listener for a whole view: it outlives what is drawn in it. The events' names are quoted.
CLICKS = """
element.addEventListener('click', event => {
  const button = event.target.closest('button');
  if (!button) return;
  const d = button.dataset;
  if (d.pick !== undefined) trigger('pick', {index: Number(d.pick)});
  else if (d.bucket !== undefined)
    trigger('force', {function: Number(d.function), bucket: Number(d.bucket)});
  else if (d.clear !== undefined) trigger('force', {function: -1, bucket: 0});
  else if (d.example !== undefined) trigger('example', {index: Number(d.example)});
  else if (d.candidate !== undefined) trigger('branch', {id: Number(d.candidate)});
});
const arithmetic = event => {
  const row = event.target.closest('[data-sum]'), line = element.querySelector('.arithmetic');
  if (row && line && row.dataset.sum) line.textContent = row.dataset.sum;
};
for (const name of ['mouseover', 'focusin', 'click']) element.addEventListener(name, arithmetic);
"""
LINK_JS = """
watch('value', () => {
  const link = element.querySelector('a');
  if (link) history.replaceState(null, '', link.getAttribute('href'));
});
"""


# ---------------------------------------------------------------------------------------------
# What is said beside the views
# ---------------------------------------------------------------------------------------------

MATHS = {
    "signature": r"""A token's bytes are hashed with $H$ seeds: $\mathrm{id}_j =
\mathrm{MurmurHash3}(\text{token}, j) \bmod (B-1) + 1$.
If another token has all $H$ ids already, only the last is hashed again, with seeds $H, H+1,
\dots$, until the signature is free.
$V$ tokens in $B-1$ buckets: a bucket holds $V/(B-1)$ on average, and a pair of tokens shares a
given id with probability $1/(B-1)$.""",
    "gate": r"""The ids name $H$ rows $e_1, \dots, e_H$ of a table of $H \cdot B$ rows. A
bottleneck scores each of them,
$s_j = w_2 \cdot \mathrm{SiLU}(W_1 e_j + b_1) + b_2$; the gate is $\alpha = \mathrm{softmax}(s)$,
and the input vector $x = W_s \sum_j \alpha_j e_j + b_s$.""",
    "cascade": r"""$c_1 = h$, the backbone's state. For $j = 1 \dots H$: $o_j = E_j c_j$ over the
$B$ buckets, $p_j = \mathrm{softmax}(o_j)$, the soft embedding
$e_j = \sum_b p_j[b]\, E_j[b]$, and $c_{j+1} = c_j + W_{up}\,\mathrm{SiLU}(W_{dn}[c_j ; e_j] +
b_{dn}) + b_{up}$. Forcing bucket $b$ puts $E_j[b]$ in the place of $e_j$.
A model that was trained for the sum of the functions only (objective *exact*) may spread each
$p_j$ thin: the hatched bars, which only count real tokens, then say more.""",
    "probability": r"""A token's score is $\sum_j \log p_j[\mathrm{id}_j]$; its exponential is the
joint probability of its signature. Most signatures belong to no token: the mass on
those that do is the *valid mass*, by which the paper divides ($\tau = 1$). Calibrated:
$\mathrm{softmax}(\text{score}/\tau)$, with $\tau$ fitted on held-out text by train.py
(1 in published checkpoints).
A temperature $T$ divides the scores once more. Dividing each function's logits by $T$ instead,
with the same soft embeddings, would give the same
renormalised probabilities, since the functions' log-sum-exps are the same for every token; only
joint probability and valid mass would differ.""",
    "generate": r"""Each token is drawn from $\mathrm{softmax}(\text{score}/(\tau T))$, cut to the
top $k$ tokens and then to the fewest with mass $p$. Same seed, same machine, same text.""",
    "vocabulary": r"""A standard table has $V \cdot D$ parameters and grows with every token; this
one has $H \cdot B \cdot D$, for up to $(B-1)^H$ tokens. What grows is the list of ids, $V \cdot
H$ integers that nobody trains.""",
}
CODE = {  # what the views show is computed here
    "signature": ("SignatureTable.candidates", "SignatureTable.extend"),
    "gate": ("GatedEmbedding",),
    "cascade": ("soft_embedding", "CascadeDecoder"),
    "probability": (
        "MultiHashFormer.token_scores",
        "MultiHashFormer.sum_over_signatures",
        "sampling_probs",
    ),
    "generate": ("LanguageModel.generate",),
    "vocabulary": ("MultiHashFormer.expand", "SignatureTable.extend"),
}
TOUR = [  # title, view, prompt or None, text
    ("A prompt becomes tokens", "signature", "**JULIET**  \nO Romeo, Romeo! wherefore art",
     """The tokenizer cuts the text into pieces; each has a number. Spaces and line ends are drawn
     as signs. Choose a token: every view follows."""),
    ("A token is a signature", "signature", None,
     """Its bytes, hashed with different seeds, give one id for each function. Single buckets are
     shared, but not all of them (with one function alone they must be)."""),
    ("Sharing a bucket is normal", "signature", None,
     """The table has fewer rows than tokens times functions. The tokens in a bucket share its
     row; only together do the ids tell tokens apart."""),
    ("The gate weighs the rows", "gate", None,
     """A small network scores each row, and a softmax turns scores into weights. The check adds
     the weighted rows up once more and compares them with the model's own input vector."""),
    ("Nothing is unknown", "gate", "**JULIET**  \nO 😀",
     "A symbol that has no token of its own is a few bytes, and every byte has a signature, too."),
    ("The cascade predicts id after id", "cascade",
     "**HAMLET**  \nTo be, or not to be, that is the",
     """The first function's distribution becomes a mixture of rows, the soft embedding, which the
     next function sees. Watch how few tokens stay compatible."""),
    ("What if?", "cascade", None,
     """Choose a bucket of function 1: its row takes the mixture's place, and the later functions
     and the result follow."""),
    ("From H numbers to one probability", "probability", None,
     """Log probabilities add up. Most signatures belong to nobody, so the sum is renormalised over
     the real tokens, then calibrated. Move the sliders: the model does not run again."""),
    ("Writing", "generate", None,
     """Generate some tokens, then choose one of them: the other views go to the step at which it
     was drawn. Or go on with another candidate."""),
    ("A new word costs nothing", "vocabulary", None,
     """Add a word in any script. It gets a free signature and adds 0 parameters; a standard model
     needs a new row for each."""),
]  # fmt: skip
TABS = {
    "signature": "Signature",
    "gate": "Gate",
    "cascade": "Cascade",
    "probability": "Probability",
    "generate": "Generate",
    "vocabulary": "Vocabulary",
}


def examples(checkpoint):
    """[(label, prompt, reason)]: fixed ones, and those that this checkpoint's own tokens give."""
    if checkpoint.tokenizer is None:
        return [("token ids", "1 2 3", "this checkpoint has no tokenizer of this project")]
    found = [
        ("Juliet", TOUR[0][2], "a famous line: how sure is the model of its next word?"),
        ("Romeo", "**ROMEO**  \nBut, soft! what light through yonder", "another, less plain"),
        ("Hamlet", TOUR[5][2], "the last word of a line: see function after function decide"),
        ("modern", "The computer is", "a word that Shakespeare did not have"),
        ("emoji", "O 😀", "bytes are tokens, too: nothing is unknown"),
        ("right to left", "سلام", "Arabic, drawn in its own direction within each token"),
        ("new line", "**ROMEO**  \n", "blanks and line ends are tokens; see the signs"),
    ]
    if pair := checkpoint.facts.get("close_pair"):
        text = "".join(checkpoint.names[i] or "" for i in pair)
        if checkpoint.tokenizer.encode(text) == pair:
            found.append(("two alike", text, "two tokens that share all ids but one"))
    for i in checkpoint.facts.get("rehashed", ())[:100]:
        if checkpoint.tokenizer.encode(checkpoint.names[i]) == [i]:
            found.append(("hashed again", checkpoint.names[i], "its first signature was taken"))
            break
    return found


def source(name):
    """The source of the parts of mhf.py behind a view, as it stands in the file."""
    parts = []
    for path in CODE[name]:
        try:
            found = functools.reduce(getattr, path.split("."), mhf)
            parts.append(f"# mhf.{path}\n" + inspect.cleandoc("\n" + inspect.getsource(found)))
        except (AttributeError, OSError, TypeError):
            parts.append(f"# mhf.{path}: not in this mhf.py")
    return "\n\n".join(parts)


# ---------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------


def permalink(session, temperature, top_k, top_p, tab):
    """The query string of what is seen: parts that are as at the start are left out."""
    parts = [("prompt", session["prompt"]), ("tab", tab)]
    if session["checkpoint"] != session["default"]:
        parts.append(("checkpoint", session["checkpoint"]))
    if session["position"] != len(session["ids"]) - 1:
        parts.append(("position", session["position"]))
    parts += [("force", f"{j}:{bucket}") for j, bucket in session["force"].items()]
    parts += [("word", word) for word in session["words"]]
    if session["start"] is not None:
        parts += [("ids", ",".join(map(str, session["ids"]))), ("start", session["start"])]
        parts.append(("seed", session["seed"]))
    values = dict(zip(SLIDERS, (temperature, top_k, top_p), strict=True))
    parts += [(name, f"{v:g}") for name, v in values.items() if v != SLIDERS[name][0]]
    return "?" + urllib.parse.urlencode(parts)


class Link:
    """The parts of a query string; what is wrong is noted, and a default takes its place."""

    def __init__(self, query):
        self.query, self.wrong = query, set()

    def get(self, name):
        return (self.query.get(name) or [""])[0]

    def one_of(self, name, known, default):
        if self.get(name) and self.get(name) not in known:
            self.wrong.add(name)
        return self.get(name) if self.get(name) in known else default

    def number(self, name, kind, low, high, default):
        def within(_):
            if low <= (value := kind(self.get(name))) <= high:
                return value
            raise ValueError

        return self.attempt(name, within, default)

    def attempt(self, name, work, value):
        """work(value) if the link has that part and it can be used; else the value."""
        if self.get(name):
            try:
                return work(value)
            except (ValueError, OverflowError):
                self.wrong.add(name)
        return value


def from_link(lab, session, query):
    """(session, [sliders, tab]) of a query string's {name: [values]}; what is wrong is left out."""
    link = Link(query)
    name = link.one_of("checkpoint", lab.paths(), session["checkpoint"])
    name = link.attempt("checkpoint", lambda _: lab.get(name).name, session["checkpoint"])
    start, session = examples(lab.get(name))[0][1], session | {"checkpoint": name}
    prompt, words = link.get("prompt") or start, "\n".join(query.get("word") or [])
    session["prompt"] = prompt
    session = link.attempt("word", lambda s: add_words(lab, s, words, space=False), session)
    session = link.attempt("prompt", lambda s: open_prompt(lab, s, prompt), session)
    if not session["ids"]:
        session = open_prompt(lab, session, start)
    session = link.attempt("ids", lambda s: _generated(lab, s, link), session)
    last = len(session["ids"]) - 1
    position = link.number("position", int, 0, last, last)
    if position != session["position"] or session["trace"] is None:
        session = trace_again(lab, session, position=position)
    pairs = [pair.partition(":") for pair in query.get("force") or ()]

    def forced(s):
        return trace_again(lab, s, force={str(int(j)): int(bucket) for j, _, bucket in pairs})

    session = link.attempt("force", forced, session)
    values = [
        link.number(name, int if name == "top_k" else float, low, high, default)
        for name, (default, low, high) in SLIDERS.items()
    ]
    tab = link.one_of("tab", TABS, "signature")
    if link.wrong:
        parts = ", ".join(sorted(link.wrong))
        session["notice"] = f"The link's {parts} could not be used and was left out."
    return session, [*values, tab]


def _generated(lab, session, link):
    """The session with the generated tokens of a link; their probabilities are computed again."""
    checkpoint, ids = current(lab, session), [int(i) for i in link.get("ids").split(",")]
    known = all(0 <= i < len(checkpoint.names) for i in ids)
    if not known or len(ids) > checkpoint.facts["window"]:
        raise ValueError
    start = link.number("start", int, 1, len(ids), len(ids))
    seed = link.number("seed", int, 0, 2**63 - 1, 0)
    log_probs = lab.log_probs(checkpoint, ids, start)
    session = session | {"ids": ids, "start": start, "seed": seed, "log_probs": log_probs}
    return session | {"trace": None}


def draw(lab, session, temperature, top_k, top_p, tab="signature"):
    """The session and the HTML of all views, in the order of DRAWN."""
    if session["trace"] is None:  # stopped in the midst of generating
        session = trace_again(lab, session, position=max(0, len(session["ids"]) - 2))
    checkpoint, trace = current(lab, session), session["trace"]
    return [
        session,
        show("signature", view_signature(trace, checkpoint.facts)),
        show("gate", view_gate(trace)),
        show("cascade", view_cascade(trace, checkpoint.facts)),
        show("probability", view_probability(trace, temperature, top_k, top_p)),
        show("generate", view_generate(session, checkpoint.names)),
        show("vocabulary", view_vocabulary(session, checkpoint)),
        show("tokens", view_tokens(session)),
        show("link", {"url": permalink(session, temperature, top_k, top_p, tab)}),
    ]


def inspect_prompt(lab, prompt, position=-1, top_k=TOP, force=None, checkpoint=""):
    """What the JSON endpoint answers: explain's dict of a prompt, and its token ids."""
    for name, value in (("prompt", prompt), ("checkpoint", checkpoint)):
        if not isinstance(value, str):
            raise ValueError(f"{name} must be text, not {brief(value)}")
    for name, value in (("position", position), ("top_k", top_k)):
        if isinstance(value, str) or not is_whole(value):
            raise ValueError(f"{name} must be a whole number, not {brief(value)}")
    if not 1 <= top_k <= 100:
        raise ValueError(f"top_k must be from 1 to 100, not {brief(top_k)}")
    pairs = list((force if isinstance(force, dict) else {"?": force} if force else {}).items())
    if not all(is_whole(j) and is_whole(bucket) for j, bucket in pairs):
        raise ValueError(f"force must be {{function: bucket}}, not {brief(force)}")
    found = lab.get(checkpoint or next(iter(lab.paths())))
    ids = lab.encode(found, [], prompt)
    if len(ids) > (window := found.facts["window"]):
        raise ValueError(f"the prompt has {len(ids)} tokens, the context only {window}")
    force = {int(j): int(bucket) for j, bucket in pairs}
    trace = lab.trace(found, ids, int(position), force, int(top_k))
    return {k: v for k, v in trace.items() if k != "scores"} | {"ids": ids}


def is_whole(value):
    """Whether int(value) says the same; JSON has the functions of a dict as text."""
    if isinstance(value, str):
        return bool(re.fullmatch(r"-?\d{1,9}", value))
    return type(value) is int or (type(value) is float and value.is_integer())


DRAWN = [*TABS, "tokens", "link"]  # what every event draws


@contextlib.contextmanager
def told(plain):
    """An error becomes a message. It may hold a user's text, and the page takes HTML for one."""
    try:
        yield
    except ValueError as error:
        text = str(error) if plain else str(error).replace("&", "&amp;").replace("<", "&lt;")
        raise gr.Error(text, title="Not done", print_exception=False) from None
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: this went wrong; the server's terminal has the details"
        raise gr.Error(text, title="Not done", print_exception=False) from None


def refusing(work, plain=False):
    """The handler, a function or a generator, with its mistakes told in one sentence."""

    @functools.wraps(work)
    def once(*args):
        with told(plain):
            return work(*args)

    @functools.wraps(work)
    def stream(*args):
        with told(plain):
            yield from work(*args)

    return stream if inspect.isgeneratorfunction(work) else once


def html(name, value, events=CLICKS):
    return gr.HTML(value, elem_id=name, js_on_load=events)


def textbox(label, name, value=""):
    how = dict(lines=2, max_lines=6, scale=4, min_width=250)
    return gr.Textbox(value, label=label, elem_id=name, **how)


def sliders():
    """temperature, top-k, top-p, within the limits that the server enforces, too."""
    made = []
    with gr.Row():
        for name, (value, low, high) in SLIDERS.items():
            step = 1 if name == "top_k" else 0.01
            label = name.replace("_", "-") + (" (0: all tokens)" if name == "top_k" else "")
            made.append(gr.Slider(low, high, value, step=step, label=label, min_width=200))
    return made


class Page:
    """The page: what it shows at the start, and what each event does.

    Every handler gets the session, the three sliders and the tab (`seen`) first, then its own
    inputs, and gives what `draw` gives, then its own outputs.
    """

    def __init__(self, lab):
        if not lab.paths():
            raise ValueError(
                "there is no checkpoint: run `python train.py`, or name one: --checkpoint"
            )
        self.lab, self.default = lab, next(iter(lab.paths()))
        self.fresh = FRESH | {"checkpoint": self.default, "default": self.default}
        start = examples(lab.get(self.default))[0][1]
        self.begin = open_prompt(lab, self.fresh, start)
        first = draw(lab, self.begin, *(value for value, _, _ in SLIDERS.values()))
        self.first = dict(zip(("session", *DRAWN), first, strict=True))
        self.places = {}
        with gr.Blocks(title="MultiHashFormer", analytics_enabled=False) as self.demo:
            self.session = gr.State(self.begin)
            self.step, self.at = gr.State(0), gr.State("signature")  # of the tour; the tab
            self.head(start)
            with gr.Tabs(selected="signature", elem_id="views") as self.tabs:
                for name, title in TABS.items():
                    with gr.Tab(title, id=name, render_children=True) as tab:
                        self.tab(name, tab)
            self.views["link"] = html("link", self.first["link"], LINK_JS)
            self.wire()

    # What the page shows

    def head(self, start):
        gr.Markdown(
            "# See a token become a signature, and a signature become a token\n"
            "MultiHashFormer is a language model without a vocabulary-sized embedding. Everything "
            "below is computed by the model you choose, on this machine."
        )
        with gr.Accordion("Guided tour", open=True):
            self.tour = html("tour", self.tour_html(0))
            with gr.Row():
                self.back = gr.Button("Back", size="sm", elem_id="tour-back")
                self.forth = gr.Button("Next", size="sm", elem_id="tour-next")
        with gr.Row():
            self.prompt = textbox("Prompt", "prompt", start)
            with gr.Column(scale=1, min_width=200):
                names = list(self.lab.paths())
                self.choice = gr.Dropdown(
                    names, value=self.default, label="Checkpoint", elem_id="checkpoint"
                )
                self.look = gr.Button("Look inside", variant="primary", elem_id="look")
        with gr.Accordion("Examples", open=False):
            self.examples = html("examples", self.examples_html(self.begin))
        self.views = {"tokens": html("tokens", self.first["tokens"])}

    def tab(self, name, tab):
        getattr(self, f"controls_{name}", lambda: None)()
        self.views[name] = html(name, self.first[name])
        with gr.Accordion("The maths", open=False):
            dollars = [{"left": "$", "right": "$", "display": False}]
            gr.Markdown(MATHS[name], latex_delimiters=dollars, elem_classes="maths")
        with gr.Accordion("The code", open=False):
            gr.HTML(show("code", {"text": source(name)}))
        self.places[name] = tab

    def controls_probability(self):
        self.cuts = sliders()

    def controls_generate(self):
        self.mirrored = sliders()
        with gr.Row():
            self.many = gr.Slider(1, MAX_TOKENS, 40, step=1, label="tokens", min_width=200)
            self.seed = gr.Number(0, label="seed", precision=0, min_width=120)
        with gr.Row():
            self.go = gr.Button("Generate", variant="primary", elem_id="go")
            self.stop = gr.Button("Stop", variant="stop", elem_id="stop")

    def controls_vocabulary(self):
        with gr.Row():
            self.words = textbox("New tokens, one a line, in any script", "words")
            with gr.Column(scale=1, min_width=200):
                self.space = gr.Checkbox(True, label="with a space in front, as inside a sentence")
                self.add = gr.Button("Add", variant="primary", elem_id="add")
                self.forget = gr.Button("Forget mine", elem_id="forget")

    def tour_html(self, step):
        title, _, _, text = TOUR[step]
        return show("tour", {"number": step + 1, "total": len(TOUR), "title": title, "text": text})

    def examples_html(self, session):
        found = examples(self.lab.get(session["checkpoint"]))
        return show("examples", {"examples": [(label, reason) for label, _, reason in found]})

    # What happens

    def wire(self):
        """Every event: all that runs a model waits in one queue, the rest is answered at once."""
        everything = [self.session, *(self.views[name] for name in DRAWN)]
        with_prompt, given = [*everything, self.prompt], [self.session, *self.cuts, self.at]
        model = dict(api_visibility="private", concurrency_id="model", concurrency_limit=1)
        light = dict(api_visibility="private", queue=False, show_progress="hidden")

        def on(event, work, inputs=(), outputs=everything, **how):
            how = model | {"show_progress": "minimal"} | how
            return event(refusing(work), [*given, *inputs], outputs, **how)

        views, page = self.views, [*with_prompt, self.choice, self.examples]
        on(
            self.demo.load,
            self.on_load,
            (),
            [*page, *self.cuts, self.at, *self.mirrored, self.tabs, self.seed],
        )
        for event in (self.look.click, self.prompt.submit):
            on(event, self.on_look, [self.prompt], show_progress="full")
        on(self.choice.input, self.on_checkpoint, [self.choice], [*with_prompt, self.examples])
        on(self.examples.example, self.on_example, (), with_prompt)
        for button, by in ((self.back, -1), (self.forth, 1)):
            work = functools.partial(self.on_tour, by)
            on(
                button.click,
                work,
                [self.step],
                [*with_prompt, self.step, self.tour, self.at, self.tabs],
            )
        for name in ("tokens", "generate"):
            on(views[name].pick, self.on_pick)
        on(views["cascade"].force, self.on_force)
        runs = [
            on(self.go.click, self.on_generate, [self.many, self.seed]),
            on(views["generate"].branch, self.on_branch, [self.many, self.seed]),
        ]
        stopped = self.stop.click(None, cancels=runs, queue=False, api_visibility="private")
        on(stopped.then, lambda session, *seen: self.drawn(session, seen))
        on(self.add.click, self.on_add, [self.words, self.space], [*everything, self.words])
        on(self.forget.click, self.on_forget)
        for own, twin in zip(self.cuts, self.mirrored, strict=True):
            own.input(None, own, twin, js="x => x", api_visibility="private")
            twin.input(None, twin, own, js="x => x", api_visibility="private")
        for group in (self.cuts, self.mirrored):  # input, not change: loading a link is no move
            # A drag fires input; the button that resets a slider only release.
            moved = [slider.input for slider in group] + [slider.release for slider in group]
            slide = dict(outputs=[views["probability"], views["link"]], **light)
            inputs, how = [self.session, *group, self.at], {"trigger_mode": "always_last"}
            gr.on(moved, refusing(self.on_slide), inputs, **slide, **how)
        for name, tab in self.places.items():
            work = functools.partial(self.on_tab, name)
            tab.select(work, given, [self.at, views["link"]], **light)
        names = lambda: gr.Dropdown(choices=list(self.lab.paths()))  # noqa: E731
        self.choice.focus(names, None, self.choice, **light)
        public = model | {"api_visibility": "public"}
        gr.api(refusing(self.api_inspect, plain=True), api_name="inspect", **public)

    def drawn(self, session, seen):
        return draw(self.lab, session, *seen)

    def on_load(self, request: gr.Request, session, *seen):
        query = urllib.parse.parse_qs(str(request.query_params))
        session, values = from_link(self.lab, self.fresh, query)
        choice = gr.Dropdown(choices=list(self.lab.paths()), value=session["checkpoint"])
        start = [session["prompt"], choice, self.examples_html(session)]
        drawn, tabs = self.drawn(session, values), gr.Tabs(selected=values[-1])
        return [*drawn, *start, *values, *values[:3], tabs, session["seed"]]

    def on_look(self, session, *args):
        *seen, prompt = args
        return self.drawn(open_prompt(self.lab, session, prompt), seen)

    def on_checkpoint(self, session, *args):
        """Another model reads the same prompt; a user's words are not taken along."""
        *seen, name = args
        lab, session = self.lab, session | {"checkpoint": name, "words": []}
        try:
            session = open_prompt(lab, session, session["prompt"])
        except ValueError:  # a checkpoint that takes token ids, or back from one
            session = open_prompt(lab, session, examples(lab.get(name))[0][1])
        return [*self.drawn(session, seen), session["prompt"], self.examples_html(session)]

    def on_example(self, event: gr.EventData, session, *seen):
        found = examples(self.lab.get(session["checkpoint"]))
        prompt = found[int(event.index) % len(found)][1]
        return [*self.drawn(open_prompt(self.lab, session, prompt), seen), prompt]

    def on_tour(self, by, session, *args):
        *seen, step = args
        step = max(0, min(len(TOUR) - 1, step + by))
        _, tab, prompt, _ = TOUR[step]
        if prompt and current(self.lab, session).tokenizer:
            session = open_prompt(self.lab, session, prompt)
        drawn, tour = self.drawn(session, [*seen[:3], tab]), self.tour_html(step)
        return [*drawn, session["prompt"], step, tour, tab, gr.Tabs(selected=tab)]

    def on_pick(self, event: gr.EventData, session, *seen):
        at = max(0, min(len(session["ids"]) - 1, int(event.index)))
        return self.drawn(trace_again(self.lab, session, position=at, force={}), seen)

    def on_force(self, event: gr.EventData, session, *seen):
        """Force a bucket, or let go of it if it is forced; function −1 lets go of all."""
        j, bucket, force = str(int(event.function)), int(event.bucket), dict(session["force"])
        if j == "-1":
            force = {}
        elif force.get(j) == bucket:
            del force[j]
        else:
            force[j] = bucket
        return self.drawn(trace_again(self.lab, session, force=force), seen)

    def on_generate(self, session, *args, ids=None, start=None):
        *seen, many, seed = args
        steps = generate(self.lab, session, many, *seen[:3], seed or 0, ids, start)
        names = current(self.lab, session).names
        for session in steps:
            if session["trace"] is not None:
                yield self.drawn(session, seen)
                continue
            skip = dict.fromkeys(DRAWN, gr.skip())
            skip["generate"] = show("generate", view_generate(session, names))
            yield [session, *skip.values()]

    def on_branch(self, event: gr.EventData, session, *args):
        """From the chosen step on, with another candidate."""
        candidate, at = int(event.id), session["position"]
        if not 0 <= candidate < len(current(self.lab, session).names):
            raise ValueError(f"there is no token {candidate}")
        start = at + 1 if session["start"] is None else min(session["start"], at + 1)
        ids = [*session["ids"][: at + 1], candidate]
        step = self.lab.trace(current(self.lab, session), ids, at)["next"]
        log_probs = session["log_probs"] | {at + 1: step["log_prob"]}
        yield from self.on_generate(session | {"log_probs": log_probs}, *args, ids=ids, start=start)

    def on_slide(self, session, *seen):
        if session["trace"] is None:
            return gr.skip(), gr.skip()
        link = show("link", {"url": permalink(session, *seen)})
        return show("probability", view_probability(session["trace"], *seen[:3])), link

    def on_tab(self, name, session, *seen):
        return name, show("link", {"url": permalink(session, *seen[:3], name)})

    def on_add(self, session, *args):
        *seen, words, space = args
        return [*self.drawn(add_words(self.lab, session, words, space), seen), ""]

    def on_forget(self, session, *seen):
        session = open_prompt(self.lab, session | {"words": []}, session["prompt"])
        return self.drawn(session, seen)

    def api_inspect(
        self,
        prompt: str,
        position: int = -1,
        top_k: int = TOP,
        force: dict = None,
        checkpoint: str = "",
    ) -> dict:
        """All that happens at one position of a prompt, as support.explain tells it, and `ids`.

        force: {function, counted from 0: bucket}; checkpoint: one of the page's, "" for its first.
        """
        return inspect_prompt(self.lab, prompt, position, top_k, force, checkpoint)


# ---------------------------------------------------------------------------------------------
# The server
# ---------------------------------------------------------------------------------------------

THEME = dict(
    button_primary_background_fill="*primary_700",
    button_primary_background_fill_hover="*primary_800",
    button_primary_background_fill_dark="*primary_700",
    button_cancel_background_fill="#b91c1c",
    button_cancel_background_fill_hover="#991b1b",
    button_cancel_text_color="white",
    button_cancel_background_fill_dark="#b91c1c",
    body_text_color_subdued="*neutral_600",
    block_info_text_color="*neutral_600",
)


def parse_arguments(argv):
    parser = argparse.ArgumentParser("demo_app.py", description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", help="folder, run or hub name (default: the shipped one)")
    parser.add_argument("--out", default="runs", help="runs that may be chosen (default runs)")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address (default 127.0.0.1: this machine)"
    )
    parser.add_argument("--port", type=int, help="port (default: the next free one from 7860 on)")
    parser.add_argument("--share", action="store_true", help="a public link, by Gradio's servers")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:N or mps")
    parser.add_argument("--selftest", action="store_true", help="answer one request, then end")
    args = parser.parse_args(argv)
    if not args.host.strip():
        parser.error("--host is empty; 127.0.0.1 is this machine alone")
    if args.port is not None and not 0 < args.port < 65536:
        parser.error(f"--port must be from 1 to 65535, not {args.port}")
    return args


def free_port(host, port):
    """The port if it is free, or the next free one from 7860 on; ValueError if there is none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in [port] if port else range(7860, 8060):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            if os.name == "posix":  # a port is free again at once
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, candidate))
                return candidate
            except OSError as error:
                reason = error.strerror or error
                if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                    raise ValueError(
                        f"--host {host} is no address of this machine ({reason}); 127.0.0.1 is"
                    ) from None
    tried = f"--port {port}" if port else "every port from 7860 to 8059"
    raise ValueError(f"{tried} on {host} cannot be used ({reason}); choose another with --port")


def stay_home(share):
    """Gradio calls itself at its start, where no proxy may come between; else nothing goes out."""
    around = ",".join(filter(None, [os.environ.get("NO_PROXY"), *LOOPBACK]))
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        if not share:
            del os.environ[name]
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = around


def serve(args):
    """The running page: (Page, address). Nothing is sent off this machine but by --share."""
    host = f"[{args.host}]" if ":" in args.host else args.host
    port = free_port(args.host, args.port)
    lab = Lab(args.checkpoint, args.out, args.device)  # which may be fetched
    stay_home(args.share)
    page = Page(lab)
    theme = gr.themes.Default(primary_hue="blue").set(**THEME)
    try:
        app, _, _ = page.demo.queue(max_size=128, default_concurrency_limit=1).launch(
            server_name=host, server_port=port, share=args.share, theme=theme, css=CSS,
            run_history=False, enable_monitoring=False, footer_links=["api", "settings"],
            max_file_size="1mb", ssr_mode=False, pwa=False, show_error=False, quiet=True,
            prevent_thread_lock=True, state_session_capacity=256,  # a session is about a megabyte
        )  # fmt: skip
    except OSError as error:  # taken in between
        raise ValueError(f"port {port} on {args.host} cannot be used: {error}") from None
    closed = Route(
        "/gradio_api/upload", lambda request: Response(status_code=403), methods=["POST"]
    )
    app.router.routes.insert(0, closed)  # the page takes no files; Gradio would store them
    return page, f"http://{host}:{port}"


def selftest(page, address):
    """One request through the JSON endpoint, as a notebook makes it."""
    from gradio_client import Client

    _, prompt, _ = examples(page.lab.get(page.default))[0]
    trace = Client(address, verbose=False).predict(prompt, api_name="/inspect")
    token = trace["top_tokens"][0]
    best = f"{glyph(token)}, {percent(math.exp(token['log_prob']))}"
    print(f"selftest: after {prompt!r} most probably {best}")


def end(*_):
    """On SIGTERM: what atexit registered is done, too."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def main(argv=None):
    """The exit status: 0, or 2 for a mistake in the call."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # whatever the terminal says
        if hasattr(stream, "reconfigure"):  # a notebook's has not
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    args = parse_arguments(argv)
    signal.signal(signal.SIGTERM, end)
    try:
        page, address = serve(args)
    except (ValueError, OSError) as error:
        print("demo_app.py: error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    where = f"{page.default} on {page.lab.device}, at {address}"
    print(where, page.demo.share_url or "", flush=True)
    try:
        if args.selftest:
            selftest(page, address)
        else:
            page.demo.block_thread()
    except KeyboardInterrupt:
        pass
    page.demo.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
