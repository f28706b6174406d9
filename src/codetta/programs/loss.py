"""The language-model head: cross-entropy in the epilogue of the logits' GEMM.

The logits z = r ⊙ (x W'ᵀ) of one tile are reduced on the spot, in fp32 from the accumulator, to

    lse       log Σ e^z, online: a (maximum, sum) per tile     (Milakov and Gimelshein, 1805.02867)
    logit     z at the target column, 0 where the target lies outside (ignored rows)
    expected  Σ softmax(z) z, which rides along with the sum

so the forward stores three numbers per row and no logits. loss = lse − logit. ``expected`` makes
the backward of the norm before the head free: dz = g (p − onehot), hence
⟨dz, z⟩ = g (expected − logit), and its coefficient is known before any dz is.

The backward recomputes the logits, by chunks, and its epilogue turns them into r ⊙ dz at once.
The upstream gradient g is one number per row and multiplies before anything is summed, so masks,
weights and reductions of the loss are the caller's affair: an ignored row is g = 0.
"""

# Operand kinds are objects, not types, to a type checker.
# mypy: disable-error-code="valid-type, no-untyped-def, operator, arg-type"
from __future__ import annotations

from codetta.language import Col, Index, Scalar, epilogue, exp, finalizer, logsumexp, onehot, select


@epilogue
def row_scale_lse_target(acc, r: Col, target: Index):
    z = acc * r
    lse, expected = logsumexp(z, z)
    return {"lse": lse, "logit": select(z, target), "expected": expected}


@finalizer
def cross_entropy_loss(lse: Col, logit: Col):
    return {"loss": lse - logit}


@finalizer
def cross_entropy_coefficient(r: Col, grad: Col, expected: Col, logit: Col, dim: Scalar):
    return {"c": r * r * (grad * (expected - logit)) / dim}


@epilogue
def cross_entropy_backward(acc, r: Col, lse: Col, target: Index, grad: Col):
    return {"dz": r * grad * (exp(acc * r - lse) - onehot(target, acc))}
