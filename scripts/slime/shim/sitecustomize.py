"""Start-up shim for machines that slime was not made for; slime's, Megatron's and SGLang's sources stay as they are.

Python imports this module by its name when its folder is on PYTHONPATH. It waits for these modules to be imported:
- slime's backends/megatron_utils/initialize.py asserts numpy 1.x; its `np` becomes one that says so (what it calls is the same
  in 2.x).
- Megatron's core/optimizer/distrib_optimizer.py: without Transformer Engine and Apex it cannot load a checkpoint, because
  `state_dict` wants the step count of an optimizer that has not stepped (an assertion), and the tensors of a checkpoint lack
  the count that PyTorch's Adam keeps beside its moments (a KeyError). It gets the state of step 0; the count comes from the
  checkpoint's groups, where Megatron keeps it. With data parallel ranks it cannot write one either: that count is no slice of a
  buffer (an assertion), and is left out of the tensors.
- slime's utils/reloadable_process_group.py wraps process groups and hands on the collectives of older torches; those that torch
  2.13 calls in their place (`reduce_scatter_single` and its kin) would find no backend.
- SLIME_TANDEM_CPU=1: Megatron's training/utils.py, asked for the GPU's generation where a model is cut by tensor or context,
  says 9 (a Hopper's); slime's utils/accelerator gets a CPU backend, and the names of torch.cuda that Megatron and slime call
  directly do nothing or give the CPU (scripts/slime/shim/cpu_device.py). For tests on machines without a GPU, nothing else.
"""

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

_ON_CPU = os.environ.get("SLIME_TANDEM_CPU") == "1"


class _Numpy1:
    """numpy, with a version that slime accepts."""

    __version__ = "1.26.4"

    def __init__(self, numpy):
        self._numpy = numpy

    def __getattr__(self, name):
        return getattr(self._numpy, name)


def _initialize(module):
    module.np = _Numpy1(module.np)
    if _ON_CPU:
        import cpu_device

        cpu_device.patch_torch()


def _accelerator(module):
    if _ON_CPU:
        import cpu_device

        cpu_device.register(module)


def _process_groups(module):
    import torch

    wrapper = module.ReloadableProcessGroup
    for name in ("all_gather_single", "reduce_scatter_single", "all_to_all_single"):
        if hasattr(torch.distributed.ProcessGroup, name) and name not in vars(wrapper):

            def handed_on(self, *args, _name=name, **kwargs):
                return self._fwd(_name, *args, **kwargs)

            setattr(wrapper, name, handed_on)


def _training_utils(module):
    if _ON_CPU:
        module.get_device_arch_version = lambda: 9


def _distrib_optimizer(module):
    if module.HAVE_APEX_OR_TE:
        return
    import torch

    told = module.DistributedOptimizer.state_dict

    def state_dict(self):
        for parameter in (p for group in self.optimizer.param_groups for p in group["params"]):
            if not self.optimizer.state[parameter]:
                moments = {name: torch.zeros_like(parameter.data) for name in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[parameter].update(step=torch.zeros(()), **moments)
        return told(self)

    take = module.DistributedOptimizer._set_main_param_and_optimizer_states

    def take_states(self, model_param, tensors):
        group, place = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        state["step"] = state["step"].clone()  # Megatron gives all parameters one tensor, which Adam counts up in place
        take(self, model_param, {"step": state["step"], **tensors})

    give = module.DistributedOptimizer._get_main_param_and_optimizer_states

    def give_states(self, model_param):
        return {name: value for name, value in give(self, model_param).items() if name != "step"}

    module.DistributedOptimizer.state_dict = state_dict
    module.DistributedOptimizer._get_main_param_and_optimizer_states = give_states
    module.DistributedOptimizer._set_main_param_and_optimizer_states = take_states


_AFTER = {
    "megatron.core.optimizer.distrib_optimizer": _distrib_optimizer,
    "megatron.training.utils": _training_utils,
    "slime.backends.megatron_utils.initialize": _initialize,
    "slime.utils.accelerator": _accelerator,
    "slime.utils.reloadable_process_group": _process_groups,
}


class _Finder:
    """Finds these modules as usual, and runs what belongs behind their import."""

    looking = False

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        after = _AFTER.get(name)
        if after is None or cls.looking:
            return None
        cls.looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            cls.looking = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                after(module)

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder)

# The machine may have a module of this name itself.
_here = Path(__file__).resolve()
_elsewhere = [p for p in sys.path if p and Path(p).resolve() != _here.parent]
_own = importlib.machinery.PathFinder.find_spec("sitecustomize", _elsewhere)
if _own is not None and _own.loader is not None:
    _own.loader.exec_module(importlib.util.module_from_spec(_own))
