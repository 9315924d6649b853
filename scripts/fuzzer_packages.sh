#!/usr/bin/env bash
# Installs what `make bench ONLY=proxy.fuzz` needs, clang with libFuzzer, and nothing where it is there.
set -euo pipefail

for tool in clang++ clang++-{14..22}; do
  command -v "$tool" >/dev/null 2>&1 && exit 0
done
exec "$(dirname "$0")/install_packages.sh" "clang with libFuzzer" clang-14 libclang-rt-14-dev
