"""The rules between the fields of a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colocate_grpo.config import AlgorithmConfig, Config, RolloutConfig

# (is broken, message); a message begins with the key to change.
Rule = tuple[bool, str]


def cross_field_rules(c: Config) -> list[Rule]:
    """Every rule between fields."""
    r, t, k, e = c.rollout, c.train, c.checkpoint, c.eval
    names = [s.name for s in e.sets]
    return [
        *_algorithm_rules(c.algorithm, r),
        (r.prompts_per_step % t.updates_per_rollout != 0,
         f"train.updates_per_rollout: {t.updates_per_rollout} must divide "
         f"rollout.prompts_per_step ({r.prompts_per_step})"),
        (r.engine == "embedded" and (r.tp > 1 or r.engines > 1),
         "rollout.engine: the embedded engine is one engine of TP 1 (rollout.engines=1 rollout.tp=1)"),
        (r.engine == "embedded" and bool(r.sglang), "rollout.sglang: given, but rollout.engine is embedded"),
        *_sglang_rules(r.sglang),
        (len(set(names)) < len(names), f"eval.sets: names must differ, got {names}"),
        (e.every > 0 and not e.sets, "eval.every: evaluation is on, but eval.sets is empty"),
        (k.export_best and k.keep_best == 0, "checkpoint.export_best: needs checkpoint.keep_best >= 1"),
        (k.export_best and e.every == 0, "checkpoint.export_best: needs eval.every >= 1, or there is no best"),
        (k.keep_best > 0 and not k.best_metric, "checkpoint.best_metric: needed by keep_best"),
        (k.best_metric is not None and k.best_metric not in [f"eval/{n}" for n in names],
         f"checkpoint.best_metric: {k.best_metric} is none of {[f'eval/{n}' for n in names]}"),
        (k.keep_best > 0 and e.every > 0 and e.every % k.every != 0,
         f"eval.every: {e.every} must be a multiple of checkpoint.every ({k.every}), so that the best can be kept"),
        (t.optimizer.kind == "sr_adamw" and c.model.dtype != "bfloat16",
         "train.optimizer.kind: sr_adamw is for model.dtype bfloat16"),
    ]  # fmt: skip


def _algorithm_rules(a: AlgorithmConfig, r: RolloutConfig) -> list[Rule]:
    return [
        (a.clip_low > a.clip_high, f"algorithm.clip_low: {a.clip_low} must be <= clip_high ({a.clip_high})"),
        (a.correction == "icepop" and a.correction_floor > a.correction_cap,
         f"algorithm.correction_floor: {a.correction_floor} must be <= correction_cap ({a.correction_cap})"),
        (a.correction != "none" and r.partial.enabled,
         f"algorithm.correction: {a.correction} does nothing with rollout.partial.enabled, whose ratios are to the "
         "engine's own log-probs already; allowed: none"),
        (a.dual_clip is not None and a.ratio == "cispo",
         f"algorithm.dual_clip: {a.dual_clip} does nothing with algorithm.ratio=cispo; allowed: null"),
        (r.group_size < 2,
         f"rollout.group_size: one sample a prompt has nothing to be better than ({a.advantage} compares the samples "
         "of a prompt, its advantage would always be 0); allowed: >= 2"),
    ]  # fmt: skip


def _sglang_rules(options: dict[str, Any]) -> list[Rule]:
    """Of SGLang's options, those that `plan` and `doctor` count with."""
    share = options.get("mem_fraction_static", 0.5)
    rules = [
        (not isinstance(share, float) or not 0 < share < 1,
         f"rollout.sglang.mem_fraction_static: {share!r} must be a number between 0 and 1")
    ]  # fmt: skip
    for name in ("max_total_tokens", "context_length", "cuda_graph_max_bs_decode"):
        value = options.get(name, 1)
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        rules.append((not whole, f"rollout.sglang.{name}: {value!r} must be a whole number >= 1"))
    return rules
