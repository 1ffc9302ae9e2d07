"""A CPU in the place of the GPU that slime and Megatron call by name; gloo in the place of NCCL. For tests only.

What is replaced: slime's accelerator, Megatron's random-number tracker (it holds CUDA generators), the functions of torch.cuda
that are called without asking, and literal "cuda" devices. Nothing here computes anything.
"""

import contextlib
import os

import torch

_CPU = torch.device("cpu")


def register(accelerator):
    """Give slime an accelerator that is the CPU."""
    from slime.utils.accelerator.base import Accelerator

    class Cpu(Accelerator):
        name, device_type, communication_backend_name = "cpu", "cpu", "gloo"

        def is_available(self):
            return True

        def device(self, index=None):
            return _CPU

        def device_name(self, index=None):
            return "cpu"

        def set_device(self, index):
            pass

        def distributed_device_id(self, index=None):
            return None  # torch binds process groups to accelerators alone

        def current_device(self):
            return "cpu"

        def device_count(self):
            return 1

        def synchronize(self, device=None):
            pass

        def current_stream(self, device=None):
            return None

        def empty_cache(self):
            pass

        def mem_get_info(self, device=None):
            return (2**30, 2**31)

        def memory_allocated(self, device=None):
            return 0

        def memory_reserved(self, device=None):
            return 0

        def supports(self, capability):
            return False

    accelerator.register_accelerator("cpu", Cpu, lambda: True, priority=1000, communication_backends=("gloo",))
    os.environ["SLIME_ACCELERATOR"] = "cpu"


class _Stream:
    """A stream or event on which nothing is ever waiting."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: self


class _Tracker:
    """Megatron's CudaRNGStatesTracker over the CPU's generator."""

    def __init__(self, *args, **kwargs):
        self.reset()

    def is_initialized(self):
        return bool(self.states_)

    def reset(self):
        self.states_ = {}

    def get_states(self):
        return dict(self.states_)

    def set_states(self, states):
        self.states_ = states

    def add(self, name, seed):
        before = torch.get_rng_state()
        torch.manual_seed(seed)
        self.states_[name] = torch.get_rng_state()
        torch.set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name="model-parallel-rng"):
        before = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(before)


class _CudaIsCpu(torch.overrides.TorchFunctionMode):
    """Literal "cuda" devices become the CPU; a CPU tensor says that its type is a CUDA one, as Megatron's optimizer demands."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        out = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(out, str):
            return out.replace("torch.", "torch.cuda.", 1)
        return out


_mode = None


def patch_torch():
    """Make torch.cuda harmless in this process, for good."""
    global _mode
    import megatron.core.tensor_parallel.random as megatron_random
    import sglang.srt.utils.patch_torch as sglang_patch

    megatron_random.CudaRNGStatesTracker = _Tracker
    cuda = torch.cuda
    for name in ("set_device", "synchronize", "empty_cache", "ipc_collect"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.current_device, cuda.device_count, cuda.is_available = lambda: _CPU, lambda: 1, lambda: False
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = _Stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    torch.multiprocessing.set_sharing_strategy("file_system")
    # SGLang rewrites the device index in what CUDA tensors are pickled as; CPU tensors have none there.
    rewrite = sglang_patch._modify_tuple
    sglang_patch._modify_tuple = lambda t, index, change: rewrite(t, index, change) if index < len(t) else t
    _mode = _CudaIsCpu()
    _mode.__enter__()
