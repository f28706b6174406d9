"""A script: execute a foreign file and call its ``run(a, b, **operands)`` as the parent asks.

Run by :mod:`codetta.author.sandbox` as ``python -I run_file.py PATH``, with the file's source on
stdin; requests and answers, a JSON line each followed by raw bytes, pass through two descriptors.
The process knows its inputs and nothing of what is expected. All that it uses of torch and time is
bound to local names before the file is executed; what it reports about itself is believed only
where the parent cannot see better.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any


def main() -> None:
    sys.path.insert(0, os.environ["CODETTA_ROOT"])
    asks, answers = (int(x) for x in os.environ["CODETTA_PIPES"].split(","))
    device = os.environ["CODETTA_DEVICE"]
    import torch

    from codetta.author import guard

    path, source = sys.argv[1], sys.stdin.buffer.read()
    ask, answer = os.fdopen(asks, "rb"), os.fdopen(answers, "wb")
    serve = server(torch, guard, ask, answer, device)
    guard.enter(int(os.environ["CODETTA_CPU_S"]), gpu=device != "cpu")
    for name in [n for n in os.environ if n.startswith("CODETTA_")]:
        del os.environ[name]
    sys.argv = [path]
    module = ModuleType("foreign")
    module.__file__ = path
    sys.modules["foreign"] = module
    serve(lambda: _run_of(path, source, module))
    os._exit(0)


def _run_of(path: str, source: bytes, module: ModuleType) -> Callable[..., Any]:
    exec(compile(source, path, "exec"), module.__dict__)
    run = module.__dict__.get("run")
    if not callable(run):
        raise TypeError("the file defines no function run(a, b, **operands)")
    return run


def server(torch: Any, guard: Any, ask: Any, answer: Any, device: str) -> Callable[..., None]:
    """The loop over requests, with everything it needs bound before the file runs."""
    clock, dumps, loads, threads = time.perf_counter_ns, json.dumps, json.loads, threading.enumerate
    tensor, sleep, sha = torch.Tensor, time.sleep, hashlib.sha256
    sync = torch.cuda.synchronize if device != "cpu" else lambda: None
    event = torch.cuda.Event
    spied = _spy(torch)
    held: list[Any] = []  # outputs of earlier calls: their memory must not come back
    buffers: dict[str, Any] = {}

    def say(message: dict[str, Any], *payload: bytes) -> None:
        answer.write(dumps(message | {"sizes": [len(p) for p in payload]}).encode() + b"\n")
        for p in payload:
            answer.write(p)
        answer.flush()

    def raw(t: Any) -> bytes:
        flat = t.detach().contiguous().reshape(-1).view(torch.uint8)
        return bytes(flat.cpu().numpy().tobytes())

    def array(spec: dict[str, Any], data: bytes, reuse: bool) -> Any:
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
        made = flat.view(getattr(torch, spec["dtype"])).reshape(spec["shape"])
        name = spec["name"]
        if reuse and name in buffers:
            with torch.no_grad():
                buffers[name].copy_(made)
        else:
            buffers[name] = made.to(device, copy=True)
        return buffers[name]

    def poison(sizes: list[int]) -> None:
        blocks = [torch.full((s // 4 + 1,), float("nan"), device=device) for s in sizes * 3]
        exact = [torch.full((s,), 0xFF, dtype=torch.uint8, device=device) for s in sizes * 3]
        del blocks, exact

    def call(run: Callable[..., Any], request: dict[str, Any], data: list[bytes]) -> None:
        arrays = {
            s["name"]: array(s, d, request["reuse"])
            for s, d in zip(request["arrays"], data, strict=False)
        }
        ups = [arrays.pop(s["name"]) for s in request["arrays"] if s["role"] == "upstream"]
        given = {n: t.detach() for n, t in arrays.items()}
        for name in request["wanted"]:
            given[name].requires_grad_()
        operands: dict[str, Any] = {}
        for name, t in given.items():
            base, _, part = name.partition("[")
            operands[base] = (*operands.get(base, ()), t) if part else t
        a, b = operands.pop("a"), operands.pop("b")
        poison(request["bytes"])
        versions = {n: t._version for n, t in given.items()}
        before = len(threads())
        say({"ready": True})
        ask.readline()
        found, ns, used = timed(lambda: run(a, b, **operands), request["spy"])
        say({"done": True, "ns": ns})
        running = len(threads()) > before
        outputs = named(found, request["outputs"])
        problem = checked(outputs, given)
        now = [raw(t) for t in outputs.values()] if not problem else []
        grads = [] if problem or not ups else differentiated(outputs, ups, given, request["wanted"])
        sleep(request["pause"])
        sync()
        if not problem and any(raw(t) != n for t, n in zip(outputs.values(), now, strict=True)):
            problem = "late: the outputs changed after the call had returned"
        if running or len(threads()) > before:
            problem = problem or "threads: the call left a thread running"
        changed = [n for n, t in given.items() if t._version != versions[n]]
        digests = {n: sha(raw(t)).hexdigest() for n, t in given.items()}
        held.append([t.detach() for t in outputs.values()] if not problem else None)
        del held[:-3]
        facts = {
            "problem": problem, "used": used, "written": changed, "inputs": digests,
            "refused": list(guard.refused), "grads": len(grads),
            "arrays": [spec(t) for t in outputs.values()] if not problem else [],
        }  # fmt: skip
        say(facts, *now, *[raw(g) for g in grads])

    def timed(run: Callable[[], Any], spy: bool) -> tuple[Any, int, list[str]]:
        if spy:
            with spied() as seen:
                found = run()
            return found, 0, sorted(seen.names)
        if device != "cpu":
            torch.empty(1 << 28, dtype=torch.uint8, device=device).zero_()  # out of the L2 cache
            start, end = event(enable_timing=True), event(enable_timing=True)
            sync()
            begun = clock()
            start.record()
            found = run()
            end.record()
            sync()
            ns, on_stream = clock() - begun, int(start.elapsed_time(end) * 1e6)
            # Launching takes some time of its own; more than that is work on another stream.
            return found, ns if ns > 1.2 * on_stream + 2e5 else on_stream, []
        begun = clock()
        found = run()
        return found, clock() - begun, []

    def named(found: Any, names: list[str]) -> dict[str, Any]:
        if isinstance(found, dict):
            return {n: found.get(n) for n in names}
        parts = found if isinstance(found, tuple | list) else (found,)
        return dict(zip(names, parts, strict=False)) if len(parts) == len(names) else {}

    def checked(outputs: dict[str, Any], given: dict[str, Any]) -> str:
        if not outputs:
            return "outputs: run returns not as many tensors as the task has outputs"
        taken = {t.untyped_storage().data_ptr(): f"its input {n}" for n, t in given.items()}
        old = [t for call in held if call for t in call]
        taken |= {t.untyped_storage().data_ptr(): "an output of an earlier call" for t in old}
        for name, t in outputs.items():
            if type(t) is not tensor:
                return f"type: {name} is a {type(t).__name__}, no torch.Tensor"
            if t.layout is not torch.strided or t.device.type != device:
                return f"type: {name} is {t.layout} on {t.device}"
            if t.numel() and t.untyped_storage().nbytes() < t.element_size():
                return f"type: {name} has no memory"
            pointer = t.untyped_storage().data_ptr()
            if t.numel() and pointer in taken:
                return f"aliasing: {name} shares memory with {taken[pointer]}"
            taken[pointer] = f"the output {name}"
        return ""

    def differentiated(outputs: Any, ups: list[Any], given: Any, wanted: list[str]) -> list[Any]:
        pairs = [(t, u) for t, u in zip(outputs.values(), ups, strict=True) if t.requires_grad]
        if not pairs:
            return []
        made = torch.autograd.grad(
            [t for t, _ in pairs], [given[n] for n in wanted], [u for _, u in pairs],
            allow_unused=True,
        )  # fmt: skip
        return [
            torch.zeros_like(given[n]) if g is None else g
            for n, g in zip(wanted, made, strict=True)
        ]

    def spec(t: Any) -> dict[str, Any]:
        return {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)}

    def serve(load: Callable[[], Callable[..., Any]]) -> None:
        try:
            run = load()
        except BaseException as error:
            say({"raised": f"{type(error).__name__}: {str(error)[:500]}"})
            return
        say({"loaded": True})
        while line := ask.readline():
            request = loads(line)
            data = [ask.read(s) for s in request["sizes"]]
            try:
                call(run, request, data)
            except BaseException as error:
                say({"raised": f"{type(error).__name__}: {str(error)[:500]}"})

    return serve


def _spy(torch: Any) -> Callable[[], Any]:
    """A context that records the names of the aten operators called in it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Spy(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: set[str] = set()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            self.names.add(str(func._schema.name))
            return func(*args, **(kwargs or {}))

    return Spy


if __name__ == "__main__":
    main()
