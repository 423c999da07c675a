"""Assignment 2: another family of hash functions.

A signature is H ids from H hash functions. The paper (section 3.1) takes one function with a
seed, MurmurHash3, for the whole family; function j has the seed j:

    id_j(w) = murmurhash3(w, seed j) mod (B − 1) + 1                      j = 0 … H−1

Yours takes another hash h, and nothing else changes:

    id_j(w) = h(w, j) mod (B − 1) + 1

If another token has the signature already, only the last id changes: it is made from the seeds H,
H+1, … until the signature is free. The pad has the signature (0, …, 0), which no other token may
have. mhf.SignatureTable does most of this for you: see where it calls `candidates`.

Choose one: (a) BLAKE2b with the seed as its key (hashlib has it); (b) by hand, a polynomial in the
bytes modulo a prime, or multiply-shift. Either must be
* the same in every process and on every machine (Python's own hash() of bytes is not);
* uniform over 0 … 2^64 − 1, or over nearly so many (2^61 − 1 values do). With few values the
  remainder mod (B − 1) favours some buckets: this is modulo bias;
* different for every (token, seed), also for short tokens, and unrelated from one seed to another:
  two tokens that agree under one seed agree under the next with probability 1 / (B − 1), not 1.

The question: does it matter which family is used? The model never sees the tokens' bytes.

1. Predict, before you measure: will the perplexity change, and by more or less than two seeds of
   one model differ? What else changes: speed, the published checkpoints, an adversary's chances?
2. Write hash_bytes and HashedSignatures.
       python -m pytest tutorials/assignments/grade_hash_family.py
3. Measure, with three seeds. One run trains both models.
       python tutorials/assignments/hash_family.py --seed 1      and 2, and 3
4. Hand in this file and half a page; README.md beside it has the questions.
"""

import sys

import experiment

import mhf


def hash_bytes(token, seed):
    """h(w, seed): token (bytes, any length), seed (an int from 0 on) -> int, 0 … 2^64 − 1."""
    raise NotImplementedError("not written yet: hash_bytes")


class HashedSignatures(mhf.SignatureTable):
    """mhf's table of signatures, with hash_bytes in place of MurmurHash3."""

    def candidates(self, token, lsh=()):
        """Yield signatures (tuples of H ints) to try, without end.

        First the signature as hashed, whose last seed is H−1; then those with another last id,
        from the seeds H, H+1, …. self.num_hashes is H, self.num_buckets B. `lsh` has the ids of
        locality-sensitive functions, of which there are none here.
        """
        raise NotImplementedError("not written yet: HashedSignatures.candidates")


def main(argv=None):
    return experiment.train_both(__file__, {"SignatureTable": HashedSignatures}, argv)


if __name__ == "__main__":
    sys.exit(main())
