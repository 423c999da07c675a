"""Files -> pieces of text. A .jsonl has a document in every line, in the field "text"."""

import glob
import gzip
import io
import json
import os
import sys
import zlib
from pathlib import Path

from support import cache

TEXT_FILES = (".txt", ".md", ".txt.gz", ".jsonl", ".jsonl.gz")
PIECE = 2**20  # characters in memory at a time


def find(paths):
    """(name, files) of what --data names; by default the plays, else Python's manual."""
    try:
        if paths in (None, ["shakespeare"]):
            return "shakespeare", [cache.shakespeare()]
    except (ValueError, OSError) as error:
        if paths:
            raise
        print(f"notice: {error}\n  going on with --data pydocs, Python's own manual")
    if paths in (None, ["pydocs"]):
        return "pydocs of Python {}.{}".format(*sys.version_info), [cache.pydocs()]
    return " ".join(paths), find_files(paths)


def find_files(paths):
    """The text files of paths, patterns and folders, each once; what is hidden is left out."""
    files, kinds = {}, ", ".join(TEXT_FILES)
    for given in paths:
        pattern = glob.escape(given) if os.path.exists(given) else given
        if os.path.isdir(given):
            pattern += "/**"
        found = sorted(map(Path, glob.glob(pattern, recursive=True)))
        found = [f for f in found if f.name.lower().endswith(TEXT_FILES) and f.is_file()]
        if not found:
            raise ValueError(f"--data {given or repr(given)}: no file to read there ({kinds})")
        if files.keys() & {file.resolve() for file in found}:
            print(f"notice: {given}: a file there is named twice and read once")
        for file in found:
            files.setdefault(file.resolve(), file)
    return list(files.values())


def read_pieces(files):
    """Yield the text of all files as (piece, whether its document ends there)."""
    for file in files:
        name = file.name.lower()
        opened = gzip.open if name.endswith(".gz") else open
        try:
            with opened(file, "rt", encoding="utf-8-sig", newline="\n") as stream:
                yield from (read_jsonl if ".jsonl" in name else read_text)(stream)
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8: byte {error.object[error.start]:#x}") from None
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise ValueError(f"{file} cannot be read: {error}") from None


def read_text(stream):
    piece = stream.read(PIECE) + stream.readline(PIECE)  # to the end of a line
    while piece:
        following = stream.read(PIECE) + stream.readline(PIECE)
        yield piece, not following
        piece = following


def read_jsonl(stream):
    for number, line in enumerate(stream, 1):
        if line.strip():
            try:
                text = json.loads(line)["text"]
                text.encode("utf-8")  # a string, and no half of a surrogate pair
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise ValueError(f'line {number} is no JSON object with a field "text"') from None
            yield from read_text(io.StringIO(text))
