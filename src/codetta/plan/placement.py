"""Placement: which epilogue computes each node of a Plan, and what is stored.

* A pointwise or reducing operation joins the epilogue of the *last* contraction it depends on,
  unless something it reads is known only after that epilogue has run.
* A pointwise operation on matrices at hand (loaded or computed) is computed again wherever it is
  needed; only what a contraction, an output or another kernel reads is stored.
* Arithmetic on parameter vectors alone, such as 1 + γ, is repeated where it is read, too.

What the epilogues leave over becomes kernels of its own, see :mod:`codetta.plan.grouping`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fractions import Fraction

from codetta.language.primitives import PRIMITIVES, REDUCTIONS, Family
from codetta.language.types import Kind, Type
from codetta.plan.operations import OPERATIONS
from codetta.plan.plan import Plan

#: Leaves that are written into programs.
NUMBERS = frozenset({"const", "extent"})


class Classes:
    """What kind of work each node of a Plan is."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.nodes = plan, plan.nodes
        self.outputs = {o.node for o in plan.outputs}

    def is_leaf(self, i: int) -> bool:
        return not self.nodes[i].args

    def is_gemm(self, i: int) -> bool:
        return self.nodes[i].op == "mm" and not self.plan.parameter_only[i]

    def is_prepared(self, i: int) -> bool:
        return self.plan.parameter_only[i] and not self.is_leaf(i)

    def is_tile(self, i: int) -> bool:
        return self.nodes[i].type.kind is Kind.TILE

    def is_reduction(self, i: int) -> bool:
        """Reduces a matrix (a reduction of a vector belongs to a finalizer)."""
        return self.nodes[i].op in REDUCTIONS and self.is_tile(self.nodes[i].args[0])

    def joins_epilogues(self, i: int) -> bool:
        node = self.nodes[i]
        if node.op not in PRIMITIVES or self.is_leaf(i) or self.plan.parameter_only[i]:
            return False
        return self.is_tile(i) or self.is_reduction(i)

    def is_vector(self, i: int) -> bool:
        """Computed per row or column from completed reductions: a finalizer's work."""
        node = self.nodes[i]
        return bool(
            node.args
            and node.op in PRIMITIVES
            and not self.is_tile(i)
            and not self.is_reduction(i)
            and not self.plan.parameter_only[i]
        )

    def sums_vector(self, i: int) -> bool:
        """Reduces a vector to a number."""
        return self.is_vector(i) and self.nodes[i].op in REDUCTIONS

    def is_repeated(self, i: int) -> bool:
        """Arithmetic on parameter vectors: cheaper to repeat than to store."""
        node = self.nodes[i]
        if not self.is_prepared(i) or self.is_tile(i) or node.op not in PRIMITIVES:
            return False
        wide = {self.nodes[a].type.cols for a in node.args if self.nodes[a].type.has_cols}
        return PRIMITIVES[node.op].family is Family.MAP and wide <= {node.type.cols}

    def is_view(self, i: int) -> bool:
        return self.nodes[i].op in OPERATIONS and OPERATIONS[self.nodes[i].op].view

    def domain(self, i: int) -> Type:
        """Type of the matrix over which node i is computed in a tile program."""
        source = self.nodes[i].args[0] if self.is_reduction(i) else i
        return self.nodes[source].type

    def axis(self, i: int) -> Type:
        """Type of the vector over which a finalizer computes node i."""
        source = self.nodes[i].args[0] if self.sums_vector(i) else i
        return self.nodes[source].type


class Placement(Classes):
    """Decides, for every node of a Plan, the kernel that computes it.

    Attributes:
        host: the contraction in whose epilogue a node is computed.
        stored: values that exist in memory.
        refused: (node, contraction) pairs that turned out to fit no program.
    """

    def __init__(self, plan: Plan, refused: Collection[tuple[int, int]] = ()) -> None:
        super().__init__(plan)
        self.refused = frozenset(refused)
        self.host: dict[int, int] = {}
        self._externals: dict[tuple[int, int | None], frozenset[int]] = {}
        self._grow_epilogues()
        self.stored = self._stored()

    # ---- epilogues
    def _grow_epilogues(self) -> None:
        first: list[frozenset[int]] = []  # contractions that must have run before a value is there
        reach: list[frozenset[int]] = []  # contractions whose epilogue could compute it
        upstream: dict[int, set[int]] = {}  # contractions that must have run before another

        def before(values: Iterable[int]) -> set[int]:
            found: set[int] = set()
            for v in values:
                for gemm in first[v]:
                    found |= upstream[gemm] | {gemm}
            return found

        for i, node in enumerate(self.nodes):
            reachable: frozenset[int] = frozenset()
            if self.is_gemm(i):
                self.host[i] = i
                upstream[i] = before(node.args)
            elif self.joins_epilogues(i):
                reachable = frozenset().union(*(reach[a] for a in node.args))
                for gemm in sorted(reachable, reverse=True):
                    needed = before(self.externals(i, gemm))
                    if gemm not in needed and self.fits(i, gemm):
                        self.host[i] = gemm
                        for other, known in upstream.items():
                            if other == gemm or gemm in known:
                                known |= needed
                        break
            if i in self.host:
                first.append(frozenset((self.host[i],)))
                reach.append(first[i])
            else:
                first.append(frozenset().union(*(first[a] for a in node.args)))
                reach.append(frozenset() if self.is_reduction(i) else reachable)

    def recomputed(self, i: int) -> bool:
        """A pointwise value without a home: whoever needs it computes it."""
        if self.is_repeated(i):
            return True
        return self.joins_epilogues(i) and i not in self.host and not self.is_reduction(i)

    def fits(self, i: int, gemm: int) -> bool:
        """All matrices involved are of a supported width against the contraction's result."""
        out = self.nodes[gemm].type
        if (i, gemm) in self.refused or self.domain(i).rows != out.rows:
            return False
        wide = [self.domain(i), *(self.nodes[e].type for e in self.externals(i, gemm))]
        ratios = (t.cols / out.cols for t in wide if t.has_cols)
        return all(r in (1, 2) or Fraction(r).numerator == 1 for r in ratios)

    def externals(self, i: int, gemm: int | None) -> frozenset[int]:
        """Values that must be given to compute node i in the epilogue of ``gemm`` (None: alone)."""
        key = (i, gemm)
        if key not in self._externals:
            found: set[int] = set()
            seen: set[int] = set()
            stack = list(self.nodes[i].args)
            while stack:
                a = stack.pop()
                if a in seen or self.nodes[a].op in NUMBERS:
                    continue
                seen.add(a)
                if self.recomputed(a):
                    stack += self.nodes[a].args
                elif gemm is None or self.host.get(a) != gemm or self.is_reduction(a):
                    found.add(a)  # a reduction is known only after the epilogue
            self._externals[key] = frozenset(found)
        return self._externals[key]

    def matrices(self, i: int, gemm: int | None) -> frozenset[int]:
        return frozenset(e for e in self.externals(i, gemm) if self.is_tile(e))

    # ---- what is in memory
    def _stored(self) -> set[int]:
        stored: set[int] = set()
        pending: list[int] = []

        def need(values: Iterable[int]) -> None:
            for v in values:
                if v not in stored and not self.is_leaf(v):
                    stored.add(v)
                    pending.append(v)

        need(self.outputs)
        for i, gemm in self.host.items():  # epilogues need all that they load, stored or not
            need(self.nodes[i].args if i == gemm else self.externals(i, gemm))
        while pending:
            need(self._reads(pending.pop(), stored))
        return stored

    def _reads(self, i: int, stored: Collection[int]) -> Iterable[int]:
        """Values read from memory to produce stored value i."""
        if i in self.host:
            return ()
        if self.joins_epilogues(i):
            return self.externals(i, None)
        if self.is_prepared(i):
            return self.prepared_reads(i, stored)
        if self.is_vector(i):
            return self.vector_reads(i, stored)
        return self.nodes[i].args

    def prepared_reads(self, i: int, stored: Collection[int]) -> set[int]:
        """Stored values and parameters that the preparation of value i starts from."""
        found: set[int] = set()
        for a in self.nodes[i].args:
            if self.nodes[a].op in NUMBERS:
                continue
            if a in stored or self.is_leaf(a):
                found.add(a)
            else:
                found |= self.prepared_reads(a, stored)
        return found

    def vector_reads(self, i: int, stored: Collection[int]) -> set[int]:
        """Leaves, partials and stored vectors that a finalizer of node i starts from."""
        found: set[int] = set()
        for a in self.nodes[i].args:
            if self.nodes[a].op in NUMBERS:
                continue
            chained = self.is_vector(a) and not self.sums_vector(a) and a not in stored
            if self.is_repeated(a) or chained:
                found |= self.vector_reads(a, stored)
            else:
                found.add(a)
        return found

    def completed(self, i: int) -> bool:
        """A reduction whose completed value (not its partials) somebody reads."""
        if i in self.outputs:
            return True
        return any(
            not self.is_vector(u) and (u in self.stored or self.joins_epilogues(u))
            for u in self.plan.users[i]
        )
