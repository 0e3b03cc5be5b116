#!/usr/bin/env bash
# Trains a tiny real language model with GRPO on CPU and writes its report. Arguments are configuration overrides:
#   bash launch/run_demo.sh parallel.tp=2 run.dir=runs/demo_tp2
#   bash launch/run_demo.sh rollout.engine=sglang
set -euo pipefail
case " $* " in *rollout.engine=sglang*) extras=sglang ;; *) extras= ;; esac
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" "$extras"

resolved=$(colocate-grpo config show configs/demo.yaml "$@")
run_dir=$(python -c '
import sys, yaml
run = yaml.safe_load(sys.stdin)["run"]
print(run["dir"] or "runs/" + run["name"])' <<<"$resolved")
[ -e runs/demo_model/model/config.json ] || colocate-grpo demo-model runs/demo_model
colocate-grpo train configs/demo.yaml "$@"
colocate-grpo report "$run_dir"
