"""A model package under which a fused engine on a CPU prefills by the stand-in for FlashInfer; SGLang imports it."""

import sys

import flashinfer_stand_in
import torch

from slime_tandem.engines.fused import prefill_attention

sys.modules["flashinfer"] = flashinfer_stand_in
prefill_attention._unfit = lambda *_: None
prefill_attention._failure = lambda layouts, dtype: prefill_attention._try(layouts, dtype, torch.device("cpu"))
