"""Assignment 3: a decoder without mixers, whose H functions predict independently.

The paper (section 3.3) predicts the ids of the next token one after the other. After each, a mixer
tells the next function what has been predicted so far:

    c_1 = h,    o_j = E_j c_j,    e_j = softmax(o_j)ᵀ E_j,
    c_{j+1} = c_j + W_up SiLU(W_dn [c_j ; e_j] + b_dn) + b_up

Yours has no mixer, so every function sees the state h of the backbone and nothing else:

    c_j = h,    o_j = E_j h                                               for all j

The question: what is the cascade worth? Without it, the score of a token is a sum of H products
with h. Work out on paper what log P(w) is then, renormalised over the tokens: which well-known
model is this, and what is its output embedding of w? (Hint: the H log-sum-exps are the same for
every token.)

1. Predict, before you measure: the perplexity under the exact objective, and under the paper's
   independent one; and the valid mass. Which of them needs the cascade most?
2. Write NoMixer. Derive from mhf's class and leave alone what need not change.
       python -m pytest tutorials/assignments/grade_no_mixer.py
3. Measure, with three seeds. One run trains both models.
       python tutorials/assignments/no_mixer.py --seed 1      and 2, and 3
       python tutorials/assignments/no_mixer.py --seed 1 --objective independent
4. Hand in this file and half a page; README.md beside it has the questions.
"""

import sys

import experiment

import mhf


class NoMixer(mhf.CascadeDecoder):
    """o_j = E_j h for every function j. No parameters of its own."""

    def __init__(self, config):
        super().__init__(config)
        raise NotImplementedError("not written yet: NoMixer.__init__")

    def steps(self, h, table, force=()):
        """Yield (o_j, e_j) for every function j; h (..., D), table (H, B, D) -> o_j (..., B).

        e_j may be None, because no later function uses it. force, as in mhf's class, has no effect.
        """
        raise NotImplementedError("not written yet: NoMixer.steps")


def main(argv=None):
    return experiment.train_both(__file__, {"CascadeDecoder": NoMixer}, argv)


if __name__ == "__main__":
    sys.exit(main())
