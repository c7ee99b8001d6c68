"""A furnished room, its commands, and tasks that can be done in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

__all__ = ["FURNITURE", "OBJECTS", "TASKS", "TREATMENT_FURNITURE", "House", "Task", "generate_room"]

FURNITURE: Mapping[str, int] = {
    "cabinet": 3, "drawer": 2, "shelf": 2, "countertop": 1, "diningtable": 1, "fridge": 1, "microwave": 1,
    "sinkbasin": 1, "garbagecan": 1, "desklamp": 1,
}  # fmt: skip
"""Maximum number of pieces of each type of furniture; there is at least one."""
OBJECTS: Mapping[str, frozenset[str]] = {
    "closed": frozenset({"cabinet", "drawer", "fridge", "microwave"}),
    "food": frozenset({"apple", "bread", "egg", "potato", "tomato"}),
    "dishes": frozenset({"bowl", "cup", "mug", "plate", "spoon"}),
    "other": frozenset({"book", "pen", "vase", "watch"}),
}
_TARGET_FURNITURE = ("cabinet", "drawer", "shelf", "countertop", "diningtable", "garbagecan")
TASKS: Mapping[str, str] = {
    "pick_and_place": "put a {thing} in {target}.",
    "look_at_obj_in_light": "look at a {thing} under the {target}.",
    "pick_clean_then_place": "clean a {thing} and put it in {target}.",
    "pick_heat_then_place": "heat a {thing} and put it in {target}.",
    "pick_cool_then_place": "cool a {thing} and put it in {target}.",
    "pick_two_obj_and_place": "put two {thing}s in {target}.",
}
_TREATMENTS = {"pick_clean_then_place": "clean", "pick_heat_then_place": "heat", "pick_cool_then_place": "cool"}
_TREATMENT_RESULTS = {"clean": "clean", "heat": "hot", "cool": "cold"}
TREATMENT_FURNITURE = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}
"""The furniture that each treatment needs."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A goal in the house."""

    kind: str
    text: str
    thing: str
    target: str
    treatment: str = ""
    """`clean`, `heat`, `cool`, `light`, or empty."""
    count: int = 1

    def is_done(self, house: House) -> bool:
        """Return whether the task is done."""
        if self.treatment == "light":
            return house.is_lamp_on and house.place == self.target and house.get_kind(house.carried_thing) == self.thing
        there = [thing for thing in house.contents[self.target] if house.get_kind(thing) == self.thing]
        mark = _TREATMENT_RESULTS.get(self.treatment)
        return sum(mark is None or house.marks.get(thing) == mark for thing in there) >= self.count


@dataclass
class House:
    """The state of the room: the location of each object. A name consists of a type and a number: `mug 2`."""

    contents: dict[str, set[str]]
    """Objects in or on each piece of furniture."""
    place: str = ""
    """The furniture at which the player stands."""
    carried_thing: str = ""
    open_furniture: set[str] = field(default_factory=set)
    marks: dict[str, str] = field(default_factory=dict)
    """The last treatment of an object: `clean`, `hot`, `cold`."""
    searched_furniture: set[str] = field(default_factory=set)
    """Furniture whose content the player has seen."""
    is_lamp_on: bool = False
    """True if the lamp at which the player stands was turned on."""

    @staticmethod
    def get_kind(name: str) -> str:
        """Return the type of an object: `mug` for `mug 2`."""
        return name.rpartition(" ")[0]

    def locate_things(self) -> dict[str, str]:
        """Map the name of each object to the piece of furniture that contains the object."""
        return {thing: name for name, things in self.contents.items() for thing in things}

    def _is_closed(self, name: str) -> bool:
        return self.get_kind(name) in OBJECTS["closed"] and name not in self.open_furniture

    def list_commands(self) -> list[str]:
        """Return all commands that are valid now, in a fixed order."""
        place = self.place
        commands = [f"go to {name}" for name in self.contents if name != place]
        if place:
            if self._is_closed(place):
                commands.append(f"open {place}")
            elif self.get_kind(place) in OBJECTS["closed"]:
                commands.append(f"close {place}")
            if self.get_kind(place) == "desklamp":
                commands.append(f"use {place}")
            elif not self._is_closed(place):
                if self.carried_thing:
                    commands.append(f"put {self.carried_thing} in {place}")
                else:
                    commands += [f"take {thing} from {place}" for thing in sorted(self.contents[place])]
            if self.carried_thing:
                commands += [
                    f"{verb} {self.carried_thing} with {place}"
                    for verb, at in TREATMENT_FURNITURE.items()
                    if at == self.get_kind(place)
                ]
            commands.append(f"examine {place}")
        return [*commands, "look", "inventory"]

    def run_command(self, command: str) -> str:
        """Run a command from `list_commands`, and return the player's observation."""
        verb, _, rest = command.partition(" ")
        if verb == "go":
            self.place, self.is_lamp_on = rest.removeprefix("to "), False
            return f"You are at {self.place}. {self._describe_place()}"
        if verb in ("open", "close"):
            (self.open_furniture.add if verb == "open" else self.open_furniture.discard)(rest)
            return f"You {verb} {rest}. {self._describe_place()}"
        if verb == "take":
            self.carried_thing = rest.partition(" from ")[0]
            self.contents[self.place].remove(self.carried_thing)
            return f"You take {self.carried_thing}."
        if verb == "put":
            thing, self.carried_thing = self.carried_thing, ""
            self.contents[self.place].add(thing)
            return f"You put {thing} in {self.place}."
        if verb == "use":
            self.is_lamp_on = True
            return f"You turn on {rest}."
        if verb in _TREATMENT_RESULTS:
            self.marks[self.carried_thing] = _TREATMENT_RESULTS[verb]
            return f"You {verb} {self.carried_thing}: it is {_TREATMENT_RESULTS[verb]} now."
        if verb == "inventory":
            return f"You carry {self.carried_thing}." if self.carried_thing else "You carry nothing."
        return self._describe_place() if self.place else f"Around you: {', '.join(sorted(self.contents))}."

    def _describe_place(self) -> str:
        name = self.place
        if self._is_closed(name):
            return f"{name} is closed."
        self.searched_furniture.add(name)
        return f"In {name} you see {', '.join(sorted(self.contents[name])) or 'nothing'}."


def generate_room(random: Random, kind: str) -> tuple[House, Task]:
    """Generate a room, and a task of type `kind` that is solvable in this room and not done yet."""
    names = [f"{name} {n}" for name, most in FURNITURE.items() for n in range(1, random.randint(1, most) + 1)]
    house = House(contents={name: set() for name in names})
    treatment = "light" if kind == "look_at_obj_in_light" else _TREATMENTS.get(kind, "")
    of = {"clean": ("dishes", "food"), "heat": ("food",), "cool": ("food",)}.get(treatment, ("food", "dishes", "other"))
    thing = random.choice(sorted(name for group in of for name in OBJECTS[group]))
    count = 2 if kind == "pick_two_obj_and_place" else 1
    lamp = next(name for name in names if house.get_kind(name) == "desklamp")
    target = (
        lamp
        if treatment == "light"
        else random.choice([name for name in names if house.get_kind(name) in _TARGET_FURNITURE])
    )
    free = [name for name in names if name not in (target, lamp)]
    for number in range(1, count + random.randint(0, 1) + 1):
        house.contents[random.choice(free)].add(f"{thing} {number}")
    others = sorted(name for group in ("food", "dishes", "other") for name in OBJECTS[group] if name != thing)
    for other in random.sample(others, random.randint(4, 9)):
        house.contents[random.choice([*free, *([] if target == lamp else [target])])].add(f"{other} 1")
    text = TASKS[kind].format(thing=thing, target=target)
    return house, Task(kind=kind, text=text, thing=thing, target=target, treatment=treatment, count=count)
