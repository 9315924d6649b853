#!/usr/bin/env bash
# install_packages.sh WHAT PACKAGE...: installs Debian packages, or says in a sentence that WHAT is missing.
set -euo pipefail

what=$1
shift
if ! command -v apt-get >/dev/null 2>&1 || [ "$(id -u)" -ne 0 ]; then
  echo "Missing: $what. Install it with the system's package manager, as root." >&2
  exit 1
fi
echo "Installing $what ..."
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq </dev/null >/dev/null
apt-get install -y -qq --no-install-recommends "$@" </dev/null >/dev/null
