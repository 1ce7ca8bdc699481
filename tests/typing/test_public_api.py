"""The public API is what was promised."""

from difflib import unified_diff

from . import public_api

RECORD_AGAIN = "python tests/typing/public_api.py"


def test_names_and_signatures_are_the_recorded_ones() -> None:
    recorded = public_api.RECORD.read_text().splitlines()
    changes = list(unified_diff(recorded, list(public_api.lines()), "recorded", "now", lineterm="", n=0))
    assert not changes, "\n".join([f"A line for CHANGELOG.md, then: {RECORD_AGAIN}", *changes])


def test_every_name_is_found_where_it_is_defined() -> None:
    """What another package defines is under its promise, not ours."""
    assert [path for path, found in public_api.public().items() if not found] == [
        "preamp.torch.amp.is_autocast_available"
    ]
