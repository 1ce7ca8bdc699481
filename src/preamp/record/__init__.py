"""What happened, step by step: traces, snapshots of a model's values, and their files."""
