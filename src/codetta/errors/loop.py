"""Language models as authors."""

from __future__ import annotations

from codetta.errors.base import CodettaError


class LoopError(CodettaError):
    """``codetta author`` has a language model write a program, and keeps a trace of it."""


class NoEndpoint(LoopError, RuntimeError):
    template = (
        "no language model can be asked: {given}. Set OPENAI_API_KEY, and OPENAI_BASE_URL where "
        "the endpoint is another than OpenAI's, such as http://localhost:8000/v1."
    )
    wrong = "from codetta.author.client import endpoint\nendpoint({})"
    right = (
        "from codetta.author.client import endpoint\n"
        "endpoint({'OPENAI_BASE_URL': 'http://localhost:8000/v1'})"
    )


class EndpointFailed(LoopError, RuntimeError):
    template = "{url} did not answer for model {model!r}: {reason}. {fix}"
    wrong = (
        "from codetta.author.client import Endpoint, Model\n"
        "nobody = Endpoint('http://127.0.0.1:9/v1', 'none')\n"
        "Model(nobody, 'some-model', attempts=1).ask([], timeout_s=5)"
    )
    right = ""


class TraceUnusable(LoopError, ValueError):
    template = "{path} {reason}. {fix}"
    wrong = "from codetta.author.trace import Trace\nTrace.resume('no/such/folder')"
    right = (
        "import tempfile\n"
        "from codetta.author.trace import Trace\n"
        "Trace.create(tempfile.mkdtemp() + '/run', {'task': 'bias_gelu_mask'})"
    )
