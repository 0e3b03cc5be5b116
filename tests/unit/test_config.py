"""Configuration files: what is refused, how it is said, and that nothing is lost on the way to disk and back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from colocate_grpo.cli import app
from colocate_grpo.config import Config
from colocate_grpo.config_file import changes, dump_config, explain_rows, identity_changes, load_config
from colocate_grpo.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
MINIMAL = "model:\n  path: some/model\ndata:\n  train: some/data.jsonl\n"


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write


def message_of(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides)
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_configuration_is_valid(path):
    assert isinstance(load_config(path), Config)


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.0e-6", "0.000001", "+1e-06"])
def test_numbers_that_yaml_reads_as_text_are_numbers(write, text):
    config = load_config(write(MINIMAL + f"train:\n  optimizer:\n    lr: {text}\n"))
    assert config.train.optimizer.lr == 1e-6


@pytest.mark.parametrize(("text", "seconds"), [
    ("20s", 20), ("1.5m", 90), ("2h", 7200), ("1d", 86400), ("7", 7), ("5min", 300), ("1h30m", 5400),
    ("1h 5m 1s", 3901), ("1e3", 1000), ("010", 10),
])  # fmt: skip
def test_durations(write, text, seconds):
    assert load_config(write(MINIMAL), [f"run.dist_timeout={text}"]).run.dist_timeout == seconds


def test_unknown_key_names_line_and_nearest_name(write):
    path = write(MINIMAL + "rollout:\n  group_sise: 3\n")
    assert message_of(path) == f"{path}:6: rollout.group_sise: unknown key (did you mean group_size?)"


def test_unknown_section_names_nearest_section(write):
    path = write(MINIMAL + "rolout:\n  group_size: 3\n")
    assert message_of(path).startswith(f"{path}:5: rolout: unknown key (did you mean rollout?)")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.steps=0", "run.steps: 0 is not allowed"),
        ("run.steps=abc", "run.steps: 'abc' is not allowed"),
        ("rollout.engine=embeded", "did you mean embedded?"),
        ("algorithm.clip_low=0.5", "must be <= clip_high (0.28)"),
        ("checkpoint.keep_last=0", "checkpoint.keep_last: 0 is not allowed"),
        ("rollout.sglang.x=1", "rollout.engine is embedded"),
        ("rollout.tp=2", "the embedded engine is one engine of TP 1"),
        ("train.updates_per_rollout=5", "must divide rollout.prompts_per_step (32)"),
        ("eval.every=5", "eval.sets is empty"),
        ("checkpoint.keep_best=1", "checkpoint.best_metric: needed by keep_best"),
        ("train.optimizer.betas=[0.9]", "train.optimizer.betas"),
        ("model.path=null", "model.path"),
        ("steps", "an override has the form section.key=value"),
        ("run.steps.deep=1", "run.steps"),
        ("run.steps=true", "run.steps: true is not allowed: input should be a number"),
        ("train.optimizer.lr=.inf", "train.optimizer.lr: inf is not allowed"),
        ("run.name=..", "run.name: '..' is not allowed"),
        ("run.lr=1", "run.lr: unknown key (did you mean train.optimizer.lr?)"),
        ("optim.lr=1", "optim: unknown key (did you mean train.optimizer.lr?)"),
        ("trainer.x=1", "trainer: unknown key (did you mean train?)"),
        ("model.zz=1", "model.zz: unknown key (allowed: path, revision, dtype)"),
        ("run.dist_timeout=5 parsecs", "'5 parsecs' is no duration: a number of seconds, or one with s, m, h or d"),
        ("run.dist_timeout=1:30", "'1:30' is no duration"),
        ("run.steps=1:30", "run.steps: '1:30' is not allowed"),
        ("run.until=25:00", "run.until: '25:00' is no ISO 8601 time"),
        ("run.until=''", "run.until: '' is no ISO 8601 time"),
        ("train.optimizer.betas=[1.0, 0.9]", "train.optimizer.betas.0: 1.0 is not allowed"),
        ("train.optimizer.betas=[0.9, -0.1]", "train.optimizer.betas.1: -0.1 is not allowed"),
        ("algorithm.clip_low=1.5", "algorithm.clip_low: 1.5 is not allowed"),
        ("rollout.group_size=1", "rollout.group_size: one sample a prompt has nothing to be better than"),
    ],
)
def test_bad_overrides_are_one_line_that_names_them(write, override, expected):
    text = message_of(write(MINIMAL), override)
    assert expected in text
    assert text.startswith((f"override {override!r}", f"{override!r}"))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["algorithm.correction=tis", "rollout.partial.enabled=true"], "algorithm.correction: tis does nothing"),
        (["algorithm.ratio=cispo", "algorithm.dual_clip=3"], "algorithm.dual_clip: 3.0 does nothing"),
        (
            [
                "eval.sets=[{name: a, path: p}]", "checkpoint.keep_best=1", "checkpoint.best_metric=eval/a",
                "checkpoint.export_best=true",
            ],
            "checkpoint.export_best: needs eval.every >= 1",
        ),
    ],
)  # fmt: skip
def test_options_that_would_do_nothing_together_are_refused(write, overrides, expected):
    assert expected in message_of(write(MINIMAL), *overrides)


def test_numbers_are_read_as_they_are_written(write):
    config = load_config(write(MINIMAL + "run: {seed: 010, steps: 1_000, hang_timeout: 0.5e3, name: 0x1f}\n"))
    run = config.run
    assert (run.seed, run.steps, run.hang_timeout, run.name) == (10, 1000, 500.0, "0x1f")
    options = load_config(write(MINIMAL), ["reward.options={a: .inf, b: -08, c: 1., d: 1:30}"]).reward.options
    assert options == {"a": float("inf"), "b": -8, "c": 1.0, "d": "1:30"}


@pytest.mark.parametrize("key", ["? [a, b]\n: 1", "? {a: 1}\n: 1", "run:\n  ? [a]\n  : 1"])
def test_a_key_that_is_no_text_is_one_line(write, key):
    assert "a key must be a plain text" in message_of(write(MINIMAL + key + "\n"))


@pytest.mark.parametrize(
    "text", ["7", "010", "1:30", "12e4567", "true", "2026-12-01", "2026-12-01T10:00:00+02:00", "10:00", "hf:"]
)
def test_an_override_of_a_text_is_taken_as_it_stands(write, text):
    assert load_config(write(MINIMAL), [f"model.revision={text}"]).model.revision == text
    assert load_config(write(MINIMAL), [f"model.revision='{text}'"]).model.revision == text
    assert load_config(write(MINIMAL), ["model.revision=null"]).model.revision is None


def test_an_override_of_a_mapping_or_a_list_is_yaml(write):
    overrides = ["data.chat_template_kwargs={enable_thinking: true}", "train.optimizer.betas=[0.9, 0.95]"]
    overrides += ["eval.sets=[{name: a, path: p}]", "eval.sets.0.path=7", "reward.options={a: 1}"]
    config = load_config(write(MINIMAL), overrides)
    assert config.data.chat_template_kwargs == {"enable_thinking": True}
    assert config.train.optimizer.betas == (0.9, 0.95)
    assert (config.eval.sets[0].path, config.reward.options) == ("7", {"a": 1})


def test_a_date_in_a_file_is_text(write, tmp_path):
    config = load_config(write(MINIMAL + "run: {until: 2026-12-01T10:00:00}\n"))
    assert config.run.until == "2026-12-01T10:00:00"
    dump_config(config, tmp_path / "again.yaml")
    assert load_config(tmp_path / "again.yaml") == config


def test_a_number_for_a_text_in_a_file_asks_for_quotes(write):
    path = write(MINIMAL + "run: {name: 12}\n")
    assert message_of(path) == f"{path}:5: run.name: 12 is not allowed: input should be a text in quotes"


@pytest.mark.parametrize(
    "option", ["mem_fraction_static=abc", "mem_fraction_static=2", "mem_fraction_static=true", "max_total_tokens=0.5"]
)
def test_engine_options_that_the_plan_counts_with_are_numbers(write, option):
    text = message_of(write(MINIMAL), "rollout.engine=sglang", f"rollout.sglang.{option}")
    assert f"rollout.sglang.{option.split('=')[0]}: " in text
    assert "number" in text


def test_a_directory_is_no_configuration_file(tmp_path):
    (tmp_path / "runs.yaml").mkdir()
    assert message_of(tmp_path / "runs.yaml") == f"{tmp_path / 'runs.yaml'}: a directory, not a configuration file"


def test_duplicate_keys_are_refused(write):
    path = write(MINIMAL + "run:\n  seed: 1\n  seed: 2\n")
    assert message_of(path) == f"{path}:7: seed: given twice"


def test_missing_file_names_a_neighbour(write):
    path = write(MINIMAL)
    assert "did you mean run.yaml?" in message_of(path.with_name("rum.yaml"))


def test_broken_yaml_names_its_line(write):
    path = write(MINIMAL + "run: {seed: 1\n")
    assert message_of(path).startswith(f"{path}:")


def test_overrides_reach_into_lists(write):
    text = MINIMAL + "eval:\n  sets:\n    - {name: a, path: p}\n"
    assert load_config(write(text), ["eval.sets.0.samples=7"]).eval.sets[0].samples == 7
    assert "is no index of a list of 1" in message_of(write(text), "eval.sets.3.samples=7")


@given(
    seed=st.integers(0, 2**40),
    lr=st.floats(1e-12, 1.0),
    suffix=st.text(alphabet=st.characters(blacklist_categories=("Cs", "Cc")), max_size=30),
)
@example(seed=0, lr=1.0, suffix="0E0")
@example(seed=0, lr=1e-12, suffix="1_0.5e3")
@example(seed=8, lr=1.0, suffix="08")
@example(seed=8, lr=1.0, suffix="1:30")
@example(seed=8, lr=1.0, suffix="0x1F")
@example(seed=8, lr=1.0, suffix="1_.")
def test_dump_and_load_give_the_same_configuration(tmp_path_factory, seed, lr, suffix):
    directory = tmp_path_factory.mktemp("dump")
    config = Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "d", "prompt_suffix": suffix},
            "run": {"seed": seed},
            "train": {"optimizer": {"lr": lr}},
        }
    )
    dump_config(config, directory / "config.yaml")
    assert load_config(directory / "config.yaml") == config


def test_changes_tell_identity_from_resumable(write):
    path = write(MINIMAL)
    old, new = load_config(path), load_config(path, ["run.seed=3", "run.steps=7", "parallel.tp=2"])
    identity, resumable = changes(old, new)
    assert identity == {"run.seed": (0, 3)} == identity_changes(old, new)
    assert set(resumable) == {"run.steps", "parallel.tp"}


def test_types_are_explained_in_a_users_words():
    rows = {key: (kind, default) for key, kind, default, _ in explain_rows()}
    assert rows["run.steps"] == ("int", "100")
    assert rows["run.hang_timeout"] == ("seconds", "1800.0")
    assert rows["run.dir"] == ("path or null", "null")
    assert rows["data.limit"] == ("int or null", "null")
    assert rows["rollout.dtype"] == ("bfloat16 | float32 or null", "null")
    assert rows["train.optimizer.betas"] == ("list", "[0.9, 0.98]")
    assert rows["data.chat_template_kwargs"] == ("mapping", "{}")


def test_explained_options_are_whole_in_a_pipe_and_on_a_narrow_terminal():
    wide, narrow = (
        CliRunner(env={"COLUMNS": "80", "TTY_COMPATIBLE": tty}).invoke(app, ["config", "explain"]).output
        for tty in ("0", "1")
    )
    for key, kind, default, _ in explain_rows():
        assert any(line.split()[:1] == [key] and default in line for line in wide.splitlines())
        assert key in narrow.split()
        assert f"{kind} = {default[:9]}" in narrow
    assert max(map(len, narrow.splitlines())) <= 80


def test_every_option_is_explained_in_a_sentence():
    rows = list(explain_rows())
    keys = [key for key, *_ in rows]
    assert len(keys) == len(set(keys)) > 100
    assert [key for key, _, _, sentence in rows if not sentence.removesuffix(" *").endswith((".", "value."))] == []
