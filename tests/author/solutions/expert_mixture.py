import codetta
from codetta.language import Col, Row, Tile

TASK = "expert_mixture"


@codetta.epilogue
def expert_mixture(acc, weight: Col, bias: Row, total: Tile):
    return {"y": total + weight * (acc + bias)}
