"""Reports of runs that went well, badly, and hardly at all."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image
from recompute_headline import headline, training
from run_builder import RunBuilder, eventful_run

from colocate_grpo.errors import DataError
from colocate_grpo.report.experiment import compose, write_report
from colocate_grpo.report.model_card import write_model_card
from colocate_grpo.report.record import load_record

REFERENCE = Path(__file__).parents[3] / "reports" / "reference_8x4090.json"


@pytest.fixture(scope="module")
def good_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 steps, two sets, three baselines, an evaluation every 10 steps."""
    run = RunBuilder(tmp_path_factory.mktemp("runs") / "good", sets=("aime", "math"), steps=40)
    run.start()
    run.baselines()
    for step in range(40):
        run.train(step)
        if step % 10 == 9:
            run.evaluate(step)
    return run.run_dir


@pytest.fixture(scope="module")
def good_report(good_run: Path) -> str:
    return _text(good_run)


@pytest.fixture(scope="module")
def eventful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eventful_run(tmp_path_factory.mktemp("runs") / "eventful")


@pytest.fixture(scope="module")
def eventful_report(eventful: Path) -> str:
    return compose(load_record(eventful), reference=REFERENCE)


def test_an_independent_script_finds_the_same_headline(good_run: Path, good_report: str) -> None:
    for name in ("aime", "math"):
        part = _part(good_report, f"### `eval/{name}`")
        best = int(re.search(r"best \(step (\d+), chosen from 4\)", part)[1])  # type: ignore[index]
        shown, truth = _columns(part), headline(good_run, name, 3, 39, best)
        for column in ("base", "last", "best"):
            expected = truth[column]
            assert shown["pass@1 ± standard error"][column] == pytest.approx(expected["pass@1"], abs=0.051)
            if column != "base":
                difference = shown["difference from base, points [95 %]"][column]
                assert difference == pytest.approx(expected["difference"], abs=0.051)
            for figure in ("response length, mean", "response length, median", "truncated", "degenerate repetition"):
                assert shown[figure][column] == pytest.approx([expected[figure]], abs=0.051), (name, column, figure)


def test_the_best_is_the_highest_of_the_first_set(good_run: Path, good_report: str) -> None:
    accuracies = {step: headline(good_run, "aime", 3, step, step)["last"]["pass@1"][0] for step in (9, 19, 29, 39)}
    best = max(accuracies, key=lambda step: (accuracies[step], -step))
    assert f"best (step {best}, chosen from 4)" in _part(good_report, "### `eval/math`")


def test_the_training_figures_are_those_of_the_dumps(good_run: Path, good_report: str) -> None:
    shown = _columns(_part(good_report, "### Training"))
    for column, steps in {"first": range(8), "last": range(32, 40)}.items():
        truth = training(good_run, list(steps))
        for figure in ("reward", "response length, mean", "response length, median", "truncated"):
            assert shown[figure][column] == pytest.approx([truth[figure]], abs=0.051), (column, figure)


def test_two_protocols_share_no_difference(eventful_report: str) -> None:
    old, new = _columns(_part(eventful_report, "protocol `aaaa1111`")), _part(eventful_report, "protocol `bbbb2222`")
    assert old["difference from base, points [95 %]"]["last"]
    assert not any(_columns(new)["difference from base, points [95 %]"].values())
    assert "The untouched model was not evaluated under this protocol" in new


def test_what_changed_in_a_protocol_is_told(eventful_report: str) -> None:
    part = _part(eventful_report, "## Protocols")
    assert (
        "**The protocol of `eval/aime` changed during this run**, from `aaaa1111` to `bbbb2222`:"
        " samples a problem `4` → `8`."
    ) in part
    assert ["samples a problem", "`4`", "`8`"] in [_cells(line) for line in part.splitlines()]
    assert ["temperature", "`0.6`", "`0.6`"] in [_cells(line) for line in part.splitlines()]


def test_a_protocol_whose_parts_were_not_recorded(tmp_path: Path) -> None:
    run = RunBuilder(tmp_path / "run", records_parts=False)
    run.evaluate(3)
    assert "What the protocol of `eval/aime` is made of is not recorded." in _text(run.run_dir)
    run.protocol, run.records_parts = "bbbb2222", True
    run.evaluate(7)
    assert "from `aaaa1111` to `bbbb2222`: what differs is not recorded." in _text(run.run_dir)


def test_a_rollback_and_resumes_are_told_and_their_rows_gone(eventful: Path, eventful_report: str) -> None:
    removals = [_cells(line) for line in _part(eventful_report, "### What a rollback").splitlines() if "| 2 |" in line]
    assert [(r[1], r[3], r[4]) for r in removals] == [
        ("resume", "the end of step 7", "8–9"),
        ("rollback", "the end of step 7", "8–13"),
    ]
    assert removals[1][5].startswith("aime step 11: ")
    attempts = [_cells(line) for line in _part(eventful_report, "### Attempts").splitlines()[4:]]
    assert [(cells[0], cells[3]) for cells in attempts] == [("1", "0–9"), ("2", "8–13"), ("3", "8–11"), ("4", "12–19")]
    # The dumps of the steps that count are those of the last attempt that did them.
    shown = _columns(_part(eventful_report, "### Training"))
    assert shown["reward"]["last"] == pytest.approx([training(eventful, [16, 17, 18, 19])["reward"]], abs=0.00051)


def test_the_log_tells_the_lost_engine_with_its_numbers(eventful_report: str) -> None:
    log = _part(eventful_report, "### Events")
    assert "| **engine lost** | engine 1; reason no token for 300 s; requests 12 |" in log
    assert "| engine restarted | engine 1; seconds 41.50 |" in log
    assert '`eval.sets`: [{"samples": 4}] → [{"samples": 8}]' in log
    assert "Saved after step 3, 7, 11 (3 saves, 4 s each on average, the last one 3 MiB)." in eventful_report
    assert "6.2 % in step 6" in _part(eventful_report, "### Verdicts")
    assert "An update was left out in step 2:" in _part(eventful_report, "### Verdicts")


def test_the_command_is_one_that_works_elsewhere(eventful_report: str) -> None:
    assert "\ncolocate-grpo train config.yaml 'run.name=a b'\n" in _part(eventful_report, "## Reproduce")
    assert "/somewhere" not in eventful_report


def test_time_of_what_counts_and_of_what_was_lost(eventful_report: str) -> None:
    part = _part(eventful_report, "## Where the time went")
    # 20 counted steps of 12 s of training, 2 of them for log-probs; 8 steps of at least 36 s do not count.
    assert "| training | 3.3 min | 10 s |" in part
    assert "| log-probs | 40 s | 2 s |" in part
    assert "| training | 1,500 | 1,500 | 1,500 |" in part
    assert re.search(r"Another (4\.[89]|5\.[01]) min went into steps", part)


def test_data_facts_and_the_epochs_that_were_really_seen(tmp_path: Path) -> None:
    run = RunBuilder(tmp_path / "run")
    run.metrics.append("attempt", -1, {"data/rows": 9, "data/unique": 6, "data/usable": 8, "data/eval_overlap": 2})
    run.train(0, **{"data/epoch": 1.0, "data/next_index": 4.0})
    cells = map(_cells, _part(_text(run.run_dir), "## Data").splitlines())
    rows = {pair[0]: pair[1] for pair in cells if len(pair) == 2}
    assert rows["rows of the training file (after `data.limit`)"] == "9"
    assert rows["unique prompts"] == "6"
    assert rows["evaluation prompts among the training prompts"] == "2"
    assert rows["prompts dropped as too long"] == "not recorded"
    assert rows["epochs seen (data cursor)"] == "1.50"


def test_memory_peaks_by_phase(tmp_path: Path) -> None:
    run = RunBuilder(tmp_path / "run")
    for step in range(3):
        run.train(step, **{"memory/rollout/allocated_gib": 20.0 - step, "memory/rollout/free_gib": 3.0 - step})
    run.write_config(run={"device": "cuda"})
    rows = [_cells(line) for line in _part(_text(run.run_dir), "### Memory").splitlines() if line.startswith("|")]
    assert rows[0][1:] == ["GPU allocated", "GPU free, least", "host, resident"]
    assert rows[2:] == [["rollout", "20", "1", "7"], ["train", "18", "4", "7"]]
    run.write_config(run={"device": "cpu"})
    assert "GPU" not in _part(_text(run.run_dir), "### Memory")


def test_the_reference_stands_beside_the_run_as_it_was_published(eventful_report: str) -> None:
    part = _part(eventful_report, "## Side by side")
    published = json.loads(REFERENCE.read_text())
    for accuracy, step in zip(
        published["evaluations"][0]["accuracy"], published["evaluations"][0]["steps"], strict=True
    ):
        assert f"{100 * accuracy:.1f} % ({step})" in part
    for text in ("46.60", "6,403 → 4,476", "7,400 → 3,777", "0.535 → 0.629", "46.1 % → 21.1 %", "37.5 % → 19.6 %"):
        assert text in part


def test_differences_are_told_from_the_configuration_that_the_reference_names(eventful_report: str) -> None:
    named = _part(eventful_report, "### Differences from `qwen3_4b_8x4090.yaml`")
    rows = [_cells(line) for line in named.splitlines()]
    assert ["`rollout.group_size`", "`8`", "`8`"] not in rows
    assert ["`parallel.tp`", "`1`", "`4`"] in rows
    assert ["`model.path`", '`"models/tiny"`', '`"hf:Qwen/Qwen3-4B"`'] in rows
    assert "### Differences from the defaults" not in eventful_report


def test_two_runs_side_by_side(good_run: Path, eventful: Path) -> None:
    text = compose(load_record(good_run), compare=eventful)
    rows = {
        cells[0]: cells[1:] for cells in map(_cells, _part(text, "## Side by side").splitlines()) if len(cells) == 3
    }
    assert rows["steps"] == ["40", "20"]
    assert rows["math problems × samples"] == ["20 × 4", "–"]
    assert rows["aime problems × samples"] == ["20 × 4", "20 × 4; other protocol: 20 × 8"]
    assert "`eval/aime`: **the protocols differ**, this run's from the other's: samples a problem `4` → `8`." in text
    differences = [_cells(line) for line in _part(text, "### Differences from the run `eventful`").splitlines()]
    assert ["`run.steps`", "`40`", "`20`"] in differences
    assert "both runs were evaluated by the protocol `aaaa1111`" in compose(load_record(good_run), compare=good_run)


def test_without_dumps_the_difference_is_unpaired(eventful: Path, eventful_report: str, tmp_path: Path) -> None:
    copy = shutil.copytree(eventful, tmp_path / "run", ignore=shutil.ignore_patterns("rollouts"))
    text = _text(copy)
    assert "taken as of unpaired" in text
    assert "No rollouts were dumped" in text
    row = "difference from base, points [95 %]"
    unpaired, paired = (_columns(_part(t, "aaaa1111"))[row]["last"] for t in (text, eventful_report))
    assert unpaired[0] == pytest.approx(paired[0], abs=0.051)
    assert unpaired[1:] != pytest.approx(paired[1:], abs=0.2)


def test_a_dump_of_another_evaluation_is_not_taken_for_this_one(eventful: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(eventful, tmp_path / "run")
    (copy / "rollouts/eval_aime_step_3.jsonl.zst").replace(copy / "rollouts/eval_aime_step_11.jsonl.zst")
    assert "taken as of unpaired" in _text(copy)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ("nothing", ["No finished step", "No evaluation is recorded", "The engineering log is left out"]),
        ("one step", ["Only one step is recorded", "No evaluation is recorded"]),
        ("baseline", ["No finished step", "Only the untouched model was evaluated"]),
        ("no baseline", ["The untouched model was not evaluated", "4 of 20 steps are recorded"]),
    ],
)
def test_small_runs_get_a_report_that_says_what_is_missing(tmp_path: Path, made: str, told: list[str]) -> None:
    run = RunBuilder(tmp_path / "run")
    if made != "nothing":
        run.start()
    if made == "baseline":
        run.baselines(1)
    for step in range({"one step": 1, "no baseline": 4}.get(made, 0)):
        run.train(step)
    if made == "no baseline":
        run.evaluate(3)
    text = write_report(run.run_dir).read_text()
    missing = _part(text, "**What is missing**").lower()
    assert all(line.lower() in missing for line in told), missing
    assert _is_picture(run.run_dir / "report" / "curves.png")


def test_damaged_lines_and_a_missing_configuration_are_told(
    eventful: Path, eventful_report: str, tmp_path: Path
) -> None:
    copy = shutil.copytree(eventful, tmp_path / "run")
    for name in ("metrics.jsonl", "events.jsonl"):
        with (copy / name).open("a") as file:
            file.write('{"kind": "step", "step": 20, "rollout/raw_')
    text = _text(copy)
    missing = _part(text, "**What is missing**")
    assert "`metrics.jsonl` line" in missing
    assert "`events.jsonl` line" in missing
    assert _part(text, "## Headline") == _part(eventful_report, "## Headline")
    (copy / "config.yaml").unlink()
    assert "`config.yaml` is missing" in write_report(copy).read_text()


def test_the_same_run_gives_the_same_files(good_run: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_report(good_run, out=tmp_path / name)
    for file in ("EXPERIMENT_REPORT.md", "report.html", "curves.png"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_the_model_card_has_the_figures_of_its_step(good_run: Path) -> None:
    model = good_run / "hf" / "best"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "checkpoint.json").write_text('{"step": 39}')
    write_report(good_run)
    card = (model / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    results = front["model-index"][0]["results"]
    truth = {name: headline(good_run, name, 3, 39, 39)["last"] for name in ("aime", "math")}
    assert {r["dataset"]["name"]: r["metrics"][0]["value"] for r in results} == {
        name: pytest.approx(values["pass@1"][0], abs=0.01) for name, values in truth.items()
    }
    assert f"{truth['aime']['pass@1'][0]:.1f} %" in card
    (model / "README.md").write_text("my own words")
    assert write_model_card(load_record(good_run), model, 39) is None
    assert (model / "README.md").read_text() == "my own words"


def test_what_is_no_run_and_no_reference_is_refused(good_run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such run directory"):
        write_report(tmp_path / "nothing")
    with pytest.raises(DataError, match="not a run directory"):
        write_report(tmp_path)
    (tmp_path / "reference.json").write_text("[]")
    with pytest.raises(DataError, match="not a file of reference figures"):
        write_report(good_run, reference=tmp_path / "reference.json")


def test_the_command(eventful: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from colocate_grpo.cli import main; main()", "report"]
    done = subprocess.run([*command, str(eventful), "--out", str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    assert f"report: {tmp_path}/EXPERIMENT_REPORT.md" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"EXPERIMENT_REPORT.md", "report.html", "curves.png"}
    done = subprocess.run([*command, str(eventful), "--tensorboard"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list((eventful / "tensorboard").glob("events.out.tfevents.*"))
    done = subprocess.run([*command, str(tmp_path / "none")], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no such run directory" in done.stderr


def _text(run_dir: Path) -> str:
    """The report without its pictures."""
    return compose(load_record(run_dir))


def _part(text: str, beginning: str) -> str:
    """The part under the heading (or bold line) that contains `beginning`, up to the next one of its level or above."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if beginning in line and line.startswith(("#", "**")))
    level = len(lines[start]) - len(lines[start].lstrip("#")) or 2
    following = (i for i in range(start + 1, len(lines)) if re.match(rf"#{{1,{level}}} ", lines[i]))
    return "\n".join(lines[start : next(following, len(lines))])


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []


def _columns(part: str) -> dict[str, dict[str, list[float]]]:
    """Row -> column ("base", "last", ...) -> the numbers in the cell."""
    rows = [_cells(line) for line in part.splitlines() if line.startswith("|") and "---" not in line]
    names = [cell.split(" (")[0] for cell in rows[0]]
    return {row[0]: dict(zip(names[1:], map(_numbers, row[1:]), strict=True)) for row in rows[1:]}


def _numbers(cell: str) -> list[float]:
    return [float(text) for text in re.findall(r"[-+]?\d+(?:\.\d+)?", cell.replace("−", "-").replace(",", ""))]


def _is_picture(path: Path) -> bool:
    with Image.open(path) as image:
        image.verify()
        return image.size[0] > 1000
