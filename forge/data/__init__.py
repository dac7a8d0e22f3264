"""Text to batches: corpus, tokenizer, shards of token ids, order of the samples."""
