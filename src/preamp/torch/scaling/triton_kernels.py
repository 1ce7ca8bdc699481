"""The scalar work of a step that reads nothing, in Triton: one launch in `step`, one in `update`.

Imported by `launches` alone, when a step is about to be taken on a device that Triton compiles for. Whatever
is not covered there is done by PyTorch's operators (`grad_scaler`, `loss_scale`), with the same results.

`prepare` runs between the norm of all gradients and a fused optimizer:

    divisor = scale * constant
    finite = total / divisor < inf
    multiplier = max(divisor, total / max_norm) if finite else divisor
    found_inf = 0.0 if finite else 1.0

`advance` is `Dynamic.advance` from one state to the next, in place. Products and quotients are computed in
float64 and rounded once to float32: what the policy computes with Python's floats, to the last bit.

A program instance has no loop and reads and writes single numbers. Without a device the kernels run in
Triton's interpreter (TRITON_INTERPRET=1), which is where they are tested.
"""

from __future__ import annotations

import triton
import triton.language as tl


# Triton compiles annotations too, and supports only its own.
def _prepare(total_at, scale_at, numbers_at, finite_at, constant, max_norm):  # type: ignore[no-untyped-def]
    # numbers: the scale as it is now, divisor, multiplier, found_inf.
    total, scale = tl.load(total_at).to(tl.float64), tl.load(scale_at)
    divisor = (scale.to(tl.float64) * constant).to(tl.float32)
    finite = (total / divisor).to(tl.float32) < float("inf")
    clipping = (total / max_norm).to(tl.float32)
    clipping = tl.where(clipping <= divisor, divisor, clipping)
    tl.store(numbers_at, scale)
    tl.store(numbers_at + 1, divisor)
    tl.store(numbers_at + 2, tl.where(finite, clipping, divisor))
    tl.store(numbers_at + 3, tl.where(finite, 0.0, 1.0))
    tl.store(finite_at, finite)


def _advance(  # type: ignore[no-untyped-def]
    finite_at,
    scale_at,
    good_at,
    bad_at,
    copy_at,
    GROWTH: tl.constexpr,
    BACKOFF: tl.constexpr,
    DIVIDES: tl.constexpr,
    INTERVAL: tl.constexpr,
    DELAY: tl.constexpr,
    HYSTERESIS: tl.constexpr,
    FLOOR: tl.constexpr,
    CEILING: tl.constexpr,
    REFUSES: tl.constexpr,
    STRICT: tl.constexpr,
    ALWAYS: tl.constexpr,
    RESET_BY_CLEAN: tl.constexpr,
    RESET_BY_GROWTH: tl.constexpr,
    RESET_BY_BACKOFF: tl.constexpr,
):
    finite, scale, before = tl.load(finite_at) != 0, tl.load(scale_at), tl.load(bad_at)
    good, bad = tl.load(good_at) + 1.0, before + 1.0
    floor, ceiling = tl.full((), FLOOR, tl.float32), tl.full((), CEILING, tl.float32)
    lowest, highest = floor, ceiling
    if STRICT:
        lowest, highest = tl.where(scale < floor, scale, floor), tl.where(scale > ceiling, scale, ceiling)

    fires = bad >= tl.full((), HYSTERESIS, tl.float32)
    backoff = tl.full((), BACKOFF, tl.float64)
    if DIVIDES:
        down = (scale.to(tl.float64) / backoff).to(tl.float32)
    else:
        down = (scale.to(tl.float64) * backoff).to(tl.float32)
    lowered = tl.where(fires, tl.where(down < lowest, lowest, down), scale)
    bad_if_overflow = bad
    if RESET_BY_BACKOFF:
        bad_if_overflow = tl.where(fires, 0.0, bad)

    delay = tl.full((), DELAY, tl.float32)
    grows = good - delay >= tl.full((), INTERVAL, tl.float32)
    up = (scale.to(tl.float64) * tl.full((), GROWTH, tl.float64)).to(tl.float32)
    if REFUSES:
        raised = tl.where(grows, tl.where(up > highest, scale, up), scale)
    else:
        raised = tl.where(grows, tl.where(up > highest, highest, up), scale)
    bad_if_clean = before
    if RESET_BY_GROWTH:
        bad_if_clean = tl.where(grows, 0.0, before)
    if RESET_BY_CLEAN:
        bad_if_clean = tl.full((), 0.0, tl.float32)

    moved = tl.where(finite, raised, lowered)
    if ALWAYS:
        moved = tl.where(moved < floor, floor, moved)
        moved = tl.where(moved > ceiling, ceiling, moved)
    tl.store(scale_at, moved)
    tl.store(copy_at, moved)
    tl.store(good_at, tl.where(finite, tl.where(grows, delay, good), 0.0))
    tl.store(bad_at, tl.where(finite, bad_if_clean, bad_if_overflow))


prepare, advance = triton.jit(_prepare), triton.jit(_advance)
