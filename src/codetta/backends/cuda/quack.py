"""Everything of codetta that touches QuACK and the CuTe DSL: the imports and the calls.

QuACK (quack-kernels) supplies the mainloop, tile scheduling and the epilogue frontend; codetta only
writes epilogue functions for it. Its internals move between versions without notice and it pins the
CuTe DSL exactly, so the versions are pinned here and checked, and no other module imports either.
(The text of a generated epilogue imports them too; it is executed here.)

The warm path is :func:`launch`. QuACK's own call keys, validates and looks up per call and keeps an
entry per shape; a plan, once built, serves every M, N and K of one set of dtypes and majors, so it
is kept by the caller and run directly.
"""

from __future__ import annotations

import hashlib
import linecache
from types import ModuleType
from typing import Any

from codetta.backends.cuda.available import missing_package
from codetta.backends.cuda.versions import INSTALL
from codetta.errors import BackendUnavailable

if (_reason := missing_package()) is not None:
    raise BackendUnavailable(given="cuda", reason=_reason, fix=INSTALL)
try:
    import cutlass
    import cutlass.cute as cute
    from cutlass import Float32, Int32
    from cutlass._mlir.extras import types as mlir_types
    from cutlass._mlir_helpers.arith import bitcast
    from quack import copy_utils, layout_utils
    from quack.blockscaled.nvfp4_utils import prmt
    from quack.compile_utils import make_fake_tensor
    from quack.epilogue.frontend import EpiMod
    from quack.epilogue.math import F2
    from quack.epilogue.ops import ColVecLoad, ColVecReduce, Scalar, TileLoad, TileStore
    from quack.gemm_runtime.host import run_gemm_epi_plan
except ImportError as error:
    raise BackendUnavailable(given="cuda", reason=str(error), fix=INSTALL) from error

__all__ = [
    "F2",
    "ColVecLoad",
    "ColVecReduce",
    "EpiMod",
    "Float32",
    "Scalar",
    "TileLoad",
    "TileStore",
    "bitcast_int32",
    "bitcast_number",
    "build",
    "copy_utils",
    "cute",
    "cutlass",
    "epilogue",
    "launch",
    "layout_utils",
    "make_fake_tensor",
    "permuted_bytes",
]


def epilogue(source: str) -> Any:
    """Execute the text of a generated module and return its ``epilogue``.

    The text is registered under a file name of its own, so that QuACK can read it back: it keys
    kernels by the source of the function.
    """
    digest = hashlib.sha256(source.encode()).hexdigest()
    file = f"<codetta epilogue {digest}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = ModuleType(f"codetta_epilogue_{digest[:16]}")
    module.__file__ = file
    exec(compile(source, file, "exec"), module.__dict__)
    return module.__dict__["epilogue"]


def bitcast_int32(x: Any) -> Any:
    """The bits of an fp32 number in a kernel."""
    return Int32(bitcast(Float32(x).ir_value(), mlir_types.i32()))


def bitcast_number(bits: Any) -> Any:
    """The fp32 number with these 32 bits, in a kernel."""
    return Float32(bitcast(Int32(bits).ir_value(), mlir_types.f32()))


def permuted_bytes(a: Any, b: Any, selector: int) -> Any:
    """Four of the bytes of a (0 to 3) and b (4 to 7) by the digits of the selector, the lowest
    first."""
    return prmt(a, b, Int32(selector))


def build(
    epi: Any,
    a: Any,
    b: Any,
    d: Any,
    c: Any,
    arguments: dict[str, Any],
    config: Any,
    attributes: tuple[tuple[str, Any], ...] = (),
    **options: Any,
) -> Any:
    """Compile (or load from QuACK's cache) without launching; see ``launch``.

    a (M, K), b (K, N), d and c as the epilogue's form asks; only their metadata counts.
    ``attributes``: set on QuACK's mainloop before it is traced.
    ``options``: further keywords of QuACK's ``EpiMod.gemm``, such as ``add_to_output``.
    """
    return epi.gemm(
        a,
        b,
        d,
        c,
        epi_args=arguments,
        tile_M=config.tile_m,
        tile_N=config.tile_n,
        cluster_M=config.cluster_m,
        cluster_N=config.cluster_n,
        pingpong=config.pingpong,
        max_swizzle_size=config.max_swizzle,
        b_kn=True,
        _launch=False,
        post_init_attrs=(*(_NARROW if config.epi_n else ()), *attributes),
        **options,
    )


def narrow_epilogue_tile(cta_tile: Any, *rest: Any, **named: Any) -> tuple[int, int]:
    """QuACK's epilogue tile with 16 columns where it takes 32."""
    from quack.gemm_sm90 import GemmSm90

    rows, columns = GemmSm90._compute_tile_shape_or_override(cta_tile, *rest, **named)
    return rows, min(columns, 16)


# Set on the kernel's builder before it is traced, and part of QuACK's cache key by its name.
_NARROW = (("_compute_tile_shape_or_override", narrow_epilogue_tile),)


def launch(plan: Any, a: Any, b: Any, d: Any, c: Any, arguments: dict[str, Any]) -> None:
    """Run a plan on the current stream, on tensors with the dtypes and majors it was built for."""
    run_gemm_epi_plan(plan, a, b, d, c, arguments)


# ------------------------------------------------------------------- compiling without a GPU
def compile_without_gpu(cache: str) -> list[tuple[int, int, int]]:
    """Prepare this process to compile only, for the architecture in ``CUTE_DSL_ARCH``.

    QuACK asks the driver for launch metadata alone, which is answered here instead.

    Args:
        cache: folder of the object files.

    Returns:
        A list that grows with every compiled kernel: its A/B, store and load stages.
    """
    import os

    import quack.cache
    import quack.gemm_runtime.host as host
    from quack.cache.async_compile import _install_gpu_blind_device_attrs, _pin_dsl_arch
    from quack.gemm_sm90 import GemmSm90

    quack.cache.CACHE_DIR = cache
    _pin_dsl_arch(os.environ["CUTE_DSL_ARCH"])
    _install_gpu_blind_device_attrs()
    host.get_max_active_clusters = lambda clusters: 132 // clusters
    compute, seen = GemmSm90._compute_stages, []

    def watched(cls: Any, *args: Any, **named: Any) -> Any:
        found = compute.__func__(cls, *args, **named)
        seen.append(tuple(found))
        return found

    GemmSm90._compute_stages = classmethod(watched)
    return seen


def cache_folder() -> str:
    """Where QuACK keeps its object files."""
    from quack.cache import get_cache_path

    return str(get_cache_path())
