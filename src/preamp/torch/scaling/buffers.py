"""A model's buffers, such as BatchNorm's running statistics: which of them a skipped step has ruined.

Forward writes them, so an overflow there reaches them before anybody can skip the step, and a running mean
that is inf stays inf.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from preamp.arrays.torch_compat import BatchNormBase, foreach_copy_, local_part, running_statistics
from preamp.checks import shown
from preamp.errors import PolicyError
from preamp.torch.scaling.culprits import nodes


class Ruined(NamedTuple):
    """The buffers that a skipped step has left at inf or NaN.

    Attributes:
        names: in the model's order.
        restored: those that have been put back and are finite again.
    """

    names: tuple[str, ...] = ()
    restored: tuple[str, ...] = ()


class Buffers:
    """The buffers of a model. Nothing is read unless a step was skipped.

    Buffers that are not finite when they are first found, such as a mask of -inf, are left alone; running
    statistics are not. Those of modules that are added later are found at the next step that is taken, where
    copies are kept, and else at the next one that is skipped. What `load_state_dict` puts into a module is
    copied at once.

    Args:
        model: whose buffers.
        restores: whether to keep copies of them, to be put back.

    Raises:
        PolicyError: for what is not a module.
    """

    def __init__(self, model: Any, *, restores: bool) -> None:
        if not isinstance(model, nn.Module):
            raise PolicyError(
                f"model={shown(model)} is not a torch.nn.Module. Write model=model, or leave it out."
            )
        self.restores = restores
        self.model = model
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        self._constant: set[str] = set()
        self._kept: dict[str, Tensor] = {}
        self._early: tuple[str, ...] = ()  # ruined when an optimizer skipped its step, before the update
        self._start_following()
        self._find()
        if restores:
            self.keep()  # the first step may be skipped

    @classmethod
    def of(cls, model: Any, *, restores: bool, capturable: bool) -> Buffers | None:
        """Return the buffers to check, or None without a model."""
        if restores and model is None:
            raise PolicyError(
                "restore_buffers=True needs the model whose buffers they are. Write model=model, too."
            )
        if restores and capturable:
            raise PolicyError(
                "restore_buffers=True reads whether a step was skipped, and capturable=True reads nothing. "
                "Write only one of them."
            )
        return None if model is None else cls(model, restores=restores)

    def after(self, taken: list[Any]) -> Callable[[], Ruined]:
        """Return a callable that names the buffers that are not finite; restore or keep them if asked to.

        Args:
            taken: whether each optimizer's step was taken.
        """
        if any([isinstance(one, Tensor) for one in taken]):
            return self.ruined  # when it is asked for
        if all(taken):
            if self.restores:
                self.keep()
            return Ruined
        ruined = self.ruined()
        return lambda: ruined

    def ruined(self) -> Ruined:
        """Return which buffers hold inf or NaN, and put the copies back, if they are kept.

        One read per device, and a second one if buffers were restored.
        """
        self._find()
        present = self._present()
        found = {*self._early, *_non_finite(present)}
        names, self._early = tuple(name for name in present if name in found), ()
        if not self.restores:
            return Ruined(names)
        self._restore()
        remaining = _non_finite(self._present()) if names else ()
        return Ruined(names, tuple(name for name in names if name not in remaining))

    def put_back(self) -> None:
        """Put the copies back before the update: an average of the model may be taken in between."""
        self._find()
        self._early = (*self._early, *_non_finite(self._present()))
        self._restore()

    @torch.no_grad()
    def keep(self) -> None:
        """Copy all buffers: at the start, after a checkpoint, and after each step that was taken.

        Nothing is read, unless the model has buffers that it did not have before.
        """
        self._find()
        present = self._present()
        if [(n, b.shape, b.dtype, b.device) for n, b in present.items()] != [
            (n, b.shape, b.dtype, b.device) for n, b in self._kept.items()
        ]:
            self._kept = {name: buffer.detach().clone() for name, buffer in present.items()}
        elif present:
            foreach_copy_(list(self._kept.values()), list(present.values()))

    @torch.no_grad()
    def _restore(self) -> None:
        """Put the copies back; of what was never copied nothing."""
        present = self._present()
        for name, kept in self._kept.items():
            if name in present:
                # `data`: another optimizer's backward through a batch norm, which kept them, may still come.
                present[name].data.copy_(kept)

    def _find(self) -> None:
        """Find the buffers that the model has now: modules may have been added or replaced."""
        owners = {
            f"{prefix}.{name}" if prefix else name: (module, name)
            for prefix, module in self.model.named_modules()
            for name in module._buffers
        }
        known, self._owners = self._owners, owners
        new = {name for name, (module, _) in owners.items() if known.get(name, (None,))[0] is not module}
        if new:
            self._begin(new)
            self._follow()

    def _begin(self, new: set[str]) -> None:
        """Leave those of some buffers alone that are not finite now."""
        self._constant -= new
        present = {name: buffer for name, buffer in self._present().items() if name in new}
        statistics = {name for name in new if _is_statistic(*self._owners[name])}
        self._constant |= set(_non_finite(present)) - statistics  # these are never meant to be inf

    def _loaded(self, module: nn.Module) -> None:
        """Copy a module's buffers that `load_state_dict` has written."""
        names = {name for name, (owner, _) in self._owners.items() if owner is module}
        self._begin(names)
        for name, buffer in self._present().items():
            if name in names:
                self._kept[name] = buffer.detach().clone()

    def _start_following(self) -> None:
        """Follow no module yet; stop following when nobody has this object any more."""
        self._followed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._hooks: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._hooks).atexit = False

    def _follow(self) -> None:
        """Have the owners of buffers tell when their state was loaded, where copies are kept."""
        for module, _ in self._owners.values() if self.restores else ():
            if module not in self._followed:
                self._followed.add(module)
                hook = _Loaded(weakref.ref(self))
                self._hooks.append(module.register_load_state_dict_post_hook(hook))  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_followed", "_hooks")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start_following()
        if all("_load_state_dict_post_hooks" in vars(module) for module, _ in self._owners.values()):
            self._follow()  # else the model holds what is being copied, and is not complete yet

    def _present(self) -> dict[str, Tensor]:
        """Return the buffers by name, each tensor once, and of a DTensor this rank's part.

        Integers only where copies are kept: they are always finite.
        """
        found: dict[int, tuple[str, Tensor]] = {}
        for name, (module, key) in self._owners.items():
            buffer = module._buffers.get(key)
            if name in self._constant or buffer is None:
                continue
            if self.restores or buffer.is_floating_point() or buffer.is_complex():
                found.setdefault(id(buffer), (name, buffer))
        return {name: local_part(b) for name, b in found.values()}


class _Loaded:
    """What a module calls when its state was loaded; does nothing for the copy of a module."""

    def __init__(self, buffers: weakref.ref[Buffers] | None = None) -> None:
        self._buffers = buffers

    def __call__(self, module: nn.Module, _: object) -> None:
        buffers = None if self._buffers is None else self._buffers()
        if buffers is not None:
            buffers._loaded(module)

    def __reduce__(self) -> tuple[type[_Loaded], tuple[()]]:
        return _Loaded, ()


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def statistics_in(root: Any) -> list[weakref.ref[Tensor]]:
    """Return the running statistics that the batch norms in a graph have just written, not kept alive.

    Not those inside of a checkpoint or in compiled code.

    Args:
        root: the node of the loss.
    """
    return [weakref.ref(tensor) for node in nodes(root) for tensor in running_statistics(node)]


def some_are_ruined(statistics: list[weakref.ref[Tensor]]) -> bool:
    """Return whether a tensor holds inf or NaN. One read per device."""
    alive = [tensor for one in statistics if (tensor := one()) is not None]
    return bool(_non_finite({str(index): tensor for index, tensor in enumerate(alive)}))


def _is_statistic(module: nn.Module, name: str) -> bool:
    norm = isinstance(module, BatchNormBase)
    return norm and name in ("running_mean", "running_var")


@torch.no_grad()
def _non_finite(buffers: dict[str, Tensor]) -> tuple[str, ...]:
    """Return which of some buffers hold inf or NaN, in their order."""
    flags: dict[torch.device, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, buffer in buffers.items():
        if not buffer.is_meta:
            flags[buffer.device].append((name, buffer.isfinite().all()))
    bad = {
        name
        for found in flags.values()
        for (name, _), good in zip(found, torch.stack([flag for _, flag in found]).tolist(), strict=True)
        if not good
    }
    return tuple(name for name in buffers if name in bad)
