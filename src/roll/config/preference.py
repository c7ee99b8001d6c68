"""Methods of preference learning by name: the loss arguments of each method, and the section `preference`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeAlias, get_args

from pydantic import model_validator

from roll.config.base import Section, option, path_option

__all__ = ["METHODS", "MethodName", "PreferenceLossSection", "PreferenceMethod", "PreferenceSection"]

MethodName: TypeAlias = Literal[
    "dpo",
    "cdpo",
    "robust",
    "dpo_norm",
    "rpo",
    "ipo",
    "hinge",
    "exo",
    "nca",
    "sppo",
    "apo_zero",
    "apo_down",
    "discopop",
    "simpo",
    "cpo",
    "orpo",
    "kto",
]
SettingName: TypeAlias = Literal[
    "beta", "label_smoothing", "margin", "likelihood", "tau", "desirable_weight", "undesirable_weight"
]
_SETTINGS: tuple[SettingName, ...] = get_args(SettingName)
_PAIRWISE_SETTINGS: tuple[SettingName, ...] = ("label_smoothing", "tau")


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceMethod:
    """A preference method: its pairwise loss, with arguments and defaults; see `algorithms.losses.preference`."""

    paper: str
    description: str
    """A short description of the method."""
    pairwise_loss: str = "SigmoidLoss"
    """A class of `algorithms.losses.preference.pairwise`; empty if answers are not compared in pairs (KTO)."""
    pairwise_arguments: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the loss in addition to its settings."""
    defaults: Mapping[SettingName, float]
    """Default values of all settings of the method, from the paper if it has any."""

    @property
    def uses_reference(self) -> bool:
        """True if the method compares the policy with its initial weights."""
        return bool(self.arguments.get("against_reference", True))

    @property
    def compares_pairs(self) -> bool:
        """True if the method learns from pairs of answers; otherwise from single answers, desirable or undesirable."""
        return bool(self.pairwise_loss)


_MEAN_SCORES = {"scores": "mean"}
_MEAN_LOG_PROBS = {"scores": "mean", "against_reference": False}

METHODS: Mapping[MethodName, PreferenceMethod] = {
    "dpo": PreferenceMethod(
        paper="2305.18290",
        description="log-ratios to a reference",
        defaults={"beta": 0.1, "margin": 0.0, "likelihood": 0.0},
    ),
    "cdpo": PreferenceMethod(
        paper="2305.18290",
        description="DPO with a fraction of wrong labels (Mitchell's note, 2023)",
        defaults={"beta": 0.1, "label_smoothing": 0.1, "margin": 0.0, "likelihood": 0.0},
    ),
    "robust": PreferenceMethod(
        paper="2403.00409",
        description="DPO whose loss is unbiased under wrong labels",
        pairwise_arguments={"robust": True},
        defaults={"beta": 0.1, "label_smoothing": 0.1, "margin": 0.0, "likelihood": 0.0},
    ),
    "dpo_norm": PreferenceMethod(
        paper="2411.15124",
        description="DPO on means over tokens, independent of length (Tulu 3)",
        arguments=_MEAN_SCORES,
        defaults={"beta": 5.0, "margin": 0.0, "likelihood": 0.0},
    ),
    "rpo": PreferenceMethod(
        paper="2404.19733",
        description="DPO that keeps the chosen answer likely",
        arguments={"likelihood_mean": "answers"},
        defaults={"beta": 0.1, "margin": 0.0, "likelihood": 1.0},
    ),
    "ipo": PreferenceMethod(
        paper="2310.12036",
        description="a squared distance, which bounds the margin of certain preferences",
        pairwise_loss="SquaredLoss",
        arguments=_MEAN_SCORES,
        defaults={"beta": 0.1, "margin": 0.0, "likelihood": 0.0},
    ),
    "hinge": PreferenceMethod(
        paper="2309.06657",
        description="a hinge on DPO's scores (SLiC, RSO)",
        pairwise_loss="HingeLoss",
        defaults={"beta": 0.1, "margin": 0.0, "likelihood": 0.0},
    ),
    "exo": PreferenceMethod(
        paper="2402.00856",
        description="the reverse KL divergence from the labels",
        pairwise_loss="ExoPairLoss",
        defaults={"beta": 0.1, "label_smoothing": 1e-3, "margin": 0.0, "likelihood": 0.0},
    ),
    "nca": PreferenceMethod(
        paper="2402.05369",
        description="keeps the chosen answer from becoming less likely",
        pairwise_loss="NcaPairLoss",
        defaults={"beta": 0.01, "likelihood": 0.0},
    ),
    "sppo": PreferenceMethod(
        paper="2405.00675",
        description="squared distances to a win and a loss (hard labels)",
        pairwise_loss="SppoHardLoss",
        defaults={"beta": 1e-3, "likelihood": 0.0},
    ),
    "apo_zero": PreferenceMethod(
        paper="2408.06266",
        description="makes the chosen answer more likely; for chosen answers better than the policy's own",
        pairwise_loss="ApoZeroLoss",
        defaults={"beta": 0.1, "likelihood": 0.0},
    ),
    "apo_down": PreferenceMethod(
        paper="2408.06266",
        description="makes both answers less likely; for pairs worse than the policy's own answers",
        pairwise_loss="ApoDownLoss",
        defaults={"beta": 0.1, "likelihood": 0.0},
    ),
    "discopop": PreferenceMethod(
        paper="2406.08414",
        description="a loss that a language model found",
        pairwise_loss="DiscopopLoss",
        defaults={"beta": 0.05, "tau": 0.05, "margin": 0.0, "likelihood": 0.0},
    ),
    "simpo": PreferenceMethod(
        paper="2405.14734",
        description="means over tokens with a margin; no reference",
        arguments=_MEAN_LOG_PROBS,
        defaults={"beta": 2.0, "margin": 1.0, "likelihood": 0.0},
    ),
    "cpo": PreferenceMethod(
        paper="2401.08417",
        description="log-probs and the chosen answer's likelihood; no reference",
        arguments={"against_reference": False},
        defaults={"beta": 0.1, "margin": 0.0, "likelihood": 1.0},
    ),
    "orpo": PreferenceMethod(
        paper="2403.07691",
        description="supervised fine-tuning and an odds ratio at once; no reference",
        pairwise_loss="OddsRatioLoss",
        arguments=_MEAN_LOG_PROBS,
        defaults={"beta": 0.1, "likelihood": 1.0},
    ),
    "kto": PreferenceMethod(
        paper="2402.01306",
        description="single answers, desirable or undesirable",
        pairwise_loss="",
        defaults={"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    ),
}


class PreferenceLossSection(Section):
    """The preference loss. A setting that is omitted has the method's default: see the table of methods."""

    type: MethodName = option("dpo", "Preference method: see the table in docs/post-training.md.")
    beta: float | None = option(
        None, "Factor that converts an answer's score to its reward; for IPO it is tau, and for ORPO lambda.", gt=0
    )
    label_smoothing: float | None = option(None, "Assumed fraction of wrong labels.", ge=0, lt=0.5)
    margin: float | None = option(
        None, "Required excess of the chosen answer's reward over the rejected one's (gamma of SimPO)."
    )
    likelihood: float | None = option(None, "Weight of the chosen answer's negative log-likelihood.", ge=0)
    tau: float | None = option(
        None, "DiscoPOP: temperature of the blend between the logistic and the exponential loss.", gt=0, lt=1
    )
    desirable_weight: float | None = option(None, "KTO: weight of desirable answers.", ge=0)
    undesirable_weight: float | None = option(None, "KTO: weight of undesirable answers.", ge=0)

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        known = METHODS[self.type].defaults
        for name in _SETTINGS:
            if getattr(self, name) is not None and name not in known:
                raise ValueError(f"{self.type} does not support `{name}`; supported settings: {', '.join(known)}")
        return self

    @property
    def method(self) -> PreferenceMethod:
        """The preference method selected by `type`."""
        return METHODS[self.type]

    @property
    def settings(self) -> dict[str, float]:
        """Settings of `PreferenceLoss`, each as configured or with the method's default."""
        return {name: value for name, value in self._resolve_settings().items() if name not in _PAIRWISE_SETTINGS}

    @property
    def pairwise_settings(self) -> dict[str, float]:
        """Settings of the pairwise loss, such as `label_smoothing`; `settings` contains the other settings."""
        return {name: value for name, value in self._resolve_settings().items() if name in _PAIRWISE_SETTINGS}

    def _resolve_settings(self) -> dict[str, float]:
        return {n: d if (own := getattr(self, n)) is None else own for n, d in self.method.defaults.items()}


class PreferenceSection(PreferenceLossSection):
    """The preference loss, and the reference with which answers are compared."""

    reference: Literal["precomputed", "adapters"] = option(
        "precomputed",
        "Source of the reference's log-probs. `precomputed`: a model computes them once for each example, before the "
        "first step, and they are stored in the run directory. `adapters`: every step computes them with the policy "
        "without its LoRA adapters.",
    )
    reference_model: str | None = path_option(
        None, "Model of the reference; by default the policy's initial model.", min_length=1
    )

    @model_validator(mode="after")
    def _check_one_reference(self) -> Self:
        if self.reference == "adapters" and self.reference_model is not None:
            raise ValueError(
                "with reference `adapters`, the reference is the policy without its adapters: remove "
                "`reference_model`, or set reference to `precomputed`"
            )
        if self.reference_model is not None and not self.method.uses_reference:
            raise ValueError(f"{self.type} does not use a reference: remove reference_model")
        return self
