"""What the tutorials and experiments share: data, a short training loop, measures, pictures."""

import ast
import contextlib
import itertools
import math
import re
import sys
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # mhf.py, train.py, support/

import mhf
import train
from support.cache import Archive, fetch, fetched
from support.data import batch, prepare
from support.evaluate import evaluate, share_right, token_sizes
from support.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT = ROOT / "tutorials" / "checkpoint"  # small, trained; the demo opens with it, too

# ---------------------------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------------------------

DJANGO = Archive(
    "Django==5.2.8",
    "django-5.2.8-py3-none-any.whl",
    "37e687f7bd73ddf043e2b6b97cfe02fcbb11f2dbb3adccc6a2b18c6daa054d7f",
    "8 MB, a web framework whose sentences are translated into many languages",
)
GENSIM = Archive(
    "gensim==4.4.0",
    "gensim-4.4.0.tar.gz",
    "a3f5b626da5518e79a479140361c663089fe7998df8ba52d56e1ded71ac5bdf5",
    "23 MB, a library whose tests hold human judgements of similarity",
)
SIMILARITIES = {"wordsim353": "wordsim353.tsv", "simlex999": "simlex999.txt"}

# pip asks a source distribution's build backend for its name before it hands the archive out.
# This one answers instead, so that no code of the archive runs and nothing needs to be built.
BACKEND = """
import pathlib, sys

def prepare_metadata_for_build_wheel(folder, settings=None):
    about = pathlib.Path(folder) / "{name}-{version}.dist-info"
    about.mkdir()
    text = "Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n"
    (about / "METADATA").write_text(text)
    return about.name

build_wheel, __legacy__ = None, sys.modules[__name__]
"""


def fetch_source(archive, folder):
    """`fetch` for a source distribution (.tar.gz)."""
    name, version = archive.requirement.split("==")
    stub = folder / "stub"
    (stub / "setuptools").mkdir(parents=True)
    (stub / "setuptools" / "__init__.py").touch()
    backend = BACKEND.format(name=name, version=version)
    (stub / "setuptools" / "build_meta.py").write_text(backend, encoding="utf-8")
    flags = "--no-binary=:all:", "--no-build-isolation"
    fetch(archive, folder, *flags, PYTHONPATH=str(stub))


def read_po(text):
    """The pairs (English, translation) of a gettext catalogue (.po); untranslated ones left out.

    A plural gives a pair for each of its forms; doubtful translations (fuzzy) are left out, too.
    """
    for entry in re.split(r"\n\s*\n", text):
        found, key = {}, None
        if re.search("^#,.*fuzzy", entry, re.MULTILINE):
            continue
        for line in entry.splitlines():
            if begun := re.match(r'(msgid|msgid_plural|msgstr)(?:\[\d+\])? +(?=")', line):
                key = begun[0].strip()
                found[key], line = "", line[begun.end() :]
            if line.startswith('"') and key:
                found[key] += ast.literal_eval(line)
        forms = [v for k, v in found.items() if k.startswith("msgstr") and v]
        if found.get("msgid"):  # the empty one is the catalogue's header
            yield from ((found["msgid"], form) for form in forms)


def django(language):
    """User-interface sentences of Django in a language (ar, hi, zh_Hans, en, …), each once."""
    with zipfile.ZipFile(fetched(DJANGO)) as archive:
        there = re.compile(r".*/locale/([^/]+)/LC_MESSAGES/django\.po$")
        names = {n: m[1] for n in sorted(archive.namelist()) if (m := there.match(n))}
        if language != "en" and language not in names.values():
            known = ", ".join(sorted(set(names.values())))
            raise ValueError(f"Django has no language {language!r}; it has {known}")
        source = "de" if language == "en" else language  # English stands beside a translation
        texts = [archive.read(n).decode("utf-8") for n, of in names.items() if of == source]
    pairs = itertools.chain(*map(read_po, texts))
    return list(dict.fromkeys(pair[language != "en"].strip() for pair in pairs))


def read_similarities(text, name="the text"):
    """[(word, word, score)] from lines `word TAB word TAB score`.

    So WordSim-353, SimLex-999 and Card-660 are written. Lines that start with # and a heading (a
    first line whose score is no number) are passed over.
    """
    pairs = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            one, two, score = line.split("\t")[:3]
            pairs.append((one.strip(), two.strip(), float(score)))
        except ValueError:
            if number > 1:
                raise ValueError(
                    f"{name}, line {number}: {line!r} is not word, word and score between tabs"
                ) from None
    if not pairs:
        raise ValueError(f"{name} has no line of word, word and score between tabs")
    return pairs


def similarities(name):
    """Human judgements of similarity: wordsim353, simlex999, or the path of a file like them.

    Words in small letters; pairs of a word with itself left out.
    """
    if name in SIMILARITIES:
        with tarfile.open(fetched(GENSIM, fetch_source)) as archive:
            file = archive.extractfile(f"gensim-4.4.0/gensim/test/test_data/{SIMILARITIES[name]}")
            text = file.read().decode("utf-8")
    else:
        text = Path(name).read_text(encoding="utf-8-sig")
    pairs = [(a.lower(), b.lower(), score) for a, b, score in read_similarities(text, name)]
    return [(a, b, score) for a, b, score in pairs if a != b]


# ---------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------


def text_of(tokenizer, ids):
    """The text of ids, with a line end where a document ends."""
    pieces = (b"\n" if i == tokenizer.eot else tokenizer.token_bytes(i) for i in map(int, ids))
    return b"".join(piece or b"" for piece in pieces).decode("utf-8", "replace")


def shipped():
    """The small trained model that comes with the project, and its tokenizer."""
    return mhf.load(CHECKPOINT).requires_grad_(False), Tokenizer.load(CHECKPOINT)


def corpus(tokenizer=str(CHECKPOINT), paths=None):
    """Shakespeare (or other text), split and tokenised as train.py does."""
    return prepare(paths, tokenizer)


def small(tokenizer, seed=0, **settings):
    """An untrained model that learns something in seconds; settings: fields of mhf.Config.

    The parts are initialised as in preset tiny; model="standard" gives the standard model.
    """
    size = dict(hidden_size=64, intermediate_size=192, bottle_neck_dim=32, num_buckets=512)
    shape = dict(num_hidden_layers=2, max_position_embeddings=128)
    vocabulary = dict(vocab_size=len(tokenizer), pad_token_id=tokenizer.eot)
    config = mhf.Config.preset("tiny", **(size | shape | vocabulary | settings))
    torch.manual_seed(seed)
    return train.build_model(config, tokenizer)


def extended(tokenizer, text, size):
    """A tokenizer with `size` more tokens, which a byte-pair encoding of the text finds.

    The old tokens keep their ids and are merged first; no new one is ASCII, so that English is cut
    as before. The new tokens take the ids after theirs.
    """
    encoding, wanted = tokenizer.encoding, 257 + size
    old = encoding._mergeable_ranks
    while True:
        ranks = Tokenizer.train([text], wanted).encoding._mergeable_ranks
        new = [t for t in ranks if t not in old and not t.isascii()]
        if len(new) >= size:
            break
        wanted += size - len(new)
    ranks = old | {token: len(tokenizer) + i for i, token in enumerate(new[:size])}
    name = f"{encoding.name}+{size}"
    return Tokenizer(name, encoding._pat_str, ranks, encoding._special_tokens)


def fit(model, ids, steps, seed=0, learning_rate=1e-3, rows=8):
    """Train for a few steps, as train.py does: AdamW, warm-up, cosine, clipping; float32.

    ids: token ids of a text, or a list of several texts' that share the rows of a step equally;
    rows: sequences of the context's length in a step, of which 8 are in memory at a time. Yields
    (step, loss) of each. The batches are those that train.py would take with this seed.
    """
    texts, T = ids if isinstance(ids, list) else [ids], model.config.max_position_embeddings
    settings = train.Settings(steps=steps, learning_rate=learning_rate)
    optimizer = train.make_optimizer(model, settings, model.device)
    model.train().requires_grad_(True)
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = train.learning_rate(step, settings)
        parts = [batch(text, seed, step, max(1, rows // len(texts)), T) for text in texts]
        x, y = (torch.cat(part).to(model.device) for part in zip(*parts))  # (rows, T)
        optimizer.zero_grad()
        total = 0.0
        for some_x, some_y in zip(x.split(8), y.split(8)):
            loss = model.loss(some_x, some_y) * len(some_x) / len(x)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip)
        optimizer.step()
        yield step, total
    model.eval().requires_grad_(False)


# ---------------------------------------------------------------------------------------------
# Measures
# ---------------------------------------------------------------------------------------------


def quality(model, corpus, max_tokens=8192):
    """What support.evaluate finds on held-out text, in float32."""
    sizes = token_sizes(corpus.tokenizer)
    return evaluate(model, corpus.held_out, sizes, contextlib.nullcontext, max_tokens)


@torch.no_grad()
def predictions(model, ids, windows=None):
    """Yields (scores (M, V), targets (M,)) of the windows of a text, each of the context's length.

    windows: how many, evenly spread; None: all, so that every token but the first is a target.
    """
    T, ids = model.config.max_position_embeddings, np.asarray(ids[:], dtype=np.int64)
    starts = np.arange(0, len(ids) - 1, T)
    if windows and windows < len(starts):
        starts = starts[np.linspace(0, len(starts) - 1, windows).astype(int)]
    for start in starts:
        row = torch.from_numpy(ids[start : start + T + 1]).to(model.device)
        yield model.token_scores(model(row[None, :-1])[0]), row[1:]


def bits_per_byte(model, tokenizer, text):
    """Bits that the model needs for a byte of the text, calibrated as it is."""
    total = 0.0
    for scores, targets in predictions(model, tokenizer.encode(text)):
        scores = scores / model.config.calibration
        total += torch.nn.functional.cross_entropy(scores, targets, reduction="sum").item()
    return total / math.log(2) / len(text.encode("utf-8"))


LAST_WORD = re.compile(r" ([^\W\d_]+)(?=[.?!]\s)")


def last_words(ids, tokenizer, window, count):
    """The question of LAMBADA put to any text: which is the last word of this sentence?

    ids: token ids of a text; `count` sentence ends are taken, evenly spread. Returns pairs (ids of
    the context, ids of the word), together at most `window` long, the context at least half of it.
    """
    text = text_of(tokenizer, ids[:])
    reach = 8 * window  # characters that are sure to hold the window
    ends = [m for m in LAST_WORD.finditer(text) if m.start() >= reach]
    if not ends:
        raise ValueError(f"the text of {len(text):,} characters is too short for last words")
    chosen, passages = np.unique(np.linspace(0, len(ends) - 1, count).round().astype(int)), []
    for end in (ends[i] for i in chosen):
        word = tokenizer.encode(end[0])
        context = tokenizer.encode(text[end.start() - reach : end.start()])
        passages.append((context[-(window - len(word)) :], word))
    return passages


@torch.no_grad()
def last_word_results(model, passages, rows=16):
    """Yields for each passage: 1 if the word, all its tokens, is what the model finds likeliest,
    else 0, and −log P of the word in nats, calibrated.

    Tokens that share a signature are equally likely: of k best ones each counts 1/k.
    """
    for start in range(0, len(passages), rows):
        some = passages[start : start + rows]
        ids = [[*context, *word] for context, word in some]
        length = max(map(len, ids))
        # What stands after a row's end changes nothing before it.
        ids = [row + [0] * (length - len(row)) for row in ids]
        ids = torch.tensor(ids, device=model.device)  # (rows, T)
        for h, row, (context, word) in zip(model(ids), ids, some):
            end = len(context) + len(word)
            target = row[len(context) : end]  # (len(word),)
            scores = model.token_scores(h[len(context) - 1 : end - 1])  # (len(word), V)
            right = share_right(scores, target).prod().item()
            scores = scores / model.config.calibration
            yield right, torch.nn.functional.cross_entropy(scores, target, reduction="sum").item()


def last_word_accuracy(model, passages):
    """The share of passages whose last word, all its tokens, is what the model finds likeliest."""
    return float(np.mean([right for right, _ in last_word_results(model, passages)]))


def word_counts(corpus):
    """How often the training text has each word, in small letters."""
    text = text_of(corpus.tokenizer, corpus.training[:])
    return Counter(re.findall(r"[^\W\d_]+", text.lower()))


@torch.no_grad()
def word_states(model, tokenizer, words):
    """{layer: (W, D)}: what the model makes of each word, read alone; the mean over its tokens.

    input: the input vectors; penultimate: the output of the last block but one; last: the states
    after the final norm.
    """
    ids = [tokenizer.encode(" " + word) for word in words]
    shape = len(words), model.config.hidden_size
    found = {name: torch.empty(shape) for name in ("input", "penultimate", "last")}
    for length in {len(row) for row in ids}:  # words of equally many tokens are read together
        chosen = [i for i, row in enumerate(ids) if len(row) == length]
        rows = torch.tensor([ids[i] for i in chosen], device=model.device)  # (words, length)
        states, outputs = model(rows, return_layers=True)
        for name, layer in zip(found, (model.embed(rows), outputs[-2], states)):
            found[name][chosen] = layer.mean(1).cpu()  # (words, D)
    return found


def flops(config):
    """{part: floating-point operations of its matrix products} of a training step, for a token.

    A product of (m, n) and (n, k) takes 2 m n k; backward takes twice as many as forward. Attention
    counts the whole context of T positions. Sums over signatures are no products: not counted.
    """
    D, T, V = config.hidden_size, config.max_position_embeddings, config.vocab_size
    A, K, C = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    H, B, Z = config.num_hashes, config.num_buckets, config.bottle_neck_dim
    block = 2 * D * (A + K) * C + 3 * D * config.intermediate_size + 2 * T * A * C
    embedding, decoder = 0, V * D
    if config.model == "mhf":
        embedding = H * (D + 1) * Z + D * D
        decoder = H * B * D + (H - 1) * (B * D + 3 * D * Z)  # logits; soft embeddings, mixers
    parts = dict(embedding=embedding, blocks=config.num_hidden_layers * block, decoder=decoder)
    return {name: 6 * products for name, products in parts.items()}


def slope(x, y):
    """Of the line that fits y by x with least squares; NaN if all x are equal."""
    x, y = np.asarray(x) - np.mean(x), np.asarray(y)
    return float(x @ y / (x @ x)) if x.any() else math.nan


def ranks(values):
    """Ranks from 0; equal values share the mean of theirs."""
    _, group, size = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(size) - (size + 1) / 2)[group]


def pearson(x, y):
    return float(np.corrcoef(x, y)[0, 1])


def spearman(x, y):
    return pearson(ranks(x), ranks(y))


def interval(measure, x, y):
    """95% confidence interval of measure(x, y) by resampling the pairs 1,000 times (bootstrap)."""
    rng, x, y = np.random.default_rng(0), np.asarray(x), np.asarray(y)
    chosen = rng.integers(0, len(x), (1000, len(x)))
    values = [measure(x[i], y[i]) for i in chosen]
    return [float(v) for v in np.nanpercentile(values, [2.5, 97.5])]


# ---------------------------------------------------------------------------------------------
# Pictures
# ---------------------------------------------------------------------------------------------

# Okabe and Ito's colours, which stay apart for the colour-blind and in grey.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, BLACK = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000",
)  # fmt: skip
COLOURS = [BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, BLACK]
STYLE = {
    "axes.prop_cycle": f"cycler('color', {COLOURS})",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "white",  # opaque: to be read on a dark page, too
    "figure.constrained_layout.use": True,
    "figure.dpi": 100,
    "image.cmap": "cividis",
    "legend.frameon": False,
}


def in_notebook():
    return "ipykernel" in sys.modules


def pyplot():
    """matplotlib's pyplot in the style of the course; without a window where there is none."""
    import matplotlib

    if not in_notebook():
        matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update(STYLE)
    return plt


def show(figure, name):
    """Show a picture: in the notebook, or as a file runs/tutorials/NAME.png whose path is told."""
    plt = pyplot()
    if in_notebook():
        from IPython.display import display

        display(figure)
    else:
        path = ROOT / "runs" / "tutorials" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        print(f"picture: {path}")
    plt.close(figure)
