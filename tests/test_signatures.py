"""SignatureTable against the rule of registration, replayed with plain dictionaries."""

import functools
from collections import defaultdict

import mmh3
import pytest
import torch
from conftest import one_sentence
from hypothesis import given
from hypothesis import strategies as st

from mhf import SignatureTable


def id_of(token, seed, B):
    return mmh3.hash128(token, seed) % (B - 1) + 1


def replay(tokens, H, B, pad_id=None):
    """Section 1, token by token: the signatures and the tries; KeyError for a full class."""
    owner, signatures, traces = {}, [], []
    for i, token in enumerate(tokens):
        signature, tries = (0,) * H, []
        if token is not None and i != pad_id:
            prefix = tuple(id_of(token, j, B) for j in range(H - 1))
            if all((*prefix, last) in owner for last in range(1, B)):
                raise KeyError(token)
            while not tries or tries[-1][2] is not None:
                seed = H - 1 + len(tries)
                signature = (*prefix, id_of(token, seed, B))
                tries.append((seed, signature[-1], owner.get(signature)))
        if token is not None:
            owner[signature] = i
        signatures.append(signature)
        traces.append(tries)
    return signatures, traces


@functools.cache
def classes(B):
    """Lists of tokens by their first id."""
    found = defaultdict(list)
    for i in range(60 * B):
        found[id_of(b"%d" % i, 0, B)].append(b"%d" % i)
    return found


@st.composite
def vocabularies(draw):
    """(tokens, H, B, pad_id, cuts): any bytes, as many as the table takes, up to all it has."""
    H, B = draw(st.integers(2, 3)), draw(st.integers(2, 7))
    tokens = draw(st.lists(st.binary(max_size=5), unique=True, max_size=60))
    counts, fitting = defaultdict(int), []
    pad_id = draw(st.none() | st.integers(0, len(tokens) - 1)) if tokens else None
    for i, token in enumerate(tokens):
        prefix = tuple(id_of(token, j, B) for j in range(H - 1))
        counts[prefix] += i != pad_id
        fitting.append(token if i == pad_id or counts[prefix] < B else None)
    cuts = sorted(draw(st.lists(st.integers(0, len(tokens)), max_size=4)))
    return fitting, H, B, pad_id, cuts


def registered(tokens, *table, pad_id=None, cuts=()):
    """A table to which the tokens were given in pieces, cut before the ids in `cuts`."""
    signatures = SignatureTable(*table)
    for start, end in zip((0, *cuts), (*cuts, len(tokens)), strict=True):
        here = pad_id is not None and start <= pad_id < end
        signatures.extend(tokens[start:end], pad_id=pad_id if here else None)
    return signatures


def rows(table):
    return [tuple(row) for row in table.ids.tolist()]


@given(vocabularies())
def test_signatures_are_unique(drawn):
    """No two tokens share a signature, whatever the vocabulary, up to a full table."""
    tokens, H, B, pad_id, cuts = drawn
    signatures = rows(registered(tokens, H, B, pad_id=pad_id))
    taken = [row for token, row in zip(tokens, signatures, strict=True) if token is not None]
    assert len(set(taken)) == len(taken)


@given(vocabularies())
def test_signatures_follow_the_rule(drawn):
    """The table holds what the rule of registration gives, also when it is given in pieces."""
    tokens, H, B, pad_id, cuts = drawn
    table = registered(tokens, H, B, pad_id=pad_id, cuts=cuts)
    assert rows(table) == replay(tokens, H, B, pad_id)[0]


@given(vocabularies())
def test_trace_replays_every_try(drawn):
    """trace gives each try's seed, id and owner as they were at registration; [] for the pad."""
    tokens, H, B, pad_id, cuts = drawn
    table = registered(tokens, H, B, pad_id=pad_id)
    traces = replay(tokens, H, B, pad_id)[1]
    for token, tries in zip(tokens, traces, strict=True):
        assert token is None or table.trace(token) == tries


@given(vocabularies())
def test_lookup_inverts_the_table(drawn):
    """lookup of a token's signature gives the token; of one that nobody has, None."""
    tokens, H, B, pad_id, cuts = drawn
    table = registered(tokens, H, B, pad_id=pad_id)
    found = [table.lookup(row) for row in rows(table)]
    assert found == [pad_id if token is None else i for i, token in enumerate(tokens)]
    assert table.lookup((B,) * H) is None


@pytest.mark.parametrize(("H", "B"), [(2, 8192), (2, 512), (3, 64)])
def test_a_large_vocabulary_has_no_duplicates(H, B):
    """32,768 tokens, up to 64 of them with one prefix: every signature is unique."""
    table = registered([b"%d" % i for i in range(32768)], H, B, pad_id=2)
    assert len(set(rows(table))) == len(table) == 32768
    assert table.stats()["duplicates"] == 0


@pytest.mark.parametrize(("H", "B"), [(2, 8192), (2, 512), (3, 64)])
def test_a_large_table_does_not_depend_on_the_pieces(H, B):
    """Registering 32,768 tokens at once or in four pieces gives the same table."""
    tokens = [b"%d" % i for i in range(32768)]
    pieces = registered(tokens, H, B, pad_id=2, cuts=(1, 9000, 30000))
    assert torch.equal(pieces.ids, registered(tokens, H, B, pad_id=2).ids)


@pytest.mark.parametrize("pad_id", [None, 0, 9])
def test_a_table_can_be_filled_to_the_last_signature(pad_id):
    """(B−1)^H tokens fit, plus the pad, one at a time, before or after it."""
    tokens = [token for first in (1, 2, 3) for token in classes(4)[first][:3]]
    if pad_id is not None:
        tokens.insert(pad_id, b"<pad>")
    table = registered(tokens, 2, 4, pad_id=pad_id, cuts=range(1, len(tokens)))
    assert rows(table) == replay(tokens, 2, 4, pad_id)[0]


def test_add_returns_the_signature():
    """add gives the new token's signature, as a tuple; zeros for the pad."""
    table = SignatureTable(3, 8)
    assert table.add(b"pad", pad=True) == (0, 0, 0)
    assert table.add(b"a") == tuple(id_of(b"a", j, 8) for j in range(3)) == rows(table)[1]


def test_ids_without_a_token_have_zeros():
    """None registers an unassigned row, (0, …, 0), any number of them, and nobody owns it."""
    table = registered([b"a", None, b"b", None], 2, 8)
    assert len(table) == 4 and rows(table)[1] == rows(table)[3] == (0, 0)
    assert table.lookup((0, 0)) is None


# A table with B = 4: the pad, and the whole class of the tokens whose first id is 1.
FULL = classes(4)[1][:3]
REFUSED = {
    "a full class": ([classes(4)[1][3]], {}, [classes(4)[1][3], 3]),
    "more tokens than signatures": (classes(4)[2] + classes(4)[3], {}, [2, 4]),
    "a token registered before": ([FULL[1]], {}, [FULL[1], 2]),
    "a token twice": ([*classes(4)[2][:2], classes(4)[2][0]], {}, [classes(4)[2][0], 4]),
    "a second pad": ([b"eot"], {"pad_id": 4}, [0, 4]),
    "a pad among the old ids": ([b"eot"], {"pad_id": 2}, [2, 4]),
    "a token that is not bytes": ([b"good", "text"], {}, ["'text'"]),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.usefixtures("time_limit")
def test_a_refused_token_leaves_the_table_as_it_was(case):
    """ValueError, with the values in one sentence; ids, owners and what follows are unchanged."""
    tokens, keywords, values = REFUSED[case]
    before = registered([b"<pad>", *FULL], 2, 4, pad_id=0)
    table = registered([b"<pad>", *FULL], 2, 4, pad_id=0)
    with pytest.raises(ValueError) as error:
        table.extend(tokens, **keywords)
    one_sentence(error, *values)
    assert rows(table) == rows(before) and table.stats() == before.stats()
    everything = [(i, j) for i in range(4) for j in range(4)]
    assert [table.lookup(s) for s in everything] == [before.lookup(s) for s in everything]
    assert table.add(classes(4)[2][0]) == before.add(classes(4)[2][0])


@pytest.mark.usefixtures("time_limit")
def test_tracing_into_a_full_class_is_an_error():
    """trace of a token that has no place ends with ValueError; it does not try for ever."""
    with pytest.raises(ValueError):
        registered([b"<pad>", *FULL], 2, 4, pad_id=0).trace(classes(4)[1][3])


def test_locality_sensitive_tokens_must_be_bytes_too():
    """The same ValueError where the first functions are locality-sensitive."""
    with pytest.raises(ValueError, match="'text'"):
        SignatureTable(2, 4, 1).add("text")


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ((1, 8), ["num_hashes", 1, "allow_collisions"]),
        ((3, 8, 3), ["num_lsh", 3, "allow_collisions"]),
        ((0, 8), ["num_hashes", 0]),
        ((2, 1), ["num_buckets", 1]),
        ((2, 8, 3), ["num_lsh", 2, 3]),
    ],
)
def test_impossible_tables_are_refused(arguments, values):
    """A table without a function to re-hash, or of impossible sizes, is a ValueError."""
    with pytest.raises(ValueError) as error:
        SignatureTable(*arguments)
    one_sentence(error, *values)


def test_single_id_tokens_share_buckets():
    """H = 1 with allow_collisions: plain hashes, no re-hash; lookup gives the lowest id."""
    tokens = [b"%d" % i for i in range(20)]
    table = SignatureTable(1, 4, allow_collisions=True)
    table.extend(tokens)
    assert rows(table) == [(id_of(token, 0, 4),) for token in tokens]
    assert [table.lookup((b,)) for b in (1, 2, 3)] == [rows(table).index((b,)) for b in (1, 2, 3)]
    assert all(len(table.trace(token)) == 1 for token in tokens)


def test_all_functions_locality_sensitive_keeps_collisions():
    """L' = H: tokens with the same trigrams share their signature, and it stays so."""
    table = SignatureTable(2, 64, num_lsh=2, allow_collisions=True)
    table.extend([b"other", b"aaa", b"aaaa"])  # both have the one trigram aaa
    assert rows(table)[0] != rows(table)[1] == rows(table)[2]
    assert table.lookup(rows(table)[2]) == 1


def test_mixed_functions_rehash_the_last():
    """L' < H: tokens with the same trigrams share the first L' ids; the tuple stays unique."""
    table = SignatureTable(3, 4, num_lsh=2)
    table.extend([b"a" * n for n in (3, 4, 5)])
    assert len(set(rows(table))) == 3 and len({row[:2] for row in rows(table)}) == 1
    assert [table.trace(b"a" * n)[-1][1] for n in (3, 4, 5)] == table.ids[:, -1].tolist()


def test_table_from_ids_keeps_them():
    """from_ids takes stored ids as they are, duplicates too: the lowest of equal rows is found."""
    ids = torch.tensor([[0, 0], [3, 2], [3, 2], [0, 0], [1, 7]])
    table = SignatureTable.from_ids(ids, 0)
    assert torch.equal(table.ids, ids) and len(table) == 5
    assert [table.lookup(row) for row in rows(table)] == [0, 1, 1, 0, 4]


def test_table_from_ids_knows_no_tokens():
    """trace on a table from stored ids raises: there are no tokens to hash."""
    with pytest.raises(ValueError):
        SignatureTable.from_ids(torch.tensor([[0, 0], [3, 2]]), 0).trace(b"a")
