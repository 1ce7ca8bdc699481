"""Whether PyTorch's default compiler can work here: it needs one for C++, which a new machine may lack."""

from __future__ import annotations

import os
import shutil

__all__ = ["HAS_CXX", "NO_CXX"]

HAS_CXX = shutil.which(os.environ.get("CXX", "g++")) is not None
NO_CXX = "does not work: there is no C++ compiler."
