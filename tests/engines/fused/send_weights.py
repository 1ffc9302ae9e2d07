"""Sends a safetensors file to a running SGLang as a trainer would; runs in SGLang's own Python.

`python send_weights.py URL tensor|bucket|distributed FILE VERSION RANKS`, RANKS the engine's tensor parallel size: from tensors
one by one, from one flat bucket (slime under colocation), or broadcast through a process group (slime's way between nodes; gloo
here).
"""

from __future__ import annotations

import base64
import json
import os
import socket
import sys
import threading
import urllib.error
import urllib.request
from typing import Any

import torch
from safetensors.torch import load_file
from sglang.srt.managers import io_struct
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.common import init_custom_process_group
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

url, way, file, version, ranks = sys.argv[1:]


def post_or_end(path: str, **body: Any) -> None:
    """For a thread: the main one waits for a partner that will not come."""
    try:
        post(path, **body)
    except BaseException as error:  # noqa: BLE001 - whatever it is, nobody else hears of it
        print(error, file=sys.stderr, flush=True)
        os._exit(1)


def post(path: str, **body: Any) -> None:
    request = urllib.request.Request(f"{url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        answer = urllib.request.urlopen(request, timeout=120).read()
    except urllib.error.HTTPError as error:  # its body says why
        answer = error.read()
    assert json.loads(answer)["success"], answer


# Another process opens them by name; the default strategy hands on descriptors, to children only.
torch.multiprocessing.set_sharing_strategy("file_system")
weights = list(load_file(file).items())
in_sessions = hasattr(
    io_struct, "BeginWeightUpdateReqInput"
)  # newer releases take weights between these two calls only
if in_sessions:
    post("begin_weight_update")
if way == "distributed":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = int(ranks) + 1
    group = {
        "master_address": "127.0.0.1",
        "master_port": port,
        "rank_offset": 1,
        "world_size": size,
        "group_name": "t",
    }
    theirs = threading.Thread(
        target=post_or_end, args=("init_weights_update_group",), kwargs={**group, "backend": "gloo"}
    )
    theirs.start()
    ours = init_custom_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=size, rank=0, group_name="t")
    theirs.join()
    described = {
        "names": [name for name, _ in weights],
        "dtypes": [str(w.dtype).removeprefix("torch.") for _, w in weights],
        "shapes": [list(w.shape) for _, w in weights],
        "group_name": "t",
        "weight_version": version,
    }
    receiving = threading.Thread(target=post_or_end, args=("update_weights_from_distributed",), kwargs=described)
    receiving.start()
    for _, weight in weights:
        torch.distributed.broadcast(weight, src=0, group=ours)
    receiving.join()
else:
    payload: Any = weights
    if way == "bucket":
        bucket = FlattenedTensorBucket(named_tensors=weights)
        payload = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
    data = base64.b64encode(MultiprocessingSerializer.serialize(payload)).decode()
    kind = {"load_format": "flattened_bucket"} if way == "bucket" else {}
    post("update_weights_from_tensor", serialized_named_tensors=[data] * int(ranks), weight_version=version, **kind)
if in_sessions:
    post("end_weight_update")
