"""What CODA does to a model, and why not more: `codetta.explain` and `codetta explain`.

record.py    the model's graphs, caught on their way through the rewriter
eager.py     what a graph costs operation by operation
fused.py     what a region costs as a Plan
gpus.py      the roofline
facts.py     the result, and its JSON
text.py, page.py, drawing.py   for a terminal, and for a browser
configs.py   models by name, without their weights
"""
