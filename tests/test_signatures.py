"""SignatureTable against the rule of registration, replayed with a dictionary."""

import re
from collections import defaultdict
from itertools import islice

import mmh3
import pytest
from conftest import refused
from hypothesis import given
from hypothesis import strategies as st

import mhf
from mhf import SignatureTable


def replay(tokens, H, B, pad_id=None):
    """Section 1, token by token: signatures, owners, and the tries of every token."""
    owner, signatures, traces = {}, [], []
    for i, token in enumerate(tokens):
        signature, tries = (0,) * H, []
        if token is not None and i != pad_id:
            for seed, signature in enumerate(SignatureTable(H, B).candidates(token), H - 1):
                tries.append((seed, signature[-1], owner.get(signature)))
                if signature not in owner:
                    break
        if token is not None:
            owner[signature] = i
        signatures.append(signature)
        traces.append(tries)
    return signatures, owner, traces


def prefix(token, H, B):
    """All ids but the last, which a re-hash does not change."""
    return next(SignatureTable(H, B).candidates(token))[:-1]


@st.composite
def vocabularies(draw):
    """(tokens, H, B, pad_id, cuts): any bytes, as many as the table takes, up to all it has."""
    H, B = draw(st.integers(2, 3)), draw(st.integers(2, 7))
    tokens = draw(st.lists(st.binary(max_size=5), unique=True, max_size=60))
    counts, fitting = defaultdict(int), []
    pad_id = draw(st.none() | st.integers(0, len(tokens) - 1)) if tokens else None
    for i, token in enumerate(tokens):
        counts[prefix(token, H, B)] += i != pad_id
        fitting.append(token if i == pad_id or counts[prefix(token, H, B)] < B else None)
    cuts = sorted(draw(st.lists(st.integers(0, len(tokens)), max_size=4)))
    return fitting, H, B, pad_id, cuts


def registered(tokens, *sizes, pad_id=None, cuts=()):
    """A table to which the tokens were given in pieces, cut before the ids in `cuts`."""
    table = SignatureTable(*sizes)
    for start, end in zip((0, *cuts), (*cuts, len(tokens))):
        here = pad_id is not None and start <= pad_id < end
        table.extend(tokens[start:end], pad_id=pad_id if here else None)
    return table


def state(table):
    """All that a table knows."""
    assert [tuple(row) for row in table.ids.tolist()] == table.signatures
    return table.signatures, table.tokens, table.owner, table.rehashed, table.pad_id


@pytest.mark.parity
def test_first_ids_and_rehashes_are_murmurhash():
    """Function j hashes with seed j; then the last id alone is hashed with H, H + 1, ..."""
    ids = [mmh3.hash128(b"cat", seed) % 9 + 1 for seed in range(8)]
    tries = [(*ids[:2], last) for last in ids[2:]]
    assert list(islice(SignatureTable(3, 10).candidates(b"cat"), 6)) == tries


@given(vocabularies())
def test_signatures_follow_the_rule(drawn):
    """Unique, each the first free one, given in pieces, too; trace gives every try as it was."""
    tokens, H, B, pad_id, cuts = drawn
    signatures, owner, traces = replay(tokens, H, B, pad_id)
    taken = [row for token, row in zip(tokens, signatures) if token is not None]
    rehashed = [i for i, tries in enumerate(traces) if len(tries) > 1]
    table = registered(tokens, H, B, pad_id=pad_id, cuts=cuts)
    assert len(table) == len(tokens) and len(set(taken)) == len(taken)
    assert state(table) == (signatures, tokens, owner, rehashed, pad_id)
    for i, (token, tries) in enumerate(zip(tokens, traces)):
        note = "assumes that function j is hashed with seed j, a re-hash with H, H + 1, ..."
        assert token is None or i == pad_id or table.trace(token) == tries, note


@pytest.mark.parametrize(("H", "B"), [(2, 512), (3, 64)])
def test_a_large_vocabulary(H, B):
    """32,768 tokens, up to 64 of them with one prefix: unique, the same at once or in pieces."""
    tokens = [b"%d" % i for i in range(32768)]
    table = registered(tokens, H, B, pad_id=2)
    assert len(set(table.signatures)) == len(table.owner) == len(table) == 32768
    assert state(registered(tokens, H, B, pad_id=2, cuts=(1, 9000, 30000))) == state(table)


# A table with B = 4: the pad, and the whole class of the tokens whose first id is 1.
SOME = [b"%d" % i for i in range(99)]
FULL = [b"<pad>", *(token for token in SOME if prefix(token, 2, 4) == (1,))]
*FULL, OVER = FULL[:5]
REFUSED = {
    "a full class": ([b"good", OVER], None, OVER),
    "more tokens than signatures": ([b"more" + token for token in SOME], None, ""),
    "a token registered before": ([b"good", FULL[2]], None, FULL[2]),
    "a token twice": ([b"good", b"better", b"good"], None, b"good"),
    "the pad again": ([b"<pad>"], None, b"<pad>"),
    "another pad": ([b"eot"], 4, 4),
    "a pad among the old ids": ([b"good"], 2, 2),
    "a token that is not bytes": ([b"good", "text"], None, ""),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_token_leaves_the_table_as_it_was(case):
    """ValueError, with the value in one sentence, never an endless loop; nothing is added."""
    tokens, pad_id, value = REFUSED[case]
    table, before = (registered(FULL, 2, 4, pad_id=0) for _ in range(2))
    with pytest.raises((ValueError, TypeError), match=re.escape(f"{value}") or ".") as error:
        table.extend(tokens, pad_id=pad_id)
    assert "\n" not in str(error.value) and state(table) == state(before)
    refused(lambda: table.trace(OVER))


@pytest.mark.parametrize("sizes", [(1, 4), (2, 64, 2)], ids=["H = 1", "all LSH"])
def test_tokens_share_where_nothing_can_be_hashed_again(sizes):
    """The first candidate stands; the owner is the lowest id; no token counts as re-hashed."""
    tokens = [b"other", b"aaa", b"aaaa", b"more"]
    table = registered(tokens, *sizes)
    assert table.shared and not table.rehashed and len(table.owner) < 4
    alone = [registered([token], *sizes).signatures[0] for token in tokens]
    assert table.signatures == alone
    assert all(owner == alone.index(row) for row, owner in table.owner.items())
    assert [row[2] for token in tokens for row in table.trace(token)] == [None] * 4


def test_tokens_with_the_same_trigrams():
    """They share every locality-sensitive id; a last function that hashes keeps them apart."""
    tokens = [b"a" * n for n in (3, 4, 5)] + [b"xyz"]
    table = registered(tokens, 3, 4, 2)
    assert len(set(table.signatures)) == 4 and not table.shared
    assert len({row[:2] for row in table.signatures[:3]}) == 1
    assert [table.trace(token)[-1][1] for token in tokens] == table.ids[:, -1].tolist()
    assert len(set(registered(tokens, 2, 64, 2).signatures)) == 2


def test_lsh_ids_do_not_depend_on_the_chunks():
    """Many tokens are hashed a chunk at a time: each has the ids that it has alone."""
    tokens = [b"%d" % i for i in range(30)] + [None]
    ids = [list(row) for row in mhf.lsh_ids(tokens, 2, 64, chunk=7)]
    assert ids == [list(row) for row in mhf.lsh_ids(tokens, 2, 64)]
    assert [list(mhf.lsh_ids([token], 2, 64)[0]) for token in tokens[::15]] == ids[::15]
