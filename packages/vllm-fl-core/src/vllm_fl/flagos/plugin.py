"""What core declares about its own backend under the entry-point group ``vllm_fl.backends``."""

from __future__ import annotations

from vllm_fl.dispatch.types import BackendImplKind
from vllm_fl.plugins import BackendPlugin

#: It brings operators and no platform: whether they can run is asked operator by operator.
PLUGIN = BackendPlugin(name="flagos", kind=BackendImplKind.DEFAULT, register="vllm_fl.flagos.register:register")
