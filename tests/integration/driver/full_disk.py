"""A run on a disk of one MiB that is full when it starts, and again while it trains; takes the directory to work in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from driver_runs import Run

from colocate_grpo import processes


def fill(run: Run) -> Path:
    """A file that takes all the room there is."""
    (run.dir / "logs").mkdir(exist_ok=True)
    filler = run.dir / "logs" / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:  # it is full
            return filler


def no_room_at_the_start(run: Run) -> None:
    run.configure()
    filler = fill(run)
    assert run.finish() == 1
    last = run.output().splitlines()[-1]  # which the command line prints alone
    assert last == f"colocate_grpo.disk_full.DiskFull: {run.dir}: No space left on device", run.output()
    filler.unlink()


def no_room_while_it_trains(run: Run) -> None:
    said_before = len(run.output())
    run.configure({1: {"kind": "pause", "step": 3}}, run={"max_attempts": 20})
    driver = run.start()
    run.wait_for_step(3)
    filler = fill(run)
    (run.dir / "control" / "go_on").touch()
    run.wait_for(lambda: "attempt 1 ended (" in run.output(), what="the end of an attempt without room")
    assert driver.poll() is None, run.output()
    filler.unlink()
    assert run.finish(driver) == 0, run.output()
    assert run.outcomes()[-1] == "finished"
    said = run.output()[said_before:]
    assert "was not written: [Errno 28] No space left on device" in said, said
    assert "Traceback" not in said, said


def main() -> None:
    run = Run(Path(sys.argv[1]))
    run.dir.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "small", str(run.dir)], check=True)
    try:
        no_room_at_the_start(run)
        no_room_while_it_trains(run)
    finally:
        for driver in run.drivers:
            driver.kill()
            driver.wait()
        processes.end(processes.run_id(run.dir), 0)


if __name__ == "__main__":
    main()
