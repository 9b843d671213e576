"""`.gguf` files: config, tokenizer, chat template and weights in one, read as the hub has them."""
