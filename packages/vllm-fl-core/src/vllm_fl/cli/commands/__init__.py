"""The commands of ``vllm-fl``, one module each, with a function ``register(app: typer.Typer)``."""
