"""What goes wrong before a server is up; and the parts that need no server."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import sglang_tiny_model as tiny_model
import torch
from sglang_runs import config

from colocate_grpo import processes
from colocate_grpo.errors import ConfigError
from colocate_grpo.rollout.engine import EngineError
from colocate_grpo.rollout.sglang_cpu_platform import DEVICE_VARIABLE, activate
from colocate_grpo.rollout.sglang_options import check_options, server_options
from colocate_grpo.rollout.sglang_pool import SglangPool
from colocate_grpo.rollout.sglang_process import LOG_TAIL_BYTES, ServerProcess

DEMO = Path(__file__).parents[3] / "configs" / "demo_sglang.yaml"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_model.save(tmp_path_factory.mktemp("model"))


def test_options_are_checked_by_name_at_once():
    check_options({"chunked_prefill_size": 2048, "context_length": 4096, "enable_deterministic_inference": True})
    with pytest.raises(ConfigError, match=r"mem_fraction_statik: .* no such option \(did you mean mem_fraction_static"):
        check_options({"mem_fraction_statik": 0.5})
    with pytest.raises(ConfigError, match=r"rollout\.sglang\.tp_size: cannot be set, it follows from rollout\.tp"):
        check_options({"tp_size": 4})


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("mem_fraction_statik=0.5", "SGLang has no such option (did you mean mem_fraction_static?)"),
        ("port=30000", "cannot be set, it follows from a free port"),
    ],
)
def test_a_wrong_option_ends_the_command_before_anything_is_started(tmp_path, override, expected):
    option = override.split("=")[0]
    arguments = ["train", str(DEMO), f"run.dir={tmp_path / 'run'}", "model.path=nowhere", f"rollout.sglang.{override}"]
    command = [sys.executable, "-c", "from colocate_grpo.cli import main; main()", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr == f"error: rollout.sglang.{option}: {expected}\n"
    assert not (tmp_path / "run").exists()


def test_what_an_engine_on_cards_is_started_with(model_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/own")
    server = ServerProcess(config(model_dir), tmp_path, model_dir, "cuda", 1, "the_key")
    environment = server._environment()
    assert (Path(environment["PATH"].split(":")[0]) / "ninja").exists(), "SGLang compiles kernels at its first start"
    own, *runtime = environment["LD_LIBRARY_PATH"].split(":")
    assert own == "/opt/own"
    assert any(list(Path(directory).glob("libcudart.so.*")) for directory in runtime)
    options = server_options(config(model_dir), model_dir, "cuda", 1, 30000, "the_key")
    assert (options["base_gpu_id"], options["enable_memory_saver"]) == (1, True)
    assert options["disable_custom_all_reduce"]
    overridden = config(model_dir, sglang={"disable_custom_all_reduce": False})
    assert not server_options(overridden, model_dir, "cuda", 1, 30000, "the_key")["disable_custom_all_reduce"]


def test_a_value_that_the_server_refuses_is_the_users_mistake(model_dir, tmp_path, monkeypatch, run_tag):
    monkeypatch.setenv(processes.RUN_ID, run_tag)
    bad = config(model_dir, sglang={"max_running_requests": "many"})
    with pytest.raises(ConfigError, match=r"rollout\.sglang: .*max-running-requests: invalid int value: 'many'"):
        asyncio.run(SglangPool(bad, tmp_path, model_dir).start())


def test_a_start_that_takes_too_long_ends_with_the_log_and_leaves_nothing(model_dir, tmp_path, monkeypatch, run_tag):
    monkeypatch.setenv(processes.RUN_ID, run_tag)
    log = tmp_path / "logs" / "engine_0.log"
    log.parent.mkdir()
    log.write_text("what an earlier start said\n")
    slow = config(model_dir, start_timeout=2.0)
    pool = SglangPool(slow, tmp_path, model_dir)
    with pytest.raises(EngineError, match=r"(?s)did not start within 2 s\nthe end of .*what an earlier start said"):
        asyncio.run(pool.start())
    assert processes.find(pool.engines[0].process.tag) == []


@pytest.mark.parametrize("width", [10, 1000, LOG_TAIL_BYTES + 10])
def test_the_end_of_a_log_has_whole_lines_and_a_bound(model_dir, tmp_path, width):
    server = ServerProcess(config(model_dir), tmp_path, model_dir, "cpu", 0, "the_key")
    assert server.log_tail() == "\n(it has no log)"
    lines = [f"<{number:x<{width}}>" for number in range(200)] + ["it says the_key"]
    server.log_path.parent.mkdir()
    server.log_path.write_text("\n".join(lines))
    empty, title, *shown = server.log_tail().split("\n")
    assert (empty, title) == ("", f"the end of {server.log_path}:")
    assert shown == [*lines[-len(shown) : -1], "it says (key)"]
    assert len(shown) == {10: 25, 1000: 17}.get(width, 1)


def test_a_message_names_the_last_exception_of_the_log(model_dir, tmp_path):
    server = ServerProcess(config(model_dir), tmp_path, model_dir, "cpu", 0, "the_key")
    server.log_path.parent.mkdir()
    server.log_path.write_text("RuntimeError: first\n  raise ValueError(x)\nValueError: no memory\n\nsigquit\n")
    assert server.last_error() == ": ValueError: no memory"
    server.log_path.write_text("all is well\n")
    assert server.last_error() == ""


def test_the_platform_plugin_is_inert_unless_an_engine_asks_for_it(monkeypatch):
    monkeypatch.delenv(DEVICE_VARIABLE, raising=False)
    assert activate() is None
    monkeypatch.setenv(DEVICE_VARIABLE, "cpu")
    assert activate() is not None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert activate() is None


def murmur3_32(key: bytes, seed: int) -> int:
    """The published algorithm, for keys of whole 4-byte blocks."""
    h = seed
    for start in range(0, len(key), 4):
        k = int.from_bytes(key[start : start + 4], "little") * 0xCC9E2D51 & 0xFFFFFFFF
        k = ((k << 15) | (k >> 17)) * 0x1B873593 & 0xFFFFFFFF
        h ^= k & 0xFFFFFFFF
        h = (((h << 13) | (h >> 19)) & 0xFFFFFFFF) * 5 + 0xE6546B64 & 0xFFFFFFFF
    h ^= len(key)
    h = (h ^ (h >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ (h >> 16)


def test_the_sampling_hash_is_murmur3():
    from colocate_grpo.rollout.sglang_cpu_platform_class import murmur_hash32

    assert murmur3_32(b"test", 0x9747B28C) == 0x704B81DC  # published test vector
    seeds = torch.tensor([0, 42, 2**63 - 1, -1], dtype=torch.int64)
    positions = torch.tensor([0, 1, 2**31 - 1, 7])
    hashed = murmur_hash32(seeds, positions, torch.arange(300))
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        for column in (0, 1, 255, 299):
            key = b"".join(
                [(seed % 2**64).to_bytes(8, "little"), position.to_bytes(4, "little"), column.to_bytes(4, "little")]
            )
            assert hashed[row, column].item() == murmur3_32(key, 0)
