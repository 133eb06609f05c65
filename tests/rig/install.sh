#!/usr/bin/env bash
# Makes the virtual environment that the demo and the tests share: torch, the pinned packages,
# SGLang, the CPU shim, and this project (editable).
#
#   PYTHON=python3.11 VENV=.venv bash tests/rig/install.sh
#
# Idempotent: a stamp inside the environment holds a digest of everything that decides its content;
# it is written last, so a failed install leaves none. Where packages come from is pip's own setting.
# Any build of torch 2.13.0 will do; the one for the CPU is far smaller to fetch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${PYTHON:-python3.11}
venv=${VENV:-.venv}
rig=tests/rig
stamp=$venv/.rig-stamp

version_of() { "$1" -c 'import sys; print(sys.version)'; }

wanted=$(version_of "$python")
key=$({
  echo "$wanted"
  sha256sum "$rig"/install.sh "$rig"/requirements*.txt pyproject.toml
  sha256sum "$rig"/shim/*.py "$rig"/shim/pyproject.toml
} | sha256sum)
if [[ -f $stamp && $(<"$stamp") == "$key" ]]; then
  exit 0
fi

say() { printf 'venv: %s\n' "$*" >&2; }
install() { "$venv/bin/python" -m pip install -qq --disable-pip-version-check "$@"; }

if [[ ! -x $venv/bin/python || $(version_of "$venv/bin/python") != "$wanted" ]]; then
  say "making $venv with $python"
  "$python" -m venv --clear "$venv"
fi
rm -f "$stamp"

# First torch, alone and with its version fixed: whatever is installed later finds it there. The
# constraints keep its own dependencies at our pins.
say "torch"
install torch==2.13.0 --constraint "$rig/requirements.txt"

# No dependency resolution from here on. SGLang declares CUDA packages and another torch, which a
# CPU does without; the pins are closed, so nothing is missing.
say "pinned packages"
install --no-deps --requirement "$rig/requirements.txt" --requirement "$rig/requirements-dev.txt"
say "sglang"
install --no-deps sglang==0.5.23

# The shim is built from a copy, because pip leaves its build folder beside the source.
say "CPU shim"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$rig/shim" "$work/shim"
install --no-deps --no-build-isolation --force-reinstall "$work/shim"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo 'import sglang_cpu_stubs' >"$site/sglang_cpu_stubs.pth"

say "hidden-state-extractor"
install --no-deps --no-build-isolation --editable .

printf '%s\n' "$key" >"$stamp.new"
mv "$stamp.new" "$stamp"
say "ready"
