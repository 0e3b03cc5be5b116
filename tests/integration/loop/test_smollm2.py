"""A real model on real problems: SmolLM2-135M-Instruct and GSM8K through load, one GRPO step, push and export."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import small_models as small
import smollm2_run
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from colocate_grpo.checkpoint.store import CheckpointStore
from colocate_grpo.cli import main
from colocate_grpo.config_file import dump_config
from colocate_grpo.data import load_tokenizer, tokenize
from colocate_grpo.demo import smollm2
from colocate_grpo.memory.saver import make_saver
from colocate_grpo.observe.metrics import read_rows, view
from colocate_grpo.train.parallel import Parallel
from colocate_grpo.train.step import Trainer
from colocate_grpo.trajectory import Trajectory, VersionSpan, read_trajectories
from colocate_grpo.weights.export import export_hf
from colocate_grpo.weights.hf import tensor_checksum

pytestmark = pytest.mark.timeout(1500)  # a limit for hangs: the fixtures build and train a real model
PARAMETERS = 134_515_008


@dataclass(frozen=True)
class Untouched:
    """What the trainer held and said before any step, and its checkpoint as a Hugging Face directory."""

    checksums: dict[str, str]
    logprobs: list[torch.Tensor]
    exported: Path


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return smollm2.cached()


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """Checkpoints are gigabytes: nothing is left for pytest to keep."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def hugging_face(model_dir: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


@pytest.fixture(scope="module")
def texts(model_dir: Path) -> list[Trajectory]:
    """Eight problems, and all of them in one text of some 600 tokens; every token but the first is scored."""
    found = [row["problem"] for row in smollm2_run.problems(8)]
    return [
        Trajectory("", i, 0, 0, ids, [0] + [1] * (len(ids) - 1), [0.0] * len(ids), [], "completed")
        for i, ids in enumerate(tokenize([*found, "\n\n".join(found)], load_tokenizer(model_dir)))
    ]


@pytest.fixture(scope="module")
def expected(hugging_face: PreTrainedModel, texts: list[Trajectory]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [small.plain_logprobs(hugging_face, text)[0] for text in texts]


@pytest.fixture(scope="module")
def untouched(model_dir: Path, texts: list[Trajectory], scratch: Path) -> Untouched:
    run_dir = scratch / "untouched"
    config = small.make_config(model_dir, run={"dir": str(run_dir)})
    parallel = Parallel.initialise(config)
    try:
        trainer = Trainer.build(config, parallel, make_saver(config, parallel.device), model_dir)
        logprobs = [torch.from_numpy(p) for p in trainer.logprobs(texts)]
        run_dir.mkdir()
        dump_config(config, run_dir / "config.yaml")
        store = CheckpointStore(run_dir, config.checkpoint)
        path = store.begin(0)
        trainer.save(path / "megatron")
        store.publish(path, {"step": 0})
        checksums = trainer.checksums()
    finally:
        parallel.shutdown()
    return Untouched(checksums, logprobs, export_hf(run_dir, scratch / "untouched_hf"))


@pytest.fixture(scope="module")
def trained(model_dir: Path, scratch: Path) -> Path:
    """The run directory after one step."""
    directory = scratch / "trained"
    directory.mkdir()
    return smollm2_run.train(model_dir, directory)


def test_the_conversion_is_the_model(
    model_dir: Path, hugging_face: PreTrainedModel, expected: list[torch.Tensor]
) -> None:
    """Wrongly permuted heads or tokens would still load; they would not find English likely, nor know Paris."""
    assert sum(p.numel() for p in hugging_face.parameters()) == PARAMETERS
    assert torch.cat(expected).mean() > -3
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    answer = hugging_face.generate(**prompt, do_sample=False, max_new_tokens=12)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_digits_are_split_before_blanks(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert tokenizer.tokenize("for  3,125") == ["for", "ĠĠ", "3", ",", "1", "2", "5"]


def test_megatron_holds_it_bit_for_bit(model_dir: Path, untouched: Untouched) -> None:
    disk = load_file(model_dir / "model.safetensors")
    assert untouched.checksums == {name: tensor_checksum(t) for name, t in disk.items()}


def test_logprobs_are_those_of_transformers(untouched: Untouched, expected: list[torch.Tensor]) -> None:
    for found, wanted in zip(untouched.logprobs, expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


def test_an_untouched_export_is_the_input(model_dir: Path, untouched: Untouched, hugging_face: PreTrainedModel) -> None:
    exported = AutoModelForCausalLM.from_pretrained(untouched.exported)
    assert exported.config.to_dict() == hugging_face.config.to_dict() | {"_name_or_path": str(untouched.exported)}
    mine, theirs = exported.state_dict(), hugging_face.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (untouched.exported / name).read_bytes() == (model_dir / name).read_bytes()


def test_one_step_of_grpo(trained: Path) -> None:
    (row,) = view(read_rows(trained)).steps.values()
    batch = list(read_trajectories(trained / "rollouts" / "step_0.jsonl.zst"))
    assert len(batch) == smollm2_run.GROUPS * smollm2_run.GROUP_SIZE
    assert row["train/tokens"] == sum(t.response_length for t in batch)
    assert row["train/train_rollout_logprob_abs_diff"] < 1e-4
    assert 0 < row["train/grad_norm"] < float("inf")
    assert row["train/skipped"] == 0
    assert row["weight_version"] == 0


def test_the_trained_export_answers_like_the_engine(
    trained: Path, hugging_face: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's greedy answers, by the weights that were pushed to it after the step."""
    monkeypatch.setattr("sys.argv", ["colocate-grpo", "export", str(trained), str(tmp_path / "hf")])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code in (0, None)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    untrained = hugging_face.state_dict()
    assert not any(torch.equal(t, untrained[name]) for name, t in model.state_dict().items())
    answers = list(read_trajectories(trained / "rollouts" / "eval_gsm8k_step_0.jsonl.zst"))
    assert len(answers) == smollm2_run.HELD_OUT
    for answer in answers:
        check_answer(model, answer)


@torch.no_grad()
def check_answer(model: PreTrainedModel, answer: Trajectory) -> None:
    start = answer.loss_mask.index(1)
    assert answer.weight_versions == [VersionSpan(start, len(answer.token_ids), 1)]
    prompt = torch.tensor([answer.token_ids[:start]])
    greedy = model.generate(prompt, do_sample=False, max_new_tokens=smollm2_run.ANSWER_TOKENS)
    assert greedy[0].tolist() == answer.token_ids
    found = torch.tensor(answer.rollout_logprobs[start:])
    torch.testing.assert_close(found, small.plain_logprobs(model, answer)[0], atol=1e-4, rtol=0)
