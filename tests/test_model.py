"""The model against enumeration of the whole virtual vocabulary, and against its equations."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import PAD, Plain, build, close, refused

from mhf import OBJECTIVES, Config, MultiHashFormer, SignatureTable

per_objective = pytest.mark.parametrize("objective", OBJECTIVES)


@pytest.fixture
def mhf():
    return build()


@pytest.fixture
def targets():
    """(2, 7) next ids, the pad among them; one position is not counted."""
    return torch.tensor([[3, PAD, 19, 3, 1, 7, PAD], [5, 5, 18, PAD, 11, -100, 9]])


def enumerated(model, ids):
    """P of all B^H signatures (N, T, B^H) in float64, every token's place there, who is a token."""
    p = model.hash_head(model(ids), model.table).double().softmax(-1)  # (N, T, H, B)
    joint = p[..., 0, :]  # (N, T, B)
    for j in range(1, p.shape[-2]):
        joint = (joint.unsqueeze(-1) * p[..., j, :].unsqueeze(-2)).flatten(-2)  # (N, T, B^(j+1))
    place = torch.zeros(len(model.signatures), dtype=torch.long)  # (V,)
    for column in model.signatures.ids.T:
        place = place * p.shape[-1] + column
    return joint, place, torch.tensor([token is not None for token in model.signatures.tokens])


def enumerated_losses(model, ids, targets):
    """Section 5 from the enumeration: each objective's loss (M,) at the positions that count."""
    joint, place, assigned = enumerated(model, ids)
    joint, targets = joint[targets != -100], targets[targets != -100]  # (M, B^H), (M,)
    score = joint.gather(-1, place[targets].unsqueeze(-1)).squeeze(-1).log()  # (M,)
    exact = joint[:, place[assigned]].sum(-1).log() - score
    weight = model.config.joint_weight / model.config.num_hashes
    return {"independent": -score, "exact": exact, "joint": exact - weight * score}


def plain_states(plain, row):
    """Section 3: the states (T, D) of one sequence; rotary positions turn complex numbers."""
    c, T = plain.config, len(row)
    half = torch.arange(c.head_dim // 2).double() / (c.head_dim // 2)
    turn = torch.exp(1j * torch.arange(T)[:, None] * c.rope_theta**-half)  # (T, C / 2)
    later = torch.full((T, T), -torch.inf).double().triu(1)

    def norm(name, x):
        return x / (x.square().mean(-1, True) + c.rms_norm_eps).sqrt() * plain.w[f"{name}.weight"]

    x = torch.stack([plain.embed(token)[0] for token in row])  # (T, D)
    for i in range(c.num_hidden_layers):
        name, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        y = norm(f"model.layers.{i}.input_layernorm", x)
        q, k, v = (plain.linear(f"{name}.{part}_proj", y).view(T, -1, c.head_dim) for part in "qkv")
        q, k = norm(f"{name}.q_norm", q), norm(f"{name}.k_norm", k)
        q, k = (torch.complex(*z.transpose(0, 1).chunk(2, -1)) * turn for z in (q, k))
        k, v = (z.repeat_interleave(len(q) // len(k), 0) for z in (k, v.transpose(0, 1)))
        weight = ((q @ k.mH).real / c.head_dim**0.5 + later).softmax(-1)  # (A, T, T)
        x = x + plain.linear(f"{name}.o_proj", (weight @ v).transpose(0, 1).flatten(1))
        y = norm(f"model.layers.{i}.post_attention_layernorm", x)
        wide = F.silu(plain.linear(f"{mlp}.gate_proj", y)) * plain.linear(f"{mlp}.up_proj", y)
        x = x + plain.linear(f"{mlp}.down_proj", wide)
    return norm("model.norm", x)


@pytest.mark.parity
def test_embedding_is_section_2(mhf, ids):
    """The input vector and the gate of every token, computed one by one."""
    expected = zip(*(Plain(mhf).embed(token) for token in ids.flatten().tolist()))
    for actual, rows in zip(mhf.embed(ids, return_gate=True), expected):
        close(actual.flatten(0, 1), torch.stack(rows))


@pytest.mark.parity
@pytest.mark.parametrize("fields", [{}, {"head_dim": 6, "num_key_value_heads": 1}], ids=len)
def test_backbone_is_section_3(ids, fields):
    """The states are the Qwen3 decoder's; 3e-5 for a sum of two layers in float32."""
    model = build(rope_theta=30.0, rms_norm_eps=0.01, **fields)
    expected = [plain_states(Plain(model), row) for row in ids.tolist()]
    close(model(ids), torch.stack(expected), atol=3e-5)


@pytest.mark.parity
@pytest.mark.parametrize("force", [{}, {0: 2}], ids=str)
def test_cascade_is_section_4(mhf, ids, force):
    """steps gives the recursion's logits, and what a function hands on: e_j, or a forced row."""
    h, plain = mhf(ids).flatten(0, 1), Plain(mhf)  # (M, D)
    logits, handed_on = zip(*mhf.hash_head.steps(h, mhf.table, force))
    expected = torch.stack([plain.cascade(state, force) for state in h.double()])  # (M, H, B)
    close(torch.stack(logits, dim=-2), expected)
    soft = [o.softmax(-1) @ E for o, E in zip(expected.unbind(1), plain.E)]
    soft[0] = plain.E[0, 2].expand_as(h) if force else soft[0]
    close(torch.stack(handed_on[:2]), torch.stack(soft[:2]))
    assert handed_on[2] is None


def test_states_do_not_see_later_tokens(model, ids):
    """Changing the tokens from position 4 on leaves the states before it bit for bit."""
    other = ids.clone()
    other[:, 4:] = (other[:, 4:] + 1) % 20
    close(model(ids)[:, :4], model(other)[:, :4], atol=0, rtol=0)
    assert not torch.allclose(model(ids)[:, 4:], model(other)[:, 4:], atol=1e-2)


KINDS = [{"H": 1}, {"H": 1, "B": 4, "V": 40}, {"H": 2, "B": 9}, {"H": 4, "B": 5},
         {"num_lsh": 1, "B": 16}, {"num_lsh": 3, "B": 16}, {"unassigned": (4, 7, 19)}]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_probabilities_equal_enumeration(kind, ids):
    """Scores, log P, −inf for unused ids, and valid mass, every distinct signature counted once."""
    model = build(**kind)
    joint, place, assigned = enumerated(model, ids)
    real = joint[..., place] * assigned  # (2, 7, V)
    close(model.token_scores(model(ids)), real.log())
    close(model.token_scores(model(ids)[0, 3]), real[0, 3].log())
    close(model.log_probs(ids), (real / real.sum(-1, keepdim=True)).log())
    close(model.valid_mass(ids), joint[..., place[assigned].unique()].sum(-1))


def test_calibration_divides_the_scores(model, ids):
    """log_probs is log_softmax of the scores over τ; the scores and every loss stay at τ = 1."""

    def untouched():
        losses = [model.loss(ids, ids, objective) for objective in OBJECTIVES]
        return [model.token_scores(model(ids)), *losses]

    before = untouched()
    model.config.calibration = 2.5
    assert all(torch.equal(x, y) for x, y in zip(untouched(), before))
    close(model.log_probs(ids), (before[0] / 2.5).log_softmax(-1))


def test_standard_model_is_a_tied_softmax(ids, targets):
    """The baseline embeds a token as its row; its loss is cross-entropy, for any objective."""
    model = build(standard=True)
    table = model.model.embed_tokens.weight
    assert torch.equal(model.embed(ids), table[ids])
    logits = model(ids) @ table.T  # (2, 7, V)
    close(model.log_probs(ids), logits.log_softmax(-1))
    expected = F.cross_entropy(logits[0], targets[0], reduction="none")
    for objective in OBJECTIVES:
        close(model.loss_per_position(model(ids)[0], targets[0], objective), expected)
        close(model.loss(ids[:1], targets[:1], objective), expected.mean())


@per_objective
@pytest.mark.parametrize("unassigned", [(), (0, 6)], ids=["all assigned", "some unassigned"])
def test_loss_equals_enumeration(objective, unassigned, ids, targets):
    """Each objective is the mean of section 5's formula over the positions that are counted."""
    model, counted = build(unassigned=unassigned, joint_weight=0.4), targets != -100
    expected = enumerated_losses(model, ids, targets)[objective]  # (M,)
    close(model.loss_per_position(model(ids)[counted], targets[counted], objective), expected)
    close(model.loss(ids, targets, objective), expected.mean())
    model.config.objective = objective
    assert torch.equal(model.loss(ids, targets), model.loss(ids, targets, objective))


@per_objective
@pytest.mark.parametrize("unassigned", [(), (0, 6)], ids=["all assigned", "some unassigned"])
def test_gradients_equal_finite_differences(objective, unassigned, ids, targets):
    """The slope of the enumerated loss along random signs, in float64, for every parameter."""
    model = build(unassigned=unassigned)
    exact = copy.deepcopy(model).double()
    model.loss(ids, targets, objective).backward()
    for (name, p), p64 in zip(model.named_parameters(), exact.parameters()):
        assert p.grad is not None, f"{name} is not trained: assumes that every parameter is used"
        start, generator = p64.detach().clone(), torch.Generator().manual_seed(p.numel())
        direction = torch.randint(2, p.shape, generator=generator).double() * 2 - 1
        ends = []
        for step in (2e-4, -2e-4):
            p64.data.copy_(start + step * direction)
            ends.append(enumerated_losses(exact, ids, targets)[objective].mean().item())
        p64.data.copy_(start)
        slope = (p.grad * direction).sum()
        assert math.isclose(slope, (ends[0] - ends[1]) / 4e-4, rel_tol=1e-3, abs_tol=1e-3), name


@pytest.mark.parametrize("token", [-1, -100, 20, 2**40])
@pytest.mark.parametrize("name", ["forward", "embed", "log_probs", "valid_mass", "loss"])
def test_ids_outside_the_vocabulary_are_refused(model, ids, name, token):
    """An id below 0 or from V on is a ValueError that names it, never a row from the other end."""
    targets = [ids.clone()] if name == "loss" else []
    ids[1, 3] = token
    refused(lambda: getattr(model, name, model.log_probs)(ids, *targets), token)


@per_objective
@pytest.mark.parametrize("token", [-1, -99, -101, 20])
def test_targets_outside_the_vocabulary_are_refused(model, ids, targets, token, objective):
    """−100 alone is not counted: another target outside, or one never used, is a ValueError."""
    targets[0, 3] = token
    refused(lambda: model.loss(ids, targets, objective), token)
    refused(lambda: model.loss_per_position(model(ids)[0], targets[0], objective), token)
    refused(lambda: build(unassigned=(4, 18)).loss(ids, ids % 5, objective), "never used")


IMPOSSIBLE = [
    {"num_attention_heads": 4, "num_key_value_heads": 3}, {"head_dim": 7}, {"num_hidden_layers": 0},
    {"hidden_size": -8}, {"vocab_size": 12.5}, {"num_hashes": 2, "num_lsh": 3}, {"num_lsh": -1},
    {"num_hashes": 0}, {"num_hashes": 100}, {"num_buckets": 1}, {"num_buckets": 3_000_000_000},
    {"max_position_embeddings": 0}, {"objective": "exacting"}, {"model": "rnn"},
    {"adapter_init": "zero"}, {"calibration": 0.0}, {"calibration": math.nan},
]  # fmt: skip
REFUSED = [  # the call, and what the error names
    (lambda ids: build().loss(ids, ids, "exacting"), ["exacting"]),
    (lambda ids: build().forward(ids[:1, :1].expand(1, 33)), [33, 32]),
    (lambda ids: MultiHashFormer(Config(num_hashes=3), SignatureTable(2, 2048)), [3]),
    (lambda ids: MultiHashFormer(Config(), SignatureTable(4, 9)), [2048]),
    (lambda ids: SignatureTable(0, 8), ["num_hashes", 0]),
    (lambda ids: SignatureTable(2, 1), ["num_buckets", 1]),
    (lambda ids: SignatureTable(2, 8, 4), ["num_lsh", 4]),
    *((lambda ids, f=f: Config(**f), [[*f][-1], *f.values()]) for f in IMPOSSIBLE),
]


@pytest.mark.parametrize(("call", "values"), REFUSED)
def test_what_does_not_fit_is_refused(ids, call, values):
    """Objectives, inputs that are too long, tables and configurations: all by name and value."""
    refused(lambda: call(ids), *values)


@torch.no_grad()
def test_autocast_keeps_softmaxes_in_float32(mhf, ids):
    """Under bf16 autocast results are float32, near those without it, and every sum is 1."""

    def results():
        losses = [mhf.loss(ids, ids, objective) for objective in OBJECTIVES]
        return [mhf.token_scores(mhf(ids)), mhf.log_probs(ids), mhf.valid_mass(ids), *losses]

    expected = results()
    with torch.autocast("cpu", torch.bfloat16):
        actual, (_, gate) = results(), mhf.embed(ids, return_gate=True)
        close(mhf.bucket_log_probs(mhf(ids)).exp().sum(-1), torch.ones(2, 7, 3))
    close(actual[1].exp().sum(-1), torch.ones(2, 7))
    close(gate.sum(-1), torch.ones(2, 7))
    for there, here in zip(actual, expected):
        assert there.dtype == torch.float32  # layers round by 0.4%, an exponential by 5%
        assert (there - here).abs().mean() < 0.15 * here.abs().mean()


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16], ids=str)
def test_angles_are_float32(default, model):
    """A model that was bfloat16, by a cast or by the default type, lost digits of weights alone."""
    ids = torch.arange(32).unsqueeze(0) % 20
    torch.set_default_dtype(default)
    try:
        other = build(standard=model.config.model == "standard").bfloat16().float()
        actual = other.log_probs(ids)
    finally:
        torch.set_default_dtype(torch.float32)
    model.load_state_dict(other.state_dict())
    close(actual, model.log_probs(ids))


def test_expansion_changes_nothing_that_was(mhf, ids):
    """Parameters stay, old scores are bit for bit, new ids as if there from the start."""
    signatures, scores = mhf.signatures.ids, mhf.token_scores(mhf(ids))
    before = {name: (p, p.clone()) for name, p in mhf.named_parameters()}
    mhf.expand([b"token 20", b"token 21"])
    assert mhf.config.vocab_size == len(mhf.signatures) == 22
    assert torch.equal(mhf.signatures.ids[:20], signatures)
    assert torch.equal(mhf.token_scores(mhf(ids))[..., :20], scores)
    after = dict(mhf.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[k] is p and torch.equal(p, value) for k, (p, value) in before.items())
    start = build(V=22, seed=5)
    start.load_state_dict(mhf.state_dict())
    ids[:, 2] = 21
    assert torch.equal(start.log_probs(ids), mhf.log_probs(ids))
    assert torch.equal(start.loss(ids, ids, "exact"), mhf.loss(ids, ids, "exact"))


@pytest.mark.parametrize("trained", [True, False])
def test_standard_expansion_appends_the_mean(ids, trained):
    """One more row for each token, the mean of those present, in a table that stays frozen."""
    model = build(standard=True)
    table = model.model.embed_tokens.requires_grad_(trained)
    old, logits = table.weight.detach().clone(), model.token_scores(model(ids))
    model.expand([b"new", b"newer"])
    table = model.model.embed_tokens.weight
    assert model.config.vocab_size == 22 and torch.equal(table[:20], old)
    close(table[20:], old.mean(0).expand(2, -1), atol=1e-6)
    close(model.token_scores(model(ids))[..., :20], logits)
    assert table.requires_grad == trained and "optimizer" in model.expand.__doc__


@pytest.mark.parametrize("tokens", [[b"new", b"new"], [b"good", b"token 20"]])
def test_refused_expansion_changes_nothing(model, ids, tokens):
    """A token twice, or one that is there already: none is added."""
    model.expand([b"token 20"])
    before = model.log_probs(ids)
    refused(lambda: model.expand(tokens))
    assert model.config.vocab_size == 21 and torch.equal(model.log_probs(ids), before)


def test_signatures_follow_a_loaded_state_dict(ids):
    """What load_state_dict brings is all of the other model: its signatures and what they make."""
    a, b = build(unassigned=(4,)), build(tokens=[b"%d" % i for i in range(19)] + [None], seed=5)
    a.load_state_dict(b.state_dict())
    assert torch.equal(a.rows, b.rows) and torch.equal(a.unused, b.unused)
    assert a.signatures.owner == b.signatures.owner
    close(a.log_probs(ids), b.log_probs(ids))
    close(a.valid_mass(ids), b.valid_mass(ids))


PAPER = [  # layers, D, A, K, C, feed-forward
    ("100m", (12, 768, 12, 2, 64, 2560)),
    ("1b", (20, 2048, 16, 8, 128, 6144)),
    ("3b", (36, 2048, 16, 2, 128, 11008)),
]


@pytest.mark.parametrize(("name", "sizes"), PAPER)
def test_preset_is_the_papers(name, sizes):
    """Sizes are those of the paper's table, with V 32,768, Z 64, theta 1e6; any can be replaced."""
    c = Config.preset(name, num_buckets=10624)
    assert sizes == (c.num_hidden_layers, c.hidden_size, c.num_attention_heads,
                     c.num_key_value_heads, c.head_dim, c.intermediate_size)  # fmt: skip
    assert (c.vocab_size, c.bottle_neck_dim, c.rope_theta) == (32768, 64, 1e6)
    assert (c.num_hashes, c.num_buckets, Config.preset(name).num_buckets) == (4, 10624, 16384)


def test_num_parameters_counts_the_parts(model):
    """Table, blocks with the final norm, gate and cascade; a V × D table beside them."""

    def size(*parts):
        return sum(p.numel() for part in parts for p in part.parameters())

    hashing = [part for name, part in model.named_modules() if name.endswith(("combiner", "head"))]
    assert model.num_parameters() == {
        "total": size(model),
        "table": size(model.model.embed_tokens),
        "blocks": size(model.model.layers, model.model.norm),
        "hashing": size(*hashing),
        "standard_table": 20 * 16,
    }


@pytest.mark.parametrize("table_std", [None, 0.08])
def test_initial_values(table_std):
    """Matrices have initializer_range or the table's own, within 6 standard errors; biases 0."""
    config = Config(initializer_range=0.03, table_initializer_range=table_std)
    for name, p in MultiHashFormer(config, SignatureTable(4, 2048)).named_parameters():
        if p.dim() == 1:
            assert (p == name.endswith("norm.weight")).all(), name
        elif p.numel() > 8000:
            std = table_std if table_std and "embed_tokens" in name else 0.03
            close(p.std(), std, atol=0, rtol=0.05)


@pytest.mark.parity
def test_adapter_can_start_as_the_identity():
    """adapter_init="identity": W_s is the identity and b_s zero."""
    model = MultiHashFormer(Config(adapter_init="identity"), SignatureTable(4, 2048))
    weight, bias = model.model.combiner.output_proj.parameters()
    assert torch.equal(weight, torch.eye(128)) and not bias.any()
