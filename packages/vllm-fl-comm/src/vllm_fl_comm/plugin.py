"""What this distribution declares to vllm-fl under the entry-point group ``vllm_fl.communicators``."""

from __future__ import annotations

from vllm_fl.plugins import CommunicatorPlugin

from .flagcx.library import PATH_ENV, load

PLUGIN = CommunicatorPlugin(
    name="flagcx",
    communicator="vllm_fl_comm.plugin:communicator",
    status="vllm_fl_comm.status:status",
    variables=(PATH_ENV,),
)


def communicator(device_type: str) -> str:
    """Path of the communicator class for devices of a torch device type.

    Raises:
        FlagCXLoadError: FlagCX cannot be loaded: the start must not go on with another library.
        ConfigError: settings of the communication contradict one another.
    """
    from .settings import comm_settings

    comm_settings()
    load()
    # vLLM captures graphs only where the communicator is a CudaCommunicator.
    if device_type == "cuda":
        return "vllm_fl_comm.cuda.FlagCXCudaCommunicator"
    return "vllm_fl_comm.communicator.FlagCXCommunicator"
