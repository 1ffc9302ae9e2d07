#!/usr/bin/env python3
"""The loss of one dumped rollout, by slime's functions and by the local runtime; run it in slime's Python, on a CPU.

    PYTHONPATH=.:SLIME:MEGATRON scripts/slime/compare_loss.py WORK ROLLOUT [--senior FOLDER] [--models TRIO]

WORK is the folder of a run of real_run.py. The samples of its dump go through slime's conversion, schedule, micro-batches and
loss function, with the logits of the local runtime's Megatron model in float32; the local trainer gets the same samples.
`FOLDER`: the weights that the rollout was trained from (default: those of the start, right for rollout 0). `TRIO`: the folder
of senior, junior and teacher, for a dump of another machine. What slime logged, in bfloat16, is printed beside it. Ends with 1
where the two losses differ by more than 1e-4. slime asks for a GPU when it is imported: the script starts itself again with
scripts/slime/shim first on the path. --help needs none of slime, Megatron and ray.
"""

import argparse
import importlib.util
import logging
import os
import sys
from argparse import Namespace
from pathlib import Path

KEYS = (
    "tokens", "multimodal_train_inputs", "packed_seq_params", "total_lengths", "response_lengths", "loss_masks", "log_probs",
    "ref_log_probs", "values", "advantages", "returns", "rollout_log_probs", "teacher_log_probs", "rollout_mask_sums",
)  # fmt: skip
"""What slime's train step asks of a batch (backends/megatron_utils/model.py, train_one_step)."""


def slimes_loss(args, samples, logits):
    """slime's metrics of one optimizer step over `samples`; `logits` [T, V] by sample index."""
    import ray
    import torch
    from slime.backends.megatron_utils import actor, data, loss
    from slime.ray import rollout

    from slime_tandem.slime_hooks import hooks

    held = {}
    ray.put = lambda value, **_: held.setdefault("box", value) and "box"
    ray.get = lambda name: dict(held[name])
    manager = object.__new__(rollout.RolloutManager.__ray_metadata__.modified_class)
    manager.args, manager.custom_convert_samples_to_train_data_func = args, None
    manager.custom_reward_post_process_func = hooks.reward_post_process
    parallel = {"dp_size": 1, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    manager.train_parallel_config = parallel
    refs = manager._split_train_data_by_dp(manager._convert_samples_to_train_data(samples))
    box = actor.MegatronTrainRayActor._get_rollout_data(Namespace(args=args), refs)
    loss.compute_advantages_and_returns(args, box)
    hooks.data_post_process(args, 0, box)
    hooks.before_train_step(args, 0, 0, None, None, None)
    (iterator,) = data.get_data_iterator(box)
    metrics = {}
    for indices in box["micro_batch_indices"]:
        batch = data.get_batch(iterator, KEYS, 128, False)
        packed = torch.cat([logits[box["sample_indices"][j]] for j in indices])
        packed = torch.nn.functional.pad(packed, (0, 0, 0, batch["tokens"].shape[1] - len(packed)))[None]
        _, _, log = loss.loss_function(args, batch, len(box["micro_batch_indices"]), args.global_batch_size, packed)
        for name, value in zip(log["keys"], log["values"][1:].tolist(), strict=True):
            metrics[name] = metrics.get(name, 0.0) + value / args.global_batch_size
    return metrics


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("rollout", type=int)
    parser.add_argument("--senior", type=Path)
    parser.add_argument("--models", type=Path)
    a = parser.parse_args()
    models = (a.models,) if a.models else ()
    for path in (a.work / "dump" / "rollout_data" / f"{a.rollout}.pt", a.work / "tandem.yaml", a.work / "train.log"):
        if not path.is_file():
            parser.error(
                f"{path}: expected a file of the run. Remedy: name the folder of a run of real_run.py and a rollout it dumped"
            )
    for folder in (*filter(None, (a.senior,)), *(m / r for m in models for r in ("senior", "junior", "teacher"))):
        if not (folder / "config.json").is_file():
            parser.error(f"{folder}: expected a model's folder with config.json. Remedy: correct --senior or --models")
    for name in ("slime", "megatron", "slime_tandem"):
        if importlib.util.find_spec(name) is None:
            parser.error(f"{name}: not found. Remedy: PYTHONPATH=.:SLIME:MEGATRON, as in the first lines of --help")
    if os.environ.get("SLIME_TANDEM_CPU") != "1":
        shim = str(Path(__file__).resolve().parent / "shim")
        paths = os.pathsep.join(filter(None, (shim, os.environ.get("PYTHONPATH"))))
        os.execve(
            sys.executable, [sys.executable, *sys.argv], {**os.environ, "SLIME_TANDEM_CPU": "1", "PYTHONPATH": paths}
        )

    import torch
    import yaml
    from megatron.core import mpu
    from report import read
    from slime.observability import rollout_data_utils

    from slime_tandem.config import OptimizerConfig
    from slime_tandem.megatron.policy import MegatronPolicy
    from slime_tandem.slime_hooks import hooks, settings
    from slime_tandem.training.rows import build_rows
    from slime_tandem.training.trainer import Trainer

    logging.disable(logging.INFO)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    mpu.initialize_model_parallel(create_gloo_process_groups=True)
    dump = str(a.work / "dump" / "rollout_data" / "{rollout_id}.pt")
    samples = rollout_data_utils.load_debug_rollout_data(dump, rollout_id=a.rollout)
    section = yaml.safe_load((a.work / "tandem.yaml").read_text())["slime_tandem"]
    if a.models is not None:
        section["models"] |= {role: str(a.models / role) for role in section["models"]}
    senior = a.senior or Path(section["models"]["junior"]).parent / "senior"
    args = Namespace(
        slime_tandem=section, reward_key=None, global_batch_size=len(samples), use_dynamic_batch_size=True,
        max_tokens_per_gpu=4096, micro_batch_size=None, balance_data=False, balance_by_flops=False, rollout_top_p=1.0,
        rollout_temperature=1.0, log_probs_chunk_size=-1, allgather_cp=False, entropy_coef=0.0,
        calculate_per_token_loss=False, recompute_loss_function=False, loss_type="custom_loss",
        custom_loss_function_path="slime_tandem.slime_hooks.hooks.loss", use_rollout_logprobs=True, kl_coef=0.0,
        custom_advantage_function_path="slime_tandem.slime_hooks.hooks.advantages", use_opd=False, eps_clip=0.2,
        normalize_advantages=False, custom_generate_function_path="slime_tandem.slime_hooks.hooks.generate",
        eps_clip_high=0.28, hf_checkpoint=str(senior),
    )  # fmt: skip
    config = settings.settings(args)
    rows, _ = build_rows([hooks._scored(s, args, config) for s in samples], config)
    policy = MegatronPolicy.from_hf(senior, OptimizerConfig(), threads=1)
    logits = {}
    with torch.no_grad():
        for sample, row in zip(samples, rows, strict=True):
            rows_of = policy.response_logits([row.tokens], [row.response_length])
            full = torch.zeros(len(row.tokens), rows_of.shape[1])
            full[-row.response_length - 1 : -1] = rows_of
            logits[sample.index] = full
    theirs = slimes_loss(args, samples, logits)
    ours = Trainer(config, policy, None).update(rows)
    logged = read(a.work / "train.log")[0].get(a.rollout, {})
    print("| metric | slime's functions | local runtime | slime's log (bfloat16 trainer) |\n|---|---|---|---|")
    for name, value in theirs.items():
        values = (value, ours[f"train/{name}"], logged.get(f"train/{name}"))
        print(f"| {name} | " + " | ".join("none" if v is None else f"{v:.7f}" for v in values) + " |")
    return int(abs(theirs["loss"] - ours["train/loss"]) > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
