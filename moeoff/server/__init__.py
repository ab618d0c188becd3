"""The HTTP server: llama-server's engine in this process, with our expert buffer."""
