"""Text models of the Llama kind: Llama, Mistral, Qwen2 and Qwen3, one decoder with flags read from config.json."""
