"""Files -> token ids on disk -> batches."""

import contextlib
import hashlib
import itertools
import json
import pickle
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

from support import cache
from support import tokenizer as tokenizers
from support.text import find, read_pieces

ID_FILES = "training.bin", "held_out.bin"
HELD_OUT = 0.05  # share of the characters, at the end
LARGE = 2**30  # characters that a tokenizer is trained on, about, at most


@dataclass
class Corpus:
    """What a run trains on and is measured on."""

    name: str
    hash: str  # of the text, wherever its files are
    tokenizer: object
    training: np.ndarray  # token ids, mapped from disk
    held_out: np.ndarray


def prepare(paths=None, tokenizer="bpe:8192"):
    """Read, split and tokenise text; kept in the cache until a file or the tokenizer changes."""
    size = re.fullmatch("bpe:([0-9]{3,7})", tokenizer)
    if tokenizer.startswith("bpe:") and not size:
        raise ValueError(f"--tokenizer {tokenizer}: bpe:SIZE has a size from 257 to 9999999")
    own = None if size else tokenizers.load(tokenizer)
    if own and own.eot is None:
        raise ValueError(f"--tokenizer {tokenizer} has no end-of-text token")
    name, files = find(paths)
    before = stamps(files)
    key = hashlib.sha256(pickle.dumps([HELD_OUT, before, tokenizer, own])).hexdigest()[:12]
    folder = cache.cache_folder() / f"tokens-{key}"
    about = read_about(folder)
    if not about:
        print(f"tokenising {name} with {tokenizer} into {folder}")
        with cache.written(folder) as new:
            new.mkdir()
            about = tokenise(files, own, size and int(size[1]), new)
            if stamps(files) != before:
                raise ValueError("the text changed while it was read: start again")
            about["sizes"] = {file.name: file.stat().st_size for file in new.iterdir()}
            (new / "about.json").write_text(json.dumps(about), encoding="utf-8")
    ids = (np.memmap(folder / file, about["dtype"], "r") for file in ID_FILES)
    return Corpus(name, about["hash"], own or tokenizers.load(folder), *ids)


def stamps(files):
    return [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def read_about(folder):
    """The facts beside tokens in the cache; nothing if one of the files is missing or cut."""
    with contextlib.suppress(OSError, ValueError):
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        names = {*about["sizes"], *ID_FILES}
        if all((folder / name).stat().st_size == about["sizes"].get(name) for name in names):
            return about


def tokenise(files, own, size, folder):
    """Write the ids of both parts, an end-of-text behind each document; returns what they are."""
    characters, digest = 0, hashlib.sha256()
    for text, last in watched(read_pieces(files), "reading"):
        digest.update(text.encode("utf-8") + b"\xff" * last)  # a byte that UTF-8 never has
        characters += len(text)
    if not characters:
        raise ValueError(f"there is no text in {', '.join(map(str, files))}")
    mark = int((1 - HELD_OUT) * characters)
    if own is None:
        pieces = split(read_pieces(files), min(mark, LARGE))
        learned = itertools.takewhile(lambda piece: not piece[2], pieces)
        own = tokenizers.Tokenizer.train((text for text, *_ in learned), size)
        own.save(folder)
    dtype = "uint16" if len(own) <= 2**16 else "uint32"

    def encode(piece):
        text, last, held_out = piece
        return np.array(own.encode(text) + [own.eot] * last, dtype), held_out

    pieces = iter(watched(split(read_pieces(files), mark), "tokenising"))
    training, rest = (folder / name for name in ID_FILES)
    with open(training, "wb") as training, open(rest, "wb") as rest, ThreadPoolExecutor() as pool:
        while some := [*itertools.islice(pieces, 16)]:  # no more are in memory
            for ids, held_out in pool.map(encode, some):
                ids.tofile(rest if held_out else training)
    return {"hash": digest.hexdigest()[:12], "dtype": dtype}


def split(pieces, mark):
    """Yield (piece, whether its document ends there, whether it is held out): what follows the
    first line start after `mark` characters is."""
    left, pieces = mark, iter(pieces)
    for text, last in pieces:
        if len(text) > left:
            break
        yield text, last, False
        left -= len(text)
    if not last:  # the next line may start in the next piece
        more, last = next(pieces)
        text += more
    cut = text.find("\n", left) + 1
    if not 0 < cut < len(text):  # no line starts there
        cut = left
    yield text[:cut], True, False
    yield text[cut:], last, True
    yield from ((*piece, True) for piece in pieces)


def watched(pieces, what):
    """Pass pieces on beside a progress bar, which in a file moves every 10 seconds."""
    every = 0.1 if sys.stderr.isatty() else 10
    return tqdm(pieces, what, unit=" pieces", mininterval=every)


def batch(ids, seed, step, rows, length, rank=0, world_size=1):
    """Inputs and targets (rows, length) of one process: a function of seed and step. All processes
    together draw what one with rows * world_size would."""
    starts = np.random.default_rng((seed, step)).integers(0, len(ids) - length, rows * world_size)
    return windows(ids, starts[rank::world_size], length)


def windows(ids, starts, length):
    tokens = np.stack([ids[s : s + length + 1] for s in starts]).astype(np.int64)
    tokens = torch.from_numpy(tokens)  # (rows, length + 1)
    return tokens[:, :-1], tokens[:, 1:]
