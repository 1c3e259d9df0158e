"""Collectives over torch.distributed, as compiled graphs need them."""

from __future__ import annotations

import torch
import torch.distributed
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

__all__ = ["FLCommunicator"]


class FLCommunicator(DeviceCommunicatorBase):
    """vLLM's communicator over torch.distributed, with an all-reduce that leaves its input alone.

    vLLM's own reduces in place and returns its input, and the custom operator ``vllm::all_reduce`` promises a fresh
    result: inductor takes the input for free once it has been read, and puts other values where the result lies. A
    platform whose ``use_custom_op_collectives`` is true needs this class or another out-of-place one.
    """

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of the group; a new tensor."""
        result = input_.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(result, group=self.device_group)
        return result
