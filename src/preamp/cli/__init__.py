"""The command line: train, simulate, report, doctor, inspect, convert, dialects."""
