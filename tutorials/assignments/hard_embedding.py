"""Assignment 4: a hard embedding in place of the soft one.

After function j has predicted, the paper's cascade (section 3.3) hands on the mean row under the
prediction, the soft embedding:

    o_j = E_j c_j,    p_j = softmax(o_j),    e_j = p_jᵀ E_j

Yours decides. It hands on the row of the most probable bucket, in training and at inference alike:

    z_j = one-hot(arg max o_j),    e_j = z_jᵀ E_j

arg max has no useful gradient. So z_j gets that of the softmax, which is called the
straight-through estimator: forwards z_j, backwards as if ∂z_j/∂o_j were ∂p_j/∂o_j. With g the
gradient that arrives at e_j, exactly this follows:

    to o_j:  (diag(p_j) − p_j p_jᵀ) E_j g        as from the soft embedding
    to E_j:  z_j gᵀ                              only the chosen row

(E_j also receives gradient as the weights of o_j = E_j c_j; that is nothing new.)

Why not the target's row in training? That is teacher forcing, the other way to harden a cascade:
e_j = E_j[id_j of the target]. It is another model. Training would see right ids only, inference
its own guesses; and the probability of a token w would need the cascade run along w's own ids, a
path for every prefix in the vocabulary, where here one path scores all V tokens. In mhf.py the
logits o_j do not depend on the token that is scored, and your model keeps to that.

The question: what does the cascade gain from handing on its doubt?

1. Predict, before you measure: which is better, and where would they differ most: where the first
   function is certain, or where it is not? Will the two train equally fast?
2. Write hard_embedding. It replaces mhf.soft_embedding; see where the cascade calls that.
       python -m pytest tutorials/assignments/grade_hard_embedding.py
3. Measure, with three seeds. One run trains both models.
       python tutorials/assignments/hard_embedding.py --seed 1      and 2, and 3
4. Hand in this file and half a page; README.md beside it has the questions.

The checkpoint has the tensors of the unchanged model. sample.py would load it and run the soft
cascade, so judge your model by what this script prints.
"""

import sys

import experiment


def hard_embedding(o, E):
    """Logits o (..., B), rows E (B, D) -> zᵀ E (..., D), z = one-hot(arg max o).

    z has the gradient of softmax(o).
    """
    raise NotImplementedError("not written yet: hard_embedding")


def main(argv=None):
    return experiment.train_both(__file__, {"soft_embedding": hard_embedding}, argv)


if __name__ == "__main__":
    sys.exit(main())
