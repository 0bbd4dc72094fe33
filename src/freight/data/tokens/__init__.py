"""From records to tokenised documents, once: processes, shards, cache, and books that add up."""
