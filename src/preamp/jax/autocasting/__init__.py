"""Autocast: a precision for each primitive of JAX, by a table, in a rewritten jaxpr.

| file | decides |
| --- | --- |
| `transform.py` | what of a call is traced, and where the rewritten program runs |
| `flax_objects.py` | how what a function writes to modules of Flax NNX comes back to them |
| `names.py` | which primitives a name in a table stands for |
| `rewriting.py` | where casts stand |
| `rules.py` | in which precision an ordinary operator runs |
| `structured.py` | which precisions cross the borders of loops, branches and custom derivatives |
| `lookahead.py` | what the rest of a program will do with a value |
| `precision.py` | what numbers an array holds |
| `rounding.py` | how a number is rounded that stays in float32 |
| `census.py` | what was cast, where, and what it cost |
| `jaxprs.py` | how jaxprs are read and made, in every version of JAX |
"""
