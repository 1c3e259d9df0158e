"""vLLM's device communicator over FlagCX for CUDA devices, where vLLM captures graphs."""

from __future__ import annotations

import torch
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

from .communicator import FlagCXMixin

__all__ = ["FlagCXCudaCommunicator"]


class FlagCXCudaCommunicator(FlagCXMixin, CudaCommunicator):
    """The communicator of a group of ranks on CUDA devices.

    A subclass of vLLM's, because ``GroupCoordinator.graph_capture`` asks for one; none of vLLM's own libraries (NCCL,
    custom all-reduce, symmetric memory, FlashInfer) is started.
    """

    # What CudaCommunicator's constructor sets and its methods and vLLM read, on any of the versions 0.26 to 0.33.
    pynccl_comm = ca_comm = qr_comm = symm_mem_comm = fi_ar_comm = aiter_ar_comm = fi_pcie_ipc_ar_comm = None
    use_aiter_ag_rs = use_custom_allreduce = use_torch_symm_mem = use_flashinfer_allreduce = False
    use_flashinfer_pcie_ipc_allreduce = use_aiter_allreduce = False

    def custom_all_gather(self, input_: torch.Tensor) -> torch.Tensor | None:
        """None: vLLM then calls :meth:`all_gather`."""
        return None

    def custom_reduce_scatter(self, input_: torch.Tensor) -> torch.Tensor | None:
        """None: vLLM then calls :meth:`reduce_scatter`."""
        return None

    # vLLM's own would look for the workspaces of FlashInfer; FlagCX has nothing to release or restore.

    def checkpoint_prepare(self) -> None:
        if self.all2all_manager is not None:
            self.all2all_manager.checkpoint_prepare()

    def checkpoint_restore(self) -> None:
        if self.all2all_manager is not None:
            self.all2all_manager.checkpoint_restore()

    def suspend(self) -> None:
        """Nothing of FlagCX can be released."""

    def resume(self) -> None:
        """Nothing was released."""
