"""MultiHashFormer: a language model without a vocabulary-sized embedding table, in one file.

Every token is a signature: one id from each of H hash functions. The signature selects H rows of a
small table, a gate mixes those rows into one input vector, and the decoder predicts the H ids of
the next token one after another. The table has H * B rows no matter how many tokens there are, so
adding a token adds no parameters. The paper is arXiv 2606.28057, by Xue, Yamaguchi and Aletras.

    "cat"                                                        log P("sat")
      | hash with H seeds                                             ^ renormalise over V tokens
    (17, 4, 90, 31)   signature                                       | sum of log p_j[id_j]
      | look up one row of E per id                               p_1 ... p_H
    e_1 ... e_H                                                       ^ softmax(E_j c_j)
      | gate: x = W_s sum_j alpha_j e_j + b_s                    cascade over j = 1 ... H
      +----------------> Qwen3 decoder blocks ----------------> h ----+
Glossary (names in parentheses are the ones used in config.json):
    N, T, M  batch size, sequence length; a flat list of positions, usually N * T
    D        width of the residual stream (hidden_size)
    H        hash functions, i.e. ids per signature (num_hashes)
    B        buckets per hash function (num_buckets)
    Z        bottleneck width of the gate and the mixers (bottle_neck_dim)
    V        number of tokens (vocab_size)
    A, K, C  attention heads, key/value heads, width of a head (head_dim)
"""

import json
from base64 import b64decode, b64encode
from collections import Counter
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import mmh3
import numpy as np
import torch
import torch.nn.functional as F
from huggingface_hub import save_torch_state_dict, snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn


# ---- Configuration ------------------------------------------------------------------------------
@dataclass
class Config:
    """Everything that shapes the model, under the names of the published config.json files."""

    vocab_size: int = 8192  # V; the signatures decide
    hidden_size: int = 128  # D
    num_hidden_layers: int = 4
    num_attention_heads: int = 2  # A
    num_key_value_heads: int = 1  # K
    head_dim: int | None = None  # C; else D / A
    intermediate_size: int = 384  # of FeedForward
    num_hashes: int = 4  # H
    num_buckets: int = 2048  # B
    num_lsh: int = 0  # LSH functions of the H
    bottle_neck_dim: int = 64  # Z
    max_position_embeddings: int = 256  # longest context
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02  # standard deviation
    # Deviation: not in the paper. With these defaults a model starts as in the paper.
    table_initializer_range: float | None = None  # of the table
    adapter_init: str = "normal"  # of W_s; or "identity"
    pad_token_id: int | None = 0
    model: str = "mhf"  # or "standard", the baseline
    objective: str = "independent"  # see loss_per_position
    joint_weight: float = 0.25  # of the joint objective
    calibration: float = 1.0  # tau divides the scores
    extra: dict = field(default_factory=dict, repr=False)  # unknown keys

    def __post_init__(self):
        bounds = {"num_hashes": (1, 64), "num_buckets": (2, 2**24)}
        bounds |= {"num_lsh": (0, self.num_hashes), "pad_token_id": (0, 2**24)}
        for f in fields(self):
            value = getattr(self, f.name)
            kinds = getattr(f.type, "__args__", (f.type,)) if value is not None else ()
            low, high = bounds.get(f.name, (1, 2**24))
            if int in kinds and not (type(value) is int and low <= value <= high):
                raise ValueError(f"{f.name} {value!r} is not from {low} to {high}")
            if float in kinds and not (type(value) in (int, float) and 0 < value < np.inf):
                raise ValueError(f"{f.name} {value!r} is not positive")
            if value not in CHOICES.get(f.name, (value,)):
                raise ValueError(f"{f.name} {value!r} is not in {CHOICES[f.name]}")
        A, K = self.num_attention_heads, self.num_key_value_heads
        self.head_dim = C = self.head_dim or self.hidden_size // A
        if A % K or C % 2 or C == 0:
            raise ValueError(f"{A} heads, {K} num_key_value_heads, head_dim {C} do not fit")

    @classmethod
    def preset(cls, name, **overrides):  # of PRESETS
        return cls(**(PRESETS[name] | overrides))

    def save(self, path):
        """Write a config.json that also holds the fixed entries of the published ones."""
        ours = asdict(self)
        ours["rope_parameters"] = dict(rope_theta=ours.pop("rope_theta"), rope_type="default")
        ours["use_conditional_prob"] = self.objective != "independent"
        ours["layer_types"] = ["full_attention"] * self.num_hidden_layers
        ends = dict.fromkeys(("bos_token_id", "eos_token_id"), self.pad_token_id)
        entries = PUBLISHED | ends | ours.pop("extra") | ours
        Path(path).write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n", "utf-8")

    @classmethod
    def load(cls, path):
        """Read a config.json. ValueError for a setting that this file does not implement."""
        found = dict(json.loads(Path(path).read_text("utf-8")))
        rope = found.pop("rope_parameters", None) or {}
        places = [found, rope, found.get("rope_scaling") or {}]
        places += [{"layer_types": kind} for kind in found.pop("layer_types", None) or []]
        for name, value in IMPLEMENTED.items():
            if wrong := [p[name] for p in places if p.get(name) not in (None, value)]:
                raise ValueError(f"{name} {wrong[0]!r} is not implemented")
        thetas = {p["rope_theta"] for p in places if "rope_theta" in p}
        if len(thetas) != 1 or not found.keys() >= {*SIZES}:
            raise ValueError(f"one rope_theta, not {thetas}; also {SIZES}")
        found["rope_theta"] = thetas.pop()
        found.setdefault("model", "mhf" if "num_hashes" in found else "standard")
        conditional = found.pop("use_conditional_prob", False)
        found.setdefault("objective", "exact" if conditional else "independent")
        known = {f.name: found.pop(f.name) for f in fields(cls) if f.name in found}
        return cls(**known, extra=found)


OBJECTIVES = ("independent", "exact", "joint")
CHOICES = dict(model=("mhf", "standard"), adapter_init=("normal", "identity"), objective=OBJECTIVES)
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads")
SIZES += ("num_key_value_heads", "intermediate_size", "max_position_embeddings")
OURS = dict(adapter_init="identity", table_initializer_range=0.08, objective="exact")
PAPER = dict(num_buckets=16384, vocab_size=32768)  # H4B16K; H3B10K has 10624
PRESETS = {
    "tiny": dict(zip(SIZES, (4, 128, 2, 1, 384, 256))) | OURS,
    "small": dict(zip(SIZES, (8, 512, 8, 2, 1536, 512))) | OURS,
    "100m": dict(zip(SIZES, (12, 768, 12, 2, 2560, 2048))) | PAPER,
    "1b": dict(zip(SIZES, (20, 2048, 16, 8, 6144, 2048))) | PAPER,
    "3b": dict(zip(SIZES, (36, 2048, 16, 2, 11008, 2048))) | PAPER,
}
FIXED = {"attention_bias": False, "hidden_act": "silu", "lsh_only_embed": False}
FIXED |= {"tie_word_embeddings": True, "use_sliding_window": False}
IMPLEMENTED = {"rope_type": "default", "type": "default", "layer_types": "full_attention"}
IMPLEMENTED |= FIXED | {"partial_rotary_factor": 1.0}
PUBLISHED = FIXED | dict(  # the rest is not read
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", transformers_version="5.3.0",
    attention_dropout=0.0, dtype="float32", fused_decoding=False, max_window_layers=28,
    sliding_window=None, use_cache=True)  # fmt: skip


# ---- Signatures (section 3.1 of the paper) ------------------------------------------------------
hash128 = mmh3.mmh3_x64_128_uintdigest  # (bytes, seed) -> int


class SignatureTable:
    """Gives every token (bytes) a signature of H ids between 1 and B - 1; padding gets zeros.
        id_j = murmurhash3_x64_128(token, seed=j) mod (B - 1) + 1
    If another token has the signature already, only the last id is hashed again, with the seeds H,
    H + 1, ... until it is free. With H = 1, or with locality-sensitive functions alone, nothing is
    hashed again: tokens share signatures.
    Deviation: the authors' code forgets some tokens when it hashes again, and then hands out
    duplicates. Here signatures are unique; where theirs are, too, the two are equal."""

    def __init__(self, num_hashes, num_buckets, num_lsh=0):
        if min(num_hashes, num_buckets - 1) < 1 or not 0 <= num_lsh <= num_hashes:
            raise ValueError(f"no table: {num_hashes=}, {num_buckets=}, {num_lsh=}")
        self.num_hashes = num_hashes
        self.num_buckets = num_buckets
        self.num_lsh = num_lsh
        self.shared = num_hashes in (1, num_lsh)  # nothing is hashed again
        self.pad_id = None
        self.tokens = []  # bytes; None if unused or unknown
        self.signatures = []  # a tuple of H ids for every token
        self.owner = {}  # signature -> the lowest token id that has it
        self.rehashed = []  # ids whose first signature was taken

    def __len__(self):
        return len(self.signatures)

    @property
    def ids(self):
        return torch.tensor(np.array(self.signatures)).long().view(-1, self.num_hashes)  # (V, H)

    def extend(self, tokens, pad_id=None):
        """Add tokens in the order of their ids; None stands for an id that is never used.
        ValueError, and no change, for a second pad, a token twice, and if no signature is free."""
        tokens, owner = list(tokens), dict(self.owner)
        signatures, rehashed = [], []
        new_ids = range(len(self), len(self) + len(tokens))
        if pad_id is not None and (self.pad_id is not None or pad_id not in new_ids):
            raise ValueError(f"{pad_id=} is not in {new_ids} or not the first")
        for token, count in Counter([*self.tokens, *tokens]).items():
            if token is not None and count > 1:
                raise ValueError(f"token {token!r} would be there twice")
        lsh = lsh_ids(tokens, self.num_lsh, self.num_buckets)
        for token_id, token, local in zip(new_ids, tokens, lsh):
            signature = (0,) * self.num_hashes
            if token is not None and token_id != pad_id:
                candidates = self.candidates(token, local)
                signature = next(candidates)
                if signature in owner and not self.shared:
                    signature = next(other for other in candidates if other not in owner)
                    rehashed.append(token_id)
            if token is not None or token_id == pad_id:
                owner.setdefault(signature, token_id)
            signatures.append(signature)
        self.tokens += tokens
        self.signatures += signatures
        self.rehashed += rehashed
        self.owner = owner
        self.pad_id = self.pad_id if pad_id is None else pad_id

    def candidates(self, token, lsh=()):
        """Yield the signature as first hashed, then with its last id hashed again and again."""
        H, buckets = self.num_hashes, self.num_buckets - 1
        hashed = [hash128(token, seed) % buckets + 1 for seed in range(len(lsh), H)]
        yield (*lsh, *hashed)
        for seed in range(H, H + 100 * buckets):
            yield (*lsh, *hashed[:-1], hash128(token, seed) % buckets + 1)
        raise ValueError(f"{token!r}: no signature is free; raise num_buckets")

    def trace(self, token):
        """The tries for a token's last id: [(seed, last id, token id that had the signature)]."""
        lsh = lsh_ids([token], self.num_lsh, self.num_buckets)[0]
        candidates, tries = self.candidates(token, lsh), []
        for seed, signature in enumerate(candidates, self.num_hashes - 1):
            owner = self.owner.get(signature)
            free = self.shared or owner is None or self.tokens[owner] == token
            tries.append((seed, signature[-1], None if free else owner))
            if free:
                return tries

    @classmethod
    def from_ids(cls, ids, num_buckets, pad_id=None, num_lsh=0, tokens=None):
        """The table of a checkpoint, whose stored ids (V, H) are taken as they are."""
        table = cls(ids.shape[1], num_buckets, num_lsh)
        table.signatures = [tuple(signature) for signature in ids.tolist()]
        table.tokens = [*(tokens or [None] * len(ids))]
        table.pad_id = pad_id
        if len(table.tokens) != len(ids):
            raise ValueError(f"tokens.txt has {len(table.tokens)} lines, not {len(ids)}")
        if ids.min() < 0 or ids.max() >= num_buckets or (pad_id or 0) >= len(ids):
            raise ValueError(f"signature id {ids.max()} or pad {pad_id} is out of range")
        for token_id, signature in enumerate(table.signatures):
            if any(signature) or token_id == pad_id:
                table.owner.setdefault(signature, token_id)
        return table


def lsh_ids(tokens, num_lsh, num_buckets, chunk=256):
    """Locality-sensitive ids, num_lsh for every token: tokens that look alike share buckets.
    The hashed character trigrams of a token select rows of a random matrix; the signs of their sum
    are the token's code, and its bucket is the nearest of B - 1 random directions."""
    if num_lsh == 0 or not tokens:
        return [()] * len(tokens)
    first, second = (torch.Generator().manual_seed(seed) for seed in (3407, 3408))
    rows = torch.randn(16000, num_lsh, 512, generator=first)
    directions = torch.randn(512 * num_lsh, num_lsh, num_buckets - 1, generator=second)
    directions = F.normalize(directions, dim=-1)
    sums = []
    for token in tokens:
        text = (token or b"").decode("utf-8", "backslashreplace")
        trigrams = Counter([text[i : i + 3] for i in range(len(text) - 2)] or [text])
        counts = torch.tensor(list(trigrams.values()), dtype=torch.float32)
        for j in range(num_lsh):
            chosen = [hash128(trigram.encode(), j) % 16000 for trigram in trigrams]
            sums.append(counts @ rows[chosen, j])  # (512,)
    sums = torch.cat(sums).view(len(tokens), -1)  # (V, 512 num_lsh)
    codes = torch.where(sums >= 0, 1.0, -1.0) / 512**0.5
    nearest = []
    for c in codes.split(chunk):
        nearest += torch.einsum("nc,cjb->njb", c, directions).argmax(-1).add(1).tolist()
    return nearest  # V lists of num_lsh


# ---- Gated embedding (section 3.2 of the paper) -------------------------------------------------
class GatedEmbedding(nn.Module):
    """x = W_s (sum_j alpha_j e_j) + b_s; alpha = softmax over j of w2 SiLU(W1 e_j + b1) + b2."""

    def __init__(self, config):
        super().__init__()
        D, Z = config.hidden_size, config.bottle_neck_dim
        self.scorer = nn.Sequential(nn.Linear(D, Z), nn.SiLU(), nn.Linear(Z, 1))
        self.output_proj = nn.Sequential(nn.Linear(D, D))

    def forward(self, e):
        """The rows of a signature (..., H, D) -> input vector (..., D) and gate (..., H)."""
        gate = self.scorer(e).float().softmax(-2).to(e.dtype)  # (..., H, 1)
        x = self.output_proj((gate * e).sum(-2)).to(e.dtype)  # (..., D)
        return x, gate.squeeze(-1)


# ---- Backbone: the Qwen3 decoder without its embedding and output layer -------------------------
def rotate(x, cos, sin):
    """Rotary position embedding, split-half convention: x (N, heads, T, C), cos and sin (T, C)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention; queries and keys are normalised before they are rotated."""

    def __init__(self, config):
        super().__init__()
        D, C, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        A, K = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = C
        self.q_proj = nn.Linear(D, A * C, bias=False)
        self.k_proj = nn.Linear(D, K * C, bias=False)
        self.v_proj = nn.Linear(D, K * C, bias=False)
        self.o_proj = nn.Linear(A * C, D, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(C, eps), nn.RMSNorm(C, eps)

    def forward(self, x, cos, sin, cache=None, layer=0):
        T, heads = x.shape[1], (*x.shape[:2], -1, self.head_dim)
        q = self.q_norm(self.q_proj(x).view(heads).to(x.dtype)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(heads).to(x.dtype)).transpose(1, 2)
        v = self.v_proj(x).view(heads).transpose(1, 2)  # (N, K, T, C)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)  # (N, A, T, C), (N, K, T, C)
        if cache is not None:
            k, v = cache.update(layer, k, v)
        past, mask = k.shape[2] - T, None
        if past and T > 1:  # one token alone may see the whole cache
            mask = x.new_ones(T, past + T, dtype=torch.bool).tril(past)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=not past, enable_gqa=True)
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
        self.self_attn = Attention(config)
        self.mlp = FeedForward(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, cos, sin, cache=None, layer=0):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache, layer)
        return x + self.mlp(self.post_attention_layernorm(x))  # (N, T, D)


class Backbone(nn.Module):
    """Embedding table, decoder blocks, final norm."""

    def __init__(self, config, table_rows):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(table_rows, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, cache=None, return_layers=False):
        """Input vectors (N, T, D) -> final states (N, T, D), and the outputs of all layers."""
        start = 0 if cache is None else cache.length
        end, window = start + x.shape[1], self.config.max_position_embeddings
        if end > window:
            raise ValueError(f"{end} positions exceed max_position_embeddings {window}")
        # Computed here, in float32, so that no cast of the model rounds the angles.
        C = self.config.head_dim
        pairs = torch.arange(0, C, 2, device=x.device).float()
        frequency = self.config.rope_theta ** -(pairs / C)  # (C / 2,)
        positions = torch.arange(start, end, device=x.device).float()
        angle = torch.outer(positions, frequency).repeat(1, 2)  # (T, C)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        outputs = []
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, cache, i)  # (N, T, D)
            outputs.append(x)
        x = self.norm(x)
        return (x, outputs) if return_layers else x


# ---- Cascade decoder (section 3.3 of the paper) -------------------------------------------------
def soft_embedding(o, E):
    """Logits o (..., B), rows E (B, D) -> the mean row under the prediction (..., D)."""
    return o.float().softmax(-1).to(E.dtype) @ E


class CascadeDecoder(nn.Module):
    """Predicts the H ids in turn, each from h and the soft predictions before it, never from ids.
    c_1 = h
    o_j = E_j c_j                        logits of function j over its B buckets
    e_j = softmax(o_j) E_j               soft embedding: what function j tells the next one
    c_{j+1} = c_j + W_up SiLU(W_dn [c_j ; e_j] + b_dn) + b_up"""

    def __init__(self, config):
        super().__init__()
        D, Z = config.hidden_size, config.bottle_neck_dim
        self.cascade_mixer = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * D, Z), nn.SiLU(), nn.Linear(Z, D))
            for _ in range(config.num_hashes - 1)
        )

    def steps(self, h, table, force=()):
        """Yield (o_j, e_j) for every function; e_j is None for the last, which has no successor.
        h (..., D), table (H, B, D). force = {j: bucket} replaces e_j by the row of that bucket."""
        c = h
        for j, E in enumerate(table):
            o = c @ E.T  # (..., B)
            if j == len(self.cascade_mixer):
                yield o, None
                return
            e = E[force[j]].expand_as(c) if j in force else soft_embedding(o, E)  # (..., D)
            yield o, e
            c = c + self.cascade_mixer[j](torch.cat((c, e), dim=-1))  # (..., D)

    def forward(self, h, table):
        """States (..., D) and table (H, B, D) -> logits (..., H, B)."""
        return torch.stack([o for o, _ in self.steps(h, table)], dim=-2)


# ---- The two models: MultiHashFormer, and a standard transformer to compare it with -------------
class LanguageModel(nn.Module):
    """What both models share. Each has its own embed, token_scores and loss_per_position."""

    @property
    def device(self):
        return self.model.embed_tokens.weight.device

    def forward(self, ids, cache=None, return_layers=False):
        """Token ids (N, T) -> states after the final norm (N, T, D)."""
        return self.model(self.embed(ids), cache, return_layers)

    def loss(self, ids, targets, objective=None):
        """Mean loss over the positions whose target is not -100; ids and shifted targets (N, T)."""
        counted = targets.flatten() != -100
        h = self(ids).flatten(0, 1)[counted]  # (M, D)
        losses = self.loss_per_position(h, targets.flatten()[counted], objective)  # (M,)
        return losses.sum() / max(1, len(losses))

    def log_probs(self, ids):
        """ids (N, T) -> calibrated log probability of every next token (N, T, V)."""
        scores = self.token_scores(self(ids), log_p=False)
        return (scores / self.config.calibration).log_softmax(-1)

    @torch.no_grad()
    def generate(self, ids, max_new_tokens=100, temperature=1.0, top_k=None, top_p=None, stop=(),
                 seed=None, return_log_probs=False):  # fmt: skip
        """Continue one prompt (T,), yielding ids, or prompts of one length (N, T), yielding (N,).
        A row ends after a token in `stop`; from then on it yields the pad. A full context is cut to
        its newest half. return_log_probs: yield pairs (token, its calibrated log probability before
        temperature, top_k and top_p, which sampling_probs explains)."""
        device, window = self.device, self.config.max_position_embeddings
        rng = None if seed is None else torch.Generator(device).manual_seed(seed)
        stop = torch.tensor([*stop], device=device)
        prompt = torch.as_tensor(ids, device=device)
        if prompt.numel() == 0:
            raise ValueError("the prompt is empty")
        context = new = torch.atleast_2d(prompt)  # (N, T)
        done = torch.zeros_like(context[:, :1], dtype=torch.bool)
        cache = KVCache()
        for _ in range(max_new_tokens):
            if context.shape[1] > window:
                context = new = context[:, -max(1, window // 2) :]
                cache = KVCache()
            with torch.inference_mode():
                h = self(new, cache)[:, -1]  # (N, D)
                logits = self.token_scores(h, log_p=False) / self.config.calibration  # (N, V)
            p = sampling_probs(logits, temperature, top_k, top_p)  # (N, V)
            new = torch.multinomial(p, 1, generator=rng) if temperature else p.argmax(-1, True)
            new = new.masked_fill(done, self.config.pad_token_id or 0)
            log_p = logits.log_softmax(-1).gather(-1, new).masked_fill(done, 0)  # (N, 1)
            result = [x.item() if prompt.dim() == 1 else x[:, 0].cpu() for x in (new, log_p)]
            yield tuple(result) if return_log_probs else result[0]
            done |= torch.isin(new, stop)
            if done.all():
                return
            context = torch.cat((context, new), dim=-1)

    def num_parameters(self):
        """How many parameters each part has, and how many a V x D table would have."""
        parts = dict(total=self, table=self.model.embed_tokens, blocks=self.model.layers)
        n = {k: sum(p.numel() for p in v.parameters()) for k, v in parts.items()}
        n["blocks"] += self.config.hidden_size
        n["hashing"] = n["total"] - n["table"] - n["blocks"]
        n["standard_table"] = self.config.vocab_size * self.config.hidden_size
        return n

    def save_pretrained(self, folder):
        """Write config.json, model.safetensors and, where they are known, the tokens."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.config.extra["dtype"] = str(self.model.norm.weight.dtype).split(".")[1]
        self.config.save(folder / "config.json")
        save_torch_state_dict(self.state_dict(), folder)
        if self.config.model == "mhf":
            lines = ["-" if t is None else b64encode(t).decode() for t in self.signatures.tokens]
            (folder / "tokens.txt").write_text("\n".join([*lines, ""]), "utf-8")


class MultiHashFormer(LanguageModel):
    """The model of the paper. Its vocabulary is that of its signature table."""

    def __init__(self, config, signatures):
        super().__init__()
        self.config = replace(config, model="mhf", num_lsh=signatures.num_lsh)
        self.model = Backbone(self.config, config.num_hashes * config.num_buckets)
        self.model.combiner = GatedEmbedding(config)
        self.hash_head = CascadeDecoder(config)
        self.use_signatures(signatures)
        self.register_load_state_dict_post_hook(MultiHashFormer.follow_hash_map)
        initialise(self)

    @property
    def table(self):
        """The table as (H, B, D): the rows of each function, shared by input and output."""
        H, B = self.config.num_hashes, self.config.num_buckets
        return self.model.embed_tokens.weight.view(H, B, -1)

    def embed(self, ids, return_gate=False):
        """Token ids (N, T) -> input vectors (N, T, D), and the gate (N, T, H)."""
        check_ids(ids, self.config.vocab_size)
        x, gate = self.model.combiner(self.model.embed_tokens(self.rows[ids]))
        return (x, gate) if return_gate else x

    def sum_over_signatures(self, columns):
        """Bucket values (H * B, M) -> their sums over the signatures (V, M), -inf for unused ids.
        embedding_bag reads them as an embedding table, so no (V, M, H) tensor is built."""
        sums = F.embedding_bag(self.rows, columns, mode="sum")  # (V, M)
        return sums.index_fill_(0, self.unused, -torch.inf)

    def loss_per_position(self, h, targets, objective=None):
        """States (M, D), target token ids (M,) -> loss (M,).
        independent: -sum_j log p_j, each function on its own (the paper)
        exact:       -log of the probability after renormalising over the V tokens
        joint:       exact + joint_weight * independent / H: single functions keep their meaning"""
        check_ids(targets, self.config.vocab_size, self.unused)
        objective = objective or self.config.objective
        if objective not in OBJECTIVES:
            raise ValueError(f"objective {objective!r} is not in {OBJECTIVES}")
        ids = self.model.hash_map[targets]  # (M, H)
        logits, independent = [], 0.0
        for j, (o, _) in enumerate(self.hash_head.steps(h, self.table)):
            logits.append(o.T)
            if objective != "exact":
                independent += F.cross_entropy(o.float(), ids[:, j], reduction="none")
        if objective == "independent":
            return independent
        # A function's log-sum-exp is the same for all tokens, so logits can replace log p. The
        # softmax runs over columns: to copy (V, M) into rows would take longer than all else.
        scores = self.sum_over_signatures(torch.cat(logits).float())  # (V, M)
        log_p = scores.log_softmax(0)
        exact = -log_p.gather(0, targets.unsqueeze(0))[0]  # (M,)
        return exact + self.config.joint_weight / self.config.num_hashes * independent

    def bucket_log_probs(self, h):
        """States (..., D) -> log p_j of every bucket of every function (..., H, B)."""
        return self.hash_head(h, self.table).float().log_softmax(-1)

    def token_scores(self, h, log_p=True):
        """States (..., D) -> sum_j log p_j[id_j] of every token (..., V), not yet renormalised;
        without log_p, sum_j o_j[id_j], which has the same softmax over V and is more exact."""
        o = self.hash_head(h.reshape(-1, h.shape[-1]), self.table).float()  # (M, H, B)
        values = (o.log_softmax(-1) if log_p else o).flatten(1)  # (M, H * B)
        columns = values.T.clone(memory_format=torch.contiguous_format)  # (H * B, M)
        return self.sum_over_signatures(columns).T.reshape(*h.shape[:-1], -1)

    def valid_mass(self, ids):
        """The probability (N, T) of all signatures that tokens have, the pad included."""
        distinct = list(self.signatures.owner.values())  # one token of every signature
        return self.token_scores(self(ids))[..., distinct].exp().sum(-1)

    def use_signatures(self, signatures):  # checkpoints hold only hash_map
        H, B, _ = self.table.shape
        if (signatures.num_hashes, signatures.num_buckets) != (H, B):
            raise ValueError(f"not signatures of {H} hashes, {B} buckets")
        self.signatures = signatures
        self.config.vocab_size = len(signatures)
        self.config.pad_token_id = pad_id = signatures.pad_id
        ids = signatures.ids.to(self.device)  # (V, H)
        rows = ids + torch.arange(H, device=self.device) * B  # function j: from j B on
        unused = (ids == 0).all(-1).nonzero()[:, 0]
        unused = unused[unused != (-1 if pad_id is None else pad_id)]
        self.model.register_buffer("hash_map", ids)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("unused", unused, persistent=False)

    def follow_hash_map(self, _=None):  # after load_state_dict
        ids, old = self.model.hash_map.cpu(), self.signatures
        if not torch.equal(ids, old.ids):
            shape = old.num_buckets, old.pad_id, old.num_lsh
            self.use_signatures(SignatureTable.from_ids(ids, *shape))

    def expand(self, tokens):
        """Give new tokens (bytes) signatures. No parameter is added, removed or changed."""
        self.signatures.extend(tokens)
        self.use_signatures(self.signatures)


class Transformer(LanguageModel):
    """The baseline: the same backbone with a V x D embedding and a softmax over V."""

    def __init__(self, config):
        super().__init__()
        self.config = replace(config, model="standard")
        self.model = Backbone(self.config, config.vocab_size)
        self.added = []  # the tokens that expand has added
        initialise(self)

    def embed(self, ids):
        check_ids(ids, self.config.vocab_size)
        return self.model.embed_tokens(ids)  # (N, T, D)

    def token_scores(self, h, log_p=True):
        return (h @ self.model.embed_tokens.weight.T).float()  # (..., V)

    def loss_per_position(self, h, targets, objective=None):
        """States (M, D), target token ids (M,) -> cross-entropy (M,), whatever the objective."""
        check_ids(targets, self.config.vocab_size)
        return F.cross_entropy(self.token_scores(h), targets, reduction="none")

    def expand(self, tokens):
        """Append one row per new token, the mean of all rows; make the optimizer afterwards."""
        tokens, old = list(tokens), self.model.embed_tokens.weight
        if len({*self.added, *tokens}) < len(self.added) + len(tokens):
            raise ValueError("a token is added twice")
        self.added += tokens
        rows = torch.cat((old, old.mean(0).expand(len(tokens), -1))).detach()  # (V, D)
        self.model.embed_tokens = nn.Embedding.from_pretrained(rows, not old.requires_grad)
        self.config.vocab_size = len(rows)


def check_ids(ids, vocab_size, unused=()):
    """Refuse ids out of range: indexing would read a negative one from the end of the table."""
    if not torch.compiler.is_compiling():
        if ((ids < 0) | (ids >= vocab_size)).any():
            raise ValueError(f"ids {ids.min()} to {ids.max()} are not in 0 to {vocab_size - 1}")
        if len(unused) and torch.isin(ids, unused).any():
            raise ValueError("a target is an id that is never used")


@torch.no_grad()
def initialise(model):  # biases 0, norms 1, the rest at random
    config = model.config
    table_std = config.table_initializer_range or config.initializer_range
    for name, p in model.named_parameters():
        if p.dim() == 1:
            p.fill_(float(name.endswith("norm.weight")))
        elif "output_proj" in name and config.adapter_init == "identity":
            nn.init.eye_(p)
        else:
            p.normal_(std=table_std if "embed_tokens" in name else config.initializer_range)


# ---- Generation ---------------------------------------------------------------------------------
class KVCache:
    """Keys and values of the tokens read so far, one pair of tensors per layer."""

    def __init__(self):
        self.length, self.pairs = 0, {}

    def update(self, layer, k, v):  # k, v (N, K, T, C) -> all so far
        if layer in self.pairs:
            k, v = (torch.cat(both, dim=2) for both in zip(self.pairs[layer], (k, v)))
        self.pairs[layer] = k, v
        self.length = k.shape[2]
        return k, v


def sampling_probs(logits, temperature=1.0, top_k=None, top_p=None):
    """Logits (N, V) -> the probabilities (N, V) that generate draws from. temperature 0 is greedy;
    top_k keeps the k best, of those top_p the fewest with that mass; of equals, the lowest ids."""
    cuts_fit = (top_k is None or top_k >= 1) and (top_p is None or 0 < top_p <= 1)
    if not cuts_fit or temperature is None or not 0 <= temperature < np.inf:
        raise ValueError(f"out of range: {temperature=}, {top_k=} or {top_p=}")
    if temperature < 1e-6:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    if top_k is None and top_p is None:
        return logits.softmax(-1)
    ordered, order = logits.sort(stable=True, descending=True)  # (N, V), best first
    if top_k is not None:
        ordered[:, top_k:] = -torch.inf
    probs = ordered.softmax(-1)
    if top_p is not None:
        better = probs.cumsum(-1) - probs  # what comes before each
        probs = probs.masked_fill(better >= top_p, 0)
    return torch.zeros_like(probs).scatter(-1, order, probs / probs.sum(-1, keepdim=True))


# ---- Saving, loading, devices and mixed precision -----------------------------------------------
def find_checkpoint(name, revision=None):
    """A folder: the one named, a run's last checkpoint, or a download from Hugging Face."""
    folder, last = Path(name), Path(name) / "last"
    if folder.is_dir():
        return folder / last.read_text("utf-8").strip() if last.is_file() else folder
    wanted = ["*.json", "*.safetensors", "*.tiktoken", "tokens.txt"]
    try:
        return Path(snapshot_download(str(name), revision=revision, allow_patterns=wanted))
    except OSError as error:
        raise ValueError(f"{name}: no folder, no hub name: {error}") from None


def load(name, revision=None):
    """A MultiHashFormer or a Transformer, whichever the folder, run or hub id holds, in float32."""
    folder, tensors = find_checkpoint(name, revision), {}
    file = folder / "config.json"  # for an error to name
    try:
        config = Config.load(file)
        for file in [*folder.glob("model*.safetensors")] or [folder / "model.safetensors"]:
            tensors |= load_file(file)
        table = tensors["model.embed_tokens.weight"]
        if not torch.equal(tensors.pop("lm_head.weight", table), table):
            raise ValueError("lm_head.weight is not the table")
        if not all(t.isfinite().all() for t in tensors.values()):
            raise ValueError("some weights are not finite")
        if config.model == "standard":
            model = Transformer(config)
        else:
            ids = tensors["model.hash_map"]
            file = folder / "tokens.txt"
            lines = file.read_text("utf-8").splitlines() if file.exists() else []
            tokens = [None if t == "-" else b64decode(t, validate=True) for t in lines]
            file = folder  # any file of it
            shape = config.num_buckets, config.pad_token_id, config.num_lsh
            model = MultiHashFormer(config, SignatureTable.from_ids(ids, *shape, tokens))
        model.load_state_dict(tensors)  # names the keys that do not fit
    except (ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"checkpoint {file}: {error}") from error
    return model.eval()


def choose_device(name="auto"):
    """auto: CUDA, else Apple's MPS, else the CPU. ValueError for a device that is not there."""
    if name == "auto":
        found = "mps" if torch.backends.mps.is_available() else "cpu"
        name = "cuda" if torch.cuda.is_available() else found
    try:
        torch.zeros(1, device=name).item()
        return torch.device(name)
    except (RuntimeError, AssertionError):
        raise ValueError(f"device {name!r} is not available; try auto") from None


def choose_precision(name, device):
    """auto: bf16 where the hardware computes it, else fp16 on older CUDA GPUs, else fp32."""
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"
    chip = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    return "bf16" if chip.get("avx512_bf16") or chip.get("amx_bf16") else "fp32"


def autocast(device, precision):
    """For callers of a model: matrix products in 16 bits; weights, softmaxes, losses in float32."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}[precision]
    return torch.autocast(device.type, dtype, enabled=dtype is not None)
