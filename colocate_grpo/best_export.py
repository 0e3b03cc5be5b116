"""The best checkpoint as a Hugging Face directory, `hf/best`, made when nothing else of the run is alive."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from colocate_grpo import processes
from colocate_grpo.checkpoint.files import read_json, sync_tree, write_json
from colocate_grpo.checkpoint.store import Checkpoint, CheckpointStore

SOURCE = "checkpoint.json"
TIMEOUT_S = 3600.0
POLL_S = 0.2
EXPORT = "from colocate_grpo.cli import main; main()"

log = logging.getLogger(__name__)


def export_best(store: CheckpointStore, tag: str, interrupted: Callable[[], bool]) -> Path | None:
    """Bring `hf/best` up to date; None where there is no best checkpoint or the export failed, which is only told.

    A process of its own loads the model, so that the driver stays small; it is ended as soon as `interrupted`. An
    older copy stays until the new one is whole.
    """
    best, target = store.best(), store.run_dir / "hf" / "best"
    if best is None:
        return None
    try:
        return _bring_up_to_date(best, target, tag, interrupted, store.run_dir / "logs" / "export.log")
    except OSError as error:  # a full disk, say: the run itself is finished, and `export` makes the copy later
        log.error("export of %s to %s failed: %s", best.path, target, error)
        return None


def _bring_up_to_date(
    best: Checkpoint, target: Path, tag: str, interrupted: Callable[[], bool], output: Path
) -> Path | None:
    source = {"step": best.step, "time": best.manifest["time"]}
    if read_json(target / SOURCE) == source:
        return target
    partial = target.with_name(".best_partial")
    shutil.rmtree(partial, ignore_errors=True)
    if not _export(best.path, partial, tag, interrupted, output):
        return None
    write_json(partial / SOURCE, source)
    sync_tree(partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return target


def _export(checkpoint: Path, out: Path, tag: str, interrupted: Callable[[], bool], output: Path) -> bool:
    out.parent.mkdir(exist_ok=True)
    with output.open("ab") as file:
        exporting = subprocess.Popen(
            [sys.executable, "-c", EXPORT, "export", str(checkpoint), str(out)], stdin=subprocess.DEVNULL,
            stdout=file, stderr=file, env={**os.environ, **processes.tagged(tag)}, start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + TIMEOUT_S
    while exporting.poll() is None and time.monotonic() < deadline and not interrupted():
        time.sleep(POLL_S)
    if exporting.poll() is None:
        processes.end(tag, 0)
    code = exporting.wait(timeout=processes.END_TIMEOUT_S)
    if code != 0:
        log.error("export of %s to %s ended with code %d; see %s", checkpoint, out, code, output)
    return code == 0
