#!/usr/bin/env bash
# Installs the Debian packages whose tools are missing, and nothing where all are there.
set -euo pipefail

missing=()
need() { # TOOL PACKAGE
  PATH="$PATH:/usr/sbin:/sbin" command -v "$1" >/dev/null 2>&1 || missing+=("$2")
}
need g++ g++
need cc gcc
need git git
need ip iproute2
# Kafka's broker, and what brings its jars.
need java default-jre-headless
need mvn maven

[ ${#missing[@]} -eq 0 ] && exit 0

exec "$(dirname "$0")/install_packages.sh" "${missing[*]}" "${missing[@]}"
