"""Import paths that backends written for vllm-plugin-FL use."""
