"""The model: layers of GPT, Llama, Qwen, Mixtral and DeepSeek. It knows nothing of parallelism."""
