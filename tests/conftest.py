"""What the tests share: tiny models whose probabilities are not flat; the equations as loops."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported

import math
import re
import signal
import socket
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import settings

from mhf import Config, MultiHashFormer, SignatureTable, Transformer

torch.set_num_threads(1)
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")

FIXTURES = Path(__file__).parent / "fixtures"
PAD = 2  # the id of the pad in every vocabulary of these tests
TINY = dict(
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=24,
    bottle_neck_dim=8,
    max_position_embeddings=32,
)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Any attempt to connect fails at once."""

    def refuse(*args):
        raise OSError("the tests use no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def time_limit():
    """Ends an endless loop after 5 seconds, where the system has alarms."""
    if not hasattr(signal, "SIGALRM"):
        yield
        return

    def stop(*args):
        raise TimeoutError("an endless loop")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(5)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def vocabulary(size, unassigned=()):
    """`size` tokens, the first of them no UTF-8; None at the ids that no token uses."""
    tokens = [b"\xff\xfe", *(b"token %d" % i for i in range(1, size))]
    return [None if i in unassigned else token for i, token in enumerate(tokens)]


def build(H=3, B=6, V=20, num_lsh=0, unassigned=(), seed=4, standard=False, **fields):
    """A tiny model with weights of 5 to 25 times the usual scale, so that no softmax is flat.

    The seed is one with which the greedy texts of both classes use many different tokens.
    """
    fields = TINY | dict(num_hashes=H, num_buckets=B, num_lsh=num_lsh) | fields
    config = Config(vocab_size=V, pad_token_id=PAD, **fields)
    if standard:
        model = Transformer(config)
    else:
        table = SignatureTable(H, B, num_lsh, allow_collisions=num_lsh == H or H == 1)
        table.extend(vocabulary(V, unassigned), pad_id=PAD)
        model = MultiHashFormer(config, table)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            scale = 0.1 if p.dim() == 1 else 0.3 if "embed_tokens" in name else 0.5
            p.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else scale * noise)
    return model.eval()


def random_checkpoint(
    folder, words, unused=0, standard=False, tokenizer=True, seed=0, max_position_embeddings=64,
    **fields,
):  # fmt: skip
    """A checkpoint folder with a tiny model of a tokenizer's words, and `unused` ids behind them.

    Its random weights are large enough that no distribution is flat.
    """
    fields = dict(num_hashes=3, num_buckets=64, calibration=1.25) | fields
    config = Config(
        vocab_size=len(words) + unused,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        bottle_neck_dim=4,
        max_position_embeddings=max_position_embeddings,
        initializer_range=0.3,
        pad_token_id=words.eot,
        **fields,
    )
    torch.manual_seed(seed)
    if standard:
        model = Transformer(config)
    else:
        shape = config.num_hashes, config.num_buckets, config.num_lsh
        table = SignatureTable(*shape, allow_collisions=config.shares_signatures)
        table.extend(words.all_bytes() + [None] * unused, pad_id=words.eot)
        model = MultiHashFormer(config, table)
    model.save_pretrained(folder)
    if tokenizer:
        words.save(folder)
    return folder


@pytest.fixture(params=[False, True], ids=["mhf", "standard"])
def model(request):
    """A tiny model of either class."""
    return build(standard=request.param)


@pytest.fixture
def ids():
    """(2, 7) token ids of a vocabulary of 20."""
    return torch.randint(20, (2, 7), generator=torch.Generator().manual_seed(1))


def close(actual, expected, atol=1e-5, rtol=1e-5):
    """Equal within atol + rtol·|expected|; 1e-5 is what float32 needs on these sizes, with room."""
    actual, expected = torch.as_tensor(actual).double(), torch.as_tensor(expected).double()
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


def one_sentence(error, *parts):
    """The message is one line that names each of `parts`: numbers and words, not pieces of them."""
    text = str(error.value)
    assert text and "\n" not in text
    for part in parts:
        assert re.search(rf"(?<!\w){re.escape(str(part))}(?!\w)", text), f"no {part!r} in {text!r}"


class Plain:
    """The published architecture, position by position in float64, from a state_dict alone."""

    def __init__(self, model):
        self.config = model.config
        self.w = {
            k: v.double() if v.is_floating_point() else v for k, v in model.state_dict().items()
        }
        H, B = self.config.num_hashes, self.config.num_buckets
        self.E = self.w["model.embed_tokens.weight"].view(H, B, -1)  # (H, B, D)

    def linear(self, name, x):
        return self.w[f"{name}.weight"] @ x + self.w.get(f"{name}.bias", 0.0)

    def norm(self, name, x):
        rms = (x.square().mean() + self.config.rms_norm_eps).sqrt()
        return x / rms * self.w[f"{name}.weight"]

    def bottleneck(self, name, x):
        """W2 SiLU(W1 x + b1) + b2, as in the gate and in the mixers."""
        return self.linear(f"{name}.2", F.silu(self.linear(f"{name}.0", x)))

    def embed(self, token):
        """Section 2: the input vector (D,) and the gate (H,) of one token."""
        signature = self.w["model.hash_map"][token].tolist()
        e = [self.E[j, id_] for j, id_ in enumerate(signature)]
        s = torch.cat([self.bottleneck("model.combiner.scorer", e_j) for e_j in e])  # (H,)
        gate = s.exp() / s.exp().sum()  # (H,)
        mixed = sum(a * e_j for a, e_j in zip(gate, e, strict=True))  # (D,)
        return self.linear("model.combiner.output_proj.0", mixed), gate

    def cascade(self, h, force=()):
        """Section 4: the logits (H, B) after one state; `force` puts a row for a soft embedding."""
        c, logits = h, []
        for j, E in enumerate(self.E):
            logits.append(E @ c)  # (B,)
            if j < len(self.E) - 1:
                p = logits[-1].exp() / logits[-1].exp().sum()  # (B,)
                e = E[force[j]] if j in force else sum(p[b] * E[b] for b in range(len(E)))  # (D,)
                c = c + self.bottleneck(f"hash_head.cascade_mixer.{j}", torch.cat((c, e)))  # (D,)
        return torch.stack(logits)

    def rotated(self, x, t):
        """Split-half rotary position t of one head (C,)."""
        half, y = len(x) // 2, x.clone()
        for i in range(half):
            angle = t * self.config.rope_theta ** (-i / half)
            y[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
            y[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
        return y

    def attention(self, name, xs):
        A, K = self.config.num_attention_heads, self.config.num_key_value_heads
        queries, keys, values, outputs = [], [], [], []
        for t, x in enumerate(xs):
            q, k, v = (self.linear(f"{name}.{part}_proj", x) for part in "qkv")
            q = [self.norm(f"{name}.q_norm", head) for head in q.view(A, -1)]
            k = [self.norm(f"{name}.k_norm", head) for head in k.view(K, -1)]
            queries.append([self.rotated(head, t) for head in q])
            keys.append([self.rotated(head, t) for head in k])
            values.append(v.view(K, -1))
            heads = []
            for a, q in enumerate(queries[t]):
                kv = a * K // A
                weight = torch.stack([q @ keys[s][kv] / len(q) ** 0.5 for s in range(t + 1)])
                weight = weight.softmax(0)  # (t + 1,)
                heads.append(sum(weight[s] * values[s][kv] for s in range(t + 1)))  # (C,)
            outputs.append(self.linear(f"{name}.o_proj", torch.cat(heads)))  # (D,)
        return outputs

    def states(self, row):
        """Sections 2 and 3: the states (T, D) of one sequence of ids."""
        xs = [self.embed(token)[0] for token in row]
        for i in range(self.config.num_hidden_layers):
            name = f"model.layers.{i}"
            normed = [self.norm(f"{name}.input_layernorm", x) for x in xs]
            attended = self.attention(f"{name}.self_attn", normed)
            xs = [x + y for x, y in zip(xs, attended, strict=True)]
            for t, x in enumerate(xs):
                y = self.norm(f"{name}.post_attention_layernorm", x)
                gate, up = (self.linear(f"{name}.mlp.{part}_proj", y) for part in ("gate", "up"))
                xs[t] = x + self.linear(f"{name}.mlp.down_proj", F.silu(gate) * up)
        return torch.stack([self.norm("model.norm", x) for x in xs])
