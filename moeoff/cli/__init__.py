"""What a person types: one file for each command."""
