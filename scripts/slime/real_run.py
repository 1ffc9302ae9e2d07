#!/usr/bin/env python3
"""slime's own train.py, unmodified, with Tandem RL, distillation from another vocabulary and a token mask; on GPUs or a CPU.

    scripts/slime/real_run.py --slime SLIME --megatron MEGATRON --models TRIO --prompts FILE --work DIR [--cpu] [--fused]

`TRIO` holds the folders junior, senior and teacher (`python -m slime_tandem.models.builtin` makes one). Junior and teacher get
servers of their own beside slime's senior; with --fused the junior is inside the senior's. The run stops nothing that it did
not start. docs/slime.md explains the flags; docs/results/slime-cpu.md is a run of this script.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import yaml

REPO = Path(__file__).resolve().parents[2]
HOOKS = "slime_tandem.slime_hooks.hooks"


def parser():
    """Every flag of this script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--slime", "--megatron", "--models", "--prompts", "--work"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--python", default=sys.executable, help="has slime's, SGLang's and this project's packages")
    parser.add_argument("--cpu", action="store_true", help="fake the device layer (scripts/slime/shim)")
    parser.add_argument("--fused", action="store_true", help="senior and junior in one engine")
    parser.add_argument(
        "--steps", type=int, default=20, help="rollouts until the end of the run, resumed ones included"
    )
    parser.add_argument("--prompts-per-step", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--updates", type=int, default=1, help="optimizer steps per rollout")
    parser.add_argument("--max-tokens", type=int, default=48, help="response cap")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--save-interval", type=int, default=10)
    parser.add_argument("--eval-prompts", type=Path, help="evaluate solo and with the junior on this file")
    parser.add_argument("--eval-interval", type=int, default=10)
    parser.add_argument(
        "--embedded", action="store_true", help="the embedded server for junior and teacher, not SGLang"
    )
    parser.add_argument("--set", nargs="*", default=[], help="settings of slime_tandem, key=value")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size of the trainer")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel size of the trainer")
    parser.add_argument("--cp", type=int, default=1, help="context parallel size of the trainer")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of the trainer")
    parser.add_argument("--rollout-gpus", type=int, help="GPUs of the senior's engines; default: as the trainer")
    parser.add_argument("--engine-gpus", type=int, default=1, help="GPUs of each of them: its tensor parallel size")
    parser.add_argument("--side-gpu", help="CUDA_VISIBLE_DEVICES of junior and teacher; default: the first GPU")
    parser.add_argument(
        "--offload", action="store_true", help="trainer and engine give the memory up in turn, slime's default"
    )
    parser.add_argument("--standard-spec", action="store_true", help="Megatron's layer with Transformer Engine")
    parser.add_argument("--fraction", type=float, default=0.3, help="memory of the GPU for the senior's server")
    parser.add_argument("--side-fraction", type=float, default=0.15, help="the same, junior's and teacher's each")
    parser.add_argument("--plain", action="store_true", help="slime alone: its GRPO, none of our hooks, one model")
    parser.add_argument("--no-junior", action="store_true", help="the senior writes alone")
    parser.add_argument("--no-teacher", action="store_true", help="no distillation")
    parser.add_argument("--rm-type", help="slime's own reward (e.g. random) instead of this package's")
    parser.add_argument("--context", type=int, default=512, help="context of the servers, tokens")
    parser.add_argument("--tokens-per-gpu", type=int, default=4096, help="tokens of a micro-batch of the trainer")
    parser.add_argument("--pool-tokens", type=int, default=131072, help="KV pool of each server, tokens")
    parser.add_argument("--graph-batch", type=int, default=64, help="largest batch that is decoded by a CUDA graph")
    parser.add_argument(
        "--no-save", action="store_true", help="write no checkpoint; a run goes on from one that is there"
    )
    parser.add_argument("--no-dump", action="store_true", help="keep no rollouts for compare_loss.py")
    parser.add_argument("--side-prefill", type=int, help="tokens of a prefill of junior's and teacher's servers")
    parser.add_argument(
        "--own-network",
        action="store_true",
        help="a network of this run alone (root): slime asks which ports from 15000 on are free long before it takes them",
    )
    parser.add_argument("--limit", type=float, default=3600, help="seconds until train.py is ended")
    parser.add_argument("--entry", default="train.py", help="train_async.py with slime's fully_async rollout")
    parser.add_argument("extra", nargs="*", help="more flags for slime, after --")
    return parser


def model_flags(folder, own_layers):
    """slime's model arguments from a Hugging Face config; without what Transformer Engine fuses for experts."""
    from slime_tandem.slime_launch.sizes import architecture
    from slime_tandem.slime_launch.sizes import model_flags as flags_of

    arch = architecture(str(folder))
    fused = {"--moe-grouped-gemm", "--moe-permute-fusion"} if own_layers else set()
    flags = [flag for flag in flags_of(arch) if flag not in fused]
    length = (
        ["--seq-length", arch.max_positions] if arch.max_positions < 4096 else []
    )  # slime's own 4096 would be too long
    return [*flags, *length, "--make-vocab-size-divisible-by", 1, "--model-name", arch.model_type]


def settings(a, urls):
    """Our section for --custom-config-path."""
    tree = {
        "models": {role: str(a.models / role) for role in ("junior", "teacher")},
        "tandem": {"enabled": not a.no_junior, "selection_strategy": "word", "prob_senior": 0.5},
        "opd": {"enabled": False}
        if a.no_teacher
        else {
            "enabled": True,
            "coef": 0.2,
            "selection": {"selector": "teachability_entropy", "ratio": 0.5, "top_k": 8},
        },
        "objective": {"scale_advantages": "none"},
        "engine": {"mode": "fused" if a.fused else "two_servers", "request_timeout_s": 300.0, **urls},
    }
    for item in a.set:
        name, _, value = item.partition("=")
        *parents, leaf = name.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = yaml.safe_load(value)
    return {"slime_tandem": tree}


def set_to(a, name, default):
    """What --set says of a setting."""
    found = [item.partition("=")[2] for item in a.set if item.partition("=")[0] == name]
    return found[-1] if found else default


def server_flags(a):
    """Flags of SGLang that hold for every server of the run."""
    if a.cpu:
        flags = {
            "device": "cpu", "attention-backend": "torch_native", "sampling-backend": "pytorch", "dtype": "float32",
            "max-total-tokens": 8192, "grammar-backend": "none",
        }  # fmt: skip
        return flags, ["disable-cuda-graph", "sleep-on-idle"]
    flags = {
        "attention-backend": "triton", "sampling-backend": "pytorch", "grammar-backend": "none",
        "dtype": "bfloat16", "cuda-graph-max-bs": a.graph_batch, "max-total-tokens": a.pool_tokens, "max-running-requests": 128,
    }  # fmt: skip
    return flags, ["disable-piecewise-cuda-graph"]


def asynchronous(a):
    """Trainer and senior have GPUs of their own, and work at the same time."""
    return a.entry == "train_async.py"


def hook_flags(config):
    """What names our hooks, but for the reward."""
    return (
        "--custom-config-path", config,
        "--data-source-path", "slime_tandem.slime_hooks.data_source.MessagesDataSource",
        "--custom-generate-function-path", f"{HOOKS}.generate",
        "--rollout-sample-hook-path", f"{HOOKS}.score_sample",
        "--custom-reward-post-process-path", f"{HOOKS}.reward_post_process",
        "--custom-rollout-log-function-path", f"{HOOKS}.log_rollout",
        "--custom-eval-rollout-log-function-path", f"{HOOKS}.log_eval",
        "--custom-megatron-init-path", f"{HOOKS}.megatron_init",
        "--custom-advantage-function-path", f"{HOOKS}.advantages",
        "--rollout-data-postprocess-path", f"{HOOKS}.data_post_process",
        "--custom-megatron-before-train-step-hook-path", f"{HOOKS}.before_train_step",
        "--loss-type", "custom_loss", "--custom-loss-function-path", f"{HOOKS}.loss",
    )  # fmt: skip


def checkpoint_flags(a):
    """Where a run goes on from, and what it leaves; with --no-save it goes on from what an earlier part left."""
    kept = a.work / "checkpoints"
    load = ("--load", kept) if kept.exists() or not a.no_save else ()
    return (*load, *(() if a.no_save else ("--save", kept, "--save-interval", a.save_interval)))


def slime_flags(a, config):
    """Every flag of train.py."""
    senior = a.models / "senior"
    positions = json.loads((senior / "config.json").read_text())["max_position_embeddings"]
    flags, switches = server_flags(a)
    sglang = [x for name, value in flags.items() for x in (f"--sglang-{name}", value)]
    sglang += [f"--sglang-{name}" for name in switches]
    out = [
        "--actor-num-nodes", 1, "--actor-num-gpus-per-node", a.gpus, "--num-gpus-per-node", a.gpus,
        "--rollout-num-gpus", a.rollout_gpus or a.gpus, "--rollout-num-gpus-per-engine", a.engine_gpus,
        *(() if asynchronous(a) else ("--colocate",)),
        *(() if a.offload else ("--no-offload-train", "--no-offload-rollout")),
        "--hf-checkpoint", senior, "--ref-load", senior,
        *checkpoint_flags(a), *model_flags(senior, not a.standard_spec),
        "--attention-dropout", 0.0, "--hidden-dropout", 0.0,
        "--accumulate-allreduce-grads-in-fp32", "--attention-softmax-in-fp32",
        "--tensor-model-parallel-size", a.tp, "--pipeline-model-parallel-size", a.pp, "--context-parallel-size", a.cp,
        "--expert-model-parallel-size", 1, "--expert-tensor-parallel-size", 1,
        *(("--sequence-parallel",) if a.tp > 1 else ()),
        "--use-dynamic-batch-size", "--max-tokens-per-gpu", a.tokens_per_gpu,
        "--prompt-data", a.prompts, "--input-key", "prompt", "--label-key", "label", "--apply-chat-template",
        "--rollout-shuffle", "--num-rollout", a.steps, "--rollout-batch-size", a.prompts_per_step,
        "--n-samples-per-prompt", a.group, "--global-batch-size", a.prompts_per_step * a.group // a.updates,
        "--rollout-max-response-len", a.max_tokens, "--rollout-temperature", 1.0,
        "--advantage-estimator", "grpo", "--eps-clip", 0.2, "--eps-clip-high", 0.28,
        "--entropy-coef", set_to(a, "objective.entropy_coef", 0.0),
        "--disable-grpo-std-normalization", "--use-rollout-logprobs",
        "--optimizer", "adam", "--lr", a.lr, "--lr-decay-style", "constant", "--override-opt-param-scheduler",
        "--weight-decay", 0.0,
        "--adam-beta1", 0.9, "--adam-beta2", 0.95,
        *(() if a.plain else hook_flags(config)),
        *(("--rm-type", a.rm_type) if a.rm_type else () if a.plain else ("--custom-rm-path", f"{HOOKS}.reward")),
        *(() if a.no_dump else ("--dump-details", a.work / "dump")),
        "--sglang-mem-fraction-static", a.fraction, "--sglang-context-length", min(a.context, positions),
        "--sglang-server-concurrency", 128, "--sglang-log-level", "warning", *sglang,
    ]  # fmt: skip
    # Megatron's output layer would need Apex for it, with either spec (tensor_parallel/layers.py:940).
    out += ["--no-gradient-accumulation-fusion"]
    if not a.standard_spec:
        out += [
            "--spec", "slime_tandem.slime_hooks.spec", "layer_spec", "--transformer-impl", "local",
            "--no-persist-layer-norm", "--no-rope-fusion",
            "--no-masked-softmax-fusion", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion",
            "--cp-comm-type", "all_gather",
        ]  # fmt: skip
    if a.cpu:
        out += ["--update-weight-transport", "disk", "--update-weight-disk-dir", a.work / "weights"]
    if a.eval_prompts is not None:
        evaluation = a.work / "eval.yaml"
        both = {
            "path": str(a.eval_prompts),
            "input_key": "prompt",
            "label_key": "label",
            "n_samples_per_eval_prompt": 1,
        }
        junior = {"custom_generate_function_path": f"{HOOKS}.generate_with_junior"}
        sets = [{"name": "solo", **both}, {"name": "with_junior", **both, **junior}]
        evaluation.write_text(yaml.safe_dump({"eval": {"datasets": sets}}))
        out += ["--eval-config", evaluation, "--eval-interval", a.eval_interval]
    return [str(x) for x in (*out, *a.extra)]


def environment(a):
    """Variables of every process of the run."""
    paths = [REPO / "scripts" / "slime" / "shim", REPO, a.slime, a.megatron, os.environ.get("PYTHONPATH")]
    out = {
        **os.environ,
        "PYTHONPATH": ":".join(str(p) for p in paths if p),
        "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1", "MASTER_ADDR": "127.0.0.1", "SLIME_HOST_IP": "127.0.0.1",
        "no_proxy": "127.0.0.1,localhost", "NO_PROXY": "127.0.0.1,localhost",
        "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0",
        "RAY_raylet_start_wait_time_s": "180",
        "RAY_AUTH_MODE": "disabled", "RAY_memory_monitor_refresh_ms": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
        "SGLANG_ENABLE_JIT_DEEPGEMM": "0", "TORCHDYNAMO_DISABLE": "1",
    }  # fmt: skip
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        out.setdefault(name, "lo")
    if a.cpu:
        out |= {
            "SLIME_TANDEM_CPU": "1", "SGLANG_USE_CPU_ENGINE": "1", "TORCH_COMPILE_DISABLE": "1",
            "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
        }  # fmt: skip
    return out


def side_roles(a):
    """Roles with a server beside slime's own."""
    junior = not (a.plain or a.fused or a.no_junior)
    return (("junior",) if junior else ()) + (() if a.plain or a.no_teacher else ("teacher",))


def side_servers(a, env):
    """Servers of junior and teacher, not yet started, by setting."""
    from slime_tandem.engines.processes import ServerProcess
    from slime_tandem.engines.sglang import SglangProcess

    flags, switches = server_flags(a)
    flags |= {"context-length": a.context, **({"chunked-prefill-size": a.side_prefill} if a.side_prefill else {})}
    extra = [x for name, value in flags.items() if name != "device" for x in (f"--{name}", str(value))]
    extra += [f"--{name}" for name in switches] + [
        "--mem-fraction-static",
        str(a.side_fraction),
        "--log-level",
        "warning",
    ]
    out = {}
    for role in side_roles(a):
        log = a.work / f"{role}.log"
        if a.embedded:
            out[f"{role}_url"] = ServerProcess(str(a.models / role), log_file=log)
        else:
            device = "cpu" if a.cpu else "cuda"
            out[f"{role}_url"] = SglangProcess(
                a.models / role, python=a.python, log_file=log, device=device, extra_args=extra, start_timeout_s=400
            )
    os.environ.update(
        {k: v for k, v in env.items() if k.startswith(("PYTHON", "SGLANG", "HF_", "OMP_", "no_p", "NO_P"))}
    )
    if a.side_gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = a.side_gpu
    return out


_START = """
import runpy, sys, ray
cards, cpus, temp, entry = [int(card) for card in sys.argv[1].split(",")], int(sys.argv[2]), sys.argv[3], sys.argv[4]
ray.init(num_gpus=max(cards) + 1, num_cpus=cpus, include_dashboard=False, _temp_dir=temp, _node_ip_address="127.0.0.1",
         object_store_memory=10**9)
if len(cards) <= max(cards):
    @ray.remote(num_gpus=1, num_cpus=0)
    class Holds:
        def card(self):
            return int(ray.get_gpu_ids()[0])
    held = [Holds.remote() for _ in range(max(cards) + 1)]
    for one, number in zip(held, ray.get([one.card.remote() for one in held]), strict=True):
        if number in cards:
            ray.kill(one)
sys.argv = [entry, *sys.argv[5:]]
runpy.run_path(entry, run_name="__main__")
"""
"""Ray with resources of our choice, then slime's program as it is; Ray's processes end with this one. Cards that are not ours
are held by actors: slime takes Ray's numbers of cards for the driver's, so that CUDA_VISIBLE_DEVICES may not renumber them."""


def cards_of(a, env):
    """Numbers of the cards of trainer and senior: those of CUDA_VISIBLE_DEVICES, taken out of `env`, else the first."""
    needed = a.gpus + asynchronous(a) * (a.rollout_gpus or a.gpus)
    visible = env.pop("CUDA_VISIBLE_DEVICES", None) if not a.cpu else None
    if visible is None:
        return list(range(needed))
    try:
        cards = [int(card) for card in visible.split(",")]
    except ValueError:
        cards = []
    if len(cards) < needed:
        sys.exit(
            f"CUDA_VISIBLE_DEVICES: {visible!r}: expected numbers of at least {needed} cards. Remedy: correct it, or unset it"
        )
    return sorted(cards[:needed])


def fused_flags(a, env, section):
    """What the fused engine adds to slime's flags, as `slime-tandem config --check` prints it; variables go into `env`."""
    from slime_tandem.config import RunConfig
    from slime_tandem.engines.fused.launch import catch_up_of, slime_settings
    from slime_tandem.team.roster import Roster

    tree = section["slime_tandem"]
    config = RunConfig.from_mapping({**tree, "models": {**tree["models"], "senior": str(a.models / "senior")}})
    roster = Roster(config)
    variables, flags = slime_settings(
        roster.folders["senior"],
        roster.folders["junior"],
        roster.fused_tables(),
        a.work / "fused",
        catch_up_of(config.engine.fused_attention, roster.folders["senior"]),
        config.engine.fused_prefill,
    )
    env["SGLANG_EXTERNAL_MODEL_PACKAGE"] = variables["SGLANG_EXTERNAL_MODEL_PACKAGE"]
    return flags


def wait_for(servers, start):
    """Until every server answers."""
    for server in servers.values():
        server.wait_ready()
    print(f"servers of junior and teacher up after {time.monotonic() - start:.0f} s", flush=True)


def own_network():
    """Move this process, and with it every process that it starts, into a network that has the loopback alone."""
    import ctypes
    import fcntl
    import socket
    import struct

    new_network, set_flags, up = 0x40000000, 0x8914, 0x1  # CLONE_NEWNET, SIOCSIFFLAGS, IFF_UP
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(new_network):
        why = os.strerror(ctypes.get_errno())
        sys.exit(
            f"--own-network: expected the right to make a network ({why}). Remedy: run as root, or one run at a time"
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sh14x", b"lo", up))


def main():
    a = parser().parse_args()
    if a.own_network:  # before there is a second thread, which would stay behind
        own_network()
    a = argparse.Namespace(**{k: v.resolve() if isinstance(v, Path) else v for k, v in vars(a).items()})
    needed = [a.slime / a.entry, a.megatron / "megatron", a.prompts, *filter(None, [a.eval_prompts])]
    roles = {"senior", *side_roles(a), *(("junior",) if a.fused else ())}
    needed += [a.models / role / "config.json" for role in sorted(roles)]
    for path in needed:  # before any server starts
        if not path.exists():
            sys.exit(
                f"{path}: expected to be there. Remedy: correct --slime, --megatron, --models, --prompts or --entry"
            )
    a.work.mkdir(parents=True, exist_ok=True)
    env = environment(a)
    cards = cards_of(a, env)
    servers = side_servers(a, env)
    t0 = time.monotonic()
    try:
        for server in servers.values():
            server.launch()
        # Embedded: their ports are known when they are up. On a GPU: SGLang sizes its pool by what is free before and after it
        # loads weights, and a trainer that starts meanwhile takes from the same card.
        waited = a.embedded or not a.cpu
        if waited:
            wait_for(servers, t0)
        config = a.work / "tandem.yaml"
        section = settings(a, {name: s.url for name, s in servers.items()})
        config.write_text(yaml.safe_dump(section, sort_keys=False))
        # The last of a repeated flag counts: what the machine needs stands behind the flags of the fused engine.
        flags = (fused_flags(a, env, section) if a.fused else []) + slime_flags(a, config)
        (a.work / "command.txt").write_text(f"{a.entry} {shlex.join(flags)}\n")
        start = [
            a.python,
            "-W",
            "ignore",
            "-c",
            _START,
            ",".join(map(str, cards)),
            "16",
            f"/tmp/r{os.getpid()}",
            str(a.slime / a.entry),
        ]
        log = a.work / "train.log"
        with log.open("ab") as out:
            train = subprocess.Popen([*start, *flags], cwd=a.slime, env=env, stdout=out, stderr=out)
            try:
                if not waited:  # slime starts its own engine meanwhile, which takes as long
                    wait_for(servers, t0)
                code = train.wait(timeout=a.limit)
            except subprocess.TimeoutExpired:
                code = 124
            finally:
                train.terminate()
                try:
                    train.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    train.kill()
                    train.wait()
        print(f"{a.entry} ended with {code} after {time.monotonic() - t0:.0f} s; log: {log}", flush=True)
        return code
    finally:
        for server in servers.values():
            server.stop()


if __name__ == "__main__":
    sys.path.insert(0, str(REPO))
    from slime_tandem.signals import terminate_as_interrupt

    with terminate_as_interrupt():
        sys.exit(main())
