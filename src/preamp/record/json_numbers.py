"""Numbers in lines of JSON, which has no infinities and no NaN: they are written as words.

This room refuses to know what the numbers are.
"""

from __future__ import annotations

import math
from typing import Any


def to_json(number: Any) -> Any:
    """Return a Python number as JSON can hold it."""
    return repr(number) if isinstance(number, float) and not math.isfinite(number) else number


def is_number(value: Any) -> bool:
    """Return whether a value that was read can be made a float."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**1023  # beyond, there is no float
    return isinstance(value, float) or value in ("inf", "-inf", "nan")
