"""What is cached: prefix hashes, the block pool, the prefix index, block tables, policies, the store."""
