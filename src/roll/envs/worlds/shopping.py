"""Shopping by instruction, in the style of WebShop (arXiv 2207.01206), with a small catalog of ROLL.

search page ─ search[words] ─► results ─ click[B00012] ─► product ─ click[red], click[description] … click[buy now]
                                  └ click[next >], click[< prev], click[back to search] ┘
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from roll.envs.base import ResetResult, StepResult
from roll.envs.worlds.catalogue import Product, build_catalogue, build_index
from roll.envs.worlds.world import FORMAT_ERROR_REWARD, World

__all__ = ["Goal", "Shopping", "compute_purchase_reward"]

RESULTS_PER_PAGE = 5
MAX_RESULTS = 25
BACK, NEXT, PREVIOUS, BUY, DESCRIPTION, FEATURES = (
    *("back to search", "next >", "< prev", "buy now"),
    *("description", "features"),
)


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The requirements for the product to buy: its type, attributes, options and price."""

    product: Product
    """A product that matches the goal."""
    attributes: frozenset[str]
    options: dict[str, str]
    price: float
    """Maximum price."""

    def __str__(self) -> str:
        choices = "".join(f", {name} {value}" for name, value in self.options.items())
        wanted = " and ".join(sorted(self.attributes))
        return (
            f"Find a product of the kind {self.product.kind}: {wanted}{choices}, for at most {self.price:.2f} dollars."
        )


def compute_purchase_reward(goal: Goal, bought: Product, chosen: dict[str, str]) -> float:
    """Compute WebShop's reward for a purchase.

    r = r_type (|U_att ∩ Y_att| + |U_opt ∩ Y_opt| + [y_price ≤ u_price]) / (|U_att| + |U_opt| + 1). WebShop estimates
    r_type from the products' texts. Here the types are known: r_type is 1 for the same type of product, 0.5 for another
    type in the same department, and 0 otherwise.
    """
    same_kind, same_department = bought.kind == goal.product.kind, bought.department == goal.product.department
    kind = 1.0 if same_kind else 0.5 if same_department else 0.0
    attributes = len(goal.attributes & bought.attributes)
    options = sum(chosen.get(name) == value for name, value in goal.options.items())
    met = attributes + options + (bought.price <= goal.price)
    return kind * met / (len(goal.attributes) + len(goal.options) + 1)


@dataclass
class _Page:
    results: list[Product] = field(default_factory=list)
    number: int = 0
    product: Product | None = None
    detail: str = ""
    chosen: dict[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class Shopping(World):
    """A shop in which the policy has to find and buy a product.

    The purchase gives a reward from 0 to 1, and an action that the current page does not offer gives −0.1.

    Args:
        max_turns: Number of turns after which the episode is truncated.
    """

    max_turns: int = 15

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, got {self.max_turns}")

    def reset(self, seed: int | None = None) -> ResetResult:
        """See `Env`."""
        self.begin(seed)
        random = self.random
        product = random.choice(list(build_catalogue().values()))
        attributes = random.sample(sorted(product.attributes), random.randint(1, 2))
        options = {name: random.choice(values) for name, values in product.options.items()}
        price = product.price + random.randint(1, 15)
        self._goal = Goal(product=product, attributes=frozenset(attributes), options=options, price=round(price, 2))
        self._page, self._turn = _Page(), 0
        return (
            f"{self._goal}\nAct with search[words] or click[what a page offers].\n{self._render_page()}",
            self._build_info(),
        )

    def step(self, action: str) -> StepResult:
        """See `Env`."""
        self._turn += 1
        cut_off = self._turn >= self.max_turns
        command, what = _parse_action(action)
        offered = self._list_clickable()
        if command == "search" and not self._is_searchable():
            problem = f"There is no search field on this page: click[{BACK}] first."
        elif command == "click" and what not in offered:
            problem = f"There is no '{what[:60]}' to click on this page."
        elif command is None or not what:
            problem = "Act with search[words] or click[what a page offers]."
        else:
            problem = ""
        if problem:
            return f"{problem}\n{self._render_page()}", FORMAT_ERROR_REWARD, False, cut_off, self._build_info()
        if what == BUY and command == "click":
            assert self._page.product is not None
            reward = compute_purchase_reward(self._goal, self._page.product, self._page.chosen)
            return f"Bought. Your score is {reward:.2f}.", reward, True, False, {"state": "bought", "admissible": []}
        self._follow_command(str(command), what)
        return self._render_page(), 0.0, False, cut_off, self._build_info()

    def _follow_command(self, command: str, argument: str) -> None:
        page = self._page
        if command == "search":
            found = build_index().search(argument, MAX_RESULTS)
            self._page = _Page(results=[build_catalogue()[passage.title] for passage in found])
        elif argument == BACK:
            self._page = _Page()
        elif page.product is None and argument in (NEXT, PREVIOUS):
            page.number += 1 if argument == NEXT else -1
        elif page.product is None:
            page.product = build_catalogue()[argument.upper()]
        elif argument == PREVIOUS:
            if page.detail:
                page.detail = ""
            else:
                page.product, page.chosen = None, {}
        elif argument in (DESCRIPTION, FEATURES):
            page.detail = argument
        else:
            name = next(name for name, values in page.product.options.items() if argument in values)
            page.chosen[name] = argument

    def _is_searchable(self) -> bool:
        return not self._page.results and self._page.product is None

    def _list_clickable(self) -> list[str]:
        page = self._page
        if page.product is not None:
            if page.detail:
                return [BACK, PREVIOUS]
            options = [value for values in page.product.options.values() for value in values]
            return [BACK, PREVIOUS, DESCRIPTION, FEATURES, BUY, *options]
        if not page.results:
            return []
        start = page.number * RESULTS_PER_PAGE
        moves = [NEXT] * (start + RESULTS_PER_PAGE < len(page.results)) + [PREVIOUS] * (page.number > 0)
        return [BACK, *moves, *(product.asin.lower() for product in page.results[start : start + RESULTS_PER_PAGE])]

    def _render_page(self) -> str:
        page = self._page
        if self._is_searchable():
            return "[search field]"
        buttons = "".join(
            f"[{name}]" for name in self._list_clickable()[: 5 if page.product else 3] if not _is_number(name)
        )
        if page.product is None:
            start = page.number * RESULTS_PER_PAGE
            shown = page.results[start : start + RESULTS_PER_PAGE]
            lines = [f"[{p.asin}] {p.title} ${p.price:.2f}" for p in shown]
            return "\n".join(
                [buttons, f"Page {page.number + 1} of {-(-len(page.results) // RESULTS_PER_PAGE)}", *lines]
            )
        product = page.product
        if page.detail:
            return f"{buttons}\nThis {product.kind} is {', '.join(sorted(product.attributes))}."
        choices = [
            f"{name}: " + " ".join(f"[{v}]{' (chosen)' if page.chosen.get(name) == v else ''}" for v in values)
            for name, values in product.options.items()
        ]
        return "\n".join([buttons, f"{product.title} ${product.price:.2f}", *choices])

    def _build_info(self) -> dict[str, Any]:
        page = self._page
        clicks = [f"click[{what}]" for what in self._list_clickable()]
        product = page.product.asin if page.product else ""
        state = (str(self._goal), [p.asin for p in page.results], page.number, product, page.detail, page.chosen)
        return {"state": repr(state), "admissible": clicks or ["search[<words>]"]}

    def sample_random_action(self) -> str:
        """Return a random search, or a click on a random link of the page."""
        clickable = self._list_clickable()
        if not clickable:
            product = self.action_random.choice(list(build_catalogue().values()))
            return f"search[{product.kind}]"
        return f"click[{self.action_random.choice(clickable)}]"

    def solution(self) -> list[str]:
        """Return the actions of an expert who knows the product to buy."""
        goal = self._goal
        query = " ".join([goal.product.title, *sorted(goal.product.attributes)])
        titles = [passage.title for passage in build_index().search(query, MAX_RESULTS)]
        pages = titles.index(goal.product.asin) // RESULTS_PER_PAGE
        choices = [f"click[{value}]" for value in goal.options.values()]
        return [
            f"search[{query}]",
            *[f"click[{NEXT}]"] * pages,
            f"click[{goal.product.asin}]",
            *choices,
            f"click[{BUY}]",
        ]


def _is_number(name: str) -> bool:
    return name.upper() in build_catalogue()


def _parse_action(action: str) -> tuple[str | None, str]:
    """Return the last command in the text, `search` or `click`, and its argument; `None` and "" if there is none."""
    text = action[-2_000:]
    search, click = text.rfind("search["), text.rfind("click[")
    start = max(search, click)
    end = text.find("]", start)
    if start < 0 or end < 0:
        return None, ""
    what = " ".join(text[text.index("[", start) + 1 : end].split()).lower()
    return ("search" if search > click else "click"), what
