"""What this distribution declares to vllm-fl under the entry-point group ``vllm_fl.communicators``."""

from __future__ import annotations

from vllm_fl.plugins import CommunicatorPlugin

from .flagcx.library import PATH_ENV, load
from .settings import comm_settings

PLUGIN = CommunicatorPlugin(
    name="flagcx",
    communicator="vllm_fl_comm.plugin:communicator",
    status="vllm_fl_comm.status:status",
    dist_backend="vllm_fl_comm.plugin:dist_backend",
    variables=(PATH_ENV,),
)


def dist_backend(device_type: str) -> str | None:
    """``"flagcx"`` if FlagCX's own plug-in for PyTorch is installed, which registers a backend of that name; or None.

    PyTorch loads the plug-in while it is imported itself, by the entry point ``torch.backends``. None, too, where
    FlagCX's kernels are asked for: the ranks have to agree on them before the first communicator of the process.
    """
    if device_type == "cpu" or comm_settings().custom_all_reduce:
        return None
    from torch import distributed

    name = "flagcx"
    return name if distributed.is_available() and distributed.is_backend_available(name) else None


def communicator(device_type: str) -> str:
    """Path of the communicator class for devices of a torch device type.

    Raises:
        FlagCXLoadError: FlagCX cannot be loaded: the start must not go on with another library.
        ConfigError: settings of the communication contradict one another.
    """
    comm_settings()
    load()
    # vLLM captures graphs only where the communicator is a CudaCommunicator.
    if device_type == "cuda":
        return "vllm_fl_comm.cuda.FlagCXCudaCommunicator"
    return "vllm_fl_comm.communicator.FlagCXCommunicator"
