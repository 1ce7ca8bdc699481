"""Training runs, broken in one way each or healthy, to measure the doctor with."""
