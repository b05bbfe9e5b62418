"""Reading weights: GGUF files and Hugging Face folders of safetensors."""
