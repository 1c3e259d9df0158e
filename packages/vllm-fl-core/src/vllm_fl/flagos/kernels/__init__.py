"""Triton kernels, one module a family; each launcher has the arguments of the catalogue's operator of its name.

Rules of all of them: arithmetic in float32, results rounded once; what a launcher cannot take raises
NotImplementedError before anything is written; an empty input launches nothing; sizes that change from step to step are
run-time arguments, so that a kernel is compiled once a model shape; launch configurations follow fixed rules and the
keyword-only arguments, which dispatch knows as parameters, and nothing is tuned while a model runs; no launcher waits
for the device, so all can be captured into a graph. The tensors must be on the current device.
"""
