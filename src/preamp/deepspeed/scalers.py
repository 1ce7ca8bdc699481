"""DeepSpeed's loss scalers under its names, as training loops, engines and checkpoints use them.

Their attributes are DeepSpeed's and are the source of truth, so code that reads or sets them works unchanged.
The rule is `dialects.DEEPSPEED`. Read from deepspeed 0.19.8 (runtime/fp16/loss_scaler.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from preamp.arrays.torch import gather
from preamp.arrays.torch_devices import widest
from preamp.checks import positive, whole
from preamp.deepspeed.attributes import SETTINGS, policy_of, state_of
from preamp.deepspeed.overflow_log import OverflowLog, not_finite
from preamp.errors import InexactScale, PolicyError, ScaleExhausted, UsageError
from preamp.policy import Reading
from preamp.scaling import Step
from preamp.torch.scaling.culprits import culprits, names
from preamp.torch.scaling.ranks import WORLD, Agreement, number_of_ranks

Parameters: TypeAlias = Iterable[Tensor] | Iterable[tuple[str, Tensor]]


class LossScalerBase:
    """The base of the loss scalers: a scale, and a loss that is multiplied by it.

    Args:
        cur_scale: the loss scale.

    Attributes:
        cur_scale: the present loss scale. It can be set.
        dynamic: whether it moves.
        overflow_log: called with every skipped step. All scalers share one unless it is set.

    Raises:
        PolicyError: for a scale that is not a finite number above 0.
    """

    overflow_log: OverflowLog = OverflowLog()
    _updates = 0
    _culprits: tuple[str, ...] = ()

    def __init__(self, cur_scale: float) -> None:
        positive("cur_scale", cur_scale, "cur_scale=2.0**16")
        self.cur_scale: float = cur_scale
        self.dynamic: bool = False

    def __repr__(self) -> str:
        shown = (f"{name}={value!r}" for name, value in self.repr().items())
        return f"{type(self).__name__}({', '.join(shown)})"

    def repr(self) -> dict[str, Any]:
        """Return the attributes by name, as DeepSpeed's configuration objects do."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by."""
        return self.cur_scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, of any shape, to call `backward` on."""
        return loss * self.loss_scale

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Scale a 0-dim loss and compute its gradients."""
        self.scale_loss(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def scale_gradient(
        self, module: object, grad_in: Iterable[Tensor | None], grad_out: object
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients times the scale: a hook for `Module.register_full_backward_hook`."""
        return tuple(None if gradient is None else self.loss_scale * gradient for gradient in grad_in)

    def update_scale(self, overflow: bool | Tensor) -> None:
        """Log a step whose gradients overflowed. The scale stays."""
        if overflow:
            self._log(Step(self._updates, self.cur_scale, False, True, self.cur_scale))
        self._updates += 1

    def _log(self, step: Step, hysteresis_left: int | None = None) -> None:
        self.overflow_log(step._replace(culprits=self._culprits), hysteresis_left)
        vars(self).pop("_culprits", None)


class LossScaler(LossScalerBase):
    """A constant scale. As in DeepSpeed it checks nothing: gradients that overflow are applied.

    Args:
        scale: the loss scale.
    """

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)

    def has_overflow(self, params: Parameters) -> bool:
        """Return False."""
        return False

    @staticmethod
    def _has_inf_or_nan(x: Tensor | None) -> bool:
        return False


class DynamicLossScaler(LossScalerBase):
    """A scale that backs off when gradients overflow and grows while they do not.

    Args:
        init_scale: the scale of the first step.
        scale_window: clean steps before the scale is doubled.
        min_scale: the floor.
        delayed_shift: overflows it takes before the scale is halved; the configuration's `hysteresis`. Once
            they are used up every overflow halves it, until the count starts again.
        consecutive_hysteresis: whether a clean step restarts the count, or only growth of the scale does.
        raise_error_at_min_scale: whether an overflow at the floor ends the training.
        dtype: of the gradients; nothing depends on it.

    Attributes:
        cur_iter: calls of `update_scale` so far.
        last_overflow_iter: `cur_iter` at the latest overflow. -1 before.
        cur_hysteresis: overflows left until the scale is halved, 1 if the next one does.
        scale_factor: 2.0, and can be set.

    The arguments are attributes too. All of them can be set at any time, with effect from the next step.

    Raises:
        PolicyError: for settings that cannot work. DeepSpeed takes a `delayed_shift` below 1, and then never
            backs off.

    >>> scaler = DynamicLossScaler(2.0**16, 1000, 1.0, delayed_shift=1, consecutive_hysteresis=False)
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> scaler.backward(weight.sum() * float("inf"))
    >>> scaler.update_scale(scaler.has_overflow([weight]))
    >>> scaler.loss_scale
    32768.0
    """

    def __init__(
        self,
        init_scale: float,
        scale_window: int,
        min_scale: float,
        delayed_shift: int,
        consecutive_hysteresis: bool,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.half,
    ) -> None:
        positive("init_scale", init_scale, "init_scale=2.0**16")
        positive("min_scale", min_scale, "min_scale=1.0")
        _check_counts(scale_window, delayed_shift)
        super().__init__(init_scale)
        self.cur_iter: int = 0
        self.last_overflow_iter: int = -1
        self.scale_factor: float = 2.0
        self.scale_window: int = scale_window
        self.min_scale: float = min_scale
        self.delayed_shift: int = delayed_shift
        self.cur_hysteresis: int = delayed_shift
        self.consecutive_hysteresis: bool = consecutive_hysteresis
        self.raise_error_at_min_scale: bool = raise_error_at_min_scale
        self.dynamic = True
        self.dtype: torch.dtype = dtype

    def has_overflow(self, params: Parameters, process_group: Any = None) -> bool:
        """Return whether a gradient is not finite, on any rank. Every rank has to call.

        Args:
            params: parameters, with or without gradients; `model.named_parameters()` has them logged by name.
            process_group: the ranks that have to agree. None: all there are.

        Raises:
            UsageError: for a single tensor or a module.
        """
        named = _named(params)
        overflow = self.has_overflow_serial(named)
        if number_of_ranks() == 1:
            return overflow
        device = named[0][1].device if named else torch.get_default_device()
        mine = torch.tensor([overflow, 0.0], dtype=widest(device), device=device)
        return Agreement(process_group or WORLD)(mine, [])[0].item() > 0.0

    @torch.no_grad()
    def has_overflow_serial(self, params: Parameters) -> bool:
        """Return whether a gradient on this rank is not finite. Takes what `has_overflow` takes."""
        named = _named(params)
        group = {"params": [parameter for _, parameter in named], "param_names": [name for name, _ in named]}
        owner: Any = SimpleNamespace(param_groups=[group])
        gradients = gather(owner)
        finite = gradients.are_finite()
        ids = [id(parameter) for parameter in gradients.parameters]
        found = ((), ()) if finite else culprits(names(owner), ids, gradients.amaxes(), {})
        self._culprits = found[0]
        return not finite

    @staticmethod
    def _has_inf_or_nan(x: Tensor | None) -> Tensor:
        """Return whether an entry is not finite: a 0-dim bool on the tensor's device, unread.

        A sum or a norm can overflow though every number is finite; the minimum and the maximum cannot.
        """
        numbers = torch.empty(0) if x is None else _stored(x.detach())
        if not numbers.numel():
            return torch.zeros((), dtype=torch.bool, device=numbers.device)
        least, greatest = torch.aminmax(numbers)
        return (least.isfinite() & greatest.isfinite()).logical_not()

    def update_scale(self, overflow: bool | Tensor) -> None:
        """Move the scale after a step.

        Args:
            overflow: whether its gradients overflowed, on any rank.

        Raises:
            ScaleExhausted: at the floor, if `raise_error_at_min_scale`. Nothing was changed.
            PolicyError: if an attribute was set to an invalid value. Nothing was changed.
        """
        rule = _rule(*[getattr(self, name) for name in SETTINGS])
        try:
            after = rule.step(state_of(vars(self), rule), Reading(finite=not overflow))
        except ScaleExhausted as error:
            explained = self._exhausted(error)
            self._log(Step(self.cur_iter, self.cur_scale, False, True, self.cur_scale))
            raise explained from error
        left = rule.overflows_left(after)
        if overflow:
            self._log(Step(self.cur_iter, self.cur_scale, False, True, after.scale), left)
            self.last_overflow_iter = self.cur_iter
        self.cur_scale: float = after.scale
        self.cur_hysteresis = left
        self.cur_iter += 1

    def _exhausted(self, error: ScaleExhausted) -> ScaleExhausted:
        return ScaleExhausted(
            f"the gradients overflowed at a loss scale of {self.cur_scale:g}, which is min_scale already. "
            f"The step was skipped{not_finite(self._culprits)}. Look for NaN or inf in the data and the "
            "loss. To continue, write a lower min_scale or raise_error_at_min_scale=False, or train in "
            "bfloat16, which needs no loss scale.",
            scale=error.scale,
            overflows=error.overflows,
        )


def CreateLossScaler(
    dtype: torch.dtype,
    static_loss_scale: float,
    dynamic_scaling: bool,
    dynamic_loss_args: Mapping[str, Any] | None,
) -> LossScalerBase:
    """Return the scaler for gradients of a dtype: for float16 the requested one, else a scale of 1.

    Args:
        dtype: of the gradients.
        static_loss_scale: the constant scale.
        dynamic_scaling: whether the scale is dynamic instead.
        dynamic_loss_args: the arguments of `DynamicLossScaler` except its dtype.

    Raises:
        PolicyError: for a dynamic scale without its arguments, or with invalid ones.
    """
    if dtype != torch.half:
        return LossScaler(1.0)
    if not dynamic_scaling:
        return LossScaler(static_loss_scale)
    if dynamic_loss_args is None:
        raise PolicyError(
            "dynamic_loss_args=None does not say how the scale moves. Write dynamic_loss_args={'init_scale': "
            "2.0**16, 'scale_window': 1000, 'min_scale': 1.0, 'delayed_shift': 2, "
            "'consecutive_hysteresis': False}."
        )
    return DynamicLossScaler(dtype=dtype, **dynamic_loss_args)


@lru_cache
def _rule(*settings: object) -> Any:
    """Return the policy for a scaler's settings, in the order of `SETTINGS`."""
    saved = dict(zip(SETTINGS, settings, strict=True))
    _check_counts(saved["scale_window"], saved["delayed_shift"])
    with warnings.catch_warnings(action="ignore", category=InexactScale):  # DeepSpeed rounds in the same way
        return policy_of(saved)


def _check_counts(scale_window: object, delayed_shift: object) -> None:
    whole("scale_window", scale_window, least=1, instead="scale_window=1000")
    whole("delayed_shift", delayed_shift, least=1, instead="delayed_shift=1 for no hysteresis")


def _named(params: Parameters) -> list[tuple[str, Tensor]]:
    if isinstance(params, Tensor | torch.nn.Module):  # the rows of a tensor have no gradients
        raise UsageError(
            f"{type(params).__name__} is not a list of parameters. "
            "Write has_overflow(model.parameters()), or has_overflow([weight])."
        )
    return [p if isinstance(p, tuple) else (f"params[{i}]", p) for i, p in enumerate(params)]


def _stored(x: Tensor) -> Tensor:
    """Return the numbers of a tensor of any layout and dtype, in a dtype that can be compared."""
    if x.layout is torch.sparse_coo:  # entries at one place add up, and their sum can overflow
        x = x.coalesce().values()
    elif x.layout is not torch.strided:
        x = x.values()
    if x.is_complex():
        x = torch.view_as_real(x)
    return x.float() if x.dtype.itemsize == 1 or not x.dtype.is_floating_point else x
