"""Your own environment: name the letters of the alphabet that follow a given letter, one in each turn."""

from random import Random


class Letters:
    def __init__(self, length: int = 3) -> None:
        self.length = length

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, str]]:
        self.left = self.length
        self.letter = Random(seed).choice("ABCDEFG")
        return f"Which letter follows {self.letter}? Answer with one letter.", {"state": self.letter}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, str]]:
        self.left -= 1
        right = chr(ord(self.letter) + 1)
        reward = float(action.strip().strip(".").upper() == right) / self.length
        self.letter = right
        return f"And which follows {right}?", reward, self.left == 0, False, {"state": right}
