"""HTTP: an OpenAI-compatible server in front of a model."""
