"""Equality with figures of the authors' code; see tests/fixtures."""

import json

import numpy as np
import pytest
import torch
from conftest import FIXTURES, close
from safetensors.torch import load_file

import mhf

pytestmark = pytest.mark.parity


def fixture(name):
    return json.loads((FIXTURES / name).read_text(encoding="utf-8"))


def registered(pieces, pad_id, *sizes):
    """A table with the pieces registered in order."""
    table = mhf.SignatureTable(*sizes)
    table.extend([piece.encode() for piece in pieces], pad_id=pad_id)
    return table


@pytest.fixture(scope="module")
def expected():
    with np.load(FIXTURES / "tiny_h4" / "expected.npz") as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


@pytest.fixture(scope="module")
def published():
    return mhf.load(FIXTURES / "tiny_h4")


FIGURES = {
    "embedding": lambda model, ids: model.embed(ids),
    "gate": lambda model, ids: model.embed(ids, return_gate=True)[1],
    "last_hidden": lambda model, ids: model(ids),
    "head_logits": lambda model, ids: model.head_logits(ids),
    "training_loss": lambda model, ids: model.loss(ids[:, :-1], ids[:, 1:], "independent"),
    "joint_log_prob": lambda model, ids: model.scores(ids),
    "log_prob": lambda model, ids: model.log_probs(ids),
    "renormalised_nll": lambda model, ids: model.loss(ids[:, :-1], ids[:, 1:], "exact"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figure_of_the_authors_model(published, expected, name):
    """Each figure is the authors' within 1e-5 + 1e-6·|value|: float32, summed in another order."""
    actual = FIGURES[name](published, expected["input_ids"]).detach()
    close(actual, expected[name], atol=1e-5, rtol=1e-6)


def test_greedy_continuation_is_the_authors(published, expected):
    """Eight greedy steps choose the authors' ids."""
    greedy = expected["greedy"][0].tolist()
    assert list(published.generate(greedy[:6], 8, temperature=0)) == greedy[6:]


def test_checkpoint_signatures_follow_from_its_tokens(published):
    """Registering the checkpoint's 256 tokens gives its hash_map, id for id."""
    table = registered(fixture("tiny_h4/tokens.json"), 2, 4, 32)
    assert torch.equal(table.ids, published.signatures.ids)


@pytest.mark.parametrize("table", ["H4B16K", "H3B10K"])
def test_signatures_of_mistral_tokens(table):
    """504 Mistral tokens, none of which needed a re-hash, have the authors' ids."""
    figures = fixture("signatures.json")
    H, B = figures[table]["num_hashes"], figures[table]["num_buckets"]
    tokens = figures["tokens"]
    pad = next((i for i, token in enumerate(tokens) if token["id"] == 2), None)
    ours = registered([token["piece"] for token in tokens], pad, H, B)
    assert ours.ids.tolist() == [token[table] for token in tokens]


@pytest.mark.parametrize("case", [0, 1])
def test_signatures_of_crowded_tables(case):
    """Where tokens were re-hashed and the authors' table has no duplicate, ours is the same."""
    figures = fixture("signatures_rehash.json")[case]
    sizes = figures["num_hashes"], figures["num_buckets"]
    table = registered(figures["tokens"], figures["pad_id"], *sizes)
    assert table.ids.tolist() == figures["ids"]
    assert table.stats()["rehashed"] == figures["rehashed"]


def test_locality_sensitive_signatures():
    """300 tokens under two locality-sensitive and two ordinary functions have the authors' ids."""
    figures = fixture("signatures_lsh.json")
    sizes = figures["num_hashes"], figures["num_buckets"], figures["num_lsh"]
    table = registered([token["piece"] for token in figures["tokens"]], 2, *sizes)
    assert table.ids.tolist() == [token["ids"] for token in figures["tokens"]]


def test_saved_checkpoint_has_the_published_tensors(published, tmp_path):
    """What we save has the published keys, dtypes and values, and nothing else."""
    published.save_pretrained(tmp_path)
    ours = load_file(tmp_path / "model.safetensors")
    theirs = load_file(FIXTURES / "tiny_h4" / "model.safetensors")
    assert {k: t.dtype for k, t in ours.items()} == {k: t.dtype for k, t in theirs.items()}
    assert all(torch.equal(ours[k], theirs[k]) for k in theirs)


def test_saved_config_has_all_published_keys(published, tmp_path):
    """Every entry of the published config.json is written back as it was."""
    published.save_pretrained(tmp_path)
    ours = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    theirs = fixture("tiny_h4/config.json")
    assert {k: ours.get(k, "absent") for k in theirs} == theirs
