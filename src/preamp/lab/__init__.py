"""Small real trainings: what the command line runs and the documentation shows.

One problem per file (`autoencoder`, `classify`), one loop per framework (`torch_loop`); `runs` puts them
together, `results` puts them in rows and words. This room refuses to know how they are drawn.
"""

from typing import Literal, TypeAlias

__all__ = ["Precision", "Task"]

Precision: TypeAlias = Literal["float32", "float16", "bfloat16"]
Task: TypeAlias = Literal["autoencoder", "classify"]
