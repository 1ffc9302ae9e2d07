from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from slime_tandem.megatron import core
from slime_tandem.megatron.core import InverseFrequencyRope, SdpaCoreAttention, TransformerConfig

from ..waiting import PATIENCE_S


def test_initialise_and_shut_down_are_idempotent_and_leave_nothing() -> None:
    core.shutdown()
    threads, hook = threading.active_count(), sys.excepthook
    for _ in range(2):
        core.ensure_initialized(1)
        core.ensure_initialized(2)
        assert dist.get_world_size() == 1
        assert core.parallel_state.get_tensor_model_parallel_world_size() == 1
        core.shutdown()
        core.shutdown()
        assert not dist.is_initialized()
    assert threading.active_count() == threads
    assert sys.excepthook is hook
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_a_script_comes_up_quietly_on_loopback_without_children(tmp_path: Path) -> None:
    # A fresh interpreter without a main guard and with warnings as errors, as a user's script: it must come up, listen
    # on loopback alone, leave no child, and end silently although it never calls shutdown.
    script = tmp_path / "script.py"
    script.write_text(
        "import warnings; warnings.simplefilter('error')\n"
        "import glob, os, pathlib\n"
        "from slime_tandem.megatron import core\n"
        "core.ensure_initialized(0)\n"
        "mine = {os.readlink(fd) for fd in glob.glob('/proc/self/fd/*') if os.path.lexists(fd)}\n"
        "hosts = set()\n"
        "for table in ('tcp', 'tcp6'):\n"
        "    for line in pathlib.Path('/proc/net', table).read_text().splitlines()[1:]:\n"
        "        fields = line.split()\n"
        "        if f'socket:[{fields[9]}]' in mine:\n"
        "            hosts.add(fields[1].split(':')[0])\n"
        "assert hosts == {'0100007F'}, hosts\n"
        "assert not any(pathlib.Path(t, 'children').read_text() for t in glob.glob('/proc/self/task/*'))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    # Where a CUDA compiler but no GPU is installed, torch itself says so; that line is not ours.
    noise = [line for line in done.stderr.splitlines() if "No CUDA runtime is found" not in line]
    assert (done.returncode, done.stdout, noise) == (0, "", [])


def test_rope_angles_survive_inference_mode() -> None:
    core.ensure_initialized(0)
    rope = InverseFrequencyRope(torch.tensor([1.0, 0.1]))
    with torch.inference_mode():
        rope(5)
    x = torch.ones(5, requires_grad=True)
    (x * rope(5)[:, 0, 0, 1]).sum().backward()
    assert torch.allclose(rope(5)[4, 0, 0], torch.tensor([4.0, 0.4, 4.0, 0.4]))
    assert x.grad is not None
    core.shutdown()


def test_rope_follows_the_model_to_its_device() -> None:
    core.ensure_initialized(0)
    assert InverseFrequencyRope(torch.ones(2)).to("meta")(3).device.type == "meta"
    assert not InverseFrequencyRope(torch.ones(2)).state_dict(), "it is derived from the config, no weight"
    core.shutdown()


def test_attention_is_causal_softmax_with_grouped_heads() -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=4, attention_dropout=0.0, cuda_graph_scope=[]
    )
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(6, 2, 4, 8, generator=generator)
    k, v = (torch.randn(6, 2, 2, 8, generator=generator) for _ in range(2))
    found = SdpaCoreAttention(config)(q, k, v, None)
    scores = torch.einsum("sbhd,tbhd->bhst", q, k.repeat_interleave(2, 2)) / 8**0.5
    scores = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), float("-inf"))
    expected = torch.einsum("bhst,tbhd->sbhd", F.softmax(scores, -1), v.repeat_interleave(2, 2)).reshape(6, 2, 32)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
