"""The model against enumeration of the whole virtual vocabulary, and against its equations."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import PAD, TINY, Plain, build, close, one_sentence, vocabulary

from mhf import Config, MultiHashFormer, SignatureTable, Transformer

# Under autocast torch says once that its fused norm does not take two dtypes; nothing is wrong.
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
OBJECTIVES = ["independent", "exact", "joint"]


@pytest.fixture
def mhf():
    return build()


@pytest.fixture
def targets():
    """(2, 7) next ids, the pad among them."""
    return torch.tensor([[3, PAD, 19, 3, 1, 7, PAD], [5, 5, 18, PAD, 11, 4, 9]])


def enumerated(model, ids):
    """Probabilities of all B^H signatures (N, T, B^H) in float64, and each token's place there."""
    p = model.head_logits(ids).double().softmax(-1)  # (N, T, H, B)
    joint = p[..., 0, :]  # (N, T, B)
    for j in range(1, p.shape[-2]):
        joint = (joint.unsqueeze(-1) * p[..., j, :].unsqueeze(-2)).flatten(-2)  # (N, T, B^(j+1))
    place = torch.zeros(len(model.signatures), dtype=torch.long)  # (V,)
    for column in model.signatures.ids.T:
        place = place * p.shape[-1] + column
    return joint, place


def enumerated_losses(model, ids, targets):
    """Section 5 from the enumeration: each objective's loss at every position (N, T)."""
    joint, place = enumerated(model, ids)
    assigned = model.signatures.ids.any(-1)  # (V,)
    assigned[PAD] = True
    score = joint.gather(-1, place[targets].unsqueeze(-1)).squeeze(-1).log()  # (N, T)
    exact = joint[..., place[assigned]].sum(-1).log() - score
    weight = model.config.joint_weight / model.config.num_hashes
    return {"independent": -score, "exact": exact, "joint": exact - weight * score}


# ---------------------------------------------------------------------------------------------
# The equations as loops (the published architecture)
# ---------------------------------------------------------------------------------------------


@pytest.mark.parity
@pytest.mark.parametrize("which", [0, 1], ids=["vector", "gate"])
def test_embedding_equals_a_loop(mhf, ids, which):
    """The gate and the input vector of every token are section 2's, computed one by one."""
    expected = [Plain(mhf).embed(token)[which] for token in ids.flatten().tolist()]
    close(mhf.embed(ids, return_gate=True)[which].flatten(0, 1), torch.stack(expected))


@pytest.mark.parity
def test_backbone_equals_a_loop(mhf, ids):
    """The states are section 3's decoder, head by head and position by position."""
    expected = torch.stack([Plain(mhf).states(row) for row in ids.tolist()])
    close(mhf(ids), expected, atol=3e-5)  # a sum of two layers in float32


@pytest.mark.parity
def test_cascade_equals_a_loop(mhf, ids):
    """The logits of all functions are section 4's recursion on the states."""
    expected = torch.stack([Plain(mhf).cascade(h) for h in mhf(ids).flatten(0, 1).double()])
    close(mhf.head_logits(ids).flatten(0, 1), expected)


def test_states_do_not_see_later_tokens(model, ids):
    """Changing the tokens from position 4 on leaves the states before it bit for bit."""
    other = ids.clone()
    other[:, 4:] = (other[:, 4:] + 1) % 20
    close(model(ids)[:, :4], model(other)[:, :4], atol=0, rtol=0)
    assert not torch.allclose(model(ids)[:, 4:], model(other)[:, 4:], atol=1e-2)


def test_layers_end_in_the_states(model, ids):
    """return_layers adds one output (N, T, D) a layer; the final norm of the last is the states."""
    states, layers = model(ids, return_layers=True)
    assert [tuple(x.shape) for x in layers] == [(2, 7, 16)] * 2
    close(model.model.norm(layers[-1]), states, atol=0, rtol=0)


def test_too_long_an_input_is_refused(model):
    """More positions than max_position_embeddings is a ValueError with both numbers."""
    with pytest.raises(ValueError) as error:
        model(torch.zeros(1, 33, dtype=torch.long))
    one_sentence(error, 33, 32)


# ---------------------------------------------------------------------------------------------
# Scores and probabilities
# ---------------------------------------------------------------------------------------------


def test_scores_equal_gathers(mhf, ids):
    """A token's score is the sum of H gathered log probabilities."""
    log_p = mhf.head_logits(ids).log_softmax(-1)  # (2, 7, H, B)
    gathered = sum(log_p[:, :, j, column] for j, column in enumerate(mhf.signatures.ids.T))
    close(mhf.scores(ids), gathered)


@pytest.mark.parametrize(("H", "B"), [(1, 6), (2, 9), (4, 5)])
def test_probabilities_equal_enumeration(H, B, ids):
    """log P is the probability of a signature among all B^H, renormalised over the tokens."""
    model = build(H=H, B=B)
    joint, place = enumerated(model, ids)
    real = joint[..., place]  # (2, 7, V)
    close(model.log_probs(ids), (real / real.sum(-1, keepdim=True)).log())


def test_probabilities_sum_to_one(model, ids):
    """Over the tokens, at every position; 1e-5 is float32's rounding over 20 tokens."""
    close(model.log_probs(ids).exp().sum(-1), torch.ones(2, 7))


@pytest.mark.parametrize(("H", "B"), [(1, 6), (2, 9), (4, 5)])
def test_valid_mass_equals_enumeration(H, B, ids):
    """The mass on real signatures, each distinct one counted once: H = 1 shares many of them."""
    model = build(H=H, B=B)
    joint, place = enumerated(model, ids)
    close(model.valid_mass(ids), joint[..., place.unique()].sum(-1))


def test_valid_mass_is_one_when_every_signature_is_real(ids):
    """With H = 1 and every bucket in use nothing is left for signatures of no token."""
    close(build(H=1, B=4, V=40).valid_mass(ids), torch.ones(2, 7))


def test_tokens_that_share_a_signature_are_equally_probable(ids):
    """Single-ID: the log probabilities of a bucket's tokens are the same number."""
    model = build(H=1, B=4)
    log_probs, buckets = model.log_probs(ids), model.signatures.ids[:, 0]
    for bucket in buckets.unique():
        shared = log_probs[..., buckets == bucket]  # (2, 7, tokens of the bucket)
        assert torch.equal(shared, shared[..., :1].expand_as(shared))


def test_unassigned_ids_have_no_probability(ids):
    """Exactly the ids that no token uses have log P = −inf; the pad, with its zeros, does not."""
    log_probs = build(unassigned=(4, 7, 19)).log_probs(ids)
    expected = torch.zeros(20, dtype=torch.bool).index_fill(0, torch.tensor([4, 7, 19]), True)
    assert torch.equal(log_probs.isneginf(), expected.expand(2, 7, 20))
    close(log_probs.exp().sum(-1), torch.ones(2, 7))


def test_top_tokens_are_the_best_of_all(model, ids):
    """top_tokens is topk of log_probs: the same values and the same ids, best first."""
    values, best = model.log_probs(ids).topk(5)
    top, top_ids = model.top_tokens(ids, 5)
    close(top, values)
    assert torch.equal(top_ids, best)


# ---------------------------------------------------------------------------------------------
# Objectives
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("unassigned", [(), (0, 6)], ids=["all assigned", "some unassigned"])
def test_loss_equals_enumeration(objective, unassigned, ids, targets):
    """Each objective is the mean over positions of section 5's formula; the pad counts as any."""
    model = build(unassigned=unassigned, joint_weight=0.4)
    expected = enumerated_losses(model, ids, targets)[objective].mean()
    close(model.loss(ids, targets, objective), expected)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_is_the_mean_over_counted_positions(objective, mhf, ids, targets):
    """Targets of −100 take no part, neither in the sum nor in the number of positions."""
    counted = torch.rand(2, 7, generator=torch.Generator().manual_seed(0)) < 0.5
    expected = enumerated_losses(mhf, ids, targets)[objective][counted].mean()
    close(mhf.loss(ids, targets.where(counted, -100), objective), expected)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_uncounted_positions_have_no_gradient(objective, model, ids):
    """If the only counted target is the first, the tokens behind it receive exactly no gradient."""
    targets = torch.full((2, 7), -100)
    targets[:, 0] = 3
    inputs = []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model.loss(ids, targets, objective).backward(inputs=[*model.parameters()])
    (gradient,) = torch.autograd.grad(model.loss(ids, targets, objective), inputs[-1])
    assert gradient[:, 0].any() and not gradient[:, 1:].any()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_gradients_equal_finite_differences(objective, mhf, ids, targets):
    """For every parameter, the slope of the enumerated loss along a random direction of signs.

    Central differences in float64 with step 2e-4; the tolerance covers their third-order error (it
    falls with the square of the step), and softmaxes that the model computes in float32.
    """
    exact, generator = copy.deepcopy(mhf).double(), torch.Generator().manual_seed(0)
    mhf.loss(ids, targets, objective).backward()
    for (name, p), p64 in zip(mhf.named_parameters(), exact.parameters(), strict=True):
        start = p64.detach().clone()
        direction = torch.randint(2, p.shape, generator=generator).double() * 2 - 1
        ends = []
        with torch.no_grad():
            for step in (2e-4, -2e-4):
                p64.copy_(start + step * direction)
                ends.append(enumerated_losses(exact, ids, targets)[objective].mean())
            p64.copy_(start)
        slope = (p.grad * direction).sum()
        assert math.isclose(slope, (ends[0] - ends[1]) / 4e-4, rel_tol=1e-3, abs_tol=1e-3), name


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_gradients_are_finite_with_unassigned_ids(objective, ids, targets):
    """Scores of −inf leave no NaN in the gradients, nor do targets that do not count."""
    model = build(unassigned=(0, 6))
    targets[:, 3] = -100
    model.loss(ids, targets, objective).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_unknown_objective_is_refused(model, ids, targets):
    """An objective that does not exist is a ValueError that names it."""
    with pytest.raises(ValueError) as error:
        model.loss(ids, targets, "exacting")
    one_sentence(error, "exacting")


def test_calibration_divides_the_scores(ids):
    """log_probs is log_softmax of the scores over τ; the scores themselves stay at τ = 1."""
    sharp, model = build(), build(calibration=2.5)
    close(model.scores(ids), sharp.scores(ids), atol=0, rtol=0)
    close(model.log_probs(ids), (sharp.scores(ids) / 2.5).log_softmax(-1))


def test_calibration_of_the_standard_model(ids):
    """The baseline's logits are divided by its τ, too."""
    close(
        build(standard=True, calibration=2.5).log_probs(ids),
        (build(standard=True).log_probs(ids) / 2.5).log_softmax(-1),
    )


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("standard", [False, True], ids=["mhf", "standard"])
def test_loss_is_never_calibrated(objective, standard, ids, targets):
    """The loss with τ = 2.5 is bit for bit that with τ = 1."""
    losses = [
        build(standard=standard, calibration=tau).loss(ids, targets, objective) for tau in (1, 2.5)
    ]
    assert losses[0] == losses[1]


# ---------------------------------------------------------------------------------------------
# Precision
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["scores", "log_probs", "valid_mass", *OBJECTIVES])
def test_autocast_keeps_softmaxes_in_float32(what, mhf, ids, targets):
    """Under bf16 autocast results are float32, finite, and near those without it.

    Every layer rounds to bf16, 0.4%; a score is off by 0.05, so the valid mass, its exponential, by
    5%: 15% on average is allowed.
    """

    def compute():
        return mhf.loss(ids, targets, what) if what in OBJECTIVES else getattr(mhf, what)(ids)

    with torch.no_grad():
        expected = compute()
        with torch.autocast("cpu", torch.bfloat16):
            actual = compute()
    assert actual.dtype == torch.float32 and actual.isfinite().all()
    assert (actual - expected).abs().mean() < 0.15 * expected.abs().mean()


def test_autocast_normalises_in_float32(mhf, ids):
    """Under bf16 autocast probabilities sum to 1 within 1e-5; in bf16 they would miss by 1e-3."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        close(mhf.log_probs(ids).exp().sum(-1), torch.ones(2, 7))
        close(mhf.head_logits(ids).float().softmax(-1).sum(-1), torch.ones(2, 7, 3))


@pytest.mark.parity
def test_autocast_keeps_the_gate_in_float32(mhf, ids):
    """The gate is a softmax as well: float32, and its sum 1 within 1e-5, under bf16 autocast."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        _, gate = mhf.embed(ids, return_gate=True)
    assert gate.dtype == torch.float32
    close(gate.sum(-1), torch.ones(2, 7))


# ---------------------------------------------------------------------------------------------
# Expansion
# ---------------------------------------------------------------------------------------------


def test_expansion_leaves_old_tokens_bit_for_bit(mhf, ids):
    """Signatures and scores of the old tokens are what they were."""
    signatures, scores = mhf.signatures.ids.clone(), mhf.scores(ids)
    mhf.expand([b"new", b"newer"])
    assert torch.equal(mhf.signatures.ids[:20], signatures)
    assert torch.equal(mhf.scores(ids)[..., :20], scores)


def test_expansion_changes_no_parameter(mhf):
    """The parameters are the same objects with the same values; only the vocabulary grows."""
    before = {name: (id(p), p.clone()) for name, p in mhf.named_parameters()}
    mhf.expand([b"new", b"newer"])
    after = dict(mhf.named_parameters())
    assert mhf.config.vocab_size == 22 and before.keys() == after.keys()
    assert all(id(after[k]) == i and torch.equal(after[k], p) for k, (i, p) in before.items())


def test_expanded_model_knows_the_new_tokens(mhf, ids):
    """New ids are embedded, predicted and trained on as if they had been there from the start."""
    mhf.expand([b"token 20", b"token 21"])
    start = MultiHashFormer(mhf.config, table_of(22))
    start.load_state_dict(mhf.state_dict())
    new = ids.clone()
    new[:, 2] = 21
    assert torch.equal(start.log_probs(new), mhf.log_probs(new))
    assert torch.equal(start.loss(new, new, "exact"), mhf.loss(new, new, "exact"))


def table_of(V, H=3, B=6):
    table = SignatureTable(H, B)
    table.extend(vocabulary(V), pad_id=PAD)
    return table


def test_refused_expansion_changes_nothing(mhf, ids):
    """If one of the new tokens is there already, no token is added."""
    before = mhf.log_probs(ids)
    with pytest.raises(ValueError):
        mhf.expand([b"new", b"token 5"])
    assert mhf.config.vocab_size == len(mhf.signatures) == 20
    assert torch.equal(mhf.log_probs(ids), before)


def test_model_of_stored_ids_expands(mhf, ids):
    """A table without its tokens still gives a new token a signature that nobody has."""
    table = SignatureTable.from_ids(mhf.signatures.ids, PAD)
    model = MultiHashFormer(mhf.config, table)
    model.expand([b"token %d" % i for i in range(20, 60)])
    assert len(table.ids.unique(dim=0)) == 60
    assert model.log_probs(ids).shape == (2, 7, 60)


def test_standard_expansion_appends_the_mean(ids):
    """The baseline gains one row for each token, the mean of those present; old logits stay."""
    model = build(standard=True)
    old = model.model.embed_tokens.weight.detach().clone()
    model.expand([b"new", b"newer"])
    new = model.model.embed_tokens.weight
    assert model.config.vocab_size == 22 and torch.equal(new[:20], old)
    close(new[20:], old.mean(0).expand(2, -1), atol=1e-6)
    new_log_probs, rest = model.log_probs(ids), build(standard=True).log_probs(ids)
    close(new_log_probs[..., :20].log_softmax(-1), rest)


# ---------------------------------------------------------------------------------------------
# Configuration, initialisation, size
# ---------------------------------------------------------------------------------------------

PAPER = {  # layers, D, A, K, C, feed-forward
    "100m": (12, 768, 12, 2, 64, 2560),
    "1b": (20, 2048, 16, 8, 128, 6144),
    "3b": (36, 2048, 16, 2, 128, 11008),
}


@pytest.mark.parametrize("name", PAPER)
def test_preset_is_the_papers(name):
    """Layers, widths and heads are those of the paper's table, with V 32,768, Z 64, theta 1e6."""
    c = Config.preset(name)
    assert PAPER[name] == (
        c.num_hidden_layers,
        c.hidden_size,
        c.num_attention_heads,
        c.num_key_value_heads,
        c.head_dim,
        c.intermediate_size,
    )
    assert (c.vocab_size, c.bottle_neck_dim, c.rope_theta) == (32768, 64, 1e6)
    assert (c.num_hashes, c.num_buckets) == (4, 16384)


def test_preset_takes_overrides_and_extra_layers():
    """extra_layers adds to the preset's number; any other field can be replaced."""
    c = Config.preset("100m", extra_layers=4, num_hashes=3, num_buckets=10624)
    assert (c.num_hidden_layers, c.num_hashes, c.num_buckets) == (16, 3, 10624)


def test_unknown_preset_is_refused():
    """A preset that does not exist is a ValueError that names it."""
    with pytest.raises(ValueError, match="7b"):
        Config.preset("7b")


def parameters_by_formula(c):
    """The number of parameters, counted from the equations of sections 2 to 4."""
    D, C, Z, wide = c.hidden_size, c.head_dim, c.bottle_neck_dim, c.intermediate_size
    A, K, H, B = c.num_attention_heads, c.num_key_value_heads, c.num_hashes, c.num_buckets
    layer = 2 * D * A * C + 2 * D * K * C + 2 * C + 3 * D * wide + 2 * D
    backbone = c.num_hidden_layers * layer + D
    if c.model == "standard":
        return c.vocab_size * D + backbone
    gate = (Z * D + Z) + (Z + 1) + (D * D + D)
    mixer = (Z * 2 * D + Z) + (D * Z + D)
    return H * B * D + gate + backbone + (H - 1) * mixer


def on_meta(config):
    with torch.device("meta"):
        return Transformer(config)


MODELS = {
    "tiny": lambda: build(),
    "other sizes": lambda: build(H=4, B=5, num_hidden_layers=3, head_dim=6),
    "standard": lambda: build(standard=True),
    **{name: lambda name=name: on_meta(Config.preset(name)) for name in PAPER},
    "100m+4L": lambda: on_meta(Config.preset("100m", extra_layers=4)),
    "1b+2L": lambda: on_meta(Config.preset("1b", extra_layers=2)),
}


@pytest.mark.parity
@pytest.mark.parametrize("name", MODELS)
def test_number_of_parameters(name):
    """The real count is what the equations give; the large standard models are built on "meta"."""
    model = MODELS[name]()
    assert sum(p.numel() for p in model.parameters()) == parameters_by_formula(model.config)


@pytest.mark.parity
def test_h4b16k_table_is_twice_the_standard_one():
    """The paper's H4B16K: 65,536 rows for any vocabulary, where the standard model has 32,768."""
    config = Config.preset("100m")
    assert config.num_hashes * config.num_buckets == 2 * config.vocab_size == 65536
    assert on_meta(config).num_parameters()["table"] == config.vocab_size * config.hidden_size


def test_num_parameters_adds_up(model):
    """The parts sum to the total, which is the number of elements of all parameters."""
    count = model.num_parameters()
    parts = [n for name, n in count.items() if name not in ("total", "standard_table")]
    assert sum(parts) == count["total"] == sum(p.numel() for p in model.parameters())
    assert count["standard_table"] == 20 * 16


def initialised(**fields):
    """A model as it is at the start of training, large enough to measure standard deviations."""
    torch.manual_seed(0)
    fields = {"hidden_size": 64, "num_hashes": 3, "num_buckets": 64, **fields}
    return MultiHashFormer(Config(**(TINY | fields)), table_of(20, B=64))


@pytest.mark.parametrize("table_std", [None, 0.08])
def test_initial_standard_deviations(table_std):
    """initializer_range for matrices, the table's own if given; 12,288 samples are good to 3%."""
    model = initialised(initializer_range=0.03, table_initializer_range=table_std)
    table = model.state_dict()["model.embed_tokens.weight"]
    matrices = [
        p.detach().flatten()
        for name, p in model.named_parameters()
        if p.dim() == 2 and "embed_tokens" not in name
    ]
    close(table.std(), table_std or 0.03, atol=0, rtol=0.03)
    close(torch.cat(matrices).std(), 0.03, atol=0, rtol=0.03)


def test_initial_biases_and_norms():
    """Biases start at 0 and norms at 1."""
    for name, p in initialised().named_parameters():
        if p.dim() == 1:
            assert (p == name.endswith("norm.weight")).all(), name


@pytest.mark.parity
def test_adapter_can_start_as_the_identity():
    """adapter_init="identity": W_s is the identity and b_s zero, so x is the gated sum of rows."""
    model, ids = initialised(adapter_init="identity"), torch.tensor([[3, 5]])
    x, gate = model.embed(ids, return_gate=True)
    rows = Plain(model).E[torch.arange(3), model.signatures.ids[ids]]  # (1, 2, H, D)
    close(x, (gate.unsqueeze(-1) * rows).sum(-2))


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        ({"hidden_size": 30, "num_attention_heads": 4}, [30, 4]),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, [4, 3]),
        ({"head_dim": 7}, ["head_dim", 7]),
        ({"num_hashes": 2, "num_lsh": 3}, [2, 3]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", 0]),
        ({"vocab_size": 12.5}, ["vocab_size", 12.5]),
        ({"objective": "exacting"}, ["objective", "exacting"]),
        ({"model": "rnn"}, ["model", "rnn"]),
        ({"adapter_init": "zero"}, ["adapter_init", "zero"]),
        ({"calibration": 0.0}, ["calibration", 0.0]),
    ],
)
def test_impossible_configuration_is_refused(fields, values):
    """Fields that do not fit are a ValueError that names them and their values."""
    with pytest.raises(ValueError) as error:
        Config(**fields)
    one_sentence(error, *values)


def test_signatures_must_fit_the_configuration():
    """A table of another H or B is a ValueError with both pairs of numbers."""
    with pytest.raises(ValueError) as error:
        MultiHashFormer(Config(num_hashes=3, num_buckets=7), SignatureTable(2, 9))
    one_sentence(error, 3, 7, 2, 9)


# ---------------------------------------------------------------------------------------------
# The baselines
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_standard_loss_is_cross_entropy(objective, ids, targets):
    """The baseline's loss is the cross-entropy of states times embedding, for any objective."""
    model = build(standard=True)
    logits = model(ids) @ model.model.embed_tokens.weight.T  # (2, 7, V)
    counted = targets.where(targets != 5, -100)
    expected = F.cross_entropy(logits.flatten(0, 1), counted.flatten())
    close(model.loss(ids, counted, objective), expected)


def test_standard_embedding_is_its_table(ids):
    """The baseline embeds a token as its row."""
    model = build(standard=True)
    assert torch.equal(model.embed(ids), model.model.embed_tokens.weight[ids])


@pytest.mark.parametrize("lsh", [0, 1, 2, 3])
def test_lsh_mix_is_the_same_model(lsh, ids):
    """Any number of locality-sensitive functions changes the signatures alone, not what P means."""
    model = build(num_lsh=lsh, B=16)
    joint, place = enumerated(model, ids)
    real = joint[..., place]
    close(model.log_probs(ids), (real / real.sum(-1, keepdim=True)).log())


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_both_models_have_the_same_residual_stream_under_autocast(kind):
    """A comparison in bf16 is fair only if neither model's residual stream loses precision."""
    config = Config(vocab_size=12, hidden_size=16, num_buckets=8, max_position_embeddings=8)
    table = SignatureTable(4, 8)
    table.extend([b"%d" % i for i in range(12)], pad_id=0)
    ids = torch.tensor([[1, 2, 3]])
    for model in (MultiHashFormer(config, table), Transformer(config)):
        with torch.autocast("cpu", kind):
            _, layers = model(ids, return_layers=True)
        assert {x.dtype for x in layers} == {torch.float32}
