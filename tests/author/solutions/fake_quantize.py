import codetta
from codetta.language import Row, abs, round_to, rowmax, store

TASK = "fake_quantize"


@codetta.epilogue
def fake_quantize(acc, bias: Row, gain: Row):
    z = acc + bias
    y = round_to(z * gain, "e4m3") / gain
    return {"y": store(y, "bf16"), "amax": rowmax(abs(z))}
