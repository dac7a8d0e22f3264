"""Chat: training on conversations, of which a model learns the answers (`tokenize.format: chat`)."""
