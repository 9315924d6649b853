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

if ! command -v apt-get >/dev/null 2>&1 || [ "$(id -u)" -ne 0 ]; then
  echo "These tools are missing: ${missing[*]}. Install them with the system's package manager, as root." >&2
  exit 1
fi
echo "Installing ${missing[*]} ..."
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq </dev/null >/dev/null
apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null >/dev/null
