#!/usr/bin/env bash
# Make .venv with torch, this package (editable), and what tests, demo and docs need. Idempotent: a stamp
# holds a hash of everything the result depends on, so a second run takes no time.
#
#   tools/setup_venv.sh           what all commands need
#   tools/setup_venv.sh kernels   and the compiler of the fused backend's kernels: 0.4 GB to download
#                                 and 1.5 GB on disk, which only the tests use where there is no GPU
#
#   PYTHON   interpreter that makes the venv          (python3)
#   TORCH    torch version                            (2.13.0)
#   EXTRAS   extras of this package to install        (author,demo,dev,docs; cuda where there is a GPU)
#
# torch: with an NVIDIA GPU, the build that pip finds by default; without one, the CPU build, because the
# default Linux build brings gigabytes of CUDA libraries that nothing here would use.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
TORCH=${TORCH:-2.13.0}
CPU_INDEX=https://download.pytorch.org/whl/cpu

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }
say() { printf 'venv: %s\n' "$*"; }
pip() { .venv/bin/python -m pip -qq --disable-pip-version-check --no-input "$@"; }

if has_gpu; then device=cuda; else device=cpu; fi
if [ "$device" = cuda ]; then EXTRAS=${EXTRAS:-author,demo,dev,docs,cuda}; else EXTRAS=${EXTRAS:-author,demo,dev,docs}; fi

# The path is part of the key: a venv copied along with its checkout would still import the old one.
key() {
  { printf '%s\n' "$PWD" "$TORCH" "$EXTRAS" "$device" "$("$PYTHON" -VV)"
    cat pyproject.toml src/codetta/_version.py tools/setup_venv.sh
  } | cksum
}

stamp=.venv/.setup-stamp
want=$(key)
is_current() { [ -f "$1" ] && [ "$(cat "$1")" = "$want" ]; }

# Compiling needs no GPU, but there are wheels for Linux x86-64 alone. Elsewhere, and where they cannot
# be had, the tests that compile are skipped and say why; the next run asks for them again.
setup_kernels() {
  [ "$device" = cpu ] && [ "$(uname -sm)" = "Linux x86_64" ] || return 0
  local stamp=.venv/.kernels-stamp
  is_current "$stamp" && return 0
  say "codetta[cuda], to compile kernels (half a minute)"
  if pip install --retries 1 --timeout 30 --editable '.[cuda]'; then
    printf '%s\n' "$want" >"$stamp"
  else
    say "no compiler for kernels; the tests that compile them will be skipped" >&2
  fi
}

setup_base() {
  is_current "$stamp" && return 0

  if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    say "needs Python 3.10 or newer, $PYTHON is $("$PYTHON" -V 2>&1); set PYTHON=..." >&2
    return 1
  fi

  say "$("$PYTHON" -V 2>&1) in .venv"
  if ! "$PYTHON" -m venv .venv; then
    say "could not make .venv (Debian and Ubuntu: apt install python3-venv)" >&2
    return 1
  fi
  rm -f "$stamp"

  if [ "$device" = cuda ]; then
    say "torch $TORCH for the GPU"
    pip install "torch==$TORCH"
  else
    say "torch $TORCH, CPU build"
    if ! pip install --no-deps --retries 0 --timeout 15 --index-url "$CPU_INDEX" "torch==$TORCH" \
      2>/dev/null; then
      say "not from $CPU_INDEX; asking the default index (its Linux build is large)"
      pip install "torch==$TORCH"
    fi
  fi

  say "codetta[$EXTRAS] (a minute or two)"
  pip install --editable ".[$EXTRAS]"
  printf '%s\n' "$want" >"$stamp"
  say "ready"
}

setup_base
if [ "${1:-}" = kernels ]; then setup_kernels; fi
