"""The author tools over the Model Context Protocol, for coding agents.

Every tool answers twice: as text, what the command prints, and as structured content, what it gives
with ``--json``. A candidate comes as source text, or as the path of a file on this machine. Either
way it is executed as by the commands, in a process of its own; and since a task file is executed
right here, only the library's tasks and those the server was started with are to be had.

Long work is done in a thread, one piece at a time (two would disturb each other's times), with
progress for the client, and ends when the client cancels it.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
import anyio.from_thread
import anyio.to_thread
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, TextContent, ToolAnnotations
from pydantic import BaseModel, Field

from codetta._version import __version__
from codetta.author import documents
from codetta.author.bench import bench_candidate
from codetta.author.check import check_candidate
from codetta.author.profile import profile_candidate
from codetta.author.promotion import promotion
from codetta.author.prompt import report_text
from codetta.author.report import Report
from codetta.author.skeleton import skeleton
from codetta.author.task import Task, find, names
from codetta.author.verify import verify_candidate
from codetta.errors import CodettaError

_INSTRUCTIONS = """\
Write epilogues: short Python functions that are fused into a matrix product. Read `language` \
once. Then `list_tasks`, `task` for one of them (with a file to complete), `check` your file \
(seconds), `verify` it (against the task's formula in fp64), `bench` and `profile` it. A report \
names the stage that failed, the first wrong element and what to do. `errors` explains an error \
by its name, `programs` shows ready programs. `promote` records a program that passes verification.
"""

_READS = ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)
_APPENDS = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=False)
_LONGEST_SOURCE = 1 << 20

Source = Annotated[str, Field(description="The whole candidate file. Or give `path`.")]
PathOf = Annotated[str, Field(description="Of the candidate file here. Or give `source`.")]
TaskName = Annotated[str, Field(description="Name of the task it is to solve.")]
Seed = Annotated[int | None, Field(description="Of all data; random by default, and reported.")]
Reported = Annotated[CallToolResult, Report]


def server(task_files: Sequence[str | Path] = ()) -> MCPServer[Any]:
    """The server, not yet running.

    Args:
        task_files: tasks of one's own to serve beside the library's.

    Raises:
        UnknownTask: one of them is none.
    """
    app: MCPServer[Any] = MCPServer(
        "codetta", title="CODA author tools", version=__version__, instructions=_INSTRUCTIONS,
        log_level="WARNING",
    )  # fmt: skip
    tasks = {name: name for name in names()}
    tasks |= {find(str(p)).name: str(p) for p in task_files}
    _documents(app, tasks)
    _commands(app, Desk(tasks))
    return app


# ------------------------------------------------------------------------------- to read
class TaskLine(BaseModel):
    """One task of the list."""

    name: str
    title: str
    level: Literal["easy", "medium", "hard"]


class TaskText(TaskLine):
    """A task in full; ``skeleton`` is a file to complete, ``near`` the source of ready programs."""

    formula: str
    skeleton: str
    near: dict[str, str]
    gradient: bool
    correctness: list[str]
    benchmark: list[str]


def _documents(app: MCPServer[Any], tasks: dict[str, str]) -> None:
    """Tools that only say what is written somewhere."""

    def asked(name: str) -> Task:
        return find(known(name, tasks))

    @app.tool(annotations=_READS)
    def list_tasks() -> list[TaskLine]:
        """All tasks, from easy to hard."""
        found = [find(given) for given in tasks.values()]
        return [TaskLine(name=t.name, title=t.title, level=t.level) for t in found]

    @app.tool(annotations=_READS)
    def task(name: TaskName) -> TaskText:
        """One task: formula, operands, outputs, a file to complete, and programs near it."""
        with told():
            t = asked(name)
        return TaskText(
            name=t.name, title=t.title, level=t.level, formula=t.formula, skeleton=skeleton(t),
            near=documents.near(t), gradient=t.gradient,
            correctness=[str(w) for w in t.correctness], benchmark=[str(w) for w in t.benchmark],
        )  # fmt: skip

    @app.tool(annotations=_APPENDS, structured_output=False)
    def new(
        name: TaskName,
        path: Annotated[str, Field(description="File to write here; none by default.")] = "",
    ) -> str:
        """A file to start from for a task. With `path` it is also written, if nothing is there."""
        with told():
            text = skeleton(asked(name), file=path or "FILE")
        if path:
            try:
                with Path(path).open("x", encoding="utf-8") as file:
                    file.write(text)
            except OSError as error:
                raise ToolError(f"{path} cannot be written: {error.strerror}") from None
        return text

    @app.tool(annotations=_READS)
    def programs(
        name: Annotated[str, Field(description="Of one program; all are listed by default.")] = "",
    ) -> dict[str, dict[str, str]]:
        """The ready programs by name, with their formulas; or one with its source and text."""
        with told():
            return documents.program(name) if name else documents.all_programs()

    @app.tool(annotations=_READS, structured_output=False)
    def language(
        section: Annotated[
            str, Field(description="Of the guide; what writing needs if empty.")
        ] = "",
    ) -> str:
        """The language on one page, recipes, and worked programs."""
        with told():
            return documents.page(section)

    @app.tool(annotations=_READS)
    def errors(
        name: Annotated[str, Field(description="Of an error, such as WidthMismatch.")] = "",
    ) -> dict[str, dict[str, str]]:
        """The errors by name with their messages; or one, with a wrong and a right example."""
        with told():
            return documents.error(name) if name else documents.all_errors()


# ------------------------------------------------------------------------------ to judge
class Desk:
    """Where candidates are judged, one at a time."""

    def __init__(self, tasks: dict[str, str]) -> None:
        self.tasks = tasks
        self.folder = tempfile.TemporaryDirectory(prefix="codetta-mcp-")
        self.limiter: anyio.CapacityLimiter | None = None

    def file(self, source: str, path: str) -> Path:
        """The candidate's file."""
        if bool(source) == bool(path):
            raise ToolError("give either `source`, the text of the file, or `path`, where it is")
        if path:
            return Path(path)
        data = source.encode("utf-8", errors="replace")
        if len(data) > _LONGEST_SOURCE:
            raise ToolError(f"the source has {len(data)} bytes, and {_LONGEST_SOURCE} is the limit")
        file = Path(self.folder.name, f"{hashlib.sha256(data).hexdigest()[:16]}.py")
        file.write_bytes(data)
        return file

    async def judge(
        self, ctx: Context[Any], task: str, work: Callable[[str, Callable[[str], None]], Report]
    ) -> CallToolResult:
        """Do ``work`` (task, progress) in a thread; its report as text and as data."""
        with told():
            name = known(task, self.tasks)
        if self.limiter is None:  # needs a running event loop
            self.limiter = anyio.CapacityLimiter(1)
        steps = 0

        def progress(text: str) -> None:
            nonlocal steps
            steps += 1
            anyio.from_thread.check_cancelled()
            anyio.from_thread.run(ctx.report_progress, steps, None, text)

        def report() -> Report:
            with told():
                return work(name, progress)

        return said(await anyio.to_thread.run_sync(report, limiter=self.limiter))


def _commands(app: MCPServer[Any], desk: Desk) -> None:
    """Tools that judge a candidate."""

    @app.tool(annotations=_READS)
    async def check(
        ctx: Context[Any], task: TaskName, source: Source = "", path: PathOf = "",
        compile: Annotated[bool, Field(description="Also compile for sm_90a.")] = False,
    ) -> Reported:  # fmt: skip
        """What is wrong with a file before anything runs: trace, contract, cost, lowering."""
        file = desk.file(source, path)
        return await desk.judge(
            ctx, task, lambda t, p: check_candidate(file, t, compile=compile, progress=p)
        )

    @app.tool(annotations=_READS)
    async def verify(
        ctx: Context[Any], task: TaskName, source: Source = "", path: PathOf = "",
        seed: Seed = None,
        case: Annotated[str, Field(description="Repeat this case of `seed` alone.")] = "",
        quick: Annotated[bool, Field(description="A third of the fuzzed cases.")] = False,
    ) -> Reported:  # fmt: skip
        """Run a file against its task in fp64: fuzzed sizes, special values, gradients."""
        file = desk.file(source, path)
        return await desk.judge(
            ctx, task,
            lambda t, p: verify_candidate(
                file, t, seed=seed, case=case or None, quick=quick, progress=p
            ),
        )  # fmt: skip

    @app.tool(annotations=_READS)
    async def bench(
        ctx: Context[Any], task: TaskName, source: Source = "", path: PathOf = "",
        seed: Seed = None,
    ) -> Reported:  # fmt: skip
        """Time a verified file against the plain product, eager and torch.compile.

        Without a GPU its times are estimated, and the report says so.
        """
        file = desk.file(source, path)
        return await desk.judge(
            ctx, task, lambda t, p: bench_candidate(file, t, seed=seed, progress=p)
        )

    @app.tool(annotations=_READS)
    async def profile(
        ctx: Context[Any], task: TaskName, source: Source = "", path: PathOf = "",
        compile: Annotated[bool, Field(description="Also compile, to see spills.")] = False,
    ) -> Reported:  # fmt: skip
        """What limits a file's kernel, and what to change."""
        file = desk.file(source, path)
        return await desk.judge(
            ctx, task, lambda t, p: profile_candidate(file, t, compile_kernel=compile, progress=p)
        )

    @app.tool(annotations=_APPENDS)
    async def promote(
        ctx: Context[Any], task: TaskName, source: Source = "", path: PathOf = "",
        seed: Seed = None,
    ) -> Reported:  # fmt: skip
        """Verify a file in full, time it, and record it in the registry if it passed."""
        file = desk.file(source, path)
        return await desk.judge(
            ctx, task, lambda t, p: promotion(file, t, seed=seed, progress=p)[0]
        )


def said(report: Report) -> CallToolResult:
    """A report as text and as data. One that failed is an answer, not an error of the tool."""
    return CallToolResult(
        content=[TextContent(type="text", text=report_text(report))],
        structured_content=json.loads(report.model_dump_json()),
    )


def known(task: str, tasks: dict[str, str]) -> str:
    """The task as :func:`find` knows it; only a name that is served."""
    if task in tasks:
        return tasks[task]
    close = get_close_matches(task, tasks, n=3)
    hint = f"did you mean {', '.join(close)}?" if close else "list_tasks lists them."
    raise ToolError(f"there is no task {task[:100]!r}; {hint}")


@contextmanager
def told() -> Iterator[None]:
    """A refusal is told to the client; anything else is a bug of ours, and only logged here."""
    try:
        yield
    except (CodettaError, documents.NotThere) as error:
        raise ToolError(str(error)) from None
