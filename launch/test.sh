#!/usr/bin/env bash
# Installs everything and runs the whole test suite. Arguments go to pytest: bash launch/test.sh tests/unit -k store
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" "sglang,dev,bench"
ruff check .
ruff format --check .
mypy colocate_grpo
exec python -m pytest "$@"
