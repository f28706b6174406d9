"""Calling ``codetta.linear_cross_entropy``."""

from __future__ import annotations

from codetta.errors.call import CallError


class LossArguments(CallError, ValueError):
    template = "{first} and {second} exclude each other: {reason}. {fix}"
    wrong = (
        "t = torch.zeros(5, dtype=torch.long)\n"
        "codetta.linear_cross_entropy(a, b.t(), t, reduction='sum', num_items_in_batch=8)"
    )
    right = (
        "t = torch.zeros(5, dtype=torch.long)\n"
        "codetta.linear_cross_entropy(a, b.t(), t, num_items_in_batch=8)"
    )


class LossDtypes(CallError, TypeError):
    template = (
        "x has dtype {x} and {name} has dtype {given}. As in torch.nn.functional.linear they must "
        "be equal: convert one with .to(...), or run under torch.autocast, which casts them."
    )
    wrong = "codetta.linear_cross_entropy(a, b.t().double(), torch.zeros(5, dtype=torch.long))"
    right = "codetta.linear_cross_entropy(a, b.t(), torch.zeros(5, dtype=torch.long))"


class TargetOutOfRange(CallError, IndexError):
    template = (
        "{count} targets lie outside the vocabulary [0, {size}), the first is {given} at position "
        "{at}. Set those that do not count to ignore_index (-100), and check that the weight has "
        "a row for every token of the tokenizer."
    )
    wrong = "codetta.linear_cross_entropy(a, b.t(), torch.full((5,), 6))"
    right = "codetta.linear_cross_entropy(a, b.t(), torch.full((5,), 5))"
