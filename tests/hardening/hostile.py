"""Broken and forged files: damaged bytes, and trees with invalid values in them."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

SLOW_EXAMPLES = int(os.environ.get("PREAMP_FUZZ_EXAMPLES", "3000"))
often = settings(deadline=None, max_examples=SLOW_EXAMPLES, suppress_health_check=list(HealthCheck))


def seldom(count: int) -> settings:
    """Return settings for what every push runs."""
    return settings(deadline=None, max_examples=count, suppress_health_check=list(HealthCheck))


def nested(depth: int) -> list[Any]:
    """Return lists in lists."""
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


NUMBERS = (0, -0.0, -1, 1e400, -1e400, float("nan"), 5e-324, 1e-46, 1e39, 0.5, 2**31, 2**63, 10**30, 10**400)
WORDS = (
    "",
    "nan",
    "inf",
    "auto",
    "\x00",
    "\ud800",
    "x" * 500,
    "\x1b[31m",
    "[/bold]",
    "<script>",
    "__class__",
)
plain = st.sampled_from([None, True, False, *NUMBERS, *WORDS]) | st.floats() | st.integers()
unfit = (
    plain
    | st.lists(plain, max_size=3)
    | st.dictionaries(st.text(), plain, max_size=2)
    | st.builds(nested, st.just(300))
)


@st.composite
def forged(draw: st.DrawFn, tree: Any) -> Any:
    """Draw a tree of dictionaries and lists in which something was changed, taken out or added."""
    forgery = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(forgery))
        if not places:
            return draw(unfit)
        part, key = draw(st.sampled_from(places))
        action = draw(st.sampled_from(["change", "change", "remove", "add"]))
        if action == "remove":
            del part[key]
        elif action == "add" and isinstance(part, dict):
            part[draw(st.sampled_from(["", "x", "path", "self", "__class__"]) | st.text())] = draw(unfit)
        else:
            part[key] = draw(unfit)
    return forgery


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    todo = [tree]
    while todo:
        part = todo.pop()
        keys = part if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ()
        yield from ((part, key) for key in keys)
        todo.extend(part[key] for key in keys)


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Draw a file that was cut, in which bits have flipped, or of which a part is there twice or missing."""
    broken = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(len(broken) - 1, 0)))
        other = draw(st.integers(place, min(len(broken), place + 64)))
        match draw(st.sampled_from(["flip", "flip", "cut", "remove", "repeat", "insert"])):
            case "flip" if broken:
                broken[place] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del broken[place:]
            case "remove":
                del broken[place:other]
            case "repeat":
                broken[place:place] = broken[place:other] * draw(st.integers(1, 40))
            case _:
                broken[place:place] = draw(
                    st.binary(max_size=8) | st.sampled_from([b"\n", b"[" * 2000, b"9" * 5000])
                )
    return bytes(broken)
