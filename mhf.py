"""MultiHashFormer: a language model without a vocabulary-sized embedding, in one file.

Every token is a signature: one id from each of H hash functions. The H rows that the signature
names in a small table are gated into one input vector; the decoder predicts the H ids of the next
token one after the other. The table has H·B rows however many tokens V there are, and a new token
costs nothing. Paper: "MultiHashFormer: Hash-based Generative Language Models", arXiv 2606.28057.

    "cat"                                                          log P("sat")
      | hash with H seeds                                               ^ sum over j, then
    (17, 4, 90, 31)  signature                                          | renormalise over V
      | one row of E for each id                            id_1, ..., id_H of "sat"
    e_1 ... e_H                                                         ^ softmax of E_j c_j
      | gate: x = W_s sum_j alpha_j e_j + b_s                  cascade over j = 1 ... H
      +-----------------> Qwen3 decoder blocks -----------------> h ----+

Glossary (one letter, one meaning; the names in brackets are those of config.json):
    N, T     batch, positions
    D        width of the residual stream (hidden_size)
    H        hash functions = ids in a signature (num_hashes)
    B        buckets of each hash function (num_buckets)
    Z        bottleneck width of gate and mixers (bottle_neck_dim)
    V        vocabulary: the tokens that really exist (vocab_size)
    A, K, C  attention heads, key/value heads, head width (head_dim)
    M        positions in one list, N·T of them unless said otherwise
"""

import base64
import functools
import json
import os
import tempfile
from array import array
from collections import Counter
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import mmh3
import numpy as np
import tiktoken
import torch
import torch.nn.functional as F
from torch import nn

_hash128 = mmh3.mmh3_x64_128_uintdigest  # (bytes, seed) -> unsigned 128-bit integer
OBJECTIVES = ("independent", "exact", "joint")


# ---------------------------------------------------------------------------------------------
# Configuration
# ---------------------------------------------------------------------------------------------


@dataclass
class Config:
    """All that shapes the model, in the names of the published `config.json` (Qwen3's names).

    Raises ValueError, with the field and its value, if the fields do not fit each other.
    """

    vocab_size: int = 8192  # V; a MultiHashFormer takes it from its signatures
    hidden_size: int = 256  # D
    num_hidden_layers: int = 6
    num_attention_heads: int = 4  # A
    num_key_value_heads: int = 2  # K
    head_dim: int | None = None  # C; D / A if not given
    intermediate_size: int = 768  # width of the feed-forward layer
    num_hashes: int = 4  # H
    num_buckets: int = 1024  # B
    num_lsh: int = 0  # how many of the H functions are locality-sensitive
    bottle_neck_dim: int = 64  # Z
    max_position_embeddings: int = 256  # longest context, and the length of a training sequence
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02  # standard deviation of all matrices at the start
    # Deviation: the paper has one initializer_range and a random adapter; None and "normal" are that.
    table_initializer_range: float | None = None  # of the embedding table alone
    adapter_init: str = "normal"  # or "identity": W_s starts as the identity matrix
    pad_token_id: int | None = 0  # end of text in the published models
    model: str = "mhf"  # or "standard"
    objective: str = "independent"  # training objective: independent, exact or joint
    joint_weight: float = 0.25  # λ of the joint objective
    calibration: float = 1.0  # τ: scores are divided by it before the softmax; 1 is the paper's rule
    extra: dict = field(default_factory=dict, repr=False)  # unknown config.json keys, written back

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type in (int, int | None) and value is not None:
                low = {"num_buckets": 2, "num_lsh": 0, "pad_token_id": 0, "head_dim": 2}.get(f.name, 1)
                if not isinstance(value, int) or value < low:
                    raise ValueError(f"{f.name} must be a whole number ≥ {low}, not {value!r}")
        D, A, K = self.hidden_size, self.num_attention_heads, self.num_key_value_heads
        if self.head_dim is None:
            if D % A:
                raise ValueError(
                    f"hidden_size {D} does not divide into num_attention_heads {A}; "
                    "change one of them or give head_dim"
                )
            self.head_dim = D // A
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, not {self.head_dim}")
        if A % K:
            raise ValueError(f"num_attention_heads {A} is not a multiple of num_key_value_heads {K}")
        if self.num_lsh > self.num_hashes:
            raise ValueError(f"num_lsh {self.num_lsh} exceeds num_hashes {self.num_hashes}")
        for name, allowed in (
            ("model", ("mhf", "standard")),
            ("objective", OBJECTIVES),
            ("adapter_init", ("normal", "identity")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        if not self.calibration > 0:
            raise ValueError(f"calibration must be positive, not {self.calibration}")

    @classmethod
    def preset(cls, name, extra_layers=0, **overrides):
        """The named preset (see PRESETS), `extra_layers` deeper, with fields replaced by `overrides`."""
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; there are {', '.join(PRESETS)}")
        settings = {**PRESETS[name], **overrides}
        settings["num_hidden_layers"] += extra_layers
        return cls(**settings)

    def to_json(self, path=None):
        """The text of a published-format config.json; also written to `path` if given."""
        ours = asdict(self)
        extra = ours.pop("extra")
        theta = ours.pop("rope_theta")
        ours["rope_parameters"] = {"rope_theta": theta, "rope_type": "default"}
        ours["use_conditional_prob"] = self.objective != "independent"
        ours["layer_types"] = ["full_attention"] * self.num_hidden_layers
        if self.model == "standard":  # a plain Qwen3 config, which other software loads, too
            for name in ("num_hashes", "num_buckets", "num_lsh", "bottle_neck_dim", "adapter_init"):
                del ours[name]
        ends = {"bos_token_id": self.pad_token_id, "eos_token_id": self.pad_token_id}
        text = json.dumps({**PUBLISHED, **ends, **extra, **ours}, indent=2, sort_keys=True) + "\n"
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, source):
        """From the text of a config.json or the path of one. Unknown keys are kept in `extra`.

        Raises ValueError, by name and value, for what this implementation does not do.
        """
        source = str(source)
        if not source.lstrip().startswith("{"):
            source = _read_text(Path(source))
        try:
            given = json.loads(source)
        except json.JSONDecodeError as error:
            raise ValueError(f"config.json is not valid JSON: {error}") from None
        for name in ("lsh_only_embed", "attention_bias", "use_sliding_window"):
            if given.get(name):
                raise ValueError(f"config.json: {name} = {given[name]!r} is not supported")
        rope = given.pop("rope_parameters", None) or given.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        for name, value, only in (
            ("rope_type", rope_type, "default"),
            ("hidden_act", given.get("hidden_act", "silu"), "silu"),
            ("tie_word_embeddings", given.get("tie_word_embeddings", True), True),
        ):
            if value != only:
                raise ValueError(f"config.json: {name} = {value!r} is not supported, only {only!r}")
        given["rope_theta"] = rope.get("rope_theta", given.get("rope_theta", 1e6))
        given.setdefault("model", "mhf" if "num_hashes" in given else "standard")
        given.setdefault("objective", "exact" if given.get("use_conditional_prob") else "independent")
        known = {f.name for f in fields(cls)} - {"extra"}
        derived = {"use_conditional_prob", "layer_types"}
        extra = {k: v for k, v in given.items() if k not in known | derived}
        return cls(**{k: v for k, v in given.items() if k in known}, extra=extra)


# ---------------------------------------------------------------------------------------------
# Signatures (section 3.1 of the paper)
# ---------------------------------------------------------------------------------------------


class SignatureTable:
    """Gives every token a unique signature of H ids, each from 1 to B−1; the pad token has (0, …, 0).

    id_j(token) = murmurhash3_x64_128(token, seed=j) mod (B−1) + 1. If an earlier token has the
    signature, only the last id changes: its seed becomes H, H+1, … until the signature is free.
    Once given, a signature never changes. Deviation: the authors' code forgets some earlier tokens
    after such a re-hash and makes duplicates; here uniqueness is guaranteed, and where their table
    is free of duplicates the two are equal.

    num_lsh            the first num_lsh functions are locality-sensitive instead (see `_lsh_ids`)
    allow_collisions   no re-hash; tokens may share a signature, as with H = 1 they must
    """

    def __init__(self, num_hashes, num_buckets, num_lsh=0, allow_collisions=False):
        if num_hashes < 1 or num_buckets < 2 or not 0 <= num_lsh <= num_hashes:
            raise ValueError(
                f"need num_hashes ≥ 1, num_buckets ≥ 2 and num_lsh from 0 to num_hashes, "
                f"not {num_hashes}, {num_buckets}, {num_lsh}"
            )
        if not allow_collisions and (num_hashes == 1 or num_lsh == num_hashes):
            raise ValueError(
                f"num_hashes {num_hashes} with num_lsh {num_lsh} leaves no function to re-hash, so tokens "
                "will share signatures: pass allow_collisions=True if that is meant"
            )
        self.num_hashes, self.num_buckets, self.num_lsh = num_hashes, num_buckets, num_lsh
        self.allow_collisions, self.pad_id = allow_collisions, None
        self.tokens = []  # bytes by token id; None where the id has no token
        self.locked = None  # why nothing can be added, or None
        self.from_checkpoint = False
        self._flat = array("i")  # V·H ids
        self._owner = {}  # packed signature -> the lowest token id that has it
        self._known = {}  # token bytes -> token id
        self._ids = None

    def __len__(self):
        return len(self._flat) // self.num_hashes

    @property
    def ids(self):
        """LongTensor (V, H): the signature of every token; zeros for the pad and for unused ids."""
        if self._ids is None or len(self._ids) != len(self):
            flat = np.array(self._flat, dtype=np.int64)
            self._ids = torch.from_numpy(flat).view(-1, self.num_hashes)  # (V, H)
        return self._ids

    def add(self, token, pad=False):
        """Register one token (bytes) and return its signature, a tuple of H ints. Errors: as `extend`."""
        self.extend([token], pad_id=len(self) if pad else None)
        return tuple(self._flat[-self.num_hashes :])

    def extend(self, tokens, pad_id=None):
        """Register tokens (bytes, in token-id order; None for an id that is never used).

        `pad_id` is the token id of the pad among them. Raises ValueError, and leaves the table as it
        was, for a token that is there already, a second pad, more tokens than signatures, and a
        prefix (the first H−1 ids) whose B−1 last ids are all taken.
        """
        tokens, start = list(tokens), len(self)
        if self.locked:
            raise ValueError(f"no token can be added: {self.locked}")
        if pad_id is not None and (self.pad_id is not None or not 0 <= pad_id - start < len(tokens)):
            raise ValueError(f"pad_id {pad_id}: the pad is {self.pad_id}; new ids start at {start}")
        room = (self.num_buckets - 1) ** self.num_hashes - len(self._owner)
        if not self.allow_collisions and len(tokens) - tokens.count(None) - (pad_id is not None) > room:
            raise ValueError(
                f"{start + len(tokens)} tokens do not fit: num_hashes {self.num_hashes} and num_buckets "
                f"{self.num_buckets} give {room + len(self._owner)} signatures; make one of them larger"
            )
        local = _lsh_ids(tokens, self.num_lsh, self.num_buckets) if self.num_lsh else None
        try:
            for token_id, token in enumerate(tokens, start):
                self._register(token_id, token, token_id == pad_id, local and local[token_id - start])
        except Exception:
            self._truncate(start)
            raise

    def _register(self, token_id, token, pad, local):
        if token is not None and not isinstance(token, bytes):
            raise ValueError(f"token {token_id} is {token!r}: tokens are bytes")
        if token is None or pad:
            signature = [0] * self.num_hashes
        elif token in self._known:
            raise ValueError(f"token {token!r} is registered twice: ids {self._known[token]}, {token_id}")
        else:
            signature = self._hash(token, local)
        if pad:
            self.pad_id = token_id
        if token is not None:
            self._known[token] = token_id
            self._owner.setdefault(_pack(signature), token_id)
        self.tokens.append(token)
        self._flat.extend(signature)

    def _hash(self, token, local):
        H, B = self.num_hashes, self.num_buckets
        signature = [_hash128(token, j) % (B - 1) + 1 for j in range(self.num_lsh, H)]
        signature = local + signature if local else signature
        key, seed = _pack(signature), H - 1
        while key in self._owner and not self.allow_collisions:
            prefix = key - signature[-1]
            if seed == H - 1 and all(prefix + last in self._owner for last in range(1, B)):
                raise ValueError(
                    f"token {token!r}: all {B - 1} signatures that start with {signature[:-1]} are taken; "
                    "make num_buckets or num_hashes larger"
                )
            seed += 1
            signature[-1] = _hash128(token, seed) % (B - 1) + 1
            key = prefix + signature[-1]
        return signature

    def _truncate(self, length):
        self._owner = {key: owner for key, owner in self._owner.items() if owner < length}
        self._known = {token: owner for token, owner in self._known.items() if owner < length}
        self.pad_id = None if self.pad_id is None or self.pad_id >= length else self.pad_id
        del self.tokens[length:], self._flat[length * self.num_hashes :]

    def lookup(self, signature):
        """The (lowest) token id that has this signature, or None."""
        return self._owner.get(_pack(signature)) if len(signature) == self.num_hashes else None

    def trace(self, token):
        """How the token (registered or not) got, or would get, its last id.

        A list of (seed, last id, id of the token that had the signature, or None): one entry for each
        try, the last with None. The pad gives []. Raises ValueError on a table made by `from_ids`.
        """
        if self.from_checkpoint:
            raise ValueError("this table came from stored ids, without the tokens: nothing to trace")
        token_id = self._known.get(token)
        if token_id is not None and token_id == self.pad_id:
            return []
        local = _lsh_ids([token], self.num_lsh, self.num_buckets)[0] if self.num_lsh else []
        murmur = range(self.num_lsh, self.num_hashes)
        signature = local + [_hash128(token, j) % (self.num_buckets - 1) + 1 for j in murmur]
        tries, seed = [], self.num_hashes - 1
        while True:
            owner = None if self.allow_collisions else self._owner.get(_pack(signature))
            tries.append((seed, signature[-1], None if owner == token_id else owner))
            if tries[-1][2] is None:
                return tries
            seed += 1
            signature[-1] = _hash128(token, seed) % (self.num_buckets - 1) + 1

    @classmethod
    def from_ids(cls, ids, pad_id, num_buckets=None):
        """The table of a checkpoint that came without its tokens; ids (V, H), taken as they are.

        `num_buckets` defaults to the largest id + 1; a model made with the table sets it to its own.
        """
        ids = torch.as_tensor(ids).long()
        table = cls(ids.shape[1], num_buckets or max(2, int(ids.max()) + 1), allow_collisions=True)
        table._flat = array("i", ids.flatten().tolist())
        table.tokens = [None] * len(ids)
        table.pad_id, table.from_checkpoint = pad_id, True
        for token_id, signature in enumerate(ids.tolist()):
            if any(signature) or token_id == pad_id:
                table._owner.setdefault(_pack(signature), token_id)
        table.allow_collisions = table.num_hashes == 1
        return table

    @property
    def assigned(self):
        """BoolTensor (V,): which token ids have a signature; False for ids no token uses."""
        assigned = self.ids.any(-1)  # (V,)
        if self.pad_id is not None:
            assigned[self.pad_id] = True
        return assigned

    @property
    def first_owner(self):
        """BoolTensor (V,): the first token of every distinct signature."""
        first = torch.zeros(len(self), dtype=torch.bool)  # (V,)
        first[list(self._owner.values())] = True
        return first

    def stats(self):
        """Counts a reader wants to see: tokens, duplicates, re-hashed, largest prefix class, load."""
        loads = [torch.bincount(column, minlength=self.num_buckets)[1:] for column in self.ids.T]
        last, seed, B = self.ids[:, -1].tolist(), self.num_hashes - 1, self.num_buckets
        murmur = self.num_lsh < self.num_hashes
        return {
            "tokens": int(self.assigned.sum()),
            "duplicates": int(self.assigned.sum()) - len(self._owner),
            "rehashed": sum(
                id_ != 0 and _hash128(token, seed) % (B - 1) + 1 != id_
                for token, id_ in zip(self.tokens, last)
                if token is not None and murmur
            ),
            "largest_prefix_class": max(Counter(key >> 32 for key in self._owner).values(), default=0),
            "largest_bucket": max(int(load.max()) for load in loads),
            "mean_bucket": len(self._owner) / (B - 1),
        }


def _pack(signature):
    """A signature as one integer, 32 bits an id: much smaller than a tuple as a dictionary's key."""
    return functools.reduce(lambda key, id_: key << 32 | id_, signature)


@functools.lru_cache(maxsize=1)
def _lsh_projections(num_lsh, num_buckets):
    """The two random matrices of the locality-sensitive functions: equal wherever torch.randn is."""
    P1 = torch.randn(16000, num_lsh, 512, generator=torch.Generator().manual_seed(3407))
    P2 = torch.randn(
        512 * num_lsh, num_lsh, num_buckets - 1, generator=torch.Generator().manual_seed(3408)
    )
    return P1, F.normalize(P2, dim=-1)


def _lsh_ids(tokens, num_lsh, num_buckets):
    """Locality-sensitive ids, a list of num_lsh for each token: tokens that look alike share buckets.

    The token's character trigrams, hashed, sum rows of a random matrix; the signs of the sum are
    its code; the bucket is the one of B−1 random directions that is nearest to the code.
    """
    P1, P2 = _lsh_projections(num_lsh, num_buckets)
    ids = []
    for token in tokens:
        text = (token or b"").decode("utf-8", errors="backslashreplace")
        grams = Counter([text[i : i + 3] for i in range(len(text) - 2)] or [text])
        rows = [[_hash128(g.encode(), j) % 16000 for j in range(num_lsh)] for g in grams]
        counts = torch.tensor(list(grams.values()), dtype=torch.float32)  # (grams,)
        total = torch.stack([counts @ P1[[r[j] for r in rows], j] for j in range(num_lsh)])
        code = torch.where(total >= 0, 1.0, -1.0).flatten() / 512**0.5  # (512·num_lsh,)
        ids.append((1 + torch.einsum("v,vjb->jb", code, P2).argmax(-1)).tolist())
    return ids


# ---------------------------------------------------------------------------------------------
# Tokenizer: text <-> token ids <-> token bytes
# ---------------------------------------------------------------------------------------------


class Tokenizer:
    """A byte-level BPE in tiktoken's hands. Special tokens are never parsed out of a text."""

    # GPT-4's way of cutting a text into words, with numbers in groups of at most two digits.
    PATTERN = (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}"
        r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    )

    def __init__(self, encoding):
        self.encoding = encoding
        self.eot = encoding.eot_token

    @classmethod
    def _from_ranks(cls, name, pattern, ranks, special):
        if missing := 256 - sum(len(token) == 1 for token in ranks):
            raise ValueError(f"tokenizer {name}: {missing} of the 256 single bytes have no rank")
        return cls(
            tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        )

    @classmethod
    def named(cls, name):
        """One of tiktoken's own: gpt2, cl100k_base, o200k_base, … Its first use downloads the ranks."""
        if name not in tiktoken.list_encoding_names():
            raise ValueError(
                f"unknown tokenizer {name!r}; there are bpe:SIZE, the path of a .tiktoken file, and "
                f"{', '.join(tiktoken.list_encoding_names())}"
            )
        try:
            return cls(tiktoken.get_encoding(name))
        except Exception as error:
            raise ValueError(
                f"tokenizer {name} could not be fetched ({type(error).__name__}): its first use needs "
                "a network, or TIKTOKEN_CACHE_DIR set to a folder filled on a machine that has one"
            ) from None

    @classmethod
    def train(cls, text, vocab_size):
        """Train a BPE of vocab_size tokens, end-of-text included, on a string or an iterable of them."""
        import rustbpe

        if vocab_size < 257:
            raise ValueError(f"a byte-level BPE has at least 257 tokens, not {vocab_size}")
        bpe = rustbpe.Tokenizer()
        texts = [text] if isinstance(text, str) else text
        bpe.train_from_iterator(texts, vocab_size - 1, pattern=cls.PATTERN)
        ranks = {bytes(token): rank for token, rank in bpe.get_mergeable_ranks()}
        if len(ranks) < vocab_size - 1:
            raise ValueError(
                f"the text is too small for {vocab_size} tokens; it gives {len(ranks) + 1}"
            )
        return cls._from_ranks(f"bpe-{vocab_size}", cls.PATTERN, ranks, {"<|endoftext|>": len(ranks)})

    def save(self, folder):
        """Write `tokenizer.tiktoken` (the ranks, in tiktoken's format) and `tokenizer_meta.json`."""
        enc, folder = self.encoding, Path(folder)
        ranks = sorted(enc._mergeable_ranks.items(), key=lambda item: item[1])
        lines = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks)
        (folder / "tokenizer.tiktoken").write_text(lines, encoding="utf-8", newline="\n")
        meta = {"name": enc.name, "pattern": enc._pat_str, "special": enc._special_tokens}
        (folder / "tokenizer_meta.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")

    @classmethod
    def load(cls, path):
        """From a folder that `save` wrote, or from a lone .tiktoken file (cut by PATTERN, eot added)."""
        path = Path(path)
        file = path / "tokenizer.tiktoken" if path.is_dir() else path
        try:
            pairs = [line.split() for line in _read_text(file).splitlines() if line]
            ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
            last = max(ranks.values())
        except ValueError as error:
            raise ValueError(f"{file} is not a tokenizer in tiktoken's format: {error}") from None
        meta = {"name": path.stem, "pattern": cls.PATTERN, "special": {"<|endoftext|>": last + 1}}
        if (path / "tokenizer_meta.json").is_file():
            meta = json.loads(_read_text(path / "tokenizer_meta.json"))
        return cls._from_ranks(meta["name"], meta["pattern"], ranks, meta["special"])

    def __len__(self):
        return self.encoding.n_vocab

    def encode(self, text):
        """Token ids of a string, as a list."""
        return self.encoding.encode_ordinary(text)

    def decode(self, ids):
        """The text of token ids; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes(int(i)) or b"" for i in ids).decode("utf-8", "replace")

    def token_bytes(self, token_id):
        """The bytes of a token; None for an id below len() that the tokenizer never uses."""
        try:
            return self.encoding.decode_single_token_bytes(token_id)
        except KeyError:
            return None

    def all_bytes(self):
        """token_bytes of every id: what a SignatureTable takes."""
        return [self.token_bytes(i) for i in range(len(self))]


# ---------------------------------------------------------------------------------------------
# Gated compositional embedding (section 3.2 of the paper)
# ---------------------------------------------------------------------------------------------


class GatedEmbedding(nn.Module):
    """x = W_s (Σ_j α_j e_j) + b_s, where the gate α = softmax over j of w2 · SiLU(W1 e_j + b1) + b2."""

    def __init__(self, config):
        super().__init__()
        D, Z = config.hidden_size, config.bottle_neck_dim
        self.scorer = nn.Sequential(nn.Linear(D, Z), nn.SiLU(), nn.Linear(Z, 1))
        self.output_proj = nn.Sequential(nn.Linear(D, D))

    def forward(self, e):
        """e (..., H, D), the rows of a signature -> input vectors (..., D) and gate (..., H)."""
        gate = self.scorer(e).softmax(-2)  # (..., H, 1)
        x = self.output_proj((gate * e).sum(-2))  # (..., D)
        return x, gate.squeeze(-1)


# ---------------------------------------------------------------------------------------------
# Backbone: the Qwen3 decoder, without its embedding and its output layer
# ---------------------------------------------------------------------------------------------


def rotate(x, cos, sin):
    """Rotary position embedding, split-half: x (N, heads, T, C); cos, sin (..., T, C)."""
    first, second = x.chunk(2, dim=-1)  # (N, heads, T, C/2)
    return x * cos + torch.cat((-second, first), dim=-1) * sin  # (N, heads, T, C)


class Attention(nn.Module):
    """Grouped-query attention with RMSNorm on each query and key head, before the rotation."""

    def __init__(self, config):
        super().__init__()
        D, C, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        A, K = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(D, A * C, bias=False)
        self.k_proj = nn.Linear(D, K * C, bias=False)
        self.v_proj = nn.Linear(D, K * C, bias=False)
        self.o_proj = nn.Linear(A * C, D, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(C, eps), nn.RMSNorm(C, eps)

    def forward(self, x, cos, sin, cache=None):
        N, T, _ = x.shape
        C = self.q_norm.weight.numel()
        q = self.q_norm(self.q_proj(x).view(N, T, -1, C)).transpose(1, 2)  # (N, A, T, C)
        k = self.k_norm(self.k_proj(x).view(N, T, -1, C)).transpose(1, 2)  # (N, K, T, C)
        v = self.v_proj(x).view(N, T, -1, C).transpose(1, 2)  # (N, K, T, C)
        q, k, mask = rotate(q, cos, sin), rotate(k, cos, sin), None
        if cache is not None:
            k, v, mask = cache.update(k, v)  # (N, K, all so far, C), mask (N, 1, T, all so far)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=cache is None, enable_gqa=True
        )  # (N, A, T, C)
        return self.o_proj(y.transpose(1, 2).flatten(2))  # (N, T, D)


class FeedForward(nn.Module):
    """SwiGLU: W_down (SiLU(W_gate x) * W_up x)."""

    def __init__(self, config):
        super().__init__()
        D, wide = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(D, wide, bias=False)
        self.up_proj = nn.Linear(D, wide, bias=False)
        self.down_proj = nn.Linear(wide, D, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # (N, T, D)


class Block(nn.Module):
    """A pre-norm decoder layer."""

    def __init__(self, config):
        super().__init__()
        self.self_attn, self.mlp = Attention(config), FeedForward(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, cos, sin, cache=None):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache)  # (N, T, D)
        return x + self.mlp(self.post_attention_layernorm(x))  # (N, T, D)


class Backbone(nn.Module):
    """The embedding table (`table_rows` rows), the blocks and the final norm."""

    def __init__(self, config, table_rows):
        super().__init__()
        self.window = config.max_position_embeddings
        self.embed_tokens = nn.Embedding(table_rows, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        frequency = config.rope_theta ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        angle = torch.outer(torch.arange(self.window), frequency).repeat(1, 2)  # (window, C)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x, cache=None, return_layers=False):
        """Input vectors (N, T, D) -> states after the final norm (N, T, D) [, the layers' outputs]."""
        if x.shape[1] > self.window:
            raise ValueError(
                f"{x.shape[1]} positions exceed max_position_embeddings {self.window}; cut the input"
            )
        if cache is None:
            cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]  # (T, C)
        else:
            cos, sin = (t[cache.positions].unsqueeze(1) for t in (self.cos, self.sin))  # (N, 1, T, C)
        cos, sin, outputs = cos.to(x.dtype), sin.to(x.dtype), []
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, cache and cache.at(i))  # (N, T, D)
            outputs.append(x)
        x = self.norm(x)  # (N, T, D)
        return (x, outputs) if return_layers else x


# ---------------------------------------------------------------------------------------------
# Cascade decoder (section 3.3 of the paper)
# ---------------------------------------------------------------------------------------------


class CascadeDecoder(nn.Module):
    """Predicts the H ids one after the other, with the rows of the embedding table as weights.

    c_1 = h;   o_j = E_j c_j;   e_j = softmax(o_j)ᵀ E_j;
    c_{j+1} = c_j + W_up SiLU(W_dn [c_j ; e_j] + b_dn) + b_up, one mixer for each step.
    """

    def __init__(self, config):
        super().__init__()
        D, Z = config.hidden_size, config.bottle_neck_dim
        self.cascade_mixer = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * D, Z), nn.SiLU(), nn.Linear(Z, D))
            for _ in range(config.num_hashes - 1)
        )

    def steps(self, h, table, force=()):
        """Yields (logits o_j (..., B), soft embedding e_j (..., D); None at the last j) for each j.

        h (..., D), table (H, B, D). `force` maps functions to buckets: the soft embedding of such
        a function is that bucket's row, whatever its logits say.
        """
        c = h
        for j, E in enumerate(table):
            o = c @ E.T  # (..., B)
            if j == len(table) - 1:
                yield o, None
                return
            if j in force:
                e = E[force[j]].expand_as(c)  # (..., D)
            else:
                e = o.float().softmax(-1).to(E.dtype) @ E  # (..., D)
            yield o, e
            c = c + self.cascade_mixer[j](torch.cat((c, e), dim=-1))  # (..., D)

    def forward(self, h, table):
        """States (..., D) and table (H, B, D) -> logits (..., H, B)."""
        return torch.stack([o for o, _ in self.steps(h, table)], dim=-2)


# ---------------------------------------------------------------------------------------------
# The model
# ---------------------------------------------------------------------------------------------


class LanguageModel(nn.Module):
    """What MultiHashFormer and the standard Transformer share; they define embed, scores and loss."""

    def _initialise(self):
        """The one place of initialisation: matrices and table N(0, σ²), biases 0, norms 1."""
        for name, p in self.named_parameters():
            if p.dim() == 1:
                nn.init.constant_(p, 1.0 if name.endswith("norm.weight") else 0.0)
            elif name.endswith("embed_tokens.weight"):
                nn.init.normal_(
                    p, std=self.config.table_initializer_range or self.config.initializer_range
                )
            elif "output_proj" in name and self.config.adapter_init == "identity":
                nn.init.eye_(p)
            else:
                nn.init.normal_(p, std=self.config.initializer_range)

    def forward(self, ids, return_layers=False):
        """ids (N, T) -> states after the final norm (N, T, D) [, list of the layers' outputs]."""
        return self.model(self.embed(ids), return_layers=return_layers)

    def loss(self, ids, targets, objective="independent"):
        """Mean training loss over the counted positions, a scalar; never calibrated (section 3.4).

        ids, targets (N, T); targets are already shifted; −100 is not counted, the pad token is.
        independent (the paper): −score = −Σ_j log p_j; exact: −log of the renormalised probability;
        joint: exact + joint_weight · independent / H. The standard model has one loss for all three.
        """
        if objective not in OBJECTIVES:
            raise ValueError(f"objective is one of {', '.join(OBJECTIVES)}, not {objective!r}")
        counted = targets.flatten() != -100  # (M,)
        nll = self.nll(self(ids).flatten(0, 1), targets.flatten().clamp(min=0), objective)  # (M,)
        return torch.where(counted, nll, 0.0).sum() / counted.sum().clamp(min=1)

    def log_probs(self, ids):
        """ids (N, T) -> log P of every token at every next position (N, T, V), calibrated."""
        scores = self.token_scores(self(ids).flatten(0, 1))  # (M, V)
        return (scores / self.config.calibration).log_softmax(-1).view(*ids.shape, -1)  # (N, T, V)

    @torch.no_grad()
    def top_tokens(self, ids, k):
        """The k most probable next tokens: (log_probs, ids), each (N, T, k), without an (N, T, V) tensor."""
        h = self(ids).flatten(0, 1)  # (M, D)
        k = min(k, self.config.vocab_size)
        chunks = [
            (self.token_scores(part) / self.config.calibration).log_softmax(-1).topk(k)
            for part in h.split(max(1, 2**25 // self.config.vocab_size))
        ]
        return tuple(torch.cat(parts).view(*ids.shape, k) for parts in zip(*chunks))

    def generate(
        self, ids, max_new_tokens=100, temperature=1.0, top_k=None, top_p=None, stop=(), seed=None
    ):
        """Continue a prompt: an iterator of token ids, one step at a time.

        ids            one prompt (T,), a batch (N, T), or a list of 1-D prompts of any lengths ≥ 1
        temperature    0 is greedy; logits are score / (calibration · temperature)
        top_k, top_p   sample among exactly the k best, then among the fewest that have mass p
        stop           ids that end their row (the stop id itself is yielded)
        seed           same seed, same machine, same text; None takes PyTorch's global generator

        Yields an int for one 1-D prompt, else a LongTensor (N,) with the pad id in finished rows.
        When a row's context is full, its newest half is encoded again; a prompt longer than the
        context is treated likewise. Raises ValueError for bad arguments, before the first token.
        """
        rows, single = _prompt_rows(ids, self.config.vocab_size)
        if not temperature >= 0 or temperature == float("inf"):
            raise ValueError(f"temperature must be 0 (greedy) or positive, not {temperature}")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k must be at least 1 (None keeps all tokens), not {top_k}")
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {top_p}")
        stop = {stop} if isinstance(stop, int) else set(stop)
        return _generate(self, rows, single, max_new_tokens, (temperature, top_k, top_p), stop, seed)

    def save_pretrained(self, folder, dtype=None):
        """Write config.json, model.safetensors (published names) and the tokens' bytes into a folder.

        dtype (None: as they are) is that of the parameters in the file. Files are replaced only
        once they are complete, so saving over the checkpoint that is loaded is safe.
        """
        _save(self, Path(folder), dtype)

    @classmethod
    def from_pretrained(cls, folder, revision=None):
        """A model of this class from a checkpoint folder, a run folder or a Hugging Face hub id.

        Parameters become float32. Raises ValueError if files, keys or shapes are not the model's.
        """
        return _load(folder, revision, cls)


class MultiHashFormer(LanguageModel):
    """The model of the paper. `signatures` decide the vocabulary: config.vocab_size follows them."""

    def __init__(self, config, signatures):
        super().__init__()
        H, B = config.num_hashes, config.num_buckets
        if signatures.from_checkpoint and int(signatures.ids.max()) < B:
            signatures.num_buckets = B
        if (signatures.num_hashes, signatures.num_buckets) != (H, B):
            raise ValueError(
                f"signatures with num_hashes {signatures.num_hashes} and num_buckets "
                f"{signatures.num_buckets} do not fit a configuration with {H} and {B}"
            )
        self.config = replace(config, model="mhf", pad_token_id=signatures.pad_id)
        self.model = Backbone(config, H * B)
        self.model.combiner = GatedEmbedding(config)
        self.hash_head = CascadeDecoder(config)
        self.signatures = signatures
        self._set_signatures()
        self._initialise()

    def _set_signatures(self):
        """Buffers that follow from the signatures; only the first is part of a checkpoint."""
        table, device = self.signatures, self.model.cos.device
        H, B = self.config.num_hashes, self.config.num_buckets
        rows = table.ids + torch.arange(H) * B  # (V, H)
        self.model.register_buffer("hash_map", table.ids.clone().to(device))  # (V, H)
        self.register_buffer("rows", rows.to(device), persistent=False)
        self.register_buffer("unassigned", (~table.assigned).nonzero()[:, 0].to(device), persistent=False)
        self.register_buffer("first_owner", table.first_owner.to(device), persistent=False)  # (V,)
        self.config.vocab_size = len(table)

    @property
    def table(self):
        """E as (H, B, D): the rows of each function; both the input and the output side use them."""
        H, B = self.config.num_hashes, self.config.num_buckets
        return self.model.embed_tokens.weight.view(H, B, -1)

    def embed(self, ids, return_gate=False):
        """ids (N, T) -> input vectors (N, T, D) [, gate (N, T, H)]."""
        x, gate = self.model.combiner(self.model.embed_tokens(self.rows[ids]))  # (N, T, D), (N, T, H)
        return (x, gate) if return_gate else x

    def head_logits(self, ids):
        """ids (N, T) -> logits of every function over its buckets (N, T, H, B)."""
        return self.hash_head(self(ids), self.table)

    def _log_buckets(self, h):
        """States (M, D) -> log p_j of every bucket (M, H, B), in float32."""
        return self.hash_head(h, self.table).float().log_softmax(-1)

    def _sum_over_signatures(self, log_buckets):
        """(M, H, B) -> score of every token (M, V): Σ_j log p_j[id_j]; −inf for ids no token uses.

        Scoring the vocabulary is the transpose of embedding it: each token sums H rows of a table
        with one column for every position. `embedding_bag` does that without an (M, V, H) tensor.
        """
        columns = log_buckets.flatten(1).T.contiguous()  # (H·B, M)
        scores = F.embedding_bag(self.rows, columns, mode="sum").T  # (M, V)
        return scores.index_fill(-1, self.unassigned, -torch.inf) if len(self.unassigned) else scores

    def token_scores(self, h):
        """States (M, D) -> Σ_j log p_j of every token (M, V)."""
        return self._sum_over_signatures(self._log_buckets(h))

    def nll(self, h, targets, objective):
        """States (M, D), target ids (M,) -> training loss of each position (M,). See `loss`."""
        log_buckets = self._log_buckets(h)  # (M, H, B)
        target_ids = self.model.hash_map[targets].unsqueeze(-1)  # (M, H, 1)
        score = log_buckets.gather(-1, target_ids).sum((-2, -1))  # (M,)
        if objective == "independent":
            return -score
        exact = self._sum_over_signatures(log_buckets).logsumexp(-1) - score  # (M,)
        if objective == "exact":
            return exact
        return exact - self.config.joint_weight * score / self.config.num_hashes  # (M,)

    def scores(self, ids):
        """ids (N, T) -> Σ_j log p_j of every token (N, T, V), neither renormalised nor calibrated."""
        return self.token_scores(self(ids).flatten(0, 1)).view(*ids.shape, -1)

    def valid_mass(self, ids):
        """ids (N, T) -> the probability (N, T) that lies on signatures of real tokens, at τ = 1."""
        return self.mass_on_tokens(self.scores(ids))

    def mass_on_tokens(self, scores):
        """Scores (..., V) -> Σ exp(score) over the distinct signatures (...)."""
        return scores[..., self.first_owner].exp().sum(-1)

    def num_parameters(self):
        """Numbers of parameters by part, and what a V × D table would have cost beside them."""
        return _count(
            self,
            table=[self.model.embed_tokens],
            embedding=[self.model.combiner],
            decoder=[self.hash_head],
        )

    def expand(self, tokens):
        """Give new tokens (bytes) signatures. No parameter is added, removed or changed."""
        self.signatures.extend(tokens)
        self._set_signatures()

    def explain(self, ids, position=-1, top_k=10, force=None):
        """All that happens at one position, as a JSON-able dict: see `_explain` for its entries.

        ids            one sequence (T,) or (1, T); `position` is the one whose next token is predicted
        force          {function: bucket}, functions counted from 0: a what-if, in which the soft
                       embedding of that function is the bucket's row; later functions follow it
        """
        return _explain(self, ids, position, top_k, force)


class Transformer(LanguageModel):
    """The standard baseline: the same backbone with a tied V × D embedding and a softmax over V."""

    def __init__(self, config):
        super().__init__()
        self.config = replace(config, model="standard")
        self.model = Backbone(config, config.vocab_size)
        self._initialise()

    def embed(self, ids):
        """ids (N, T) -> input vectors (N, T, D)."""
        return self.model.embed_tokens(ids)

    def token_scores(self, h):
        """States (M, D) -> logits (M, V), in float32."""
        return (h @ self.model.embed_tokens.weight.T).float()

    def nll(self, h, targets, objective):
        """States (M, D), target ids (M,) -> cross-entropy of each position (M,)."""
        return F.cross_entropy(self.token_scores(h), targets, reduction="none")

    def num_parameters(self):
        """Numbers of parameters by part, and the size of the V × D table."""
        return _count(self, table=[self.model.embed_tokens])

    def expand(self, tokens):
        """Append one row, the mean of the present ones, for each new token."""
        old = self.model.embed_tokens.weight.detach()
        new = torch.cat((old, old.mean(0, keepdim=True).expand(len(list(tokens)), -1)))  # (V, D)
        self.model.embed_tokens = nn.Embedding.from_pretrained(new, freeze=False)
        self.config.vocab_size = len(new)

    def explain(self, ids, position=-1, top_k=10, force=None):
        """The most probable next tokens at one position; there is no signature to explain."""
        if force:
            raise ValueError("force needs hash functions; the standard model has none")
        return _explain(self, ids, position, top_k, None)


def _count(model, **parts):
    size = {name: sum(p.numel() for m in ms for p in m.parameters()) for name, ms in parts.items()}
    size = {"table": 0, "embedding": 0, "blocks": 0, "decoder": 0, **size}
    size["total"] = sum(p.numel() for p in model.parameters())
    size["blocks"] = size["total"] - size["table"] - size["embedding"] - size["decoder"]
    return {**size, "standard_table": model.config.vocab_size * model.config.hidden_size}


# ---------------------------------------------------------------------------------------------
# Generation
# ---------------------------------------------------------------------------------------------


class KVCache:
    """Keys and values of all positions so far, in place: row n's position p stands at index p.

    Rows may have different lengths. What stands beyond a row's length (the padding of a shorter
    prompt) is masked until the row itself overwrites it.
    """

    def __init__(self, config, num_rows, size, like):
        K, C = config.num_key_value_heads, config.head_dim
        self.keys = like.new_zeros(config.num_hidden_layers, num_rows, K, size, C)
        self.values = torch.zeros_like(self.keys)
        self.row = torch.arange(num_rows, device=like.device).unsqueeze(-1)  # (N, 1)

    def place(self, positions, length):
        """Where the next input's tokens stand: positions (N, T), all below `length`."""
        self.positions, self.length = positions, length
        index = torch.arange(length, device=positions.device)
        self.mask = (index <= positions.unsqueeze(-1)).unsqueeze(1)  # (N, 1, T, length)

    def at(self, layer):
        self.layer = layer
        return self

    def update(self, k, v):
        """Store k, v (N, K, T, C); return all keys, all values (N, K, length, C) and the mask."""
        keys, values = self.keys[self.layer], self.values[self.layer]
        keys[self.row, :, self.positions] = k.transpose(1, 2).to(keys.dtype)
        values[self.row, :, self.positions] = v.transpose(1, 2).to(values.dtype)
        return keys[:, :, : self.length], values[:, :, : self.length], self.mask


def _prompt_rows(ids, vocab_size):
    """Prompts as a list of lists of ints, and whether it was one 1-D prompt."""
    if isinstance(ids, (torch.Tensor, np.ndarray)):
        ids = ids.tolist()
    ids = list(ids)
    single = all(not hasattr(i, "__len__") or getattr(i, "ndim", 1) == 0 for i in ids)
    rows = [[int(i) for i in row] for row in ([ids] if single else ids)]
    if not rows or not all(rows):
        raise ValueError("a prompt needs at least one token; this one is empty")
    for token_id in {i for row in rows for i in row}:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"token id {token_id} is outside the vocabulary, 0 to {vocab_size - 1}")
    return rows, single


def _sample(logits, temperature, top_k, top_p, generator):
    """One id (N,) from each row of logits (N, V)."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # (N, V)
    if top_k is None and top_p is None:
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    logits, ids = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]))  # best first
    probs = logits.softmax(-1)
    if top_p is not None:  # drop a token when those before it already have mass p
        probs = probs.masked_fill(probs.cumsum(-1) - probs >= top_p, 0.0)
    chosen = torch.multinomial(probs, 1, generator=generator)  # (N, 1)
    return ids.gather(-1, chosen)[:, 0]


@torch.no_grad()
def _next_states(model, contexts, cache, whole):
    """States (N, D) of each context's last position; encodes the contexts whole, or their last token."""
    device, size = model.model.cos.device, max(map(len, contexts))
    last = torch.tensor([len(c) - 1 for c in contexts], device=device)  # (N,)
    if whole:  # padded on the right: causal attention never looks there
        ids = torch.tensor([c + [c[-1]] * (size - len(c)) for c in contexts], device=device)  # (N, T)
        cache.place(torch.arange(size, device=device).expand_as(ids), size)
    else:
        ids = torch.tensor([c[-1:] for c in contexts], device=device)  # (N, 1)
        cache.place(last.unsqueeze(-1), size)
    h = model.model(model.embed(ids), cache)  # (N, T or 1, D)
    return h[torch.arange(len(contexts)), last] if whole else h[:, 0]


def _generate(model, contexts, single, max_new_tokens, sampling, stop, seed):
    config = model.config
    window, weight = config.max_position_embeddings, model.model.embed_tokens.weight
    generator = None if seed is None else torch.Generator(weight.device).manual_seed(seed)
    done, cache = [False] * len(contexts), None
    for _ in range(max_new_tokens):
        whole = cache is None or max(map(len, contexts)) > window
        if whole:
            contexts = [c if len(c) <= window else c[-max(1, window // 2) :] for c in contexts]
            size = min(window, max(map(len, contexts)) + max_new_tokens)
            cache = KVCache(config, len(contexts), size, weight)
        h = _next_states(model, contexts, cache, whole)  # (N, D)
        with torch.no_grad():
            logits = model.token_scores(h) / config.calibration  # (N, V)
            new = _sample(logits, *sampling, generator).tolist()
        for n, token_id in enumerate(new):
            if done[n]:
                new[n] = config.pad_token_id or 0
            else:
                contexts[n] = contexts[n] + [token_id]
                done[n] = token_id in stop
        yield new[0] if single else torch.tensor(new)
        if all(done):
            return


# ---------------------------------------------------------------------------------------------
# Explaining one prediction
# ---------------------------------------------------------------------------------------------


def _token_entry(model, token_id):
    """id, bytes, text and signature of a token; None where they are not known."""
    signatures = getattr(model, "signatures", None)
    raw = signatures.tokens[token_id] if signatures else None
    return {
        "id": token_id,
        "bytes": None if raw is None else list(raw),
        "text": None if raw is None else raw.decode("utf-8", errors="backslashreplace"),
        "signature": signatures and signatures.ids[token_id].tolist(),
    }


@torch.no_grad()
def _explain(model, ids, position, top_k, force):
    """The dict of `explain`; probabilities are natural, entropies in bits, functions count from 0.

    tokens         of every input token: id, bytes, text, signature, gate, gate_scores
    functions      of each: top buckets (bucket, prob, log_prob, tokens in it, most probable first),
                   entropy_bits, soft_embedding_norm, forced, and the real tokens compatible with
                   the top (or forced) bucket of this and all earlier functions: how many, their mass
    top_tokens     of the best: log_p of each function, score, joint_prob, log_prob_paper (τ = 1) and
                   log_prob (calibrated)
    valid_mass     probability on the signatures of real tokens
    """
    (row,), _ = _prompt_rows(ids, model.config.vocab_size)
    if not -len(row) <= position < len(row):
        raise ValueError(f"position {position} is outside the {len(row)} tokens")
    if not 1 <= top_k <= model.config.vocab_size:
        raise ValueError(f"top_k must be from 1 to {model.config.vocab_size}, not {top_k}")
    ids = torch.tensor([row], device=model.model.cos.device)  # (1, T)
    h = model(ids)[0, position]  # (D,)
    scores = model.token_scores(h.unsqueeze(0))[0]  # (V,)
    tokens = [_token_entry(model, i) for i in row]
    result = {"schema": 1, "position": position % len(row), "tokens": tokens}
    if isinstance(model, MultiHashFormer):
        _, gate = model.embed(ids, return_gate=True)  # (1, T, H)
        gate_scores = model.model.combiner.scorer(model.model.embed_tokens(model.rows[ids[0]]))
        for i, token in enumerate(tokens):
            token["gate"], token["gate_scores"] = gate[0, i].tolist(), gate_scores[i, :, 0].tolist()
        force = _checked_force(model.config, force)
        steps = list(model.hash_head.steps(h, model.table, force))
        log_buckets = torch.stack([o for o, _ in steps]).float().log_softmax(-1)  # (H, B)
        scores = model._sum_over_signatures(log_buckets.unsqueeze(0))[0]  # (V,)
        result["forced"] = {str(j): b for j, b in force.items()}
        result["valid_mass"] = model.mass_on_tokens(scores).item()
        result["functions"] = _explain_functions(model, log_buckets, scores, steps, top_k, force)
    paper = scores.log_softmax(-1)  # (V,)
    calibrated = (scores / model.config.calibration).log_softmax(-1)  # (V,)
    result["calibration"], result["top_tokens"] = model.config.calibration, []
    for i in scores.topk(top_k).indices.tolist():
        entry = _token_entry(model, i) | {"score": scores[i].item()}
        entry |= {"log_prob_paper": paper[i].item(), "log_prob": calibrated[i].item()}
        if "functions" in result:
            entry["log_p"] = [log_buckets[j, b].item() for j, b in enumerate(entry["signature"])]
            entry["joint_prob"] = scores[i].exp().item()
        result["top_tokens"].append(entry)
    return result


def _checked_force(config, force):
    force = {int(j): int(bucket) for j, bucket in (force or {}).items()}
    for j, bucket in force.items():
        if not (0 <= j < config.num_hashes and 0 <= bucket < config.num_buckets):
            raise ValueError(
                f"force {{{j}: {bucket}}}: functions are 0 to {config.num_hashes - 1}, "
                f"buckets 0 to {config.num_buckets - 1}"
            )
    return force


def _explain_functions(model, log_buckets, scores, steps, top_k, force):
    probs, hash_map = scores.softmax(-1), model.model.hash_map
    compatible = torch.isfinite(scores)  # (V,) real tokens still possible
    functions = []
    for j, (_, soft) in enumerate(steps):
        top = log_buckets[j].topk(min(top_k, log_buckets.shape[-1]))
        buckets = []
        for log_p, bucket in zip(top.values.tolist(), top.indices.tolist()):
            members = (hash_map[:, j] == bucket).logical_and(scores.isfinite()).nonzero()[:, 0]
            best = members[scores[members].argsort(descending=True)[:top_k]].tolist()
            entry = {"bucket": bucket, "log_prob": log_p, "prob": float(np.exp(log_p))}
            entry["num_tokens"] = len(members)
            entry["tokens"] = [_token_entry(model, i) for i in best]
            buckets.append(entry)
        compatible = compatible & (hash_map[:, j] == force.get(j, buckets[0]["bucket"]))
        p = log_buckets[j].exp()
        functions.append(
            {
                "function": j,
                "top": buckets,
                "entropy_bits": torch.special.entr(p).sum().item() / float(np.log(2)),
                "soft_embedding_norm": None if soft is None else soft.norm().item(),
                "forced": force.get(j),
                "compatible": int(compatible.sum()),
                "compatible_mass": probs[compatible].sum().item(),
            }
        )
    return functions


# ---------------------------------------------------------------------------------------------
# Presets, saving, loading
# ---------------------------------------------------------------------------------------------

_LARGE = dict(num_buckets=16384, vocab_size=32768, max_position_embeddings=2048)

PRESETS = {  # tiny and small are ours, the others the paper's; its H3B10K is num_hashes 3, num_buckets 10624
    "tiny": dict(num_hidden_layers=6),
    "small": dict(
        num_hidden_layers=8, hidden_size=512, num_attention_heads=8, intermediate_size=1536,
        num_buckets=2048, max_position_embeddings=512,
    ),
    "100m": dict(
        num_hidden_layers=12, hidden_size=768, num_attention_heads=12, intermediate_size=2560, **_LARGE
    ),
    "1b": dict(
        num_hidden_layers=20, hidden_size=2048, num_attention_heads=16, num_key_value_heads=8,
        intermediate_size=6144, **_LARGE,
    ),
    "3b": dict(
        num_hidden_layers=36, hidden_size=2048, num_attention_heads=16, intermediate_size=11008, **_LARGE
    ),
}  # fmt: skip

PUBLISHED = {  # keys of the published config.json that this implementation fixes or does not use
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "float32",
    "fused_decoding": False,
    "hidden_act": "silu",
    "lsh_only_embed": False,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "sliding_window": None,
    "tie_word_embeddings": True,
    "transformers_version": "5.3.0",
    "use_cache": True,
    "use_sliding_window": False,
}


def _read_text(path):
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except (UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path} cannot be read as UTF-8 text: {error}") from None


def _save(model, folder, dtype):
    from huggingface_hub import save_torch_state_dict  # imported here: only saving needs it

    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    tensors = model.state_dict()
    if dtype is not None:
        tensors = {k: t.to(dtype) if t.is_floating_point() else t for k, t in tensors.items()}
    stored = next(t.dtype for t in tensors.values() if t.is_floating_point())
    config = replace(model.config, extra=model.config.extra | {"dtype": str(stored).split(".")[-1]})
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as temporary:
        new = Path(temporary)
        config.to_json(new / "config.json")
        tokens = getattr(getattr(model, "signatures", None), "tokens", [])
        if any(token is not None for token in tokens):  # one line a token, base64; "-" has none
            lines = ("-" if t is None else base64.b64encode(t).decode() for t in tokens)
            (new / "tokens.txt").write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
        save_torch_state_dict(tensors, new, metadata={"format": "pt"})
        written = {file.name for file in new.iterdir()}
        for name in sorted(written):
            os.replace(new / name, folder / name)
    for stale in (*folder.glob("model*.safetensors*"), folder / "tokens.txt"):
        if stale.name not in written:
            stale.unlink(missing_ok=True)


def find_checkpoint(name, revision=None):
    """The folder of a checkpoint: itself, the last one of a run folder, or a hub id's download."""
    folder = Path(name)
    if (folder / "last").is_file() and not (folder / "config.json").exists():
        folder = folder / _read_text(folder / "last").strip()
    if folder.is_dir():
        return folder
    owner, _, repository = str(name).partition("/")
    if not repository or "/" in repository or Path(owner).exists():
        raise ValueError(f"there is no checkpoint folder {name}")
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.tiktoken", "tokens.txt"]
        return Path(snapshot_download(str(name), revision=revision, allow_patterns=patterns))
    except Exception as error:
        raise ValueError(
            f"{name} is neither a folder here nor could it be fetched from the Hugging Face hub "
            f"(revision {revision or 'main'}): {type(error).__name__}"
        ) from None


def _read_tensors(folder):
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index, tensors = folder / "model.safetensors.index.json", {}
    names = ["model.safetensors"]
    if not (folder / names[0]).exists() and index.exists():
        names = sorted(set(json.loads(_read_text(index))["weight_map"].values()))
    for name in names:
        try:
            tensors |= load_file(folder / name)
        except FileNotFoundError:
            raise ValueError(f"checkpoint {folder} is incomplete: it has no {name}") from None
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{folder / name} is damaged or not safetensors: {error}") from None
    return tensors


def _stored_signatures(config, ids, folder):
    """The table of a checkpoint. Its stored ids win over those that this code would make."""
    pad, B = config.pad_token_id, config.num_buckets
    table = SignatureTable.from_ids(ids, pad, B)
    file = folder / "tokens.txt"
    if file.exists():
        lines = _read_text(file).splitlines()
        tokens = [None if line == "-" else base64.b64decode(line) for line in lines]
        duplicates = table.allow_collisions or table.stats()["duplicates"] > 0
        rebuilt = SignatureTable(ids.shape[1], B, config.num_lsh, allow_collisions=duplicates)
        rebuilt.extend(tokens, pad_id=pad)
        if rebuilt.ids.shape == ids.shape:
            if torch.equal(rebuilt.ids, ids):
                return rebuilt
            different = int((rebuilt.ids != ids).any(-1).sum())
        table.tokens, different = tokens, different
        table.locked = f"{different} of {len(ids)} signatures differ from what this code makes"
        print(f"{folder}: {table.locked}; the stored ones are used")
    elif duplicates := table.stats()["duplicates"]:
        print(f"{folder}: {duplicates} tokens share another's signature; they are used as stored")
    return table


def _load(name, revision, cls):
    folder = find_checkpoint(name, revision)
    config = Config.from_json(folder / "config.json")
    cls = cls or {"mhf": MultiHashFormer, "standard": Transformer}[config.model]
    if cls is not {"mhf": MultiHashFormer, "standard": Transformer}[config.model]:
        raise ValueError(f"{folder} holds a {config.model} model; use load() or its own class")
    tensors = _read_tensors(folder)
    head = tensors.pop("lm_head.weight", None)
    if head is not None and not torch.equal(head, tensors.get("model.embed_tokens.weight", head)):
        raise ValueError(f"{folder}: lm_head.weight differs from the table; untied weights are not supported")
    if config.model == "mhf":
        if "model.hash_map" not in tensors:
            raise ValueError(f"{folder} has no model.hash_map: not a MultiHashFormer checkpoint")
        model = cls(config, _stored_signatures(config, tensors["model.hash_map"].long(), folder))
    else:
        model = cls(config)
    own = model.state_dict()
    missing, unknown = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    wrong = [k for k in own.keys() & tensors.keys() if own[k].shape != tensors[k].shape]
    if missing or unknown or wrong:
        shapes = [f"{k} {tuple(tensors[k].shape)} instead of {tuple(own[k].shape)}" for k in sorted(wrong)]
        raise ValueError(
            f"{folder} does not fit this mhf.py; missing keys: {_some(missing)}; unknown keys: "
            f"{_some(unknown)}; wrong shapes: {_some(shapes)}; load it with the mhf.py that made it"
        )
    model.load_state_dict(tensors)
    return model.eval()


def _some(names):
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if names[6:] else "") or "none"


def load(folder, revision=None):
    """A MultiHashFormer or a Transformer, whichever the folder (or hub id) holds."""
    return _load(folder, revision, None)
