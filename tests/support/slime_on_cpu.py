"""Everything that is replaced so that slime and Megatron-LM train in this process without CUDA, with a reason each.

Invariants:
- No replacement computes anything that a test judges: loss, gradients, optimizer, schedule, weights and files come from
  slime's, Megatron's and headrace's own code.
- A replacement raises `Unexpected` when it is used in any other way than the one in its comment.
- Where the product gave a process no GPU, replacements of CUDA raise what CUDA raises there. None of them sets an
  environment variable or an argument that the product must set.
- What slime and Megatron offer as extension points is not replaced: the accelerator is registered with
  `register_accelerator`, and attention and layer names come from `--spec` (see `support.slime_cpu_layers`).

`watch_imports` installs all of it when a process first imports slime or Megatron. As a setup hook of Ray's workers it
costs nothing in workers that do not.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

from support.after_import import AfterImport

TRIGGERS = frozenset({"slime", "megatron"})
NUMPY_OF_SLIMES_IMAGE = "1.26.4"


class Unexpected(RuntimeError):
    """A replacement was used in a way that it does not cover."""


def watch_imports() -> None:
    """Install the replacements as soon as slime or Megatron is imported in this process."""
    if not any(isinstance(finder, _Trigger) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Trigger())


class _Trigger(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> None:
        if name.partition(".")[0] in TRIGGERS:
            sys.meta_path.remove(self)
            install()


def install() -> None:
    """Replace what is missing. Call it in the thread that trains: the function mode belongs to one thread."""
    # Megatron compiles small functions with torch.compile, which needs a C++ compiler and tens of seconds.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import torch
    import torch._dynamo  # before the stand-in of triton, so that torch does not find that one

    torch.set_num_threads(1)
    sys.meta_path.insert(0, _AbsentModules())
    sys.meta_path.insert(0, AfterImport("slime.backends.megatron_utils.initialize", _show_numpy_of_the_image))
    sys.meta_path.insert(0, AfterImport("slime.utils.reloadable_process_group", _name_collectives_as_this_torch))
    # Not imported here: slime itself is just being imported.
    sys.meta_path.insert(0, AfterImport("slime.utils.accelerator", _register_cpu))
    _replace_cuda(torch)


def _refuse(what: str) -> NoReturn:
    raise Unexpected(f"the replacement of {what} was used: see tests/support/slime_on_cpu.py")


class Absent:
    """Attribute of a module that is not installed: it may be named and subclassed, but never called."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        _refuse(type(self).__name__)

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Allow subclasses: modules define them while they are imported."""


class _AbsentModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that slime imports and training never calls.

    - sglang, sglang_router: engines are EngineGroup's; slime's parser imports SGLang's for flags that are skipped.
      `monkey_patch_torch_reductions`, which the saver calls, changes how CUDA tensors are pickled for another process;
      a saver's tensors go into files.
    - wandb: logging in the cloud, off without --use-wandb. `wandb.run` may be read.
    - torch_memory_saver: offloading of a colocated trainer, which headrace refuses.
    - triton: kernels for GPUs. Decorators return the function, which may not be launched.
    """

    ROOTS = ("sglang", "sglang_router", "wandb", "torch_memory_saver", "triton")

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self.ROOTS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []

        def attribute(name: str) -> object:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(f"{spec.name}.{name}", (Absent,), {})

        module.__dict__["__getattr__"] = attribute
        if spec.name == "sglang.srt.utils.patch_torch":
            module.__dict__["monkey_patch_torch_reductions"] = lambda: None
        if spec.name == "wandb":
            module.__dict__["run"] = None
        if spec.name == "triton":
            module.__dict__.update(jit=_kernel, autotune=lambda *_, **__: _kernel, heuristics=lambda *_: _kernel)
            # torch and Megatron compare versions while they are imported; configurations are built there too.
            module.__dict__.update(__version__="3.0.0", Config=lambda *_, **__: None)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to execute."""


class _Kernel:
    """GPU kernel, which cannot be launched."""

    def __getitem__(self, grid: object) -> NoReturn:
        _refuse("a triton kernel")

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        _refuse("a triton kernel")


def _kernel(function: object = None, **_: object) -> object:
    return _Kernel() if callable(function) else _kernel


def _show_numpy_of_the_image(initialize: Any) -> None:
    """slime asserts numpy 1.x, which its image has; it uses nothing of numpy there but `random`. Only that module's
    name is replaced: with the version of numpy itself changed, Ray could not import pyarrow."""
    initialize.np = types.SimpleNamespace(__version__=NUMPY_OF_SLIMES_IMAGE, random=initialize.np.random)


def _name_collectives_as_this_torch(groups: Any) -> None:
    """slime's process groups pass calls on under the names that torch had in its image. This torch calls two of them
    otherwise (`refuse_unlike_torch` is about that)."""
    own = groups.ReloadableProcessGroup
    own.all_gather_single = own._allgather_base
    own.reduce_scatter_single = own._reduce_scatter_base


class _Stream:
    """CUDA stream: on a CPU everything is in order already."""

    def wait_stream(self, stream: object) -> None:
        assert isinstance(stream, _Stream)

    def synchronize(self) -> None:
        """Return: nothing runs asynchronously."""


def _need_gpu() -> None:
    """Raise torch's error for a process without a GPU. Ray names the GPU of a task or actor in CUDA_VISIBLE_DEVICES; it
    leaves the choice to slime's ranks, which ask for that."""
    noset = os.environ.get("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES")
    if not os.environ.get("CUDA_VISIBLE_DEVICES") and not noset:
        raise RuntimeError("No CUDA GPUs are available")


def _replace_cuda(torch: Any) -> None:
    cpu = torch.device("cpu")

    class FunctionMode(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        """Tensors that Megatron asks for on "cuda" are created on the CPU, without pinned memory, and `Tensor.type()`
        answers with CUDA's name, by which Megatron's buffers are grouped."""

        def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if str(kwargs.get("device", "")).startswith("cuda"):
                _need_gpu()
                kwargs["device"] = cpu
            kwargs.pop("pin_memory", None)
            value = function(*args, **kwargs)
            if function is torch.Tensor.type and len(args) == 1 and not kwargs:
                return value.replace("torch.", "torch.cuda.", 1)
            return value

    def only(*allowed: object) -> Callable[..., None]:
        def check(*args: object) -> None:
            _need_gpu()
            if any(argument not in allowed for argument in args):
                _refuse(f"torch.cuda, for device {args}")

        return check

    here = only(None, 0, "cpu", cpu, torch.device("cuda", 0))
    cuda = torch.cuda
    # The device of Megatron's buffers and of its rotary frequencies.
    cuda.current_device = lambda: (here(), cpu)[1]
    # torch_dist checkpoints and slime's memory figures wait for the device.
    cuda.synchronize = lambda *args: here(*args)
    # Megatron reads the memory to size its buckets, and the generation to choose kernels, none of which runs.
    properties = types.SimpleNamespace(total_memory=1 << 34, major=9, minor=0, multi_processor_count=1)
    cuda.get_device_properties = lambda *args: (here(*args), properties)[1]
    cuda.get_device_capability = lambda *args: (here(*args), (9, 0))[1]
    # Copies of weights to the host and of checkpoints run on streams of their own.
    cuda.Stream = lambda *args, **kwargs: (here(), _Stream())[1]
    cuda.stream = lambda stream: nullcontext()
    cuda.current_stream = lambda *args: (here(*args), _Stream())[1]
    cuda.empty_cache = lambda: None
    # Megatron's tracker of random states forks the device's generator; the model has no dropout.
    cuda.get_rng_state = lambda *args: (here(*args), torch.get_rng_state())[1]
    cuda.set_rng_state = lambda state, *args: (here(*args), torch.set_rng_state(state))[1]
    torch.nn.Module.cuda = lambda module, *args: (here(*args), module)[1]
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: (here(*args), tensor)[1]
    FunctionMode().__enter__()


def _register_cpu(accelerator: Any) -> None:
    """Add the CPU through slime's own extension point, and select it. It is not a replacement: it turns slime's nccl
    into gloo, and `LOCAL_RANK` into the only device there is."""

    class CpuAccelerator(accelerator.Accelerator):  # type: ignore[misc]
        name = device_type = "cpu"
        communication_backend_name = "gloo"
        visible_devices_env = "SLIME_TEST_CPUS"

        def is_available(self) -> bool:
            return True

        def device(self, index: object = None) -> object:
            import torch

            return torch.device("cpu")

        def device_name(self, index: object = None) -> str:
            return "cpu"

        def set_device(self, index: object) -> None:
            """Return: there is one device."""

        def current_device(self) -> str:
            return "cpu"

        def device_count(self) -> int:
            return 1

        def synchronize(self, device: object = None) -> None:
            """Return: nothing runs asynchronously."""

        def current_stream(self, device: object = None) -> _Stream:
            return _Stream()

        def empty_cache(self) -> None:
            """Return: the CPU has no cache of its own."""

        def mem_get_info(self, device: object = None) -> tuple[int, int]:
            return 1 << 34, 1 << 34

        def memory_allocated(self, device: object = None) -> int:
            return 0

        def memory_reserved(self, device: object = None) -> int:
            return 0

        def communication_backend(self, default: str = "nccl") -> str:
            return "gloo"

        def weight_update_backend(self, default: str = "nccl") -> str:
            if (name := os.environ.get("HEADRACE_TEST_BACKEND", "gloo")) == "lazy":
                from support import lazy_backend

                lazy_backend.register()
            return name

        def resolve_visible_device_id(self, physical: object) -> int:
            return 0

    accelerator.register_accelerator("cpu", CpuAccelerator, is_available=lambda: True)
    accelerator.set_accelerator(CpuAccelerator())
