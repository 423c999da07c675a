"""support/tokenizer.py: our own tokenizers, published ones, and which one fits a model."""

import base64
import copy
import json
import pickle
import sys
from functools import partial

import numpy as np
import pytest
from conftest import FIXTURES, build, refused

import mhf
from support.tokenizer import LETTERS, Tokenizer, check, load, pieces, spelled

TEXT = "the cat sat on the mat with the hat, and that was that: 1234 cats, 56 rats.\n" * 3
AWKWARD = ["", "a", "1234567 12", "a\u00a0b\r\n\n  x", "né 漢字 🐈 \n\n\tthe  end ", "it's   \t "]
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "<|endoftext|>"]
KINDS = ["byte-level", "metaspace"]  # GPT-2's kind and Mistral's, 310 pieces each
OURS = Tokenizer.train([TEXT], 280)


def made(folder, kind="byte-level", eos=2, add=None, special=False, **entries):
    """A tokenizer.json in a folder, with other entries, `add` as token 315, and a config.json."""
    pytest.importorskip("tokenizers")
    spec = json.loads((FIXTURES / "tokenizers" / f"{kind}.json").read_text(encoding="utf-8"))
    if add:
        spec["model"]["vocab"][add] = 315
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        spec["added_tokens"].append({"id": 315, "content": add, "special": special} | flags)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": eos}), encoding="utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(spec | entries), encoding="utf-8")
    return folder / "tokenizer.json"


@pytest.fixture(params=["ours", *KINDS])
def words(request, tmp_path):
    return OURS if request.param == "ours" else load(made(tmp_path, request.param))


@pytest.mark.parametrize("text", [TEXT, *AWKWARD, " ".join(SPECIAL), "</s> the <0x41> sat"])
def test_text_survives(words, text, tmp_path):
    """Saved or not, decode undoes encode, and tokens spell the text; no special token is read."""
    ids = words.encode(text)
    words.save(tmp_path / "saved")
    for same in (words, load(tmp_path / "saved")):
        raw = [same.token_bytes(i) for i in ids]
        assert same.encode(text) == ids and same.decode(np.array(ids, np.uint16)) == text
        assert b"".join(raw) == b" " * bool(text and words.adds_blank) + text.encode()
        assert not {*raw} & {name.encode() for name in SPECIAL}


def test_ids_without_a_character(words):
    """Half a character is U+FFFD; an id that does not exist has no bytes."""
    assert words.decode(words.encode("🐈")[:-1]).endswith("\ufffd")
    assert [words.token_bytes(i) for i in (-1, 310, 10**20)] == [None] * 3
    assert words.decode([-1, 310, 10**20]) == ""


def test_a_million_blanks_are_no_panic():
    """They are cut where tiktoken and rustbpe would panic, in training, too; other text is not."""
    blanks = "a" + " " * 1_500_000 + "b"
    assert OURS.decode(OURS.encode(blanks)) == blanks
    assert len(Tokenizer.train([blanks, "\u3000" * 1_500_000, TEXT], 262)) == 262
    assert pieces(TEXT, 10) == [TEXT] and pieces(" " * 25, 10) == [" " * 10, " " * 10, " " * 5]


@pytest.mark.parametrize("size", [5000, 256, 0])
def test_size_of_a_trained_tokenizer(size):
    """The size asked for, end-of-text last; too much for the text, and less than 257, is refused"""
    assert len({*OURS.hashed_bytes()}) == len(OURS) == 280
    assert OURS.token_bytes(OURS.eot) == OURS.hashed_bytes()[279] == b"<|endoftext|>"
    refused(lambda: Tokenizer.train([TEXT], size), size, 257)


@pytest.mark.parametrize("kind, piece", [("byte-level", "Ġthe"), ("metaspace", "▁the")])
def test_what_is_hashed_is_the_piece(tmp_path, kind, piece):
    """Not what it stands for; only SentencePiece's kind adds a blank, if the file says so."""
    words = load(made(tmp_path, kind))
    the = words.encode("a the")[-1]
    assert words.token_bytes(the) == b" the" and words.hashed_bytes()[the] == piece.encode()
    assert len(words.hashed_bytes()) == len(words) == 310 and words.adds_blank == (piece[0] == "▁")
    assert pickle.dumps(words) == pickle.dumps(load(tmp_path))  # it names the cache of tokens
    step = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": True}
    words = load(made(tmp_path, "metaspace", pre_tokenizer=step))
    assert not words.adds_blank and words.decode(words.encode(" the")) == " the"


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_added_tokens_are_their_own_utf8(tmp_path, kind, special):
    """Letters of GPT-2's alphabet are no bytes in them; the ids of a gap before are not used."""
    words = load(made(tmp_path, kind, add="ilÖveyou", special=special))
    assert words.decode([315]) == "ilÖveyou" and words.token_bytes(312) is None
    assert words.hashed_bytes()[310:] == [*[None] * 5, "ilÖveyou".encode()]
    shown = load(made(tmp_path, "metaspace", add="<▁x>", special=special)).token_bytes(315)
    assert shown == ("<▁x>" if special else "< x>").encode()  # its name, or what it spells


def test_pieces_that_stand_for_bytes():
    """<0x41> is A beside byte fallback alone, and as a whole; byte-level letters are GPT-2's."""
    for piece in ("<0x41>", "<0x41>x", "x<0x41>", "<0x4>", "<0xg1>", "漢"):
        assert spelled(piece, byte_level=True) == piece.encode()
        assert spelled(piece, byte_level=False) == (b"A" if piece == "<0x41>" else piece.encode())
    step = pytest.importorskip("tokenizers").pre_tokenizers.ByteLevel(False, use_regex=False)
    assert {*LETTERS} == {*step.alphabet()} and len(step.alphabet()) == 256
    for text in ("\x00\x1f !~\x7f", "\u00a0¡¬\u00ad®ÿ", "漢🙂"):
        assert spelled(step.pre_tokenize_str(text)[0][0], byte_level=True) == text.encode()


@pytest.mark.parametrize("eos, ends", [(2, [2]), ([1, 2], [1, 2]), (None, []), ([], [])])
def test_the_end_is_read_from_the_configuration(tmp_path, eos, ends):
    """From eos_token_id, not from names: beside the tokenizer, or that of the checkpoint."""
    file, model = made(tmp_path, eos=eos), build(standard=True, V=310)
    assert load(file).ends == ends and load(file).eot == (ends[0] if ends else None)
    (tmp_path / "config.json").unlink()
    assert (words := load(file)).eot is None
    model.config.extra["eos_token_id"] = eos
    check(model, words)
    assert words.ends == ends


def test_kinds_in_a_folder_have_an_order(tmp_path):
    """Ours before a tokenizer.json, in the last checkpoint; a .tiktoken file has our pattern."""
    file, saved = made(tmp_path / "step-4"), tmp_path / "step-4" / "tokenizer.tiktoken"
    (tmp_path / "last").write_text("step-4\n", encoding="utf-8")
    assert len(load(str(tmp_path))) == len(load(file)) == 310
    OURS.save(tmp_path / "step-4")
    assert len(load(tmp_path)) == 280
    (tmp_path / "step-4" / "tokenizer_meta.json").unlink()
    assert load(saved).encode(TEXT) == OURS.encode(TEXT)
    saved.write_text(saved.read_text(encoding="utf-8") + "enp6eno= 290\n", encoding="utf-8")
    assert load(saved).hashed_bytes()[279:] == [*[None] * 11, b"zzzzz", b"<|endoftext|>"]


def test_names_of_others(monkeypatch, tmp_path):
    """tiktoken's open by name; of a hub name only the tokenizer is fetched, no weights."""
    monkeypatch.setattr("tiktoken.get_encoding", {"cl100k_base": OURS.encoding}.get)
    assert load("cl100k_base").hashed_bytes() == OURS.hashed_bytes()
    asked, folder = {}, str(made(tmp_path).parent)
    fetch = lambda name, **more: asked.update({name: more}) or folder  # noqa: E731
    monkeypatch.setattr("support.tokenizer.snapshot_download", fetch)
    assert load("owner/name").eot == 2
    assert asked == {"owner/name": {"allow_patterns": ["tokenizer*", "config.json"]}}


@pytest.mark.parametrize("name", ["gpt3", "gpt2", "owner/name", "missing/tokenizer.json", "empty"])
def test_names_that_lead_nowhere_are_one_sentence(name, tmp_path, monkeypatch):
    """Unknown, out of reach, not there or empty: what was given is named, and what is read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tiktoken.get_encoding", lambda name: [][0])
    (tmp_path / "empty").mkdir()
    refused(lambda: load(name), name, "tokenizer.json")


BYTES = "".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256))
META = '{"name": "x", "pattern": "(", "special": {}}'
BERT = '{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}, "added_tokens": []}'


@pytest.mark.parametrize("name, content", [
    *[("tokenizer.tiktoken", text) for text in ("", "no ranks", "!!!! 0", "\udcff", BYTES[9:])],
    *[("tokenizer.tiktoken", BYTES + f"enp6eno= {rank}\n") for rank in (7, -7, 2**40, "x")],
    *[("tokenizer_meta.json", text) for text in ("", "[]", "{}", META)],
    *[("tokenizer.json", text) for text in ("", "{}", "\udcff\udcfe", "[1,\n2]", BERT)],
    *[(name, "\x0a\udcff") for name in ("tokenizer.model", "mistral.model.v3")],
    ("config.json", '{"eos_token_id": "</s>"}'),
], ids=lambda value: value[-15:])  # fmt: skip
def test_damaged_files_are_one_sentence(name, content, tmp_path):
    """Neither a package's own exception nor a panic; BERT's pieces and .model files, too."""
    if name in ("tokenizer_meta.json", "config.json"):
        made(tmp_path) if name == "config.json" else OURS.save(tmp_path)
    (tmp_path / name).write_text(content, encoding="utf-8", errors="surrogateescape")
    file = tmp_path / name if name == "mistral.model.v3" else tmp_path
    refused(lambda: load(file), "tokenizer.json is needed; published .model files come as that")


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    """Without the package tokenizers a tokenizer.json cannot be read."""
    file = made(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    refused(lambda: load(file), "tokenizer.json", "tokenizers")


def stored(words, known=False, change=lambda ids: None, **fields):
    """A model as loaded, with a tokens.txt or without, after a change of its ids (V, H)."""
    tokens = [*words.hashed_bytes(), None, None]
    model = build(tokens=tokens, pad_id=words.eot, B=64, **fields)
    ids, shape = model.signatures.ids, (64, words.eot, model.config.num_lsh)
    change(ids)
    model.use_signatures(mhf.SignatureTable.from_ids(ids, *shape, tokens if known else None))
    return model


@pytest.mark.parametrize("H, num_lsh", [(3, 0), (1, 0), (2, 1), (2, 2), (3, 1)])
def test_the_tokens_of_a_checkpoint_get_their_names(words, H, num_lsh, capsys):
    """Without a word, where the stored ids (but LSH ids) are those of the tokens; expanded, too."""
    model = stored(words, H=H, num_lsh=num_lsh, change=lambda ids: ids[:, :num_lsh].mul_(0).add_(5))
    before = model.model.hash_map.tolist()
    check(model, words)
    assert model.signatures.ids.tolist() == before
    model.expand([b"new"])
    check(model, words)
    assert model.signatures.tokens == [*words.hashed_bytes(), None, None, b"new"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("H", [1, 3])
def test_another_tokenizer_is_refused(words, H, known):
    """Most signatures differ, or the stored tokens: the model is as it was; standard: the size."""
    other, ids = copy.copy(words), range(3, 270)
    other.hashed = words.hashed | {i: words.hashed[j] for i, j in zip(ids, reversed(ids))}
    model = stored(words, known, H=H)
    parts = (3, "not the model's") if known else (len(words), "another tokenizer")
    refused(lambda: check(model, other), *parts)
    assert any(model.signatures.tokens) == known
    check(build(V=len(words), standard=True), other)
    for standard in (False, True):
        small = partial(check, build(V=200, B=64, standard=standard), words)
        refused(small, len(words), 200)


def test_stored_ids_are_used(words, monkeypatch, capsys):
    """A duplicate, or another hash beside a tokens.txt: a notice says how many differ."""
    double = stored(words, change=lambda ids: ids[20].copy_(ids[19]))
    known, unknown, hash128 = stored(words, known=True), stored(words), mhf.hash128
    check(double, words)
    assert f"1 of {len(words)} signatures" in capsys.readouterr().err
    assert double.signatures.signatures[20] == double.signatures.signatures[19]
    monkeypatch.setattr(mhf, "hash128", lambda data, seed: hash128(data, seed + 1))
    check(known, words)
    assert f"{len(words) - 1} of {len(words)} signatures" in capsys.readouterr().err
    refused(lambda: check(unknown, words), len(words), "another mhf.py")


@pytest.mark.parity
def test_the_authors_pieces_give_the_authors_signatures(tmp_path, capsys):
    """A checkpoint of the authors' code, with a tokenizer.json of its 256 pieces: no notice."""
    names = json.loads((FIXTURES / "tiny_h4" / "tokens.json").read_text(encoding="utf-8"))
    model = dict(type="WordLevel", vocab={p: i for i, p in enumerate(names)}, unk_token="<unk>")
    words = load(made(tmp_path, "metaspace", model=model, added_tokens=[]))
    loaded = mhf.load(FIXTURES / "tiny_h4")
    check(loaded, words)
    assert capsys.readouterr().err == "" and loaded.signatures.tokens == words.hashed_bytes()
