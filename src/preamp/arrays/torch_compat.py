"""The names of PyTorch that are private, or newer than the oldest release that preamp works with.

The rest of `preamp.torch` takes them from here. The comment or docstring of each says which release, of 2.6
and newer, introduced it, and what happens without it. Nothing here decides anything, and nothing loads the
compiler or Triton.

Private attributes of objects are read where they are needed. These have been the same since before 2.6:
`_version`, `_values`, `_is_view` of a tensor; `_is_flat_param` of a parameter that FSDP made;
`_parameters`, `_buffers`, `_compiled_call_impl` of a module; `_sequence_nr` of a node of autograd's graph;
`_step_supports_amp_scaling` and `_optimizer_step_pre_hooks` of an optimizer.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections import Counter, UserDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, _guards
from torch._ops import HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch.amp import autocast_mode
from torch.nn.modules import module as all_modules
from torch.optim import optimizer
from torch.utils import _foreach_utils, _python_dispatch, _pytree

from preamp.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])


def mark_constant(function: F) -> F:
    """Have the compiler run a function while it traces, and leave it out of what it compiles.

    It is what `torch.compiler.assume_constant_result` does, which loads the compiler: that takes seconds.
    Since before 2.6. Without it, the function would be traced.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def object_of(known: int) -> Any:
    """Return the object that has an identity and is alive, in a function that `mark_constant` was given.

    2.10 gives such a function no modules, and 2.13 does. Without it, no delayed recipe could be compiled
    before.
    """
    return ctypes.cast(known, ctypes.py_object).value


# ---- Scaling -----------------------------------------------------------------------------------------------

# PyTorch's optimizers are made of these. Since before 2.6; nothing works without.
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm

# PyTorch's scaler is made of these. Since before 2.6; nothing works without.
amp_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
amp_update_scale_ = torch._amp_update_scale_


# What batch and instance normalization have in common. Since before 2.6; each could be named instead.
BatchNormBase = torch.nn.modules.batchnorm._NormBase


# Whether a tensor that autograd's graph keeps can be looked at without running what unpacks it. In 2.10, and
# not in 2.6.
SHOWS_KEPT_TENSORS = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")


def running_statistics(node: Any) -> list[Tensor]:
    """Return the running statistics that a batch norm has just written, for its node of autograd's graph.

    A node that keeps its tensors through hooks has none: asking it would run a checkpoint's forward again.
    Without `SHOWS_KEPT_TENSORS` no node has any, and nobody is warned of a batch norm that a skipped step has
    ruined, where the scaler was not given the model.
    """
    if not SHOWS_KEPT_TENSORS or not getattr(node, "_saved_training", False):
        return []
    kept: list[Any] = [getattr(node, f"_raw_saved_{name}", None) for name in ("running_mean", "running_var")]
    found = [one.data for one in kept if one is not None and one.unpack_hook is None]
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


# Groups tensors by device and dtype, in C++. Since before 2.6. Without it, a loop in Python would do, as it
# does in compiled code.
group_tensors = _foreach_utils._group_tensors_by_device_and_dtype


def tree_leaves(tree: Any) -> list[Any]:
    """Return what is in nested containers, those included that were registered with PyTorch.

    Since before 2.6. Without it, the lens could not find the tensors that a module puts out.
    """
    return _pytree.tree_leaves(tree)


# Since before 2.6. Without it, the tensors among the arguments of a call could not be replaced.
tree_flatten = _pytree.tree_flatten
tree_unflatten = _pytree.tree_unflatten

# Since before 2.6. Without it, what is computed for a comparison would be compared again.
without_modes = torch._C.DisableTorchFunction


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Keep tensors for backward as they are, also inside of a checkpoint, which keeps none.

    `_top_saved_tensors_default_hooks` is there in 2.8, and not in 2.6. Without it, tensors are kept by hooks
    everywhere, which does not tell of one that is written into before the backward pass.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is not None and top(False) is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda kept: kept):
        yield


def is_in_backward() -> bool:
    """Return whether a node of autograd's graph is running.

    Since before 2.6. Without it, the lens would count again what a checkpoint computes again.
    """
    return torch._C._current_autograd_node() is not None


def is_compiled_now() -> bool:
    """Return whether the compiler traces something in this thread.

    Since before 2.6. Without it, a report would count the tracing, too.
    """
    return _guards.CompileContext.try_get() is not None


def is_in_transform() -> bool:
    """Return whether `torch.func` transforms what is running.

    Since before 2.6. Without it, the lens would read tensors that have no values.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


# Tells whether a tensor is one of `torch.func`. Since before 2.6. Without it, a loss would be kept for longer
# than the function it belongs to.
is_of_transform: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def local_part(tensor: Tensor) -> Tensor:
    """Return a DTensor's part on this rank, without a node in autograd's graph; any other tensor as it is.

    Since before 2.6. Without it, buffers that are DTensors could not be kept.
    """
    return getattr(tensor, "_local_tensor", tensor)


def in_trace() -> bool:
    """Return whether PyTorch traces this thread, for `torch.compile` or `torch.export`.

    `torch.compiler.is_compiling` is true in all threads while one of them is traced. Since before 2.6, where
    `torch.export` has a function mode and no `TracingContext`. Without it, a region in one thread would take
    the export in another for its own.
    """
    if not torch.compiler.is_compiling():
        return False
    if torch.compiler.is_dynamo_compiling() or _guards.TracingContext.try_get() is not None:
        return True
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    kind = getattr(proxies, "PreDispatchTorchFunctionMode", ())
    return any(isinstance(mode_at(place), kind) for place in range(count_modes()))


def is_exporting() -> bool:
    """Return whether `torch.export` traces what is running.

    Not in 2.6. Without it, the lens's warning of compiled calls is given for an exported model too.
    """
    exporting: Callable[[], bool] | None = getattr(torch.compiler, "is_exporting", None)
    return exporting is not None and exporting()


def is_compiler_off() -> bool:
    """Return whether nothing that is compiled runs compiled, so that this need not be asked for.

    Since 2.6, with `torch.compiler.set_stance`. Without it, the compiler would be loaded to ask it.
    """
    compiler = sys.modules.get("torch._dynamo")  # which takes long to load
    return compiler is None or compiler.eval_frame._stance.stance == "force_eager"


_OPTIMIZERS = str(Path(optimizer.__file__).parent)


def has_compiled_step() -> bool:
    """Return whether `torch.compile` may have compiled an optimizer's step in this process.

    It asks whether code was compiled that is of optimizers, or that names a method `step`. Since before 2.6.
    Without it, it says yes as soon as the compiler is loaded.
    """
    if "torch._dynamo.convert_frame" not in sys.modules:  # which takes long to load
        return False
    frames = sys.modules["torch._dynamo.convert_frame"]
    if not hasattr(frames, "input_codes"):
        return True
    codes = [code for reference in frames.input_codes.seen if (code := reference())]
    return any("step" in code.co_names or code.co_filename.startswith(_OPTIMIZERS) for code in codes)


def cpu_features() -> dict[str, bool]:
    """Return which instructions the CPU has that matter for low precision, by name.

    `get_capabilities` is there since 2.11. Before, some of them are private functions; without those, nothing
    is said.
    """
    asked = getattr(torch.cpu, "get_capabilities", None)
    if asked is not None:
        return {name: value for name, value in asked().items() if isinstance(value, bool)}
    names = {"avx512_bf16": "_is_avx512_bf16_supported", "amx_bf16": "_is_amx_tile_supported"}
    names["amx_fp16"] = "_is_amx_fp16_supported"
    found = {name: getattr(torch.cpu, function, None) for name, function in names.items()}
    return {name: bool(ask()) for name, ask in found.items() if ask is not None}


def compiler_options() -> dict[str, Any]:
    """Return options with which `torch.compile` is quick for one small function.

    By default it first compiles programs that find out which vector instructions work, for some seconds.
    Since before 2.6. Without it, it takes that time.
    """
    import torch._inductor.config as settings

    return {"cpp.vec_isa_ok": True} if hasattr(settings.cpp, "vec_isa_ok") else {}


def run_eagerly() -> AbstractContextManager[object]:
    """Run what is compiled eagerly for a while.

    `torch.compiler.set_stance` is public since 2.6, and loads the compiler: it is left out where nothing is
    compiled yet.
    """
    is_loaded = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if is_loaded else nullcontext()


def is_compiled(function: object) -> bool:
    """Return whether a function or module was given to `torch.compile`.

    The names are there since before 2.6. Without it, nothing is said of its having been run eagerly.
    """
    kept = getattr(function, "__dict__", {})
    return (
        "_torchdynamo_orig_callable" in kept
        or "_orig_mod" in kept.get("_modules", {})
        or kept.get("_compiled_call_impl") is not None
    )


@contextmanager
def counters_of_compiler() -> Iterator[None]:
    """Set the compiler's counters back to what they were.

    Since before 2.6. Without it, they would count what is compiled inside.
    """
    import torch._dynamo.utils as utils

    before = {name: Counter(counts) for name, counts in utils.counters.items()}
    try:
        yield
    finally:
        utils.counters.clear()
        utils.counters.update(before)


def scaled_mm(a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    """Return what multiplies two matrices of float8; the second has to be stored by columns.

    Since before 2.6. Without it, AttributeError: float8 counts as missing.
    """
    one, multiply = torch.ones((), dtype=torch.float32, device=a.device), torch._scaled_mm
    return lambda: multiply(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


# ---- Autocast ----------------------------------------------------------------------------------------------

# What PyTorch's modules call and `torch.nn.functional` does not have. Since before 2.6.
functions_of_modules: Any = torch._C._nn

# What PyTorch knows of operators: their names, and which have a kernel at a dispatch key. Since before 2.6;
# no table could be edited without.
DispatchKey = torch._C.DispatchKey
all_operators = torch._C._dispatch_get_all_op_names
operators_with_kernel = torch._C._dispatch_get_registrations_for_dispatch_key
name_of_private_device = torch._C._get_privateuse1_backend_name


# What a function mode may ask to be run without asking for modes again.
CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@functools.cache
def unchecked(function: Any) -> Any:
    """Return a function of PyTorch's that does not ask for function modes at its beginning.

    PyTorch's functions in Python, such as `multi_head_attention_forward`, hand themselves over to a mode and
    run without it afterwards. A mode that is to see what they call needs this. Since before 2.6; without it,
    the functions themselves have to do.
    """
    function = getattr(function, "__wrapped__", function)  # methods have the question in a decorator
    if not isinstance(function, FunctionType) or not set(CHECKS) & set(function.__code__.co_names):
        return function
    names = {**function.__globals__, **dict.fromkeys(CHECKS, _never)}
    copy = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# Deprecated functions that warn, at which the compiler would break the graph, and call `interpolate`.
UPSAMPLE: dict[Any, dict[str, Any]] = {
    torch.nn.functional.upsample: {},
    torch.nn.functional.upsample_nearest: {},
    torch.nn.functional.upsample_bilinear: {"mode": "bilinear", "align_corners": True},
}


class _Unchecked:
    """Holds the results of `unchecked` for the compiler, which reads attributes and no dictionaries."""


_unchecked = _Unchecked()


def unchecked_in_graph(function: Any) -> Any:
    """Return what `unchecked` returns, in code that is traced."""
    return getattr(_unchecked, _keep_unchecked(function))


def _keep_unchecked(function: Any) -> str:
    name = f"{function.__module__}.{function.__qualname__}".replace(".", "_")
    copy = unchecked(torch.nn.functional.interpolate if function in UPSAMPLE else function)
    setattr(_unchecked, name, functools.partial(copy, **UPSAMPLE[function]) if function in UPSAMPLE else copy)
    return name


mark_constant(_keep_unchecked)


def _never(*_: object) -> bool:
    return False


def autocast_in_backward() -> Any:
    """Return in what autocast state compiled backward passes run; None where the compiler is not loaded.

    `backward_pass_autocast` is there in 2.13, where each thread has its own, and not in every older release.
    Without it, compiled backward passes run in the region that was open during forward.
    """
    return getattr(sys.modules.get("torch._functorch.config"), "backward_pass_autocast", None)


def set_autocast_in_backward(setting: Any) -> None:
    """Set what `autocast_in_backward` returns, where it is not None, for what is compiled from now on."""
    sys.modules["torch._functorch.config"].backward_pass_autocast = setting  # type: ignore[attr-defined]


def is_higher_order(function: object) -> bool:
    """Return whether a function is one that the compiler traces what it is given into: a checkpoint, `cond`.

    Since before 2.6. Without it, such a function would be traced outside of the modes that are in force.
    """
    return isinstance(function, HigherOrderOperator)


def hand_over_to_modes(functions: Iterable[Callable[..., Any]]) -> None:
    """Have the compiler hand calls of functions over to function modes, as eager code does.

    The compiler has a set of those that it hands over. Functions that PyTorch's own functions in Python call,
    such as `torch._C._nn.upsample_bilinear2d`, are missing. `get_overridable_functions` has returned the same
    set at every call since before 2.6. Without it, edits of such functions have no effect in compiled code.
    """
    compiler = sys.modules.get("torch._dynamo.variables.torch")
    known = getattr(compiler, "get_overridable_functions", None)
    if known is not None:
        known().update(functions)


class ModuleHooks:
    """A hook before and one after each call of a module, the second also after an error.

    PyTorch's own functions number hooks, and the compiler, which looks at the numbers, would compile again
    whenever hooks are registered again. `_forward_pre_hooks`, `_forward_hooks` and
    `_forward_hooks_always_called` have been the same since before 2.6.
    """

    def __init__(self, module: Any, before: Callable[..., None], after: Callable[..., None]) -> None:
        self._module = module
        key = 0
        while f"preamp {key}" in module._forward_pre_hooks:
            key += 1
        self._key = f"preamp {key}"
        module._forward_pre_hooks[self._key] = before
        module._forward_pre_hooks.move_to_end(self._key, last=False)  # what users hook runs inside
        module._forward_hooks[self._key] = after
        module._forward_hooks_always_called[self._key] = True

    def remove(self) -> None:
        """Remove both."""
        module = self._module
        del module._forward_pre_hooks[self._key], module._forward_hooks[self._key]
        del module._forward_hooks_always_called[self._key]


@contextmanager
def hooks_in_graph(before: Callable[..., None], after: Callable[..., None]) -> Iterator[None]:
    """Have hooks run before and after each call of any module, in code that the compiler traces.

    It does not trace what adds a hook to one module. `_global_forward_pre_hooks` and `_global_forward_hooks`
    have been the same since before 2.6.
    """
    first: Any
    last: Any
    first, last = all_modules._global_forward_pre_hooks, all_modules._global_forward_hooks
    key = f"preamp {len(first)}"
    first[key], last[key] = before, after
    try:
        yield
    finally:
        del first[key], last[key]


# The modes that see the calls of PyTorch's functions in this thread, innermost last. Since before 2.6; no
# table could be edited without.
count_modes: Callable[[], int] = torch._C._len_torch_function_stack
mode_at: Callable[[int], Any] = torch._C._get_function_stack_at
push_function_mode: Callable[[Any], None] = torch._C._push_on_torch_function_stack
pop_function_mode: Callable[[], Any] = torch._C._pop_torch_function_stack


def untraced(function: F) -> F:
    """Tell Dynamo to skip the frame of this function, and from PyTorch 2.7 on those that it calls."""
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "_FrameExecStrategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    else:
        frames.skip_code(function.__code__)
    return function


untraced(untraced)  # what 2.6 is told not to trace may call it


def outside_of_graphs(function: F) -> F:
    """Have the compiler call a function, not trace it.

    It is what `torch.compiler.disable` does, without its import of the compiler. Since before 2.6. Without,
    graphs would lose what the function does.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "_FrameExecStrategy"):
        return untraced(function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        # In 2.6 what the function calls would be compiled, and `set_stance` raises where that is so.
        callback = frames.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            frames.set_eval_frame(callback)

    return cast(F, untraced(run))


class _NotCompiled:
    """An autocast region that the compiler cannot read, so that what enters it runs eagerly."""

    _dtype: torch.dtype

    @property
    def fast_dtype(self) -> torch.dtype:
        if _guards.TracingContext.try_get() is not None:
            from torch._dynamo.exc import Unsupported

            raise Unsupported("An autocast region with casting=, report= or emulate= is not compiled.")
        return self._dtype

    @fast_dtype.setter
    def fast_dtype(self, dtype: torch.dtype) -> None:
        self._dtype = dtype


# An autocast that the compiler does not take for PyTorch's own, whose settings it writes into its graph.
# Since 2.12. Without it, the compiler is stopped where it reads them.
UnmanagedAutocast: Any = getattr(autocast_mode, "_UnmanagedAutocast", _NotCompiled)


@contextmanager
def _region(*settings: Any) -> Iterator[None]:
    with torch.autocast(*settings):
        yield


NOT_INSIDE = (
    f"PyTorch {torch.__version__} cannot compile the making of a region. Make it once, outside of what is "
    "compiled: region = autocast(...), then `with region:`."
)


def _refused(*settings: Any) -> Any:
    raise UsageError(NOT_INSIDE)


def _maker_in_graphs() -> Callable[..., Any]:
    if hasattr(autocast_mode, "_UnmanagedAutocast"):
        return torch.autocast
    return _region if hasattr(torch._C._dynamo.eval_frame, "_FrameExecStrategy") else _refused


# What makes PyTorch's region in code that the compiler traces. Until 2.11 it refuses a class that makes an
# object of another class, and takes a function. A break of the graph inside has the whole caller run eagerly.
# In 2.6 it takes neither: the graph is broken, and only `fullgraph=True` raises.
traced_autocast: Callable[..., Any] = _maker_in_graphs()


# What sees every operator that runs in a thread. Since before 2.6; without it, there would be no reports.
DispatchMode = _python_dispatch.TorchDispatchMode


# Whether a backend may run a graph under a dispatch mode. 2.8 crashes; 2.10 does not. Without it, compiled
# functions run eagerly in a region with a report.
graphs_run_in_modes = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)


def compiled_by(forward: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    """Return a backend for `torch.compile`, given what makes a function of a forward graph.

    Since before 2.6. Without it, there would be no reports of compiled functions.
    """
    from torch._dynamo.backends.common import aot_autograd  # which loads the compiler
    from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]

    backend: Callable[..., Any] = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(forward(graph, inputs)),
        bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
    )
    return backend


# What puts a dispatch mode in force in this thread, and what takes the innermost one away. `with mode:` also
# sets flags of the whole process, which stay set when two threads overlap, and PyTorch 2.8 then compiles
# nothing any more. Since before 2.6; without it, `with mode:` would have to do.
push_mode: Callable[[Any], None] = _python_dispatch._push_mode
pop_mode: Callable[[], Any] = _python_dispatch._pop_mode


# The module with `_global_optimizer_pre_hooks` and `_global_optimizer_post_hooks`, for the steps of all
# optimizers. Since before 2.6; without it, a weight that is stepped inside of a region would not be cast
# again.
optimizer_hooks: Any = optimizer

# What F.pad calls for mode="circular"; since 2.0, and no function of torch calls it alone.
pad_circular: Any = torch.ops.aten._pad_circular


class HooksAndOneMore(UserDict[int, Any]):
    """PyTorch's hooks for the steps of all optimizers, with one more at the end, to take their place.

    Adding a hook to PyTorch's dictionary itself would raise "OrderedDict mutated during iteration" in a
    thread that is running the hooks of a step. Hooks that users add or remove in the meantime are added to
    PyTorch's dictionary or removed from it.

    Args:
        hooks: PyTorch's dictionary of hooks.
        hook: the one more.
        compiled: whether compiled steps run it, which breaks their graphs.
    """

    def __init__(
        self, hooks: dict[int, Callable[..., Any]], hook: Callable[..., Any], compiled: bool
    ) -> None:
        self.data, self._hook, self._compiled = hooks, hook, compiled

    @untraced
    def values(self) -> Any:  # a list, where UserDict has a view: PyTorch only iterates
        hooks = list(self.data.values())
        return [*hooks, self._hook] if self._compiled or not torch.compiler.is_compiling() else hooks
