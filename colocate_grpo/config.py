"""The configuration schema: one sentence a field, bounds, and the rules between fields.

Imports neither torch, Megatron nor SGLang, so that every command can refuse a bad file at once.
"""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from colocate_grpo.config_rules import cross_field_rules

Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


_UNITS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+\.?\d*|\.\d+)\s*(s|sec|m|min|h|d)\s*")


def _seconds(value: Any) -> Any:
    """`20s`, `5m`, `1h30m` and `1d` as seconds; a number is left to pydantic."""
    if not isinstance(value, str) or re.fullmatch(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*", value):
        return value
    if not re.fullmatch(rf"\s*({_DURATION.pattern})+", value):
        raise ValueError(f"{value!r} is no duration: a number of seconds, or one with s, m, h or d (90s, 1h30m)")
    return sum(float(number) * _UNITS[unit] for number, unit in _DURATION.findall(value))


Seconds = Annotated[float, BeforeValidator(_seconds), Field(gt=0.0)]


def identity(default: Any = ..., **kwargs: Any) -> Any:
    """A field that makes a run the run it is: resuming with another value is refused."""
    return Field(default, json_schema_extra={"identity": True}, **kwargs)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True, frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and annotation in (int, float):
            raise ValueError(f"{str(value).lower()} is not allowed: input should be a number")
        return value


class RunConfig(Section):
    """Where the run lives and how long it goes on."""

    name: str = Field(
        "run", pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", description="Name of the run, used for its directory."
    )
    dir: Path | None = Field(None, description="Run directory; default `runs/NAME`.")
    seed: int = identity(0, ge=0, description="Seed of data order, sampling and initialisation.")
    steps: Positive = Field(100, description="Number of GRPO steps (one fresh rollout each).")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="`auto` means cpu only on a machine with no NVIDIA device at all."
    )
    threads: Natural = Field(0, description="CPU threads a trainer rank; 0 shares the cores among the ranks.")
    dist_timeout: Seconds = Field(600.0, description="Time-out of one collective inside a trainer phase.")
    hang_timeout: Seconds = Field(1800.0, description="No progress for this long ends the attempt (watchdog).")
    start_timeout: Seconds = Field(900.0, description="Time-out from the start of an attempt to its first progress.")
    max_attempts: Positive = Field(5, description="Attempts in a row without a new checkpoint before giving up.")
    backoff: Seconds = Field(5.0, description="Pause before the second attempt; doubles each time.")
    max_hours: float | None = Field(None, gt=0, description="Save and stop after this many hours of this start.")
    until: str | None = Field(None, description="Save and stop at this local time (ISO 8601).")
    dump_rollouts: bool = Field(True, description="Write every trajectory to `rollouts/step_N.jsonl.zst`.")
    deterministic: bool = Field(
        True, description="Bit-equal continuation on a CPU; on cards as far as their kernels go (attention does not)."
    )

    @field_validator("until")
    @classmethod
    def _until_is_a_time(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                datetime.fromisoformat(value)
            except ValueError:
                raise ValueError(f"{value!r} is no ISO 8601 time, for example 2026-03-31T08:00 (local time)") from None
        return value


class ModelConfig(Section):
    """The model to train."""

    path: str = identity(description="Directory with config.json and safetensors, or `hf:NAME`, `modelscope:NAME`.")
    revision: str | None = identity(None, description="Revision of a hub model.")
    dtype: Literal["bfloat16", "float32"] = identity("bfloat16", description="Type of weights and activations.")


class EvalSet(Section):
    """One evaluation set and its protocol."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$", description="Name in the metrics: `eval/NAME`.")
    path: str = Field(description="Data file, jsonl or parquet.")
    samples: Positive = Field(1, description="Samples a problem.")
    limit: Positive | None = Field(None, description="Use only the first so many problems.")
    temperature: NonNegative = Field(1.0, description="Sampling temperature; 0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling.")
    max_new_tokens: Positive | None = Field(None, description="Longest answer; default that of the rollout.")


class DataConfig(Section):
    """Prompts: where they are and how they are rendered."""

    train: str = identity(description="Training data, jsonl or parquet.")
    prompt_key: str | None = identity(None, description="Column of the prompt; default `prompt` or `problem`.")
    label_key: str | None = identity(None, description="Column of the answer; default `label` or `answer`.")
    limit: Positive | None = identity(None, description="Use only the first so many training rows.")
    system: str | None = identity(None, description="System prompt put before every prompt.")
    prompt_suffix: str = identity("", description="Added where a prompt asks neither for a box nor `Answer:`.")
    chat_template_kwargs: dict[str, Any] = identity(
        default_factory=dict, description="Passed to the chat template, for example `enable_thinking: true`."
    )
    max_prompt_tokens: Positive = identity(1024, description="Longest rendered prompt.")
    overlong_prompts: Literal["error", "drop"] = identity("error", description="What to do with longer prompts.")
    shuffle: bool = identity(True, description="Shuffle the prompts anew in every epoch.")
    allow_eval_overlap: bool = Field(False, description="Allow evaluation prompts among the training prompts.")


class PartialConfig(Section):
    """Partial rollout: what an abort cut off goes on in a later step."""

    enabled: bool = identity(False, description="Keep aborted samples and continue them in the next step.")
    max_staleness: Positive = identity(
        2, description="Drop a partial sample whose oldest token is more than so many weight versions old."
    )


class DynamicSamplingConfig(Section):
    """Drop groups without variance and sample others in their place."""

    enabled: bool = identity(False, description="Refill the batch with groups whose rewards differ.")
    max_rounds: Positive = identity(3, description="Rounds before the batch is taken as it is.")


class RolloutConfig(Section):
    """Generation."""

    engine: Literal["embedded", "sglang"] = Field("embedded", description="Which engine generates.")
    engines: Positive = Field(1, description="Number of engines (sglang: servers).")
    tp: Positive = Field(1, description="Tensor parallel size of one engine.")
    dtype: Literal["bfloat16", "float32"] | None = Field(None, description="Engine type; default the model's.")
    prompts_per_step: Positive = identity(32, description="Groups in a batch.")
    group_size: Positive = identity(8, description="Samples a prompt.")
    max_new_tokens: Positive = identity(1024, description="Longest answer in training.")
    temperature: float = identity(1.0, gt=0, description="Sampling temperature in training.")
    over_sampling: float = identity(
        1.0,
        ge=1.0,
        description="Start this many times the groups and cut the tail by abort once enough are done.",
    )
    dynamic_sampling: DynamicSamplingConfig = Field(default_factory=DynamicSamplingConfig)
    partial: PartialConfig = Field(default_factory=PartialConfig)
    overlong_filter: bool = identity(False, description="Leave truncated answers out of the loss.")
    token_timeout: Seconds = Field(300.0, description="An engine without a new token or an answer for so long hangs.")
    retries: Natural = Field(2, description="Times a request may move to another engine before it counts as failed.")
    start_timeout: Seconds = Field(900.0, description="Deadline for the start of an engine.")
    slots: Positive = Field(64, description="Embedded engine: sequences decoded at once (fixed).")
    verify_weights_every: Natural = Field(0, description="Compare engine and trainer checksums every so many pushes.")
    bucket_mib: Positive = Field(256, description="Size of a weight-update bucket in MiB.")
    sglang: dict[str, Any] = Field(default_factory=dict, description="Any option of SGLang's server, by its name.")


class RewardConfig(Section):
    """How an answer is judged."""

    function: str = identity("math_boxed", description="Built-in name or `package.module:name`.")
    options: dict[str, Any] = identity(default_factory=dict, description="Options of the reward function.")
    answer_scope: Literal["after_think", "whole", "auto"] = identity(
        "auto", description="Where the box may stand; `auto` is decided once from the rendered chat template."
    )
    timeout_s: Seconds = Field(2.0, description="Hard limit for one answer in a worker process.")
    workers: Positive = Field(2, description="Worker processes.")
    memory_limit_mb: Positive = Field(1024, description="Memory limit of one worker.")
    max_chars: Positive = Field(200_000, description="Longer answers are `too_long`.")


class KlConfig(Section):
    """KL to a frozen reference model."""

    coef: NonNegative = identity(0.0, description="Weight in the loss; 0 costs no pass and no memory.")
    estimator: Literal["k1", "k2", "k3"] = identity("k3", description="Estimator (Schulman 2020).")


class AlgorithmConfig(Section):
    """Advantages, loss and corrections."""

    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp"] = identity("grpo", description="Advantage estimator.")
    ratio: Literal["token", "gspo", "cispo"] = identity("token", description="Importance ratio.")
    clip_low: Fraction = identity(0.2, description="Lower clip range of the ratio; 1 is none.")
    clip_high: NonNegative = identity(0.28, description="Upper clip range of the ratio.")
    dual_clip: float | None = identity(None, gt=1.0, description="Dual-clip bound for negative advantages.")
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = identity(
        "token_mean", description="How token losses are added up over the whole global batch."
    )
    entropy_coef: NonNegative = identity(0.0, description="Entropy bonus; 0 costs nothing.")
    kl: KlConfig = Field(default_factory=KlConfig)
    correction: Literal["none", "tis", "mis", "icepop"] = identity(
        "none", description="Correction of the train/rollout log-prob mismatch."
    )
    correction_cap: float = identity(2.0, gt=0, description="Cap (tis, mis) or upper bound (icepop) of the weight.")
    correction_floor: NonNegative = identity(0.5, description="Lower bound of the weight (icepop).")


class OptimizerConfig(Section):
    """Optimizer and its schedule."""

    kind: Literal["adamw", "sr_adamw"] = identity(
        "adamw", description="fp32-master AdamW, or bf16 stochastic-rounding AdamW (8 bytes a parameter)."
    )
    lr: float = identity(1e-6, gt=0, description="Peak learning rate.")
    min_lr_ratio: Fraction = identity(0.0, description="Final learning rate as a share of the peak.")
    schedule: Literal["constant", "linear", "cosine"] = identity("constant", description="After the warm-up.")
    warmup_steps: Natural = identity(0, description="Optimizer updates of linear warm-up.")
    decay_steps: Positive | None = identity(
        None, description="Length of the schedule in optimizer updates; default all of the run's."
    )
    betas: tuple[Beta, Beta] = identity((0.9, 0.98), description="Adam's betas.")
    eps: float = identity(1e-8, gt=0, description="Adam's epsilon.")
    weight_decay: NonNegative = identity(0.0, description="Decoupled weight decay (not on norms and biases).")
    grad_clip: NonNegative = identity(1.0, description="Global gradient norm; 0 is off.")

    @property
    def follows_run_steps(self) -> bool:
        """The learning rate of a step depends on how many steps the run has."""
        return self.schedule != "constant" and self.decay_steps is None


class TrainConfig(Section):
    """The training step."""

    updates_per_rollout: Positive = identity(1, description="Optimizer steps a rollout.")
    max_tokens_per_microbatch: Positive = Field(4096, description="Packing cap; a longer sequence goes alone.")
    recompute: bool = Field(True, description="Full activation recompute.")
    logprob_chunk: Positive = Field(512, description="Tokens a chunk of the fused log-prob.")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)


class ParallelConfig(Section):
    """Layout of the trainer."""

    tp: Positive = Field(1, description="Tensor parallel size.")
    dp: Positive = Field(1, description="Data parallel size.")
    sequence_parallel: bool = Field(True, description="Sequence parallelism inside the TP group (tp > 1).")

    @property
    def world_size(self) -> int:
        return self.tp * self.dp


class MemoryConfig(Section):
    """Sharing a card between engine and trainer."""

    gpu_gib: float | None = Field(None, gt=0, description="Memory of a card for `plan`; default the real one's.")
    backup_dir: Path | None = Field(None, description="Put what sleeps on disk here instead of host RAM.")
    expandable_segments: bool = Field(False, description="CUDA allocator option; upstream savers refuse it.")
    kv_dtype: Literal["auto", "fp8_e5m2", "fp8_e4m3"] = Field("auto", description="Type of the engine's KV cache.")
    tolerance_mib: Positive = Field(512, description="Resident bytes may exceed the ledger's table by this.")


class CheckpointConfig(Section):
    """What is saved and what is kept."""

    every: Positive = Field(10, description="Save when (step + 1) % every == 0, and at the end.")
    keep_last: Positive = Field(2, description="Newest checkpoints kept.")
    keep_best: Natural = Field(0, description="Best checkpoints kept by `best_metric`.")
    best_metric: str | None = Field(None, description="Evaluation metric, for example `eval/aime`.")
    keep_every: Natural = Field(0, description="Every so many-th step is kept for good; 0 is off.")
    export_best: bool = Field(False, description="At the end, write the best checkpoint to `hf/best`.")
    min_free_gib: NonNegative = Field(1.0, description="Free space that must remain after a save.")


class EvalConfig(Section):
    """Evaluation."""

    every: Natural = Field(0, description="Evaluate when (step + 1) % every == 0; 0 is never.")
    at_start: bool = Field(True, description="Evaluate the untouched model first.")
    baseline_repeats: Positive = Field(1, description="Evaluations of the untouched model (noise band).")
    sets: list[EvalSet] = Field(default_factory=list, description="Evaluation sets.")


Action = Literal["off", "warn", "skip", "stop", "rollback"]


class RolloutGuards(Section):
    """After the rollout."""

    failed_ratio: Action = Field("skip", description="Share of infrastructure failures over its limit.")
    failed_ratio_limit: Fraction = Field(0.2, description="Limit of `failed_ratio`.")
    truncated_ratio: Action = Field("warn", description="Share of truncated answers over its limit.")
    truncated_ratio_limit: Fraction = Field(0.9, description="Limit of `truncated_ratio`.")
    repetition: Action = Field("warn", description="Share of degenerate repetition over its limit.")
    repetition_limit: Fraction = Field(0.5, description="Limit of `repetition`.")
    equal_rewards: Action = Field("warn", description="No group of the batch has rewards that differ.")


class StepGuards(Section):
    """After the step, before anything is saved."""

    window: Positive = Field(10, description="Steps of a trend.")
    reward_collapse: Action = Field(
        "warn", description="Mean reward falls below a share of its best window, by over 4 standard errors."
    )
    reward_collapse_ratio: Fraction = Field(0.5, description="That share.")
    entropy_rise: Action = Field("warn", description="Entropy rises as a trend over the window.")
    entropy_rise_factor: float = Field(1.5, gt=1, description="Last over first value of the trend.")
    entropy_collapse: Action = Field("warn", description="Entropy falls as a trend over the window.")
    entropy_collapse_factor: float = Field(0.2, gt=0, lt=1, description="Last over first value of the trend.")
    logprob_mismatch: Action = Field("warn", description="Train/rollout log-prob difference grows.")
    logprob_mismatch_factor: float = Field(3.0, gt=1, description="Times its earlier value (trend, and resume).")
    grad_norm_spike: Action = Field("warn", description="Gradient norm over its running median.")
    grad_norm_spike_factor: float = Field(20.0, gt=1, description="Times the median.")
    non_finite: Action = Field("warn", description="Loss or gradient norm is not finite; the update is left out.")
    non_finite_limit: Positive = Field(3, description="Such steps in a row that stop the run all the same.")


class GuardsConfig(Section):
    """What stops a run from being lost."""

    rollout: RolloutGuards = Field(default_factory=RolloutGuards)
    step: StepGuards = Field(default_factory=StepGuards)
    max_rollbacks: Natural = Field(2, description="Rollbacks before the run stops.")


class Config(Section):
    """A whole run."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    guards: GuardsConfig = Field(default_factory=GuardsConfig)

    @property
    def run_dir(self) -> Path:
        return self.run.dir or Path("runs") / self.run.name

    @model_validator(mode="after")
    def _rules(self) -> Config:
        for broken, message in cross_field_rules(self):
            if broken:
                raise ValueError(message)
        return self
