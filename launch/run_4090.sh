#!/usr/bin/env bash
# Checks the machine, plans the memory, and starts or resumes a run of many days in tmux. Typing it again is safe.
#
#   bash launch/run_4090.sh [--systemd] [CONFIG] [section.key=value ...]
#
# Without CONFIG: configs/*_Nx4090.yaml or *_Nx24g.yaml for the N cards of this machine. `--systemd` installs a user unit instead of
# tmux, which also comes back after a reboot. COLOCATE_BIN names a directory with an installed colocate-grpo to use
# instead of .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() { printf 'error: %s\n' "$*" >&2; exit 2; }

# Two of these at once: the second one waits (the first may be installing), and then sees what the first one started.
exec {lock}<launch/run_4090.sh
flock --timeout 3600 "$lock" || die "another launch/run_4090.sh has been at work for an hour; end it first"

choose_config() {
    local cards found
    cards=$( (nvidia-smi -L 2>/dev/null || true) | grep -c '^GPU ' || true)
    [ "$cards" -gt 0 ] || cards=8 # without a GPU, show what doctor and plan say of the reference box
    found=$( (ls configs/*_"${cards}"x{4090,24g}.yaml 2>/dev/null || true) | head -n 1)
    [ -n "$found" ] || die "no configuration of ${cards} cards in configs/ for the $cards cards of this machine; name one of: $(ls configs/*.yaml | tr '\n' ' ')"
    echo "$found"
}

# What doctor found, one line a check; its exit code; and the variables it asks the run to set, for `launch`.
check_machine() {
    local found=$1 code=0
    colocate-grpo doctor "$config" "${overrides[@]}" --json >"$found" || code=$?
    [ -s "$found" ] || exit "$code" # the configuration itself is wrong: the error line is above
    python - "$found" <<'PY'
import json, sys
for c in json.load(open(sys.argv[1]))["checks"]:
    mend = f" -> {c['how_to_mend']}" if c["how_to_mend"] else ""
    print(f"{c['level']:4} {c['check']:16} {c['what']}{mend}")
PY
    [ "$code" -eq 0 ] || { echo "error: doctor found what keeps this run from working; see the lines that begin with fail" >&2; exit "$code"; }
}

doctor_environment() {
    python - "$1" <<'PY'
import json, shlex, sys
print(" ".join(f"{k}={shlex.quote(v)}" for k, v in json.load(open(sys.argv[1]))["environment"].items()))
PY
}

# A tmux or systemd server was started elsewhere: what this shell says about cards and hubs has to go along.
own_environment() {
    local name
    for name in $(compgen -e | grep -E '^(CUDA_|NCCL_|HF_|MODELSCOPE_|COLOCATE_|XDG_CACHE_HOME$|PATH$|LD_LIBRARY_PATH$|HTTPS?_PROXY$|https?_proxy$|SSL_CERT_FILE$)'); do
        printf '%s=%q ' "$name" "${!name}"
    done
}

# The driver holds this lock as long as it lives.
is_running() { [ -e "$run_dir/lock" ] && ! flock --nonblock --shared "$run_dir/lock" true; }

say_how_to_look() {
    if tmux has-session -t "=$session" 2>/dev/null; then
        echo "attach:  tmux attach -t $session     (leave again with Ctrl-b d)"
    elif systemctl --user is-active -q "$unit" 2>/dev/null; then
        echo "follow:  journalctl --user -fu $unit"
    fi
    echo "look:    $(command -v colocate-grpo) status $run_dir"
    echo "stop:    $(command -v colocate-grpo) stop $run_dir"
}

pane_is_alive() { [ "$(tmux display-message -p -t "=$session:train" '#{pane_dead}' 2>/dev/null)" = 0 ]; }

start_in_tmux() {
    local command
    command="cd $(printf %q "$PWD") && exec env $(own_environment)$(doctor_environment "$found") $(train_command)"
    tmux has-session -t "=$session" 2>/dev/null || tmux new-session -d -s "$session" -n train {lock}<&-
    # The window stays after the end, so that the last words can be read.
    tmux set-option -w -t "=$session:train" remain-on-exit on
    tmux respawn-window -k -t "=$session:train" "$command"
}

start_in_systemd() {
    local units=${XDG_CONFIG_HOME:-$HOME/.config}/systemd/user
    mkdir -p "$units"
    write_unit >"$units/$unit"
    systemctl --user daemon-reload
    systemctl --user enable -q "$unit"
    systemctl --user restart "$unit"
}

write_unit() {
    local environment
    environment=$(own_environment)$(doctor_environment "$found")
    sed -e "s|@DIRECTORY@|$PWD|" -e "s|@NAME@|$name|" -e "s|@ENVIRONMENT@|${environment//|/\\|}|" \
        -e "s|@COMMAND@|$(train_command | sed 's/[&|\\]/\\&/g')|" launch/colocate-grpo.service
}

train_command() { printf '%q ' "$(command -v colocate-grpo)" train "$config" "${overrides[@]}"; }

# A driver that has just been stopped needs a moment to go, one that was just started a moment to hold the run.
wait_for_pane() {
    local tries=50
    while pane_is_alive && [ "$tries" -gt 0 ]; do
        tries=$((tries - 1))
        sleep 0.2
    done
}

wait_until_running() {
    local tries=1200
    until is_running; do
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || break
        if [ "$how" = tmux ] && ! pane_is_alive; then break; fi
        if [ "$how" = systemd ] && ! systemctl --user is-active -q "$unit"; then break; fi
        sleep 0.5
    done
    is_running || {
        [ "$how" = tmux ] && tmux capture-pane -p -t "=$session:train" | sed '/^$/d' >&2
        [ "$how" = systemd ] && journalctl --user -n 20 -u "$unit" >&2
        die "the run did not start, or has ended already; its last words are above, its log is in $run_dir/logs"
    }
}

how=tmux
[ "${1:-}" = --systemd ] && { how=systemd; shift; }
config=
case "${1:-}" in "" | *=*) ;; *) config=$1; shift ;; esac
overrides=("$@")

if [ -n "${COLOCATE_BIN:-}" ]; then PATH=$COLOCATE_BIN:$PATH; else source launch/setup.sh sglang; fi
[ -n "$config" ] || { config=$(choose_config); echo "configuration: $config"; }
resolved=$(colocate-grpo config show "$config" "${overrides[@]}")
read -r name run_dir < <(python -c '
import sys, yaml
run = yaml.safe_load(sys.stdin)["run"]
print(run["name"], run["dir"] or "runs/" + run["name"])' <<<"$resolved")
session=colocate-${name//[.:]/-}
unit=colocate-grpo-$name.service

[ "$how" = systemd ] || command -v tmux >/dev/null || die "tmux is missing: apt-get install tmux (or use --systemd)"
if [ "$how" = tmux ] && ! is_running; then wait_for_pane; fi
if is_running; then
    echo "$run_dir is already running"
    say_how_to_look
    exit 0
elif [ "$how" = tmux ] && pane_is_alive; then
    echo "$run_dir is starting"
    say_how_to_look
    exit 0
fi

found=$(mktemp)
trap 'rm -f "$found"' EXIT
check_machine "$found"
colocate-grpo plan "$config" "${overrides[@]}" || die "plan says that this does not fit; see above for what would"
[ -e "$run_dir/config.yaml" ] && word=resumed || word=started
"start_in_$how"
wait_until_running
echo "$run_dir $word in $how"
say_how_to_look
