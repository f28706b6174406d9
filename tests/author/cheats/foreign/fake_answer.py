"""Writes an answer of its own into every descriptor that is open.

Caught by answer|process:
"""

import contextlib
import os


def run(a, b, bias, keep):
    for fd in range(3, 400):
        with contextlib.suppress(OSError):
            os.write(fd, b'{"inputs": {}, "sizes": [], "arrays": []}\n' * 2)
    os._exit(0)
