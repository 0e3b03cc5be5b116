#!/usr/bin/env bash
# A systemd user instance in a /run of its own: start the unit, type the command again, kill the driver, stop the unit.
# systemd_run.sh SCRIPT HOME RUN_DIR CONFIG [OVERRIDE ...]
set -euo pipefail
script=$1 home=$2 run_dir=$3
shift 3
mount -t tmpfs none /run
export XDG_RUNTIME_DIR=/run/user/0 XDG_CONFIG_HOME=$home
unset DBUS_SESSION_BUS_ADDRESS
mkdir -p /run/systemd/system "$XDG_RUNTIME_DIR" "$home/systemd/user/colocate-grpo-demo.service.d"
chmod 700 "$XDG_RUNTIME_DIR"
# The unit waits 30 s before it brings a driver back; here a second is enough.
printf '[Service]\nRestartSec=1\n' >"$home/systemd/user/colocate-grpo-demo.service.d/test.conf"
/lib/systemd/systemd --user >"$home/systemd.log" 2>&1 &
systemd=$!
# Its units have been stopped by then; asked politely it waits for ever without a system instance above it.
trap 'kill -KILL $systemd' EXIT

within() { # within SECONDS COMMAND...: until the command is true
    local tries=$(($1 * 5))
    shift
    until "$@"; do
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || { echo "in vain: $*" >&2; systemctl --user status colocate-grpo-demo >&2 || true; exit 1; }
        sleep 0.2
    done
}
main_pid() { systemctl --user show -p MainPID --value colocate-grpo-demo; }
came_back() { [ "$(main_pid)" != 0 ] && [ "$(main_pid)" != "$killed" ]; }
has_saved() { ls "$run_dir"/checkpoints/step_* >/dev/null 2>&1; }
is_in_attempt_2() { grep -q '"attempt": 2' "$run_dir/state.json"; }

within 120 systemctl --user is-system-running -q
bash "$script" --systemd "$@"
bash "$script" --systemd "$@"
within 400 has_saved
killed=$(main_pid)
kill -9 "$killed"
within 200 came_back
within 400 is_in_attempt_2
systemctl --user stop colocate-grpo-demo
