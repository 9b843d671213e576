"""Text models of the Llama kind (Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE), one decoder with flags of config.json."""
