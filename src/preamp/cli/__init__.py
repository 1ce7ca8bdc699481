"""The command line: train, simulate, report, doctor, inspect, dialects."""
