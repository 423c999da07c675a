"""Our own byte-level BPE, run by tiktoken, and the tokenizer.json of published checkpoints."""

import base64
import json
import re
import sys
from pathlib import Path

import rustbpe
import tiktoken
from huggingface_hub import snapshot_download

import mhf

# How GPT-4 cuts a text into words before it merges bytes.
PATTERN = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"
PATTERN += r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
END = "<|endoftext|>"
HIDDEN = [*range(33), *range(127, 161), 173]  # GPT-2 writes these bytes as the letters from 256 on
LETTERS = {chr(256 + HIDDEN.index(b) if b in HIDDEN else b): b for b in range(256)}
ADVICE = "a .tiktoken file or tokenizer.json is needed; published .model files come as that, too"


class Tokenizer:
    """A byte-level BPE run by tiktoken. Special tokens are never read out of a text."""

    def __init__(self, name, pattern, ranks, special):
        self.written = {i: token for token, i in ranks.items()}  # id -> what it adds to a text
        self.written |= {i: token.encode() for token, i in special.items()}
        self.hashed = self.written  # id -> what its signature is made of
        self.ends = [special[END]] if END in special else []  # the ids that end a text
        self.adds_blank = False  # whether encode puts a blank before a text
        single = sum(len(token) == 1 for token in ranks)
        if single < 256 or len(self.written) < len(ranks) + len(special):
            raise ValueError(f"{single} of 256 bytes have an id, or two tokens share one")
        parts = dict(pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        self.encoding = tiktoken.Encoding(name, **parts)

    @classmethod
    def train(cls, texts, vocab_size):
        """Train on an iterable of strings; vocab_size includes the end-of-text token."""
        trained = rustbpe.Tokenizer()
        texts = (piece for text in texts for piece in pieces(text))
        trained.train_from_iterator(texts, max(vocab_size - 1, 256), pattern=PATTERN)
        ranks = {bytes(token): rank for token, rank in trained.get_mergeable_ranks()}
        if (size := len(ranks) + 1) != vocab_size:
            raise ValueError(f"no {vocab_size} tokens: the text gives {size}, and 257 is the least")
        return cls(f"bpe-{vocab_size}", PATTERN, ranks, {END: len(ranks)})

    @classmethod
    def load(cls, path):
        """From a folder that save wrote. A lone .tiktoken file has PATTERN, and an end is added."""
        file = Path(path) / "tokenizer.tiktoken" if Path(path).is_dir() else Path(path)
        pairs = [line.split() for line in file.read_text(encoding="utf-8").splitlines()]
        ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
        meta = {"name": file.stem, "pattern": PATTERN, "special": {END: 1 + max(ranks.values())}}
        if (saved := file.with_name("tokenizer_meta.json")).exists():
            meta = json.loads(saved.read_text(encoding="utf-8"))
        return cls(meta["name"], meta["pattern"], ranks, meta["special"])

    def save(self, folder):
        """Write tokenizer.tiktoken (ranks in tiktoken's format) and tokenizer_meta.json."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        own = self.encoding
        meta = {"name": own.name, "pattern": own._pat_str, "special": own._special_tokens}
        lines = [f"{base64.b64encode(t).decode()} {i}\n" for t, i in own._mergeable_ranks.items()]
        Path(folder, "tokenizer.tiktoken").write_text("".join(lines), "utf-8")
        Path(folder, "tokenizer_meta.json").write_text(json.dumps(meta, indent=2), "utf-8")

    @property
    def eot(self):
        return self.ends[0] if self.ends else None

    def __len__(self):
        return 1 + max(self.written)

    def encode(self, text):
        return [i for piece in pieces(text) for i in self.encoding.encode_ordinary(piece)]

    def decode(self, ids):
        """A whole text without the blank that encode adds. What is not UTF-8 becomes U+FFFD."""
        text = b"".join(self.written.get(int(i), b"") for i in ids).decode("utf-8", "replace")
        return text.removeprefix(" " * self.adds_blank)

    def token_bytes(self, token_id):
        """What a token adds to a text; None for an id that is never used."""
        return self.written.get(int(token_id))

    def hashed_bytes(self):
        """What every token's signature is made of; None for an id that is never used."""
        return [self.hashed.get(i) for i in range(len(self))]


def pieces(text, size=2**17):
    """Cut long runs of blanks, at 131,072 characters: tiktoken and rustbpe panic on a million."""
    cuts = [end for end in range(size, len(text), size) if text[end - size : end].isspace()]
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]


class PublishedTokenizer(Tokenizer):
    """A tokenizer.json, byte-level or SentencePiece-like. No special token is added to a text."""

    def __init__(self, file):
        import tokenizers

        self.encoder = tokenizers.Tokenizer.from_file(str(file))
        self.encoder.no_truncation()
        self.encoder.no_padding()
        self.encoder.encode_special_tokens = True  # as the letters of their names
        spec, added = json.loads(self.encoder.to_str()), self.encoder.get_added_tokens_decoder()
        steps = str([spec[name] for name in ("normalizer", "pre_tokenizer", "decoder")])
        byte_level = "ByteLevel" in steps
        if not byte_level and "▁" not in steps:
            raise ValueError("it is neither byte-level nor SentencePiece-like")
        pieces = sorted((i, piece) for piece, i in self.encoder.get_vocab().items())
        # The authors hash a piece as the file has it ("▁the", "<0x0A>"), not what it stands for.
        self.hashed = {i: piece.encode() for i, piece in pieces}
        self.written = {i: spelled(piece, byte_level) for i, piece in pieces}
        self.written |= {i: self.hashed[i] for i, t in added.items() if byte_level or t.special}
        self.adds_blank = b"".join(map(self.token_bytes, self.encode("a"))).startswith(b" ")
        config = Path(file).with_name("config.json")
        self.ends = end_ids(json.loads(config.read_text("utf-8"))) if config.exists() else []

    def save(self, folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.encoder.save(str(Path(folder, "tokenizer.json")))

    def encode(self, text):
        return self.encoder.encode(text, add_special_tokens=False).ids


def spelled(piece, byte_level):
    """The bytes that a piece of a tokenizer.json stands for."""
    if byte_level:
        return bytes(LETTERS[c] for c in piece) if {*piece} <= LETTERS.keys() else piece.encode()
    byte = re.fullmatch("<0x([0-9A-F]{2})>", piece)
    return bytes.fromhex(byte[1]) if byte else piece.replace("▁", " ").encode()


def end_ids(config):
    """The eos_token_id of a config.json, a number, a list or missing, as a list."""
    found = config.get("eos_token_id")
    ends = found if isinstance(found, list) else [found] * (found is not None)
    if not all(type(token_id) is int for token_id in ends):
        raise ValueError(f"config.json: eos_token_id {found!r} is not a number or a list of them")
    return ends


def load(name):
    """The tokenizer of a run, checkpoint, hub name or file, or one of tiktoken's."""
    path = Path(name)
    try:
        if not path.exists() and str(name) in tiktoken.list_encoding_names():
            own = tiktoken.get_encoding(str(name))  # downloads the ranks on first use
            return Tokenizer(own.name, own._pat_str, own._mergeable_ranks, own._special_tokens)
        if not path.exists():
            path = Path(snapshot_download(str(name), allow_patterns=["tokenizer*", "config.json"]))
        if path.is_dir():
            folder = mhf.find_checkpoint(path)
            path = next(folder.glob("tokenizer.tiktoken"), folder / "tokenizer.json")
        return Tokenizer.load(path) if path.suffix == ".tiktoken" else PublishedTokenizer(path)
    except Exception as error:  # each package has its own classes; tokenizers may be missing
        about = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{path} cannot be read as a tokenizer ({about}); {ADVICE}") from None


def check(model, tokenizer):
    """Name the tokens of a model, whose signatures stay. ValueError if it has another tokenizer."""
    V, size = model.config.vocab_size, len(tokenizer)
    if size > V:
        raise ValueError(f"the tokenizer has {size} tokens, the checkpoint only {V}")
    tokenizer.ends = end_ids(model.config.extra) or tokenizer.ends
    if model.config.model == "standard":
        return
    stored, tokens = model.signatures, tokenizer.hashed_bytes()
    lsh, named = stored.num_lsh, stored.tokens[:size]
    if any(named) and named != tokens:
        i = next(i for i in range(size) if named[i] != tokens[i])
        raise ValueError(f"not the model's tokenizer: token {i} is {tokens[i]}, not {named[i]}")
    made = mhf.SignatureTable(stored.num_hashes, stored.num_buckets)
    made.extend(tokens + [None] * (V - size), stored.pad_id)
    part = slice(lsh, -1 if lsh else None)  # where ids are LSH, other tokens are hashed again
    differ = sum(a[part] != b[part] for a, b, _ in zip(made.signatures, stored.signatures, tokens))
    notice = f"{differ} of {size} signatures are not those that this mhf.py makes of the tokens"
    if differ > size / 2 and not any(named):
        raise ValueError(f"{notice}: another tokenizer, or another mhf.py, made the checkpoint")
    if differ:
        print(f"{notice}; the stored ones are used", file=sys.stderr)
    stored.tokens[:size] = tokens
