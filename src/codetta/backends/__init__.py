"""Backends run Programs; each knows the language and the language knows none of them."""

from __future__ import annotations

from codetta.backends.select import backend_for, default_backend, use_backend

__all__ = ["backend_for", "default_backend", "use_backend"]
