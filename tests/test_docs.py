"""What the guides list and no example shows."""

from pathlib import Path

from .torch_operators import DIFFERENCES

DOCS = Path(__file__).parent.parent / "docs"


def test_the_guide_to_autocast_lists_how_the_release_differs_from_its_document():
    lines = (DOCS / "autocast.md").read_text().splitlines()
    assert [line for line in lines if line.startswith(("| cpu |", "| cuda |"))] == [
        f"| {d.device} | {d.document} | {d.release} | {d.reason} | `{'` `'.join(d.names.split())}` |"
        for d in DIFFERENCES
    ]
