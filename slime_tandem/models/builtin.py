"""Small checkpoints made from scratch in about a minute: `builtin:junior`, `builtin:senior`, `builtin:teacher`.

All three learn to add two numbers of up to two digits (`TASK`, a reasoning-gym family) from worksheets with slips
(`models.worksheet`); held-out questions are never among them. The junior is small and stopped early. The senior is bigger
and learns longer, but imitates many slips. The teacher meets slips too, and imitates only what is right. Senior and junior
(Qwen3) share one byte-level BPE tokenizer; the teacher (Llama) has its own, with other merges, special tokens and markup.

There is a second set of three, `builtin:two-notations/<role>` (`RECIPES`): its senior knows two ways to write the same work
and slips less in the one that its junior never saw; its teacher knows both and slips in neither. `builtin:<role>@7` is made
from other start weights and texts; all that is measured with one seed of models holds for these models alone.

Models are kept under `cache_dir/<key>`, where the key is a hash of the whole recipe; `recipe.json` beside them holds what
was measured. Three worker processes of one thread each do the work. The same recipe on the same machine and library
versions gives the same weights. Runs know them as folders like any other.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

import torch
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

from slime_tandem.config import TaskSpec
from slime_tandem.errors import ModelError
from slime_tandem.models.worksheet import Piece, in_other_notation, worksheet
from slime_tandem.tasks.families import TaskSet
from slime_tandem.types import Prompt

PREFIX = "builtin:"
TASK = TaskSpec(
    family="basic_arithmetic",
    config={
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 2,
        "max_digits": 2,
        "operators": ["+"],
        "allow_parentheses": False,
        "allow_negation": False,
    },
)

Log = Callable[[str], None]


@dataclass(frozen=True)
class TokenizerRecipe:
    """A byte-level BPE tokenizer. `turn` and `end` are the chat markup around a turn; `end` is the EOS token.

    Special tokens have the first ids (`specials_first`) or the last ones. Without `knows_tags` the `<answer>` tags are left
    out of the training texts, so that they get fewer merges. `other_notation`: share of them in the other notation.
    """

    vocab_size: int
    turn: str
    end: str
    pad: str
    specials_first: bool
    knows_tags: bool
    other_notation: float = 0.0


@dataclass(frozen=True)
class ModelRecipe:
    """One model: its size, its worksheets, and how long it trains.

    Training ends after `steps` batches, or at the first check (every `check_every` steps) whose sampled accuracy on train-side
    questions reaches `stop_accuracy`. `imitate_slips=False` takes the loss on right pieces only. `other_notation` is the share
    of worksheets in the other notation, which slip with `other_slip` in each column.
    """

    architecture: str
    hidden_size: int
    layers: int
    intermediate_size: int
    slip: float
    imitate_slips: bool
    steps: int
    stop_accuracy: float | None = None
    check_every: int = 100
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16  # the same for senior and junior, so that one KV pool can serve both (docs/fused.md)
    batch_size: int = 16
    matrix_lr: float = 6e-3
    other_lr: float = 1e-2
    seed: int = 0
    other_notation: float = 0.0
    other_slip: float = 0.0

    def sheet(self, expression: str, rng: Random) -> list[Piece]:
        """One worksheet of those that this model learns from."""
        # No draw where there is nothing to choose: a recipe of one notation keeps its texts.
        if self.other_notation and rng.random() < self.other_notation:
            return in_other_notation(worksheet(expression, self.other_slip, rng))
        return worksheet(expression, self.slip, rng)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the three checkpoints."""

    student_tokenizer: TokenizerRecipe = TokenizerRecipe(400, "<|{role}|>", "<|end|>", "<|pad|>", True, True)
    teacher_tokenizer: TokenizerRecipe = TokenizerRecipe(370, "[{role}]", "[/turn]", "[pad]", False, False)
    junior: ModelRecipe = ModelRecipe("qwen3", 48, 2, 128, 0.1, True, 1200, stop_accuracy=0.3, check_every=50, seed=1)
    senior: ModelRecipe = ModelRecipe("qwen3", 64, 2, 192, 0.35, True, 900)
    teacher: ModelRecipe = ModelRecipe("llama", 64, 2, 192, 0.1, False, 1000)
    check_prompts: int = 128
    final_prompts: int = 256

    def seeded(self, seed: int) -> Recipe:
        """The same recipe with other start weights and other texts; 0 is this one."""
        changed = {role: dataclasses.replace(old := getattr(self, role), seed=old.seed + 10 * seed) for role in ROLES}
        return dataclasses.replace(self, **changed)

    @property
    def key(self) -> str:
        """Hash of the recipe, of the task and of sample worksheets (so that a change of their writing counts)."""
        samples = ["".join(text for text, _ in worksheet("47 + 58", 0.5, Random(i))) for i in range(20)]  # noqa: S311
        content = json.dumps(
            [dataclasses.asdict(self), TASK.model_dump(exclude={"environment", "max_turns"}), samples], sort_keys=True
        )
        return hashlib.sha256(content.encode()).hexdigest()[:12]


ROLES = ("junior", "senior", "teacher")
_SUMS = Recipe()
_BOTH = dataclasses.replace(_SUMS.student_tokenizer, other_notation=0.3)
RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "sums": _SUMS,
        "two-notations": dataclasses.replace(
            _SUMS,
            student_tokenizer=_BOTH,
            teacher_tokenizer=dataclasses.replace(_SUMS.teacher_tokenizer, other_notation=0.3),
            junior=dataclasses.replace(_SUMS.junior, stop_accuracy=0.65),
            senior=dataclasses.replace(_SUMS.senior, other_notation=0.3, other_slip=0.12),
            teacher=dataclasses.replace(_SUMS.teacher, other_notation=0.5, other_slip=0.1),
        ),
    }
)
"""By name: `builtin:<role>` is of the first, `builtin:<name>/<role>` of any."""


_NAME = re.compile(rf"(?:(?P<recipe>{'|'.join(RECIPES)})/)?(?P<role>{'|'.join(ROLES)})(?:@(?P<seed>\d{{1,4}}))?")


def resolve_model(name: str, cache_dir: str | Path, log: Log | None = None, recipe: Recipe | None = None) -> Path:
    """The folder of a model: `builtin:[recipe/]role[@seed]` is made when missing (all three roles at once), else a path.

    `recipe` stands in for the named one. `log` hears what is made, and the workers' lines; None: those are printed. Safe when
    several processes ask at once: one makes the models, the others wait for its lock. Raises ModelError for an unknown name, a
    path that is no folder, or a worker that failed.
    """
    if not name.startswith(PREFIX):
        path = Path(name)
        if not name or not path.is_dir():  # Path("") would be the current folder
            raise ModelError("model", name, "a Hugging Face folder or builtin:<role>", "check the path")
        return path
    (named, seed), role = _named(name)
    return pretrain(cache_dir, log, (recipe or RECIPES[named]).seeded(seed)) / role


def found_model(name: str, cache_dir: str | Path) -> Path | None:
    """The folder of a model, None for a built-in one that is not made yet; makes none. Raises as `resolve_model`."""
    if not name.startswith(PREFIX):
        return resolve_model(name, cache_dir)
    (recipe, seed), role = _named(name)
    made = Path(cache_dir) / RECIPES[recipe].seeded(seed).key
    return made / role if (made / "recipe.json").is_file() else None


def _named(name: str) -> tuple[tuple[str, int], str]:
    """((recipe, seed), role) of `builtin:...`; raises ModelError for an unknown name."""
    parts = _NAME.fullmatch(name.removeprefix(PREFIX))
    if parts is None:
        known = ", ".join(f"{PREFIX}{r}" for r in ROLES)
        expected = (
            f"one of {known}, perhaps with {' or '.join(RECIPES)} and a slash before the role and @SEED behind it"
        )
        raise ModelError("model", name, expected, "choose one of these")
    return (parts["recipe"] or "sums", int(parts["seed"] or 0)), parts["role"]


def pretrain(cache_dir: str | Path, log: Log | None = None, recipe: Recipe | None = None) -> Path:
    """Make the three checkpoints unless they are cached; returns the folder that holds them and `recipe.json`.

    The folder appears whole or not at all. Raises ModelError if a worker fails.
    """
    recipe = recipe or Recipe()
    cache = Path(cache_dir)
    final = cache / recipe.key
    if (final / "recipe.json").is_file():
        return final
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "pretrain.lock"):
        if (final / "recipe.json").is_file():
            return final
        for left_over in cache.glob(".making-*"):  # of a process that was killed: the lock is ours
            shutil.rmtree(left_over, ignore_errors=True)
        if log is not None:
            log(f"pre-training junior, senior and teacher into {final}")
        with tempfile.TemporaryDirectory(prefix=".making-", dir=cache) as folder:
            started = time.monotonic()
            measured = _run_workers(Path(folder), recipe, log)
            record = {
                "recipe": dataclasses.asdict(recipe),
                "task": TASK.model_dump(exclude={"environment", "max_turns"}),
                "models": measured,
                "seconds": round(time.monotonic() - started, 1),
            }
            (Path(folder) / "recipe.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            shutil.rmtree(final, ignore_errors=True)  # left without recipe.json: incomplete
            os.rename(folder, final)
            Path(folder).mkdir()  # for TemporaryDirectory to remove
    return final


def _run_workers(folder: Path, recipe: Recipe, log: Log | None) -> dict[str, Any]:
    """One process per model. Plain commands, not multiprocessing: the caller's main module need not be importable."""
    order = folder / "order.json"
    order.write_text(json.dumps(dataclasses.asdict(recipe)), encoding="utf-8")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }
    workers = [
        subprocess.Popen(  # noqa: S603 (our own module)
            [sys.executable, "-m", "slime_tandem.models.builtin", "--worker", str(folder), role],
            env=environment,
            stdin=subprocess.PIPE,  # ends with this process, however it ends: the worker then ends too
            stdout=None if log is None else subprocess.PIPE,
            stderr=None if log is None else subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        for role in ROLES
    ]
    readers = (
        [] if log is None else [threading.Thread(target=_tell, args=(worker, log), daemon=True) for worker in workers]
    )
    for reader in readers:
        reader.start()
    try:
        codes = [worker.wait() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
            if worker.stdin is not None:
                worker.stdin.close()
        for reader in readers:
            reader.join()
    if any(codes):
        raise ModelError(
            "pretrain", codes, "exit code 0 of every worker", "see their messages above; is the disk full?"
        )
    order.unlink()
    return {role: json.loads((folder / role / "measured.json").read_text(encoding="utf-8")) for role in ROLES}


def _tell(worker: subprocess.Popen[str], log: Log) -> None:
    assert worker.stdout is not None
    with worker.stdout:
        for line in worker.stdout:
            log(line.rstrip("\n"))


def recipe_from_dict(tree: dict[str, Any]) -> Recipe:
    """Inverse of `dataclasses.asdict` for a Recipe."""
    parts: dict[str, Any] = {"check_prompts": tree["check_prompts"], "final_prompts": tree["final_prompts"]}
    parts |= {name: TokenizerRecipe(**tree[name]) for name in ("student_tokenizer", "teacher_tokenizer")}
    parts |= {role: ModelRecipe(**tree[role]) for role in ROLES}
    return Recipe(**parts)


def make_model(role: str, recipe: Recipe, folder: Path, log: Log) -> None:
    """Train one model and write it to `folder/role` as a Hugging Face folder, with `measured.json`."""
    torch.set_num_threads(1)
    disable_progress_bar()
    settings: ModelRecipe = getattr(recipe, role)
    tasks = TaskSet([TASK], seed=0)
    tokenizer = build_tokenizer(recipe.teacher_tokenizer if role == "teacher" else recipe.student_tokenizer, tasks)
    cpu, wall = time.process_time(), time.monotonic()
    model, steps = train(settings, tokenizer, tasks, recipe.check_prompts, lambda line: log(f"{role}: {line}"))
    accuracy = measure_accuracy(model, tokenizer, tasks, tasks.heldout_prompts(recipe.final_prompts))
    save(model, tokenizer, folder / role)
    measured = {
        "accuracy": round(accuracy, 4),
        "parameters": model.num_parameters(),
        "vocabulary": len(tokenizer),
        "steps": steps,
        "seconds": round(time.monotonic() - wall, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }
    (folder / role / "measured.json").write_text(json.dumps(measured) + "\n", encoding="utf-8")
    log(f"{role}: held-out accuracy {accuracy:.3f} after {steps} steps")


def build_tokenizer(recipe: TokenizerRecipe, tasks: TaskSet) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer: single digits, words with their leading space, chat template, EOS = end of turn.

    It is trained on prompts, worksheets and as many English word problems.
    """
    roles = ("system", "user", "assistant", "tool")
    specials = [recipe.pad, *(recipe.turn.format(role=role) for role in roles), recipe.end]
    prompts = tasks.train_prompts(step=1, n=400)
    rng = Random(0)  # noqa: S311
    drawn = (worksheet(_expression(p), 0.3, rng) for p in prompts)
    kinds = (bool(recipe.other_notation) and rng.random() < recipe.other_notation for _ in prompts)
    sheets = [[t for t, _ in (in_other_notation(s) if k else s)] for s, k in zip(drawn, kinds, strict=True)]
    own = [
        f"{p.messages[0].content}{''.join(sheet)}" if recipe.knows_tags else f"{question_of(p)}{''.join(sheet[:-1])}"
        for p, sheet in zip(prompts, sheets, strict=True)
    ]
    english = [
        p.messages[0].content for p in TaskSet([TaskSpec(family="gsm_symbolic")], seed=0).train_prompts(step=1, n=400)
    ]
    texts = own + english
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=recipe.vocab_size if recipe.specials_first else recipe.vocab_size - len(specials),
            special_tokens=specials if recipe.specials_first else [],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer.add_special_tokens(specials)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=recipe.end, pad_token=recipe.pad, clean_up_tokenization_spaces=False
    )
    before, after = recipe.turn.split("{role}")
    fast.chat_template = (
        "{% for message in messages %}"
        f"{{{{ '{before}' + message['role'] + '{after}' + message['content'] + '{recipe.end}' }}}}"
        "{% endfor %}"
        f"{{% if add_generation_prompt %}}{{{{ '{recipe.turn.format(role='assistant')}' }}}}{{% endif %}}"
    )
    return fast


def train(
    settings: ModelRecipe, tokenizer: PreTrainedTokenizerFast, tasks: TaskSet, check_prompts: int, log: Log
) -> tuple[Any, int]:
    """Train one model from scratch; returns it and the steps taken. The loss is on response tokens only."""
    torch.manual_seed(settings.seed)
    model = _new_model(settings, tokenizer)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed_tokens" in name]
    optimizers = (
        (Muon(matrices, settings.matrix_lr), settings.matrix_lr),
        (
            torch.optim.AdamW(others, settings.other_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
            settings.other_lr,
        ),
    )
    validation = tasks.train_prompts(step=0, n=check_prompts)  # step 0 of this seed; training texts start at step 2
    for step, (ids, labels) in zip(range(1, settings.steps + 1), _batches(settings, tokenizer, tasks), strict=False):
        warm = min(1.0, step / 20)
        cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / settings.steps))
        for optimizer, lr in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * warm * cosine
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        targets = labels[:, 1:]
        learnt = targets != -100
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[learnt]), targets[learnt])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, _ in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if settings.stop_accuracy is not None and step % settings.check_every == 0:
            accuracy = measure_accuracy(model, tokenizer, tasks, validation)
            log(f"step {step}/{settings.steps}, loss {loss.item():.3f}, accuracy {accuracy:.3f}")
            if accuracy >= settings.stop_accuracy:
                return model, step
        elif step % 250 == 0:
            log(f"step {step}/{settings.steps}, loss {loss.item():.3f}")
    return model, settings.steps


def measure_accuracy(
    model: Any, tokenizer: PreTrainedTokenizerFast, tasks: TaskSet, prompts: Sequence[Prompt]
) -> float:
    """Share of right responses, one sample each at temperature 1, at most 64 tokens."""
    texts = sample(model, tokenizer, prompts, max_new_tokens=64)
    return sum(tasks.correct(p, text) for p, text in zip(prompts, texts, strict=True)) / len(prompts)


@torch.no_grad()
def sample(model: Any, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[Prompt], max_new_tokens: int) -> list[str]:
    """One response text for each prompt, sampled at temperature 1 with a fixed seed; EOS is left out."""
    rendered = [_render(tokenizer, p) for p in prompts]
    encoded = tokenizer(rendered, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt")
    model.eval()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        output = model.generate(
            **{name: encoded[name] for name in ("input_ids", "attention_mask")},
            generation_config=GenerationConfig(
                do_sample=True,
                top_k=0,
                max_new_tokens=max_new_tokens,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            ),
        )
    model.train()
    responses = output[:, encoded["input_ids"].shape[1] :].tolist()
    ended = [ids[: ids.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in ids else ids for ids in responses]
    return [tokenizer.decode(ids) for ids in ended]


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) in float32, matrices of one shape at a time; the update has AdamW's usual size.

    torch.optim.Muon orthogonalises matrix by matrix in bfloat16, which takes 20 times as long on a CPU.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], lr: float, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update from the gradients."""
        for group in self.param_groups:
            shapes: dict[tuple[int, ...], list[torch.nn.Parameter]] = {}
            for p in group["params"]:
                shapes.setdefault(tuple(p.shape), []).append(p)
            for (rows, columns), same in shapes.items():
                updates = []
                for p in same:
                    assert p.grad is not None, "every matrix takes part in the loss"
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    average.lerp_(p.grad, 1 - group["momentum"])
                    updates.append(p.grad.lerp(average, group["momentum"]))
                X = torch.stack(updates)
                X = orthogonalised(X.mT).mT if rows > columns else orthogonalised(X)
                for p, update in zip(same, X, strict=True):
                    p.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(rows, columns)))


def orthogonalised(X: torch.Tensor) -> torch.Tensor:
    """Bring the singular values of [N, rows, columns] matrices near 1 by five Newton-Schulz steps (Muon's constants)."""
    X = X / (X.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        A = X @ X.mT
        X = 3.4445 * X + (-4.775 * A + 2.0315 * A @ A) @ X
    return X


def save(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write safetensors weights, config, generation config (EOS = end of turn) and tokenizer with its chat template."""
    model.generation_config = GenerationConfig(
        do_sample=True, top_k=0, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _new_model(settings: ModelRecipe, tokenizer: PreTrainedTokenizerFast) -> Any:
    config_class, model_class = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}[
        settings.architecture
    ]
    return model_class(
        config_class(
            vocab_size=len(tokenizer),
            hidden_size=settings.hidden_size,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.kv_heads,
            head_dim=settings.head_dim,
            intermediate_size=settings.intermediate_size,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            initializer_range=0.05,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def _batches(
    settings: ModelRecipe, tokenizer: PreTrainedTokenizerFast, tasks: TaskSet
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless [batch, length] ids and labels (-100: no loss), right-padded; rows of a batch have similar lengths."""
    rng = Random(settings.seed)  # noqa: S311
    pool_step, size = 2, settings.batch_size
    while True:
        prompts = tasks.train_prompts(step=pool_step + 10_000 * settings.seed, n=size * 32)
        rows = sorted(encode(tokenizer, prompts, settings, rng), key=lambda row: len(row[0]))
        batches = [rows[i : i + size] for i in range(0, len(rows), size)]
        rng.shuffle(batches)
        for batch in batches:
            length = max(len(ids) for ids, _ in batch)
            yield (
                torch.tensor([ids + [tokenizer.pad_token_id] * (length - len(ids)) for ids, _ in batch]),
                torch.tensor([labels + [-100] * (length - len(labels)) for _, labels in batch]),
            )
        pool_step += 1


def encode(
    tokenizer: PreTrainedTokenizerFast, prompts: Sequence[Prompt], settings: ModelRecipe, rng: Random
) -> list[tuple[list[int], list[int]]]:
    """(ids, labels) of prompt + worksheet + EOS for each prompt; labels are -100 on the prompt and on what is not learnt."""
    sheets = [settings.sheet(_expression(p), rng) for p in prompts]
    prompt_ids = tokenizer([_render(tokenizer, p) for p in prompts], add_special_tokens=False)["input_ids"]
    sheet_texts = ["".join(text for text, _ in sheet) for sheet in sheets]
    encoded = tokenizer(sheet_texts, add_special_tokens=False, return_offsets_mapping=True)
    rows = []
    for sheet, p_ids, ids, offsets in zip(
        sheets, prompt_ids, encoded["input_ids"], encoded["offset_mapping"], strict=True
    ):
        learnt = [right or settings.imitate_slips for text, right in sheet for _ in text]
        labels = [token if learnt[start] else -100 for token, (start, _) in zip(ids, offsets, strict=True)]
        end = tokenizer.eos_token_id
        rows.append((p_ids + ids + [end], [-100] * len(p_ids) + labels + [end if learnt[-1] else -100]))
    return rows


def _render(tokenizer: PreTrainedTokenizerFast, prompt: Prompt) -> str:
    turns = [message.as_dict() for message in prompt.messages]
    return str(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))


def question_of(prompt: Prompt) -> str:
    """The question without the instruction on tags."""
    return str(prompt.metadata["entry"]["question"])


def _expression(prompt: Prompt) -> str:
    return str(prompt.metadata["entry"]["metadata"]["expression"])


def _end_with_parent() -> None:
    os.read(0, 1)  # returns when the parent process is gone; not sys.stdin, whose lock would trouble the exit
    os._exit(1)


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m slime_tandem.models.builtin --cache-dir DIR`: make the models and print a table."""
    parser = argparse.ArgumentParser(prog="python -m slime_tandem.models.builtin", description=main.__doc__)
    parser.add_argument("--cache-dir", default=".cache/models", help="where the models are kept (default: %(default)s)")
    parser.add_argument("--worker", nargs=2, metavar=("FOLDER", "ROLE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker:
        threading.Thread(target=_end_with_parent, daemon=True).start()
        folder, role = arguments.worker
        recipe = recipe_from_dict(json.loads((Path(folder) / "order.json").read_text(encoding="utf-8")))
        make_model(role, recipe, Path(folder), lambda line: print(line, file=sys.stderr, flush=True))
        return 0
    made = pretrain(arguments.cache_dir, lambda line: print(line, file=sys.stderr, flush=True))
    record = json.loads((made / "recipe.json").read_text(encoding="utf-8"))
    print(f"{made} ({record['seconds']} s)")
    print(f"{'model':8} {'accuracy':>8} {'parameters':>10} {'vocabulary':>10} {'steps':>6} {'seconds':>8}")
    for role in ROLES:
        m = record["models"][role]
        print(
            f"{role:8} {m['accuracy']:8.3f} {m['parameters']:10,} {m['vocabulary']:10} {m['steps']:6} {m['seconds']:8.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
