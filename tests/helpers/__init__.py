"""What several test files need. No test imports from another test."""
