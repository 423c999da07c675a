"""Assignment 1: a mean in place of the gate.

The paper (section 3.2) weighs the H rows e_j of a token. Each row gets a score, and the gate is
the softmax of the scores over j:

    s_j = w2 · SiLU(W1 e_j + b1) + b2,    α = softmax over j of s,    x = W_s (Σ_j α_j e_j) + b_s

Your model has no scores. Every row counts the same; the adapter W_s, b_s stays:

    x = W_s (mean over j of e_j) + b_s

The question: what is the gate worth? A row is shared by all tokens in its bucket. A gate can
learn to trust some rows less than others; a mean cannot. On the other hand it has nothing to learn.

1. Predict, before you measure: will the held-out perplexity rise or fall, and by more or less than
   two seeds of one model differ? How many parameters go, of how many? Does the answer depend on
   num_buckets? Write it down.
2. Write MeanGate. Derive from mhf's class and leave alone what need not change.
       python -m pytest tutorials/assignments/grade_mean_gate.py
3. Measure, with three seeds. One run trains both models.
       python tutorials/assignments/mean_gate.py --seed 1      and 2, and 3
       python tutorials/assignments/mean_gate.py --seed 1 --num_buckets 64
4. Hand in this file and half a page; README.md beside it has the questions.
"""

import sys

import experiment

import mhf


class MeanGate(mhf.GatedEmbedding):
    """x = W_s (mean over j of e_j) + b_s. No parameters but those of the adapter, output_proj."""

    def __init__(self, config):
        super().__init__(config)
        raise NotImplementedError("not written yet: MeanGate.__init__")

    def forward(self, e):
        """e (..., H, D), the rows of a signature -> input vectors (..., D) and gate (..., H).

        The gate is what `explain` shows: the weight of every row.
        """
        raise NotImplementedError("not written yet: MeanGate.forward")


def main(argv=None):
    return experiment.train_both(__file__, {"GatedEmbedding": MeanGate}, argv)


if __name__ == "__main__":
    sys.exit(main())
