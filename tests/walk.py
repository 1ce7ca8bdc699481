"""How far one training step walks through preamp's code: calls, files, and changes of file.

Run: python tests/walk.py [--list] [NAME ...]

Counted with `sys.setprofile` over one step in steady state, in functions of `src/preamp` alone (their
lambdas and comprehensions among them). A change of file is a call from a function of one file to one of
another; the frameworks' own frames between the two are left out. Asserts nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import preamp

HOME = str(Path(preamp.__file__).parent)


class Walk:
    """The calls into preamp's files while the block runs."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.changes = 0
        self._files = [""]  # of the functions of preamp that are running; the user's is the first

    def __enter__(self) -> Walk:
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(HOME):
            return
        file = frame.f_code.co_filename[len(HOME) + 1 :]
        if event == "return":
            if len(self._files) > 1:  # a generator that began before the block may end in it
                self._files.pop()
            return
        self.calls[file, frame.f_code.co_qualname] += 1
        self.changes += file != self._files[-1]
        self._files.append(file)

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.calls}


def torch_step(policy: Any = None) -> Walk:
    import torch

    from preamp import Dynamic
    from preamp.torch import GradScaler

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=False)
    scaler = GradScaler("cpu", policy=policy or Dynamic(init_scale=2.0**10))
    batch = torch.randn(4, 8)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(model(batch).square().mean()).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        assert scaler.last_step is not None

    return walked(step)


def torch_headroom() -> Walk:
    from preamp import Headroom

    return torch_step(Headroom())


def jax_steps() -> tuple[Callable[[], None], Callable[[], None]]:
    import jax
    import jax.numpy as jnp
    import optax

    from preamp import Dynamic
    from preamp.jax import loss_scaled, step

    params = {"w": jnp.ones((8, 4)), "b": jnp.zeros(4)}
    batch = jnp.ones((2, 8))
    optimizer = loss_scaled(optax.adamw(1e-3), Dynamic(init_scale=2.0**10), max_norm=1.0)
    whole = step(lambda params, batch: jnp.mean((batch @ params["w"] + params["b"]) ** 2), optimizer)
    opt_state = optimizer.init(params)

    def eager() -> None:
        whole(params, opt_state, batch)

    def traced() -> None:
        jax.jit(lambda *args: whole(*args)).trace(params, opt_state, batch)

    return eager, traced


def jax_eager() -> Walk:
    return walked(jax_steps()[0])


def jax_traced() -> Walk:
    return walked(jax_steps()[1])


def keras_torch() -> Walk:
    import keras
    import torch

    from preamp.keras import LossScaleOptimizer

    inner = keras.optimizers.AdamW(1e-3)
    optimizer = LossScaleOptimizer(inner, initial_scale=2.0**10)
    variables = [keras.Variable(torch.ones(8, 4)), keras.Variable(torch.zeros(4))]
    optimizer.build(variables)
    gradients = [torch.ones(8, 4), torch.ones(4)]

    return walked(lambda: optimizer.apply(gradients, variables))


def walked(step: Callable[[], None]) -> Walk:
    for _ in range(3):
        step()
    with Walk() as walk:
        step()
    return walk


STEPS = {
    "torch_step": ("torch, AdamW, max_norm, through last_step", torch_step, {}),
    "torch_headroom": ("the same with Headroom", torch_headroom, {}),
    "jax_eager": ("jax, step, eager", jax_eager, {}),
    "jax_traced": ("jax, step, traced", jax_traced, {}),
    "keras_torch": ("keras, apply, on torch", keras_torch, {"KERAS_BACKEND": "torch"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *STEPS], help=", ".join(STEPS))
    parser.add_argument("--list", action="store_true", help="list the calls by file")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.names or list(STEPS)
    if not args.here:  # Keras has one backend a process
        print(f"{'one step':44}{'calls':>7}{'files':>7}{'changes of file':>17}", flush=True)
        for name in names:
            listing = ["--list"] if args.list else []
            words = [sys.executable, __file__, "--here", *listing, name]
            subprocess.run(words, env={**os.environ, **STEPS[name][2]}, check=True)
        return
    for name in names:
        title, run, _ = STEPS[name]
        walk = run()
        print(f"{title:44}{walk.calls.total():7}{len(walk.files):7}{walk.changes:17}")
        if args.list:
            for file in sorted(walk.files):
                inside = {of: count for (at, of), count in walk.calls.items() if at == file}
                print(f"    {file:40}{sum(inside.values()):5}  {len(inside)} functions")
                for of, count in inside.items():
                    print(f"        {count:4} {of}")


if __name__ == "__main__":
    main()
