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
import copy
import functools
import itertools
import json
import os
import re
import struct
import sys
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
from torch.utils.checkpoint import checkpoint

OBJECTIVES = ("independent", "exact", "joint")
HEADS = ("plain", "lean")
RECOMPUTE = dict(use_reentrant=False, preserve_rng_state=False)  # nothing is random


def _one_of(name, value, allowed):
    if value not in allowed:
        raise ValueError(f"{name} is one of {', '.join(allowed)}, not {value!r}")


# ---------------------------------------------------------------------------------------------
# Configuration
# ---------------------------------------------------------------------------------------------


@dataclass
class Config:
    """All that shapes the model, in the names of the published `config.json` (Qwen3's names).

    Raises ValueError, with the field and its value, if the fields do not fit each other.
    """

    vocab_size: int = 8192  # V; a MultiHashFormer takes it from its signatures
    hidden_size: int = 128  # D
    num_hidden_layers: int = 4
    num_attention_heads: int = 2  # A
    num_key_value_heads: int = 1  # K
    head_dim: int | None = None  # C; D / A if not given
    intermediate_size: int = 384  # width of the feed-forward layer
    num_hashes: int = 4  # H
    num_buckets: int = 2048  # B
    num_lsh: int = 0  # how many of the H functions are locality-sensitive
    bottle_neck_dim: int = 64  # Z
    max_position_embeddings: int = 256  # longest context, and the length of a training sequence
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02  # standard deviation of all matrices at the start
    # Deviation: the paper has neither of these two; None and "normal" are the paper.
    table_initializer_range: float | None = None  # of the embedding table alone
    adapter_init: str = "normal"  # or "identity": W_s starts as the identity matrix
    pad_token_id: int | None = 0  # end of text in the published models
    model: str = "mhf"  # or "standard"
    objective: str = "independent"  # of training: independent (the paper), exact or joint
    joint_weight: float = 0.25  # λ of the joint objective
    calibration: float = 1.0  # τ, by which scores are divided before the softmax; 1: the paper
    extra: dict = field(default_factory=dict, repr=False)  # unknown config.json keys, kept

    def __post_init__(self):
        lowest = {"num_buckets": 2, "num_lsh": 0, "pad_token_id": 0, "head_dim": 2}
        for f in fields(self):
            value, low = getattr(self, f.name), lowest.get(f.name, 1)
            if value is None and f.type in (int, float):
                raise ValueError(f"{f.name} must be a number, not None")
            whole = type(value) is int and value >= low
            if f.type in (int, int | None) and value is not None and not whole:
                raise ValueError(f"{f.name} must be a whole number ≥ {low}, not {value!r}")
            positive = isinstance(value, (int, float)) and 0 < value < float("inf")
            if f.type in (float, float | None) and value is not None and not positive:
                raise ValueError(f"{f.name} must be a positive number, not {value!r}")
        D, A, K = self.hidden_size, self.num_attention_heads, self.num_key_value_heads
        if self.head_dim is None and D % A:
            raise ValueError(f"hidden_size {D} does not divide by num_attention_heads {A}")
        self.head_dim = self.head_dim or D // A
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary positions need pairs")
        if A % K:
            raise ValueError(f"num_attention_heads {A} does not divide by num_key_value_heads {K}")
        if self.num_lsh > self.num_hashes:
            raise ValueError(f"num_lsh {self.num_lsh} exceeds num_hashes {self.num_hashes}")
        _one_of("model", self.model, ("mhf", "standard"))
        _one_of("adapter_init", self.adapter_init, ("normal", "identity"))
        _one_of("objective", self.objective, OBJECTIVES)

    @property
    def shares_signatures(self):
        """Whether no function is left to re-hash: tokens share signatures (single-ID, all LSH)."""
        return self.num_hashes in (1, self.num_lsh)

    @classmethod
    def preset(cls, name, extra_layers=0, **overrides):
        """One of PRESETS, `extra_layers` deeper, with `overrides` for its fields."""
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; there are {', '.join(PRESETS)}")
        settings = PRESETS[name] | overrides
        settings["num_hidden_layers"] += extra_layers
        return cls(**settings)

    def to_json(self, path=None):
        """The text of a config.json in the published format; also written to `path` if given."""
        ours = asdict(self)
        theta, extra = ours.pop("rope_theta"), ours.pop("extra")
        ours["rope_parameters"] = {"rope_theta": theta, "rope_type": "default"}
        ours["use_conditional_prob"] = self.objective != "independent"
        ours["layer_types"] = ["full_attention"] * self.num_hidden_layers
        if self.model == "standard":  # a plain Qwen3 config, which other software loads, too
            for name in ("num_hashes", "num_buckets", "num_lsh", "bottle_neck_dim", "adapter_init"):
                del ours[name]
        ends = {"bos_token_id": self.pad_token_id, "eos_token_id": self.pad_token_id}
        text = json.dumps(PUBLISHED | ends | extra | ours, indent=2, sort_keys=True) + "\n"
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, source):
        """From the text of a config.json, or the path of one. Unknown keys are kept in `extra`.

        Raises ValueError, by name and value, for what this implementation does not do.
        """
        text = str(source)
        try:
            given = json.loads(text if text.lstrip().startswith("{") else _read_text(Path(text)))
        except json.JSONDecodeError as error:
            raise ValueError(f"config.json is not valid JSON: {error}") from None
        if not isinstance(given, dict):
            raise ValueError(f"config.json must be a JSON object, not {given!r}")
        rope = given.pop("rope_parameters", None) or given.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise ValueError(f"config.json: rope_parameters must be a JSON object, not {rope!r}")
        found = given | rope | {"rope_type": rope.get("rope_type", rope.get("type", "default"))}
        for name, only in SUPPORTED.items():
            if (value := found.get(name, only)) != only and value is not None:
                raise ValueError(f"config.json: {name} {value!r} is not supported")
        given["rope_theta"] = rope.get("rope_theta", given.get("rope_theta", 1e6))
        given.setdefault("model", "mhf" if "num_hashes" in given else "standard")
        exact = given.pop("use_conditional_prob", False)
        given.setdefault("objective", "exact" if exact else "independent")
        given.pop("layer_types", None)
        known = {f.name for f in fields(cls)} - {"extra"} & given.keys()
        extra = {k: v for k, v in given.items() if k not in known}
        return cls(**{k: given[k] for k in known}, extra=extra)


# ---------------------------------------------------------------------------------------------
# Signatures (section 3.1 of the paper)
# ---------------------------------------------------------------------------------------------


class SignatureTable:
    """Gives every token a unique signature of H ids, each from 1 to B−1; the pad has (0, …, 0).

    id_j = murmurhash3_x64_128(token, seed=j) mod (B−1) + 1. If an earlier token has the signature,
    only the last id changes: its seed becomes H, H+1, … until the signature is free. Once given, a
    signature never changes. Deviation: the authors' code forgets some earlier tokens after such a
    re-hash and makes duplicates; here uniqueness is a guarantee, and where their table is free of
    duplicates the two are equal.

    num_lsh: the first num_lsh functions are locality-sensitive instead, see `_lsh_ids`.
    allow_collisions: nothing is re-hashed, tokens may share a signature, as with H = 1 they must.
    """

    def __init__(self, num_hashes, num_buckets, num_lsh=0, allow_collisions=False):
        if num_hashes < 1 or num_buckets < 2 or not 0 <= num_lsh <= num_hashes:
            raise ValueError(
                "num_hashes ≥ 1, num_buckets ≥ 2 and num_lsh from 0 to num_hashes are needed, "
                f"not {num_hashes}, {num_buckets} and {num_lsh}"
            )
        if not allow_collisions and (num_hashes == 1 or num_lsh == num_hashes):
            raise ValueError(
                f"num_hashes {num_hashes} with num_lsh {num_lsh} leaves no id to re-hash: tokens "
                "will share signatures; pass allow_collisions=True if that is meant"
            )
        self.num_hashes, self.num_buckets, self.num_lsh = num_hashes, num_buckets, num_lsh
        self.allow_collisions, self.pad_id = allow_collisions, None
        self.tokens = []  # bytes of every token id; None where an id has no token
        self.rehashed = []  # ids of the tokens whose first signature was taken
        self.from_checkpoint = False  # made by from_ids, without the tokens
        self.locked = None  # the reason why nothing can be added, if there is one
        self._flat = array("i")  # V·H ids
        self._owner = {}  # packed signature -> lowest token id that has it
        self._known = {}  # token -> token id
        self._ids = torch.empty(0, num_hashes, dtype=torch.long)

    def __len__(self):
        return len(self._flat) // self.num_hashes

    @property
    def ids(self):
        """LongTensor (V, H): the signature of every token; zeros for the pad and for unused ids."""
        if len(self._ids) != len(self):
            flat = torch.from_numpy(np.array(self._flat, dtype=np.int64))
            self._ids = flat.view(-1, self.num_hashes)  # (V, H)
        return self._ids

    def add(self, token, pad=False):
        """Register one token (bytes); returns its signature, H ints. Errors: as `extend`."""
        self.extend([token], pad_id=len(self) if pad else None)
        return tuple(self._flat[-self.num_hashes :])

    def extend(self, tokens, pad_id=None):
        """Register tokens (bytes) in token-id order; None stands for an id that is never used.

        `pad_id` is the token id of the pad, if it is among them. Raises ValueError, and leaves the
        table as it was, for a token that is registered already, a second pad, more tokens than
        signatures, and a prefix (the first H−1 ids) whose B−1 last ids are all taken.
        """
        tokens, start = list(tokens), len(self)
        for token in tokens:
            if not (token is None or isinstance(token, bytes)):
                raise ValueError(f"token {token!r} is not bytes")
        if self.locked:
            raise ValueError(f"no token can be added: {self.locked}")
        if pad_id is not None and not 0 <= pad_id - start < len(tokens):
            raise ValueError(f"pad_id {pad_id} is not among the new ids, which start at {start}")
        if pad_id is not None and self.pad_id is not None:
            raise ValueError(f"pad_id {pad_id}: the table has a pad already, {self.pad_id}")
        capacity = (self.num_buckets - 1) ** self.num_hashes + 1
        wanted = len(self._owner) + len(tokens) - tokens.count(None)
        if wanted > capacity and not self.allow_collisions:
            raise ValueError(
                f"{wanted} tokens do not fit: num_hashes {self.num_hashes} and num_buckets "
                f"{self.num_buckets} make {capacity} signatures; one of them must be larger"
            )
        local = _lsh_ids(tokens, self.num_lsh, self.num_buckets)
        if len(tokens) > 1:
            _lsh_projections.cache_clear()  # hundreds of megabytes
        try:
            for token_id, token in enumerate(tokens, start):
                self._register(token_id, token, token_id == pad_id, local[token_id - start])
        except ValueError:
            self._forget(start)
            raise

    def _register(self, token_id, token, is_pad, local):
        if token in self._known:
            raise ValueError(f"token {token!r} is there twice, as {self._known[token]}, {token_id}")
        signature = [0] * self.num_hashes
        if is_pad:
            self.pad_id = token_id
        elif token is not None:
            signature = self._free_signature(token_id, token, local)
        if is_pad or token is not None:
            self._owner.setdefault(_pack(signature), token_id)
        if token is not None:
            self._known[token] = token_id
        self.tokens.append(token)
        self._flat.extend(signature)

    def _tries(self, token, local):
        """Yields (seed of the last id, signature), first as hashed, then re-hashed without end."""
        last = self.num_buckets - 1
        murmur = range(len(local), self.num_hashes)
        signature = [*local, *(_hash128(token, j) % last + 1 for j in murmur)]
        yield self.num_hashes - 1, signature
        for seed in itertools.count(self.num_hashes):
            yield seed, signature[:-1] + [_hash128(token, seed) % last + 1]

    def _free_signature(self, token_id, token, local):
        for seed, signature in self._tries(token, local):
            if self.allow_collisions or _pack(signature) not in self._owner:
                return signature
            if seed < self.num_hashes:
                self._check_room(token, signature)
                self.rehashed.append(token_id)

    def _check_room(self, token, signature):
        """ValueError if the token's prefix has no free last id: re-hashing would not end."""
        prefix = _pack(signature) - signature[-1]
        if all(prefix + last in self._owner for last in range(1, self.num_buckets)):
            raise ValueError(
                f"token {token!r}: all {self.num_buckets - 1} signatures that start with "
                f"{signature[:-1]} are taken; num_buckets or num_hashes must be larger"
            )

    def _forget(self, start):
        """Take back all tokens from id `start` on."""
        self._owner = {key: i for key, i in self._owner.items() if i < start}
        self._known = {token: i for token, i in self._known.items() if i < start}
        self.rehashed = [i for i in self.rehashed if i < start]
        self.pad_id = None if self.pad_id is None or self.pad_id >= start else self.pad_id
        del self.tokens[start:], self._flat[start * self.num_hashes :]

    def lookup(self, signature):
        """The (lowest) token id that has this signature, or None."""
        if len(signature) != self.num_hashes or not all(0 <= i < 2**32 for i in signature):
            return None
        return self._owner.get(_pack(signature))

    def trace(self, token):
        """The tries by which a token, registered or not, got or would get its last id.

        A list of (seed, last id, id of the token that had the signature, or None); the last entry
        has None; the pad gives []. Raises ValueError for a table made by `from_ids`.
        """
        if not isinstance(token, bytes):
            raise ValueError(f"token {token!r} is not bytes")
        if self.from_checkpoint:
            raise ValueError("this table has stored ids without their tokens: nothing to trace")
        own, tries = self._known.get(token), []
        if own is not None and own == self.pad_id:
            return tries
        for seed, signature in self._tries(
            token, _lsh_ids([token], self.num_lsh, self.num_buckets)[0]
        ):
            owner = None if self.allow_collisions else self.lookup(signature)
            tries.append((seed, signature[-1], None if owner == own else owner))
            if tries[-1][2] is None:
                return tries
            if own is None and len(tries) == 1:
                self._check_room(token, signature)

    @classmethod
    def from_ids(cls, ids, pad_id, num_buckets=None):
        """The table of a checkpoint without its tokens: ids (V, H), taken as they are.

        `num_buckets` defaults to the largest id + 1; the model that takes the table sets its own.
        """
        ids = torch.as_tensor(ids).long()
        if ids.dim() != 2 or ids.min() < 0:
            raise ValueError(f"ids are (V, H), from 0; these are of shape {tuple(ids.shape)}")
        table = cls(ids.shape[1], num_buckets or max(2, int(ids.max()) + 1), allow_collisions=True)
        table.allow_collisions = table.num_hashes == 1
        table.pad_id, table.from_checkpoint = pad_id, True
        table.tokens, table._flat = [None] * len(ids), array("i", ids.flatten().tolist())
        for token_id, signature in enumerate(ids.tolist()):
            if any(signature) or token_id == pad_id:
                table._owner.setdefault(_pack(signature), token_id)
        return table

    @property
    def assigned(self):
        """BoolTensor (V,): False for ids that no token uses."""
        assigned = self.ids.any(-1)  # (V,)
        if self.pad_id is not None:
            assigned[self.pad_id] = True
        return assigned

    @property
    def first_owner(self):
        """BoolTensor (V,): True for the first token of every distinct signature."""
        first = torch.zeros(len(self), dtype=torch.bool)  # (V,)
        first[list(self._owner.values())] = True
        return first

    def stats(self):
        """Counts: tokens, duplicates, rehashed, largest_prefix_class, largest and mean bucket."""
        loads = [torch.bincount(column, minlength=2)[1:].max() for column in self.ids.T]
        tokens, distinct = int(self.assigned.sum()), len(self._owner)
        return {
            "tokens": tokens,
            "duplicates": tokens - distinct,
            "rehashed": len(self.rehashed),
            "largest_prefix_class": max(
                Counter(key >> 32 for key in self._owner).values(), default=0
            ),
            "largest_bucket": int(max(loads)),
            "mean_bucket": tokens / (self.num_buckets - 1),
        }


_hash128 = mmh3.mmh3_x64_128_uintdigest  # (bytes, seed) -> unsigned 128-bit integer


def _pack(signature):
    """A signature as one integer, 32 bits an id: a third of a tuple's memory as a key."""
    return int.from_bytes(struct.pack(f">{len(signature)}I", *signature), "big")


@functools.lru_cache(maxsize=1)
def _lsh_projections(num_lsh, num_buckets):
    """The two random matrices of the locality-sensitive functions, from fixed seeds."""
    one, two = (torch.Generator().manual_seed(seed) for seed in (3407, 3408))
    P1 = torch.randn(16000, num_lsh, 512, generator=one)
    P2 = torch.randn(512 * num_lsh, num_lsh, num_buckets - 1, generator=two)
    return P1, F.normalize(P2, dim=-1)


def _lsh_ids(tokens, num_lsh, num_buckets):
    """Locality-sensitive ids, num_lsh for each token: tokens that look alike share buckets.

    The token's character trigrams, hashed, sum rows of a random matrix; the signs of the sum are
    its code; its bucket is the nearest of B−1 random directions. Two platforms may draw different
    matrices, so the ids in a checkpoint win over ids made anew.
    """
    if not num_lsh or not tokens:
        return [[]] * len(tokens)
    P1, P2 = _lsh_projections(num_lsh, num_buckets)
    codes = []
    for token in tokens:
        text = (token or b"").decode("utf-8", errors="backslashreplace")
        grams = Counter([text[i : i + 3] for i in range(len(text) - 2)] or [text])
        rows = [[_hash128(g.encode(), j) % 16000 for g in grams] for j in range(num_lsh)]
        counts = torch.tensor(list(grams.values()), dtype=torch.float32)  # (grams,)
        total = torch.stack([counts @ P1[rows[j], j] for j in range(num_lsh)])  # (num_lsh, 512)
        codes.append(torch.where(total >= 0, 1.0, -1.0).flatten() / 512**0.5)  # (512·num_lsh,)
    ids = []
    for part in torch.stack(codes).split(256):
        nearest = torch.einsum("nv,vjb->njb", part, P2).argmax(-1)  # (256, num_lsh)
        ids += (1 + nearest).tolist()
    return ids


# ---------------------------------------------------------------------------------------------
# Tokenizer: text <-> token ids <-> token bytes
# ---------------------------------------------------------------------------------------------


class Tokenizer:
    """A byte-level BPE in tiktoken's hands. Special tokens are never read out of a text."""

    # How GPT-4 cuts a text into words, before merges.
    PATTERN = (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    )

    def __init__(self, name, pattern, ranks, special):
        if missing := 256 - sum(len(token) == 1 for token in ranks):
            raise ValueError(f"tokenizer {name}: {missing} of the 256 single bytes have no rank")
        self.encoding = tiktoken.Encoding(
            name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
        )
        self.eot = self.encoding.eot_token

    @classmethod
    def named(cls, name):
        """One of tiktoken's: gpt2, cl100k_base, o200k_base, … The first use downloads its ranks."""
        if name not in (names := tiktoken.list_encoding_names()):
            raise ValueError(f"unknown tokenizer {name!r}; tiktoken has {', '.join(names)}")
        try:
            enc = tiktoken.get_encoding(name)
        except Exception as error:
            raise ValueError(
                f"tokenizer {name} could not be fetched ({type(error).__name__}): its first use "
                "needs a network, or TIKTOKEN_CACHE_DIR naming a folder that was filled with one"
            ) from None
        return cls(name, enc._pat_str, enc._mergeable_ranks, enc._special_tokens)

    @classmethod
    def train(cls, text, vocab_size):
        """Train on a string, or an iterable of them; vocab_size counts the end-of-text token."""
        import rustbpe

        if vocab_size < 257:
            raise ValueError(f"a byte-level BPE has at least 257 tokens, not {vocab_size}")
        bpe = rustbpe.Tokenizer()
        texts = [text] if isinstance(text, str) else text
        bpe.train_from_iterator(texts, vocab_size - 1, pattern=cls.PATTERN)
        ranks = {bytes(token): rank for token, rank in bpe.get_mergeable_ranks()}
        if (size := len(ranks) + 1) < vocab_size:
            raise ValueError(f"the text is too small for {vocab_size} tokens; it gives {size}")
        return cls(f"bpe-{size}", cls.PATTERN, ranks, {"<|endoftext|>": len(ranks)})

    def save(self, folder):
        """Write `tokenizer.tiktoken` (ranks, in tiktoken's format) and `tokenizer_meta.json`."""
        enc, folder = self.encoding, Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        ranks = sorted(enc._mergeable_ranks.items(), key=lambda item: item[1])
        lines = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks)
        (folder / "tokenizer.tiktoken").write_text(lines, encoding="utf-8", newline="\n")
        meta = {"name": enc.name, "pattern": enc._pat_str, "special": enc._special_tokens}
        (folder / "tokenizer_meta.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")

    @classmethod
    def load(cls, path):
        """From a folder that `save` wrote, or from a lone .tiktoken file.

        A lone file says nothing of how to cut a text into words: the pattern of GPT-4 is taken,
        and an end-of-text token is added.
        """
        path = Path(path)
        file = path / "tokenizer.tiktoken" if path.is_dir() else path
        try:
            pairs = [line.split() for line in _read_text(file).splitlines() if line]
            ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
            meta = {"name": path.stem, "special": {"<|endoftext|>": max(ranks.values()) + 1}}
            if (path / "tokenizer_meta.json").is_file():
                meta = json.loads(_read_text(path / "tokenizer_meta.json"))
            name, special, pattern = meta["name"], meta["special"], meta.get("pattern")
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{file} is not a tokenizer in tiktoken's format: {error}") from None
        return cls(name, pattern or cls.PATTERN, ranks, special)

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
        """token_bytes of every id: what SignatureTable.extend takes."""
        return [self.token_bytes(i) for i in range(len(self))]


# ---------------------------------------------------------------------------------------------
# Gated compositional embedding (section 3.2 of the paper)
# ---------------------------------------------------------------------------------------------


class GatedEmbedding(nn.Module):
    """x = W_s (Σ_j α_j e_j) + b_s; the gate α is softmax over j of w2 · SiLU(W1 e_j + b1) + b2."""

    def __init__(self, config):
        super().__init__()
        D, Z = config.hidden_size, config.bottle_neck_dim
        self.scorer = nn.Sequential(nn.Linear(D, Z), nn.SiLU(), nn.Linear(Z, 1))
        self.output_proj = nn.Sequential(nn.Linear(D, D))

    def forward(self, e):
        """e (..., H, D), the rows of a signature -> input vectors (..., D) and gate (..., H)."""
        gate = self.scorer(e).float().softmax(-2).to(e.dtype)  # (..., H, 1)
        x = self.output_proj((gate * e).sum(-2)).to(e.dtype)  # (..., D)
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

    def forward(self, x, cos, sin, cache=None, layer=0):
        N, T, _ = x.shape
        C = self.q_norm.weight.numel()
        q, k = (p(x).view(N, T, -1, C).to(x.dtype) for p in (self.q_proj, self.k_proj))
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)  # (N, A or K, T, C)
        v = self.v_proj(x).view(N, T, -1, C).transpose(1, 2)  # (N, K, T, C)
        q, k, mask = rotate(q, cos, sin), rotate(k, cos, sin), None
        if cache is not None:
            k, v, mask = cache.update(layer, k, v)  # (N, K, length, C), mask (N, 1, T, length)
        how = {"attn_mask": mask, "is_causal": cache is None, "enable_gqa": True}
        y = F.scaled_dot_product_attention(q, k, v, **how)  # (N, A, T, C)
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

    def forward(self, x, cos, sin, cache=None, layer=0):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache, layer)  # (N, T, D)
        return x + self.mlp(self.post_attention_layernorm(x))  # (N, T, D)


class Backbone(nn.Module):
    """Table of `table_rows`, blocks, final norm; checkpoint_activations: blocks are run twice."""

    def __init__(self, config, table_rows):
        super().__init__()
        self.window, self.checkpoint_activations = config.max_position_embeddings, False
        self.embed_tokens = nn.Embedding(table_rows, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        frequency = config.rope_theta ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        angle = torch.outer(torch.arange(self.window), frequency).repeat(1, 2)  # (window, C)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x, cache=None, return_layers=False):
        """Inputs (N, T, D) -> states after the final norm (N, T, D) [, outputs of the layers]."""
        if x.shape[1] > self.window:
            raise ValueError(f"{x.shape[1]} positions exceed max_position_embeddings {self.window}")
        at, outputs = slice(x.shape[1]) if cache is None else cache.positions.unsqueeze(1), []
        cos, sin = self.cos[at].to(x.dtype), self.sin[at].to(x.dtype)  # (T, C) or (N, 1, T, C)
        recompute = self.checkpoint_activations and torch.is_grad_enabled()
        for i, layer in enumerate(self.layers):
            run = functools.partial(checkpoint, layer, **RECOMPUTE) if recompute else layer
            x = run(x, cos, sin, cache, i)  # (N, T, D)
            outputs.append(x)
        x = self.norm(x)  # (N, T, D)
        return (x, outputs) if return_layers else x


# ---------------------------------------------------------------------------------------------
# Cascade decoder (section 3.3 of the paper)
# ---------------------------------------------------------------------------------------------


def cross_entropy(scores, target):
    """−log softmax over V of scores (V, M) at the targets (M,) -> (M,)."""
    return F.cross_entropy(scores.T, target, reduction="none")


def predict(c, E, target=None, last=False):
    """One function's prediction: logits, loss and soft embedding of its B buckets.

    c (..., D), E (B, D) -> o = E c (..., B); −log p[target] (M,) if there are target ids (M,), for
    which c is (M, D); softmax(o)ᵀ E (..., D), None at the last function, which hands nothing on.
    """
    o = c @ E.T  # (..., B)
    loss = None if target is None else F.cross_entropy(o.float(), target, reduction="none")  # (M,)
    e = None if last else o.float().softmax(-1).to(E.dtype) @ E  # (..., D)
    return o, loss, e


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

    def steps(self, h, table, targets=None, force=(), predict=predict):
        """Yields for each j what `predict` returns: o_j, the loss of targets (M, H), e_j.

        h (..., D), with targets (M, D); table (H, B, D). force: {function: bucket whose row is its
        soft embedding}.
        """
        c = h
        for j, E in enumerate(table):
            last = j == len(self.cascade_mixer)
            o, loss, e = predict(c, E, None if targets is None else targets[..., j], last)
            if j in force and not last:
                e = E[force[j]].expand_as(c)  # (..., D)
            yield o, loss, e
            if not last:
                c = c + self.cascade_mixer[j](torch.cat((c, e), dim=-1))  # (..., D)

    def forward(self, h, table):
        """States (..., D) and table (H, B, D) -> logits (..., H, B)."""
        return torch.stack([o for o, _, _ in self.steps(h, table)], dim=-2)


# ---------------------------------------------------------------------------------------------
# The model
# ---------------------------------------------------------------------------------------------


class LanguageModel(nn.Module):
    """What both models share. Each of them has embed, token_scores and nll of its own."""

    def forward(self, ids, return_layers=False):
        """ids (N, T) -> states after the final norm (N, T, D) [, list of the layers' outputs]."""
        return self.model(self.embed(ids), return_layers=return_layers)

    def loss(self, ids, targets, objective="independent", head="plain"):
        """Mean training loss over the counted positions, a scalar; never calibrated.

        ids, targets (N, T); targets are shifted already; −100 is not counted, the pad token is.
        independent (the paper): −score = −Σ_j log p_j; exact: −log of the renormalised
        probability; joint: exact + joint_weight · independent / H. All one for Transformer.
        A target must be a token that is assigned: others have no probability to learn.
        head: lean computes what plain does, with less memory and faster, see `LeanLoss`.
        """
        _one_of("objective", objective, OBJECTIVES)
        _one_of("head", head, HEADS)
        counted = targets.flatten() != -100  # (M,)
        h, targets = self(ids).flatten(0, 1), targets.flatten().where(counted, 0)  # (M, D), (M,)
        if head == "lean" and torch.is_grad_enabled() and isinstance(self, MultiHashFormer):
            total = lean_loss(self, h, targets, objective, counted)
        else:
            total = torch.where(counted, self.nll(h, targets, objective), 0.0).sum()
        return total / counted.sum().clamp(min=1)

    def log_probs(self, ids):
        """ids (N, T) -> log P of every token as the next one (N, T, V), calibrated."""
        return torch.cat([*_log_prob_chunks(self, ids)]).view(*ids.shape, -1)  # (N, T, V)

    @torch.no_grad()
    def top_tokens(self, ids, k):
        """The k best next tokens: (log_probs, ids), each (N, T, k), without an (N, T, V) tensor."""
        k = min(k, self.config.vocab_size)
        best = zip(*(chunk.topk(k) for chunk in _log_prob_chunks(self, ids)))
        return tuple(torch.cat(part).view(*ids.shape, k) for part in best)

    def generate(
        self, ids, max_new_tokens=100, temperature=1.0, top_k=None, top_p=None, stop=(), seed=None,
        return_log_probs=False,
    ):  # fmt: skip
        """Continue prompts: an iterator of token ids, one step at a time.

        ids: one prompt (T,), a batch (N, T), or a list of 1-D prompts of any lengths from 1.
        temperature: logits are score / (calibration · temperature); 0 is greedy.
        top_k, top_p: sample among exactly the k best; of these, among the fewest with mass p.
        stop: ids that end their row; the stop id itself is yielded. seed: None: PyTorch's own.
        Yields an int for one 1-D prompt, else a LongTensor (N,) with the pad id in finished rows;
        with return_log_probs (token, log P before temperature, top_k, top_p; 0 in finished rows).
        When a row's context is full, its newest half is encoded again, as that of a prompt which is
        longer. Raises ValueError for bad arguments, before the first token.
        """
        rows, single = _prompt_rows(ids, self.config.vocab_size)
        sampling = check_sampling(temperature, top_k, top_p, max_new_tokens)
        stop = {stop} if isinstance(stop, int) else set(map(int, stop))
        return _generate(self, rows, single, max_new_tokens, sampling, stop, seed, return_log_probs)

    def explain(self, ids, position=-1, top_k=10, force=None, all_scores=False):
        """All that happens at one position, as a JSON-able dict; `_explain` lists its entries.

        ids: one sequence. force: {function, from 0: bucket}: a what-if, in which the function's
        soft embedding is the bucket's row. all_scores: the scores of all V tokens, too.
        """
        return _explain(self, ids, position, top_k, force or {}, all_scores)

    def num_parameters(self):
        """Parameters: table, embedding, blocks, decoder, total; and those of a V × D table."""
        return _count(self)

    def save_pretrained(self, folder, dtype=None):
        """Write a checkpoint whose parameters are of `dtype` (None: as they are) into a folder."""
        _save(self, Path(folder), dtype)

    @classmethod
    def from_pretrained(cls, folder, revision=None):
        """From a checkpoint or run folder or a Hugging Face hub id, in float32; else ValueError."""
        return _load(folder, revision, cls)


class MultiHashFormer(LanguageModel):
    """The model of the paper. Its vocabulary is that of its signatures, whatever config says."""

    def __init__(self, config, signatures):
        super().__init__()
        self.config = _fit(config, signatures)
        self.model = Backbone(config, config.num_hashes * config.num_buckets)
        self.model.combiner = GatedEmbedding(config)
        self.hash_head = CascadeDecoder(config)
        self.signatures = signatures
        self._follow_signatures()
        _initialise(self)

    def embed(self, ids, return_gate=False):
        """ids (N, T) -> input vectors (N, T, D) [, gate (N, T, H)]."""
        x, gate = self.model.combiner(self.model.embed_tokens(self.rows[ids]))
        return (x, gate) if return_gate else x

    def head_logits(self, ids):
        """ids (N, T) -> logits of every function over its buckets (N, T, H, B)."""
        return self.hash_head(self(ids), self.table)

    def sum_over_signatures(self, columns):
        """(H·B, M) -> Σ_j columns[id_j(w)] of every token (M, V); −inf for unused ids.

        Scoring the vocabulary is the transpose of embedding it: every token sums its H rows of a
        table that has a column for each position. So no (M, V, H) tensor is made.
        """
        scores = F.embedding_bag(self.rows, columns, mode="sum").T  # (M, V)
        return scores.index_fill(1, self.unassigned, -torch.inf) if len(self.unassigned) else scores

    def nll(self, h, targets, objective, head=None):
        """States (M, D), target ids (M,) -> training loss of every position (M,); see `loss`.

        The log-sum-exps of the H functions are the same for every token, so the renormalised
        probability is a softmax over sums of logits. head: what the lean head computes it with.
        """
        table, predict_, cross_entropy_ = head or (self.table, predict, cross_entropy)
        steps = self.hash_head.steps(h, table, self.model.hash_map[targets], predict=predict_)
        if objective == "independent":
            return sum(loss for _, loss, _ in steps)  # (M,)
        logits, losses, _ = zip(*steps)
        columns = torch.cat([o.T for o in logits]).float()  # (H·B, M)
        exact = cross_entropy_(self.sum_over_signatures(columns).T, targets)  # (M,)
        if objective == "exact":
            return exact
        return exact + self.config.joint_weight / self.config.num_hashes * sum(losses)  # (M,)

    def log_buckets(self, h):
        """States (M, D) -> log p_j of every bucket (M, H, B), in float32."""
        return self.hash_head(h, self.table).float().log_softmax(-1)

    def token_scores(self, h):
        """States (M, D) -> scores Σ_j log p_j[id_j(w)] of every token (M, V)."""
        columns = self.log_buckets(h).flatten(1).T  # (H·B, M)
        # contiguous() would leave one position's strides, with which the sum is 10 times slower.
        return self.sum_over_signatures(columns.clone(memory_format=torch.contiguous_format))

    def scores(self, ids):
        """ids (N, T) -> score of every token (N, T, V), neither renormalised nor calibrated."""
        return self.token_scores(self(ids).flatten(0, 1)).view(*ids.shape, -1)

    def valid_mass(self, ids):
        """ids (N, T) -> probability on the signatures of real tokens (N, T), at τ = 1."""
        return self.mass_on_tokens(self.scores(ids))

    def mass_on_tokens(self, scores):
        """Scores (..., V) -> Σ exp(score) over the distinct signatures (...)."""
        return scores[..., self.first_owner].exp().sum(-1)

    def _follow_signatures(self):
        """Buffers made from the signatures; only hash_map is part of a checkpoint."""
        table, H, B = self.signatures, self.config.num_hashes, self.config.num_buckets
        device = self.model.embed_tokens.weight.device
        self.config.vocab_size = len(table)
        self.model.register_buffer("hash_map", table.ids.clone().to(device))  # (V, H)
        for name, buffer in (
            (
                "rows",
                table.ids + torch.arange(H, device=table.ids.device) * B,
            ),  # (V, H) the rows of E of every token
            ("unassigned", (~table.assigned).nonzero()[:, 0]),
            ("first_owner", table.first_owner),  # (V,)
        ):
            self.register_buffer(name, buffer.to(device), persistent=False)

    @property
    def table(self):
        """E as (H, B, D): the rows of each function, which input and output share."""
        H, B = self.config.num_hashes, self.config.num_buckets
        return self.model.embed_tokens.weight.view(H, B, -1)

    def expand(self, tokens):
        """Give new tokens (bytes) signatures. No parameter is added, removed or changed."""
        self.signatures.extend(tokens)
        self._follow_signatures()


def _fit(config, signatures):
    """The configuration of a model with these signatures; ValueError if they do not fit it."""
    H, B = config.num_hashes, config.num_buckets
    if signatures.from_checkpoint and int(signatures.ids.max()) < B:
        signatures.num_buckets, signatures.num_lsh = B, config.num_lsh
        signatures.allow_collisions = config.shares_signatures
    if (signatures.num_hashes, signatures.num_buckets) != (H, B):
        raise ValueError(
            f"signatures of num_hashes {signatures.num_hashes} and num_buckets "
            f"{signatures.num_buckets} do not fit a configuration of {H} and {B}"
        )
    follows = {"pad_token_id": signatures.pad_id, "num_lsh": signatures.num_lsh}
    return replace(config, model="mhf", **follows)


class Transformer(LanguageModel):
    """The standard baseline: the same backbone, a tied V × D embedding and a softmax over V."""

    def __init__(self, config):
        super().__init__()
        self.config = replace(config, model="standard")
        self.model = Backbone(config, config.vocab_size)
        _initialise(self)

    def embed(self, ids):
        """ids (N, T) -> input vectors (N, T, D)."""
        return self.model.embed_tokens(ids)

    def token_scores(self, h):
        """States (M, D) -> logits (M, V), in float32."""
        return (h @ self.model.embed_tokens.weight.T).float()

    def nll(self, h, targets, objective):
        """States (M, D), target ids (M,) -> cross-entropy of every position (M,)."""
        return F.cross_entropy(self.token_scores(h), targets, reduction="none")

    def expand(self, tokens):
        """Append one row, the mean of the present ones, for each new token."""
        old = self.model.embed_tokens.weight.detach()
        new = torch.cat((old, old.mean(0, keepdim=True).expand(len(list(tokens)), -1)))  # (V, D)
        self.model.embed_tokens = nn.Embedding.from_pretrained(new, freeze=False)
        self.config.vocab_size = len(new)


def _initialise(model):
    """The one place of initialisation: matrices and table N(0, σ²), biases 0, norms 1."""
    config = model.config
    for name, p in model.named_parameters():
        if p.dim() == 1:
            nn.init.constant_(p, 1.0 if name.endswith("norm.weight") else 0.0)
        elif name.endswith("embed_tokens.weight"):
            nn.init.normal_(p, std=config.table_initializer_range or config.initializer_range)
        elif "output_proj" in name and config.adapter_init == "identity":
            nn.init.eye_(p)
        else:
            nn.init.normal_(p, std=config.initializer_range)


def _log_prob_chunks(model, ids):
    """Yields log P of some positions after the others (chunk, V), 2^25 numbers at a time."""
    size = max(1, 2**25 // max(model.config.vocab_size, len(model.model.embed_tokens.weight)))
    for h in model(ids).flatten(0, 1).split(size):
        yield (model.token_scores(h) / model.config.calibration).log_softmax(-1)  # (chunk, V)


def _count(model):
    parts = {
        "table": model.model.embed_tokens,
        "embedding": getattr(model.model, "combiner", None),
        "decoder": getattr(model, "hash_head", None),
    }
    size = {k: sum(p.numel() for p in m.parameters()) if m else 0 for k, m in parts.items()}
    total = sum(p.numel() for p in model.parameters())
    size |= {"blocks": total - sum(size.values()), "total": total}
    return size | {"standard_table": model.config.vocab_size * model.config.hidden_size}


# ---------------------------------------------------------------------------------------------
# Lean head: the training loss of MultiHashFormer once more, faster and in less memory, with the
# same result: `loss(…, head="plain")` does without, and train.py compares the two at its start.
# ---------------------------------------------------------------------------------------------


class LeanPrediction(torch.autograd.Function):
    """`predict`, with its derivatives by hand. The gradient of E is added to dE, in place.

    With p = softmax(o) and the incoming gradients go, gl and ge of logits, loss and soft embedding:
    do = go + gl (p − onehot) + p * (E ge − ge·e), dc = do E, dE = doᵀ c + pᵀ ge. Buckets stand in
    rows, as the sum over signatures wants them.
    """

    @staticmethod
    def forward(ctx, c, E, dE, target, last, return_logits):
        c = c.to(E.dtype)
        o = E @ c.T  # (B, M)
        p = o.clone() if return_logits and o.dtype == torch.float32 else o.float()  # (B, M)
        loss, z = _cross_entropy_(p, target)  # (M,), (M,)
        p = p.div_(z).to(E.dtype)
        e = None if last else p.T @ E  # (M, D)
        ctx.save_for_backward(c, E, target, p, e)
        ctx.dE = dE  # not among the saved, for it is to change
        return o.T if return_logits else None, loss, e

    @staticmethod
    def backward(ctx, go, gl, ge):
        c, E, target, p, e = ctx.saved_tensors
        if e is None:
            do = p * gl.to(p.dtype)  # (B, M)
        else:
            shift = gl - (ge * e).sum(-1, dtype=torch.float32)  # (M,)
            _add_product(ctx.dE, p, ge)
            do = torch.addmm(shift.to(p.dtype), E, ge.T).mul_(p)  # (B, M)
        do.scatter_add_(0, target.unsqueeze(0), -gl.to(p.dtype).unsqueeze(0))
        if go is not None:
            do += go.T  # (B, M)
        _add_product(ctx.dE, do, c)
        return do.T @ E, None, None, None, None, None


class LeanCrossEntropy(torch.autograd.Function):
    """Cross-entropy of scores (V, M), which are used up, and targets (M,) -> (M,)."""

    @staticmethod
    def forward(ctx, scores, target):
        loss, z = _cross_entropy_(scores, target)
        ctx.save_for_backward(scores, target, z)
        return loss

    @staticmethod
    def backward(ctx, g):
        p, target, z = ctx.saved_tensors
        return p.mul_(g / z).scatter_add_(0, target.unsqueeze(0), -g.unsqueeze(0)), None


def _cross_entropy_(x, target):
    """Logits x (B, M), targets (M,) -> cross-entropy (M,) and z (M,), the sums over B of what x is
    then: exp(x − max). In place, for writing to fresh memory takes several times as long."""
    at_target, top = x.gather(0, target.unsqueeze(0))[0], x.amax(0)  # (M,), (M,)
    z = x.sub_(top).exp_().sum(0)  # (M,)
    return z.log() + (top - at_target), z


def _add_product(total, a, b):
    """total += a b, in the precision of total."""
    total.addmm_(a, b) if total.dtype == a.dtype else total.add_(a @ b)


class LeanLoss(torch.autograd.Function):
    """The sum of `nll` over the counted positions, whose gradients are made in the forward pass.

    One chunk of positions after the other goes through `nll` and straight back. So what is kept
    are the gradients of states and parameters, no (M, H, B) logits or probabilities, and nothing
    is computed twice. The backward pass multiplies them by the gradient of the sum.
    """

    @staticmethod
    def forward(ctx, model, targets, counted, objective, h, weight, *others):
        kind, shape = h.device.type, model.table.shape
        low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        dh, grads = torch.empty_like(h), [torch.zeros_like(p) for p in (weight, *others)]
        table = list(zip(weight.detach().to(low).view(shape), grads[0].view(shape)))
        size = lean_chunk(model.config, objective, kind, low)
        total = h.new_zeros((), dtype=torch.float32)
        unit = 1 / 16 if low == torch.float16 else 1.0  # float16 ends at 65,504

        def predict(c, rows, target, last):
            return LeanPrediction.apply(c, *rows, target, last, objective != "independent")

        for m in (slice(start, start + size) for start in range(0, len(h), size)):
            with torch.enable_grad():
                states = h[m].detach().requires_grad_()
                head = table, predict, LeanCrossEntropy.apply
                nll = model.nll(states, targets[m], objective, head)  # (size,)
                loss = torch.where(counted[m], nll, 0.0).sum() * unit
            with torch.autocast(kind, enabled=False):
                found = torch.autograd.grad(loss, (states, *others), materialize_grads=True)
            dh[m], total = found[0], total + loss.detach() / unit
            for grad, new in zip(grads[1:], found[1:]):
                grad += new
        ctx.save_for_backward(dh, *grads)
        ctx.unit = unit
        return total

    @staticmethod
    def backward(ctx, g):
        return None, None, None, None, *(grad.mul_(g / ctx.unit) for grad in ctx.saved_tensors)


def lean_chunk(config, objective, kind, low):
    """Positions at a time: many for fast products, few (16 MiB a buffer) for a CPU's caches."""
    wide = config.num_buckets
    if objective != "independent":
        wide = max(wide, config.vocab_size)
    few = min(512, max(64, 2**24 // low.itemsize // wide))
    return few if kind == "cpu" else max(256, 2**25 // wide)


def lean_loss(model, h, targets, objective, counted):
    """Σ nll over the counted positions: h (M, D), targets and counted (M,) -> scalar."""
    parameters = model.model.embed_tokens.weight, *model.hash_head.parameters()
    return LeanLoss.apply(model, targets, counted, objective, h, *parameters)


# ---------------------------------------------------------------------------------------------
# Generation
# ---------------------------------------------------------------------------------------------


class KVCache:
    """Keys and values so far, written in place: row n's position p stands at index p.

    Rows may differ in length. What stands beyond a row's length, the padding of its prompt, is
    masked until the row's own tokens overwrite it.
    """

    def __init__(self, config, num_rows, size, like):
        K, C = config.num_key_value_heads, config.head_dim
        self.keys = like.new_zeros(config.num_hidden_layers, num_rows, K, size, C)
        self.values = torch.zeros_like(self.keys)
        self.row = torch.arange(num_rows, device=like.device).unsqueeze(-1)  # (N, 1)

    def place(self, positions, length, at_end=False):
        """Where the next input stands: positions (N, T), all below `length`, or its last one."""
        self.positions, self.length, self.mask, self.at_end = positions, length, None, at_end
        if not at_end:  # else every row sees all that there is
            index = torch.arange(length, device=positions.device)
            self.mask = (index <= positions.unsqueeze(-1)).unsqueeze(1)  # (N, 1, T, length)

    def update(self, layer, k, v):
        """Store k, v (N, K, T, C) -> all keys, all values (N, K, length, C) and the mask."""
        keys, values = (all_[layer][:, :, : self.length] for all_ in (self.keys, self.values))
        for old, new in ((keys, k), (values, v)):
            if self.at_end:
                old[:, :, -1:] = new
            else:
                old[self.row, :, self.positions] = new.transpose(1, 2).to(old.dtype)
        return keys, values, self.mask


def _prompt_rows(ids, vocab_size):
    """Prompts as a list of lists of ints, and whether they were one 1-D prompt."""
    ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    single = not any(getattr(i, "ndim", 0) or isinstance(i, (list, tuple)) for i in ids)
    rows = [[int(i) for i in row] for row in ([ids] if single else ids)]
    if not all(rows):
        raise ValueError("the prompt is empty; it needs at least one token")
    for token_id in itertools.chain(*rows):
        if not 0 <= token_id < vocab_size:
            raise ValueError(
                f"token id {token_id} is outside 0 to {vocab_size - 1}, the vocabulary"
            )
    return rows, single


def check_sampling(temperature, top_k, top_p, max_new_tokens):
    if type(max_new_tokens) is not int or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be a whole number, not {max_new_tokens}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 (greedy) or more, not {temperature}")
    if top_k is not None and (type(top_k) is not int or top_k < 1):
        raise ValueError(f"top_k must be a whole number from 1 (None: all tokens), not {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, not {top_p}")
    return temperature, top_k, top_p


def sampling_weights(logits, temperature=1.0, top_k=None, top_p=None):
    """Logits (N, V) -> what `generate` draws a token by: weights (N, k), and the ids (N, k) of the
    k tokens they belong to, best first; ids is None if they are those of all V, in their order.

    The weights are probabilities but for top_p, whose tokens' weights sum to less than 1.
    """
    if temperature < 1e-6:  # 0 is greedy, and float32 could not divide by less
        best = logits.argmax(-1, keepdim=True)  # (N, 1)
        return torch.ones_like(best, dtype=logits.dtype), best
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # (N, V)
    if top_k is None and top_p is None:
        return logits.softmax(-1), None
    size = logits.shape[-1]
    logits, ids = logits.topk(min(top_k or size, size))  # (N, k), best first
    weights = logits.softmax(-1)  # (N, k)
    if top_p is not None:  # a token goes when those before it have mass p already
        weights = weights.masked_fill(weights.cumsum(-1) - weights >= top_p, 0.0)
    return weights, ids


def _sample(logits, temperature, top_k, top_p, generator):
    """One id (N,) from every row of logits (N, V)."""
    weights, ids = sampling_weights(logits, temperature, top_k, top_p)
    if weights.shape[-1] == 1:  # greedy: nothing is drawn
        return ids[:, 0]
    drawn = torch.multinomial(weights, 1, generator=generator)  # (N, 1)
    return (drawn if ids is None else ids.gather(-1, drawn))[:, 0]


def _next_states(model, contexts, cache, whole):
    """States (N, D) at each context's end; encodes it whole, or only its last token."""
    device, length = cache.row.device, max(map(len, contexts))
    last = torch.tensor([len(c) - 1 for c in contexts], device=device)  # (N,)
    if whole:  # shorter rows are padded at the end, where no earlier position looks
        ids = torch.tensor([c + [0] * (length - len(c)) for c in contexts], device=device)  # (N, T)
        cache.place(torch.arange(length, device=device).expand_as(ids), length)
    else:
        ids = torch.tensor([c[-1:] for c in contexts], device=device)  # (N, 1)
        cache.place(last.unsqueeze(-1), length, at_end=min(map(len, contexts)) == length)
    h = model.model(model.embed(ids), cache)  # (N, T or 1, D)
    return h[cache.row[:, 0], last] if whole else h[:, 0]


@torch.inference_mode()  # an eighth faster than no_grad
def _generate(model, contexts, single, max_new_tokens, sampling, stop, seed, return_log_probs):
    config, weight, cache = model.config, model.model.embed_tokens.weight, None
    window = config.max_position_embeddings
    generator = None if seed is None else torch.Generator(weight.device).manual_seed(seed)
    done = [False] * len(contexts)
    for step in range(max_new_tokens):
        whole = cache is None or max(map(len, contexts)) > window
        if whole:
            contexts = [c if len(c) <= window else c[-max(1, window // 2) :] for c in contexts]
            size = min(window, max(map(len, contexts)) + max_new_tokens - step)
            cache = KVCache(config, len(contexts), size, weight)
        h = _next_states(model, contexts, cache, whole)  # (N, D)
        logits = model.token_scores(h) / config.calibration  # (N, V)
        new = _sample(logits, *sampling, generator)  # (N,)
        log_p = torch.zeros(len(contexts))  # (N,)
        if return_log_probs:
            log_p = logits.log_softmax(-1).gather(-1, new.unsqueeze(-1))[:, 0].cpu()  # (N,)
        new = new.tolist()
        for n, token_id in enumerate(new):
            if done[n]:
                new[n] = config.pad_token_id or 0
                log_p[n] = 0.0
            else:
                contexts[n].append(token_id)
                done[n] = token_id in stop
        with torch.inference_mode(False):  # a tensor that may be trained on
            out = new[0] if single else torch.tensor(new)
            if return_log_probs:
                out = out, log_p.item() if single else log_p.clone()
        yield out
        if all(done):
            return


# ---------------------------------------------------------------------------------------------
# Explaining one prediction
# ---------------------------------------------------------------------------------------------


def check_explain(config, ids, position=-1, top_k=10, force=None):
    """The ids as a list; ValueError if `explain` would not take its arguments."""
    rows, _ = _prompt_rows(ids, config.vocab_size)
    if len(rows) != 1:
        raise ValueError(f"one sequence is explained at a time, not {len(rows)}")
    if not -len(rows[0]) <= position < len(rows[0]):
        raise ValueError(f"position {position} is outside the {len(rows[0])} tokens")
    if not 1 <= top_k <= config.vocab_size:
        raise ValueError(f"top_k must be from 1 to {config.vocab_size}, not {top_k}")
    if force and config.model == "standard":
        raise ValueError("force is for hash functions; the standard model has none")
    H, B = config.num_hashes, config.num_buckets
    for j, bucket in (force or {}).items():
        if not (0 <= int(j) < H and 0 <= int(bucket) < B):
            raise ValueError(
                f"force {j}: {bucket} is outside functions 0 to {H - 1}, buckets 0 to {B - 1}"
            )
    return rows[0]


@torch.no_grad()
def _explain(model, ids, position, top_k, force, all_scores):
    """The dict of `explain`. Probabilities are natural, functions count from 0.

    tokens         of every input token: id, bytes, text, signature, gate, gate_scores, row_norms,
                   residual (‖W_s Σ α_j e_j + b_s − x‖, the first in float64)
    signature      of the token at the position, see `_explain_signature`
    functions      of each: top buckets (bucket, prob, log_prob, num_tokens, best tokens, and mass:
                   their renormalised probability, τ = 1), entropy_bits, soft_embedding_norm,
                   nearest: the buckets whose rows have the largest cosine with the soft embedding,
                   forced; compatible: how many real tokens are in the top (or forced) bucket of
                   this and all earlier functions; compatible_mass: theirs
    top_tokens     of the best: rank, log_p of each function, score (their sum), joint_prob (its
                   exp), log_prob_paper (renormalised, τ = 1), log_prob (renormalised, calibrated)
    next           the same of the token that follows in ids; None at the end
    valid_mass     probability on the signatures of real tokens
    scores         of all V tokens if asked for, None for unused ids
    Of the standard model there are only tokens, top_tokens, next and scores.
    """
    config, row = model.config, check_explain(model.config, ids, position, top_k, force)
    position, ids = position % len(row), torch.tensor([row], device=model.model.cos.device)
    h = model(ids)[0, position]  # (D,)
    result = {"schema": 2, "position": position, "calibration": config.calibration}
    result["vocab_size"], log_buckets = config.vocab_size, None
    result["tokens"] = [_token_entry(model, i) for i in row]
    if config.model == "mhf":
        log_buckets, scores = _explain_cascade(model, h, top_k, force, result)
        _explain_gate(model, ids, result["tokens"])
        result["signature"] = _explain_signature(model, row[position], scores, top_k)
    else:
        scores = model.token_scores(h.unsqueeze(0))[0]  # (V,)
    best = scores.topk(min(top_k, int(scores.isfinite().sum()))).indices.tolist()
    follows = row[position + 1 : position + 2]
    entries = list(_explain_tokens(model, best + follows, scores, log_buckets))
    result["top_tokens"] = entries[: len(best)]
    result["next"] = entries[-1] if follows else None
    if all_scores:
        result["scores"] = [s if s > -float("inf") else None for s in scores.tolist()]
    return result


def _explain_tokens(model, token_ids, scores, log_buckets):
    """The entries of top_tokens. An unused id has no score, and so has its entry None there."""
    logs = scores.log_softmax(-1), (scores / model.config.calibration).log_softmax(-1)  # (V,)
    for i in token_ids:
        entry, real = _token_entry(model, i), scores[i].isfinite().item()
        entry["rank"] = 1 + int((scores > scores[i]).sum()) if real else None
        entry["score"] = scores[i].item() if real else None
        if log_buckets is not None:
            entry["log_p"] = [log_buckets[j, b].item() for j, b in enumerate(entry["signature"])]
            entry["joint_prob"] = scores[i].exp().item()
        for name, log_p in zip(("log_prob_paper", "log_prob"), logs, strict=True):
            entry[name] = log_p[i].item() if real else None
        yield entry


def _token_entry(model, token_id):
    """id, bytes, text and signature of a token; None where they are not known."""
    signatures = getattr(model, "signatures", None)
    raw = signatures.tokens[token_id] if signatures else None
    text = None if raw is None else raw.decode("utf-8", errors="backslashreplace")
    signature = signatures.ids[token_id].tolist() if signatures else None
    raw = None if raw is None else list(raw)
    return {"id": token_id, "bytes": raw, "text": text, "signature": signature}


def _explain_gate(model, ids, tokens):
    """Adds gate, gate_scores, row_norms and residual to the tokens; None where a gate has none."""
    rows = model.model.embed_tokens(model.rows[ids[0]])  # (T, H, D)
    x, gate = (y[0] for y in model.embed(ids, return_gate=True))  # (T, D), (T, H)
    found = dict.fromkeys(("gate", "gate_scores", "residual")) | {"row_norms": rows.norm(dim=-1)}
    if scorer := getattr(model.model.combiner, "scorer", None):
        scores = scorer(rows).squeeze(-1)
        found["gate_scores"] = scores if scores.shape == rows.shape[:2] else None  # (T, H)
    if gate.shape == rows.shape[:2]:
        found["gate"] = gate
        if adapter := getattr(model.model.combiner, "output_proj", None):
            mixed = (gate.unsqueeze(-1).cpu().double() * rows.cpu()).sum(-2)  # (T, D)
            again = copy.deepcopy(adapter).cpu().double()(mixed)  # (T, D)
            found["residual"] = (again - x.cpu()).norm(dim=-1)  # (T,)
    for name, values in found.items():
        for t, entry in enumerate(tokens):
            entry[name] = None if values is None else values[t].tolist()


def _bucket_entry(model, j, bucket, scores, top_k):
    """A bucket of function j: how many real tokens it has, the best of them, and their mass."""
    members = (scores.isfinite() & (model.model.hash_map[:, j] == bucket)).nonzero()[:, 0]
    best = members[scores[members].argsort(descending=True)[:top_k]].tolist()
    mass = (scores[members].logsumexp(0) - scores.logsumexp(0)).exp().item()
    entry = {"bucket": bucket, "num_tokens": len(members), "mass": mass}
    return entry | {"tokens": [_token_entry(model, i) for i in best]}


def _explain_signature(model, token_id, scores, top_k):
    """How a token came to its signature, and who has ids in common with it.

    functions  of each: its bucket as in the trace's functions, and expected, the mean of all
    neighbours the tokens that share most ids with it, the most probable first, and shared: how many
    shared     how many tokens have exactly 0, 1, …, H ids in common with it
    tries      the tries (seed of the last id, last id, owner: the token that had the signature);
               None where the tokens are not known, or share signatures and are never hashed again
    """
    table, hash_map, config = model.signatures, model.model.hash_map, model.config
    real = scores.isfinite()
    expected = int(hash_map.any(-1).sum()) / (config.num_buckets - 1)  # all but pad and unused
    functions = [
        _bucket_entry(model, j, bucket, scores, top_k) | {"expected": expected}
        for j, bucket in enumerate(hash_map[token_id].tolist())
    ]
    shared = (hash_map == hash_map[token_id]).sum(-1).masked_fill(~real, 0)  # (V,)
    shared[token_id] = 0
    order = scores.argsort(descending=True)  # (V,)
    order = order[shared[order].argsort(descending=True, stable=True)][:top_k].tolist()
    tries = None
    unknown = table.locked or table.from_checkpoint or table.tokens[token_id] is None
    if not (unknown or table.allow_collisions):
        tries = [
            {
                "seed": seed,
                "last": last,
                "owner": None if owner is None else _token_entry(model, owner),
            }
            for seed, last, owner in table.trace(table.tokens[token_id])
        ]
    counts = shared.bincount(minlength=config.num_hashes + 1)
    counts[0] -= len(real) - int(real.sum()) + bool(real[token_id])  # unused ids, and itself
    return {
        "id": token_id,
        "num_buckets": config.num_buckets,
        "num_hashes": config.num_hashes,
        "functions": functions,
        "neighbours": [
            _token_entry(model, i) | {"shared": n} for i in order if (n := int(shared[i]))
        ],
        "shared": counts.tolist(),
        "tries": tries,
    }


def _explain_cascade(model, h, top_k, force, result):
    """Adds functions and valid_mass to the result; returns log p (H, B) and scores (V,)."""
    B, force = model.config.num_buckets, {int(j): int(bucket) for j, bucket in force.items()}
    steps = list(model.hash_head.steps(h, model.table, force=force))
    log_buckets = torch.stack([o for o, _, _ in steps]).float().log_softmax(-1)  # (H, B)
    scores = model.sum_over_signatures(log_buckets.view(-1, 1))[0]  # (V,)
    compatible, probs, result["functions"] = scores.isfinite(), scores.softmax(-1), []  # (V,)
    for j, (_, _, soft) in enumerate(steps):
        best, nearest, norm = log_buckets[j].topk(min(top_k, B)), [], None
        top = [
            _bucket_entry(model, j, bucket, scores, top_k)
            | {"prob": float(np.exp(log_p)), "log_prob": log_p}
            for log_p, bucket in zip(*(t.tolist() for t in best), strict=True)
        ]
        if soft is not None:
            cosine = F.cosine_similarity(model.table[j], soft, dim=-1).topk(min(3, B))
            norm = soft.norm().item()
            nearest = [
                _bucket_entry(model, j, bucket, scores, top_k) | {"cosine": value}
                for value, bucket in zip(*(t.tolist() for t in cosine), strict=True)
            ]
        chosen = force.get(j, top[0]["bucket"])
        compatible = compatible & (model.model.hash_map[:, j] == chosen)  # (V,)
        entropy = torch.special.entr(log_buckets[j].exp()).sum().item() / np.log(2).item()
        result["functions"].append(
            {
                "function": j,
                "top": top,
                "entropy_bits": entropy,
                "soft_embedding_norm": norm,
                "nearest": nearest,
                "forced": force.get(j),
                "compatible": int(compatible.sum()),
                "compatible_mass": probs[compatible].sum().item(),
            }
        )
    result["valid_mass"] = model.mass_on_tokens(scores).item()
    result["forced"] = {str(j): bucket for j, bucket in force.items()}
    return log_buckets, scores


# ---------------------------------------------------------------------------------------------
# Presets, saving, loading
# ---------------------------------------------------------------------------------------------

_PAPER = dict(num_buckets=16384, vocab_size=32768, max_position_embeddings=2048)  # H4B16K
_OURS = dict(adapter_init="identity", table_initializer_range=0.08, objective="exact")

PRESETS = {  # tiny and small are ours; the paper's H3B10K is num_hashes 3, num_buckets 10624
    "tiny": dict(num_hidden_layers=4, **_OURS),
    "small": dict(
        num_hidden_layers=8, hidden_size=512, num_attention_heads=8, num_key_value_heads=2,
        intermediate_size=1536, max_position_embeddings=512, **_OURS,
    ),
    "100m": dict(
        num_hidden_layers=12, hidden_size=768, num_attention_heads=12, num_key_value_heads=2,
        intermediate_size=2560, **_PAPER,
    ),
    "1b": dict(
        num_hidden_layers=20, hidden_size=2048, num_attention_heads=16, num_key_value_heads=8,
        intermediate_size=6144, **_PAPER,
    ),
    "3b": dict(
        num_hidden_layers=36, hidden_size=2048, num_attention_heads=16, num_key_value_heads=2,
        intermediate_size=11008, **_PAPER,
    ),
}  # fmt: skip

_FIXED = {
    "attention_bias": False,
    "hidden_act": "silu",
    "lsh_only_embed": False,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}
SUPPORTED = _FIXED | {"partial_rotary_factor": 1.0, "rope_type": "default"}  # others are refused
PUBLISHED = _FIXED | {  # keys of a published config.json that are written and not used
    "architectures": ["Qwen3ForCausalLM"],
    "attention_dropout": 0.0,
    "dtype": "float32",
    "fused_decoding": False,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "sliding_window": None,
    "transformers_version": "5.3.0",
    "use_cache": True,
}


def _read_text(path):
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except (UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path} cannot be read as UTF-8 text: {error}") from None


def _save(model, folder, dtype):
    """Files are replaced when they are complete: saving over the loaded checkpoint is safe."""
    from huggingface_hub import save_torch_state_dict  # splits what is larger than 5 GB

    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    tensors = model.state_dict()
    if dtype is not None:
        tensors = {k: t.to(dtype) if t.is_floating_point() else t for k, t in tensors.items()}
    stored = str(tensors["model.norm.weight"].dtype).removeprefix("torch.")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as temporary:
        new = Path(temporary)
        config = replace(model.config, extra=model.config.extra | {"dtype": stored})
        config.to_json(new / "config.json")
        table = getattr(model, "signatures", None)
        if table and (table.locked or not table.from_checkpoint):  # whose tokens are known
            lines = ["-" if t is None else base64.b64encode(t).decode() for t in table.tokens]
            (new / "tokens.txt").write_text("\n".join([*lines, ""]), encoding="utf-8", newline="\n")
        save_torch_state_dict(tensors, new, metadata={"format": "pt"})
        names = sorted(file.name for file in new.iterdir())
        for name in names:
            (new / name).chmod((new / "config.json").stat().st_mode)  # else tensors are private
        for name in names:
            os.replace(new / name, folder / name)
    for stale in {*folder.glob("model*.safetensors*"), folder / "tokens.txt"}:
        if stale.name not in names:
            stale.unlink(missing_ok=True)


def find_checkpoint(name, revision=None):
    """The folder of a checkpoint: itself, the last one of a run, or the download of a hub id."""
    return _find_folder(name, revision, "checkpoint folder", ["*.safetensors", "tokens.txt"])


def _find_folder(name, revision, what, wanted=()):
    folder = Path(name)
    if (folder / "last").is_file():
        folder = folder / (_read_text(folder / "last").strip() or "?")
        if not folder.is_dir():
            raise ValueError(f"{name} names {folder} as its last checkpoint, which is not there")
    if folder.is_dir():
        return folder
    owner, _, repository = str(name).partition("/")
    if not repository or "/" in repository or Path(owner).exists():
        raise ValueError(f"there is no {what} {name}")
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.tiktoken", "*.model", "*.model.v*", *wanted]
    try:
        return Path(snapshot_download(str(name), revision=revision, allow_patterns=wanted))
    except Exception as error:
        raise ValueError(
            f"{name} is no folder here, and revision {revision or 'main'} of it could not be "
            f"fetched from the Hugging Face hub ({type(error).__name__})"
        ) from None


def _read_tensors(folder):
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index, names, tensors = folder / "model.safetensors.index.json", ["model.safetensors"], {}
    if not (folder / names[0]).exists() and index.exists():
        names = sorted(set(json.loads(_read_text(index))["weight_map"].values()))
    for name in names:
        try:
            tensors |= load_file(folder / name)
        except FileNotFoundError:
            raise ValueError(f"checkpoint {folder} is incomplete: it has no {name}") from None
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{folder / name} is damaged or not safetensors: {error}") from None
    head = tensors.pop("lm_head.weight", None)
    if head is not None and not torch.equal(head, tensors.get("model.embed_tokens.weight", head)):
        raise ValueError(f"{folder}: lm_head.weight differs from the table; it must be tied to it")
    return tensors


def _stored_signatures(config, ids, folder):
    """The table of a checkpoint. Its stored ids win over those that this code would make."""
    table = SignatureTable.from_ids(ids, config.pad_token_id, config.num_buckets)
    duplicates, file = table.stats()["duplicates"], folder / "tokens.txt"
    if not file.exists():
        if duplicates:
            print(f"{folder}: {duplicates} tokens share another's signature", file=sys.stderr)
        return table
    try:
        lines = _read_text(file).splitlines()
        tokens = [None if line == "-" else base64.b64decode(line, validate=True) for line in lines]
        table = _register_again(table, tokens, config)
    except ValueError as error:
        table.locked = f"{file} does not belong to the signatures stored beside it: {error}"
    if table.locked:
        print(f"{folder}: {table.locked}; the stored ones are used", file=sys.stderr)
    return table


def _register_again(stored, tokens, config):
    """A new table of the tokens if it has the stored ids; else the stored one, locked.

    Where the stored table has duplicates, nothing is re-hashed in the new one. Raises ValueError,
    and changes nothing, if these cannot be its tokens: most of them have other ids where neither a
    re-hash (of the last id) nor random numbers (of the LSH ids) may have made a difference.
    """
    H, shared = config.num_hashes, config.shares_signatures or stored.stats()["duplicates"] > 0
    if len(tokens) != len(stored):
        raise ValueError(f"{len(tokens)} tokens for {len(stored)} signatures")
    made = SignatureTable(H, config.num_buckets, config.num_lsh, shared)
    made.extend(tokens, stored.pad_id)
    different = made.ids != stored.ids  # (V, H)
    if not different.any():
        return made
    found = f"{int(different.any(-1).sum())} of {len(tokens)} signatures differ"
    if different[:, config.num_lsh : max(1, H - 1)].any(-1).sum() > len(tokens) / 2:
        raise ValueError(found)
    rule = "what this code makes" + shared * " without re-hashing"
    stored.tokens, stored.locked = tokens, f"{found} from {rule}"
    return stored


def _load(name, revision, cls=None):
    folder = find_checkpoint(name, revision)
    try:
        config, tensors = Config.from_json(folder / "config.json"), _read_tensors(folder)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"config.json or the index in {folder} is damaged: {error!r}") from None
    own = {"mhf": MultiHashFormer, "standard": Transformer}[config.model]
    if cls not in (None, own):
        raise ValueError(f"{folder} holds a {own.__name__}, not a {cls.__name__}")
    if config.model == "standard":
        model = Transformer(config)
    else:
        ids, H, B = tensors.get("model.hash_map"), config.num_hashes, config.num_buckets
        if ids is None or ids.dim() != 2 or ids.shape[1] != H or ids.min() < 0 or ids.max() >= B:
            raise ValueError(
                f"{folder}: model.hash_map needs {H} columns of ids below num_buckets {B}"
            )
        if (config.pad_token_id or 0) >= len(ids):
            raise ValueError(f"{folder}: pad_token_id {config.pad_token_id}, but {len(ids)} tokens")
        model = MultiHashFormer(config, _stored_signatures(config, ids.long(), folder))
    shape = {k: tuple(t.shape) for k, t in model.state_dict().items()}
    wrong = [f"{k} is missing" for k in sorted(shape.keys() - tensors.keys())]
    wrong += [f"{k} is unknown" for k in sorted(tensors.keys() - shape.keys())]
    for k in sorted(shape.keys() & tensors.keys()):
        if shape[k] != tuple(tensors[k].shape):
            wrong.append(f"{k} is {tuple(tensors[k].shape)}, not {shape[k]}")
    if wrong:
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ValueError(
            f"{folder} does not fit this mhf.py: {', '.join(wrong[:8])}{more}; load it with the "
            "mhf.py that made it"
        )
    model.load_state_dict(tensors)
    return model.eval()


def load(folder, revision=None):
    """A MultiHashFormer or a Transformer, whichever the folder, run or hub id holds."""
    return _load(folder, revision)


def choose_device(name):
    """ "auto", cpu, cuda, cuda:N or mps -> (device, reason); ValueError if it is not to be had."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda"), f"{torch.cuda.get_device_name()} found"
        if torch.backends.mps.is_available():
            return torch.device("mps"), "no CUDA GPU, but Apple's"
        return torch.device("cpu"), "no GPU found"
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda", "mps"):
            raise RuntimeError
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError):
        raise ValueError(
            f"--device {name} is not to be had on this machine; try --device auto"
        ) from None
    return device, "as asked"


# ---------------------------------------------------------------------------------------------
# Tokenizers of published checkpoints
# ---------------------------------------------------------------------------------------------


class PublishedTokenizer:
    """A Hugging Face tokenizer.json or a SentencePiece model, with the interface of Tokenizer.

    A token has two kinds of bytes. Its name, the piece ("▁the", "Ġthe", "<0x0A>"), is what the
    authors hash: `all_bytes`. What it adds to a text (" the", a line end) is `token_bytes`.
    Special tokens are never read out of a text, and none is added to it. Raises ValueError.
    """

    def __init__(self, file):
        file = Path(file)
        try:
            self._read_json(file) if file.suffix == ".json" else self._read_model(file)
        except ImportError as error:
            raise ValueError(f"{file} needs another package: pip install {error.name}") from None
        except Exception as error:  # each package has its own kinds
            raise ValueError(f"{file} is no tokenizer: {' '.join(str(error).split())}") from None
        ends = ("</s>", "<|endoftext|>", "<|end_of_text|>")
        self.eot = next((self.pieces.index(end) for end in ends if end in self.pieces), None)
        self.adds_blank = False
        self.adds_blank = self.decode(self.encode("a")).startswith(" ")

    def _read_json(self, file):
        import tokenizers

        text = _read_text(file)
        encoder = tokenizers.Tokenizer.from_str(text)
        encoder.no_truncation()
        encoder.no_padding()
        encoder.encode_special_tokens = True  # as text
        self.encode = lambda text: encoder.encode(text, add_special_tokens=False).ids
        size = max(encoder.get_vocab().values()) + 1
        self.pieces = [encoder.id_to_token(i) for i in range(size)]  # None where there is a gap
        self.special = {i for i, t in encoder.get_added_tokens_decoder().items() if t.special}
        parts = map(json.loads(text).get, ("normalizer", "pre_tokenizer", "decoder"))
        told = json.dumps([*parts], ensure_ascii=False)
        self.byte_level = '"ByteLevel"' in told
        if not self.byte_level and "▁" not in told:
            raise ValueError("its pieces are neither byte-level nor SentencePiece's")

    def _read_model(self, file):
        import sentencepiece

        encoder = sentencepiece.SentencePieceProcessor(model_file=str(file))
        self.encode, self.byte_level, ids = encoder.encode, False, range(len(encoder))
        self.pieces = [encoder.id_to_piece(i) for i in ids]
        self.special = {i for i in ids if encoder.is_control(i) or encoder.is_unknown(i)}

    def __len__(self):
        return len(self.pieces)

    def decode(self, ids):
        """The text of ids, without the blank that `encode` may put before a text.

        So it is for whole texts. What continues another text is its joined token_bytes.
        """
        raw = b"".join(self.token_bytes(int(i)) or b"" for i in ids)
        return raw.removeprefix(b" " * self.adds_blank).decode("utf-8", "replace")

    def token_bytes(self, token_id):
        """The bytes a token adds to a text; None for an id that is never used."""
        piece = self.pieces[token_id] if 0 <= token_id < len(self) else None
        if piece is None or token_id in self.special:
            return None if piece is None else piece.encode()
        if self.byte_level and all(c in GPT2_BYTES for c in piece):
            return bytes(GPT2_BYTES[c] for c in piece)
        if not self.byte_level and re.fullmatch("<0x[0-9A-F]{2}>", piece):
            return bytes.fromhex(piece[3:5])
        return (piece if self.byte_level else piece.replace("▁", " ")).encode()

    def all_bytes(self):
        """The piece of every id as UTF-8: what is hashed, so what SignatureTable.extend takes."""
        return [None if piece is None else piece.encode() for piece in self.pieces]


_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that are their own letters
_HIDDEN = sorted({*range(256)} - {*_SHOWN})  # the letters of the others start at 256
GPT2_BYTES = {chr(b): b for b in _SHOWN} | {chr(256 + i): b for i, b in enumerate(_HIDDEN)}


def tokenizer_file(folder):
    """The tokenizer of a folder: ours, a tokenizer.json, a SentencePiece model; None if none is."""
    for name in ("tokenizer.tiktoken", "tokenizer.json", "tokenizer.model"):
        if (folder / name).is_file():
            return folder / name
    models = [f for f in sorted(folder.iterdir()) if re.search(r"\.model(\.v\w+)?$", f.name)]
    if len(models) > 1:
        names = ", ".join(file.name for file in models)
        raise ValueError(f"{folder} holds several tokenizers, name one of them: {names}")
    return models[0] if models else None


def open_tokenizer(name, revision=None):
    """A tokenizer of any kind: ours, a tokenizer.json, a SentencePiece model, one of tiktoken's.

    `name` is a file, a folder, a Hugging Face hub id (of which `revision` is taken) or gpt2, ….
    """
    path = Path(name)
    if not path.exists() and str(name) in tiktoken.list_encoding_names():
        return Tokenizer.named(str(name))
    if not path.is_file():
        path = tokenizer_file(_find_folder(name, revision, "tokenizer file, folder or name"))
    if path is None:
        raise ValueError(f"{name} has no tokenizer.json, SentencePiece model or tokenizer.tiktoken")
    if path.name == "tokenizer.tiktoken":
        return Tokenizer.load(path.parent)  # the pattern stands beside it
    return Tokenizer.load(path) if path.suffix == ".tiktoken" else PublishedTokenizer(path)


def adopt_tokenizer(model, tokenizer):
    """Check that a tokenizer is the model's; its signatures know their tokens from then on, and
    the model's pad is the tokenizer's end of text.

    A standard model has no signatures: only the number of tokens is checked. Raises ValueError.
    """
    V, size = model.config.vocab_size, len(tokenizer)
    if size > V:
        raise ValueError(f"the tokenizer has {size} tokens, the checkpoint only {V}")
    table = getattr(model, "signatures", None)
    if table is None:
        return
    tokens = [*tokenizer.all_bytes(), *table.tokens[size:]]  # those of expand have no piece
    if tokens != table.tokens:
        try:
            model.signatures = _register_again(table, tokens, model.config)
        except ValueError as error:
            raise ValueError(f"{error}; this is not the tokenizer of this checkpoint") from None
        if model.signatures.locked:
            print(f"{model.signatures.locked}; the stored ones are used", file=sys.stderr)
    if table.pad_id is not None:
        tokenizer.eot = table.pad_id
