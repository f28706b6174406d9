"""Asking a language model behind an OpenAI-compatible endpoint, within a time limit.

Endpoint and key come from the environment. One request is tried several times, with growing pauses,
when the endpoint is busy, broken or slow; what cannot get better by itself (a wrong key, an unknown
model) fails at once. All of it together takes no longer than it was given.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import openai
from openai import AsyncOpenAI

from codetta.errors import EndpointFailed, NoEndpoint

Message = Mapping[str, str]
ATTEMPTS = 6
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_SHOWN = 300  # characters of what an endpoint says
_WAIT = "Try again later"
_FIXES = {
    401: "Check OPENAI_API_KEY",
    403: "Check OPENAI_API_KEY and what it may use",
    404: "Check --model and OPENAI_BASE_URL, which usually ends in /v1",
}


@dataclass(frozen=True)
class Endpoint:
    """Where models are, and the key, which is never shown."""

    url: str
    key: str = field(repr=False)

    @property
    def shown(self) -> str:
        """The URL without user, password and query."""
        parts = urlsplit(self.url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


@dataclass(frozen=True)
class Answer:
    """What a model said.

    Attributes:
        finish: why it ended, as the endpoint names it; "length" is the limit of tokens.
        model: as the endpoint names it.
        usage: tokens: "prompt", "completion", "total"; empty if the endpoint does not say.
        failures: what earlier attempts of this request ended with.
    """

    text: str
    finish: str
    model: str
    usage: Mapping[str, int]
    failures: tuple[str, ...] = ()


def endpoint(environ: Mapping[str, str] = os.environ) -> Endpoint:
    """The endpoint that ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` name.

    A server of one's own often needs no key, so the URL alone is enough.

    Raises:
        NoEndpoint: neither is set.
    """
    url, key = environ.get("OPENAI_BASE_URL", ""), environ.get("OPENAI_API_KEY", "")
    if not url and not key:
        raise NoEndpoint(given="neither OPENAI_API_KEY nor OPENAI_BASE_URL is set")
    return Endpoint(url or "https://api.openai.com/v1", key or "none")


@dataclass
class Model:
    """One model.

    Attributes:
        attempts: how often one request is tried.
        pause_s: before the second attempt; it doubles each time.
    """

    endpoint: Endpoint
    name: str
    attempts: int = ATTEMPTS
    pause_s: float = _FIRST_PAUSE_S

    def ask(
        self, messages: Sequence[Message], *, timeout_s: float, max_tokens: int | None = None
    ) -> Answer:
        """The model's answer to a conversation.

        Args:
            timeout_s: for all attempts together.
            max_tokens: the longest answer; the endpoint's limit by default.

        Raises:
            TimeoutError: there was none in time.
            EndpointFailed: there was none, and waiting would not help or has not.
        """
        return asyncio.run(self._ask(list(messages), timeout_s, max_tokens))

    async def _ask(
        self, messages: list[Message], timeout_s: float, max_tokens: int | None
    ) -> Answer:
        ends = time.monotonic() + timeout_s
        limit = {} if max_tokens is None else {"max_tokens": max_tokens}
        failures: list[str] = []
        client = AsyncOpenAI(
            base_url=self.endpoint.url, api_key=self.endpoint.key, max_retries=0, timeout=timeout_s
        )
        create: Any = client.chat.completions.create  # limits go by several names
        async with client:
            while True:
                request = create(model=self.name, messages=messages, **limit)
                try:
                    # The client's own timeout is per read: a server that drips would never end.
                    reply = await asyncio.wait_for(request, max(0.0, ends - time.monotonic()))
                    return _answer(reply, failures)
                except asyncio.TimeoutError:
                    raise TimeoutError(f"no answer within {timeout_s:.0f} s") from None
                except ValueError as error:  # what came is no JSON
                    reason = f"what it answers is no JSON ({error})"
                    raise self._failed(None, [*failures, reason]) from None
                except openai.APIError as error:
                    failures.append(_said(error))
                    if "max_tokens" in limit and "max_completion_tokens" in failures[-1]:
                        limit = {"max_completion_tokens": limit["max_tokens"]}
                        continue
                    if not _passes(error) or len(failures) >= self.attempts:
                        raise self._failed(error, failures) from error
                    await self._pause(error, len(failures), ends - time.monotonic())

    async def _pause(self, error: openai.APIError, tried: int, left_s: float) -> None:
        """Wait before the next attempt, as long as the endpoint asks for, if it does."""
        pause = self.pause_s * 2 ** (tried - 1) * random.uniform(0.75, 1.25)
        pause = min(_asked_pause(error) or pause, _LONGEST_PAUSE_S)
        if pause >= left_s:
            raise TimeoutError(f"no answer in time; the last attempt ended with {_said(error)}")
        await asyncio.sleep(pause)

    def _failed(self, error: openai.APIError | None, failures: list[str]) -> EndpointFailed:
        times = f" ({len(failures)} attempts)" if len(failures) > 1 else ""
        status = getattr(error, "status_code", None)
        fix = _FIXES.get(status or 0, "Check OPENAI_BASE_URL" if status is None else _WAIT)
        return EndpointFailed(
            url=self.endpoint.shown, model=self.name, reason=failures[-1] + times, fix=f"{fix}."
        )


def _passes(error: openai.APIError) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(error, openai.APIStatusError):
        return error.status_code in (408, 409, 429) or error.status_code >= 500
    return isinstance(error, openai.APIConnectionError)


def _asked_pause(error: openai.APIError) -> float:
    if not isinstance(error, openai.APIStatusError):
        return 0.0
    try:
        return max(0.0, float(error.response.headers.get("retry-after", "0")))
    except ValueError:  # a date
        return 0.0


def _said(error: openai.APIError) -> str:
    cause = f" ({error.__cause__})" if error.__cause__ else ""
    text = " ".join(f"{type(error).__name__}: {error}{cause}".split())
    return text[:_SHOWN].rstrip(". ")


def _answer(reply: Any, failures: list[str]) -> Answer:
    """Of a reply as endpoints send them; any part may be missing."""
    choices = getattr(reply, "choices", None)
    choices = choices if isinstance(choices, list) else []
    message = getattr(choices[0], "message", None) if choices else None
    text = getattr(message, "content", None)
    usage = getattr(reply, "usage", None)
    counts = {
        name: value
        for name in ("prompt", "completion", "total")
        if isinstance(value := getattr(usage, f"{name}_tokens", None), int)
    }
    return Answer(
        text=text.encode(errors="replace").decode() if isinstance(text, str) else "",
        finish=str((choices and getattr(choices[0], "finish_reason", None)) or ""),
        model=str(getattr(reply, "model", None) or ""),
        usage=counts,
        failures=tuple(failures),
    )
