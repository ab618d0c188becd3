"""What may be spent: memory, and loss of quality. Numbers in, decisions out; nothing here loads or runs a model."""
