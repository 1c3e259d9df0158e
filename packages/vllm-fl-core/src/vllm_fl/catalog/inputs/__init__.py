"""Input generators of the operators: shapes regular, odd, large and empty, strides other than contiguous.

Every generator takes an :class:`~vllm_fl.catalog.InputMaker` and yields :class:`~vllm_fl.catalog.Case` objects; with
the same seed the numbers are the same for every dtype, up to rounding. Arguments that an operator only writes hold
numbers that no correct result has, so that what is left out shows. A sweep of one operator takes well under a second
on a CPU.
"""
