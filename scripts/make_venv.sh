#!/usr/bin/env bash
# Makes the virtual environment, or keeps the one that is there.
# usage: make_venv.sh PYTHON VENV
set -euo pipefail
python=$1 venv=$2

if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
  echo "Ergosphere needs Python 3.11 or 3.12, but '$python' is $("$python" -V 2>/dev/null | grep . || echo not there)." \
    "Name another one: make PYTHON=python3.11 ..." >&2
  exit 1
fi
# A half-made environment has no working pip; it is made again on top of itself.
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  echo "Making the virtual environment in $venv ..."
  if ! "$python" -m venv "$venv"; then
    echo "'$python -m venv' failed. On Debian, install python3-venv and try again." >&2
    exit 1
  fi
fi
