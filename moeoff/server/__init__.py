"""HTTP: llama-server's engine in this process, its experts in our buffer."""
