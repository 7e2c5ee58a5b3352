"""Where the bytes lie: layout, arenas, cold tiers, and the movers between them."""
