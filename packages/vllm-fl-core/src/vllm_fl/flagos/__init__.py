"""The backend of kind flagos: this project's own Triton kernels, and FlagGems where it is installed.

Importing this package, or registering its implementations, loads neither torch nor Triton nor FlagGems.
"""
