"""KV caches over an edge: out of paged blocks, through the connector, into the consumer's own blocks. Free of torch."""
