"""Keys of verl for learning from rewards: advantages, loss, KL, critic, corrections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.cli.migration.rules import (
    LibraryValues,
    Rule,
    UnsupportedValueError,
    companion_rule,
    conversion_rule,
    renamed_key_rule,
    unsupported_key_rule,
)

__all__ = ["LOSS_RULES"]

_ACTOR = "actor_rollout_ref.actor"
_KL_SETTINGS = {
    "kl": "k1",
    "k1": "k1",
    "abs": "absolute",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
    "full": "full",
}
_ADVANTAGE_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "gae": {"estimator": "gae", "mean": "none", "std": "none", "whiten": "token"},
    "grpo": {"mean": "group", "std": "group"},
    "grpo_vectorized": {"mean": "group", "std": "group"},
    "rloo": {"mean": "leave_one_out", "std": "none"},
    "rloo_vectorized": {"mean": "leave_one_out", "std": "none"},
    "opo": {"mean": "length_weighted", "std": "none"},
    "remax": {"estimator": "token", "mean": "greedy", "std": "none"},
    "reinforce_plus_plus": {"estimator": "token", "mean": "none", "std": "none", "whiten": "token"},
    "reinforce_plus_plus_baseline": {"mean": "group", "std": "none", "whiten": "token"},
}
_AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "constant_length",
}


def _convert_advantage(values: LibraryValues) -> Mapping[str, Any]:
    kind = values.algorithm.adv_estimator
    if kind not in _ADVANTAGE_SETTINGS:
        raise UnsupportedValueError(
            f"adv_estimator {kind} is not supported (supported: {', '.join(_ADVANTAGE_SETTINGS)}); the converted file "
            "has GRPO's estimator"
        )
    found: dict[str, Any] = dict(_ADVANTAGE_SETTINGS[kind])
    if kind.startswith("grpo") and not values.algorithm.norm_adv_by_std_in_grpo:
        found["std"] = "none"
    if kind in ("gae", "reinforce_plus_plus"):
        found["gamma"] = float(values.algorithm.gamma)
    if kind == "gae":
        found["gae_lambda"] = float(values.algorithm.lam)
    found = {f"algorithm.advantage.{name}": value for name, value in found.items()}
    if kind == "gae":
        found |= {
            "algorithm.critic.learning_rate": float(values.critic.optim.lr),
            "algorithm.critic.value_clip": float(values.critic.cliprange_value),
            "algorithm.critic.warmup_steps": int(values.trainer.critic_warmup),
            "algorithm.critic.num_epochs": int(values.critic.ppo_epochs or values[f"{_ACTOR}.ppo_epochs"]),
        }
        if values.critic.model.path:
            found["algorithm.critic.model"] = values.critic.model.path
    return found


def _convert_gate(values: LibraryValues) -> Mapping[str, Any]:
    clip = float(values[f"{_ACTOR}.clip_ratio"])
    low, high = values[f"{_ACTOR}.clip_ratio_low"], values[f"{_ACTOR}.clip_ratio_high"]
    low, high = (clip if one is None else float(one) for one in (low, high))
    mode, bound = values[f"{_ACTOR}.policy_loss.loss_mode"], float(values[f"{_ACTOR}.clip_ratio_c"])
    clipped = {"type": "min_clip", "low": low, "high": high}
    forms: Mapping[str, Mapping[str, Any]] = {
        "vanilla": {"algorithm.gate": {**clipped, "type": "dual_clip", "bound": bound}},
        "gspo": {"algorithm.gate": clipped, "algorithm.ratio.level": "sequence_token"},
        "gpg": {"algorithm.gate": {"type": "log_prob"}},
        "cispo": {"algorithm.gate": {"type": "stop_gradient", "lower": 1 - low, "upper": 1 + high}},
        "sapo": {
            "algorithm.gate": {
                "type": "soft",
                "tau_positive": float(values[f"{_ACTOR}.tau_pos"]),
                "tau_negative": float(values[f"{_ACTOR}.tau_neg"]),
            }
        },
    }
    if mode not in forms:
        raise UnsupportedValueError(
            f"loss_mode {mode} is not supported (supported: {', '.join(forms)}); the converted file has PPO's clip "
            "at 0.2"
        )
    return forms[mode]


def _convert_aggregation(value: str, values: LibraryValues) -> str:
    if value == "seq-mean-token-sum-norm" and values[f"{_ACTOR}.loss_scale_factor"] is not None:
        raise UnsupportedValueError(
            "loss_scale_factor is not supported: the converted file divides by max_response_length"
        )
    if values[f"{_ACTOR}.policy_loss.loss_mode"] in ("gspo", "sapo"):
        return "sequence_mean"
    return _AGGREGATIONS[value]


def _convert_kl(values: LibraryValues) -> Mapping[str, Any]:
    in_loss, in_reward = values[f"{_ACTOR}.use_kl_loss"], values.algorithm.use_kl_in_reward
    if in_loss and in_reward:
        raise UnsupportedValueError(
            "KL penalties in both the loss and the reward are not supported; the converted file has no KL penalty"
        )
    if in_loss:
        estimator, coefficient = values[f"{_ACTOR}.kl_loss_type"], values[f"{_ACTOR}.kl_loss_coef"]
        apply_to = "loss"
    elif in_reward:
        estimator, coefficient = values.algorithm.kl_penalty, values.algorithm.kl_ctrl.kl_coef
        apply_to = "reward"
    else:
        return {}
    if estimator not in _KL_SETTINGS:
        raise UnsupportedValueError(
            f"estimator {estimator} is not supported (supported: {', '.join(_KL_SETTINGS)}); the converted file "
            "has no KL penalty"
        )
    found = {"coefficient": float(coefficient), "estimator": _KL_SETTINGS[estimator], "apply_to": apply_to}
    if in_reward and values.algorithm.kl_ctrl.type == "adaptive":
        found |= {
            "target": float(values.algorithm.kl_ctrl.target_kl),
            "horizon": int(values.algorithm.kl_ctrl.horizon),
        }
    return {f"algorithm.kl.{name}": value for name, value in found.items()}


def _convert_correction(values: LibraryValues) -> Mapping[str, Any]:
    section = "algorithm.rollout_correction"
    level = values[f"{section}.rollout_is"]
    bypassed = values[f"{section}.bypass_mode"]
    found: dict[str, Any] = {"algorithm.ratio.against": "rollout"} if bypassed else {}
    if level is None or bypassed:
        return found | {"algorithm.correction.upper": None}
    return found | {
        "algorithm.correction.level": level,
        "algorithm.correction.upper": float(values[f"{section}.rollout_is_threshold"]),
    }


def _convert_filters(values: LibraryValues) -> Mapping[str, Any]:
    if not values.algorithm.filter_groups.enable:
        return {}
    metric = values.algorithm.filter_groups.metric
    batches = int(values.algorithm.filter_groups.max_num_gen_batches or 0)
    found = {
        "skip_zero_variance": True,
        "refill": True,
        "metric": "accuracy" if metric == "acc" else "reward",
        "max_refills": max(1, batches - 1) if batches > 0 else 10**6,
    }
    return {f"algorithm.filters.{name}": value for name, value in found.items()}


def _convert_overlong(values: LibraryValues) -> Mapping[str, Any]:
    if not values.reward_model.overlong_buffer.enable:
        return {}
    return {
        "algorithm.reward.overlong_buffer": int(values.reward_model.overlong_buffer.len),
        "algorithm.reward.overlong_penalty": float(values.reward_model.overlong_buffer.penalty_factor),
    }


def _build_companion_rules(to: tuple[str, ...], note: str, keys: Mapping[str, Any]) -> list[Rule]:
    return [companion_rule(key, default, to, note) for key, default in keys.items()]


_ADVANTAGE_KEYS = ("algorithm.advantage.estimator", "algorithm.advantage.mean", "algorithm.advantage.std")
_CRITIC_KEYS = ("algorithm.critic",)
_KL_KEYS = ("algorithm.kl.coefficient", "algorithm.kl.estimator", "algorithm.kl.apply_to")
_CORRECTION_KEYS = ("algorithm.correction.level", "algorithm.correction.upper", "algorithm.ratio.against")
_REFILL_KEYS = ("algorithm.filters.refill", "algorithm.filters.metric", "algorithm.filters.max_refills")

LOSS_RULES: list[Rule] = [
    conversion_rule(
        "algorithm.adv_estimator", "gae", _ADVANTAGE_KEYS, _convert_advantage, "`gae` also sets the critic's keys"
    ),
    *_build_companion_rules(
        ("algorithm.advantage",),
        "with adv_estimator",
        {"algorithm.norm_adv_by_std_in_grpo": True, "algorithm.gamma": 1.0, "algorithm.lam": 1.0},
    ),
    *_build_companion_rules(
        _CRITIC_KEYS,
        "with adv_estimator gae",
        {
            "critic.optim.lr": 1e-5,
            "critic.cliprange_value": 0.5,
            "trainer.critic_warmup": 0,
            "critic.ppo_epochs": None,
            "critic.model.path": None,
        },
    ),
    conversion_rule(
        f"{_ACTOR}.policy_loss.loss_mode", "vanilla", ["algorithm.gate"], _convert_gate, "verl's own clip is dual"
    ),
    companion_rule(
        f"{_ACTOR}.clip_ratio",
        0.2,
        ["algorithm.gate"],
        "only if clip_ratio_low or clip_ratio_high is null, as in verl",
    ),
    *_build_companion_rules(
        ("algorithm.gate",),
        "with policy_loss.loss_mode",
        {
            f"{_ACTOR}.clip_ratio_low": 0.2,
            f"{_ACTOR}.clip_ratio_high": 0.2,
            f"{_ACTOR}.clip_ratio_c": 3.0,
            f"{_ACTOR}.tau_pos": 1.0,
            f"{_ACTOR}.tau_neg": 1.05,
        },
    ),
    *(
        unsupported_key_rule(f"{_ACTOR}.policy_loss.{name}", default, "this loss is not supported")
        for name, default in (
            ("clip_cov_ratio", 0.0002),
            ("clip_cov_lb", 1.0),
            ("clip_cov_ub", 5.0),
            ("kl_cov_ratio", 0.0002),
            ("ppo_kl_coef", 0.1),
        )
    ),
    renamed_key_rule(
        f"{_ACTOR}.loss_agg_mode",
        "token-mean",
        "algorithm.aggregation",
        _convert_aggregation,
        "gspo and sapo: sequence_mean",
    ),
    companion_rule(f"{_ACTOR}.loss_scale_factor", None, ["algorithm.aggregation"], "with loss_agg_mode"),
    renamed_key_rule(f"{_ACTOR}.entropy_coeff", 0, "algorithm.entropy.coefficient", lambda value, _: float(value)),
    conversion_rule(f"{_ACTOR}.use_kl_loss", False, _KL_KEYS, _convert_kl, "or algorithm.use_kl_in_reward"),
    *_build_companion_rules(
        _KL_KEYS,
        "with use_kl_loss or use_kl_in_reward",
        {
            f"{_ACTOR}.kl_loss_coef": 0.001,
            f"{_ACTOR}.kl_loss_type": "low_var_kl",
            "algorithm.use_kl_in_reward": False,
            "algorithm.kl_penalty": "kl",
            "algorithm.kl_ctrl.kl_coef": 0.001,
            "algorithm.kl_ctrl.type": "fixed",
            "algorithm.kl_ctrl.horizon": 10000,
            "algorithm.kl_ctrl.target_kl": 0.1,
        },
    ),
    conversion_rule(
        "algorithm.rollout_correction.rollout_is",
        None,
        _CORRECTION_KEYS,
        _convert_correction,
        "null: no correction, as in verl",
    ),
    *_build_companion_rules(
        _CORRECTION_KEYS,
        "with rollout_is",
        {
            "algorithm.rollout_correction.rollout_is_threshold": 2.0,
            "algorithm.rollout_correction.bypass_mode": False,
        },
    ),
    unsupported_key_rule(
        "algorithm.rollout_correction.rollout_rs", None, "see algorithm.correction.mask_low, mask_high and veto"
    ),
    unsupported_key_rule(
        "algorithm.rollout_correction.rollout_rs_threshold",
        None,
        "see algorithm.correction.mask_low, mask_high and veto",
    ),
    unsupported_key_rule("algorithm.rollout_correction.loss_type", "ppo_clip", "see algorithm.gate"),
    unsupported_key_rule("algorithm.rollout_correction.rollout_is_batch_normalize", False, "factors are not rescaled"),
    unsupported_key_rule("algorithm.use_pf_ppo", False, "PF-PPO is not supported"),
    conversion_rule(
        "algorithm.filter_groups.enable", False, _REFILL_KEYS, _convert_filters, "dynamic sampling (the recipe dapo)"
    ),
    *_build_companion_rules(
        _REFILL_KEYS,
        "with filter_groups.enable",
        {"algorithm.filter_groups.metric": None, "algorithm.filter_groups.max_num_gen_batches": 0},
    ),
    conversion_rule(
        "reward_model.overlong_buffer.enable",
        False,
        ["algorithm.reward.overlong_buffer", "algorithm.reward.overlong_penalty"],
        _convert_overlong,
        "the recipe dapo",
    ),
    *_build_companion_rules(
        ("algorithm.reward.overlong_buffer", "algorithm.reward.overlong_penalty"),
        "with overlong_buffer.enable",
        {"reward_model.overlong_buffer.len": 0, "reward_model.overlong_buffer.penalty_factor": 1.0},
    ),
    unsupported_key_rule(f"{_ACTOR}.calculate_sum_pi_squared", False, "this baseline is not supported"),
    unsupported_key_rule(f"{_ACTOR}.router_replay.mode", "disabled", "see training.router_replay"),
]
