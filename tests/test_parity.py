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


def tables():
    """Tables of the authors: tokens, pad, H, B and LSH, ids, and how many were hashed again."""
    ids = load_file(FIXTURES / "tiny_h4" / "model.safetensors")["model.hash_map"].tolist()
    yield fixture("tiny_h4/tokens.json"), 2, (4, 32), ids, None
    figures = fixture("signatures.json")
    pieces = [token["piece"] for token in figures["tokens"]]
    for name, sizes in (("H4B16K", (4, 16384)), ("H3B10K", (3, 10624))):
        yield pieces, 2, sizes, [token[name] for token in figures["tokens"]], 0
    for case in fixture("signatures_rehash.json"):
        sizes = case["num_hashes"], case["num_buckets"]
        yield case["tokens"], case["pad_id"], sizes, case["ids"], case["rehashed"]
    figures = fixture("signatures_lsh.json")
    sizes = tuple(figures[k] for k in ("num_hashes", "num_buckets", "num_lsh"))
    pieces, ids = zip(*((token["piece"], token["ids"]) for token in figures["tokens"]))
    yield pieces, 2, sizes, [*ids], None


NAMES = ["a checkpoint", "Mistral H4", "Mistral H3", "crowded 0", "crowded 1", "LSH"]


@pytest.mark.parametrize(("pieces", "pad_id", "sizes", "ids", "rehashed"), [*tables()], ids=NAMES)
def test_signatures_are_the_authors(pieces, pad_id, sizes, ids, rehashed):
    """Registering the tokens gives the authors' ids, re-hashed and locality-sensitive ones too."""
    table = mhf.SignatureTable(*sizes)
    table.extend([piece.encode() for piece in pieces], pad_id=pad_id)
    assert table.ids.tolist() == ids and rehashed in (None, len(table.rehashed))


def test_saved_checkpoint_is_the_published_one(published, tmp_path):
    """We save the published keys, dtypes and values, and every entry of the published config."""
    published.save_pretrained(tmp_path)
    ours, theirs = (load_file(f / "model.safetensors") for f in (tmp_path, FIXTURES / "tiny_h4"))
    assert {k: t.dtype for k, t in ours.items()} == {k: t.dtype for k, t in theirs.items()}
    assert all(torch.equal(ours[k], theirs[k]) for k in theirs)
    config = fixture(tmp_path / "config.json")
    assert config | fixture("tiny_h4/config.json") == config
