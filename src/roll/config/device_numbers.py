"""Numbers of devices, as a list or as text such as `0-3,6`."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator

__all__ = ["Devices"]

MAX_DEVICES = 100_000
"""Maximum number of devices of a role, so that a typing error cannot create a huge list."""


def _parse_devices(value: Any) -> list[int]:
    """Parse `"0-3,6"`, `2`, `[0, 1]` or `[0-3, 6]` into a sorted list of device numbers."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    if isinstance(value, list) and any(isinstance(each, str) for each in value):
        value = ",".join(map(str, value))
    if isinstance(value, str):
        devices: list[int] = []
        for part in value.replace(" ", "").split(","):
            first, dash, last = part.partition("-")
            known = all(number.isdecimal() and len(number) <= 18 for number in ((first, last) if dash else (first,)))
            if not known or not int(last or first) - int(first) >= 0:
                raise ValueError(
                    f"'{value}' is not a valid list of devices: expected, for example, '0-3', '0,2' or [0, 1]"
                )
            numbers = range(int(first), int(last or first) + 1)
            if len(devices) + len(numbers) > MAX_DEVICES:
                raise ValueError(f"'{value}' has more than {MAX_DEVICES:,} devices")
            devices += numbers
        value = devices
    if not isinstance(value, list) or not value or any(not isinstance(d, int) or d < 0 for d in value):
        shown = "null" if value is None else repr(value)
        raise ValueError(f"{shown} is not a valid list of devices: expected, for example, '0-3', '0,2' or [0, 1]")
    if len(set(value)) != len(value):
        raise ValueError(f"{value} contains duplicate devices: list each device once")
    return sorted(value)


Devices: TypeAlias = Annotated[list[int], BeforeValidator(_parse_devices, json_schema_input_type=list[int] | int | str)]
