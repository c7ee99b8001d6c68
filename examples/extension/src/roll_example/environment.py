"""An environment: count down from a number to zero, one number in each turn."""

from random import Random


class Countdown:
    """A countdown from at most `start`. It has GEM's methods `reset` and `step`; observations are strings."""

    def __init__(self, start: int = 5) -> None:
        self.start = start

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, str]]:
        """Begin an episode and return its first observation and info; GiGPO compares turns with the same `state`."""
        self.number = Random(seed).randint(1, self.start)
        return f"Count down from {self.number}. Which number is next?", {"state": str(self.number)}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, str]]:
        """Take the model's answer, and return observation, reward, whether terminated, whether truncated, and info."""
        self.number -= 1
        reward = float(action.strip().strip(".") == str(self.number)) / self.start
        return f"And after {self.number}?", reward, self.number == 0, False, {"state": str(self.number)}
