"""Grader of assignment 2: python -m pytest tutorials/assignments/grade_hash_family.py"""

import itertools
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import hash_family
import torch
from grading import TOKENS, check, graded, tiny_model

import mhf

# Numbers, words, all short byte strings of a kind: what vocabularies have, and what a weak hash
# maps regularly.
BYTES = [bytes([a]) for a in range(256)]
PAIRS = [bytes([0, a]) for a in range(256)] + [bytes([a, 0]) for a in range(1, 256)]
MANY = [b"", *BYTES, *PAIRS, *(b"%d" % i for i in range(100, 9000)), b"\x00" * 9]
MANY += [b" word%d" % i for i in range(9000)]


class Bounded(hash_family.HashedSignatures):
    """The student's table, which gives up where it would search without end."""

    def candidates(self, token, lsh=()):
        count = 0
        for signature in itertools.islice(super().candidates(token, lsh), 3000):
            count += 1
            yield signature
        check(False, f"token {token!r} finds no free last id in {count:,} tries; there are some")


def table_of(tokens, H, B, pad_id=0):
    table = Bounded(H, B)
    table.extend(tokens, pad_id=pad_id)
    return table


def check_uniform(counts, total, cells, what):
    """Pearson's χ² of `total` draws over `cells`, at most 6 standard deviations above its mean."""
    squares = sum(n * n for n in counts.values())
    chi2 = squares * cells / total - total
    most = cells - 1 + 6 * (2 * cells) ** 0.5
    check(chi2 < most, f"{what}: χ² is {chi2:,.0f}, of a uniform hash at most {most:,.0f}")


@graded
def test_the_hash_is_a_number_of_64_bits_that_repeats():
    h = hash_family.hash_bytes
    for token, seed in itertools.product((b"", b"a", b"\xff\x00", b"x" * 1000), (0, 3, 256, 70000)):
        value = h(token, seed)
        what = f"hash_bytes({token[:5]!r}, {seed}) is {value!r}"
        check(type(value) is int, f"{what}, not an int")
        check(0 <= value < 2**64, f"{what}, not from 0 to 2^64 − 1")
        check(value == h(token, seed), f"hash_bytes({token[:5]!r}, {seed}) differs when repeated")
    hashes, murmur = ([f(token, 0) for token in TOKENS] for f in (h, mhf.hash128))
    check(
        max(hashes) >= 2**56,
        f"the largest of 30 hashes is {max(hashes):,}: with so few values the remainder "
        "mod (B − 1) favours some buckets (modulo bias); give about 2^64 values",
    )
    halves = [m % 2**64 for m in murmur], [m >> 64 for m in murmur]
    check(hashes not in halves, "this is half of MurmurHash3, which was to be replaced")


@graded
def test_another_process_gives_the_same():
    hash_family.hash_bytes(b"a", 0)
    call = "import hash_family as f; print([f.hash_bytes(b'%d' % i, i % 3) for i in range(20)])"
    folder = Path(hash_family.__file__).parent
    path = os.pathsep.join([str(folder), str(Path(mhf.__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", call],
        env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
    )
    here = [hash_family.hash_bytes(b"%d" % i, i % 3) for i in range(20)]
    check(done.stdout.strip() == str(here), "another Python process gives other hashes")


@graded
def test_every_token_and_seed_has_a_hash_of_its_own():
    seen = {}
    for call in itertools.product(MANY[:1500] + MANY[-300:], range(12)):  # (token, seed)
        before = seen.setdefault(hash_family.hash_bytes(*call), call)
        check(before == call, f"hash_bytes{before} and hash_bytes{call} are the same hash")


@graded
def test_buckets_are_uniform():
    for seed in (0, 5):
        hashes = [hash_family.hash_bytes(token, seed) for token in MANY]
        for buckets in (256, 1000):
            counts = Counter(value % buckets for value in hashes)
            what = f"{len(MANY):,} tokens over {buckets:,} buckets, seed {seed}"
            check_uniform(counts, len(MANY), buckets, what)


@graded
def test_functions_are_unrelated():
    for one, two in ((0, 1), (2, 3), (3, 4), (1, 8)):
        pairs = Counter(
            (hash_family.hash_bytes(token, one) % 100, hash_family.hash_bytes(token, two) % 100)
            for token in MANY[::2]
        )
        what = f"seeds {one} and {two} agree about tokens too often; pairs of buckets"
        check_uniform(pairs, len(MANY[::2]), 100 * 100, what)


@graded
def test_ids_follow_from_the_hash():
    B = 5000
    table = table_of(TOKENS, 4, B)
    check(table.ids[0].eq(0).all(), f"the pad has the ids {table.ids[0].tolist()}, not zeros")
    for token, ids in list(zip(TOKENS, table.ids.tolist()))[1:]:
        check(0 not in ids, f"token {token!r} has the ids {ids}; 0 is the pad's alone")
        check(max(ids) < B, f"token {token!r} has the ids {ids}, but the last bucket is {B - 1}")
        check(len(set(ids)) > 1, f"token {token!r} has the same id under every function: {ids}")
        for j, found in enumerate(ids):
            wanted = hash_family.hash_bytes(token, j) % (B - 1) + 1
            check(
                found == wanted,
                f"token {token!r}: id_{j} is {found}; h(w, {j}) mod (B − 1) + 1 is {wanted}",
            )


@graded
def test_signatures_are_unique_in_a_crowded_table():
    B, tokens = 100, MANY[:3000]
    table = table_of(tokens, 2, B)
    check(table.ids[0].eq(0).all(), f"the pad has the ids {table.ids[0].tolist()}, not zeros")
    duplicates = len(tokens) - len(table.owner)
    check(not duplicates, f"{duplicates} of {len(tokens):,} tokens share another's signature")
    check(len(table.rehashed) > 100, "nothing was hashed again, though the table is crowded")
    for i in table.rehashed[:200]:
        first, found = table.signatures[i]
        wanted = hash_family.hash_bytes(tokens[i], 0) % (B - 1) + 1
        check(first == wanted, f"the re-hash of {tokens[i]!r} changed its first id, too")
        for seed, last, _ in table.trace(tokens[i]):
            wanted = hash_family.hash_bytes(tokens[i], seed) % (B - 1) + 1
            check(
                last == wanted,
                f"the try of {tokens[i]!r} with seed {seed} gives {last}, not {wanted}: "
                "the seeds are H−1, H, H+1, …",
            )
        check(found == last, f"{tokens[i]!r} has the last id {found}, not its last try, {last}")


@graded
def test_growth_keeps_what_there_is():
    pieces, tokens = Bounded(2, 100), MANY[:2000]
    pieces.extend(tokens[:1500], pad_id=0)
    before = pieces.ids.clone()
    pieces.extend(tokens[1500:])
    check(torch.equal(pieces.ids[:1500], before), "new tokens changed the ids of old ones")
    whole = table_of(tokens, 2, 100)
    check(torch.equal(pieces.ids, whole.ids), "tokens that come in two pieces get other ids")
    model = tiny_model({"SignatureTable": Bounded})
    h = model(torch.tensor([[3, 1, 4]]))
    before = model.token_scores(h)
    model.expand([b"new", b"newer"])
    after = model.token_scores(h)[..., :-2]
    check(torch.equal(after, before), "expand changed the scores of old tokens")
