"""Sends safetensors files to running SGLangs as a trainer would; runs in SGLang's own Python.

Each line of its input is an order, `{"url": ..., "way": ..., "file": ..., "ranks": ...}` with the engine's tensor parallel
size, and is answered with a line. `way`, which becomes the weights' version: `tensor`, one by one; `bucket`, one flat bucket
(slime under colocation); `distributed`, broadcast through a process group (slime's way between nodes; gloo here).
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

from slime_tandem.engines.processes import DIRECT

Weights = list[tuple[str, torch.Tensor]]
# Another process opens them by name; the default strategy hands on descriptors, to children only.
torch.multiprocessing.set_sharing_strategy("file_system")


def post_or_end(url: str, **body: Any) -> None:
    """For a thread: the main one waits for a partner that will not come."""
    try:
        post(url, **body)
    except BaseException as error:  # noqa: BLE001 - whatever it is, nobody else hears of it
        print(error, file=sys.stderr, flush=True)
        os._exit(1)


def post(url: str, **body: Any) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        answer = DIRECT.open(request, timeout=600).read()
    except urllib.error.HTTPError as error:  # its body says why
        answer = error.read()
    assert json.loads(answer)["success"], answer


def in_thread(url: str, **body: Any) -> threading.Thread:
    thread = threading.Thread(target=post_or_end, args=(url,), kwargs=body)
    thread.start()
    return thread


def by_tensor(url: str, weights: Weights, version: str, ranks: int, *, flat: bool) -> None:
    payload: Any = weights
    if flat:
        bucket = FlattenedTensorBucket(named_tensors=weights)
        payload = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
    data = base64.b64encode(MultiprocessingSerializer.serialize(payload)).decode()
    kind = {"load_format": "flattened_bucket"} if flat else {}
    post(f"{url}/update_weights_from_tensor", serialized_named_tensors=[data] * ranks, weight_version=version, **kind)


def by_broadcast(url: str, weights: Weights, version: str, ranks: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    name, size = f"senders-{port}", ranks + 1
    where = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": size}
    theirs = in_thread(f"{url}/init_weights_update_group", **where, group_name=name, backend="gloo")
    ours = init_custom_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=size, rank=0, group_name=name)
    theirs.join()
    described = {
        "names": [name for name, _ in weights],
        "dtypes": [str(w.dtype).removeprefix("torch.") for _, w in weights],
        "shapes": [list(w.shape) for _, w in weights],
    }
    receiving = in_thread(
        f"{url}/update_weights_from_distributed", **described, group_name=name, weight_version=version
    )
    for _, weight in weights:
        torch.distributed.broadcast(weight, src=0, group=ours)
    receiving.join()


def send(url: str, way: str, file: str, ranks: int) -> None:
    weights: Weights = list(load_file(file).items())
    # Newer releases take weights between these two calls only.
    in_sessions = hasattr(io_struct, "BeginWeightUpdateReqInput")
    if in_sessions:
        post(f"{url}/begin_weight_update")
    if way == "distributed":
        by_broadcast(url, weights, way, ranks)
    else:
        by_tensor(url, weights, way, ranks, flat=way == "bucket")
    if in_sessions:
        post(f"{url}/end_weight_update")


for line in sys.stdin:
    send(**json.loads(line))
    print("sent", flush=True)
