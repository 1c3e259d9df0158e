"""Two ranks that all-reduce without end, for benchmarks/tensor_parallel.py, which kills one of them."""

from __future__ import annotations

import multiprocessing
import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run(specification: dict[str, Any]) -> None:
    """Rank 0 in this process, rank 1 in one of its own, whose id is written down when both are busy."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    other = multiprocessing.get_context("spawn").Process(target=rank_loop, args=(1, port, specification), daemon=True)
    other.start()
    rank_loop(0, port, specification)


def rank_loop(rank: int, port: int, specification: dict[str, Any]) -> None:
    from vllm_fl_comm.collectives import TensorCommunicator
    from vllm_fl_comm.devices import device_selector, stream_getter
    from vllm_fl_comm.flagcx import Communicator, load
    from vllm_fl_comm.peers import Peer
    from vllm_fl_comm.policy import Site, Thresholds
    from vllm_fl_comm.watchdog import watch

    device = torch.device(specification["device"], rank) if specification["device"] == "cuda" else torch.device("cpu")
    selector = device_selector(device)
    if selector is not None:
        selector()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    library = load()
    identifier = [library.unique_id() if rank == 0 else None]
    dist.broadcast_object_list(identifier, src=0)
    peers: list[Any] = [None, None]
    dist.all_gather_object(peers, Peer.here(rank))
    communicator = Communicator(library, rank, 2, "loop", peers=(peers[1 - rank],), on_thread=selector)
    watch(communicator, float(os.environ["VLLM_FL_COMM_TIMEOUT"]), asynchronous=selector is not None)
    communicator.connect(identifier[0])
    site = Site(2, refusal="not asked for")
    tensors = TensorCommunicator(communicator, stream_getter(device), site, Thresholds(), diverts=False)
    tensor = torch.zeros(1 << 16, device=device)
    for step in range(1 << 40):
        tensors.all_reduce(tensor)
        if device.type == "cuda" and step % 100 == 0:
            torch.cuda.synchronize()
        if rank == 1 and step == 1000:
            (Path(specification["folder"]) / "victim").write_text(str(os.getpid()))
