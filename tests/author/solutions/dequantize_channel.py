import codetta
from codetta.language import Col, Row

TASK = "dequantize_channel"


@codetta.epilogue
def dequantize_channel(acc, row_scale: Col, channel_scale: Row, zero: Col, channel_sum: Row):
    return {"y": row_scale * channel_scale * (acc - zero * channel_sum)}
