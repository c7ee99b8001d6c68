"""What the check of an environment finds: one that keeps the protocol, and one for each rule that is broken."""

from __future__ import annotations

import itertools
import random
import re
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from roll.envs import ENVS, conformance
from roll.envs.conformance import check, check_object
from roll.errors import ConfigError, UserError


class Good:
    """Guess one of three; everything in order."""

    def __init__(self) -> None:
        self.rng = random.Random(0)

    def reset(self, seed: int | None = None) -> tuple[Any, ...]:
        self.rng = random.Random(seed)
        self.secret, self.turn = self.rng.randint(1, 3), 0
        return "Guess 1, 2 or 3.", {"state": "start"}

    def step(self, action: str) -> tuple[Any, ...]:
        self.turn += 1
        return (
            f"No, {self.secret}.",
            float(action == str(self.secret)),
            self.turn == 3,
            False,
            {"state": str(self.turn)},
        )

    def sample_random_action(self) -> str:
        return random.choice("123")

    def spawn(self, same_state: bool = False) -> Any:
        raise NotImplementedError


class GoodLater(Good):
    async def reset(self, seed: int | None = None) -> tuple[Any, ...]:  # type: ignore[override]
        return super().reset(seed)

    async def step(self, action: str) -> tuple[Any, ...]:  # type: ignore[override]
        return super().step(action)


class OldReset(Good):
    def reset(self, seed: int | None = None) -> Any:
        return super().reset(seed)[0]


class NoSeed(Good):
    def reset(self) -> Any:  # type: ignore[override]
        return super().reset(0)


class OldStep(Good):
    def step(self, action: str) -> Any:
        observation, reward, done, _, info = super().step(action)
        return observation, reward, done, info


class NoText(Good):
    def step(self, action: str) -> Any:
        return ([1, 2], *super().step(action)[1:])


class NotANumber(Good):
    def step(self, action: str) -> Any:
        observation, _, *rest = super().step(action)
        return observation, float("nan"), *rest


class TextAsFlag(Good):
    def step(self, action: str) -> Any:
        observation, reward, ended, _, info = super().step(action)
        return observation, reward, str(ended), False, info


class NoInfo(Good):
    def step(self, action: str) -> Any:
        return (*super().step(action)[:4], None)


class Fragile(Good):
    def step(self, action: str) -> Any:
        int(action)
        return super().step(action)


class GlobalRandom(Good):
    def reset(self, seed: int | None = None) -> Any:
        random.seed(seed)
        return super().reset(seed)

    def step(self, action: str) -> Any:
        _, *rest = super().step(action)
        return f"{random.random()}", *rest


class Remembers(Good):
    episodes = 0

    def reset(self, seed: int | None = None) -> Any:
        self.episodes += 1
        started, info = super().reset(seed)
        return f"{started} Episode {self.episodes}.", info


class Quadratic(Good):
    def step(self, action: str) -> Any:
        re.search(r"(a|b| )*c", action[:60_000]) if action.startswith("a b") else None
        if action.startswith("9999"):
            time.sleep(0.02 if len(action) > 5_000 else 0.0)
        return super().step(action)


class ForgetfulCopy(Good):
    def spawn(self, same_state: bool = False) -> Any:
        twin = type(self)()
        twin.reset(0)
        twin.secret += 1
        return twin


class NeverEnds(Good):
    def step(self, action: str) -> Any:
        observation, reward, *_ = super().step(action)
        return observation, reward, False, False, {}


class WrongArgument(Good):
    def reset(self, seed: int | None = None) -> Any:
        return super().reset(len(seed))  # type: ignore[arg-type]


class Leaves(Good):
    def step(self, action: str) -> Any:
        raise SystemExit(2)


BROKEN = {
    OldReset: ("`reset(seed)` returns an observation and information", "return `observation, info`"),
    NoSeed: ("`reset(seed)` returns an observation and information", "accept the argument `seed=None`"),
    OldStep: (
        "`step(action)` returns `(observation, reward, terminated",
        "with an old interface, `done` as `terminated`",
    ),
    NoText: ("`step(action)` returns", "return a string, an image"),
    NotANumber: ("a reward must be a finite number", "return a float"),
    TextAsFlag: ("`terminated` must be True or False", "return `bool(terminated)`"),
    NoInfo: ("`step(action)` returns", "return `{}`"),
    Fragile: ("`step(action)` returns", "an exception is treated as an infrastructure error"),
    WrongArgument: ("`reset(seed)` returns", "an exception is treated as an infrastructure error"),
    Leaves: ("`step(action)` returns", "an exception is treated as an infrastructure error"),
    GlobalRandom: ("identical seeds and actions produce identical episodes", "do not use a global generator"),
    Remembers: ("identical seeds and actions produce identical episodes", "is created in `reset`"),
    ForgetfulCopy: ("`spawn(same_state=True)` returns a copy in the same state", "copy.deepcopy"),
}


@pytest.mark.parametrize("kind", [Good, GoodLater])
def test_env_conformance_an_environment_that_keeps_the_protocol_has_no_findings(kind: type) -> None:
    assert check_object(kind) == []


@pytest.mark.parametrize("kind", BROKEN)
def test_env_conformance_a_broken_rule_is_named_with_the_way_to_mend_it(kind: type) -> None:
    rule, mend = BROKEN[kind]
    fatal = [finding for finding in check_object(kind) if finding.fatal]
    assert any(finding.rule.startswith(rule) and mend in finding.remedy for finding in fatal), fatal
    assert len({finding.rule for finding in fatal}) == 1


@pytest.mark.parametrize(
    ("image", "behavior"),
    [
        (np.zeros((4, 4, 3), np.float32), "cannot be encoded: the image is an array of float32 with shape (4, 4, 3)"),
        (b"<svg/>", "cannot be decoded: the image is not an image in a supported format"),
    ],
)
def test_env_conformance_images_are_decoded(image: Any, behavior: str) -> None:
    class Shows(Good):
        def reset(self, seed: int | None = None) -> Any:
            observation, info = super().reset(seed)
            return (observation, image), info

    (finding,) = [finding for finding in check_object(Shows) if finding.fatal]
    assert f"an observation with an image that {behavior}" in finding.behavior
    assert "Pillow" in finding.remedy


def test_env_conformance_what_is_only_missing_is_advice() -> None:
    class Bare:
        def __init__(self) -> None:
            self.lock = __import__("threading").Lock()

        def reset(self, seed: int | None = None) -> Any:
            return "hello", {}

        def step(self, action: str) -> Any:
            return "again", 0.0, False, False, {}

    findings = check_object(Bare)
    assert not any(finding.fatal for finding in findings)
    assert [finding.rule[:25] for finding in findings] == [
        "`sample_random_action()` ",
        '`info["state"]` names the',
        "different seeds produce d",
        "episodes end",
        "an environment can be pic",
    ]


@pytest.mark.parametrize("paused", [0, 1, 12])
def test_env_conformance_a_machine_that_pauses_once_is_no_slow_environment(
    monkeypatch: pytest.MonkeyPatch, paused: int
) -> None:
    looks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: 5.0 * (next(looks) > 2 * paused))
    monkeypatch.setattr(conformance, "time", clock)
    assert check_object(Good) == []


def test_env_conformance_slow_parsing_and_hangs_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "_SLOW_CALL_S", 0.01)
    slow = [finding for finding in check_object(Quadratic) if "grows at most linearly" in finding.rule]
    assert slow and "took" in slow[0].behavior
    monkeypatch.setattr(conformance, "_TIME_LIMIT_S", 0.2)

    class Hangs(Good):
        def step(self, action: str) -> Any:
            while action.startswith("xx"):
                try:
                    len(action)
                except Exception:
                    continue
            return super().step(action)

    hung = [finding for finding in check_object(Hangs) if finding.fatal]
    assert hung and "did not end within 0.2 s" in hung[0].behavior and "xxx" in hung[0].behavior

    class AlwaysHangs(Good):
        def step(self, action: str) -> Any:
            time.sleep(9)

    (once,) = check_object(AlwaysHangs)  # no other rule waits for it again
    assert once.remedy == "check the environment for an endless loop"


@pytest.mark.parametrize("name", [name for name in ENVS if name.endswith(("-easy", "-slippery", "guess_number"))])
def test_env_conformance_the_shipped_environments_keep_the_protocol(name: str) -> None:
    assert [str(finding) for finding in check(name, num_seeds=1) if finding.fatal] == []


def test_env_conformance_what_cannot_be_built_is_the_users_to_mend() -> None:
    with pytest.raises(ConfigError, match="unknown environment"):
        check("nothing")

    def build() -> Any:
        raise OSError("no such device")

    ENVS["mine:Broken"] = ENVS["guess_number"].__class__(id="mine:Broken", entry_point=build, options={})
    try:
        with pytest.raises(UserError, match="'mine:Broken' cannot be created: OSError: 'no such device'"):
            check("mine:Broken")
    finally:
        ENVS.pop("mine:Broken")
