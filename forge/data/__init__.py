"""From text to batches: corpus, tokenizer, shards of token ids, sample order."""
