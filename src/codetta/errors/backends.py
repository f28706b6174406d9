"""Where a call runs: ranks, backends, and the limits of the kernels."""

from __future__ import annotations

from codetta.errors.call import CallError


class BadProcessGroup(CallError, ValueError):
    template = "process_group= cannot be used: {reason}. {fix}, or leave process_group out."
    wrong = (
        "target = torch.zeros(5, dtype=torch.int64)\n"
        "codetta.linear_cross_entropy(a, b.t(), target, process_group='model')"
    )
    right = (
        "target = torch.zeros(5, dtype=torch.int64)\ncodetta.linear_cross_entropy(a, b.t(), target)"
    )


class UnknownBackend(CallError, ValueError):
    template = "there is no backend {given!r}; choose one of {allowed}."
    wrong = "codetta.use_backend('tpu')"
    right = "with codetta.use_backend('reference'):\n    codetta.gemm(a, b)"


class BackendUnavailable(CallError, RuntimeError):
    template = "backend {given!r} cannot run here: {reason}. {fix}"
    wrong = "with codetta.use_backend('cuda'):\n    codetta.gemm(a, b)"
    right = "with codetta.use_backend('auto'):\n    codetta.gemm(a, b)"


class ColdCapture(CallError, RuntimeError):
    template = (
        "a kernel of program {program!r} is not compiled yet, and a CUDA graph is being captured, "
        "which compiling would break. Run the step once with the same inputs before the capture."
    )
    wrong = ""
    right = ""


class NothingToTune(CallError, ValueError):
    template = (
        "{what!r} was run once to see what it launches, and no fused GEMM kernel was among it. "
        "Tune a call on bf16 or fp16 CUDA tensors that runs on the fused backend, or a Program."
    )
    wrong = ""
    right = ""


class TooLarge(CallError, ValueError):
    template = (
        "program {program!r} was called with {given}; the fused kernels count rows and columns in "
        "32 bits, 2147418112 at most. Cut the rows (or the weight) into several calls, or use the "
        "reference backend."
    )
    wrong = ""
    right = ""
