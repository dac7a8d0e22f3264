"""What is checked on a GPU."""
