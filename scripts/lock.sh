#!/usr/bin/env bash
# Makes the hash-pinned requirements/*.txt from requirements/*.in.
# usage: lock.sh PYTHON [--upgrade]
set -euo pipefail
python=$(realpath -s "$1")
shift
cd "$(dirname "$0")/../requirements"

# The locks hold for every machine: where this one finds its packages does not belong in them.
unset PIP_FIND_LINKS PIP_INDEX_URL PIP_EXTRA_INDEX_URL
for set in runtime dev thirdparty; do
  "$python" -m piptools compile --quiet --generate-hashes --allow-unsafe --strip-extras --no-header \
    --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
    --output-file "$set.txt" "$@" "$set.in"
done
