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


def table_of(pieces, pad_id, *sizes):
    table = mhf.SignatureTable(*sizes)
    table.extend([piece.encode() for piece in pieces], pad_id=pad_id)
    return table


@pytest.fixture(scope="module")
def expected():
    return {k: torch.from_numpy(a) for k, a in np.load(FIXTURES / "tiny_h4/expected.npz").items()}


@pytest.fixture(scope="module")
def published():
    return mhf.load(FIXTURES / "tiny_h4")


FIGURES = {
    "embedding": lambda model, ids: model.embed(ids),
    "gate": lambda model, ids: model.embed(ids, return_gate=True)[1],
    "last_hidden": lambda model, ids: model(ids),
    "head_logits": lambda model, ids: model.hash_head(model(ids), model.table),
    "training_loss": lambda model, ids: model.loss(ids[:, :-1], ids[:, 1:], "independent"),
    "joint_log_prob": lambda model, ids: model.token_scores(model(ids)),
    "log_prob": lambda model, ids: model.log_probs(ids),
    "renormalised_nll": lambda model, ids: model.loss(ids[:, :-1], ids[:, 1:], "exact"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figure_of_the_authors_model(published, expected, name):
    """Each figure is the authors' within 1e-5 + 1e-6·|value|: float32, summed in another order."""
    close(FIGURES[name](published, expected["input_ids"]), expected[name], atol=1e-5, rtol=1e-6)


def test_greedy_continuation_is_the_authors(published, expected):
    """Eight greedy steps choose the authors' ids."""
    prompt, new = expected["greedy"][0].split([6, 8])
    assert list(published.generate(prompt, 8, temperature=0)) == new.tolist()


def test_checkpoint_signatures_follow_from_its_tokens(published):
    """Registering the checkpoint's 256 tokens gives its hash_map, id for id."""
    table = table_of(fixture("tiny_h4/tokens.json"), 2, 4, 32)
    assert torch.equal(table.ids, published.signatures.ids)


@pytest.mark.parametrize("name", ["H4B16K", "H3B10K"])
def test_signatures_of_mistral_tokens(name):
    """504 Mistral tokens, none of which needed a re-hash, have the authors' ids."""
    figures = fixture("signatures.json")
    sizes = figures[name]["num_hashes"], figures[name]["num_buckets"]
    table = table_of([token["piece"] for token in figures["tokens"]], 2, *sizes)
    assert table.ids.tolist() == [token[name] for token in figures["tokens"]]


@pytest.mark.parametrize("case", [0, 1])
def test_signatures_of_crowded_tables(case):
    """Where tokens were re-hashed and the authors' table has no duplicate, ours is the same."""
    figures = fixture("signatures_rehash.json")[case]
    table = table_of(*(figures[k] for k in ("tokens", "pad_id", "num_hashes", "num_buckets")))
    assert table.ids.tolist() == figures["ids"]
    assert len(table.rehashed) == figures["rehashed"]


def test_locality_sensitive_signatures():
    """300 tokens under two locality-sensitive and two ordinary functions have the authors' ids."""
    figures = fixture("signatures_lsh.json")
    sizes = (figures[k] for k in ("num_hashes", "num_buckets", "num_lsh"))
    table = table_of([token["piece"] for token in figures["tokens"]], 2, *sizes)
    assert table.ids.tolist() == [token["ids"] for token in figures["tokens"]]


def test_saved_checkpoint_is_the_published_one(published, tmp_path):
    """We save the published keys, dtypes and values, and every entry of the published config."""
    published.save_pretrained(tmp_path)
    ours, theirs = (load_file(f / "model.safetensors") for f in (tmp_path, FIXTURES / "tiny_h4"))
    assert {k: t.dtype for k, t in ours.items()} == {k: t.dtype for k, t in theirs.items()}
    assert all(torch.equal(ours[k], theirs[k]) for k in theirs)
    config = fixture(tmp_path / "config.json")
    assert config | fixture("tiny_h4/config.json") == config
