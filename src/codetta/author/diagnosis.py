"""From counters and static facts to words: what limits a kernel, and what to change.

``RULES`` is the one table: when a rule holds, what it says, what to do. The first that holds is the
limit; the others are told after it. Thresholds are for Hopper's persistent GEMM kernels, in which
one block per multiprocessor is normal and a full tensor pipe is what one wants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from codetta.author.kernelfacts import SMS, Facts


@dataclass(frozen=True)
class Rule:
    """One line of the table.

    Attributes:
        limit: its name: what the kernel is short of.
        holds: on which facts.
        words: what is the matter, with numbers.
        change: what to do about it.
    """

    limit: str
    holds: Callable[[Facts], bool]
    words: Callable[[Facts], str]
    change: str


@dataclass(frozen=True)
class Finding:
    limit: str
    words: str
    change: str


def diagnose(facts: Facts) -> tuple[Finding, ...]:
    """All rules that hold, the limit first; at least one."""
    found = [r for r in RULES if r.holds(facts)]
    if not found:
        found = [_NOTHING_MEASURED if facts.counters else _NOTHING_STATIC]
    return tuple(Finding(r.limit, r.words(facts), r.change) for r in found)


RULES: tuple[Rule, ...] = (
    Rule(
        "tensor cores",
        lambda f: not f.split and (f.get("tensor pipe %") >= 85 or 0 < f.slower <= 1.04),
        lambda f: (
            "bound by its products, as it should be: "
            + ", ".join(
                [f"{f.slower:.2f} times the plain product"] * (f.slower > 0)
                + [f"tensor pipe {f.get('tensor pipe %'):.0f} % busy"]
            )
        ),
        "nothing in the epilogue; only another tile configuration can help",
    ),
    Rule(
        "two kernels",
        lambda f: bool(f.split),
        lambda f: f"not one kernel: {f.split}; the accumulator goes to memory in fp32 and back",
        (
            "split the program so that the part that can run inside the tile does, or write the "
            "value that is refused another way; `codetta check` names it"
        ),
    ),
    Rule(
        "register spills",
        lambda f: f.spilled > 0,
        lambda f: (
            f"{f.spilled} register spills: up to {f.registers:g} values per element are alive at "
            f"once{' in ' + f.config if f.config else ''}"
        ),
        (
            "keep fewer values alive: load a tile where it is used for the last time, recompute "
            "what is cheap, reuse stored values; or take a smaller tile (128x128 ping-pong) by "
            "codetta.use_configuration"
        ),
    ),
    Rule(
        "pipeline stages",
        lambda f: f.stages is not None and 0 < f.stages <= 2,
        lambda f: (
            f"{f.stages} stages are left to feed the tensor cores: buffers of the epilogue's tiles "
            f"take the shared memory; {f.heaviest()}"
        ),
        (
            "load or store one tile less, in 16 bits rather than 32, or take a smaller tile or "
            "epi_n=16; `codetta tune` finds one"
        ),
    ),
    Rule(
        "device memory",
        lambda f: f.get("DRAM %") >= 70,
        lambda f: f"device memory is {f.get('DRAM %'):.0f} % busy; {f.heaviest()}",
        (
            "move fewer bytes: do not store what can be recomputed, store in 16 bits or fp8, "
            "replace a tile operand by a Row or Col where its values repeat"
        ),
    ),
    Rule(
        "operands read again",
        lambda f: f.model_bytes > 0 and f.measured_bytes > 1.5 * f.model_bytes,
        lambda f: (
            f"{f.measured_bytes / 2**20:.0f} MiB moved where {f.model_bytes / 2**20:.0f} would do: "
            "a and b are fetched again because tiles are visited in an order that the L2 cache "
            "cannot keep"
        ),
        "another raster order: `codetta tune`, or max_swizzle=4 or 16 in a Configuration",
    ),
    Rule(
        "L2 cache",
        lambda f: f.get("L2 %") >= 75 and f.get("DRAM %") < 70,
        lambda f: f"the L2 cache is {f.get('L2 %'):.0f} % busy; {f.heaviest()}",
        (
            "larger tiles or clusters of two, so that a and b are fetched less often: "
            "`codetta tune`; and fewer or narrower tile operands"
        ),
    ),
    Rule(
        "special functions",
        lambda f: f.get("xu pipe %") >= 50,
        lambda f: (
            f"the special-function units are {f.get('xu pipe %'):.0f} % busy: {f.special:g} of "
            "exp, log, tanh, rsqrt and their like per element"
        ),
        (
            "share what occurs twice, use sigmoid(x) in place of 1 / (1 + exp(-x)), move functions "
            "of one row or column into a finalizer, which runs once per row"
        ),
    ),
    Rule(
        "issue slots",
        lambda f: (
            f.get("issue slots %") >= 55
            and f.get("issue slots %") > f.of_plain("issue slots %") + 15
            and f.get("tensor pipe %") < 90
        ),
        lambda f: (
            f"instructions fill {f.get('issue slots %'):.0f} % of the issue slots "
            f"({f.of_plain('issue slots %'):.0f} % in the plain product): the epilogue's "
            f"{f.flops:g} operations per element do not hide under the products"
        ),
        (
            "less arithmetic per element: hoist what depends on the row or the column alone, "
            "divide by multiplying with a reciprocal, drop rounding steps the formula does not "
            "ask for; ping-pong tiles hide an epilogue under the other tile's products"
        ),
    ),
    Rule(
        "shared memory",
        lambda f: (
            f.get("shared memory %") >= 70 or f.stall("short_scoreboard", "mio_throttle") >= 0.4
        ),
        lambda f: (
            f"shared memory is {f.get('shared memory %'):.0f} % busy, and "
            f"{f.stall('short_scoreboard', 'mio_throttle'):.0%} of the waiting is for it: tiles "
            "pass through it on their way in and out"
        ),
        (
            "fewer tile operands and stores, or adjacent pairs in place of halves; a Row or a Col "
            "costs next to nothing there"
        ),
    ),
    Rule(
        "waiting for loads",
        lambda f: f.stall("long_scoreboard") >= 0.4,
        lambda f: (
            f"{f.stall('long_scoreboard'):.0%} of the waiting is for loads from memory: operands "
            "that are read element by element, such as Index and Rotary"
        ),
        (
            "give tables and indices that repeat as Row or Col; a tile operand in 16 bits is "
            "fetched by the copy engine and not waited for"
        ),
    ),
    Rule(
        "tail",
        lambda f: f.tiles > 0 and f.filled < 0.85,
        lambda f: (
            f"{f.tiles} tiles on {SMS} multiprocessors: {1 - f.filled:.0%} of the time they have "
            "none"
        ),
        "another tile size, so that the last wave is fuller: `codetta tune`",
    ),
    Rule(
        "idle multiprocessors",
        lambda f: 0 < f.get("occupancy %") < 12,
        lambda f: (
            f"{f.get('occupancy %'):.0f} % of the warps are active, where one block of three warp "
            "groups has 19: multiprocessors stand idle"
        ),
        "more rows per call, or a smaller tile",
    ),
    Rule(
        "arithmetic",
        lambda f: (
            not f.counters
            and f.product_ops > 0
            and f.flops + 8 * f.special > f.product_ops / _TENSOR_OVER_PLAIN
        ),
        lambda f: (
            f"{f.flops:g} plain and {f.special:g} special operations per element take longer than "
            f"the {f.product_ops:g} of its product on the tensor cores"
        ),
        (
            "hoist what depends on the row or the column alone, share what occurs twice; a larger "
            "K hides more"
        ),
    ),
    Rule(
        "epilogue traffic",
        lambda f: (
            not f.counters
            and f.expected > 1.03
            and 2 * sum(f.bytes_by_name.values()) > f.plain_bytes > 0
        ),
        lambda f: (
            f"{f.expected:.2f} times the plain product is expected: the epilogue moves "
            f"{sum(f.bytes_by_name.values()) / 2**20:.0f} MiB beside the product's "
            f"{f.plain_bytes / 2**20:.0f}; {f.heaviest()}"
        ),
        (
            "do not store what can be recomputed, store in 16 bits or fp8, replace a tile operand "
            "by a Row or Col where its values repeat"
        ),
    ),
)
#: Operations of the tensor cores in the time of one plain operation, 990 over 25 tera a second; a
#: special operation takes eight plain ones.
_TENSOR_OVER_PLAIN = 40.0

_NOTHING_MEASURED = Rule(
    "no single limit",
    lambda f: True,
    lambda f: (
        f"nothing stands out: tensor pipe {f.get('tensor pipe %'):.0f} % "
        f"({f.of_plain('tensor pipe %'):.0f} % in the plain product), issue slots "
        f"{f.get('issue slots %'):.0f} %, device memory {f.get('DRAM %'):.0f} %"
    ),
    "`codetta tune` for the tile configuration; then fewer bytes and operations",
)
_NOTHING_STATIC = Rule(
    "its products",
    lambda f: True,
    lambda f: (
        "nothing in the static facts stands against hiding the epilogue under the products: "
        f"{f.stages or 'unknown'} stages, {'unknown' if f.spills is None else f.spills} spills, "
        f"{f.flops:g} operations per element, {f.expected:.2f} times the plain product expected"
    ),
    "measure it: `codetta bench` and `codetta profile` on a GPU",
)
