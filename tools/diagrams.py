"""The drawings of the documentation, as SVG:  python tools/diagrams.py

Pages include a drawing's text (`docs/diagrams/NAME.svg`), so that it takes the page's colours, dark or light, and its
words can be selected and searched. Opened by itself, a drawing follows the system's colours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

__all__ = ["DRAWINGS", "Drawing", "drawings", "write_drawings"]

OUT = Path(__file__).resolve().parent.parent / "docs" / "diagrams"
WIDTH = 760
LINE = 17
"""Between two lines of text."""
LETTER = 6.7
"""Width of a letter of 13 units, generously: what a box says must fit in it whatever the font."""
COLOURS = {"blue": "#4f7df3", "green": "#1f9d6b", "orange": "#d9762b", "purple": "#8b5cd6", "grey": "#8a93a2"}
_STYLE = """\
.roll-drawing{width:760px;max-width:100%;height:auto;font:13px system-ui,-apple-system,"Segoe UI",sans-serif}
.roll-drawing text{fill:currentColor}
.roll-drawing .small{font-size:11px}
.roll-drawing .strong{font-weight:650}
.roll-drawing .arrow{fill:none;stroke:currentColor;stroke-width:1.4;stroke-opacity:.75}
.roll-drawing .head{fill:currentColor;fill-opacity:.75}
:root.roll-drawing{color:#1f2328;background:#fff}
@media (prefers-color-scheme:dark){:root.roll-drawing{color:#e6edf3;background:#0d1117}}"""


class Drawing:
    """One drawing, built up piece by piece; x to the right, y downwards, in units of about a pixel."""

    def __init__(self, name: str, height: float, title: str, text: str) -> None:
        self.name, self.height, self.title, self.text = name, height, title, text
        self._parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, lines: Sequence[str] = (), colour: str = "grey") -> None:
        """A box with lines of text in its middle, the first of them strong.

        Raises:
            ValueError: a line is too long for it.
        """
        tint = COLOURS[colour]
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="6" fill="{tint}" fill-opacity=".16" '
            f'stroke="{tint}" stroke-width="1.3"/>'
        )
        top = y + h / 2 - LINE * (len(lines) - 1) / 2 + 4.5
        for number, line in enumerate(filter(None, lines)):
            if len(line) * LETTER > w - 4:
                raise ValueError(f"{self.name}: '{line}' is too long for {w:g}")
            self.say(x + w / 2, top + LINE * number, line, anchor="middle", strong=number == 0)

    def say(
        self, x: float, y: float, line: str, *, anchor: str = "start", small: bool = False, strong: bool = False
    ) -> None:
        """A line of text; `y` is where its letters stand."""
        kinds = " ".join(kind for kind, on in (("small", small), ("strong", strong)) if on)
        marked = f' class="{kinds}"' if kinds else ""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{marked}>{escape(line)}</text>')

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """A line through some points, with a head at its end."""
        (x0, y0), (x1, y1) = points[-2:]
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        ux, uy = (x1 - x0) / length, (y1 - y0) / length
        bx, by = x1 - 8 * ux, y1 - 8 * uy
        path = "L".join(f"{x:g} {y:g}" for x, y in [*points[:-1], (bx, by)])
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        head = " ".join(
            f"{x:.1f},{y:.1f}" for x, y in ((x1, y1), (bx - 4 * uy, by + 4 * ux), (bx + 4 * uy, by - 4 * ux))
        )
        self._parts.append(f'<path class="arrow" d="M{path}"{dash}/><polygon class="head" points="{head}"/>')

    def svg(self) -> str:
        """All of it."""
        ids = f"drawing-{self.name}"
        return "\n".join(
            [
                f'<svg class="roll-drawing" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height:g}" '
                f'role="img" aria-labelledby="{ids}-title {ids}-text">',
                f'<title id="{ids}-title">{escape(self.title)}</title>',
                f'<desc id="{ids}-text">{escape(self.text)}</desc>',
                f"<style>{_STYLE}</style>",
                *self._parts,
                "</svg>",
                "",
            ]
        )


def step() -> Drawing:
    """From prompt to weights."""
    d = Drawing(
        "step",
        292,
        "One step, from prompts to weights",
        "Prompts are sampled and sent to the engine, which answers each prompt several times. Rewards score every "
        "answer when it ends. The advantage of an answer is its reward minus the group's mean, divided by the standard "
        "deviation; groups with equal rewards are filtered out. The trainer takes an optimizer step, and sends the new "
        "weights to the engine, which confirms them.",
    )
    d.box(10, 20, 130, 70, ["prompts", "What is 3 + 4?", "each used once"], "grey")
    d.box(185, 20, 150, 70, ["engine", "8 answers to each,", "with log-probs"], "blue")
    d.box(380, 20, 165, 70, ["rewards", "7 → 1    8 → 0", "as each answer ends"], "green")
    d.box(590, 20, 160, 70, ["groups", "advantage =", "(R − mean) / std"], "orange")
    d.arrow((140, 55), (185, 55))
    d.arrow((335, 55), (380, 55))
    d.arrow((545, 55), (590, 55))
    d.box(590, 140, 160, 54, ["filters", "equal rewards: out"], "grey")
    d.arrow((670, 90), (670, 140))
    d.box(380, 140, 165, 54, ["trainer", "loss → gradient → step"], "purple")
    d.arrow((590, 167), (545, 167))
    d.box(185, 140, 150, 54, ["weight sync", "version v + 1"], "purple")
    d.arrow((380, 167), (335, 167))
    d.arrow((260, 140), (260, 90))
    d.say(268, 120, "every tensor's checksum is confirmed, then a probe", small=True)
    d.box(
        10,
        232,
        740,
        44,
        ["ledger: each draw has one outcome: trained, filtered, failed, expired, or in flight"],
        "grey",
    )
    d.arrow((75, 90), (75, 232), dashed=True)
    d.arrow((670, 194), (670, 232), dashed=True)
    d.arrow((462, 194), (462, 232), dashed=True)
    return d


def asynchronous() -> Drawing:
    """Generation during training."""
    d = Drawing(
        "asynchronous",
        330,
        "Synchronous and asynchronous scheduling, and what staleness is",
        "Synchronous: the engine generates batch 1, waits while the trainer trains on it, then generates batch 2 "
        "with the new weights. Asynchronous with async ratio 1: the engine generates batch 2 while the trainer "
        "trains on batch 1. When batch 2 is trained, the trainer is one version ahead of the policy that generated it, "
        "so its staleness is 1.",
    )
    d.say(10, 22, "synchronous (async_ratio: 0): engine and trainer take turns", strong=True)
    d.say(10, 56, "engine")
    d.say(10, 96, "trainer")
    for number in range(3):
        x = 80 + 220 * number
        d.box(x, 36, 130, 30, [f"batch {number + 1}, by v{number}"], "blue")
        d.box(x + 130, 76, 90, 30, [f"v{number} → v{number + 1}"], "purple")
    d.say(10, 146, "asynchronous (async_ratio: 1): generation runs up to one batch ahead", strong=True)
    d.say(10, 180, "engine")
    d.say(10, 220, "trainer")
    for number in range(5):
        d.box(80 + 132 * number, 160, 130, 30, [f"batch {number + 1}, by v{max(0, number - 1)}"], "blue")
    for number in range(4):
        d.box(212 + 132 * number, 200, 90, 30, [f"v{number} → v{number + 1}"], "purple")
        d.arrow((302 + 132 * number, 215), (340 + 132 * number, 215), (340 + 132 * number, 190))
    d.say(212, 250, "batch 1: staleness 0", small=True)
    for number in range(1, 4):
        d.say(212 + 132 * number, 250, f"batch {number + 1}: staleness 1", small=True)
    d.say(
        10,
        282,
        "staleness = the trainer's version minus the oldest version in the sample; never above ⌈async_ratio⌉.",
    )
    d.say(10, 302, "↑ engines pause while they receive weights; then running answers continue under the new version.")
    return d


def packing() -> Drawing:
    """Rows of tokens."""
    d = Drawing(
        "packing",
        300,
        "Packed rows and shared prefixes",
        "Three answers to one prompt. With padding, each answer has its own row: the prompt, the answer and padding. "
        "Packed, all are in one row: the prompt once, then the three answers. Each answer attends to the prompt and "
        "to itself, but to no other answer, and its positions continue from the prompt's end.",
    )
    d.say(10, 22, "padded: three rows, the prompt in each", strong=True)
    for number, (name, width) in enumerate((("A", 90), ("B", 160), ("C", 50))):
        y = 34 + 32 * number
        d.box(10, y, 130, 26, ["prompt"], "grey")
        d.box(140, y, width, 26, [name], "blue")
        if width < 160:
            d.box(140 + width, y, 160 - width, 26, ["padding" if width < 100 else ""], "orange")
    d.say(10, 168, "packed: one row, with the prompt once", strong=True)
    x = 10.0
    for name, width, first, last in (("prompt", 130, 0, 12), ("A", 90, 13, 21), ("B", 160, 13, 28), ("C", 50, 13, 17)):
        d.box(x, 180, width, 26, [name], "grey" if name == "prompt" else "blue")
        d.say(x + width / 2, 222, f"{first}–{last}", anchor="middle", small=True)
        x += width
    d.say(10, 240, "positions continue from the prompt's end in every answer", small=True)
    d.say(10, 268, "43 tokens go through the network instead of 87; the gradient is the same.")
    d.say(
        10,
        288,
        "Prefixes can form a tree: earlier turns, forks of a conversation, the two answers of a pair.",
    )
    d.say(500, 22, "who attends to whom", strong=True)
    names = ("prompt", "A", "B", "C")
    for row, own in enumerate(names):
        d.say(540, 66 + 34 * row, own, anchor="end", small=True)
        d.say(566 + 44 * row, 40, own, anchor="middle", small=True)
        for column in range(4):
            sees = column in (0, row)
            d.box(546 + 44 * column, 48 + 34 * row, 40, 30, ["✓" if sees else ""], "green" if sees else "grey")
    return d


def layouts() -> Drawing:
    """How ranks divide a model and its work."""
    d = Drawing(
        "layouts",
        338,
        "A layout of eight ranks: data 2 × stages 2 × tensor 2",
        "Two data replicas train on different samples. Each replica has two pipeline stages: the first has the lower "
        "layers, the second the upper layers. Each stage has two tensor ranks, each with half of every weight matrix. "
        "Context parallelism splits the tokens of a row over ranks. Expert parallelism splits the experts of a layer "
        "over existing ranks; it needs no additional ranks.",
    )
    for share in range(2):
        x = 10 + 375 * share
        d.box(x, 30, 365, 150, [], "grey")
        d.say(x + 10, 22, f"replica {share + 1}: samples {'1, 3, 5, …' if share == 0 else '2, 4, 6, …'}", strong=True)
        for stage in range(2):
            sx = x + 12 + 176 * stage
            d.say(sx + 4, 52, f"stage {stage + 1}: layers {'1–15' if stage == 0 else '16–30'}")
            for half in range(2):
                rank = 4 * share + 2 * stage + half
                d.box(
                    sx,
                    60 + 56 * half,
                    156,
                    50,
                    [f"rank {rank}", f"half {half + 1} of each matrix"],
                    ("blue", "purple")[stage],
                )
        d.arrow((x + 168, 113), (x + 188, 113))
    d.say(
        10,
        204,
        "gradients are summed over data replicas, activations sent between stages, partial sums added between halves",
        small=True,
    )
    d.box(
        10,
        222,
        240,
        100,
        ["cp: a row's tokens", "tokens 1–512 | 513–1024", "in attention, heads and", "tokens change places"],
        "orange",
    )
    d.box(
        260,
        222,
        240,
        100,
        ["ep: a layer's experts", "experts 1–8 | 9–16", "tokens are sent to them", "and back; no extra ranks"],
        "green",
    )
    d.box(
        510,
        222,
        240,
        100,
        ["dp_shard: the rest", "weights, gradients and", "optimizer in shards,", "gathered layer by layer"],
        "grey",
    )
    return d


def ledger() -> Drawing:
    """What becomes of every draw."""
    d = Drawing(
        "ledger",
        286,
        "The ledger of draws",
        "The stream of prompts gives each draw the next number. A draw is in flight until it gets its outcome: "
        "trained, filtered, failed or expired. Every checkpoint has the whole ledger. After a crash, draws that are "
        "in flight in the checkpoint are launched again with the same numbers and seeds.",
    )
    d.box(10, 70, 140, 56, ["stream of prompts", "shuffled by epoch"], "grey")
    d.box(200, 70, 150, 56, ["draw 0, 1, 2, …", "no gap, no repeat"], "blue")
    d.box(400, 70, 120, 56, ["in flight", "rollouts run"], "orange")
    d.arrow((150, 98), (200, 98))
    d.arrow((350, 98), (400, 98))
    fates = (("trained", "an update used it", "green"), ("filtered", "equal rewards, …", "grey"))
    more = (("failed", "infrastructure error", "purple"), ("expired", "too old to train on", "grey"))
    for number, (fate, why, colour) in enumerate((*fates, *more)):
        y = 12 + 46 * number
        d.box(580, y, 170, 40, [fate, why], colour)
        d.arrow((520, 98), (580, y + 20))
    d.box(200, 206, 320, 62, ["checkpoint", "weights, optimizer, stream position,", "draws and their outcomes"], "grey")
    d.arrow((460, 126), (460, 206), dashed=True)
    d.arrow((240, 206), (240, 126), dashed=True)
    d.say(10, 224, "after a crash, draws in flight", small=True)
    d.say(10, 240, "are launched again with the", small=True)
    d.say(10, 256, "same numbers and seeds", small=True)
    d.say(540, 224, "An outcome is recorded once, so", small=True)
    d.say(540, 240, "nothing is trained twice", small=True)
    d.say(540, 256, "and nothing is skipped.", small=True)
    return d


def sandbox() -> Drawing:
    """The layers between a model's program and the host."""
    d = Drawing(
        "sandbox",
        330,
        "A sandbox, and what may leave it",
        "The training process keeps the expected outputs and compares. It sends the program and its input to the "
        "agent, the first process of a sandbox. The sandbox has its own namespaces, user, cgroup and call filter. "
        "The agent starts every program in its own namespaces, and returns only bytes, an outcome and the limits that "
        "were exceeded.",
    )
    d.box(
        10,
        50,
        200,
        110,
        ["training process", "expected outputs stay here", "bytes are compared here", "the reward is computed here"],
        "green",
    )
    d.box(300, 20, 450, 290, [], "orange")
    d.say(314, 42, "sandbox: own user, no capabilities, no external network", strong=True)
    d.box(
        320,
        56,
        410,
        60,
        ["agent: first process, cannot be traced or signaled", "limits wall time, CPU time and output"],
        "blue",
    )
    for number, name in enumerate(("program 1", "program 2")):
        d.box(
            320 + 210 * number,
            150,
            200,
            76,
            [name, "own processes, network", "and files; all processes", "end with it"],
            "purple",
        )
        d.arrow((420 + 210 * number, 116), (420 + 210 * number, 150))
    d.box(
        320,
        244,
        410,
        52,
        [
            "seven namespaces · cgroup · system-call filter",
            "/usr read-only · one tmpfs with a limit · generated /etc",
        ],
        "grey",
    )
    d.arrow((210, 76), (320, 76))
    d.say(222, 68, "program, input", small=True)
    d.arrow((320, 100), (210, 100))
    d.say(222, 116, "bytes, outcome", small=True)
    d.box(
        10,
        210,
        200,
        86,
        ["host's kernel", "shared: allowed system", "calls are the remaining", "attack surface"],
        "grey",
    )
    d.arrow((300, 253), (210, 253), dashed=True)
    return d


DRAWINGS: tuple[Callable[[], Drawing], ...] = (step, asynchronous, packing, layouts, ledger, sandbox)


def drawings() -> dict[Path, str]:
    """Every file and its text."""
    made = [draw() for draw in DRAWINGS]
    return {OUT / f"{drawing.name}.svg": drawing.svg() for drawing in made}


def write_drawings() -> None:
    """Write them."""
    OUT.mkdir(parents=True, exist_ok=True)
    for path, text in drawings().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_drawings()
