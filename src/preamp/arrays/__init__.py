"""Arithmetic on many arrays at once: one file for each framework, with the same functions in each."""
