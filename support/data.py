"""Files -> token ids on disk -> batches."""

import contextlib
import functools
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
    if not (about := read_about(folder)):
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
        if all((folder / name).stat().st_size == size for name, size in about["sizes"].items()):
            return about


def tokenise(files, own, size, folder):
    """Write the ids of both parts, an end-of-text behind each document; returns what they are."""
    seconds = 0.1 if sys.stderr.isatty() else 10  # in a file the progress bar moves seldom
    watched = functools.partial(tqdm, unit=" pieces", mininterval=seconds)
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
    pieces = iter(watched(split(read_pieces(files), mark), "tokenising"))
    training, rest = (folder / name for name in ID_FILES)
    with open(training, "wb") as training, open(rest, "wb") as rest, ThreadPoolExecutor() as pool:
        while some := [*itertools.islice(pieces, 16)]:  # no more are in memory
            encoded = pool.map(own.encode, [text for text, *_ in some])
            for ids, (_, last, held_out) in zip(encoded, some):
                file = rest if held_out else training
                file.write(np.array(ids + [own.eot] * last, dtype).tobytes())
    return {"hash": digest.hexdigest()[:12], "dtype": dtype}


def split(pieces, mark):
    """Yield (piece, whether its document ends there, whether it is held out): after `mark`."""
    left = mark
    for text, last in pieces:
        if 0 <= left < len(text):  # cut where the next line starts, if one does
            cut = text.find("\n", left, len(text) - last) + 1 or left
            yield text[:cut], True, False
            yield text[cut:], last, True
        else:
            yield text, last, left < 0
        left -= len(text)


def batch(ids, seed, step, rows, length, rank=0, world_size=1):
    """Inputs and targets (rows, length) by seed and step alone; processes share a larger batch."""
    starts = np.random.default_rng((seed, step)).integers(0, len(ids) - length, rows * world_size)
    return windows(ids, starts[rank::world_size], length)


def windows(ids, starts, length):
    tokens = torch.tensor(np.stack([ids[s : s + length + 1] for s in starts])).long()
    return tokens[:, :-1], tokens[:, 1:]
