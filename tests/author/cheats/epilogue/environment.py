"""Chooses another backend, and other code, by environment variables.

Caught by integers: its error budget
"""

import os

import codetta
from codetta.language import Row, Tile

TASK = "bias_gelu_mask"


os.environ["CODETTA_BACKEND"] = "cuda"
os.environ["PYTHONPATH"] = os.getcwd()
os.environ["CODETTA_REGISTRY"] = "registry.jsonl"


@codetta.epilogue
def bias_gelu_mask(acc, bias: Row, keep: Tile):
    return {"y": (acc + bias) * keep}
