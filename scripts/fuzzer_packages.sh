#!/usr/bin/env bash
# Installs what `make bench ONLY=proxy.fuzz` needs, clang with libFuzzer, and nothing where it is there.
set -euo pipefail

for tool in clang++ clang++-{14..22}; do
  command -v "$tool" >/dev/null 2>&1 && exit 0
done
if ! command -v apt-get >/dev/null 2>&1 || [ "$(id -u)" -ne 0 ]; then
  echo "clang with libFuzzer is missing. Install it with the system's package manager, as root." >&2
  exit 1
fi
echo "Installing clang ..."
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq </dev/null >/dev/null
apt-get install -y -qq --no-install-recommends clang-14 libclang-rt-14-dev </dev/null >/dev/null
