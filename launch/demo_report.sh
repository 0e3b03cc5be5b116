#!/usr/bin/env bash
# Trains the demo anew in runs/demo_report and writes the report that the repository ships, reports/demo.
# Arguments are configuration overrides, as of run_demo.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
rm -rf runs/demo_report
bash launch/run_demo.sh run.name=demo_report eval.baseline_repeats=3 "$@"
mkdir -p reports/demo
cp runs/demo_report/report/{EXPERIMENT_REPORT.md,curves.png,report.html} reports/demo/
