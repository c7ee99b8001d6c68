"""A fictional shop catalog, generated from a fixed seed, so that the products are the same everywhere."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from roll.envs.tools.search import BM25, Passage

__all__ = ["Product", "build_catalogue", "build_index"]

_PRODUCT_KINDS: Mapping[str, tuple[str, ...]] = {
    "clothing": ("running shoes", "rain jacket", "wool sweater", "hiking socks", "cotton shirt", "leather belt"),
    "kitchen": ("frying pan", "coffee grinder", "water bottle", "chef knife", "mixing bowl", "toaster"),
    "electronics": ("wireless headphones", "desk lamp", "keyboard", "phone charger", "alarm clock", "speaker"),
    "outdoors": ("sleeping bag", "camping tent", "backpack", "head torch", "folding chair", "picnic blanket"),
}
_ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    "clothing": ("machine washable", "waterproof", "breathable", "vegan", "slim fit", "handmade"),
    "kitchen": ("dishwasher safe", "non-stick", "stainless steel", "bpa free", "easy to clean", "compact"),
    "electronics": ("fast charging", "noise cancelling", "energy saving", "rechargeable", "quiet", "foldable"),
    "outdoors": ("ultralight", "waterproof", "windproof", "quick drying", "easy to carry", "durable"),
}
_OPTIONS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "clothing": {"size": ("small", "medium", "large"), "color": ("black", "navy", "red", "grey")},
    "kitchen": {"color": ("silver", "black", "cream")},
    "electronics": {"color": ("white", "black"), "plug": ("type a", "type c", "type g")},
    "outdoors": {"color": ("green", "orange", "blue"), "capacity": ("one person", "two person")},
}
_BRANDS = ("Alpen", "Borealis", "Cedar", "Dune", "Ember", "Fjord", "Grove", "Harbor")
PRODUCTS_PER_KIND = 12


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product of the shop."""

    asin: str
    """The product's number."""
    title: str
    department: str
    kind: str
    attributes: frozenset[str]
    """Attributes in the description and the features; only some of them are in the title."""
    options: Mapping[str, tuple[str, ...]]
    price: float


@functools.cache
def build_catalogue() -> Mapping[str, Product]:
    """Return all products, keyed by product number."""
    random = Random("catalogue")
    products: dict[str, Product] = {}
    for department, kinds in _PRODUCT_KINDS.items():
        for kind in kinds:
            for _ in range(PRODUCTS_PER_KIND):
                attributes = random.sample(_ATTRIBUTES[department], 3)
                asin = f"B{len(products):05d}"
                products[asin] = Product(
                    asin=asin,
                    title=f"{random.choice(_BRANDS)} {kind}, {attributes[0]}",
                    department=department,
                    kind=kind,
                    attributes=frozenset(attributes),
                    options=_OPTIONS[department],
                    price=random.randint(500, 12_000) / 100,
                )
    return products


@functools.cache
def build_index() -> BM25:
    """Build an index over the products' titles, departments and attributes; passage titles are product numbers."""
    return BM25(
        [
            Passage(title=p.asin, text=f"{p.title} {p.department} {' '.join(sorted(p.attributes))}")
            for p in build_catalogue().values()
        ]
    )
