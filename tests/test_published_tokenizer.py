"""Tokenizers of published checkpoints: tokenizer.json and SentencePiece models, made here."""

import copy
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from conftest import FIXTURES, one_sentence, random_checkpoint
from safetensors.torch import load_file, save_file

import mhf
import sample

TEXTS = ["the cat", "", "a", "né 漢字 🙂\n\n\tthe  end ", "</s> the [INST] <s>", "<0x41> sat"]
SENTENCES = ["the cat sat on the mat, to be or not to be", "a rose is a rose", "né one two three"]
SENTENCES += ["friends romans countrymen lend me your ears", "the good night of the sweet prince"]
KINDS = ("sentencepiece", "metaspace", "byte-level")


def sentencepiece_model(path, vocab_size=310, **options):
    """Train a tiny SentencePiece model of Mistral's kind: BPE, byte fallback, a dummy blank."""
    sentencepiece = pytest.importorskip("sentencepiece")
    out = io.BytesIO()
    options = dict(control_symbols=["[INST]"], num_threads=1, minloglevel=2) | options
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 9),
        model_writer=out,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        **options,
    )
    path.write_bytes(out.getvalue())
    return path


def json_file(path, kind, vocab_size=310):
    """Train a tiny tokenizer.json: byte-level (GPT-2's kind) or metaspace (Mistral's kind)."""
    tokenizers = pytest.importorskip("tokenizers")
    pre, decoders = tokenizers.pre_tokenizers, tokenizers.decoders
    special = ["<unk>", "<s>", "</s>", "[INST]"]
    if kind == "byte-level":
        encoder = tokenizers.Tokenizer(tokenizers.models.BPE())
        encoder.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
        encoder.decoder, first = decoders.ByteLevel(), pre.ByteLevel.alphabet()
    else:
        encoder = tokenizers.Tokenizer(
            tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
        )
        encoder.pre_tokenizer = pre.Metaspace(prepend_scheme="always")
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        encoder.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
        begin = tokenizers.processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
        encoder.post_processor = begin  # Mistral's file asks for it, encode leaves it out
        special, first = special + [f"<0x{byte:02X}>" for byte in range(256)], []
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=first, show_progress=False
    )
    encoder.train_from_iterator(SENTENCES * 9, trainer)
    spec = json.loads(encoder.to_str())  # bytes are ordinary pieces in published files
    spec["added_tokens"] = [t for t in spec["added_tokens"] if not t["content"].startswith("<0x")]
    path.write_text(json.dumps(spec), encoding="utf-8")
    return path


def make(folder, kind, **options):
    """The file of a tiny tokenizer in a folder, under the name that published folders have."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "sentencepiece":
        return sentencepiece_model(folder / "tokenizer.model", **options)
    return json_file(folder / "tokenizer.json", kind, **options)


def edit(file, **entries):
    """Replace entries of a tokenizer.json."""
    spec = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(spec | entries), encoding="utf-8")
    return file


def published(folder, tokenizer, **fields):
    """A checkpoint as the authors publish it: signatures of the pieces, no tokenizer, no tokens."""
    random_checkpoint(folder, tokenizer, tokenizer=False, **fields)
    (folder / "tokens.txt").unlink(missing_ok=True)
    return folder


def edit_map(folder, change):
    """Write a checkpoint again after `change` of its hash_map (V, H)."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors["model.hash_map"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def variant(tokenizer, pieces):
    """The tokenizer with other pieces for its ids."""
    other = copy.copy(tokenizer)
    other.pieces = pieces
    return other


@pytest.fixture(scope="module", params=KINDS)
def file(request, tmp_path_factory):
    return make(tmp_path_factory.mktemp("tokenizer"), request.param)


@pytest.fixture(scope="module")
def tokenizer(file):
    return mhf.open_tokenizer(file)


@pytest.fixture(scope="module")
def checkpoint(tokenizer, tmp_path_factory):
    return published(tmp_path_factory.mktemp("published") / "checkpoint", tokenizer)


@pytest.fixture
def call(capsys):
    """sample.main() with flags; returns (status, standard output, standard error)."""

    def call(*flags, **named):
        status = sample.main([*flags, *(f"--{name}={value}" for name, value in named.items())])
        return status, *capsys.readouterr()

    return call


# Text


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer, text):
    """decode undoes encode; characters of one to four bytes, blanks, what looks special."""
    ids = tokenizer.encode(text)
    assert type(ids) is list and all(type(i) is int for i in ids)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_tokens_join_to_the_text(tokenizer, text):
    """Token by token the text is spelled, after the blank that encode may put before it."""
    raw = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text)))
    blank = b" " if tokenizer.adds_blank and text else b""
    assert raw == blank + text.encode()


def test_only_sentencepiece_kinds_add_a_blank(tokenizer):
    """Mistral's kinds put a blank before a text, GPT-2's does not."""
    assert tokenizer.adds_blank == (not tokenizer.byte_level)


def test_without_a_dummy_blank_none_is_taken_away(tmp_path):
    """A model that adds no blank: one at the start of a text is the text's own."""
    file = sentencepiece_model(tmp_path / "x.model", add_dummy_prefix=False)
    tokenizer = mhf.open_tokenizer(file)
    assert not tokenizer.adds_blank and tokenizer.decode(tokenizer.encode(" the")) == " the"


def test_special_tokens_are_not_read_from_a_text(tokenizer):
    """The names of special tokens in a prompt are letters, and no special token is added."""
    special = {i for i in range(len(tokenizer)) if i in tokenizer.special}
    assert len(special) >= 4 and not special & set(tokenizer.encode("</s> <s> [INST] <unk>"))


def test_special_tokens_show_their_names(tokenizer):
    """A special token that the model writes is shown by its name, a blank-like sign included."""
    assert [tokenizer.token_bytes(i) for i in range(4)] == [b"<unk>", b"<s>", b"</s>", b"[INST]"]
    other = variant(tokenizer, [*tokenizer.pieces[:3], "<▁x>", *tokenizer.pieces[4:]])
    assert other.token_bytes(3) == "<▁x>".encode()


def test_only_whole_pieces_are_bytes(tokenizer):
    """<0x41> is the byte A in a vocabulary with byte fallback, and text in a byte-level one."""
    pieces = ["<0x41>", "<0x41>x", "x<0x41>", "<0x4>", "<0xg1>"]
    other = variant(tokenizer, [*tokenizer.pieces[:-5], *pieces])
    expected = [piece.encode() for piece in pieces]
    expected[0] = expected[0] if tokenizer.byte_level else b"A"
    assert [other.token_bytes(i) for i in range(305, 310)] == expected


def test_hashed_bytes_are_the_pieces(tokenizer):
    """all_bytes gives the names of the tokens, as the authors hash them: not what they spell."""
    the = tokenizer.encode("a the")[-1]
    assert tokenizer.token_bytes(the) == b" the"
    expected = "Ġthe" if tokenizer.byte_level else "▁the"
    assert tokenizer.all_bytes()[the] == expected.encode()
    assert len(tokenizer.all_bytes()) == len(tokenizer) == 310


def test_end_of_text_is_found(tokenizer, tmp_path):
    """eot is the id of </s> or <|endoftext|>, and None where there is neither."""
    assert tokenizer.eot == 2
    file = json_file(tmp_path / "tokenizer.json", "byte-level")
    for name, eot in (("<|endoftext|>", 2), ("<end>", None)):
        spec = file.read_text(encoding="utf-8").replace("</s>", name)
        (tmp_path / "other.json").write_text(spec, encoding="utf-8")
        assert mhf.open_tokenizer(tmp_path / "other.json").eot == eot


@pytest.mark.parametrize("token_id", [-1, 310, 10**6])
def test_ids_beyond_the_vocabulary_have_no_bytes(tokenizer, token_id):
    assert tokenizer.token_bytes(token_id) is None


def test_an_id_that_is_never_used_has_no_piece(tmp_path):
    """A gap in the ids of a tokenizer.json is None, in both kinds of bytes."""
    file = json_file(tmp_path / "tokenizer.json", "byte-level")
    added = {"id": 315, "content": "<extra>", "special": True} | dict.fromkeys(
        ("single_word", "lstrip", "rstrip", "normalized"), False
    )
    spec = json.loads(file.read_text(encoding="utf-8"))
    spec["model"]["vocab"]["<extra>"] = 315
    tokenizer = mhf.open_tokenizer(
        edit(file, model=spec["model"], added_tokens=[*spec["added_tokens"], added])
    )
    assert len(tokenizer) == 316 and tokenizer.token_bytes(312) is None
    assert tokenizer.all_bytes()[309:] == [tokenizer.pieces[309].encode(), *[None] * 5, b"<extra>"]


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    """A tokenizer.json may say to cut or fill every text; a prompt is taken as it is."""
    cut = dict(max_length=2, stride=0, strategy="LongestFirst", direction="Right")
    fill = dict(strategy={"Fixed": 99}, direction="Right", pad_to_multiple_of=None)
    fill |= dict(pad_id=1, pad_type_id=0, pad_token="<s>")
    file = edit(json_file(tmp_path / "t.json", "byte-level"), truncation=cut, padding=fill)
    tokenizer = mhf.open_tokenizer(file)
    assert tokenizer.decode(tokenizer.encode(SENTENCES[0])) == SENTENCES[0]


def test_every_byte_has_a_letter():
    """GPT-2's alphabet is the one of the package tokenizers, and spells all 256 bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    assert set(mhf.GPT2_BYTES) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert sorted(mhf.GPT2_BYTES.values()) == list(range(256))
    step = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in ("\x00\x1f !~\x7f", "\u00a0¡¬\u00ad®ÿ", "漢🙂"):
        letters = step.pre_tokenize_str(text)[0][0]
        assert bytes(mhf.GPT2_BYTES[c] for c in letters) == text.encode()


# Signatures


def test_pieces_give_the_stored_signatures(checkpoint, tokenizer):
    """Registered, the pieces have the checkpoint's ids; then tries and expansion work in full."""
    model = mhf.load(checkpoint)
    stored = model.model.hash_map.clone()
    assert model.signatures.from_checkpoint
    mhf.adopt_tokenizer(model, tokenizer)
    assert torch.equal(model.signatures.ids, stored)
    assert model.signatures.tokens == tokenizer.all_bytes()
    assert model.signatures.locked is None and not model.signatures.from_checkpoint
    assert model.signatures.trace(tokenizer.all_bytes()[9])[-1][2] is None
    model.expand(["▁selfie".encode()])
    assert model.config.vocab_size == 311 and torch.equal(model.model.hash_map[:310], stored)
    with pytest.raises(ValueError, match="twice"):
        model.expand([tokenizer.all_bytes()[9]])


def test_end_of_text_becomes_the_pad_of_the_checkpoint(checkpoint, tmp_path, file):
    """The published models end a text with their pad, whatever the tokenizer's own choice is."""
    tokenizer, model = mhf.open_tokenizer(file), mhf.load(checkpoint)
    tokenizer.eot = None
    mhf.adopt_tokenizer(model, tokenizer)
    assert tokenizer.eot == model.config.pad_token_id == 2


def test_ids_behind_the_tokenizer_stay_unused(tokenizer, tmp_path):
    """A vocabulary that was rounded up: the ids without a piece stay without a token."""
    model = mhf.load(published(tmp_path / "checkpoint", tokenizer, unused=6))
    mhf.adopt_tokenizer(model, tokenizer)
    assert model.signatures.locked is None and model.signatures.tokens[310:] == [None] * 6
    assert int(model.signatures.assigned.sum()) == 310


def test_words_of_expand_are_kept(checkpoint, tokenizer):
    """A tokenizer that is adopted again does not take the new words for its own, or away."""
    model = mhf.load(checkpoint)
    mhf.adopt_tokenizer(model, tokenizer)
    model.expand([b"new"])
    before = model.signatures
    mhf.adopt_tokenizer(model, tokenizer)
    assert model.signatures is before and before.tokens[310:] == [b"new"]


@pytest.fixture
def reversed_pieces(tokenizer):
    """The same pieces, under other ids."""
    return variant(tokenizer, tokenizer.pieces[:3] + tokenizer.pieces[:2:-1])


def test_another_tokenizer_is_refused(checkpoint, reversed_pieces):
    """Most signatures differ: a ValueError with both numbers, and the model is as it was."""
    model = mhf.load(checkpoint)
    with pytest.raises(ValueError, match="not the tokenizer of this checkpoint") as error:
        mhf.adopt_tokenizer(model, reversed_pieces)
    one_sentence(error, "of 310 signatures differ")
    assert model.signatures.from_checkpoint and model.signatures.locked is None
    assert model.signatures.tokens == [None] * 310 and reversed_pieces.eot == 2


def test_a_larger_tokenizer_is_refused(checkpoint, file, tmp_path):
    """More tokens than the checkpoint has, for either class: both numbers are named."""
    kind = "sentencepiece" if file.suffix == ".model" else "byte-level"
    larger = mhf.open_tokenizer(make(tmp_path, kind, vocab_size=315))
    for model in (mhf.load(checkpoint), mhf.Transformer(mhf.load(checkpoint).config)):
        with pytest.raises(ValueError) as error:
            mhf.adopt_tokenizer(model, larger)
        one_sentence(error, 310, 315)


def test_a_piece_that_is_there_twice_is_refused(checkpoint, tokenizer):
    """Two ids with one piece have no two signatures: the piece and both ids are named."""
    other = variant(tokenizer, [*tokenizer.pieces[:-1], tokenizer.pieces[9]])
    with pytest.raises(ValueError, match="not the tokenizer of this checkpoint") as error:
        mhf.adopt_tokenizer(mhf.load(checkpoint), other)
    one_sentence(error, "twice", 9, 309)


def test_a_standard_model_takes_any_tokenizer_of_its_size(checkpoint, reversed_pieces):
    """It has no signatures to compare, only a number of tokens."""
    model = mhf.Transformer(mhf.load(checkpoint).config)
    mhf.adopt_tokenizer(model, reversed_pieces)
    assert not hasattr(model, "signatures")


def test_a_few_other_signatures_are_kept(checkpoint, tokenizer, tmp_path, capsys):
    """Duplicates, as the authors' code makes them: the number of tokens that do not have their
    first hash is said, the stored ids stay, the tokens are known, and nothing can be added.
    """
    folder = Path(shutil.copytree(checkpoint, tmp_path / "copy"))

    def crowd(ids):
        ids[20] = ids[19]  # a duplicate
        ids[30, -1] = ids[30, -1] % 63 + 1

    edit_map(folder, crowd)
    model = mhf.load(folder)
    stored = model.model.hash_map.clone()
    first = mhf.SignatureTable(3, 64, allow_collisions=True)
    first.extend(tokenizer.all_bytes(), pad_id=2)
    number = int((first.ids != stored).any(-1).sum())
    assert "1 tokens share" in capsys.readouterr().err
    mhf.adopt_tokenizer(model, tokenizer)
    err = capsys.readouterr().err
    assert 2 <= number <= 5 and f"{number} of 310 signatures differ" in err and "re-hash" in err
    assert torch.equal(model.signatures.ids, stored)
    assert model.signatures.tokens == tokenizer.all_bytes()
    with pytest.raises(ValueError, match=f"{number} of 310"):
        model.expand([b"new"])


def test_rehashes_alone_never_refuse_a_tokenizer(checkpoint, tokenizer, tmp_path, capsys):
    """Where all last ids differ, as re-hashes may have it, the tokenizer is still the right one."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "copy"))

    def shift(ids):
        ids[3:, -1] = ids[3:, -1] % 63 + 1

    edit_map(folder, shift)
    mhf.adopt_tokenizer(mhf.load(folder), tokenizer)
    assert "307 of 310 signatures differ" in capsys.readouterr().err


@pytest.mark.parametrize("H, num_lsh", [(1, 0), (2, 1), (2, 2)])
def test_tables_without_rehash_and_with_lsh(tokenizer, tmp_path, H, num_lsh):
    """Single-ID and locality-sensitive checkpoints get their tokens, too."""
    folder = published(tmp_path / "checkpoint", tokenizer, num_hashes=H, num_lsh=num_lsh)
    model = mhf.load(folder)
    mhf.adopt_tokenizer(model, tokenizer)
    assert model.signatures.locked is None and not model.signatures.from_checkpoint


def test_single_ids_of_another_tokenizer_are_refused(tokenizer, reversed_pieces, tmp_path):
    """With one id a token that id is compared."""
    model = mhf.load(published(tmp_path / "checkpoint", tokenizer, num_hashes=1))
    with pytest.raises(ValueError, match="of 310 signatures differ"):
        mhf.adopt_tokenizer(model, reversed_pieces)


def test_saved_tokens_of_another_vocabulary_stay_unknown(checkpoint, tokenizer, tmp_path, capsys):
    """A tokens.txt of the right length that is another's: said at loading, and not used."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    model = mhf.load(folder)
    mhf.adopt_tokenizer(model, tokenizer)
    model.save_pretrained(folder)
    lines = (folder / "tokens.txt").read_text(encoding="utf-8").splitlines()
    assert mhf.load(folder).signatures.tokens == tokenizer.all_bytes()
    (folder / "tokens.txt").write_text("\n".join(lines[:3] + lines[:2:-1]), encoding="utf-8")
    table = mhf.load(folder).signatures
    err = capsys.readouterr().err
    assert "does not belong" in err and "of 310 signatures differ" in err
    assert table.tokens == [None] * 310 and table.locked


@pytest.mark.parametrize("name", ["H4B16K", "H3B10K"])
def test_signatures_of_the_mistral_vocabulary(name):
    """The 32,768 pieces of Mistral-7B-v0.3 give the authors' signatures: 504 are compared."""
    if not (file := os.environ.get("MHF_MISTRAL_TOKENIZER")):
        pytest.skip("MHF_MISTRAL_TOKENIZER names no SentencePiece model of Mistral-7B-v0.3")
    figures = json.loads((FIXTURES / "signatures.json").read_text(encoding="utf-8"))
    tokenizer = mhf.open_tokenizer(file)
    table = mhf.SignatureTable(figures[name]["num_hashes"], figures[name]["num_buckets"])
    table.extend(tokenizer.all_bytes(), pad_id=tokenizer.eot)
    assert (len(table), table.pad_id, len(figures["tokens"])) == (32768, 2, 504)
    for token in figures["tokens"]:
        assert table.tokens[token["id"]].decode() == token["piece"]
        assert table.ids[token["id"]].tolist() == token[name]


# sample.py


def test_sample_writes_text(checkpoint, file, tokenizer, call):
    """Prompt and continuation read on: no blank is lost between them, none is in front."""
    prompt, flags = "the cat", dict(max_new_tokens=30, seed=4)
    tokens = list(mhf.load(checkpoint).generate(tokenizer.encode(prompt), 30, seed=4, stop=2))
    told = b"".join(tokenizer.token_bytes(t) for t in tokens if t != 2).decode("utf-8", "replace")
    for source in (file, file.parent):
        status, out, err = call(checkpoint=checkpoint, tokenizer=source, prompt=prompt, **flags)
        assert (status, out) == (0, prompt + told + "\n")
        assert "no tokenizer" not in err


def test_sample_begins_a_new_word_with_a_blank(checkpoint, file, tokenizer, call, monkeypatch):
    """A continuation of whole words and single bytes, streamed: the text that was encoded."""
    text = " the cat sat on né 漢🙂\n"
    tokens = tokenizer.encode(text[1:] if tokenizer.adds_blank else text)
    monkeypatch.setattr(mhf.LanguageModel, "generate", lambda *args: iter(tokens))
    assert call(checkpoint=checkpoint, tokenizer=file, prompt="on")[1] == f"on{text}\n"


def test_sample_takes_the_tokenizer_beside_the_checkpoint(checkpoint, file, call, tmp_path):
    """A tokenizer.json or SentencePiece model in the checkpoint is used, but for --tokenizer."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    shutil.copy(file, folder)
    expected = call(checkpoint=checkpoint, tokenizer=file, prompt="the", max_new_tokens=9)[:2]
    assert call(checkpoint=folder, prompt="the", max_new_tokens=9)[:2] == expected
    assert call(checkpoint=folder, tokenizer=tmp_path)[0] == 2  # which holds none


def test_sample_without_a_tokenizer_says_how_to_name_one(checkpoint, call):
    """Ids go in and out, and the note names --tokenizer."""
    status, out, err = call(checkpoint=checkpoint, prompt="5 6", max_new_tokens=2)
    assert status == 0 and out.startswith("5 6 ") and "--tokenizer" in err


def test_sample_explains_with_text(checkpoint, file, tokenizer, call, monkeypatch):
    """--explain shows what a token spells, with its signs for blanks, not its piece."""
    tokens = tokenizer.encode("a the\n")[1:]
    monkeypatch.setattr(mhf.LanguageModel, "generate", lambda *args: iter(tokens))
    flags = dict(checkpoint=checkpoint, tokenizer=file, prompt="a")
    status, out, _ = call("--explain", **flags)
    assert status == 0 and "\n␣the " in out and "\n↵ " in out


def test_sample_refuses_another_tokenizer(checkpoint, call, tmp_path):
    """Exit status 2 and one line with the values."""
    other = mhf.Tokenizer.train("to be or not to be " * 20, 260)
    other.save(tmp_path)
    status, out, err = call(checkpoint=checkpoint, tokenizer=tmp_path)
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert "310 signatures differ; this is not the tokenizer of this checkpoint" in err


def test_program_with_the_authors_checkpoint(tmp_path):
    """The program itself, on a checkpoint of the authors' code with a tokenizer.json of its pieces:
    the words of its vocabulary go in, and its greedy continuation comes out as text.
    """
    tokenizers = pytest.importorskip("tokenizers")
    pieces = json.loads((FIXTURES / "tiny_h4" / "tokens.json").read_text(encoding="utf-8"))
    vocab = {piece: i for i, piece in enumerate(pieces)}
    encoder = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    encoder.add_special_tokens(["<unk>", "<s>", "</s>"])
    encoder.save(str(tmp_path / "tokenizer.json"))
    model, words = mhf.load(FIXTURES / "tiny_h4"), mhf.open_tokenizer(tmp_path)
    prompt = "attempt written blood"
    ids = [vocab[f"▁{word}"] for word in prompt.split()]
    assert words.encode(prompt) == ids
    tokens = [t for t in model.generate(ids, 12, temperature=0, stop=2) if t != 2]
    told = "".join(pieces[t].replace("▁", " ") for t in tokens)
    command = [sys.executable, sample.__file__, "--checkpoint", FIXTURES / "tiny_h4"]
    command += ["--tokenizer", tmp_path, "--prompt", prompt, "--max_new_tokens=12"]
    done = subprocess.run([*command, "--temperature=0", "--threads=1"], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == prompt + told + "\n" and len(tokens) > 3


# Which tokenizer


def test_kinds_in_a_folder_have_an_order(tmp_path):
    """Ours before a tokenizer.json before tokenizer.model before another SentencePiece model."""
    files = ["x.model.v3", "tokenizer.model", "tokenizer.json", "tokenizer.tiktoken"]
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "x.models").touch()
    assert mhf.tokenizer_file(tmp_path) is None
    for name in files:
        (tmp_path / name).touch()
        assert mhf.tokenizer_file(tmp_path) == tmp_path / name


@pytest.mark.parametrize("name", ["mistral_240323.model.v3", "x.model.v7m1", "spm.model"])
def test_sentencepiece_models_may_have_any_name(tmp_path, name):
    """A lone model in a folder is found, and a file is opened, whatever its version."""
    file = sentencepiece_model(tmp_path / name)
    assert len(mhf.open_tokenizer(tmp_path)) == len(mhf.open_tokenizer(str(file))) == 310


def test_several_models_are_a_question(tmp_path):
    """Two models and none by the usual name: both are named."""
    for name in ("a.model.v2", "b.model"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError) as error:
        mhf.open_tokenizer(tmp_path)
    one_sentence(error, "a.model.v2", "b.model")


def test_our_own_tokenizers_open_too(tmp_path):
    """A folder, its file, a lone file, a run: each is the tokenizer that was saved."""
    ours = mhf.Tokenizer.train("to be or not to be " * 20, 260)
    ours.save(tmp_path / "run" / "step-1")
    (tmp_path / "run" / "last").write_text("step-1", encoding="utf-8")
    folder = tmp_path / "run" / "step-1"
    lone = shutil.copy(folder / "tokenizer.tiktoken", tmp_path / "lone.tiktoken")
    for name in (folder, folder / "tokenizer.tiktoken", lone, str(tmp_path / "run")):
        opened = mhf.open_tokenizer(name)
        assert type(opened) is mhf.Tokenizer and opened.all_bytes() == ours.all_bytes()
    spec = json.loads((folder / "tokenizer_meta.json").read_text(encoding="utf-8"))
    spec["special"] = {"<|endoftext|>": 300}
    (folder / "tokenizer_meta.json").write_text(json.dumps(spec), encoding="utf-8")
    assert len(mhf.open_tokenizer(folder / "tokenizer.tiktoken")) == 301


def test_tiktoken_names_open(monkeypatch):
    """A name of tiktoken's goes to it."""
    monkeypatch.setattr(mhf.Tokenizer, "named", lambda name: f"tiktoken's {name}")
    assert mhf.open_tokenizer("cl100k_base") == "tiktoken's cl100k_base"


def test_hub_names_fetch_only_a_tokenizer(monkeypatch, file):
    """A hub name is fetched at its revision, without weights; then it is a folder."""
    asked = []

    def fetch(name, revision, allow_patterns):
        asked.append((name, revision, allow_patterns))
        return str(file.parent)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert len(mhf.open_tokenizer("owner/name", revision="v2")) == 310
    [(name, revision, patterns)] = asked
    assert (name, revision) == ("owner/name", "v2")
    assert not [p for p in patterns if "safetensors" in p or p == "*"]
    mhf.find_checkpoint("owner/name")
    assert {"*.json", "*.model", "*.model.v*", "*.safetensors", "tokens.txt"} <= set(asked[1][2])


# Mistakes


def test_an_unreachable_hub_is_one_sentence(monkeypatch, call, checkpoint):
    """Exit status 2 and one line with the name."""

    def fail(*args, **keywords):
        raise ConnectionError("many\nlines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    status, out, err = call(checkpoint=checkpoint, tokenizer="owner/name")
    assert (status, out) == (2, "") and err.count("\n") == 1 and "owner/name" in err


def test_unknown_names_are_one_sentence(tmp_path):
    """Neither file, folder, hub name nor tiktoken's: what was given is named."""
    for name in ("gpt3", tmp_path / "missing" / "tokenizer.json", tmp_path):
        with pytest.raises(ValueError) as error:
            mhf.open_tokenizer(name)
        one_sentence(error, str(name).strip("/"))


@pytest.mark.parametrize("name, package", [("t.json", "tokenizers"), ("t.model", "sentencepiece")])
def test_a_missing_package_is_named(monkeypatch, tmp_path, name, package):
    """The sentence says what to install."""
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / name).touch()
    with pytest.raises(ValueError) as error:
        mhf.open_tokenizer(tmp_path / name)
    one_sentence(error, name, f"pip install {package}")


@pytest.mark.parametrize("name", ["t.json", "t.model"])
@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe" * 9, b"[1,\n2]"])
def test_damaged_files_are_one_sentence(tmp_path, name, content):
    """No package's own exception gets through."""
    pytest.importorskip("tokenizers" if name == "t.json" else "sentencepiece")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        mhf.open_tokenizer(tmp_path / name)
    one_sentence(error, name)


def test_other_kinds_of_json_are_refused(tmp_path):
    """BERT's word pieces do not say where blanks are: such a file is refused by name."""
    tokenizers = pytest.importorskip("tokenizers")
    encoder = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}))
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    encoder.save(str(tmp_path / "bert.json"))
    with pytest.raises(ValueError, match="neither byte-level nor SentencePiece") as error:
        mhf.open_tokenizer(tmp_path / "bert.json")
    one_sentence(error, "bert.json")
