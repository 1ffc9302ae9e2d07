"""What the fused architectures share: two models of one family, one KV pool, one forward pass.

The senior is the SGLang model itself, with plain weight names and KV layers `0 .. Ls-1`. The junior is `tandem_junior`, with
names behind that prefix and KV layers `Ls .. Ls+Lj-1`. The config's `num_hidden_layers` is Ls + Lj, which sizes the pool;
its `tandem` entry (`launch.override_args`) holds the rest.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from sglang.srt.layers.logits_processor import LogitsMetadata
from sglang.srt.model_executor.forward_context import get_req_to_token_pool, get_token_to_kv_pool
from sglang.srt.runtime_context import get_server_args

from slime_tandem.engines.fused import internals, pair, prefill_attention, prefill_graph, report, unread
from slime_tandem.engines.fused.catch_up import Bounds, Step
from slime_tandem.engines.fused.row_attention import RowAttention
from slime_tandem.engines.fused.state import Authors
from slime_tandem.errors import ConfigError, ModelError
from slime_tandem.models.weight_files import hf_weight_files, weight_names
from slime_tandem.types import JUNIOR, SENIOR

internals.require()

JUNIOR_PREFIX = "tandem_junior."
_JUNIOR_WEIGHTS_AT_ONCE = 32


class TandemModel:
    """Mixin before an SGLang `...ForCausalLM`, which `single` names. See the module docstring for the layout."""

    single: Any
    tandem_junior: Any
    tandem_tables: torch.Tensor

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        tandem = config.tandem
        bounds = tandem.get("catch_up")
        refuse_unsupported(get_server_args(), catch_up=bounds is not None)
        senior = copy.deepcopy(config)
        senior.num_hidden_layers = tandem["senior_layers"]
        if getattr(senior, "layer_types", None):
            senior.layer_types = list(senior.layer_types)[: tandem["senior_layers"]]
        junior = type(config).from_dict(tandem["junior"])
        pair.require_fitting(senior.to_dict(), junior.to_dict())
        super().__init__(senior, quant_config=quant_config, prefix=prefix)  # type: ignore[call-arg]
        self.tandem_junior = self.single(junior, quant_config=quant_config, prefix=JUNIOR_PREFIX.rstrip("."))
        for layer in self.tandem_junior.model.layers:
            layer.self_attn.attn.layer_id += senior.num_hidden_layers
        stack_junior(self.model, self.tandem_junior.model)  # type: ignore[attr-defined]
        self._layers: int = senior.num_hidden_layers + junior.num_hidden_layers
        # A buffer: SGLang saves and restores those when it releases and resumes weights.
        self.register_buffer("tandem_tables", load_tables(tandem, senior.vocab_size), persistent=False)  # type: ignore[attr-defined]
        self._junior_folder: str | None = tandem["junior_folder"]
        # SGLang loads whatever a folder holds and starts. With `dummy` and other formats the first call brings no whole model.
        self._senior_whole = get_server_args().load_format in ("auto", "safetensors") and quant_config is None
        self._junior_whole = quant_config is None
        self._authors: Authors | None = None
        self._kept: torch.Tensor | None = None
        self._codes: torch.Tensor | None = None
        self._bounds = None if bounds is None else Bounds(**bounds)
        if self._bounds is not None:
            layers = self.model.layers  # type: ignore[attr-defined]
            self._attention = RowAttention(self._bounds, max(layer.self_attn.attn.tp_q_head_num for layer in layers))
            unread.install(self._bounds, self._both_write)
        self._prefill = prefill_attention.choose(
            tandem.get("prefill", "triton"),
            get_server_args(),
            [layer.self_attn.attn for layer in self.model.layers],  # type: ignore[attr-defined]
            self.model.norm.weight.dtype,  # type: ignore[attr-defined]
            quant_config is not None,
        )
        report.install()
        prefill_graph.install()

    @property
    def start_layer(self) -> int:
        """First KV layer."""
        return 0

    @property
    def end_layer(self) -> int:
        """KV layers of both models; SGLang sizes the pool by it."""
        return self._layers

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
        get_embedding: bool = False,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        """SGLang's forward of a causal LM; the next-token logits of each row are its author's.

        Input log-probs are the senior's, whatever the row, unless the request asked for the junior's.
        """
        assert input_embeds is None, "token ids only"
        assert not get_embedding, "a generating model"
        me: Any = self
        junior = self.tandem_junior
        batch, mode = forward_batch, forward_batch.forward_mode
        if self._bounds is not None and mode.is_decode():
            return self._decode_catching_up(self._bounds, input_ids, positions, batch)
        with contextlib.nullcontext() if self._prefill is None else self._prefill.over(batch):
            senior_hidden, junior_hidden = me.model(input_ids, positions, batch)
        codes = self._author_codes(input_ids, positions, batch)
        output = me.logits_processor(input_ids, senior_hidden, me.lm_head, batch)
        metadata = _without_buffer(batch)
        scored = self._authors.junior_scores if self._authors is not None and mode.is_extend() else []
        metadata.extend_return_logprob = metadata.extend_return_logprob and any(scored)
        junior_output = junior.logits_processor(input_ids, junior_hidden, junior.lm_head, metadata)
        if metadata.extend_return_logprob:
            _exchange_scores(output, junior_output, scored, metadata.extend_logprob_pruned_lens_cpu)
        logits, junior_logits = output.next_token_logits, junior_output.next_token_logits
        if logits is None:
            return output
        codes, kept = self._outputs(codes, logits, batch) if mode.is_decode() else (codes, self._keep(logits))
        # In place: a captured graph returns SGLang's shared logits buffer.
        torch.where((codes != 0).unsqueeze(1), logits, junior_logits, out=logits)
        if not prefill_graph.scheduled(batch).is_prefill_only:  # these never reach the sampler
            report.hand_on(output, codes, kept)
            prefill_graph.keep(output)
        return output

    def _decode_catching_up(self, bounds: Bounds, input_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> Any:
        """A decode step in which each model reads the sequences that it writes; see `catch_up`."""
        me: Any = self
        junior = self.tandem_junior
        codes = self._author_codes(input_ids, positions, batch)
        step, hidden = self._read(SENIOR, me.model.alone, bounds, codes, batch)
        junior_step, junior_hidden = self._read(JUNIOR, junior.model, bounds, codes, batch)
        # The senior's logits of all rows: its log-probs of what it caught up on are in those that are no sequence's last.
        output = me.logits_processor(step.ids, hidden, me.lm_head, _without_buffer(batch))
        rows, shared = output.next_token_logits, batch.next_token_logits_buffer
        if rows is None:  # a dry run of SGLang's
            return output
        codes, kept = self._outputs(codes, rows, batch)
        fits = shared is not None and shared.shape == (len(codes), rows.shape[1])
        logits = torch.index_select(rows, 0, _last(step), out=shared if fits else None)
        junior_output = junior.logits_processor(
            input_ids, junior_hidden[_last(junior_step)], junior.lm_head, _without_buffer(batch)
        )
        # The rows of a model that did not read are another sequence's, and its logits are not taken: whoever writes, reads.
        torch.where((codes != 0).unsqueeze(1), logits, junior_output.next_token_logits, out=logits)
        output.next_token_logits = logits
        report.hand_on(output, codes, kept, report.CatchUp(step, torch.roll(step.ids, -1)))
        return output

    def _read(
        self, model: int, stack: Any, bounds: Bounds, codes: torch.Tensor, batch: Any
    ) -> tuple[Step, torch.Tensor]:
        """(the part of `model`, the hidden states [R, H] of its rows)."""
        assert self._authors is not None
        snapshot = self._attention.snapshot(batch)
        step = self._authors.step(model, codes, batch.req_pool_indices, batch.seq_lens, snapshot, bounds)
        view = copy.copy(batch)  # SGLang's own goes on in the graph that was captured with it
        view.batch_size, view.input_ids = len(step.ids), step.ids
        view.positions, view.out_cache_loc = step.position, step.location
        if not step.ids.is_cuda:
            # SGLang's attention takes one row a sequence: each row is one of its own, which ends there.
            slots = torch.cat([batch.req_pool_indices, batch.req_pool_indices.new_zeros(1)])
            view.req_pool_indices, view.seq_lens = slots[step.sequence], (step.position + 1).to(batch.seq_lens.dtype)
        with self._attention.over(step, snapshot):
            return step, stack(step.ids, step.position, view)

    def _both_write(self, rid: str) -> bool:
        return self._authors is not None and self._authors.both_write(rid)

    def _author_codes(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor:
        if self._authors is None:
            slots = get_req_to_token_pool().req_to_token.shape[0]
            locations = get_token_to_kv_pool().get_key_buffer(0).shape[0]
            self._authors = Authors(self.tandem_tables, slots, locations)
        if batch.forward_mode.is_decode():
            return self._authors.decode(input_ids, positions, batch.req_pool_indices, batch.out_cache_loc)  # type: ignore[no-any-return]
        if batch.forward_mode.is_extend() and batch.batch_size > 0:
            lengths = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
            return self._authors.extend(  # type: ignore[no-any-return]
                input_ids,
                batch.out_cache_loc[: input_ids.shape[0]],
                batch.req_pool_indices,
                lengths.tolist(),
                prefill_graph.scheduled(batch).rids or [None] * batch.batch_size,
                get_req_to_token_pool().req_to_token,
            )
        return torch.ones(batch.batch_size, dtype=torch.int32, device=input_ids.device)

    def _keep(self, logits: torch.Tensor) -> torch.Tensor:
        """A copy of the senior's logits for the report, in the head's precision: they were no more precise."""
        return logits.to(self._kept_dtype, copy=True)

    @property
    def _kept_dtype(self) -> torch.dtype:
        me: Any = self
        return torch.float32 if me.logits_processor.use_fp32_lm_head else me.lm_head.weight.dtype

    def _outputs(self, codes: torch.Tensor, logits: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes, kept senior logits) of a decode step; under CUDA graphs in buffers that all graphs share.

        They have room for as many sequences as SGLang's own shared logits buffer, and are made in the warm-up of the first
        graph.
        """
        shared = batch.next_token_logits_buffer
        if self._kept is None and shared is not None and shared.is_cuda:
            most = shared.untyped_storage().nbytes() // shared.element_size() // shared.shape[-1]
            rows = most if self._bounds is None else self._bounds.rows(most)
            self._kept = torch.zeros((rows, shared.shape[-1]), dtype=self._kept_dtype, device=shared.device)
            self._codes = torch.zeros(most, dtype=torch.int32, device=shared.device)
        n, rows = len(codes), len(logits)
        if self._kept is None or self._codes is None or n > len(self._codes):
            return codes, self._keep(logits)
        self._kept[:rows].copy_(logits)
        self._codes[:n].copy_(codes)
        return self._codes[:n], self._kept[:rows]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Plain names load into the senior, names behind `tandem_junior.` into the junior.

        The first call also loads the junior's own folder, unless it brings junior weights. Raises ModelError where a model's
        own folder then leaves parameters unfilled. Names that no model has are left out, with a line in SGLang's log.
        """
        junior: list[tuple[str, torch.Tensor]] = []
        seen = False

        def seniors() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal seen
            for name, weight in weights:
                if not name.startswith(JUNIOR_PREFIX):
                    yield name, weight
                    continue
                seen = True
                junior.append((name.removeprefix(JUNIOR_PREFIX), weight))
                if len(junior) >= _JUNIOR_WEIGHTS_AT_ONCE:
                    self.tandem_junior.load_weights(junior)
                    junior.clear()

        with _filled("senior", _own_parameters(self) if self._senior_whole else {}):  # type: ignore[arg-type]
            super().load_weights(seniors())  # type: ignore[misc]
        self._senior_whole = False
        self.tandem_junior.load_weights(junior)
        if self._junior_folder is not None and not seen:
            with _filled("junior", dict(self.tandem_junior.named_parameters()) if self._junior_whole else {}):
                self.tandem_junior.load_weights(_safetensors(Path(self._junior_folder)))
        self._junior_folder = None


def _without_buffer(batch: Any) -> Any:
    """What a logits processor is told of a batch, except that it may not use the shared buffer: that holds the senior's."""
    metadata = LogitsMetadata.from_forward_batch(batch)
    metadata.next_token_logits_buffer = None
    return metadata


def _last(step: Step) -> torch.Tensor:
    """[B]: each sequence's last row; of one that is not read, any."""
    return (step.end - 1).clamp(min=0)


def _own_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if not name.startswith(JUNIOR_PREFIX)}


@contextlib.contextmanager
def _filled(role: str, parameters: dict[str, torch.nn.Parameter]) -> Iterator[None]:
    """Raise ModelError where the block leaves one of the `parameters` unwritten, in whole or in part.

    They are NaN before it: SGLang's `load_weights` says nothing of what is missing, and fuses and shards names on its way.
    """
    plain = {n: p for n, p in parameters.items() if p.dtype in (torch.float32, torch.bfloat16, torch.float16)}
    for parameter in plain.values():
        parameter.data.fill_(torch.nan)
    yield
    empty = [name for name, parameter in plain.items() if parameter.data.isnan().any()]
    if empty:
        raise ModelError(
            f"weights of the {role}",
            f"{len(empty)} missing or NaN: {', '.join(empty[:3])}",
            "a finite value for every parameter",
            "fetch or save the model anew",
        )


def stack_junior(senior: torch.nn.Module, junior: torch.nn.Module) -> None:
    """Make the senior's stack of layers run the junior's, too: its forward returns the hidden states of both.

    SGLang captures prefill graphs of this one module, and only if its `layers` are as many as the KV pool's
    (model_runner.py:2835 of 0.5.15.post1). Parameter names stay: the junior is no submodule of it.
    """
    single = type(senior)

    class Stack(single):  # type: ignore[misc, valid-type]
        @property
        def layers(self) -> list[torch.nn.Module]:
            return [*self._modules["layers"], *junior.layers]  # type: ignore[misc]

        def forward(
            self,
            input_ids: torch.Tensor,
            positions: torch.Tensor,
            forward_batch: Any,
            input_embeds: torch.Tensor | None = None,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """Hidden states [T, Hs] of the senior and [T, Hj] of the junior."""
            assert input_embeds is None, "token ids only"
            return self.alone(input_ids, positions, forward_batch), junior(input_ids, positions, forward_batch)

        def alone(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> torch.Tensor:
            """Hidden states [T, Hs] of the senior."""
            return super().forward(input_ids, positions, forward_batch)  # type: ignore[no-any-return]

    senior.__class__ = Stack


def _exchange_scores(output: Any, junior_output: Any, scored: list[bool], lengths: list[int]) -> None:
    """Put the junior's input log-probs into `output` for the requests `scored`; `lengths`: positions scored per request."""
    by_token = torch.tensor([flag for flag, n in zip(scored, lengths, strict=True) for _ in range(n)])
    ours, theirs = output.input_token_logprobs, junior_output.input_token_logprobs
    output.input_token_logprobs = torch.where(by_token.to(ours.device), theirs, ours)
    for name in (
        "input_top_logprobs_val",
        "input_top_logprobs_idx",
        "input_token_ids_logprobs_val",
        "input_token_ids_logprobs_idx",
    ):
        ours, theirs = getattr(output, name), getattr(junior_output, name)
        if ours is not None:
            chosen = [j if flag else s for flag, s, j in zip(scored, ours, theirs, strict=True)]
            setattr(output, name, chosen)


def _safetensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    weight_names(folder)
    for file in hf_weight_files(folder)[0]:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                yield name, opened.get_tensor(name)


def load_tables(tandem: dict[str, Any], vocab_size: int) -> torch.Tensor:
    """[K, V] bool: the boundary tables of the file that `launch.write_tables` wrote; row 0 is empty.

    Raises ConfigError if the file is not the one that the launcher named by its SHA-256, or does not fit the vocabulary.
    """
    path = tandem["tables"]
    data = Path(path).read_bytes()
    if hashlib.sha256(data).hexdigest() != tandem["tables_sha256"]:
        raise ConfigError("tandem.tables", path, "the file whose SHA-256 the launcher passed", "restart the server")
    tables = np.load(io.BytesIO(data), allow_pickle=False)
    if tables.dtype != np.bool_ or tables.ndim != 2 or tables.shape[1] > vocab_size or tables[:1].any():
        raise ConfigError(
            "tandem.tables", f"{tables.dtype} {tables.shape}", f"bool rows of at most {vocab_size} ids", "restart"
        )
    padded = np.zeros((tables.shape[0], vocab_size), np.bool_)
    padded[:, : tables.shape[1]] = tables
    return torch.tensor(padded)


def refuse_unsupported(args: Any, *, catch_up: bool = False) -> None:
    """Raise ConfigError, with the remedy, for server settings under which two models in one engine would go wrong.

    `catch_up`: also for those under which models that lag behind each other would.
    """
    faults: list[tuple[str, object, str, str]] = _refused_by_catch_up(args) if catch_up else []
    if args.pp_size > 1:
        faults.append(("pp_size", args.pp_size, "1: layers of two models are not split into stages", "use --tp-size"))
    for name, remedy in (
        ("enable_dp_attention", "use --dp-size without it"),
        ("speculative_algorithm", "remove it: the junior is no draft model"),
        ("enable_two_batch_overlap", "remove it"),
        ("enable_hierarchical_cache", "remove it: tokens are known by their place in device memory"),
        ("enable_pdmux", "remove it"),
        ("enable_lora", "merge the adapter first"),
    ):
        if getattr(args, name, None):
            faults.append((name, getattr(args, name), "unset", remedy))
    for name in ("attention_backend", "decode_attention_backend", "prefill_attention_backend"):
        if getattr(args, name, None) == "flashinfer":
            remedy = "--attention-backend triton (engine.fused_prefill is what prefills by FlashInfer)"
            faults.append((name, "flashinfer", "triton: its planner knows one model's heads", remedy))
    if getattr(args, "disaggregation_mode", "null") != "null":
        faults.append(("disaggregation_mode", args.disaggregation_mode, "'null'", "serve prefill and decode together"))
    if args.enable_memory_saver and not args.enable_weights_cpu_backup:
        faults.append(
            (
                "enable_weights_cpu_backup",
                False,
                "True with enable_memory_saver: the trainer sends the senior back after a release, nobody sends the junior",
                "add --enable-weights-cpu-backup (slime: --sglang-enable-weights-cpu-backup)",
            )
        )
    if faults:
        raise ConfigError.gather([ConfigError(*fault) for fault in faults])


def _refused_by_catch_up(args: Any) -> list[tuple[str, object, str, str]]:
    """(setting, value, expected, remedy) of what does not go with `engine.fused_attention=catch_up`."""
    otherwise = "remove it, or set engine.fused_attention=every_step"
    faults: list[tuple[str, object, str, str]] = []
    for name, reason in (
        ("enable_mixed_chunk", "a running request would be prefilled over what one model has not read"),
        ("enable_streaming_session", "a session would go on over what one model has not read"),
        ("enable_deterministic_inference", "a row's sums depend on how much a step catches up on"),
        ("enable_unified_memory", "tokens are known by their place in the pool"),
        ("enable_return_hidden_states", "the senior has no hidden state of tokens that it has not read"),
    ):
        if getattr(args, name, None):
            faults.append((name, getattr(args, name), f"unset with catch_up: {reason}", otherwise))
    if getattr(args, "dcp_size", 1) > 1:
        faults.append(("dcp_size", args.dcp_size, "1 with catch_up: a rank must have whole sequences", otherwise))
    known = "torch_native" if str(args.device).startswith("cpu") else "triton"
    for name in ("attention_backend", "decode_attention_backend", "prefill_attention_backend"):
        value = getattr(args, name, None)
        if value is not None and value != known:
            remedy = f"--attention-backend {known}, or set engine.fused_attention=every_step"
            faults.append((name, value, f"{known} with catch_up, whose own kernel reads its tables", remedy))
    if args.kv_cache_dtype not in ("auto", "bf16", "bfloat16"):
        faults.append(
            ("kv_cache_dtype", args.kv_cache_dtype, "auto with catch_up: its kernel does not scale", otherwise)
        )
    return faults
