"""What of vLLM's classes is replaced for CUDA devices, whatever the installed version has; no device is needed."""

from __future__ import annotations

import inspect
import re

import pytest

torch = pytest.importorskip("torch", reason="the communicator needs PyTorch")
pytest.importorskip("vllm", reason="the communicator extends vLLM's")


def test_the_backend_of_torch_is_used_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_fl_comm.plugin import dist_backend

    assert dist_backend("cuda") is None
    monkeypatch.setattr(torch.distributed.Backend, "backend_list", ["gloo", "flagcx"])
    assert dist_backend("cuda") == "flagcx"
    assert dist_backend("cpu") is None
    monkeypatch.setenv("FLAGCX_CUSTOM_OP_ENABLE", "1")
    assert dist_backend("cuda") is None


def test_between_vendors_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_fl_comm import devices
    from vllm_fl_comm.errors import CommunicationError
    from vllm_fl_comm.policy import NOT_CAPTURABLE

    stream = devices.stream_outside_graphs(torch.device("cpu"))
    assert stream() == 0
    monkeypatch.setattr(devices, "is_capturing", lambda device: True)
    with pytest.raises(CommunicationError) as caught:
        stream()
    assert str(caught.value) == NOT_CAPTURABLE


def test_no_method_of_vllm_s_class_is_left_that_needs_vllm_s_libraries() -> None:
    """Whatever the installed version's CudaCommunicator does over NCCL and the like, ours does or has replaced."""
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

    from vllm_fl_comm.cuda import FlagCXCudaCommunicator

    libraries = re.compile(r"\b(pynccl_comm|ca_comm|qr_comm|symm_mem_comm|fi_ar_comm|all2all_manager)\b")
    left = [
        name
        for name, method in vars(CudaCommunicator).items()
        if inspect.isfunction(method) and not name.startswith("_")
        if libraries.search(inspect.getsource(method)) and getattr(FlagCXCudaCommunicator, name) is method
    ]
    assert left == []


def test_every_attribute_that_vllm_reads_is_set() -> None:
    """Those that the constructor of the installed CudaCommunicator sets."""
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

    from vllm_fl_comm.cuda import FlagCXCudaCommunicator

    assigned = set(re.findall(r"self\.(\w+)(?:: [^=\n]+)? = ", inspect.getsource(CudaCommunicator.__init__)))
    assert assigned - set(vars(FlagCXCudaCommunicator)) == {"all2all_manager"}
