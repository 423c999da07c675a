"""What the tests share: tiny models whose probabilities are not flat; the equations as loops."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported

import re
import socket
import zlib
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
TINY = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=24, bottle_neck_dim=8, max_position_embeddings=32)  # fmt: skip


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Any attempt to connect fails at once."""

    def refuse(*args):
        raise OSError("the tests use no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def build(H=3, B=6, V=20, num_lsh=0, unassigned=(), seed=11, standard=False, tokens=None,
          pad_id=PAD, **fields):  # fmt: skip
    """A tiny model with weights of 5 to 25 times the usual scale, so that no softmax is flat."""
    names = [b"\xff\xfe", *(b"token %d" % i for i in range(1, V))]  # the first is no UTF-8
    tokens = tokens or [None if i in unassigned else name for i, name in enumerate(names)]
    fields = TINY | dict(num_hashes=H, num_buckets=B, num_lsh=num_lsh) | fields
    config = Config(vocab_size=len(tokens), pad_token_id=pad_id, **fields)
    if standard:
        model = Transformer(config)
    else:
        table = SignatureTable(config.num_hashes, config.num_buckets, config.num_lsh)
        table.extend(tokens, pad_id=pad_id)
        model = MultiHashFormer(config, table)
    with torch.no_grad():
        for name, p in model.named_parameters():
            # Its own generator: a changed part leaves the numbers of the others as they are.
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode()))
            noise = torch.randn(p.shape, generator=generator)
            scale = 0.1 if p.dim() == 1 else 0.3 if "embed_tokens" in name else 0.5
            p.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else scale * noise)
    return model.eval()


def random_checkpoint(folder, words, unused=0, standard=False, tokenizer=True, **fields):
    """A checkpoint folder with a tiny model of the words, and `unused` ids behind them."""
    tokens = words.hashed_bytes() + [None] * unused
    small = dict(num_hidden_layers=1, max_position_embeddings=64, calibration=1.25, B=64) | fields
    model = build(tokens=tokens, pad_id=words.eot, standard=standard, **small)
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


def close(actual, expected, atol=1e-5, rtol=1e-5, msg=None):
    """Equal within atol + rtol·|expected|; 1e-5 is what float32 needs on these sizes, with room."""
    actual, expected = torch.as_tensor(actual).double(), torch.as_tensor(expected).double()
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol, msg=msg)


def one_sentence(error, *parts):
    """The message is one line that names each of `parts`: numbers and words, not pieces of them."""
    text = str(error.value)
    assert text and "\n" not in text
    for part in parts:
        assert re.search(rf"(?<!\w){re.escape(str(part))}(?!\w)", text), f"no {part!r} in {text!r}"


def refused(call, *parts, kind=ValueError):
    """The call raises an error of this kind, in one line that names each of `parts`."""
    with pytest.raises(kind) as error:
        call()
    one_sentence(error, *parts)


class Plain:
    """The published architecture in float64, from a state_dict alone."""

    def __init__(self, model):
        weights, self.config = model.state_dict().items(), model.config
        self.w = {k: t.double() if t.is_floating_point() else t for k, t in weights}
        H, B = self.config.num_hashes, self.config.num_buckets
        self.E = self.w["model.embed_tokens.weight"].view(H, B, -1)  # (H, B, D)

    def linear(self, name, x):
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

    def bottleneck(self, name, x):
        """W2 SiLU(W1 x + b1) + b2, as in the gate and in the mixers."""
        return self.linear(f"{name}.2", F.silu(self.linear(f"{name}.0", x)))

    def embed(self, token):
        """Section 2: the input vector (D,) and the gate (H,) of one token."""
        e = [E[i] for E, i in zip(self.E, self.w["model.hash_map"][token])]  # H times (D,)
        gate = torch.cat([self.bottleneck("model.combiner.scorer", e_j) for e_j in e]).softmax(0)
        mixed = sum(alpha * e_j for alpha, e_j in zip(gate, e))  # (D,)
        return self.linear("model.combiner.output_proj.0", mixed), gate

    def cascade(self, h, force=()):
        """Section 4: the logits (H, B) after one state; `force` puts a row for a soft embedding."""
        c, logits = h, []
        for j, E in enumerate(self.E):
            logits.append(E @ c)  # (B,)
            if j < len(self.E) - 1:
                e = E[force[j]] if j in force else logits[-1].softmax(0) @ E  # (D,)
                c = c + self.bottleneck(f"hash_head.cascade_mixer.{j}", torch.cat((c, e)))  # (D,)
        return torch.stack(logits)
