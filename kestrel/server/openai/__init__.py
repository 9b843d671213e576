"""The OpenAI API: chat, completions, embeddings, models and tokens, over the same engine as the native skills."""
