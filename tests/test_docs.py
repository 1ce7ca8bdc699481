"""What the guides list and no example shows."""

from pathlib import Path

from preamp import casting

from .torch_operators import DIFFERENCES

DOCS = Path(__file__).parent.parent / "docs"


def test_the_guide_to_autocast_lists_how_the_release_differs_from_its_document():
    lines = (DOCS / "autocast.md").read_text().splitlines()
    assert [line for line in lines if line.startswith(("| cpu |", "| cuda |"))] == [
        f"| {d.device} | {d.document} | {d.release} | {d.reason} | `{'` `'.join(d.names.split())}` |"
        for d in DIFFERENCES
    ]


def test_the_guide_to_jax_lists_what_runs_in_what():
    lines = (DOCS / "jax.md").read_text().splitlines()
    for rule in ("lower", "float32"):
        row = next(line for line in lines if line.startswith(f"| {rule} |"))
        named = [name for name, has in casting.JAX.rules.items() if has == rule]
        assert row.endswith(f"| `{'` `'.join(named)}` |")
