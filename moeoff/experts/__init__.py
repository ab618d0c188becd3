"""A model's other files: its experts again in other precisions (the sidecar), and measurements of it (the profile)."""
