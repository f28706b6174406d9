"""Building, rewriting and running Plans."""

from __future__ import annotations

from codetta.errors.base import CodettaError


class PlanError(CodettaError):
    """A Plan was built, rewritten or run in a way that its algebra does not allow."""


class PlanShape(PlanError, ValueError):
    template = "{op} in plan {plan!r} cannot combine {given}: {reason}."
    wrong = "p = codetta.plan.PlanBuilder('f')\np.mm(p.tile('x', 'M', 4), p.weight('w', 3, 5).t())"
    right = "p = codetta.plan.PlanBuilder('f')\np.mm(p.tile('x', 'M', 4), p.weight('w', 3, 4).t())"


class PlanInput(PlanError, ValueError):
    template = "plan {plan!r} was run with {given}; its inputs are {expected}."
    wrong = (
        "p = codetta.plan.PlanBuilder('f')\n"
        "p.output('z', p.mm(p.tile('x', 'M', 4), p.weight('w', 3, 4).t()))\n"
        "codetta.plan.evaluate(p.build(), x=torch.ones(2, 4))"
    )
    right = (
        "p = codetta.plan.PlanBuilder('f')\n"
        "p.output('z', p.mm(p.tile('x', 'M', 4), p.weight('w', 3, 4).t()))\n"
        "codetta.plan.evaluate(p.build(), x=torch.ones(2, 4), w=torch.ones(3, 4))"
    )
