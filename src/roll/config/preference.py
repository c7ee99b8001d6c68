"""Named methods of preference learning: the composition of each, as data, and its section of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeAlias, get_args

from pydantic import model_validator

from roll.config.base import Section, option, path_option

__all__ = ["METHODS", "Method", "MethodName", "PreferenceLossSection", "PreferenceSection"]

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
Setting: TypeAlias = Literal[
    "beta", "label_smoothing", "margin", "likelihood", "tau", "desirable_weight", "undesirable_weight"
]
_SETTINGS: tuple[Setting, ...] = get_args(Setting)
_FORM_SETTINGS: tuple[Setting, ...] = ("label_smoothing", "tau")


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A named method: the arguments of its loss. `algorithms.losses.preference` has the formulas."""

    paper: str
    about: str
    """What distinguishes the method, in a few words."""
    form: str = "Sigmoid"
    """A class of `algorithms.losses.preference.forms`; empty if answers are not compared in pairs (KTO)."""
    form_arguments: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the loss in addition to its settings."""
    defaults: Mapping[Setting, float]
    """The paper's defaults, if it has any; the keys are all settings that the method has."""

    @property
    def uses_reference(self) -> bool:
        """Whether the method compares the policy with its initial weights."""
        return bool(self.arguments.get("against_reference", True))

    @property
    def compares_pairs(self) -> bool:
        """Whether the method learns from two answers to the same prompt; otherwise from single answers, each wanted
        or not.
        """
        return bool(self.form)


_MEANS = {"scores": "mean"}
_MEANS_ALONE = {"scores": "mean", "against_reference": False}

METHODS: Mapping[MethodName, Method] = {
    "dpo": Method(
        paper="2305.18290", about="log-ratios to a reference", defaults={"beta": 0.1, "margin": 0.0, "likelihood": 0.0}
    ),
    "cdpo": Method(
        paper="2305.18290",
        about="DPO that takes a share of the labels for wrong (Mitchell's note, 2023)",
        defaults={"beta": 0.1, "label_smoothing": 0.1, "margin": 0.0, "likelihood": 0.0},
    ),
    "robust": Method(
        paper="2403.00409",
        about="DPO from which wrong labels are taken out on average",
        form_arguments={"robust": True},
        defaults={"beta": 0.1, "label_smoothing": 0.1, "margin": 0.0, "likelihood": 0.0},
    ),
    "dpo_norm": Method(
        paper="2411.15124",
        about="DPO of means over tokens, so that length does not count (Tulu 3)",
        arguments=_MEANS,
        defaults={"beta": 5.0, "margin": 0.0, "likelihood": 0.0},
    ),
    "rpo": Method(
        paper="2404.19733",
        about="DPO that keeps the chosen answer likely",
        arguments={"likelihood_mean": "answers"},
        defaults={"beta": 0.1, "margin": 0.0, "likelihood": 1.0},
    ),
    "ipo": Method(
        paper="2310.12036",
        about="a squared distance: preferences that are certain do not run away",
        form="Squared",
        arguments=_MEANS,
        defaults={"beta": 0.1, "margin": 0.0, "likelihood": 0.0},
    ),
    "hinge": Method(
        paper="2309.06657",
        about="a hinge on DPO's scores (SLiC, RSO)",
        form="Hinge",
        defaults={"beta": 0.1, "margin": 0.0, "likelihood": 0.0},
    ),
    "exo": Method(
        paper="2402.00856",
        about="the reverse divergence from the labels",
        form="ExoPair",
        defaults={"beta": 0.1, "label_smoothing": 1e-3, "margin": 0.0, "likelihood": 0.0},
    ),
    "nca": Method(
        paper="2402.05369",
        about="keeps the chosen answer from becoming less likely",
        form="NcaPair",
        defaults={"beta": 0.01, "likelihood": 0.0},
    ),
    "sppo": Method(
        paper="2405.00675",
        about="squared distances to a win and a loss (hard labels)",
        form="SppoHard",
        defaults={"beta": 1e-3, "likelihood": 0.0},
    ),
    "apo_zero": Method(
        paper="2408.06266",
        about="makes the chosen answer likelier: it is better than the policy's own",
        form="ApoZero",
        defaults={"beta": 0.1, "likelihood": 0.0},
    ),
    "apo_down": Method(
        paper="2408.06266",
        about="makes both less likely: the policy's own are better",
        form="ApoDown",
        defaults={"beta": 0.1, "likelihood": 0.0},
    ),
    "discopop": Method(
        paper="2406.08414",
        about="a loss that a language model found",
        form="Discopop",
        defaults={"beta": 0.05, "tau": 0.05, "margin": 0.0, "likelihood": 0.0},
    ),
    "simpo": Method(
        paper="2405.14734",
        about="means over tokens with a margin; no reference",
        arguments=_MEANS_ALONE,
        defaults={"beta": 2.0, "margin": 1.0, "likelihood": 0.0},
    ),
    "cpo": Method(
        paper="2401.08417",
        about="log-probs and the chosen answer's likelihood; no reference",
        arguments={"against_reference": False},
        defaults={"beta": 0.1, "margin": 0.0, "likelihood": 1.0},
    ),
    "orpo": Method(
        paper="2403.07691",
        about="supervised fine-tuning and an odds ratio at once; no reference",
        form="OddsRatio",
        arguments=_MEANS_ALONE,
        defaults={"beta": 0.1, "likelihood": 1.0},
    ),
    "kto": Method(
        paper="2402.01306",
        about="single answers, wanted or not",
        form="",
        defaults={"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    ),
}


class PreferenceLossSection(Section):
    """The preference loss. A setting that is omitted has the method's default: see the table of methods."""

    type: MethodName = option("dpo", "The method: see the table in docs/post-training.md.")
    beta: float | None = option(
        None, "What an answer's score is multiplied by to be a reward; IPO's tau, ORPO's lambda.", gt=0
    )
    label_smoothing: float | None = option(None, "Share of the labels that are thought to be wrong.", ge=0, lt=0.5)
    margin: float | None = option(None, "By how much the chosen answer's reward should be greater (SimPO's gamma).")
    likelihood: float | None = option(None, "Weight of the chosen answer's negative log-likelihood.", ge=0)
    tau: float | None = option(None, "Of DiscoPOP: where its two parts meet.", gt=0, lt=1)
    desirable_weight: float | None = option(None, "Of KTO: weight of wanted answers.", ge=0)
    undesirable_weight: float | None = option(None, "Of KTO: weight of the others.", ge=0)

    @model_validator(mode="after")
    def _method_has_settings(self) -> Self:
        known = METHODS[self.type].defaults
        for name in _SETTINGS:
            if getattr(self, name) is not None and name not in known:
                raise ValueError(f"`{name}` means nothing to {self.type}, whose settings are {', '.join(known)}")
        return self

    @property
    def method(self) -> Method:
        """The method with this name."""
        return METHODS[self.type]

    @property
    def settings(self) -> dict[str, float]:
        """Settings of the loss, each as given or with the method's default."""
        return {name: value for name, value in self._all().items() if name not in _FORM_SETTINGS}

    @property
    def form_settings(self) -> dict[str, float]:
        """Settings of the loss's form."""
        return {name: value for name, value in self._all().items() if name in _FORM_SETTINGS}

    def _all(self) -> dict[str, float]:
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
        None, "The reference, where it is not the model that training begins with.", min_length=1
    )

    @model_validator(mode="after")
    def _reference_is_one(self) -> Self:
        if self.reference == "adapters" and self.reference_model is not None:
            raise ValueError(
                "the policy without its adapters is no other model: remove `reference_model`, or `adapters`"
            )
        if self.reference_model is not None and not self.method.uses_reference:
            raise ValueError(f"{self.type} needs no reference: remove `reference_model`")
        return self
