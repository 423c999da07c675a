"""Files -> pieces of text. A .jsonl has a document in every line, in the field "text"."""

import glob
import gzip
import json
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
    except ValueError as error:
        if paths:
            raise
        print(f"notice: {error}\n  going on with --data pydocs, Python's own manual")
    if paths in (None, ["pydocs"]):
        return "pydocs of Python {}.{}".format(*sys.version_info), [cache.pydocs()]
    return " ".join(paths), find_files(paths)


def find_files(paths):
    """The files of paths, patterns and folders, each once; what is hidden is left out."""
    files, kinds = {}, ", ".join(TEXT_FILES)
    for given in paths:
        path = Path(given)
        found = [path] if path.is_file() else map(Path, glob.glob(given, recursive=True))
        if given and path.is_dir():
            inside = (file.relative_to(path) for file in path.rglob("*") if is_text(file))
            found = [path / f for f in inside if not any(part[0] == "." for part in f.parts)]
        found = sorted(file for file in found if file.is_file())
        if not found:
            raise ValueError(f"--data {given or repr(given)}: no {kinds} there")
        for file in found:
            if not is_text(file):
                raise ValueError(f"--data {file}: only {kinds} are read")
            if files.setdefault(file.resolve(), file) is not file:
                print(f"notice: {file} is named twice and read once")
    return list(files.values())


def is_text(path):
    return path.name.lower().endswith(TEXT_FILES)


def read_pieces(files):
    """Yield the text of all files as (piece, whether its document ends there)."""
    for file in files:
        name = file.name.lower()
        opened = gzip.open if name.endswith(".gz") else open
        try:
            with opened(file, "rt", encoding="utf-8-sig", newline="\n") as stream:
                yield from (read_jsonl if ".jsonl" in name else read_text)(stream)
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise ValueError(f"{file} is not UTF-8: it has a byte {byte:#x}; convert it") from None
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
                message = f'line {number} is not a JSON object with a field "text"'
                raise ValueError(message) from None
            for i in range(0, len(text), PIECE):
                yield text[i : i + PIECE], i + PIECE >= len(text)
