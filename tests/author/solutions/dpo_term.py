import codetta
from codetta.language import Col, Index, abs, exp, log, logsumexp, maximum, select

TASK = "dpo_term"


@codetta.epilogue
def dpo_term(acc, target: Index, reference_logp: Col, rejected: Col):
    logp = select(acc, target) - logsumexp(acc)
    h = 0.5 * (logp - reference_logp - rejected)
    return {"loss": maximum(-h, 0.0) + log(1.0 + exp(-abs(h))), "logp": logp}
